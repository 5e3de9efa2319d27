//! Exports that could not be started, and when they are tried again.
//!
//! Invariant: as long as one of a subsystem of NVMe/TCP is tried again, no host is let in to those
//! that have come up: it would take the disk for gone.

use ashlar_target::nvme_tcp::Coming;

use crate::catalog::KnownExport;
use crate::engine;
use crate::front::Front;
use crate::host::{Host, Running};
use crate::refusal::Refusal;

/// Why an export is down.
pub(super) struct Down {
    pub(super) why: Refusal,
    /// For as long as it may come up by itself.
    _coming: Option<Coming>,
}

impl Host {
    pub(super) fn note_down(&self, name: &str, why: Refusal) {
        self.look(|state| {
            let known = state.catalog.exports.get(name).filter(|_| why.may_pass);
            let coming = known.and_then(|known| self.coming(known));
            state.down.insert(name.to_owned(), Down { why, _coming: coming });
        });
    }

    /// A namespace that is to come. `None`: an export of another kind.
    pub(super) fn coming(&self, known: &KnownExport) -> Option<Coming> {
        match &known.front {
            Front::NvmeTcp { listen, nqn, .. } => Some(self.ports.coming(*listen, nqn)),
            Front::VhostUserBlk { .. }
            | Front::Nbd { .. }
            | Front::Fuse { .. }
            | Front::Ublk { .. } => None,
        }
    }

    /// Logs why an export is down, once, however often it is tried.
    pub(super) fn tell_down(&self, name: &str, what: &str, refusal: &Refusal) {
        if self.look(|state| state.down.get(name).is_none_or(|its| its.why != *refusal)) {
            tracing::error!(export = name, "{what}: {}", refusal.line());
        }
    }

    /// What kept an export from listening may have gone: an address that the host did not have yet,
    /// or another program that listened there. Waits for no change that is under way, and for no
    /// reactor that hangs.
    pub async fn try_down_exports(&self) {
        if self.down_exports().is_empty() {
            return;
        }
        for core in &self.cores {
            if engine::look(core.sender(), |_| ()).await.is_err() {
                return;
            }
        }
        let Ok(_turn) = self.changes.try_lock() else { return };
        for (name, known, array) in self.down_exports() {
            self.start_export_of(&name, &known, array).await;
        }
    }

    /// Those that may be able to listen by now.
    fn down_exports(&self) -> Vec<(String, KnownExport, Running)> {
        self.look(|state| {
            if state.stopping {
                return Vec::new();
            }
            let may_pass = state.down.iter().filter(|(_, its)| its.why.may_pass);
            let not_waiting = may_pass.filter(|(name, _)| !state.waiting.contains_key(*name));
            let known = not_waiting.filter_map(|(name, _)| {
                let known = state.catalog.exports.get(name)?;
                Some((name.clone(), known.clone(), *state.arrays.get(&known.array)?))
            });
            known.collect()
        })
    }
}
