//! Exports and guests come and go, and sizes and cache modes change.

use std::io::Read;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::{Export, ExportError};
use ashlar_target::limits::{RateLimits, Rates};
use ashlar_target::unix_socket::Access;
use ashlar_target::vhost::{ExportSpec, QUEUES_MAX, VhostExport};
use vhost::VhostBackend;
use vhost::vhost_user::VhostUserFrontend;
use vhost::vhost_user::message::{VhostUserConfigFlags, VhostUserInflight};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::driver::{Client, all_features};
use crate::front_end::{FrontEnd, RING_SIZE, within};
use crate::rig::{Rig, socket_path};

const DATA: u64 = 8 << 20;
const KIND_OUT: u32 = 1;
const KIND_FLUSH: u32 = 4;

fn config(guest: &mut FrontEnd, offset: u32, len: u32) -> Vec<u8> {
    let flags = VhostUserConfigFlags::empty();
    guest.front.get_config(offset, len, flags, &vec![0; len as usize]).unwrap().1
}

fn wait_gone(export: &VhostExport) {
    assert!(within(10_000, || !export.status().unwrap().connected));
}

#[test]
fn guests_come_one_after_the_other_and_find_their_data() {
    let rig = Rig::new(Level::Raid5, 4, 16 << 20);
    let export = rig.export(4);
    for round in 0..6u8 {
        let queues = usize::from(round % 4) + 1;
        let mut client = Client::connect(&export.spec().socket, queues, all_features(), 1 << 20);
        if round > 0 {
            assert!(client.read(0, 4096) == [round - 1; 4096]);
        }
        client.write(0, &[round; 4096]);
        client.flush();
        assert_eq!(usize::from(export.status().unwrap().queues_active()), queues);
        drop(client);
        wait_gone(&export);
        assert_eq!(export.status().unwrap().queues_active(), 0);
    }
    assert_eq!(export.status().unwrap().counters.flushes, 6);
}

/// More often than the array flushes them for its own sake: the two that have the write, each time.
#[test]
fn flushes_of_the_guest_reach_the_drives() {
    const ROUNDS: u64 = 200;
    let rig = Rig::new(Level::Raid5, 4, 16 << 20);
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
    let before = rig.flushes();
    for round in 0..ROUNDS {
        client.write(round * 4096, &[1; 4096]);
        client.flush();
    }
    let after = rig.flushes();
    let flushes = || before.iter().zip(&after).map(|(before, after)| after - before);
    assert!(flushes().sum::<u64>() >= 2 * ROUNDS, "{before:?} {after:?}");
    assert!(flushes().all(|count| count >= ROUNDS / 4), "{before:?} {after:?}");
}

#[test]
fn an_export_can_be_stopped_and_started_again() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let path = socket_path();
    for round in 0..4u8 {
        let export = rig.export_at(path.clone(), 2);
        let mut client = Client::connect(&path, 2, all_features(), 1 << 20);
        if round > 0 {
            assert!(client.read(8192, 512) == [round; 512]);
        }
        client.write(8192, &[round + 1; 512]);
        // With and without a front end.
        if round % 2 == 0 {
            drop(client);
        }
        drop(export);
        assert!(!path.exists());
    }
}

#[test]
fn what_was_taken_is_answered_before_an_export_ends() {
    let rig = Rig::new(Level::Raid5, 5, 64 << 20);
    for _ in 0..5 {
        let export = rig.export(1);
        let mut client = Client::connect(&export.spec().socket, 1, all_features(), 32 << 20);
        for number in 0..32 {
            client.submit_write(0, (number as u64) << 20, number << 20, 1 << 20, number);
        }
        client.kick(0);
        drop(export);
        let done = client.queues[0].completions().filter(|done| done.ret == 0).count();
        drop(client);
        // Those that were not taken have left no trace in the counters; the taken are complete.
        assert!(done <= 32);
    }
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
    client.write(0, &[1; 512]);
}

#[test]
fn the_base_is_given_back_only_when_everything_is_answered() {
    let rig = Rig::new(Level::Raid5, 5, 64 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    let mut base = 0;
    for round in 0..200u64 {
        for slot in 0..5u16 {
            let place = DATA + u64::from(slot) * (1 << 20);
            guest.request(0, slot * 3, KIND_OUT, round * 8, (place, 1 << 20, false));
            guest.offer(0, slot * 3);
        }
        guest.kick(0);
        let next = guest.front.get_vring_base(0).unwrap() as u16;
        // Exactly those that were taken are on the used ring.
        assert_eq!(guest.used_index(0), next, "round {round}");
        guest.start(0, next);
        base += 5;
        guest.wait_used(0, 5);
    }
    assert_eq!(guest.front.get_vring_base(0).unwrap(), base);
    assert_eq!(export.status().unwrap().counters.writes, u64::from(base));
}

#[test]
fn the_reactor_sleeps_and_is_woken_by_a_kick() {
    let rig = Rig::polling(Level::Raid1, 2, 16 << 20, std::time::Duration::ZERO);
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
    for round in 0..500u64 {
        client.write(round % 16 * 4096, &[round as u8; 4096]);
        assert!(client.read(round % 16 * 4096, 4096) == [round as u8; 4096]);
    }
}

#[test]
fn the_configuration_tells_what_the_disk_is() {
    let rig = Rig::new(Level::Raid5, 5, 16 << 20);
    let export = rig.export(3);
    let mut guest = FrontEnd::connect(&export.spec().socket, 3);
    let all = config(&mut guest, 0, 256);
    assert_eq!(all[..8], (16u64 << 11).to_le_bytes());
    assert_eq!((all[32], all[34]), (1, 3), "write back, 3 queues");
    assert_eq!(config(&mut guest, 32, 4), all[32..36]);
    // As Cloud Hypervisor and Firecracker ask.
    assert_eq!(config(&mut guest, 0x100, 60), all[..60]);
    assert_eq!(config(&mut guest, 0x120, 4), all[32..36]);
    assert_eq!(guest.front.get_queue_num().unwrap(), 3);
    // The guest may choose write through, and every write is then flushed.
    let mut guest = restart(guest, &export);
    guest.front.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    assert_eq!(config(&mut guest, 32, 1), [0]);
    guest.front.add_mem_region(&guest.region()).unwrap();
    guest.start(0, 0);
    guest.request(0, 0, KIND_OUT, 0, (DATA, 4096, false));
    guest.request(0, 4, KIND_FLUSH, 0, (0, 0, false));
    guest.offer(0, 0);
    guest.offer(0, 4);
    guest.kick(0);
    guest.wait_used(0, 2);
    assert_eq!(export.status().unwrap().counters.flushes, 2);
    // A guest whose front end vanishes keeps its choice; one that shuts down does not.
    let mut guest = restart(guest, &export);
    assert_eq!(config(&mut guest, 32, 1), [0]);
    let mut guest = restart(guest, &export);
    assert_eq!(config(&mut guest, 32, 1), [1]);
}

/// Without flushes, a guest that chose write through relies on it; another process hears of it only
/// from what the front end keeps.
#[test]
fn a_cache_mode_outlives_the_process() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::connect(&export.spec().socket, 1);
    let asked = VhostUserInflight::new(0, 0, 1, RING_SIZE);
    let (region, file) = guest.front.get_inflight_fd(&asked).unwrap();
    guest.front.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    assert_eq!(config(&mut guest, 32, 1), [1]);
    guest.front.set_config(32, VhostUserConfigFlags::WRITABLE, &[0]).unwrap();
    drop((guest, export));
    let export = rig.export(1);
    let mut guest = FrontEnd::connect(&export.spec().socket, 1);
    assert_eq!(config(&mut guest, 32, 1), [1]);
    guest.front.set_inflight_fd(&region, file.as_raw_fd()).unwrap();
    assert_eq!(config(&mut guest, 32, 1), [0]);
    // A region that is too small, or for more queues than there are, is none.
    for wrong in [
        VhostUserInflight { mmap_size: region.mmap_size - 1, ..region },
        VhostUserInflight { mmap_offset: 8, ..region },
        VhostUserInflight { num_queues: 2, ..region },
    ] {
        let export = rig.export(1);
        let mut other = FrontEnd::connect(&export.spec().socket, 1);
        assert!(other.front.set_inflight_fd(&wrong, file.as_raw_fd()).is_err());
    }
    // Nor is one that could shrink under us.
    let loose = rustix::fs::memfd_create("loose", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&loose, region.mmap_size).unwrap();
    let export = rig.export(1);
    let mut other = FrontEnd::connect(&export.spec().socket, 1);
    assert!(other.front.set_inflight_fd(&region, loose.as_raw_fd()).is_err());
}

fn restart(guest: FrontEnd, export: &VhostExport) -> FrontEnd {
    drop(guest);
    wait_gone(export);
    FrontEnd::connect(&export.spec().socket, 3)
}

#[test]
fn a_guest_learns_that_its_disk_has_grown() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::connect(&export.spec().socket, 1);
    let (ours, theirs) = UnixStream::pair().unwrap();
    guest.front.set_backend_request_fd(&theirs).unwrap();
    drop(theirs);
    rig.resize(24 << 20);
    export.resized();
    let mut message = [0; 12];
    (&ours).read_exact(&mut message).unwrap();
    let words = [2u32, 1, 0].map(u32::to_ne_bytes);
    assert_eq!(message, words.as_flattened());
    assert_eq!(config(&mut guest, 0, 8), (24u64 << 11).to_le_bytes());
    drop(guest);
    assert_eq!((&ours).read(&mut message).unwrap(), 0, "closed with the connection");
}

#[test]
fn memory_and_calls_change_while_a_queue_works() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    let mut more = guest.region();
    more.guest_phys_addr = 1 << 32;
    more.userspace_addr += 1 << 33;
    for round in 0..50 {
        // Requests are under way while the map changes.
        for slot in 0..4 {
            let place = DATA + u64::from(slot) * (1 << 20);
            guest.request(0, slot * 3, KIND_OUT, 0, (place, 1 << 20, false));
            guest.offer(0, slot * 3);
        }
        guest.kick(0);
        match round % 3 {
            0 => assert_eq!(guest.front.add_mem_region(&more).unwrap(), None),
            1 => guest.front.remove_mem_region(&more).unwrap(),
            _ => assert!(guest.front.set_mem_table(&[guest.region()]).unwrap().is_none()),
        }
        guest.wait_used(0, 4);
        if round % 3 == 0 {
            // The same bytes at another address of the guest.
            guest.request(0, 0, KIND_OUT, 0, ((1 << 32) + DATA, 4096, false));
            guest.offer(0, 0);
            guest.kick(0);
            guest.wait_used(0, 1);
        }
        let call = vmm_sys_util::eventfd::EventFd::new(vmm_sys_util::eventfd::EFD_NONBLOCK);
        guest.calls[0] = call.unwrap();
        guest.front.set_vring_call(0, &guest.calls[0]).unwrap();
        assert!(guest.called(0, 10_000), "a new call file is rung once");
    }
    let status = export.status().unwrap();
    assert_eq!((status.counters.errors, status.queues_active(), status.last_error), (0, 1, None));
}

/// As user-mode Linux sends it: room for two regions, one of them used.
#[test]
fn a_memory_table_may_be_longer_than_its_regions() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::connect(&export.spec().socket, 1);
    let region = guest.region();
    let fields = [1, region.guest_phys_addr, region.memory_size, region.userspace_addr, 0];
    let mut message: Vec<u8> = [5u32, 9, 72].iter().flat_map(|word| word.to_ne_bytes()).collect();
    message.extend(fields.iter().flat_map(|field| field.to_ne_bytes()));
    message.resize(12 + 72, 0);
    assert_eq!(guest.exchange(&message, true, 20)[12..], [0; 8], "accepted");
    guest.start(0, 0);
    guest.request(0, 0, KIND_FLUSH, 0, (0, 0, false));
    guest.offer(0, 0);
    guest.kick(0);
    guest.wait_used(0, 1);
    // Without its file it is an error.
    let reply = guest.exchange(&message, false, 20);
    assert!(reply.is_empty());
    assert!(within(10_000, || !export.status().unwrap().connected));
}

/// What is replaced is given back: the places for mappings are there once for all guests.
#[test]
fn loose_tables_leave_nothing_behind() {
    const REGIONS: u64 = 32;
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(1);
    let guest = FrontEnd::connect(&export.spec().socket, 1);
    let size = 8 + REGIONS as u32 * 32 + 32;
    let mut message: Vec<u8> = [5, 9, size].iter().flat_map(|word| word.to_ne_bytes()).collect();
    message.extend(REGIONS.to_ne_bytes());
    for at in (0..REGIONS).map(|region| region << 16) {
        let fields = [at, 1 << 16, guest.region().userspace_addr + at, at];
        message.extend(fields.iter().flat_map(|field| field.to_ne_bytes()));
    }
    message.resize(12 + size as usize, 0);
    for round in 0..200 {
        let reply = guest.exchange_with(&message, REGIONS as usize, 20);
        assert_eq!(reply.get(12..), Some(&[0; 8][..]), "table {round} is accepted");
    }
}

#[test]
fn bells_of_a_log_leave_nothing_behind() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(1);
    let guest = FrontEnd::connect(&export.spec().socket, 1);
    let bell = EventFd::new(EFD_NONBLOCK).unwrap();
    for _ in 0..1000 {
        guest.front.set_log_fd(bell.as_raw_fd()).unwrap();
    }
    let handles = handles_of(&bell);
    assert!((1..10).contains(&handles), "{handles} of one bell");
}

/// How many descriptors of this process are one event file.
fn handles_of(event: &EventFd) -> usize {
    let id = |descriptor: &str| {
        let told = std::fs::read_to_string(format!("/proc/self/fdinfo/{descriptor}")).ok()?;
        told.lines().find(|line| line.starts_with("eventfd-id")).map(str::to_owned)
    };
    let its = id(&event.as_raw_fd().to_string());
    assert!(its.is_some(), "event files have numbers");
    let all = std::fs::read_dir("/proc/self/fdinfo").unwrap();
    all.filter(|one| id(one.as_ref().unwrap().file_name().to_str().unwrap()) == its).count()
}

#[test]
fn a_guest_can_be_reset() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let export = rig.export(2);
    let mut guest = FrontEnd::started(&export.spec().socket, 2);
    assert_eq!(export.status().unwrap().queues_active(), 2);
    guest.front.reset_device().unwrap();
    assert_eq!(export.status().unwrap().queues_active(), 0);
    guest.front.remove_mem_region(&guest.region()).unwrap();
    guest.front.add_mem_region(&guest.region()).unwrap();
    guest.start(0, 0);
    guest.request(0, 0, KIND_FLUSH, 0, (0, 0, false));
    guest.offer(0, 0);
    guest.kick(0);
    guest.wait_used(0, 1);
}

#[test]
fn a_specification_is_checked_before_anything_happens() {
    let rig = Rig::new(Level::Raid1, 2, 16 << 20);
    let start = |queues_max: u16, serial: &str, socket: std::path::PathBuf| {
        let limits = RateLimits::new(Rates::default());
        let (name, serial, access) = ("x".into(), serial.into(), Access::default());
        let spec = ExportSpec { name, socket, access, queues_max, serial, limits, since: 0 };
        VhostExport::start(rig.parts(), spec)
    };
    for queues_max in [0, QUEUES_MAX + 1] {
        assert!(matches!(start(queues_max, "", socket_path()), Err(ExportError::Spec(_))));
    }
    let long = "a serial of 21 bytes.";
    assert!(matches!(start(1, long, socket_path()), Err(ExportError::Spec(_))));
    let first = start(1, "", socket_path()).unwrap();
    let second = start(1, "", first.spec().socket.clone());
    assert!(matches!(second, Err(ExportError::Busy(_))));
    let missing = std::path::PathBuf::from("/nonexistent/socket");
    assert!(matches!(start(1, "", missing), Err(ExportError::Socket { .. })));
}
