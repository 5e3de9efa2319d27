//! Goal: metadata that somebody made up, with right checksums, is refused or passed over; it never
//! ends the process, and what else the drives hold stays what it was.
//! Method: records on files in memory are changed, and their checksums with them, between a crash
//! or a stop and a start.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::mem::offset_of;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{ArraySuperblock, ERA_MAX, Level};
use ashlar_format::drive_label::DriveLabel;
use ashlar_format::journal_batch::{EntryKind, JournalBatch, ParitySum, StoredEntry};
use ashlar_format::record::{open, payload_checksum, seal};
use ashlar_format::units::Area;
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::parity::Kernels;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::buffer::BUFFER_BYTES_MAX;
use zerocopy::IntoBytes;

use crate::pair::{DRIVE_BYTES, Pair, run};

const CHUNK: usize = 16 << 10;
/// The rows that most of these entries are of.
const ROWS: Range<usize> = 0..4096;

fn drives_of(pair: &Pair) -> Vec<Rc<Drive>> {
    pair.array.status().members.into_iter().filter_map(|member| member.drive).collect()
}

fn image(pair: &Pair, drive: &Rc<Drive>) -> Vec<u8> {
    let mut bytes = vec![0; DRIVE_BYTES as usize];
    pair.file(drive).read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

/// The drives as they were plugged in again.
async fn assembled(pair: &mut Pair, drives: &[Rc<Drive>]) -> Result<(), AssembleError> {
    let here = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    pair.array = Array::assemble(&pair.reactor, here, AssembleOptions::default()).await?;
    Ok(())
}

/// Changes a record's field, and its checksum with that.
fn set(record: &mut [u8], at: usize, field: &[u8]) {
    record[at..at + field.len()].copy_from_slice(field);
    record[16..20].fill(0);
    let sum = payload_checksum(record);
    record[16..20].copy_from_slice(&sum.to_le_bytes());
}

/// A batch with these entries, newer than all others, is on every member after a crash.
async fn crash_with(pair: &mut Pair, entries: &[StoredEntry], payload: &[u8]) {
    pair.in_place().await;
    let drives = drives_of(pair);
    drives.iter().for_each(|drive| drive.pull());
    let images: Vec<Vec<u8>> = drives.iter().map(|drive| image(pair, drive)).collect();
    let sequence = 1 + images.iter().map(|image| newest_sequence(image)).max().unwrap();
    for (drive, image) in drives.iter().zip(&images) {
        let label: &DriveLabel = open(image, None, 0).unwrap();
        let home = label.layout().journal.offset;
        let mut batch = JournalBatch::blank();
        batch.array = label.array;
        batch.tail_sequence = sequence.into();
        batch.entry_count = (entries.len() as u32).into();
        batch.payload_bytes = (payload.len() as u32).into();
        batch.payload_checksum = payload_checksum(payload).into();
        for (stored, entry) in batch.entries.iter_mut().zip(entries) {
            *stored = *entry;
            if entry.kind().unwrap().is_parity() {
                (stored.newest, stored.oldest) = (sequence.into(), sequence.into());
            }
        }
        seal(&mut batch, label.header.owner, home, sequence);
        let stored = [batch.as_bytes(), payload].concat();
        pair.file(drive).write_all_at(&stored, home).unwrap();
    }
    assembled(pair, &drives).await.unwrap();
}

/// Of the batches in a member's ring, or of what its superblocks say of them.
fn newest_sequence(image: &[u8]) -> u64 {
    let label: &DriveLabel = open(image, None, 0).unwrap();
    let homes = |area: Area| (area.offset..area.range().end).step_by(4096);
    let batches = homes(label.layout().journal).filter_map(|home| {
        let batch: &JournalBatch = open(&image[home as usize..], None, home).ok()?;
        Some(batch.header.sequence.get())
    });
    let superblocks = homes(label.layout().superblocks).filter_map(|home| {
        let superblock: &ArraySuperblock = open(&image[home as usize..], None, home).ok()?;
        Some(superblock.journal_from.get())
    });
    batches.chain(superblocks).max().unwrap()
}

/// Of a RAID 5 over three drives: rows of its first stripe.
fn entry(kind: EntryKind, position: u8, rows: Range<usize>) -> StoredEntry {
    let mut entry = StoredEntry::new(kind, 0, position, rows.start as u32, rows.len() as u32);
    if kind.is_parity() {
        entry.chunks = 0b01.into();
    }
    entry
}

/// The array holds what it should, and its parity fits that.
async fn is_right(pair: &mut Pair) {
    pair.check().await;
    pair.scrub_is_clean().await;
    assert_eq!(pair.array.state(), ArrayState::Optimal);
}

#[test]
fn parity_and_its_sums_for_the_same_rows_are_not_taken_for_each_other() {
    for sums_first in [false, true] {
        run(move |reactor| async move {
            let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
            pair.put(0, &[3; 2 * CHUNK]).await;
            let (data, parity) = ([66_u8; ROWS.end], [66_u8 ^ 3; ROWS.end]);
            let sum = ParitySum::of_array(&[9; 16]);
            let sums =
                parity.as_chunks::<512>().0.iter().flat_map(|rows| sum.of(rows).to_le_bytes());
            let mut both = [
                (entry(EntryKind::Parity, 2, ROWS), parity.to_vec()),
                (entry(EntryKind::ParitySums, 2, ROWS), sums.collect()),
            ];
            if sums_first {
                both.reverse();
            }
            let [(first, a), (second, b)] = both;
            let entries = [entry(EntryKind::Data, 0, ROWS), first, second];
            crash_with(&mut pair, &entries, &[data.to_vec(), a, b].concat()).await;
            pair.bytes[ROWS].copy_from_slice(&data);
            is_right(&mut pair).await;
        });
    }
}

/// Two of three parity chunks by their sums, the third in full: as a build of ours has them, and
/// with one of them twice, and in the other form as well.
/// They have no bytes, where others begin at any address.
#[test]
fn zeroes_behind_sums_end_nobody() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        pair.put(0, &[3; 2 * CHUNK]).await;
        let (data, parity) = ([66_u8; ROWS.end], [66_u8 ^ 3; ROWS.end]);
        let sum = ParitySum::of_array(&[9; 16]);
        let one = sum.of(&parity.as_chunks().0[0]).to_le_bytes();
        let zeroes = StoredEntry::new(EntryKind::Zeroes, 0, 0, 0, u32::MAX);
        let entries = [entry(EntryKind::Data, 0, 0..512), entry(EntryKind::ParitySums, 2, 0..512)];
        let payload = [&data[..512], &one].concat();
        crash_with(&mut pair, &[entries[0], entries[1], zeroes], &payload).await;
        pair.bytes[..512].copy_from_slice(&data[..512]);
        is_right(&mut pair).await;
    });
}

#[test]
fn parity_in_full_beside_sums_is_taken_once() {
    for more in [None, Some(EntryKind::Parity), Some(EntryKind::ParitySums)] {
        for position in 2..5 {
            run(move |reactor| async move {
                let mut pair = Pair::new(&reactor, Level::Raid7, 5, 512).await;
                pair.put(0, &[3; 2 * CHUNK]).await;
                let (data, other) = ([66_u8; ROWS.end], [3_u8; ROWS.end]);
                let mut parity = [[0_u8; ROWS.end]; 3];
                let mut outputs = parity.each_mut().map(|its| &mut its[..]);
                Kernels::detect().encode(&[&data[..], &other[..]], &mut outputs);
                let sum = ParitySum::of_array(&[9; 16]);
                let sums = |bytes: &[u8]| -> Vec<u8> {
                    let sectors = bytes.as_chunks::<512>().0.iter();
                    sectors.flat_map(|rows| sum.of(rows).to_le_bytes()).collect()
                };
                let mut entries = vec![(entry(EntryKind::Data, 0, ROWS), data.to_vec())];
                let kinds = [EntryKind::ParitySums, EntryKind::ParitySums, EntryKind::Parity];
                let usual = (2..).zip(kinds);
                for (position, kind) in usual.chain(more.map(|kind| (position, kind))) {
                    let bytes = &parity[usize::from(position) - 2];
                    let payload =
                        if kind == EntryKind::Parity { bytes.to_vec() } else { sums(bytes) };
                    entries.push((entry(kind, position, ROWS), payload));
                }
                let (entries, payload): (Vec<_>, Vec<_>) = entries.into_iter().unzip();
                crash_with(&mut pair, &entries, &payload.concat()).await;
                pair.bytes[ROWS].copy_from_slice(&data);
                is_right(&mut pair).await;
            });
        }
    }
}

#[test]
fn entries_of_parts_of_blocks_with_checksums_are_passed_over() {
    run(|reactor| async move {
        let mut pair = Pair::checked(&reactor, Level::Raid5, 3, 512).await;
        pair.put(0, &[3; 2 * CHUNK]).await;
        for rows in [512..1024, 0..512, 512..4096] {
            crash_with(&mut pair, &[entry(EntryKind::Data, 0, rows.clone())], &[66_u8; 4096][rows])
                .await;
            is_right(&mut pair).await;
        }
        for (fill, kind) in [(67, EntryKind::Parity), (68, EntryKind::ParitySums)] {
            let entries = [entry(EntryKind::Data, 0, ROWS), entry(kind, 2, 512..1024)];
            let len = entries.iter().map(StoredEntry::payload_len).sum::<u32>();
            crash_with(&mut pair, &entries, &vec![fill; len as usize]).await;
            pair.bytes[ROWS].fill(fill);
            is_right(&mut pair).await;
        }
    });
}

/// Whole regions become zero with one entry: of no more stripes than one of ours.
#[test]
fn more_zeroes_than_one_entry_can_be_of_are_passed_over() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        pair.write_some(40).await;
        for count in [1025, u32::MAX] {
            let entry = StoredEntry::new(EntryKind::Zeroes, 0, 0, 0, count);
            crash_with(&mut pair, &[entry], &[]).await;
            is_right(&mut pair).await;
        }
        assert!(pair.bytes.iter().any(|byte| *byte != 0));
        crash_with(&mut pair, &[StoredEntry::new(EntryKind::Zeroes, 0, 0, 0, 1024)], &[]).await;
        pair.bytes.fill(0);
        is_right(&mut pair).await;
    });
}

#[test]
fn zeroes_up_to_a_stripe_beyond_all_numbers_are_passed_over() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        pair.write_some(40).await;
        for (stripe, count) in [(u64::MAX - 3, 8), (u64::MAX, 1024)] {
            let entry = StoredEntry::new(EntryKind::Zeroes, stripe, 0, 0, count);
            crash_with(&mut pair, &[entry], &[]).await;
            is_right(&mut pair).await;
        }
    });
}

/// A label's areas one behind the other, one of them longer than any buffer.
fn with_long_area(label: &DriveLabel, long: usize) -> [Area; 10] {
    let mut areas = label.layout().areas();
    let end = areas[9].range().end;
    let mut at = areas[0].offset;
    for (index, area) in areas.iter_mut().enumerate() {
        if index == long {
            area.len = BUFFER_BYTES_MAX as u64 + 4096;
        }
        area.offset = area.offset.max(at);
        at = area.range().end;
    }
    areas[9].len = end - areas[9].offset;
    areas
}

#[test]
fn a_label_with_areas_longer_than_any_is_refused() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        pair.write_some(40).await;
        let drives = drives_of(&pair);
        pair.array.stop().await.unwrap();
        drives.iter().for_each(|drive| drive.pull());
        let images: Vec<Vec<u8>> = drives.iter().map(|drive| image(&pair, drive)).collect();
        // Maps, volume table, bad blocks, lease.
        for long in 1..=6 {
            for (drive, image) in drives.iter().zip(&images) {
                pair.file(drive).write_all_at(image, 0).unwrap();
            }
            for home in DriveLabel::homes(DRIVE_BYTES) {
                let mut label = images[1][home as usize..][..DriveLabel::BYTES as usize].to_vec();
                let areas = with_long_area(open(&label, None, home).unwrap(), long);
                let stored = areas.map(|area| [area.offset.to_le_bytes(), area.len.to_le_bytes()]);
                let at = offset_of!(DriveLabel, superblocks);
                set(&mut label, at, stored.as_flattened().as_flattened());
                pair.file(&drives[1]).write_all_at(&label, home).unwrap();
            }
            assembled(&mut pair, &drives).await.unwrap();
            let state = ArrayState::Degraded;
            assert_eq!(pair.array.state(), state, "area {long}: its drive is none of the array");
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// What a start says when this is changed in all superblocks.
fn refused(level: Level, members: usize, change: fn(&mut ArraySuperblock)) {
    run(move |reactor| async move {
        let mut pair = Pair::new(&reactor, level, members, 512).await;
        pair.write_some(40).await;
        let drives = drives_of(&pair);
        pair.array.stop().await.unwrap();
        drives.iter().for_each(|drive| drive.pull());
        for drive in &drives {
            let mut image = image(&pair, drive);
            let label: &DriveLabel = open(&image, None, 0).unwrap();
            let area = label.layout().superblocks;
            for home in (area.offset..area.range().end).step_by(4096) {
                let bytes = &mut image[home as usize..][..4096];
                let Ok(superblock) = open::<ArraySuperblock>(bytes, None, home) else { continue };
                let mut superblock = superblock.clone();
                change(&mut superblock);
                set(bytes, 0, superblock.as_bytes());
            }
            pair.file(drive).write_all_at(&image, 0).unwrap();
        }
        let refused = assembled(&mut pair, &drives).await.err();
        assert!(matches!(refused, Some(AssembleError::NoSuperblock)), "{refused:?}");
    });
}

#[test]
fn an_array_without_stripes_is_refused() {
    refused(Level::Raid5, 3, |superblock| superblock.stripes = 0.into());
}

/// Nor is one that leaves a start no era to go on in.
#[test]
fn an_era_that_no_array_reaches_is_refused() {
    refused(Level::Raid1, 2, |its| its.era = ERA_MAX.into());
    refused(Level::Raid1, 2, |its| its.era = (ERA_MAX - 1).into());
}

#[test]
fn stripes_that_its_groups_cannot_share_are_refused() {
    refused(Level::Raid50, 6, |its| its.stripes = (its.stripes.get() + 1).into());
}
