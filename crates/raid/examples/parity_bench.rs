//! How fast parity is computed from cache: GB/s, per kind of work, shape of stripe, and kernel.
//!
//! `cargo run --release -p ashlar-raid --example parity_bench [SECONDS_PER_SHAPE]`
//!
//! Method: one stripe of 64 KiB chunks side by side, filled from a fixed seed, is encoded again and
//! again; then one is updated, then one is recovered. Of many short rounds, of which the first does
//! not count, the median and the best are printed. Kernels take turns within a shape, so that a
//! change of the machine's speed meets all. The hash is of the whole stripe: equal hashes mean that
//! the kernels did the same work.

use std::hint::black_box;
use std::time::{Duration, Instant};

use ashlar_raid::parity::Kernels;

const CHUNK: usize = 64 << 10;
const ALIGNMENT: usize = 4096;
const SEED: u64 = 0x05ee_d0fa_51a8;

/// Data and parity chunks.
const SHAPES: [(usize, usize); 4] = [(4, 1), (4, 2), (8, 2), (16, 2)];

/// Size of a round: long against reading the clock, short against an interruption.
const ROUND_BYTES: usize = 16 << 20;

#[derive(Clone, Copy)]
enum Work {
    /// A whole stripe; GB/s of its data.
    Encode,
    /// Read-modify-write of one chunk; GB/s of that chunk's new data.
    Update,
    /// The first m data chunks, from all other chunks; GB/s of what is recomputed.
    Recover,
}

impl Work {
    const ALL: [Work; 3] = [Work::Encode, Work::Update, Work::Recover];

    fn name(self) -> &'static str {
        match self {
            Work::Encode => "encode",
            Work::Update => "update",
            Work::Recover => "recover",
        }
    }
}

fn main() {
    let seconds = std::env::args().nth(1).map_or(1.0, |text| text.parse().expect("seconds"));
    println!("   work  shape      kernels   median     best   hash");
    for work in Work::ALL {
        for (k, m) in SHAPES {
            for result in measure(work, k, m, Duration::from_secs_f64(seconds), ROUND_BYTES) {
                let Measured { kernels, median, best, hash } = result;
                let (work, name) = (work.name(), kernels.name());
                println!("{work:>7} {k:>3}+{m} {name:>12} {median:>8.1} {best:>8.1}   {hash:016x}");
            }
        }
    }
}

struct Measured {
    kernels: Kernels,
    /// GB/s.
    median: f64,
    best: f64,
    /// Of the stripe after a round.
    hash: u64,
}

/// All kernels in turn, for about `time` in sum.
fn measure(work: Work, k: usize, m: usize, time: Duration, round_bytes: usize) -> Vec<Measured> {
    let kernels = Kernels::all_available();
    let mut rates = vec![Vec::new(); kernels.len()];
    let mut hashes = vec![0; kernels.len()];
    let mut stripe = Stripe::new(k, m);
    let mut elapsed = Duration::ZERO;
    let mut is_warm = false;
    while elapsed < time || rates[0].is_empty() {
        for (index, kernels) in kernels.iter().enumerate() {
            stripe.reset();
            let (bytes, duration) = stripe.round(work, *kernels, round_bytes);
            hashes[index] = hash(stripe.bytes());
            if is_warm {
                rates[index].push(bytes as f64 / duration.as_secs_f64() / 1e9);
                elapsed += duration;
            }
        }
        is_warm = true;
    }
    let results = std::iter::zip(kernels, rates).zip(hashes);
    results
        .map(|((kernels, mut rates), hash)| {
            rates.sort_by(f64::total_cmp);
            let (median, best) = (rates[rates.len() / 2], rates[rates.len() - 1]);
            Measured { kernels, median, best, hash }
        })
        .collect()
}

/// One stripe in memory, chunk after chunk, and behind it new data for one chunk.
struct Stripe {
    memory: Vec<u8>,
    start: usize,
    k: usize,
    m: usize,
}

impl Stripe {
    fn new(k: usize, m: usize) -> Stripe {
        let memory = vec![0; (k + m + 1) * CHUNK + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let mut stripe = Stripe { memory, start, k, m };
        stripe.reset();
        stripe
    }

    fn bytes(&mut self) -> &mut [u8] {
        let size = (self.k + self.m + 1) * CHUNK;
        &mut self.memory[self.start..][..size]
    }

    /// Back to the same contents, so that every kernel starts from the same.
    fn reset(&mut self) {
        let mut state = SEED;
        for word in self.bytes().as_chunks_mut::<8>().0 {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
    }

    /// Does `round_bytes` of work; returns the bytes really done, and the time.
    #[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
    fn round(&mut self, work: Work, kernels: Kernels, round_bytes: usize) -> (usize, Duration) {
        let (k, m) = (self.k, self.m);
        let (chunks, new) = self.bytes().split_at_mut((k + m) * CHUNK);
        let mut chunks: Vec<&mut [u8]> = chunks.chunks_exact_mut(CHUNK).collect();
        let bytes_a_time = match work {
            Work::Encode => k * CHUNK,
            Work::Update => CHUNK,
            Work::Recover => m * CHUNK,
        };
        let times = round_bytes.div_ceil(bytes_a_time);
        let begin = Instant::now();
        match work {
            Work::Encode => {
                let (data, parity) = chunks.split_at_mut(k);
                let data: Vec<&[u8]> = data.iter().map(|chunk| &**chunk).collect();
                for _ in 0..times {
                    kernels.encode(black_box(&data), black_box(parity));
                }
            }
            Work::Update => {
                let (data, parity) = chunks.split_at_mut(k);
                let mut parity: Vec<(usize, &mut [u8])> =
                    parity.iter_mut().map(|chunk| &mut **chunk).enumerate().collect();
                for _ in 0..times {
                    kernels.update(m, k - 1, black_box(data[0]), black_box(new), &mut parity);
                }
            }
            Work::Recover => {
                let (lost, left) = chunks.split_at_mut(m);
                let left: Vec<(usize, &[u8])> =
                    left.iter().enumerate().map(|(index, chunk)| (m + index, &**chunk)).collect();
                let mut lost: Vec<(usize, &mut [u8])> =
                    lost.iter_mut().map(|chunk| &mut **chunk).enumerate().collect();
                for _ in 0..times {
                    let result = kernels.reconstruct(k, m, black_box(&left), &mut lost);
                    result.expect("m chunks are lost");
                }
            }
        }
        (times * bytes_a_time, begin.elapsed())
    }
}

/// FNV-1a.
fn hash(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    //! Goal: the benchmark runs, and its kernels do the same work.
    //! Method: one tiny round of everything; hashes are compared.

    use super::*;

    #[test]
    fn hashes_are_equal() {
        for work in Work::ALL {
            for (k, m) in SHAPES {
                let results = measure(work, k, m, Duration::ZERO, 1);
                let hashes: Vec<u64> = results.iter().map(|result| result.hash).collect();
                assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{k}+{m}: {hashes:x?}");
            }
        }
    }
}
