//! Goal: tasks, timers, locks and real files work on one reactor, in the order promised.
//! Method: small programs on the io_uring backend, with devices of every kind.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::mailbox::mailbox;
use ashlar_reactor::op::{Device, Errno, LATE, Op};
use ashlar_reactor::poller::{Poller, PollerId};
use ashlar_reactor::range_lock::{Mode, RangeLock};
use ashlar_reactor::uring::UringBackend;
use ashlar_reactor::virtual_time::VirtualBackend;

fn reactor() -> Reactor {
    Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo)
}

fn write_read_back(device: Device) {
    let reactor = reactor();
    let r = reactor.clone();
    reactor
        .block_on(async move {
            let device = r.register(device);
            let from = r.buffer(8192);
            from.copy_from_slice(&[7; 8192]);
            let first = r.submit(Op::Write { device, offset: 4096, from: from.clone().into() });
            let second = r.submit(Op::Write { device, offset: 16384, from: from.into() });
            assert_eq!((first.await, second.await), (Ok(8192), Ok(8192)));
            assert_eq!(r.submit(Op::Flush { device }).await, Ok(0));
            let zeroes = Op::WriteZeroes { device, offset: 16384, len: 4096, unmap: true };
            assert!(r.submit(zeroes).await.is_ok());
            let into = r.buffer(24576);
            let read = Op::Read { device, offset: 0, into: into.clone().into() };
            assert_eq!(r.submit(read).await, Ok(24576));
            let sums: Vec<u32> =
                into.bytes().chunks(4096).map(|c| c.iter().map(|b| u32::from(*b)).sum()).collect();
            assert_eq!(sums, [0, 28672, 28672, 0, 0, 28672]);
            let beyond = Op::Read { device, offset: 1 << 30, into: into.into() };
            assert!(matches!(r.submit(beyond).await, Ok(0) | Err(Errno(_))));
        })
        .unwrap();
}

/// A poller whose end reaches for another.
struct Chained {
    reactor: Reactor,
    next: Option<PollerId>,
    takes_along: bool,
}

impl Poller for Chained {
    fn poll(&self) -> bool {
        false
    }

    fn arm(&self) -> bool {
        false
    }

    fn disarm(&self) {}
}

impl Drop for Chained {
    fn drop(&mut self) {
        let Some(next) = self.next else { return };
        self.reactor.rouse(next);
        if self.takes_along {
            self.reactor.remove_poller(next);
        }
    }
}

#[test]
fn the_end_of_a_poller_may_reach_for_another() {
    let reactor = reactor();
    let add = |next, takes_along| {
        let reactor = reactor.clone();
        reactor.clone().add_poller(Rc::new(Chained { reactor, next, takes_along }))
    };
    let last = add(None, false);
    reactor.remove_poller(add(Some(last), true));
    // It is gone, and never was one of another reactor's.
    reactor.rouse(last);
    self::reactor().rouse(last);
    // And when all end at once.
    let next = add(None, false);
    add(Some(next), false);
    reactor.abandon();
}

fn scratch(name: &str) -> Arc<File> {
    let name = format!("ashlar-reactor-{name}-{}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let mut options = File::options();
    let file = options.read(true).write(true).create(true).truncate(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(1 << 20).unwrap();
    Arc::new(file)
}

#[test]
fn what_comes_too_late_never_reaches_the_device() {
    let reactor = reactor();
    let r = reactor.clone();
    reactor
        .block_on(async move {
            let device = r.register(Device::File { file: scratch("late") });
            let from = r.buffer(4096);
            from.copy_from_slice(&[7; 4096]);
            let write = |offset| Op::Write { device, offset, from: from.clone().into() };
            let in_time = r.now().after(Duration::from_secs(60));
            assert_eq!(r.submit_until(write(4096), in_time).await, Ok(4096));
            let until = r.now().after(Duration::from_millis(5));
            // This process is stopped after it was started, and before the kernel hears of it.
            let first = r.submit_until(write(0), until);
            while r.now() <= until {
                std::hint::spin_loop();
            }
            let zeroes = Op::WriteZeroes { device, offset: 4096, len: 4096, unmap: true };
            assert_eq!((first.await, r.submit_until(zeroes, until).await), (LATE, LATE));
            let into = r.buffer(8192);
            let read = Op::Read { device, offset: 0, into: into.clone().into() };
            assert_eq!(r.submit(read).await, Ok(8192));
            assert_eq!((into.bytes()[0], into.bytes()[4096]), (0, 7));
            let (file, sector_bytes, seed) = (scratch("late"), 512, 1);
            let device = r.register(Device::Lossy { file, sector_bytes, seed });
            let zeroes = Op::WriteZeroes { device, offset: 4096, len: 4096, unmap: true };
            assert_eq!(r.submit_until(zeroes, until).await, LATE);
        })
        .unwrap();
}

#[test]
fn ram_keeps_what_was_written() {
    write_read_back(Device::Ram { bytes: 1 << 20 });
}

#[test]
fn a_model_keeps_what_was_written() {
    let latency = Duration::from_micros(50);
    write_read_back(Device::Model {
        bytes: 1 << 20,
        iops: 1_000_000,
        bytes_per_second: 1 << 30,
        latency,
    });
}

#[test]
fn files_keep_what_was_written() {
    write_read_back(Device::File { file: scratch("file") });
    for sector_bytes in [512, 4096] {
        write_read_back(Device::Lossy { file: scratch("lossy"), sector_bytes, seed: 1 });
    }
}

#[test]
fn timers_fire_in_order_of_deadline() {
    let reactor = reactor();
    let order = Rc::new(RefCell::new(Vec::new()));
    let began = reactor.now();
    let at = move |tenths: u64| began.after(Duration::from_millis(100 * tenths));
    for tenths in [3, 1, 2] {
        let (r, order) = (reactor.clone(), order.clone());
        reactor.spawn(async move {
            r.sleep_until(at(tenths)).await;
            order.borrow_mut().push(tenths);
        });
    }
    let r = reactor.clone();
    reactor.block_on(async move { r.sleep_until(at(5)).await }).unwrap();
    assert_eq!(*order.borrow(), [1, 2, 3]);
}

#[test]
fn locks_are_granted_in_order_and_shared_ones_together() {
    let reactor = reactor();
    let lock = RangeLock::new(&reactor, 16);
    let log = Rc::new(RefCell::new(Vec::new()));
    let inside = Rc::new(Cell::new(0));
    for (name, range, mode) in [
        ("a", 0..10, Mode::Exclusive),
        ("b", 5..15, Mode::Shared),
        ("c", 7..8, Mode::Shared),
        ("d", 0..20, Mode::Exclusive),
        ("e", 30..40, Mode::Exclusive),
    ] {
        let (r, lock, log, inside) = (reactor.clone(), lock.clone(), log.clone(), inside.clone());
        reactor.spawn(async move {
            let _guard = lock.lock(range, mode).await;
            inside.set(inside.get() + 1);
            r.yield_now().await;
            r.yield_now().await;
            log.borrow_mut().push(format!("{name}{}", inside.get()));
            inside.set(inside.get() - 1);
        });
    }
    let (r, done) = (reactor.clone(), lock.clone());
    reactor
        .block_on(async move {
            while !done.is_idle() {
                r.yield_now().await;
            }
        })
        .unwrap();
    assert_eq!(*log.borrow(), ["a2", "e1", "b2", "c1", "d1"]);
}

#[test]
fn letters_reach_a_sleeping_reactor() {
    let reactor = reactor();
    let (sender, receiver) = mailbox().unwrap();
    reactor.spawn(receiver.serve(reactor.clone()));
    let thread = std::thread::spawn(move || sender.send(Reactor::stop).unwrap());
    reactor.run();
    thread.join().unwrap();
}

#[test]
fn a_sleep_that_is_handed_over_wakes_who_has_it() {
    let reactor = Reactor::new(Box::<VirtualBackend>::default(), Order::Fifo);
    let its = reactor.clone();
    let woke = reactor.block_on(async move {
        let mut sleep = Box::pin(its.sleep(Duration::from_millis(1)));
        let pending = std::future::poll_fn(|context| {
            std::task::Poll::Ready(sleep.as_mut().poll(context).is_pending())
        });
        assert!(pending.await);
        let woke = Rc::new(Cell::new(false));
        let theirs = woke.clone();
        its.spawn(async move {
            sleep.await;
            theirs.set(true);
        });
        its.sleep(Duration::from_millis(2)).await;
        woke.get()
    });
    assert_eq!(woke, Some(true));
}
