//! Unix sockets that exports listen on.

use std::fs::Permissions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::export::{ExportError, Place};

/// Only the daemon's user, and root, may connect.
const MODE: u32 = 0o600;

/// Who may connect to a socket: whoever may write to its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Permission bits.
    pub mode: u32,
    /// `None`: this process's.
    pub user: Option<u32>,
    /// `None`: this process's.
    pub group: Option<u32>,
}

impl Default for Access {
    fn default() -> Access {
        Access { mode: MODE, user: None, group: None }
    }
}

/// The file that leads to a socket. Which one it is holds for as long as the socket is open: the
/// kernel keeps the file for that, even without a name.
#[derive(Debug)]
pub struct SocketFile {
    path: PathBuf,
    /// Device and inode.
    file: Option<(u64, u64)>,
}

impl SocketFile {
    /// Of a socket that has just been bound to `path`. (Of one that comes from another process it
    /// is taken for granted that what is there is its.)
    pub fn of(path: &Path) -> SocketFile {
        SocketFile { path: path.to_owned(), file: socket_at(path).ok().flatten() }
    }

    /// Whether it leads to the socket still. An error: nothing is there, or cannot be seen.
    fn is_there(&self) -> std::io::Result<bool> {
        socket_at(&self.path).map(|there| there.is_some() && there == self.file)
    }

    /// Removes it, while the socket is open still. What somebody has put in its place stays.
    pub fn remove(&self) {
        let removed = match self.is_there() {
            Ok(true) => std::fs::remove_file(&self.path),
            Ok(false) => Err(std::io::Error::other("something else has taken its place")),
            // Somebody was faster.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(error),
        };
        if let Err(error) = removed {
            tracing::warn!(path = %self.path.display(), %error, "the socket is not removed");
        }
    }
}

impl Place for SocketFile {
    fn lost(&self) -> Option<String> {
        let path = self.path.display();
        match self.is_there() {
            Ok(true) => None,
            Ok(false) => Some(format!("something else has taken the place of its socket {path}")),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                Some(format!("its socket {path} was removed"))
            }
            Err(error) => Some(format!("its socket {path} is not found: {error}")),
        }
    }
}

/// Which file is there, if that is a socket.
fn socket_at(path: &Path) -> std::io::Result<Option<(u64, u64)>> {
    let there = std::fs::symlink_metadata(path)?;
    Ok(there.file_type().is_socket().then(|| (there.dev(), there.ino())))
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("someone listens on it already")]
    Busy,
    #[error("it exists and is not a socket")]
    NotSocket,
    #[error("it cannot be given to others: {0}")]
    Access(std::io::Error),
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

impl From<Errno> for BindError {
    fn from(error: Errno) -> BindError {
        BindError::Io(error.into())
    }
}

/// Listens at `path`, with room for `backlog` that wait. A socket file that nobody listens on is
/// replaced. Who has no access never had it: nobody can connect before it listens.
pub(crate) fn bind(
    path: &Path,
    backlog: i32,
    access: Access,
) -> Result<(UnixListener, SocketFile), BindError> {
    let socket = bind_replacing(path)?;
    let file = SocketFile::of(path);
    let is_usual = access == Access::default();
    let given = if is_usual { Ok(()) } else { give(path, access) };
    let given = given.map_err(|error| BindError::Access(error.into()));
    let listens = given.and_then(|()| Ok(rustix::net::listen(&socket, backlog)?));
    listens.inspect_err(|_| file.remove())?;
    Ok((UnixListener::from(socket), file))
}

fn bind_replacing(path: &Path) -> Result<OwnedFd, BindError> {
    match bind_new(path) {
        Err(Errno::ADDRINUSE) => {}
        bound => return Ok(bound?),
    }
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(BindError::NotSocket);
    }
    if is_taken(path)? {
        return Err(BindError::Busy);
    }
    std::fs::remove_file(path)?;
    Ok(bind_new(path)?)
}

/// Whether somebody has the socket at `path`; else the file is what a process before left.
///
/// It is asked for with the wrong type of socket, datagrams for a stream (connect(2), EPROTOTYPE).
/// A connection of the right type would stay in the other's queue until that accepts it, however
/// soon it is closed here; and once the queue is full, `connect` waits for as long. Unlike
/// /proc/net/unix this goes by the file, whatever path and network namespace it was bound in.
pub fn is_taken(path: &Path) -> std::io::Result<bool> {
    let flags = SocketFlags::CLOEXEC;
    let probe = rustix::net::socket_with(AddressFamily::UNIX, SocketType::DGRAM, flags, None)?;
    match rustix::net::connect(&probe, &SocketAddrUnix::new(path)?) {
        Ok(()) | Err(Errno::PROTOTYPE) => Ok(true),
        Err(Errno::CONNREFUSED) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

fn bind_new(path: &Path) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets its mode from the socket, so that there is no moment with a wider one. (It gets
    // neither its user from there, nor what the process's mask forbids: see `give`.)
    rustix::fs::fchmod(&socket, Mode::from_raw_mode(MODE))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    Ok(socket)
}

/// Has the socket at `path` be as `access` says.
///
/// Its user may be able to write to the directory: what is there is looked at once, and changed
/// only if it is a socket, so that no link to another file takes its place in between.
pub fn give(path: &Path, access: Access) -> Result<(), Errno> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&file)?.st_mode) != FileType::Socket {
        return Err(Errno::NOTSOCK);
    }
    // First whose it is: the mode is meant for them, and who cannot give it away has changed
    // nothing.
    let (user, group) = (access.user.map(Uid::from_raw), access.group.map(Gid::from_raw));
    rustix::fs::chownat(&file, c"", user, group, AtFlags::EMPTY_PATH)?;
    // Linux before 6.6 can change the mode by the name only, and this one leads to that very file.
    let its_name = format!("/proc/self/fd/{}", file.as_raw_fd());
    let changed = std::fs::set_permissions(its_name, Permissions::from_mode(access.mode));
    changed.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
}

impl BindError {
    pub(crate) fn of(self, path: &Path) -> ExportError {
        let path = path.to_owned();
        match self {
            BindError::Busy => ExportError::Busy(path),
            BindError::NotSocket => ExportError::NotSocket(path),
            BindError::Access(error) => ExportError::Access { path, error },
            BindError::Io(error) => ExportError::Socket { path, error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("ashlar-{name}-{}.sock", std::process::id()))
    }

    #[test]
    fn what_took_the_place_of_a_socket_stays() {
        let path = path("remove");
        let (_listener, file) = bind(&path, 4, Access::default()).unwrap();
        assert_eq!(file.lost(), None);
        std::fs::remove_file(&path).unwrap();
        assert!(file.lost().unwrap().contains("was removed"));
        file.remove();
        std::fs::write(&path, "precious").unwrap();
        file.remove();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
        // Another's socket, too.
        let (_other, its) = bind(&path, 4, Access::default()).unwrap();
        assert!(file.lost().unwrap().contains("taken the place"));
        file.remove();
        assert_eq!(its.lost(), None);
        its.remove();
        assert!(!path.exists());
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let path = path("bind");
        let first = bind(&path, 4, Access::default()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
        assert!(matches!(bind(&path, 4, Access::default()), Err(BindError::Busy)));
        drop(first);
        let _second = bind(&path, 4, Access::default()).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    /// Of somebody who accepts nobody: nobody waits for that, nor is in its way.
    #[test]
    fn a_busy_path_is_found_so_without_a_place_in_the_queue() {
        let path = path("queue");
        let (other, _) = bind(&path, 0, Access::default()).unwrap();
        for _ in 0..4 {
            assert!(matches!(bind(&path, 4, Access::default()), Err(BindError::Busy)));
        }
        other.set_nonblocking(true).unwrap();
        assert_eq!(other.accept().unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
        drop(other);
        assert!(!is_taken(&path).unwrap());
        let other = std::os::unix::net::UnixDatagram::bind(path.with_extension("datagrams"));
        assert!(is_taken(&path.with_extension("datagrams")).unwrap());
        drop(other);
        std::fs::remove_file(path.with_extension("datagrams")).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    /// Whatever mask the process has.
    #[test]
    fn a_socket_is_whose_it_was_made_for() {
        let path = path("access");
        let is_root = rustix::process::geteuid().is_root();
        let whose = || {
            let its = std::fs::symlink_metadata(&path).unwrap();
            (its.mode() & 0o777, its.uid(), its.gid())
        };
        let own = || (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let access = Access { mode: 0o666, user: None, group: None };
        let socket = bind(&path, 4, access).unwrap();
        assert_eq!(whose(), (0o666, own().0, own().1));
        let other = Access { mode: 0o660, user: Some(12345), group: Some(12346) };
        match give(&path, other) {
            Ok(()) => assert_eq!(whose(), (0o660, 12345, 12346)),
            Err(error) => assert!(error == Errno::PERM && !is_root && whose().0 == 0o666),
        }
        drop(socket);
        match bind(&path, 4, other) {
            Ok(_) => assert_eq!(whose(), (0o660, 12345, 12346)),
            Err(_) => assert!(!is_root && !path.exists()),
        }
        let _ = std::fs::remove_file(&path);
    }

    #[test]
    fn nothing_but_a_socket_is_given_away() {
        let (file, link) = (path("precious"), path("link"));
        std::fs::write(&file, "precious").unwrap();
        std::os::unix::fs::symlink(&file, &link).unwrap();
        let before = std::fs::metadata(&file).unwrap().mode();
        let access = Access { mode: 0o666, user: None, group: None };
        assert_eq!(
            (give(&file, access), give(&link, access)),
            (Err(Errno::NOTSOCK), Err(Errno::NOTSOCK))
        );
        assert_eq!(std::fs::metadata(&file).unwrap().mode(), before);
        std::fs::remove_file(&file).unwrap();
        std::fs::remove_file(&link).unwrap();
    }

    #[test]
    fn a_file_that_is_no_socket_is_kept() {
        let path = path("file");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path, 4, Access::default()), Err(BindError::NotSocket)));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
    }
}
