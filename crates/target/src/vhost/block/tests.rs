//! Goal: every layout of a request that virtio allows is read alike; what cannot be done is refused
//! or a fault.
//! Method: chains in a fake guest's memory, read back as operations.

use super::*;
use crate::vhost::vring::tests::{Guest, HOLE, NEXT, WRITE};

const HEADER: u64 = 0x1_0000;
const DATA: u64 = 0x1_2000;
const STATUS: u64 = 0x1_1000;

fn header(guest: &Guest, at: u64, kind: u32, sector: u64) {
    let mut bytes = [0; HEADER_BYTES];
    bytes[..4].copy_from_slice(&kind.to_le_bytes());
    bytes[8..].copy_from_slice(&sector.to_le_bytes());
    guest.write(at, &bytes);
}

/// Offers descriptors (address, length, whether the device writes) as one chain and reads it.
fn read(guest: &mut Guest, pieces: &[(u64, u32, bool)]) -> Result<BlockRequest, Fault> {
    for (index, (address, len, writes)) in pieces.iter().enumerate() {
        let index = u16::try_from(index).unwrap();
        let last = usize::from(index) + 1 == pieces.len();
        let flags = if last { 0 } else { NEXT } | if *writes { WRITE } else { 0 };
        guest.describe(index, *address, *len, flags, index + 1);
    }
    let chain = guest.pop(0, 0)?;
    parse(&guest.memory, &chain)
}

fn read_with(kind: u32, sector: u64, data: &[(u64, u32, bool)]) -> Result<Operation, Fault> {
    let mut guest = Guest::new(8);
    header(&guest, HEADER, kind, sector);
    let mut pieces = vec![(HEADER, 16, false)];
    pieces.extend_from_slice(data);
    pieces.push((STATUS, 1, true));
    let BlockRequest { request, status, .. } = read(&mut guest, &pieces)?;
    status.store_u8(0, 7);
    assert_eq!(guest.read(STATUS, 1), [7]);
    let _ = request.permit.complete(Status::Done, 0);
    Ok(request.operation)
}

fn refused(operation: Result<Operation, Fault>) -> Option<Status> {
    match operation {
        Ok(Operation::Refuse(status)) => Some(status),
        _ => None,
    }
}

#[test]
fn reads_and_writes_name_their_place_and_memory() {
    let Ok(Operation::Read { offset, into }) =
        read_with(VIRTIO_BLK_T_IN, 9, &[(DATA, 512, true), (DATA + 0x1000, 1024, true)])
    else {
        panic!("not a read");
    };
    assert_eq!((offset, into.len(), into.pieces().len()), (9 * 512, 1536, 2));
    assert!(into.is_aligned(512) && into.pieces().iter().all(|piece| piece.is_foreign()));
    let Ok(Operation::Write { offset, from }) =
        read_with(VIRTIO_BLK_T_OUT, 1 << 40, &[(DATA, 512, false), (DATA + 512, 512, false)])
    else {
        panic!("not a write");
    };
    assert_eq!((offset, from.len()), (1 << 49, 1024));
    assert_eq!(from.pieces().len(), 1, "neighbours are one piece");
}

#[test]
fn data_may_cross_from_one_region_into_the_next() {
    let Ok(Operation::Read { into, .. }) =
        read_with(VIRTIO_BLK_T_IN, 0, &[(0x10_0000 - 512, 1024, true)])
    else {
        panic!("not a read");
    };
    assert_eq!((into.len(), into.pieces().len()), (1024, 2));
}

#[test]
fn the_layout_of_a_request_is_free() {
    // Header and data together; the status behind the data; the header cut into pieces.
    let mut guest = Guest::new(8);
    header(&guest, HEADER, VIRTIO_BLK_T_OUT, 3);
    guest.write(HEADER + 16, &[5; 512]);
    let parsed = read(&mut guest, &[(HEADER, 16 + 512, false), (STATUS, 1, true)]).unwrap();
    let _ = parsed.request.permit.complete(Status::Done, 0);
    let Operation::Write { offset, from } = parsed.request.operation else { panic!("not a write") };
    let mut data = [0; 512];
    from.copy_to_slice(&mut data);
    assert_eq!((offset, data, from.is_aligned(512)), (3 * 512, [5; 512], false));

    let mut guest = Guest::new(8);
    header(&guest, HEADER + 1, VIRTIO_BLK_T_IN, 4);
    let parsed = read(
        &mut guest,
        &[
            (HEADER + 1, 3, false),
            (HEADER + 4, 12, false),
            (HEADER + 16, 1, false),
            (DATA, 100, true),
            (DATA + 200, 413, true),
        ],
    )
    .unwrap();
    parsed.status.store_u8(0, 0xaa);
    assert_eq!(guest.read(DATA + 200 + 412, 1), [0xaa]);
    let _ = parsed.request.permit.complete(Status::Done, 0);
    let Operation::Read { offset, into } = parsed.request.operation else { panic!("not a read") };
    assert_eq!((offset, into.len()), (4 * 512, 512));
}

#[test]
fn discard_and_zeroes_have_one_checked_range() {
    let with = |kind: u32, sector: u64, count: u32, flags: u32, bytes: u32| {
        let mut guest = Guest::new(8);
        header(&guest, HEADER, kind, 0);
        let mut range = [0; 32];
        range[..8].copy_from_slice(&sector.to_le_bytes());
        range[8..12].copy_from_slice(&count.to_le_bytes());
        range[12..16].copy_from_slice(&flags.to_le_bytes());
        guest.write(DATA, &range);
        let pieces = [(HEADER, 16, false), (DATA, bytes, false), (STATUS, 1, true)];
        let parsed = read(&mut guest, &pieces)?;
        let _ = parsed.request.permit.complete(Status::Done, 0);
        Ok(parsed.request.operation)
    };
    let discard = with(VIRTIO_BLK_T_DISCARD, 8, 16, 0, 16);
    assert!(matches!(discard, Ok(Operation::Discard { offset: 4096, len: 8192 })));
    let zeroes = with(VIRTIO_BLK_T_WRITE_ZEROES, 8, 16, 1, 16);
    assert!(matches!(zeroes, Ok(Operation::WriteZeroes { offset: 4096, len: 8192 })));
    assert_eq!(refused(with(VIRTIO_BLK_T_DISCARD, 8, 16, 1, 16)), Some(Status::Unsupported));
    assert_eq!(refused(with(VIRTIO_BLK_T_WRITE_ZEROES, 8, 1, 2, 16)), Some(Status::Unsupported));
    for (sector, count, bytes) in [(8, 16, 32), (8, 16, 15), (u64::MAX, 1, 16), (0, u32::MAX, 16)] {
        let answer = refused(with(VIRTIO_BLK_T_WRITE_ZEROES, sector, count, 0, bytes));
        assert_eq!(answer, Some(Status::Failed), "{sector} {count} {bytes}");
    }
}

#[test]
fn what_cannot_be_done_is_refused() {
    assert!(matches!(read_with(VIRTIO_BLK_T_FLUSH, 0, &[]), Ok(Operation::Flush)));
    let id = read_with(VIRTIO_BLK_T_GET_ID, 0, &[(DATA, 20, true)]);
    assert!(matches!(id, Ok(Operation::Identify { .. })));
    assert_eq!(refused(read_with(VIRTIO_BLK_T_GET_ID, 0, &[])), Some(Status::Failed));
    for kind in [2, 99, 0x8000_0000, u32::MAX] {
        assert_eq!(refused(read_with(kind, 0, &[])), Some(Status::Unsupported));
    }
    let failed = |data: &[(u64, u32, bool)], sector: u64| {
        assert_eq!(refused(read_with(VIRTIO_BLK_T_IN, sector, data)), Some(Status::Failed));
    };
    failed(&[], 0);
    failed(&[(DATA, 511, true)], 0);
    failed(&[(DATA, 512, true)], u64::MAX / 512 + 1);
    // Absurd lengths are refused by their sum, before anyone looks at the memory.
    failed(&[(DATA, 0xffff_fe00, true)], 0);
    failed(&[(DATA, 0xffff_fe00, true), (DATA, 0xffff_fe00, true)], 0);
}

#[test]
fn what_cannot_be_answered_is_a_fault() {
    let mut guest = Guest::new(8);
    let short = read(&mut guest, &[(HEADER, 15, false), (STATUS, 1, true)]);
    assert_eq!(short.unwrap_err(), Fault::Header(15));
    let mut guest = Guest::new(8);
    assert_eq!(read(&mut guest, &[(HEADER, 16, false)]).unwrap_err(), Fault::NoStatus);
    let unmapped = |pieces: &[(u64, u32, bool)]| {
        let mut guest = Guest::new(8);
        header(&guest, HEADER, VIRTIO_BLK_T_IN, 0);
        let fault = read(&mut guest, pieces).unwrap_err();
        assert!(matches!(fault, Fault::Unmapped { .. }), "{fault}");
    };
    unmapped(&[(HOLE, 16, false), (STATUS, 1, true)]);
    unmapped(&[(HOLE - 8, 16, false), (STATUS, 1, true)]);
    unmapped(&[(HEADER, 16, false), (HOLE, 1, true)]);
    unmapped(&[(HEADER, 16, false), (u64::MAX, 1, true)]);
    unmapped(&[(HEADER, 16, false), (u64::MAX, 0xffff_ffff, true)]);
    unmapped(&[(HEADER, 16, false), (HOLE - 512, 1024, true), (STATUS, 1, true)]);
    unmapped(&[(HEADER, 16, false), (u64::MAX - 100, 512, true), (STATUS, 1, true)]);
}
