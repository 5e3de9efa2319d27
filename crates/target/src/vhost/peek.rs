//! Messages that are looked at before the protocol crate takes them, because it cannot do with them
//! what must be done:
//!
//! - the channel for our own messages: the crate wraps it in a type that cannot announce a changed
//!   configuration, and keeps the file to itself; so a copy is taken;
//! - a memory table that is longer than its regions: user-mode Linux sends one, every other
//!   implementation takes it, the crate does not; so it is received here;
//! - the file that is rung when the log of written pages changes, which the crate does not know;
//! - those that ask where a ring stands, which cannot always be answered yet.

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;

use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags};
use vhost::vhost_user::message::{
    FrontendReq, MAX_ATTACHED_FD_ENTRIES, MAX_MSG_SIZE, VhostUserHeaderFlag, VhostUserMemoryRegion,
};
use zerocopy::FromBytes;
use zerocopy::native_endian::{U32, U64};

/// Flags of a message that is no reply and wants none: protocol version 1.
pub(crate) const VERSION_1: u32 = 1;

#[repr(C)]
#[derive(FromBytes)]
struct Header {
    request: U32,
    flags: U32,
    size: U32,
}
const HEADER_BYTES: usize = 12;
const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

/// `VhostUserMemory`, before its regions.
#[repr(C)]
#[derive(FromBytes)]
struct Table {
    count: U32,
    _padding: U32,
}
const TABLE_BYTES: usize = 8;
const _: () = assert!(size_of::<Table>() == TABLE_BYTES);

#[repr(C)]
#[derive(FromBytes)]
struct Region {
    guest: U64,
    len: U64,
    user: U64,
    offset: U64,
}
const REGION_BYTES: usize = 32;
const _: () = assert!(size_of::<Region>() == REGION_BYTES);

/// What comes next.
pub(crate) enum Peeked {
    End,
    /// Something for the protocol crate.
    Ordinary,
    /// So is this; it brings the channel for our own messages, of which this is a copy.
    Channel(OwnedFd),
    /// Something for [`LooseTable::receive`].
    LooseTable,
    /// Something for [`LogBell::receive`].
    LogBell,
    /// Something for the protocol crate: a ring, or all of them, are to be stopped.
    StopRing,
}

/// Looks at the next message without taking it.
pub(crate) fn peek(stream: &UnixStream) -> Result<Peeked, Errno> {
    let mut start = [0; HEADER_BYTES + TABLE_BYTES];
    let (received, mut files) = receive::<1>(stream, &mut start, RecvFlags::PEEK)?;
    if received == 0 {
        return Ok(Peeked::End);
    }
    let Some(bytes) = start.get(..received) else { return Ok(Peeked::Ordinary) };
    let Ok((header, rest)) = Header::read_from_prefix(bytes) else { return Ok(Peeked::Ordinary) };
    let request = FrontendReq::try_from(header.request.get());
    if request == Ok(FrontendReq::SET_BACKEND_REQ_FD) {
        return Ok(files.pop().map_or(Peeked::Ordinary, Peeked::Channel));
    }
    if request == Ok(FrontendReq::SET_MEM_TABLE)
        && let Ok((table, _)) = Table::read_from_prefix(rest)
        && is_loose(header.size.get(), table.count.get())
    {
        return Ok(Peeked::LooseTable);
    }
    if request == Ok(FrontendReq::SET_LOG_FD) {
        return Ok(Peeked::LogBell);
    }
    if matches!(request, Ok(FrontendReq::GET_VRING_BASE | FrontendReq::RESET_DEVICE)) {
        return Ok(Peeked::StopRing);
    }
    Ok(Peeked::Ordinary)
}

fn is_loose(size: u32, count: u32) -> bool {
    let (size, count) = (u64::from(size), u64::from(count));
    let possible = count > 0 && count <= MAX_ATTACHED_FD_ENTRIES as u64;
    let needed = TABLE_BYTES as u64 + count * REGION_BYTES as u64;
    possible && size > needed && size <= MAX_MSG_SIZE as u64
}

/// A message, all of it.
struct Message {
    body: Vec<u8>,
    files: Vec<OwnedFd>,
    wants_reply: bool,
}

impl Message {
    fn receive(stream: &UnixStream) -> Result<Message, std::io::Error> {
        let mut header = [0; HEADER_BYTES];
        // The files come with the first bytes.
        let (received, files) =
            receive::<MAX_ATTACHED_FD_ENTRIES>(stream, &mut header, RecvFlags::empty())?;
        let mut rest = stream;
        rest.read_exact(header.get_mut(received..).unwrap_or_default())?;
        let header: Header = zerocopy::transmute!(header);
        let too_long = || std::io::Error::other("a message that is too long");
        let size = usize::try_from(header.size.get()).map_err(|_| too_long())?;
        if size > MAX_MSG_SIZE {
            return Err(too_long());
        }
        let mut body = vec![0; size];
        rest.read_exact(&mut body)?;
        let wants_reply = header.flags.get() & VhostUserHeaderFlag::NEED_REPLY.bits() != 0;
        Ok(Message { body, files, wants_reply })
    }
}

/// A memory table with more bytes than regions.
pub(crate) struct LooseTable {
    pub(crate) regions: Vec<VhostUserMemoryRegion>,
    pub(crate) files: Vec<File>,
    pub(crate) wants_reply: bool,
}

impl LooseTable {
    /// Takes the message that [`peek`] saw.
    pub(crate) fn receive(stream: &UnixStream) -> Result<LooseTable, std::io::Error> {
        let broken = || std::io::Error::other("a broken memory table");
        let Message { body, files, wants_reply } = Message::receive(stream)?;
        let (table, body) = Table::read_from_prefix(&body).map_err(|_| broken())?;
        let count = usize::try_from(table.count.get()).map_err(|_| broken())?;
        let regions = body.as_chunks::<REGION_BYTES>().0.get(..count).ok_or_else(broken)?;
        if files.len() != count {
            return Err(broken());
        }
        let region = |bytes: &[u8; REGION_BYTES]| {
            let Region { guest, len, user, offset } = zerocopy::transmute!(*bytes);
            VhostUserMemoryRegion::new(guest.get(), len.get(), user.get(), offset.get())
        };
        Ok(LooseTable {
            regions: regions.iter().map(region).collect(),
            files: files.into_iter().map(File::from).collect(),
            wants_reply,
        })
    }
}

/// The file to ring when pages were marked.
pub(crate) struct LogBell {
    pub(crate) file: File,
    pub(crate) wants_reply: bool,
}

impl LogBell {
    /// Takes the message that [`peek`] saw.
    pub(crate) fn receive(stream: &UnixStream) -> Result<LogBell, std::io::Error> {
        let Message { mut files, wants_reply, .. } = Message::receive(stream)?;
        match (files.pop(), files.is_empty()) {
            (Some(file), true) => Ok(LogBell { file: file.into(), wants_reply }),
            (Some(_) | None, _) => Err(std::io::Error::other("not one file to ring for a log")),
        }
    }
}

/// Tells whether what a message asked for was done.
pub(crate) fn reply(
    mut stream: &UnixStream,
    to: FrontendReq,
    done: bool,
) -> Result<(), std::io::Error> {
    let flags = VERSION_1 | VhostUserHeaderFlag::REPLY.bits();
    let mut reply = message(to.into(), flags, 8).to_vec();
    reply.extend_from_slice(&u64::from(!done).to_ne_bytes());
    stream.write_all(&reply)
}

/// The header of a message.
pub(crate) fn message(request: u32, flags: u32, size: u32) -> [u8; HEADER_BYTES] {
    zerocopy::transmute!([request, flags, size].map(U32::new))
}

/// Receives bytes and up to `FILES` files. No bytes: the other end is closed.
fn receive<const FILES: usize>(
    stream: &UnixStream,
    into: &mut [u8],
    flags: RecvFlags,
) -> Result<(usize, Vec<OwnedFd>), Errno> {
    let mut space =
        [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_ATTACHED_FD_ENTRIES))];
    let wanted = space.get_mut(..rustix::cmsg_space!(ScmRights(FILES)));
    let mut ancillary = RecvAncillaryBuffer::new(wanted.unwrap_or_default());
    let received = rustix::io::retry_on_intr(|| {
        let mut into = [IoSliceMut::new(into)];
        rustix::net::recvmsg(stream, &mut into, &mut ancillary, flags | RecvFlags::CMSG_CLOEXEC)
    })?;
    let files = ancillary.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        RecvAncillaryMessage::ScmCredentials(_) | _ => None,
    });
    Ok((received.bytes, files.flatten().collect()))
}
