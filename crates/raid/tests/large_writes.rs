//! Goal: a write that is longer than a batch of the journal, and begins and ends in the middle of
//! sectors, is there as a whole: at once, and after a crash.
//! Method: arrays with large chunks in files in memory, against a plain copy of the bytes.
#![allow(clippy::unwrap_used, reason = "a test")]

mod pair;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::start::ArraySpec;
use pair::{DRIVE_BYTES, Pair, run};

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
