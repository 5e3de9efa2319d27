//! Goal: an array serves on one host at a time, and a host that is gone does not keep it.
//! Method: daemons that call themselves different hosts, one after the other on the same files;
//! where two would have to hold the files at once, the test writes the other host's leases.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::process::Output;

use ashlar_format::lease::{Lease, SLOTS};
use ashlar_format::record::{self, name_field};
use daemon::Daemon;
use serde_json::Value;
use uuid::Uuid;
use zerocopy::IntoBytes;

const DRIVES: usize = 3;
const TRIES: u32 = 10;

fn attach_all(daemon: &Daemon) {
    (0..DRIVES).for_each(|number| drop(daemon.ok(&format!("drive attach @/d{number}.img"))));
}

fn lease(daemon: &Daemon) -> Value {
    daemon.json("inspect @/d0.img")["lease"].clone()
}

/// Another host writes a lease on every drive.
fn write_lease(daemon: &Daemon, host: u8, epoch: u64, beat: u64) {
    write_leases(daemon, 0..DRIVES, [host; 16], (epoch, beat));
}

fn write_leases(daemon: &Daemon, drives: Range<usize>, host: [u8; 16], (epoch, beat): (u64, u64)) {
    for number in drives {
        let report = daemon.json(&format!("inspect @/d{number}.img"));
        let label = &report["label"];
        let uuid = |field: &str| Uuid::parse_str(label[field].as_str().unwrap()).unwrap();
        let areas = label["areas"].as_array().unwrap();
        let area = areas.iter().find(|area| area["name"] == "lease").unwrap();
        let home = area["offset"].as_u64().unwrap() + beat % SLOTS * Lease::BYTES;
        let mut lease = Lease::free(uuid("array").into_bytes());
        lease.host = host;
        lease.host_name = name_field("elsewhere").unwrap();
        lease.epoch = epoch.into();
        lease.beat = beat.into();
        record::seal(&mut lease, uuid("drive").into_bytes(), home, beat);
        let file = File::options().write(true).open(daemon.path(&format!("d{number}.img")));
        file.unwrap().write_all_at(lease.as_bytes(), home).unwrap();
    }
}

/// What a command says while another host has the array.
fn while_another_beats(daemon: &Daemon, first_beat: u64, line: &str) -> Output {
    std::thread::scope(|scope| {
        let command = scope.spawn(|| daemon.run(line));
        let mut beats = first_beat..;
        while !command.is_finished() {
            write_lease(daemon, 9, 7, beats.next().unwrap());
        }
        command.join().unwrap()
    })
}

#[test]
fn a_stopped_array_starts_on_another_host_at_once() {
    let mut daemon = Daemon::with_array(5, DRIVES);
    daemon.ok("volume create v --array a --size 16M");
    assert!(lease(&daemon)["host"].is_string());
    for host in 1..=2 {
        daemon.stop();
        assert_eq!(lease(&daemon)["host"], Value::Null);
        daemon.start_on_host(host);
        attach_all(&daemon);
        daemon.ok("array start --scan");
        assert_eq!(daemon.array_state("a"), "optimal");
        daemon.ok("volume show v");
        let holder = format!("00000000-0000-0000-0000-{host:012}");
        assert_eq!(lease(&daemon)["host"], holder);
    }
    daemon.ok("array stop a");
    assert_eq!(lease(&daemon)["host"], Value::Null);
}

/// The drive that is left says that all is well; it was left behind on the other host.
#[test]
fn what_a_host_remembers_is_outdated_once_another_had_the_array() {
    let mut daemon = Daemon::with_array(1, 2);
    daemon.ok("volume create v --array a --size 16M");
    daemon.stop();
    let away = |daemon: &Daemon, from: &str, to: &str| {
        std::fs::rename(daemon.path(from), daemon.path(to)).unwrap();
    };
    // As long as nobody else had it, what is remembered holds.
    away(&daemon, "d1.img", "away");
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "degraded");
    daemon.stop();
    away(&daemon, "away", "d1.img");
    daemon.start_again();
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
    daemon.stop();
    daemon.start_on_host(1);
    for number in 0..2 {
        daemon.ok(&format!("drive attach @/d{number}.img"));
    }
    daemon.ok("array start --scan");
    daemon.ok("drive detach d0 --force");
    daemon.ok("volume create w --array a --size 16M");
    daemon.stop();
    away(&daemon, "d1.img", "away");
    daemon.start_on_first_host();
    assert_eq!(daemon.array_state("a"), "unavailable");
    let said = daemon.refused("array start a");
    assert!(said.contains("newer data") && said.contains("--force"), "{said}");
    daemon.ok("drive attach @/away --name d1");
    daemon.ok("array start a");
    daemon.ok("volume show w");
    daemon.wait_for("array show a", |array| array["state"] == "optimal");
}

#[test]
fn a_host_that_died_is_replaced_when_its_lease_stands_still() {
    let mut daemon = Daemon::with_array(5, DRIVES);
    daemon.ok("volume create v --array a --size 16M");
    daemon.kill();
    let epoch = lease(&daemon)["epoch"].as_u64().unwrap();
    daemon.start_on_host(1);
    attach_all(&daemon);
    daemon.ok("array start --scan");
    assert_eq!(daemon.array_state("a"), "optimal");
    daemon.ok("volume show v");
    assert!(lease(&daemon)["epoch"].as_u64().unwrap() > epoch);
}

#[test]
fn a_host_that_lives_is_left_its_array() {
    let mut daemon = Daemon::with_array(5, DRIVES);
    daemon.kill();
    daemon.start_on_host(1);
    attach_all(&daemon);
    let refused = while_another_beats(&daemon, 1000, "array start --scan");
    let said = String::from_utf8_lossy(&refused.stderr);
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("array a is in use by host elsewhere (its lease is alive)"), "{said}");
    assert!(said.contains("--force, which risks that both hosts write"), "{said}");
    assert_eq!(lease(&daemon)["epoch"], 7, "nothing was written");
    let said = daemon.ok("array start --scan --force");
    assert!(said.contains("started"), "{said}");
    assert_eq!(lease(&daemon)["epoch"], 8);
}

#[test]
fn a_host_that_lost_its_array_stops_to_serve_it() {
    let daemon = Daemon::with_array(5, DRIVES);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("export create e --volume v");
    write_lease(&daemon, 9, 7, 1000);
    daemon.wait_for("array show a", |array| {
        let why = array["error"].as_str().unwrap_or("");
        why.contains("host elsewhere has taken array a over")
    });
    assert_eq!(daemon.array_state("a"), "unavailable");
    assert_eq!(daemon.json("export show e")["state"], "down");
    assert_eq!(lease(&daemon)["epoch"], 7, "nothing was written any more");
    daemon.refused("volume create w --array a --size 1M");
    daemon.ok("array start a --force");
    assert_eq!(daemon.array_state("a"), "optimal");
    assert_eq!(daemon.json("export show e")["state"], "listening");
}

#[test]
fn drives_that_another_host_uses_are_not_overwritten_by_force() {
    let daemon = Daemon::with_array(5, DRIVES);
    daemon.ok("array stop a");
    write_lease(&daemon, 9, 7, 999);
    for (beat, line) in [
        (1000, "array create b --level 5 --drives d0,d1,d2 --force"),
        (2000, "spare add d1 --force"),
        (3000, "array delete a --force"),
    ] {
        let output = while_another_beats(&daemon, beat, line);
        let said = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&said);
        assert!(said.contains("in use by host elsewhere (its lease is alive)"), "{line}: {said}");
        let forgotten = said.contains("only forgotten here");
        assert_eq!(output.status.code(), Some(i32::from(!forgotten)), "{line}: {said}");
        assert_eq!(forgotten, line.contains("delete"), "{line}: {said}");
    }
    daemon.refused("array show a");
    assert_eq!(daemon.json("drive show d1")["content"], "member 1 of array a");
    assert_eq!(lease(&daemon)["host"], Uuid::from_bytes([9; 16]).to_string());
    // That host has died.
    daemon.ok("array create b --level 5 --drives d0,d1,d2 --force");
    assert_eq!(daemon.array_state("b"), "optimal");
}

#[test]
fn an_array_that_another_host_takes_while_it_is_deleted_is_not_wiped() {
    let deleted = || {
        let daemon = Daemon::with_array(5, DRIVES);
        // Its lease is on one of the drives so far.
        write_leases(&daemon, 0..1, [9; 16], (7, 1000));
        let said = daemon.ok("array delete a --force");
        let is_late = daemon.log().contains("host elsewhere has taken array a over");
        (!is_late).then_some((daemon, said))
    };
    let (daemon, said) = (0..TRIES).find_map(|_| deleted()).expect("it is lost before each time");
    let left = "is left as it is: host elsewhere has taken the array";
    for number in 0..DRIVES {
        assert!(said.contains(&format!("drive d{number} {left}")), "{said}");
        let content = &daemon.json(&format!("drive show d{number}"))["content"];
        assert_eq!(*content, format!("member {number} of array a"));
    }
    assert_eq!(lease(&daemon)["host"], Uuid::from_bytes([9; 16]).to_string());
}

/// What is on a drive here is on the other's as well: as if both hosts reached it.
fn give(from: &Daemon, to: &Daemon, drive: &str) {
    let bytes = std::fs::read(from.path(&format!("{drive}.img"))).unwrap();
    let file = File::options().write(true).open(to.path(&format!("{drive}.img"))).unwrap();
    file.write_all_at(&bytes, 0).unwrap();
}

#[test]
fn drives_that_became_another_array_elsewhere_are_not_wiped_with_the_old_one() {
    let daemon = Daemon::with_array(5, DRIVES);
    daemon.ok("array stop a");
    let other = Daemon::start_beside(1, &[]);
    ["d0", "d1", "d2"].iter().for_each(|drive| other.attach_new(drive));
    // One of them is still the old array's.
    other.ok("array create b --level 1 --drives d0,d1");
    other.ok("array stop b");
    ["d0", "d1"].iter().for_each(|drive| give(&other, &daemon, drive));
    daemon.ok("array delete a --force");
    for (drive, content) in [("d0", "member 0 of array b"), ("d1", "member 1 of array b")] {
        assert_eq!(daemon.json(&format!("drive show {drive}"))["content"], content);
    }
    assert_eq!(daemon.json("drive show d2")["content"], "blank");
    daemon.ok("array start --scan");
    assert_eq!(daemon.array_state("b"), "optimal");
}

#[test]
fn a_blank_drive_that_became_a_member_elsewhere_is_one_here() {
    let daemon = Daemon::with_array(5, DRIVES);
    daemon.attach_new("d3");
    daemon.ok("array stop a");
    let other = Daemon::start_beside(1, &[]);
    for drive in ["d0", "d1", "d2", "d3"] {
        other.make_drive(drive);
        give(&daemon, &other, drive);
        other.ok(&format!("drive attach @/{drive}.img"));
    }
    other.ok("array start --scan");
    other.ok("drive detach d1 --force");
    other.ok("array replace a --member 1 --new d3 --wait");
    other.ok("array stop a");
    ["d0", "d2", "d3"].iter().for_each(|drive| give(&other, &daemon, drive));
    daemon.ok("array start a");
    assert_eq!(daemon.array_state("a"), "optimal");
    assert_eq!(daemon.json("drive show d3")["content"], "member 1 of array a");
}

/// The epoch since which no other host has had the array, and the one it has now.
fn since(daemon: &Daemon) -> (u64, u64) {
    let catalog = std::fs::read(daemon.path("state/catalog.json")).unwrap();
    let catalog: Value = serde_json::from_slice(&catalog).unwrap();
    let array = catalog["arrays"].as_object().unwrap().values().next().unwrap();
    (array["since"].as_u64().unwrap(), array["epoch"].as_u64().unwrap())
}

#[test]
fn daemons_that_were_killed_or_could_not_start_it_are_not_other_hosts() {
    let mut daemon = Daemon::with_array(5, DRIVES);
    let (first, epoch) = since(&daemon);
    let us = Uuid::parse_str(lease(&daemon)["host"].as_str().unwrap()).unwrap().into_bytes();
    let next_start = |daemon: &mut Daemon| {
        daemon.start_again();
        assert_eq!(daemon.array_state("a"), "optimal");
        daemon.kill();
        since(daemon)
    };
    daemon.kill();
    // One was killed between two drives.
    write_leases(&daemon, 1..DRIVES, us, (epoch + 1, 10_000));
    assert_eq!(next_start(&mut daemon), (first, epoch + 2));
    // What it cannot read is given back later: it has taken the array for that.
    let table = daemon.json("inspect @/d0.img")["label"]["areas"].clone();
    let table = table.as_array().unwrap().iter().find(|area| area["name"] == "volume table");
    let [at, len] = ["offset", "bytes"].map(|field| table.unwrap()[field].as_u64().unwrap());
    let files: Vec<File> = (0..DRIVES)
        .map(|number| daemon.path(&format!("d{number}.img")))
        .map(|path| File::options().read(true).write(true).open(path).unwrap())
        .collect();
    let len = usize::try_from(len).unwrap();
    let mut tables = vec![vec![0; len]; DRIVES];
    for (file, table) in files.iter().zip(&mut tables) {
        file.read_exact_at(table, at).unwrap();
        file.write_all_at(&vec![1; len], at).unwrap();
    }
    daemon.start_again();
    assert_eq!(daemon.array_state("a"), "unavailable");
    let taken = lease(&daemon)["epoch"].as_u64().unwrap();
    assert!(taken > epoch + 2, "{taken}");
    daemon.kill();
    for (file, table) in files.iter().zip(&tables) {
        file.write_all_at(table, at).unwrap();
    }
    assert_eq!(next_start(&mut daemon).0, first);
    // Another host saw the last drive only, took what we took on the others, and gave it back.
    let epoch = since(&daemon).1;
    write_leases(&daemon, 0..2, us, (epoch + 1, 20_000));
    write_leases(&daemon, 2..DRIVES, [0; 16], (epoch + 1, 20_001));
    assert_eq!(next_start(&mut daemon), (epoch + 2, epoch + 2));
    // Nobody knows who had it between ours.
    write_leases(&daemon, 0..DRIVES, us, (epoch + 4, 30_000));
    assert_eq!(next_start(&mut daemon), (epoch + 5, epoch + 5));
}
