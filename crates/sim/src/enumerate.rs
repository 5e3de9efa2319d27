//! Single faults, one after the other: fail the N-th operation of a small workload, for all N; cut
//! the power after the N-th completion, for all N: healthy, degraded, and with a drive lost at the
//! same moment. Some bugs are invisible to random faults because another fault always hides them.

use std::panic::AssertUnwindSafe;

use ashlar_format::array_superblock::Level;

use crate::drive::Loss;
use crate::faults::{Plan, Single, SingleFault};
use crate::scenario::{Options, Scenario};

const GEOMETRIES: [(Level, usize); 5] = [
    (Level::Raid1, 2),
    (Level::Raid10, 4),
    (Level::Raid5, 3),
    (Level::Raid5, 5),
    (Level::Raid6, 4),
];

#[derive(Debug, Default)]
pub struct Report {
    pub cases: u64,
    pub failures: Vec<String>,
}

/// Every `stride`-th operation; 1: all.
pub fn run(stride: u64) -> Report {
    let mut report = Report::default();
    for (level, members) in GEOMETRIES {
        for what in [
            |_| SingleFault::Fail,
            |loss| SingleFault::Cut(loss),
            |loss| SingleFault::CutAndLose(loss),
            |loss| SingleFault::CutDegraded(loss),
        ] {
            let mut after = 1;
            while one(&mut report, level, members, Single { after, what: what(loss(after)) }) {
                after += stride;
            }
        }
    }
    report
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
fn one(report: &mut Report, level: Level, members: usize, single: Single) -> bool {
    let run = || {
        let mut scenario = Scenario::new(Plan::single(level, members, single), Options::default());
        let reached = scenario.single_fault(single);
        (reached, scenario.verdict().failure)
    };
    let (reached, failure) = std::panic::catch_unwind(AssertUnwindSafe(run))
        .unwrap_or((true, Some("the engine panicked".into())));
    report.cases += 1;
    if let Some(why) = failure {
        report.failures.push(format!("level {} of {members}, {single:?}: {why}", level as u8));
    }
    reached
}
