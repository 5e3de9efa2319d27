//! Parity of a stripe: computing it, keeping it current, and recomputing lost chunks from it.
//!
//! A stripe has `k` data chunks D_0 .. D_(k-1) and `m` parity chunks, up to 8, and up to 64 in all,
//! over GF(2^8) with polynomial 0x11d. Parity chunk r is a sum of data chunks times factors that
//! are the same whatever `k` and `m` are, so the first parity chunks of a wider code are those of a
//! narrower one:
//!
//! ```text
//! r = 0: P = sum of D_i
//! r = 1: Q = sum of 2^i * D_i
//! r > 1:     sum of 2^i / (1 + 2^(i + r - 1)) * D_i
//! ```
//!
//! P and Q are those of RAID 6 (H. P. Anvin, "The mathematics of RAID-6"; Linux md and ISA-L).
//! Powers could go on with 4^i, but not to a fourth parity chunk: some losses could not be solved
//! (J. S. Plank and Y. Ding, "Note: Correction to the 1997 Tutorial on Reed-Solomon Coding", 2005).
//! So the rows from Q on are a Cauchy matrix, 1 / (x_r + y_i) with y_i = 2^-i, x_1 = 0 and x_r =
//! 2^(r-1) for the others, all different; and P is its row for an infinite x. Every square part of
//! such a matrix is invertible (R. M. Roth and A. Lempel, "On MDS codes via Cauchy matrices", IEEE
//! Transactions on Information Theory 35, 1989), so any `m` losses can be solved.
//!
//! Chunk ids: 0 .. k are data, k + r is parity chunk r. `Kernels` picks the instructions; which
//! chunks to read for lost ones is decided in `solve.rs`, without touching a byte of them.
//!
//! Invariants: every kernel gives the same bytes; nothing allocates but `all_available`; a chunk is
//! never recomputed from fewer chunks than determine it.

mod code;
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

use code::{FACTORS, Factors};

/// Lengths of chunks, and of parts of them, in bytes are multiples of this.
pub const LENGTH_UNIT: usize = 512;

/// Chunks in a stripe, data and parity.
pub const CHUNKS_MAX: usize = 64;

/// Parity chunks in a stripe.
pub const PARITY_CHUNKS_MAX: usize = 8;

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
    Avx2Streaming,
    #[cfg(target_arch = "x86_64")]
    Avx512Gfni,
    #[cfg(target_arch = "x86_64")]
    Avx512GfniPrefetch,
    #[cfg(target_arch = "x86_64")]
    Avx512GfniPrefetchL2,
}

impl Set {
    /// The slowest first, as a rule.
    const ALL: &[Set] = &[
        Set::Scalar,
        #[cfg(target_arch = "x86_64")]
        Set::Avx2,
        #[cfg(target_arch = "x86_64")]
        Set::Avx2Streaming,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512Gfni,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512GfniPrefetch,
        #[cfg(target_arch = "x86_64")]
        Set::Avx512GfniPrefetchL2,
    ];

    /// Does the CPU report the features that the functions of this set are compiled for?
    fn is_available(self) -> bool {
        match self {
            Set::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 | Set::Avx2Streaming => is_x86_feature_detected!("avx2"),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Gfni | Set::Avx512GfniPrefetch | Set::Avx512GfniPrefetchL2 => {
                is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("gfni")
            }
        }
    }

    /// Is it faster here than the one before it?
    fn is_worth_it(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            // Only beside memory; what an array works on was just copied or read.
            Set::Avx2Streaming => false,
            #[cfg(target_arch = "x86_64")]
            Set::Avx512GfniPrefetch => is_made_by(b"GenuineIntel"),
            #[cfg(target_arch = "x86_64")]
            Set::Avx512GfniPrefetchL2 => is_zen_4(),
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 | Set::Avx512Gfni => true,
            Set::Scalar => true,
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn is_made_by(maker: &[u8; 12]) -> bool {
    let vendor = std::arch::x86_64::__cpuid(0);
    [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).as_flattened() == maker
}

/// Of those that know AVX-512: family 0x19, which is told as 0xf and 0xa more (AMD64 APM volume 3,
/// CPUID function 1).
#[cfg(target_arch = "x86_64")]
fn is_zen_4() -> bool {
    let signature = std::arch::x86_64::__cpuid(1).eax;
    is_made_by(b"AuthenticAMD") && (signature >> 8 & 0xf, signature >> 20 & 0xff) == (0xf, 0xa)
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
            // SAFETY: the same.
            Set::Avx2Streaming => unsafe { avx2::streaming::$function($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: avx512f and gfni are there: `all_available` alone makes a `Kernels`, and it
            // has asked.
            Set::Avx512Gfni => unsafe { avx512::plain::$function($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the same.
            Set::Avx512GfniPrefetch => unsafe { avx512::prefetch::$function($($argument),*) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the same.
            Set::Avx512GfniPrefetchL2 => unsafe { avx512::prefetch_l2::$function($($argument),*) },
        }
    };
}

impl Kernels {
    /// The fastest kernels that this CPU can run.
    pub fn detect() -> Kernels {
        let available = Kernels::all_available();
        let fastest = available.iter().rfind(|kernels| kernels.set.is_worth_it());
        *fastest.expect("the scalar ones are always there")
    }

    /// All kernels that this CPU can run, as a rule the slowest first; the scalar ones always.
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
            Set::Avx2Streaming => "avx2-streaming",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Gfni => "avx512-gfni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512GfniPrefetch => "avx512-prefetch",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512GfniPrefetchL2 => "avx512-prefetch-l2",
        }
    }

    /// Overwrites `parity`, which is all of the stripe's, with the parity of all data chunks in
    /// order.
    pub fn encode(self, data: &[&[u8]], parity: &mut [&mut [u8]]) {
        assert!(!data.is_empty());
        assert!((1..=PARITY_CHUNKS_MAX).contains(&parity.len()));
        assert!(data.len() + parity.len() <= CHUNKS_MAX);
        let length = data[0].len();
        assert_lengths(length, data.iter().map(|chunk| chunk.len()));
        assert_lengths(length, parity.iter().map(|chunk| chunk.len()));
        if let [p, q] = parity {
            return dispatch!(self.set, sum_pq(data, p, q));
        }
        self.combine(data.as_chunks::<1>().0, &FACTORS[..data.len()], parity, false);
    }

    /// Makes parity current after data chunk `index` of a stripe with `m` parity chunks, or the
    /// same part of each chunk, changed from `old` to `new`: read-modify-write.
    ///
    /// `parity` pairs a parity chunk's number, 0 for P, with its bytes; one whose member is missing
    /// is not given.
    pub fn update(
        self,
        m: usize,
        index: usize,
        old: &[u8],
        new: &[u8],
        parity: &mut [(usize, &mut [u8])],
    ) {
        assert!(m <= PARITY_CHUNKS_MAX);
        assert!(index + m < CHUNKS_MAX);
        let length = old.len();
        assert_lengths(length, [new.len()]);
        assert_lengths(length, parity.iter().map(|(_, bytes)| bytes.len()));
        if parity.is_empty() {
            return;
        }
        let mut factors = [0; PARITY_CHUNKS_MAX];
        let mut outputs = SmallVec::<[&mut [u8]; PARITY_CHUNKS_MAX]>::new();
        for (output, (number, bytes)) in parity.iter_mut().enumerate() {
            assert!(*number < m, "parity {number} of {m}");
            factors[output] = FACTORS[index][*number];
            outputs.push(bytes);
        }
        self.combine(&[[old, new]], &[factors], &mut outputs, true);
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
        // Inline for all chunks of the widest stripe: it never allocates.
        let mut sources = SmallVec::<[&[u8]; CHUNKS_MAX]>::new();
        if let [(id, into)] = missing
            && has_others_and_p(k, *id, present)
        {
            let others = present.iter().filter(|(other, _)| *other <= k && other != id);
            sources.extend(others.map(|(_, bytes)| *bytes));
            self.combine(sources.as_chunks::<1>().0, &FACTORS[..k], &mut [into], false);
            return Ok(());
        }
        let present_ids = present.iter().map(|(id, _)| *id);
        let missing_ids = missing.iter().map(|(id, _)| *id);
        let recovery = solve::plan(k, m, present_ids, missing_ids)?;

        sources.extend(recovery.positions().map(|position| present[position].1));
        let mut outputs = SmallVec::<[&mut [u8]; PARITY_CHUNKS_MAX]>::new();
        outputs.extend(missing.iter_mut().map(|(_, bytes)| &mut **bytes));
        self.combine(sources.as_chunks::<1>().0, recovery.factors(), &mut outputs, false);
        Ok(())
    }

    /// `into` += `factor` * `from`: the step of which every code over this field is made.
    pub fn mul_add(self, factor: u8, from: &[u8], into: &mut [u8]) {
        assert_lengths(from.len(), [into.len()]);
        self.combine(&[[from]], &[[factor; PARITY_CHUNKS_MAX]], &mut [into], true);
    }

    /// `into` = sum of `sources`.
    pub fn sum<const S: usize>(self, sources: [&[u8]; S], into: &mut [u8]) {
        assert_lengths(into.len(), sources.iter().map(|source| source.len()));
        self.combine(&[sources], &[[1; PARITY_CHUNKS_MAX]], &mut [into], false);
    }

    /// `into` ^= `from`.
    pub fn xor_into(self, from: &[u8], into: &mut [u8]) {
        self.mul_add(1, from, into);
    }

    /// `outputs[o]` = sum of `factors[i][o]` * (sum of `sources[i]`), or with `add`, += that.
    fn combine<const S: usize>(
        self,
        sources: &[[&[u8]; S]],
        factors: &[Factors],
        outputs: &mut [&mut [u8]],
        add: bool,
    ) {
        assert!(sources.len() == factors.len());
        assert!(outputs.len() <= PARITY_CHUNKS_MAX);
        dispatch!(self.set, combine(sources, factors, outputs, add));
    }
}

/// Whether P and the data chunks but `lost` are among `present`, whose sum that one is. It is the
/// usual case, and the plan of the others takes as long as 4 KiB of it.
fn has_others_and_p(k: usize, lost: usize, present: &[(usize, &[u8])]) -> bool {
    if lost >= k {
        return false;
    }
    let others = present.iter().map(|(id, _)| *id).filter(|id| *id <= k && *id != lost);
    let ids = others.clone().fold(0u64, |ids, id| ids | 1 << id);
    let all = u64::MAX >> (CHUNKS_MAX - 1 - k) & !(1 << lost);
    ids == all && others.count() == k
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
