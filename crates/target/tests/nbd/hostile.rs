//! Clients that break the rules lose their connection, and nobody else notices.

use std::time::{Duration, Instant};

use ashlar_format::array_superblock::Level;
use ashlar_reactor::prng::Prng;
use ashlar_target::export::Export;
use ashlar_target::limits::{Rate, Rates};

use crate::client::{
    Client, DISCONNECT, EXPORT_NAME, FLUSH, GO, READ, WRITE, WRITE_ZEROES, option_head, request,
};
use crate::rig::Rig;
use crate::{DATA, Served, serve, serve_limited, soon};

/// A good client goes on all the while.
struct Peaceful(Client);

impl Peaceful {
    fn new(served: &Served) -> Peaceful {
        let mut client = Client::connect(&served.socket).0;
        assert_eq!(client.write(0, &[7; 4096]), 0);
        Peaceful(client)
    }

    fn goes_on(&mut self) {
        assert!(self.0.read(0, 4096).data == [7; 4096]);
    }
}

#[test]
fn the_protocol_is_kept_or_the_connection_ends() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let mut peaceful = Peaceful::new(&served);
    let attacks: [(&str, &dyn Fn() -> Client); 8] = [
        ("unknown client flags", &|| {
            let mut client = Client::mute(&served.socket);
            client.send(&0x8000_0003u32.to_be_bytes());
            client
        }),
        ("an option begins with", &|| {
            let mut client = Client::polite(&served.socket);
            client.send(&[0; 16]);
            client
        }),
        ("an option of 4294967295 bytes", &|| {
            let mut client = Client::polite(&served.socket);
            client.send(&option_head(GO, u32::MAX));
            client
        }),
        ("it sends options", &|| {
            let mut client = Client::polite(&served.socket);
            for _ in 0..100 {
                if client.try_send(&option_head(77, 0)).is_err() {
                    break;
                }
            }
            client
        }),
        ("it asked for export \"nothing\"", &|| {
            let mut client = Client::polite(&served.socket);
            client.option(EXPORT_NAME, b"nothing");
            client
        }),
        ("a request begins with 0x00000000", &|| {
            let mut client = Client::connect(&served.socket).0;
            client.send(&[0; 28]);
            client
        }),
        ("a write of 33554944 bytes", &|| {
            let mut client = Client::connect(&served.socket).0;
            client.send(&request(WRITE, 0, 1, 0, (32 << 20) + 512));
            client
        }),
        ("a write of 4294967295 bytes", &|| {
            let mut client = Client::connect(&served.socket).0;
            client.send(&request(WRITE, 0, 1, 0, u32::MAX));
            client
        }),
    ];
    for (trouble, attack) in attacks {
        assert!(attack().is_cut_off(), "{trouble}");
        assert!(soon(|| served.trouble().contains(trouble)), "{trouble}: {}", served.trouble());
        peaceful.goes_on();
    }
    assert!(soon(|| served.serving() == [1]));
}

#[test]
fn noise_ends_connections_and_nothing_else() {
    let rig = Rig::new(Level::Raid5, 4, DATA);
    let served = serve(&rig);
    let mut peaceful = Peaceful::new(&served);
    let mut prng = Prng::from_seed(1);
    for round in 0..300u64 {
        // Right up to somewhere, then anything; with a hang-up in the middle.
        let mut client = match round % 3 {
            0 => Client::mute(&served.socket),
            1 => Client::polite(&served.socket),
            _ => Client::connect(&served.socket).0,
        };
        let mut noise: Vec<u8> = (0..prng.index(4000)).map(|_| prng.index(256) as u8).collect();
        let head = match round % 3 {
            1 => option_head(prng.index(12) as u32, prng.index(300) as u32).to_vec(),
            _ => {
                let (command, len) = (prng.index(9) as u16, prng.index(5000) as u32);
                // Not where the other one looks.
                let offset = DATA / 2 + prng.index(1 << 20) as u64;
                request(command, prng.index(32) as u16, round, offset, len).to_vec()
            }
        };
        noise.splice(0..0, head);
        let _ = client.try_send(&noise);
    }
    peaceful.goes_on();
    assert!(soon(|| served.serving() == [1]), "{:?}", served.serving());
}

/// Asks for more than sockets hold, and fetches nothing.
#[test]
fn who_does_not_fetch_answers_stops_only_itself() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let mut peaceful = Peaceful::new(&served);
    let (mut client, _) = Client::connect(&served.socket);
    for at in 0..100 {
        client.send(&request(READ, 0, at, 0, DATA as u32));
    }
    for _ in 0..100 {
        peaceful.goes_on();
    }
    let reads = served.export.status().unwrap().counters.read_bytes;
    assert!(reads < 64 << 20, "{reads} bytes are in memory, or were");
    #[expect(clippy::disallowed_methods, reason = "no reactor's time")]
    let began = Instant::now();
    drop(served);
    assert!(began.elapsed() < Duration::from_secs(15), "its farewell is short");
}

#[test]
fn who_says_nothing_has_to_go() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let (mut patient, _) = Client::connect(&served.socket);
    let mut silent = [Client::mute(&served.socket), Client::polite(&served.socket)];
    for client in &mut silent {
        assert!(client.is_cut_off());
    }
    assert!(served.trouble().contains("did not say what it wants"), "{}", served.trouble());
    // Who is served may be silent for as long as it likes.
    assert_eq!(patient.read(0, 512).error, 0);
}

#[test]
fn there_are_only_so_many_connections() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let mut clients: Vec<Client> = (0..24).map(|_| Client::connect(&served.socket).0).collect();
    assert!(Client::mute(&served.socket).is_cut_off());
    assert!(served.trouble().contains("turned away"), "{}", served.trouble());
    assert!(clients.iter_mut().all(|client| client.read(0, 512).error == 0));
    // There is room again.
    clients.pop();
    assert!(soon(|| served.serving() == [23]));
    assert_eq!(Client::connect(&served.socket).0.read(0, 512).error, 0);
}

#[test]
fn who_says_nothing_keeps_nobody_out() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = serve(&rig);
    let mut clients = Vec::new();
    // Several times as many as there may be: the oldest go.
    let mut silent: Vec<Client> = (0..40).map(|_| Client::mute(&served.socket)).collect();
    for _ in 0..8 {
        clients.push(Client::connect(&served.socket).0);
    }
    assert!(silent.iter_mut().take(24).all(Client::is_cut_off));
    for _ in 0..40 {
        silent.push(Client::mute(&served.socket));
    }
    while clients.len() < 24 {
        clients.push(Client::connect(&served.socket).0);
    }
    assert!(clients.iter_mut().all(|client| client.read(0, 512).error == 0));
    assert!(Client::mute(&served.socket).is_cut_off(), "all are served");
}

/// Writes have to wait for hours, but for the first.
fn slow(rig: &Rig) -> Served {
    let write = Rate { requests_per_second: None, bytes_per_second: Some(1) };
    serve_limited(rig, Rates { write, ..Rates::default() })
}

#[test]
fn writes_that_wait_for_their_turn_stop_no_reads() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = slow(&rig);
    let (mut client, _) = Client::connect(&served.socket);
    // As many as there is room for, by number and by length; the first may go at once.
    client.ask(WRITE, 0, 0, 512, &[1; 512]);
    for at in 1..100 {
        client.ask(WRITE, 0, at * 4096, 512, &[1; 512]);
    }
    for at in 0..14 {
        client.ask(WRITE, 0, 1 << 20, 1 << 20, &[at; 1 << 20]);
    }
    for at in 0..15 {
        client.ask(WRITE_ZEROES, 0, 4096 * at, 512, &[]);
    }
    assert_eq!(client.reply(|_| 0).1.error, 0);
    for at in 1..200 {
        assert!(client.read(at * 4096, 4096).data == [0; 4096]);
        assert_eq!(client.command(FLUSH, 0, 0, 0), 0);
    }
    assert_eq!(served.export.status().unwrap().counters.writes, 1);
}

#[test]
fn what_waits_for_its_turn_ends_with_its_client() {
    let rig = Rig::new(Level::Raid1, 2, DATA);
    let served = slow(&rig);
    for broken in [false, true] {
        // More than are taken up: the end of this one is behind what nobody reads.
        for requests in [1, 100, 200] {
            let (mut client, _) = Client::connect(&served.socket);
            for at in 0..requests {
                client.ask(WRITE, 0, at * 512, 512, &[1; 512]);
            }
            if broken && requests < 128 {
                client.send(&[0; 28]);
                assert!(client.is_cut_off());
            }
            drop(client);
            assert!(soon(|| served.serving() == [0]), "{broken} {requests}");
        }
    }
    let counters = served.export.status().unwrap().counters;
    assert_eq!((counters.writes, counters.errors), (1, 0), "the first may go at once");
    // Goodbyes are something else: what was asked for before is done.
    let (mut client, _) = Client::connect(&served.socket);
    client.ask(WRITE, 0, DATA - 512, 512, &[5; 512]);
    client.ask(DISCONNECT, 0, 0, 0, &[]);
    drop(client);
    assert!(soon(|| served.serving() == [1]));
    served.limits.set(Rates::default());
    assert!(soon(|| served.serving() == [0]));
    let (mut client, _) = Client::connect(&served.socket);
    assert!(client.read(DATA - 512, 512).data == [5; 512]);
}
