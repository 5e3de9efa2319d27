//! What an array says about itself.

use std::collections::BTreeMap;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
pub use ashlar_format::scrub_report::Flaw;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::traffic;

use crate::bad_set::BadRange;
use crate::needs::MemberNeeds;
use crate::settings::Settings;
use crate::write_plan::WritePlan;

/// How much of its redundancy an array has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArrayState {
    Optimal,
    /// Members are missing, stale or being rebuilt; all blocks can be read and written.
    Degraded,
    /// Some blocks are lost; the others are served.
    Failed,
}

impl ArrayState {
    pub fn name(self) -> &'static str {
        match self {
            ArrayState::Optimal => "optimal",
            ArrayState::Degraded => "degraded",
            ArrayState::Failed => "failed",
        }
    }
}

/// One member as it is now.
#[derive(Clone)]
pub struct MemberStatus {
    pub index: MemberIndex,
    pub drive_uuid: [u8; 16],
    /// `None`: absent since the array was started.
    pub drive: Option<Rc<Drive>>,
    pub state: MemberState,
    pub rebuilt_stripes: u64,
    /// Of a stale or rebuilding member: it needs no more than what it missed, if its own drive is
    /// back.
    pub catches_up: bool,
    /// It holds what the others, as far as they are here and trusted, do not.
    pub is_needed: bool,
}

/// Long work on an array: rebuild, resync or scrub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    pub stripes_done: u64,
    pub stripes_total: u64,
    /// Since the work began or was taken up again.
    pub elapsed_ms: u64,
    /// Of the last seconds: see [`Worked`]. Zero: nothing is known yet, or it stands still.
    pub bytes_per_second: u64,
    /// Expected time left; `None` while nothing is known.
    pub remaining_ms: Option<u64>,
}

/// Bytes that were worked off since the array was started. What takes no I/O does not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Worked {
    /// Written to members that are filled.
    pub rebuild_bytes: u64,
    /// Of data in stripes that were made to agree; that were verified; that were moved.
    pub resync_bytes: u64,
    pub scrub_bytes: u64,
    pub restripe_bytes: u64,
}

/// What the journal held when the array was started, all of which was put in place.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Replayed {
    /// Of the members' rings; zero: the array had been stopped, and nothing was looked for.
    pub read_bytes: u64,
    /// That may not have been in place.
    pub batches: u64,
    /// Data and parity, or sums of it, in these.
    pub bytes: u64,
    pub took_ms: u64,
}

/// What a scrub found so far, or in all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScrubReport {
    /// In seconds since 1970; `ended_s`: `None` while it runs.
    pub began_s: u64,
    pub ended_s: Option<u64>,
    /// Where it cannot be told what is wrong, parity and copies are made to agree.
    pub repairs: bool,
    /// Of stripes below it is not known what was found: zero, but for a scrub that another build
    /// has begun.
    pub first_stripe: u64,
    /// Stripes where parity or copies did not agree.
    pub mismatched_stripes: u64,
    /// Of these, stripes where it could not be told which chunk is wrong.
    pub undecided_stripes: u64,
    /// Stripes that agreed once blocks of them that could not be read, or did not fit their
    /// checksums, were worked out from the others.
    pub damaged_stripes: u64,
    /// Of mismatched and damaged ones, stripes where all that was wrong was written anew.
    pub repaired_stripes: u64,
    /// Stripes that could not be read well enough to be checked.
    pub unreadable_stripes: u64,
    /// Stripes with blocks that are lost until they are written again.
    pub bad_stripes: u64,
    /// The first places, [`SCRUB_PLACES_MAX`] at most; those that are not repaired before others.
    pub places: Vec<ScrubPlace>,
    /// Stripes in which a member's chunk, or a checksum of it, was wrong.
    pub wrong_by_member: BTreeMap<MemberIndex, u64>,
}

pub const SCRUB_PLACES_MAX: usize = 16;

/// Bytes of the array that were not as they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrubPlace {
    pub stripe: u64,
    /// The wrong bytes; where they are no data, or it cannot be told which are wrong, the stripe.
    pub offset: u64,
    pub len: u64,
    /// Whose bytes were wrong. `None`: it could not be told.
    pub member: Option<MemberIndex>,
    pub flaw: Flaw,
    pub repaired: bool,
}

#[derive(Clone, Debug)]
pub enum ScrubState {
    Never,
    Running {
        progress: Progress,
        report: ScrubReport,
    },
    /// By hand, before its end.
    Stopped {
        report: ScrubReport,
    },
    Finished {
        report: ScrubReport,
    },
}

impl ScrubState {
    pub fn report(&self) -> Option<&ScrubReport> {
        match self {
            ScrubState::Never => None,
            ScrubState::Running { report, .. }
            | ScrubState::Stopped { report }
            | ScrubState::Finished { report } => Some(report),
        }
    }
}

/// Requests served since the array was started.
#[derive(Clone, Copy, Debug, Default)]
pub struct ArrayCounters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    /// Reads that were reconstructed from the other members.
    pub reconstructed: u64,
    /// Reads that were also asked of the others, since their own member was late; and those where
    /// the others came first.
    pub hedged: u64,
    pub hedges_won: u64,
    /// Blocks rewritten because their member could not read them.
    pub repaired: u64,
    /// Writes that were acknowledged by the journal; the others were in place by then.
    pub journaled: u64,
    pub updates: Updates,
}

impl ArrayCounters {
    /// Requests are counted where their times are, and what other reactors read here.
    pub(crate) fn with(self, traffic: &traffic::Report) -> ArrayCounters {
        let (reads, writes) = (traffic.reads.total, traffic.writes.total);
        ArrayCounters {
            reads: self.reads + reads.count,
            read_bytes: self.read_bytes + reads.bytes,
            writes: writes.count,
            write_bytes: writes.bytes,
            flushes: traffic.flushes.total.count,
            ..self
        }
    }
}

/// Parts of stripes that were put in place, by what had to be read for their parity.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Updates {
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

impl Updates {
    /// `whole`: every data chunk was written.
    pub(crate) fn note(&mut self, plan: WritePlan, whole: bool) {
        let counter = match plan {
            WritePlan::NoRead if whole => &mut self.whole_stripe,
            WritePlan::NoRead => &mut self.plain,
            WritePlan::ReadModifyWrite => &mut self.read_modify_write,
            WritePlan::ReconstructWrite => &mut self.reconstruct_write,
            WritePlan::Decode => &mut self.decode,
            WritePlan::Lost => return,
        };
        *counter += 1;
    }
}

/// What the journal holds.
#[derive(Clone, Copy, Debug, Default)]
pub struct JournalStatus {
    /// Of the ring on each member.
    pub bytes: u64,
    /// Of these, from the oldest batch to the newest: read after a crash.
    pub used_bytes: u64,
    /// Acknowledged and not in place yet.
    pub pending_bytes: u64,
    /// What keeps it in memory: a page at least for each piece.
    pub pending_memory_bytes: u64,
    /// Writes wait before that is more than this.
    pub pending_memory_bytes_max: u64,
    /// Of all members' journals: what a start reads after a crash.
    pub crash_read_bytes: u64,
    /// What it puts in place then, at most: also what a later write has taken the place of.
    pub crash_replayed_bytes: u64,
}

/// Everything at one moment.
#[derive(Clone)]
pub struct ArrayStatus {
    pub uuid: [u8; 16],
    pub name: String,
    pub level: Level,
    pub copies: u8,
    pub groups: u8,
    pub data_chunks: u8,
    pub parity_chunks: u8,
    pub chunk_bytes: u32,
    pub stripes: u64,
    /// Bytes for volumes.
    pub capacity: u64,
    pub generation: u64,
    /// Of the lease that this host took; 0: none.
    pub epoch: u64,
    pub state: ArrayState,
    /// Another host has taken the array over; nothing of it is served here any more.
    pub lost_to: Option<String>,
    pub policy: Policy,
    /// Members keep a checksum of every block.
    pub integrity: bool,
    pub settings: Settings,
    /// What a drive has to be to become a member.
    pub needs: MemberNeeds,
    pub journal: JournalStatus,
    /// `None`: it was created, or the journal was not in use.
    pub replayed: Option<Replayed>,
    pub members: Vec<MemberStatus>,
    /// Regions in all, and those that were ever written: the others take no part in long work.
    pub regions: u64,
    pub written_regions: u64,
    /// Regions whose dirty bit is set.
    pub dirty_regions: u64,
    /// Stripes that wait for resync.
    pub unsynced_stripes: u64,
    /// Blocks that are lost until they are written again, in order.
    pub bad: Vec<BadRange>,
    /// The pass over unsynced stripes that is under way.
    pub resync: Option<Progress>,
    pub rebuild: Option<Progress>,
    /// Why the last rebuild stopped before its end.
    pub rebuild_error: Option<String>,
    /// Members were added: what is given its new place.
    pub restripe: Option<Progress>,
    /// Why that does not go on.
    pub restripe_error: Option<String>,
    pub scrub: ScrubState,
    pub worked: Worked,
    pub counters: ArrayCounters,
    /// From when a request was let in until it was done, to a turn of the reactor.
    pub traffic: traffic::Report,
}
