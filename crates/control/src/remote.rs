//! Addresses of NVMe/TCP namespaces, as people write them, and what is proven there.

use std::fmt;
use std::str::FromStr;

use ashlar_reactor::nvme::chap::Offer;
use ashlar_reactor::nvme::fabrics::{DISCOVERY_PORT, NQN_BYTES_MAX, PORT};
use ashlar_reactor::nvme::remote;
use serde::{Deserialize, Serialize};
use uuid::Uuid;

use crate::secret::Secret;

pub const SCHEME: &str = "nvme-tcp://";
/// Names of a host have no more (RFC 1035, 2.3.4).
const HOST_BYTES_MAX: usize = 253;

/// `nvme-tcp://HOST[:PORT]/NQN[?nsid=N&hdgst=1&ddgst=1]`. Without an NQN it is a host that can be
/// asked what it offers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct RemoteAddress {
    /// A name or an address; of IPv6 without brackets.
    pub host: String,
    pub port: u16,
    /// Its NQN.
    pub subsystem: Option<String>,
    pub namespace: u32,
    pub header_digest: bool,
    pub data_digest: bool,
}

impl fmt::Display for RemoteAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let host = match self.host.contains(':') {
            true => format!("[{}]", self.host),
            false => self.host.clone(),
        };
        write!(f, "{SCHEME}{host}:{}", self.port)?;
        let Some(subsystem) = &self.subsystem else { return Ok(()) };
        write!(f, "/{subsystem}?nsid={}", self.namespace)?;
        let digests = [("hdgst", self.header_digest), ("ddgst", self.data_digest)];
        digests.iter().filter(|its| its.1).try_for_each(|(name, _)| write!(f, "&{name}=1"))
    }
}

impl FromStr for RemoteAddress {
    type Err = String;

    fn from_str(text: &str) -> Result<RemoteAddress, String> {
        let wrong = |why: &str| format!("{text:?} names no NVMe/TCP namespace: {why}");
        let rest = text.strip_prefix(SCHEME).ok_or_else(|| wrong("it begins in another way"))?;
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (place, subsystem) = match rest.split_once('/') {
            None | Some((_, "")) => (rest.trim_end_matches('/'), None),
            Some((place, subsystem)) => (place, Some(subsystem.to_owned())),
        };
        let usual = if subsystem.is_some() { PORT } else { DISCOVERY_PORT };
        let (host, port) = split_port(place).ok_or_else(|| wrong("its host is none"))?;
        let port = match port {
            None => usual,
            Some(port) => port.parse().map_err(|_| wrong("its port is none"))?,
        };
        let is_graphic = |name: &str| name.bytes().all(|byte| byte.is_ascii_graphic());
        if subsystem.as_ref().is_some_and(|its| its.len() > NQN_BYTES_MAX || !is_graphic(its)) {
            return Err(wrong("its NQN is none"));
        }
        let mut address = RemoteAddress {
            host: host.to_owned(),
            port,
            subsystem,
            namespace: 1,
            header_digest: false,
            data_digest: false,
        };
        for option in query.split('&').filter(|option| !option.is_empty()) {
            address.set(option).ok_or_else(|| {
                wrong(&format!("{option:?} is none of nsid=N, hdgst=0|1 and ddgst=0|1"))
            })?;
        }
        Ok(address)
    }
}

impl RemoteAddress {
    fn set(&mut self, option: &str) -> Option<()> {
        let (name, value) = option.split_once('=')?;
        let flag = || match value {
            "0" => Some(false),
            "1" => Some(true),
            _ => None,
        };
        match name {
            // All ones means all namespaces.
            "nsid" => {
                let number: u32 = value.parse().ok()?;
                self.namespace = (1..u32::MAX).contains(&number).then_some(number)?;
            }
            "hdgst" => self.header_digest = flag()?,
            "ddgst" => self.data_digest = flag()?,
            _ => return None,
        }
        Some(())
    }

    /// What a drive that is there may be called.
    pub fn name(&self) -> Option<String> {
        let last = self.subsystem.as_ref()?.rsplit([':', '/']).next()?;
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
        let name: String = last.chars().map(|c| if is_allowed(c) { c } else { '-' }).collect();
        let name: String = name.trim_start_matches(['-', '.']).chars().take(50).collect();
        (!name.is_empty()).then(|| format!("{name}-n{}", self.namespace))
    }
}

/// Host and port of `host:port`, where brackets are around an IPv6 address.
fn split_port(place: &str) -> Option<(&str, Option<&str>)> {
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']')?;
            host.parse::<std::net::Ipv6Addr>().ok()?;
            match rest {
                "" => (host, None),
                rest => (host, Some(rest.strip_prefix(':')?)),
            }
        }
        None => match place.split_once(':') {
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let is_shown = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:".contains(&byte);
    let good = (1..=HOST_BYTES_MAX).contains(&host.len()) && host.bytes().all(is_shown);
    good.then_some((host, port))
}

impl TryFrom<String> for RemoteAddress {
    type Error = String;

    fn try_from(text: String) -> Result<RemoteAddress, String> {
        text.parse()
    }
}

impl From<RemoteAddress> for String {
    fn from(address: RemoteAddress) -> String {
        address.to_string()
    }
}

/// What this host proves to a target, and has that prove.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Credentials {
    /// This host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<Secret>,
    /// The subsystem's; only where this host has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub controller_secret: Option<Secret>,
}

impl Credentials {
    pub fn are_none(&self) -> bool {
        *self == Credentials::default()
    }

    pub fn of_target(&self) -> Option<remote::Credentials> {
        let secret = self.secret.as_ref()?.0.clone();
        let of_controller = self.controller_secret.as_ref().map(|its| its.0.clone());
        Some(remote::Credentials { secret, of_controller, offer: Offer::default() })
    }
}

/// Who this host is to targets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Initiator(pub Uuid);

impl Initiator {
    /// Its NQN, of the form for who has a UUID (NVM Express Base Specification 2.0, 4.5).
    pub fn nqn(self) -> String {
        format!("nqn.2014-08.org.nvmexpress:uuid:{}", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_people_write() {
        let parse = |text: &str| text.parse::<RemoteAddress>().map(|address| address.to_string());
        for (text, whole) in [
            ("nvme-tcp://a/nqn.x:y", "nvme-tcp://a:4420/nqn.x:y?nsid=1"),
            ("nvme-tcp://10.0.0.1:99/nqn.x?nsid=7", "nvme-tcp://10.0.0.1:99/nqn.x?nsid=7"),
            ("nvme-tcp://[fe80::1]:9/nqn.x", "nvme-tcp://[fe80::1]:9/nqn.x?nsid=1"),
            ("nvme-tcp://[::1]", "nvme-tcp://[::1]:8009"),
            ("nvme-tcp://b.c/", "nvme-tcp://b.c:8009"),
            ("nvme-tcp://b:4420", "nvme-tcp://b:4420"),
            (
                "nvme-tcp://a/nqn.x?hdgst=1&ddgst=1&nsid=2",
                "nvme-tcp://a:4420/nqn.x?nsid=2&hdgst=1&ddgst=1",
            ),
            ("nvme-tcp://a/nqn.x?hdgst=0", "nvme-tcp://a:4420/nqn.x?nsid=1"),
        ] {
            assert_eq!(parse(text).as_deref(), Ok(whole));
            assert_eq!(parse(whole).as_deref(), Ok(whole));
        }
        for wrong in [
            "",
            "nvme-tcp://",
            "nvme-tcp:///nqn.x",
            "tcp://a/nqn.x",
            "nvme-tcp://a:/nqn.x",
            "nvme-tcp://a:70000/nqn.x",
            "nvme-tcp://::1/nqn.x",
            "nvme-tcp://[x]/nqn.x",
            "nvme-tcp://a b/nqn.x",
            "nvme-tcp://a/nqn x",
            "nvme-tcp://a/nqn.x?nsid=0",
            "nvme-tcp://a/nqn.x?nsid=4294967295",
            "nvme-tcp://a/nqn.x?nsid",
            "nvme-tcp://a/nqn.x?tls=1",
        ] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        let json = "\"nvme-tcp://a:4420/nqn.x?nsid=1\"";
        let address: RemoteAddress = serde_json::from_str(json).unwrap();
        assert_eq!(serde_json::to_string(&address).unwrap(), json);
    }

    #[test]
    fn names() {
        let name = |text: &str| text.parse::<RemoteAddress>().unwrap().name();
        assert_eq!(name("nvme-tcp://a/nqn.2014-08.org:box:d1?nsid=3").as_deref(), Some("d1-n3"));
        assert_eq!(name("nvme-tcp://a/nqn.x").as_deref(), Some("nqn.x-n1"));
        assert_eq!(name("nvme-tcp://a/nqn.x:"), None);
        assert_eq!(name("nvme-tcp://a"), None);
    }
}
