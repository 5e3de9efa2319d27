//! Goal: metadata of a member that is torn or damaged is not believed, and the array is what it
//! was: its other slot and the other members stand for it, and after the start it is whole again.
//! Method: files in memory are scribbled on between a crash and a start; what the array is then is
//! compared with a start without it.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::{Level, MemberState, Policy};
use ashlar_format::drive_label::{DriveLabel, MemberLayout};
use ashlar_format::record::{Header, MAGIC};
use ashlar_format::units::{Area, MemberIndex, StripeIndex};
use ashlar_format::volume_table::StoredVolume;
use ashlar_raid::array::Array;
use ashlar_raid::bad_set::BadRange;
use ashlar_raid::error::ArrayError;
use ashlar_raid::label;
use ashlar_raid::lease::Host;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Op;
use zerocopy::FromBytes;

use crate::pair::{DRIVE_BYTES, Pair, begin, run, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

type AreaOf = fn(&MemberLayout) -> Area;

const AREAS: [(&str, AreaOf); 6] = [
    ("superblocks", |areas| areas.superblocks),
    ("dirty map", |areas| areas.dirty_map),
    ("written map", |areas| areas.written_map),
    ("missed map", |areas| areas.missed_map),
    ("volume table", |areas| areas.volume_table),
    ("bad blocks", |areas| areas.bad_blocks),
];

#[derive(Clone, Copy, Debug)]
enum Damage {
    /// Of the newest record only the first half is there.
    Torn,
    /// Its first sector.
    Beginning,
    /// A byte of the newest record.
    Newest,
    /// All of the area.
    Everything,
}

const DAMAGES: [Damage; 4] = [Damage::Torn, Damage::Beginning, Damage::Newest, Damage::Everything];

/// Where the newest record in an area is, if there is one.
fn newest(bytes: &[u8], area: Area) -> Option<Range<usize>> {
    let starts = (area.offset as usize..area.range().end as usize).step_by(512);
    let records = starts.filter_map(|at| {
        let (header, _) = Header::ref_from_prefix(&bytes[at..]).unwrap();
        let its = at..at + header.length.get() as usize;
        (header.magic == MAGIC).then(|| (header.sequence.get(), its))
    });
    records.max_by_key(|(sequence, _)| *sequence).map(|(_, its)| its)
}

fn scribble(bytes: &mut [u8], area: Area, damage: Damage) {
    let newest = newest(bytes, area).unwrap_or_else(|| panic!("no record in {area:?}"));
    match damage {
        Damage::Torn => bytes[newest.start + newest.len() / 2..newest.end].fill(0xa5),
        Damage::Beginning => bytes[newest.start..newest.start + 512].fill(0),
        Damage::Newest => bytes[newest.start + 100] ^= 1,
        Damage::Everything => {
            bytes[area.offset as usize..area.range().end as usize].fill(0x5a);
        }
    }
}

fn drives_of(pair: &Pair) -> Vec<Rc<Drive>> {
    pair.array.status().members.into_iter().filter_map(|member| member.drive).collect()
}

/// All bytes of the drives.
pub fn images(pair: &Pair, drives: &[Rc<Drive>]) -> Vec<Vec<u8>> {
    let image = |drive: &Rc<Drive>| {
        let mut bytes = vec![0; DRIVE_BYTES as usize];
        pair.file(drive).read_exact_at(&mut bytes, 0).unwrap();
        bytes
    };
    drives.iter().map(image).collect()
}

/// The drives hold this, and are plugged in again.
fn plugged_in(pair: &mut Pair, drives: &[Rc<Drive>], images: &[Vec<u8>]) -> Vec<Rc<Drive>> {
    for (drive, image) in drives.iter().zip(images) {
        pair.file(drive).write_all_at(image, 0).unwrap();
    }
    drives.iter().map(|drive| pair.plug_in(drive)).collect()
}

/// What an array is said to be when it has just been started.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    members: Vec<(MemberState, bool)>,
    written_regions: u64,
    unsynced_stripes: u64,
    bad: Vec<BadRange>,
    volumes: Vec<String>,
}

async fn started(pair: &mut Pair, here: Vec<Rc<Drive>>, options: AssembleOptions) -> Seen {
    pair.array = Array::assemble(&pair.reactor, here, options).await.unwrap();
    let status = pair.array.status();
    let table = pair.array.read_table().await.unwrap();
    Seen {
        members: status.members.iter().map(|its| (its.state, its.catches_up)).collect(),
        written_regions: status.written_regions,
        unsynced_stripes: status.unsynced_stripes,
        bad: status.bad,
        volumes: table.volumes().iter().map(|its| its.name().unwrap().to_owned()).collect(),
    }
}

/// Tables are written one after the other: a slot that is lost is not the only one.
async fn name_volumes(array: &Rc<Array>, names: &[&str]) {
    let mut table = array.read_table().await.unwrap();
    for (number, name) in names.iter().enumerate() {
        table.volumes[number] = StoredVolume::blank();
        table.volumes[number].name[..name.len()].copy_from_slice(name.as_bytes());
        table.volume_count = (number as u32 + 1).into();
        array.write_table(&table).await.unwrap();
    }
}

/// Everything is right, but for what is known to be bad.
async fn check(pair: &Pair, what: &str) {
    let layout = pair.array.layout();
    let bad: Vec<Range<usize>> = pair
        .array
        .status()
        .bad
        .iter()
        .map(|its| {
            let at = layout.array_offset(its.stripe, its.chunk, its.rows.start) as usize;
            at..at + its.rows.len()
        })
        .collect();
    let step = 64 << 10;
    for start in (0..pair.bytes.len()).step_by(step) {
        let near = bad.iter().any(|bad| bad.start < start + step && start < bad.end);
        let len = if near { 512 } else { step };
        for at in (start..start + step).step_by(len) {
            let is_bad = bad.iter().any(|bad| bad.contains(&at));
            let right = Ok(pair.bytes[at..at + len].to_vec());
            let right = if is_bad { Err(ArrayError::Bad) } else { right };
            assert!(pair.read(at, len).await == right, "{what}: {at}, bad: {is_bad}");
        }
    }
}

/// All members are trusted and agree, at last.
async fn becomes_whole(pair: &Pair) {
    while pair.array.status().rebuild.is_some() || pair.array.status().unsynced_stripes > 0 {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(pair.array.state(), ArrayState::Optimal);
    pair.scrub_is_clean().await;
}

/// A row of three members is lost.
async fn with_a_past(reactor: &Reactor, steer: &Steer, policy: Policy) -> Pair {
    let mut pair = Pair::new(reactor, Level::Raid6, 5, 512).await;
    pair.array.set_policy(policy).await.unwrap();
    for at in 0..8 {
        pair.put(at << 18, &vec![at as u8 + 1; 1 << 18]).await;
    }
    pair.in_place().await;
    name_volumes(&pair.array, &["one", "two", "three"]).await;
    pair.array.pull_member(MemberIndex(4)).unwrap();
    pair.put(0, &[66; 512]).await;
    pair.in_place().await;
    let drives = drives_of(&pair);
    let files = [0, 1].map(|member| address(pair.file(&drives[member])));
    let at = label::plan(DRIVE_BYTES, 2).unwrap().data.offset
        + pair.array.layout().member_offset(StripeIndex(5), 1024);
    let spoilt = RefCell::new(BTreeSet::from(files));
    steer.set(move |its, op| {
        let len = match op {
            Op::Read { into, .. } => into.len(),
            Op::Write { from, .. } => from.len(),
            Op::WriteZeroes { .. } | Op::Flush { .. } | Op::Descriptor { .. } => 0,
        };
        let covers = offset(op).is_some_and(|from| from <= at && at < from + len as u64);
        if covers && is_write(op) {
            spoilt.borrow_mut().remove(&its);
        }
        if covers && spoilt.borrow().contains(&its) { Fate::Fails } else { Fate::Passes }
    });
    pair.replace(4).await;
    pair.rebuilt().await;
    steer.set(|_, _| Fate::Passes);
    assert!(!pair.array.status().bad.is_empty());
    pair
}

/// A member is away, and has missed something; then a crash, when a write is in the journal and in
/// place nowhere.
async fn crashed_degraded(pair: &mut Pair, steer: &Steer) {
    pair.array.pull_member(MemberIndex(3)).unwrap();
    pair.put(3 << 18, &[77; 4096]).await;
    pair.in_place().await;
    hold_back_data(steer);
    pair.put(5 << 18, &[88; 512]).await;
    steer.caught(&pair.reactor, 1).await;
}

/// A crash when parity and data are written in place, and nobody knows how far.
async fn crashed_dirty(pair: &mut Pair, steer: &Steer) {
    hold_back_data(steer);
    let array = pair.array.clone();
    let bytes = pair.reactor.buffer(512);
    bytes.copy_from_slice(&pair.bytes[5 << 18..][..512]);
    pair.reactor.spawn(async move {
        let _ = array.write(5 << 18, bytes.into()).await;
    });
    steer.caught(&pair.reactor, 1).await;
}

fn hold_back_data(steer: &Steer) {
    let data = label::plan(DRIVE_BYTES, 2).unwrap().data.offset;
    let stores = move |op: &Op| is_write(op) && offset(op) >= Some(data);
    steer.set(move |_, op| if stores(op) { Fate::Waits } else { Fate::Passes });
}

/// The drives of all members, as a crash leaves them.
async fn crash(pair: &Pair, steer: &Steer) -> (Vec<Rc<Drive>>, Vec<Vec<u8>>) {
    let drives = drives_of(pair);
    drives.iter().for_each(|drive| drive.pull());
    steer.drop_waiting(&pair.reactor).await;
    let images = images(pair, &drives);
    (drives, images)
}

async fn all_damages(pair: &mut Pair, steer: &Steer, victim: usize, is_right: fn(&Seen) -> bool) {
    let (drives, images) = crash(pair, steer).await;
    let here = plugged_in(pair, &drives, &images);
    let right = started(pair, here, AssembleOptions::default()).await;
    assert!(is_right(&right) && !right.bad.is_empty(), "{right:?}");
    assert_eq!(right.volumes, ["one", "two", "three"]);
    pair.array.stop().await.unwrap();
    let areas = label::plan(DRIVE_BYTES, 2).unwrap();
    for (name, area) in AREAS {
        for damage in DAMAGES {
            let what = format!("{damage:?} of {name} of member {victim}");
            let mut images = images.clone();
            scribble(&mut images[victim], area(&areas), damage);
            let here = plugged_in(pair, &drives, &images);
            let seen = started(pair, here, AssembleOptions::default()).await;
            assert_eq!(seen, right, "{what}");
            check(pair, &what).await;
            becomes_whole(pair).await;
            pair.array.stop().await.unwrap();
        }
    }
}

#[test]
fn a_degraded_array_with_damaged_metadata_is_what_it_was() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = with_a_past(&reactor, &steer, Policy::Journal).await;
        crashed_degraded(&mut pair, &steer).await;
        let catches_up = |seen: &Seen| seen.members[3] == (MemberState::Rebuilding, true);
        all_damages(&mut pair, &steer, 0, catches_up).await;
    });
}

#[test]
fn a_dirty_array_with_damaged_metadata_is_what_it_was() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = with_a_past(&reactor, &steer, Policy::Bitmap).await;
        crashed_dirty(&mut pair, &steer).await;
        all_damages(&mut pair, &steer, 2, |seen| seen.unsynced_stripes > 0).await;
    });
}

/// Half of a mirror, with what it had at the last stop.
async fn alone(pair: &mut Pair, drive: Rc<Drive>, what: &str) {
    let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
    let seen = started(pair, vec![drive], options).await;
    assert_eq!(seen.volumes, ["one", "two", "three"], "{what}");
    check(pair, what).await;
    pair.array.stop().await.unwrap();
}

async fn mirror(reactor: &Reactor, host: Option<Host>) -> Pair {
    let spec = ArraySpec { host, ..Pair::spec(Level::Raid1) };
    let mut pair = Pair::made(reactor, &spec, &[DRIVE_BYTES; 2], 512).await;
    pair.write_some(40).await;
    name_volumes(&pair.array, &["one", "two"]).await;
    pair
}

/// The other half could be lost next.
#[test]
fn what_was_damaged_is_whole_after_a_start() {
    run(|reactor| async move {
        let mut pair = mirror(&reactor, None).await;
        name_volumes(&pair.array, &["one", "two", "three"]).await;
        pair.restart(AssembleOptions::default()).await;
        // The last that was assembled has them in reverse.
        let drives = drives_of(&pair);
        pair.array.stop().await.unwrap();
        // Without its superblocks nobody else knows whether a half went on alone.
        let options = AssembleOptions { known: pair.known(), ..AssembleOptions::default() };
        let images = images(&pair, &drives);
        drives.iter().for_each(|drive| drive.pull());
        let areas = label::plan(DRIVE_BYTES, 0).unwrap();
        // The list of bad blocks is written when there are some.
        for (name, area) in AREAS.into_iter().filter(|(name, _)| *name != "bad blocks") {
            for victim in [0, 1] {
                let what = format!("{name} of member {victim}");
                let mut images = images.clone();
                scribble(&mut images[victim], area(&areas), Damage::Everything);
                let here = plugged_in(&mut pair, &drives, &images);
                started(&mut pair, here.clone(), options.clone()).await;
                assert_eq!(pair.array.state(), ArrayState::Optimal, "{what}");
                pair.array.stop().await.unwrap();
                alone(&mut pair, here[victim].clone(), &what).await;
            }
        }
    });
}

/// A crash while the table is written: whoever is served by the new one can rely on it.
#[test]
fn a_volume_that_is_there_after_a_crash_stays() {
    run(|reactor| async move {
        let mut pair = mirror(&reactor, None).await;
        let drives = drives_of(&pair);
        let before = images(&pair, &drives);
        name_volumes(&pair.array, &["one", "two", "three"]).await;
        drives.iter().for_each(|drive| drive.pull());
        let mut images = images(&pair, &drives);
        let area = label::plan(DRIVE_BYTES, 0).unwrap().volume_table;
        let area = area.offset as usize..area.range().end as usize;
        images[1][area.clone()].copy_from_slice(&before[1][area]);
        let here = plugged_in(&mut pair, &drives, &images);
        let seen = started(&mut pair, here.clone(), AssembleOptions::default()).await;
        assert_eq!(seen.volumes, ["one", "two", "three"]);
        pair.array.stop().await.unwrap();
        alone(&mut pair, here[1].clone(), "the half that had the old one").await;
    });
}

/// There was one before the array had a label: that there is none now is not that it was empty.
#[test]
fn no_table_is_not_an_empty_one() {
    run(|reactor| async move {
        let mut pair = mirror(&reactor, None).await;
        let drives = drives_of(&pair);
        name_volumes(&pair.array, &["one"]).await;
        pair.array.stop().await.unwrap();
        let mut images = images(&pair, &drives);
        let area = label::plan(DRIVE_BYTES, 0).unwrap().volume_table;
        let area = area.offset as usize..area.range().end as usize;
        images.iter_mut().for_each(|image| image[area.clone()].fill(0xa5));
        let here = plugged_in(&mut pair, &drives, &images);
        let options = AssembleOptions::default();
        let array = Array::assemble(&reactor, here, options).await.unwrap();
        assert_eq!(array.read_table().await.err(), Some(ArrayError::Lost));
        array.stop().await.unwrap();
    });
}

async fn rename(array: &Rc<Array>, names: [(usize, &str); 2]) {
    let mut table = array.read_table().await.unwrap();
    for (number, name) in names {
        table.volumes[number].name.fill(0);
        table.volumes[number].name[..name.len()].copy_from_slice(name.as_bytes());
    }
    array.write_table(&table).await.unwrap();
}

/// Sectors of the table that differ.
fn changed(before: &[u8], after: &[u8]) -> Vec<Range<usize>> {
    let area = label::plan(DRIVE_BYTES, 0).unwrap().volume_table;
    let sectors = (area.offset as usize..area.range().end as usize).step_by(512);
    let sectors = sectors.map(|at| at..at + 512);
    sectors.filter(|its| before[its.clone()] != after[its.clone()]).collect()
}

/// What the drives hold right before a table is written, and after it.
async fn renamed(
    pair: &Pair,
    steer: &Steer,
    names: [(usize, &'static str); 2],
) -> (Vec<Rc<Drive>>, Vec<Vec<u8>>, Vec<Vec<u8>>) {
    let drives = drives_of(pair);
    let is_table = |op: &Op| matches!(op, Op::Write { from, .. } if from.len() > 1 << 16);
    steer.set(move |_, op| if is_table(op) { Fate::Waits } else { Fate::Passes });
    let array = pair.array.clone();
    let renamed = begin(&pair.reactor, async move { rename(&array, names).await });
    steer.caught(&pair.reactor, drives.len()).await;
    let before = images(pair, &drives);
    steer.set(|_, _| Fate::Passes);
    renamed.ended(&pair.reactor).await;
    drives.iter().for_each(|drive| drive.pull());
    let after = images(pair, &drives);
    (drives, before, after)
}

/// A table of which a power cut left all but its last sector, and another, of which one left
/// nothing but a last sector that is the same: the first was never there, and does not come true.
#[test]
fn what_is_left_of_two_tables_is_not_one() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = mirror(&reactor, None).await;
        name_volumes(&pair.array, &["a", "b", "c", "d", "e"]).await;
        let (drives, before, after) = renamed(&pair, &steer, [(1, "first"), (4, "last")]).await;
        let mut torn = before.clone();
        let sectors = changed(&before[0], &after[0]);
        assert!(sectors.len() > 2, "{sectors:?}");
        for its in &sectors[..sectors.len() - 1] {
            torn[0][its.clone()].copy_from_slice(&after[0][its.clone()]);
        }
        let first_name = drives[0].name();
        let here = plugged_in(&mut pair, &drives, &torn);
        let seen = started(&mut pair, here, AssembleOptions::default()).await;
        assert_eq!(seen.volumes, ["a", "b", "c", "d", "e"]);

        let (drives, before, after) = renamed(&pair, &steer, [(1, "second"), (4, "last")]).await;
        let mut torn = before.clone();
        let first = drives.iter().position(|drive| drive.name() == first_name).unwrap();
        let last = changed(&before[first], &after[first]).pop().unwrap();
        torn[first][last.clone()].copy_from_slice(&after[first][last]);
        let here = plugged_in(&mut pair, &drives, &torn);
        let seen = started(&mut pair, here, AssembleOptions::default()).await;
        assert_eq!(seen.volumes, ["a", "b", "c", "d", "e"]);
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn copies_of_a_label_stand_for_each_other() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        pair.write_some(40).await;
        let drives = drives_of(&pair);
        pair.array.stop().await.unwrap();
        let known = pair.known();
        let images = images(&pair, &drives);
        drives.iter().for_each(|drive| drive.pull());
        let undamaged = images[1].clone();
        let homes = DriveLabel::homes(DRIVE_BYTES).map(|home| home as usize);
        for lost in 1..8 {
            let mut images = images.clone();
            for (copy, home) in homes.iter().enumerate().filter(|(copy, _)| lost >> copy & 1 == 1) {
                images[1][home + 100 * copy..][..100].fill(0x5a);
            }
            let here = plugged_in(&mut pair, &drives, &images);
            let options = AssembleOptions { known: known.clone(), ..AssembleOptions::default() };
            pair.array = Array::assemble(&reactor, here.clone(), options).await.unwrap();
            // Where a drive begins none is left: nobody knows what else was written over.
            let is_believed = lost & 0b011 != 0b011;
            let state = if is_believed { ArrayState::Optimal } else { ArrayState::Degraded };
            assert_eq!(pair.array.state(), state, "{lost:03b}");
            pair.check().await;
            if lost == 0b011 {
                pair.array.rebuild(|| [77; 16]).await.unwrap();
                pair.rebuilt().await;
            }
            pair.array.stop().await.unwrap();
            let now = &self::images(&pair, &here)[1];
            let whole = |home: &usize| now[*home..][..4096] == undamaged[*home..][..4096];
            assert_eq!(homes.iter().all(whole), is_believed, "{lost:03b}: healed");
        }
    });
}

/// A crash may tear what is written: then none in front would be left.
#[test]
fn a_copy_of_a_label_that_opens_is_not_written_again() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 512).await;
        let drives = drives_of(&pair);
        pair.array.stop().await.unwrap();
        let mut images = images(&pair, &drives);
        drives.iter().for_each(|drive| drive.pull());
        let second = DriveLabel::homes(DRIVE_BYTES)[1];
        images[1][second as usize..][..100].fill(0x5a);
        let here = plugged_in(&mut pair, &drives, &images);
        let written = Rc::new(RefCell::new(Vec::new()));
        let seen = written.clone();
        steer.set(move |_, op| {
            let in_front = offset(op).filter(|at| is_write(op) && *at < 2 * second);
            seen.borrow_mut().extend(in_front);
            Fate::Passes
        });
        started(&mut pair, here, AssembleOptions::default()).await;
        assert_eq!(*written.borrow(), [second]);
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn a_damaged_lease_keeps_nobody_from_its_array() {
    run(|reactor| async move {
        let host = Some(Host::new([5; 16], "here"));
        let mut pair = mirror(&reactor, host).await;
        let drives = drives_of(&pair);
        drives.iter().for_each(|drive| drive.pull());
        let images = images(&pair, &drives);
        let area = label::plan(DRIVE_BYTES, 0).unwrap().lease;
        for damage in DAMAGES {
            let mut images = images.clone();
            scribble(&mut images[0], area, damage);
            let here = plugged_in(&mut pair, &drives, &images);
            let options = AssembleOptions { host, ..AssembleOptions::default() };
            let seen = started(&mut pair, here, options).await;
            assert_eq!(seen.volumes, ["one", "two"], "{damage:?}");
            check(&pair, "lease").await;
            becomes_whole(&pair).await;
            pair.array.stop().await.unwrap();
        }
    });
}
