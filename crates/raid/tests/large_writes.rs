//! Goal: a write that is longer than a batch of the journal, and begins and ends in the middle of
//! sectors, is there as a whole: at once, and after a crash. One of whole stripes leaves the parity
//! that belongs to it. Writes in order cost no reads, however small they are.
//! Method: arrays in files in memory, against a plain copy of the bytes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::units::MemberIndex;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::ArraySpec;

use crate::pair::{DRIVE_BYTES, Pair, begin, run};

#[test]
fn of_parts_of_sectors() {
    run(|reactor| async move {
        let kinds = [(Level::Raid1, 2, 4096), (Level::Raid5, 3, 4096), (Level::Raid5, 3, 512)];
        for (level, members, sector) in kinds {
            let spec = ArraySpec {
                chunk_bytes: 1 << 20,
                policy: Some(Policy::Journal),
                integrity: sector == 512,
                ..Pair::spec(level)
            };
            let mut pair = Pair::made(&reactor, &spec, &vec![DRIVE_BYTES; members], sector).await;
            // What parts of sectors must leave as it is.
            let around: Vec<u8> =
                (0..pair.bytes.len()).map(|at| (at / 512).to_le_bytes()[0] | 1).collect();
            for (at, part) in (0..).step_by(1 << 20).zip(around.chunks(1 << 20)) {
                pair.put(at, part).await;
            }
            let writes = [
                (512, 512 << 10),
                (3584, (513 << 10) + 512),
                ((1 << 20) + 512, 1 << 20),
                ((300 << 10) + 1024, (2 << 20) + 512),
            ];
            for ((at, len), value) in writes.into_iter().zip([2, 4, 6, 8]) {
                pair.put(at, &vec![value; len]).await;
                pair.check().await;
            }
            pair.crash_without(&[]).await;
            pair.check().await;
            pair.in_place().await;
            pair.check().await;
            pair.scrub_is_clean().await;
            pair.array.stop().await.unwrap();
        }
    });
}

/// As a volume's ranges may lie, once members were added: two in one stripe, another between.
#[test]
fn of_parts_of_sectors_in_no_order() {
    run(|reactor| async move {
        let mut pair = Pair::new(&reactor, Level::Raid5, 3, 4096).await;
        let stripe = pair.array.stripe_bytes();
        let ranges = [0..512, stripe..stripe + 512, 8192..8704];
        let from = reactor.buffer(3 * 512);
        from.copy_from_slice(&[7; 3 * 512]);
        for range in &ranges {
            pair.bytes[range.start as usize..range.end as usize].fill(7);
        }
        let array = pair.array.clone();
        let written =
            begin(&reactor, async move { array.write_ranges(&ranges, from.into()).await });
        written.ended(&reactor).await.unwrap();
        pair.check().await;
        pair.array.stop().await.unwrap();
    });
}

#[test]
fn of_whole_stripes() {
    run(|reactor| async move {
        for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 6), (Level::Raid10, 4)] {
            for policy in [Policy::Bitmap, Policy::Journal] {
                let spec =
                    ArraySpec { policy: Some(policy), chunk_bytes: 64 << 10, ..Pair::spec(level) };
                let sizes = vec![DRIVE_BYTES; members];
                let mut pair = Pair::made(&reactor, &spec, &sizes, 512).await;
                let stripe = usize::try_from(pair.array.stripe_bytes()).unwrap();
                // One, several at once, and one with parts of its neighbours.
                let writes = [(2, 0, 1), (5, 0, 3), (9, 4096, 2)];
                for (first, before, count) in writes {
                    let at = first * stripe - before;
                    let new: Vec<u8> =
                        (0..count * stripe).map(|_| pair.prng.below(256) as u8).collect();
                    pair.put(at, &new).await;
                }
                pair.check().await;
                pair.in_place().await;
                pair.scrub_is_clean().await;
                // What parity says.
                pair.array.pull_member(MemberIndex(1)).unwrap();
                pair.check().await;
                pair.array.stop().await.unwrap();
            }
        }
    });
}

/// As databases write their logs: 8 KiB, a flush, the next.
#[test]
fn of_a_log_nothing_is_read() {
    for (level, members) in [(Level::Raid5, 5), (Level::Raid6, 6)] {
        crate::modelled::run(move |reactor| async move {
            let settings = SettingsChange::default();
            let latency = |_| crate::modelled::LATENCY;
            let array =
                crate::modelled::full_array(&reactor, (level, members), settings, latency).await;
            let reads = || {
                let drives = array.status().members.into_iter().filter_map(|its| its.drive);
                drives.map(|drive| drive.counters().reads).sum::<u64>()
            };
            let (before, updates) = (reads(), array.status().counters.updates);
            let buffer = reactor.buffer(8 << 10);
            for at in (0..8 * array.stripe_bytes()).step_by(8 << 10) {
                buffer.copy_from_slice(&vec![(at >> 13) as u8; 8 << 10]);
                array.write(at, buffer.clone().into()).await.unwrap();
                array.flush().await.unwrap();
            }
            array.destage_all().await.unwrap();
            let now = array.status().counters.updates;
            assert_eq!(reads(), before, "{level:?}: {now:?}");
            assert!(now.whole_stripe > updates.whole_stripe, "{level:?}: {now:?}");
            array.stop().await.unwrap();
        });
    }
}
