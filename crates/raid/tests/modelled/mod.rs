//! Arrays of modelled drives under a clock that jumps: how fast the drives let them be.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    dead_code,
    unreachable_pub,
    reason = "each test uses a part of it"
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
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Done, Errno, Op, Ticket};
use ashlar_reactor::prng::Prng;
use ashlar_reactor::virtual_time::VirtualBackend;

pub const DRIVE_BYTES: u64 = 48 << 20;
pub const IOPS: u64 = 20_000;
pub const BYTES_PER_SECOND: u64 = 200_000_000;
pub const LATENCY: Duration = Duration::from_micros(80);

/// Virtual time in which drives outlive their handles: who registers `Device::Simulated` has the
/// drive of that number again, as it is by then. They are counted as they were made.
#[derive(Default)]
pub struct Shelf {
    world: VirtualBackend,
    full: Full,
    unreadable: Unreadable,
    refused: Vec<Done>,
    under_way: usize,
    busiest: Busiest,
}

/// Drives have no space for what is written from this byte on, while it says one.
pub type Full = Rc<Cell<Option<u64>>>;
/// The byte of a drive that cannot be read until it is written, while it says one.
pub type Unreadable = Rc<Cell<Option<(DeviceId, u64)>>>;

/// Most operations that were under way at a time since it was zero.
pub type Busiest = Rc<Cell<usize>>;

impl Backend for Shelf {
    fn now(&self) -> Instant {
        self.world.now()
    }

    fn register(&mut self, device: Device) -> DeviceId {
        if let Device::Simulated { drive } = device {
            return DeviceId(drive);
        }
        self.world.register(device)
    }

    /// Who reads beside its owner has the same drive.
    fn twin(&self, device: DeviceId) -> Option<Device> {
        Some(Device::Simulated { drive: device.0 })
    }

    /// Kept until the test ends.
    fn unregister(&mut self, _: DeviceId) {}

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        self.under_way += 1;
        self.busiest.set(self.busiest.get().max(self.under_way));
        let writes_from = match op {
            Op::Write { offset, .. } | Op::WriteZeroes { offset, .. } => Some(*offset),
            Op::Read { .. } | Op::Flush { .. } | Op::Descriptor { .. } => None,
        };
        if writes_from.zip(self.full.get()).is_some_and(|(offset, full)| offset >= full) {
            let outcome = Err(Errno(libc::ENOSPC));
            return self.refused.push(Done { ticket, outcome });
        }
        let unreadable = self.unreadable.get().filter(|its| Some(its.0) == op.device());
        if let Some((_, byte)) = unreadable {
            let touches = |offset: u64, len: usize| (offset..offset + len as u64).contains(&byte);
            if matches!(op, Op::Read { offset, into, .. } if touches(*offset, into.len())) {
                return self.refused.push(Done { ticket, outcome: Err(Errno(libc::EIO)) });
            }
            if matches!(op, Op::Write { offset, from, .. } if touches(*offset, from.len())) {
                self.unreadable.set(None);
            }
        }
        self.world.submit(ticket, op, until);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let before = done.len();
        done.append(&mut self.refused);
        self.world.reap(done);
        self.under_way -= done.len() - before;
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        !self.refused.is_empty() || self.world.idle(until)
    }
}

/// The drive that was made as this one in order, plugged in again.
pub fn plug_in(reactor: &Reactor, number: u32) -> Rc<Drive> {
    let device = Device::Simulated { drive: number };
    Drive::new(reactor, device, limits(), &format!("again{number}"))
}

pub fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
    run_full(|reactor, _| test(reactor));
}

/// The same with drives that run out of space when the test says so.
pub fn run_full<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Full) -> F) {
    let shelf = Shelf::default();
    let full = shelf.full.clone();
    run_on(shelf, |reactor| test(reactor, full));
}

/// The same with a count of what is under way.
pub fn run_counted<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Busiest) -> F) {
    let shelf = Shelf::default();
    let busiest = shelf.busiest.clone();
    run_on(shelf, |reactor| test(reactor, busiest));
}

/// The same with a byte that cannot be read when the test says so.
pub fn run_unreadable<F: Future<Output = ()> + 'static>(
    test: impl FnOnce(Reactor, Unreadable) -> F,
) {
    let shelf = Shelf::default();
    let unreadable = shelf.unreadable.clone();
    run_on(shelf, |reactor| test(reactor, unreadable));
}

fn run_on<F: Future<Output = ()> + 'static>(shelf: Shelf, test: impl FnOnce(Reactor) -> F) {
    let reactor = Reactor::new(Box::new(shelf), Order::Fifo);
    let future = test(reactor.clone());
    reactor.block_on(future).expect("the test ends");
    // What still runs would keep the memory of its drives.
    reactor.abandon();
}

fn limits() -> Limits {
    Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true }
}

pub fn drive(reactor: &Reactor, name: &str, latency: Duration) -> Rc<Drive> {
    let (bytes, iops, bytes_per_second) = (DRIVE_BYTES, IOPS, BYTES_PER_SECOND);
    let device = Device::Model { bytes, iops, bytes_per_second, latency };
    Drive::new(reactor, device, limits(), name)
}

/// An array that is written everywhere, and all of it in place.
pub async fn full_array(
    reactor: &Reactor,
    (level, members): (Level, usize),
    settings: SettingsChange,
    latency: impl Fn(usize) -> Duration,
) -> Rc<Array> {
    let drives = (0..members)
        .map(|index| ([index as u8; 16], drive(reactor, &format!("d{index}"), latency(index))));
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "modelled".into(),
        level,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: None,
        integrity: false,
        settings,
        host: None,
    };
    let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
    let buffer = reactor.buffer(1 << 20);
    buffer.copy_from_slice(&[7; 1 << 20]);
    let stripe = array.stripe_bytes();
    let mut at = 0;
    while at < array.capacity() {
        let len = (buffer.len() as u64 / stripe * stripe).min(array.capacity() - at);
        array.write(at, buffer.slice(0..len as usize).into()).await.unwrap();
        at += len;
    }
    while array.status().journal.pending_bytes > 0 {
        reactor.sleep(Duration::from_millis(10)).await;
    }
    array
}

/// Puts blank drives in the place of members, and waits until they are filled: how long it took.
pub async fn rebuild(reactor: &Reactor, array: &Rc<Array>, members: &[u8]) -> Duration {
    let began = reactor.now();
    for member in members {
        let new = drive(reactor, "new", LATENCY);
        array.pull_member(MemberIndex(*member)).unwrap();
        array.replace_member(MemberIndex(*member), new, [100 + member; 16]).await.unwrap();
    }
    while array.status().rebuild.is_some() {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(array.status().rebuild_error, None);
    reactor.now().since(began)
}

/// Random reads or writes of 4 KiB by so many guests, until told to stop. How long they take is
/// measured.
pub struct Guests {
    pub done: Rc<Cell<u64>>,
    pub took: Rc<Cell<Duration>>,
    pub longest: Rc<Cell<Duration>>,
    stop: Rc<Cell<bool>>,
}

#[derive(Clone, Copy)]
pub enum Asks {
    Reads,
    Writes,
}

impl Guests {
    pub fn start(
        reactor: &Reactor,
        array: &Rc<Array>,
        (count, asks): (u64, Asks),
        pause: Duration,
    ) -> Guests {
        let guests = Guests {
            done: Rc::default(),
            took: Rc::default(),
            longest: Rc::default(),
            stop: Rc::default(),
        };
        for guest in 0..count {
            let (reactor, array) = (reactor.clone(), array.clone());
            let (done, took) = (guests.done.clone(), guests.took.clone());
            let (longest, stop) = (guests.longest.clone(), guests.stop.clone());
            reactor.clone().spawn(async move {
                let mut prng = Prng::from_seed(guest);
                let buffer = reactor.buffer(4096);
                buffer.copy_from_slice(&[7; 4096]);
                while !stop.get() {
                    let at = prng.below(array.capacity() / 4096) * 4096;
                    let began = reactor.now();
                    match asks {
                        Asks::Reads => array.read(at, buffer.clone().into()).await.unwrap(),
                        Asks::Writes => array.write(at, buffer.clone().into()).await.unwrap(),
                    }
                    done.set(done.get() + 1);
                    took.set(took.get() + reactor.now().since(began));
                    longest.set(longest.get().max(reactor.now().since(began)));
                    reactor.sleep(pause).await;
                }
            });
        }
        guests
    }

    pub fn stop(&self) {
        self.stop.set(true);
    }
}
