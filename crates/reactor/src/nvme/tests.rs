//! Goal: whatever a drive does, an operation ends with its data or an error, in bounded time, and
//! the drive reaches no memory of an operation that has ended.
//! Method: a model of a controller behind an IOMMU (`model.rs`), with every fault that it knows;
//! its time is made up.

use std::sync::Arc;
use std::time::Duration;

use super::controller::Trouble;
use super::device::NvmeDevice;
use super::model::{BLOCK_BYTES, BLOCKS, Faults, Model};
use super::*;
use crate::backend::Backend;
use crate::executor::{Order, Reactor};
use crate::op::{Device, Done, Errno, LATE, Outcome};
use crate::prng::Prng;
use crate::uring::UringBackend;

const DRIVE_BYTES: usize = BLOCKS * BLOCK_BYTES;
/// More than anything may take here.
const LOOKS_MAX: usize = 100_000;

/// A drive as a reactor has it.
struct Lent {
    model: Model,
    handle: Handle,
    device: NvmeDevice,
    pool: std::rc::Rc<BufferPool>,
}

fn lent() -> Lent {
    lent_with(|_| {})
}

fn lent_with(prepare: impl FnOnce(&Model)) -> Lent {
    let model = Model::default();
    prepare(&model);
    let handle = Handle::open(model.bus()).unwrap();
    let device = handle.lend().unwrap();
    Lent { model, handle, device, pool: BufferPool::new() }
}

impl Lent {
    fn submit(&mut self, ticket: u32, op: &Op) {
        self.device.submit(Ticket(ticket), op, Instant::MAX);
    }

    fn look(&mut self) -> Vec<(u32, Outcome)> {
        let mut done = Vec::new();
        self.device.reap(self.model.now(), &mut done);
        done.into_iter().map(|Done { ticket, outcome }| (ticket.0, outcome)).collect()
    }

    /// Lets time pass until so many operations have ended.
    fn ended(&mut self, count: usize) -> Vec<(u32, Outcome)> {
        let mut ended = Vec::new();
        for _ in 0..LOOKS_MAX {
            ended.extend(self.look());
            if ended.len() >= count {
                ended.sort_by_key(|(ticket, _)| *ticket);
                return ended;
            }
            self.model.pass(Duration::from_millis(1));
        }
        panic!("{ended:?} of {count} after {LOOKS_MAX} looks");
    }

    /// A fatal error while `op` is out.
    fn break_down(&mut self, op: &Op) {
        self.model.faults(|faults| faults.holds = true);
        self.submit(0, op);
        assert_eq!(self.look(), []);
        self.model.faults(|faults| faults.fatal = true);
    }

    fn run(&mut self, op: &Op) -> Outcome {
        self.submit(0, op);
        self.ended(1)[0].1
    }

    fn read(&self, offset: u64, len: usize) -> (Op, Buffers) {
        let into = Buffers::from(self.pool.take(len));
        into.fill_zero();
        (Op::Read { device: DeviceId(0), offset, into: into.clone() }, into)
    }

    fn write(&self, offset: u64, bytes: &[u8]) -> Op {
        let from = Buffers::from(self.pool.take(bytes.len()));
        from.copy_from_slice(bytes);
        Op::Write { device: DeviceId(0), offset, from }
    }
}

const FLUSH: Op = Op::Flush { device: DeviceId(0) };

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut prng = Prng::from_seed(seed);
    (0..len).map(|_| prng.next_u64().to_le_bytes()[0]).collect()
}

#[test]
fn a_drive_introduces_itself() {
    let Lent { handle, .. } = lent();
    let identity = handle.identity();
    assert_eq!((identity.controller.serial.as_str(), identity.namespace), ("MODEL1", 1));
    assert_eq!((identity.its.bytes(), identity.its.block_bytes()), (DRIVE_BYTES as u64, 512));
    assert_eq!((identity.transfer_bytes, identity.depth), (128 << 10, 63));
}

#[test]
fn what_was_written_is_read_in_any_shape() {
    let mut its = lent();
    let mut expected = vec![0; DRIVE_BYTES];
    let mut prng = Prng::from_seed(7);
    for round in 0..300 {
        // From one block to several commands, in pieces that meet anywhere.
        let blocks = 1 + prng.index(if round % 10 == 0 { 2040 } else { 40 });
        let len = blocks * BLOCK_BYTES;
        let at = prng.index(BLOCKS - blocks) * BLOCK_BYTES;
        let mut data = Buffers::default();
        while data.len() < len {
            let left = (len - data.len()) / BLOCK_BYTES;
            let piece = (1 + prng.index(left)).min(64) * BLOCK_BYTES;
            let lead = prng.index(9) * BLOCK_BYTES;
            data.push(its.pool.take(lead + piece).slice(lead..lead + piece));
        }
        if prng.index(2) == 0 {
            let bytes = noise(len, round);
            data.copy_from_slice(&bytes);
            expected[at..at + len].copy_from_slice(&bytes);
            let op = Op::Write { device: DeviceId(0), offset: at as u64, from: data };
            assert_eq!(its.run(&op), Ok(len as u64));
        } else {
            let into = data.clone();
            let op = Op::Read { device: DeviceId(0), offset: at as u64, into: data };
            assert_eq!(its.run(&op), Ok(len as u64));
            let mut found = vec![0; len];
            into.copy_to_slice(&mut found);
            assert!(found == expected[at..at + len], "round {round}: {blocks} blocks at {at}");
        }
    }
    assert!(its.model.bytes(0, DRIVE_BYTES) == expected);
    assert_eq!(its.model.strays(), 0);
}

#[test]
fn many_at_once_wait_for_their_turn() {
    let mut its = lent();
    let ops: Vec<Op> = (0..400)
        .map(|i| its.write(i * 4096, &vec![u8::try_from(i % 251).unwrap(); 4096]))
        .collect();
    for (ticket, op) in (0..).zip(&ops) {
        its.submit(ticket, op);
    }
    let ended = its.ended(400);
    assert!(ended.iter().all(|(_, outcome)| *outcome == Ok(4096)));
    assert!(ended.iter().map(|(ticket, _)| *ticket).eq(0..400));
    assert!(its.device.is_idle());
    assert_eq!(its.model.bytes(399 * 4096, 1), [u8::try_from(399 % 251).unwrap()]);
}

#[test]
fn flush_and_zeroes() {
    let mut its = lent();
    its.model.served();
    let write = its.write(0, &[7; 8192]);
    its.run(&write).unwrap();
    let zeroes = Op::WriteZeroes { device: DeviceId(0), offset: 4096, len: 1 << 20, unmap: true };
    assert_eq!(its.run(&zeroes), Ok(1 << 20));
    assert_eq!(its.run(&FLUSH), Ok(0));
    assert_eq!(its.model.bytes(4095, 2), [7, 0]);
    assert_eq!(its.model.served(), [&[1][..], &[8; 8], &[0]].concat());

    // Without Write Zeroes, not at all; without a cache, no flush.
    let mut its = lent_with(|model| {
        model.kind(|kind| (kind.write_zeroes, kind.volatile_cache) = (false, false));
    });
    its.run(&write).unwrap();
    its.model.served();
    let zeroes = Op::WriteZeroes { device: DeviceId(0), offset: 4096, len: 4096, unmap: false };
    assert_eq!(its.run(&zeroes), Err(Errno(libc::EOPNOTSUPP)));
    assert_eq!(its.run(&FLUSH), Ok(0));
    assert_eq!(its.model.bytes(4095, 2), [7, 7]);
    assert_eq!(its.model.served(), []);
}

#[test]
fn what_cannot_be_asked_is_not_sent() {
    let mut its = lent();
    its.model.served();
    let end = DRIVE_BYTES as u64;
    for (offset, errno) in
        [(256, libc::EINVAL), (end, libc::ENOSPC), (u64::MAX - 511, libc::ENOSPC)]
    {
        let (read, _) = its.read(offset, 512);
        assert_eq!(its.run(&read), Err(Errno(errno)));
    }
    let (read, _) = its.read(0, 512);
    its.device.submit(Ticket(9), &read, Instant::default());
    assert_eq!(its.look(), [(9, LATE)]);
    assert_eq!(its.model.served(), []);
    assert!(its.device.is_idle());
}

/// Its host stood still, and the drive may be another's by now.
#[test]
fn of_what_comes_too_late_no_more_is_sent() {
    let mut its = lent();
    its.model.faults(|faults| faults.holds = true);
    for ticket in 0..60 {
        its.submit(ticket, &FLUSH);
    }
    let write = its.write(0, &noise(1 << 20, 3));
    let until = its.model.now().after(Duration::from_secs(1));
    its.device.submit(Ticket(60), &write, until);
    assert_eq!(its.look(), []);
    assert_eq!(its.model.served().len(), 63, "as many as there is room for");
    its.model.pass(Duration::from_secs(2));
    its.model.serve_held();
    let ended = its.ended(61);
    assert_eq!(ended[60], (60, Err(Errno(libc::ETIMEDOUT))));
    assert!(ended[..60].iter().all(|(_, outcome)| outcome.is_ok()));
    assert_eq!(its.model.served(), []);
    assert!(its.device.is_idle());
    assert_eq!(its.run(&write), Ok(1 << 20));
}

#[test]
fn errors_are_of_their_operation_only() {
    let mut its = lent();
    its.model.faults(|faults| faults.unreadable = Some(300));
    let (bad, _) = its.read(0, 512 << 10);
    let (good, _) = its.read(1 << 20, 4096);
    its.submit(0, &bad);
    its.submit(1, &good);
    assert_eq!(its.ended(2), [(0, Err(Errno(libc::ENODATA))), (1, Ok(4096))]);
    its.model.faults(|faults| faults.status = Some(0x80));
    assert_eq!(its.run(&good), Err(Errno(libc::EIO)));
    its.model.faults(|faults| *faults = Faults::default());
    assert_eq!(its.run(&bad), Ok(512 << 10));
}

#[test]
fn a_command_that_is_not_answered_is_aborted() {
    let mut its = lent();
    its.model.faults(|faults| faults.holds = true);
    let (read, _) = its.read(0, 4096);
    its.submit(0, &read);
    assert_eq!(its.ended(1), [(0, Err(Errno(libc::ETIMEDOUT)))]);
    assert_eq!(its.model.resets(), 0);
    its.model.faults(|faults| faults.holds = false);
    assert_eq!(its.run(&read), Ok(4096));
}

#[test]
fn a_drive_that_ignores_aborts_is_reset_and_reaches_nothing_of_before() {
    let mut its = lent();
    its.model.faults(|faults| (faults.holds, faults.ignores_aborts) = (true, true));
    let (read, into) = its.read(0, 4096);
    let write = its.write(8192, &[9; 4096]);
    its.submit(0, &read);
    its.submit(1, &write);
    let asked = its.model.now();
    let ended = its.ended(2);
    assert!(ended.iter().all(|(_, outcome)| *outcome == Err(Errno(libc::ETIMEDOUT))), "{ended:?}");
    assert!(its.model.now().since(asked) < Duration::from_secs(8));
    // Asked while it comes up again: served then.
    its.model.faults(|faults| *faults = Faults::default());
    assert_eq!(its.run(&write), Ok(4096));
    assert_eq!(its.model.resets(), 1);
    assert_eq!(into.pieces()[0].bytes(), [0; 4096]);
}

/// The memory of an operation that has ended is not the drive's any more, even while the drive has
/// not stopped yet.
#[test]
fn a_late_transfer_hits_nothing() {
    let mut its = lent();
    its.run(&its.write(0, &[5; 4096])).unwrap();
    its.model.faults(|faults| (faults.holds, faults.ignores_aborts) = (true, true));
    let (read, into) = its.read(0, 4096);
    its.submit(0, &read);
    assert_eq!(its.look(), []);
    // It cannot be disabled; what it holds is carried out all the same.
    its.model.faults(|faults| faults.stays_ready = true);
    its.model.pass(Duration::from_secs(6));
    assert_eq!(its.look(), []);
    its.model.pass(Duration::from_secs(2));
    assert_eq!(its.look(), [(0, Err(Errno(libc::ETIMEDOUT)))]);
    its.model.serve_held();
    assert!(its.model.strays() > 0, "it did not even try");
    assert_eq!(into.pieces()[0].bytes(), [0; 4096]);
    // It cannot even be disabled: it is gone for good.
    assert_eq!(its.run(&read), Err(Errno(libc::ENODEV)));
}

#[test]
fn resets_that_help_for_nothing_end() {
    let mut its = lent();
    its.model.faults(|faults| (faults.holds, faults.ignores_aborts) = (true, true));
    let (read, _) = its.read(0, 4096);
    let outcomes: Vec<Outcome> = (0..5).map(|_| its.run(&read)).collect();
    let timed_out = Err(Errno(libc::ETIMEDOUT));
    let gone = Err(Errno(libc::ENODEV));
    assert_eq!(outcomes, [timed_out, timed_out, timed_out, gone, gone]);
}

#[test]
fn a_fatal_error_is_cured_by_a_reset() {
    let mut its = lent();
    let (read, _) = its.read(0, 4096);
    its.break_down(&read);
    assert_eq!(its.ended(1), [(0, Err(Errno(libc::ETIMEDOUT)))]);
    its.model.faults(|faults| *faults = Faults::default());
    assert_eq!(its.run(&read), Ok(4096));
}

/// Another thread does that.
fn wait_until_let_go(model: &Model) {
    while !model.is_let_go() {
        std::thread::yield_now();
    }
}

/// Drives that cannot be believed, or are not there: everything ends with ENODEV, at once or after
/// a reset, and the drive is let go.
#[test]
fn drives_that_are_given_up() {
    type Fault = fn(&mut Faults);
    let faults: [(&str, Fault); 9] = [
        ("an id out of range", |its| its.wrong_id = Some(0xffff)),
        ("an id that is not out", |its| its.wrong_id = Some(40)),
        ("a place behind the end", |its| its.wrong_head = Some(64)),
        ("another queue", |its| its.wrong_queue = Some(7)),
        ("two answers", |its| its.answers_twice = true),
        ("taken out", |its| its.removed = true),
        ("to be taken out", |its| (its.holds, its.wanted) = (true, true)),
        ("cannot be disabled", |its| (its.holds, its.fatal, its.stays_ready) = (true, true, true)),
        ("does not come up", |its| (its.holds, its.fatal, its.stays_unready) = (true, true, true)),
    ];
    for (name, fault) in faults {
        let mut its = lent();
        its.model.faults(fault);
        let ops: Vec<Op> = (0..20).map(|i| its.read(i * 4096, 4096).0).collect();
        for (ticket, op) in (0..).zip(&ops) {
            its.submit(ticket, op);
        }
        its.device.take_events();
        let ended = its.ended(20);
        let known = [Ok(4096), Err(Errno(libc::ETIMEDOUT)), Err(Errno(libc::ENODEV))];
        assert!(ended.iter().all(|(_, outcome)| known.contains(outcome)), "{name}: {ended:?}");
        let last = its.run(&ops[0]);
        assert_eq!(last, Err(Errno(libc::ENODEV)), "{name}");
        wait_until_let_go(&its.model);
        its.handle.give_back(its.device);
        assert!(its.handle.trouble().is_some(), "{name}");
        assert_eq!(its.handle.flush().unwrap_err().raw_os_error(), Some(libc::ENODEV));
    }
}

/// What was carried out, and never answered or with the phase of old answers, is over with a reset.
#[test]
fn answers_that_do_not_come() {
    let faults: [fn(&mut Faults, bool); 2] =
        [|faults, on| faults.wrong_phase = on, |faults, on| faults.mute = on];
    for fault in faults {
        let mut its = lent();
        its.model.faults(|faults| fault(faults, true));
        let write = its.write(0, &[3; 4096]);
        assert_eq!(its.run(&write), Err(Errno(libc::ETIMEDOUT)));
        its.model.faults(|faults| fault(faults, false));
        assert_eq!(its.run(&write), Ok(4096));
        assert_eq!(its.model.resets(), 1);
    }
}

#[test]
fn another_drive_after_a_reset_is_refused() {
    let mut its = lent();
    let (read, _) = its.read(0, 4096);
    its.break_down(&read);
    its.model.faults(|faults| faults.holds = false);
    its.model.kind(|kind| kind.serial = "MODEL2");
    assert_eq!(its.ended(1), [(0, Err(Errno(libc::ETIMEDOUT)))]);
    assert_eq!(its.run(&read), Err(Errno(libc::ENODEV)));
}

#[test]
fn without_mappings_everything_bounces() {
    let mut its = lent();
    its.model.faults(|faults| faults.unmappable = true);
    let bytes = noise(1 << 20, 3);
    // More than there are places: some wait.
    let writes: Vec<Op> = (0..6).map(|i| its.write(i << 20, &bytes)).collect();
    for (ticket, op) in (0..).zip(&writes) {
        its.submit(ticket, op);
    }
    assert!(its.ended(6).iter().all(|(_, outcome)| *outcome == Ok(1 << 20)));
    let (read, into) = its.read(5 << 20, 1 << 20);
    assert_eq!(its.run(&read), Ok(1 << 20));
    assert!(into.pieces()[0].bytes() == bytes);
}

/// Where memory cannot be taken away from it, the drive itself is let go before anyone is answered.
#[test]
fn a_drive_that_clings_to_memory_is_let_go_first() {
    let mut its = lent();
    its.model.faults(|faults| {
        (faults.holds, faults.ignores_aborts, faults.clings) = (true, true, true);
    });
    let (read, _) = its.read(0, 4096);
    assert_eq!(its.run(&read), Err(Errno(libc::ENODEV)));
    assert!(its.model.is_let_go());
}

#[test]
fn drives_that_cannot_be_used_are_refused_by_name() {
    let open = |prepare: fn(&Model)| {
        let model = Model::default();
        prepare(&model);
        Handle::open(model.bus()).unwrap_err()
    };
    assert_eq!(open(|model| model.faults(|its| its.removed = true)), Trouble::Removed);
    let silent = |what| Trouble::Silent(what);
    assert_eq!(open(|model| model.faults(|its| its.stays_ready = true)), silent("to be disabled"));
    assert_eq!(open(|model| model.faults(|its| its.stays_unready = true)), silent("to be enabled"));
    let muted = open(|model| model.faults(|its| its.mute_admin = true));
    assert_eq!(muted, silent("Identify Controller"));
    let metadata = open(|model| model.kind(|kind| kind.metadata_bytes = 8));
    assert!(matches!(metadata, Trouble::Unsuitable(_)), "{metadata:?}");
    let unmapped = open(|model| model.faults(|its| its.unmappable = true));
    assert!(matches!(unmapped, Trouble::Mapping(_)), "{unmapped:?}");
}

#[test]
fn who_opened_it_reads_and_writes_until_it_is_lent() {
    let model = Model::default();
    let handle = Handle::open(model.bus()).unwrap();
    let bytes = noise(3 << 20, 1);
    handle.write_at(&bytes, 4096).unwrap();
    let mut found = vec![0; 3 << 20];
    handle.read_at(&mut found, 4096).unwrap();
    assert!(found == bytes);
    let device = handle.lend().unwrap();
    assert!(handle.lend().is_none());
    let busy = handle.read_at(&mut found, 0).unwrap_err();
    assert_eq!(busy.raw_os_error(), Some(libc::EBUSY));
    handle.give_back(device);
    handle.flush().unwrap();
    // The drive has nothing but its queues of us.
    assert_eq!(model.mappings(), 1);
    assert!(!handle.let_go_if_wanted());
    model.faults(|faults| faults.wanted = true);
    assert!(handle.let_go_if_wanted());
    wait_until_let_go(&model);
    assert!(!handle.let_go_if_wanted());
    assert_eq!(handle.trouble(), Some(Trouble::Removed));
    let gone = handle.read_at(&mut found, 0).unwrap_err();
    assert_eq!(gone.raw_os_error(), Some(libc::ENODEV));
}

#[test]
fn a_reactor_uses_it_like_any_drive() {
    let model = Model::default();
    let drive = Arc::new(Handle::open(model.bus()).unwrap());
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let (its, r) = (drive.clone(), reactor.clone());
    let result = reactor.block_on(async move {
        let device = r.register(Device::Nvme { drive: its });
        let from = Buffers::from(r.buffer(8192));
        from.copy_from_slice(&noise(8192, 5));
        let into = Buffers::from(r.buffer(8192));
        let written = r.submit(Op::Write { device, offset: 0, from }).await;
        let read = r.submit(Op::Read { device, offset: 0, into: into.clone() }).await;
        let same = into.pieces()[0].bytes() == noise(8192, 5);
        let flushed = r.submit(Op::Flush { device }).await;
        r.unregister(device);
        (written, read, flushed, same)
    });
    assert_eq!(result, Some((Ok(8192), Ok(8192), Ok(0), true)));
    // It came back.
    drive.flush().unwrap();
    assert_eq!(Arc::strong_count(&drive), 1);
}

#[test]
fn a_backend_sleeps_no_longer_than_until_the_next_look() {
    let model = Model::default();
    let drive = Arc::new(Handle::open(model.bus()).unwrap());
    let mut backend = UringBackend::new().unwrap();
    let device = backend.register(Device::Nvme { drive });
    assert!(!backend.idle(None), "nothing is under way");
    model.faults(|faults| faults.removed = true);
    backend.submit(Ticket(1), &Op::Flush { device }, Instant::MAX);
    let mut done = Vec::new();
    while done.is_empty() {
        assert!(backend.idle(None));
        backend.reap(&mut done);
    }
    assert_eq!(done[0].outcome, Err(Errno(libc::ENODEV)));
}

#[test]
fn memory_that_is_gone_is_let_go_before_a_sleep() {
    let mut its = lent();
    let own = its.model.mappings();
    let write = its.write(0, &noise(1 << 20, 3));
    assert!(its.run(&write).is_ok());
    let used = its.model.mappings();
    assert!(used > own);
    // It may be asked for again.
    its.device.forget_the_dead();
    assert_eq!(its.model.mappings(), used);
    drop(write);
    its.pool = BufferPool::new();
    assert_eq!(its.model.mappings(), used, "nobody has looked");
    its.device.forget_the_dead();
    assert_eq!(its.model.mappings(), own);
}

#[test]
fn a_look_does_not_make_it_seem_gone() {
    let model = Model::default();
    let handle = Handle::open(model.bus()).unwrap();
    let (asks, asked) = std::sync::mpsc::channel();
    std::thread::scope(|scope| {
        let look = handle.home();
        let reactor = scope.spawn(|| {
            asks.send(()).unwrap();
            let device = handle.lend();
            let is_there = device.is_some();
            device.into_iter().for_each(|device| handle.give_back(device));
            is_there
        });
        asked.recv().unwrap();
        // It asks, and has to wait for the look.
        (0..1000).for_each(|_| std::thread::yield_now());
        drop(look);
        assert!(reactor.join().unwrap());
    });
    assert_eq!(handle.trouble(), None);
}
