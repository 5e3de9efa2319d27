//! What all connections of one controller know of each other: a controller is what one host made
//! by connecting its admin queue, and lives as long as that.
//!
//! ```text
//! Disabled ──► Enabled ──► ShutDown         by the host, in CC
//!    ▲────────────┘  └──────► Ended         its admin queue is gone, or it was silent too long
//! ```
//!
//! Looked at when queues come and go and when the host sets CC, never for a read or write.

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::nvme_tcp::port::Port;

/// CC.EN and CC.SHN (Base figure 46).
const ENABLE: u32 = 1;
const SHUTDOWN: u32 = 0b11 << 14;
/// CC's entry sizes: 64 and 16 bytes, as powers of two.
const ENTRY_SIZES: u32 = 0xff << 16;
/// CSTS.RDY, and CSTS.SHST: complete (Base figure 47).
const READY: u32 = 1;
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
    /// The ends of its connections, by queue; one stays until nothing is under way on it.
    queues: BTreeMap<u16, TcpStream>,
}

pub(crate) struct Controller {
    pub(crate) id: u16,
    pub(crate) host: HostName,
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
    inner: Mutex<Inner>,
    left: Condvar,
}

/// Why an I/O queue cannot be added.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoQueue {
    NotEnabled,
    Exists,
    TooMany,
}

/// What is known of a controller before it is made.
pub(crate) struct NewController {
    pub(crate) id: u16,
    pub(crate) host: HostName,
    pub(crate) subsystem: String,
    pub(crate) serial: [u8; 20],
    pub(crate) discovery: Option<Arc<Port>>,
    pub(crate) at: SocketAddr,
    pub(crate) queues_max: u16,
    pub(crate) keep_alive: Option<Duration>,
}

impl Controller {
    /// `admin`: another handle of its admin queue's connection.
    pub(crate) fn new(new: NewController, admin: TcpStream) -> Arc<Controller> {
        let NewController { id, host, subsystem, serial, discovery, at, queues_max, keep_alive } =
            new;
        let queues = BTreeMap::from([(0, admin)]);
        let inner = Inner { phase: Phase::Disabled, configuration: 0, queues };
        Arc::new(Controller {
            id,
            host,
            subsystem,
            serial,
            discovery,
            at,
            queues_max,
            keep_alive,
            inner: Mutex::new(inner),
            left: Condvar::new(),
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

    /// CSTS.
    pub(crate) fn status(&self) -> u32 {
        match self.phase() {
            Phase::Enabled => READY,
            Phase::ShutDown => SHUTDOWN_COMPLETE | READY,
            Phase::Disabled | Phase::Ended => 0,
        }
    }

    /// The host writes CC. False: it asks for what there is not.
    pub(crate) fn configure(&self, configuration: u32) -> bool {
        let sizes = configuration & ENTRY_SIZES;
        // I/O command set, page size, arbitration: 0 of each.
        let strange = configuration & 0b0011_1111_1111_0000 != 0;
        let io = configuration & ENABLE != 0 && self.discovery.is_none();
        if configuration & ENABLE != 0 && strange || io && sizes != 0x46 << 16 && sizes != 0 {
            return false;
        }
        let mut inner = self.inner();
        inner.configuration = configuration;
        if let Some(next) = asked_for(inner.phase, configuration) {
            inner.become_phase(next);
            if next != Phase::Enabled {
                inner.cut(|queue| queue != 0);
            }
        }
        true
    }

    /// A new I/O queue, and another handle of its connection.
    pub(crate) fn add_queue(&self, queue: u16, stream: TcpStream) -> Result<(), NoQueue> {
        let mut inner = self.inner();
        if inner.phase != Phase::Enabled {
            return Err(NoQueue::NotEnabled);
        }
        if queue == 0 || queue > self.queues_max {
            return Err(NoQueue::TooMany);
        }
        if inner.queues.contains_key(&queue) {
            return Err(NoQueue::Exists);
        }
        inner.queues.insert(queue, stream);
        Ok(())
    }

    /// Nothing is under way on this queue any more.
    pub(crate) fn remove_queue(&self, queue: u16) {
        let mut inner = self.inner();
        inner.queues.remove(&queue);
        if queue == 0 {
            inner.end();
        }
        drop(inner);
        self.left.notify_all();
    }

    /// Cuts all its connections; what is under way on them ends.
    pub(crate) fn end(&self) {
        self.inner().end();
    }

    /// Whether it has ended, with nothing under way.
    pub(crate) fn is_at_rest(&self) -> bool {
        let inner = self.inner();
        inner.phase == Phase::Ended && inner.queues.is_empty()
    }

    /// Waits until one that has ended is at rest. False: it is not, by then.
    pub(crate) fn wait_for_rest(&self, at_most: Duration) -> bool {
        let under_way = |inner: &mut Inner| !inner.queues.is_empty();
        let waited = self.left.wait_timeout_while(self.inner(), at_most, under_way);
        waited.is_ok_and(|(_, timeout)| !timeout.timed_out())
    }
}

impl Inner {
    fn become_phase(&mut self, next: Phase) {
        assert!(self.phase.may_become(next), "{:?} to {next:?}", self.phase);
        self.phase = next;
    }

    fn end(&mut self) {
        self.become_phase(Phase::Ended);
        self.cut(|_| true);
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
}
