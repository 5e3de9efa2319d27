//! Which present chunks to read, and with which factors, to recompute lost ones.
//!
//! Each parity chunk is an equation: its bytes are the sum of `factor(parity, i)` * D_i. As many
//! equations as there are unknown data chunks are solved here, on factors alone; what comes out is
//! a row of factors for each lost chunk, with which a kernel sums the present ones.
//!
//! Invariant: a plan reads exactly `k` chunks, and these determine the stripe.

use smallvec::SmallVec;

use super::gf256::{self, inverse, multiply};
use super::{CHUNKS_MAX, DATA_CHUNKS_MAX, NotEnough, PARITY_CHUNKS_MAX};

/// Marks a chunk id that is not among the present ones.
const ABSENT: u8 = 255;
const _: () = assert!(CHUNKS_MAX <= ABSENT as usize);
const _: () = assert!(DATA_CHUNKS_MAX < gf256::ORDER);

/// A byte for each chunk of the widest stripe.
type Row = [u8; CHUNKS_MAX];
/// Factors of the unknown data chunks in the equations; the rows and columns in use come first.
type Square = [[u8; PARITY_CHUNKS_MAX]; PARITY_CHUNKS_MAX];
type UpToParity = SmallVec<[usize; PARITY_CHUNKS_MAX]>;

/// How to recompute the missing chunks: output o is the sum of `row(o)[s]` * source s.
pub(super) struct Recovery {
    source_count: usize,
    /// Where in the caller's list of present chunks each source is; in order of chunk ids.
    positions: Row,
    rows: [Row; PARITY_CHUNKS_MAX],
}

impl Recovery {
    pub(super) fn positions(&self) -> impl Iterator<Item = usize> {
        self.positions[..self.source_count].iter().map(|position| usize::from(*position))
    }

    pub(super) fn row(&self, output: usize) -> &[u8] {
        &self.rows[output][..self.source_count]
    }

    /// Is the output a plain sum? It is for a data chunk recomputed from P, and for P.
    pub(super) fn is_sum(&self, output: usize) -> bool {
        self.row(output).iter().all(|factor| *factor == 1)
    }
}

/// The factor of data chunk `index` in parity chunk number `parity`: 1 in P, 2^index in Q.
///
/// Such powers can be solved for any losses only up to two parity chunks; more need other factors
/// (J. S. Plank and Y. Ding, "Note: Correction to the 1997 Tutorial on Reed-Solomon Coding").
pub(super) fn factor(parity: usize, index: usize) -> u8 {
    assert!(parity < PARITY_CHUNKS_MAX);
    gf256::power(parity * index)
}

/// Decides how to recompute the chunks `missing` of a stripe of `k` data and `m` parity chunks
/// from those `present`. All are chunk ids.
pub(super) fn plan(
    k: usize,
    m: usize,
    present: impl Iterator<Item = usize>,
    missing: impl ExactSizeIterator<Item = usize>,
) -> Result<Recovery, NotEnough> {
    assert!((1..=DATA_CHUNKS_MAX).contains(&k));
    assert!(m <= PARITY_CHUNKS_MAX);
    let mut present_count: u8 = 0;
    let mut positions = [ABSENT; CHUNKS_MAX];
    for id in present {
        assert!(id < k + m, "chunk {id} in a stripe of {k}+{m}");
        assert!(positions[id] == ABSENT, "chunk {id} is given twice");
        positions[id] = present_count;
        present_count += 1;
    }
    if usize::from(present_count) < k {
        return Err(NotEnough);
    }
    assert!(missing.len() <= k + m - usize::from(present_count), "a chunk is missing twice");
    let system = System::new(k, m, |id| positions[id] != ABSENT);
    let mut recovery = Recovery {
        source_count: k,
        positions: [0; CHUNKS_MAX],
        rows: [[0; CHUNKS_MAX]; PARITY_CHUNKS_MAX],
    };
    for (position, source) in recovery.positions.iter_mut().zip(system.sources()) {
        *position = positions[source];
    }
    for (row, id) in recovery.rows.iter_mut().zip(missing) {
        assert!(id < k + m, "chunk {id} in a stripe of {k}+{m}");
        assert!(positions[id] == ABSENT, "chunk {id} is present, or missing twice");
        positions[id] = 0;
        for (value, source) in row.iter_mut().zip(system.sources()) {
            *value = system.share(id, source);
        }
    }
    Ok(recovery)
}

/// The unknown data chunks, and just as many equations.
struct System {
    k: usize,
    /// Ids of the data chunks that are not present.
    unknown: UpToParity,
    /// Numbers of the parity chunks to solve with.
    equations: UpToParity,
    /// Unknown u is the sum of `solution[u][e]` * (equation e less its known chunks).
    solution: Square,
}

impl System {
    fn new(k: usize, m: usize, is_present: impl Fn(usize) -> bool) -> System {
        let unknown: UpToParity = (0..k).filter(|id| !is_present(*id)).collect();
        // P comes first: without factors, its sum is the cheapest.
        let equations: UpToParity =
            (0..m).filter(|parity| is_present(k + parity)).take(unknown.len()).collect();
        assert!(equations.len() == unknown.len(), "at least k chunks are present");
        let mut factors = Square::default();
        for (row, parity) in factors.iter_mut().zip(&equations) {
            for (value, index) in row.iter_mut().zip(&unknown) {
                *value = factor(*parity, *index);
            }
        }
        let solution = invert(factors, unknown.len());
        System { k, unknown, equations, solution }
    }

    /// Ids of the chunks that a recovery reads, ascending.
    fn sources(&self) -> impl Iterator<Item = usize> {
        let known = (0..self.k).filter(|id| !self.unknown.contains(id));
        known.chain(self.equations.iter().map(|parity| self.k + parity))
    }

    /// The factor of chunk `source` in lost chunk `output`; both are chunk ids.
    fn share(&self, output: usize, source: usize) -> u8 {
        if output < self.k {
            let unknown = self.unknown.iter().position(|id| *id == output);
            return self.share_in_unknown(unknown.expect("a lost chunk is unknown"), source);
        }
        // Parity is encoded anew, from known chunks and from what the unknown ones are made of.
        let parity = output - self.k;
        let mut share = if source < self.k { factor(parity, source) } else { 0 };
        for (unknown, id) in self.unknown.iter().enumerate() {
            share ^= multiply(factor(parity, *id), self.share_in_unknown(unknown, source));
        }
        share
    }

    fn share_in_unknown(&self, unknown: usize, source: usize) -> u8 {
        let mut share = 0;
        for (parity, weight) in self.equations.iter().zip(self.solution[unknown]) {
            if source < self.k {
                share ^= multiply(weight, factor(*parity, source));
            } else if source == self.k + parity {
                share ^= weight;
            }
        }
        share
    }
}

/// The inverse of the first `size` rows and columns, by Gauss-Jordan elimination.
///
/// No rows are swapped, as no pivot can be zero: the code recovers any losses, so every square part
/// of its factors is invertible. If that were false, `inverse` would panic.
fn invert(mut square: Square, size: usize) -> Square {
    let mut inverted = Square::default();
    for (index, row) in inverted.iter_mut().enumerate() {
        row[index] = 1;
    }
    for column in 0..size {
        let scale = inverse(square[column][column]);
        scale_row(&mut square[column], scale);
        scale_row(&mut inverted[column], scale);
        let (pivot_left, pivot_right) = (square[column], inverted[column]);
        for row in (0..size).filter(|row| *row != column) {
            let multiple = square[row][column];
            add_multiple(&mut square[row], multiple, &pivot_left);
            add_multiple(&mut inverted[row], multiple, &pivot_right);
        }
    }
    inverted
}

fn scale_row(row: &mut [u8], factor: u8) {
    for value in row {
        *value = multiply(*value, factor);
    }
}

fn add_multiple(row: &mut [u8], factor: u8, other: &[u8]) {
    for (value, addend) in row.iter_mut().zip(other) {
        *value ^= multiply(factor, *addend);
    }
}
