//! What tests of arrays on simulated storage have in common: drives of one kind, the arrays that
//! are made of them, and the lives of a host that uses them.
#![allow(dead_code, clippy::cast_possible_truncation, reason = "each test uses its part")]

use std::cell::RefCell;
use std::rc::Rc;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::layout::Shape;
use ashlar_raid::lease::Host;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_sim::drive::{Loss, SimDrive, Traits};
use ashlar_sim::world::{SharedWorld, SimBackend, World};

pub const SECTOR_BYTES: u32 = 512;
pub const CHUNK_BYTES: u32 = 16 << 10;

/// So many drives of so many bytes, with caches.
pub fn storage(seed: u64, drives: u32, bytes: u64, latency_ns_max: u64) -> SharedWorld {
    let mut world = World::new(seed, false);
    let traits = Traits {
        bytes,
        sector_bytes: SECTOR_BYTES,
        volatile_cache: true,
        zeroes: true,
        mends: true,
        latency_ns_min: 10_000,
        latency_ns_max,
    };
    for drive in 0..drives {
        world.add_drive(SimDrive::new(traits, [drive as u8; 16]));
    }
    Rc::new(RefCell::new(world))
}

/// A host's handle of one of them.
pub fn open(reactor: &Reactor, drive: u32, bytes: u64) -> Rc<Drive> {
    let limits = Limits { bytes, sector_bytes: SECTOR_BYTES, zeroes_cheaply: true };
    Drive::new(reactor, Device::Simulated { drive }, limits, &format!("d{drive}"))
}

pub fn spec(level: Level, policy: Option<Policy>, host: Option<Host>) -> ArraySpec {
    ArraySpec {
        uuid: [9; 16],
        name: "test".into(),
        level,
        chunk_bytes: CHUNK_BYTES,
        shape: Shape::default(),
        policy,
        integrity: false,
        settings: SettingsChange::default(),
        host,
    }
}

/// Runs until the test ends; then whoever has not stopped dies, and with a `loss` the power fails.
/// False: it was cut off.
pub fn life<F>(
    world: &SharedWorld,
    order: u64,
    loss: Option<Loss>,
    test: impl FnOnce(Reactor) -> F,
) -> bool
where
    F: Future<Output = ()> + 'static,
{
    world.borrow_mut().begin_life();
    let order = Order::Seeded(Prng::from_seed(order));
    let reactor = Reactor::new(Box::new(SimBackend::new(world)), order);
    let has_ended = reactor.block_on(test(reactor.clone())).is_some();
    assert_eq!(world.borrow().failure(), None);
    world.borrow_mut().end_life(loss);
    reactor.abandon();
    has_ended
}
