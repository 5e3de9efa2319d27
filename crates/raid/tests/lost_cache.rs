//! Goal: a drive that fails to flush is fenced, and nothing that it shows afterwards is believed;
//! the array goes on, and takes it back.
//! Method: flushes of one file in memory fail as the test says; then its bytes are what they were
//! before the writes that were not flushed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_drive::health::HealthState;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{Begun, DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const LEN: usize = 16 << 10;

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

/// Its first stripes are written, and in place.
async fn array(reactor: &Reactor, level: Level, members: usize, policy: Policy) -> Pair {
    let mut pair = Pair::new(reactor, level, members, 512).await;
    pair.array.set_policy(policy).await.unwrap();
    pair.put(0, &vec![1; 8 * pair.array.stripe_bytes() as usize]).await;
    pair.in_place().await;
    pair.array.flush().await.unwrap();
    pair
}

/// The drive with the first block, and where that is.
fn first(pair: &Pair) -> (usize, Rc<Drive>, u64) {
    let layout = pair.array.layout();
    let index = layout.member_at(StripeIndex(0), 0).index();
    let data = label::plan(DRIVE_BYTES, layout.parity).unwrap().data.offset;
    let drive = pair.array.status().members[index].drive.clone().unwrap();
    (index, drive, data + layout.member_offset(StripeIndex(0), 0))
}

/// Reads of the first bytes; what they return.
fn begin_reads(pair: &Pair, count: usize) -> Vec<Begun<Vec<u8>>> {
    let read = |_| {
        let (array, into) = (pair.array.clone(), pair.reactor.buffer(LEN));
        begin(&pair.reactor, async move {
            array.read(0, into.clone().into()).await.unwrap();
            into.bytes().to_vec()
        })
    };
    (0..count).map(read).collect()
}

fn is_flush(op: &Op) -> bool {
    matches!(op, Op::Flush { .. })
}

/// How flushes of one file end; those of others wait.
fn flushes(steer: &Steer, file: usize, fate: Fate, others: Fate) {
    steer.set(move |its, op| match is_flush(op) {
        true if its == file => fate,
        true => others,
        false => Fate::Passes,
    });
}

/// Whether the others hold it is known once their own flushes have ended: until then nobody reads.
#[test]
fn what_it_shows_is_not_read() {
    run(|reactor, steer| async move {
        for (level, members) in [(Level::Raid5, 3), (Level::Raid6, 4), (Level::Raid10, 4)] {
            let mut pair = array(&reactor, level, members, Policy::Bitmap).await;
            let (index, drive, at) = first(&pair);
            pair.put(0, &[2; LEN]).await;
            flushes(&steer, address(pair.file(&drive)), Fate::Fails, Fate::Waits);
            let array = pair.array.clone();
            let flush = begin(&reactor, async move { array.flush().await });
            steer.caught(&reactor, 1).await;
            pair.file(&drive).write_all_at(&[1; LEN], at).unwrap();
            let reads = begin_reads(&pair, 8);
            assert!(!flush.has_ended());
            steer.set(|_, _| Fate::Passes);
            for read in reads {
                assert!(read.ended(&reactor).await == [2; LEN], "{level:?}");
            }
            flush.ended(&reactor).await.unwrap();
            assert_eq!(pair.array.status().members[index].state, MemberState::Stale);
            is_whole_again(&mut pair, index, &drive).await;
        }
    });
}

/// The same of reads that were under way when the flush failed.
#[test]
fn what_was_read_meanwhile_is_read_again() {
    run(|reactor, steer| async move {
        for (level, members) in [(Level::Raid5, 3), (Level::Raid6, 4), (Level::Raid10, 4)] {
            let mut pair = array(&reactor, level, members, Policy::Bitmap).await;
            let (index, drive, at) = first(&pair);
            let file = address(pair.file(&drive));
            pair.put(0, &[2; LEN]).await;
            let fates = move |reads: Fate, flush: Fate, others: Fate| {
                move |its: usize, op: &Op| match op {
                    Op::Read { .. } if its == file => reads,
                    Op::Flush { .. } if its == file => flush,
                    Op::Flush { .. } => others,
                    Op::Read { .. }
                    | Op::Write { .. }
                    | Op::WriteZeroes { .. }
                    | Op::Descriptor { .. } => Fate::Passes,
                }
            };
            steer.set(fates(Fate::Waits, Fate::Waits, Fate::Waits));
            let reads = begin_reads(&pair, 4);
            steer.caught(&reactor, 1).await;
            reactor.sleep(Duration::from_millis(20)).await;
            let array = pair.array.clone();
            let flush = begin(&reactor, async move { array.flush().await });
            while !drive.is_flushing() {
                reactor.sleep(Duration::from_millis(1)).await;
            }
            steer.set(fates(Fate::Waits, Fate::Fails, Fate::Waits));
            while !drive.has_failed_flush() {
                reactor.sleep(Duration::from_millis(1)).await;
            }
            pair.file(&drive).write_all_at(&[1; LEN], at).unwrap();
            steer.set(fates(Fate::Passes, Fate::Fails, Fate::Waits));
            reactor.sleep(Duration::from_millis(20)).await;
            steer.set(|_, _| Fate::Passes);
            for read in reads {
                assert!(read.ended(&reactor).await == [2; LEN], "{level:?}");
            }
            flush.ended(&reactor).await.unwrap();
            is_whole_again(&mut pair, index, &drive).await;
        }
    });
}

/// One copy is written, and nobody has heard of it, when its drive goes and comes back without it.
#[test]
fn what_nobody_had_heard_of_is_not_taken_for_kept() {
    for (goes, policy) in [0, 1]
        .into_iter()
        .flat_map(|its| [Policy::None, Policy::Bitmap, Policy::Journal].map(|policy| (its, policy)))
    {
        run(move |reactor, steer| async move {
            let mut pair = array(&reactor, Level::Raid1, 2, policy).await;
            let drives = pair.drives();
            let other = address(pair.file(&drives[1 - goes]));
            let at = label::plan(DRIVE_BYTES, 0).unwrap().data.offset;
            steer.set(move |its, op| match offset(op) {
                Some(place) if is_write(op) && its == other && place >= at => Fate::Waits,
                _ => Fate::Passes,
            });
            pair.bytes[..LEN].fill(2);
            let (array, from) = (pair.array.clone(), reactor.buffer(LEN));
            from.copy_from_slice(&[2; LEN]);
            let written = begin(&reactor, async move { array.write(0, from.into()).await });
            steer.caught(&reactor, 1).await;
            reactor.sleep(Duration::from_millis(20)).await;
            pair.array.pull_member(MemberIndex::new(goes)).unwrap();
            pair.file(&drives[goes]).write_all_at(&[1; LEN], at).unwrap();
            let (array, drive) = (pair.array.clone(), pair.plug_in(&drives[goes]));
            let member = MemberIndex::new(goes);
            let back =
                begin(&reactor, async move { array.replace_member(member, drive, [77; 16]).await });
            reactor.sleep(Duration::from_millis(50)).await;
            steer.set(|_, _| Fate::Passes);
            written.ended(&reactor).await.unwrap();
            let back = back.ended(&reactor).await;
            pair.in_place().await;
            if back.is_err() || !pair.drives()[goes].is_alive() {
                let drive = pair.plug_in(&drives[goes]);
                pair.array.replace_member(member, drive, [78; 16]).await.unwrap();
            }
            if pair.array.state() != ArrayState::Optimal {
                pair.array.rebuild(|| [79; 16]).await.unwrap();
            }
            pair.rebuilt().await;
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        });
    }
}

/// Neither is given up on the word of the other, nor fenced for it: what was flushed before is
/// read, and the next start believes both.
#[test]
fn two_that_fail_together_are_kept() {
    for first_to_fail in [0, 1] {
        run(async move |reactor, steer| {
            let mut pair = array(&reactor, Level::Raid5, 4, Policy::Bitmap).await;
            pair.put(0, &[2; LEN]).await;
            pair.put(LEN, &[3; LEN]).await;
            let drives = pair.drives();
            let layout = pair.array.layout();
            let both = [0, 1].map(|chunk| layout.member_at(StripeIndex(0), chunk).index());
            let files = both.map(|index| address(pair.file(&drives[index])));
            let is_late = move |file: usize| file == files[1 - first_to_fail];
            steer.set(move |file, op| match is_flush(op) && files.contains(&file) {
                true if is_late(file) => Fate::Waits,
                true => Fate::Fails,
                false => Fate::Passes,
            });
            let array = pair.array.clone();
            let flush = begin(&reactor, async move { array.flush().await });
            steer.caught(&reactor, 1).await;
            steer.set(move |file, op| match is_flush(op) && files.contains(&file) {
                true => Fate::Fails,
                false => Fate::Passes,
            });
            assert_eq!(flush.ended(&reactor).await, Err(ArrayError::Lost));
            pair.check().await;
            let states = pair.array.status().members;
            assert!(states.iter().all(|its| its.state == MemberState::Trusted));
            assert!(drives.iter().all(|drive| drive.health().state != HealthState::Failed));
            // The next one of them that goes is not fenced on the other's word.
            drives[both[0]].pull();
            reactor.sleep(Duration::from_secs(3)).await;
            assert_eq!(pair.array.status().members[both[0]].state, MemberState::Trusted);
            steer.set(|_, _| Fate::Passes);
            pair.dies();
            pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.check().await;
        });
    }
}

/// What is to be put in place is recorded again with each try, and none of that stays in the ring.
#[test]
fn what_cannot_be_made_durable_does_not_fill_the_ring() {
    run(|reactor, steer| async move {
        for (level, members) in [(Level::Raid5, 4), (Level::Raid7, 6)] {
            let mut pair = array(&reactor, level, members, Policy::Journal).await;
            pair.put(0, &[2; 4096]).await;
            pair.array.flush().await.unwrap();
            pair.put(LEN, &[3; LEN]).await;
            let drives = pair.drives();
            let lost = usize::from(pair.array.layout().parity) + 1;
            let files: Vec<usize> =
                drives[..lost].iter().map(|drive| address(pair.file(drive))).collect();
            let fail = move |last: Fate| {
                let files = files.clone();
                move |file: usize, op: &Op| match files.iter().position(|its| *its == file) {
                    Some(0) if is_flush(op) => last,
                    Some(_) if is_flush(op) => Fate::Fails,
                    Some(_) | None => Fate::Passes,
                }
            };
            // They fail together: one by one they would be fenced.
            steer.set(fail(Fate::Waits));
            let array = pair.array.clone();
            let flush = begin(&reactor, async move { array.flush().await });
            steer.caught(&reactor, 1).await;
            steer.set(fail(Fate::Fails));
            assert_eq!(flush.ended(&reactor).await, Err(ArrayError::Lost));
            let used = || pair.array.status().journal.used_bytes;
            let before = used();
            for _ in 0..20 {
                assert_eq!(pair.array.destage_all().await, Err(ArrayError::Lost));
            }
            assert!(used() < before + (64 << 10), "{} of {before}", used());
            steer.set(|_, _| Fate::Passes);
            pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
            pair.is_whole().await;
        }
    });
}

/// No space for what was written before is no full file system: the drive lost it.
#[test]
fn a_flush_without_space_costs_its_drive_and_not_the_array() {
    run(|reactor, steer| async move {
        for policy in [Policy::Journal, Policy::Bitmap] {
            let mut pair = array(&reactor, Level::Raid5, 3, policy).await;
            let (index, drive, _) = first(&pair);
            flushes(&steer, address(pair.file(&drive)), Fate::Full, Fate::Passes);
            // A superblock that the drive cannot flush, and nobody has to do without.
            pair.array.set_settings(SettingsChange::default()).await.unwrap();
            pair.put(0, &[2; LEN]).await;
            pair.array.flush().await.unwrap();
            steer.set(|_, _| Fate::Passes);
            pair.write_some(20).await;
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            is_whole_again(&mut pair, index, &drive).await;
        }
    });
}

async fn is_whole_again(pair: &mut Pair, index: usize, drive: &Rc<Drive>) {
    let drive = pair.plug_in(drive);
    pair.array.replace_member(MemberIndex::new(index), drive, [77; 16]).await.unwrap();
    pair.rebuilt().await;
    assert_eq!(pair.array.state(), ArrayState::Optimal);
    pair.check().await;
    pair.scrub_is_clean().await;
    pair.array.stop().await.unwrap();
}
