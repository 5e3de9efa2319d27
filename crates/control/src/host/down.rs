//! Exports that could not be started, and when they are tried again.
//!
//! Invariant: as long as one of a subsystem of NVMe/TCP is tried again, no host is let in to those
//! that have come up: it would take the disk for gone.

use std::collections::BTreeSet;

use ashlar_reactor::join::join_all;
use ashlar_target::nvme_tcp::Coming;

use crate::api::export::ExportState;
use crate::catalog::KnownExport;
use crate::engine;
use crate::front::Front;
use crate::host::{Host, Running};
use crate::refusal::Refusal;
use crate::served::Served;

/// Why an export is down.
pub(super) struct Down {
    pub(super) why: Refusal,
    /// For as long as it may come up by itself, and the reactors that it needs answer.
    coming: Option<Coming>,
}

/// Its name, and the array that it is of, which runs.
type DownExport = (String, KnownExport, Running);

impl Host {
    pub(super) fn note_down(&self, name: &str, why: Refusal) {
        self.look(|state| {
            let known = state.catalog.exports.get(name).filter(|_| why.may_pass);
            let coming = known.and_then(|known| self.coming(known));
            state.down.insert(name.to_owned(), Down { why, coming });
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

    /// What led to an export in the file system is gone: it ends, if nobody is connected, and is
    /// tried as others that are down.
    async fn make_anew(&self, name: &str, lost: &str) {
        let Ok(_turn) = self.changes.try_lock() else { return };
        // Others have changed it since it was looked at, perhaps.
        let export = self.show_export(name).await;
        if !export.is_ok_and(|its| its.state == ExportState::Down && its.unreachable.is_some()) {
            return;
        }
        tracing::warn!(export = name, "made anew: {lost}");
        let waits = self.look(|state| state.waiting.contains_key(name));
        let known = self.look(|state| state.catalog.exports.get(name).cloned());
        self.stop_export(name).await;
        match known.filter(|_| waits) {
            Some(known) => self.wait_export(name, &known).await,
            None => self.note_down(name, Refusal { may_pass: true, ..Refusal::failed(lost) }),
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
    /// reactor that hangs; nor does a host for an export that needs such a one.
    pub async fn try_down_exports(&self) {
        self.make_lost_anew().await;
        let silent = self.silent_of(&self.down_exports()).await;
        let (idle, ready): (Vec<_>, Vec<_>) = self.down_exports().into_iter().partition(|its| {
            let needed = self.cores_needed(its);
            needed.iter().any(|core| silent.contains(core))
        });
        self.look(|state| {
            for (name, ..) in &idle {
                state.down.entry(name.clone()).and_modify(|its| its.coming = None);
            }
        });
        let Ok(_turn) = self.changes.try_lock() else { return };
        for (name, known, array) in self.down_exports() {
            if ready.iter().any(|(its, ..)| *its == name) {
                self.start_export_of(&name, &known, array).await;
            }
        }
        for (name, known) in self.down_and_away() {
            self.wait_export(&name, &known).await;
        }
    }

    /// Exports that nobody finds any more, and nobody uses, begin anew.
    async fn make_lost_anew(&self) {
        let served: Vec<(String, Served)> = self.look(|state| {
            let served = state.exports.iter().map(|(name, its)| (name, &its.served));
            let all = served.chain(&state.waiting);
            all.map(|(name, its)| (name.clone(), its.clone())).collect()
        });
        join_all(served.iter().map(|(_, its)| its.look_at_place())).await;
        for (name, its) in served {
            if let Some(lost) = its.lost() {
                self.make_anew(&name, &lost).await;
            }
        }
    }

    /// The reactors that these exports need and that do not answer.
    async fn silent_of(&self, exports: &[DownExport]) -> BTreeSet<usize> {
        let needed: BTreeSet<usize> =
            exports.iter().flat_map(|its| self.cores_needed(its)).collect();
        let looks = needed.into_iter().map(async |core| {
            let answers = engine::look(self.core(core), |_| ()).await.is_ok();
            (!answers).then_some(core)
        });
        join_all(looks).await.into_iter().flatten().collect()
    }

    /// That of its array, and those that are to serve it, if they are known.
    fn cores_needed(&self, (_, known, array): &DownExport) -> Vec<usize> {
        let mut cores = self.cores_for(array.core, known).unwrap_or_default();
        cores.push(array.core);
        cores
    }

    /// Those that may be able to listen by now, of arrays that run.
    fn down_exports(&self) -> Vec<DownExport> {
        let all = self.may_listen().into_iter();
        all.filter_map(|(name, known, array)| Some((name, known, array?))).collect()
    }

    /// Those that may be able to listen by now, and wait for an array that is to come here.
    fn down_and_away(&self) -> Vec<(String, KnownExport)> {
        let away = self.may_listen().into_iter().filter(|(_, known, array)| {
            array.is_none() && known.disk.is_some() && self.is_on_demand(known.array)
        });
        away.map(|(name, known, _)| (name, known)).collect()
    }

    /// With the array of each, if it runs.
    fn may_listen(&self) -> Vec<(String, KnownExport, Option<Running>)> {
        self.look(|state| {
            if state.stopping {
                return Vec::new();
            }
            let may_pass = state.down.iter().filter(|(_, its)| its.why.may_pass);
            let not_waiting = may_pass.filter(|(name, _)| !state.waiting.contains_key(*name));
            let known = not_waiting.filter_map(|(name, _)| {
                let known = state.catalog.exports.get(name)?;
                Some((name.clone(), known.clone(), state.arrays.get(&known.array).copied()))
            });
            known.collect()
        })
    }
}
