//! Arrays that are here only while a guest needs them: hosts share the drives, and when a guest
//! moves from one host to another, the array that it uses goes along.
//!
//! ```text
//! here  exports are served ── no ring is started any more ──► exports wait, the array is
//!                                                             stopped, its lease given back
//! away  exports wait ── a ring is started, and nobody has the lease ──► the array is started,
//!                                                                       exports are served
//! ```
//!
//! Invariants:
//! - an array is let go only once every front end has asked where its rings stand: by then all that
//!   they had asked for is answered;
//! - an export that waits answers its front end, and keeps what that says; none of its rings moves;
//! - an array is taken as by any start: its lease decides who has it, and what is said here only
//!   when that is tried.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use ashlar_pool::volume::Volume;
use ashlar_raid::lease::{BEAT_PERIOD, WATCH_BEATS, age, is_others, is_own, owner_name};
use ashlar_target::export::Usage;
use tokio::sync::MutexGuard;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use crate::api::array::Array as Shown;
use crate::api::export::ExportKind;
use crate::catalog::{KnownDisk, KnownExport};
use crate::front::Front;
use crate::host::{Host, Running, Serving};
use crate::refusal::{Answer, Refusal};
use crate::served::Served;

/// How often guests are looked at: what a guest that moves waits for, at most, on either side.
const LOOK_INTERVAL: Duration = Duration::from_millis(20);
/// An array stays for so long after the last ring was stopped, unless its guest moves: rings are
/// often started again soon. Firmware stops them before it gives the disk to a kernel, and a guest
/// that resets does.
const QUIET: Duration = Duration::from_secs(5);
/// Nor does it go with a guest that moves before it has been here for so long: a front end that
/// plays at moving cannot have it started and stopped all the time.
const STAY: Duration = Duration::from_secs(5);
/// Another host's lease that stands still for so long is watched as by any start: that host may be
/// gone. One that lives beats in between, and nothing of ours waits for it.
const STILL: Duration = Duration::from_secs(2 * BEAT_PERIOD.as_secs());
/// Between two tries to take an array, once the guest has waited for as long; or to let it go, or
/// to serve an export that could not be.
const AGAIN: Duration = Duration::from_secs(1);
/// For as long another host sees that a lease stands still, and watches it, and a little more.
const OTHERS_TURN: Duration = BEAT_PERIOD.saturating_mul(WATCH_BEATS + 4);
/// A look that comes later than this says nothing of the time before it.
const LATE: Duration = Duration::from_secs(1);

/// Those who follow arrays on demand, one each: who waits for one holds up no other.
pub type Followers = BTreeMap<Uuid, JoinHandle<()>>;

/// Whether an array is to be let go. `idle`: for how long no ring was started; `here`: for how long
/// it runs.
fn is_let_go(usages: &[Usage], idle: Duration, here: Duration) -> bool {
    // Who reads QEMU's dirty log moves a guest, and waits: it stopped its rings for good, or it
    // starts them here again if the move fails, and is given the array again.
    let moves = usages.contains(&Usage::Leaving) && here >= STAY;
    !is_needed(usages) && (moves || idle >= QUIET)
}

/// When rings were started last, as far as somebody looked: nobody can tell what a guest did
/// meanwhile, and it may have stood still with this process.
fn used_until(used: Instant, seen: Instant, now: Instant) -> Instant {
    if now - seen > LATE { now } else { used }
}

fn is_needed(usages: &[Usage]) -> bool {
    usages.contains(&Usage::InUse)
}

/// What keeps an array from a guest that waits for it.
struct Wait {
    since: Instant,
    /// When it is to be tried again.
    again: Instant,
    /// Another host's lease as it was seen last, and since when.
    lease: ((u64, u64), Instant),
    /// The last of all arrivals of drives when it was tried last.
    tried: u64,
    /// `None`: it was not tried yet.
    why: Option<Refusal>,
}

impl Wait {
    fn begin() -> Wait {
        let now = Instant::now();
        Wait { since: now, again: now, lease: ((0, 0), now), tried: 0, why: None }
    }

    /// Soon at first, while another host is just giving the array back; then more seldom.
    fn put_off(&mut self) {
        let now = Instant::now();
        self.again = now + (now - self.since).clamp(LOOK_INTERVAL, AGAIN);
    }

    /// How long the other host's lease has stood still.
    fn stood_still(&mut self, age: (u64, u64)) -> Duration {
        let now = Instant::now();
        if self.lease.0 != age {
            self.lease = (age, now);
        }
        now - self.lease.1
    }
}

/// What front ends ask of a disk.
pub(super) fn disk(volume: &Volume) -> KnownDisk {
    KnownDisk { bytes: volume.bytes(), discard_bytes: volume.discard_bytes() }
}

impl Host {
    /// From now on an array is here only while guests need it; or no more, and it stays as it is.
    pub async fn set_on_demand(&self, name: &str, on: bool) -> Answer<Shown> {
        let _change = self.begin().await?;
        let uuid = self.array_uuid(name)?;
        if self.is_on_demand(uuid) == on {
            return self.show_array_by_uuid(uuid).await;
        }
        let running = self.look(|state| state.arrays.contains_key(&uuid));
        if on {
            self.check_on_demand(name, uuid, running)?;
        } else if !running {
            let unused = self.check_exports_unused(name, uuid).await;
            unused.map_err(|refusal| {
                refusal.fix(format!(
                    "shut the guest down first, or `ashlar array start {name}`, then this"
                ))
            })?;
        }
        self.record(|catalog| {
            if let Some(known) = catalog.arrays.get_mut(&uuid) {
                (known.on_demand, known.started) = (on, running);
            }
        })?;
        tracing::info!(array = name, on, "on demand");
        if !running {
            self.look(|state| state.unavailable.remove(&uuid));
        }
        if on && !running {
            self.wait_exports_of(uuid).await;
        } else if !on {
            self.stop_waiting_of(uuid).await;
        }
        self.show_array_by_uuid(uuid).await
    }

    fn check_on_demand(&self, name: &str, uuid: Uuid, running: bool) -> Answer<()> {
        let exports = self.exports_of(uuid);
        for (export, known) in &exports {
            check_kind(name, export, &known.front)?;
        }
        let unknown = exports.iter().any(|(_, its)| its.disk.is_none());
        if exports.is_empty() || (!running && unknown) {
            return Err(Refusal::conflict(format!(
                "array {name} has no export whose size is known"
            ))
            .fix(format!(
                "start it here once (`ashlar array start {name}`), and create its exports"
            )));
        }
        Ok(())
    }

    /// Of an array that is on demand, all exports are of the kind that can tell.
    pub(super) fn check_export_on_demand(
        &self,
        export: &str,
        front: &Front,
        array: Uuid,
    ) -> Answer<()> {
        if !self.is_on_demand(array) {
            return Ok(());
        }
        check_kind(&self.array_name(array), export, front)
    }

    pub(super) fn is_on_demand(&self, array: Uuid) -> bool {
        self.look(|state| state.catalog.arrays.get(&array).is_some_and(|its| its.on_demand))
    }

    /// Sees to it that each array on demand is followed.
    pub fn follow_guests(self: &Arc<Host>, followers: &mut Followers) {
        followers.retain(|_, follower| !follower.is_finished());
        let arrays: Vec<Uuid> = self.look(|state| {
            let known = state.catalog.arrays.iter().filter(|(_, its)| its.on_demand);
            known.map(|(uuid, _)| *uuid).collect()
        });
        for uuid in arrays {
            let follow = || tokio::spawn(self.clone().follow(uuid));
            followers.entry(uuid).or_insert_with(follow);
        }
    }

    /// Never cancelled half-way: who stops all waits for the change that is under way.
    async fn follow(self: Arc<Host>, array: Uuid) {
        while self.is_on_demand(array) && !self.look(|state| state.stopping) {
            match self.look(|state| state.arrays.get(&array).copied()) {
                Some(running) => self.follow_here(running).await,
                None => self.follow_away(array).await,
            }
        }
    }

    /// Whether an array is on demand, and still here or away.
    fn is_as_before(&self, array: Uuid, running: Option<Running>) -> bool {
        self.is_on_demand(array)
            && self.look(|state| !state.stopping && state.arrays.get(&array).copied() == running)
    }

    /// Until an array is away, or is followed no more.
    async fn follow_here(&self, running: Running) {
        let began = Instant::now();
        let (mut used, mut seen, mut again) = (began, began, began);
        while self.is_as_before(running.uuid, Some(running)) {
            sleep(LOOK_INTERVAL).await;
            let Some(usages) = self.usages_of(running.uuid) else { continue };
            let now = Instant::now();
            used = used_until(used, seen, now);
            seen = now;
            if is_needed(&usages) {
                used = now;
            }
            if now < again {
                continue;
            }
            if is_let_go(&usages, now - used, now - began) {
                let moves = usages.contains(&Usage::Leaving);
                self.let_go(running, (!moves).then_some(now + LATE)).await;
                again = Instant::now() + AGAIN;
            } else if self.has_waiting(running.uuid) {
                self.start_waiting_of(running).await;
                again = Instant::now() + AGAIN;
            }
        }
    }

    /// Until an array is here, or is followed no more.
    async fn follow_away(&self, array: Uuid) {
        let mut waits: Option<Wait> = None;
        while self.is_as_before(array, None) {
            sleep(LOOK_INTERVAL).await;
            let Some(usages) = self.usages_of(array) else { continue };
            if !is_needed(&usages) {
                if waits.take().is_some_and(|wait| wait.why.is_some()) {
                    self.look(|state| state.unavailable.remove(&array));
                }
                continue;
            }
            let wait = waits.get_or_insert_with(Wait::begin);
            // With a drive that came since, it may start.
            let came = self.look(|state| state.last_arrival(array));
            if Instant::now() < wait.again && came <= wait.tried {
                continue;
            }
            wait.tried = self.look(|state| state.arrivals);
            if let Err(why) = self.take(array, wait).await {
                let has_lease = why.has_lease;
                self.note_wait(array, wait, why);
                if has_lease {
                    // It was taken, and could not be started: others may see that it stands still.
                    wait.again = Instant::now() + OTHERS_TURN;
                }
            }
        }
    }

    fn note_wait(&self, array: Uuid, wait: &mut Wait, why: Refusal) {
        if wait.why.as_ref() != Some(&why) && self.is_as_before(array, None) {
            tracing::warn!(array = self.array_name(array), "a guest waits for it: {}", why.line());
            self.look(|state| state.unavailable.insert(array, why.clone()));
            wait.why = Some(why);
        }
        wait.put_off();
    }

    /// Of the exports of an array, those that are served and those that wait; `None`: one does not
    /// say just now.
    fn usages_of(&self, array: Uuid) -> Option<Vec<Usage>> {
        self.look(|state| {
            let exports = state.catalog.exports.iter().filter(|(_, its)| its.array == array);
            let served = exports.filter_map(|(name, _)| {
                let served = state.exports.get(name).map(|its| &its.served);
                served.or(state.waiting.get(name))
            });
            served.map(Served::usage).collect()
        })
    }

    /// The right to change things, for an array whose reactor answers: one that hangs is waited for
    /// before that, where it keeps nobody from changes.
    async fn turn_for(&self, running: Running) -> Option<MutexGuard<'_, ()>> {
        self.snapshot(running).await.ok()?;
        let turn = self.changes.lock().await;
        // Others may have had theirs for long.
        self.snapshot(running).await.ok()?;
        Some(turn)
    }

    /// Stops an array whose guests are gone or stopped. Its exports go on, and wait. One that
    /// cannot be flushed stays; so does one whose turn does not come `by` then: a guest may have
    /// come meanwhile, and have stopped its rings for a moment.
    async fn let_go(&self, running: Running, by: Option<Instant>) {
        let Some(_turn) = self.turn_for(running).await else { return };
        if by.is_some_and(|by| Instant::now() > by) {
            return;
        }
        // Or come.
        let is_unused = || self.usages_of(running.uuid).is_some_and(|its| !is_needed(&its));
        if !self.is_as_before(running.uuid, Some(running)) || !is_unused() {
            return;
        }
        let name = self.array_name(running.uuid);
        let flushed = self.on_array(running, async move |_, pool| pool.array().flush().await).await;
        let why = match flushed {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(refusal) => Some(refusal.error),
        };
        if let Some(why) = why {
            tracing::error!(array = name, "not let go, since it cannot be flushed: {why}");
            return;
        }
        // Or meanwhile.
        if !is_unused() {
            return;
        }
        match self.stop_running(running).await {
            Ok(()) => tracing::info!(array = name, "let go: no guest needs it"),
            // It is not ours any more in any case.
            Err(refusal) => tracing::error!(array = name, "let go: {}", refusal.line()),
        }
    }

    /// Starts an array that a guest waits for, unless another host has it.
    async fn take(&self, array: Uuid, wait: &mut Wait) -> Answer<()> {
        let name = self.array_name(array);
        // Looked at without keeping others from their changes, which a start that waits does.
        if wait.why.is_none() {
            self.probe_free_drives().await;
        }
        if let Some((host, age)) = self.owner_elsewhere(array).await
            && wait.stood_still(age) < STILL
        {
            return Err(Refusal::conflict(format!("{host} has array {name}"))
                .fix("it comes when no guest there uses it any more"));
        }
        if wait.why.is_some() {
            // Who had it may have given it other drives.
            self.probe_free_drives().await;
        }
        let _turn = self.changes.lock().await;
        if !self.is_as_before(array, None) {
            return Ok(());
        }
        // What was found until now is tried here.
        wait.tried = self.look(|state| state.arrivals);
        self.assemble(array, &name, false).await?;
        self.start_exports_of(array).await;
        let waited_ms = wait.since.elapsed().as_millis();
        tracing::info!(array = name, waited_ms, "taken: a guest needs it");
        Ok(())
    }

    /// The host that has an array's lease, be it alive or not, if it is not this one; and how old
    /// the lease is.
    async fn owner_elsewhere(&self, array: Uuid) -> Option<(String, (u64, u64))> {
        let lease = self.newest_lease(array).await;
        let lease = lease.filter(|lease| is_others(Some(lease), &self.lessee))?;
        Some((owner_name(&lease), age(&lease)))
    }

    /// Whether this host has an array's lease: a daemon before this one was killed with it.
    pub(super) async fn is_owner(&self, array: Uuid) -> bool {
        self.newest_lease(array).await.is_some_and(|its| is_own(&its, &self.lessee))
    }

    /// Exports of an array that is away listen, and wait.
    pub(super) async fn wait_exports_of(&self, array: Uuid) {
        for (name, known) in self.exports_of(array) {
            self.wait_export(&name, &known).await;
        }
    }

    /// Exports that are served wait from now on, each with its front end. One that was down stays
    /// so: its guest would fetch the array again and again.
    pub(super) async fn park_exports_of(&self, array: Uuid) {
        for (name, known) in self.exports_of(array) {
            let Some(serving) = self.look(|state| state.exports.remove(&name)) else { continue };
            let Serving { home, parts, served, .. } = serving;
            let handed = served.hand_over().await;
            self.withdraw_volumes(home, parts).await;
            self.look(|state| state.handed.extend(handed.map(|its| (name.clone(), its))));
            self.wait_export(&name, &known).await;
        }
    }

    fn has_waiting(&self, array: Uuid) -> bool {
        self.look(|state| {
            let mut waiting = state.waiting.keys();
            waiting
                .any(|name| state.catalog.exports.get(name).is_some_and(|its| its.array == array))
        })
    }

    /// Serves exports of an array that is here, and that could not be served before.
    async fn start_waiting_of(&self, running: Running) {
        let Some(_turn) = self.turn_for(running).await else { return };
        for (name, known) in self.exports_of(running.uuid) {
            let waits = self.look(|state| state.waiting.contains_key(&name));
            if waits && self.is_as_before(running.uuid, Some(running)) {
                self.start_export_of(&name, &known, running).await;
            }
        }
    }

    pub(super) async fn wait_export(&self, name: &str, known: &KnownExport) {
        let handed = self.look(|state| state.handed.remove(name));
        match Served::wait(name, known, self.since(known.array), handed).await {
            Ok(waiting) => self.look(|state| {
                state.down.remove(name);
                state.waiting.insert(name.to_owned(), waiting);
            }),
            Err(refusal) => {
                self.tell_down(name, "does not wait", &refusal);
                self.note_down(name, refusal);
            }
        }
    }

    pub(super) async fn stop_waiting(&self, name: &str) {
        if let Some(waiting) = self.look(|state| state.waiting.remove(name)) {
            waiting.stop().await;
        }
    }

    async fn stop_waiting_of(&self, array: Uuid) {
        for (name, _) in self.exports_of(array) {
            self.stop_waiting(&name).await;
        }
    }

    /// What an export that waits leaves to one that is served.
    pub(super) async fn end_waiting(&self, name: &str) {
        if let Some(waiting) = self.look(|state| state.waiting.remove(name)) {
            let handed = waiting.hand_over().await;
            self.look(|state| state.handed.extend(handed.map(|its| (name.to_owned(), its))));
        }
    }
}

fn check_kind(array: &str, export: &str, front: &Front) -> Answer<()> {
    let kind = front.kind();
    if kind == ExportKind::VhostUserBlk {
        return Ok(());
    }
    Err(Refusal::conflict(format!(
        "an export by {} cannot tell when its volume is needed, as array {array} on demand takes",
        kind.name()
    ))
    .fix(format!("export {export} by vhost-user-blk, or end it: `array on-demand {array} --off`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    #[test]
    fn an_array_goes_at_once_with_a_guest_that_moves_and_later_with_one_that_is_gone() {
        use Usage::{Idle, InUse, Leaving};
        let cases: [(&[Usage], Duration, Duration, bool); 10] = [
            (&[], NOW, STAY, false),
            (&[], QUIET, QUIET, true),
            (&[Idle], NOW, STAY, false),
            (&[Idle], QUIET, QUIET, true),
            (&[Leaving], NOW, STAY, true),
            (&[Leaving, Idle], NOW, STAY, true),
            // It has just come.
            (&[Leaving], NOW, NOW, false),
            (&[Leaving], QUIET, QUIET, true),
            (&[Leaving, InUse], QUIET, QUIET, false),
            (&[InUse], QUIET, QUIET, false),
        ];
        for (usages, idle, here, expected) in cases {
            assert_eq!(is_let_go(usages, idle, here), expected, "{usages:?} {idle:?} {here:?}");
        }
    }

    #[test]
    fn an_array_is_not_idle_while_nobody_looks() {
        let used = Instant::now();
        let seen = used + LOOK_INTERVAL;
        assert_eq!(used_until(used, seen, seen + LATE), used);
        let now = seen + QUIET;
        assert_eq!(used_until(used, seen, now), now);
    }
}
