//! Goal: volumes are made at once, are zero, and what is deleted leaves nothing behind.
//! Method: an array on RAM drives full of other bytes; regions and drive counters are looked at.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::error::PoolError;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::uring::UringBackend;

const DRIVE_BYTES: u64 = 24 << 20;

async fn used_drive(reactor: &Reactor) -> Rc<Drive> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = Drive::new(reactor, Device::Ram { bytes: DRIVE_BYTES }, limits, "ram");
    let buffer = reactor.buffer(1 << 20);
    buffer.copy_from_slice(&[0xa5; 1 << 20]);
    for at in (0..DRIVE_BYTES).step_by(1 << 20) {
        drive.write(at, buffer.clone().into()).await.unwrap();
    }
    drive
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
    let mut drives = Vec::new();
    for index in 0..4 {
        drives.push(([index; 16], used_drive(reactor).await));
    }
    Pool::open(Array::create(reactor, &spec, drives).await.unwrap()).await.unwrap()
}

async fn first_bytes(reactor: &Reactor, pool: &Pool, name: &str) -> Vec<u8> {
    let volume = pool.volume(name).unwrap();
    let into = reactor.buffer((volume.bytes() as usize).min(1 << 20));
    volume.read(0, into.clone().into()).await.unwrap();
    into.bytes().to_vec()
}

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    reactor.block_on(test(reactor.clone())).expect("the test ends");
}

/// However it was kept: no write of it lands in the volume that has its space now.
#[test]
fn who_was_left_with_a_deleted_volume_reaches_no_other() {
    run(|reactor| async move {
        let pool = pool(&reactor).await;
        let bytes = pool.free_bytes();
        let deleted = pool.create([1; 16], "a", bytes).await.unwrap();
        pool.delete("a").await.unwrap();
        let next = pool.create([2; 16], "b", bytes).await.unwrap();
        let from = reactor.buffer(4096);
        from.copy_from_slice(&[7; 4096]);
        next.write(0, from.clone().into()).await.unwrap();
        assert_eq!(deleted.bytes(), 0);
        assert_eq!(deleted.write(8192, from.into()).await, Err(ArrayError::Range));
        assert_eq!(deleted.read(0, reactor.buffer(4096).into()).await, Err(ArrayError::Range));
        assert_eq!(deleted.discard(0, bytes).await, Err(ArrayError::Range));
        assert_eq!(deleted.write_zeroes(0, 4096).await, Err(ArrayError::Range));
        assert_eq!(deleted.block_status(0, 4096).await, Err(ArrayError::Range));
        let first = first_bytes(&reactor, &pool, "b").await;
        assert!(first[..4096].iter().all(|byte| *byte == 7));
        assert!(first[4096..].iter().all(|byte| *byte == 0));
    });
}

#[test]
fn volumes_are_made_at_once_and_leave_nothing_behind() {
    run(|reactor| async move {
        let pool = pool(&reactor).await;
        let written = |pool: &Pool| -> u64 {
            let members = pool.array().status().members.into_iter();
            members.map(|member| member.drive.unwrap().counters().write_bytes).sum()
        };
        let before = written(&pool);
        let bytes = pool.free_bytes() * 3 / 4;
        pool.create([1; 16], "a", bytes).await.unwrap();
        assert!(written(&pool) - before < 4 << 20, "nothing but metadata");
        assert!(first_bytes(&reactor, &pool, "a").await.iter().all(|byte| *byte == 0));
        for at in [0, bytes / 2, bytes - (64 << 10)] {
            let from = reactor.buffer(64 << 10);
            from.copy_from_slice(&[7; 64 << 10]);
            pool.volume("a").unwrap().write(at / 512 * 512, from.into()).await.unwrap();
        }
        // A region is written when what the journal has of it is put in place.
        pool.array().destage_all().await.unwrap();
        assert!(pool.array().status().written_regions >= 3);
        pool.delete("a").await.unwrap();
        let left = pool.array().status().written_regions;
        assert!(
            left <= 1,
            "{left} regions; at most the one at the end is only partly the volume's"
        );
        pool.create([2; 16], "b", bytes).await.unwrap();
        assert!(first_bytes(&reactor, &pool, "b").await.iter().all(|byte| *byte == 0));
        let end = pool.volume("b").unwrap();
        let into = reactor.buffer(64 << 10);
        end.read(bytes / 512 * 512 - (64 << 10), into.clone().into()).await.unwrap();
        assert!(into.bytes().iter().all(|byte| *byte == 0));
        pool.array().stop().await.unwrap();
    });
}

/// One alone stays in one piece; two that grow in turns have as many pieces as a record has room
/// for. Whatever was answered is there after the next start.
#[test]
fn volumes_grow_as_often_as_there_is_room_to_say_so() {
    run(|reactor| async move {
        let mut pool = pool(&reactor).await;
        let stripe = pool.array().stripe_bytes();
        for (uuid, name) in [(1, "alone"), (2, "a"), (3, "b")] {
            pool.create([uuid; 16], name, stripe).await.unwrap();
            let most = if name == "alone" { 60 } else { 1 };
            for stripes in 2..=most {
                pool.resize(name, stripes * stripe).await.unwrap();
            }
        }
        let mut refused = 0;
        for stripes in 2..=30 {
            for name in ["a", "b"] {
                match pool.resize(name, stripes * stripe).await {
                    Ok(()) => {}
                    Err(PoolError::Fragmented { .. }) => refused += 1,
                    Err(error) => panic!("{name}: {error}"),
                }
            }
        }
        assert_eq!(refused, 6, "a has 24 pieces; then nothing is in the way of b");
        let sizes =
            |pool: &Pool| ["alone", "a", "b"].map(|name| pool.volume(name).unwrap().bytes());
        let before = sizes(&pool);
        assert_eq!(before, [60 * stripe, 24 * stripe, 30 * stripe]);
        for _ in 0..2 {
            let members = pool.array().status().members;
            let drives = members.into_iter().map(|member| member.drive.unwrap()).collect();
            pool.array().stop().await.unwrap();
            let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await;
            pool = Pool::open(array.unwrap()).await.unwrap();
            assert_eq!(sizes(&pool), before);
            // Writes the table once more.
            pool.resize("a", 24 * stripe).await.unwrap();
        }
        pool.array().stop().await.unwrap();
    });
}
