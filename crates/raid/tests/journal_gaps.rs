//! Goal: where the journal of a member cannot be read and others are absent, what was acknowledged
//! is there, or an error: never what stood there before.
//! Method: a crash while a write stands in the journal only; for each pair of members one is absent
//! and a block of the write's batch, or of its share, cannot be read on the other.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod pair;
mod steered;

use std::os::unix::fs::FileExt;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError, ChangeError};
use ashlar_raid::label;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;
use ashlar_reactor::prng::Prng;
use pair::{DRIVE_BYTES, Pair, run_on};
use steered::{Fate, Steer, address, is_write, offset};

const MEMBERS: usize = 4;

fn rings(pair: &Pair, drives: &[Rc<Drive>]) -> Vec<Vec<u8>> {
    let area = label::plan(DRIVE_BYTES, 1).unwrap().journal;
    let ring = |drive: &Rc<Drive>| {
        let mut bytes = vec![0; area.len as usize];
        pair.file(drive).read_exact_at(&mut bytes, area.offset).unwrap();
        bytes
    };
    drives.iter().map(ring).collect()
}

/// A crash when `bytes` were acknowledged; and the blocks of each ring that they changed.
async fn crashed(reactor: &Reactor, bytes: usize) -> (Pair, Vec<Rc<Drive>>, Vec<Vec<u64>>) {
    let mut pair = Pair::new(reactor, Level::Raid5, MEMBERS, 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    pair.put(0, &vec![1; 1 << 20]).await;
    pair.in_place().await;
    let drives = drives_of(&pair);
    let before = rings(&pair, &drives);
    pair.put(0, &vec![2; bytes]).await;
    let changed = changes(&before, &rings(&pair, &drives));
    drives.iter().for_each(|drive| drive.pull());
    (pair, drives, changed)
}

fn drives_of(pair: &Pair) -> Vec<Rc<Drive>> {
    let members = pair.array.status().members;
    members.into_iter().map(|member| member.drive.unwrap()).collect()
}

/// Blocks that differ, by ring.
fn changes(before: &[Vec<u8>], after: &[Vec<u8>]) -> Vec<Vec<u64>> {
    let changes = before.iter().zip(after).map(|(before, after)| {
        let blocks = before.chunks(4096).zip(after.chunks(4096)).zip((0..).step_by(4096));
        blocks.filter(|((before, after), _)| before != after).map(|(_, at)| at).collect()
    });
    changes.collect()
}

/// Reads of this block of the member's ring fail.
fn fail_reads(pair: &Pair, steer: &Steer, drive: &Rc<Drive>, block: u64) {
    let file = address(pair.file(drive));
    let block = label::plan(DRIVE_BYTES, 1).unwrap().journal.offset + block;
    let reads = move |op: &Op| {
        let Op::Read { offset, into, .. } = op else { return false };
        *offset < block + 4096 && block < offset + into.len() as u64
    };
    steer.set(move |its, op| if its == file && reads(op) { Fate::Fails } else { Fate::Passes });
}

async fn assemble(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    absent: Option<usize>,
    force: bool,
) -> Result<Rc<Array>, AssembleError> {
    let here = drives.iter().enumerate().filter(|(index, _)| Some(*index) != absent);
    let here: Vec<_> = here.map(|(_, drive)| pair.plug_in(drive)).collect();
    let options = AssembleOptions { force, ..AssembleOptions::default() };
    let array = Array::assemble(&pair.reactor, here.clone(), options).await;
    if array.is_err() {
        here.iter().for_each(|drive| drive.pull());
    }
    array
}

/// All that was acknowledged is there, once everything can be read.
async fn holds_all(pair: &mut Pair, steer: &Steer, array: Rc<Array>) {
    pair.array = array;
    steer.set(|_, _| Fate::Passes);
    pair.check().await;
    pair.array.stop().await.unwrap();
}

fn crash(pair: &Pair) {
    let members = pair.array.status().members;
    members.iter().flat_map(|member| &member.drive).for_each(|drive| drive.pull());
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Kept,
    /// Which batch it was is known, or that there may have been one.
    Refused {
        named: bool,
    },
}

/// `which`: of the blocks that changed on the member that cannot be read.
async fn outcome(
    reactor: &Reactor,
    steer: &Steer,
    bytes: usize,
    (absent, unreadable): (Option<usize>, usize),
    which: usize,
) -> Option<Outcome> {
    let (mut pair, drives, changed) = crashed(reactor, bytes).await;
    let block = *changed[unreadable].get(which)?;
    fail_reads(&pair, steer, &drives[unreadable], block);
    match assemble(&mut pair, &drives, absent, false).await {
        Ok(array) => {
            holds_all(&mut pair, steer, array).await;
            Some(Outcome::Kept)
        }
        Err(AssembleError::Journal { .. }) => {
            // By force the rest is served, and the blocks in doubt are an error, at each start.
            for _ in 0..2 {
                pair.array = assemble(&mut pair, &drives, absent, true).await.unwrap();
                for at in (0..bytes).step_by(512) {
                    assert_eq!(pair.read(at, 512).await, Err(ArrayError::Bad), "{at}");
                }
                // Of the same stripes nothing can be worked out.
                let stripes = bytes.next_multiple_of(pair.array.stripe_bytes() as usize);
                for at in (bytes..stripes).step_by(512) {
                    let beside = pair.read(at, 512).await;
                    assert!(beside == Ok(vec![1; 512]) || beside == Err(ArrayError::Lost), "{at}");
                }
                let rest = pair.read(stripes, (1 << 20) - stripes).await;
                assert!(rest.unwrap().iter().all(|byte| *byte == 1));
                // As it runs, it would empty the only journal that has the rest.
                let index = MemberIndex::new(absent.unwrap());
                let back = pair.plug_in(&drives[index.index()]);
                let returned = pair.array.return_member(index, back.clone(), [77; 16]).await;
                assert!(matches!(returned, Err(ChangeError::Spec(_))), "{returned:?}");
                back.pull();
                crash(&pair);
            }
            // Until the member is back.
            let array = assemble(&mut pair, &drives, None, false).await.unwrap();
            holds_all(&mut pair, steer, array).await;
            Some(Outcome::Refused { named: true })
        }
        Err(error) => {
            let member = MemberIndex::new(unreadable);
            assert_eq!(error, AssembleError::JournalUnreadable { member });
            // Nothing was done that a start with all members does not make good.
            steer.set(|_, _| Fate::Passes);
            let array = assemble(&mut pair, &drives, None, false).await.unwrap();
            holds_all(&mut pair, steer, array).await;
            Some(Outcome::Refused { named: false })
        }
    }
}

#[test]
fn what_cannot_be_read_is_not_taken_for_never_acknowledged() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        // A batch of copies, and one that is divided; its header, and what follows.
        for (bytes, which) in [(512, 0), (512, 1), (64 << 10, 0), (64 << 10, 1)] {
            let mut outcomes = Vec::new();
            for unreadable in 0..MEMBERS {
                let all = (0..MEMBERS).filter(|absent| *absent != unreadable).map(Some);
                for absent in all.chain([None]) {
                    let members = (absent, unreadable);
                    let its = outcome(&reactor, &steer, bytes, members, which).await;
                    steer.set(|_, _| Fate::Passes);
                    // With all members here one block is no more than they can do without.
                    assert!(absent.is_some() || its.as_ref().is_none_or(|o| *o == Outcome::Kept));
                    outcomes.extend(its);
                }
            }
            let refused = Outcome::Refused { named: which == 1 || bytes > 4096 };
            assert!(outcomes.contains(&refused), "{bytes} {which}: {outcomes:?}");
        }
    });
}

/// Not even which blocks are in doubt can be read: what was written last may be lost, and nothing
/// else.
#[test]
fn by_force_no_more_is_lost_than_what_was_written_last() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut forced = 0;
        for (unreadable, absent) in pairs() {
            for bytes in [512, 64 << 10] {
                let (mut pair, drives, changed) = crashed(&reactor, bytes).await;
                let Some(block) = changed[unreadable].first() else { continue };
                fail_reads(&pair, &steer, &drives[unreadable], *block);
                let refused = assemble(&mut pair, &drives, Some(absent), false).await.err();
                if !matches!(refused, Some(AssembleError::JournalUnreadable { .. })) {
                    steer.set(|_, _| Fate::Passes);
                    continue;
                }
                forced += 1;
                for absent in [Some(absent), Some(absent), None] {
                    pair.array = assemble(&mut pair, &drives, absent, true).await.unwrap();
                    for at in (0..bytes).step_by(512) {
                        let last = pair.read(at, 512).await;
                        let old_or_new = last == Ok(vec![1; 512]) || last == Ok(vec![2; 512]);
                        assert!(old_or_new, "{at}: {:?}", last.err());
                    }
                    let rest = pair.read(bytes, (1 << 20) - bytes).await;
                    assert!(rest.unwrap().iter().all(|byte| *byte == 1));
                    crash(&pair);
                }
                steer.set(|_, _| Fate::Passes);
            }
        }
        assert!(forced > 0);
    });
}

/// One whose journal cannot be read, and one that is absent.
fn pairs() -> Vec<(usize, usize)> {
    let all = (0..MEMBERS).flat_map(|one| (0..MEMBERS).map(move |other| (one, other)));
    all.filter(|(one, other)| one != other).collect()
}

/// Of two copies of a batch one is damaged: a start makes it whole before anything else is done, so
/// the other may be lost in the next moment.
#[test]
fn a_start_makes_the_journal_whole() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut tried = 0;
        for (damaged, lost) in pairs() {
            let (mut pair, drives, changed) = crashed(&reactor, 512).await;
            if changed[damaged].is_empty() || changed[lost].is_empty() {
                continue;
            }
            tried += 1;
            let journal = label::plan(DRIVE_BYTES, 1).unwrap().journal.offset;
            for block in &changed[damaged] {
                pair.file(&drives[damaged]).write_all_at(&[0; 4096], journal + block).unwrap();
            }
            let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
            let stores = move |op: &Op| is_write(op) && offset(op) >= Some(data);
            steer.set(move |_, op| if stores(op) { Fate::Waits } else { Fate::Passes });
            let here: Vec<_> = drives.iter().map(|drive| pair.plug_in(drive)).collect();
            let (its, options) = (here.clone(), AssembleOptions::default());
            let on = reactor.clone();
            reactor.spawn(async move {
                let _ = Array::assemble(&on, its, options).await;
            });
            steer.caught(&reactor, 1).await;
            here.iter().for_each(|drive| drive.pull());
            steer.drop_waiting(&reactor).await;
            let array = assemble(&mut pair, &drives, Some(lost), false).await.unwrap();
            holds_all(&mut pair, &steer, array).await;
        }
        assert!(tried >= 2, "{tried}");
    });
}

/// A member cannot be given what it lacks: the others are enough.
#[test]
fn a_start_does_without_a_journal_that_takes_nothing() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut tried = 0;
        for damaged in 0..MEMBERS {
            let (mut pair, drives, changed) = crashed(&reactor, 512).await;
            let journal = label::plan(DRIVE_BYTES, 1).unwrap().journal;
            for block in &changed[damaged] {
                let file = pair.file(&drives[damaged]);
                file.write_all_at(&[0; 4096], journal.offset + block).unwrap();
            }
            if changed[damaged].is_empty() {
                continue;
            }
            tried += 1;
            let file = address(pair.file(&drives[damaged]));
            steer.set(move |its, op| {
                let fails = its == file && is_write(op);
                let in_ring = offset(op).is_some_and(|at| journal.range().contains(&at));
                if fails && in_ring { Fate::Fails } else { Fate::Passes }
            });
            let array = assemble(&mut pair, &drives, None, false).await.unwrap();
            assert_eq!(array.state(), ArrayState::Degraded, "{damaged}");
            holds_all(&mut pair, &steer, array).await;
        }
        assert!(tried >= 2, "{tried}");
    });
}

/// Under the newest batches stand those of the lap before.
#[test]
fn what_stood_there_before_hides_nothing() {
    const ROUNDS: usize = 120;
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut prng = Prng::from_seed(11);
        let mut refused = 0;
        for round in 0..ROUNDS {
            let mut pair = Pair::new(&reactor, Level::Raid5, MEMBERS, 512).await;
            pair.array.set_policy(Policy::Journal).await.unwrap();
            let ring = pair.array.status().journal.bytes;
            let mut written = 0;
            while written < 2 * ring {
                written += small_write(&mut pair, &mut prng).await;
                if prng.chance(1, 20) {
                    pair.in_place().await;
                }
            }
            pair.in_place().await;
            let drives = drives_of(&pair);
            let before = rings(&pair, &drives);
            for _ in 0..1 + prng.below(8) {
                small_write(&mut pair, &mut prng).await;
            }
            let live = changes(&before, &rings(&pair, &drives)).concat();
            drives.iter().for_each(|drive| drive.pull());
            let unreadable = prng.index(MEMBERS);
            let absent = (unreadable + 1 + prng.index(MEMBERS - 1)) % MEMBERS;
            let absent = prng.chance(5, 6).then_some(absent);
            fail_reads(&pair, &steer, &drives[unreadable], live[prng.index(live.len())]);
            match assemble(&mut pair, &drives, absent, false).await {
                Ok(array) => holds_all(&mut pair, &steer, array).await,
                Err(error) => {
                    let is_known = matches!(
                        error,
                        AssembleError::Journal { .. } | AssembleError::JournalUnreadable { .. }
                    );
                    assert!(is_known && absent.is_some(), "round {round}: {error}");
                    refused += 1;
                }
            }
            steer.set(|_, _| Fate::Passes);
        }
        assert!((1..ROUNDS * 2 / 3).contains(&refused), "{refused} of {ROUNDS}");
    });
}

async fn small_write(pair: &mut Pair, prng: &mut Prng) -> u64 {
    let sectors = [2, 16, 50][prng.index(3)];
    let len = 512 * (1 + prng.index(sectors));
    let at = 512 * prng.index(((1 << 20) - len) / 512);
    let value = prng.next_u64().to_le_bytes()[0];
    pair.put(at, &vec![value; len]).await;
    len as u64 + 4096
}

/// Nothing is looked for in the journal of an array that was stopped.
#[test]
fn after_a_stop_a_gap_is_no_reason_to_doubt() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, MEMBERS, 512).await;
        pair.array.set_policy(Policy::Journal).await.unwrap();
        pair.write_some(50).await;
        let drives = drives_of(&pair);
        pair.array.stop().await.unwrap();
        for block in [0, 4096, 64 << 10] {
            fail_reads(&pair, &steer, &drives[1], block);
            pair.array = assemble(&mut pair, &drives, Some(0), false).await.unwrap();
            pair.check().await;
            pair.write_some(5).await;
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}
