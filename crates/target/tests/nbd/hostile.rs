//! Clients that break the rules lose their connection, and nobody else notices.

use std::time::{Duration, Instant};

use ashlar_format::array_superblock::Level;
use ashlar_reactor::prng::Prng;
use ashlar_target::export::Export;

use crate::client::{Client, EXPORT_NAME, GO, READ, WRITE, option_head, request};
use crate::rig::Rig;
use crate::{DATA, Served, serve, soon};

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
    let mut clients: Vec<Client> = (0..16).map(|_| Client::connect(&served.socket).0).collect();
    assert!(Client::mute(&served.socket).is_cut_off());
    assert!(served.trouble().contains("turned away"), "{}", served.trouble());
    assert!(clients.iter_mut().all(|client| client.read(0, 512).error == 0));
    // There is room again.
    clients.pop();
    assert!(soon(|| served.serving() == [15]));
    assert_eq!(Client::connect(&served.socket).0.read(0, 512).error, 0);
}
