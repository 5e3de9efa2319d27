//! A file, a block device, an NVMe drive of our own or a remote one: opened, claimed, probed, and
//! wiped.
//!
//! Invariants:
//! - while a device is open here, no other daemon has it (`flock`, VFIO), and no mount or other
//!   exclusive user of the block device (`O_EXCL`);
//! - one reactor at a time has it, and one descriptor does it all: so nobody else gets it before
//!   the kernel is done with everything that was ever asked of it, also on a drive that was pulled.

pub mod content;
pub mod pci;
pub mod remote;
pub mod signature;

use std::fs::{File, OpenOptions};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use ashlar_drive::drive::Limits;
use ashlar_format::drive_label::DriveLabel;
use ashlar_reactor::nvme::command::NamespaceIdentity;
use ashlar_reactor::nvme::generic::Generic;
use ashlar_reactor::nvme::remote::Handle;
use ashlar_reactor::op::{Device, Errno};
use rustix::fs::{major, minor};
use uuid::Uuid;

use crate::disk::Disk;
use crate::pages::{PAGE_BYTES, Pages, write_zeroes};
use crate::pci::PciAddress;
use crate::refusal::{Answer, Refusal};
use crate::remote::{Credentials, Initiator, RemoteAddress};
use crate::size::Size;
use crate::survey::{self, Medium};
use crate::topology::node_of_device;

/// A smaller drive could not hold labels, maps and a useful amount of data.
pub const DRIVE_BYTES_MIN: u64 = 64 << 20;
/// How long one that is held is tried again at once, and how far apart: a process that was killed
/// lets go only when the kernel has ended what it had under way.
pub const LET_GO_TIMEOUT: Duration = Duration::from_secs(2);
const LET_GO_PAUSE: Duration = Duration::from_millis(20);
/// Bytes zeroed at once.
const WIPE_STEP_BYTES: u64 = 1 << 20;

/// What makes two paths one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    File {
        device: u64,
        inode: u64,
    },
    BlockDevice {
        number: u64,
    },
    Pci {
        address: PciAddress,
    },
    /// What names the namespace for good.
    Remote {
        name: Uuid,
    },
}

/// A device that this daemon holds.
#[derive(Debug)]
pub struct OpenDevice {
    /// Holds the lock and the exclusive claim. Counted: here, and on the reactor that has it.
    disk: Disk,
    /// Of an NVMe drive of the kernel: the way past its block layer.
    generic: Option<Result<Arc<Generic>, Errno>>,
    pub identity: Identity,
    pub limits: Limits,
    /// A test: what is written may be lost until it is flushed.
    pub lossy: bool,
    /// See [`OpenDevice::is_deleted`].
    deleted: Arc<AtomicBool>,
}

impl OpenDevice {
    /// Opens, claims and probes what is at `path`. Writes nothing. See [`when_free`].
    pub fn open(path: &Path) -> Answer<OpenDevice> {
        let identity = identify(path)?;
        let block_device = matches!(identity, Identity::BlockDevice { .. });
        let file = claim(path, block_device)?;
        let bytes = length(&file).map_err(|error| unreadable(path, &error))?;
        let bytes = bytes - bytes % PAGE_BYTES;
        if bytes < PAGE_BYTES {
            check_size(&path.display().to_string(), bytes)?;
        }
        let sector_bytes =
            probe_sector(&file, block_device, bytes).map_err(|error| unreadable(path, &error))?;
        // A file is zeroed by taking its blocks away; a drive may have to write every one.
        let limits = Limits { bytes, sector_bytes, zeroes_cheaply: !block_device };
        let generic = Generic::beside(&file).map(|generic| generic.map(Arc::new));
        let disk = Disk::File(Arc::new(file));
        Ok(OpenDevice { generic, ..OpenDevice::new(disk, identity, limits) })
    }

    fn new(disk: Disk, identity: Identity, limits: Limits) -> OpenDevice {
        let deleted = Arc::default();
        OpenDevice { disk, generic: None, identity, limits, lossy: false, deleted }
    }

    /// The same of an NVMe drive that the kernel has let go.
    pub fn open_pci(address: PciAddress) -> Answer<OpenDevice> {
        let drive = pci::open(address)?;
        let limits = namespace_limits(&format!("drive {address}"), &drive.identity().its)?;
        let (disk, identity) = (Disk::Nvme(Arc::new(drive)), Identity::Pci { address });
        Ok(OpenDevice::new(disk, identity, limits))
    }

    /// The same of a namespace of another host. It is not claimed: nothing keeps other hosts out
    /// but the lease of an array.
    pub fn open_remote(
        address: &RemoteAddress,
        initiator: Initiator,
        credentials: &Credentials,
    ) -> Answer<OpenDevice> {
        let drive = remote::open(address, initiator, credentials)?;
        let limits = namespace_limits(&address.to_string(), &drive.identity().its)?;
        let identity = Identity::Remote { name: remote::name(&drive) };
        let disk = Disk::Remote(Arc::new(drive));
        Ok(OpenDevice::new(disk, identity, limits))
    }

    /// Of one of another host, who leads there.
    pub fn remote(&self) -> Option<&Arc<Handle>> {
        match &self.disk {
            Disk::Remote(drive) => Some(drive),
            Disk::File(_) | Disk::Nvme(_) => None,
        }
    }

    /// Whether a reactor has given it up, and it was not seen since.
    pub fn is_lost(&self) -> bool {
        self.remote().is_some_and(|drive| drive.report().lost.is_some())
    }

    /// Whether it is something that may be cut short.
    pub fn is_file(&self) -> bool {
        matches!(self.identity, Identity::File { .. })
    }

    /// Lets an NVMe drive go that is about to be taken out, or is not there any more. True: this
    /// was so. One that a reactor has is looked after there.
    pub fn let_go_if_wanted(&self) -> bool {
        match &self.disk {
            Disk::File(_) | Disk::Remote(_) => false,
            Disk::Nvme(drive) => drive.let_go_if_wanted(),
        }
    }

    /// Why it is of no use any more, as far as it is known here.
    pub fn trouble(&self) -> Option<String> {
        match &self.disk {
            Disk::File(_) => None,
            Disk::Nvme(drive) => drive.trouble().map(|trouble| trouble.to_string()),
            Disk::Remote(drive) => drive.report().lost.map(|trouble| trouble.to_string()),
        }
    }

    /// Its descriptor, by which a reactor that has it tells of it; `None`: io_uring has no part in
    /// it.
    pub fn fd(&self) -> Option<RawFd> {
        self.file().map(AsRawFd::as_raw_fd)
    }

    /// What it is open by, if it is a file or a block device.
    pub fn file(&self) -> Option<&File> {
        match &self.disk {
            Disk::File(file) => Some(file),
            Disk::Nvme(_) | Disk::Remote(_) => None,
        }
    }

    /// The node that it is attached to, or the drive under its file; `None`: the system does not
    /// say.
    pub fn node(&self) -> Option<usize> {
        node_of_device(&self.in_sysfs()?)
    }

    /// Where the system tells of it, or of the drive under its file; `None`: nowhere.
    pub fn in_sysfs(&self) -> Option<PathBuf> {
        let directory = match self.identity {
            Identity::File { device: number, .. } | Identity::BlockDevice { number } => {
                block_device(number)
            }
            Identity::Pci { address } => format!("/sys/bus/pci/devices/{address}"),
            Identity::Remote { .. } => return None,
        };
        std::fs::canonicalize(directory).ok()
    }

    pub fn medium(&self) -> Medium<'_> {
        Medium { disk: &self.disk, bytes: self.limits.bytes }
    }

    /// Whether a reactor has it: what it was asked may yet reach it.
    pub fn is_lent(&self) -> bool {
        self.disk.is_shared()
    }

    /// For a reactor's drive. It is not lent.
    pub fn lend(&self) -> Device {
        assert!(!self.is_lent(), "two reactors, one device");
        let seed = Uuid::new_v4().as_u64_pair().0;
        let sector_bytes = self.limits.sector_bytes;
        match self.disk.clone() {
            Disk::File(file) if self.lossy => Device::Lossy { file, sector_bytes, seed },
            Disk::File(file) => match self.generic.clone() {
                Some(generic) => Device::Namespace { file, generic },
                None => Device::File { file },
            },
            Disk::Nvme(drive) => Device::Nvme { drive },
            Disk::Remote(drive) => Device::Remote { drive },
        }
    }

    /// The same device if it has more bytes than when it was opened; `None` if it has not.
    pub fn grown(&self) -> io::Result<Option<OpenDevice>> {
        let bytes = match &self.disk {
            Disk::File(file) => length(file)?,
            Disk::Nvme(_) => return Ok(None),
            Disk::Remote(drive) => drive.look().map_err(io::Error::other)?,
        };
        let limits = Limits { bytes: bytes - bytes % PAGE_BYTES, ..self.limits };
        let grown = OpenDevice {
            disk: self.disk.clone(),
            generic: self.generic.clone(),
            limits,
            deleted: self.deleted.clone(),
            ..*self
        };
        Ok((limits.bytes > self.limits.bytes).then_some(grown))
    }

    /// Whether it has fewer bytes than when it was opened.
    pub fn has_shrunk(&self) -> bool {
        let Disk::File(file) = &self.disk else { return false };
        length(file).is_ok_and(|bytes| bytes < self.limits.bytes)
    }

    /// Whether its file has no name any more, as it was found last: what is in it is gone once it
    /// is let go.
    pub fn is_deleted(&self) -> bool {
        self.deleted.load(Ordering::Relaxed)
    }

    /// Looks whether that is so. True: it is news.
    pub fn look_for_deletion(&self) -> bool {
        let Disk::File(file) = &self.disk else { return false };
        let Ok(meta) = file.metadata() else { return false };
        let is_deleted = meta.is_file() && meta.nlink() == 0;
        is_deleted && !self.deleted.swap(true, Ordering::Relaxed)
    }

    /// Zeroes both ends and every label and superblock, durably: the drive is blank afterwards.
    pub fn wipe(&self) -> io::Result<()> {
        let label = survey::read_label(self.medium()).newest;
        let bytes = self.limits.bytes;
        write_zeroes(&self.disk, 0, signature::EDGE_BYTES)?;
        write_zeroes(&self.disk, bytes - signature::EDGE_BYTES, signature::EDGE_BYTES)?;
        if let Some(label) = label {
            for home in DriveLabel::homes(label.drive_bytes.get()) {
                self.wipe_range(home, DriveLabel::BYTES)?;
            }
            for area in [label.layout().superblocks, label.layout().volume_table] {
                self.wipe_range(area.offset, area.len)?;
            }
        }
        self.disk.sync_data()
    }

    /// Zeroes what of a range is on the device.
    fn wipe_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.limits.bytes);
        let mut at = offset;
        while at < end {
            let step = (end - at).min(WIPE_STEP_BYTES);
            write_zeroes(&self.disk, at, step)?;
            at += step;
        }
        Ok(())
    }
}

/// `shown`: what it is called. An error: it is too small.
fn namespace_limits(shown: &str, its: &NamespaceIdentity) -> Answer<Limits> {
    let bytes = its.bytes() - its.bytes() % PAGE_BYTES;
    check_size(shown, bytes)?;
    Ok(Limits { bytes, sector_bytes: its.block_bytes(), zeroes_cheaply: false })
}

/// Refuses what is too small for a drive. What a label says of one that was larger comes first.
pub fn check_size(shown: &str, bytes: u64) -> Answer<()> {
    if bytes >= DRIVE_BYTES_MIN {
        return Ok(());
    }
    Err(Refusal::conflict(format!("{shown} has {}, too little for a drive", Size(bytes)))
        .fix(format!("use one of at least {}", Size(DRIVE_BYTES_MIN))))
}

pub fn identify(path: &Path) -> Answer<Identity> {
    let shown = path.display();
    let meta = std::fs::metadata(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => {
            let fix = match is_for_devices(path) {
                true => "`lsblk` shows what the kernel has found",
                false => "check the path, or give --size to make a file there",
            };
            Refusal::unknown(format!("{shown} does not exist")).fix(fix)
        }
        _ => unreadable(path, &error),
    })?;
    let kind = meta.file_type();
    if kind.is_block_device() {
        let number = meta.rdev();
        if is_read_only(number) {
            return Err(Refusal::conflict(format!("{shown} is read-only"))
                .fix(format!("`blockdev --setrw {shown}`, or use another drive")));
        }
        return Ok(Identity::BlockDevice { number });
    }
    if !kind.is_file() {
        return Err(Refusal::invalid(format!("{shown} is neither a file nor a block device")).fix(
            "name a block device such as /dev/nvme0n1, a file, ram:SIZE, pci:ADDRESS for an NVMe \
                 drive that the kernel has let go, or nvme-tcp://HOST/NQN for one of another host",
        ));
    }
    // For root the kernel would ignore the mode; whoever set it meant it.
    if meta.mode() & 0o222 == 0 {
        return Err(Refusal::conflict(format!("{shown} is read-only"))
            .fix(format!("chmod u+w {shown}, or use another drive")));
    }
    Ok(Identity::File { device: meta.dev(), inode: meta.ino() })
}

/// Whether files have no business at a path: one there would take a device's name, and memory.
pub fn is_for_devices(path: &Path) -> bool {
    path.starts_with("/dev") && !path.starts_with("/dev/shm")
}

/// Where the system tells of a block device.
fn block_device(number: u64) -> String {
    format!("/sys/dev/block/{}:{}", major(number), minor(number))
}

/// Whether the kernel refuses writes to a block device; it lets root open one all the same.
fn is_read_only(number: u64) -> bool {
    let flag = std::fs::read_to_string(format!("{}/ro", block_device(number)));
    flag.is_ok_and(|flag| flag.trim() == "1")
}

/// Opens by `open`, again and again for as long as `patience` while another has it.
#[expect(clippy::disallowed_methods, reason = "whoever opens is not a reactor's thread")]
pub fn when_free<T>(patience: Duration, open: impl Fn() -> Answer<T>) -> Answer<T> {
    let deadline = Instant::now() + patience;
    loop {
        match open() {
            Err(refusal) if refusal.may_pass && Instant::now() < deadline => {
                std::thread::sleep(LET_GO_PAUSE);
            }
            opened => return opened,
        }
    }
}

/// Opens it for this process alone.
fn claim(path: &Path, block_device: bool) -> Answer<File> {
    let shown = path.display();
    let exclusive = if block_device { libc::O_EXCL } else { 0 };
    let refuse = |error: io::Error| match error.raw_os_error() {
        None if is_held(&error) => Refusal::conflict(format!("{shown} is held by another process"))
            .fix(
                "detach it there first, if that is another ashlar daemon; a drive that was pulled, \
                 or whose daemon was killed, is free once it has answered what it was asked",
            ),
        Some(libc::EINVAL) => {
            Refusal::conflict(format!("the file system of {shown} cannot do direct I/O"))
                .fix("put the file on ext4, XFS or another file system with O_DIRECT")
        }
        Some(libc::EBUSY) => Refusal::conflict(format!("{shown} is in use")).fix(
            "unmount it, and take it out of LVM, md or swap (see `lsblk`); if a daemon that was \
                 killed had it, it is free once it has answered what it was asked",
        ),
        _ => unopened(path, &error),
    };
    let may_pass = |error: io::Error| Refusal { may_pass: is_held(&error), ..refuse(error) };
    try_claim(path, exclusive).map_err(may_pass)
}

fn try_claim(path: &Path, exclusive: i32) -> io::Result<File> {
    let flags = libc::O_DIRECT | exclusive;
    let file = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path)?;
    file.try_lock()?;
    Ok(file)
}

/// Whether somebody else has it: by the lock, or by an exclusive open.
fn is_held(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::ResourceBusy)
}

fn unopened(path: &Path, error: &io::Error) -> Refusal {
    let refusal =
        Refusal::conflict(format!("{} cannot be opened for writing: {error}", path.display()));
    match error.raw_os_error() {
        Some(libc::EACCES | libc::EPERM) => {
            refusal.fix("run the daemon as a user that may write it")
        }
        Some(libc::EROFS) => refusal.fix("mount its file system read-write"),
        _ => refusal,
    }
}

fn unreadable(path: &Path, error: &io::Error) -> Refusal {
    Refusal::failed(format!("{} cannot be read: {error}", path.display()))
}

/// Bytes of a file or block device.
fn length(mut file: &File) -> io::Result<u64> {
    file.seek(SeekFrom::End(0))
}

/// The smallest unit that a real read accepts.
fn probe_sector(io: &File, block_device: bool, bytes: u64) -> io::Result<u32> {
    let mut page = Pages::zeroed(PAGE_BYTES);
    io.read_exact_at(page.bytes_mut(), bytes - PAGE_BYTES)?;
    if block_device && rustix::fs::ioctl_blksszget(io)? != 512 {
        return Ok(4096);
    }
    // Neither the place nor the memory is aligned to more than 512 bytes.
    match io.read_exact_at(&mut page.bytes_mut()[512..1024], 512) {
        Ok(()) => Ok(512),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(4096),
        Err(error) => Err(error),
    }
}

/// Makes a new file of `bytes` zeroes, whose space is taken as it is written. Leaves nothing behind
/// when that fails.
pub fn create_file(path: &Path, bytes: u64) -> Answer<()> {
    let shown = path.display();
    if bytes < DRIVE_BYTES_MIN || !bytes.is_multiple_of(PAGE_BYTES) {
        return Err(Refusal::invalid(format!("{} is no size for a drive", Size(bytes)))
            .fix(format!("use at least {}, and a multiple of 4K", Size(DRIVE_BYTES_MIN))));
    }
    let directory = path.parent().unwrap_or(Path::new("/"));
    let space = rustix::fs::statvfs(directory).map_err(|error| {
        Refusal::unknown(format!("the directory of {shown} cannot be used: {error}"))
            .fix("create it first")
    })?;
    let free = space.f_bavail.saturating_mul(space.f_frsize);
    if free < bytes {
        let (free, wanted) = (Size(free), Size(bytes));
        return Err(Refusal::no_space(format!(
            "there is no room for {shown}: {wanted} are wanted, {free} free"
        ))
        .fix("free space there, or use a smaller --size"));
    }
    let created = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    let file =
        created.map_err(|error| Refusal::conflict(format!("{shown} cannot be made: {error}")))?;
    file.set_len(bytes).and_then(|()| file.sync_all()).map_err(|error| {
        // Best effort: the first error is the one to tell.
        let _ = std::fs::remove_file(path);
        Refusal::no_space(format!("{shown} cannot be given {}: {error}", Size(bytes)))
            .fix("use a smaller --size, or another file system")
    })
}

#[cfg(test)]
mod tests;
