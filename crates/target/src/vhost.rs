//! vhost-user-blk: a volume as a disk of a virtual machine.
//!
//! One thread per export serves the Unix socket ([`socket`], [`session`]); the rings are served by
//! reactors ([`device`], [`queue`], [`vring`]): the one that has the volume, and others to which it
//! is offered, ring after ring in turn. Thread and reactors meet in letters ([`line`]).
//!
//! ```text
//! front end ── socket ── session ── line ═ letters ═ device ── queue ── vring ── inflight, memory
//!                                                      │         └ block
//!                                                      └ disk ── budget, volume
//! ```
//!
//! Modules from lowest to highest; a module uses only those above it in this list.
//!
//! Protocol: vhost-user with split and packed rings, and in-flight tracking in shared memory: with
//! a front end that keeps that, a guest goes on after a daemon that was killed. Not here yet: dirty
//! logging for live migration.

mod fault;
mod memory;
mod place;
mod inflight;
mod vring;
mod config;
mod block;
mod budget;
mod disk;
mod queue;
mod device;
mod line;
mod session;
mod peek;
mod socket;

use std::ops::Add;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;

use ashlar_pool::volume::Volume;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;
use ashlar_reactor::traffic;

pub use crate::vhost::disk::Counters;

use crate::vhost::device::Device;
use crate::vhost::disk::{Disk, SERIAL_BYTES};
use crate::vhost::line::{Line, Lines};
use crate::vhost::memory::Graveyard;
use crate::vhost::socket::{BindError, Ends};

/// Most queues of one export.
pub const QUEUES_MAX: u16 = 16;

/// A reactor that serves queues of an export, and the volume as it is known there.
pub struct Part {
    pub core: Sender,
    pub volume: Key<Volume>,
}

/// How a volume shall be offered.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    pub name: String,
    pub socket: PathBuf,
    /// 1 to [`QUEUES_MAX`].
    pub queues_max: u16,
    /// What the guest sees as the disk's serial number; at most 20 bytes.
    pub serial: String,
}

/// Why an export could not be started. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    #[error("{0}")]
    Spec(String),
    #[error("{0} is in use by another process; stop it, or choose another path")]
    Busy(PathBuf),
    #[error("{0} exists and is not a socket; remove it, or choose another path")]
    NotSocket(PathBuf),
    #[error("cannot listen at {path}: {error}")]
    Socket { path: PathBuf, error: std::io::Error },
    #[error("the export's thread cannot be started: {0}")]
    Thread(std::io::Error),
    #[error("the volume is gone, or its reactor has stopped")]
    NoVolume,
}

/// What an export does at this moment.
#[derive(Clone, Debug, Default)]
pub struct ExportStatus {
    /// A front end is there.
    pub connected: bool,
    /// Queues that the guest has started and that work.
    pub queues_active: u16,
    /// The same of each part.
    pub queues_of_parts: Vec<u16>,
    pub counters: Counters,
    /// From when a request was taken from its ring until the guest could see its answer, to a turn
    /// of the reactor.
    pub traffic: traffic::Report,
    /// The last thing that went wrong, if anything did.
    pub last_error: Option<String>,
}

/// One volume on one socket. Dropping it stops the export.
///
/// Its functions wait for its reactors, so they are not for a reactor's own thread; and an export
/// must be stopped before any of them is.
pub struct VhostExport {
    spec: ExportSpec,
    lines: Lines,
    ends: Arc<Ends>,
    thread: Option<JoinHandle<()>>,
}

impl VhostExport {
    /// Listens on the socket (mode 0600; a stale socket file is replaced) and serves whoever comes,
    /// one front end at a time. The parts, 1 to [`QUEUES_MAX`], take the queues in turn; the first
    /// is that of the reactor which has the volume.
    pub fn start(parts: Vec<Part>, spec: ExportSpec) -> Result<VhostExport, ExportError> {
        let serial = check(&spec, parts.len())?;
        let listener = socket::bind(&spec.socket).map_err(|error| match error {
            BindError::Busy => ExportError::Busy(spec.socket.clone()),
            BindError::NotSocket => ExportError::NotSocket(spec.socket.clone()),
            BindError::Io(error) => ExportError::Socket { path: spec.socket.clone(), error },
        })?;
        let started = start_bound(parts, &spec, serial, Ends::new(listener));
        let (lines, ends, thread) = started.inspect_err(|_| {
            let _ = std::fs::remove_file(&spec.socket);
        })?;
        Ok(VhostExport { spec, lines, ends, thread: Some(thread) })
    }

    pub fn spec(&self) -> &ExportSpec {
        &self.spec
    }

    /// The state now; `None` if a reactor has stopped, or does not answer.
    pub fn status(&self) -> Option<ExportStatus> {
        let parts = self.lines.ask_all(Device::status).ok()?;
        Some(ExportStatus {
            connected: parts.iter().any(|part| part.connected),
            queues_active: parts.iter().map(|part| part.queues_active).sum(),
            queues_of_parts: parts.iter().map(|part| part.queues_active).collect(),
            counters: parts.iter().map(|part| part.counters).fold(Counters::default(), Add::add),
            traffic: parts.iter().map(|part| part.traffic).sum(),
            last_error: parts.into_iter().find_map(|part| part.trouble).map(|its| its.to_string()),
        })
    }

    /// The volume has grown: the guest is told, where its front end listens for that.
    pub fn resized(&self) {
        let looked = self.lines.first().ask_and_wait(|device| async move { device.look().await });
        if looked.is_err() {
            tracing::warn!(export = self.spec.name, "its reactor does not say how large it is");
        }
        self.ends.announce_config();
    }

    /// Answers what is under way, takes no more, disconnects the front end and removes the socket.
    pub fn stop(self) {
        drop(self);
    }
}

impl Drop for VhostExport {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        // First the queues: what they answer reaches a front end that is still connected, so that
        // it knows where to go on when it reconnects.
        let close = |device: Rc<Device>| async move { device.close().await };
        if self.lines.ask_all_and_wait(close).is_err() {
            let export = &self.spec.name;
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        self.ends.stop();
        let _ = thread.join();
        let _ = std::fs::remove_file(&self.spec.socket);
        self.lines.all().iter().for_each(Line::withdraw);
    }
}

fn check(spec: &ExportSpec, parts: usize) -> Result<[u8; SERIAL_BYTES], ExportError> {
    if parts == 0 || parts > usize::from(QUEUES_MAX) {
        let message = format!("{parts} reactors; 1 to {QUEUES_MAX} are possible");
        return Err(ExportError::Spec(message));
    }
    if spec.queues_max == 0 || spec.queues_max > QUEUES_MAX {
        let has = spec.queues_max;
        return Err(ExportError::Spec(format!("{has} queues; 1 to {QUEUES_MAX} are possible")));
    }
    let mut serial = [0; SERIAL_BYTES];
    let Some(start) = serial.get_mut(..spec.serial.len()) else {
        let message = format!("serial {:?} is longer than {SERIAL_BYTES} bytes", spec.serial);
        return Err(ExportError::Spec(message));
    };
    start.copy_from_slice(spec.serial.as_bytes());
    Ok(serial)
}

/// Makes the devices on their reactors, and the thread.
fn start_bound(
    parts: Vec<Part>,
    spec: &ExportSpec,
    serial: [u8; SERIAL_BYTES],
    ends: Arc<Ends>,
) -> Result<(Lines, Arc<Ends>, JoinHandle<()>), ExportError> {
    let (graveyard, retired) = mpsc::channel();
    let count = u16::try_from(parts.len()).unwrap_or(QUEUES_MAX);
    let mut lines: Vec<Line> = Vec::new();
    for part in parts {
        match start_part(part, count, spec, serial, graveyard.clone()) {
            Some(line) => lines.push(line),
            None => {
                lines.iter().for_each(Line::withdraw);
                return Err(ExportError::NoVolume);
            }
        }
    }
    let lines = Lines::new(lines);
    let (its_lines, its_ends, queues_max) = (lines.clone(), ends.clone(), spec.queues_max);
    let body = move || socket::serve(&its_ends, &its_lines, queues_max, &retired);
    let thread = std::thread::Builder::new().name("vhost-user".into()).spawn(body);
    let withdraw = |_: &std::io::Error| lines.all().iter().for_each(Line::withdraw);
    let thread = thread.inspect_err(withdraw).map_err(ExportError::Thread)?;
    Ok((lines, ends, thread))
}

/// `parts`: how many there are of the export. `None`: its reactor has stopped, or has no volume.
fn start_part(
    part: Part,
    parts: u16,
    spec: &ExportSpec,
    serial: [u8; SERIAL_BYTES],
    graveyard: Graveyard,
) -> Option<Line> {
    let Part { core, volume } = part;
    let (name, queues_max) = (spec.name.clone(), spec.queues_max);
    let key = line::ask(&core, move |reactor, reply: mpsc::Sender<Key<Device>>| {
        if let Some(volume) = reactor.get(volume) {
            let disk = Disk::new(reactor, name, volume, serial, parts);
            let _ = reply.send(reactor.publish(Device::new(disk, queues_max, graveyard)));
        }
    });
    Some(Line::new(core, key?))
}
