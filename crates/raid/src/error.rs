//! What an array can answer instead of data.

use std::ops::Range;

use ashlar_format::units::MemberIndex;

/// Why a read, write or flush was not done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ArrayError {
    #[error("beyond the end of the array, or not a multiple of 512 bytes")]
    Range,
    /// More members are lost than the level can do without; other blocks may be fine.
    #[error("these blocks are lost: too many members are missing")]
    Lost,
    /// They were given up; or a part of a sector was to be written whose rest was.
    #[error("these blocks are lost until they are written again, as whole sectors")]
    Bad,
    #[error("the list of bad blocks is full")]
    TooManyBad,
    #[error("no space left under a member")]
    NoSpace,
    #[error("the array was stopped")]
    Stopped,
}

/// Why a change of an array was refused. Nothing was changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChangeError {
    #[error("{0}")]
    Spec(String),
    #[error("drive {drive} has {has} bytes; {needs} are needed")]
    DriveTooSmall { drive: String, has: u64, needs: u64 },
    #[error("drive {drive}: {error}")]
    Drive { drive: String, error: ashlar_drive::error::DriveError },
    #[error("there is no member {0}")]
    NoMember(MemberIndex),
    /// A member's own drive that an array which runs cannot take.
    #[error("drive {drive}: {why}")]
    WaitsForStart { drive: String, why: &'static str },
    #[error("member {0} is in use; pull its drive first")]
    MemberInUse(MemberIndex),
    #[error("member {0} holds what no other member that is here has; nothing could replace it")]
    MemberNeeded(MemberIndex),
    /// It may hold what the array does not.
    #[error(
        "drive {drive} was member {member}, and has been used elsewhere since, or by an array \
         started without the others"
    )]
    UsedElsewhere { drive: String, member: MemberIndex },
    #[error("all members must be here and trusted for this: rebuild or replace the others first")]
    NotOptimal,
    /// The member with the smallest drive holds as much as that has room for.
    #[error(
        "there is nothing to gain: member {member} ({drive}, {has} bytes) holds {holds} bytes of \
         data, all that fits; give it a larger drive, or make this one larger"
    )]
    NothingToGain { member: MemberIndex, drive: String, has: u64, holds: u64 },
    /// What a member holds is all that its area for checksums has room for: that is laid out when
    /// a drive becomes a member, for what the drive has then.
    #[error(
        "there is nothing to gain: member {member} ({drive}, {has} bytes) holds {holds} bytes of \
         data, all that it has room for checksums of; give it another drive"
    )]
    NoRoomForChecksums { member: MemberIndex, drive: String, has: u64, holds: u64 },
    #[error("{0} is already running")]
    Busy(&'static str),
    #[error("the array cannot do this now: {0}")]
    Array(#[from] ArrayError),
}

/// Why drives could not be put together to an array.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AssembleError {
    #[error("none of these drives has an array's label")]
    NoLabel,
    #[error("the drives belong to more than one array")]
    Mixed,
    #[error("two drives say that they are member {0}; detach the one that is wrong")]
    Twice(MemberIndex),
    #[error("no superblock can be read")]
    NoSuperblock,
    #[error("drive {drive} was written by a newer build ({what} version {version})")]
    Newer { drive: String, what: &'static str, version: u16 },
    #[error("drive {drive} has room for {has} bytes; member {member} holds {needs}")]
    TooSmall { drive: String, member: MemberIndex, has: u64, needs: u64 },
    /// `among`: the first members that stand for each other of whom too few are here. `old`: drives
    /// of others that are here, and do not hold everything.
    #[error(
        "{}{present} of {needed} members that are needed are here{}",
        set_shown(among),
        not_counted(old)
    )]
    TooFew { among: Option<Range<usize>>, present: usize, needed: usize, old: Vec<String> },
    #[error("members that are absent may hold newer data than those that are here")]
    MaybeOld,
    /// Those would serve what is old.
    #[error(
        "members that are absent, or do not take what is written to them, may not know that all \
         is on those that are left, and could be started without them"
    )]
    Unheard,
    /// Nothing on it says what it lacks.
    #[error(
        "drive {drive} of member {member} holds a copy of before: the array has been changed \
         since; attach the drive that it was taken from, or use --force to read old data from it"
    )]
    CopyOfBefore { drive: String, member: MemberIndex },
    /// Nobody knows how far it was.
    #[error(
        "the beginning of drive {drive} of member {member} was written over, and with it perhaps \
         its data; attach absent members, or use --force to read from it what is there"
    )]
    WrittenOver { drive: String, member: MemberIndex },
    /// It has no superblock any more.
    #[error(
        "drive {drive} of member {member} may have gone on without the others, and does not say \
         any more whether it has: they may hold old data"
    )]
    Silent { drive: String, member: MemberIndex },
    /// Names of drives.
    #[error(
        "{} went on without {}, and these without those: each may have what the other lacks; \
         detach those whose data shall be lost",
        others.join(", "),
        ours.join(", ")
    )]
    Apart { ours: Vec<String>, others: Vec<String> },
    #[error("{host} uses it: its lease is alive")]
    InUse { host: String },
    #[error("who has it cannot be read on any member that is here")]
    LeaseUnreadable,
    #[error("{0} cannot be read on any trusted member")]
    Unreadable(&'static str),
    #[error("what its journal says of stripe {stripe} cannot be done with the members here")]
    Journal { stripe: u64 },
    #[error("member {member} cannot be read where its journal may hold what was written last")]
    JournalUnreadable { member: MemberIndex },
    /// `degraded`: members are missing, or do not hold everything, of an array with parity.
    #[error(
        "its journals lack what was made durable there last: somebody has written over them on all \
         members that are here"
    )]
    JournalGone { degraded: bool },
    #[error("no member can be written: {0}")]
    Array(#[from] ArrayError),
}

fn set_shown(among: &Option<Range<usize>>) -> String {
    let shown = |its: &Range<usize>| format!("of members {} to {}, ", its.start, its.end - 1);
    among.as_ref().map(shown).unwrap_or_default()
}

fn not_counted(old: &[String]) -> String {
    match old {
        [] => String::new(),
        [drive] => format!("; drive {drive} is not counted: what it holds is old, or not all"),
        many => {
            format!(
                "; drives {} are not counted: what they hold is old, or not all",
                many.join(", ")
            )
        }
    }
}
