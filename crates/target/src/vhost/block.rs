//! A descriptor chain read as a block request (virtio 1.2, 5.2.6 Device Operation).
//!
//! Nothing is assumed of how the driver cut the request into descriptors (2.7.4.1): the header is
//! the first 16 readable bytes, the status the last writable one, the data what is between.

use ashlar_format::units::SECTOR_BYTES;
use ashlar_reactor::buffer::Buffers;
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP, VIRTIO_BLK_T_DISCARD,
    VIRTIO_BLK_T_FLUSH, VIRTIO_BLK_T_GET_ID, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT,
    VIRTIO_BLK_T_WRITE_ZEROES, VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP,
};
use zerocopy::FromBytes;
use zerocopy::little_endian::{U32, U64};

use crate::request::{Operation, Permit, Request, Status};
use crate::vhost::config::{SEGMENT_BYTES_MAX, SEGMENTS_MAX, ZEROES_BYTES_MAX};
use crate::vhost::fault::Fault;
use crate::vhost::memory::{GuestMemory, Window};
use crate::vhost::vring::{Chain, Popped, Segment};

/// Most data bytes of one request. More than that is refused, and a driver that keeps to the
/// configuration space never asks for so much.
pub(crate) const REQUEST_BYTES_MAX: u64 = 32 << 20;
const _: () = assert!(SEGMENTS_MAX as u64 * SEGMENT_BYTES_MAX as u64 <= REQUEST_BYTES_MAX);

/// `struct virtio_blk_req`, without data and status.
#[repr(C)]
#[derive(FromBytes)]
struct Header {
    kind: U32,
    _reserved: U32,
    sector: U64,
}
const HEADER_BYTES: usize = 16;
const _: () = assert!(size_of::<Header>() == HEADER_BYTES);

/// `struct virtio_blk_discard_write_zeroes`.
#[repr(C)]
#[derive(FromBytes)]
struct Range {
    sector: U64,
    sector_count: U32,
    flags: U32,
}
const RANGE_BYTES: usize = 16;
const _: () = assert!(size_of::<Range>() == RANGE_BYTES);

/// A request, and where in guest memory its status goes.
#[derive(Debug)]
pub(crate) struct BlockRequest {
    pub(crate) request: Request,
    pub(crate) status: Window,
    pub(crate) popped: Popped,
}

/// Reads a popped chain. A [`Fault`] means that it cannot even be answered.
pub(crate) fn parse(memory: &GuestMemory, chain: &Chain) -> Result<BlockRequest, Fault> {
    if chain.readable_bytes() < HEADER_BYTES as u64 {
        return Err(Fault::Header(chain.readable_bytes()));
    }
    let status = find_status(memory, chain)?;
    let header = load::<HEADER_BYTES>(memory, chain.readable(), 0)?;
    let header: Header = zerocopy::transmute!(header);
    let operation = read_operation(memory, chain, &header)?;
    let request = Request { operation, permit: Permit::new(chain.id()) };
    Ok(BlockRequest { request, status, popped: chain.popped() })
}

/// Where in guest memory a request that was parsed may be written to until it is answered: all that
/// the device may write of one with data for the guest, also if it fails; the status of any other.
pub(crate) fn written<'a>(chain: &'a Chain, operation: &Operation) -> (Segment, &'a [Segment]) {
    let last = chain.writable().last().copied().unwrap_or(Segment { address: 0, len: 1 });
    // `find_status` has found this byte.
    let status = last.address.wrapping_add(u64::from(last.len)).wrapping_sub(1);
    let data = match operation {
        Operation::Read { .. } | Operation::Identify { .. } => chain.writable(),
        Operation::Write { .. }
        | Operation::Flush
        | Operation::Discard { .. }
        | Operation::WriteZeroes { .. }
        | Operation::Refuse(_) => &[],
    };
    (Segment { address: status, len: 1 }, data)
}

/// What the guest reads as the status of its request.
pub(crate) fn status_byte(status: Status) -> u8 {
    let value = match status {
        Status::Done => VIRTIO_BLK_S_OK,
        // It has no word for lack of space.
        Status::Failed | Status::NoSpace => VIRTIO_BLK_S_IOERR,
        Status::Unsupported => VIRTIO_BLK_S_UNSUPP,
    };
    u8::try_from(value).unwrap_or(u8::MAX)
}

fn find_status(memory: &GuestMemory, chain: &Chain) -> Result<Window, Fault> {
    let last = chain.writable().last().ok_or(Fault::NoStatus)?;
    let unmapped = Fault::Unmapped { address: last.address, len: u64::from(last.len) };
    // Descriptors of no bytes never get here.
    let at = last.address.checked_add(u64::from(last.len)).ok_or(unmapped)?;
    let view = memory.view(at.saturating_sub(1), 1).ok_or(unmapped)?;
    Ok(Window::new(view))
}

fn read_operation(memory: &GuestMemory, chain: &Chain, head: &Header) -> Result<Operation, Fault> {
    let out_bytes = chain.readable_bytes() - HEADER_BYTES as u64;
    let in_bytes = chain.writable_bytes() - 1;
    let place = |bytes: u64| {
        let whole = bytes > 0 && bytes.is_multiple_of(SECTOR_BYTES) && bytes <= REQUEST_BYTES_MAX;
        head.sector.get().checked_mul(SECTOR_BYTES).filter(|_| whole)
    };
    let refused = Operation::Refuse(Status::Failed);
    let operation = match head.kind.get() {
        VIRTIO_BLK_T_IN => match place(in_bytes) {
            Some(offset) => {
                Operation::Read { offset, into: gather(memory, chain.writable(), 0, in_bytes)? }
            }
            None => refused,
        },
        VIRTIO_BLK_T_OUT => match place(out_bytes) {
            Some(offset) => {
                let skip = HEADER_BYTES as u64;
                Operation::Write {
                    offset,
                    from: gather(memory, chain.readable(), skip, out_bytes)?,
                }
            }
            None => refused,
        },
        VIRTIO_BLK_T_FLUSH => Operation::Flush,
        VIRTIO_BLK_T_GET_ID if in_bytes > 0 && in_bytes <= REQUEST_BYTES_MAX => {
            Operation::Identify { into: gather(memory, chain.writable(), 0, in_bytes)? }
        }
        VIRTIO_BLK_T_GET_ID => refused,
        VIRTIO_BLK_T_DISCARD => read_range(memory, chain, out_bytes, 0, |offset, len| {
            Operation::Discard { offset, len }
        })?,
        VIRTIO_BLK_T_WRITE_ZEROES => {
            let allowed = VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP;
            read_range(memory, chain, out_bytes, allowed, |offset, len| Operation::WriteZeroes {
                offset,
                len,
            })?
        }
        _ => Operation::Refuse(Status::Unsupported),
    };
    Ok(operation)
}

/// Reads the one range of a discard or write-zeroes request (5.2.6.2: unknown flags, and unmap in
/// a discard, are unsupported).
fn read_range(
    memory: &GuestMemory,
    chain: &Chain,
    out_bytes: u64,
    flags_allowed: u32,
    operation: impl Fn(u64, u64) -> Operation,
) -> Result<Operation, Fault> {
    if out_bytes != RANGE_BYTES as u64 {
        return Ok(Operation::Refuse(Status::Failed));
    }
    let range = load::<RANGE_BYTES>(memory, chain.readable(), HEADER_BYTES as u64)?;
    let range: Range = zerocopy::transmute!(range);
    if range.flags.get() & !flags_allowed != 0 {
        return Ok(Operation::Refuse(Status::Unsupported));
    }
    let len = u64::from(range.sector_count.get()) * SECTOR_BYTES;
    let offset = range.sector.get().checked_mul(SECTOR_BYTES);
    Ok(match offset.filter(|_| len <= ZEROES_BYTES_MAX) {
        Some(offset) => operation(offset, len),
        None => Operation::Refuse(Status::Failed),
    })
}

/// Copies `N` bytes out, from byte `skip` of the segments on.
fn load<const N: usize>(
    memory: &GuestMemory,
    segments: &[Segment],
    skip: u64,
) -> Result<[u8; N], Fault> {
    let mut bytes = [0; N];
    // Nearly every driver puts the header into a descriptor of its own.
    if let Some(first) = segments.first().filter(|s| skip == 0 && u64::from(s.len) >= N as u64)
        && let Some(view) = memory.view(first.address, N as u64)
    {
        Window::new(view).load_bytes(0, &mut bytes);
        return Ok(bytes);
    }
    let mut rest = bytes.as_mut_slice();
    for piece in gather(memory, segments, skip, N as u64)?.pieces() {
        let (part, tail) = rest.split_at_mut(piece.len().min(rest.len()));
        Window::new(piece.clone()).load_bytes(0, part);
        rest = tail;
    }
    assert!(rest.is_empty(), "gather returned fewer bytes than asked for");
    Ok(bytes)
}

/// Views of `len` bytes from byte `skip` of the segments on, which hold at least so much.
/// Neighbours in the guest's address space become one piece.
fn gather(
    memory: &GuestMemory,
    segments: &[Segment],
    mut skip: u64,
    mut len: u64,
) -> Result<Buffers, Fault> {
    let mut buffers = Buffers::default();
    let (mut start, mut run) = (0u64, 0u64);
    for segment in segments {
        let segment_len = u64::from(segment.len);
        if skip >= segment_len {
            skip -= segment_len;
            continue;
        }
        if len == 0 {
            break;
        }
        let unmapped = Fault::Unmapped { address: segment.address, len: segment_len };
        let address = segment.address.checked_add(skip).ok_or(unmapped)?;
        let part = (segment_len - skip).min(len);
        (skip, len) = (0, len - part);
        if run > 0 && start.checked_add(run) == Some(address) {
            run += part;
        } else {
            add_views(memory, &mut buffers, start, run)?;
            (start, run) = (address, part);
        }
    }
    add_views(memory, &mut buffers, start, run)?;
    assert!(len == 0, "callers compare with the chain's length");
    Ok(buffers)
}

/// Adds a range of guest memory, which may cross from one region into its neighbour.
fn add_views(
    memory: &GuestMemory,
    buffers: &mut Buffers,
    mut address: u64,
    mut len: u64,
) -> Result<(), Fault> {
    while len > 0 {
        let view = memory.view_start(address, len).ok_or(Fault::Unmapped { address, len })?;
        let viewed = view.len() as u64;
        buffers.push(view);
        len -= viewed;
        // Wraps only if nothing is left: a region ends below 2^64.
        address = address.wrapping_add(viewed);
    }
    Ok(())
}

#[cfg(test)]
mod tests;
