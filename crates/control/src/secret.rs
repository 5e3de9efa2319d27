//! Secrets for NVMe/TCP (DH-HMAC-CHAP), as the API takes them and the catalog keeps them. Nothing
//! else shows them.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::str::FromStr;

use ashlar_reactor::nvme::chap;
use ashlar_target::secrets::Secrets;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};
use zeroize::Zeroizing;

use crate::refusal::{Answer, Refusal};

/// A file with a secret has no more.
const FILE_BYTES_MAX: u64 = 4096;

/// Text of the form `DHHC-1:hh:BASE64:`, as `ashlar gen-secret` makes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Secret(pub chap::Secret);

impl FromStr for Secret {
    type Err = chap::BadSecret;

    fn from_str(text: &str) -> Result<Secret, chap::BadSecret> {
        text.trim().parse().map(Secret)
    }
}

impl Serialize for Secret {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&self.0.to_text())
    }
}

impl<'de> Deserialize<'de> for Secret {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Secret, D::Error> {
        let text = Zeroizing::new(String::deserialize(deserializer)?);
        text.parse().map_err(de::Error::custom)
    }
}

impl Secret {
    /// From a file with one line; and whether others can read that.
    pub fn read(path: &Path) -> Answer<(Secret, Option<String>)> {
        let shown = path.display();
        let read = || -> std::io::Result<_> {
            let file = File::open(path)?;
            let mode = file.metadata()?.permissions().mode();
            let mut text = Zeroizing::new(String::new());
            file.take(FILE_BYTES_MAX).read_to_string(&mut text)?;
            Ok((text, mode & 0o077 != 0))
        };
        let (text, is_open) = read().map_err(|error| {
            Refusal::invalid(format!("the secret in {shown} cannot be read: {error}"))
                .fix("name a file with one line; `ashlar gen-secret > FILE` makes one")
        })?;
        let secret = text.parse().map_err(|error| {
            Refusal::invalid(format!("{shown}: {error}"))
                .fix("use what `ashlar gen-secret` or `nvme gen-dhchap-key` has written")
        })?;
        let note = format!("others can read {shown}; `chmod 600` keeps them from that");
        Ok((secret, is_open.then_some(note)))
    }
}

/// What is kept of an export's secrets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeptSecrets {
    /// By NQN.
    pub hosts: BTreeMap<String, Secret>,
    /// The subsystem's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller: Option<Secret>,
}

impl KeptSecrets {
    pub fn is_empty(&self) -> bool {
        self.hosts.is_empty() && self.controller.is_none()
    }

    pub fn of_target(&self) -> Secrets {
        let hosts = self.hosts.iter().map(|(nqn, secret)| (nqn.clone(), secret.0.clone()));
        let subsystem = self.controller.as_ref().map(|its| its.0.clone());
        Secrets { hosts: hosts.collect(), subsystem }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    #[test]
    fn they_are_kept_and_not_shown() {
        let json = format!("{{\"hosts\":{{\"nqn.x\":\"{TEXT}\"}}}}");
        let kept: KeptSecrets = serde_json::from_str(&json).unwrap();
        assert_eq!(serde_json::to_string(&kept).unwrap(), json);
        assert!(!format!("{kept:?}").contains("AAEC"));
        let damaged = json.replace("AAEC", "AAED");
        let why = serde_json::from_str::<KeptSecrets>(&damaged).unwrap_err().to_string();
        assert!(why.contains("checksum") && !why.contains("AAED"), "{why}");
    }

    #[test]
    fn files_have_one_line_and_should_be_closed_to_others() {
        let scratch = tempfile::tempdir().unwrap();
        let path = scratch.path().join("secret");
        assert!(Secret::read(&path).unwrap_err().fix.unwrap().contains("gen-secret"));
        std::fs::write(&path, format!("{TEXT}\n")).unwrap();
        for (mode, noted) in [(0o644, true), (0o600, false)] {
            std::fs::set_permissions(&path, PermissionsExt::from_mode(mode)).unwrap();
            let (secret, note) = Secret::read(&path).unwrap();
            assert_eq!((Ok(secret), note.is_some()), (TEXT.parse(), noted));
        }
        for wrong in ["", "secret", "DHHC-1:00:AAAA:"] {
            std::fs::write(&path, wrong).unwrap();
            assert!(Secret::read(&path).is_err(), "{wrong}");
        }
    }
}
