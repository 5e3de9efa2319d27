//! Everything the daemon holds: drives, running arrays, exports; and the catalog of what shall be.
//!
//! Invariants:
//! - one change at a time (`Host::begin`), from its checks to its saved catalog;
//! - `state` is looked into for a moment only, never across an await, so a look never waits for a
//!   change;
//! - a change that is refused leaves everything as it was;
//! - consent to lose what a drive carries is not kept: it is used up at once, by the change that it
//!   came with. A name or a path may lead to another drive tomorrow.

mod access;
mod arrays;
mod cores;
mod cut;
mod deletion;
mod down;
mod drives;
mod elsewhere;
mod exports;
mod fitting;
mod grow;
mod histories;
mod members;
pub mod on_demand;
mod problems;
mod restore;
pub mod settings;
mod show;
mod spares;
pub mod translate;
mod upgrade;
mod volumes;
mod watch;
pub mod witness;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::{Arc, Mutex};

use ashlar_drive::drive::Drive;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::lease;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;
use ashlar_target::handed::Handed;
use ashlar_target::nvme_tcp::Ports;
use tokio::sync::mpsc::UnboundedSender;
use tokio::time::Instant;
use uuid::Uuid;

use crate::api::upgrade::Upgrades;
use crate::catalog::{Catalog, StateDirectory};
use crate::device::OpenDevice;
use crate::device::content::Content;
use crate::engine::{self, Memory};
use crate::history::Histories;
use crate::host::down::Down;
use crate::host::witness::Told;
use crate::placement;
use crate::refusal::{Answer, Refusal};
use crate::remote::Initiator;
use crate::served::Served;
use crate::snapshot::{ArraySnapshot, snapshot};
use crate::topology::{SYSTEM, Topology};

pub use crate::host::watch::{Seen, UNUSED_INTERVAL, WATCH_INTERVAL};

/// What an attached drive is made of.
#[derive(Clone)]
enum Medium {
    Device(Arc<OpenDevice>),
    /// `home`: the reactor that keeps the memory, once an array has used it.
    Memory {
        memory: Memory,
        home: Option<Home>,
    },
}

#[derive(Clone, Copy, Debug)]
struct Home {
    core: usize,
    key: Key<Drive>,
}

/// A drive was tried where it could be of use, and refused.
#[derive(Clone)]
struct PassedOver {
    why: String,
    at: Instant,
}

/// A drive that the daemon holds.
#[derive(Clone)]
struct Attached {
    medium: Medium,
    /// What it carried when it was last looked at.
    content: Content,
    /// The running array that uses it, and as which member.
    used_by: Option<(Uuid, u8)>,
    /// It is not used by itself where it could be of use.
    passed_over: Option<PassedOver>,
    /// Which of all arrivals its last one was.
    came: u64,
}

impl Attached {
    fn new(medium: Medium, content: Content) -> Attached {
        Attached { medium, content, used_by: None, passed_over: None, came: 0 }
    }

    /// Whether it carries an array's label, and is not in use.
    fn waits_for(&self, array: Uuid) -> bool {
        self.used_by.is_none()
            && matches!(&self.content, Content::Labelled(label) if label.array == array)
    }

    fn bytes(&self) -> u64 {
        match &self.medium {
            Medium::Device(device) => device.limits.bytes,
            Medium::Memory { memory, .. } => memory.bytes(),
        }
    }

    fn device(&self) -> Option<&Arc<OpenDevice>> {
        match &self.medium {
            Medium::Device(device) => Some(device),
            Medium::Memory { .. } => None,
        }
    }

    fn sector_bytes(&self) -> u32 {
        match &self.medium {
            Medium::Device(device) => device.limits.sector_bytes,
            Medium::Memory { .. } => engine::MEMORY_SECTOR_BYTES,
        }
    }
}

/// A running array. What it names lives on the reactor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Running {
    uuid: Uuid,
    core: usize,
    pool: Key<Pool>,
}

/// An export that is served.
struct Serving {
    /// The reactor of the array, and the volume itself. It need not be one of those that serve.
    home: (usize, Key<Volume>),
    /// The reactors that serve it, and the volume as it is known there; that of the array, if it is
    /// one of them, first.
    parts: Vec<(usize, Key<Volume>)>,
    serial: String,
    served: Served,
}

#[derive(Default)]
struct State {
    catalog: Catalog,
    drives: BTreeMap<String, Attached>,
    /// How often one came: it was attached, or was found with another label than before.
    arrivals: u64,
    /// Drives of the catalog that could not be attached, and why.
    missing: BTreeMap<String, Refusal>,
    arrays: BTreeMap<Uuid, Running>,
    /// Where arrays are being started: several at a time when the daemon begins.
    beginning: BTreeMap<Uuid, usize>,
    /// Arrays that shall run and could not be started, and why.
    unavailable: BTreeMap<Uuid, Refusal>,
    /// Since when members of running arrays are away.
    away: BTreeMap<(Uuid, u8), Instant>,
    exports: BTreeMap<String, Serving>,
    /// Exports of arrays on demand that are away.
    waiting: BTreeMap<String, Served>,
    /// Exports that could not be started, and why.
    down: BTreeMap<String, Down>,
    /// Exports that the process before has left, or that waited, until they are taken up.
    handed: BTreeMap<String, Handed<OwnedFd>>,
    upgrades: Upgrades,
    histories: Histories,
    /// Drives that were cut short, also if that could not be stored.
    cut: BTreeSet<Uuid>,
    /// Why the catalog could not be stored when that was tried last.
    unsaved: Option<Refusal>,
    stopping: bool,
    /// And the next process goes on at once, as the same host.
    upgrading: bool,
}

impl State {
    /// From now on a drive is there for whoever looks for it. When it was opened says nothing of
    /// that: who tried meanwhile has not seen it.
    fn attach(&mut self, name: &str, mut drive: Attached) {
        self.missing.remove(name);
        self.arrivals += 1;
        drive.came = self.arrivals;
        self.drives.insert(name.to_owned(), drive);
    }

    /// Those that an array uses now.
    fn drives_of(&self, array: Uuid) -> impl Iterator<Item = (&String, &Attached)> {
        self.drives
            .iter()
            .filter(move |(_, its)| its.used_by.is_some_and(|(user, _)| user == array))
    }

    /// What a drive was found to carry.
    fn note_content(&mut self, name: &str, content: Content) {
        let Some(drive) = self.drives.get_mut(name) else { return };
        let whose = |content: &Content| content.label().map(|its| (its.array, its.drive));
        if whose(&drive.content) != whose(&content) {
            self.arrivals += 1;
            drive.came = self.arrivals;
        }
        drive.content = content;
    }

    /// The last arrival of a drive that an array could start with; 0: there is none.
    fn last_arrival(&self, array: Uuid) -> u64 {
        let labelled = self.drives.values().filter(|drive| drive.waits_for(array));
        labelled.map(|drive| drive.came).max().unwrap_or(0)
    }
}

pub struct Host {
    cores: Vec<Core>,
    /// Of the reactors' CPUs.
    topology: Topology,
    directory: StateDirectory,
    /// Where sockets of exports are made, unless told otherwise.
    exports_directory: PathBuf,
    /// Where exports listen for hosts on the network.
    ports: Ports,
    /// What this host is called in leases.
    lessee: lease::Host,
    /// And by targets of NVMe/TCP.
    initiator: Initiator,
    /// Where arrays say which drives have everything.
    told: UnboundedSender<Told>,
    /// The file that it was started from.
    program: PathBuf,
    /// The program that shall take its place.
    wanted: tokio::sync::watch::Sender<Option<PathBuf>>,
    started: Instant,
    changes: tokio::sync::Mutex<()>,
    state: Mutex<State>,
}

/// The right to change things; others wait for it to be dropped.
struct Change<'a> {
    _turn: tokio::sync::MutexGuard<'a, ()>,
}

impl Host {
    pub fn new(
        cores: Vec<Core>,
        directory: StateDirectory,
        exports_directory: PathBuf,
        (lessee, initiator): (lease::Host, Initiator),
        told: UnboundedSender<Told>,
    ) -> Host {
        assert!(!cores.is_empty(), "a daemon without a reactor");
        let cpus: Vec<usize> = cores.iter().map(Core::cpu).collect();
        let topology = Topology::read(Path::new(SYSTEM), &cpus);
        let version = env!("CARGO_PKG_VERSION").to_owned();
        let upgrades = Upgrades { version, ..Upgrades::default() };
        Host {
            cores,
            topology,
            directory,
            exports_directory,
            ports: Ports::default(),
            lessee,
            initiator,
            told,
            program: upgrade::own_program(),
            wanted: tokio::sync::watch::Sender::new(None),
            started: Instant::now(),
            changes: tokio::sync::Mutex::new(()),
            state: Mutex::new(State { upgrades, ..State::default() }),
        }
    }

    /// Waits for its turn to change things.
    async fn begin(&self) -> Answer<Change<'_>> {
        let turn = self.changes.lock().await;
        if self.look(|state| state.stopping) {
            return Err(Refusal::conflict("the daemon is stopping"));
        }
        // Proves that the outcome can be stored, before anything is done on drives.
        self.save()?;
        Ok(Change { _turn: turn })
    }

    /// A moment with the state.
    fn look<T>(&self, at: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        at(&mut state)
    }

    fn save(&self) -> Answer<()> {
        self.record(|_| {})
    }

    /// Changes the catalog and stores it; leaves it as it was if it cannot be stored. All in one
    /// moment, so that the watch may record beside a change that is under way.
    fn record(&self, change: impl FnOnce(&mut Catalog)) -> Answer<()> {
        self.look(|state| {
            let mut catalog = state.catalog.clone();
            change(&mut catalog);
            let saved = self.directory.save(&catalog);
            state.unsaved = saved.clone().err();
            saved.map(|()| state.catalog = catalog)
        })
    }

    fn core(&self, index: usize) -> &Sender {
        self.cores[index].sender()
    }

    /// All reactors, as placement sees them.
    fn reactors(&self) -> Vec<placement::Reactor> {
        let reactor = |(index, core): (usize, &Core)| {
            let (arrays, exports) = self.look(|state| {
                let arrays = state.arrays.values().map(|array| array.core);
                let arrays = arrays.chain(state.beginning.values().copied());
                let arrays = arrays.filter(|core| *core == index).count();
                let serves = |export: &&Serving| export.parts.iter().any(|(at, _)| *at == index);
                (arrays, state.exports.values().filter(serves).count())
            });
            placement::Reactor { cpu: core.cpu(), arrays, exports }
        };
        self.cores.iter().enumerate().map(reactor).collect()
    }

    /// Runs `job` with an array's pool, on its reactor.
    async fn on_array<T: Send + 'static>(
        &self,
        array: Running,
        job: impl AsyncFnOnce(Reactor, Rc<Pool>) -> T + Send + 'static,
    ) -> Answer<T> {
        let found = engine::call(self.core(array.core), async move |reactor| {
            let pool = reactor.get(array.pool)?;
            Some(job(reactor, pool).await)
        });
        found.await?.ok_or_else(|| Refusal::conflict("the array was stopped meanwhile"))
    }

    /// An array as it is now.
    async fn snapshot(&self, array: Running) -> Answer<ArraySnapshot> {
        let found = engine::look(self.core(array.core), move |reactor| {
            reactor.get(array.pool).map(|pool| snapshot(&pool))
        });
        found.await?.ok_or_else(|| Refusal::conflict("the array was stopped meanwhile"))
    }

    fn running(&self) -> Vec<Running> {
        self.look(|state| state.arrays.values().copied().collect())
    }

    /// The uuid of an array that may be named by its uuid too.
    fn array_uuid(&self, name: &str) -> Answer<Uuid> {
        let found = self.look(|state| {
            let named = state.catalog.array_named(name).map(|(uuid, _)| uuid);
            named.or_else(|| {
                let uuid = Uuid::try_parse(name).ok()?;
                state.catalog.arrays.contains_key(&uuid).then_some(uuid)
            })
        });
        found.ok_or_else(|| {
            Refusal::unknown(format!("there is no array {name}")).fix(
                "`ashlar array list` shows all; `ashlar array start --scan` finds those on \
                 attached drives",
            )
        })
    }

    fn array_name(&self, uuid: Uuid) -> String {
        let known = self.look(|state| state.catalog.arrays.get(&uuid).map(|a| a.name.clone()));
        known.unwrap_or_else(|| uuid.to_string())
    }

    /// The running array of this name.
    fn running_array(&self, name: &str) -> Answer<Running> {
        let uuid = self.array_uuid(name)?;
        let found = self.look(|state| {
            state.arrays.get(&uuid).copied().ok_or_else(|| state.unavailable.get(&uuid).cloned())
        });
        found.map_err(|why| match why {
            Some(why) => Refusal::conflict(format!("array {name} does not run: {}", why.error))
                .fix(why.fix.unwrap_or_else(|| format!("ashlar array start {name}"))),
            None if self.is_on_demand(uuid) => {
                Refusal::conflict(format!("array {name} is on demand, and no guest needs it here"))
                    .fix(format!("`ashlar array on-demand {name} --off`, then start it"))
            }
            None => Refusal::conflict(format!("array {name} is stopped"))
                .fix(format!("ashlar array start {name}")),
        })
    }

    /// The same, of a reactor that answers: a change that waited for one that hangs would keep all
    /// others from theirs.
    async fn answering_array(&self, name: &str) -> Answer<Running> {
        let running = self.running_array(name)?;
        self.snapshot(running).await.map(|_| running)
    }

    /// The attached drive of this name.
    fn attached(&self, name: &str) -> Answer<Attached> {
        let (found, missing) =
            self.look(|state| (state.drives.get(name).cloned(), state.missing.get(name).cloned()));
        match (found, missing) {
            (Some(drive), _) => Ok(drive),
            (None, Some(why)) => {
                Err(Refusal::conflict(format!("drive {name} is missing: {}", why.error))
                    .fix("bring it back and attach it again"))
            }
            (None, None) => Err(Refusal::unknown(format!("there is no drive {name}"))
                .fix("`ashlar drive list` shows all; `ashlar drive attach PATH` adds one")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::device::content::Labelled;

    fn labelled(array: u128) -> Content {
        Content::Labelled(Labelled {
            drive: Uuid::from_u128(7),
            array: Uuid::from_u128(array),
            array_name: None,
            member: 0,
            drive_bytes: 1 << 20,
        })
    }

    fn opened(content: Content) -> Attached {
        Attached::new(
            Medium::Memory { memory: Memory::Ram { bytes: 1 << 20 }, home: None },
            content,
        )
    }

    /// Who waits for an array tries again when a drive of its has come since the last try.
    #[test]
    fn a_drive_comes_when_it_can_be_seen_and_not_when_it_is_opened() {
        let [mine, other] = [1, 2].map(Uuid::from_u128);
        let mut state = State::default();
        let drive = opened(labelled(1));
        state.attach("d0", opened(labelled(2)));
        let mut tried = state.arrivals;
        assert_eq!((state.last_arrival(mine), state.last_arrival(other)), (0, tried));
        state.attach("d1", drive);
        assert!(state.last_arrival(mine) > tried && state.last_arrival(other) <= tried);

        // Found as it was, and then as one that another host has made its.
        tried = state.arrivals;
        state.note_content("d0", labelled(2));
        assert!(state.last_arrival(other) <= tried);
        state.note_content("d0", labelled(1));
        assert!(state.last_arrival(mine) > tried && state.last_arrival(other) == 0);

        // Detached and attached between two looks.
        tried = state.arrivals;
        let drive = state.drives.remove("d1").unwrap();
        state.attach("d1", drive);
        assert!(state.last_arrival(mine) > tried);
    }
}
