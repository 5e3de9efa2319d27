//! Goal: a region that is forgotten is zero for good once somebody was told so, and as it was
//! before that; whatever else is decided meanwhile.
//! Method: writes of the map of written regions wait or fail, and the process dies.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::MemberIndex;
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

/// A region that a rebuild does not come to while its first reads wait.
const FAR: u64 = 7;

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

fn areas() -> MemberLayout {
    label::plan(DRIVE_BYTES, 1).unwrap()
}

fn is_map(op: &Op) -> bool {
    is_write(op) && offset(op).is_some_and(|at| areas().written_map.range().contains(&at))
}

fn is_data(op: &Op) -> bool {
    offset(op).is_some_and(|at| at >= areas().data.offset)
}

/// With data in its first regions.
async fn array(reactor: &Reactor, level: Level) -> Pair {
    let mut pair = Pair::new(reactor, level, 3, 512).await;
    pair.array.set_policy(Policy::Bitmap).await.unwrap();
    let region = pair.array.region_bytes() as usize;
    for at in 0..=FAR as u8 {
        let bytes: Vec<u8> = (0..region).map(|i| (i / 512 % 240) as u8 + at + 1).collect();
        pair.put(at as usize * region, &bytes).await;
    }
    pair.in_place().await;
    pair.array.flush().await.unwrap();
    pair
}

fn file(pair: &Pair, member: usize) -> usize {
    address(pair.file(&pair.array.status().members[member].drive.clone().unwrap()))
}

/// Nothing that waits is ever done.
async fn crash(pair: &mut Pair, steer: &Steer) {
    for member in pair.array.status().members {
        member.drive.unwrap().pull();
    }
    steer.drop_waiting(&pair.reactor).await;
    pair.crash_without(&[]).await;
}

async fn agrees(pair: &Pair) {
    while pair.array.status().unsynced_stripes > 0 {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
    pair.scrub_is_clean().await;
}

/// The region becomes blank for one request; another one for it must not be told before that is
/// durable.
#[test]
fn what_is_about_to_be_forgotten_is_not_zero_yet() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor, Level::Raid5).await;
        steer.set(|_, op| if is_map(op) { Fate::Waits } else { Fate::Passes });
        let (array, region) = (pair.array.clone(), pair.array.region_bytes());
        reactor.spawn(async move {
            let _ = array.write_zeroes(0, region).await;
        });
        steer.caught(&reactor, 3).await;
        let told = Rc::new(Cell::new(0));
        for zeroes in [false, true] {
            let (array, told) = (pair.array.clone(), told.clone());
            reactor.spawn(async move {
                if zeroes {
                    array.write_zeroes(0, 512).await.unwrap();
                } else {
                    array.discard(0, 512).await.unwrap();
                    array.flush().await.unwrap();
                }
                told.set(told.get() + 1);
            });
        }
        reactor.sleep(Duration::from_millis(50)).await;
        if told.get() > 0 {
            crash(&mut pair, &steer).await;
        }
        steer.set(|_, _| Fate::Passes);
        while told.get() == 1 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert!(pair.read(0, 512).await == Ok(vec![0; 512]), "it was told, and is not zero");
        crash(&mut pair, &steer).await;
        pair.bytes[..region as usize].fill(0);
        pair.check().await;
        agrees(&pair).await;
        pair.array.stop().await.unwrap();
    });
}

/// Its stripes did not agree: that must not be forgotten before the region is.
#[test]
fn doubts_are_not_forgotten_before_their_region() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor, Level::Raid5).await;
        let (region, stripe) = (pair.array.region_bytes(), pair.array.stripe_bytes());
        let parity = file(&pair, 2);
        let to_last = move |its: usize, op: &Op| its == parity && is_write(op) && is_data(op);
        steer.set(move |its, op| if to_last(its, op) { Fate::Waits } else { Fate::Passes });
        for at in (0..region).step_by(stripe as usize) {
            let (array, bytes) = (pair.array.clone(), reactor.buffer(512));
            bytes.copy_from_slice(&[0xee; 512]);
            reactor.spawn(async move {
                let _ = array.write(at, bytes.into()).await;
            });
        }
        steer.caught(&reactor, 8).await;
        reactor.sleep(Duration::from_millis(10)).await;
        for member in pair.array.status().members {
            member.drive.unwrap().pull();
        }
        steer.drop_waiting(&reactor).await;
        // Neither resync nor anything else makes them agree.
        steer.set(move |its, op| if to_last(its, op) { Fate::Full } else { Fate::Passes });
        pair.crash_without(&[]).await;
        assert!(pair.array.status().unsynced_stripes > 0);
        steer.set(move |its, op| match to_last(its, op) {
            true => Fate::Full,
            false if is_map(op) => Fate::Waits,
            false => Fate::Passes,
        });
        let array = pair.array.clone();
        reactor.spawn(async move {
            let _ = array.write_zeroes(0, region).await;
        });
        steer.caught(&reactor, 3).await;
        // Longer than a region is dirty that nobody writes to.
        for _ in 0..450 {
            if pair.array.status().dirty_regions == 0 {
                break;
            }
            reactor.sleep(Duration::from_millis(10)).await;
        }
        crash(&mut pair, &steer).await;
        agrees(&pair).await;
        pair.array.stop().await.unwrap();
    });
}

/// A region that could not be forgotten is written again, through a journal that began since.
#[test]
fn the_journal_begins_with_what_is_known() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor, Level::Raid5).await;
        let region = pair.array.region_bytes();
        steer.set(|_, op| if is_map(op) { Fate::Fails } else { Fate::Passes });
        assert_eq!(pair.array.write_zeroes(0, region).await, Err(ArrayError::Lost));
        steer.set(|_, _| Fate::Passes);
        pair.array.set_policy(Policy::Journal).await.unwrap();
        let last = file(&pair, 2);
        let waits = move |its: usize, op: &Op| its == last && is_write(op) && is_data(op);
        steer.set(move |its, op| if waits(its, op) { Fate::Waits } else { Fate::Passes });
        pair.put(512, &[0xee; 512]).await;
        steer.caught(&reactor, 1).await;
        reactor.sleep(Duration::from_millis(10)).await;
        crash(&mut pair, &steer).await;
        assert_eq!(pair.read(512, 512).await, Ok(vec![0xee; 512]));
        pair.in_place().await;
        agrees(&pair).await;
        pair.array.stop().await.unwrap();
    });
}

/// A rebuild passes over a region that may be there again after a crash.
#[test]
fn a_rebuild_rests_on_what_is_durably_blank() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor, Level::Raid1).await;
        let region = pair.array.region_bytes();
        let first = file(&pair, 0);
        pair.array.pull_member(MemberIndex(1)).unwrap();
        let holds = move |its: usize, op: &Op| its == first && !is_write(op) && is_data(op);
        steer.set(move |its, op| if holds(its, op) { Fate::Waits } else { Fate::Passes });
        pair.replace(1).await;
        steer.caught(&reactor, 1).await;
        steer.set(move |its, op| match holds(its, op) {
            true => Fate::Waits,
            false if is_map(op) => Fate::Fails,
            false => Fate::Passes,
        });
        assert_eq!(pair.array.write_zeroes(FAR * region, region).await, Err(ArrayError::Lost));
        steer.set(|_, op| if is_map(op) { Fate::Fails } else { Fate::Passes });
        pair.rebuild_ends().await;
        assert_eq!(pair.array.status().members[1].state, MemberState::Rebuilding);
        crash(&mut pair, &steer).await;
        pair.rebuilt().await;
        agrees(&pair).await;
        pair.array.stop().await.unwrap();
    });
}
