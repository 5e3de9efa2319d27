//! Creating, starting, stopping and deleting arrays.

use std::collections::BTreeMap;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{ArraySuperblock, Level, MemberState};
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_reactor::registry::Key;
use uuid::Uuid;

use crate::api::array::{Array as Shown, ArrayCreate, JournalReplay, ScanFailure, ScanResult};
use crate::catalog::KnownArray;
use crate::device::content::{Content, Labelled};
use crate::engine::{self, Kept, Origin, Seed, plant};
use crate::host::drives::{blocking, lend, wipe};
use crate::host::elsewhere::came_with;
use crate::host::settings::{beside_policy, stored_policy};
use crate::host::witness::Teller;
use crate::host::{Attached, Home, Host, Medium, Running, cut, translate};
use crate::level::{LEVELS, Notation};
use crate::name::check_name;
use crate::placement;
use crate::power_cycle::power_cycle;
use crate::refusal::{Answer, Refusal};
use crate::snapshot::{ArraySnapshot, MemberSnapshot, snapshot};

const CHUNK_BYTES_DEFAULT: u32 = 64 << 10;

/// An array that has just begun to run, as its reactor reports it.
struct Begun {
    pool: Key<Pool>,
    snapshot: ArraySnapshot,
}

/// What a reactor answers when it was asked to begin an array.
struct Beginning {
    kept: Kept,
    begun: Answer<Begun>,
}

impl Host {
    pub async fn create_array(&self, request: ArrayCreate) -> Answer<Shown> {
        let _change = self.begin().await?;
        let spec = self.array_spec(&request)?;
        let uuid = Uuid::from_bytes(spec.uuid);
        self.check_new_members(&request.drives, request.force).await?;
        let blank = self.blank_drives(&request.drives);
        let core = self.core_for(&request.drives)?;
        let seeds = self.seeds(&request.drives).await?;
        let teller = self.teller(core);
        let beginning = engine::call(self.core(core), async move |reactor| {
            let (drives, kept) = plant(&reactor, seeds);
            let drives =
                drives.into_iter().map(|drive| (Uuid::new_v4().into_bytes(), drive)).collect();
            let begun = match Array::create(&reactor, &spec, drives).await {
                Ok(array) => open_pool(&reactor, array, teller).await,
                Err(error) => Err(translate::change(&spec.name, "create", &error)),
            };
            Beginning { kept, begun }
        });
        let beginning = beginning.await?;
        self.keep_memory(core, beginning.kept);
        let begun = match beginning.begun {
            Ok(begun) => begun,
            Err(refusal) => {
                self.blank_again(&blank).await;
                return Err(refusal);
            }
        };
        if let Err(refusal) = self.adopt(core, &begun, &request.name, false).await {
            self.blank_again(&blank).await;
            return Err(refusal);
        }
        tracing::info!(array = request.name, level = request.level, "array created");
        self.show_array_by_uuid(uuid).await
    }

    /// Those of `drives` that carry nothing.
    pub(super) fn blank_drives(&self, drives: &[String]) -> Vec<String> {
        self.look(|state| {
            let blank = |name: &&String| {
                state.drives.get(*name).is_some_and(|drive| drive.content == Content::Blank)
            };
            drives.iter().filter(blank).cloned().collect()
        })
    }

    /// Drives that were blank before something failed on them are made blank again.
    pub(super) async fn blank_again(&self, drives: &[String]) {
        for name in drives {
            let blank = self.probe_drive(name).await == Ok(Content::Blank);
            if !blank && let Err(refusal) = self.wipe_drive(name).await {
                tracing::warn!(drive = name, "{}", refusal.error);
            }
        }
    }

    fn array_spec(&self, request: &ArrayCreate) -> Answer<ArraySpec> {
        check_name("an array", &request.name)?;
        if self.look(|state| state.catalog.array_named(&request.name).is_some()) {
            return Err(Refusal::conflict(format!("there is an array {} already", request.name))
                .fix("give it another name, or delete that one first"));
        }
        let Notation { level, data, parity } =
            Notation::parse(&request.level).ok_or_else(|| {
                Refusal::invalid(format!("there is no RAID level {}", request.level))
                    .fix(format!("use {LEVELS}"))
            })?;
        let (members, chunks) = (request.drives.len(), usize::from(data) + usize::from(parity));
        if level == Level::RaidNm && members != chunks {
            return Err(Refusal::invalid(format!(
                "level {} needs {chunks} drives, not {members}",
                request.level
            ))
            .fix(format!("name {chunks} drives, or use another level")));
        }
        for (index, name) in request.drives.iter().enumerate() {
            if request.drives[..index].contains(name) {
                return Err(Refusal::invalid(format!("drive {name} is named twice"))
                    .fix("name each drive once"));
            }
        }
        Ok(ArraySpec {
            uuid: Uuid::new_v4().into_bytes(),
            name: request.name.clone(),
            level,
            chunk_bytes: request.chunk_bytes.unwrap_or(CHUNK_BYTES_DEFAULT),
            shape: Shape {
                copies: request.copies.unwrap_or(0),
                parity,
                group_members: request.group_members.unwrap_or(0),
            },
            policy: request.settings.policy.map(stored_policy),
            integrity: request.integrity,
            settings: beside_policy(&request.settings),
            host: Some(self.lessee),
        })
    }

    /// Refuses drives that are in use, spares, or carry what nobody agreed to lose.
    pub(super) async fn check_new_members(&self, drives: &[String], force: bool) -> Answer<()> {
        for name in drives {
            if self.look(|state| state.catalog.spares.contains_key(name)) {
                return Err(Refusal::conflict(format!("drive {name} is a spare"))
                    .fix(format!("`ashlar spare remove {name}` first, or use another drive")));
            }
            self.check_free(name, force).await?;
        }
        self.check_unused_elsewhere(drives).await
    }

    pub(super) async fn check_free(&self, name: &str, force: bool) -> Answer<()> {
        let drive = self.attached(name)?;
        if let Some((array, member)) = drive.used_by {
            let array = self.array_name(array);
            return Err(Refusal::conflict(format!(
                "drive {name} is in use: member {member} of array {array}"
            ))
            .fix("use another drive; `ashlar drive list` shows which are free"));
        }
        let content = self.probe_drive(name).await?;
        if force {
            return Ok(());
        }
        match content {
            Content::Blank => Ok(()),
            Content::Labelled(ref label) => {
                let runs = self.look(|state| state.arrays.contains_key(&label.array));
                let use_it = match runs {
                    true => "that array runs, and takes back by itself what it can still use",
                    false => "start that array (`ashlar array start --scan`)",
                };
                Err(Refusal::conflict(format!("drive {name} is {content}"))
                    .fix(format!("{use_it}; or use --force to overwrite the drive")))
            }
            Content::Damaged { .. } | Content::Newer { .. } | Content::Foreign(_) => {
                Err(Refusal::conflict(format!("drive {name} carries {content}"))
                    .fix("if it may be lost, use --force"))
            }
        }
    }

    /// Where an array of these drives is to run. Memory does not move.
    fn core_for(&self, drives: &[String]) -> Answer<usize> {
        let (mut home, mut nodes) = (None, Vec::new());
        for name in drives {
            match (self.attached(name)?.medium, home) {
                (Medium::Memory { home: Some(its), .. }, Some(core)) if core != its.core => {
                    return Err(Refusal::conflict(
                        "these memory drives live on different cores, from arrays before",
                    )
                    .fix("detach and attach them again (that empties them)"));
                }
                (Medium::Memory { home: Some(its), .. }, _) => home = Some(its.core),
                (Medium::Memory { home: None, .. }, _) => {}
                (Medium::Device(device), _) => nodes.extend(device.node()),
            }
        }
        let placed = || placement::home(&self.topology, &self.reactors(), &nodes);
        Ok(home.unwrap_or_else(placed))
    }

    pub(super) async fn seeds(&self, drives: &[String]) -> Answer<Vec<Seed>> {
        let mut seeds = Vec::new();
        for name in drives {
            let origin = match self.attached(name)?.medium {
                Medium::Memory { memory, home: Some(home) } => {
                    Origin::Kept { key: home.key, memory }
                }
                Medium::Memory { memory, home: None } => Origin::Memory(memory),
                Medium::Device(device) => {
                    let limits = device.limits;
                    Origin::File { device: lend(name, &device).await?, limits }
                }
            };
            seeds.push(Seed { name: name.clone(), origin });
        }
        Ok(seeds)
    }

    /// Notes which reactor keeps which memory drive.
    pub(super) fn keep_memory(&self, core: usize, kept: Kept) {
        self.look(|state| {
            for (name, key) in kept {
                if let Some(drive) = state.drives.get_mut(&name)
                    && let Medium::Memory { home, .. } = &mut drive.medium
                {
                    *home = Some(Home { core, key });
                }
            }
        });
    }

    /// Notes an array that runs: its drives, its place, its name on this host. A new one that
    /// cannot be noted is stopped: nobody could manage it.
    async fn adopt(&self, core: usize, begun: &Begun, name: &str, forced: bool) -> Answer<()> {
        let running = Running { uuid: begun.snapshot.uuid, core, pool: begun.pool };
        self.look(|state| state.arrays.insert(running.uuid, running));
        let noted = self.note_array(begun, name, forced).await;
        if noted.is_err()
            && let Err(refusal) = self.stop_running(running).await
        {
            tracing::error!(array = name, "{}", refusal.line());
        }
        noted
    }

    async fn note_array(&self, begun: &Begun, name: &str, by_force: bool) -> Answer<()> {
        let uuid = begun.snapshot.uuid;
        self.look(|state| state.unavailable.remove(&uuid));
        self.note_given(&begun.snapshot);
        self.note_members(&begun.snapshot);
        let before = self.look(|state| state.catalog.arrays.get(&uuid).cloned());
        let epoch = begun.snapshot.epoch;
        let since = came_with(before.as_ref(), epoch);
        let KnownArray { drives, on_demand, forced, .. } = before.unwrap_or_default();
        let known = KnownArray {
            name: name.to_owned(),
            generation: begun.snapshot.generation,
            epoch,
            current: begun.snapshot.current(),
            since,
            forced: by_force.then(Uuid::new_v4).or(forced),
            taken: 0,
            started: true,
            on_demand,
            drives: last_drives(drives, &begun.snapshot),
        };
        let is_new = self.look(|state| !state.catalog.arrays.contains_key(&uuid));
        let recorded = self.record(|catalog| {
            catalog.arrays.insert(uuid, known.clone());
        });
        let recorded = recorded.or_else(|refusal| {
            if is_new {
                return Err(refusal);
            }
            // It runs all the same: the watch stores that as soon as it can.
            tracing::error!(array = name, "{}", refusal.line());
            self.look(|state| state.catalog.arrays.insert(uuid, known));
            Ok(())
        });
        // A member may have been fenced since the array said how it is.
        let _ = self.keep_generation(uuid).await;
        self.refresh_contents(uuid).await;
        recorded
    }

    /// Marks the drives that an array was started with: one may have failed since, and is its all
    /// the same.
    fn note_given(&self, snapshot: &ArraySnapshot) {
        self.look(|state| {
            for member in &snapshot.members {
                let named = member.drive.as_ref().and_then(|its| state.drives.get_mut(&its.name));
                if let Some(drive) = named.filter(|drive| is_own(member, drive)) {
                    drive.used_by = Some((snapshot.uuid, member.index));
                }
            }
        });
    }

    /// Marks the drives that an array uses now, and frees those that it does not.
    pub(super) fn note_members(&self, snapshot: &ArraySnapshot) {
        let uuid = snapshot.uuid;
        self.look(|state| {
            let mut used = BTreeMap::new();
            for (name, drive) in &mut state.drives {
                if let Some((_, member)) = drive.used_by.take_if(|(array, _)| *array == uuid) {
                    used.insert(name.clone(), member);
                }
            }
            for member in &snapshot.members {
                let name = member.drive.as_ref().map(|drive| drive.name.as_str());
                let named = name.and_then(|name| state.drives.get_mut(name));
                let was_used = name.and_then(|name| used.get(name)) == Some(&member.index);
                if let Some(drive) = named.filter(|drive| is_drive_of(member, drive, was_used)) {
                    drive.used_by = Some((uuid, member.index));
                    if matches!(drive.medium, Medium::Memory { .. }) {
                        // Its label can be read on its reactor only; it says this.
                        drive.content = Content::Labelled(Labelled {
                            drive: member.drive_uuid,
                            array: uuid,
                            array_name: Some(snapshot.name.clone()),
                            member: u32::from(member.index),
                            drive_bytes: drive.bytes(),
                        });
                    }
                }
            }
        });
    }

    /// Reads the labels of an array's drives anew.
    pub(super) async fn refresh_contents(&self, uuid: Uuid) {
        for name in self.drives_of(uuid) {
            if let Err(refusal) = self.probe_drive(&name).await {
                tracing::warn!(drive = name, "{}", refusal.error);
            }
        }
    }

    /// Names of attached drives that an array uses now.
    pub(super) fn drives_of(&self, uuid: Uuid) -> Vec<String> {
        self.look(|state| state.drives_of(uuid).map(|(name, _)| name.clone()).collect())
    }

    /// Since when the drives have power that an array uses now; `None`: nobody knows.
    pub(super) fn power_cycle(&self, uuid: Uuid) -> Option<PowerCycle> {
        self.look(|state| {
            let known = state.catalog.arrays.get(&uuid)?;
            let drives = state.drives_of(uuid).map(|(_, its)| its.device().map(AsRef::as_ref));
            power_cycle(&(known.since, known.forced), drives)
        })
    }

    /// Names of attached drives that carry an array's label and are not in use.
    pub(super) fn drives_labelled(&self, uuid: Uuid) -> Vec<String> {
        self.look(|state| {
            let labelled = state.drives.iter().filter(|(_, drive)| drive.waits_for(uuid));
            labelled.map(|(name, _)| name.clone()).collect()
        })
    }

    pub async fn start_array(&self, name: &str, force: bool) -> Answer<Shown> {
        let _change = self.begin().await?;
        let runs = |uuid| self.look(|state| state.arrays.contains_key(&uuid));
        if !self.array_uuid(name).is_ok_and(runs) {
            self.probe_free_drives().await;
        }
        let (uuid, name) = self.array_meant(name)?;
        if runs(uuid) {
            return Err(Refusal::conflict(format!("array {name} runs already"))
                .fix(format!("`ashlar array show {name}` says how it is")));
        }
        self.assemble(uuid, &name, force).await?;
        self.start_exports_of(uuid).await;
        self.show_array_by_uuid(uuid).await
    }

    /// Uuid and name of an array that this host knows, or of the one on attached drives that is
    /// called so.
    fn array_meant(&self, name: &str) -> Answer<(Uuid, String)> {
        let unknown = match self.array_uuid(name) {
            Ok(uuid) => return Ok((uuid, self.array_name(uuid))),
            Err(unknown) => unknown,
        };
        let found = self.found_arrays().into_iter();
        let named =
            found.map(|(uuid, stored)| (uuid, self.name_for_found(uuid, stored.as_deref())));
        let mut meant: Vec<_> =
            named.filter(|(uuid, its)| its == name || uuid.to_string() == name).collect();
        match (meant.pop(), meant.len()) {
            (Some(one), 0) => Ok(one),
            (Some(_), _) => Err(Refusal::conflict(format!("several arrays are called {name}"))
                .fix("name one by its uuid: `ashlar drive list -o json` has them")),
            (None, _) => Err(unknown),
        }
    }

    /// Starts every array whose label is on an attached drive.
    pub async fn scan_arrays(&self, force: bool) -> Answer<ScanResult> {
        let _change = self.begin().await?;
        let mut result = ScanResult::default();
        self.probe_free_drives().await;
        let found = self.found_arrays();
        let mut coming: BTreeMap<_, _> =
            found.keys().map(|uuid| (*uuid, self.coming_of(*uuid))).collect();
        for (uuid, stored_name) in found {
            let name = self.name_for_found(uuid, stored_name.as_deref());
            if let Some(stored) = stored_name.filter(|stored| *stored != name) {
                result.notes.push(format!("array {name} is called {stored} on its drives"));
            }
            match self.assemble(uuid, &name, force).await {
                Ok(()) => {
                    self.start_exports_of(uuid).await;
                    result.started.push(self.show_array_by_uuid(uuid).await?);
                }
                Err(refusal) => result.failed.push(ScanFailure {
                    uuid,
                    name: Some(name),
                    error: refusal.error,
                    fix: refusal.fix,
                }),
            }
            coming.remove(&uuid);
        }
        Ok(result)
    }

    /// Arrays that do not run and have labels on attached drives, with their stored names. Those on
    /// demand are not looked for: guests decide where they are.
    fn found_arrays(&self) -> BTreeMap<Uuid, Option<String>> {
        self.look(|state| {
            let mut found: BTreeMap<Uuid, Option<String>> = BTreeMap::new();
            for drive in state.drives.values() {
                let is_on_demand =
                    |uuid: &Uuid| state.catalog.arrays.get(uuid).is_some_and(|its| its.on_demand);
                if let Content::Labelled(label) = &drive.content
                    && !state.arrays.contains_key(&label.array)
                    && !is_on_demand(&label.array)
                {
                    let name = found.entry(label.array).or_default();
                    *name = name.take().or_else(|| label.array_name.clone());
                }
            }
            found
        })
    }

    /// The name this host knows an array by; a stored name that is taken gets a part of the uuid.
    fn name_for_found(&self, uuid: Uuid, stored: Option<&str>) -> String {
        let known = self.look(|state| {
            let known = state.catalog.arrays.get(&uuid).map(|array| array.name.clone());
            known.ok_or_else(|| {
                stored.filter(|name| state.catalog.array_named(name).is_some()).map(str::to_owned)
            })
        });
        let short = uuid.simple().to_string();
        match (known, stored) {
            (Ok(name), _) => name,
            (Err(Some(taken)), _) => format!("{taken:.50}-{}", &short[..8]),
            (Err(None), Some(free)) if check_name("an array", free).is_ok() => free.to_owned(),
            (Err(None), _) => format!("array-{}", &short[..8]),
        }
    }

    /// Starts an array from the labels of the attached drives.
    pub(super) async fn assemble(&self, uuid: Uuid, name: &str, force: bool) -> Answer<()> {
        let was_cut =
            |drive: &String| self.attached(drive).is_ok_and(|drive| self.was_cut(&drive.content));
        let (cut, drives): (Vec<_>, Vec<_>) =
            self.drives_labelled(uuid).into_iter().partition(was_cut);
        let started = self.assemble_from(uuid, name, drives, force).await;
        started.map_err(|error| match cut.is_empty() {
            true => error,
            false => {
                let cut = cut::refusal(&format!("drive {}", cut.join(", ")));
                let text = format!("{}; {}", error.error, cut.error);
                Refusal { error: text, has_lease: error.has_lease, ..cut }
            }
        })
    }

    async fn assemble_from(
        &self,
        uuid: Uuid,
        name: &str,
        drives: Vec<String>,
        force: bool,
    ) -> Answer<()> {
        if drives.is_empty() {
            return Err(Refusal::conflict(format!(
                "array {name} cannot start: none of its drives is attached"
            ))
            .fix(format!("attach its drives, then `ashlar array start {name}`")));
        }
        // First of all: of arrays that are started side by side each has the same one every time.
        let core = self.core_for(&drives)?;
        self.look(|state| state.beginning.insert(uuid, core));
        let begun = self.begin_on(core, (uuid, name), drives, force).await;
        self.look(|state| state.beginning.remove(&uuid));
        self.adopt(core, &begun?, name, force).await
    }

    async fn begin_on(
        &self,
        core: usize,
        (uuid, name): (Uuid, &str),
        drives: Vec<String>,
        force: bool,
    ) -> Answer<Begun> {
        let newest = self.newest_superblock(&drives).await?;
        self.check_claims(uuid, name, newest.as_deref())?;
        let absent = self.absent_drives(uuid, newest.as_deref());
        self.note_taken(uuid).await?;
        let known = self.known(uuid);
        let seeds = self.seeds(&drives).await?;
        let shown = name.to_owned();
        let host = Some(self.lessee);
        let teller = self.teller(core);
        let beginning = engine::call(self.core(core), async move |reactor| {
            let (drives, kept) = plant(&reactor, seeds);
            let given = drives.clone();
            let options = AssembleOptions { force, known, host, ..AssembleOptions::default() };
            let taken = options.taken.clone();
            let begun = match Array::assemble(&reactor, drives, options).await {
                Ok(array) => open_pool(&reactor, array, teller).await,
                Err(error) => Err(translate::assemble(&shown, &absent, &full(&given), &error)),
            };
            let begun = begun.map_err(|refusal| Refusal { has_lease: taken.get(), ..refusal });
            Beginning { kept, begun }
        });
        let beginning = beginning.await?;
        self.keep_memory(core, beginning.kept);
        let begun = beginning.begun?;
        tracing::info!(array = name, state = ?begun.snapshot.state, "array started");
        if let Some(its) = begun.snapshot.replayed.filter(|its| its.read_bytes > 0) {
            let JournalReplay { read_bytes, batches, bytes, took_ms } = its;
            let text = "what its journal held was put in place";
            tracing::info!(array = name, read_bytes, batches, bytes, took_ms, "{text}");
        }
        Ok(begun)
    }

    /// As the drives have it that can be read.
    async fn newest_superblock(&self, drives: &[String]) -> Answer<Option<Box<ArraySuperblock>>> {
        let mut newest: Option<Box<ArraySuperblock>> = None;
        for drive in drives {
            let Medium::Device(device) = self.attached(drive)?.medium else { continue };
            let found = match blocking(drive, move || device.superblock()).await {
                Ok(found) => found,
                Err(refusal) => {
                    // The others know as much, and the array does without it if it must.
                    tracing::warn!(drive, "{}", refusal.error);
                    continue;
                }
            };
            newest = newest.into_iter().chain(found).max_by_key(|its| its.age());
        }
        Ok(newest)
    }

    /// What to call the drives of members that are not attached.
    fn absent_drives(&self, uuid: Uuid, newest: Option<&ArraySuperblock>) -> translate::Absent {
        self.look(|state| {
            let is_here = |member: &[u8; 16]| {
                let mut labels = state.drives.values().filter_map(|its| its.content.label());
                labels.any(|label| label.array == uuid && label.drive.as_bytes() == member)
            };
            let last = state.catalog.arrays.get(&uuid).map(|its| &its.drives);
            let members = newest.into_iter().flat_map(|its| its.members()).zip(0..);
            let absent = members.filter(|(member, _)| !is_here(&member.drive));
            let mut drives = translate::Absent::default();
            for (member, index) in absent {
                let name = last.and_then(|last| last.get(&index));
                // Another may be called that by now.
                let name = name.filter(|name| !state.drives.contains_key(*name));
                let name = name.cloned().unwrap_or_else(|| format!("the drive of member {index}"));
                if member.state() == Ok(MemberState::Trusted) {
                    drives.whole.push(name.clone());
                }
                drives.all.push(name);
            }
            drives
        })
    }

    /// Refuses an array whose superblock names a drive that is here with another array's label.
    fn check_claims(&self, uuid: Uuid, name: &str, newest: Option<&ArraySuperblock>) -> Answer<()> {
        let Some(superblock) = newest else { return Ok(()) };
        let claimed = self.look(|state| {
            let members = superblock.members().iter().enumerate();
            let mut claimed = members.filter_map(|(index, member)| {
                let mut drives = state.drives.iter();
                drives.find_map(|(name, drive)| {
                    let label = drive.content.label()?;
                    let same = label.drive.into_bytes() == member.drive && label.array != uuid;
                    same.then(|| (name.clone(), index, label.to_string()))
                })
            });
            claimed.next()
        });
        let Some((drive, member, label)) = claimed else { return Ok(()) };
        Err(Refusal::conflict(format!(
            "array {name} cannot start: two arrays claim drive {drive}: it is member {member} of \
             {name}, and its own label says {label}"
        ))
        .fix(format!(
            "see `ashlar inspect` of the drives of both; detach {drive} to start {name} without it"
        )))
    }

    /// What this host remembers of an array.
    fn known(&self, uuid: Uuid) -> Option<Known> {
        self.look(|state| {
            let known = state.catalog.arrays.get(&uuid)?;
            let current: Vec<_> = known.current.iter().map(|drive| drive.into_bytes()).collect();
            let (generation, epoch, last_epoch) =
                (known.generation, known.epoch, known.last_epoch());
            let known = Known { generation, epoch, last_epoch, current };
            (!known.current.is_empty()).then_some(known)
        })
    }

    pub async fn stop_array(&self, name: &str, force: bool) -> Answer<Shown> {
        let _change = self.begin().await?;
        let running = self.answering_array(name).await?;
        if !force {
            self.check_exports_unused(name, running.uuid).await?;
            if self.is_on_demand(running.uuid) {
                return Err(Refusal::conflict(format!("array {name} is on demand")).fix(format!(
                    "`ashlar array on-demand {name} --off` first; or leave it: it stops by itself"
                )));
            }
        }
        self.record(|catalog| {
            if let Some(known) = catalog.arrays.get_mut(&running.uuid) {
                (known.started, known.on_demand) = (false, false);
            }
        })?;
        let left = self.stop_and_tell(running).await?;
        if let Some(left) = left.as_ref() {
            tracing::warn!(array = name, "{}", left.line());
        }
        match left {
            None => self.show_array_by_uuid(running.uuid).await,
            // Who forces it knows that something is amiss, and has what was asked for.
            Some(left) if force => {
                let shown = self.show_array_by_uuid(running.uuid).await?;
                Ok(Shown { error: Some(left.line()), ..shown })
            }
            Some(left) => Err(left),
        }
    }

    /// Stops an array and its exports; those of one on demand wait. Its drives are free afterwards,
    /// even if the stop fails.
    pub(super) async fn stop_running(&self, running: Running) -> Answer<()> {
        self.stop_and_tell(running).await?.map_or(Ok(()), Err)
    }

    /// The same: what could not be finished of an array that was stopped all the same.
    async fn stop_and_tell(&self, running: Running) -> Answer<Option<Refusal>> {
        let uuid = running.uuid;
        if self.is_on_demand(uuid) && !self.look(|state| state.stopping) {
            self.park_exports_of(uuid).await;
        } else {
            self.stop_exports_of(uuid).await;
        }
        let keep_lease = self.look(|state| state.upgrading);
        let stopped = self
            .on_array(running, async move |reactor, pool| {
                let array = pool.array();
                let result =
                    if keep_lease { array.stop_for_next().await } else { array.stop().await };
                drop(reactor.withdraw(running.pool));
                (result, snapshot(&pool))
            })
            .await;
        let drives = self.drives_of(uuid);
        self.look(|state| {
            state.arrays.remove(&uuid);
            for name in &drives {
                if let Some(drive) = state.drives.get_mut(name) {
                    drive.used_by = None;
                }
            }
        });
        for name in &drives {
            if let Err(refusal) = self.probe_drive(name).await {
                tracing::warn!(drive = name, "{}", refusal.error);
            }
        }
        let name = self.array_name(uuid);
        let (result, last) = stopped?;
        self.record_snapshot(&last)?;
        if let Err(error) = result {
            return Ok(Some(translate::stop(&name, error)));
        }
        tracing::info!(array = name, "array stopped");
        Ok(None)
    }

    /// Makes a drive blank.
    pub(super) async fn wipe_drive(&self, name: &str) -> Answer<()> {
        match self.attached(name)?.medium {
            Medium::Device(device) => {
                wipe(name, &device).await?;
                self.probe_drive(name).await?;
            }
            Medium::Memory { memory, home } => {
                if let Some(home) = home {
                    engine::forget(self.core(home.core), home.key).await?;
                }
                self.look(|state| {
                    if let Some(drive) = state.drives.get_mut(name) {
                        drive.medium = Medium::Memory { memory, home: None };
                        drive.content = Content::Blank;
                    }
                });
            }
        }
        Ok(())
    }
}

/// Names of those that had no room lately.
fn full(drives: &[Rc<Drive>]) -> Vec<String> {
    let full = drives.iter().filter(|drive| drive.is_full());
    full.map(|drive| drive.name().to_owned()).collect()
}

/// Opens the pool of an array that has just started; an array whose pool does not open is stopped.
async fn open_pool(reactor: &Reactor, array: Rc<Array>, teller: Teller) -> Answer<Begun> {
    match Pool::open(array.clone()).await {
        Ok(pool) => {
            let snapshot = snapshot(&pool);
            let pool = reactor.publish(pool);
            array.set_witness(teller.of(snapshot.uuid, pool));
            Ok(Begun { pool, snapshot })
        }
        Err(error) => {
            let refusal = translate::pool(&error);
            let text = format!("the array's volumes cannot be read: {}", refusal.error);
            // Best effort: the first error is the one to tell. Nobody else has had it here.
            let _ = array.stop_for_next().await;
            Err(Refusal { error: text, ..refusal })
        }
    }
}

/// Whether a drive of the name that a member's drive has is that drive. One that was pulled keeps
/// its name in the array while another may be attached by it, perhaps for another array; or the
/// same anew, which the array has not taken back yet.
fn is_drive_of(member: &MemberSnapshot, drive: &Attached, was_used: bool) -> bool {
    drive.used_by.is_none() && (member.is_present() || is_own(member, drive) && was_used)
}

/// Whether a drive carries the label of the member's own.
fn is_own(member: &MemberSnapshot, drive: &Attached) -> bool {
    drive.content.label().is_some_and(|label| label.drive == member.drive_uuid)
}

/// The drives members had last, brought up to date.
pub(super) fn last_drives(
    mut drives: BTreeMap<u8, String>,
    snapshot: &ArraySnapshot,
) -> BTreeMap<u8, String> {
    for member in &snapshot.members {
        if let Some(drive) = &member.drive {
            drives.insert(member.index, drive.name.clone());
        }
    }
    drives
}
