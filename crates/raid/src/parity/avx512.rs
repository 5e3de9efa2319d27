//! Parity with AVX-512 and GFNI, 256 bytes of each chunk at a time.
//!
//! A product by a constant is linear over the bits of a byte, so it is one `gf2p8affineqb` with an
//! 8x8 bit matrix per constant. The instruction `gf2p8mulb` would not do: its polynomial is 0x11b.
//!
//! Sums run from the last chunk to the first. Q needs that (Horner's rule), and the others gain
//! from it where chunks lie side by side: walking up by a chunk's length, a load trains the stride
//! prefetcher of Zen 5 to fetch what no one reads, and 4+1 falls from 190 to 116 GB/s.
//!
//! Invariant, kept by `Kernels`: these functions are called only where the CPU reported avx512f
//! and gfni; the slices of one call have the same length, a multiple of `BLOCK`.

use core::arch::x86_64::*;

use super::gf256;

/// Bytes of one source that are in registers at once, as four vectors. With half or twice as many,
/// 4+1 and 4+2 are up to 13 % slower from L2.
const BLOCK: usize = 256;
const VECTOR: usize = 64;
const VECTORS: usize = BLOCK / VECTOR;
const _: () = assert!(super::LENGTH_UNIT.is_multiple_of(BLOCK));

type Block = [u8; BLOCK];
type Vectors = [__m512i; VECTORS];

/// `MATRICES[factor]` is the operand of `gf2p8affineqb` that multiplies by `factor`.
static MATRICES: [u64; 256] = matrices();

/// `output` = sum of `sources`.
#[target_feature(enable = "avx512f,gfni")]
pub(super) fn sum(sources: &[&[u8]], output: &mut [u8]) {
    for (index, target) in output.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let mut total = [_mm512_setzero_si512(); VECTORS];
        for source in sources.iter().rev() {
            let data = load(block(source, index));
            for vector in 0..VECTORS {
                total[vector] = _mm512_xor_si512(total[vector], data[vector]);
            }
        }
        store(target, total);
    }
}

/// `p` = sum of `sources`, `q` = sum of 2^i * `sources[i]`, by Horner's rule from the last source.
#[target_feature(enable = "avx512f,gfni")]
pub(super) fn sum_pq(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
    let p_blocks = p.as_chunks_mut::<BLOCK>().0;
    let q_blocks = q.as_chunks_mut::<BLOCK>().0;
    let two = matrix(2);
    for (index, (p_block, q_block)) in p_blocks.iter_mut().zip(q_blocks).enumerate() {
        let mut p_total = [_mm512_setzero_si512(); VECTORS];
        let mut q_total = [_mm512_setzero_si512(); VECTORS];
        for source in sources.iter().rev() {
            let data = load(block(source, index));
            for vector in 0..VECTORS {
                p_total[vector] = _mm512_xor_si512(p_total[vector], data[vector]);
                q_total[vector] = _mm512_xor_si512(product(q_total[vector], two), data[vector]);
            }
        }
        store(p_block, p_total);
        store(q_block, q_total);
    }
}

/// `into` += `factor` * sum of `sources`.
#[target_feature(enable = "avx512f,gfni")]
pub(super) fn mul_add<const S: usize>(factor: u8, sources: [&[u8]; S], into: &mut [u8]) {
    let factor = matrix(factor);
    for (index, target) in into.as_chunks_mut::<BLOCK>().0.iter_mut().enumerate() {
        let mut total = [_mm512_setzero_si512(); VECTORS];
        for source in sources {
            let data = load(block(source, index));
            for vector in 0..VECTORS {
                total[vector] = _mm512_xor_si512(total[vector], data[vector]);
            }
        }
        let mut result = load(target);
        for vector in 0..VECTORS {
            result[vector] = _mm512_xor_si512(result[vector], product(total[vector], factor));
        }
        store(target, result);
    }
}

/// `outputs[o]` = sum of `rows[o][i]` * `sources[i]`.
#[target_feature(enable = "avx512f,gfni")]
pub(super) fn combine<const N: usize>(
    sources: &[&[u8]],
    rows: [&[u8]; N],
    outputs: [&mut [u8]; N],
) {
    let mut outputs = outputs.map(|output| output.as_chunks_mut::<BLOCK>().0);
    for index in 0..outputs[0].len() {
        let mut totals = [[_mm512_setzero_si512(); VECTORS]; N];
        for (position, source) in sources.iter().enumerate().rev() {
            let data = load(block(source, index));
            for (total, row) in totals.iter_mut().zip(rows) {
                let factor = matrix(row[position]);
                for vector in 0..VECTORS {
                    let term = product(data[vector], factor);
                    total[vector] = _mm512_xor_si512(total[vector], term);
                }
            }
        }
        for (output, total) in outputs.iter_mut().zip(totals) {
            store(&mut output[index], total);
        }
    }
}

/// Block `index` of `source`: one check of bounds for all its loads.
#[inline(always)]
fn block(source: &[u8], index: usize) -> &Block {
    &source.as_chunks::<BLOCK>().0[index]
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load(block: &Block) -> Vectors {
    let mut vectors = [_mm512_setzero_si512(); VECTORS];
    for (vector, bytes) in vectors.iter_mut().zip(block.as_chunks::<VECTOR>().0) {
        // SAFETY: `bytes` is a reference to 64 readable bytes; the load asks for no alignment.
        *vector = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    }
    vectors
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store(block: &mut Block, vectors: Vectors) {
    for (vector, bytes) in vectors.into_iter().zip(block.as_chunks_mut::<VECTOR>().0) {
        // SAFETY: `bytes` is an exclusive reference to 64 bytes; the store asks for no alignment.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn product(bytes: __m512i, matrix: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(bytes, matrix)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn matrix(factor: u8) -> __m512i {
    _mm512_set1_epi64(MATRICES[usize::from(factor)].cast_signed())
}

const fn matrices() -> [u64; 256] {
    let mut table = [0; 256];
    let mut factor: u8 = 0;
    loop {
        table[factor as usize] = matrix_bits(factor);
        if factor == 255 {
            return table;
        }
        factor += 1;
    }
}

/// Row r of the matrix names the bits of the operand whose sum is bit r of the product: its bit b
/// is bit r of `factor` * 2^b. Row r is byte 7 - r of the operand (Intel SDM, GF2P8AFFINEQB).
///
/// Factor 2: bit 0 of the product is bit 7 of the operand, so byte 7 is 0x80; bit 2 is bit 1 plus
/// (as 0x1d has bit 2) bit 7, so byte 5 is 0x82.
const fn matrix_bits(factor: u8) -> u64 {
    let mut rows = [0u8; 8];
    let mut bit = 0;
    while bit < 8 {
        let image = gf256::multiply(factor, 1 << bit);
        let mut row = 0;
        while row < 8 {
            rows[7 - row] |= (image >> row & 1) << bit;
            row += 1;
        }
        bit += 1;
    }
    u64::from_le_bytes(rows)
}

const _: () = assert!(matrix_bits(2).to_le_bytes()[7] == 0x80);
const _: () = assert!(matrix_bits(2).to_le_bytes()[5] == 0x82);
