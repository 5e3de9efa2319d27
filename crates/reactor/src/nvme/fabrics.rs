//! Commands and pages that only NVMe over Fabrics has: connect, properties, disconnect, discovery.
//!
//! Sections and figures are of the NVM Express Base Specification 2.0. Everything is
//! little-endian; any bytes decode to something or to `None`.

use std::mem::{offset_of, size_of};

use zerocopy::byteorder::little_endian::{U16, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::nvme::command::{Command, words};

/// The opcode of all commands here (Base figure 138); which one says the type, in byte 4.
pub const OPCODE: u8 = 0x7f;
/// The subsystem that every discovery controller answers to (Base 4.5).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// Most bytes of an NVMe qualified name with its terminating zero (Base 4.5).
pub const NQN_BYTES: usize = 256;
/// Most bytes of one, without.
pub const NQN_BYTES_MAX: usize = 223;
/// In Connect: which controller is up to the other side.
pub const ANY_CONTROLLER: u16 = 0xffff;
/// The port of discovery over TCP (Base 3.1.2.3.3); others are agreed on.
pub const DISCOVERY_PORT: u16 = 8009;
pub const PORT: u16 = 4420;

/// AUTHREQ in the result of Connect (Base figure 382): the host has to authenticate; the same, and
/// a secure channel is to follow.
pub const AUTHENTICATE: u32 = 1 << 17;
pub const AUTHENTICATE_AND_SECURE: u32 = 1 << 18;
/// SECP, SPSP1 and SPSP0 of both commands for that (Base 6.1, 6.2).
const SECURITY: u32 = 0xe9 << 24 | 0x01 << 16 | 0x01 << 8;

/// What a fabrics command is (Base figure 376).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    PropertySet = 0x00,
    Connect = 0x01,
    PropertyGet = 0x04,
    AuthenticationSend = 0x05,
    AuthenticationReceive = 0x06,
    Disconnect = 0x08,
}

impl Kind {
    /// `None`: of an unknown kind, or not a fabrics command.
    pub fn of(command: &Command) -> Option<Kind> {
        if command.opcode() != OPCODE {
            return None;
        }
        Some(match command.dwords[1] & 0xff {
            0x00 => Kind::PropertySet,
            0x01 => Kind::Connect,
            0x04 => Kind::PropertyGet,
            0x05 => Kind::AuthenticationSend,
            0x06 => Kind::AuthenticationReceive,
            0x08 => Kind::Disconnect,
            _ => return None,
        })
    }
}

/// What of a controller's registers fabrics know (Base 3.1.3, 6.4 and 6.5).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Property {
    /// CAP, of eight bytes; the others have four.
    Capabilities = 0x00,
    Version = 0x08,
    /// CC.
    Configuration = 0x14,
    /// CSTS.
    Status = 0x1c,
}

impl Property {
    pub fn from_offset(offset: u32) -> Option<Property> {
        Some(match offset {
            0x00 => Property::Capabilities,
            0x08 => Property::Version,
            0x14 => Property::Configuration,
            0x1c => Property::Status,
            _ => return None,
        })
    }

    fn is_long(self) -> bool {
        self == Property::Capabilities
    }
}

/// Base 6.3, double words 10 to 12.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Connect {
    /// 0: the admin queue.
    pub queue: u16,
    /// Entries, from 2.
    pub entries: u16,
    /// The host sends no more than it knows to be taken, without being told (CATTR bit 2).
    pub no_flow_control: bool,
    /// KATO: how long the host may be silent; 0: as long as it likes.
    pub keep_alive_ms: u32,
}

impl Connect {
    pub fn command(self) -> Command {
        assert!(self.entries >= 2, "a queue of {} entries", self.entries);
        let attributes = u32::from(self.no_flow_control) << 2;
        fabrics(Kind::Connect).words([
            u32::from(self.queue) << 16,
            u32::from(self.entries - 1) | attributes << 16,
            self.keep_alive_ms,
        ])
    }

    /// `None`: of a format that is not known here, or of a queue that is too small.
    pub fn from_command(command: &Command) -> Option<Connect> {
        let [format, queue] = words(command.dwords[10]);
        let [size, attributes] = words(command.dwords[11]);
        let entries = size.checked_add(1).filter(|entries| *entries >= 2)?;
        (format == 0).then_some(Connect {
            queue,
            entries,
            no_flow_control: attributes & 1 << 2 != 0,
            keep_alive_ms: command.dwords[12],
        })
    }
}

/// The data of Connect (Base figure 381).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnectData {
    pub host_id: [u8; 16],
    /// CNTLID: [`ANY_CONTROLLER`] with the admin queue.
    pub controller: U16,
    pub reserved_a: [u8; 238],
    pub subsystem: [u8; NQN_BYTES],
    pub host: [u8; NQN_BYTES],
    pub reserved_b: [u8; 256],
}

/// A log page of the discovery controller begins with this (Base figure 264).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DiscoveryHeader {
    /// GENCTR: another value, another content.
    pub generation: U64,
    pub entries: U64,
    /// RECFMT: 0.
    pub format: U16,
    pub reserved: [u8; 1006],
}

/// One way to one subsystem (Base figure 265).
#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DiscoveryEntry {
    /// TRTYPE.
    pub transport: u8,
    /// ADRFAM.
    pub family: u8,
    /// SUBTYPE: [`SUBTYPE_NVME`] or [`SUBTYPE_DISCOVERY`] or others.
    pub subtype: u8,
    /// TREQ: whether a secure channel is required.
    pub requirements: u8,
    /// PORTID.
    pub port: U16,
    /// CNTLID.
    pub controller: U16,
    /// ASQSZ: most entries of an admin queue.
    pub admin_entries_max: U16,
    pub flags: U16,
    pub reserved_a: [u8; 20],
    /// TRSVCID: the port in decimal digits, padded with spaces.
    pub service: [u8; 32],
    pub reserved_b: [u8; 192],
    pub subsystem: [u8; NQN_BYTES],
    /// TRADDR, padded with spaces.
    pub address: [u8; 256],
    /// TSAS: what else TCP has to say; byte 0 is the security, 0 for none.
    pub specific: [u8; 256],
}

pub const TRANSPORT_TCP: u8 = 3;
pub const FAMILY_IPV4: u8 = 1;
pub const FAMILY_IPV6: u8 = 2;
pub const SUBTYPE_NVME: u8 = 2;
/// The discovery subsystem that was asked.
pub const SUBTYPE_DISCOVERY: u8 = 3;
/// Log page 70h.
pub const LOG_DISCOVERY: u8 = 0x70;

const _: () = assert!(size_of::<ConnectData>() == 1024);
const _: () = assert!(offset_of!(ConnectData, host) == 512);
const _: () = assert!(size_of::<DiscoveryHeader>() == 1024);
const _: () = assert!(size_of::<DiscoveryEntry>() == 1024);
const _: () = assert!(offset_of!(DiscoveryEntry, subsystem) == 256);

/// Base 6.4.
pub fn property_get(property: Property) -> Command {
    fabrics(Kind::PropertyGet).words([u32::from(property.is_long()), property as u32])
}

/// Base 6.5; of four bytes.
pub fn property_set(property: Property, value: u32) -> Command {
    assert!(!property.is_long(), "{property:?} cannot be set");
    fabrics(Kind::PropertySet).words([0, property as u32, value, 0])
}

/// Which property a command is about; `None`: none that is known here, or of another size.
pub fn property_of(command: &Command) -> Option<Property> {
    let property = Property::from_offset(command.dwords[11])?;
    (command.dwords[10] & 0x7 == u32::from(property.is_long())).then_some(property)
}

/// Base 6.2: a message of so many bytes for the other side.
pub fn authentication_send(bytes: u32) -> Command {
    fabrics(Kind::AuthenticationSend).words([SECURITY, bytes])
}

/// Base 6.1: its message, of at most so many bytes.
pub fn authentication_receive(bytes: u32) -> Command {
    fabrics(Kind::AuthenticationReceive).words([SECURITY, bytes])
}

/// TL or AL of one of them; `None`: of another protocol.
pub fn authentication_bytes(command: &Command) -> Option<u32> {
    (command.dwords[10] & !0xff == SECURITY).then_some(command.dwords[11])
}

fn fabrics(kind: Kind) -> Command {
    Command::new(u32::from(OPCODE), kind as u32)
}

/// A name of up to [`NQN_BYTES_MAX`] bytes from its field; `None`: it does not end, is not UTF-8 or
/// is too long.
pub fn nqn_from(field: &[u8; NQN_BYTES]) -> Option<&str> {
    let len = field.iter().position(|byte| *byte == 0)?;
    let name = field.get(..len).filter(|name| name.len() <= NQN_BYTES_MAX)?;
    std::str::from_utf8(name).ok()
}

/// The other way; `None`: it is too long.
pub fn nqn_field(name: &str) -> Option<[u8; NQN_BYTES]> {
    let mut field = [0; NQN_BYTES];
    let fits = name.len() <= NQN_BYTES_MAX;
    field.get_mut(..name.len()).filter(|_| fits)?.copy_from_slice(name.as_bytes());
    Some(field)
}

/// `text` in a field that is padded with spaces; what does not fit is left out.
pub fn padded<const N: usize>(text: &str) -> [u8; N] {
    let mut field = [b' '; N];
    field.iter_mut().zip(text.bytes()).for_each(|(place, byte)| *place = byte);
    field
}

#[cfg(test)]
mod tests {
    //! Goal: every command has its fields where the specification puts them.
    //! Method: entries written out by hand from its figures, and read back.

    use super::*;

    #[test]
    fn connect() {
        let asked =
            Connect { queue: 3, entries: 128, no_flow_control: true, keep_alive_ms: 15_000 };
        let command = asked.command();
        assert_eq!((command.dwords[0], command.dwords[1]), (0x7f, 1));
        assert_eq!(command.dwords[10..13], [3 << 16, 127 | 4 << 16, 15_000]);
        assert_eq!(Connect::from_command(&command), Some(asked));
        assert_eq!(Kind::of(&command), Some(Kind::Connect));
        let mut wrong = command;
        wrong.dwords[10] |= 1;
        assert_eq!(Connect::from_command(&wrong), None);
        for size in [0, 0xffff] {
            wrong.dwords[10..12].copy_from_slice(&[0, size]);
            assert_eq!(Connect::from_command(&wrong), None);
        }
    }

    #[test]
    fn properties() {
        let get = property_get(Property::Capabilities);
        assert_eq!((get.dwords[1], get.dwords[10], get.dwords[11]), (4, 1, 0));
        let set = property_set(Property::Configuration, 0x46_0001);
        assert_eq!(set.dwords[10..14], [0, 0x14, 0x46_0001, 0]);
        assert_eq!(property_of(&set), Some(Property::Configuration));
        assert_eq!(property_of(&get), Some(Property::Capabilities));
        let mut wrong = set;
        wrong.dwords[10] = 1;
        assert_eq!(property_of(&wrong), None);
        wrong.dwords[10..12].copy_from_slice(&[0, 0x24]);
        assert_eq!(property_of(&wrong), None);
    }

    #[test]
    fn authentication() {
        let send = authentication_send(72);
        assert_eq!((send.dwords[0], send.dwords[1]), (0x7f, 5));
        assert_eq!(send.dwords[10..12], [0xe901_0100, 72]);
        assert_eq!(authentication_bytes(&send), Some(72));
        let receive = authentication_receive(4096);
        assert_eq!(Kind::of(&receive), Some(Kind::AuthenticationReceive));
        assert_eq!(authentication_bytes(&receive), Some(4096));
        let mut wrong = send;
        wrong.dwords[10] ^= 1 << 24;
        assert_eq!(authentication_bytes(&wrong), None);
    }

    #[test]
    fn names() {
        let field = nqn_field(DISCOVERY_NQN).expect("short enough");
        assert_eq!(nqn_from(&field), Some(DISCOVERY_NQN));
        assert!(nqn_field(&"n".repeat(NQN_BYTES_MAX)).is_some());
        assert_eq!(nqn_field(&"n".repeat(NQN_BYTES_MAX + 1)), None);
        assert_eq!(nqn_field(&"n".repeat(NQN_BYTES + 1)), None);
        assert_eq!(nqn_from(&[b'n'; NQN_BYTES]), None);
        assert_eq!(nqn_from(&[0xff; NQN_BYTES]), None);
        assert_eq!(padded::<4>("ab"), *b"ab  ");
        assert_eq!(padded::<2>("abc"), *b"ab");
    }
}
