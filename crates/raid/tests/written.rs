//! Goal: what was never written costs nothing and reads as zeroes; what was, is kept; what was
//! discarded is as if it had never been written.
//! Method: arrays on drives full of other bytes; what the drives moved is counted.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;

use crate::pair::{DRIVE_BYTES, Pair, run};

const LEVELS: [(Level, usize); 5] = [
    (Level::Raid0, 3),
    (Level::Raid1, 2),
    (Level::Raid10, 4),
    (Level::Raid5, 4),
    (Level::Raid6, 5),
];

fn drives(array: &Array) -> Vec<Rc<Drive>> {
    array.status().members.into_iter().filter_map(|member| member.drive).collect()
}

/// Bytes read and written by all members.
fn moved(array: &Array) -> (u64, u64) {
    let counters = drives(array).into_iter().map(|drive| drive.counters());
    counters.fold((0, 0), |(read, written), c| (read + c.read_bytes, written + c.write_bytes))
}

#[test]
fn a_new_array_is_made_at_once_and_reads_as_zeroes_without_a_drive() {
    run(|reactor| async move {
        for (level, members) in LEVELS {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            // `new` itself filled the drives.
            let (read, written) = moved(&pair.array);
            let own = written - members as u64 * DRIVE_BYTES;
            assert!(own < members as u64 * (1 << 20), "{level:?}: {own} bytes were written");
            pair.check().await;
            assert_eq!(moved(&pair.array).0, read, "{level:?}: reads went to the drives");
            let status = pair.array.status();
            assert_eq!((status.written_regions, status.unsynced_stripes), (0, 0));
            assert!(status.dirty_regions == 0 && status.resync.is_none());
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn only_regions_that_were_written_take_part_in_anything() {
    run(|reactor| async move {
        for (level, members) in LEVELS {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            let region = pair.array.region_bytes() as usize;
            assert!(pair.bytes.len() > region);
            // One sector in the middle of the second region.
            pair.put(region + region / 2, &[7; 512]).await;
            pair.check().await;
            pair.in_place().await;
            assert_eq!(pair.array.status().written_regions, 1);
            pair.check().await;
            pair.restart(AssembleOptions::default()).await;
            pair.check().await;
            assert_eq!(pair.array.status().written_regions, 1, "{level:?}");
            if level != Level::Raid0 {
                pair.scrub_is_clean().await;
                pair.array.pull_member(MemberIndex(1)).unwrap();
                pair.check().await;
                pair.replace(1).await;
                pair.rebuilt().await;
                let new = pair.array.status().members[1].drive.clone().unwrap();
                let own = new.counters().write_bytes - DRIVE_BYTES;
                let most = region as u64 + (2 << 20);
                assert!(own < most, "{level:?}: {own} bytes were written to the new drive");
                pair.check().await;
                pair.scrub_is_clean().await;
            }
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn what_is_zeroed_or_discarded_as_a_whole_region_is_forgotten() {
    run(|reactor| async move {
        for (level, members) in LEVELS {
            let mut pair = Pair::new(&reactor, level, members, 4096).await;
            let region = pair.array.region_bytes() as usize;
            pair.write_some(60).await;
            pair.in_place().await;
            let before = pair.array.status().written_regions;
            assert!(before >= 3, "{before} regions");
            // From the middle of one region to the middle of another.
            let (from, to) = (region / 2, 2 * region + region / 2);
            pair.bytes[from..to].fill(0);
            pair.array.write_zeroes(from as u64, (to - from) as u64).await.unwrap();
            assert_eq!(pair.array.status().written_regions, before - 1);
            pair.check().await;
            pair.bytes[..region].fill(0);
            pair.array.discard(0, region as u64).await.unwrap();
            assert_eq!(pair.array.status().written_regions, before - 2);
            pair.restart(AssembleOptions::default()).await;
            pair.check().await;
            assert_eq!(pair.array.status().written_regions, before - 2);
            pair.write_some(60).await;
            pair.check().await;
            if level != Level::Raid0 {
                pair.scrub_is_clean().await;
            }
            pair.array.stop().await.unwrap();
        }
    });
}

/// A degraded array forgets, too, and the records that a crash would store again with it.
#[test]
fn a_degraded_array_forgets() {
    run(|reactor| async move {
        for (level, members) in LEVELS.into_iter().skip(1) {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.write_some(40).await;
            pair.array.pull_member(MemberIndex(0)).unwrap();
            pair.write_some(40).await;
            let region = pair.array.region_bytes() as usize;
            pair.bytes[..region].fill(0);
            pair.array.write_zeroes(0, region as u64).await.unwrap();
            pair.put(region - 512, &[9; 512]).await;
            pair.check().await;
            let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
            pair.restart(options).await;
            pair.check().await;
            pair.replace(0).await;
            pair.rebuilt().await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn a_member_that_is_away_when_a_region_is_first_written_is_fenced() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.array.pull_member(MemberIndex(2)).unwrap();
        let state = |array: &Array| array.status().members[2].state;
        pair.check().await;
        assert_eq!(state(&pair.array), MemberState::Trusted);
        // The first stripe's parity is on member 3, its first chunk on member 0.
        pair.put(0, &[1; 512]).await;
        pair.in_place().await;
        assert_eq!(state(&pair.array), MemberState::Stale);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn an_array_that_lost_more_than_it_can_bear_takes_no_first_writes() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.put(0, &[1; 512]).await;
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.array.pull_member(MemberIndex(1)).unwrap();
        assert_eq!(pair.array.state(), ArrayState::Failed);
        let region = pair.array.region_bytes();
        let bytes = reactor.buffer(512);
        assert_eq!(pair.array.write(region, bytes.into()).await, Err(ArrayError::Lost));
        assert_eq!(pair.read(region as usize, 512).await, Ok(vec![0; 512]));
    });
}

/// As version 1 wrote it: what stands on the drives is the data.
#[test]
fn an_array_without_the_map_is_written_everywhere() {
    run(|reactor| async move {
        let pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        let members = drives(&pair.array);
        pair.array.stop().await.unwrap();
        let area = label::plan(DRIVE_BYTES, 0).unwrap().written_map;
        for drive in &members {
            drive.write_zeroes(area.offset, area.len).await.unwrap();
        }
        let array = Array::assemble(&reactor, members, AssembleOptions::default()).await.unwrap();
        let status = array.status();
        assert_eq!(status.written_regions, status.regions);
        let into = reactor.buffer(512);
        array.read(0, into.clone().into()).await.unwrap();
        assert_eq!(into.bytes(), [0xa5; 512]);
    });
}
