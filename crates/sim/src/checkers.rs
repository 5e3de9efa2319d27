//! What must hold at quiet points, and the liveness phase: with faults over and spares given, the
//! array becomes whole in bounded time, and everything reads as the oracle says.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::MemberState;
use ashlar_format::bad_blocks::RANGES_MAX;
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_raid::error::ChangeError;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::status::{ArrayState, ScrubState};
use ashlar_reactor::prng::Prng;

use crate::drive::SimDrive;
use crate::faults::Lies;
use crate::inspect;
use crate::workload::Life;

/// Virtual time in which an array must become whole.
const WHOLE_WITHIN: Duration = Duration::from_secs(3600);
/// Ranges of lost blocks, of which there may soon be no room for more: then a rebuild stops until
/// some are written again.
const MANY_BAD: usize = RANGES_MAX - 300;
/// Virtual time in which its dirty map must become clean.
const CLEAN_WITHIN: Duration = Duration::from_secs(30);
/// Bytes of one read when all is read back.
const READ_BYTES: u64 = 512 << 10;
/// One seed in so many reads the whole volume and scrubs the whole array through the engine. The
/// others read what is in use, and compare parity and copies on the drives, which finds the same
/// in far less time.
const THOROUGH_ONE_IN: u64 = 8;

/// Everything that was ever written is read, and the rest is zero.
async fn read_all(life: &Life) {
    let mut offset = 0;
    while offset < life.volume.bytes() && !life.world.borrow().is_dark() {
        let len = READ_BYTES.min(life.volume.bytes() - offset);
        if !life.read(offset, len).await {
            // Some stripe of it may fail: each by itself.
            let stripe = life.array.stripe_bytes();
            let mut at = offset;
            while at < offset + len {
                let part = (stripe - at % stripe).min(offset + len - at);
                life.read(at, part).await;
                at += part;
            }
        }
        offset += len;
    }
}

/// Reads every stripe that was ever written, or is not zero on some drive where that matters.
async fn read_used(life: &Life) {
    let stripe_bytes = life.array.stripe_bytes();
    for stripe in 0..life.volume.bytes() / stripe_bytes {
        let at = stripe * stripe_bytes;
        let blank = on_members(life, |members| {
            let members = (members, life.plan.areas().data);
            inspect::is_blank(members, &life.array.layout(), StripeIndex(stripe))
        });
        let in_use = !blank && life.array.is_written(StripeIndex(stripe));
        let used = in_use || life.oracle.borrow().was_written(at, stripe_bytes);
        if used && !life.world.borrow().is_dark() && !life.read(at, stripe_bytes).await {
            read_each_chunk(life, at, stripe_bytes).await;
        }
    }
}

/// Volumes beside the main one are small.
async fn read_others(life: &Life) {
    for served in life.others.all().filter(|_| life.plan.has_others()) {
        let mut offset = 0;
        while offset < served.volume.bytes() && !life.world.borrow().is_dark() {
            let len = READ_BYTES.min(served.volume.bytes() - offset);
            life.read_of(&served, offset, len).await;
            offset += len;
        }
    }
}

/// Some chunk of it may fail: each by itself.
async fn read_each_chunk(life: &Life, at: u64, len: u64) {
    let chunk = u64::from(life.array.layout().chunk_bytes);
    for at in (at..at + len).step_by(to_usize(chunk)) {
        let is_served = life.read(at, chunk).await;
        let mut world = life.world.borrow_mut();
        world.past_limit.served += u64::from(is_served);
        world.past_limit.refused += u64::from(!is_served);
    }
}

/// All is read that can be; and again once one member after the other has gone until the array has
/// failed, or one, if it had failed before.
pub async fn past_limit(life: &Rc<Life>, prng: &mut Prng) {
    read_used(life).await;
    let mut left: Vec<usize> = (0..life.array.layout().members()).collect();
    while !left.is_empty() && !life.world.borrow().is_dark() {
        let index = left.swap_remove(prng.index(left.len()));
        life.note(|| format!("member {index} is pulled for good"));
        let _ = life.array.pull_member(MemberIndex::new(index));
        if life.array.state() == ArrayState::Failed {
            read_used(life).await;
            break;
        }
    }
    life.refresh_fleet();
}

fn on_members<T>(life: &Life, look: impl FnOnce(&[&SimDrive]) -> T) -> T {
    let (fleet, world) = (life.fleet.borrow(), life.world.borrow());
    let members: Vec<&SimDrive> =
        fleet.slots.iter().map(|drive| &world.drives[*drive as usize]).collect();
    look(&members)
}

/// Faults are over.
pub async fn liveness(life: &Rc<Life>) {
    let redundant = life.array.layout().is_redundant();
    if redundant && !(become_whole(life, true).await && no_more_scrubs(life).await) {
        return;
    }
    while life.array.status().restripe.is_some() && !life.world.borrow().is_dark() {
        life.reactor.sleep(Duration::from_secs(1)).await;
    }
    if life.plan.grows {
        use_all(life).await;
    }
    life.flush().await;
    let thorough = life.plan.seed.is_multiple_of(THOROUGH_ONE_IN);
    if thorough {
        read_all(life).await;
    } else {
        read_used(life).await;
    }
    read_others(life).await;
    if redundant {
        become_clean(life).await;
        // Nobody has read the parity that a drive lies about.
        if thorough || life.plan.lies != Lies::None {
            scrub(life).await;
        }
        agreement(life);
        labels(life);
    }
    accusations(life);
    // Jobs may still be on their last step, and drives whose reads were answered by others.
    life.reactor.sleep(Duration::from_secs(1)).await;
    if !life.array.is_quiet() && !life.world.borrow().is_dark() {
        life.fail("something is still under way or locked in an idle array".into());
    }
}

/// Drives that grew are used to their end.
async fn use_all(life: &Rc<Life>) {
    match life.array.grow().await {
        Ok(_) | Err(ChangeError::NothingToGain { .. }) => {}
        Err(error) => life.fail(format!("an optimal array cannot grow: {error}")),
    }
}

/// Gives spares and starts rebuilds again, as an operator would, until the array is optimal;
/// `restored`: and what was lost for that was written again, as from a backup.
pub async fn become_whole(life: &Rc<Life>, restored: bool) -> bool {
    let deadline = life.reactor.now().after(WHOLE_WITHIN);
    loop {
        let status = life.array.status();
        // A restripe waits where blocks are lost.
        let restripes =
            status.restripe.is_some() && (status.bad.is_empty() || status.restripe_error.is_none());
        let busy = status.rebuild.is_some() || status.resync.is_some() || restripes;
        let whole = status.state == ArrayState::Optimal && status.unsynced_stripes == 0;
        if whole && !busy && (status.bad.is_empty() || !restored) {
            return true;
        }
        if life.world.borrow().is_dark() {
            return false;
        }
        if life.reactor.now() >= deadline {
            let states: Vec<MemberState> = status.members.iter().map(|m| m.state).collect();
            let (state, unsynced) = (status.state.name(), status.unsynced_stripes);
            life.fail(format!(
                "not whole after {WHOLE_WITHIN:?}: {state}, members {states:?}, {unsynced} stripes \
                 unsynced, {} bad, rebuild error {:?}",
                status.bad.len(),
                status.rebuild_error
            ));
            return false;
        }
        if status.rebuild.is_none() {
            give_spares(life).await;
        }
        // What is lost does not keep members from being rebuilt, as long as there is room to say
        // what.
        if whole && !busy || status.bad.len() > MANY_BAD {
            restore(life).await;
        }
        life.reactor.sleep(Duration::from_secs(1)).await;
    }
}

/// None begins by itself any more, and none runs. False: that will never be.
async fn no_more_scrubs(life: &Rc<Life>) -> bool {
    let never = SettingsChange { scrub_period_s: Some(0), ..SettingsChange::default() };
    if let Err(error) = life.array.set_settings(never).await {
        life.fail(format!("the settings cannot be changed: {error}"));
        return false;
    }
    let deadline = life.reactor.now().after(WHOLE_WITHIN);
    while let ScrubState::Running { progress, .. } = life.array.status().scrub {
        if life.reactor.now() >= deadline {
            life.fail(format!("a scrub is not stopped: {progress:?}"));
            return false;
        }
        let stopped = life.array.stop_scrub();
        life.note(|| format!("scrub: {stopped:?}"));
        life.reactor.sleep(Duration::from_millis(50)).await;
    }
    true
}

async fn give_spares(life: &Rc<Life>) {
    for (index, member) in life.array.status().members.iter().enumerate() {
        let alive = member.drive.as_ref().is_some_and(|drive| drive.is_alive());
        if alive && member.state != MemberState::Stale {
            continue;
        }
        let spare = life.fleet.borrow_mut().new_drive();
        let (handle, uuid) = {
            let fleet = life.fleet.borrow();
            (fleet.open(&life.reactor, spare), fleet.uuid(spare))
        };
        let replaced = life.array.replace_member(MemberIndex::new(index), handle, uuid).await;
        life.note(|| format!("member {index} gets spare {spare}: {replaced:?}"));
        life.refresh_fleet();
    }
    let fleet = life.fleet.clone();
    let done = life.array.rebuild(|| fleet.borrow_mut().new_uuid(255)).await;
    life.note(|| format!("rebuild: {done:?}"));
    life.impaired_seen.set(true);
}

/// Blocks that were given up are written anew, as from a backup.
async fn restore(life: &Rc<Life>) {
    for lost in life.array.status().bad {
        let at = life.array.offset_of(lost.stripe, lost.chunk, lost.rows.start);
        let len = u64::from(lost.rows.end - lost.rows.start);
        if at + len <= life.volume.bytes() {
            life.write(at, len, false).await;
        } else {
            // Of the other volumes, or of nobody.
            life.zero_beyond(at, len).await;
        }
    }
}

async fn become_clean(life: &Life) {
    let deadline = life.reactor.now().after(CLEAN_WITHIN);
    let in_use = || {
        let status = life.array.status();
        status.dirty_regions > 0 || status.journal.used_bytes > 0
    };
    while in_use() {
        if life.world.borrow().is_dark() {
            return;
        }
        if life.reactor.now() >= deadline {
            let (left, journal) = (life.array.status().dirty_regions, life.array.status().journal);
            return life.fail(format!(
                "{left} regions are still dirty after {CLEAN_WITHIN:?}, {journal:?}"
            ));
        }
        life.reactor.sleep(Duration::from_millis(500)).await;
    }
}

async fn scrub(life: &Life) {
    if let Err(error) = life.array.start_scrub(false) {
        return life.fail(format!("a scrub cannot start: {error}"));
    }
    let deadline = life.reactor.now().after(WHOLE_WITHIN);
    loop {
        if life.world.borrow().is_dark() {
            return;
        }
        if let ScrubState::Finished { report } = life.array.status().scrub {
            if report.mismatched_stripes + report.unreadable_stripes > 0 {
                life.fail(format!("scrub: {report:?}"));
            }
            return;
        }
        if life.reactor.now() >= deadline {
            return life.fail("a scrub does not end".into());
        }
        life.reactor.sleep(Duration::from_millis(50)).await;
    }
}

/// Parity and copies agree with the data on the drives.
fn agreement(life: &Life) {
    let layout = life.array.layout();
    let differs = on_members(life, |members| {
        let members = (members, life.plan.areas().data);
        let stripes = (0..layout.stripes).map(StripeIndex);
        let mut stripes = stripes.filter(|stripe| life.array.is_written(*stripe));
        stripes.find(|stripe| !inspect::agrees(members, &layout, *stripe))
    });
    if let Some(stripe) = differs {
        life.fail(format!("stripe {} of a whole array does not agree with itself", stripe.0));
    }
}

/// Only drives that lied are said to have.
pub fn accusations(life: &Life) {
    for member in life.array.status().members {
        let Some(drive) = &member.drive else { continue };
        let (health, name) = (drive.health(), drive.name());
        let told = (health.wrong_blocks, health.wrong_checksums) != (0, 0);
        let number: Option<u32> = name[1..].parse().ok();
        let lied = number.is_some_and(|number| life.world.borrow_mut().drive(number).lied);
        if told && !lied {
            life.fail(format!("{name} is said to have lied, and has not: {health:?}"));
        }
    }
}

/// Every member of an optimal array has all its label copies, and all superblocks say the same.
fn labels(life: &Life) {
    let (bad, mut generations) = on_members(life, |members| {
        let bad: usize = members.iter().map(|drive| inspect::bad_labels(drive)).sum();
        let generation =
            |drive: &&SimDrive| Some(inspect::superblock(drive)?.header.sequence.get());
        (bad, members.iter().map(generation).collect::<Vec<_>>())
    });
    generations.dedup();
    if bad > 0 || generations.len() != 1 || generations[0].is_none() {
        life.fail(format!("{bad} label copies are bad, generations {generations:?}"));
    }
}
