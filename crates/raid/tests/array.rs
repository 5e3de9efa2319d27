//! Goal: every level keeps what was written: healthy, degraded, rebuilt, and after a restart.
//! Method: arrays on RAM drives, random reads and writes against a plain copy of the bytes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::{ArrayState, ScrubState};
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;

const DRIVE_BYTES: u64 = 12 << 20;

fn drive(reactor: &Reactor, name: &str, sector_bytes: u32) -> Rc<Drive> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes, zeroes_cheaply: true };
    Drive::new(reactor, Device::Ram { bytes: DRIVE_BYTES }, limits, name)
}

fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
    let backend = UringBackend::new().unwrap();
    let reactor = Reactor::new(Box::new(backend), Order::Fifo);
    let future = test(reactor.clone());
    reactor.block_on(future).expect("the test ends");
}

/// The array and what it should hold.
struct Pair {
    reactor: Reactor,
    array: Rc<Array>,
    bytes: Vec<u8>,
    prng: Prng,
}

impl Pair {
    async fn new(reactor: &Reactor, level: Level, members: usize, sector: u32) -> Pair {
        let spec = ArraySpec {
            uuid: [9; 16],
            name: "test".into(),
            level,
            chunk_bytes: 16 << 10,
            shape: ashlar_raid::layout::Shape::default(),
            policy: None,
            host: None,
        };
        let drives =
            (0..members).map(|i| ([i as u8; 16], drive(reactor, &format!("d{i}"), sector)));
        let array = Array::create(reactor, &spec, drives.collect()).await.unwrap();
        let bytes = vec![0; array.capacity().min(4 << 20) as usize];
        Pair { reactor: reactor.clone(), array, bytes, prng: Prng::from_seed(7) }
    }

    /// A random range of whole sectors, often small, sometimes over several stripes.
    fn range(&mut self) -> (usize, usize) {
        let len_max = [8, 64, 700][self.prng.index(3)];
        let len = 512 * (1 + self.prng.index(len_max));
        let at = 512 * self.prng.index((self.bytes.len() - len) / 512 + 1);
        (at, len)
    }

    async fn write_some(&mut self, count: usize) {
        for _ in 0..count {
            let (at, len) = self.range();
            if self.prng.chance(1, 12) {
                self.bytes[at..at + len].fill(0);
                self.array.write_zeroes(at as u64, len as u64).await.unwrap();
                continue;
            }
            let value = self.prng.next_u64().to_le_bytes();
            let new: Vec<u8> = (0..len).map(|i| value[i % 8] ^ (i / 512) as u8).collect();
            self.bytes[at..at + len].copy_from_slice(&new);
            // Pieces of odd sizes, as a guest may give them.
            let first = (512 * self.prng.index(3)).min(len - 512);
            let mut from = Buffers::default();
            for part in [&new[..first], &new[first..]] {
                for part in part.chunks(1 << 20).filter(|part| !part.is_empty()) {
                    let buffer = self.reactor.buffer(part.len());
                    buffer.copy_from_slice(part);
                    from.push(buffer);
                }
            }
            self.array.write(at as u64, from).await.unwrap();
        }
    }

    async fn read(&self, at: usize, len: usize) -> Result<Vec<u8>, ArrayError> {
        let into = self.reactor.buffer(len);
        self.array.read(at as u64, into.clone().into()).await?;
        Ok(into.bytes().to_vec())
    }

    async fn check(&mut self) {
        for at in (0..self.bytes.len()).step_by(1 << 18) {
            let len = (1 << 18).min(self.bytes.len() - at);
            let read = self.read(at, len).await.unwrap();
            let wrong = read.iter().zip(&self.bytes[at..]).position(|(a, b)| a != b);
            assert_eq!(wrong.map(|w| w + at), None, "first wrong byte");
        }
        for _ in 0..20 {
            let (at, len) = self.range();
            assert!(self.read(at, len).await.unwrap() == self.bytes[at..at + len]);
        }
    }

    async fn scrub_is_clean(&self) {
        self.array.start_scrub(false).unwrap();
        loop {
            self.reactor.sleep(Duration::from_millis(1)).await;
            if let ScrubState::Finished { report } = self.array.status().scrub {
                assert_eq!(report.mismatched_stripes, 0, "{report:?}");
                assert_eq!(report.unreadable_stripes, 0, "{report:?}");
                return;
            }
        }
    }

    async fn rebuilt(&self) {
        while self.array.status().rebuild.is_some() {
            self.reactor.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(self.array.status().rebuild_error, None);
    }

    async fn replace(&self, member: u8) {
        let new = drive(&self.reactor, "new", 512);
        let uuid = [200 + member; 16];
        self.array.replace_member(MemberIndex(member), new, uuid).await.unwrap();
    }

    /// Stops the array and puts it together again from its drives, in reverse order.
    async fn restart(&mut self, options: AssembleOptions) {
        let members = self.array.status().members;
        self.array.stop().await.unwrap();
        assert_eq!(self.read(0, 512).await, Err(ArrayError::Stopped));
        let mut drives: Vec<_> = members.into_iter().filter_map(|m| m.drive).collect();
        drives.retain(|drive| drive.is_alive());
        drives.reverse();
        self.array = Array::assemble(&self.reactor, drives, options).await.unwrap();
    }
}

const REDUNDANT: [(Level, usize, &[u8]); 5] = [
    (Level::Raid1, 2, &[0]),
    (Level::Raid10, 4, &[0, 3]),
    (Level::Raid5, 5, &[2]),
    (Level::Raid5, 3, &[0]),
    (Level::Raid6, 6, &[1, 4]),
];

#[test]
fn healthy_arrays_of_every_level() {
    run(|reactor| async move {
        let plain = [(Level::Raid0, 3), (Level::Raid0, 1), (Level::Raid1, 3), (Level::Raid6, 4)];
        let redundant = REDUNDANT.map(|(level, members, _)| (level, members));
        for (level, members) in plain.into_iter().chain(redundant) {
            for sector in [512, 4096] {
                let mut pair = Pair::new(&reactor, level, members, sector).await;
                pair.check().await;
                pair.write_some(60).await;
                pair.check().await;
                if level != Level::Raid0 {
                    pair.scrub_is_clean().await;
                }
                pair.restart(AssembleOptions::default()).await;
                pair.check().await;
                assert_eq!(pair.array.state(), ArrayState::Optimal);
                pair.array.stop().await.unwrap();
            }
        }
    });
}

#[test]
fn degraded_replaced_and_rebuilt() {
    run(|reactor| async move {
        for (level, members, lost) in REDUNDANT {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.write_some(40).await;
            for member in lost {
                pair.array.pull_member(MemberIndex(*member)).unwrap();
                pair.check().await;
                pair.write_some(40).await;
                pair.check().await;
            }
            assert_eq!(pair.array.state(), ArrayState::Degraded);
            pair.array.flush().await.unwrap();
            let known = Some(pair.array.status().generation);
            let options = AssembleOptions { known_generation: known, ..AssembleOptions::default() };
            pair.restart(options).await;
            pair.check().await;
            for member in lost {
                pair.replace(*member).await;
                pair.write_some(20).await;
                pair.check().await;
                pair.rebuilt().await;
            }
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn past_its_limit_an_array_serves_what_is_left() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 5, 512).await;
        pair.write_some(40).await;
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.array.pull_member(MemberIndex(1)).unwrap();
        assert_eq!(pair.array.state(), ArrayState::Failed);
        let (mut good, mut lost) = (0, 0);
        for at in (0..pair.bytes.len()).step_by(16 << 10) {
            match pair.read(at, 512).await {
                Ok(read) => {
                    assert!(read == pair.bytes[at..at + 512]);
                    good += 1;
                }
                Err(error) => {
                    assert_eq!(error, ArrayError::Lost);
                    lost += 1;
                }
            }
        }
        // Each of 5 members holds data in 4 of 5 stripes.
        assert!(good > lost && lost > 0, "{good} {lost}");
    });
}

#[test]
fn a_stale_half_of_a_mirror_is_not_believed() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        pair.write_some(10).await;
        let old = pair.array.status().members[0].drive.clone().unwrap();
        pair.array.pull_member(MemberIndex(0)).unwrap();
        pair.write_some(10).await;
        pair.array.stop().await.unwrap();
        drop(old);
        let new = pair.array.status().members[1].drive.clone().unwrap();
        let alone = Array::assemble(&reactor, vec![new], AssembleOptions::default()).await;
        // Its superblock says that the other one is stale: nothing newer can exist.
        let array = alone.unwrap();
        assert_eq!(array.state(), ArrayState::Degraded);
        array.stop().await.unwrap();
    });
}

#[test]
fn assembly_refuses_what_it_cannot_be_sure_of() {
    run(|reactor| async move {
        let pair = Pair::new(&reactor, Level::Raid1, 2, 512).await;
        let drives: Vec<_> =
            pair.array.status().members.into_iter().map(|m| m.drive.unwrap()).collect();
        pair.array.stop().await.unwrap();
        let assemble = |drives: Vec<Rc<Drive>>, known_generation, force| {
            let options = AssembleOptions { force, known_generation, host: None };
            let reactor = reactor.clone();
            async move { Array::assemble(&reactor, drives, options).await.map(|_| ()) }
        };
        let one = vec![drives[0].clone()];
        assert_eq!(assemble(one.clone(), None, false).await, Err(AssembleError::MaybeOld));
        assert_eq!(assemble(one.clone(), Some(99), false).await, Err(AssembleError::MaybeOld));
        assert_eq!(assemble(vec![], None, true).await, Err(AssembleError::NoLabel));
        let blank = vec![drive(&reactor, "blank", 512)];
        assert_eq!(assemble(blank, None, true).await, Err(AssembleError::NoLabel));
        assert_eq!(assemble(one, Some(1), false).await, Ok(()));
    });
}
