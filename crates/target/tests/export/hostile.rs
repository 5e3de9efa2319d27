//! Whatever one guest does, its own queue stops with a reason, and nobody else notices.

use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, IntoRawFd, OwnedFd};

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;
use ashlar_target::vhost::VhostExport;
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vmm_sys_util::eventfd::EventFd;

use crate::driver::{Client, all_features};
use crate::front_end::{
    FEATURES, FrontEnd, INDIRECT, LOG_ALL, MEMORY_BYTES, NEXT, RING_SIZE, WRITE, within,
};
use crate::rig::{Rig, SERIAL};

const DATA: u64 = 8 << 20;
const KIND_IN: u32 = 0;
const KIND_GET_ID: u32 = 8;

fn broken(export: &VhostExport, active: u16, reason: &str) {
    assert!(within(10_000, || export.status().unwrap().queues_active() == active), "{reason}");
    let said = export.status().unwrap().last_error.unwrap();
    assert!(said.contains(reason), "said {said:?}, expected {reason:?}");
}

/// The queue still answers: the serial number is what was configured.
fn answers(guest: &mut FrontEnd, queue: usize) {
    let status = guest.request(queue, 0, KIND_GET_ID, 0, (DATA, 20, true));
    guest.offer(queue, 0);
    guest.kick(queue);
    assert_eq!(guest.wait_used(queue, 1), [(0, 21)]);
    assert_eq!(guest.get(status, 1), [0]);
    assert_eq!(guest.get(DATA, 20), SERIAL.as_bytes());
}

#[test]
fn a_hand_made_guest_is_served() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(2);
    let mut guest = FrontEnd::started(&export.spec().socket, 2);
    answers(&mut guest, 0);
    answers(&mut guest, 1);
    assert!(guest.called(0, 10_000) && guest.called(1, 10_000));
}

#[test]
fn each_breach_stops_only_its_queue() {
    type Breach = fn(&mut FrontEnd);
    let ring = FrontEnd::ring(0);
    assert_eq!(ring, 0);
    let cases: [(Breach, &str); 13] = [
        (|g| g.offer(0, RING_SIZE), "descriptor 16 of a table of 16"),
        (|g| g.set_available(0, RING_SIZE + 1), "jumped"),
        (|g| g.set_available(0, 0xffff), "jumped"),
        (|g| one(g, (0, 16, NEXT, 99)), "descriptor 99"),
        (|g| one(g, (0, 16, NEXT, 0)), "loop"),
        (|g| one(g, (0, 0, 0, 0)), "no bytes"),
        (|g| one(g, (MEMORY_BYTES, 16, INDIRECT, 0)), "not in guest memory"),
        (|g| one(g, (0x3000, 16, INDIRECT | NEXT, 0)), "has a next one"),
        (|g| one(g, (0x3000, 8, INDIRECT, 0)), "table of 8 bytes"),
        (
            |g| {
                g.describe(0x3000, 0, 0x3000, 16, INDIRECT, 0);
                one(g, (0x3000, 16, INDIRECT, 0));
            },
            "inside an indirect table",
        ),
        (|g| one(g, (0, 15, 0, 0)), "header of 15 bytes"),
        (|g| one(g, (0, 16, 0, 0)), "no byte for the status"),
        (
            |g| {
                g.request(0, 0, KIND_IN, 0, (MEMORY_BYTES - 512, 1024, true));
                g.offer(0, 0);
            },
            "not in guest memory",
        ),
    ];
    let rig = Rig::new(Level::Raid5, 3, 8 << 20);
    let other = rig.export(1);
    let mut neighbour = Client::connect(&other.spec().socket, 1, all_features(), 1 << 20);
    neighbour.write(0, &[7; 4096]);
    let export = rig.export(2);
    for (breach, reason) in cases {
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        answers(&mut guest, 1);
        breach(&mut guest);
        guest.kick(0);
        broken(&export, 1, reason);
        answers(&mut guest, 1);
        assert!(neighbour.read(0, 4096) == [7; 4096]);
        // The guest may be reset, and then its queue works again.
        let base = guest.front.get_vring_base(0).unwrap();
        drop(guest);
        assert!(base <= 2, "{base}");
        assert!(within(10_000, || !export.status().unwrap().connected));
    }
}

/// Offers one descriptor: address, length, flags, next.
fn one(guest: &mut FrontEnd, (address, len, flags, next): (u64, u32, u16, u16)) {
    guest.describe(0, 0, address, len, flags, next);
    guest.offer(0, 0);
}

#[test]
fn a_stopped_queue_can_be_set_up_again() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    one(&mut guest, (0, 16, WRITE, 0));
    guest.kick(0);
    broken(&export, 0, "header of 0 bytes");
    assert_eq!(guest.front.get_vring_base(0).unwrap(), 1);
    guest.start(0, 1);
    answers(&mut guest, 0);
}

const KIND_OUT: u32 = 1;
const GONE: &str = "memory of the guest is gone";

type Cut = fn(&mut FrontEnd);

/// What a front end does to its guest's memory, and what of it the device touches then.
const CUTS: [(&str, Cut); 4] = [
    ("the ring", |guest| {
        guest.file.set_len(0).unwrap();
        guest.kick(0);
    }),
    ("the data of a read", |guest| cut_data(guest, KIND_IN, 64 << 10)),
    ("the data of a read, not aligned", |guest| cut_data(guest, KIND_IN, (64 << 10) - 512)),
    ("the data of a write", |guest| cut_data(guest, KIND_OUT, 4096)),
];

fn cut_data(guest: &mut FrontEnd, kind: u32, len: u32) {
    guest.request(0, 0, kind, 0, (DATA + 4096, len, kind == KIND_IN));
    guest.file.set_len(DATA).unwrap();
    guest.offer(0, 0);
    guest.kick(0);
}

/// Its front end is sent away with the reason, and hears of no answer; others go on; the drives are
/// well; and the next front end is served.
fn memory_is_cut_off(rig: &Rig) {
    let (export, other) = (rig.export(2), rig.export(1));
    let mut neighbour = Client::connect(&other.spec().socket, 1, all_features(), 1 << 20);
    neighbour.write(0, &[7; 128 << 10]);
    for (what, cut) in CUTS {
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        answers(&mut guest, 1);
        cut(&mut guest);
        assert!(within(10_000, || !export.status().unwrap().connected), "{what}");
        let said = export.status().unwrap().last_error.unwrap();
        assert!(said.contains(GONE), "{what}: {said}");
        if guest.file.metadata().unwrap().len() > 0 {
            assert_eq!(guest.used_index(0), 0, "{what}");
        }
        assert!(neighbour.read(0, 4096) == [7; 4096], "{what}");
        assert!(rig.is_well(), "{what}");
    }
    let mut guest = FrontEnd::started(&export.spec().socket, 2);
    answers(&mut guest, 0);
}

#[test]
fn memory_that_is_cut_off_costs_its_own_front_end_only() {
    memory_is_cut_off(&Rig::new(Level::Raid5, 3, 8 << 20));
}

/// The kernel finds no memory there, which is not the drive's fault.
#[test]
fn memory_that_is_cut_off_costs_no_drive() {
    memory_is_cut_off(&Rig::on_files(Level::Raid5, 3, 8 << 20));
    memory_is_cut_off(&Rig::on_files(Level::Raid1, 2, 8 << 20));
}

/// Flags of a file belong to all who have it, and a counter that is full takes nothing more.
#[test]
fn a_call_file_that_blocks_holds_up_nobody() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let (export, other) = (rig.export(1), rig.export(1));
    let mut neighbour = Client::connect(&other.spec().socket, 1, all_features(), 1 << 20);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    assert!(guest.called(0, 10_000), "a new call file is called once");
    for bell in [&guest.calls[0], &guest.kicks[0]] {
        // SAFETY: it is open as long as the guest.
        let file = unsafe { BorrowedFd::borrow_raw(bell.as_raw_fd()) };
        let flags = rustix::fs::fcntl_getfl(file).unwrap();
        rustix::fs::fcntl_setfl(file, flags - rustix::fs::OFlags::NONBLOCK).unwrap();
    }
    guest.calls[0].write(u64::MAX - 1).unwrap();
    answers(&mut guest, 0);
    neighbour.write(0, &[7; 4096]);
    assert!(neighbour.read(0, 4096) == [7; 4096]);
    guest.kicks[0].write(u64::MAX - 1).unwrap();
    guest.front.get_vring_base(0).unwrap();
    drop(guest);
    assert!(within(10_000, || !export.status().unwrap().connected));
}

/// What a front end cut off before it was handed over, the next process does not map.
#[test]
fn memory_that_is_cut_off_before_a_hand_over_is_refused() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let mut export = rig.export(1);
    let guest = FrontEnd::started(&export.spec().socket, 1);
    guest.file.set_len(0).unwrap();
    let (spec, handed) = (export.spec().clone(), Box::new(export).hand_over());
    export = VhostExport::resume(rig.parts(), spec, handed.unwrap()).unwrap();
    assert!(within(10_000, || !export.status().unwrap().connected));
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    answers(&mut guest, 0);
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_ne_bytes()).collect()
}

/// Where a ring's writes are marked is the front end's word; what is not in the log is not marked.
#[test]
fn a_ring_that_is_logged_anywhere_is_served() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
    let log = std::fs::File::from(rustix::fs::memfd_create("log", flags).unwrap());
    let mmap_size = MEMORY_BYTES / 4096 / 8;
    log.set_len(mmap_size).unwrap();
    rustix::fs::fcntl_add_seals(&log, rustix::fs::SealFlags::SHRINK).unwrap();
    let mmap_handle = std::os::fd::AsRawFd::as_raw_fd(&log);
    let region = vhost::VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle };
    guest.front.set_log_base(0, Some(region)).unwrap();
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    for place in [u64::MAX, u64::MAX - 7, MEMORY_BYTES - 1, MEMORY_BYTES, 1 << 63] {
        let addresses =
            vhost::VringConfigData { flags: 1, log_addr: Some(place), ..FrontEnd::addresses(0) };
        guest.front.set_vring_addr(0, &addresses).unwrap();
        answers(&mut guest, 0);
    }
}

fn bell(file: impl Into<OwnedFd>) -> EventFd {
    // SAFETY: the file is open, and nobody else's.
    unsafe { EventFd::from_raw_fd(file.into().into_raw_fd()) }
}

fn opened(path: &str) -> EventFd {
    bell(std::fs::File::open(path).unwrap())
}

#[test]
fn wrong_messages_end_the_connection_and_nothing_else() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(2);
    type Message = fn(&mut FrontEnd) -> bool;
    let cases: [Message; 17] = [
        |g| g.front.set_vring_num(0, 15).is_err(),
        |g| g.front.set_vring_num(0, 4096).is_err(),
        |g| g.front.set_features(1 << 33).is_err(),
        |g| {
            let mut region = g.region();
            region.memory_size += 1;
            g.front.add_mem_region(&region).is_err()
        },
        |g| {
            let mut region = g.region();
            region.guest_phys_addr = u64::MAX;
            g.front.add_mem_region(&region).is_err()
        },
        |g| {
            g.front.add_mem_region(&g.region()).unwrap();
            g.front.add_mem_region(&g.region()).is_err()
        },
        |g| g.front.remove_mem_region(&g.region()).is_err(),
        |g| {
            let mut region = g.region();
            let null = std::fs::File::open("/dev/null").unwrap();
            region.mmap_handle = std::os::fd::AsRawFd::as_raw_fd(&null);
            g.front.add_mem_region(&region).is_err()
        },
        |g| {
            g.front.get_vring_base(1).is_err() || g.front.set_vring_base(0, 7).is_err() || {
                let mut wrong = FrontEnd::addresses(0);
                wrong.desc_table_addr += 1;
                g.front.set_vring_addr(0, &wrong).is_err()
            }
        },
        |g| g.front.set_vring_call(0, &opened("/dev/zero")).is_err(),
        |g| {
            // As user-mode Linux has them.
            let (_reader, writer) = std::io::pipe().unwrap();
            g.front.set_vring_call(0, &bell(OwnedFd::from(writer))).is_err()
        },
        |g| g.front.set_vring_err(0, &opened("/proc/self/exe")).is_err(),
        // A log of written pages: without a file, in one that could shrink, longer than its file,
        // and a file to ring for it that is none, or is not there.
        |g| g.exchange(&words(&[6, 1, 16, 4096, 0, 0, 0]), false, 28).is_empty(),
        |g| g.exchange(&words(&[6, 1, 16, 4096, 0, 0, 0]), true, 28).is_empty(),
        |g| {
            let flags = rustix::fs::MemfdFlags::ALLOW_SEALING;
            g.file = std::fs::File::from(rustix::fs::memfd_create("log", flags).unwrap());
            g.file.set_len(4096).unwrap();
            rustix::fs::fcntl_add_seals(&g.file, rustix::fs::SealFlags::SHRINK).unwrap();
            assert_eq!(g.exchange(&words(&[6, 1, 16, 4096, 0, 0, 0]), true, 28).len(), 28);
            g.exchange(&words(&[6, 1, 16, 4097, 0, 0, 0]), true, 28).is_empty()
        },
        |g| {
            let reply = g.exchange(&words(&[7, 9, 0]), true, 20);
            reply.is_empty() || reply == words(&[7, 5, 8, 1, 0])
        },
        |g| g.exchange(&words(&[7, 9, 0]), false, 20).is_empty(),
    ];
    for (number, message) in cases.into_iter().enumerate() {
        let mut guest = FrontEnd::connect(&export.spec().socket, 2);
        assert!(message(&mut guest), "case {number}");
        drop(guest);
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        answers(&mut guest, 1);
    }
}

#[test]
fn noise_on_the_socket_is_survived() {
    use std::io::Write;
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let mut prng = ashlar_reactor::prng::Prng::from_seed(5);
    for round in 0..200 {
        let mut stream = std::os::unix::net::UnixStream::connect(&export.spec().socket).unwrap();
        for _ in 0..prng.below(4) {
            let mut message = Vec::new();
            message.extend_from_slice(&(prng.below(46) as u32).to_ne_bytes());
            message.extend_from_slice(&[1u32, 9, 5, 0x101][prng.index(4)].to_ne_bytes());
            let size = [0, 8, 12, 40, 4096, u32::MAX][prng.index(6)];
            message.extend_from_slice(&size.to_ne_bytes());
            let body = (0..size.min(64)).map(|_| prng.below(3) as u8);
            message.extend(body);
            message.truncate(if round % 5 == 0 { prng.index(20) } else { message.len() });
            let _ = stream.write_all(&message);
        }
    }
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    answers(&mut guest, 0);
}

#[test]
fn a_ring_outside_of_memory_never_starts() {
    let rig = Rig::new(Level::Raid1, 2, 8 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::connect(&export.spec().socket, 1);
    guest.start(0, 0);
    broken(&export, 0, "the ring is not in guest memory");
    guest.front.add_mem_region(&guest.region()).unwrap();
    guest.front.get_vring_base(0).unwrap();
    guest.start(0, 0);
    answers(&mut guest, 0);
}
