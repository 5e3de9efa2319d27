//! Goal: drives of an array that were used without each other do not become one array again
//! without a word, whichever went on last.
//! Method: each half is started by force, by itself, some times; then both are there, at a host
//! that remembers nothing, or one of them.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{AssembleError, ChangeError};
use ashlar_raid::label;
use ashlar_raid::lease::Host;
use ashlar_raid::start::{AssembleOptions, Known};
use ashlar_raid::status::{ArrayState, MemberStatus};
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, begin, run, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset, superblock};

pub async fn start(
    pair: &mut Pair,
    drives: &[&Rc<Drive>],
    force: bool,
) -> Result<(), AssembleError> {
    pair.start(drives, AssembleOptions { force, ..AssembleOptions::default() }).await
}

/// A start with these is refused: each side has what the other lacks.
pub async fn is_apart(pair: &mut Pair, drives: &[&Rc<Drive>]) {
    let refused = start(pair, drives, false).await;
    assert!(matches!(refused, Err(AssembleError::Apart { .. })), "{refused:?}");
}

/// It is not taken back by the array that runs.
pub async fn is_used_elsewhere(pair: &mut Pair, member: MemberIndex, drive: &Rc<Drive>) {
    let back = pair.plug_in(drive);
    let refused = pair.array.return_member(member, back, [70; 16]).await;
    assert!(matches!(refused, Err(ChangeError::UsedElsewhere { .. })), "{refused:?}");
}

async fn start_again(pair: &mut Pair, half: usize) -> Result<(), AssembleError> {
    let drive = pair.drives()[half].clone();
    pair.start(&[&drive], had(half as u8)).await
}

/// By a host that had this one last, for all it knows.
fn had(half: u8) -> AssembleOptions {
    let known = Known { generation: 0, epoch: 0, last_epoch: 0, current: vec![[half; 16]] };
    AssembleOptions { known: Some(known), ..AssembleOptions::default() }
}

/// So many starts of the one half and of the other; the last of each is written to.
async fn used_apart(pair: &mut Pair, halves: [&Rc<Drive>; 2], starts: [u32; 2]) {
    for (half, (starts, value)) in halves.iter().zip(starts.into_iter().zip([1, 2])) {
        for _ in 0..starts {
            start(pair, &[*half], true).await.unwrap();
        }
        pair.put(0, &[value; 4096]).await;
    }
}

#[test]
fn halves_that_were_used_apart_are_not_put_together() {
    run(|reactor| async move {
        for starts in [[1, 1], [2, 1], [1, 2], [3, 1]] {
            let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
            pair.write_some(20).await;
            pair.in_place().await;
            let drives = pair.drives();
            let [first, second] = [&drives[0], &drives[1]];
            used_apart(&mut pair, [first, second], starts).await;
            for order in [[first, second], [second, first]] {
                is_apart(&mut pair, &order).await;
            }
            // The one that is chosen, and then the other as a new drive.
            start(&mut pair, &[second], false).await.unwrap();
            pair.check().await;
            let back = pair.plug_in(first);
            let member = MemberIndex(0);
            let refused = pair.array.return_member(member, back.clone(), [70; 16]).await;
            assert!(matches!(refused, Err(ChangeError::UsedElsewhere { .. })), "{refused:?}");
            pair.array.replace_member(member, back, [70; 16]).await.unwrap();
            pair.is_whole().await;
        }
    });
}

/// It went on when the other was pulled, which was started by force elsewhere.
#[test]
fn a_half_that_was_never_started_again_went_on_too() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        let drives = pair.drives();
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.put(0, &[1; 4096]).await;
        start(&mut pair, &[&drives[1]], true).await.unwrap();
        pair.put(0, &[2; 4096]).await;
        is_apart(&mut pair, &[&drives[0], &drives[1]]).await;
        start(&mut pair, &[&drives[1]], false).await.unwrap();
        is_used_elsewhere(&mut pair, MemberIndex(0), &drives[0]).await;
        pair.dies();
    });
}

/// What was replaced was started once more, elsewhere.
#[test]
fn a_half_that_has_another_beside_it_now_went_on_too() {
    run(|reactor| async move {
        for writes in [false, true] {
            let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
            let old = pair.drives();
            pair.array.pull_member(MemberIndex(1)).unwrap();
            pair.replace(1).await;
            pair.rebuilt().await;
            pair.put(0, &[1; 4096]).await;
            let new = pair.drives();
            start(&mut pair, &[&old[1]], true).await.unwrap();
            if writes {
                pair.put(0, &[2; 4096]).await;
            }
            let all = [&new[0], &new[1], &old[1]];
            is_apart(&mut pair, &all).await;
            start(&mut pair, &[&new[0], &new[1]], false).await.unwrap();
            assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]);
            pair.dies();
        }
    });
}

/// Each has what the other lacks, and only one can go on by itself.
#[test]
fn two_that_went_on_together_are_both_filled_anew() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        let drives = pair.drives();
        let [one, two, three] = [&drives[0], &drives[1], &drives[2]];
        start(&mut pair, &[two, three], true).await.unwrap();
        pair.put(0, &[1; 4096]).await;
        pair.in_place().await;
        for _ in 0..2 {
            start(&mut pair, &[one], true).await.unwrap();
        }
        pair.put(0, &[2; 4096]).await;
        is_apart(&mut pair, &[one, two, three]).await;
        start(&mut pair, &[one, two, three], true).await.unwrap();
        let is_stale = |its: &MemberStatus| its.state == MemberState::Stale;
        assert_eq!(pair.array.status().members.iter().filter(|its| is_stale(its)).count(), 2);
        for _ in 0..8 {
            pair.check().await;
        }
        pair.dies();
    });
}

/// A crash came when one alone had the first superblock of a start, which says that another is out
/// that was rebuilt since: it has nothing that the others lack.
#[test]
fn one_that_began_a_start_and_was_away_at_the_next_did_not_go_on() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid10, 4, 512).await;
        pair.write_some(20).await;
        pair.in_place().await;
        let drives = pair.drives();
        pair.array.pull_member(MemberIndex(3)).unwrap();
        pair.write_some(20).await;
        pair.in_place().await;
        pair.dies();
        let file = address(pair.file(&drives[0]));
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its != file => Fate::Waits,
            _ => Fate::Passes,
        });
        let three: Vec<_> = drives[..3].iter().map(|drive| pair.plug_in(drive)).collect();
        let (its, drives_of_it) = (reactor.clone(), three.clone());
        let begun = begin(&reactor, async move {
            let options = AssembleOptions::default();
            Array::assemble(&its, drives_of_it, options).await.map(|_| ())
        });
        steer.caught(&reactor, 2).await;
        reactor.sleep(Duration::from_millis(50)).await;
        three.iter().for_each(|drive| drive.pull());
        steer.drop_waiting(&reactor).await;
        assert!(begun.ended(&reactor).await.is_err());
        start(&mut pair, &[&drives[1], &drives[2], &drives[3]], false).await.unwrap();
        pair.rebuilt().await;
        pair.write_some(20).await;
        pair.in_place().await;
        start(&mut pair, &drives.iter().collect::<Vec<_>>(), false).await.unwrap();
        pair.check().await;
        pair.replace(0).await;
        pair.is_whole().await;
    });
}

/// The same, and the one that both rely on is away when it is back. If the start was by force, its
/// superblock is newer than theirs, also if another drive has its place by now.
#[test]
fn one_that_began_a_start_relies_on_one_that_is_away_and_went_on_with_the_others() {
    for (force, replaced) in [(false, false), (true, false), (true, true)] {
        let steer = Steer::new();
        let its = steer.clone();
        run_on(steer.backend(), |reactor| began_a_start(reactor, its, force, replaced));
    }
}

/// Of three copies the third is out when a start of the others dies: only the first has its
/// superblock.
async fn begun_by_one(reactor: &Reactor, steer: &Steer, force: bool) -> Pair {
    let mut pair = Pair::new(reactor, Level::Raid1, 3, 512).await;
    let drives = pair.drives();
    pair.array.pull_member(MemberIndex(2)).unwrap();
    pair.write_some(20).await;
    pair.in_place().await;
    pair.dies();
    let (file, left) = (address(pair.file(&drives[0])), Cell::new(1));
    steer.set(move |its, op| match superblock(op) {
        Some(_) if its != file || left.replace(0) == 0 => Fate::Fails,
        _ => Fate::Passes,
    });
    start(&mut pair, &[&drives[0], &drives[1]], force).await.unwrap_err();
    steer.set(|_, _| Fate::Passes);
    pair
}

async fn began_a_start(reactor: Reactor, steer: Steer, force: bool, replaced: bool) {
    let mut pair = begun_by_one(&reactor, &steer, force).await;
    let drives = pair.drives();
    pair.start(&[&drives[1], &drives[2]], had(1)).await.unwrap();
    pair.rebuilt().await;
    if replaced {
        pair.replace(0).await;
        pair.rebuilt().await;
    }
    pair.write_some(20).await;
    pair.in_place().await;
    if replaced {
        for force in [false, true] {
            let options = AssembleOptions { known: pair.known(), force, ..Default::default() };
            pair.start(&[&drives[0], &drives[1], &drives[2]], options).await.unwrap();
            pair.check().await;
        }
        return drop(pair.dies());
    }
    let refused = start(&mut pair, &[&drives[0], &drives[2]], false).await;
    let is_so = match &refused {
        Err(AssembleError::Apart { .. }) => force,
        Err(AssembleError::MaybeOld) => !force,
        _ => false,
    };
    assert!(is_so, "{force}: {refused:?}");
    pair.start(&[&drives[0], &drives[2]], had(2)).await.unwrap();
    pair.check().await;
    pair.replace(0).await;
    pair.rebuilt().await;
    pair.check().await;
    pair.dies();
}

/// One that both relied on went on with the third and is away since: it has told what it took
/// after that, so the third has all that the first had.
#[test]
fn one_that_began_a_start_relied_on_one_that_went_on_and_is_away_now() {
    let steer = Steer::new();
    let its = steer.clone();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = begun_by_one(&reactor, &its, false).await;
        let drives = pair.drives();
        pair.start(&[&drives[1], &drives[2]], had(1)).await.unwrap();
        pair.rebuilt().await;
        pair.write_some(20).await;
        pair.in_place().await;
        pair.start(&[&drives[2]], had(2)).await.unwrap();
        pair.write_some(20).await;
        start(&mut pair, &[&drives[0], &drives[2]], false).await.unwrap();
        pair.check().await;
        pair.replace(0).await;
        pair.rebuilt().await;
        pair.check().await;
    });
}

/// The one that both relied on took nothing from the third since.
#[test]
fn one_that_went_on_with_one_that_is_away_is_not_put_with_the_third() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        let drives = pair.drives();
        pair.array.pull_member(MemberIndex(2)).unwrap();
        pair.put(0, &[1; 4096]).await;
        pair.in_place().await;
        start(&mut pair, &[&drives[2]], true).await.unwrap();
        pair.put(0, &[2; 4096]).await;
        is_apart(&mut pair, &[&drives[0], &drives[2]]).await;
    });
}

/// One of each pair is away, and only one of them misses what is written: what the other still
/// relies on says nothing of that pair.
#[test]
fn one_of_another_pair_does_not_tell_what_this_one_has() {
    for replaced in [false, true] {
        run(move |reactor| one_of_each_pair(reactor, replaced));
    }
}

async fn one_of_each_pair(reactor: Reactor, replaced: bool) {
    let mut pair = Pair::new(&reactor, Level::Raid10, 4, 512).await;
    pair.put(0, &[1; 4096]).await;
    let drives = pair.drives();
    pair.array.flush().await.unwrap();
    pair.array.pull_member(MemberIndex(2)).unwrap();
    pair.array.pull_member(MemberIndex(0)).unwrap();
    if replaced {
        pair.replace(0).await;
        pair.rebuilt().await;
    }
    pair.put(0, &[2; 4096]).await;
    let states: Vec<_> = pair.array.status().members.iter().map(|its| its.state).collect();
    assert_eq!(states[2], MemberState::Trusted, "it has missed nothing");
    start(&mut pair, &[&drives[0], &drives[2]], true).await.unwrap();
    assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]);
    is_used_elsewhere(&mut pair, MemberIndex(1), &drives[1]).await;
    is_apart(&mut pair, &[&drives[0], &drives[1], &drives[3]]).await;
    pair.dies();
}

/// The one that missed it is away again, and those of the other pair are all that can tell.
#[test]
fn those_of_another_pair_tell_nothing_of_one_that_went_on_without_its_own() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid10, 4, 512).await;
        pair.put(0, &[1; 4096]).await;
        let drives = pair.drives();
        pair.array.flush().await.unwrap();
        pair.array.pull_member(MemberIndex(2)).unwrap();
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.put(0, &[2; 4096]).await;
        start(&mut pair, &[&drives[2]], true).await.unwrap();
        is_apart(&mut pair, &[&drives[1], &drives[2], &drives[3]]).await;
        pair.dies();
    });
}

/// Two went on without the third, which is started by force: that one of the two is relied on, and
/// away, says nothing of what the other has.
#[test]
fn one_of_two_that_went_on_together_is_not_filled_anew_by_itself() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        let drives = pair.drives();
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.put(0, &[1; 4096]).await;
        start(&mut pair, &[&drives[0]], true).await.unwrap();
        is_used_elsewhere(&mut pair, MemberIndex(1), &drives[1]).await;
        is_apart(&mut pair, &[&drives[0], &drives[1]]).await;
        pair.dies();
    });
}

fn on_host(id: u8) -> AssembleOptions {
    AssembleOptions { host: Some(Host::new([id; 16], "here")), ..AssembleOptions::default() }
}

fn by_force(id: u8) -> AssembleOptions {
    AssembleOptions { force: true, ..on_host(id) }
}

/// What another host did since, it does not know: nor whether that is what counts.
#[test]
fn the_half_that_this_host_had_last_goes_on_if_nobody_had_the_array_since() {
    run(|reactor| async move {
        for (mine, [ours, theirs], force) in [
            (0, [1, 3], false),
            (0, [3, 1], false),
            (0, [3, 3], true),
            (1, [2, 4], false),
            (1, [4, 2], true),
        ] {
            let case = format!("{mine} {ours} {theirs} {force}");
            let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
            let drives = pair.drives();
            let (mine, other) = (&drives[mine], &drives[1 - mine]);
            for _ in 0..theirs {
                pair.start(&[other], by_force(2)).await.unwrap();
            }
            pair.put(0, &[2; 4096]).await;
            for _ in 0..ours {
                pair.start(&[mine], by_force(1)).await.unwrap();
            }
            pair.put(0, &[1; 4096]).await;
            for again in 0..4 {
                let known = pair.known();
                let options = AssembleOptions { force, known, ..on_host(1) };
                let started = pair.start(&[other, mine], options).await;
                if ours < theirs {
                    assert!(matches!(started, Err(AssembleError::Apart { .. })), "{case}");
                    break;
                }
                started.unwrap_or_else(|error| panic!("{case} {again}: {error}"));
                assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096], "{case} {again}");
                is_refused(&mut pair, other).await;
            }
            pair.dies();
        }
    });
}

/// The other half has another drive beside it by now, in the place of the one that this host had.
#[test]
fn a_half_that_was_replaced_elsewhere_is_not_given_up_silently() {
    run(|reactor| async move {
        for with_both in [false, true] {
            let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
            let old = pair.drives();
            for _ in 0..2 {
                pair.start(&[&old[1]], by_force(2)).await.unwrap();
            }
            for _ in 0..3 {
                pair.array.pull_member(MemberIndex(0)).unwrap();
                pair.replace(0).await;
                pair.rebuilt().await;
            }
            pair.put(0, &[2; 4096]).await;
            let new = pair.drives();
            pair.start(&[&new[0], &new[1]], on_host(2)).await.unwrap();
            last_used(&mut pair, &old[0]).await;
            let known = pair.known();
            let here =
                if with_both { vec![&old[0], &new[0], &old[1]] } else { vec![&old[0], &new[0]] };
            // Never the other history.
            match pair.start(&here, AssembleOptions { known, ..on_host(1) }).await {
                Ok(()) => assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]),
                Err(AssembleError::Apart { .. } | AssembleError::MaybeOld) => {}
                Err(error) => panic!("{error}"),
            }
            pair.dies();
        }
    });
}

/// A drive that stands in the place of one of ours goes with those that it was filled from.
#[test]
fn one_that_took_a_place_apart_is_left_alone_with_the_rest() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        let old = pair.drives();
        for _ in 0..2 {
            pair.start(&[&old[1]], by_force(2)).await.unwrap();
        }
        pair.put(0, &[2; 4096]).await;
        pair.replace(2).await;
        pair.rebuilt().await;
        let joined = pair.array.status().members[2].drive.clone().unwrap();
        last_used(&mut pair, &old[0]).await;
        let known = pair.known();
        for here in [&[&old[0], &old[1], &joined][..], &[&joined, &old[0]]] {
            let options = AssembleOptions { known: known.clone(), ..on_host(1) };
            pair.start(here, options).await.unwrap();
            assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]);
        }
        pair.dies();
    });
}

/// Started three times, once of them by force: theirs, by force twice, is newer.
async fn last_used(pair: &mut Pair, ours: &Rc<Drive>) {
    for force in [true, false, false] {
        pair.start(&[ours], AssembleOptions { force, ..on_host(1) }).await.unwrap();
        pair.put(0, &[1; 4096]).await;
    }
}

/// Who is away first.
async fn is_refused(pair: &mut Pair, half: &Rc<Drive>) {
    let mut members = pair.array.status().members.into_iter();
    let away = members.find(|its| its.drive.is_none()).unwrap().index;
    is_used_elsewhere(pair, away, half).await;
}

/// Its lease is of this host, and as old as the one that the array has.
#[test]
fn a_half_that_this_host_used_apart_is_not_filled_anew_by_itself() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        let drives = pair.drives();
        for half in [1, 0] {
            for _ in 0..2 {
                pair.start(&[&drives[half]], by_force(1)).await.unwrap();
            }
            pair.put(0, &[half as u8; 4096]).await;
        }
        is_refused(&mut pair, &drives[1]).await;
        pair.dies();
    });
}

/// What it was filled with is of the other history.
#[test]
fn one_that_was_being_filled_apart_is_not_believed() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        pair.put(0, &[1; 4096]).await;
        pair.in_place().await;
        let drives = pair.drives();
        start(&mut pair, &[&drives[1]], true).await.unwrap();
        pair.put(0, &[2; 4096]).await;
        start(&mut pair, &[&drives[1], &drives[2]], true).await.unwrap();
        assert_eq!(pair.array.status().members[2].state, MemberState::Rebuilding);
        for _ in 0..3 {
            start(&mut pair, &[&drives[0]], true).await.unwrap();
        }
        let known = Some(Known { generation: 0, epoch: 0, last_epoch: 0, current: vec![[0; 16]] });
        let options = AssembleOptions { known, ..AssembleOptions::default() };
        for here in [&[0, 2][..], &[0, 1, 2]] {
            let here: Vec<&Rc<Drive>> = here.iter().map(|index| &drives[*index]).collect();
            pair.start(&here, options.clone()).await.unwrap();
            for _ in 0..8 {
                assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]);
            }
            assert_ne!(pair.array.status().members[2].state, MemberState::Trusted);
        }
        pair.dies();
    });
}

/// It has the newest superblock, and all that it was filled from are away.
#[test]
fn one_that_went_on_is_not_believed_beside_one_that_was_being_filled() {
    let steer = Steer::new();
    let its = steer.clone();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 3, 512).await;
        let (drives, new) = (pair.drives(), pair.new_drive().await);
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.array.pull_member(MemberIndex(2)).unwrap();
        let (file, data) = (address(pair.file(&new)), label::plan(DRIVE_BYTES, 0).unwrap().data);
        its.set(move |its, op| match offset(op) {
            Some(at) if its == file && is_write(op) && data.range().contains(&at) => Fate::Waits,
            _ => Fate::Passes,
        });
        pair.array.replace_member(MemberIndex(2), new.clone(), [70; 16]).await.unwrap();
        pair.dies();
        its.drop_waiting(&reactor).await;
        start(&mut pair, &[&drives[1]], true).await.unwrap();
        pair.put(0, &[1; 4096]).await;
        pair.array.stop().await.unwrap();
        let known = pair.known();
        for _ in 0..2 {
            its.set(move |its, op| match superblock(op) {
                Some(_) if its != file => Fate::Fails,
                _ => Fate::Passes,
            });
            start(&mut pair, &[&drives[0], &new], true).await.unwrap_err();
            its.set(|_, _| Fate::Passes);
        }
        is_apart(&mut pair, &[&drives[1], &new]).await;
        let options = AssembleOptions { known, ..AssembleOptions::default() };
        pair.start(&[&drives[1], &new], options).await.unwrap();
        assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]);
        pair.dies();
    });
}

#[test]
fn by_force_one_of_them_is_the_array() {
    run(|reactor| async move {
        for (starts, now) in [([3, 1], 1), ([1, 3], 2)] {
            let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
            let drives = pair.drives();
            used_apart(&mut pair, [&drives[0], &drives[1]], starts).await;
            start(&mut pair, &[&drives[0], &drives[1]], true).await.unwrap();
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            assert_eq!(pair.read(0, 4096).await.unwrap(), [now; 4096]);
            pair.put(0, &[now; 4096]).await;
            // It stays decided: nobody has to insist again.
            start(&mut pair, &[&drives[0], &drives[1]], false).await.unwrap();
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            let mut members = pair.array.status().members.into_iter();
            let stale = members.find(|its| its.state == MemberState::Stale).unwrap();
            pair.replace(stale.index.0).await;
            pair.is_whole().await;
        }
    });
}

/// Starts of the first die before they have said that the other is out.
#[test]
fn one_that_is_relied_on_and_went_on_alone_is_filled_anew() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        pair.put(0, &[1; 4096]).await;
        pair.in_place().await;
        let drives = pair.drives();
        for _ in 0..3 {
            let left = Cell::new(1);
            steer.set(move |_, op| match superblock(op) {
                Some(_) if left.replace(0) == 0 => Fate::Fails,
                _ => Fate::Passes,
            });
            start_again(&mut pair, 0).await.unwrap_err();
        }
        steer.set(|_, _| Fate::Passes);
        start_again(&mut pair, 1).await.unwrap();
        pair.put(0, &[2; 4096]).await;
        is_apart(&mut pair, &[&drives[0], &drives[1]]).await;
        start(&mut pair, &[&drives[0], &drives[1]], true).await.unwrap();
        assert_eq!(pair.array.state(), ArrayState::Degraded);
        assert_eq!(pair.read(0, 4096).await.unwrap(), [1; 4096]);
        pair.put(0, &[3; 4096]).await;
        pair.replace(1).await;
        pair.is_whole().await;
    });
}
