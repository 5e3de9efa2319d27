//! Goal: a host of NVMe/TCP loses none of the disks of one subsystem when their array or the daemon
//! is stopped and started, or upgraded: it is cut off without a word, and finds all of them again.
//! Method: a host that waits to be told of changes, and connects again as fast as it can.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod daemon;
#[allow(dead_code, reason = "the target's own tests use the rest")]
#[path = "../../target/tests/nvme_tcp/host.rs"]
mod host;

/// As the target's own tests have it.
mod rig {
    pub const PATIENCE: std::time::Duration = std::time::Duration::from_secs(30);
}

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::RangeInclusive;

use ashlar_reactor::nvme::command::Command;
use ashlar_reactor::nvme::fabrics::ANY_CONTROLLER;
use daemon::Daemon;
use host::{Choice, End, HOST, Host, Wire};

const SUBSYSTEM: &str = "nqn.2026-01.example:disks";
const NAMESPACES: u32 = 8;

/// No host waits longer than this.
const LET_IN_SECONDS_MAX: u64 = 60;

/// At an address that no other test uses.
fn free_port() -> SocketAddr {
    TcpListener::bind("127.0.0.78:0").unwrap().local_addr().unwrap()
}

/// A host that waits to be told of changes, as soon as it is let in; the namespaces that it finds.
#[expect(clippy::disallowed_methods, reason = "a test's own clock")]
fn connect(at: SocketAddr) -> (Wire, Vec<u32>) {
    let began = std::time::Instant::now();
    loop {
        assert!(began.elapsed().as_secs() < LET_IN_SECONDS_MAX, "no host is let in");
        let Ok(stream) = TcpStream::connect(at) else { continue };
        let Some(mut admin) = Wire::try_over(stream, Choice::PLAIN) else { continue };
        match admin.try_connect((SUBSYSTEM, HOST), 0, ANY_CONTROLLER) {
            Some(Ok(_)) => {}
            Some(Err((status, _))) => {
                assert_eq!(status.0 >> 14, 0, "{status:?} is not for good");
                continue;
            }
            None => continue,
        }
        admin.enable();
        let (_, list) = admin.run(Command::identify_active_namespaces(), 4096);
        let ids = list.as_chunks::<4>().0.iter().map(|id| u32::from_le_bytes(*id));
        let ids = ids.take_while(|id| *id != 0).collect();
        admin.ask(Command::async_event(), 0);
        return (admin, ids);
    }
}

/// Creates namespaces of the subsystem, on volumes of an array.
fn create(daemon: &Daemon, at: SocketAddr, array: &str, ids: RangeInclusive<u32>) {
    for id in ids {
        daemon.ok(&format!("volume create v{id} --array {array} --size 4M"));
        let place = format!("--kind nvme-tcp --listen {at} --nqn {SUBSYSTEM} --nsid {id}");
        daemon.ok(&format!("export create e{id} --volume v{id} {place}"));
    }
}

#[test]
fn disks_of_one_subsystem_go_and_come_together() {
    let mut daemon = Daemon::with_array("1", 2);
    let at = free_port();
    create(&daemon, at, "a", 1..=NAMESPACES);
    let all: Vec<u32> = (1..=NAMESPACES).collect();
    let (mut admin, found) = connect(at);
    assert_eq!(found, all);
    for round in 0..6 {
        let again = std::thread::spawn(move || {
            assert_eq!(admin.next().err(), Some(End::Closed), "it is told of nothing");
            connect(at)
        });
        match round % 3 {
            0 => {
                daemon.ok("array stop a --force");
                daemon.ok("array start a");
            }
            1 => {
                daemon.stop();
                daemon.start_again();
            }
            _ => drop(daemon.ok("upgrade")),
        }
        let (next, found) = again.join().unwrap();
        assert_eq!(found, all, "round {round}");
        admin = next;
    }
}

/// As where the network comes up after the daemon.
#[test]
fn disks_come_together_once_their_address_is_there() {
    let mut daemon = Daemon::with_array("1", 2);
    let at = free_port();
    create(&daemon, at, "a", 1..=NAMESPACES);
    for round in 0..3 {
        daemon.stop();
        let taken = TcpListener::bind(at).unwrap();
        daemon.start_again();
        for id in 1..=NAMESPACES {
            let export = daemon.json(&format!("export show e{id}"));
            assert_eq!(export["state"], "down", "{export}");
        }
        drop(taken);
        let (_admin, found) = connect(at);
        assert_eq!(found, (1..=NAMESPACES).collect::<Vec<_>>(), "round {round}");
    }
}

#[test]
fn an_array_that_cannot_start_keeps_no_host_of_another_waiting() {
    let mut daemon = Daemon::with_array("1", 2);
    for name in ["d2", "d3"] {
        daemon.attach_new(name);
    }
    daemon.ok("array create b --level 1 --drives d2,d3");
    let at = free_port();
    create(&daemon, at, "a", 1..=3);
    create(&daemon, at, "b", 4..=NAMESPACES);
    daemon.stop();
    for name in ["d2", "d3"] {
        std::fs::remove_file(daemon.path(&format!("{name}.img"))).unwrap();
    }
    daemon.start_again();
    let (_admin, found) = connect(at);
    assert_eq!(found, [1, 2, 3]);
}

#[test]
fn hosts_hear_what_is_atomic_once_no_stripe_waits_for_resync() {
    // Large enough for a resync that takes a while.
    let mut daemon = Daemon::start();
    (0..3).for_each(|n| drop(daemon.ok(&format!("drive attach @/d{n}.img --size 192M"))));
    daemon.create_array("a", "5", 3);
    daemon.ok("array set a --policy none --rebuild-share 5");
    let at = free_port();
    daemon.ok("volume create v --array a --size 256M");
    let place = format!("--kind nvme-tcp --listen {at} --nqn {SUBSYSTEM}");
    daemon.ok(&format!("export create e --volume v {place}"));
    let mut host = Host::connect(at, SUBSYSTEM, Choice::PLAIN);
    (0..64).for_each(|region| host.write(1, region * 4096, &[7; 4096]));
    drop(host);
    daemon.kill();
    daemon.start_again();

    let (mut admin, _) = connect(at);
    daemon.ok("array set a --policy journal");
    daemon.wait_for("array show a", |array| array["resync"].is_object());
    assert_eq!(admin.blocks_atomic(), 1);
    assert!(daemon.json("array show a")["resync"].is_object(), "it is over too soon");
    daemon.ok("array set a --rebuild-share 100");
    admin.next().unwrap();
    assert_eq!(admin.blocks_atomic(), 128);
    assert!(daemon.json("array show a")["resync"].is_null());
}
