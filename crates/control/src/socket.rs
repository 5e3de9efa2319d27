//! Listening sockets in the file system: taken only if nobody else listens there.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::Path;

use ashlar_target::unix_socket;

use crate::refusal::{Answer, Refusal};

/// Bytes of a socket's path, as the kernel has it, less the final zero.
const PATH_BYTES_MAX: usize = 107;

/// Refuses a path that cannot be a socket's, and makes its directory.
pub fn check_place(path: &Path) -> Answer<()> {
    let shown = path.display();
    if !path.is_absolute() {
        return Err(
            Refusal::invalid(format!("{shown} is not an absolute path")).fix("begin it with /")
        );
    }
    if path.as_os_str().as_bytes().len() > PATH_BYTES_MAX {
        return Err(Refusal::invalid(format!("{shown} is too long for a socket"))
            .fix(format!("use a path of at most {PATH_BYTES_MAX} bytes")));
    }
    make_directory(path)
}

/// Refuses a path in a directory that is not there: that is mistyped more often than meant. (What
/// is kept finds its directory made anew, where a start of the machine has emptied it.)
pub fn check_directory(path: &Path) -> Answer<()> {
    match path.parent() {
        Some(parent) if path.is_absolute() && !parent.is_dir() => {
            Err(Refusal::unknown(format!("there is no directory {}", parent.display()))
                .fix("make it, or name another path"))
        }
        Some(_) | None => Ok(()),
    }
}

/// Makes sure that a socket can be bound at `path`: one that nobody listens on any more is removed.
pub fn make_way(path: &Path) -> Answer<()> {
    check_place(path)?;
    let shown = path.display();
    match path.symlink_metadata() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(Refusal::failed(format!("{shown} cannot be seen: {error}"))),
        Ok(meta) if !meta.file_type().is_socket() => {
            return Err(Refusal::conflict(format!("{shown} exists and is no socket"))
                .fix("name another path, or move that file away"));
        }
        Ok(_) => {}
    }
    match unix_socket::is_taken(path) {
        Ok(false) => std::fs::remove_file(path).map_err(|error| {
            Refusal::failed(format!("the old socket {shown} cannot be removed: {error}"))
        }),
        Ok(true) | Err(_) => {
            Err(Refusal::conflict(format!("{shown} is busy: someone listens there"))
                .fix("name another path, or stop that program"))
        }
    }
}

fn make_directory(path: &Path) -> Answer<()> {
    let Some(parent) = path.parent() else { return Ok(()) };
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o755).create(parent);
    made.map_err(|error| {
        let refusal =
            Refusal::failed(format!("the directory {} cannot be made: {error}", parent.display()));
        refusal.fix("name another path for the socket, or run as root")
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn a_directory_that_is_mistyped_is_not_made() {
        let scratch = tempfile::tempdir().unwrap();
        assert!(check_directory(&scratch.path().join("e.sock")).is_ok());
        let mistyped = scratch.path().join("rnu/e.sock");
        assert!(check_directory(&mistyped).unwrap_err().error.contains("no directory"));
        assert!(!scratch.path().join("rnu").exists());
        // Told by others.
        assert!(check_directory(Path::new("e.sock")).is_ok());
    }

    #[test]
    fn only_a_dead_socket_is_removed() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("run/api.sock");
        make_way(&path).unwrap();
        let listener = UnixListener::bind(&path).unwrap();
        // However long its queue is: none of these takes a place there.
        rustix::net::listen(&listener, 0).unwrap();
        for _ in 0..4 {
            assert!(make_way(&path).unwrap_err().error.contains("busy"));
        }
        drop(listener);
        assert!(path.exists(), "a socket outlives its listener");
        make_way(&path).unwrap();
        assert!(!path.exists());
        std::fs::write(&path, "precious").unwrap();
        assert!(make_way(&path).unwrap_err().error.contains("no socket"));
        assert_eq!(std::fs::read(&path).unwrap(), b"precious");
        assert!(make_way(Path::new("api.sock")).is_err());
        assert!(make_way(&scratch.path().join("x".repeat(100))).is_err());
    }
}
