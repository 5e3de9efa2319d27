//! The host's first and last steps: what shall be is brought up, and everything is put to rest.

use crate::host::Host;
use crate::refusal::Answer;

impl Host {
    /// Attaches the catalog's drives, starts its arrays and their exports. What cannot be started
    /// is noted and logged; the rest goes on.
    pub async fn restore(&self) -> Answer<()> {
        let catalog = self.directory.load()?;
        self.look(|state| state.catalog = catalog.clone());
        // Not `begin`: what shall run must come up where nothing can be stored, too.
        let _turn = self.changes.lock().await;
        if let Err(refusal) = self.save() {
            tracing::error!("nothing can be changed: {}", refusal.line());
        }
        self.reattach_drives(catalog.drives.clone()).await;
        for (uuid, known) in catalog.arrays.iter().filter(|(_, known)| known.started) {
            match self.assemble(*uuid, &known.name, false).await {
                Ok(()) => self.start_exports_of(*uuid).await,
                Err(refusal) => {
                    tracing::error!(array = known.name, "not started: {}", refusal.line());
                    self.look(|state| state.unavailable.insert(*uuid, refusal));
                }
            }
        }
        if let Err(refusal) = self.forget_used_spares() {
            tracing::error!("{}", refusal.line());
        }
        Ok(())
    }

    /// Drains exports, then flushes and stops arrays. They will be started again with the daemon.
    /// Waits for a change under way; none begins afterwards.
    pub async fn shut_down(&self) -> Answer<()> {
        let _turn = self.changes.lock().await;
        self.look(|state| state.stopping = true);
        let mut first_trouble = Ok(());
        for running in self.running() {
            if let Err(refusal) = self.stop_running(running).await {
                tracing::error!("{}", refusal.line());
                first_trouble = first_trouble.and(Err(refusal));
            }
        }
        first_trouble.and(self.save())
    }
}
