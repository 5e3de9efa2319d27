//! Goal: as for split rings; and a packed ring goes on where it was left, or not at all.
//! Method: a fake guest in a memfd; each case writes raw descriptors.

use std::rc::Rc;

use super::*;
use crate::vhost::vring::Ring;
use crate::vhost::vring::tests::{
    AVAILABLE as DRIVER, DESCRIPTORS, EVENT_INDEX, Guest, HOLE, INDIRECT, INDIRECT_TABLES, NEXT,
    USED as DEVICE, WRITE, popped,
};
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;

const PACKED: u64 = 1 << VIRTIO_F_RING_PACKED;
/// Both places at the start of a new ring.
const NEW: u32 = 0x8000_8000;

/// The flags of an available descriptor in a lap.
fn lap(wrap: bool) -> u16 {
    if wrap { AVAILABLE } else { USED }
}

fn put(guest: &Guest, at: u64, address: u64, len: u32, id: u16, flags: u16) {
    // The fields of a packed descriptor are those of a split one, the last two exchanged.
    guest.put(at, address, len, id, flags);
}

fn describe(guest: &Guest, index: u16, address: u64, len: u32, id: u16, flags: u16) {
    put(guest, Guest::descriptor(DESCRIPTORS, index), address, len, id, flags);
}

fn setup(guest: &Guest, features: u64, base: u32) -> RingSetup {
    RingSetup { base, ..guest.setup(PACKED | features) }
}

fn ring(guest: &Guest, features: u64) -> PackedRing {
    match Ring::new(&guest.memory, &setup(guest, features, NEW), None).unwrap() {
        Ring::Packed(ring) => ring,
        Ring::Split(_) => panic!("asked for a packed one"),
    }
}

fn pop(guest: &Guest, features: u64) -> Result<Chain, Fault> {
    let mut chain = Chain::new();
    assert!(ring(guest, features).pop(&guest.memory, &mut chain)?);
    Ok(chain)
}

fn flags(guest: &Guest, index: u16) -> u16 {
    guest.read_u16(Guest::descriptor(DESCRIPTORS, index) + 14)
}

#[test]
fn chains_are_popped_in_order_and_used_in_any() {
    let guest = Guest::new(5);
    let mut ring = ring(&guest, 0);
    let mut chain = Chain::new();
    assert_eq!(ring.look(), Ok(false));
    describe(&guest, 1, 0x1000, 512, 9, lap(true) | NEXT | WRITE);
    describe(&guest, 2, 0x20, 1, 7, lap(true) | WRITE);
    assert_eq!(ring.look(), Ok(false), "the first descriptor comes last");
    describe(&guest, 0, 0x10, 16, 8, lap(true) | NEXT);
    describe(&guest, 3, 0x30, 2, 6, lap(true));
    assert_eq!(ring.look(), Ok(true));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    assert_eq!(
        (chain.id(), chain.popped().descriptors),
        (7, 3),
        "the id of the last descriptor counts"
    );
    assert_eq!(chain.readable(), [Segment { address: 0x10, len: 16 }]);
    let data = Segment { address: 0x1000, len: 512 };
    assert_eq!(chain.writable(), [data, Segment { address: 0x20, len: 1 }]);
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    assert_eq!((chain.id(), chain.popped().descriptors), (6, 1));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(false));
    assert_eq!(ring.base(), 0x8000_8004);
    ring.push_used(popped(6, 1), 0);
    ring.push_used(popped(7, 3), 513);
    assert_eq!(flags(&guest, 0), lap(true) | NEXT, "not shown yet");
    assert!(ring.is_untold() && ring.tell_used() && !ring.is_untold());
    let (first, second) = (Guest::descriptor(DESCRIPTORS, 0), Guest::descriptor(DESCRIPTORS, 1));
    assert_eq!(guest.read(first + 8, 8), [0, 0, 0, 0, 6, 0, 0x80, 0x80]);
    assert_eq!(guest.read(second + 8, 8), [1, 2, 0, 0, 7, 0, 0x82, 0x80]);
    assert_eq!(ring.base(), 0x8004_8004);
}

#[test]
fn chains_go_round_and_wrap_counters_turn() {
    let guest = Guest::new(3);
    let mut ring = ring(&guest, 0);
    let mut chain = Chain::new();
    let (mut at, mut wrap) = (0, true);
    for round in 0..20 {
        // Two descriptors each: every other chain crosses the end of the ring.
        let next = Place { index: at, wrap }.after(1, 3);
        describe(&guest, next.index, 0x20, 1, round, lap(next.wrap) | WRITE);
        describe(&guest, at, 0x10, 16, round, lap(wrap) | NEXT);
        assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true), "{round}");
        assert_eq!((chain.id(), chain.popped().descriptors), (round, 2));
        assert!(!ring.has_more());
        ring.push_used(popped(round, 2), 1);
        assert!(ring.tell_used());
        let used = if wrap { AVAILABLE | USED } else { 0 };
        assert_eq!(flags(&guest, at), used | WRITE);
        Place { index: at, wrap } = Place { index: at, wrap }.after(2, 3);
    }
    // 40 descriptors are 13 laps and one.
    assert_eq!(ring.base(), 0x0001_0001);
}

#[test]
fn the_guest_is_called_when_it_wants_to_be() {
    let guest = Guest::new(4);
    for (event_index, wish, entries, calls) in [
        (false, 0u32, 1, true),
        (false, 1 << 16, 1, false),
        // A place means nothing without the feature, and 3 is reserved.
        (false, 2 << 16 | 0x8003, 1, true),
        (true, 3 << 16, 1, true),
        (true, 2 << 16 | 0x8000, 1, true),
        (true, 2 << 16 | 0x8001, 1, false),
        (true, 2 << 16 | 0x8001, 2, true),
        (true, 2 << 16 | 0x8003, 3, false),
        (true, 2 << 16 | 0x8003, 4, true),
        // The same descriptor, a lap later.
        (true, 2 << 16, 4, false),
    ] {
        guest.write(DEVICE, &[0; 4]);
        let mut ring = ring(&guest, if event_index { EVENT_INDEX } else { 0 });
        assert!(ring.tell_used(), "a new call file is always tried");
        guest.write(DRIVER, &wish.to_le_bytes());
        let mut chain = Chain::new();
        for index in 0..entries {
            describe(&guest, index, 0x10, 16, index, lap(true));
            assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
        }
        (0..entries).for_each(|id| ring.push_used(popped(id, 1), 1));
        assert_eq!(ring.tell_used(), calls, "{event_index} {wish:#x} {entries}");
        ring.owe_call();
        assert!(ring.is_untold() && ring.tell_used());
    }
}

#[test]
fn kicks_are_asked_for_and_what_came_before_is_noticed() {
    let wish = |guest: &Guest| u32::from_le_bytes(guest.read(DEVICE, 4).try_into().unwrap());
    for (features, asked) in [(0, u32::from(SERVED)), (EVENT_INDEX, 2 << 16 | 0x8000)] {
        let guest = Guest::new(4);
        let mut ring = ring(&guest, features);
        assert_eq!(wish(&guest) >> 16, 1, "no kicks while someone polls");
        assert!(!ring.enable_kicks());
        assert_eq!(wish(&guest), asked);
        describe(&guest, 0, 0x10, 16, 0, lap(true));
        assert!(ring.enable_kicks(), "a chain is there already");
        ring.disable_kicks();
        assert_eq!(wish(&guest) >> 16, 1);
        assert_eq!(ring.pop(&guest.memory, &mut Chain::new()), Ok(true));
        assert!(!ring.enable_kicks());
    }
}

#[test]
fn an_indirect_table_is_read_in_order() {
    let guest = Guest::new(4);
    for table in [0x2_0000, 0x2_0003] {
        // Flags for a next descriptor mean nothing in a table.
        put(&guest, Guest::descriptor(table, 0), 0x30, 16, 9, NEXT);
        put(&guest, Guest::descriptor(table, 1), 0x40, 8, 9, 0);
        put(&guest, Guest::descriptor(table, 2), 0x50, 1, 9, WRITE);
        describe(&guest, 0, table, 48, 3, lap(true) | INDIRECT | WRITE);
        let chain = pop(&guest, INDIRECT_TABLES).unwrap();
        guest.write(DEVICE, &[0; 4]);
        assert_eq!((chain.id(), chain.popped().descriptors), (3, 1));
        assert_eq!(chain.readable_bytes(), 24);
        assert_eq!(chain.writable(), [Segment { address: 0x50, len: 1 }]);
    }
}

#[test]
fn hostile_descriptors_are_faults() {
    type Write = fn(&Guest);
    let first: fn(&Guest, u64, u32, u16) = |guest, address, len, flags| {
        describe(guest, 0, address, len, 0, lap(true) | flags);
    };
    let cases: [(Write, Fault); 9] = [
        (|g| describe(g, 0, 0, 0, 0, AVAILABLE), Fault::EmptyDescriptor),
        (
            |g| (0..4).for_each(|i| describe(g, i, 0, 16, 0, AVAILABLE | NEXT)),
            Fault::ChainLength(4),
        ),
        (|g| describe(g, 0, 0, 16, 0, AVAILABLE | INDIRECT | NEXT), Fault::IndirectChained),
        (
            |g| {
                describe(g, 1, 0x2_0000, 16, 0, AVAILABLE | INDIRECT);
                describe(g, 0, 0, 16, 0, AVAILABLE | NEXT);
            },
            Fault::IndirectChained,
        ),
        (|g| describe(g, 0, 0, 17, 0, AVAILABLE | INDIRECT), Fault::IndirectLength(17)),
        (|g| describe(g, 0, 0, !15, 0, AVAILABLE | INDIRECT), Fault::IndirectLength(!15)),
        (
            |g| describe(g, 0, HOLE, 16, 0, AVAILABLE | INDIRECT),
            Fault::Unmapped { address: HOLE, len: 16 },
        ),
        (
            |g| {
                describe(g, 0, 0x2_0000, 16, 0, AVAILABLE | INDIRECT);
                put(g, 0x2_0000, 0x2_0000, 16, 0, INDIRECT);
            },
            Fault::IndirectNested,
        ),
        (
            |g| {
                describe(g, 1, 0, 16, 0, AVAILABLE);
                describe(g, 0, 0, 1, 0, AVAILABLE | NEXT | WRITE);
            },
            Fault::DescriptorOrder,
        ),
    ];
    for (write, fault) in cases {
        let guest = Guest::new(4);
        write(&guest);
        assert_eq!(pop(&guest, INDIRECT_TABLES).unwrap_err(), fault);
    }
    let guest = Guest::new(4);
    first(&guest, 0x2_0000, 16, INDIRECT);
    assert_eq!(pop(&guest, 0).unwrap_err(), Fault::IndirectUnexpected);
}

/// Whoever makes available what the device still has would be served without end, and its used
/// entries would overwrite what was not read.
#[test]
fn no_more_is_taken_than_the_ring_has() {
    let guest = Guest::new(4);
    let mut ring = ring(&guest, 0);
    let mut chain = Chain::new();
    (0..4).for_each(|i| describe(&guest, i, 0, 16, i, lap(true)));
    for _ in 0..4 {
        assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    }
    describe(&guest, 0, 0, 16, 0, lap(false));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Err(Fault::ChainLength(0)));
    ring.push_used(popped(0, 1), 1);
    assert_eq!(ring.pop(&guest.memory, &mut chain), Err(Fault::ChainLength(0)), "not shown");
    ring.show_used();
    describe(&guest, 0, 0, 16, 0, lap(false));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
    describe(&guest, 1, 0, 16, 0, lap(false));
    assert_eq!(ring.pop(&guest.memory, &mut chain), Err(Fault::ChainLength(0)));
}

#[test]
fn a_ring_is_set_up_where_it_can_be() {
    let guest = Guest::new(4);
    let try_setup = |change: &dyn Fn(&mut RingSetup)| {
        guest.write(DEVICE, &[0; 4]);
        let mut setup = setup(&guest, 0, NEW);
        change(&mut setup);
        Ring::new(&guest.memory, &setup, None).map(|ring| ring.base())
    };
    for size in [1, 3, 7, 1000, 1024] {
        assert_eq!(try_setup(&|setup| setup.size = size), Ok(NEW));
    }
    for size in [0, 1025, 1 << 15, 1 << 16, u32::MAX] {
        assert_eq!(try_setup(&|setup| setup.size = size), Err(Fault::RingSize(size)));
    }
    // Both places inside the ring, and no more than a lap from the used one to the available one.
    for base in [0x8003_8003, 0x8000_0000, 0x0002_8003, 0x8001_8003, 0x8003_0003] {
        let expected = if base == 0x8000_0000 { 0x8000_0000 } else { base };
        let result = try_setup(&|setup| setup.base = base);
        let fine = base != 0x0002_8003;
        assert_eq!(result, if fine { Ok(expected) } else { Err(Fault::RingBase(base)) });
    }
    for base in [0x8004_8004, 0xffff_ffff, 0x8000_8004, 0x8004_8000] {
        assert_eq!(try_setup(&|setup| setup.base = base), Err(Fault::RingBase(base)));
    }
    // 16 bits say the same of both; zero is the start of a ring that nobody has used.
    assert_eq!(try_setup(&|setup| setup.base = 0x8002), Ok(0x8002_8002));
    assert_eq!(try_setup(&|setup| setup.base = 0), Ok(NEW));
    describe(&guest, 3, 0, 16, 0, lap(true));
    assert_eq!(try_setup(&|setup| setup.base = 0), Ok(0));
    let unmapped = Err(Fault::RingUnmapped);
    assert_eq!(try_setup(&|setup| setup.addresses.used = 0), unmapped);
    assert_eq!(try_setup(&|setup| setup.addresses.available = u64::MAX), unmapped);
    assert_eq!(try_setup(&|setup| setup.addresses.descriptors += HOLE), unmapped);
    let odd = Err(Fault::RingAlignment);
    assert_eq!(try_setup(&|setup| setup.addresses.used += 2), odd);
    assert_eq!(try_setup(&|setup| setup.addresses.available += 2), odd);
    assert_eq!(try_setup(&|setup| setup.addresses.descriptors += 8), odd);
}

#[test]
fn a_ring_goes_on_where_it_was_left_or_not_at_all() {
    let mut chain = Chain::new();
    for features in [0, EVENT_INDEX] {
        let guest = Guest::new(4);
        let start = |base: u32| {
            let ring = Ring::new(&guest.memory, &setup(&guest, features, base), None);
            ring.map(|ring| match ring {
                Ring::Packed(ring) => ring,
                Ring::Split(_) => panic!("asked for a packed one"),
            })
        };
        let mut ring = start(NEW).unwrap();
        (0..3).for_each(|i| describe(&guest, i, 0, 16, i, lap(true)));
        assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
        // Killed at work, while polled or armed: the front end knows an old place only.
        assert_eq!(start(NEW).unwrap_err(), Fault::RingAbandoned);
        ring.push_used(popped(0, 1), 1);
        ring.enable_kicks();
        assert_eq!(start(NEW).unwrap_err(), Fault::RingAbandoned);
        // Stopped, and the front end heard nothing: guest memory knows.
        ring.leave(false);
        let mut ring = start(NEW).unwrap();
        assert_eq!(ring.base(), 0x8001_8001);
        // Stopped, and the front end has heard: it alone counts, also after the guest was reset.
        ring.leave(true);
        assert_eq!(start(0x8001_8001).unwrap().base(), 0x8001_8001);
        guest.write(DEVICE, &[0; 4]);
        assert_eq!(start(NEW).unwrap().base(), NEW);
        // What was popped and cannot be answered is not where anyone can go on.
        guest.write(DEVICE, &[0; 4]);
        ring = start(0x8001_8001).unwrap();
        assert_eq!(ring.pop(&guest.memory, &mut chain), Ok(true));
        ring.leave(false);
        assert_eq!(start(NEW).unwrap_err(), Fault::RingAbandoned);
        // Another device may have left anything there but our own marks.
        guest.write(DEVICE, &[2, 0x80, 1, 0]);
        assert_eq!(start(0x8001_8001).unwrap().base(), 0x8001_8001);
        guest.write(DEVICE, &[9, 0x80, 0x74, 0xac]);
        assert_eq!(LEFT << 2, 0xac74);
        assert_eq!(start(NEW).unwrap_err(), Fault::RingAbandoned, "a place beyond the ring");
    }
}

#[test]
fn a_ring_is_found_again_in_changed_memory() {
    let guest = Guest::new(4);
    let mut ring = ring(&guest, 0);
    let other = Rc::new(GuestMemory::default());
    ring.find_again(&other);
    describe(&guest, 0, 0x10, 16, 0, lap(true));
    assert_eq!(ring.look(), Ok(true), "the old pages go on being used");
    ring.find_again(&guest.memory);
    assert_eq!(ring.look(), Ok(true));
}

#[test]
fn random_rings_never_panic() {
    use ashlar_reactor::prng::Prng;
    let mut prng = Prng::from_seed(1);
    let mut chain = Chain::new();
    let (mut popped, mut faults) = (0, 0);
    for round in 0..2_000 {
        let size = 1 + u16::try_from(prng.below(8)).unwrap();
        let guest = Guest::new(size);
        let mut ring = ring(&guest, EVENT_INDEX | INDIRECT_TABLES);
        for _ in 0..20 {
            let pick = |prng: &mut Prng, of: &[u64]| of[prng.index(of.len())];
            for table in [DESCRIPTORS, 0x2_0000] {
                let index = u16::try_from(prng.below(u64::from(size))).unwrap();
                let address = pick(&mut prng, &[0, 0x2_0000, 0xf_ffff, HOLE - 1, HOLE, u64::MAX]);
                let len = pick(&mut prng, &[1, 16, 64, 128, 4096, 0, 0xffff_ffff]);
                let flags = pick(&mut prng, &[0, 0, 1, 1, 1, 2, 3, 4, 7]);
                let laps = [lap(true), lap(false), AVAILABLE | USED, 0];
                let flags = u16::try_from(flags).unwrap() | laps[prng.index(4)];
                let place = Guest::descriptor(table, index);
                put(&guest, place, address, u32::try_from(len).unwrap(), round, flags);
            }
            match ring.pop(&guest.memory, &mut chain) {
                Ok(false) => {}
                Ok(true) => {
                    popped += 1;
                    if let Ok(parsed) = crate::vhost::block::parse(&guest.memory, &chain) {
                        let _ = parsed.request.permit.complete(crate::request::Status::Done, 0);
                    }
                    if prng.below(3) > 0 {
                        ring.push_used(chain.popped(), 1);
                        ring.tell_used();
                    }
                }
                Err(_) => faults += 1,
            }
            assert!(ring.taken() <= size);
        }
    }
    assert!(popped > 500 && faults > 500, "{popped} chains, {faults} faults: too few");
}
