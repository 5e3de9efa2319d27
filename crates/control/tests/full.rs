//! Goal: a file system that is full under the drives is said to be full, to the operator and to
//! whoever writes, and costs no drive; with room again all goes on. Hosts are never told that more
//! is atomic than is.
//! Method: drive files without their blocks on a file system that a filler takes all of. Needs
//! root.
#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;
#[expect(dead_code, clippy::cast_possible_truncation, reason = "a test's, that only looks here")]
#[path = "../../target/tests/nvme_tcp/host.rs"]
mod host;
#[expect(dead_code, reason = "nothing is frozen here")]
#[path = "../../reactor/tests/mounted/mod.rs"]
mod mounted;

use std::fs::File;
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Command, Output};

use ashlar_reactor::nvme::command::{Command as Nvme, Status};
use daemon::Daemon;
use host::{Choice, Host};
use mounted::Mounted;

const DRIVE_BYTES: u64 = 64 << 20;
const WRITTEN_BYTES: usize = 8 << 20;
const TRIES: usize = 5;

/// What the host of the target's tests takes from them.
mod rig {
    pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(60);
}

/// Takes all room but `left` bytes.
fn fill(mounted: &Mounted, name: &str, left: u64) {
    let mut file = File::create(mounted.place().join(name)).unwrap();
    while file.write_all(&[1; 4096]).is_ok() {}
    let len = file.metadata().unwrap().len();
    file.set_len(len.saturating_sub(left)).unwrap();
    // What is written back only later may be told then that there is no room.
    let _ = file.sync_all();
}

fn copy(from: &str, to: &str) -> Output {
    Command::new("timeout").args(["60", "nbdcopy", from, to]).output().unwrap()
}

/// Drives that are sparse files there.
fn attach_files(daemon: &Daemon, mounted: &Mounted, names: &[&str], bytes: u64) {
    for name in names {
        let file = mounted.place().join(name);
        File::create(&file).unwrap().set_len(bytes).unwrap();
        daemon.ok(&format!("drive attach {} --name {name}", file.display()));
    }
}

#[test]
fn a_full_file_system_is_told() {
    let daemon = Daemon::start();
    let Some(mounted) = Mounted::new(3 * DRIVE_BYTES) else { return };
    attach_files(&daemon, &mounted, &["d0", "d1"], DRIVE_BYTES);
    daemon.ok("array create a --level 1 --drives d0,d1");
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock");
    let place = daemon.json("export show n")["place"].as_str().unwrap().to_owned();
    let from = daemon.path("from");
    std::fs::write(&from, vec![0x5a; WRITTEN_BYTES]).unwrap();
    let from = from.to_str().unwrap();

    fill(&mounted, "filler", 0);
    let output = copy(from, &place);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("No space left"), "{output:?}");
    let drive = daemon.wait_for("drive show d0", |drive| drive["full"] == true);
    assert!(drive["counters"]["no_space"].as_u64() > Some(0), "{drive}");
    assert_eq!(drive["health"], "healthy");
    assert!(daemon.ok("status").contains("! drive d0 had no room lately, "));

    std::fs::remove_file(mounted.place().join("filler")).unwrap();
    let output = copy(from, &place);
    assert!(output.status.success(), "{output:?}");
    let back = daemon.path("back");
    let output = copy(&place, back.to_str().unwrap());
    assert!(output.status.success(), "{output:?}");
    let read = std::fs::read(back).unwrap();
    assert!(read[..WRITTEN_BYTES].iter().all(|byte| *byte == 0x5a));
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

/// A block of a file that a daemon serves.
fn write_block(path: &Path, block: u64) -> std::io::Result<()> {
    File::options().write(true).open(path)?.write_all_at(&[0x5a; 4096], block * 4096)
}

/// A guest of NVMe/TCP, one of a file, and one of an array of another host, whose drive it is.
#[test]
fn each_way_tells_that_there_is_no_space() {
    let daemon = Daemon::start_beside(1, &[]);
    let Some(mounted) = Mounted::new(3 * DRIVE_BYTES) else { return };
    attach_files(&daemon, &mounted, &["d0", "d1"], 3 * DRIVE_BYTES);
    let (nqn, at) = ("nqn.2026-01.example:full", "127.0.0.1:24131".parse().unwrap());
    daemon.ok("array create a --level 1 --drives d0,d1");
    daemon.ok("volume create v --array a --size 96M");
    daemon.ok("volume create w --array a --size 16M");
    daemon.ok(&format!("export create t --volume v --kind nvme-tcp --listen {at} --nqn {nqn}"));
    daemon.ok(&format!("export create u --volume w --kind nvme-tcp --listen {at} --nqn {nqn}-w"));
    daemon.ok("export create f --volume w --kind fuse --path @/f");
    let other = Daemon::start_beside(2, &[]);
    other.ok(&format!("drive attach nvme-tcp://{at}/{nqn} --name far"));
    other.ok("array create b --level 0 --drives far");
    other.ok("volume create v --array b --size 16M");
    other.ok("export create f --volume v --kind fuse --path @/f");
    let mut host = Host::connect(at, &format!("{nqn}-w"), Choice::PLAIN);
    let (own, others) = (daemon.path("f"), other.path("f"));
    [&own, &others].iter().for_each(|path| write_block(path, 0).unwrap());

    fill(&mounted, "filler", 0);
    let write = Nvme::write(1, 1024, 8);
    assert_eq!(host.io.put(write, &[0x5a; 4096], true), Status::CAPACITY_EXCEEDED);
    for path in [&own, &others] {
        let error = write_block(path, 256).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(rustix::io::Errno::NOSPC.raw_os_error()), "{error}");
    }
    let drive = other.wait_for("drive show far", |drive| drive["full"] == true);
    assert_eq!(drive["health"], "healthy");

    std::fs::remove_file(mounted.place().join("filler")).unwrap();
    assert_eq!(host.io.put(write, &[0x5a; 4096], true), Status::SUCCESS);
    [&own, &others].iter().for_each(|path| write_block(path, 256).unwrap());
    // Else their mounts would outlive them.
    [&other, &daemon].iter().for_each(|daemon| drop(daemon.ok("export delete f")));
}

fn blocks_atomic(at: SocketAddr, nqn: &str) -> u32 {
    Host::connect(at, nqn, Choice::PLAIN).admin.blocks_atomic()
}

#[test]
fn hosts_are_told_what_is_atomic_also_when_the_policy_changed_by_half() {
    let daemon = Daemon::start();
    let Some(mounted) = Mounted::new(4 * DRIVE_BYTES) else { return };
    attach_files(&daemon, &mounted, &["d0", "d1", "d2"], DRIVE_BYTES);
    let (nqn, at) = ("nqn.2026-01.example:full", "127.0.0.1:24130".parse().unwrap());
    daemon.ok("array create a --level 5 --drives d0,d1,d2");
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock");
    daemon.ok(&format!("export create t --volume v --kind nvme-tcp --listen {at} --nqn {nqn}"));
    let place = daemon.json("export show n")["place"].as_str().unwrap().to_owned();
    assert_eq!(blocks_atomic(at, nqn), 128);
    daemon.ok("array set a --policy bitmap");
    assert_eq!(blocks_atomic(at, nqn), 1);
    daemon.ok("array set a --policy journal --atomic 16K");
    assert_eq!(blocks_atomic(at, nqn), 32);

    let set_without_room = |blocks: usize| {
        // There is room for the journal, and then none to put in place what it has.
        fill(&mounted, "most", 1 << 20);
        let from = daemon.path("from");
        std::fs::write(&from, vec![0x5a; blocks * 8192]).unwrap();
        let output = copy(from.to_str().unwrap(), &place);
        assert!(output.status.success(), "{output:?}");
        fill(&mounted, "rest", 0);
        let output = daemon.run("array set a --policy bitmap --atomic 32K");
        if !output.status.success() {
            return Some(output);
        }
        // It was in place before there was no room. The next has a block that needs some.
        for name in ["most", "rest"] {
            std::fs::remove_file(mounted.place().join(name)).unwrap();
        }
        daemon.ok("array set a --policy journal --atomic 16K");
        None
    };
    let output = (1..=TRIES).find_map(set_without_room).expect("it is in place too soon");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("no space left"), "{said}");
    assert!(said.contains("it is set all the same"), "{said}");
    assert_eq!(daemon.json("array show a")["settings"]["policy"], "bitmap");
    assert_eq!(blocks_atomic(at, nqn), 1);
}
