//! Single faults, one after the other: fail the N-th operation of a small workload, for all N; cut
//! the power after the N-th completion, for all N: healthy, degraded, and with a drive lost at the
//! same moment. Some bugs are invisible to random faults because another fault always hides them.

use std::panic::AssertUnwindSafe;

use std::collections::BTreeSet;

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

/// Every `stride`-th operation; 1: all. On the smallest array of every level that this build knows,
/// under every policy that it can have.
pub fn run(stride: u64) -> Report {
    let mut report = Report::default();
    let mut seen = BTreeSet::new();
    let mut geometries: Vec<Geometry> = Geometry::all().collect();
    geometries.retain(|geometry| seen.insert(geometry.level));
    geometries.push(Geometry::raid0());
    for geometry in geometries {
        for policy in geometry.policies() {
            for what in faults(&geometry) {
                // Not every policy is struck at the same operations.
                let mut after = 1 + policy as u64 % stride;
                let single = |after| Single { after, what: what(loss(after)) };
                while one(&mut report, geometry, policy, single(after)) {
                    after += stride;
                }
            }
        }
    }
    report
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
fn one(report: &mut Report, geometry: Geometry, policy: Policy, single: Single) -> bool {
    let run = || {
        let plan = Plan::single(geometry, policy, single);
        let mut scenario = Scenario::new(plan, Options::default());
        let reached = scenario.single_fault(single);
        (reached, scenario.verdict().failure)
    };
    let (reached, failure) = std::panic::catch_unwind(AssertUnwindSafe(run))
        .unwrap_or((true, Some("the engine panicked".into())));
    report.cases += 1;
    if let Some(why) = failure {
        let (level, members) = (level_name(geometry.level), geometry.members);
        report.failures.push(format!("level {level} of {members}, {policy:?}, {single:?}: {why}"));
    }
    reached
}
