//! Exports: volumes offered to guests.

use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use ashlar_pool::offer::Offer;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::registry::Key;
use ashlar_target::export::Part;
use ashlar_target::limits::BURST_MAX;
use uuid::Uuid;

use crate::api::Done;
use crate::api::export::{
    Export, ExportCreate, ExportKind, ExportLimits, HostsChange, LimitsChange,
};
use crate::catalog::{KnownDisk, KnownExport};
use crate::engine;
use crate::front::{self, Front, Offered};
use crate::host::{Host, Running, Serving, on_demand};
use crate::name::check_name;
use crate::placement;
use crate::refusal::{Answer, Refusal};
use crate::served::{Label, Served, beside, forget, is_standing, user};
use crate::size::Size;
use crate::snapshot::atomic_bytes;
use crate::socket;

/// Bytes of a virtio block device's serial number.
const SERIAL_BYTES: usize = 20;
/// Least that a limit lets pass in a second: a block.
const BANDWIDTH_MIN: u64 = 4096;

impl Host {
    pub async fn create_export(&self, mut request: ExportCreate) -> Answer<Export> {
        let asked = request.socket_access.clone();
        request.socket_access = beside(move || asked.in_numbers()).await??;
        let _change = self.begin().await?;
        let name = request.name.clone();
        check_name("an export", &name)?;
        let (running, volume) = self.find_volume(&request.volume).await?;
        let others = self.offered();
        let front = Front::of(&request, &self.exports_directory, volume.uuid, &others)?;
        self.check_export_is_new(&name, &front)?;
        if let Some(path) = request.socket.clone() {
            beside(move || socket::check_directory(&path)).await??;
        }
        self.check_export_on_demand(&name, &front, running.uuid)?;
        let mut known = KnownExport {
            array: running.uuid,
            volume: volume.name,
            volume_uuid: Some(volume.uuid),
            front,
            cores: request.cores.clone(),
            limits: limits(ExportLimits::default(), request.limits)?,
            disk: None,
        };
        let subsystem = known.front.subsystem().map(str::to_owned);
        if known.front.outlives_daemon() {
            self.create_standing(&name, known, running).await?;
        } else {
            let published = self.start_export(&name, &known, running).await?;
            known.disk = Some(published.disk);
            if let Err(refusal) = self.record(|catalog| {
                catalog.exports.insert(name.clone(), known);
                catalog.spread_secrets();
            }) {
                self.stop_export(&name).await;
                if let Some(nqn) = &subsystem {
                    // What fails there as well is in the log.
                    let _ = self.tell_hosts(nqn).await;
                }
                return Err(refusal);
            }
        }
        tracing::info!(export = name, volume = request.volume, "export created");
        if let Some(nqn) = &subsystem {
            self.tell_hosts(nqn).await?;
        }
        self.show_export(&name).await
    }

    /// Makes what may outlive this daemon: it is kept before it is there. What is left after a
    /// failure half-way, `export delete` takes away.
    async fn create_standing(&self, name: &str, known: KnownExport, array: Running) -> Answer<()> {
        let its = known.clone();
        let stood = beside(move || is_standing(&its)).await?;
        self.record(|catalog| {
            catalog.exports.insert(name.to_owned(), known.clone());
        })?;
        let Err(refusal) = self.start_export(name, &known, array).await else { return Ok(()) };
        // What had been there before is as it was; nobody knows of what cannot be looked at.
        let is_left = match stood {
            Ok(false) => beside(move || is_standing(&known)).await?.unwrap_or(true),
            Ok(true) | Err(_) => false,
        };
        if is_left {
            self.note_down(name, refusal.clone());
            return Err(refusal.fix(format!("delete what is left: `ashlar export delete {name}`")));
        }
        self.record(|catalog| {
            catalog.exports.remove(name);
        })?;
        Err(refusal)
    }

    /// All exports, those that are down too.
    fn offered(&self) -> Vec<Offered> {
        self.look(|state| {
            let exports = state.catalog.exports.values();
            let offered = exports.filter_map(|its| Some((its.volume_uuid?, its.front.clone())));
            offered.collect()
        })
    }

    fn check_export_is_new(&self, name: &str, front: &Front) -> Answer<()> {
        let (taken, user) = self.look(|state| {
            let mut exports = state.catalog.exports.iter();
            let user = exports.find_map(|(user, export)| {
                export.front.clash_with(front).map(|place| (user.clone(), place))
            });
            (state.catalog.exports.contains_key(name), user)
        });
        if taken {
            return Err(Refusal::conflict(format!("there is an export {name} already"))
                .fix("give it another name, or delete that one first"));
        }
        if let Some((user, place)) = user {
            let text = format!("{place} is busy: export {user} listens there");
            let other = if front.kind() == ExportKind::Ublk {
                "--id"
            } else if place.starts_with('/') {
                "--path"
            } else {
                "--listen"
            };
            return Err(Refusal::conflict(text).fix(format!("name another {other}")));
        }
        Ok(())
    }

    /// Begins to serve an export of a running array.
    async fn start_export(
        &self,
        name: &str,
        known: &KnownExport,
        array: Running,
    ) -> Answer<Published> {
        let listens =
            self.look(|state| state.handed.contains_key(name) || state.waiting.contains_key(name));
        if let Some(path) = known.front.socket().map(Path::to_owned).filter(|_| !listens) {
            beside(move || socket::check_place(&path)).await??;
        }
        let cores = self.cores_for(array.core, known)?;
        let published = self.publish_volume(array, known).await?;
        let published = published.map_err(|why| {
            Refusal::conflict(why).fix(format!("ashlar export delete {name}, and create it anew"))
        })?;
        let Published { key, uuid, atomic_bytes, .. } = published;
        let serial = known.front.serial().unwrap_or_else(|| serial(uuid));
        let home = (array.core, key);
        let parts = self.offer_volume(home, cores).await?;
        let part = |(core, volume): &(usize, Key<Volume>)| Part {
            core: self.core(*core).clone(),
            volume: *volume,
        };
        let own = parts.iter().map(part).collect();
        let since = self.since(known.array);
        let power = self.power_cycle(array.uuid);
        let label =
            Label { name: name.to_owned(), serial: serial.clone(), atomic_bytes, power, since };
        let (front, limits) = (known.front.clone(), known.limits);
        self.end_waiting(name).await;
        let handed = self.look(|state| state.handed.remove(name));
        match Served::start(front, label, limits, own, &self.ports, handed).await {
            Ok(served) => {
                let serving = Serving { home, parts, serial, served };
                self.look(|state| {
                    state.down.remove(name);
                    state.exports.insert(name.to_owned(), serving);
                });
                Ok(published)
            }
            Err(refusal) => {
                self.withdraw_volumes(home, parts).await;
                Err(refusal)
            }
        }
    }

    /// Makes the volume known to all reactors that are to serve the export. After an error it is
    /// known to none, that of its array included.
    async fn offer_volume(
        &self,
        home: (usize, Key<Volume>),
        cores: Vec<usize>,
    ) -> Answer<Vec<(usize, Key<Volume>)>> {
        let mut parts = Vec::new();
        for core in cores {
            if core == home.0 {
                parts.push(home);
                continue;
            }
            match self.offer_to(core, home).await {
                Ok(far) => parts.push((core, far)),
                Err(refusal) => {
                    self.withdraw_volumes(home, parts).await;
                    return Err(refusal);
                }
            }
        }
        Ok(parts)
    }

    /// The reactors for the queues of an export, that of its array first if it is among them.
    pub(super) fn cores_for(&self, home: usize, known: &KnownExport) -> Answer<Vec<usize>> {
        let reactors = self.reactors();
        let Some(cpus) = &known.cores else {
            let spread =
                || placement::spread(&self.topology, &reactors, home, known.front.parts_max());
            return Ok(self.cores_of_subsystem(&reactors, home, known).unwrap_or_else(spread));
        };
        let some = || {
            let all: Vec<String> = reactors.iter().map(|its| its.cpu.to_string()).collect();
            format!("use some of --cores {}", all.join(","))
        };
        if cpus.is_empty() {
            return Err(Refusal::invalid("an export cannot be served by no CPU").fix(some()));
        }
        placement::on_cpus(&reactors, home, cpus, known.front.parts_max())
            .map_err(|cpu| Refusal::invalid(format!("no reactor runs on CPU {cpu}")).fix(some()))
    }

    /// All namespaces of a subsystem are served by the same reactors: those of one that runs, or
    /// that were named for one that does not run yet. `None`: this is the first.
    fn cores_of_subsystem(
        &self,
        reactors: &[placement::Reactor],
        home: usize,
        known: &KnownExport,
    ) -> Option<Vec<usize>> {
        self.look(|state| {
            let exports = state.catalog.exports.iter();
            let beside = exports.filter(|(_, its)| is_one_subsystem(&its.front, &known.front));
            let serving = beside.clone().find_map(|(name, _)| state.exports.get(name));
            if let Some(Serving { parts, .. }) = serving {
                let mut cores: Vec<usize> = parts.iter().map(|(core, _)| *core).collect();
                cores.sort_by_key(|core| *core != home);
                return Some(cores);
            }
            let (its, cpus) = beside
                .filter_map(|(_, its)| Some((its, its.cores.as_ref()?)))
                .find(|(_, cpus)| !cpus.is_empty())?;
            placement::on_cpus(reactors, home, cpus, its.front.parts_max()).ok()
        })
    }

    async fn offer_to(
        &self,
        core: usize,
        (home, key): (usize, Key<Volume>),
    ) -> Answer<Key<Volume>> {
        let offered = engine::look(self.core(home), move |reactor| {
            let volume = reactor.get(key).map(|volume| Volume::clone(&volume));
            volume.map(|volume| Offer::new(reactor, volume))
        });
        let offer = offered.await?.ok_or_else(|| Refusal::conflict("the array was stopped"))?;
        let offer = offer.map_err(|error| {
            Refusal::failed(format!("the volume cannot be offered to CPU {core}: {error}"))
        })?;
        let publish = move |reactor: &Reactor| reactor.publish(Rc::new(offer.open(reactor)));
        engine::look_or_undo(self.core(core), publish, |reactor, key| drop(reactor.withdraw(key)))
            .await
    }

    /// Gives the volume of an export a key on its reactor, and finds its uuid; or says why not.
    async fn publish_volume(
        &self,
        array: Running,
        known: &KnownExport,
    ) -> Answer<Result<Published, String>> {
        let (name, meant) = (known.volume.clone(), known.volume_uuid);
        let publish = move |reactor: &Reactor| {
            reactor.get(array.pool).map(|pool| publish(reactor, &pool, &name, meant))
        };
        let withdraw = |reactor: &Reactor, found: Option<Result<Published, String>>| {
            drop(found.and_then(Result::ok).map(|published| reactor.withdraw(published.key)));
        };
        let found = engine::look_or_undo(self.core(array.core), publish, withdraw).await?;
        found.ok_or_else(|| Refusal::conflict("the array was stopped meanwhile"))
    }

    /// A reactor that hangs does it once it goes on, and keeps nobody from other changes.
    async fn withdraw_volume(&self, core: usize, key: Key<Volume>) {
        let withdrawn = engine::look(self.core(core), move |reactor| {
            drop(reactor.withdraw(key));
        });
        if let Err(refusal) = withdrawn.await {
            tracing::warn!("{}", refusal.error);
        }
    }

    pub(super) async fn withdraw_volumes(
        &self,
        home: (usize, Key<Volume>),
        parts: Vec<(usize, Key<Volume>)>,
    ) {
        for (core, far) in parts.into_iter().filter(|(core, _)| *core != home.0) {
            self.withdraw_volume(core, far).await;
        }
        // The volume itself last: the others ask it.
        self.withdraw_volume(home.0, home.1).await;
    }

    /// Ends an export's service: requests under way are finished first.
    pub(super) async fn stop_export(&self, name: &str) {
        self.stop_waiting(name).await;
        let (serving, stopping) = self.look(|state| {
            state.down.remove(name);
            (state.exports.remove(name), state.stopping)
        });
        let Some(Serving { home, parts, served, .. }) = serving else { return };
        // Of a daemon that ends, the next one takes up what is in use.
        if stopping {
            served.pause().await;
        } else {
            served.stop().await;
        }
        self.withdraw_volumes(home, parts).await;
        tracing::info!(export = name, "export stopped");
    }

    /// What is left out of `change` stays as it is.
    pub async fn set_export(&self, name: &str, change: LimitsChange) -> Answer<Export> {
        let _change = self.begin().await?;
        let known = self.look(|state| state.catalog.exports.get(name).cloned());
        let limits = limits(known.ok_or_else(|| unknown(name))?.limits, change)?;
        self.record(|catalog| {
            catalog.exports.entry(name.to_owned()).and_modify(|its| its.limits = limits);
        })?;
        if let Some((served, _)) = self.served(name) {
            served.limit(limits);
        }
        self.show_export(name).await
    }

    /// Secrets are for all exports of its subsystem that have the hosts: these know one of each.
    pub async fn set_export_hosts(&self, name: &str, change: HostsChange) -> Answer<Export> {
        let _change = self.begin().await?;
        let known = self.look(|state| state.catalog.exports.get(name).cloned());
        let front = known.ok_or_else(|| unknown(name))?.front;
        let Front::NvmeTcp { nqn, hosts, secrets, .. } = &front else {
            let kind = front.kind().name();
            return Err(Refusal::invalid(format!("an export by {kind} knows no hosts"))
                .fix("only those by nvme-tcp do"));
        };
        let before = hosts;
        let hosts = front::nvme::hosts_changed(before, &change)?;
        let is_its = |host: &&String| {
            hosts.contains(host)
                || secrets.hosts.contains_key(*host) && !change.forbid.contains(host)
        };
        if let Some(host) = change.secrets.keys().find(|its| !is_its(its)) {
            let fix = match before.is_empty() {
                true => "name all that may use it with the same command, by --host: all others \
                         are shut out then"
                    .to_owned(),
                false => format!("let it in with the same command: --host {host}"),
            };
            return Err(
                Refusal::invalid(format!("{host} is none of the hosts of export {name}")).fix(fix)
            );
        }
        if before.is_empty() && !hosts.is_empty() && !change.force {
            self.check_open_unused(name).await?;
        }
        let known = self.look(|state| state.catalog.secrets_of(nqn));
        let all = front::nvme::changed(&known, &change)?;
        self.record(|catalog| {
            let export = catalog.exports.get_mut(name);
            if let Some(Front::NvmeTcp { hosts: its, .. }) = export.map(|its| &mut its.front) {
                *its = hosts;
            }
            catalog.give_secrets(nqn, &all);
        })?;
        self.tell_hosts(nqn).await?;
        tracing::info!(export = name, "hosts and their secrets set");
        self.show_export(name).await
    }

    /// An export that is open to all is about to be open to some.
    async fn check_open_unused(&self, name: &str) -> Answer<()> {
        let Some((served, _)) = self.served(name) else { return Ok(()) };
        let Some(user) = served.used().await else { return Ok(()) };
        let text = format!("export {name} is open to all hosts, and {user}");
        Err(Refusal::conflict(text)
            .fix("use --force if all who use it are named by --host: others lose it at once"))
    }

    /// Has the exports of a subsystem that run go by the hosts and secrets in the catalog: all of
    /// them, also after one of them has failed.
    async fn tell_hosts(&self, nqn: &str) -> Answer<()> {
        let all = self.look(|state| state.catalog.exports.clone());
        let mut told = Ok(());
        for (name, its) in all {
            if let Front::NvmeTcp { nqn: its, hosts, secrets, .. } = its.front
                && its == nqn
                && let Some((served, _)) = self.served(&name)
            {
                let set = served.set_access(hosts, secrets.of_target()).await;
                told = told.and(set.inspect_err(|refusal| {
                    tracing::error!(export = name, "hosts not set: {}", refusal.line());
                }));
            }
        }
        told
    }

    pub async fn delete_export(&self, name: &str, force: bool) -> Answer<Done> {
        let _change = self.begin().await?;
        let known = self.look(|state| state.catalog.exports.get(name).cloned());
        let known = known.ok_or_else(|| unknown(name))?;
        if !force {
            self.check_export_unused(name, &known).await?;
        }
        let notes = self.erase_export(name, known).await?;
        Ok(Done { notes })
    }

    /// Refused if somebody uses it, as far as is known: one that does not answer may have a guest.
    async fn check_export_unused(&self, name: &str, known: &KnownExport) -> Answer<()> {
        if let Some(user) = self.user_of(known).await? {
            let place = known.front.place(name);
            return Err(Refusal::conflict(format!("{place} is in use: {user}"))
                .fix("end that first, or use --force to take the device away"));
        }
        let serving = self.served(name).map(|(served, _)| served);
        let Some(served) = serving.or_else(|| self.look(|state| state.waiting.get(name).cloned()))
        else {
            return Ok(());
        };
        match served.used().await {
            None => Ok(()),
            Some(usage) => {
                let (who, end) = user_words(known.front.kind());
                Err(Refusal::conflict(format!("export {name} {usage} by {who}"))
                    .fix(format!("{end} first, or use --force to take its disk away")))
            }
        }
    }

    /// What speaks against taking an export's device away, if it has one. It is looked for in all
    /// of the machine, and may be opened.
    pub(super) async fn user_of(&self, known: &KnownExport) -> Answer<Option<String>> {
        let known = known.clone();
        beside(move || user(&known)).await?
    }

    /// What is to be said of what is left of it.
    async fn erase_export(&self, name: &str, known: KnownExport) -> Answer<Vec<String>> {
        let record = || {
            self.record(|catalog| {
                catalog.exports.remove(name);
            })
        };
        if !known.front.outlives_daemon() {
            record()?;
            self.stop_export(name).await;
            // What is left of one that was not served. It is nobody's by now.
            let left = beside(move || forget(&known)).await?.err();
            if let Some(refusal) = &left {
                tracing::warn!(export = name, "{}", refusal.line());
            }
            return Ok(left.iter().map(Refusal::line).collect());
        }
        // It is forgotten once it is gone: what fails can be tried again.
        self.stop_export(name).await;
        let erased = beside(move || forget(&known)).await?.and_then(|()| record());
        erased.inspect_err(|refusal| self.note_down(name, refusal.clone()))?;
        Ok(Vec::new())
    }

    pub(super) fn exports_of(&self, array: Uuid) -> Vec<(String, KnownExport)> {
        self.look(|state| {
            let exports = state.catalog.exports.iter();
            let of_array = exports.filter(|(_, export)| export.array == array);
            of_array.map(|(name, export)| (name.clone(), export.clone())).collect()
        })
    }

    pub(super) fn exports_of_volume(&self, array: Uuid, volume: &str) -> Vec<String> {
        let exports = self.exports_of(array).into_iter();
        exports.filter(|(_, export)| export.volume == volume).map(|(name, _)| name).collect()
    }

    /// Refused if a guest is connected to an export of an array, or a program of this host uses
    /// one. One that does not answer may have a guest.
    pub(super) async fn check_exports_unused(&self, array_name: &str, array: Uuid) -> Answer<()> {
        let mut connected = Vec::new();
        for (name, known) in self.exports_of(array) {
            let waiting = || self.look(|state| state.waiting.get(&name).cloned());
            let served = self.served(&name).map(|(served, _)| served);
            let Some(served) = served.or_else(waiting) else { continue };
            if let Some(user) = self.user_of(&known).await? {
                return Err(Refusal::conflict(format!(
                    "array {array_name} is used through export {name}, {}: {user}",
                    known.front.place(&name)
                ))
                .fix("end that first, or use --force to take the device away"));
            }
            if served.used().await.is_some() {
                let (who, end) = user_words(known.front.kind());
                connected.push((format!("{who}, through export {name}"), end));
            }
        }
        if connected.is_empty() {
            return Ok(());
        }
        let (users, ends): (Vec<String>, BTreeSet<&str>) = connected.into_iter().unzip();
        let ends: Vec<&str> = ends.into_iter().collect();
        Err(Refusal::conflict(format!("array {array_name} is used by {}", users.join("; by ")))
            .fix(format!("{} first, or use --force to take its disk away", ends.join(" and "))))
    }

    /// An export that runs, and its serial number.
    pub(super) fn served(&self, name: &str) -> Option<(Served, String)> {
        self.look(|state| {
            state.exports.get(name).map(|its| (its.served.clone(), its.serial.clone()))
        })
    }

    /// Starts the exports of an array that has just started; what cannot be started is noted.
    pub(super) async fn start_exports_of(&self, array: Uuid) {
        let Some(running) = self.look(|state| state.arrays.get(&array).copied()) else { return };
        let _coming = self.coming_of(array);
        for (name, known) in self.exports_of(array) {
            self.start_export_of(&name, &known, running).await;
        }
    }

    /// The same of one export. If its array is on demand, it waits and is tried again.
    pub(super) async fn start_export_of(&self, name: &str, known: &KnownExport, array: Running) {
        match self.start_export(name, known, array).await {
            Ok(published) => {
                tracing::info!(export = name, "export started");
                self.note_volume(name, published);
                // It may have grown on another host.
                if known.disk.is_some_and(|its| its != published.disk) {
                    self.tell_export_of_resize(name).await;
                }
            }
            Err(refusal) => {
                self.tell_down(name, "export not started", &refusal);
                let waits = self.look(|state| state.waiting.contains_key(name));
                if !waits && known.disk.is_some() && self.is_on_demand(array.uuid) {
                    self.wait_export(name, known).await;
                }
                self.note_down(name, refusal);
            }
        }
    }

    /// Keeps which volume an export of an older version means from now on, and how large it is.
    fn note_volume(&self, name: &str, volume: Published) {
        let (uuid, disk) = (Some(volume.uuid), Some(volume.disk));
        let is_known = |its: &KnownExport| (its.volume_uuid, its.disk) == (uuid, disk);
        if self.look(|state| state.catalog.exports.get(name).is_none_or(is_known)) {
            return;
        }
        let noted = self.record(|catalog| {
            let export = catalog.exports.entry(name.to_owned());
            export.and_modify(|its| (its.volume_uuid, its.disk) = (uuid, disk));
        });
        if let Err(refusal) = noted {
            tracing::error!(export = name, "{}", refusal.line());
        }
    }

    pub(super) async fn stop_exports_of(&self, array: Uuid) {
        let exports = self.exports_of(array);
        let of_array = |name: &str| exports.iter().any(|(its, _)| its == name);
        self.tell_exports_of_stop(of_array).await;
        for (name, _) in &exports {
            self.stop_export(name).await;
        }
    }

    /// Before the first of those is stopped that are stopped together.
    pub(super) async fn tell_exports_of_stop(&self, of: impl Fn(&str) -> bool) {
        let served: Vec<Served> = self.look(|state| {
            let those = state.exports.iter().filter(|(name, _)| of(name));
            those.map(|(_, its)| its.served.clone()).collect()
        });
        join_all(served.iter().map(Served::will_stop)).await;
    }

    /// What is to be said of what is left of them.
    pub(super) async fn delete_exports_of(&self, array: Uuid) -> Answer<Vec<String>> {
        let mut notes = Vec::new();
        for (name, known) in self.exports_of(array) {
            notes.extend(self.erase_export(&name, known).await?);
            notes.push(format!("export {name} was deleted with it"));
        }
        Ok(notes)
    }

    /// Keeps how large a volume is now, and lets guests know that their disk has grown.
    pub(super) async fn tell_exports_of_resize(
        &self,
        array: Uuid,
        volume: &str,
        disk: KnownDisk,
    ) -> Answer<()> {
        let names = self.exports_of_volume(array, volume);
        let kept = self.record(|catalog| {
            let exports = catalog.exports.iter_mut().filter(|(name, _)| names.contains(name));
            exports.for_each(|(_, its)| its.disk = Some(disk));
        });
        for name in &names {
            self.tell_export_of_resize(name).await;
        }
        kept
    }

    async fn tell_export_of_resize(&self, name: &str) {
        if let Some((served, _)) = self.served(name)
            && let Err(refusal) = served.resized().await
        {
            tracing::warn!(export = name, "its guest was not told: {}", refusal.error);
        }
    }

    /// Lets initiators know which writes are atomic: of so many bytes at most.
    pub(super) async fn tell_exports_what_is_atomic(
        &self,
        array: Running,
        bytes: u32,
    ) -> Answer<()> {
        for (name, _) in self.exports_of(array.uuid) {
            if let Some((served, _)) = self.served(&name) {
                served.set_atomic_bytes(bytes).await?;
            }
        }
        Ok(())
    }
}

/// Who uses exports of a kind, and what ends that.
fn user_words(kind: ExportKind) -> (&'static str, &'static str) {
    match kind {
        ExportKind::VhostUserBlk => ("a guest", "shut the guest down"),
        // Of a subsystem: which of its namespaces a host uses, nobody here knows.
        ExportKind::NvmeTcp => (
            "a host that is connected to its subsystem",
            "disconnect the host (`nvme disconnect` there)",
        ),
        ExportKind::Nbd => ("a client", "disconnect the client"),
        ExportKind::Fuse => ("a program that has its file open", "end that program"),
        ExportKind::Ublk => ("a program that has its device open", "end that program"),
    }
}

/// Whether both are namespaces of one subsystem.
fn is_one_subsystem(one: &Front, other: &Front) -> bool {
    match (one, other) {
        (
            Front::NvmeTcp { listen, nqn, .. },
            Front::NvmeTcp { listen: its_listen, nqn: its_nqn, .. },
        ) => (listen, nqn) == (its_listen, its_nqn),
        (_, _) => false,
    }
}

pub(super) fn unknown(name: &str) -> Refusal {
    Refusal::unknown(format!("there is no export {name}"))
        .fix("`ashlar export list` shows all exports")
}

/// What `is` becomes by `change`.
fn limits(is: ExportLimits, change: LimitsChange) -> Answer<ExportLimits> {
    let limits = is.changed(change);
    let bytes = [limits.read_bytes_per_second, limits.write_bytes_per_second];
    if let Some(few) = bytes.into_iter().flatten().find(|its| *its < BANDWIDTH_MIN) {
        let text = format!("at {few} bytes a second a single block would take more than a second");
        return Err(Refusal::invalid(text)
            .fix(format!("use at least {}, or none for no limit", Size(BANDWIDTH_MIN))));
    }
    if Duration::from_secs(limits.burst_s.into()) > BURST_MAX {
        let text = format!("unused allowance cannot be saved up for {} seconds", limits.burst_s);
        return Err(Refusal::invalid(text).fix(format!("use 0 to {}", BURST_MAX.as_secs())));
    }
    Ok(limits)
}

/// A volume that is to be offered, on the reactor of its array.
#[derive(Clone, Copy)]
struct Published {
    key: Key<Volume>,
    uuid: Uuid,
    disk: KnownDisk,
    /// Writes up to so many bytes are there as a whole after a power cut, or not at all.
    atomic_bytes: u32,
}

fn publish(
    reactor: &Reactor,
    pool: &Pool,
    name: &str,
    meant: Option<Uuid>,
) -> Result<Published, String> {
    let volume = pool.volume(name).ok_or_else(|| format!("there is no volume {name}"))?;
    let uuid = Uuid::from_bytes(volume.uuid());
    match meant {
        // Perhaps made on another host that had the array meanwhile.
        Some(meant) if meant != uuid => {
            Err(format!("volume {name} is another one than was exported: {uuid}, not {meant}"))
        }
        Some(_) | None => {
            let disk = on_demand::disk(&volume);
            let key = reactor.publish(Rc::new(volume));
            let atomic_bytes = atomic_bytes(&pool.array().status());
            Ok(Published { key, uuid, disk, atomic_bytes })
        }
    }
}

/// The serial number a guest sees: as much of the volume's uuid as fits.
fn serial(uuid: Uuid) -> String {
    let mut serial = uuid.simple().to_string();
    serial.truncate(SERIAL_BYTES);
    serial
}
