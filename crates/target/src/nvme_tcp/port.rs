//! An address where hosts connect: the subsystems that are reached there, and the thread that
//! accepts. Each connection is set up by a thread of its own ([`handshake`]), and lives on a
//! reactor from then on.
//!
//! [`handshake`]: crate::nvme_tcp::handshake

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::net::{IpAddr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use ashlar_format::units::to_usize;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::nvme::chap::Secret;
use ashlar_reactor::nvme::fabrics::NQN_BYTES_MAX;

use crate::line::{Lines, now};
use crate::nvme_tcp::branch::Branch;
use crate::nvme_tcp::connection::HELD_BYTES_MAX;
use crate::nvme_tcp::controller::Controller;
use crate::nvme_tcp::handshake::{self, Caller};
use crate::nvme_tcp::namespace::is_allowed;
use crate::secrets::Secrets;

/// Connections of all hosts that a machine has room for, whatever its size, and most of any.
const CONNECTIONS_MIN: usize = 1024;
const CONNECTIONS_MAX: usize = 8192;
/// The share of the machine's memory that all of them could fill, if each held what it may.
const MEMORY_SHARE: u64 = 8;
/// The share of all connections that a source may have as long as there is any.
const SOURCE_SHARE: usize = 8;
/// Connections of one port that are being set up at a time, and those from one source; more wait.
const HANDSHAKES_MAX: usize = 32;
const HANDSHAKES_OF_SOURCE_MAX: usize = 8;
/// Most subsystems of one port.
pub const SUBSYSTEMS_MAX: usize = 256;
/// Wait after a failed `accept`: it fails again at once while file descriptors are short.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);
/// Controllers that answer Connect with this number do not exist (CNTLID from FFF0h on).
const CONTROLLERS_END: u16 = 0xfff0;

/// Not that of another daemon, most likely. A host that still has a controller of one takes a new
/// one of the same subsystem with its number for that again, and refuses it (Linux does).
fn any_number() -> u16 {
    let [low, high, ..] = RandomState::new().build_hasher().finish().to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Where a connection comes from. Whoever has one address of IPv6 has all of its network (/64).
fn source(from: SocketAddr) -> IpAddr {
    match from.ip().to_canonical() {
        IpAddr::V6(ip) => Ipv6Addr::from_bits(ip.to_bits() & !u128::from(u64::MAX)).into(),
        IpAddr::V4(ip) => ip.into(),
    }
}

/// How many connections a machine of so much memory has room for.
fn connections_max(memory_bytes: u64) -> usize {
    let most = to_usize(memory_bytes / MEMORY_SHARE / HELD_BYTES_MAX);
    most.clamp(CONNECTIONS_MIN, CONNECTIONS_MAX)
}

/// Whether a source that has `its` of `all` connections may have one more: each may have as many as
/// are free: one takes half of them, of five that take them in turn each takes a sixth. An eighth
/// each may have as long as any is free, so that a host that has lost its connections gets them
/// back beside those that take what they can. Three leave some for whoever comes next, four need
/// not.
fn admits(its: usize, all: usize, max: usize) -> bool {
    all < max && (its < max / SOURCE_SHARE || its < max - all)
}

/// Where a subsystem is, and what it is called.
type Place = (SocketAddr, String);

/// What all ports share.
pub(crate) struct House {
    connections_max: usize,
    /// Connections by source.
    connections: Mutex<BTreeMap<IpAddr, usize>>,
    controllers: AtomicU16,
    /// How many namespaces are to come, of subsystems that are not complete.
    coming: Mutex<BTreeMap<Place, usize>>,
    /// Somebody works something out that takes milliseconds, for a host that nobody knows yet.
    working: Mutex<bool>,
    worked: Condvar,
}

impl Default for House {
    fn default() -> House {
        let its = rustix::system::sysinfo();
        House::of(connections_max(its.totalram.saturating_mul(its.mem_unit.into())))
    }
}

impl House {
    fn of(connections_max: usize) -> House {
        House {
            connections_max,
            connections: Mutex::default(),
            controllers: AtomicU16::new(any_number() % CONTROLLERS_END),
            coming: Mutex::default(),
            working: Mutex::default(),
            worked: Condvar::default(),
        }
    }

    fn connections(&self) -> MutexGuard<'_, BTreeMap<IpAddr, usize>> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn all_coming(&self) -> MutexGuard<'_, BTreeMap<Place, usize>> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A namespace of a subsystem is to come, until this is dropped.
    pub(crate) fn coming(self: &Arc<House>, place: Place) -> Coming {
        *self.all_coming().entry(place.clone()).or_default() += 1;
        Coming { house: self.clone(), place }
    }

    /// A place for one more connection, until it is dropped.
    pub(crate) fn seat(self: &Arc<House>, source: IpAddr) -> Option<Seat> {
        let mut connections = self.connections();
        let its = connections.get(&source).copied().unwrap_or_default();
        if !admits(its, connections.values().sum(), self.connections_max) {
            return None;
        }
        connections.insert(source, its + 1);
        Some(Seat { house: self.clone(), source })
    }

    /// The turn to work something out, until it is dropped; `None`: it has not come by `until`.
    pub(crate) fn turn(&self, until: Instant) -> Option<Turn<'_>> {
        let working = self.working.lock().unwrap_or_else(PoisonError::into_inner);
        let left = until.saturating_duration_since(now());
        let (mut working, _) = self
            .worked
            .wait_timeout_while(working, left, |working| *working)
            .unwrap_or_else(PoisonError::into_inner);
        if *working || now() >= until {
            return None;
        }
        *working = true;
        Some(Turn(self))
    }

    /// The number of a new controller: another one than all that live, unless thousands came since.
    fn next_controller(&self) -> u16 {
        let next = |last: u16| Some(if last + 1 < CONTROLLERS_END { last + 1 } else { 1 });
        match self.controllers.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next) {
            Ok(last) | Err(last) => next(last).unwrap_or(1),
        }
    }
}

/// One at a time.
pub(crate) struct Turn<'a>(&'a House);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.0.working.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.0.worked.notify_one();
    }
}

/// What is counted, and is none any more, has no entry.
fn one_less<K: Ord + Clone>(counts: &mut BTreeMap<K, usize>, key: &K) {
    let left = counts.get(key).copied().unwrap_or_default().saturating_sub(1);
    if left == 0 {
        counts.remove(key);
    } else {
        counts.insert(key.clone(), left);
    }
}

/// A namespace that is to come. Until it is there, or is known not to come now, no host connects to
/// its subsystem: it would take the disk for gone.
pub struct Coming {
    house: Arc<House>,
    place: Place,
}

impl Drop for Coming {
    fn drop(&mut self) {
        one_less(&mut self.house.all_coming(), &self.place);
    }
}

pub(crate) struct Seat {
    house: Arc<House>,
    source: IpAddr,
}

impl Drop for Seat {
    fn drop(&mut self) {
        one_less(&mut self.house.connections(), &self.source);
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
    /// By number, the hosts that may see it, in order; none: any.
    pub(crate) namespaces: BTreeMap<u32, Vec<String>>,
    /// Those that are about to go, all together.
    pub(crate) going: BTreeSet<u32>,
    /// Of all namespaces. One that goes takes no host's secret along while the host may connect.
    pub(crate) secrets: Secrets,
    pub(crate) controllers: Vec<Arc<Controller>>,
    /// The host that was refused last, and why.
    pub(crate) refused: Option<(String, String)>,
}

impl Subsystem {
    /// Whether a host finds a namespace here that stays.
    pub(crate) fn allows(&self, host: &str) -> bool {
        let mut staying = self.namespaces.iter().filter(|(id, _)| !self.going.contains(id));
        staying.any(|(_, hosts)| is_allowed(hosts, host))
    }

    /// A namespace is about to go, and others may be told to before the first of them does. A host
    /// that loses all it has is cut off: it waits, and connects again. If it heard of one after the
    /// other, it would take its disks for gone.
    pub(crate) fn will_remove_namespace(&mut self, id: u32) {
        let Some(hosts) = self.namespaces.get(&id) else { return };
        self.going.insert(id);
        let loses_all = |host: &str| is_allowed(hosts, host) && !self.allows(host);
        let cut_off = self.controllers.iter().filter(|its| loses_all(&its.its.host.nqn));
        cut_off.for_each(|its| its.end());
    }

    /// What a host has to know; `None`: it proves nothing.
    pub(crate) fn secret_of(&self, host: &str) -> Option<&Secret> {
        self.secrets.hosts.get(host)
    }

    /// One more namespace; what the others know of secrets stays.
    pub(crate) fn add_namespace(&mut self, id: u32, hosts: &[String], secrets: &Secrets) {
        self.namespaces.insert(id, hosts.to_vec());
        self.add_secrets(secrets);
    }

    pub(crate) fn remove_namespace(&mut self, id: u32) {
        self.namespaces.remove(&id);
        self.going.remove(&id);
        self.forget_strangers();
    }

    /// Of hosts that may see no namespace.
    fn forget_strangers(&mut self) {
        let namespaces = &self.namespaces;
        let is_left = |host: &str| namespaces.values().any(|its| is_allowed(its, host));
        self.secrets.hosts.retain(|host, _| is_left(host));
    }

    /// The hosts of a namespace from now on, in order, and what they have to prove, and the
    /// subsystem. A host that has none left is cut off.
    pub(crate) fn set_access(&mut self, id: u32, hosts: &[String], secrets: &Secrets) {
        self.namespaces.insert(id, hosts.to_vec());
        self.secrets.hosts.retain(|host, _| !is_allowed(hosts, host));
        self.secrets.subsystem = None;
        self.add_secrets(secrets);
        self.forget_strangers();
        let is_stranger = |its: &&Arc<Controller>| !self.allows(&its.its.host.nqn);
        self.controllers.iter().filter(is_stranger).for_each(|its| its.end());
    }

    fn add_secrets(&mut self, secrets: &Secrets) {
        self.secrets.hosts.extend(secrets.hosts.clone());
        self.secrets.subsystem = secrets.subsystem.clone().or(self.secrets.subsystem.take());
        self.end_unproven();
    }

    /// Ends the controllers of hosts that have to prove now who they are, and never did: they
    /// connect again, and do.
    fn end_unproven(&self) {
        let is_unproven = |its: &&Arc<Controller>| {
            !its.its.is_proven && self.secret_of(&its.its.host.nqn).is_some()
        };
        for controller in self.controllers.iter().filter(is_unproven) {
            tracing::info!(host = ?controller.its.host.nqn, "a host has to prove who it is");
            controller.end();
        }
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
    /// Connections that nobody sets up yet.
    waiting: VecDeque<Guest>,
    handshakes: Handshakes,
}

/// Who was accepted.
struct Guest {
    stream: TcpStream,
    from: SocketAddr,
    seat: Seat,
}

/// What is being set up: the other handle of each connection, and where it comes from.
#[derive(Default)]
struct Handshakes {
    last: u64,
    open: BTreeMap<u64, (IpAddr, TcpStream)>,
}

impl Handshakes {
    /// Whether there is room for one more from there.
    fn admits(&self, source: IpAddr) -> bool {
        let of_source = self.open.values().filter(|(its, _)| *its == source).count();
        self.open.len() < HANDSHAKES_MAX && of_source < HANDSHAKES_OF_SOURCE_MAX
    }

    /// The number of a new one.
    fn begin(&mut self, source: IpAddr, stream: TcpStream) -> u64 {
        self.last += 1;
        self.open.insert(self.last, (source, stream));
        self.last
    }
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

    /// Whether all namespaces of a subsystem are there that are to come.
    pub(crate) fn is_complete(&self, subsystem: &str) -> bool {
        !self.house.all_coming().contains_key(&(self.address, subsystem.to_owned()))
    }

    pub(crate) fn next_controller(&self) -> u16 {
        self.house.next_controller()
    }

    /// Ends the thread; who is being let in is turned away. No subsystem is left.
    pub(crate) fn stop(&self, thread: JoinHandle<()>) {
        let discovering = {
            let mut inner = self.inner();
            inner.stopping = true;
            inner.waiting.clear();
            inner.handshakes.open.values().for_each(|(_, stream)| hang_up(stream));
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
        let some = |inner: &mut Inner| !inner.handshakes.open.is_empty();
        let waited = self.handshake_ended.wait_while(self.inner(), some);
        drop(waited);
    }

    /// Has a connection set up, beside whatever else goes on.
    fn let_in(self: &Arc<Port>, stream: TcpStream, from: SocketAddr) {
        let Some(seat) = self.house.seat(source(from)) else {
            let (port, most) = (&self.address, self.house.connections_max);
            tracing::warn!(%port, %from, most, "a host was turned away: it has as many connections \
                as are free");
            return;
        };
        self.inner().waiting.push_back(Guest { stream, from, seat });
        self.let_in_waiting();
    }

    /// Begins to set up what may be: those of a source that has many under way wait, others not.
    fn let_in_waiting(self: &Arc<Port>) {
        while let Some((guest, number)) = self.next_guest() {
            let Guest { stream, from, seat } = guest;
            let ticket = Handshake { port: self.clone(), number };
            let setup = move || {
                let port = ticket.port.clone();
                let mut caller = None;
                let refused = handshake::shake_hands(&port, stream, seat, &mut caller).err();
                if let Some(why) = &refused {
                    let host = caller.as_ref().map(|its| &its.host);
                    tracing::warn!(port = %port.address, %from, host, %why, "a host was refused");
                }
                if let Some(caller) = caller {
                    port.note_caller(caller, refused.map(|why| why.to_string()));
                }
                drop(ticket);
                port.let_in_waiting();
            };
            let started = std::thread::Builder::new().name("nvme-tcp-connect".into()).spawn(setup);
            if let Err(error) = started {
                tracing::warn!(port = %self.address, %error, "a host could not be let in");
            }
        }
    }

    /// Whoever looks at an export sees who was refused last, until that one was let in.
    fn note_caller(&self, Caller { host, subsystem }: Caller, refused: Option<String>) {
        let mut inner = self.inner();
        let Some(its) = inner.subsystems.get_mut(&subsystem) else { return };
        match refused {
            Some(why) => its.refused = Some((host, why)),
            None => its.refused = its.refused.take().filter(|(refused, _)| *refused != host),
        }
    }

    fn next_guest(&self) -> Option<(Guest, u64)> {
        let mut inner = self.inner();
        loop {
            let admits = |its: &Guest| inner.handshakes.admits(its.seat.source);
            let at = inner.waiting.iter().position(admits).filter(|_| !inner.stopping)?;
            let guest = inner.waiting.remove(at)?;
            match guest.stream.try_clone() {
                Ok(stream) => {
                    let number = inner.handshakes.begin(guest.seat.source, stream);
                    return Some((guest, number));
                }
                Err(error) => {
                    let from = guest.from;
                    tracing::warn!(port = %self.address, %from, %error, "a host was not let in");
                }
            }
        }
    }
}

/// One of [`HANDSHAKES_MAX`].
struct Handshake {
    port: Arc<Port>,
    number: u64,
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.port.inner().handshakes.open.remove(&self.number);
        self.port.handshake_ended.notify_all();
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
        let house = Arc::new(House::of(1024));
        let from = |text: &str| source(text.parse().unwrap());
        let some =
            |source: IpAddr| -> Vec<Seat> { std::iter::from_fn(|| house.seat(source)).collect() };
        // Seven subsystems, of a host that has 64 queues of each.
        let mut seats = vec![some(from("192.0.2.1:1"))];
        assert_eq!(seats[0].len(), 512);
        seats.push(some(from("192.0.2.2:1")));
        assert_eq!(seats[1].len(), 256);
        seats.push(some(from("192.0.2.3:1")));
        assert_eq!(seats[2].len(), 128);
        // Room for two is left.
        let fourth = from("192.0.2.4:1");
        seats.push((0..126).map(|_| house.seat(fourth).unwrap()).collect());
        assert!((1..4).all(|i| house.seat(from(&format!("192.0.2.{i}:1"))).is_none()));
        // Addresses of one network of IPv6 are one source, and IPv4 is IPv4.
        let seat = house.seat(from("[2001:db8::1]:1")).unwrap();
        let last = house.seat(fourth).unwrap();
        assert!(house.seat(fourth).is_none() && house.seat(from("192.0.2.5:1")).is_none());
        assert_eq!(from("[2001:db8::2]:7"), seat.source);
        assert_ne!(from("[2001:db8:0:1::1]:1"), seat.source);
        assert_eq!(from("[::ffff:192.0.2.1]:1"), from("192.0.2.1:2"));
        drop((seat, last, seats));
        assert!(house.connections().is_empty());
    }

    #[test]
    fn machines_with_much_memory_have_room_for_more() {
        assert_eq!(connections_max(0), 1024);
        assert_eq!(connections_max(16 << 30), 1024);
        assert_eq!(connections_max(128 << 30), 2702, "as docs/NVME_TCP.md says");
        assert_eq!(connections_max(u64::MAX), 8192);
    }

    #[test]
    fn sources_that_take_what_they_can_in_turn_get_the_same() {
        for sources in 1..100 {
            let mut its = vec![0; sources];
            let all = |its: &[usize]| its.iter().sum();
            // In turn.
            while admits(its[0], all(&its), 1024) {
                for at in 0..sources {
                    its[at] += usize::from(admits(its[at], all(&its), 1024));
                }
            }
            let parts = if sources < 8 { sources + 1 } else { sources };
            let share = 1024 / parts;
            assert!(its.iter().all(|its| (share..=share + 1).contains(its)), "{its:?}");
            assert_eq!(all(&its) < 1024, sources < 8, "{its:?}");
            assert!(all(&its) <= 1024 && !its.iter().any(|its| admits(*its, 1024, 1024)));
        }
    }

    #[test]
    fn a_host_gets_back_what_it_had_beside_those_that_take_what_they_can() {
        let take = |all: &mut usize| {
            let mut its = 0;
            while admits(its, *all, 1024) {
                (its, *all) = (its + 1, *all + 1);
            }
            its
        };
        let mut all = 100;
        let others: Vec<usize> = (0..4).map(|_| take(&mut all)).collect();
        assert_eq!(others, [462, 231, 128, 103]);
        // Its network was away for a moment.
        all -= 100;
        assert!(others[..3].iter().all(|its| !admits(*its, all, 1024)));
        assert_eq!((take(&mut all), all), (100, 1024));
        assert!(!admits(0, all, 1024));
    }

    #[test]
    fn one_works_at_a_time_and_nobody_waits_for_ever() {
        let house = Arc::new(House::default());
        let late = now() + Duration::from_secs(30);
        let turn = house.turn(late).unwrap();
        assert!(house.turn(now() + Duration::from_millis(20)).is_none());
        let its = house.clone();
        let waiting = std::thread::spawn(move || its.turn(late).is_some());
        drop(turn);
        assert!(waiting.join().unwrap());
        assert!(house.turn(now()).is_none(), "it would be too late");
        assert!(house.turn(late).is_some());
    }

    #[test]
    fn controllers_have_numbers_of_their_own() {
        let house = House::default();
        let (first, second) = (house.next_controller(), house.next_controller());
        assert!((1..CONTROLLERS_END).contains(&first) && first != second);
        let others = std::iter::repeat_with(House::default).take(8);
        assert!(others.map(|its| its.next_controller()).any(|its| its.abs_diff(first) > 8));
        house.controllers.store(CONTROLLERS_END - 2, Ordering::Relaxed);
        assert_eq!((house.next_controller(), house.next_controller()), (CONTROLLERS_END - 1, 1));
    }
}
