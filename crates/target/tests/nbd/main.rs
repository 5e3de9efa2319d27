//! Goal: a volume is a network block device, for clients that nobody here wrote and for some that
//! break every rule, and what is promised of flushes is so over several connections.
//! Method: arrays on RAM drives on real reactors; a client that builds its messages by hand, and
//! the tools of libnbd, QEMU and fio.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]
#![allow(dead_code, reason = "parts of the neighbouring test")]

mod client;
mod clients;
mod hostile;
#[path = "../export/rig.rs"]
mod rig;
mod tools;

use std::path::PathBuf;
use std::sync::Arc;

use ashlar_target::export::Export;
use ashlar_target::limits::{RateLimits, Rates};
use ashlar_target::nbd::{NbdExport, NbdSpec};
use ashlar_target::unix_socket::Access;

use crate::rig::{Rig, socket_path};

pub const DATA: u64 = 8 << 20;

pub struct Served {
    pub export: NbdExport,
    pub socket: PathBuf,
    pub limits: Arc<RateLimits>,
}

pub fn serve(rig: &Rig) -> Served {
    serve_limited(rig, Rates::default())
}

pub fn serve_limited(rig: &Rig, rates: Rates) -> Served {
    let socket = socket_path();
    let listen = Some("127.0.0.1:0".parse().unwrap());
    let limits = RateLimits::new(rates);
    let (name, its) = ("disk".into(), limits.clone());
    let (at, access) = (Some(socket.clone()), Access::default());
    let spec = NbdSpec { name, socket: at, access, listen, limits: its };
    Served { export: NbdExport::start(rig.parts(), spec).unwrap(), socket, limits }
}

impl Served {
    pub fn serving(&self) -> Vec<u16> {
        self.export.status().unwrap().queues_of_parts
    }

    pub fn trouble(&self) -> String {
        self.export.status().unwrap().last_error.unwrap_or_default()
    }
}

/// Looks again and again; true once `holds`.
pub fn soon(mut holds: impl FnMut() -> bool) -> bool {
    for _ in 0..3000 {
        if holds() {
            return true;
        }
        std::thread::park_timeout(std::time::Duration::from_millis(10));
    }
    false
}
