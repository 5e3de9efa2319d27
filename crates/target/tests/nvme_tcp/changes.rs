//! What changes while hosts are connected.

use std::net::TcpStream;

use ashlar_reactor::nvme::command::{Command, NamespaceIdentity, Status};
use ashlar_reactor::nvme::fabrics::ANY_CONTROLLER;
use ashlar_reactor::nvme::power_cycle::PowerCycle;
use ashlar_target::export::Export;
use ashlar_target::nvme_tcp::{ExportSpec, NvmeTcpExport};

use crate::host::{Choice, End, HOST, Host, Wire};
use crate::{DISK, Offered, SUBSYSTEM, spec};

const OTHER: &str = "nqn.2026-01.example:other";
/// Namespace attributes have changed: a notice, with the log page to read.
const CHANGED: u32 = 0x0004_0002;

fn read_changed(host: &mut Host) -> Vec<u8> {
    let (status, page) = host.admin.run(Command::get_log_page(4, u32::MAX, 4096, 0), 4096);
    assert!(status.is_success());
    page[..8].to_vec()
}

#[test]
fn a_host_is_told_of_what_changes() {
    let offered = Offered::open();
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let event = host.admin.ask(Command::async_event(), 0);
    offered.rig.resize(2 * DISK);
    offered.export.resized();
    assert_eq!(host.admin.wait(event).unwrap().0.result, CHANGED);
    // Who asks wrongly has not heard of it: another length than that of the data, beyond the end.
    for (len, offset) in [(1024, 0), (4096, 8192)] {
        let log = Command::get_log_page(4, u32::MAX, 4096, offset);
        assert!(!host.admin.run(log, len).0.is_success());
    }
    assert_eq!(read_changed(&mut host), [1, 0, 0, 0, 0, 0, 0, 0]);
    let (_, page) = host.admin.run(Command::identify_namespace(1), 4096);
    let blocks = NamespaceIdentity::decode(&page.try_into().unwrap()).blocks;
    assert_eq!(blocks, 2 * DISK / 512);
    host.write(1, blocks - 1, &[5; 512]);
    // Another policy: single blocks are atomic, and 64 KiB were.
    let nawupf = |host: &mut Host| host.admin.blocks_atomic() - 1;
    assert_eq!(nawupf(&mut host), 127);
    let event = host.admin.ask(Command::async_event(), 0);
    offered.export.set_atomic_bytes(0);
    assert_eq!(host.admin.wait(event).unwrap().0.result, CHANGED);
    assert_eq!(read_changed(&mut host)[0], 1);
    assert_eq!(nawupf(&mut host), 0);
    // One that comes, one that goes.
    let event = host.admin.ask(Command::async_event(), 0);
    let parts = offered.rig.parts();
    let second = NvmeTcpExport::start(&offered.ports, parts, spec(offered.at())).unwrap();
    assert_eq!(second.namespace(), 2);
    assert_eq!(host.admin.wait(event).unwrap().0.result, CHANGED);
    assert_eq!(read_changed(&mut host)[0], 2);
    assert_eq!(host.read(2, blocks - 1, 1), [5; 512]);
    let event = host.admin.ask(Command::async_event(), 0);
    drop(second);
    assert_eq!(host.admin.wait(event).unwrap().0.result, CHANGED);
    let (status, _) = host.io.run(Command::read(2, 0, 1), 512);
    assert_eq!(status, Status::INVALID_NAMESPACE.for_good());
    // Requests for events can be taken back.
    let event = host.admin.ask(Command::async_event(), 0);
    let abort = host.admin.ask(Command::abort(0, event), 0);
    assert_eq!(host.admin.wait(event).unwrap().0.status, Status::ABORTED);
    assert_eq!(host.admin.wait(abort).unwrap().0.result, 0);
    offered.end();
}

#[test]
fn who_connects_finds_all_namespaces_that_were_to_come() {
    let offered = Offered::open();
    let host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    let coming = [(); 2].map(|()| offered.ports.coming(offered.at(), SUBSYSTEM));
    let other_spec = ExportSpec { subsystem: OTHER.into(), ..spec(offered.at()) };
    let other = NvmeTcpExport::start(&offered.ports, offered.rig.parts(), other_spec).unwrap();
    let second =
        NvmeTcpExport::start(&offered.ports, offered.rig.parts(), spec(offered.at())).unwrap();
    let connect = |subsystem, queue, controller| {
        let mut wire = Wire::open(offered.at(), Choice::PLAIN);
        wire.connect((subsystem, HOST), queue, controller).map_err(|(status, _)| status)
    };
    for (some, queue) in coming.into_iter().zip([2, 3]) {
        assert_eq!(connect(SUBSYSTEM, 0, ANY_CONTROLLER), Err(Status::CONNECT_BUSY));
        // Who is there goes on, and others have nothing to wait for.
        assert_eq!(connect(SUBSYSTEM, queue, host.controller), Ok(host.controller));
        assert!(connect(OTHER, 0, ANY_CONTROLLER).is_ok());
        drop(some);
    }
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    assert_eq!((host.read(1, 0, 1), host.read(2, 0, 1)), (vec![0; 512], vec![0; 512]));
    drop((second, other));
    offered.end();
}

#[test]
fn what_hosts_are_told_all_reactors_know() {
    let offered = Offered::open();
    let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
    // The admin queue is served by one reactor, the second I/O queue by another.
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    io.connect((SUBSYSTEM, HOST), 2, host.controller).unwrap();
    for _ in 0..20 {
        std::thread::scope(|scope| {
            let event = host.admin.ask(Command::async_event(), 0);
            let (ports, parts) = (offered.ports.clone(), offered.rig.parts());
            let spec = spec(offered.at());
            let second = scope.spawn(move || NvmeTcpExport::start(&ports, parts, spec));
            assert_eq!(host.admin.wait(event).unwrap().0.result, CHANGED);
            assert_eq!(io.run(Command::read(2, 0, 1), 512).0, Status::SUCCESS);
            assert_eq!(read_changed(&mut host)[0], 2);
            let second = second.join().unwrap().unwrap();
            let event = host.admin.ask(Command::async_event(), 0);
            scope.spawn(move || drop(second));
            assert_eq!(host.admin.wait(event).unwrap().0.result, CHANGED);
            let gone = Status::INVALID_NAMESPACE.for_good();
            assert_eq!(io.run(Command::read(2, 0, 1), 512).0, gone);
            assert_eq!(read_changed(&mut host)[0], 2);
        });
    }
    offered.end();
}

#[test]
fn an_export_that_stops_hangs_up_and_leaves_the_address() {
    let offered = Offered::open();
    let at = offered.at();
    let mut host = Host::connect(at, SUBSYSTEM, Choice::PLAIN);
    let ids: Vec<u16> = (0..20)
        .map(|i| host.io.give(Command::write(1, i * 8, 8), &[i as u8 + 1; 4096], true))
        .collect();
    // Some are answered by then.
    host.io.wait(ids[0]).unwrap();
    let Offered { ports, export, rig } = offered;
    drop(export);
    let ended = std::iter::from_fn(|| host.io.next().err()).next();
    assert!(ended.is_none() || ended == Some(End::Closed));
    assert!(TcpStream::connect(at).is_err());
    // A new one there, at once, with all that was answered.
    let spec = ExportSpec { namespace: Some(3), ..spec(at) };
    let export = NvmeTcpExport::start(&ports, rig.parts(), spec).unwrap();
    let mut host = Host::connect(at, SUBSYSTEM, Choice::PLAIN);
    assert_eq!(host.read(3, 0, 8), [1; 4096]);
    drop(export);
    rig.withdraw_others();
}

/// It may have lost meanwhile what its host had written and not flushed.
#[test]
fn a_namespace_that_was_without_power_is_not_gone_on_with() {
    let (one, other) = (PowerCycle::new([1; 16]), PowerCycle::new([2; 16]));
    for (before, after, is_cut_off) in
        [(one, one, false), (one, other, true), (one, None, true), (None, None, true)]
    {
        let offered = Offered::open();
        let at = |power| ExportSpec { namespace: Some(7), power, ..spec(offered.at()) };
        let start =
            |power| NvmeTcpExport::start(&offered.ports, offered.rig.parts(), at(power)).unwrap();
        let second = start(before);
        let mut host = Host::connect(offered.at(), SUBSYSTEM, Choice::PLAIN);
        host.write(7, 0, &[1; 512]);
        drop(second);
        let second = start(after);
        match is_cut_off {
            true => assert!(matches!(host.io.receive_pdu(), Err(End::Closed))),
            false => assert_eq!(host.read(7, 0, 1), [1; 512]),
        }
        drop(second);
        offered.end();
    }
}
