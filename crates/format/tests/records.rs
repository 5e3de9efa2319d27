//! Goal: what one build wrote, every later build reads; and no damaged byte is believed.
//! Method: golden images compared byte by byte, and every single byte of a record changed in turn.
//!
//! `ASHLAR_WRITE_GOLDEN=1 cargo test -p ashlar-format` writes the images of a new version.
#![allow(clippy::unwrap_used, reason = "a test")]

use ashlar_format::array_superblock::{ArraySuperblock, Level, MemberState, StoredMember};
use ashlar_format::dirty_map::DirtyMapPage;
use ashlar_format::drive_label::{DriveLabel, MemberLayout};
use ashlar_format::journal_record::{JournalRecord, StoredSlice};
use ashlar_format::record::{Record, RecordError, name_field, open, seal};
use ashlar_format::units::Area;
use ashlar_format::upgrade::{
    ARRAY_SUPERBLOCK_GOLDEN, DIRTY_MAP_GOLDEN, DRIVE_LABEL_GOLDEN, JOURNAL_RECORD_GOLDEN, Upgrade,
    VOLUME_TABLE_GOLDEN,
};
use ashlar_format::upgrade::{
    ARRAY_SUPERBLOCK_UPGRADES, DIRTY_MAP_UPGRADES, DRIVE_LABEL_UPGRADES, JOURNAL_RECORD_UPGRADES,
    VOLUME_TABLE_UPGRADES,
};
use ashlar_format::volume_table::{StoredExtent, StoredVolume, VolumeTable};

const DRIVE: [u8; 16] = *b"drive-uuid-16byt";
const ARRAY: [u8; 16] = *b"array-uuid-16byt";
const HOME: u64 = 4096;

fn label() -> DriveLabel {
    let area = |offset: u64, len: u64| Area { offset, len };
    let layout = MemberLayout {
        superblocks: area(8192, 8192),
        dirty_map: area(128 << 10, 64 << 10),
        volume_table: area(256 << 10, 270_336),
        journal: area(1 << 20, 2 << 20),
        data: area(3 << 20, 1 << 30),
    };
    DriveLabel::new(ARRAY, 3, (1 << 30) + (4 << 20), &layout)
}

fn superblock() -> ArraySuperblock {
    let mut superblock = ArraySuperblock::blank();
    superblock.array = ARRAY;
    superblock.name = name_field("main").unwrap();
    superblock.level = Level::Raid5 as u8;
    superblock.copies = 1;
    superblock.data_chunks = 4;
    superblock.parity_chunks = 1;
    superblock.member_count = 5.into();
    superblock.member = 2.into();
    superblock.chunk_bytes = 65536.into();
    superblock.region_stripes = 64.into();
    superblock.stripes = 16384.into();
    superblock.journal_from = 12.into();
    for (index, member) in superblock.members.iter_mut().take(5).enumerate() {
        let state = if index == 4 { MemberState::Rebuilding } else { MemberState::Trusted };
        *member = StoredMember::new([u8::try_from(index).unwrap(); 16], state, 100);
    }
    superblock
}

fn dirty_page() -> DirtyMapPage {
    let mut page = DirtyMapPage::clean(ARRAY, 1);
    page.set(0, true);
    page.set(31743, true);
    page
}

fn journal_record() -> JournalRecord {
    let mut record = JournalRecord::blank();
    record.array = ARRAY;
    record.stripe = 77.into();
    record.tail_sequence = 5.into();
    record.slice_count = 2.into();
    record.slices[0] = StoredSlice::new(1, 4096, 4096);
    record.slices[1] = StoredSlice::new(4, 4096, 4096);
    record.payload_bytes = 8192.into();
    record.payload_checksum = 0x1234.into();
    record
}

fn table() -> VolumeTable {
    let mut table = *VolumeTable::empty(ARRAY);
    let mut volume = StoredVolume::blank();
    volume.uuid = *b"volume-uuid-16by";
    volume.name = name_field("pg").unwrap();
    volume.bytes = (1 << 20).into();
    volume.extent_count = 1.into();
    volume.extents[0] = StoredExtent { offset: 0.into(), len: (1 << 20).into() };
    table.volumes[0] = volume;
    table.volume_count = 1.into();
    table
}

/// Old images, upgraded step by step, are what today's build writes.
fn check_golden<T: Record>(name: &str, mut today: T, golden: &[&[u8]], upgrades: &[Upgrade]) {
    seal(&mut today, DRIVE, HOME, 7);
    let path = format!("{}/src/golden/{name}_v{}.bin", env!("CARGO_MANIFEST_DIR"), T::VERSION);
    if std::env::var_os("ASHLAR_WRITE_GOLDEN").is_some() {
        std::fs::write(path, today.as_bytes()).unwrap();
        return;
    }
    for (version, image) in golden.iter().enumerate() {
        let mut bytes = image.to_vec();
        upgrades[version..].iter().for_each(|upgrade| upgrade(&mut bytes));
        assert!(bytes == today.as_bytes(), "{name} version {} differs", version + 1);
        let opened: &T = open(&bytes, Some(DRIVE), HOME).unwrap();
        assert_eq!(opened.header().sequence.get(), 7);
    }
}

#[test]
fn golden_images() {
    check_golden("drive_label", label(), &DRIVE_LABEL_GOLDEN, &DRIVE_LABEL_UPGRADES);
    check_golden(
        "array_superblock",
        superblock(),
        &ARRAY_SUPERBLOCK_GOLDEN,
        &ARRAY_SUPERBLOCK_UPGRADES,
    );
    check_golden("dirty_map", dirty_page(), &DIRTY_MAP_GOLDEN, &DIRTY_MAP_UPGRADES);
    check_golden(
        "journal_record",
        journal_record(),
        &JOURNAL_RECORD_GOLDEN,
        &JOURNAL_RECORD_UPGRADES,
    );
    check_golden("volume_table", table(), &VOLUME_TABLE_GOLDEN, &VOLUME_TABLE_UPGRADES);
}

/// Every byte matters: changing any one of them is noticed.
fn check_every_byte<T: Record>(mut record: T) {
    seal(&mut record, DRIVE, HOME, 7);
    let good = record.as_bytes().to_vec();
    for at in 0..good.len() {
        let mut bad = good.clone();
        bad[at] ^= 0x20;
        assert!(open::<T>(&bad, None, HOME).is_err(), "byte {at} can change unseen");
    }
    assert_eq!(open::<T>(&good, None, 0).err(), Some(RecordError::Misdirected(HOME)));
    assert_eq!(open::<T>(&good, Some(ARRAY), HOME).err(), Some(RecordError::Foreign));
    assert!(open::<T>(&good[..good.len() - 1], None, HOME).is_err());
}

#[test]
fn no_damaged_byte_is_believed() {
    check_every_byte(label());
    check_every_byte(superblock());
    check_every_byte(dirty_page());
    check_every_byte(journal_record());
}

#[test]
fn sealed_nonsense_is_refused() {
    let refused = |change: fn(&mut ArraySuperblock)| {
        let mut wrong = superblock();
        change(&mut wrong);
        wrong.check().is_err()
    };
    assert!(refused(|s| s.level = 4));
    assert!(refused(|s| s.member_count = 6.into()));
    assert!(refused(|s| s.member = 5.into()));
    assert!(refused(|s| s.chunk_bytes = 65535.into()));
    assert!(refused(|s| s.stripes = u64::MAX.into()));
    assert!(refused(|s| s.region_stripes = 0.into()));
    assert!(refused(|s| (s.stripes, s.region_stripes) = ((1 << 30).into(), 1.into())));
    assert!(refused(|s| (s.copies, s.data_chunks) = (2, 2)));
    assert!(refused(|s| s.members[4].state = 9));
    assert!(refused(|s| s.name = [0xff; 64]));
    let mut overlapping = table();
    overlapping.volumes[1] = overlapping.volumes[0];
    overlapping.volume_count = 2.into();
    assert!(overlapping.check().is_err());
    let mut short = label();
    short.drive_bytes = (1 << 20).into();
    assert!(short.check().is_err());
}
