//! Goal: what a volume shows of itself is there after a power cut.
//! Method: an array on simulated drives with caches; the power fails as soon as somebody can see
//! that a volume has grown.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::start::AssembleOptions;
use ashlar_reactor::executor::Reactor;
use ashlar_sim::drive::Loss;

use crate::storage::{life, open, spec, storage};

mod storage;

const MEMBERS: u32 = 3;
const DRIVE_BYTES: u64 = 12 << 20;

fn drives(reactor: &Reactor) -> impl Iterator<Item = Rc<Drive>> {
    (0..MEMBERS).map(|drive| open(reactor, drive, DRIVE_BYTES))
}

async fn pool(reactor: &Reactor) -> Rc<Pool> {
    let drives = drives(reactor).zip(10..).map(|(drive, id)| ([id; 16], drive)).collect();
    let array = Array::create(reactor, &spec(Level::Raid5, None, None), drives).await;
    Pool::open(array.unwrap()).await.unwrap()
}

/// Else what a guest had written and flushed there meanwhile would be gone with it.
#[test]
fn a_volume_shows_no_size_that_a_power_cut_takes_back() {
    let world = storage(1, MEMBERS, DRIVE_BYTES, 100_000);
    let stripe = 32 << 10;
    let has_ended = life(&world, 1, Some(Loss::Everything), |reactor| async move {
        let pool = pool(&reactor).await;
        let volume = pool.create([1; 16], "a", stripe).await.unwrap();
        let growing = pool.clone();
        reactor.spawn(async move { growing.resize("a", 3 * stripe).await.unwrap() });
        while volume.bytes() == stripe {
            reactor.sleep(Duration::from_micros(1)).await;
        }
    });
    assert!(has_ended);
    let has_ended = life(&world, 1, None, |reactor| async move {
        let drives = drives(&reactor).collect();
        let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await;
        let pool = Pool::open(array.unwrap()).await.unwrap();
        assert_eq!(pool.volume("a").unwrap().bytes(), 3 * stripe);
    });
    assert!(has_ended);
}
