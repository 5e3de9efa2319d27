//! Goal: what was given up is an error or what was written there later, wherever the power is cut;
//! and nothing else is ever wrong.
//! Method: sectors are lost beside a member, which is then rebuilt, and some are written again; the
//! power is cut after every third completion in turn, and every sector is looked at.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::array::Array;
use ashlar_raid::label;
use ashlar_raid::start::AssembleOptions;
use ashlar_reactor::executor::Reactor;
use ashlar_sim::drive::Loss;
use ashlar_sim::world::AtCompletion;

use crate::storage::{life, spec, storage};

mod storage;

const DRIVE_BYTES: u64 = 9 << 20;
const STRIPE: StripeIndex = StripeIndex(2);
/// Rows that cannot be read.
const ROWS: std::ops::Range<u32> = 1024..3072;
/// Every how many completions the power is cut.
const STRIDE: u64 = 3;
/// Completions of the longest life, at least.
const COMPLETIONS_MAX: u64 = 4000;

/// Level, members, policy, and members that lose rows beside member 1.
const KINDS: [(Level, usize, Policy, &[u32]); 5] = [
    (Level::Raid5, 3, Policy::Journal, &[0]),
    (Level::Raid5, 3, Policy::Bitmap, &[0]),
    (Level::Raid6, 4, Policy::Journal, &[0, 2]),
    (Level::Raid6, 4, Policy::Bitmap, &[0, 3]),
    (Level::Raid1, 2, Policy::Bitmap, &[0]),
];

fn open(reactor: &Reactor, drive: u32) -> Rc<Drive> {
    storage::open(reactor, drive, DRIVE_BYTES)
}

async fn put(reactor: &Reactor, array: &Rc<Array>, sector: u64, count: u64, value: u8) {
    let bytes = reactor.buffer(count as usize * 512);
    bytes.copy_from_slice(&vec![value; count as usize * 512]);
    array.write(sector * 512, bytes.into()).await.unwrap();
}

/// What a sector holds at first.
fn first(sector: u64) -> u8 {
    (sector % 200) as u8 + 1
}

/// What was written to lost sectors, by sector; and whether that was flushed.
#[derive(Default)]
struct Again {
    /// Of these it was before the rebuild: it may wait in the journal when that comes by.
    early: RefCell<BTreeMap<u64, u8>>,
    written: RefCell<BTreeMap<u64, u8>>,
    flushed: Cell<bool>,
}

async fn create(reactor: Reactor, kind: (Level, usize, Policy, &'static [u32])) -> Rc<Array> {
    let (level, members, policy, _) = kind;
    let spec = spec(level, Some(policy), None);
    let drives = (0..members as u32).map(|drive| ([drive as u8; 16], open(&reactor, drive)));
    let array = Array::create(&reactor, &spec, drives.collect()).await.unwrap();
    for sector in 0..sectors(&array) {
        put(&reactor, &array, sector, 1, first(sector)).await;
    }
    array.flush().await.unwrap();
    array
}

/// Of four stripes.
fn sectors(array: &Array) -> u64 {
    4 * array.stripe_bytes() / 512
}

/// Sectors that are lost: rows of the data chunks on these members and on the first.
fn lost(array: &Array, members: &[u32]) -> Vec<u64> {
    let layout = array.layout();
    let mut lost = Vec::new();
    for member in members.iter().chain(&[1]) {
        let position = layout.position_of(STRIPE, MemberIndex(*member as u8)).unwrap();
        if position < layout.data * layout.copies {
            let at = |row| layout.array_offset(STRIPE, position / layout.copies, row) / 512;
            lost.extend(at(ROWS.start)..at(ROWS.end));
        }
    }
    lost.sort_unstable();
    lost.dedup();
    lost
}

/// The life that is cut off: rebuilt, and half of what is lost is written again.
async fn rebuild(
    reactor: Reactor,
    array: Rc<Array>,
    spare: u32,
    again: Rc<Again>,
    members: &[u32],
) {
    let drive = open(&reactor, spare);
    let put_in = array.replace_member(MemberIndex(1), drive, [spare as u8; 16]).await;
    put_in.unwrap();
    while array.status().rebuild.is_some() {
        reactor.sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(array.status().rebuild_error, None);
    assert!(!array.status().bad.is_empty());
    for sector in lost(&array, members).into_iter().step_by(2) {
        again.written.borrow_mut().insert(sector, 250);
        put(&reactor, &array, sector, 1, 250).await;
    }
    array.flush().await.unwrap();
    again.flushed.set(true);
    reactor.sleep(Duration::from_secs(5)).await;
    array.stop().await.unwrap();
}

async fn look(array: &Rc<Array>, reactor: &Reactor, lost: &[u64], again: &Again, what: &str) {
    for sector in 0..sectors(array) {
        let into = reactor.buffer(512);
        let read = array.read(sector * 512, into.clone().into()).await;
        let found = read.map(|()| into.bytes()[0]);
        assert!(into.bytes().iter().all(|byte| read.is_err() || Ok(*byte) == found));
        let written = again.written.borrow().get(&sector).copied();
        let early = again.early.borrow().get(&sector).copied();
        let is_lost = lost.contains(&sector);
        let is_early = early.is_some_and(|early| found == Ok(early));
        let is_gone = early.is_none() && is_lost && found.is_err();
        let good = match written {
            Some(value) if again.flushed.get() => found == Ok(value),
            Some(value) => found == Ok(value) || is_early || is_gone,
            // Before its rebuild nothing was given up: a sector may still be what it was.
            None => is_early || is_gone || early.is_none() && found == Ok(first(sector)),
        };
        let which = format!("sector {sector}, lost {is_lost}, {early:?}, again {written:?}");
        assert!(good, "{what}: {which}: {found:?}");
    }
}

/// True: the life ended before the power was cut.
fn cut(kind: (Level, usize, Policy, &'static [u32]), after: u64) -> bool {
    let (level, members, policy, spoilt) = kind;
    let what = format!("{level:?} {policy:?}, cut after {after}");
    let spares = members as u32;
    let world = storage(after, spares + 2, DRIVE_BYTES, 200_000);
    let loss = [Loss::Everything, Loss::EachSector, Loss::EachWrite, Loss::Nothing];
    let loss = loss[(after / STRIDE % 4) as usize];
    let (again, gone) = (Rc::new(Again::default()), Rc::new(Cell::new(Vec::new())));
    let (its, storage, lost_sectors) = (again.clone(), world.clone(), gone.clone());
    let ended = life(&world, 1, Some(loss), |reactor| async move {
        let array = create(reactor.clone(), kind).await;
        array.pull_member(MemberIndex(1)).unwrap();
        put(&reactor, &array, 0, 1, first(0)).await;
        reactor.sleep(Duration::from_secs(5)).await;
        lost_sectors.set(lost(&array, spoilt));
        let data = label::plan(DRIVE_BYTES, array.layout().parity).unwrap().data.offset;
        for row in ROWS.step_by(512) {
            let sector = (data + array.layout().member_offset(STRIPE, row)) / 512;
            for member in spoilt {
                storage.borrow_mut().drive(*member).latent.insert(sector);
            }
        }
        // (Copies wait for the rebuild, see below.)
        let early = if array.layout().is_mirrored() { Vec::new() } else { lost(&array, &[]) };
        for sector in early.into_iter().skip(1).step_by(2) {
            put(&reactor, &array, sector, 1, 249).await;
            its.early.borrow_mut().insert(sector, 249);
        }
        array.flush().await.unwrap();
        storage.borrow_mut().plan(after, AtCompletion::Dark);
        rebuild(reactor, array, spares, its, spoilt).await;
    });
    world.borrow_mut().clear_plans();
    let lost = gone.take();
    life(&world, 1, Some(Loss::Nothing), |reactor| async move {
        let drives = (0..=spares).filter(|drive| *drive != 1).map(|drive| open(&reactor, drive));
        let options = AssembleOptions { force: true, ..AssembleOptions::default() };
        let array = Array::assemble(&reactor, drives.collect(), options).await.unwrap();
        // Copies that may differ are read only once they were made one, which the lost rows keep
        // them from until the rebuild.
        let stripe = array.stripe_bytes() / 512;
        let whole: Vec<u64> = (STRIPE.0 * stripe..(STRIPE.0 + 1) * stripe).collect();
        let doubtful = if array.layout().is_mirrored() { &whole } else { &lost };
        look(&array, &reactor, doubtful, &again, &what).await;
        // Whoever has no drive gets one; then every other member is missing in turn.
        if array.status().members[1].drive.is_none() {
            let drive = open(&reactor, spares + 1);
            array.replace_member(MemberIndex(1), drive, [77; 16]).await.unwrap();
        }
        while array.status().rebuild.is_some() || array.status().unsynced_stripes > 0 {
            reactor.sleep(Duration::from_millis(1)).await;
        }
        assert_eq!(array.status().rebuild_error, None, "{what}");
        look(&array, &reactor, &lost, &again, &format!("{what}, rebuilt")).await;
        array.pull_member(MemberIndex(members as u8 - 1)).unwrap();
        look(&array, &reactor, &lost, &again, &format!("{what}, with one missing")).await;
    });
    ended
}

#[test]
fn the_power_is_cut_at_every_third_moment() {
    for kind in KINDS {
        let mut after = 1;
        while !cut(kind, after) {
            after += STRIDE;
            assert!(after < COMPLETIONS_MAX, "{kind:?} does not end");
        }
        assert!(after > 50, "{kind:?}: {after}");
    }
}
