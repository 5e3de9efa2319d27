//! Which chunk of a stripe lies, when its chunks do not agree.
//!
//! With two or more parity chunks, one wrong chunk can be told: leave each out in turn, work it out
//! from the others, and see whether all the rest fits. At most one can be the answer, since two
//! stripes that are both right differ in at least three chunks then. (Of two wrong chunks this says
//! nothing, unless both are wrong by the very same bytes and there are two parity chunks only.)
//! With three or more copies, most of them decide. It is decided for each unit of rows by itself:
//! a drive that lies lies in sectors.

use std::ops::Range;

use smallvec::SmallVec;

use crate::layout::Layout;
use crate::parity::Kernels;

/// Rows that do not agree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    pub(crate) rows: Range<u32>,
    /// `None`: it cannot be told who lies.
    pub(crate) liar: Option<Liar>,
}

impl Mismatch {
    pub(crate) fn liar_position(&self) -> Option<u8> {
        self.liar.as_ref().map(|liar| liar.position)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Liar {
    pub(crate) position: u8,
    /// What its rows should hold.
    pub(crate) right: Vec<u8>,
}

/// Looks at all rows of a stripe, in units of `unit` bytes; `have` are the chunks of all positions.
/// Mismatches in order of rows; neighbours with the same liar are one.
pub(crate) fn locate(
    layout: &Layout,
    kernels: Kernels,
    have: &[&[u8]],
    unit: u32,
) -> Vec<Mismatch> {
    assert!(have.len() == usize::from(layout.positions()));
    let mut found: Vec<Mismatch> = Vec::new();
    for start in (0..layout.chunk_bytes).step_by(unit as usize) {
        let rows = start..start + unit;
        let of = |chunk: &&'_ [u8]| -> Vec<u8> { chunk[start as usize..][..unit as usize].into() };
        let units: SmallVec<[Vec<u8>; 16]> = have.iter().map(of).collect();
        let mismatches = if layout.is_mirrored() {
            among_copies(&units, layout.copies.into())
        } else {
            among_parity(layout, kernels, &units)
        };
        for liar in mismatches {
            add(&mut found, Mismatch { rows: rows.clone(), liar });
        }
    }
    found
}

/// Liars among the copies of each chunk; `None` where no copy has more than half of them with it.
fn among_copies(units: &[Vec<u8>], copies: usize) -> Vec<Option<Liar>> {
    let mut found = Vec::new();
    for (chunk, its) in units.chunks(copies).enumerate() {
        if its.iter().all(|copy| *copy == its[0]) {
            continue;
        }
        let votes = |copy: &&Vec<u8>| its.iter().filter(|other| other == copy).count();
        let Some(right) = its.iter().find(|copy| votes(copy) * 2 > copies) else {
            found.push(None);
            continue;
        };
        let liars = its.iter().enumerate().filter(|(_, copy)| *copy != right);
        found.extend(liars.map(|(copy, _)| {
            let position = position(chunk * copies + copy);
            Some(Liar { position, right: right.clone() })
        }));
    }
    found
}

/// One verdict, if the units do not agree.
fn among_parity(layout: &Layout, kernels: Kernels, units: &[Vec<u8>]) -> Vec<Option<Liar>> {
    let all = others_than(None, layout, kernels, units);
    if all.iter().all(|(position, right)| units[*position] == *right) {
        return Vec::new();
    }
    let suspects = if layout.parity < 2 { 0..0 } else { 0..units.len() };
    let liar = suspects.into_iter().find_map(|suspect| {
        let mut others = others_than(Some(suspect), layout, kernels, units);
        let own = others.iter().position(|(position, _)| *position == suspect)?;
        let right = others.swap_remove(own).1;
        let fits = others.iter().all(|(position, right)| units[*position] == *right);
        fits.then(|| Liar { position: position(suspect), right })
    });
    vec![liar]
}

/// What all other positions should hold if the first `k` tell the truth, the suspect left out.
fn others_than(
    suspect: Option<usize>,
    layout: &Layout,
    kernels: Kernels,
    units: &[Vec<u8>],
) -> Vec<(usize, Vec<u8>)> {
    let (k, m) = (usize::from(layout.data), usize::from(layout.parity));
    let trusted = (0..k + m).filter(|position| Some(*position) != suspect).take(k);
    let present: SmallVec<[(usize, &[u8]); 16]> =
        trusted.map(|position| (position, units[position].as_slice())).collect();
    let is_trusted = |position: &usize| present.iter().any(|(its, _)| its == position);
    let mut worked_out: Vec<(usize, Vec<u8>)> = (0..k + m)
        .filter(|position| !is_trusted(position))
        .map(|position| (position, vec![0; units[position].len()]))
        .collect();
    let mut missing: SmallVec<[(usize, &mut [u8]); 8]> =
        worked_out.iter_mut().map(|(position, bytes)| (*position, bytes.as_mut_slice())).collect();
    kernels.reconstruct(k, m, &present, &mut missing).expect("k chunks are enough");
    drop(missing);
    worked_out
}

fn position(index: usize) -> u8 {
    u8::try_from(index).expect("at most 64 positions")
}

fn add(found: &mut Vec<Mismatch>, next: Mismatch) {
    let mut same = found.iter_mut().filter(|its| its.liar_position() == next.liar_position());
    match same.next_back().filter(|last| last.rows.end >= next.rows.start) {
        Some(last) => {
            // Several chunks' copies may be undecided in the same rows.
            let grows = last.rows.end < next.rows.end;
            last.rows.end = next.rows.end;
            if let (Some(liar), Some(more), true) = (&mut last.liar, next.liar, grows) {
                liar.right.extend(more.right);
            }
        }
        None => found.push(next),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: wherever one chunk lies, and only then, it is named and its true bytes are known.
    //! Method: random stripes of every level and width; every position lies in turn, alone and
    //! beside another.

    use ashlar_format::array_superblock::Level;
    use ashlar_reactor::prng::Prng;

    use super::*;
    use crate::layout::Shape;

    const CHUNK: u32 = 16 << 10;
    const UNIT: u32 = 512;

    fn layouts() -> Vec<Layout> {
        let mut all = Vec::new();
        for level in Level::ALL {
            for members in 2..=10 {
                for number in 0..=4 {
                    let shape = match level {
                        Level::Raid1 | Level::Raid10 => {
                            Shape { copies: number, ..Shape::default() }
                        }
                        Level::RaidNm => Shape { parity: number, ..Shape::default() },
                        Level::Raid50 | Level::Raid60 | Level::Raid70 => Shape::default(),
                        Level::Raid0 | Level::Raid5 | Level::Raid6 | Level::Raid7 => {
                            Shape::default()
                        }
                    };
                    all.extend(Layout::new(level, members, shape, CHUNK));
                }
            }
        }
        all.retain(Layout::is_redundant);
        all
    }

    fn stripe(layout: &Layout, prng: &mut Prng) -> Vec<Vec<u8>> {
        let mut chunks = Vec::new();
        for _ in 0..layout.data {
            let random = (0..CHUNK / 8).flat_map(|_| prng.next_u64().to_le_bytes());
            let random: Vec<u8> = random.collect();
            chunks.extend(std::iter::repeat_n(random, layout.copies.into()));
        }
        let mut parity = vec![vec![0; CHUNK as usize]; layout.parity.into()];
        let data: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        if layout.parity > 0 {
            Kernels::detect().encode(&data, &mut outputs);
        }
        chunks.extend(parity);
        chunks
    }

    fn found(layout: &Layout, chunks: &[Vec<u8>]) -> Vec<Mismatch> {
        let have: Vec<&[u8]> = chunks.iter().map(Vec::as_slice).collect();
        locate(layout, Kernels::detect(), &have, UNIT)
    }

    fn can_tell(layout: &Layout) -> bool {
        layout.parity >= 2 || layout.copies >= 3
    }

    /// Other bytes in these rows of one chunk.
    fn lie(chunk: &mut [u8], rows: &Range<u32>, prng: &mut Prng) {
        for byte in &mut chunk[rows.start as usize..rows.end as usize] {
            *byte ^= 1 + prng.below(255).to_le_bytes()[0];
        }
    }

    #[test]
    fn one_liar_is_found_wherever_it_can_be() {
        let mut prng = Prng::from_seed(1);
        for layout in layouts() {
            let chunks = stripe(&layout, &mut prng);
            assert_eq!(found(&layout, &chunks), [], "{layout:?}");
            for position in 0..layout.positions() {
                // One byte; some units across a border of none.
                for (wrong, rows) in [(700..701, 512..1024), (4000..5000, 3584..5120)] {
                    let mut lying = chunks.clone();
                    let chunk = &mut lying[usize::from(position)];
                    lie(chunk, &wrong, &mut prng);
                    let right = &chunks[usize::from(position)];
                    let right = right[rows.start as usize..rows.end as usize].to_vec();
                    let liar = can_tell(&layout).then_some(Liar { position, right });
                    assert_eq!(found(&layout, &lying), [Mismatch { rows, liar }], "{layout:?}");
                }
            }
        }
    }

    #[test]
    fn of_two_liars_in_the_same_rows_no_other_is_accused() {
        let mut prng = Prng::from_seed(2);
        for layout in layouts() {
            let chunks = stripe(&layout, &mut prng);
            for first in 0..layout.positions() {
                for second in 0..first {
                    let mut lying = chunks.clone();
                    for position in [first, second] {
                        lie(&mut lying[usize::from(position)], &(0..512), &mut prng);
                    }
                    for mismatch in found(&layout, &lying) {
                        let Some(liar) = mismatch.liar else { continue };
                        assert!(layout.is_mirrored(), "{layout:?}: {liar:?} is accused");
                        assert!([first, second].contains(&liar.position), "{layout:?}");
                        assert!(liar.right == chunks[usize::from(liar.position)][..512]);
                    }
                }
            }
        }
    }

    #[test]
    fn liars_in_different_rows_are_found_each() {
        let mut prng = Prng::from_seed(3);
        for layout in layouts().into_iter().filter(can_tell) {
            let chunks = stripe(&layout, &mut prng);
            let last = layout.positions() - 1;
            let mut lying = chunks;
            lie(&mut lying[0], &(0..512), &mut prng);
            lie(&mut lying[usize::from(last)], &(512..1024), &mut prng);
            let liars: Vec<Option<u8>> =
                found(&layout, &lying).iter().map(Mismatch::liar_position).collect();
            assert_eq!(liars, [Some(0), Some(last)], "{layout:?}");
        }
    }
}
