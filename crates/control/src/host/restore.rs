//! The host's first and last steps: what shall be is brought up, and everything is put to rest.

use std::collections::BTreeSet;
use std::time::Duration;

use ashlar_reactor::join::join_all;
use ashlar_target::nvme_tcp::Coming;
use tokio::sync::{Mutex, Semaphore};
use tokio::task::spawn_blocking;
use uuid::Uuid;

use crate::catalog::{KnownArray, KnownDrive};
use crate::history::Histories;
use crate::host::Host;
use crate::host::drives::Reopened;
use crate::refusal::Answer;

/// That are started side by side: each may hold its whole ring in memory for a moment.
const ARRAYS_AT_ONCE: usize = 8;
/// A stop waits for a change that is under way; but a reactor may hang in the middle of one.
const CHANGE_WITHIN: Duration = Duration::from_secs(60);

impl Host {
    /// Attaches the catalog's drives, starts its arrays and their exports. What cannot be started
    /// is noted and logged; the rest goes on.
    pub async fn restore(&self) -> Answer<()> {
        let catalog = self.directory.load()?;
        let histories = Histories::new(self.directory.load_histories());
        self.look(|state| (state.catalog, state.histories) = (catalog.clone(), histories));
        // Not `begin`: what shall run must come up where nothing can be stored, too.
        let _turn = self.changes.lock().await;
        if let Err(refusal) = self.save() {
            tracing::error!("nothing can be changed: {}", refusal.line());
        }
        self.reattach_drives(catalog.drives.clone()).await;
        let shall_run = || catalog.arrays.iter().filter(|(_, its)| its.started || its.on_demand);
        // Of all, before the first begins: as long as these are held, hosts wait for them.
        let starts: Vec<_> =
            shall_run().map(|(uuid, known)| (*uuid, known, self.coming_of(*uuid))).collect();
        let (places, one_by_one) = (&Semaphore::new(ARRAYS_AT_ONCE), &Mutex::new(()));
        let starts = starts.into_iter().map(|(uuid, known, coming)| async move {
            self.restore_array(uuid, known, places, one_by_one).await;
            // Tried: what has not come by now keeps no host waiting.
            drop(coming);
        });
        join_all(starts).await;
        if let Err(refusal) = self.forget_used_spares() {
            tracing::error!("{}", refusal.line());
        }
        Ok(())
    }

    /// Arrays are started side by side: each waits half a second for its lease alone. Their exports
    /// are started one by one.
    ///
    /// One on demand is left until a guest needs it here: one may elsewhere. But if a daemon was
    /// killed with it, it is put in order: as long as it has our lease, it keeps others waiting.
    async fn restore_array(
        &self,
        uuid: Uuid,
        known: &KnownArray,
        places: &Semaphore,
        exports: &Mutex<()>,
    ) {
        let place = places.acquire().await;
        let starts = !known.on_demand || self.is_owner(uuid).await;
        let is_started = starts && self.restore_alone(uuid, known).await;
        drop(place);
        let _turn = exports.lock().await;
        if is_started {
            self.start_exports_of(uuid).await;
        } else if known.on_demand {
            self.wait_exports_of(uuid).await;
        }
    }

    /// Without its exports. False: it could not be started.
    async fn restore_alone(&self, uuid: Uuid, known: &KnownArray) -> bool {
        let Err(refusal) = self.assemble(uuid, &known.name, false).await else { return true };
        tracing::error!(array = known.name, "not started: {}", refusal.line());
        if !known.on_demand {
            self.look(|state| state.unavailable.insert(uuid, refusal));
        }
        false
    }

    /// The namespaces of an array that is to be started: as long as these are held, hosts wait for
    /// all of them.
    pub(super) fn coming_of(&self, array: Uuid) -> Vec<Coming> {
        let exports = self.exports_of(array);
        exports.iter().filter_map(|(_, known)| self.coming(known)).collect()
    }

    /// Attaches drives that were missing, and starts the arrays that waited for them. Of each: what
    /// became of opening what is known of it. Who calls has the turn to change something.
    pub(super) async fn reattach(&self, opened: Vec<(String, KnownDrive, Answer<Reopened>)>) {
        let reattach =
            |(name, meant, opened): (String, _, _)| self.reattach_one(&name, &meant, opened);
        let waiting: BTreeSet<Uuid> = opened.into_iter().filter_map(reattach).collect();
        for array in waiting {
            let name = self.array_name(array);
            match self.assemble(array, &name, false).await {
                Ok(()) => {
                    self.look(|state| state.unavailable.remove(&array));
                    tracing::info!(array = name, "started");
                    self.start_exports_of(array).await;
                }
                Err(refusal) => drop(self.look(|state| state.unavailable.insert(array, refusal))),
            }
        }
    }

    /// The array that waited for it.
    fn reattach_one(
        &self,
        name: &str,
        meant: &KnownDrive,
        opened: Answer<Reopened>,
    ) -> Option<Uuid> {
        // It may have been detached, or its name given to another.
        let is_meant = self.look(|state| {
            let is_known = state.catalog.drives.get(name) == Some(meant);
            is_known && !state.stopping && state.missing.contains_key(name)
        });
        if !is_meant {
            // To let an NVMe drive go takes its time.
            spawn_blocking(move || drop(opened));
            return None;
        }
        match opened.and_then(|drive| self.admit(name, drive)) {
            Ok(drive) => {
                let array = drive.content.label().map(|label| label.array);
                let waiting = self.look(|state| {
                    state.attach(name, drive);
                    // One on demand is tried by who waits for it.
                    let arrays = &state.catalog.arrays;
                    let array = array.filter(|its| arrays.get(its).is_none_or(|it| !it.on_demand));
                    array.filter(|array| state.unavailable.contains_key(array))
                });
                tracing::info!(drive = name, "the drive is there: attached");
                waiting
            }
            Err(refusal) => {
                self.look(|state| state.missing.insert(name.to_owned(), refusal));
                None
            }
        }
    }

    /// Drains exports, then flushes and stops arrays. They will be started again with the daemon.
    /// Waits for a change under way, if that ends; none begins afterwards.
    pub async fn shut_down(&self) -> Answer<()> {
        let turn = tokio::time::timeout(CHANGE_WITHIN, self.changes.lock()).await;
        if turn.is_err() {
            tracing::error!("a change does not end: what can be put to rest beside it is");
        }
        self.look(|state| state.stopping = true);
        let mut first_trouble = Ok(());
        let waiting = self.look(|state| std::mem::take(&mut state.waiting));
        for waiting in waiting.into_values() {
            waiting.stop().await;
        }
        self.tell_exports_of_stop(|_| true).await;
        // At once: one that waits for its drives keeps no other from an orderly end.
        let stops = self.running().into_iter().map(|running| self.stop_running(running));
        for stopped in join_all(stops).await {
            if let Err(refusal) = stopped {
                tracing::error!("{}", refusal.line());
                first_trouble = first_trouble.and(Err(refusal));
            }
        }
        // No start needs it.
        if let Err(refusal) = self.store_histories(true) {
            tracing::error!("{}", refusal.line());
        }
        first_trouble.and(self.save())
    }
}
