//! Goal: members that were replaced one after the other are filled together, what both lack first;
//! a restart or a crash in between costs no data, and little time.
//! Method: modelled drives under a clock that jumps; every block is read in the end, and scrubbed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::{MemberStatus, ScrubState};
use ashlar_reactor::executor::Reactor;

use crate::modelled::{LATENCY, drive, full_array, plug_in, run, run_counted, run_full};

fn member(array: &Array, index: usize) -> MemberStatus {
    array.status().members[index].clone()
}

async fn replace(reactor: &Reactor, array: &Rc<Array>, index: u8) {
    let new = drive(reactor, "new", LATENCY);
    array.pull_member(MemberIndex(index)).unwrap();
    array.replace_member(MemberIndex(index), new, [100 + index; 16]).await.unwrap();
}

async fn is_whole(reactor: &Reactor, array: &Rc<Array>) {
    while array.status().rebuild.is_some() {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(array.status().rebuild_error, None);
    assert!(array.status().members.iter().all(|its| its.state == MemberState::Trusted));
    let buffer = reactor.buffer(1 << 20);
    for at in (0..array.capacity()).step_by(buffer.len()) {
        let len = (array.capacity() - at).min(buffer.len() as u64) as usize;
        buffer.fill_zero();
        array.read(at, buffer.slice(0..len).into()).await.unwrap();
        assert!(buffer.bytes()[..len].iter().all(|byte| *byte == 7), "wrong data from {at} on");
    }
    array.start_scrub(false).unwrap();
    loop {
        reactor.sleep(Duration::from_millis(1)).await;
        if let ScrubState::Finished { report } = array.status().scrub {
            return assert_eq!((report.mismatched_stripes, report.unreadable_stripes), (0, 0));
        }
    }
}

fn share(percent: u8) -> SettingsChange {
    SettingsChange { rebuild_percent: Some(percent), ..SettingsChange::default() }
}

/// The second is replaced when the first is filled to some part.
async fn two_are_filled(reactor: &Reactor, level: Level, members: usize) -> (Rc<Array>, u64) {
    let array = full_array(reactor, (level, members), share(10), |_| LATENCY).await;
    replace(reactor, &array, 0).await;
    reactor.sleep(Duration::from_millis(800)).await;
    replace(reactor, &array, 3).await;
    let first = member(&array, 0).rebuilt_stripes;
    let stripes = array.layout().stripes;
    assert!(first > stripes / 8 && first < stripes / 2, "{first} of {stripes}");
    (array, first)
}

#[test]
fn what_both_lack_comes_first() {
    run(|reactor| async move {
        let (array, first) = two_are_filled(&reactor, Level::Raid6, 6).await;
        let stripes = array.layout().stripes;
        while member(&array, 0).state == MemberState::Rebuilding {
            let (one, other) =
                (member(&array, 0).rebuilt_stripes, member(&array, 3).rebuilt_stripes);
            // What was under way for the first alone, when the second came.
            assert!(one - other <= first + 16, "{one}, {other}: one more is lost to the second");
            reactor.sleep(Duration::from_millis(10)).await;
        }
        let other = member(&array, 3).rebuilt_stripes;
        assert!(other + first + 16 >= stripes && other < stripes, "{other} of {stripes}");
        is_whole(&reactor, &array).await;
        array.stop().await.unwrap();
    });
}

#[test]
fn a_restart_in_between_costs_no_data() {
    for (level, members) in KINDS {
        for end in [End::Stop, End::Crash] {
            run(|reactor| async move {
                let (array, _) = two_are_filled(&reactor, level, members).await;
                reactor.sleep(Duration::from_millis(500)).await;
                // What both lacked is filled beyond what can be stored of the second.
                assert!(member(&array, 3).rebuilt_stripes > 0);
                let array = restarted(&reactor, &array, &[0, 3], end).await;
                is_whole(&reactor, &array).await;
                array.stop().await.unwrap();
            });
        }
    }
}

#[test]
fn a_member_that_was_given_up_is_tried_again_when_another_is_back() {
    run(|reactor| async move {
        let array = full_array(&reactor, (Level::Raid50, 6), share(1), |_| LATENCY).await;
        replace(&reactor, &array, 0).await;
        replace(&reactor, &array, 3).await;
        array.flush().await.unwrap();
        // The first cannot be filled without it; the other is of another group.
        array.pull_member(MemberIndex(1)).unwrap();
        while array.status().rebuild_error.is_none() {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert!(array.status().rebuild.is_some(), "the other goes on");
        let back = plug_in(&reactor, 1);
        array.return_member(MemberIndex(1), back, [201; 16]).await.unwrap();
        is_whole(&reactor, &array).await;
        array.stop().await.unwrap();
    });
}

const KINDS: [(Level, usize); 3] = [(Level::Raid6, 6), (Level::Raid60, 8), (Level::Raid10, 4)];

#[derive(Clone, Copy, Debug)]
enum End {
    Stop,
    Crash,
}

/// `replaced`: members, in the order in which they were given new drives.
async fn restarted(
    reactor: &Reactor,
    array: &Rc<Array>,
    replaced: &[usize],
    end: End,
) -> Rc<Array> {
    let members = array.status().members;
    match end {
        End::Stop => array.stop().await.unwrap(),
        End::Crash => members.iter().flat_map(|its| &its.drive).for_each(|drive| drive.pull()),
    }
    // What is under way on them ends, and is heard by nobody.
    reactor.sleep(Duration::from_secs(1)).await;
    let number = |member: usize| match replaced.iter().position(|its| *its == member) {
        Some(later) => members.len() + later,
        None => member,
    };
    let again = (0..members.len()).map(|member| plug_in(reactor, number(member) as u32));
    Array::assemble(reactor, again.collect(), AssembleOptions::default()).await.unwrap()
}

/// It goes on from where it was: what was filled before the last superblock is not filled again.
#[test]
fn a_restart_in_between_costs_little_time() {
    for (level, members) in KINDS {
        for end in [End::Stop, End::Crash] {
            run(|reactor| async move {
                let array = full_array(&reactor, (level, members), share(1), |_| LATENCY).await;
                let stripes = array.layout().stripes;
                replace(&reactor, &array, 0).await;
                while member(&array, 0).rebuilt_stripes < stripes / 2 {
                    reactor.sleep(Duration::from_millis(100)).await;
                }
                let before = member(&array, 0).rebuilt_stripes;
                assert!(before < stripes, "it has ended already");
                let array = restarted(&reactor, &array, &[0], end).await;
                let after = member(&array, 0).rebuilt_stripes;
                // A shift or two may not have been durable.
                assert!(after <= before && after >= before / 2, "{end:?}: {after}, {before}");
                is_whole(&reactor, &array).await;
                let moved = member(&array, 0).drive.unwrap().counters().write_bytes;
                let left = (stripes - after) * u64::from(array.layout().chunk_bytes);
                let left = left / u64::from(array.layout().groups);
                assert!(moved < left + (4 << 20), "{end:?}: {moved} bytes, {left} were left");
                array.stop().await.unwrap();
            });
        }
    }
}

/// Also of the second of two: what both lacked was filled first, behind a gap.
#[test]
fn a_restart_while_two_are_filled_costs_little_time() {
    for (level, members) in KINDS {
        for end in [End::Stop, End::Crash] {
            run(|reactor| async move {
                let (array, first) = two_are_filled(&reactor, level, members).await;
                array.set_settings(share(1)).await.unwrap();
                let stripes = array.layout().stripes;
                while member(&array, 3).rebuilt_stripes < (stripes - first) / 2 {
                    reactor.sleep(Duration::from_millis(100)).await;
                }
                let before = [0, 3].map(|index| member(&array, index).rebuilt_stripes);
                let array = restarted(&reactor, &array, &[0, 3], end).await;
                let after = [0, 3].map(|index| member(&array, index).rebuilt_stripes);
                for (after, before) in after.into_iter().zip(before) {
                    assert!(after <= before && after >= before / 3, "{end:?}: {after}, {before}");
                }
                is_whole(&reactor, &array).await;
                let moved =
                    [0, 3].map(|index| member(&array, index).drive.unwrap().counters().write_bytes);
                let left =
                    (2 * stripes - after[0] - after[1]) * u64::from(array.layout().chunk_bytes);
                let left = left / u64::from(array.layout().groups);
                let moved = moved[0] + moved[1];
                assert!(moved < left + (8 << 20), "{end:?}: {moved} bytes, {left} were left");
                array.stop().await.unwrap();
            });
        }
    }
}

#[test]
fn a_drive_that_refuses_writes_for_a_while_is_filled_in_the_end() {
    run_full(|reactor, full| async move {
        let array = full_array(&reactor, (Level::Raid5, 4), share(50), |_| LATENCY).await;
        replace(&reactor, &array, 1).await;
        full.set(Some(24 << 20));
        while array.status().rebuild_error.is_none() {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        let why = array.status().rebuild_error.unwrap();
        assert!(why.contains("new") && why.contains("space"), "{why}");
        full.set(None);
        // Nobody asks for it.
        while array.status().rebuild.is_none() {
            reactor.sleep(Duration::from_millis(100)).await;
        }
        is_whole(&reactor, &array).await;
        array.stop().await.unwrap();
    });
}

/// One of a group lacks all, and one of another a little of it: both are filled side by side.
#[test]
fn stripes_of_other_groups_are_not_filled_all_at_once() {
    run_counted(|reactor, busiest| async move {
        let most = |other: Option<u32>| {
            let (reactor, busiest) = (reactor.clone(), busiest.clone());
            async move {
                let kind = (Level::Raid50, 6);
                let array = full_array(&reactor, kind, share(100), |_| LATENCY).await;
                let bytes = reactor.buffer(1 << 20);
                bytes.copy_from_slice(&[7; 1 << 20]);
                if let Some(drive) = other {
                    array.pull_member(MemberIndex(4)).unwrap();
                    for at in (0..array.capacity() / 2).step_by(bytes.len()) {
                        array.write(at, bytes.clone().into()).await.unwrap();
                    }
                    let back = plug_in(&reactor, drive);
                    array.return_member(MemberIndex(4), back, [201; 16]).await.unwrap();
                }
                replace(&reactor, &array, 0).await;
                busiest.set(0);
                is_whole(&reactor, &array).await;
                array.stop().await.unwrap();
                busiest.get()
            }
        };
        // The first array has seven drives, in the end.
        let (alone, beside) = (most(None).await, most(Some(7 + 4)).await);
        println!("{beside} operations at a time, {alone} of one member");
        assert!(beside <= 2 * alone, "{beside} operations at a time, {alone} of one member");
    });
}
