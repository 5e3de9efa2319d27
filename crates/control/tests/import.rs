//! Goal: drives that contradict each other, or that are not what they say, are refused with the
//! reason and what to do, and nothing is written to them.
//! Method: each contradiction is written on the drives of a stopped array; all bytes of all drives
//! are compared before and after.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;

use ashlar_format::array_superblock::{ArraySuperblock, SLOTS};
use ashlar_format::bad_blocks::BadBlocks;
use ashlar_format::drive_label::{DriveLabel, StoredArea};
use ashlar_format::lease::Lease;
use ashlar_format::record::{self, Record, payload_checksum};
use ashlar_format::region_map::RegionMapPage;
use ashlar_format::scrub_report::{Phase, ScrubReport};
use ashlar_format::volume_table::VolumeTable;
use daemon::{DRIVE_BYTES, Daemon};
use zerocopy::IntoBytes;

/// Arrays `a` on d0 and d1, `b` on d2 and d3; both stopped.
fn two_stopped_arrays() -> Daemon {
    let daemon = Daemon::with_drives(4);
    daemon.ok("array create a --level 1 --drives d0,d1");
    daemon.ok("array create b --level 1 --drives d2,d3");
    daemon.ok("array stop a");
    daemon.ok("array stop b");
    daemon
}

fn file(daemon: &Daemon, drive: &str) -> File {
    let path = daemon.path(&format!("{drive}.img"));
    File::options().read(true).write(true).open(path).unwrap()
}

fn read<T: Record>(file: &File, home: u64) -> Option<T> {
    let mut bytes = vec![0; size_of::<T>()];
    file.read_exact_at(&mut bytes, home).unwrap();
    record::open::<T>(&bytes, None, home).ok()?;
    T::read_from_bytes(&bytes).ok()
}

fn label(file: &File) -> DriveLabel {
    read(file, 0).unwrap()
}

/// Changes every good copy of a record.
fn change<T: Record>(file: &File, homes: &[u64], change: impl Fn(&mut T)) {
    for home in homes {
        let Some(mut record) = read::<T>(file, *home) else { continue };
        let (owner, sequence) = (record.header().owner, record.header().sequence.get());
        change(&mut record);
        record::seal(&mut record, owner, *home, sequence);
        file.write_all_at(record.as_bytes(), *home).unwrap();
    }
}

fn superblocks(file: &File) -> Vec<u64> {
    let start = label(file).layout().superblocks.offset;
    (0..SLOTS).map(|slot| start + slot * ArraySuperblock::BYTES).collect()
}

/// As a newer build would write it.
fn make_newer(file: &File, home: u64, len: u64) {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    file.read_exact_at(&mut bytes, home).unwrap();
    bytes[10..12].copy_from_slice(&99_u16.to_le_bytes());
    bytes[16..20].fill(0);
    let sum = payload_checksum(&bytes);
    bytes[16..20].copy_from_slice(&sum.to_le_bytes());
    file.write_all_at(&bytes, home).unwrap();
}

/// What is said to a command that is refused and writes nothing to any drive.
fn untouched(daemon: &Daemon, line: &str) -> String {
    let all = || {
        let drives = (0..4).map(|number| {
            let mut bytes = Vec::new();
            file(daemon, &format!("d{number}")).read_to_end(&mut bytes).unwrap();
            payload_checksum(&bytes)
        });
        drives.collect::<Vec<u32>>()
    };
    let before = all();
    let said = daemon.refused(line);
    assert!(said.contains("\nfix: "), "{said}");
    assert_eq!(all(), before, "{line} wrote something");
    said
}

#[test]
fn one_drive_and_two_arrays() {
    let daemon = two_stopped_arrays();
    let theirs = label(&file(&daemon, "d2")).header.owner;
    for drive in ["d0", "d1"] {
        let file = file(&daemon, drive);
        change(&file, &superblocks(&file), |its: &mut ArraySuperblock| {
            its.members[1].drive = theirs;
        });
    }
    let said = untouched(&daemon, "array start a");
    assert!(said.contains("two arrays claim drive d2"), "{said}");
    assert!(said.contains("member 0 of array b"), "{said}");
    // Its own array has it.
    daemon.ok("array start b");
    assert!(daemon.refused("array start a").contains("two arrays claim drive d2"));
}

#[test]
fn one_drive_with_the_labels_of_two() {
    let mut daemon = two_stopped_arrays();
    daemon.stop();
    let other = label(&file(&daemon, "d2")).array;
    change(&file(&daemon, "d0"), &[4096], |its: &mut DriveLabel| its.array = other);
    daemon.start_again();
    let missing = daemon.json("drive show d0");
    assert!(missing["error"].as_str().unwrap().contains("different arrays"), "{missing}");
    let said = untouched(&daemon, "drive attach @/d0.img");
    assert!(said.contains("its copies name different arrays"), "{said}");
    assert!(said.contains("ashlar inspect") && said.contains("--force"), "{said}");
    daemon.ok("array start a");
    assert_eq!(daemon.array_state("a"), "degraded");
}

#[test]
fn a_member_without_room_for_its_data() {
    let daemon = two_stopped_arrays();
    let homes = [0, 4096, DRIVE_BYTES - 4096];
    change(&file(&daemon, "d1"), &homes, |its: &mut DriveLabel| {
        let StoredArea { offset, len } = its.data;
        its.data = StoredArea { offset, len: (len.get() / 2 / 4096 * 4096).into() };
    });
    let said = untouched(&daemon, "array start a");
    assert!(said.contains("the label of drive d1 leaves"), "{said}");
    daemon.ok("drive detach d1");
    daemon.ok("array start a");
}

#[test]
fn what_a_newer_build_wrote() {
    let mut daemon = two_stopped_arrays();
    let superblock = superblocks(&file(&daemon, "d0"))[1];
    make_newer(&file(&daemon, "d0"), superblock, ArraySuperblock::BYTES);
    // A start looks at the drives anew, and shows what they carry.
    daemon.run("array start a");
    let said = untouched(&daemon, "array start a");
    assert!(said.contains("drive d0 was written by a newer build"), "{said}");
    assert!(said.contains("superblock version 99"), "{said}");
    let said = untouched(&daemon, "array start a --force");
    assert!(said.contains("newer build"), "{said}");
    let d2 = file(&daemon, "d2");
    let (owner, array) = (label(&d2).header.owner, label(&d2).array);
    let areas = label(&d2).layout();
    // There is none before a block is lost.
    let mut list = BadBlocks::empty(array);
    record::seal(&mut *list, owner, areas.bad_blocks.offset, 1);
    d2.write_all_at(list.as_bytes(), areas.bad_blocks.offset).unwrap();
    // Nor this before a scrub.
    let reports = ScrubReport::area(&areas).unwrap();
    let mut report = ScrubReport::new(array, Phase::Finished);
    record::seal(&mut report, owner, reports.offset, 1);
    d2.write_all_at(report.as_bytes(), reports.offset).unwrap();
    for (what, area, len) in [
        ("scrub report", reports, ScrubReport::BYTES),
        ("dirty map", areas.dirty_map, RegionMapPage::BYTES),
        ("written map", areas.written_map, RegionMapPage::BYTES),
        ("missed map", areas.missed_map, RegionMapPage::BYTES),
        ("volume table", areas.volume_table, VolumeTable::BYTES),
        ("bad blocks", areas.bad_blocks, BadBlocks::BYTES),
        ("lease", areas.lease, Lease::BYTES),
    ] {
        let mut before = vec![0; usize::try_from(len).unwrap()];
        let slots = [area.offset, area.offset + len];
        let mut used = slots.into_iter().filter(|home| {
            d2.read_exact_at(&mut before, *home).unwrap();
            before.starts_with(&record::MAGIC)
        });
        let home = used.next().expect(what);
        make_newer(&d2, home, len);
        let said = untouched(&daemon, "array start b");
        assert!(said.contains(&format!("newer build ({what} version 99)")), "{said}");
        d2.write_all_at(&before, home).unwrap();
    }
    daemon.stop();
    for home in [0, 4096, DRIVE_BYTES - 4096] {
        make_newer(&file(&daemon, "d2"), home, DriveLabel::BYTES);
    }
    daemon.start_again();
    let said = untouched(&daemon, "drive attach @/d2.img");
    assert!(said.contains("a label of version 99, by a newer Ashlar"), "{said}");
    assert!(said.contains("start the ashlar that wrote it"), "{said}");
    let said = daemon.refused("inspect @/d2.img");
    assert!(said.contains("fix: use the `ashlar` that wrote it"), "{said}");
}

#[test]
fn too_few_members() {
    let mut daemon = Daemon::with_array(6, 4);
    daemon.stop();
    for name in ["d0", "d2", "d3"] {
        std::fs::rename(daemon.path(&format!("{name}.img")), daemon.path(name)).unwrap();
    }
    daemon.start_again();
    let bytes = || std::fs::read(daemon.path("d1.img")).unwrap();
    let before = bytes();
    let said = daemon.refused("array start a");
    assert!(said.contains("1 of 2 members that are needed are here"), "{said}");
    assert!(said.contains("attach d0, d2, d3"), "{said}");
    // What is not there cannot be had by force.
    let said = daemon.refused("array start a --force");
    assert!(said.contains("1 of 2 members that are needed are here"), "{said}");
    assert!(bytes() == before, "something was written");
}

#[test]
fn where_a_pair_is_away_it_is_that_pair_that_is_told() {
    let mut daemon = Daemon::with_array(10, 4);
    daemon.stop();
    for name in ["d2", "d3"] {
        std::fs::rename(daemon.path(&format!("{name}.img")), daemon.path(name)).unwrap();
    }
    daemon.start_again();
    let said = daemon.refused("array start a");
    assert!(said.contains("of members 2 to 3, 0 of 1 members that are needed are here"), "{said}");
    assert!(said.contains("attach d2, d3"), "{said}");
}

#[test]
fn who_is_here_and_does_not_count_is_named() {
    let mut daemon = Daemon::with_array(5, 4);
    daemon.ok("drive detach d3 --force");
    daemon.ok("volume create v --array a --size 16M");
    daemon.stop();
    std::fs::rename(daemon.path("d1.img"), daemon.path("d1")).unwrap();
    daemon.start_again();
    daemon.ok("drive attach @/d3.img");
    let said = daemon.refused("array start a");
    assert!(said.contains("2 of 3 members that are needed are here; drive d3 is not"), "{said}");
    assert!(said.contains("fix: attach d1, then `ashlar array start a`"), "{said}");
    // On a host that knows no names of them, too.
    daemon.stop();
    daemon.start_without_state();
    for drive in ["d0", "d2", "d3"] {
        daemon.ok(&format!("drive attach @/{drive}.img"));
    }
    let said = daemon.refused("array start --scan");
    assert!(said.contains("fix: attach the drive of member 1, then"), "{said}");
}

/// Copies of these drives of array `a`, put back after it was used and stopped since.
fn with_copies_put_back(drives: &[&str]) -> Daemon {
    let daemon = Daemon::with_array(5, 4);
    daemon.ok("volume create v --array a --size 16M");
    daemon.ok("array stop a");
    let path = |drive: &str| daemon.path(&format!("{drive}.img"));
    let copies: Vec<_> = drives.iter().map(|drive| std::fs::read(path(drive)).unwrap()).collect();
    daemon.ok("array start a");
    daemon.ok("volume create w --array a --size 16M");
    daemon.ok("array stop a");
    for (drive, copy) in drives.iter().zip(copies) {
        // In place: a file that is empty for a moment is one that was cut short.
        let file = File::options().write(true).open(path(drive)).unwrap();
        file.write_all_at(&copy, 0).unwrap();
    }
    daemon
}

#[test]
fn a_copy_of_before_is_filled_anew() {
    let daemon = with_copies_put_back(&["d1"]);
    daemon.ok("array start a");
    daemon.ok("volume show w");
    let said = daemon.ok("status");
    let old = "! array a is degraded: what is on drive d1 is old, and not read; `ashlar array \
               rebuild a` fills it anew";
    assert!(said.contains(old), "{said}");
    daemon.ok("array rebuild a --wait");
    assert_eq!(daemon.array_state("a"), "optimal");
    assert!(daemon.ok("array scrub a --wait").contains("all is well"));
}

#[test]
fn copies_of_before_that_are_needed_are_refused() {
    let daemon = with_copies_put_back(&["d1", "d3"]);
    let said = untouched(&daemon, "array start a");
    assert!(said.contains("drive d1 holds a copy of before"), "{said}");
    assert!(said.contains("`ashlar array start a --force`"), "{said}");
    daemon.ok("array start a --force");
}

#[test]
fn copies_of_all_drives_are_not_called_absent_members() {
    let daemon = with_copies_put_back(&["d0", "d1", "d2", "d3"]);
    let said = untouched(&daemon, "array start a");
    assert!(said.contains("this host had it later"), "{said}");
    assert!(said.contains("attach the drives that it had then"), "{said}");
}
