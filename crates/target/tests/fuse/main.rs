//! Goal: a volume is a regular file, for every way in which programs use one, by each way in which
//! the kernel asks for it; and a file that is gone keeps nobody waiting.
//! Method: an array on RAM drives on a real reactor, the file of it mounted, and system calls, a
//! loop device and fio on it. It takes root: others are told so, and nothing is tested.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]
#![allow(dead_code, reason = "parts of the neighbouring test")]

#[path = "../export/rig.rs"]
mod rig;

use std::fs::{File, FileTimes, OpenOptions};
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, UNIX_EPOCH};

use ashlar_format::array_superblock::Level;
use ashlar_reactor::prng::Prng;
use ashlar_target::export::{Export, ExportStatus};
use ashlar_target::fuse::{FuseExport, FuseSpec};
use ashlar_target::limits::{RateLimits, Rates};
use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;
use rustix::time::{ClockId, clock_gettime};

use crate::rig::Rig;

const DATA: u64 = 32 << 20;

/// In a place of its own, which is removed last.
struct Served {
    export: Option<FuseExport>,
    place: tempfile::TempDir,
}

impl Served {
    fn new(rig: &Rig, may_ring: bool) -> Served {
        let place = tempfile::tempdir().unwrap();
        let export = start(rig, &place.path().join("disk"), may_ring).unwrap();
        Served { export: Some(export), place }
    }

    fn path(&self) -> std::path::PathBuf {
        self.place.path().join("disk")
    }

    fn open(&self) -> File {
        self.open_with(0)
    }

    fn open_with(&self, flags: i32) -> File {
        let mut options = OpenOptions::new();
        options.read(true).write(true).custom_flags(flags).open(self.path()).unwrap()
    }

    fn status(&self) -> ExportStatus {
        self.export.as_ref().unwrap().status().unwrap()
    }
}

fn start(rig: &Rig, path: &Path, may_ring: bool) -> Result<FuseExport, String> {
    let limits = RateLimits::new(Rates::default());
    let spec = FuseSpec { name: "disk".into(), path: path.to_owned(), may_ring, limits };
    FuseExport::start(rig.parts(), spec).map_err(|error| error.to_string())
}

/// Each way that this kernel has, and this user: none is a failure where everything has to be tried
/// (`ASHLAR_CI=1`, by root). That a kernel has no rings is not: those come with Linux 6.14, and a
/// parameter, which is set there.
fn ways() -> Vec<bool> {
    let is_root = rustix::process::geteuid().is_root();
    let is_ci = std::env::var_os("ASHLAR_CI").is_some_and(|its| its == "1");
    if !is_root || !Path::new("/dev/fuse").exists() {
        assert!(!is_ci || !is_root, "mounting takes /dev/fuse");
        eprintln!("not tried: mounting takes root and /dev/fuse");
        return Vec::new();
    }
    let enabled = "/sys/module/fuse/parameters/enable_uring";
    if is_ci && Path::new(enabled).exists() {
        std::fs::write(enabled, "Y").unwrap();
    }
    let has_rings = std::fs::read_to_string(enabled).is_ok_and(|its| its.starts_with('Y'));
    if !has_rings {
        eprintln!("without io_uring: {enabled} does not say Y");
    }
    if has_rings { vec![true, false] } else { vec![false] }
}

fn run(tool: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("60").arg(tool).args(arguments).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let trouble = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{tool} {arguments:?}: {text}{trouble}");
    text.trim().to_owned()
}

#[test]
fn the_way_is_the_one_that_the_kernel_has() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        let way = served.status().way.unwrap();
        assert_eq!(way.starts_with("io_uring"), may_ring, "{way}");
        assert_eq!(way == "/dev/fuse", !may_ring, "{way}");
    }
}

/// Any ranges, of sectors and not, against a copy in memory.
#[test]
fn what_is_written_is_read_at_any_byte() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        let file = served.open();
        let mut copy = vec![0; 4 << 20];
        file.read_exact_at(&mut copy, 0).unwrap();
        let mut prng = Prng::from_seed(7);
        for round in 0..400u64 {
            let unit = [1, 512, 4096][prng.index(3)];
            let longest = [100, 5000, 1 << 20][prng.index(3)];
            let at = prng.index(copy.len() / unit) * unit;
            let len = (1 + prng.index(longest)).next_multiple_of(unit).min(copy.len() - at);
            match prng.index(4) {
                0 => {
                    let mode = [FallocateFlags::PUNCH_HOLE, FallocateFlags::ZERO_RANGE];
                    let mode = mode[prng.index(2)] | FallocateFlags::KEEP_SIZE;
                    fallocate(&file, mode, at as u64, len as u64).unwrap();
                    copy[at..at + len].fill(0);
                }
                1 => {
                    let mut read = vec![0; len];
                    file.read_exact_at(&mut read, at as u64).unwrap();
                    assert!(read == copy[at..at + len], "round {round}: {len} at {at}");
                }
                _ => {
                    let data: Vec<u8> = (0..len).map(|_| prng.index(256) as u8).collect();
                    file.write_all_at(&data, at as u64).unwrap();
                    copy[at..at + len].copy_from_slice(&data);
                }
            }
        }
        let mut read = vec![0; copy.len()];
        file.read_exact_at(&mut read, 0).unwrap();
        assert!(read == copy);
        assert_eq!(served.status().counters.errors, 0);
    }
}

/// Each writes bytes of its own in sectors that all share.
#[test]
fn writes_of_less_than_a_sector_do_not_lose_each_other() {
    const THREADS: usize = 4;
    let rig = Rig::new(Level::Raid5, 4, DATA);
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let file = served.open();
                scope.spawn(move || {
                    for at in (0..8192).filter(|at| at % THREADS == thread) {
                        file.write_all_at(&[thread as u8 + 1], at as u64).unwrap();
                    }
                });
            }
        });
        let mut read = vec![0; 8192];
        served.open().read_exact_at(&mut read, 0).unwrap();
        assert!(read.iter().enumerate().all(|(at, byte)| usize::from(*byte) == at % THREADS + 1));
        served.open().write_all_at(&[0; 8192], 0).unwrap();
    }
}

#[test]
fn the_file_has_the_size_of_the_volume_and_keeps_it() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let mut bytes = DATA;
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        let file = served.open();
        let about = file.metadata().unwrap();
        assert_eq!((about.len(), about.blocks() * 512, about.mode()), (bytes, bytes, 0o100_600));
        assert!(file.set_len(4096).is_err());
        assert_eq!(file.write_at(&[1; 8192], bytes - 4096).unwrap(), 4096);
        let full = file.write_at(&[1; 512], bytes).unwrap_err();
        assert_eq!(full.raw_os_error(), Some(libc::ENOSPC));
        assert_eq!(file.read_at(&mut [0; 8192], bytes - 512).unwrap(), 512);
        assert_eq!(file.read_at(&mut [0; 512], bytes).unwrap(), 0);
        assert!(fallocate(&file, FallocateFlags::empty(), 0, bytes).is_ok());
        assert!(fallocate(&file, FallocateFlags::empty(), 0, bytes + 1).is_err());
        let zero = FallocateFlags::ZERO_RANGE;
        assert_eq!(fallocate(&file, zero, bytes - 1, 2).unwrap_err(), Errno::NOSPC);
        fallocate(&file, zero | FallocateFlags::KEEP_SIZE, bytes - 1, 2).unwrap();
        assert_eq!(seek(&file, SeekFrom::Data(bytes - 1)).unwrap(), bytes - 1);
        assert_eq!(seek(&file, SeekFrom::Hole(bytes - 1)).unwrap(), bytes);
        bytes += 1 << 20;
        rig.resize(bytes);
        let grown = || served.path().metadata().unwrap().len() == bytes;
        assert!((0..3000).any(|_| {
            std::thread::park_timeout(Duration::from_millis(10));
            grown()
        }));
        assert_eq!(file.write_at(&[2; 512], bytes - 512).unwrap(), 512);
    }
}

/// By the clock that dates files: seconds, and nanoseconds beyond them.
fn time_of_day() -> (i64, i64) {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    (now.tv_sec, now.tv_nsec)
}

/// The time, once it is another one.
fn next_time() -> (i64, i64) {
    let before = time_of_day();
    while time_of_day() == before {
        std::thread::park_timeout(Duration::from_millis(1));
    }
    time_of_day()
}

/// When it was changed: its content, and its attributes.
fn changed(file: &File) -> (i64, i64) {
    let about = file.metadata().unwrap();
    let time = (about.mtime(), about.mtime_nsec());
    assert_eq!(time, (about.ctime(), about.ctime_nsec()));
    time
}

#[test]
fn the_times_of_the_file_are_those_of_its_changes() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let mut bytes = DATA;
    for may_ring in ways() {
        let before = time_of_day();
        let served = Served::new(&rig, may_ring);
        let file = served.open();
        let first = changed(&file);
        assert!((before..=time_of_day()).contains(&first), "{first:?}");
        let zero = FallocateFlags::ZERO_RANGE | FallocateFlags::KEEP_SIZE;
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        let changes: [&dyn Fn(); 4] = [
            &|| file.write_all_at(&[1; 4096], 0).unwrap(),
            &|| file.write_all_at(&[1], 5).unwrap(),
            &|| fallocate(&file, zero, 0, 4096).unwrap(),
            &|| fallocate(&file, punch, 0, 4096).unwrap(),
        ];
        for change in changes {
            let before = next_time();
            change();
            let after = changed(&file);
            assert!((before..=time_of_day()).contains(&after), "{after:?} since {before:?}");
        }
        // None of these is one.
        let last = changed(&file);
        next_time();
        file.read_exact_at(&mut [0; 4096], 0).unwrap();
        file.sync_all().unwrap();
        file.set_times(FileTimes::new().set_modified(UNIX_EPOCH)).unwrap();
        assert_eq!(changed(&file), last);
        let before = next_time();
        bytes += 1 << 20;
        rig.resize(bytes);
        served.export.as_ref().unwrap().resized();
        assert!((0..3000).any(|_| {
            std::thread::park_timeout(Duration::from_millis(10));
            changed(&file) >= before
        }));
    }
}

/// Who copies the file need not read what nobody wrote.
#[test]
fn what_nobody_wrote_is_a_hole() {
    const AT: u64 = 20 << 20;
    let rig = Rig::new(Level::Raid5, 4, DATA);
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        let file = served.open();
        assert_eq!(seek(&file, SeekFrom::Data(0)), Err(Errno::NXIO));
        assert_eq!(seek(&file, SeekFrom::Hole(1)), Ok(1));
        file.write_all_at(&[1; 4096], AT).unwrap();
        let data = seek(&file, SeekFrom::Data(1)).unwrap();
        let hole = seek(&file, SeekFrom::Hole(AT)).unwrap();
        assert!((1 << 20..=AT).contains(&data), "{data}");
        assert!((AT + 4096..DATA).contains(&hole), "{hole}");
        assert_eq!(seek(&file, SeekFrom::Hole(data)), Ok(hole));
        assert_eq!(seek(&file, SeekFrom::Data(hole)), Err(Errno::NXIO));
        let copy = served.place.path().join("copy");
        let (from, to) = (served.path(), copy.to_str().unwrap());
        run("cp", &["--sparse=auto", from.to_str().unwrap(), to]);
        let copied = std::fs::read(&copy).unwrap();
        assert!(
            copied
                .iter()
                .zip(0..)
                .all(|(byte, at)| { *byte == u8::from((AT..AT + 4096).contains(&at)) })
        );
        assert_eq!(copied.len() as u64, DATA);
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        fallocate(&file, punch, 0, DATA).unwrap();
        assert_eq!(seek(&file, SeekFrom::Data(0)), Err(Errno::NXIO));
    }
}

#[test]
fn fsync_reaches_the_drives() {
    const ROUNDS: u64 = 100;
    let rig = Rig::new(Level::Raid5, 4, DATA);
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        for (flags, syncs) in [(0, true), (libc::O_DSYNC, false)] {
            let file = served.open_with(flags);
            let before: u64 = rig.flushes().iter().sum();
            for round in 0..ROUNDS {
                file.write_all_at(&[1; 4096], round * 4096).unwrap();
                if syncs {
                    file.sync_data().unwrap();
                }
            }
            let flushes = rig.flushes().iter().sum::<u64>() - before;
            assert!(flushes >= 2 * ROUNDS, "{flushes} with flags {flags:#o}");
        }
    }
}

/// The ways of a file system: a loop device, which takes direct I/O, and what it passes on.
#[test]
fn a_loop_device_is_on_it_and_grows_with_it() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    for may_ring in ways() {
        let served = Served::new(&rig, may_ring);
        let path = served.path();
        let arguments = ["--direct-io=on", "--show", "--find", path.to_str().unwrap()];
        let device = run("losetup", &arguments);
        let detach = Detach(device.clone());
        let facts = ["--list", "--noheadings", "--output", "DIO", &device];
        assert_eq!(run("losetup", &facts), "1");
        assert!(served.status().connected);
        run("mkfs.ext4", &["-q", "-F", &device]);
        run("e2fsck", &["-f", "-n", &device]);
        run("blkdiscard", &["--force", "--offset", "0", "--length", "8M", &device]);
        let counters = served.status().counters;
        assert!(counters.flushes > 0 && counters.discards > 0, "{counters:?}");
        let filename = format!("--filename={device}");
        let verify =
            ["--verify_state_save=0", "--verify=crc32c", "--verify_fatal=1", "--randseed=1"];
        let load = ["--rw=randwrite", "--bsrange=512-64k", "--size=16M", "--iodepth=32"];
        let how = ["--name=verify", "--ioengine=io_uring", "--direct=1", "--fsync=32", &filename];
        run("fio", &[&how[..], &load, &verify].concat());
        rig.resize(DATA + (2 << 20));
        run("losetup", &["--set-capacity", &device]);
        drop(detach);
        let free = || !served.status().connected;
        assert!((0..3000).any(|_| {
            std::thread::park_timeout(Duration::from_millis(10));
            free()
        }));
    }
}

struct Detach(String);

impl Drop for Detach {
    fn drop(&mut self) {
        let _ = Command::new("losetup").args(["--detach", &self.0]).status();
    }
}

#[test]
fn an_export_that_ends_takes_the_file_away_from_its_users() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    for may_ring in ways() {
        let mut served = Served::new(&rig, may_ring);
        let file = served.open();
        file.write_all_at(&[1; 4096], 0).unwrap();
        assert!(served.status().connected);
        drop(served.export.take());
        assert!(file.read_at(&mut [0; 512], 0).is_err());
        assert!(!served.path().exists());
        // Nobody's: it stays.
        std::fs::write(served.path(), "").unwrap();
        served.export = Some(start(&rig, &served.path(), may_ring).unwrap());
        let mut read = [0; 4096];
        served.open().read_exact_at(&mut read, 0).unwrap();
        assert!(read == [1; 4096]);
        drop(served.export.take());
        assert_eq!(served.path().metadata().unwrap().len(), 0);
        std::fs::write(served.path(), "precious").unwrap();
        let refused = start(&rig, &served.path(), may_ring).err().unwrap();
        assert!(refused.contains("not an empty file"), "{refused}");
    }
}

/// Who unmounts the file by hand, and writes where it was, keeps what was written.
#[test]
fn what_took_the_place_of_the_file_stays() {
    use rustix::mount::{UnmountFlags, unmount};
    let rig = Rig::new(Level::Raid1, 2, DATA);
    for may_ring in ways() {
        let mut served = Served::new(&rig, may_ring);
        unmount(served.path(), UnmountFlags::DETACH).unwrap();
        std::fs::write(served.path(), "precious").unwrap();
        drop(served.export.take());
        assert_eq!(std::fs::read_to_string(served.path()).unwrap(), "precious");
    }
}

/// A container, or whoever has bound the file to another name, does not keep the host's mount busy.
#[test]
fn an_export_that_ends_takes_the_file_away_wherever_else_it_is_mounted() {
    use rustix::mount::{UnmountFlags, mount_bind, unmount};
    let rig = Rig::new(Level::Raid1, 2, DATA);
    for may_ring in ways() {
        let mut served = Served::new(&rig, may_ring);
        let elsewhere = served.place.path().join("elsewhere");
        File::create(&elsewhere).unwrap();
        mount_bind(served.path(), &elsewhere).unwrap();
        let file = OpenOptions::new().read(true).write(true).open(&elsewhere).unwrap();
        file.write_all_at(&[1; 4096], 0).unwrap();
        let began = now();
        drop(served.export.take());
        assert!(now() - began < Duration::from_secs(5), "it waits for who has the file");
        assert!(file.read_at(&mut [0; 512], 0).is_err());
        assert!(file.write_at(&[2; 512], 0).is_err());
        assert!(File::open(&elsewhere).is_err());
        assert!(!served.path().exists());
        drop(file);
        // A child that another test is starting has a copy of the file until it is another program.
        unmount(&elsewhere, UnmountFlags::DETACH).unwrap();
        // Nothing of it holds the volume, or came through.
        served.export = Some(start(&rig, &served.path(), may_ring).unwrap());
        let mut read = [0; 4096];
        served.open().read_exact_at(&mut read, 0).unwrap();
        assert!(read == [1; 4096]);
    }
}

#[expect(clippy::disallowed_methods, reason = "a test measures real time")]
fn now() -> std::time::Instant {
    std::time::Instant::now()
}

/// As a daemon leaves it that was killed: a mount that nobody serves.
#[test]
fn a_dead_mount_is_replaced() {
    use rustix::mount::{MountFlags, mount};
    if ways().is_empty() {
        return;
    }
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let mut served = Served::new(&rig, true);
    drop(served.export.take());
    std::fs::write(served.path(), "").unwrap();
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse").unwrap();
    let options = format!("fd={},rootmode=100000,user_id=0,group_id=0\0", device.as_raw_fd());
    let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).unwrap();
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("ashlar", served.path(), "fuse.ashlar", flags, Some(options)).unwrap();
    drop(device);
    let dead = served.path().metadata().unwrap_err();
    assert_eq!(dead.raw_os_error(), Some(libc::ENOTCONN));
    served.export = Some(start(&rig, &served.path(), true).unwrap());
    assert_eq!(served.path().metadata().unwrap().len(), DATA);
}
