//! Goal: what could not be finished is finished once it can be, and the journal has its room again;
//! until then writers hear why there is none.
//! Method: writes of most members fail in the midst of a zeroing, or of a replay, or a batch cannot
//! be read; and work again later.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{ATTEMPTS_MAX, Drive};

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::journal_batch::{EntryKind, JournalBatch};
use ashlar_format::record::open;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::label;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::journal_gaps::{areas, rings};
use crate::pair::{DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

async fn array(reactor: &Reactor) -> Pair {
    let mut pair = Pair::new(reactor, Level::Raid5, 3, 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    for at in 0..8 {
        pair.put(at << 19, &vec![at as u8 + 1; 1 << 19]).await;
    }
    pair.in_place().await;
    pair
}

/// The journal holds nothing any more.
async fn empty(pair: &Pair) {
    for _ in 0..1000 {
        if pair.array.status().journal.used_bytes == 0 {
            return;
        }
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?} is never released", pair.array.status().journal);
}

/// Writes of the first stripes fail on all members but the last.
fn fail_first_stripes(pair: &Pair, steer: &Steer) {
    let members = pair.array.status().members;
    let last = address(pair.file(&members[2].drive.clone().unwrap()));
    let first = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
    let stripes = first..first + 4 * u64::from(pair.array.layout().chunk_bytes);
    let fails = move |its: usize, op: &Op| {
        its != last && is_write(op) && offset(op).is_some_and(|at| stripes.contains(&at))
    };
    steer.set(move |its, op| if fails(its, op) { Fate::Fails } else { Fate::Passes });
}

#[test]
fn stripes_that_were_zeroed_in_part_are_zeroed_later() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let stripe = pair.array.stripe_bytes();
        fail_first_stripes(&pair, &steer);
        assert_eq!(pair.array.write_zeroes(0, 3 * stripe).await, Err(ArrayError::Lost));
        // It is kept, and counts: nothing of what was there is seen again.
        pair.bytes[..3 * stripe as usize].fill(0);
        pair.check().await;
        // So does what is written there, and what stands beside it.
        pair.put(512, &[9; 512]).await;
        pair.put(4 * stripe as usize, &[8; 512]).await;
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..3 * stripe as usize].fill(0);
        pair.bytes[512..1024].fill(9);
        pair.check().await;
        pair.scrub_is_clean().await;
        // And again, of stripes that were torn.
        pair.bytes[..2 * stripe as usize].fill(0);
        pair.array.write_zeroes(0, 2 * stripe).await.unwrap();
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// Who waited for the zeroing sees no more of what was there than who comes later.
#[test]
fn a_read_that_waits_for_a_zeroing_that_fails_sees_zeroes() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let members = pair.array.status().members;
        let last = address(pair.file(&members[2].drive.clone().unwrap()));
        let first = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        let stripes = first..first + u64::from(pair.array.layout().chunk_bytes);
        let within = move |op: &Op| offset(op).is_some_and(|at| stripes.contains(&at));
        let failed = Rc::new(Cell::new(0));
        let (its, count) = (within.clone(), failed.clone());
        steer.set(move |file, op| match (its(op), is_write(op)) {
            (true, true) if file != last => Fate::Waits,
            (true, false) => {
                count.set(count.get() + 1);
                Fate::Fails
            }
            _ => Fate::Passes,
        });
        let (zeroing, reading) = (pair.array.clone(), pair.array.clone());
        let stripe = pair.array.stripe_bytes();
        let zeroed = begin(&reactor, async move { zeroing.write_zeroes(0, stripe).await });
        steer.caught(&reactor, 2).await;
        let bytes = reactor.buffer(4096);
        let into = bytes.clone();
        let read = begin(&reactor, async move { reading.read(0, into.into()).await });
        while failed.get() < ATTEMPTS_MAX {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        let fails = move |file: usize, op: &Op| file != last && is_write(op) && within(op);
        steer.set(move |file, op| if fails(file, op) { Fate::Fails } else { Fate::Passes });
        assert_eq!(zeroed.ended(&reactor).await, Err(ArrayError::Lost));
        read.ended(&reactor).await.unwrap();
        assert!(bytes.bytes().iter().all(|byte| *byte == 0));
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..stripe as usize].fill(0);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn regions_that_were_forgotten_in_doubt_are_forgotten_later() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let region = pair.array.region_bytes() as usize;
        let map = label::plan(DRIVE_BYTES, 1).unwrap().written_map.range();
        let fails = move |op: &Op| is_write(op) && offset(op).is_some_and(|at| map.contains(&at));
        steer.set(move |_, op| if fails(op) { Fate::Fails } else { Fate::Passes });
        let forgotten = pair.array.write_zeroes(0, region as u64).await;
        assert_eq!(forgotten, Err(ArrayError::Lost));
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..region].fill(0);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// The ring is full behind what cannot be finished: nobody waits for ever.
#[test]
fn writers_hear_that_the_journal_cannot_go_on() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let stripe = pair.array.stripe_bytes();
        fail_first_stripes(&pair, &steer);
        assert_eq!(pair.array.write_zeroes(0, 3 * stripe).await, Err(ArrayError::Lost));
        let bytes = reactor.buffer(64 << 10);
        bytes.copy_from_slice(&[7; 64 << 10]);
        let room = pair.array.status().journal.bytes / (64 << 10);
        let mut refused = false;
        for at in 0..room {
            let at = (1 << 20) + (at << 16);
            let written = pair.array.write(at, bytes.clone().into()).await;
            refused |= written == Err(ArrayError::Lost);
            assert_eq!(written.is_err(), refused, "{written:?}");
            if !refused {
                pair.bytes[at as usize..at as usize + (64 << 10)].fill(7);
            }
        }
        assert!(refused, "{:?}", pair.array.status().journal);
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..3 * stripe as usize].fill(0);
        pair.put(1 << 20, &[6; 4096]).await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// The process dies when a sector and its parity stand in the journal, and in place nowhere.
async fn crashed(reactor: &Reactor, steer: &Steer) -> (Pair, Vec<Rc<Drive>>) {
    crashed_at(reactor, steer, 512).await
}

async fn crashed_at(reactor: &Reactor, steer: &Steer, at: usize) -> (Pair, Vec<Rc<Drive>>) {
    let mut pair = array(reactor).await;
    let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
    let stores = move |op: &Op| is_write(op) && offset(op).is_some_and(|at| at >= data);
    steer.set(move |_, op| if stores(op) { Fate::Waits } else { Fate::Passes });
    pair.put(at, &[9; 512]).await;
    steer.caught(reactor, 1).await;
    let drives = pair.dies();
    steer.drop_waiting(reactor).await;
    (pair, drives)
}

/// Where the newest batch with data stands on the members that have it.
fn data_batch(pair: &Pair, drives: &[Rc<Drive>]) -> u64 {
    let journal = areas(pair).journal.offset;
    let mut newest = (0, 0);
    for ring in rings(pair, drives) {
        for at in (0..ring.len()).step_by(4096) {
            let home = journal + at as u64;
            let Ok(batch) = open::<JournalBatch>(&ring[at..], None, home) else { continue };
            if batch.entries().iter().any(|entry| entry.kind() == Ok(EntryKind::Data)) {
                newest = newest.max((batch.header.sequence.get(), home));
            }
        }
    }
    newest.1
}

async fn assemble(
    pair: &mut Pair,
    drives: &[Rc<Drive>],
    force: bool,
) -> Result<Rc<Array>, AssembleError> {
    let drives: Vec<_> = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions { force, ..AssembleOptions::default() };
    let array = Array::assemble(&pair.reactor, drives.clone(), options).await;
    if array.is_err() {
        drives.iter().for_each(|drive| drive.pull());
    }
    array
}

/// The batch with the data cannot be read: perhaps it can at another start.
#[test]
fn a_start_does_not_drop_what_it_cannot_replay() {
    run(|reactor, steer| async move {
        let (mut pair, drives) = crashed(&reactor, &steer).await;
        let at = data_batch(&pair, &drives);
        let mut batches = Vec::new();
        for drive in &drives {
            let mut batch = [0; 4096];
            pair.file(drive).read_exact_at(&mut batch, at).unwrap();
            pair.file(drive).write_all_at(&[0; 4096], at).unwrap();
            batches.push(batch);
        }
        let refused = assemble(&mut pair, &drives, false).await.err();
        assert_eq!(refused, Some(AssembleError::Journal { stripe: 0 }));
        for (drive, batch) in drives.iter().zip(batches) {
            pair.file(drive).write_all_at(&batch, at).unwrap();
        }
        pair.array = assemble(&mut pair, &drives, false).await.unwrap();
        pair.check().await;
        pair.in_place().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// A start by force, after one without was refused. What it gave up is an error then, and at the
/// next start, which needs no force; it can be written, and all is well.
async fn given_up(pair: &mut Pair, drives: &[Rc<Drive>], lost: usize) {
    let refused = assemble(pair, drives, false).await.err();
    assert_eq!(refused, Some(AssembleError::Journal { stripe: 0 }));
    pair.array = assemble(pair, drives, true).await.unwrap();
    for is_first in [true, false] {
        if !is_first {
            let drives = pair.dies();
            pair.array = assemble(pair, &drives, false).await.unwrap();
        }
        empty(pair).await;
        for at in (0..pair.array.stripe_bytes() as usize).step_by(512) {
            let expected = pair.bytes[at..at + 512].to_vec();
            let expected = if at == lost { Err(ArrayError::Bad) } else { Ok(expected) };
            assert_eq!(pair.read(at, 512).await, expected, "{at}, {is_first}");
        }
        assert_eq!(pair.array.status().bad.len(), 1);
    }
    pair.put(lost, &[4; 512]).await;
    pair.check().await;
    pair.in_place().await;
    pair.scrub_is_clean().await;
    pair.array.stop().await.unwrap();
}

/// The data batch of a stripe is nowhere, not even its header.
#[test]
fn by_force_lost_data_is_given_up() {
    run(|reactor, steer| async move {
        let (mut pair, drives) = crashed(&reactor, &steer).await;
        let at = data_batch(&pair, &drives);
        for drive in &drives {
            pair.file(drive).write_all_at(&[0; 4096], at).unwrap();
        }
        given_up(&mut pair, &drives, 512).await;
    });
}

/// The header of it can be read, and what it holds cannot.
#[test]
fn by_force_data_that_cannot_be_read_is_given_up() {
    run(|reactor, steer| async move {
        let (mut pair, drives) = crashed(&reactor, &steer).await;
        let payload = data_batch(&pair, &drives) + 4096;
        unreadable(&steer, drives.iter().map(|drive| (address(pair.file(drive)), payload)));
        given_up(&mut pair, &drives, 512).await;
    });
}

/// Neither what stands beside the new data nor the parity can be read: what stood there.
#[test]
fn by_force_the_write_hole_is_given_up() {
    run(|reactor, steer| async move {
        let (mut pair, drives) = crashed(&reactor, &steer).await;
        let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        let layout = pair.array.layout();
        let members = [1, layout.data].map(|p| layout.member_at(StripeIndex(0), p).index());
        unreadable(&steer, members.map(|m| (address(pair.file(&drives[m])), data + 512)));
        given_up(&mut pair, &drives, layout.chunk_bytes as usize + 512).await;
    });
}

async fn starts_by_force_without(pair: &mut Pair, drives: &[Rc<Drive>], absent: usize) {
    let mut left = drives.to_vec();
    left.remove(absent);
    let refused = assemble(pair, &left, false).await.err();
    assert_eq!(refused, Some(AssembleError::Journal { stripe: 0 }));
    pair.array = assemble(pair, &left, true).await.unwrap();
}

/// Nothing was ever put in place there: what is missing is not zero for that.
#[test]
fn by_force_what_is_left_to_an_absent_member_is_no_zero_of_a_blank_region() {
    run(|reactor, steer| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        pair.array.set_policy(Policy::Journal).await.unwrap();
        let before = rings(&pair, &pair.drives());
        pair.put(512, &[9; 512]).await;
        let after = rings(&pair, &pair.drives());
        let drives = pair.dies();
        let have: Vec<usize> = (0..3).filter(|member| before[*member] != after[*member]).collect();
        let [absent, unread] = have[..] else { panic!("{have:?}") };
        let header = before[unread].iter().zip(&after[unread]).position(|(old, new)| old != new);
        let payload = areas(&pair).journal.offset + (header.unwrap() as u64 / 4096 + 1) * 4096;
        unreadable(&steer, [(address(pair.file(&drives[unread])), payload)]);
        starts_by_force_without(&mut pair, &drives, absent).await;
        let (array, stripe) = (pair.array.clone(), pair.array.stripe_bytes());
        assert_eq!(pair.read(512, 512).await, Err(ArrayError::Lost));
        assert_eq!(array.block_status(0..stripe).await.map(|its| its.is_zero), Ok(false));
        assert_eq!(array.write_zeroes(0, stripe).await, Err(ArrayError::Lost));
        assert_eq!(array.write_zeroes(0, array.capacity()).await, Err(ArrayError::Lost));
        assert_eq!(array.discard(0, array.capacity()).await, Err(ArrayError::Lost));
        // Beside it all is as it was.
        assert_eq!(pair.read(stripe as usize, 512).await, Ok(vec![0; 512]));
        pair.put(stripe as usize, &[7; 512]).await;
        pair.dies();
        pair.array = assemble(&mut pair, &drives, false).await.unwrap();
        pair.check().await;
        pair.in_place().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// What an absent member could bring is left to it, until another drive has its place.
#[test]
fn by_force_nothing_is_given_up_that_may_come_back() {
    run(|reactor, steer| async move {
        let (mut pair, drives) = crashed(&reactor, &steer).await;
        let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        let layout = pair.array.layout();
        let [beside, parity] =
            [1, layout.data].map(|p| layout.member_at(StripeIndex(0), p).index());
        unreadable(&steer, [(address(pair.file(&drives[parity])), data + 512)]);
        starts_by_force_without(&mut pair, &drives, beside).await;
        assert_eq!(pair.array.write(512, reactor.buffer(512).into()).await, Err(ArrayError::Lost));
        pair.replace(beside as u8).await;
        pair.rebuild_ends().await;
        let drives = pair.dies();
        given_up(&mut pair, &drives, layout.chunk_bytes as usize + 512).await;
    });
}

/// The place of an absent member has another drive, which lacks the stripe; what was written last
/// is of that member, and in the journal.
#[test]
fn by_force_what_the_journal_has_is_not_given_up_with_the_rest() {
    run(|reactor, steer| async move {
        // In the second chunk.
        let at = Pair::spec(Level::Raid5).chunk_bytes as usize + 512;
        let (mut pair, drives) = crashed_at(&reactor, &steer, at).await;
        let layout = pair.array.layout();
        let [beside, lost, parity] =
            [0, 1, layout.data].map(|p| layout.member_at(StripeIndex(0), p).index());
        let row = label::plan(DRIVE_BYTES, 1).unwrap().data.offset + 512;
        let files = [beside, parity].map(|member| (address(pair.file(&drives[member])), row));
        unreadable(&steer, files);
        starts_by_force_without(&mut pair, &drives, lost).await;
        pair.replace(lost as u8).await;
        pair.rebuild_ends().await;
        let drives = pair.dies();
        given_up(&mut pair, &drives, 512).await;
    });
}

/// Sectors of files that cannot be read until they are written.
#[derive(Clone)]
pub struct Unreadable(Rc<RefCell<Vec<(usize, u64)>>>);

impl Unreadable {
    /// What becomes of an operation that reaches the file.
    pub fn fate(&self, file: usize, op: &Op) -> Fate {
        let range = match op {
            Op::Read { offset, into, .. } => *offset..offset + into.len() as u64,
            Op::Write { offset, from, .. } => *offset..offset + from.len() as u64,
            Op::WriteZeroes { .. } | Op::Flush { .. } | Op::Descriptor { .. } => 0..0,
        };
        let is_it =
            |(its, at): &(usize, u64)| *its == file && range.start < at + 512 && *at < range.end;
        let mut left = self.0.borrow_mut();
        let fails = matches!(op, Op::Read { .. }) && left.iter().any(is_it);
        left.retain(|it| !(is_write(op) && is_it(it)));
        if fails { Fate::Fails } else { Fate::Passes }
    }

    pub fn set(&self, steer: &Steer) {
        let its = self.clone();
        steer.set(move |file, op| its.fate(file, op));
    }
}

pub fn unreadable(steer: &Steer, sectors: impl IntoIterator<Item = (usize, u64)>) -> Unreadable {
    let unreadable = Unreadable(Rc::new(RefCell::new(sectors.into_iter().collect())));
    unreadable.set(steer);
    unreadable
}

/// Two of three members cannot take what a replay stores: they are not both given up for it.
#[test]
fn a_replay_fences_no_more_than_the_array_bears() {
    run(|reactor, steer| async move {
        let (mut pair, drives) = crashed(&reactor, &steer).await;
        let data = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
        // The first stripe has its first chunk on member 0 and its parity on the last.
        let layout = pair.array.layout();
        let stored = [0, layout.data].map(|p| layout.member_at(StripeIndex(0), p).index());
        let fail = stored.map(|member| address(pair.file(&drives[member])));
        let fails = move |its: usize, op: &Op| {
            fail.contains(&its) && is_write(op) && offset(op).is_some_and(|at| at >= data)
        };
        steer.set(move |its, op| if fails(its, op) { Fate::Fails } else { Fate::Passes });
        let refused = assemble(&mut pair, &drives, false).await.err();
        assert_eq!(refused, Some(AssembleError::Journal { stripe: 0 }));
        steer.set(|_, _| Fate::Passes);
        pair.array = assemble(&mut pair, &drives, false).await.unwrap();
        pair.check().await;
        pair.rebuilt().await;
        assert_eq!(pair.array.state(), ArrayState::Optimal);
        pair.in_place().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// What is read for a copy is not worked out from copies of something else, when the last drive
/// that has it no longer reads it, either.
#[test]
fn a_copy_is_not_worked_out_from_other_chunks() {
    // Of the one chunk lost for good, of the other from then on.
    const LOST: u64 = 1024;
    const LOST_NEXT: u64 = 4096;
    run(|reactor, steer| async move {
        let shape = Shape { copies: 3, ..Shape::default() };
        let spec = ArraySpec { shape, ..Pair::spec(Level::Raid10) };
        let mut pair = Pair::made(&reactor, &spec, &[DRIVE_BYTES; 6], 512).await;
        pair.put(0, &vec![3; pair.array.stripe_bytes() as usize]).await;
        pair.in_place().await;
        let drives = pair.drives();
        let data = label::plan(DRIVE_BYTES, 0).unwrap().data.offset;
        // By position: three copies of one chunk, then of the other.
        let layout = pair.array.layout();
        let members: Vec<usize> =
            (0..6).map(|position| layout.member_at(StripeIndex(0), position).index()).collect();
        let files: Vec<usize> =
            members.iter().map(|member| address(pair.file(&drives[*member]))).collect();
        let is_given_up = Cell::new(false);
        steer.set(move |its, op| {
            let position = files.iter().position(|file| *file == its);
            let (Some(position), Some(at)) = (position, offset(op)) else { return Fate::Passes };
            if is_write(op) {
                is_given_up.set(is_given_up.get() || position == 1 && at == data + LOST);
                return Fate::Passes;
            }
            let Op::Read { into, .. } = op else { return Fate::Passes };
            let sector = data + if position < 3 { LOST } else { LOST_NEXT };
            let touched = at < sector + 512 && sector < at + into.len() as u64;
            let fails = position != 5 || is_given_up.get();
            if touched && fails { Fate::Fails } else { Fate::Passes }
        });
        pair.array.pull_member(MemberIndex::new(members[0])).unwrap();
        pair.replace(members[0] as u8).await;
        pair.rebuild_ends().await;
        assert!(pair.array.status().rebuild_error.is_some(), "the last copy was read all the time");
        steer.set(|_, _| Fate::Passes);
        pair.array.rebuild(|| [99; 16]).await.unwrap();
        pair.rebuilt().await;
        let chunk = layout.chunk_bytes as usize;
        let lost = LOST as usize..LOST as usize + 512;
        assert_eq!(pair.read(lost.start, lost.len()).await, Err(ArrayError::Bad));
        for sector in (0..2 * chunk).step_by(512).filter(|at| *at != lost.start) {
            assert!(pair.read(sector, 512).await.unwrap() == [3; 512], "{sector}");
        }
    });
}
