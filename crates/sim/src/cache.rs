//! Single drives lose what is in their caches: a flush fails, or their own power does.
//!
//! A flush that failed may have kept what it was to make durable, or not: then the drive shows what
//! was there before, from any moment after its answer on. A drive whose power failed is gone for
//! whoever asks it, and comes back without what was in its cache.
//!
//! Whoever lost a cache is fenced before anything rests on it. Only if the process dies before that
//! is durable, a start believes it: then what was acknowledged and not flushed may be old, unless
//! the journal has it (`docs/FAULTS.md`).

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::MemberState;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::prng::Prng;

use crate::drive::{FlushFault, Loss};
use crate::inspect;
use crate::places::plug_in;
use crate::workload::Life;
use crate::world::World;

/// A drive that lost its power is missed within this time.
const MISSED_WITHIN_NS: u64 = 100_000_000;

/// Flushes of a drive fail, once or for a while.
pub fn failing_flushes(life: &Rc<Life>, index: usize, drive: u32, prng: &mut Prng) {
    if !life.fleet.borrow().may_impair(index) {
        return;
    }
    life.fleet.borrow_mut().impair(index, None);
    let times = [1, 4, u32::MAX, u32::MAX][prng.index(4)];
    let errno = [libc::EIO, libc::EIO, libc::ETIMEDOUT, libc::ENOSPC][prng.index(4)];
    // Where nobody else has it, what was not flushed is lost, as with one drive that is by itself.
    let losses = [Loss::Everything, Loss::Everything, Loss::draw(prng)];
    let loss = if life.plan.beyond { Loss::Nothing } else { losses[prng.index(3)] };
    let longest_ns = [1, 1_000_000, 5_000_000_000][prng.index(3)];
    let within_ns = prng.below(longest_ns);
    let fault = FlushFault { times, errno, loss, within_ns };
    life.note(|| format!("drive {drive} (member {index}): {fault:?}"));
    life.world.borrow_mut().drive(drive).flush_fault = Some(fault);
    let (long, comes_back) = (a_while(prng), prng.chance(1, 2));
    let life = life.clone();
    life.reactor.clone().spawn(async move {
        life.reactor.sleep(long).await;
        life.note(|| format!("drive {drive} flushes again"));
        life.world.borrow_mut().drive(drive).flush_fault = None;
        // It may be known to be behind.
        life.refresh_fleet();
        if comes_back {
            comes_back_if_out(&life, index, drive).await;
        }
    });
}

/// The power of one drive fails, and is there again.
pub fn power_loss(life: &Rc<Life>, index: usize, drive: u32, prng: &mut Prng) {
    let is_dead = life.world.borrow_mut().drive(drive).dead;
    if is_dead || !life.fleet.borrow().may_impair(index) {
        return;
    }
    life.fleet.borrow_mut().impair(index, None);
    let loss = if life.plan.beyond { Loss::Nothing } else { Loss::draw(prng) };
    life.note(|| format!("drive {drive} (member {index}) loses its power, {loss:?}"));
    {
        let World { drives, caches, .. } = &mut *life.world.borrow_mut();
        let its = &mut drives[drive as usize];
        its.lose_cache(loss, caches);
        (its.dead, its.unpowered) = (true, true);
    }
    let missed_after = Duration::from_nanos(prng.below(MISSED_WITHIN_NS));
    let is_told = prng.chance(1, 2);
    if is_told {
        let _ = life.array.pull_member(MemberIndex::new(index));
    }
    let (long, comes_back) = (a_while(prng), prng.chance(3, 4));
    let life = life.clone();
    life.reactor.clone().spawn(async move {
        if !is_told {
            // Who asks it hears of it before.
            life.reactor.sleep(missed_after).await;
            pull(&life, index, drive);
        }
        life.reactor.sleep(long).await;
        let powered = std::mem::take(&mut life.world.borrow_mut().drive(drive).unpowered);
        if !powered {
            return;
        }
        life.note(|| format!("drive {drive} has its power again"));
        life.world.borrow_mut().drive(drive).dead = false;
        if comes_back {
            comes_back_if_out(&life, index, drive).await;
        }
    });
}

fn a_while(prng: &mut Prng) -> Duration {
    let longest = [1_000_000, 100_000_000, 3_000_000_000][prng.index(3)];
    Duration::from_nanos(prng.below(longest))
}

/// Unless another has its place by now.
fn pull(life: &Life, index: usize, drive: u32) {
    let member = life.array.status().members[index].clone();
    if member.drive.is_some_and(|its| its.name() == format!("d{drive}")) {
        let _ = life.array.pull_member(MemberIndex::new(index));
    }
}

/// Its member has given the drive up, or does not believe it: it is plugged in again.
async fn comes_back_if_out(life: &Rc<Life>, index: usize, drive: u32) {
    let member = life.array.status().members[index].clone();
    let is_out = member.drive.is_none_or(|its| !its.is_alive());
    let is_out = is_out || member.state == MemberState::Stale;
    let is_same = life.fleet.borrow().slots[index] == drive;
    if is_out && is_same {
        plug_in(life, index, drive).await;
        life.refresh_fleet();
    }
}

/// Whether a start may believe a drive that lost its cache: nobody has said durably that it is not
/// to be.
pub fn is_loss_believed(world: &World) -> bool {
    let newest = inspect::newest(world.drives.iter());
    let trusted = |uuid: [u8; 16]| {
        let mut members = newest.iter().flat_map(|newest| newest.members());
        members.any(|its| its.drive == uuid && its.state() != Ok(MemberState::Stale))
    };
    let mut lost = world.drives.iter().filter(|drive| drive.lost_cache);
    lost.any(|drive| inspect::owner(drive).is_some_and(trusted))
}
