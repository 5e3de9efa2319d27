//! Goal: what was half done when drives went is neither taken for done nor waited for without end.
//! Method: single operations are held or fail, drives are pulled at that moment, and come back.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{Area, MemberIndex, StripeIndex};
use ashlar_format::volume_table::StoredVolume;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, ChangeError};
use ashlar_raid::label;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{Begun, DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

async fn filled(reactor: &Reactor, members: usize, policy: Policy) -> Pair {
    let spec = ArraySpec { policy: Some(policy), ..Pair::spec(Level::Raid5) };
    let mut pair = Pair::made(reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
    for at in (0..pair.bytes.len()).step_by(1 << 20) {
        pair.put(at, &vec![(at >> 20) as u8 + 1; 1 << 20]).await;
    }
    pair.in_place().await;
    pair.array.flush().await.unwrap();
    pair
}

/// Its first MiB is 1s, and the rest was never written.
async fn written(reactor: &Reactor, level: Level, members: usize, policy: Policy) -> Pair {
    let spec = ArraySpec { policy: Some(policy), ..Pair::spec(level) };
    let mut pair = Pair::made(reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
    pair.put(0, &[1; 1 << 20]).await;
    pair.array.flush().await.unwrap();
    pair
}

/// Writes to one area of these drives.
fn steer_area(
    pair: &Pair,
    steer: &Steer,
    drives: &[&Rc<Drive>],
    area: fn(&MemberLayout) -> Area,
    fate: Fate,
) {
    let area = area(&label::plan(DRIVE_BYTES, 1).unwrap()).range();
    let files: Vec<usize> = drives.iter().map(|drive| address(pair.file(drive))).collect();
    steer.set(move |file, op| {
        let is_there = offset(op).is_some_and(|at| area.contains(&at));
        if files.contains(&file) && is_write(op) && is_there { fate } else { Fate::Passes }
    });
}

fn pull(pair: &Pair, members: &[u8]) {
    members.iter().for_each(|member| pair.array.pull_member(MemberIndex(*member)).unwrap());
}

async fn comes_back(pair: &mut Pair, member: u8, drive: &Rc<Drive>) -> Result<(), ChangeError> {
    let again = pair.plug_in(drive);
    pair.array.return_member(MemberIndex(member), again, [77 + member; 16]).await
}

async fn volumes(array: &Rc<Array>) -> Vec<String> {
    let table = array.read_table().await.unwrap();
    table.volumes().iter().map(|its| its.name().unwrap().to_owned()).collect()
}

/// So many volumes.
async fn name_volumes(array: &Rc<Array>, count: u32) -> Result<(), ArrayError> {
    let mut table = array.read_table().await.unwrap();
    for (number, stored) in table.volumes.iter_mut().take(count as usize).enumerate() {
        *stored = StoredVolume::blank();
        stored.name[0] = b'a' + number as u8;
    }
    table.volume_count = count.into();
    array.write_table(&table).await
}

/// Until the table of volumes is written to a drive, and to all others.
async fn table_is_written(pair: &Pair, steer: &Steer, drive: &Rc<Drive>) {
    let area = label::plan(DRIVE_BYTES, 1).unwrap().volume_table.range();
    let (watched, is_written) = (address(pair.file(drive)), Rc::new(Cell::new(false)));
    let seen = is_written.clone();
    steer.set(move |file, op| {
        if file == watched && is_write(op) && offset(op).is_some_and(|at| area.contains(&at)) {
            seen.set(true);
        }
        Fate::Passes
    });
    for _ in 0..2000 {
        if is_written.get() {
            // Who reads it waits until all have it.
            pair.array.read_table().await.unwrap();
            return;
        }
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
    panic!("what is left of the change is not taken back");
}

#[test]
fn a_change_of_volumes_that_failed_does_not_come_true_later() {
    run(|reactor, steer| async move {
        for goes in [true, false] {
            let mut pair = filled(&reactor, 4, Policy::Journal).await;
            let drives = pair.drives();
            name_volumes(&pair.array, 2).await.unwrap();
            let there = [&drives[1], &drives[2]];
            let fate = if goes { Fate::Waits } else { Fate::Full };
            steer_area(&pair, &steer, &there, |areas| areas.volume_table, fate);
            let array = pair.array.clone();
            let deleted = begin(&reactor, async move { name_volumes(&array, 1).await });
            if goes {
                steer.caught(&reactor, 2).await;
                pull(&pair, &[1, 2]);
                steer.drop_waiting(&reactor).await;
            }
            assert!(deleted.ended(&reactor).await.is_err());
            steer.set(|_, _| Fate::Passes);
            if goes {
                for member in [2, 1] {
                    comes_back(&mut pair, member, &drives[usize::from(member)]).await.unwrap();
                }
            } else {
                // By itself.
                table_is_written(&pair, &steer, there[0]).await;
            }
            pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
            assert_eq!(volumes(&pair.array).await, ["a", "b"], "pulled: {goes}");
            pair.is_whole().await;
        }
    });
}

#[test]
fn zeroes_are_not_read_that_members_who_are_away_know_nothing_of() {
    run(|reactor, steer| async move {
        for policy in [Policy::Bitmap, Policy::None] {
            let mut pair = filled(&reactor, 3, policy).await;
            let drives = pair.drives();
            let region = pair.array.region_bytes();
            let there = [&drives[1], &drives[2]];
            steer_area(&pair, &steer, &there, |areas| areas.written_map, Fate::Waits);
            let array = pair.array.clone();
            let discarded = begin(&reactor, async move { array.discard(0, region).await });
            steer.caught(&reactor, 2).await;
            pull(&pair, &[1, 2]);
            steer.drop_waiting(&reactor).await;
            assert!(discarded.ended(&reactor).await.is_err());
            for _ in 0..3 {
                let read = pair.read(0, 4096).await;
                assert_eq!(read, Err(ArrayError::Lost), "{policy:?}");
                let again = pair.array.write_zeroes(0, region).await;
                assert_eq!(again, Err(ArrayError::Lost), "{policy:?}");
                reactor.sleep(Duration::from_secs(1)).await;
            }
            // The only one that knew is lost.
            pair.starts_with(&[&drives[1], &drives[2]]).await;
            let read = pair.read(0, 4096).await;
            assert!(read.is_err() || read.unwrap() == pair.bytes[..4096]);
            pair.array.stop().await.unwrap();
        }
    });
}

/// Where a write of 100s begins that each member has a share of; where nothing was ever written. On
/// this drive it waits.
async fn divided(
    pair: &Pair,
    steer: &Steer,
    drive: &Rc<Drive>,
) -> (u64, Begun<Result<(), ArrayError>>) {
    let at = pair.array.capacity() - pair.array.region_bytes();
    steer_area(pair, steer, &[drive], |areas| areas.journal, Fate::Waits);
    let (array, bytes) = (pair.array.clone(), pair.reactor.buffer(24 << 10));
    bytes.copy_from_slice(&[100; 24 << 10]);
    let written = begin(&pair.reactor, async move { array.write(at, bytes.into()).await });
    steer.caught(&pair.reactor, 1).await;
    (at, written)
}

/// Where nothing was ever written there is nothing to do for them, but something to keep out.
#[test]
fn what_failed_does_not_come_true_after_zeroes() {
    run(|reactor, steer| async move {
        let mut pair = filled(&reactor, 3, Policy::Journal).await;
        let drives = pair.drives();
        let (at, written) = divided(&pair, &steer, &drives[0]).await;
        pull(&pair, &[1, 2]);
        steer_area(&pair, &steer, &[&drives[0]], |areas| areas.journal, Fate::Fails);
        assert_eq!(written.ended(&reactor).await, Err(ArrayError::Lost));
        assert_eq!(pair.array.write_zeroes(at, 4096).await, Err(ArrayError::Lost));
        steer.set(|_, _| Fate::Passes);
        // The only one that knew is lost: the write comes true, as it may.
        pair.starts_with(&[&drives[1], &drives[2]]).await;
        assert_eq!(pair.read(at as usize, 4096).await.unwrap(), vec![100; 4096]);
        pair.array.write_zeroes(at, 24 << 10).await.unwrap();
        comes_back(&mut pair, 0, &drives[0]).await.unwrap();
        assert_eq!(pair.read(at as usize, 4096).await.unwrap(), vec![0; 4096]);
        pair.is_whole().await;
    });
}

/// A second one goes while it is made durable that the first one is fenced.
#[test]
fn nothing_is_acknowledged_that_one_misses_who_is_believed() {
    run(|reactor, steer| async move {
        let mut pair = written(&reactor, Level::Raid6, 4, Policy::Journal).await;
        let drives = pair.drives();
        steer_area(&pair, &steer, &[&drives[0]], |areas| areas.superblocks, Fate::Waits);
        pull(&pair, &[3]);
        let (array, block) = (pair.array.clone(), reactor.buffer(4096));
        block.copy_from_slice(&[2; 4096]);
        let written = begin(&reactor, async move { array.write(0, block.into()).await });
        steer.caught(&reactor, 1).await;
        pull(&pair, &[2]);
        steer.set(|_, _| Fate::Passes);
        written.ended(&reactor).await.unwrap();
        pair.bytes[..4096].fill(2);
        let states = pair.array.status().members.into_iter().map(|member| member.state);
        let (here, stale) = (MemberState::Trusted, MemberState::Stale);
        assert_eq!(states.collect::<Vec<_>>(), [here, here, stale, stale]);
        comes_back(&mut pair, 2, &drives[2]).await.unwrap();
        comes_back(&mut pair, 3, &drives[3]).await.unwrap();
        pair.is_whole().await;
    });
}

/// What the last member misses of a write.
#[derive(Clone, Copy, Debug)]
enum Missed {
    /// All of it: the drive has gone.
    Everything,
    /// What is written to the journal.
    Batch,
    /// What is written in place.
    Store,
}

/// It is not enough that somebody has begun to say so.
#[test]
fn a_write_is_not_answered_before_it_is_durable_who_missed_it() {
    use Missed::{Batch, Everything, Store};
    use Policy::{Bitmap, Journal, None as Nothing};
    let ways = [(Journal, Everything), (Journal, Batch), (Bitmap, Everything), (Bitmap, Store)];
    let ways = ways.into_iter().chain([(Nothing, Everything), (Nothing, Store)]);
    run(|reactor, steer| async move {
        for (policy, missed) in ways {
            for (level, members) in [(Level::Raid5, 3), (Level::Raid1, 2)] {
                let mut pair = written(&reactor, level, members, policy).await;
                pair.in_place().await;
                answered_after_the_fence(&mut pair, &steer, missed).await;
            }
        }
    });
}

async fn answered_after_the_fence(pair: &mut Pair, steer: &Steer, missed: Missed) {
    let (reactor, drives) = (pair.reactor.clone(), pair.drives());
    let (last, others) = drives.split_last().unwrap();
    let areas = label::plan(DRIVE_BYTES, 1).unwrap();
    let (file, superblocks) = (address(pair.file(last)), areas.superblocks.range());
    let lacks = match missed {
        Missed::Everything => 0..0,
        Missed::Batch => areas.journal.range(),
        Missed::Store => areas.data.range(),
    };
    let rule = move |is_held: bool| {
        let (superblocks, lacks) = (superblocks.clone(), lacks.clone());
        move |its: usize, op: &Op| match offset(op).filter(|_| is_write(op)) {
            Some(at) if its == file && lacks.contains(&at) => Fate::Fails,
            Some(at) if superblocks.contains(&at) && is_held => Fate::Waits,
            _ => Fate::Passes,
        }
    };
    steer.set(rule(true));
    if matches!(missed, Missed::Everything) {
        last.pull();
    }
    // Each member has a share of its batch, and a chunk of its stripe.
    let (array, bytes) = (pair.array.clone(), reactor.buffer(24 << 10));
    bytes.copy_from_slice(&[2; 24 << 10]);
    pair.bytes[..24 << 10].fill(2);
    let written = begin(&reactor, async move { array.write(0, bytes.into()).await });
    let case = format!("{:?} {missed:?}", pair.array.policy());
    while steer.waiting() < others.len() {
        assert!(!written.has_ended(), "{case}: it was answered before anybody was told");
        reactor.sleep(Duration::from_millis(1)).await;
    }
    // Whatever else was begun is done when these are.
    for _ in 0..100 {
        others[0].read(0, reactor.buffer(4096).into()).await.unwrap();
        assert!(!written.has_ended(), "{case}: it was answered before that was durable");
    }
    steer.set(rule(false));
    written.ended(&reactor).await.unwrap();
    assert_eq!(pair.array.status().members[others.len()].state, MemberState::Stale, "{case}");
    pair.check().await;
    steer.set(|_, _| Fate::Passes);
    let back = drives.iter().filter(|its| !its.is_alive()).map(|its| pair.plug_in(its)).collect();
    pair.restart_with(AssembleOptions::default(), back).await;
    pair.is_whole().await;
}

/// One that the others went on without has written more superblocks than they did.
#[test]
fn a_later_start_counts_however_often_an_earlier_one_wrote() {
    run(|reactor, _| async move {
        let mut pair = filled(&reactor, 3, Policy::Journal).await;
        let drives = pair.drives();
        pull(&pair, &[1, 2]);
        let before = pair.array.status().generation;
        // Each saves a superblock or two.
        while pair.array.status().generation < before + 30 {
            let _ = pair.array.start_scrub(true);
            reactor.sleep(Duration::from_millis(10)).await;
            let _ = pair.array.stop_scrub();
            reactor.sleep(Duration::from_millis(10)).await;
        }
        pair.starts_with(&[&drives[1], &drives[2]]).await;
        for at in [0, 2 << 20] {
            pair.put(at, &vec![200; 1 << 20]).await;
            pair.in_place().await;
        }
        pair.array.flush().await.unwrap();
        pair.starts_with(&[&drives[1], &drives[2], &drives[0]]).await;
        assert_eq!(pair.array.status().members[0].state, MemberState::Stale);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// Until nothing is dirty.
async fn is_clean(pair: &Pair) {
    for _ in 0..100 {
        if pair.array.status().dirty_regions == 0 {
            return;
        }
        pair.reactor.sleep(Duration::from_millis(100)).await;
    }
    panic!("regions stay dirty");
}

/// Of copies, one alone could have it.
#[test]
fn a_write_that_failed_is_not_what_one_copy_has() {
    run(|reactor, _| async move {
        for is_fenced in [true, false] {
            let mut pair = written(&reactor, Level::Raid10, 4, Policy::Bitmap).await;
            let drives = pair.drives();
            is_clean(&pair).await;
            pull(&pair, &[1, 2, 3]);
            let block = reactor.buffer(4096);
            block.copy_from_slice(&[2; 4096]);
            assert_eq!(pair.array.write(0, block.into()).await, Err(ArrayError::Lost));
            pair.starts_with(&[&drives[1], &drives[2], &drives[3]]).await;
            pair.check().await;
            if is_fenced {
                pair.array.flush().await.unwrap();
            }
            comes_back(&mut pair, 0, &drives[0]).await.unwrap();
            pair.rebuilt().await;
            // Copies take turns.
            for _ in 0..8 {
                pair.check().await;
            }
            pair.is_whole().await;
        }
    });
}

/// What a member that is behind has missed is not known to one alone.
#[test]
fn what_was_missed_is_known_to_all_who_are_believed() {
    run(|reactor, steer| async move {
        let mut pair = written(&reactor, Level::Raid6, 4, Policy::None).await;
        let drives = pair.drives();
        is_clean(&pair).await;
        pull(&pair, &[3]);
        pair.put(0, &vec![2; 1 << 20]).await;
        pair.array.flush().await.unwrap();
        pull(&pair, &[1, 2]);
        // Longer than a region stays dirty.
        reactor.sleep(Duration::from_secs(5)).await;
        steer_area(&pair, &steer, &[&drives[1]], |areas| areas.missed_map, Fate::Waits);
        let (array, again) = (pair.array.clone(), pair.plug_in(&drives[1]));
        let _back =
            begin(
                &reactor,
                async move { array.return_member(MemberIndex(1), again, [78; 16]).await },
            );
        steer.caught(&reactor, 1).await;
        pair.dies();
        steer.drop_waiting(&reactor).await;
        pair.starts_with(&[&drives[1], &drives[2], &drives[3]]).await;
        pair.rebuilt().await;
        for at in (0..1 << 20).step_by(4096) {
            // As after a crash: what was being written when the drives went is an error.
            if let Ok(bytes) = pair.read(at, 4096).await {
                assert!(bytes == pair.bytes[at..at + 4096], "at {at}");
            }
        }
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn settings_are_not_those_of_one_member_alone() {
    run(|reactor, _| async move {
        let pair = filled(&reactor, 3, Policy::Journal).await;
        let change = SettingsChange { rebuild_percent: Some(77), ..SettingsChange::default() };
        pull(&pair, &[1]);
        pair.array.set_settings(change).await.unwrap();
        assert_eq!(pair.array.status().members[1].state, MemberState::Stale);
        pull(&pair, &[2]);
        assert!(pair.array.set_settings(change).await.is_err());
        assert!(pair.array.set_policy(Policy::Bitmap).await.is_err());
        assert_eq!(pair.array.policy(), Policy::Journal);
    });
}

/// Too little of it was there once; then the rest of it is, too.
#[test]
fn a_batch_that_a_start_dropped_does_not_come_true_later() {
    run(|reactor, steer| async move {
        let mut pair = filled(&reactor, 3, Policy::Journal).await;
        let drives = pair.drives();
        let (at, _written) = divided(&pair, &steer, &drives[0]).await;
        pair.dies();
        steer.drop_waiting(&reactor).await;
        pair.starts_with(&[&drives[0], &drives[1]]).await;
        assert_eq!(pair.read(at as usize, 4096).await.unwrap(), vec![0; 4096]);
        pair.array.write_zeroes(at, 24 << 10).await.unwrap();
        pair.array.flush().await.unwrap();
        pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
        assert_eq!(pair.read(at as usize, 4096).await.unwrap(), vec![0; 4096]);
        pair.is_whole().await;
    });
}

/// A write reaches one copy; the other goes, and those who should hear of that go, too.
#[test]
fn a_write_that_failed_is_not_read_from_one_copy_alone() {
    run(|reactor, steer| async move {
        let mut pair = written(&reactor, Level::Raid10, 4, Policy::Bitmap).await;
        let drives = pair.drives();
        let pair_of = pair.array.layout().member_at(StripeIndex(0), 0).0;
        assert_eq!(pair_of, 0, "the first chunk is on the first two");
        steer_area(&pair, &steer, &[&drives[1]], |areas| areas.data, Fate::Waits);
        let (array, block) = (pair.array.clone(), reactor.buffer(4096));
        block.copy_from_slice(&[2; 4096]);
        let written = begin(&reactor, async move { array.write(0, block.into()).await });
        steer.caught(&reactor, 1).await;
        // What says that the second one is fenced reaches the first one only.
        let (areas, others) = (
            label::plan(DRIVE_BYTES, 1).unwrap(),
            [address(pair.file(&drives[2])), address(pair.file(&drives[3]))],
        );
        let second = address(pair.file(&drives[1]));
        steer.set(move |file, op| match offset(op) {
            Some(at) if others.contains(&file) && areas.superblocks.range().contains(&at) => {
                Fate::Waits
            }
            Some(_) if file == second => Fate::Fails,
            _ => Fate::Passes,
        });
        pull(&pair, &[1]);
        steer.caught(&reactor, 2).await;
        pull(&pair, &[2, 3]);
        steer.drop_waiting(&reactor).await;
        assert_eq!(written.ended(&reactor).await, Err(ArrayError::Lost));
        let seen = pair.read(0, 4096).await;
        pair.starts_with(&[&drives[1], &drives[2], &drives[3]]).await;
        let now = pair.read(0, 4096).await.unwrap();
        assert!(seen.is_err() || seen.unwrap() == now, "it was read, and is undone");
        pair.array.stop().await.unwrap();
    });
}

/// Who comes back in the middle of a change is among those that know, or is not believed.
#[test]
fn zeroes_are_not_acknowledged_before_one_that_returns_knows_of_them() {
    run(|reactor, steer| async move {
        let mut pair = written(&reactor, Level::Raid1, 2, Policy::Bitmap).await;
        let drives = pair.drives();
        pull(&pair, &[1]);
        let both = [&drives[0], &drives[1]];
        steer_area(&pair, &steer, &both, |areas| areas.written_map, Fate::Waits);
        let (array, region) = (pair.array.clone(), pair.array.region_bytes());
        let discarded = begin(&reactor, async move { array.discard(0, region).await });
        steer.caught(&reactor, 1).await;
        let (array, again) = (pair.array.clone(), pair.plug_in(&drives[1]));
        let _back =
            begin(
                &reactor,
                async move { array.return_member(MemberIndex(1), again, [78; 16]).await },
            );
        // As far as it comes.
        reactor.sleep(Duration::from_millis(100)).await;
        let areas = label::plan(DRIVE_BYTES, 1).unwrap();
        let second = address(pair.file(&drives[1]));
        // It keeps what it has, as drives may.
        steer.set(move |file, op| match offset(op) {
            Some(at) if file == second && areas.data.range().contains(&at) => Fate::Fails,
            Some(at) if file == second && areas.written_map.range().contains(&at) => Fate::Waits,
            _ => Fate::Passes,
        });
        discarded.ended(&reactor).await.unwrap();
        // The daemon dies, and the one that knew is lost.
        pair.dies();
        steer.drop_waiting(&reactor).await;
        let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
        let alone = vec![pair.plug_in(&drives[1])];
        if let Ok(array) = Array::assemble(&reactor, alone, options).await {
            pair.array = array;
            assert_eq!(pair.read(0, 4096).await.unwrap(), vec![0; 4096]);
        }
    });
}

/// The first member is away, and known to be behind.
async fn is_behind(pair: &mut Pair) {
    pull(pair, &[0]);
    pair.put(0, &[1; 512]).await;
    pair.in_place().await;
}

/// The first member is behind, and what is pending of a stripe could not be stored on
/// the third. Returns where that is, in bytes of the array.
async fn torn(pair: &mut Pair, steer: &Steer, drives: &[Rc<Drive>]) -> usize {
    is_behind(pair).await;
    let layout = pair.array.layout();
    let is_third = |stripe: &u64| layout.member_at(StripeIndex(*stripe), 0) == MemberIndex(2);
    let stripe = (1..).find(is_third).unwrap();
    let at = (stripe * pair.array.stripe_bytes()) as usize;
    pair.put(at, &[100; 4096]).await;
    steer_area(pair, steer, &[&drives[2]], |areas| areas.data, Fate::Fails);
    assert_eq!(pair.array.destage_all().await, Err(ArrayError::Lost));
    assert_eq!(pair.array.status().members[2].state, MemberState::Trusted);
    at
}

#[test]
fn a_member_that_returns_and_cannot_be_told_all_is_away_as_before() {
    run(|reactor, steer| async move {
        let mut pair = filled(&reactor, 4, Policy::Journal).await;
        let drives = pair.drives();
        // One is behind: no other can be done without.
        is_behind(&mut pair).await;
        pair.array.flush().await.unwrap();
        pull(&pair, &[3]);
        steer_area(&pair, &steer, &[&drives[3]], |areas| areas.written_map, Fate::Fails);
        for _ in 0..2 {
            comes_back(&mut pair, 3, &drives[3]).await.unwrap_err();
            assert_eq!(pair.array.state(), ArrayState::Failed);
        }
        steer.set(|_, _| Fate::Passes);
        comes_back(&mut pair, 3, &drives[3]).await.unwrap();
        assert_eq!(pair.array.state(), ArrayState::Degraded);
        comes_back(&mut pair, 0, &drives[0]).await.unwrap();
        pair.is_whole().await;
    });
}

#[test]
fn a_member_that_returns_is_filled_also_where_a_stripe_is_torn() {
    run(|reactor, steer| async move {
        let mut pair = filled(&reactor, 4, Policy::Journal).await;
        let drives = pair.drives();
        torn(&mut pair, &steer, &drives).await;
        steer.set(|_, _| Fate::Passes);
        comes_back(&mut pair, 0, &drives[0]).await.unwrap();
        pair.is_whole().await;
    });
}

/// A member that returns makes who waits for room wait on: if it does not help, they must hear.
#[test]
fn who_waits_for_room_hears_that_a_stripe_stays_torn() {
    run(|reactor, steer| async move {
        let mut pair = filled(&reactor, 4, Policy::Journal).await;
        let drives = pair.drives();
        let at = torn(&mut pair, &steer, &drives).await;
        pair.array.flush().await.unwrap();
        pull(&pair, &[3]);
        comes_back(&mut pair, 3, &drives[3]).await.unwrap();
        // As much as the ring has room for, of the same stripe: nothing else could be put in place.
        let (array, block) = (pair.array.clone(), reactor.buffer(4096));
        block.copy_from_slice(&[100; 4096]);
        let refused = begin(&reactor, async move {
            loop {
                if let Err(error) = array.write(at as u64, block.clone().into()).await {
                    return error;
                }
            }
        });
        assert_eq!(refused.ended(&reactor).await, ArrayError::Lost);
        steer.set(|_, _| Fate::Passes);
        comes_back(&mut pair, 0, &drives[0]).await.unwrap();
        pair.is_whole().await;
    });
}

/// What stands in place is all that tells what a missing member has.
#[test]
fn data_waits_for_its_parity() {
    run(|reactor, steer| async move {
        let mut pair = filled(&reactor, 4, Policy::Journal).await;
        let drives = pair.drives();
        is_behind(&mut pair).await;
        let layout = pair.array.layout();
        let parity = layout.parity_positions().start;
        let is_it = |stripe: &u64| layout.member_at(StripeIndex(*stripe), parity) == MemberIndex(3);
        let stripe = (1..).find(is_it).unwrap();
        let of_second =
            |chunk: &u8| layout.member_at(StripeIndex(stripe), *chunk) == MemberIndex(1);
        let chunk = (0..layout.data).find(of_second).unwrap();
        let at = stripe * pair.array.stripe_bytes() + u64::from(chunk) * (16 << 10);
        pair.put(at as usize, &[100; 4096]).await;
        pair.array.flush().await.unwrap();
        steer_area(&pair, &steer, &[&drives[3]], |areas| areas.data, Fate::Fails);
        assert_eq!(pair.array.destage_all().await, Err(ArrayError::Lost));
        steer.set(|_, _| Fate::Passes);
        pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
        pair.is_whole().await;
    });
}
