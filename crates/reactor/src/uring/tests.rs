//! Goal: files are served by whatever the kernel has, with one system call for what is asked for
//! at one time; and nothing of a file is kept that was let go.
//! Method: the backend by itself, with files. Devices that can be polled are rare: an ordinary
//! ring in the place of the polled one takes the same way.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, Mutex};

use vmm_sys_util::eventfd::EventFd;

use super::*;
use crate::buffer::{BufferPool, Buffers};
use crate::executor::{Order, Reactor};
use crate::nvme::generic::Terms;
use crate::uring::passthrough::Passing;
use crate::uring::polled::Polled;

const FILE_BYTES: u64 = 1 << 20;
const BLOCK: u64 = 4096;
/// Longer than a file can need: its flush may wait for all that a build has just written.
const PATIENCE: Duration = Duration::from_secs(60);
/// A program that is just being started has all open files, for a moment.
static STARTS: Mutex<()> = Mutex::new(());

fn scratch() -> Arc<File> {
    static COUNT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = COUNT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("ashlar-uring-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let mut options = File::options();
    let file = options.read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(FILE_BYTES).unwrap();
    Arc::new(file)
}

struct Rig {
    backend: UringBackend,
    pool: Rc<BufferPool>,
    tickets: u32,
    done: Vec<Done>,
}

impl Rig {
    fn new(settings: Settings) -> Rig {
        let arena = Arena::new();
        let backend = UringBackend::with(settings, Some(arena.clone())).unwrap();
        Rig { backend, pool: BufferPool::on(arena), tickets: 0, done: Vec::new() }
    }

    /// With an ordinary ring for devices that can be polled: all can.
    fn polled() -> Rig {
        let mut rig = Rig::new(Settings::default());
        let (io, _) = build(Kind::Interrupts).unwrap();
        let polled = Polled::new(io, rig.backend.arena.clone());
        rig.backend.polling = Polling::On(Box::new(polled));
        rig
    }

    /// A file that is tried as if it were a block device.
    fn try_polling(&mut self, file: Arc<File>) -> DeviceId {
        let device = self.backend.register(Device::File { file });
        self.backend.try_polling(device.0 as usize);
        device
    }

    fn submit(&mut self, op: &Op) -> Ticket {
        self.tickets += 1;
        let ticket = Ticket(self.tickets);
        self.backend.submit(ticket, op, Instant::MAX);
        ticket
    }

    /// Looks until this is true.
    fn look_until(&mut self, is_so: impl Fn(&Rig) -> bool) {
        let until = self.backend.now().after(PATIENCE);
        loop {
            self.backend.reap(&mut self.done);
            if is_so(self) {
                return;
            }
            assert!(self.backend.now() < until, "it never came to that");
            std::hint::spin_loop();
        }
    }

    fn outcome(&mut self, op: &Op) -> Outcome {
        let ticket = self.submit(op);
        self.look_until(|rig| rig.done.iter().any(|done| done.ticket == ticket));
        let at = self.done.iter().position(|done| done.ticket == ticket).unwrap();
        self.done.swap_remove(at).outcome
    }

    fn block(&self, value: u8) -> Buffers {
        let buffer = self.pool.take(4096);
        buffer.copy_from_slice(&[value; 4096]);
        buffer.into()
    }

    fn polling(&self, fd: i32) -> Use {
        let report = self.backend.gauges.report(self.backend.now());
        report.devices.iter().find(|device| device.fd == fd).unwrap().polling
    }

    /// Every operation, and what it leaves.
    fn check(&mut self, device: DeviceId) {
        let into = Buffers::from(self.pool.take(4096));
        let mut long = into.clone();
        long.push(self.pool.take(8192));
        for value in 1..=3u8 {
            let offset = u64::from(value) * BLOCK;
            let from = self.block(value);
            assert_eq!(self.outcome(&Op::Write { device, offset, from }), Ok(BLOCK));
        }
        assert_eq!(self.outcome(&Op::Flush { device }), Ok(0));
        let zeroes = Op::WriteZeroes { device, offset: 2 * BLOCK, len: BLOCK, unmap: true };
        assert!(self.outcome(&zeroes).is_ok());
        let read = Op::Read { device, offset: BLOCK, into: long.clone() };
        assert_eq!(self.outcome(&read), Ok(3 * BLOCK));
        let mut all = vec![0; 12288];
        long.copy_to_slice(&mut all);
        assert_eq!((all[0], all[4095], all[4096], all[8191], all[8192]), (1, 1, 0, 0, 3));
        let read = Op::Read { device, offset: 3 * BLOCK, into: into.clone() };
        assert_eq!(self.outcome(&read), Ok(BLOCK));
        assert_eq!(into.pieces()[0].bytes()[7], 3);
    }
}

#[test]
fn what_is_asked_for_at_one_time_is_one_system_call() {
    for iopoll in [false, true] {
        let mut rig = Rig::new(Settings { iopoll, ..Settings::default() });
        let file = scratch();
        let device = rig.backend.register(Device::File { file: file.clone() });
        let fd = file.as_raw_fd();
        rig.look_until(|rig| rig.polling(fd) != Use::No(Why::Trying));
        if rig.polling(fd) == Use::Yes {
            // Looking costs calls, there.
            continue;
        }
        let before = rig.backend.gauges.counters();
        for block in 0..200 {
            let from = rig.block(1);
            rig.submit(&Op::Write { device, offset: block * BLOCK, from });
        }
        rig.backend.reap(&mut rig.done);
        let after = rig.backend.gauges.counters();
        let (enters, given) =
            (after.enters - before.enters, after.submissions - before.submissions);
        assert_eq!((enters, given), (1, 200));
        rig.look_until(|rig| rig.done.len() == 200);
        let all = rig.backend.gauges.counters();
        assert_eq!(all.completions - before.completions, 200);
        // A slow disk completes one by one, and each lets itself be heard by a call; one more where
        // the kernel could not write at once, and hands it to its threads.
        let calls = all.enters - before.enters;
        assert!(calls <= 1 + 2 * 200, "{calls} calls");
        assert!(all.turns > before.turns);
        // With nothing under way, a look costs no call.
        (0..100).for_each(|_| rig.backend.reap(&mut rig.done));
        assert_eq!(rig.backend.gauges.counters().enters, all.enters);
        let report = rig.backend.gauges.report(rig.backend.now());
        assert_eq!((report.devices[0].in_flight, report.devices[0].in_flight_max), (0, 200));
    }
}

#[test]
fn files_are_served_with_what_there_is() {
    for settings in [
        Settings::default(),
        Settings { sqpoll: true, iopoll: false, passthrough: false },
        Settings { sqpoll: true, iopoll: true, passthrough: true },
    ] {
        let mut rig = Rig::new(settings);
        let file = scratch();
        let fd = file.as_raw_fd();
        let device = rig.backend.register(Device::File { file });
        rig.check(device);
        let why = if settings.iopoll { Why::NotBlockDevice } else { Why::Off };
        assert_eq!(rig.polling(fd), Use::No(why));
        // Also while it is tried by a real polled ring, and after.
        rig.backend.try_polling(device.0 as usize);
        rig.check(device);
        rig.look_until(|rig| rig.polling(fd) != Use::No(Why::Trying));
        rig.check(device);
        let report = rig.backend.gauges.report(rig.backend.now());
        assert_eq!((report.devices[0].file, report.devices[0].buffers), (Use::Yes, Use::Yes));
        if !settings.iopoll {
            assert_eq!(report.devices[0].polling, Use::No(Why::Off));
        }
        assert!(report.buffers.total() > 0);
        rig.backend.unregister(device);
        assert!(rig.backend.gauges.report(rig.backend.now()).devices.is_empty());
    }
}

#[test]
fn a_device_that_answered_its_trial_is_polled() {
    let mut rig = Rig::polled();
    let file = scratch();
    let fd = file.as_raw_fd();
    let device = rig.try_polling(file);
    assert_eq!(rig.polling(fd), Use::No(Why::Trying));
    rig.look_until(|rig| rig.polling(fd) == Use::Yes);
    rig.check(device);
    // Reads and writes go there, everything else does not.
    let into = rig.block(0);
    for (op, is_polled) in
        [(Op::Read { device, offset: 0, into }, true), (Op::Flush { device }, false)]
    {
        let ticket = rig.submit(&op);
        rig.backend.fill();
        let polled = rig.backend.polling.on().unwrap().ring.in_kernel();
        assert_eq!((polled > 0, rig.backend.ring.in_kernel() > 0), (is_polled, !is_polled));
        assert!(rig.backend.idle(None), "something is under way");
        rig.look_until(|rig| rig.done.iter().any(|done| done.ticket == ticket));
    }
}

#[test]
fn a_device_that_refuses_to_be_polled_is_polled_no_more() {
    let mut rig = Rig::polled();
    let file = scratch();
    let fd = file.as_raw_fd();
    let device = rig.try_polling(file);
    rig.look_until(|rig| rig.polling(fd) == Use::Yes);
    let into = rig.block(0);
    let read = Op::Read { device, offset: 0, into };
    let ticket = rig.submit(&read);
    // The kernel answers as it does where a queue has lost what polling needs.
    let ring = &mut rig.backend.polling.on().unwrap().ring;
    let bits = ring.forget_backlog().next().unwrap();
    let refused = Err(Errno(libc::EOPNOTSUPP));
    rig.backend.hear_polled(Tag::from_bits(bits), refused);
    rig.look_until(|rig| rig.done.iter().any(|done| done.ticket == ticket));
    assert_eq!(rig.done.pop().unwrap().outcome, Err(Errno(libc::EAGAIN)));
    assert_eq!(rig.polling(fd), Use::No(Why::Refused(Errno(libc::EOPNOTSUPP))));
    assert_eq!(rig.outcome(&read), Ok(BLOCK));
    rig.check(device);
}

#[test]
fn a_drive_that_never_answers_its_trial_holds_up_nobody() {
    let mut rig = Rig::polled();
    let (reader, writer) = std::io::pipe().unwrap();
    let file = File::from(OwnedFd::from(reader));
    let fd = file.as_raw_fd();
    let silent = rig.try_polling(Arc::new(file));
    let device = rig.backend.register(Device::File { file: scratch() });
    rig.check(device);
    assert_eq!(rig.polling(fd), Use::No(Why::Trying));
    let (before, began) = (rig.backend.gauges.counters(), rig.backend.now());
    let until = began.after(Duration::from_millis(20));
    let mut naps = 0;
    while rig.backend.now() < until {
        assert!(rig.backend.idle(Some(until)));
        rig.backend.reap(&mut rig.done);
        naps += 1;
    }
    let after = rig.backend.gauges.counters();
    let calls = after.enters - before.enters;
    assert!(after.slept_ns > before.slept_ns);
    // Of 250 us at least, but for the last.
    assert!(naps <= 20_000 / 250 + 2, "it is looked for all the time: {naps}");
    assert!(calls <= 2 * naps + 2, "{calls} in {naps} naps");
    let much_later = until.after(Duration::from_secs(60));
    assert_eq!(rig.backend.polling.on().unwrap().look_in(much_later), Some(Duration::ZERO));
    rig.backend.unregister(silent);
    assert_eq!(rig.polling(fd), Use::No(Why::Trying));
    // The pipe ends, and with it the trial.
    drop(writer);
    let devices = |rig: &Rig| rig.backend.gauges.report(rig.backend.now()).devices.len();
    rig.look_until(|rig| devices(rig) == 1);
}

#[test]
fn a_file_that_is_let_go_is_let_go_in_all_rings() {
    for early in [true, false] {
        let mut rig = Rig::polled();
        let file = scratch();
        let fd = file.as_raw_fd();
        let device = rig.try_polling(file.clone());
        if !early {
            rig.look_until(|rig| rig.polling(fd) == Use::Yes);
        }
        rig.backend.unregister(device);
        if early {
            // Its place is not free while the kernel tries it.
            assert_eq!(Arc::strong_count(&file), 2);
            let other = rig.backend.register(Device::File { file: scratch() });
            assert_ne!(other, device);
        }
        rig.look_until(|_| Arc::strong_count(&file) == 1);
        // A lock goes away with the last that holds the open file: the kernel's tables do not.
        file.lock().unwrap();
        let again = File::open(format!("/proc/self/fd/{fd}")).unwrap();
        assert!(again.try_lock().is_err());
        let nobody_starts = STARTS.lock().unwrap();
        drop(file);
        assert!(again.try_lock().is_ok());
        drop(nobody_starts);
        let next = rig.backend.register(Device::File { file: scratch() });
        assert_eq!(next, device);
        rig.check(next);
    }
}

#[test]
fn memory_of_drives_is_reported() {
    let mut rig = Rig::new(Settings::default());
    let bytes = 4 << 20;
    let ram = rig.backend.register(Device::Ram { bytes });
    let total = |rig: &Rig| rig.backend.gauges.report(rig.backend.now()).drives.total();
    assert_eq!(total(&rig), bytes);
    rig.check(ram);
    let from = rig.pool.take(1 << 20);
    from.copy_from_slice(&vec![9; 1 << 20]);
    let write = Op::Write { device: ram, offset: 1 << 20, from: from.clone().into() };
    assert_eq!(rig.outcome(&write), Ok(1 << 20));
    let into = rig.pool.take(1 << 20);
    let read = Op::Read { device: ram, offset: 1 << 20, into: into.clone().into() };
    assert_eq!(rig.outcome(&read), Ok(1 << 20));
    assert!(into.bytes() == from.bytes());
    rig.backend.unregister(ram);
    assert_eq!(total(&rig), 0);
}

/// Reads of memory are over when they are asked for; so whoever makes them without end has to be
/// made to wait.
#[test]
fn a_task_over_memory_lets_others_run() {
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let device = reactor.register(Device::Ram { bytes: FILE_BYTES });
    let reads = Rc::new(Cell::new(0u64));
    let (asker, asked) = (reactor.clone(), reads.clone());
    reactor.spawn(async move {
        let into = Buffers::from(asker.buffer(4096));
        loop {
            if asker.read_now(device, 0, &into).is_none() {
                let read = asker.submit(Op::Read { device, offset: 0, into: into.clone() });
                assert_eq!(read.await, Ok(BLOCK));
            }
            asked.set(asked.get() + 1);
        }
    });
    let other = reactor.clone();
    let turns = reactor.block_on(async move {
        for _ in 0..10 {
            other.yield_now().await;
        }
    });
    assert_eq!(turns, Some(()));
    assert!((10..10_000).contains(&reads.get()), "{} reads in ten turns", reads.get());
    // A place that it has not is answered as by any other drive.
    let into = Buffers::from(reactor.buffer(4096));
    let asker = reactor.clone();
    let outside = reactor.block_on(async move { asker.read_now(device, FILE_BYTES, &into) });
    assert_eq!(outside, Some(Some(Err(Errno(libc::ENOSPC)))));
    reactor.abandon();
}

/// As if this file were a namespace's generic character device.
fn pretend(file: File) -> Result<Arc<Generic>, Errno> {
    let terms = Terms { namespace: 1, bytes: FILE_BYTES, block_log2: 9, transfer_bytes: 128 << 10 };
    Ok(Arc::new(Generic::pretend(file, terms)))
}

fn null() -> File {
    File::options().read(true).write(true).open("/dev/null").unwrap()
}

fn passthrough_of(rig: &Rig, fd: i32) -> Use {
    let report = rig.backend.gauges.report(rig.backend.now());
    report.devices.iter().find(|device| device.fd == fd).unwrap().passthrough
}

/// A rig, and a device in it that is given commands, whether it can take them or not.
fn passing(generic: File) -> (Rig, DeviceId, i32) {
    let mut rig = Rig::new(Settings { passthrough: true, ..Settings::default() });
    let (file, generic) = (scratch(), pretend(generic));
    let fd = file.as_raw_fd();
    let device = rig.backend.register(Device::Namespace { file, generic });
    rig.look_until(|rig| passthrough_of(rig, fd) != Use::No(Why::Trying));
    let its = rig.backend.file(device.0 as usize).unwrap();
    its.gauge.passthrough.set(Use::Yes);
    (rig, device, fd)
}

#[test]
fn what_takes_no_commands_is_served_as_before() {
    let refused = |errno| Use::No(Why::Refused(Errno(errno)));
    for passthrough in [false, true] {
        let mut rig = Rig::new(Settings { passthrough, ..Settings::default() });
        // It answers every command and moves nothing; or, in older kernels, knows none.
        let (file, generic) = (scratch(), pretend(null()));
        let fd = file.as_raw_fd();
        let device = rig.backend.register(Device::Namespace { file, generic });
        rig.look_until(|rig| passthrough_of(rig, fd) != Use::No(Why::Trying));
        let its = passthrough_of(&rig, fd);
        let kernels = [libc::ENODATA, libc::EOPNOTSUPP, libc::EINVAL].map(refused);
        assert!(if passthrough { kernels.contains(&its) } else { its == Use::No(Why::Off) });
        rig.check(device);
        rig.backend.unregister(device);
        assert!(rig.backend.gauges.report(rig.backend.now()).devices.is_empty());
    }
    let mut rig = Rig::new(Settings { passthrough: true, ..Settings::default() });
    let plain = scratch();
    let fd = plain.as_raw_fd();
    let device = rig.backend.register(Device::File { file: plain });
    assert_eq!(passthrough_of(&rig, fd), Use::No(Why::NotNamespace));
    rig.check(device);
    let (file, generic) = (scratch(), Err(Errno(libc::EACCES)));
    let fd = file.as_raw_fd();
    rig.backend.register(Device::Namespace { file, generic });
    assert_eq!(passthrough_of(&rig, fd), refused(libc::EACCES));
    // A kernel without such rings.
    rig.backend.passing = Passing::Failed(Errno(libc::EINVAL));
    let file = scratch();
    let fd = file.as_raw_fd();
    let device = rig.backend.register(Device::Namespace { file, generic: pretend(null()) });
    assert_eq!(passthrough_of(&rig, fd), refused(libc::EINVAL));
    rig.check(device);
}

#[test]
fn commands_take_their_own_ring_and_wake_who_sleeps() {
    let (mut rig, device, fd) = passing(null());
    let read = Op::Read { device, offset: 0, into: rig.block(7) };
    // Linux 6.0: /dev/null answers commands.
    if rig.outcome(&read) != Ok(BLOCK) {
        return;
    }
    let Op::Read { into, .. } = &read else { unreachable!() };
    assert_eq!(into.pieces()[0].bytes()[0], 7, "of the file, it would have read zeroes");
    for _ in 0..100 {
        let ticket = rig.submit(&read);
        while !rig.done.iter().any(|done| done.ticket == ticket) {
            // Ends with the completion, not with the patience for one.
            assert!(rig.backend.idle(None));
            rig.backend.reap(&mut rig.done);
        }
    }
    let slept = Duration::from_nanos(rig.backend.gauges.counters().slept_ns);
    assert!(slept < LOOK_EVERY * 50, "{slept:?}");
    // What does not fit goes to the file.
    let into = Buffers::from(rig.pool.take(256 << 10));
    let long = Op::Read { device, offset: 0, into: into.clone() };
    assert_eq!(rig.outcome(&long), Ok(256 << 10));
    assert!(into.pieces()[0].bytes().iter().all(|byte| *byte == 0));
    assert_eq!(passthrough_of(&rig, fd), Use::Yes);
}

#[test]
fn what_is_refused_later_is_asked_for_in_the_ordinary_way() {
    let (mut rig, device, fd) = passing(Arc::into_inner(scratch()).unwrap());
    let again = Err(Errno(libc::EAGAIN));
    assert_eq!(rig.outcome(&Op::Read { device, offset: 0, into: rig.block(1) }), again);
    assert!(matches!(passthrough_of(&rig, fd), Use::No(Why::Refused(_))));
    rig.check(device);
}

#[test]
fn nobody_sleeps_while_something_waits_for_room() {
    let mut rig = Rig::new(Settings::default());
    let (quiet, rung) = (bell(0), bell(1));
    // More than a ring takes at one time; the one that ends at once comes last.
    for _ in 0..3000 {
        rig.submit(&Op::readable(quiet.as_raw_fd()));
    }
    let last = rig.submit(&Op::readable(rung.as_raw_fd()));
    let until = rig.backend.now().after(Duration::from_secs(5));
    rig.backend.reap(&mut rig.done);
    while rig.done.is_empty() {
        rig.backend.idle(Some(until));
        rig.backend.reap(&mut rig.done);
    }
    assert!(rig.backend.now() < until, "it slept, and what it waited for was not submitted");
    assert_eq!(rig.done.iter().map(|done| done.ticket).collect::<Vec<_>>(), [last]);
}

fn bell(count: u64) -> EventFd {
    let bell = EventFd::new(0).unwrap();
    bell.write(count).unwrap();
    bell
}

/// A block device on a file; `None`: nobody here may make one.
struct Loop {
    device: String,
    backing: std::path::PathBuf,
}

impl Loop {
    fn new() -> Option<Loop> {
        let name = format!("ashlar-uring-loop-{}", std::process::id());
        let backing = std::env::temp_dir().join(name);
        File::create(&backing).unwrap().set_len(FILE_BYTES).unwrap();
        let made = losetup(&["--find", "--show", backing.to_str().unwrap()]);
        made.map(|device| Loop { device: device.trim().to_owned(), backing })
    }

    fn resize(&self, bytes: u64) {
        File::options().write(true).open(&self.backing).unwrap().set_len(bytes).unwrap();
        losetup(&["--set-capacity", &self.device]).unwrap();
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = (losetup(&["--detach", &self.device]), std::fs::remove_file(&self.backing));
    }
}

fn losetup(arguments: &[&str]) -> Option<String> {
    let _starts = STARTS.lock().unwrap();
    let output = std::process::Command::new("losetup").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap())
}

#[test]
fn a_block_device_that_was_taken_out_is_gone_and_not_full() {
    let Some(drive) = Loop::new() else {
        println!("not tried: `losetup` makes no block device here");
        return;
    };
    let mut rig = Rig::new(Settings::default());
    let file = File::options().read(true).write(true).open(&drive.device).unwrap();
    let device = rig.backend.register(Device::File { file: Arc::new(file) });
    let op = Op::Write { device, offset: BLOCK, from: rig.block(1) };
    assert_eq!(rig.outcome(&op), Ok(BLOCK));
    // Beyond the end of what is there the kernel has no space.
    drive.resize(BLOCK);
    assert_eq!(rig.outcome(&op), Err(Errno(libc::ENOSPC)));
    drive.resize(0);
    assert_eq!(rig.outcome(&op), Err(Errno(libc::ENODEV)));
}
