//! At what share of the drives' speed a rebuild moves, alone and beside guests.
//!
//! `cargo run --release -p ashlar-raid --example rebuild_bench [virtual]`. Drives of the kind
//! `model`, slow enough that the CPU does not matter; `virtual`: under a clock that jumps, so that
//! it cannot. Formula: the new drive is written all the time, at its full speed: its data bytes /
//! bytes_per_second, by the share. (The others are read at k / (n − lost) of theirs, no more.)
//! Beside guests, who read 4 KiB at random with `GUESTS` requests under way, the share is at most
//! what was set; what they still get stands beside what they had without it.
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
use ashlar_format::array_superblock::Level;
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::backend::Backend;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;
use ashlar_reactor::virtual_time::VirtualBackend;

const DRIVE_BYTES: u64 = 128 << 20;
const IOPS: u64 = 20_000;
const BYTES_PER_SECOND: u64 = 200_000_000;
const LATENCY: Duration = Duration::from_micros(80);
const GUESTS: u64 = 8;
const CASES: [(Level, usize, &[u8]); 3] =
    [(Level::Raid5, 5, &[1]), (Level::Raid6, 6, &[1, 4]), (Level::Raid1, 2, &[1])];

fn drive(reactor: &Reactor, name: &str) -> Rc<Drive> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let device = Device::Model {
        bytes: DRIVE_BYTES,
        iops: IOPS,
        bytes_per_second: BYTES_PER_SECOND,
        latency: LATENCY,
    };
    Drive::new(reactor, device, limits, name)
}

/// Written everywhere, and all of it in place.
async fn array(reactor: &Reactor, level: Level, members: usize) -> Rc<Array> {
    let drives =
        (0..members).map(|index| ([index as u8; 16], drive(reactor, &format!("d{index}"))));
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "bench".into(),
        level,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: None,
        settings: SettingsChange { rebuild_percent: Some(100), ..SettingsChange::default() },
        host: None,
    };
    let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
    let buffer = reactor.buffer(1 << 20);
    let step = buffer.len() as u64 / array.stripe_bytes() * array.stripe_bytes();
    let mut at = 0;
    while at < array.capacity() {
        let len = step.min(array.capacity() - at);
        array.write(at, buffer.slice(0..len as usize).into()).await.unwrap();
        at += len;
    }
    while array.status().journal.pending_bytes > 0 {
        reactor.sleep(Duration::from_millis(10)).await;
    }
    array
}

/// Guests that read at random until told to stop.
struct Guests {
    reads: Rc<Cell<u64>>,
    running: Rc<Cell<bool>>,
}

fn guests(reactor: &Reactor, array: &Rc<Array>) -> Guests {
    let guests = Guests { reads: Rc::default(), running: Rc::new(Cell::new(true)) };
    for guest in 0..GUESTS {
        let (reactor, array) = (reactor.clone(), array.clone());
        let (reads, running) = (guests.reads.clone(), guests.running.clone());
        reactor.clone().spawn(async move {
            let mut prng = Prng::from_seed(guest);
            let buffer = reactor.buffer(4096);
            while running.get() {
                let at = prng.below(array.capacity() / 4096) * 4096;
                array.read(at, buffer.clone().into()).await.unwrap();
                reads.set(reads.get() + 1);
            }
        });
    }
    guests
}

async fn rebuild(reactor: &Reactor, array: &Rc<Array>, lost: &[u8]) -> f64 {
    let began = reactor.now();
    for member in lost {
        let uuid = [100 + member; 16];
        array.pull_member(MemberIndex(*member)).unwrap();
        array.replace_member(MemberIndex(*member), drive(reactor, "new"), uuid).await.unwrap();
    }
    while array.status().rebuild.is_some() {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(array.status().rebuild_error, None);
    reactor.now().since(began).as_secs_f64()
}

async fn bench(reactor: Reactor) {
    println!(
        "{:8} {:>6} {:>12} {:>10} {:>10} {:>6}   guests' reads a second",
        "level", "share", "", "wanted", "measured", "ratio"
    );
    for (level, members, lost) in CASES {
        for share in [10u8, 30, 60, 100] {
            for loaded in [false, true] {
                let array = array(&reactor, level, members).await;
                let change =
                    SettingsChange { rebuild_percent: Some(share), ..SettingsChange::default() };
                array.set_settings(change).await.unwrap();
                let guests = loaded.then(|| guests(&reactor, &array));
                if loaded {
                    reactor.sleep(Duration::from_millis(500)).await;
                }
                let before = guests.as_ref().map_or(0, |guests| guests.reads.take() * 2);
                let layout = array.layout();
                let bytes = (layout.member_stripes() * u64::from(layout.chunk_bytes)) as f64;
                let took = rebuild(&reactor, &array, lost).await;
                let wanted = BYTES_PER_SECOND as f64 * f64::from(share) / 100.0 / 1e6;
                let measured = bytes / took / 1e6;
                let beside = guests.as_ref().map_or(String::new(), |guests| {
                    guests.running.set(false);
                    format!("{:.0} of {before}", guests.reads.get() as f64 / took)
                });
                let (level, load) = (level as u8, if loaded { "guests" } else { "idle" });
                let ratio = measured / wanted;
                println!(
                    "RAID {level:<3} {share:>4} % {load:>12} {wanted:>5.0} MB/s \
                     {measured:>5.1} MB/s {ratio:>6.2}   {beside}"
                );
                array.stop().await.unwrap();
            }
        }
    }
}

fn main() {
    let jumps = std::env::args().any(|arg| arg == "virtual");
    let backend: Box<dyn Backend> = if jumps {
        Box::<VirtualBackend>::default()
    } else {
        Box::new(UringBackend::new().unwrap())
    };
    let reactor = Reactor::new(backend, Order::Fifo);
    if !jumps {
        reactor.set_poll_window(Duration::from_millis(2));
    }
    reactor.block_on(bench(reactor.clone()));
}
