//! What a client has sent and nobody has read yet: many small requests come with one system call,
//! and the data of a large one goes straight to where it is wanted.

use std::ops::Range;

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Errno;
use ashlar_reactor::socket::{CUT_OFF, Socket};

/// Bytes that are received at a time, at most.
const INBOX_BYTES: usize = 64 << 10;
/// What is still to come of data of this length is not copied: it is received in its place.
const DIRECT_BYTES_MIN: usize = 16 << 10;
const _: () = assert!(DIRECT_BYTES_MIN < INBOX_BYTES);

pub(super) struct Inbox {
    buffer: Buffer,
    unread: Range<usize>,
}

impl Inbox {
    pub(super) fn new(reactor: &Reactor) -> Inbox {
        Inbox { buffer: reactor.buffer(INBOX_BYTES), unread: 0..0 }
    }

    pub(super) async fn take<const N: usize>(&mut self, from: &Socket) -> Result<[u8; N], Errno> {
        const { assert!(N <= INBOX_BYTES) };
        while self.unread.len() < N {
            self.receive(from).await?;
        }
        let mut bytes = [0; N];
        self.part(N).copy_to_slice(&mut bytes);
        Ok(bytes)
    }

    pub(super) async fn fill(&mut self, from: &Socket, into: &Buffers) -> Result<(), Errno> {
        let mut at = 0;
        while at < into.len() {
            let left = into.len() - at;
            if self.unread.is_empty() && left >= DIRECT_BYTES_MIN {
                return from.receive_all(&into.slice(at..into.len())).await;
            }
            if self.unread.is_empty() {
                self.receive(from).await?;
            }
            let part = self.part(left.min(self.unread.len()));
            into.slice(at..at + part.len()).copy_from(&part.clone().into());
            at += part.len();
        }
        Ok(())
    }

    /// The next bytes, which are there; they are read with this.
    fn part(&mut self, len: usize) -> Buffer {
        let start = self.unread.start;
        self.unread.start += len;
        self.buffer.slice(start..start + len)
    }

    async fn receive(&mut self, from: &Socket) -> Result<(), Errno> {
        if self.unread.is_empty() {
            self.unread = 0..0;
        } else if self.unread.start > 0 {
            let unread = self.buffer.slice(self.unread.clone());
            self.unread = 0..unread.len();
            self.buffer.slice(self.unread.clone()).copy_from(&unread);
        }
        let room = self.buffer.slice(self.unread.end..INBOX_BYTES);
        let came = from.receive(room.into()).await?;
        if came == 0 {
            return Err(CUT_OFF);
        }
        self.unread.end += usize::try_from(came).expect("no more than there was room for");
        Ok(())
    }
}
