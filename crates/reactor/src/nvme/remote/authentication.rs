//! Proves to a controller who this host is, and may have it do the same (Base 8.13.5).

use super::wire::{Payload, Wire};
use super::{ANSWER_WITHIN, Trouble};
use crate::nvme::chap::{Host, MESSAGE_BYTES_MAX, Names, Offer, Secret, Unproven};
use crate::nvme::command::Completion;
use crate::nvme::fabrics::{
    AUTHENTICATE, AUTHENTICATE_AND_SECURE, authentication_receive, authentication_send,
};

const WHAT: &str = "authentication";

/// What this host proves, and what it wants to have proven.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Credentials {
    pub secret: Secret,
    /// The subsystem's: if there is one, that has to know it.
    pub of_controller: Option<Secret>,
    pub offer: Offer,
}

/// Does what the answer to Connect asks for.
pub(super) fn authenticate(
    wire: &mut Wire,
    connected: &Completion,
    names: Names,
    credentials: Option<&Credentials>,
) -> Result<(), Trouble> {
    if connected.result & AUTHENTICATE_AND_SECURE != 0 {
        return Err(Trouble::SecureChannel);
    }
    match (connected.result & AUTHENTICATE != 0, credentials) {
        (true, Some(credentials)) => prove(wire, names, credentials),
        (true, None) => Err(Trouble::Authentication),
        // Who pretends to be another would not ask.
        (false, Some(Credentials { of_controller: Some(_), .. })) => Err(Trouble::NotAsked),
        (false, _) => Ok(()),
    }
}

fn prove(wire: &mut Wire, names: Names, credentials: &Credentials) -> Result<(), Trouble> {
    let Credentials { secret, of_controller, offer } = credentials.clone();
    let mut host = Host::new(names, secret, of_controller, offer)?;
    send(wire, &host.negotiate())?;
    let challenge = receive(wire)?;
    let reply = host.reply(&challenge);
    let reply = reply.map_err(|why| tell(wire, &host, why))?;
    send(wire, &reply)?;
    let success = receive(wire)?;
    let last = host.conclude(&success);
    match last.map_err(|why| tell(wire, &host, why))? {
        Some(last) => send(wire, &last),
        None => Ok(()),
    }
}

fn send(wire: &mut Wire, message: &[u8]) -> Result<(), Trouble> {
    let bytes = u32::try_from(message.len()).expect("a short message");
    let command = authentication_send(bytes);
    let answer = wire.call(command, Payload::Out(message), ANSWER_WITHIN, WHAT)?;
    check(&answer)
}

fn receive(wire: &mut Wire) -> Result<Vec<u8>, Trouble> {
    let mut message = vec![0; MESSAGE_BYTES_MAX];
    let bytes = u32::try_from(message.len()).expect("4096");
    let command = authentication_receive(bytes);
    let answer = wire.call(command, Payload::In(&mut message), ANSWER_WITHIN, WHAT)?;
    check(&answer).map(|()| message)
}

fn check(answer: &Completion) -> Result<(), Trouble> {
    match answer.status.is_success() {
        true => Ok(()),
        false => Err(Trouble::Refused { what: WHAT, status: answer.status }),
    }
}

/// The controller hears that it is not believed, if it listens.
fn tell(wire: &mut Wire, host: &Host, why: Unproven) -> Trouble {
    if let Unproven::Controller(reason) = why {
        let _ = send(wire, &host.failure(reason));
    }
    Trouble::Unproven(why)
}
