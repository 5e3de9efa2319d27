//! What the engine refuses, in words for the operator: each error with what mends it.

use ashlar_drive::error::DriveError;
use ashlar_pool::error::PoolError;
use ashlar_raid::error::{ArrayError, AssembleError, ChangeError};

use crate::refusal::Refusal;
use crate::size::Size;

/// What to call the drives of members that are not here.
#[derive(Default)]
pub struct Absent {
    pub all: Vec<String>,
    /// Those of them that lack nothing, as far as is known here: others may know better.
    pub whole: Vec<String>,
}

impl Absent {
    fn useful(&self) -> String {
        match (self.all.as_slice(), self.whole.as_slice()) {
            ([], _) => "others of its drives".to_owned(),
            (all, []) => all.join(", "),
            (_, whole) => whole.join(", "),
        }
    }
}

/// A refused start, of the array called `name`. `full`: its drives that had no room.
pub fn assemble(name: &str, drives: &Absent, full: &[String], error: &AssembleError) -> Refusal {
    let absent = &drives.all;
    let text = format!("array {name} cannot start: {error}");
    match error {
        AssembleError::NoLabel | AssembleError::NoSuperblock => Refusal::conflict(text)
            .fix("`ashlar drive show` says what its drives carry; attach those that are good"),
        AssembleError::Newer { .. } => Refusal::conflict(text)
            .fix("start the ashlar that wrote it; an older one would lose what that has written"),
        AssembleError::TooSmall { drive, member, has, needs } => Refusal::conflict(format!(
            "array {name} cannot start: the label of drive {drive} leaves {} for data, member \
             {member} holds {}",
            Size(*has),
            Size(*needs)
        ))
        .fix(format!(
            "it is not that member's drive: `ashlar drive detach {drive}`, then `ashlar array \
             start {name}`"
        )),
        AssembleError::Mixed => Refusal::conflict(text).fix("this is a bug; please report it"),
        AssembleError::Twice(_) => {
            Refusal::conflict(text).fix("`ashlar drive list` shows both; detach the wrong one")
        }
        AssembleError::TooFew { .. } => Refusal::conflict(text)
            .fix(format!("attach {}, then `ashlar array start {name}`", drives.useful())),
        AssembleError::MaybeOld if absent.is_empty() => Refusal::conflict(format!(
            "array {name} cannot start: its drives hold what it was before: this host had it later"
        ))
        .fix(format!(
            "attach the drives that it had then; or accept the loss: `ashlar array start {name} \
             --force`"
        )),
        AssembleError::CopyOfBefore { drive, .. } => Refusal::conflict(format!(
            "array {name} cannot start: drive {drive} holds a copy of before, and the others \
             cannot do without it"
        ))
        .fix(format!(
            "attach the drive that it was taken from; or take old data for good, where this one \
             has it: `ashlar array start {name} --force`"
        )),
        AssembleError::WrittenOver { drive, .. } => written_over(name, drive, absent),
        AssembleError::Silent { drive, .. } => silent(name, drive),
        AssembleError::Apart { ours, others } => apart(name, &ours.join(", "), &others.join(", ")),
        AssembleError::InUse { host } => {
            Refusal::conflict(format!("array {name} is in use by {host} (its lease is alive)"))
                .fix("stop it there first, or use --force, which risks that both hosts write")
        }
        AssembleError::JournalGone { .. } if absent.is_empty() => Refusal::conflict(text)
            .fix(format!("`ashlar array start {name} --force`: {}", cost_of_force(error))),
        AssembleError::Unheard if !full.is_empty() => not_written(name, full, ArrayError::NoSpace),
        AssembleError::MaybeOld
        | AssembleError::Unheard
        | AssembleError::LeaseUnreadable
        | AssembleError::Unreadable(_)
        | AssembleError::Journal { .. }
        | AssembleError::JournalUnreadable { .. }
        | AssembleError::JournalGone { .. } => {
            Refusal::conflict(text).fix(or_force(name, absent, cost_of_force(error)))
        }
        AssembleError::Array(error) => not_written(name, full, *error),
    }
}

fn written_over(name: &str, drive: &str, absent: &[String]) -> Refusal {
    let better = match absent {
        [] => format!("put back what drive {drive} had, from a copy of it"),
        absent => format!("attach {}", absent.join(", ")),
    };
    Refusal::conflict(format!(
        "array {name} cannot start: the beginning of drive {drive} was written over, and the \
         others cannot do without it"
    ))
    .fix(format!(
        "{better}, then `ashlar array start {name}`; or `ashlar array start {name} --force`: what \
         stands there now is read as data"
    ))
}

fn silent(name: &str, drive: &str) -> Refusal {
    Refusal::conflict(format!(
        "array {name} cannot start: drive {drive} may have gone on without the others, and what \
         it said of that cannot be read any more: they may hold old data"
    ))
    .fix(format!(
        "start it on the host that had it last, which remembers; or take what the others hold: \
         `ashlar array start {name} --force`"
    ))
}

fn apart(name: &str, ours: &str, others: &str) -> Refusal {
    Refusal::conflict(format!(
        "array {name} cannot start: {others} went on without {ours}, and {ours} without {others}; \
         each may have what the other lacks"
    ))
    .fix(format!(
        "`ashlar drive detach` those whose data shall be lost, then `ashlar array start {name}` \
         (with --force if it asks for it), and give them back as new ones: see `ashlar array \
         replace --help`"
    ))
}

/// What is lost by a start by force.
#[expect(clippy::wildcard_enum_match_arm, reason = "the others have no word for it")]
fn cost_of_force(refused: &AssembleError) -> &'static str {
    match refused {
        AssembleError::LeaseUnreadable => "if another host has it, both write",
        AssembleError::Unheard => "where they are used by themselves, old data is read",
        AssembleError::Unreadable(_) => {
            "the one before it is taken, and what was written first since is lost"
        }
        AssembleError::Journal { .. } | AssembleError::JournalUnreadable { .. } => {
            "what cannot be read of the last writes is lost: an error where it is known what they \
             were, and what stood there before where it is not"
        }
        AssembleError::JournalGone { degraded: false } => {
            "the last writes are lost: what stood there before them is read, or parts of both; and \
             all stripes are resynced"
        }
        // Parity that may not fit tells nothing of them.
        AssembleError::JournalGone { degraded: true } => {
            "the last writes are lost, and so are the blocks of members that are absent, or not \
             rebuilt: an error until they are written again"
        }
        _ => "what only they hold is lost",
    }
}

/// A start writes to each of its drives. That none of them can be written, as the engine says, is
/// more than it knows.
fn not_written(name: &str, full: &[String], error: ArrayError) -> Refusal {
    if error != ArrayError::NoSpace {
        let text = format!("array {name} cannot start: what a start writes failed: {error}");
        return array(text, error);
    }
    let (which, under, drive) = match full {
        [] => ("one of its drives".to_owned(), "its drives".to_owned(), "DRIVE"),
        [one] => (format!("drive {one}"), format!("drive {one}"), one.as_str()),
        many => {
            let many = format!("drives {}", many.join(", "));
            (many.clone(), many, "DRIVE")
        }
    };
    let start = format!("then `ashlar array start {name}`");
    Refusal::no_space(format!("array {name} cannot start: there is no room for it under {which}"))
        .fix(format!(
            "make room on the file system under {under}, {start}; or, if the others can do without \
             what has no room, `ashlar drive detach {drive}`, {start}"
        ))
}

/// What could not be finished of the array called `name`, which was stopped all the same.
pub fn stop(name: &str, error: ArrayError) -> Refusal {
    let start = format!("`ashlar array start {name}`");
    let stopped = format!("array {name} was stopped, but not cleanly");
    match error {
        // The engine's words are for blocks that somebody asks for. Nobody does.
        ArrayError::Lost => {
            Refusal::failed(format!("{stopped}: too many of its drives are missing or failed"))
                .fix(format!("once they are there, {start} goes on from what they hold"))
        }
        ArrayError::NoSpace => Refusal::failed(format!(
            "{stopped}: there is no room under its drives for what its journals hold"
        ))
        .fix(format!("make room on the file system under them, then {start} puts that in place")),
        ArrayError::Range | ArrayError::Bad | ArrayError::TooManyBad | ArrayError::Stopped => {
            Refusal::failed(format!("{stopped}: {error}"))
                .fix(format!("{start} makes its drives agree again"))
        }
    }
}

/// The ways to start an array after all; `cost`: what is lost by force.
fn or_force(name: &str, absent: &[String], cost: &str) -> String {
    let start = format!("`ashlar array start {name}`");
    let better = match absent {
        [] => format!("{start} once more: perhaps all can be read and written then"),
        absent => format!("attach {}, then {start}", absent.join(", ")),
    };
    format!("{better}; or `ashlar array start {name} --force`: {cost}")
}

/// A refused change, by `ashlar array COMMAND`, of the array called `name`.
pub fn change(name: &str, command: &str, error: &ChangeError) -> Refusal {
    let text = error.to_string();
    match error {
        ChangeError::Spec(_) => {
            Refusal::invalid(text).fix(format!("see `ashlar array {command} --help`"))
        }
        ChangeError::WaitsForStart { .. } => Refusal::conflict(text).fix(format!(
            "`ashlar array stop {name} --force`, then `ashlar array start {name}`, takes it back"
        )),
        ChangeError::DriveTooSmall { needs, .. } if command == "create" => {
            Refusal::conflict(text).fix(format!("use a drive of at least {}", Size(*needs)))
        }
        ChangeError::DriveTooSmall { drive, has, needs } => too_small(name, drive, *has, *needs),
        ChangeError::Drive { drive, error } => drive_trouble(text, drive, *error),
        ChangeError::NoMember(_) => {
            Refusal::unknown(text).fix(format!("`ashlar array show {name}` lists the members"))
        }
        ChangeError::MemberInUse(_) => Refusal::conflict(text)
            .fix("--force pulls it for you; its redundancy is lost until the rebuild is done"),
        ChangeError::UsedElsewhere { drive, member } => Refusal::conflict(text).fix(format!(
            "see `ashlar inspect` of it; if what it has may be lost: `ashlar array replace {name} \
             --member {member} --new {drive} --force`; else detach it: a start may be refused \
             while both are there"
        )),
        ChangeError::MemberNeeded(_) => Refusal::conflict(text).fix(
            "bring its own drive or the other members back, or wait until they are rebuilt; if \
             that cannot be, make a new array, and copy what can still be read",
        ),
        ChangeError::NotOptimal => Refusal::conflict(text).fix(format!(
            "`ashlar array show {name}` lists the members; `ashlar array rebuild {name}` rebuilds \
             those whose drives are here"
        )),
        ChangeError::NothingToGain { member, drive, has, holds } => Refusal::conflict(format!(
            "there is nothing to gain: member {member} has drive {drive} of {}, and holds {} of \
             data: no more fits",
            Size(*has),
            Size(*holds)
        ))
        .fix(format!(
            "give it a larger drive, by `ashlar array replace {name} --member {member} --new \
             DRIVE`, or make drive {drive} itself larger, and then grow again"
        )),
        ChangeError::NoRoomForChecksums { member, drive, has, holds } => {
            Refusal::conflict(format!(
                "there is nothing to gain: member {member} has drive {drive} of {}, and room for \
                 the checksums of {} of data, which it holds",
                Size(*has),
                Size(*holds)
            ))
            .fix(format!(
                "that room is laid out when a drive becomes a member: give it another drive of \
                 this size, by `ashlar array replace {name} --member {member} --new DRIVE`; drive \
                 {drive} can take the next member's place then, and so on; grow again after the \
                 last one"
            ))
        }
        ChangeError::Busy(_) if command == "scrub" => Refusal::conflict(text).fix(format!(
            "`ashlar array show {name}` says how far it is; `ashlar array scrub {name} --stop` \
             ends a scrub"
        )),
        ChangeError::Busy(_) => Refusal::conflict(text).fix("wait until it is done"),
        ChangeError::Array(error) => array(text, *error),
    }
}

/// A drive that cannot be a member of an array that is there: it also takes room for a journal, as
/// large as the drive has it, and more. So nobody can say how large it had to be.
pub fn too_small(array: &str, drive: &str, has: u64, data_bytes: u64) -> Refusal {
    let (has, holds) = (Size(has), Size(data_bytes));
    Refusal::conflict(format!(
        "drive {drive} is too small: it has {has}, a member of array {array} holds {holds} of \
         data, and what it takes to keep that"
    ))
    .fix("use a drive that is as large as the others")
}

/// A refused change of a volume.
pub fn pool(error: &PoolError) -> Refusal {
    let text = error.to_string();
    match error {
        PoolError::Exists(_) => Refusal::conflict(text).fix("give it another name"),
        PoolError::NotFound(_) => {
            Refusal::unknown(text).fix("`ashlar volume list` shows all volumes")
        }
        PoolError::Full { wanted, free } => {
            Refusal::no_space(format!("the array has {} free, not {}", Size(*free), Size(*wanted)))
                .fix("use a smaller --size, or delete a volume")
        }
        PoolError::Fragmented { .. } => Refusal::no_space(text).fix(
            "use a smaller --size, delete a volume, or copy this one into a new one of that size",
        ),
        PoolError::TooMany(_) => {
            Refusal::no_space(text).fix("delete a volume, or use another array")
        }
        PoolError::Shrink { has } => {
            Refusal::conflict(format!("a volume can only grow: it has {}", Size(*has)))
                .fix("use a larger --size")
        }
        PoolError::Busy => Refusal::conflict(text),
        PoolError::Name(_) => Refusal::invalid(text),
        PoolError::Size => Refusal::invalid(text).fix("such as 10G"),
        PoolError::Array(error) => array(text, *error),
    }
}

/// An array that could not do what was asked; `text` says what that was.
pub fn array(text: String, error: ArrayError) -> Refusal {
    match error {
        ArrayError::Range => Refusal::invalid(text),
        ArrayError::Lost => Refusal::conflict(text).fix("bring the missing drives back"),
        ArrayError::Bad => Refusal::conflict(text).fix("write them again, as from a backup"),
        ArrayError::TooManyBad => {
            Refusal::conflict(text).fix("write them again, as from a backup, or discard them")
        }
        ArrayError::NoSpace => {
            Refusal::no_space(text).fix("make room on the file system under the drives")
        }
        ArrayError::Stopped => Refusal::conflict(text).fix("start the array first"),
    }
}

fn drive_trouble(text: String, drive: &str, error: DriveError) -> Refusal {
    match error {
        DriveError::NoSpace => {
            Refusal::no_space(text).fix(format!("make room on the file system under drive {drive}"))
        }
        DriveError::Media
        | DriveError::Gone
        | DriveError::Memory
        | DriveError::Unsupported
        | DriveError::Io(_) => {
            Refusal::failed(text).fix(format!("use another drive instead of {drive}"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stop_with_too_few_drives_speaks_of_no_lost_blocks() {
        let said = stop("far", ArrayError::Lost).line();
        assert!(said.contains("array far was stopped, but not cleanly"), "{said}");
        assert!(said.contains("`ashlar array start far`") && !said.contains("lost"), "{said}");
    }

    #[test]
    fn a_start_without_room_names_the_drive_that_has_none() {
        let error = AssembleError::Array(ArrayError::NoSpace);
        let said = |full: &[String]| assemble("a", &Absent::default(), full, &error).line();
        let one = said(&["d2".to_owned()]);
        assert!(one.contains("no room for it under drive d2"), "{one}");
        assert!(one.contains("`ashlar drive detach d2`, then `ashlar array start a`"), "{one}");
        let unknown = said(&[]);
        assert!(unknown.contains("no room for it under one of its drives"), "{unknown}");
        assert!(unknown.contains("make room on the file system under its drives, then"));
    }

    /// What the engine says is needed is what a member holds, not how large a drive has to be.
    #[test]
    fn a_drive_too_small_for_an_array_is_told_as_such() {
        let (drive, has, needs) = ("gx".to_owned(), 150 << 20, 149 << 20);
        let error = ChangeError::DriveTooSmall { drive, has, needs };
        let said = change("a", "grow", &error).line();
        assert!(said.contains("drive gx is too small: it has 150M"), "{said}");
        assert!(said.contains("as large as the others"), "{said}");
        assert!(change("a", "create", &error).line().contains("at least 149M"));
    }
}
