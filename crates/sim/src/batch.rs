//! Many seeds: which failed, and how to repeat one.

use std::cell::Cell;
use std::panic::AssertUnwindSafe;

use crate::canary::Canary;
use crate::scenario::{self, Options, Verdict};

thread_local! {
    static CURRENT: Cell<Option<u64>> = const { Cell::new(None) };
}

/// Makes a panic say which seed it was in. A build that aborts on panic says at least that.
pub fn name_seed_in_panics() {
    let before = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        if let Some(seed) = CURRENT.get() {
            eprintln!("seed {seed} panicked; repeat it: cargo xtask sim --seed {seed}");
        }
        before(info);
    }));
}

/// Runs one seed; a panic of the engine is a failure.
pub fn run_caught(seed: u64, options: Options) -> Verdict {
    CURRENT.set(Some(seed));
    let result = std::panic::catch_unwind(AssertUnwindSafe(|| scenario::run(seed, options)));
    CURRENT.set(None);
    result.unwrap_or_else(|payload| {
        let text = payload.downcast_ref::<String>().cloned();
        let text = text.or_else(|| payload.downcast_ref::<&str>().map(|text| text.to_string()));
        let why = format!("panic: {}", text.unwrap_or_default());
        Verdict { failure: Some(why), ..Verdict::default() }
    })
}

pub const ALL_CANARIES: [Canary; 20] = [
    Canary::NoDirtyMap,
    Canary::NoWrittenMap,
    Canary::NoMissedMap,
    Canary::NoBadBlocks,
    Canary::NoFlush,
    Canary::NeglectedFlush,
    Canary::NoFence,
    Canary::LateFence,
    Canary::NoJournal,
    Canary::ParityOff,
    Canary::TrustReturned,
    Canary::ReplayOutOfOrder,
    Canary::RebuildAhead,
    Canary::SplitWrites,
    Canary::NoChecksums,
    Canary::ChecksumsOfWhatIsThere,
    Canary::NoMovedChecksums,
    Canary::RestripeAhead,
    Canary::BlindHost,
    Canary::LateWrites,
];

/// The first seed that finds a planted bug by what that does, and how.
pub fn find_canary(canary: Canary, start: u64, seeds: u64) -> Option<(u64, String)> {
    let options = Options { canary: Some(canary), ..Options::default() };
    let mut seeds = start..start.saturating_add(seeds);
    seeds.find_map(|seed| {
        let why = run_caught(seed, options).failure?;
        canary.shows_as().iter().any(|its| why.contains(its)).then_some((seed, why))
    })
}

/// Seeds that failed once, from `seeds.txt`: a number and a sentence on each line.
pub fn kept_seeds() -> Vec<u64> {
    let lines = include_str!("../seeds.txt").lines();
    let numbers = lines.filter_map(|line| line.split_whitespace().next()?.parse().ok());
    numbers.collect()
}
