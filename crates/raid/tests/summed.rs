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
/// Stored in the first step, and then a parity chunk of the second.
const P: u8 = DATA;
const Q: u8 = DATA + 1;
const OTHER: u8 = DATA + 2;

/// What is held, in positions of a stripe, and who is away before anything is written.
type Step = (&'static [u8], Option<u8>);

/// A block of chunk 0 is written while the member of position `away` is, and put in place but for
/// what those hold that are held. Without those of positions `lost` then, all is there.
async fn loses(reactor: &Reactor, steer: &Steer, parity: u8, step: Step, lost: u64) {
    let (held, away) = step;
    let (level, shape) = (Level::RaidNm, Shape { parity, ..Shape::default() });
    let spec = ArraySpec { policy: Some(Policy::Journal), shape, ..Pair::spec(level) };
    let drives = vec![DRIVE_BYTES; usize::from(DATA + parity)];
    let mut pair = Pair::made(reactor, &spec, &drives, 512).await;
    for chunk in 1..=DATA {
        pair.put(usize::from(chunk - 1) * (16 << 10), &[chunk; 16 << 10]).await;
    }
    pair.in_place().await;
    let drives = pair.drives();
    let layout = pair.array.layout();
    let member = |position: u8| layout.member_at(StripeIndex(0), position);
    if let Some(away) = away {
        pair.array.pull_member(member(away)).unwrap();
    }
    pair.put(0, &[100; 4096]).await;
    let drive = |position: u8| &drives[member(position).index()];
    let file = |position: &u8| address(pair.file(drive(*position)));
    let (files, other) = (held.iter().map(file).collect::<Vec<_>>(), file(&OTHER));
    let area = label::plan(DRIVE_BYTES, parity).unwrap().data.range();
    let is_first_step = held.iter().any(|position| [P, Q].contains(position));
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
    let left = (0..DATA + parity).filter(|position| lost & 1 << position == 0);
    let left: Vec<_> = left.map(drive).collect();
    let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
    pair.start(&left, options).await.unwrap();
    pair.check().await;
    pair.array.stop().await.unwrap();
}

fn each_of(parity: u8, steps: &'static [Step]) {
    let steer = Steer::new();
    run_on(steer.backend(), move |reactor| async move {
        for step in steps {
            let sets = (0..1_u64 << (DATA + parity)).filter(|set| {
                let has_it = step.1.is_none_or(|away| set & 1 << away != 0);
                has_it && set.count_ones() == u32::from(parity)
            });
            for lost in sets {
                loses(&reactor, &steer, parity, *step, lost).await;
            }
        }
    });
}

#[test]
fn as_many_die_as_there_are_parity_chunks() {
    each_of(3, &[(&[P, Q], None), (&[P], None), (&[Q], None), (&[0, OTHER], None)]);
    each_of(4, &[(&[P], None)]);
}

#[test]
fn one_less_dies_where_one_was_away() {
    each_of(3, &[(&[Q], Some(P)), (&[P], Some(OTHER)), (&[P], Some(0)), (&[Q], Some(1))]);
}
