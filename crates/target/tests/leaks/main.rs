//! Goal: guests that come and go leave nothing behind: no file, no mapping, no thread.
//! Method: one export, many front ends, most of them leaving in a disorderly way; counts before and
//! after. A program of its own, since it counts what the whole process has.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]
#![allow(dead_code, reason = "parts of the neighbouring test")]

#[path = "../export/front_end.rs"]
mod front_end;
#[path = "../export/rig.rs"]
mod rig;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;
use vhost::vhost_user::VhostUserFrontend;

use crate::front_end::{FrontEnd, within};
use crate::rig::Rig;

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

fn counts() -> [usize; 3] {
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    let guests = maps.lines().filter(|line| line.contains("memfd:guest")).count();
    [entries("/proc/self/fd"), entries("/proc/self/task"), guests]
}

/// The counts once they do not change any more.
fn settled_counts() -> [usize; 3] {
    let (mut last, mut same) = (counts(), 0);
    let settled = within(10_000, || {
        let now = counts();
        same = if now == last { same + 1 } else { 0 };
        last = now;
        same > 100
    });
    assert!(settled, "{last:?}");
    last
}

#[test]
fn nothing_is_left_behind() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(2);
    let mut before = [0; 3];
    for round in 0..60u64 {
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
        guest.front.set_backend_request_fd(&theirs).unwrap();
        for slot in 0..5u16 {
            let place = (8 << 20) + u64::from(slot) * (1 << 20);
            guest.request(0, slot * 3, 1, round, (place, 1 << 20, false));
            guest.offer(0, slot * 3);
        }
        guest.kick(0);
        if round % 3 == 0 {
            guest.wait_used(0, 5);
        }
        if round % 4 == 0 {
            guest.front.remove_mem_region(&guest.region()).unwrap();
        }
        drop((guest, ours, theirs));
        assert!(within(10_000, || !export.status().unwrap().connected));
        if round == 0 {
            // The export's thread closes its files a little after that.
            before = settled_counts();
        }
    }
    let after = settled_counts();
    assert_eq!(after, before);
    assert_eq!(after[2], 0, "mappings of guests that are gone");
    drop(export);
    assert!(within(10_000, || counts()[1] == before[1] - 1), "the export's thread has ended");
}
