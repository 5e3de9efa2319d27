//! Looks at everything about every second: logs what has changed, and keeps the catalog's memory
//! of each array's members fresh.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::task::{JoinHandle, spawn_blocking};
use uuid::Uuid;

use crate::api::array::{ArrayState, MemberState, Progress, ScrubState};
use crate::api::drive::{DriveCounters, DriveHealth, DriveSource};
use crate::api::export::ExportState;
use crate::catalog::{KnownArray, KnownDrive};
use crate::device::OpenDevice;
use crate::host::Host;
use crate::host::arrays::last_drives;
use crate::host::cores::Reports;
use crate::host::drives::{Reopened, reopen};
use crate::host::show::is_replaced;
use crate::refusal::{Answer, Refusal, RefusalKind};
use crate::snapshot::{ArraySnapshot, MemberSnapshot};

pub const WATCH_INTERVAL: Duration = Duration::from_secs(1);
pub const UNUSED_INTERVAL: Duration = Duration::from_millis(500);
/// Looks at drives that were held when this daemon started. Linux has given most disks up by then;
/// and where another daemon has them, it shall keep them while it is started anew.
const LOOKS_FOR_HELD_MAX: u32 = 900;
/// Looks at those of this host that were let go while others are still being opened.
const LOOKS_FOR_OTHERS_MAX: u32 = 2;

/// What was seen last.
#[derive(Default)]
pub struct Seen {
    /// How often there was a look.
    looks: u32,
    arrays: BTreeMap<Uuid, ArraySnapshot>,
    /// Arrays that did not answer.
    silent: BTreeSet<Uuid>,
    /// Attached drives whose place in a running array another has.
    replaced: BTreeSet<String>,
    /// Exports with a guest.
    connected: BTreeSet<String>,
    /// Files that were asked for their length, by the names of their drives; one that was cut short
    /// is the answer.
    measured: BTreeMap<String, JoinHandle<Option<Arc<OpenDevice>>>>,
    /// Drives of other hosts that are lost, and looked for.
    sought: BTreeMap<String, JoinHandle<()>>,
    /// What was wrong with each of these, as far as it is in the log.
    told: BTreeSet<(String, String)>,
    /// Drives that are missing since the start, and tried again.
    reopened: BTreeMap<String, Reopening>,
    /// The catalog could not be written.
    unsaved: bool,
}

/// A drive that is being opened again.
struct Reopening {
    opening: JoinHandle<Answer<Reopened>>,
    /// The look at which that was begun.
    since: u32,
}

impl Host {
    /// One look. Never waits for a change that is under way.
    pub async fn watch(&self, seen: &mut Seen) {
        seen.looks = seen.looks.saturating_add(1);
        self.pull_shrunk_drives(seen).await;
        self.let_wanted_drives_go();
        self.look_for_lost_drives(seen).await;
        self.reattach_missing_drives(seen).await;
        let mut now = BTreeMap::new();
        let snapshots = self.snapshots().await;
        seen.silent.retain(|uuid| snapshots.contains_key(uuid));
        for (uuid, snapshot) in snapshots {
            match snapshot {
                Ok(snapshot) => {
                    if seen.silent.remove(&uuid) {
                        tracing::info!(array = self.array_name(uuid), "answers again");
                    }
                    now.insert(uuid, snapshot);
                }
                // It is being stopped.
                Err(Refusal { kind: RefusalKind::Conflict, .. }) => {}
                Err(refusal) => {
                    if seen.silent.insert(uuid) {
                        let name = self.array_name(uuid);
                        tracing::error!(array = name, "{}", refusal.line());
                    }
                }
            }
        }
        for (uuid, _) in now.extract_if(.., |_, snapshot| snapshot.lost_to.is_some()) {
            self.give_up(uuid).await;
        }
        let is_unsaved = self.look(|state| state.unsaved.is_some());
        let mut saved = if is_unsaved { self.save() } else { Ok(()) };
        for (uuid, snapshot) in &now {
            if let Some(before) = seen.arrays.get(uuid) {
                log_changes(&self.array_name(*uuid), before, snapshot);
            }
            if self.news_of(snapshot).is_some() {
                saved = saved.and(self.keep_generation(*uuid).await);
            }
        }
        saved = saved.and(self.note_histories(&now));
        if let Err(refusal) = &saved
            && !seen.unsaved
        {
            tracing::error!("{}", refusal.line());
        }
        seen.unsaved = saved.is_err();
        self.watch_replaced(seen, &now);
        for array in self.note_absences(&now) {
            self.mend(array).await;
        }
        // What changes while one is silent is told once it answers again.
        let before = std::mem::replace(&mut seen.arrays, now);
        let silent = before.into_iter().filter(|(uuid, _)| seen.silent.contains(uuid));
        seen.arrays.extend(silent);
        self.watch_exports(seen).await;
    }

    /// Says of drives that came back too late that they are not used.
    fn watch_replaced(&self, seen: &mut Seen, arrays: &BTreeMap<Uuid, ArraySnapshot>) {
        let replaced: BTreeSet<String> = self.look(|state| {
            let drives = state.drives.iter();
            let replaced = drives.filter(|(_, drive)| is_replaced(drive, |uuid| arrays.get(uuid)));
            replaced.map(|(name, _)| name.clone()).collect()
        });
        for drive in replaced.difference(&seen.replaced) {
            tracing::warn!(drive, "not used: another drive has its place in its array");
        }
        seen.replaced = replaced;
    }

    /// Stops an array that another host has taken over; its drives were pulled then.
    async fn give_up(&self, array: Uuid) {
        let Ok(_turn) = self.changes.try_lock() else { return };
        let Some(running) = self.look(|state| state.arrays.get(&array).copied()) else { return };
        // It may have been started again since it was looked at.
        let Ok(ArraySnapshot { lost_to: Some(taker), .. }) = self.snapshot(running).await else {
            return;
        };
        let name = self.array_name(array);
        let why = Refusal::conflict(format!("{taker} has taken array {name} over"))
            .fix(format!("stop it there, then `ashlar array start {name}`"));
        tracing::error!(array = name, "stopped: {}", why.line());
        // Before it is stopped: whoever looks then is told why. One on demand comes back by itself,
        // to a guest that starts here then.
        if !self.is_on_demand(array) {
            self.look(|state| state.unavailable.insert(array, why));
        }
        // It has nothing to put to rest that it could still write.
        let _ = self.stop_running(running).await;
    }

    async fn watch_exports(&self, seen: &mut Seen) {
        let reports = self.reports().await;
        let mut connected = BTreeSet::new();
        for export in self.exports_with(&reports).await {
            // Of one whose reactor does not answer, nobody knows.
            let is_silent =
                !self.cores_of(&export.name).iter().all(|core| reports.contains_key(core));
            let was_connected = seen.connected.contains(&export.name);
            if export.state == ExportState::Connected || is_silent && was_connected {
                connected.insert(export.name);
            }
        }
        for export in connected.difference(&seen.connected) {
            tracing::info!(export, "a guest has connected");
        }
        for export in seen.connected.difference(&connected) {
            tracing::info!(export, "its guest has gone");
        }
        seen.connected = connected;
        self.tell_what_is_atomic(&seen.arrays, &reports).await;
    }

    /// Lets initiators know which writes are atomic where they were told otherwise: a resync has
    /// ended, say. At the next look, if a change is under way, which may be about the same, or if
    /// a reactor does not answer, which would be waited for.
    async fn tell_what_is_atomic(&self, arrays: &BTreeMap<Uuid, ArraySnapshot>, reports: &Reports) {
        let is_untold = |array: Uuid, holds: u32| {
            let exports = self.exports_of(array);
            let told = |name: &str| self.served(name).map(|(served, _)| served.atomic_bytes());
            let answers =
                |name: &str| self.cores_of(name).iter().all(|it| reports.contains_key(it));
            exports.iter().any(|(name, _)| told(name).is_some_and(|told| told != holds))
                && exports.iter().all(|(name, _)| answers(name))
        };
        let untold = arrays.iter().filter(|(array, its)| is_untold(**array, its.atomic_bytes));
        let untold: Vec<Uuid> = untold.map(|(array, _)| *array).collect();
        if untold.is_empty() {
            return;
        }
        let Ok(_turn) = self.changes.try_lock() else { return };
        for array in untold {
            let running = self.look(|state| state.arrays.get(&array).copied());
            let Some(running) = running else { continue };
            // As it is now: who has set it meanwhile has told them.
            if let Ok(ArraySnapshot { atomic_bytes, .. }) = self.snapshot(running).await {
                let _ = self.tell_exports_what_is_atomic(running, atomic_bytes).await;
            }
        }
    }

    /// Stores what is new of an array, also while a change is under way: that may take long, and a
    /// host that dies meanwhile must know which member was fenced.
    pub(super) async fn keep_generation(&self, array: Uuid) -> Answer<()> {
        let running = || self.look(|state| state.arrays.get(&array).copied());
        let Some(looked_at) = running() else { return Ok(()) };
        // As it is now: others have recorded since the last look, perhaps.
        let Ok(snapshot) = self.snapshot(looked_at).await else { return Ok(()) };
        if running() != Some(looked_at) {
            // Stopped meanwhile, and perhaps started from fewer members.
            return Ok(());
        }
        self.record_snapshot(&snapshot)
    }

    /// What the catalog should keep of an array, if that is not what it keeps.
    fn news_of(&self, snapshot: &ArraySnapshot) -> Option<KnownArray> {
        self.look(|state| {
            let known = state.catalog.arrays.get(&snapshot.uuid)?;
            let drives = last_drives(known.drives.clone(), snapshot);
            known.news(snapshot.generation, snapshot.current(), drives)
        })
    }

    /// Stores what the catalog keeps of an array, if that has changed.
    pub(super) fn record_snapshot(&self, snapshot: &ArraySnapshot) -> Answer<()> {
        let Some(fresh) = self.news_of(snapshot) else { return Ok(()) };
        self.record(|catalog| {
            catalog.arrays.insert(snapshot.uuid, fresh);
        })
    }

    /// A file that was cut short would grow again with zeroes where data was, and read as good.
    async fn pull_shrunk_drives(&self, seen: &mut Seen) {
        let shrunk = self.shrunk_drives(seen).await;
        // Before they could have their size again, whatever else is under way. What could not be
        // stored is tried again.
        let _ = self.store_cuts();
        for (drive, _) in &shrunk {
            if let Ok(its) = self.attached(drive)
                && let Err(refusal) = self.note_cut(&its.content)
            {
                tracing::error!(drive, "{}", refusal.line());
            }
        }
        let Ok(_turn) = self.changes.try_lock() else { return };
        for (drive, device) in shrunk {
            // Another may have its name by now.
            let user = self.look(|state| {
                let drive = state.drives.get(&drive)?;
                drive.device().filter(|its| Arc::ptr_eq(its, &device)).and(drive.used_by)
            });
            let Some((array, member)) = user else { continue };
            if self.is_pulled(array, member).await {
                continue;
            }
            tracing::error!(drive, member, "the file was cut short: its drive is pulled");
            if let Err(refusal) = self.pull(array, member).await {
                tracing::error!(drive, "it cannot be pulled: {}", refusal.line());
            }
        }
    }

    /// Files that were cut short when they were last asked. Each is asked anew once it has
    /// answered; one that does not answer holds up nobody.
    async fn shrunk_drives(&self, seen: &mut Seen) -> Vec<(String, Arc<OpenDevice>)> {
        let files: BTreeMap<String, Arc<OpenDevice>> = self.look(|state| {
            let drives = state.drives.iter();
            let devices = drives.filter_map(|(name, drive)| Some((name, drive.device()?)));
            let files = devices.filter(|(_, device)| device.is_file());
            files.map(|(name, device)| (name.clone(), device.clone())).collect()
        });
        seen.measured.retain(|name, _| files.contains_key(name));
        let mut shrunk = Vec::new();
        for (name, device) in files {
            match seen.measured.remove(&name) {
                Some(measured) if !measured.is_finished() => {
                    seen.measured.insert(name, measured);
                    continue;
                }
                Some(measured) => {
                    let found = measured.await.ok().flatten();
                    shrunk.extend(found.map(|device| (name.clone(), device)));
                }
                None => {}
            }
            let shown = name.clone();
            let measure = move || {
                if device.look_for_deletion() {
                    tracing::error!(drive = shown, "its file was deleted: it is gone when let go");
                }
                device.has_shrunk().then_some(device)
            };
            seen.measured.insert(name, spawn_blocking(measure));
        }
        shrunk
    }

    /// Whoever takes an idle NVMe drive of ours out waits until it is let go.
    fn let_wanted_drives_go(&self) {
        let devices: Vec<(String, Arc<OpenDevice>)> = self.look(|state| {
            let drives = state.drives.iter().filter(|(_, drive)| drive.used_by.is_none());
            drives
                .filter_map(|(name, drive)| Some((name.clone(), drive.device()?.clone())))
                .collect()
        });
        for (drive, device) in devices {
            if device.let_go_if_wanted() {
                tracing::warn!(drive, "the drive is taken out: it was let go; detach it");
            }
        }
    }

    /// Who has looked at a drive of another host has a connection that nobody keeps alive: not for
    /// longer than [`UNUSED_INTERVAL`] and half a second.
    pub fn end_unused_connections(&self) {
        let devices: Vec<Arc<OpenDevice>> = self.look(|state| {
            let devices = state.drives.values().filter_map(|drive| drive.device().cloned());
            devices.filter(|device| device.remote().is_some()).collect()
        });
        for device in devices {
            spawn_blocking(move || device.remote().map(|its| its.rest_if_unused()));
        }
    }

    /// Asks for drives of other hosts that were given up; one that is there is lost no longer.
    async fn look_for_lost_drives(&self, seen: &mut Seen) {
        let lost: BTreeMap<String, Arc<OpenDevice>> = self.look(|state| {
            let drives = state.drives.iter();
            let devices = drives.filter_map(|(name, drive)| Some((name, drive.device()?)));
            let lost = devices.filter(|(_, device)| device.is_lost());
            lost.map(|(name, device)| (name.clone(), device.clone())).collect()
        });
        seen.sought.retain(|name, asked| {
            let is_done = asked.is_finished();
            if is_done && !lost.contains_key(name) {
                tracing::info!(drive = name, "the drive is there again");
                self.give_another_chance(name);
            }
            !is_done
        });
        seen.told.retain(|(name, _)| lost.contains_key(name));
        for (name, device) in lost {
            if let Some(why) = device.trouble()
                && seen.told.insert((name.clone(), why.clone()))
            {
                tracing::warn!(drive = name, "not reached: {why}");
            }
            let look = move || {
                // What is wrong with it is seen where it is shown.
                let _ = device.remote().map(|drive| drive.look());
            };
            seen.sought.entry(name).or_insert_with(|| spawn_blocking(look));
        }
    }

    /// Attaches drives of other hosts that could not be reached when this one started, and those
    /// that another process had: a daemon that was killed has its drives until the kernel is done
    /// with what it asked of them, of all if one of them does not answer.
    async fn reattach_missing_drives(&self, seen: &mut Seen) {
        let missing = self.look_for_missing(seen);
        // What has become of others is let go.
        seen.reopened.retain(|name, _| missing.contains_key(name));
        for (name, known) in &missing {
            seen.reopened.entry(name.clone()).or_insert_with(|| {
                let opening = reopen(name.clone(), known.clone(), self.initiator, Duration::ZERO);
                Reopening { opening: tokio::spawn(opening), since: seen.looks }
            });
        }
        if missing.is_empty() {
            return;
        }
        // They stay with whoever has opened them for as long as something is changed.
        let Ok(_turn) = self.changes.try_lock() else { return };
        let is_late = |(name, known): (&String, &KnownDrive)| {
            let its = seen.reopened.get(name).filter(|its| !its.opening.is_finished());
            !is_remote(known)
                && its.is_some_and(|its| seen.looks <= its.since + LOOKS_FOR_OTHERS_MAX)
        };
        // Those of this host come together, so that their array does not start without some.
        let waits = missing.iter().any(is_late);
        let mut done = Vec::new();
        for (name, known) in missing {
            let is_done =
                |its: &Reopening| its.opening.is_finished() && (is_remote(&known) || !waits);
            if seen.reopened.get(&name).is_some_and(is_done)
                && let Some(its) = seen.reopened.remove(&name)
            {
                done.extend(its.opening.await.ok().map(|opened| (name, known, opened)));
            }
        }
        self.reattach(done).await;
    }

    /// The missing drives that are tried again.
    fn look_for_missing(&self, seen: &Seen) -> BTreeMap<String, KnownDrive> {
        let is_first_of_no_more = seen.looks == LOOKS_FOR_HELD_MAX;
        self.look(|state| {
            let mut missing = BTreeMap::new();
            for (name, why) in &mut state.missing {
                let Some(known) = state.catalog.drives.get(name) else { continue };
                let is_held = !is_remote(known) && why.may_pass;
                if is_held && is_first_of_no_more {
                    why.fix =
                        Some("once it can be had, `ashlar drive detach` and attach it".into());
                }
                if is_remote(known) || is_held && seen.looks < LOOKS_FOR_HELD_MAX {
                    missing.insert(name.clone(), known.clone());
                }
            }
            missing
        })
    }

    async fn is_pulled(&self, array: Uuid, member: u8) -> bool {
        let Some(running) = self.look(|state| state.arrays.get(&array).copied()) else {
            return true;
        };
        let Ok(snapshot) = self.snapshot(running).await else { return true };
        snapshot.members.iter().any(|its| its.index == member && !its.is_present())
    }
}

fn is_remote(drive: &KnownDrive) -> bool {
    matches!(drive.source, DriveSource::NvmeTcp(_))
}

/// One line for each thing that is not as it was.
fn log_changes(name: &str, before: &ArraySnapshot, now: &ArraySnapshot) {
    if before.state != now.state {
        match now.state {
            ArrayState::Optimal => tracing::info!(array = name, "optimal"),
            ArrayState::Degraded => tracing::warn!(array = name, "degraded"),
            ArrayState::Failed
            | ArrayState::Stopped
            | ArrayState::Unavailable
            | ArrayState::Silent => {
                tracing::error!(array = name, "failed: some blocks cannot be served");
            }
        }
    }
    for (before, now) in before.members.iter().zip(&now.members) {
        log_member(name, before, now);
    }
    if before.bad_blocks.len() < now.bad_blocks.len() {
        let ranges = now.bad_blocks.len();
        tracing::error!(array = name, ranges, "blocks are lost, until they are written again");
    }
    log_work(name, "resync", before.resync.as_ref(), now.resync.as_ref());
    log_work(name, "rebuild", before.rebuild.as_ref(), now.rebuild.as_ref());
    log_trouble(name, "rebuild", before.rebuild_error.as_ref(), now.rebuild_error.as_ref());
    log_trouble(name, "restripe", before.restripe_error.as_ref(), now.restripe_error.as_ref());
    if now.scrub.state == ScrubState::Finished && before.scrub.state == ScrubState::Running {
        let found = &now.scrub;
        let (mismatched, repaired) = (found.mismatched_stripes, found.repaired_stripes);
        let (unreadable, bad) = (found.unreadable_stripes, found.bad_stripes);
        let damaged = found.damaged_stripes;
        if mismatched + damaged + unreadable + bad == 0 {
            tracing::info!(array = name, "scrub finished: all is well");
        } else {
            let undecided = found.undecided_stripes;
            tracing::warn!(
                array = name,
                mismatched,
                undecided,
                damaged,
                repaired,
                unreadable,
                bad,
                "scrub finished"
            );
        }
    }
}

fn log_member(array: &str, before: &MemberSnapshot, now: &MemberSnapshot) {
    let member = now.index;
    let drive = now.drive.as_ref().map_or("none", |drive| drive.name.as_str());
    if before.state != now.state {
        match now.state {
            MemberState::Trusted => tracing::info!(array, member, drive, "member is trusted again"),
            MemberState::Stale => {
                tracing::warn!(array, member, drive, "member fenced: it missed a write");
            }
            MemberState::Rebuilding => {
                tracing::info!(array, member, drive, "member is being rebuilt")
            }
        }
    }
    let (Some(was), Some(is)) = (&before.drive, &now.drive) else { return };
    if was.name != is.name {
        return;
    }
    match (was.slowness, is.slowness) {
        (None, Some(its)) => tracing::warn!(array, member, drive, "drive is slow: {its}"),
        (Some(_), None) => tracing::info!(array, member, drive, "drive is slow no longer"),
        (None, None) | (Some(_), Some(_)) => {}
    }
    match (was.is_full, is.is_full) {
        (false, true) => {
            tracing::error!(array, member, drive, "no room for writes: make some under the drive");
        }
        (true, false) => tracing::info!(array, member, drive, "there is room for writes again"),
        (false, false) | (true, true) => {}
    }
    let wrong = |its: &DriveCounters| (its.wrong_blocks, its.wrong_checksums);
    if wrong(&was.counters) != wrong(&is.counters) {
        let (blocks, checksums) = wrong(&is.counters);
        let text = "drive returned blocks other than they were written; they were mended";
        tracing::warn!(array, member, drive, blocks, checksums, "{text}");
    }
    if was.health == is.health {
        return;
    }
    let (read_errors, write_errors) = (is.counters.read_errors, is.counters.write_errors);
    let timeouts = is.counters.timeouts;
    match is.health {
        DriveHealth::Healthy => tracing::info!(array, member, drive, "drive is healthy again"),
        DriveHealth::Suspect => {
            tracing::warn!(
                array,
                member,
                drive,
                read_errors,
                write_errors,
                timeouts,
                "drive is suspect"
            );
        }
        DriveHealth::Failed if read_errors + write_errors + timeouts == 0 => {
            tracing::error!(array, member, drive, "drive pulled, or gone");
        }
        DriveHealth::Failed => {
            tracing::error!(
                array,
                member,
                drive,
                read_errors,
                write_errors,
                timeouts,
                "drive failed"
            );
        }
    }
}

fn log_trouble(array: &str, what: &str, before: Option<&String>, now: Option<&String>) {
    if let Some(why) = now.filter(|why| before != Some(why)) {
        tracing::warn!(array, "{what} stopped: {why}");
    }
}

fn log_work(array: &str, what: &str, before: Option<&Progress>, now: Option<&Progress>) {
    match (before, now) {
        (None, Some(_)) => tracing::info!(array, "{what} started"),
        (Some(_), None) => tracing::info!(array, "{what} ended"),
        (None, None) | (Some(_), Some(_)) => {}
    }
}
