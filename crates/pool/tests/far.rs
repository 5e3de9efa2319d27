//! Goal: a volume that is read on another reactor is the same volume: healthy reads are done there,
//! and none of them misses what was answered before, whatever becomes of stripes and members.
//! Method: two reactors; the array's own makes the changes, and the other reads after each.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_pool::offer::Offer;
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::layout::Shape;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_reactor::registry::Key;

const PATIENCE: Duration = Duration::from_secs(30);
const DRIVE_BYTES: u64 = 24 << 20;
const VOLUME_BYTES: u64 = 8 << 20;
const BLOCK: u64 = 4096;

struct Pair {
    home: Core,
    other: Core,
    pool: Key<Pool>,
    near: Key<Volume>,
    far: Key<Volume>,
}

fn on<T: Send + 'static, F: Future<Output = T> + 'static>(
    core: &Core,
    make: impl FnOnce(Reactor) -> F + Send + 'static,
) -> T {
    let answer = core.sender().ask(make).unwrap();
    answer.recv_timeout(PATIENCE).expect("the reactor answers")
}

async fn set_up(reactor: Reactor, level: Level, policy: Policy) -> (Key<Pool>, Key<Volume>, Offer) {
    let spec = ArraySpec {
        uuid: [9; 16],
        name: "test".into(),
        level,
        chunk_bytes: 16 << 10,
        shape: Shape::default(),
        policy: Some(policy),
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = |_| Drive::new(&reactor, Device::Ram { bytes: DRIVE_BYTES }, limits, "ram");
    let drives = (0..4).map(|index| ([index; 16], drive(index))).collect();
    let array = Array::create(&reactor, &spec, drives).await.unwrap();
    let pool = Pool::open(array).await.unwrap();
    let volume = pool.create([1; 16], "v", VOLUME_BYTES).await.unwrap();
    let offer = Offer::new(&reactor, volume.clone()).unwrap();
    (reactor.publish(pool), reactor.publish(Rc::new(volume)), offer)
}

impl Pair {
    /// Every block is written.
    fn new(level: Level, policy: Policy) -> Pair {
        let cpus = std::thread::available_parallelism().unwrap().get();
        let start = |cpu: usize| Core::start(cpu % cpus, Duration::from_micros(100)).unwrap();
        let (home, other) = (start(0), start(1));
        let (pool, near, offer) = on(&home, move |reactor| set_up(reactor, level, policy));
        let far =
            on(
                &other,
                move |reactor| async move { reactor.publish(Rc::new(offer.open(&reactor))) },
            );
        let pair = Pair { home, other, pool, near, far };
        (0..VOLUME_BYTES / BLOCK).for_each(|block| pair.write(block, 1));
        pair.settle();
        pair
    }

    /// On the array's own reactor.
    fn write(&self, block: u64, value: u8) {
        let near = self.near;
        on(&self.home, move |reactor| async move {
            let from = reactor.buffer(BLOCK as usize);
            from.copy_from_slice(&[value; BLOCK as usize]);
            reactor.get(near).unwrap().write(block * BLOCK, from.into()).await.unwrap();
        });
    }

    /// On the other one.
    fn read(&self, block: u64) -> Result<u8, ArrayError> {
        let far = self.far;
        on(&self.other, move |reactor| async move {
            let into = reactor.buffer(BLOCK as usize);
            reactor.get(far).unwrap().read(block * BLOCK, into.clone().into()).await?;
            let first = into.bytes()[0];
            assert!(into.bytes().iter().all(|byte| *byte == first), "a mixture");
            Ok(first)
        })
    }

    fn on_array<T: Send + 'static, F: Future<Output = T> + 'static>(
        &self,
        job: impl FnOnce(Rc<Array>) -> F + Send + 'static,
    ) -> T {
        let pool = self.pool;
        on(&self.home, move |reactor| job(reactor.get(pool).unwrap().array().clone()))
    }

    /// Reads that the array's reactor has asked its drives for.
    fn asked(&self) -> u64 {
        self.on_array(|array| async move {
            let members = array.status().members;
            let drives = members.iter().filter_map(|member| member.drive.as_ref());
            drives.map(|drive| drive.counters().reads).sum()
        })
    }

    /// Reads of the last seconds that a drive's pace is known from, of all drives together.
    fn judged_by(&self) -> u64 {
        self.on_array(|array| async move {
            let members = array.status().members;
            let drives = members.iter().filter_map(|member| member.drive.as_ref());
            drives.map(|drive| drive.latency().reads.samples).sum()
        })
    }

    /// Waits until nothing is pending.
    fn settle(&self) {
        for _ in 0..3000 {
            if self.on_array(|array| async move { array.status().journal.pending_bytes == 0 }) {
                return;
            }
            self.pause();
        }
        panic!("some of it stays pending");
    }

    fn pause(&self) {
        let wait = |reactor: Reactor| async move { reactor.sleep(Duration::from_millis(10)).await };
        on(&self.home, wait);
    }

    /// Waits until the other reactor reads by itself.
    fn wait_for_sight(&self) {
        for _ in 0..500 {
            let before = self.asked();
            (0..8).for_each(|block| assert!(self.read(block * 31).is_ok()));
            if self.asked() == before {
                return;
            }
            self.pause();
        }
        panic!("it goes on to ask");
    }
}

#[test]
fn healthy_reads_are_done_on_the_reactor_that_asks() {
    for (level, policy) in [(Level::Raid5, Policy::Journal), (Level::Raid10, Policy::Bitmap)] {
        let pair = Pair::new(level, policy);
        pair.wait_for_sight();
        let before = pair.asked();
        for block in 0..VOLUME_BYTES / BLOCK {
            assert_eq!(pair.read(block), Ok(1));
        }
        assert_eq!(pair.asked(), before, "the array's reactor has read");
        // It hears of them all the same.
        let reads = || pair.on_array(|array| async move { array.status().counters.reads });
        let told = (0..500).any(|_| {
            pair.pause();
            reads() >= VOLUME_BYTES / BLOCK
        });
        assert!(told, "{}", reads());
        assert_eq!(pair.read(VOLUME_BYTES / BLOCK), Err(ArrayError::Range));
    }
}

#[test]
fn drives_are_judged_by_reads_of_other_reactors_too() {
    for level in [Level::Raid5, Level::Raid10] {
        let pair = Pair::new(level, Policy::Bitmap);
        pair.wait_for_sight();
        // What the array's reactor reads itself is in its drives' counts. Some is forgotten now
        // and then, so more than once.
        let heard = (0..20).any(|_| {
            let before = (pair.asked(), pair.judged_by());
            (0..VOLUME_BYTES / BLOCK).for_each(|block| assert_eq!(pair.read(block), Ok(1)));
            pair.judged_by() > before.1 && pair.asked() == before.0
        });
        assert!(heard, "{level:?}");
    }
}

#[test]
fn who_asks_after_a_write_was_answered_sees_it() {
    for policy in [Policy::Journal, Policy::Bitmap] {
        let pair = Pair::new(Level::Raid5, policy);
        pair.wait_for_sight();
        let blocks = VOLUME_BYTES / BLOCK;
        for round in 0..600u64 {
            // Often the same stripes, so that they are pending, put in place, and written again.
            let (block, value) = (round * 7 % 61, (round % 251) as u8);
            pair.write(block, value);
            assert_eq!(pair.read(block), Ok(value), "round {round}");
            assert_eq!(pair.read(blocks - 1 - block), Ok(1));
        }
    }
}

#[test]
fn what_is_discarded_is_zero_at_once() {
    let pair = Pair::new(Level::Raid5, Policy::Journal);
    for round in 0..5 {
        pair.wait_for_sight();
        assert_eq!(pair.read(9), Ok(1), "round {round}");
        let near = pair.near;
        on(&pair.home, move |reactor| async move {
            reactor.get(near).unwrap().discard(0, VOLUME_BYTES).await.unwrap();
        });
        (0..64).for_each(|block| assert_eq!(pair.read(block * 31), Ok(0)));
        (0..VOLUME_BYTES / BLOCK).for_each(|block| pair.write(block, 1));
        pair.settle();
    }
}

#[test]
fn a_member_that_missed_a_write_is_not_read_any_more() {
    for policy in [Policy::Journal, Policy::Bitmap] {
        let pair = Pair::new(Level::Raid5, policy);
        pair.wait_for_sight();
        pair.on_array(|array| async move { array.pull_member(MemberIndex(1)).unwrap() });
        for block in 0..VOLUME_BYTES / BLOCK {
            pair.write(block, 2);
            assert_eq!(pair.read(block), Ok(2));
        }
        pair.settle();
        (0..VOLUME_BYTES / BLOCK).for_each(|block| assert_eq!(pair.read(block), Ok(2)));
    }
}

#[test]
fn an_array_that_was_stopped_is_not_read() {
    let pair = Pair::new(Level::Raid5, Policy::Bitmap);
    pair.wait_for_sight();
    pair.on_array(|array| async move { array.stop().await.unwrap() });
    assert_eq!(pair.read(3), Err(ArrayError::Stopped));
}

#[test]
fn a_volume_that_was_deleted_shows_nothing_of_the_next_one() {
    let pair = Pair::new(Level::Raid5, Policy::Bitmap);
    pair.wait_for_sight();
    let pool = pair.pool;
    on(&pair.home, move |reactor| async move {
        let pool = reactor.get(pool).unwrap();
        pool.delete("v").await.unwrap();
        let next = pool.create([2; 16], "next", VOLUME_BYTES).await.unwrap();
        let from = reactor.buffer(BLOCK as usize);
        from.copy_from_slice(&[2; BLOCK as usize]);
        next.write(3 * BLOCK, from.into()).await.unwrap();
    });
    assert_eq!(pair.read(3), Err(ArrayError::Range));
    // Also once it has looked around anew.
    assert!((0..100).all(|_| {
        pair.pause();
        pair.read(3) == Err(ArrayError::Range)
    }));
}
