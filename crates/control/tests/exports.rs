//! Goal: a guest gets the volume that was exported to it, or none.
//! Method: the volume of an export is deleted on another host, and another made by its name.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

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
