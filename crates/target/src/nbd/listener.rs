//! Where an export listens, and the thread that takes clients in and assigns each to a reactor.
//!
//! The thread blocks in `accept` until the listener is shut down, or for a moment in asking the
//! reactors how many clients they have.

use std::net::TcpListener;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rustix::net::Shutdown;

use crate::line::Lines;
use crate::nbd::post::Post;
use crate::tcp;
use crate::unix_socket::SocketFile;

/// Clients that may wait to be taken in.
pub(super) const BACKLOG: i32 = 64;
/// Wait after a failed `accept`: it fails again at once while file descriptors are short.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

pub(super) enum Listener {
    Unix(UnixListener, Arc<SocketFile>),
    Tcp(TcpListener),
}

impl Listener {
    fn accept(&self) -> std::io::Result<OwnedFd> {
        match self {
            Listener::Unix(listener, _) => Ok(listener.accept()?.0.into()),
            Listener::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                tcp::prepare(&stream)?;
                Ok(stream.into())
            }
        }
    }

    fn fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Unix(listener, _) => listener.as_fd(),
            Listener::Tcp(listener) => listener.as_fd(),
        }
    }

    /// What leads to it in the file system.
    pub(super) fn file(&self) -> Option<&Arc<SocketFile>> {
        match self {
            Listener::Unix(_, file) => Some(file),
            Listener::Tcp(_) => None,
        }
    }

    pub(super) fn remove_file(&self) {
        if let Some(file) = self.file() {
            file.remove();
        }
    }

    /// Ends the thread that serves it.
    pub(super) fn stop(&self, stopping: &AtomicBool) {
        stopping.store(true, Ordering::SeqCst);
        let _ = rustix::net::shutdown(self.fd(), Shutdown::Both);
    }

    /// The body of its thread.
    pub(super) fn serve(&self, stopping: &AtomicBool, lines: &Lines<Post>) {
        loop {
            let accepted = self.accept();
            if stopping.load(Ordering::SeqCst) {
                return;
            }
            match accepted {
                Ok(stream) => assign(stream, lines),
                Err(error) => {
                    tracing::warn!(%error, "a client could not be accepted");
                    #[expect(clippy::disallowed_methods, reason = "not a reactor's thread")]
                    std::thread::sleep(ACCEPT_AGAIN);
                }
            }
        }
    }
}

/// To the reactor that has the fewest clients; the volume's own, if that is one of them.
fn assign(stream: OwnedFd, lines: &Lines<Post>) {
    let Ok(counts) = lines.ask_all(Post::connections) else { return };
    let fewest = counts.iter().enumerate().min_by_key(|(_, count)| **count);
    let Some(line) = fewest.and_then(|(index, _)| lines.all().get(index)) else { return };
    // If its reactor has stopped meanwhile, so has the export.
    let _ = line.ask_and_wait(move |post| async move { post.welcome(stream) });
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use rustix::net::sockopt;

    use super::*;

    #[test]
    fn a_host_that_vanished_is_noticed_within_a_minute() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let _client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let stream = Listener::Tcp(listener).accept().unwrap();
        assert!(sockopt::socket_keepalive(&stream).unwrap());
        let idle = sockopt::tcp_keepidle(&stream).unwrap();
        let probes =
            sockopt::tcp_keepintvl(&stream).unwrap() * sockopt::tcp_keepcnt(&stream).unwrap();
        assert!(idle + probes <= Duration::from_secs(60), "{idle:?} and {probes:?}");
        assert_eq!(sockopt::tcp_user_timeout(&stream).unwrap(), 60_000);
    }
}
