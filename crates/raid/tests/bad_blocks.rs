//! Goal: what a rebuild cannot work out is an error until it is written again, also after restarts
//! and crashes; everything else is served, and right, with any member missing.
//! Method: sectors of files in memory become unreadable, or parity is in doubt after a crash, while
//! a member is replaced; every sector is compared with a plain copy, with members missing in turn.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use ashlar_drive::health::HealthState;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::{ArrayState, Flaw, ScrubPlace, ScrubReport, ScrubState};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;

use crate::faulty::{Unreadable, drive_of, run, spoil};
use crate::pair::{DRIVE_BYTES, Pair};

const STRIPE: StripeIndex = StripeIndex(5);

/// Level, members, policy, and how many members besides the replaced one must have lost a row for
/// it to be lost.
const KINDS: [(Level, usize, Policy, usize); 7] = [
    (Level::Raid1, 2, Policy::Bitmap, 1),
    (Level::Raid1, 3, Policy::Journal, 2),
    (Level::Raid10, 4, Policy::Bitmap, 1),
    (Level::Raid5, 4, Policy::Journal, 1),
    (Level::Raid5, 4, Policy::Bitmap, 1),
    (Level::Raid5, 4, Policy::None, 1),
    (Level::Raid6, 5, Policy::Journal, 2),
];

/// Data chunks of the stripe on these members.
fn chunks(pair: &Pair, stripe: StripeIndex, members: &[usize]) -> BTreeSet<u8> {
    let layout = pair.array.layout();
    let positions = members.iter().map(|member| MemberIndex(*member as u8));
    let positions = positions.filter_map(|member| layout.position_of(stripe, member));
    let data = positions.filter(|position| *position < layout.data * layout.copies);
    data.map(|position| position / layout.copies).collect()
}

/// Ranges of the list, as bytes of the array.
fn bad(pair: &Pair) -> Vec<Range<usize>> {
    let bad = pair.array.status().bad;
    let range = |range: &ashlar_raid::bad_set::BadRange| {
        let start = pair.array.layout().array_offset(range.stripe, range.chunk, range.rows.start);
        start as usize..start as usize + range.rows.len()
    };
    bad.iter().map(range).collect()
}

/// Every sector is an error if it is bad, and else right.
async fn check(pair: &Pair, what: &str) {
    check_but(pair, &bad(pair), what).await;
}

async fn check_but(pair: &Pair, bad: &[Range<usize>], what: &str) {
    let step = 16 << 10;
    for start in (0..pair.bytes.len()).step_by(step) {
        let near = bad.iter().any(|bad| bad.start < start + step && start < bad.end);
        let len = if near { 512 } else { step };
        for at in (start..start + step).step_by(len) {
            let is_bad = bad.iter().any(|bad| bad.contains(&at));
            let expected =
                if is_bad { Err(ArrayError::Bad) } else { Ok(pair.bytes[at..at + len].to_vec()) };
            let read = pair.read(at, len).await;
            assert!(read == expected, "{what}: {at} is bad: {is_bad}, read: {:?}", read.err());
        }
    }
}

async fn scrubbed(pair: &Pair) -> ScrubReport {
    pair.array.start_scrub(false).unwrap();
    loop {
        pair.reactor.sleep(Duration::from_millis(1)).await;
        if let ScrubState::Finished { report } = pair.array.status().scrub {
            return report;
        }
    }
}

/// An array whose member 1 was replaced while rows of the stripe were unreadable on as many others
/// that they are lost.
async fn with_bad_rows(
    reactor: &Reactor,
    unreadable: &Unreadable,
    (level, members, policy, others): (Level, usize, Policy, usize),
) -> Pair {
    let mut pair = Pair::new(reactor, level, members, 512).await;
    pair.array.set_policy(policy).await.unwrap();
    let all: Vec<u8> = (0..pair.bytes.len()).map(|at| (at / 512 % 251) as u8 + 1).collect();
    for (at, part) in all.chunks(1 << 18).enumerate() {
        pair.put(at << 18, part).await;
    }
    pair.array.flush().await.unwrap();
    pair.in_place().await;
    pair.array.pull_member(MemberIndex(1)).unwrap();
    pair.put(0, &[3; 512]).await;
    pair.in_place().await;
    let spoilt: Vec<usize> = [0, 2][..others].to_vec();
    for member in &spoilt {
        for row in [1024, 1536, 9 << 10] {
            spoil(&pair, unreadable, *member, STRIPE, row);
        }
        // Only one of the others lacks this: it is worked out.
        spoil(&pair, unreadable, *member, StripeIndex(9 + *member as u64), 512);
    }
    pair.replace(1).await;
    pair.rebuilt().await;
    assert_eq!(pair.array.state(), ArrayState::Optimal);
    let lost = if others == 1 { [STRIPE, StripeIndex(9)].to_vec() } else { vec![STRIPE] };
    let mut expected = Vec::new();
    for stripe in lost {
        for chunk in chunks(&pair, stripe, &[&[1], &spoilt[..]].concat()) {
            let rows: &[(usize, usize)] =
                if stripe == STRIPE { &[(1024, 2048), (9216, 9728)] } else { &[(512, 1024)] };
            let first = pair.array.layout().array_offset(stripe, chunk, 0) as usize;
            expected.extend(rows.iter().map(|(start, end)| first + start..first + end));
        }
    }
    if level == Level::Raid10 {
        // Members 0 and 1 are copies of one chunk.
        expected.retain(|bad| (bad.start >> 14).is_multiple_of(2));
    }
    assert_eq!(bad(&pair), expected, "{level:?} {policy:?}");
    pair
}

/// What `docs/FAULTS.md` says: sixteen, and only where others can stand for the drive.
#[test]
fn sixteen_errors_cost_a_member_that_can_be_replaced() {
    run(|reactor, unreadable| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        let all: Vec<u8> = (0..pair.bytes.len()).map(|at| (at / 512 % 251) as u8).collect();
        for (at, part) in all.chunks(1 << 20).enumerate() {
            pair.put(at << 20, part).await;
        }
        pair.array.flush().await.unwrap();
        pair.in_place().await;
        // What it failed for counts no more once it is tried again.
        for _ in 0..2 {
            let drive = drive_of(&pair, 1);
            for (before, at) in spoilt_places(&pair, &unreadable).into_iter().enumerate() {
                let (health, array) = match before {
                    0 => (HealthState::Healthy, ArrayState::Optimal),
                    1..16 => (HealthState::Suspect, ArrayState::Optimal),
                    16.. => (HealthState::Failed, ArrayState::Degraded),
                };
                assert_eq!((drive.health().state, pair.array.state()), (health, array));
                assert!(pair.read(at, 512).await.unwrap() == pair.bytes[at..at + 512]);
            }
            assert_eq!(
                (drive.health().state, drive.health().read_errors),
                (HealthState::Failed, 16)
            );
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            check(&pair, "without it").await;
            unreadable.clear();
            let again = vec![pair.plug_in(&drive)];
            pair.restart_with(AssembleOptions::default(), again).await;
            pair.rebuilt().await;
        }
        // Nobody else has what it has: it is used, however many there are.
        pair.array.pull_member(MemberIndex(3)).unwrap();
        for at in spoilt_places(&pair, &unreadable) {
            assert_eq!(pair.read(at, 512).await, Err(ArrayError::Lost));
        }
        assert_eq!(drive_of(&pair, 1).health().state, HealthState::Suspect);
        assert_eq!(pair.array.state(), ArrayState::Degraded);
        unreadable.clear();
        check(&pair, "with it alone").await;
        pair.array.stop().await.unwrap();
    });
}

/// Places of the array that cannot be read from the second member: a sector each of twenty stripes.
fn spoilt_places(pair: &Pair, unreadable: &Unreadable) -> Vec<usize> {
    let layout = pair.array.layout();
    let chunk = |stripe: &u64| chunks(pair, StripeIndex(*stripe), &[1]).pop_first();
    let stripes = (0..).filter_map(|stripe| Some((StripeIndex(stripe), chunk(&stripe)?)));
    let spoilt = stripes.take(20).map(|(stripe, chunk)| {
        spoil(pair, unreadable, 1, stripe, 1024);
        layout.array_offset(stripe, chunk, 1024) as usize
    });
    spoilt.collect()
}

/// A stripe of which this member has data, the chunk, and where that is.
fn data_of(pair: &Pair, member: usize) -> (StripeIndex, Range<usize>) {
    let its = |stripe: u64| chunks(pair, StripeIndex(stripe), &[member]).pop_first();
    let (stripe, chunk) =
        (4..).find_map(|stripe| Some((StripeIndex(stripe), its(stripe)?))).unwrap();
    let layout = pair.array.layout();
    let at = layout.array_offset(stripe, chunk, 0) as usize;
    (stripe, at..at + layout.chunk_bytes as usize)
}

/// Another drive shows something else in the place of what it was given. Without checksums nobody
/// notices, but what is worked out from it must not take the place of what is well.
#[test]
fn no_more_is_replaced_than_what_cannot_be_read() {
    run(|reactor, unreadable| async move {
        for (level, members) in [(Level::Raid5, 4), (Level::Raid6, 5)] {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.write_some(40).await;
            pair.put(0, &[5; 1 << 20]).await;
            pair.in_place().await;
            let (stripe, chunk) = data_of(&pair, 1);
            let layout = pair.array.layout();
            let data = label::plan(DRIVE_BYTES, layout.parity).unwrap().data.offset;
            let rotten = data + layout.member_offset(stripe, 4096);
            pair.file(&drive_of(&pair, 2)).write_all_at(&[77; 512], rotten).unwrap();
            spoil(&pair, &unreadable, 1, stripe, 1024);
            for _ in 0..2 {
                let read = pair.read(chunk.start, chunk.len()).await.unwrap();
                assert!(read == pair.bytes[chunk.clone()], "{level:?}");
                assert_eq!(unreadable.count(), 0, "{level:?}");
            }
        }
    });
}

/// Each drive has lost another row of a stripe: all of it can be had.
#[test]
fn rows_that_different_drives_have_lost_are_read() {
    run(|reactor, unreadable| async move {
        let kinds = [
            (Level::Raid1, 2, false),
            (Level::Raid5, 4, false),
            (Level::Raid6, 5, true),
            (Level::Raid10, 4, false),
        ];
        for (level, members, degraded) in kinds {
            for policy in [Policy::Bitmap, Policy::Journal] {
                let mut pair = Pair::new(&reactor, level, members, 512).await;
                pair.array.set_policy(policy).await.unwrap();
                pair.put(0, &[5; 1 << 20]).await;
                pair.write_some(40).await;
                pair.in_place().await;
                let (stripe, chunk) = data_of(&pair, 1);
                for member in 0..members {
                    if !degraded || member != 1 {
                        spoil(&pair, &unreadable, member, stripe, 1024 + 2048 * member as u32);
                    }
                }
                if degraded {
                    pair.array.pull_member(MemberIndex(1)).unwrap();
                }
                let read = pair.read(chunk.start, chunk.len()).await;
                assert!(read.unwrap() == pair.bytes[chunk.clone()], "{level:?} {policy:?}");
                let new = vec![6; 1024];
                pair.put(chunk.start + 1536, &new).await;
                check(&pair, "written").await;
                unreadable.clear();
            }
        }
    });
}

/// Also parity and second copies, which nobody reads while all is well.
#[test]
fn a_scrub_writes_anew_what_cannot_be_read() {
    run(|reactor, unreadable| async move {
        for (level, members, policy, _) in KINDS {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.array.set_policy(policy).await.unwrap();
            let all: Vec<u8> = (0..pair.bytes.len()).map(|at| (at / 512 % 251) as u8).collect();
            pair.put(0, &all).await;
            pair.in_place().await;
            for member in 0..members {
                // Each in a block of its own: the others tell what was there.
                spoil(&pair, &unreadable, member, STRIPE, member as u32 % 4 * 4096);
                spoil(&pair, &unreadable, member, StripeIndex(6 + member as u64), 512);
            }
            let before = unreadable.count();
            let report = scrubbed(&pair).await;
            let left = unreadable.count();
            // Where members beyond the parity have the same rows, nothing can be done.
            assert!(before == 2 * members && left <= members / 2, "{level:?}: {left}");
            assert_eq!(report.unreadable_stripes > 0, left > 0, "{level:?} {report:?}");
            // Each place is told, and whether it could be done.
            let (mended, lost): (Vec<&ScrubPlace>, Vec<&ScrubPlace>) =
                report.places.iter().partition(|its| its.repaired);
            assert!(report.places.iter().all(|its| its.flaw == Flaw::Unreadable), "{report:?}");
            assert_eq!((mended.len(), lost.len()), (before - left, left), "{level:?} {report:?}");
            assert!(report.damaged_stripes >= members as u64, "{level:?} {report:?}");
            assert_eq!(report.damaged_stripes, report.repaired_stripes, "{level:?} {report:?}");
            assert!(report.wrong_by_member.is_empty(), "they said that they cannot read");
            check(&pair, "scrubbed").await;
            unreadable.clear();
        }
    });
}

#[test]
fn a_rebuild_goes_on_past_what_is_lost() {
    run(|reactor, unreadable| async move {
        for kind in KINDS {
            let mut pair = with_bad_rows(&reactor, &unreadable, kind).await;
            check(&pair, "rebuilt").await;
            let report = scrubbed(&pair).await;
            assert_eq!(report.mismatched_stripes, 0);
            assert!(report.bad_stripes > 0);
            let known = bad(&pair);
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(bad(&pair), known);
            check(&pair, "started again").await;
            // What stands in place of the lost rows is what parity is of.
            for member in 0..kind.1 {
                pair.array.pull_member(MemberIndex(member as u8)).unwrap();
                check(&pair, "with a member missing").await;
                pair.put(1 << 20, &[member as u8 + 1; 512]).await;
                pair.replace(member as u8).await;
                pair.rebuilt().await;
                assert_eq!(bad(&pair), known, "a rebuild of member {member} keeps what is lost");
            }
            check(&pair, "with every member replaced").await;
            pair.crash_without(&[]).await;
            assert_eq!(bad(&pair), known);
            check(&pair, "after a crash").await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn what_is_written_again_is_good() {
    run(|reactor, unreadable| async move {
        for kind in KINDS {
            let mut pair = with_bad_rows(&reactor, &unreadable, kind).await;
            let known = bad(&pair);
            let Some(first) = known.first().cloned() else { continue };
            // A sector of a range of two.
            let rest = first.start + 512..first.end;
            let left = [&[rest][..], &known[1..]].concat();
            let left: Vec<_> = left.into_iter().filter(|bad| !bad.is_empty()).collect();
            pair.put(first.start, &[7; 512]).await;
            check_but(&pair, &left, "a sector is written, and may be in the journal").await;
            pair.crash_without(&[]).await;
            check_but(&pair, &left, "a sector is written, then a crash").await;
            pair.in_place().await;
            check_but(&pair, &left, "a sector is written, and in place").await;
            assert_eq!(bad(&pair), left, "{kind:?}");
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(bad(&pair), left);
            for range in &left {
                let zeroes = vec![0; range.len()];
                pair.bytes[range.clone()].copy_from_slice(&zeroes);
                pair.array.write_zeroes(range.start as u64, range.len() as u64).await.unwrap();
            }
            check_but(&pair, &[], "all is written again").await;
            pair.crash_without(&[]).await;
            check_but(&pair, &[], "all is written again, then a crash").await;
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(bad(&pair), []);
            assert_eq!(scrubbed(&pair).await.mismatched_stripes, 0);
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn what_is_discarded_is_not_bad() {
    run(|reactor, unreadable| async move {
        for kind in KINDS {
            let mut pair = with_bad_rows(&reactor, &unreadable, kind).await;
            assert_ne!(bad(&pair), []);
            // The region as a whole; then it is written again.
            let region = pair.array.region_bytes();
            let end = (2 * region).min(pair.bytes.len() as u64);
            pair.array.discard(0, end).await.unwrap();
            pair.bytes[..end as usize].fill(0);
            check(&pair, "discarded").await;
            pair.put(4096, &[5; 4096]).await;
            pair.crash_without(&[]).await;
            assert_eq!(bad(&pair), []);
            check(&pair, "discarded, written, then a crash").await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// Parity in doubt, and a member lost: as far as its blocks cannot be told they are given up.
#[test]
fn a_write_hole_does_not_stop_a_rebuild() {
    run(|reactor, _| async move {
        for policy in [Policy::Bitmap, Policy::None] {
            let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
            pair.array.set_policy(policy).await.unwrap();
            pair.write_some(60).await;
            pair.array.flush().await.unwrap();
            pair.crash_without(&[1]).await;
            assert!(pair.array.status().unsynced_stripes > 0);
            pair.replace(1).await;
            pair.rebuilt().await;
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            assert_eq!(pair.array.status().unsynced_stripes, 0);
            let lost = pair.array.status().bad;
            assert!(!lost.is_empty());
            for range in &lost {
                assert_eq!(range.rows, 0..16 << 10);
                assert_eq!(chunks(&pair, range.stripe, &[1]), [range.chunk].into());
            }
            check(&pair, "rebuilt").await;
            // The lost chunks are given up, and their stripes agree without them.
            pair.array.pull_member(MemberIndex(2)).unwrap();
            check(&pair, "with a member missing").await;
            pair.replace(2).await;
            pair.rebuilt().await;
            for range in bad(&pair) {
                let end = range.end.min(pair.bytes.len());
                if range.start < end {
                    pair.put(range.start, &vec![9; end - range.start]).await;
                }
            }
            pair.restart(AssembleOptions::default()).await;
            pair.check().await;
            assert_eq!(scrubbed(&pair).await.mismatched_stripes, 0);
            pair.array.stop().await.unwrap();
        }
    });
}

/// The rest of a sector of 4096 bytes is lost with it: a part of it cannot be written.
#[test]
fn parts_of_bad_sectors_cannot_be_written() {
    run(|reactor, unreadable| async move {
        for policy in [Policy::Journal, Policy::Bitmap] {
            let mut pair = Pair::new(&reactor, Level::Raid5, 3, 4096).await;
            pair.array.set_policy(policy).await.unwrap();
            pair.put(0, &[1; 1 << 18]).await;
            pair.in_place().await;
            pair.array.pull_member(MemberIndex(1)).unwrap();
            pair.put(0, &[2; 4096]).await;
            pair.in_place().await;
            spoil(&pair, &unreadable, 0, StripeIndex(2), 4096 + 512);
            pair.replace(1).await;
            pair.rebuilt().await;
            let known = bad(&pair);
            assert!(!known.is_empty() && known.iter().all(|range| range.len() == 4096));
            for range in known {
                let part = reactor.buffer(512);
                part.fill_zero();
                let written = pair.array.write(range.start as u64, part.into()).await;
                assert_eq!(written, Err(ArrayError::Bad));
                check(&pair, "refused").await;
                pair.put(range.start, &[4; 4096]).await;
                pair.in_place().await;
                check(&pair, "written").await;
            }
            pair.in_place().await;
            assert_eq!(bad(&pair), []);
            pair.array.stop().await.unwrap();
        }
    });
}

/// Where a row of a position of the stripe is unreadable, and what of it is written.
#[derive(Clone, Copy, Debug)]
struct Blind {
    is_member_missing: bool,
    /// Positions; member 1 is `MISSING`.
    unreadable: &'static [u8],
    written: u8,
    /// Of the rows, what is lost for good.
    lost: u8,
}

/// Of a stripe over 4 members whose second data chunk is on member 1.
const MISSING: u8 = 1;
const PARITY: u8 = 3;
const BLIND: [Blind; 5] = [
    Blind { is_member_missing: true, unreadable: &[0], written: 0, lost: MISSING },
    Blind { is_member_missing: true, unreadable: &[0], written: MISSING, lost: 0 },
    Blind { is_member_missing: true, unreadable: &[PARITY], written: 0, lost: MISSING },
    Blind { is_member_missing: false, unreadable: &[0, 2], written: 0, lost: 2 },
    Blind { is_member_missing: false, unreadable: &[0, PARITY], written: 2, lost: 0 },
];

/// Waits for what is pending, but not for ever: for so many looks, as all cases share a thread.
async fn soon_in_place(pair: &Pair, what: &str) {
    for _ in 0..2000 {
        if pair.array.status().journal.pending_bytes == 0 {
            return;
        }
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: something cannot be put in place");
}

/// Writes what waits in the journal while what its parity needs cannot be read. `crash`: then.
/// Returns what is lost.
async fn write_beside(
    pair: &mut Pair,
    unreadable: &Unreadable,
    blind: Blind,
    crash: bool,
) -> Range<usize> {
    let layout = pair.array.layout();
    let is_at = |stripe: &u64| layout.member_at(StripeIndex(*stripe), MISSING) == MemberIndex(1);
    let stripe = StripeIndex((5..).find(is_at).unwrap());
    for at in (0..pair.bytes.len()).step_by(1 << 18) {
        pair.put(at, &[1; 1 << 18]).await;
    }
    pair.in_place().await;
    if blind.is_member_missing {
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.put(0, &[2; 4096]).await;
        pair.in_place().await;
    }
    let row = 4096;
    for position in blind.unreadable {
        let member = layout.member_at(stripe, *position);
        for sector in 0..8 {
            spoil(pair, unreadable, member.index(), stripe, row + sector * 512);
        }
    }
    let at = |chunk| layout.array_offset(stripe, chunk, row) as usize;
    // In the same batches and after them, of the same stripe and of others.
    pair.put(layout.array_offset(stripe, 2, 0) as usize, &[3; 512]).await;
    pair.put(at(blind.written), &[4; 4096]).await;
    pair.put(at(blind.written) + 512, &[5; 1024]).await;
    if crash {
        let absent: &[usize] = if blind.is_member_missing { &[1] } else { &[] };
        pair.crash_without(absent).await;
    }
    at(blind.lost)..at(blind.lost) + 4096
}

/// What is acknowledged comes in place although what parity needs cannot be read; and the array
/// goes on. `crash`: before it is in place.
async fn write_blindly(mut pair: Pair, unreadable: &Unreadable, blind: Blind, crash: bool) {
    let what = format!("{blind:?}, crash: {crash}");
    let lost = write_beside(&mut pair, unreadable, blind, crash).await;
    for round in 0..4 {
        for at in (1 << 20..pair.bytes.len()).step_by(1 << 18) {
            pair.put(at, &[6 + round; 1 << 18]).await;
        }
    }
    soon_in_place(&pair, &what).await;
    assert_eq!(bad(&pair), std::slice::from_ref(&lost), "{what}");
    check(&pair, &what).await;
    pair.restart(AssembleOptions::default()).await;
    assert_eq!(bad(&pair), std::slice::from_ref(&lost), "{what}");
    check(&pair, &what).await;
    pair.crash_without(&[]).await;
    check(&pair, &what).await;
    if blind.is_member_missing {
        pair.replace(1).await;
        pair.rebuilt().await;
    }
    pair.put(lost.start, &[9; 4096]).await;
    soon_in_place(&pair, &what).await;
    check_but(&pair, &[], &what).await;
    assert_eq!(scrubbed(&pair).await.mismatched_stripes, 0, "{what}");
    pair.array.stop().await.unwrap();
}

#[test]
fn what_is_acknowledged_comes_in_place_beside_what_is_lost() {
    run(|reactor, unreadable| async move {
        let mut cases = Vec::new();
        for blind in BLIND {
            for crash in [false, true] {
                let pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
                cases.push(write_blindly(pair, &unreadable, blind, crash));
                let pair = Pair::checked(&reactor, Level::Raid5, 4, 512).await;
                cases.push(write_blindly(pair, &unreadable, blind, crash));
            }
        }
        // They wait most of the time.
        join_all(cases).await;
    });
}

/// A drive may never read again what it could not read once, whatever is written there.
#[test]
fn what_stays_unreadable_stops_no_rebuild() {
    run(|reactor, unreadable| async move {
        unreadable.stay.set(true);
        for kind in KINDS {
            let mut pair = with_bad_rows(&reactor, &unreadable, kind).await;
            let known = bad(&pair);
            check(&pair, "rebuilt").await;
            pair.array.pull_member(MemberIndex(1)).unwrap();
            pair.replace(1).await;
            pair.rebuilt().await;
            assert_eq!(bad(&pair), known, "it is given up once");
            pair.crash_without(&[]).await;
            check(&pair, "after a crash").await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// What waits in the journal for them is in place when the member that it lacked is rebuilt.
#[test]
fn what_waits_for_what_stays_unreadable_is_in_place_after_a_rebuild() {
    run(|reactor, unreadable| async move {
        unreadable.stay.set(true);
        for blind in BLIND.into_iter().filter(|blind| blind.is_member_missing) {
            for crash in [false, true] {
                let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
                let lost = write_beside(&mut pair, &unreadable, blind, crash).await;
                // Until there is no room for more.
                let same = pair.reactor.buffer(1 << 20);
                same.copy_from_slice(&pair.bytes[1 << 20..2 << 20]);
                let write = || pair.array.write(1 << 20, same.clone().into());
                while write().await.is_ok() {}
                pair.replace(1).await;
                pair.rebuilt().await;
                let what = format!("{blind:?}, crash: {crash}");
                soon_in_place(&pair, &what).await;
                assert_eq!(bad(&pair), [lost], "{what}");
                check(&pair, &what).await;
                pair.array.stop().await.unwrap();
            }
        }
    });
}

/// What cannot be put in place keeps the journal in use; who writes elsewhere does not hear of it.
#[test]
fn a_journal_that_cannot_be_ended_goes_on() {
    run(|reactor, unreadable| async move {
        unreadable.stay.set(true);
        let blind = BLIND.into_iter().find(|blind| blind.is_member_missing).unwrap();
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        write_beside(&mut pair, &unreadable, blind, false).await;
        assert!(pair.array.set_policy(Policy::None).await.is_err());
        pair.put(1 << 20, &[5; 4096]).await;
        pair.replace(1).await;
        pair.rebuilt().await;
        soon_in_place(&pair, "after the rebuild").await;
        pair.array.set_policy(Policy::None).await.unwrap();
        let before = pair.array.status().counters;
        pair.put(1 << 20, &[6; 4096]).await;
        let after = pair.array.status().counters;
        assert_eq!(after.journaled - before.journaled, 0, "it is written in place again");
        check(&pair, "in the end").await;
        pair.array.stop().await.unwrap();
    });
}

/// Many stripes are in the way of one batch: what the ring keeps free is enough for it.
#[test]
fn one_batch_of_many_stripes_comes_in_place_beside_what_is_lost() {
    const STRIPES: usize = 200;
    run(|reactor, unreadable| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        let layout = pair.array.layout();
        pair.bytes.resize(pair.array.capacity() as usize, 0);
        let pieces = pair.bytes.len() >> 18;
        for piece in 0..pieces {
            pair.put(piece << 18, &[1; 1 << 18]).await;
        }
        pair.in_place().await;
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.put(0, &[2; 4096]).await;
        pair.in_place().await;
        let chunk_of = |stripe| (0..3).find(|p| layout.member_at(stripe, *p).index() == 1);
        let with_lost = |stripe| chunk_of(stripe).map(|lost| (stripe, lost));
        let stripes: Vec<_> = (5..).map(StripeIndex).filter_map(with_lost).take(STRIPES).collect();
        let mut writes = Vec::new();
        for (stripe, lost) in &stripes {
            let chunk = (lost + 1) % 3;
            let member = layout.member_at(*stripe, chunk).index();
            spoil(&pair, &unreadable, member, *stripe, 4096);
            let at = layout.array_offset(*stripe, chunk, 4096) as usize;
            pair.bytes[at..at + 512].fill(3);
            let (array, from) = (pair.array.clone(), reactor.buffer(512));
            from.copy_from_slice(&[3; 512]);
            writes.push(async move { array.write(at as u64, from.into()).await });
        }
        assert!(join_all(writes).await.iter().all(Result::is_ok));
        let end = layout.array_offset(stripes[STRIPES - 1].0, 0, 0) as usize;
        for round in 0..40 {
            for piece in (end >> 18) + 1..pieces {
                pair.put(piece << 18, &[6 + round; 1 << 18]).await;
            }
        }
        soon_in_place(&pair, "many stripes").await;
        let lost = stripes.iter().map(|(at, lost)| layout.array_offset(*at, *lost, 4096) as usize);
        assert_eq!(bad(&pair), lost.map(|at| at..at + 512).collect::<Vec<_>>());
        check(&pair, "many stripes").await;
        pair.array.stop().await.unwrap();
    });
}

/// A drive that cannot read hundreds of sectors, while the array cannot do without it; more ranges
/// than the list has room for. The rebuild stops, and goes on once some are written again.
#[test]
fn a_full_list_stops_the_rebuild() {
    run(|reactor, unreadable| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        for at in (0..pair.bytes.len()).step_by(1 << 18) {
            pair.put(at, &[1; 1 << 18]).await;
        }
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.put(0, &[2; 512]).await;
        // Three sectors of four.
        for stripe in (10..200).map(StripeIndex) {
            for row in (0..16 << 10).step_by(512).filter(|row| row % 2048 < 1536) {
                spoil(&pair, &unreadable, 0, stripe, row);
            }
        }
        pair.replace(1).await;
        pair.rebuild_ends().await;
        let error = pair.array.status().rebuild_error.unwrap();
        assert!(error.contains(&ArrayError::TooManyBad.to_string()), "{error}");
        let known = bad(&pair);
        assert!(known.len() > 1100, "{}", known.len());
        // What leaves two parts of a range is refused while the list is almost full.
        let mut parted = 0;
        for range in &known {
            let sector = reactor.buffer(512);
            sector.copy_from_slice(&[3; 512]);
            let middle = range.start + 512;
            match pair.array.write(middle as u64, sector.into()).await {
                Ok(()) => pair.bytes[middle..middle + 512].fill(3),
                Err(error) => {
                    assert_eq!(error, ArrayError::TooManyBad);
                    break;
                }
            }
            parted += 1;
        }
        assert!(parted < known.len());
        assert_eq!(bad(&pair).len(), known.len() + parted);
        pair.put(known[parted].start, &[4; 1536]).await;
        for at in (1 << 18..3 << 20).step_by(1 << 18) {
            pair.put(at, &[5; 1 << 18]).await;
        }
        pair.array.rebuild(|| [66; 16]).await.unwrap();
        pair.rebuilt().await;
        assert_eq!(pair.array.state(), ArrayState::Optimal);
        check(&pair, "rebuilt").await;
        pair.restart(AssembleOptions::default()).await;
        check(&pair, "started again").await;
        pair.array.stop().await.unwrap();
    });
}
