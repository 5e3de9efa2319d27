//! An address where hosts connect: the subsystems that are reached there, and the thread that
//! accepts. Each connection is set up by a thread of its own ([`handshake`]), and lives on a
//! reactor from then on.
//!
//! [`handshake`]: crate::nvme_tcp::handshake

use std::collections::BTreeMap;
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;

use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::nvme::fabrics::NQN_BYTES_MAX;

use crate::line::Lines;
use crate::nvme_tcp::branch::Branch;
use crate::nvme_tcp::controller::Controller;
use crate::nvme_tcp::handshake;
use crate::nvme_tcp::namespace::is_allowed;

/// Most connections of all hosts.
pub const CONNECTIONS_MAX: usize = 1024;
/// Connections of one port that are being set up at a time; more wait to be accepted.
const HANDSHAKES_MAX: usize = 32;
/// Most subsystems of one port.
pub const SUBSYSTEMS_MAX: usize = 256;
/// Wait after a failed `accept`: it fails again at once while file descriptors are short.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Controllers that answer Connect with this number do not exist (CNTLID from FFF0h on).
const CONTROLLERS_END: u16 = 0xfff0;

/// What all ports share.
#[derive(Default)]
pub(crate) struct House {
    connections: AtomicUsize,
    controllers: AtomicU16,
}

impl House {
    /// A place for one more connection, until it is dropped.
    pub(crate) fn seat(self: &Arc<House>) -> Option<Seat> {
        let more = |taken: usize| (taken < CONNECTIONS_MAX).then_some(taken + 1);
        let taken = self.connections.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.ok().map(|_| Seat(self.clone()))
    }

    /// The number of a new controller: another one than all that live, unless thousands came since.
    fn next_controller(&self) -> u16 {
        let next = |last: u16| Some(if last + 1 < CONTROLLERS_END { last + 1 } else { 1 });
        match self.controllers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(last) | Err(last) => next(last).unwrap_or(1),
        }
    }
}

pub(crate) struct Seat(Arc<House>);

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.connections.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a subsystem is for those who connect.
pub(crate) struct Subsystem {
    pub(crate) serial: [u8; 20],
    /// Its branches, and their reactors.
    pub(crate) lines: Lines<Branch>,
    pub(crate) cores: Vec<Sender>,
    /// Most I/O queues of one controller.
    pub(crate) queues_max: u16,
    /// By number: the hosts that may see it; none: any.
    pub(crate) namespaces: BTreeMap<u32, Vec<String>>,
    pub(crate) controllers: Vec<Arc<Controller>>,
}

impl Subsystem {
    pub(crate) fn allows(&self, host: &str) -> bool {
        self.namespaces.values().any(|hosts| is_allowed(hosts, host))
    }

    /// Its controllers that live, or have something under way.
    pub(crate) fn prune(&mut self) {
        self.controllers.retain(|its| !its.is_at_rest());
    }
}

#[derive(Default)]
pub(crate) struct Inner {
    stopping: bool,
    pub(crate) subsystems: BTreeMap<String, Subsystem>,
    /// Of the discovery log: it changes with every change.
    pub(crate) generation: u64,
    /// Those that tell of the subsystems.
    pub(crate) discovering: Vec<Arc<Controller>>,
    handshakes: usize,
}

pub(crate) struct Port {
    pub(crate) address: SocketAddr,
    listener: TcpListener,
    pub(crate) house: Arc<House>,
    inner: Mutex<Inner>,
    handshake_ended: Condvar,
}

/// What a discovery controller tells.
pub(crate) struct Told {
    pub(crate) names: Vec<String>,
    pub(crate) generation: u64,
}

impl Port {
    pub(crate) fn bind(address: SocketAddr, house: &Arc<House>) -> std::io::Result<Arc<Port>> {
        let listener = TcpListener::bind(address)?;
        Ok(Arc::new(Port {
            address: listener.local_addr()?,
            listener,
            house: house.clone(),
            inner: Mutex::default(),
            handshake_ended: Condvar::new(),
        }))
    }

    /// The thread that accepts.
    pub(crate) fn start(self: &Arc<Port>) -> std::io::Result<JoinHandle<()>> {
        let port = self.clone();
        std::thread::Builder::new().name("nvme-tcp".into()).spawn(move || port.accept_all())
    }

    /// Held for looks and changes only, never while somebody is waited for.
    pub(crate) fn inner(&self) -> MutexGuard<'_, Inner> {
        // Each change is complete before anything could panic.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What `host` may connect to.
    pub(crate) fn subsystems_for(&self, host: &str) -> Told {
        let inner = self.inner();
        let allowed = inner.subsystems.iter().filter(|(_, its)| its.allows(host));
        Told {
            names: allowed.map(|(name, _)| name.clone()).collect(),
            generation: inner.generation,
        }
    }

    pub(crate) fn next_controller(&self) -> u16 {
        self.house.next_controller()
    }

    /// Ends the thread; who is being let in is turned away. No subsystem is left.
    pub(crate) fn stop(&self, thread: JoinHandle<()>) {
        let discovering = {
            let mut inner = self.inner();
            inner.stopping = true;
            std::mem::take(&mut inner.discovering)
        };
        let _ = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both);
        let _ = thread.join();
        for controller in discovering {
            controller.end();
            if !controller.wait_for_rest(handshake::REST_WITHIN) {
                tracing::error!(port = %self.address, "a discovery connection does not end");
            }
        }
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.inner().stopping
    }

    fn accept_all(self: Arc<Port>) {
        loop {
            let accepted = self.listener.accept();
            if self.is_stopping() {
                break;
            }
            match accepted {
                Ok((stream, from)) => self.let_in(stream, from),
                Err(error) => {
                    tracing::warn!(port = %self.address, %error, "a host could not be accepted");
                    #[expect(clippy::disallowed_methods, reason = "this thread is no reactor's")]
                    std::thread::sleep(ACCEPT_AGAIN);
                }
            }
        }
        let waited = self.handshake_ended.wait_while(self.inner(), |inner| inner.handshakes > 0);
        drop(waited);
    }

    /// Sets a connection up, beside whatever else goes on; waits while too many are.
    fn let_in(self: &Arc<Port>, stream: TcpStream, from: SocketAddr) {
        let Some(seat) = self.house.seat() else {
            let most = CONNECTIONS_MAX;
            tracing::warn!(port = %self.address, %from, "a host was turned away: {most} are here");
            return;
        };
        let many = |inner: &mut Inner| inner.handshakes >= HANDSHAKES_MAX && !inner.stopping;
        let waited = self.handshake_ended.wait_while(self.inner(), many);
        waited.unwrap_or_else(PoisonError::into_inner).handshakes += 1;
        let ticket = Handshake(self.clone());
        let setup = move || {
            let port = &ticket.0;
            if let Err(why) = handshake::shake_hands(port, stream, seat) {
                tracing::warn!(port = %port.address, %from, %why, "a host was refused");
            }
        };
        let started = std::thread::Builder::new().name("nvme-tcp-connect".into()).spawn(setup);
        if let Err(error) = started {
            tracing::warn!(port = %self.address, %error, "a host could not be let in");
        }
    }
}

/// One of [`HANDSHAKES_MAX`].
struct Handshake(Arc<Port>);

impl Drop for Handshake {
    fn drop(&mut self) {
        self.0.inner().handshakes -= 1;
        self.0.handshake_ended.notify_all();
    }
}

/// Ends a connection from another thread.
pub(crate) fn hang_up(stream: &TcpStream) {
    // It fails where the host was faster.
    let _ = stream.shutdown(Shutdown::Both);
}

/// Why a name cannot be a subsystem's or a host's (Base 4.5); `None`: it can.
pub fn check_nqn(name: &str) -> Option<String> {
    let text = |why: &str| Some(format!("{name:?} is no NVMe qualified name: {why}"));
    if name.len() > NQN_BYTES_MAX {
        return text("it is longer than 223 bytes");
    }
    if name.bytes().any(|byte| !byte.is_ascii_graphic()) {
        return text("only printable ASCII without spaces is allowed here");
    }
    let Some((date, rest)) = name.strip_prefix("nqn.").and_then(|rest| rest.split_once('.')) else {
        return text("it begins with nqn.YYYY-MM.DOMAIN, such as nqn.2014-08.org.example:disk");
    };
    let is_digits = |text: &str, len| text.len() == len && text.bytes().all(|b| b.is_ascii_digit());
    let is_date = date.split_once('-').is_some_and(|(y, m)| is_digits(y, 4) && is_digits(m, 2));
    if !is_date || rest.is_empty() || rest.starts_with(':') {
        return text("it begins with nqn.YYYY-MM.DOMAIN, such as nqn.2014-08.org.example:disk");
    }
    None
}

#[cfg(test)]
mod tests {
    //! Goal: names that hosts would stumble over are refused; connections have a limit.
    //! Method: one name of each kind; all seats taken.

    use super::*;

    #[test]
    fn names() {
        let uuid = "nqn.2014-08.org.nvmexpress:uuid:01020304-0506-0708-090a-0b0c0d0e0f10";
        for name in [uuid, "nqn.2026-01.com.example:disk-1", "nqn.2026-01.example"] {
            assert_eq!(check_nqn(name), None, "{name}");
        }
        let long = format!("nqn.2026-01.example:{}", "x".repeat(204));
        for name in ["", "disk", "nqn.", "nqn.26-01.example", "nqn.2026-01.", "nqn.2026-01.:x"] {
            assert!(check_nqn(name).is_some(), "{name}");
        }
        for name in ["nqn.2026-01.exa mple", "nqn.2026-01.exämple", "nqn.2026-1x.example", &long] {
            assert!(check_nqn(name).is_some(), "{name}");
        }
    }

    #[test]
    fn seats_are_limited_and_given_back() {
        let house = Arc::new(House::default());
        let mut seats: Vec<Seat> = std::iter::from_fn(|| house.seat()).collect();
        assert_eq!(seats.len(), CONNECTIONS_MAX);
        seats.pop();
        assert!(house.seat().is_some());
    }

    #[test]
    fn controllers_have_numbers_of_their_own() {
        let house = House::default();
        assert_eq!((house.next_controller(), house.next_controller()), (1, 2));
        house.controllers.store(CONTROLLERS_END - 2, Ordering::Relaxed);
        assert_eq!((house.next_controller(), house.next_controller()), (CONTROLLERS_END - 1, 1));
    }
}
