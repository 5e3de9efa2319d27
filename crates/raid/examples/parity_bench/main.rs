//! How fast parity is computed, side by side with ISA-L: GB/s of a stripe's data.
//!
//! `cargo run --release -p ashlar-raid --example parity_bench [SECONDS_PER_ROW [KERNELS [ROWS]]]`
//!
//! KERNELS is a comma between names, or `all`; without it, all but the scalar ones. An array takes
//! what `Kernels::detect` does. ROWS is part of the names of rows to print: `cached encode`. ISA-L
//! takes part where it is installed (`isal.rs`): its functions for RAID where there is one for the
//! work (they store past the caches, as `avx2-streaming` does), and those for erasure coding, with
//! our factors. Its tables are made before the clock runs; what `reconstruct` decides is in our
//! time.
//!
//! Method: stripes of 64 KiB chunks side by side, filled from a fixed seed. `cached` works on one
//! stripe again and again, `memory` on so many in turn that no cache holds them. Contestants take
//! turns in rounds of about a millisecond on one CPU, so that a change of the machine's speed meets
//! all; the first rounds do not count. `ours/this` is the median of the ratios within each turn,
//! of the kernels that arrays take here, which stand last. Before any timing each contestant works
//! on the same stripe, and must leave the same bytes: the hash of them is printed.

mod isal;

use std::hint::black_box;
use std::time::{Duration, Instant};

use ashlar_raid::parity::Kernels;
use isal::{Isal, Tables};

const CHUNK: usize = 64 << 10;
const ALIGNMENT: usize = 4096;
const SEED: u64 = 0x05ee_d0fa_51a8;

/// Data and parity chunks.
const SHAPES: [(usize, usize); 5] = [(4, 1), (4, 2), (8, 2), (10, 4), (16, 3)];

/// Several times the last cache of one socket.
const MEMORY_BYTES: usize = 512 << 20;

/// Of a round, in data: long against reading the clock, short against an interruption.
const ROUND_BYTES: usize = 16 << 20;

#[derive(Clone, Copy, PartialEq)]
enum Work {
    /// Parity of a whole stripe.
    Encode,
    /// The first so many data chunks, from the other data and the first parity chunks.
    Recover(usize),
    /// Read-modify-write of one chunk; GB/s of that chunk.
    Update,
}

impl Work {
    fn name(self) -> String {
        match self {
            Work::Encode => "encode".into(),
            Work::Recover(lost) => format!("lose {lost}"),
            Work::Update => "update".into(),
        }
    }
}

#[derive(Clone, Copy)]
enum Contestant<'a> {
    Ours(Kernels),
    /// `xor_gen` and `pq_gen`.
    Raid(&'a Isal),
    /// `ec_encode_data` and `ec_encode_data_update`.
    Erasure(&'a Isal, &'a Tables),
}

impl Contestant<'_> {
    fn name(self) -> &'static str {
        match self {
            Contestant::Ours(kernels) => kernels.name(),
            Contestant::Raid(_) => "isa-l raid",
            Contestant::Erasure(..) => "isa-l ec",
        }
    }
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let seconds = arguments.next().map_or(1.0, |text| text.parse().expect("seconds"));
    let wanted = arguments.next();
    let part = arguments.next().unwrap_or_default();
    let mut kernels = Kernels::all_available();
    kernels.retain(|kernels| match wanted.as_deref() {
        None => kernels.name() != "scalar",
        Some("all") => true,
        Some(names) => names.split(',').any(|name| name == kernels.name()),
    });
    assert!(!kernels.is_empty(), "this CPU has no kernels {wanted:?}");
    let taken = Kernels::detect().name();
    kernels.sort_by_key(|kernels| kernels.name() == taken);

    stay_on_this_cpu();
    let isal = Isal::load();
    println!("{}", isal.as_ref().map_or("without ISA-L".into(), Isal::path));
    println!("row                    contestant   median (  min ..   max)  ours/this   hash");
    for (memory, bytes) in [("cached", 0), ("memory", MEMORY_BYTES)] {
        for (k, m) in SHAPES {
            let mut stripes = Stripes::new(k, m, bytes);
            let mut works = vec![Work::Encode, Work::Recover(1), Work::Recover(m), Work::Update];
            works.dedup();
            for work in works {
                let name = format!("{memory} {} {k}+{m}", work.name());
                if !name.contains(&part) {
                    continue;
                }
                let time = Duration::from_secs_f64(seconds);
                for row in measure(&mut stripes, work, &kernels, isal.as_ref(), time, ROUND_BYTES) {
                    println!("{name:<18} {row}");
                }
            }
        }
    }
}

/// The scheduler would move us between rounds, from warm caches to cold ones.
fn stay_on_this_cpu() {
    let mut cpus = rustix::thread::CpuSet::new();
    cpus.set(rustix::thread::sched_getcpu());
    rustix::thread::sched_setaffinity(None, &cpus).expect("a thread may stay where it is");
}

struct Row {
    contestant: &'static str,
    /// GB/s, ascending.
    rates: Vec<f64>,
    /// Of our last kernels' rate to this one's, ascending: arrays take those, if they are measured.
    ratios: Vec<f64>,
    /// Of a stripe after one piece of work.
    hash: u64,
}

impl std::fmt::Display for Row {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Row { contestant, rates, ratios, hash } = self;
        let (least, most) = (rates[0], rates[rates.len() - 1]);
        let (rate, ratio) = (rates[rates.len() / 2], ratios[ratios.len() / 2]);
        write!(f, "{contestant:>14} {rate:>8.1} ({least:>5.1} .. {most:>5.1}) {ratio:>10.2}")?;
        write!(f, "   {hash:016x}")
    }
}

/// All contestants in turn, for about `time` in sum.
fn measure(
    stripes: &mut Stripes,
    work: Work,
    kernels: &[Kernels],
    isal: Option<&Isal>,
    time: Duration,
    round_bytes: usize,
) -> Vec<Row> {
    let (k, m) = (stripes.k, stripes.m);
    let tables = isal.map(|isal| isal.tables(&rows(isal, work, k, m)));
    let mut contestants: Vec<Contestant> = kernels.iter().copied().map(Contestant::Ours).collect();
    if let (Some(isal), Some(tables)) = (isal, &tables) {
        let is_raid = match work {
            Work::Encode => m <= 2,
            Work::Recover(lost) => lost == 1,
            Work::Update => m == 1,
        };
        contestants.extend(is_raid.then_some(Contestant::Raid(isal)));
        contestants.push(Contestant::Erasure(isal, tables));
    }
    let hash_of = |contestant: &Contestant| stripes.hash_after(work, *contestant);
    let hashes: Vec<u64> = contestants.iter().map(hash_of).collect();
    assert!(hashes.iter().all(|hash| *hash == hashes[0]), "{} of {k}+{m} differ", work.name());

    let mut rounds: Vec<Vec<f64>> = Vec::new();
    let mut elapsed = Duration::ZERO;
    while elapsed < time || rounds.len() < 2 {
        let mut rates = vec![0.0; contestants.len()];
        let mut turn: Vec<usize> = (0..contestants.len()).collect();
        // Back and forth, as each finds the caches as the one before left them.
        if rounds.len() % 2 == 1 {
            turn.reverse();
        }
        for index in turn {
            let (bytes, duration) = stripes.round(work, contestants[index], round_bytes);
            rates[index] = bytes as f64 / duration.as_secs_f64() / 1e9;
            elapsed += duration;
        }
        rounds.push(rates);
    }
    // The first one warmed up.
    let counted = &rounds[1..];
    let row = |(index, contestant): (usize, &Contestant)| {
        let mut rates: Vec<f64> = counted.iter().map(|round| round[index]).collect();
        let ours = kernels.len() - 1;
        let mut ratios: Vec<f64> = counted.iter().map(|round| round[ours] / round[index]).collect();
        rates.sort_by(f64::total_cmp);
        ratios.sort_by(f64::total_cmp);
        Row { contestant: contestant.name(), rates, ratios, hash: hashes[index] }
    };
    contestants.iter().enumerate().map(row).collect()
}

/// The factors of the sources in the outputs, a row for each output.
fn rows(isal: &Isal, work: Work, k: usize, m: usize) -> Vec<Vec<u8>> {
    let identity = (0..k).map(|row| (0..k).map(|column| u8::from(row == column)).collect());
    let mut all: Vec<Vec<u8>> = identity.collect();
    all.extend(factors(k, m));
    match work {
        Work::Encode | Work::Update => all.split_off(k),
        Work::Recover(lost) => {
            let inverse = isal.invert(all[lost..][..k].concat(), k);
            inverse.chunks(k).take(lost).map(<[u8]>::to_vec).collect()
        }
    }
}

/// Our factors of k data chunks in m parity chunks: parity of a chunk of ones among zeros.
fn factors(k: usize, m: usize) -> Vec<Vec<u8>> {
    let mut factors = vec![vec![0; k]; m];
    for index in 0..k {
        let data: Vec<Vec<u8>> = (0..k).map(|i| vec![u8::from(i == index); 512]).collect();
        let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
        let mut parity = vec![vec![0; 512]; m];
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(Vec::as_mut_slice).collect();
        Kernels::all_available()[0].encode(&data, &mut outputs);
        for (row, chunk) in factors.iter_mut().zip(&parity) {
            row[index] = chunk[0];
        }
    }
    factors
}

/// Stripes in memory, chunk after chunk; behind each, new data for one chunk, and a spare one.
struct Stripes {
    memory: Vec<u8>,
    start: usize,
    k: usize,
    m: usize,
    count: usize,
    next: usize,
}

impl Stripes {
    /// As many as make `bytes`, and at least one.
    fn new(k: usize, m: usize, bytes: usize) -> Stripes {
        let stripe_bytes = (k + m + 2) * CHUNK;
        let count = (bytes / stripe_bytes).max(1);
        let memory = vec![0; count * stripe_bytes + ALIGNMENT];
        let start = memory.as_ptr().align_offset(ALIGNMENT);
        let mut stripes = Stripes { memory, start, k, m, count, next: 0 };
        for stripe in 0..count {
            stripes.reset(stripe);
        }
        stripes
    }

    fn stripe(&mut self, index: usize) -> &mut [u8] {
        let bytes = (self.k + self.m + 2) * CHUNK;
        &mut self.memory[self.start + index * bytes..][..bytes]
    }

    /// The same contents for all stripes, so that every contestant starts from the same.
    fn reset(&mut self, stripe: usize) {
        let mut state = SEED;
        for word in self.stripe(stripe).as_chunks_mut::<8>().0 {
            // xorshift64
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            *word = state.to_le_bytes();
        }
    }

    /// FNV-1a of a stripe, less the spare chunk, after one piece of work on it.
    fn hash_after(&mut self, work: Work, contestant: Contestant) -> u64 {
        self.reset(0);
        let (k, m) = (self.k, self.m);
        // What is lost comes out as it was only if parity is right.
        let by = Contestant::Ours(Kernels::detect());
        run(Work::Encode, by, k, m, &mut Task::new(Work::Encode, by, k, m, self.stripe(0)));
        let to_do = match work {
            Work::Encode => k..k + m,
            Work::Recover(lost) => 0..lost,
            Work::Update => 0..0,
        };
        self.stripe(0)[to_do.start * CHUNK..to_do.end * CHUNK].fill(0);
        run(work, contestant, k, m, &mut Task::new(work, contestant, k, m, self.stripe(0)));
        self.stripe(0)[..(k + m + 1) * CHUNK].iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
        })
    }

    /// Works on `round_bytes` of data; returns the bytes really done, and the time.
    #[expect(clippy::disallowed_methods, reason = "a benchmark measures real time")]
    fn round(&mut self, work: Work, by: Contestant, round_bytes: usize) -> (usize, Duration) {
        let bytes_a_time = match work {
            Work::Encode | Work::Recover(_) => self.k * CHUNK,
            Work::Update => CHUNK,
        };
        let times = round_bytes.div_ceil(bytes_a_time);
        let (k, m, count) = (self.k, self.m, self.count.min(times));
        if self.next + count > self.count {
            self.next = 0;
        }
        let stripe_bytes = self.stripe(0).len();
        let stripes = &mut self.memory[self.start + self.next * stripe_bytes..];
        let stripes = stripes.chunks_exact_mut(stripe_bytes).take(count);
        let mut tasks: Vec<Task> =
            stripes.map(|stripe| Task::new(work, by, k, m, stripe)).collect();
        self.next += count;
        let begin = Instant::now();
        for index in 0..times {
            run(work, by, k, m, black_box(&mut tasks[index % count]));
        }
        (times * bytes_a_time, begin.elapsed())
    }
}

/// What to read and what to write on one stripe, in the form that a contestant wants.
enum Task<'a> {
    Slices(Vec<&'a [u8]>, Vec<&'a mut [u8]>),
    /// With chunk ids, or numbers of parity chunks.
    Numbered(Vec<(usize, &'a [u8])>, Vec<(usize, &'a mut [u8])>),
}

impl<'a> Task<'a> {
    fn new(work: Work, by: Contestant, k: usize, m: usize, stripe: &'a mut [u8]) -> Task<'a> {
        let mut chunks: Vec<&mut [u8]> = stripe.chunks_exact_mut(CHUNK).collect();
        let (sources, first, outputs) = match work {
            Work::Encode => {
                let outputs = chunks.drain(k..k + m).collect();
                chunks.truncate(k);
                (chunks, 0, outputs)
            }
            Work::Recover(lost) => {
                chunks.truncate(lost + k);
                let sources = chunks.split_off(lost);
                (sources, lost, chunks)
            }
            Work::Update => {
                // The spare chunk is for ISA-L, which wants the difference of old and new in one.
                let spare = chunks.pop().filter(|_| matches!(by, Contestant::Erasure(..)));
                let new = chunks.pop();
                let outputs = chunks.split_off(k).into_iter().chain(spare).collect();
                (chunks.drain(k - 1..).chain(new).collect(), 0, outputs)
            }
        };
        let sources: Vec<&[u8]> = sources.into_iter().map(|chunk| &*chunk).collect();
        match (by, work) {
            (Contestant::Ours(_), Work::Recover(_) | Work::Update) => Task::Numbered(
                (first..).zip(sources).collect(),
                outputs.into_iter().enumerate().collect(),
            ),
            (Contestant::Ours(_), Work::Encode)
            | (Contestant::Raid(_) | Contestant::Erasure(..), _) => Task::Slices(sources, outputs),
        }
    }
}

fn run(work: Work, contestant: Contestant, k: usize, m: usize, task: &mut Task) {
    match (contestant, work, task) {
        (Contestant::Ours(kernels), Work::Encode, Task::Slices(data, parity)) => {
            kernels.encode(data, parity);
        }
        (Contestant::Ours(kernels), Work::Recover(_), Task::Numbered(present, missing)) => {
            kernels.reconstruct(k, m, present, missing).expect("k are present");
        }
        (Contestant::Ours(kernels), Work::Update, Task::Numbered(change, parity)) => {
            kernels.update(m, k - 1, change[0].1, change[1].1, parity);
        }
        (Contestant::Raid(isal), Work::Update, Task::Slices(change, parity)) => {
            isal.xor_into(change, parity[0]);
        }
        (Contestant::Raid(isal), _, Task::Slices(sources, outputs)) => match &mut outputs[..] {
            [p, q] => isal.pq(sources, p, q),
            outputs => isal.xor(sources, outputs[0]),
        },
        (Contestant::Erasure(isal, tables), Work::Update, Task::Slices(change, outputs)) => {
            let (spare, parity) = outputs.split_last_mut().expect("the spare chunk");
            isal.xor(change, spare);
            isal.mul_add(tables, k - 1, spare, parity);
        }
        (Contestant::Erasure(isal, tables), _, Task::Slices(sources, outputs)) => {
            isal.combine(tables, sources, outputs);
        }
        (_, _, Task::Slices(..) | Task::Numbered(..)) => unreachable!("`Task::new` made another"),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the benchmark runs, and its contestants do the same work.
    //! Method: a tiny round of everything, which compares hashes before it begins.

    use super::*;

    #[test]
    fn contestants_agree() {
        let isal = Isal::load();
        for (k, m) in SHAPES {
            let mut stripes = Stripes::new(k, m, 0);
            for work in [Work::Encode, Work::Recover(1), Work::Recover(m), Work::Update] {
                let kernels = Kernels::all_available();
                let rows = measure(&mut stripes, work, &kernels, isal.as_ref(), Duration::ZERO, 1);
                assert!(rows.len() >= kernels.len());
                assert!(rows.iter().all(|row| row.rates.len() == 1));
            }
        }
    }
}
