//! How the control plane speaks with reactors: it sends a closure, awaits its answer, and gives
//! drives to them.

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::op::Device;
use ashlar_reactor::registry::Key;
use tokio::sync::oneshot;

use crate::refusal::{Answer, Refusal};

/// How long a look at something may take before the reactor counts as stuck.
const LOOK_TIMEOUT: Duration = Duration::from_secs(5);

/// Sector size of RAM drives.
pub const RAM_SECTOR_BYTES: u32 = 512;

/// Runs `job` as a task of the reactor and returns its result. The task goes on if the caller
/// stops to wait.
pub async fn call<T: Send + 'static>(
    core: &Sender,
    job: impl AsyncFnOnce(Reactor) -> T + Send + 'static,
) -> Answer<T> {
    let (sender, answer) = oneshot::channel();
    let letter = move |reactor: &Reactor| {
        let its = reactor.clone();
        reactor.spawn(async move {
            let result = job(its).await;
            // Nobody may be waiting any more; the work is done all the same.
            let _ = sender.send(result);
        });
    };
    let stopped = || Refusal::failed("the reactor has stopped").fix("start the daemon again");
    core.send(letter).map_err(|_| stopped())?;
    answer.await.map_err(|_| stopped())
}

/// Like [`call`] for what is done at once: a reactor that does not answer soon is reported.
pub async fn look<T: Send + 'static>(
    core: &Sender,
    job: impl FnOnce(&Reactor) -> T + Send + 'static,
) -> Answer<T> {
    let looked = call(core, async move |reactor| job(&reactor));
    match tokio::time::timeout(LOOK_TIMEOUT, looked).await {
        Ok(answer) => answer,
        Err(_) => {
            Err(Refusal::failed(format!("its reactor has not answered for {LOOK_TIMEOUT:?}"))
                .fix("see the daemon's log; a drive may hang"))
        }
    }
}

/// Where a reactor gets a drive from.
pub enum Origin {
    File {
        device: Device,
        limits: Limits,
    },
    /// New memory, all zero.
    Ram {
        bytes: u64,
    },
    /// A RAM drive that the reactor keeps.
    Kept(Key<Drive>),
}

/// A drive that a reactor shall have.
pub struct Seed {
    pub name: String,
    pub origin: Origin,
}

/// Names and keys of RAM drives that the reactor keeps from now on: their content is their memory.
pub type Kept = Vec<(String, Key<Drive>)>;

/// Makes the drives, on their reactor.
pub fn plant(reactor: &Reactor, seeds: Vec<Seed>) -> (Vec<Rc<Drive>>, Kept) {
    let (mut drives, mut kept) = (Vec::new(), Vec::new());
    for Seed { name, origin } in seeds {
        let drive = match origin {
            Origin::File { device, limits } => Drive::new(reactor, device, limits, &name),
            Origin::Ram { bytes } => {
                let sector_bytes = RAM_SECTOR_BYTES;
                let limits = Limits { bytes, sector_bytes, zeroes_cheaply: true };
                let drive = Drive::new(reactor, Device::Ram { bytes }, limits, &name);
                kept.push((name, reactor.publish(drive.clone())));
                drive
            }
            Origin::Kept(key) => {
                reactor.get(key).expect("a kept drive is withdrawn only by `forget`")
            }
        };
        drives.push(drive);
    }
    (drives, kept)
}

/// Lets a kept RAM drive go, and its content with it.
pub async fn forget(core: &Sender, key: Key<Drive>) -> Answer<()> {
    call(core, async move |reactor| drop(reactor.withdraw(key))).await
}
