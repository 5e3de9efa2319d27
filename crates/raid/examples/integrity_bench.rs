//! What checksums of blocks cost: the same work on two arrays of RAM drives, one with and one
//! without, in turns (without, with, with, without), in one process.
//!
//! `cargo run --release -p ashlar-raid --example integrity_bench [SECONDS]`: of each turn. Fixed
//! seeds. Time is the thread's on its CPU, so that others on the machine do not count. Beside
//! requests for each such second stand the operations and bytes of all drives for each request:
//! what a drive-limited array would pay. All pages of checksums fit in memory here.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a benchmark")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;

const DRIVE_BYTES: u64 = 96 << 20;
const QUEUE_DEPTH: usize = 32;

#[derive(Clone, Copy)]
enum Work {
    Read(usize),
    Write(usize),
}

/// What one turn came to.
#[derive(Clone, Copy, Default)]
struct Turn {
    requests: f64,
    seconds: f64,
    drive_ops: f64,
    drive_bytes: f64,
}

impl Turn {
    fn and(self, other: Turn) -> Turn {
        Turn {
            requests: self.requests + other.requests,
            seconds: self.seconds + other.seconds,
            drive_ops: self.drive_ops + other.drive_ops,
            drive_bytes: self.drive_bytes + other.drive_bytes,
        }
    }
}

async fn array(reactor: &Reactor, level: Level, members: u8, integrity: bool) -> Rc<Array> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = |index: u8| {
        let device = Device::Ram { bytes: DRIVE_BYTES };
        ([index; 16], Drive::new(reactor, device, limits, &format!("ram{index}")))
    };
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "bench".into(),
        level,
        chunk_bytes: 64 << 10,
        shape: Default::default(),
        policy: Some(Policy::Journal),
        integrity,
        settings: SettingsChange::default(),
        host: None,
    };
    Array::create(reactor, &spec, (0..members).map(drive).collect()).await.unwrap()
}

/// CPU time that this thread has had so far (proc_pid_schedstat: nanoseconds, first of all).
fn cpu_seconds() -> f64 {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap();
    let ns: u64 = text.split_whitespace().next().unwrap().parse().unwrap();
    ns as f64 / 1e9
}

/// Operations and bytes of all drives so far.
fn drive_work(array: &Array) -> (u64, u64) {
    let members = array.status().members;
    let drives = members.iter().filter_map(|member| Some(member.drive.as_ref()?.counters()));
    drives.fold((0, 0), |(ops, bytes), its| {
        (ops + its.reads + its.writes, bytes + its.read_bytes + its.write_bytes)
    })
}

async fn turn(reactor: &Reactor, array: &Rc<Array>, work: Work, time: Duration) -> Turn {
    let (began, began_cpu, before) = (reactor.now(), cpu_seconds(), drive_work(array));
    let (running, done) = (Rc::new(Cell::new(QUEUE_DEPTH)), Rc::new(Cell::new(0u64)));
    let len = match work {
        Work::Read(len) | Work::Write(len) => len,
    };
    for worker in 0..QUEUE_DEPTH {
        let (reactor, array) = (reactor.clone(), array.clone());
        let (running, done) = (running.clone(), done.clone());
        reactor.clone().spawn(async move {
            let mut prng = Prng::from_seed(worker as u64);
            let buffer = reactor.buffer(len);
            while reactor.now().since(began) < time {
                for _ in 0..16 {
                    let at = prng.below(array.capacity() / len as u64) * len as u64;
                    match work {
                        Work::Read(_) => array.read(at, buffer.clone().into()).await.unwrap(),
                        Work::Write(_) => array.write(at, buffer.clone().into()).await.unwrap(),
                    }
                    done.set(done.get() + 1);
                }
            }
            running.set(running.get() - 1);
        });
    }
    while running.get() > 0 {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    let after = drive_work(array);
    Turn {
        requests: done.get() as f64,
        seconds: cpu_seconds() - began_cpu,
        drive_ops: (after.0 - before.0) as f64,
        drive_bytes: (after.1 - before.1) as f64,
    }
}

async fn compare(
    reactor: &Reactor,
    arrays: &[Rc<Array>; 2],
    name: &str,
    work: Work,
    time: Duration,
) {
    let mut sums = [Turn::default(); 2];
    for which in [0, 1, 1, 0] {
        sums[which] = sums[which].and(turn(reactor, &arrays[which], work, time).await);
        // What is pending is not the next one's affair.
        arrays[which].flush().await.unwrap();
    }
    let [plain, checked] = sums.map(|sum| sum.requests / sum.seconds);
    let change = (checked / plain - 1.0) * 100.0;
    let each =
        sums.map(|sum| (sum.drive_ops / sum.requests, sum.drive_bytes / sum.requests / 1024.0));
    println!(
        "{name:28} {plain:11.0} {checked:11.0} {change:+7.1} %   {:5.2} {:5.2}   {:7.1} {:7.1}",
        each[0].0, each[1].0, each[0].1, each[1].1
    );
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(1.0);
    let time = Duration::from_secs_f64(seconds);
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let r = reactor.clone();
    reactor.set_poll_window(Duration::from_millis(2));
    reactor.block_on(async move {
        println!(
            "{:28} {:>11} {:>11} {:>9}   {:>11}   {:>15}",
            "requests a CPU second", "without", "with", "change", "drive ops", "drive KiB"
        );
        for (level, members) in [(Level::Raid1, 2), (Level::Raid5, 5), (Level::Raid6, 6)] {
            let arrays =
                [array(&r, level, members, false).await, array(&r, level, members, true).await];
            let stripe = arrays[0].stripe_bytes() as usize;
            for array in &arrays {
                // Every region is written before anything is timed.
                turn(&r, array, Work::Write(stripe), time).await;
            }
            for (what, work) in [
                ("read 4K", Work::Read(4096)),
                ("read 64K", Work::Read(64 << 10)),
                ("write 4K", Work::Write(4096)),
                ("write whole stripe", Work::Write(stripe)),
            ] {
                let name = format!("RAID {} {what}", level as u8);
                compare(&r, &arrays, &name, work, time).await;
            }
            for array in arrays {
                array.stop().await.unwrap();
                for member in array.status().members {
                    let health = member.drive.unwrap().health();
                    assert_eq!((health.wrong_blocks, health.wrong_checksums), (0, 0));
                }
            }
        }
    });
}
