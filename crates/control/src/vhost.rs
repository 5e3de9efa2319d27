//! The one place that knows the vhost-user-blk front end. Its calls wait for a reactor, so they
//! run beside the control plane's own thread.

use ashlar_pool::volume::Volume;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;
pub use ashlar_target::vhost::ExportSpec as Spec;
use ashlar_target::vhost::{ExportError, VhostExport};

use crate::api::export::ExportCounters;
use crate::refusal::{Answer, Refusal};

/// How an export does.
#[derive(Clone, Debug, Default)]
pub struct ServedStatus {
    pub connected: bool,
    pub queues_active: u16,
    pub counters: ExportCounters,
    pub last_error: Option<String>,
}

/// An export that listens or serves a guest.
pub struct Served {
    export: VhostExport,
}

impl Served {
    pub async fn start(core: &Sender, volume: Key<Volume>, spec: Spec) -> Answer<Served> {
        let core = core.clone();
        let started = beside(move || VhostExport::start(core, volume, spec)).await?;
        Ok(Served { export: started.map_err(refusal)? })
    }

    pub fn status(&self) -> ServedStatus {
        let status = self.export.status();
        let counters = status.counters;
        ServedStatus {
            connected: status.connected,
            queues_active: status.queues_active,
            counters: ExportCounters {
                reads: counters.reads,
                read_bytes: counters.read_bytes,
                writes: counters.writes,
                write_bytes: counters.write_bytes,
                flushes: counters.flushes,
                discards: counters.discards,
                errors: counters.errors,
            },
            last_error: status.last_error,
        }
    }

    /// The volume has grown.
    pub fn resized(&self) {
        self.export.resized();
    }

    /// Finishes what is under way and closes the socket.
    pub async fn stop(self) {
        if let Err(error) = beside(move || self.export.stop()).await {
            tracing::error!(%error, "an export did not stop in order");
        }
    }
}

async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::failed(error.to_string()))
}

fn refusal(error: ExportError) -> Refusal {
    let text = error.to_string();
    match error {
        ExportError::Spec(_) => Refusal::invalid(text),
        ExportError::Busy(_) | ExportError::NotSocket(_) => {
            Refusal::conflict(text).fix("choose another socket with --path")
        }
        ExportError::Socket { .. } | ExportError::Thread(_) | ExportError::NoVolume => {
            Refusal::failed(text)
        }
    }
}
