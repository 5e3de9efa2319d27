//! Parity of a stripe: computing it, keeping it current, and recomputing lost chunks from it.
//!
//! A stripe has `k` data chunks D_0 .. D_(k-1) and up to two parity chunks, over GF(2^8) with
//! polynomial 0x11d (H. P. Anvin, "The mathematics of RAID-6"; the code of Linux md and ISA-L):
//!
//! ```text
//! P = sum of D_i          Q = sum of 2^i * D_i
//! ```
//!
//! Chunk ids: 0 .. k are data, k is P, k + 1 is Q. `Kernels` picks the instructions; which chunks
//! to read for a lost one is decided in `solve.rs`, without touching a byte of them. Both know the
//! code only as rows of factors, so that one with more parity chunks can join.
//!
//! Invariants: every kernel gives the same bytes; nothing allocates but `all_available`; a chunk is
//! never recomputed from fewer chunks than determine it.

mod gf256;
mod scalar;
mod solve;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(test)]
mod tests;

use smallvec::SmallVec;

/// Lengths of chunks, and of parts of them, in bytes are multiples of this.
pub const LENGTH_UNIT: usize = 512;

/// Data chunks in a stripe. 2^i is different for each i below 255; two ids go to parity.
pub const DATA_CHUNKS_MAX: usize = CHUNKS_MAX - PARITY_CHUNKS_MAX;

/// Parity chunks in a stripe.
pub const PARITY_CHUNKS_MAX: usize = 2;

/// Chunks in a stripe; an id fits a byte, and 255 is left over to say "none".
const CHUNKS_MAX: usize = 255;

/// An update goes over all parities piece by piece, so that the second finds the data in L1.
const UPDATE_PIECE: usize = 8 << 10;
const _: () = assert!(UPDATE_PIECE.is_multiple_of(LENGTH_UNIT));

/// Fewer chunks of the stripe are present than it has data chunks: what is lost stays lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("too few chunks of the stripe are left to recompute the missing ones")]
pub struct NotEnough;

/// The instructions to compute parity with. Chosen once at start, then passed by value.
///
/// Slices of one call have the same length, a multiple of `LENGTH_UNIT`, or the call panics. They
/// may lie anywhere; they are fastest at addresses that are multiples of 64.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels {
    /// Private, so that only `all_available` makes one: holding it proves that the CPU can.
    set: Set,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Set {
    Scalar,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "x86_64")]
    Avx512Gfni,
}

impl Set {
    /// The slowest first.
    const ALL: &[Set] = &[
        Set::Scalar,
        #[cfg(target_arch = "x86_64")]
        Set::Avx2,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512Gfni,
    ];

    /// Does the CPU report the features that the functions of this set are compiled for?
    fn is_available(self) -> bool {
        match self {
            Set::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Gfni => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("gfni")
            }
        }
    }
}

/// Calls one function of the kernel file that belongs to `$set`.
macro_rules! dispatch {
    ($set:expr, $function:ident($($argument:expr),*)) => {
        match $set {
            Set::Scalar => scalar::$function($($argument),*),
            #[cfg(target_arch = "x86_64")]
            // SAFETY: avx2 is there: `all_available` alone makes a `Kernels`, and it has asked.
            Set::Avx2 => unsafe { avx2::$function($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: avx512f and gfni are there: `all_available` alone makes a `Kernels`, and it
            // has asked.
            Set::Avx512Gfni => unsafe { avx512::$function($($argument),*) },
        }
    };
}

impl Kernels {
    /// The fastest kernels that this CPU can run.
    pub fn detect() -> Kernels {
        let available = Kernels::all_available();
        available[available.len() - 1]
    }

    /// All kernels that this CPU can run, the slowest first; the scalar ones always.
    pub fn all_available() -> Vec<Kernels> {
        let available = Set::ALL.iter().filter(|set| set.is_available());
        available.map(|set| Kernels { set: *set }).collect()
    }

    /// For logs and benchmarks.
    pub fn name(self) -> &'static str {
        match self.set {
            Set::Scalar => "scalar",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Gfni => "avx512-gfni",
        }
    }

    /// Overwrites `parity`, which is P or P and Q, with the parity of all data chunks in order.
    pub fn encode(self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert!(!data.is_empty());
        assert!(data.len() <= DATA_CHUNKS_MAX);
        let length = data[0].len();
        assert_lengths(length, data.iter().map(|chunk| chunk.len()));
        assert_lengths(length, parity.iter().map(|chunk| chunk.len()));
        match parity {
            [p] => dispatch!(self.set, sum(data, p)),
            [p, q] => dispatch!(self.set, sum_pq(data, p, q)),
            _ => panic!("{} parity chunks: only P, or P and Q, can be encoded", parity.len()),
        }
    }

    /// Makes parity current after data chunk `index`, or the same part of each chunk, changed from
    /// `old` to `new`: read-modify-write.
    ///
    /// `parity` pairs a parity chunk's number, 0 for P and 1 for Q, with its bytes; one whose
    /// member is missing is not given.
    pub fn update(self, index: usize, old: &[u8], new: &[u8], parity: &mut [(usize, &mut [u8])]) {
        assert!(index < DATA_CHUNKS_MAX);
        let length = old.len();
        assert_lengths(length, [new.len()]);
        assert_lengths(length, parity.iter().map(|(_, bytes)| bytes.len()));
        for start in (0..length).step_by(UPDATE_PIECE) {
            let piece = start..length.min(start + UPDATE_PIECE);
            let change = [&old[piece.clone()], &new[piece.clone()]];
            for (number, bytes) in parity.iter_mut() {
                let factor = solve::factor(*number, index);
                dispatch!(self.set, mul_add(factor, change, &mut bytes[piece.clone()]));
            }
        }
    }

    /// Recomputes the `missing` chunks, data or parity, of a stripe of `k` data and `m` parity
    /// chunks from the `present` ones. Both pair a chunk id with its bytes, in any order; a chunk
    /// in neither is not read and not written.
    ///
    /// Any `k` present chunks determine the others; if there are fewer, nothing is written.
    pub fn reconstruct(
        self,
        k: usize,
        m: usize,
        present: &[(usize, &[u8])],
        missing: &mut [(usize, &mut [u8])],
    ) -> Result<(), NotEnough> {
        let Some((_, first)) = missing.first() else { return Ok(()) };
        let length = first.len();
        assert_lengths(length, present.iter().map(|(_, bytes)| bytes.len()));
        assert_lengths(length, missing.iter().map(|(_, bytes)| bytes.len()));
        let present_ids = present.iter().map(|(id, _)| *id);
        let missing_ids = missing.iter().map(|(id, _)| *id);
        let recovery = solve::plan(k, m, present_ids, missing_ids)?;

        // Inline for all chunks of the widest stripe: it never allocates.
        let mut sources = SmallVec::<[&[u8]; CHUNKS_MAX]>::new();
        sources.extend(recovery.positions().map(|position| present[position].1));
        match missing {
            [(_, output)] if recovery.is_sum(0) => dispatch!(self.set, sum(&sources, output)),
            [(_, output)] => {
                dispatch!(self.set, combine(&sources, [recovery.row(0)], [*output]));
            }
            [(_, first), (_, second)] => {
                let rows = [recovery.row(0), recovery.row(1)];
                dispatch!(self.set, combine(&sources, rows, [*first, *second]));
            }
            _ => unreachable!("two parity chunks recover two chunks, and `plan` refused more"),
        }
        Ok(())
    }

    /// `into` += `factor` * `from`: the step of which every code over this field is made.
    pub fn mul_add(self, factor: u8, from: &[u8], into: &mut [u8]) {
        assert_lengths(from.len(), [into.len()]);
        dispatch!(self.set, mul_add(factor, [from], into));
    }

    /// `into` ^= `from`.
    pub fn xor_into(self, from: &[u8], into: &mut [u8]) {
        self.mul_add(1, from, into);
    }
}

/// Kernels step over whole blocks: a length that is not one would leave its tail unprotected.
fn assert_lengths(expected: usize, lengths: impl IntoIterator<Item = usize>) {
    assert!(
        expected.is_multiple_of(LENGTH_UNIT),
        "{expected} bytes is not whole units of {LENGTH_UNIT}"
    );
    for length in lengths {
        assert!(length == expected, "slices of {expected} and of {length} bytes in one call");
    }
}
