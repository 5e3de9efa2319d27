//! Another host comes for the array while this one has it: at once, or as this one stands still,
//! for a moment or for longer than its lease is worth.
//!
//! A host that lives keeps its array. Of one that stands still it may be taken; whatever it had
//! half-way then is done, or never (`crate::hosts` sees to that), and no request that it begins
//! afterwards is answered but with an error.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::units::MemberIndex;
use ashlar_reactor::prng::Prng;

use crate::hosts::{Call, FIRST};
use crate::places::plug_in;
use crate::workload::{Life, SECTOR};

const S: u64 = 1_000_000_000;
/// Longest times that a host stands still: not at all, not worth a word, as long as a lease is
/// relied on, as another watches it, and for longer than it takes to take the array.
const STILL_NS_MAX: [u64; 8] =
    [1, 1, 4 * S, 12 * S, 20 * S, 20 * S, SURELY_TAKEN_NS * 2, SURELY_TAKEN_NS * 2];
/// A host that stands still for less than this beats before another can take its array.
pub const SURELY_KEPT_NS: u64 = 4 * S;
/// One that does for longer than this is replaced meanwhile.
pub const SURELY_TAKEN_NS: u64 = 30 * S;
/// So long members are away before.
const AWAY_NS_MAX: u64 = 120 * S;
/// By then it has looked at its lease, and all that waited has failed.
const HEARD_WITHIN: Duration = Duration::from_secs(12);

/// What was before the other host comes: members were away for long, while others were written and
/// told whose the array is; some still are.
pub async fn history(life: &Rc<Life>, prng: &mut Prng) {
    for _ in 0..prng.below(4) {
        let mut gone = Vec::new();
        for index in 0..life.array.layout().members() {
            if prng.chance(1, 2) && life.fleet.borrow().may_impair(index) {
                life.note(|| format!("member {index} is away"));
                life.fleet.borrow_mut().impair(index, None);
                let _ = life.array.pull_member(MemberIndex::new(index));
                life.impaired_seen.set(true);
                gone.push(index);
            }
        }
        time_passes(life, prng).await;
        if prng.chance(1, 3) {
            continue;
        }
        for index in gone {
            let drive = life.fleet.borrow().slots[index];
            plug_in(life, index, drive).await;
        }
        time_passes(life, prng).await;
    }
}

/// As seen by leases.
async fn time_passes(life: &Rc<Life>, prng: &mut Prng) {
    for _ in 0..prng.below(3) {
        life.one_request(&[0], prng).await;
    }
    life.reactor.sleep(Duration::from_nanos(prng.below(AWAY_NS_MAX))).await;
    life.refresh_fleet();
}

/// Calls the other host, at some moment of the life.
pub async fn comes(life: Rc<Life>, mut prng: Prng) {
    let longest = [100_000, 10_000_000, 500_000_000][prng.index(3)];
    life.reactor.sleep(Duration::from_nanos(prng.below(longest))).await;
    if life.working.get() == 0 || life.world.borrow().is_dark() {
        return;
    }
    let longest = STILL_NS_MAX[prng.index(STILL_NS_MAX.len())];
    let still_ns = prng.below(longest);
    let still_ns = if prng.chance(1, 4) { still_ns + SURELY_TAKEN_NS } else { still_ns };
    let longest = [1, 1_000_000, 100_000_000, 8 * S][prng.index(4)];
    let then_ns = prng.below(longest);
    life.world.borrow_mut().hosts.call = Some(Call { still_ns, then_ns });
    // The scenario runs the other one, and this one beside it.
    life.reactor.stop();
}

/// Waits until the other host has the array, or gives up.
pub async fn has_gone(life: &Life) {
    let is_there = || life.place == FIRST && life.world.borrow().hosts.is_contest();
    while is_there() && !life.is_replaced() {
        life.reactor.sleep(Duration::from_millis(200)).await;
    }
}

/// Waits until the host that had the array before has heard of that, and has ended.
pub async fn has_heard(life: &Life) {
    if life.place == FIRST {
        return;
    }
    while !life.world.borrow().hosts.has_awoken {
        life.reactor.sleep(Duration::from_millis(200)).await;
    }
    life.reactor.sleep(HEARD_WITHIN).await;
    if !life.world.borrow().hosts.has_ended && !life.plan.slow {
        life.fail("requests of a host that was replaced are never answered".into());
    }
}

/// A request of a host that another has replaced.
pub async fn in_vain(life: &Life, prng: &mut Prng) {
    let offset = prng.below(life.bytes.get() / SECTOR) * SECTOR;
    let buffer = life.reactor.buffer(512);
    buffer.fill_zero();
    let (what, done) = match prng.chance(1, 2) {
        true => ("write", life.volume.write(offset, buffer.into()).await),
        false => ("read", life.volume.read(offset, buffer.into()).await),
    };
    if done.is_ok() {
        life.fail(format!("a {what} was done after another host had taken the array"));
    }
}
