//! Goal: no bytes from a drive make a decoder panic, and none that break a rule are believed.
//! Method: random bodies under a right checksum, so that every field check is reached.
#![allow(clippy::unwrap_used, reason = "a test")]

use ashlar_format::array_superblock::ArraySuperblock;
use ashlar_format::bad_blocks::BadBlocks;
use ashlar_format::drive_label::DriveLabel;
use ashlar_format::journal_batch::JournalBatch;
use ashlar_format::lease::Lease;
use ashlar_format::record::{Header, Record, open};
use ashlar_format::region_map::RegionMapPage;
use ashlar_format::scrub_report::ScrubReport;
use ashlar_format::volume_table::VolumeTable;
use proptest::prelude::*;

const HOME: u64 = 4096;

/// `body` over a right header, with the checksum that makes it open.
fn dressed<T: Record>(body: &[u8], zero_from: usize) -> Vec<u8> {
    let mut bytes = vec![0; size_of::<T>()];
    let start = size_of::<Header>();
    let len = body.len().min(zero_from.min(bytes.len()) - start);
    bytes[start..start + len].copy_from_slice(&body[..len]);
    bytes[..8].copy_from_slice(&ashlar_format::record::MAGIC);
    bytes[8..10].copy_from_slice(&(T::KIND as u16).to_le_bytes());
    bytes[10..12].copy_from_slice(&T::VERSION.to_le_bytes());
    bytes[12..16].copy_from_slice(&u32::try_from(size_of::<T>()).unwrap().to_le_bytes());
    bytes[40..48].copy_from_slice(&HOME.to_le_bytes());
    bytes[48..56].copy_from_slice(&1u64.to_le_bytes());
    let sum = ashlar_format::record::payload_checksum(&bytes);
    bytes[16..20].copy_from_slice(&sum.to_le_bytes());
    bytes
}

/// Opens it every way; whatever opens can be asked everything without a panic.
fn try_all(body: &[u8], zero_from: usize) {
    if let Ok(label) = open::<DriveLabel>(&dressed::<DriveLabel>(body, zero_from), None, HOME) {
        assert!(label.layout().areas().iter().all(|area| area.end().is_some()));
    }
    let bytes = dressed::<ArraySuperblock>(body, zero_from);
    if let Ok(superblock) = open::<ArraySuperblock>(&bytes, None, HOME) {
        assert!(superblock.members().iter().all(|member| member.state().is_ok()));
        assert!(superblock.name().is_ok() && superblock.level().is_ok());
    }
    if let Ok(page) = open::<RegionMapPage>(&dressed::<RegionMapPage>(body, zero_from), None, HOME)
    {
        let _ = (0..31744).filter(|region| page.contains(*region)).count();
    }
    let bytes = dressed::<JournalBatch>(body, zero_from);
    if let Ok(record) = open::<JournalBatch>(&bytes, None, HOME) {
        assert!(record.entries().iter().all(|entry| entry.kind().is_ok()));
    }
    let bytes = dressed::<BadBlocks>(body, zero_from);
    if let Ok(list) = open::<BadBlocks>(&bytes, None, HOME) {
        assert!(list.ranges().iter().all(|range| range.len.get() > 0));
    }
    if let Ok(lease) = open::<Lease>(&dressed::<Lease>(body, zero_from), None, HOME) {
        assert!(lease.host_name().is_ok());
    }
    let bytes = dressed::<ScrubReport>(body, zero_from);
    if let Ok(report) = open::<ScrubReport>(&bytes, None, HOME) {
        assert!(report.phase().is_ok() && report.places().len() <= 16);
    }
    let bytes = dressed::<VolumeTable>(body, zero_from);
    if let Ok(table) = open::<VolumeTable>(&bytes, None, HOME) {
        assert!(table.volumes().iter().all(|volume| volume.name().is_ok()));
    }
}

proptest! {
    #[test]
    fn random_bytes(bytes in proptest::collection::vec(any::<u8>(), 0..8192)) {
        prop_assert!(open::<DriveLabel>(&bytes, None, HOME).is_err());
        prop_assert!(open::<VolumeTable>(&bytes, None, 0).is_err());
    }

    #[test]
    fn random_bodies(
        body in proptest::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], 4032),
        zero_from in 64usize..5000,
    ) {
        try_all(&body, zero_from);
    }
}
