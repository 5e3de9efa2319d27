//! Goal: a guest gets the volume that was exported to it, or none; an export that cannot be says
//! why, and no other notices.
//! Method: volumes are deleted on another host, and others made by their names; ports are taken.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::net::{SocketAddr, TcpListener};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use daemon::{Daemon, not_tried};
use serde_json::Value;

fn edit_catalog(daemon: &Daemon, edit: impl FnOnce(&mut Value)) {
    let path = daemon.path("state/catalog.json");
    let mut catalog = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut catalog);
    std::fs::write(path, catalog.to_string()).unwrap();
}

#[test]
fn a_namesake_of_an_exported_volume_is_not_served() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    let exported = daemon.json("volume show v")["uuid"].clone();
    daemon.stop();
    // As an older version kept it: the volume is taken over once.
    edit_catalog(&daemon, |catalog| {
        catalog["version"] = 2.into();
        let export = catalog["exports"]["e"].as_object_mut().unwrap();
        let front = export.remove("front").unwrap();
        export.extend(front["vhost-user-blk"].as_object().unwrap().clone());
        let bound = export.remove("volume_uuid");
        assert_eq!(bound.as_ref(), Some(&exported));
    });
    daemon.start_again();
    assert_eq!(daemon.json("export show e")["state"], "listening");
    daemon.stop();
    daemon.start_on_host(1);
    (0..2).for_each(|drive| drop(daemon.ok(&format!("drive attach @/d{drive}.img"))));
    daemon.ok("array start --scan");
    daemon.ok("volume delete v");
    daemon.ok("volume create v --array a --size 16M");
    daemon.stop();
    daemon.start_on_first_host();
    assert_eq!(daemon.array_state("a"), "optimal");
    let export = daemon.json("export show e");
    assert_eq!(export["state"], "down");
    let why = export["error"].as_str().unwrap();
    assert!(why.contains("another one than was exported"), "{why}");
    daemon.ok("export delete e");
    daemon.ok("export create e --volume v");
    assert_eq!(daemon.json("export show e")["state"], "listening");
}

#[test]
fn of_a_volume_that_was_deleted_elsewhere_the_export_is_down() {
    let mut daemon = Daemon::with_array(1, 2);
    for name in ["v", "w"] {
        daemon.ok(&format!("volume create {name} --array a --size 16M"));
        daemon.ok(&format!("export create {name} --volume {name}"));
    }
    daemon.stop();
    daemon.start_on_host(1);
    (0..2).for_each(|drive| drop(daemon.ok(&format!("drive attach @/d{drive}.img"))));
    daemon.ok("array start --scan");
    daemon.ok("volume delete v");
    daemon.stop();
    daemon.start_on_first_host();
    let export = daemon.json("export show v");
    assert_eq!(export["state"], "down");
    let why = export["error"].as_str().unwrap();
    assert!(why.contains("no volume v"), "{why}");
    assert_eq!(daemon.json("export show w")["state"], "listening");
    daemon.ok("export delete v");
    let said = daemon.refused("export create v --volume v");
    assert!(said.contains("no volume v") && said.contains("ashlar volume list"), "{said}");
}

/// Where an export listens.
enum Place {
    Port(SocketAddr),
    Socket(PathBuf),
}

/// Somebody else listens there, as long as this is there.
enum Other<'a> {
    Port { _listener: TcpListener },
    Socket { _listener: UnixListener, path: &'a Path },
}

/// A child that another test is starting has a copy of what was open here, for a moment.
fn bound(address: SocketAddr) -> TcpListener {
    let pause = std::time::Duration::from_millis(1);
    let mut tries = (0..1000).map(|_| {
        std::thread::park_timeout(pause);
        TcpListener::bind(address)
    });
    tries.find_map(Result::ok).unwrap()
}

impl Place {
    /// At an address that no other test uses.
    fn port() -> Place {
        Place::Port(TcpListener::bind("127.0.0.77:0").unwrap().local_addr().unwrap())
    }

    fn option(&self) -> &'static str {
        if matches!(self, Place::Port(_)) { "--listen" } else { "--path" }
    }

    fn shown(&self) -> String {
        match self {
            Place::Port(address) => address.to_string(),
            Place::Socket(path) => path.display().to_string(),
        }
    }

    fn take(&self) -> Other<'_> {
        match self {
            Place::Port(address) => Other::Port { _listener: bound(*address) },
            Place::Socket(path) => {
                Other::Socket { _listener: UnixListener::bind(path).unwrap(), path }
            }
        }
    }
}

impl Drop for Other<'_> {
    fn drop(&mut self) {
        if let Other::Socket { path, .. } = self {
            std::fs::remove_file(path).unwrap();
        }
    }
}

#[test]
fn a_place_that_is_taken_is_refused_and_at_a_start_waited_for() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create w --volume v");
    let socket = |name| Place::Socket(daemon.path(name));
    let places = [
        ("nvme-tcp", Place::port()),
        ("nbd", Place::port()),
        ("nbd", socket("nbd.sock")),
        ("vhost-user-blk", socket("vhost.sock")),
    ];
    for (kind, place) in places {
        let (option, shown) = (place.option(), place.shown());
        let create = format!("export create e --volume v --kind {kind} {option} {shown}");
        let taken = place.take();
        let said = daemon.refused(&create);
        assert!(said.contains(&shown) && said.contains("in use"), "{said}");
        drop(taken);
        daemon.ok(&create);
        daemon.stop();
        let taken = place.take();
        daemon.start_again();
        assert_eq!(daemon.json("export show w")["state"], "listening");
        let export = daemon.json("export show e");
        assert_eq!(export["state"], "down");
        assert!(export["error"].as_str().unwrap().contains(&shown), "{export}");
        drop(taken);
        daemon.wait_for("export show e", |export| export["state"] == "listening");
        daemon.ok("export delete e");
    }
}

/// As one that serves a guest: it accepts nobody else, and few can wait.
#[test]
fn nobody_waits_for_the_queue_of_who_listens_at_its_path() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    daemon.stop();
    let path = daemon.path("export/e.sock");
    let other = UnixListener::bind(&path).unwrap();
    rustix::net::listen(&other, 1).unwrap();
    daemon.start_again();
    let looks = std::time::Duration::from_secs(4);
    #[expect(clippy::disallowed_methods, reason = "the daemon tries again each second")]
    std::thread::sleep(looks);
    daemon.ok("export create f --volume v");
    assert_eq!(daemon.json("export show e")["state"], "down");
    other.set_nonblocking(true).unwrap();
    let waits = other.accept().map_err(|error| error.kind());
    assert!(matches!(waits, Err(std::io::ErrorKind::WouldBlock)), "a place in its queue is taken");
    drop(other);
    std::fs::remove_file(path).unwrap();
    daemon.wait_for("export show e", |export| export["state"] == "listening");
    daemon.stop();
}

/// Mode, user and group of an export's socket.
fn whose(daemon: &Daemon, name: &str) -> (u32, u32, u32) {
    let its = daemon.path(&format!("export/{name}.sock")).symlink_metadata().unwrap();
    (its.mode() & 0o777, its.uid(), its.gid())
}

/// It finds its guest's socket as it was, whoever made it anew: else the guest has no disk.
#[test]
fn a_socket_belongs_to_whom_it_was_given_to_after_kills_and_upgrades() {
    if !rustix::process::geteuid().is_root() {
        return not_tried("only root can give sockets away");
    }
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    let others = "--socket-user 12345 --socket-group daemon --socket-mode 0660";
    for kind in ["vhost-user-blk", "nbd"] {
        daemon.ok(&format!("export create e --volume v --kind {kind} {others}"));
        let group = whose(&daemon, "e").2;
        assert_ne!(group, 0, "daemon, by its name");
        let given = (0o660, 12345, group);
        assert_eq!(whose(&daemon, "e"), given);
        daemon.kill();
        daemon.start_again();
        assert_eq!(whose(&daemon, "e"), given);
        daemon.ok("upgrade");
        assert_eq!(whose(&daemon, "e"), given);
        daemon.ok("export set e --socket-mode 606 --socket-user root");
        assert_eq!(whose(&daemon, "e"), (0o606, 0, group));
        daemon.ok("export set e --socket-user 12346");
        daemon.stop();
        daemon.start_again();
        assert_eq!(whose(&daemon, "e"), (0o606, 12346, group));
        let shown = daemon.json("export show e")["socket_access"].clone();
        let number = group.to_string();
        let known = serde_json::json!({ "user": "12346", "group": number, "mode": "0606" });
        assert_eq!(shown, known);
        let said = daemon.ok("export show e");
        let text = format!("socket    user 12346, group {number}, mode 0606");
        assert!(said.contains(&text), "{said}");
        daemon.ok("export delete e");
    }
}

#[test]
fn who_cannot_be_let_in_is_named() {
    let daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    let create = "export create e --volume v";
    for (option, said) in [("user", "no user no-such"), ("group", "no group no-such")] {
        let refused = daemon.refused(&format!("{create} --socket-{option} no-such"));
        assert!(refused.contains(said), "{refused}");
    }
    assert!(!daemon.path("export/e.sock").exists());
    for elsewhere in ["--kind nbd --listen 127.0.0.77:1", "--kind ublk", "--kind fuse --path /f"] {
        let refused = daemon.refused(&format!("{create} {elsewhere} --socket-mode 0660"));
        assert!(refused.contains("no Unix socket"), "{refused}");
    }
    assert!(daemon.misused(&format!("{create} --socket-mode rw")).contains("0660"));
    daemon.ok(&format!("{create} --socket-mode 0666"));
    assert_eq!(whose(&daemon, "e").0, 0o666);
    let refused = daemon.refused("export set e --socket-user no-such --socket-mode 0600");
    assert!(refused.contains("no user no-such"), "{refused}");
    assert_eq!(whose(&daemon, "e").0, 0o666);
    if !rustix::process::geteuid().is_root() {
        return not_tried("only root can give sockets away");
    }
    // Its number is kept: who is looked up when the daemon starts may be unknown by then.
    daemon.ok("export set e --socket-user root");
    let access = daemon.json("export show e")["socket_access"].clone();
    assert_eq!((&access["user"], &access["mode"]), (&"0".into(), &"0666".into()));
}

#[test]
fn what_is_deleted_or_stopped_while_it_is_down_stays_so() {
    let mut daemon = Daemon::with_array(1, 2);
    ["e0", "e1"].iter().for_each(|drive| daemon.attach_new(drive));
    daemon.ok("array create b --level 1 --drives e0,e1");
    let names = ["deleted", "stopped", "tried"];
    let path = |daemon: &Daemon, name: &str| daemon.path(&format!("{name}.sock"));
    for (name, array) in names.iter().zip(["a", "a", "b"]) {
        daemon.ok(&format!("volume create {name} --array {array} --size 16M"));
        daemon.ok(&format!("export create {name} --volume {name} --path @/{name}.sock"));
    }
    daemon.stop();
    let taken = names.map(|name| UnixListener::bind(path(&daemon, name)).unwrap());
    daemon.start_again();
    daemon.ok("export delete deleted");
    daemon.ok("array stop a");
    drop(taken);
    names.iter().for_each(|name| std::fs::remove_file(path(&daemon, name)).unwrap());
    daemon.wait_for("export show tried", |export| export["state"] == "listening");
    assert!(!path(&daemon, "deleted").exists() && !path(&daemon, "stopped").exists());
    daemon.ok("array start a");
    assert_eq!(daemon.json("export show stopped")["state"], "listening");
}
