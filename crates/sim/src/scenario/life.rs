//! One life of an array: how it is started, what is done while it serves, and how it stops.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use ashlar_format::array_superblock::{MemberState, Policy};
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::lease::Host;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_raid::status::{ArrayState, ArrayStatus};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::wait_list::WaitList;

use super::Phase;
use crate::chaos;
use crate::checkers;
use crate::drive::{ARRAY_UUID, SimDrive};
use crate::faults::{Ending, Plan, Single};
use crate::fleet::Fleet;
use crate::hosts::SECOND;
use crate::inspect;
use crate::oracle::Oracle;
use crate::others;
use crate::rival;
use crate::served::Others;
use crate::sight::Sight;
use crate::volumes::are_known_to_all;
use crate::workload::Life;
use crate::world::{AtCompletion, SharedWorld};

/// What is left to volumes beside the main one, at least.
const STRIPES_OF_OTHERS: u64 = 8;

/// How a life came to its end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum End {
    Stopped,
    /// Some drives could not be reached; they have what they had.
    Halted,
    /// Another host has the array, or may have.
    Refused,
    GivenUp,
}

pub(super) struct Seedling {
    pub(super) reactor: Reactor,
    pub(super) plan: Rc<Plan>,
    pub(super) world: SharedWorld,
    pub(super) oracle: Rc<RefCell<Oracle>>,
    pub(super) fleet: Rc<RefCell<Fleet>>,
    pub(super) unsure: Rc<RefCell<BTreeSet<u64>>>,
    pub(super) ever_unsure: Rc<RefCell<BTreeSet<u64>>>,
    pub(super) covered: Rc<Cell<bool>>,
    pub(super) prng: Prng,
    /// A life that ends suddenly does so after so many operations of its stop.
    pub(super) cut_stop: Option<u64>,
    pub(super) single: Option<Single>,
    pub(super) place: usize,
    pub(super) host: Option<Host>,
    /// Of the one that comes for the array, if one does.
    pub(super) rival: Option<Prng>,
}

impl Seedling {
    /// Which stripes wait for resync in a life that begins, and which have bad blocks.
    pub(super) fn expect_unsure(&self, mut unsure: BTreeSet<u64>, bad: BTreeSet<u64>) {
        let (count, covered) = (unsure.len(), self.covered.get());
        self.world.borrow_mut().note(|| format!("{count} stripes are unsure, covered {covered}"));
        if covered && !unsure.is_empty() && !self.plan.beyond {
            let why = "the journal did not cover all writes".into();
            self.world.borrow_mut().fail(why);
        }
        if self.plan.geometry.layout().parity == 0 {
            // Copies that differ can be read, each by itself.
            unsure.clear();
        }
        self.ever_unsure.borrow_mut().extend(&unsure);
        if !bad.is_subset(&self.ever_unsure.borrow()) && !self.plan.beyond {
            let why = format!("{bad:?}: not all of them were unsure once, and some are given up");
            self.world.borrow_mut().fail(why);
        }
        unsure.extend(bad);
        *self.unsure.borrow_mut() = unsure;
    }
}

pub(super) async fn create(seedling: Seedling, phase: Phase) -> End {
    let plan = seedling.plan.clone();
    let spec = ArraySpec {
        uuid: ARRAY_UUID,
        name: "sim".into(),
        level: plan.geometry.level,
        chunk_bytes: plan.geometry.chunk_bytes,
        shape: plan.geometry.shape,
        policy: plan.policy,
        integrity: plan.integrity,
        settings: plan.settings,
        host: seedling.host,
    };
    let drives = {
        let fleet = seedling.fleet.borrow();
        let open = |drive: &u32| (fleet.uuid(*drive), fleet.open(&seedling.reactor, *drive));
        fleet.slots.iter().map(open).collect()
    };
    let array = match Array::create(&seedling.reactor, &spec, drives).await {
        Ok(array) => array,
        Err(error) => {
            seedling.world.borrow_mut().fail(format!("the array cannot be created: {error}"));
            return End::GivenUp;
        }
    };
    let pool = Pool::open(array.clone()).await.expect("a new array has a table");
    let stripes = array.layout().stripes;
    let others = if plan.volumes { STRIPES_OF_OTHERS.min(stripes - 1) } else { 0 };
    let bytes = (stripes - others.max(stripes / 8)) * array.stripe_bytes();
    if let Err(error) = pool.create([1; 16], "main", bytes).await {
        seedling.world.borrow_mut().fail(format!("the volume cannot be created: {error}"));
        return End::GivenUp;
    }
    seedling.oracle.borrow_mut().volumes.changed("main", Some(bytes));
    let status = array.status();
    if (status.unsynced_stripes, status.written_regions) != (0, 0) {
        let why = format!("a new array has {} written regions", status.written_regions);
        seedling.world.borrow_mut().fail(why);
    }
    seedling.world.borrow_mut().canary_awake = true;
    go_on(seedling, array, pool, phase).await
}

pub(super) async fn assemble(seedling: Seedling, offered: Vec<u32>, phase: Phase) -> End {
    let start = async |remembers, force| {
        let handles = {
            let fleet = seedling.fleet.borrow();
            offered.iter().map(|drive| fleet.open(&seedling.reactor, *drive)).collect()
        };
        let options = AssembleOptions {
            force,
            known: remembered(&seedling, &offered, remembers),
            host: seedling.host,
            sum_pages_max: seedling.plan.sum_pages_max,
            ..AssembleOptions::default()
        };
        Array::assemble(&seedling.reactor, handles, options).await
    };
    let mut last = None;
    for remembers in [Remembers::Nothing, Remembers::Newest, Remembers::WhatIsHere] {
        match start(remembers, false).await {
            Ok(array) => return assembled(seedling, array, phase).await,
            Err(error @ (AssembleError::MaybeOld | AssembleError::Unheard))
                if may_refuse(&seedling, &offered) =>
            {
                seedling.world.borrow_mut().note(|| format!("{remembers:?}: {error}"));
                last = Some(error);
                if seedling.plan.beyond {
                    // Nobody may insist here: newer data may be on the absent drives.
                    break;
                }
            }
            Err(error) => {
                last = Some(error);
                break;
            }
        }
    }
    if seedling.place == SECOND {
        seedling.world.borrow_mut().note(|| format!("the other host: {last:?}"));
        return End::Refused;
    }
    let is_journal = matches!(last, Some(AssembleError::Journal { .. }));
    if is_journal && seedling.plan.beyond && !seedling.plan.comes_back_whole() {
        match start(Remembers::Nothing, true).await {
            Ok(array) => {
                seedling.world.borrow_mut().past_limit.forced += 1;
                seedling.world.borrow_mut().note(|| "started by force".into());
                return assembled(seedling, array, phase).await;
            }
            Err(error) => last = Some(error),
        }
    }
    let why = last.map_or(String::new(), |error| error.to_string());
    if seedling.plan.beyond {
        seedling.world.borrow_mut().note(|| format!("not assembled: {why}"));
    } else {
        seedling.world.borrow_mut().fail(format!("the array cannot be assembled: {why}"));
    }
    End::GivenUp
}

/// What the host that starts the array knows of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Remembers {
    Nothing,
    /// The newest that any drive holds.
    Newest,
    /// No more than those that are offered: an operator says that this will do.
    WhatIsHere,
}

fn remembered(seedling: &Seedling, offered: &[u32], remembers: Remembers) -> Option<Known> {
    let world = seedling.world.borrow();
    let all = || world.drives.iter();
    let here = || {
        let offered = offered.iter().map(|drive| &world.drives[*drive as usize]);
        offered.filter(|drive| !drive.dead)
    };
    let epoch_of = |drives: &mut dyn Iterator<Item = &SimDrive>| drives.map(inspect::epoch).max();
    let (generation, epoch) = match remembers {
        Remembers::Nothing => return None,
        Remembers::Newest => {
            let newest = inspect::newest(all());
            let generation = newest.map_or(0, |newest| newest.header.sequence.get());
            (generation, epoch_of(&mut all()))
        }
        Remembers::WhatIsHere => (0, epoch_of(&mut here())),
    };
    // A rival's operator does not insist on drives that others went on without.
    let insists = remembers == Remembers::WhatIsHere && seedling.place != SECOND;
    let newest = if insists { inspect::newest(here()) } else { inspect::newest(all()) };
    let members = newest.iter().flat_map(|its| its.members());
    let trusted = members.filter(|its| its.state() == Ok(MemberState::Trusted));
    let epoch = epoch.unwrap_or(0);
    let current = trusted.map(|its| its.drive).collect();
    Some(Known { generation, epoch, last_epoch: epoch, current })
}

/// Whether a member that the newest superblock trusts is not among the drives.
fn may_refuse(seedling: &Seedling, offered: &[u32]) -> bool {
    let world = seedling.world.borrow();
    let drives = || offered.iter().map(|drive| &world.drives[*drive as usize]);
    let Some(newest) = inspect::newest(drives()) else { return true };
    let here = |uuid: [u8; 16]| drives().any(|d| !d.dead && inspect::owner(d) == Some(uuid));
    let mut members = newest.members().iter();
    members.any(|m| m.state() == Ok(MemberState::Trusted) && !here(m.drive))
}

async fn assembled(seedling: Seedling, array: Rc<Array>, phase: Phase) -> End {
    seedling.takes_over();
    let pool = match Pool::open(array.clone()).await {
        Ok(pool) => pool,
        Err(error) => {
            if !seedling.plan.beyond {
                seedling.world.borrow_mut().fail(format!("no volume table: {error}"));
            }
            return End::GivenUp;
        }
    };
    let look = |name: &str| pool.volume(name).map(|volume| volume.bytes());
    let plan = &seedling.plan;
    let is_settled = !plan.outages && !plan.beyond && are_known_to_all(&array.status());
    let found = seedling.oracle.borrow_mut().volumes.found(look, is_settled);
    if let Some(why) = found.err().filter(|_| !plan.beyond) {
        seedling.world.borrow_mut().fail(why);
    }
    if pool.volume("main").is_none() {
        return End::GivenUp;
    }
    go_on(seedling, array, pool, phase).await
}

/// The array runs: work, faults, and the end.
async fn go_on(mut seedling: Seedling, array: Rc<Array>, pool: Rc<Pool>, phase: Phase) -> End {
    let volume = pool.volume("main").expect("looked at before");
    let status = array.status();
    seedling.world.borrow_mut().comes_up();
    seedling.fleet.borrow_mut().refresh(&status);
    seedling.covered.set(is_covered(&seedling.plan, &status));
    seedling.oracle.borrow_mut().settled();
    let others = Others::found(&pool, &mut seedling.oracle.borrow_mut());
    // A fault that was to come in the start may come later.
    let may_be = seedling.plan.single.is_some_and(|single| single.in_start);
    let is_impaired = may_be || seedling.fleet.borrow().any_impaired() || !status.bad.is_empty();
    let life = Rc::new(Life {
        impaired_seen: Cell::new(is_impaired),
        ends_suddenly: matches!(phase, Phase::Safety(ending) if ending != Ending::CleanStop),
        single: seedling.single,
        plan: seedling.plan.clone(),
        world: seedling.world.clone(),
        reactor: seedling.reactor.clone(),
        place: seedling.place,
        array,
        pool,
        bytes: Cell::new(volume.bytes()),
        volume,
        oracle: seedling.oracle.clone(),
        fleet: seedling.fleet.clone(),
        unsure: seedling.unsure.clone(),
        ever_unsure: seedling.ever_unsure.clone(),
        working: Cell::new(0),
        waiting: WaitList::default(),
        outage: Cell::default(),
        outage_turns: Cell::default(),
        covered: seedling.covered.clone(),
        sight: Sight::default(),
        others,
    });
    match phase {
        Phase::PastLimit => checkers::past_limit(&life, &mut seedling.prng).await,
        Phase::Rebuild => {
            checkers::become_whole(&life, false).await;
        }
        Phase::Liveness => checkers::liveness(&life).await,
        Phase::Safety(ending) => {
            plan_ending(&life, ending, &mut seedling.prng);
            safety(&life, &mut seedling.prng, seedling.rival.take()).await;
            if life.is_replaced() {
                // With or without an error: it has nothing to put to rest.
                let _ = life.array.stop().await;
                life.world.borrow_mut().hosts.has_ended = true;
                return End::Halted;
            }
            // A single fault may come in the stop, too.
            if ending != Ending::CleanStop && seedling.single.is_none() {
                let Some(after) = seedling.cut_stop else {
                    life.world.borrow_mut().go_dark();
                    return std::future::pending().await;
                };
                life.world.borrow_mut().plan(after, AtCompletion::Dark);
            }
        }
    }
    stop(&life).await
}

/// Whether the journal covers all writes of a life that begins.
fn is_covered(plan: &Plan, status: &ArrayStatus) -> bool {
    if status.unsynced_stripes > 0 || plan.policy_changes {
        return false;
    }
    let degraded = status.state != ArrayState::Optimal && status.parity_chunks > 0;
    // What is rebuilt may become optimal, and lose a member while it is written healthily.
    let loses_caches = plan.failing_flushes || plan.power_losses;
    let away = plan.pulls || plan.refusals || plan.outages || loses_caches;
    let rebuilt = plan.spares || away || status.rebuild.is_some();
    match status.policy {
        Policy::Journal => true,
        Policy::Bitmap => degraded && !rebuilt,
        Policy::None => false,
    }
}

fn plan_ending(life: &Life, ending: Ending, prng: &mut Prng) {
    if life.plan.single.is_some() {
        if let Some(single) = life.single {
            life.world.borrow_mut().plan(single.after, single.at_completion());
        }
        return;
    }
    if ending != Ending::CleanStop {
        let requests = life.plan.workers as u64 * life.plan.ops_per_worker;
        let share = [1, 4, 12][prng.index(3)];
        let after = prng.below(requests * share);
        life.world.borrow_mut().plan(after, AtCompletion::Dark);
    }
}

/// `rival`: another host comes.
async fn safety(life: &Rc<Life>, prng: &mut Prng, mut rival: Option<Prng>) {
    {
        let mut world = life.world.borrow_mut();
        for drive in &mut world.drives {
            drive.transient_one_in = life.plan.transient_one_in;
        }
    }
    if life.plan.has_others() {
        others::come(life, prng).await;
    }
    if let Some(prng) = rival.as_mut().filter(|_| life.plan.returns) {
        rival::history(life, prng).await;
    }
    life.start_workers(prng);
    life.reactor.spawn(chaos::rage(life.clone(), Prng::from_seed(prng.next_u64())));
    if let Some(rival) = rival {
        life.reactor.spawn(rival::comes(life.clone(), rival));
    }
    life.workers_ended().await;
    rival::has_gone(life).await;
    rival::has_heard(life).await;
}

async fn stop(life: &Rc<Life>) -> End {
    checkers::accusations(life);
    let status = life.array.status();
    life.world.borrow_mut().hedged += status.counters.hedged;
    // What drives lie about is mended before it is compared.
    if let Some(report) = status.scrub.report().filter(|report| report.mismatched_stripes > 0) {
        life.fail(format!("stripes did not agree: {report:?}"));
    }
    let began = life.oracle.borrow_mut().flush_begins();
    life.world.borrow_mut().changes.drained += u64::from(status.journal.pending_bytes > 0);
    match life.array.stop().await {
        Ok(()) => {
            let mut oracle = life.oracle.borrow_mut();
            oracle.flush_ends(began);
            let served = |name: &str| life.pool.volume(name).map(|volume| volume.bytes());
            oracle.volumes.are(served);
        }
        Err(error) if life.waits_for_start() || life.is_contested() => {
            life.note(|| format!("stop: {error} (its drives are away, or another's)"));
            return End::Halted;
        }
        Err(error) if life.plan.beyond => {
            life.note(|| format!("stop: {error} (allowed)"));
        }
        Err(error) => life.fail(format!("the array cannot stop: {error}")),
    }
    // What a drive that was given up still has, nobody waits for.
    let status = life.array.status();
    let alive = status.members.iter().filter_map(|member| member.drive.as_ref());
    let alive: Vec<&str> = alive.filter(|its| its.is_alive()).map(|its| its.name()).collect();
    let mut left = life.world.borrow().in_flight(|its| alive.contains(&format!("d{its}").as_str()));
    // It was asked whether it answers, and nobody waits for that.
    left.retain(|op| !op.contains(" (\"read\", 0, 4096)"));
    if !left.is_empty() {
        life.fail(format!("stopped with {left:?} in flight"));
    }
    End::Stopped
}
