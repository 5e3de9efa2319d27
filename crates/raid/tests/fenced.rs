//! Goal: a member that fails writes for a while is fenced, and whole again once it is taken back:
//! whatever was under way for it meanwhile.
//! Method: single operations of files in memory fail or wait as long as the test says; the array is
//! compared with a plain copy and scrubbed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{Area, MemberIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::lease::Host;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{Begun, DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset, superblock};

const FENCED: MemberIndex = MemberIndex(1);

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

fn drive_of(pair: &Pair) -> Rc<Drive> {
    pair.array.status().members[FENCED.index()].drive.clone().unwrap()
}

async fn is_stale(pair: &Pair) {
    while pair.array.status().members[FENCED.index()].state != MemberState::Stale {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
}

/// Its rebuild is about to make it a trusted one, when it misses more and is taken back.
#[test]
fn a_rebuild_does_not_end_for_a_member_that_was_fenced_meanwhile() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.array.set_policy(Policy::Journal).await.unwrap();
        pair.write_some(60).await;
        pair.in_place().await;
        let old = drive_of(&pair);
        pair.array.pull_member(FENCED).unwrap();
        pair.put(0, &[3; 512]).await;
        pair.in_place().await;
        let drive = pair.plug_in(&old);
        let file = address(pair.file(&drive));
        let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        // Only the end of the rebuild writes labels.
        let is_label =
            move |its: usize, op: &_| its == file && is_write(op) && offset(op) == Some(0);
        let waits = move |op: bool| if op { Fate::Waits } else { Fate::Passes };
        steer.set(move |its, op| waits(is_label(its, op)));
        pair.array.replace_member(FENCED, drive, [77; 16]).await.unwrap();
        steer.caught(&reactor, 1).await;
        steer.set(move |its, op| match offset(op) {
            Some(at) if its == file && is_write(op) && at >= data => Fate::Fails,
            _ => waits(is_label(its, op)),
        });
        let stripe = pair.array.stripe_bytes() as usize;
        // Fewer errors than fail a drive.
        pair.put(0, &vec![4; 4 * stripe]).await;
        pair.in_place().await;
        is_stale(&pair).await;
        steer.set(move |its, op| waits(is_label(its, op)));
        pair.array.rebuild(|| [78; 16]).await.unwrap();
        assert!(pair.array.status().members[FENCED.index()].catches_up);
        steer.set(|_, _| Fate::Passes);
        pair.rebuilt().await;
        assert_eq!(pair.array.state(), ArrayState::Optimal);
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// After a power cut it would have to be rebuilt again: nobody else is to be pulled before.
#[test]
fn a_rebuilt_member_is_told_of_once_the_drives_say_so() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.write_some(40).await;
        let is_label = |op: &_| is_write(op) && offset(op) == Some(0);
        let waits = |op: bool| if op { Fate::Waits } else { Fate::Passes };
        let old = drive_of(&pair);
        pair.array.pull_member(FENCED).unwrap();
        pair.put(0, &[3; 512]).await;
        pair.in_place().await;
        let drive = pair.plug_in(&old);
        steer.set(move |_, op| waits(is_label(op)));
        pair.array.replace_member(FENCED, drive, [77; 16]).await.unwrap();
        // The end of the rebuild writes its label, and then the superblocks that trust it.
        steer.caught(&reactor, 1).await;
        steer.set(move |_, op| waits(superblock(op).is_some()));
        steer.caught(&reactor, 4).await;
        let status = pair.array.status();
        assert_eq!(status.members[FENCED.index()].state, MemberState::Rebuilding);
        assert_eq!((status.state, status.rebuild.is_some()), (ArrayState::Degraded, true));
        steer.set(|_, _| Fate::Passes);
        pair.rebuilt().await;
        let status = pair.array.status();
        assert_eq!(status.members[FENCED.index()].state, MemberState::Trusted);
        assert_eq!(status.state, ArrayState::Optimal);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// Its superblock cannot be written for a while. In the end it is all that is left.
#[test]
fn a_member_that_could_not_be_told_of_is_not_rebuilt_without_the_maps() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        pair.write_some(20).await;
        pair.in_place().await;
        let other = address(pair.file(&pair.drives()[0]));
        pair.array.pull_member(FENCED).unwrap();
        pair.put(0, &[3; 512]).await;
        pair.in_place().await;
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its == other => Fate::Fails,
            _ => Fate::Passes,
        });
        let drive = pair.new_drive().await;
        let replaced = pair.array.replace_member(FENCED, drive, [77; 16]).await;
        assert!(replaced.is_err(), "{replaced:?}");
        let state = || pair.array.status().members[FENCED.index()].state;
        assert_eq!(state(), MemberState::Stale);
        steer.set(|_, _| Fate::Passes);
        pair.array.rebuild(|| [78; 16]).await.unwrap();
        pair.rebuilt().await;
        assert_eq!(state(), MemberState::Trusted);
        pair.crash_without(&[0]).await;
        pair.check().await;
    });
}

/// The first write of all waits for a superblock, which one drive does not take. It is back when
/// the next goes, on which that superblock still waits.
#[test]
fn who_is_back_before_a_superblock_is_through_stands_for_the_next_that_goes() {
    stands_for_the_next(Level::Raid5, 4, MemberIndex(3));
    stands_for_the_next(Level::Raid1, 2, MemberIndex(0));
}

fn stands_for_the_next(level: Level, members: usize, goes: MemberIndex) {
    run(move |reactor, steer| async move {
        let spec = ArraySpec { policy: Some(Policy::Journal), ..Pair::spec(level) };
        let mut pair = Pair::made(&reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
        let old = drive_of(&pair);
        let next = pair.drives()[goes.index()].clone();
        let (file, other) = (address(pair.file(&old)), address(pair.file(&next)));
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its == file => Fate::Fails,
            Some(_) if its == other => Fate::Waits,
            _ => Fate::Passes,
        });
        pair.bytes[..512].fill(3);
        let (array, buffer) = (pair.array.clone(), reactor.buffer(512));
        buffer.copy_from_slice(&[3; 512]);
        let written = begin(&reactor, async move { array.write(0, buffer.into()).await });
        steer.caught(&reactor, 1).await;
        pair.array.pull_member(FENCED).unwrap();
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its == other => Fate::Waits,
            _ => Fate::Passes,
        });
        let (array, drive) = (pair.array.clone(), pair.plug_in(&old));
        let back =
            begin(&reactor, async move { array.replace_member(FENCED, drive, [77; 16]).await });
        while !drive_of(&pair).is_alive() {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert!(!written.has_ended() && !back.has_ended());
        pair.array.pull_member(goes).unwrap();
        written.ended(&reactor).await.unwrap();
        back.ended(&reactor).await.unwrap();
        let status = pair.array.status();
        assert_eq!(status.members[FENCED.index()].state, MemberState::Trusted);
        assert_eq!(status.members[goes.index()].state, MemberState::Stale);
        steer.set(|_, _| Fate::Passes);
        pair.check().await;
        pair.crash_without(&[goes.index()]).await;
        pair.check().await;
    });
}

/// What is asked of the array while a member's drive goes, is plugged in again, and stands for the
/// next that goes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Write,
    /// To where nothing was written before: it is zeroed first.
    First,
    Zeroes,
    /// That what was written is put in place.
    Place,
    /// The same where nothing was before.
    FirstPlace,
}

impl Asked {
    fn is_first(self) -> bool {
        matches!(self, Asked::First | Asked::FirstPlace)
    }

    fn is_place(self) -> bool {
        matches!(self, Asked::Place | Asked::FirstPlace)
    }
}

#[test]
fn who_is_back_before_a_request_is_through_is_asked_again() {
    for level in [Level::Raid1, Level::Raid5] {
        let spec = |policy| ArraySpec { policy: Some(policy), ..Pair::spec(level) };
        let (journal, bitmap) = (|| spec(Policy::Journal), || spec(Policy::Bitmap));
        let checked = ArraySpec { integrity: true, ..journal() };
        is_asked_again(journal(), |areas| areas.journal, Asked::Write);
        is_asked_again(journal(), |areas| areas.data, Asked::Place);
        is_asked_again(journal(), |areas| areas.data, Asked::Zeroes);
        is_asked_again(checked, |areas| areas.integrity, Asked::FirstPlace);
        is_asked_again(bitmap(), |areas| areas.dirty_map, Asked::Write);
        is_asked_again(bitmap(), |areas| areas.data, Asked::Write);
        is_asked_again(bitmap(), |areas| areas.data, Asked::Zeroes);
        is_asked_again(bitmap(), |areas| areas.data, Asked::First);
    }
}

/// Of the first stripe.
fn ask(pair: &mut Pair, asked: Asked) -> Begun<Result<(), ArrayError>> {
    let (array, bytes) = (pair.array.clone(), pair.array.stripe_bytes());
    let buffer = pair.reactor.buffer(bytes as usize);
    buffer.fill_zero();
    if !asked.is_place() {
        pair.bytes[..bytes as usize].fill(0);
    }
    begin(&pair.reactor, async move {
        match asked {
            Asked::Write | Asked::First => array.write(0, buffer.into()).await,
            Asked::Zeroes => array.write_zeroes(0, bytes).await,
            Asked::Place | Asked::FirstPlace => array.destage_all().await,
        }
    })
}

/// `within`: what of both drives waits while one goes.
fn is_asked_again(spec: ArraySpec, within: impl Fn(&MemberLayout) -> Area, asked: Asked) {
    let parity = u8::from(spec.level == Level::Raid5);
    let area = within(&label::plan_for(DRIVE_BYTES, parity, spec.integrity).unwrap());
    run(move |reactor, steer| async move {
        let goes = MemberIndex(0);
        let drives = vec![DRIVE_BYTES; 2 + usize::from(parity)];
        let mut pair =
            Pair::made(&reactor, &spec, &drives, if spec.integrity { 4096 } else { 512 }).await;
        let stripe = pair.array.stripe_bytes() as usize;
        if !asked.is_first() {
            pair.put(0, &vec![1; 4 * stripe]).await;
        }
        pair.in_place().await;
        pair.array.flush().await.unwrap();
        if asked.is_place() {
            pair.put(0, &vec![3; stripe]).await;
            pair.array.flush().await.unwrap();
        }
        // Who says so of a region would not let anyone join meanwhile.
        while spec.policy == Some(Policy::Bitmap) && pair.array.status().dirty_regions > 0 {
            reactor.sleep(Duration::from_millis(10)).await;
        }
        let old = drive_of(&pair);
        let other = address(pair.file(&pair.drives()[goes.index()]));
        let file = address(pair.file(&old));
        let is_asked =
            move |op: &Op| is_write(op) && offset(op).is_some_and(|at| area.range().contains(&at));
        let rule = move |fate: Fate| {
            move |its: usize, op: &Op| {
                if is_asked(op) && its == other {
                    Fate::Waits
                } else if is_asked(op) && its == file {
                    fate
                } else {
                    Fate::Passes
                }
            }
        };
        steer.set(rule(Fate::Waits));
        let done = ask(&mut pair, asked);
        steer.caught(&reactor, 2).await;
        pair.array.pull_member(FENCED).unwrap();
        // It never lands.
        steer.set(rule(Fate::Fails));
        while steer.waiting() > 1 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        steer.set(rule(Fate::Passes));
        let (array, drive) = (pair.array.clone(), pair.plug_in(&old));
        let back =
            begin(&reactor, async move { array.replace_member(FENCED, drive, [77; 16]).await });
        while !drive_of(&pair).is_alive() {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert!(!done.has_ended());
        pair.array.pull_member(goes).unwrap();
        done.ended(&reactor).await.unwrap();
        back.ended(&reactor).await.unwrap();
        let status = pair.array.status();
        assert_eq!(status.members[FENCED.index()].state, MemberState::Trusted);
        steer.set(|_, _| Fate::Passes);
        pair.check().await;
        // The others say nothing of parity when a crash comes while it changes.
        if parity == 0 || spec.policy == Some(Policy::Journal) {
            pair.crash_without(&[goes.index()]).await;
            pair.check().await;
        }
    });
}

/// It fails writes of a part of the drive for a while, is fenced, and taken back: more than once,
/// while others write.
#[test]
fn a_member_that_fails_writes_for_a_while_is_whole_again() {
    run(|reactor, steer| async move {
        let areas = label::plan(DRIVE_BYTES, 1).unwrap();
        for (level, members) in [(Level::Raid5, 4), (Level::Raid6, 5), (Level::Raid10, 4)] {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.array.set_policy(Policy::Journal).await.unwrap();
            pair.write_some(40).await;
            let file = address(pair.file(&drive_of(&pair)));
            for area in [areas.journal, areas.data, areas.superblocks, areas.dirty_map] {
                steer.set(move |its, op| match offset(op) {
                    Some(at) if its == file && is_write(op) && area.range().contains(&at) => {
                        Fate::Fails
                    }
                    _ => Fate::Passes,
                });
                pair.write_some(20).await;
                // Whatever was not asked for yet.
                let _ = pair.array.set_settings(SettingsChange::default()).await;
                pair.array.flush().await.unwrap();
                pair.in_place().await;
                pair.check().await;
                let still = pair.array.status().members[FENCED.index()].state;
                steer.set(|_, _| Fate::Passes);
                pair.write_some(20).await;
                if still == MemberState::Stale {
                    let drive = drive_of(&pair);
                    let drive = if drive.is_alive() { drive } else { pair.plug_in(&drive) };
                    pair.array.replace_member(FENCED, drive, [77; 16]).await.unwrap();
                    assert!(pair.array.status().members[FENCED.index()].catches_up);
                }
                assert!(still == MemberState::Stale || area == areas.dirty_map, "{area:?}");
                pair.write_some(20).await;
                pair.rebuilt().await;
                assert_eq!(pair.array.state(), ArrayState::Optimal);
                pair.check().await;
                pair.in_place().await;
                pair.scrub_is_clean().await;
            }
            pair.array.stop().await.unwrap();
        }
    });
}

/// Whether it has arrived or not: the drive is known by what it was asked to take, also after the
/// daemon died.
#[test]
fn a_drive_that_was_pulled_while_it_got_a_superblock_is_given_what_it_missed() {
    for (arrives, daemon_dies) in [(false, false), (true, false), (false, true), (true, true)] {
        pulled_with_a_superblock(arrives, daemon_dies);
    }
}

fn pulled_with_a_superblock(arrives: bool, daemon_dies: bool) {
    run(move |reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.array.set_policy(Policy::Journal).await.unwrap();
        let old = drive_of(&pair);
        let file = address(pair.file(&old));
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its == file => Fate::Waits,
            _ => Fate::Passes,
        });
        pair.write_some(20).await;
        steer.caught(&reactor, 1).await;
        pair.array.pull_member(FENCED).unwrap();
        let fate = if arrives { Fate::Passes } else { Fate::Fails };
        steer.set(move |its, _| if its == file { fate } else { Fate::Passes });
        pair.write_some(20).await;
        is_stale(&pair).await;
        assert_eq!(steer.waiting(), 0);
        if daemon_dies {
            let drives = pair.array.status().members.into_iter().filter_map(|its| its.drive);
            let others: Vec<_> = drives.filter(|its| !Rc::ptr_eq(its, &old)).collect();
            pair.starts_with(&others.iter().collect::<Vec<_>>()).await;
        }
        steer.set(|_, _| Fate::Passes);
        let drive = pair.plug_in(&old);
        pair.array.replace_member(FENCED, drive, [77; 16]).await.unwrap();
        let member = pair.array.status().members[FENCED.index()].clone();
        assert!(member.catches_up && member.drive_uuid != [77; 16], "{arrives} {daemon_dies}");
        pair.rebuilt().await;
        pair.check().await;
        pair.in_place().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// What it was given before may land at any time: it counts for nothing.
#[test]
fn a_member_that_answers_no_more_is_done_without() {
    run(|reactor, steer| async move {
        for policy in [Policy::Journal, Policy::Bitmap] {
            // Its lease shows that the others take writes, which all wait for this one.
            let host = Some(Host::new([7; 16], "here"));
            let spec = ArraySpec { host, policy: Some(policy), ..Pair::spec(Level::Raid5) };
            let mut pair = Pair::made(&reactor, &spec, &[DRIVE_BYTES; 4], 512).await;
            pair.write_some(40).await;
            pair.in_place().await;
            let file = address(pair.file(&drive_of(&pair)));
            steer.set(move |its, _| if its == file { Fate::Waits } else { Fate::Passes });
            let began = reactor.now();
            let len = pair.bytes.len();
            pair.put(0, &vec![5; len / 2]).await;
            pair.check().await;
            // Once for all who wait, and not once for each.
            assert!(reactor.now().since(began) < Duration::from_secs(30));
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            pair.put(0, &vec![6; len / 4]).await;
            steer.set(|_, _| Fate::Passes);
            pair.check().await;
            pair.replace(FENCED.0).await;
            pair.rebuilt().await;
            pair.in_place().await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// A crash came when it alone had the next superblock, and it was away at the start after that.
#[test]
fn a_drive_that_has_a_superblock_which_the_others_never_got_was_not_used_elsewhere() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.write_some(20).await;
        let (old, all) = (drive_of(&pair), pair.drives());
        let file = address(pair.file(&old));
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its != file => Fate::Waits,
            _ => Fate::Passes,
        });
        let array = pair.array.clone();
        let _set =
            begin(&reactor, async move { array.set_settings(SettingsChange::default()).await });
        steer.caught(&reactor, 3).await;
        reactor.sleep(Duration::from_millis(50)).await;
        pair.dies();
        steer.drop_waiting(&reactor).await;
        let others: Vec<_> = all.iter().filter(|its| !Rc::ptr_eq(its, &old)).collect();
        pair.starts_with(&others).await;
        pair.write_some(20).await;
        let drive = pair.plug_in(&old);
        pair.array.return_member(FENCED, drive, [77; 16]).await.unwrap();
        pair.rebuilt().await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// A crash leaves the newest superblock on one drive, and a power cut tears the one that the start
/// after it writes, on all. That drive dies: the others still know what was acknowledged before.
#[test]
fn what_was_acknowledged_survives_a_start_that_a_power_cut_tears() {
    run(|reactor, steer| async move {
        let set = |percent| SettingsChange { rebuild_percent: Some(percent), ..Default::default() };
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        pair.write_some(20).await;
        pair.array.set_settings(set(41)).await.unwrap();
        let all = pair.drives();
        let file = address(pair.file(&all[0]));
        steer.set(move |its, op| match superblock(op) {
            Some(_) if its != file => Fate::Waits,
            _ => Fate::Passes,
        });
        let array = pair.array.clone();
        let _set = begin(&reactor, async move { array.set_settings(set(42)).await });
        steer.caught(&reactor, 3).await;
        // The one that passes is durable before the daemon dies.
        reactor.sleep(Duration::from_millis(50)).await;
        pair.dies();
        steer.drop_waiting(&reactor).await;

        // The drive that has the newest is the first to be asked to take the next.
        let torn = Rc::new(Cell::new(None));
        let at = torn.clone();
        steer.set(move |its, op| match superblock(op) {
            Some(place) if its == file || at.get() == Some(place) => {
                at.set(Some(place));
                Fate::Waits
            }
            _ => Fate::Passes,
        });
        let drives: Vec<_> = all.iter().map(|its| pair.plug_in(its)).collect();
        let (options, starting) = (AssembleOptions::default(), reactor.clone());
        let assembled = drives.clone();
        let _start =
            begin(&reactor, async move { Array::assemble(&starting, assembled, options).await });
        steer.caught(&reactor, 4).await;
        drives.iter().for_each(|drive| drive.pull());
        steer.drop_waiting(&reactor).await;
        for drive in &all {
            let again = pair.plug_in(drive);
            let torn_half = reactor.buffer(2048);
            torn_half.copy_from_slice(&[0x5a; 2048]);
            again.write(torn.get().unwrap(), torn_half.into()).await.unwrap();
        }
        pair.starts_with(&all[1..].iter().collect::<Vec<_>>()).await;
        let percent = pair.array.status().settings.rebuild_percent();
        assert!([41, 42].contains(&percent), "{percent}");
        pair.check().await;
    });
}
