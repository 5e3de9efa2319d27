//! An array at one moment, in plain values that can leave its reactor.

use std::collections::BTreeSet;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_drive::health::HealthState;
use ashlar_drive::latency;
use ashlar_drive::slow::{Evidence, Slowness};
use ashlar_format::array_superblock as format;
use ashlar_pool::pool::Pool;
use ashlar_raid::bad_set::BadRange;
use ashlar_raid::needs::MemberNeeds;
use ashlar_raid::status as raid;
use ashlar_reactor::traffic;
use uuid::Uuid;

use crate::api::array::{
    ArrayCounters, ArrayState, ArrayUpdates, ArrayWorked, BadBlocks, JournalFill, JournalReplay,
    MemberState, Progress, Scrub, ScrubFlaw, ScrubPlace, ScrubState,
};
use crate::api::drive::{
    DriveCounters, DriveHealth, DriveLatency, DriveSlowness, LatencySummary, SlowKind,
};
use crate::api::settings::{Policy, Settings};
use crate::api::traffic::{Requests, Traffic};
use crate::level::notation;

/// The drive of a member, as its array sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberDrive {
    pub name: String,
    pub health: DriveHealth,
    /// `None`: it is not slow.
    pub slowness: Option<DriveSlowness>,
    /// There was no room for its writes lately.
    pub is_full: bool,
    pub counters: DriveCounters,
    pub latency: DriveLatency,
    pub traffic: Traffic,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MemberSnapshot {
    pub index: u8,
    pub drive_uuid: Uuid,
    pub drive: Option<MemberDrive>,
    pub state: MemberState,
    pub rebuilt_stripes: u64,
    /// It holds what the others do not.
    pub is_needed: bool,
    pub wrong_stripes: u64,
}

impl MemberSnapshot {
    /// Whether its drive is there and answers.
    pub fn is_present(&self) -> bool {
        self.drive.as_ref().is_some_and(|drive| drive.health != DriveHealth::Failed)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeSnapshot {
    pub name: String,
    pub uuid: Uuid,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArraySnapshot {
    pub uuid: Uuid,
    /// As stored on the drives; this host may know it by another name.
    pub name: String,
    pub state: ArrayState,
    /// The host that has taken it over.
    pub lost_to: Option<String>,
    pub level: String,
    pub copies: u8,
    pub groups: u8,
    pub data_chunks: u8,
    pub parity_chunks: u8,
    pub chunk_bytes: u32,
    pub stripes: u64,
    /// What a drive has to be to become a member.
    pub needs: MemberNeeds,
    pub capacity: u64,
    pub free: u64,
    pub generation: u64,
    pub epoch: u64,
    pub members: Vec<MemberSnapshot>,
    pub volumes: Vec<VolumeSnapshot>,
    pub settings: Settings,
    /// What holds now; the settings have what is wanted.
    pub atomic_bytes: u32,
    pub integrity: bool,
    pub journal: JournalFill,
    pub replayed: Option<JournalReplay>,
    pub regions: u64,
    pub written_regions: u64,
    pub dirty_regions: u64,
    /// Stripes that wait for resync.
    pub unsynced_stripes: u64,
    pub bad_blocks: Vec<BadBlocks>,
    pub resync: Option<Progress>,
    pub rebuild: Option<Progress>,
    pub rebuild_error: Option<String>,
    pub restripe: Option<Progress>,
    pub restripe_error: Option<String>,
    pub scrub: Scrub,
    pub counters: ArrayCounters,
    pub traffic: Traffic,
}

impl ArraySnapshot {
    /// The set of members that stand for each other which this one is of.
    pub fn set_of(&self, member: u8) -> u8 {
        let members =
            if self.copies > 1 { self.copies } else { self.data_chunks + self.parity_chunks };
        member / members
    }

    /// Members of a set that do not hold all that they should, or are not here.
    pub fn lacking(&self, set: u8) -> usize {
        let whole = |its: &&MemberSnapshot| its.is_present() && its.state == MemberState::Trusted;
        let of_set = self.members.iter().filter(|its| self.set_of(its.index) == set);
        of_set.filter(|its| !whole(its)).count()
    }

    /// Drives of a set that may be lost when it is whole.
    pub fn redundancy(&self) -> u8 {
        if self.parity_chunks > 0 { self.parity_chunks } else { self.copies.saturating_sub(1) }
    }

    /// Drives that may be lost from now on, whichever they are, before blocks are.
    pub fn may_lose(&self) -> u8 {
        if self.parity_chunks > 0 && self.unsynced_stripes > 0 {
            // Their parity stands for nothing before the resync has been there.
            return 0;
        }
        let sets: BTreeSet<u8> = self.members.iter().map(|its| self.set_of(its.index)).collect();
        let most = sets.into_iter().map(|set| self.lacking(set)).max().unwrap_or(0);
        self.redundancy().saturating_sub(u8::try_from(most).unwrap_or(u8::MAX))
    }

    /// How long a member may be away before a spare takes its place.
    pub fn spare_delay(&self) -> Duration {
        Duration::from_secs(self.settings.spare_delay_s.into())
    }

    /// Drives that hold everything.
    pub fn current(&self) -> BTreeSet<Uuid> {
        let current = self
            .members
            .iter()
            .filter(|member| member.is_present() && member.state == MemberState::Trusted);
        current.map(|member| member.drive_uuid).collect()
    }
}

/// Taken on the reactor, at once.
pub fn snapshot(pool: &Pool) -> ArraySnapshot {
    let status = pool.array().status();
    let volumes = pool.volumes().into_iter().map(|volume| VolumeSnapshot {
        name: volume.name().to_owned(),
        uuid: Uuid::from_bytes(volume.uuid()),
        bytes: volume.bytes(),
    });
    ArraySnapshot {
        uuid: Uuid::from_bytes(status.uuid),
        name: status.name.clone(),
        state: match status.state {
            raid::ArrayState::Optimal => ArrayState::Optimal,
            raid::ArrayState::Degraded => ArrayState::Degraded,
            raid::ArrayState::Failed => ArrayState::Failed,
        },
        lost_to: status.lost_to.clone(),
        level: notation(status.level, status.data_chunks, status.parity_chunks),
        copies: status.copies,
        groups: status.groups,
        data_chunks: status.data_chunks,
        parity_chunks: status.parity_chunks,
        chunk_bytes: status.chunk_bytes,
        stripes: status.stripes,
        needs: status.needs,
        capacity: status.capacity,
        free: pool.free_bytes(),
        generation: status.generation,
        epoch: status.epoch,
        members: status.members.iter().map(|its| member(its, &status.scrub)).collect(),
        volumes: volumes.collect(),
        settings: settings(&status),
        atomic_bytes: atomic_bytes(&status),
        integrity: status.integrity,
        journal: journal(&status.journal),
        replayed: status.replayed.map(replayed),
        regions: status.regions,
        written_regions: status.written_regions,
        dirty_regions: status.dirty_regions,
        unsynced_stripes: status.unsynced_stripes,
        bad_blocks: status.bad.iter().map(|range| bad_blocks(pool, range)).collect(),
        resync: status.resync.map(progress),
        rebuild: status.rebuild.map(progress),
        rebuild_error: status.rebuild_error.clone(),
        restripe: status.restripe.map(progress),
        restripe_error: status.restripe_error.clone(),
        scrub: scrub(pool, &status.scrub),
        counters: counters(&status.counters, status.worked),
        traffic: traffic(&status.traffic),
    }
}

/// Writes up to so many bytes are there as a whole after a power cut, or not at all. In place,
/// where all goes while a stripe waits for resync, they may be torn between any two sectors.
pub fn atomic_bytes(status: &raid::ArrayStatus) -> u32 {
    match status.policy {
        format::Policy::Journal if status.unsynced_stripes == 0 => {
            status.settings.atomic_bytes(status.needs.sector_bytes)
        }
        format::Policy::Journal | format::Policy::Bitmap | format::Policy::None => 0,
    }
}

fn settings(status: &raid::ArrayStatus) -> Settings {
    let its = status.settings;
    Settings {
        rebuild_percent: its.rebuild_percent(),
        hedge_percent: its.hedge_percent(),
        atomic_bytes: its.atomic_bytes(status.needs.sector_bytes),
        spare_delay_s: its.spare_delay_s(),
        scrub_period_s: its.scrub_period_s().unwrap_or(0),
        policy: match status.policy {
            format::Policy::Journal => Policy::Journal,
            format::Policy::Bitmap => Policy::Bitmap,
            format::Policy::None => Policy::None,
        },
    }
}

fn journal(status: &raid::JournalStatus) -> JournalFill {
    JournalFill {
        bytes: status.bytes,
        used_bytes: status.used_bytes,
        pending_bytes: status.pending_bytes,
        pending_memory_bytes: status.pending_memory_bytes,
        pending_memory_bytes_max: status.pending_memory_bytes_max,
        crash_replayed_bytes: status.crash_replayed_bytes,
        crash_read_bytes: status.crash_read_bytes,
        used_percent: if status.bytes == 0 { 0 } else { percent(status.used_bytes, status.bytes) },
    }
}

fn replayed(its: raid::Replayed) -> JournalReplay {
    let raid::Replayed { read_bytes, batches, bytes, took_ms } = its;
    JournalReplay { read_bytes, batches, bytes, took_ms }
}

fn member(status: &raid::MemberStatus, scrub: &raid::ScrubState) -> MemberSnapshot {
    let wrong = scrub.report().and_then(|its| its.wrong_by_member.get(&status.index));
    MemberSnapshot {
        index: status.index.0,
        drive_uuid: Uuid::from_bytes(status.drive_uuid),
        drive: status.drive.as_deref().map(member_drive),
        state: match status.state {
            format::MemberState::Trusted => MemberState::Trusted,
            format::MemberState::Stale => MemberState::Stale,
            format::MemberState::Rebuilding => MemberState::Rebuilding,
        },
        rebuilt_stripes: status.rebuilt_stripes,
        is_needed: status.is_needed,
        wrong_stripes: wrong.copied().unwrap_or(0),
    }
}

fn member_drive(drive: &Drive) -> MemberDrive {
    let (health, counters, latency) = (drive.health(), drive.counters(), drive.latency());
    MemberDrive {
        name: drive.name().to_owned(),
        health: match health.state {
            HealthState::Healthy => DriveHealth::Healthy,
            HealthState::Suspect => DriveHealth::Suspect,
            HealthState::Failed => DriveHealth::Failed,
        },
        slowness: drive.slow().map(slowness),
        is_full: drive.is_full(),
        counters: DriveCounters {
            reads: counters.reads,
            read_bytes: counters.read_bytes,
            writes: counters.writes,
            write_bytes: counters.write_bytes,
            flushes: counters.flushes,
            retries: counters.retries,
            read_errors: health.read_errors,
            write_errors: health.write_errors,
            timeouts: health.timeouts,
            wrong_blocks: health.wrong_blocks,
            wrong_checksums: health.wrong_checksums,
            no_space: health.no_space,
        },
        latency: DriveLatency {
            reads: latency_summary(latency.reads),
            writes: latency_summary(latency.writes),
        },
        traffic: Traffic { depth: None, depth_max: None, ..traffic(&drive.traffic()) },
    }
}

fn slowness(its: Evidence) -> DriveSlowness {
    let Slowness { p50_ns, p99_ns, siblings_p50_ns, siblings_p99_ns } = its.slowness;
    let kind = if its.in_reads { SlowKind::Read } else { SlowKind::Write };
    DriveSlowness { kind, p50_ns, p99_ns, siblings_p50_ns, siblings_p99_ns }
}

fn latency_summary(its: latency::LatencySummary) -> LatencySummary {
    let latency::LatencySummary { samples, p50_ns, p99_ns, p999_ns } = its;
    LatencySummary { operations: samples, p50_ns, p99_ns, p999_ns }
}

/// `part` of `whole` in percent, rounded down; all of nothing is everything.
pub fn percent(part: u64, whole: u64) -> u8 {
    if whole == 0 {
        return 100;
    }
    let percent = u128::from(part.min(whole)) * 100 / u128::from(whole);
    u8::try_from(percent).expect("at most 100")
}

fn progress(progress: raid::Progress) -> Progress {
    Progress {
        stripes_done: progress.stripes_done,
        stripes_total: progress.stripes_total,
        percent: percent(progress.stripes_done, progress.stripes_total),
        elapsed_ms: progress.elapsed_ms,
        bytes_per_second: progress.bytes_per_second,
        remaining_ms: progress.remaining_ms,
    }
}

fn bad_blocks(pool: &Pool, range: &BadRange) -> BadBlocks {
    let BadRange { stripe, chunk, rows } = range;
    let offset = pool.array().offset_of(*stripe, *chunk, rows.start);
    let (volume, volume_offset) = pool.volume_at(offset).unzip();
    BadBlocks {
        offset,
        bytes: u64::from(rows.end - rows.start),
        volume: volume.map(|volume| volume.name().to_owned()),
        volume_offset,
    }
}

fn scrub(pool: &Pool, state: &raid::ScrubState) -> Scrub {
    let report = state.report().cloned().unwrap_or_default();
    let (state, running) = match state {
        raid::ScrubState::Never => (ScrubState::Never, None),
        raid::ScrubState::Running { progress, .. } => (ScrubState::Running, Some(*progress)),
        raid::ScrubState::Stopped { .. } => (ScrubState::Stopped, None),
        raid::ScrubState::Finished { .. } => (ScrubState::Finished, None),
    };
    Scrub {
        state,
        progress: running.map(progress),
        began_s: Some(report.began_s).filter(|began_s| *began_s > 0),
        ended_s: report.ended_s,
        repair: report.repairs,
        unknown_below: report.first_stripe,
        mismatched_stripes: report.mismatched_stripes,
        undecided_stripes: report.undecided_stripes,
        damaged_stripes: report.damaged_stripes,
        repaired_stripes: report.repaired_stripes,
        unreadable_stripes: report.unreadable_stripes,
        bad_stripes: report.bad_stripes,
        places: report.places.iter().map(|its| scrub_place(pool, its)).collect(),
    }
}

fn scrub_place(pool: &Pool, its: &raid::ScrubPlace) -> ScrubPlace {
    let (volume, volume_offset) = pool.volume_at(its.offset).unzip();
    ScrubPlace {
        stripe: its.stripe,
        offset: its.offset,
        len: its.len,
        volume: volume.map(|volume| volume.name().to_owned()),
        volume_offset,
        member: its.member.map(|member| member.0),
        what: match its.flaw {
            raid::Flaw::Mismatch => ScrubFlaw::Mismatch,
            raid::Flaw::Block => ScrubFlaw::Block,
            raid::Flaw::Checksum => ScrubFlaw::Checksum,
            raid::Flaw::Unreadable => ScrubFlaw::Unreadable,
        },
        repaired: its.repaired,
    }
}

fn counters(counters: &raid::ArrayCounters, worked: raid::Worked) -> ArrayCounters {
    let raid::Worked { rebuild_bytes, resync_bytes, scrub_bytes, restripe_bytes } = worked;
    ArrayCounters {
        reads: counters.reads,
        read_bytes: counters.read_bytes,
        writes: counters.writes,
        write_bytes: counters.write_bytes,
        flushes: counters.flushes,
        reconstructed: counters.reconstructed,
        hedged: counters.hedged,
        hedges_won: counters.hedges_won,
        repaired: counters.repaired,
        journaled: counters.journaled,
        updates: updates(&counters.updates),
        worked: ArrayWorked { rebuild_bytes, resync_bytes, scrub_bytes, restripe_bytes },
    }
}

fn updates(its: &raid::Updates) -> ArrayUpdates {
    ArrayUpdates {
        plain: its.plain,
        whole_stripe: its.whole_stripe,
        read_modify_write: its.read_modify_write,
        reconstruct_write: its.reconstruct_write,
        decode: its.decode,
    }
}

/// What a reactor says of requests.
pub fn traffic(report: &traffic::Report) -> Traffic {
    Traffic {
        reads: requests(&report.reads),
        writes: requests(&report.writes),
        flushes: requests(&report.flushes),
        depth: Some(report.depth),
        depth_max: Some(report.depth_max),
        depth_mean_milli: report.depth_mean_milli(),
    }
}

fn requests(its: &traffic::Requests) -> Requests {
    let traffic::Requests { total, lately } = its;
    Requests {
        total: total.count,
        bytes: total.bytes,
        time_ns: total.time_ns,
        octaves: total.octaves.to_vec(),
        per_second: lately.per_second(),
        bytes_per_second: lately.bytes_per_second(),
        p50_ns: lately.p50_ns,
        p99_ns: lately.p99_ns,
        p999_ns: lately.p999_ns,
        max_ns: lately.longest_ns,
    }
}

#[cfg(test)]
mod tests {
    use super::percent;

    #[test]
    fn percents_never_claim_too_much() {
        assert_eq!((percent(0, 0), percent(0, 7), percent(999, 1000)), (100, 0, 99));
        assert_eq!((percent(7, 7), percent(9, 7)), (100, 100));
        assert_eq!(percent(u64::MAX - 1, u64::MAX), 99);
    }
}
