//! Goal: whatever a well-behaved driver and the device do, in whatever order: chains arrive whole,
//! once and in order; used entries arrive once, in order of completion, and not before they are
//! shown; nobody is told of what it did not want to hear, and nobody sleeps through what it did.
//! With a log, all this also where the device is killed between any two of its stores: what it had
//! and the guest does not see comes again, in order.
//! Method: random steps of a small driver and of the ring, in both layouts and many sizes, against
//! queues of plain values.

use std::collections::{BTreeMap, VecDeque};

use ashlar_reactor::prng::Prng;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;

use super::*;
use crate::vhost::inflight::{Inflight, MappedInflight, Shape, create};
use crate::vhost::memory::tests::killed_after;
use crate::vhost::sigbus::Alarm;

const TABLES: u64 = 0x2_0000;
const TABLE_BYTES: u64 = 0x100;
const STEPS: u64 = 3_000;
const AVAILABLE_BIT: u16 = 1 << 7;
const USED_BIT: u16 = 1 << 15;

type Piece = (Segment, bool);

/// What the driver wants to hear of: positions count used entries of a split ring, and used
/// descriptors of a packed one, since the ring was new.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Wish {
    Always,
    Never,
    At(u64),
}

/// The driver's side. Positions never wrap here: what lies in memory is made from them.
struct Driver {
    guest: Guest,
    size: u16,
    packed: bool,
    event_index: bool,
    indirect: bool,
    /// Split: where the indices begin.
    first: u16,
    /// Chains of a split ring, descriptors of a packed one.
    offered: u64,
    used: u64,
    free: Vec<u16>,
    /// By id: the descriptors that are free again when it is used; packed: how many there are.
    chains: BTreeMap<u16, Vec<u16>>,
}

fn low(position: u64) -> u16 {
    u16::try_from(position % (1 << 16)).unwrap()
}

impl Driver {
    fn new(prng: &mut Prng) -> Driver {
        let packed = prng.below(2) == 0;
        let sizes = if packed { [1, 2, 3, 5, 7, 16, 33] } else { [1, 2, 4, 8, 16, 32, 64] };
        let size = sizes[prng.index(7)];
        let first = if packed || prng.below(2) == 0 { 0 } else { 0xffff - 40 };
        let driver = Driver {
            guest: Guest::new(size),
            size,
            packed,
            event_index: prng.below(2) == 0,
            indirect: prng.below(2) == 0,
            first,
            offered: 0,
            used: 0,
            free: (0..size).collect(),
            chains: BTreeMap::new(),
        };
        if !packed {
            for index in [AVAILABLE + 2, USED + 2] {
                driver.guest.write(index, &first.to_le_bytes());
            }
        }
        driver
    }

    fn features(&self) -> u64 {
        let packed = if self.packed { 1 << VIRTIO_F_RING_PACKED } else { 0 };
        packed
            | if self.event_index { EVENT_INDEX } else { 0 }
            | if self.indirect { INDIRECT_TABLES } else { 0 }
    }

    fn start(&self, base: u32, log: Option<Section>) -> Ring {
        let setup = RingSetup { base, ..self.guest.setup(self.features()) };
        Ring::new(&self.guest.memory, &setup, log).unwrap()
    }

    fn new_base(&self) -> u32 {
        if self.packed { 0x8000_8000 } else { u32::from(self.first) }
    }

    fn place(&self, position: u64) -> (u16, bool) {
        let (lap, index) = (position / u64::from(self.size), position % u64::from(self.size));
        (low(index), lap.is_multiple_of(2))
    }

    /// As event suppression structures have it.
    fn place_bits(&self, position: u64) -> u16 {
        let (index, wrap) = self.place(position);
        index | u16::from(wrap) << 15
    }

    fn table(&self, id: u16, pieces: &[Piece]) -> Piece {
        let at = TABLES + u64::from(id) * TABLE_BYTES;
        for (i, (segment, writable)) in (0..).zip(pieces) {
            let next = if usize::from(i) + 1 < pieces.len() { NEXT } else { 0 };
            let flags = if *writable { WRITE } else { 0 };
            let place = Guest::descriptor(at, i);
            if self.packed {
                self.guest.put(place, segment.address, segment.len, 0xeeee, flags);
            } else {
                self.guest.put(place, segment.address, segment.len, flags | next, i + 1);
            }
        }
        let len = u32::try_from(pieces.len() * 16).unwrap();
        (Segment { address: at, len }, false)
    }

    /// Makes a chain available, if it finds room. Returns its id.
    fn offer(&mut self, pieces: &[Piece], prng: &mut Prng) -> Option<u16> {
        let as_table = self.indirect && prng.below(2) == 0;
        let count = if as_table { 1 } else { pieces.len() };
        if self.free.len() < count {
            return None;
        }
        let mut take = || {
            let index = prng.index(self.free.len());
            self.free.swap_remove(index)
        };
        let taken: Vec<u16> = (0..count).map(|_| take()).collect();
        let id = taken[0];
        let table = [self.table(id, pieces)];
        let (pieces, kind) = if as_table { (&table[..], INDIRECT) } else { (pieces, 0) };
        if self.packed {
            self.offer_packed(id, pieces, kind);
        } else {
            self.offer_split(&taken, pieces, kind);
        }
        self.chains.insert(id, taken);
        Some(id)
    }

    fn offer_split(&mut self, taken: &[u16], pieces: &[Piece], kind: u16) {
        for (i, (segment, writable)) in pieces.iter().enumerate() {
            let next = taken.get(i + 1);
            let flags = kind | if *writable { WRITE } else { 0 } | next.map_or(0, |_| NEXT);
            let next = next.copied().unwrap_or(0xeeee);
            self.guest.describe(taken[i], segment.address, segment.len, flags, next);
        }
        let index = self.first.wrapping_add(low(self.offered));
        let entry = AVAILABLE + 4 + u64::from(index % self.size) * 2;
        self.guest.write(entry, &taken[0].to_le_bytes());
        self.offered += 1;
        self.guest.write(AVAILABLE + 2, &index.wrapping_add(1).to_le_bytes());
    }

    fn offer_packed(&mut self, id: u16, pieces: &[Piece], kind: u16) {
        // The first descriptor last, as it shows the others.
        for (i, (segment, writable)) in pieces.iter().enumerate().rev() {
            let (index, wrap) = self.place(self.offered + i as u64);
            let last = i + 1 == pieces.len();
            let flags = kind
                | if wrap { AVAILABLE_BIT } else { USED_BIT }
                | if *writable { WRITE } else { 0 }
                | if last { 0 } else { NEXT };
            let its = if last { id } else { 0xeeee };
            let place = Guest::descriptor(DESCRIPTORS, index);
            self.guest.put(place, segment.address, segment.len, its, flags);
        }
        self.offered += pieces.len() as u64;
    }

    /// The next used entry, if there is one.
    fn reap(&mut self) -> Option<(u16, u32)> {
        let (at, one) = if self.packed {
            let (index, wrap) = self.place(self.used);
            let place = Guest::descriptor(DESCRIPTORS, index);
            let flags = self.guest.read_u16(place + 14);
            let [available, used] = [AVAILABLE_BIT, USED_BIT].map(|bit| flags & bit != 0);
            if available != wrap || used != wrap {
                return None;
            }
            (place + 8, false)
        } else {
            let index = self.first.wrapping_add(low(self.used));
            if index == self.guest.used_index() {
                return None;
            }
            (USED + 4 + u64::from(index % self.size) * 8, true)
        };
        let bytes: [u8; 8] = self.guest.read(at, 8).try_into().unwrap();
        let [first, second] = *bytes.as_chunks::<4>().0 else { unreachable!() };
        let (first, second) = (u32::from_le_bytes(first), u32::from_le_bytes(second));
        let (id, len) = if one { (first, second) } else { (second & 0xffff, first) };
        let id = u16::try_from(id).unwrap();
        let mut descriptors = self.chains.remove(&id).expect("an id that is under way");
        self.used += if self.packed { descriptors.len() as u64 } else { 1 };
        self.free.append(&mut descriptors);
        Some((id, len))
    }

    fn say(&self, wish: Wish) {
        let (flags, event) = match wish {
            Wish::Always => (0, None),
            Wish::Never => (1, None),
            Wish::At(position) => (2, Some(position)),
        };
        if self.packed {
            let place = event.map_or(0xeeee, |event| self.place_bits(event));
            let both = u32::from(place) | flags << 16;
            self.guest.write(AVAILABLE, &both.to_le_bytes());
        } else if let Some(event) = event {
            let event = self.first.wrapping_add(low(event));
            self.guest.set_used_event(event);
        } else {
            self.guest.write(AVAILABLE, &low(u64::from(flags)).to_le_bytes());
        }
    }

    /// Whether the device is to be kicked for what was offered from position `from` on.
    fn must_kick(&self, from: u64) -> bool {
        let mut asked = (from..self.offered).map(|position| match self.packed {
            true => self.place_bits(position),
            false => self.first.wrapping_add(low(position)),
        });
        if self.packed {
            let (place, flags) = (self.guest.read_u16(USED), self.guest.read_u16(USED + 2));
            return match flags {
                0 => true,
                1 => false,
                2 if self.event_index => asked.any(|its| its == place),
                flags => panic!("{flags:#x} while the ring is served"),
            };
        }
        if self.event_index {
            let event = self.guest.available_event();
            return asked.any(|its| its == event);
        }
        self.guest.read_u16(USED) == 0
    }
}

/// A chain that the ring gave out.
struct Taken {
    popped: Popped,
    pieces: Vec<Piece>,
    /// How many were before it.
    number: u64,
}

fn new_log(size: u16) -> (Section, mpsc::Receiver<Retired>) {
    let shape = Shape::new(2, size + 3, (2, RING_SIZE_MAX)).unwrap();
    let (described, file) = create(shape).unwrap();
    let alarm = Alarm::new().unwrap();
    let mapped = MappedInflight::map(&file, shape, (0, described.mmap_size), &alarm).unwrap();
    let (graveyard, retired) = mpsc::channel();
    (Inflight::adopt(mapped, &graveyard).of_queue(1).unwrap(), retired)
}

/// Driver, ring, and what should be true of them.
struct World {
    prng: Prng,
    driver: Driver,
    ring: Ring,
    chain: Chain,
    next_address: u64,
    /// Offered and not popped.
    pending: VecDeque<(u16, Vec<Piece>)>,
    /// Popped and not used.
    taken: Vec<Taken>,
    popped: u64,
    /// With the bytes that were said to be written.
    unshown: VecDeque<(Taken, u32)>,
    visible: VecDeque<(u16, u32)>,
    wish: Wish,
    /// As positions in `Wish`.
    pushed: u64,
    shown: u64,
    call_owed: bool,
    /// The device wants a kick for the next chain.
    armed: bool,
    log: Option<Section>,
    _retired: mpsc::Receiver<Retired>,
    kills: u64,
}

impl World {
    fn new(seed: u64) -> World {
        let mut prng = Prng::from_seed(seed);
        let driver = Driver::new(&mut prng);
        let (log, _retired) = new_log(driver.size);
        let log = (prng.below(3) > 0).then_some(log);
        let ring = driver.start(driver.new_base(), log.clone());
        World {
            prng,
            ring,
            chain: Chain::new(),
            next_address: 0x1000,
            pending: VecDeque::new(),
            taken: Vec::new(),
            popped: 0,
            unshown: VecDeque::new(),
            visible: VecDeque::new(),
            wish: if driver.event_index && !driver.packed { Wish::At(0) } else { Wish::Always },
            pushed: 0,
            shown: 0,
            call_owed: true,
            armed: false,
            log,
            _retired,
            kills: 0,
            driver,
        }
    }

    fn offer(&mut self) {
        let (from, count) = (self.driver.offered, 1 + self.prng.below(3));
        let mut offered = false;
        for _ in 0..count {
            let readable = self.prng.below(3);
            let writable = self.prng.below(3) + u64::from(readable == 0);
            let mut piece = |writable: bool| {
                self.next_address += 0x1000;
                let len = 1 + u32::try_from(self.prng.below(5000)).unwrap();
                (Segment { address: self.next_address, len }, writable)
            };
            let mut pieces: Vec<Piece> = (0..readable).map(|_| piece(false)).collect();
            pieces.extend((0..writable).map(|_| piece(true)));
            if let Some(id) = self.driver.offer(&pieces, &mut self.prng) {
                self.pending.push_back((id, pieces));
                offered = true;
            }
        }
        let kick = offered && self.driver.must_kick(from);
        let may = self.armed || (!self.driver.packed && self.driver.event_index);
        assert!(may || !kick, "a kick that nobody asked for");
        assert!(kick || !offered || !self.armed, "the device sleeps on");
        if kick && self.armed {
            self.armed = false;
            self.ring.disable_kicks();
        }
    }

    fn pop(&mut self) {
        if self.armed {
            return;
        }
        assert_eq!(self.ring.look(), Ok(!self.pending.is_empty()));
        for _ in 0..self.prng.below(4) {
            let popped = self.ring.pop(&self.driver.guest.memory, &mut self.chain).unwrap();
            // Only now: a device that was killed within `pop` has not had it.
            let Some((id, pieces)) = self.pending.pop_front() else {
                assert!(!popped, "out of thin air");
                return;
            };
            assert!(popped && self.chain.id() == id, "chain {id}, got {:?}", self.chain);
            let readable = self.chain.readable().iter().map(|segment| (*segment, false));
            let writable = self.chain.writable().iter().map(|segment| (*segment, true));
            assert!(readable.chain(writable).eq(pieces.iter().copied()));
            let popped = self.chain.popped();
            self.taken.push(Taken { popped, pieces, number: self.popped });
            self.popped += 1;
            assert_eq!(self.ring.has_more(), !self.pending.is_empty());
        }
    }

    fn complete(&mut self) {
        if self.taken.is_empty() {
            return;
        }
        let index = self.prng.index(self.taken.len());
        let popped = self.taken[index].popped;
        let bytes = u32::try_from(self.prng.below(1 << 32)).unwrap();
        self.ring.push_used(popped, bytes);
        self.unshown.push_back((self.taken.swap_remove(index), bytes));
        self.pushed += if self.driver.packed { u64::from(popped.descriptors) } else { 1 };
    }

    fn show(&mut self) {
        assert_eq!(self.ring.is_untold(), self.call_owed || self.pushed > self.shown);
        if !self.ring.is_untold() {
            return;
        }
        let wanted = match self.wish {
            Wish::Always => true,
            Wish::Never => false,
            Wish::At(position) => (self.shown..self.pushed).contains(&position),
        };
        let called = self.ring.tell_used();
        // Places of a packed ring come again after two laps: it calls too often then.
        let laps = self.driver.packed && self.pushed - self.shown > u64::from(self.driver.size);
        let must_call = wanted || self.call_owed;
        let may_call = must_call || laps;
        assert!(called || !must_call, "{:?} {}", self.wish, self.shown);
        assert!(!called || may_call, "{:?} {}", self.wish, self.shown);
        (self.shown, self.call_owed) = (self.pushed, false);
        self.make_visible();
        self.wish();
    }

    fn make_visible(&mut self) {
        let shown = self.unshown.drain(..).map(|(taken, bytes)| (taken.popped.id, bytes));
        self.visible.extend(shown);
    }

    /// The guest may look, and change its mind about when to be called, before it is told.
    fn glimpse(&mut self) {
        assert_eq!(self.ring.unshown() > 0, !self.unshown.is_empty());
        if !self.unshown.is_empty() {
            self.ring.show_used();
            self.make_visible();
            self.reap();
            self.wish();
        }
    }

    fn reap(&mut self) {
        for _ in 0..1 + self.prng.below(4) {
            assert_eq!(self.driver.reap(), self.visible.pop_front());
        }
    }

    fn wish(&mut self) {
        let ahead = self.prng.below(u64::from(self.driver.size));
        let at = Wish::At(self.driver.used + ahead);
        self.wish = match self.prng.below(3) {
            _ if self.driver.event_index && !self.driver.packed => at,
            0 if self.driver.event_index => at,
            1 => Wish::Never,
            _ => Wish::Always,
        };
        self.driver.say(self.wish);
    }

    fn arm(&mut self) {
        if self.armed {
            return;
        }
        let there = self.ring.enable_kicks();
        assert_eq!(there, !self.pending.is_empty());
        self.armed = !there;
        if there {
            self.ring.disable_kicks();
        }
    }

    /// The ring is stopped and started again, by this device or another.
    fn restart(&mut self) {
        if !self.taken.is_empty() || self.ring.is_untold() || self.ring.is_behind() {
            return;
        }
        let told = self.prng.below(2) == 0;
        self.ring.leave(told);
        // Split rings are always told: the used index says it.
        let base = if told || !self.driver.packed { self.ring.base() } else { 0x8000_8000 };
        self.ring = self.driver.start(base, self.log.clone());
        (self.call_owed, self.armed) = (true, false);
    }

    /// The device is killed in the middle of something, and perhaps the next one while it starts.
    fn kill(&mut self) {
        if self.log.is_none() {
            return;
        }
        let (stores, what) = (u32::try_from(self.prng.below(30)).unwrap(), self.prng.below(4));
        let _ = killed_after(stores, || match what {
            0 => self.pop(),
            1 => self.complete(),
            2 if self.ring.unshown() > 0 => self.ring.show_used(),
            _ => drop(self.ring.tell_used()),
        });
        self.reap_after_kill();
        let mut lost: Vec<Taken> = self.taken.drain(..).collect();
        lost.extend(self.unshown.drain(..).map(|(taken, _)| taken));
        lost.sort_unstable_by_key(|taken| std::cmp::Reverse(taken.number));
        for Taken { popped, pieces, .. } in lost {
            self.pending.push_front((popped.id, pieces));
        }
        // What a front end says that lost the device.
        let base = if self.driver.packed { 0xffff_ffff } else { 0x1234 };
        let stores = u32::try_from(self.prng.below(200)).unwrap();
        let started = killed_after(stores, || self.driver.start(base, self.log.clone()));
        self.ring = started.unwrap_or_else(|| self.driver.start(base, self.log.clone()));
        (self.pushed, self.shown) = (self.driver.used, self.driver.used);
        (self.call_owed, self.armed) = (true, false);
        self.kills += 1;
    }

    /// The guest sees what was shown before, and all of the last batch or nothing of it.
    fn reap_after_kill(&mut self) {
        while let Some(visible) = self.visible.pop_front() {
            assert_eq!(self.driver.reap(), Some(visible));
        }
        if let Some(first) = self.driver.reap() {
            self.make_visible();
            assert_eq!(Some(first), self.visible.pop_front());
            while let Some(visible) = self.visible.pop_front() {
                assert_eq!(self.driver.reap(), Some(visible));
            }
        }
        assert_eq!(self.driver.reap(), None);
    }

    fn step(&mut self) {
        match self.prng.below(20) {
            0..4 => self.offer(),
            4..7 => self.pop(),
            7..10 => self.complete(),
            10..12 => self.show(),
            12..14 => self.reap(),
            14 => self.arm(),
            15..17 => self.glimpse(),
            17 => self.kill(),
            _ if self.prng.below(4) == 0 => self.restart(),
            _ => {
                self.ring.owe_call();
                self.call_owed = true;
            }
        }
    }
}

#[test]
fn rings_are_what_their_model_is() {
    let (mut used, mut kills) = ([0; 2], [0; 2]);
    for seed in 0..240 {
        let mut world = World::new(seed);
        world.driver.say(world.wish);
        (0..STEPS).for_each(|_| world.step());
        used[usize::from(world.driver.packed)] += world.driver.used;
        kills[usize::from(world.driver.packed)] += world.kills;
    }
    assert!(kills.iter().all(|kills| *kills > 3_000), "{kills:?}: too few to mean anything");
    assert!(used.iter().all(|used| *used > 20_000), "{used:?}: too few to mean anything");
}
