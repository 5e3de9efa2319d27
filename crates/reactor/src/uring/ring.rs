//! One ring: what waits to go into it, what it has of files and memory, and its system calls.

use std::collections::VecDeque;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, cqueue, squeue};

use crate::arena::{Arena, SPANS_MAX};
use crate::backend::Instant;
use crate::buffer::{Buffer, Buffers};
use crate::op::{Errno, Outcome};
use crate::uring::gauges::{Gauges, Use, Why};
use crate::uring::probe::Kind;

/// Files that a ring can have in its table; more are found by their descriptors.
const FILES_MAX: u32 = 256;

/// The arena's spans that the kernel knows, by number.
enum Spans {
    /// There is no arena, or the kernel takes none.
    None(Why),
    Some {
        arena: Rc<Arena>,
        known: Vec<Result<Range<usize>, Errno>>,
    },
}

/// Of entries of the usual size, or of the larger one that some commands need.
pub(super) struct Ring<S = squeue::Entry, C = cqueue::Entry>
where
    S: squeue::EntryMarker,
    C: cqueue::EntryMarker,
{
    io: IoUring<S, C>,
    kind: Kind,
    /// Each with the last moment at which the kernel may be given it.
    backlog: VecDeque<(S, Instant)>,
    in_kernel: usize,
    /// Whether it has a table of files.
    table: Result<(), Errno>,
    spans: Spans,
    enters: u64,
    submissions: u64,
    /// Another ring waits for this one.
    awaited: bool,
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    /// `arena`: where the buffers of its operations come from.
    pub(super) fn new(io: IoUring<S, C>, kind: Kind, arena: Option<Rc<Arena>>) -> Ring<S, C> {
        let submitter = io.submitter();
        let sparse = submitter.register_files_sparse(FILES_MAX);
        // Before Linux 5.19.
        let table = sparse.or_else(|_| submitter.register_files(&[-1; FILES_MAX as usize]));
        let spans = match arena {
            None => Spans::None(Why::Off),
            Some(arena) => match submitter.register_buffers_sparse(SPANS_MAX) {
                Ok(()) => Spans::Some { arena, known: Vec::new() },
                Err(error) => Spans::None(Why::Refused(errno(&error))),
            },
        };
        Ring {
            table: table.map_err(|error| errno(&error)),
            spans,
            io,
            kind,
            backlog: VecDeque::new(),
            in_kernel: 0,
            enters: 0,
            submissions: 0,
            awaited: false,
        }
    }

    /// Operations that wait or that the kernel has.
    pub(super) fn is_used(&self) -> bool {
        self.in_kernel > 0 || !self.backlog.is_empty()
    }

    /// Operations that wait for room.
    pub(super) fn has_backlog(&self) -> bool {
        !self.backlog.is_empty()
    }

    /// What another ring is to wait for before sleeping, if this one is used and nobody waits yet.
    /// It can be read when something has completed.
    pub(super) fn await_completions(&mut self) -> Option<RawFd> {
        let wanted = self.is_used() && !std::mem::replace(&mut self.awaited, true);
        wanted.then(|| self.io.as_raw_fd())
    }

    /// They have come.
    pub(super) fn woken(&mut self) {
        self.awaited = false;
    }

    pub(super) fn in_kernel(&self) -> usize {
        self.in_kernel
    }

    /// Whether something was put into it that the kernel has not seen.
    pub(super) fn has_unsubmitted(&mut self) -> bool {
        !self.io.submission().is_empty()
    }

    /// Puts a file into the table, or takes it out (-1). What was there is let go of at once.
    pub(super) fn set_file(&mut self, place: usize, fd: RawFd) -> Use {
        if let Err(errno) = self.table {
            return Use::No(Why::Refused(errno));
        }
        let Some(place) = u32::try_from(place).ok().filter(|place| *place < FILES_MAX) else {
            return Use::No(Why::Full);
        };
        match self.io.submitter().register_files_update(place, &[fd]) {
            Ok(_) => Use::Yes,
            Err(error) => Use::No(Why::Refused(errno(&error))),
        }
    }

    /// Where the kernel has this memory, if it is in one piece and of the arena.
    pub(super) fn span_of(&mut self, buffers: &Buffers) -> Option<u16> {
        let [piece] = buffers.pieces() else { return None };
        let index = piece.span()?;
        let known = self.learn_spans(usize::from(index) + 1)?;
        let range = known[usize::from(index)].as_ref().ok()?;
        is_inside(piece, range).then_some(index)
    }

    /// Tells the kernel of the arena's first `count` spans, those that it does not know yet.
    fn learn_spans(&mut self, count: usize) -> Option<&[Result<Range<usize>, Errno>]> {
        let Spans::Some { arena, known } = &mut self.spans else { return None };
        while known.len() < count {
            // A buffer of another arena may be in a span that this one does not have.
            let (start, len) = arena.span(known.len())?;
            let vector = libc::iovec { iov_base: start.as_ptr().cast(), iov_len: len };
            let place = u32::try_from(known.len()).expect("below SPANS_MAX");
            // SAFETY: a span stays in place while its arena lives, which this ring keeps.
            let told =
                unsafe { self.io.submitter().register_buffers_update(place, &[vector], None) };
            let start = start.addr().get();
            known.push(told.map(|_| start..start + len).map_err(|error| errno(&error)));
        }
        Some(known)
    }

    /// Whether the kernel knows the memory of buffers.
    pub(super) fn knows_buffers(&mut self) -> Use {
        if let Spans::None(why) = self.spans {
            return Use::No(why);
        }
        match self.learn_spans(1).and_then(|known| known.first()) {
            Some(Ok(_)) => Use::Yes,
            Some(Err(errno)) => Use::No(Why::Refused(*errno)),
            None => Use::No(Why::Refused(Errno(libc::ENOMEM))),
        }
    }

    /// The same, once devices are served by this ring.
    pub(super) fn knows_buffers_if(&mut self, used: bool) -> Option<Use> {
        used.then(|| self.knows_buffers())
    }

    /// What the operation reads, writes and lists must stay in place until it was reaped, or until
    /// `forget_backlog` named it.
    pub(super) fn push(&mut self, entry: S, until: Instant) {
        self.backlog.push_back((entry, until));
    }

    /// Moves what fits from the backlog to the submission ring; the user data of what comes too
    /// late goes to `late`. The kernel is to be told right after: this process may have been
    /// stopped at any time before. True if there was anything.
    pub(super) fn fill(&mut self, now: impl FnOnce() -> Instant, late: &mut Vec<u64>) -> bool {
        if self.backlog.is_empty() {
            return false;
        }
        let now = now();
        let mut submission = self.io.submission();
        while !submission.is_full()
            && let Some((entry, until)) = self.backlog.pop_front()
        {
            if now > until {
                late.push(entry.get_user_data());
                continue;
            }
            // SAFETY: buffers and iovec arrays stay in place until the completion is reaped: the
            // slots and `UringBackend::pieces` keep them, and `Lossy` and `Polled` their own.
            unsafe { submission.push(&entry) }.expect("checked not to be full");
            self.in_kernel += 1;
            self.submissions += 1;
        }
        true
    }

    /// One call submits what is new and lets completions in; none is made when neither side has
    /// news. A busy completion ring is no error: it is emptied right after.
    pub(super) fn enter(&mut self) {
        if self.in_kernel == 0 {
            return;
        }
        let submission = self.io.submission();
        let news = submission.taskrun() || submission.cq_overflow() || self.kind == Kind::Polled;
        if submission.is_empty() && !news {
            return;
        }
        // What the kernel's thread takes needs no call while it is awake.
        let is_call = news || self.kind != Kind::Sqpoll || submission.need_wakeup();
        drop(submission);
        self.enters += u64::from(is_call);
        // Signals and a kernel that is short of memory are no ends: what it did not take stays in
        // the ring, and is not empty the next time.
        let _ = self.io.submitter().submit();
    }

    /// Submits, and sleeps in the kernel until one completion or `wait` is over. Signals and
    /// time-outs are ordinary ends; false: the kernel did not take it.
    pub(super) fn wait(&mut self, wait: Option<Duration>) -> bool {
        self.enters += 1;
        let waited = match wait {
            None => self.io.submit_and_wait(1),
            Some(wait) => {
                let time = Timespec::from(wait);
                let args = SubmitArgs::new().timespec(&time);
                self.io.submitter().submit_with_args(1, &args)
            }
        };
        let is_end = |errno| [libc::EINTR, libc::ETIME, libc::EAGAIN, libc::EBUSY].contains(&errno);
        waited.map_or_else(|error| error.raw_os_error().is_some_and(is_end), |_| true)
    }

    /// Appends what has completed: user data and outcome.
    pub(super) fn reap(&mut self, heard: &mut Vec<(u64, Outcome)>) {
        if self.in_kernel == 0 {
            return;
        }
        let before = heard.len();
        heard.extend(self.io.completion().map(|completion| {
            let completion: cqueue::Entry = completion.into();
            let result = completion.result();
            (completion.user_data(), u64::try_from(result).map_err(|_| Errno(-result)))
        }));
        self.in_kernel -= heard.len() - before;
    }

    /// User data of what the kernel was not given, and now will not be.
    pub(super) fn forget_backlog(&mut self) -> impl Iterator<Item = u64> {
        self.backlog.drain(..).map(|(entry, _)| entry.get_user_data())
    }

    /// Moves its counts to `gauges`.
    pub(super) fn tell(&mut self, gauges: &Gauges, completions: usize) {
        if self.enters == 0 && completions == 0 {
            return;
        }
        let (enters, submissions) = (self.enters, self.submissions);
        (self.enters, self.submissions) = (0, 0);
        gauges.count(|counters| {
            counters.enters += enters;
            counters.submissions += submissions;
            counters.completions += completions as u64;
        });
    }
}

fn is_inside(piece: &Buffer, range: &Range<usize>) -> bool {
    let start = piece.as_ptr().addr();
    range.start <= start && start + piece.len() <= range.end
}

pub(super) fn errno(error: &std::io::Error) -> Errno {
    Errno(error.raw_os_error().unwrap_or(libc::EINVAL))
}

#[cfg(test)]
mod tests {
    //! Goal: what the kernel was told of is used, and nothing else.
    //! Method: buffers of this arena, of another one and of none; tables that are full.

    use super::*;
    use crate::buffer::BufferPool;
    use crate::uring::probe::build;

    fn ring(arena: Option<Rc<Arena>>) -> Ring {
        Ring::new(build(Kind::Interrupts).unwrap().0, Kind::Interrupts, arena)
    }

    #[test]
    fn buffers_of_other_memory_are_told_apart() {
        let (arena, other) = (Arena::new(), Arena::new());
        let mut ring = ring(Some(arena.clone()));
        assert_eq!(ring.knows_buffers(), Use::Yes);
        let pool = BufferPool::on(arena);
        // So many that there are several spans.
        let all: Vec<Buffer> = (0..40).map(|_| pool.take(1 << 20)).collect();
        let spans: Vec<_> = all.iter().map(|its| ring.span_of(&its.clone().into())).collect();
        assert_eq!((spans[0], spans[39]), (Some(0), Some(2)));
        assert_eq!(ring.span_of(&all[39].slice(512..1024).into()), Some(2));
        let mut two = Buffers::from(all[0].clone());
        two.push(all[1].clone());
        assert_eq!(ring.span_of(&two), None);
        for pool in [BufferPool::on(other), BufferPool::new()] {
            let elsewhere: Vec<Buffer> = (0..60).map(|_| pool.take(1 << 20)).collect();
            let found = elsewhere.iter().find_map(|its| ring.span_of(&its.clone().into()));
            assert_eq!(found, None);
        }
    }

    #[test]
    fn files_beyond_the_table_go_without() {
        let mut ring = ring(None);
        let file = std::fs::File::open("/dev/null").unwrap();
        let fd = std::os::fd::AsRawFd::as_raw_fd(&file);
        let last = FILES_MAX as usize - 1;
        assert_eq!(ring.set_file(last, fd), Use::Yes);
        assert_eq!(ring.set_file(last, -1), Use::Yes);
        assert_eq!(ring.set_file(last + 1, fd), Use::No(Why::Full));
        assert_eq!(ring.set_file(0, -9), Use::No(Why::Refused(Errno(libc::EBADF))));
        assert_eq!(ring.knows_buffers(), Use::No(Why::Off));
    }
}
