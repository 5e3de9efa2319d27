//! Addresses of PCI functions.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Domain, bus, device and function, such as `0000:03:00.0`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PciAddress {
    domain: u16,
    bus: u8,
    device: u8,
    function: u8,
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function:x}")
    }
}

impl FromStr for PciAddress {
    type Err = String;

    /// The domain may be left out.
    fn from_str(text: &str) -> Result<PciAddress, String> {
        let wrong = || format!("{text:?} is no PCI address");
        let number = |part: &str, digits: usize, max: u16| {
            let hex = (1..=digits).contains(&part.len()) && !part.starts_with('+');
            u16::from_str_radix(part, 16).ok().filter(|n| hex && *n <= max)
        };
        let byte = |part, digits, max| u8::try_from(number(part, digits, max)?).ok();
        let parts: Vec<&str> = text.split(':').collect();
        let (domain, bus, rest) = match parts[..] {
            [domain, bus, rest] => (domain, bus, rest),
            [bus, rest] => ("0", bus, rest),
            _ => return Err(wrong()),
        };
        let (device, function) = rest.split_once('.').ok_or_else(wrong)?;
        Ok(PciAddress {
            domain: number(domain, 4, u16::MAX).ok_or_else(wrong)?,
            bus: byte(bus, 2, 0xff).ok_or_else(wrong)?,
            device: byte(device, 2, 0x1f).ok_or_else(wrong)?,
            function: byte(function, 1, 7).ok_or_else(wrong)?,
        })
    }
}

impl TryFrom<String> for PciAddress {
    type Error = String;

    fn try_from(text: String) -> Result<PciAddress, String> {
        text.parse()
    }
}

impl From<PciAddress> for String {
    fn from(address: PciAddress) -> String {
        address.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_that_people_write() {
        let parse = |text: &str| text.parse::<PciAddress>().map(|address| address.to_string());
        assert_eq!(parse("0000:03:00.0").as_deref(), Ok("0000:03:00.0"));
        assert_eq!(parse("03:1f.7").as_deref(), Ok("0000:03:1f.7"));
        assert_eq!(parse("10000:e1:00.0"), Err("\"10000:e1:00.0\" is no PCI address".into()));
        for wrong in
            ["", "3", "03:00", "03:20.0", "03:00.8", "g0:00.0", "0:0:0:0.0", "003:00.0", "+3:00.0"]
        {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        let json = serde_json::to_string(&"3:0.0".parse::<PciAddress>().unwrap()).unwrap();
        assert_eq!(json, "\"0000:03:00.0\"");
        assert!(serde_json::from_str::<PciAddress>("\"x\"").is_err());
    }
}
