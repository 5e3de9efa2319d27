//! A secret that a host and a subsystem share, as text: `DHHC-1:hh:BASE64:` (Base 8.13.5.8), as
//! `nvme gen-dhchap-key` writes it. `hh` says with which hash the name of its owner goes into the
//! key: 00 for none. In the base 64 are the secret's bytes and their CRC-32, low byte first.

use std::fmt;
use std::io;
use std::str::FromStr;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use crc_fast::{CrcAlgorithm, checksum};
use subtle::ConstantTimeEq;
use zeroize::Zeroizing;

use super::hash::{DIGEST_BYTES_MAX, Digest, Hash};

const SCHEME: &str = "DHHC-1:";
const CHECKSUM_BYTES: usize = 4;
const BYTES: [usize; 3] = [32, 48, DIGEST_BYTES_MAX];

/// It is never shown: not by [`Debug`](fmt::Debug) either.
#[derive(Clone)]
pub struct Secret {
    bytes: Zeroizing<Vec<u8>>,
    transformed_by: Option<Hash>,
}

/// Why text is no secret; without the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadSecret {
    #[error("a secret begins with DHHC-1:00:, DHHC-1:01:, DHHC-1:02: or DHHC-1:03:")]
    Scheme,
    #[error("a secret has base 64 and a colon after DHHC-1:hh:")]
    Encoding,
    #[error("a secret has 32, 48 or 64 bytes and a checksum of 4")]
    Length,
    #[error("the checksum of the secret is wrong: it was not copied whole")]
    Checksum,
}

impl Secret {
    /// A new one from the kernel's random numbers.
    pub fn generate(transformed_by: Option<Hash>) -> io::Result<Secret> {
        let len = transformed_by.map_or(BYTES[0], Hash::bytes);
        let mut bytes = Zeroizing::new(vec![0; len]);
        getrandom::fill(&mut bytes)?;
        Ok(Secret { bytes, transformed_by })
    }

    /// What it is read from.
    pub fn to_text(&self) -> Zeroizing<String> {
        let checked = Zeroizing::new([&*self.bytes, &crc32(&self.bytes)[..]].concat());
        let mut text = Zeroizing::new(format!("{SCHEME}{:02}:", self.transformed_by_byte()));
        STANDARD.encode_string(&*checked, &mut text);
        text.push(':');
        text
    }

    fn transformed_by_byte(&self) -> u8 {
        self.transformed_by.map_or(0, |hash| hash as u8)
    }

    /// The key that its owner, by this NQN, has (Base 8.13.5.7).
    pub(super) fn key_of(&self, owner: &str) -> Digest {
        match self.transformed_by {
            None => self.bytes.clone(),
            Some(hash) => hash.hmac(&self.bytes, &[owner.as_bytes(), b"NVMe-over-Fabrics"]),
        }
    }
}

impl FromStr for Secret {
    type Err = BadSecret;

    fn from_str(text: &str) -> Result<Secret, BadSecret> {
        let rest = text.strip_prefix(SCHEME).ok_or(BadSecret::Scheme)?;
        let (transformed_by, rest) = rest.split_once(':').ok_or(BadSecret::Scheme)?;
        let transformed_by = match transformed_by {
            "00" => None,
            "01" => Some(Hash::Sha256),
            "02" => Some(Hash::Sha384),
            "03" => Some(Hash::Sha512),
            _ => return Err(BadSecret::Scheme),
        };
        let encoded = rest.strip_suffix(':').ok_or(BadSecret::Encoding)?;
        let decoded = STANDARD.decode(encoded).map_err(|_| BadSecret::Encoding)?;
        let decoded = Zeroizing::new(decoded);
        let (bytes, found) =
            decoded.split_last_chunk::<CHECKSUM_BYTES>().ok_or(BadSecret::Length)?;
        if !BYTES.contains(&bytes.len()) {
            return Err(BadSecret::Length);
        }
        if crc32(bytes) != *found {
            return Err(BadSecret::Checksum);
        }
        Ok(Secret { bytes: Zeroizing::new(bytes.to_vec()), transformed_by })
    }
}

fn crc32(bytes: &[u8]) -> [u8; CHECKSUM_BYTES] {
    let [a, b, c, d, ..] = checksum(CrcAlgorithm::Crc32IsoHdlc, bytes).to_le_bytes();
    [a, b, c, d]
}

impl PartialEq for Secret {
    fn eq(&self, other: &Secret) -> bool {
        self.transformed_by == other.transformed_by && self.bytes.ct_eq(&other.bytes).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}
