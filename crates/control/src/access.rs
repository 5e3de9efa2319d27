//! Who may connect to a Unix socket: whose it is, and with which mode.
//!
//! Names are looked up once, and their numbers kept: a directory service that does not answer when
//! the daemon starts keeps no guest from its disk.

use std::fmt::Display;
use std::process::Command;
use std::str::FromStr;

use ashlar_target::unix_socket::Access;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::refusal::{Answer, Refusal};

/// Bounds looking up one name, in seconds: a directory service may not answer.
const LOOKUP_SECONDS_MAX: &str = "10";
/// The status with which getent says that a name is unknown (getent(1)).
const UNKNOWN: i32 = 2;
/// A group that could not write could not connect either.
const MODE_OF_GROUP: SocketMode = SocketMode(0o660);

/// Who may connect to a Unix socket. What is left out stays as it is, which is usual for a new one.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SocketAccess {
    /// Name or number of the user whose it is; shown as a number. Usual: the daemon's.
    #[serde(default)]
    pub user: Option<String>,
    /// Name or number of its group; shown as a number. Usual: the daemon's.
    #[serde(default)]
    pub group: Option<String>,
    /// Permissions in octal, such as `0660`: who may write may connect. Usual: `0600`, and with a
    /// group `0660`.
    #[serde(default)]
    #[schema(value_type = Option<String>)]
    pub mode: Option<SocketMode>,
}

/// Permissions of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct SocketMode(u32);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?} is no mode of a socket; write three octal digits, such as 0660")]
pub struct ModeError {
    text: String,
}

impl FromStr for SocketMode {
    type Err = ModeError;

    fn from_str(text: &str) -> Result<SocketMode, ModeError> {
        let digits = text.strip_prefix('0').filter(|rest| rest.len() == 3).unwrap_or(text);
        let is_octal = digits.len() == 3 && digits.bytes().all(|its| (b'0'..=b'7').contains(&its));
        let mode = u32::from_str_radix(digits, 8).ok().filter(|_| is_octal);
        mode.map(SocketMode).ok_or_else(|| ModeError { text: text.to_owned() })
    }
}

impl TryFrom<String> for SocketMode {
    type Error = ModeError;

    fn try_from(text: String) -> Result<SocketMode, ModeError> {
        text.parse()
    }
}

impl From<SocketMode> for String {
    fn from(mode: SocketMode) -> String {
        mode.to_string()
    }
}

impl Display for SocketMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl SocketAccess {
    pub fn is_usual(&self) -> bool {
        *self == SocketAccess::default()
    }

    pub fn mode(&self) -> SocketMode {
        let of_user = SocketMode(Access::default().mode);
        let usual = if self.group.is_some() { MODE_OF_GROUP } else { of_user };
        self.mode.unwrap_or(usual)
    }

    /// As it is shown: with the mode that it comes to.
    #[must_use]
    pub fn in_full(&self) -> SocketAccess {
        SocketAccess { mode: Some(self.mode()), ..self.clone() }
    }

    #[must_use]
    pub fn changed(&self, change: &SocketAccess) -> SocketAccess {
        SocketAccess {
            user: change.user.as_ref().or(self.user.as_ref()).cloned(),
            group: change.group.as_ref().or(self.group.as_ref()).cloned(),
            mode: change.mode.or(self.mode),
        }
    }

    /// The same with numbers in the place of names. Waits for what looks these up.
    pub fn in_numbers(&self) -> Answer<SocketAccess> {
        let number = |what: &str, database, name: &Option<String>| -> Answer<Option<String>> {
            let number = name.as_deref().map(|name| number(what, database, name)).transpose()?;
            Ok(number.map(|its| its.to_string()))
        };
        Ok(SocketAccess {
            mode: self.mode,
            user: number("user", "passwd", &self.user)?,
            group: number("group", "group", &self.group)?,
        })
    }

    /// What `in_numbers` has made, as the kernel takes it.
    pub fn access(&self) -> Answer<Access> {
        let number = |what: &str, text: &Option<String>| {
            text.as_deref().map(|text| digits(text).ok_or_else(|| unknown(what, text))).transpose()
        };
        Ok(Access {
            mode: self.mode().0,
            user: number("user", &self.user)?,
            group: number("group", &self.group)?,
        })
    }
}

impl Display for SocketAccess {
    /// `user 64055, mode 0600`
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let named = |what, name: &Option<String>| Some(format!("{what} {}, ", name.as_ref()?));
        let user = named("user", &self.user).unwrap_or_default();
        let group = named("group", &self.group).unwrap_or_default();
        write!(f, "{user}{group}mode {}", self.mode())
    }
}

fn digits(text: &str) -> Option<u32> {
    let is_number = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    // The last one stands for none (chown(2)).
    is_number.then(|| text.parse().ok())?.filter(|its| *its != u32::MAX)
}

fn unknown(what: &str, name: &str) -> Refusal {
    Refusal::invalid(format!("there is no {what} {name} on this host"))
        .fix(format!("make it, or name another one, or a number, by --socket-{what}"))
}

/// Asks a program of the C library's: in this process, the library of a directory service would run
/// beside the reactors.
fn number(what: &str, database: &str, name: &str) -> Answer<u32> {
    if let Some(number) = digits(name) {
        return Ok(number);
    }
    let is_name = name.contains(|its: char| !its.is_ascii_digit());
    if !is_name || name.starts_with('-') || name.contains(['\0', '\n', ':']) {
        return Err(unknown(what, name));
    }
    let failed = |why: &str| {
        Refusal::failed(format!("{what} {name} cannot be looked up: {why}"))
            .fix(format!("name a number by --socket-{what}"))
    };
    let asked = ["getent", database, name];
    let output = Command::new("timeout").arg(LOOKUP_SECONDS_MAX).args(asked).output();
    let output = output.map_err(|error| failed(&error.to_string()))?;
    match output.status.code() {
        Some(0) => {}
        Some(UNKNOWN) => return Err(unknown(what, name)),
        Some(_) | None => return Err(failed(&output.status.to_string())),
    }
    // Both have it third (passwd(5), group(5)).
    let found = String::from_utf8_lossy(&output.stdout);
    let its = found.split(':').nth(2).and_then(digits);
    its.ok_or_else(|| failed("getent says something else"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modes_are_read_and_shown() {
        for text in ["0600", "0660", "0666", "0000", "0777"] {
            let mode: SocketMode = text.parse().unwrap();
            assert_eq!(mode.to_string(), text);
            assert_eq!(text.strip_prefix('0').unwrap().parse(), Ok(mode));
        }
        for wrong in ["", "0", "66", "4755", "06660", "0o660", "068", "+60", "rw-", "600 "] {
            assert!(wrong.parse::<SocketMode>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_group_may_connect_unless_told_otherwise() {
        let mode = |group: Option<&str>, mode: Option<&str>| {
            let (group, mode) = (group.map(str::to_owned), mode.map(|its| its.parse().unwrap()));
            SocketAccess { user: Some("1".into()), group, mode }.to_string()
        };
        assert_eq!(mode(None, None), "user 1, mode 0600");
        assert_eq!(mode(Some("g"), None), "user 1, group g, mode 0660");
        assert_eq!(mode(Some("g"), Some("0600")), "user 1, group g, mode 0600");
    }

    #[test]
    fn names_and_numbers_are_looked_up() {
        let of = |user: &str, group: &str| {
            let (user, group) = (Some(user.to_owned()), Some(group.to_owned()));
            SocketAccess { user, group, mode: None }.in_numbers()?.access()
        };
        let root = Access { mode: 0o660, user: Some(0), group: Some(0) };
        assert_eq!((of("root", "root"), of("0", "0")), (Ok(root), Ok(root)));
        assert_eq!(of("4000000000", "7").unwrap().user, Some(4_000_000_000));
        for nobody in ["no-such-user", "", "-s", "4294967295", "99999999999", "a:b", "a\nb"] {
            let refusal = of(nobody, "0").unwrap_err();
            assert!(refusal.error.contains(&format!("no user {nobody} ")), "{refusal}");
            let error = of("0", nobody).unwrap_err().error;
            assert!(error.contains(&format!("no group {nobody} ")), "{error}");
        }
    }

    #[test]
    fn what_a_change_leaves_out_stays() {
        let access = |user: Option<&str>, mode: Option<&str>| SocketAccess {
            user: user.map(str::to_owned),
            group: None,
            mode: mode.map(|its| its.parse().unwrap()),
        };
        let is = access(Some("a"), Some("0660"));
        assert_eq!(is.changed(&SocketAccess::default()), is);
        assert_eq!(is.changed(&access(Some("b"), None)), access(Some("b"), Some("0660")));
        assert_eq!(is.changed(&access(None, Some("0666"))), access(Some("a"), Some("0666")));
    }
}
