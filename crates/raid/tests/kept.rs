//! Goal: what could not be finished is finished once it can be, and the journal has its room again;
//! until then writers hear why there is none.
//! Method: writes of most members fail in the midst of a zeroing, and work again later.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod pair;
mod steered;

use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;
use pair::{DRIVE_BYTES, Pair, run_on};
use steered::{Fate, Steer, address, is_write, offset};

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor, Steer) -> F) {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| test(reactor, steer));
}

async fn array(reactor: &Reactor) -> Pair {
    let mut pair = Pair::new(reactor, Level::Raid5, 3, 512).await;
    pair.array.set_policy(Policy::Journal).await.unwrap();
    for at in 0..8 {
        pair.put(at << 19, &vec![at as u8 + 1; 1 << 19]).await;
    }
    empty(&pair).await;
    pair
}

/// The journal holds nothing any more.
async fn empty(pair: &Pair) {
    for _ in 0..1000 {
        if pair.array.status().journal.used_bytes == 0 {
            return;
        }
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
    panic!("{:?} is never released", pair.array.status().journal);
}

/// Writes of the first stripes fail on all members but the last.
fn fail_first_stripes(pair: &Pair, steer: &Steer) {
    let members = pair.array.status().members;
    let last = address(pair.file(&members[2].drive.clone().unwrap()));
    let first = label::plan(DRIVE_BYTES, 1).unwrap().data.offset;
    let stripes = first..first + 4 * u64::from(pair.array.layout().chunk_bytes);
    let fails = move |its: usize, op: &Op| {
        its != last && is_write(op) && offset(op).is_some_and(|at| stripes.contains(&at))
    };
    steer.set(move |its, op| if fails(its, op) { Fate::Fails } else { Fate::Passes });
}

#[test]
fn stripes_that_were_zeroed_in_part_are_zeroed_later() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let stripe = pair.array.stripe_bytes();
        fail_first_stripes(&pair, &steer);
        assert_eq!(pair.array.write_zeroes(0, 3 * stripe).await, Err(ArrayError::Lost));
        // It is kept, and counts; so does what stands beside it and was there before.
        pair.put(512, &[9; 512]).await;
        pair.put(4 * stripe as usize, &[8; 512]).await;
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..3 * stripe as usize].fill(0);
        pair.bytes[512..1024].fill(9);
        pair.check().await;
        pair.scrub_is_clean().await;
        // And again, of stripes that were torn.
        pair.bytes[..2 * stripe as usize].fill(0);
        pair.array.write_zeroes(0, 2 * stripe).await.unwrap();
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn regions_that_were_forgotten_in_doubt_are_forgotten_later() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let region = pair.array.region_bytes() as usize;
        let map = label::plan(DRIVE_BYTES, 1).unwrap().written_map.range();
        let fails = move |op: &Op| is_write(op) && offset(op).is_some_and(|at| map.contains(&at));
        steer.set(move |_, op| if fails(op) { Fate::Fails } else { Fate::Passes });
        let forgotten = pair.array.write_zeroes(0, region as u64).await;
        assert_eq!(forgotten, Err(ArrayError::Lost));
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..region].fill(0);
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// The ring is full behind what cannot be finished: nobody waits for ever.
#[test]
fn writers_hear_that_the_journal_cannot_go_on() {
    run(|reactor, steer| async move {
        let mut pair = array(&reactor).await;
        let stripe = pair.array.stripe_bytes();
        fail_first_stripes(&pair, &steer);
        assert_eq!(pair.array.write_zeroes(0, 3 * stripe).await, Err(ArrayError::Lost));
        let bytes = reactor.buffer(64 << 10);
        bytes.copy_from_slice(&[7; 64 << 10]);
        let room = pair.array.status().journal.bytes / (64 << 10);
        let mut refused = false;
        for at in 0..room {
            let at = (1 << 20) + (at << 16);
            let written = pair.array.write(at, bytes.clone().into()).await;
            refused |= written == Err(ArrayError::Lost);
            assert_eq!(written.is_err(), refused, "{written:?}");
            if !refused {
                pair.bytes[at as usize..at as usize + (64 << 10)].fill(7);
            }
        }
        assert!(refused, "{:?}", pair.array.status().journal);
        steer.set(|_, _| Fate::Passes);
        empty(&pair).await;
        pair.bytes[..3 * stripe as usize].fill(0);
        pair.put(1 << 20, &[6; 4096]).await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}
