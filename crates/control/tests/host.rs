//! Goal: volumes are there for this host, by NBD and as files, for as long as an operator wants,
//! whatever happens to the daemon; and what cannot be is refused with what mends it.
//! Method: exports of both kinds, made and used as an operator does; the daemon stopped and killed
//! while one is in use.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::Command;

use daemon::Daemon;
use rustix::io::Errno;
use serde_json::Value;

const BYTES: u64 = 16 << 20;

// Ports here are below those that the kernel gives to whoever connects.

fn with_volume() -> Daemon {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon
}

fn tool(name: &str, arguments: &[&str]) -> String {
    let output = Command::new("timeout").arg("30").arg(name).args(arguments).output().unwrap();
    assert!(output.status.code() != Some(127), "{name} is missing: scripts/install.sh test");
    let trouble = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{name} {arguments:?}: {trouble}");
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

#[test]
fn a_network_block_device_is_where_the_export_says() {
    let mut daemon = with_volume();
    let said = daemon.ok("export create n --volume v --kind nbd --listen 127.0.0.1:24109");
    assert!(said.starts_with("nbd://127.0.0.1:24109/n\n"), "{said}");
    daemon.ok("export delete n");
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock --listen 127.0.0.1:24109");
    daemon.stop();
    daemon.start_again();
    let export = daemon.json("export show n");
    assert_eq!(
        (export["kind"].as_str(), export["state"].as_str()),
        (Some("nbd"), Some("listening"))
    );
    let places = export["places"].as_array().unwrap().iter();
    let places: Vec<&str> = places.map(|place| place.as_str().unwrap()).collect();
    assert_eq!(places.len(), 2, "{places:?}");
    assert_eq!(export["place"], places.join(" "));
    let libvirt = daemon.ok("export show n --libvirt");
    assert!(libvirt.contains("protocol='nbd' name='n'"), "{libvirt}");
    for place in &places {
        assert_eq!(tool("nbdinfo", &["--size", place]), BYTES.to_string());
    }
    let from = daemon.path("from");
    std::fs::write(&from, vec![0x5a; 1 << 20]).unwrap();
    tool("nbdcopy", &[from.to_str().unwrap(), places[0]]);
    let export = daemon.json("export show n");
    assert!(export["counters"]["write_bytes"].as_u64() >= Some(1 << 20), "{export}");
    daemon.wait_unused("n");
    daemon.ok("export delete n");
    assert!(!daemon.path("n.sock").exists());
}

#[test]
fn what_a_kind_cannot_have_is_refused() {
    let daemon = with_volume();
    let refused = |line: &str| daemon.refused(&format!("export create e --volume v {line}"));
    assert!(refused("--listen 127.0.0.1:24110").contains("leave --listen out"));
    assert!(refused("--kind nbd --queues 2").contains("leave --queues out"));
    assert!(refused("--kind nbd --listen 127.0.0.1:0").contains("name a port"));
    assert!(refused("--kind nbd --listen 192.0.2.1:24110").contains("address of this host"));
    assert!(refused("--kind fuse").contains("--path"));
    assert!(refused("--kind fuse --path @/f --queues 2").contains("leave --queues out"));
    assert!(refused("--kind fuse --path @/f --listen 127.0.0.1:1").contains("leave --listen out"));
    assert!(refused("--kind fuse --path @/d0.img").contains("not an empty file"));
    assert!(refused("--kind nbd --id 3").contains("--kind ublk"));
    assert!(refused("--block 4096").contains("--kind ublk"));
    assert!(refused("--kind ublk --path @/f").contains("--id N"));
    assert!(refused("--kind ublk --listen 127.0.0.1:1").contains("leave --listen out"));
    assert!(refused("--kind ublk --block 1024").contains("512 or 4096"));
    assert!(refused("--kind ublk --id 1048576").contains("use 0 to 1048575"));
    assert!(refused("--kind ublk --queues 65").contains("use 1 to 64"));
    // Where there is a driver, `tests/test_ublk.py` uses it.
    if !std::path::Path::new("/dev/ublk-control").exists() {
        let none = refused("--kind ublk");
        assert!(none.contains("modprobe ublk_drv") && none.contains("--kind nbd"), "{none}");
    }
    daemon.misused("export create e --volume v --kind nbd --listen here");
    daemon.ok("export create e --volume v --kind nbd --path @/e.sock --listen 127.0.0.1:24111");
    let clash = daemon.refused("export create f --volume v --kind nbd --listen 127.0.0.1:24111");
    assert!(clash.contains("export e listens there") && clash.contains("--listen"), "{clash}");
    let clash = daemon.refused("export create f --volume v --path @/e.sock");
    assert!(clash.contains("export e listens there") && clash.contains("--path"), "{clash}");
}

#[test]
fn a_file_outlives_the_daemon_and_is_deleted_with_the_export() {
    if !rustix::process::geteuid().is_root() {
        let daemon = with_volume();
        let refused = daemon.refused("export create f --volume v --kind fuse --path @/f");
        assert!(refused.contains("as root"), "{refused}");
        return;
    }
    let mut daemon = with_volume();
    let path = daemon.path("f");
    daemon.ok("export create f --volume v --kind fuse --path @/f");
    assert_eq!(path.metadata().unwrap().len(), BYTES);
    let open = || File::options().read(true).write(true).open(&path).unwrap();
    open().write_all_at(&[7; 8192], 4096).unwrap();
    let export = daemon.json("export show f");
    let way = export["way"].as_str().unwrap();
    assert!(way == "/dev/fuse" || way.starts_with("io_uring"), "{way}");
    let used = open();
    used.sync_all().unwrap();
    assert!(daemon.refused("export delete f").contains("--force"));
    daemon.kill();
    // Nobody waits for a daemon that is gone, and the next one mounts again.
    assert!(used.read_at(&mut [0; 512], 0).is_err());
    assert_eq!(path.metadata().unwrap_err().raw_os_error(), Some(Errno::NOTCONN.raw_os_error()));
    daemon.start_again();
    let mut read = [0; 8192];
    open().read_exact_at(&mut read, 4096).unwrap();
    assert!(read == [7; 8192]);
    drop(used);
    // What the kernel remembers of the file is not taken for one of somebody else.
    assert_eq!(path.metadata().unwrap().len(), BYTES);
    daemon.kill();
    daemon.start_again();
    open().read_exact_at(&mut read, 4096).unwrap();
    assert!(read == [7; 8192]);
    daemon.stop();
    assert!(!path.exists());
    daemon.start_again();
    let used = open();
    daemon.ok("export delete f --force");
    assert!(used.read_at(&mut [0; 512], 0).is_err());
    assert!(!path.exists());
}

/// The daemon is killed, and the next one finds none of its drives. Returns where each is, and
/// where it was put.
fn without_drives(daemon: &mut Daemon) -> [(PathBuf, PathBuf); 2] {
    daemon.kill();
    let drives = ["d0", "d1"].map(|name| daemon.path(&format!("{name}.img")));
    let moved = drives.map(|drive| (drive.clone(), drive.with_extension("away")));
    moved.iter().for_each(|(drive, away)| std::fs::rename(drive, away).unwrap());
    daemon.start_again();
    moved
}

fn with_drives_again(daemon: &mut Daemon, moved: &[(PathBuf, PathBuf)]) {
    daemon.stop();
    moved.iter().for_each(|(drive, away)| std::fs::rename(away, drive).unwrap());
    daemon.start_again();
}

/// Nobody mounts it again where its array does not come up.
#[test]
fn a_dead_mount_goes_with_its_export() {
    if !rustix::process::geteuid().is_root() {
        return daemon::not_tried("mounting takes root");
    }
    let mut daemon = with_volume();
    let path = daemon.path("f");
    for is_there in [false, true] {
        if is_there {
            std::fs::write(&path, "").unwrap();
        }
        daemon.ok("export create f --volume v --kind fuse --path @/f");
        let away = without_drives(&mut daemon);
        // The second if the kernel has not let go of the one who served it yet.
        let dead = Errno::from_io_error(&File::open(&path).unwrap_err());
        assert!(matches!(dead, Some(Errno::NOTCONN | Errno::CONNABORTED)), "{dead:?}");
        daemon.ok("export delete f");
        assert_eq!(path.metadata().unwrap_err().kind(), std::io::ErrorKind::NotFound);
        with_drives_again(&mut daemon, &away);
    }
}

/// One file is mounted over another, as long as this is there.
struct Bound<'a>(&'a str);

impl Bound<'_> {
    fn new<'a>(from: &str, at: &'a str) -> Bound<'a> {
        tool("mount", &["--bind", from, at]);
        Bound(at)
    }
}

impl Drop for Bound<'_> {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(self.0).status();
    }
}

#[test]
fn what_cannot_be_taken_away_of_a_file_is_told() {
    if !rustix::process::geteuid().is_root() {
        return daemon::not_tried("mounting takes root");
    }
    let mut daemon = with_volume();
    for is_precious in [false, true] {
        // What is mounted there stays there.
        let path = daemon.path(if is_precious { "g" } else { "f" });
        let other = daemon.path("other");
        std::fs::write(&other, "").unwrap();
        std::fs::write(&path, "").unwrap();
        let [from, at] = [&other, &path].map(|its| its.to_str().unwrap());
        let bound = Bound::new(from, at);
        daemon.ok(&format!("export create f --volume v --kind fuse --path {at}"));
        let away = without_drives(&mut daemon);
        if is_precious {
            std::fs::write(&other, "precious").unwrap();
        }
        let said = daemon.ok("export delete f");
        let why = if is_precious { "is no empty file, and stays" } else { "cannot be taken away" };
        assert!(said.contains(at) && said.contains(why), "{said}");
        daemon.refused("export show f");
        drop(bound);
        with_drives_again(&mut daemon, &away);
    }
}

/// One who has agreed on an export, and asks nothing of it.
fn nbd_client(daemon: &Daemon, socket: &str, export: &str) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.path(socket)).unwrap();
    stream.read_exact(&mut [0; 18]).unwrap();
    // "Fixed newstyle", no zeroes; option "export name".
    let mut words = 3u32.to_be_bytes().to_vec();
    words.extend(b"IHAVEOPT");
    words.extend(1u32.to_be_bytes());
    words.extend(u32::try_from(export.len()).unwrap().to_be_bytes());
    words.extend(export.as_bytes());
    stream.write_all(&words).unwrap();
    stream.read_exact(&mut [0; 10]).unwrap();
    stream
}

/// Whoever took it away, and whatever was put there.
#[test]
fn a_place_that_is_lost_is_told_and_made_anew_once_nobody_is_connected() {
    let daemon = with_volume();
    daemon.ok("export create v --volume v --path @/v.sock");
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock");
    let problems = || daemon.json("status")["problems"].to_string();
    for name in ["v", "n"] {
        let (path, show) = (daemon.path(&format!("{name}.sock")), format!("export show {name}"));
        std::fs::remove_file(&path).unwrap();
        daemon.wait_for(&show, |_| path.exists());
        daemon.wait_for(&show, |export| export["state"] == "listening");
        // In one step, or the daemon would be faster.
        let precious = daemon.path("precious");
        std::fs::write(&precious, "precious").unwrap();
        std::fs::rename(&precious, &path).unwrap();
        let why = |export: &Value| export["error"].as_str().unwrap_or_default().to_owned();
        daemon.wait_for(&show, |export| why(export).contains("is not a socket"));
        assert!(problems().contains(&format!("export {name} is down")), "{}", problems());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
        daemon.wait_for(&show, |export| export["state"] == "listening");
        assert_eq!(problems(), "[]");
    }
    let client = nbd_client(&daemon, "n.sock", "n");
    daemon.wait_for("export show n", |export| export["state"] == "connected");
    std::fs::remove_file(daemon.path("n.sock")).unwrap();
    let other = UnixListener::bind(daemon.path("n.sock")).unwrap();
    let told = |export: &Value| export["unreachable"].to_string().contains("taken the place");
    let export = daemon.wait_for("export show n", told);
    assert_eq!(export["state"], "connected");
    assert!(problems().contains("once nobody is, it is made anew"), "{}", problems());
    drop(client);
    daemon.wait_for("export show n", |export| export["error"].to_string().contains("in use"));
    drop(other);
    daemon.wait_unused("n");
    drop(nbd_client(&daemon, "n.sock", "n"));
}

#[test]
fn a_file_that_was_unmounted_is_mounted_again_and_what_is_mounted_over_it_stays() {
    if !rustix::process::geteuid().is_root() {
        return daemon::not_tried("mounting takes root");
    }
    let daemon = with_volume();
    let path = daemon.path("f");
    let at = path.to_str().unwrap();
    daemon.ok("export create f --volume v --kind fuse --path @/f");
    tool("umount", &[at]);
    let len = || path.metadata().map_or(0, |its| its.len());
    daemon.wait_for("export show f", |export| export["state"] == "listening" && len() == BYTES);
    let other = daemon.path("other");
    std::fs::write(&other, "precious").unwrap();
    let bound = Bound::new(other.to_str().unwrap(), at);
    daemon.wait_for("export show f", |export| {
        export["error"].to_string().contains("is not an empty file")
    });
    assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    drop(bound);
    daemon.wait_for("export show f", |export| export["state"] == "listening" && len() == BYTES);
    daemon.ok("export delete f");
    assert!(!path.exists());
}

#[test]
fn a_refusal_names_who_uses_an_export() {
    let daemon = with_volume();
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock");
    let client = nbd_client(&daemon, "n.sock", "n");
    daemon.wait_for("export show n", |export| export["state"] == "connected");
    for line in ["export delete n", "array stop a"] {
        let said = daemon.refused(line);
        assert!(said.contains("is used by a client"), "{line}: {said}");
        assert!(said.contains("fix: disconnect the client first"), "{line}: {said}");
    }
    drop(client);
}

/// Clients of network block devices are not handed to another program.
#[test]
fn an_upgrade_takes_nothing_away_unasked() {
    let daemon = with_volume();
    daemon.ok("export create n --volume v --kind nbd --path @/n.sock");
    let client = nbd_client(&daemon, "n.sock", "n");
    daemon.wait_for("export show n", |export| export["state"] == "connected");
    let said = daemon.refused("upgrade");
    assert!(said.contains("export n") && said.contains("--force"), "{said}");
    drop(client);
    daemon.wait_unused("n");
    daemon.ok("upgrade");
    let client = nbd_client(&daemon, "n.sock", "n");
    daemon.wait_for("export show n", |export| export["state"] == "connected");
    daemon.ok("upgrade --force");
    drop(client);
}
