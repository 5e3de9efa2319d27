//! Everything at one moment.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::array::Array;
use crate::api::drive::Drive;
use crate::api::export::Export;
use crate::api::spare::Spare;
use crate::api::traffic::Traffic;
use crate::api::volume::Volume;

/// One reactor. What it did and has is `null` while it does not answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CoreStatus {
    pub cpu: usize,
    /// Node of the CPU and its memory.
    #[serde(default)]
    pub node: usize,
    /// The first of the CPUs that share its last cache.
    #[serde(default)]
    pub cache: usize,
    /// Names of the arrays it serves.
    pub arrays: Vec<String>,
    /// Names of the drives that these are on.
    #[serde(default)]
    pub drives: Vec<String>,
    #[serde(default)]
    pub exports: Vec<CoreExport>,
    /// What its exports were asked for since it was started, also those that are gone.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    pub counters: Option<CoreCounters>,
    pub memory: Option<CoreMemory>,
    pub io_uring: Option<IoUring>,
}

/// An export that a reactor serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CoreExport {
    pub name: String,
    /// Queues that its guest uses.
    pub queues_active: u16,
}

/// Since the reactor was started, but for the share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CoreCounters {
    /// Millionths of the last five to ten seconds in which it worked on operations. The rest it
    /// looked for some, or slept.
    pub busy_ppm: u32,
    pub busy_ns: u64,
    pub slept_ns: u64,
    /// Looks at everything that may bring work.
    pub turns: u64,
    /// Calls of io_uring_enter(2).
    pub enters: u64,
    /// Operations given to the kernel, and heard of from it.
    pub submissions: u64,
    pub completions: u64,
}

/// Bytes by the pages that they are on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PageBytes {
    /// Set aside by the operator (`vm.nr_hugepages`).
    pub huge: u64,
    /// The system makes them huge as it can.
    pub transparent: u64,
    pub small: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CoreMemory {
    /// For data on its way.
    pub buffers: PageBytes,
    /// That serves as drives.
    pub drives: PageBytes,
}

/// What the kernel gives, in the words of its manual pages.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoUring {
    /// Of `IORING_SETUP_…`, what is in use.
    pub setup: Vec<String>,
    /// What would have been better, and was refused.
    pub refused: Vec<IoUringRefusal>,
    /// Of `IORING_FEAT_…`.
    pub features: Vec<String>,
    /// Of `IORING_OP_…`, of those that are not everywhere.
    pub operations: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoUringRefusal {
    pub setup: String,
    pub error: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub uptime_s: u64,
    pub cores: Vec<CoreStatus>,
    pub drives: Vec<Drive>,
    pub arrays: Vec<Array>,
    pub spares: Vec<Spare>,
    pub volumes: Vec<Volume>,
    pub exports: Vec<Export>,
    /// What needs a person, one line each.
    pub problems: Vec<String>,
}
