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
    for drive in drives {
        note_problems_of_drive(drive, array_of(drive, arrays), &mut problems);
    }
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

/// The array that a drive is a member of, or whose label it carries.
fn array_of<'a>(drive: &Drive, arrays: &'a [Array]) -> Option<&'a Array> {
    let uuid = drive.array_uuid?;
    arrays.iter().find(|its| its.uuid == uuid)
}

/// Whether other drives can take the places of members. Level 0 has nothing to fill them from; and
/// where too many are out, each of them may be what the array needs to be whole again.
fn bears_replacement(array: &Array) -> bool {
    let is_redundant = array.parity_chunks != Some(0) || array.copies.is_some_and(|its| its > 1);
    let runs = matches!(array.state, ArrayState::Optimal | ArrayState::Degraded);
    runs && is_redundant
}

/// Whether all data of an array is there without a drive.
fn can_do_without(array: &Array, drive: &str) -> bool {
    state_in(array, drive) != Some(MemberState::Trusted) || array.may_lose > Some(0)
}

/// `None`: it is no member.
fn state_in(array: &Array, drive: &str) -> Option<MemberState> {
    let its = array.members.iter().find(|member| member.drive.as_deref() == Some(drive));
    its.map(|member| member.state)
}

fn note_problems_of_drive(drive: &Drive, array: Option<&Array>, problems: &mut Vec<String>) {
    // What is said of it must not cost the array the drive.
    let kept = array.filter(|its| !bears_replacement(its));
    let name = &drive.name;
    let error = drive.error.as_deref().unwrap_or_default();
    match (drive.state, drive.health) {
        (DriveState::Missing, _) => problems.push(format!("drive {name} is missing: {error}")),
        // What to do is told below.
        (_, Some(DriveHealth::Failed)) if error.contains("was cut short") => {}
        (_, Some(DriveHealth::Failed)) if is_another(drive) => problems.push(format!(
            "another namespace answers at the address of drive {name}: `ashlar drive detach {name} \
             --force`, and attach that anew if it is meant"
        )),
        (_, Some(DriveHealth::Failed)) if is_lost(drive) => {
            let path = drive.path.as_ref().and_then(|path| path.error.as_deref());
            let why = path.map_or(String::new(), |error| format!(" ({error})"));
            problems
                .push(format!("drive {name} is not reached{why}; it is looked for all the time"));
        }
        (_, Some(DriveHealth::Failed)) => problems.push(has_failed(drive, kept)),
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
    if drive.state != DriveState::Missing && !error.is_empty() && !is_lost(drive) {
        problems.push(is_not_used(drive, kept, error));
    }
    if let Some(its) = drive.history.as_ref().filter(|_| has_lied(drive)) {
        let replace = if kept.is_none() { ", and replace it if there are more later" } else { "" };
        problems.push(format!(
            "drive {name} returned {} blocks and {} checksums other than they were written, \
             without an error; `ashlar array scrub {} --wait` finds and mends the rest; then \
             `ashlar drive clear {name}`{replace}",
            its.wrong_blocks,
            its.wrong_checksums,
            array_name(drive)
        ));
    }
    if drive.deleted {
        problems.push(is_deleted(drive, kept));
    }
    if let Some(its) = drive.counters.filter(|_| drive.full == Some(true)) {
        problems.push(format!(
            "drive {name} had no room lately, {} writes failed for that so far; make room for its \
             file (`df`), or in the pool of its thin device, {}",
            its.no_space,
            once_there_is_room(name, array)
        ));
    }
    problems.extend(failed_before(drive, kept));
    if let Some(its) = drive.slowness.filter(|_| drive.health != Some(DriveHealth::Failed)) {
        problems.push(format!("drive {name} is slow: {its}"));
    }
}

/// What becomes of a drive that had none.
fn once_there_is_room(drive: &str, array: Option<&Array>) -> String {
    match array {
        Some(array) if state_in(array, drive).is_some_and(|its| its != MemberState::Trusted) => {
            format!(
                "then `ashlar array rebuild {}` fills it; guests do not wait for that",
                array.name
            )
        }
        Some(array) if can_do_without(array, drive) => format!(
            "and it goes on; until then guests may get errors: `ashlar drive detach {drive} \
             --force` lets array {} go on without it",
            array.name
        ),
        Some(_) | None => "and it goes on".to_owned(),
    }
}

fn array_name(drive: &Drive) -> &str {
    drive.array.as_deref().unwrap_or("ARRAY")
}

/// `kept`: its array, if nothing can take the drive's place there.
fn has_failed(drive: &Drive, kept: Option<&Array>) -> String {
    let (name, array) = (&drive.name, array_name(drive));
    match kept {
        Some(_) => format!(
            "drive {name} has failed; replace nothing: what may help is told of array {array}"
        ),
        None => format!(
            "drive {name} has failed; replace it: `ashlar array replace {array} --old {name} \
             --new DRIVE`"
        ),
    }
}

fn is_not_used(drive: &Drive, kept: Option<&Array>, error: &str) -> String {
    let name = &drive.name;
    // What else could be done with such a drive wipes it.
    match kept.filter(|_| error.contains("was cut short")) {
        Some(array) => format!(
            "drive {name} is not used: its file was cut short, and array {} may need what is in \
             it; once all of it is again as it was, detach it (`ashlar drive detach {name} \
             --force`) and attach it with --whole",
            array.name
        ),
        None => format!("drive {name} is not used: {error}"),
    }
}

fn is_deleted(drive: &Drive, kept: Option<&Array>) -> String {
    let (name, array) = (&drive.name, array_name(drive));
    match (drive.state, kept) {
        (DriveState::Member, Some(_)) => format!(
            "drive {name}: its file was deleted, and is gone once the daemon stops; nothing can \
             take its place in array {array}, so copy what can still be read before that"
        ),
        (DriveState::Member, None) => format!(
            "drive {name}: its file was deleted, and is gone once the daemon stops; while it can \
             be read, `ashlar array replace {array} --old {name} --new DRIVE --force`"
        ),
        (_, _) => format!(
            "drive {name}: its file was deleted; `ashlar drive detach {name}`, if nothing on it is \
             needed any more"
        ),
    }
}

/// It is another host's, and the way there ended.
fn is_lost(drive: &Drive) -> bool {
    is_another(drive) || has_path(drive, PathState::Lost)
}

/// The same, and another namespace answers at its address.
fn is_another(drive: &Drive) -> bool {
    has_path(drive, PathState::Another)
}

fn has_path(drive: &Drive, state: PathState) -> bool {
    drive.path.as_ref().is_some_and(|path| path.state == state)
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
fn failed_before(drive: &Drive, kept: Option<&Array>) -> Option<String> {
    let failure = drive.history.as_ref()?.failure.as_deref()?;
    let is_here = drive.kind != Some(DriveKind::Remote);
    let is_used = is_here && drive.health.is_some_and(|health| health != DriveHealth::Failed);
    let name = &drive.name;
    let replace = if kept.is_none() { "replace it, or " } else { "" };
    is_used.then(|| {
        format!(
            "drive {name} has failed before ({failure}) and is used again; {replace}run `ashlar \
             drive clear {name}` if you trust it"
        )
    })
}

fn note_problems_of_array(array: &Array, drives: &[Drive], problems: &mut Vec<String>) {
    let name = &array.name;
    match array.state {
        ArrayState::Optimal | ArrayState::Stopped => {}
        ArrayState::Degraded => problems.push(degraded(array, drives)),
        ArrayState::Failed => problems.push(failed(array, drives)),
        ArrayState::Unavailable | ArrayState::Silent => problems.extend(array.error.clone()),
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
        // Where members were missing no places are kept.
        let says = if scrub.has_places_left() { "where, and what to do" } else { "what to do" };
        problems.push(format!(
            "array {name}: the last scrub could not check {stripes} stripes; \
             `ashlar array show {name}` says {says}"
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
    /// The same, and another namespace is where it was.
    Another,
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
            (true, _) if is_another(drive) => Whereabouts::Another,
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
            Whereabouts::Another => (format!("{drive} is another now"), replace),
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
        goes_on |=
            matches!(found, Whereabouts::Away | Whereabouts::Unreached | Whereabouts::Another);
        fixes.push(match found {
            Whereabouts::Away => format!("{drive} is away: attach it again"),
            Whereabouts::Unreached => {
                format!("{drive} is not reached: it is taken back once it is")
            }
            Whereabouts::Another => format!(
                "another namespace is where {drive} was: have its target offer that one again"
            ),
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
    use crate::api::array::{ScrubFlaw, ScrubPlace};
    use crate::api::drive::DriveHistory;
    use crate::host::show::{idle_array, missing_drive};
    use uuid::Uuid;

    const ARRAY: Uuid = Uuid::from_u128(7);

    fn member(name: &str, health: DriveHealth) -> Drive {
        Drive {
            state: DriveState::Member,
            health: Some(health),
            array: Some("main".into()),
            array_uuid: Some(ARRAY),
            ..missing_drive(name, DriveSource::Path("/dev/d1".into()), None)
        }
    }

    fn array(state: ArrayState, parity: u8, copies: u8) -> Array {
        Array {
            parity_chunks: Some(parity),
            copies: Some(copies),
            ..idle_array("main", ARRAY, state, None)
        }
    }

    /// It counts as suspect for a while only; what it did needs a person longer.
    #[test]
    fn a_drive_that_lied_is_a_problem() {
        for health in [DriveHealth::Healthy, DriveHealth::Suspect] {
            let history = DriveHistory { wrong_blocks: 2, ..DriveHistory::default() };
            let mut drive = Drive { history: Some(history), ..member("d1", health) };
            let said = problems(std::slice::from_ref(&drive), &[], &[], &[]);
            assert_eq!(said.len(), 1);
            assert!(said[0].contains("d1 returned 2 blocks") && said[0].contains("scrub main"));
            drive.history = None;
            let left = problems(&[drive], &[], &[], &[]).len();
            assert_eq!(left, usize::from(health == DriveHealth::Suspect));
        }
    }

    /// What is said of its drives agrees with what is said of an array that has failed.
    #[test]
    fn no_drive_is_to_be_replaced_that_its_array_may_need() {
        let failed = member("d1", DriveHealth::Failed);
        let deleted = Drive { deleted: true, ..member("d2", DriveHealth::Healthy) };
        let error = Some("its file was cut short; attach it with --force, which wipes it".into());
        let cut = Drive { error, ..member("d3", DriveHealth::Failed) };
        let drives = [failed, deleted, cut];
        let said = |array: Array| problems(&drives, &[array], &[], &[]).join("\n");
        for (parity, copies) in [(1, 1), (0, 2)] {
            let said = said(array(ArrayState::Degraded, parity, copies));
            assert!(said.contains("`ashlar array replace main --old d1 --new DRIVE`"), "{said}");
            assert!(said.contains("replace main --old d2 --new DRIVE --force`"), "{said}");
            assert!(said.contains("which wipes it"), "{said}");
        }
        use ArrayState::{Failed, Optimal};
        for array in [array(Failed, 1, 1), array(Failed, 0, 2), array(Optimal, 0, 1)] {
            let said = said(array);
            assert!(said.contains("drive d1 has failed; replace nothing"), "{said}");
            assert!(said.contains("d2: its file was deleted") && said.contains("copy"), "{said}");
            assert!(said.contains("d3 --force`) and attach it with --whole"), "{said}");
            assert!(!said.contains("array replace") && !said.contains("wipes"), "{said}");
        }
    }

    /// `array show` gives places of blocks, and none of stripes that lacked members.
    #[test]
    fn places_of_a_scrub_are_told_where_there_are_some() {
        let place = ScrubPlace {
            stripe: 0,
            offset: 0,
            len: 4096,
            volume: None,
            volume_offset: None,
            member: Some(0),
            what: ScrubFlaw::Block,
            repaired: false,
        };
        for (places, says) in [(vec![], "says what to do"), (vec![place], "says where, and what")] {
            let scrub = Scrub { unreadable_stripes: 1, places, ..Scrub::clean() };
            let array = Array { scrub: Some(scrub), ..array(ArrayState::Optimal, 1, 1) };
            let said = problems(&[], &[array], &[], &[]).join("\n");
            assert!(said.contains(says), "{said}");
        }
    }
}
