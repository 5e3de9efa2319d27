//! Goal: an array uses the space of larger drives, from the command line, and is told why where it
//! cannot.
//! Method: files of drives are made longer, or replaced by longer ones, under a daemon.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;

use daemon::{DRIVE_BYTES, Daemon};

fn lengthen(daemon: &Daemon, drive: &str, bytes: u64) {
    let path = daemon.path(&format!("{drive}.img"));
    File::options().write(true).open(path).unwrap().set_len(bytes).unwrap();
}

fn capacity(daemon: &Daemon) -> u64 {
    daemon.json("array show a")["capacity_bytes"].as_u64().unwrap()
}

#[test]
fn files_that_grew() {
    let mut daemon = Daemon::with_array(5, 3);
    let before = capacity(&daemon);
    daemon.ok(&format!("volume create v --array a --size {before}"));
    let said = daemon.refused("array grow a");
    assert!(said.contains("nothing to gain") && said.contains("fix: "), "{said}");
    for drive in ["d0", "d1"] {
        lengthen(&daemon, drive, DRIVE_BYTES + (32 << 20));
    }
    // Not those that are larger, but the one that is not.
    let output = daemon.run("array grow a");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("member 2") && said.contains("drive d2 of 64M"), "{said}");
    lengthen(&daemon, "d2", DRIVE_BYTES + (24 << 20));
    let said = daemon.ok("array grow a");
    assert!(said.contains("gained 48M"), "{said}");
    let after = capacity(&daemon);
    assert_eq!(after - before, 48 << 20);
    daemon.ok(&format!("volume resize v --size {after}"));
    assert_eq!(daemon.json("drive show d0")["bytes"], DRIVE_BYTES + (32 << 20));
    for by_force in [false, true] {
        if by_force {
            daemon.kill();
        } else {
            daemon.stop();
        }
        daemon.start_again();
        assert_eq!(capacity(&daemon), after);
        assert_eq!(daemon.array_state("a"), "optimal");
        assert_eq!(daemon.json("volume show v")["bytes"], after);
    }
    daemon.ok("array scrub a --wait");
    assert!(daemon.refused("array grow a").contains("member 2"));
    assert!(daemon.refused("array grow b").contains("no array b"));
    daemon.misused("array grow");
}

/// Their journals stay as small as they were; that of a new drive would be larger, and leave less.
#[test]
fn drives_of_the_same_size_fit_where_files_grew() {
    let daemon = Daemon::with_array(5, 3);
    let bytes = 4 * DRIVE_BYTES;
    for drive in ["d0", "d1", "d2"] {
        lengthen(&daemon, drive, bytes);
    }
    daemon.ok("array grow a");
    for spare in ["s0", "s1"] {
        daemon.make_drive(spare);
        lengthen(&daemon, spare, bytes);
        daemon.ok(&format!("drive attach @/{spare}.img"));
    }
    daemon.ok("array replace a --member 0 --new s0 --force --wait");
    daemon.ok("spare add s1");
    daemon.ok("array set a --spare-delay 0");
    daemon.ok("drive detach d1 --force");
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    assert_eq!(daemon.json("drive show s1")["state"], "member");
}

#[test]
fn larger_drives_in_place_of_the_old_ones() {
    let daemon = Daemon::with_array(1, 2);
    let before = capacity(&daemon);
    daemon.ok("volume create v --array a --size 8M");
    for index in 0..2 {
        let new = format!("n{index}");
        daemon.make_drive(&new);
        lengthen(&daemon, &new, 2 * DRIVE_BYTES);
        daemon.ok(&format!("drive attach @/{new}.img"));
        let line = format!("array replace a --member {index} --new {new} --force --wait");
        daemon.ok(&line);
    }
    daemon.ok("drive detach d0");
    daemon.ok("array grow a");
    // Their journals are larger, too.
    assert!(capacity(&daemon) >= before + DRIVE_BYTES * 9 / 10);
    daemon.ok("drive detach n1 --force");
    let said = daemon.refused("array grow a");
    assert!(said.contains("all members") && said.contains("fix: "), "{said}");
    // What was large enough once is not any more.
    let said = daemon.refused("array replace a --member 1 --new d1 --force");
    assert!(said.contains("too small"), "{said}");
}

#[test]
fn drives_are_added() {
    let mut daemon = Daemon::with_array(5, 3);
    let before = capacity(&daemon);
    daemon.ok("volume create v --array a --size 32M");
    for name in ["n0", "n1", "n2"] {
        daemon.attach_new(name);
    }
    let said = daemon.refused("array grow a --add n0,n0");
    assert!(said.contains("named twice"), "{said}");
    assert!(daemon.refused("array grow a --add d0").contains("in use"));
    assert!(daemon.refused("array grow a --add x").contains("no drive x"));
    daemon.misused("array grow a --force");
    let said = daemon.ok("array grow a --add n0 --wait");
    assert!(said.contains("gained"), "{said}");
    assert_eq!(capacity(&daemon), before / 2 * 3);
    assert!(daemon.ok("array show a").contains("RAID 5, 3+1"));
    // Goes on after a crash.
    daemon.ok("array grow a --add n1");
    daemon.kill();
    daemon.start_again();
    daemon.wait_for("array show a", |array| array["capacity_bytes"] == before / 2 * 4);
    assert_eq!(daemon.array_state("a"), "optimal");
    assert_eq!(daemon.json("drive show n1")["state"], daemon.json("drive show d0")["state"]);
    daemon.ok("array scrub a --wait");
    daemon.ok(&format!("volume resize v --size {}", before / 2 * 4));
    // One too small, and a level that cannot.
    daemon.make_drive("m0");
    daemon.make_drive("m1");
    daemon.ok("drive attach @/m0.img");
    daemon.ok("drive attach @/m1.img");
    daemon.ok("array create b --level 1 --drives m0,m1");
    let said = daemon.refused("array grow b --add n2");
    assert!(said.contains("levels 0, 5") && said.contains("fix: "), "{said}");
}

#[test]
fn arrays_with_checksums() {
    let mut daemon = Daemon::with_drives(3);
    daemon.ok("array create a --level 5 --drives d0,d1,d2 --integrity");
    let before = capacity(&daemon);
    daemon.ok(&format!("volume create v --array a --size {before}"));
    daemon.attach_new("n0");
    daemon.ok("array grow a --add n0");
    daemon.kill();
    daemon.start_again();
    daemon.wait_for("array show a", |array| array["capacity_bytes"] == before / 2 * 3);
    let array = daemon.json("array show a");
    let seen = (&array["integrity"], &array["state"]);
    assert_eq!(seen, (&true.into(), &"optimal".into()), "{}", daemon.log());
    // Every block of every member is read, and verified.
    daemon.ok("array scrub a --wait");
    for drive in ["d0", "d1", "d2", "n0"] {
        assert!(daemon.ok(&format!("drive show {drive}")).contains("wrong     0 blocks, 0 che"));
        lengthen(&daemon, drive, 2 << 30);
    }
    // A mebibyte of checksums was laid out: of 960 MiB.
    daemon.ok("array grow a");
    assert_eq!(capacity(&daemon), 3 * (960 << 20));
    let said = daemon.refused("array grow a");
    assert!(said.contains("checksums of 960M") && said.contains("fix: "), "{said}");
    assert!(said.contains("array replace a --member 0 --new DRIVE"), "{said}");
}
