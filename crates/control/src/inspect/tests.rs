//! Goal: `inspect` tells the truth about drives in any condition, and never panics.
//! Method: a drive written with `ashlar-format`, then scribbled on, cut short, or random.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use ashlar_format::array_superblock::{Level, StoredMember};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record::{name_field, seal};
use ashlar_format::region_map::{MapKind, RegionMapPage};
use zerocopy::IntoBytes;

use super::*;

const DRIVE: [u8; 16] = [9; 16];
const ARRAY: [u8; 16] = [7; 16];
const BYTES: u64 = 64 << 20;

struct Sample {
    path: PathBuf,
    // Removed with everything in it when dropped.
    _directory: tempfile::TempDir,
}

impl Sample {
    fn blank() -> Sample {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("drive");
        File::create(&path).unwrap().set_len(BYTES).unwrap();
        Sample { path, _directory: directory }
    }

    /// A member as an array of two would leave it.
    fn member() -> Sample {
        let sample = Sample::blank();
        let layout = layout();
        for home in DriveLabel::homes(BYTES) {
            let mut label = DriveLabel::new(ARRAY, 1, BYTES, &layout);
            seal(&mut label, DRIVE, home, 1);
            sample.write(home, label.as_bytes());
        }
        for generation in [4, 5] {
            let slot = generation % 2 * ArraySuperblock::BYTES;
            let home = layout.superblocks.offset + slot;
            let mut superblock = superblock();
            seal(&mut superblock, DRIVE, home, generation);
            sample.write(home, superblock.as_bytes());
        }
        let home = layout.volume_table.offset;
        let mut table = VolumeTable::empty(ARRAY);
        seal(table.as_mut(), DRIVE, home, 2);
        sample.write(home, table.as_bytes());
        let mut page = RegionMapPage::empty(ARRAY, MapKind::Dirty, 0, 16);
        page.set(5, true);
        seal(&mut page, DRIVE, layout.dirty_map.offset, 1);
        sample.write(layout.dirty_map.offset, page.as_bytes());
        for beat in [40, 41] {
            let home = layout.lease.offset + beat % 2 * Lease::BYTES;
            let mut lease = Lease::free(ARRAY);
            lease.host = [3; 16];
            lease.host_name = name_field("elsewhere").unwrap();
            lease.beat = beat.into();
            seal(&mut lease, DRIVE, home, beat);
            sample.write(home, lease.as_bytes());
        }
        sample
    }

    fn write(&self, offset: u64, bytes: &[u8]) {
        let file = File::options().write(true).open(&self.path).unwrap();
        file.write_all_at(bytes, offset).unwrap();
    }

    fn inspect(&self) -> Report {
        inspect(&self.path).unwrap()
    }
}

fn layout() -> MemberLayout {
    ashlar_raid::label::plan(BYTES, 0).unwrap()
}

fn superblock() -> ArraySuperblock {
    let mut superblock = ArraySuperblock::blank();
    superblock.array = ARRAY;
    superblock.name = name_field("main").unwrap();
    superblock.level = Level::Raid1 as u8;
    superblock.copies = 2;
    superblock.groups = 1;
    superblock.data_chunks = 1;
    superblock.member_count = 2.into();
    superblock.member = 1.into();
    superblock.chunk_bytes = 65536.into();
    superblock.region_stripes = 64.into();
    superblock.stripes = 512.into();
    superblock.members[0] = StoredMember::new([8; 16], MemberState::Stale, 0);
    superblock.members[1] = StoredMember::new(DRIVE, MemberState::Trusted, 0);
    superblock
}

#[test]
fn a_good_member_is_read_in_full() {
    let report = Sample::member().inspect();
    let bad: Vec<_> = report.copies.iter().filter(|copy| copy.flaw.is_some()).collect();
    assert!(matches!(bad.as_slice(), [only] if only.record == "volume table"), "{bad:?}");
    assert_eq!(report.content, "member 1 of array main");
    let superblock = report.superblock.unwrap();
    assert_eq!((superblock.generation, superblock.members.len()), (5, 2));
    assert_eq!((superblock.members[0].state, superblock.members[1].state), ("stale", "trusted"));
    assert_eq!(report.volumes.unwrap().len(), 0);
    let dirty = report.dirty_map.unwrap();
    assert_eq!((dirty.regions_dirty, dirty.pages_bad), (1, 0));
    let lease = report.lease.unwrap();
    assert_eq!((lease.host_name.as_str(), lease.beat), ("elsewhere", 41));
    assert_eq!(report.label.unwrap().drive_bytes, BYTES);
}

#[test]
fn each_scribbled_copy_is_named_and_the_others_serve() {
    let sample = Sample::member();
    sample.write(100, b"scribble");
    sample.write(layout().superblocks.offset + ArraySuperblock::BYTES, b"scribble");
    let report = sample.inspect();
    let flaw = |record: &str, offset: u64| {
        let mut copies = report.copies.iter();
        let copy = copies.find(|copy| copy.record == record && copy.offset == offset).unwrap();
        copy.flaw.clone()
    };
    assert!(flaw("label", 0).unwrap().contains("checksum"));
    assert_eq!(flaw("label", 4096), None);
    assert!(
        flaw("superblock", layout().superblocks.offset + 4096)
            .unwrap()
            .contains("no Ashlar record")
    );
    assert_eq!(report.superblock.as_ref().unwrap().generation, 4);
}

#[test]
fn a_label_in_the_wrong_place_is_a_misdirected_write() {
    let sample = Sample::blank();
    let mut label = DriveLabel::new(ARRAY, 1, BYTES, &layout());
    seal(&mut label, DRIVE, 4096, 1);
    sample.write(0, label.as_bytes());
    let report = sample.inspect();
    assert!(report.label.is_none());
    assert!(report.copies[0].flaw.as_ref().unwrap().contains("misdirected"), "{report:?}");
    assert!(report.content.contains("damaged"), "{}", report.content);
}

#[test]
fn a_drive_cut_short_still_tells_what_it_was() {
    let sample = Sample::member();
    File::options().write(true).open(&sample.path).unwrap().set_len(16 << 20).unwrap();
    let report = sample.inspect();
    assert_eq!(report.label.as_ref().unwrap().drive_bytes, BYTES);
    let last = report.copies.iter().rfind(|copy| copy.record == "label").unwrap();
    assert!(last.flaw.as_ref().unwrap().contains("beyond"), "{report:?}");
}

#[test]
fn blank_drives_and_what_is_no_drive() {
    let report = Sample::blank().inspect();
    assert_eq!((report.content.as_str(), report.label.is_none()), ("blank", true));
    let scratch = tempfile::tempdir().unwrap();
    assert!(inspect(&scratch.path().join("missing")).unwrap_err().error.contains("cannot be read"));
    assert!(inspect(scratch.path()).unwrap_err().error.contains("directory"));
    let tiny = scratch.path().join("tiny");
    std::fs::write(&tiny, "tiny").unwrap();
    assert!(inspect(&tiny).unwrap_err().error.contains("too few"));
}

#[test]
fn scribbles_anywhere_never_panic() {
    let sample = Sample::member();
    // A fixed walk over the first 512 KiB, where all records are.
    let mut state = 0x9e37_79b9_7f4a_7c15_u64;
    for _ in 0..200 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        sample.write(state >> 45, &state.to_le_bytes());
        sample.inspect();
    }
}
