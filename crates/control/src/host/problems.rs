//! What needs a person, in words that say what to do.

use crate::api::array::{Array, ArrayState, Member, MemberState, Scrub};
use crate::api::drive::{
    Drive, DriveCounters, DriveHealth, DriveKind, DriveSource, DriveState, PathState,
};
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
    drives.iter().for_each(|drive| note_problems_of_drive(drive, &mut problems));
    arrays.iter().for_each(|array| note_problems_of_array(array, drives, &mut problems));
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
        let name = &export.name;
        match (export.state, &export.unreachable) {
            (ExportState::Down, _) => {
                let error = export.error.as_deref().unwrap_or_default();
                problems.push(format!("export {name} is down: {error}"));
            }
            (ExportState::Connected, Some(why)) => problems.push(format!(
                "export {name}: {why}; who is connected stays so, and once nobody is, it is made \
                 anew"
            )),
            (ExportState::Connected, None) | (ExportState::Listening, _) => {}
        }
    }
    problems
}

fn note_problems_of_drive(drive: &Drive, problems: &mut Vec<String>) {
    let name = &drive.name;
    let error = drive.error.as_deref().unwrap_or_default();
    match (drive.state, drive.health) {
        (DriveState::Missing, _) => problems.push(format!("drive {name} is missing: {error}")),
        // What to do is told below.
        (_, Some(DriveHealth::Failed)) if error.contains("was cut short") => {}
        (_, Some(DriveHealth::Failed)) if is_lost(drive) => {
            problems.push(format!("drive {name} is not reached; it is looked for all the time"));
        }
        (_, Some(DriveHealth::Failed)) => problems.push(format!(
            "drive {name} has failed; replace it: `ashlar array replace {} --old {name} --new \
             DRIVE`",
            drive.array.as_deref().unwrap_or("ARRAY")
        )),
        (_, Some(DriveHealth::Suspect)) if has_errors(drive) || !has_lied(drive) => {
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
    if let Some(its) = drive.history.as_ref().filter(|_| has_lied(drive)) {
        problems.push(format!(
            "drive {name} returned {} blocks and {} checksums other than they were written, \
             without an error; `ashlar array scrub {} --wait` finds and mends the rest; then \
             `ashlar drive clear {name}`, and replace it if there are more later",
            its.wrong_blocks,
            its.wrong_checksums,
            drive.array.as_deref().unwrap_or("ARRAY")
        ));
    }
    if drive.deleted {
        let array = drive.array.as_deref().unwrap_or("ARRAY");
        problems.push(match drive.state == DriveState::Member {
            true => format!(
                "drive {name}: its file was deleted, and is gone once the daemon stops; while it \
                 can be read, `ashlar array replace {array} --old {name} --new DRIVE --force`"
            ),
            false => format!(
                "drive {name}: its file was deleted; `ashlar drive detach {name}`, if nothing on \
                 it is needed any more"
            ),
        });
    }
    if let Some(its) = drive.counters.filter(|_| drive.full == Some(true)) {
        problems.push(format!(
            "drive {name} had no room lately, {} writes failed for that so far; make room for its \
             file (`df`), or in the pool of its thin device, and it goes on",
            its.no_space
        ));
    }
    problems.extend(failed_before(drive));
    if let Some(its) = drive.slowness.filter(|_| drive.health != Some(DriveHealth::Failed)) {
        problems.push(format!("drive {name} is slow: {its}"));
    }
}

/// It is another host's, and the way there ended.
fn is_lost(drive: &Drive) -> bool {
    drive.path.as_ref().is_some_and(|path| path.state == PathState::Lost)
}

/// Since its array was started.
fn has_errors(drive: &Drive) -> bool {
    let errors = |its: &DriveCounters| its.read_errors + its.write_errors + its.timeouts;
    drive.counters.as_ref().is_some_and(|its| errors(its) > 0)
}

fn has_lied(drive: &Drive) -> bool {
    // Over all starts, until it is forgiven.
    let known = drive.history.as_ref().filter(|_| drive.state == DriveState::Member);
    known.is_some_and(|its| its.wrong_blocks + its.wrong_checksums > 0)
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

fn note_problems_of_array(array: &Array, drives: &[Drive], problems: &mut Vec<String>) {
    let name = &array.name;
    match array.state {
        ArrayState::Optimal | ArrayState::Stopped => {}
        ArrayState::Degraded => problems.push(degraded(array, drives)),
        ArrayState::Failed => problems.push(failed(array, drives)),
        ArrayState::Unavailable => problems.extend(array.error.clone()),
    }
    if !array.bad_blocks.is_empty() {
        let count = array.bad_blocks.len();
        problems.push(format!(
            "array {name} has lost blocks, in {count} places; see `ashlar array show {name}`"
        ));
    }
    let mismatched = |its: &&Scrub| its.mismatched_stripes > 0 && !its.is_mended();
    if let Some(scrub) = array.scrub.as_ref().filter(mismatched) {
        let stripes = scrub.mismatched_stripes;
        problems.push(format!(
            "array {name}: the last scrub found {stripes} stripes that did not agree, and did not \
             repair all that was wrong; `ashlar array show {name}` says where"
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

/// What has become of the drive of a member that does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Whereabouts {
    /// It is not attached.
    Away,
    /// It is another host's: it is looked for all the time.
    Unreached,
    /// It is attached, and its array has given it up.
    Failed,
    /// It is attached, and its array does not use it: why is told of the drive.
    Unused,
}

/// With what to call the drive. Another may have its name by now, and it may be here by another.
fn whereabouts(member: &Member, drives: &[Drive]) -> (Whereabouts, String) {
    let attached = |drive: &&Drive| drive.state != DriveState::Missing;
    let is_its = |drive: &&Drive| {
        drive.uuid == Some(member.drive_uuid) || Some(&drive.name) == member.drive.as_ref()
    };
    if let Some(drive) = drives.iter().filter(attached).find(is_its) {
        let found = match (is_lost(drive), &member.drive) {
            (true, _) => Whereabouts::Unreached,
            (false, Some(_)) => Whereabouts::Failed,
            (false, None) => Whereabouts::Unused,
        };
        return (found, format!("drive {}", drive.name));
    }
    let last = member.drive.as_ref().or(member.last_drive.as_ref());
    let named = last.and_then(|name| drives.iter().find(|drive| drive.name == *name));
    let found = match named.filter(|drive| !attached(drive)).map(|drive| &drive.source) {
        Some(DriveSource::NvmeTcp(_)) => Whereabouts::Unreached,
        Some(_) | None => Whereabouts::Away,
    };
    match last.filter(|_| !named.is_some_and(|drive| attached(&drive))) {
        Some(name) => (found, format!("drive {name}")),
        None => (found, format!("the drive of member {}", member.index)),
    }
}

/// Which members lack what, and what gives it to them.
fn degraded(array: &Array, drives: &[Drive]) -> String {
    let reasons: Vec<String> =
        array.members.iter().filter_map(|member| lacks(array, member, drives)).collect();
    format!("array {} is degraded: {}", array.name, reasons.join("; "))
}

/// What a member of a degraded array lacks; `None`: nothing.
fn lacks(array: &Array, member: &Member, drives: &[Drive]) -> Option<String> {
    let (name, index) = (&array.name, member.index);
    let (found, drive) = whereabouts(member, drives);
    let replace = format!("`ashlar array replace {name} --member {index} --new DRIVE`");
    let (what, fix) = match (member.present, member.state) {
        (true, MemberState::Trusted) => return None,
        (true, MemberState::Rebuilding) => {
            return Some(match (&array.rebuild, &array.rebuild_error) {
                (Some(_), _) => {
                    format!("{drive} is being rebuilt, {} % so far", member.rebuilt_percent)
                }
                (None, Some(why)) => format!("the rebuild of {drive} stopped: {why}"),
                (None, None) => {
                    format!("{drive} is not rebuilt; `ashlar array rebuild {name}` goes on with it")
                }
            });
        }
        (true, MemberState::Stale) => (
            format!("what is on {drive} is old, and not read"),
            format!("`ashlar array rebuild {name}` fills it anew"),
        ),
        (false, _) => match found {
            Whereabouts::Away => {
                (format!("{drive} is away"), format!("attach it again, or {replace}"))
            }
            Whereabouts::Unreached => (
                format!("{drive} is not reached"),
                format!("it is taken back once it is, or {replace}"),
            ),
            Whereabouts::Failed => (format!("{drive} failed"), replace),
            Whereabouts::Unused => (format!("{drive} is not used"), replace),
        },
    };
    let taken_over = |spare: &str| format!("spare {spare} will take its place");
    let fix = member.takeover.as_ref().map_or(fix, |its| taken_over(&its.spare));
    Some(format!("{what}; {fix}"))
}

/// Nothing is lost for good while the drives that it lacks may still come back.
fn failed(array: &Array, drives: &[Drive]) -> String {
    let name = &array.name;
    let lacking = |member: &&Member| !member.present && member.state == MemberState::Trusted;
    let (mut fixes, mut goes_on) = (Vec::new(), false);
    for member in array.members.iter().filter(lacking) {
        let (found, drive) = whereabouts(member, drives);
        goes_on |= matches!(found, Whereabouts::Away | Whereabouts::Unreached);
        fixes.push(match found {
            Whereabouts::Away => format!("{drive} is away: attach it again"),
            Whereabouts::Unreached => {
                format!("{drive} is not reached: it is taken back once it is")
            }
            // What it had not flushed may be lost: only a start can tell whether that is elsewhere.
            Whereabouts::Failed => format!(
                "{drive} failed: if it can be read again, `ashlar array stop {name} --force` and \
                 `ashlar array start {name}` take it back (detach and attach it between these if \
                 its device was gone)"
            ),
            Whereabouts::Unused => format!("{drive} is attached, and not used"),
        });
    }
    match (fixes.is_empty(), goes_on) {
        (true, _) => fixes.push(format!(
            "`ashlar array show {name}` lists its members; copy what can still be read"
        )),
        (false, true) => fixes.push(
            "it goes on by itself once enough are back, or says what else they need".to_owned(),
        ),
        (false, false) => {}
    }
    format!(
        "array {name} has failed: some blocks cannot be read or written without drives that it \
         lacks; {}",
        fixes.join("; ")
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::drive::DriveHistory;

    /// It counts as suspect for a while only; what it did needs a person longer.
    #[test]
    fn a_drive_that_lied_is_a_problem() {
        for health in [DriveHealth::Healthy, DriveHealth::Suspect] {
            let history = DriveHistory { wrong_blocks: 2, ..DriveHistory::default() };
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
                history: Some(history),
                slow: None,
                slowness: None,
                full: None,
                deleted: false,
                counters: None,
                latency: None,
                traffic: None,
                queue: None,
            };
            let said = problems(std::slice::from_ref(&drive), &[], &[], &[]);
            assert_eq!(said.len(), 1);
            assert!(said[0].contains("d1 returned 2 blocks") && said[0].contains("scrub main"));
            drive.history = None;
            let left = problems(&[drive], &[], &[], &[]).len();
            assert_eq!(left, usize::from(health == DriveHealth::Suspect));
        }
    }
}
