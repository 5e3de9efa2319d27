//! What all connections of one controller know of each other: a controller is what one host made
//! by connecting its admin queue, and lives as long as that.
//!
//! ```text
//! Disabled ──► Enabled ──► ShutDown         by the host, in CC
//!    ▲────────────┘  └──────► Ended         its admin queue is gone, or it was silent too long
//! ```
//!
//! Looked at when queues come and go and when the host sets CC, never for a read or write.
//!
//! Invariant: once the host is told that a reset or a shutdown is over, nothing of before is under
//! way; and nothing new begins before. Else a late write could overwrite what is written after it.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ashlar_reactor::nvme::command::Status;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::nvme_tcp::port::Port;

/// CC.EN and CC.SHN (Base figure 46).
const ENABLE: u32 = 1;
const SHUTDOWN: u32 = 0b11 << 14;
/// CC's entry sizes: 64 and 16 bytes, as powers of two.
const ENTRY_SIZES: u32 = 0xff << 16;
/// CSTS.RDY, and CSTS.SHST: occurring, complete (Base figure 47).
const READY: u32 = 1;
const SHUTTING_DOWN: u32 = 0b01 << 2;
const SHUTDOWN_COMPLETE: u32 = 0b10 << 2;

/// Who connects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HostName {
    pub(crate) nqn: String,
    pub(crate) id: [u8; 16],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    Disabled,
    Enabled,
    ShutDown,
    Ended,
}

impl Phase {
    fn may_become(self, next: Phase) -> bool {
        match (self, next) {
            (Phase::Disabled, Phase::Enabled | Phase::ShutDown | Phase::Ended) => true,
            (Phase::Enabled, Phase::Disabled | Phase::ShutDown | Phase::Ended) => true,
            (Phase::ShutDown, Phase::Disabled | Phase::Ended) => true,
            (Phase::Ended, Phase::Ended) => true,
            (Phase::Disabled | Phase::Enabled | Phase::ShutDown | Phase::Ended, _) => false,
        }
    }
}

/// What a host's write of CC asks for; `None`: nothing new.
fn asked_for(phase: Phase, configuration: u32) -> Option<Phase> {
    let enabled = configuration & ENABLE != 0;
    let shutting_down = configuration & SHUTDOWN != 0;
    let next = match (phase, shutting_down, enabled) {
        (Phase::Ended, _, _) | (Phase::ShutDown, false, true) => return None,
        (_, true, _) => Phase::ShutDown,
        (_, false, true) => Phase::Enabled,
        (_, false, false) => Phase::Disabled,
    };
    (next != phase).then_some(next)
}

struct Inner {
    phase: Phase,
    configuration: u32,
    /// How many submission and completion queues the host was told that it may have.
    allocated: [u16; 2],
    /// An I/O queue was connected since it was enabled.
    had_queue: bool,
    /// The ends of its connections, by queue; one stays until nothing is under way on it.
    queues: BTreeMap<u16, TcpStream>,
}

pub(crate) struct Controller {
    pub(crate) its: Association,
    inner: Mutex<Inner>,
    left: Condvar,
    /// What the phase says to the connections: whether the admin queue and I/O queues take
    /// commands up.
    admin_is_open: AtomicBool,
    io_is_open: AtomicBool,
}

/// Why an I/O queue cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoQueue {
    NotEnabled,
    Exists,
    TooMany,
}

/// What host and controller know of each other from the connect on.
pub(crate) struct Association {
    pub(crate) id: u16,
    pub(crate) host: HostName,
    /// The host has proven that it is that one.
    pub(crate) is_proven: bool,
    pub(crate) subsystem: String,
    pub(crate) serial: [u8; 20],
    /// It tells which subsystems there are; `None`: it is of one.
    pub(crate) discovery: Option<Arc<Port>>,
    /// Where the host reached it.
    pub(crate) at: SocketAddr,
    /// Most I/O queues.
    pub(crate) queues_max: u16,
    /// How long the host may be silent.
    pub(crate) keep_alive: Option<Duration>,
}

impl Controller {
    /// `admin`: another handle of its admin queue's connection.
    pub(crate) fn new(its: Association, admin: TcpStream) -> Arc<Controller> {
        let queues = BTreeMap::from([(0, admin)]);
        let (phase, allocated) = (Phase::Disabled, [its.queues_max; 2]);
        let inner = Inner { phase, configuration: 0, allocated, had_queue: false, queues };
        Arc::new(Controller {
            its,
            inner: Mutex::new(inner),
            left: Condvar::new(),
            admin_is_open: AtomicBool::new(true),
            io_is_open: AtomicBool::new(false),
        })
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        // Each change is complete before anything could panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn phase(&self) -> Phase {
        self.inner().phase
    }

    /// CC.
    pub(crate) fn configuration(&self) -> u32 {
        self.inner().configuration
    }

    /// CSTS. A reset or a shutdown is over when nothing is under way on I/O queues.
    pub(crate) fn status(&self) -> u32 {
        let inner = self.inner();
        match (inner.phase, inner.is_quiet()) {
            (Phase::Enabled, _) | (Phase::Disabled, false) => READY,
            (Phase::ShutDown, false) => SHUTTING_DOWN | READY,
            (Phase::ShutDown, true) => SHUTDOWN_COMPLETE | READY,
            (Phase::Disabled, true) | (Phase::Ended, _) => 0,
        }
    }

    /// The host writes CC. An error: it asks for what there is not, or does not wait for a reset.
    pub(crate) fn configure(&self, configuration: u32) -> Result<(), Status> {
        let sizes = configuration & ENTRY_SIZES;
        // I/O command set, page size, arbitration: 0 of each.
        let strange = configuration & 0b0011_1111_1111_0000 != 0;
        let io = configuration & ENABLE != 0 && self.its.discovery.is_none();
        if configuration & ENABLE != 0 && strange || io && sizes != 0x46 << 16 && sizes != 0 {
            return Err(Status::INVALID_FIELD.for_good());
        }
        let mut inner = self.inner();
        let next = asked_for(inner.phase, configuration);
        if next == Some(Phase::Enabled) && !inner.is_quiet() {
            return Err(Status::SEQUENCE);
        }
        inner.configuration = configuration;
        if let Some(next) = next {
            self.become_phase(&mut inner, next);
        }
        Ok(())
    }

    fn become_phase(&self, inner: &mut Inner, next: Phase) {
        assert!(inner.phase.may_become(next), "{:?} to {next:?}", inner.phase);
        inner.phase = next;
        // Before the sockets are shut: what is left in them is not taken up any more.
        self.admin_is_open.store(next != Phase::Ended, Ordering::Release);
        self.io_is_open.store(next == Phase::Enabled, Ordering::Release);
        match next {
            // What was set before the reset is undone.
            Phase::Enabled => {
                inner.allocated = [self.its.queues_max; 2];
                inner.had_queue = false;
            }
            Phase::Disabled | Phase::ShutDown => inner.cut(|queue| queue != 0),
            Phase::Ended => inner.cut(|_| true),
        }
    }

    /// Whether commands of a queue are taken up. Once they are not, they never are again on this
    /// connection.
    pub(crate) fn is_open(&self, queue: u16) -> bool {
        let open = if queue == 0 { &self.admin_is_open } else { &self.io_is_open };
        open.load(Ordering::Acquire)
    }

    /// How many submission and completion queues the host may have.
    pub(crate) fn allocated_queues(&self) -> [u16; 2] {
        self.inner().allocated
    }

    /// The host asks for so many; how many it gets. An error: it has connected one before (Base
    /// 5.27.1.5).
    pub(crate) fn allocate_queues(&self, asked: [u16; 2]) -> Result<[u16; 2], Status> {
        let mut inner = self.inner();
        if inner.had_queue {
            return Err(Status::SEQUENCE.for_good());
        }
        inner.allocated = asked.map(|count| count.min(self.its.queues_max));
        Ok(inner.allocated)
    }

    /// Whether an I/O queue could be added.
    pub(crate) fn check_queue(&self, queue: u16) -> Result<(), NoQueue> {
        self.check(&self.inner(), queue)
    }

    /// A new I/O queue, and another handle of its connection.
    pub(crate) fn add_queue(&self, queue: u16, stream: TcpStream) -> Result<(), NoQueue> {
        let mut inner = self.inner();
        self.check(&inner, queue)?;
        inner.queues.insert(queue, stream);
        inner.had_queue = true;
        Ok(())
    }

    fn check(&self, inner: &Inner, queue: u16) -> Result<(), NoQueue> {
        if inner.phase != Phase::Enabled {
            return Err(NoQueue::NotEnabled);
        }
        let [submission, completion] = inner.allocated;
        if queue == 0 || queue > submission.min(completion) {
            return Err(NoQueue::TooMany);
        }
        if inner.queues.contains_key(&queue) {
            return Err(NoQueue::Exists);
        }
        Ok(())
    }

    /// Nothing is under way on this queue any more.
    pub(crate) fn remove_queue(&self, queue: u16) {
        let mut inner = self.inner();
        inner.queues.remove(&queue);
        if queue == 0 {
            self.become_phase(&mut inner, Phase::Ended);
        }
        drop(inner);
        self.left.notify_all();
    }

    /// Cuts all its connections; what is under way on them ends.
    pub(crate) fn end(&self) {
        self.become_phase(&mut self.inner(), Phase::Ended);
    }

    /// Ends it if its host has left it, which its reactor may not have noticed yet. Whether nothing
    /// new begins on its I/O queues.
    pub(crate) fn is_left(&self) -> bool {
        let mut inner = self.inner();
        if inner.phase == Phase::Enabled && inner.admin_has_hung_up() {
            self.become_phase(&mut inner, Phase::Ended);
        }
        inner.phase != Phase::Enabled
    }

    /// Whether it has ended, with nothing under way.
    pub(crate) fn is_at_rest(&self) -> bool {
        let inner = self.inner();
        inner.phase == Phase::Ended && inner.queues.is_empty()
    }

    /// Waits until one that has ended is at rest. False: it is not, by then.
    pub(crate) fn wait_for_rest(&self, at_most: Duration) -> bool {
        self.wait_while(at_most, |inner| !inner.queues.is_empty())
    }

    /// Waits until nothing is under way on its I/O queues. False: something is, by then.
    pub(crate) fn wait_for_quiet(&self, at_most: Duration) -> bool {
        self.wait_while(at_most, |inner| !inner.is_quiet())
    }

    fn wait_while(&self, at_most: Duration, under_way: impl Fn(&Inner) -> bool) -> bool {
        let waited = self.left.wait_timeout_while(self.inner(), at_most, |its| under_way(its));
        waited.is_ok_and(|(_, timeout)| !timeout.timed_out())
    }
}

impl Inner {
    /// No I/O queue is there, or is still coming to rest.
    fn is_quiet(&self) -> bool {
        self.queues.keys().all(|queue| *queue == 0)
    }

    /// Also behind data that nobody has taken up.
    fn admin_has_hung_up(&self) -> bool {
        let Some(admin) = self.queues.get(&0) else { return true };
        let mut ends = [PollFd::new(admin, PollFlags::RDHUP)];
        // One that cannot be asked is left to its reactor.
        let asked = poll(&mut ends, Some(&Timespec::default()));
        asked.is_ok_and(|ready| ready > 0)
    }

    fn cut(&self, which: impl Fn(u16) -> bool) {
        for (_, stream) in self.queues.iter().filter(|(queue, _)| which(**queue)) {
            // It fails where the host was faster.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a controller goes where its host sends it, and nowhere else.
    //! Method: every phase with every kind of write of CC.

    use std::io::Write;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn cc_is_obeyed() {
        use Phase::{Disabled, Enabled, Ended, ShutDown};
        let shut = 1 << 14;
        let cases = [
            (Disabled, 0, None),
            (Disabled, 1, Some(Enabled)),
            (Disabled, shut, Some(ShutDown)),
            (Enabled, 1, None),
            (Enabled, 0, Some(Disabled)),
            (Enabled, shut | 1, Some(ShutDown)),
            (Enabled, 2 << 14 | 1, Some(ShutDown)),
            (ShutDown, shut | 1, None),
            (ShutDown, 1, None),
            (ShutDown, 0, Some(Disabled)),
            (Ended, 1, None),
            (Ended, shut, None),
        ];
        for (phase, configuration, next) in cases {
            assert_eq!(asked_for(phase, configuration), next, "{phase:?} {configuration:#x}");
            assert!(next.is_none_or(|next| phase.may_become(next)));
        }
        assert!(!Ended.may_become(Enabled));
    }

    /// Two ends of a connection.
    fn connection() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let host = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (host, listener.accept().unwrap().0)
    }

    fn controller(admin: TcpStream) -> Arc<Controller> {
        let new = Association {
            id: 1,
            host: HostName { nqn: "host".into(), id: [1; 16] },
            is_proven: false,
            subsystem: "subsystem".into(),
            serial: [0; 20],
            discovery: None,
            at: "127.0.0.1:4420".parse().unwrap(),
            queues_max: 4,
            keep_alive: None,
        };
        Controller::new(new, admin)
    }

    #[test]
    fn what_was_begun_ends_before_a_reset_or_a_shutdown_is_over() {
        let shut = 1 << 14 | ENABLE;
        for (ask, meanwhile, then) in
            [(0, READY, 0), (shut, READY | SHUTTING_DOWN, READY | SHUTDOWN_COMPLETE)]
        {
            let (_admin_host, admin) = connection();
            let controller = controller(admin);
            assert_eq!(controller.configure(ENABLE), Ok(()));
            let (_io_host, io) = connection();
            assert_eq!(controller.add_queue(2, io.try_clone().unwrap()), Ok(()));
            assert_eq!(controller.add_queue(2, io.try_clone().unwrap()), Err(NoQueue::Exists));
            assert!(controller.is_open(2) && !controller.is_left());
            assert_eq!(controller.configure(ask), Ok(()));
            assert!(!controller.is_open(2) && controller.is_open(0) && controller.is_left());
            assert_eq!(controller.status(), meanwhile);
            assert!(!controller.wait_for_quiet(Duration::ZERO));
            // Nothing new before: neither by another queue nor by a new start.
            let another = controller.add_queue(3, io.try_clone().unwrap());
            assert_eq!(another, Err(NoQueue::NotEnabled));
            assert_eq!(controller.configure(0), Ok(()));
            assert_eq!(controller.configure(ENABLE), Err(Status::SEQUENCE));
            assert_eq!(controller.configure(ask), Ok(()));
            assert_eq!(controller.status(), meanwhile);
            controller.remove_queue(2);
            assert_eq!(controller.status(), then);
            assert!(controller.wait_for_quiet(Duration::ZERO));
            assert_eq!(controller.configure(0), Ok(()));
            assert_eq!((controller.configure(ENABLE), controller.status()), (Ok(()), READY));
        }
    }

    #[test]
    fn queues_are_allocated_before_the_first_is_connected() {
        let (_admin_host, admin) = connection();
        let controller = controller(admin);
        assert_eq!(controller.configure(ENABLE), Ok(()));
        assert_eq!(controller.allocated_queues(), [4, 4]);
        assert_eq!(controller.allocate_queues([3, 200]), Ok([3, 4]));
        assert_eq!(controller.allocated_queues(), [3, 4]);
        let (_io_host, io) = connection();
        assert_eq!(controller.add_queue(1, io), Ok(()));
        let late = Err(Status::SEQUENCE.for_good());
        assert_eq!(controller.allocate_queues([1, 1]), late);
        controller.remove_queue(1);
        assert_eq!(controller.allocate_queues([1, 1]), late, "there was one");
        assert_eq!(controller.allocated_queues(), [3, 4]);
        // A reset begins anew.
        assert_eq!((controller.configure(0), controller.configure(ENABLE)), (Ok(()), Ok(())));
        assert_eq!(controller.allocated_queues(), [4, 4]);
        assert_eq!(controller.allocate_queues([1, 1]), Ok([1, 1]));
    }

    #[test]
    fn one_whose_host_has_left_ends() {
        let (mut host, admin) = connection();
        let controller = controller(admin);
        assert_eq!(controller.configure(ENABLE), Ok(()));
        host.write_all(&[1; 100]).unwrap();
        assert!(!controller.is_left());
        host.shutdown(Shutdown::Write).unwrap();
        // What came before its end was not taken up yet.
        while !controller.is_left() {}
        assert!(!controller.is_open(0) && !controller.is_open(1));
        assert_eq!(controller.phase(), Phase::Ended);
    }
}
