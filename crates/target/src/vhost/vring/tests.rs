//! Goal: a well-behaved driver gets its chains in order and its notifications when it asked for
//! them; whatever a hostile one writes becomes a `Fault`, never a panic and never a wild access.
//! Method: a fake guest in a memfd; each case writes raw ring contents. Here: split rings. Packed
//! ones are in `packed/tests.rs`, and both against a model in `model.rs`.

mod model;
mod marked;

use std::rc::Rc;
use std::sync::mpsc;

use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use super::*;
use crate::vhost::graveyard::Retired;
use crate::vhost::memory::tests::memory;

pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;
pub(crate) const EVENT_INDEX: u64 = 1 << VIRTIO_RING_F_EVENT_IDX;
pub(crate) const INDIRECT_TABLES: u64 = 1 << VIRTIO_RING_F_INDIRECT_DESC;
const USER: u64 = 1 << 40;
pub(crate) const DESCRIPTORS: u64 = 0x1000;
pub(crate) const AVAILABLE: u64 = 0x6000;
pub(crate) const USED: u64 = 0x8000;
/// A hole follows the third region.
pub(crate) const HOLE: u64 = 0x30_0000;

/// A chain without a log.
pub(crate) fn popped(id: u16, descriptors: u16) -> Popped {
    Popped { id, descriptors, entry: 0 }
}

/// A guest's memory (two regions that touch, one apart) and the driver's side of one ring.
pub(crate) struct Guest {
    pub(crate) memory: Rc<GuestMemory>,
    _retired: mpsc::Receiver<Retired>,
    size: u16,
    available: u16,
}

impl Guest {
    pub(crate) fn new(size: u16) -> Guest {
        let (memory, _retired) =
            memory(&[(0, 0x10_0000), (0x10_0000, 0x10_0000), (0x20_0000, 0x10_0000)]);
        Guest { memory: Rc::new(memory), _retired, size, available: 0 }
    }

    pub(crate) fn write(&self, at: u64, bytes: &[u8]) {
        self.memory.view(at, bytes.len() as u64).unwrap().copy_from_slice(bytes);
    }

    pub(crate) fn read(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.view(at, len as u64).unwrap().copy_to_slice(&mut bytes);
        bytes
    }

    pub(crate) fn read_u16(&self, at: u64) -> u16 {
        let mut bytes = [0; 2];
        self.memory.view(at, 2).unwrap().copy_to_slice(&mut bytes);
        u16::from_le_bytes(bytes)
    }

    pub(crate) fn setup(&self, features: u64) -> RingSetup {
        let addresses = RingAddresses {
            descriptors: USER + DESCRIPTORS,
            available: USER + AVAILABLE,
            used: USER + USED,
        };
        RingSetup { size: u32::from(self.size), addresses, base: 0, features }
    }

    pub(crate) fn ring(&self, features: u64) -> Ring {
        Ring::new(&self.memory, &self.setup(features), None).unwrap()
    }

    pub(crate) fn descriptor(table: u64, index: u16) -> u64 {
        table + u64::from(index) * 16
    }

    pub(crate) fn put(&self, at: u64, address: u64, len: u32, flags: u16, next: u16) {
        let fields = u128::from(address)
            | u128::from(len) << 64
            | u128::from(flags) << 96
            | u128::from(next) << 112;
        self.write(at, &fields.to_le_bytes());
    }

    /// Writes descriptor `index` of the ring's own table.
    pub(crate) fn describe(&self, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        self.put(Guest::descriptor(DESCRIPTORS, index), address, len, flags, next);
    }

    pub(crate) fn offer(&mut self, head: u16) {
        let entry = AVAILABLE + 4 + u64::from(self.available % self.size) * 2;
        self.write(entry, &head.to_le_bytes());
        self.available = self.available.wrapping_add(1);
        self.show(self.available);
    }

    fn show(&self, index: u16) {
        self.write(AVAILABLE + 2, &index.to_le_bytes());
    }

    pub(crate) fn used_index(&self) -> u16 {
        self.read_u16(USED + 2)
    }

    fn set_used_event(&self, index: u16) {
        self.write(AVAILABLE + 4 + u64::from(self.size) * 2, &index.to_le_bytes());
    }

    fn available_event(&self) -> u16 {
        self.read_u16(USED + 4 + u64::from(self.size) * 8)
    }

    /// Offers a chain that was described from `head` on, and pops it.
    pub(crate) fn pop(&mut self, head: u16, features: u64) -> Result<Chain, Fault> {
        let mut ring = self.ring(features);
        self.offer(head);
        let mut chain = Chain::new();
        assert_eq!(ring.look(), Ok(true));
        assert!(ring.pop(&self.memory, &mut chain)?);
        Ok(chain)
    }
}

#[test]
fn a_chain_is_popped_in_order_and_used() {
    let mut guest = Guest::new(4);
    guest.describe(2, 0x10, 16, NEXT, 0);
    guest.describe(0, 0x1000, 512, NEXT | WRITE, 3);
    guest.describe(3, 0x20, 1, WRITE, 0);
    let mut ring = guest.ring(0);
    let mut chain = Chain::new();
    assert_eq!(ring.look(), Ok(false));
    guest.offer(2);
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(false), "not seen yet");
    assert_eq!(ring.look(), Ok(true));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    assert_eq!(chain.id(), 2);
    assert_eq!(chain.readable(), [Segment { address: 0x10, len: 16 }]);
    let data = Segment { address: 0x1000, len: 512 };
    assert_eq!(chain.writable(), [data, Segment { address: 0x20, len: 1 }]);
    assert_eq!((chain.readable_bytes(), chain.writable_bytes()), (16, 513));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(false));
    ring.push_used(popped(2, 3), 513);
    assert_eq!(guest.used_index(), 0, "not shown yet");
    assert!(ring.is_untold() && ring.tell_used());
    assert_eq!(guest.used_index(), 1);
    assert_eq!(guest.read(USED + 4, 8), [2, 0, 0, 0, 1, 2, 0, 0]);
    assert!(!ring.is_untold());
    assert_eq!(ring.base(), 1);
}

#[test]
fn indices_wrap() {
    let mut guest = Guest::new(2);
    guest.describe(0, 0, 16, NEXT, 1);
    guest.describe(1, 0, 1, WRITE, 0);
    guest.available = 0xffff;
    guest.write(USED + 2, &0xffffu16.to_le_bytes());
    guest.show(0xffff);
    let setup = RingSetup { base: 0xffff, ..guest.setup(0) };
    let mut ring = Ring::new(&guest.memory, &setup, None).unwrap();
    let mut chain = Chain::new();
    for round in 0..5u16 {
        guest.offer(0);
        assert_eq!(ring.look(), Ok(true));
        assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
        ring.push_used(popped(0, 1), 1);
        assert!(ring.tell_used());
        assert_eq!(guest.used_index(), round);
    }
    assert_eq!(ring.base(), 4);
}

#[test]
fn the_guest_is_called_when_its_event_is_passed() {
    let guest = Guest::new(8);
    let mut ring = guest.ring(EVENT_INDEX);
    assert!(ring.tell_used(), "a new call file is always tried");
    let mut shown = |event: u16, entries: u16| {
        guest.set_used_event(event);
        (0..entries).for_each(|_| ring.push_used(popped(0, 1), 1));
        ring.tell_used()
    };
    // The used index goes 0, 1, 3, 4, 8: the guest is called when `event` is among the new ones.
    assert!(shown(0, 1));
    assert!(!shown(0, 2));
    assert!(!shown(4, 1));
    assert!(shown(7, 4));
}

#[test]
fn without_an_event_index_a_flag_keeps_the_guest_from_being_called() {
    let guest = Guest::new(8);
    let mut ring = guest.ring(0);
    ring.tell_used();
    ring.push_used(popped(0, 1), 1);
    assert!(ring.tell_used());
    guest.write(AVAILABLE, &1u16.to_le_bytes());
    ring.push_used(popped(0, 1), 1);
    assert!(!ring.tell_used());
    ring.owe_call();
    assert!(ring.is_untold() && ring.tell_used());
}

#[test]
fn kicks_are_asked_for_and_what_came_before_is_noticed() {
    let mut guest = Guest::new(8);
    let mut ring = guest.ring(0);
    assert_eq!(guest.read_u16(USED), 1, "no kicks while someone polls");
    assert!(!ring.enable_kicks());
    assert_eq!(guest.read_u16(USED), 0);
    guest.offer(0);
    assert!(ring.enable_kicks(), "an entry is there already");
    ring.disable_kicks();
    assert_eq!(guest.read_u16(USED), 1);
    assert_eq!(ring.look(), Ok(true));

    let mut guest = Guest::new(8);
    let mut ring = guest.ring(EVENT_INDEX);
    guest.describe(0, 0, 16, 0, 0);
    guest.offer(0);
    guest.offer(0);
    assert_eq!(ring.look(), Ok(true));
    assert!(ring.enable_kicks(), "seen, and not popped");
    let mut chain = Chain::new();
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    assert!(!ring.enable_kicks());
    assert_eq!(guest.available_event(), 2);
    assert_eq!(guest.read_u16(USED), 0, "the flag is not used with an event index");
}

#[test]
fn an_indirect_table_is_followed() {
    let mut guest = Guest::new(4);
    for table in [0x2_0000, 0x2_0003] {
        guest.describe(1, table, 48, INDIRECT | WRITE, 9);
        guest.put(Guest::descriptor(table, 0), 0x30, 16, NEXT, 2);
        guest.put(Guest::descriptor(table, 2), 0x40, 8, NEXT, 1);
        guest.put(Guest::descriptor(table, 1), 0x50, 1, WRITE, 0);
        let chain = guest.pop(1, INDIRECT_TABLES);
        guest.available = 0;
        let chain = chain.unwrap();
        assert_eq!(chain.readable_bytes(), 24);
        assert_eq!(chain.writable(), [Segment { address: 0x50, len: 1 }]);
    }
    // It may stand behind ordinary descriptors.
    guest.describe(0, 0x60, 4, NEXT, 1);
    assert_eq!(guest.pop(0, INDIRECT_TABLES).unwrap().readable_bytes(), 28);
}

#[test]
fn a_long_indirect_table_is_served_and_a_longer_one_is_not() {
    let mut guest = Guest::new(4);
    let table = 0x2_0000;
    for index in 0..CHAIN_MAX {
        let flags = if index + 1 < CHAIN_MAX { NEXT } else { 0 };
        guest.put(Guest::descriptor(table, index), 0, 16, flags, index + 1);
    }
    guest.describe(0, table, u32::from(CHAIN_MAX) * 16, INDIRECT, 0);
    let chain = guest.pop(0, INDIRECT_TABLES).unwrap();
    assert_eq!(chain.readable().len(), usize::from(CHAIN_MAX));
    guest.available = 0;
    guest.describe(1, 0, 16, NEXT, 0);
    assert_eq!(guest.pop(1, INDIRECT_TABLES).unwrap_err(), Fault::ChainLength(CHAIN_MAX));
}

#[test]
fn hostile_descriptors_are_faults() {
    type Write = fn(&Guest);
    let cases: [(Write, Fault); 14] = [
        (|_| {}, Fault::EmptyDescriptor),
        (|g| g.describe(0, 0, 16, NEXT, 4), Fault::DescriptorIndex { index: 4, count: 4 }),
        (
            |g| g.describe(0, 0, 16, NEXT, 0xffff),
            Fault::DescriptorIndex { index: 0xffff, count: 4 },
        ),
        (|g| g.describe(0, 0, 16, NEXT, 0), Fault::ChainLength(4)),
        (|g| g.describe(0, 0, 16, INDIRECT | NEXT, 1), Fault::IndirectChained),
        (|g| g.describe(0, 0, 0, INDIRECT, 0), Fault::IndirectLength(0)),
        (|g| g.describe(0, 0, 17, INDIRECT, 0), Fault::IndirectLength(17)),
        (|g| g.describe(0, 0, !15, INDIRECT, 0), Fault::IndirectLength(!15)),
        (|g| g.describe(0, HOLE, 16, INDIRECT, 0), Fault::Unmapped { address: HOLE, len: 16 }),
        (
            |g| g.describe(0, u64::MAX, 16, INDIRECT, 0),
            Fault::Unmapped { address: u64::MAX, len: 16 },
        ),
        (
            |g| {
                g.describe(0, 0x2_0000, 16, INDIRECT, 0);
                g.put(0x2_0000, 0x2_0000, 16, INDIRECT, 0);
            },
            Fault::IndirectNested,
        ),
        (
            |g| {
                g.describe(0, 0x2_0000, 16, INDIRECT, 0);
                g.put(0x2_0000, 0, 1, NEXT, 1);
            },
            Fault::DescriptorIndex { index: 1, count: 1 },
        ),
        (
            |g| {
                g.describe(0, 0x2_0000, 16, INDIRECT, 0);
                g.put(0x2_0000, 0, 1, NEXT, 0);
            },
            Fault::ChainLength(CHAIN_MAX),
        ),
        (
            |g| {
                g.describe(0, 0, 1, NEXT | WRITE, 1);
                g.describe(1, 0, 16, 0, 0);
            },
            Fault::DescriptorOrder,
        ),
    ];
    for (write, fault) in cases {
        let mut guest = Guest::new(4);
        write(&guest);
        assert_eq!(guest.pop(0, INDIRECT_TABLES).unwrap_err(), fault);
    }
    let mut guest = Guest::new(4);
    guest.describe(0, 0x2_0000, 16, INDIRECT, 0);
    assert_eq!(guest.pop(0, 0).unwrap_err(), Fault::IndirectUnexpected);
    let mut guest = Guest::new(4);
    assert_eq!(guest.pop(4, 0).unwrap_err(), Fault::DescriptorIndex { index: 4, count: 4 });
}

#[test]
fn an_available_index_that_jumps_is_a_fault() {
    for index in [5, 0x8000, 0xffff] {
        let guest = Guest::new(4);
        let mut ring = guest.ring(0);
        guest.show(index);
        assert_eq!(ring.look(), Err(Fault::AvailableJump { from: 0, to: index, size: 4 }));
    }
    // A full ring is no jump; one entry more while nothing was popped is.
    let guest = Guest::new(4);
    let mut ring = guest.ring(0);
    guest.show(4);
    assert_eq!(ring.look(), Ok(true));
    guest.show(5);
    assert!(ring.look().is_err());
    // Nor may it go back.
    guest.show(3);
    assert!(ring.look().is_err());
}

#[test]
fn a_ring_must_lie_in_guest_memory() {
    let guest = Guest::new(4);
    let try_setup = |change: &dyn Fn(&mut RingSetup)| {
        let mut setup = guest.setup(0);
        change(&mut setup);
        Ring::new(&guest.memory, &setup, None).map(|_| ())
    };
    assert_eq!(try_setup(&|_| {}), Ok(()));
    for size in [0, 3, 2048, 1 << 16, 1 << 31] {
        assert_eq!(try_setup(&|setup| setup.size = size), Err(Fault::RingSize(size)));
    }
    let unmapped = Err(Fault::RingUnmapped);
    assert_eq!(try_setup(&|setup| setup.addresses.used = 0), unmapped);
    assert_eq!(try_setup(&|setup| setup.addresses.available = u64::MAX), unmapped);
    assert_eq!(try_setup(&|setup| setup.addresses.descriptors = USER + HOLE), unmapped);
    // 38 bytes of a used ring do not fit into the last 32 of a region.
    assert_eq!(try_setup(&|setup| setup.addresses.used = USER + HOLE - 32), unmapped);
    let odd = Err(Fault::RingAlignment);
    assert_eq!(try_setup(&|setup| setup.addresses.used += 2), odd);
    assert_eq!(try_setup(&|setup| setup.addresses.descriptors += 8), odd);
    assert_eq!(try_setup(&|setup| setup.addresses.available += 1), odd);
}

#[test]
fn random_rings_never_panic() {
    use ashlar_reactor::prng::Prng;
    let mut prng = Prng::from_seed(1);
    let mut chain = Chain::new();
    let mut popped = 0;
    for _ in 0..2_000 {
        let mut guest = Guest::new(8);
        for table in [DESCRIPTORS, 0x2_0000] {
            for index in 0..8 {
                // Mostly plausible, so that walks get far.
                let pick = |prng: &mut Prng, of: &[u64]| of[prng.index(of.len())];
                let address = pick(&mut prng, &[0, 0x2_0000, 0xf_ffff, HOLE - 1, HOLE, u64::MAX]);
                let len = pick(&mut prng, &[1, 16, 64, 128, 4096, 0, 0xffff_ffff]);
                let flags = pick(&mut prng, &[0, 1, 1, 1, 2, 3, 4, 7]);
                let next = prng.below(9);
                let place = Guest::descriptor(table, index);
                let [flags, next] = [flags, next].map(|value| u16::try_from(value).unwrap());
                guest.put(place, address, u32::try_from(len).unwrap(), flags, next);
            }
        }
        let mut ring = guest.ring(EVENT_INDEX | INDIRECT_TABLES);
        for _ in 0..4 {
            guest.offer(u16::try_from(prng.below(9)).unwrap());
        }
        assert_eq!(ring.look(), Ok(true));
        while let Ok(true) = ring.pop(&guest.memory, &mut chain) {
            popped += 1;
            if let Ok(parsed) = crate::vhost::block::parse(&guest.memory, &chain) {
                let _ = parsed.request.permit.complete(crate::request::Status::Done, 0);
            }
        }
    }
    assert!(popped > 500, "{popped} chains were well-formed: too few to mean anything");
}
