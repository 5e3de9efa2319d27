//! Single faults, one after the other: fail the N-th operation of a small workload, or of the stop
//! after it, for all N; let a drive die, or cut the power, after the N-th completion, for all N:
//! healthy, degraded, with as many drives lost at the same moment as the array bears, and with a
//! drive back that was away. The same in the start that comes after a power cut.
//! Some bugs are invisible to random faults because another fault always hides them.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ashlar_format::array_superblock::Policy;
use ashlar_format::units::to_usize;
use ashlar_raid::layout::{CHUNK_BYTES_MAX, CHUNK_BYTES_MIN, level_name};

use crate::drive::Loss;
use crate::faults::{Geometry, Plan, Single, SingleFault, turn};
use crate::scenario::{Options, Scenario, Verdict};

#[derive(Debug, Default)]
pub struct Report {
    pub cases: u64,
    pub failures: Vec<String>,
    /// Cases in which the policy was being changed, or had been, when the fault struck; the array
    /// had grown, or did; members were added; a member was being filled; a stop put in place what
    /// the journal had; the array was being started after a power cut.
    pub policy_changed: u64,
    pub grown: u64,
    pub added: u64,
    pub filled: u64,
    pub drained: u64,
    pub starting: u64,
}

impl Report {
    fn add(&mut self, other: Report) {
        self.cases += other.cases;
        self.failures.extend(other.failures);
        self.policy_changed += other.policy_changed;
        self.grown += other.grown;
        self.added += other.added;
        self.filled += other.filled;
        self.drained += other.drained;
        self.starting += other.starting;
    }
}

/// What is done with the array besides requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    Grow,
    Add,
    /// A member was lost before, and another drive takes its place.
    Rebuild,
    Scrub,
}

/// A workload, and the kind of fault that it is tried with.
#[derive(Clone, Copy)]
struct Case {
    geometry: Geometry,
    policy: Option<Policy>,
    change: Change,
    integrity: bool,
    sector_bytes: u32,
    fault: Fault,
}

impl Case {
    fn single(&self, after: u64) -> Single {
        let Fault { what, in_start } = self.fault;
        Single { in_start, after, what: what(loss(after)) }
    }
}

/// What comes, and whether in a start.
#[derive(Clone, Copy)]
struct Fault {
    what: fn(Loss) -> SingleFault,
    in_start: bool,
}

/// Which operations the faults come at.
#[derive(Clone, Copy, Debug)]
pub struct Steps {
    /// Every so many operations; 1: all.
    pub stride: u64,
    /// Which workload it is. Others begin with others of the first `stride` operations.
    pub workload: u64,
}

impl Steps {
    fn all(self) -> impl Iterator<Item = u64> {
        (1 + self.workload % self.stride..).step_by(to_usize(self.stride))
    }
}

/// On the smallest array of every level and redundancy that the simulator knows, under every policy
/// that it can have, and while that changes; with the smallest and the largest chunks, and both
/// sizes of sectors; while the array grows, members are added or filled, or a scrub runs. `jobs`
/// cases run at the same time.
pub fn run(steps: Steps, jobs: usize, options: Options) -> Report {
    let cases = cases();
    let next = AtomicUsize::new(0);
    let job = || {
        let mut report = Report::default();
        while let Some(case) = cases.get(next.fetch_add(1, Relaxed)) {
            for after in steps.all() {
                let single = case.single(after);
                if !one(&mut report, case, steps.workload, single, options) {
                    break;
                }
            }
        }
        report
    };
    let mut all = Report::default();
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..jobs).map(|_| scope.spawn(job)).collect();
        for job in jobs {
            all.add(job.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload)));
        }
    });
    all
}

fn cases() -> Vec<Case> {
    let mut seen = BTreeSet::new();
    let mut geometries: Vec<Geometry> = Geometry::all().collect();
    geometries.retain(|geometry| seen.insert((geometry.level, geometry.layout().tolerated())));
    geometries.push(Geometry::raid0());
    let all = geometries
        .iter()
        .flat_map(|geometry| faults(geometry).flat_map(|fault| kinds(*geometry, fault)));
    all.collect()
}

/// A workload of each kind that says something about an array.
fn kinds(geometry: Geometry, fault: Fault) -> Vec<Case> {
    let layout = geometry.layout();
    let policy = Some(layout.default_policy());
    let usual = Case {
        geometry,
        policy,
        change: Change::Nothing,
        integrity: false,
        sector_bytes: 512,
        fault,
    };
    let under = |policy| {
        [512, 4096].map(|sector_bytes| Case { policy: Some(policy), sector_bytes, ..usual })
    };
    let mut kinds: Vec<Case> = geometry.policies().into_iter().flat_map(under).collect();
    let of_chunks = |chunk_bytes| Case { geometry: Geometry { chunk_bytes, ..geometry }, ..usual };
    kinds.extend([CHUNK_BYTES_MIN, CHUNK_BYTES_MAX].map(of_chunks));
    kinds.extend([Change::Grow, Change::Add].map(|change| Case { change, ..usual }));
    if layout.is_redundant() {
        // Its policy changes all the time.
        kinds.push(Case { policy: None, ..usual });
        kinds.extend([Change::Rebuild, Change::Scrub].map(|change| Case { change, ..usual }));
        let checked = Case { integrity: true, policy: Some(Policy::Journal), ..usual };
        kinds.extend([checked, Case { change: Change::Add, ..checked }]);
    }
    kinds
}

/// The faults that say something about an array.
fn faults(geometry: &Geometry) -> impl Iterator<Item = Fault> {
    let all: [fn(Loss) -> SingleFault; 6] = [
        |_| SingleFault::Fail,
        SingleFault::Cut,
        |_| SingleFault::Death,
        SingleFault::CutAndLose,
        SingleFault::CutDegraded,
        SingleFault::CutReturned,
    ];
    let count = if geometry.layout().is_redundant() { all.len() } else { 2 };
    let of = move |in_start| all.into_iter().take(count).map(move |what| Fault { what, in_start });
    of(false).chain(of(true))
}

/// All kinds of loss in turn.
fn loss(after: u64) -> Loss {
    [Loss::Everything, Loss::EachSector, Loss::EachWrite][turn(after, 3)]
}

/// False once the fault comes after the workload.
fn one(report: &mut Report, case: &Case, workload: u64, single: Single, options: Options) -> bool {
    let Case { geometry, policy, change, integrity, sector_bytes, fault } = *case;
    let run = || {
        let mut plan = Plan {
            grows: change == Change::Grow,
            adds: change == Change::Add,
            spares: change == Change::Rebuild,
            scrubs: change == Change::Scrub,
            ..Plan::single(workload, geometry, policy, integrity, single)
        };
        plan.traits.sector_bytes = sector_bytes;
        let is_second = plan.spares && geometry.layout().tolerated() < 2;
        plan.beyond |= is_second && matches!(single.what, SingleFault::Fail | SingleFault::Death);
        let mut scenario = Scenario::new(plan, options);
        let reached = scenario.single_fault(single);
        (reached, scenario.verdict())
    };
    let panicked = || Verdict { failure: Some("the engine panicked".into()), ..Verdict::default() };
    let (reached, verdict) =
        std::panic::catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| (true, panicked()));
    let Verdict { failure, changes_at_fault: changes, .. } = verdict;
    report.cases += 1;
    report.policy_changed += u64::from(changes.policy > 0);
    report.grown += u64::from(changes.grown > 0);
    report.added += u64::from(changes.added > 0);
    report.filled += u64::from(changes.filled > 0);
    report.drained += u64::from(changes.drained > 0);
    report.starting += u64::from(fault.in_start && reached);
    if let Some(why) = failure {
        let (level, members) = (level_name(geometry.level), geometry.members);
        let policy = policy.map_or("any policy".into(), |policy| format!("{policy:?}"));
        let chunk = geometry.chunk_bytes;
        let sums = if integrity { ", checksums" } else { "" };
        let what = format!(
            "workload {workload}, level {level} of {members}, chunks of {chunk}, {policy}, \
             {change:?}{sums}, sectors of {sector_bytes}, {single:?}: {why}"
        );
        report.failures.push(what);
    }
    reached
}
