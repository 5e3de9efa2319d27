//! What comes from a host, read: which PDU is next in the bytes that are there. Pure.
//!
//! Any bytes are something or a [`Fault`]; nothing is asked for that has no limit.

use std::ops::Range;

use ashlar_reactor::nvme::command::Command;
use ashlar_reactor::nvme::pdu::{
    self, COMMON_BYTES, CapsuleCmd, Common, DATA_AT_MAX, DIGEST_BYTES, Data, Digests, Fault, Kind,
    Shape, crc32c, header,
};

/// Most data that comes in the capsule of a command.
pub(crate) const CAPSULE_DATA_BYTES_MAX: usize = 16 << 10;
/// Most bytes of a PDU that are looked at together: all of a command, or the header of data.
pub(crate) const PDU_BYTES_MAX: usize = DATA_AT_MAX + CAPSULE_DATA_BYTES_MAX + DIGEST_BYTES;

/// What the bytes begin with.
#[derive(Debug, PartialEq)]
pub(crate) enum Found {
    /// A part of a PDU.
    Part,
    /// A whole command, in so many bytes.
    Command { command: Command, data: CapsuleData, bytes: usize },
    /// The header of data that begins after so many bytes; with the data's digest, if it has one.
    Data { of: DataOf, at: usize, digest: bool },
    /// The host ends the connection, for this reason.
    End { reason: u16 },
}

/// What came in a command's capsule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CapsuleData {
    None,
    /// Where it is.
    At(Range<usize>),
    /// It does not fit its digest.
    Damaged,
}

/// Which data of which command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DataOf {
    pub(crate) command: u16,
    pub(crate) tag: u16,
    pub(crate) offset: u32,
    pub(crate) len: u32,
    pub(crate) last: bool,
}

/// Reads what `bytes` begin with. A command is read when all of it is there.
pub(crate) fn look(bytes: &[u8], digests: Digests) -> Result<Found, Fault> {
    let Some(common) = header::<Common>(bytes) else { return Ok(Found::Part) };
    let shape = Shape::read(&common, digests)?;
    if bytes.len() < shape.head_bytes() {
        return Ok(Found::Part);
    }
    shape.check_head(bytes)?;
    match shape.kind {
        Kind::CapsuleCmd => look_at_command(bytes, &shape),
        Kind::H2cData => look_at_data(bytes, &shape, &common),
        Kind::H2cTermReq => {
            let term: pdu::TermReq = header(bytes).ok_or(Fault::Header(4))?;
            Ok(Found::End { reason: term.reason.get() })
        }
        Kind::IcReq => Err(Fault::Sequence),
        Kind::IcResp | Kind::C2hTermReq | Kind::CapsuleResp | Kind::C2hData | Kind::R2t => {
            Err(Fault::Header(0))
        }
    }
}

fn look_at_command(bytes: &[u8], shape: &Shape) -> Result<Found, Fault> {
    if shape.data_bytes > CAPSULE_DATA_BYTES_MAX {
        return Err(Fault::LimitExceeded);
    }
    if bytes.len() < shape.bytes() {
        return Ok(Found::Part);
    }
    let capsule: CapsuleCmd = header(bytes).ok_or(Fault::Header(4))?;
    let command = Command::from_bytes(&capsule.command);
    let range = shape.data_at..shape.data_at + shape.data_bytes;
    let data = match bytes.get(range.clone()) {
        None => return Err(Fault::Header(4)),
        Some([]) => CapsuleData::None,
        Some(data) if shape.data_digest && !is_digest(data, bytes.get(range.end..)) => {
            CapsuleData::Damaged
        }
        Some(_) => CapsuleData::At(range),
    };
    Ok(Found::Command { command, data, bytes: shape.bytes() })
}

/// Whether `after` begins with the digest of `data`.
fn is_digest(data: &[u8], after: Option<&[u8]>) -> bool {
    let expected = crc32c(data).to_le_bytes();
    after.is_some_and(|after| after.starts_with(&expected))
}

fn look_at_data(bytes: &[u8], shape: &Shape, common: &Common) -> Result<Found, Fault> {
    let data: Data = header(bytes).ok_or(Fault::Header(4))?;
    // PLEN and DATAL say the same.
    if u32::try_from(shape.data_bytes) != Ok(data.len.get()) || shape.data_bytes == 0 {
        return Err(Fault::Header(16));
    }
    if bytes.len() < shape.data_at {
        return Ok(Found::Part);
    }
    let of = DataOf {
        command: data.command.get(),
        tag: data.tag.get(),
        offset: data.offset.get(),
        len: data.len.get(),
        last: common.flags & pdu::LAST != 0,
    };
    Ok(Found::Data { of, at: shape.data_at, digest: shape.data_digest })
}

const _: () = assert!(COMMON_BYTES <= PDU_BYTES_MAX);

#[cfg(test)]
mod tests {
    //! Goal: what a host may send is read as it is meant, in pieces of any size; all else ends the
    //! connection, and never this program.
    //! Method: PDUs as hosts write them, cut everywhere; changed and random bytes, from a seed.
    #![allow(clippy::cast_possible_truncation, reason = "a test")]

    use super::*;
    use ashlar_reactor::nvme::pdu::LAST;
    use ashlar_reactor::prng::Prng;
    use zerocopy::IntoBytes;

    fn all_digests() -> [Digests; 4] {
        [0, 1, 2, 3].map(Digests::from_byte)
    }

    fn command(digests: Digests, data: &[u8], alignment: u8) -> Vec<u8> {
        let shape = Shape::new(Kind::CapsuleCmd, data.len(), alignment, digests);
        let command = Command::write(1, 8, 16).with_id(9).to_bytes();
        shape.written(&CapsuleCmd { common: shape.common(0), command }, data)
    }

    fn data(digests: Digests, of: DataOf, data: &[u8]) -> Vec<u8> {
        let shape = Shape::new(Kind::H2cData, data.len(), 0, digests);
        let header = Data {
            common: shape.common(if of.last { LAST } else { 0 }),
            command: of.command.into(),
            tag: of.tag.into(),
            offset: of.offset.into(),
            len: of.len.into(),
            reserved: [0; 4],
        };
        shape.written(&header, data)
    }

    #[test]
    fn a_command_is_read_when_all_of_it_is_there() {
        for (digests, alignment) in all_digests().into_iter().flat_map(|d| [(d, 0), (d, 31)]) {
            for len in [0, 512, CAPSULE_DATA_BYTES_MAX] {
                let payload: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
                let mut bytes = command(digests, &payload, alignment);
                for cut in [0, 7, 8, 71, bytes.len() - 1] {
                    assert_eq!(look(&bytes[..cut], digests), Ok(Found::Part), "{cut}");
                }
                let whole = bytes.len();
                bytes.extend([0xee; 100]);
                let Ok(Found::Command { command, data, bytes: read }) = look(&bytes, digests)
                else {
                    panic!("{digests:?} {len}")
                };
                assert_eq!((command.id(), command.quad(10), read), (9, 8, whole));
                match data {
                    CapsuleData::None => assert_eq!(len, 0),
                    CapsuleData::At(range) => assert_eq!(bytes[range], payload),
                    CapsuleData::Damaged => panic!("it is as it was sent"),
                }
            }
        }
    }

    #[test]
    fn damage_is_noticed_where_there_are_digests() {
        let digests = Digests { header: true, data: true };
        let mut bytes = command(digests, &[7; 512], 0);
        let last = bytes.len() - 5;
        bytes[last] ^= 1;
        let found = look(&bytes, digests);
        assert!(matches!(found, Ok(Found::Command { data: CapsuleData::Damaged, .. })));
        bytes[20] ^= 1;
        assert!(matches!(look(&bytes, digests), Err(Fault::HeaderDigest(_))));
    }

    #[test]
    fn data_is_announced_by_its_header() {
        let of = DataOf { command: 3, tag: 4, offset: 4096, len: 8192, last: true };
        for digests in all_digests() {
            let bytes = data(digests, of, &[1; 8192]);
            let at = bytes.len() - 8192 - if digests.data { 4 } else { 0 };
            assert_eq!(look(&bytes[..at - 1], digests), Ok(Found::Part));
            let found = look(&bytes[..at], digests);
            assert_eq!(found, Ok(Found::Data { of, at, digest: digests.data }));
        }
        let wrong = data(Digests::default(), DataOf { len: 8191, ..of }, &[1; 8192]);
        assert_eq!(look(&wrong, Digests::default()), Err(Fault::Header(16)));
    }

    #[test]
    fn what_hosts_do_not_send_is_refused() {
        let plain = Digests::default();
        let too_long = Shape::new(Kind::CapsuleCmd, CAPSULE_DATA_BYTES_MAX + 4, 0, plain);
        let capsule = CapsuleCmd { common: too_long.common(0), command: [0; 64] };
        let bytes = too_long.written(&capsule, &[]);
        assert_eq!(look(&bytes, plain), Err(Fault::LimitExceeded));
        for (kind, fault) in [
            (Kind::IcReq, Fault::Sequence),
            (Kind::IcResp, Fault::Header(0)),
            (Kind::CapsuleResp, Fault::Header(0)),
            (Kind::R2t, Fault::Header(0)),
        ] {
            let mut bytes = Shape::new(kind, 0, 0, plain).common(0).as_bytes().to_vec();
            bytes.resize(256, 0);
            assert_eq!(look(&bytes, plain), Err(fault), "{kind:?}");
        }
    }

    #[test]
    fn any_bytes_are_read_or_refused() {
        let seed = 44;
        let mut prng = Prng::from_seed(seed);
        let byte = |prng: &mut Prng| prng.below(256) as u8;
        for round in 0..100_000 {
            let digests = all_digests()[prng.index(4)];
            let of = DataOf { command: 1, tag: 2, offset: 0, len: 512, last: false };
            let mut bytes = match prng.below(3) {
                0 => command(digests, &[3; 512], byte(&mut prng) % 32),
                1 => data(digests, of, &[4; 512]),
                _ => (0..200).map(|_| byte(&mut prng)).collect(),
            };
            for _ in 0..prng.below(4) {
                let at = if prng.below(2) == 0 { prng.index(24) } else { prng.index(bytes.len()) };
                bytes[at] = byte(&mut prng);
            }
            bytes.truncate(prng.index(bytes.len() + 1));
            // Never more than is there, and never a panic.
            match look(&bytes, digests) {
                Ok(Found::Command { bytes: read, .. }) => {
                    assert!(read <= bytes.len(), "seed {seed}, round {round}");
                }
                Ok(Found::Data { at, .. }) => assert!(at <= bytes.len()),
                Ok(Found::Part | Found::End { .. }) | Err(_) => {}
            }
        }
    }
}
