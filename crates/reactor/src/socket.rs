//! A connected stream socket, as tasks of one reactor use it.
//!
//! The kernel is called for many at a time, with everything else that the reactor asks of it. What
//! is received lands where it is wanted: in engine memory, or in a guest's.

use std::os::fd::{AsRawFd, OwnedFd};
use std::rc::Rc;

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::fs::OFlags;

use crate::buffer::Buffers;
use crate::executor::Reactor;
use crate::op::{Act, Errno, Op, Outcome};

/// The other side has closed its end in the middle of something.
pub const CUT_OFF: Errno = Errno(libc::ECONNRESET);

/// TCP, or a Unix socket. One task may receive while another sends.
///
/// Dropping it ends the connection for the other side too, and what is under way on it. Signals
/// (SIGPIPE) must be ignored, as every Rust program does from its start.
pub struct Socket {
    reactor: Reactor,
    fd: Rc<OwnedFd>,
}

impl Socket {
    /// Takes over a connected socket. Fails if its flags cannot be changed.
    pub fn new(reactor: &Reactor, fd: impl Into<OwnedFd>) -> std::io::Result<Socket> {
        let fd = fd.into();
        // Of one that must not block the kernel would say EAGAIN in place of waiting for it.
        let flags = rustix::fs::fcntl_getfl(&fd)?;
        if flags.contains(OFlags::NONBLOCK) {
            rustix::fs::fcntl_setfl(&fd, flags - OFlags::NONBLOCK)?;
        }
        Ok(Socket { reactor: reactor.clone(), fd: Rc::new(fd) })
    }

    fn act(&self, act: Act) -> impl Future<Output = Outcome> {
        // The kernel may be told only after the socket was dropped: not of another file by then.
        let (fd, open) = (self.fd.as_raw_fd(), Some(self.fd.clone()));
        self.reactor.submit(Op::Descriptor { fd, act, open })
    }

    /// Waits for bytes and puts as many as are there into `into`, from its beginning. 0: the other
    /// side sends no more.
    pub async fn receive(&self, into: Buffers) -> Outcome {
        self.act(Act::Receive { into }).await
    }

    /// Fills `into`, or fails: with [`CUT_OFF`], if the other side ends before.
    pub async fn receive_all(&self, into: &Buffers) -> Result<(), Errno> {
        let (mut at, len) = (0, into.len());
        while at < len {
            let rest = if at == 0 { into.clone() } else { into.slice(at..len) };
            match self.receive(rest).await? {
                0 => return Err(CUT_OFF),
                more => at += usize::try_from(more).expect("no more than was asked for"),
            }
        }
        Ok(())
    }

    /// Sends all of `from`, which must not change meanwhile.
    pub async fn send(&self, from: &Buffers) -> Result<(), Errno> {
        let (mut at, len) = (0, from.len());
        while at < len {
            let rest = if at == 0 { from.clone() } else { from.slice(at..len) };
            let sent = self.act(Act::Send { from: rest }).await?;
            at += usize::try_from(sent).expect("no more than was asked for");
        }
        Ok(())
    }

    /// Whether the connection is no more, in both directions; also behind data that nobody has
    /// received.
    pub fn has_hung_up(&self) -> bool {
        // What is looked for is told whether it is asked for or not.
        let mut ends = [PollFd::new(&self.fd, PollFlags::empty())];
        let over = PollFlags::HUP | PollFlags::ERR;
        let asked = rustix::event::poll(&mut ends, Some(&Timespec::default()));
        asked.is_ok() && ends[0].revents().intersects(over)
    }

    /// Ends what is under way on it, here and on the other side: whoever receives gets 0, whoever
    /// sends an error.
    pub fn shutdown(&self) {
        // It fails where the other side was faster.
        let _ = rustix::net::shutdown(&self.fd, rustix::net::Shutdown::Both);
    }
}

impl Drop for Socket {
    /// An operation that nobody waits for any more would keep the connection open.
    fn drop(&mut self) {
        self.shutdown();
    }
}
