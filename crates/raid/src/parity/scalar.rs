//! Parity in plain Rust: the reference for the vector kernels, and what runs where they cannot.
//!
//! Sums and Q go eight bytes at a time in a `u64`; products by any other factor go byte by byte
//! through the nibble tables.
//!
//! Invariant, kept by the caller (`Kernels`) for all kernel files: the slices of one call have the
//! same length, a multiple of `LENGTH_UNIT`. A break of it panics; it does not corrupt.

use super::gf256::NIBBLE_PRODUCTS;

const WORD: usize = size_of::<u64>();

/// The low seven bits of each of eight bytes, which a doubling shifts without loss.
const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
const LOWEST_BIT: u64 = 0x0101_0101_0101_0101;

/// What x^8 is reduced to in GF(2^8) with polynomial 0x11d.
const REDUCTION: u64 = 0x1d;

/// `output` = sum of `sources`.
pub(super) fn sum(sources: &[&[u8]], output: &mut [u8]) {
    for (index, target) in output.as_chunks_mut::<WORD>().0.iter_mut().enumerate() {
        let mut total = 0;
        for source in sources {
            total ^= word(source, index);
        }
        *target = total.to_le_bytes();
    }
}

/// `p` = sum of `sources`, `q` = sum of 2^i * `sources[i]`, by Horner's rule from the last source.
pub(super) fn sum_pq(sources: &[&[u8]], p: &mut [u8], q: &mut [u8]) {
    let p_words = p.as_chunks_mut::<WORD>().0;
    let q_words = q.as_chunks_mut::<WORD>().0;
    for (index, (p_word, q_word)) in p_words.iter_mut().zip(q_words).enumerate() {
        let (mut p_total, mut q_total) = (0, 0);
        for source in sources.iter().rev() {
            let data = word(source, index);
            p_total ^= data;
            q_total = double(q_total) ^ data;
        }
        *p_word = p_total.to_le_bytes();
        *q_word = q_total.to_le_bytes();
    }
}

/// `into` += `factor` * sum of `sources`.
pub(super) fn mul_add<const S: usize>(factor: u8, sources: [&[u8]; S], into: &mut [u8]) {
    let sources = sources.map(|source| &source[..into.len()]);
    let [low, high] = &NIBBLE_PRODUCTS[usize::from(factor)];
    let product = |byte: u8| low[usize::from(byte & 15)] ^ high[usize::from(byte >> 4)];
    for (index, target) in into.iter_mut().enumerate() {
        let total = sources.iter().fold(0, |total, source| total ^ source[index]);
        // P is most of the work and its factor is one; without tables, the compiler finds vectors.
        *target ^= if factor == 1 { total } else { product(total) };
    }
}

/// `outputs[o]` = sum of `rows[o][i]` * `sources[i]`.
pub(super) fn combine<const N: usize>(
    sources: &[&[u8]],
    rows: [&[u8]; N],
    outputs: [&mut [u8]; N],
) {
    for (row, output) in rows.into_iter().zip(outputs) {
        output.fill(0);
        for (factor, source) in row.iter().zip(sources) {
            mul_add(*factor, [*source], output);
        }
    }
}

fn word(source: &[u8], index: usize) -> u64 {
    u64::from_le_bytes(source.as_chunks::<WORD>().0[index])
}

/// Each of the eight bytes times 2.
fn double(bytes: u64) -> u64 {
    let carries = bytes >> 7 & LOWEST_BIT;
    ((bytes & LOW_BITS) << 1) ^ (carries * REDUCTION)
}
