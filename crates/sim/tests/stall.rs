//! Goal: what a host had half-way when it stalled never falls on what another host has written
//! meanwhile; and where no other came, it goes on as if nothing had been.
//! Method: two hosts on the same simulated drives, each with a reactor of its own, in one virtual
//! time. A host whose reactor nobody runs is stalled: what its drives were given lands, and it
//! gives them nothing more. It stalls at a moment drawn by seed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::lease::Host;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::backend::{Backend, Instant};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Done, Op, Ticket};
use ashlar_reactor::prng::Prng;
use ashlar_sim::world::{SharedWorld, SimBackend};

use crate::storage::{open, spec, storage};

mod storage;

const MEMBERS: u32 = 3;
/// The last one is no member at first.
const DRIVES: u32 = MEMBERS + 1;
const DRIVE_BYTES: u64 = 12 << 20;
/// Where leases are on a member.
const LEASES: Range<u64> = 704 << 10..712 << 10;
/// Of the array.
const WRITTEN_BYTES: u64 = 1 << 20;
/// Longer than a host trusts its last beat.
const STALL: Duration = Duration::from_secs(20);
const MS: Duration = Duration::from_millis(1);
const S: Duration = Duration::from_secs(1);

/// Storage that two hosts reach.
struct Storage {
    backend: SimBackend,
    /// What each has not heard yet.
    answers: [Vec<Done>; 2],
    /// Whether the second has the array.
    taken: bool,
    /// What the first began since, but for leases.
    strays: Vec<String>,
    /// Operations that came too late.
    late: u64,
}

/// A host's way to it. Tickets of the first are even there, those of the second odd.
struct Path {
    storage: Rc<RefCell<Storage>>,
    host: usize,
}

impl Storage {
    fn note_stray(&mut self, op: &Op) {
        let range = match op {
            Op::Write { offset, from, .. } => *offset..offset + from.len() as u64,
            Op::WriteZeroes { offset, len, .. } => *offset..offset + len,
            Op::Read { .. } | Op::Flush { .. } | Op::Descriptor { .. } => return,
        };
        if range.start < LEASES.start || range.end > LEASES.end {
            self.strays.push(format!("{op:?}"));
        }
    }
}

impl Backend for Path {
    fn now(&self) -> Instant {
        self.storage.borrow().backend.now()
    }

    fn register(&mut self, device: Device) -> DeviceId {
        self.storage.borrow_mut().backend.register(device)
    }

    fn unregister(&mut self, device: DeviceId) {
        self.storage.borrow_mut().backend.unregister(device);
    }

    fn submit(&mut self, ticket: Ticket, op: &Op, until: Instant) {
        let mut storage = self.storage.borrow_mut();
        if storage.backend.now() > until {
            storage.late += 1;
        } else if storage.taken && self.host == 0 {
            storage.note_stray(op);
        }
        storage.backend.submit(Ticket(ticket.0 * 2 + self.host as u32), op, until);
    }

    fn reap(&mut self, done: &mut Vec<Done>) {
        let mut storage = self.storage.borrow_mut();
        let mut all = Vec::new();
        storage.backend.reap(&mut all);
        for Done { ticket, outcome } in all {
            let host = ticket.0 as usize % 2;
            storage.answers[host].push(Done { ticket: Ticket(ticket.0 / 2), outcome });
        }
        done.append(&mut storage.answers[self.host]);
    }

    fn idle(&mut self, until: Option<Instant>) -> bool {
        let mut storage = self.storage.borrow_mut();
        !storage.answers[self.host].is_empty() || storage.backend.idle(until)
    }
}

/// Two hosts and what they reach.
struct Pair {
    world: SharedWorld,
    storage: Rc<RefCell<Storage>>,
    first: Reactor,
    second: Reactor,
}

impl Pair {
    fn new(seed: u64) -> Pair {
        let world = storage(seed, DRIVES, DRIVE_BYTES, 1_000_000);
        world.borrow_mut().begin_life();
        let (backend, answers) = (SimBackend::new(&world), [Vec::new(), Vec::new()]);
        let storage = Storage { backend, answers, taken: false, strays: Vec::new(), late: 0 };
        let storage = Rc::new(RefCell::new(storage));
        let host = |host: usize| {
            let path = Path { storage: storage.clone(), host };
            Reactor::new(Box::new(path), Order::Seeded(Prng::from_seed(seed + host as u64)))
        };
        let (first, second) = (host(0), host(1));
        Pair { world, storage, first, second }
    }

    /// Both live on, in turns of a moment.
    fn run_both(&self, time: Duration) {
        let end = self.first.now().after(time);
        while self.first.now() < end {
            for reactor in [&self.first, &self.second] {
                run(reactor, pass(reactor, 50 * MS));
            }
        }
    }

    fn end(self) {
        assert_eq!(self.world.borrow().failure(), None);
        self.world.borrow_mut().end_life(None);
        self.first.abandon();
        self.second.abandon();
    }
}

/// The other host stalls meanwhile.
fn run<T: 'static>(reactor: &Reactor, future: impl Future<Output = T> + 'static) -> T {
    reactor.block_on(future).expect("it does not hang")
}

fn pass(reactor: &Reactor, time: Duration) -> impl Future<Output = ()> + use<> {
    let reactor = reactor.clone();
    async move { reactor.sleep(time).await }
}

fn drive(reactor: &Reactor, drive: u32) -> Rc<Drive> {
    open(reactor, drive, DRIVE_BYTES)
}

async fn create(reactor: Reactor, policy: Policy) -> Rc<Array> {
    let host = Host::new([1; 16], "alpha");
    let spec = spec(Level::Raid5, Some(policy), Some(host));
    let drives = (0..MEMBERS).map(|index| ([10 + index as u8; 16], drive(&reactor, index)));
    Array::create(&reactor, &spec, drives.collect()).await.unwrap()
}

async fn take_over(reactor: Reactor) -> Rc<Array> {
    let host = Some(Host::new([2; 16], "beta"));
    let options = AssembleOptions { host, ..AssembleOptions::default() };
    let drives = (0..DRIVES).map(|index| drive(&reactor, index)).collect();
    Array::assemble(&reactor, drives, options).await.unwrap()
}

async fn write(array: &Rc<Array>, reactor: &Reactor, range: Range<u64>, value: u8) -> Written {
    let len = (range.end - range.start) as usize;
    let buffer = reactor.buffer(len);
    buffer.copy_from_slice(&vec![value; len]);
    array.write(range.start, buffer.into()).await
}

type Written = Result<(), ArrayError>;

/// What a host does until it cannot any more, or is to end it.
#[derive(Clone, Default)]
struct Busy {
    tasks: Rc<Cell<u32>>,
    over: Rc<Cell<bool>>,
}

impl Busy {
    fn begin(&self, reactor: &Reactor, array: &Rc<Array>, prng: &mut Prng) {
        for seed in 0..4 {
            let mut prng = Prng::from_seed(prng.below(u64::MAX) ^ seed);
            let (reactor, array, busy) = (reactor.clone(), array.clone(), self.clone());
            self.tasks.set(self.tasks.get() + 1);
            reactor.clone().spawn(async move {
                while !busy.over.get() && busy.step(&reactor, &array, &mut prng).await.is_ok() {}
                busy.tasks.set(busy.tasks.get() - 1);
            });
        }
    }

    async fn step(&self, reactor: &Reactor, array: &Rc<Array>, prng: &mut Prng) -> Written {
        let len = [4096, 16 << 10, 64 << 10][prng.index(3)];
        let at = prng.below((WRITTEN_BYTES - len) / 4096) * 4096;
        match prng.below(8) {
            0 => array.flush().await,
            1 => array.write_zeroes(at, len).await,
            _ => write(array, reactor, at..at + len, 1).await,
        }
    }
}

/// The first host serves, and stalls somewhere.
fn serve_and_stall(pair: &Pair, prng: &mut Prng, busy: &Busy) -> Rc<Array> {
    let policy = [Policy::Journal, Policy::Bitmap, Policy::None][prng.index(3)];
    let ours = run(&pair.first, create(pair.first.clone(), policy));
    run(&pair.first, pass(&pair.first, Duration::from_micros(prng.below(6_000_000))));
    busy.begin(&pair.first, &ours, prng);
    if prng.chance(1, 2) {
        // It is being given another member.
        let (array, its) = (ours.clone(), pair.first.clone());
        array.pull_member(MemberIndex(1)).unwrap();
        pair.first.spawn(async move {
            let _ = array.replace_member(MemberIndex(1), drive(&its, MEMBERS), [99; 16]).await;
        });
    }
    run(&pair.first, pass(&pair.first, Duration::from_micros(prng.below(60_000))));
    ours
}

#[test]
fn a_host_that_was_replaced_while_it_stalled_writes_nothing_more() {
    let mut late = 0;
    for seed in 0..300 {
        let mut prng = Prng::from_seed(seed);
        let (pair, busy) = (Pair::new(seed), Busy::default());
        let ours = serve_and_stall(&pair, &mut prng, &busy);

        let theirs = run(&pair.second, take_over(pair.second.clone()));
        pair.storage.borrow_mut().taken = true;
        let (array, its) = (theirs.clone(), pair.second.clone());
        let fill = async move { write(&array, &its, 0..WRITTEN_BYTES, 2).await.unwrap() };
        run(&pair.second, fill);
        run(&pair.second, pass(&pair.second, Duration::from_micros(prng.below(8_000_000))));

        assert_eq!(busy.tasks.get(), 4, "seed {seed}: it was not in the middle of things");
        let stops = prng.chance(1, 4);
        let (array, stopped) = (ours.clone(), Rc::new(Cell::new(!stops)));
        let has_stopped = stopped.clone();
        if stops {
            pair.first.spawn(async move {
                let _ = array.stop().await;
                has_stopped.set(true);
            });
        }
        pair.run_both(10 * S);
        assert_eq!(pair.storage.borrow().strays, [""; 0], "seed {seed}");
        assert_eq!(ours.status().lost_to.as_deref(), Some("host beta"), "seed {seed}");
        assert_eq!((busy.tasks.get(), stopped.get()), (0, true), "seed {seed}: somebody hangs");
        late += pair.storage.borrow().late;

        let (array, its) = (theirs, pair.second.clone());
        run(&pair.second, async move {
            let into = its.buffer(WRITTEN_BYTES as usize);
            array.read(0, into.clone().into()).await.unwrap();
            assert!(into.bytes().iter().all(|byte| *byte == 2), "seed {seed}");
            array.stop().await.unwrap();
        });
        pair.end();
    }
    assert!(late > 1000, "{late}");
}

#[test]
fn a_host_that_was_not_replaced_goes_on() {
    let mut late = 0;
    for seed in 0..100 {
        let mut prng = Prng::from_seed(seed);
        let (pair, busy) = (Pair::new(seed), Busy::default());
        let ours = serve_and_stall(&pair, &mut prng, &busy);
        // The other lives, and does not want it.
        run(&pair.second, pass(&pair.second, STALL));
        let began = pair.first.now();
        run(&pair.first, pass(&pair.first, MS));
        late += pair.storage.borrow().late;
        let (array, its) = (ours.clone(), pair.first.clone());
        run(&pair.first, async move { write(&array, &its, 0..4096, 1).await.unwrap() });
        // Two looks at the lease, apart by what a rival that nobody saw would have needed.
        assert!(pair.first.now().since(began) < 7 * S, "seed {seed}");
        assert_eq!((busy.tasks.get(), ours.status().lost_to), (4, None), "seed {seed}");
        // Its guests end, and the rebuild does: it rests after what it takes for a long effort.
        busy.over.set(true);
        run(&pair.first, pass(&pair.first, 300 * S));
        assert_eq!(busy.tasks.get(), 0, "seed {seed}");
        assert_eq!(ours.state(), ArrayState::Optimal, "seed {seed}");
        let status = ours.status();
        let healths = status.members.iter().map(|its| its.drive.as_ref().unwrap().health());
        assert!(healths.map(|health| health.write_errors).eq([0; 3]), "seed {seed}");
        run(&pair.first, async move { ours.stop().await.unwrap() });
        pair.end();
    }
    assert!(late > 300, "{late}");
}

#[test]
fn nobody_waits_for_an_array_whose_drives_are_gone() {
    for seed in 0..100 {
        let mut prng = Prng::from_seed(seed);
        let (pair, busy) = (Pair::new(seed), Busy::default());
        let ours = serve_and_stall(&pair, &mut prng, &busy);
        run(&pair.second, pass(&pair.second, STALL));
        (0..DRIVES).for_each(|drive| pair.world.borrow_mut().kill(drive));
        run(&pair.first, pass(&pair.first, 60 * S));
        assert_eq!(busy.tasks.get(), 0, "seed {seed}: somebody hangs");
        // With or without an error.
        let _ = run(&pair.first, async move { ours.stop().await });
        pair.end();
    }
}
