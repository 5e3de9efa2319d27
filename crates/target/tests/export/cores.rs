//! Goal: queues of one export on two reactors serve one disk: every byte is where it was written,
//! whichever queue asks; and whatever a front end does while requests are under way, nothing is
//! lost, mixed up, or written to memory that it has taken away.
//! Method: an independent driver and a front end whose rings are made by hand; even queues are
//! served by the array's reactor, odd ones by the other.

use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_pool::volume::Volume;
use ashlar_target::export::Export;
use ashlar_target::vhost::VhostExport;
use vhost::VhostBackend;

use crate::driver::{Client, all_features};
use crate::front_end::{FrontEnd, within};
use crate::rig::{Rig, on_reactor, socket_path};

const POLLS: Duration = Duration::from_micros(50);
const BLOCK: usize = 4096;
const DATA: u64 = 8 << 20;
const KIND_OUT: u32 = 1;
const KIND_FLUSH: u32 = 4;

fn stamp(block: usize, generation: u8) -> Vec<u8> {
    let number = u32::try_from(block).unwrap().to_le_bytes();
    number.into_iter().chain([generation; BLOCK - 4]).collect()
}

/// Writes or reads blocks of the disk, block `n` by queue `(n + shift) % queues`, all at a time.
fn all_blocks(client: &mut Client, blocks: usize, shift: usize, write: bool) {
    let queues = client.queues.len();
    for start in (0..blocks).step_by(32) {
        for block in start..start + 32 {
            let (queue, at) = ((block + shift) % queues, block * BLOCK);
            match write {
                true => client.submit_write(queue, at as u64, at, BLOCK, block),
                false => client.submit_read(queue, at as u64, at, BLOCK, block),
            }
        }
        (0..queues).for_each(|queue| client.kick(queue));
        for queue in 0..queues {
            let mut left = (start..start + 32).filter(|b| (b + shift) % queues == queue).count();
            while left > 0 {
                let done = client.wait(queue);
                assert!(done.iter().all(|(_, result)| *result == 0));
                left -= done.len();
            }
        }
    }
}

#[test]
fn any_queue_reads_what_any_other_has_written() {
    const BLOCKS: usize = 256;
    for (level, drives, window) in [
        (Level::Raid5, 4, POLLS),
        (Level::Raid1, 2, Duration::ZERO),
        (Level::Raid6, 5, Duration::from_millis(20)),
    ] {
        let rig = Rig::spread(level, drives, 16 << 20, window);
        let export = rig.export(4);
        let socket = &export.spec().socket;
        let mut client = Client::connect(socket, 4, all_features(), BLOCKS * BLOCK);
        assert_eq!(export.status().unwrap().queues_of_parts, [2, 2]);
        for generation in 1..=3u8 {
            for block in 0..BLOCKS {
                let at = block * BLOCK;
                client.memory[at..at + BLOCK].copy_from_slice(&stamp(block, generation));
            }
            all_blocks(&mut client, BLOCKS, usize::from(generation), true);
            client.memory.fill(0xee);
            all_blocks(&mut client, BLOCKS, usize::from(generation) + 1, false);
            for block in 0..BLOCKS {
                let at = block * BLOCK;
                assert!(client.memory[at..at + BLOCK] == stamp(block, generation)[..], "{block}");
            }
        }
        let counters = export.status().unwrap().counters;
        assert_eq!((counters.writes, counters.reads, counters.errors), (768, 768, 0));
    }
}

#[test]
fn all_that_a_guest_can_ask_is_done_on_the_other_reactor() {
    let rig = Rig::spread(Level::Raid5, 4, 16 << 20, POLLS);
    let export = rig.export(2);
    let mut client = Client::connect(&export.spec().socket, 2, all_features(), 1 << 20);
    client.memory[..8192].fill(7);
    client.submit_write(1, 0, 0, 8192, 0);
    assert_eq!(client.finish(1), 0);
    let before: u64 = rig.flushes().iter().sum();
    client.queues[1].flush(0).unwrap();
    assert_eq!(client.finish(1), 0);
    assert!(rig.flushes().iter().sum::<u64>() > before, "nothing was flushed");
    client.queues[1].write_zeroes(4096, 4096, true, 0).unwrap();
    assert_eq!(client.finish(1), 0);
    assert!(client.read(0, 8192) == [[7; 4096], [0; 4096]].concat());
    // Pieces that direct I/O cannot fill, and a range that is not there.
    client.submit_read(1, 0, 513, 1024, 0);
    assert_eq!(client.finish(1), 0);
    assert!(client.memory[513..1537] == [7; 1024]);
    client.submit_read(1, 16 << 20, 0, 512, 0);
    assert!(client.finish(1) < 0);
    let status = export.status().unwrap();
    assert_eq!((status.counters.flushes, status.counters.errors), (1, 1));
    assert!(status.last_error.is_some_and(|error| error.contains("beyond the end")));
}

#[test]
fn a_volume_that_grows_grows_on_all_reactors() {
    let rig = Rig::spread(Level::Raid1, 2, 8 << 20, POLLS);
    // Only the other reactor serves it.
    let part = rig.parts().into_iter().skip(1).collect();
    let spec = rig.spec(socket_path(), 1);
    let export = VhostExport::start(part, spec).unwrap();
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
    client.submit_read(0, 8 << 20, 0, 512, 0);
    assert!(client.finish(0) < 0);
    drop(client);
    rig.resize(12 << 20);
    export.resized();
    let mut client = Client::connect(&export.spec().socket, 1, all_features(), 1 << 20);
    assert_eq!(client.transport.get_config().unwrap().capacity.to_native(), (12 << 20) / 512);
    assert!(client.read(8 << 20, 4096) == [0; 4096]);
}

/// Eight writes of a mebibyte each, on both queues.
fn many_writes(guest: &mut FrontEnd) {
    for slot in 0..8u16 {
        let queue = usize::from(slot % 2);
        let place = DATA + u64::from(slot) * (1 << 20);
        guest.request(
            queue,
            slot / 2 * 3,
            KIND_OUT,
            u64::from(slot) * 2048,
            (place, 1 << 20, false),
        );
        guest.offer(queue, slot / 2 * 3);
    }
    guest.kick(0);
    guest.kick(1);
}

#[test]
fn an_export_ends_in_order_while_requests_are_under_way() {
    let rig = Rig::spread(Level::Raid5, 5, 64 << 20, POLLS);
    for _ in 0..20 {
        let export = rig.export(2);
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        many_writes(&mut guest);
        drop(export);
    }
    // The reactors are well, and so is the disk.
    let export = rig.export(2);
    let mut client = Client::connect(&export.spec().socket, 2, all_features(), 1 << 20);
    client.write(0, &[1; 512]);
    client.submit_read(1, 0, 4096, 512, 0);
    assert_eq!(client.finish(1), 0);
    assert!(client.memory[4096..4608] == [1; 512]);
}

#[test]
fn a_guest_that_goes_leaves_nothing_under_way() {
    let rig = Rig::spread(Level::Raid5, 5, 64 << 20, POLLS);
    let export = rig.export(2);
    for _ in 0..20 {
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        many_writes(&mut guest);
        drop(guest);
        // The next one is served once all of the last one has ended.
        let mut guest = FrontEnd::started(&export.spec().socket, 2);
        guest.request(1, 0, KIND_FLUSH, 0, (0, 0, false));
        guest.offer(1, 0);
        guest.kick(1);
        guest.wait_used(1, 1);
    }
    assert_eq!(export.status().unwrap().counters.errors, 0);
}

#[test]
fn memory_is_changed_while_requests_are_under_way() {
    let rig = Rig::spread(Level::Raid5, 5, 64 << 20, POLLS);
    let export = rig.export(2);
    let mut guest = FrontEnd::started(&export.spec().socket, 2);
    for _ in 0..20 {
        many_writes(&mut guest);
        guest.front.set_mem_table(&[guest.region()]).unwrap();
        for queue in 0..2 {
            guest.wait_used(queue, 4);
        }
    }
    assert_eq!(export.status().unwrap().counters.errors, 0);
    assert_eq!(export.status().unwrap().counters.writes, 160);
}

#[test]
fn a_volume_that_is_let_go_is_let_go_on_its_own_reactor_too() {
    let rig = Rig::spread(Level::Raid1, 2, 8 << 20, POLLS);
    let users = |rig: &Rig| {
        let key = rig.volume;
        on_reactor(&rig.core, move |reactor| async move {
            let volume = reactor.get(key).unwrap();
            let Volume::Thick(thick) = &*volume else { panic!("far") };
            std::rc::Rc::strong_count(thick)
        })
    };
    let with_other = users(&rig);
    rig.withdraw_others();
    let alone = within(10_000, || users(&rig) == with_other - 1);
    assert!(alone, "{} of {with_other} users are left", users(&rig));
}
