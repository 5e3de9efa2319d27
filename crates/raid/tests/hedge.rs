//! Goal: with hedged reads a slow drive does not make reads slow, the answer is right, no more
//! reads are asked twice than may be, and a late drive never writes into a caller's memory. A slow
//! drive is said to be slow, and only it.
//! Method: modelled drives, one of them sixty times slower, under a clock that jumps.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::prng::Prng;

use crate::modelled::{LATENCY, full_array, run};

const KINDS: [(Level, usize); 3] = [(Level::Raid5, 5), (Level::Raid6, 6), (Level::Raid1, 2)];
const SLOW: usize = 1;
const SLOW_LATENCY: Duration = Duration::from_millis(5);
const BLOCK: u64 = 4096;

fn hedge(percent: u8) -> SettingsChange {
    let never = Some(0);
    SettingsChange { hedge_percent: Some(percent), scrub_period_s: never, ..Default::default() }
}

fn latency(index: usize) -> Duration {
    if index == SLOW { SLOW_LATENCY } else { LATENCY }
}

/// Random reads by four guests for so long; their times in microseconds, sorted.
async fn reads(reactor: &Reactor, array: &Rc<Array>, time: Duration) -> Vec<u64> {
    let (times, running) = (Rc::new(RefCell::new(Vec::new())), Rc::new(Cell::new(4)));
    let until = reactor.now().after(time);
    for guest in 0..4 {
        let (reactor, array) = (reactor.clone(), array.clone());
        let (times, running) = (times.clone(), running.clone());
        reactor.clone().spawn(async move {
            let mut prng = Prng::from_seed(guest);
            let buffer = reactor.buffer(BLOCK as usize);
            while reactor.now() < until {
                buffer.fill_zero();
                let began = reactor.now();
                let at = prng.below(array.capacity() / BLOCK) * BLOCK;
                array.read(at, buffer.clone().into()).await.unwrap();
                times.borrow_mut().push(reactor.now().since(began).as_micros() as u64);
                assert!(buffer.bytes().iter().all(|byte| *byte == 7), "wrong data at {at}");
            }
            running.set(running.get() - 1);
        });
    }
    while running.get() > 0 {
        reactor.sleep(Duration::from_millis(10)).await;
    }
    let mut times = times.take();
    times.sort_unstable();
    times
}

fn p99(times: &[u64]) -> u64 {
    times[times.len() * 99 / 100]
}

#[test]
fn a_slow_drive_does_not_make_reads_slow() {
    for kind in KINDS {
        run(|reactor| async move {
            let array = full_array(&reactor, kind, hedge(0), latency).await;
            let without = reads(&reactor, &array, Duration::from_secs(4)).await;
            assert!(p99(&without) >= 5000, "{kind:?}: {} us", p99(&without));
            assert_eq!(array.status().counters.hedged, 0);
            array.set_settings(hedge(60)).await.unwrap();
            let with = reads(&reactor, &array, Duration::from_secs(4)).await;
            let counters = array.status().counters;
            println!("{kind:?}: p99 {} us, {} us hedged; {counters:?}", p99(&without), p99(&with));
            assert!(p99(&with) < 1000, "{kind:?}: {} us", p99(&with));
            assert!(counters.hedges_won * 10 > counters.hedged * 9, "{counters:?}");
            array.stop().await.unwrap();
        });
    }
}

#[test]
fn no_more_are_asked_twice_than_may_be() {
    run(|reactor| async move {
        for percent in [1, 5] {
            let array = full_array(&reactor, KINDS[0], hedge(percent), latency).await;
            let count = reads(&reactor, &array, Duration::from_secs(4)).await.len() as u64;
            let hedged = array.status().counters.hedged;
            assert!(
                hedged > 0 && hedged * 100 <= count * u64::from(percent),
                "{hedged} of {count}"
            );
            array.stop().await.unwrap();
        }
    });
}

#[test]
fn a_late_drive_never_writes_into_a_callers_memory() {
    run(|reactor| async move {
        for kind in KINDS {
            let array = full_array(&reactor, kind, hedge(100), latency).await;
            // Until it is known what is usual.
            reads(&reactor, &array, Duration::from_secs(3)).await;
            let mut won = 0;
            for block in 0..200 {
                let before = array.status().counters.hedges_won;
                let buffer = reactor.buffer(BLOCK as usize);
                array.read(block * (64 << 10), buffer.clone().into()).await.unwrap();
                won += array.status().counters.hedges_won - before;
                // The caller's, now; the late drive answers meanwhile.
                buffer.copy_from_slice(&[9; BLOCK as usize]);
                reactor.sleep(2 * SLOW_LATENCY).await;
                assert!(buffer.bytes().iter().all(|byte| *byte == 9), "{kind:?}, {block}");
            }
            assert!(won > 20, "{kind:?}: others were first for {won} reads only");
            array.stop().await.unwrap();
        }
    });
}

#[test]
fn the_slow_one_is_said_to_be() {
    run(|reactor| async move {
        for kind in KINDS {
            let array = full_array(&reactor, kind, hedge(0), latency).await;
            let slow = || {
                let members = array.status().members.into_iter();
                members.map(|its| its.drive.unwrap().slow().is_some()).collect::<Vec<_>>()
            };
            reads(&reactor, &array, Duration::from_secs(5)).await;
            let expected: Vec<bool> = (0..kind.1).map(|index| index == SLOW).collect();
            assert_eq!(slow(), expected);
            // Of an idle array nothing new is known.
            reactor.sleep(Duration::from_secs(60)).await;
            assert_eq!(slow(), expected);
            array.stop().await.unwrap();
        }
    });
}
