//! Goal: who copies a guest's memory, and then again the pages that the log names, has all that the
//! device has written, for either layout of a ring and whatever was asked; and without a log
//! nothing is marked.
//! Method: front ends whose rings are made by hand. While nothing but the device writes, memory is
//! copied, and compared with what it is when the ring has stopped.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;
use ashlar_target::limits::{Rate, Rates};
use ashlar_target::vhost::VhostExport;
use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::VhostUserFrontend;
use vhost::{VhostBackend, VhostUserDirtyLogRegion, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::front_end::{FEATURES, FrontEnd, LOG_ALL, MEMORY_BYTES, NEXT, USER, WRITE, within};
use crate::packed::{PACKED, Packed};
use crate::rig::{Rig, socket_path};

const PAGE: u64 = 4096;
/// In the flags of a ring's addresses.
const LOG: u32 = 1;
const DATA: u64 = 8 << 20;
const DATA_BYTES: u64 = 4 << 20;
const DISK: u64 = 16 << 20;
/// Of a request, in a page of its own, the status in the one behind it.
const HEADER: u64 = 4 << 20;
const STATUS: u64 = HEADER + PAGE + 77;
const USED: u64 = 0x2000;
/// What is in guest memory before a read, and is never read.
const WIPED: u8 = 0xee;
const KIND_IN: u32 = 0;

struct Log(File);

impl Log {
    fn new(bytes: u64) -> Log {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(rustix::fs::memfd_create("log", flags).unwrap());
        file.set_len(bytes).unwrap();
        rustix::fs::fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW).unwrap();
        Log(file)
    }

    fn of_memory() -> Log {
        Log::new(MEMORY_BYTES / PAGE / 8)
    }

    /// Whether the back end took it.
    fn hand_to(&self, guest: &FrontEnd) -> bool {
        let mmap_size = self.0.metadata().unwrap().len();
        let mmap_handle = self.0.as_raw_fd();
        let region = VhostUserDirtyLogRegion { mmap_size, mmap_offset: 0, mmap_handle };
        guest.front.set_log_base(0, Some(region)).is_ok()
    }

    fn pages(&self) -> BTreeSet<u64> {
        let mut bytes = vec![0; self.0.metadata().unwrap().len() as usize];
        self.0.read_exact_at(&mut bytes, 0).unwrap();
        let is_marked = |page: &u64| bytes[*page as usize / 8] & 1 << (page % 8) != 0;
        (0..bytes.len() as u64 * 8).filter(is_marked).collect()
    }

    fn clear(&self) {
        let zeroes = vec![0; self.0.metadata().unwrap().len() as usize];
        self.0.write_all_at(&zeroes, 0).unwrap();
    }
}

/// Pages that are not the same.
fn changed(before: &[u8], after: &[u8]) -> BTreeSet<u64> {
    let pages = before.chunks(PAGE as usize).zip(after.chunks(PAGE as usize));
    (0..).zip(pages).filter(|(_, (before, after))| before != after).map(|(page, _)| page).collect()
}

fn pages(start: u64, len: u64) -> BTreeSet<u64> {
    (start / PAGE..=(start + len - 1) / PAGE).collect()
}

/// Another region, for which a log of the first one is too short.
fn more_memory(guest: &FrontEnd) -> VhostUserMemoryRegionInfo {
    let (guest_phys_addr, userspace_addr) = (MEMORY_BYTES, USER + (1 << 33));
    VhostUserMemoryRegionInfo { guest_phys_addr, userspace_addr, ..guest.region() }
}

/// Addresses of a ring whose writes are marked.
fn logged(queue: usize) -> VringConfigData {
    let log_addr = Some(FrontEnd::ring(queue) + USED);
    VringConfigData { flags: LOG, log_addr, ..FrontEnd::addresses(queue) }
}

/// A request: kind, sector, data (address, length, whether the device writes it), status.
type Asked = (u32, u64, (u64, u32, bool), u8);

/// All that a guest may ask for.
const ALL: [Asked; 12] = [
    (KIND_IN, 0, (DATA, 65536, true), 0),
    // Lent to the drive, cut into chunks of several.
    (KIND_IN, 64, (DATA + 512, 1 << 20, true), 0),
    // Not as direct I/O wants it: read elsewhere and copied.
    (KIND_IN, 8, (DATA + 100, 4096, true), 0),
    // Larger than one piece of such.
    (KIND_IN, 0, (DATA + 1, 3 << 20, true), 0),
    (8, 0, (DATA + 3 * PAGE - 7, 20, true), 0),
    (1, 4096, (DATA, 8192, false), 0),
    (4, 0, (0, 0, false), 0),
    // Discard and write zeroes: the range is behind the header.
    (11, 0, (HEADER + 16, 16, false), 0),
    (13, 0, (HEADER + 16, 16, false), 0),
    // Behind the end, of no whole sectors, and unknown.
    (KIND_IN, DISK / 512, (DATA, 4096, true), 1),
    (KIND_IN, 0, (DATA, 100, true), 1),
    (99, 0, (DATA, 4096, true), 2),
];

/// Puts a request into guest memory, but for the descriptors: what these are to say.
fn put(guest: &FrontEnd, (kind, sector, data, _): Asked) -> Vec<(u64, u32, u16)> {
    let mut header = [0; 32];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    header[8..16].copy_from_slice(&sector.to_le_bytes());
    // 8 sectors at 1 MiB.
    header[16..24].copy_from_slice(&2048u64.to_le_bytes());
    header[24..28].copy_from_slice(&8u32.to_le_bytes());
    guest.put(HEADER, &header);
    guest.put(STATUS, &[WIPED]);
    guest.put(DATA, &vec![WIPED; DATA_BYTES as usize]);
    let (at, len, writes) = data;
    let data = (at, len, NEXT | if writes { WRITE } else { 0 });
    let all = [(HEADER, 16, NEXT), data, (STATUS, 1, WRITE)];
    all.into_iter().filter(|(_, len, _)| *len > 0).collect()
}

/// What has to be marked: ring, status, and data where the device has put some.
fn expected((_, _, (at, len, writes), status): Asked) -> BTreeSet<u64> {
    let ring = BTreeSet::from([USED / PAGE, STATUS / PAGE]);
    let data = if writes && status == 0 { pages(at, len.into()) } else { BTreeSet::new() };
    ring.union(&data).copied().collect()
}

/// The disk has other bytes than guest memory before a read.
fn fill(guest: &mut FrontEnd, queue: usize) {
    guest.put(DATA, &vec![7; DATA_BYTES as usize]);
    guest.request(queue, 0, 1, 0, (DATA, DATA_BYTES as u32, false));
    guest.offer(queue, 0);
    guest.kick(queue);
    guest.wait_used(queue, 1);
}

/// Does one request on a split ring that is stopped before and afterwards. Returns the pages that
/// have changed meanwhile.
fn split_round(
    guest: &mut FrontEnd,
    queue: usize,
    asked: Asked,
    addresses: &VringConfigData,
) -> BTreeSet<u64> {
    let base = guest.front.get_vring_base(queue).unwrap() as u16;
    let descriptors = put(guest, asked);
    for (index, (address, len, flags)) in (0..).zip(&descriptors) {
        guest.describe(FrontEnd::ring(queue), index, *address, *len, *flags, index + 1);
    }
    guest.offer(queue, 0);
    let before = guest.get(0, MEMORY_BYTES as usize);
    guest.start_at(queue, base, addresses);
    guest.kick(queue);
    guest.wait_used(queue, 1);
    guest.front.get_vring_base(queue).unwrap();
    assert_eq!(guest.get(STATUS, 1), [asked.3], "{asked:?}");
    let changed = changed(&before, &guest.get(0, MEMORY_BYTES as usize));
    guest.start_at(queue, base.wrapping_add(1), addresses);
    changed
}

/// What is the ring's own is at its start; so these pages are the same for each queue.
fn of_first_ring(pages: BTreeSet<u64>, queue: usize) -> BTreeSet<u64> {
    let ring = FrontEnd::ring(queue) / PAGE;
    let own = |page: u64| if (ring..ring + 4).contains(&page) { page - ring } else { page };
    pages.into_iter().map(own).collect()
}

#[test]
fn all_that_a_split_ring_changes_is_marked() {
    let rig = Rig::spread(Level::Raid5, 4, DISK, Duration::from_micros(50));
    let export = rig.export(2);
    let mut guest = FrontEnd::started(&export.spec().socket, 2);
    let log = Log::of_memory();
    assert!(log.hand_to(&guest));
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    // The array's reactor, and one that has the volume by its offer.
    for queue in 0..2 {
        fill(&mut guest, queue);
        for asked in ALL {
            log.clear();
            let changed =
                of_first_ring(split_round(&mut guest, queue, asked, &logged(queue)), queue);
            let marked = of_first_ring(log.pages(), queue);
            assert!(changed.is_superset(&expected(asked)), "{asked:?}: {changed:?}");
            assert!(marked.is_superset(&changed), "{asked:?}: {marked:?} of {changed:?}");
            // No page in vain, but for what a refused read was for.
            let (at, len, _) = asked.2;
            let known =
                |page: &u64| expected(asked).contains(page) || pages(at, len.into()).contains(page);
            assert!(marked.iter().all(known), "{asked:?}: {marked:?}");
        }
    }
}

#[test]
fn all_that_a_packed_ring_changes_is_marked() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let export = rig.export(1);
    let mut driver = Packed::started(&export);
    let log = Log::of_memory();
    assert!(log.hand_to(&driver.guest));
    driver.guest.front.set_features(PACKED | LOG_ALL).unwrap();
    let asked = (1, 0, (DATA, DATA_BYTES as u32, false), 0);
    let descriptors = put(&driver.guest, asked);
    driver.guest.put(DATA, &vec![7; DATA_BYTES as usize]);
    driver.offer(1, &descriptors);
    driver.wait(3);
    for (id, asked) in (2..).zip(ALL) {
        let base = driver.guest.front.get_vring_base(0).unwrap() as u16;
        let descriptors = put(&driver.guest, asked);
        driver.offer(id, &descriptors);
        log.clear();
        let before = driver.guest.get(0, MEMORY_BYTES as usize);
        driver.guest.start_at(0, base, &logged(0));
        driver.guest.kick(0);
        assert_eq!(driver.wait(descriptors.len() as u64).0, id);
        let now = driver.guest.get(0, MEMORY_BYTES as usize);
        let marked = log.pages();
        let served = changed(&before, &now);
        // The used descriptor is in the first page, what the device wants to be told in another.
        let expected: BTreeSet<u64> = expected(asked).into_iter().chain([0]).collect();
        assert!(served.is_superset(&expected), "{asked:?}: {served:?}");
        // The used descriptor is seen before it is marked.
        assert!(within(10_000, || log.pages().is_superset(&served)), "{asked:?}: {marked:?}");
        // The ring is left, which leaves its trace, too: at once, or in two steps.
        let now = if id % 2 == 0 {
            driver.guest.front.set_vring_enable(0, false).unwrap();
            driver.guest.get(0, MEMORY_BYTES as usize)
        } else {
            now
        };
        log.clear();
        let base = driver.guest.front.get_vring_base(0).unwrap() as u16;
        let left = changed(&now, &driver.guest.get(0, MEMORY_BYTES as usize));
        assert!(left.contains(&(USED / PAGE)) && log.pages().is_superset(&left), "{left:?}");
        driver.guest.start_at(0, base, &logged(0));
    }
}

/// Memory that a guest gets while it is moved changes nothing for a ring that is at work.
#[test]
fn a_ring_is_logged_also_when_memory_has_come_or_gone() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let log = Log::new(MEMORY_BYTES / PAGE / 4);
    let asked = ALL[6];
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    assert!(log.hand_to(&guest));
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    guest.front.set_vring_addr(0, &logged(0)).unwrap();
    guest.front.add_mem_region(&more_memory(&guest)).unwrap();
    for (index, (address, len, flags)) in (0..).zip(put(&guest, asked)) {
        guest.describe(0, index, address, len, flags, index + 1);
    }
    log.clear();
    guest.offer(0, 0);
    guest.kick(0);
    guest.wait_used(0, 1);
    assert!(within(10_000, || log.pages() == expected(asked)), "{:?}", log.pages());
    drop(guest);
    assert!(within(10_000, || !export.status().unwrap().connected));
    let mut driver = Packed::started(&export);
    assert!(log.hand_to(&driver.guest));
    driver.guest.front.set_features(PACKED | LOG_ALL).unwrap();
    driver.guest.front.set_vring_addr(0, &logged(0)).unwrap();
    driver.guest.front.add_mem_region(&more_memory(&driver.guest)).unwrap();
    let descriptors = put(&driver.guest, asked);
    log.clear();
    driver.offer(1, &descriptors);
    driver.wait(2);
    let packed = expected(asked).into_iter().chain([0]).collect();
    assert!(within(10_000, || log.pages().is_superset(&packed)), "{:?}", log.pages());
}

#[test]
fn nothing_is_marked_that_is_not_wanted() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    let log = Log::of_memory();
    assert!(log.hand_to(&guest));
    for asked in ALL {
        split_round(&mut guest, 0, asked, &logged(0));
    }
    assert!(log.pages().is_empty(), "{:?}", log.pages());
    // Requests are logged, the ring is not.
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    guest.front.set_vring_addr(0, &FrontEnd::addresses(0)).unwrap();
    log.clear();
    split_round(&mut guest, 0, ALL[0], &FrontEnd::addresses(0));
    let mut asked = expected(ALL[0]);
    asked.remove(&(USED / PAGE));
    assert_eq!(log.pages(), asked);
    // Another log takes the place of this one.
    log.clear();
    let other = Log::new(MEMORY_BYTES / PAGE / 8 + 8);
    assert!(other.hand_to(&guest));
    split_round(&mut guest, 0, ALL[0], &logged(0));
    assert!(log.pages().is_empty() && other.pages() == expected(ALL[0]));
    // And it ends.
    guest.front.set_features(FEATURES).unwrap();
    other.clear();
    split_round(&mut guest, 0, ALL[0], &logged(0));
    assert!(other.pages().is_empty());
}

/// As QEMU does it: the ring is at work when the log begins and when it ends, and what was written
/// after the reply is copied once more. The reply waits for no request, since that may take as long
/// as a drive is silent.
#[test]
fn a_log_that_begins_while_requests_are_under_way_has_all_that_comes() {
    const ROUNDS: u16 = 10;
    let rig = Rig::new(Level::Raid5, 4, DISK);
    let export = rig.export(1);
    let limits = &export.spec().limits;
    let limited = || export.status().unwrap().counters.limited;
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    let log = Log::of_memory();
    fill(&mut guest, 0);
    for round in 0..ROUNDS {
        guest.put(DATA, &vec![WIPED; DATA_BYTES as usize]);
        // The first is served, the others wait for hours.
        let read = Rate { requests_per_second: None, bytes_per_second: Some(1) };
        limits.set(Rates { read, ..Rates::default() });
        let waited = limited();
        for slot in 0..4u16 {
            let place = DATA + u64::from(slot) * (1 << 20);
            guest.request(0, slot * 3, KIND_IN, 0, (place, 256 << 10, true));
            guest.offer(0, slot * 3);
        }
        guest.kick(0);
        assert!(within(10_000, || limited() == waited + 3), "popped, and not served");
        // Some are under way that began before the log did, some that began in an earlier one.
        if round % 2 == 0 {
            assert!(log.hand_to(&guest));
            guest.front.set_features(FEATURES | LOG_ALL).unwrap();
            guest.front.set_features(FEATURES).unwrap();
        }
        assert!(log.hand_to(&guest));
        guest.front.set_features(FEATURES | LOG_ALL).unwrap();
        guest.front.set_vring_addr(0, &logged(0)).unwrap();
        let copied = guest.get(0, MEMORY_BYTES as usize);
        assert!(guest.used_index(0) < (round + 1) * 4 + 1, "they wait while the log begins");
        limits.set(Rates::default());
        guest.wait_used(0, 4);
        let base = guest.front.get_vring_base(0).unwrap() as u16;
        let changed = changed(&copied, &guest.get(0, MEMORY_BYTES as usize));
        let marked = log.pages();
        assert!(marked.is_superset(&changed), "{round}: {changed:?}, marked {marked:?}");
        guest.front.set_features(FEATURES).unwrap();
        log.clear();
        guest.start(0, base);
    }
}

#[test]
fn a_log_that_is_too_short_or_may_shrink_is_refused() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let export = rig.export(1);
    let started = || FrontEnd::started(&export.spec().socket, 1);
    let short = Log::new(MEMORY_BYTES / PAGE / 8 - 1);
    let flags = MemfdFlags::CLOEXEC;
    let loose = Log(File::from(rustix::fs::memfd_create("log", flags).unwrap()));
    loose.0.set_len(MEMORY_BYTES).unwrap();
    assert!(!loose.hand_to(&started()));
    // It is refused where it is asked for, also of a device at rest.
    let mut guest = FrontEnd::connect(&export.spec().socket, 1);
    guest.front.add_mem_region(&guest.region()).unwrap();
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    assert!(!short.hand_to(&guest));
    // One that nobody asks for is kept until somebody does, with a ring at work.
    let guest = started();
    assert!(short.hand_to(&guest));
    assert!(guest.front.set_features(FEATURES | LOG_ALL).is_err());
    // Nor does memory come for which it is too short.
    let mut guest = started();
    assert!(Log::of_memory().hand_to(&guest));
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    assert!(guest.front.add_mem_region(&more_memory(&guest)).is_err());
    // A log that is not in use is no reason to refuse memory; one that is grows first.
    let mut guest = started();
    assert!(Log::of_memory().hand_to(&guest));
    let more = more_memory(&guest);
    guest.front.add_mem_region(&more).unwrap();
    guest.front.remove_mem_region(&more).unwrap();
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    assert!(Log::new(MEMORY_BYTES / PAGE / 4).hand_to(&guest));
    guest.front.add_mem_region(&more).unwrap();
    fill(&mut guest, 0);
    assert!(export.status().unwrap().counters.writes > 0);
}

/// A front end that gave up moving its guest clears a bit of the features, and no more: the log
/// stays, and may be too short for what comes.
#[test]
fn a_log_that_nobody_asks_for_stands_in_no_way() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let mut export = rig.export(1);
    let hand_over = |export: VhostExport| {
        let handed = Box::new(export).hand_over().unwrap();
        VhostExport::resume(rig.parts(), rig.spec(socket_path(), 1), handed).unwrap()
    };
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    assert!(Log::of_memory().hand_to(&guest));
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    guest.front.set_features(FEATURES).unwrap();
    let more = more_memory(&guest);
    guest.front.add_mem_region(&more).unwrap();
    let short = Log::new(8);
    assert!(short.hand_to(&guest));
    // The daemon is exchanged.
    export = hand_over(export);
    fill(&mut guest, 0);
    // The guest is moved after all, and its device starts only now: as QEMU says it.
    let base = guest.front.get_vring_base(0).unwrap() as u16;
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    guest.front.remove_mem_region(&more).unwrap();
    guest.front.add_mem_region(&more).unwrap();
    guest.set_up(0, base, &logged(0));
    export = hand_over(export);
    let log = Log::new(MEMORY_BYTES / PAGE / 4);
    assert!(log.hand_to(&guest));
    guest.front.set_vring_enable(0, true).unwrap();
    let changed = split_round(&mut guest, 0, ALL[0], &logged(0));
    assert!(changed.is_superset(&expected(ALL[0])));
    assert!(log.pages().is_superset(&changed) && short.pages().is_empty());
    assert!(export.status().unwrap().last_error.is_none());
}

/// What a ring wrote without one would never be copied.
#[test]
fn a_ring_whose_log_is_missing_waits_for_it() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let export = rig.export(2);
    let active = || export.status().unwrap().queues_active();
    let mut guest = FrontEnd::connect(&export.spec().socket, 2);
    guest.front.add_mem_region(&guest.region()).unwrap();
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    let asked = ALL[4];
    for (index, (address, len, flags)) in (0..).zip(put(&guest, asked)) {
        guest.describe(0, index, address, len, flags, index + 1);
    }
    guest.offer(0, 0);
    let before = guest.get(0, MEMORY_BYTES as usize);
    guest.start_at(0, 0, &logged(0));
    guest.kick(0);
    assert_eq!(active(), 0, "there is none");
    let log = Log::of_memory();
    assert!(log.hand_to(&guest));
    assert_eq!(active(), 1);
    guest.wait_used(0, 1);
    guest.front.get_vring_base(0).unwrap();
    let changed = changed(&before, &guest.get(0, MEMORY_BYTES as usize));
    assert!(changed.is_superset(&expected(asked)) && log.pages().is_superset(&changed));
    // Too short, until the memory goes, or the wish.
    let more = more_memory(&guest);
    for way in 0..3 {
        guest.front.add_mem_region(&more).unwrap();
        guest.start_at(0, 1, &logged(0));
        guest.start_at(1, 0, &logged(1));
        assert_eq!(active(), 0, "too short");
        match way {
            0 => guest.front.remove_mem_region(&more).unwrap(),
            1 => guest.front.set_features(FEATURES).unwrap(),
            // One that was stopped meanwhile does not start.
            _ => {
                guest.front.get_vring_base(1).unwrap();
                assert!(Log::new(MEMORY_BYTES / PAGE / 4).hand_to(&guest));
            }
        }
        assert_eq!(active(), if way < 2 { 2 } else { 1 });
        for queue in 0..2 {
            guest.front.get_vring_base(queue).unwrap();
        }
        if way == 1 {
            guest.front.set_features(FEATURES | LOG_ALL).unwrap();
        }
        if way > 0 {
            guest.front.remove_mem_region(&more).unwrap();
        }
    }
}

/// The daemon is exchanged while a guest is moved: both notice nothing.
#[test]
fn a_log_is_handed_to_the_next_process() {
    let rig = Rig::new(Level::Raid1, 2, DISK);
    let mut export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    fill(&mut guest, 0);
    let log = Log::of_memory();
    assert!(log.hand_to(&guest));
    let bell = EventFd::new(EFD_NONBLOCK).unwrap();
    guest.front.set_log_fd(bell.as_raw_fd()).unwrap();
    guest.front.set_features(FEATURES | LOG_ALL).unwrap();
    split_round(&mut guest, 0, ALL[0], &logged(0));
    assert!(within(10_000, || bell.read().is_ok()), "rung when pages were marked");
    for asked in ALL {
        let handed = Box::new(export).hand_over().unwrap();
        let spec = rig.spec(socket_path(), 1);
        log.clear();
        let _ = bell.read();
        export = VhostExport::resume(rig.parts(), spec, handed).unwrap();
        let changed = split_round(&mut guest, 0, asked, &logged(0));
        assert!(changed.is_superset(&expected(asked)));
        assert!(log.pages().is_superset(&changed), "{asked:?}");
        assert!(within(10_000, || bell.read().is_ok()));
    }
}
