//! Exports, as the API shows them.

use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::traffic::Traffic;

/// By which protocol a volume is offered.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum ExportKind {
    /// To a virtual machine on this host
    #[default]
    VhostUserBlk,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportCreate {
    pub name: String,
    /// Name of a volume, or `ARRAY/VOLUME`.
    pub volume: String,
    /// Left out: `vhost-user-blk`.
    #[serde(default)]
    pub kind: ExportKind,
    /// Absolute path of the socket. Left out: `export/NAME.sock` beside the API's socket.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// Most queues a guest may use. Left out: 64.
    #[serde(default)]
    pub queues: Option<u16>,
    /// CPUs of the reactors that serve its queues, in turn. Left out: those near that of its array.
    #[serde(default)]
    pub cores: Option<Vec<usize>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportState {
    /// Waits for a guest.
    Listening,
    /// A guest is connected.
    Connected,
    /// Not served; `error` says why.
    Down,
}

/// Requests served since the export was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportCounters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    pub discards: u64,
    pub errors: u64,
}

/// A reactor that serves queues of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportPart {
    pub cpu: usize,
    /// Queues that its guest uses there.
    pub queues_active: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    pub name: String,
    pub volume: String,
    pub array: String,
    pub kind: ExportKind,
    /// Where initiators find it.
    pub place: String,
    /// The same, of one that has a Unix socket.
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// Most queues a guest may use; `null` where nobody has set that.
    pub queues: Option<u16>,
    /// Serial number that a guest sees; `null` while it is down.
    pub serial: Option<String>,
    pub state: ExportState,
    /// Why it is down, or what last went wrong with its guest.
    #[serde(default)]
    pub error: Option<String>,
    pub queues_active: u16,
    /// That of its array first; none while it is down.
    #[serde(default)]
    pub parts: Vec<ExportPart>,
    pub counters: ExportCounters,
    /// From when a request was taken from its queue until the guest could see its answer. `null`
    /// while it is down.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// Options for QEMU that give the volume to a guest, where there are any.
    pub qemu: Option<String>,
}
