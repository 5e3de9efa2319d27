//! Parity with AVX2, 128 or 256 bytes of each chunk at a time.
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

use super::gf256::NIBBLE_PRODUCTS;

const VECTOR: usize = 32;

/// Vectors of one source in registers at once, for a plain sum: 8 of the 16 registers are sums.
const WIDE: usize = 8;
/// The same where tables, masks and a second sum need registers too.
const NARROW: usize = 4;
const _: () = assert!(super::LENGTH_UNIT.is_multiple_of(WIDE * VECTOR));
const _: () = assert!(WIDE.is_multiple_of(NARROW));

/// `WIDTH` vectors side by side, as bytes of memory.
type Block<const WIDTH: usize> = [[u8; VECTOR]; WIDTH];

/// `output` = sum of `sources`.
#[target_feature(enable = "avx2")]
pub(super) fn sum(sources: &[&[u8]], output: &mut [u8]) {
    for (index, target) in blocks_mut::<WIDE>(output).iter_mut().enumerate() {
        let mut total = [_mm256_setzero_si256(); WIDE];
        for source in sources.iter().rev() {
            let data = load(block::<WIDE>(source, index));
            for vector in 0..WIDE {
                total[vector] = _mm256_xor_si256(total[vector], data[vector]);
            }
        }
        store(target, total);
    }
}

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

/// `into` += `factor` * sum of `sources`.
#[target_feature(enable = "avx2")]
pub(super) fn mul_add<const S: usize>(factor: u8, sources: [&[u8]; S], into: &mut [u8]) {
    let tables = tables(factor);
    for (index, target) in blocks_mut::<NARROW>(into).iter_mut().enumerate() {
        let mut total = [_mm256_setzero_si256(); NARROW];
        for source in sources {
            let data = load(block::<NARROW>(source, index));
            for vector in 0..NARROW {
                total[vector] = _mm256_xor_si256(total[vector], data[vector]);
            }
        }
        let mut result = load(target);
        for vector in 0..NARROW {
            // P is most of the work, and its factor is one.
            let term = if factor == 1 { total[vector] } else { product(total[vector], tables) };
            result[vector] = _mm256_xor_si256(result[vector], term);
        }
        store(target, result);
    }
}

/// `outputs[o]` = sum of `rows[o][i]` * `sources[i]`.
#[target_feature(enable = "avx2")]
pub(super) fn combine<const N: usize>(
    sources: &[&[u8]],
    rows: [&[u8]; N],
    outputs: [&mut [u8]; N],
) {
    let mut outputs = outputs.map(blocks_mut::<NARROW>);
    for index in 0..outputs[0].len() {
        let mut totals = [[_mm256_setzero_si256(); NARROW]; N];
        for (position, source) in sources.iter().enumerate().rev() {
            let data = load(block::<NARROW>(source, index));
            for (total, row) in totals.iter_mut().zip(rows) {
                let tables = tables(row[position]);
                for vector in 0..NARROW {
                    let term = product(data[vector], tables);
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
fn blocks_mut<const WIDTH: usize>(bytes: &mut [u8]) -> &mut [Block<WIDTH>] {
    bytes.as_chunks_mut::<VECTOR>().0.as_chunks_mut::<WIDTH>().0
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
