//! Goal: where the journal of a member cannot be read and others are absent, what was acknowledged
//! is there, or an error: never what stood there before.
//! Method: a crash while a write stands in the journal only; for each pair of members one is absent
//! and a block of the write's batch, or of its share, cannot be read on the other.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::bad_blocks::RANGES_MAX;
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{Area, MemberIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError, ChangeError};
use ashlar_raid::label;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;
use ashlar_reactor::prng::Prng;

use crate::pair::{DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const MEMBERS: usize = 4;
/// A few more than until all batches stand where they should.
const WRITES_OF_A_START: usize = 36;

/// Of each member.
pub fn areas(pair: &Pair) -> MemberLayout {
    let integrity = pair.array.status().integrity;
    label::plan_for(DRIVE_BYTES, pair.array.layout().parity, integrity).unwrap()
}

fn journal(pair: &Pair) -> Area {
    areas(pair).journal
}

pub fn rings(pair: &Pair, drives: &[Rc<Drive>]) -> Vec<Vec<u8>> {
    let area = journal(pair);
    let ring = |drive: &Rc<Drive>| {
        let mut bytes = vec![0; area.len as usize];
        pair.file(drive).read_exact_at(&mut bytes, area.offset).unwrap();
        bytes
    };
    drives.iter().map(ring).collect()
}

/// An array after a crash, its drives, and the blocks of each ring that the last write changed.
type Crashed = (Pair, Vec<Rc<Drive>>, Vec<Vec<u64>>);

/// A crash when `bytes` were acknowledged.
async fn crashed(reactor: &Reactor, bytes: usize) -> Crashed {
    crashed_on(reactor, &Pair::spec(Level::Raid5), MEMBERS, bytes).await
}

async fn crashed_on(reactor: &Reactor, spec: &ArraySpec, members: usize, bytes: usize) -> Crashed {
    let pair = written(reactor, spec, members).await;
    crash_after(pair, bytes).await
}

async fn written(reactor: &Reactor, spec: &ArraySpec, members: usize) -> Pair {
    let mut pair = Pair::made(reactor, spec, &vec![DRIVE_BYTES; members], 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    pair.put(0, &vec![1; 1 << 20]).await;
    pair.in_place().await;
    pair
}

async fn crash_after(mut pair: Pair, bytes: usize) -> Crashed {
    let drives = pair.drives();
    let before = rings(&pair, &drives);
    pair.put(0, &vec![2; bytes]).await;
    let changed = changes(&before, &rings(&pair, &drives));
    drives.iter().for_each(|drive| drive.pull());
    (pair, drives, changed)
}

/// Which batches had no space on one of their members before the last write took their place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Voids {
    One,
    TwoAtOnce,
    /// And all before it left the ring meanwhile.
    TheOnlyOne,
}

async fn crashed_behind(reactor: &Reactor, steer: &Steer, voids: Voids, bytes: usize) -> Crashed {
    let mut pair = written(reactor, &Pair::spec(Level::Raid5), MEMBERS).await;
    let stripe = pair.array.stripe_bytes() as usize;
    // Its parity needs no batch.
    let len = if voids == Voids::TheOnlyOne { stripe } else { 512 };
    pair.put(44 * stripe, &vec![4; len]).await;
    let ring = journal(&pair).range();
    let batch = move |op: &Op| {
        let Op::Write { offset, from, .. } = op else { return None };
        // A header alone says that a batch is void.
        (from.len() > 4096 && ring.contains(offset)).then_some(*offset)
    };
    let waits = batch.clone();
    steer.set(move |_, op| if waits(op).is_some() { Fate::Waits } else { Fate::Passes });
    let (mut refused, count) = (Vec::new(), if voids == Voids::TwoAtOnce { 2 } else { 1 });
    for at in [0, 1 << 20].into_iter().take(count) {
        let (array, from) = (pair.array.clone(), reactor.buffer(bytes));
        from.copy_from_slice(&vec![3; bytes]);
        refused.push(begin(reactor, async move { array.write(at, from.into()).await }));
        steer.caught(reactor, 2 * refused.len()).await;
    }
    if voids == Voids::TheOnlyOne {
        let (array, before) = (pair.array.clone(), pair.array.status().journal.used_bytes);
        let _ = begin(reactor, async move { array.destage_all().await });
        while pair.array.status().journal.used_bytes >= before {
            reactor.sleep(Duration::from_millis(1)).await;
        }
    }
    // The first write of each batch is told so.
    let met = RefCell::new(BTreeSet::new());
    steer.set(move |_, op| match batch(op) {
        Some(at) if met.borrow_mut().insert(at) => Fate::Full,
        Some(_) | None => Fate::Passes,
    });
    for refused in refused {
        assert_eq!(refused.ended(reactor).await, Err(ArrayError::NoSpace));
    }
    steer.set(|_, _| Fate::Passes);
    crash_after(pair, bytes).await
}

/// Blocks that differ, by ring.
pub fn changes(before: &[Vec<u8>], after: &[Vec<u8>]) -> Vec<Vec<u64>> {
    let changes = before.iter().zip(after).map(|(before, after)| {
        let blocks = before.chunks(4096).zip(after.chunks(4096)).zip((0..).step_by(4096));
        blocks.filter(|((before, after), _)| before != after).map(|(_, at)| at).collect()
    });
    changes.collect()
}

/// Reads of this block of the member's ring fail.
fn fail_reads(pair: &Pair, steer: &Steer, drive: &Rc<Drive>, block: u64) {
    fail_all_reads(pair, steer, &[(drive, block)]);
}

fn fail_all_reads(pair: &Pair, steer: &Steer, blocks: &[(&Rc<Drive>, u64)]) {
    let base = journal(pair).offset;
    let place = |(drive, block): &(&Rc<Drive>, u64)| (address(pair.file(drive)), base + block);
    let blocks: Vec<(usize, u64)> = blocks.iter().map(place).collect();
    steer.set(move |its, op| {
        let Op::Read { offset, into, .. } = op else { return Fate::Passes };
        let end = offset + into.len() as u64;
        let is_among =
            |(file, block): &(usize, u64)| its == *file && *offset < block + 4096 && *block < end;
        if blocks.iter().any(is_among) { Fate::Fails } else { Fate::Passes }
    });
}

async fn assemble(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    absent: impl IntoIterator<Item = usize>,
    force: bool,
) -> Result<Rc<Array>, AssembleError> {
    assemble_with(pair, drives, absent, AssembleOptions { force, ..AssembleOptions::default() })
        .await
}

async fn assemble_with(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    absent: impl IntoIterator<Item = usize>,
    options: AssembleOptions,
) -> Result<Rc<Array>, AssembleError> {
    let absent: Vec<usize> = absent.into_iter().collect();
    let here = drives.iter().enumerate().filter(|(index, _)| !absent.contains(index));
    let here: Vec<_> = here.map(|(_, drive)| pair.plug_in(drive)).collect();
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

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Kept,
    /// Which batch it was is known, or that there may have been one.
    Refused {
        named: bool,
    },
}

/// `which`: of the blocks that changed on the members that cannot be read. `None`: some have no
/// such block.
async fn outcome(
    steer: &Steer,
    (mut pair, drives, changed): Crashed,
    bytes: usize,
    (absent, unreadable): (&[usize], &[usize]),
    which: usize,
) -> Option<Outcome> {
    let block = |its: &usize| Some((&drives[*its], *changed[*its].get(which)?));
    let blocks: Vec<(&Rc<Drive>, u64)> = unreadable.iter().map(block).collect::<Option<_>>()?;
    fail_all_reads(&pair, steer, &blocks);
    match assemble(&mut pair, &drives, absent.to_vec(), false).await {
        Ok(array) => {
            holds_all(&mut pair, steer, array).await;
            Some(Outcome::Kept)
        }
        Err(AssembleError::Journal { .. }) => {
            // By force the rest is served, and the blocks in doubt are an error, at each start.
            for _ in 0..2 {
                pair.array = assemble(&mut pair, &drives, absent.to_vec(), true).await.unwrap();
                serves_the_rest(&pair, bytes).await;
                for index in absent.iter().copied() {
                    // As it runs, it would empty the only journal that has the rest.
                    let back = pair.plug_in(&drives[index]);
                    let index = MemberIndex::new(index);
                    let returned = pair.array.return_member(index, back.clone(), [77; 16]).await;
                    assert!(
                        matches!(returned, Err(ChangeError::WaitsForStart { .. })),
                        "{returned:?}"
                    );
                    back.pull();
                }
                pair.dies();
            }
            // Until the members are back.
            let array = assemble(&mut pair, &drives, None, false).await.unwrap();
            holds_all(&mut pair, steer, array).await;
            Some(Outcome::Refused { named: true })
        }
        Err(error) => {
            let is_it = |member: &usize| {
                error == AssembleError::JournalUnreadable { member: MemberIndex::new(*member) }
            };
            assert!(unreadable.iter().any(is_it), "{error}");
            // Nothing was done that a start with all members does not make good.
            steer.set(|_, _| Fate::Passes);
            let array = assemble(&mut pair, &drives, None, false).await.unwrap();
            holds_all(&mut pair, steer, array).await;
            Some(Outcome::Refused { named: false })
        }
    }
}

/// All but the first bytes, which are an error; and so may be what stands beside them.
async fn serves_the_rest(pair: &Pair, bytes: usize) {
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
}

#[test]
fn what_cannot_be_read_is_not_taken_for_never_acknowledged() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        // A batch of copies, and one that is divided; its header, and what follows.
        for (bytes, which) in [(512, 0), (512, 1), (64 << 10, 0), (64 << 10, 1)] {
            let mut outcomes = Vec::new();
            for unreadable in 0..MEMBERS {
                let all = (0..MEMBERS).filter(|absent| *absent != unreadable);
                for absent in all.map(|absent| vec![absent]).chain([vec![]]) {
                    let crashed = crashed(&reactor, bytes).await;
                    let members = (&absent[..], &[unreadable][..]);
                    let its = outcome(&steer, crashed, bytes, members, which).await;
                    steer.set(|_, _| Fate::Passes);
                    // With all members here one block is no more than they can do without.
                    assert!(!absent.is_empty() || its.as_ref().is_none_or(|o| *o == Outcome::Kept));
                    outcomes.extend(its);
                }
            }
            let refused = Outcome::Refused { named: which == 1 || bytes > 4096 };
            assert!(outcomes.contains(&refused), "{bytes} {which}: {outcomes:?}");
        }
    });
}

/// What was void is not taken for what was acknowledged, nor this for that.
#[test]
fn the_place_of_what_had_no_space_is_used_again() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for voids in [Voids::One, Voids::TwoAtOnce, Voids::TheOnlyOne] {
            for (bytes, which) in [(512, 0), (512, 1), (64 << 10, 0)] {
                for (unreadable, absent) in pairs() {
                    let crashed = crashed_behind(&reactor, &steer, voids, bytes).await;
                    outcome(&steer, crashed, bytes, (&[absent], &[unreadable]), which).await;
                    steer.set(|_, _| Fate::Passes);
                }
            }
        }
    });
}

/// A start gives batches back to members. Whenever it dies, the next one finds them there.
#[test]
fn a_start_that_dies_does_not_put_what_was_void_over_what_has_its_place() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for (absent, writes) in
            (0..MEMBERS).flat_map(|its| (0..WRITES_OF_A_START).map(move |w| (its, w)))
        {
            let (mut pair, drives, _) = crashed_behind(&reactor, &steer, Voids::One, 512).await;
            let left = Cell::new(writes);
            steer.set(move |_, op| match left.get() {
                0 if is_write(op) => Fate::Fails,
                writes => {
                    left.set(writes - usize::from(is_write(op)));
                    Fate::Passes
                }
            });
            let _ = assemble(&mut pair, &drives, None, false).await;
            steer.set(|_, _| Fate::Passes);
            let array = assemble(&mut pair, &drives, Some(absent), false).await.unwrap();
            holds_all(&mut pair, &steer, array).await;
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
                loses_only_the_last(&mut pair, &drives, &[absent], bytes).await;
                steer.set(|_, _| Fate::Passes);
            }
        }
        assert!(forced > 0);
    });
}

async fn loses_only_the_last(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    absent: &[usize],
    bytes: usize,
) {
    for absent in [absent, absent, &[]] {
        pair.array = assemble(pair, drives, absent.to_vec(), true).await.unwrap();
        for at in (0..bytes).step_by(512) {
            let last = pair.read(at, 512).await;
            let old_or_new = last == Ok(vec![1; 512]) || last == Ok(vec![2; 512]);
            assert!(old_or_new, "{at}: {:?}", last.err());
        }
        let rest = pair.read(bytes, (1 << 20) - bytes).await;
        assert!(rest.unwrap().iter().all(|byte| *byte == 1));
        pair.dies();
    }
}

/// The members that have a write are as many as the array can do without, and one: some of them
/// absent, and the others not readable, in many ways.
#[test]
fn past_two_and_three_parity_chunks_it_is_as_past_one() {
    let shape = Shape { parity: 3, ..Shape::default() };
    let nm = ArraySpec { shape, ..Pair::spec(Level::RaidNm) };
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for (spec, members, ways) in
            [(Pair::spec(Level::Raid6), 5, &[1, 2, 3, 4, 5, 6][..]), (nm, 7, &[1, 6, 7, 14])]
        {
            for &which_are_absent in ways {
                // A header, a block of a copy, a block of a share.
                for (bytes, which, named) in [(512, 0, false), (512, 1, true), (64 << 10, 0, true)]
                {
                    let refused = Outcome::Refused { named };
                    for (is_one_back, expected) in [(false, refused), (true, Outcome::Kept)] {
                        let crashed = crashed_on(&reactor, &spec, members, bytes).await;
                        let (mut absent, unreadable) = parted(&crashed, which_are_absent);
                        absent.drain(..usize::from(is_one_back));
                        let chosen = (&absent[..], &unreadable[..]);
                        let its = outcome(&steer, crashed, bytes, chosen, which).await;
                        steer.set(|_, _| Fate::Passes);
                        assert_eq!(its, Some(expected), "{bytes} {which}: {chosen:?}");
                    }
                }
                let crashed = crashed_on(&reactor, &spec, members, 512).await;
                let (absent, unreadable) = parted(&crashed, which_are_absent);
                let (mut pair, drives, changed) = crashed;
                let headers = unreadable.iter().map(|its| (&drives[*its], changed[*its][0]));
                fail_all_reads(&pair, &steer, &headers.collect::<Vec<_>>());
                loses_only_the_last(&mut pair, &drives, &absent, 512).await;
                steer.set(|_, _| Fate::Passes);
            }
        }
    });
}

/// As many members with a part of the write as it takes to lose it: those to be absent, as this
/// number's bits say, and the others.
fn parted((pair, _, changed): &Crashed, which_are_absent: usize) -> (Vec<usize>, Vec<usize>) {
    let holders = (0..changed.len()).filter(|its| !changed[*its].is_empty());
    let holders: Vec<usize> = holders.take(usize::from(pair.array.layout().parity) + 1).collect();
    let is_absent = |place: usize| which_are_absent & 1 << place != 0;
    let of = |absent: bool| {
        let its = holders.iter().enumerate().filter(|(place, _)| is_absent(*place) == absent);
        its.map(|(_, member)| *member).collect()
    };
    (of(true), of(false))
}

/// Ranges that the list of bad blocks keeps room for, beside those that it has (see there).
const KEPT_FOR_CUTS: usize = 160;

/// The list has room for a part of what is in doubt: all is an error, and no stripe of it takes
/// writes; what was in the list stays there.
#[test]
fn by_force_all_is_an_error_that_the_list_has_no_room_for() {
    const ROOM: usize = 4;
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        pair.array.set_policy(Policy::Journal).await.unwrap();
        for at in (0..pair.bytes.len()).step_by(1 << 20) {
            pair.put(at, &vec![1; 1 << 20]).await;
        }
        pair.in_place().await;
        lose_sectors(&mut pair, &steer, RANGES_MAX - KEPT_FOR_CUTS - ROOM).await;
        let lost = pair.array.status().bad;
        assert_eq!(lost.len(), RANGES_MAX - KEPT_FOR_CUTS - ROOM);
        let mut known = pair.known();

        let drives = pair.drives();
        let before = rings(&pair, &drives);
        let data = label::plan(DRIVE_BYTES, 0).unwrap().data.offset;
        let stores = move |op: &Op| is_write(op) && offset(op) >= Some(data);
        steer.set(move |_, op| if stores(op) { Fate::Waits } else { Fate::Passes });
        let in_doubt: Vec<usize> = (0..2 * ROOM).map(|index| 2048 * index).collect();
        for at in &in_doubt {
            pair.put(*at, &[2; 512]).await;
        }
        let changed = changes(&before, &rings(&pair, &drives));
        drives.iter().for_each(|drive| drive.pull());
        steer.drop_waiting(&reactor).await;
        // A header and a block of what it is about, by turns.
        let payload = changed[0].iter().skip(1).step_by(2).map(|block| (&drives[0], *block));
        fail_all_reads(&pair, &steer, &payload.collect::<Vec<_>>());
        for _ in 0..2 {
            // This host knows that nobody went on with the other half.
            let options = AssembleOptions { known, ..AssembleOptions::default() };
            let refused = assemble_with(&mut pair, &drives, [1], options).await.err();
            assert_eq!(refused, Some(AssembleError::Journal { stripe: 0 }));
            pair.array = assemble(&mut pair, &drives, [1], true).await.unwrap();
            known = pair.known();
            let bad = pair.array.status().bad;
            assert!(lost.iter().all(|its| bad.contains(its)) && bad.len() == lost.len() + ROOM);
            for at in &in_doubt {
                assert_eq!(pair.read(*at, 512).await, Err(ArrayError::Bad), "{at}");
                let written = pair.array.write(*at as u64, reactor.buffer(512).into()).await;
                assert_eq!(written, Err(ArrayError::Lost));
            }
            pair.dies();
        }
        pair.array = assemble(&mut pair, &drives, None, false).await.unwrap();
        steer.set(|_, _| Fate::Passes);
        assert_eq!(pair.array.status().bad, lost);
        for at in &in_doubt {
            assert_eq!(pair.read(*at, 512).await, Ok(vec![2; 512]));
        }
        pair.array.stop().await.unwrap();
    });
}

/// The second member is replaced, while so many sectors of the first one cannot be read, each
/// between others that can. The first MiB is spared.
async fn lose_sectors(pair: &mut Pair, steer: &Steer, count: usize) {
    let file = address(pair.file(&pair.drives()[0]));
    let first = label::plan(DRIVE_BYTES, 0).unwrap().data.offset + (1 << 20);
    let sectors: BTreeSet<u64> = (0..count as u64).map(|index| first + 1024 * index).collect();
    let sectors = RefCell::new(sectors);
    pair.array.pull_member(MemberIndex::new(1)).unwrap();
    pair.put(0, &[1; 512]).await;
    pair.in_place().await;
    steer.set(move |its, op| {
        let (range, is_write) = match op {
            Op::Read { offset, into, .. } => (*offset..offset + into.len() as u64, false),
            Op::Write { offset, from, .. } => (*offset..offset + from.len() as u64, true),
            Op::WriteZeroes { .. } | Op::Flush { .. } | Op::Descriptor { .. } => {
                return Fate::Passes;
            }
        };
        let mut sectors = sectors.borrow_mut();
        if its == file && is_write {
            sectors.retain(|at| !range.contains(at));
        }
        let lacks = its == file && sectors.range(range).next().is_some();
        if lacks { Fate::Fails } else { Fate::Passes }
    });
    pair.replace(1).await;
    pair.rebuilt().await;
    steer.set(|_, _| Fate::Passes);
}

/// One whose journal cannot be read, and one that is absent.
fn pairs() -> Vec<(usize, usize)> {
    let all = (0..MEMBERS).flat_map(|one| (0..MEMBERS).map(move |other| (one, other)));
    all.filter(|(one, other)| one != other).collect()
}

/// Power goes while the last batch is written: of as many of its copies as `torn` says only a part
/// has arrived.
#[test]
fn a_torn_tail() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for torn in 1..=2 {
            let (mut pair, drives, changed) = crashed(&reactor, 16 << 10).await;
            let ring = label::plan(DRIVE_BYTES, 1).unwrap().journal.offset;
            let with: Vec<usize> = (0..MEMBERS).filter(|its| changed[*its].len() > 1).collect();
            assert_eq!(with.len(), 2, "{changed:?}");
            for member in &with[..torn] {
                // Its second half is what stood there before: something else.
                let half = &changed[*member][changed[*member].len() / 2..];
                for at in half {
                    pair.file(&drives[*member]).write_all_at(&[0xee; 4096], ring + at).unwrap();
                }
            }
            if torn == 2 {
                // Nobody can have heard of it.
                pair.bytes[..16 << 10].fill(1);
            }
            pair.array = assemble(&mut pair, &drives, None, false).await.unwrap();
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
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

/// A start finds too little of a batch that nobody heard of, fences the member with the rest of it,
/// and makes parity of what else there is. When that member is back, the batch stays undone: also
/// by force where nobody can read any more that a member does not have it.
#[test]
fn what_a_start_did_without_does_not_come_true_at_the_next() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for (lost, has_gap) in [(0, false), (1, false), (0, true), (1, true)] {
            let ((mut pair, drives, shares), [written, _, parity @ ..]) =
                crashed_in_mid_batch(&reactor, &steer).await;
            // This start ends when the parity is in place, and the data is not.
            let data = label::plan(DRIVE_BYTES, 2).unwrap().data.offset;
            let file = address(pair.file(&drives[written]));
            steer.set(move |its, op| {
                let stores = its == file && is_write(op) && offset(op) == Some(data);
                if stores { Fate::Waits } else { Fate::Passes }
            });
            let here = [written, parity[0], parity[1]].map(|its| pair.plug_in(&drives[its]));
            let (on, its) = (reactor.clone(), here.to_vec());
            let _start = begin(&reactor, async move {
                Array::assemble(&on, its, AssembleOptions::default()).await.map(drop)
            });
            steer.caught(&reactor, 1).await;
            here.iter().for_each(|drive| drive.pull());
            steer.drop_waiting(&reactor).await;

            if has_gap {
                fail_reads(&pair, &steer, &drives[parity[1 - lost]], shares[written][0]);
            }
            let array = assemble(&mut pair, &drives, Some(parity[lost]), has_gap).await.unwrap();
            holds_all(&mut pair, &steer, array).await;
        }
    });
}

/// Of three batches in the journal the second one, which was not acknowledged, is there in part: in
/// the shares of the members of the first stripe's two data chunks. With these members, the one of
/// the chunk that is written first, and those of the parity.
async fn crashed_in_mid_batch(reactor: &Reactor, steer: &Steer) -> (Crashed, [usize; MEMBERS]) {
    const CHUNK: usize = 16 << 10;
    let mut pair = Pair::new(reactor, Level::Raid6, MEMBERS, 512).await;
    pair.put(0, &[7; CHUNK]).await;
    pair.put(CHUNK, &[8; CHUNK]).await;
    pair.in_place().await;
    let (drives, data) = (pair.drives(), label::plan(DRIVE_BYTES, 2).unwrap().data.offset);
    let stands_first = |member: usize| {
        let mut byte = [0];
        pair.file(&drives[member]).read_exact_at(&mut byte, data).unwrap();
        byte[0]
    };
    let mut members = [0, 1, 2, 3];
    members.sort_by_key(|member| stands_first(*member));
    assert_eq!(members.map(stands_first)[..2], [7, 8]);

    let stores = move |op: &Op| is_write(op) && offset(op) >= Some(data);
    steer.set(move |_, op| if stores(op) { Fate::Waits } else { Fate::Passes });
    pair.put(0, &[1; 4096]).await;
    let known = pair.bytes.clone();
    let before = rings(&pair, &drives);
    pair.put(0, &(0..CHUNK).map(|at| (at / 512) as u8 + 100).collect::<Vec<_>>()).await;
    let shares = changes(&before, &rings(&pair, &drives));
    pair.bytes = known;
    pair.put(1 << 19, &[2; 512]).await;
    drives.iter().for_each(|drive| drive.pull());
    steer.drop_waiting(reactor).await;
    let ring = journal(&pair).offset;
    for member in &members[2..] {
        assert!(!shares[*member].is_empty());
        for at in &shares[*member] {
            pair.file(&drives[*member]).write_all_at(&[0xee; 4096], ring + at).unwrap();
        }
    }
    ((pair, drives, shares), members)
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
            let drives = pair.drives();
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
        let drives = pair.drives();
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
