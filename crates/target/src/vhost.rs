//! vhost-user-blk: a volume as a disk of a virtual machine.
//!
//! One thread per export serves the Unix socket ([`socket`], [`session`]); the rings are served by
//! reactors ([`device`], [`queue`], [`vring`]): the one that has the volume, and others to which it
//! is offered, ring after ring in turn. Thread and reactors meet in letters (`crate::line`).
//!
//! ```text
//! front end ── socket ── session ── line ═ letters ═ device ── queue ── vring ── inflight, dirty
//!                                                      │         └ block       └ memory
//!                                                      └ disk ── budget, volume
//! ```
//!
//! Modules from lowest to highest; a module uses only those above it in this list.
//!
//! Protocol: vhost-user with split and packed rings, and in-flight tracking in shared memory: with
//! a front end that keeps that, a guest goes on after a daemon that was killed. With a log of the
//! pages that were written a front end moves a guest that runs to another host.

mod fault;
mod graveyard;
mod bell;
mod sigbus;
mod memory;
mod dirty;
mod place;
mod inflight;
mod vring;
mod config;
mod block;
mod queue;
mod device;
mod session;
mod peek;
mod socket;

use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use crate::disk::{Disk, PARTS_MAX, SERIAL_BYTES};
use crate::export::{Export, ExportError, ExportStatus, Part, Place, Usage, check_count};
use crate::handed::{FrontEnd, Handed};
use crate::limits::RateLimits;
use crate::line::{Line, Lines};
use crate::unix_socket::{self, Access, SocketFile};
use crate::vhost::config::Facts;
use crate::vhost::device::Device;
use crate::vhost::graveyard::Graveyard;
use crate::vhost::socket::{BACKLOG, Ends, Left};

/// Most queues of one export.
pub const QUEUES_MAX: u16 = 64;
/// How long a front end may take over the rest of a message while all others wait for the next
/// process.
const LEAVE_WITHIN: Duration = Duration::from_secs(2);

/// How a volume shall be offered.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    pub name: String,
    pub socket: PathBuf,
    pub access: Access,
    /// 1 to [`QUEUES_MAX`].
    pub queues_max: u16,
    /// What the guest sees as the disk's serial number; at most 20 bytes.
    pub serial: String,
    pub limits: Arc<RateLimits>,
    /// Names the time since which nobody else has had the volume; 0: it is not known. A front end
    /// with requests under way from another such time is refused: its guest knows nothing of what
    /// was written in between.
    pub since: u64,
}

/// What a front end asks of a disk that nobody serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskFacts {
    pub bytes: u64,
    /// Smallest range that a discard gives back.
    pub discard_bytes: u64,
}

/// One volume on one socket, which goes with it.
pub struct VhostExport {
    spec: ExportSpec,
    lines: Lines<Device>,
    ends: Arc<Ends>,
    thread: Option<Thread>,
}

/// The socket's.
struct Thread {
    handle: JoinHandle<()>,
    /// What it leaves to the next process comes before its end.
    left: mpsc::Receiver<Option<Left>>,
}

impl VhostExport {
    /// Listens on the socket (a stale socket file is replaced) and serves whoever comes,
    /// one front end at a time. The parts, at least one, take the queues in turn; the first is that
    /// of the reactor which has the volume.
    pub fn start(parts: Vec<Part>, spec: ExportSpec) -> Result<VhostExport, ExportError> {
        let checked = check(&spec, parts.len())?;
        let path = &spec.socket;
        let socket =
            unix_socket::bind(path, BACKLOG, spec.access).map_err(|error| error.of(path))?;
        start_bound(parts, spec, checked, socket, None, SERVED)
    }

    /// Listens for who will want a volume that is elsewhere. A front end is told what the disk is,
    /// and whatever it says is kept; its rings wait until the export is handed over to
    /// [`VhostExport::resume`]. `handed`: goes on where one that was served has ended.
    pub fn wait(
        facts: DiskFacts,
        spec: ExportSpec,
        handed: Option<Handed<OwnedFd>>,
    ) -> Result<VhostExport, ExportError> {
        let checked = check(&spec, 1)?;
        let path = &spec.socket;
        let (socket, front_end) = match handed {
            Some(Handed { listener, front_end }) => (handed_over(listener, path), front_end),
            None => {
                let socket = unix_socket::bind(path, BACKLOG, spec.access);
                (socket.map_err(|error| error.of(path))?, None)
            }
        };
        start_bound(Vec::new(), spec, checked, socket, front_end, facts)
    }

    /// Goes on where another process has handed over.
    pub fn resume(
        parts: Vec<Part>,
        spec: ExportSpec,
        handed: Handed<OwnedFd>,
    ) -> Result<VhostExport, ExportError> {
        let checked = check(&spec, parts.len())?;
        let Handed { listener, front_end } = handed;
        let socket = handed_over(listener, &spec.socket);
        start_bound(parts, spec, checked, socket, front_end, SERVED)
    }

    /// `None`: a reactor does not answer.
    fn come_to_rest(&self) -> Option<()> {
        let close = |device: Rc<Device>| async move { device.close().await };
        let closed = self.lines.ask_all_and_wait(close);
        if closed.is_err() {
            let export = &self.spec.name;
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        closed.ok().map(drop)
    }

    /// All that the next process needs; `None`: something does not answer.
    fn leave(&mut self) -> Option<Handed<OwnedFd>> {
        self.come_to_rest()?;
        let first = self.lines.all().first();
        let of_device = first.map(|line| line.ask(|device| device.facts().write_back));
        let of_device = of_device.transpose().ok()?;
        let Thread { handle, left } = self.thread.take()?;
        self.ends.hand_over();
        let left = left.recv_timeout(LEAVE_WITHIN).or_else(|_| {
            let export = &self.spec.name;
            tracing::warn!(export, "a front end is within a message, and is disconnected");
            self.ends.disconnect();
            left.recv()
        });
        let _ = handle.join();
        self.lines.withdraw();
        let (listener, channel) = self.ends.handed().ok()?;
        let front_end = left.ok()?.map(|Left { stream, told, write_back }| {
            let (stream, write_back) = (stream.into(), of_device.unwrap_or(write_back));
            FrontEnd { stream, channel, write_back, told }
        });
        Some(Handed { listener, front_end })
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        self.ends.stop();
        let _ = thread.handle.join();
        self.ends.file().remove();
        self.lines.withdraw();
    }

    pub fn spec(&self) -> &ExportSpec {
        &self.spec
    }
}

impl Export for VhostExport {
    fn status(&self) -> Option<ExportStatus> {
        let mut status = ExportStatus::of(self.lines.ask_all(Device::status).ok()?);
        status.connected |= self.lines.all().is_empty() && self.ends.usage().is_some();
        Some(status)
    }

    fn usage(&self) -> Usage {
        self.ends.usage().unwrap_or(Usage::Idle)
    }

    fn place(&self) -> Option<Arc<dyn Place>> {
        Some(self.ends.file().clone())
    }

    fn resized(&self) {
        let Some(first) = self.lines.all().first() else { return };
        let looked = first.ask_and_wait(|device| async move { device.look().await });
        if looked.is_err() {
            tracing::warn!(export = self.spec.name, "its reactor does not say how large it is");
        }
        self.ends.announce_config();
    }

    fn hand_over(mut self: Box<Self>) -> Option<Handed<OwnedFd>> {
        let handed = self.leave();
        // What did not come to rest just now is not asked again.
        self.end();
        handed
    }
}

impl Drop for VhostExport {
    fn drop(&mut self) {
        if self.thread.is_some() {
            // First the queues: what they answer reaches a front end that is still connected, so
            // that it knows where to go on when it reconnects.
            let _ = self.come_to_rest();
            self.end();
        }
    }
}

/// How many parts there are, and the serial number.
fn check(spec: &ExportSpec, parts: usize) -> Result<(u16, [u8; SERIAL_BYTES]), ExportError> {
    let count = check_count(parts, PARTS_MAX, "reactors")?;
    check_count(spec.queues_max.into(), QUEUES_MAX, "queues")?;
    let mut serial = [0; SERIAL_BYTES];
    let Some(start) = serial.get_mut(..spec.serial.len()) else {
        let message = format!("serial {:?} is longer than {SERIAL_BYTES} bytes", spec.serial);
        return Err(ExportError::Spec(message));
    };
    start.copy_from_slice(spec.serial.as_bytes());
    Ok((count, serial))
}

/// Devices know what their disk is.
const SERVED: DiskFacts = DiskFacts { bytes: 0, discard_bytes: 0 };

/// A socket that another listened on until now.
fn handed_over(listener: OwnedFd, path: &Path) -> (UnixListener, SocketFile) {
    (UnixListener::from(listener), SocketFile::of(path))
}

/// Makes the devices on their reactors, and the thread. The socket goes if that fails.
fn start_bound(
    parts: Vec<Part>,
    spec: ExportSpec,
    checked: (u16, [u8; SERIAL_BYTES]),
    socket: (UnixListener, SocketFile),
    first: Option<FrontEnd<OwnedFd>>,
    facts: DiskFacts,
) -> Result<VhostExport, ExportError> {
    let ends = Ends::new(spec.name.clone(), socket).map_err(ExportError::Thread)?;
    let (graveyard, retired) = mpsc::channel();
    let start = |part| start_part(part, checked, &spec, graveyard.clone());
    let lines = match parts.is_empty() {
        true => Ok(Lines::none()),
        false => Lines::open(parts.into_iter().map(start)),
    };
    let lines = lines.inspect_err(|_| ends.file().remove())?;
    let (its_lines, its_ends) = (lines.clone(), ends.clone());
    let (queues_max, since) = (spec.queues_max, spec.since);
    let DiskFacts { bytes, discard_bytes } = facts;
    let facts = Facts { volume_bytes: bytes, discard_bytes, queues_max, write_back: true };
    let (leave, left) = mpsc::channel();
    let body = move || {
        let _ = leave.send(socket::serve(&its_ends, &its_lines, (facts, since), &retired, first));
    };
    let handle = std::thread::Builder::new().name("vhost-user".into()).spawn(body);
    let undo = |_: &std::io::Error| {
        ends.file().remove();
        lines.withdraw();
    };
    let handle = handle.inspect_err(undo).map_err(ExportError::Thread)?;
    Ok(VhostExport { spec, lines, ends, thread: Some(Thread { handle, left }) })
}

/// `count`: of how many parts it is one. `None`: its reactor has stopped, or has no volume.
fn start_part(
    part: Part,
    (count, serial): (u16, [u8; SERIAL_BYTES]),
    spec: &ExportSpec,
    graveyard: Graveyard,
) -> Option<Line<Device>> {
    let Part { core, volume } = part;
    let (name, queues_max, limits) = (spec.name.clone(), spec.queues_max, spec.limits.clone());
    Line::open(core, move |reactor| {
        let disk = Disk::new(reactor, name, reactor.get(volume)?, serial, count, limits);
        Some(Device::new(disk, queues_max, graveyard))
    })
}
