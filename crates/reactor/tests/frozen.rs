//! Goal: what a file system keeps waiting holds up nobody else's drives.
//! Method: writes to files of a file system that is frozen, more than the kernel has threads for
//! unless it is told, beside a file in memory. Needs root; where nothing can be mounted it says so.
#![allow(clippy::unwrap_used, reason = "a test")]

mod mounted;

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, Op};
use ashlar_reactor::uring::UringBackend;
use mounted::Mounted;
use rustix::fs::{MemfdFlags, OFlags, memfd_create};

const IMAGE_BYTES: u64 = 32 << 20;
/// For what takes a moment.
const LONG: Duration = Duration::from_secs(20);

fn file_of(path: &Path) -> Device {
    // Past the cache, several threads of the kernel write to one file.
    let direct = OFlags::DIRECT.bits().cast_signed();
    let mut options = File::options();
    let options = options.create_new(true).read(true).write(true).custom_flags(direct);
    let file = options.open(path).unwrap();
    Device::File { file: Arc::new(file) }
}

#[test]
fn a_frozen_file_system_holds_up_its_own_drives_only() {
    let Some(mut mounted) = Mounted::new(IMAGE_BYTES) else { return };
    // Of its own accord the kernel has four threads a CPU for them.
    let writes = 4 * std::thread::available_parallelism().unwrap().get() as u64 + 8;
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let r = reactor.clone();
    let test = async move {
        let frozen = r.register(file_of(&mounted.place().join("drive")));
        let memory = File::from(memfd_create("drive", MemfdFlags::CLOEXEC).unwrap());
        let other = r.register(Device::File { file: Arc::new(memory) });
        let from = r.buffer(4096);
        mounted.freeze();
        let write = |at| Op::Write { device: frozen, offset: at * 4096, from: from.clone().into() };
        let is_busy = |device| r.deadline(device, |_| Duration::ZERO).is_some();
        let writes: Vec<_> = (0..writes).map(|at| r.submit(write(at))).collect();
        // A flush is always left to one of those threads.
        let flush = r.submit(Op::Flush { device: other });
        let began = r.now();
        while is_busy(other) && r.now().since(began) < LONG {
            r.sleep(Duration::from_millis(1)).await;
        }
        assert!(!is_busy(other), "it waits for the frozen one");
        assert!(is_busy(frozen));
        mounted.thaw();
        flush.await.unwrap();
        for write in writes {
            write.await.unwrap();
        }
    };
    reactor.block_on(test).unwrap();
}
