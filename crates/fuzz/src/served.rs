//! A volume in this process, for targets of a coverage-guided fuzzer.

use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_target::export::{Export, Part};
use ashlar_target::limits::{RateLimits, Rates};

use crate::choices::Choices;

const MEMBERS: u8 = 3;
const DRIVE_BYTES: u64 = 64 << 20;
const VOLUME_BYTES: u64 = 16 << 20;
/// What the reactor polls for: lives follow each other quickly.
const POLL_WINDOW: Duration = Duration::from_millis(1);

/// A RAID 5 of drives of memory on a reactor that goes on until the process ends.
#[expect(clippy::expect_used, reason = "without it nothing can be tried")]
pub fn parts() -> Vec<Part> {
    let core = Core::start(0, POLL_WINDOW).expect("a reactor");
    let made = core.sender().ask(|reactor: Reactor| async move {
        let volume = volume(&reactor).await;
        reactor.publish(Rc::new(volume))
    });
    let volume = made.expect("the reactor runs").recv().expect("it answers");
    let part = Part { core: core.sender().clone(), volume };
    std::mem::forget(core);
    vec![part]
}

/// Of the export.
pub fn socket_path() -> PathBuf {
    std::env::temp_dir().join(format!("ashlar-fuzz-{}.sock", std::process::id()))
}

/// None.
pub fn limits() -> Arc<RateLimits> {
    RateLimits::new(Rates::default())
}

#[expect(clippy::expect_used, reason = "without it nothing can be tried")]
async fn volume(reactor: &Reactor) -> Volume {
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "fuzz".into(),
        level: Level::Raid5,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: None,
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = |member: u8| {
        let device = Device::Ram { bytes: DRIVE_BYTES };
        ([member; 16], Drive::new(reactor, device, limits, &format!("ram{member}")))
    };
    let array = Array::create(reactor, &spec, (0..MEMBERS).map(drive).collect()).await;
    let pool = Pool::open(array.expect("an array")).await.expect("a pool");
    pool.create([2; 16], "disk", VOLUME_BYTES).await.expect("a volume")
}

/// Has a client live by `input`, and waits until the export is alone again: what it led to belongs
/// to this input.
///
/// # Panics
/// When the target cannot be reached.
#[expect(clippy::expect_used, reason = "that is a finding")]
pub fn live_by(
    input: &[u8],
    export: &impl Export,
    live: impl FnOnce(Choices) -> std::io::Result<()>,
) {
    live(Choices::of_bytes(input.to_vec())).expect("the target is there");
    while export.status().expect("the reactor answers").connected {
        std::thread::yield_now();
    }
}
