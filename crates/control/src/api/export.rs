//! Exports, as the API shows them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::PathBuf;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::access::SocketAccess;
use crate::api::traffic::Traffic;
use crate::secret::Secret;

/// By which protocol a volume is offered.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema, ValueEnum,
)]
#[serde(rename_all = "kebab-case")]
pub enum ExportKind {
    /// To a virtual machine on this host
    #[default]
    VhostUserBlk,
    /// To NVMe hosts on the network
    NvmeTcp,
    /// As a network block device, to this host and others
    Nbd,
    /// As a regular file of this host
    Fuse,
    /// As a block device of this host
    Ublk,
}

impl ExportKind {
    /// As it is written in `--kind`.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |its| its.get_name().to_owned())
    }
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
    /// Who may connect to the socket: without this, the daemon's user and root.
    #[serde(default, skip_serializing_if = "SocketAccess::is_usual")]
    pub socket_access: SocketAccess,
    /// Absolute path of the file, of a kind that is one.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub file: Option<PathBuf>,
    /// Address and port for initiators by TCP, of a kind that has them. Of `nbd`: with it, and
    /// without `socket`, there is no socket.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub listen: Option<SocketAddr>,
    /// Of `nvme-tcp`: name of the subsystem. Left out: one made of the volume's uuid.
    #[serde(default)]
    pub nqn: Option<String>,
    /// Of `nvme-tcp`: which namespace of the subsystem it is. Left out: the first that is free.
    #[serde(default)]
    pub nsid: Option<u32>,
    /// Of `nvme-tcp`: names of the hosts that may use it. Neither these nor `host_secrets`: any
    /// host.
    #[serde(default)]
    pub hosts: Vec<String>,
    /// Of `nvme-tcp`: by name, hosts that may use it, too, and have to prove who they are; their
    /// secrets, as `DHHC-1:…` (DH-HMAC-CHAP). They are never shown.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schema(value_type = BTreeMap<String, String>, write_only)]
    pub host_secrets: BTreeMap<String, Secret>,
    /// Of `nvme-tcp`: the subsystem's own secret, for hosts that want it to prove who it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>, write_only)]
    pub controller_secret: Option<Secret>,
    /// Of `ublk`: number of the block device. Left out: the first that is free.
    #[serde(default)]
    pub device: Option<u32>,
    /// Of `ublk`: bytes of a block, 512 or 4096. Left out: 512.
    #[serde(default)]
    pub block_bytes: Option<u32>,
    /// Most queues an initiator may use. Left out: as many as there can be.
    #[serde(default)]
    pub queues: Option<u16>,
    /// CPUs of the reactors that serve its queues, in turn. Left out: those near that of its array.
    #[serde(default)]
    pub cores: Option<Vec<usize>>,
    /// Left out: none.
    #[serde(default)]
    pub limits: LimitsChange,
}

/// Which hosts may use an export by `nvme-tcp` from now on, and what they have to prove when they
/// connect. Who is connected stays so, but for hosts that may not any more, and hosts that never
/// proved anything and have to now. What is left out stays as it is. Secrets hold for all exports
/// of the subsystem.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct HostsChange {
    /// Names of hosts that may use it, too. If any host might before, only these may now.
    #[serde(default)]
    pub allow: Vec<String>,
    /// Of hosts that may not any more.
    #[serde(default)]
    pub forbid: Vec<String>,
    /// By name, hosts that may use it: their new secrets; `null` for none.
    #[serde(default)]
    #[schema(value_type = BTreeMap<String, Option<String>>, write_only)]
    pub secrets: BTreeMap<String, Option<Secret>>,
    /// The subsystem's own.
    #[serde(default)]
    #[schema(value_type = Option<String>, write_only)]
    pub controller: Option<Secret>,
    /// It has none any more.
    #[serde(default)]
    pub remove_controller: bool,
    /// Name hosts also where any host might use it before, and some do.
    #[serde(default)]
    pub force: bool,
}

impl HostsChange {
    pub fn is_empty(&self) -> bool {
        HostsChange { force: false, ..self.clone() } == HostsChange::default()
    }
}

/// How fast it may go. What is left out stays as it is, which is without a limit for a new export;
/// 0 lifts a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LimitsChange {
    #[serde(default)]
    pub read_iops: Option<u64>,
    /// Of writes, discards and write-zeroes.
    #[serde(default)]
    pub write_iops: Option<u64>,
    #[serde(default)]
    pub read_bytes_per_second: Option<u64>,
    #[serde(default)]
    pub write_bytes_per_second: Option<u64>,
    /// Seconds for which unused allowance is saved up: 0 to 3600. Usual: 1.
    #[serde(default)]
    pub burst_s: Option<u32>,
}

/// How fast it may go; `null`: without a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportLimits {
    pub read_iops: Option<u64>,
    pub write_iops: Option<u64>,
    pub read_bytes_per_second: Option<u64>,
    pub write_bytes_per_second: Option<u64>,
    pub burst_s: u32,
}

impl Default for ExportLimits {
    fn default() -> ExportLimits {
        let none = None;
        ExportLimits {
            read_iops: none,
            write_iops: none,
            read_bytes_per_second: none,
            write_bytes_per_second: none,
            burst_s: 1,
        }
    }
}

impl ExportLimits {
    #[must_use]
    pub fn changed(self, change: LimitsChange) -> ExportLimits {
        let changed = |is: Option<u64>, wanted: Option<u64>| match wanted {
            None => is,
            Some(0) => None,
            Some(limit) => Some(limit),
        };
        ExportLimits {
            read_iops: changed(self.read_iops, change.read_iops),
            write_iops: changed(self.write_iops, change.write_iops),
            read_bytes_per_second: changed(
                self.read_bytes_per_second,
                change.read_bytes_per_second,
            ),
            write_bytes_per_second: changed(
                self.write_bytes_per_second,
                change.write_bytes_per_second,
            ),
            burst_s: change.burst_s.unwrap_or(self.burst_s),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum ExportState {
    /// Waits to be used.
    Listening,
    /// A guest, a host or a client is connected; a block device is in use.
    Connected,
    /// Nobody can use it; `error` says why.
    Down,
}

impl ExportState {
    pub fn name(self) -> &'static str {
        match self {
            ExportState::Listening => "listening",
            ExportState::Connected => "connected",
            ExportState::Down => "down",
        }
    }
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
    /// Had to wait because of a limit.
    #[serde(default)]
    pub limited: u64,
}

/// A reactor that serves queues of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportPart {
    pub cpu: usize,
    /// Queues that its guest uses there.
    pub queues_active: u16,
}

/// How NVMe hosts find and see an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct NvmeNamespace {
    /// The subsystem's name.
    pub nqn: String,
    pub nsid: u32,
    #[schema(value_type = String)]
    pub listen: SocketAddr,
    /// Hosts that may use it; none: any.
    pub hosts: Vec<String>,
    /// Those of them that have to prove who they are.
    #[serde(default)]
    pub hosts_with_secret: Vec<String>,
    /// The subsystem can prove who it is.
    #[serde(default)]
    pub controller_secret: bool,
    /// What makes a Linux host connect.
    pub connect: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    pub name: String,
    pub volume: String,
    pub array: String,
    pub kind: ExportKind,
    /// Where initiators find it: all places in one line, for people.
    pub place: String,
    /// Each of them. (An export by NBD may have two.)
    #[serde(default)]
    pub places: Vec<String>,
    /// The same, of one that has a Unix socket.
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// Who may connect to that.
    #[serde(default)]
    pub socket_access: Option<SocketAccess>,
    /// Most queues a guest may use; `null` where nobody has set that.
    pub queues: Option<u16>,
    /// Serial number that a guest sees; `null` while it is down.
    pub serial: Option<String>,
    pub state: ExportState,
    /// Why nobody new can connect, while somebody is connected still: what led to it in the file
    /// system is gone. It is made anew once nobody is connected.
    #[serde(default)]
    pub unreachable: Option<String>,
    /// Why it is down, or what last went wrong with its guest.
    #[serde(default)]
    pub error: Option<String>,
    pub limits: ExportLimits,
    pub queues_active: u16,
    /// That of its array first; none while it is down.
    #[serde(default)]
    pub parts: Vec<ExportPart>,
    pub counters: ExportCounters,
    /// From when a request was taken from its queue until the guest could see its answer. `null`
    /// while it is down.
    #[serde(default)]
    pub traffic: Option<Traffic>,
    /// How initiators reach the volume, of a kind that has several ways; `null` while it is down.
    #[serde(default)]
    pub way: Option<String>,
    /// Options for QEMU that give the volume to a guest, where there are any.
    pub qemu: Option<String>,
    /// Elements of libvirt's description of a guest that give it the volume.
    #[serde(default)]
    pub libvirt: Option<String>,
    /// Of `nvme-tcp`.
    #[serde(default)]
    pub nvme: Option<NvmeNamespace>,
}
