//! An engine to test against: one reactor, one array on RAM drives, volumes, exports.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::array::Array;
use ashlar_raid::layout::{Layout, Shape};
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_reactor::registry::Key;
use ashlar_target::vhost::{ExportSpec, VhostExport};

/// Longer than anything here takes on a slow machine.
pub const PATIENCE: Duration = Duration::from_secs(30);
pub const SERIAL: &str = "ashlar-test-serial-x";

pub struct Rig {
    pub core: Core,
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
        // Tests run at the same time: not all on one CPU.
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let cpus = std::thread::available_parallelism().unwrap().get();
        let cpu = NEXT.fetch_add(1, Ordering::Relaxed) as usize % cpus;
        let core = Core::start(cpu, poll_window).unwrap();
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
            let drive =
                |i: u8| Drive::new(&reactor, Device::Ram { bytes }, limits, &format!("ram{i}"));
            let drives = (0..drives).map(|i| ([i; 16], drive(i)));
            let array = Array::create(&reactor, &spec, drives.collect()).await.unwrap();
            let pool = Pool::open(array).await.unwrap();
            let volume = pool.create([2; 16], "disk", volume_bytes).await.unwrap();
            (reactor.publish(Rc::new(volume)), reactor.publish(pool))
        });
        Rig { core, volume, pool }
    }

    pub fn export(&self, queues_max: u16) -> VhostExport {
        self.export_at(socket_path(), queues_max)
    }

    pub fn export_at(&self, socket: PathBuf, queues_max: u16) -> VhostExport {
        let spec = ExportSpec { name: "disk".into(), socket, queues_max, serial: SERIAL.into() };
        VhostExport::start(self.core.sender().clone(), self.volume, spec).unwrap()
    }

    /// How often each drive was flushed.
    pub fn flushes(&self) -> Vec<u64> {
        let key = self.pool;
        on_reactor(&self.core, move |reactor| async move {
            let members = reactor.get(key).unwrap().array().status().members;
            members.iter().map(|m| m.drive.as_ref().unwrap().counters().flushes).collect()
        })
    }

    pub fn resize(&self, bytes: u64) {
        let key = self.pool;
        on_reactor(&self.core, move |reactor| async move {
            reactor.get(key).unwrap().resize("disk", bytes).await.unwrap();
        });
    }
}

/// Runs something on the reactor and waits for it.
pub fn on_reactor<T: Send + 'static, F: Future<Output = T> + 'static>(
    core: &Core,
    make: impl FnOnce(Reactor) -> F + Send + 'static,
) -> T {
    let (reply, answer) = mpsc::channel();
    let letter = move |reactor: &Reactor| {
        let future = make(reactor.clone());
        reactor.spawn(async move { reply.send(future.await).unwrap() });
    };
    core.sender().send(letter).unwrap();
    answer.recv_timeout(PATIENCE).expect("the reactor answers")
}
