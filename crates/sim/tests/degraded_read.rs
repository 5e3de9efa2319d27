//! Goal: a chunk that is away reads as it was written, however the others of its stripe change.
//! Method: drives that answer in any order; guests write to all chunks but those that are away,
//! in place, while another reads whole stripes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::prng::Prng;
use ashlar_sim::world::SimBackend;

use crate::storage::{CHUNK_BYTES, open, spec, storage};

mod storage;

const DRIVE_BYTES: u64 = 12 << 20;
const CHUNK: u64 = CHUNK_BYTES as u64;
const BLOCK: u64 = 4 << 10;
const STRIPES: u64 = 3;
const AWAY: MemberIndex = MemberIndex(1);
const OLD: u8 = 7;

async fn create(reactor: &Reactor, level: Level, members: u32) -> Rc<Array> {
    let drives = (0..members).map(|drive| ([drive as u8; 16], open(reactor, drive, DRIVE_BYTES)));
    let spec = spec(level, Some(Policy::None), None);
    Array::create(reactor, &spec, drives.collect()).await.unwrap()
}

/// The data chunk of a stripe that is away.
fn away(array: &Array, stripe: u64) -> Option<u64> {
    let position = array.layout().position_of(StripeIndex(stripe), AWAY)?;
    (position < array.layout().data).then_some(position.into())
}

async fn write(reactor: Reactor, array: Rc<Array>, running: Rc<Cell<bool>>, seed: u64) {
    let mut prng = Prng::from_seed(seed);
    while running.get() {
        let (stripe, chunk) = (prng.below(STRIPES), prng.below(array.layout().data.into()));
        if away(&array, stripe) != Some(chunk) {
            let buffer = reactor.buffer(BLOCK as usize);
            buffer.copy_from_slice(&[prng.next_u64() as u8; BLOCK as usize]);
            let at = chunk * CHUNK + prng.below(CHUNK / BLOCK) * BLOCK;
            array.write(stripe * array.stripe_bytes() + at, buffer.into()).await.unwrap();
        }
    }
}

async fn others_change(reactor: Reactor, level: Level, members: u32) {
    let array = create(&reactor, level, members).await;
    let stripe_bytes = array.stripe_bytes();
    let buffer = reactor.buffer(stripe_bytes as usize);
    for stripe in 0..STRIPES {
        buffer.copy_from_slice(&vec![OLD; stripe_bytes as usize]);
        array.write(stripe * stripe_bytes, buffer.clone().into()).await.unwrap();
    }
    array.pull_member(AWAY).unwrap();
    let running = Rc::new(Cell::new(true));
    for seed in 0..8 {
        reactor.spawn(write(reactor.clone(), array.clone(), running.clone(), seed));
    }
    for stripe in (0..STRIPES).cycle().take(200) {
        buffer.fill_zero();
        array.read(stripe * stripe_bytes, buffer.clone().into()).await.unwrap();
        if let Some(chunk) = away(&array, stripe) {
            let bytes = buffer.slice((chunk * CHUNK) as usize..((chunk + 1) * CHUNK) as usize);
            assert!(bytes.bytes().iter().all(|byte| *byte == OLD), "{level:?}, stripe {stripe}");
        }
    }
    running.set(false);
    reactor.sleep(Duration::from_secs(1)).await;
    array.stop().await.unwrap();
}

#[test]
fn what_is_away_does_not_change_with_the_others() {
    for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 6)] {
        let world = storage(1, members, DRIVE_BYTES, 1_000_000);
        world.borrow_mut().begin_life();
        let reactor = Reactor::new(Box::new(SimBackend::new(&world)), Order::Fifo);
        let test = others_change(reactor.clone(), level, members);
        reactor.block_on(test).expect("the test ends");
        assert_eq!(world.borrow().failure(), None);
        world.borrow_mut().end_life(None);
        reactor.abandon();
    }
}
