//! What share of its drives' speed an array delivers, when the drives are the limit.
//!
//! `cargo run --release -p ashlar-raid --example drive_limited [SECONDS] [virtual] [ROWS]`
//!
//! SECONDS: of each turn. ROWS: part of the names of the works to measure, such as `read`.
//!
//! Drives of the kind `model`: memory that serves a set number of operations and bytes a second.
//! Beside each figure stands what the geometry allows (`geometry.rs` has the formulas, and they are
//! printed), the ratio of the worst turn to it, and what the drives did for each request beside
//! what the formula says. The policies take turns in one run (A B A B); the best and the worst turn
//! are shown. `virtual`: under a clock that jumps, so that the CPU costs nothing: what is missing
//! then is the engine's plan, what is missing only in real time is its speed.
//!
//! A degraded array of policy `bitmap` writes through the journal, since in place a crash would
//! cost blocks; so beside `journal` a degraded array is measured with policy `none`.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a benchmark"
)]

mod geometry;
mod load;

use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_reactor::backend::Backend;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::uring::UringBackend;
use ashlar_reactor::virtual_time::VirtualBackend;
use geometry::{BYTES_PER_SECOND, Case, IOPS, LATENCY, Work};
use load::{SPAN, Turn};

const TURNS: u64 = 2;
const SECONDS: f64 = 1.0;
const LEVELS: [(Level, u64); 3] = [(Level::Raid5, 5), (Level::Raid6, 6), (Level::Raid7, 7)];
const LOG: &str = "log";
const LOG_WRITERS: [u64; 2] = [1, 4];

fn main() {
    let (mut virtual_time, mut seconds, mut rows) = (false, SECONDS, String::new());
    for arg in std::env::args().skip(1) {
        match arg.parse() {
            Ok(number) => seconds = number,
            Err(_) if arg == "virtual" => virtual_time = true,
            Err(_) => rows = arg,
        }
    }
    let backend: Box<dyn Backend> = if virtual_time {
        Box::<VirtualBackend>::default()
    } else {
        Box::new(UringBackend::new().unwrap())
    };
    let reactor = Reactor::new(backend, Order::Fifo);
    if !virtual_time {
        reactor.set_poll_window(Duration::from_millis(2));
    }
    reactor.block_on(bench(reactor.clone(), Duration::from_secs_f64(seconds), rows));
}

async fn bench(reactor: Reactor, time: Duration, rows: String) {
    explain();
    let works: Vec<Work> = Work::ALL.into_iter().filter(|w| w.name().contains(&rows)).collect();
    for (level, members) in LEVELS {
        for degraded in [false, true] {
            let in_place = if degraded { Policy::None } else { Policy::Bitmap };
            let case = |policy| Case { level, members, policy, degraded };
            compare(&reactor, [case(in_place), case(Policy::Journal)], &works, time).await;
        }
    }
    if LOG.contains(&rows) {
        logs(&reactor, time).await;
    }
}

async fn logs(reactor: &Reactor, time: Duration) {
    println!(
        "\nA log: the next 8 KiB, a flush, and so on. Nothing of it should be read. `end`: reads \
         after the last write,\nto put in place the stripe that is not full."
    );
    println!(
        "{:7} {:8} {:>7} {:>9} {:>9} {:>6} {:>6} {:>12} {:>5}",
        "level", "state", "writers", "allowed", "writes/s", "ratio", "ops", "reads/write", "end"
    );
    for (level, members) in LEVELS {
        for degraded in [false, true] {
            let case = Case { level, members, policy: Policy::Journal, degraded };
            log(reactor, &case, time).await;
        }
    }
}

fn explain() {
    println!(
        "Drives of {IOPS} operations and {} MB a second, {} us. Under way: {} random, {} \
         sequential, in {} GiB.\nn members, k data and m parity chunks in a stripe. \
         Allowed: drives / cost. \
         Cost of an operation:\nmax(1 / iops, bytes / bytes_per_second); of a request, the sum \
         over its operations:",
        BYTES_PER_SECOND / 1_000_000,
        LATENCY.as_micros(),
        Work::RandomRead.queue_depth(),
        Work::SequentialRead.queue_depth(),
        SPAN >> 30
    );
    for work in Work::ALL.into_iter().filter(|work| *work != Work::Overwrite) {
        let mut name = work.name();
        for line in work.formula() {
            println!("  {name:16}  {line}");
            name = "";
        }
    }
    println!(
        "  {:16}  its bytes (k + m) / k times, degraded (k + m − 1) / k, with m = 1 twice",
        "journal"
    );
    println!("  {:16}  latency only: writers / (1 / iops + 2 · latency)", LOG);
    println!(
        "A degraded array of policy bitmap writes through the journal: its figures are those of \
         journal.\n`of it`: journal, of the policy above it. In brackets: by the formula.\n\n\
         level   policy   state    work              allowed    worst     best ratio of it  \
         ops/request     KiB/request"
    );
}

/// The same work on arrays of two policies, in turns.
async fn compare(reactor: &Reactor, cases: [Case; 2], works: &[Work], time: Duration) {
    if works.is_empty() {
        return;
    }
    let arrays = [load::array(reactor, &cases[0]).await, load::array(reactor, &cases[1]).await];
    for work in works.iter().copied() {
        // Reads of what is in place do not depend on the policy.
        let policies = if work.writes() { 2 } else { 1 };
        let mut turns = [Vec::new(), Vec::new()];
        for seed in 0..TURNS {
            for index in 0..policies {
                let (case, array) = (&cases[index], &arrays[index]);
                turns[index].push(load::measure(reactor, array, case, work, time, seed).await);
            }
        }
        show(&cases[0], work, &turns[0], None);
        if work.writes() {
            show(&cases[1], work, &turns[1], Some(&turns[0]));
        }
    }
    for array in arrays {
        array.stop().await.unwrap();
    }
}

fn worst(turns: &[Turn]) -> f64 {
    turns.iter().map(Turn::rate).fold(f64::MAX, f64::min)
}

fn show(case: &Case, work: Work, turns: &[Turn], other: Option<&[Turn]>) {
    let (allowed, cost) = (case.allowed(work), case.cost(work));
    let best = turns.iter().map(Turn::rate).fold(0.0, f64::max);
    let per_request = |what: fn(&Turn) -> f64| {
        turns.iter().map(what).sum::<f64>() / turns.iter().map(|turn| turn.requests).sum::<f64>()
    };
    let of_it = other.map_or("".into(), |other| format!("{:.2}", worst(turns) / worst(other)));
    println!(
        "{} {:16} {allowed:8.0} {:8.0} {best:8.0} {:5.2} {of_it:>5}  {:5.2} ({:5.2})  {:6.1} \
         ({:6.1})",
        name(case),
        work.name(),
        worst(turns),
        worst(turns) / allowed,
        per_request(|turn| turn.operations),
        cost.operations,
        per_request(|turn| turn.bytes) / 1024.0,
        cost.bytes / 1024.0,
    );
}

fn name(case: &Case) -> String {
    let policy = match case.policy {
        Policy::Journal => "journal",
        Policy::Bitmap => "bitmap",
        Policy::None => "none",
    };
    let state = if case.degraded { "degraded" } else { "healthy" };
    format!("RAID {:<2} {policy:8} {state:8}", case.level as u8)
}

async fn log(reactor: &Reactor, case: &Case, time: Duration) {
    let array = load::array(reactor, case).await;
    for writers in LOG_WRITERS {
        let (turn, after) = load::log(reactor, &array, writers, time * 2).await;
        let (allowed, rate) = (case.allowed_log(writers), turn.rate());
        let state = if case.degraded { "degraded" } else { "healthy" };
        println!(
            "RAID {:<2} {state:8} {writers:>7} {allowed:9.0} {rate:9.0} {:6.2} {:6.2} {:>12.4} \
             {:>5}",
            case.level as u8,
            rate / allowed,
            turn.operations / turn.requests,
            turn.reads / turn.requests,
            after.reads,
        );
    }
    array.stop().await.unwrap();
}
