//! One seed from its first byte to its verdict: lives with faults (safety), then one without
//! (liveness).
//!
//! What the daemon would remember between lives is the array's generation. The array is first
//! assembled without it. It may refuse only if a member that the newest superblock trusts is not
//! among the drives (`MaybeOld`, `Unheard`); then it is told the newest generation that any drive
//! holds, dead ones too, as the daemon would know it; and if it still refuses, the operator
//! insists. (The budget never takes the only members with acknowledged data, so insisting loses
//! nothing.)

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use ashlar_format::array_superblock::Policy;
use ashlar_reactor::buffer::BufferPool;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::prng::Prng;

use crate::cache;
use crate::canary::Canary;
use crate::drive::Loss;
use crate::faults::{Ending, Plan, Single};
use crate::fleet::Fleet;
use crate::hosts::{Contests, FIRST, name_of};
use crate::inspect;
use crate::oracle::Oracle;
use crate::world::{AtCompletion, Changes, Outages, PastLimit, SharedWorld, SimBackend, World};

mod hosts;
mod insist;
mod life;
mod single;

use life::{End, Seedling, assemble, create};

/// A cut in a start comes within so many: some are through by then.
const OPERATIONS_OF_A_START: u64 = 400;
const OPERATIONS_OF_A_STOP: u64 = 60;

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
    pub contests: Contests,
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
    /// Of what is lost between two lives, where operators insist.
    losses: Prng,
    /// Of other hosts.
    hosts: Prng,
    /// Which host starts the array, or did last.
    host: usize,
    /// Reactors of this life beside the one that it began with.
    left: Vec<Reactor>,
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
            losses: Prng::stream(seed, "losses that operators take"),
            hosts: Prng::stream(seed, "hosts"),
            host: 0,
            left: Vec::new(),
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
            contests: world.contests,
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
        if self.world.borrow().failure().is_none() && self.plan.insists {
            self.come_back_after_force();
        }
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
        if self.plan.leases && self.hosts.chance(1, 3) {
            self.host ^= 1;
        }
        let end = match start {
            Start::Create => {
                let seedling = self.seedling(&reactor);
                self.run(&reactor, create(seedling, phase), phase)
            }
            Start::Assemble => {
                let offered = self.offer(returned);
                let dies = self.one_dies_in_the_start(phase);
                let is_away = |drive| !offered.contains(drive);
                let was_short = std::mem::take(&mut self.world.borrow_mut().is_short);
                let is_short = was_short || self.fleet.borrow().slots.iter().any(is_away);
                if dies.is_some() || is_short || self.have_journals_gaps() {
                    self.oracle.borrow_mut().some_are_away();
                }
                let (unsure, bad) = self.are_unsure(&offered, dies);
                let seedling = self.seedling(&reactor);
                seedling.expect_unsure(unsure, bad);
                self.run(&reactor, assemble(seedling, offered, phase), phase)
            }
        };
        self.end(end, phase);
        reactor.abandon();
        self.left.drain(..).for_each(|other| other.abandon());
    }

    /// Plans that, now and then, if the array can do without it. Returns the drive.
    fn one_dies_in_the_start(&mut self, phase: Phase) -> Option<u32> {
        let may_die = self.plan.deaths && matches!(phase, Phase::Safety(_));
        if !may_die || !self.deaths.chance(1, 6) {
            return None;
        }
        let index = self.deaths.index(self.fleet.borrow().slots.len());
        if !self.fleet.borrow().may_lose(index) {
            return None;
        }
        let drive = self.fleet.borrow().slots[index];
        let after = 1 + self.deaths.below(OPERATIONS_OF_A_START);
        self.fleet.borrow_mut().impair(index, Some(drive));
        let mut world = self.world.borrow_mut();
        world.note(|| format!("drive {drive} (member {index}) dies after {after} more"));
        world.plan(after, AtCompletion::Death(drive));
        Some(drive)
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
            (Some(End::GivenUp | End::Refused), _) => {
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
        if self.plan.beyond && self.plan.insists && matches!(phase, Phase::Safety(_)) {
            self.lose_past_the_limit();
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

    /// Which stripes will wait for resync, from what is on the drives. `dies`: this one may be gone
    /// before it has said what only it knows.
    fn are_unsure(&self, offered: &[u32], dies: Option<u32>) -> (BTreeSet<u64>, BTreeSet<u64>) {
        let mut world = self.world.borrow_mut();
        let without = |gone: Option<u32>| {
            let here = offered.iter().filter(move |drive| Some(**drive) != gone);
            here.map(|drive| &world.drives[*drive as usize])
        };
        let newest = inspect::newest(without(None));
        let mut unsure = inspect::unsure_stripes(without(None));
        unsure.extend(inspect::unsure_stripes(without(dies)));
        let bad = inspect::bad_stripes(without(None));
        let restriped = newest.as_ref().filter(|newest| newest.old_data_chunks > 0);
        let restriped = restriped.map(|newest| newest.restriped.get());
        if let Some(cursor) = restriped {
            world.restriping_lives += 1;
            world.note(|| format!("{cursor} stripes have their new shape"));
        }
        (unsure, bad)
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
            rival: self.plan.has_rivals().then(|| Prng::from_seed(self.hosts.next_u64())),
            place: FIRST,
            host: self.plan.leases.then(|| name_of(self.host)),
        }
    }
}
