//! A ring for NVMe commands: `IORING_OP_URING_CMD` on a namespace's generic character device, past
//! the kernel's block layer (Linux 5.19; Joshi et al., "I/O Passthru", FAST 2024).
//!
//! Its entries are larger than those of files, so it is a ring of its own; who sleeps, sleeps in
//! the other, which waits for this one's completions too. Each namespace is tried by a real read
//! and has its ordinary way until that has come back, and for whatever does not fit. What the
//! kernel refuses later ends this way for the namespace: who asked is told to ask again.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use io_uring::squeue::{Entry128, Flags};
use io_uring::types::Fd;
use io_uring::{cqueue, opcode};

use crate::backend::Instant;
use crate::buffer::{BufferPool, Buffers};
use crate::nvme::command::{Command, Status};
use crate::nvme::generic::{Data, Generic, URING_IO, URING_IO_LIST, request};
use crate::op::{DeviceId, Errno, Op, Outcome, Ticket};
use crate::uring::device::FileDevice;
use crate::uring::entry::list;
use crate::uring::gauges::{Use, Why};
use crate::uring::probe::{Kind, WideRing, build_wide};
use crate::uring::ring::Ring;
use crate::uring::tag::Tag;
use crate::uring::trial::Trial;

/// Bytes of the read that tries a namespace: whole blocks of any size that is served.
const TRIAL_BYTES: usize = 4096;
/// What is there before the trial, word by word: a drive that was read leaves none of it.
const TRIAL_WORD: [u8; 8] = [0x9e, 0x37, 0x79, 0xb9, 0x7f, 0x4a, 0x7c, 0x15];
/// While commands are under way a look comes after this at the latest, however the kernel tells of
/// completions.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

pub(super) type Passing = Trial<Passthrough>;

pub(super) struct Passthrough {
    pub(super) ring: Ring<Entry128, cqueue::Entry32>,
    /// By device: what its trial reads into.
    trials: BTreeMap<usize, Buffers>,
    /// By ticket: bytes of the operation under way. A drive that has no error has moved them all.
    moved: Vec<u64>,
}

impl Passthrough {
    pub(super) fn build() -> std::io::Result<Passthrough> {
        build_wide().map(Passthrough::new)
    }

    fn new(io: WideRing) -> Passthrough {
        let ring = Ring::new(io, Kind::Wide, None);
        Passthrough { ring, trials: BTreeMap::new(), moved: Vec::new() }
    }

    /// Begins to find out whether a namespace takes commands.
    pub(super) fn try_out(&mut self, index: usize, device: &mut FileDevice) {
        let Some(generic) = device.generic.clone() else { return };
        device.in_passthrough_table = self.ring.set_file(index, generic.fd()) == Use::Yes;
        let into = Buffers::from(BufferPool::new().take(TRIAL_BYTES));
        into.copy_from_slice(&TRIAL_WORD.repeat(TRIAL_BYTES / TRIAL_WORD.len()));
        let id = DeviceId(u32::try_from(index).expect("few devices"));
        let read = Op::Read { device: id, offset: 0, into: into.clone() };
        let tag = Tag::Trial { device: index };
        // In one piece: there is no list to keep.
        match generic.terms().command(&read) {
            Some(command) => {
                device.gauge.passthrough.set(Use::No(Why::Trying));
                let entry = entry(device, &generic, &command, data(&read, &mut Vec::new()));
                self.ring.push(entry.user_data(tag.bits()), Instant::MAX);
                self.trials.insert(index, into);
            }
            None => device.gauge.passthrough.set(Use::No(Why::Refused(Errno(libc::EINVAL)))),
        }
    }

    /// What the answer to a trial says.
    pub(super) fn tried(&mut self, index: usize, outcome: Outcome) -> Use {
        let into = self.trials.remove(&index).expect("it was tried");
        match outcome {
            Ok(0) if is_filled(&into) => Use::Yes,
            Ok(0) => Use::No(Why::Refused(Errno(libc::ENODATA))),
            Ok(status) => Use::No(Why::Refused(status_of(status))),
            Err(errno) => Use::No(Why::Refused(errno)),
        }
    }

    pub(super) fn is_trying(&self, index: usize) -> bool {
        self.trials.contains_key(&index)
    }

    /// Takes an operation. False: the ordinary way is for it. `pieces` must stay in place until it
    /// has completed.
    pub(super) fn submit(
        &mut self,
        device: &FileDevice,
        (index, ticket): (usize, Ticket),
        op: &Op,
        pieces: &mut Vec<libc::iovec>,
        until: Instant,
    ) -> bool {
        let Some(generic) = device.passes() else { return false };
        let Some(command) = generic.terms().command(op) else { return false };
        let entry = entry(device, generic, &command, data(op, pieces));
        let tag = Tag::Device { device: index, ticket };
        self.ring.push(entry.user_data(tag.bits()), until);
        let place = ticket.0 as usize;
        if self.moved.len() <= place {
            self.moved.resize(place + 1, 0);
        }
        self.moved[place] = bytes_of(op);
        true
    }

    /// What a completion says of an operation. The kernel has its own errors, the drive a status.
    pub(super) fn outcome(&self, ticket: Ticket, outcome: Outcome) -> Outcome {
        match outcome {
            Ok(0) => Ok(self.moved[ticket.0 as usize]),
            Ok(status) => Err(status_of(status)),
            Err(errno) if is_refusal(errno) => Err(Errno(libc::EAGAIN)),
            Err(errno) => Err(errno),
        }
    }
}

impl Drop for Passthrough {
    /// The kernel may still be writing what is read for a trial.
    fn drop(&mut self) {
        std::mem::forget(std::mem::take(&mut self.trials));
    }
}

/// Of the way, not of the operation.
pub(super) fn is_refusal(errno: Errno) -> bool {
    let refusals = [libc::EINVAL, libc::EOPNOTSUPP, libc::ENOTTY, libc::EACCES, libc::EPERM];
    refusals.contains(&errno.0)
}

/// The kernel passes the status field on as it is.
fn status_of(result: u64) -> Errno {
    Status(u16::try_from(result).unwrap_or(u16::MAX)).errno()
}

fn is_filled(into: &Buffers) -> bool {
    let mut bytes = vec![0; into.len()];
    into.copy_to_slice(&mut bytes);
    bytes.chunks_exact(TRIAL_WORD.len()).all(|word| word != TRIAL_WORD)
}

fn bytes_of(op: &Op) -> u64 {
    match op {
        Op::Read { into: data, .. } | Op::Write { from: data, .. } => data.len() as u64,
        Op::Flush { .. } | Op::WriteZeroes { .. } | Op::Descriptor { .. } => 0,
    }
}

fn data(op: &Op, pieces: &mut Vec<libc::iovec>) -> Data {
    let (Op::Read { into: buffers, .. } | Op::Write { from: buffers, .. }) = op else {
        return Data::None;
    };
    match buffers.pieces() {
        [piece] => Data::Piece {
            address: piece.as_ptr().addr() as u64,
            bytes: u32::try_from(piece.len()).expect("no longer than a transfer"),
        },
        _ => {
            let (start, count) = list(buffers, pieces);
            Data::List { address: start.addr() as u64, pieces: count }
        }
    }
}

fn entry(device: &FileDevice, generic: &Arc<Generic>, command: &Command, data: Data) -> Entry128 {
    let number = match data {
        Data::None | Data::Piece { .. } => URING_IO,
        Data::List { .. } => URING_IO_LIST,
    };
    let asked = request(command, data, 0);
    let mut bytes = [0; 80];
    bytes[..asked.len()].copy_from_slice(&asked);
    match device.passthrough_place() {
        Some(place) => {
            let entry = opcode::UringCmd80::new(Fd(place), number).cmd(bytes).build();
            entry.flags(Flags::FIXED_FILE)
        }
        None => opcode::UringCmd80::new(Fd(generic.fd()), number).cmd(bytes).build(),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a drive's status and the kernel's errors are told apart, and nothing is believed that
    //! was not read.
    //! Method: answers made up.

    use super::*;

    fn passthrough() -> Option<Passthrough> {
        // Before Linux 5.19 there is none to test.
        Some(Passthrough::new(build_wide().ok()?))
    }

    #[test]
    fn answers_of_drives_and_of_the_kernel() {
        let Some(mut its) = passthrough() else { return };
        its.moved = vec![0, 4096];
        let outcome = |outcome| its.outcome(Ticket(1), outcome);
        assert_eq!(outcome(Ok(0)), Ok(4096));
        // Unrecovered read error, do not retry; write protected; an internal error.
        assert_eq!(outcome(Ok(0x4281)), Err(Errno(libc::ENODATA)));
        assert_eq!(outcome(Ok(0x20)), Err(Errno(libc::EROFS)));
        assert_eq!(outcome(Ok(0x06)), Err(Errno(libc::EIO)));
        assert_eq!(outcome(Err(Errno(libc::ENODEV))), Err(Errno(libc::ENODEV)));
        // The ordinary way is there for it.
        assert_eq!(outcome(Err(Errno(libc::EINVAL))), Err(Errno(libc::EAGAIN)));
    }

    #[test]
    fn a_trial_is_passed_by_reading_all_of_it() {
        let Some(mut its) = passthrough() else { return };
        let mut answer = |fill: &[u8], outcome| {
            let into = Buffers::from(BufferPool::new().take(TRIAL_BYTES));
            let mut bytes = TRIAL_WORD.repeat(TRIAL_BYTES / 8);
            bytes[..fill.len()].copy_from_slice(fill);
            into.copy_from_slice(&bytes);
            its.trials.insert(3, into);
            its.tried(3, outcome)
        };
        let refused = |errno| Use::No(Why::Refused(Errno(errno)));
        assert_eq!(answer(&[0; TRIAL_BYTES], Ok(0)), Use::Yes);
        assert_eq!(answer(&[], Ok(0)), refused(libc::ENODATA));
        assert_eq!(answer(&[7; TRIAL_BYTES - 8], Ok(0)), refused(libc::ENODATA));
        assert_eq!(answer(&[0; TRIAL_BYTES], Ok(0x01)), refused(libc::EOPNOTSUPP));
        let errno = Errno(libc::EACCES);
        assert_eq!(answer(&[0; TRIAL_BYTES], Err(errno)), refused(libc::EACCES));
        assert!(!its.is_trying(3));
    }
}
