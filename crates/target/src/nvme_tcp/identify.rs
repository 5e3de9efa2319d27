//! What Identify says of controllers and namespaces. Pure.
//!
//! Offsets are of figures 275 (controller) of the NVM Express Base Specification 2.0 and 97
//! (namespace) of the NVM Command Set Specification 1.0; the version that is claimed is 1.4.

use ashlar_reactor::nvme::command::{COMMAND_BYTES, IDENTIFY_BYTES};
use ashlar_reactor::nvme::fabrics::{nqn_field, padded};
use ashlar_reactor::nvme::power_cycle::PowerCycle;

use crate::nvme_tcp::connection::QUIET_WITHIN;
use crate::nvme_tcp::inbox::CAPSULE_DATA_BYTES_MAX;
use crate::nvme_tcp::page::Page;

/// VS: 1.4.0.
pub(crate) const VERSION: u32 = 0x0001_0400;
/// Blocks as hosts count them: 512 bytes.
pub(crate) const BLOCK_LOG2: u8 = 9;
pub(crate) const BLOCK_BYTES: u64 = 1 << BLOCK_LOG2;
/// Most bytes of one transfer: 2^8 pages of 4 KiB.
const TRANSFER_LOG2: u8 = 8;
pub(crate) const TRANSFER_BYTES_MAX: u32 = 4096 << TRANSFER_LOG2;
/// Most entries of a queue, and so most commands under way on one connection.
pub(crate) const QUEUE_ENTRIES_MAX: u16 = 128;
/// Most asynchronous event requests of one controller.
pub(crate) const ASYNC_EVENTS_MAX: u8 = 4;
/// Most namespaces of one subsystem; their numbers are 1 to this.
pub const NAMESPACES_MAX: u32 = 1024;
/// Keep-alive times are counted in units of 100 ms, this many.
const KEEP_ALIVE_UNITS: u16 = 10;

/// OAES and the configuration of asynchronous events: namespace attributes have changed.
pub(crate) const EVENT_NAMESPACES: u32 = 1 << 8;

const CAPSULE_BYTES_MAX: usize = COMMAND_BYTES + CAPSULE_DATA_BYTES_MAX;

/// What a controller tells of itself.
pub(crate) struct ControllerFacts<'a> {
    pub(crate) id: u16,
    pub(crate) subsystem: &'a str,
    pub(crate) serial: [u8; 20],
    pub(crate) discovery: bool,
}

pub(crate) fn controller(facts: &ControllerFacts<'_>) -> [u8; IDENTIFY_BYTES] {
    let mut page = Page::<IDENTIFY_BYTES>::new();
    page.put(4, facts.serial);
    page.put(24, padded::<40>("Ashlar"));
    page.put(64, padded::<8>(env!("CARGO_PKG_VERSION")));
    // RAB, CMIC: more than one controller, at more than one port.
    page.u8(72, 6).u8(76, if facts.discovery { 0 } else { 0b011 });
    page.u8(77, TRANSFER_LOG2).u16(78, facts.id).u32(80, VERSION);
    page.u32(92, if facts.discovery { 0 } else { EVENT_NAMESPACES });
    // CTRATT: 128-bit host identifiers. CNTRLTYPE.
    page.u32(96, 1).u8(111, if facts.discovery { 2 } else { 1 });
    // ACL and AERL, from 0 for one. FRMW: one slot, read-only. LPA: commands and effects,
    // extended data. ELPE, from 0.
    page.u8(258, 3).u8(259, ASYNC_EVENTS_MAX - 1).u8(260, 0b011).u8(261, 0b110).u8(262, 0);
    page.u16(320, KEEP_ALIVE_UNITS);
    // CQT: so long after the keep-alive time a host's former controller may still be in use.
    page.u16(386, u16::try_from(QUIET_WITHIN.as_millis()).unwrap_or(u16::MAX));
    // SQES, CQES: 64 and 16 bytes, and nothing else. MAXCMD. NN.
    page.u8(512, 0x66).u8(513, 0x44).u16(514, QUEUE_ENTRIES_MAX);
    page.u32(516, if facts.discovery { 0 } else { NAMESPACES_MAX });
    if !facts.discovery {
        // ONCS: compare, dataset management, write zeroes. VWC: there is one; it is flushed by
        // namespace, and by all at once.
        page.u16(520, 1 << 0 | 1 << 2 | 1 << 3).u8(525, 0b111);
        // AWUN and AWUPF: one block; namespaces say more.
    }
    // SGLS: supported, without alignment, as an offset in the capsule, and by the transport.
    page.u32(536, 1 | 1 << 20 | 1 << 21);
    // MNAN.
    page.u32(540, if facts.discovery { 0 } else { NAMESPACES_MAX });
    if let Some(name) = nqn_field(facts.subsystem) {
        page.put(768, name);
    }
    // IOCCSZ and IORCSZ, in units of 16 bytes; ICDOFF 0; FCATT 0; MSDBD: one descriptor.
    let capsule = if facts.discovery { COMMAND_BYTES } else { CAPSULE_BYTES_MAX };
    let units = u32::try_from(capsule / 16).unwrap_or(u32::MAX);
    page.u32(1792, units).u32(1796, 1).u8(1803, 1);
    page.0
}

/// What a namespace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NamespaceFacts {
    pub(crate) blocks: u64,
    pub(crate) uuid: [u8; 16],
    /// Bytes of the smallest range that is given back as a whole.
    pub(crate) discard_bytes: u64,
    /// Writes up to so many bytes are there as a whole after a power cut, or not at all.
    pub(crate) atomic_bytes: u32,
    /// `None`: nobody knows when its drives have lost power.
    pub(crate) power: Option<PowerCycle>,
}

/// Preferred for writes, in blocks: what is smaller is read first, on drives with larger sectors.
const PREFERRED_BLOCKS: u16 = 8;

pub(crate) fn namespace(facts: &NamespaceFacts) -> [u8; IDENTIFY_BYTES] {
    let mut page = Page::<IDENTIFY_BYTES>::new();
    // NSZE, NCAP, NUSE.
    page.u64(0, facts.blocks).u64(8, facts.blocks).u64(16, facts.blocks);
    // NSFEAT: NAWUN and the like are of this namespace; the preferred sizes are there.
    page.u8(24, 1 << 1 | 1 << 4);
    // NLBAF, from 0, and FLBAS: one format. NMIC: it may be reached by several controllers.
    page.u8(30, 1);
    // DLFEAT: what was deallocated reads as zeroes; Write Zeroes may deallocate.
    page.u8(33, 0b1001);
    let from_0 = |blocks: u64| u16::try_from(blocks.saturating_sub(1)).unwrap_or(u16::MAX);
    let atomic = from_0(u64::from(facts.atomic_bytes) / BLOCK_BYTES);
    // NAWUN, NAWUPF, NACWU.
    page.u16(34, atomic).u16(36, atomic).u16(38, 0);
    // NPWG, NPWA, NPDG, NPDA, NOWS.
    let given_back = from_0(facts.discard_bytes / BLOCK_BYTES);
    page.u16(64, PREFERRED_BLOCKS - 1).u16(66, PREFERRED_BLOCKS - 1);
    page.u16(68, given_back).u16(70, given_back).u16(72, given_back);
    page.put(104, facts.uuid);
    // LBAF 0: no metadata, blocks of 512 bytes, the best performance.
    page.u32(128, u32::from(BLOCK_LOG2) << 16);
    if let Some(power) = facts.power {
        power.write(&mut page.0);
    }
    page.0
}

/// NGUID, UUID and command set of a namespace, as descriptors (Base 5.17.2.3).
pub(crate) fn descriptors(uuid: [u8; 16]) -> [u8; IDENTIFY_BYTES] {
    let mut page = Page::<IDENTIFY_BYTES>::new();
    page.put(0, [2, 16, 0, 0]).put(4, uuid);
    page.put(20, [3, 16, 0, 0]).put(24, uuid);
    page.put(40, [4, 1, 0, 0]).u8(44, 0);
    page.0
}

/// The namespaces after `after`, in order, as many as fit (Base 5.17.2.2).
pub(crate) fn active(ids: impl Iterator<Item = u32>, after: u32) -> [u8; IDENTIFY_BYTES] {
    let mut page = Page::<IDENTIFY_BYTES>::new();
    let ids = ids.filter(|id| *id > after).take(IDENTIFY_BYTES / 4);
    for (place, id) in page.0.chunks_exact_mut(4).zip(ids) {
        place.copy_from_slice(&id.to_le_bytes());
    }
    page.0
}

/// Limits of the NVM command set (NVM figure 99): none beyond those of commands.
pub(crate) fn command_set() -> [u8; IDENTIFY_BYTES] {
    Page::<IDENTIFY_BYTES>::new().0
}

#[cfg(test)]
mod tests {
    //! Goal: hosts understand what is said.
    //! Method: read back by the reader that drives of others are read with, and by hand.

    use super::*;
    use ashlar_reactor::nvme::command::{ControllerIdentity, NamespaceIdentity};

    const FACTS: NamespaceFacts = NamespaceFacts {
        blocks: 1 << 21,
        uuid: [9; 16],
        discard_bytes: 256 << 10,
        atomic_bytes: 64 << 10,
        power: None,
    };

    #[test]
    fn a_controller_introduces_itself() {
        let subsystem = "nqn.2026-01.example:disk";
        let serial = *b"0123456789abcdef    ";
        let facts = ControllerFacts { id: 7, subsystem, serial, discovery: false };
        let page = controller(&facts);
        let read = ControllerIdentity::decode(&page);
        assert_eq!((read.serial.as_str(), read.model.as_str()), ("0123456789abcdef", "Ashlar"));
        assert!(read.write_zeroes && read.volatile_cache);
        assert_eq!(1_u32 << (read.transfer_log2 + 12), TRANSFER_BYTES_MAX);
        assert_eq!(&page[768..768 + subsystem.len()], subsystem.as_bytes());
        // 64 bytes of command and 16 KiB: 1028 units of 16.
        assert_eq!(page[1792..1796], 1028_u32.to_le_bytes());
        // Half a second late, then looked at by the half second, and as much more.
        assert_eq!(page[386..388], 1500_u16.to_le_bytes());
        let discovery = controller(&ControllerFacts { discovery: true, ..facts });
        assert_eq!((discovery[111], discovery[516]), (2, 0));
    }

    #[test]
    fn a_namespace_introduces_itself() {
        let page = namespace(&FACTS);
        let read = NamespaceIdentity::decode(&page);
        assert_eq!((read.blocks, read.block_log2, read.metadata_bytes), (1 << 21, 9, 0));
        assert!(read.deallocated_is_zero && read.zeroes_deallocate);
        // 64 KiB are 128 blocks, 256 KiB are 512.
        assert_eq!((page[36], page[37], page[68], page[69]), (127, 0, 255, 1));
        assert_eq!(page[104..120], [9; 16]);
        let one = namespace(&NamespaceFacts { atomic_bytes: 0, ..FACTS });
        assert_eq!(one[34..38], [0; 4]);
        let power = PowerCycle::new([4; 16]);
        let known = namespace(&NamespaceFacts { power, ..FACTS });
        assert_eq!((PowerCycle::read(&known), PowerCycle::read(&page)), (power, None));
    }

    #[test]
    fn lists_begin_after_a_number() {
        let page = active([1, 5, 9].into_iter(), 1);
        assert_eq!(page[..12], [5, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        let full = active(1..=2000, 0);
        assert_eq!(full[4092..], 1024_u32.to_le_bytes());
        assert_eq!(descriptors([8; 16])[20..25], [3, 16, 0, 0, 8]);
    }
}
