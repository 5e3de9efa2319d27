//! What happens to a running array besides requests: drives die, are pulled, come back, are
//! replaced; sectors go bad; scrubs run; volumes come and go.

use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::block_sums::{BLOCKS_PER_PAGE, PAGE_BYTES};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{Area, MemberIndex, StripeIndex};
use ashlar_pool::error::PoolError;
use ashlar_raid::error::{ArrayError, ChangeError};
use ashlar_reactor::prng::Prng;

use crate::cache;
use crate::drive::{BLOCK_BYTES, Mischief, SECTOR_BYTES, SimDrive};
use crate::faults::Lies;
use crate::full;
use crate::others;
use crate::outage;
use crate::places::{plug_in, replace};
use crate::workload::Life;
use crate::world::{AtCompletion, WAKING_NS_MAX};

/// Drives that grow stay below this, so that a label is planned as it was for the smaller one.
const DRIVE_BYTES_MAX: u64 = 24 << 20;

/// Metadata rots in the first so many bytes of its area.
const ROT_WITHIN_BYTES: u64 = 64 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Act {
    Death,
    Pull,
    PlugIn,
    Spare,
    Rebuild,
    Latent,
    Lie,
    Slow,
    Refusal,
    Silence,
    Outage,
    Full,
    FailingFlush,
    PowerLoss,
    Scrub,
    PoolChange,
    PolicyChange,
    Grow,
    Add,
    ClockSet,
}

/// Runs until the workers have ended or the seed's faults are used up.
pub async fn rage(life: Rc<Life>, mut prng: Prng) {
    let acts = acts(&life);
    if acts.is_empty() {
        return;
    }
    if life.plan.spares && prng.chance(1, 2) {
        // Drives that did not come back from the last life.
        let members = 0..life.array.layout().members();
        let gone: Vec<usize> = members.filter(|index| is_gone(&life, *index)).collect();
        for index in gone {
            give_spare(&life, index, &mut prng).await;
        }
    }
    let count = prng.below(life.plan.faults_max + 1);
    for _ in 0..count {
        let longest = match life.plan.single {
            None => [100_000, 10_000_000, 500_000_000][prng.index(3)],
            // As long as a few requests of a small workload.
            Some(_) => 1_000_000,
        };
        life.reactor.sleep(Duration::from_nanos(prng.below(longest))).await;
        // What drives have that wait for a start is all that there is.
        let is_over = life.waits_for_start() || life.has_let_go();
        if life.working.get() == 0 || life.world.borrow().is_dark() || is_over {
            return;
        }
        life.refresh_fleet();
        strike(&life, acts[prng.index(acts.len())], &mut prng).await;
        let impaired = life.fleet.borrow().any_impaired();
        life.impaired_seen.set(life.impaired_seen.get() | impaired);
    }
}

fn acts(life: &Life) -> Vec<Act> {
    let plan = &life.plan;
    // With more faults than the level bears nobody may be left who has the newest record.
    let lies = plan.lies != Lies::None && !(plan.lies == Lies::Metadata && plan.beyond);
    let kinds = [
        (plan.deaths, Act::Death),
        (plan.pulls, Act::Pull),
        (plan.pulls, Act::PlugIn),
        (plan.spares, Act::Spare),
        (plan.spares, Act::Rebuild),
        (plan.latent, Act::Latent),
        (lies, Act::Lie),
        (lies, Act::Lie),
        (plan.slow, Act::Slow),
        (plan.refusals, Act::Refusal),
        (plan.refusals, Act::Refusal),
        (plan.silences, Act::Silence),
        (plan.outages, Act::Outage),
        (plan.outages, Act::Outage),
        (plan.full, Act::Full),
        (plan.full, Act::Full),
        (plan.failing_flushes, Act::FailingFlush),
        (plan.failing_flushes, Act::FailingFlush),
        (plan.power_losses, Act::PowerLoss),
        (plan.power_losses, Act::PowerLoss),
        (plan.scrubs, Act::Scrub),
        (plan.pool_changes || plan.has_others(), Act::PoolChange),
        (plan.policy_changes, Act::PolicyChange),
        (plan.grows, Act::Grow),
        (plan.adds, Act::Add),
        (plan.clock_is_set, Act::ClockSet),
    ];
    kinds.into_iter().filter(|(there, _)| *there).map(|(_, act)| act).collect()
}

async fn strike(life: &Rc<Life>, act: Act, prng: &mut Prng) {
    let index = prng.index(life.array.layout().members());
    let drive = life.fleet.borrow().slots[index];
    match act {
        Act::Death => {
            if life.fleet.borrow().may_impair(index) {
                let after = 1 + prng.below(200);
                life.note(|| format!("drive {drive} (member {index}) dies after {after} more"));
                life.fleet.borrow_mut().impair(index, Some(drive));
                life.world.borrow_mut().plan(after, AtCompletion::Death(drive));
            }
        }
        Act::Pull => {
            if life.fleet.borrow().may_impair(index) {
                life.note(|| format!("member {index} (drive {drive}) is pulled"));
                life.fleet.borrow_mut().impair(index, None);
                let _ = life.array.pull_member(MemberIndex::new(index));
            }
        }
        Act::PlugIn => {
            if let Some(index) = an_impaired(life, index) {
                let drive = life.fleet.borrow().slots[index];
                plug_in(life, index, drive).await;
            }
        }
        Act::Spare => {
            if let Some(index) = an_impaired(life, index) {
                give_spare(life, index, prng).await;
            }
        }
        Act::Rebuild => rebuild(life).await,
        Act::Latent => latent(life, index, drive, prng),
        Act::Lie => lie(life, index, drive, prng),
        Act::Slow => {
            let mut world = life.world.borrow_mut();
            let until = world.now_ns() + prng.below(1_000_000_000);
            let drive = world.drive(drive);
            drive.slow_factor = [10, 100, 1000][prng.index(3)];
            drive.slow_until_ns = until;
        }
        Act::Refusal => refusal(life, index, drive, prng),
        Act::Silence => silence(life, index, drive, prng),
        Act::Outage if !life.fleet.borrow().may_be_out() => {}
        Act::Outage => outage::outage(life, prng).await,
        Act::Full => full::full(life, prng).await,
        Act::FailingFlush => cache::failing_flushes(life, index, drive, prng),
        Act::PowerLoss => cache::power_loss(life, index, drive, prng),
        Act::Scrub => {
            let (stop, repair) = (prng.chance(1, 4), prng.chance(1, 2));
            let done = if stop { life.array.stop_scrub() } else { life.array.start_scrub(repair) };
            life.note(|| format!("scrub (stop: {stop}): {done:?}"));
        }
        Act::PoolChange if life.plan.has_others() => others::change(life, prng).await,
        Act::PoolChange => pool_change(life, prng).await,
        Act::PolicyChange => policy_change(life, prng).await,
        Act::Grow => grow(life, prng).await,
        Act::Add => add_members(life, prng).await,
        Act::ClockSet => set_clock(life, prng),
    }
    life.refresh_fleet();
}

/// Somebody sets the host's clock forward or back, by hours or by years.
fn set_clock(life: &Life, prng: &mut Prng) {
    let most_s = [3600, 86_400, 20 * 365 * 86_400][prng.index(3)];
    let by_s = i64::try_from(prng.below(most_s)).unwrap_or(0);
    let by_s = if prng.chance(1, 2) { by_s } else { -by_s };
    life.note(|| format!("the clock is set by {by_s} s"));
    let clock_set_s = &mut life.world.borrow_mut().clock_set_s;
    *clock_set_s += by_s;
}

async fn rebuild(life: &Rc<Life>) {
    life.note(|| "rebuild what can be".into());
    let fleet = life.fleet.clone();
    let done = life.array.rebuild(|| fleet.borrow_mut().new_uuid(255)).await;
    life.note(|| format!("rebuild: {done:?}"));
}

/// A drive fails writes of all it has, or of some area, for a while; then it is asked to take part
/// again.
fn refusal(life: &Rc<Life>, index: usize, drive: u32, prng: &mut Prng) {
    if !life.fleet.borrow().may_impair(index) {
        return;
    }
    life.fleet.borrow_mut().impair(index, None);
    let areas = life.plan.areas();
    let all = Area { offset: 0, len: life.fleet.borrow().bytes() };
    let area = [all, areas.data, areas.data, areas.journal, areas.superblocks][prng.index(5)];
    let longest = [1_000_000, 100_000_000, 2_000_000_000][prng.index(3)];
    let long = Duration::from_nanos(prng.below(longest));
    life.note(|| format!("drive {drive} (member {index}) refuses {area:?} for {long:?}"));
    life.world.borrow_mut().drive(drive).refuses = Some(area);
    let life = life.clone();
    life.reactor.clone().spawn(async move {
        life.reactor.sleep(long).await;
        life.note(|| format!("drive {drive} takes writes again"));
        life.world.borrow_mut().drive(drive).refuses = None;
        // It may be known to be behind.
        life.refresh_fleet();
        rebuild(&life).await;
        life.refresh_fleet();
    });
}

/// All drives, or one, answer nothing for a while: an array gives up one for that if its time is
/// over, but not because of what all have in common.
fn silence(life: &Rc<Life>, index: usize, drive: u32, prng: &mut Prng) {
    let longest_s = [1, 12, 30][prng.index(3)];
    let long = prng.below(longest_s * 1_000_000_000);
    let until = life.world.borrow().now_ns() + long;
    let (all, comes_back) = (prng.chance(1, 2), prng.chance(1, 2));
    if all {
        let over = life.world.borrow().silent_until_ns + WAKING_NS_MAX;
        // One at a time: those of the last one answer first.
        if life.world.borrow().now_ns() >= over {
            // No draw of its own: others are what they were.
            let frozen = long % 2 == 1;
            let what = if frozen { "takes writes" } else { "answers" };
            life.note(|| format!("no drive {what} for {} ms", long / 1_000_000));
            let mut world = life.world.borrow_mut();
            (world.silent_until_ns, world.frozen) = (until, frozen);
        }
        return;
    }
    if !life.fleet.borrow().may_impair(index) {
        return;
    }
    life.note(|| format!("drive {drive} (member {index}) is silent for {} ms", long / 1_000_000));
    life.fleet.borrow_mut().impair(index, None);
    {
        let mut world = life.world.borrow_mut();
        let its = world.drive(drive);
        its.silent_until_ns = its.silent_until_ns.max(until);
        its.misses += 1;
    }
    let life = life.clone();
    life.reactor.clone().spawn(async move {
        life.reactor.sleep(Duration::from_nanos(long)).await;
        heard_of_all(&life, drive).await;
        let status = life.array.status();
        let its = &status.members[index].drive;
        let is_given_up = its.as_ref().is_none_or(|its| !its.is_alive());
        let is_same = life.fleet.borrow().slots[index] == drive;
        if comes_back && is_given_up && is_same {
            plug_in(&life, index, drive).await;
        }
        life.refresh_fleet();
    });
}

/// What a drive has missed may wait for another, before anyone hears of it.
async fn heard_of_all(life: &Rc<Life>, drive: u32) {
    life.heard_of_all().await;
    life.world.borrow_mut().drive(drive).misses -= 1;
}

fn is_gone(life: &Life, index: usize) -> bool {
    life.array.status().members[index].drive.is_none()
}

async fn give_spare(life: &Rc<Life>, index: usize, prng: &mut Prng) {
    let spare = life.fleet.borrow_mut().new_drive();
    life.note(|| format!("member {index} gets drive {spare}"));
    let is_new = replace(life, index, spare).await;
    life.world.borrow_mut().changes.filled += u64::from(is_new);
    life.refresh_fleet();
    if life.ends_suddenly && prng.chance(1, 2) {
        // While it is filled.
        life.world.borrow_mut().plan(prng.below(500), AtCompletion::Dark);
    }
}

/// The first member from `index` on that is impaired.
fn an_impaired(life: &Life, index: usize) -> Option<usize> {
    let fleet = life.fleet.borrow();
    let members = fleet.slots.len();
    let mut all = (0..members).map(|more| (index + more) % members);
    all.find(|index| fleet.is_impaired(*index))
}

fn latent(life: &Life, index: usize, drive: u32, prng: &mut Prng) {
    let has_some = !life.world.borrow_mut().drive(drive).is_sound();
    if !has_some && !life.fleet.borrow().may_impair(index) {
        return;
    }
    life.fleet.borrow_mut().impair(index, None);
    let layout = life.array.layout();
    let hot = crate::workload::hot_stripes(&life.plan, layout.stripes);
    let areas = life.plan.areas();
    // Beside an old checksum of the same block it would be two wrongs of one drive, and the others
    // may be too few to say which of the two is wrong.
    let has_old_sums =
        life.plan.lies == Lies::Checksums && life.world.borrow_mut().drive(drive).lied;
    let spares_data = has_old_sums && !life.plan.beyond;
    for _ in 0..1 + prng.below(4) {
        let at = if prng.chance(1, 4) || spares_data {
            // Somewhere in the metadata.
            prng.below(areas.data.offset)
        } else {
            let stripe = StripeIndex(hot[prng.index(hot.len())]);
            let row = prng.below(layout.chunk_bytes.into());
            areas.data.offset + layout.member_offset(stripe, 0) + row
        };
        let mut world = life.world.borrow_mut();
        world.note(|| format!("drive {drive} (member {index}) cannot read at {at}"));
        let its = world.drive(drive);
        its.latent.insert(at / SECTOR_BYTES as u64);
        its.sums_in_doubt |= areas.integrity.range().contains(&at);
    }
}

/// A drive does not do what it says, of data, of checksums or of metadata.
fn lie(life: &Life, index: usize, drive: u32, prng: &mut Prng) {
    if !life.fleet.borrow().is_impaired(index) && !life.fleet.borrow().may_impair(index) {
        return;
    }
    if life.plan.lies == Lies::Metadata {
        return lie_about_metadata(life, index, drive, prng);
    }
    let (areas, layout) = (life.plan.areas(), life.array.layout());
    let sums = life.plan.lies == Lies::Checksums;
    let is_unreadable = |its: &SimDrive| {
        its.latent.range(areas.data.offset / SECTOR_BYTES as u64..).next().is_some()
    };
    // As with latent errors.
    if sums && !life.plan.beyond && is_unreadable(life.world.borrow_mut().drive(drive)) {
        return;
    }
    life.fleet.borrow_mut().impair(index, None);
    let hot = crate::workload::hot_stripes(&life.plan, layout.stripes);
    let mut world = life.world.borrow_mut();
    for _ in 0..1 + prng.below(3) {
        let stripe = StripeIndex(hot[prng.index(hot.len())]);
        let row = u32::try_from(prng.below(layout.chunk_bytes.into())).unwrap_or(0);
        let data = layout.member_offset(stripe, row);
        let sum = data / BLOCK_BYTES as u64 / BLOCKS_PER_PAGE * PAGE_BYTES;
        // Of a block and its checksum only one: where many lie, nobody could tell.
        let what = if life.plan.beyond { 1 + prng.below(6) } else { prng.below(7) };
        let its = world.drive(drive);
        let (within, at) = match what {
            0 => (areas.integrity, sum + prng.below(PAGE_BYTES)),
            _ if sums => (areas.integrity, sum),
            _ => (areas.data, data),
        };
        let at = within.offset + at;
        its.sums_in_doubt |= within == areas.integrity;
        match what {
            0..3 => its.rot(at),
            3..6 => its.mischief.push_back(Mischief::Lose { within }),
            _ => {
                let step = if sums { PAGE_BYTES } else { layout.chunk_bytes.into() };
                let by = step * (1 + prng.below(3));
                its.mischief.push_back(Mischief::Misdirect { within, by });
            }
        }
        world.note(|| format!("drive {drive} (member {index}) lies, kind {what}, at {at}"));
    }
}

/// Records rot, are lost, or land where another belongs.
fn lie_about_metadata(life: &Life, index: usize, drive: u32, prng: &mut Prng) {
    life.fleet.borrow_mut().impair(index, None);
    let MemberLayout { superblocks, dirty_map, written_map, journal, .. } = life.plan.areas();
    let MemberLayout { volume_table, missed_map, bad_blocks, .. } = life.plan.areas();
    let maps = [dirty_map, written_map, missed_map];
    let within = match prng.below(8) {
        0..3 => superblocks,
        3 => maps[prng.index(maps.len())],
        4 => volume_table,
        5 => bad_blocks,
        _ => journal,
    };
    // One write or a few, or all that come from now on.
    let count = [1, 3, 100][prng.index(3)];
    let mut world = life.world.borrow_mut();
    let its = world.drive(drive);
    // What it was to do to an area that is hardly written would keep it from this.
    its.mischief.clear();
    for _ in 0..count {
        match prng.below(7) {
            // Of a map or the journal the beginning is what is in use.
            0..2 if count < 100 => {
                its.rot(within.offset + prng.below(within.len.min(ROT_WITHIN_BYTES)));
            }
            0..5 => its.mischief.push_back(Mischief::Lose { within }),
            _ => {
                let by = BLOCK_BYTES as u64 * (1 + prng.below(3));
                its.mischief.push_back(Mischief::Misdirect { within, by });
            }
        }
    }
    let at = within.offset;
    world.note(|| format!("drive {drive} (member {index}) lies {count} times of area {at}"));
}

/// What is durable before a write is acknowledged changes while writes are under way.
async fn policy_change(life: &Rc<Life>, prng: &mut Prng) {
    let policies = life.plan.geometry.policies();
    let policy = policies[prng.index(policies.len())];
    life.note(|| format!("policy {policy:?}"));
    if policy != Policy::Journal {
        life.oracle.borrow_mut().no_longer_atomic();
    }
    life.world.borrow_mut().changes.policy += 1;
    let turns = life.outage_turns();
    let done = life.array.set_policy(policy).await;
    life.world.borrow_mut().changes.policy -= u64::from(done.is_err());
    life.note(|| format!("policy {policy:?}: {done:?}"));
    match done {
        Ok(()) | Err(ChangeError::Array(ArrayError::Stopped)) => {}
        Err(error) if life.may_not_fail(turns) => {
            life.fail(format!("the policy cannot be changed: {error}"));
        }
        Err(_) => {}
    }
}

/// The drives get larger, or have before; the array uses that, and so does the volume.
async fn grow(life: &Rc<Life>, prng: &mut Prng) {
    if prng.chance(2, 3) && life.fleet.borrow().bytes() < DRIVE_BYTES_MAX {
        let more = BLOCK_BYTES as u64 * (1 + prng.below(512));
        let bytes = life.fleet.borrow_mut().grow(more);
        life.note(|| format!("the drives grow to {bytes} bytes"));
        let drives = life.array.status().members.into_iter().filter_map(|member| member.drive);
        drives.for_each(|drive| drive.grow(bytes));
    }
    let before = life.array.capacity();
    life.world.borrow_mut().changes.grown += 1;
    let turns = life.outage_turns();
    let done = life.array.grow().await;
    life.world.borrow_mut().changes.grown -= u64::from(done.is_err());
    life.note(|| format!("grow from {before}: {done:?}"));
    match done {
        Ok(_) => widen(life).await,
        Err(ChangeError::Array(ArrayError::Lost | ArrayError::NoSpace))
            if life.may_not_fail(turns) =>
        {
            life.fail(format!("the array cannot grow: {done:?}"));
        }
        Err(_) => {}
    }
}

/// The array gets members, once or twice.
async fn add_members(life: &Rc<Life>, prng: &mut Prng) {
    let layout = life.array.layout();
    let added = layout.members() - life.plan.geometry.members;
    if layout.groups > 1 || layout.level == Level::Raid1 || added > usize::from(layout.copies) {
        return;
    }
    let mut drives = Vec::new();
    for _ in 0..layout.copies {
        let drive = life.fleet.borrow_mut().joining_drive();
        let fleet = life.fleet.borrow();
        drives.push((fleet.uuid(drive), fleet.open(&life.reactor, drive)));
    }
    life.world.borrow_mut().changes.added += 1;
    let turns = life.outage_turns();
    let done = life.array.add_members(drives).await;
    life.world.borrow_mut().changes.added -= u64::from(done.is_err());
    life.note(|| format!("members are added to {}: {done:?}", layout.members()));
    match done {
        Ok(()) if life.ends_suddenly && prng.chance(1, 2) => {
            // While everything is moved.
            life.world.borrow_mut().plan(prng.below(2000), AtCompletion::Dark);
        }
        Err(ChangeError::Array(ArrayError::Lost | ArrayError::NoSpace))
            if life.may_not_fail(turns) =>
        {
            life.fail(format!("members cannot be added: {done:?}"));
        }
        Ok(()) | Err(_) => {}
    }
}

/// Makes the volume larger, if what is free lies behind it: checkers look for its bytes there.
async fn widen(life: &Rc<Life>) {
    if life.pool.volumes().len() > 1 {
        return;
    }
    let bytes = life.volume.bytes() + life.pool.free_bytes() / 2 / 512 * 512;
    life.oracle.borrow_mut().volumes.change_begins("main", Some(bytes));
    let done = life.pool.resize("main", bytes).await;
    life.note(|| format!("resize volume main to {bytes}: {done:?}"));
    if done.is_ok() {
        life.oracle.borrow_mut().volumes.changed("main", Some(bytes));
        life.bytes.set(bytes);
    }
}

/// Volumes beside the one that is worked on come and go.
async fn pool_change(life: &Rc<Life>, prng: &mut Prng) {
    let stripe = life.array.stripe_bytes();
    let (name, turns) = ("extra", life.outage_turns());
    let extra = life.pool.volume(name).map(|extra| extra.bytes());
    let (what, then) = match (extra, prng.chance(1, 2)) {
        (None, _) => ("create", Some(2 * stripe)),
        (Some(bytes), true) => ("resize", Some(bytes + 512 * (1 + prng.below(9)))),
        (Some(_), false) => ("delete", None),
    };
    life.oracle.borrow_mut().volumes.change_begins(name, then);
    let done = match (extra, then) {
        (None, Some(bytes)) => life.pool.create([3; 16], name, bytes).await.map(|_| ()),
        (_, Some(bytes)) => life.pool.resize(name, bytes).await,
        (_, None) => life.pool.delete(name).await,
    };
    if done.is_ok() {
        life.oracle.borrow_mut().volumes.changed(name, then);
    }
    life.note(|| format!("{what} volume {name}: {done:?}"));
    let stopped = PoolError::Array(ArrayError::Stopped);
    match done {
        Err(error) if error == stopped => {}
        Err(PoolError::Array(error)) if life.may_not_fail(turns) => {
            life.fail(format!("{what} of a volume failed: {error}"));
        }
        Err(_) | Ok(()) => {}
    }
}
