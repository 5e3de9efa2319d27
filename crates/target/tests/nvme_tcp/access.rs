//! Who may connect to what.

use std::net::SocketAddr;

use ashlar_reactor::nvme::command::{Command, Status, first_namespace};
use ashlar_reactor::nvme::fabrics::{
    ANY_CONTROLLER, Connect, ConnectData, DISCOVERY_NQN, Property, property_set,
};
use ashlar_target::export::{Export, ExportError};
use ashlar_target::nvme_tcp::{ExportSpec, NvmeTcpExport, Ports};
use ashlar_target::secrets::Secrets;

use crate::host::{Choice, End, HOST, Host, Wire, connect_data};
use crate::{Offered, SUBSYSTEM, spec};

const OTHER: &str = "nqn.2026-01.example:host-b";

fn refused(offered: &Offered, names: (&str, &str), queue: u16, controller: u16) -> (Status, u32) {
    let mut wire = Wire::open(offered.at(), Choice::PLAIN);
    wire.connect(names, queue, controller).unwrap_err()
}

#[test]
fn hosts_get_in_where_they_may() {
    let offered = Offered::to(vec![HOST.to_owned()]);
    let invalid = Status::CONNECT_INVALID.for_good();
    // What may come up yet is not refused for good: hosts would give up.
    let not_here = Status::CONNECT_INVALID;
    let none = "nqn.2026-01.example:none";
    assert_eq!(refused(&offered, (none, HOST), 0, ANY_CONTROLLER), (not_here, 256 | 1 << 16));
    let foreign = refused(&offered, (SUBSYSTEM, OTHER), 0, ANY_CONTROLLER);
    assert_eq!(foreign, (Status::CONNECT_HOST, 512 | 1 << 16));
    assert_eq!(refused(&offered, (SUBSYSTEM, HOST), 0, 7), (invalid, 16 | 1 << 16));
    assert_eq!(refused(&offered, (SUBSYSTEM, HOST), 1, 900), (not_here, 16 | 1 << 16));
    let host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    // Its queues are its own, and there are four.
    let its = host.controller;
    assert_eq!(refused(&offered, (SUBSYSTEM, HOST), 1, its).0, Status::SEQUENCE);
    assert_eq!(refused(&offered, (SUBSYSTEM, HOST), 5, its), (invalid, 42));
    let mut wire = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(wire.connect((SUBSYSTEM, HOST), 4, its), Ok(its));
    offered.end();
}

#[test]
fn a_host_without_an_identifier_is_refused() {
    let offered = Offered::open();
    for subsystem in [SUBSYSTEM, DISCOVERY_NQN] {
        let connect = Connect { queue: 0, entries: 32, no_flow_control: true, keep_alive_ms: 0 };
        let data = connect_data((subsystem, HOST), ANY_CONTROLLER);
        let data = ConnectData { host_id: [0; 16], ..data };
        let mut wire = Wire::open(offered.at(), Choice::PLAIN);
        let (completion, _) = wire.ask_to_connect(connect, &data).unwrap();
        // Where it is: in the data, at its beginning.
        let why = (completion.status, completion.result);
        assert_eq!(why, (Status::CONNECT_INVALID.for_good(), 1 << 16));
    }
    offered.end();
}

#[test]
fn a_queue_is_connected_once() {
    let offered = Offered::open();
    let Host { mut admin, mut io, controller } =
        Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let names = (SUBSYSTEM, HOST);
    let again = Err((Status::SEQUENCE.for_good(), 0));
    assert_eq!(admin.connect(names, 0, ANY_CONTROLLER), again);
    assert_eq!(io.connect(names, 1, controller), again);
    assert_eq!(io.connect(names, 2, controller), again);
    assert!(io.run(Command::read(1, 0, 1), 512).0.is_success());
    offered.end();
}

#[test]
fn queues_come_after_the_controller_is_enabled_and_go_with_it() {
    let offered = Offered::open();
    let names = (SUBSYSTEM, HOST);
    let mut admin = Wire::open(offered.at(), Choice::PLAIN);
    let controller = admin.connect(names, 0, ANY_CONTROLLER).unwrap();
    assert_eq!(refused(&offered, names, 1, controller).0, Status::SEQUENCE);
    let (status, _) = admin.run(Command::identify_controller(), 4096);
    assert_eq!(status, Status::SEQUENCE.for_good());
    admin.enable();
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    io.connect(names, 1, controller).unwrap();
    assert!(io.run(Command::read(1, 0, 1), 512).0.is_success());
    // A reset ends the queue, and it can be connected anew.
    assert!(admin.run(property_set(Property::Configuration, 0x46_0000), 0).0.is_success());
    assert!(io.receive_pdu().is_err());
    // Until the reactor has let the old one go, the reset is not over.
    while admin.property(Property::Status) != 0 {}
    admin.enable();
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(io.connect(names, 1, controller), Ok(controller));
    assert!(io.run(Command::read(1, 0, 1), 512).0.is_success());
    // A shutdown does, too; the admin queue is there until the host leaves.
    let shut_down = property_set(Property::Configuration, 0x46_4001);
    assert!(admin.run(shut_down, 0).0.is_success());
    assert!(io.receive_pdu().is_err());
    while admin.property(Property::Status) >> 2 & 3 != 2 {}
    offered.end();
}

#[test]
fn the_end_of_the_admin_queue_is_that_of_all() {
    let offered = Offered::open();
    let Host { admin, mut io, .. } = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    drop(admin);
    assert!(io.receive_pdu().is_err());
    // The same host comes again, after what was under way.
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    host.write(1, 0, &[1; 512]);
    offered.end();
}

#[test]
fn namespaces_of_a_subsystem_are_seen_by_those_who_may() {
    let offered = Offered::to(vec![HOST.to_owned()]);
    let at = offered.at();
    let more = ExportSpec { namespace: Some(7), hosts: vec![OTHER.to_owned()], ..spec(at) };
    let second = NvmeTcpExport::start(&offered.ports, offered.rig.parts(), more).unwrap();
    assert_eq!((offered.export.namespace(), second.namespace()), (1, 7));
    for (host, visible, hidden) in [(HOST, 1, 7), (OTHER, 7, 1)] {
        let mut host = Host::named(at, (SUBSYSTEM, host), Choice::PLAIN);
        let (_, list) = host.admin.run(Command::identify_active_namespaces(), 4096);
        let list: [u8; 4096] = list.try_into().unwrap();
        assert_eq!((first_namespace(&list), list[4]), (Some(visible), 0));
        host.write(visible, 0, &[visible as u8; 512]);
        let (status, _) = host.io.run(Command::read(hidden, 0, 1), 512);
        assert_eq!(status, Status::INVALID_NAMESPACE.for_good());
    }
    drop(second);
    let mut host = Host::connect(at, SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(1, 0, 1), [7; 512], "both are one volume");
    offered.end();
}

fn sees(at: SocketAddr, host: &str) -> Result<(), (Status, u32)> {
    let mut wire = Wire::open(at, Choice::PLAIN);
    wire.connect((SUBSYSTEM, host), 0, ANY_CONTROLLER).map(drop)
}

/// One more is let in, and another shut out, while a third has requests all the time.
#[test]
fn hosts_come_and_go_and_others_notice_nothing() {
    let mut offered = Offered::to(vec![HOST.to_owned()]);
    let (at, third) = (offered.at(), "nqn.2026-01.example:host-c");
    let shut_out = Err((Status::CONNECT_HOST, 512 | 1 << 16));
    let more = ExportSpec { namespace: Some(7), hosts: vec![third.to_owned()], ..spec(at) };
    let second = NvmeTcpExport::start(&offered.ports, offered.rig.parts(), more).unwrap();
    let mut stays = Host::connect(at, SUBSYSTEM, Choice::PLAIN);
    let mut keeps_one = Host::named(at, (SUBSYSTEM, third), Choice::PLAIN);
    assert_eq!(sees(at, OTHER), shut_out);
    let all = [HOST, OTHER, third].map(str::to_owned);
    offered.export.set_access(&all, &Secrets::default()).unwrap();
    let mut other = Host::named(at, (SUBSYSTEM, OTHER), Choice::PLAIN);
    other.write(1, 0, &[5; 512]);
    keeps_one.write(1, 1, &[6; 512]);
    stays.write(1, 2, &[7; 512]);
    offered.export.set_access(&[HOST.to_owned()], &Secrets::default()).unwrap();
    // It has nothing left, and is cut off; who keeps another namespace finds that this one is gone.
    assert!(matches!(other.io.receive_pdu(), Err(End::Closed)));
    assert_eq!(sees(at, OTHER), shut_out);
    let told = || offered.export.status().unwrap().last_error;
    assert!(told().unwrap().contains(&format!("{OTHER:?} is no host of")), "{:?}", told());
    let (status, _) = keeps_one.io.run(Command::read(1, 0, 1), 512);
    assert_eq!(status, Status::INVALID_NAMESPACE.for_good());
    assert_eq!(keeps_one.read(7, 1, 1), [6; 512]);
    assert_eq!(stays.read(1, 0, 1), [5; 512]);
    offered.export.set_access(&[], &Secrets::default()).unwrap();
    assert_eq!(sees(at, OTHER), Ok(()));
    let is_forgotten = || offered.export.status().unwrap().last_error.is_none();
    while !is_forgotten() {}
    drop(second);
    offered.end();
}

fn error(ports: &Ports, offered: &Offered, spec: ExportSpec) -> String {
    match NvmeTcpExport::start(ports, offered.rig.parts(), spec) {
        Ok(_) => panic!("it was started"),
        Err(error @ (ExportError::Spec(_) | ExportError::Address { .. })) => error.to_string(),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn what_cannot_be_offered_is_refused_with_the_reason() {
    let offered = Offered::open();
    let at = offered.at();
    let bad = |spec| error(&offered.ports, &offered, spec);
    let nqn = |subsystem: &str| ExportSpec { subsystem: subsystem.into(), ..spec(at) };
    assert!(bad(nqn("disk")).contains("nqn.YYYY-MM"));
    assert!(bad(nqn("nqn.2014-08.org.nvmexpress.discovery")).contains("discovery"));
    assert!(bad(ExportSpec { hosts: vec!["x".into()], ..spec(at) }).contains("\"x\""));
    assert!(bad(ExportSpec { namespace: Some(0), ..spec(at) }).contains("1 to 1024"));
    assert!(bad(ExportSpec { namespace: Some(1), ..spec(at) }).contains("a namespace 1 already"));
    assert!(bad(ExportSpec { queues_max: 0, ..spec(at) }).contains("0 queues"));
    // Another process, so to speak, has the address.
    let taken = error(&Ports::default(), &offered, spec(at));
    assert!(taken.contains(&at.to_string()) && taken.contains("in use"), "{taken}");
    // Nothing of that has changed anything.
    let mut host = Host::connect(at, SUBSYSTEM, Choice::PLAIN);
    host.write(1, 0, &[1; 512]);
    assert!(offered.export.status().unwrap().connected);
    offered.end();
}
