//! Goal: a guest gets the volume that was exported to it, or none; an export that cannot be says
//! why, and no other notices.
//! Method: volumes are deleted on another host, and others made by their names; ports are taken.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::net::TcpListener;

use daemon::Daemon;
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

#[test]
fn a_port_that_is_taken_is_refused_and_at_a_start_waited_for() {
    for kind in ["nvme-tcp", "nbd"] {
        let mut daemon = Daemon::with_array(1, 2);
        daemon.ok("volume create v --array a --size 16M");
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let at = taken.local_addr().unwrap();
        let create = format!("export create e --volume v --kind {kind} --listen {at}");
        let said = daemon.refused(&create);
        assert!(said.contains(&at.to_string()) && said.contains("in use"), "{said}");
        assert_eq!(daemon.json("export list"), Value::Array(Vec::new()));
        drop(taken);
        daemon.ok(&create);
        daemon.ok("export create w --volume v");
        daemon.stop();
        let taken = TcpListener::bind(at).unwrap();
        daemon.start_again();
        assert_eq!(daemon.json("export show w")["state"], "listening");
        let export = daemon.json("export show e");
        assert_eq!(export["state"], "down");
        assert!(export["error"].as_str().unwrap().contains(&at.to_string()), "{export}");
        drop(taken);
        daemon.wait_for("export show e", |export| export["state"] == "listening");
    }
}
