//! Goal: what a drive carries is lost only if the operator agreed to that for this very drive.
//! Method: drives are taken by force, then others get their names and paths.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;
use std::os::unix::fs::FileExt;

use daemon::{DRIVE_BYTES, Daemon};

const PRECIOUS: &[u8] = b"precious";

/// A file with data near both ends.
fn make_precious(daemon: &Daemon, name: &str) {
    let file = File::options().write(true).open(daemon.make_drive(name)).unwrap();
    file.write_all_at(PRECIOUS, 4096).unwrap();
    file.write_all_at(PRECIOUS, DRIVE_BYTES - 4096).unwrap();
}

fn is_precious(daemon: &Daemon, name: &str) -> bool {
    let file = File::open(daemon.path(&format!("{name}.img"))).unwrap();
    [4096, DRIVE_BYTES - 4096].into_iter().all(|offset| {
        let mut bytes = [0; PRECIOUS.len()];
        file.read_exact_at(&mut bytes, offset).unwrap();
        bytes == PRECIOUS
    })
}

fn rename(daemon: &Daemon, from: &str, to: &str) {
    std::fs::rename(daemon.path(from), daemon.path(to)).unwrap();
}

#[test]
fn what_is_taken_by_force_is_wiped_at_once() {
    let mut daemon = Daemon::with_array(1, 2);
    make_precious(&daemon, "s0");
    daemon.refused("drive attach @/s0.img");
    assert!(is_precious(&daemon, "s0"));
    daemon.ok("drive attach @/s0.img --force");
    assert_eq!(daemon.json("drive show s0")["content"], "blank");
    assert!(!is_precious(&daemon, "s0"));
    // A label is no reason to refuse a drive, so force does not wipe it; for a spare it is one.
    daemon.ok("array create b --level 0 --drives s0");
    daemon.ok("array stop b");
    daemon.ok("drive detach s0");
    daemon.ok("drive attach @/s0.img --force");
    assert_eq!(daemon.json("drive show s0")["content"], "member 0 of array b");
    daemon.refused("spare add s0");
    daemon.ok("spare add s0 --force");
    assert_eq!(daemon.json("drive show s0")["content"], "blank");
    // So it needs nobody's consent to take over, also after a restart.
    daemon.ok("array set a --spare-delay 0s");
    daemon.stop();
    daemon.start_again();
    daemon.ok("drive detach d1 --force");
    daemon.wait_for("array show a", |array| array["members"][1]["drive"] == "s0");
}

#[test]
fn another_drive_by_the_name_of_one_taken_by_force_is_left_alone() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.attach_new("o");
    daemon.ok("array create b --level 0 --drives o");
    daemon.ok("volume create v --array b --size 1M");
    daemon.ok("array stop b");
    daemon.ok("drive detach o");
    for name in ["s0", "s1"] {
        make_precious(&daemon, name);
        daemon.ok(&format!("drive attach @/{name}.img --force"));
    }
    daemon.ok("spare add s0 --force");
    daemon.ok("array set a --spare-delay 0s");
    daemon.stop();
    make_precious(&daemon, "s1");
    rename(&daemon, "o.img", "s0.img");
    daemon.start_again();
    assert_eq!(daemon.json("drive show s1")["state"], "missing");
    assert!(is_precious(&daemon, "s1"));
    // What has a label is attached, but it was not that which might be overwritten.
    for attached_by_hand in [false, true] {
        if attached_by_hand {
            daemon.stop();
            rename(&daemon, "s0.img", "o.img");
            daemon.start_again();
            assert_eq!(daemon.json("drive show s0")["state"], "missing");
            daemon.ok("drive attach @/o.img --name s0");
        } else {
            daemon.ok("drive detach d1 --force");
        }
        daemon.wait_for("spare list", |spares| !spares[0]["error"].is_null());
        assert_eq!(daemon.json("drive show s0")["content"], "member 0 of array b");
    }
    daemon.ok("spare remove s0");
    daemon.ok("array start b");
    daemon.ok("volume show v");
}
