//! Goal: a start that has more batches than an era has sequences leaves none to the next start;
//! writes that come together are one batch, or as many as are needed, at the same time.
//! Method: an array on modelled drives writes over the end of an era; requests that each wake the
//! next once they wait, as those of a guest's queue do; more than fit in a batch, by the model's
//! clock.

use std::cell::Cell;
use std::pin::Pin;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{ERA_SEQUENCES_LOG2, ERAS_PER_START, Level, Policy};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::join::join_all;
use ashlar_reactor::op::Device;
use ashlar_reactor::virtual_time::VirtualBackend;

use crate::array::Array;
use crate::layout::Shape;
use crate::settings::SettingsChange;
use crate::start::{ArraySpec, AssembleOptions};

const DRIVE_BYTES: u64 = 16 << 20;
const LATENCY: Duration = Duration::from_micros(80);

fn drive(reactor: &Reactor, name: &str) -> Rc<Drive> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let bytes = DRIVE_BYTES;
    let device =
        Device::Model { bytes, iops: 1_000_000, bytes_per_second: 1 << 36, latency: LATENCY };
    Drive::new(reactor, device, limits, name)
}

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
    let reactor = Reactor::new(Box::<VirtualBackend>::default(), Order::Fifo);
    let future = test(reactor.clone());
    reactor.block_on(future).expect("the test ends");
    reactor.abandon();
}

async fn mirror(reactor: &Reactor) -> (Rc<Array>, Vec<Rc<Drive>>) {
    let spec = ArraySpec {
        uuid: [1; 16],
        name: "a".into(),
        level: Level::Raid1,
        chunk_bytes: 64 << 10,
        shape: Shape::default(),
        policy: Some(Policy::Journal),
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let drives = [([1; 16], drive(reactor, "d1")), ([2; 16], drive(reactor, "d2"))];
    let handles = drives.each_ref().map(|(_, drive)| drive.clone()).to_vec();
    (Array::create(reactor, &spec, drives.to_vec()).await.unwrap(), handles)
}

#[test]
fn an_era_ends_while_the_array_serves() {
    run(over_the_end);
}

async fn over_the_end(reactor: Reactor) {
    let (array, handles) = mirror(&reactor).await;
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

#[test]
fn writes_that_come_one_after_the_other_are_one_batch() {
    run(async |reactor| {
        let (array, _) = mirror(&reactor).await;
        // So that nothing is to be told of the region first.
        write_next(array.clone(), Rc::new(Cell::new(1))).await;
        let before = array.journal.next_sequence();
        let left = Rc::new(Cell::new(12));
        write_next(array.clone(), left.clone()).await;
        reactor.sleep(Duration::from_millis(1)).await;
        assert_eq!((left.get(), array.journal.next_sequence() - before), (0, 1));
        array.stop().await.unwrap();
    });
}

#[test]
fn more_than_fits_in_a_batch_is_written_at_the_same_time() {
    run(async |reactor| {
        let (array, _) = mirror(&reactor).await;
        let large = reactor.buffer(64 << 10);
        large.fill_zero();
        array.write(0, large.clone().into()).await.unwrap();
        let began = reactor.now();
        let writes = (0..8).map(|at| array.write(at * (64 << 10), large.clone().into()));
        for written in join_all(writes).await {
            written.unwrap();
        }
        let took = reactor.now().since(began);
        assert!(took < 2 * LATENCY, "{took:?}");
        array.stop().await.unwrap();
    });
}

/// Writes one of those that are `left`, and starts the next once it waits.
async fn write_next(array: Rc<Array>, left: Rc<Cell<u64>>) {
    let Some(others) = left.get().checked_sub(1) else { return };
    left.set(others);
    let buffer = array.reactor.buffer(4096);
    buffer.fill_zero();
    let mut write = std::pin::pin!(array.write(others * 4096, buffer.into()));
    let mut waits = false;
    let written = std::future::poll_fn(|context| {
        let poll = write.as_mut().poll(context);
        if poll.is_pending() && !std::mem::replace(&mut waits, true) {
            let next: Pin<Box<dyn Future<Output = ()>>> =
                Box::pin(write_next(array.clone(), left.clone()));
            array.reactor.spawn(next);
        }
        poll
    });
    written.await.unwrap();
}
