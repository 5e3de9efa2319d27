//! What answers a challenge (Base 8.13.5.3, 8.13.5.4): only who knows the secret can say it.

use super::Names;
use super::hash::{Digest, Hash};
use super::secret::Secret;

/// Who answers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Host,
    Controller,
}

/// What both sides know, and answers depend on.
pub(super) struct Shared<'a> {
    pub(super) hash: Hash,
    /// What they have come to, where they have a group.
    pub(super) session: Option<&'a [u8]>,
    pub(super) transaction: u16,
    pub(super) names: &'a Names,
}

impl Shared<'_> {
    /// Answers a challenge, which is bytes and a sequence number.
    pub(super) fn response(
        &self,
        role: Role,
        secret: &Secret,
        (challenge, sequence): (&[u8], u32),
    ) -> Digest {
        let Names { host, subsystem } = self.names;
        let (label, first, second): (&[u8], _, _) = match role {
            Role::Host => (b"HostHost", host, subsystem),
            Role::Controller => (b"Controller", subsystem, host),
        };
        let augmented = self.session.map(|key| self.hash.hmac(&self.hash.of(key), &[challenge]));
        let parts: [&[u8]; 8] = [
            augmented.as_ref().map_or(challenge, |its| its),
            &sequence.to_le_bytes(),
            &self.transaction.to_le_bytes(),
            // SC_C: no secure channel.
            &[0],
            label,
            first.as_bytes(),
            &[0],
            second.as_bytes(),
        ];
        self.hash.hmac(&secret.key_of(first), &parts)
    }
}
