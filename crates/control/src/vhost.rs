//! The one place that knows the vhost-user-blk front end.

use std::path::PathBuf;

use ashlar_pool::volume::Volume;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;

use crate::api::export::ExportCounters;
use crate::refusal::{Answer, Refusal};

/// What an export shall be.
#[derive(Clone, Debug)]
pub struct Spec {
    pub name: String,
    pub socket: PathBuf,
    pub queues_max: u16,
    pub serial: String,
}

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
    spec: Spec,
    // Until the front end is there, the socket is only held.
    _listener: std::os::unix::net::UnixListener,
}

impl Served {
    pub async fn start(_core: &Sender, _volume: Key<Volume>, spec: Spec) -> Answer<Served> {
        let listener = std::os::unix::net::UnixListener::bind(&spec.socket).map_err(|error| {
            Refusal::failed(format!("{} cannot be bound: {error}", spec.socket.display()))
        })?;
        let Spec { name, queues_max, serial, .. } = &spec;
        tracing::warn!(name, queues_max, serial, "no front end in this build: guests wait");
        Ok(Served { spec, _listener: listener })
    }

    pub fn status(&self) -> ServedStatus {
        ServedStatus::default()
    }

    /// The volume has grown.
    pub fn resized(&self) {}

    /// Finishes what is under way and closes the socket.
    pub async fn stop(self) {
        let _ = std::fs::remove_file(&self.spec.socket);
    }
}
