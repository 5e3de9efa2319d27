//! Goal: an array uses the space of larger drives while it serves; what it held stays, what is new
//! reads as zeroes, whatever stood on the drives.
//! Method: drives full of other bytes that show more of themselves later, or take the place of
//! smaller ones; every byte is compared, before and after a restart.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::Level;
use ashlar_format::region_map::{PAGES_MAX, REGIONS_PER_PAGE};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::ChangeError;
use ashlar_raid::layout::Shape;
use ashlar_raid::start::{ArraySpec, AssembleOptions};
use ashlar_raid::status::ArrayState;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Device;

use crate::pair::{DRIVE_BYTES, Pair, begin, run, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

const LARGER: u64 = DRIVE_BYTES + (8 << 20);

fn limits(bytes: u64) -> Limits {
    Limits { bytes, sector_bytes: 512, zeroes_cheaply: true }
}

/// A drive of `LARGER` bytes, none of them zero, that shows `bytes` of them.
async fn littered(reactor: &Reactor, name: &str, bytes: u64) -> Rc<Drive> {
    let device = Device::Ram { bytes: LARGER };
    let drive = Drive::new(reactor, device, limits(bytes), name);
    let litter = reactor.buffer(1 << 20);
    litter.copy_from_slice(&[0xa5; 1 << 20]);
    for at in (0..LARGER).step_by(1 << 20) {
        drive.write(at, litter.clone().into()).await.unwrap();
    }
    drive
}

async fn pair(reactor: &Reactor, level: Level, members: u8, shape: Shape, bytes: u64) -> Pair {
    made(reactor, &spec(level, shape), members, bytes).await
}

async fn made(reactor: &Reactor, spec: &ArraySpec, members: u8, bytes: u64) -> Pair {
    let mut drives = Vec::new();
    for index in 0..members {
        let drive = littered(reactor, &format!("d{index}"), bytes).await;
        drives.push(([index; 16], drive));
    }
    let array = Array::create(reactor, spec, drives).await.unwrap();
    Pair::of(reactor, array.clone(), array.capacity())
}

fn spec(level: Level, shape: Shape) -> ArraySpec {
    ArraySpec { shape, ..Pair::spec(level) }
}

fn drives(array: &Array) -> Vec<Rc<Drive>> {
    array.status().members.into_iter().filter_map(|member| member.drive).collect()
}

/// The bytes that were gained are known to be zero from now on.
async fn grow(pair: &mut Pair) {
    let before = pair.array.capacity();
    assert_eq!(pair.bytes.len() as u64, before);
    let gained = pair.array.grow().await.unwrap();
    assert!(gained > 0);
    assert_eq!(pair.array.capacity(), before + gained);
    pair.bytes.resize((before + gained) as usize, 0);
}

fn shapes() -> Vec<(Level, u8, Shape)> {
    let plain = Shape::default();
    vec![
        (Level::Raid0, 2, plain),
        (Level::Raid1, 2, plain),
        (Level::Raid10, 4, plain),
        (Level::Raid5, 3, plain),
        (Level::Raid6, 4, plain),
        (Level::Raid50, 6, plain),
        (Level::RaidNm, 6, Shape { parity: 3, ..plain }),
    ]
}

#[test]
fn drives_that_grew() {
    run(|reactor| async move {
        for (level, members, shape) in shapes() {
            let mut pair = pair(&reactor, level, members, shape, DRIVE_BYTES).await;
            let old = pair.bytes.len();
            pair.write_some(40).await;
            // The last region is a short one: it gets stripes that hold litter.
            pair.put(old - 512, &[7; 512]).await;
            let refused = pair.array.grow().await;
            assert!(matches!(refused, Err(ChangeError::NothingToGain { .. })), "{refused:?}");
            drives(&pair.array).iter().for_each(|drive| drive.grow(LARGER));
            grow(&mut pair).await;
            pair.check().await;
            pair.put(old, &[8; 4096]).await;
            pair.put(pair.bytes.len() - 512, &[9; 512]).await;
            pair.write_some(20).await;
            pair.check().await;
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(pair.array.capacity(), pair.bytes.len() as u64, "{level:?}");
            pair.check().await;
            if pair.array.layout().is_redundant() {
                pair.scrub_is_clean().await;
                pair.array.pull_member(MemberIndex(1)).unwrap();
                pair.check().await;
                pair.write_some(10).await;
                pair.check().await;
            }
            pair.array.stop().await.unwrap();
        }
    });
}

/// Another reactor has a view of the array as it was, and asks no more.
#[test]
fn regions_that_nobody_was_shown_are_written() {
    const MUCH: u64 = 96 << 20;
    run(|reactor| async move {
        let mut drives = Vec::new();
        for index in 0..3_u8 {
            let device = Device::Ram { bytes: MUCH };
            drives.push(([index; 16], Drive::new(&reactor, device, limits(DRIVE_BYTES), "d")));
        }
        let spec = Pair::spec(Level::Raid5);
        let array = Array::create(&reactor, &spec, drives.clone()).await.unwrap();
        let shown = array.show().expect("nothing is done to it");
        drives.iter().for_each(|(_, drive)| drive.grow(MUCH));
        array.grow().await.unwrap();
        let mut pair = Pair::of(&reactor, array.clone(), array.capacity());
        pair.put(pair.bytes.len() - 512, &[9; 512]).await;
        pair.check().await;
        let all = pair.bytes.len() as u64;
        array.discard(0, all).await.unwrap();
        pair.bytes.fill(0);
        pair.check().await;
        drop(shown);
    });
}

#[test]
fn larger_drives_one_by_one() {
    run(|reactor| async move {
        for (level, members, shape) in shapes().into_iter().filter(|its| its.0 != Level::Raid0) {
            let mut pair = pair(&reactor, level, members, shape, DRIVE_BYTES).await;
            pair.write_some(30).await;
            for index in 0..members {
                match pair.array.grow().await {
                    Err(ChangeError::NothingToGain { member, has, .. }) => {
                        assert_eq!((member, has), (MemberIndex(index), DRIVE_BYTES));
                    }
                    other => panic!("{level:?}: {other:?}"),
                }
                pair.array.pull_member(MemberIndex(index)).unwrap();
                assert_eq!(pair.array.grow().await, Err(ChangeError::NotOptimal));
                let new = littered(&reactor, "new", LARGER).await;
                let uuid = [100 + index; 16];
                pair.array.replace_member(MemberIndex(index), new, uuid).await.unwrap();
                pair.rebuilt().await;
            }
            grow(&mut pair).await;
            pair.put(pair.bytes.len() - 512, &[9; 512]).await;
            pair.write_some(30).await;
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(pair.array.state(), ArrayState::Optimal);
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

#[test]
fn a_drive_that_is_too_small_by_now_is_refused() {
    run(|reactor| async move {
        let mut pair = pair(&reactor, Level::Raid1, 2, Shape::default(), DRIVE_BYTES).await;
        drives(&pair.array).iter().for_each(|drive| drive.grow(LARGER));
        grow(&mut pair).await;
        pair.array.pull_member(MemberIndex(0)).unwrap();
        let small = littered(&reactor, "small", DRIVE_BYTES).await;
        let refused = pair.array.replace_member(MemberIndex(0), small, [50; 16]).await;
        assert!(matches!(refused, Err(ChangeError::DriveTooSmall { .. })), "{refused:?}");
        // And cut off where it once ended, it shows no label of that time.
        pair.array.stop().await.unwrap();
        let last = pair.array.status().members[1].drive.clone().unwrap();
        let was_last = reactor.buffer(4096);
        last.read(DRIVE_BYTES - 4096, was_last.clone().into()).await.unwrap();
        assert!(was_last.bytes().iter().all(|byte| *byte == 0));
    });
}

#[test]
fn requests_go_on_meanwhile() {
    run(|reactor| async move {
        for level in [Level::Raid1, Level::Raid5] {
            let mut pair = pair(&reactor, level, 3, Shape::default(), DRIVE_BYTES).await;
            let array = pair.array.clone();
            let done = Rc::new(std::cell::Cell::new(0u32));
            for worker in 0..4u8 {
                let (array, reactor, done) = (array.clone(), reactor.clone(), done.clone());
                pair.reactor.spawn(async move {
                    let buffer = reactor.buffer(4096);
                    for round in 0..60u64 {
                        buffer.copy_from_slice(&[worker + 1; 4096]);
                        let at = (u64::from(worker) * 60 + round) * 4096;
                        array.write(at, buffer.clone().into()).await.unwrap();
                        if round % 16 == 7 {
                            array.discard(2 << 20, 2 << 20).await.unwrap();
                        }
                    }
                    done.set(done.get() + 1);
                });
            }
            drives(&array).iter().for_each(|drive| drive.grow(LARGER));
            grow(&mut pair).await;
            while done.get() < 4 {
                reactor.sleep(Duration::from_millis(1)).await;
            }
            for worker in 0..4 {
                pair.bytes[worker * 60 * 4096..][..60 * 4096].fill(worker as u8 + 1);
            }
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// A sparse file that is larger than memory, without a name.
fn sparse(reactor: &Reactor, name: &str, bytes: u64) -> (Rc<Drive>, Arc<std::fs::File>) {
    let file = Arc::new(tempfile::tempfile().unwrap());
    file.set_len(bytes).unwrap();
    let device = Device::File { file: file.clone() };
    (Drive::new(reactor, device, limits(bytes), name), file)
}

/// So many stripes that regions become larger: two of them, one written and one not, are one after.
#[test]
fn regions_are_merged() {
    run(|reactor| async move {
        let chunk = 16u64 << 10;
        let most = PAGES_MAX * REGIONS_PER_PAGE * 16;
        let bytes = most * chunk;
        let mut drives = Vec::new();
        let mut files = Vec::new();
        for index in 0..2u8 {
            let (drive, file) = sparse(&reactor, &format!("d{index}"), bytes);
            files.push(file);
            drives.push(([index; 16], drive));
        }
        let spec = spec(Level::Raid1, Shape::default());
        let array = Array::create(&reactor, &spec, drives).await.unwrap();
        let mut pair = Pair::of(&reactor, array, 4 << 20);
        let region = pair.array.region_bytes();
        assert_eq!(region, 16 * chunk);
        // In the first half of the first pair of regions, and in the second half of the third.
        pair.put(512, &[1; 512]).await;
        pair.put((5 * region) as usize, &[2; 512]).await;
        pair.in_place().await;
        let data = ashlar_raid::label::plan(bytes, 0).unwrap().data.offset;
        for file in &files {
            // What was never written holds anything.
            for at in [region, 4 * region] {
                file.write_all_at(&[0xa5; 4096], data + at).unwrap();
            }
            file.set_len(2 * bytes).unwrap();
        }
        for member in pair.array.status().members {
            member.drive.unwrap().grow(2 * bytes);
        }
        pair.array.grow().await.unwrap();
        assert_eq!(pair.array.region_bytes(), 2 * region);
        assert_eq!(pair.array.status().written_regions, 2);
        for _ in 0..2 {
            pair.check().await;
            let end = pair.array.capacity() - 512;
            assert!(end > 2 * bytes - (200 << 20));
            let into = reactor.buffer(512);
            pair.array.read(end, into.clone().into()).await.unwrap();
            assert!(into.bytes().iter().all(|byte| *byte == 0));
            pair.restart(AssembleOptions::default()).await;
            assert_eq!(pair.array.region_bytes(), 2 * region);
        }
        pair.write_some(30).await;
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

/// It is filled before its label is written: that of the larger array would be lost to it.
#[test]
fn a_member_that_is_still_labelled_keeps_the_array_from_growing() {
    let steer = Steer::new();
    run_on(steer.backend(), |reactor| async move {
        let shown = |name: &str| {
            let (_, file) = sparse(&reactor, name, LARGER);
            let device = Device::File { file: file.clone() };
            (Drive::new(&reactor, device, limits(DRIVE_BYTES), name), address(&file))
        };
        let (first, at_first) = shown("d0");
        let members = vec![([0; 16], first), ([1; 16], shown("d1").0)];
        let array = Array::create(&reactor, &Pair::spec(Level::Raid1), members).await.unwrap();
        let mut pair = Pair::of(&reactor, array.clone(), array.capacity());
        pair.write_some(20).await;
        array.pull_member(MemberIndex(1)).unwrap();
        array.flush().await.unwrap();
        let missed = ashlar_raid::label::plan(DRIVE_BYTES, 0).unwrap().missed_map.range();
        steer.set(move |file, op| {
            let is_map = is_write(op) && offset(op).is_some_and(|at| missed.contains(&at));
            if file == at_first && is_map { Fate::Waits } else { Fate::Passes }
        });
        let (its, new) = (array.clone(), shown("new").0);
        let replaced =
            begin(&reactor, async move { its.replace_member(MemberIndex(1), new, [50; 16]).await });
        steer.caught(&reactor, 1).await;
        array.rebuild(|| [51; 16]).await.unwrap();
        drives(&array).iter().for_each(|drive| drive.grow(LARGER));
        for _ in 0..50 {
            assert_eq!(array.state(), ArrayState::Degraded);
            assert_eq!(array.grow().await, Err(ChangeError::NotOptimal));
            reactor.sleep(Duration::from_millis(10)).await;
        }
        assert!(!replaced.has_ended());
        steer.set(|_, _| Fate::Passes);
        replaced.ended(&reactor).await.unwrap();
        pair.rebuilt().await;
        grow(&mut pair).await;
        pair.restart(AssembleOptions::default()).await;
        pair.check().await;
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

/// So much larger that their checksums have no room: they change places, by way of one more.
#[test]
fn checksums_have_the_room_that_a_member_began_with() {
    run(|reactor| async move {
        let large = 3 << 30;
        let spec = ArraySpec { integrity: true, ..spec(Level::Raid1, Shape::default()) };
        let (mut drives, mut files) = (Vec::new(), Vec::new());
        for index in 0..2 {
            let (drive, file) = sparse(&reactor, &format!("d{index}"), DRIVE_BYTES);
            drives.push(([index; 16], drive));
            files.push(file);
        }
        let array = Array::create(&reactor, &spec, drives).await.unwrap();
        let mut pair = Pair::of(&reactor, array, 4 << 20);
        pair.write_some(30).await;
        files.iter().for_each(|file| file.set_len(large).unwrap());
        self::drives(&pair.array).iter().for_each(|drive| drive.grow(large));
        pair.array.grow().await.unwrap();
        // A mebibyte of checksums: 256 pages, of 960 blocks each.
        assert_eq!(pair.array.capacity(), 256 * 960 * 4096);
        let (mut next, _) = sparse(&reactor, "more", large);
        for index in 0..2 {
            let (member, holds) = (MemberIndex(index), 256 * 960 * 4096);
            let drive = format!("d{index}");
            let refused = ChangeError::NoRoomForChecksums { member, drive, has: large, holds };
            assert_eq!(pair.array.grow().await, Err(refused));
            pair.array.pull_member(member).unwrap();
            pair.array.replace_member(member, next, [100 + index; 16]).await.unwrap();
            pair.rebuilt().await;
            let device = Device::File { file: files[usize::from(index)].clone() };
            next = Drive::new(&reactor, device, limits(large), "again");
        }
        pair.array.grow().await.unwrap();
        assert!(pair.array.capacity() > large - (200 << 20));
        let end = pair.array.capacity() - 4096;
        let last = reactor.buffer(4096);
        last.copy_from_slice(&[3; 4096]);
        pair.array.write(end, last.into()).await.unwrap();
        pair.restart(AssembleOptions::default()).await;
        pair.check().await;
        assert_eq!(pair.read(end as usize, 4096).await.unwrap(), [3; 4096]);
        pair.scrub_is_clean().await;
        pair.array.stop().await.unwrap();
    });
}

async fn add(pair: &Pair, count: u8) {
    let mut drives = Vec::new();
    for index in 0..count {
        let drive = littered(&pair.reactor, &format!("a{index}"), DRIVE_BYTES).await;
        drives.push(([100 + index; 16], drive));
    }
    pair.array.add_members(drives).await.unwrap();
}

async fn restriped(pair: &mut Pair, old: u64, new: u64) {
    let before = pair.array.status().members.len() as u64;
    assert!(before > 0);
    while pair.array.status().restripe.is_some() {
        pair.reactor.sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(pair.array.status().restripe_error, None);
    assert_eq!(pair.array.capacity() / new, pair.bytes.len() as u64 / old);
    pair.bytes.resize(pair.array.capacity() as usize, 0);
}

/// Arrays, with checksums too where that can be, and their members; how many are added; data
/// chunks of a stripe before and after.
fn widenings() -> Vec<(ArraySpec, u8, u8, u64, u64)> {
    let plain = Shape::default();
    let all = [
        (Level::Raid0, 1, plain, 1, 1, 2),
        (Level::Raid0, 2, plain, 3, 2, 5),
        (Level::Raid10, 4, plain, 2, 2, 3),
        (Level::Raid5, 3, plain, 1, 2, 3),
        (Level::Raid5, 4, plain, 2, 3, 5),
        (Level::Raid6, 4, plain, 1, 2, 3),
        (Level::RaidNm, 6, Shape { parity: 3, ..plain }, 1, 3, 4),
    ];
    let mut widenings = Vec::new();
    for (level, members, shape, more, old, new) in all {
        for integrity in [false, true].into_iter().filter(|its| !its || level != Level::Raid0) {
            let spec = ArraySpec { integrity, ..spec(level, shape) };
            widenings.push((spec, members, more, old, new));
        }
    }
    widenings
}

#[test]
fn members_are_added() {
    run(|reactor| async move {
        for (spec, members, more, old, new) in widenings() {
            let mut pair = made(&reactor, &spec, members, DRIVE_BYTES).await;
            pair.write_some(40).await;
            pair.put(pair.bytes.len() - 512, &[7; 512]).await;
            let before = pair.bytes.len();
            add(&pair, more).await;
            assert_eq!(pair.array.capacity() as usize, before);
            pair.check().await;
            pair.write_some(20).await;
            pair.check().await;
            restriped(&mut pair, old, new).await;
            pair.check().await;
            pair.put(before, &[8; 4096]).await;
            pair.put(pair.bytes.len() - 512, &[9; 512]).await;
            pair.write_some(20).await;
            pair.check().await;
            pair.restart(AssembleOptions::default()).await;
            pair.check().await;
            if pair.array.layout().is_redundant() {
                pair.scrub_is_clean().await;
                pair.array.pull_member(MemberIndex(members)).unwrap();
                pair.check().await;
                pair.write_some(10).await;
                pair.check().await;
            }
            pair.array.stop().await.unwrap();
        }
    });
}
