//! Goal: a drive that answers nothing is given up soon only if others that answer can stand for it:
//! what stops more of them (a machine that stands still, a controller that is reset) costs guests
//! time and nothing else, for a while.
//! Method: operations of files in memory wait as long as the test says, longer than a drive has to
//! answer.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_drive::health::{HealthLimits, HealthState};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::ArrayError;
use ashlar_raid::lease::{BEAT_PERIOD, Host};
use ashlar_raid::start::ArraySpec;
use ashlar_raid::status::ArrayState;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::{Device, Op};
use rustix::fs::{MemfdFlags, memfd_create};

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, address, is_write};

const ANSWER_WITHIN: Duration = Duration::from_secs(1);
/// Longer, and by seconds shorter than drives are waited for at most: a machine may stand still.
const LONG: Duration = Duration::from_secs(2);

/// How it ended; `None`: it has not, yet.
type Request = Rc<Cell<Option<Result<(), ArrayError>>>>;

struct Rig {
    reactor: Reactor,
    steer: Steer,
    pair: Pair,
    /// By member.
    files: Vec<usize>,
}

fn run<F: Future<Output = ()> + 'static>(
    level: Level,
    members: usize,
    test: impl FnOnce(Rig) -> F + 'static,
) {
    run_within(ANSWER_WITHIN, &Pair::spec(level), members, test);
}

/// Drives have so much time to answer.
fn run_within<F: Future<Output = ()> + 'static>(
    answer_within: Duration,
    spec: &ArraySpec,
    members: usize,
    test: impl FnOnce(Rig) -> F + 'static,
) {
    let spec = spec.clone();
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let health = HealthLimits { answer_within, ..HealthLimits::default() };
        let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
        let (mut drives, mut files) = (Vec::new(), Vec::new());
        for index in 0..members as u8 {
            let file = Arc::new(File::from(memfd_create("drive", MemfdFlags::CLOEXEC).unwrap()));
            file.set_len(DRIVE_BYTES).unwrap();
            files.push(address(&file));
            let (device, name) = (Device::File { file }, format!("d{index}"));
            let drive = Drive::with_health_limits(&reactor, device, limits, &name, health);
            drives.push(([index; 16], drive));
        }
        let array = Array::create(&reactor, &spec, drives).await.unwrap();
        let mut pair = Pair::of(&reactor, array, 2 << 20);
        pair.write_some(40).await;
        test(Rig { reactor, steer, pair, files }).await;
    });
}

impl Rig {
    /// Nothing is answered by these members.
    fn silence(&self, members: &[usize]) {
        self.silence_if(members, |_| true);
    }

    /// These members answer no writes.
    fn freeze(&self, members: &[usize]) {
        self.silence_if(members, is_write);
    }

    fn silence_if(&self, members: &[usize], concerned: fn(&Op) -> bool) {
        let silent: Vec<usize> = members.iter().map(|index| self.files[*index]).collect();
        self.steer.set(move |file, op| {
            if silent.contains(&file) && concerned(op) { Fate::Waits } else { Fate::Passes }
        });
    }

    fn health(&self, index: usize) -> Option<HealthState> {
        let status = self.pair.array.status();
        status.members[index].drive.as_ref().map(|drive| drive.health().state)
    }

    fn given_up(&self) -> Vec<usize> {
        let count = self.files.len();
        let is_up = |index: &usize| self.health(*index) == Some(HealthState::Failed);
        (0..count).filter(is_up).collect()
    }

    async fn until_given_up(&self, index: usize) {
        while self.health(index) != Some(HealthState::Failed) {
            self.reactor.sleep(Duration::from_millis(1)).await;
        }
    }

    fn begin(&self, request: impl Future<Output = Result<(), ArrayError>> + 'static) -> Request {
        let done = Rc::new(Cell::new(None));
        let its = done.clone();
        self.reactor.spawn(async move { its.set(Some(request.await)) });
        done
    }

    /// A write of everything.
    fn write_all(&mut self, value: u8) -> Request {
        let (array, reactor) = (self.pair.array.clone(), self.reactor.clone());
        self.pair.bytes.fill(value);
        let bytes = self.pair.bytes.clone();
        self.begin(async move {
            let mut from = Buffers::default();
            for part in bytes.chunks(1 << 20) {
                let buffer = reactor.buffer(part.len());
                buffer.copy_from_slice(part);
                from.push(buffer);
            }
            array.write(0, from).await?;
            array.flush().await
        })
    }

    fn write_block(&self) -> Request {
        let (array, buffer) = (self.pair.array.clone(), self.reactor.buffer(4096));
        self.begin(async move { array.write(0, buffer.into()).await })
    }

    async fn result(&self, request: &Request) -> Result<(), ArrayError> {
        loop {
            match request.take() {
                Some(result) => return result,
                None => self.reactor.sleep(Duration::from_millis(1)).await,
            }
        }
    }

    async fn ends_right(mut self, state: ArrayState) {
        self.pair.check().await;
        assert_eq!(self.pair.array.state(), state);
        self.pair.array.stop().await.unwrap();
    }
}

#[test]
fn when_all_are_silent_none_is_given_up() {
    for policy in [Policy::Journal, Policy::Bitmap] {
        run(Level::Raid6, 5, move |mut rig| async move {
            rig.pair.array.set_policy(policy).await.unwrap();
            for value in 1..=3 {
                rig.silence(&[0, 1, 2, 3, 4]);
                let done = rig.write_all(value);
                rig.reactor.sleep(LONG).await;
                assert!(done.take().is_none(), "nothing is there yet");
                rig.silence(&[]);
                rig.result(&done).await.unwrap();
                assert!(rig.given_up().is_empty());
            }
            let silences = |index: usize| {
                let status = rig.pair.array.status();
                status.members[index].drive.as_ref().unwrap().health().timeouts
            };
            assert!((0..5).all(|index| silences(index) > 0), "it is counted");
            rig.ends_right(ArrayState::Optimal).await;
        });
    }
}

/// They answer reads all the same: as if the file system under all of them were frozen.
#[test]
fn when_none_takes_writes_none_is_given_up() {
    for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 5), (Level::Raid10, 6)] {
        run(level, members, move |mut rig| async move {
            rig.freeze(&(0..members).collect::<Vec<_>>());
            let done = rig.write_all(1);
            rig.reactor.sleep(LONG).await;
            assert!(done.take().is_none(), "nothing is there yet");
            rig.silence(&[]);
            rig.result(&done).await.unwrap();
            assert!(rig.given_up().is_empty());
            rig.ends_right(ArrayState::Optimal).await;
        });
    }
}

/// All others may wait for it: nobody knows whether they could write.
#[test]
fn that_others_read_says_nothing_about_one_that_does_not_write() {
    let answer_within = 2 * ANSWER_WITHIN;
    run_within(answer_within, &Pair::spec(Level::Raid1), 2, move |rig| async move {
        rig.pair.array.flush().await.unwrap();
        rig.freeze(&[0, 1]);
        let done = rig.write_block();
        rig.steer.caught(&rig.reactor, 2).await;
        // What the other was asked before may come through, and is no proof.
        rig.reactor.sleep(answer_within / 2).await;
        let (first, left) = (rig.files[0], Cell::new(1));
        rig.steer.set(move |file, op| {
            let passes = !is_write(op) || file == first && left.replace(0) > 0;
            if passes { Fate::Passes } else { Fate::Waits }
        });
        rig.reactor.sleep(answer_within).await;
        assert!(done.take().is_none() && rig.given_up().is_empty());
        rig.silence(&[]);
        rig.result(&done).await.unwrap();
        assert!(rig.given_up().is_empty());
    });
}

/// The lease is written to all of them.
#[test]
fn one_that_does_not_write_is_given_up_while_others_do() {
    let host = Some(Host::new([7; 16], "here"));
    let (answer_within, spec) =
        (BEAT_PERIOD * 6 / 5, ArraySpec { host, ..Pair::spec(Level::Raid1) });
    run_within(answer_within, &spec, 2, move |rig| async move {
        rig.pair.array.flush().await.unwrap();
        rig.freeze(&[1]);
        let (began, done) = (rig.reactor.now(), rig.write_block());
        rig.until_given_up(1).await;
        assert!(rig.reactor.now().since(began) < 3 * answer_within, "it was not waited for");
        rig.result(&done).await.unwrap();
        rig.silence(&[]);
    });
}

/// Those that answer could not stand for those that do not.
#[test]
fn when_too_many_are_silent_none_is_given_up() {
    run(Level::Raid6, 6, |mut rig| async move {
        rig.silence(&[0, 2, 3]);
        let done = rig.write_all(1);
        rig.reactor.sleep(LONG).await;
        assert!(done.take().is_none() && rig.given_up().is_empty());
        rig.silence(&[]);
        rig.result(&done).await.unwrap();
        rig.ends_right(ArrayState::Optimal).await;
    });
}

/// That one has gone for good says nothing about the others.
#[test]
fn one_that_goes_meanwhile_is_no_answer() {
    run(Level::Raid6, 6, |mut rig| async move {
        rig.silence(&[0, 1, 2, 3, 4, 5]);
        let done = rig.write_all(1);
        rig.reactor.sleep(ANSWER_WITHIN).await;
        rig.pair.array.pull_member(MemberIndex::new(4)).unwrap();
        rig.reactor.sleep(LONG - ANSWER_WITHIN).await;
        assert_eq!(rig.given_up(), [4]);
        rig.silence(&[]);
        rig.result(&done).await.unwrap();
        assert_eq!(rig.given_up(), [4]);
        rig.ends_right(ArrayState::Degraded).await;
    });
}

/// A pair that is lost does not keep another from going on with one half.
#[test]
fn what_another_set_has_lost_does_not_count() {
    run(Level::Raid10, 4, |rig| async move {
        rig.pair.array.flush().await.unwrap();
        for index in [0, 1] {
            rig.pair.array.pull_member(MemberIndex::new(index)).unwrap();
        }
        rig.silence(&[3]);
        let (array, buffer) = (rig.pair.array.clone(), rig.reactor.buffer(4096));
        let chunk = u64::from(array.layout().chunk_bytes);
        let reads = [(); 2].map(|()| {
            let (array, buffer) = (array.clone(), buffer.clone());
            rig.begin(async move { array.read(chunk, buffer.into()).await })
        });
        rig.until_given_up(3).await;
        rig.silence(&[]);
        for read in reads {
            rig.result(&read).await.unwrap();
        }
    });
}

#[test]
fn nobody_is_waited_for_for_ever() {
    run(Level::Raid0, 2, |mut rig| async move {
        rig.silence(&[1]);
        let (began, done) = (rig.reactor.now(), rig.write_all(1));
        assert_eq!(rig.result(&done).await, Err(ArrayError::Lost));
        // A machine that stands still meanwhile makes it longer.
        let times = rig.reactor.now().since(began).as_millis() / ANSWER_WITHIN.as_millis();
        assert!((6..30).contains(&times), "{times}");
        rig.silence(&[]);
    });
}

/// Members that nobody asks for anything are asked whether they answer.
#[test]
fn a_silent_one_is_given_up_while_others_only_could_answer() {
    run(Level::Raid1, 2, |rig| async move {
        rig.pair.array.flush().await.unwrap();
        rig.silence(&[1]);
        let began = rig.reactor.now();
        // Reads of a mirror turn over its copies: one is of the silent one.
        let reads = [(); 2].map(|()| {
            let (array, buffer) = (rig.pair.array.clone(), rig.reactor.buffer(4096));
            rig.begin(async move { array.read(0, buffer.into()).await })
        });
        rig.until_given_up(1).await;
        assert!(rig.reactor.now().since(began) >= ANSWER_WITHIN);
        // A drive may write to the memory of a read for as long as it likes.
        rig.silence(&[]);
        for read in reads {
            rig.result(&read).await.unwrap();
        }
        assert_eq!(rig.given_up(), [1]);
        rig.ends_right(ArrayState::Degraded).await;
    });
}

#[test]
fn one_that_the_array_cannot_do_without_is_waited_for() {
    run(Level::Raid5, 4, |mut rig| async move {
        rig.silence(&[2]);
        let done = rig.write_all(1);
        rig.until_given_up(2).await;
        rig.result(&done).await.unwrap();
        assert_eq!(rig.given_up(), [2]);
        rig.silence(&[0, 2]);
        let done = rig.write_all(2);
        rig.reactor.sleep(LONG).await;
        assert!(done.take().is_none(), "what it was asked is not answered");
        rig.silence(&[2]);
        rig.result(&done).await.unwrap();
        assert_eq!((rig.given_up(), rig.health(0)), (vec![2], Some(HealthState::Suspect)));
        rig.ends_right(ArrayState::Degraded).await;
    });
}

/// The operator need not wait.
#[test]
fn one_that_is_waited_for_can_be_pulled() {
    run(Level::Raid0, 2, |mut rig| async move {
        rig.silence(&[1]);
        let done = rig.write_all(1);
        rig.reactor.sleep(LONG).await;
        assert!(done.take().is_none() && rig.given_up().is_empty());
        rig.pair.array.pull_member(MemberIndex::new(1)).unwrap();
        assert_eq!(rig.result(&done).await, Err(ArrayError::Lost));
        rig.silence(&[]);
    });
}
