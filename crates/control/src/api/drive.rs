//! Drives, as the API shows them.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::api::traffic::Traffic;
use crate::pci::PciAddress;
use crate::remote::RemoteAddress;
use crate::secret::Secret;
use crate::size::Size;

/// What a drive is made of.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DriveSource {
    /// Absolute path of a block device or file.
    #[schema(value_type = String)]
    Path(PathBuf),
    /// An NVMe drive by its PCI address, such as `0000:03:00.0`, driven by the daemon itself.
    #[schema(value_type = String)]
    Pci(PciAddress),
    /// An NVMe/TCP namespace of another host, as `nvme-tcp://HOST:PORT/NQN?nsid=N`; with digests if
    /// `&hdgst=1&ddgst=1` follows. Without an NQN the refusal lists what the host offers.
    #[schema(value_type = String)]
    NvmeTcp(RemoteAddress),
    /// Memory of this many bytes, for measuring; it forgets everything when it is detached.
    Ram(u64),
    /// For tests: memory at the pace of a drive of given numbers.
    Model(DriveModel),
    /// For tests: a block device or file under a volatile cache. What is written reaches it with a
    /// flush; so when the daemon is killed, that is a power cut for this drive.
    #[schema(value_type = String)]
    Lossy(PathBuf),
}

/// What a modelled drive can do. Reads and writes share it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DriveModel {
    pub bytes: u64,
    /// Operations a second.
    pub iops: u64,
    /// In 10^6 bytes.
    pub megabytes_per_second: u64,
    /// From when an operation has had its turn to its answer.
    #[serde(default)]
    pub latency_us: u64,
}

impl std::fmt::Display for DriveSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DriveSource::Path(path) => path.display().fmt(f),
            DriveSource::Pci(address) => write!(f, "pci:{address}"),
            DriveSource::NvmeTcp(address) => address.fmt(f),
            DriveSource::Ram(bytes) => write!(f, "ram:{}", Size(*bytes)),
            DriveSource::Model(model) => write!(f, "model:{model}"),
            DriveSource::Lossy(path) => write!(f, "lossy:{}", path.display()),
        }
    }
}

impl std::fmt::Display for DriveModel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let (size, iops, mbps) = (Size(self.bytes), self.iops, self.megabytes_per_second);
        write!(f, "{size},iops={iops},mbps={mbps},latency-us={}", self.latency_us)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DriveAttach {
    pub source: DriveSource,
    /// Left out: made from the path.
    #[serde(default)]
    pub name: Option<String>,
    /// Make a file of this size if there is none. Its space is taken as it is written.
    #[serde(default)]
    pub size_bytes: Option<u64>,
    /// Take a drive that carries data, and wipe it. One with a good array label is left as it is.
    #[serde(default)]
    pub force: bool,
    /// Its file was cut short once, and all of it is again as it was.
    #[serde(default)]
    pub whole: bool,
    /// Of `nvme_tcp`: this host's secret there, as `DHHC-1:…` (DH-HMAC-CHAP). It is never shown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, write_only)]
    pub secret: Option<Secret>,
    /// With that: the subsystem's, which then has to prove who it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, write_only)]
    pub controller_secret: Option<Secret>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DriveState {
    /// Attached and not part of a running array.
    Free,
    /// Part of a running array.
    Member,
    /// Kept to take the place of a member.
    Spare,
    /// Was part of a running array; another drive has its place, and it is not used.
    Replaced,
    /// Should be attached, but cannot be; `error` says why.
    Missing,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DriveKind {
    File,
    BlockDevice,
    /// An NVMe drive that the daemon drives itself.
    Nvme,
    /// A namespace of another host.
    Remote,
    Ram,
    Model,
    Lossy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum DriveHealth {
    Healthy,
    /// Errors were met; it is still used.
    Suspect,
    /// Pulled, or answers nothing useful any more; it is used no longer.
    Failed,
}

/// Since the array that uses the drive was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveCounters {
    pub reads: u64,
    pub read_bytes: u64,
    pub writes: u64,
    pub write_bytes: u64,
    pub flushes: u64,
    /// Attempts after the first.
    pub retries: u64,
    /// Reads that failed after retries.
    pub read_errors: u64,
    /// Writes and flushes that failed after retries.
    pub write_errors: u64,
    /// Operations that were not answered in time; the first makes the drive a failed one.
    pub timeouts: u64,
    /// Blocks that it returned other than they were written, without an error. Known where the
    /// array keeps checksums; else each stripe counts once in which a scrub found that it was this
    /// drive.
    pub wrong_blocks: u64,
    /// The same of checksums that it keeps.
    pub wrong_checksums: u64,
    /// Writes that the file system under it, or its thin space, had no room for.
    #[serde(default)]
    pub no_space: u64,
}

/// Errors of a drive over all starts of its arrays, as this host has seen them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveHistory {
    /// When the first was seen, in seconds since 1970.
    pub since_s: u64,
    /// Reads, and writes and flushes, that failed after retries.
    pub read_errors: u64,
    pub write_errors: u64,
    /// Operations that were not answered in time.
    pub timeouts: u64,
    /// Blocks, and checksums of blocks, that it returned other than they were written.
    pub wrong_blocks: u64,
    pub wrong_checksums: u64,
    /// When it last failed by its errors, in seconds since 1970, and by which.
    #[serde(default)]
    pub failed_s: Option<u64>,
    #[serde(default)]
    pub failure: Option<String>,
}

impl DriveHistory {
    /// `3 read, 1 silent`; `None`: there were none.
    pub fn errors(&self) -> Option<String> {
        let kinds = [
            (self.read_errors, "read"),
            (self.write_errors, "write"),
            (self.timeouts, "silent"),
            (self.wrong_blocks, "wrong blocks"),
            (self.wrong_checksums, "wrong checksums"),
        ];
        let met = kinds.iter().filter(|(count, _)| *count > 0);
        let met: Vec<String> = met.map(|(count, kind)| format!("{count} {kind}")).collect();
        (!met.is_empty()).then(|| met.join(", "))
    }
}

/// How long operations took in the last seconds. Zero without operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LatencySummary {
    /// Of what reactors other than the array's read, about one in a millisecond is among them.
    pub operations: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveLatency {
    pub reads: LatencySummary,
    pub writes: LatencySummary,
}

/// Why a drive is slow: how long it and its siblings took, at the last look that found it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveSlowness {
    /// `read` or `write`.
    pub kind: SlowKind,
    pub p50_ns: u64,
    pub p99_ns: u64,
    /// Medians of the siblings' percentiles.
    pub siblings_p50_ns: u64,
    pub siblings_p99_ns: u64,
}

/// `reads take 9.1 ms at p99 (p50 0.9 ms), its siblings' 0.4 ms (0.1 ms)`
impl std::fmt::Display for DriveSlowness {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            SlowKind::Read => "reads",
            SlowKind::Write => "writes",
        };
        let ms = |ns: u64| format!("{}.{} ms", ns / 1_000_000, ns / 100_000 % 10);
        let [p50, p99] = [self.p50_ns, self.p99_ns].map(ms);
        let [others_p50, others_p99] = [self.siblings_p50_ns, self.siblings_p99_ns].map(ms);
        write!(f, "{kind} take {p99} at p99 (p50 {p50}), its siblings' {others_p99} ({others_p50})")
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum SlowKind {
    Read,
    Write,
}

/// Whether something is used.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Used {
    pub used: bool,
    /// `null` if it is.
    pub why_not: Option<String>,
}

/// How operations of a running array reach a drive, by io_uring.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DriveQueue {
    /// The kernel has the drive in a table.
    pub registered_file: Used,
    /// The kernel has the memory of the reactor's buffers in a table.
    pub fixed_buffers: Used,
    /// The drive is asked for completions, and does not interrupt.
    pub polling: Used,
    /// It is given NVMe commands, past the kernel's block layer.
    #[serde(default)]
    pub passthrough: Used,
    /// Operations under way, now and at most.
    pub depth: u32,
    pub depth_max: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum PathState {
    /// Nobody needs a connection just now.
    Idle,
    Connected,
    /// Some or all connections are being made, or made anew; what is asked waits.
    Connecting,
    /// It was away for too long: it is used no longer, and looked for.
    Lost,
    /// The same, and another namespace answers at its address.
    Another,
}

/// How a drive of another host is reached.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RemotePath {
    /// `nvme-tcp`
    pub transport: String,
    pub address: String,
    /// The subsystem's NQN.
    pub subsystem: String,
    pub namespace: u32,
    /// Who this host is there.
    pub host_nqn: String,
    pub header_digest: bool,
    pub data_digest: bool,
    /// This host has a secret there.
    #[serde(default)]
    pub has_secret: bool,
    /// The subsystem has to prove who it is.
    #[serde(default)]
    pub has_controller_secret: bool,
    /// Writes may be in a cache of its until they are flushed.
    pub volatile_cache: bool,
    /// It says since when it has power: what is in its cache is known to be there after the
    /// connection was lost.
    #[serde(default)]
    pub tells_power: bool,
    pub state: PathState,
    /// Reactors that are connected; each has connections of its own.
    pub connected: u32,
    /// Times that one was connected again.
    pub reconnects: u64,
    /// Why it is not connected, or was not last.
    pub error: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Drive {
    pub name: String,
    pub source: DriveSource,
    pub state: DriveState,
    /// Why the drive is missing, or not used where it could be of use.
    #[serde(default)]
    pub error: Option<String>,
    pub kind: Option<DriveKind>,
    pub bytes: Option<u64>,
    /// Smallest unit it reads and writes.
    pub sector_bytes: Option<u32>,
    /// What it carried when it was last looked at: `blank`, `member of …`, `ext4`, …
    pub content: Option<String>,
    /// Uuid in the drive's label.
    pub uuid: Option<Uuid>,
    /// Array that the drive is a member of, or whose label it carries.
    pub array: Option<String>,
    pub array_uuid: Option<Uuid>,
    pub member: Option<u32>,
    pub health: Option<DriveHealth>,
    /// It takes several times as long as the other drives of its array; it is still used.
    pub slow: Option<bool>,
    /// `null` if it is not.
    #[serde(default)]
    pub slowness: Option<DriveSlowness>,
    /// There was no room for its writes lately.
    #[serde(default)]
    pub full: Option<bool>,
    /// Its file was deleted: what is in it is gone once the daemon lets it go.
    #[serde(default)]
    pub deleted: bool,
    pub counters: Option<DriveCounters>,
    /// Over all starts, as far as this host has seen it; `null`: nothing went wrong.
    #[serde(default)]
    pub history: Option<DriveHistory>,
    pub latency: Option<DriveLatency>,
    /// Each attempt that succeeded.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// `null` where no array runs on it, and for drives of memory.
    #[serde(default)]
    pub queue: Option<DriveQueue>,
    /// `null` for drives of this host.
    #[serde(default)]
    pub path: Option<RemotePath>,
}
