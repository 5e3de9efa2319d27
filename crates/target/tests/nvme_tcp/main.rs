//! Goal: a volume behaves as a namespace for hosts that keep to the protocol, whatever they choose
//! of it, and for hosts that do not: those are cut off, and nobody else notices.
//! Method: arrays on RAM drives on real reactors, and a host written for the test.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]
#![allow(dead_code, reason = "parts of the neighbouring test")]

mod access;
mod authentication;
mod changes;
mod commands;
mod host;
mod hostile;
mod resets;
#[path = "../export/rig.rs"]
mod rig;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_target::export::Export;
use ashlar_target::limits::{RateLimits, Rates};
use ashlar_target::nvme_tcp::{ExportSpec, NvmeTcpExport, Ports};
use ashlar_target::secrets::Secrets;

use crate::rig::Rig;

pub const SUBSYSTEM: &str = "nqn.2026-01.example:disk";
pub const DISK: u64 = 16 << 20;

/// A volume on two reactors, and where it is offered.
pub struct Offered {
    pub ports: Ports,
    pub export: NvmeTcpExport,
    pub rig: Rig,
}

impl Offered {
    /// To any host.
    pub fn open() -> Offered {
        Offered::to(Vec::new())
    }

    pub fn to(hosts: Vec<String>) -> Offered {
        Offered::by(ExportSpec { hosts, ..spec("127.0.0.1:0".parse().unwrap()) })
    }

    pub fn limited(limits: Arc<RateLimits>) -> Offered {
        Offered::by(ExportSpec { limits, ..spec("127.0.0.1:0".parse().unwrap()) })
    }

    /// What has to be proven by the hosts that it is to.
    pub fn set_secrets(&mut self, secrets: &Secrets) {
        let hosts = self.export.spec().hosts.clone();
        self.export.set_access(&hosts, secrets).unwrap();
    }

    /// Of drives whose writes can be held.
    pub fn holding() -> Offered {
        let rig = Rig::holding(Level::Raid5, 3, DISK, Duration::from_micros(50));
        Offered::of(rig, spec("127.0.0.1:0".parse().unwrap()))
    }

    pub fn by(spec: ExportSpec) -> Offered {
        Offered::of(Rig::spread(Level::Raid5, 3, DISK, Duration::from_micros(50)), spec)
    }

    fn of(rig: Rig, spec: ExportSpec) -> Offered {
        let ports = Ports::default();
        let export = NvmeTcpExport::start(&ports, rig.parts(), spec).unwrap();
        Offered { ports, export, rig }
    }

    pub fn at(&self) -> SocketAddr {
        self.export.spec().listen
    }

    /// In order: an export before its reactors.
    pub fn end(self) {
        let Offered { export, rig, .. } = self;
        drop(export);
        rig.withdraw_others();
    }
}

pub fn spec(listen: SocketAddr) -> ExportSpec {
    ExportSpec {
        limits: RateLimits::new(Rates::default()),
        name: "disk".into(),
        listen,
        subsystem: SUBSYSTEM.into(),
        namespace: None,
        hosts: Vec::new(),
        secrets: Secrets::default(),
        queues_max: 4,
        atomic_bytes: 64 << 10,
        power: PowerCycle::new([1; 16]),
    }
}
