//! Goal: members that were replaced one after the other are filled together, what both lack first;
//! a restart in between costs time, never data.
//! Method: modelled drives under a clock that jumps; every block is read in the end, and scrubbed.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod modelled;

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::{MemberStatus, ScrubState};
use ashlar_reactor::executor::Reactor;
use modelled::{LATENCY, drive, full_array, run};

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

/// The second is replaced when the first is filled to some part.
async fn two_are_filled(reactor: &Reactor, level: Level, members: usize) -> (Rc<Array>, u64) {
    let share = SettingsChange { rebuild_percent: Some(10), ..SettingsChange::default() };
    let array = full_array(reactor, (level, members), share, |_| LATENCY).await;
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
    for (level, members) in [(Level::Raid6, 6), (Level::Raid60, 8), (Level::Raid10, 4)] {
        run(|reactor| async move {
            let (array, _) = two_are_filled(&reactor, level, members).await;
            reactor.sleep(Duration::from_millis(500)).await;
            // What both lacked is filled beyond what can be stored of the second.
            assert!(member(&array, 3).rebuilt_stripes > 0);
            let drives = array.status().members.into_iter().map(|its| its.drive.unwrap()).collect();
            array.stop().await.unwrap();
            let options = AssembleOptions::default();
            let array = Array::assemble(&reactor, drives, options).await.unwrap();
            is_whole(&reactor, &array).await;
            array.stop().await.unwrap();
        });
    }
}
