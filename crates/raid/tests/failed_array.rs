//! Goal: an array that has failed as a whole for a moment (an enclosure, a cable) fences nobody,
//! and acknowledges nothing that an absent member would miss. When its drives are back, in any
//! order, by themselves or with the next start, everything acknowledged is there.
//! Method: more members are pulled than the level bears, all kinds of requests are made, and the
//! drives return with what they held; the array is compared with a plain copy and scrubbed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, ChangeError};
use ashlar_raid::label;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, run, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

/// Level, members, what of the shape is chosen, policy, and who goes away together.
struct Kind {
    level: Level,
    members: usize,
    shape: Shape,
    policy: Policy,
    away: &'static [u8],
}

fn kind(level: Level, members: usize, policy: Policy, away: &'static [u8]) -> Kind {
    Kind { level, members, shape: Shape::default(), policy, away }
}

fn kinds() -> Vec<Kind> {
    let parity = Shape { parity: 3, ..Shape::default() };
    vec![
        kind(Level::Raid0, 3, Policy::None, &[1]),
        kind(Level::Raid10, 4, Policy::Bitmap, &[2, 3]),
        kind(Level::Raid10, 4, Policy::Journal, &[0, 1, 3]),
        kind(Level::Raid10, 4, Policy::None, &[1, 2, 3]),
        kind(Level::Raid5, 4, Policy::Journal, &[0, 2]),
        kind(Level::Raid5, 4, Policy::Bitmap, &[1, 2]),
        kind(Level::Raid5, 4, Policy::None, &[2, 3]),
        kind(Level::Raid6, 5, Policy::Journal, &[0, 1, 3]),
        kind(Level::Raid6, 5, Policy::None, &[0, 2, 4]),
        kind(Level::Raid50, 6, Policy::Journal, &[0, 1]),
        kind(Level::Raid50, 6, Policy::Bitmap, &[1, 2, 4]),
        Kind { shape: parity, ..kind(Level::RaidNm, 6, Policy::Journal, &[0, 1, 3, 4]) },
    ]
}

async fn filled(reactor: &Reactor, kind: &Kind) -> Pair {
    let spec = ArraySpec { shape: kind.shape, policy: Some(kind.policy), ..Pair::spec(kind.level) };
    let mut pair = Pair::made(reactor, &spec, &vec![DRIVE_BYTES; kind.members], 512).await;
    let len = pair.bytes.len();
    for at in (0..len).step_by(1 << 20) {
        pair.put(at, &vec![(at >> 20) as u8 + 1; (1 << 20).min(len - at)]).await;
    }
    pair.write_some(20).await;
    pair.in_place().await;
    pair.array.flush().await.unwrap();
    pair
}

fn drive_of(pair: &Pair, member: u8) -> Rc<Drive> {
    pair.array.status().members[usize::from(member)].drive.clone().unwrap()
}

/// What is behind the members now.
fn drives(pair: &Pair) -> Vec<Rc<Drive>> {
    (0..pair.array.layout().members()).map(|index| drive_of(pair, index as u8)).collect()
}

fn pull(pair: &Pair, away: &[u8]) {
    away.iter().for_each(|member| pair.array.pull_member(MemberIndex(*member)).unwrap());
}

fn state(pair: &Pair, member: u8) -> MemberState {
    pair.array.status().members[usize::from(member)].state
}

fn is_fenced(pair: &Pair) -> bool {
    pair.array.status().members.iter().any(|member| member.state == MemberState::Stale)
}

/// The member's own drive is plugged in again, and the array asked to take it.
async fn comes_back(pair: &mut Pair, member: u8, drive: &Rc<Drive>) -> Result<(), ChangeError> {
    let again = pair.plug_in(drive);
    pair.array.return_member(MemberIndex(member), again, [77 + member; 16]).await
}

/// All of these, in this order; who is refused is tried again once the others had their turn.
async fn all_come_back(pair: &mut Pair, order: &[u8], drives: &[Rc<Drive>]) {
    for _ in 0..order.len() {
        for member in order {
            let its = pair.array.status().members[usize::from(*member)].clone();
            let is_here = its.drive.is_some_and(|drive| drive.is_alive());
            if !is_here || its.state == MemberState::Stale {
                let _ = comes_back(pair, *member, &drives[usize::from(*member)]).await;
            }
        }
    }
}

/// The array is stopped, as far as it can be, and started with all drives.
async fn starts_again(pair: &mut Pair, drives: &[Rc<Drive>]) {
    let _ = pair.array.stop().await;
    drives.iter().for_each(|drive| drive.pull());
    let drives = drives.iter().map(|drive| pair.plug_in(drive)).collect();
    let options = AssembleOptions::default();
    pair.array = Array::assemble(&pair.reactor, drives, options).await.unwrap();
}

/// Optimal, and nothing differs.
async fn is_whole(pair: &mut Pair, what: &str) {
    pair.rebuilt().await;
    assert_eq!(pair.array.state(), ArrayState::Optimal, "{what}");
    pair.check().await;
    pair.in_place().await;
    if pair.array.layout().is_redundant() {
        pair.scrub_is_clean().await;
    }
    pair.array.stop().await.unwrap();
}

/// A range that a request was about, and what it may read as now, by sector.
struct Asked {
    range: Range<usize>,
    allowed: Vec<u8>,
    acknowledged: bool,
}

/// Requests of all kinds to an array that has failed, each to a place of its own.
async fn ask_all(pair: &Pair) -> Vec<Asked> {
    let (stripe, region) = (pair.array.stripe_bytes(), pair.array.region_bytes());
    let mut asked = Vec::new();
    for (at, len, what) in [
        (stripe, stripe, "discard"),
        (3 * stripe, stripe, "zero"),
        (5 * stripe + 512, 1024, "write"),
        (6 * stripe, stripe, "write"),
        (region, region, "discard"),
        (2 * region, region, "zero"),
    ] {
        let range = at as usize..(at + len) as usize;
        let done = match what {
            "discard" => pair.array.discard(at, len).await,
            "zero" => pair.array.write_zeroes(at, len).await,
            _ => {
                let bytes = pair.reactor.buffer(len as usize);
                bytes.copy_from_slice(&vec![0x99; len as usize]);
                pair.array.write(at, bytes.into()).await
            }
        };
        let new = if what == "write" { vec![0x99; range.len()] } else { vec![0; range.len()] };
        // A discard is a hint.
        let acknowledged = done.is_ok() && what != "discard";
        asked.push(Asked { range, allowed: new, acknowledged });
        assert!(matches!(done, Ok(()) | Err(ArrayError::Lost)), "{what}: {done:?}");
        let _ = pair.array.flush().await;
    }
    let _ = pair.array.destage_all().await;
    asked
}

/// What was acknowledged is there; of the rest each sector is old or new, and stays so.
async fn settle(pair: &mut Pair, asked: Vec<Asked>, what: &str) {
    for Asked { range, allowed, acknowledged } in asked {
        let read = pair.read(range.start, range.len()).await.unwrap();
        for (index, sector) in read.chunks(512).enumerate() {
            let at = index * 512..index * 512 + 512;
            let old = &pair.bytes[range.start + at.start..range.start + at.end];
            let good = sector == &allowed[at.clone()] || !acknowledged && sector == old;
            assert!(good, "{what}: sector {index} of {range:?}, acknowledged: {acknowledged}");
        }
        pair.bytes[range].copy_from_slice(&read);
    }
}

#[test]
fn an_array_that_has_failed_is_whole_when_its_drives_are_back() {
    run(|reactor| async move {
        for kind in kinds() {
            for turn in 0..3 {
                let Kind { level, policy, away, .. } = &kind;
                let what = format!("{level:?} {policy:?} without {away:?}, turn {turn}");
                let mut pair = filled(&reactor, &kind).await;
                let drives = drives(&pair);
                pull(&pair, away);
                assert_eq!(pair.array.state(), ArrayState::Failed, "{what}");
                let asked = ask_all(&pair).await;
                assert!(!is_fenced(&pair), "{what}");
                let mut order = away.to_vec();
                match turn {
                    0 => all_come_back(&mut pair, &order, &drives).await,
                    1 => {
                        order.reverse();
                        all_come_back(&mut pair, &order, &drives).await;
                    }
                    _ => starts_again(&mut pair, &drives).await,
                }
                settle(&mut pair, asked, &what).await;
                is_whole(&mut pair, &what).await;
            }
        }
    });
}

/// What a part of the array may hold: all its bytes are one of these.
struct Slot {
    range: Range<usize>,
    acknowledged: u8,
    /// Asked for since, and not answered well.
    perhaps: Vec<u8>,
}

impl Slot {
    /// One request after the other, until one fails.
    async fn work(&mut self, reactor: &Reactor, array: &Rc<Array>) {
        let (at, len) = (self.range.start as u64, self.range.len());
        let is_whole = len as u64 == array.stripe_bytes();
        for value in (1..=250).cycle() {
            let turn = if is_whole { value % 8 } else { 1 };
            let new = if turn == 3 || turn == 6 { 0 } else { value };
            self.perhaps.push(new);
            let done = match turn {
                3 => array.write_zeroes(at, len as u64).await,
                6 => array.discard(at, len as u64).await,
                _ => {
                    let bytes = reactor.buffer(len);
                    bytes.copy_from_slice(&vec![new; len]);
                    array.write(at, bytes.into()).await
                }
            };
            if done.is_err() || value % 16 == 0 && array.flush().await.is_err() {
                return;
            }
            // A discard is a hint.
            if turn != 6 {
                (self.acknowledged, self.perhaps) = (new, Vec::new());
            }
            reactor.sleep(Duration::from_micros(200)).await;
        }
    }
}

/// The drives go one after the other in the midst of a load, and some of the members are fenced for
/// what they missed before the array had failed.
#[test]
fn what_was_acknowledged_before_it_failed_is_there() {
    run(|reactor| async move {
        // In place, parity has the write hole.
        let covered = |kind: &Kind| {
            kind.policy == Policy::Journal || [Level::Raid0, Level::Raid10].contains(&kind.level)
        };
        for (turn, kind) in kinds().into_iter().filter(covered).enumerate() {
            for at_once in [true, false] {
                let Kind { level, policy, away, .. } = &kind;
                let what = format!("{level:?} {policy:?} without {away:?}, at once: {at_once}");
                let mut pair = filled(&reactor, &kind).await;
                let (drives, slots) = (drives(&pair), Rc::new(RefCell::new(Vec::new())));
                let stripe = pair.array.stripe_bytes() as usize;
                let works = 12;
                for index in 0..works {
                    let len = if index % 2 == 0 { stripe } else { 4096 };
                    let range = 2 * index * stripe..2 * index * stripe + len;
                    let zeroes = vec![0; len];
                    pair.put(range.start, &zeroes).await;
                    let mut slot = Slot { range, acknowledged: 0, perhaps: Vec::new() };
                    let (reactor, array, slots) =
                        (reactor.clone(), pair.array.clone(), slots.clone());
                    reactor.clone().spawn(async move {
                        slot.work(&reactor, &array).await;
                        slots.borrow_mut().push(slot);
                    });
                }
                reactor.sleep(Duration::from_millis(30)).await;
                for member in away.iter() {
                    pull(&pair, &[*member]);
                    if !at_once {
                        reactor.sleep(Duration::from_millis(2)).await;
                    }
                }
                reactor.sleep(Duration::from_millis(50)).await;
                let mut order = away.to_vec();
                order.rotate_left(turn % away.len());
                all_come_back(&mut pair, &order, &drives).await;
                if pair.array.state() == ArrayState::Failed {
                    starts_again(&mut pair, &drives).await;
                }
                // Some are served on, and had no reason to end.
                pair.array.stop().await.unwrap();
                while slots.borrow().len() < works {
                    reactor.sleep(Duration::from_millis(1)).await;
                }
                starts_again(&mut pair, &drives).await;
                for Slot { range, acknowledged, perhaps } in slots.take() {
                    let read = pair.read(range.start, range.len()).await.unwrap();
                    let good = |byte: &u8| *byte == acknowledged || perhaps.contains(byte);
                    assert!(read.iter().all(good), "{what}: {range:?}, {acknowledged} {perhaps:?}");
                    pair.bytes[range].copy_from_slice(&read);
                }
                pair.rebuilt().await;
                // One that went while a superblock was on its way to it is filled when asked for.
                let mut uuids = 50..;
                pair.array.rebuild(|| [uuids.next().unwrap(); 16]).await.unwrap();
                is_whole(&mut pair, &what).await;
            }
        }
    });
}

/// Half of a pair is all that is left, and hears that a region is zero: the others may be started
/// without it.
#[test]
fn what_only_one_drive_would_know_is_not_acknowledged() {
    run(|reactor| async move {
        for policy in [Policy::Bitmap, Policy::None] {
            let mut pair = filled(&reactor, &kind(Level::Raid10, 4, policy, &[])).await;
            let drives = drives(&pair);
            pull(&pair, &[0, 1, 2]);
            let region = pair.array.region_bytes();
            assert_eq!(pair.array.write_zeroes(0, region).await, Err(ArrayError::Lost));
            assert_eq!(pair.array.discard(region, region).await, Err(ArrayError::Lost));
            // A volume table would not be known to them either.
            let table = pair.array.read_table().await.unwrap();
            assert_eq!(pair.array.write_table(&table).await, Err(ArrayError::Lost));
            drives.iter().for_each(|drive| drive.pull());
            let others = drives[..3].iter().map(|drive| pair.plug_in(drive)).collect();
            let options = AssembleOptions::default();
            pair.array = Array::assemble(&reactor, others, options).await.unwrap();
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// The first member is away and known to be, and one chunk of each of so many stripes waits in the
/// journal: parity of some of them is on any other member.
async fn one_is_behind(pair: &mut Pair, stripes: usize) {
    pull(pair, &[0]);
    pair.put(0, &[1; 512]).await;
    pair.in_place().await;
    assert_eq!(state(pair, 0), MemberState::Stale);
    let stripe = pair.array.stripe_bytes() as usize;
    for at in 0..stripes {
        let new = vec![at as u8 + 100; 4096];
        pair.put(at * stripe + at % 3 * (16 << 10), &new).await;
    }
}

/// One member is known to be behind, acknowledged data waits in the journal, and a second goes: it
/// has all that the first lacks.
#[test]
fn what_waits_in_the_journal_fences_no_member_that_is_needed() {
    run(|reactor| async move {
        for turn in 0..3 {
            let mut pair = filled(&reactor, &kind(Level::Raid5, 4, Policy::Journal, &[])).await;
            let drives = drives(&pair);
            one_is_behind(&mut pair, 16).await;
            pair.array.flush().await.unwrap();
            pull(&pair, &[2]);
            for _ in 0..3 {
                assert_eq!(pair.array.destage_all().await, Err(ArrayError::Lost));
            }
            assert_eq!(state(&pair, 2), MemberState::Trusted);
            waits_at_rest(&pair).await;
            if turn == 2 {
                starts_again(&mut pair, &drives).await;
            } else {
                all_come_back(&mut pair, &[[0, 2], [2, 0]][turn], &drives).await;
                goes_on(&pair).await;
            }
            is_whole(&mut pair, "afterwards").await;
        }
    });
}

/// It tries again now and then, and does not spin.
async fn waits_at_rest(pair: &Pair) {
    let operations = |pair: &Pair| {
        let members = pair.array.status().members;
        let drives = members.iter().flat_map(|member| &member.drive);
        drives.map(|drive| drive.counters().reads + drive.counters().writes).sum::<u64>()
    };
    let (before, began) = (operations(pair), pair.reactor.now());
    pair.reactor.sleep(Duration::from_secs(3)).await;
    let rounds = pair.reactor.now().since(began).as_secs() + 1;
    let done = operations(pair) - before;
    assert!(done < 600 * rounds, "{done} operations in {rounds} s");
}

/// What waited is put in place by itself.
async fn goes_on(pair: &Pair) {
    for _ in 0..1500 {
        if pair.array.status().journal.pending_bytes == 0 {
            return;
        }
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?} is never put in place", pair.array.status().journal);
}

fn run_steered<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

/// The second member is here, and cannot be written for a while.
#[test]
fn what_is_stored_in_part_fences_no_member_that_is_needed() {
    run_steered(|reactor, steer| async move {
        let mut pair = filled(&reactor, &kind(Level::Raid5, 4, Policy::Journal, &[])).await;
        let drives = drives(&pair);
        one_is_behind(&mut pair, 8).await;
        let (file, data) = (address(pair.file(&drives[2])), label::plan(DRIVE_BYTES, 1).unwrap());
        steer.set(move |its, op| match offset(op) {
            Some(at) if its == file && is_write(op) && at >= data.data.offset => Fate::Fails,
            _ => Fate::Passes,
        });
        assert_eq!(pair.array.destage_all().await, Err(ArrayError::Lost));
        assert_eq!(state(&pair, 2), MemberState::Trusted);
        steer.set(|_, _| Fate::Passes);
        goes_on(&pair).await;
        all_come_back(&mut pair, &[0, 2], &drives).await;
        is_whole(&mut pair, "afterwards").await;
    });
}

/// Nobody knows whether its cache came through: with a start the journal makes sure.
#[test]
fn a_needed_member_with_writes_in_its_cache_waits_for_a_start() {
    run(|reactor| async move {
        let mut pair = filled(&reactor, &kind(Level::Raid5, 4, Policy::Journal, &[])).await;
        let drives = drives(&pair);
        pull(&pair, &[0]);
        let stripe = pair.array.stripe_bytes() as usize;
        for at in 0..8 {
            pair.put(at * stripe, &vec![at as u8 + 100; 4096]).await;
        }
        assert_eq!(state(&pair, 0), MemberState::Stale);
        assert!(drives[2].is_unflushed());
        pull(&pair, &[2]);
        for member in [0, 2, 0] {
            let refused = comes_back(&mut pair, member, &drives[usize::from(member)]).await;
            let told = refused.unwrap_err().to_string();
            assert!(member == 0 || told.contains("what was in its cache when it went"), "{told}");
        }
        assert_eq!(state(&pair, 2), MemberState::Trusted);
        starts_again(&mut pair, &drives).await;
        is_whole(&mut pair, "afterwards").await;
    });
}

/// A stripe that a crash left in doubt is made to agree by a copy that is alone with it.
#[test]
fn a_resync_fences_no_member_that_is_needed() {
    run(|reactor| async move {
        let mut pair = filled(&reactor, &kind(Level::Raid10, 4, Policy::Bitmap, &[])).await;
        pair.put(0, &[5; 4096]).await;
        let drives = drives(&pair);
        pair.crash_without(&[]).await;
        pull(&pair, &[0, 2, 3]);
        assert!(pair.array.has_doubts());
        for _ in 0..3 {
            assert_eq!(pair.read(0, 512).await, Err(ArrayError::Lost));
            pair.reactor.sleep(Duration::from_millis(300)).await;
        }
        assert!(!is_fenced(&pair));
        all_come_back(&mut pair, &[3, 0, 2], &drives).await;
        is_whole(&mut pair, "afterwards").await;
    });
}

/// Copies that are here are made one, and served, whatever becomes of the others.
#[test]
fn a_stripe_in_doubt_is_served_as_far_as_its_copies_are_here() {
    run(|reactor| async move {
        let mut pair = filled(&reactor, &kind(Level::Raid10, 4, Policy::Bitmap, &[])).await;
        pair.put(0, &[5; 4096]).await;
        let (chunk, drives) = (pair.array.layout().chunk_bytes as usize, drives(&pair));
        pair.crash_without(&[]).await;
        pull(&pair, &[2, 3]);
        assert!(pair.array.has_doubts());
        for _ in 0..4 {
            assert!(pair.read(0, chunk).await.unwrap() == pair.bytes[..chunk]);
            assert_eq!(pair.read(chunk, 512).await, Err(ArrayError::Lost));
        }
        assert!(!is_fenced(&pair));
        all_come_back(&mut pair, &[3, 2], &drives).await;
        is_whole(&mut pair, "afterwards").await;
    });
}

/// The second member has died, and nobody has heard of it when others go: were these fenced, the
/// array could not be started without it.
#[test]
fn nobody_is_fenced_who_is_needed_for_one_that_died_unheard() {
    run_steered(|reactor, steer| async move {
        for kind in [
            kind(Level::Raid10, 4, Policy::Bitmap, &[0]),
            kind(Level::Raid5, 4, Policy::Journal, &[2]),
            kind(Level::Raid6, 4, Policy::Journal, &[2, 3]),
        ] {
            let mut pair = filled(&reactor, &kind).await;
            let drives = drives(&pair);
            let stripe = pair.array.stripe_bytes() as usize;
            for at in 0..4 {
                pair.put(at * stripe, &vec![at as u8 + 100; 4096]).await;
            }
            pair.array.flush().await.unwrap();
            let dead = address(pair.file(&drives[1]));
            steer.set(move |its, _| if its == dead { Fate::Fails } else { Fate::Passes });
            pull(&pair, kind.away);
            for percent in [77, 78] {
                let rebuild_percent = Some(percent);
                let change = SettingsChange { rebuild_percent, ..SettingsChange::default() };
                assert!(pair.array.set_settings(change).await.is_err());
            }
            // What a start without the dead one needs of them stays there.
            for member in kind.away {
                let drive = &drives[usize::from(*member)];
                comes_back(&mut pair, *member, drive).await.unwrap_err();
            }
            pair.starts_with(&[&drives[0], &drives[2], &drives[3]]).await;
            for member in [0, 2, 3] {
                assert_eq!(state(&pair, member), MemberState::Trusted, "{:?}", kind.level);
            }
            pair.check().await;
            pair.array.stop().await.unwrap();
            steer.set(|_, _| Fate::Passes);
        }
    });
}

/// As many members as there can be, and as many away as may be.
#[test]
fn a_wide_array_does_without_as_many_as_it_has_parity() {
    run(|reactor| async move {
        let shape = Shape { parity: 8, ..Shape::default() };
        let policy = Some(Policy::Journal);
        let spec = ArraySpec { shape, policy, ..Pair::spec(Level::RaidNm) };
        let fits = |mib: &u64| {
            label::plan_for(mib << 20, 8, false).is_some_and(|areas| areas.data.len >= 1 << 20)
        };
        let bytes = (DRIVE_BYTES >> 20..).find(fits).unwrap() << 20;
        let mut pair = Pair::made(&reactor, &spec, &[bytes; 64], 512).await;
        pair.write_some(60).await;
        pair.in_place().await;
        pair.array.flush().await.unwrap();
        let drives = drives(&pair);
        let away: Vec<u8> = (0..8).map(|index| index * 8 + 3).collect();
        pull(&pair, &away);
        pair.check().await;
        pair.write_some(40).await;
        pair.check().await;
        pair.in_place().await;
        pair.check().await;
        // One more: it waits, and nothing of it is lost.
        pull(&pair, &[60]);
        assert_eq!(pair.array.state(), ArrayState::Failed);
        assert_eq!(pair.array.write_zeroes(0, 2 << 20).await, Err(ArrayError::Lost));
        assert_eq!(state(&pair, 60), MemberState::Trusted);
        all_come_back(&mut pair, &[60], &drives).await;
        pair.array.write_zeroes(0, 2 << 20).await.unwrap();
        pair.bytes[..2 << 20].fill(0);
        pair.check().await;
        let (own, others) = away.split_at(4);
        all_come_back(&mut pair, own, &drives).await;
        for member in others {
            let again = pair.plug_in(&drives[usize::from(*member)]);
            pair.array.replace_member(MemberIndex(*member), again, [99; 16]).await.unwrap();
        }
        is_whole(&mut pair, "wide").await;
    });
}
