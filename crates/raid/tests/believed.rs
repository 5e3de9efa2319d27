//! Goal: what a start believes is so: of drives that lost their cache by themselves, of drives that
//! hold a copy of before, and of parity that a scrub made anew.
//! Method: a daemon that dies at that moment, on files in memory whose bytes are put back or
//! changed behind its back.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::lease::Lease;
use ashlar_format::record;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::label;
use ashlar_raid::lease::Host;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::{ScrubReport, ScrubState};
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, run, run_on};
use crate::steered::{Fate, Steer, is_write, offset};

const STRIPES: u64 = 8;

/// Its first stripes are written, and in place.
async fn written(reactor: &Reactor, level: Level, members: usize, policy: Policy) -> Pair {
    let spec = ArraySpec { policy: Some(policy), ..Pair::spec(level) };
    let mut pair = Pair::made(reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
    let bytes = (STRIPES * pair.array.stripe_bytes()) as usize;
    pair.put(0, &vec![1; bytes]).await;
    pair.in_place().await;
    pair.array.flush().await.unwrap();
    pair
}

/// Where a stripe begins on the drive of each member.
fn place(pair: &Pair, stripe: u64) -> u64 {
    let layout = pair.array.layout();
    let data = label::plan(DRIVE_BYTES, layout.parity).unwrap().data.offset;
    data + layout.member_offset(StripeIndex(stripe), 0)
}

/// No write came after that would have told that it missed something.
#[test]
fn a_drive_that_lost_its_cache_by_itself_is_not() {
    run(|reactor| async move {
        for (level, members) in [(Level::Raid1, 2), (Level::Raid10, 4)] {
            let mut pair = written(&reactor, level, members, Policy::Bitmap).await;
            let all = pair.drives();
            let layout = pair.array.layout();
            let first = layout.member_at(StripeIndex(0), 0);
            let lost = &all[first.index()];
            let at = place(&pair, 0);
            let mut before = [0; 4096];
            pair.file(lost).read_exact_at(&mut before, at).unwrap();
            pair.put(0, &[2; 4096]).await;
            let generation = pair.array.status().generation;
            lost.pull();
            // Durably: until then a crash forgets it.
            let is_fenced = || {
                let status = pair.array.status();
                let is_stale = status.members[first.index()].state != MemberState::Trusted;
                is_stale && status.generation > generation
            };
            for _ in 0..200 {
                if is_fenced() {
                    break;
                }
                reactor.sleep(Duration::from_millis(10)).await;
            }
            // What was in it, as it had no power for a moment.
            pair.file(lost).write_all_at(&before, at).unwrap();
            pair.starts_with(&all.iter().collect::<Vec<_>>()).await;
            pair.check().await;
            pair.rebuilt().await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

async fn scrubbed(pair: &Pair) -> ScrubReport {
    pair.array.start_scrub(true).unwrap();
    loop {
        pair.reactor.sleep(Duration::from_millis(1)).await;
        if let ScrubState::Finished { report } = pair.array.status().scrub {
            return report;
        }
    }
}

/// The sums of what stood there are in the journal: a start would find no parity that fits them.
#[test]
fn parity_is_not_made_anew_under_the_journal() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = written(&reactor, Level::Raid5, 5, Policy::Journal).await;
        let all = pair.drives();
        // The oldest batch is put in place by nobody: what is after it stays in the journal.
        let held = place(&pair, 5)..place(&pair, 6);
        let in_it = move |op: &_| offset(op).is_some_and(|at| held.contains(&at));
        steer.set(move |_, op| if is_write(op) && in_it(op) { Fate::Waits } else { Fate::Passes });
        pair.put((5 * pair.array.stripe_bytes()) as usize, &[3; 4096]).await;
        let destage = |pair: &Pair| {
            let array = pair.array.clone();
            pair.reactor.spawn(async move {
                let _ = array.destage_all().await;
            });
        };
        destage(&pair);
        steer.caught(&reactor, 1).await;
        pair.put(0, &[4; 4096]).await;
        destage(&pair);
        while pair.array.status().journal.pending_bytes > 4096 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        // Another chunk of its stripe rots.
        let wrong = pair.array.layout().member_at(StripeIndex(0), 2);
        pair.file(&all[wrong.index()]).write_all_at(&[5; 4096], place(&pair, 0)).unwrap();
        pair.array.start_scrub(true).unwrap();
        for _ in 0..100 {
            reactor.sleep(Duration::from_millis(5)).await;
        }
        assert!(matches!(pair.array.status().scrub, ScrubState::Running { .. }));
        pair.dies();
        steer.drop_waiting(&reactor).await;
        pair.starts_with(&all.iter().collect::<Vec<_>>()).await;
        assert!(pair.read(0, 4096).await.unwrap() == [4; 4096]);
        // Once nothing of it is in the journal, it is.
        let report = scrubbed(&pair).await;
        assert_eq!((report.mismatched_stripes, report.repaired_stripes), (1, 1), "{report:?}");
        pair.scrub_is_clean().await;
        assert!(
            pair.read(5 * pair.array.stripe_bytes() as usize, 4096).await.unwrap() == [3; 4096]
        );
        pair.array.stop().await.unwrap();
    });
}

fn bytes_of(pair: &Pair, drive: &Rc<Drive>) -> Vec<u8> {
    let mut bytes = vec![0; DRIVE_BYTES as usize];
    pair.file(drive).read_exact_at(&mut bytes, 0).unwrap();
    bytes
}

fn state(pair: &Pair, member: usize) -> MemberState {
    pair.array.status().members[member].state
}

/// Copies of some drives, and more that was written after a start that came later.
async fn written_on(pair: &mut Pair, copied: &[usize], stops: bool) -> Vec<Vec<u8>> {
    pair.array.stop().await.unwrap();
    let drives = pair.drives();
    let copies = copied.iter().map(|index| bytes_of(pair, &drives[*index])).collect();
    pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
    pair.write_some(40).await;
    pair.in_place().await;
    if stops {
        pair.array.stop().await.unwrap();
    }
    copies
}

/// A backup that was put back, or a snapshot of it that was rolled back.
#[test]
fn a_copy_of_before_is_not() {
    let kinds = [
        (Level::Raid1, 2, Policy::Bitmap, false),
        (Level::Raid10, 4, Policy::Journal, false),
        (Level::Raid5, 4, Policy::Bitmap, false),
        (Level::Raid5, 4, Policy::Journal, true),
        (Level::Raid6, 5, Policy::Journal, false),
        (Level::Raid6, 5, Policy::None, false),
    ];
    for (level, members, policy, integrity) in kinds {
        // Without a journal, a crash and a member less leave errors where parity was being written.
        let is_covered = policy == Policy::Journal || level.is_mirrored();
        for stops in [true, false].into_iter().filter(|stops| *stops || is_covered) {
            run(move |reactor| async move {
                let spec = ArraySpec { policy: Some(policy), integrity, ..Pair::spec(level) };
                let mut pair = Pair::made(&reactor, &spec, &vec![DRIVE_BYTES; members], 512).await;
                pair.write_some(40).await;
                let copies = written_on(&mut pair, &[1], stops).await;
                let drives = pair.drives();
                pair.dies();
                pair.file(&drives[1]).write_all_at(&copies[0], 0).unwrap();
                pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
                assert_eq!(state(&pair, 1), MemberState::Stale, "{level:?} {policy:?} {stops}");
                pair.check().await;
                pair.array.rebuild(|| [77; 16]).await.unwrap();
                pair.rebuilt().await;
                assert_eq!(state(&pair, 1), MemberState::Trusted);
                pair.check().await;
                pair.scrub_is_clean().await;
                pair.array.stop().await.unwrap();
            });
        }
    }
}

/// What a tool that mistakes a drive for an empty one leaves of its beginning.
#[derive(Clone, Copy, Debug)]
enum Left {
    /// All but the last MiB is this byte.
    All(u8),
    /// All up to the superblocks, and data: a boot loader, and a partition behind it.
    BetweenLabelsAndData,
    /// The beginning of another drive of an array, a sector too far.
    Another,
}

fn write_over(pair: &Pair, drive: &Rc<Drive>, what: Left) {
    let file = pair.file(drive);
    let areas = label::plan(DRIVE_BYTES, 0).unwrap();
    let write = |at: u64, byte: u8, len: u64| {
        file.write_all_at(&vec![byte; len as usize], at).unwrap();
    };
    match what {
        Left::All(byte) => write(0, byte, DRIVE_BYTES - (1 << 20)),
        Left::BetweenLabelsAndData => {
            write(0, 0x90, areas.superblocks.offset);
            write(areas.data.offset, 0x91, DRIVE_BYTES - (1 << 20) - areas.data.offset);
        }
        Left::Another => {
            let all = bytes_of(pair, drive);
            let end = all.len() - (1 << 20);
            file.write_all_at(&all[..end], 512).unwrap();
            write(0, 0, 512);
        }
    }
}

/// By an aborted copy to it, or a tool that mistook it.
#[test]
fn one_whose_beginning_was_written_over_is_not() {
    let (mirror, parity) = (Policy::Bitmap, Policy::Journal);
    let kinds = [(Level::Raid1, 2, mirror), (Level::Raid5, 4, parity), (Level::Raid6, 5, parity)];
    let all = [Left::All(0), Left::All(0xa5), Left::BetweenLabelsAndData, Left::Another];
    for (level, members, policy) in kinds {
        for (what, stops) in all.into_iter().flat_map(|what| [(what, true), (what, false)]) {
            run(move |reactor| async move {
                let mut pair = written(&reactor, level, members, policy).await;
                if stops {
                    pair.array.stop().await.unwrap();
                }
                let (drives, known) = (pair.drives(), pair.known());
                pair.dies();
                write_over(&pair, &drives[1], what);
                let options = AssembleOptions { known, ..AssembleOptions::default() };
                if level != Level::Raid6 {
                    let left: Vec<_> = drives.iter().skip(1).collect();
                    let refused = pair.start(&left, options.clone()).await.unwrap_err();
                    let is_told = matches!(refused, AssembleError::WrittenOver { .. })
                        || level == Level::Raid1 && refused == AssembleError::NoSuperblock;
                    assert!(is_told, "{level:?} {what:?}: {refused:?}");
                }
                pair.start(&drives.iter().collect::<Vec<_>>(), options).await.unwrap();
                assert_eq!(state(&pair, 1), MemberState::Stale, "{level:?} {what:?} {stops}");
                pair.check().await;
                pair.array.rebuild(|| [77; 16]).await.unwrap();
                pair.rebuilt().await;
                pair.is_whole().await;
            });
        }
    }
}

/// They alone knew that they went on without the first ones, which are old.
#[test]
fn who_went_on_and_says_nothing_any_more_counts_as_absent() {
    let levels = [(Level::Raid1, 2), (Level::Raid6, 4)];
    let damages = [Left::All(0), Left::Another];
    let cases = levels.into_iter().flat_map(|its| damages.map(|what| (its, what)));
    for ((level, members), what) in cases {
        run(move |reactor| async move {
            let mut pair = written(&reactor, level, members, Policy::Bitmap).await;
            let (drives, half) = (pair.drives(), members / 2);
            for member in 0..half {
                pair.array.pull_member(MemberIndex::new(member)).unwrap();
            }
            pair.write_some(20).await;
            pair.array.stop().await.unwrap();
            let known = pair.known();
            pair.dies();
            drives.iter().skip(half).for_each(|drive| write_over(&pair, drive, what));
            let all: Vec<_> = drives.iter().collect();
            let refused = pair.start(&all, AssembleOptions::default()).await.unwrap_err();
            let is_told = matches!(refused, AssembleError::Silent { .. });
            assert!(is_told, "{level:?} {what:?}: {refused:?}");
            // Nor by who remembers that those that are left were not current.
            let here = AssembleOptions { known, ..AssembleOptions::default() };
            let refused = pair.start(&all, here).await.unwrap_err();
            let is_told = matches!(refused, AssembleError::Silent { .. } | AssembleError::MaybeOld);
            assert!(is_told, "{level:?} {what:?}: {refused:?}");
            // Whoever accepts that has what they hold.
            let forced = AssembleOptions { force: true, ..AssembleOptions::default() };
            pair.start(&all, forced).await.unwrap();
            assert_eq!(state(&pair, 0), MemberState::Trusted, "{level:?}");
            pair.array.stop().await.unwrap();
        });
    }
}

/// Of one set all is lost, and what stands there is read by force: not so in the other.
#[test]
fn force_reads_no_more_of_what_was_written_over_than_it_has_to() {
    run(|reactor| async move {
        let mut pair = written(&reactor, Level::Raid10, 4, Policy::Bitmap).await;
        pair.array.stop().await.unwrap();
        let drives = pair.drives();
        pair.dies();
        for member in [0, 1, 2] {
            write_over(&pair, &drives[member], Left::BetweenLabelsAndData);
        }
        let all: Vec<_> = drives.iter().collect();
        let refused = pair.start(&all, AssembleOptions::default()).await.unwrap_err();
        assert!(matches!(refused, AssembleError::WrittenOver { .. }), "{refused:?}");
        let forced = AssembleOptions { force: true, ..AssembleOptions::default() };
        pair.start(&all, forced).await.unwrap();
        let states = [0, 1, 2, 3].map(|member| state(&pair, member));
        let trusted = MemberState::Trusted;
        assert_eq!(states, [trusted, trusted, MemberState::Stale, trusted]);
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn copies_that_the_others_cannot_stand_for_are_refused() {
    run(|reactor| async move {
        let mut pair = written(&reactor, Level::Raid5, 4, Policy::Journal).await;
        let copies = written_on(&mut pair, &[1, 3], true).await;
        let drives = pair.drives();
        for (index, copy) in [1, 3].iter().zip(&copies) {
            pair.file(&drives[*index]).write_all_at(copy, 0).unwrap();
        }
        let before: Vec<_> = drives.iter().map(|drive| bytes_of(&pair, drive)).collect();
        let offered = |pair: &mut Pair| drives.iter().map(|its| pair.plug_in(its)).collect();
        let options = AssembleOptions::default();
        let refused = Array::assemble(&reactor, offered(&mut pair), options.clone()).await.err();
        let drive = drives[1].name().to_owned();
        let why = AssembleError::CopyOfBefore { drive, member: MemberIndex(1) };
        assert_eq!(refused, Some(why));
        for (drive, before) in drives.iter().zip(&before) {
            assert!(bytes_of(&pair, drive) == *before, "{} was written to", drive.name());
        }
        let options = AssembleOptions { force: true, ..options };
        pair.array = Array::assemble(&reactor, offered(&mut pair), options).await.unwrap();
        pair.array.stop().await.unwrap();
    });
}

/// It was made, and started for the first time, after the copy.
#[test]
fn a_copy_of_a_new_array_is_not() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 4, 512).await;
        let drives = pair.drives();
        let copy = bytes_of(&pair, &drives[2]);
        pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
        pair.write_some(40).await;
        pair.array.stop().await.unwrap();
        let drives = pair.drives();
        pair.file(&drives[2]).write_all_at(&copy, 0).unwrap();
        pair.starts_with(&drives.iter().collect::<Vec<_>>()).await;
        assert_eq!(state(&pair, 2), MemberState::Stale);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// Another host may find nothing but it.
#[test]
fn a_member_has_the_lease_before_it_is_relied_on() {
    run(|reactor| async move {
        let host = Some(Host::new([7; 16], "here"));
        let spec = ArraySpec { host, ..Pair::spec(Level::Raid1) };
        let mut pair = Pair::made(&reactor, &spec, &[DRIVE_BYTES; 2], 512).await;
        pair.array.pull_member(MemberIndex(1)).unwrap();
        pair.replace(1).await;
        // Before the next beat, most likely.
        pair.rebuilt().await;
        let member = pair.array.status().members[1].clone();
        let file = pair.file(member.drive.as_ref().unwrap());
        let area = label::plan(DRIVE_BYTES, 0).unwrap().lease;
        let is_here = (0..area.len / Lease::BYTES).any(|slot| {
            let (home, mut bytes) = (area.offset + slot * Lease::BYTES, vec![0; 4096]);
            file.read_exact_at(&mut bytes, home).unwrap();
            record::open::<Lease>(&bytes, Some(member.drive_uuid), home).is_ok()
        });
        assert!(is_here, "nobody would know whose the array is");
        pair.array.stop().await.unwrap();
    });
}
