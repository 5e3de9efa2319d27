//! Goal: as many members as there are parity chunks may die with the daemon in the middle of a
//! destage, of which the journal has two sums, and other parity in full.
//! Method: writes in place are held, one set after the other; then each set of members is lost.
#![allow(clippy::unwrap_used, reason = "a test")]

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::StripeIndex;
use ashlar_raid::label;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_reactor::executor::Reactor;

use crate::pair::{DRIVE_BYTES, Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const DATA: u8 = 3;
/// The first one of the second step: nothing of it is in place before all of the first step is.
const OTHER: u8 = DATA + 2;

/// A block of chunk 0 is written, and put in place but for what these positions hold. Without these
/// members then, all is there.
async fn loses(reactor: &Reactor, steer: &Steer, parity: u8, held: &[u8], lost: u64) {
    let (level, shape) = (Level::RaidNm, Shape { parity, ..Shape::default() });
    let spec = ArraySpec { policy: Some(Policy::Journal), shape, ..Pair::spec(level) };
    let drives = vec![DRIVE_BYTES; usize::from(DATA + parity)];
    let mut pair = Pair::made(reactor, &spec, &drives, 512).await;
    for chunk in 1..=DATA {
        pair.put(usize::from(chunk - 1) * (16 << 10), &[chunk; 16 << 10]).await;
    }
    pair.in_place().await;
    pair.put(0, &[100; 4096]).await;
    let drives = pair.drives();
    let layout = pair.array.layout();
    let drive = |position: u8| &drives[layout.member_at(StripeIndex(0), position).index()];
    let file = |position: &u8| address(pair.file(drive(*position)));
    let (files, other) = (held.iter().map(file).collect::<Vec<_>>(), file(&OTHER));
    let area = label::plan(DRIVE_BYTES, parity).unwrap().data.range();
    let is_first_step = held.iter().any(|position| (DATA..OTHER).contains(position));
    steer.set(move |file, op| {
        let in_place = is_write(op) && offset(op).is_some_and(|at| area.contains(&at));
        assert!(!(in_place && is_first_step && file == other), "before what has sums");
        if in_place && files.contains(&file) { Fate::Waits } else { Fate::Passes }
    });
    let array = pair.array.clone();
    let destaged = begin(reactor, async move { array.destage_all().await });
    steer.caught(reactor, held.len()).await;
    pair.dies();
    steer.drop_waiting(reactor).await;
    assert!(destaged.ended(reactor).await.is_err());
    let left = (0..drives.len()).filter(|member| lost & 1 << member == 0);
    let left: Vec<_> = left.map(|member| &drives[member]).collect();
    let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
    pair.start(&left, options).await.unwrap();
    pair.check().await;
    pair.array.stop().await.unwrap();
}

#[test]
fn as_many_die_as_there_are_parity_chunks() {
    let steps = [&[DATA, DATA + 1][..], &[DATA], &[DATA + 1], &[0, OTHER], &[OTHER]];
    for (parity, steps) in [(3, &steps[..]), (4, &steps[..2])] {
        let (steer, steps) = (Steer::new(), steps.to_vec());
        run_on(steer.backend(), |reactor| async move {
            let sets =
                (0..1_u64 << (DATA + parity)).filter(|set| set.count_ones() == u32::from(parity));
            let sets: Vec<u64> = sets.collect();
            for held in steps {
                for lost in &sets {
                    loses(&reactor, &steer, parity, held, *lost).await;
                }
            }
        });
    }
}
