//! Goal: what one side writes, the other side reads; any other bytes are a fault, and no panic.
//! Method: bytes written out by hand from the specification's figures; every shape that can be
//! sent, read back; mutated and random headers.

use super::*;
use crate::buffer::BufferPool;
use crate::prng::Prng;

const KINDS: [Kind; 9] = [
    Kind::IcReq,
    Kind::IcResp,
    Kind::H2cTermReq,
    Kind::C2hTermReq,
    Kind::CapsuleCmd,
    Kind::CapsuleResp,
    Kind::H2cData,
    Kind::C2hData,
    Kind::R2t,
];

fn digests() -> impl Iterator<Item = Digests> {
    (0..4).map(Digests::from_byte)
}

#[test]
fn what_is_sent_is_read() {
    for digests in digests() {
        for kind in KINDS {
            let lens: &[usize] = if kind.may_have_data() { &[0, 1, 512, 8192] } else { &[0] };
            for (len, alignment) in lens.iter().flat_map(|len| (0..32).map(move |a| (*len, a))) {
                let sent = Shape::new(kind, len, alignment, digests);
                let read = Shape::read(&sent.common(LAST), digests);
                assert_eq!(read, Ok(sent));
                assert!(len == 0 || sent.data_at.is_multiple_of(4 * (usize::from(alignment) + 1)));
            }
        }
    }
}

#[test]
fn a_header_has_its_fields_where_they_belong() {
    let digests = Digests { header: true, data: true };
    let shape = Shape::new(Kind::C2hData, 4096, 0, digests);
    let header = Data {
        common: shape.common(LAST | SUCCESS),
        command: U16::new(0x1234),
        tag: U16::new(0),
        offset: U32::new(0x0001_0000),
        len: U32::new(4096),
        reserved: [0; 4],
    };
    let mut head = [0xff; 28];
    shape.write_head(&header, &mut head);
    // 24 of header, 4 of digest, 4096 of data, 4 of digest: 0x1020.
    let expected = [7, 0b1111, 24, 28, 0x20, 0x10, 0, 0, 0x34, 0x12, 0, 0, 0, 0, 1, 0, 0, 0x10];
    assert_eq!(head[..18], expected);
    assert_eq!(shape.check_head(&head), Ok(()));
    head[9] ^= 1;
    assert!(matches!(shape.check_head(&head), Err(Fault::HeaderDigest(_))));
    assert_eq!(shape.check_head(&head[..20]), Err(Fault::Header(4)));

    let first = Shape::new(Kind::IcReq, 0, 0, digests);
    let common = first.common(0);
    assert_eq!(common.as_bytes(), [0, 0, 128, 0, 128, 0, 0, 0], "set-up has no digests");
    let term: TermReq = header_of(&[0, 0, 0, 0, 0, 0, 0, 0, 3, 0, 0x78, 0x56, 0x34, 0x12]);
    assert_eq!((term.reason.get(), term.detail.get()), (3, 0x1234_5678));
}

fn header_of<T: FromBytes + Unaligned>(start: &[u8]) -> T {
    let mut bytes = [0; HEADER_BYTES_MAX];
    bytes[..start.len()].copy_from_slice(start);
    header(&bytes).expect("long enough")
}

#[test]
fn wrong_headers_are_faults() {
    let plain = Digests::default();
    let good = Shape::new(Kind::H2cData, 4096, 0, plain).common(0);
    let read = |change: fn(&mut Common)| {
        let mut common = good;
        change(&mut common);
        Shape::read(&common, plain)
    };
    assert!(read(|_| ()).is_ok());
    assert_eq!(read(|common| common.kind = 8), Err(Fault::Header(0)));
    assert_eq!(read(|common| common.flags = HEADER_DIGEST), Err(Fault::Header(1)));
    assert_eq!(read(|common| common.flags = DATA_DIGEST), Err(Fault::Header(1)));
    assert_eq!(read(|common| common.header_bytes = 28), Err(Fault::Header(2)));
    assert_eq!(read(|common| common.data_at = 20), Err(Fault::Header(3)));
    assert_eq!(read(|common| common.data_at = 26), Err(Fault::Header(3)));
    assert_eq!(read(|common| common.bytes = U32::new(23)), Err(Fault::Header(4)));
    let beyond = |common: &mut Common| (common.data_at, common.bytes) = (252, U32::new(252));
    assert_eq!(read(beyond), Err(Fault::Header(4)));
    let mut resp = Shape::new(Kind::CapsuleResp, 0, 0, plain).common(0);
    resp.bytes = U32::new(28);
    assert_eq!(Shape::read(&resp, plain), Err(Fault::Header(4)));
    let mut term = Shape::new(Kind::C2hTermReq, 0, 0, plain).common(0);
    term.bytes = U32::new(24 + 128);
    assert_eq!(Shape::read(&term, plain).map(|shape| shape.data_bytes), Ok(128));
    term.bytes = U32::new(24 + 129);
    assert_eq!(Shape::read(&term, plain), Err(Fault::Header(4)));
}

#[test]
fn any_bytes_are_a_shape_or_a_fault() {
    let mut prng = Prng::from_seed(20);
    for _ in 0..200_000 {
        let mut bytes = [0; COMMON_BYTES];
        bytes.fill_with(|| u8::try_from(prng.below(256)).expect("a byte"));
        // Half of them are nearly right.
        if prng.below(2) == 0 {
            let kind = KINDS[usize::try_from(prng.below(9)).expect("an index")];
            (bytes[0], bytes[2]) = (kind as u8, u8::try_from(kind.header_bytes()).expect("short"));
            (bytes[1], bytes[6], bytes[7]) = (bytes[1] & 3, 0, 0);
        }
        let common: Common = header(&bytes).expect("as long as that");
        for digests in digests() {
            let Ok(shape) = Shape::read(&common, digests) else { continue };
            assert_eq!(shape.bytes(), usize::try_from(common.bytes.get()).expect("64 bits"));
            assert!(shape.head_bytes() <= shape.data_at && shape.data_at <= DATA_AT_MAX);
        }
    }
}

#[test]
fn digests_are_those_of_the_standard() {
    // RFC 3720, B.4.
    assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    assert_eq!(crc32c(&[0xff; 32]), 0x62a8_ab43);
    let pool = BufferPool::new();
    let mut data = Buffers::default();
    for byte in [0_u8, 255] {
        let piece = pool.take(10_000);
        piece.copy_from_slice(&[byte; 10_000]);
        data.push(piece);
    }
    let mut all = vec![0; 20_000];
    data.copy_to_slice(&mut all);
    for filling in [false, true] {
        let mut digest = DataDigest::default();
        if filling {
            data.fill_started();
        }
        digest.update_with(&data);
        assert_eq!(digest.finish(), crc32c(&all));
    }
}
