//! A connection to a target that nothing is ever waited for long on.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fd::OwnedFd;

/// How long an answer that has to come, or room for what is said, is waited for.
const ANSWER: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };
/// Bytes fetched at once.
const FETCH_BYTES: usize = 256 << 10;

/// What it was told and has not looked at is kept.
pub(crate) struct Stream {
    socket: std::fs::File,
    pub(crate) fetched: Vec<u8>,
}

impl Stream {
    pub(crate) fn tcp(at: SocketAddr) -> std::io::Result<Stream> {
        let socket = TcpStream::connect(at)?;
        socket.set_nodelay(true)?;
        socket.set_nonblocking(true)?;
        Ok(Stream::over(socket.into()))
    }

    pub(crate) fn unix(path: &Path) -> std::io::Result<Stream> {
        let socket = UnixStream::connect(path)?;
        socket.set_nonblocking(true)?;
        Ok(Stream::over(socket.into()))
    }

    fn over(socket: OwnedFd) -> Stream {
        Stream { socket: socket.into(), fetched: Vec::new() }
    }

    /// All of it, unless the target has hung up or does not take it while answers are fetched.
    pub(crate) fn say(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            match self.socket.write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.listen();
                    let mut look = [PollFd::new(&self.socket, PollFlags::IN | PollFlags::OUT)];
                    if rustix::event::poll(&mut look, Some(&ANSWER)) != Ok(1) {
                        return;
                    }
                }
                Err(_) => return,
            }
        }
    }

    /// Takes what has come.
    pub(crate) fn listen(&mut self) {
        let mut bytes = vec![0; FETCH_BYTES];
        if let Ok(count) = self.socket.read(&mut bytes) {
            self.fetched.extend_from_slice(&bytes[..count]);
        }
    }

    /// The next `len` bytes of an answer that has to come; `None` if it does not.
    pub(crate) fn answer(&mut self, len: usize) -> Option<Vec<u8>> {
        while self.fetched.len() < len {
            let mut look = [PollFd::new(&self.socket, PollFlags::IN)];
            if rustix::event::poll(&mut look, Some(&ANSWER)) != Ok(1) {
                return None;
            }
            let before = self.fetched.len();
            self.listen();
            if self.fetched.len() == before {
                return None;
            }
        }
        Some(self.fetched.drain(..len).collect())
    }
}
