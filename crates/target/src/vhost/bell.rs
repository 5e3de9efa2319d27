//! An eventfd by which one side wakes the other, rung without ever waiting for who has it too.
//!
//! Whoever adds to a counter that is full is blocked, unless the file's flags say otherwise; and
//! flags are not ours alone, but those of the front end as well, who may change them at any time.
//! So it is not written to by write(2), but rung by the kernel itself, which never waits for room:
//! it is told when a ring of io_uring has something new, and that ring is given something that is
//! done at once.
//!
//! A pipe could not be rung like this: each write to it waits for whoever reads it or writes to it
//! at the moment, and that may be a front end's call that never ends.
//!
//! Invariant: a file of any other kind is refused before the kernel asks whoever may be behind it.

use std::cell::RefCell;
use std::fs::File;
use std::io::IoSliceMut;
use std::os::fd::{AsRawFd, RawFd};

use io_uring::{IoUring, opcode};
use rustix::io::ReadWriteFlags;

/// No more than one thing is done at a time.
const ENTRIES: u32 = 1;
/// The file's own position: it has no other.
const NO_OFFSET: u64 = u64::MAX;

pub(crate) struct Bell {
    file: File,
    /// Whose news are told to it. `None`: it has not been rung yet.
    news: RefCell<Option<IoUring>>,
}

/// Fails for what is no eventfd.
fn ring_for(file: &File) -> std::io::Result<IoUring> {
    let ring = IoUring::new(ENTRIES)?;
    ring.submitter().register_eventfd(file.as_raw_fd()).map_err(|error| {
        match error.raw_os_error() {
            Some(libc::EINVAL) => std::io::Error::other("a file to ring by must be an eventfd"),
            Some(_) | None => error,
        }
    })?;
    Ok(ring)
}

impl Bell {
    /// One that is rung often. Fails for a file that is no eventfd.
    pub(crate) fn new(file: File) -> std::io::Result<Bell> {
        let ring = ring_for(&file)?;
        Ok(Bell { file, news: RefCell::new(Some(ring)) })
    }

    /// One that is rung when something ends: it has no ring until then, for a ring is memory of the
    /// kernel, and a guest may have a hundred bells. Fails as [`Bell::new`] does.
    pub(crate) fn rare(file: File) -> std::io::Result<Bell> {
        drop(ring_for(&file)?);
        Ok(Bell { file, news: RefCell::default() })
    }

    /// What has the file too.
    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// To be waited for.
    pub(crate) fn descriptor(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    /// Wakes the other side. False: the kernel is short of memory, and it was not done.
    #[must_use = "somebody sleeps"]
    pub(crate) fn ring(&self) -> bool {
        let mut news = self.news.borrow_mut();
        if news.is_none() {
            *news = ring_for(&self.file).ok();
        }
        news.as_mut().is_some_and(ring_event)
    }

    /// Makes it silent again, if it has been rung.
    pub(crate) fn hush(&self) {
        let mut count = [0; 8];
        let mut pieces = [IoSliceMut::new(&mut count)];
        // Someone else may have read it.
        let _ = rustix::io::preadv2(&self.file, &mut pieces, NO_OFFSET, ReadWriteFlags::NOWAIT);
    }
}

fn ring_event(ring: &mut IoUring) -> bool {
    ring.completion().for_each(drop);
    if ring.submission().is_empty() {
        // SAFETY: it has no memory that could be gone. There is room, for there is nothing else.
        let pushed = unsafe { ring.submission().push(&opcode::Nop::new().build()) };
        assert!(pushed.is_ok(), "an empty ring has room");
    }
    ring.submit().is_ok_and(|taken| taken > 0)
}

#[cfg(test)]
mod tests {
    //! Goal: nobody who has the file too can make us wait, or make us miss that we are woken.
    //! Method: files as a front end may send and change them, full and empty.

    use std::io::{Read, Write};
    use std::os::fd::OwnedFd;

    use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

    use super::*;

    /// One that blocks.
    fn event(count: u64) -> (File, Bell) {
        let file = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        (&file).write_all(&count.to_ne_bytes()).unwrap();
        let bell = Bell::new(file.try_clone().unwrap()).unwrap();
        (file, bell)
    }

    fn is_readable(file: &File) -> bool {
        let mut fds = [PollFd::new(file, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() == 1
    }

    fn count(mut file: &File) -> u64 {
        let mut count = [0; 8];
        file.read_exact(&mut count).unwrap();
        u64::from_ne_bytes(count)
    }

    #[test]
    fn an_eventfd_is_rung_each_time() {
        let (file, bell) = event(0);
        for times in 1..100 {
            (0..times).for_each(|_| assert!(bell.ring()));
            assert_eq!(count(&file), times);
        }
    }

    #[test]
    fn a_full_eventfd_is_rung_without_waiting() {
        for full in [u64::MAX - 1, u64::MAX - 2] {
            let (file, bell) = event(full);
            (0..5).for_each(|_| assert!(bell.ring()));
            assert!(is_readable(&file));
        }
    }

    #[test]
    fn what_was_not_rung_is_hushed_without_waiting() {
        let (file, bell) = event(3);
        bell.hush();
        assert!(!is_readable(&file));
        bell.hush();
        assert!(bell.ring());
        assert_eq!(count(&file), 1);
    }

    #[test]
    fn one_that_is_rung_rarely_has_a_ring_from_then_on() {
        let file = File::from(eventfd(0, EventfdFlags::CLOEXEC).unwrap());
        let bell = Bell::rare(file.try_clone().unwrap()).unwrap();
        assert!(bell.news.borrow().is_none());
        for times in 1..10 {
            (0..times).for_each(|_| assert!(bell.ring()));
            assert_eq!(count(&file), times);
        }
    }

    #[test]
    fn other_files_are_refused() {
        let (socket, _other) = std::os::unix::net::UnixStream::pair().unwrap();
        let timer = rustix::time::timerfd_create(
            rustix::time::TimerfdClockId::Monotonic,
            rustix::time::TimerfdFlags::CLOEXEC,
        );
        let (_reader, pipe) = std::io::pipe().unwrap();
        let files: [OwnedFd; 5] = [
            socket.into(),
            pipe.into(),
            timer.unwrap(),
            File::open("/dev/null").unwrap().into(),
            tempfile::tempfile().unwrap().into(),
        ];
        for file in files {
            let file = File::from(file);
            for refused in [Bell::new(file.try_clone().unwrap()), Bell::rare(file)] {
                let refused = refused.map(drop).unwrap_err().to_string();
                assert!(refused.contains("must be an eventfd"), "{refused}");
            }
        }
    }
}
