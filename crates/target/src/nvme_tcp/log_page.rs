//! Log pages. Pure.
//!
//! Offsets are of the figures of section 5.16.1 of the NVM Express Base Specification 2.0.

use std::net::SocketAddr;

use ashlar_reactor::nvme::command::{Admin, Nvm};
use ashlar_reactor::nvme::fabrics::{
    self, ANY_CONTROLLER, DISCOVERY_NQN, DiscoveryEntry, DiscoveryHeader, FAMILY_IPV4, FAMILY_IPV6,
    NQN_BYTES, SUBTYPE_DISCOVERY, SUBTYPE_NVME, TRANSPORT_TCP, nqn_field, padded,
};
use zerocopy::IntoBytes;

use crate::disk::Counters;
use crate::nvme_tcp::identify::QUEUE_ENTRIES_MAX;
use crate::nvme_tcp::page::Page;

pub(crate) const ERRORS: u8 = 0x01;
pub(crate) const HEALTH: u8 = 0x02;
pub(crate) const FIRMWARE: u8 = 0x03;
pub(crate) const CHANGED_NAMESPACES: u8 = 0x04;
pub(crate) const COMMANDS: u8 = 0x05;
pub(crate) const DISCOVERY: u8 = fabrics::LOG_DISCOVERY;

/// Most namespaces that the list of changed ones names; more are "all".
const CHANGED_MAX: usize = 1024;
const ALL_NAMESPACES: u32 = u32::MAX;

/// Errors are told in completions only: the log has one entry, and it is empty.
pub(crate) fn errors() -> [u8; 64] {
    [0; 64]
}

/// Figure 207. Of wear and temperature a volume has none: the spare is all there, and the
/// temperature 0 means that it is not known.
/// `done`: in so many seconds.
pub(crate) fn health(done: &Counters, up_s: u64) -> [u8; 512] {
    let mut page = Page::<512>::new();
    page.u8(3, 100).u8(4, 10);
    // In thousands of 512 bytes, rounded up.
    page.u64(32, done.read_bytes.div_ceil(512_000)).u64(48, done.write_bytes.div_ceil(512_000));
    page.u64(64, done.reads).u64(80, done.writes);
    page.u64(128, up_s / 3600).u64(160, done.errors);
    page.0
}

/// Figure 209: slot 1 is active.
pub(crate) fn firmware() -> [u8; 512] {
    let mut page = Page::<512>::new();
    page.u8(0, 1).put(8, padded::<8>(env!("CARGO_PKG_VERSION")));
    page.0
}

/// Section 5.16.1.5. `changed`: since it was read last.
pub(crate) fn changed_namespaces(changed: &[u32]) -> [u8; 4096] {
    let mut page = Page::<4096>::new();
    if changed.len() > CHANGED_MAX {
        return page.u32(0, ALL_NAMESPACES).0;
    }
    for (place, id) in page.0.chunks_exact_mut(4).zip(changed) {
        place.copy_from_slice(&id.to_le_bytes());
    }
    page.0
}

/// Figure 213: which commands there are, and which change data.
pub(crate) fn commands() -> [u8; 4096] {
    const SUPPORTED: u32 = 1;
    const CHANGES_DATA: u32 = 1 << 1;
    let mut page = Page::<4096>::new();
    let admin = [
        Admin::GetLogPage,
        Admin::Identify,
        Admin::Abort,
        Admin::SetFeatures,
        Admin::GetFeatures,
        Admin::AsyncEvent,
        Admin::KeepAlive,
    ];
    for opcode in admin {
        page.u32(4 * opcode as usize, SUPPORTED);
    }
    for opcode in [Nvm::Flush, Nvm::Read, Nvm::Compare] {
        page.u32(1024 + 4 * opcode as usize, SUPPORTED);
    }
    for opcode in [Nvm::Write, Nvm::WriteZeroes, Nvm::DatasetManagement] {
        page.u32(1024 + 4 * opcode as usize, SUPPORTED | CHANGES_DATA);
    }
    page.0
}

/// What a discovery controller tells whoever reached it at `at`: of itself, and of `subsystems`.
pub(crate) fn discovery<'a>(
    at: SocketAddr,
    subsystems: impl Iterator<Item = &'a str>,
    generation: u64,
) -> Vec<u8> {
    let itself = discovery_entry(at, DISCOVERY_NQN, SUBTYPE_DISCOVERY);
    let others = subsystems.map(|name| discovery_entry(at, name, SUBTYPE_NVME));
    let entries: Vec<DiscoveryEntry> = std::iter::once(itself).chain(others).collect();
    let header = DiscoveryHeader {
        generation: generation.into(),
        entries: (entries.len() as u64).into(),
        format: 0.into(),
        reserved: [0; 1006],
    };
    [header.as_bytes(), entries.as_bytes()].concat()
}

fn discovery_entry(at: SocketAddr, subsystem: &str, subtype: u8) -> DiscoveryEntry {
    // As the host means it: a port of IPv6 takes those of IPv4, too.
    let address = at.ip().to_canonical();
    DiscoveryEntry {
        transport: TRANSPORT_TCP,
        family: if address.is_ipv4() { FAMILY_IPV4 } else { FAMILY_IPV6 },
        subtype,
        // No secure channel; the host may switch flow control of queues off.
        requirements: 0b110,
        port: at.port().into(),
        controller: ANY_CONTROLLER.into(),
        admin_entries_max: QUEUE_ENTRIES_MAX.into(),
        flags: 0.into(),
        reserved_a: [0; 20],
        service: padded(&at.port().to_string()),
        reserved_b: [0; 192],
        subsystem: nqn_field(subsystem).unwrap_or([0; NQN_BYTES]),
        address: padded(&address.to_string()),
        specific: [0; 256],
    }
}

#[cfg(test)]
mod tests {
    //! Goal: log pages say what is so, where hosts look for it.
    //! Method: bytes by hand from the specification's figures.

    use super::*;

    #[test]
    fn work_is_counted_in_units_of_hosts() {
        let done = Counters { read_bytes: 512_001, writes: 7, ..Counters::default() };
        let page = health(&done, 7200);
        assert_eq!((page[32], page[48], page[80], page[128], page[3]), (2, 0, 7, 2, 100));
    }

    #[test]
    fn a_host_hears_of_the_address_that_it_used() {
        for (at, family, address) in [
            ("[::ffff:192.0.2.1]:4420", FAMILY_IPV4, "192.0.2.1 "),
            ("192.0.2.1:4420", FAMILY_IPV4, "192.0.2.1 "),
            ("[2001:db8::1]:4420", FAMILY_IPV6, "2001:db8::1 "),
        ] {
            let entry = discovery_entry(at.parse().unwrap(), "nqn.2014-08.org.example:a", 2);
            assert_eq!(entry.family, family);
            assert_eq!(&entry.address[..address.len()], address.as_bytes());
        }
    }

    #[test]
    fn changed_namespaces_are_named_or_all() {
        assert_eq!(changed_namespaces(&[3, 258])[..8], [3, 0, 0, 0, 2, 1, 0, 0]);
        let many: Vec<u32> = (1..=1025).collect();
        assert_eq!(changed_namespaces(&many)[..8], [255, 255, 255, 255, 0, 0, 0, 0]);
    }

    #[test]
    fn subsystems_are_named_with_the_address_that_was_reached() {
        let at = "127.0.0.1:4420".parse().unwrap();
        let page = discovery(at, ["nqn.2026-01.example:a"].into_iter(), 3);
        assert_eq!((page.len(), page[0], page[8]), (3 * 1024, 3, 2));
        let entry = &page[2048..];
        assert_eq!(entry[..3], [3, 1, 2]);
        assert_eq!(&entry[32..37], b"4420 ");
        assert_eq!(&entry[256..278], b"nqn.2026-01.example:a\0");
        assert_eq!(&entry[512..522], b"127.0.0.1 ");
        assert_eq!(page[1024 + 2], 3);
    }
}
