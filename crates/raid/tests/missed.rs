//! Goal: a member that was away is given what it missed and nothing else, if it is the member's own
//! drive and was used nowhere else; whatever happens in between.
//! Method: drives are pulled and come back, with restarts at every step; what is written to them is
//! counted, and the array is compared with a plain copy and scrubbed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::ChangeError;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;

use crate::pair::{Pair, run};

const AWAY: MemberIndex = MemberIndex(1);

const KINDS: [(Level, usize, Policy); 5] = [
    (Level::Raid1, 2, Policy::Bitmap),
    (Level::Raid10, 4, Policy::Bitmap),
    (Level::Raid5, 4, Policy::Bitmap),
    (Level::Raid5, 4, Policy::Journal),
    (Level::Raid6, 5, Policy::Journal),
];

fn state(array: &Array) -> MemberState {
    array.status().members[AWAY.index()].state
}

fn drive_of(pair: &Pair, member: usize) -> Rc<Drive> {
    pair.array.status().members[member].drive.clone().unwrap()
}

async fn filled(pair: &mut Pair) {
    pair.write_some(60).await;
    pair.array.flush().await.unwrap();
}

/// The member's own drive comes back; how much was written to it since.
async fn comes_back(pair: &mut Pair, drive: Rc<Drive>) -> u64 {
    let before = drive.counters().write_bytes;
    pair.array.replace_member(AWAY, drive.clone(), [77; 16]).await.unwrap();
    assert_ne!(pair.array.status().members[AWAY.index()].drive_uuid, [77; 16]);
    pair.check().await;
    pair.rebuilt().await;
    assert_eq!(pair.array.state(), ArrayState::Optimal);
    drive.counters().write_bytes - before
}

#[test]
fn only_what_was_missed_is_rebuilt() {
    run(|reactor| async move {
        for (level, members, policy) in KINDS {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.array.set_policy(policy).await.unwrap();
            filled(&mut pair).await;
            // Else what was written lately counts as missed, too.
            pair.restart(AssembleOptions::default()).await;
            let old = drive_of(&pair, 1);
            pair.array.pull_member(AWAY).unwrap();
            // A sector of the second region, and more of nothing.
            let region = pair.array.region_bytes() as usize;
            pair.put(region + 512, &[3; 512]).await;
            pair.in_place().await;
            assert_eq!(state(&pair.array), MemberState::Stale);
            assert!(pair.array.status().members[1].catches_up);
            let drive = pair.plug_in(&old);
            let written = comes_back(&mut pair, drive).await;
            // The region's part, the emptied journal, and metadata.
            let part = pair.array.region_bytes();
            let journal = pair.array.status().journal.bytes;
            assert!(written < part + journal + (2 << 20), "{level:?}: {written} bytes");
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn what_is_written_while_it_catches_up_is_not_missed() {
    run(|reactor| async move {
        for (level, members, policy) in KINDS {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.array.set_policy(policy).await.unwrap();
            filled(&mut pair).await;
            let old = drive_of(&pair, 1);
            pair.array.pull_member(AWAY).unwrap();
            pair.write_some(60).await;
            let drive = pair.plug_in(&old);
            pair.array.replace_member(AWAY, drive, [77; 16]).await.unwrap();
            pair.write_some(40).await;
            pair.check().await;
            pair.rebuilt().await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// The stale drive is there when the array starts: nobody has to ask for it.
#[test]
fn a_stale_member_that_is_there_at_start_catches_up_by_itself() {
    run(|reactor| async move {
        for (level, members, policy) in KINDS {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.array.set_policy(policy).await.unwrap();
            filled(&mut pair).await;
            let old = drive_of(&pair, 1);
            pair.array.pull_member(AWAY).unwrap();
            pair.write_some(30).await;
            // Started without it, written, stopped; and started with it.
            pair.restart(AssembleOptions { force: true, ..AssembleOptions::default() }).await;
            assert_eq!(state(&pair.array), MemberState::Stale);
            pair.write_some(30).await;
            let drive = pair.plug_in(&old);
            pair.restart_with(AssembleOptions::default(), vec![drive]).await;
            pair.check().await;
            pair.rebuilt().await;
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn another_drive_in_its_place_is_rebuilt_whole() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        filled(&mut pair).await;
        pair.array.pull_member(AWAY).unwrap();
        pair.put(0, &[3; 512]).await;
        pair.replace(1).await;
        assert!(!pair.array.status().members[1].catches_up);
        pair.rebuilt().await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// Once another drive had its place, a drive that comes back is nobody's.
#[test]
fn what_was_missed_is_forgotten_when_nobody_is_behind() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        filled(&mut pair).await;
        let old = drive_of(&pair, 1);
        pair.array.pull_member(AWAY).unwrap();
        pair.put(0, &[3; 512]).await;
        pair.replace(1).await;
        pair.rebuilt().await;
        pair.write_some(20).await;
        let second = drive_of(&pair, 1);
        pair.array.pull_member(AWAY).unwrap();
        pair.put(0, &[4; 512]).await;
        pair.in_place().await;
        drop(second);
        let drive = pair.plug_in(&old);
        pair.array.replace_member(AWAY, drive, [78; 16]).await.unwrap();
        assert!(!pair.array.status().members[1].catches_up, "not the drive that was fenced");
        pair.rebuilt().await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// The drive was started alone meanwhile, and written: nobody knows any more what it has.
#[test]
fn a_drive_that_was_used_elsewhere_is_rebuilt_whole() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        filled(&mut pair).await;
        let old = drive_of(&pair, 1);
        pair.array.pull_member(AWAY).unwrap();
        pair.put(0, &[3; 512]).await;
        let alone = vec![pair.plug_in(&old)];
        let options = AssembleOptions { force: true, ..AssembleOptions::default() };
        let fork = Array::assemble(&reactor, alone, options).await.unwrap();
        let bytes = reactor.buffer(512);
        bytes.copy_from_slice(&[9; 512]);
        fork.write(1 << 20, bytes.into()).await.unwrap();
        fork.stop().await.unwrap();
        let drive = pair.plug_in(&old);
        // Not unless somebody says so.
        let returned = pair.array.return_member(AWAY, drive.clone(), [77; 16]).await;
        assert!(matches!(returned, Err(ChangeError::UsedElsewhere { .. })), "{returned:?}");
        pair.array.replace_member(AWAY, drive, [77; 16]).await.unwrap();
        let status = pair.array.status();
        assert_eq!(status.members[1].drive_uuid, [77; 16]);
        assert!(!status.members[1].catches_up);
        pair.rebuilt().await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// A member that was being filled lacks more than it missed.
#[test]
fn a_member_that_was_being_rebuilt_is_rebuilt_whole() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        filled(&mut pair).await;
        pair.array.pull_member(AWAY).unwrap();
        pair.put(0, &[3; 512]).await;
        pair.replace(1).await;
        let half = drive_of(&pair, 1);
        pair.array.pull_member(AWAY).unwrap();
        pair.write_some(20).await;
        let drive = pair.plug_in(&half);
        pair.array.replace_member(AWAY, drive, [77; 16]).await.unwrap();
        assert!(!pair.array.status().members[1].catches_up);
        pair.rebuilt().await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}
