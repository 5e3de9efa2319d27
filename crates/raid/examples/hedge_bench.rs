//! What hedged reads gain when a drive is slow, and what they cost when none is.
//!
//! `cargo run --release -p ashlar-raid --example hedge_bench [virtual]`. First: drives of the kind
//! `model`, one of them sixty times slower; random reads of 4 KiB, `GUESTS` under way. The slow
//! drive has a share 1/n of the reads (of a mirror, half): with a smaller budget than that some
//! still wait for it. `virtual`: under a clock that jumps. Then, on drives of memory and always in
//! real time: reads a second of the same array with and without, in turns; the difference is the
//! copy and the timer.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    reason = "a benchmark"
)]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
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

const DRIVE_BYTES: u64 = 48 << 20;
const IOPS: u64 = 20_000;
const BYTES_PER_SECOND: u64 = 200_000_000;
const LATENCY: Duration = Duration::from_micros(80);
const SLOW_LATENCY: Duration = Duration::from_millis(5);
const GUESTS: u64 = 4;
const TURNS: usize = 3;
const KINDS: [(Level, usize); 3] = [(Level::Raid5, 5), (Level::Raid6, 6), (Level::Raid1, 2)];

fn model(index: usize) -> Device {
    Device::Model {
        bytes: DRIVE_BYTES,
        iops: IOPS,
        bytes_per_second: BYTES_PER_SECOND,
        latency: if index == 1 { SLOW_LATENCY } else { LATENCY },
    }
}

/// Written everywhere, and all of it in place.
async fn array(
    reactor: &Reactor,
    (level, members): (Level, usize),
    device: impl Fn(usize) -> Device,
) -> Rc<Array> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = |index| Drive::new(reactor, device(index), limits, &format!("d{index}"));
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "bench".into(),
        level,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: None,
        settings: SettingsChange::default(),
        host: None,
    };
    let drives = (0..members).map(|index| ([index as u8; 16], drive(index)));
    let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
    let buffer = reactor.buffer(array.stripe_bytes() as usize);
    for at in (0..array.capacity()).step_by(buffer.len()) {
        array.write(at, buffer.clone().into()).await.unwrap();
    }
    while array.status().journal.pending_bytes > 0 {
        reactor.sleep(Duration::from_millis(10)).await;
    }
    array
}

async fn hedge(array: &Rc<Array>, percent: u8) {
    let change = SettingsChange { hedge_percent: Some(percent), ..SettingsChange::default() };
    array.set_settings(change).await.unwrap();
}

/// Random reads for so long; their times in microseconds, sorted.
async fn reads(reactor: &Reactor, array: &Rc<Array>, len: u64, time: Duration) -> Vec<u64> {
    let (times, running) = (Rc::new(RefCell::new(Vec::new())), Rc::new(Cell::new(GUESTS)));
    let until = reactor.now().after(time);
    for guest in 0..GUESTS {
        let (reactor, array) = (reactor.clone(), array.clone());
        let (times, running) = (times.clone(), running.clone());
        reactor.clone().spawn(async move {
            let mut prng = Prng::from_seed(guest);
            let buffer = reactor.buffer(len as usize);
            while reactor.now() < until {
                let began = reactor.now();
                let at = prng.below(array.capacity() / len) * len;
                array.read(at, buffer.clone().into()).await.unwrap();
                times.borrow_mut().push(reactor.now().since(began).as_micros() as u64);
            }
            running.set(running.get() - 1);
        });
    }
    while running.get() > 0 {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    let mut times = times.take();
    times.sort_unstable();
    times
}

async fn gain(reactor: Reactor) {
    println!(
        "{:8} {:>6} {:>9} {:>8} {:>8} {:>8} {:>9}",
        "level", "hedge", "reads/s", "p50 us", "p99 us", "p999 us", "hedged"
    );
    for kind in KINDS {
        let array = array(&reactor, kind, model).await;
        for percent in [0, 5, 25, 60] {
            hedge(&array, percent).await;
            let before = array.status().counters.hedged;
            let time = Duration::from_secs(4);
            let times = reads(&reactor, &array, 4096, time).await;
            let hedged = array.status().counters.hedged - before;
            let at = |milli: usize| times[(times.len() - 1) * milli / 1000];
            println!(
                "RAID {:<3} {percent:>4} % {:>9.0} {:>8} {:>8} {:>8} {:>7.1} %",
                kind.0 as u8,
                times.len() as f64 / time.as_secs_f64(),
                at(500),
                at(990),
                at(999),
                hedged as f64 * 100.0 / times.len() as f64
            );
        }
        array.stop().await.unwrap();
    }
}

async fn cost(reactor: Reactor) {
    let array = array(&reactor, KINDS[0], |_| Device::Ram { bytes: DRIVE_BYTES }).await;
    for len in [4 << 10, 64 << 10] {
        for _ in 0..TURNS {
            let mut ns = [0.0; 2];
            for (percent, ns) in [0, 100].into_iter().zip(&mut ns) {
                hedge(&array, percent).await;
                let time = Duration::from_secs(1);
                *ns = 1e9 * time.as_secs_f64()
                    / reads(&reactor, &array, len, time).await.len() as f64;
            }
            let [off, on] = ns;
            println!("{len:>6} bytes: {off:.0} ns a read, {on:.0} ns hedged: {:+.0} ns", on - off);
        }
    }
    array.stop().await.unwrap();
}

fn run<F: Future<Output = ()> + 'static>(
    backend: Box<dyn Backend>,
    poll_window: Duration,
    bench: impl FnOnce(Reactor) -> F,
) {
    let reactor = Reactor::new(backend, Order::Fifo);
    reactor.set_poll_window(poll_window);
    let future = bench(reactor.clone());
    reactor.block_on(future).unwrap();
}

fn main() {
    let real = || Box::new(UringBackend::new().unwrap());
    let poll_window = Duration::from_millis(2);
    if std::env::args().any(|arg| arg == "virtual") {
        // A clock that jumps stands still while anyone polls.
        run(Box::<VirtualBackend>::default(), Duration::ZERO, gain);
    } else {
        run(real(), poll_window, gain);
    }
    run(real(), poll_window, cost);
}
