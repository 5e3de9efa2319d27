//! An operation as the kernel reads it (io_uring_enter(2)).

use std::os::fd::RawFd;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{opcode, squeue};

use crate::buffer::Buffers;
use crate::op::{Act, Op};

/// How the kernel finds a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    Descriptor(RawFd),
    /// Its place in the ring's table.
    Registered(i32),
}

/// `pieces` must stay in place until it has completed. `span`: where the ring has the memory of a
/// read or write in one piece, if it has.
pub(super) fn entry(
    target: Target,
    op: &Op,
    span: Option<u16>,
    pieces: &mut Vec<libc::iovec>,
) -> squeue::Entry {
    let fd = match target {
        Target::Descriptor(fd) | Target::Registered(fd) => Fd(fd),
    };
    let entry = match op {
        Op::Read { offset, into, .. } => read(fd, *offset, into, span, pieces),
        Op::Write { offset, from, .. } => write(fd, *offset, from, span, pieces),
        Op::Flush { .. } => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        Op::WriteZeroes { offset, len, unmap, .. } => {
            opcode::Fallocate::new(fd, *len).offset(*offset).mode(zeroes_mode(*unmap)).build()
        }
        Op::Descriptor { fd, act, .. } => match act {
            Act::Await => readable(*fd),
            // A socket has no offset: the kernel takes 0 only. Neither is repeated for its rest.
            Act::Receive { into } => read(Fd(*fd), 0, into, None, pieces),
            Act::Send { from } => write(Fd(*fd), 0, from, None, pieces),
        },
    };
    match target {
        Target::Descriptor(_) => entry,
        Target::Registered(_) => entry.flags(squeue::Flags::FIXED_FILE),
    }
}

fn read(
    fd: Fd,
    offset: u64,
    into: &Buffers,
    span: Option<u16>,
    pieces: &mut Vec<libc::iovec>,
) -> squeue::Entry {
    let [piece] = into.pieces() else {
        let (list, count) = list(into, pieces);
        return opcode::Readv::new(fd, list, count).offset(offset).build();
    };
    let (start, len) = (piece.as_ptr(), len_of(piece.len()));
    match span {
        Some(span) => opcode::ReadFixed::new(fd, start, len, span).offset(offset).build(),
        None => opcode::Read::new(fd, start, len).offset(offset).build(),
    }
}

fn write(
    fd: Fd,
    offset: u64,
    from: &Buffers,
    span: Option<u16>,
    pieces: &mut Vec<libc::iovec>,
) -> squeue::Entry {
    let [piece] = from.pieces() else {
        let (list, count) = list(from, pieces);
        return opcode::Writev::new(fd, list, count).offset(offset).build();
    };
    let (start, len) = (piece.as_ptr(), len_of(piece.len()));
    match span {
        Some(span) => opcode::WriteFixed::new(fd, start, len, span).offset(offset).build(),
        None => opcode::Write::new(fd, start, len).offset(offset).build(),
    }
}

/// The pieces as the kernel reads them, and how many.
pub(super) fn list(buffers: &Buffers, pieces: &mut Vec<libc::iovec>) -> (*const libc::iovec, u32) {
    pieces.clear();
    pieces.extend(
        buffers
            .pieces()
            .iter()
            .map(|piece| libc::iovec { iov_base: piece.as_ptr().cast(), iov_len: piece.len() }),
    );
    (pieces.as_ptr(), len_of(pieces.len()))
}

fn len_of(len: usize) -> u32 {
    u32::try_from(len).expect("far less than 4 GiB")
}

/// Ends once `fd` can be read.
pub(super) fn readable(fd: RawFd) -> squeue::Entry {
    opcode::PollAdd::new(Fd(fd), u32::from(libc::POLLIN.cast_unsigned())).build()
}

/// Ends the operation that has these bits.
pub(super) fn cancel(bits: u64) -> squeue::Entry {
    opcode::AsyncCancel::new(bits).build()
}

/// Giving space back is a hole, in a file and on a block device; the latter says if it cannot.
fn zeroes_mode(unmap: bool) -> i32 {
    let how = if unmap { libc::FALLOC_FL_PUNCH_HOLE } else { libc::FALLOC_FL_ZERO_RANGE };
    how | libc::FALLOC_FL_KEEP_SIZE
}

#[cfg(test)]
mod tests {
    //! Goal: each operation takes the shortest way into the kernel that there is for it.
    //! Method: the operation codes of entries.

    use super::*;
    use crate::buffer::BufferPool;
    use crate::op::DeviceId;

    #[test]
    fn one_piece_needs_no_list() {
        let pool = BufferPool::new();
        let one = Buffers::from(pool.take(4096));
        let mut two = one.clone();
        two.push(pool.take(4096));
        let device = DeviceId(0);
        let read = |into: &Buffers| Op::Read { device, offset: 0, into: into.clone() };
        let write = |from: &Buffers| Op::Write { device, offset: 0, from: from.clone() };
        let mut pieces = Vec::new();
        let mut code = |op: &Op, span| {
            let entry = entry(Target::Descriptor(3), op, span, &mut pieces);
            (entry.get_opcode(), pieces.len())
        };
        assert_eq!(code(&read(&one), None), (opcode::Read::CODE.into(), 0));
        assert_eq!(code(&write(&one), None), (opcode::Write::CODE.into(), 0));
        assert_eq!(code(&read(&one), Some(0)), (opcode::ReadFixed::CODE.into(), 0));
        assert_eq!(code(&write(&one), Some(1)), (opcode::WriteFixed::CODE.into(), 0));
        assert_eq!(code(&read(&two), None), (opcode::Readv::CODE.into(), 2));
        assert_eq!(code(&write(&two), None), (opcode::Writev::CODE.into(), 2));
    }
}
