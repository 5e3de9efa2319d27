//! Goal: a start after a crash reads the journal and puts what it holds in place within the time
//! that `docs/OPERATING.md` names, however full it is; and says what it did.
//! Method: modelled drives that outlive their handles under a clock that jumps: the ring is filled,
//! everything ends, and the array is assembled from its drives.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::label;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::AssembleOptions;
use ashlar_raid::status::{JournalStatus, Replayed};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::prng::Prng;

use crate::modelled::{BYTES_PER_SECOND, DRIVE_BYTES, IOPS, LATENCY, full_array, plug_in, run};

/// What was written last to each block of the array; `None`: that was not acknowledged.
type Blocks = BTreeMap<u64, Option<u8>>;

const BLOCK: u64 = 4096;
/// As many write at the same time: faster than it can be put in place.
const WRITERS: u64 = 64;

/// Writes `len` bytes, here and there, until it cannot; `WRITERS` of one block have blocks of their
/// own.
async fn write_on(
    (reactor, array): (Reactor, Rc<Array>),
    blocks: Rc<RefCell<Blocks>>,
    writer: u64,
    len: u64,
) {
    let mut prng = Prng::from_seed(writer);
    let buffer = reactor.buffer(len as usize);
    for fill in (8..250).cycle() {
        buffer.copy_from_slice(&vec![fill; len as usize]);
        let at = (prng.below(array.capacity() / BLOCK / WRITERS - 4) * WRITERS + writer) * BLOCK;
        blocks.borrow_mut().insert(at, None);
        if array.write(at, buffer.clone().into()).await.is_err() {
            return;
        }
        blocks.borrow_mut().insert(at, Some(fill));
    }
}

/// Writes until the ring is as full as it gets, and leaves it so: how full that is.
async fn fill_ring(reactor: &Reactor, array: &Rc<Array>, blocks: &Rc<RefCell<Blocks>>) -> u64 {
    for writer in 0..WRITERS {
        let on = (reactor.clone(), array.clone());
        reactor.spawn(write_on(on, blocks.clone(), writer, BLOCK));
    }
    let used = || {
        let journal = array.status().journal;
        assert!(journal.pending_memory_bytes <= journal.pending_memory_bytes_max, "{journal:?}");
        journal.used_bytes
    };
    let mut most = 0;
    for _ in 0..20_000 {
        reactor.sleep(Duration::from_micros(50)).await;
        most = most.max(used());
    }
    // As full as that again.
    while used() < most / 100 * 98 {
        reactor.sleep(Duration::from_micros(50)).await;
    }
    used()
}

async fn check(reactor: &Reactor, array: &Rc<Array>, blocks: &Blocks) {
    let buffer = reactor.buffer(BLOCK as usize);
    for at in (0..array.capacity()).step_by(BLOCK as usize) {
        array.read(at, buffer.clone().into()).await.unwrap();
        let Some(fill) = blocks.get(&at).copied().unwrap_or(Some(7)) else { continue };
        assert!(buffer.bytes().iter().all(|byte| *byte == fill), "at {at}: not {fill}");
    }
}

/// What a start with a full ring did, of an array over so many drives.
async fn crashed_full(reactor: Reactor, level: Level, members: u32) -> (Replayed, u64, u64) {
    let kind = (level, members as usize);
    let array = full_array(&reactor, kind, SettingsChange::default(), |_| LATENCY).await;
    let blocks = Rc::new(RefCell::new(Blocks::new()));
    let used = fill_ring(&reactor, &array, &blocks).await;
    assert_eq!(array.status().replayed, None, "it was created");
    let JournalStatus { crash_read_bytes: would_read, crash_replayed_bytes, .. } =
        array.status().journal;
    for member in array.status().members {
        member.drive.unwrap().pull();
    }
    let drives = (0..members).map(|number| plug_in(&reactor, number)).collect();
    let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap();
    let replayed = array.status().replayed.unwrap();
    assert_eq!(replayed.read_bytes, would_read, "as it said before");
    assert!(replayed.bytes <= crash_replayed_bytes, "{replayed:?}, said {crash_replayed_bytes}");
    let ring = label::plan(DRIVE_BYTES, array.layout().parity).unwrap().journal.len;
    check(&reactor, &array, &blocks.take()).await;
    array.stop().await.unwrap();
    (replayed, used, ring)
}

/// `docs/OPERATING.md`, "How long a start takes": rings are read one after the other; then each
/// block takes so many operations of a drive, one after the other.
fn bound((members, ring): (u64, u64), parity: u32, replayed: Replayed) -> Duration {
    let read = Duration::from_secs_f64((members * ring) as f64 / BYTES_PER_SECOND as f64);
    let operation = LATENCY + Duration::from_secs(1) / IOPS as u32;
    let blocks = replayed.bytes / BLOCK;
    read + read / 4 + operation * blocks as u32 * (1 + parity)
}

#[test]
fn a_full_ring_is_replayed_in_time() {
    for (level, members, parity) in
        [(Level::Raid5, 5, 1), (Level::Raid6, 6, 2), (Level::Raid7, 6, 3)]
    {
        run(move |reactor| async move {
            let done = crashed_full(reactor, level, members).await;
            let (replayed, used, ring) = done;
            let took = Duration::from_millis(replayed.took_ms);
            let bound = bound((members.into(), ring), parity, replayed);
            println!("{level:?}: {used} of {ring} used, {replayed:?}, bound {bound:?}");
            // The rest of so small a ring is kept for parity.
            assert!(used * 4 > ring, "{used} of {ring}: that is not full");
            assert_eq!(replayed.read_bytes, u64::from(members) * ring);
            assert!(replayed.bytes > ring / 16, "{replayed:?}");
            assert!(replayed.bytes <= 2 * ring, "{replayed:?}");
            assert!(took < bound, "{took:?}, at most {bound:?}");
        });
    }
}

/// The most memory that is pending while somebody writes, in percent of what is said, which is
/// never more; then all drives are gone. `look`: at the journal meanwhile.
async fn most_memory(reactor: &Reactor, array: &Rc<Array>, look: impl Fn(&JournalStatus)) -> u64 {
    let mut most = 0;
    for _ in 0..20_000 {
        reactor.sleep(Duration::from_micros(50)).await;
        let journal = array.status().journal;
        let (memory, said) = (journal.pending_memory_bytes, journal.pending_memory_bytes_max);
        assert!(memory <= said, "{journal:?}");
        look(&journal);
        most = most.max(100 * memory / said);
    }
    println!("{most} % of it");
    for member in array.status().members {
        member.drive.unwrap().pull();
    }
    most
}

/// A piece of 512 bytes takes a page.
#[test]
fn what_is_not_in_place_takes_no_more_memory_than_said() {
    run(|reactor| async move {
        let kind = (Level::Raid5, 5);
        let array = full_array(&reactor, kind, SettingsChange::default(), |_| LATENCY).await;
        // More than fit in one batch.
        for writer in 0..4 * WRITERS {
            let on = (reactor.clone(), array.clone());
            reactor.spawn(write_on(on, Rc::default(), writer, 512));
        }
        let most = most_memory(&reactor, &array, |journal| {
            assert_eq!(journal.pending_memory_bytes, 8 * journal.pending_bytes);
        })
        .await;
        assert!(most > 90, "{most} %: that is far from it");
    });
}

/// Batches of small and large pieces wait for room as any: the memory that they take is known.
#[test]
fn what_is_small_and_what_is_large_get_room_together() {
    run(|reactor| async move {
        let kind = (Level::Raid5, 8);
        let array = full_array(&reactor, kind, SettingsChange::default(), |_| LATENCY).await;
        // As many small ones as a batch may have, and some that take nearly twice their bytes.
        for writer in 0..16 * WRITERS {
            let on = (reactor.clone(), array.clone());
            let len = if writer % 13 == 0 { 36 << 10 } else { 512 };
            reactor.spawn(write_on(on, Rc::default(), writer, len));
        }
        most_memory(&reactor, &array, |_| ()).await;
    });
}

#[test]
fn after_a_stop_nothing_is_replayed() {
    run(|reactor| async move {
        let kind = (Level::Raid5, 3);
        let array = full_array(&reactor, kind, SettingsChange::default(), |_| LATENCY).await;
        array.stop().await.unwrap();
        let drives = (0..3).map(|number| plug_in(&reactor, number)).collect();
        let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap();
        assert_eq!(array.status().replayed, Some(Replayed::default()));
        array.stop().await.unwrap();
    });
}

/// Policy `bitmap`: the regions of what was written lately are dirty when a member is lost. Nobody
/// writes any more, and still its blocks are there after a crash.
#[test]
fn what_was_written_before_a_member_was_lost_is_there_after_a_crash() {
    run(|reactor| async move {
        let kind = (Level::Raid5, 3);
        let array = full_array(&reactor, kind, SettingsChange::default(), |_| LATENCY).await;
        array.set_policy(Policy::Bitmap).await.unwrap();
        let mut blocks = Blocks::new();
        let buffer = reactor.buffer(BLOCK as usize);
        for at in (0..array.capacity()).step_by(1 << 20) {
            buffer.copy_from_slice(&[9; BLOCK as usize]);
            array.write(at, buffer.clone().into()).await.unwrap();
            blocks.insert(at, Some(9));
        }
        array.pull_member(MemberIndex(1)).unwrap();
        reactor.sleep(Duration::from_millis(500)).await;
        assert!(array.status().dirty_regions > 0, "it is clean: nothing is tried here");
        for drive in array.status().members.into_iter().filter_map(|member| member.drive) {
            drive.pull();
        }
        let drives = [0, 2].map(|number| plug_in(&reactor, number)).to_vec();
        let array = Array::assemble(&reactor, drives, AssembleOptions::default()).await.unwrap();
        assert_eq!(array.status().unsynced_stripes, 0);
        check(&reactor, &array, &blocks).await;
        array.stop().await.unwrap();
    });
}
