//! Goal: whatever a remote namespace, or the way to it, does: what is read is what was written, or
//! an error; what was written is there; and every operation ends.
//! Method: a target of its own that does wrong what it is told to (`model`), and a copy of what it
//! should have.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod model;

use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::nvme::pdu::Digests;
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_reactor::nvme::remote::{AWAY_MAX, Handle, Offer, Target, Trouble, offers};
use ashlar_reactor::op::{Device, DeviceId, Errno, LATE, Op, Outcome};
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;
use model::{BLOCK, BYTES, Event, Faults, Model, NAMESPACE, SUBSYSTEM};

const NONE: Digests = Digests { header: false, data: false };
const BOTH: Digests = Digests { header: true, data: true };
const GONE: Outcome = Err(Errno(libc::ENODEV));

fn target(model: &Model, digests: Digests) -> Target {
    Target {
        host: model.address.ip().to_string(),
        port: model.address.port(),
        subsystem: SUBSYSTEM.into(),
        namespace: NAMESPACE,
        digests,
        host_nqn: "nqn.2026-01.test:host".into(),
        host_id: [1; 16],
        credentials: None,
    }
}

struct Rig {
    model: Model,
    reactor: Reactor,
    drive: Arc<Handle>,
    device: DeviceId,
    /// What the drive should have.
    copy: Vec<u8>,
    prng: Prng,
}

impl Rig {
    fn new(faults: Faults, digests: Digests) -> Rig {
        let model = Model::start(faults);
        let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
        let drive = Arc::new(Handle::open(target(&model, digests)).unwrap());
        let device = reactor.register(Device::Remote { drive: drive.clone() });
        let (copy, prng) = (vec![0; BYTES], Prng::from_seed(1));
        Rig { model, reactor, drive, device, copy, prng }
    }

    fn begin_anew(&mut self) {
        self.device = self.reactor.register(Device::Remote { drive: self.drive.clone() });
    }

    fn run(&self, op: Op) -> Outcome {
        self.run_all(vec![op]).remove(0)
    }

    /// All at a time.
    fn run_all(&self, ops: Vec<Op>) -> Vec<Outcome> {
        let reactor = self.reactor.clone();
        let all = async move {
            let under_way: Vec<_> = ops.into_iter().map(|op| reactor.submit(op)).collect();
            let mut outcomes = Vec::new();
            for io in under_way {
                outcomes.push(io.await);
            }
            outcomes
        };
        self.reactor.block_on(all).unwrap()
    }

    /// Memory in up to three pieces.
    fn memory(&mut self, len: usize) -> Buffers {
        let mut memory = Buffers::default();
        let mut left = len / BLOCK;
        for piece in (1..=3).rev() {
            let most = left.min((1 << 20) / BLOCK);
            let blocks = if piece == 1 { most } else { self.prng.index(most + 1) };
            if blocks > 0 {
                memory.push(self.reactor.buffer(blocks * BLOCK));
            }
            left -= blocks;
        }
        assert_eq!(left, 0);
        memory
    }

    fn range(&mut self, blocks_max: usize) -> (usize, usize) {
        let blocks = 1 + self.prng.index(blocks_max);
        let at = self.prng.index(BYTES / BLOCK - blocks + 1);
        (at * BLOCK, blocks * BLOCK)
    }

    /// One that changes the drive and the copy.
    fn change(&mut self, (offset, len): (usize, usize)) -> Op {
        let (device, place) = (self.device, offset as u64);
        if self.prng.chance(1, 8) {
            self.copy[offset..offset + len].fill(0);
            return Op::WriteZeroes { device, offset: place, len: len as u64, unmap: true };
        }
        let from = self.memory(len);
        let word = self.prng.next_u64() | 1;
        let byte = |at: u64| (word.wrapping_mul(at + 1) >> 56) as u8;
        let bytes: Vec<u8> = (0..len as u64).map(byte).collect();
        from.copy_from_slice(&bytes);
        self.copy[offset..offset + len].copy_from_slice(&bytes);
        Op::Write { device, offset: place, from }
    }

    fn write(&self, offset: usize, byte: u8) -> Op {
        let from = Buffers::from(self.reactor.buffer(4096));
        from.copy_from_slice(&[byte; 4096]);
        Op::Write { device: self.device, offset: offset as u64, from }
    }

    fn flush(&self) -> Outcome {
        self.run(Op::Flush { device: self.device })
    }

    fn read(&mut self, (offset, len): (usize, usize)) -> (Op, Buffers) {
        let into = self.memory(len);
        let op = Op::Read { device: self.device, offset: offset as u64, into: into.clone() };
        (op, into)
    }

    fn check(&self, (offset, len): (usize, usize), into: &Buffers) {
        let mut bytes = vec![0; len];
        into.copy_to_slice(&mut bytes);
        assert!(bytes == self.copy[offset..offset + len], "wrong data at {offset}");
    }

    /// Changes and reads, some at a time, on ranges apart from each other. All must do.
    fn work(&mut self, turns: usize) {
        for _ in 0..turns {
            let share = BYTES / 8;
            let mut ops = Vec::new();
            let mut reads = Vec::new();
            for part in 0..8 {
                let blocks_max = if self.prng.chance(1, 4) { share / BLOCK } else { 40 };
                let (offset, len) = self.range(blocks_max.min(share / BLOCK));
                let offset = part * share + offset % (share - len + BLOCK);
                let range = (offset / BLOCK * BLOCK, len);
                if self.prng.chance(1, 2) {
                    let op = self.change(range);
                    ops.push((op, len as u64));
                } else {
                    let (op, into) = self.read(range);
                    reads.push((range, into));
                    ops.push((op, len as u64));
                }
            }
            let (ops, lens): (Vec<_>, Vec<_>) = ops.into_iter().unzip();
            let outcomes = self.run_all(ops);
            outcomes.iter().zip(lens).for_each(|(outcome, len)| assert_eq!(*outcome, Ok(len)));
            reads.iter().for_each(|(range, into)| self.check(*range, into));
        }
        assert!(*self.model.disk() == self.copy, "the drive has what was written");
    }
}

#[test]
fn what_is_written_is_read_in_whatever_pieces_it_goes() {
    let whole = Faults::default();
    let pieces = Faults { r2t_bytes: 5000, data_bytes: 3000, ..Faults::default() };
    let flags = Faults { success_flag: true, reversed: true, ..Faults::default() };
    let small = Faults { log2_pages_max: 1, data_bytes: 1500, reversed: true, ..Faults::default() };
    for faults in [whole, pieces, flags, small] {
        for digests in
            [NONE, BOTH, Digests { header: true, ..NONE }, Digests { data: true, ..NONE }]
        {
            let mut rig = Rig::new(faults.clone(), digests);
            rig.work(8);
            assert_eq!(rig.drive.report().reconnects, 0);
        }
    }
}

#[test]
fn what_does_not_fit_is_refused_here() {
    let rig = Rig::new(Faults::default(), NONE);
    let (device, buffer) = (rig.device, |len| Buffers::from(rig.reactor.buffer(len)));
    let end = BYTES as u64;
    for (offset, len, errno) in
        [(1, 512, libc::EINVAL), (0, 100, libc::EINVAL), (end, 512, libc::ENOSPC)]
    {
        let outcome = rig.run(Op::Read { device, offset, into: buffer(len) });
        assert_eq!(outcome, Err(Errno(errno)));
    }
    assert_eq!(rig.flush(), Ok(0));
    assert_eq!(rig.model.count(|event| *event == Event::Flushed), 0, "there is no cache");
}

/// Nothing in a volatile cache: a connection may come and go.
#[test]
fn a_lost_connection_loses_nothing() {
    let mut rig = Rig::new(Faults { r2t_bytes: 9000, ..Faults::default() }, NONE);
    for after in 0..24 {
        rig.model.faults().cut_after = Some(after % 12);
        rig.work(3);
        assert_eq!(rig.model.faults().cut_after, None, "it was cut");
    }
    assert!(rig.drive.report().reconnects >= 20, "{:?}", rig.drive.report());
}

#[test]
fn answers_that_cannot_be_end_the_connection_and_not_the_drive() {
    let mut rig = Rig::new(Faults::default(), BOTH);
    for wrong in 0..9 {
        {
            let mut faults = rig.model.faults();
            match wrong % 3 {
                0 => faults.wrong_ids = 1,
                1 => faults.wrong_header_digests = 1,
                _ => faults.short_reads = 1,
            }
        }
        rig.work(4);
        let faults = rig.model.faults();
        assert_eq!((faults.wrong_ids, faults.wrong_header_digests, faults.short_reads), (0, 0, 0));
    }
    assert_eq!(rig.drive.report().reconnects, 9);
}

#[test]
fn a_wrong_digest_of_data_is_an_error_that_may_be_tried_again() {
    let mut rig = Rig::new(Faults::default(), BOTH);
    let range = (4096, 8192);
    let op = rig.change(range);
    rig.run(op).unwrap();
    rig.model.faults().wrong_data_digests = 1;
    let (op, _) = rig.read(range);
    assert_eq!(rig.run(op), Err(Errno(libc::EAGAIN)));
    let (op, into) = rig.read(range);
    assert_eq!(rig.run(op), Ok(8192));
    rig.check(range, &into);
    assert_eq!(rig.drive.report().reconnects, 0);
}

/// The old one is done after the cut, by a target that does not notice at once that we are gone.
#[test]
fn a_write_that_was_lost_on_its_way_does_not_come_after_a_younger_one() {
    let late = Duration::from_millis(700);
    let rig = Rig::new(Faults { late_write: Some(late), ..Faults::default() }, NONE);
    rig.run(rig.write(0, 1)).unwrap();
    // The controller cannot be asked to stop, either.
    {
        let mut faults = rig.model.faults();
        (faults.cut_after, faults.no_reset) = (Some(0), true);
    }
    let reactor = rig.reactor.clone();
    let (old, young) = (rig.write(0, 2), rig.write(0, 3));
    let written = rig.reactor.block_on(async move {
        let first = reactor.submit(old).await;
        (first, reactor.submit(young).await)
    });
    assert_eq!(written, Some((Ok(4096), Ok(4096))));
    assert_eq!(rig.model.disk()[0], 3);
    let events = rig.model.events();
    let of_write = |event: &&Event| matches!(event, Event::Wrote { .. } | Event::LateWrite { .. });
    let writes: Vec<_> = events.iter().filter(of_write).cloned().collect();
    let wrote = |first| Event::Wrote { offset: 0, first };
    assert_eq!(writes, [wrote(1), Event::LateWrite { offset: 0, first: 2 }, wrote(2), wrote(3)]);
}

#[test]
fn what_a_volatile_cache_may_have_lost_is_not_served() {
    let mut rig = Rig::new(Faults { volatile_cache: true, ..Faults::default() }, NONE);
    rig.work(1);
    assert_eq!(rig.flush(), Ok(0));
    // All is on media: it may come and go.
    rig.model.faults().cut_after = Some(0);
    let (op, _) = rig.read((0, 4096));
    assert_eq!(rig.run(op), Ok(4096));
    assert_eq!(rig.drive.report().lost, None);
    let op = rig.change((0, 4096));
    rig.run(op).unwrap();
    rig.model.faults().cut_after = Some(0);
    let (op, _) = rig.read((0, 4096));
    assert_eq!(rig.run(op), GONE);
    assert_eq!(rig.drive.report().lost, Some(Trouble::Forgetful));
    let (op, _) = rig.read((0, 4096));
    assert_eq!(rig.run(op), GONE, "for ever");
    // For who begins anew it is there.
    assert_eq!(rig.drive.look(), Ok(BYTES as u64));
    assert_eq!(rig.drive.report().lost, None);
    assert!(rig.drive.report().was_given_up);
    rig.reactor.register(Device::Remote { drive: rig.drive.clone() });
    assert!(!rig.drive.report().was_given_up);
}

/// A target that says since when it has power is gone on with, as long as that is the same.
#[test]
fn a_volatile_cache_that_is_known_to_have_had_power_has_lost_nothing() {
    let faults = Faults { volatile_cache: true, power_cycle: [1; 16], ..Faults::default() };
    let mut rig = Rig::new(faults, NONE);
    for _ in 0..3 {
        let op = rig.change((0, 4096));
        rig.run(op).unwrap();
        rig.model.faults().cut_after = Some(0);
        let (op, _) = rig.read((0, 4096));
        assert_eq!(rig.run(op), Ok(4096));
    }
    assert_eq!(rig.drive.report().lost, None);
    // What is flushed over the last connection was written over the ones before.
    assert_eq!(rig.flush(), Ok(0));
    rig.model.faults().power_cycle = [2; 16];
    rig.model.faults().cut_after = Some(0);
    let (op, _) = rig.read((0, 4096));
    assert_eq!(rig.run(op), Ok(4096), "nothing was in the cache");
    // Another loss of power, or none that it tells of any more.
    for next in [[3; 16], [0; 16]] {
        let op = rig.change((0, 4096));
        rig.run(op).unwrap();
        rig.model.faults().power_cycle = next;
        rig.model.faults().cut_after = Some(0);
        let (op, _) = rig.read((0, 4096));
        assert_eq!(rig.run(op), GONE, "{next:?}");
        assert_eq!(rig.drive.report().lost, Some(Trouble::Forgetful));
        assert_eq!(rig.drive.power(), PowerCycle::new(next));
        rig.begin_anew();
    }
}

#[test]
fn another_namespace_is_another_drive() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    rig.model.faults().nguid = [8; 16];
    rig.model.cut();
    let (op, _) = rig.read((0, 4096));
    assert_eq!(rig.run(op), GONE);
    assert_eq!(rig.drive.report().lost, Some(Trouble::Another));
    assert_eq!(rig.drive.look(), Err(Trouble::Another));
}

#[test]
fn a_target_that_takes_less_at_once_than_before_is_not_used() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    rig.model.faults().log2_pages_max = 1;
    rig.model.cut();
    let (op, _) = rig.read((0, 1 << 16));
    assert_eq!(rig.run(op), GONE);
    let trouble = rig.drive.report().trouble.unwrap().to_string();
    assert!(trouble.contains("attach it anew"), "{trouble}");
}

#[test]
fn another_namespace_is_noticed_on_a_connection_that_lasts() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    rig.model.faults().nguid = [8; 16];
    let began = rig.reactor.now();
    while rig.drive.report().lost.is_none() {
        let (op, _) = rig.read((0, 4096));
        let answered = rig.run(op);
        assert!(answered == Ok(4096) || answered == GONE, "{answered:?}");
        assert!(rig.reactor.now().since(began) < AWAY_MAX, "it is used as if it were the same");
    }
    assert_eq!(rig.drive.report().lost, Some(Trouble::Another));
}

#[test]
fn who_is_away_for_too_long_is_gone() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    rig.model.faults().closed = true;
    rig.model.cut();
    let began = rig.reactor.now();
    let (op, _) = rig.read((0, 4096));
    assert_eq!(rig.run_all(vec![op, rig.write(8192, 1)]), [GONE, GONE]);
    let took = rig.reactor.now().since(began);
    assert!((AWAY_MAX..2 * AWAY_MAX).contains(&took), "{took:?}");
    assert!(matches!(rig.drive.report().lost, Some(Trouble::Away(_))));
}

/// Less than who waits for an answer waits, from when it was asked.
#[test]
fn who_does_not_answer_is_gone() {
    let rig = Rig::new(Faults { silent_io: true, ..Faults::default() }, NONE);
    let began = rig.reactor.now();
    assert_eq!(rig.run(rig.write(8192, 1)), GONE);
    let took = rig.reactor.now().since(began);
    assert!((AWAY_MAX..2 * AWAY_MAX).contains(&took), "{took:?}");
}

#[test]
fn a_controller_that_gives_no_sign_of_life_is_left() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    rig.model.faults().silent_admin = true;
    let mut reads = 0;
    while rig.drive.report().reconnects == 0 {
        let (op, _) = rig.read((0, 4096));
        assert_eq!(rig.run(op), Ok(4096));
        reads += 1;
    }
    rig.work(2);
    assert_eq!(rig.drive.report().reconnects, 1, "after {reads} reads");
}

/// Right, or an error: whatever comes.
#[test]
fn mutated_answers_are_never_believed() {
    let (mut good, mut bad) = (0, 0);
    for seed in 0..40 {
        let mut rig = Rig::new(Faults { data_bytes: 2000, ..Faults::default() }, BOTH);
        rig.work(1);
        rig.model.faults().mutate = Some((seed, 1 << (7 + seed % 8)));
        rig.model.cut();
        for _ in 0..6 {
            let range = rig.range(30);
            let (op, into) = rig.read(range);
            match rig.run(op) {
                Ok(moved) => {
                    assert_eq!(moved, range.1 as u64);
                    rig.check(range, &into);
                    good += 1;
                }
                Err(_) => bad += 1,
            }
        }
    }
    assert!(good > 20 && bad > 20, "{good} good, {bad} bad");
}

#[test]
fn what_came_too_late_is_not_begun_again() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    let before = rig.model.events().len();
    {
        let mut faults = rig.model.faults();
        (faults.cut_after, faults.no_reset) = (Some(0), true);
    }
    let (reactor, op) = (rig.reactor.clone(), rig.write(0, 5));
    let until = rig.reactor.now().after(Duration::from_secs(2));
    // It is sent in time, and lost; when there is a connection again, its time is over.
    let outcome = rig.reactor.block_on(async move { reactor.submit_until(op, until).await });
    assert_eq!(outcome, Some(Err(Errno(libc::ETIMEDOUT))));
    let (reactor, op) = (rig.reactor.clone(), rig.write(0, 5));
    let late = rig.reactor.block_on(async move { reactor.submit_until(op, until).await });
    assert_eq!(late, Some(LATE));
    let events = rig.model.events();
    assert!(!events[before..].iter().any(|event| matches!(event, Event::Wrote { .. })));
}

/// Also for who has opened it, and writes where it was given up.
#[test]
fn nothing_is_written_before_a_write_of_a_given_up_connection_is_over() {
    let late = Duration::from_millis(700);
    let rig = Rig::new(Faults { late_write: Some(late), ..Faults::default() }, NONE);
    rig.run(rig.write(0, 1)).unwrap();
    {
        let mut faults = rig.model.faults();
        (faults.cut_after, faults.no_reset) = (Some(0), true);
    }
    rig.drive.let_go();
    assert_eq!(rig.run(rig.write(0, 2)), GONE);
    assert_eq!(rig.drive.report().lost, Some(Trouble::LetGo));
    rig.drive.write_at(&[3; 4096], 0).unwrap();
    assert_eq!(rig.model.disk()[0], 3);
    let events = rig.model.events();
    let of_write = |event: &&Event| matches!(event, Event::Wrote { .. } | Event::LateWrite { .. });
    let writes: Vec<_> = events.iter().filter(of_write).cloned().collect();
    let wrote = |first| Event::Wrote { offset: 0, first };
    assert_eq!(writes, [wrote(1), Event::LateWrite { offset: 0, first: 2 }, wrote(3)]);
}

/// So nobody writes beside one that still asks again.
#[test]
fn a_namespace_is_open_once() {
    let model = Model::start(Faults::default());
    let open = || Handle::open(target(&model, NONE));
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let drive = Arc::new(open().unwrap());
    let device = reactor.register(Device::Remote { drive: drive.clone() });
    assert_eq!(open().unwrap_err(), Trouble::Taken);
    drop(drive);
    assert_eq!(open().unwrap_err(), Trouble::Taken, "the reactor has it");
    reactor.unregister(device);
    drop(reactor);
    open().unwrap();
}

/// Its command was sent in time; its data is asked for when its time is over.
#[test]
fn data_is_not_sent_too_late() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    let before = rig.model.events().len();
    let from = Buffers::from(rig.reactor.buffer(256 << 10));
    from.copy_from_slice(&vec![5; 256 << 10]);
    let op = Op::Write { device: rig.device, offset: 0, from };
    rig.model.faults().late_r2t = Some(Duration::from_secs(3));
    let until = rig.reactor.now().after(Duration::from_secs(2));
    let reactor = rig.reactor.clone();
    let outcome = rig.reactor.block_on(async move { reactor.submit_until(op, until).await });
    assert_eq!(outcome, Some(Err(Errno(libc::ETIMEDOUT))));
    assert_eq!(rig.model.faults().late_r2t, None, "it was asked for");
    rig.work(1);
    let events = rig.model.events();
    let late = Event::Wrote { offset: 0, first: 5 };
    assert!(!events[before..].contains(&late), "{:?}", &events[before..]);
}

#[test]
fn several_reactors_have_one_drive() {
    let mut rig = Rig::new(Faults::default(), NONE);
    rig.work(1);
    let twin = rig.reactor.twin(rig.device).unwrap();
    let other = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let device = other.register(twin);
    let into = Buffers::from(other.buffer(4096));
    let op = Op::Read { device, offset: 8192, into: into.clone() };
    let io = other.submit(op);
    assert_eq!(other.block_on(io), Some(Ok(4096)));
    rig.check((8192, 4096), &into);
    assert_eq!(rig.drive.report().connected, 2);
    other.unregister(device);
    rig.work(1);
}

#[test]
fn who_opens_it_reads_and_writes_too() {
    let model = Model::start(Faults { r2t_bytes: 4096, data_bytes: 1000, ..Faults::default() });
    let drive = Handle::open(target(&model, BOTH)).unwrap();
    let identity = drive.identity();
    assert_eq!((identity.its.bytes(), identity.its.block_bytes()), (BYTES as u64, 512));
    assert_eq!((identity.name.nguid, identity.name.uuid), ([7; 16], model.uuid));
    assert_eq!(identity.controller.serial, "SERIAL");
    let bytes: Vec<u8> = (0..300_032).map(|at: usize| (at / 7) as u8).collect();
    drive.write_at(&bytes, 4096).unwrap();
    drive.flush().unwrap();
    let mut back = vec![0; bytes.len()];
    drive.read_at(&mut back, 4096).unwrap();
    assert!(bytes == back);
    // It was lost while nobody used it: what only reads does not see that.
    model.cut();
    drive.read_at(&mut back, 4096).unwrap();
    assert!(bytes == back);
}

/// A flush over another connection says nothing of what was written over the one before.
#[test]
fn who_opens_it_hears_that_a_volatile_cache_may_have_lost_something() {
    let model = Model::start(Faults { volatile_cache: true, ..Faults::default() });
    let drive = Handle::open(target(&model, NONE)).unwrap();
    drive.write_at(&[1; 4096], 0).unwrap();
    drive.flush().unwrap();
    model.cut();
    drive.read_at(&mut [0; 4096], 0).unwrap();
    drive.flush().unwrap();
    drive.write_at(&[2; 4096], 0).unwrap();
    model.cut();
    drive.read_at(&mut [0; 4096], 0).unwrap();
    drive.flush().unwrap_err();
    drive.write_at(&[3; 4096], 0).unwrap();
    drive.flush().unwrap();
}

/// Whoever opens it would wait for as long as it goes on.
#[test]
fn data_of_no_bytes_is_no_answer() {
    let model = Model::start(Faults { empty_data: true, ..Faults::default() });
    let trouble = Handle::open(target(&model, NONE)).map(|_| ()).unwrap_err();
    assert!(matches!(trouble, Trouble::Fault(_)), "{trouble:?}");
}

#[test]
fn refusals_say_why() {
    let model = Model::start(Faults { host: Some("nqn.other".into()), ..Faults::default() });
    let open = |change: fn(&mut Target)| {
        let mut its = target(&model, NONE);
        change(&mut its);
        Handle::open(its).map(|_| ()).unwrap_err()
    };
    assert_eq!(open(|_| {}), Trouble::Stranger);
    model.faults().host = None;
    assert_eq!(open(|its| its.subsystem = "nqn.nobody".into()), Trouble::NoSubsystem);
    let no_namespace = Trouble::NoNamespace { wanted: 7, has: vec![1, NAMESPACE] };
    assert_eq!(open(|its| its.namespace = 7), no_namespace);
    assert!(matches!(open(|its| its.port = 1), Trouble::Unreachable(_)));
    assert!(matches!(open(|its| its.host = "no such host".into()), Trouble::Unresolved(_)));
    model.faults().log2_pages_max = 5;
    let offer =
        Offer { address: "192.0.2.1".into(), port: "4420".into(), subsystem: SUBSYSTEM.into() };
    assert_eq!(offers(&target(&model, NONE)), Ok(vec![offer]));
}
