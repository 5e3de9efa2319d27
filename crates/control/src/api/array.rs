//! Arrays, as the API shows them.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::api::drive::{DriveCounters, DriveHealth, DriveHistory, DriveSlowness};
use crate::api::settings::{Settings, SettingsChange};
use crate::api::traffic::Traffic;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrayCreate {
    pub name: String,
    /// 0, 1, 5, 6, 7.3, 10, 50, 60, 70, or N+M: data and parity chunks of a stripe.
    pub level: String,
    /// Names of attached drives, in the order of the members.
    pub drives: Vec<String>,
    /// 16 KiB to 1 MiB, a power of two. Left out: 64 KiB.
    #[serde(default)]
    pub chunk_bytes: Option<u32>,
    /// Copies of each block at levels 1 (left out: one a drive) and 10 (left out: two).
    #[serde(default)]
    pub copies: Option<u8>,
    /// Members of one group at levels 50, 60 and 70. Left out: there are two groups.
    #[serde(default)]
    pub group_members: Option<u8>,
    /// Keep a checksum of every block, to find and mend what a drive returns other than it was
    /// written. Needs policy `journal`, which is usual then, and cannot be changed.
    #[serde(default)]
    pub integrity: bool,
    #[serde(default)]
    pub settings: SettingsChange,
    /// Also take drives that carry another array's label.
    #[serde(default)]
    pub force: bool,
}

/// Which member gets a new drive: say `member` or `old`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrayReplace {
    #[serde(default)]
    pub member: Option<u8>,
    /// Name or uuid of the drive that is, or was, the member.
    #[serde(default)]
    pub old: Option<String>,
    /// Name of the attached drive that takes its place.
    pub new: String,
    /// Pull the old drive if it is still in use; take a new drive that carries a label.
    #[serde(default)]
    pub force: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrayScrub {
    /// Where it cannot be told which chunk is wrong, write parity or copies anew, to agree with the
    /// data or the first copy. What surely is wrong is always mended.
    #[serde(default)]
    pub repair: bool,
    /// End the scrub that runs instead.
    #[serde(default)]
    pub stop: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ArrayState {
    /// All members hold all data.
    Optimal,
    /// Members are missing, stale or being rebuilt; all blocks can be read and written.
    Degraded,
    /// Some blocks are lost; the others are served.
    Failed,
    /// Stopped by the operator.
    Stopped,
    /// Should run, but does not; `error` says why.
    Unavailable,
    /// Runs, but its reactor does not answer just now; `error` says how long it was waited for.
    Silent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum MemberState {
    /// Holds everything that was acknowledged.
    Trusted,
    /// Missed a write; it is not read until it was rebuilt.
    Stale,
    /// Being filled.
    Rebuilding,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Member {
    pub index: u8,
    /// Name of its drive; `null` if it has none now.
    pub drive: Option<String>,
    /// Name of the drive that was the member last, where it is known.
    pub last_drive: Option<String>,
    pub drive_uuid: Uuid,
    pub state: MemberState,
    /// `null` if it has no drive.
    pub health: Option<DriveHealth>,
    /// It takes several times as long as the other drives of its array; it is still used.
    pub slow: bool,
    /// `null` if it is not.
    #[serde(default)]
    pub slowness: Option<DriveSlowness>,
    /// Whether its drive is there and answers.
    pub present: bool,
    /// What its drive has done, and what went wrong; `null` if it has none.
    pub counters: Option<DriveCounters>,
    /// What went wrong with its drive over all starts, as far as this host has seen it.
    #[serde(default)]
    pub history: Option<DriveHistory>,
    /// Stripes in which the last scrub found its chunk, or a checksum of it, wrong.
    pub wrong_stripes: u64,
    /// The spare that will take its place, if its own drive does not come back before.
    pub takeover: Option<Takeover>,
    /// How much of it holds current data, 0 to 100.
    pub rebuilt_percent: u8,
}

/// How full the journal on each member is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JournalFill {
    pub bytes: u64,
    /// From the oldest batch to the newest.
    pub used_bytes: u64,
    /// Acknowledged, and not in place yet.
    pub pending_bytes: u64,
    /// What keeps it in memory: 4 KiB at least for each piece.
    #[serde(default)]
    pub pending_memory_bytes: u64,
    /// Writes wait before that is more than this.
    #[serde(default)]
    pub pending_memory_bytes_max: u64,
    /// Of all members' journals: what the next start would read after a crash.
    #[serde(default)]
    pub crash_read_bytes: u64,
    /// What it would put in place, at most: also what a later write has taken the place of.
    #[serde(default)]
    pub crash_replayed_bytes: u64,
    /// `used_bytes` of `bytes`, 0 to 100.
    #[serde(default)]
    pub used_percent: u8,
}

/// What was done at the array's last start to put in place what its journal held.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct JournalReplay {
    /// Of the journals of all members; 0: the array had been stopped, and none was looked at.
    pub read_bytes: u64,
    /// Batches that may not have been in place, and the bytes in them.
    pub batches: u64,
    pub bytes: u64,
    pub took_ms: u64,
}

/// A spare that takes a member's place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Takeover {
    /// Name of the drive.
    pub spare: String,
    pub remaining_ms: u64,
}

/// Long work: rebuild, resync, restripe or scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Progress {
    pub stripes_done: u64,
    pub stripes_total: u64,
    /// 0 to 100.
    pub percent: u8,
    pub elapsed_ms: u64,
    /// Of the last seconds; 0: nothing is known yet, or it stands still. A rebuild's are written to
    /// members, all others' are of the array's data. What takes no I/O does not count.
    #[serde(default)]
    pub bytes_per_second: u64,
    /// Expected time left, at this rate; `null` while nothing is known.
    pub remaining_ms: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScrubState {
    Never,
    Running,
    /// By hand, before its end.
    Stopped,
    Finished,
}

/// What a scrub found wrong at a place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ScrubFlaw {
    /// Parity or copies did not agree.
    #[default]
    Mismatch,
    /// Blocks did not fit their checksums.
    Block,
    /// Checksums were lost or wrong; their blocks were right.
    Checksum,
    /// The drive could not read them.
    Unreadable,
}

/// Bytes of an array that were not as they should be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScrubPlace {
    pub stripe: u64,
    /// The wrong bytes; where they are no data, or it cannot be told which are wrong, the stripe.
    pub offset: u64,
    pub len: u64,
    /// The volume that has the first of these bytes, if one does.
    #[serde(default)]
    pub volume: Option<String>,
    /// Bytes from the beginning of that volume.
    #[serde(default)]
    pub volume_offset: Option<u64>,
    /// Whose bytes were wrong; `null`: it could not be told.
    pub member: Option<u8>,
    #[serde(default)]
    pub what: ScrubFlaw,
    pub repaired: bool,
}

/// The scrub that runs, or the last one. The array's drives keep it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Scrub {
    pub state: ScrubState,
    pub progress: Option<Progress>,
    /// In seconds since 1970; `null`: there was none, or it has not ended.
    #[serde(default)]
    pub began_s: Option<u64>,
    #[serde(default)]
    pub ended_s: Option<u64>,
    /// As it was asked for: see the request.
    #[serde(default)]
    pub repair: bool,
    /// Of stripes below it is not known what was found; 0, unless a build that keeps no findings
    /// has begun it.
    #[serde(default)]
    pub unknown_below: u64,
    /// Stripes whose parity or copies did not agree.
    pub mismatched_stripes: u64,
    /// Of these, stripes where it could not be told which chunk is wrong.
    pub undecided_stripes: u64,
    /// Stripes that agreed once blocks of them that could not be read, or did not fit their
    /// checksums, were worked out from the others.
    #[serde(default)]
    pub damaged_stripes: u64,
    /// Of mismatched and damaged ones, stripes where all that was wrong was written anew.
    pub repaired_stripes: u64,
    /// Stripes that could not be read well enough to be checked.
    pub unreadable_stripes: u64,
    /// Stripes with blocks that are lost until they are written again.
    #[serde(default)]
    pub bad_stripes: u64,
    /// The first 16 places; those that are not repaired before others.
    pub places: Vec<ScrubPlace>,
}

impl Scrub {
    /// All that was wrong and could be checked is mended.
    pub fn is_mended(&self) -> bool {
        self.mismatched_stripes + self.damaged_stripes == self.repaired_stripes
    }

    /// One that is over, and has found nothing.
    #[cfg(test)]
    pub fn clean() -> Scrub {
        Scrub {
            state: ScrubState::Finished,
            progress: None,
            began_s: None,
            ended_s: None,
            repair: false,
            unknown_below: 0,
            mismatched_stripes: 0,
            undecided_stripes: 0,
            damaged_stripes: 0,
            repaired_stripes: 0,
            unreadable_stripes: 0,
            bad_stripes: 0,
            places: Vec::new(),
        }
    }

    /// It is known of places that they are errors until they are written again.
    pub fn has_places_left(&self) -> bool {
        self.places.iter().any(|its| !its.repaired && its.what != ScrubFlaw::Mismatch)
    }
}

/// Blocks that could not be worked out when a member was rebuilt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BadBlocks {
    /// Bytes from the beginning of the array.
    pub offset: u64,
    pub bytes: u64,
    /// The volume that has them, if one does.
    pub volume: Option<String>,
    /// Bytes from the beginning of that volume.
    pub volume_offset: Option<u64>,
}

/// Requests served since the array was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArrayCounters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    /// Reads that were reconstructed from the other members.
    pub reconstructed: u64,
    /// Reads that were also asked of the others, since their own member was late.
    pub hedged: u64,
    /// Of these, reads that the others were first to answer.
    pub hedges_won: u64,
    /// Blocks rewritten because their member could not read them, or returned them wrong.
    pub repaired: u64,
    /// Writes that were acknowledged by the journal; the others were in place by then.
    #[serde(default)]
    pub journaled: u64,
    #[serde(default)]
    pub updates: ArrayUpdates,
    #[serde(default)]
    pub worked: ArrayWorked,
}

/// Bytes that long work was done on. What takes no I/O does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArrayWorked {
    /// Written to members that are filled.
    pub rebuild_bytes: u64,
    /// Of the array's data, in stripes that were made to agree.
    pub resync_bytes: u64,
    /// Of the array's data, verified.
    pub scrub_bytes: u64,
    /// Of the array's data, moved to stripes over more members.
    pub restripe_bytes: u64,
}

/// Parts of stripes that were put in place, by what had to be read for their parity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArrayUpdates {
    /// Nothing: there is no parity, or none that could be written.
    pub plain: u64,
    /// Nothing: every data chunk was written.
    pub whole_stripe: u64,
    /// What was there before, and its parity.
    pub read_modify_write: u64,
    /// The other data.
    pub reconstruct_write: u64,
    /// As many chunks as there are data chunks: some that should have been read are away.
    pub decode: u64,
}

/// Of a stopped array only name, uuid and state are known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Array {
    pub name: String,
    pub uuid: Uuid,
    pub state: ArrayState,
    /// How many drives may be lost from now on, whichever they are, before blocks are; `null` while
    /// it does not run.
    #[serde(default)]
    pub may_lose: Option<u8>,
    /// It is here only while a guest needs it here.
    #[serde(default)]
    pub on_demand: bool,
    /// Why the array is unavailable; in the answer to a stop by force, what was not finished.
    #[serde(default)]
    pub error: Option<String>,
    /// CPU of the reactor that serves it.
    pub cpu: Option<usize>,
    /// As it was written when the array was created, such as `5` or `10+4`.
    pub level: Option<String>,
    pub copies: Option<u8>,
    /// Groups of members that keep parity each for itself; 1 but for levels 50, 60 and 70.
    pub groups: Option<u8>,
    /// In a stripe.
    pub data_chunks: Option<u8>,
    pub parity_chunks: Option<u8>,
    pub chunk_bytes: Option<u32>,
    pub stripes: Option<u64>,
    /// Bytes for volumes.
    pub capacity_bytes: Option<u64>,
    /// Of these, not given to any volume.
    pub free_bytes: Option<u64>,
    /// Counts changes of the array's make-up.
    pub generation: Option<u64>,
    pub members: Vec<Member>,
    pub volumes: Vec<String>,
    pub settings: Option<Settings>,
    /// A checksum of every block is kept.
    pub integrity: Option<bool>,
    pub journal: Option<JournalFill>,
    /// `null` if it was created since the daemon was started, or did not use the journal.
    #[serde(default)]
    pub replayed: Option<JournalReplay>,
    /// Parts of the array that were ever written, of so many: the others need no rebuild.
    pub written_regions: Option<u64>,
    pub regions: Option<u64>,
    /// Regions whose members may not agree if power fails now.
    pub dirty_regions: Option<u64>,
    /// Blocks that are lost until they are written again: reads of them fail.
    #[serde(default)]
    pub bad_blocks: Vec<BadBlocks>,
    /// Making members agree again after a crash.
    pub resync: Option<Progress>,
    pub rebuild: Option<Progress>,
    /// Why the last rebuild stopped before its end.
    pub rebuild_error: Option<String>,
    /// Members were added: everything is being moved to stripes over all of them.
    #[serde(default)]
    pub restripe: Option<Progress>,
    /// Why that does not go on.
    #[serde(default)]
    pub restripe_error: Option<String>,
    pub scrub: Option<Scrub>,
    pub counters: Option<ArrayCounters>,
    /// From when a request was let in until it was done. Reads that other reactors do themselves
    /// are in `counters` only.
    #[serde(default)]
    pub traffic: Option<Traffic>,
}

/// What `rebuild` did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RebuildStarted {
    /// Members that got their drive back.
    pub members: Vec<u8>,
    pub notes: Vec<String>,
    pub array: Array,
}

/// How an array shall grow.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ArrayGrow {
    /// Names of attached drives that become members; empty: drives of members are larger by now.
    #[serde(default)]
    pub add: Vec<String>,
    /// Also take drives that carry another array's label.
    #[serde(default)]
    pub force: bool,
}

/// What `grow` did.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ArrayGrown {
    /// For volumes, more than before. With members that are added: once everything is moved.
    pub gained_bytes: u64,
    pub array: Array,
}

/// What `start` with a scan did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScanResult {
    pub started: Vec<Array>,
    pub failed: Vec<ScanFailure>,
    #[serde(default)]
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ScanFailure {
    pub uuid: Uuid,
    pub name: Option<String>,
    pub error: String,
    #[serde(default)]
    pub fix: Option<String>,
}
