//! Where the file is: made, mounted over, and let go again, whatever was left there by a daemon
//! that was killed.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Statx, StatxFlags, statx};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use crate::export::Place;

/// Where the kernel shows its FUSE connections, once that is mounted.
const CONNECTIONS: &str = "/sys/fs/fuse/connections";
const MOUNTS: &str = "/proc/self/mountinfo";
const POSSIBLE_CPUS: &str = "/sys/devices/system/cpu/possible";
/// What `/proc/mounts` says of it.
const SOURCE: &str = "ashlar";
const KIND: &str = "fuse.ashlar";

#[derive(Debug, thiserror::Error)]
pub(super) enum MountError {
    #[error("{0} exists, and is not an empty file; choose another path, or move it away")]
    Occupied(PathBuf),
    #[error("{path} cannot be made: {error}")]
    File { path: PathBuf, error: io::Error },
    #[error("what is left at {path} cannot be taken away: {error}; `umount` it, and remove it")]
    Left { path: PathBuf, error: io::Error },
    #[error("what was beneath the mount at {0} is no empty file, and stays")]
    Stays(PathBuf),
    #[error("/dev/fuse cannot be opened: {0}; run the daemon as root, and `modprobe fuse`")]
    Device(io::Error),
    #[error("{path} cannot be mounted: {error}; run the daemon as root")]
    Mount { path: PathBuf, error: io::Error },
}

/// A mounted file. Dropping it lets go of the mount, ends it for all who have it elsewhere, and
/// removes the file beneath it if it was made for this.
pub(super) struct Mount {
    file: Arc<MountedFile>,
    made: bool,
    mounted: bool,
    /// What ends it, if that could be opened.
    abort: Option<File>,
}

/// Where it is.
pub(super) struct MountedFile {
    path: PathBuf,
    /// Which of the kernel's FUSE connections it is, for as long as it is there: the number may be
    /// another's afterwards.
    connection: Option<u32>,
}

impl Place for MountedFile {
    fn lost(&self) -> Option<String> {
        let path = self.path.display();
        (!self.is_there())
            .then(|| format!("its file {path} was unmounted, or another is mounted there"))
    }
}

impl MountedFile {
    fn is_there(&self) -> bool {
        // File systems without a device of their own have major number 0.
        let there = device_at(&self.path).ok();
        self.connection.is_some_and(|its| there == Some((0, its)))
    }
}

impl Mount {
    /// Makes the file, if there is none, and mounts over it. What the kernel asks then comes by the
    /// descriptor.
    pub(super) fn new(path: &Path) -> Result<(Mount, OwnedFd), MountError> {
        let made = make_place(path)?;
        let at = |connection| Arc::new(MountedFile { path: path.to_owned(), connection });
        let mut its = Mount { file: at(None), made, mounted: false, abort: None };
        let device = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/fuse")
            .map_err(MountError::Device)?;
        let options = format!(
            "fd={},rootmode={:o},user_id={},group_id={},default_permissions\0",
            device.as_raw_fd(),
            libc::S_IFREG,
            rustix::process::getuid().as_raw(),
            rustix::process::getgid().as_raw(),
        );
        let options = std::ffi::CStr::from_bytes_with_nul(options.as_bytes()).ok();
        let flags = MountFlags::NOSUID | MountFlags::NODEV;
        mount(SOURCE, path, KIND, flags, options)
            .map_err(|error| MountError::Mount { path: path.to_owned(), error: error.into() })?;
        its.mounted = true;
        its.file = at(device_at(path).ok().map(|(_, connection)| connection));
        // What fails is tried again at the end, if somebody has it still.
        let unheard = |error: &io::Error| {
            let path = path.display();
            tracing::warn!(%path, %error, "by other mounts of it nobody will hear of its end");
        };
        its.abort = its.open_abort().inspect_err(unheard).ok();
        Ok((its, device.into()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if self.mounted {
            self.end();
        }
        if self.made
            && let Err(error) = remove_place(&self.file.path)
        {
            let path = self.file.path.display();
            tracing::warn!(%path, %error, "the file is not removed");
        }
    }
}

impl Mount {
    /// The name goes, and what is asked of the file fails. That the name was not in use says
    /// nothing: the file may be open by another mount of it (`mount --bind`, a container).
    fn end(&self) {
        let (at, mut late) = (&self.file.path, None);
        let path = at.display();
        if !self.file.is_there() {
            tracing::warn!(%path, "the file is not unmounted: it was, or another is mounted there");
        } else if unmount(at, UnmountFlags::empty()).is_err() {
            tracing::warn!(%path, "the file is still in use, and goes away");
            // Its users keep the connection, and so the number.
            if self.abort.is_none() {
                late = self.open_abort().inspect_err(|error| cannot_tell(at, error)).ok();
            }
            if let Err(error) = unmount(at, UnmountFlags::DETACH) {
                tracing::error!(%path, %error, "the file cannot be unmounted");
            }
        }
        let Some(mut abort) = self.abort.as_ref().or(late.as_ref()) else { return };
        // Of a connection that has ended, nothing comes of it.
        if let Err(error) = abort.write_all(b"1") {
            cannot_tell(at, &error);
        }
    }

    pub(super) fn place(&self) -> Arc<MountedFile> {
        self.file.clone()
    }

    /// What ends the connection for all who use the file, when it is written to. Its number may be
    /// another's once the file is not there any more.
    fn open_abort(&self) -> io::Result<File> {
        let Some(connection) = self.file.connection.filter(|_| self.file.is_there()) else {
            return no_connection();
        };
        let file = Path::new(CONNECTIONS).join(connection.to_string()).join("abort");
        if !file.exists() {
            mount("fusectl", CONNECTIONS, "fusectl", MountFlags::empty(), None)?;
        }
        OpenOptions::new().write(true).open(file)
    }
}

fn cannot_tell(path: &Path, error: &io::Error) {
    tracing::error!(path = %path.display(), %error, "whoever has it still cannot be told");
}

fn no_connection() -> io::Result<File> {
    Err(io::ErrorKind::NotFound.into())
}

/// True if the file was made.
fn make_place(path: &Path) -> Result<bool, MountError> {
    let of = |error| MountError::File { path: path.to_owned(), error };
    // The file beneath was made for it.
    if detach_dead(path).map_err(of)? {
        let there = look(path).map_err(of)?;
        return check_place(path, &there).map(|()| true);
    }
    match look(path) {
        Ok(there) => check_place(path, &there).map(|()| false),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let made = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
            made.map(|_: File| true).map_err(of)
        }
        Err(error) => Err(of(error)),
    }
}

/// Removes the file that was made to mount over, unless somebody has put another there since.
fn remove_place(path: &Path) -> io::Result<()> {
    // Should it still be mounted, nobody answers.
    let is_other = |_| io::Error::other("it is not an empty file any more");
    check_place(path, &look_unasked(path)?).map_err(is_other)?;
    std::fs::remove_file(path)
}

/// What a daemon that was killed has left goes: its mount, and the file beneath it.
pub(super) fn forget(path: &Path) -> Result<(), MountError> {
    let of = |error| MountError::Left { path: path.to_owned(), error };
    if detach_dead(path).map_err(of)? {
        let there = look(path).map_err(of)?;
        check_place(path, &there).map_err(|_| MountError::Stays(path.to_owned()))?;
        std::fs::remove_file(path).map_err(of)?;
    }
    Ok(())
}

/// Lets go of a mount of ours that nobody serves any more. False: there is none.
fn detach_dead(path: &Path) -> io::Result<bool> {
    match look(path) {
        Err(error) if is_dead(&error) => {}
        Ok(_) | Err(_) => return Ok(false),
    }
    // Paths of other mounts may be anything.
    let mounts = std::fs::read(MOUNTS)?;
    let mounts = String::from_utf8_lossy(&mounts);
    if !is_ours(&mounts, device_at(path)?) {
        return Ok(false);
    }
    unmount(path, UnmountFlags::DETACH)?;
    Ok(true)
}

/// Which device the file is on, by its numbers.
fn device_at(path: &Path) -> io::Result<(u32, u32)> {
    let there = look_unasked(path)?;
    Ok((there.stx_dev_major, there.stx_dev_minor))
}

/// Whether a device is one of ours, by what the kernel lists as mounted (proc(5), mountinfo):
/// `36 35 0:52 / /run/disk rw,nosuid - fuse.ashlar ashlar rw`.
fn is_ours(mounts: &str, (major, minor): (u32, u32)) -> bool {
    let device = format!("{major}:{minor}");
    mounts.lines().any(|line| {
        let kind = line.split_once(" - ").and_then(|(_, kind)| kind.split(' ').next());
        line.split(' ').nth(2) == Some(&device) && kind == Some(KIND)
    })
}

/// What is there now: what the kernel remembers of a file may be of a daemon that is dead by now.
fn look(path: &Path) -> io::Result<Statx> {
    look_as(path, AtFlags::STATX_FORCE_SYNC)
}

/// What the kernel knows. Nothing is asked of the file: nobody may answer.
fn look_unasked(path: &Path) -> io::Result<Statx> {
    look_as(path, AtFlags::STATX_DONT_SYNC)
}

fn look_as(path: &Path, sync: AtFlags) -> io::Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | sync;
    Ok(statx(CWD, path, flags, StatxFlags::TYPE | StatxFlags::SIZE)?)
}

fn is_dead(error: &io::Error) -> bool {
    // The second if it died while it was asked.
    matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ECONNABORTED))
}

/// Nothing that somebody may want to see again is mounted over.
fn check_place(path: &Path, there: &Statx) -> Result<(), MountError> {
    let kind = FileType::from_raw_mode(there.stx_mode.into());
    if kind == FileType::RegularFile && there.stx_size == 0 {
        return Ok(());
    }
    Err(MountError::Occupied(path.to_owned()))
}

/// How many CPUs the machine may have: the kernel has a queue for each.
pub(super) fn possible_cpus() -> usize {
    let list = std::fs::read_to_string(POSSIBLE_CPUS).unwrap_or_default();
    count_cpus(list.trim()).unwrap_or(1)
}

/// `0-3` or `0`: the highest, and one more.
fn count_cpus(list: &str) -> Option<usize> {
    let last = list.rsplit([',', '-']).next()?;
    last.parse::<usize>().ok().map(|last| last + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_counted_by_the_last() {
        assert_eq!(count_cpus("0"), Some(1));
        assert_eq!(count_cpus("0-1"), Some(2));
        assert_eq!(count_cpus("0-3,8-127"), Some(128));
        assert_eq!(count_cpus(""), None);
    }

    #[test]
    fn only_mounts_of_ours_are_let_go() {
        let mounts = "22 1 0:21 / /sys rw,nosuid shared:7 - sysfs sysfs rw\n\
                      36 22 0:52 / /run/a\\040disk rw,nosuid - fuse.ashlar ashlar rw,user_id=0\n\
                      37 22 0:53 / /home/x rw shared:9 - fuse.sshfs fuse.ashlar rw\n";
        for (device, ours) in
            [((0, 52), true), ((0, 53), false), ((0, 21), false), ((0, 5), false), ((52, 0), false)]
        {
            assert_eq!(is_ours(mounts, device), ours, "{device:?}");
        }
        assert!(!is_ours("36 22 0:52", (0, 52)));
    }

    #[test]
    fn nothing_of_value_is_mounted_over() {
        let scratch = tempfile::tempdir().unwrap();
        let place = scratch.path().join("disk");
        assert!(make_place(&place).unwrap());
        // Now it is there, and empty.
        assert!(!make_place(&place).unwrap());
        std::fs::write(&place, "precious").unwrap();
        assert!(matches!(make_place(&place), Err(MountError::Occupied(_))));
        assert!(matches!(make_place(scratch.path()), Err(MountError::Occupied(_))));
        let link = scratch.path().join("link");
        std::os::unix::fs::symlink("disk", &link).unwrap();
        assert!(matches!(make_place(&link), Err(MountError::Occupied(_))));
        assert!(make_place(&scratch.path().join("no/such")).is_err());
    }
}
