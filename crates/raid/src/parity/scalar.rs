//! Parity in plain Rust: the reference for the vector kernels, and what runs where they cannot.
//!
//! Sums and Q go eight bytes at a time in a `u64`; products by any other factor go byte by byte
//! through the nibble tables.
//!
//! Invariant, kept by the caller (`Kernels`) for all kernel files: the slices of one call have the
//! same length, a multiple of `LENGTH_UNIT`. A break of it panics; it does not corrupt.

use super::code::Factors;
use super::gf256::times;

const WORD: usize = size_of::<u64>();

/// The low seven bits of each of eight bytes, which a doubling shifts without loss.
const LOW_BITS: u64 = 0x7f7f_7f7f_7f7f_7f7f;
const LOWEST_BIT: u64 = 0x0101_0101_0101_0101;

/// What x^8 is reduced to in GF(2^8) with polynomial 0x11d.
const REDUCTION: u64 = 0x1d;

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

/// `outputs[o]` = sum of `factors[i][o]` * (sum of `sources[i]`), or with `add`, += that.
pub(super) fn combine<const S: usize>(
    sources: &[[&[u8]; S]],
    factors: &[Factors],
    outputs: &mut [&mut [u8]],
    add: bool,
) {
    for (number, output) in outputs.iter_mut().enumerate() {
        if !add {
            output.fill(0);
        }
        for (source, factors) in sources.iter().zip(factors) {
            mul_add(source, factors[number], output);
        }
    }
}

/// `into` += `factor` * (sum of `source`).
fn mul_add<const S: usize>(source: &[&[u8]; S], factor: u8, into: &mut [u8]) {
    let source = source.map(|part| &part[..into.len()]);
    let times = times(factor);
    for (index, target) in into.iter_mut().enumerate() {
        let total = source.iter().fold(0, |total, part| total ^ part[index]);
        // P is most of the work and its factor is one; without tables, the compiler finds vectors.
        *target ^= if factor == 1 { total } else { times(total) };
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
