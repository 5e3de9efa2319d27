//! Hosts that break the rules: cut off with the reason where there is one to be told, and nobody
//! else notices.

use std::io::Write;
use std::net::{Ipv4Addr, Shutdown, SocketAddrV4, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use ashlar_reactor::nvme::command::{Command, Sgl, Status};
use ashlar_reactor::nvme::fabrics::{ANY_CONTROLLER, DISCOVERY_NQN};
use ashlar_reactor::nvme::pdu::{Digests, Kind, R2t, header};
use ashlar_reactor::prng::Prng;
use ashlar_target::export::Export;

use crate::host::{Choice, DataPart, End, HOST, Host, Wire, hello};
use crate::{Offered, SUBSYSTEM};

/// Another host, which must not notice anything.
struct Neighbour {
    host: Host,
    prng: Prng,
}

const NEIGHBOUR: &str = "nqn.2026-01.example:neighbour";
/// Blocks that are the neighbour's.
const ITS: u64 = 1024;

impl Neighbour {
    fn new(offered: &Offered) -> Neighbour {
        let names = (SUBSYSTEM, NEIGHBOUR);
        let host = Host::named(offered.at(), names, Choice::PLAIN);
        Neighbour { host, prng: Prng::from_seed(1) }
    }

    fn is_well(&mut self) {
        let block = ITS + self.prng.below(64);
        let data: Vec<u8> = (0..4096).map(|_| self.prng.below(256) as u8).collect();
        self.host.write(1, block, &data);
        assert_eq!(self.host.read(1, block, 8), data);
    }
}

/// Why the connection ends.
fn end_of(wire: &mut Wire) -> End {
    loop {
        match wire.receive_pdu() {
            Ok(_) => {}
            Err(end) => return end,
        }
    }
}

#[test]
fn faults_are_told() {
    let offered = Offered::open();
    let mut neighbour = Neighbour::new(&offered);
    let both = Choice { digests: Digests { header: true, data: true }, ..Choice::PLAIN };
    let read = Command::read(1, 0, 8).with_sgl(Sgl::Transport { bytes: 4096 }).with_id(9);

    // A header's digest that does not fit.
    let mut host = Host::connect(offered.at(), SUBSYSTEM, both);
    let mut bytes = host.io.capsule(read, &[]);
    bytes[72] ^= 1;
    host.io.send_raw(&bytes);
    assert!(matches!(end_of(&mut host.io), End::Term(3, _)));
    neighbour.is_well();
    let told = offered.export.status().unwrap().last_error.unwrap();
    assert!(told.contains("digest") && told.contains(HOST), "{told}");

    // Data's digest that does not fit is of its command only.
    let mut host = Host::connect(offered.at(), SUBSYSTEM, both);
    let write = Command::write(1, 0, 8).with_sgl(Sgl::InCapsule { offset: 0, bytes: 4096 });
    let mut bytes = host.io.capsule(write.with_id(9), &[1; 4096]);
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    host.io.send_raw(&bytes);
    assert_eq!(host.io.wait(9).unwrap().0.status, Status::TRANSIENT_TRANSPORT);
    assert_eq!(host.read(1, 0, 8), [0; 4096], "and nothing was written");

    // More commands than the queue has entries: 33 that wait for their data.
    for i in 0..33 {
        let write = Command::write(1, 0, 8).with_sgl(Sgl::Transport { bytes: 4096 });
        let bytes = host.io.capsule(write.with_id(100 + i), &[]);
        host.io.send_raw(&bytes);
    }
    assert_eq!(end_of(&mut host.io), End::Term(5, 0));
    neighbour.is_well();

    // What only targets send, what comes twice, what is nothing.
    for (first, reason) in [(1_u8, 1), (0, 2), (0x42, 1)] {
        let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
        let mut bytes = hello(Choice::PLAIN);
        bytes[0] = first;
        host.io.send_raw(&bytes);
        assert!(matches!(end_of(&mut host.io), End::Term(its, _) if its == reason), "{first}");
    }
    neighbour.is_well();
    offered.end();
}

/// Sends a write, and gives `answer` to its R2T.
fn write_and(offered: &Offered, answer: impl FnOnce(&mut Wire, DataPart)) -> End {
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let write = Command::write(1, 0, 16).with_sgl(Sgl::Transport { bytes: 8192 });
    let bytes = host.io.capsule(write.with_id(5), &[]);
    host.io.send_raw(&bytes);
    let pdu = host.io.receive_pdu().unwrap();
    assert_eq!(pdu.kind, Kind::R2t);
    let ask: R2t = header(&pdu.head).unwrap();
    answer(&mut host.io, DataPart { command: 5, tag: ask.tag.get(), at: 0 });
    end_of(&mut host.io)
}

#[test]
fn data_that_nobody_asked_for_is_refused() {
    let offered = Offered::open();
    let send = |change: fn(DataPart) -> DataPart, len: usize, last: bool| {
        write_and(&offered, move |wire, part| {
            let bytes = wire.data_pdu(change(part), &vec![1; len], last);
            wire.send_raw(&bytes);
        })
    };
    fn same(part: DataPart) -> DataPart {
        part
    }
    assert_eq!(send(same, 8704, true), End::Term(4, 0), "too long");
    assert_eq!(send(same, 4096, true), End::Term(4, 0), "too short");
    assert_eq!(send(|its| DataPart { at: 512, ..its }, 512, false), End::Term(4, 0));
    assert_eq!(send(|its| DataPart { tag: its.tag ^ 1, ..its }, 512, false), End::Term(1, 10));
    assert_eq!(send(|its| DataPart { command: 6, ..its }, 512, false), End::Term(1, 8));
    // What it has asked for and never got was not written.
    let mut neighbour = Neighbour::new(&offered);
    assert_eq!(neighbour.host.read(1, 0, 16), [0; 8192]);
    neighbour.is_well();
    offered.end();
}

#[test]
fn those_who_leave_in_the_middle_leave_nothing() {
    let offered = Offered::open();
    let mut neighbour = Neighbour::new(&offered);
    for cut in [1, 8, 71, 72, 73, 4000] {
        let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
        let write = Command::write(1, 0, 8).with_sgl(Sgl::InCapsule { offset: 0, bytes: 4096 });
        let bytes = host.io.capsule(write.with_id(5), &[1; 4096]);
        host.io.send_raw(&bytes[..cut]);
        host.io.stream.shutdown(Shutdown::Write).unwrap();
        assert_eq!(end_of(&mut host.io), End::Closed, "{cut}");
    }
    let end = write_and(&offered, |wire, part| {
        let bytes = wire.data_pdu(part, &[1; 8192], true);
        wire.send_raw(&bytes[..5000]);
        wire.stream.shutdown(Shutdown::Write).unwrap();
    });
    assert_eq!(end, End::Closed);
    assert_eq!(neighbour.host.read(1, 0, 16), [0; 8192]);
    neighbour.is_well();
    offered.end();
}

#[test]
fn who_does_not_introduce_itself_is_told() {
    let offered = Offered::open();
    let mut wrong = hello(Choice::PLAIN);
    wrong[8] = 1;
    let mut wide = hello(Choice::PLAIN);
    wide[10] = 32;
    let cases =
        [(wrong, End::Term(6, 8)), (wide, End::Term(1, 10)), (vec![4; 128], End::Term(1, 2))];
    for (bytes, expected) in cases {
        let mut wire = Wire::open(offered.at(), Choice::PLAIN);
        wire.stream = TcpStream::connect(offered.at()).unwrap();
        wire.send_raw(&bytes);
        assert_eq!(end_of(&mut wire), expected);
    }
    // Another command than Connect.
    let mut wire = Wire::open(offered.at(), Choice::PLAIN);
    let bytes = wire.capsule(Command::keep_alive(), &[]);
    wire.send_raw(&bytes);
    assert_eq!(end_of(&mut wire), End::Term(2, 0));
    offered.end();
}

#[test]
fn a_silent_host_is_given_up() {
    let offered = Offered::open();
    let choice = Choice { keep_alive_ms: 2000, ..Choice::PLAIN };
    let mut host = Host::connect(offered.at(), SUBSYSTEM, choice);
    let longer = Choice { keep_alive_ms: 5000, ..Choice::PLAIN };
    let mut lively = Host::named(offered.at(), (SUBSYSTEM, NEIGHBOUR), longer);
    // The lively one says so as often as it has to, for as long as the other is waited for.
    host.admin.stream.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    while end_of(&mut host.admin) == End::Silent {
        assert!(lively.admin.run(Command::keep_alive(), 0).0.is_success());
    }
    assert!(host.io.receive_pdu().is_err(), "all of its queues go");
    assert!(lively.admin.run(Command::keep_alive(), 0).0.is_success());
    let told = offered.export.status().unwrap().last_error.unwrap();
    assert!(told.contains("no sign of life"), "{told}");
    offered.end();
}

#[test]
fn who_fetches_no_answers_is_not_listened_to() {
    let offered = Offered::open();
    let mut neighbour = Neighbour::new(&offered);
    let host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    // Else the kernel takes some ten MiB of answers before it lets the target wait. A window that
    // is made smaller later than this has it drop what tells of sent commands, too.
    let stream = connect_after(&offered, |socket| {
        rustix::net::sockopt::set_socket_recv_buffer_size(socket, 64 << 10).unwrap();
    });
    let mut deaf = Wire::over(stream, Choice::PLAIN);
    deaf.connect((SUBSYSTEM, HOST), 2, host.controller).unwrap();
    // Each time half a queue of commands, of which the last leaves a mark: none is sent before the
    // target has taken up the ones before.
    let mut unknown = Command::flush(1);
    unknown.dwords[0] |= 0x7f;
    let unknown = deaf.capsule(unknown.with_id(1), &[]).repeat(15);
    let in_capsule = Sgl::InCapsule { offset: 0, bytes: 512 };
    let marks = Command::write(1, 0, 1).with_sgl(in_capsule).with_id(2);
    let mut rounds = 0u64;
    loop {
        rounds += 1;
        let mark: Vec<u8> = rounds.to_le_bytes().repeat(64);
        let bytes = [unknown.clone(), deaf.capsule(marks, &mark)].concat();
        deaf.stream.write_all(&bytes).unwrap();
        let late = now() + Duration::from_secs(1);
        if !std::iter::repeat_with(|| neighbour.host.read(1, 0, 1) == mark)
            .take_while(|_| now() < late)
            .any(|is_marked| is_marked)
        {
            break;
        }
        assert!(
            rounds < 50_000,
            "the answers to {rounds} rounds are held, and nobody fetches them"
        );
    }
    neighbour.is_well();
    // Once they are fetched it goes on, and none is missing.
    for _ in 0..16 * rounds {
        deaf.next().unwrap();
    }
    offered.end();
}

/// Anybody may ask a discovery controller: what waits to be answered is no more than its command.
#[test]
fn who_asks_for_much_and_fetches_nothing_fills_no_memory() {
    const HOSTS: usize = 16;
    let offered = Offered::open();
    let mut neighbour = Neighbour::new(&offered);
    let before = resident_bytes();
    let deaf = std::iter::repeat_with(|| {
        let stream = connect_after(&offered, |socket| {
            rustix::net::sockopt::set_socket_recv_buffer_size(socket, 64 << 10).unwrap();
        });
        let mut deaf = Wire::over(stream, Choice::PLAIN);
        deaf.connect((DISCOVERY_NQN, HOST), 0, ANY_CONTROLLER).unwrap();
        deaf.enable();
        let much = Command::identify_controller().with_sgl(Sgl::Transport { bytes: 1 << 20 });
        for id in 1..32 {
            deaf.send_raw(&deaf.capsule(much.with_id(id), &[]));
        }
        deaf
    });
    let _deaf: Vec<Wire> = deaf.take(HOSTS).collect();
    (0..300).for_each(|_| neighbour.is_well());
    // Of each some four MiB may be, and not all 31.
    let more = resident_bytes().saturating_sub(before);
    assert!(more >> 20 < HOSTS as u64 * 16, "{} MiB more", more >> 20);
    offered.end();
}

fn resident_bytes() -> u64 {
    let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
    let pages: u64 = statm.split_whitespace().nth(1).unwrap().parse().unwrap();
    pages * 4096
}

#[expect(clippy::disallowed_methods, reason = "no reactor's time")]
fn now() -> Instant {
    Instant::now()
}

/// A connection of a socket that `set` has made ready.
fn connect_after(offered: &Offered, set: impl FnOnce(&OwnedFd)) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, connect, socket};
    let socket = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    set(&socket);
    connect(&socket, &offered.at()).unwrap();
    TcpStream::from(socket)
}

/// A connection from another address of this host.
fn connect_from(from: Ipv4Addr, offered: &Offered) -> TcpStream {
    connect_after(offered, |socket| {
        rustix::net::bind(socket, &SocketAddrV4::new(from, 0)).unwrap();
    })
}

#[test]
fn silent_connections_of_one_source_hold_nobody_up() {
    let offered = Offered::open();
    let connect = |count| -> Vec<TcpStream> {
        (0..count).map(|_| TcpStream::connect(offered.at()).unwrap()).collect()
    };
    let silent = connect(100);
    // Well below what the silent ones may take.
    let soon = Duration::from_secs(9);
    let began = now();
    let mut wire = Wire::over(connect_from(Ipv4Addr::new(127, 0, 0, 2), &offered), Choice::PLAIN);
    wire.connect((SUBSYSTEM, HOST), 0, ANY_CONTROLLER).unwrap();
    assert!(began.elapsed() < soon, "{:?}", began.elapsed());
    // Their time begins anew.
    drop(silent);
    let silent = connect(10);
    let began = now();
    offered.end();
    assert!(began.elapsed() < soon, "{:?}", began.elapsed());
    drop(silent);
}

/// PDUs that a host would send, on an I/O queue, as bytes.
fn honest(wire: &Wire, prng: &mut Prng) -> Vec<u8> {
    let block = prng.below(ITS - 64);
    let blocks = 1 + prng.below(32) as u32;
    let bytes = blocks * 512;
    let id = prng.below(64) as u16;
    match prng.below(5) {
        0 => wire.capsule(
            Command::read(1, block, blocks).with_sgl(Sgl::Transport { bytes }).with_id(id),
            &[],
        ),
        1 => wire.capsule(
            Command::write(1, block, blocks)
                .with_sgl(Sgl::InCapsule { offset: 0, bytes })
                .with_id(id),
            &vec![7; bytes as usize],
        ),
        2 => wire.capsule(
            Command::write(1, block, blocks).with_sgl(Sgl::Transport { bytes }).with_id(id),
            &[],
        ),
        3 => {
            let part = DataPart { command: id, tag: prng.below(32) as u16, at: 0 };
            wire.data_pdu(part, &vec![9; bytes as usize], true)
        }
        _ => wire.capsule(Command::flush(1).with_id(id), &[]),
    }
}

/// Changes a few bytes, or cuts, or repeats; mostly where headers are.
fn spoil(bytes: &mut Vec<u8>, prng: &mut Prng) {
    for _ in 0..prng.below(3) {
        let at = if prng.below(3) > 0 {
            prng.index(bytes.len().min(72))
        } else {
            prng.index(bytes.len())
        };
        // Never the place of what is written: the neighbour's blocks are its own.
        if !(48..56).contains(&at) {
            bytes[at] = prng.below(256) as u8;
        }
    }
    if prng.below(8) == 0 {
        bytes.truncate(1 + prng.index(bytes.len()));
    }
}

#[test]
fn random_hosts_harm_nobody() {
    let offered = Offered::open();
    let mut neighbour = Neighbour::new(&offered);
    let rounds = if cfg!(debug_assertions) { 150 } else { 1500 };
    for seed in 0..rounds {
        println!("seed {seed}");
        let mut prng = Prng::from_seed(seed);
        let digests = Digests::from_byte(prng.below(4) as u8);
        let mut wire = Wire::open(offered.at(), Choice { digests, ..Choice::PLAIN });
        let mut admin = Wire::open(offered.at(), Choice::PLAIN);
        if prng.below(8) > 0 {
            let names = (SUBSYSTEM, HOST);
            let controller = admin.connect(names, 0, ANY_CONTROLLER).unwrap();
            admin.enable();
            wire.connect(names, 1, controller).unwrap();
        }
        for _ in 0..prng.below(40) {
            let mut bytes = honest(&wire, &mut prng);
            spoil(&mut bytes, &mut prng);
            if wire.stream.write_all(&bytes).is_err() {
                break;
            }
        }
        if prng.below(2) == 0 {
            let _ = wire.stream.shutdown(Shutdown::Write);
            while wire.receive_loosely() {}
        }
        if seed % 10 == 0 {
            neighbour.is_well();
        }
    }
    neighbour.is_well();
    offered.end();
}
