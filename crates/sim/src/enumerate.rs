//! Single faults, one after the other: fail the N-th operation of a small workload, for all N; cut
//! the power after the N-th completion, for all N: healthy, degraded, and with a drive lost at the
//! same moment. Some bugs are invisible to random faults because another fault always hides them.

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use ashlar_format::array_superblock::Policy;
use ashlar_raid::layout::level_name;

use crate::drive::Loss;
use crate::faults::{Geometry, Plan, Single, SingleFault};
use crate::scenario::{Options, Scenario};

#[derive(Debug, Default)]
pub struct Report {
    pub cases: u64,
    pub failures: Vec<String>,
}

/// A workload, with checksums or without, and the kind of fault that it is tried with.
type Case = (Geometry, Option<Policy>, bool, fn(Loss) -> SingleFault);

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
        for report in jobs.into_iter().filter_map(|job| job.join().ok()) {
            all.cases += report.cases;
            all.failures.extend(report.failures);
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
        for policy in geometry.policies().into_iter().map(Some).chain(changes) {
            let whats = || faults(&geometry).iter();
            cases.extend(whats().map(|what| (geometry, policy, false, *what)));
            if policy == Some(Policy::Journal) {
                cases.extend(whats().map(|what| (geometry, policy, true, *what)));
            }
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
    match after % 3 {
        0 => Loss::Everything,
        1 => Loss::EachSector,
        _ => Loss::EachWrite,
    }
}

/// False once the fault comes after the workload.
fn one(report: &mut Report, (geometry, policy, integrity, what): &Case, after: u64) -> bool {
    let single = Single { after, what: what(loss(after)) };
    let run = || {
        let plan = Plan::single(*geometry, *policy, *integrity, single);
        let mut scenario = Scenario::new(plan, Options::default());
        let reached = scenario.single_fault(single);
        (reached, scenario.verdict().failure)
    };
    let (reached, failure) = std::panic::catch_unwind(AssertUnwindSafe(run))
        .unwrap_or((true, Some("the engine panicked".into())));
    report.cases += 1;
    if let Some(why) = failure {
        let (level, members) = (level_name(geometry.level), geometry.members);
        let policy = policy.map_or("any policy".into(), |policy| format!("{policy:?}"));
        let policy = if *integrity { policy + " with checksums" } else { policy };
        report.failures.push(format!("level {level} of {members}, {policy}, {single:?}: {why}"));
    }
    reached
}
