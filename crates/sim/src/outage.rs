//! More drives are away for a moment than the array bears: an enclosure, a controller, a cable.
//! Media and caches keep what they had, and then all are back.
//!
//! While they are away requests may fail; whatever was acknowledged is there afterwards. The array
//! is made whole as operators do it: drives are taken back in any order, and where that is refused
//! (what a needed drive had in its cache may be lost, for all that a running array knows) the array
//! is stopped and started with them.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::MemberIndex;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::prng::Prng;

use crate::workload::Life;

/// What could not be put in place is tried again.
pub const RETRIED_WITHIN: Duration = Duration::from_secs(2);

pub async fn outage(life: &Rc<Life>, prng: &mut Prng) {
    let away = choose(life, prng);
    life.outage_begins();
    life.world.borrow_mut().outages.begun += 1;
    if prng.chance(1, 2) {
        // So that caches are empty, where nobody writes right now.
        let _ = life.array.flush().await;
    }
    let at_once = prng.chance(1, 2);
    life.note(|| format!("OUTAGE of {away:?} (members, drives), all at once: {at_once}"));
    for (index, _) in &away {
        let _ = life.array.pull_member(MemberIndex::new(*index));
        if !at_once {
            life.reactor.sleep(Duration::from_nanos(prng.below(1_000_000))).await;
        }
    }
    let longest = [1_000_000, 100_000_000, 40_000_000_000][prng.index(3)];
    life.reactor.sleep(Duration::from_nanos(prng.below(longest))).await;
    let mut left = away;
    // Who is refused may be taken once others are back.
    for _ in 0..left.len() {
        for at in (1..left.len()).rev() {
            left.swap(at, prng.index(at + 1));
        }
        for (index, drive) in &left {
            comes_back(life, *index, *drive).await;
        }
    }
    if life.array.state() != ArrayState::Failed {
        // What a drive missed may wait for another that is slow, before anyone hears of it. Then a
        // round of destage that began before may yet say that there is no room.
        life.heard_of_all().await;
        life.reactor.sleep(RETRIED_WITHIN).await;
    }
    let is_over = life.array.state() != ArrayState::Failed;
    life.note(|| format!("the outage is over: {is_over}"));
    life.refresh_fleet();
    life.world.borrow_mut().outages.healed += u64::from(is_over);
    life.outage_ends(is_over);
}

/// Members with their drives: more than the array bears together with those that are away already.
fn choose(life: &Life, prng: &mut Prng) -> Vec<(usize, u32)> {
    let status = life.array.status();
    let is_here = |index: usize| {
        let its = &status.members[index];
        its.drive.as_ref().is_some_and(|drive| drive.is_alive())
    };
    let is_whole = |index| is_here(index) && status.members[index].state == MemberState::Trusted;
    let mut held: Vec<bool> = (0..status.members.len()).map(is_whole).collect();
    let mut left: Vec<usize> = (0..held.len()).filter(|index| is_here(*index)).collect();
    let more = if prng.chance(1, 2) { 0 } else { prng.index(left.len() + 1) };
    let (mut away, mut spare) = (Vec::new(), more);
    while !left.is_empty() {
        let has_failed = !life.array.layout().survives(&held);
        if has_failed && spare == 0 {
            break;
        }
        spare -= usize::from(has_failed);
        let index = left.swap_remove(prng.index(left.len()));
        held[index] = false;
        away.push((index, life.fleet.borrow().slots[index]));
    }
    away
}

/// The member's drive is plugged in again, once it works on nothing that it was asked before.
async fn comes_back(life: &Rc<Life>, index: usize, drive: u32) {
    let is_out = || {
        let its = life.array.status().members[index].clone();
        !its.drive.is_some_and(|drive| drive.is_alive()) || its.state == MemberState::Stale
    };
    let is_its = || {
        let is_dead = life.world.borrow_mut().drive(drive).dead;
        !is_dead && life.fleet.borrow().slots[index] == drive
    };
    while is_out() && is_its() && !life.world.borrow().in_flight(|its| its == drive).is_empty() {
        life.reactor.sleep(Duration::from_millis(1)).await;
    }
    if !is_out() || !is_its() {
        return;
    }
    let handle = life.fleet.borrow().open(&life.reactor, drive);
    let uuid = life.fleet.borrow_mut().new_uuid(drive as usize);
    let member = MemberIndex::new(index);
    let done = life.array.return_member(member, handle, uuid).await;
    life.note(|| format!("member {index}: drive {drive} is back: {done:?}"));
    if done.is_ok() {
        let uuid = life.array.status().members[index].drive_uuid;
        life.world.borrow_mut().drive(drive).uuid = uuid;
    }
    life.refresh_fleet();
}
