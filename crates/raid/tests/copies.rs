//! Goal: after a crash copies are compared, and written only where they differ; what they agree on
//! is durable before the array forgets that they might not.
//! Method: arrays of copies die while they are written; what a start asks of the drives is watched.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::label;

use crate::pair::{DRIVE_BYTES, Pair, run_on};
use crate::steered::{Fate, Steer, address, is_write, offset};

/// What was asked of the drives, by file.
#[derive(Default)]
struct Asked {
    /// Where data was written.
    written: BTreeSet<(usize, u64)>,
    /// Of whom data was read, and who was not flushed since.
    unflushed: BTreeSet<usize>,
    /// Those, when a dirty map was written last.
    forgotten_with: BTreeSet<usize>,
}

fn watch(steer: &Steer) -> Rc<RefCell<Asked>> {
    let asked = Rc::new(RefCell::new(Asked::default()));
    let (its, areas) = (asked.clone(), label::plan(DRIVE_BYTES, 0).unwrap());
    let (data, map) = (areas.data.range(), areas.dirty_map.range());
    steer.set(move |file, op| {
        let mut asked = its.borrow_mut();
        match offset(op) {
            None => _ = asked.unflushed.remove(&file),
            Some(at) if data.contains(&at) && is_write(op) => {
                asked.written.insert((file, at - data.start));
            }
            Some(at) if data.contains(&at) => _ = asked.unflushed.insert(file),
            Some(at) if map.contains(&at) && is_write(op) => {
                asked.forgotten_with = asked.unflushed.clone();
            }
            Some(_) => {}
        }
        Fate::Passes
    });
    asked
}

async fn cleaned(pair: &Pair) {
    while pair.array.status().unsynced_stripes > 0 || pair.array.status().dirty_regions > 0 {
        pair.reactor.sleep(Duration::from_millis(10)).await;
    }
}

#[test]
fn only_copies_that_differ_are_written() {
    for (level, members) in [(Level::Raid1, 2), (Level::Raid1, 3), (Level::Raid10, 4)] {
        let steer = Steer::new();
        run_on(steer.backend(), |reactor| async move {
            let mut pair = Pair::new(&reactor, level, members, 512).await;
            pair.array.set_policy(Policy::Bitmap).await.unwrap();
            pair.put(0, &vec![1; 1 << 20]).await;
            let drives = pair.dies();
            // The crash came before one of them had it.
            let data = label::plan(DRIVE_BYTES, 0).unwrap().data.offset;
            let (last, other) = (pair.file(&drives[members - 1]).clone(), 3 * (16 << 10) + 512);
            last.write_all_at(&[2; 512], data + other).unwrap();
            let asked = watch(&steer);
            let drives: Vec<_> = drives.iter().collect();
            pair.starts_with(&drives).await;
            assert!(pair.array.status().unsynced_stripes > 0);
            cleaned(&pair).await;
            let written: BTreeSet<_> = asked.borrow().written.clone();
            assert_eq!(written, BTreeSet::from([(address(&last), 3 * (16 << 10))]), "{level:?}");
            let unflushed = asked.borrow().forgotten_with.clone();
            assert_eq!(unflushed, BTreeSet::new(), "{level:?}: what was compared was in caches");
            pair.is_whole().await;
        });
    }
}
