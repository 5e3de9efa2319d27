//! Commands to drivers from threads that may wait, which is what setting up a device takes. What
//! reactors ask of a driver goes by `uring/commands.rs`.

use std::os::fd::{AsRawFd, BorrowedFd};

use io_uring::squeue::Entry128;
use io_uring::types::{Fd, SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, opcode};

use crate::op::{COMMAND_BYTES, Errno, Outcome};

/// How often whoever waits is asked whether to go on.
const ASK_EVERY_NS: u32 = 100_000_000;
/// Linux `include/uapi/linux/prctl.h`.
const PR_SET_IO_FLUSHER: libc::c_int = 57;

/// Gives one command to the driver behind `fd` (`IORING_OP_URING_CMD`, entries of 128 bytes, Linux
/// 5.19), and waits for what it says for as long as `patient` holds. `ETIMEDOUT`: it was given up;
/// the driver is asked to stop, and may take its time over that. After any other outcome the driver
/// is done with it, or was never given it.
///
/// # Safety
/// Memory that `bytes` names is the driver's until it has answered: after `ETIMEDOUT`, for good.
pub unsafe fn command(
    fd: BorrowedFd<'_>,
    number: u32,
    bytes: [u8; COMMAND_BYTES],
    mut patient: impl FnMut() -> bool,
) -> Outcome {
    let ring = IoUring::<Entry128, cqueue::Entry>::builder().build(1);
    let mut ring = ring.map_err(|error| errno(&error))?;
    let entry = opcode::UringCmd80::new(Fd(fd.as_raw_fd()), number).cmd(bytes).build();
    // SAFETY: the kernel holds the file from when it takes the entry, and until then it is open;
    // memory stays in place, by this function's own contract.
    let pushed = unsafe { ring.submission().push(&entry) };
    pushed.expect("a new ring has room for one");
    let pause = Timespec::new().nsec(ASK_EVERY_NS);
    loop {
        match ring.submitter().submit_with_args(1, &SubmitArgs::new().timespec(&pause)) {
            Ok(_) => {}
            Err(error) => match error.raw_os_error() {
                Some(libc::ETIME | libc::EINTR | libc::EAGAIN | libc::EBUSY) => {}
                // The driver was not given it.
                _ if !ring.submission().is_empty() => return Err(errno(&error)),
                // It was, and cannot be waited for.
                _ => return Err(Errno(libc::ETIMEDOUT)),
            },
        }
        if let Some(completed) = ring.completion().next() {
            let result = completed.result();
            return u64::try_from(result).map_err(|_| Errno(-result));
        }
        if !patient() {
            return Err(Errno(libc::ETIMEDOUT));
        }
    }
}

/// From now on the calling thread serves I/O of the kernel: memory that it needs is not made free
/// by writing to what it serves, which would wait for this thread (prctl(2), `PR_SET_IO_FLUSHER`,
/// Linux 5.6).
pub fn serve_kernel() -> std::io::Result<()> {
    let (on, none): (libc::c_ulong, libc::c_ulong) = (1, 0);
    // SAFETY: this sets a flag of the thread, which no memory depends on.
    let done = unsafe { libc::prctl(PR_SET_IO_FLUSHER, on, none, none, none) };
    if done == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

fn errno(error: &std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EIO))
}

#[cfg(test)]
mod tests {
    //! Goal: what a driver says is what is heard.
    //! Method: files whose drivers know no commands.

    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn a_driver_without_commands_says_so() {
        let file = std::fs::File::open("/dev/null").unwrap();
        // SAFETY: it names no memory.
        let outcome = unsafe { command(file.as_fd(), 1, [0; COMMAND_BYTES], || true) };
        // Linux 6.13 and later answer for /dev/null.
        assert!(
            matches!(outcome, Ok(0) | Err(Errno(libc::EOPNOTSUPP | libc::EINVAL))),
            "{outcome:?}"
        );
        let file = std::fs::File::open("/proc/self/exe").unwrap();
        // SAFETY: as above.
        let outcome = unsafe { command(file.as_fd(), 1, [0; COMMAND_BYTES], || true) };
        assert!(matches!(outcome, Err(Errno(libc::EOPNOTSUPP | libc::EINVAL))), "{outcome:?}");
    }
}
