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

/// A challenge, with all that its answer depends on.
pub(super) struct Challenge<'a> {
    pub(super) hash: Hash,
    pub(super) bytes: &'a [u8],
    /// What both sides have come to, where they have a group.
    pub(super) session: Option<&'a [u8]>,
    pub(super) sequence: u32,
    pub(super) transaction: u16,
    pub(super) names: &'a Names,
}

impl Challenge<'_> {
    pub(super) fn response(&self, role: Role, secret: &Secret) -> Digest {
        let Names { host, subsystem } = self.names;
        let (label, first, second): (&[u8], _, _) = match role {
            Role::Host => (b"HostHost", host, subsystem),
            Role::Controller => (b"Controller", subsystem, host),
        };
        let augmented = self.session.map(|key| self.hash.hmac(&self.hash.of(key), &[self.bytes]));
        let parts: [&[u8]; 8] = [
            augmented.as_ref().map_or(self.bytes, |its| its),
            &self.sequence.to_le_bytes(),
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
