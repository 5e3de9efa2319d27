//! Goal: a queue answers everything it took, in one turn shows all of it, stops when told or when
//! the guest breaks the rules, and does little work per request.
//! Method: queue, volume and a guest as tasks of one reactor.

use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_pool::pool::Pool;
use ashlar_raid::array::Array;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::executor::Order;
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;

use super::*;
use crate::vhost::vring::tests::{EVENT_INDEX, Guest, INDIRECT, INDIRECT_TABLES, NEXT, WRITE};

const DISK: u64 = 64 << 20;
const HEADERS: u64 = 0x4_0000;
const TABLES: u64 = 0x5_0000;
const DATA: u64 = 0x10_0000;
const FEATURES: u64 = EVENT_INDEX | INDIRECT_TABLES;

pub(crate) async fn disk(reactor: &Reactor, level: Level, drives: u8) -> Rc<Disk> {
    let (name, chunk_bytes) = ("test".to_owned(), 64 << 10);
    let spec = ArraySpec {
        uuid: [1; 16],
        name,
        level,
        chunk_bytes,
        shape: Default::default(),
        policy: None,
        integrity: false,
        settings: SettingsChange::default(),
        host: None,
    };
    let bytes = DISK + (16 << 20);
    let limits = Limits { bytes, sector_bytes: 512, zeroes_cheaply: true };
    let drive = || Drive::new(reactor, Device::Ram { bytes }, limits, "ram");
    let drives = (0..drives).map(|i| ([i; 16], drive())).collect();
    let array = Array::create(reactor, &spec, drives).await.unwrap();
    let pool = Pool::open(array).await.unwrap();
    let volume = pool.create([2; 16], "disk", DISK).await.unwrap();
    let limits = crate::limits::RateLimits::new(crate::limits::Rates::default());
    Rc::new(Disk::new(reactor, "test".into(), Rc::new(volume), [b'x'; 20], 1, limits))
}

pub(crate) fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let future = test(reactor.clone());
    reactor.block_on(future).expect("the test ends");
}

/// Wakes a task at the end of each turn, so that it waits without being run again at once.
struct Turns {
    reactor: Reactor,
    waiting: Cell<Option<TaskId>>,
    poller: Cell<Option<PollerId>>,
}

impl Turns {
    fn start(reactor: &Reactor) -> Rc<Turns> {
        let (waiting, poller) = (Cell::new(None), Cell::new(None));
        let turns = Rc::new(Turns { reactor: reactor.clone(), waiting, poller });
        turns.poller.set(Some(reactor.add_poller(turns.clone())));
        turns
    }

    async fn next(&self) {
        self.waiting.set(Some(self.reactor.current_task()));
        self.reactor.rouse(self.poller.get().unwrap());
        std::future::poll_fn(|_| match self.waiting.get() {
            Some(_) => Poll::Pending,
            None => Poll::Ready(()),
        })
        .await;
    }
}

impl Poller for Turns {
    fn poll(&self) -> bool {
        let waiting = self.waiting.take();
        waiting.inspect(|task| self.reactor.wake(*task)).is_some()
    }

    fn arm(&self) -> bool {
        self.waiting.get().is_some()
    }

    fn disarm(&self) {}
}

/// A guest with one request per slot, each by an indirect table, as Linux makes them.
struct Driver {
    guest: Guest,
    queue: Rc<Queue>,
    turns: Rc<Turns>,
}

impl Driver {
    fn start(reactor: &Reactor, disk: &Rc<Disk>, size: u16) -> Driver {
        let guest = Guest::new(size);
        let (setup, bells) = (guest.setup(FEATURES), Bells::default());
        let queue = Queue::start(disk, 0, &guest.memory, &setup, None, bells).unwrap();
        Driver { guest, queue, turns: Turns::start(reactor) }
    }

    fn used(&self) -> u32 {
        u32::from(self.guest.used_index())
    }

    /// Describes a request of 4 KiB in `slot`.
    fn describe(&self, slot: u16, write: bool) {
        self.describe_of(slot, write, 4096);
    }

    /// Describes a request of `bytes`; the data of slots overlap if those are more than 4 KiB.
    fn describe_of(&self, slot: u16, write: bool, bytes: u32) {
        let place = |base: u64, step: u64| base + u64::from(slot) * step;
        let (table, header) = (place(TABLES, 64), place(HEADERS, 32));
        self.guest.write(header, &u32::from(write).to_le_bytes());
        let data = if write { NEXT } else { NEXT | WRITE };
        self.guest.put(Guest::descriptor(table, 0), header, 16, NEXT, 1);
        self.guest.put(Guest::descriptor(table, 1), place(DATA, 4096), bytes, data, 2);
        self.guest.put(Guest::descriptor(table, 2), header + 16, 1, WRITE, 0);
        self.guest.describe(slot, table, 48, INDIRECT, 0);
    }

    /// Describes the same request as `slot` 0 has, a read of `bytes`.
    fn describe_shared(&self, slot: u16, bytes: u32) {
        if slot == 0 {
            self.describe_of(0, false, bytes);
        }
        self.guest.describe(slot, TABLES, 48, INDIRECT, 0);
    }

    fn offer(&mut self, slot: u16, sector: u64) {
        self.guest.write(HEADERS + u64::from(slot) * 32 + 8, &sector.to_le_bytes());
        self.guest.offer(slot);
    }

    async fn until_used(&self, index: u16) {
        while self.guest.used_index() != index {
            self.turns.next().await;
        }
    }
}

#[test]
fn everything_taken_is_answered_before_a_stop_returns() {
    run(|reactor| async move {
        let disk = disk(&reactor, Level::Raid5, 3).await;
        for turns in 0..30 {
            let mut driver = Driver::start(&reactor, &disk, 64);
            for slot in 0..64 {
                driver.describe(slot, slot % 2 == 0);
                driver.offer(slot, u64::from(slot) * 8);
            }
            for _ in 0..turns {
                reactor.yield_now().await;
            }
            driver.queue.stop().await;
            assert_eq!(driver.used(), driver.queue.base(), "after {turns} turns");
            assert_eq!(driver.queue.state(), State::Stopped);
            driver.queue.stop().await;
            reactor.sleep(Duration::from_millis(1)).await;
            assert_eq!(driver.used(), driver.queue.base());
        }
    });
}

/// In every moment: also between the answer and the turn's end, which would show it.
#[test]
fn once_memory_is_lost_nothing_more_is_shown() {
    run(|reactor| async move {
        let disk = disk(&reactor, Level::Raid5, 3).await;
        for turns in 0..30 {
            let mut driver = Driver::start(&reactor, &disk, 64);
            for slot in 0..5 {
                driver.describe(slot, slot % 2 == 0);
                driver.offer(slot, u64::from(slot) * 8);
            }
            for _ in 0..turns {
                reactor.yield_now().await;
            }
            let used = driver.used();
            driver.guest.memory.alarm().unwrap().ring();
            driver.queue.stop().await;
            assert_eq!(driver.used(), used, "after {turns} turns");
        }
    });
}

#[test]
fn a_ring_larger_than_the_workers_is_served() {
    run(|reactor| async move {
        let disk = disk(&reactor, Level::Raid0, 2).await;
        let mut driver = Driver::start(&reactor, &disk, 256);
        for slot in 0..256 {
            driver.describe(slot, true);
            driver.offer(slot, u64::from(slot) * 8);
        }
        driver.until_used(256).await;
        assert_eq!(disk.counters().writes, 256);
        driver.queue.stop().await;
    });
}

#[test]
fn a_breach_ends_the_queue_and_what_was_taken_is_still_answered() {
    run(|reactor| async move {
        let disk = disk(&reactor, Level::Raid5, 3).await;
        let mut driver = Driver::start(&reactor, &disk, 64);
        for slot in 0..9 {
            driver.describe(slot, true);
        }
        driver.guest.describe(9, 0, 16, NEXT, 70);
        for slot in 0..10 {
            driver.offer(slot, 0);
        }
        driver.until_used(9).await;
        assert_eq!(driver.queue.state(), State::Broken);
        driver.offer(0, 0);
        reactor.sleep(Duration::from_millis(1)).await;
        assert_eq!(driver.guest.used_index(), 9);
        assert!(disk.trouble().unwrap().to_string().contains("descriptor 70"));
        driver.queue.stop().await;
    });
}

#[test]
fn a_stopped_queue_is_held_by_nobody() {
    run(|reactor| async move {
        let disk = disk(&reactor, Level::Raid0, 1).await;
        let driver = Driver::start(&reactor, &disk, 64);
        reactor.yield_now().await;
        assert!(Rc::strong_count(&driver.queue) > 64);
        driver.queue.stop().await;
        assert_eq!(Rc::strong_count(&driver.queue), 1);
    });
}

/// A guest keeps 1024 requests in its ring, the other one. Requests are counted, and turns of the
/// reactor, not time.
#[test]
fn a_deep_queue_does_not_starve_a_shallow_one() {
    const DEEP: u16 = 1024;
    const ROUNDS: u16 = 200;
    let sizes = [512, 4096, 64 << 10, 1 << 20];
    for (bytes, are_of_one) in sizes.into_iter().flat_map(|bytes| [(bytes, true), (bytes, false)]) {
        run(move |reactor| async move {
            let its = disk(&reactor, Level::Raid0, 2).await;
            let mut deep = Driver::start(&reactor, &its, DEEP);
            let its = if are_of_one { its } else { disk(&reactor, Level::Raid0, 2).await };
            let mut shallow = Driver::start(&reactor, &its, 4);
            (0..DEEP).for_each(|slot| deep.describe_shared(slot, bytes));
            shallow.describe(0, false);
            let (mut offered, mut waits) = (0u16, Vec::new());
            for round in 0..ROUNDS {
                shallow.offer(0, 8);
                let before = deep.guest.used_index();
                while shallow.guest.used_index() != round + 1 {
                    // What is used is offered again, in every turn.
                    let used = deep.guest.used_index();
                    while offered.wrapping_sub(used) < DEEP {
                        deep.guest.offer(offered % DEEP);
                        offered = offered.wrapping_add(1);
                    }
                    deep.turns.next().await;
                }
                waits.push(u64::from(deep.guest.used_index().wrapping_sub(before)));
            }
            waits.sort_unstable();
            // Who does not run for as long as a neighbour is remembered has been forgotten.
            let slowest = waits[if are_of_one { waits.len() - 1 } else { waits.len() * 9 / 10 }];
            let done = waits.iter().sum::<u64>();
            // Seen in one turn, popped in the next, answered and shown in the third: and in each,
            // the deep queue gets its share once, and may finish a request that is larger.
            let cost = u64::from(bytes).max(REQUEST_BYTES_MIN);
            let turn = if are_of_one { TURN_BYTES } else { TURN_BYTES_BESIDE_OTHERS };
            let most = (3 * turn).div_ceil(cost);
            assert!(slowest <= most, "{slowest} of {bytes} before one of the other");
            let least = u64::from(ROUNDS) * TURN_BYTES_BESIDE_OTHERS / cost / 2;
            assert!(done > least, "{done} of {bytes}: the deep queue was not at work");
            deep.queue.stop().await;
            shallow.queue.stop().await;
        });
    }
}

/// A guest with many rings, all of them full, beside one with a single one.
#[test]
fn many_queues_of_one_export_have_no_more_than_one() {
    const DEEP: u16 = 64;
    const ROUNDS: u16 = 200;
    const BYTES: u32 = 4096;
    for rings in [1, 16] {
        run(move |reactor| async move {
            let wide = disk(&reactor, Level::Raid0, 2).await;
            let mut wide: Vec<Driver> =
                (0..rings).map(|_| Driver::start(&reactor, &wide, DEEP)).collect();
            let its = disk(&reactor, Level::Raid0, 2).await;
            let mut one = Driver::start(&reactor, &its, 4);
            for driver in &wide {
                (0..DEEP).for_each(|slot| driver.describe_shared(slot, BYTES));
            }
            one.describe(0, false);
            let mut offered = vec![0u16; wide.len()];
            let all = |wide: &[Driver]| -> u64 {
                wide.iter().map(|driver| u64::from(driver.guest.used_index())).sum()
            };
            let mut waits = Vec::new();
            for round in 0..ROUNDS {
                one.offer(0, 8);
                let before = all(&wide);
                while one.guest.used_index() != round + 1 {
                    for (driver, offered) in wide.iter_mut().zip(&mut offered) {
                        while offered.wrapping_sub(driver.guest.used_index()) < DEEP {
                            driver.guest.offer(*offered % DEEP);
                            *offered += 1;
                        }
                    }
                    one.turns.next().await;
                }
                waits.push(all(&wide) - before);
            }
            waits.sort_unstable();
            // Each queue may finish a request that is larger than what it has.
            let slowest = waits[waits.len() * 9 / 10];
            let most = 3 * TURN_BYTES_BESIDE_OTHERS / REQUEST_BYTES_MIN + rings;
            assert!(slowest <= most, "{slowest} of {rings} rings before one of the other");
            let least = u64::from(ROUNDS) * TURN_BYTES_BESIDE_OTHERS / REQUEST_BYTES_MIN / 2;
            assert!(waits.iter().sum::<u64>() > least, "they were not at work");
            for driver in wide.iter().chain([&one]) {
                driver.queue.stop().await;
            }
        });
    }
}

/// Requests that need no drive are answered at once; a worker goes from one to the next.
#[test]
fn requests_that_are_answered_at_once_are_taken_in_turns() {
    const DEEP: u16 = 1024;
    run(|reactor| async move {
        let disk = disk(&reactor, Level::Raid0, 1).await;
        let mut driver = Driver::start(&reactor, &disk, DEEP);
        // A kind that does not exist.
        (0..DEEP).for_each(|slot| driver.describe_shared(slot, 4096));
        driver.guest.write(HEADERS, &77u32.to_le_bytes());
        (0..DEEP).for_each(|slot| driver.guest.offer(slot));
        let mut used = 0;
        while used < DEEP {
            driver.turns.next().await;
            let now = driver.guest.used_index();
            assert!(now - used <= POPS_PER_TURN_MAX, "{} in one turn", now - used);
            used = now;
        }
        assert_eq!(disk.counters().errors, u64::from(DEEP));
        driver.queue.stop().await;
    });
}

/// Prints the CPU time of a request, the guest's part included; asserts nothing. It counts only
/// this thread, so that a busy machine disturbs it little.
#[test]
fn cpu_time_of_a_request() {
    const DEPTH: u16 = 32;
    const REQUESTS: u64 = if cfg!(debug_assertions) { 20_000 } else { 2_000_000 };
    for (name, level, drives, write) in [
        ("raid0 read", Level::Raid0, 1, false),
        ("raid5 read", Level::Raid5, 5, false),
        ("raid0 write", Level::Raid0, 1, true),
    ] {
        run(move |reactor| async move {
            let disk = disk(&reactor, level, drives).await;
            let mut driver = Driver::start(&reactor, &disk, 64);
            let mut prng = Prng::from_seed(1);
            (0..DEPTH).for_each(|slot| driver.describe(slot, write));
            let started = cpu_ns();
            let (mut offered, mut used) = (0u64, 0u16);
            while offered < REQUESTS {
                // All slots are free again when all were used; a real guest would refill earlier.
                for slot in 0..DEPTH {
                    driver.offer(slot, prng.below(DISK / 4096) * 8);
                }
                offered += u64::from(DEPTH);
                used = used.wrapping_add(DEPTH);
                driver.until_used(used).await;
            }
            println!("{name} 4 KiB: {} ns of CPU each", (cpu_ns() - started) / offered);
            driver.queue.stop().await;
        });
    }
}

fn cpu_ns() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    let parts = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap());
    parts[0] * 1_000_000_000 + parts[1]
}
