//! An engine to test against: one reactor, one array on RAM drives, volumes, exports.

use std::fs::File;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_drive::gate::Gate;
use ashlar_drive::health::HealthState;
use ashlar_format::array_superblock::{Level, MemberState};
use ashlar_pool::offer::Offer;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::array::Array;
use ashlar_raid::layout::{Layout, Shape};
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_raid::status::MemberStatus;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_reactor::registry::Key;
use ashlar_target::export::Part;
use ashlar_target::limits::{RateLimits, Rates};
use ashlar_target::unix_socket::Access;
use ashlar_target::vhost::{ExportSpec, VhostExport};
use rustix::fs::{MemfdFlags, memfd_create};

/// Longer than anything here takes on a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const SERIAL: &str = "ashlar-test-serial-x";

pub struct Rig {
    pub core: Core,
    /// Reactors to which the volume is offered.
    others: Vec<(Core, Key<Volume>)>,
    pub volume: Key<Volume>,
    pool: Key<Pool>,
}

/// A path that no other test uses.
pub fn socket_path() -> PathBuf {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("ashlar-export-{}-{number}.sock", std::process::id()))
}

impl Rig {
    pub fn new(level: Level, drives: u8, volume_bytes: u64) -> Rig {
        Rig::polling(level, drives, volume_bytes, Duration::from_micros(50))
    }

    pub fn polling(level: Level, drives: u8, volume_bytes: u64, poll_window: Duration) -> Rig {
        Rig::made_of(|bytes| Device::Ram { bytes }, (level, drives), volume_bytes, poll_window)
    }

    /// Drives that the kernel reads and writes: files, past its cache.
    pub fn on_files(level: Level, drives: u8, volume_bytes: u64) -> Rig {
        let device = |bytes| {
            let file = tempfile::tempfile().unwrap();
            file.set_len(bytes).unwrap();
            let flags = rustix::fs::fcntl_getfl(&file).unwrap();
            rustix::fs::fcntl_setfl(&file, flags | rustix::fs::OFlags::DIRECT).unwrap();
            Device::File { file: std::sync::Arc::new(file) }
        };
        Rig::made_of(device, (level, drives), volume_bytes, Duration::from_micros(50))
    }

    fn made_of(
        device: fn(u64) -> Device,
        (level, drives): (Level, u8),
        volume_bytes: u64,
        poll_window: Duration,
    ) -> Rig {
        let core = start_core(poll_window);
        let (volume, pool) = on_reactor(&core, move |reactor| async move {
            let spec = ArraySpec {
                uuid: [1; 16],
                name: "rig".into(),
                level,
                chunk_bytes: 64 << 10,
                shape: Shape::default(),
                policy: None,
                integrity: false,
                settings: SettingsChange::default(),
                host: None,
            };
            let layout = Layout::new(level, drives.into(), spec.shape, spec.chunk_bytes);
            let data = layout.expect("a layout that can be").data;
            let bytes = volume_bytes / u64::from(data) + (16 << 20);
            let limits = Limits { bytes, sector_bytes: 512, zeroes_cheaply: true };
            let drive = |i: u8| Drive::new(&reactor, device(bytes), limits, &format!("drive{i}"));
            let drives = (0..drives).map(|i| ([i; 16], drive(i)));
            let array = Array::create(&reactor, &spec, drives.collect()).await.unwrap();
            let pool = Pool::open(array).await.unwrap();
            let volume = pool.create([2; 16], "disk", volume_bytes).await.unwrap();
            (reactor.publish(Rc::new(volume)), reactor.publish(pool))
        });
        Rig { core, others: Vec::new(), volume, pool }
    }

    /// The same, with one more reactor for the queues of exports.
    pub fn spread(level: Level, drives: u8, volume_bytes: u64, poll_window: Duration) -> Rig {
        Rig::polling(level, drives, volume_bytes, poll_window).and_another(poll_window)
    }

    /// The same, of drives whose writes can be held.
    #[allow(dead_code, reason = "not all who have this module use it")]
    pub fn holding(level: Level, drives: u8, volume_bytes: u64, poll_window: Duration) -> Rig {
        // Those of the engine's own memory ask no gate.
        let device = |bytes| {
            let file = File::from(memfd_create("drive", MemfdFlags::CLOEXEC).unwrap());
            file.set_len(bytes).unwrap();
            Device::File { file: Arc::new(file) }
        };
        Rig::made_of(device, (level, drives), volume_bytes, poll_window).and_another(poll_window)
    }

    fn and_another(mut self, poll_window: Duration) -> Rig {
        let volume = self.volume;
        let offer = on_reactor(&self.core, move |reactor| async move {
            let volume = Volume::clone(&reactor.get(volume).unwrap());
            Offer::new(&reactor, volume).unwrap()
        });
        let other = start_core(poll_window);
        let volume = on_reactor(&other, move |reactor| async move {
            reactor.publish(Rc::new(offer.open(&reactor)))
        });
        self.others.push((other, volume));
        self
    }

    pub fn export(&self, queues_max: u16) -> VhostExport {
        self.export_at(socket_path(), queues_max)
    }

    pub fn export_at(&self, socket: PathBuf, queues_max: u16) -> VhostExport {
        VhostExport::start(self.parts(), self.spec(socket, queues_max)).unwrap()
    }

    pub fn spec(&self, socket: PathBuf, queues_max: u16) -> ExportSpec {
        let limits = RateLimits::new(Rates::default());
        let (serial, access) = (SERIAL.into(), Access::default());
        ExportSpec { name: "disk".into(), socket, access, queues_max, serial, limits, since: 0 }
    }

    /// The other reactors let the volume go.
    pub fn withdraw_others(&self) {
        for (core, volume) in &self.others {
            let volume = *volume;
            on_reactor(core, move |reactor| async move { drop(reactor.withdraw(volume)) });
        }
    }

    pub fn parts(&self) -> Vec<Part> {
        let part = |core: &Core, volume| Part { core: core.sender().clone(), volume };
        let others = self.others.iter().map(|(core, volume)| part(core, *volume));
        std::iter::once(part(&self.core, self.volume)).chain(others).collect()
    }

    /// How often each drive was flushed.
    pub fn flushes(&self) -> Vec<u64> {
        let key = self.pool;
        on_reactor(&self.core, move |reactor| async move {
            let members = reactor.get(key).unwrap().array().status().members;
            members.iter().map(|m| m.drive.as_ref().unwrap().counters().flushes).collect()
        })
    }

    /// From now on drives write nothing, until they are let: those of [`Rig::holding`].
    #[allow(dead_code, reason = "not all who have this module use it")]
    pub fn hold_writes(&self) -> Key<Gate> {
        let key = self.pool;
        on_reactor(&self.core, move |reactor| async move {
            let gate = Gate::open_until(reactor.now());
            for member in reactor.get(key).unwrap().array().status().members {
                member.drive.unwrap().put_behind(gate.clone());
            }
            reactor.publish(gate)
        })
    }

    #[allow(dead_code, reason = "not all who have this module use it")]
    pub fn let_writes_go(&self, gate: Key<Gate>) {
        on_reactor(&self.core, move |reactor| async move {
            reactor.withdraw(gate).unwrap().move_on(&reactor, Instant::MAX);
        });
    }

    /// Whether all members are trusted and all drives well, and nothing had to be read in another
    /// way than the first.
    pub fn is_well(&self) -> bool {
        let key = self.pool;
        on_reactor(&self.core, move |reactor| async move {
            let status = reactor.get(key).unwrap().array().status();
            let is_well = |member: &MemberStatus| {
                let health = member.drive.as_ref().map(|drive| drive.health().state);
                member.state == MemberState::Trusted && health == Some(HealthState::Healthy)
            };
            let counters = status.counters;
            let is_plain = counters.reconstructed == 0 && counters.repaired == 0;
            is_plain && status.members.iter().all(is_well)
        })
    }

    pub fn resize(&self, bytes: u64) {
        let key = self.pool;
        on_reactor(&self.core, move |reactor| async move {
            reactor.get(key).unwrap().resize("disk", bytes).await.unwrap();
        });
    }
}

/// Tests run at the same time: not all on one CPU.
fn start_core(poll_window: Duration) -> Core {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let cpus = std::thread::available_parallelism().unwrap().get();
    let cpu = NEXT.fetch_add(1, Ordering::Relaxed) as usize % cpus;
    Core::start(cpu, poll_window).unwrap()
}

/// Runs something on the reactor and waits for it.
pub fn on_reactor<T: Send + 'static, F: Future<Output = T> + 'static>(
    core: &Core,
    make: impl FnOnce(Reactor) -> F + Send + 'static,
) -> T {
    let answer = core.sender().ask(make).unwrap();
    answer.recv_timeout(PATIENCE).expect("the reactor answers")
}
