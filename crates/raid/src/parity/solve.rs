//! Which present chunks to read, and with which factors, to recompute lost ones.
//!
//! Each parity chunk is an equation: the sum of it and of all data chunks times their factors is
//! zero. As many equations as there are unknown data chunks are solved here, on factors alone; what
//! comes out is a row of factors for each lost chunk, with which a kernel sums the present ones.
//!
//! Invariant: a plan reads exactly `k` chunks, and these determine the stripe.

use super::code::{FACTORS, Factors};
use super::gf256::{inverse, times};
use super::{CHUNKS_MAX, NotEnough, PARITY_CHUNKS_MAX};

/// Chunk ids as bits.
type Ids = u64;
const _: () = assert!(CHUNKS_MAX == Ids::BITS as usize);

/// A factor for each chunk of the widest stripe.
type Row = [u8; CHUNKS_MAX];

/// How to recompute the missing chunks: output o is the sum of `factors()[s][o]` * source s.
pub(super) struct Recovery {
    /// Where in the caller's list of present chunks each source is; in order of chunk ids.
    positions: [u8; CHUNKS_MAX],
    factors: [Factors; CHUNKS_MAX],
    source_count: usize,
}

impl Recovery {
    pub(super) fn positions(&self) -> impl Iterator<Item = usize> {
        self.positions[..self.source_count].iter().map(|position| usize::from(*position))
    }

    pub(super) fn factors(&self) -> &[Factors] {
        &self.factors[..self.source_count]
    }
}

/// Decides how to recompute the chunks `missing` of a stripe of `k` data and `m` parity chunks
/// from those `present`. All are chunk ids.
pub(super) fn plan(
    k: usize,
    m: usize,
    present: impl Iterator<Item = usize>,
    missing: impl ExactSizeIterator<Item = usize>,
) -> Result<Recovery, NotEnough> {
    assert!(k >= 1);
    assert!(m <= PARITY_CHUNKS_MAX);
    assert!(k + m <= CHUNKS_MAX);
    let mut positions = [0; CHUNKS_MAX];
    let mut given: Ids = 0;
    let mut count: u8 = 0;
    for id in present {
        assert!(id < k + m, "chunk {id} in a stripe of {k}+{m}");
        assert!(given & 1 << id == 0, "chunk {id} is given twice");
        given |= 1 << id;
        positions[id] = count;
        count += 1;
    }
    if usize::from(count) < k {
        return Err(NotEnough);
    }
    assert!(missing.len() <= k + m - usize::from(count), "a chunk is missing twice");
    let data: Ids = Ids::MAX >> (CHUNKS_MAX - k);
    let unknown = data & !given;
    // P comes first: without factors, its sum is the cheapest.
    let mut equations: Ids = 0;
    for id in each(given & !data).take(unknown.count_ones() as usize) {
        equations |= 1 << id;
    }
    let solved = solve(k, unknown, equations);

    let sources = data & given | equations;
    let mut recovery = Recovery {
        positions: [0; CHUNKS_MAX],
        factors: [[0; PARITY_CHUNKS_MAX]; CHUNKS_MAX],
        source_count: k,
    };
    for (position, id) in recovery.positions.iter_mut().zip(each(sources)) {
        *position = positions[id];
    }
    for (output, id) in missing.enumerate() {
        assert!(id < k + m, "chunk {id} in a stripe of {k}+{m}");
        assert!(given & 1 << id == 0, "chunk {id} is present, or missing twice");
        given |= 1 << id;
        let encoded;
        let by_id = match each(unknown).position(|unknown| unknown == id) {
            Some(index) => &solved[index],
            None => {
                encoded = encode_without(k, id, unknown, &solved);
                &encoded
            }
        };
        for (factors, source) in recovery.factors.iter_mut().zip(each(sources)) {
            factors[output] = by_id[source];
        }
    }
    Ok(recovery)
}

fn each(mut ids: Ids) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let id = ids.trailing_zeros();
        ids &= ids.wrapping_sub(1);
        (id < Ids::BITS).then_some(id as usize)
    })
}

/// For each unknown chunk the factors, by chunk id, of the sum that it is: Gauss-Jordan elimination
/// of the `unknown` data chunks from the equations of the parity chunks `equations`.
///
/// No rows are swapped, as no pivot can be zero: the code recovers any losses, so every square part
/// of its factors is invertible. If that were false, `inverse` would panic.
fn solve(k: usize, unknown: Ids, equations: Ids) -> [Row; PARITY_CHUNKS_MAX] {
    assert!(equations.count_ones() == unknown.count_ones(), "at least k chunks are present");
    let mut rows = [[0; CHUNKS_MAX]; PARITY_CHUNKS_MAX];
    for (row, id) in rows.iter_mut().zip(each(equations)) {
        *row = equation(k, id);
    }
    let count = equations.count_ones() as usize;
    // Behind the last equation all is zero.
    let end = (Ids::BITS - equations.leading_zeros()) as usize;
    for (index, column) in each(unknown).enumerate() {
        let pivot = &mut rows[index][..end];
        if pivot[column] != 1 {
            let scale = times(inverse(pivot[column]));
            pivot.iter_mut().for_each(|factor| *factor = scale(*factor));
        }
        for other in (0..count).filter(|other| *other != index) {
            let [pivot, row] = rows.get_disjoint_mut([index, other]).expect("two rows");
            eliminate(row, column, &pivot[..end]);
        }
    }
    rows
}

/// Parity chunk `id` is encoded anew, from known chunks and from what the unknown ones are made of.
fn encode_without(k: usize, id: usize, unknown: Ids, solved: &[Row]) -> Row {
    let mut row = equation(k, id);
    for (column, solved) in each(unknown).zip(solved) {
        eliminate(&mut row, column, solved);
    }
    row
}

/// What sums to zero, by chunk id: parity chunk `id`, and data chunks times their factors.
fn equation(k: usize, id: usize) -> Row {
    let mut row = [0; CHUNKS_MAX];
    for (value, factors) in row[..k].iter_mut().zip(&FACTORS) {
        *value = factors[id - k];
    }
    row[id] = 1;
    row
}

/// Subtracts the multiple of `pivot`, which has 1 in `column`, that leaves 0 there.
fn eliminate(row: &mut Row, column: usize, pivot: &[u8]) {
    assert!(pivot[column] == 1);
    let times = times(row[column]);
    for (value, other) in row.iter_mut().zip(pivot) {
        *value ^= times(*other);
    }
}
