//! NVMe/TCP namespaces of other hosts: opened, and looked for.
//!
//! Whoever cannot have one is told why, and which command mends it.

use ashlar_drive::health::ANSWER_WITHIN;
use ashlar_reactor::nvme::chap::Unproven;
use ashlar_reactor::nvme::pdu::Digests;
use ashlar_reactor::nvme::remote::{AWAY_MAX, Handle, Identity, Offer, Target, Trouble, offers};
use uuid::Uuid;

use crate::refusal::{Answer, Refusal};
use crate::remote::{Credentials, Initiator, RemoteAddress, SCHEME};

// Whoever waits for an answer hears that the drive is gone, not that it does not answer.
const _: () = assert!(AWAY_MAX.as_millis() + 1000 < ANSWER_WITHIN.as_millis());
/// Of namespaces without a name of their own, one is made from what leads to them.
const NAMELESS: Uuid = Uuid::from_u128(0x2f5e_9d18_77a0_4b32_8f4c_5ad1_93c6_e0b7);

/// Connects to a namespace, and asks what it is.
pub fn open(
    address: &RemoteAddress,
    initiator: Initiator,
    credentials: &Credentials,
) -> Answer<Handle> {
    let Some(subsystem) = &address.subsystem else {
        return Err(what_is_offered(address, initiator, credentials));
    };
    let target = target(address, subsystem, initiator, credentials);
    Handle::open(target).map_err(|trouble| refused(address, initiator, &trouble))
}

fn target(
    address: &RemoteAddress,
    subsystem: &str,
    initiator: Initiator,
    credentials: &Credentials,
) -> Target {
    Target {
        host: address.host.clone(),
        port: address.port,
        subsystem: subsystem.to_owned(),
        namespace: address.namespace,
        digests: Digests { header: address.header_digest, data: address.data_digest },
        host_nqn: initiator.nqn(),
        host_id: initiator.0.into_bytes(),
        credentials: credentials.of_target(),
    }
}

/// What makes two ways to a namespace one drive.
pub fn name(handle: &Handle) -> Uuid {
    let Identity { name, controller, namespace, .. } = handle.identity();
    if name.uuid != [0; 16] {
        return Uuid::from_bytes(name.uuid);
    }
    if name.nguid != [0; 16] {
        return Uuid::from_bytes(name.nguid);
    }
    let leads_there = match name.eui64 {
        [0, 0, 0, 0, 0, 0, 0, 0] => {
            format!("{} {} {namespace}", handle.target().subsystem, controller.serial).into_bytes()
        }
        eui64 => eui64.to_vec(),
    };
    Uuid::new_v5(&NAMELESS, &leads_there)
}

/// Of an address without a subsystem: those that it offers.
fn what_is_offered(
    address: &RemoteAddress,
    initiator: Initiator,
    credentials: &Credentials,
) -> Refusal {
    let text = format!("{address} names no subsystem");
    // What there is can be listed without a proof of who lists it.
    let credentials = Credentials { controller_secret: None, ..credentials.clone() };
    match offers(&target(address, "", initiator, &credentials)) {
        Ok(found) if found.is_empty() => {
            Refusal::invalid(format!("{text}, and the host offers none to {}", initiator.nqn()))
                .fix("let this host in there")
        }
        Ok(found) => Refusal::invalid(format!("{text}; the host offers some"))
            .fix(format!("name one: {}", listed(&found))),
        Err(trouble) => {
            Refusal::invalid(format!("{text}, and the host cannot be asked: {trouble}"))
                .fix(format!("write {SCHEME}HOST:PORT/NQN?nsid=N"))
        }
    }
}

fn listed(offers: &[Offer]) -> String {
    let shown = |offer: &Offer| {
        let brackets = offer.address.contains(':');
        let address = if brackets { format!("[{}]", offer.address) } else { offer.address.clone() };
        format!("{SCHEME}{address}:{}/{}", offer.port, offer.subsystem)
    };
    offers.iter().map(shown).collect::<Vec<_>>().join(", ")
}

fn refused(address: &RemoteAddress, initiator: Initiator, trouble: &Trouble) -> Refusal {
    let text = format!("{address} cannot be used: {trouble}");
    let RemoteAddress { host, port, .. } = address;
    match trouble {
        Trouble::Unresolved(_) => Refusal::unknown(text).fix("check the name of the host"),
        Trouble::Unreachable(_) | Trouble::Lost(_) | Trouble::Silent(_) => Refusal::conflict(text)
            .fix(format!("check that a target listens at {host}:{port}, and the network between")),
        Trouble::NoSubsystem => Refusal::unknown(text).fix(format!(
            "`ashlar drive attach {SCHEME}{host}:{port}` lists what the host offers; or let host \
             {} in there",
            initiator.nqn()
        )),
        Trouble::Stranger => Refusal::conflict(text).fix(format!(
            "let host {} in there; `ashlar serve --host-id` gives this one another identity",
            initiator.nqn()
        )),
        Trouble::Authentication => Refusal::conflict(text).fix(format!(
            "give its secret with --secret FILE; this host is {} there",
            initiator.nqn()
        )),
        Trouble::Unproven(Unproven::Host(_)) => Refusal::conflict(text).fix(format!(
            "give the target the secret in --secret, for host {}; with --controller-secret, it \
             needs one of its own, too",
            initiator.nqn()
        )),
        Trouble::Unproven(Unproven::Controller(_)) => Refusal::conflict(text)
            .fix("check the address, and that --controller-secret is the subsystem's"),
        Trouble::NotAsked => Refusal::conflict(text)
            .fix("give the target this host's secret, or leave --controller-secret out"),
        Trouble::SecureChannel => {
            Refusal::conflict(text).fix("let this host in without TLS, on a network that you trust")
        }
        Trouble::NoDigests => Refusal::conflict(text).fix("leave hdgst and ddgst out"),
        Trouble::NoNamespace { .. } => {
            Refusal::unknown(text).fix("name one of these: add ?nsid=N to the address")
        }
        Trouble::Unsuitable(_) => Refusal::conflict(text).fix("use another namespace"),
        Trouble::Taken => Refusal::conflict(text)
            .fix("`ashlar drive list` shows what is attached; if it was just detached, try again"),
        Trouble::Absurd(_)
        | Trouble::Fault(_)
        | Trouble::Refused { .. }
        | Trouble::LetGo
        | Trouble::Another
        | Trouble::Forgetful
        | Trouble::Away(_)
        | Trouble::Unsteady(_) => Refusal::failed(text),
    }
}
