//! The host's side: it proves that it knows its secret, and may ask the same of the subsystem.

use std::io;

use subtle::ConstantTimeEq;

use super::group::Exponent;
use super::hash::{Digest, Hash};
use super::message::{self, Kind, Offer, Reply};
use super::response::{Role, Shared};
use super::secret::Secret;
use super::{Draws, Failure, Names, random};

/// Who does not believe whom.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unproven {
    #[error("it does not believe that this host is who it says: {0}")]
    Host(Failure),
    /// It is told so by [`Host::failure`].
    #[error("it does not prove who it is: {0}")]
    Controller(Failure),
}

pub struct Host {
    names: Names,
    secret: Secret,
    /// The subsystem's, if that has to prove it.
    of_controller: Option<Secret>,
    pub(super) offer: Offer,
    draws: Draws,
    pub(super) transaction: u16,
    /// What the controller has to answer, and with which hash.
    expected: Option<(Hash, Option<Digest>)>,
}

impl Host {
    /// An error: the kernel gives no random numbers.
    pub fn new(
        names: Names,
        secret: Secret,
        of_controller: Option<Secret>,
        offer: Offer,
    ) -> io::Result<Host> {
        let transaction = u16::from_le_bytes(random()?);
        let draws = Draws::new()?;
        Ok(Host { names, secret, of_controller, offer, draws, transaction, expected: None })
    }

    /// What is sent first.
    pub fn negotiate(&self) -> Vec<u8> {
        self.offer.encode(self.transaction)
    }

    /// What answers the controller's challenge. It may take milliseconds.
    pub fn reply(&mut self, message: &[u8]) -> Result<Vec<u8>, Unproven> {
        self.check(message, Kind::Challenge)?;
        self.answer(message).map_err(Unproven::Controller)
    }

    /// Whether the controller believes, and has proven what it had to; what is sent last, if
    /// anything.
    pub fn conclude(&mut self, message: &[u8]) -> Result<Option<Vec<u8>>, Unproven> {
        self.check(message, Kind::Success1)?;
        let failed = Unproven::Controller(Failure::Failed);
        let (hash, expected) = self.expected.take().ok_or(failed)?;
        let response = message::read_success1(message, hash).map_err(Unproven::Controller)?;
        let Some(expected) = expected else { return Ok(None) };
        let is_right = response.is_some_and(|its| expected.ct_eq(its).into());
        is_right.then(|| Some(message::success2(self.transaction))).ok_or(failed)
    }

    /// Tells the controller that it is not believed.
    pub fn failure(&self, why: Failure) -> Vec<u8> {
        message::failure(Kind::Failure2, self.transaction, why)
    }

    /// Whether it is the message that is next.
    fn check(&self, message: &[u8], wanted: Kind) -> Result<(), Unproven> {
        match message::kind_of(message) {
            Some((kind, transaction)) if kind == wanted && transaction == self.transaction => {
                Ok(())
            }
            Some((Kind::Failure1, _)) => Err(Unproven::Host(message::read_failure(message))),
            _ => Err(Unproven::Controller(Failure::Message)),
        }
    }

    fn answer(&mut self, message: &[u8]) -> Result<Vec<u8>, Failure> {
        let its = message::Challenge::decode(message)?;
        let (hash, group) = (its.hash, its.group);
        if !self.offer.hashes.contains(&hash) {
            return Err(Failure::NoHash);
        }
        if !self.offer.groups.contains(&group) {
            return Err(Failure::NoGroup);
        }
        let exponent = Exponent::new(group, self.draws.exponent.clone());
        let session = exponent.agree(its.public).map_err(|_| Failure::Payload)?;
        let session = session.as_ref().map(|key| key.as_slice());
        let shared = Shared { hash, session, transaction: self.transaction, names: &self.names };
        let response = shared.response(Role::Host, &self.secret, (its.challenge, its.sequence));
        let mine = self.draws.challenge(hash);
        let secret = self.of_controller.as_ref();
        let expected = secret.map(|secret| shared.response(Role::Controller, secret, mine));
        let reply = Reply {
            response: &response,
            challenge: expected.is_some().then_some(mine),
            public: &exponent.public(),
        };
        let reply = reply.encode(self.transaction);
        self.expected = Some((hash, expected));
        Ok(reply)
    }
}
