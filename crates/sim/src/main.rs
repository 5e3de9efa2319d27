//! The simulator's command line: many seeds, one seed with a trace, or a planted bug to be found.

use std::io::IsTerminal;
use std::num::NonZero;
use std::process::{Command, ExitCode};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use ashlar_sim::batch;
use ashlar_sim::canary::Canary;
use ashlar_sim::enumerate::Steps;
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
    /// The first of them (with --enumerate: which workload).
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Repeat one seed and print all that happens.
    #[arg(long, conflicts_with_all = ["seeds", "start"])]
    seed: Option<u64>,
    /// Plant a bug; it must be found within the seeds (with --enumerate: see what that finds).
    #[arg(long, value_enum)]
    canary: Option<Canary>,
    /// Plant every bug in turn; each must be found within the seeds.
    #[arg(long, conflicts_with = "canary")]
    canaries: bool,
    /// Fail each operation of a small workload in turn, and cut power after each: only every
    /// so many of them (1: all).
    #[arg(long, value_name = "STRIDE", value_parser = clap::value_parser!(u64).range(1..))]
    enumerate: Option<u64>,
    /// Go on after a seed has failed.
    #[arg(long)]
    keep_going: bool,
    /// Seeds that run at the same time [default: one on each core].
    #[arg(long)]
    jobs: Option<usize>,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    batch::name_seed_in_panics();
    let good = if let Some(seed) = arguments.seed {
        one(seed, arguments.canary)
    } else if arguments.canaries {
        let found = batch::ALL_CANARIES.map(|canary| canary_is_found(&arguments, canary));
        found.into_iter().all(|found| found)
    } else if let Some(stride) = arguments.enumerate {
        let jobs = arguments.jobs.unwrap_or_else(cores).max(1);
        let steps = Steps { stride, workload: arguments.start };
        enumerated(steps, jobs, arguments.canary)
    } else if let Some(canary) = arguments.canary {
        canary_is_found(&arguments, canary)
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

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, NonZero::get)
}

fn enumerated(steps: Steps, jobs: usize, canary: Option<Canary>) -> bool {
    let options = Options { canary, ..Options::default() };
    let report = ashlar_sim::enumerate::run(steps, jobs, options);
    println!("{} single faults, {} failed", report.cases, report.failures.len());
    for failure in &report.failures {
        println!("{failure}");
    }
    report.failures.is_empty()
}

/// What all threads add to.
struct Totals {
    began: Instant,
    wanted: u64,
    seeds: AtomicU64,
    failed: AtomicU64,
    completions: AtomicU64,
    sectors: AtomicU64,
    virtual_ns: AtomicU64,
    refused: AtomicU64,
    taken: AtomicU64,
    stop: AtomicBool,
    /// When progress is shown next, in milliseconds.
    show_at_ms: AtomicU64,
}

impl Totals {
    #[expect(clippy::disallowed_methods, reason = "progress is in real time")]
    fn new(wanted: u64) -> Totals {
        Totals {
            began: Instant::now(),
            wanted,
            seeds: AtomicU64::new(0),
            failed: AtomicU64::new(0),
            completions: AtomicU64::new(0),
            sectors: AtomicU64::new(0),
            virtual_ns: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            taken: AtomicU64::new(0),
            stop: AtomicBool::new(false),
            show_at_ms: AtomicU64::new(1000),
        }
    }

    fn add(&self, verdict: &Verdict) {
        self.seeds.fetch_add(1, Relaxed);
        self.completions.fetch_add(verdict.completions, Relaxed);
        self.sectors.fetch_add(verdict.sectors_checked, Relaxed);
        self.virtual_ns.fetch_add(verdict.virtual_ns, Relaxed);
        self.refused.fetch_add(verdict.contests.refused, Relaxed);
        self.taken.fetch_add(verdict.contests.taken, Relaxed);
    }

    /// One line that is written over on a terminal; seldom a line elsewhere.
    fn show(&self) {
        let elapsed_ms = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let due = self.show_at_ms.load(Relaxed);
        if elapsed_ms < due {
            return;
        }
        let terminal = std::io::stderr().is_terminal();
        let next = elapsed_ms + if terminal { 200 } else { 30_000 };
        if self.show_at_ms.compare_exchange(due, next, Relaxed, Relaxed).is_err() {
            // Another thread shows it.
            return;
        }
        let (done, wanted) = (self.seeds.load(Relaxed), self.wanted);
        let rate = done * 1000 / elapsed_ms.max(1);
        let left_s = wanted.saturating_sub(done) / rate.max(1);
        let (hours, minutes, seconds) = (left_s / 3600, left_s / 60 % 60, left_s % 60);
        let end = if terminal { "\x1b[K\r" } else { "\n" };
        eprint!(
            "{done} of {wanted} seeds, {rate} a second, {hours}:{minutes:02}:{seconds:02} to go\
             {end}"
        );
    }
}

/// What is printed next does not stand in the line that progress is shown in.
fn clear_line() {
    if std::io::stderr().is_terminal() {
        eprint!("\x1b[K");
    }
}

fn many(arguments: &Arguments) -> bool {
    let totals = Totals::new(arguments.seeds);
    let next = AtomicU64::new(arguments.start);
    let end = arguments.start.saturating_add(arguments.seeds);
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs.unwrap_or_else(cores).max(1) {
            scope.spawn(|| {
                while !totals.stop.load(Relaxed) {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= end {
                        return;
                    }
                    let verdict = batch::run_caught(seed, Options::default());
                    totals.add(&verdict);
                    if let Some(why) = &verdict.failure {
                        report(seed, why);
                        totals.failed.fetch_add(1, Relaxed);
                        totals.stop.fetch_or(!arguments.keep_going, Relaxed);
                    }
                    totals.show();
                }
            });
        }
    });
    clear_line();
    let failed = totals.failed.load(Relaxed);
    println!(
        "{} seeds, {failed} failed, in {} s: {} operations, {} sectors checked, {} s of virtual \
         time; another host was refused {} times, and took the array {} times",
        totals.seeds.load(Relaxed),
        totals.began.elapsed().as_secs(),
        totals.completions.load(Relaxed),
        totals.sectors.load(Relaxed),
        totals.virtual_ns.load(Relaxed) / 1_000_000_000,
        totals.refused.load(Relaxed),
        totals.taken.load(Relaxed)
    );
    failed == 0
}

fn report(seed: u64, why: &str) {
    let commit = Command::new("git").args(["rev-parse", "--short", "HEAD"]).output();
    let commit = commit.ok().and_then(|out| String::from_utf8(out.stdout).ok());
    let commit = commit.map_or(String::new(), |commit| format!("at {}: ", commit.trim()));
    clear_line();
    println!("seed {seed} FAILED: {why}\n  repeat it {commit}cargo xtask sim --seed {seed}");
}
