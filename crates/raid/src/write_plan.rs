//! Pure decisions about a write: which bands of rows and chunks it is made of, and what must
//! be read to keep parity right.

use std::ops::Range;

use smallvec::SmallVec;

use crate::layout::Positions;

/// Rows in which the same chunks are written. Parity of its rows is computed in one go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Band {
    pub rows: Range<u32>,
    /// Data chunks that are written, as bits.
    pub chunks: Positions,
}

/// Cuts what is written of one stripe, chunks and their rows, into bands of at most `rows_max`
/// rows, in order of rows.
///
/// ```text
///   chunk     0  1  2  3      rows 0–3:  chunks 1, 2
///   rows 0–3     █  █         rows 4–7:  chunks 0, 1, 2
///        4–7  █  █  █         rows 8–15: chunks 0, 1
///        8–15 █  █
/// ```
pub fn bands(written: &[(u8, Range<u32>)], rows_max: u32) -> SmallVec<[Band; 3]> {
    // Nearly every write.
    if let [(chunk, rows)] = written
        && (1..=rows_max).contains(&(rows.end - rows.start))
    {
        return SmallVec::from_iter([Band { rows: rows.clone(), chunks: 1 << chunk }]);
    }
    // Where rows begin and end, passed from the first to the last: a stripe may have thousands.
    let edges = written.iter().flat_map(|(c, rows)| [(rows.start, *c, 1), (rows.end, *c, -1)]);
    let mut edges: SmallVec<[(u32, u8, i32); 8]> = edges.collect();
    edges.sort_unstable();
    let mut written_here = [0; Positions::BITS as usize];
    let mut chunks: Positions = 0;
    let mut out: SmallVec<[Band; 3]> = SmallVec::new();
    for (at, (row, chunk, change)) in edges.iter().enumerate() {
        let count = &mut written_here[usize::from(*chunk)];
        *count += change;
        chunks = chunks & !(1 << chunk) | Positions::from(*count > 0) << chunk;
        let Some(rows) = edges.get(at + 1).map(|next| *row..next.0) else { break };
        match out.last_mut() {
            _ if rows.is_empty() => {}
            Some(last) if last.chunks == chunks && last.rows.end == rows.start => {
                last.rows.end = rows.end;
            }
            _ if chunks != 0 => out.push(Band { rows, chunks }),
            _ => {}
        }
    }
    out.into_iter().flat_map(|band| band.cut(rows_max)).collect()
}

impl Band {
    fn cut(self, rows_max: u32) -> impl Iterator<Item = Band> {
        let Band { rows, chunks } = self;
        let starts = rows.clone().step_by(rows_max as usize);
        starts.map(move |start| {
            let end = start.saturating_add(rows_max).min(rows.end);
            Band { rows: start..end, chunks }
        })
    }
}

/// What to read before parity can be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WritePlan {
    /// Every data chunk is written, or no parity is held: nothing is read.
    NoRead,
    /// Read the old data of the written chunks and the old parity; add the difference.
    ReadModifyWrite,
    /// Read the data chunks that are not written; compute parity anew.
    ReconstructWrite,
    /// Read any `k` positions, work the missing data out; compute parity anew.
    Decode,
    /// A block that is to be written could not be stored anywhere.
    Lost,
}

/// Positions of one band: what is written, what can be read, what can be written.
#[derive(Clone, Copy, Debug)]
pub struct Situation {
    pub data: u8,
    pub parity: u8,
    /// Data positions that are written.
    pub touched: Positions,
    pub readable: Positions,
    pub writable: Positions,
    /// Parity fits what stands beside it.
    pub agrees: bool,
}

/// Fewest reads wins; a tie goes to reconstruct-write, which does not trust old parity. In one
/// between the others the drives of parity, which are written, are read less to decode.
pub fn plan_write(s: Situation) -> WritePlan {
    if !is_storable(s) {
        return WritePlan::Lost;
    }
    let data = bits(0..s.data);
    let parity = bits(s.data..s.data + s.parity) & s.writable;
    let untouched = data & !s.touched;
    let missed = (s.touched & !s.writable).count_ones();
    if untouched == 0 || parity == 0 {
        return WritePlan::NoRead;
    }
    let modify_reads = s.touched | parity;
    let can_modify = s.agrees && missed == 0 && modify_reads & !s.readable == 0;
    let can_reconstruct = untouched & !s.readable == 0;
    let modify = can_modify.then(|| (modify_reads.count_ones(), WritePlan::ReadModifyWrite));
    let reconstruct =
        can_reconstruct.then(|| (untouched.count_ones(), WritePlan::ReconstructWrite));
    let enough = s.readable.count_ones() >= u32::from(s.data);
    let decode = enough.then(|| (u32::from(s.data), WritePlan::Decode));
    let choices = [reconstruct, decode, modify];
    choices.into_iter().flatten().min_by_key(|(reads, _)| *reads).map_or(WritePlan::Lost, |c| c.1)
}

/// Whether what is written can be read back afterwards. Parity that will be right can stand for as
/// many data chunks that are not stored. An unreadable chunk beside them counts too: parity has to
/// stand for that one as well.
pub fn is_storable(s: Situation) -> bool {
    let data = bits(0..s.data);
    let parity = bits(s.data..s.data + s.parity) & s.writable;
    let missed = (s.touched & !s.writable).count_ones();
    let dark = (data & !s.touched & !s.readable).count_ones();
    missed == 0 || missed + dark <= parity.count_ones()
}

/// The positions of a range as bits.
pub fn bits(range: Range<u8>) -> Positions {
    range.fold(0, |bits, position| bits | 1 << position)
}

/// The positions that are set, in order.
pub fn each(mut positions: Positions) -> impl Iterator<Item = u8> + Clone {
    std::iter::from_fn(move || {
        let first = u8::try_from(positions.trailing_zeros()).ok()?;
        positions &= positions.checked_sub(1)?;
        Some(first)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bands_cover_each_row_of_each_piece_once() {
        let shape = |written: &[(u8, Range<u32>)], max: u32| -> Vec<_> {
            bands(written, max).into_iter().map(|band| (band.rows, band.chunks)).collect()
        };
        assert_eq!(shape(&[(2, 4..8)], 99), [(4..8, 0b100)]);
        assert_eq!(
            shape(&[(0, 4..16), (1, 0..16), (2, 0..8)], 99),
            [(0..4, 0b110), (4..8, 0b111), (8..16, 0b011)]
        );
        assert_eq!(shape(&[(0, 12..16), (1, 0..4)], 99), [(0..4, 0b10), (12..16, 0b01)]);
        assert_eq!(shape(&[(0, 0..16), (1, 0..16)], 99), [(0..16, 0b11)]);
        let sequential = [(0, 0..8), (0, 8..16), (1, 0..8), (1, 8..16)];
        assert_eq!(shape(&sequential, 99), [(0..16, 0b11)]);
        assert_eq!(shape(&[(3, 0..20)], 8), [(0..8, 8), (8..16, 8), (16..20, 8)]);
        assert_eq!(shape(&[(1, 0..4), (4, 2..8)], 99), [(0..2, 2), (2..4, 18), (4..8, 16)]);
        // What a chunk has twice is written as long as one of them goes on.
        assert_eq!(shape(&[(1, 0..8), (1, 2..4), (1, 2..12)], 99), [(0..12, 2)]);
        assert_eq!(shape(&[(1, 4..4), (2, 0..8)], 99), [(0..8, 4)]);
    }

    #[test]
    fn bits_and_each_are_inverse() {
        assert_eq!(each(bits(3..6) | 1).collect::<Vec<_>>(), [0, 3, 4, 5]);
        assert_eq!(each(1 << 63).collect::<Vec<_>>(), [63]);
        assert_eq!(each(0).count(), 0);
    }

    /// Every case of up to 4+2: a plan reads only what can be read, and a write is refused only
    /// if a written block would be stored nowhere.
    #[test]
    fn all_situations() {
        for (data, parity) in [(2, 1), (4, 1), (2, 2), (4, 2)] {
            let all = bits(0..data + parity);
            for touched in 1..=bits(0..data) {
                for writable in 0..=all {
                    for unreadable in 0..=all {
                        let readable = writable & !unreadable;
                        let s = |agrees| Situation {
                            data,
                            parity,
                            touched,
                            readable,
                            writable,
                            agrees,
                        };
                        [false, true].into_iter().for_each(|agrees| check(s(agrees)));
                    }
                }
            }
        }
    }

    fn check(s: Situation) {
        let parity = bits(s.data..s.data + s.parity) & s.writable;
        let untouched = bits(0..s.data) & !s.touched;
        let missed = s.touched & !s.writable;
        match plan_write(s) {
            WritePlan::NoRead => {
                assert!(untouched == 0 || parity == 0, "{s:?}");
                assert!(missed.count_ones() <= parity.count_ones(), "{s:?}");
            }
            WritePlan::ReadModifyWrite => {
                let is_known = (s.touched | parity) & !s.readable == 0;
                assert!(s.agrees && is_known && missed == 0, "{s:?}");
            }
            WritePlan::ReconstructWrite => assert!(untouched & !s.readable == 0, "{s:?}"),
            WritePlan::Decode => {
                assert!(s.readable.count_ones() >= u32::from(s.data), "{s:?}");
            }
            WritePlan::Lost => {
                let dark = (untouched & !s.readable).count_ones();
                let nowhere = missed != 0 && missed.count_ones() + dark > parity.count_ones();
                let blind = dark > 0
                    && s.readable.count_ones() < u32::from(s.data)
                    && (missed != 0 || !s.agrees || (s.touched | parity) & !s.readable != 0);
                assert!(nowhere || blind, "{s:?}");
            }
        }
    }

    #[test]
    fn small_writes_choose_the_fewest_reads() {
        let plan = |data, touched| {
            let all = bits(0..data + 1);
            let agrees = true;
            plan_write(Situation { data, parity: 1, touched, readable: all, writable: all, agrees })
        };
        assert_eq!(plan(4, 0b0001), WritePlan::ReadModifyWrite); // 2 reads, not 3
        assert_eq!(plan(4, 0b0011), WritePlan::ReconstructWrite); // 2 reads, not 3
        assert_eq!(plan(3, 0b001), WritePlan::ReconstructWrite); // 2 reads each: the tie
        assert_eq!(plan(4, 0b1111), WritePlan::NoRead);
        let all = bits(0..7);
        let (readable, agrees) = (all & !0b0010, true);
        let (touched, writable) = (0b0001, readable);
        let s = Situation { data: 4, parity: 3, touched, readable, writable, agrees };
        assert_eq!(plan_write(s), WritePlan::Decode); // 4 reads each: the tie
        assert_eq!(plan_write(Situation { data: 5, ..s }), WritePlan::ReadModifyWrite);
    }
}
