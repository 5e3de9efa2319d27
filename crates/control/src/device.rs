//! A file or block device: opened for direct I/O, claimed, probed, and wiped.
//!
//! Invariants:
//! - while a device is open here, no other daemon has it (`flock`), and no mount or other exclusive
//!   user of the block device (`O_EXCL`);
//! - one reactor at a time has it, and one descriptor does it all: so nobody else gets it before
//!   the kernel is done with everything that was ever asked of it, also on a drive that was pulled.

pub mod content;
pub mod signature;

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use ashlar_drive::drive::Limits;
use ashlar_format::drive_label::DriveLabel;
use ashlar_reactor::op::Device;
use uuid::Uuid;

use crate::pages::{PAGE_BYTES, Pages, write_zeroes};
use crate::refusal::{Answer, Refusal};
use crate::size::Size;
use crate::survey::{self, Medium};

/// A smaller drive could not hold labels, maps and a useful amount of data.
pub const DRIVE_BYTES_MIN: u64 = 64 << 20;
/// Bytes zeroed at once.
const WIPE_STEP_BYTES: u64 = 1 << 20;

/// What makes two paths one drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Identity {
    File { device: u64, inode: u64 },
    BlockDevice { number: u64 },
}

/// A device that this daemon holds.
#[derive(Debug)]
pub struct OpenDevice {
    /// Holds the lock and the exclusive claim. Counted: here, and on the reactor that has it.
    file: Arc<File>,
    pub identity: Identity,
    pub limits: Limits,
    /// A test: what is written may be lost until it is flushed.
    pub lossy: bool,
}

impl OpenDevice {
    /// Opens, claims and probes what is at `path`. Writes nothing.
    pub fn open(path: &Path) -> Answer<OpenDevice> {
        let identity = identify(path)?;
        let block_device = matches!(identity, Identity::BlockDevice { .. });
        let file = claim(path, block_device)?;
        let bytes = length(&file).map_err(|error| unreadable(path, &error))?;
        let bytes = bytes - bytes % PAGE_BYTES;
        if bytes < DRIVE_BYTES_MIN {
            return Err(Refusal::conflict(format!(
                "{} has {}, too little for a drive",
                path.display(),
                Size(bytes)
            ))
            .fix(format!("use one of at least {}", Size(DRIVE_BYTES_MIN))));
        }
        let sector_bytes =
            probe_sector(&file, block_device, bytes).map_err(|error| unreadable(path, &error))?;
        // A file is zeroed by taking its blocks away; a drive may have to write every one.
        let limits = Limits { bytes, sector_bytes, zeroes_cheaply: !block_device };
        Ok(OpenDevice { file: Arc::new(file), identity, limits, lossy: false })
    }

    pub fn is_block_device(&self) -> bool {
        matches!(self.identity, Identity::BlockDevice { .. })
    }

    /// Its descriptor, by which a reactor that has it tells of it.
    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub fn medium(&self) -> Medium<'_> {
        Medium { file: &self.file, bytes: self.limits.bytes }
    }

    /// Whether a reactor has it: what it was asked may yet reach it.
    pub fn is_lent(&self) -> bool {
        Arc::strong_count(&self.file) > 1
    }

    /// For a reactor's drive. It is not lent.
    pub fn lend(&self) -> Device {
        assert!(!self.is_lent(), "two reactors, one device");
        let file = self.file.clone();
        let seed = Uuid::new_v4().as_u64_pair().0;
        let sector_bytes = self.limits.sector_bytes;
        match self.lossy {
            true => Device::Lossy { file, sector_bytes, seed },
            false => Device::File { file },
        }
    }

    /// The same device if it has more bytes than when it was opened; `None` if it has not.
    pub fn grown(&self) -> io::Result<Option<OpenDevice>> {
        let bytes = length(&self.file)?;
        let limits = Limits { bytes: bytes - bytes % PAGE_BYTES, ..self.limits };
        let (file, identity, lossy) = (self.file.clone(), self.identity, self.lossy);
        let grown = OpenDevice { file, identity, limits, lossy };
        Ok((limits.bytes > self.limits.bytes).then_some(grown))
    }

    /// Whether it has fewer bytes than when it was opened.
    pub fn has_shrunk(&self) -> bool {
        length(&self.file).is_ok_and(|bytes| bytes < self.limits.bytes)
    }

    /// Zeroes both ends and every label and superblock, durably: the drive is blank afterwards.
    pub fn wipe(&self) -> io::Result<()> {
        let label = survey::read_label(self.medium()).newest;
        let bytes = self.limits.bytes;
        write_zeroes(&self.file, 0, signature::EDGE_BYTES)?;
        write_zeroes(&self.file, bytes - signature::EDGE_BYTES, signature::EDGE_BYTES)?;
        if let Some(label) = label {
            for home in DriveLabel::homes(label.drive_bytes.get()) {
                self.wipe_range(home, DriveLabel::BYTES)?;
            }
            for area in [label.layout().superblocks, label.layout().volume_table] {
                self.wipe_range(area.offset, area.len)?;
            }
        }
        self.file.sync_data()
    }

    /// Zeroes what of a range is on the device.
    fn wipe_range(&self, offset: u64, len: u64) -> io::Result<()> {
        let end = offset.saturating_add(len).min(self.limits.bytes);
        let mut at = offset;
        while at < end {
            let step = (end - at).min(WIPE_STEP_BYTES);
            write_zeroes(&self.file, at, step)?;
            at += step;
        }
        Ok(())
    }
}

pub fn identify(path: &Path) -> Answer<Identity> {
    let shown = path.display();
    let meta = std::fs::metadata(path).map_err(|error| match error.raw_os_error() {
        Some(libc::ENOENT) => Refusal::unknown(format!("{shown} does not exist"))
            .fix("check the path, or give --size to make a file there"),
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
        return Err(Refusal::invalid(format!("{shown} is neither a file nor a block device"))
            .fix("name a block device such as /dev/nvme0n1, a file, or ram:SIZE"));
    }
    // For root the kernel would ignore the mode; whoever set it meant it.
    if meta.mode() & 0o222 == 0 {
        return Err(Refusal::conflict(format!("{shown} is read-only"))
            .fix(format!("chmod u+w {shown}, or use another drive")));
    }
    Ok(Identity::File { device: meta.dev(), inode: meta.ino() })
}

/// Whether the kernel refuses writes to a block device; it lets root open one all the same.
fn is_read_only(number: u64) -> bool {
    let (major, minor) = (rustix::fs::major(number), rustix::fs::minor(number));
    let flag = std::fs::read_to_string(format!("/sys/dev/block/{major}:{minor}/ro"));
    flag.is_ok_and(|flag| flag.trim() == "1")
}

fn claim(path: &Path, block_device: bool) -> Answer<File> {
    let shown = path.display();
    let exclusive = if block_device { libc::O_EXCL } else { 0 };
    let flags = libc::O_DIRECT | exclusive;
    let opened = OpenOptions::new().read(true).write(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) => {
            Refusal::conflict(format!("the file system of {shown} cannot do direct I/O"))
                .fix("put the file on ext4, XFS or another file system with O_DIRECT")
        }
        Some(libc::EBUSY) => Refusal::conflict(format!("{shown} is in use"))
            .fix("unmount it, and take it out of LVM, md or swap (see `lsblk`)"),
        _ => unopened(path, &error),
    })?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => {
            Err(Refusal::conflict(format!("{shown} is held by another process")).fix(
                "detach it there first, if that is another ashlar daemon; a drive that was \
                     pulled is free once it has answered what it was asked",
            ))
        }
        Err(TryLockError::Error(error)) => Err(unopened(path, &error)),
    }
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
