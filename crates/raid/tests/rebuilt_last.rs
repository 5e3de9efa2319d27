//! Goal: whoever was the source of a rebuild, and went before its own superblock said that it is
//! over, is not started by itself once the other has gone on.
//! Method: single writes of superblocks fail or wait, of mirrors and of two members with parity;
//! the member that was left behind is started without the other, at a host that remembers nothing.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{ArraySuperblock, Level, MemberState};
use ashlar_format::record;
use ashlar_format::units::MemberIndex;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset, superblock};

const SOURCE: MemberIndex = MemberIndex(0);
const FILLED: MemberIndex = MemberIndex(1);

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

/// Two members, either of which is enough.
async fn made(reactor: &Reactor, mirrored: bool) -> Pair {
    let spec = match mirrored {
        true => Pair::spec(Level::Raid1),
        false => ArraySpec {
            shape: Shape { parity: 1, ..Shape::default() },
            ..Pair::spec(Level::RaidNm)
        },
    };
    let mut pair = Pair::made(reactor, &spec, &[DRIVE_BYTES; 2], 512).await;
    pair.write_some(20).await;
    pair
}

/// The second member missed something and was given it; the superblock that trusts it is about to
/// be written. Returns the drive of the source.
async fn about_to_end(pair: &mut Pair, steer: &Steer) -> Rc<Drive> {
    let drives = pair.drives();
    pair.array.pull_member(FILLED).unwrap();
    pair.put(0, &[1; 4096]).await;
    pair.in_place().await;
    let filled = pair.plug_in(&drives[FILLED.index()]);
    // Only the end of the rebuild writes labels.
    steer.set(|_, op| match offset(op) {
        Some(0) if is_write(op) => Fate::Waits,
        _ => Fate::Passes,
    });
    pair.array.replace_member(FILLED, filled, [77; 16]).await.unwrap();
    steer.caught(&pair.reactor, 1).await;
    drives[SOURCE.index()].clone()
}

/// Nothing is acknowledged that the source does not have.
async fn waits_for(pair: &Pair) {
    let refused = pair.array.write(0, pair.reactor.buffer(4096).into()).await;
    assert!(matches!(refused, Err(ArrayError::Lost)), "{refused:?}");
    let source = &pair.array.status().members[SOURCE.index()];
    assert_eq!(source.state, MemberState::Trusted);
}

#[test]
fn who_went_before_a_rebuild_ended_is_waited_for() {
    for mirrored in [true, false] {
        run(move |reactor, steer| async move {
            let mut pair = made(&reactor, mirrored).await;
            let source = about_to_end(&mut pair, &steer).await;
            pair.array.pull_member(SOURCE).unwrap();
            steer.set(|_, _| Fate::Passes);
            pair.rebuild_ends().await;
            waits_for(&pair).await;
            let back = pair.plug_in(&source);
            pair.array.return_member(SOURCE, back, [70; 16]).await.unwrap();
            pair.rebuilt().await;
            pair.put(0, &[2; 4096]).await;
            // Now it knows.
            let source = pair.drives()[SOURCE.index()].clone();
            pair.array.pull_member(SOURCE).unwrap();
            pair.put(0, &[3; 4096]).await;
            let refused = pair.start(&[&source], AssembleOptions::default()).await;
            assert!(matches!(refused, Err(AssembleError::MaybeOld)), "{refused:?}");
        });
    }
}

/// Whether a superblock trusts the second member.
fn trusts_filled(superblock: &ArraySuperblock) -> bool {
    superblock.members()[FILLED.index()].state() == Ok(MemberState::Trusted)
}

/// What becomes of superblocks for these drives that trust the second member.
fn told_of<const N: usize>(steer: &Steer, pair: &Pair, drives: [&Rc<Drive>; N], fate: Fate) {
    let files = drives.map(|drive| address(pair.file(drive)));
    steer.set(move |its, op| match (op, superblock(op)) {
        (Op::Write { from, .. }, Some(home)) if files.contains(&its) => {
            let mut bytes = vec![0; from.len()];
            from.copy_to_slice(&mut bytes);
            let superblock = record::open::<ArraySuperblock>(&bytes, None, home);
            if superblock.is_ok_and(trusts_filled) { fate } else { Fate::Passes }
        }
        _ => Fate::Passes,
    });
}

fn takes_no_superblock(steer: &Steer, pair: &Pair, drive: &Rc<Drive>) {
    let file = address(pair.file(drive));
    steer.set(move |its, op| match superblock(op) {
        Some(_) if its == file => Fate::Fails,
        _ => Fate::Passes,
    });
}

/// Until a drive's newest superblock is one.
async fn has_heard(pair: &Pair, drive: &Rc<Drive>) {
    while !trusts_filled(&pair.superblock(drive).await) {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn who_could_not_be_told_is_not_left_behind() {
    for mirrored in [true, false] {
        run(move |reactor, steer| async move {
            let mut pair = made(&reactor, mirrored).await;
            let source = about_to_end(&mut pair, &steer).await;
            told_of(&steer, &pair, [&source], Fate::Fails);
            pair.rebuild_ends().await;
            pair.array.pull_member(SOURCE).unwrap();
            waits_for(&pair).await;
            steer.set(|_, _| Fate::Passes);
            // A write of it failed, so it is not taken back without a start.
            let filled = pair.drives()[FILLED.index()].clone();
            pair.starts_with(&[&source, &filled]).await;
            pair.put(0, &[2; 4096]).await;
            pair.is_whole().await;
        });
    }
}

/// It answers no more while it is told.
#[test]
fn who_goes_while_it_is_told_is_not_left_behind() {
    for mirrored in [true, false] {
        run(move |reactor, steer| async move {
            let mut pair = made(&reactor, mirrored).await;
            let source = about_to_end(&mut pair, &steer).await;
            told_of(&steer, &pair, [&source], Fate::Waits);
            has_heard(&pair, &pair.drives()[FILLED.index()]).await;
            pair.array.pull_member(SOURCE).unwrap();
            steer.drop_waiting(&reactor).await;
            pair.rebuild_ends().await;
            waits_for(&pair).await;
            let back = pair.plug_in(&source);
            pair.array.return_member(SOURCE, back, [70; 16]).await.unwrap();
            pair.put(0, &[2; 4096]).await;
            pair.is_whole().await;
        });
    }
}

/// The daemon dies when the one that was rebuilt has the superblock which says so, and the other
/// has not.
#[test]
fn a_start_leaves_nobody_behind_that_has_not_heard() {
    for mirrored in [true, false] {
        run(move |reactor, steer| async move {
            let mut pair = made(&reactor, mirrored).await;
            let source = about_to_end(&mut pair, &steer).await;
            let filled = pair.drives()[FILLED.index()].clone();
            told_of(&steer, &pair, [&source], Fate::Waits);
            has_heard(&pair, &filled).await;
            pair.dies();
            steer.drop_waiting(&reactor).await;
            takes_no_superblock(&steer, &pair, &source);
            let refused = pair.start(&[&source, &filled], AssembleOptions::default()).await;
            assert!(matches!(refused, Err(AssembleError::Array(ArrayError::Lost))), "{refused:?}");
            steer.set(|_, _| Fate::Passes);
            pair.starts_with(&[&source, &filled]).await;
            pair.put(0, &[2; 4096]).await;
            pair.is_whole().await;
        });
    }
}

/// Of three copies one was away for a moment, and has not heard; but it trusts one that has.
#[test]
fn who_trusts_one_that_knows_may_be_left_behind_with_it() {
    run(|reactor, _| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        pair.write_some(20).await;
        pair.in_place().await;
        let drives = pair.drives();
        pair.array.pull_member(MemberIndex(2)).unwrap();
        pair.replace(2).await;
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.rebuilt().await;
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.put(0, &[2; 4096]).await;
        pair.check().await;
        for left in [vec![&drives[0]], vec![&drives[1]], vec![&drives[0], &drives[1]]] {
            let refused = pair.start(&left, AssembleOptions::default()).await;
            assert!(matches!(refused, Err(AssembleError::MaybeOld)), "{refused:?}");
        }
    });
}

/// Of three copies one has not heard, and takes nothing at the next start: it trusts one that has.
#[test]
fn one_that_cannot_be_told_holds_up_no_start_of_others() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        pair.write_some(20).await;
        about_to_end(&mut pair, &steer).await;
        let drives = pair.drives();
        told_of(&steer, &pair, [&drives[2]], Fate::Waits);
        has_heard(&pair, &drives[0]).await;
        has_heard(&pair, &drives[1]).await;
        pair.dies();
        steer.drop_waiting(&reactor).await;
        takes_no_superblock(&steer, &pair, &drives[2]);
        pair.starts_with(&[&drives[0], &drives[1], &drives[2]]).await;
        pair.put(0, &[2; 4096]).await;
        let refused = pair.start(&[&drives[2]], AssembleOptions::default()).await;
        assert!(matches!(refused, Err(AssembleError::MaybeOld)), "{refused:?}");
    });
}

/// Of two pairs the source is absent at the next start, and one of the others takes nothing there.
#[test]
fn who_cannot_be_told_is_not_left_behind_with_one_that_is_absent() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid10, 4, 512).await;
        pair.write_some(20).await;
        let source = about_to_end(&mut pair, &steer).await;
        let drives = pair.drives();
        let (filled, told, other) = (&drives[FILLED.index()], &drives[2], &drives[3]);
        told_of(&steer, &pair, [&source, other], Fate::Waits);
        has_heard(&pair, filled).await;
        has_heard(&pair, told).await;
        pair.dies();
        steer.drop_waiting(&reactor).await;
        takes_no_superblock(&steer, &pair, other);
        let refused = pair.start(&[filled, told, other], AssembleOptions::default()).await;
        assert!(matches!(refused, Err(AssembleError::Unheard)), "{refused:?}");
        steer.set(|_, _| Fate::Passes);
        pair.starts_with(&[filled, told, other]).await;
        pair.put(0, &[2; 4096]).await;
        let refused = pair.start(&[&source, other], AssembleOptions::default()).await;
        assert!(refused.is_err());
    });
}
