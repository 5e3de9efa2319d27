//! One seed from its first byte to its verdict: lives with faults (safety), then one without
//! (liveness).
//!
//! What the daemon would remember between lives is the array's generation. The array is first
//! assembled without it. It may refuse only if a member that the newest superblock trusts is not
//! among the drives (`MaybeOld`); then it is told the newest generation that any drive holds, dead
//! ones too, as the daemon would know it; and if it still refuses, the operator insists. (The
//! budget never takes the only members with acknowledged data, so insisting loses nothing.)

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use ashlar_format::array_superblock::{MemberState, Policy};
use ashlar_format::region_map::{MapKind, RegionMapPage};
use ashlar_format::units::to_usize;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::error::AssembleError;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_raid::status::{ArrayState, ArrayStatus};
use ashlar_reactor::buffer::BufferPool;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::prng::Prng;
use ashlar_reactor::wait_list::WaitList;

use crate::cache;
use crate::canary::Canary;
use crate::chaos;
use crate::checkers;
use crate::drive::{ARRAY_UUID, Loss};
use crate::faults::{Ending, Plan, Single};
use crate::fleet::Fleet;
use crate::inspect;
use crate::oracle::Oracle;
use crate::others;
use crate::served::Others;
use crate::sight::Sight;
use crate::volumes::are_known_to_all;
use crate::workload::Life;
use crate::world::{AtCompletion, Changes, Outages, PastLimit, SharedWorld, SimBackend, World};

mod single;

/// A cut in a start comes within so many: some are through by then.
const OPERATIONS_OF_A_START: u64 = 400;
const OPERATIONS_OF_A_STOP: u64 = 60;
/// What is left to volumes beside the main one, at least.
const STRIPES_OF_OTHERS: u64 = 8;

/// What a seed came to.
#[derive(Clone, Debug, Default)]
pub struct Verdict {
    /// The first thing that was wrong.
    pub failure: Option<String>,
    /// Of all operations on all drives.
    pub hash: u64,
    pub completions: u64,
    pub hedged: u64,
    /// Reads that were done by a view of the array.
    pub seen: u64,
    /// Volumes that came, beside the main one.
    pub volumes_made: u64,
    /// How often members were added.
    pub added: u64,
    /// Lives that began when not everything had been given its new place yet.
    pub restriping_lives: u64,
    pub outages: Outages,
    pub past_limit: PastLimit,
    /// What had changed, or was changing, when the last planned fault struck.
    pub changes_at_fault: Changes,
    pub sectors_checked: u64,
    pub virtual_ns: u64,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Options {
    pub trace: bool,
    pub canary: Option<Canary>,
}

/// What outlives a life.
pub struct Scenario {
    pub plan: Rc<Plan>,
    pub world: SharedWorld,
    pub oracle: Rc<RefCell<Oracle>>,
    pub fleet: Rc<RefCell<Fleet>>,
    pub unsure: Rc<RefCell<BTreeSet<u64>>>,
    /// Of any life so far.
    ever_unsure: Rc<RefCell<BTreeSet<u64>>>,
    /// Engine memory. Only of this seed: what a buffer holds when it is taken must repeat, too.
    buffers: Rc<BufferPool>,
    prng: Prng,
    order: Prng,
    /// Of power cuts and crashes while an array is started or stopped.
    cuts: Prng,
    /// Of drives that die while an array is started.
    deaths: Prng,
    life: u32,
    /// A life began with every stripe in sync, and the journal covers all its writes: a crash must
    /// leave no stripe unsure.
    covered: Rc<Cell<bool>>,
    /// The array could not be assembled.
    given_up: bool,
    /// Drives of former members are offered at every start.
    all_are_back: bool,
    /// What a power cut does, if that is not drawn.
    loss: Option<Loss>,
    /// What comes while the next life serves, and nothing else.
    single: Option<Single>,
}

/// Which drives an array is made of, and how.
enum Start {
    Create,
    Assemble,
}

/// What is done in a life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Safety(Ending),
    /// More is lost than the level bears: is what can be read right?
    PastLimit,
    /// Faults are over, and members are rebuilt past what is lost: is that remembered?
    Rebuild,
    Liveness,
}

/// Runs one seed.
pub fn run(seed: u64, options: Options) -> Verdict {
    let mut scenario = Scenario::new(Plan::draw_to_find(seed, options.canary), options);
    scenario.all_lives();
    scenario.verdict()
}

impl Scenario {
    pub fn new(plan: Plan, options: Options) -> Scenario {
        let seed = plan.seed;
        let geometry = plan.geometry;
        let layout = geometry.layout();
        let mut world = World::new(seed, options.trace);
        world.canary = options.canary;
        world.canary_awake = options.canary.is_some_and(Canary::is_early);
        world.array = Some((layout, plan.areas()));
        world.trace.areas = Some(plan.areas());
        world.trace.chunk_bytes = geometry.chunk_bytes.into();
        world.note(|| plan.describe());
        let world = Rc::new(RefCell::new(world));
        let fleet = Fleet::new(&world, layout, &plan);
        Scenario {
            plan: Rc::new(plan),
            world,
            oracle: Rc::new(RefCell::new(Oracle::new(seed))),
            fleet: Rc::new(RefCell::new(fleet)),
            unsure: Rc::default(),
            ever_unsure: Rc::default(),
            buffers: BufferPool::new(),
            prng: Prng::stream(seed, "workload"),
            order: Prng::stream(seed, "order"),
            cuts: Prng::stream(seed, "cuts while it starts or stops"),
            deaths: Prng::stream(seed, "deaths while it starts"),
            life: 0,
            covered: Rc::default(),
            given_up: false,
            all_are_back: false,
            loss: None,
            single: None,
        }
    }

    pub fn verdict(&self) -> Verdict {
        let world = self.world.borrow();
        Verdict {
            failure: world.failure().map(str::to_owned),
            hash: world.trace.hash(),
            completions: world.completions,
            hedged: world.hedged,
            seen: world.seen,
            volumes_made: world.volumes_made,
            added: world.changes.added,
            restriping_lives: world.restriping_lives,
            outages: world.outages,
            past_limit: world.past_limit,
            changes_at_fault: world.changes_at_fault,
            sectors_checked: self.oracle.borrow().sectors_checked,
            virtual_ns: world.now_ns(),
        }
    }

    /// Faults are over.
    fn recover(&mut self, mut start: Start) {
        self.calm();
        let Plan { geometry, policy, policy_changes, .. } = &*self.plan;
        let uncovered = *policy_changes || policy.is_some_and(|its| its != Policy::Journal);
        if uncovered && geometry.layout().parity > 0 {
            self.live(start, Phase::Rebuild);
            start = Start::Assemble;
        }
        if !self.is_over() {
            self.live(start, Phase::Liveness);
        }
    }

    /// Drives die between two lives: those of the first members from `first` on, up to `count`, as
    /// far as the array bears it.
    fn lose_drives(&mut self, first: usize, count: usize) {
        let members = self.fleet.borrow().slots.len();
        let mut left = count;
        for index in (0..members).map(|index| (first + index) % members) {
            if left > 0 && self.fleet.borrow().may_lose(index) {
                let drive = self.fleet.borrow().slots[index];
                self.fleet.borrow_mut().impair(index, None);
                self.world.borrow_mut().kill(drive);
                left -= 1;
            }
        }
    }

    /// Drives that were out are back, with what they had, those of former members too: they are
    /// offered from now on.
    fn all_return(&mut self) {
        let mut world = self.world.borrow_mut();
        for drive in 0..world.drives.len() {
            if std::mem::take(&mut world.drives[drive].dead) {
                world.note(|| format!("drive {drive} is back"));
            }
        }
        self.all_are_back = true;
    }

    pub fn all_lives(&mut self) {
        let mut start = Start::Create;
        for _ in 0..self.plan.lives {
            let ending = self.plan.endings[self.prng.index(self.plan.endings.len())];
            self.live(start, Phase::Safety(ending));
            start = Start::Assemble;
            if self.world.borrow().failure().is_some() {
                return;
            }
            if self.given_up {
                return self.come_back();
            }
        }
        if self.plan.beyond {
            self.live(start, Phase::PastLimit);
            self.come_back();
        } else {
            self.recover(start);
        }
    }

    /// Drives that were only away are back, all of them: so is everything.
    fn come_back(&mut self) {
        if self.world.borrow().failure().is_some() || !self.plan.comes_back_whole() {
            return;
        }
        self.all_return();
        self.given_up = false;
        self.plan = Rc::new(Plan { beyond: false, ..(*self.plan).clone() });
        // What an array did that had failed, nobody kept account of.
        self.covered.set(false);
        let bad = inspect::bad_stripes(self.world.borrow().drives.iter());
        self.ever_unsure.borrow_mut().extend(bad);
        self.recover(Start::Assemble);
        if !self.is_over() {
            self.world.borrow_mut().past_limit.whole += 1;
        }
    }

    fn is_over(&self) -> bool {
        self.world.borrow().failure().is_some() || self.given_up
    }

    /// Faults are over: nothing fails any more, but dead drives stay dead.
    fn calm(&mut self) {
        let mut world = self.world.borrow_mut();
        for drive in &mut world.drives {
            drive.latent.clear();
            drive.mischief.clear();
            drive.transient_one_in = None;
            drive.slow_until_ns = 0;
        }
    }

    fn live(&mut self, start: Start, phase: Phase) {
        self.life += 1;
        self.world.borrow_mut().begin_life();
        let life = self.life;
        self.world.borrow_mut().note(|| format!("---- life {life}: {phase:?}"));
        let order = Order::Seeded(Prng::from_seed(self.order.next_u64()));
        let backend = Box::new(SimBackend::new(&self.world));
        let reactor = Reactor::with_pool(backend, order, self.buffers.clone());
        let returned = self.drives_return(&start);
        let is_cut = matches!(phase, Phase::Safety(Ending::PowerCut | Ending::ProcessCrash));
        let is_cut = is_cut && matches!(start, Start::Assemble);
        if is_cut && let Some(after) = self.cut(8, OPERATIONS_OF_A_START) {
            self.world.borrow_mut().plan(after, AtCompletion::Dark);
        }
        let end = match start {
            Start::Create => reactor.block_on(create(self.seedling(&reactor), phase)),
            Start::Assemble => {
                let offered = self.offer(returned);
                self.expect_unsure(&offered);
                let is_away = |drive| !offered.contains(drive);
                let was_short = std::mem::take(&mut self.world.borrow_mut().is_short);
                let is_short = was_short || self.fleet.borrow().slots.iter().any(is_away);
                if self.one_dies_in_the_start(phase) || is_short {
                    self.oracle.borrow_mut().some_are_away();
                }
                reactor.block_on(assemble(self.seedling(&reactor), offered, phase))
            }
        };
        self.end(end, phase);
        reactor.abandon();
    }

    /// Plans that, now and then, if the array can do without it.
    fn one_dies_in_the_start(&mut self, phase: Phase) -> bool {
        let may_die = self.plan.deaths && matches!(phase, Phase::Safety(_));
        if !may_die || !self.deaths.chance(1, 6) {
            return false;
        }
        let index = self.deaths.index(self.fleet.borrow().slots.len());
        if !self.fleet.borrow().may_lose(index) {
            return false;
        }
        let drive = self.fleet.borrow().slots[index];
        let after = 1 + self.deaths.below(OPERATIONS_OF_A_START);
        self.fleet.borrow_mut().impair(index, Some(drive));
        let mut world = self.world.borrow_mut();
        world.note(|| format!("drive {drive} (member {index}) dies after {after} more"));
        world.plan(after, AtCompletion::Death(drive));
        true
    }

    fn end(&mut self, end: Option<End>, phase: Phase) {
        if self.world.borrow().failure().is_some() {
            // Nothing of it matters any more; let its buffers go.
            self.world.borrow_mut().end_life(None);
            return;
        }
        match (end, phase) {
            (Some(End::Stopped), _) => {
                // Everything was flushed; let the power fail afterwards.
                self.world.borrow_mut().end_life(Some(Loss::draw(&mut self.prng)));
                self.oracle.borrow_mut().power_cut();
                // What made the others sure is in place.
                let bad = inspect::bad_stripes(self.world.borrow().drives.iter());
                *self.ever_unsure.borrow_mut() = bad;
            }
            (Some(End::Halted), _) => self.process_crash(),
            (Some(End::GivenUp), _) => {
                self.world.borrow_mut().end_life(None);
                // With more faults than the level bears, this ends the seed.
                self.given_up = true;
            }
            (None, Phase::Safety(Ending::PowerCut)) => {
                let loss = self.loss.unwrap_or(Loss::draw(&mut self.prng));
                self.world.borrow_mut().end_life(Some(loss));
                self.oracle.borrow_mut().power_cut();
            }
            (None, Phase::Safety(Ending::ProcessCrash)) => self.process_crash(),
            (
                None,
                Phase::Safety(Ending::CleanStop)
                | Phase::PastLimit
                | Phase::Rebuild
                | Phase::Liveness,
            ) => {
                let now_ns = self.world.borrow().now_ns();
                let why = format!("hung: nothing will ever happen again at {now_ns} ns");
                self.world.borrow_mut().fail(why);
                self.world.borrow_mut().end_life(None);
            }
        }
        self.fleet.borrow_mut().spare_all();
        if self.plan.deaths_at_end && self.prng.chance(1, 2) {
            let members = self.fleet.borrow().slots.len();
            let (first, count) = (self.prng.index(members), 1 + self.prng.index(members));
            self.lose_drives(first, count);
        }
    }

    fn process_crash(&mut self) {
        self.world.borrow_mut().end_life(None);
        if !self.covered.get() && cache::is_loss_believed(&self.world.borrow()) {
            // What was not flushed may be old.
            self.oracle.borrow_mut().power_cut();
        } else {
            self.oracle.borrow_mut().process_crash();
        }
    }

    /// Some drives that were out are back, with what they held. Returns whether former members
    /// are offered.
    fn drives_return(&mut self, start: &Start) -> bool {
        if !self.plan.returns || matches!(start, Start::Create) {
            return self.all_are_back;
        }
        let count = self.world.borrow().drives.len();
        for drive in 0..count {
            if self.prng.chance(1, 2) {
                let mut world = self.world.borrow_mut();
                if world.drives[drive].dead {
                    world.note(|| format!("drive {drive} is back"));
                    world.drives[drive].dead = false;
                }
            }
        }
        self.prng.chance(1, 2)
    }

    /// The drives that are there, in any order.
    fn offer(&mut self, returned: bool) -> Vec<u32> {
        let mut left = self.fleet.borrow().offered(returned);
        let mut offered = Vec::new();
        while !left.is_empty() {
            offered.push(left.swap_remove(self.prng.index(left.len())));
        }
        offered
    }

    /// Which stripes will wait for resync, from what is on the drives.
    fn expect_unsure(&mut self, offered: &[u32]) {
        let world = self.world.borrow();
        let drives = || offered.iter().map(|drive| &world.drives[*drive as usize]);
        let mut unsure = BTreeSet::new();
        let newest = inspect::newest(drives());
        let uncovered = newest.as_ref().is_some_and(|newest| newest.journal_from.get() == 0);
        if uncovered {
            let newest = newest.as_ref().expect("looked at above");
            let stripes = newest.stripes.get();
            let region_stripes = u64::from(newest.region_stripes.get());
            let region = |stripe: u64| to_usize(stripe / region_stripes);
            let written = inspect::newest_page(MapKind::Written, drives());
            let dirty = inspect::newest_page(MapKind::Dirty, drives());
            let has = |page: &Option<RegionMapPage>, stripe: u64| {
                page.as_ref().is_none_or(|page| page.contains(region(stripe)))
            };
            unsure.extend((0..stripes).filter(|s| has(&written, *s) && has(&dirty, *s)));
        }
        let bad = inspect::bad_stripes(drives());
        let covered = self.covered.get();
        let restriped = newest.as_ref().filter(|newest| newest.old_data_chunks > 0);
        let restriped = restriped.map(|newest| newest.restriped.get());
        drop(world);
        if let Some(cursor) = restriped {
            self.world.borrow_mut().restriping_lives += 1;
            self.world.borrow_mut().note(|| format!("{cursor} stripes have their new shape"));
        }
        let count = unsure.len();
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

    /// After how many operations of a start or a stop it is cut, one time in so many; but beside a
    /// single fault nothing else happens.
    fn cut(&mut self, one_in: u64, within: u64) -> Option<u64> {
        let is_cut = self.plan.single.is_none() && self.cuts.chance(1, one_in);
        is_cut.then(|| 1 + self.cuts.below(within))
    }

    /// What a life needs of its scenario.
    fn seedling(&mut self, reactor: &Reactor) -> Seedling {
        Seedling {
            reactor: reactor.clone(),
            plan: self.plan.clone(),
            world: self.world.clone(),
            oracle: self.oracle.clone(),
            fleet: self.fleet.clone(),
            unsure: self.unsure.clone(),
            ever_unsure: self.ever_unsure.clone(),
            covered: self.covered.clone(),
            prng: Prng::from_seed(self.prng.next_u64()),
            cut_stop: self.cut(4, OPERATIONS_OF_A_STOP),
            single: self.single.take(),
        }
    }
}

/// How a life came to its end by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Stopped,
    /// Some drives could not be reached; they have what they had.
    Halted,
    GivenUp,
}

struct Seedling {
    reactor: Reactor,
    plan: Rc<Plan>,
    world: SharedWorld,
    oracle: Rc<RefCell<Oracle>>,
    fleet: Rc<RefCell<Fleet>>,
    unsure: Rc<RefCell<BTreeSet<u64>>>,
    ever_unsure: Rc<RefCell<BTreeSet<u64>>>,
    covered: Rc<Cell<bool>>,
    prng: Prng,
    /// A life that ends suddenly does so after so many operations of its stop.
    cut_stop: Option<u64>,
    single: Option<Single>,
}

async fn create(seedling: Seedling, phase: Phase) -> End {
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
        host: None,
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

async fn assemble(seedling: Seedling, offered: Vec<u32>, phase: Phase) -> End {
    let newest = inspect::newest(seedling.world.borrow().drives.iter());
    let known = newest.as_ref().map_or(0, |newest| newest.header.sequence.get());
    let members = || newest.iter().flat_map(|its| its.members());
    let trusted = || members().filter(|its| its.state() == Ok(MemberState::Trusted));
    let current = || trusted().map(|its| its.drive).collect();
    let known_with = |generation| Known { generation, epoch: 0, current: current() };
    let start = async |known: Option<u64>, force| {
        let handles = {
            let fleet = seedling.fleet.borrow();
            offered.iter().map(|drive| fleet.open(&seedling.reactor, *drive)).collect()
        };
        let options = AssembleOptions {
            force,
            known: known.map(known_with),
            host: None,
            sum_pages_max: seedling.plan.sum_pages_max,
        };
        Array::assemble(&seedling.reactor, handles, options).await
    };
    let mut last = None;
    for known_generation in [None, Some(known), Some(0)] {
        match start(known_generation, false).await {
            Ok(array) => return assembled(seedling, array, phase).await,
            Err(AssembleError::MaybeOld) if may_refuse(&seedling, &offered) => {
                let text = || format!("{known_generation:?}: {}", AssembleError::MaybeOld);
                seedling.world.borrow_mut().note(text);
                last = Some(AssembleError::MaybeOld);
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
    let is_journal = matches!(last, Some(AssembleError::Journal { .. }));
    if is_journal && seedling.plan.beyond && !seedling.plan.comes_back_whole() {
        match start(None, true).await {
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
        outages_begun: Cell::default(),
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
            safety(&life, &mut seedling.prng).await;
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

async fn safety(life: &Rc<Life>, prng: &mut Prng) {
    {
        let mut world = life.world.borrow_mut();
        for drive in &mut world.drives {
            drive.transient_one_in = life.plan.transient_one_in;
        }
    }
    if life.plan.has_others() {
        others::come(life, prng).await;
    }
    life.start_workers(prng);
    life.reactor.spawn(chaos::rage(life.clone(), Prng::from_seed(prng.next_u64())));
    life.workers_ended().await;
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
        Err(error) if life.waits_for_start() => {
            life.note(|| format!("stop: {error} (its drives are away)"));
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
