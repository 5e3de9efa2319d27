//! Goal: journals that somebody wrote over are never taken for those of an array that was idle; and
//! those of an array that was idle, or was just being written, never for the other.
//! Method: what stands in the rings is changed between a crash and a start.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
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

use crate::damaged::images;
use crate::journal_gaps::{areas, changes, rings};
use crate::pair::{Pair, run, run_on};
use crate::steered::{Fate, Steer, is_write};

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

async fn assembled(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    force: bool,
) -> Result<(), AssembleError> {
    let here: Vec<_> = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions { force, ..AssembleOptions::default() };
    let assembled = Array::assemble(&pair.reactor, here.clone(), options).await;
    if assembled.is_err() {
        here.iter().for_each(|drive| drive.pull());
    }
    pair.array = assembled?;
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
            let gone = Err(AssembleError::JournalGone { degraded: false });
            assert_eq!(refused, gone, "{level:?}, idle: {idle}");
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

/// It dies after each number of writes: whoever starts the array next is asked, too, or resyncs.
#[test]
fn a_start_by_force_that_dies_leaves_nothing_believed() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = written(&reactor, Level::Raid5, 3).await;
        pair.put(4096, &[2; 8192]).await;
        pair.array.flush().await.unwrap();
        let drives = pair.dies();
        blank_rings(&pair, &drives);
        let crashed = images(&pair, &drives);
        let (mut asked, mut doubted) = (0, 0);
        for writes in 0.. {
            for (drive, image) in drives.iter().zip(&crashed) {
                pair.file(drive).write_all_at(image, 0).unwrap();
            }
            let left = Rc::new(Cell::new(writes));
            let its = left.clone();
            steer.set(move |_, op| match (is_write(op), its.get()) {
                (true, 0) => Fate::Fails,
                (true, more) => {
                    its.set(more - 1);
                    Fate::Passes
                }
                (false, _) => Fate::Passes,
            });
            let _ = assembled(&mut pair, &drives, true).await;
            pair.dies();
            let is_over = left.get() > 0;
            steer.set(|_, _| Fate::Passes);
            match assembled(&mut pair, &drives, false).await {
                Err(AssembleError::JournalGone { .. }) => asked += 1,
                started => {
                    started.unwrap();
                    let status = pair.array.status();
                    assert!(status.unsynced_stripes > 0, "after {writes} writes");
                    doubted += 1;
                    pair.dies();
                }
            }
            if is_over {
                break;
            }
        }
        assert!(asked > 10 && doubted > 1, "{asked}, {doubted}");
    });
}

/// Without a member, parity that may not fit the data tells nothing of what it had.
#[test]
fn by_force_a_degraded_array_shows_no_block_that_is_made_of_others() {
    run(|reactor| async move {
        let mut pair = written(&reactor, Level::Raid5, 3).await;
        pair.array.flush().await.unwrap();
        let drives = pair.dies();
        blank_rings(&pair, &drives);
        let left = &drives[1..];
        let refused = assembled(&mut pair, left, false).await;
        assert_eq!(refused, Err(AssembleError::JournalGone { degraded: true }));
        // It asks as long as nobody has said what that means.
        assembled(&mut pair, left, true).await.unwrap();
        let chunk = 16 << 10;
        let (mut lost, mut there) = (0, 0);
        for at in (0..1 << 20).step_by(chunk) {
            match pair.read(at, chunk).await {
                Ok(bytes) => there += usize::from(bytes == pair.bytes[at..at + chunk]),
                Err(_) => lost += 1,
            }
        }
        assert_eq!(lost + there, (1 << 20) / chunk, "wrong data");
        assert!(lost > 0 && there > lost, "{lost} are lost, {there} are not");
    });
}

#[test]
fn an_array_that_was_stopped_has_nothing_in_its_journals() {
    for force in [false, true] {
        run(move |reactor| async move {
            let mut pair = written(&reactor, Level::Raid5, 3).await;
            pair.array.flush().await.unwrap();
            let drives = pair.drives();
            pair.array.stop().await.unwrap();
            blank_rings(&pair, &drives);
            assembled(&mut pair, &drives, force).await.unwrap();
            assert_eq!(pair.array.status().unsynced_stripes, 0, "by force: {force}");
            pair.is_whole().await;
        });
    }
}

/// Without its journal, what was written is not in there any more.
#[test]
fn a_journal_that_has_ended_is_not_missed() {
    for again in [false, true] {
        run(move |reactor| async move {
            let mut pair = written(&reactor, Level::Raid5, 3).await;
            pair.array.flush().await.unwrap();
            pair.array.set_policy(Policy::Bitmap).await.unwrap();
            pair.put(0, &[3; 8192]).await;
            if again {
                pair.array.set_policy(Policy::Journal).await.unwrap();
            }
            let drives = pair.dies();
            blank_rings(&pair, &drives);
            assembled(&mut pair, &drives, false).await.unwrap();
            pair.is_whole().await;
        });
    }
}

/// Those who had the newest batch are away one after the other, and others have their places.
#[test]
fn who_takes_a_members_place_need_not_have_its_batches() {
    run(move |reactor| async move {
        let mut pair = written(&reactor, Level::Raid5, 3).await;
        pair.array.flush().await.unwrap();
        for member in 0..3 {
            pair.array.pull_member(MemberIndex(member)).unwrap();
            pair.replace(member).await;
            pair.rebuilt().await;
        }
        let drives = pair.dies();
        assembled(&mut pair, &drives, false).await.unwrap();
        pair.is_whole().await;
    });
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
