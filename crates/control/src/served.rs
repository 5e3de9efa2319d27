//! Exports that run: the one place that starts front ends. Their calls wait for a reactor, so they
//! run beside the control plane's own thread.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_target::export::{Export, ExportError, Part, Place, Usage};
use ashlar_target::fuse::{self, FuseExport, FuseSpec};
use ashlar_target::handed::Handed;
use ashlar_target::limits::{Rate, RateLimits, Rates};
use ashlar_target::nbd::{NbdExport, NbdSpec};
use ashlar_target::nvme_tcp::{self, NvmeTcpExport, Ports};
use ashlar_target::secrets::Secrets;
use ashlar_target::ublk::{self, UblkExport, UblkSpec};
use ashlar_target::unix_socket::Access;
use ashlar_target::vhost::{DiskFacts, ExportSpec, VhostExport};

use crate::access::SocketAccess;
use crate::api::export::{ExportCounters, ExportLimits};
use crate::api::traffic::Traffic;
use crate::catalog::{KnownDisk, KnownExport};
use crate::engine::look;
use crate::front::Front;
use crate::refusal::{Answer, Refusal};
use crate::snapshot::traffic;

/// How an export does.
#[derive(Clone, Debug)]
pub struct ServedStatus {
    pub connected: bool,
    pub queues_active: u16,
    /// Of each reactor that serves it.
    pub queues_of_parts: Vec<u16>,
    pub counters: ExportCounters,
    pub traffic: Traffic,
    pub way: Option<String>,
    pub last_error: Option<String>,
}

/// An export that listens or serves a guest. Clones are one export.
#[derive(Clone)]
pub struct Served {
    cores: Vec<Sender>,
    limits: Arc<RateLimits>,
    /// `None` once it was stopped.
    export: Arc<Mutex<Owned>>,
    place: Option<Arc<dyn Place>>,
    /// What initiators were told last: see [`Label`].
    atomic_bytes: Arc<AtomicU32>,
    /// What was seen there last.
    lost: Arc<Mutex<Option<String>>>,
}

/// How a volume presents itself to initiators.
pub struct Label {
    /// Of the export.
    pub name: String,
    /// What initiators see as the disk's serial number.
    pub serial: String,
    /// Writes up to so many bytes are there as a whole after a power cut, or not at all.
    pub atomic_bytes: u32,
    /// Since when its drives have power; `None`: nobody knows.
    pub power: Option<PowerCycle>,
    /// See [`ExportSpec`].
    pub since: u64,
}

impl Served {
    /// The parts, at least one, take its queues in turn; the first is that of the reactor which has
    /// the volume. `handed`: what a process before left of it.
    pub async fn start(
        front: Front,
        label: Label,
        limits: ExportLimits,
        parts: Vec<Part>,
        ports: &Ports,
        handed: Option<Handed<OwnedFd>>,
    ) -> Answer<Served> {
        let cores = parts.iter().map(|part| part.core.clone()).collect();
        let (limits, ports) = (RateLimits::new(rates(limits)), ports.clone());
        let access = access(&front)?;
        let (its, atomic_bytes) = (limits.clone(), label.atomic_bytes);
        let started = beside(move || start(front, label, (its, access), parts, &ports, handed));
        let export = started.await?.map_err(refusal)?;
        Ok(Served::of(cores, limits, export, atomic_bytes))
    }

    fn of(
        cores: Vec<Sender>,
        limits: Arc<RateLimits>,
        export: Box<dyn Export>,
        atomic_bytes: u32,
    ) -> Served {
        let place = export.place();
        let export = Arc::new(Mutex::new(Some(export)));
        let atomic_bytes = Arc::new(AtomicU32::new(atomic_bytes));
        Served { cores, limits, export, place, atomic_bytes, lost: Arc::default() }
    }

    /// Listens for who will want a volume whose array is away: see [`VhostExport::wait`].
    pub async fn wait(
        name: &str,
        known: &KnownExport,
        since: u64,
        handed: Option<Handed<OwnedFd>>,
    ) -> Answer<Served> {
        let (Front::VhostUserBlk { socket, queues: queues_max, .. }, Some(disk)) =
            (known.front.clone(), known.disk)
        else {
            return Err(Refusal::conflict("nobody knows how large its volume is")
                .fix(format!("ashlar export delete {name}, and create it anew")));
        };
        let limits = RateLimits::new(rates(known.limits));
        let (name, serial, its) = (name.to_owned(), String::new(), limits.clone());
        let access = access(&known.front)?;
        let spec = ExportSpec { name, socket, access, queues_max, serial, limits: its, since };
        let KnownDisk { bytes, discard_bytes } = disk;
        let facts = DiskFacts { bytes, discard_bytes };
        let started = beside(move || VhostExport::wait(facts, spec, handed)).await?;
        Ok(Served::of(Vec::new(), limits, Box::new(started.map_err(refusal)?), 0))
    }

    /// Looks whether the export can be found, for [`Served::lost`]. Waits for the file system that
    /// its place is in, and keeps nobody else from the export meanwhile.
    pub async fn look_at_place(&self) {
        let Some(place) = self.place.clone() else { return };
        if let Ok(lost) = beside(move || place.lost()).await {
            *self.lost.lock().unwrap_or_else(PoisonError::into_inner) = lost;
        }
    }

    /// Why nobody new could find it at the last look.
    pub fn lost(&self) -> Option<String> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// See [`Export::usage`]. Waits for nobody; `None`: it is being asked something else, or was
    /// stopped.
    pub fn usage(&self) -> Option<Usage> {
        self.export.try_lock().ok()?.as_deref().map(Export::usage)
    }

    /// Holds at once, also for what waits.
    pub fn limit(&self, limits: ExportLimits) {
        self.limits.set(rates(limits));
    }

    /// Refused if it was stopped meanwhile, or a reactor does not answer.
    pub async fn status(&self) -> Answer<ServedStatus> {
        // The export would wait long for a reactor that hangs, and hold a thread meanwhile.
        for core in &self.cores {
            look(core, |_| ()).await?;
        }
        let export = self.export.clone();
        let status = beside(move || lock(&export).as_deref().and_then(status)).await?;
        status.ok_or_else(|| Refusal::failed("the export was stopped, or does not answer"))
    }

    /// The volume has grown.
    pub async fn resized(&self) -> Answer<()> {
        let export = self.export.clone();
        beside(move || lock(&export).iter().for_each(|export| export.resized())).await
    }

    /// So many bytes initiators were told last.
    pub fn atomic_bytes(&self) -> u32 {
        self.atomic_bytes.load(Ordering::Relaxed)
    }

    /// Writes up to so many bytes are atomic from now on.
    pub async fn set_atomic_bytes(&self, bytes: u32) -> Answer<()> {
        let export = self.export.clone();
        self.atomic_bytes.store(bytes, Ordering::Relaxed);
        beside(move || lock(&export).iter().for_each(|export| export.set_atomic_bytes(bytes))).await
    }

    /// Who may use it from now on, and what is proven by who connects.
    pub async fn set_access(&self, hosts: Vec<String>, secrets: Secrets) -> Answer<()> {
        let export = self.export.clone();
        let set = move |export: &mut Box<dyn Export>| export.set_access(&hosts, &secrets);
        beside(move || lock(&export).as_mut().map_or(Ok(()), set)).await?.map_err(refusal)
    }

    /// What speaks against ending the export by what it says itself: whether somebody is connected.
    /// One that does not answer may have a user.
    pub async fn used(&self) -> Option<String> {
        usage(self.status().await.map(|its| its.connected))
    }

    /// See [`Export::will_stop`].
    pub async fn will_stop(&self) {
        let export = self.export.clone();
        let told = beside(move || lock(&export).iter().for_each(|export| export.will_stop()));
        if let Err(refusal) = told.await {
            tracing::error!("an export does not stop in order: {}", refusal.error);
        }
    }

    /// Finishes what is under way and leaves the rest to the next process; `None`: it was stopped.
    pub async fn hand_over(&self) -> Option<Handed<OwnedFd>> {
        let export = self.export.clone();
        beside(move || taken(&export).and_then(|its| its.hand_over())).await.ok().flatten()
    }

    /// The same where another process comes only later, if at all.
    pub async fn pause(&self) {
        let export = self.export.clone();
        let left = beside(move || taken(&export).map(|its| its.pause()));
        if let Err(refusal) = left.await {
            tracing::error!("an export did not stop in order: {}", refusal.error);
        }
    }

    /// Finishes what is under way and closes the socket.
    pub async fn stop(&self) {
        let export = self.export.clone();
        let stopped = beside(move || drop(taken(&export)));
        if let Err(refusal) = stopped.await {
            tracing::error!("an export did not stop in order: {}", refusal.error);
        }
    }
}

fn start(
    front: Front,
    label: Label,
    (limits, access): (Arc<RateLimits>, Access),
    parts: Vec<Part>,
    ports: &Ports,
    handed: Option<Handed<OwnedFd>>,
) -> Result<Box<dyn Export>, ExportError> {
    let Label { name, serial, atomic_bytes, power, since } = label;
    match front {
        Front::NvmeTcp { listen, nqn, nsid, hosts, secrets, queues } => {
            let spec = nvme_tcp::ExportSpec {
                name,
                listen,
                subsystem: nqn,
                namespace: Some(nsid),
                hosts,
                secrets: secrets.of_target(),
                queues_max: queues,
                atomic_bytes,
                power,
                limits,
            };
            Ok(Box::new(NvmeTcpExport::start(ports, parts, spec)?))
        }
        Front::VhostUserBlk { socket, queues: queues_max, .. } => {
            let spec = ExportSpec { name, socket, access, queues_max, serial, limits, since };
            Ok(Box::new(match handed {
                Some(handed) => VhostExport::resume(parts, spec, handed)?,
                None => VhostExport::start(parts, spec)?,
            }))
        }
        Front::Nbd { socket, listen, .. } => {
            let spec = NbdSpec { name, socket, access, listen, limits };
            Ok(Box::new(NbdExport::start(parts, spec)?))
        }
        Front::Fuse { file } => {
            let spec = FuseSpec { name, path: file, may_ring: true, limits };
            Ok(Box::new(FuseExport::start(parts, spec)?))
        }
        Front::Ublk { device, block_bytes, queues } => {
            let queues_max = queues;
            let spec = UblkSpec { name, id: device, queues_max, block_bytes, limits, since };
            Ok(Box::new(UblkExport::start(parts, spec)?))
        }
    }
}

/// Who may connect to a socket that is made now.
fn access(front: &Front) -> Answer<Access> {
    front.access().map_or_else(|| Ok(Access::default()), SocketAccess::access)
}

/// What of an export is there without a daemon, too: the number of its device, and its volume.
fn standing(known: &KnownExport) -> Option<(u32, [u8; 16])> {
    let Front::Ublk { device, .. } = known.front else { return None };
    Some((device, known.volume_uuid?.into_bytes()))
}

/// What a process before has left of an export that nobody serves any more goes.
pub fn forget(known: &KnownExport) -> Answer<()> {
    if let Front::Fuse { file } = &known.front {
        return fuse::forget(file).map_err(refusal);
    }
    let Some((device, volume)) = standing(known) else { return Ok(()) };
    ublk::forget(device, volume).map_err(refusal)
}

/// What speaks against ending an export of a kind that is there without a daemon, too.
pub fn user(known: &KnownExport) -> Answer<Option<String>> {
    let Some((device, volume)) = standing(known) else { return Ok(None) };
    ublk::user(device, volume).map_err(refusal)
}

/// See [`Served::used`].
fn usage(connected: Answer<bool>) -> Option<String> {
    match connected {
        Ok(true) => Some("is used".to_owned()),
        Ok(false) => None,
        Err(refusal) => Some(format!("may be used ({})", refusal.error)),
    }
}

/// Whether there is something of an export that outlives a daemon.
pub fn is_standing(known: &KnownExport) -> Answer<bool> {
    let Some((device, volume)) = standing(known) else { return Ok(false) };
    ublk::is_standing(device, volume).map_err(refusal)
}

fn rates(limits: ExportLimits) -> Rates {
    let rate =
        |requests_per_second, bytes_per_second| Rate { requests_per_second, bytes_per_second };
    Rates {
        read: rate(limits.read_iops, limits.read_bytes_per_second),
        write: rate(limits.write_iops, limits.write_bytes_per_second),
        burst: Duration::from_secs(limits.burst_s.into()),
    }
}

type Owned = Option<Box<dyn Export>>;

fn lock(export: &Mutex<Owned>) -> MutexGuard<'_, Owned> {
    export.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Nobody finds it there any more.
fn taken(export: &Mutex<Owned>) -> Owned {
    lock(export).take()
}

fn status(export: &dyn Export) -> Option<ServedStatus> {
    let status = export.status()?;
    let counters = status.counters;
    Some(ServedStatus {
        connected: status.connected,
        queues_active: status.queues_active(),
        queues_of_parts: status.queues_of_parts,
        counters: ExportCounters {
            reads: counters.reads,
            read_bytes: counters.read_bytes,
            writes: counters.writes,
            write_bytes: counters.write_bytes,
            flushes: counters.flushes,
            discards: counters.discards,
            errors: counters.errors,
            limited: counters.limited,
        },
        traffic: traffic(&status.traffic),
        way: status.way,
        last_error: status.last_error,
    })
}

/// Runs what may wait for a reactor or a file system where nobody else waits for it.
pub async fn beside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Answer<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.map_err(|error| Refusal::failed(error.to_string()))
}

fn refusal(error: ExportError) -> Refusal {
    let text = error.to_string();
    // Where it was to listen.
    let may_pass = matches!(
        error,
        ExportError::Busy(_)
            | ExportError::Socket { .. }
            | ExportError::Address { .. }
            | ExportError::Access { .. }
            | ExportError::NotSocket(_)
            | ExportError::File(_)
    );
    let refusal = match error {
        ExportError::Spec(_) => Refusal::invalid(text),
        ExportError::Busy(_) => {
            Refusal::conflict(text).fix("end that process, or choose another --path")
        }
        ExportError::NotSocket(_) => {
            Refusal::conflict(text).fix("move it away, or choose another --path")
        }
        ExportError::File(_) => Refusal::failed(text),
        ExportError::Held(_) => {
            Refusal::conflict(text).fix("end that process; if it is this daemon, start that again")
        }
        ExportError::Access { .. } => {
            Refusal::failed(text).fix("run the daemon as root, or choose a group of its user")
        }
        ExportError::Address { .. } => {
            Refusal::failed(text).fix("choose an address of this host that is free")
        }
        ExportError::Unheard => Refusal::failed(text).fix(
            "`ashlar status` says which does not answer; `ashlar export set NAME --host NQN` of \
                 one that stays waits for it once more",
        ),
        ExportError::Socket { .. } | ExportError::Thread(_) | ExportError::NoVolume => {
            Refusal::failed(text)
        }
    };
    Refusal { may_pass, ..refusal }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_export_that_does_not_answer_may_be_used() {
        assert_eq!(usage(Ok(false)), None);
        assert_eq!(usage(Ok(true)).as_deref(), Some("is used"));
        let silent = usage(Err(Refusal::failed("the reactor does not answer")));
        assert_eq!(silent.as_deref(), Some("may be used (the reactor does not answer)"));
    }
}
