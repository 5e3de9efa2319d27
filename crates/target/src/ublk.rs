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
use crate::ublk::control::{Control, WAIT_MAX, character_device, own_process};
use crate::ublk::found::{Decision, FEATURES, Mark, decide};
use crate::ublk::parameters::{DATA_BYTES_MAX, Facts, parameters};
use crate::ublk::session::{Session, Share};
use crate::ublk::wire::{DEVICES_MAX, DeviceInfo, STATE_DEAD, STATE_LIVE, feature};

pub use crate::ublk::parameters::BLOCK_BYTES;

/// Most queues of one export.
pub const QUEUES_MAX: u16 = 64;
/// Largest number of a device.
pub const ID_MAX: u32 = DEVICES_MAX - 1;
/// Requests of one queue. One of them is never used: a driver before Linux 6.15 sees at once that
/// its server is gone only while it has a command of it.
const DEPTH: u16 = 129;
/// What the driver says to a command that it does not know: `ENOTSUPP`, the kernel's own number
/// (Linux `include/linux/errno.h`).
const UNKNOWN: i32 = 524;
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
    /// Names the time since which no other host has had the volume; 0: it is not known. A device
    /// that was left before is not gone on with: its users know what was there then.
    pub since: u64,
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

/// What speaks against taking the block device of this number away, if it is this volume's, served
/// or not.
pub fn user(id: u32, volume: [u8; 16]) -> Result<Option<String>, ExportError> {
    let Some((_, found)) = own(id, volume)? else { return Ok(None) };
    if found.state == STATE_DEAD {
        return Ok(None);
    }
    let is_own = u32::try_from(found.server) == Ok(own_process());
    Ok(users::user(&block_device(id), found.state == STATE_LIVE && is_own))
}

/// Whether the kernel has this volume's device under this number.
pub fn is_standing(id: u32, volume: [u8; 16]) -> Result<bool, ExportError> {
    Ok(own(id, volume)?.is_some())
}

/// Takes away a device that nobody serves, if it is this volume's: its users get errors.
pub fn forget(id: u32, volume: [u8; 16]) -> Result<(), ExportError> {
    own(id, volume)?.map_or(Ok(()), |(control, _)| remove(&control, id))
}

fn own(id: u32, volume: [u8; 16]) -> Result<Option<(Control, DeviceInfo)>, ExportError> {
    let control = Control::open_if_there().map_err(|error| no_driver(&error))?;
    let Some(control) = control else { return Ok(None) };
    let found = control.find(id).map_err(|errno| refused(id, "looked at", errno))?;
    Ok(found.filter(|its| Mark::new(volume, 0).is_same_volume(its.mark)).map(|its| (control, its)))
}

fn remove(control: &Control, id: u32) -> Result<(), ExportError> {
    control.stop(id).map_err(|errno| refused(id, "stopped", errno))?;
    control.delete(id).map_err(|errno| refused(id, "removed", errno))
}

impl UblkExport {
    /// Makes the device, or goes on with the one that a process before has left. The parts, at
    /// least one, take its queues in turn; the first is that of the reactor which has the volume.
    pub fn start(parts: Vec<Part>, spec: UblkSpec) -> Result<UblkExport, ExportError> {
        check(&spec, parts.len())?;
        let control = Control::open().map_err(|error| no_driver(&error))?;
        let features = features(&control)?;
        let (volume, facts) = look(&parts, spec.block_bytes)?;
        let mark = Mark::new(volume, spec.since);
        match wait_for(&control, spec.id, mark)? {
            Some(found) => {
                let export = UblkExport::recover(control, features, parts, spec, &found)?;
                export.grow(facts.volume_bytes);
                Ok(export)
            }
            None => UblkExport::add(control, features, parts, spec, mark, &facts),
        }
    }

    fn add(
        control: Control,
        features: u64,
        parts: Vec<Part>,
        spec: UblkSpec,
        mark: Mark,
        facts: &Facts,
    ) -> Result<UblkExport, ExportError> {
        let id = spec.id;
        let wanted = DeviceInfo {
            queues: u16::try_from(parts.len()).unwrap_or(PARTS_MAX).min(spec.queues_max),
            depth: DEPTH,
            data_bytes_max: DATA_BYTES_MAX,
            device: id,
            features: FEATURES,
            mark: mark.stored(),
            ..DeviceInfo::default()
        };
        let made = control.add(wanted).map_err(|errno| match errno {
            Errno(libc::EEXIST) => taken(id),
            errno => refused(id, "made", errno),
        })?;
        let undo = |control: &Control, error| {
            if let Err(left) = remove(control, id) {
                tracing::error!(device = id, "a device that could not be started is left: {left}");
            }
            error
        };
        if let Err(errno) = control.set_parameters(id, parameters(facts)) {
            return Err(undo(&control, refused(id, "described", errno)));
        }
        let lines = map(parts, &spec, &made).map_err(|error| undo(&control, error))?;
        let export = UblkExport::over(control, features, spec, lines, made.queues);
        // Dropped after an error, it takes the device away.
        export.fetch()?;
        let started = export.control.start(id, || export.takes_commands());
        started.map_err(|errno| export.why(refused(id, "started", errno)))?;
        export.set_up_queue();
        Ok(export)
    }

    /// The device keeps what its users ask for meanwhile, also after an error.
    fn recover(
        control: Control,
        features: u64,
        parts: Vec<Part>,
        spec: UblkSpec,
        found: &DeviceInfo,
    ) -> Result<UblkExport, ExportError> {
        let id = spec.id;
        check_blocks(&control, &spec)?;
        let begun = start_recovery(&control, id)?;
        let lines = map(parts, &spec, found)?;
        let mut export = UblkExport::over(control, features, spec, lines, found.queues);
        let ended = export.fetch().and_then(|()| {
            let ended = export.control.end_recovery(id, || export.takes_commands());
            ended.map_err(|errno| export.why(refused(id, "taken up again", errno)))
        });
        if let Err(error) = ended {
            export.rest();
            return Err(begun.advise(&export.spec.name, &error));
        }
        tracing::info!(export = export.spec.name, device = id, "goes on with its device");
        Ok(export)
    }

    fn over(
        control: Control,
        features: u64,
        spec: UblkSpec,
        lines: Lines<Session>,
        queues: u16,
    ) -> UblkExport {
        let (notice, ended) = (Mutex::default(), false);
        UblkExport { spec, control, lines, queues, features, notice, ended }
    }

    /// Has them fetch requests of all queues, at once: see [`Begun::Before`].
    fn fetch(&self) -> Result<(), ExportError> {
        let fetch = |session: Rc<Session>| async move { session.fetch() };
        self.lines.ask_all_and_wait(fetch).map(drop).map_err(|_| ExportError::NoVolume)
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
        let ended = self.stop();
        self.lines.withdraw();
        let id = self.spec.id;
        let removed = ended.and_then(|()| {
            self.control.delete(id).map_err(|errno| refused(id, "removed", errno).to_string())
        });
        if let Err(why) = removed {
            tracing::error!(export = self.spec.name, "{why}");
        }
    }

    fn stop(&self) -> Result<(), String> {
        let late = |_| "requests are still under way, and the export ends".to_owned();
        let id = self.spec.id;
        // The driver is told in any case: users of a reactor that hangs get errors.
        let hurried = self.lines.ask_all(Session::expect_end);
        self.control.stop(id).map_err(|errno| refused(id, "stopped", errno).to_string())?;
        let close = |session: Rc<Session>| async move { session.close().await };
        hurried.and_then(|_| self.lines.ask_all_and_wait(close)).map(drop).map_err(late)
    }
}

impl Export for UblkExport {
    fn status(&self) -> Option<ExportStatus> {
        let part = |session: &Session| PartStatus::of(session.disk(), false, session.queues());
        let status = ExportStatus::of(self.lines.ask_all(part).ok()?);
        let notice = self.notice.lock().unwrap_or_else(PoisonError::into_inner).clone();
        Some(ExportStatus {
            connected: users::glance(&block_device(self.spec.id)).is_some(),
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
        if let Some(why) = users::user(&block_device(self.spec.id), true) {
            let export = &self.spec.name;
            tracing::info!(export, "{why}: the device stays, and waits for the next daemon");
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
fn wait_for(control: &Control, id: u32, mark: Mark) -> Result<Option<DeviceInfo>, ExportError> {
    keep_trying(id, || {
        let found = control.find(id).map_err(|errno| refused(id, "looked at", errno))?;
        match decide(found.as_ref(), mark) {
            Decision::Add => Ok(Some(None)),
            Decision::Replace => remove(control, id).map(|()| None),
            Decision::Outdated => Err(outdated(id)),
            Decision::Refuse => Err(taken(id)),
            Decision::Recover => Ok(Some(found)),
            Decision::Wait => Ok(None),
        }
    })
}

/// Until `step` comes to something; the process that served the device may be on its way out.
fn keep_trying<T>(
    id: u32,
    mut step: impl FnMut() -> Result<Option<T>, ExportError>,
) -> Result<T, ExportError> {
    for _ in 0..WAIT_MAX.as_millis() / LOOK_EVERY.as_millis() {
        if let Some(done) = step()? {
            return Ok(done);
        }
        #[expect(clippy::disallowed_methods, reason = "who starts an export is no reactor's")]
        std::thread::sleep(LOOK_EVERY);
    }
    Err(ExportError::Held(character_device(id)))
}

/// How the recovery of a device began.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Begun {
    Now,
    /// A process before has begun with it, and ended over that. The driver does not begin again. It
    /// takes what is fetched now if that process had fetched nothing; otherwise it refuses it.
    Before,
}

impl Begun {
    /// What is to be done after an error. What was fetched stays with the driver, and the device
    /// open, until this process ends or the device is stopped.
    fn advise(self, export: &str, error: &ExportError) -> ExportError {
        let delete = format!("`ashlar export delete {export} --force`");
        ExportError::Spec(match self {
            Begun::Now => format!(
                "{error}; start the daemon again to have it tried once more, or take the device \
                 away with {delete}"
            ),
            Begun::Before => format!(
                "{error}: a daemon before has ended while it took the device up; take it away \
                 with {delete}, and create the export anew"
            ),
        })
    }
}

fn start_recovery(control: &Control, id: u32) -> Result<Begun, ExportError> {
    keep_trying(id, || match control.start_recovery(id) {
        Ok(()) => Ok(Some(Begun::Now)),
        Err(Errno(libc::EBUSY)) => Ok(None),
        Err(Errno(libc::EINVAL)) => Ok(Some(Begun::Before)),
        Err(errno) => Err(refused(id, "taken up again", errno)),
    })
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

/// Has reactors see all queues, but fetch nothing yet.
fn map(
    parts: Vec<Part>,
    spec: &UblkSpec,
    info: &DeviceInfo,
) -> Result<Lines<Session>, ExportError> {
    let path = character_device(spec.id);
    let device = OpenOptions::new().read(true).write(true).open(&path).map_err(|error| {
        ExportError::Spec(format!("{} cannot be opened: {error}", path.display()))
    })?;
    let count = check_count(parts.len(), PARTS_MAX, "reactors")?;
    let (parts, numbers) = (parts.into_iter(), 0..count);
    let share = |part| Share { part, parts: count, queues: info.queues, depth: info.depth };
    let open = |(part, number)| open_session(part, spec, share(number), &device);
    Lines::open(parts.zip(numbers).map(open))
}

fn open_session(part: Part, spec: &UblkSpec, share: Share, device: &File) -> Option<Line<Session>> {
    let device = device.try_clone().ok()?;
    let (volume, name, limits) = (part.volume, spec.name.clone(), spec.limits.clone());
    Line::open(part.core, move |reactor| {
        if let Err(error) = ashlar_reactor::driver::serve_kernel() {
            tracing::warn!(
                "when memory is short the kernel may wait for this daemon to have \
                 written, and this daemon for the kernel: {error}; run it as root"
            );
        }
        let volume = reactor.get(volume)?;
        let disk = Disk::new(reactor, name, volume, [0; SERIAL_BYTES], share.parts, limits);
        let opened = Session::new(disk, device.into(), share);
        opened.inspect_err(|error| tracing::error!("its queues cannot be served: {error}")).ok()
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

/// What the driver has, if it is enough.
fn features(control: &Control) -> Result<u64, ExportError> {
    match control.features() {
        Ok(features) if features & FEATURES == FEATURES => Ok(features),
        // One from before Linux 6.5 does not know what it is asked, or looks for a device first.
        Ok(_) | Err(Errno(libc::EINVAL | libc::ENODEV | libc::EOPNOTSUPP | UNKNOWN)) => {
            Err(ExportError::Spec(
                "this kernel's ublk is too old: it takes Linux 6.5 or later; or use --kind nbd, or \
                 --kind fuse with a loop device"
                    .to_owned(),
            ))
        }
        Err(errno) => Err(ExportError::Spec(format!(
            "/dev/ublk-control does not take commands: {errno}; run the daemon as root, where \
             io_uring is allowed (`sysctl kernel.io_uring_disabled`)"
        ))),
    }
}

fn taken(id: u32) -> ExportError {
    ExportError::Spec(format!(
        "device {id} is there already, and not this volume's; choose another --id"
    ))
}

fn outdated(id: u32) -> ExportError {
    let device = block_device(id);
    ExportError::Spec(format!(
        "another host may have had the volume since /dev/{device} was left, and what its users \
         know is old: take the device away with `ashlar export delete EXPORT --force`, which gives \
         them errors, and create the export anew. If no daemon knows its export any more, choose \
         another --id; this device goes when the host is started again"
    ))
}

fn refused(id: u32, what: &str, errno: Errno) -> ExportError {
    let device = path(id);
    ExportError::Spec(match errno {
        Errno(libc::ETIMEDOUT) => {
            let waited = WAIT_MAX.as_secs();
            format!("{} cannot be {what}: no answer within {waited} s", device.display())
        }
        errno => format!("{} cannot be {what}: {errno}", device.display()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_what_mends_them() {
        let error = refused(3, "stopped", Errno(libc::ETIMEDOUT));
        assert_eq!(error.to_string(), "/dev/ublkb3 cannot be stopped: no answer within 60 s");
        let again = Begun::Now.advise("pg", &error).to_string();
        assert!(again.contains("start the daemon again"), "{again}");
        // What another process has fetched, a new start does not mend.
        let anew = Begun::Before.advise("pg", &error).to_string();
        assert!(anew.contains("`ashlar export delete pg --force`, and create"), "{anew}");
        assert!(!anew.contains("start the daemon"), "{anew}");
    }

    #[test]
    fn where_there_is_no_driver_there_is_no_device() {
        if Path::new("/dev/ublk-control").exists() {
            return;
        }
        assert_eq!(user(0, [7; 16]).unwrap(), None);
        assert!(!is_standing(0, [7; 16]).unwrap());
        forget(0, [7; 16]).unwrap();
    }
}
