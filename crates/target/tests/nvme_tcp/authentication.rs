//! Hosts prove who they are, and have the subsystem prove it, or they do not get in.

use std::collections::BTreeMap;
use std::time::Duration;

use ashlar_reactor::nvme::chap::{self, Failure, Group, Hash, Names, Offer, Secret, Unproven};
use ashlar_reactor::nvme::command::{Command, Sgl, Status};
use ashlar_reactor::nvme::fabrics::{
    ANY_CONTROLLER, Property, authentication_receive, authentication_send, property_get,
};
use ashlar_reactor::nvme::pdu::Digests;
use ashlar_reactor::nvme::remote::{Credentials, Handle, Target, Trouble};
use ashlar_target::export::ExportError;
use ashlar_target::nvme_tcp::{ExportSpec, NvmeTcpExport};
use ashlar_target::secrets::Secrets;

use crate::host::{Choice, End, HOST, Host, Wire};
use crate::{Offered, SUBSYSTEM, spec};

const NAMES: (&str, &str) = (SUBSYSTEM, HOST);
const STRANGER: &str = "nqn.2026-01.example:host-b";

fn secret() -> Secret {
    Secret::generate(Some(Hash::Sha256)).unwrap()
}

fn secrets(host: &Secret, own: Option<&Secret>) -> Secrets {
    let hosts = BTreeMap::from([(HOST.to_owned(), host.clone())]);
    Secrets { hosts, subsystem: own.cloned() }
}

fn offered(secrets: Secrets) -> Offered {
    let hosts = vec![HOST.to_owned(), STRANGER.to_owned()];
    Offered::by(ExportSpec { hosts, secrets, ..spec("127.0.0.1:0".parse().unwrap()) })
}

/// The host's side, with the cheapest group.
fn proof(secret: &Secret) -> chap::Host {
    proof_of(secret, None)
}

fn proof_of(secret: &Secret, own: Option<&Secret>) -> chap::Host {
    let names = Names { host: HOST.into(), subsystem: SUBSYSTEM.into() };
    let offer = Offer { groups: vec![Group::Null], ..Offer::default() };
    chap::Host::new(names, secret.clone(), own.cloned(), offer).unwrap()
}

/// Our own initiator.
fn open(offered: &Offered, credentials: Option<Credentials>) -> Result<Handle, Trouble> {
    let (namespace, digests) = (1, Digests { header: false, data: true });
    Handle::open(Target {
        host: offered.at().ip().to_string(),
        port: offered.at().port(),
        subsystem: SUBSYSTEM.into(),
        namespace,
        digests,
        host_nqn: HOST.into(),
        host_id: [3; 16],
        credentials,
    })
}

fn credentials(secret: &Secret, own: Option<&Secret>) -> Option<Credentials> {
    let (secret, of_controller) = (secret.clone(), own.cloned());
    Some(Credentials { secret, of_controller, offer: Offer::default() })
}

#[test]
fn our_own_initiator_gets_in_with_every_hash_and_group() {
    let (secret, own) = (secret(), secret());
    let offered = offered(secrets(&secret, Some(&own)));
    for hash in Hash::ALL {
        for group in Group::ALL {
            let offer = Offer { hashes: vec![hash], groups: vec![group] };
            let (secret, of_controller) = (secret.clone(), Some(own.clone()));
            let credentials = Credentials { secret, of_controller, offer };
            let drive = open(&offered, Some(credentials)).unwrap();
            let bytes = [hash as u8 * 16 + group as u8; 4096];
            drive.write_at(&bytes, 8192).unwrap();
            let mut found = [0; 4096];
            drive.read_at(&mut found, 8192).unwrap();
            assert_eq!(found, bytes, "{hash:?} {group:?}");
        }
    }
    offered.end();
}

#[test]
fn who_does_not_know_a_secret_is_told() {
    let (good, own, bad) = (secret(), secret(), secret());
    let offered = offered(secrets(&good, Some(&own)));
    let why = |its: Option<Credentials>| open(&offered, its).map(|_| ()).unwrap_err();
    assert_eq!(why(None), Trouble::Authentication);
    let of_host = Trouble::Unproven(Unproven::Host(Failure::Failed));
    assert_eq!(why(credentials(&bad, None)), of_host);
    assert_eq!(why(credentials(&bad, Some(&own))), of_host);
    let of_controller = Trouble::Unproven(Unproven::Controller(Failure::Failed));
    assert_eq!(why(credentials(&good, Some(&bad))), of_controller);
    assert!(open(&offered, credentials(&good, None)).is_ok());
    offered.end();
    // A subsystem without a secret cannot prove anything; one that does not ask does not, either.
    let one_sided = self::offered(secrets(&good, None));
    assert_eq!(open(&one_sided, credentials(&good, Some(&own))).map(|_| ()), Err(of_host));
    one_sided.end();
    let silent = self::offered(Secrets::default());
    assert_eq!(open(&silent, credentials(&good, Some(&own))).map(|_| ()), Err(Trouble::NotAsked));
    assert!(open(&silent, credentials(&good, None)).is_ok());
    silent.end();
}

#[test]
fn nothing_is_served_before_and_all_after() {
    let both = Choice { digests: Digests { header: true, data: true }, ..Choice::PLAIN };
    let choices = [Choice::PLAIN, both, Choice { flow_control: true, alignment: 7, ..both }];
    for choice in choices {
        let (good, own) = (secret(), secret());
        let offered = offered(secrets(&good, Some(&own)));
        let mut admin = Wire::open(offered.at(), choice);
        let controller = admin.connect(NAMES, 0, ANY_CONTROLLER).unwrap();
        assert!(admin.has_to_authenticate);
        let required = Status::AUTHENTICATION_REQUIRED.for_good();
        assert_eq!(admin.run(property_get(Property::Status), 0).0, required);
        assert_eq!(admin.run(Command::identify_controller(), 4096).0, required);
        admin.prove(&mut proof_of(&good, Some(&own))).unwrap();
        admin.enable();
        let mut io = Wire::open(offered.at(), choice);
        assert_eq!(io.connect(NAMES, 1, controller), Ok(controller));
        assert!(io.has_to_authenticate, "each connection");
        assert_eq!(io.run(Command::read(1, 0, 8), 4096).0, required);
        io.prove(&mut proof(&good)).unwrap();
        let mut host = Host { admin, io, controller };
        host.write(1, 0, &[7; 4096]);
        assert_eq!(host.read(1, 0, 8), [7; 4096]);
        // One without a secret gets in as ever, and another answer than a host with one.
        let mut other = Wire::open(offered.at(), choice);
        other.connect((SUBSYSTEM, STRANGER), 0, ANY_CONTROLLER).unwrap();
        assert!(!other.has_to_authenticate);
        other.enable();
        offered.end();
    }
}

/// A connection that has to prove something.
fn connected(offered: &Offered) -> Wire {
    let mut wire = Wire::open(offered.at(), Choice::PLAIN);
    wire.connect(NAMES, 0, ANY_CONTROLLER).unwrap();
    wire
}

/// Fetches the failure, after which nothing comes.
fn failure(mut wire: Wire) -> u8 {
    let message = wire.hear();
    assert_eq!((message[0], message[1], message[6]), (0, 0xf1, 1), "AUTH_Failure1");
    assert_eq!(wire.receive_pdu().map(|_| ()), Err(End::Closed));
    message[7]
}

#[test]
fn whatever_else_a_host_says_ends_its_connection() {
    let good = secret();
    let offered = offered(secrets(&good, None));
    let wire = || connected(&offered);
    let (message, payload) = (Failure::Message as u8, Failure::Payload as u8);
    assert_eq!(failure(wire()), message, "nothing to fetch yet");
    let mut its = wire();
    assert_eq!(its.tell(&[0; 100], true), Status::SUCCESS);
    assert_eq!(failure(its), payload, "a message of zeroes");
    let mut its = wire();
    its.tell(&proof(&good).negotiate()[..70], true);
    assert_eq!(failure(its), payload, "cut short");
    let mut its = wire();
    its.tell(&proof(&good).negotiate(), true);
    its.tell(&proof(&good).negotiate(), true);
    assert_eq!(failure(its), message, "twice");
    let mut its = wire();
    let mut host = proof(&good);
    its.tell(&host.negotiate(), true);
    let reply = host.reply(&its.hear()).unwrap();
    its.tell(&reply[..reply.len() - 1], true);
    assert_eq!(failure(its), payload, "a reply cut short");
    // What was right on another connection.
    let mut its = wire();
    its.tell(&host.negotiate(), true);
    its.hear();
    its.tell(&reply, true);
    assert_eq!(failure(its), Failure::Failed as u8, "an old reply");
    let mut its = wire();
    its.tell(&host.failure(Failure::NoHash), true);
    assert_eq!(failure(its), message, "of no transaction");
    let mut its = wire();
    its.tell(&host.negotiate(), true);
    its.tell(&host.failure(Failure::NoHash), true);
    assert_eq!(its.receive_pdu().map(|_| ()), Err(End::Closed), "it has given up");
    offered.end();
}

#[test]
fn commands_of_another_form_are_refused() {
    let good = secret();
    let offered = offered(secrets(&good, None));
    let mut wire = connected(&offered);
    let (field, length) = (Status::INVALID_FIELD.for_good(), Status::SGL_LENGTH.for_good());
    let negotiate = proof(&good).negotiate();
    let mut other = authentication_send(72);
    other.dwords[10] ^= 1 << 24;
    assert_eq!(wire.put(other, &negotiate, true), field, "another protocol");
    assert_eq!(wire.put(authentication_send(71), &negotiate, true), length);
    assert_eq!(wire.put(authentication_send(0), &negotiate, true), field);
    assert_eq!(wire.put(authentication_send(4097), &[1; 4097], true), field);
    assert_eq!(wire.run(authentication_receive(0), 0).0, field);
    assert_eq!(wire.run(authentication_receive(16385), 16385).0, field);
    assert_eq!(wire.run(authentication_receive(4096), 512).0, length);
    // None of that has changed anything.
    wire.prove(&mut proof(&good)).unwrap();
    wire.enable();
    // A challenge that does not fit is not said twice.
    let mut wire = connected(&offered);
    wire.tell(&negotiate, true);
    wire.ask(authentication_receive(64), 64);
    assert_eq!(wire.receive_pdu().map(|_| ()), Err(End::Closed));
    // Data that nobody has asked for.
    let mut wire = connected(&offered);
    let send = authentication_send(72).with_sgl(Sgl::Transport { bytes: 72 }).with_id(9);
    let capsule = wire.capsule(send, &[]);
    wire.send_raw(&capsule);
    wire.send_raw(&capsule);
    assert!(wire.receive_pdu().is_ok(), "it is asked for");
    assert_eq!(wire.receive_pdu().map(|_| ()), Err(End::Term(2, 0)));
    offered.end();
}

#[test]
fn who_has_not_proven_anything_is_in_nobodys_way() {
    let good = secret();
    let offered = offered(secrets(&good, None));
    let mut admin = connected(&offered);
    admin.prove(&mut proof(&good)).unwrap();
    admin.enable();
    let mut second = Wire::open(offered.at(), Choice::PLAIN);
    let controller = second.connect(NAMES, 0, ANY_CONTROLLER).unwrap() - 1;
    // Somebody who knows all names and numbers.
    let mut hostile = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(hostile.connect(NAMES, 1, controller), Ok(controller));
    let mut io = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(io.connect(NAMES, 1, controller), Ok(controller), "the place is free");
    io.prove(&mut proof(&good)).unwrap();
    assert!(io.run(Command::read(1, 0, 1), 512).0.is_success());
    // Now it is not, as those see who ask; and it is of no use to know it too late.
    let mut late = Wire::open(offered.at(), Choice::PLAIN);
    assert_eq!(late.connect(NAMES, 1, controller).unwrap_err().0, Status::SEQUENCE);
    hostile.prove(&mut proof(&good)).unwrap();
    assert_eq!(hostile.receive_pdu().map(|_| ()), Err(End::Closed));
    assert!(io.run(Command::read(1, 0, 1), 512).0.is_success());
    assert!(admin.run(Command::identify_controller(), 4096).0.is_success());
    offered.end();
}

#[test]
fn a_host_that_says_nothing_has_to_go() {
    let offered = offered(secrets(&secret(), None));
    let mut wire = connected(&offered);
    // Longer than it may take.
    wire.stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    assert_eq!(wire.receive_pdu().map(|_| ()), Err(End::Closed));
    offered.end();
}

#[test]
fn secrets_are_changed_while_hosts_are_connected() {
    let (first, second) = (secret(), secret());
    let mut offered = offered(secrets(&first, None));
    let mut before = connected(&offered);
    before.prove(&mut proof(&first)).unwrap();
    before.enable();
    offered.set_secrets(&secrets(&second, None));
    assert!(before.run(Command::identify_controller(), 4096).0.is_success(), "it stays");
    let mut wire = connected(&offered);
    assert_eq!(wire.prove(&mut proof(&first)), Err(Unproven::Host(Failure::Failed)));
    connected(&offered).prove(&mut proof(&second)).unwrap();
    offered.set_secrets(&Secrets::default());
    let mut wire = connected(&offered);
    assert!(!wire.has_to_authenticate);
    wire.enable();
    offered.end();
}

#[test]
fn who_never_proved_anything_has_to_when_a_secret_comes() {
    let good = secret();
    // By a secret that is set, and by a namespace that comes with one.
    for comes in [false, true] {
        let mut offered = offered(Secrets::default());
        let connect = |host| Host::named(offered.at(), (SUBSYSTEM, host), Choice::PLAIN);
        let (mut host, mut other) = (connect(HOST), connect(STRANGER));
        host.write(1, 0, &[7; 4096]);
        let (hosts, secrets) = (vec![HOST.to_owned()], secrets(&good, None));
        let more = ExportSpec { hosts, secrets: secrets.clone(), ..spec(offered.at()) };
        let start = || NvmeTcpExport::start(&offered.ports, offered.rig.parts(), more).unwrap();
        let more = comes.then(start);
        if !comes {
            offered.set_secrets(&secrets);
        }
        assert_eq!(host.io.receive_pdu().map(|_| ()), Err(End::Closed));
        assert_eq!(host.admin.receive_pdu().map(|_| ()), Err(End::Closed));
        let mut late = Wire::open(offered.at(), Choice::PLAIN);
        assert!(late.connect(NAMES, 2, host.controller).is_err(), "it has ended");
        assert_eq!(other.read(1, 0, 8), [7; 4096], "another host is not concerned");
        let mut again = connected(&offered);
        again.prove(&mut proof(&good)).unwrap();
        again.enable();
        drop(more);
        offered.end();
    }
}

#[test]
fn a_secret_that_is_changed_while_it_is_proven_is_worth_nothing() {
    let (first, second) = (secret(), secret());
    let mut offered = offered(secrets(&first, None));
    let mut admin = Wire::open(offered.at(), Choice::PLAIN);
    let controller = admin.connect(NAMES, 0, ANY_CONTROLLER).unwrap();
    admin.prove(&mut proof(&first)).unwrap();
    admin.enable();
    for (queue, controller) in [(0, ANY_CONTROLLER), (1, controller)] {
        for (next, is_in) in [(secrets(&second, None), false), (Secrets::default(), true)] {
            offered.set_secrets(&secrets(&first, None));
            let mut wire = Wire::open(offered.at(), Choice::PLAIN);
            wire.connect(NAMES, queue, controller).unwrap();
            let mut host = proof(&first);
            wire.tell(&host.negotiate(), true);
            let reply = host.reply(&wire.hear()).unwrap();
            offered.set_secrets(&next);
            assert_eq!(wire.tell(&reply, true), Status::SUCCESS);
            assert_eq!(host.conclude(&wire.hear()), Ok(None), "the proof is right");
            match (is_in, queue) {
                (true, 0) => wire.enable(),
                (true, _) => assert!(wire.run(Command::read(1, 0, 1), 512).0.is_success()),
                (false, _) => assert_eq!(wire.receive_pdu().map(|_| ()), Err(End::Closed)),
            }
        }
    }
    offered.end();
}

#[test]
fn a_secret_of_one_namespace_is_asked_for_by_the_subsystem() {
    let good = secret();
    let mut offered = offered(Secrets::default());
    let at = offered.at();
    assert!(!connected(&offered).has_to_authenticate);
    let hosts = vec![HOST.to_owned()];
    let more = ExportSpec { hosts, secrets: secrets(&good, None), ..spec(at) };
    let more = NvmeTcpExport::start(&offered.ports, offered.rig.parts(), more).unwrap();
    assert!(connected(&offered).has_to_authenticate);
    drop(more);
    assert!(connected(&offered).has_to_authenticate, "the host may connect still");
    connected(&offered).prove(&mut proof(&good)).unwrap();
    offered.set_secrets(&Secrets::default());
    assert!(!connected(&offered).has_to_authenticate);
    // A secret of who may not connect is a mistake.
    let odd =
        ExportSpec { hosts: vec![STRANGER.into()], secrets: secrets(&good, None), ..spec(at) };
    let refused = NvmeTcpExport::start(&offered.ports, offered.rig.parts(), odd);
    let Err(ExportError::Spec(why)) = refused else { panic!("it was started") };
    assert!(why.contains(HOST), "{why}");
    offered.end();
}
