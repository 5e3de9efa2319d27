//! Data through the whole path, against a plain copy of what the disk should hold.

use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_reactor::prng::Prng;
use ashlar_target::export::Export;
use virtio_driver::VirtioFeatureFlags;

use crate::driver::{Client, all_features};
use crate::rig::Rig;

const DISK: usize = 32 << 20;
const LANES: usize = 16;
const LANE: usize = DISK / LANES;

/// Up to 16 requests at a time, each in a part of the disk of its own, on two queues; sector-sized
/// to megabytes, at addresses that direct I/O can use and that it cannot.
fn exercise(level: Level, drives: u8, features: u64) {
    let rig = Rig::new(level, drives, DISK as u64);
    let export = rig.export(2);
    let mut client = Client::connect(&export.spec().socket, 2, features, 2 * DISK);
    let mut model = vec![0u8; DISK];
    let mut prng = Prng::from_seed(u64::from(drives) + features);
    for round in 0..40 {
        let reading = round % 2 == 1;
        let mut requests = Vec::new();
        for lane in 0..LANES {
            let sectors = [8, 64, 700][prng.index(3)];
            let len = 512 * (1 + prng.index(sectors));
            let offset = lane * LANE + 512 * prng.index((LANE - len) / 512);
            let at = lane * 2 * LANE + [0, 0, 512, 4, 1][prng.index(5)];
            let (queue, place) = (lane % 2, offset as u64);
            match prng.below(if reading { 1 } else { 8 }) {
                _ if reading => client.submit_read(queue, place, at, len, lane),
                0 => {
                    model[offset..offset + len].fill(0);
                    let queue = &mut client.queues[queue];
                    queue.write_zeroes(place, len as u64, true, lane).unwrap();
                }
                1 => client.queues[queue].flush(lane).unwrap(),
                _ => {
                    let seed = prng.next_u64().to_le_bytes();
                    for (i, byte) in client.memory[at..at + len].iter_mut().enumerate() {
                        *byte = seed[i % 8] ^ (i / 512) as u8;
                    }
                    model[offset..offset + len].copy_from_slice(&client.memory[at..at + len]);
                    client.submit_write(queue, place, at, len, lane);
                }
            }
            requests.push((offset, at, len));
        }
        let mut done = [false; LANES];
        for queue in 0..2 {
            client.kick(queue);
        }
        for queue in 0..2 {
            while (0..LANES).any(|lane| lane % 2 == queue && !done[lane]) {
                for (lane, result) in client.wait(queue) {
                    assert_eq!(result, 0);
                    assert!(!std::mem::replace(&mut done[lane], true), "completed twice");
                }
            }
        }
        if reading {
            for (offset, at, len) in requests {
                assert!(client.memory[at..at + len] == model[offset..offset + len], "{offset}");
            }
        }
    }
    for offset in (0..DISK).step_by(1 << 20) {
        assert!(client.read(offset as u64, 1 << 20) == model[offset..offset + (1 << 20)]);
    }
    let status = export.status().unwrap();
    assert_eq!((status.connected, status.queues_active(), status.last_error), (true, 2, None));
    assert_eq!(status.counters.errors, 0);
    assert!(status.counters.reads >= 32 && status.counters.read_bytes >= DISK as u64);
}

#[test]
fn raid5_keeps_what_was_written() {
    exercise(Level::Raid5, 5, all_features());
}

#[test]
fn raid10_keeps_what_was_written_without_an_event_index() {
    exercise(Level::Raid10, 4, all_features() & !VirtioFeatureFlags::RING_EVENT_IDX.bits());
}

#[test]
fn packed_rings_keep_what_was_written() {
    let packed = VirtioFeatureFlags::RING_PACKED.bits();
    exercise(Level::Raid5, 4, all_features() | packed);
    exercise(Level::Raid1, 2, packed | all_features() & !VirtioFeatureFlags::RING_EVENT_IDX.bits());
}

#[test]
fn a_driver_that_knows_nothing_optional_is_served() {
    let rig = Rig::new(Level::Raid0, 2, DISK as u64);
    let export = rig.export(4);
    let features = VirtioFeatureFlags::VERSION_1.bits();
    let mut client = Client::connect(&export.spec().socket, 1, features, 1 << 20);
    client.write(4096, &[9; 8192]);
    assert!(client.read(4096, 8192) == [9; 8192]);
}

#[test]
fn requests_larger_than_a_piece_are_whole() {
    let rig = Rig::new(Level::Raid5, 3, DISK as u64);
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 2 * DISK);
    for (shift, len) in [(0, 12 << 20), (3, 9 << 20)] {
        for (i, byte) in client.memory[shift..shift + len].iter_mut().enumerate() {
            *byte = (i / 512) as u8 ^ (i >> 17) as u8;
        }
        client.submit_write(0, 1 << 20, shift, len, 0);
        assert_eq!(client.finish(0), 0);
        let into = DISK + shift;
        client.submit_read(0, 1 << 20, into, len, 0);
        assert_eq!(client.finish(0), 0);
        assert!(client.memory[shift..shift + len] == client.memory[into..into + len]);
    }
}

#[test]
fn errors_are_answered_and_the_queue_goes_on() {
    let rig = Rig::new(Level::Raid1, 2, DISK as u64);
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
    for beyond in [DISK as u64, DISK as u64 - 512, 1 << 62] {
        client.submit_read(0, beyond, 0, 1024, 0);
        assert_ne!(client.finish(0), 0);
    }
    client.submit_write(0, 0, 0, 700, 0);
    assert_ne!(client.finish(0), 0, "not whole sectors");
    client.queues[0].discard(DISK as u64 - 4096, 8192, 0).unwrap();
    assert_ne!(client.finish(0), 0);
    client.write(0, &[1; 512]);
    let status = export.status().unwrap();
    assert_eq!((status.counters.errors, status.counters.writes), (5, 1));
    assert_eq!(status.queues_active(), 1);
}

#[test]
fn discard_gives_whole_stripes_back() {
    let rig = Rig::new(Level::Raid5, 5, DISK as u64);
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 2 << 20);
    client.write(0, &[5; 1 << 20]);
    // Stripes of 256 KiB: 100 KiB to 700 KiB holds the second one only.
    client.queues[0].discard(100 << 10, 600 << 10, 0).unwrap();
    assert_eq!(client.finish(0), 0);
    let read = client.read(0, 1 << 20);
    let zeroes = read.iter().filter(|byte| **byte == 0).count();
    assert_eq!(zeroes, 256 << 10);
    assert!(read[256 << 10..512 << 10].iter().all(|byte| *byte == 0));
    assert_eq!(export.status().unwrap().counters.discards, 1);
    let config = client.transport.get_config().unwrap();
    assert_eq!({ u32::from(config.discard_sector_alignment) }, 512);
    assert_eq!(u64::from(config.capacity), DISK as u64 / 512);
}

const SPEED_DISK: u64 = if cfg!(debug_assertions) { 32 << 20 } else { 256 << 20 };
const SPEED_REQUESTS: u64 = if cfg!(debug_assertions) { 2_000 } else { 500_000 };

/// Prints figures; asserts none. Run with `--release -- speed --nocapture`.
#[test]
fn speed_at_depth_32() {
    for (name, level, drives) in [("raid0", Level::Raid0, 1), ("raid5", Level::Raid5, 5)] {
        let rig = Rig::polling(level, drives, SPEED_DISK, Duration::from_millis(1));
        let export = rig.export(1);
        let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
        client.queues[0].set_used_notif_enabled(false);
        for (what, depth, write) in [("read", 1, false), ("read", 32, false), ("write", 32, true)] {
            let iops = measure(&mut client, depth, write);
            println!("{name} 4 KiB random {what}, depth {depth}: {iops} per second");
        }
        drop(export);
    }
}

fn measure(client: &mut Client, depth: usize, write: bool) -> u64 {
    let mut prng = Prng::from_seed(3);
    let mut submit = |client: &mut Client, slot: usize| {
        let offset = prng.below(SPEED_DISK / 4096) * 4096;
        if write {
            client.submit_write(0, offset, slot * 4096, 4096, slot);
        } else {
            client.submit_read(0, offset, slot * 4096, 4096, slot);
        }
    };
    #[expect(clippy::disallowed_methods, reason = "a benchmark")]
    let started = std::time::Instant::now();
    (0..depth).for_each(|slot| submit(client, slot));
    client.kick(0);
    let mut done = 0;
    let mut finished = Vec::with_capacity(depth);
    while done < SPEED_REQUESTS {
        finished.extend(client.queues[0].completions().map(|c| (c.context, c.ret)));
        if finished.is_empty() {
            std::hint::spin_loop();
            continue;
        }
        for (slot, result) in finished.drain(..) {
            assert_eq!(result, 0);
            done += 1;
            submit(client, slot);
        }
        client.kick(0);
    }
    let elapsed = started.elapsed();
    let mut left = depth;
    while left > 0 {
        left -= client.queues[0].completions().count();
    }
    (done as f64 / elapsed.as_secs_f64()) as u64
}
