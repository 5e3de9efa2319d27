//! Single faults, one after the other: fail the N-th operation of a small workload, for all N; cut
//! the power after the N-th completion, for all N: healthy, degraded, and with a drive lost at the
//! same moment. Some bugs are invisible to random faults because another fault always hides them.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ashlar_format::array_superblock::Policy;
use ashlar_raid::layout::level_name;

use crate::drive::Loss;
use crate::faults::{Geometry, Plan, Single, SingleFault, turn};
use crate::scenario::{Options, Scenario, Verdict};

#[derive(Debug, Default)]
pub struct Report {
    pub cases: u64,
    pub failures: Vec<String>,
    /// Cases in which the policy was being changed, or had been, when the fault struck; the array
    /// had grown, or did; members were added.
    pub policy_changed: u64,
    pub grown: u64,
    pub added: u64,
}

/// What is done with the array besides requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Change {
    Nothing,
    Grow,
    Add,
}

/// A workload, and the kind of fault that it is tried with.
#[derive(Clone, Copy)]
struct Case {
    geometry: Geometry,
    policy: Option<Policy>,
    change: Change,
    integrity: bool,
    what: fn(Loss) -> SingleFault,
}

/// Every `stride`-th operation; 1: all. On the smallest array of every level that this build knows,
/// under every policy that it can have, and while that changes. `jobs` cases run at the same time.
pub fn run(stride: u64, jobs: usize) -> Report {
    let cases = cases();
    let next = AtomicUsize::new(0);
    let job = || {
        let mut report = Report::default();
        while let Some(case) = cases.get(next.fetch_add(1, Relaxed)) {
            let mut after = 1;
            while one(&mut report, case, after) {
                after += stride;
            }
        }
        report
    };
    let mut all = Report::default();
    std::thread::scope(|scope| {
        let jobs: Vec<_> = (0..jobs).map(|_| scope.spawn(job)).collect();
        for job in jobs {
            let report = job.join().unwrap_or_else(|payload| std::panic::resume_unwind(payload));
            all.cases += report.cases;
            all.failures.extend(report.failures);
            all.policy_changed += report.policy_changed;
            all.grown += report.grown;
            all.added += report.added;
        }
    });
    all
}

fn cases() -> Vec<Case> {
    let mut seen = BTreeSet::new();
    let mut geometries: Vec<Geometry> = Geometry::all().collect();
    geometries.retain(|geometry| seen.insert(geometry.level));
    geometries.push(Geometry::raid0());
    let mut cases = Vec::new();
    for geometry in geometries {
        let changes = geometry.layout().is_redundant().then_some(None);
        let policies = geometry.policies().into_iter().map(Some).chain(changes);
        let growing = Some(geometry.layout().default_policy());
        let changes = [(growing, Change::Grow, false), (growing, Change::Add, false)];
        let kinds = policies.map(|policy| (policy, Change::Nothing, false)).chain(changes);
        let checked = geometry.layout().is_redundant();
        let checked = [Change::Nothing, Change::Add].into_iter().filter(|_| checked);
        let checked = checked.map(|change| (Some(Policy::Journal), change, true));
        for (policy, change, integrity) in kinds.chain(checked) {
            let case = |what: &fn(Loss) -> SingleFault| {
                let what = *what;
                Case { geometry, policy, change, integrity, what }
            };
            cases.extend(faults(&geometry).iter().map(case));
        }
    }
    cases
}

/// The fault kinds that say something about an array.
fn faults(geometry: &Geometry) -> &'static [fn(Loss) -> SingleFault] {
    let all: &[fn(Loss) -> SingleFault] = &[
        |_| SingleFault::Fail,
        |loss| SingleFault::Cut(loss),
        |loss| SingleFault::CutAndLose(loss),
        |loss| SingleFault::CutDegraded(loss),
    ];
    if geometry.layout().is_redundant() { all } else { &all[..2] }
}

/// All kinds of loss in turn.
fn loss(after: u64) -> Loss {
    [Loss::Everything, Loss::EachSector, Loss::EachWrite][turn(after, 3)]
}

/// False once the fault comes after the workload.
fn one(report: &mut Report, case: &Case, after: u64) -> bool {
    let Case { geometry, policy, change, integrity, what } = *case;
    let single = Single { after, what: what(loss(after)) };
    let run = || {
        let plan = Plan {
            grows: change == Change::Grow,
            adds: change == Change::Add,
            ..Plan::single(geometry, policy, integrity, single)
        };
        let mut scenario = Scenario::new(plan, Options::default());
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
    if let Some(why) = failure {
        let (level, members) = (level_name(geometry.level), geometry.members);
        let policy = policy.map_or("any policy".into(), |policy| format!("{policy:?}"));
        let sums = if integrity { ", checksums" } else { "" };
        let what =
            format!("level {level} of {members}, {policy}, {change:?}{sums}, {single:?}: {why}");
        report.failures.push(what);
    }
    reached
}
