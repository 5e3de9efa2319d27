//! Goal: what a volume shows of itself is there after a power cut.
//! Method: an array on simulated drives with caches; the power fails as soon as somebody can see
//! that a volume has grown.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_sim::drive::{Loss, SimDrive, Traits};
use ashlar_sim::world::{SharedWorld, SimBackend, World};

const MEMBERS: u32 = 3;
const DRIVE_BYTES: u64 = 12 << 20;

fn storage() -> SharedWorld {
    let mut world = World::new(1, false);
    let traits = Traits {
        bytes: DRIVE_BYTES,
        sector_bytes: 512,
        volatile_cache: true,
        zeroes: true,
        mends: true,
        latency_ns_min: 10_000,
        latency_ns_max: 100_000,
    };
    for drive in 0..MEMBERS {
        world.add_drive(SimDrive::new(traits, [drive as u8; 16]));
    }
    Rc::new(RefCell::new(world))
}

/// Runs until the test ends; then the power fails.
fn life<F>(world: &SharedWorld, test: impl FnOnce(Reactor) -> F)
where
    F: Future<Output = ()> + 'static,
{
    world.borrow_mut().begin_life();
    let order = Order::Seeded(Prng::from_seed(1));
    let reactor = Reactor::new(Box::new(SimBackend::new(world)), order);
    reactor.block_on(test(reactor.clone())).expect("the test ends");
    world.borrow_mut().end_life(Some(Loss::Everything));
    reactor.abandon();
}

fn drives(reactor: &Reactor) -> Vec<Rc<Drive>> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let open =
        |drive| Drive::new(reactor, Device::Simulated { drive }, limits, &format!("d{drive}"));
    (0..MEMBERS).map(open).collect()
}

async fn pool(reactor: &Reactor) -> Rc<Pool> {
    let spec = ArraySpec {
        uuid: [9; 16],
        name: "test".into(),
        level: Level::Raid5,
        chunk_bytes: 16 << 10,
        shape: Shape::default(),
        policy: None,
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let drives = drives(reactor).into_iter().zip(10..).map(|(drive, id)| ([id; 16], drive));
    Pool::open(Array::create(reactor, &spec, drives.collect()).await.unwrap()).await.unwrap()
}

/// Else what a guest had written and flushed there meanwhile would be gone with it.
#[test]
fn a_volume_shows_no_size_that_a_power_cut_takes_back() {
    let world = storage();
    let stripe = 32 << 10;
    life(&world, |reactor| async move {
        let pool = pool(&reactor).await;
        let volume = pool.create([1; 16], "a", stripe).await.unwrap();
        let growing = pool.clone();
        reactor.spawn(async move { growing.resize("a", 3 * stripe).await.unwrap() });
        while volume.bytes() == stripe {
            reactor.sleep(Duration::from_micros(1)).await;
        }
    });
    life(&world, |reactor| async move {
        let array = Array::assemble(&reactor, drives(&reactor), AssembleOptions::default());
        let pool = Pool::open(array.await.unwrap()).await.unwrap();
        assert_eq!(pool.volume("a").unwrap().bytes(), 3 * stripe);
    });
}
