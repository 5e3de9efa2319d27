//! Guests of one array, and what its drives did for them.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Counters, Drive, Limits};
use ashlar_format::array_superblock::Policy;
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;

use crate::geometry::{BLOCK, BYTES_PER_SECOND, CHUNK, Case, IOPS, LATENCY, LOG_BLOCK, Work};

/// Large enough for a ring of the usual size: 128 MiB.
const DRIVE_BYTES: u64 = 16 << 30;
/// What random requests are spread over: 8 times the ring, so that few of them merge.
pub const SPAN: u64 = 1 << 30;
/// Half of the ring.
pub const OVERWRITE_SPAN: u64 = 64 << 20;
const WARM_UP_MAX: Duration = Duration::from_secs(30);
/// Times that no more waited in memory than ever before.
const CALM_CHECKS: u32 = 4;
const PREFILL_DEPTH: u64 = 16;

/// What guests asked, and what the drives did meanwhile.
#[derive(Clone, Copy, Default)]
pub struct Turn {
    pub requests: f64,
    pub seconds: f64,
    pub reads: f64,
    pub operations: f64,
    pub bytes: f64,
}

impl Turn {
    pub fn rate(&self) -> f64 {
        self.requests / self.seconds
    }
}

struct Meter {
    began: Instant,
    before: Counters,
    done: u64,
}

impl Meter {
    fn start(reactor: &Reactor, array: &Array, guests: &Guests) -> Meter {
        Meter { began: reactor.now(), before: drive_counters(array), done: guests.done.get() }
    }

    fn stop(self, reactor: &Reactor, array: &Array, guests: &Guests) -> Turn {
        let (before, after) = (self.before, drive_counters(array));
        let reads = (after.reads - before.reads) as f64;
        let read_bytes = after.read_bytes - before.read_bytes;
        Turn {
            requests: (guests.done.get() - self.done) as f64,
            seconds: reactor.now().since(self.began).as_secs_f64(),
            reads,
            operations: reads + (after.writes - before.writes) as f64,
            bytes: (read_bytes + after.write_bytes - before.write_bytes) as f64,
        }
    }
}

/// Of all drives of the array together.
fn drive_counters(array: &Array) -> Counters {
    let mut sum = Counters::default();
    for drive in array.status().members.iter().filter_map(|member| member.drive.as_ref()) {
        let one = drive.counters();
        sum.reads += one.reads;
        sum.read_bytes += one.read_bytes;
        sum.writes += one.writes;
        sum.write_bytes += one.write_bytes;
    }
    sum
}

/// An array that was written once everywhere in the span, all of it in place.
pub async fn array(reactor: &Reactor, case: &Case) -> Rc<Array> {
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
        chunk_bytes: CHUNK as u32,
        shape: Shape::default(),
        policy: Some(Policy::None),
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let drives = (0..case.members).map(drive).collect();
    let array = Array::create(reactor, &spec, drives).await.unwrap();
    let guests = Guests::default();
    let buffer = reactor.buffer(case.stripe_bytes() as usize);
    for _ in 0..PREFILL_DEPTH {
        guests.add(reactor, prefill(array.clone(), guests.next.clone(), buffer.clone()));
    }
    guests.gone(reactor).await;
    array.set_policy(case.policy).await.unwrap();
    if case.degraded {
        array.pull_member(MemberIndex(0)).unwrap();
    }
    array
}

async fn prefill(array: Rc<Array>, next: Rc<Cell<u64>>, buffer: Buffer) {
    while next.get() < SPAN {
        let at = next.replace(next.get() + buffer.len() as u64);
        array.write(at, buffer.clone().into()).await.unwrap();
    }
}

/// Tasks that ask something of an array until they are told to stop.
#[derive(Clone, Default)]
struct Guests {
    here: Rc<Cell<u64>>,
    stop: Rc<Cell<bool>>,
    /// Requests that were answered.
    done: Rc<Cell<u64>>,
    /// Where the next sequential request begins.
    next: Rc<Cell<u64>>,
}

impl Guests {
    fn add(&self, reactor: &Reactor, guest: impl Future<Output = ()> + 'static) {
        let here = self.here.clone();
        here.set(here.get() + 1);
        reactor.spawn(async move {
            guest.await;
            here.set(here.get() - 1);
        });
    }

    async fn gone(&self, reactor: &Reactor) {
        while self.here.get() > 0 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
    }

    fn answered(&self) {
        self.done.set(self.done.get() + 1);
    }
}

/// Until all that was acknowledged is in place.
async fn settle(reactor: &Reactor, array: &Array) {
    while array.status().journal.used_bytes > 0 {
        reactor.sleep(Duration::from_millis(1)).await;
    }
}

/// `seed`: of this turn.
pub async fn measure(
    reactor: &Reactor,
    array: &Rc<Array>,
    case: &Case,
    work: Work,
    time: Duration,
    seed: u64,
) -> Turn {
    let guests = Guests::default();
    for guest in 0..work.queue_depth() {
        let prng = Prng::from_seed(seed << 32 | guest);
        let len = request_bytes(case, work);
        let buffer = reactor.buffer(len as usize);
        guests.add(reactor, ask(array.clone(), guests.clone(), work, buffer, prng));
    }
    warm_up(reactor, array, time).await;
    let meter = Meter::start(reactor, array, &guests);
    reactor.sleep(time).await;
    let turn = meter.stop(reactor, array, &guests);
    guests.stop.set(true);
    guests.gone(reactor).await;
    turn
}

/// What came before is not this turn's. Through the journal: writes have gone once around the ring,
/// and no more of them wait in memory than a moment ago: as full as it is then, it stays.
async fn warm_up(reactor: &Reactor, array: &Array, time: Duration) {
    let written = || array.status().counters.write_bytes;
    let (began, before) = (reactor.now(), written());
    reactor.sleep(time / 4).await;
    let around = |bytes: u64| bytes == 0 || bytes >= array.status().journal.bytes;
    let journaled = array.policy() == Policy::Journal;
    let (mut most, mut calm) = (0, 0);
    while journaled && reactor.now().since(began) < WARM_UP_MAX {
        if around(written() - before) && calm >= CALM_CHECKS {
            break;
        }
        reactor.sleep(time / 4).await;
        let pending = array.status().journal.pending_bytes;
        calm = if pending > most { 0 } else { calm + 1 };
        most = most.max(pending);
    }
}

async fn ask(array: Rc<Array>, guests: Guests, work: Work, buffer: Buffer, mut prng: Prng) {
    let len = buffer.len() as u64;
    while !guests.stop.get() {
        let (reads, at) = match work {
            Work::RandomRead => (true, prng.below(SPAN / len) * len),
            Work::RandomWrite => (false, prng.below(SPAN / len) * len),
            Work::Overwrite => (false, prng.below(OVERWRITE_SPAN / len) * len),
            Work::Mixed => (prng.chance(7, 10), prng.below(SPAN / len) * len),
            Work::SequentialRead => (true, guests.next.replace((guests.next.get() + len) % SPAN)),
            Work::SequentialWrite => (false, guests.next.replace((guests.next.get() + len) % SPAN)),
        };
        if reads {
            array.read(at, buffer.clone().into()).await.unwrap();
        } else {
            array.write(at, buffer.clone().into()).await.unwrap();
        }
        guests.answered();
    }
}

fn request_bytes(case: &Case, work: Work) -> u64 {
    match work {
        Work::RandomRead | Work::RandomWrite | Work::Overwrite | Work::Mixed => BLOCK,
        Work::SequentialRead | Work::SequentialWrite => case.stripe_bytes(),
    }
}

/// Writers of one log: each writes the next block of it, and flushes. The second: what the drives
/// did after the last of them, to put the end of it in place.
pub async fn log(
    reactor: &Reactor,
    array: &Rc<Array>,
    writers: u64,
    time: Duration,
) -> (Turn, Turn) {
    let guests = Guests::default();
    let meter = Meter::start(reactor, array, &guests);
    for _ in 0..writers {
        let buffer = reactor.buffer(LOG_BLOCK as usize);
        guests.add(reactor, append(array.clone(), guests.clone(), buffer));
    }
    reactor.sleep(time).await;
    guests.stop.set(true);
    guests.gone(reactor).await;
    let turn = meter.stop(reactor, array, &guests);
    let after = Meter::start(reactor, array, &guests);
    settle(reactor, array).await;
    (turn, after.stop(reactor, array, &guests))
}

async fn append(array: Rc<Array>, guests: Guests, buffer: Buffer) {
    while !guests.stop.get() {
        let at = guests.next.replace((guests.next.get() + LOG_BLOCK) % SPAN);
        array.write(at, buffer.clone().into()).await.unwrap();
        array.flush().await.unwrap();
        guests.answered();
    }
}
