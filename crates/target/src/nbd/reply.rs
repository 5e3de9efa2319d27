//! Replies to requests, and how many of them are sent with one system call.

use std::cell::RefCell;
use std::collections::VecDeque;

use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;
use zerocopy::IntoBytes;

use crate::nbd::lane::Lane;
use crate::nbd::request::{Agreed, Asked, Command};
use crate::nbd::wire::{
    CHUNK_STATUS_BYTES, Chunk, ChunkError, Refusal, SIMPLE_REPLY_MAGIC, STRUCTURED_REPLY_MAGIC,
    SimpleReply, chunk,
};

/// Most bytes of a reply besides its data.
const HEAD_BYTES_MAX: usize = 32;

/// What precedes the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Head {
    bytes: [u8; HEAD_BYTES_MAX],
    len: usize,
}

impl Head {
    fn of(parts: &[&[u8]]) -> Head {
        let mut head = Head::default();
        for part in parts {
            let end = head.len + part.len();
            head.bytes[head.len..end].copy_from_slice(part);
            head.len = end;
        }
        head
    }

    fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

/// How a request is answered: by a structured reply where it must be one, else by the shorter.
pub(super) fn head(agreed: Agreed, asked: &Asked, outcome: Result<(), Refusal>) -> Head {
    let with_data = match asked.command {
        Command::Read { .. } | Command::BlockStatus { .. } => true,
        // What was refused may have been either.
        Command::Refuse(_) => asked.payload == 0,
        Command::Write { .. }
        | Command::Flush
        | Command::Trim { .. }
        | Command::WriteZeroes { .. }
        | Command::Cache => false,
    };
    if !agreed.structured || !with_data {
        return simple(asked.cookie, outcome);
    }
    match (outcome, asked.command) {
        (Err(refusal), _) => {
            let error = ChunkError { error: (refusal as u32).into(), text_len: 0.into() };
            structured(asked.cookie, chunk::ERROR, error.as_bytes(), 0)
        }
        (Ok(()), Command::Read { offset, len }) => {
            structured(asked.cookie, chunk::OFFSET_DATA, &offset.to_be_bytes(), len)
        }
        (Ok(()), Command::BlockStatus { .. }) => {
            structured(asked.cookie, chunk::BLOCK_STATUS, &[], CHUNK_STATUS_BYTES)
        }
        (Ok(()), _) => structured(asked.cookie, chunk::NONE, &[], 0),
    }
}

fn simple(cookie: u64, outcome: Result<(), Refusal>) -> Head {
    let error = outcome.err().map_or(0, |refusal| refusal as u32);
    let magic = SIMPLE_REPLY_MAGIC.into();
    Head::of(&[SimpleReply { magic, error: error.into(), cookie: cookie.into() }.as_bytes()])
}

/// `data_len`: of what follows the head.
fn structured(cookie: u64, kind: u16, rest: &[u8], data_len: u32) -> Head {
    let len = u32::try_from(rest.len()).unwrap_or(u32::MAX) + data_len;
    let chunk = Chunk {
        magic: STRUCTURED_REPLY_MAGIC.into(),
        flags: chunk::DONE.into(),
        kind: kind.into(),
        cookie: cookie.into(),
        len: len.into(),
    };
    Head::of(&[chunk.as_bytes(), rest])
}

pub(super) struct Reply {
    pub(super) head: Head,
    pub(super) data: Buffers,
    /// The place that it has until it is sent, and bytes of memory.
    pub(super) lane: Lane,
    pub(super) held_bytes: u64,
}

/// Replies to be sent together.
#[derive(Default)]
pub(super) struct Batch {
    pub(super) bytes: Buffers,
    /// Of each lane, replies and the memory that they hold.
    pub(super) held: [(usize, u64); Lane::COUNT],
}

/// Replies that nobody has sent yet.
#[derive(Default)]
pub(super) struct Outbox(RefCell<VecDeque<Reply>>);

impl Outbox {
    pub(super) fn push(&self, reply: Reply) {
        self.0.borrow_mut().push_back(reply);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// All that are there: no more than requests can be under way.
    pub(super) fn take(&self, reactor: &Reactor) -> Batch {
        let mut batch = Batch::default();
        let replies = self.0.borrow().len();
        let heads = reactor.buffer(replies * HEAD_BYTES_MAX);
        // Heads without data between them are one piece.
        let (mut start, mut end) = (0, 0);
        for Reply { head, data, lane, held_bytes } in self.0.borrow_mut().drain(..) {
            heads.slice(end..end + head.len).copy_from_slice(head.bytes());
            end += head.len;
            if !data.is_empty() {
                batch.bytes.push(heads.slice(start..end));
                batch.bytes.append(&data);
                start = end;
            }
            let (replies, held) = &mut batch.held[lane as usize];
            *replies += 1;
            *held += held_bytes;
        }
        batch.bytes.push(heads.slice(start..end));
        batch
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a reply has the form that was agreed, and names the request and what became of it.
    //! Method: each command, refused and done, with and without structured replies.

    use super::*;

    const OLD: Agreed = Agreed { structured: false, allocation: false };
    const NEW: Agreed = Agreed { structured: true, allocation: true };
    const COOKIE: u64 = 0x0102_0304_0506_0708;

    fn asked(command: Command) -> Asked {
        let payload = if matches!(command, Command::Write { .. }) { 512 } else { 0 };
        Asked { cookie: COOKIE, command, fua: false, payload }
    }

    fn expect(parts: &[&[u8]]) -> Vec<u8> {
        parts.concat()
    }

    #[test]
    fn who_agreed_to_nothing_gets_simple_replies() {
        let cookie = COOKIE.to_be_bytes();
        let magic = [0x67, 0x44, 0x66, 0x98];
        for command in [
            Command::Read { offset: 0, len: 512 },
            Command::Write { offset: 0, len: 512 },
            Command::Refuse(Refusal::Invalid),
            Command::Flush,
        ] {
            let done = head(OLD, &asked(command), Ok(()));
            assert_eq!(done.bytes(), expect(&[&magic, &[0; 4], &cookie]));
            let failed = head(OLD, &asked(command), Err(Refusal::NoSpace));
            assert_eq!(failed.bytes(), expect(&[&magic, &[0, 0, 0, 28], &cookie]));
        }
    }

    #[test]
    fn data_comes_in_chunks_once_agreed() {
        let cookie = COOKIE.to_be_bytes();
        let magic = [0x66, 0x8e, 0x33, 0xef];
        let read = asked(Command::Read { offset: 0x1000, len: 512 });
        let done = head(NEW, &read, Ok(()));
        let offset = 0x1000u64.to_be_bytes();
        let rest: &[u8] = &[0, 0, 0x02, 0x08];
        assert_eq!(done.bytes(), expect(&[&magic, &[0, 1, 0, 1], &cookie, rest, &offset]));
        let failed = head(NEW, &read, Err(Refusal::Io));
        let rest: &[u8] = &[0, 0, 0, 6, 0, 0, 0, 5, 0, 0];
        assert_eq!(failed.bytes(), expect(&[&magic, &[0, 1, 0x80, 1], &cookie, rest]));
        let status = head(NEW, &asked(Command::BlockStatus { offset: 0, len: 0x2000 }), Ok(()));
        assert_eq!(status.bytes(), expect(&[&magic, &[0, 1, 0, 5], &cookie, &[0, 0, 0, 12]]));
        // Refused reads too, but what has no data needs no chunk.
        let refused = head(NEW, &asked(Command::Refuse(Refusal::Invalid)), Err(Refusal::Invalid));
        assert_eq!(refused.bytes()[..4], magic);
        let write = head(NEW, &asked(Command::Write { offset: 0, len: 512 }), Ok(()));
        assert_eq!(write.bytes().len(), 16);
    }

    #[test]
    fn heads_without_data_are_sent_in_one_piece() {
        let reactor = Reactor::new(
            Box::new(ashlar_reactor::virtual_time::VirtualBackend::default()),
            ashlar_reactor::executor::Order::Fifo,
        );
        let outbox = Outbox::default();
        let small = head(OLD, &asked(Command::Flush), Ok(()));
        let mut expected = Vec::new();
        for (index, len) in [0, 0, 4096, 0, 512, 512, 0, 0].into_iter().enumerate() {
            let mut data = Buffers::default();
            if len > 0 {
                let piece = reactor.buffer(len);
                piece.copy_from_slice(&vec![u8::try_from(index).unwrap(); len]);
                data.push(piece);
            }
            expected.extend(small.bytes());
            expected.extend(vec![u8::try_from(index).unwrap(); len]);
            let lane = if index < 3 { Lane::Reads } else { Lane::Writes };
            outbox.push(Reply { head: small, data, lane, held_bytes: len as u64 });
        }
        let batch = outbox.take(&reactor);
        assert_eq!((batch.held, outbox.is_empty()), ([(3, 4096), (5, 1024)], true));
        assert_eq!(batch.bytes.pieces().len(), 7);
        let mut bytes = vec![0; batch.bytes.len()];
        batch.bytes.copy_to_slice(&mut bytes);
        assert_eq!(bytes, expected);
    }
}
