//! Goal: a scrub finds what does not agree, names who is wrong where that can be told, mends that,
//! and nothing else unasked; it begins by itself, can be stopped, and goes on after a restart.
//! Method: bytes are changed on drives behind the array's back; modelled drives for what takes
//! time.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::label;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::{Flaw, SCRUB_PLACES_MAX, ScrubPlace, ScrubReport, ScrubState};
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, run};

/// Changes bytes of one chunk on its drive.
async fn lie(pair: &Pair, stripe: u64, position: u8, row: u32, bytes: usize) {
    let layout = pair.array.layout();
    let member = layout.member_at(StripeIndex(stripe), position);
    let drive = pair.array.status().members[member.index()].drive.clone().unwrap();
    let base = label::plan(DRIVE_BYTES, layout.parity).unwrap().data.offset;
    let at = base + layout.member_offset(StripeIndex(stripe), row);
    let buffer = pair.reactor.buffer(bytes);
    drive.read(at, buffer.clone().into()).await.unwrap();
    let changed: Vec<u8> = buffer.bytes().iter().map(|byte| byte ^ 0x5a).collect();
    buffer.copy_from_slice(&changed);
    drive.write(at, buffer.into()).await.unwrap();
}

async fn ended(reactor: &Reactor, array: &Rc<Array>) -> ScrubReport {
    loop {
        match array.status().scrub {
            ScrubState::Finished { report } | ScrubState::Stopped { report } => return report,
            ScrubState::Running { .. } | ScrubState::Never => {
                reactor.sleep(Duration::from_millis(1)).await;
            }
        }
    }
}

async fn scrub(pair: &Pair, repair: bool) -> ScrubReport {
    pair.array.start_scrub(repair).unwrap();
    ended(&pair.reactor, &pair.array).await
}

/// Every stripe that is looked at is written.
async fn written(reactor: &Reactor, level: Level, members: usize) -> Pair {
    let mut pair = Pair::new(reactor, level, members, 512).await;
    for at in (0..pair.bytes.len()).step_by(1 << 18) {
        let bytes: Vec<u8> = (0..1 << 18).map(|i| (i / 512 + at / 777) as u8).collect();
        pair.put(at, &bytes).await;
    }
    pair.in_place().await;
    pair
}

#[test]
fn who_lies_alone_is_named_and_mended() {
    run(|reactor| async move {
        let kinds = [(Level::Raid6, 6), (Level::Raid60, 8), (Level::Raid7, 5), (Level::Raid1, 3)];
        for (level, members) in kinds {
            let mut pair = written(&reactor, level, members).await;
            let layout = pair.array.layout();
            let (mut places, mut wrong) = (Vec::new(), BTreeMap::new());
            for position in 0..layout.positions() {
                let stripe = u64::from(position);
                lie(&pair, stripe, position, 1024, 512).await;
                let member = layout.member_at(StripeIndex(stripe), position);
                *wrong.entry(member).or_insert(0u64) += 1;
                let chunk = u64::from(layout.chunk_bytes) * u64::from(position / layout.copies);
                let first = stripe * layout.stripe_bytes();
                let (offset, len) = if position < layout.data * layout.copies {
                    (first + chunk + 1024, 512)
                } else {
                    (first, layout.stripe_bytes())
                };
                places.push(ScrubPlace {
                    stripe,
                    offset,
                    len,
                    member: Some(member),
                    flaw: Flaw::Mismatch,
                    repaired: true,
                });
            }
            let count = places.len() as u64;
            let report = scrub(&pair, false).await;
            // Its drive is known for it, also after the next scrub.
            for member in pair.array.status().members {
                let told = member.drive.unwrap().health().wrong_blocks;
                let expected = wrong.get(&member.index).copied().unwrap_or_default();
                assert_eq!(told, expected, "{level:?}: member {}", member.index);
            }
            let expected = ScrubReport {
                began_s: report.began_s,
                ended_s: report.ended_s,
                repairs: false,
                first_stripe: 0,
                mismatched_stripes: count,
                undecided_stripes: 0,
                damaged_stripes: 0,
                repaired_stripes: count,
                unreadable_stripes: 0,
                bad_stripes: 0,
                places,
                wrong_by_member: wrong,
            };
            assert_eq!(report, expected, "{level:?}");
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// Of one chunk it can be told which copy is wrong, of another one of the same rows it cannot.
#[test]
fn the_copy_that_is_known_to_be_wrong_is_not_the_one_that_is_kept() {
    run(|reactor| async move {
        let shape = Shape { copies: 3, ..Shape::default() };
        let spec = ArraySpec { shape, ..Pair::spec(Level::Raid10) };
        let mut pair = Pair::made(&reactor, &spec, &[DRIVE_BYTES; 6], 512).await;
        pair.put(0, &[5; 1 << 20]).await;
        pair.in_place().await;
        lie(&pair, 3, 0, 1024, 512).await;
        // All three of the second chunk differ.
        lie(&pair, 3, 4, 1024, 512).await;
        lie(&pair, 3, 5, 1024, 256).await;
        let report = scrub(&pair, true).await;
        assert_eq!((report.mismatched_stripes, report.repaired_stripes), (1, 1), "{report:?}");
        for _ in 0..6 {
            pair.check().await;
        }
        pair.scrub_is_clean().await;
        // Of one chunk it cannot be told in one sector, and can in the next, where it cannot of the
        // other.
        lie(&pair, 3, 1, 1024, 512).await;
        lie(&pair, 3, 2, 1024, 256).await;
        lie(&pair, 3, 0, 1536, 512).await;
        lie(&pair, 3, 4, 1536, 512).await;
        lie(&pair, 3, 5, 1536, 256).await;
        assert_eq!(scrub(&pair, true).await.repaired_stripes, 1);
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn where_it_cannot_be_told_nothing_is_written_unasked() {
    run(|reactor| async move {
        for (level, members) in [(Level::Raid5, 4), (Level::Raid1, 2), (Level::Raid10, 4)] {
            let mut pair = written(&reactor, level, members).await;
            let layout = pair.array.layout();
            // Not the data, nor the first copy: what is made to agree then is right.
            let last = layout.positions() - 1;
            lie(&pair, 3, last, 512, 1024).await;
            for repair in [false, false, true] {
                let report = scrub(&pair, repair).await;
                let (mismatched, undecided) = (report.mismatched_stripes, report.undecided_stripes);
                assert_eq!((mismatched, undecided), (1, 1), "{level:?}: {report:?}");
                let (offset, len) = (3 * layout.stripe_bytes(), layout.stripe_bytes());
                let (member, flaw) = (None, Flaw::Mismatch);
                let place = ScrubPlace { stripe: 3, offset, len, member, flaw, repaired: repair };
                assert_eq!(report.places, [place]);
                assert_eq!(report.repaired_stripes, u64::from(repair));
                assert!(report.wrong_by_member.is_empty());
            }
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn many_places_are_counted_and_the_first_are_told() {
    run(|reactor| async move {
        let mut pair = written(&reactor, Level::Raid6, 6).await;
        for stripe in 0..20 {
            lie(&pair, stripe, 0, 0, 512).await;
            // Of two in the same rows it cannot be told.
            lie(&pair, stripe, 1, 8192, 512).await;
        }
        let report = scrub(&pair, false).await;
        assert_eq!((report.mismatched_stripes, report.repaired_stripes), (20, 20));
        assert_eq!(report.places.len(), SCRUB_PLACES_MAX);
        let stripes: Vec<u64> = report.places.iter().map(|place| place.stripe).collect();
        assert_eq!(stripes, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7]);
        assert_eq!(report.wrong_by_member.values().sum::<u64>(), 40);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

fn settings(rebuild_percent: u8, scrub_period_s: u32) -> SettingsChange {
    SettingsChange {
        rebuild_percent: Some(rebuild_percent),
        scrub_period_s: Some(scrub_period_s),
        ..SettingsChange::default()
    }
}

fn stripes_done(array: &Array) -> Option<u64> {
    match array.status().scrub {
        ScrubState::Running { progress, .. } => Some(progress.stripes_done),
        ScrubState::Never | ScrubState::Stopped { .. } | ScrubState::Finished { .. } => None,
    }
}

#[test]
fn it_goes_on_after_a_restart_and_can_be_stopped() {
    crate::modelled::run(|reactor| async move {
        let kind = (Level::Raid5, 3);
        let array = crate::modelled::full_array(&reactor, kind, settings(1, 0), |_| {
            crate::modelled::LATENCY
        });
        let array = array.await;
        array.start_scrub(false).unwrap();
        reactor.sleep(Duration::from_secs(15)).await;
        let before = stripes_done(&array).unwrap();
        let drives = array.status().members.into_iter().map(|m| m.drive.unwrap()).collect();
        array.stop().await.unwrap();
        let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap();
        let after = stripes_done(&array).unwrap();
        assert!(after > before / 3 && after <= before, "from {after}, was at {before}");
        array.stop_scrub().unwrap();
        ended(&reactor, &array).await;
        assert!(matches!(array.status().scrub, ScrubState::Stopped { .. }));
        assert!(array.stop_scrub().is_err());
        let drives = array.status().members.into_iter().map(|m| m.drive.unwrap()).collect();
        array.stop().await.unwrap();
        let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap();
        assert!(matches!(array.status().scrub, ScrubState::Stopped { .. }), "it was ended");
        array.stop().await.unwrap();
    });
}

/// What is told of the scrub after a start.
async fn restarted(pair: &mut Pair) -> ScrubState {
    pair.restart(AssembleOptions::default()).await;
    pair.array.status().scrub
}

#[test]
fn what_it_found_outlives_a_restart() {
    run(|reactor| async move {
        let mut pair = written(&reactor, Level::Raid6, 6).await;
        for stripe in 0..20 {
            lie(&pair, stripe, 0, 0, 512).await;
            lie(&pair, stripe, 1, 8192, 512).await;
        }
        lie(&pair, 30, 0, 0, 512).await;
        lie(&pair, 30, 1, 0, 512).await;
        lie(&pair, 30, 2, 0, 512).await;
        let report = scrub(&pair, false).await;
        assert_eq!((report.mismatched_stripes, report.undecided_stripes), (21, 1));
        assert!(report.ended_s.is_some() && report.ended_s >= Some(report.began_s));
        let ScrubState::Finished { report: kept } = restarted(&mut pair).await else { panic!() };
        assert_eq!(kept, report, "places and all");
        // Another one is another one.
        assert_eq!(scrub(&pair, true).await.repaired_stripes, 1);
        let clean = scrub(&pair, false).await;
        assert_eq!((clean.mismatched_stripes, clean.repairs), (0, false));
        let ScrubState::Finished { report: kept } = restarted(&mut pair).await else { panic!() };
        assert_eq!(kept, clean);
        pair.array.stop().await.unwrap();
    });
}

/// How an array ends.
#[derive(Clone, Copy, PartialEq, Debug)]
enum End {
    Stop,
    Crash,
    /// Longer after than it takes for counts to be stored, which no place comes with.
    CrashLater,
}

/// An array in which so many stripes, one after the other, do not agree, and nobody can tell which
/// chunk it is, is ended some moments after a scrub has told of `found` of them.
async fn ended_early(reactor: Reactor, end: End, wrong: u64, found: u64) -> (Rc<Array>, u64) {
    let kind = (Level::Raid5, 3);
    let array =
        crate::modelled::full_array(&reactor, kind, settings(1, 0), |_| crate::modelled::LATENCY)
            .await;
    let base = label::plan(crate::modelled::DRIVE_BYTES, 1).unwrap().data.offset;
    let drive = array.status().members[0].drive.clone().unwrap();
    for stripe in (0..wrong).map(StripeIndex) {
        let buffer = reactor.buffer(512);
        buffer.copy_from_slice(&[0x99; 512]);
        let at = base + array.layout().member_offset(stripe, 0);
        drive.write(at, buffer.into()).await.unwrap();
    }
    array.start_scrub(true).unwrap();
    let told = || match array.status().scrub {
        ScrubState::Running { report, .. } => report.mismatched_stripes,
        ScrubState::Never | ScrubState::Stopped { .. } | ScrubState::Finished { .. } => 0,
    };
    while told() < found {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    // A record takes this long, a stop may come at any moment.
    match end {
        End::Stop => array.stop().await.unwrap(),
        End::Crash => reactor.sleep(Duration::from_millis(5)).await,
        // Ten seconds, and as long as a scrub at this pace rests.
        End::CrashLater => reactor.sleep(Duration::from_secs(14)).await,
    }
    assert!(end == End::Stop || stripes_done(&array).is_some(), "it had ended before");
    array.status().members.iter().flat_map(|member| &member.drive).for_each(|its| its.pull());
    let told = told();
    let drives = (0..3).map(|number| crate::modelled::plug_in(&reactor, number)).collect();
    (Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap(), told)
}

#[test]
fn what_was_found_before_the_end_is_told_after_the_next_start() {
    let ends = [(End::Stop, 1, 1), (End::Crash, 1, 1), (End::Stop, 60, 40), (End::Crash, 12, 12)];
    for (end, wrong, found) in ends.into_iter().chain([(End::CrashLater, 40, 40)]) {
        crate::modelled::run(move |reactor| async move {
            let (array, told) = ended_early(reactor.clone(), end, wrong, found).await;
            let ScrubState::Running { report, .. } = array.status().scrub else {
                panic!("it goes on")
            };
            assert!(report.repairs, "as it was begun");
            assert!(told >= found || end == End::Stop);
            let (was, repaired) = (report.mismatched_stripes, report.repaired_stripes);
            assert!(was >= found && was == repaired, "{end:?}: {was} of {wrong}, {repaired}");
            array.set_settings(settings(100, 0)).await.unwrap();
            let report = ended(&reactor, &array).await;
            assert_eq!((report.mismatched_stripes, report.first_stripe), (wrong, 0), "{end:?}");
            assert_eq!(report.places.len(), SCRUB_PLACES_MAX.min(wrong as usize));
            array.stop().await.unwrap();
        });
    }
}

#[test]
fn it_begins_by_itself_once_a_period() {
    crate::modelled::run(|reactor| async move {
        let hour = 3600;
        let kind = (Level::Raid5, 3);
        let array = crate::modelled::full_array(&reactor, kind, settings(100, hour), |_| {
            crate::modelled::LATENCY
        });
        let array = array.await;
        let reads = || array.status().members[0].drive.as_ref().unwrap().counters().read_bytes;
        let mut before = reads();
        reactor.sleep(Duration::from_secs(3500)).await;
        assert!(matches!(array.status().scrub, ScrubState::Never) && reads() == before);
        for _ in 0..2 {
            reactor.sleep(Duration::from_secs(200)).await;
            assert!(matches!(array.status().scrub, ScrubState::Finished { .. }));
            assert!(reads() > before + (40 << 20), "it read everything");
            before = reads();
            reactor.sleep(Duration::from_secs(3400)).await;
            assert_eq!(reads(), before, "and once");
        }
        // Never, if that was set; and not while a member is away.
        array.set_settings(settings(100, 0)).await.unwrap();
        reactor.sleep(Duration::from_secs(3 * 3600)).await;
        assert_eq!(reads(), before, "nobody asked for it");
        array.pull_member(MemberIndex(2)).unwrap();
        array.set_settings(settings(100, hour)).await.unwrap();
        // It was asked whether it answers.
        before = reads();
        reactor.sleep(Duration::from_secs(3700)).await;
        assert_eq!(reads(), before);
        array.stop().await.unwrap();
    });
}
