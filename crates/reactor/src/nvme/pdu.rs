//! What goes over a connection of NVMe/TCP: the headers of its PDUs, where in a PDU what lies, and
//! their digests. Pure: no I/O, and any bytes decode to something or to a [`Fault`].
//!
//! Sections and figures are of the NVM Express TCP Transport Specification 1.0. Everything is
//! little-endian.
//!
//! ```text
//! ┌──────────────────────┬────────────────┬─────────┬──────┬─────────────┐
//! │ header (HLEN)        │ header digest  │ padding │ data │ data digest │   PLEN bytes in all
//! └──────────────────────┴────────────────┴─────────┴──────┴─────────────┘
//!   8 common, then its own  4, if agreed     to PDO          4, if agreed
//! ```

use std::mem::size_of;

use zerocopy::byteorder::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::buffer::Buffers;
use crate::nvme::command::{COMMAND_BYTES, COMPLETION_BYTES};

/// Bytes of a header or data digest: a CRC32C (section 3.3.1.1).
pub const DIGEST_BYTES: usize = 4;
/// Bytes that every PDU begins with.
pub const COMMON_BYTES: usize = size_of::<Common>();
/// Bytes of the longest header, which is that of the first PDU of either side.
pub const HEADER_BYTES_MAX: usize = size_of::<IcReq>();
/// What a termination request may quote of the header that it is about (section 3.6.2.3).
pub const QUOTE_BYTES_MAX: usize = 128;
/// Where data of a PDU may begin at most: alignments go up to 128 bytes (section 3.6.2.2).
pub const DATA_AT_MAX: usize = 252;
/// The version of PDUs that this file is of (PFV).
pub const VERSION: u16 = 0;
/// The least of MAXH2CDATA (section 3.6.2.3).
pub const H2C_DATA_BYTES_MIN: u32 = 4096;

/// Flags of the common header.
pub const HEADER_DIGEST: u8 = 1 << 0;
pub const DATA_DIGEST: u8 = 1 << 1;
/// Of data: the last PDU of this transfer.
pub const LAST: u8 = 1 << 2;
/// Of data to the host: it stands for the response, too, which was a success.
pub const SUCCESS: u8 = 1 << 3;

/// What a PDU is (section 3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Initialize connection, host to controller.
    IcReq = 0x00,
    /// Its answer.
    IcResp = 0x01,
    /// The host ends the connection, and says why.
    H2cTermReq = 0x02,
    /// The controller does.
    C2hTermReq = 0x03,
    CapsuleCmd = 0x04,
    CapsuleResp = 0x05,
    H2cData = 0x06,
    C2hData = 0x07,
    /// Ready to transfer: the controller asks for data of a command.
    R2t = 0x09,
}

impl Kind {
    pub fn from_byte(byte: u8) -> Option<Kind> {
        Some(match byte {
            0x00 => Kind::IcReq,
            0x01 => Kind::IcResp,
            0x02 => Kind::H2cTermReq,
            0x03 => Kind::C2hTermReq,
            0x04 => Kind::CapsuleCmd,
            0x05 => Kind::CapsuleResp,
            0x06 => Kind::H2cData,
            0x07 => Kind::C2hData,
            0x09 => Kind::R2t,
            _ => return None,
        })
    }

    /// HLEN.
    pub fn header_bytes(self) -> usize {
        match self {
            Kind::IcReq | Kind::IcResp => size_of::<IcReq>(),
            Kind::H2cTermReq | Kind::C2hTermReq => size_of::<TermReq>(),
            Kind::CapsuleCmd => size_of::<CapsuleCmd>(),
            Kind::CapsuleResp => size_of::<CapsuleResp>(),
            Kind::H2cData | Kind::C2hData => size_of::<Data>(),
            Kind::R2t => size_of::<R2t>(),
        }
    }

    /// Whether hosts send it.
    pub fn is_of_host(self) -> bool {
        matches!(self, Kind::IcReq | Kind::H2cTermReq | Kind::CapsuleCmd | Kind::H2cData)
    }

    /// What sets connections up and ends them has no digests.
    fn has_digests(self) -> bool {
        !matches!(self, Kind::IcReq | Kind::IcResp | Kind::H2cTermReq | Kind::C2hTermReq)
    }

    fn may_have_data(self) -> bool {
        matches!(self, Kind::CapsuleCmd | Kind::H2cData | Kind::C2hData)
    }
}

/// What every PDU begins with (figure 12).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Common {
    pub kind: u8,
    pub flags: u8,
    /// HLEN: bytes of the header.
    pub header_bytes: u8,
    /// PDO: where data begins; 0 without data.
    pub data_at: u8,
    /// PLEN: bytes of all of it.
    pub bytes: U32,
}

/// The host's first PDU (figure 15).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IcReq {
    pub common: Common,
    /// PFV.
    pub version: U16,
    /// HPDA: data to the host begins at a multiple of this many double words; from 0 for one.
    pub alignment: u8,
    /// DGST: 1 for header digests, 2 for data digests.
    pub digests: u8,
    /// MAXR2T: R2Ts of one command that the host takes at a time; from 0 for one.
    pub r2t_max: U32,
    pub reserved: [u8; 112],
}

/// The controller's first PDU (figure 16).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct IcResp {
    pub common: Common,
    pub version: U16,
    /// CPDA, of data to the controller.
    pub alignment: u8,
    pub digests: u8,
    /// MAXH2CDATA: most data of one PDU to the controller.
    pub h2c_data_bytes_max: U32,
    pub reserved: [u8; 112],
}

/// Why one side ends the connection (figures 18 and 20); a part of the header at fault may follow.
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TermReq {
    pub common: Common,
    /// FES.
    pub reason: U16,
    /// FEI.
    pub detail: U32,
    pub reserved: [u8; 10],
}

/// A command, with its data perhaps (figure 21).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CapsuleCmd {
    pub common: Common,
    pub command: [u8; COMMAND_BYTES],
}

/// Its completion (figure 22).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CapsuleResp {
    pub common: Common,
    pub completion: [u8; COMPLETION_BYTES],
}

/// Data of a command, either way (figures 23 and 24).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Data {
    pub common: Common,
    /// CCCID: the command's identifier.
    pub command: U16,
    /// TTAG: which R2T this is for; to the host it is reserved.
    pub tag: U16,
    /// DATAO: where in the command's data, in bytes.
    pub offset: U32,
    /// DATAL.
    pub len: U32,
    pub reserved: [u8; 4],
}

/// The controller asks for data of a command (figure 25).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct R2t {
    pub common: Common,
    pub command: U16,
    pub tag: U16,
    /// R2TO.
    pub offset: U32,
    /// R2TL.
    pub len: U32,
    pub reserved: [u8; 4],
}

impl TermReq {
    /// `shape`: as [`Shape::quoting`] has it.
    pub fn new(shape: &Shape, fault: Fault) -> TermReq {
        TermReq {
            common: shape.common(0),
            reason: fault.reason().into(),
            detail: fault.detail().into(),
            reserved: [0; 10],
        }
    }
}

impl Data {
    /// Of all data of a command for the host.
    pub fn whole(shape: &Shape, flags: u8, command: u16) -> Data {
        Data {
            common: shape.common(flags),
            command: command.into(),
            tag: 0.into(),
            offset: 0.into(),
            len: u32::try_from(shape.data_bytes).unwrap_or(u32::MAX).into(),
            reserved: [0; 4],
        }
    }
}

impl R2t {
    /// For all data of a command from the host.
    pub fn whole(shape: &Shape, command: u16, tag: u16, bytes: u32) -> R2t {
        R2t {
            common: shape.common(0),
            command: command.into(),
            tag: tag.into(),
            offset: 0.into(),
            len: bytes.into(),
            reserved: [0; 4],
        }
    }
}

const _: () = assert!(COMMON_BYTES == 8);
const _: () = assert!(size_of::<IcReq>() == 128 && size_of::<IcResp>() == 128);
const _: () = assert!(size_of::<TermReq>() == 24);
const _: () = assert!(size_of::<CapsuleCmd>() == 72 && size_of::<CapsuleResp>() == 24);
const _: () = assert!(size_of::<Data>() == 24 && size_of::<R2t>() == 24);

/// Why a connection has to end: FES of a termination request, and its detail, FEI (figure 18).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("byte {0} of a PDU's header is invalid")]
    Header(u32),
    #[error("a PDU out of sequence")]
    Sequence,
    /// With the digest that was received.
    #[error("a header digest is wrong")]
    HeaderDigest(u32),
    #[error("data out of the range that was asked for")]
    OutOfRange,
    #[error("more data, or more R2Ts, than allowed")]
    LimitExceeded,
    #[error("byte {0} of a PDU's header asks for what is not supported")]
    Unsupported(u32),
}

impl Fault {
    pub fn reason(self) -> u16 {
        match self {
            Fault::Header(_) => 1,
            Fault::Sequence => 2,
            Fault::HeaderDigest(_) => 3,
            Fault::OutOfRange => 4,
            Fault::LimitExceeded => 5,
            Fault::Unsupported(_) => 6,
        }
    }

    pub fn detail(self) -> u32 {
        match self {
            Fault::Header(at) | Fault::Unsupported(at) => at,
            Fault::HeaderDigest(found) => found,
            Fault::Sequence | Fault::OutOfRange | Fault::LimitExceeded => 0,
        }
    }
}

/// Which digests both sides have agreed on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Digests {
    pub header: bool,
    pub data: bool,
}

impl Digests {
    /// DGST of the first PDUs. Bits beyond those known are left out.
    pub fn from_byte(byte: u8) -> Digests {
        Digests { header: byte & 1 != 0, data: byte & 2 != 0 }
    }

    pub fn to_byte(self) -> u8 {
        u8::from(self.header) | u8::from(self.data) << 1
    }

    #[must_use]
    pub fn and(self, other: Digests) -> Digests {
        Digests { header: self.header && other.header, data: self.data && other.data }
    }
}

/// Where in a PDU what lies, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    pub kind: Kind,
    /// Of the header without its digest.
    pub header_bytes: usize,
    /// The header's digest follows it.
    pub header_digest: bool,
    /// Where data begins, or the end without data.
    pub data_at: usize,
    pub data_bytes: usize,
    /// The data's digest follows it.
    pub data_digest: bool,
}

impl Shape {
    /// Of a PDU that is to be sent; `alignment` as in [`IcReq`] of the other side. `data_bytes` of
    /// a kind that has data.
    pub fn new(kind: Kind, data_bytes: usize, alignment: u8, digests: Digests) -> Shape {
        assert!(data_bytes == 0 || kind.may_have_data(), "{kind:?} with data");
        let header_bytes = kind.header_bytes();
        let header_digest = digests.header && kind.has_digests();
        let head = header_bytes + if header_digest { DIGEST_BYTES } else { 0 };
        let unit = (usize::from(alignment) + 1) * 4;
        let data_at = if data_bytes == 0 { head } else { head.next_multiple_of(unit) };
        assert!(data_at <= DATA_AT_MAX, "data at {data_at} with alignment {alignment}");
        let data_digest = digests.data && data_bytes > 0;
        Shape { kind, header_bytes, header_digest, data_at, data_bytes, data_digest }
    }

    /// Of a termination request that quotes so much of the header that it is about.
    pub fn quoting(kind: Kind, quote_bytes: usize) -> Shape {
        assert!(matches!(kind, Kind::H2cTermReq | Kind::C2hTermReq), "{kind:?} quotes nothing");
        assert!(quote_bytes <= QUOTE_BYTES_MAX, "a quote of {quote_bytes} bytes");
        Shape { data_bytes: quote_bytes, ..Shape::new(kind, 0, 0, Digests::default()) }
    }

    /// Of one that comes, from the first bytes of it. That it is `kind` that may come now is for
    /// the caller to judge, and what lengths it has room for.
    pub fn read(common: &Common, digests: Digests) -> Result<Shape, Fault> {
        let kind = Kind::from_byte(common.kind).ok_or(Fault::Header(0))?;
        let header_bytes = kind.header_bytes();
        if usize::from(common.header_bytes) != header_bytes {
            return Err(Fault::Header(2));
        }
        let header_digest = digests.header && kind.has_digests();
        let agreed = if kind.has_digests() { digests } else { Digests::default() };
        // A digest is there where both sides agreed on it, so flags must say so, too. The data's
        // goes with data alone.
        if (common.flags & HEADER_DIGEST != 0) != agreed.header
            || (common.flags & DATA_DIGEST != 0 && !agreed.data)
        {
            return Err(Fault::Header(1));
        }
        let head = header_bytes + if header_digest { DIGEST_BYTES } else { 0 };
        let bytes = usize::try_from(common.bytes.get()).map_err(|_| Fault::Header(4))?;
        let quoting = matches!(kind, Kind::H2cTermReq | Kind::C2hTermReq);
        if bytes < head || (quoting && bytes > head + QUOTE_BYTES_MAX) {
            return Err(Fault::Header(4));
        }
        if quoting || bytes == head {
            let data_bytes = bytes - head;
            let shape = Shape {
                kind,
                header_bytes,
                header_digest,
                data_at: head,
                data_bytes,
                data_digest: false,
            };
            return Ok(shape);
        }
        if !kind.may_have_data() {
            return Err(Fault::Header(4));
        }
        let data_at = usize::from(common.data_at);
        if data_at < head || !data_at.is_multiple_of(4) {
            return Err(Fault::Header(3));
        }
        let data_digest = agreed.data;
        if data_digest != (common.flags & DATA_DIGEST != 0) {
            return Err(Fault::Header(1));
        }
        let trailer = if data_digest { DIGEST_BYTES } else { 0 };
        let data_bytes = bytes.checked_sub(data_at + trailer).ok_or(Fault::Header(4))?;
        if data_bytes == 0 {
            return Err(Fault::Header(4));
        }
        Ok(Shape { kind, header_bytes, header_digest, data_at, data_bytes, data_digest })
    }

    /// PLEN.
    pub fn bytes(&self) -> usize {
        self.data_at + self.data_bytes + if self.data_digest { DIGEST_BYTES } else { 0 }
    }

    /// Up to where a PDU has to be here before its header can be judged.
    pub fn head_bytes(&self) -> usize {
        self.header_bytes + if self.header_digest { DIGEST_BYTES } else { 0 }
    }

    /// What the PDU begins with; `flags` beside those of digests.
    pub fn common(&self, flags: u8) -> Common {
        let digests = if self.header_digest { HEADER_DIGEST } else { 0 }
            | if self.data_digest { DATA_DIGEST } else { 0 };
        let small = |bytes: usize| u8::try_from(bytes).expect("headers are short");
        Common {
            kind: self.kind as u8,
            flags: flags | digests,
            header_bytes: small(self.header_bytes),
            // What a termination request quotes is no data.
            data_at: match self.kind.may_have_data() && self.data_bytes > 0 {
                true => small(self.data_at),
                false => 0,
            },
            bytes: U32::new(u32::try_from(self.bytes()).expect("less than 4 GiB of data")),
        }
    }

    /// Writes `header` with its digest and its padding to `into`, which is as long as where the
    /// data begins.
    pub fn write_head<T: IntoBytes + Immutable>(&self, header: &T, into: &mut [u8]) {
        let header = header.as_bytes();
        assert!(header.len() == self.header_bytes, "the header of another kind");
        assert!(into.len() == self.data_at, "room for {} of {}", into.len(), self.data_at);
        let (head, rest) = into.split_at_mut(header.len());
        head.copy_from_slice(header);
        rest.fill(0);
        if self.header_digest {
            let at = rest.get_mut(..DIGEST_BYTES).expect("before where data begins");
            at.copy_from_slice(&crc32c(header).to_le_bytes());
        }
    }

    /// All of a PDU, with its digests.
    pub fn written(&self, header: &(impl IntoBytes + Immutable), data: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; self.data_at];
        self.write_head(header, &mut bytes);
        bytes.extend_from_slice(data);
        if self.data_digest {
            bytes.extend_from_slice(&crc32c(data).to_le_bytes());
        }
        bytes
    }

    /// Judges the digest of a header that has come; `head` begins with it.
    pub fn check_head(&self, head: &[u8]) -> Result<(), Fault> {
        if !self.header_digest {
            return Ok(());
        }
        let header = head.get(..self.header_bytes).ok_or(Fault::Header(4))?;
        let found = head.get(self.header_bytes..self.head_bytes()).ok_or(Fault::Header(4))?;
        let found = u32::from_le_bytes(found.try_into().map_err(|_| Fault::Header(4))?);
        if found == crc32c(header) { Ok(()) } else { Err(Fault::HeaderDigest(found)) }
    }
}

/// A header of kind `T` from bytes that begin with it; `None`: they are too few.
pub fn header<T: FromBytes + Unaligned>(bytes: &[u8]) -> Option<T> {
    T::read_from_prefix(bytes).ok().map(|(header, _)| header)
}

/// The digest of a header (section 3.3.1.1).
pub fn crc32c(bytes: &[u8]) -> u32 {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(crc).expect("a CRC of 32 bits")
}

/// The digest of data that comes in parts.
pub struct DataDigest(crc_fast::Digest);

impl Default for DataDigest {
    fn default() -> DataDigest {
        DataDigest(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }
}

impl DataDigest {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    /// Of memory that may be somebody else's, too: what is digested is what was there at a moment.
    pub fn update_with(&mut self, data: &Buffers) {
        let mut copy = [0; 4096];
        for piece in data.pieces() {
            if piece.is_stable() {
                self.update(piece.bytes());
                continue;
            }
            for start in (0..piece.len()).step_by(copy.len()) {
                let len = copy.len().min(piece.len() - start);
                piece.slice(start..start + len).copy_to_slice(&mut copy[..len]);
                self.update(&copy[..len]);
            }
        }
    }

    pub fn finish(self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a CRC of 32 bits")
    }
}

#[cfg(test)]
mod tests;
