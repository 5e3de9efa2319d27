//! Parity with AVX2, 64 to 256 bytes of each chunk at a time.
//!
//! A product by a constant is two table look-ups with `pshufb`, one for each half of the byte
//! (J. S. Plank et al., "Screaming Fast Galois Field Arithmetic", FAST 2013); a product by 2 is an
//! addition and a conditional reduction, which is cheaper.
//!
//! Sums run from the last chunk to the first; `avx512.rs` says why.
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
    let (p_blocks, q_blocks) = (blocks_mut::<NARROW>(p), blocks_mut::<NARROW>(q));
    for (index, (p_block, q_block)) in p_blocks.iter_mut().zip(q_blocks).enumerate() {
        let mut p_total = [_mm256_setzero_si256(); NARROW];
        let mut q_total = [_mm256_setzero_si256(); NARROW];
        for source in sources.iter().rev() {
            let data = load(block::<NARROW>(source, index));
            for vector in 0..NARROW {
                p_total[vector] = _mm256_xor_si256(p_total[vector], data[vector]);
                q_total[vector] = _mm256_xor_si256(double(q_total[vector]), data[vector]);
            }
        }
        store(p_block, p_total);
        store(q_block, q_total);
    }
}

/// `outputs[o]` = sum of `factors[i][o]` * (sum of `sources[i]`), or with `add`, += that.
#[target_feature(enable = "avx2")]
pub(super) fn combine<const S: usize>(
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
            (1, true) => combine_to::<1, WIDE, true, S>(sources, factors, first, outputs, add),
            (1, false) => combine_to::<1, NARROW, false, S>(sources, factors, first, outputs, add),
            (2, true) => combine_to::<2, NARROW, true, S>(sources, factors, first, outputs, add),
            (2, false) => combine_to::<2, NARROW, false, S>(sources, factors, first, outputs, add),
            (3, true) => combine_to::<3, NARROWEST, true, S>(sources, factors, first, outputs, add),
            (3, false) => {
                combine_to::<3, NARROWEST, false, S>(sources, factors, first, outputs, add)
            }
            (4, true) => combine_to::<4, NARROWEST, true, S>(sources, factors, first, outputs, add),
            (4, false) => {
                combine_to::<4, NARROWEST, false, S>(sources, factors, first, outputs, add)
            }
            (count, _) => unreachable!("{count} outputs"),
        }
    }
}

/// `combine` to `N` outputs, from number `first` on. `SUM`: factors of the first are one.
#[inline]
#[target_feature(enable = "avx2")]
fn combine_to<const N: usize, const WIDTH: usize, const SUM: bool, const S: usize>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    first: usize,
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    let outputs: &mut [&mut [u8]; N] = outputs.try_into().expect("counted by `combine`");
    let mut outputs = outputs.each_mut().map(|output| blocks_mut::<WIDTH>(output));
    for index in 0..outputs[0].len() {
        let mut totals = [[_mm256_setzero_si256(); WIDTH]; N];
        if add {
            for (total, output) in totals.iter_mut().zip(&outputs) {
                *total = load(&output[index]);
            }
        }
        for (source, factors) in sources.iter().zip(factors).rev() {
            let data = load_sum::<WIDTH, S>(source, index);
            for (output, total) in totals.iter_mut().enumerate() {
                let tables = tables(factors[first + output]);
                for vector in 0..WIDTH {
                    let is_one = SUM && output == 0;
                    let term = if is_one { data[vector] } else { product(data[vector], tables) };
                    total[vector] = _mm256_xor_si256(total[vector], term);
                }
            }
        }
        for (output, total) in outputs.iter_mut().zip(totals) {
            store(&mut output[index], total);
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
        let more = load(block::<WIDTH>(part, index));
        for vector in 0..WIDTH {
            data[vector] = _mm256_xor_si256(data[vector], more[vector]);
        }
    }
    data
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

#[inline]
#[target_feature(enable = "avx2")]
fn store<const WIDTH: usize>(block: &mut Block<WIDTH>, vectors: [__m256i; WIDTH]) {
    for (vector, bytes) in vectors.into_iter().zip(block) {
        // SAFETY: `bytes` is an exclusive reference to 32 bytes; the store asks for no alignment.
        unsafe { _mm256_storeu_si256(bytes.as_mut_ptr().cast(), vector) };
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
