//! Goal: on drives of memory, which lend their bytes and answer at once, writes are what they are
//! on others: parity fits, also where rows are changed by many at the same time.
//! Method: wide stripes, so that small writes read what they change; each member in turn is pulled,
//! and everything compared, written to and rebuilt.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::ArraySpec;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;

use crate::pair::{DRIVE_BYTES, Pair, run};

const SHAPES: [(Level, u8, u8); 4] =
    [(Level::Raid5, 5, 0), (Level::Raid6, 6, 0), (Level::RaidNm, 7, 3), (Level::Raid50, 10, 0)];
const WRITERS: usize = 8;
/// Of a writer, in sectors: they share stripes, and chunks.
const SPAN: usize = 24;

async fn memory(reactor: &Reactor, name: &str) -> Rc<Drive> {
    let limits = Limits { bytes: DRIVE_BYTES, sector_bytes: 512, zeroes_cheaply: true };
    let drive = Drive::new(reactor, Device::Ram { bytes: DRIVE_BYTES }, limits, name);
    crate::pair::fill(reactor, &drive).await;
    drive
}

async fn made(reactor: &Reactor, (level, members, parity): (Level, u8, u8)) -> Pair {
    let mut drives = Vec::new();
    for index in 0..members {
        drives.push(([index; 16], memory(reactor, &format!("d{index}")).await));
    }
    let shape = Shape { parity, ..Shape::default() };
    let spec = ArraySpec { shape, ..Pair::spec(level) };
    let array = Array::create(reactor, &spec, drives).await.unwrap();
    Pair::of(reactor, array, 4 << 20)
}

/// Each writes sectors of its own, beside those of others, without waiting for anybody.
async fn write_together(pair: &mut Pair) {
    let left = Rc::new(Cell::new(WRITERS));
    let values: [u8; WRITERS] = std::array::from_fn(|_| pair.prng.next_u64() as u8);
    for (writer, value) in values.into_iter().enumerate() {
        let (array, reactor, left) = (pair.array.clone(), pair.reactor.clone(), left.clone());
        pair.reactor.spawn(async move {
            let mut prng = Prng::from_seed(value.into());
            let buffer = reactor.buffer(SPAN * 512);
            for round in 0..100_u8 {
                let first = if round == 99 { 0 } else { prng.index(SPAN) };
                let bytes = buffer.slice(first * 512..SPAN * 512);
                bytes.copy_from_slice(&vec![value ^ round; bytes.len()]);
                let at = (writer * SPAN + first) * 512;
                array.write(at as u64, bytes.into()).await.unwrap();
            }
            left.set(left.get() - 1);
        });
        pair.bytes[writer * SPAN * 512..][..SPAN * 512].fill(value ^ 99);
    }
    while left.get() > 0 {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn every_member_can_be_worked_out() {
    run(|reactor| async move {
        for (shape, policy) in SHAPES.iter().flat_map(|its| Policy::ALL.map(|p| (*its, p))) {
            let mut pair = made(&reactor, shape).await;
            pair.array.set_policy(policy).await.unwrap();
            for index in 0..shape.1 {
                pair.write_some(60).await;
                write_together(&mut pair).await;
                pair.in_place().await;
                pair.scrub_is_clean().await;
                pair.array.pull_member(MemberIndex(index)).unwrap();
                pair.check().await;
                pair.write_some(20).await;
                write_together(&mut pair).await;
                pair.check().await;
                let new = memory(&reactor, "new").await;
                let uuid = [100 + index; 16];
                pair.array.replace_member(MemberIndex(index), new, uuid).await.unwrap();
                pair.rebuilt().await;
            }
            pair.in_place().await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}
