//! Goal: an array knows of reads that others do by a view of it: it says which drive is slow, also
//! after a rest, and its scrub gives way to them as it does to its own.
//! Method: modelled drives under a clock that jumps. Who reads beside the owner has its own way to
//! the drives, and the owner hears of it by nothing but what that way leaves behind.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::status::ScrubState;
use ashlar_raid::viewer::Viewer;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::prng::Prng;

use crate::modelled::{Asks, Guests, LATENCY, full_array, run};

const KINDS: [(Level, usize); 3] = [(Level::Raid5, 5), (Level::Raid6, 6), (Level::Raid1, 2)];
const SLOW: usize = 1;
const SLOW_LATENCY: Duration = Duration::from_millis(5);
const BLOCK: u64 = 4096;
/// How often whoever reads asks the owner whether it still may.
const ASK_AGAIN: Duration = Duration::from_millis(500);

fn latency(index: usize) -> Duration {
    if index == SLOW { SLOW_LATENCY } else { LATENCY }
}

fn settings(rebuild_percent: u8) -> SettingsChange {
    let (rebuild_percent, never) = (Some(rebuild_percent), Some(0));
    SettingsChange { rebuild_percent, scrub_period_s: never, ..SettingsChange::default() }
}

/// Guests whose random reads are all done by one viewer, until told to stop.
struct Readers {
    reads: Rc<Cell<u64>>,
    under_way: Rc<Cell<u64>>,
    stop: Rc<Cell<bool>>,
}

impl Readers {
    fn start(reactor: &Reactor, array: &Rc<Array>, count: u64, len: u64) -> Readers {
        let readers = Readers {
            reads: Rc::default(),
            under_way: Rc::new(Cell::new(count)),
            stop: Rc::default(),
        };
        let viewer = Rc::new(Viewer::open(reactor, array.show().expect("it is plain")));
        for guest in 0..count {
            let (reactor, viewer, stop) = (reactor.clone(), viewer.clone(), readers.stop.clone());
            let (reads, under_way) = (readers.reads.clone(), readers.under_way.clone());
            let blocks = array.capacity() / len;
            reactor.clone().spawn(async move {
                let mut prng = Prng::from_seed(guest);
                let buffer = reactor.buffer(len as usize);
                while !stop.get() {
                    buffer.fill_zero();
                    let at = prng.below(blocks) * len;
                    assert!(viewer.read(at, &buffer.clone().into()).await, "it is not plain");
                    assert!(buffer.bytes().iter().all(|byte| *byte == 7), "wrong data at {at}");
                    reads.set(reads.get() + 1);
                }
                under_way.set(under_way.get() - 1);
            });
        }
        let (asks, array, stop) = (reactor.clone(), array.clone(), readers.stop.clone());
        reactor.spawn(async move {
            while !stop.get() {
                assert!(!array.shown_for().is_zero());
                asks.sleep(ASK_AGAIN).await;
            }
        });
        readers
    }

    async fn stop(self, reactor: &Reactor) {
        self.stop.set(true);
        while self.under_way.get() > 0 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Reads that the owner has asked its drives for.
fn asked(array: &Array) -> u64 {
    let members = array.status().members.into_iter();
    members.map(|its| its.drive.unwrap().counters().reads).sum()
}

/// By their reads: it is also known of a mirror how it was written.
fn slow(array: &Array) -> Vec<bool> {
    let members = array.status().members.into_iter();
    members.map(|its| its.drive.unwrap().slow().is_some_and(|its| its.in_reads)).collect()
}

#[test]
fn a_drive_that_is_slow_for_others_is_said_to_be() {
    for kind in KINDS {
        // Small requests, and such as begin with a stripe and cross its chunks.
        for len in [BLOCK, 256 << 10] {
            run(|reactor| async move {
                let array = full_array(&reactor, kind, settings(30), latency).await;
                // Nothing is known of the drives any more, and maintenance rests.
                reactor.sleep(Duration::from_secs(60)).await;
                assert_eq!(slow(&array), vec![false; kind.1]);
                let before = (asked(&array), array.status().counters);
                let readers = Readers::start(&reactor, &array, 4, len);
                reactor.sleep(Duration::from_secs(9)).await;
                let expected: Vec<bool> = (0..kind.1).map(|index| index == SLOW).collect();
                assert_eq!(slow(&array), expected, "{kind:?}, {len} bytes");
                let reads = readers.reads.clone();
                readers.stop(&reactor).await;
                assert_eq!(asked(&array), before.0, "the owner has read");
                let counters = array.status().counters;
                let served = (counters.reads - before.1.reads, counters.read_bytes);
                assert_eq!(served, (reads.get(), before.1.read_bytes + reads.get() * len));
                // What others read is no work that was done here.
                let drives = array.status().members.into_iter().map(|its| its.drive.unwrap());
                assert!(drives.into_iter().all(|its| its.traffic().reads.lately.count == 0));
                array.stop().await.unwrap();
            });
        }
    }
}

#[test]
fn drives_that_are_all_alike_are_not_slow_for_others() {
    run(|reactor| async move {
        let array = full_array(&reactor, KINDS[0], settings(30), |_| LATENCY).await;
        let readers = Readers::start(&reactor, &array, 4, BLOCK);
        reactor.sleep(Duration::from_secs(20)).await;
        assert_eq!(slow(&array), [false; 5]);
        readers.stop(&reactor).await;
        array.stop().await.unwrap();
    });
}

/// How long a scrub takes beside guests of the owner, or beside those of another.
async fn scrub_beside(reactor: &Reactor, array: &Rc<Array>, elsewhere: bool) -> (u64, u64) {
    let guests =
        (!elsewhere).then(|| Guests::start(reactor, array, (8, Asks::Reads), Duration::ZERO));
    let readers = elsewhere.then(|| Readers::start(reactor, array, 8, BLOCK));
    let reads = || {
        let here = guests.as_ref().map(|its| its.done.get());
        here.or(readers.as_ref().map(|its| its.reads.get())).unwrap()
    };
    reactor.sleep(Duration::from_secs(1)).await;
    let (began, before) = (reactor.now(), reads());
    array.start_scrub(false).unwrap();
    while let ScrubState::Running { .. } = array.status().scrub {
        // Seldom: a look at its state makes the array hear of what was read.
        reactor.sleep(Duration::from_millis(150)).await;
    }
    let ms = reactor.now().since(began).as_millis() as u64;
    let reads_per_second = (reads() - before) * 1000 / ms;
    guests.into_iter().for_each(|guests| guests.stop());
    if let Some(readers) = readers {
        readers.stop(reactor).await;
    }
    (ms, reads_per_second)
}

#[test]
fn a_scrub_gives_way_to_what_is_read_elsewhere() {
    let times = Rc::new(Cell::new([(0, 0); 2]));
    for elsewhere in [false, true] {
        let times = times.clone();
        run(|reactor| async move {
            let array = full_array(&reactor, KINDS[0], settings(60), |_| LATENCY).await;
            let mut all = times.get();
            all[usize::from(elsewhere)] = scrub_beside(&reactor, &array, elsewhere).await;
            times.set(all);
            array.stop().await.unwrap();
        });
    }
    let [(here_ms, here), (there_ms, there)] = times.get();
    println!("scrub {here_ms} ms beside {here}/s here, {there_ms} ms beside {there}/s elsewhere");
    // A tenth of its share at least. What is known of some of the reads is known for longer.
    let alike = there_ms * 4 >= here_ms * 3 && there_ms * 3 <= here_ms * 4;
    assert!(alike, "{there_ms} ms, {here_ms} ms beside reads of its own");
    assert!(there * 4 >= here * 3, "{there} reads a second, {here} of its own");
}
