//! The controller's side: it lets a host in that knows the secret.
//!
//! ```text
//! Negotiating ─► Challenging ─► Challenged ─► Succeeding ─┬──────────────► Proven
//!      │              │             │             │       └► Confirming ────►┘
//!      └──────────────┴─────────────┴─────────────┴────────────┴─► Failing ─► Failed
//! ```
//!
//! In `Challenging`, `Succeeding` and `Failing` the host has to fetch a message, and in the others
//! to send one.

use std::io;
use std::mem;

use subtle::ConstantTimeEq;

use super::group::{Exponent, Group};
use super::hash::Hash;
use super::message::{self, Kind, Offer, Reply};
use super::response::{Role, Shared};
use super::secret::Secret;
use super::{Draws, Failure, Names};

/// Of what a host offers, what is taken: the first. All of them are good enough; the smaller the
/// group, the less it costs.
const HASHES: [Hash; 3] = [Hash::Sha512, Hash::Sha384, Hash::Sha256];
/// ffdhe2048 is last of those that are groups: it has less strength than the smallest hash.
const GROUPS: [Group; 6] = [
    Group::Ffdhe3072,
    Group::Ffdhe4096,
    Group::Ffdhe6144,
    Group::Ffdhe8192,
    Group::Ffdhe2048,
    Group::Null,
];

/// One host that is about to prove who it is.
pub struct Controller {
    names: Names,
    secret: Secret,
    /// Its own, if it has one.
    own: Option<Secret>,
    draws: Draws,
    transaction: u16,
    state: State,
}

/// What was agreed on.
#[derive(Clone, Copy)]
struct Agreed {
    hash: Hash,
    group: Group,
}

enum State {
    Negotiating,
    /// With the message.
    Challenging(Agreed, Vec<u8>),
    Challenged(Agreed),
    /// With the message; it may have to be confirmed.
    Succeeding {
        message: Vec<u8>,
        is_confirmed: bool,
    },
    Confirming,
    Proven,
    Failing(Failure),
    Failed(Failure),
}

impl Controller {
    /// `secret` is the host's, and `own` the subsystem's. An error: the kernel gives no random
    /// numbers.
    pub fn new(names: Names, secret: Secret, own: Option<Secret>) -> io::Result<Controller> {
        let (transaction, state) = (0, State::Negotiating);
        Ok(Controller { names, secret, own, draws: Draws::new()?, transaction, state })
    }

    #[cfg(test)]
    pub(super) fn take(&mut self, message: &[u8]) {
        self.take_in_turn(message, || Some(()));
    }

    /// Takes what the host has sent, which may take milliseconds. `turn` is had before an
    /// exponentiation, and kept for as long as that lasts. Without one the host has failed.
    pub fn take_in_turn<T>(&mut self, message: &[u8], turn: impl FnOnce() -> Option<T>) {
        let state = mem::replace(&mut self.state, State::Failed(Failure::Failed));
        let found = message::kind_of(message);
        if let (Some((Kind::Negotiate, transaction)), State::Negotiating) = (found, &state) {
            self.transaction = transaction;
        }
        let kind = found.filter(|its| its.1 == self.transaction).map(|its| its.0);
        self.state = match (state, kind) {
            (State::Negotiating, Some(Kind::Negotiate)) => self.challenge(message, turn),
            (State::Challenged(agreed), Some(Kind::Reply)) => self.judge(message, agreed, turn),
            (State::Confirming, Some(Kind::Success2)) if message::is_success2(message) => {
                Ok(State::Proven)
            }
            (State::Confirming, Some(Kind::Success2)) => Err(Failure::Payload),
            (_, Some(Kind::Failure2)) => Ok(State::Failed(message::read_failure(message))),
            // It does not go on as it should.
            (_, _) => Err(Failure::Message),
        }
        .unwrap_or_else(State::Failing);
    }

    /// What the host fetches.
    pub fn give(&mut self) -> Vec<u8> {
        let state = mem::replace(&mut self.state, State::Failed(Failure::Failed));
        let (message, next) = match state {
            State::Challenging(agreed, message) => (message, State::Challenged(agreed)),
            State::Succeeding { message, is_confirmed: true } => (message, State::Confirming),
            State::Succeeding { message, is_confirmed: false } => (message, State::Proven),
            State::Failing(why) => (self.failure(why), State::Failed(why)),
            State::Negotiating
            | State::Challenged(_)
            | State::Confirming
            | State::Proven
            | State::Failed(_) => {
                let why = Failure::Message;
                (self.failure(why), State::Failed(why))
            }
        };
        self.state = next;
        message
    }

    /// Whether the host is who it says; `None`: that is not known yet.
    pub fn verdict(&self) -> Option<Result<(), Failure>> {
        match self.state {
            State::Proven => Some(Ok(())),
            State::Failed(why) => Some(Err(why)),
            State::Negotiating
            | State::Challenging(..)
            | State::Challenged(_)
            | State::Succeeding { .. }
            | State::Confirming
            | State::Failing(_) => None,
        }
    }

    fn failure(&self, why: Failure) -> Vec<u8> {
        message::failure(Kind::Failure1, self.transaction, why)
    }

    fn challenge<T>(
        &self,
        message: &[u8],
        turn: impl FnOnce() -> Option<T>,
    ) -> Result<State, Failure> {
        let Offer { hashes, groups } = Offer::decode(message)?;
        let hash = HASHES.into_iter().find(|its| hashes.contains(its)).ok_or(Failure::NoHash)?;
        let group = GROUPS.into_iter().find(|its| groups.contains(its)).ok_or(Failure::NoGroup)?;
        let public = self.in_turn(group, turn, Exponent::public)?;
        let (challenge, sequence) = self.draws.challenge(hash);
        let challenge = message::Challenge { hash, group, sequence, challenge, public: &public };
        Ok(State::Challenging(Agreed { hash, group }, challenge.encode(self.transaction)))
    }

    /// Without a group there is nothing to wait for.
    fn in_turn<T, R>(
        &self,
        group: Group,
        turn: impl FnOnce() -> Option<T>,
        work: impl FnOnce(&Exponent) -> R,
    ) -> Result<R, Failure> {
        let _turn = match group == Group::Null {
            true => None,
            false => Some(turn().ok_or(Failure::Failed)?),
        };
        Ok(work(&Exponent::new(group, self.draws.exponent.clone())))
    }

    fn judge<T>(
        &self,
        message: &[u8],
        Agreed { hash, group }: Agreed,
        turn: impl FnOnce() -> Option<T>,
    ) -> Result<State, Failure> {
        let reply = Reply::decode(message, hash)?;
        let session = self
            .in_turn(group, turn, |exponent| exponent.agree(reply.public))?
            .map_err(|_| Failure::Payload)?;
        let session = session.as_ref().map(|key| key.as_slice());
        let shared = Shared { hash, session, transaction: self.transaction, names: &self.names };
        let expected = shared.response(Role::Host, &self.secret, self.draws.challenge(hash));
        if !bool::from(expected.ct_eq(reply.response)) {
            return Err(Failure::Failed);
        }
        let Some(challenge) = reply.challenge else {
            let message = message::success1(self.transaction, hash, None);
            return Ok(State::Succeeding { message, is_confirmed: false });
        };
        let own = self.own.as_ref().ok_or(Failure::Failed)?;
        let response = shared.response(Role::Controller, own, challenge);
        let message = message::success1(self.transaction, hash, Some(&response));
        Ok(State::Succeeding { message, is_confirmed: true })
    }
}
