//! What the daemon says about what it holds.

use std::collections::BTreeMap;
use std::path::Path;

use ashlar_reactor::nvme::remote::{Report, Trouble};
use uuid::Uuid;

use crate::access::SocketAccess;
use crate::api::array::{Array, ArrayState, Member, Takeover};
use crate::api::drive::{
    Drive, DriveHealth, DriveKind, DriveQueue, DriveSource, DriveState, PathState, RemotePath,
};
use crate::api::export::{Export, ExportCounters, ExportPart, ExportState};
use crate::api::status::Status;
use crate::api::traffic::Traffic;
use crate::device::content::Content;
use crate::device::{Identity, OpenDevice};
use crate::engine::{self, Memory};
use crate::host::cores::Reports;
use crate::host::problems::problems;
use crate::host::{Attached, Host, Medium, Running, exports};
use crate::refusal::{Answer, Refusal, RefusalKind};
use crate::remote::Initiator;
use crate::served::Served;
use crate::snapshot::{ArraySnapshot, MemberSnapshot, percent};
use crate::takeover::Decision;

/// All running arrays at one moment; a refusal for those that do not answer.
pub(super) type Snapshots = BTreeMap<Uuid, Answer<ArraySnapshot>>;

impl Host {
    /// Asks all running arrays, and waits but once for a core that does not answer.
    pub(super) async fn snapshots(&self) -> Snapshots {
        let mut snapshots = Snapshots::new();
        let mut silent: BTreeMap<usize, Refusal> = BTreeMap::new();
        for running in self.running() {
            let snapshot = match silent.get(&running.core) {
                Some(refusal) => Err(refusal.clone()),
                None => self.snapshot(running).await,
            };
            if let Err(refusal) = &snapshot
                && refusal.kind == RefusalKind::Failed
            {
                silent.insert(running.core, refusal.clone());
            }
            snapshots.insert(running.uuid, snapshot);
        }
        snapshots
    }

    pub async fn list_drives(&self) -> Vec<Drive> {
        self.drives_with(&self.snapshots().await, &self.reports().await)
    }

    fn drives_with(&self, snapshots: &Snapshots, reports: &Reports) -> Vec<Drive> {
        let mut names: Vec<String> =
            self.look(|state| state.catalog.drives.keys().cloned().collect());
        names.sort_by(|a, b| natord::compare(a, b));
        let shown = names.iter().filter_map(|name| self.drive_with(name, snapshots, reports));
        shown.collect()
    }

    pub async fn show_drive(&self, name: &str) -> Answer<Drive> {
        let (snapshots, reports) = (self.snapshots().await, self.reports().await);
        self.drive_with(name, &snapshots, &reports).ok_or_else(|| {
            Refusal::unknown(format!("there is no drive {name}"))
                .fix("`ashlar drive list` shows all; `ashlar drive attach PATH` adds one")
        })
    }

    fn drive_with(&self, name: &str, snapshots: &Snapshots, reports: &Reports) -> Option<Drive> {
        let (known, attached, why) = self.look(|state| {
            let known = state.catalog.drives.get(name).cloned();
            (known, state.drives.get(name).cloned(), state.missing.get(name).map(Refusal::line))
        });
        let source = known?.source;
        let Some(attached) = attached else {
            return Some(missing_drive(name, source, why));
        };
        let label = attached.content.label().cloned();
        let running = |array: &Uuid| snapshots.get(array)?.as_ref().ok();
        let used = attached.used_by.and_then(|(array, member)| {
            let mut members = running(&array)?.members.iter();
            members.find(|its| its.index == member)?.drive.as_ref()
        });
        let array_uuid =
            attached.used_by.map(|(array, _)| array).or(label.as_ref().map(|label| label.array));
        let member = attached.used_by.map(|(_, member)| u32::from(member));
        let kind = kind_of(&attached);
        let trouble = attached.device().and_then(|device| device.trouble());
        let works = used.is_some_and(|drive| drive.health != DriveHealth::Failed);
        let passed_over = attached.passed_over.clone().filter(|_| !works).map(|its| its.why);
        let is_spare = || self.look(|state| state.catalog.spares.contains_key(name));
        let state = match attached.used_by {
            Some(_) => DriveState::Member,
            None if is_spare() => DriveState::Spare,
            None if is_replaced(&attached, running) => DriveState::Replaced,
            None => DriveState::Free,
        };
        let queue = self.queue_of(&attached, reports);
        Some(Drive {
            name: name.to_owned(),
            source,
            state,
            error: trouble.or_else(|| self.cut_of(&attached.content)).or(passed_over),
            kind: Some(kind),
            bytes: Some(attached.bytes()),
            sector_bytes: Some(attached.sector_bytes()),
            content: Some(attached.content.to_string()),
            uuid: label.as_ref().map(|label| label.drive),
            array: array_uuid.map(|uuid| self.name_of_label(uuid, &attached.content)),
            array_uuid,
            member: member.or(label.as_ref().map(|label| label.member)),
            health: used.map(|drive| drive.health),
            history: label.as_ref().and_then(|label| self.history_of(label.drive)),
            slow: used.map(|drive| drive.slowness.is_some()),
            slowness: used.and_then(|drive| drive.slowness),
            full: used.map(|drive| drive.is_full),
            deleted: attached.device().is_some_and(|device| device.is_deleted()),
            counters: used.map(|drive| drive.counters),
            latency: used.map(|drive| drive.latency),
            traffic: used.map(|drive| with_depth(&drive.traffic, queue.as_ref())),
            queue,
            path: attached.device().and_then(|device| path_of(device, self.initiator)),
        })
    }

    /// This host's name of an array, or the one its label goes by.
    fn name_of_label(&self, uuid: Uuid, content: &Content) -> String {
        let known = self.look(|state| state.catalog.arrays.get(&uuid).map(|a| a.name.clone()));
        let stored = content.label().and_then(|label| label.array_name.clone());
        known.or(stored).unwrap_or_else(|| uuid.to_string())
    }

    pub async fn list_arrays(&self) -> Vec<Array> {
        self.arrays_with(&self.snapshots().await)
    }

    fn arrays_with(&self, snapshots: &Snapshots) -> Vec<Array> {
        let uuids: Vec<Uuid> = self.look(|state| state.catalog.arrays.keys().copied().collect());
        // One that was deleted meanwhile is left out.
        let shown = uuids.iter().filter_map(|uuid| self.array_with(*uuid, snapshots).ok());
        let mut arrays: Vec<Array> = shown.collect();
        arrays.sort_by(|a, b| natord::compare(&a.name, &b.name));
        arrays
    }

    pub async fn show_array(&self, name: &str) -> Answer<Array> {
        self.show_array_by_uuid(self.array_uuid(name)?).await
    }

    pub(super) async fn show_array_by_uuid(&self, uuid: Uuid) -> Answer<Array> {
        let mut snapshots = Snapshots::new();
        if let Some(running) = self.look(|state| state.arrays.get(&uuid).copied()) {
            snapshots.insert(uuid, self.snapshot(running).await);
        }
        self.array_with(uuid, &snapshots)
    }

    fn array_with(&self, uuid: Uuid, snapshots: &Snapshots) -> Answer<Array> {
        let (known, running, why) = self.look(|state| {
            let known = state.catalog.arrays.get(&uuid).cloned();
            (known, state.arrays.get(&uuid).copied(), state.unavailable.get(&uuid).cloned())
        });
        let known = known.ok_or_else(|| Refusal::unknown("the array was deleted meanwhile"))?;
        let (name, on_demand) = (known.name, known.on_demand);
        let array = match (running, snapshots.get(&uuid), why) {
            (Some(running), Some(Ok(snapshot)), _) => self.running_shown(&name, running, snapshot),
            (Some(_), Some(Err(refusal)), _) => {
                let why = format!("array {name} does not answer: {}", refusal.line());
                idle_array(&name, uuid, ArrayState::Silent, Some(why))
            }
            (_, _, Some(why)) => idle_array(&name, uuid, ArrayState::Unavailable, Some(why.line())),
            (_, _, None) => idle_array(&name, uuid, ArrayState::Stopped, None),
        };
        Ok(Array { on_demand, ..array })
    }

    fn running_shown(&self, name: &str, running: Running, snapshot: &ArraySnapshot) -> Array {
        let plans = self.plans(snapshot);
        let members = snapshot.members.iter();
        let mut volumes: Vec<String> =
            snapshot.volumes.iter().map(|volume| volume.name.clone()).collect();
        volumes.sort_by(|a, b| natord::compare(a, b));
        Array {
            name: name.to_owned(),
            uuid: snapshot.uuid,
            state: snapshot.state,
            may_lose: Some(snapshot.may_lose()),
            on_demand: false,
            error: None,
            cpu: Some(self.cores[running.core].cpu()),
            level: Some(snapshot.level.clone()),
            copies: Some(snapshot.copies),
            groups: Some(snapshot.groups),
            data_chunks: Some(snapshot.data_chunks),
            parity_chunks: Some(snapshot.parity_chunks),
            chunk_bytes: Some(snapshot.chunk_bytes),
            stripes: Some(snapshot.stripes),
            capacity_bytes: Some(snapshot.capacity),
            free_bytes: Some(snapshot.free),
            generation: Some(snapshot.generation),
            members: members.map(|member| self.member_shown(snapshot, member, &plans)).collect(),
            volumes,
            settings: Some(snapshot.settings),
            integrity: Some(snapshot.integrity),
            journal: Some(snapshot.journal),
            replayed: snapshot.replayed,
            written_regions: Some(snapshot.written_regions),
            regions: Some(snapshot.regions),
            dirty_regions: Some(snapshot.dirty_regions),
            bad_blocks: snapshot.bad_blocks.clone(),
            resync: snapshot.resync,
            rebuild: snapshot.rebuild,
            rebuild_error: snapshot.rebuild_error.clone(),
            restripe: snapshot.restripe,
            restripe_error: snapshot.restripe_error.clone(),
            scrub: Some(snapshot.scrub.clone()),
            counters: Some(snapshot.counters),
            traffic: Some(snapshot.traffic.clone()),
        }
    }

    fn member_shown(
        &self,
        array: &ArraySnapshot,
        member: &MemberSnapshot,
        plans: &BTreeMap<u8, Decision>,
    ) -> Member {
        let place = (array.uuid, member.index);
        let (drive, last_drive) = self.look(|state| {
            let mut drives = state.drives.iter();
            let drive = drives.find(|(_, drive)| drive.used_by == Some(place));
            let known = state.catalog.arrays.get(&array.uuid);
            let last = known.and_then(|known| known.drives.get(&member.index));
            (drive.map(|(name, _)| name.clone()), last.cloned())
        });
        let seen = member.drive.as_ref();
        let used = drive.as_ref().and(seen);
        Member {
            index: member.index,
            last_drive: seen.map(|drive| drive.name.clone()).or(last_drive),
            drive,
            drive_uuid: member.drive_uuid,
            state: member.state,
            health: used.map(|drive| drive.health),
            slow: used.is_some_and(|drive| drive.slowness.is_some()),
            slowness: used.and_then(|drive| drive.slowness),
            present: member.is_present(),
            history: self.history_of(member.drive_uuid),
            counters: used.map(|drive| drive.counters),
            wrong_stripes: member.wrong_stripes,
            takeover: plans.get(&member.index).and_then(takeover_shown),
            rebuilt_percent: match member.state {
                crate::api::array::MemberState::Trusted => 100,
                crate::api::array::MemberState::Stale => 0,
                crate::api::array::MemberState::Rebuilding => {
                    percent(member.rebuilt_stripes, array.stripes)
                }
            },
        }
    }

    pub async fn status(&self) -> Status {
        let snapshots = self.snapshots().await;
        let arrays = self.arrays_with(&snapshots);
        let reports = self.reports().await;
        let drives = self.drives_with(&snapshots, &reports);
        let exports = self.exports_with(&reports).await;
        let spares = self.spares_with(&snapshots);
        let mut problems = problems(&drives, &arrays, &spares, &exports);
        let unsaved = self.look(|state| state.unsaved.clone());
        problems.extend(unsaved.map(|refusal| refusal.line()));
        Status {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_s: self.started.elapsed().as_secs(),
            cores: self.cores_with(&reports, &exports),
            volumes: self.volumes_with(&snapshots),
            drives,
            arrays,
            spares,
            exports,
            problems,
        }
    }

    pub async fn list_exports(&self) -> Vec<Export> {
        self.exports_with(&self.reports().await).await
    }

    pub(super) async fn exports_with(&self, reports: &Reports) -> Vec<Export> {
        let mut names: Vec<String> =
            self.look(|state| state.catalog.exports.keys().cloned().collect());
        names.sort_by(|a, b| natord::compare(a, b));
        let answers = |core: usize| reports.contains_key(&core);
        let mut exports = Vec::new();
        for name in names {
            // One that was deleted meanwhile is left out.
            exports.extend(self.export_with(&name, answers).await.ok());
        }
        exports
    }

    /// The reactors that serve an export.
    pub(super) fn cores_of(&self, export: &str) -> Vec<usize> {
        self.look(|state| {
            let parts = state.exports.get(export).map(|its| its.parts.iter());
            parts.into_iter().flatten().map(|(core, _)| *core).collect()
        })
    }

    fn parts_shown(&self, name: &str, queues: &[u16]) -> Vec<ExportPart> {
        let part = |(core, queues): (usize, &u16)| ExportPart {
            cpu: self.cores[core].cpu(),
            queues_active: *queues,
        };
        self.cores_of(name).into_iter().zip(queues).map(part).collect()
    }

    pub async fn show_export(&self, name: &str) -> Answer<Export> {
        self.export_with(name, |_| true).await
    }

    /// `answers`: whether the reactor of a core is worth asking.
    async fn export_with(&self, name: &str, answers: impl Fn(usize) -> bool) -> Answer<Export> {
        let (known, why) = self.look(|state| {
            let known = state.catalog.exports.get(name).cloned();
            (known, state.down.get(name).map(|its| its.why.line()))
        });
        let known = known.ok_or_else(|| exports::unknown(name))?;
        let array = self.array_name(known.array);
        let mut export = Export {
            qemu: known.front.qemu(name),
            libvirt: known.front.libvirt(name),
            nvme: known.front.nvme(),
            kind: known.front.kind(),
            place: known.front.place(name),
            places: known.front.places(name),
            socket: known.front.socket().map(Path::to_owned),
            socket_access: known.front.access().map(SocketAccess::in_full),
            queues: known.front.queues(),
            name: name.to_owned(),
            volume: known.volume,
            array,
            limits: known.limits,
            serial: None,
            state: ExportState::Down,
            error: None,
            queues_active: 0,
            parts: Vec::new(),
            counters: ExportCounters::default(),
            traffic: None,
            way: None,
            unreachable: None,
        };
        let Some((served, serial)) = self.served(name) else {
            export.error = why.or_else(|| Some(format!("array {} does not run", export.array)));
            if let Some(waiting) = self.look(|state| state.waiting.get(name).cloned()) {
                self.show_waiting(&mut export, known.array, &waiting).await;
            }
            return Ok(export);
        };
        export.serial = Some(serial);
        let cores = self.cores_of(name);
        let status = match cores.into_iter().all(answers) {
            true => served.status().await,
            false => Err(engine::silent()),
        };
        let status = match status {
            Ok(status) => status,
            Err(refusal) => {
                export.error = Some(refusal.line());
                return Ok(export);
            }
        };
        export.unreachable = served.lost();
        export.state = state_of(status.connected, export.unreachable.as_deref());
        export.error = match export.state {
            ExportState::Down => export.unreachable.clone(),
            ExportState::Listening | ExportState::Connected => status.last_error,
        };
        export.queues_active = status.queues_active;
        export.parts = self.parts_shown(name, &status.queues_of_parts);
        export.counters = status.counters;
        export.traffic = Some(status.traffic);
        export.way = status.way;
        Ok(export)
    }

    async fn show_waiting(&self, export: &mut Export, array: Uuid, waiting: &Served) {
        // One that was just handed over is asked again by the next look.
        let connected = waiting.status().await.is_ok_and(|its| its.connected);
        export.unreachable = waiting.lost();
        export.state = state_of(connected, export.unreachable.as_deref());
        let waits_for =
            |why: &Refusal| format!("its guest waits for array {}: {}", export.array, why.error);
        export.error = self.look(|state| {
            let down = state.down.get(&export.name).map(|its| its.why.line());
            let waits = state.unavailable.get(&array).map(waits_for);
            waits.or(down).or(export.unreachable.clone())
        });
    }
}

fn state_of(connected: bool, unreachable: Option<&str>) -> ExportState {
    match (connected, unreachable) {
        (true, _) => ExportState::Connected,
        (false, None) => ExportState::Listening,
        (false, Some(_)) => ExportState::Down,
    }
}

/// Whether a drive was a member of a running array and another has its place now.
pub(super) fn is_replaced<'a>(
    drive: &Attached,
    running: impl Fn(&Uuid) -> Option<&'a ArraySnapshot>,
) -> bool {
    let Content::Labelled(label) = &drive.content else { return false };
    let Some(array) = running(&label.array) else { return false };
    drive.used_by.is_none() && array.members.iter().all(|its| its.drive_uuid != label.drive)
}

fn takeover_shown(decision: &Decision) -> Option<Takeover> {
    match decision {
        Decision::Leave | Decision::Rejoin(_) => None,
        Decision::Wait { spare, left } => {
            let remaining_ms = u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
            Some(Takeover { spare: spare.clone(), remaining_ms })
        }
        Decision::TakeOver(spare) => Some(Takeover { spare: spare.clone(), remaining_ms: 0 }),
    }
}

fn kind_of(attached: &Attached) -> DriveKind {
    match &attached.medium {
        Medium::Device(device) if device.lossy => DriveKind::Lossy,
        Medium::Device(device) => match device.identity {
            Identity::File { .. } => DriveKind::File,
            Identity::BlockDevice { .. } => DriveKind::BlockDevice,
            Identity::Pci { .. } => DriveKind::Nvme,
            Identity::Remote { .. } => DriveKind::Remote,
        },
        Medium::Memory { memory: Memory::Ram { .. }, .. } => DriveKind::Ram,
        Medium::Memory { memory: Memory::Model(_), .. } => DriveKind::Model,
    }
}

/// One that should be attached, and why it is not.
pub(super) fn missing_drive(name: &str, source: DriveSource, why: Option<String>) -> Drive {
    Drive {
        name: name.to_owned(),
        source,
        state: DriveState::Missing,
        error: why,
        kind: None,
        bytes: None,
        sector_bytes: None,
        content: None,
        uuid: None,
        array: None,
        array_uuid: None,
        member: None,
        health: None,
        history: None,
        slow: None,
        slowness: None,
        full: None,
        deleted: false,
        counters: None,
        latency: None,
        traffic: None,
        queue: None,
        path: None,
    }
}

/// How a drive of another host is reached; `None`: it is of this host.
fn path_of(device: &OpenDevice, initiator: Initiator) -> Option<RemotePath> {
    let drive = device.remote()?;
    let (target, report) = (drive.target(), drive.report());
    let state = match &report {
        Report { lost: Some(Trouble::Another), .. } => PathState::Another,
        Report { lost: Some(_), .. } => PathState::Lost,
        Report { users: 0, .. } => PathState::Idle,
        Report { users, connected, .. } if connected < users => PathState::Connecting,
        Report { .. } => PathState::Connected,
    };
    let host = match target.host.contains(':') {
        true => format!("[{}]", target.host),
        false => target.host.clone(),
    };
    Some(RemotePath {
        transport: "nvme-tcp".to_owned(),
        address: format!("{host}:{}", target.port),
        subsystem: target.subsystem.clone(),
        namespace: target.namespace,
        host_nqn: initiator.nqn(),
        header_digest: target.digests.header,
        data_digest: target.digests.data,
        has_secret: target.credentials.is_some(),
        has_controller_secret: (target.credentials.as_ref())
            .is_some_and(|its| its.of_controller.is_some()),
        volatile_cache: drive.identity().controller.volatile_cache,
        tells_power: drive.power().is_some(),
        state,
        connected: report.connected,
        reconnects: report.reconnects,
        error: report.lost.or(report.trouble).map(|trouble| trouble.to_string()),
    })
}

/// An array of which little is known.
pub(super) fn idle_array(
    name: &str,
    uuid: Uuid,
    state: ArrayState,
    error: Option<String>,
) -> Array {
    Array {
        name: name.to_owned(),
        uuid,
        state,
        may_lose: None,
        on_demand: false,
        error,
        cpu: None,
        level: None,
        copies: None,
        groups: None,
        data_chunks: None,
        parity_chunks: None,
        chunk_bytes: None,
        stripes: None,
        capacity_bytes: None,
        free_bytes: None,
        generation: None,
        members: Vec::new(),
        volumes: Vec::new(),
        settings: None,
        integrity: None,
        journal: None,
        replayed: None,
        written_regions: None,
        regions: None,
        dirty_regions: None,
        bad_blocks: Vec::new(),
        resync: None,
        rebuild: None,
        rebuild_error: None,
        restripe: None,
        restripe_error: None,
        scrub: None,
        counters: None,
        traffic: None,
    }
}

/// How much of a drive's work is under way, only the backend of its reactor knows.
fn with_depth(traffic: &Traffic, queue: Option<&DriveQueue>) -> Traffic {
    Traffic {
        depth: queue.map(|its| its.depth),
        depth_max: queue.map(|its| its.depth_max),
        ..traffic.clone()
    }
}
