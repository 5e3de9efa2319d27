//! How the control plane speaks with reactors: it sends a closure, awaits its answer, and gives
//! drives to them.

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::op::Device;
use ashlar_reactor::registry::Key;
use ashlar_reactor::traffic;
use ashlar_reactor::uring::gauges::Report;
use tokio::sync::oneshot;

use crate::api::drive::DriveModel;
use crate::refusal::{Answer, Refusal};
use crate::size::Size;

/// How long a look at something may take before the reactor counts as stuck.
const LOOK_TIMEOUT: Duration = Duration::from_secs(2);

/// Sector size of drives that are memory.
pub const MEMORY_SECTOR_BYTES: u32 = 512;

/// Runs `job` as a task of the reactor and returns its result. The task goes on if the caller
/// stops to wait.
pub async fn call<T: Send + 'static>(
    core: &Sender,
    job: impl AsyncFnOnce(Reactor) -> T + Send + 'static,
) -> Answer<T> {
    post(core, job, |_, _| ())?.await.map_err(|_| stopped())
}

/// `undo`: what becomes of the result where nobody waits for it any more.
fn post<T: Send + 'static>(
    core: &Sender,
    job: impl AsyncFnOnce(Reactor) -> T + Send + 'static,
    undo: impl FnOnce(&Reactor, T) + Send + 'static,
) -> Answer<oneshot::Receiver<T>> {
    let (sender, answer) = oneshot::channel();
    let letter = move |reactor: &Reactor| {
        let its = reactor.clone();
        reactor.spawn(async move {
            if let Err(result) = sender.send(job(its.clone()).await) {
                undo(&its, result);
            }
        });
    };
    core.send(letter).map_err(|_| stopped())?;
    Ok(answer)
}

fn stopped() -> Refusal {
    Refusal::failed("the reactor has stopped").fix("start the daemon again")
}

/// Like [`call`] for what is done at once: a reactor that does not answer soon is reported.
pub async fn look<T: Send + 'static>(
    core: &Sender,
    job: impl FnOnce(&Reactor) -> T + Send + 'static,
) -> Answer<T> {
    look_or_undo(core, job, |_, _| ()).await
}

/// The same of what nobody would know of after an error: what is done too late is undone.
pub async fn look_or_undo<T: Send + 'static>(
    core: &Sender,
    job: impl FnOnce(&Reactor) -> T + Send + 'static,
    undo: impl FnOnce(&Reactor, T) + Send + 'static,
) -> Answer<T> {
    let mut answer = post(core, async move |reactor| job(&reactor), undo)?;
    match tokio::time::timeout(LOOK_TIMEOUT, &mut answer).await {
        Ok(answer) => answer.map_err(|_| stopped()),
        Err(_) => {
            answer.close();
            // In the last moment: from now on it would be undone.
            if let Ok(result) = answer.try_recv() {
                return Ok(result);
            }
            Err(silent())
        }
    }
}

/// What is said of a reactor that does not answer.
pub fn silent() -> Refusal {
    let silent = format!("its reactor has not answered for {LOOK_TIMEOUT:?}");
    let refusal = Refusal::failed(silent).fix("see the daemon's log; a drive may hang");
    Refusal { may_pass: true, ..refusal }
}

/// A reactor at one moment.
pub struct CoreReport {
    /// What it did, and how it serves its devices.
    pub gauges: Report,
    /// What its exports were asked for.
    pub traffic: traffic::Report,
}

pub fn report(core: &Core) -> impl Future<Output = Answer<CoreReport>> + Send + 'static {
    let (sender, gauges) = (core.sender().clone(), core.gauges());
    async move {
        let found = look(&sender, move |reactor| {
            let (gauges, now) = (reactor.get(gauges)?, reactor.now());
            Some(CoreReport { gauges: gauges.report(now), traffic: reactor.traffic().report(now) })
        });
        Ok(found.await?.expect("published for as long as the reactor runs"))
    }
}

/// Refuses drives of memory that the system has no room for, if it says what it has. The fix is
/// the caller's.
pub fn check_room(bytes: u64) -> Answer<()> {
    match memory_available() {
        Some(free) if bytes > free => Err(Refusal::no_space(format!(
            "{} of memory do not fit: {} free",
            Size(bytes),
            Size(free)
        ))),
        Some(_) | None => Ok(()),
    }
}

/// Bytes that the system can give to drives of memory; `None`: it does not say.
fn memory_available() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// Where a reactor gets a drive from.
pub enum Origin {
    File {
        device: Device,
        limits: Limits,
    },
    /// New memory, all zero.
    Memory(Memory),
    /// Memory that the reactor keeps. A drive that was pulled is made anew, all zero.
    Kept {
        key: Key<Drive>,
        memory: Memory,
    },
}

/// Memory that serves as a drive.
#[derive(Clone, Copy, Debug)]
pub enum Memory {
    Ram { bytes: u64 },
    Model(DriveModel),
}

impl Memory {
    pub fn bytes(self) -> u64 {
        match self {
            Memory::Ram { bytes } | Memory::Model(DriveModel { bytes, .. }) => bytes,
        }
    }

    fn device(self) -> Device {
        match self {
            Memory::Ram { bytes } => Device::Ram { bytes },
            Memory::Model(model) => Device::Model {
                bytes: model.bytes,
                iops: model.iops,
                bytes_per_second: model.megabytes_per_second.saturating_mul(1_000_000),
                latency: Duration::from_micros(model.latency_us),
            },
        }
    }
}

/// A drive that a reactor shall have.
pub struct Seed {
    pub name: String,
    pub origin: Origin,
}

/// Names and keys of drives that the reactor keeps from now on: their content is their memory.
pub type Kept = Vec<(String, Key<Drive>)>;

/// Makes the drives, on their reactor.
pub fn plant(reactor: &Reactor, seeds: Vec<Seed>) -> (Vec<Rc<Drive>>, Kept) {
    let (mut drives, mut kept) = (Vec::new(), Vec::new());
    for Seed { name, origin } in seeds {
        let drive = match origin {
            Origin::File { device, limits } => Drive::new(reactor, device, limits, &name),
            Origin::Memory(memory) => plant_memory(reactor, name, memory, &mut kept),
            Origin::Kept { key, memory } => match reactor.get(key) {
                Some(drive) if drive.is_alive() => drive,
                Some(_) | None => {
                    drop(reactor.withdraw(key));
                    plant_memory(reactor, name, memory, &mut kept)
                }
            },
        };
        drives.push(drive);
    }
    (drives, kept)
}

fn plant_memory(reactor: &Reactor, name: String, memory: Memory, kept: &mut Kept) -> Rc<Drive> {
    let bytes = memory.bytes();
    let limits = Limits { bytes, sector_bytes: MEMORY_SECTOR_BYTES, zeroes_cheaply: true };
    let drive = Drive::new(reactor, memory.device(), limits, &name);
    kept.push((name, reactor.publish(drive.clone())));
    drive
}

/// Lets a kept memory drive go, and its content with it.
pub async fn forget(core: &Sender, key: Key<Drive>) -> Answer<()> {
    call(core, async move |reactor| drop(reactor.withdraw(key))).await
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;

    #[tokio::test]
    async fn what_a_reactor_does_too_late_is_undone() {
        let core = Core::start(0, Duration::ZERO).unwrap();
        let (end, hangs) = mpsc::channel::<()>();
        core.sender().send(move |_| assert!(hangs.recv().is_err())).unwrap();
        let (tell, told) = mpsc::channel();
        let publish = move |reactor: &Reactor| {
            let key = reactor.publish(Rc::new(7));
            tell.send(key).unwrap();
            key
        };
        let withdraw = |reactor: &Reactor, key| drop(reactor.withdraw(key));
        let refusal = look_or_undo(core.sender(), publish.clone(), withdraw).await.unwrap_err();
        assert!(refusal.may_pass && refusal.error.contains("has not answered"), "{refusal}");
        drop(end);
        let is_there = |key| call(core.sender(), async move |reactor| reactor.get(key).is_some());
        assert_eq!(is_there(told.recv().unwrap()).await, Ok(false));
        let key = call(core.sender(), async move |reactor| publish(&reactor)).await.unwrap();
        assert_eq!(is_there(key).await, Ok(true));
    }
}
