//! Goal: members that others went on without are not believed when only they are left, in whatever
//! moment of a change of the array they went.
//! Method: a member is filled again or taken back, members are added, or the policy is changed. At
//! each completion of that in turn some die, or the daemon does and they die at some moment of the
//! next start. Whoever is left writes; then only those that died are there, at a host that
//! remembers nothing. They are refused, or nothing that was acknowledged is missing.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_sim::world::{AtCompletion, SharedWorld};

use crate::storage::{life, spec, storage};

mod storage;

const DRIVE_BYTES: u64 = 9 << 20;
const FILLED: MemberIndex = MemberIndex(1);
const PLACE_BYTES: u64 = 4096;
const PLACES: u64 = 6;
/// In different chunks.
const PLACE_STRIDE: u64 = 24 << 10;
/// Completions of a change that are looked at: of a restripe its beginning.
const MOMENTS_MAX: u64 = 200;
/// So many moments after a change are looked at, too.
const AFTER: u64 = 30;
/// So many at its end, where the daemon dies.
const END: u64 = 24;
/// Completions from one death to the next.
const GAPS: [u64; 3] = [0, 6, 15];
/// Completions of a start, and of what it ends, at most.
const START: u64 = 260;

/// What is under way when they die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    /// A member is filled with what it missed.
    CatchUp,
    /// A new drive is filled.
    Spare,
    /// A member that missed nothing is taken back.
    Rejoin,
    /// So many drives become members.
    Add(u32),
    Policy(Policy),
}

/// An array, who dies, and who is there at last.
#[derive(Clone, Copy, Debug)]
struct Case {
    level: Level,
    members: u32,
    shape: Shape,
    die: &'static [u32],
    left: &'static [u32],
    /// Who went before the change, and missed nothing by then.
    away: &'static [u32],
    /// Who is not there at the start after a crash.
    late: &'static [u32],
    /// That start is at a host that knows who held everything before the change.
    remembers: bool,
    /// Without those that are late nobody goes on there who is not known to it.
    waits: bool,
}

/// Everyone, of any array.
const ALL: &[u32] = &[0, 1, 2, 3, 4, 5];
const TWO_COPIES: Shape = Shape { copies: 2, parity: 0, group_members: 0 };
const fn case(
    level: Level,
    members: u32,
    shape: Shape,
    die: &'static [u32],
    left: &'static [u32],
) -> Case {
    Case { level, members, shape, die, left, away: &[], late: &[], remembers: false, waits: false }
}

const CASES: [Case; 14] = [
    case(Level::Raid1, 2, TWO_COPIES, &[0], &[0]),
    case(Level::Raid1, 3, Shape { copies: 3, ..TWO_COPIES }, &[0, 2], &[0, 2]),
    case(Level::Raid1, 3, Shape { copies: 3, ..TWO_COPIES }, &[0, 2], &[2]),
    case(Level::Raid10, 4, TWO_COPIES, &[0, 3], &[0, 3]),
    case(Level::Raid10, 4, TWO_COPIES, &[0], &[0, 2]),
    case(Level::RaidNm, 2, Shape { copies: 1, parity: 1, ..TWO_COPIES }, &[0], &[0]),
    case(Level::RaidNm, 4, Shape { copies: 1, parity: 2, ..TWO_COPIES }, &[0, 2], &[0, 2]),
    case(Level::RaidNm, 3, Shape { copies: 1, parity: 2, ..TWO_COPIES }, &[0, 2], &[2]),
    case(Level::Raid6, 4, Shape { copies: 1, ..TWO_COPIES }, &[2, 3], &[2, 3]),
    Case {
        away: &[3],
        late: &[2],
        ..case(Level::RaidNm, 4, Shape { copies: 1, parity: 2, ..TWO_COPIES }, &[3], &[2, 3])
    },
    Case { late: &[0], ..case(Level::Raid10, 4, TWO_COPIES, &[3], &[0, 3]) },
    Case {
        late: &[0],
        remembers: true,
        ..case(Level::RaidNm, 4, Shape { copies: 1, parity: 2, ..TWO_COPIES }, &[3], &[0, 3])
    },
    Case {
        late: &[0, 3],
        remembers: true,
        waits: true,
        ..case(Level::RaidNm, 4, Shape { copies: 1, parity: 2, ..TWO_COPIES }, &[3], &[0, 3])
    },
    Case { away: &[2], ..case(Level::Raid1, 3, Shape { copies: 3, ..TWO_COPIES }, &[0], &[0, 2]) },
];

impl Case {
    /// Members that the array can do without, and not those that died.
    fn pulled(&self) -> impl Iterator<Item = MemberIndex> {
        let count = if self.level == Level::Raid10 { 1 } else { self.die.len() };
        let others = (0..self.members).filter(|its| !self.die.contains(its));
        others.take(count).map(|its| MemberIndex(its as u8))
    }
}

impl Change {
    /// Drives that it brings.
    fn drives(self) -> u32 {
        match self {
            Change::Spare => 1,
            Change::Add(more) => more,
            Change::CatchUp | Change::Rejoin | Change::Policy(_) => 0,
        }
    }
}

/// What each place holds: what was acknowledged last, and what may have come after it.
#[derive(Default)]
struct Written(RefCell<BTreeMap<u64, Vec<u8>>>);

impl Written {
    async fn put(&self, reactor: &Reactor, array: &Rc<Array>, value: u8) {
        for at in (0..PLACES).map(|place| place * PLACE_STRIDE) {
            let bytes = reactor.buffer(PLACE_BYTES as usize);
            bytes.copy_from_slice(&vec![value; PLACE_BYTES as usize]);
            let written = array.write(at, bytes.into()).await;
            let mut places = self.0.borrow_mut();
            let values = places.entry(at).or_default();
            if written.is_ok() {
                values.clear();
            }
            values.push(value);
        }
    }

    /// Whether all places hold this for sure.
    fn holds(&self, value: u8) -> bool {
        self.0.borrow().values().all(|its| its[..] == [value])
    }

    /// `all`: nothing is an error.
    async fn check(&self, reactor: &Reactor, array: &Rc<Array>, all: bool, what: &str) {
        let places = self.0.borrow().clone();
        for (at, values) in places {
            let into = reactor.buffer(PLACE_BYTES as usize);
            if let Err(error) = array.read(at, into.clone().into()).await {
                assert!(!all, "{what}: at {at}: {error}");
                continue;
            }
            let found = into.bytes();
            let whole = found.iter().all(|byte| values.contains(byte));
            assert!(whole, "{what}: at {at}: {} and not one of {values:?}", found[0]);
        }
    }
}

fn open(reactor: &Reactor, drive: u32) -> Rc<Drive> {
    storage::open(reactor, drive, DRIVE_BYTES)
}

async fn start(
    reactor: &Reactor,
    drives: impl Iterator<Item = u32>,
    known: Option<Known>,
) -> Option<Rc<Array>> {
    let drives = drives.map(|drive| open(reactor, drive)).collect();
    let options = AssembleOptions { known, ..AssembleOptions::default() };
    Array::assemble(reactor, drives, options).await.ok()
}

/// What a host remembers of an array that it has.
fn known_of(array: &Array) -> Known {
    let status = array.status();
    let is_alive = |drive: &Option<Rc<Drive>>| drive.as_ref().is_some_and(|its| its.is_alive());
    let current = status.members.iter().filter(|its| its.state == MemberState::Trusted);
    let current = current.filter(|its| is_alive(&its.drive)).map(|its| its.drive_uuid).collect();
    Known { generation: status.generation, epoch: 0, last_epoch: 0, current }
}

/// All die, one after another: in either order, at once or some completions apart.
fn plan(world: &SharedWorld, case: &Case, after: u64) {
    let mut die = case.die.to_vec();
    if after / GAPS.len() as u64 % 2 == 1 {
        die.reverse();
    }
    let gap = GAPS[(after % GAPS.len() as u64) as usize];
    for (drive, number) in die.into_iter().zip(0..) {
        world.borrow_mut().plan(after + number * gap, AtCompletion::Death(drive));
    }
}

/// The array before the change.
async fn prepared(reactor: &Reactor, case: Case, change: Change, written: &Written) -> Rc<Array> {
    let spec = ArraySpec { shape: case.shape, ..spec(case.level, None, None) };
    let drives = (0..case.members).map(|drive| ([drive as u8; 16], open(reactor, drive)));
    let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
    written.put(reactor, &array, 1).await;
    array.flush().await.unwrap();
    if matches!(change, Change::CatchUp | Change::Spare) {
        array.pull_member(FILLED).unwrap();
    }
    written.put(reactor, &array, 2).await;
    array.flush().await.unwrap();
    array.destage_all().await.unwrap();
    reactor.sleep(Duration::from_secs(3)).await;
    array.flush().await.unwrap();
    let rejoins = (change == Change::Rejoin).then_some(FILLED.0.into());
    for member in case.away.iter().copied().chain(rejoins) {
        array.pull_member(MemberIndex(member as u8)).unwrap();
    }
    array
}

/// Makes the change, as far as that can be, and waits for what it began.
async fn make(reactor: &Reactor, case: Case, change: Change, array: &Rc<Array>) {
    let own = || open(reactor, FILLED.0.into());
    let _ = match change {
        Change::CatchUp | Change::Rejoin => array.replace_member(FILLED, own(), [77; 16]).await,
        Change::Spare => array.replace_member(FILLED, open(reactor, case.members), [77; 16]).await,
        Change::Add(more) => {
            let new = case.members..case.members + more;
            let new = new.map(|drive| ([drive as u8; 16], open(reactor, drive)));
            array.add_members(new.collect()).await
        }
        Change::Policy(policy) => array.set_policy(policy).await,
    };
    settles(reactor, array).await;
}

/// Waits until nothing is under way, or half a minute.
async fn settles(reactor: &Reactor, array: &Rc<Array>) {
    for _ in 0..300 {
        let status = array.status();
        if status.rebuild.is_none() && status.restripe.is_none() {
            return;
        }
        reactor.sleep(Duration::from_millis(100)).await;
    }
}

/// What became of it.
#[derive(Clone, Copy, Default)]
struct Outcome {
    /// All was done before anybody died.
    is_over: bool,
    /// Whoever was left went on.
    went_on: bool,
    /// Those that died were started by themselves.
    started: bool,
}

/// `crash`: the daemon dies after so many completions, and the others so many after the next start
/// began. Else they die after so many.
fn run(case: Case, change: Change, crash: Option<u64>, after: u64) -> Outcome {
    let what = format!("{change:?}, {case:?}, crash {crash:?}, after {after}");
    let drives = case.members + change.drives();
    let world = storage(crash.unwrap_or(after), drives, DRIVE_BYTES, 200_000);
    let (written, outcome) = (Rc::new(Written::default()), Rc::new(Cell::new(Outcome::default())));
    let (its, storage, told) = (written.clone(), world.clone(), outcome.clone());
    let known = Rc::new(RefCell::new(None));
    let remembered = known.clone();
    let goes_on = move |reactor: Reactor, array: Rc<Array>, written: Rc<Written>| async move {
        settles(&reactor, &array).await;
        written.put(&reactor, &array, 3).await;
        // Whoever has died is found out by then.
        reactor.sleep(Duration::from_secs(3)).await;
        written.put(&reactor, &array, 4).await;
    };
    let ended = life(&world, 1, None, |reactor| async move {
        let array = prepared(&reactor, case, change, &its).await;
        *remembered.borrow_mut() = case.remembers.then(|| known_of(&array));
        match crash {
            Some(crash) => storage.borrow_mut().plan(crash, AtCompletion::Dark),
            None => plan(&storage, &case, after),
        }
        make(&reactor, case, change, &array).await;
        let is_over = !case.die.iter().any(|drive| storage.borrow_mut().drive(*drive).dead);
        told.set(Outcome { is_over, ..Outcome::default() });
        if crash.is_none() {
            goes_on(reactor, array, its).await;
        }
    });
    world.borrow_mut().clear_plans();
    if crash.is_some() {
        if ended {
            return outcome.get();
        }
        let (its, storage, known) = (written.clone(), world.clone(), known.take());
        life(&world, 2, None, |reactor| async move {
            plan(&storage, &case, after);
            let here = (0..drives).filter(|drive| !case.late.contains(drive));
            let Some(array) = start(&reactor, here, known).await else { return };
            goes_on(reactor, array, its).await;
        });
    }
    let went_on = written.holds(4);
    for drive in 0..drives {
        world.borrow_mut().drive(drive).dead = !case.left.contains(&drive);
    }
    let started = Rc::new(Cell::new(false));
    let is_started = started.clone();
    life(&world, 3, None, |reactor| async move {
        let left = case.left.iter().copied().filter(|drive| *drive < drives);
        let Some(array) = start(&reactor, left, None).await else { return };
        is_started.set(true);
        // Beside parity, policies without the journal lose what was being written.
        let is_kept = !matches!(change, Change::Policy(Policy::Bitmap | Policy::None))
            || array.layout().is_mirrored();
        written.check(&reactor, &array, case.left == ALL && is_kept, &what).await;
    });
    Outcome { went_on, started: started.get(), ..outcome.get() }
}

/// Moments of a change: up to the first in which nobody dies before it is over.
fn moments(case: Case, change: Change) -> u64 {
    let is_over = |after: &u64| run(case, change, None, *after).is_over;
    (1..MOMENTS_MAX).find(is_over).unwrap_or(MOMENTS_MAX)
}

/// Each change of each of these that knows it.
fn each(mut test: impl FnMut(Case, Change)) {
    for case in CASES {
        let policies = [Policy::Journal, Policy::Bitmap, Policy::None].map(Change::Policy);
        let copies = if case.level == Level::Raid10 { 2 } else { 1 };
        let adds = (case.level != Level::Raid1).then_some(Change::Add(copies));
        let filled = [Change::CatchUp, Change::Spare, Change::Rejoin];
        match case.away {
            [] => filled.into_iter().chain(adds).chain(policies).for_each(|its| test(case, its)),
            _ => filled[..2].iter().for_each(|its| test(case, *its)),
        }
    }
}

#[test]
fn in_whatever_moment_they_die_they_are_not_believed_alone() {
    each(|case, change| {
        let moments = moments(case, change);
        let outcomes = (1..moments + AFTER).map(|after| run(case, change, None, after));
        let outcomes: Vec<Outcome> = outcomes.collect();
        let count = |is: fn(&Outcome) -> bool| outcomes.iter().filter(|its| is(its)).count();
        assert!(count(|its| its.went_on) as u64 > AFTER - 10, "{change:?}, {case:?}");
        assert_eq!(count(|its| its.went_on && its.started), 0, "{change:?}, {case:?}");
    });
}

#[test]
fn the_daemon_dies_at_the_end_of_a_change_and_they_do_at_the_next_start() {
    each(|case, change| {
        let (moments, mut went_on) = (moments(case, change), 0);
        for crash in moments.saturating_sub(END).max(1)..moments {
            let starts = (1..START).step_by(7).map(|after| run(case, change, Some(crash), after));
            went_on += starts.filter(|its| its.went_on && !its.started).count();
        }
        let is_filled = matches!(change, Change::CatchUp | Change::Spare | Change::Rejoin);
        let is_refused = case.waits && is_filled;
        let is_right = if is_refused { went_on == 0 } else { went_on > 0 || moments == 1 };
        assert!(is_right, "{change:?}, {case:?}: {went_on} went on");
    });
}

#[test]
fn in_whatever_moment_they_die_all_is_there_when_all_are() {
    each(|case, change| {
        let case = Case { left: ALL, ..case };
        let moments = moments(case, change);
        for after in 1..moments + AFTER {
            let what = format!("{change:?}, {case:?}, after {after}");
            assert!(run(case, change, None, after).started, "{what}");
        }
        for crash in (1..moments).step_by(7) {
            for after in (1..START).step_by(37) {
                let what = format!("{change:?}, {case:?}, crash {crash}, after {after}");
                let outcome = run(case, change, Some(crash), after);
                assert!(outcome.started || outcome.is_over, "{what}");
            }
        }
    });
}

/// They die after so many completions, and are back while the array runs, which then does without
/// others. False: a start is needed for that.
fn comes_back(case: Case, change: Change, after: u64) -> bool {
    let what = format!("{change:?}, {case:?}, after {after}, back");
    let drives = case.members + change.drives();
    let world = storage(after, drives, DRIVE_BYTES, 200_000);
    let (storage, is_whole) = (world.clone(), Rc::new(Cell::new(false)));
    let whole = is_whole.clone();
    life(&world, 1, None, |reactor| async move {
        let written = Written::default();
        let array = prepared(&reactor, case, change, &written).await;
        plan(&storage, &case, after);
        make(&reactor, case, change, &array).await;
        written.put(&reactor, &array, 3).await;
        reactor.sleep(Duration::from_secs(3)).await;
        written.put(&reactor, &array, 4).await;
        storage.borrow_mut().clear_plans();
        for drive in case.away.iter().chain(case.die) {
            storage.borrow_mut().drive(*drive).dead = false;
            let (index, handle) = (MemberIndex(*drive as u8), open(&reactor, *drive));
            let _ = array.return_member(index, handle, [70 + *drive as u8; 16]).await;
        }
        settles(&reactor, &array).await;
        whole.set(array.state() == ArrayState::Optimal);
        if !whole.get() {
            return;
        }
        written.check(&reactor, &array, true, &what).await;
        written.put(&reactor, &array, 5).await;
        assert!(written.holds(5), "{what}");
        for index in case.pulled() {
            array.pull_member(index).unwrap();
        }
        written.check(&reactor, &array, true, &what).await;
    });
    is_whole.get()
}

#[test]
fn in_whatever_moment_they_die_they_are_filled_when_they_are_back() {
    each(|case, change| {
        let moments = moments(case, change);
        let is_back = |after: &u64| comes_back(case, change, *after);
        let back = (1..moments + AFTER).filter(is_back).count() as u64;
        assert!(back >= AFTER, "{change:?}, {case:?}: {back} of {moments}");
    });
}
