//! Goal: zeroing is paid for where zeroes have to be written, bit by bit, and is free elsewhere; an
//! export that is not alone begins few requests in a turn.
//! Method: an array of modelled drives that refuse to zero, in virtual time, with a limit of one
//! MiB a second.

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::backend::Backend;
use ashlar_reactor::executor::Order;
use ashlar_reactor::op::{Device, DeviceId, Done, Errno, Op, Ticket};
use ashlar_reactor::virtual_time::VirtualBackend;

use super::*;
use crate::limits::{Rate, Rates};
use crate::request::Permit;

const MIB: u64 = 1 << 20;
const DISK: u64 = 64 * MIB;
/// Of an array so small: 16 stripes of 128 KiB.
const REGION: u64 = 2 * MIB;

/// Its drives cannot zero.
#[derive(Default)]
struct Zeroless {
    world: VirtualBackend,
    refused: Vec<Done>,
}

impl Backend for Zeroless {
    fn now(&self) -> Instant {
        self.world.now()
    }

    fn register(&mut self, device: Device) -> DeviceId {
        self.world.register(device)
    }

    fn unregister(&mut self, device: DeviceId) {
        self.world.unregister(device);
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        match op {
            Op::WriteZeroes { .. } => {
                self.refused.push(Done { ticket, outcome: Err(Errno(libc::EOPNOTSUPP)) });
            }
            Op::Read { .. } | Op::Write { .. } | Op::Flush { .. } | Op::Descriptor { .. } => {
                self.world.submit(ticket, op, until);
            }
        }
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        done.append(&mut self.refused);
        self.world.reap(done);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        !self.refused.is_empty() || self.world.idle(until)
    }
}

/// A disk of which every region was written to, and its limits.
async fn slow_disk(reactor: &Reactor) -> Rc<Disk> {
    let bytes = DISK + 32 * MIB;
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "array".into(),
        level: Level::Raid1,
        chunk_bytes: 128 << 10,
        shape: Default::default(),
        policy: None,
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let latency = Duration::from_micros(50);
    let model = || Device::Model { bytes, iops: 1_000_000, bytes_per_second: 4 << 30, latency };
    let limits = Limits { bytes, sector_bytes: 512, zeroes_cheaply: false };
    let drives = (0..2).map(|i| ([i; 16], Drive::new(reactor, model(), limits, "drive")));
    let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
    let volume = Pool::open(array).await.unwrap().create([2; 16], "disk", DISK).await.unwrap();
    let limits = RateLimits::new(Rates::default());
    let disk = Disk::new(reactor, "disk".into(), Rc::new(volume), [0; 20], 1, limits.clone());
    for region in 0..DISK / REGION {
        for at in [region * REGION, (region + 1) * REGION - 4096] {
            assert_eq!(write(&disk, at).await, Status::Done);
        }
    }
    let write = Rate { requests_per_second: None, bytes_per_second: Some(MIB) };
    limits.set(Rates { write, ..Rates::default() });
    Rc::new(disk)
}

async fn write(disk: &Disk, offset: u64) -> Status {
    let from = disk.reactor().buffer(4096);
    from.copy_from_slice(&[7; 4096]);
    do_on(disk, Operation::Write { offset, from: from.into() }).await
}

async fn do_on(disk: &Disk, operation: Operation) -> Status {
    disk.serve(Request { operation, permit: Permit::new(0) }).await.status
}

async fn byte(disk: &Disk, offset: u64) -> u8 {
    let into = disk.reactor().buffer(4096);
    let read = Operation::Read { offset, into: into.clone().into() };
    assert_eq!(do_on(disk, read).await, Status::Done);
    into.bytes()[0]
}

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Rc<Disk>) -> F + 'static) {
    let reactor = Reactor::new(Box::<Zeroless>::default(), Order::Fifo);
    let its = reactor.clone();
    let ran = reactor.block_on(async move { test(slow_disk(&its).await).await });
    assert!(ran.is_some());
    reactor.abandon();
}

fn seconds(disk: &Disk, since: Instant) -> f64 {
    disk.reactor().now().since(since).as_secs_f64()
}

#[test]
fn zeroes_that_are_written_cost_what_they_are_and_hold_nobody_up() {
    run(|disk| async move {
        let reactor = disk.reactor().clone();
        let began = reactor.now();
        // Two regions but for a sector each: none of it is whole.
        let zeroes = Operation::WriteZeroes { offset: 512, len: 2 * REGION - 1024 };
        let other = disk.clone();
        let done: Rc<Cell<f64>> = Rc::default();
        let its = done.clone();
        reactor.spawn(async move {
            other.reactor().sleep(Duration::from_millis(100)).await;
            assert_eq!(write(&other, 8 * REGION).await, Status::Done);
            its.set(seconds(&other, began));
        });
        assert_eq!(do_on(&disk, zeroes).await, Status::Done);
        let took = seconds(&disk, began);
        // The last step need not wait for itself.
        assert!((2.9..4.1).contains(&took), "{took} s");
        assert!((0.1..2.2).contains(&done.get()), "another waited for {} s", done.get());
        assert_eq!((byte(&disk, 0).await, byte(&disk, 4096).await), (7, 0));
        let end = 2 * REGION - 4096;
        assert_eq!(byte(&disk, end).await, 0);
        // What comes next waits for what was written.
        assert_eq!(write(&disk, 0).await, Status::Done);
        assert!((3.9..4.3).contains(&seconds(&disk, began)));
        assert_eq!(disk.counters().limited, 2, "the two writes, and no steps");
    });
}

#[test]
fn what_nothing_is_written_for_waits_for_nothing() {
    run(|disk| async move {
        let began = disk.reactor().now();
        let (offset, len) = (REGION, DISK - 2 * REGION);
        assert_eq!(do_on(&disk, Operation::WriteZeroes { offset, len }).await, Status::Done);
        let discard = Operation::Discard { offset: 512, len: DISK - 1024 };
        assert_eq!(do_on(&disk, discard).await, Status::Done);
        // Blank by now, so there is nothing to be done.
        let again = Operation::WriteZeroes { offset: REGION + 512, len: 8 * REGION };
        assert_eq!(do_on(&disk, again).await, Status::Done);
        assert!(seconds(&disk, began) < 0.5, "{}", seconds(&disk, began));
        assert_eq!((byte(&disk, 0).await, byte(&disk, REGION).await), (7, 0));
        assert_eq!(disk.counters().limited, 0);
    });
}

#[test]
fn zeroing_that_nobody_wants_any_more_ends_early() {
    run(|disk| async move {
        let reactor = disk.reactor().clone();
        let began = reactor.now();
        let wanted = || reactor.now() < began.after(Duration::from_millis(500));
        let turn = disk.turn_while(&wanted, Toll::Write(0)).await.expect("it is wanted yet");
        let operation = Operation::WriteZeroes { offset: 512, len: REGION - 512 };
        let request = Request { operation, permit: Permit::new(0) };
        assert_eq!(disk.serve_in(turn, request).await.status, Status::Failed);
        assert!((0.5..0.7).contains(&seconds(&disk, began)));
        let end = REGION - 4096;
        assert_eq!((byte(&disk, 4096).await, byte(&disk, end).await), (0, 7));
        assert_eq!(disk.counters().errors, 0);
        assert!(disk.turn_while(&wanted, Toll::Write(0)).await.is_none());
    });
}

#[test]
fn requests_that_come_at_once_begin_in_turns_beside_others() {
    run(|disk| async move {
        let (reactor, done) = (disk.reactor().clone(), Rc::new(Cell::new(0)));
        let beside = Quantum::new(&reactor);
        beside.note(reactor.turn_time());
        for _ in 0..100 {
            let (disk, done) = (disk.clone(), done.clone());
            reactor.spawn(async move {
                let turn = disk.turn(Toll::None).await;
                let operation = Operation::Refuse(Status::Unsupported);
                let request = Request { operation, permit: Permit::new(0) };
                assert_eq!(disk.serve_in(turn, request).await.status, Status::Unsupported);
                done.set(done.get() + 1);
            });
        }
        reactor.yield_now().await;
        assert!(done.get() < 100, "all at once");
        reactor.sleep(Duration::from_secs(1)).await;
        assert_eq!(done.get(), 100);
    });
}
