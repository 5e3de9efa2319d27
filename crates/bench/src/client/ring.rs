//! A ring of either kind.

use std::fmt::Display;
use std::str::FromStr;

use crate::client::Wish;
use crate::client::memory::Memory;
use crate::client::packed::PackedRing;
use crate::client::parts::{Places, RingSetup, Strange, Used};
use crate::client::slots::{SlotShape, Slots};
use crate::client::split::SplitRing;

/// Largest ring that is set up: what back ends commonly allow.
pub(crate) const SIZE_MAX: u16 = 1024;
const SIZE_MIN: u16 = 16;
/// Parts of a ring begin at multiples of this: more than the specification asks for, so that the
/// two sides write to different cache lines.
const PART_ALIGN: usize = 4096;

/// Of a new packed ring, in both halves: index 0, wrap counter 1.
const PACKED_BASE: u32 = 0x8000_8000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RingKind {
    Split,
    Packed,
}

impl RingKind {
    pub fn name(self) -> &'static str {
        match self {
            RingKind::Split => "split",
            RingKind::Packed => "packed",
        }
    }
}

impl Display for RingKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for RingKind {
    type Err = String;

    fn from_str(text: &str) -> Result<RingKind, String> {
        let mut kinds = [RingKind::Split, RingKind::Packed].into_iter();
        kinds.find(|kind| kind.name() == text).ok_or_else(|| "use split or packed".to_owned())
    }
}

/// Descriptors of the ring that are in use when everything is under way.
pub(crate) fn descriptors(wish: &Wish) -> u32 {
    let chain = if wish.indirect { 1 } else { u32::from(SlotShape::new(wish).chain()) };
    u32::from(wish.depth) * chain
}

/// Of the ring, in descriptors: a power of two; [`descriptors`] of it are needed.
pub(crate) fn size(wish: &Wish) -> u16 {
    let needed = u16::try_from(descriptors(wish)).unwrap_or(SIZE_MAX);
    needed.max(SIZE_MIN).next_power_of_two()
}

/// Places from a byte of the memory on, which begins a page; and where they end.
pub(crate) fn places(wish: &Wish, start: usize) -> (Places, usize) {
    let parts = match wish.ring {
        RingKind::Split => SplitRing::part_bytes(size(wish)),
        RingKind::Packed => PackedRing::part_bytes(size(wish)),
    };
    let [descriptors, driver, device] = parts.map(|bytes| bytes.next_multiple_of(PART_ALIGN));
    let places = Places {
        descriptors: start,
        driver: start + descriptors,
        device: start + descriptors + driver,
    };
    (places, places.device + device)
}

pub(crate) enum Ring {
    Split(SplitRing),
    Packed(PackedRing),
}

impl Ring {
    pub(crate) fn new(memory: &Memory, wish: &Wish, places: Places, slots: Slots) -> Ring {
        let Wish { indirect, event_index, .. } = *wish;
        let setup = RingSetup { places, size: size(wish), indirect, event_index };
        match wish.ring {
            RingKind::Split => Ring::Split(SplitRing::new(memory, &setup, slots)),
            RingKind::Packed => Ring::Packed(PackedRing::new(memory, &setup, slots)),
        }
    }

    /// See [`Queue::base`](crate::client::queue::Queue::base).
    pub(crate) fn base(&self, memory: &Memory) -> u32 {
        match self {
            Ring::Split(ring) => ring.base(memory),
            // Nothing in the memory tells.
            Ring::Packed(_) => PACKED_BASE,
        }
    }

    /// Puts the chain of a slot into the ring.
    #[inline]
    pub(crate) fn add(&mut self, memory: &Memory, slot: u16, write: bool) {
        match self {
            Ring::Split(ring) => ring.add(memory, slot, write),
            Ring::Packed(ring) => ring.add(memory, slot, write),
        }
    }

    /// The device can see all that was added afterwards. True if it wants to be kicked for it.
    #[inline]
    pub(crate) fn show(&mut self, memory: &Memory) -> bool {
        match self {
            Ring::Split(ring) => ring.show(memory),
            Ring::Packed(ring) => ring.show(memory),
        }
    }

    /// The next chain that the device is done with.
    #[inline]
    pub(crate) fn next_used(&mut self, memory: &Memory) -> Result<Option<Used>, Strange> {
        match self {
            Ring::Split(ring) => ring.next_used(memory),
            Ring::Packed(ring) => ring.next_used(memory),
        }
    }
}
