//! Goal: a start by force after more was lost than the array bears answers what was acknowledged
//! last, or an error, and never what stood there before; and the next start needs no force.
//! Method: crashes in the midst of a destage; then some blocks of the last batches cannot be read,
//! nor some sectors beside what was written, on any members. Before the start by force there are
//! some whose process dies after any number of writes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::StripeIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;
use ashlar_reactor::prng::Prng;

use crate::journal_gaps::{areas, changes, rings};
use crate::kept::{Unreadable, unreadable};
use crate::pair::{DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const ROUNDS: u64 = 40;
/// Bytes that are written: some stripes of any of the arrays.
const BYTES: usize = 256 << 10;
/// More than most starts by force write.
const WRITES_MAX: u64 = 100;

#[test]
fn by_force_what_was_written_last_is_there_or_an_error() {
    let mut all = Seen::default();
    for seed in 0..ROUNDS {
        let steer = Steer::new();
        let its = steer.clone();
        let seen = run_on(steer.backend(), |reactor| round(reactor, its, seed));
        all.forced += seen.forced;
        all.cut += seen.cut;
        all.errors += seen.errors;
    }
    println!("of {ROUNDS}: {all:?}");
    assert!(all.forced > 5 && all.cut > 3 && all.errors > 100, "{all:?}");
}

#[derive(Debug, Default)]
struct Seen {
    /// Starts that needed force.
    forced: u32,
    /// Of those that were begun before, how many died.
    cut: u32,
    /// Sectors.
    errors: u32,
}

fn spec(prng: &mut Prng) -> (ArraySpec, usize) {
    let nm = |parity| Shape { parity, ..Shape::default() };
    let all = [
        (Level::Raid1, Shape::default(), 2),
        (Level::Raid5, Shape::default(), 3),
        (Level::Raid5, Shape::default(), 5),
        (Level::Raid6, Shape::default(), 5),
        (Level::Raid7, Shape::default(), 6),
        (Level::RaidNm, nm(2), 3),
    ];
    let (level, shape, members) = all[prng.index(all.len())];
    let integrity = prng.chance(1, 3);
    (ArraySpec { shape, integrity, ..Pair::spec(level) }, members)
}

async fn round(reactor: Reactor, steer: Steer, seed: u64) -> Seen {
    let (mut prng, mut seen) = (Prng::from_seed(seed), Seen::default());
    let (spec, members) = spec(&mut prng);
    let mut pair = Pair::made(&reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    if prng.chance(3, 4) {
        pair.put(0, &vec![1; BYTES]).await;
        pair.in_place().await;
    }
    let drives = pair.drives();
    let before = rings(&pair, &drives);
    let written = crash(&mut pair, &steer, &mut prng).await;
    let changed = changes(&before, &rings(&pair, &drives));

    let lost = losses(&pair, &drives, &changed, &written, &mut prng);
    let lost = unreadable(&steer, lost);
    let failed = |error| panic!("seed {seed}: {error}");
    match start(&mut pair, &drives, false).await {
        Ok(()) => {}
        Err(AssembleError::Journal { .. }) => {
            for _ in 0..prng.below(3) {
                let at_write = prng.below(WRITES_MAX);
                seen.cut += u32::from(cut_start(&mut pair, &steer, &lost, &drives, at_write).await);
            }
            start(&mut pair, &drives, true).await.unwrap_or_else(failed);
            seen.forced = 1;
        }
        // What it may be about is not known; by force it may be old.
        Err(AssembleError::JournalUnreadable { .. }) => return seen,
        Err(error) => panic!("seed {seed}: {error}"),
    }
    seen.errors = errors(&pair, seed).await;
    if have_others_their_places(&mut pair).await && seen.forced > 0 {
        // What they might have brought was kept for them.
        let drives = pair.dies();
        start(&mut pair, &drives, true).await.unwrap_or_else(failed);
        seen.errors = errors(&pair, seed).await;
    }
    let drives = pair.dies();
    start(&mut pair, &drives, false).await.unwrap_or_else(failed);
    assert_eq!(errors(&pair, seed).await, seen.errors, "seed {seed}");
    let all = BYTES.next_multiple_of(pair.array.stripe_bytes() as usize);
    pair.put(0, &vec![9; all]).await;
    have_others_their_places(&mut pair).await;
    pair.check().await;
    pair.in_place().await;
    pair.scrub_is_clean().await;
    pair.array.stop().await.unwrap();
    seen
}

/// Members with many errors, as those that missed what was stored, are not believed any more: other
/// drives get their places. Whether there were some.
async fn have_others_their_places(pair: &mut Pair) -> bool {
    let states = pair.array.status().members.into_iter().map(|member| member.state);
    let lost = (0..).zip(states).filter(|(_, its)| *its != MemberState::Trusted);
    let lost: Vec<u8> = lost.map(|(index, _)| index).collect();
    for index in &lost {
        pair.replace(*index).await;
        pair.rebuild_ends().await;
    }
    !lost.is_empty()
}

/// Writes, a part of which is on its way to its place when the process dies. Returns where they
/// were.
async fn crash(pair: &mut Pair, steer: &Steer, prng: &mut Prng) -> Vec<usize> {
    let data = areas(pair).data.offset;
    let (mut written, salt) = (Vec::new(), prng.next_u64());
    let of_four = prng.below(5);
    let waits = move |its: usize, op: &Op| {
        let at = offset(op).filter(|at| is_write(op) && *at >= data);
        at.is_some_and(|at| {
            (at ^ its as u64 ^ salt).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 62 < of_four
        })
    };
    steer.set(move |its, op| if waits(its, op) { Fate::Waits } else { Fate::Passes });
    for _ in 0..2 {
        for _ in 0..prng.below(5) {
            let sectors = 1 + prng.index(40);
            let at = 512 * prng.index(BYTES / 512 - sectors);
            let new = vec![2 + prng.below(200) as u8; 512 * sectors];
            pair.put(at, &new).await;
            written.push(at);
        }
        let array = pair.array.clone();
        let destage = begin(&pair.reactor, async move { array.destage_all().await });
        while steer.waiting() == 0 && !destage.has_ended() {
            pair.reactor.sleep(Duration::from_micros(10)).await;
        }
    }
    pair.dies();
    steer.drop_waiting(&pair.reactor).await;
    written
}

/// Sectors of files: of batches, and of rows that were written.
fn losses(
    pair: &Pair,
    drives: &[Rc<Drive>],
    changed: &[Vec<u64>],
    written: &[usize],
    prng: &mut Prng,
) -> Vec<(usize, u64)> {
    let (layout, mut lost) = (pair.array.layout(), Vec::new());
    let base = areas(pair).journal.offset;
    let one_in = [2, 8, u64::MAX][prng.index(3)];
    for (drive, blocks) in drives.iter().zip(changed) {
        let its = blocks.iter().filter(|_| prng.chance(1, one_in));
        lost.extend(its.map(|block| (address(pair.file(drive)), base + block)));
    }
    let data = areas(pair).data.offset;
    let one_in = [1, 2, 4][prng.index(3)];
    for at in written {
        let stripe = StripeIndex(*at as u64 / pair.array.stripe_bytes());
        let row = *at as u32 % layout.chunk_bytes;
        for position in 0..layout.positions() {
            if prng.chance(1, one_in) {
                let drive = &drives[layout.member_at(stripe, position).index()];
                let at = data + layout.member_offset(stripe, row);
                lost.push((address(pair.file(drive)), at));
            }
        }
    }
    lost
}

async fn start(pair: &mut Pair, drives: &[Rc<Drive>], force: bool) -> Result<(), AssembleError> {
    let drives: Vec<&Rc<Drive>> = drives.iter().collect();
    let options = AssembleOptions { force, ..AssembleOptions::default() };
    pair.start(&drives, options).await
}

/// A start by force, whose process dies at this write. False: it came to its end before.
async fn cut_start(
    pair: &mut Pair,
    steer: &Steer,
    lost: &Unreadable,
    drives: &[Rc<Drive>],
    at_write: u64,
) -> bool {
    pair.dies();
    let here: Vec<Rc<Drive>> = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let (left, its) = (Cell::new(at_write), lost.clone());
    steer.set(move |file, op| {
        if is_write(op) {
            let Some(less) = left.get().checked_sub(1) else { return Fate::Waits };
            left.set(less);
        }
        its.fate(file, op)
    });
    let (reactor, its) = (pair.reactor.clone(), here.clone());
    let options = AssembleOptions { force: true, ..AssembleOptions::default() };
    let start = async move { Array::assemble(&reactor, its, options).await.map(drop) };
    let start = begin(&pair.reactor, start);
    while steer.waiting() == 0 && !start.has_ended() {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
    let was_cut = steer.waiting() > 0;
    here.iter().for_each(|drive| drive.pull());
    steer.drop_waiting(&pair.reactor).await;
    // However it ended: nobody has heard of it.
    let _ = start.ended(&pair.reactor).await;
    lost.set(steer);
    was_cut
}

/// Sectors that are an error; all others hold what was written last.
async fn errors(pair: &Pair, seed: u64) -> u32 {
    let mut errors = 0;
    let stripes = BYTES.next_multiple_of(pair.array.stripe_bytes() as usize);
    // Each but once: a drive on which many reads fail is done without.
    let sector = if pair.array.status().integrity { 4096 } else { 512 };
    for at in (0..stripes).step_by(sector) {
        match pair.read(at, sector).await {
            Ok(bytes) => assert!(bytes == pair.bytes[at..at + sector], "seed {seed}: {at}"),
            Err(ArrayError::Bad | ArrayError::Lost) => errors += 1,
            Err(error) => panic!("seed {seed}: {at}: {error}"),
        }
    }
    for at in (stripes..pair.bytes.len()).step_by(1 << 20) {
        let len = (pair.bytes.len() - at).min(1 << 20);
        let rest = pair.read(at, len).await;
        let rest = rest.unwrap_or_else(|error| panic!("seed {seed}: {at}: {error}"));
        assert!(rest == pair.bytes[at..at + len], "seed {seed}: {at}");
    }
    errors
}
