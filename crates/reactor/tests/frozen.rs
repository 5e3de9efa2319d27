//! Goal: what a file system keeps waiting holds up nobody else's drives.
//! Method: writes to files of a file system that is frozen, more than the kernel has threads for
//! unless it is told, beside a file in memory. Needs root; where nothing can be mounted it says so.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs::File;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::{Device, Op};
use ashlar_reactor::uring::UringBackend;
use rustix::fs::{MemfdFlags, OFlags, memfd_create};

/// The kernel's own limit is four a CPU.
const WRITES: u64 = 400;
const IMAGE_BYTES: u64 = 32 << 20;
/// For what takes a moment.
const LONG: Duration = Duration::from_secs(20);

fn run(program: &str, arguments: &[&str]) -> bool {
    Command::new(program).args(arguments).output().is_ok_and(|its| its.status.success())
}

/// A file system of its own, in a directory that goes with it.
struct Mounted(PathBuf);

impl Mounted {
    fn new() -> Option<Mounted> {
        let home = std::env::temp_dir().join(format!("ashlar-frozen-{}", std::process::id()));
        let (image, place) = (home.join("image"), home.join("place"));
        std::fs::create_dir_all(&place).unwrap();
        File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        let (image, its) = (image.to_str().unwrap(), Mounted(home.clone()));
        let made = run("mkfs.ext4", &["-q", "-F", image]);
        (made && run("mount", &["-o", "loop", image, place.to_str().unwrap()])).then_some(its)
    }

    fn place(&self) -> PathBuf {
        self.0.join("place")
    }

    fn fsfreeze(&self, how: &str) -> bool {
        run("fsfreeze", &[how, self.place().to_str().unwrap()])
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.fsfreeze("--unfreeze");
        run("umount", &["--lazy", self.place().to_str().unwrap()]);
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

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
    let Some(mounted) = Mounted::new() else {
        let is_ci = std::env::var_os("ASHLAR_CI").is_some_and(|its| its == "1");
        assert!(!is_ci || !rustix::process::geteuid().is_root(), "nothing can be mounted");
        return eprintln!("not tried: nothing can be mounted here: it takes root");
    };
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let r = reactor.clone();
    let test = async move {
        let frozen = r.register(file_of(&mounted.place().join("drive")));
        let memory = File::from(memfd_create("drive", MemfdFlags::CLOEXEC).unwrap());
        let other = r.register(Device::File { file: Arc::new(memory) });
        let from = r.buffer(4096);
        assert!(mounted.fsfreeze("--freeze"), "it is mounted");
        let write = |at| Op::Write { device: frozen, offset: at * 4096, from: from.clone().into() };
        let is_busy = |device| r.deadline(device, |_| Duration::ZERO).is_some();
        let writes: Vec<_> = (0..WRITES).map(|at| r.submit(write(at))).collect();
        // A flush is always left to one of those threads.
        let flush = r.submit(Op::Flush { device: other });
        let began = r.now();
        while is_busy(other) && r.now().since(began) < LONG {
            r.sleep(Duration::from_millis(1)).await;
        }
        assert!(!is_busy(other), "it waits for the frozen one");
        assert!(is_busy(frozen));
        assert!(mounted.fsfreeze("--unfreeze"));
        flush.await.unwrap();
        for write in writes {
            write.await.unwrap();
        }
    };
    reactor.block_on(test).unwrap();
}
