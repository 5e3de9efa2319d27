//! Goal: where the file system under a member is full, a write is an error and nobody is fenced;
//! nothing acknowledged is lost, and with space again all is as ever.
//! Method: writes to a part of a member are told that there is no space, for a while.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy, StoredMember};
use ashlar_format::units::MemberIndex;
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const LEN: usize = 16 << 10;

async fn array(reactor: &Reactor, policy: Policy) -> Pair {
    let mut pair = Pair::new(reactor, Level::Raid5, 3, 512).await;
    pair.array.set_policy(policy).await.unwrap();
    for at in 0..8 {
        pair.put(at << 19, &vec![at as u8 + 1; 1 << 19]).await;
    }
    pair.in_place().await;
    pair
}

/// No space for writes to these bytes of any member.
fn fill_up(steer: &Steer, range: Range<u64>) {
    let is_full = move |op: &Op| is_write(op) && offset(op).is_some_and(|at| range.contains(&at));
    steer.set(move |_, op| if is_full(op) { Fate::Full } else { Fate::Passes });
}

async fn write(pair: &Pair, at: u64, value: u8) -> Result<(), ArrayError> {
    write_all(pair, at, &[value; LEN]).await
}

async fn write_all(pair: &Pair, at: u64, bytes: &[u8]) -> Result<(), ArrayError> {
    let buffer = pair.reactor.buffer(bytes.len());
    buffer.copy_from_slice(bytes);
    pair.array.write(at, buffer.into()).await
}

async fn synced(pair: &Pair) {
    for _ in 0..1000 {
        if pair.array.status().resync.is_none() {
            return;
        }
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?} never ends", pair.array.status().resync);
}

async fn is_whole(pair: &mut Pair) {
    pair.check().await;
    pair.scrub_is_clean().await;
    pair.array.stop().await.unwrap();
}

#[test]
fn in_place() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = array(&reactor, Policy::Bitmap).await;
        let members = pair.array.status().members;
        let full = address(pair.file(&members[0].drive.clone().unwrap()));
        let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        let is_full = move |op: &Op| is_write(op) && offset(op).is_some_and(|at| at >= data);
        steer
            .set(move |its, op| if its == full && is_full(op) { Fate::Full } else { Fate::Passes });
        let mut refused = Vec::new();
        for at in (0..8 * LEN).step_by(LEN) {
            match write(&pair, at as u64, 99).await {
                Ok(()) => pair.bytes[at..at + LEN].fill(99),
                Err(error) => {
                    assert_eq!(error, ArrayError::NoSpace);
                    refused.push(at);
                }
            }
        }
        assert!(!refused.is_empty());
        assert_eq!(pair.array.state(), ArrayState::Optimal);
        steer.set(|_, _| Fate::Passes);
        synced(&pair).await;
        // Of what was refused each sector is old or new.
        for at in refused {
            let now = pair.read(at, LEN).await.unwrap();
            for (now, was) in now.chunks(512).zip(pair.bytes[at..at + LEN].chunks_mut(512)) {
                assert!(now == was || now == [99; 512]);
                was.copy_from_slice(now);
            }
        }
        is_whole(&mut pair).await;
    });
}

/// What a member that is missing has of such a stripe is an error, until the stripe is written
/// whole; the other blocks are what they were, or what was refused.
#[test]
fn in_place_while_a_member_is_missing() {
    for missing in 0..3 {
        let steer = Steer::new();
        run_on(steer.backend(), |reactor| async move {
            let mut pair = array(&reactor, Policy::None).await;
            pair.array.pull_member(MemberIndex(missing)).unwrap();
            // It has missed something: the others go on without it.
            pair.put(2 << 20, &[50; LEN]).await;
            let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
            let left: Vec<usize> = (0..3).filter(|its| *its != usize::from(missing)).collect();
            let full = address(pair.file(&drive_of(&pair, left[0])));
            let is_full = move |op: &Op| is_write(op) && offset(op).is_some_and(|at| at >= data);
            let fate = move |its, op: &Op| its == full && is_full(op);
            steer.set(move |its, op| if fate(its, op) { Fate::Full } else { Fate::Passes });
            let stripe = pair.array.stripe_bytes() as usize;
            let mut refused = BTreeSet::new();
            for at in (0..24 * LEN).step_by(LEN) {
                match write(&pair, at as u64, 99).await {
                    Ok(()) => pair.bytes[at..at + LEN].fill(99),
                    Err(error) => {
                        // Beside what is torn, too.
                        let torn = refused.iter().any(|its| its / stripe == at / stripe);
                        assert!(error == ArrayError::NoSpace || torn, "{error}");
                        refused.insert(at);
                    }
                }
            }
            assert_eq!(pair.array.state(), ArrayState::Degraded, "nobody is fenced");
            let lost = lost_beside(&pair, &refused, missing).await;
            assert!(lost > 0, "no stripe of {refused:?} has a block of member {missing}");
            steer.set(|_, _| Fate::Passes);
            synced(&pair).await;
            assert_eq!(lost_beside(&pair, &refused, missing).await, lost);
            // Written whole, the stripes are as any.
            for at in (0..24 * LEN).step_by(stripe) {
                pair.put(at, &vec![98; stripe]).await;
            }
            pair.check().await;
            pair.replace(missing).await;
            pair.rebuilt().await;
            is_whole(&mut pair).await;
        });
    }
}

fn drive_of(pair: &Pair, member: usize) -> Rc<Drive> {
    pair.array.status().members[member].drive.clone().unwrap()
}

/// Blocks that are an error, all of them of the missing member in stripes of which a write was
/// refused. All others are right; of what was refused each sector is old or new.
async fn lost_beside(pair: &Pair, refused: &BTreeSet<usize>, missing: u8) -> usize {
    let layout = pair.array.layout();
    let stripe = pair.array.stripe_bytes() as usize;
    let torn: BTreeSet<usize> = refused.iter().map(|at| at / stripe).collect();
    let mut lost = 0;
    for at in (0..pair.bytes.len()).step_by(LEN) {
        let piece = layout.pieces(at as u64, LEN as u64).next().unwrap();
        let position = piece.chunk * layout.copies;
        let is_its = layout.member_at(piece.stripe, position) == MemberIndex(missing);
        match pair.read(at, LEN).await {
            Ok(read) => {
                let news = [99; 512];
                let both = read.chunks(512).zip(pair.bytes[at..at + LEN].chunks(512));
                for (now, was) in both {
                    let may_be_new = refused.contains(&at) && now == news;
                    assert!(now == was || may_be_new, "wrong data at {at}");
                }
            }
            Err(error) => {
                assert!(is_its && torn.contains(&(at / stripe)), "{at}: {error}");
                lost += 1;
            }
        }
    }
    lost
}

#[test]
fn in_the_journal() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = array(&reactor, Policy::Journal).await;
        fill_up(&steer, label::plan(DRIVE_BYTES, 1).unwrap().journal.range());
        assert_eq!(write(&pair, 0, 99).await, Err(ArrayError::NoSpace));
        pair.check().await;
        assert_eq!(pair.array.state(), ArrayState::Optimal);
        steer.set(|_, _| Fate::Passes);
        pair.put(0, &[98; LEN]).await;
        pair.restart(Default::default()).await;
        is_whole(&mut pair).await;
    });
}

/// What is acknowledged waits in the journal until there is space.
#[test]
fn behind_the_journal() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = array(&reactor, Policy::Journal).await;
        fill_up(&steer, label::plan(DRIVE_BYTES, 1).unwrap().data.offset..DRIVE_BYTES);
        pair.put(0, &[97; LEN]).await;
        assert_eq!(pair.array.destage_all().await, Err(ArrayError::NoSpace));
        pair.check().await;
        assert_eq!(pair.array.state(), ArrayState::Optimal);
        steer.set(|_, _| Fate::Passes);
        pair.in_place().await;
        is_whole(&mut pair).await;
    });
}

/// Neither what is put in place nor who writes fills the journal with what has no space in it.
#[test]
fn a_journal_without_space_takes_no_place_in_it() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = array(&reactor, Policy::Journal).await;
        pair.put(0, &[97; LEN]).await;
        let used = |pair: &Pair| pair.array.status().journal.used_bytes;
        let before = used(&pair);
        fill_up(&steer, label::plan(DRIVE_BYTES, 1).unwrap().journal.range());
        for _ in 0..10 {
            assert_eq!(pair.array.destage_all().await, Err(ArrayError::NoSpace));
            assert_eq!(write(&pair, 1 << 20, 99).await, Err(ArrayError::NoSpace));
        }
        assert_eq!(used(&pair), before);
        steer.set(|_, _| Fate::Passes);
        pair.check().await;
        pair.in_place().await;
        is_whole(&mut pair).await;
    });
}

/// What was refused, but stands in a journal that had no space for saying that it is void, is void
/// soon after there is space, also while what was acknowledged before is too young to be put in
/// place.
#[test]
fn what_was_refused_is_void_soon_beside_what_waits() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = array(&reactor, Policy::Journal).await;
        pair.put(0, &[97; LEN]).await;
        let journal = label::plan(DRIVE_BYTES, 1).unwrap().journal.range();
        let writes_to =
            move |op: &Op| is_write(op) && offset(op).is_some_and(|at| journal.contains(&at));
        // One member's copy of a batch lands, and nothing after it.
        let (landed, its) = (Cell::new(false), writes_to.clone());
        steer.set(move |_, op| match its(op) && landed.replace(true) {
            true => Fate::Full,
            false => Fate::Passes,
        });
        assert_eq!(write(&pair, 0, 99).await, Err(ArrayError::NoSpace));
        pair.check().await;
        let told = Rc::new(Cell::new(false));
        let its = told.clone();
        steer.set(move |_, op| {
            its.set(its.get() || writes_to(op));
            Fate::Passes
        });
        // What waits is put in place 4 s after it was acknowledged.
        let mut waited = Duration::ZERO;
        while !told.get() {
            assert!(waited < Duration::from_secs(3), "nobody says that it is void");
            reactor.sleep(Duration::from_millis(10)).await;
            waited += Duration::from_millis(10);
        }
        let drives = pair.dies();
        let drives: Vec<&Rc<Drive>> = drives.iter().collect();
        pair.starts_with(&drives).await;
        is_whole(&mut pair).await;
    });
}

/// Guests do not wait for a drive that is being rebuilt: it is stale for them, and the rebuild goes
/// on from there once there is space.
#[test]
fn who_is_rebuilt_and_has_no_space_keeps_nobody_waiting() {
    for policy in [Policy::Bitmap, Policy::Journal] {
        let steer = Steer::new();
        run_on(steer.backend(), |reactor| async move {
            let mut pair = array(&reactor, policy).await;
            pair.array.pull_member(MemberIndex(1)).unwrap();
            pair.put(0, &[50; LEN]).await;
            // It is given the first stripes, and then not even these have space.
            let new = pair.new_drive().await;
            let full = address(pair.file(&new));
            let data = label::plan(DRIVE_BYTES, 1).unwrap().data.range();
            let fill_from = move |first: u64| {
                let full_at = first..data.end;
                let is_full = move |op: &Op| {
                    is_write(op) && offset(op).is_some_and(|at| full_at.contains(&at))
                };
                let fate = move |its, op: &Op| its == full && is_full(op);
                steer.set(move |its, op| if fate(its, op) { Fate::Full } else { Fate::Passes });
            };
            fill_from(data.start + (1 << 20));
            pair.array.replace_member(MemberIndex(1), new, [201; 16]).await.unwrap();
            pair.rebuild_ends().await;
            assert!(pair.array.status().members[1].rebuilt_stripes > 0);
            fill_from(data.start);
            for at in (0..24 * LEN).step_by(LEN) {
                pair.put(at, &[51; LEN]).await;
            }
            pair.in_place().await;
            pair.array.write_zeroes(0, 8 * LEN as u64).await.unwrap();
            pair.bytes[..8 * LEN].fill(0);
            pair.check().await;
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            fill_from(data.end);
            pair.array.rebuild(|| [77; 16]).await.unwrap();
            pair.rebuilt().await;
            is_whole(&mut pair).await;
        });
    }
}

/// The newest superblock of a member: its generation, and who is stale by it.
async fn superblock(pair: &Pair, member: usize) -> (u64, Vec<usize>) {
    let newest = pair.superblock(&drive_of(pair, member)).await;
    let stale = |its: &&StoredMember| its.state() == Ok(MemberState::Stale);
    let members = newest.members().iter().zip(0..);
    let stale = members.filter(|(its, _)| stale(its)).map(|(_, index)| index).collect();
    (newest.header.sequence.get(), stale)
}

/// A superblock that could not be written everywhere may be on some members. What is said after it
/// has another number, whoever has to be told of by then.
#[test]
fn what_was_said_in_part_is_not_said_again_with_other_words() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid6, 5, 512).await;
        pair.array.set_policy(Policy::None).await.unwrap();
        pair.put(0, &vec![1; 1 << 20]).await;
        pair.in_place().await;
        pair.array.pull_member(MemberIndex(2)).unwrap();
        let full = address(pair.file(&drive_of(&pair, 3)));
        let superblocks = label::plan(DRIVE_BYTES, 2).unwrap().superblocks.range();
        let is_full =
            move |op: &Op| is_write(op) && offset(op).is_some_and(|at| superblocks.contains(&at));
        let fate = move |its, op: &Op| its == full && is_full(op);
        steer.set(move |its, op| if fate(its, op) { Fate::Full } else { Fate::Passes });
        // Of all members, so that one misses it.
        let stripe = vec![99; pair.array.stripe_bytes() as usize];
        assert_eq!(write_all(&pair, 0, &stripe).await, Err(ArrayError::NoSpace));
        let (first, stale) = superblock(&pair, 0).await;
        assert_eq!(stale, [2]);
        pair.array.pull_member(MemberIndex(0)).unwrap();
        steer.set(|_, _| Fate::Passes);
        write_all(&pair, 0, &stripe).await.unwrap();
        let (then, stale) = superblock(&pair, 1).await;
        assert_eq!(stale, [0, 2]);
        assert!(then > first, "{then} is said twice");
        pair.array.stop().await.unwrap();
    });
}
