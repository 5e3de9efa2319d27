//! Goal: every level keeps what was written: healthy, degraded, rebuilt, and after a restart.
//! Method: arrays on RAM drives, random reads and writes against a plain copy of the bytes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_raid::status::ArrayState;

use crate::pair::{DRIVE_BYTES, Pair, drive, run};

const REDUNDANT: [(Level, usize, &[u8]); 6] = [
    (Level::Raid1, 2, &[0]),
    (Level::Raid10, 4, &[0, 3]),
    (Level::Raid5, 5, &[2]),
    (Level::Raid5, 3, &[0]),
    (Level::Raid6, 6, &[1, 4]),
    (Level::Raid7, 6, &[0, 5, 2]),
];

#[test]
fn healthy_arrays_of_every_level() {
    run(|reactor| async move {
        let plain = [
            (Level::Raid0, 3),
            (Level::Raid0, 1),
            (Level::Raid1, 3),
            (Level::Raid6, 4),
            (Level::Raid50, 6),
            (Level::Raid60, 8),
            (Level::Raid70, 10),
        ];
        let redundant = REDUNDANT.map(|(level, members, _)| (level, members));
        for (level, members) in plain.into_iter().chain(redundant) {
            for sector in [512, 4096] {
                let mut pair = Pair::new(&reactor, level, members, sector).await;
                pair.check().await;
                pair.write_some(60).await;
                pair.check().await;
                if level != Level::Raid0 {
                    pair.scrub_is_clean().await;
                }
                pair.restart(AssembleOptions::default()).await;
                pair.check().await;
                assert_eq!(pair.array.state(), ArrayState::Optimal);
                pair.array.stop().await.unwrap();
            }
        }
    });
}

/// A whole stripe costs as many reads as it has data chunks, whichever member is away.
#[test]
fn a_stripe_with_a_member_away_is_read_once() {
    run(|reactor| async move {
        for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 6), (Level::Raid7, 7)] {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            let new: Vec<u8> = (0..pair.bytes.len()).map(|i| (i / 512 * 7 + i) as u8).collect();
            for (at, part) in new.chunks(1 << 20).enumerate() {
                pair.put(at << 20, part).await;
            }
            pair.in_place().await;
            pair.array.pull_member(MemberIndex(1)).unwrap();
            let stripe = pair.array.stripe_bytes() as usize;
            let data = u64::from(pair.array.layout().data);
            for at in (0..20).map(|index| index * stripe) {
                let before = reads(&pair.array);
                assert!(pair.read(at, stripe).await.unwrap() == pair.bytes[at..at + stripe]);
                assert_eq!(reads(&pair.array) - before, data, "{level:?} at {at}");
            }
            pair.check().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// Of all drives.
fn reads(array: &Array) -> u64 {
    array.status().members.iter().flat_map(|m| &m.drive).map(|drive| drive.counters().reads).sum()
}

#[test]
fn degraded_replaced_and_rebuilt() {
    run(|reactor| async move {
        for (level, members, lost) in REDUNDANT {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.write_some(40).await;
            for member in lost {
                pair.array.pull_member(MemberIndex(*member)).unwrap();
                pair.check().await;
                pair.write_some(40).await;
                pair.check().await;
            }
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            pair.array.flush().await.unwrap();
            let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
            pair.restart(options).await;
            pair.check().await;
            for member in lost {
                pair.replace(*member).await;
                pair.write_some(20).await;
                pair.check().await;
                pair.rebuilt().await;
            }
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// Kinds of arrays, with as many members of one set as it takes to lose something.
const PAST_THE_LIMIT: [(Level, usize, u8, &[u8]); 9] = [
    (Level::Raid5, 5, 0, &[0, 1]),
    (Level::Raid6, 6, 0, &[4, 0, 2]),
    (Level::Raid7, 7, 0, &[1, 2, 6, 4]),
    (Level::RaidNm, 8, 4, &[7, 0, 3, 4, 5]),
    (Level::Raid50, 6, 0, &[3, 5]),
    (Level::Raid60, 8, 0, &[0, 3, 1]),
    (Level::Raid70, 10, 0, &[5, 6, 8, 9]),
    (Level::Raid10, 6, 0, &[2, 3]),
    (Level::Raid0, 3, 0, &[1]),
];

/// A block is there exactly if a member that has it is, or as many of its group as it takes to work
/// it out.
#[test]
fn past_its_limit_an_array_serves_what_is_left() {
    run(|reactor| async move {
        for (level, members, parity, gone) in PAST_THE_LIMIT {
            for is_at_once in [true, false] {
                let shape = Shape { parity, ..Shape::default() };
                let spec = ArraySpec { shape, ..Pair::spec(level) };
                let drives = vec![DRIVE_BYTES; members];
                let mut pair = Pair::made(&reactor, &spec, &drives, 512).await;
                let new: Vec<u8> = (0..pair.bytes.len()).map(|i| (i / 512 * 7 + i) as u8).collect();
                for (at, part) in new.chunks(1 << 20).enumerate() {
                    pair.put(at << 20, part).await;
                }
                pair.in_place().await;
                let (last, first) = gone.split_last().unwrap();
                first.iter().for_each(|member| die(&pair, *member));
                if !is_at_once {
                    // Those that are gone are known to be behind.
                    pair.write_some(20).await;
                    pair.in_place().await;
                    pair.check().await;
                }
                die(&pair, *last);
                assert_eq!(pair.array.state(), ArrayState::Failed, "{level:?}");
                serves_what_is_left(&pair, gone).await;
            }
        }
    });
}

fn die(pair: &Pair, member: u8) {
    pair.array.status().members[usize::from(member)].drive.as_ref().unwrap().pull();
}

async fn serves_what_is_left(pair: &Pair, gone: &[u8]) {
    let layout = pair.array.layout();
    let chunk_bytes = layout.chunk_bytes as usize;
    let is_here = |stripe, position| !gone.contains(&layout.member_at(stripe, position).0);
    let (mut good, mut lost) = (0, 0);
    for at in (0..pair.bytes.len()).step_by(chunk_bytes) {
        let piece = layout.one_piece(at as u64, chunk_bytes as u64).unwrap();
        let all = (0..layout.positions()).filter(|its| is_here(piece.stripe, *its)).count();
        let can_be_worked_out = layout.parity > 0 && all >= usize::from(layout.data);
        let has_it = layout.data_positions(piece.chunk).any(|its| is_here(piece.stripe, its));
        let is_expected = has_it || can_be_worked_out;
        for (at, len) in [(at, 512), (at + chunk_bytes - 512, 512), (at, chunk_bytes)] {
            let read = pair.read(at, len).await;
            let case = format!("{:?} at {at}: {piece:?}", layout.level);
            match read {
                Ok(read) => assert!(is_expected && read == pair.bytes[at..at + len], "{case}"),
                Err(error) => assert!(!is_expected && error == ArrayError::Lost, "{case} {error}"),
            }
        }
        let count = if is_expected { &mut good } else { &mut lost };
        *count += 1;
    }
    assert!(good > 0 && lost > 0, "{:?}: {good} {lost}", layout.level);
}

/// One that is written alone could be left out when the others are started again, and nobody would
/// know.
#[test]
fn half_of_a_pair_does_not_go_on_alone_where_another_pair_is_lost() {
    run(|reactor| async move {
        for policy in [Policy::Bitmap, Policy::Journal] {
            let mut pair = Pair::new(&reactor, Level::Raid10, 4, 512).await;
            pair.array.set_policy(policy).await.unwrap();
            pair.put(0, &[7; 1 << 20]).await;
            pair.in_place().await;
            for member in [2, 3, 0] {
                pair.array.pull_member(MemberIndex(member)).unwrap();
            }
            for at in (0..1 << 20).step_by(16 << 10) {
                let buffer = reactor.buffer(4096);
                buffer.fill_zero();
                let written = pair.array.write(at, buffer.into()).await;
                assert_eq!(written, Err(ArrayError::Lost), "{policy:?} {at}");
            }
        }
    });
}

#[test]
fn a_stale_half_of_a_mirror_is_not_believed() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        pair.write_some(10).await;
        let old = pair.array.status().members[0].drive.clone().unwrap();
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.write_some(10).await;
        pair.array.stop().await.unwrap();
        let old = vec![pair.plug_in(&old)];
        // Alone it says that both are current; what this host has seen since says otherwise.
        let known = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
        let refused = Array::assemble(&reactor, old.clone(), known).await.err();
        assert_eq!(refused, Some(AssembleError::MaybeOld));
        old[0].pull();
        let new = pair.array.status().members[1].drive.clone().unwrap();
        let alone = Array::assemble(&reactor, vec![new], AssembleOptions::default()).await;
        // Its superblock says that the other one is stale: nothing newer can exist.
        let array = alone.unwrap();
        assert_eq!(array.state(), ArrayState::Degraded);
        array.stop().await.unwrap();
    });
}

#[test]
fn assembly_refuses_what_it_cannot_be_sure_of() {
    run(|reactor| async move {
        let pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        let drives: Vec<_> =
            pair.array.status().members.into_iter().map(|m| m.drive.unwrap()).collect();
        pair.array.stop().await.unwrap();
        let assemble = |drives: Vec<Rc<Drive>>, known: Option<(u64, u64)>, force| {
            let current = vec![[0; 16], [1; 16]];
            let known = known.map(|(generation, last_epoch)| Known {
                generation,
                epoch: 0,
                last_epoch,
                current,
            });
            let options = AssembleOptions { force, known, ..AssembleOptions::default() };
            let reactor = reactor.clone();
            async move { Array::assemble(&reactor, drives, options).await.map(|_| ()) }
        };
        let one = vec![drives[0].clone()];
        assert_eq!(assemble(one.clone(), None, false).await, Err(AssembleError::MaybeOld));
        assert_eq!(assemble(one.clone(), Some((99, 0)), false).await, Err(AssembleError::MaybeOld));
        // This host had it once more, and knows nothing of how it was then.
        assert_eq!(assemble(one.clone(), Some((1, 1)), false).await, Err(AssembleError::MaybeOld));
        assert_eq!(assemble(vec![], None, true).await, Err(AssembleError::NoLabel));
        let blank = vec![drive(&reactor, "blank", 512)];
        assert_eq!(assemble(blank, None, true).await, Err(AssembleError::NoLabel));
        assert_eq!(assemble(one, Some((1, 0)), false).await, Ok(()));
    });
}
