//! DH-HMAC-CHAP: a host and a subsystem prove to each other that they know a secret, without
//! telling it to whoever listens (Base 8.13.5).
//!
//! ```text
//! host                                 controller
//!   AUTH_Negotiate ──────────────────►   hashes and groups that the host knows
//!   ◄─────────── DH-HMAC-CHAP_Challenge  one of each, a challenge, half of a key
//!   DH-HMAC-CHAP_Reply ──────────────►   the answer; a challenge of its own; the other half
//!   ◄──────────── DH-HMAC-CHAP_Success1  the answer to that
//!   DH-HMAC-CHAP_Success2 ───────────►   only where the host has challenged
//! ```
//!
//! Both sides are here without their connection: messages go in and come out. The caller has a
//! thread that may take its time: an exponentiation takes milliseconds.
//!
//! Sections and figures are of the NVM Express Base Specification 2.0 ("Base").
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

mod hash;
mod secret;
mod group;
mod message;
mod response;
mod controller;
mod host;

use std::io;

use zeroize::Zeroizing;

use crate::nvme::chap::group::EXPONENT_BYTES;
use crate::nvme::chap::hash::DIGEST_BYTES_MAX;

pub use crate::nvme::chap::controller::Controller;
pub use crate::nvme::chap::group::Group;
pub use crate::nvme::chap::hash::Hash;
pub use crate::nvme::chap::host::{Host, Unproven};
pub use crate::nvme::chap::message::{MESSAGE_BYTES_MAX, Offer};
pub use crate::nvme::chap::secret::{BadSecret, Secret};

/// Why one side does not believe the other: the reason code explanation of AUTH_Failure1 and
/// AUTH_Failure2 (Base 8.13.3, figures of both).
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[repr(u8)]
pub enum Failure {
    #[error("authentication failed")]
    Failed = 1,
    #[error("no authentication protocol that both know")]
    NoProtocol = 2,
    #[error("a secure channel is not to be had")]
    SecureChannel = 3,
    #[error("no hash function that both know")]
    NoHash = 4,
    #[error("no Diffie-Hellman group that both know")]
    NoGroup = 5,
    #[error("a message with a wrong content")]
    Payload = 6,
    #[error("another message than the one that is next")]
    Message = 7,
}

impl Failure {
    /// Who gives another reason than there is has failed all the same.
    fn from_byte(byte: u8) -> Failure {
        match byte {
            2 => Failure::NoProtocol,
            3 => Failure::SecureChannel,
            4 => Failure::NoHash,
            5 => Failure::NoGroup,
            6 => Failure::Payload,
            7 => Failure::Message,
            _ => Failure::Failed,
        }
    }
}

/// Who proves something to whom, by their NQNs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Names {
    pub host: String,
    pub subsystem: String,
}

/// What one side draws for one conversation.
struct Draws {
    challenge: [u8; DIGEST_BYTES_MAX],
    /// Any but 0, which says that there is no challenge.
    sequence: u32,
    exponent: Zeroizing<[u8; EXPONENT_BYTES]>,
}

impl Draws {
    fn new() -> io::Result<Draws> {
        Ok(Draws {
            challenge: random()?,
            sequence: u32::from_le_bytes(random()?).max(1),
            exponent: Zeroizing::new(random()?),
        })
    }

    /// As long as what the hash makes, with its sequence number.
    fn challenge(&self, hash: Hash) -> (&[u8], u32) {
        (&self.challenge[..hash.bytes()], self.sequence)
    }
}

/// What nobody can guess, from the kernel.
fn random<const N: usize>() -> io::Result<[u8; N]> {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
