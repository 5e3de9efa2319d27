//! Goal: a batch that parity was already made of was durable: a start that finds too little of it
//! is refused, and leaves what there is for another.
//! Method: a destage is cut off before its data is in place; a member's share of the batch rots,
//! another member is away, and comes back.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;

use ashlar_format::array_superblock::Level;
use ashlar_format::units::StripeIndex;
use ashlar_raid::error::AssembleError;
use ashlar_raid::start::AssembleOptions;
use ashlar_reactor::executor::Reactor;

use crate::journal_gaps::{areas, changes, rings};
use crate::pair::{Pair, begin, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const MEMBERS: usize = 4;
const CHUNK: usize = 16 << 10;

async fn is_refused_and_kept(reactor: &Reactor, steer: &Steer, absent: usize, rotten: usize) {
    let mut pair = Pair::new(reactor, Level::Raid5, MEMBERS, 512).await;
    pair.put(0, &[1; 3 * CHUNK]).await;
    pair.in_place().await;
    let (drives, areas) = (pair.drives(), areas(&pair));
    let before = rings(&pair, &drives);
    pair.put(0, &(0..2 * CHUNK).map(|at| (at / 512) as u8 + 100).collect::<Vec<_>>()).await;
    let shares = changes(&before, &rings(&pair, &drives));
    assert!(shares.iter().all(|its| !its.is_empty()), "each member has a share");
    let written = pair.array.layout().member_at(StripeIndex(0), 0).index();
    let (file, data) = (address(pair.file(&drives[written])), areas.data.range());
    steer.set(move |its, op| {
        let stores = its == file && is_write(op) && offset(op).is_some_and(|at| data.contains(&at));
        if stores { Fate::Waits } else { Fate::Passes }
    });
    let array = pair.array.clone();
    let destaged = begin(reactor, async move { array.destage_all().await });
    steer.caught(reactor, 1).await;
    pair.dies();
    steer.drop_waiting(reactor).await;
    assert!(destaged.ended(reactor).await.is_err());
    for at in &shares[rotten] {
        let home = areas.journal.offset + at;
        pair.file(&drives[rotten]).write_all_at(&[0xee; 4096], home).unwrap();
    }
    let here: Vec<_> = (0..MEMBERS).filter(|its| *its != absent).map(|its| &drives[its]).collect();
    let known = pair.known();
    let options = || AssembleOptions { known: known.clone(), ..AssembleOptions::default() };
    for _ in 0..2 {
        let refused = pair.start(&here, options()).await;
        assert!(matches!(refused, Err(AssembleError::Journal { .. })), "{refused:?}");
    }
    pair.start(&drives.iter().collect::<Vec<_>>(), options()).await.unwrap();
    pair.check().await;
    pair.scrub_is_clean().await;
    pair.dies();
}

#[test]
fn what_parity_tells_of_is_not_left_out() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        for absent in 0..MEMBERS {
            for rotten in (0..MEMBERS).filter(|its| *its != absent) {
                is_refused_and_kept(&reactor, &steer, absent, rotten).await;
            }
        }
    });
}
