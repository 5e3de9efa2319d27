//! Unix sockets that exports listen on.

use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::export::ExportError;

/// Only the daemon's user, and root, may connect.
const MODE: u32 = 0o600;

#[derive(Debug, thiserror::Error)]
pub(crate) enum BindError {
    #[error("someone listens on it already")]
    Busy,
    #[error("it exists and is not a socket")]
    NotSocket,
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// Listens at `path`, with room for `backlog` that wait. A socket file that nobody listens on is
/// replaced.
pub(crate) fn bind(path: &Path, backlog: i32) -> Result<UnixListener, BindError> {
    match bind_new(path, backlog) {
        Err(Errno::ADDRINUSE) => {}
        bound => return bound.map_err(|error| BindError::Io(error.into())),
    }
    if !std::fs::symlink_metadata(path)?.file_type().is_socket() {
        return Err(BindError::NotSocket);
    }
    if is_taken(path)? {
        return Err(BindError::Busy);
    }
    std::fs::remove_file(path)?;
    bind_new(path, backlog).map_err(|error| BindError::Io(error.into()))
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

fn bind_new(path: &Path, backlog: i32) -> Result<UnixListener, Errno> {
    let flags = SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // The file gets its mode from the socket, so that there is no moment with a wider one.
    rustix::fs::fchmod(&socket, rustix::fs::Mode::from_raw_mode(MODE))?;
    rustix::net::bind(&socket, &SocketAddrUnix::new(path)?)?;
    rustix::net::listen(&socket, backlog)?;
    Ok(UnixListener::from(socket))
}

impl BindError {
    pub(crate) fn of(self, path: &Path) -> ExportError {
        let path = path.to_owned();
        match self {
            BindError::Busy => ExportError::Busy(path),
            BindError::NotSocket => ExportError::NotSocket(path),
            BindError::Io(error) => ExportError::Socket { path, error },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn path(name: &str) -> std::path::PathBuf {
        std::env::temp_dir().join(format!("ashlar-{name}-{}.sock", std::process::id()))
    }

    #[test]
    fn a_stale_socket_is_replaced_and_a_live_one_is_not() {
        let path = path("bind");
        let first = bind(&path, 4).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, MODE);
        assert!(matches!(bind(&path, 4), Err(BindError::Busy)));
        drop(first);
        let _second = bind(&path, 4).unwrap();
        std::fs::remove_file(&path).unwrap();
    }

    /// Of somebody who accepts nobody: nobody waits for that, nor is in its way.
    #[test]
    fn a_busy_path_is_found_so_without_a_place_in_the_queue() {
        let path = path("queue");
        let other = bind(&path, 0).unwrap();
        for _ in 0..4 {
            assert!(matches!(bind(&path, 4), Err(BindError::Busy)));
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

    #[test]
    fn a_file_that_is_no_socket_is_kept() {
        let path = path("file");
        std::fs::write(&path, "precious").unwrap();
        assert!(matches!(bind(&path, 4), Err(BindError::NotSocket)));
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
        std::fs::remove_file(&path).unwrap();
    }
}
