//! Goal: whatever is asked for is done on every layer, counted exactly, and its bytes are right.
//! Method: small arrays of memory, runs that end after a number of requests.

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::layout::Shape;

use super::*;
use crate::under::{Layer, Source};

pub(crate) const REQUESTS: u64 = 2000;

pub(crate) fn under(level: Level, members: usize) -> UnderSpec {
    UnderSpec {
        sources: (0..members).map(|_| Source::Ram { bytes: 64 << 20 }).collect(),
        layer: Layer::Volume,
        level,
        shape: Shape::default(),
        chunk_bytes: 64 << 10,
        policy: Some(Policy::Bitmap),
        integrity: false,
        pulled: 0,
        size_bytes: Some(4 << 20),
        block_bytes: 4096,
        at_rest: true,
    }
}

pub(crate) fn asked(work: Work) -> Asked {
    Asked {
        work,
        read_percent: 50,
        block_bytes: 4096,
        depth: 8,
        seed: 1,
        verify: true,
        limit: Limit::Requests(REQUESTS),
        rounds: 2,
    }
}

fn measured(under: UnderSpec, asked: Asked) -> Result<Report, BenchError> {
    let rounds = asked.rounds;
    let mut events = Vec::new();
    let report = run(EngineSpec { cores: vec![0], under, asked }, &mut |event| events.push(event))?;
    assert_eq!(events.len(), 1 + 2 * rounds as usize);
    assert_eq!((events[0], events[1]), (Event::SettingUp, Event::RoundBegan(1)));
    for round in &report.rounds {
        assert_eq!(round.all.requests, REQUESTS);
        let reads = round.reads.map_or(0, |reads| reads.requests);
        assert_eq!(round.reads_verified, if asked.verify { reads } else { 0 });
    }
    Ok(report)
}

#[test]
fn every_layer_and_every_kind_of_work_is_verified() {
    for layer in [Layer::Drive, Layer::Raid, Layer::Volume] {
        for work in Work::ALL {
            let under = UnderSpec { layer, ..under(Level::Raid5, 3) };
            let report = measured(under, asked(work)).unwrap();
            assert_eq!(report.rounds.len(), 2);
            assert_eq!(report.setup["what"], layer.name());
            let round = &report.rounds[1];
            assert_eq!(round.writes.is_some(), work.writes(), "{work}");
            assert_eq!(round.cost_per_request.ring_calls.map(|calls| calls < 0.1), Some(true));
        }
    }
}

#[test]
fn policies_and_missing_members_are_verified() {
    for (policy, integrity) in
        [(Policy::Journal, false), (Policy::Journal, true), (Policy::None, false)]
    {
        for pulled in [0, 2] {
            let policy = Some(policy);
            let under = UnderSpec { policy, integrity, pulled, ..under(Level::Raid6, 5) };
            measured(under, asked(Work::RandRw)).unwrap();
        }
    }
}

/// What is away is worked out from drives of memory as they are, while others write there.
#[test]
fn what_is_worked_out_in_memory_is_verified() {
    for (level, members, pulled) in
        [(Level::Raid1, 2, 1), (Level::Raid5, 4, 1), (Level::Raid6, 5, 1), (Level::Raid7, 6, 3)]
    {
        for policy in [Policy::Bitmap, Policy::Journal] {
            // A few stripes, and more requests at a time than they have blocks in a row.
            let (policy, size_bytes) = (Some(policy), Some(1 << 20));
            let under = UnderSpec { pulled, policy, size_bytes, ..under(level, members) };
            measured(under, Asked { depth: 64, ..asked(Work::RandRw) }).unwrap();
        }
    }
}

#[test]
fn drives_of_nothing_carry_an_array() {
    for layer in [Layer::Drive, Layer::Raid, Layer::Volume] {
        let sources = (0..5).map(|_| Source::Null { bytes: 64 << 20 }).collect();
        let under = UnderSpec { layer, sources, ..under(Level::Raid5, 0) };
        measured(under, Asked { verify: false, ..asked(Work::RandRw) }).unwrap();
    }
}

#[test]
fn a_range_that_is_too_small_or_too_large_is_refused() {
    let small = UnderSpec { size_bytes: Some(32 << 10), ..under(Level::Raid5, 3) };
    let error = measured(small, asked(Work::RandRw)).unwrap_err();
    assert!(matches!(&error, BenchError::Spec { fix, .. } if fix.contains("--depth")), "{error}");
    let large = UnderSpec { size_bytes: Some(1 << 40), ..under(Level::Raid5, 3) };
    let error = measured(large, asked(Work::RandRw)).unwrap_err();
    assert!(matches!(&error, BenchError::Spec { fix, .. } if fix.contains("--size")), "{error}");
}

#[test]
fn a_cpu_that_is_not_there_is_refused() {
    let spec =
        EngineSpec { cores: vec![1000], under: under(Level::Raid5, 3), asked: asked(Work::Read) };
    let error = run(spec, &mut |_| ()).unwrap_err();
    assert!(matches!(error, BenchError::Core(_)), "{error}");
}

/// What one core writes is read by the other, in the same stripes.
#[test]
fn several_cores_are_verified_and_counted_together() {
    let cpus = std::thread::available_parallelism().unwrap().get();
    let cores: Vec<usize> = [0, 1, 0].map(|core| core % cpus).to_vec();
    for policy in [Policy::Journal, Policy::Bitmap] {
        for pulled in [0, 1] {
            let under = UnderSpec { policy: Some(policy), pulled, ..under(Level::Raid5, 4) };
            let (cores, asked) = (cores.clone(), asked(Work::RandRw));
            let report = run(EngineSpec { cores, under, asked }, &mut |_| ()).unwrap();
            assert_eq!(report.rounds.len(), 2);
            for round in &report.rounds {
                assert_eq!(round.all.requests, 3 * REQUESTS);
                assert_eq!(round.reads.unwrap().requests, round.reads_verified);
            }
        }
    }
    let under = UnderSpec { layer: Layer::Raid, ..under(Level::Raid5, 3) };
    let error =
        run(EngineSpec { cores, under, asked: asked(Work::Read) }, &mut |_| ()).unwrap_err();
    assert!(matches!(&error, BenchError::Spec { fix, .. } if fix.contains("--what")), "{error}");
}
