//! Parity with AVX-512 and GFNI, 128 or 256 bytes of each chunk at a time.
//!
//! A product by a constant is linear over the bits of a byte, so it is one `gf2p8affineqb` with an
//! 8x8 bit matrix per constant. The instruction `gf2p8mulb` would not do: its polynomial is 0x11b.
//!
//! Sums run from the last chunk to the first. Q needs that (Horner's rule), and the others gain
//! from it where chunks lie side by side: walking up by a chunk's length, a load trains the stride
//! prefetcher of Zen 5 to fetch what no one reads, and 4+1 falls from 190 to 116 GB/s.
//!
//! Chunks of 64 KiB, what was tried: prefetching ahead gains up to 28 % from memory on a Xeon with
//! 2 MiB of L2, whose own prefetchers lose so many streams, and costs nothing from L2 but where one
//! output is a mere sum; asking for outputs, too, gains 10 % of 4+2 from L2. On Zen 5 it gains
//! nothing, and loses from L2. Zen 4 loses up to 40 % from memory by it, but gains up to 29 % where
//! lines are asked for into L2 only; asking for all of them costs a fifth of 4+1 from L2, so fewer
//! are where little is computed. So each way has a module of its own. Stores past the caches gain a
//! tenth from memory on Zen 4 and 5 and lose a quarter to almost half for 4+2 from L2, while
//! nothing here can tell the two apart: left out.
//!
//! Invariant, kept by `Kernels`: these functions are called only where the CPU reported avx512f
//! and gfni; the slices of one call have the same length, a multiple of `LENGTH_UNIT`.

use core::arch::x86_64::*;

use smallvec::SmallVec;

use super::code::Factors;
use super::gf256;
use super::{CHUNKS_MAX, LENGTH_UNIT};

const VECTOR: usize = 64;
/// Bytes from what is read to what is asked for, where that is done.
const AHEAD: usize = 1024;
/// With more, asking for the output of a sum delays its sources.
const FEW_SOURCES: usize = 6;
/// With more, and two outputs at least, much is computed beside the loads.
const MANY_SOURCES: usize = 8;

/// What is asked for ahead: nothing.
const NOTHING: u8 = 0;
/// Every line, into L1, and what is overwritten, too.
const ALL: u8 = 1;
/// Of what is read, one line of so many, into L2.
const EACH: u8 = 2;
const SECOND: u8 = 3;
const FOURTH: u8 = 4;

/// Vectors of one source in registers at once. With half or twice as many, 4+1 and 4+2 are up to
/// 13 % slower from L2.
const WIDE: usize = 4;
/// The same for more outputs than five, whose sums need most of the 32 registers.
const NARROW: usize = 2;
const _: () = assert!(LENGTH_UNIT.is_multiple_of(WIDE * VECTOR));
const _: () = assert!(WIDE.is_multiple_of(NARROW));

/// `WIDTH` vectors side by side, as bytes of memory.
type Block<const WIDTH: usize> = [[u8; VECTOR]; WIDTH];

/// `MATRICES[factor]` is the operand of `gf2p8affineqb` that multiplies by `factor`.
static MATRICES: [i64; 256] = matrices();

/// A module of the two functions that kernels have, which asks for `$ask`.
macro_rules! functions {
    ($module:ident, $ask:ident) => {
        pub(super) mod $module {
            use super::{Factors, combine_of, sum_pq_of, $ask};

            /// `p` = sum of `sources`, `q` = sum of 2^i * `sources[i]`, by Horner's rule from the
            /// last source.
            #[target_feature(enable = "avx512f,gfni")]
            pub(in super::super) fn sum_pq(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
                sum_pq_of::<$ask>(sources, p, q);
            }

            /// `outputs[o]` = sum of `factors[i][o]` * (sum of `sources[i]`), or with `add`, +=
            /// that.
            #[target_feature(enable = "avx512f,gfni")]
            pub(in super::super) fn combine<const S: usize>(
                sources: &[[&[u8]; S]],
                factors: &[Factors],
                outputs: &mut [&mut [u8]],
                add: bool,
            ) {
                combine_of::<S, $ask>(sources, factors, outputs, add);
            }
        }
    };
}

functions!(plain, NOTHING);
functions!(prefetch, ALL);
functions!(prefetch_l2, SECOND);

#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn sum_pq_of<const ASK: u8>(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
    let two = _mm512_set1_epi64(MATRICES[2]);
    let sources = blocks_of_each(sources);
    let (last, others) = sources.split_last().expect("a stripe has data");
    let (p_blocks, q_blocks) = (blocks_mut::<WIDE>(p), blocks_mut::<WIDE>(q));
    for (index, (p_block, q_block)) in p_blocks.iter_mut().zip(q_blocks).enumerate() {
        ask_ahead::<ASK, WIDE>(&last[index]);
        if ASK == ALL && sources.len() <= FEW_SOURCES {
            ask_ahead::<ASK, WIDE>(p_block);
            ask_ahead::<ASK, WIDE>(q_block);
        }
        let mut p_total = load(&last[index]);
        let mut q_total = p_total;
        for source in others.iter().rev() {
            let block = &source[index];
            ask_ahead::<ASK, WIDE>(block);
            let data = load(block);
            for vector in 0..WIDE {
                p_total[vector] = _mm512_xor_si512(p_total[vector], data[vector]);
                q_total[vector] = _mm512_xor_si512(product(q_total[vector], two), data[vector]);
            }
        }
        store(p_block, p_total);
        store(q_block, q_total);
    }
}

#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn combine_of<const S: usize, const ASK: u8>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    if ASK == SECOND && outputs.len() > 1 && sources.len() > MANY_SOURCES {
        return combine_of::<S, EACH>(sources, factors, outputs, add);
    }
    // As in encoding, the factors of the first output are often all one.
    let is_sum = factors.iter().all(|factors| factors[0] == 1);
    match (outputs.len(), is_sum) {
        (1, true) => sum_of::<ASK>(sources.as_flattened(), outputs[0], add),
        (1, false) => combine_to::<1, WIDE, false, S, ASK>(sources, factors, outputs, add),
        (2, true) => combine_to::<2, WIDE, true, S, ASK>(sources, factors, outputs, add),
        (2, false) => combine_to::<2, WIDE, false, S, ASK>(sources, factors, outputs, add),
        (3, true) => combine_to::<3, WIDE, true, S, ASK>(sources, factors, outputs, add),
        (3, false) => combine_to::<3, WIDE, false, S, ASK>(sources, factors, outputs, add),
        (4, true) => combine_to::<4, WIDE, true, S, ASK>(sources, factors, outputs, add),
        (4, false) => combine_to::<4, WIDE, false, S, ASK>(sources, factors, outputs, add),
        (5, _) => combine_to::<5, WIDE, false, S, ASK>(sources, factors, outputs, add),
        (6, _) => combine_to::<6, NARROW, false, S, ASK>(sources, factors, outputs, add),
        (7, _) => combine_to::<7, NARROW, false, S, ASK>(sources, factors, outputs, add),
        (8, _) => combine_to::<8, NARROW, false, S, ASK>(sources, factors, outputs, add),
        (0, _) => {}
        (count, _) => unreachable!("{count} outputs"),
    }
}

/// `output` = sum of `sources`, or with `add`, += that. There is too little to do beside the loads
/// to ask for every source ahead, or to find each block anew; but asking for what is to be
/// overwritten gains 5 % where sources are few.
#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn sum_of<const ASK: u8>(sources: &[&[u8]], output: &mut [u8], add: bool) {
    if ASK == SECOND && sources.len() <= FEW_SOURCES {
        return sum_of::<FOURTH>(sources, output, add);
    }
    let sources = blocks_of_each(sources);
    let asks_output = ASK == ALL && sources.len() <= FEW_SOURCES;
    for (index, output) in blocks_mut::<WIDE>(output).iter_mut().enumerate() {
        if asks_output {
            ask_ahead::<ASK, WIDE>(output);
        }
        let mut total = [_mm512_setzero_si512(); WIDE];
        if add {
            total = load(output);
        }
        for source in sources.iter().rev() {
            let block = &source[index];
            if ASK != ALL {
                ask_ahead::<ASK, WIDE>(block);
            }
            let data = load(block);
            for vector in 0..WIDE {
                total[vector] = _mm512_xor_si512(total[vector], data[vector]);
            }
        }
        store(output, total);
    }
}

/// `combine` to `N` outputs. `SUM`: factors of the first are one.
#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn combine_to<
    const N: usize,
    const WIDTH: usize,
    const SUM: bool,
    const S: usize,
    const ASK: u8,
>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    // Side by side for a source, and looked up once, not in every block.
    let mut matrices = [[0; N]; CHUNKS_MAX];
    for (matrices, factors) in matrices.iter_mut().zip(factors) {
        for (matrix, factor) in matrices.iter_mut().zip(factors) {
            *matrix = MATRICES[usize::from(*factor)];
        }
    }
    let outputs: &mut [&mut [u8]; N] = outputs.try_into().expect("counted by `combine`");
    let mut outputs = outputs.each_mut().map(|output| blocks_mut::<WIDTH>(output));
    for index in 0..outputs[0].len() {
        let mut totals = [[_mm512_setzero_si512(); WIDTH]; N];
        if add {
            for (total, output) in totals.iter_mut().zip(&outputs) {
                *total = load(&output[index]);
            }
        }
        for (source, matrices) in sources.iter().zip(&matrices[..sources.len()]).rev() {
            for part in source {
                ask_ahead::<ASK, WIDTH>(block(part, index));
            }
            let data = load_sum::<WIDTH, S>(source, index);
            for (output, total) in totals.iter_mut().enumerate() {
                let matrix = _mm512_set1_epi64(matrices[output]);
                for vector in 0..WIDTH {
                    let is_one = SUM && output == 0;
                    let term = if is_one { data[vector] } else { product(data[vector], matrix) };
                    total[vector] = _mm512_xor_si512(total[vector], term);
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
#[target_feature(enable = "avx512f")]
fn load_sum<const WIDTH: usize, const S: usize>(
    source: &[&[u8]; S],
    index: usize,
) -> [__m512i; WIDTH] {
    let mut data = load(block::<WIDTH>(source[0], index));
    for part in &source[1..] {
        let more = load(block::<WIDTH>(part, index));
        for vector in 0..WIDTH {
            data[vector] = _mm512_xor_si512(data[vector], more[vector]);
        }
    }
    data
}

/// Block `index` of `source`: one check of bounds for all its loads.
#[inline(always)]
fn block<const WIDTH: usize>(source: &[u8], index: usize) -> &Block<WIDTH> {
    &blocks_of::<WIDTH>(source)[index]
}

#[inline(always)]
fn blocks_of<const WIDTH: usize>(source: &[u8]) -> &[Block<WIDTH>] {
    source.as_chunks::<VECTOR>().0.as_chunks::<WIDTH>().0
}

/// The blocks of each source, found once.
#[inline(always)]
fn blocks_of_each<'a>(sources: &[&'a [u8]]) -> SmallVec<[&'a [Block<WIDE>]; CHUNKS_MAX]> {
    sources.iter().map(|source| blocks_of(source)).collect()
}

/// Prefetches what is `AHEAD` of a block; behind the end of its chunk, too.
#[inline(always)]
fn ask_ahead<const ASK: u8, const WIDTH: usize>(block: &Block<WIDTH>) {
    let ahead = block.as_flattened().as_ptr().wrapping_add(AHEAD);
    for vector in 0..WIDTH {
        let line = ahead.wrapping_add(vector * VECTOR).cast();
        if ASK == ALL {
            // SAFETY: a prefetch reads nothing, and does not fault wherever it points.
            unsafe { _mm_prefetch::<_MM_HINT_T0>(line) };
        }
        if matches!((ASK, vector % 4), (EACH, _) | (SECOND, 0 | 2) | (FOURTH, 0)) {
            // SAFETY: the same.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(line) };
        }
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn load<const WIDTH: usize>(block: &Block<WIDTH>) -> [__m512i; WIDTH] {
    let mut vectors = [_mm512_setzero_si512(); WIDTH];
    for (vector, bytes) in vectors.iter_mut().zip(block) {
        // SAFETY: `bytes` is a reference to 64 readable bytes; the load asks for no alignment.
        *vector = unsafe { _mm512_loadu_si512(bytes.as_ptr().cast()) };
    }
    vectors
}

#[inline]
#[target_feature(enable = "avx512f")]
fn store<const WIDTH: usize>(block: &mut Block<WIDTH>, vectors: [__m512i; WIDTH]) {
    for (vector, bytes) in vectors.into_iter().zip(block) {
        // SAFETY: `bytes` is an exclusive reference to 64 bytes; the store asks for no alignment.
        unsafe { _mm512_storeu_si512(bytes.as_mut_ptr().cast(), vector) };
    }
}

#[inline]
#[target_feature(enable = "avx512f,gfni")]
fn product(bytes: __m512i, matrix: __m512i) -> __m512i {
    _mm512_gf2p8affine_epi64_epi8::<0>(bytes, matrix)
}

const fn matrices() -> [i64; 256] {
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
const fn matrix_bits(factor: u8) -> i64 {
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
    i64::from_le_bytes(rows)
}

const _: () = assert!(matrix_bits(2).to_le_bytes()[7] == 0x80);
const _: () = assert!(matrix_bits(2).to_le_bytes()[5] == 0x82);
