//! FUSE: a volume as a regular file of this host, for loop devices, file systems and whatever else
//! takes a file.
//!
//! The file is a mount of its own, over an empty file. What the kernel asks of it comes to the
//! reactor that has the volume: by io_uring (Linux 6.14, `fuse.enable_uring=1`), from a ring of
//! each CPU, or else by `/dev/fuse`. The control plane's thread mounts and unmounts.
//!
//! ```text
//! program, loop device ── kernel ── ring or /dev/fuse ── session ── file ── disk ── volume
//! ```
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

mod wire;
mod file;
mod session;
mod mount;

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::Duration;

use crate::disk::{Disk, SERIAL_BYTES};
use crate::export::{Export, ExportError, ExportStatus, Part, PartStatus, Place};
use crate::fuse::file::File;
use crate::fuse::mount::{Mount, MountError, possible_cpus};
use crate::fuse::session::{Session, Way};
use crate::limits::RateLimits;
use crate::line::Line;

/// A file that was mounted says how large it is within this time, or never.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

/// How a volume shall be offered.
#[derive(Clone, Debug)]
pub struct FuseSpec {
    pub name: String,
    /// Absolute: there is no file yet, or an empty one.
    pub path: PathBuf,
    /// Whether io_uring may be used, where the kernel has it.
    pub may_ring: bool,
    pub limits: Arc<RateLimits>,
}

/// One volume as a file, which goes with it.
pub struct FuseExport {
    spec: FuseSpec,
    line: Line<Session>,
    /// `None` once it was let go.
    mount: Option<Mount>,
}

fn status(session: &Session) -> (PartStatus, Way) {
    let opened = session.file().opened();
    let opened = usize::try_from(opened).unwrap_or(usize::MAX);
    (PartStatus::of(session.file().disk(), opened > 0, opened), session.way())
}

impl FuseExport {
    /// Mounts the file. It is served by the reactor that has the volume: the only part, since
    /// writes of less than a sector must not meet on two.
    pub fn start(mut parts: Vec<Part>, spec: FuseSpec) -> Result<FuseExport, ExportError> {
        let (Some(part), true) = (parts.pop(), parts.is_empty()) else {
            return Err(ExportError::Spec("a file is served by one reactor".to_owned()));
        };
        match FuseExport::mount(&part, &spec)? {
            Ok(export) => Ok(export),
            // Whoever asks for the file would wait for ever.
            Err(why) if spec.may_ring => {
                let export = &spec.name;
                tracing::warn!(export, "without io_uring, by which it does not work: {why}");
                let spec = FuseSpec { may_ring: false, ..spec };
                FuseExport::mount(&part, &spec)?.map_err(ExportError::File)
            }
            Err(why) => Err(ExportError::File(why)),
        }
    }

    /// The inner error: the file is there, but does not answer.
    fn mount(part: &Part, spec: &FuseSpec) -> Result<Result<FuseExport, String>, ExportError> {
        let (mount, device) = Mount::new(&spec.path).map_err(refusal)?;
        let line = start_session(part, spec, device).ok_or(ExportError::NoVolume)?;
        let mount = Some(mount);
        let export = FuseExport { spec: spec.clone(), line, mount };
        let answers = export.answers();
        Ok(answers.map(|()| export))
    }

    /// Looks at the file as others do.
    fn answers(&self) -> Result<(), String> {
        let path = self.spec.path.clone();
        let (tell, told) = mpsc::channel();
        let look = move || {
            let _ = tell.send(std::fs::metadata(&path));
        };
        std::thread::Builder::new()
            .name("fuse-look".to_owned())
            .spawn(look)
            .map_err(|error| format!("the file cannot be looked at: {error}"))?;
        let refused = || self.line.ask(Session::refused).ok().flatten();
        match told.recv_timeout(ANSWER_WITHIN) {
            Ok(Ok(_)) => Ok(()),
            Ok(Err(error)) => Err(format!("the file cannot be looked at: {error}")),
            Err(_) => {
                let why = refused().map(|errno| format!(": the kernel takes no entry: {errno}"));
                Err(format!("the file does not answer{}", why.unwrap_or_default()))
            }
        }
    }
}

fn start_session(part: &Part, spec: &FuseSpec, device: OwnedFd) -> Option<Line<Session>> {
    let owner = (rustix::process::getuid().as_raw(), rustix::process::getgid().as_raw());
    let (volume, name, may_ring) = (part.volume, spec.name.clone(), spec.may_ring);
    let limits = spec.limits.clone();
    // From a file of the system, which is not for a reactor to read.
    let cpus = possible_cpus();
    Line::open(part.core.clone(), move |reactor| {
        if let Err(error) = ashlar_reactor::driver::serve_kernel() {
            tracing::warn!(
                "when memory is short the kernel may wait for this daemon to have \
                 written, and this daemon for the kernel: {error}; run it as root"
            );
        }
        let volume = reactor.get(volume)?;
        // No program asks a file for a serial number.
        let disk = Disk::new(reactor, name, volume, [0; SERIAL_BYTES], 1, limits);
        Session::start(File::new(disk, owner), device, cpus, may_ring).ok()
    })
}

impl Export for FuseExport {
    fn status(&self) -> Option<ExportStatus> {
        let (part, way) = self.line.ask(status).ok()?;
        let way = match way {
            Way::Unknown => None,
            Way::Device => Some("/dev/fuse".to_owned()),
            Way::Rings { queues, entries } => {
                Some(format!("io_uring, {queues} queues of {entries} entries"))
            }
        };
        Some(ExportStatus { way, ..ExportStatus::of(vec![part]) })
    }

    fn place(&self) -> Option<Arc<dyn Place>> {
        self.mount.as_ref().map(|mount| mount.place() as Arc<dyn Place>)
    }

    /// The kernel asks for the size again every second; a loop device is told by `losetup -c`.
    fn resized(&self) {
        // One whose reactor does not answer serves nobody.
        let _ = self.line.ask(|session| session.file().note_change());
    }
}

impl Drop for FuseExport {
    fn drop(&mut self) {
        // First the mount: the kernel sends no more after that, and takes its requests back.
        let unmounted = self.mount.take().is_some();
        let close = |session: Rc<Session>| async move { session.close().await };
        if unmounted && self.line.ask_and_wait(close).is_err() {
            let export = &self.spec.name;
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        self.line.withdraw();
    }
}

/// What a process that was killed has left of an export's file goes, if nobody serves it.
pub fn forget(path: &Path) -> Result<(), ExportError> {
    mount::forget(path).map_err(refusal)
}

fn refusal(error: MountError) -> ExportError {
    ExportError::File(error.to_string())
}
