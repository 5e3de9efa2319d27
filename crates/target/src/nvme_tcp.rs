//! NVMe/TCP: volumes as namespaces of NVMe subsystems, for hosts on the network.
//!
//! ```text
//! host ── TCP ── port ── handshake ═ letter ═► connection ── admin, io ── namespace ── disk
//!                 │                                 └ inbox, transfers, outbox
//!                 └ subsystem ── controllers            branch: what a reactor has of a subsystem
//! ```
//!
//! An export is one namespace. Exports of one name (NQN) at one address are the namespaces of one
//! subsystem; each host sees those that it may. Threads accept connections and set them up
//! ([`port`], [`handshake`]), and hosts prove who they are ([`authentication`]); from then on a
//! connection, which is one queue, lives on a reactor ([`connection`]): the admin queue on the
//! first, I/O queues on all in turn.
//!
//! Modules from lowest to highest; a module uses only those above it in this list (`branch`,
//! `connection`, `authentication`, `port` and `handshake` know each other).
//!
//! Protocol: NVMe 1.4 over TCP Transport 1.0, with header and data digests, and DH-HMAC-CHAP of
//! NVMe 2.0. Not here: TLS, fused commands, reservations, ANA.

mod page;
mod inbox;
mod transfers;
mod received;
mod outbox;
mod identify;
mod log_page;
mod events;
mod namespace;
mod controller;
mod admin;
mod io;
mod connection;
mod branch;
mod wire;
mod authentication;
mod handshake;
mod port;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;

use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::nvme::fabrics::{DISCOVERY_NQN, padded};
use ashlar_reactor::nvme::power_cycle::PowerCycle;

pub use crate::nvme_tcp::identify::NAMESPACES_MAX;
pub use crate::nvme_tcp::port::{Coming, SUBSYSTEMS_MAX, check_nqn};

use crate::disk::{Disk, PARTS_MAX, SERIAL_BYTES};
use crate::export::{Export, ExportError, ExportStatus, Part, check_count};
use crate::limits::RateLimits;
use crate::line::{Line, Lines};
use crate::nvme_tcp::branch::Branch;
use crate::nvme_tcp::namespace::{Namespace, Tally};
use crate::nvme_tcp::port::{House, Port, Subsystem};
use crate::secrets::Secrets;

/// Most I/O queues of one controller.
pub const QUEUES_MAX: u16 = 64;
/// Most hosts that an export names.
pub const HOSTS_MAX: usize = 1024;

/// How a volume shall be offered.
#[derive(Clone, Debug)]
pub struct ExportSpec {
    pub name: String,
    pub listen: SocketAddr,
    /// The subsystem's name.
    pub subsystem: String,
    /// Which namespace of the subsystem it is: 1 to [`NAMESPACES_MAX`]. `None`: the first that is
    /// free.
    pub namespace: Option<u32>,
    /// The hosts that may see it; none: any.
    pub hosts: Vec<String>,
    /// What has to be proven, in all of the subsystem; each host of these is one of `hosts`. What
    /// the subsystem knows of other hosts stays, and of these it goes when none of its namespaces
    /// is theirs any more.
    pub secrets: Secrets,
    /// Most I/O queues of one host: 1 to [`QUEUES_MAX`].
    pub queues_max: u16,
    /// Writes up to so many bytes are there as a whole after a power cut, or not at all.
    pub atomic_bytes: u32,
    /// `None`: nobody knows when its drives have lost power.
    pub power: Option<PowerCycle>,
    pub limits: Arc<RateLimits>,
}

/// All ports of this process.
#[derive(Clone, Default)]
pub struct Ports(Arc<AllPorts>);

#[derive(Default)]
struct AllPorts {
    house: Arc<House>,
    /// Held over changes: one at a time.
    open: Mutex<BTreeMap<SocketAddr, Open>>,
}

struct Open {
    port: Arc<Port>,
    thread: JoinHandle<()>,
}

impl Ports {
    /// Before the first namespace of a subsystem is started, of each that shall be there with it.
    pub fn coming(&self, listen: SocketAddr, subsystem: &str) -> Coming {
        self.0.house.coming((listen, subsystem.to_owned()))
    }

    fn open(&self) -> MutexGuard<'_, BTreeMap<SocketAddr, Open>> {
        self.0.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One volume as a namespace of a subsystem.
pub struct NvmeTcpExport {
    spec: ExportSpec,
    namespace: u32,
    ports: Ports,
    lines: Lines<Branch>,
    /// All reactors go by the hosts of `spec`.
    heard: bool,
}

impl NvmeTcpExport {
    /// Offers a volume at an address, beside what `ports` offers there already. The parts, at least
    /// one, take the queues of hosts in turn; the first is that of the reactor which has the
    /// volume. All namespaces of a subsystem are served by the same reactors.
    pub fn start(
        ports: &Ports,
        parts: Vec<Part>,
        spec: ExportSpec,
    ) -> Result<NvmeTcpExport, ExportError> {
        let count = check(&spec, parts.len())?;
        let mut spec = spec;
        // As they are looked for.
        spec.hosts.sort();
        let mut open = ports.open();
        let address = listen(ports, &mut open, spec.listen)?;
        let port = open[&address].port.clone();
        let started = add(&port, parts, count, &spec);
        close_if_unused(&mut open, address);
        let (namespace, lines) = started?;
        drop(open);
        let spec = ExportSpec { listen: address, ..spec };
        let ports = ports.clone();
        let export = NvmeTcpExport { spec, namespace, ports, lines, heard: true };
        export.announce();
        Ok(export)
    }

    fn announce(&self) {
        self.announce_to(&self.spec.hosts);
    }

    /// Hosts are told when all reactors know what there is to be known.
    fn announce_to(&self, hosts: &[String]) {
        let (id, hosts) = (self.namespace, Arc::<[String]>::from(hosts));
        if self.lines.ask_all(move |branch| branch.announce(id, &hosts)).is_err() {
            let export = &self.spec.name;
            tracing::warn!(export, "a reactor does not tell hosts what has changed");
        }
    }

    /// With the address and the port that were found.
    pub fn spec(&self) -> &ExportSpec {
        &self.spec
    }

    /// Who was refused last by its subsystem, and was not let in since.
    fn refused(&self) -> Option<String> {
        // Held while another export stops: nobody waits for that here.
        let open = self.ports.0.open.try_lock().ok()?;
        let inner = open.get(&self.spec.listen)?.port.inner();
        let (host, why) = inner.subsystems.get(&self.spec.subsystem)?.refused.as_ref()?;
        // Hosts name themselves: what a terminal would obey is told by its number.
        Some(format!("host {host:?} was refused: {why}"))
    }

    /// Which namespace of its subsystem it is.
    pub fn namespace(&self) -> u32 {
        self.namespace
    }
}

impl Export for NvmeTcpExport {
    fn status(&self) -> Option<ExportStatus> {
        let id = self.namespace;
        let parts = self.lines.ask_all(move |branch| branch.status(id)).ok()?;
        let mut status = ExportStatus::of(parts.into_iter().collect::<Option<_>>()?);
        status.last_error = status.last_error.or_else(|| self.refused());
        Some(status)
    }

    fn resized(&self) {
        let id = self.namespace;
        let look = move |branch: Rc<Branch>| async move { branch.look(id).await };
        if self.lines.ask_all_and_wait(look).is_err() {
            let export = &self.spec.name;
            tracing::warn!(export, "a reactor does not say how large its volume is");
        }
        self.announce();
    }

    fn set_access(&mut self, hosts: &[String], secrets: &Secrets) -> Result<(), ExportError> {
        let mut hosts = hosts.to_vec();
        hosts.sort();
        let is_other = !self.heard || hosts != self.spec.hosts;
        let before = std::mem::replace(&mut self.spec.hosts, hosts.clone());
        {
            let open = self.ports.open();
            let Some(its) = open.get(&self.spec.listen) else { return Ok(()) };
            let mut inner = its.port.inner();
            inner.generation += u64::from(is_other);
            if let Some(subsystem) = inner.subsystems.get_mut(&self.spec.subsystem) {
                subsystem.set_access(self.namespace, &hosts, secrets);
            }
        }
        if !is_other {
            return Ok(());
        }
        let (id, all) = (self.namespace, Arc::<[String]>::from(hosts.clone()));
        let set = move |branch: Rc<Branch>| {
            let all = all.to_vec();
            async move { branch.set_hosts(id, all).await }
        };
        self.heard = false;
        self.lines.ask_all_and_wait(set).map_err(|_| ExportError::Unheard)?;
        self.heard = true;
        self.announce_to(&who_sees(before, hosts));
        Ok(())
    }

    fn set_atomic_bytes(&self, bytes: u32) {
        let id = self.namespace;
        match self.lines.ask_all(move |branch| branch.set_atomic_bytes(id, bytes)) {
            Ok(changed) if !changed.contains(&true) => return,
            Ok(_) => {}
            Err(_) => {
                let export = &self.spec.name;
                tracing::warn!(export, "a reactor does not hear how large atomic writes are");
            }
        }
        self.announce();
    }

    fn will_stop(&self) {
        let open = self.ports.open();
        let Some(its) = open.get(&self.spec.listen) else { return };
        let mut inner = its.port.inner();
        if let Some(subsystem) = inner.subsystems.get_mut(&self.spec.subsystem) {
            subsystem.will_remove_namespace(self.namespace);
            // It may be one that no host is told of any more.
            inner.generation += 1;
        }
    }
}

/// Hosts that see a namespace before or after a change of who does, in order; none: any.
fn who_sees(before: Vec<String>, after: Vec<String>) -> Vec<String> {
    if before.is_empty() || after.is_empty() {
        return Vec::new();
    }
    let mut both = [before, after].concat();
    both.sort();
    both
}

/// A namespace goes. Hosts that keep others are told; if it was the last, all are cut off before
/// any of them finds that it is missing.
impl Drop for NvmeTcpExport {
    fn drop(&mut self) {
        let (export, address) = (&self.spec.name, self.spec.listen);
        let mut open = self.ports.open();
        let Some(port) = open.get(&address).map(|its| its.port.clone()) else { return };
        let emptied = {
            let mut inner = port.inner();
            inner.generation += 1;
            let subsystem = inner.subsystems.get_mut(&self.spec.subsystem);
            let left = subsystem.map(|its| {
                its.remove_namespace(self.namespace);
                its.namespaces.len()
            });
            // Nobody connects to it any more.
            (left == Some(0)).then(|| inner.subsystems.remove(&self.spec.subsystem)).flatten()
        };
        if let Some(subsystem) = &emptied {
            subsystem.controllers.iter().for_each(|its| its.end());
            let close = |branch: Rc<Branch>| async move { branch.close().await };
            if subsystem.lines.ask_all_and_wait(close).is_err() {
                tracing::error!(export, "connections are still there, and the export ends");
            }
        }
        let id = self.namespace;
        let remove = move |branch: Rc<Branch>| async move { branch.remove(id).await };
        if self.lines.ask_all_and_wait(remove).is_err() {
            tracing::error!(export, "requests are still under way, and the export ends");
        }
        match emptied {
            Some(subsystem) => subsystem.lines.withdraw(),
            None => self.announce(),
        }
        close_if_unused(&mut open, address);
    }
}

fn check(spec: &ExportSpec, parts: usize) -> Result<u16, ExportError> {
    let refuse = |text: String| Err(ExportError::Spec(text));
    let count = check_count(parts, PARTS_MAX, "reactors")?;
    check_count(spec.queues_max.into(), QUEUES_MAX, "queues")?;
    if spec.namespace.is_some_and(|id| !(1..=NAMESPACES_MAX).contains(&id)) {
        return refuse(format!("namespaces are numbered 1 to {NAMESPACES_MAX}"));
    }
    if spec.hosts.len() > HOSTS_MAX {
        return refuse(format!("{} hosts; {HOSTS_MAX} are possible", spec.hosts.len()));
    }
    let is_stranger = |name: &&String| !spec.hosts.is_empty() && !spec.hosts.contains(name);
    if let Some(host) = spec.secrets.hosts.keys().find(is_stranger) {
        return refuse(format!("{host} has a secret, and is none of the hosts that may connect"));
    }
    if spec.subsystem == DISCOVERY_NQN {
        return refuse(format!("{DISCOVERY_NQN} is the discovery service; choose another name"));
    }
    let mut names = std::iter::once(&spec.subsystem).chain(&spec.hosts);
    match names.find_map(|name| check_nqn(name)) {
        Some(why) => refuse(why),
        None => Ok(count),
    }
}

/// Listens at an address, if nobody here does yet; returns the one that was found.
fn listen(
    ports: &Ports,
    open: &mut BTreeMap<SocketAddr, Open>,
    address: SocketAddr,
) -> Result<SocketAddr, ExportError> {
    if open.contains_key(&address) {
        return Ok(address);
    }
    let failed = |error| ExportError::Address { address, error };
    let port = Port::bind(address, &ports.0.house).map_err(failed)?;
    let thread = port.start().map_err(ExportError::Thread)?;
    let found = port.address;
    open.insert(found, Open { port, thread });
    Ok(found)
}

fn close_if_unused(open: &mut BTreeMap<SocketAddr, Open>, address: SocketAddr) {
    let unused = |its: &Open| its.port.inner().subsystems.is_empty();
    if !open.get(&address).is_some_and(unused) {
        return;
    }
    if let Some(Open { port, thread }) = open.remove(&address) {
        port.stop(thread);
    }
}

/// Adds a namespace of `count` parts to a subsystem, which is made if there is none.
fn add(
    port: &Port,
    parts: Vec<Part>,
    count: u16,
    spec: &ExportSpec,
) -> Result<(u32, Lines<Branch>), ExportError> {
    let cores: Vec<Sender> = parts.iter().map(|part| part.core.clone()).collect();
    let (id, known) = place(port, spec, &cores)?;
    let lines = match &known {
        Some(known) => known.clone(),
        None => make_branches(&cores)?,
    };
    let before = require_proofs(port, spec, id);
    let tally = Tally::new(parts.len());
    for (index, part) in parts.into_iter().enumerate() {
        let line = line_of(port, spec, &lines, &cores, &part.core);
        let add = AddNamespace { id, part: index, parts: count, tally: tally.clone() };
        if !add.to(line, part, spec) {
            let remove = move |branch: Rc<Branch>| async move { branch.remove(id).await };
            let _ = lines.ask_all_and_wait(remove);
            match before {
                Some(before) => forget(port, spec, id, before),
                None => lines.withdraw(),
            }
            return Err(ExportError::NoVolume);
        }
    }
    let mut inner = port.inner();
    inner.generation += 1;
    let its_lines = lines.clone();
    let subsystem = inner.subsystems.entry(spec.subsystem.clone()).or_insert_with(|| Subsystem {
        serial: padded(&serial(&spec.subsystem)),
        lines: its_lines,
        cores,
        queues_max: spec.queues_max,
        namespaces: BTreeMap::new(),
        going: BTreeSet::new(),
        secrets: Secrets::default(),
        controllers: Vec::new(),
        refused: None,
    });
    subsystem.queues_max = subsystem.queues_max.max(spec.queues_max);
    if before.is_none() {
        subsystem.add_namespace(id, &spec.hosts, &spec.secrets);
    }
    Ok((id, lines))
}

/// Has a subsystem that is there ask for the proofs of a new namespace before any queue reaches
/// that; the secrets of before. `None`: there is no such subsystem yet, and nobody is connected.
fn require_proofs(port: &Port, spec: &ExportSpec, id: u32) -> Option<Secrets> {
    let mut inner = port.inner();
    let subsystem = inner.subsystems.get_mut(&spec.subsystem)?;
    let before = subsystem.secrets.clone();
    subsystem.add_namespace(id, &spec.hosts, &spec.secrets);
    Some(before)
}

/// Takes back what [`require_proofs`] did.
fn forget(port: &Port, spec: &ExportSpec, id: u32, before: Secrets) {
    if let Some(subsystem) = port.inner().subsystems.get_mut(&spec.subsystem) {
        subsystem.remove_namespace(id);
        subsystem.secrets = before;
    }
}

/// The number that a namespace gets, and the branches of its subsystem if there is one.
fn place(
    port: &Port,
    spec: &ExportSpec,
    cores: &[Sender],
) -> Result<(u32, Option<Lines<Branch>>), ExportError> {
    let inner = port.inner();
    let Some(subsystem) = inner.subsystems.get(&spec.subsystem) else {
        if inner.subsystems.len() == SUBSYSTEMS_MAX {
            let text = format!("there are {SUBSYSTEMS_MAX} subsystems at this address already");
            return Err(ExportError::Spec(text));
        }
        return Ok((spec.namespace.unwrap_or(1), None));
    };
    let is_free = |id: &u32| !subsystem.namespaces.contains_key(id);
    let id = match spec.namespace {
        Some(id) if is_free(&id) => id,
        Some(id) => {
            let text = format!("{} has a namespace {id} already", spec.subsystem);
            return Err(ExportError::Spec(text));
        }
        None => (1..=NAMESPACES_MAX).find(is_free).ok_or_else(|| {
            ExportError::Spec(format!("{} has {NAMESPACES_MAX} namespaces", spec.subsystem))
        })?,
    };
    let has = |all: &[Sender], one: &Sender| all.iter().any(|its| its.is_same(one));
    let same = subsystem.cores.len() == cores.len()
        && cores.iter().all(|core| has(&subsystem.cores, core));
    if !same {
        return Err(ExportError::Spec(format!(
            "the other namespaces of {} are served by other CPUs, and all must be by the same",
            spec.subsystem
        )));
    }
    Ok((id, Some(subsystem.lines.clone())))
}

fn make_branches(cores: &[Sender]) -> Result<Lines<Branch>, ExportError> {
    let make = |reactor: &Reactor| Some(Branch::new(reactor));
    Lines::open(cores.iter().map(|core| Line::open(core.clone(), make)))
}

/// The branch on a reactor. A subsystem that is there already may have them in another order.
fn line_of<'a>(
    port: &Port,
    spec: &ExportSpec,
    lines: &'a Lines<Branch>,
    cores: &[Sender],
    core: &Sender,
) -> &'a Line<Branch> {
    let inner = port.inner();
    let known = inner.subsystems.get(&spec.subsystem).map_or(cores, |its| &its.cores);
    let index = known.iter().position(|its| its.is_same(core));
    lines.of_ring(index.unwrap_or(0))
}

/// Of a part of an export.
struct AddNamespace {
    id: u32,
    part: usize,
    parts: u16,
    tally: Arc<Tally>,
}

impl AddNamespace {
    /// False: its reactor has stopped, or has no volume.
    fn to(self, line: &Line<Branch>, part: Part, spec: &ExportSpec) -> bool {
        let AddNamespace { id, part: index, parts, tally } = self;
        let (key, spec) = (part.volume, spec.clone());
        let added = line.ask(move |branch| {
            let Some(volume) = branch.reactor().get(key) else { return false };
            let serial = [0; SERIAL_BYTES];
            let disk = Disk::new(
                branch.reactor(),
                spec.name.clone(),
                volume,
                serial,
                parts,
                spec.limits.clone(),
            );
            branch.add(Namespace::new(id, disk, &spec, (tally, index)));
            true
        });
        added.unwrap_or(false)
    }
}

/// What hosts see as the serial number of a subsystem: it follows from its name.
pub fn serial(subsystem: &str) -> String {
    let hash = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc64Nvme, subsystem.as_bytes());
    format!("{hash:016x}")
}
