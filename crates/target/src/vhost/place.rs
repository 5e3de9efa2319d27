//! A place in a packed ring: virtio counts laps by one bit.

use virtio_bindings::virtio_ring::{VRING_PACKED_DESC_F_AVAIL, VRING_PACKED_DESC_F_USED};

pub(crate) const AVAILABLE: u16 = 1 << VRING_PACKED_DESC_F_AVAIL;
pub(crate) const USED: u16 = 1 << VRING_PACKED_DESC_F_USED;

/// A descriptor of the ring, and the wrap counter there (virtio 1.2, 2.8.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) index: u16,
    pub(crate) wrap: bool,
}

impl Place {
    const WRAP: u16 = 1 << 15;

    /// As both the event suppression structures and the front end's messages have it.
    pub(crate) fn from_bits(bits: u16) -> Place {
        Place { index: bits & !Place::WRAP, wrap: bits & Place::WRAP != 0 }
    }

    pub(crate) fn bits(self) -> u16 {
        self.index | if self.wrap { Place::WRAP } else { 0 }
    }

    /// The place `count` descriptors on; at most one lap.
    pub(crate) fn after(self, count: u16, size: u16) -> Place {
        assert!(self.index < size && count <= size);
        let index = self.index + count;
        if index < size {
            return Place { index, ..self };
        }
        Place { index: index - size, wrap: !self.wrap }
    }

    /// How many descriptors on `to` is: less than two laps, whatever a guest says.
    pub(crate) fn distance(self, to: Place, size: u16) -> u16 {
        let size = u32::from(size);
        // The lap with the wrap counter set comes first, as on a new ring.
        let at = |place: Place| u32::from(place.index) + if place.wrap { 0 } else { size };
        let distance = (at(to) + 2 * size - at(self)) % (2 * size);
        u16::try_from(distance).expect("less than two laps of RING_SIZE_MAX")
    }

    /// The flags that make a descriptor available here.
    pub(crate) fn available_flags(self) -> u16 {
        if self.wrap { AVAILABLE } else { USED }
    }

    /// Whether these flags, found here, make a descriptor available (virtio 1.2, 2.8.1).
    pub(crate) fn is_available(self, flags: u16) -> bool {
        (flags & AVAILABLE != 0) == self.wrap && (flags & USED != 0) != self.wrap
    }
}
