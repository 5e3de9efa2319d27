//! A host proves who it is, on each of its connections, before anything else is done there:
//! DH-HMAC-CHAP, over two commands (Base 6.1, 6.2, 8.13).
//!
//! The time that a host has is what is left of setting its connection up ([`Wire::until`]); what is
//! worked out later than that is not told. Of all hosts one at a time has an exponentiation done:
//! who only wants to burn our time gets one core at most, and others their turn, or none in time.

use ashlar_reactor::nvme::chap::{Controller, Failure, MESSAGE_BYTES_MAX};
use ashlar_reactor::nvme::command::{Sgl, Status};
use ashlar_reactor::nvme::fabrics::{self, Connect, authentication_bytes};

use crate::nvme_tcp::port::House;
use crate::nvme_tcp::wire::{Refused, Taken, Wire};

/// Most bytes that a host fetches at a time; what follows a message is zero.
const RECEIVE_BYTES_MAX: u32 = 16 << 10;

/// What a command has come to, if the connection goes on.
type Done = Result<Status, Refused>;

/// Returns once the host has proven it.
pub(crate) fn authenticate(
    wire: &mut Wire,
    connect: Connect,
    mut proof: Controller,
    house: &House,
) -> Result<(), Refused> {
    loop {
        let taken = wire.take()?;
        let kind = fabrics::Kind::of(&taken.command);
        let status = match kind {
            Some(fabrics::Kind::AuthenticationSend) => send(wire, &taken, &mut proof, house)?,
            Some(fabrics::Kind::AuthenticationReceive) => receive(wire, &taken, &mut proof)?,
            Some(
                fabrics::Kind::PropertySet
                | fabrics::Kind::Connect
                | fabrics::Kind::PropertyGet
                | fabrics::Kind::Disconnect,
            )
            | None => Status::AUTHENTICATION_REQUIRED.for_good(),
        };
        let head = if connect.no_flow_control { 0 } else { wire.head(connect.entries) };
        wire.complete(&taken.command, status, 0, head)?;
        match verdict(&proof, kind) {
            None => {}
            Some(Ok(())) => return Ok(()),
            Some(Err(why)) => {
                wire.farewell();
                return Err(why);
            }
        }
    }
}

/// What the proof has come to with a command of this kind. A host that is not believed fetches that
/// from here; by what it sends a proof fails only if it does not believe us.
fn verdict(proof: &Controller, kind: Option<fabrics::Kind>) -> Option<Result<(), Refused>> {
    let refused = match kind == Some(fabrics::Kind::AuthenticationSend) {
        true => Refused::ByHost,
        false => Refused::Unproven,
    };
    proof.verdict().map(|verdict| verdict.map_err(refused))
}

/// The host sends a message.
fn send(wire: &mut Wire, taken: &Taken, proof: &mut Controller, house: &House) -> Done {
    let Taken { command, data } = taken;
    let invalid = Ok(Status::INVALID_FIELD.for_good());
    let Some(bytes) = authentication_bytes(command).filter(|its| *its > 0) else { return invalid };
    if bytes as usize > MESSAGE_BYTES_MAX {
        return invalid;
    }
    let fetched;
    let message = match (command.sgl(), data) {
        (_, None) => return Ok(Status::TRANSIENT_TRANSPORT),
        (Some(Sgl::InCapsule { offset: 0, bytes: its }), Some(data))
            if its == bytes && data.len() == bytes as usize =>
        {
            data
        }
        (Some(Sgl::Transport { bytes: its }), Some(data)) if its == bytes && data.is_empty() => {
            match wire.fetch(command, bytes)? {
                None => return Ok(Status::TRANSIENT_TRANSPORT),
                Some(data) => fetched = data,
            }
            &fetched
        }
        (Some(_) | None, Some(_)) => return Ok(Status::SGL_LENGTH.for_good()),
    };
    let until = wire.until;
    proof.take_in_turn(message, || house.turn(until));
    wire.check_time()?;
    Ok(Status::SUCCESS)
}

/// The host fetches a message.
fn receive(wire: &mut Wire, taken: &Taken, proof: &mut Controller) -> Done {
    let asked = authentication_bytes(&taken.command).filter(|its| *its > 0);
    let Some(bytes) = asked.filter(|its| *its <= RECEIVE_BYTES_MAX) else {
        return Ok(Status::INVALID_FIELD.for_good());
    };
    if taken.command.sgl() != Some(Sgl::Transport { bytes }) {
        return Ok(Status::SGL_LENGTH.for_good());
    }
    let mut message = proof.give();
    let room = bytes as usize;
    if message.len() > room {
        // It was asked for in vain, and is not said twice.
        return Err(Refused::Unproven(Failure::Payload));
    }
    message.resize(room, 0);
    wire.give(&taken.command, &message)?;
    Ok(Status::SUCCESS)
}

#[cfg(test)]
mod tests {
    //! Goal: the log says which side did not believe the other.
    //! Method: both sides without a connection, and a wrong secret of either.

    use ashlar_reactor::nvme::chap::{Group, Hash, Host, Names, Offer, Secret};

    use super::*;

    fn secret() -> Secret {
        Secret::generate(Some(Hash::Sha256)).unwrap()
    }

    /// What is logged where the host and this side have these secrets: the host's, the subsystem's.
    fn outcome(there: [&Secret; 2], here: [&Secret; 2]) -> Result<(), String> {
        let names = Names { host: "host".into(), subsystem: "subsystem".into() };
        let offer = Offer { groups: vec![Group::Null], ..Offer::default() };
        let [its, own] = there.map(Secret::clone);
        let mut host = Host::new(names.clone(), its, Some(own), offer).unwrap();
        let [its, own] = here.map(Secret::clone);
        let mut proof = Controller::new(names, its, Some(own)).unwrap();
        let logged = |proof: &Controller, kind| {
            verdict(proof, Some(kind)).map(|its| its.map_err(|why| why.to_string()))
        };
        proof.take_in_turn(&host.negotiate(), || Some(()));
        let reply = host.reply(&proof.give()).unwrap();
        proof.take_in_turn(&reply, || Some(()));
        assert_eq!(logged(&proof, fabrics::Kind::AuthenticationSend), None);
        let success = proof.give();
        if let Some(outcome) = logged(&proof, fabrics::Kind::AuthenticationReceive) {
            return outcome;
        }
        let last = match host.conclude(&success) {
            Ok(last) => last.expect("it has challenged"),
            Err(_) => host.failure(Failure::Failed),
        };
        proof.take_in_turn(&last, || Some(()));
        logged(&proof, fabrics::Kind::AuthenticationSend).expect("it is over")
    }

    #[test]
    fn who_does_not_believe_the_other_is_said() {
        let (its, own, wrong) = (secret(), secret(), secret());
        assert_eq!(outcome([&its, &own], [&its, &own]), Ok(()));
        let refused = outcome([&wrong, &own], [&its, &own]).unwrap_err();
        assert_eq!(refused, "it has not proven who it is: authentication failed");
        let refused = outcome([&its, &wrong], [&its, &own]).unwrap_err();
        assert!(refused.starts_with("it has refused this side: authentication failed; "));
        assert!(refused.contains("controller secret"), "{refused}");
        // It is another matter if they do not agree on how.
        let refused = Refused::ByHost(Failure::NoHash).to_string();
        assert_eq!(refused, "it has refused this side: no hash function that both know");
    }
}
