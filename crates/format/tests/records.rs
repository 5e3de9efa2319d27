//! Goal: what one build wrote, every later build reads; and no damaged byte is believed.
//! Method: golden images compared byte by byte, and every single byte of a record changed in turn.
//!
//! `ASHLAR_WRITE_GOLDEN=1 cargo test -p ashlar-format` writes the images of a new version.
#![allow(clippy::unwrap_used, reason = "a test")]

use ashlar_format::array_superblock::{
    ArraySuperblock, ERA_MAX, Level, MemberState, Policy, StoredMember, StoredRange,
};
use ashlar_format::bad_blocks::{BadBlocks, StoredBadRange};
use ashlar_format::drive_label::{DriveLabel, MemberLayout};
use ashlar_format::journal_batch::{EntryKind, JournalBatch, ParitySum, StoredEntry};
use ashlar_format::lease::Lease;
use ashlar_format::record::{Record, RecordError, SEQUENCE_MAX, name_field, open, seal, upgrade};
use ashlar_format::region_map::{MapKind, RegionMapPage};
use ashlar_format::scrub_report::{Flaw, Phase, ScrubReport, StoredPlace};
use ashlar_format::units::Area;
use ashlar_format::upgrade::{
    ARRAY_SUPERBLOCK_GOLDEN, BAD_BLOCKS_GOLDEN, DRIVE_LABEL_GOLDEN, JOURNAL_BATCH_GOLDEN,
    LEASE_GOLDEN, REGION_MAP_GOLDEN, SCRUB_REPORT_GOLDEN, VOLUME_TABLE_GOLDEN,
};
use ashlar_format::volume_table::{EXTENT_STEP, StoredExtent, StoredVolume, VolumeTable};
use zerocopy::{FromBytes, IntoBytes};

const DRIVE: [u8; 16] = *b"drive-uuid-16byt";
const ARRAY: [u8; 16] = *b"array-uuid-16byt";
const HOME: u64 = 4096;

fn label() -> DriveLabel {
    let area = |offset: u64, len: u64| Area { offset, len };
    let layout = MemberLayout {
        superblocks: area(8192, 8192),
        dirty_map: area(128 << 10, 64 << 10),
        written_map: area(192 << 10, 64 << 10),
        volume_table: area(256 << 10, 270_336),
        missed_map: area(576 << 10, 64 << 10),
        bad_blocks: area(640 << 10, 64 << 10),
        lease: area(704 << 10, 8 << 10),
        journal: area(1 << 20, 2 << 20),
        integrity: area(3 << 20, 0),
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
    superblock.policy = Policy::Bitmap as u8;
    superblock.groups = 1;
    superblock.era = 7.into();
    for (index, member) in superblock.members.iter_mut().take(5).enumerate() {
        let state = if index == 4 { MemberState::Rebuilding } else { MemberState::Trusted };
        *member = StoredMember::new([u8::try_from(index).unwrap(); 16], state, 100);
    }
    superblock
}

fn region_page() -> RegionMapPage {
    let mut page = RegionMapPage::empty(ARRAY, MapKind::Dirty, 1, 0);
    page.set(0, true);
    page.set(31743, true);
    page
}

fn journal_batch() -> JournalBatch {
    let mut batch = JournalBatch::blank();
    batch.array = ARRAY;
    batch.tail_sequence = 5.into();
    batch.entry_count = 3.into();
    batch.entries[0] = StoredEntry::new(EntryKind::Data, 77, 1, 4096, 4096);
    batch.entries[1] = StoredEntry::new(EntryKind::Parity, 76, 4, 4096, 4096);
    batch.entries[1].chunks = 0b10.into();
    batch.entries[1].newest = 6.into();
    batch.entries[1].oldest = 5.into();
    batch.entries[2] = StoredEntry::new(EntryKind::Zeroes, 80, 0, 0, 12);
    batch.payload_bytes = 8192.into();
    batch.payload_checksum = 0x1234.into();
    batch
}

fn bad_blocks() -> BadBlocks {
    let mut list = *BadBlocks::empty(ARRAY);
    list.range_count = 1.into();
    list.ranges[0] = StoredBadRange::new(77, 2, 8192, 4096);
    list
}

fn lease() -> Lease {
    let mut lease = Lease::free(ARRAY);
    lease.host = *b"host-uuid-16byte";
    lease.host_name = name_field("host-a").unwrap();
    lease.epoch = 3.into();
    lease.beat = 41.into();
    lease
}

fn scrub_report() -> ScrubReport {
    let mut report = ScrubReport::new(ARRAY, Phase::Finished);
    (report.began, report.ended) = (1_700_000_000.into(), 1_700_003_600.into());
    (report.first, report.next) = (5.into(), 16384.into());
    (report.mismatched_stripes, report.undecided_stripes) = (3.into(), 1.into());
    (report.repaired_stripes, report.unreadable_stripes) = (2.into(), 4.into());
    (report.bad_stripes, report.repairs, report.place_count) = (6.into(), 1, 2);
    report.wrong[2] = 2.into();
    report.places[0] = StoredPlace::new(77, (8192, 512), Some(2));
    report.places[0].repaired = 1;
    report.places[1] = StoredPlace::new(78, (65536, 65536), None);
    report
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
fn check_golden<T: Record>(name: &str, mut today: T, golden: &[&[u8]]) {
    seal(&mut today, DRIVE, HOME, 7);
    let path = format!("{}/src/golden/{name}_v{}.bin", env!("CARGO_MANIFEST_DIR"), T::VERSION);
    if std::env::var_os("ASHLAR_WRITE_GOLDEN").is_some() {
        std::fs::write(path, today.as_bytes()).unwrap();
        return;
    }
    for (version, image) in golden.iter().enumerate() {
        let mut bytes = image.to_vec();
        upgrade::<T>(&mut bytes);
        assert!(bytes == today.as_bytes(), "{name} version {} differs", version + 1);
        let opened: &T = open(&bytes, Some(DRIVE), HOME).unwrap();
        assert_eq!(opened.header().sequence.get(), 7);
    }
}

#[test]
fn golden_images() {
    check_golden("drive_label", label(), &DRIVE_LABEL_GOLDEN);
    check_golden("array_superblock", superblock(), &ARRAY_SUPERBLOCK_GOLDEN);
    check_golden("region_map", region_page(), &REGION_MAP_GOLDEN);
    check_golden("journal_batch", journal_batch(), &JOURNAL_BATCH_GOLDEN);
    check_golden("volume_table", table(), &VOLUME_TABLE_GOLDEN);
    check_golden("bad_blocks", bad_blocks(), &BAD_BLOCKS_GOLDEN);
    check_golden("lease", lease(), &LEASE_GOLDEN);
    check_golden("scrub_report", scrub_report(), &SCRUB_REPORT_GOLDEN);
}

/// What was reserved in the first records of version 1 says nothing there, and no more than that.
#[test]
fn what_was_wrong_at_places_of_a_scrub_is_kept() {
    let old: &ScrubReport = open(SCRUB_REPORT_GOLDEN[0], Some(DRIVE), HOME).unwrap();
    assert!(old.places().iter().all(|place| place.flaw() == Ok(Flaw::Mismatch)));
    assert_eq!(old.damaged_stripes.get(), 0);
    let mut report = scrub_report();
    report.damaged_stripes = 9.into();
    for (place, flaw) in report.places.iter_mut().zip(Flaw::ALL) {
        *place = StoredPlace::new(1, (0, 4096), None).with_flaw(flaw);
    }
    report.place_count = 4;
    seal(&mut report, DRIVE, HOME, 8);
    let kept: &ScrubReport = open(report.as_bytes(), Some(DRIVE), HOME).unwrap();
    let flaws: Vec<Flaw> = kept.places().iter().map(|place| place.flaw().unwrap()).collect();
    assert_eq!((flaws, kept.damaged_stripes.get()), (Flaw::ALL.to_vec(), 9));
    let place = std::mem::offset_of!(ScrubReport, places);
    for (at, value) in [(place + 27, 4), (place + 28, 1), (1184 + 8, 1)] {
        let mut bytes = report.as_bytes().to_vec();
        bytes[at] = value;
        let wrong = ScrubReport::read_from_bytes(&bytes).unwrap();
        assert!(wrong.check().is_err(), "byte {at}");
    }
}

/// An old array that was not stopped holds records that only the old build knows.
#[test]
fn a_journal_of_version_1_is_not_forgotten() {
    let mut old = ARRAY_SUPERBLOCK_GOLDEN[0].to_vec();
    let at = std::mem::offset_of!(ArraySuperblock, journal_from);
    old[at] = 12;
    old[16..20].fill(0);
    let sum = ashlar_format::record::payload_checksum(&old);
    old[16..20].copy_from_slice(&sum.to_le_bytes());
    upgrade::<ArraySuperblock>(&mut old);
    let refused = open::<ArraySuperblock>(&old, None, HOME).err();
    assert!(matches!(refused, Some(RecordError::Field(why)) if why.contains("version 1")));
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
    check_every_byte(region_page());
    check_every_byte(journal_batch());
    check_every_byte(lease());
    check_every_byte(scrub_report());
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
    assert!(refused(|s| s.region_stripes = u32::MAX.into()));
    assert!(refused(|s| s.region_stripes = 0.into()));
    assert!(refused(|s| (s.stripes, s.region_stripes) = ((1 << 30).into(), 1.into())));
    assert!(refused(|s| (s.copies, s.data_chunks) = (2, 2)));
    assert!(refused(|s| s.members[4].state = 9));
    assert!(refused(|s| s.members[4].catches_up = 2));
    for (rebuilt, ahead, fits) in [
        (0, (0, 0), true),
        (0, (1, 2), true),
        (5, (6, 16384), true),
        (5, (6, 16385), false),
        (5, (5, 6), false),
        (5, (2, 3), false),
        (5, (9, 9), false),
        (5, (9, 7), false),
        (5, (0, 3), false),
        (16385, (0, 0), false),
    ] {
        let mut filled = superblock();
        filled.members[4].rebuilt_stripes = rebuilt.into();
        filled.rebuilt_ahead[4] = StoredRange::new(&(ahead.0..ahead.1));
        assert_eq!(filled.check().is_ok(), fits, "{rebuilt} and {ahead:?}");
    }
    assert!(refused(|s| s.members[0].catches_up = 1), "a trusted member lacks nothing");
    assert!(refused(|s| s.groups = 0));
    assert!(refused(|s| s.groups = 2));
    // More members than a number of 16 bits says.
    let crowd = |s: &mut ArraySuperblock| {
        s.level = Level::Raid70 as u8;
        (s.groups, s.data_chunks, s.parity_chunks) = (255, 255, 3);
    };
    assert!(refused(crowd));
    assert!(refused(|s| s.policy = 3));
    assert!(refused(|s| s.name = [0xff; 64]));
    assert!(refused(|s| s.era = (ERA_MAX + 1).into()));
    for (epoch, beat, fits) in [
        (SEQUENCE_MAX, SEQUENCE_MAX, true),
        (SEQUENCE_MAX + 1, 1, false),
        (1, SEQUENCE_MAX + 1, false),
        (u64::MAX, u64::MAX, false),
    ] {
        let mut lease = lease();
        (lease.epoch, lease.beat) = (epoch.into(), beat.into());
        assert_eq!(lease.check().is_ok(), fits, "{epoch} {beat}");
    }
    let mut overlapping = table();
    overlapping.volumes[1] = overlapping.volumes[0];
    overlapping.volume_count = 2.into();
    assert!(overlapping.check().is_err());
    for (offset, len) in [(512, EXTENT_STEP), (EXTENT_STEP, EXTENT_STEP + 512)] {
        let mut uneven = table();
        uneven.volumes[0].bytes = 512.into();
        uneven.volumes[0].extents[0] = StoredExtent { offset: offset.into(), len: len.into() };
        assert!(uneven.check().is_err(), "{offset} {len}");
    }
    let mut short = label();
    short.drive_bytes = (1 << 20).into();
    assert!(short.check().is_err());
}

/// Every group has as many: a stripe too many would be behind the data of its members.
#[test]
fn stripes_that_groups_cannot_share_are_refused() {
    let mut grouped = superblock();
    (grouped.level, grouped.groups) = (Level::Raid50 as u8, 3);
    grouped.member_count = 15.into();
    for index in 5..15 {
        grouped.members[index] = StoredMember::new([1; 16], MemberState::Trusted, 0);
    }
    for (stripes, fits) in [(3, true), (16383, true), (16384, false), (1, false), (0, false)] {
        grouped.stripes = stripes.into();
        grouped.members.iter_mut().for_each(|member| member.rebuilt_stripes = 0.into());
        assert_eq!(grouped.check().is_ok(), fits, "{stripes}");
    }
}

/// Maps, volume table, bad blocks and lease are read whole.
#[test]
fn areas_of_more_than_can_be_read_at_once_are_refused() {
    type AreaOf = fn(&mut MemberLayout) -> &mut Area;
    let areas: [AreaOf; 6] = [
        |its| &mut its.dirty_map,
        |its| &mut its.written_map,
        |its| &mut its.volume_table,
        |its| &mut its.missed_map,
        |its| &mut its.bad_blocks,
        |its| &mut its.lease,
    ];
    let mut roomy = label().layout();
    for (area, number) in areas.iter().zip(1..) {
        area(&mut roomy).offset = number << 21;
    }
    (roomy.journal.offset, roomy.integrity.offset) = (16 << 20, 32 << 20);
    roomy.data.offset = 32 << 20;
    for (index, area) in areas.iter().enumerate() {
        for (len, fits) in [(1 << 20, true), ((1 << 20) + 4096, false), (2 << 20, false)] {
            let mut layout = roomy;
            area(&mut layout).len = len;
            let label = DriveLabel::new(ARRAY, 3, 2 << 30, &layout);
            assert_eq!(label.check().is_ok(), fits, "area {index} of {len}");
        }
    }
}

#[test]
fn a_scrub_report_that_cannot_be_is_refused() {
    let refused = |change: fn(&mut ScrubReport)| {
        let mut wrong = scrub_report();
        change(&mut wrong);
        wrong.check().is_err()
    };
    assert!(refused(|its| its.phase = 0));
    assert!(refused(|its| its.phase = 4));
    assert!(refused(|its| its.phase = Phase::Running as u8), "it has ended");
    assert!(refused(|its| its.repairs = 2));
    assert!(refused(|its| its.place_count = 17));
    assert!(refused(|its| its.next = 4.into()));
    assert!(refused(|its| its.places[0].repaired = 2));
    assert!(refused(|its| its.places[1] = StoredPlace::new(1, (0, 512), Some(64))));
    let places = scrub_report().places().to_vec();
    assert_eq!((places[0].member(), places[1].member()), (Some(2), None));
    // Where it is: behind the lease, if there is room before the journal.
    let areas = label().layout();
    let area = Area { offset: 712 << 10, len: 8 << 10 };
    assert_eq!(ScrubReport::area(&areas), Some(area));
    let journal = Area { offset: 716 << 10, len: 1 << 20 };
    assert_eq!(ScrubReport::area(&MemberLayout { journal, ..areas }), None);
}

/// The next one is written, too: it must not be more than can be.
#[test]
fn sequences_that_leave_no_room_are_refused() {
    for (sequence, refused) in
        [(SEQUENCE_MAX, None), (SEQUENCE_MAX + 1, Some(RecordError::Field("sequence")))]
    {
        let mut record = superblock();
        seal(&mut record, DRIVE, HOME, sequence);
        let bytes = record.as_bytes();
        assert_eq!(open::<ArraySuperblock>(bytes, Some(DRIVE), HOME).err(), refused);
    }
}

#[test]
fn sums_of_parity() {
    let sums = StoredEntry::new(EntryKind::ParitySums, 76, 4, 4096, 8192);
    assert_eq!(sums.payload_len(), 16 * 8);
    // XXH3-64 of 512 zeroes with the seed 0x6464646464646464, by the reference implementation.
    assert_eq!(ParitySum::of_array(&[0x64; 16]).of(&[0; 512]), 0x73ca_52f1_4beb_d14d);
}
