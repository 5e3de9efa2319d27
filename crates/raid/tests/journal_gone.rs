//! Goal: journals that somebody wrote over are never taken for those of an array that was idle; and
//! those of an array that was idle, or was just being written, never for the other.
//! Method: what stands in the rings is changed between a crash and a start.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;

use crate::journal_gaps::{areas, changes, rings};
use crate::pair::{DRIVE_BYTES, Pair, run};

const CASES: [(Level, usize); 4] =
    [(Level::Raid1, 2), (Level::Raid5, 3), (Level::Raid6, 4), (Level::Raid10, 4)];

async fn written(reactor: &Reactor, level: Level, members: usize) -> Pair {
    let mut pair = Pair::new(reactor, level, members, 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    pair.put(0, &[1; 1 << 20]).await;
    pair.in_place().await;
    pair
}

/// All rings become this.
fn set_rings(pair: &Pair, drives: &[Rc<Drive>], rings: &[Vec<u8>]) {
    let at = areas(pair).journal.offset;
    let all = drives.iter().zip(rings);
    all.for_each(|(drive, ring)| pair.file(drive).write_all_at(ring, at).unwrap());
}

fn blank_rings(pair: &Pair, drives: &[Rc<Drive>]) {
    let blank = vec![0; areas(pair).journal.len as usize];
    set_rings(pair, drives, &vec![blank; drives.len()]);
}

fn images(pair: &Pair, drives: &[Rc<Drive>]) -> Vec<Vec<u8>> {
    let image = |drive: &Rc<Drive>| {
        let mut bytes = vec![0; DRIVE_BYTES as usize];
        pair.file(drive).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    drives.iter().map(image).collect()
}

async fn assembled(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    force: bool,
) -> Result<(), AssembleError> {
    let here = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions { force, ..AssembleOptions::default() };
    pair.array = Array::assemble(&pair.reactor, here, options).await?;
    Ok(())
}

/// What was written last stands in the journals only, and they are blank; or nothing is missing.
#[test]
fn nothing_is_served_from_an_array_whose_journals_were_written_over() {
    for ((level, members), idle) in CASES.into_iter().flat_map(|case| [(case, false), (case, true)])
    {
        run(move |reactor| async move {
            let mut pair = written(&reactor, level, members).await;
            if !idle {
                pair.put(4096, &[2; 8192]).await;
            }
            pair.array.flush().await.unwrap();
            let drives = pair.dies();
            let whole = rings(&pair, &drives);
            blank_rings(&pair, &drives);
            let before = images(&pair, &drives);
            let refused = assembled(&mut pair, &drives, false).await;
            assert_eq!(refused, Err(AssembleError::JournalGone), "{level:?}, idle: {idle}");
            assert!(images(&pair, &drives) == before, "a start that is refused writes nothing");
            // One that has it is enough.
            set_rings(&pair, &drives, &whole);
            blank_rings(&pair, &drives[1..2]);
            assembled(&mut pair, &drives, false).await.unwrap();
            pair.is_whole().await;
        });
    }
}

#[test]
fn by_force_all_that_is_left_agrees() {
    for (level, members) in CASES {
        run(move |reactor| async move {
            let mut pair = written(&reactor, level, members).await;
            pair.put(4096, &[2; 8192]).await;
            pair.array.flush().await.unwrap();
            let drives = pair.dies();
            blank_rings(&pair, &drives);
            // As if the first of them had been stored, and its parity had not.
            let (array, at) = (pair.array.clone(), areas(&pair).data.offset);
            let home =
                at + array.layout().member_offset(ashlar_format::units::StripeIndex(0), 4096);
            pair.file(&drives[0]).write_all_at(&[2; 8192], home).unwrap();
            assembled(&mut pair, &drives, true).await.unwrap();
            while pair.array.status().unsynced_stripes > 0 {
                reactor.sleep(Duration::from_millis(1)).await;
            }
            let old = pair.read(4096, 8192).await.unwrap();
            pair.bytes[4096..4096 + 8192].copy_from_slice(&old);
            pair.check().await;
            pair.scrub_is_clean().await;
            // It is asked once.
            pair.put(0, &[3; 4096]).await;
            let drives = pair.dies();
            assembled(&mut pair, &drives, false).await.unwrap();
            pair.is_whole().await;
        });
    }
}

#[test]
fn an_array_that_was_stopped_has_nothing_in_its_journals() {
    run(|reactor| async move {
        let mut pair = written(&reactor, Level::Raid5, 3).await;
        let drives = pair.drives();
        pair.array.stop().await.unwrap();
        blank_rings(&pair, &drives);
        assembled(&mut pair, &drives, false).await.unwrap();
        pair.is_whole().await;
    });
}

/// Those who had the newest batch are away one after the other, and others have their places.
#[test]
fn who_takes_a_members_place_need_not_have_its_batches() {
    for fenced in [false, true] {
        run(move |reactor| async move {
            let mut pair = written(&reactor, Level::Raid5, 3).await;
            pair.array.flush().await.unwrap();
            for member in 0..3 {
                pair.array.pull_member(MemberIndex(member)).unwrap();
                if fenced {
                    pair.put(0, &[member; 4096]).await;
                    pair.in_place().await;
                }
                pair.replace(member).await;
                pair.rebuilt().await;
            }
            let drives = pair.dies();
            assembled(&mut pair, &drives, false).await.unwrap();
            pair.is_whole().await;
        });
    }
}

/// A power cut tears what is written next, on all members: the batch before it has its place still.
#[test]
fn a_torn_batch_costs_no_other() {
    for (number, len) in (0..24).map(|number| (number, [4096, 64 << 10, 700 << 10][number % 3])) {
        run(move |reactor| async move {
            let mut pair = written(&reactor, Level::Raid5, 3).await;
            for value in 0..number {
                pair.put(512 * value, &vec![value as u8; len]).await;
                pair.array.flush().await.unwrap();
                pair.in_place().await;
            }
            let (drives, acknowledged) = (pair.drives(), pair.bytes.clone());
            let before = rings(&pair, &drives);
            pair.put(0, &vec![99; len]).await;
            pair.dies();
            let mut after = rings(&pair, &drives);
            let changes = changes(&before, &after);
            for (ring, changed) in after.iter_mut().zip(changes) {
                changed.iter().for_each(|at| ring[*at as usize..][..4096].fill(0x77));
            }
            set_rings(&pair, &drives, &after);
            pair.bytes = acknowledged;
            assembled(&mut pair, &drives, false).await.unwrap();
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.is_whole().await;
        });
    }
}
