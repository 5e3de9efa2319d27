//! The simulator's command line: many seeds, one seed with a trace, or a planted bug to be found.

use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use ashlar_sim::batch;
use ashlar_sim::canary::Canary;
use ashlar_sim::faults::Plan;
use ashlar_sim::scenario::{Options, Verdict};
use clap::Parser;

/// Runs the whole engine in virtual time, with faults drawn from seeds.
#[derive(Parser)]
#[command(name = "cargo xtask sim")]
struct Arguments {
    /// How many seeds to run.
    #[arg(long, default_value_t = 500)]
    seeds: u64,
    /// The first of them.
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Repeat one seed and print all that happens.
    #[arg(long, conflicts_with_all = ["seeds", "start"])]
    seed: Option<u64>,
    /// Plant a bug; it must be found within the seeds.
    #[arg(long, value_enum)]
    canary: Option<Canary>,
    /// Plant every bug in turn; each must be found within the seeds.
    #[arg(long, conflicts_with = "canary")]
    canaries: bool,
    /// Fail each operation of a small workload in turn, and cut power after each: only every
    /// so many of them (1: all).
    #[arg(long, value_name = "STRIDE")]
    enumerate: Option<u64>,
    /// Go on after a seed has failed.
    #[arg(long)]
    keep_going: bool,
    /// Seeds that run at the same time.
    #[arg(long, default_value_t = 1)]
    jobs: u64,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    batch::name_seed_in_panics();
    let good = if let Some(seed) = arguments.seed {
        one(seed, arguments.canary)
    } else if arguments.canaries {
        let found = batch::ALL_CANARIES.map(|canary| canary_is_found(&arguments, canary));
        found.into_iter().all(|found| found)
    } else if let Some(canary) = arguments.canary {
        canary_is_found(&arguments, canary)
    } else if let Some(stride) = arguments.enumerate {
        enumerated(stride)
    } else {
        many(&arguments)
    };
    if good { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn one(seed: u64, canary: Option<Canary>) -> bool {
    println!("seed {seed}: {}", Plan::draw(seed).describe());
    let verdict = batch::run_caught(seed, Options { trace: true, canary });
    println!(
        "{} operations, {} sectors checked, {} ms of virtual time, hash {:016x}",
        verdict.completions,
        verdict.sectors_checked,
        verdict.virtual_ns / 1_000_000,
        verdict.hash
    );
    match verdict.failure {
        None => println!("seed {seed} is good"),
        Some(ref why) => println!("seed {seed} FAILED: {why}"),
    }
    verdict.failure.is_none()
}

fn canary_is_found(arguments: &Arguments, canary: Canary) -> bool {
    match batch::find_canary(canary, arguments.start, arguments.seeds) {
        Some((seed, why)) => {
            println!("{canary:?}: found by seed {seed}: {why}");
            true
        }
        None => {
            println!("{canary:?}: NOT FOUND in {} seeds", arguments.seeds);
            false
        }
    }
}

fn enumerated(stride: u64) -> bool {
    let report = ashlar_sim::enumerate::run(stride);
    println!("{} single faults, {} failed", report.cases, report.failures.len());
    for failure in &report.failures {
        println!("{failure}");
    }
    report.failures.is_empty()
}

/// What all threads add to.
#[derive(Default)]
struct Totals {
    seeds: AtomicU64,
    failed: AtomicU64,
    completions: AtomicU64,
    sectors: AtomicU64,
    virtual_ns: AtomicU64,
    stop: AtomicBool,
}

impl Totals {
    fn add(&self, verdict: &Verdict) {
        self.seeds.fetch_add(1, Ordering::Relaxed);
        self.completions.fetch_add(verdict.completions, Ordering::Relaxed);
        self.sectors.fetch_add(verdict.sectors_checked, Ordering::Relaxed);
        self.virtual_ns.fetch_add(verdict.virtual_ns, Ordering::Relaxed);
    }
}

#[expect(clippy::disallowed_methods, reason = "progress is in real time")]
fn many(arguments: &Arguments) -> bool {
    let began = std::time::Instant::now();
    let totals = Totals::default();
    let next = AtomicU64::new(arguments.start);
    let end = arguments.start.saturating_add(arguments.seeds);
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= end || totals.stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let options = Options::default();
                    let verdict = batch::run_caught(seed, options);
                    totals.add(&verdict);
                    if let Some(why) = &verdict.failure {
                        report(seed, why);
                        totals.failed.fetch_add(1, Ordering::Relaxed);
                        totals.stop.fetch_or(!arguments.keep_going, Ordering::Relaxed);
                    }
                    let done = totals.seeds.load(Ordering::Relaxed);
                    if done.is_multiple_of(100) {
                        progress(done, arguments.seeds, began.elapsed().as_millis());
                    }
                }
            });
        }
    });
    let done = totals.seeds.load(Ordering::Relaxed);
    let failed = totals.failed.load(Ordering::Relaxed);
    println!(
        "{done} seeds, {failed} failed, in {} s: {} operations, {} sectors checked, {} s \
         of virtual time",
        began.elapsed().as_secs(),
        totals.completions.load(Ordering::Relaxed),
        totals.sectors.load(Ordering::Relaxed),
        totals.virtual_ns.load(Ordering::Relaxed) / 1_000_000_000
    );
    failed == 0
}

fn progress(done: u64, of: u64, elapsed_ms: u128) {
    let rate = u128::from(done) * 1000 / elapsed_ms.max(1);
    let left = u128::from(of.saturating_sub(done)) / rate.max(1);
    eprintln!("{done} of {of} seeds, {rate} a second, {left} s to go");
}

fn report(seed: u64, why: &str) {
    let commit = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit = commit.ok().and_then(|out| String::from_utf8(out.stdout).ok());
    let commit = commit.map_or(String::new(), |commit| format!("at {}: ", commit.trim()));
    println!("seed {seed} FAILED: {why}\n  repeat it {commit}cargo xtask sim --seed {seed}");
}
