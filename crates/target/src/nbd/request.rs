//! A request's header, read: what the client wants, or why it cannot have it.

use std::ops::Range;

use ashlar_format::units::SECTOR_BYTES;

use crate::nbd::wire::{REQUEST_MAGIC, Refusal, RequestHeader, command, flag};

/// Most bytes that one request reads or writes: what clients may rely on that were told nothing.
pub(super) const REQUEST_BYTES_MAX: u32 = 32 << 20;

/// The client broke the protocol: what follows cannot be understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum Breach {
    #[error("a request begins with {0:#010x}")]
    Magic(u32),
    #[error("a write of {0} bytes; {REQUEST_BYTES_MAX} are possible")]
    TooLong(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Command {
    Read {
        offset: u64,
        len: u32,
    },
    Write {
        offset: u64,
        len: u32,
    },
    Flush,
    Trim {
        offset: u64,
        len: u32,
    },
    WriteZeroes {
        offset: u64,
        len: u32,
        /// Only if that is faster than to write them.
        fast: bool,
    },
    /// Nothing to do: there is no cache to fill.
    Cache,
    BlockStatus {
        offset: u64,
        len: u32,
    },
    Refuse(Refusal),
}

/// What client and server know of each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Agreed {
    pub(super) structured: bool,
    /// The client asked for the context `base:allocation`.
    pub(super) allocation: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Asked {
    pub(super) cookie: u64,
    pub(super) command: Command,
    /// To be durable before it is answered.
    pub(super) fua: bool,
    /// Bytes that follow the header, and are to be read whatever becomes of the request.
    pub(super) payload: u32,
}

/// `None`: the client says goodbye. `volume_bytes`: at this moment.
pub(super) fn read_request(
    header: &RequestHeader,
    agreed: Agreed,
    volume_bytes: u64,
) -> Result<Option<Asked>, Breach> {
    if header.magic != REQUEST_MAGIC {
        return Err(Breach::Magic(header.magic.get()));
    }
    let (kind, len) = (header.command.get(), header.len.get());
    if kind == command::DISCONNECT {
        return Ok(None);
    }
    let payload = if kind == command::WRITE { len } else { 0 };
    if payload > REQUEST_BYTES_MAX {
        return Err(Breach::TooLong(payload));
    }
    let command = check(header, agreed, volume_bytes).unwrap_or_else(Command::Refuse);
    let fua = header.flags.get() & flag::FUA != 0;
    Ok(Some(Asked { cookie: header.cookie.get(), command, fua, payload }))
}

fn check(header: &RequestHeader, agreed: Agreed, volume_bytes: u64) -> Result<Command, Refusal> {
    let (offset, len) = (header.offset.get(), header.len.get());
    let kind = header.command.get();
    let fragment = if agreed.structured { flag::DONT_FRAGMENT } else { 0 };
    // The protocol allows FUA with everything, "even by ignoring the bit".
    let (allowed, range) = match kind {
        command::READ => (fragment, Bounds::Read),
        command::WRITE => (0, Bounds::Write),
        command::FLUSH => (0, Bounds::None),
        command::TRIM | command::CACHE => (0, Bounds::Any),
        command::WRITE_ZEROES => (flag::NO_HOLE | flag::FAST_ZERO, Bounds::Zeroes),
        command::BLOCK_STATUS if agreed.allocation => (flag::ONE_EXTENT, Bounds::Any),
        _ => return Err(Refusal::Invalid),
    };
    if header.flags.get() & !(allowed | flag::FUA) != 0 {
        return Err(Refusal::Invalid);
    }
    range.check(offset, len, volume_bytes)?;
    Ok(match kind {
        command::READ => Command::Read { offset, len },
        command::WRITE => Command::Write { offset, len },
        command::FLUSH => Command::Flush,
        command::TRIM => Command::Trim { offset, len },
        command::CACHE => Command::Cache,
        // A thick volume has its space whatever is zeroed: there are no holes to forbid.
        command::WRITE_ZEROES => {
            Command::WriteZeroes { offset, len, fast: header.flags.get() & flag::FAST_ZERO != 0 }
        }
        _ => Command::BlockStatus { offset, len },
    })
}

/// What is asked of offset and length.
#[derive(Clone, Copy)]
enum Bounds {
    /// They mean nothing.
    None,
    Read,
    Write,
    Zeroes,
    Any,
}

impl Bounds {
    fn check(self, offset: u64, len: u32, volume_bytes: u64) -> Result<(), Refusal> {
        let beyond = match self {
            Bounds::None => return Ok(()),
            Bounds::Write | Bounds::Zeroes => Refusal::NoSpace,
            Bounds::Read | Bounds::Any => Refusal::Invalid,
        };
        let most = match self {
            Bounds::Read | Bounds::Write => REQUEST_BYTES_MAX,
            Bounds::None | Bounds::Zeroes | Bounds::Any => u32::MAX,
        };
        let Range { start, end } = offset..offset.checked_add(len.into()).ok_or(beyond)?;
        let whole = start.is_multiple_of(SECTOR_BYTES) && end.is_multiple_of(SECTOR_BYTES);
        if len == 0 || len > most || !whole {
            return Err(Refusal::Invalid);
        }
        if end > volume_bytes { Err(beyond) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no header is believed further than the volume and the agreement reach.
    //! Method: headers at and beyond each border.

    use super::*;

    const VOLUME: u64 = 1 << 20;
    const ALL: Agreed = Agreed { structured: true, allocation: true };

    fn header(command: u16, flags: u16, offset: u64, len: u32) -> RequestHeader {
        RequestHeader {
            magic: REQUEST_MAGIC.into(),
            flags: flags.into(),
            command: command.into(),
            cookie: 7.into(),
            offset: offset.into(),
            len: len.into(),
        }
    }

    fn asked(command: u16, flags: u16, offset: u64, len: u32) -> Command {
        read_request(&header(command, flags, offset, len), ALL, VOLUME).unwrap().unwrap().command
    }

    #[test]
    fn ranges_end_where_the_volume_does() {
        use command::{BLOCK_STATUS, CACHE, READ, TRIM, WRITE, WRITE_ZEROES};
        let last = VOLUME - 512;
        assert_eq!(asked(READ, 0, last, 512), Command::Read { offset: last, len: 512 });
        assert_eq!(asked(WRITE, 0, last, 512), Command::Write { offset: last, len: 512 });
        for (kind, why) in [
            (READ, Refusal::Invalid),
            (WRITE, Refusal::NoSpace),
            (TRIM, Refusal::Invalid),
            (WRITE_ZEROES, Refusal::NoSpace),
            (CACHE, Refusal::Invalid),
            (BLOCK_STATUS, Refusal::Invalid),
        ] {
            for offset in [VOLUME, last + 512, u64::MAX - 1023, u64::MAX - 511] {
                assert_eq!(asked(kind, 0, offset, 512), Command::Refuse(why), "{kind} {offset}");
            }
            for (offset, len) in [(0, 0), (1, 512), (0, 511), (256, 256)] {
                let refused = Command::Refuse(Refusal::Invalid);
                assert_eq!(asked(kind, 0, offset, len), refused, "{kind} {offset} {len}");
            }
        }
    }

    #[test]
    fn flags_and_commands_that_were_not_agreed_are_refused() {
        let refused = Command::Refuse(Refusal::Invalid);
        let bare = |kind, flags| {
            let header = header(kind, flags, 0, 512);
            read_request(&header, Agreed::default(), VOLUME).unwrap().unwrap().command
        };
        assert_eq!(bare(command::READ, flag::DONT_FRAGMENT), refused);
        assert_eq!(bare(command::BLOCK_STATUS, 0), refused);
        assert_eq!(asked(command::READ, flag::DONT_FRAGMENT, 0, 512), bare(command::READ, 0));
        assert_eq!(asked(command::READ, flag::FAST_ZERO, 0, 512), refused);
        assert_eq!(asked(command::WRITE, flag::NO_HOLE, 0, 512), refused);
        for (flags, fast) in [(0, false), (flag::FAST_ZERO, true)] {
            let zeroes = Command::WriteZeroes { offset: 0, len: 512, fast };
            let flags = flags | flag::FUA | flag::NO_HOLE;
            assert_eq!(asked(command::WRITE_ZEROES, flags, 0, 512), zeroes);
        }
        for kind in 8..=u16::MAX {
            assert_eq!(asked(kind, 0, 0, 512), refused);
        }
    }

    #[test]
    fn the_payload_is_known_before_anything_is_believed() {
        let refused = header(command::WRITE, 0xfff0, 1, 4000);
        let asked = read_request(&refused, ALL, VOLUME).unwrap().unwrap();
        assert_eq!((asked.payload, asked.command), (4000, Command::Refuse(Refusal::Invalid)));
        let long = header(command::WRITE, 0, 0, REQUEST_BYTES_MAX + 1);
        let breach = Breach::TooLong(REQUEST_BYTES_MAX + 1);
        assert_eq!(read_request(&long, ALL, VOLUME), Err(breach));
        let long = header(command::READ, 0, 0, REQUEST_BYTES_MAX + 512);
        let asked = read_request(&long, ALL, u64::MAX).unwrap().unwrap();
        assert_eq!((asked.payload, asked.command), (0, Command::Refuse(Refusal::Invalid)));
        let mut wrong = header(command::READ, 0, 0, 512);
        wrong.magic = 1.into();
        assert_eq!(read_request(&wrong, ALL, VOLUME), Err(Breach::Magic(1)));
        let goodbye = header(command::DISCONNECT, 0, 0, 0);
        assert_eq!(read_request(&goodbye, ALL, VOLUME), Ok(None));
    }
}
