//! The bytes of a connection for I/O: PDUs are cut out of what comes, and put together for what
//! goes. Pure: who has the socket asks where the kernel may put bytes, and what it may send.
//!
//! Invariants:
//! - data goes where the command wants it: what has come with its header is copied there, the rest
//!   is received there;
//! - data with a digest is received here, and copied once it is in the digest: where it goes may be
//!   a guest's memory, which changes when the guest wants it to, and no drive is blamed for that;
//! - what the kernel was told of stays in place until it has said what it did with it;
//! - nothing that comes is believed before it was checked: it is a PDU or a [`Fault`].

use std::collections::VecDeque;

use smallvec::SmallVec;
use zerocopy::{Immutable, IntoBytes};

use crate::buffer::Buffers;
use crate::nvme::command::Completion;
use crate::nvme::pdu::{
    self, CapsuleResp, Common, DIGEST_BYTES, Data, DataDigest, Digests, Fault, Kind, R2t, Shape,
    TermReq,
};

/// Bytes that are received ahead. A PDU without its data fits several times.
const INBOX_BYTES: usize = 64 << 10;
/// With less room than this at its end, what is left is moved to its beginning.
const INBOX_ROOM_MIN: usize = 4 << 10;
/// Most pieces of memory that the kernel is told of at a time; it takes 1024.
const PIECES_MAX: usize = 512;
/// Most PDUs that are sent at a time.
const BATCH_MAX: usize = 128;
const _: () = assert!(INBOX_ROOM_MIN > pdu::DATA_AT_MAX + pdu::QUOTE_BYTES_MAX);
const _: () = assert!(INBOX_BYTES > 2 * INBOX_ROOM_MIN);

/// What has come.
#[derive(Clone, Copy, Debug)]
pub(super) enum Pdu {
    Response(Completion),
    /// Data of a command begins: `Inbox::take` says where it goes.
    Data {
        command: u16,
        offset: u32,
        len: u32,
        flags: u8,
    },
    /// All of that has come, as it was sent or not.
    DataEnd {
        intact: bool,
    },
    /// Data of a command is asked for.
    Wanted {
        command: u16,
        tag: u16,
        offset: u32,
        len: u32,
    },
    /// The other side ends the connection, for this reason.
    Goodbye {
        reason: u16,
        detail: u32,
    },
}

/// Data that is coming.
struct Incoming {
    into: Buffers,
    at: usize,
    /// Of what has come; `None`: it has none.
    digest: Option<DataDigest>,
}

impl Incoming {
    /// Where the kernel may put the rest itself.
    fn rest(&self) -> Option<Buffers> {
        self.digest.is_none().then(|| self.into.slice(self.at..self.into.len()))
    }
}

enum Awaited {
    Header,
    /// So many bytes of which there is nothing to know, and then data.
    Where {
        has_digest: bool,
        len: usize,
    },
    Data(Incoming),
    Digest(DataDigest),
}

pub(super) struct Inbox {
    digests: Digests,
    bytes: Box<[u8]>,
    start: usize,
    end: usize,
    awaited: Awaited,
}

impl Inbox {
    pub(super) fn new(digests: Digests) -> Inbox {
        let bytes = vec![0; INBOX_BYTES].into_boxed_slice();
        Inbox { digests, bytes, start: 0, end: 0, awaited: Awaited::Header }
    }

    /// Where the kernel may put what comes next.
    pub(super) fn room(&mut self, pieces: &mut Vec<libc::iovec>) {
        pieces.clear();
        if let Some(rest) = self.rest() {
            // Far more pieces than data has; and it is well to receive less.
            pieces.extend(rest.pieces().iter().take(PIECES_MAX).map(|piece| libc::iovec {
                iov_base: piece.as_ptr().cast(),
                iov_len: piece.len(),
            }));
            if rest.pieces().len() > PIECES_MAX {
                return;
            }
        }
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.bytes.len() - self.end < INBOX_ROOM_MIN {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let room = &mut self.bytes[self.end..];
        assert!(!room.is_empty(), "what came was not looked at");
        pieces.push(libc::iovec { iov_base: room.as_mut_ptr().cast(), iov_len: room.len() });
    }

    /// The kernel found no memory where the rest of a command's data goes: a guest's, whose file
    /// was cut short. That is no reason to lose the drive. Where this process touches such memory,
    /// it becomes other memory (whoever mapped it sees to that, and to its guest), and the kernel
    /// finds that when it is asked again. False: nothing of that kind is awaited.
    pub(super) fn touch_data(&self) -> bool {
        let rest = self.rest();
        rest.iter().for_each(Buffers::fill_zero);
        rest.is_some()
    }

    fn rest(&self) -> Option<Buffers> {
        let Awaited::Data(incoming) = &self.awaited else { return None };
        incoming.rest()
    }

    /// The kernel has put `bytes` there.
    pub(super) fn came(&mut self, mut bytes: usize) {
        if let Awaited::Data(incoming) = &mut self.awaited
            && incoming.digest.is_none()
        {
            let its = bytes.min(incoming.into.len() - incoming.at);
            incoming.at += its;
            bytes -= its;
        }
        self.end += bytes;
        assert!(self.end <= self.bytes.len(), "more than there was room for");
    }

    /// What has come whole; `None`: more has to come before.
    pub(super) fn next(&mut self) -> Result<Option<Pdu>, Fault> {
        match &mut self.awaited {
            Awaited::Header => self.header(),
            Awaited::Where { .. } => unreachable!("somebody takes the data first"),
            Awaited::Data(incoming) => {
                let here = (self.end - self.start).min(incoming.into.len() - incoming.at);
                if here > 0 {
                    let range = incoming.at..incoming.at + here;
                    let from = &self.bytes[self.start..self.start + here];
                    incoming.into.slice(range).copy_from_slice(from);
                    incoming.digest.iter_mut().for_each(|digest| digest.update(from));
                    incoming.at += here;
                    self.start += here;
                }
                if incoming.at < incoming.into.len() {
                    return Ok(None);
                }
                if let Some(digest) = incoming.digest.take() {
                    self.awaited = Awaited::Digest(digest);
                    return self.next();
                }
                self.awaited = Awaited::Header;
                Ok(Some(Pdu::DataEnd { intact: true }))
            }
            Awaited::Digest(digest) => {
                let came = &self.bytes[self.start..self.end];
                let Some(found) = came.first_chunk::<DIGEST_BYTES>() else { return Ok(None) };
                let intact = std::mem::take(digest).finish() == u32::from_le_bytes(*found);
                self.start += DIGEST_BYTES;
                self.awaited = Awaited::Header;
                Ok(Some(Pdu::DataEnd { intact }))
            }
        }
    }

    /// Where the data goes that has begun; as long as it is.
    pub(super) fn take(&mut self, into: Buffers) {
        let Awaited::Where { has_digest, len } = self.awaited else {
            unreachable!("no data has begun");
        };
        assert!(into.len() == len, "room for {} of {len} bytes", into.len());
        let digest = has_digest.then(DataDigest::default);
        self.awaited = Awaited::Data(Incoming { into, at: 0, digest });
    }

    fn header(&mut self) -> Result<Option<Pdu>, Fault> {
        let came = &self.bytes[self.start..self.end];
        let Some(common) = pdu::header::<Common>(came) else { return Ok(None) };
        let shape = Shape::read(&common, self.digests)?;
        // At once: what hosts send may be longer than there is room for.
        if shape.kind.is_of_host() {
            return Err(Fault::Header(0));
        }
        let has_data = shape.kind == Kind::C2hData && shape.data_bytes > 0;
        // A termination request may quote something, which nobody needs.
        let len = if has_data { shape.data_at } else { shape.bytes() };
        let Some(head) = came.get(..len) else { return Ok(None) };
        shape.check_head(head)?;
        let found = decode(&shape, &common, head)?;
        self.start += len;
        if has_data {
            let (has_digest, len) = (shape.data_digest, shape.data_bytes);
            self.awaited = Awaited::Where { has_digest, len };
        }
        Ok(Some(found))
    }
}

fn decode(shape: &Shape, common: &Common, head: &[u8]) -> Result<Pdu, Fault> {
    const SHORT: Fault = Fault::Header(4);
    Ok(match shape.kind {
        Kind::CapsuleResp => {
            let its = pdu::header::<CapsuleResp>(head).ok_or(SHORT)?;
            Pdu::Response(Completion::from_bytes(&its.completion))
        }
        Kind::C2hData => {
            let its = pdu::header::<Data>(head).ok_or(SHORT)?;
            if shape.data_bytes == 0 || its.len.get() as usize != shape.data_bytes {
                return Err(Fault::Header(16));
            }
            let flags = common.flags;
            Pdu::Data {
                command: its.command.get(),
                offset: its.offset.get(),
                len: its.len.get(),
                flags,
            }
        }
        Kind::R2t => {
            let its = pdu::header::<R2t>(head).ok_or(SHORT)?;
            let (command, tag) = (its.command.get(), its.tag.get());
            Pdu::Wanted { command, tag, offset: its.offset.get(), len: its.len.get() }
        }
        Kind::C2hTermReq => {
            let its = pdu::header::<TermReq>(head).ok_or(SHORT)?;
            Pdu::Goodbye { reason: its.reason.get(), detail: its.detail.get() }
        }
        // Of the host, or of the connection's beginning.
        Kind::IcReq | Kind::IcResp | Kind::H2cTermReq | Kind::CapsuleCmd | Kind::H2cData => {
            return Err(Fault::Header(0));
        }
    })
}

/// A PDU on its way.
struct Outgoing {
    command: u16,
    head: SmallVec<[u8; 80]>,
    data: Buffers,
    digest: Option<[u8; DIGEST_BYTES]>,
}

impl Outgoing {
    fn len(&self) -> usize {
        self.head.len() + self.data.len() + self.digest.map_or(0, |its| its.len())
    }
}

pub(super) struct Outbox {
    digests: Digests,
    /// CPDA of the other side.
    alignment: u8,
    waiting: VecDeque<Outgoing>,
    /// What the kernel was told of, and how much of that it has taken.
    batch: Vec<Outgoing>,
    taken: usize,
}

impl Outbox {
    pub(super) fn new(digests: Digests, alignment: u8) -> Outbox {
        Outbox { digests, alignment, waiting: VecDeque::new(), batch: Vec::new(), taken: 0 }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty() && self.batch.is_empty()
    }

    /// Adds a PDU of command `command`. `header` makes its header from what all begin with.
    pub(super) fn push<T: IntoBytes + Immutable>(
        &mut self,
        (kind, command, flags): (Kind, u16, u8),
        data: Buffers,
        header: impl FnOnce(Common) -> T,
    ) {
        let shape = Shape::new(kind, data.len(), self.alignment, self.digests);
        let mut head = SmallVec::from_elem(0, shape.data_at);
        shape.write_head(&header(shape.common(flags)), &mut head);
        let digest = shape.data_digest.then(|| {
            let mut digest = DataDigest::default();
            digest.update_with(&data);
            digest.finish().to_le_bytes()
        });
        self.waiting.push_back(Outgoing { command, head, data, digest });
    }

    /// What the kernel may send next.
    pub(super) fn batch(&mut self, pieces: &mut Vec<libc::iovec>) {
        pieces.clear();
        while self.batch.len() < BATCH_MAX
            && let Some(outgoing) = self.waiting.pop_front()
        {
            self.batch.push(outgoing);
        }
        let mut skip = self.taken;
        let mut add = |start: *const u8, len: usize| {
            let done = skip.min(len);
            skip -= done;
            if done < len && pieces.len() < PIECES_MAX {
                let start = start.wrapping_add(done).cast_mut();
                pieces.push(libc::iovec { iov_base: start.cast(), iov_len: len - done });
            }
        };
        for its in &self.batch {
            add(its.head.as_ptr(), its.head.len());
            its.data.pieces().iter().for_each(|piece| add(piece.as_ptr(), piece.len()));
            if let Some(digest) = &its.digest {
                add(digest.as_ptr(), digest.len());
            }
        }
    }

    /// The kernel has taken so many bytes; `left` hears of each PDU that it has taken all of, by
    /// its command.
    pub(super) fn took(&mut self, bytes: usize, mut left: impl FnMut(u16)) {
        self.taken += bytes;
        let mut whole = 0;
        for its in &self.batch {
            if its.len() > self.taken {
                break;
            }
            self.taken -= its.len();
            whole += 1;
            left(its.command);
        }
        self.batch.drain(..whole);
        assert!(!self.batch.is_empty() || self.taken == 0, "more than was to be sent");
    }
}

#[cfg(test)]
mod tests {
    use zerocopy::FromZeros;

    use super::*;
    use crate::buffer::BufferPool;

    fn receive(inbox: &mut Inbox, bytes: &[u8]) -> Result<Option<Pdu>, Fault> {
        let mut pieces = Vec::new();
        inbox.room(&mut pieces);
        let room = pieces.last().expect("there is always room").iov_len;
        let part = &bytes[..room.min(bytes.len())];
        inbox.bytes[inbox.end..inbox.end + part.len()].copy_from_slice(part);
        inbox.came(part.len());
        inbox.next()
    }

    #[test]
    fn what_only_hosts_send_is_refused_by_its_first_bytes() {
        let lens = [(Kind::CapsuleCmd, 1 << 20), (Kind::H2cData, 1 << 30), (Kind::H2cData, 64)];
        for (kind, len) in lens {
            let common = Shape::new(kind, len, 0, Digests::default()).common(0);
            let mut inbox = Inbox::new(Digests::default());
            let found = receive(&mut inbox, common.as_bytes());
            assert_eq!(found.map(|_| ()), Err(Fault::Header(0)), "{kind:?} of {len} bytes");
        }
    }

    /// Any first bytes that ask for more leave room for it.
    #[test]
    fn a_header_that_is_waited_for_has_room() {
        for kind in 0..=u8::MAX {
            for len in [0, 8, 24, 28, 72, 128, 152, 153, 65_536, 1 << 20, u32::MAX] {
                for data_at in [0, 24, 28, 252] {
                    let header_bytes = Kind::from_byte(kind).map_or(8, Kind::header_bytes);
                    let header_bytes = u8::try_from(header_bytes).expect("short");
                    let bytes = len.into();
                    let common = Common { kind, flags: 0, header_bytes, data_at, bytes };
                    let mut inbox = Inbox::new(Digests::default());
                    let mut found = receive(&mut inbox, common.as_bytes());
                    while let Ok(None) = found {
                        assert!(inbox.end < INBOX_ROOM_MIN, "{common:?} is waited for");
                        found = receive(&mut inbox, &[0; 16]);
                    }
                }
            }
        }
    }

    /// A C2HData PDU with a digest, and what it says once all has come; `each`: when a part came.
    fn digested(spoilt: Option<usize>, each: impl Fn(&Buffers)) -> Option<Pdu> {
        const LEN: usize = 100 << 10;
        let digests = Digests { header: false, data: true };
        let shape = Shape::new(Kind::C2hData, LEN, 0, digests);
        let mut bytes = SmallVec::<[u8; 128]>::from_elem(0, shape.data_at);
        let len = u32::try_from(LEN).unwrap().into();
        let header = Data { common: shape.common(0), len, ..Data::new_zeroed() };
        shape.write_head(&header, &mut bytes);
        let mut wire = bytes.to_vec();
        wire.extend((0..LEN).map(|at| u8::try_from(at % 251).unwrap()));
        let mut digest = DataDigest::default();
        digest.update(&wire[shape.data_at..]);
        wire.extend(digest.finish().to_le_bytes());
        spoilt.into_iter().for_each(|at| wire[shape.data_at + at] ^= 1);

        let mut inbox = Inbox::new(digests);
        let into = Buffers::from(BufferPool::new().take(LEN));
        let mut said = None;
        for part in wire.chunks(1000) {
            said = receive(&mut inbox, part).unwrap();
            if matches!(said, Some(Pdu::Data { .. })) {
                inbox.take(into.clone());
                said = inbox.next().unwrap();
            }
            each(&into);
        }
        said
    }

    #[test]
    fn a_digest_is_of_what_came_and_not_of_what_a_guest_made_of_it() {
        let intact = |said| matches!(said, Some(Pdu::DataEnd { intact: true }));
        assert!(intact(digested(None, |_| ())));
        assert!(intact(digested(None, Buffers::fill_zero)));
        for at in [0, 999, 50_000, (100 << 10) - 1] {
            let said = digested(Some(at), |_| ());
            assert!(matches!(said, Some(Pdu::DataEnd { intact: false })), "{at}: {said:?}");
        }
    }
}
