//! Goal: a drive that neither completes nor fails an operation is given up in time, by everyone who
//! waits for it, and its pace and errors are counted.
//! Method: a world with a clock of its own, in which an operation is answered when the test says.
#![allow(clippy::unwrap_used, reason = "a test")]

mod world;

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, DriveIo, Siblings};
use ashlar_drive::error::DriveError;
use ashlar_drive::health::{ANSWER_WITHIN, HealthLimits, HealthState};
use ashlar_drive::slow::{Slowness, Verdict};
use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use world::{Answer, World, run};

const MS: Duration = Duration::from_millis(1);
const EIO: i32 = 5;

/// What a drive is asked to do.
type Asked = fn(&Reactor, &Rc<Drive>) -> DriveIo;

fn read(reactor: &Reactor, drive: &Rc<Drive>) -> DriveIo {
    drive.read(0, reactor.buffer(4096).into())
}

fn write(reactor: &Reactor, drive: &Rc<Drive>) -> DriveIo {
    drive.write(0, reactor.buffer(4096).into())
}

fn zero(_: &Reactor, drive: &Rc<Drive>) -> DriveIo {
    drive.write_zeroes(0, 4096)
}

#[test]
fn silence_fails_the_drive_and_ends_all_waiting() {
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        world.answer(Answer::Never);
        world.answer(Answer::Never);
        let began = reactor.now();
        let early = read(&reactor, &drive);
        reactor.sleep(Duration::from_secs(9)).await;
        let late = write(&reactor, &drive);
        assert_eq!(early.await, Err(DriveError::Gone));
        assert_eq!(reactor.now().since(began), ANSWER_WITHIN);
        assert_eq!(late.await, Err(DriveError::Gone));
        assert_eq!(reactor.now().since(began), ANSWER_WITHIN, "at once");
        assert_eq!(drive.flush().await, Err(DriveError::Gone));
        let health = drive.health();
        assert_eq!((health.state, health.timeouts), (HealthState::Failed, 1));
        assert_eq!((health.read_errors, health.write_errors), (0, 0), "they failed with it");

        // The write lands later, and counts for nothing.
        assert_eq!(world.let_go(), 0);
        world.answer_all();
        reactor.sleep(MS).await;
        assert_eq!((world.let_go(), drive.counters().writes), (1, 0));
        assert_eq!(read(&reactor, &drive).await, Err(DriveError::Gone));
    });
}

#[test]
fn the_time_is_settable_and_counts_for_each_attempt() {
    run(async |reactor: Reactor, world: World| {
        let limits = HealthLimits { answer_within: 80 * MS, ..Default::default() };
        let drive = world.drive(&reactor, limits);
        // Four attempts of 70 ms each are no silence.
        for answer in [Err(EIO), Err(EIO), Err(EIO), Ok(())] {
            world.answer(Answer::After(70 * MS, answer));
        }
        assert_eq!(read(&reactor, &drive).await, Ok(()));
        assert!(reactor.now().as_ns() > 280_000_000);
        assert_eq!((drive.counters().retries, drive.health().state), (3, HealthState::Healthy));
        // Longer than the time, but not by the end of the time that follows a pause.
        world.answer(Answer::Never);
        let waiting = read(&reactor, &drive);
        reactor.sleep(MS).await;
        world.pause(Duration::from_secs(3600));
        world.answer_after(5 * MS);
        assert_eq!(waiting.await, Ok(()));
        // Zeroing may take longer.
        world.answer(Answer::After(230 * MS, Ok(())));
        assert_eq!(drive.write_zeroes(0, 4096).await, Ok(()));
        world.answer(Answer::Never);
        assert_eq!(drive.write_zeroes(0, 4096).await, Err(DriveError::Gone));
    });
}

/// An error that passes is nobody's business; one that stays is told, and counted once.
#[test]
fn an_error_is_tried_again_after_growing_pauses_and_then_told() {
    const ALL: [Asked; 3] = [read, write, zero];
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        for (number, asked) in (1..).zip(ALL) {
            let before = world.begun();
            (0..4).for_each(|_| world.answer(Answer::After(MS, Err(EIO))));
            assert_eq!(asked(&reactor, &drive).await, Err(DriveError::Media));
            let began = world.begun_after(before);
            assert_eq!(began.len(), 4);
            // Each takes 1 ms to fail; the pauses are 1, 2 and 4 ms.
            let since = began.windows(2).map(|two| two[1].since(two[0])).collect::<Vec<_>>();
            assert_eq!(since, [2 * MS, 3 * MS, 5 * MS]);
            assert_eq!(reactor.now().since(began[0]), 11 * MS, "told at once");
            let health = drive.health();
            assert_eq!(health.read_errors + health.write_errors, number);
            assert_eq!(drive.counters().retries, 3 * number);
        }
        // Nobody knows what a flush that failed has kept.
        assert_eq!(write(&reactor, &drive).await, Ok(()));
        let before = world.begun();
        world.answer(Answer::After(MS, Err(EIO)));
        assert_eq!(drive.flush().await, Err(DriveError::Media));
        assert_eq!(world.begun(), before + 1);
    });
}

/// Who reads a block again and again that is lost for good costs no drive.
#[test]
fn a_block_that_cannot_be_read_counts_once_until_it_is_written() {
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        let fails = async |offset: u64, len: usize| {
            (0..4).for_each(|_| world.answer(Answer::After(MS, Err(EIO))));
            let read = drive.read(offset, reactor.buffer(len).into()).await;
            assert_eq!(read, Err(DriveError::Media));
            drive.health().read_errors
        };
        for _ in 0..20 {
            assert_eq!(fails(4096, 4096).await, 1);
            // What is around it cannot be read for the same reason.
            assert_eq!(fails(0, 65536).await, 1);
        }
        for rewritten in 1..4 {
            assert_eq!(drive.write(4096, reactor.buffer(4096).into()).await, Ok(()));
            assert_eq!(fails(4096, 512).await, 1 + rewritten);
        }
        assert_eq!(drive.health().state, HealthState::Suspect);
        for other in 1..12 {
            assert_eq!(fails(other << 20, 512).await, 4 + other);
        }
        assert_eq!(drive.health().state, HealthState::Suspect);
        assert_eq!(fails(12 << 20, 512).await, 16);
        assert_eq!(drive.health().state, HealthState::Failed);
    });
}

/// A part of a write that failed may be in the drive's cache, and be read: a flush has to reach it.
#[test]
fn what_a_write_that_failed_has_left_is_flushed() {
    const EVERY: [(i32, usize, bool); 4] = [
        (EIO, 4, true),
        (libc::ENOSPC, 1, true),
        (libc::EINVAL, 4, true),
        (libc::EOPNOTSUPP, 1, false),
    ];
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        assert_eq!(drive.flush().await, Ok(()));
        for (asked, changes) in [(read as Asked, false), (write, true), (zero, true)] {
            for (errno, attempts, leaves_a_part) in EVERY {
                let left = changes && leaves_a_part;
                (0..attempts).for_each(|_| world.answer(Answer::After(MS, Err(errno))));
                assert!(asked(&reactor, &drive).await.is_err());
                let before = world.begun();
                assert_eq!(drive.is_unflushed(), left);
                assert_eq!(drive.flush().await, Ok(()));
                assert_eq!(world.begun() - before, usize::from(left));
            }
        }
        // Nobody was told that it is there: a flush of it that fails is not the last.
        (0..5).for_each(|_| world.answer(Answer::After(MS, Err(EIO))));
        assert_eq!(write(&reactor, &drive).await, Err(DriveError::Media));
        assert_eq!(drive.flush().await, Err(DriveError::Media));
        assert!(drive.is_unflushed());
        assert_eq!(drive.flush().await, Ok(()));
        assert!(!drive.is_unflushed());
    });
}

/// One other member.
struct Sibling {
    drive: Rc<Drive>,
    has_all: bool,
}

impl Siblings for Sibling {
    fn stand_for(&self, _: &Drive, fit: &dyn Fn(&Drive) -> bool) -> bool {
        self.has_all && fit(&self.drive)
    }

    fn flushing_beside(&self, _: &Drive) -> Vec<Rc<Drive>> {
        Vec::new()
    }

    fn ask_whether_they_answer(&self, _: &Drive, since: Instant) {
        if !self.drive.has_answered(since) {
            self.drive.ask_whether_it_answers();
        }
    }
}

/// What the sibling of a silent drive does meanwhile.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Meanwhile {
    Reads,
    /// The same, and somebody hears late of what it wrote long ago.
    ReadsAndWrote,
    Writes,
    /// But it has not all that the silent one has.
    WritesOther,
}

/// How long an operation waits that is never answered, by a drive that has a sibling.
fn silence(asked: Asked, meanwhile: Meanwhile) -> Duration {
    let waited = Rc::new(Cell::new(Duration::ZERO));
    let its = waited.clone();
    run(async move |reactor: Reactor, world: World| {
        let [drive, other] = [(); 2].map(|()| world.drive(&reactor, HealthLimits::default()));
        let has_all = meanwhile != Meanwhile::WritesOther;
        let sibling: Rc<dyn Siblings> = Rc::new(Sibling { drive: other.clone(), has_all });
        drive.introduce(Rc::downgrade(&sibling));
        world.answer(Answer::Never);
        let (began, waits) = (reactor.now(), asked(&reactor, &drive));
        let on = reactor.clone();
        reactor.spawn(async move {
            let wrote = write(&on, &other);
            on.sleep(Duration::from_secs(8)).await;
            if meanwhile == Meanwhile::ReadsAndWrote {
                wrote.await.unwrap();
            }
            loop {
                let reads = matches!(meanwhile, Meanwhile::Reads | Meanwhile::ReadsAndWrote);
                let does = if reads { read } else { write };
                does(&on, &other).await.unwrap();
                on.sleep(Duration::from_secs(1)).await;
            }
        });
        assert_eq!(waits.await, Err(DriveError::Gone));
        its.set(reactor.now().since(began));
        world.answer_all();
    });
    waited.get()
}

/// What `docs/FAULTS.md` says.
#[test]
fn how_long_a_silent_drive_is_waited_for() {
    use Meanwhile::{Reads, ReadsAndWrote, Writes, WritesOther};
    let all = [Writes, Reads, ReadsAndWrote, WritesOther];
    let times = |asked| all.map(|its| silence(asked, its).as_millis());
    assert_eq!(times(read), [10_000, 10_000, 10_000, 60_000]);
    assert_eq!(times(write), [10_000, 60_000, 60_000, 60_000]);
    assert_eq!(times(zero), [30_000, 80_000, 80_000, 80_000]);
}

#[test]
fn pulling_ends_all_waiting_at_once() {
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        // One waits for an answer, one for its next attempt, one for a flush, one for its end.
        world.answer(Answer::Never);
        world.answer(Answer::After(MS / 2, Err(EIO)));
        world.answer(Answer::Never);
        let writes = [write(&reactor, &drive), write(&reactor, &drive)];
        let ended = Rc::new(Cell::new(0));
        for _ in 0..2 {
            let (its, ended) = (drive.clone(), ended.clone());
            reactor.spawn(async move {
                assert_eq!(its.flush().await, Err(DriveError::Gone));
                ended.set(ended.get() + 1);
            });
        }
        let (its, r) = (drive.clone(), reactor.clone());
        reactor.spawn(async move {
            r.sleep(MS).await;
            its.pull();
        });
        let results = join_all(writes).await;
        assert_eq!(results, [Err(DriveError::Gone); 2]);
        assert_eq!(reactor.now().as_ns(), 1_000_000);
        reactor.yield_now().await;
        reactor.yield_now().await;
        assert_eq!((ended.get(), reactor.now().as_ns()), (2, 1_000_000));
        assert_eq!(drive.health().timeouts, 0);
    });
}

#[test]
fn a_handle_that_is_dropped_lets_its_device_go_later() {
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        world.answer(Answer::Never);
        let io = write(&reactor, &drive);
        drop(drive);
        drop(io);
        reactor.sleep(Duration::from_secs(60)).await;
        assert_eq!(world.let_go(), 0);
        world.answer_all();
        reactor.sleep(MS).await;
        assert_eq!(world.let_go(), 1);
    });
}

#[test]
fn nothing_keeps_an_idle_reactor_awake() {
    let reactor = run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        assert_eq!(read(&reactor, &drive).await, Ok(()));
    });
    // The watch has one more look, and ends.
    reactor.run();
    assert!(reactor.now().since(Default::default()) <= ANSWER_WITHIN);
}

#[test]
fn times_are_those_of_the_drive() {
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        for _ in 0..100 {
            world.answer(Answer::After(MS, Ok(())));
            world.answer(Answer::After(MS / 10, Ok(())));
            // The second is answered long before anyone looks at it.
            let (slow, fast) = (read(&reactor, &drive), write(&reactor, &drive));
            assert_eq!((slow.await, fast.await), (Ok(()), Ok(())));
        }
        let latency = drive.latency();
        assert_eq!((latency.reads.samples, latency.writes.samples), (100, 100));
        let near = |ns: u64, wanted: u64| (wanted..=wanted + wanted / 16).contains(&ns);
        assert!(near(latency.reads.p50_ns, 1_000_000), "{latency:?}");
        assert!(near(latency.writes.p999_ns, 100_000), "{latency:?}");
        // What others read makes its pace, and not what was done here.
        (0..300).for_each(|_| drive.was_read_elsewhere(Duration::from_millis(20)));
        let both = drive.latency();
        assert_eq!((both.reads.samples, both.writes), (400, latency.writes));
        assert!(near(both.reads.p50_ns, 20_000_000), "{both:?}");
        let here = (drive.traffic().reads.total.count, drive.traffic().reads.lately.count);
        assert_eq!((here, drive.counters().reads), ((100, 100), 100));
        reactor.sleep(Duration::from_secs(11)).await;
        assert_eq!(drive.latency(), Default::default(), "that was long ago");
        let (siblings_p50_ns, siblings_p99_ns) = (100_000, 500_000);
        let (p50_ns, p99_ns) = (900_000, 9_000_000);
        let numbers = Slowness { p50_ns, p99_ns, siblings_p50_ns, siblings_p99_ns };
        (0..3).for_each(|_| drive.compared(Verdict::Slow(numbers), Verdict::Unknown));
        assert!(drive.slow().is_some() && drive.is_alive());
    });
}

/// Memory that is gone in part looks like a drive that reads less; it is there again once touched.
#[test]
fn a_read_that_came_short_touches_its_memory_before_the_next_attempt() {
    run(async |reactor: Reactor, world: World| {
        let drive = world.drive(&reactor, HealthLimits::default());
        for answer in [Answer::Short, Answer::After(MS, Err(EIO))] {
            let into = reactor.buffer(8192);
            into.copy_from_slice(&[7; 8192]);
            world.answer(answer);
            // The world's drive writes nowhere.
            assert_eq!(drive.read(0, into.clone().into()).await, Ok(()));
            assert_eq!(into.bytes(), [0; 8192]);
        }
        assert_eq!((drive.counters().retries, drive.health().read_errors), (2, 0));
        // What is to be written is only looked at.
        let from = reactor.buffer(4096);
        from.copy_from_slice(&[7; 4096]);
        world.answer(Answer::After(MS, Err(EIO)));
        assert_eq!(drive.write(0, from.clone().into()).await, Ok(()));
        assert_eq!(from.bytes(), [7; 4096]);
    });
}
