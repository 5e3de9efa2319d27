//! What clients may rely on.

use std::collections::BTreeMap;

use ashlar_format::array_superblock::Level;
use ashlar_target::export::Export;
use ashlar_target::limits::{RateLimits, Rates};
use ashlar_target::nbd::{NbdExport, NbdSpec};
use ashlar_target::unix_socket::Access;
use std::time::Duration;

use crate::client::{
    CACHE, Client, DISCONNECT, FAST_ZERO, FLUSH, FUA, READ, TRIM, WRITE, WRITE_ZEROES,
};
use crate::rig::Rig;
use crate::{DATA, serve, soon};

const INVALID: u32 = 22;
const NO_SPACE: u32 = 28;
const UNSUPPORTED: u32 = 95;

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    (0..len as u64).map(|at| (at.wrapping_mul(2_654_435_761) >> 7) as u8 ^ seed as u8).collect()
}

#[test]
fn what_is_written_is_read() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let (mut unix, bytes) = Client::connect(&served.socket);
    let (mut tcp, same) = Client::connect_tcp(served.export.address().unwrap());
    assert_eq!((bytes, same), (DATA, DATA));
    // Small ones, those that are received in place, and one of several pieces of memory.
    for (round, len) in [512, 4096, 15 << 10, 16 << 10, 100 << 10, 3 << 20].into_iter().enumerate()
    {
        let (offset, data) = (round as u64 * 512, pattern(round as u64, len));
        assert_eq!(unix.write(offset, &data), 0);
        let reply = tcp.read(offset, len as u32);
        assert!(reply.error == 0 && reply.data == data, "{len}");
    }
    assert_eq!(unix.command(WRITE_ZEROES, 0, 4096, 8192), 0);
    assert!(tcp.read(4096, 8192).data == [0; 8192]);
    assert_eq!(unix.command(TRIM, 0, 0, DATA as u32), 0);
    assert_eq!(unix.command(CACHE, 0, 0, DATA as u32), 0);
    assert!(tcp.read(0, 65536).data == [0; 65536]);
    let counters = served.export.status().unwrap().counters;
    assert_eq!((counters.writes, counters.reads, counters.discards), (6, 8, 2));
}

/// Clients that copy disks ask like this, and write only where it is refused.
#[test]
fn zeroing_that_would_be_slow_is_refused_where_it_must_be_fast() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let (mut client, _) = Client::connect(&served.socket);
    let fast = |client: &mut Client, at, len| client.command(WRITE_ZEROES, FAST_ZERO, at, len);
    assert_eq!(fast(&mut client, 4096, 4096), 0, "nothing was written there");
    let data = pattern(1, 2 << 20);
    assert_eq!(client.write(0, &data), 0);
    assert_eq!(fast(&mut client, 4096, 4096), UNSUPPORTED);
    assert!(client.read(0, 2 << 20).data == data, "it was not done");
    assert_eq!(fast(&mut client, 512, 1 << 20), 0, "nearly all of it are whole stripes");
    assert!(client.read(512, 1 << 20).data == [0; 1 << 20]);
    assert_eq!(fast(&mut client, DATA - 512, 1024), NO_SPACE);
    assert_eq!(client.command(WRITE_ZEROES, 0, 4096, 4096), 0);
    assert_eq!(served.trouble(), "");
}

#[test]
fn many_requests_at_a_time_are_all_answered() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let (mut client, _) = Client::connect(&served.socket);
    let mut asked = BTreeMap::new();
    // More than are served at a time, of one and the other kind, some of them wrong.
    for round in 0..400u64 {
        let offset = round % 100 * 4096;
        let data = pattern(round % 100, 4096);
        let cookie = client.ask(WRITE, 0, offset, 4096, &data);
        asked.insert(cookie, (0, None));
        let cookie = client.ask(READ, 0, DATA - 4096 + round * 512, 8192, &[]);
        asked.insert(cookie, (INVALID, None));
    }
    let answer = |client: &mut Client, asked: &mut BTreeMap<u64, (u32, Option<Vec<u8>>)>| {
        while !asked.is_empty() {
            let reads = |cookie| asked.get(&cookie).and_then(|(_, data)| data.as_ref());
            let (cookie, reply) = client.reply(|cookie| reads(cookie).map_or(0, Vec::len));
            let (error, data) = asked.remove(&cookie).expect("answered once");
            assert_eq!(reply.error, error);
            assert!(reply.data == data.unwrap_or_default());
        }
    };
    answer(&mut client, &mut asked);
    for round in 0..100 {
        let cookie = client.ask(READ, 0, round * 4096, 4096, &[]);
        asked.insert(cookie, (0, Some(pattern(round, 4096))));
    }
    answer(&mut client, &mut asked);
}

#[test]
fn what_is_beyond_the_end_is_refused_and_the_rest_goes_on() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let (mut client, _) = Client::connect(&served.socket);
    assert_eq!(client.write(DATA - 512, &[1; 1024]), NO_SPACE);
    assert_eq!(client.read(DATA, 512).error, INVALID);
    assert_eq!(client.write(1, &[1; 512]), INVALID);
    assert_eq!(client.command(WRITE_ZEROES, 0, DATA, 512), NO_SPACE);
    assert_eq!(client.command(99, 0, 0, 512), INVALID);
    assert_eq!(client.write(DATA - 512, &[1; 512]), 0);
    assert_eq!(served.export.status().unwrap().counters.errors, 5);
    assert_eq!(served.trouble(), "");
}

/// More often than the array flushes them for its own sake.
#[test]
fn flushes_and_fua_reach_the_drives() {
    const ROUNDS: u64 = 200;
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let (mut client, _) = Client::connect(&served.socket);
    let mut flushes = |with: &mut dyn FnMut(&mut Client, u64)| {
        let before: u64 = rig.flushes().iter().sum();
        for round in 0..ROUNDS {
            with(&mut client, round);
        }
        rig.flushes().iter().sum::<u64>() - before
    };
    let none = flushes(&mut |client, round| {
        assert_eq!(client.write(round * 4096, &[1; 4096]), 0);
    });
    let asked = flushes(&mut |client, round| {
        assert_eq!(client.write(round * 4096, &[1; 4096]), 0);
        assert_eq!(client.command(FLUSH, 0, 0, 0), 0);
    });
    let by_flag = flushes(&mut |client, round| {
        assert_eq!(client.write_with(FUA, round * 4096, &[1; 4096]), 0);
    });
    assert!(
        none < ROUNDS && asked >= 2 * ROUNDS && by_flag >= 2 * ROUNDS,
        "{none} {asked} {by_flag}"
    );
}

#[test]
fn connections_are_spread_over_reactors_and_see_one_volume() {
    let rig = Rig::spread(Level::Raid5, 4, DATA, Duration::from_micros(50));
    let served = serve(&rig);
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(Client::connect(&served.socket).0);
    }
    assert!(soon(|| served.serving() == [2, 2]), "{:?}", served.serving());
    for round in 0..64u64 {
        let data = pattern(round, 4096);
        let at = round as usize;
        assert_eq!(clients[at % 4].write(round * 4096, &data), 0);
        assert_eq!(clients[(at + 1) % 4].command(FLUSH, 0, 0, 0), 0);
        assert!(clients[(at + 2) % 4].read(round * 4096, 4096).data == data);
    }
    clients.truncate(1);
    assert!(soon(|| served.serving().iter().sum::<u16>() == 1));
    drop(served);
    rig.withdraw_others();
}

#[test]
fn a_new_size_is_seen_by_who_connects_again() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let (mut old, bytes) = Client::connect(&served.socket);
    assert_eq!((bytes, old.read(DATA, 512).error), (DATA, INVALID));
    rig.resize(DATA + (1 << 20));
    served.export.resized();
    let (_, bytes) = Client::connect(&served.socket);
    assert_eq!(bytes, DATA + (1 << 20));
    assert_eq!(old.read(DATA, 512).error, 0);
}

#[test]
fn goodbyes_are_answered_by_an_end_after_all_replies() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let (mut client, _) = Client::connect(&served.socket);
    let asked: Vec<u64> = (0..50).map(|at| client.ask(READ, 0, at * 4096, 4096, &[])).collect();
    client.ask(DISCONNECT, 0, 0, 0, &[]);
    let mut answered: Vec<u64> = asked.iter().map(|_| client.reply(|_| 4096).0).collect();
    answered.sort_unstable();
    assert_eq!(answered, asked);
    assert!(client.is_cut_off());
    assert!(soon(|| served.serving() == [0]));
}

#[test]
fn an_export_that_stops_answers_what_is_under_way() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    for _ in 0..5 {
        let served = serve(&rig);
        let socket = served.socket.clone();
        let (mut client, _) = Client::connect(&socket);
        let data = pattern(3, 1 << 20);
        assert_eq!(client.write(0, &data), 0);
        for at in 0..8 {
            client.ask(READ, 0, at * 4096, 65536, &[]);
        }
        let first = client.reply(|_| 65536);
        assert_eq!(first.1.error, 0);
        let stop = std::thread::spawn(move || drop(served));
        // Those that were taken up; no half of any.
        while client.next_reply(65536).is_some() {}
        stop.join().unwrap();
        assert!(!socket.exists());
    }
    // What it takes to listen there again is there.
    let served = serve(&rig);
    let start = |socket, listen| {
        let limits = RateLimits::new(Rates::default());
        let (name, access) = ("b".into(), Access::default());
        NbdExport::start(rig.parts(), NbdSpec { name, socket, access, listen, limits })
    };
    let refused = start(Some(served.socket.clone()), None).err().unwrap();
    assert!(refused.to_string().contains("in use"), "{refused}");
    let refused = start(None, served.export.address()).err().unwrap();
    assert!(refused.to_string().contains("cannot listen"), "{refused}");
    assert!(start(None, None).is_err());
}
