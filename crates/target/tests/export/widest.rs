//! As much as a front end may ask for: all queues at a time, and requests of as many pieces as one
//! may have.

use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;
use ashlar_target::vhost::QUEUES_MAX;

use crate::driver::{Client, all_features};
use crate::front_end::{FrontEnd, INDIRECT, NEXT, WRITE};
use crate::rig::Rig;

const BLOCK: usize = 4096;
const KIND_IN: u32 = 0;
const KIND_OUT: u32 = 1;
/// What a guest is told that it may use.
const SEGMENTS: u16 = 126;
const TABLE: u64 = 4 << 20;
const HEADER: u64 = 5 << 20;
const STATUS: u64 = HEADER + 64;
const WRITTEN: u64 = 6 << 20;
const READ: u64 = 8 << 20;

#[test]
fn all_queues_are_served_at_a_time_by_several_reactors() {
    let queues = usize::from(QUEUES_MAX);
    let rig = Rig::spread(Level::Raid5, 3, 16 << 20, Duration::from_micros(50));
    let export = rig.export(QUEUES_MAX);
    let bytes = queues * BLOCK;
    let mut client = Client::connect(&export.spec().socket, queues, all_features(), 2 * bytes);
    for (i, block) in client.memory[..bytes].chunks_mut(BLOCK).enumerate() {
        block.fill(1 + i as u8);
    }
    for queue in 0..queues {
        client.submit_write(queue, (queue * BLOCK) as u64, queue * BLOCK, BLOCK, queue);
    }
    all_done(&mut client);
    assert_eq!(export.status().unwrap().queues_active(), QUEUES_MAX);
    // Each reads what another has written.
    for queue in 0..queues {
        let other = (queue + queues / 2 + 1) % queues;
        let into = bytes + other * BLOCK;
        client.submit_read(queue, (other * BLOCK) as u64, into, BLOCK, queue);
    }
    all_done(&mut client);
    assert!(client.memory[..bytes] == client.memory[bytes..2 * bytes]);
}

fn all_done(client: &mut Client) {
    let queues = client.queues.len();
    (0..queues).for_each(|queue| client.kick(queue));
    (0..queues).for_each(|queue| assert_eq!(client.wait(queue), [(queue, 0)]));
}

/// Offers a request whose data is in this many pieces, each in a page of its own.
fn ask(guest: &mut FrontEnd, kind: u32, base: u64, pieces: &[(u64, u32)]) {
    let mut header = [0; 16];
    header[..4].copy_from_slice(&kind.to_le_bytes());
    guest.put(HEADER, &header);
    guest.put(STATUS, &[0xee]);
    let flags = if kind == KIND_IN { NEXT | WRITE } else { NEXT };
    guest.describe(TABLE, 0, HEADER, 16, NEXT, 1);
    for (index, (at, len)) in (1..).zip(pieces) {
        guest.describe(TABLE, index, base + at, *len, flags, index + 1);
    }
    let last = pieces.len() as u16 + 1;
    guest.describe(TABLE, last, STATUS, 1, WRITE, 0);
    let bytes = 16 * (u32::from(last) + 1);
    guest.describe(FrontEnd::ring(0), 0, TABLE, bytes, INDIRECT, 0);
    guest.offer(0, 0);
    guest.kick(0);
    guest.wait_used(0, 1);
    assert_eq!(guest.get(STATUS, 1), [0], "{kind}");
}

/// Pieces that neither begin nor end at sectors, one behind the other in the request and in any
/// order in memory.
#[test]
fn a_request_of_all_pieces_that_it_may_have_is_whole() {
    let rig = Rig::new(Level::Raid5, 3, 16 << 20);
    let export = rig.export(1);
    let mut guest = FrontEnd::started(&export.spec().socket, 1);
    let place = |i: u16| u64::from(i * 37 % SEGMENTS) * 8192 + u64::from(i % 5);
    let len = |i: u16| if i.is_multiple_of(2) { 100 } else { 924 };
    let pieces: Vec<(u64, u32)> = (0..SEGMENTS).map(|i| (place(i), len(i))).collect();
    let mut all = Vec::new();
    for (i, (at, len)) in (0u8..).zip(&pieces) {
        let bytes: Vec<u8> = (0..*len).map(|byte| i ^ byte as u8).collect();
        guest.put(WRITTEN + at, &bytes);
        all.extend(bytes);
    }
    ask(&mut guest, KIND_OUT, WRITTEN, &pieces);
    ask(&mut guest, KIND_IN, READ, &[(0, all.len() as u32)]);
    assert!(guest.get(READ, all.len()) == all);
    guest.put(READ, &vec![0; 2 << 20]);
    ask(&mut guest, KIND_IN, READ, &pieces);
    for (at, len) in &pieces {
        let len = *len as usize;
        assert_eq!(guest.get(READ + at, len), guest.get(WRITTEN + at, len));
    }
    assert_eq!(export.status().unwrap().counters.errors, 0);
}
