//! A ring for commands of drivers that have their own (FUSE, ublk): `IORING_OP_URING_CMD`, entries
//! of 128 bytes.
//!
//! Made with the first command. Who sleeps, sleeps in the ring for files, which waits for this
//! one's completions too.

use std::os::fd::RawFd;

use io_uring::squeue::Entry128;
use io_uring::types::Fd;
use io_uring::{cqueue, opcode};

use crate::backend::Instant;
use crate::op::{Command, Errno, Outcome, Ticket};
use crate::uring::entry::list;
use crate::uring::gauges::Gauges;
use crate::uring::probe::{Kind, build_wide};
use crate::uring::ring::{Ring, errno};
use crate::uring::tag::Tag;

/// Where an entry has the length of its list (io_uring_enter(2), `struct io_uring_sqe`).
const LEN_OFFSET: usize = 24;
const _: () = assert!(size_of::<Entry128>() == 128);

#[derive(Default)]
pub(super) struct Commands {
    ring: Option<Ring<Entry128, cqueue::Entry32>>,
}

impl Commands {
    /// `pieces` must stay in place until it has completed. An error: the kernel has no such rings.
    pub(super) fn submit(
        &mut self,
        ticket: Ticket,
        fd: RawFd,
        command: &Command,
        pieces: &mut Vec<libc::iovec>,
        until: Instant,
    ) -> Result<(), Errno> {
        let ring = match &mut self.ring {
            Some(ring) => ring,
            none => {
                let io = build_wide().map_err(|error| errno(&error))?;
                none.insert(Ring::new(io, Kind::Wide, None))
            }
        };
        let tag = Tag::Plain(ticket);
        ring.push(entry(fd, command, pieces).user_data(tag.bits()), until);
        Ok(())
    }

    pub(super) fn has_backlog(&self) -> bool {
        self.ring.as_ref().is_some_and(Ring::has_backlog)
    }

    /// See [`Ring::fill`].
    pub(super) fn fill(&mut self, now: impl FnOnce() -> Instant, late: &mut Vec<u64>) {
        if let Some(ring) = &mut self.ring {
            ring.fill(now, late);
        }
    }

    pub(super) fn enter(&mut self) {
        self.ring.iter_mut().for_each(Ring::enter);
    }

    pub(super) fn reap(&mut self, heard: &mut Vec<(u64, Outcome)>, gauges: &Gauges) {
        if let Some(ring) = &mut self.ring {
            ring.reap(heard);
            ring.tell(gauges, heard.len());
        }
    }

    /// See [`Ring::await_completions`].
    pub(super) fn await_completions(&mut self) -> Option<RawFd> {
        self.ring.as_mut()?.await_completions()
    }

    /// See [`Ring::woken`].
    pub(super) fn woken(&mut self) {
        self.ring.iter_mut().for_each(Ring::woken);
    }
}

/// `pieces` must stay in place until it has completed.
fn entry(fd: RawFd, command: &Command, pieces: &mut Vec<libc::iovec>) -> Entry128 {
    let (start, count) = list(&command.memory, pieces);
    let entry = opcode::UringCmd80::new(Fd(fd), command.number).cmd(command.bytes);
    let mut entry = entry.addr(Some(start.addr() as u64)).build();
    // SAFETY: an entry is a `struct io_uring_sqe` and 64 bytes more, as the assertion on its size
    // and the kernel's interface say; the library has no way to set this field of a command.
    unsafe { (&raw mut entry).byte_add(LEN_OFFSET).cast::<u32>().write(count) };
    entry
}
