//! vhost-user-blk: a volume as a disk of a virtual machine.
//!
//! One thread per export serves the Unix socket ([`socket`], [`session`]); the rings are served by
//! the reactor that owns the volume ([`device`], [`queue`], [`vring`]). The two meet in letters
//! ([`line`]).
//!
//! ```text
//! front end ── socket ── session ── line ═ letters ═ device ── queue ── vring ── memory
//!                                                      │         └ block
//!                                                      └ disk ── budget, volume
//! ```
//!
//! Modules from lowest to highest; a module uses only those above it in this list.
//!
//! Protocol: vhost-user with split and packed rings. Not here yet: in-flight tracking in shared
//! memory, dirty logging for live migration. Without the former, a packed ring goes on after a
//! daemon that was stopped, and has to be reset by its guest after one that was killed.

mod fault;
mod memory;
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

use std::path::PathBuf;
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
use crate::vhost::line::Line;
use crate::vhost::socket::{BindError, Ends};

/// Most queues of one export.
pub const QUEUES_MAX: u16 = 16;

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
    pub counters: Counters,
    /// From when a request was taken from its ring until the guest could see its answer, to a turn
    /// of the reactor.
    pub traffic: traffic::Report,
    /// The last thing that went wrong, if anything did.
    pub last_error: Option<String>,
}

/// One volume on one socket. Dropping it stops the export.
///
/// Its functions wait for the volume's reactor, so they are not for that reactor's own thread; and
/// an export must be stopped before its reactor is.
pub struct VhostExport {
    spec: ExportSpec,
    line: Line,
    ends: Arc<Ends>,
    thread: Option<JoinHandle<()>>,
}

impl VhostExport {
    /// Listens on the socket (mode 0600; a stale socket file is replaced) and serves whoever comes,
    /// one front end at a time.
    pub fn start(
        core: Sender,
        volume: Key<Volume>,
        spec: ExportSpec,
    ) -> Result<VhostExport, ExportError> {
        let serial = check(&spec)?;
        let listener = socket::bind(&spec.socket).map_err(|error| match error {
            BindError::Busy => ExportError::Busy(spec.socket.clone()),
            BindError::NotSocket => ExportError::NotSocket(spec.socket.clone()),
            BindError::Io(error) => ExportError::Socket { path: spec.socket.clone(), error },
        })?;
        let started = start_bound(core, volume, &spec, serial, Ends::new(listener));
        let (line, ends, thread) = started.inspect_err(|_| {
            let _ = std::fs::remove_file(&spec.socket);
        })?;
        Ok(VhostExport { spec, line, ends, thread: Some(thread) })
    }

    pub fn spec(&self) -> &ExportSpec {
        &self.spec
    }

    /// The state now; the default where the reactor has stopped.
    pub fn status(&self) -> ExportStatus {
        let status = self.line.ask(|device| {
            let status = device.status();
            ExportStatus {
                connected: status.connected,
                queues_active: status.queues_active,
                counters: status.counters,
                traffic: status.traffic,
                last_error: status.trouble.map(|trouble| trouble.to_string()),
            }
        });
        status.unwrap_or_default()
    }

    /// The volume has grown: the guest is told, where its front end listens for that.
    pub fn resized(&self) {
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
        let closed = self.line.ask_and_wait(|device| async move { device.close().await });
        if closed.is_err() {
            let export = &self.spec.name;
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        self.ends.stop();
        let _ = thread.join();
        let _ = std::fs::remove_file(&self.spec.socket);
        self.line.withdraw();
    }
}

fn check(spec: &ExportSpec) -> Result<[u8; SERIAL_BYTES], ExportError> {
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

/// Makes the device on the reactor, and the thread.
fn start_bound(
    core: Sender,
    volume: Key<Volume>,
    spec: &ExportSpec,
    serial: [u8; SERIAL_BYTES],
    ends: Arc<Ends>,
) -> Result<(Line, Arc<Ends>, JoinHandle<()>), ExportError> {
    let (graveyard, retired) = mpsc::channel();
    let (name, queues_max) = (spec.name.clone(), spec.queues_max);
    let key = line::ask(&core, move |reactor, reply: mpsc::Sender<Key<Device>>| {
        if let Some(volume) = reactor.get(volume) {
            let disk = Disk::new(reactor, name, volume, serial);
            let _ = reply.send(reactor.publish(Device::new(disk, queues_max, graveyard)));
        }
    });
    let line = Line::new(core, key.ok_or(ExportError::NoVolume)?);
    let (its_line, its_ends) = (line.clone(), ends.clone());
    let body = move || socket::serve(&its_ends, &its_line, queues_max, &retired);
    let thread = std::thread::Builder::new().name("vhost-user".into()).spawn(body);
    let thread = thread.map_err(ExportError::Thread).inspect_err(|_| line.withdraw())?;
    Ok((line, ends, thread))
}
