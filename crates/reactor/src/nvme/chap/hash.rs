//! Hash functions that both sides may agree on (Base 8.13.5.1), and HMAC with them (RFC 2104).

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest as _, Sha256, Sha384, Sha512};
use zeroize::Zeroizing;

/// Most bytes of a digest.
pub(super) const DIGEST_BYTES_MAX: usize = 64;

/// A digest; it may be a key.
pub(super) type Digest = Zeroizing<Vec<u8>>;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Hash {
    Sha256 = 1,
    Sha384 = 2,
    Sha512 = 3,
}

impl Hash {
    pub const ALL: [Hash; 3] = [Hash::Sha256, Hash::Sha384, Hash::Sha512];

    pub(super) fn from_byte(byte: u8) -> Option<Hash> {
        Hash::ALL.into_iter().find(|its| *its as u8 == byte)
    }

    /// Of a digest, which is also how long a challenge is.
    pub(super) fn bytes(self) -> usize {
        match self {
            Hash::Sha256 => 32,
            Hash::Sha384 => 48,
            Hash::Sha512 => DIGEST_BYTES_MAX,
        }
    }

    pub(super) fn of(self, bytes: &[u8]) -> Digest {
        Zeroizing::new(match self {
            Hash::Sha256 => Sha256::digest(bytes).to_vec(),
            Hash::Sha384 => Sha384::digest(bytes).to_vec(),
            Hash::Sha512 => Sha512::digest(bytes).to_vec(),
        })
    }

    /// HMAC of all parts, one after the other.
    pub(super) fn hmac(self, key: &[u8], parts: &[&[u8]]) -> Digest {
        match self {
            Hash::Sha256 => hmac::<Hmac<Sha256>>(key, parts),
            Hash::Sha384 => hmac::<Hmac<Sha384>>(key, parts),
            Hash::Sha512 => hmac::<Hmac<Sha512>>(key, parts),
        }
    }
}

fn hmac<M: Mac + KeyInit>(key: &[u8], parts: &[&[u8]]) -> Digest {
    let mut mac = <M as KeyInit>::new_from_slice(key).expect("HMAC takes keys of any length");
    parts.iter().for_each(|part| mac.update(part));
    Zeroizing::new(mac.finalize().into_bytes().to_vec())
}
