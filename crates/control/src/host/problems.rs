//! What needs a person, in words that say what to do.

use crate::api::array::{Array, ArrayState, Member, MemberState};
use crate::api::drive::{Drive, DriveHealth, DriveKind, DriveState};
use crate::api::export::{Export, ExportState};
use crate::api::spare::Spare;

/// One line each; the most of them say what mends it.
pub(super) fn problems(
    drives: &[Drive],
    arrays: &[Array],
    spares: &[Spare],
    exports: &[Export],
) -> Vec<String> {
    let mut problems = Vec::new();
    for drive in drives {
        let name = &drive.name;
        let error = drive.error.as_deref().unwrap_or_default();
        match (drive.state, drive.health) {
            (DriveState::Missing, _) => problems.push(format!("drive {name} is missing: {error}")),
            (_, Some(DriveHealth::Failed)) => problems.push(format!(
                "drive {name} has failed; replace it: `ashlar array replace ARRAY --old {name} \
                 --new DRIVE`"
            )),
            (_, Some(DriveHealth::Suspect)) if !has_lied(drive) => {
                let silent = drive.counters.is_some_and(|its| its.timeouts > 0);
                let what = if silent { "has left operations unanswered" } else { "has met errors" };
                problems.push(format!("drive {name} {what}"));
            }
            (
                DriveState::Free | DriveState::Member | DriveState::Spare | DriveState::Replaced,
                Some(DriveHealth::Healthy | DriveHealth::Suspect) | None,
            ) => {}
        }
        if drive.state != DriveState::Missing && !error.is_empty() {
            problems.push(format!("drive {name} is not used: {error}"));
        }
        if let Some(its) = drive.counters.filter(|_| has_lied(drive)) {
            problems.push(format!(
                "drive {name} returned {} blocks and {} checksums other than they were written, \
                 without an error; `ashlar array scrub {} --wait` finds and mends the rest; \
                 replace it if there are more later",
                its.wrong_blocks,
                its.wrong_checksums,
                drive.array.as_deref().unwrap_or("ARRAY")
            ));
        }
        if let Some(its) = drive.counters.filter(|_| drive.full == Some(true)) {
            problems.push(format!(
                "drive {name} has no room: {} writes failed for that; make room on the file \
                 system under it (`df`), and it goes on",
                its.no_space
            ));
        }
        problems.extend(failed_before(drive));
        if let Some(its) = drive.slowness.filter(|_| drive.health != Some(DriveHealth::Failed)) {
            problems.push(format!("drive {name} is slow: {its}"));
        }
    }
    arrays.iter().for_each(|array| note_problems_of(array, &mut problems));
    for spare in spares {
        // What is wrong with the drive itself is told of the drive.
        let is_told = |drive: &Drive| {
            drive.name == spare.drive
                && (drive.state == DriveState::Missing || drive.error.is_some())
        };
        if let Some(error) = spare.error.as_ref().filter(|_| !drives.iter().any(is_told)) {
            problems.push(format!("spare {} cannot take over: {error}", spare.drive));
        }
    }
    for export in exports {
        if export.state == ExportState::Down {
            let error = export.error.as_deref().unwrap_or_default();
            problems.push(format!("export {} is down: {error}", export.name));
        }
    }
    problems
}

fn has_lied(drive: &Drive) -> bool {
    drive.counters.is_some_and(|its| its.wrong_blocks + its.wrong_checksums > 0)
}

/// A drive that has failed, and is used again since. Of one of another host that was its path, as
/// a rule, which comes back by itself.
fn failed_before(drive: &Drive) -> Option<String> {
    let failure = drive.history.as_ref()?.failure.as_deref()?;
    let is_here = drive.kind != Some(DriveKind::Remote);
    let is_used = is_here && drive.health.is_some_and(|health| health != DriveHealth::Failed);
    let name = &drive.name;
    is_used.then(|| {
        format!(
            "drive {name} has failed before ({failure}) and is used again; replace it, or run \
             `ashlar drive clear {name}` if you trust it"
        )
    })
}

fn note_problems_of(array: &Array, problems: &mut Vec<String>) {
    let name = &array.name;
    let error = array.error.as_deref().unwrap_or_default();
    match array.state {
        ArrayState::Optimal | ArrayState::Stopped => {}
        ArrayState::Degraded if array.rebuild.is_some() => {
            problems.push(format!("array {name} is degraded; its rebuild runs"));
        }
        ArrayState::Degraded => match &array.rebuild_error {
            Some(why) => problems.push(format!("array {name}: its rebuild stopped: {why}")),
            None => problems.push(degraded(array)),
        },
        ArrayState::Failed => problems.push(failed(array)),
        ArrayState::Unavailable => problems.push(error.to_owned()),
    }
    if !array.bad_blocks.is_empty() {
        let count = array.bad_blocks.len();
        problems.push(format!(
            "array {name} has lost blocks, in {count} places; see `ashlar array show {name}`"
        ));
    }
    if let Some(scrub) = array.scrub.as_ref().filter(|scrub| scrub.mismatched_stripes > 0) {
        let stripes = scrub.mismatched_stripes;
        problems.push(format!(
            "array {name}: the last scrub found {stripes} stripes that did not agree; \
             `ashlar array show {name}` says where"
        ));
    }
    if let Some(scrub) = array.scrub.as_ref().filter(|scrub| scrub.unreadable_stripes > 0) {
        let stripes = scrub.unreadable_stripes;
        problems.push(format!(
            "array {name}: the last scrub could not check {stripes} stripes; \
             `ashlar array show {name}` says where, and what to do"
        ));
    }
}

/// Which members lack what, and what gives it to them.
fn degraded(array: &Array) -> String {
    let name = &array.name;
    let reasons = array.members.iter().filter_map(|member| {
        let (index, drive) = (member.index, drive_of(member));
        let takeover = member.takeover.as_ref().map(|its| &its.spare);
        match (member.present, member.state) {
            (true, MemberState::Trusted) => None,
            (true, MemberState::Stale | MemberState::Rebuilding) => Some(format!(
                "what is on {drive} is old, and not read; `ashlar array rebuild {name}` fills it \
                 anew"
            )),
            (false, _) => Some(match takeover {
                Some(spare) => format!("{drive} is away; spare {spare} will take its place"),
                None => format!(
                    "{drive} is away; attach it again, or `ashlar array replace {name} --member \
                     {index} --new DRIVE`"
                ),
            }),
        }
    });
    let reasons: Vec<String> = reasons.collect();
    format!("array {name} is degraded: {}", reasons.join("; "))
}

/// Nothing is lost for good while the drives that it lacks may still come back.
fn failed(array: &Array) -> String {
    let name = &array.name;
    let lacking = |member: &&Member| !member.present && member.state == MemberState::Trusted;
    let lacking = array.members.iter().filter(lacking);
    let (broken, away): (Vec<_>, Vec<_>) = lacking.partition(|member| member.drive.is_some());
    let listed = |members: &[&Member]| {
        members.iter().map(|member| drive_of(member)).collect::<Vec<_>>().join(", ")
    };
    let mut fixes = Vec::new();
    if !away.is_empty() {
        fixes.push(format!("attach {} again: the array goes on then by itself", listed(&away)));
    }
    if !broken.is_empty() {
        fixes.push(format!(
            "{} failed, and will be tried again by `ashlar array stop {name} --force` and `ashlar \
             array start {name}`",
            listed(&broken)
        ));
    }
    if fixes.is_empty() {
        fixes.push(format!(
            "`ashlar array show {name}` lists its members; copy what can still be read"
        ));
    }
    format!(
        "array {name} has failed: some blocks cannot be read or written without drives that it \
         lacks; {}",
        fixes.join("; ")
    )
}

/// The name that its drive has, or had last.
fn drive_of(member: &Member) -> String {
    let name = member.drive.as_ref().or(member.last_drive.as_ref());
    name.map_or_else(
        || format!("the drive of member {}", member.index),
        |name| format!("drive {name}"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::drive::{DriveCounters, DriveSource};

    /// It counts as suspect for a while only; what it did needs a person longer.
    #[test]
    fn a_drive_that_lied_is_a_problem() {
        for health in [DriveHealth::Healthy, DriveHealth::Suspect] {
            let counters = DriveCounters { wrong_blocks: 2, ..DriveCounters::default() };
            let mut drive = Drive {
                path: None,
                name: "d1".into(),
                source: DriveSource::Path("/dev/d1".into()),
                state: DriveState::Member,
                error: None,
                kind: None,
                bytes: None,
                sector_bytes: None,
                content: None,
                uuid: None,
                array: Some("main".into()),
                array_uuid: None,
                member: None,
                health: Some(health),
                history: None,
                slow: None,
                slowness: None,
                full: None,
                counters: Some(counters),
                latency: None,
                traffic: None,
                queue: None,
            };
            let said = problems(std::slice::from_ref(&drive), &[], &[], &[]);
            assert_eq!(said.len(), 1);
            assert!(said[0].contains("d1 returned 2 blocks") && said[0].contains("scrub main"));
            drive.counters = Some(DriveCounters::default());
            let left = problems(&[drive], &[], &[], &[]).len();
            assert_eq!(left, usize::from(health == DriveHealth::Suspect));
        }
    }
}
