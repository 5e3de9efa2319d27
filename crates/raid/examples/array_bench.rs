//! How many I/Os a second one reactor does on an array of RAM drives, in the same process.
//!
//! `cargo run --release -p ashlar-raid --example array_bench [SECONDS]`. Fixed seed; each figure
//! stands beside the one of the healthy read of the same run, which is what to compare it with.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a benchmark")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;

const DRIVE_BYTES: u64 = 128 << 20;
const QUEUE_DEPTH: usize = 32;

#[derive(Clone, Copy)]
enum Work {
    Read(usize),
    Write(usize),
}

async fn array(reactor: &Reactor, level: Level, members: u8) -> Rc<Array> {
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
        policy: None,
        settings: SettingsChange::default(),
        host: None,
    };
    Array::create(reactor, &spec, (0..members).map(drive).collect()).await.unwrap()
}

/// Requests a second, and bytes a second.
async fn measure(reactor: &Reactor, array: &Rc<Array>, work: Work, time: Duration) -> (f64, f64) {
    let began = reactor.now();
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
    let seconds = reactor.now().since(began).as_secs_f64();
    (done.get() as f64 / seconds, done.get() as f64 * len as f64 / seconds)
}

fn main() {
    let seconds = std::env::args().nth(1).and_then(|arg| arg.parse().ok()).unwrap_or(1.0);
    let time = Duration::from_secs_f64(seconds);
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let r = reactor.clone();
    reactor.set_poll_window(Duration::from_millis(2));
    reactor.block_on(async move {
        println!("{:28} {:>12} {:>9}", "", "IOPS", "GB/s");
        let show = |name: &str, (iops, bytes): (f64, f64)| {
            println!("{name:28} {iops:12.0} {:9.2}", bytes / 1e9);
        };
        for (level, members) in [(Level::Raid0, 4), (Level::Raid5, 5), (Level::Raid6, 6)] {
            let array = array(&r, level, members).await;
            let name = |what: &str| format!("RAID {} {what}", level as u8);
            let stripe = array.stripe_bytes() as usize;
            // Dirty bits are set once, before anything is timed.
            measure(&r, &array, Work::Write(stripe), time / 2).await;
            for (what, work) in [
                ("read 4K", Work::Read(4096)),
                ("write 4K", Work::Write(4096)),
                ("write whole stripe", Work::Write(stripe)),
                ("read 4K", Work::Read(4096)),
            ] {
                show(&name(what), measure(&r, &array, work, time).await);
            }
            if level != Level::Raid0 {
                array.pull_member(MemberIndex(0)).unwrap();
                show(&name("degraded read 4K"), measure(&r, &array, Work::Read(4096), time).await);
                show(
                    &name("degraded write 4K"),
                    measure(&r, &array, Work::Write(4096), time).await,
                );
            }
            array.stop().await.unwrap();
        }
    });
}
