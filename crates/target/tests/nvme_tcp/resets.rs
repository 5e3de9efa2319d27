//! What a host has under way when it resets its controller, shuts it down, or leaves.

use std::time::Duration;

use ashlar_drive::gate::Gate;
use ashlar_reactor::nvme::command::{Command, Completion, Status};
use ashlar_reactor::nvme::fabrics::{ANY_CONTROLLER, Property, property_set};
use ashlar_reactor::registry::Key;
use ashlar_target::export::Export;
use ashlar_target::limits::{Rate, RateLimits, Rates};
use ashlar_target::nvme_tcp::{ExportSpec, NvmeTcpExport};
use ashlar_target::secrets::Secrets;

use crate::host::{Choice, End, HOST, Host, Wire};
use crate::{Offered, SUBSYSTEM, spec};

const NAMES: (&str, &str) = (SUBSYSTEM, HOST);
const ENABLE: u32 = 0x46_0001;
const DISABLE: u32 = 0x46_0000;
const SHUT_DOWN: u32 = 0x46_4001;
const LATE: [u8; 4096] = [2; 4096];

/// A volume whose writes have to wait for hours: of the first block a one was written.
fn slow() -> Offered {
    let write = Rate { requests_per_second: None, bytes_per_second: Some(1) };
    let offered = Offered::limited(RateLimits::new(Rates { write, ..Rates::default() }));
    // The first may go at once.
    Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN).write(1, 0, &[1; 512]);
    offered
}

/// A host with a write that its drives do not do yet, of eight blocks from the eighth on; and what
/// holds it.
fn host_with_late_write(offered: &Offered) -> (Host, Key<Gate>) {
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let gate = offered.rig.hold_writes();
    host.io.give(Command::write(1, 8, 8), &LATE, true);
    // One that was taken up after it.
    assert_eq!(host.read(1, 100, 1), [0; 512]);
    (host, gate)
}

fn refused(offered: &Offered, queue: u16, controller: u16) -> Status {
    Wire::open(offered.at(), Choice::PLAIN).connect(NAMES, queue, controller).unwrap_err().0
}

#[test]
fn a_reset_is_over_when_nothing_of_before_is_under_way() {
    let offered = Offered::holding();
    let (Host { mut admin, mut io, controller }, gate) = host_with_late_write(&offered);
    let set = |admin: &mut Wire, to| admin.run(property_set(Property::Configuration, to), 0).0;
    assert!(set(&mut admin, DISABLE).is_success());
    assert!(io.receive_pdu().is_err());
    // What could be written now would be overwritten by what is still to come.
    assert_eq!(admin.property(Property::Status), 1);
    assert_eq!(set(&mut admin, ENABLE), Status::SEQUENCE);
    assert_eq!(refused(&offered, 2, controller), Status::SEQUENCE);
    assert_eq!(refused(&offered, 0, ANY_CONTROLLER), Status::CONNECT_BUSY);
    offered.rig.let_writes_go(gate);
    while admin.property(Property::Status) != 0 {}
    admin.enable();
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(io.connect(NAMES, 1, controller), Ok(controller));
    assert_eq!(io.run(Command::read(1, 8, 8), 4096), (Status::SUCCESS, LATE.to_vec()));
    offered.end();
}

/// Another host, to which the volume is given then, would find its blocks overwritten.
#[test]
fn a_host_is_shut_out_when_nothing_of_it_is_under_way() {
    let mut offered = Offered::holding();
    let (Host { mut io, .. }, gate) = host_with_late_write(&offered);
    let Offered { export, rig, .. } = &mut offered;
    std::thread::scope(|scope| {
        let other = ["nqn.2026-01.example:other".to_owned()];
        let shut_out = scope.spawn(move || export.set_access(&other, &Secrets::default()));
        // It is cut off at once.
        assert!(matches!(io.receive_pdu(), Err(End::Closed)));
        std::thread::park_timeout(Duration::from_millis(200));
        assert!(!shut_out.is_finished());
        rig.let_writes_go(gate);
        shut_out.join().unwrap().unwrap();
    });
    offered.end();
}

#[test]
fn a_shutdown_is_over_when_nothing_is_under_way() {
    let offered = Offered::holding();
    let (Host { mut admin, mut io, .. }, gate) = host_with_late_write(&offered);
    let shut_down = property_set(Property::Configuration, SHUT_DOWN);
    assert!(admin.run(shut_down, 0).0.is_success());
    assert!(io.receive_pdu().is_err());
    assert_eq!(admin.property(Property::Status), 1 << 2 | 1, "it occurs");
    offered.rig.let_writes_go(gate);
    while admin.property(Property::Status) != 2 << 2 | 1 {}
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(1, 8, 8), LATE);
    offered.end();
}

#[test]
fn who_comes_again_waits_for_what_it_has_left_behind() {
    let offered = Offered::holding();
    let (host, gate) = host_with_late_write(&offered);
    drop(host);
    assert_eq!(refused(&offered, 0, ANY_CONTROLLER), Status::CONNECT_BUSY);
    // Another host need not wait.
    let other = Host::named(offered.at(), (SUBSYSTEM, "nqn.2026-01.example:b"), Choice::PLAIN);
    offered.rig.let_writes_go(gate);
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(1, 8, 8), LATE);
    drop(other);
    offered.end();
}

/// A host of which many writes wait for their turn.
fn host_with_waiting_writes(offered: &Offered) -> Host {
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let limited = || offered.export.status().unwrap().counters.limited;
    let before = limited();
    // More than there is room for at a time, of those whose data is asked for.
    for at in 1..=6 {
        host.io.give(Command::write(1, at * 2048, 2048), &[2; 1 << 20], false);
        host.io.give(Command::write(1, at * 2048, 8), &LATE, true);
        host.io.ask(Command::write_zeroes(1, at * 2048 + 1, 8, false), 0);
    }
    while limited() < before + 18 {}
    host
}

#[test]
fn writes_that_wait_for_their_turn_stop_no_reads() {
    let offered = slow();
    let mut host = host_with_waiting_writes(&offered);
    for block in 0..100 {
        assert_eq!(host.read(1, block, 2048)[0], u8::from(block == 0));
    }
    drop(host);
    offered.end();
}

#[test]
fn what_waits_for_its_turn_ends_with_its_controller() {
    let offered = slow();
    for shuts_down in [false, true] {
        let Host { mut admin, mut io, .. } = host_with_waiting_writes(&offered);
        let (to, over) = if shuts_down { (SHUT_DOWN, 2 << 2 | 1) } else { (DISABLE, 0) };
        assert!(admin.run(property_set(Property::Configuration, to), 0).0.is_success());
        while admin.property(Property::Status) != over {}
        assert!(io.receive_pdu().is_err());
    }
    // Also of a host that has left, or is cut off.
    drop(host_with_waiting_writes(&offered));
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(1, 2048, 2048), [0; 1 << 20], "none was written");
    let counters = offered.export.status().unwrap().counters;
    assert_eq!((counters.writes, counters.discards, counters.errors), (1, 0, 0));
    drop(host);
    offered.end();
}

/// Whether one more answer comes before a host is cut off: of what was done, or what it is to try
/// again.
fn is_told_well(queue: &mut Wire) -> bool {
    match queue.next() {
        Ok((Completion { status, .. }, _)) => {
            assert!(status.is_success() || status == Status::TRANSIENT_TRANSPORT, "{status:?}");
            true
        }
        Err(end) => {
            assert_eq!(end, End::Closed);
            false
        }
    }
}

#[test]
fn an_export_that_stops_fails_nothing_that_waits_or_comes_meanwhile() {
    let offered = slow();
    let mut host = host_with_waiting_writes(&offered);
    let mut other = host_with_waiting_writes(&offered);
    other.admin.ask(Command::async_event(), 0);
    std::thread::scope(|scope| {
        scope.spawn(|| offered.end());
        let mut read = || {
            (0..8).for_each(|block| _ = host.io.ask(Command::read(1, block, 1), 512));
            (0..8).all(|_| is_told_well(&mut host.io))
        };
        while read() {}
    });
    while is_told_well(&mut other.io) {}
    assert!(!is_told_well(&mut other.admin) && !is_told_well(&mut host.admin));
}

#[test]
fn who_loses_all_at_once_is_cut_off_and_others_are_told() {
    let offered = Offered::open();
    let start = |hosts: &[&str]| {
        let hosts = hosts.iter().map(|its| (*its).to_owned()).collect();
        let spec = ExportSpec { hosts, ..spec(offered.at()) };
        NvmeTcpExport::start(&offered.ports, offered.rig.parts(), spec).unwrap()
    };
    let (second, others) = (start(&[]), start(&["nqn.2026-01.example:b"]));
    let connect = |host| Host::named(offered.at(), (SUBSYSTEM, host), Choice::PLAIN);
    let (mut host, mut other) = (connect(HOST), connect("nqn.2026-01.example:b"));
    host.admin.ask(Command::async_event(), 0);
    let others_event = other.admin.ask(Command::async_event(), 0);
    offered.export.will_stop();
    assert_eq!(host.read(2, 0, 1), [0; 512], "it keeps one");
    second.will_stop();
    assert!(!is_told_well(&mut host.admin) && !is_told_well(&mut host.io));
    assert_eq!(refused(&offered, 0, ANY_CONTROLLER), Status::CONNECT_HOST);
    Box::new(second).pause();
    let told = other.admin.wait(others_event).unwrap().0;
    assert!(told.status.is_success() && told.result != 0);
    assert_eq!(other.read(3, 0, 1), [0; 512]);
    let Offered { export, rig, .. } = offered;
    assert!(Box::new(export).hand_over().is_none());
    drop(others);
    rig.withdraw_others();
}

#[test]
fn requests_for_events_that_a_reset_has_ended_are_not_under_way() {
    let offered = Offered::open();
    let mut admin = Wire::open(offered.at(), Choice::PLAIN);
    admin.connect(NAMES, 0, ANY_CONTROLLER).unwrap();
    // In all more than the queue has entries.
    for _ in 0..12 {
        admin.enable();
        for _ in 0..4 {
            admin.ask(Command::async_event(), 0);
        }
        let disable = property_set(Property::Configuration, DISABLE);
        assert!(admin.run(disable, 0).0.is_success());
    }
    // Neither are those that were taken back, of which several have one number.
    admin.enable();
    for _ in 0..12 {
        let bytes = admin.capsule(Command::async_event().with_id(0x9000), &[]);
        (0..4).for_each(|_| admin.send_raw(&bytes));
        for _ in 0..4 {
            let abort = admin.ask(Command::abort(0, 0x9000), 0);
            assert_eq!(admin.wait(0x9000).unwrap().0.status, Status::ABORTED);
            assert_eq!(admin.wait(abort).unwrap().0.result, 0);
        }
        let abort = admin.ask(Command::abort(0, 0x9000), 0);
        assert_eq!(admin.wait(abort).unwrap().0.result, 1, "none is left");
    }
    assert!(admin.run(Command::keep_alive(), 0).0.is_success());
    offered.end();
}
