//! ublk: a volume as a block device of this host, `/dev/ublkbN`.
//!
//! Requests come to the reactors by io_uring, queue after queue to the next one; the control
//! plane's thread makes the device, starts it and takes it away.
//!
//! ```text
//! file system ── block layer ── ublk_drv ── rings ── session ── disk ── volume
//!                                  └ /dev/ublk-control ── control ── found, parameters, users
//! ```
//!
//! The device outlives the process: who uses it waits while nobody serves it. So a process that
//! was killed, stopped while the device was in use, or replaced, is a pause.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

mod wire;
mod parameters;
mod found;
mod control;
mod users;
mod descriptors;
mod session;

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ashlar_format::units::SECTOR_BYTES;
use ashlar_reactor::op::Errno;

use crate::disk::{Disk, PARTS_MAX, SERIAL_BYTES};
use crate::export::{Export, ExportError, ExportStatus, Part, PartStatus, check_count};
use crate::handed::Handed;
use crate::limits::RateLimits;
use crate::line::{Line, Lines, ask};
use crate::ublk::control::{Control, character_device};
use crate::ublk::found::{Decision, FEATURES, decide, mark};
use crate::ublk::parameters::{DATA_BYTES_MAX, Facts, parameters};
use crate::ublk::session::{Session, Share};
use crate::ublk::wire::{DEVICES_MAX, DeviceInfo, feature};

pub use crate::ublk::parameters::BLOCK_BYTES;

/// Most queues of one export.
pub const QUEUES_MAX: u16 = 64;
/// Largest number of a device.
pub const ID_MAX: u32 = DEVICES_MAX - 1;
/// Requests of one queue. One of them is never used: a driver before Linux 6.15 sees at once that
/// its server is gone only while it has a command of it.
const DEPTH: u16 = 129;
/// The driver takes its time, half a minute at most, until it sees that a server is gone.
const WAIT_MAX: Duration = Duration::from_secs(60);
const LOOK_EVERY: Duration = Duration::from_millis(20);

/// How a volume shall be offered.
#[derive(Clone, Debug)]
pub struct UblkSpec {
    pub name: String,
    /// The device's number, at most [`ID_MAX`].
    pub id: u32,
    /// 1 to [`QUEUES_MAX`]; there are as many as reactors that serve it.
    pub queues_max: u16,
    /// What programs address: one of [`BLOCK_BYTES`].
    pub block_bytes: u32,
    pub limits: Arc<RateLimits>,
}

/// One volume as a block device.
pub struct UblkExport {
    spec: UblkSpec,
    control: Control,
    lines: Lines<Session>,
    queues: u16,
    features: u64,
    /// What could not be done, and what mends it.
    notice: Mutex<Option<String>>,
    /// It is served no more.
    ended: bool,
}

/// Where the block device of this number is.
pub fn path(id: u32) -> PathBuf {
    Path::new("/dev").join(block_device(id))
}

fn block_device(id: u32) -> String {
    format!("ublkb{id}")
}

/// Whether the kernel has a device of this number, whoever it belongs to.
pub fn is_taken(id: u32) -> bool {
    character_device(id).exists()
}

/// Who uses the block device of this number, if it is this volume's, served or not.
pub fn user(id: u32, volume: [u8; 16]) -> Option<String> {
    let found = Control::open().ok()?.find(id).ok()??;
    (found.mark == mark(volume)).then(|| users::user(&block_device(id)))?
}

/// Takes away a device that nobody serves, if it is this volume's: its users get errors.
pub fn forget(id: u32, volume: [u8; 16]) -> Result<(), ExportError> {
    // Where there is no driver, there is no device.
    let Ok(control) = Control::open() else { return Ok(()) };
    match control.find(id).map_err(|errno| refused(id, "looked at", errno))? {
        Some(found) if found.mark == mark(volume) => remove(&control, id),
        Some(_) | None => Ok(()),
    }
}

fn remove(control: &Control, id: u32) -> Result<(), ExportError> {
    control.stop(id, patience()).map_err(|errno| refused(id, "stopped", errno))?;
    control.delete(id, patience()).map_err(|errno| refused(id, "removed", errno))
}

/// Holds for [`WAIT_MAX`], asked ten times a second.
fn patience() -> impl FnMut() -> bool {
    let mut left = WAIT_MAX.as_millis() / 100;
    move || {
        left = left.saturating_sub(1);
        left > 0
    }
}

impl UblkExport {
    /// Makes the device, or goes on with the one that a process before has left. The parts, at
    /// least one, take its queues in turn; the first is that of the reactor which has the volume.
    pub fn start(parts: Vec<Part>, spec: UblkSpec) -> Result<UblkExport, ExportError> {
        check(&spec, parts.len())?;
        let control = Control::open().map_err(|error| no_driver(&error))?;
        let features = control.features().unwrap_or(0);
        if features & FEATURES != FEATURES {
            return Err(ExportError::Spec(
                "this kernel's ublk is too old: it takes Linux 6.5 or later; or use --kind nbd, or \
                 --kind fuse with a loop device"
                    .to_owned(),
            ));
        }
        let (volume, facts) = look(&parts, spec.block_bytes)?;
        let mut export = match wait_for(&control, spec.id, mark(volume))? {
            Some(found) => UblkExport::recover(control, parts, spec, &found)?,
            None => UblkExport::add(control, parts, spec, mark(volume), &facts)?,
        };
        export.features = features;
        export.grow(facts.volume_bytes);
        Ok(export)
    }

    fn add(
        control: Control,
        parts: Vec<Part>,
        spec: UblkSpec,
        mark: u64,
        facts: &Facts,
    ) -> Result<UblkExport, ExportError> {
        let id = spec.id;
        let wanted = DeviceInfo {
            queues: u16::try_from(parts.len()).unwrap_or(PARTS_MAX).min(spec.queues_max),
            depth: DEPTH,
            data_bytes_max: DATA_BYTES_MAX,
            device: id,
            features: FEATURES,
            mark,
            ..DeviceInfo::default()
        };
        let made = control.add(wanted).map_err(|errno| match errno {
            Errno(libc::EEXIST) => taken(id),
            errno => refused(id, "made", errno),
        })?;
        let undo = |control: &Control| {
            if remove(control, id).is_err() {
                tracing::error!(device = id, "a device that could not be started is left");
            }
        };
        if let Err(errno) = control.set_parameters(id, parameters(facts)) {
            undo(&control);
            return Err(refused(id, "described", errno));
        }
        let export = match UblkExport::serve(control, parts, spec, &made) {
            Ok(export) => export,
            Err((control, error)) => {
                undo(&control);
                return Err(error);
            }
        };
        // Dropped after an error, it takes the device away.
        let started = export.control.start(id, || export.takes_commands());
        started.map_err(|errno| export.why(refused(id, "started", errno)))?;
        export.set_up_queue();
        Ok(export)
    }

    /// The device keeps what its users ask for meanwhile, also after an error.
    fn recover(
        control: Control,
        parts: Vec<Part>,
        spec: UblkSpec,
        found: &DeviceInfo,
    ) -> Result<UblkExport, ExportError> {
        let id = spec.id;
        check_blocks(&control, &spec)?;
        start_recovery(&control, id)?;
        let mut export = UblkExport::serve(control, parts, spec, found).map_err(|(_, its)| its)?;
        if let Err(errno) = export.control.end_recovery(id, || export.takes_commands()) {
            export.rest();
            return Err(export.why(refused(id, "taken up again", errno)));
        }
        tracing::info!(export = export.spec.name, device = id, "goes on with its device");
        Ok(export)
    }

    /// Has reactors fetch requests of all queues.
    fn serve(
        control: Control,
        parts: Vec<Part>,
        spec: UblkSpec,
        info: &DeviceInfo,
    ) -> Result<UblkExport, (Control, ExportError)> {
        let path = character_device(spec.id);
        let opened = OpenOptions::new().read(true).write(true).open(&path).map_err(|error| {
            ExportError::Spec(format!("{} cannot be opened: {error}", path.display()))
        });
        match opened.and_then(|device| start_sessions(parts, &spec, info, &device)) {
            Ok(lines) => {
                let (notice, ended) = (Mutex::default(), false);
                let (queues, features) = (info.queues, 0);
                Ok(UblkExport { spec, control, lines, queues, features, notice, ended })
            }
            Err(error) => Err((control, error)),
        }
    }

    /// Whether the driver has taken what the reactors gave it; otherwise it waits for ever.
    fn takes_commands(&self) -> bool {
        let refused = self.lines.ask_all(Session::refused);
        refused.is_ok_and(|all| all.iter().all(Option::is_none))
    }

    /// An error with what the reactors know of it.
    fn why(&self, error: ExportError) -> ExportError {
        let refused = self.lines.ask_all(Session::refused).unwrap_or_default();
        match refused.into_iter().flatten().next() {
            Some(errno) => {
                ExportError::Spec(format!("{error}: its queues cannot be served: {errno}"))
            }
            None => error,
        }
    }

    /// As the engine wants it from the beginning; an operator's rules may come after this.
    fn set_up_queue(&self) {
        let queue = Path::new("/sys/block").join(block_device(self.spec.id)).join("queue");
        // The engine has an order of its own. And see `DEPTH`.
        let requests = (DEPTH - 1).to_string();
        for (what, value) in [("scheduler", "none"), ("nr_requests", requests.as_str())] {
            if let Err(error) = std::fs::write(queue.join(what), value) {
                let export = &self.spec.name;
                tracing::debug!(export, "{what} of its queue stays as it is: {error}");
            }
        }
    }

    /// Lets the device be as large as the volume.
    fn grow(&self, volume_bytes: u64) {
        let (id, sectors) = (self.spec.id, volume_bytes / SECTOR_BYTES);
        let is = self.control.parameters(id).map(|its| its.device_sectors);
        let notice = if is == Ok(sectors) {
            None
        } else if self.features & feature::UPDATE_SIZE == 0 {
            Some(format!(
                "the volume has grown, and {} cannot: that takes Linux 6.16; once it is not in \
                 use, delete the export and create it again with --id {id}",
                path(id).display()
            ))
        } else {
            let grown = self.control.update_size(id, sectors);
            grown.err().map(|errno| refused(id, "made larger", errno).to_string())
        };
        if let Some(notice) = &notice {
            tracing::warn!(export = self.spec.name, "{notice}");
        }
        *self.notice.lock().unwrap_or_else(PoisonError::into_inner) = notice;
    }

    /// Nothing is carried out after this; the device stays, and its users wait.
    fn rest(&mut self) {
        self.ended = true;
        let leave = |session: Rc<Session>| async move { session.leave().await };
        if self.lines.ask_all_and_wait(leave).is_err() {
            let export = &self.spec.name;
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        self.lines.withdraw();
    }

    /// The device goes, after what is under way.
    fn end(&mut self) {
        self.ended = true;
        let (export, id) = (&self.spec.name, self.spec.id);
        let hurried = self.lines.ask_all(Session::expect_end);
        let stopped = self.control.stop(id, patience());
        let close = |session: Rc<Session>| async move { session.close().await };
        let closed =
            hurried.is_ok() && stopped.is_ok() && self.lines.ask_all_and_wait(close).is_ok();
        if !closed {
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        self.lines.withdraw();
        if closed && let Err(errno) = self.control.delete(id, patience()) {
            tracing::error!(export, "{}", refused(id, "removed", errno));
        }
    }
}

impl Export for UblkExport {
    fn status(&self) -> Option<ExportStatus> {
        let part = |session: &Session| PartStatus::of(session.disk(), false, session.queues());
        let status = ExportStatus::of(self.lines.ask_all(part).ok()?);
        let notice = self.notice.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some(ExportStatus {
            connected: users::seen(&block_device(self.spec.id)).is_some(),
            way: Some(format!("io_uring, {} queues of {} requests", self.queues, DEPTH - 1)),
            last_error: status.last_error.clone().or(notice),
            ..status
        })
    }

    fn resized(&self) {
        let look = |session: Rc<Session>| async move {
            session.disk().volume().look().await;
            session.disk().volume().bytes()
        };
        match self.lines.first().ask_and_wait(look) {
            Ok(bytes) => self.grow(bytes),
            Err(_) => {
                tracing::warn!(export = self.spec.name, "its reactor does not say how large it is");
            }
        }
    }

    /// Nothing needs to be handed over: the next process finds the device.
    fn hand_over(mut self: Box<Self>) -> Option<Handed<OwnedFd>> {
        self.rest();
        None
    }

    fn pause(mut self: Box<Self>) {
        if let Some(user) = users::user(&block_device(self.spec.id)) {
            let export = &self.spec.name;
            tracing::info!(export, "{user}, and waits for the next daemon");
            self.rest();
        }
    }
}

impl Drop for UblkExport {
    fn drop(&mut self) {
        if !self.ended {
            self.end();
        }
    }
}

fn check(spec: &UblkSpec, parts: usize) -> Result<(), ExportError> {
    check_count(parts, PARTS_MAX, "reactors")?;
    check_count(spec.queues_max.into(), QUEUES_MAX, "queues")?;
    if spec.id > ID_MAX {
        return Err(ExportError::Spec(format!("{} is no device: use 0 to {ID_MAX}", spec.id)));
    }
    if !BLOCK_BYTES.contains(&spec.block_bytes) {
        let [small, large] = BLOCK_BYTES;
        let text = format!("blocks of {} bytes; {small} or {large} are possible", spec.block_bytes);
        return Err(ExportError::Spec(text));
    }
    Ok(())
}

/// The volume's uuid, and what else its device depends on.
fn look(parts: &[Part], block_bytes: u32) -> Result<([u8; 16], Facts), ExportError> {
    let home = parts.first().ok_or(ExportError::NoVolume)?;
    let volume = home.volume;
    let looked = ask(&home.core, move |reactor, reply| {
        if let Some(volume) = reactor.get(volume) {
            let (volume_bytes, stripe_bytes) = (volume.bytes(), volume.discard_bytes());
            let facts = Facts { volume_bytes, stripe_bytes, block_bytes };
            let _ = reply.send((volume.uuid(), facts));
        }
    });
    looked.ok_or(ExportError::NoVolume)
}

/// A device that is ready to be recovered; `None`: there is none, or none any more.
fn wait_for(control: &Control, id: u32, mark: u64) -> Result<Option<DeviceInfo>, ExportError> {
    for _ in 0..WAIT_MAX.as_millis() / LOOK_EVERY.as_millis() {
        let found = control.find(id).map_err(|errno| refused(id, "looked at", errno))?;
        match decide(found.as_ref(), mark) {
            Decision::Add => return Ok(None),
            Decision::Replace => remove(control, id)?,
            Decision::Refuse => return Err(taken(id)),
            Decision::Recover => return Ok(found),
            Decision::Wait => pause(),
        }
    }
    Err(ExportError::Busy(character_device(id)))
}

#[expect(clippy::disallowed_methods, reason = "who starts an export is no reactor's thread")]
fn pause() {
    std::thread::sleep(LOOK_EVERY);
}

/// The process that served it may be on its way out still.
fn start_recovery(control: &Control, id: u32) -> Result<(), ExportError> {
    for _ in 0..WAIT_MAX.as_millis() / LOOK_EVERY.as_millis() {
        match control.start_recovery(id) {
            Ok(()) => return Ok(()),
            Err(Errno(libc::EBUSY)) => pause(),
            // A process before has begun with it, and ended over that.
            Err(Errno(libc::EINVAL)) => return Ok(()),
            Err(errno) => return Err(refused(id, "taken up again", errno)),
        }
    }
    Err(ExportError::Busy(character_device(id)))
}

/// What programs address stays as it is for as long as they may.
fn check_blocks(control: &Control, spec: &UblkSpec) -> Result<(), ExportError> {
    let id = spec.id;
    let its = control.parameters(id).map_err(|errno| refused(id, "looked at", errno))?;
    let bytes = 1_u32.checked_shl(its.logical_block_log2.into()).unwrap_or(0);
    if bytes == spec.block_bytes {
        return Ok(());
    }
    Err(ExportError::Spec(format!(
        "{} is there already, with blocks of {bytes} bytes; use --block {bytes}, or another --id",
        path(id).display()
    )))
}

fn start_sessions(
    parts: Vec<Part>,
    spec: &UblkSpec,
    info: &DeviceInfo,
    device: &File,
) -> Result<Lines<Session>, ExportError> {
    let count = check_count(parts.len(), PARTS_MAX, "reactors")?;
    let (parts, numbers) = (parts.into_iter(), 0..count);
    let share = |part| Share { part, parts: count, queues: info.queues, depth: info.depth };
    let start = |(part, number)| start_session(part, spec, share(number), device);
    Lines::open(parts.zip(numbers).map(start))
}

fn start_session(
    part: Part,
    spec: &UblkSpec,
    share: Share,
    device: &File,
) -> Option<Line<Session>> {
    let device = device.try_clone().ok()?;
    let (volume, name, limits) = (part.volume, spec.name.clone(), spec.limits.clone());
    Line::open(part.core, move |reactor| {
        if let Err(error) = ashlar_reactor::driver::serve_kernel() {
            tracing::warn!("memory may run out in circles: {error}; run the daemon as root");
        }
        let volume = reactor.get(volume)?;
        let disk = Disk::new(reactor, name, volume, [0; SERIAL_BYTES], share.parts, limits);
        let started = Session::start(disk, device.into(), share);
        started.inspect_err(|error| tracing::error!("its queues cannot be served: {error}")).ok()
    })
}

fn no_driver(error: &io::Error) -> ExportError {
    let fix = if error.kind() == io::ErrorKind::PermissionDenied {
        "run the daemon as root"
    } else {
        "`modprobe ublk_drv`, on Linux 6.5 or later; or use --kind nbd, or --kind fuse with a loop \
         device"
    };
    ExportError::Spec(format!("/dev/ublk-control cannot be opened: {error}; {fix}"))
}

fn taken(id: u32) -> ExportError {
    ExportError::Spec(format!(
        "device {id} is there already, and not this volume's; choose another --id"
    ))
}

fn refused(id: u32, what: &str, errno: Errno) -> ExportError {
    ExportError::Spec(format!("{} cannot be {what}: {errno}", path(id).display()))
}
