//! What a host has under way when it resets its controller, shuts it down, or leaves.

use std::sync::Arc;

use ashlar_reactor::nvme::command::{Command, Status};
use ashlar_reactor::nvme::fabrics::{ANY_CONTROLLER, Property, property_set};
use ashlar_target::export::Export;
use ashlar_target::limits::{Rate, RateLimits, Rates};

use crate::host::{Choice, HOST, Host, Wire};
use crate::{Offered, SUBSYSTEM};

const NAMES: (&str, &str) = (SUBSYSTEM, HOST);
const ENABLE: u32 = 0x46_0001;
const DISABLE: u32 = 0x46_0000;
const SHUT_DOWN: u32 = 0x46_4001;
const LATE: [u8; 4096] = [2; 4096];

/// A volume whose writes take hours, until they are let.
fn slow() -> (Offered, Arc<RateLimits>) {
    let write = Rate { requests_per_second: None, bytes_per_second: Some(1) };
    let limits = RateLimits::new(Rates { write, ..Rates::default() });
    (Offered::limited(limits.clone()), limits)
}

/// A host with a write under way, of eight blocks from the eighth on.
fn host_with_late_write(offered: &Offered) -> Host {
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    // The first may go at once.
    host.write(1, 0, &[1; 512]);
    host.io.give(Command::write(1, 8, 8), &LATE, true);
    while offered.export.status().unwrap().counters.limited == 0 {}
    host
}

fn refused(offered: &Offered, queue: u16, controller: u16) -> Status {
    Wire::open(offered.at(), Choice::PLAIN).connect(NAMES, queue, controller).unwrap_err().0
}

#[test]
fn a_reset_is_over_when_nothing_of_before_is_under_way() {
    let (offered, limits) = slow();
    let Host { mut admin, mut io, controller } = host_with_late_write(&offered);
    let set = |admin: &mut Wire, to| admin.run(property_set(Property::Configuration, to), 0).0;
    assert!(set(&mut admin, DISABLE).is_success());
    assert!(io.receive_pdu().is_err());
    // What could be written now would be overwritten by what is still to come.
    assert_eq!(admin.property(Property::Status), 1);
    assert_eq!(set(&mut admin, ENABLE), Status::SEQUENCE);
    assert_eq!(refused(&offered, 2, controller), Status::SEQUENCE.for_good());
    assert_eq!(refused(&offered, 0, ANY_CONTROLLER), Status::CONNECT_BUSY);
    limits.set(Rates::default());
    while admin.property(Property::Status) != 0 {}
    admin.enable();
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(io.connect(NAMES, 1, controller), Ok(controller));
    assert_eq!(io.run(Command::read(1, 8, 8), 4096), (Status::SUCCESS, LATE.to_vec()));
    offered.end();
}

#[test]
fn a_shutdown_is_over_when_nothing_is_under_way() {
    let (offered, limits) = slow();
    let Host { mut admin, mut io, .. } = host_with_late_write(&offered);
    let shut_down = property_set(Property::Configuration, SHUT_DOWN);
    assert!(admin.run(shut_down, 0).0.is_success());
    assert!(io.receive_pdu().is_err());
    assert_eq!(admin.property(Property::Status), 1 << 2 | 1, "it occurs");
    limits.set(Rates::default());
    while admin.property(Property::Status) != 2 << 2 | 1 {}
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(1, 8, 8), LATE);
    offered.end();
}

#[test]
fn who_comes_again_waits_for_what_it_has_left_behind() {
    let (offered, limits) = slow();
    drop(host_with_late_write(&offered));
    assert_eq!(refused(&offered, 0, ANY_CONTROLLER), Status::CONNECT_BUSY);
    // Another host need not wait.
    let other = Host::named(offered.at(), (SUBSYSTEM, "nqn.2026-01.example:b"), Choice::PLAIN);
    limits.set(Rates::default());
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(1, 8, 8), LATE);
    drop(other);
    offered.end();
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
