//! Goal: requests arrive and come back right, in every way in which they can be put into a ring,
//! and a back end that breaks the rules or goes away is found out.
//! Method: devices made by hand from the specification, which answer in no order, and lie.

#[path = "tests/device.rs"]
mod device;

use std::sync::atomic::Ordering;

use ashlar_reactor::prng::Prng;

use super::*;
use crate::counters::Sample;
use crate::load::{Lane, LoadSpec, Work};
use crate::run::Limit;

#[test]
fn what_no_back_end_could_do_is_refused() {
    let wish = Wish {
        ring: RingKind::Split,
        indirect: true,
        event_index: true,
        queues: 2,
        depth: 32,
        block_bytes: 4096,
        segments: 2,
        writes: true,
        resume: None,
    };
    assert!(check(&wish).is_ok());
    for (wrong, fix) in [
        (Wish { queues: 0, ..wish }, "--queues"),
        (Wish { depth: 0, ..wish }, "--depth"),
        (Wish { segments: 0, ..wish }, "--segments"),
        (Wish { block_bytes: 0, ..wish }, "--block"),
        (Wish { segments: 3, ..wish }, "multiple of --segments"),
        (Wish { segments: 16, ..wish }, "multiple of --segments"),
        (Wish { depth: 1025, ..wish }, "--depth"),
        (Wish { depth: 257, indirect: false, ..wish }, "--descriptors indirect"),
    ] {
        match check(&wrong) {
            Err(BenchError::Spec { fix: found, .. }) => assert!(found.contains(fix), "{found}"),
            other => panic!("{wrong:?}: {other:?}"),
        }
    }
    assert!(check(&Wish { depth: 256, indirect: false, ..wish }).is_ok());
}

const BLOCK: u32 = 4096;
const BLOCKS: u64 = 64;

fn wish(ring: RingKind, indirect: bool, event_index: bool, segments: u16) -> Wish {
    let (queues, depth) = (2, 6);
    let (block_bytes, writes, resume) = (BLOCK, true, None);
    Wish { ring, indirect, event_index, queues, depth, block_bytes, segments, writes, resume }
}

/// A device whose queues answer what they have popped in no order.
struct Rig {
    memory: Memory,
    queues: Vec<Queue>,
    devices: Vec<device::Device>,
    disk: Vec<u8>,
    prng: Prng,
    clock: Clock,
}

impl Rig {
    fn new(wish: Wish) -> Rig {
        let shape = SlotShape::new(&wish);
        let places = queue::places(&wish, &shape);
        let memory = Memory::new(places.end).unwrap();
        let queues = places.starts.into_iter();
        let queues = queues.map(|start| Queue::new(&memory, &wish, shape, start).unwrap());
        let queues: Vec<_> = queues.collect();
        let device = |queue: &Queue| device::Device::new(&wish, queue.places, queue.size);
        let devices = queues.iter().map(device).collect();
        let disk = vec![0; usize::try_from(BLOCKS).unwrap() * BLOCK as usize];
        let (prng, clock) = (Prng::from_seed(1), Clock::calibrated());
        Rig { memory, queues, devices, disk, prng, clock }
    }

    fn load(&self) -> LoadSpec {
        let (block_bytes, size_bytes) = (BLOCK, BLOCKS * u64::from(BLOCK));
        LoadSpec {
            work: Work::RandRw,
            read_percent: 50,
            block_bytes,
            size_bytes,
            seed: 9,
            lane: Lane::ONLY,
        }
    }

    /// Both sides in turns until the round is over.
    fn finish(&mut self, run: &mut Run) -> Result<(), BenchError> {
        let mut in_flight = 0;
        while !run.is_over() || in_flight > 0 {
            for (queue, device) in self.queues.iter_mut().zip(&mut self.devices) {
                in_flight += queue.submit(&self.memory, run)?;
                device.serve(&self.memory, &mut self.disk, &mut self.prng);
                in_flight -= queue.collect(&self.memory, run)?;
            }
        }
        Ok(())
    }

    fn laid(mut self) -> Rig {
        let mut laying = Run::laying(self.clock, self.load());
        self.finish(&mut laying).unwrap();
        self
    }

    fn verifying(&self, count: u64) -> Run {
        let mut run = Run::new(self.clock, self.load(), true, Box::new(Sample::default));
        run.begin(Limit::Requests(count));
        run
    }
}

fn every_wish(mut each: impl FnMut(Wish)) {
    for ring in [RingKind::Split, RingKind::Packed] {
        for indirect in [false, true] {
            for event_index in [false, true] {
                for segments in [1, 4] {
                    each(wish(ring, indirect, event_index, segments));
                }
            }
        }
    }
}

#[test]
fn all_that_is_written_comes_back_whatever_the_ring() {
    every_wish(|wish| {
        let mut rig = Rig::new(wish).laid();
        let mut run = rig.verifying(5000);
        rig.finish(&mut run).unwrap_or_else(|error| panic!("{wish:?}: {error}"));
        let round = run.round();
        assert_eq!(round.all.requests, 5000, "{wish:?}");
        assert_eq!(round.reads.unwrap().requests, round.reads_verified, "{wish:?}");
        // Each device was asked for several laps of its ring.
        for device in &rig.devices {
            assert!(device.served > 4 * u64::from(rig.queues[0].size), "{wish:?}");
        }
    });
}

#[test]
fn a_device_that_polls_is_not_kicked_and_one_that_waits_is() {
    every_wish(|wish| {
        for waits in [false, true] {
            let mut rig = Rig::new(wish);
            rig.devices.iter_mut().for_each(|device| device.waits = waits);
            rig.devices.iter_mut().for_each(|device| device.say_wish(&rig.memory));
            let mut rig = rig.laid();
            let mut run = rig.verifying(3000);
            rig.finish(&mut run).unwrap();
            for queue in &rig.queues {
                let kicks = queue.kick.read().unwrap_or(0);
                assert_eq!(kicks > 100, waits, "{wish:?}: {kicks}");
                assert!(waits || kicks <= 1, "{wish:?}: {kicks}");
            }
            assert!(rig.devices.iter().all(|device| !device.may_call(&rig.memory)), "{wish:?}");
        }
    });
}

#[test]
fn a_device_that_lies_is_found_out() {
    for lie in device::Lie::ALL {
        for ring in [RingKind::Split, RingKind::Packed] {
            let mut rig = Rig::new(wish(ring, true, true, 2)).laid();
            rig.devices[1].lie = Some(lie);
            let mut run = rig.verifying(5000);
            let error = rig.finish(&mut run).unwrap_err();
            let found = match (&error, lie) {
                (BenchError::Mismatch(_), device::Lie::WrongByte | device::Lie::NothingRead) => {
                    true
                }
                (BenchError::Mismatch(_), device::Lie::LostWrite) => true,
                (BenchError::Request { why, .. }, device::Lie::ErrorStatus) => why.contains("I/O"),
                (BenchError::Request { why, .. }, device::Lie::NoStatus) => why.contains("255"),
                (BenchError::Request { why, .. }, device::Lie::ShortLength) => why.contains("only"),
                (BenchError::BackEnd { error, .. }, device::Lie::WrongChain) => {
                    error.contains("chain 999")
                }
                (BenchError::BackEnd { error, .. }, device::Lie::AnsweredTwice) => {
                    error.contains("not under way")
                }
                _ => false,
            };
            assert!(found, "{ring} {lie:?}: {error}");
        }
    }
}

#[test]
fn an_index_that_jumps_is_refused() {
    let mut rig = Rig::new(wish(RingKind::Split, true, false, 1));
    let index = rig.queues[0].places.device + 2;
    rig.memory.u16(index).store(500, Ordering::Relaxed);
    let mut run = rig.verifying(10);
    let error = rig.queues[0].collect(&rig.memory, &mut run).unwrap_err();
    assert!(error.to_string().contains("jumped from 0 to 500"), "{error}");
}
