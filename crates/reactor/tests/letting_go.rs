//! Goal: whoever waits for a device that is let go hears of it at once; the memory of the operation
//! and the device itself stay until the kernel is done with them.
//! Method: reads of an empty pipe, which the kernel answers when the test writes to it.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs::File;
use std::io::{PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Errno, Op};
use ashlar_reactor::uring::UringBackend;

const GONE: Errno = Errno(libc::ENODEV);

/// A device that does not answer until something is written to the other end.
struct Silent {
    device: DeviceId,
    file: Arc<File>,
    other_end: PipeWriter,
}

impl Silent {
    fn new(reactor: &Reactor) -> Silent {
        let (end, other_end) = std::io::pipe().unwrap();
        let file = Arc::new(File::from(OwnedFd::from(end)));
        let device = reactor.register(Device::File { file: file.clone() });
        Silent { device, file, other_end }
    }

    fn is_busy(&self, reactor: &Reactor) -> bool {
        reactor.deadline(self.device, |_| Duration::ZERO).is_some()
    }

    fn is_held(&self) -> bool {
        Arc::strong_count(&self.file) > 1
    }
}

fn run(test: impl AsyncFnOnce(Reactor) + 'static) {
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let its = reactor.clone();
    reactor.block_on(async move { test(its).await }).unwrap();
}

#[test]
fn a_dropped_operation_keeps_its_memory() {
    run(async |reactor| {
        let mut silent = Silent::new(&reactor);
        let buffer = reactor.buffer(4096);
        let place = buffer.as_ptr();
        drop(reactor.submit(Op::Read { device: silent.device, offset: 0, into: buffer.into() }));
        let others: Vec<_> = (0..100).map(|_| reactor.buffer(4096)).collect();
        assert!(others.iter().all(|other| other.as_ptr() != place), "the kernel may fill it");
        drop(others);
        silent.other_end.write_all(&[7; 4096]).unwrap();
        while silent.is_busy(&reactor) {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(reactor.buffer(4096).as_ptr(), place, "it was the last to be given back");
    });
}

#[test]
fn a_device_that_is_let_go_answers_at_once_and_leaves_later() {
    run(async |reactor| {
        let mut silent = Silent::new(&reactor);
        let all = reactor.buffer(8192);
        let (into, other) = (all.slice(0..4096), all.slice(4096..8192));
        let read = Op::Read { device: silent.device, offset: 0, into: into.clone().into() };
        let (waiting, dropped) = (reactor.submit(read.clone()), reactor.submit(read));
        let r = reactor.clone();
        let device = silent.device;
        reactor.spawn(async move {
            r.sleep(Duration::from_millis(1)).await;
            r.unregister(device);
        });
        assert_eq!(waiting.await, Err(GONE));
        drop(dropped);
        assert!(silent.is_held(), "the kernel still has it");
        // Its id is not given to another device.
        let next = reactor.register(Device::Ram { bytes: 4096 });
        assert_ne!(next, silent.device);

        // Memory beside it is free; its own is once the kernel has answered both.
        reactor.reclaim(&other.into()).await;
        let (r, began) = (reactor.clone(), reactor.now());
        reactor.spawn(async move {
            for _ in 0..2 {
                r.sleep(Duration::from_millis(5)).await;
                silent.other_end.write_all(&[9; 4096]).unwrap();
            }
            r.sleep(Duration::from_millis(5)).await;
            assert!(!silent.is_held(), "nothing can reach it any more");
            r.stop();
        });
        reactor.reclaim(&into.clone().into()).await;
        assert!(reactor.now().since(began) >= Duration::from_millis(10));
        assert_eq!(into.bytes(), [9; 4096]);
    });
}

#[test]
fn what_had_completed_before_is_not_taken_back() {
    run(async |reactor| {
        let mut silent = Silent::new(&reactor);
        silent.other_end.write_all(&[1; 512]).unwrap();
        let into = reactor.buffer(512).into();
        let read = reactor.submit(Op::Read { device: silent.device, offset: 0, into });
        // Nobody looks at it while it completes.
        while silent.is_busy(&reactor) {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        reactor.unregister(silent.device);
        assert!(!silent.is_held());
        assert_eq!(read.await, Ok(512));
    });
}
