//! What share of its drives' speed an array delivers, when the drives are the limit.
//!
//! `cargo run --release -p ashlar-raid --example drive_limited [SECONDS]`. Drives of the kind
//! `model`: memory that serves a set number of operations and bytes a second. Beside each figure
//! stands what the geometry allows, with its formula, and the ratio. The policies take turns in one
//! run (A B A B); the best and the worst turn are shown.
//!
//! Formulas, of an array of n drives, k of them data in each stripe and m parity; every drive
//! serves `iops` operations a second of up to `bytes_per_second / iops` bytes:
//! - random read: n · iops (each read is one operation)
//! - random write in place: n · iops / (2 + 2m) (read and write one data and m parity chunks), or
//!   with the fewest reads, n · iops / (1 + m + k − 1) by reconstruction where that is less
//! - sequential write in place: n · bytes_per_second · k / (k + m)
//! - sequential write through the journal: each byte stands in m + 1 journals first, so
//!   n · bytes_per_second / (m + 1 + (k + m) / k)
//! - a mixture of reads and writes: operations of both, in their shares
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a benchmark"
)]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;

const DRIVE_BYTES: u64 = 512 << 20;
const IOPS: u64 = 10_000;
const BYTES_PER_SECOND: u64 = 200_000_000;
const LATENCY: Duration = Duration::from_micros(80);
const QUEUE_DEPTH: usize = 64;
const BLOCK: u64 = 4096;
/// Of one sequential request.
const LONG: u64 = 256 << 10;
const TURNS: usize = 2;
/// What is written to: small enough that parts of it are written more than once.
const SPAN: u64 = 64 << 20;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Work {
    RandomRead,
    RandomWrite,
    Mixed,
    SequentialRead,
    SequentialWrite,
}

impl Work {
    const ALL: [Work; 5] = [
        Work::RandomRead,
        Work::RandomWrite,
        Work::Mixed,
        Work::SequentialRead,
        Work::SequentialWrite,
    ];

    fn name(self) -> &'static str {
        match self {
            Work::RandomRead => "random read 4K",
            Work::RandomWrite => "random write 4K",
            Work::Mixed => "random 70/30 4K",
            Work::SequentialRead => "sequential read",
            Work::SequentialWrite => "sequential write",
        }
    }

    fn len(self) -> u64 {
        match self {
            Work::RandomRead | Work::RandomWrite | Work::Mixed => BLOCK,
            Work::SequentialRead | Work::SequentialWrite => LONG,
        }
    }
}

struct Case {
    level: Level,
    members: u64,
    policy: Policy,
    degraded: bool,
}

impl Case {
    fn parity(&self) -> u64 {
        u64::from(self.level.parity().unwrap_or(0))
    }

    /// Requests a second that the drives allow.
    fn allowed(&self, work: Work) -> f64 {
        let (n, m) = (self.members as f64, self.parity() as f64);
        let k = n - m;
        let alive = if self.degraded { n - 1.0 } else { n };
        let ops = alive * IOPS as f64;
        let bytes = alive * BYTES_PER_SECOND as f64;
        // Of n blocks one is away, and costs k reads.
        let read = if self.degraded { (n - 1.0 + k) / n } else { 1.0 };
        // Healthy: read-modify-write or reconstruct-write, whichever reads less.
        let write = if self.degraded {
            // The block itself away: k - 1 others are read, m written. Its parity away: one write
            // (m = 1). Else as a healthy one.
            let healthy = (2.0 + 2.0 * m).min(k + m);
            (k - 1.0 + m + m * (1.0 + 2.0 * (m - 1.0)) + (n - 1.0 - m) * healthy) / n
        } else {
            (2.0 + 2.0 * m).min(k + m)
        };
        match work {
            Work::RandomRead => ops / read,
            Work::RandomWrite => ops / write,
            Work::Mixed => ops / (0.7 * read + 0.3 * write),
            Work::SequentialRead if self.degraded => {
                bytes / LONG as f64 * (n - 1.0) / n * n / (n - 1.0 + k) * n / (n - 1.0) * (n - 1.0)
                    / n
            }
            Work::SequentialRead => bytes / LONG as f64,
            Work::SequentialWrite => {
                let place = if self.degraded { (n - 1.0) / k } else { n / k };
                let journal = if self.policy == Policy::Journal { m + 1.0 } else { 0.0 };
                bytes / LONG as f64 / (place + journal)
            }
        }
    }
}

async fn array(reactor: &Reactor, case: &Case) -> Rc<Array> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = |index: u64| {
        let device = Device::Model {
            bytes: DRIVE_BYTES,
            iops: IOPS,
            bytes_per_second: BYTES_PER_SECOND,
            latency: LATENCY,
        };
        ([index as u8; 16], Drive::new(reactor, device, limits, &format!("model{index}")))
    };
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "bench".into(),
        level: case.level,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: Some(case.policy),
        settings: SettingsChange::default(),
        host: None,
    };
    Array::create(reactor, &spec, (0..case.members).map(drive).collect()).await.unwrap()
}

/// Requests a second.
async fn measure(reactor: &Reactor, array: &Rc<Array>, work: Work, time: Duration) -> f64 {
    let began = reactor.now();
    let (running, done) = (Rc::new(Cell::new(QUEUE_DEPTH)), Rc::new(Cell::new(0u64)));
    let next = Rc::new(Cell::new(0));
    for worker in 0..QUEUE_DEPTH {
        let (reactor, array) = (reactor.clone(), array.clone());
        let (running, done, next) = (running.clone(), done.clone(), next.clone());
        reactor.clone().spawn(async move {
            let mut prng = Prng::from_seed(worker as u64);
            let len = work.len();
            let buffer = reactor.buffer(len as usize);
            while reactor.now().since(began) < time {
                let at = match work {
                    Work::RandomRead | Work::RandomWrite | Work::Mixed => {
                        prng.below(SPAN / len) * len
                    }
                    Work::SequentialRead | Work::SequentialWrite => {
                        let at = next.get();
                        next.set((at + len) % SPAN);
                        at
                    }
                };
                let reads = match work {
                    Work::RandomRead | Work::SequentialRead => true,
                    Work::RandomWrite | Work::SequentialWrite => false,
                    Work::Mixed => prng.chance(7, 10),
                };
                if reads {
                    array.read(at, buffer.clone().into()).await.unwrap();
                } else {
                    array.write(at, buffer.clone().into()).await.unwrap();
                }
                done.set(done.get() + 1);
            }
            running.set(running.get() - 1);
        });
    }
    while running.get() > 0 {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    done.get() as f64 / reactor.now().since(began).as_secs_f64()
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(2.0);
    let time = Duration::from_secs_f64(seconds);
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    reactor.set_poll_window(Duration::from_millis(2));
    let r = reactor.clone();
    reactor.block_on(async move {
        println!(
            "{:8} {:8} {:9} {:17} {:>9} {:>9} {:>9} {:>6}",
            "level", "policy", "state", "", "allowed", "worst", "best", "ratio"
        );
        for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 6)] {
            for degraded in [false, true] {
                let cases = [Policy::Bitmap, Policy::Journal].map(|policy| Case {
                    level,
                    members,
                    policy,
                    degraded,
                });
                let mut arrays = Vec::new();
                for case in &cases {
                    let array = array(&r, case).await;
                    // Written once, so that nothing is zeroed or made dirty while it is measured.
                    measure(&r, &array, Work::SequentialWrite, time).await;
                    if degraded {
                        array.pull_member(MemberIndex(0)).unwrap();
                    }
                    arrays.push(array);
                }
                for work in Work::ALL {
                    let mut rates = vec![Vec::new(); cases.len()];
                    for _ in 0..TURNS {
                        for (array, rates) in arrays.iter().zip(&mut rates) {
                            // What the journal holds from before is not this turn's.
                            measure(&r, array, work, time / 4).await;
                            rates.push(measure(&r, array, work, time).await);
                        }
                    }
                    for (case, rates) in cases.iter().zip(&rates) {
                        show(case, work, rates);
                    }
                }
                for array in arrays {
                    array.stop().await.unwrap();
                }
            }
        }
    });
}

fn show(case: &Case, work: Work, rates: &[f64]) {
    let allowed = case.allowed(work);
    let worst = rates.iter().copied().fold(f64::MAX, f64::min);
    let best = rates.iter().copied().fold(0.0, f64::max);
    let policy = if case.policy == Policy::Journal { "journal" } else { "bitmap" };
    let state = if case.degraded { "degraded" } else { "healthy" };
    println!(
        "RAID {:<3} {policy:8} {state:9} {:17} {allowed:9.0} {worst:9.0} {best:9.0} {:6.2}",
        case.level as u8,
        work.name(),
        worst / allowed
    );
}
