//! Goal: a front end notices nothing of a volume that goes away while its rings are stopped and
//! comes back once they are started; and it finds its disk before the volume was ever there.
//! Method: a front end whose rings are made by hand, and exports that are handed from one who
//! serves to one who waits, and back.

use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::{Export, Usage};
use ashlar_target::vhost::{DiskFacts, VhostExport};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};

use crate::front_end::{FEATURES, FrontEnd, LOG_ALL, RING_SIZE, within};
use crate::packed::PACKED;
use crate::rig::{Rig, SERIAL, socket_path};

const DISK: u64 = 8 << 20;
const DATA: u64 = 8 << 20;
const KIND_GET_ID: u32 = 8;
const FACTS: DiskFacts = DiskFacts { bytes: DISK, discard_bytes: 64 << 10 };

fn config(guest: &mut FrontEnd, offset: u32, len: u32) -> Vec<u8> {
    let flags = VhostUserConfigFlags::empty();
    guest.front.get_config(offset, len, flags, &vec![0; len as usize]).unwrap().1
}

fn is(export: &VhostExport, usage: Usage) -> bool {
    within(10_000, || export.usage() == usage)
}

/// Asks for the disk's name, without waiting for it.
fn ask(guest: &mut FrontEnd) -> u64 {
    guest.put(DATA, &[0; 20]);
    let status = guest.request(0, 0, KIND_GET_ID, 0, (DATA, 20, true));
    guest.offer(0, 0);
    guest.kick(0);
    status
}

#[test]
fn a_volume_comes_to_a_front_end_that_waits_and_goes_again() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let path = socket_path();
    let mut export = VhostExport::wait(FACTS, rig.spec(path.clone(), 1), None).unwrap();
    assert!(is(&export, Usage::Idle) && !export.status().unwrap().connected);
    let mut guest = FrontEnd::connect(&path, 1);
    assert!(within(10_000, || export.status().unwrap().connected));
    assert_eq!(guest.front.get_queue_num().unwrap(), 1);
    assert_eq!(config(&mut guest, 0, 8), (DISK >> 9).to_le_bytes());
    guest.front.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    guest.front.add_mem_region(&guest.region()).unwrap();
    let mut base = 0;
    for round in 0..6 {
        guest.front.set_vring_num(0, 16).unwrap();
        guest.front.set_vring_kick(0, &guest.kicks[0]).unwrap();
        assert!(is(&export, Usage::InUse));
        guest.start(0, base);
        assert!(is(&export, Usage::InUse));
        let status = ask(&mut guest);
        let used = guest.used_index(0);
        let handed = Box::new(export).hand_over().unwrap();
        assert_eq!((guest.used_index(0), guest.get(DATA, 20)), (used, vec![0; 20]), "not served");
        export = VhostExport::resume(rig.parts(), rig.spec(path.clone(), 1), handed).unwrap();
        assert_eq!(guest.wait_used(0, 1), [(0, 21)]);
        assert_eq!((guest.get(status, 1), guest.get(DATA, 20)), (vec![0], SERIAL.into()));
        assert_eq!(config(&mut guest, 32, 1), [0], "the cache mode is the guest's choice");
        assert!(is(&export, Usage::InUse));
        // In two steps, as QEMU does it; nothing is let go in between.
        guest.front.set_vring_enable(0, false).unwrap();
        assert!(is(&export, Usage::InUse));
        if round % 2 == 0 {
            base = guest.front.get_vring_base(0).unwrap() as u16;
            assert!(is(&export, Usage::Idle));
        }
        let handed = Box::new(export).hand_over().unwrap();
        export = VhostExport::wait(FACTS, rig.spec(path.clone(), 1), Some(handed)).unwrap();
        if round % 2 == 1 {
            base = guest.front.get_vring_base(0).unwrap() as u16;
        }
        assert!(is(&export, Usage::Idle) && base == round + 1);
        assert_eq!(config(&mut guest, 32, 1), [0]);
    }
    // Whoever goes wants nothing any more, and the next one finds the socket.
    guest.start(0, base);
    assert!(is(&export, Usage::InUse));
    drop(guest);
    assert!(is(&export, Usage::Idle) && !export.status().unwrap().connected);
    drop(FrontEnd::connect(&path, 1));
    drop(export);
    assert!(!path.exists());
}

/// QEMU asks for a log while it copies memory, and takes that back with the next start only.
#[test]
fn who_moves_is_told_from_who_pauses() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let export = rig.export(2);
    let mut guest = FrontEnd::started(&export.spec().socket, 2);
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    guest.front.get_vring_base(0).unwrap();
    assert!(is(&export, Usage::InUse), "the other ring is not stopped");
    guest.front.get_vring_base(1).unwrap();
    assert!(is(&export, Usage::Leaving));
    guest.front.set_features(FEATURES).unwrap();
    guest.start(0, 0);
    assert!(is(&export, Usage::InUse));
    guest.front.get_vring_base(0).unwrap();
    assert!(is(&export, Usage::Idle));
}

/// A daemon was killed with a request under way, and the guest is stopped before another one has
/// done it again: where its ring stands is said only when that is done.
#[test]
fn a_ring_with_requests_to_do_again_is_not_stopped_while_nobody_does_them() {
    for features in [FEATURES, FEATURES | PACKED] {
        let rig = Rig::new(Level::Raid1, 2, DISK);
        let path = socket_path();
        let export = VhostExport::wait(FACTS, rig.spec(path.clone(), 1), None).unwrap();
        let mut guest = FrontEnd::connect_with(&path, 1, features);
        let asked = VhostUserInflight::new(0, 0, 1, RING_SIZE);
        let (region, file) = guest.front.get_inflight_fd(&asked).unwrap();
        guest.front.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
        guest.front.add_mem_region(&guest.region()).unwrap();
        // Blank, then with a log that was begun.
        guest.start(0, 0);
        guest.front.get_vring_base(0).unwrap();
        assert!(is(&export, Usage::Idle), "nothing is under way");
        let is_packed = features & PACKED != 0;
        file.write_all_at(&1u16.to_ne_bytes(), 8).unwrap();
        file.write_all_at(&RING_SIZE.to_ne_bytes(), 10).unwrap();
        let status = (!is_packed).then(|| ask(&mut guest));
        guest.start(0, 0);
        assert!(is(&export, Usage::InUse));
        std::thread::scope(|scope| {
            let stop = scope.spawn(|| guest.front.get_vring_base(0));
            assert!(!within(300, || export.usage() == Usage::Idle), "it was stopped");
            if is_packed {
                // Who stops the export ends the wait, too.
                drop(export);
                assert!(stop.join().unwrap().is_err());
                return;
            }
            let handed = Box::new(export).hand_over().unwrap();
            let export = VhostExport::resume(rig.parts(), rig.spec(path, 1), handed).unwrap();
            assert_eq!(stop.join().unwrap().unwrap(), 1);
            assert!(is(&export, Usage::Idle));
        });
        let answered = status.map(|status| (guest.used_index(0), guest.get(status, 1)));
        assert!(answered.is_none_or(|its| its == (1, vec![0])));
    }
}

/// What a front end may have kept is bounded, whoever serves it.
#[test]
fn what_is_kept_of_a_hostile_front_end_is_bounded() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let path = socket_path();
    let export = VhostExport::wait(FACTS, rig.spec(path.clone(), 1), None).unwrap();
    let mut guest = FrontEnd::connect(&path, 1);
    let regions = guest.front.get_max_mem_slots().unwrap();
    for _ in 0..regions {
        guest.front.add_mem_region(&guest.region()).unwrap();
    }
    assert!(guest.front.add_mem_region(&guest.region()).is_err());
    assert!(within(10_000, || !export.status().unwrap().connected));
    type Message = fn(&mut FrontEnd) -> bool;
    let cases: [Message; 7] = [
        |g| g.front.set_vring_num(0, 15).is_err(),
        |g| g.front.set_vring_num(1, 16).is_err(),
        |g| g.front.set_vring_base(1, 0).is_err(),
        |g| g.front.set_vring_kick(1, &g.kicks[0]).is_err(),
        |g| g.front.get_vring_base(1).is_err(),
        |g| g.front.set_vring_addr(1, &FrontEnd::addresses(0)).is_err(),
        |g| g.front.set_features(1 << 33).is_err(),
    ];
    for (number, case) in cases.into_iter().enumerate() {
        let mut guest = FrontEnd::connect(&path, 2);
        assert!(case(&mut guest), "case {number}");
        assert!(within(10_000, || !export.status().unwrap().connected), "case {number}");
    }
    // What only a device would refuse is refused once there is one; the export goes on.
    let mut guest = FrontEnd::connect(&path, 1);
    guest.front.add_mem_region(&guest.region()).unwrap();
    guest.front.add_mem_region(&guest.region()).unwrap();
    let handed = Box::new(export).hand_over().unwrap();
    let export = VhostExport::resume(rig.parts(), rig.spec(path.clone(), 1), handed).unwrap();
    assert!(within(10_000, || !export.status().unwrap().connected));
    let mut guest = FrontEnd::started(&path, 1);
    ask(&mut guest);
    assert_eq!(guest.wait_used(0, 1), [(0, 21)]);
}
