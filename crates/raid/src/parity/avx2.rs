//! Parity with AVX2, 64 to 256 bytes of each chunk at a time.
//!
//! A product by a constant is two table look-ups with `pshufb`, one for each half of the byte
//! (J. S. Plank et al., "Screaming Fast Galois Field Arithmetic", FAST 2013); a product by 2 is an
//! addition and a conditional reduction, which is cheaper.
//!
//! Sums start at a chunk, not at zero, which saves a step: of four chunks' Q, a fourth of the work.
//! They run from the first chunk to the last, but for Q (Horner's rule): on Zen 1 that gains 3 %
//! where one is lost.
//!
//! `streaming` stores past the caches, so that what a result overwrites is not fetched first. On
//! Zen 1 that gains a sixth from memory and up to a sixth from L2; but whole stripes of an array,
//! whose buffers are used again at once, gained nothing. Such a store wants a vector's alignment,
//! and a fence before others look. A result that is added to what was there is in a cache already,
//! and is stored there.
//!
//! Invariant, kept by `Kernels`: these functions are called only where the CPU reported avx2; the
//! slices of one call have the same length, a multiple of `WIDE` vectors.

use core::arch::x86_64::*;

use super::code::Factors;
use super::gf256::NIBBLE_PRODUCTS;

const VECTOR: usize = 32;

/// Vectors of one source in registers at once, for a plain sum: 8 of the 16 registers are sums.
const WIDE: usize = 8;
/// The same where tables, masks and a second sum need registers too.
const NARROW: usize = 4;
/// The same with three or four sums.
const NARROWEST: usize = 2;
const _: () = assert!(super::LENGTH_UNIT.is_multiple_of(WIDE * VECTOR));
const _: () = assert!(WIDE.is_multiple_of(NARROW) && NARROW.is_multiple_of(NARROWEST));

/// Outputs to sum at once; more go in several passes over the sources.
const OUTPUTS_AT_ONCE: usize = 4;

/// `WIDTH` vectors side by side, as bytes of memory.
type Block<const WIDTH: usize> = [[u8; VECTOR]; WIDTH];

/// `p` = sum of `sources`, `q` = sum of 2^i * `sources[i]`, by Horner's rule from the last source.
#[target_feature(enable = "avx2")]
pub(super) fn sum_pq(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
    sum_pq_of::<false>(sources, p, q);
}

/// `outputs[o]` = sum of `factors[i][o]` * (sum of `sources[i]`), or with `add`, += that.
#[target_feature(enable = "avx2")]
pub(super) fn combine<const S: usize>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    combine_of::<S, false>(sources, factors, outputs, add);
}

/// The same, with stores past the caches.
pub(super) mod streaming {
    use super::{_mm_sfence, Factors, VECTOR, combine_of, sum_pq_of};

    #[target_feature(enable = "avx2")]
    pub(in super::super) fn sum_pq(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
        if !is_aligned(p) || !is_aligned(q) {
            return super::sum_pq(sources, p, q);
        }
        sum_pq_of::<true>(sources, p, q);
        _mm_sfence();
    }

    #[target_feature(enable = "avx2")]
    pub(in super::super) fn combine<const S: usize>(
        sources: &[[&[u8]; S]],
        factors: &[Factors],
        outputs: &mut [&mut [u8]],
        add: bool,
    ) {
        if add || !outputs.iter().all(|output| is_aligned(output)) {
            return super::combine(sources, factors, outputs, add);
        }
        combine_of::<S, true>(sources, factors, outputs, add);
        _mm_sfence();
    }

    fn is_aligned(output: &[u8]) -> bool {
        output.as_ptr().addr().is_multiple_of(VECTOR)
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum_pq_of<const STREAM: bool>(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
    let (last, others) = sources.split_last().expect("asserted by `encode`");
    let (p_blocks, q_blocks) = (blocks_mut::<NARROW>(p), blocks_mut::<NARROW>(q));
    for (index, (p_block, q_block)) in p_blocks.iter_mut().zip(q_blocks).enumerate() {
        let mut p_total = load(block::<NARROW>(last, index));
        let mut q_total = p_total;
        for source in others.iter().rev() {
            let data = load(block::<NARROW>(source, index));
            for vector in 0..NARROW {
                p_total[vector] = _mm256_xor_si256(p_total[vector], data[vector]);
                q_total[vector] = _mm256_xor_si256(double(q_total[vector]), data[vector]);
            }
        }
        store::<_, STREAM>(p_block, p_total);
        store::<_, STREAM>(q_block, q_total);
    }
}

#[inline]
#[target_feature(enable = "avx2")]
fn combine_of<const S: usize, const STREAM: bool>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    // As in encoding, the factors of the first output are often all one.
    let is_sum = factors.iter().all(|factors| factors[0] == 1);
    for (pass, outputs) in outputs.chunks_mut(OUTPUTS_AT_ONCE).enumerate() {
        let first = pass * OUTPUTS_AT_ONCE;
        match (outputs.len(), is_sum && first == 0) {
            (1, true) => sum_to::<S, STREAM>(sources, outputs[0], add),
            (1, false) => {
                combine_to::<1, NARROW, false, S, STREAM>(sources, factors, first, outputs, add)
            }
            (2, true) => {
                combine_to::<2, NARROW, true, S, STREAM>(sources, factors, first, outputs, add)
            }
            (2, false) => {
                combine_to::<2, NARROW, false, S, STREAM>(sources, factors, first, outputs, add)
            }
            (3, true) => {
                combine_to::<3, NARROWEST, true, S, STREAM>(sources, factors, first, outputs, add)
            }
            (3, false) => {
                combine_to::<3, NARROWEST, false, S, STREAM>(sources, factors, first, outputs, add)
            }
            (4, true) => {
                combine_to::<4, NARROWEST, true, S, STREAM>(sources, factors, first, outputs, add)
            }
            (4, false) => {
                combine_to::<4, NARROWEST, false, S, STREAM>(sources, factors, first, outputs, add)
            }
            (count, _) => unreachable!("{count} outputs"),
        }
    }
}

/// `output` = sum of `sources`, or with `add`, += that.
#[inline]
#[target_feature(enable = "avx2")]
fn sum_to<const S: usize, const STREAM: bool>(
    sources: &[[&[u8]; S]],
    output: &mut [u8],
    add: bool,
) {
    let (start, others) = sources.split_first().expect("a sum of something");
    for (index, block) in blocks_mut::<WIDE>(output).iter_mut().enumerate() {
        let mut total = load_sum::<WIDE, S>(start, index);
        for source in others {
            total = xor(total, load_sum::<WIDE, S>(source, index));
        }
        if add {
            total = xor(total, load(block));
        }
        store::<_, STREAM>(block, total);
    }
}

/// `combine` to `N` outputs, from number `first` on. `SUM`: factors of the first are one.
#[inline]
#[target_feature(enable = "avx2")]
fn combine_to<
    const N: usize,
    const WIDTH: usize,
    const SUM: bool,
    const S: usize,
    const STREAM: bool,
>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    first: usize,
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    let outputs: &mut [&mut [u8]; N] = outputs.try_into().expect("counted by `combine_of`");
    let mut outputs = outputs.each_mut().map(|output| blocks_mut::<WIDTH>(output));
    for index in 0..outputs[0].len() {
        let mut totals = [[_mm256_setzero_si256(); WIDTH]; N];
        if add {
            for (total, output) in totals.iter_mut().zip(&outputs) {
                *total = load(&output[index]);
            }
        }
        for (source, factors) in sources.iter().zip(factors) {
            let data = load_sum::<WIDTH, S>(source, index);
            for (output, total) in totals.iter_mut().enumerate() {
                let tables = tables(factors[first + output]);
                let is_one = SUM && output == 0;
                let terms = if is_one { data } else { data.map(|bytes| product(bytes, tables)) };
                *total = xor(*total, terms);
            }
        }
        for (output, total) in outputs.iter_mut().zip(totals) {
            store::<_, STREAM>(&mut output[index], total);
        }
    }
}

#[inline(always)]
fn blocks_mut<const WIDTH: usize>(output: &mut [u8]) -> &mut [Block<WIDTH>] {
    output.as_chunks_mut::<VECTOR>().0.as_chunks_mut::<WIDTH>().0
}

/// Block `index` of the sum of the parts of `source`.
#[inline]
#[target_feature(enable = "avx2")]
fn load_sum<const WIDTH: usize, const S: usize>(
    source: &[&[u8]; S],
    index: usize,
) -> [__m256i; WIDTH] {
    let mut data = load(block::<WIDTH>(source[0], index));
    for part in &source[1..] {
        data = xor(data, load(block::<WIDTH>(part, index)));
    }
    data
}

#[inline]
#[target_feature(enable = "avx2")]
fn xor<const WIDTH: usize>(mut some: [__m256i; WIDTH], more: [__m256i; WIDTH]) -> [__m256i; WIDTH] {
    for (vector, more) in some.iter_mut().zip(more) {
        *vector = _mm256_xor_si256(*vector, more);
    }
    some
}

/// Block `index` of `source`: one check of bounds for all its loads.
#[inline(always)]
fn block<const WIDTH: usize>(source: &[u8], index: usize) -> &Block<WIDTH> {
    &source.as_chunks::<VECTOR>().0.as_chunks::<WIDTH>().0[index]
}

#[inline]
#[target_feature(enable = "avx2")]
fn load<const WIDTH: usize>(block: &Block<WIDTH>) -> [__m256i; WIDTH] {
    let mut vectors = [_mm256_setzero_si256(); WIDTH];
    for (vector, bytes) in vectors.iter_mut().zip(block) {
        // SAFETY: `bytes` is a reference to 32 readable bytes; the load asks for no alignment.
        *vector = unsafe { _mm256_loadu_si256(bytes.as_ptr().cast()) };
    }
    vectors
}

/// With `STREAM`, past the caches, to a block that is aligned to a vector.
#[inline]
#[target_feature(enable = "avx2")]
fn store<const WIDTH: usize, const STREAM: bool>(
    block: &mut Block<WIDTH>,
    vectors: [__m256i; WIDTH],
) {
    for (vector, bytes) in vectors.into_iter().zip(block) {
        let into = bytes.as_mut_ptr().cast();
        if STREAM {
            // SAFETY: `bytes` is an exclusive reference to 32 bytes; `streaming` has checked that
            // they are aligned, and fences.
            unsafe { _mm256_stream_si256(into, vector) };
        } else {
            // SAFETY: `bytes` is an exclusive reference to 32 bytes; the store asks for no
            // alignment.
            unsafe { _mm256_storeu_si256(into, vector) };
        }
    }
}

/// Each byte times 2: as a signed number it is negative exactly if x^7 is in it.
#[inline]
#[target_feature(enable = "avx2")]
fn double(bytes: __m256i) -> __m256i {
    let carries = _mm256_cmpgt_epi8(_mm256_setzero_si256(), bytes);
    let reduction = _mm256_and_si256(carries, _mm256_set1_epi8(0x1d));
    _mm256_xor_si256(_mm256_add_epi8(bytes, bytes), reduction)
}

/// The products of `factor` by low and by high halves of a byte, in each half of a register.
#[inline]
#[target_feature(enable = "avx2")]
fn tables(factor: u8) -> [__m256i; 2] {
    let [low, high] = &NIBBLE_PRODUCTS[usize::from(factor)];
    [low, high].map(|table| {
        // SAFETY: `table` is a reference to 16 readable bytes; the load asks for no alignment.
        let half = unsafe { _mm_loadu_si128(table.as_ptr().cast()) };
        _mm256_broadcastsi128_si256(half)
    })
}

#[inline]
#[target_feature(enable = "avx2")]
fn product(bytes: __m256i, [low_table, high_table]: [__m256i; 2]) -> __m256i {
    let nibble = _mm256_set1_epi8(15);
    let low = _mm256_and_si256(bytes, nibble);
    // There is no shift of bytes; bits that cross over from the neighbour are masked off.
    let high = _mm256_and_si256(_mm256_srli_epi16::<4>(bytes), nibble);
    let low_product = _mm256_shuffle_epi8(low_table, low);
    _mm256_xor_si256(low_product, _mm256_shuffle_epi8(high_table, high))
}
