//! Goal: a start that has more batches than an era has sequences leaves none to the next start.
//! Method: an array on modelled drives writes over the end of an era.

use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{ERA_SEQUENCES_LOG2, ERAS_PER_START, Level, Policy};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::virtual_time::VirtualBackend;

use crate::array::Array;
use crate::layout::Shape;
use crate::settings::SettingsChange;
use crate::start::{ArraySpec, AssembleOptions};

const DRIVE_BYTES: u64 = 16 << 20;

fn drive(reactor: &Reactor, name: &str) -> std::rc::Rc<Drive> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let (bytes, latency) = (DRIVE_BYTES, Duration::from_micros(80));
    let device = Device::Model { bytes, iops: 1_000_000, bytes_per_second: 1 << 32, latency };
    Drive::new(reactor, device, limits, name)
}

#[test]
fn an_era_ends_while_the_array_serves() {
    let reactor = Reactor::new(Box::<VirtualBackend>::default(), Order::Fifo);
    let future = over_the_end(reactor.clone());
    reactor.block_on(future).expect("the test ends");
    reactor.abandon();
}

async fn over_the_end(reactor: Reactor) {
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "eras".into(),
        level: Level::Raid1,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: Some(Policy::Journal),
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let drives = [([1; 16], drive(&reactor, "d1")), ([2; 16], drive(&reactor, "d2"))];
    let handles = drives.each_ref().map(|(_, drive)| drive.clone()).to_vec();
    let array = Array::create(&reactor, &spec, drives.to_vec()).await.unwrap();
    // A start leaves out one era: so many cannot be used before the ring is used again.
    let end = ERAS_PER_START << ERA_SEQUENCES_LOG2;
    for sequence in [&array.journal.next_sequence, &array.journal.completed, &array.journal.durable]
    {
        sequence.set(end - 20);
    }
    let buffer = reactor.buffer(64 << 10);
    buffer.fill_zero();
    for at in (0..100).map(|number| number % 8 * (64 << 10)) {
        array.write(at, buffer.clone().into()).await.unwrap();
    }
    let used = array.journal.next_sequence();
    assert!(used > end);
    array.stop().await.unwrap();
    let again = Array::assemble(&reactor, handles, AssembleOptions::default()).await.unwrap();
    assert!(again.journal.next_sequence() > used, "a sequence comes twice");
    again.stop().await.unwrap();
}
