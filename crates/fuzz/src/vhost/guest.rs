//! What the guest has in its memory: requests in rings of both kinds, some of them in indirect
//! tables, with a slip here and there (virtio 1.2, 2.7, 2.8 and 5.2.6).

use std::os::unix::fs::FileExt;

use super::{AVAILABLE, FrontEnd, MEMORY_BYTES, PACKED, QUEUES, RING_BYTES, USED, pair};

/// Pages of requests begin here, indirect tables there.
const REQUESTS: u64 = MEMORY_BYTES / 2;
const TABLES: u64 = MEMORY_BYTES / 4;
/// Descriptors of a request.
const CHAIN: u64 = 3;
/// Requests that stand in the table of a split ring at a time.
const REQUESTS_SPLIT: u64 = 10;

/// Flags of a descriptor.
const NEXT: u64 = 1;
const WRITE: u64 = 2;
const INDIRECT: u64 = 4;
const IS_AVAILABLE: u64 = 1 << 7;
const IS_USED: u64 = 1 << 15;

/// Kinds of requests: read, write, flush, serial number, discard, write-zeroes, and none.
const KINDS: [u32; 7] = [0, 1, 4, 8, 11, 13, 99];
const OUT: u32 = 1;
const RANGES: [u32; 2] = [11, 13];

/// Where a packed ring stands that is new: both wrap counters are one.
pub(super) const PACKED_BASE: u64 = 1 << 15 | 1 << 31;

/// A packed ring, as the guest has it.
#[derive(Clone, Copy)]
pub(super) struct Packed {
    /// The next descriptor, and in which kind of lap.
    next: u64,
    wrap: bool,
    /// The first descriptor of the request before.
    head: u64,
}

impl Default for Packed {
    fn default() -> Packed {
        Packed { next: 0, wrap: true, head: 0 }
    }
}

/// A part of guest memory that a request is about.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) address: u64,
    pub(super) len: u64,
    pub(super) flags: u64,
}

impl FrontEnd {
    pub(super) fn is_packed(&self) -> bool {
        self.features & PACKED != 0
    }

    pub(super) fn put(&self, at: u64, bytes: &[u8]) {
        if at.saturating_add(bytes.len() as u64) <= MEMORY_BYTES {
            // Memory takes it.
            let _ = self.memory.write_all_at(bytes, at);
        }
    }

    pub(super) fn kick(&self) {
        // One that is full has rung already.
        let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
    }

    /// This, but for a slip of the guest.
    pub(super) fn mostly(&mut self, right: u64) -> u64 {
        if self.guest_slips() { self.number() } else { right }
    }

    /// Any bytes, anywhere in a ring.
    pub(super) fn scribble(&mut self) {
        let at = self.choices.below(u64::from(QUEUES) * RING_BYTES);
        let number = self.number();
        self.put(at, &number.to_le_bytes());
    }

    /// Requests that are mostly right, made available.
    pub(super) fn make_requests(&mut self) {
        let queue = self.choices.index(QUEUES as usize);
        match self.is_packed() {
            true => self.make_packed(queue),
            false => self.make_split(queue),
        }
        self.kick();
    }

    /// Header, data and status, one after the other; one time in four in a table.
    fn make_chain(&mut self) -> Vec<Piece> {
        let pieces = self.make_request();
        if !self.choices.chance(1, 4) {
            return pieces.into();
        }
        let table = TABLES + self.choices.below(256) * 4096;
        for (place, piece) in (0..).zip(pieces) {
            // In such a table of a packed ring they follow each other anyway.
            let next = if self.is_packed() { NEXT } else { 0 };
            let piece = Piece { flags: piece.flags & !next, ..piece };
            self.describe(table + place * 16, piece, place + 1);
        }
        vec![Piece { address: table, len: CHAIN * 16, flags: INDIRECT }]
    }

    pub(super) fn make_request(&mut self) -> [Piece; CHAIN as usize] {
        let page = REQUESTS + self.choices.below(256) * 4096;
        let kind = KINDS[self.choices.index(KINDS.len())];
        self.make_header(page, kind);
        let data = if RANGES.contains(&kind) {
            Piece { address: page + 16, len: 16, flags: NEXT }
        } else {
            let len = [512, 4096, 65536][self.choices.index(3)];
            let flags = if kind == OUT { NEXT } else { NEXT | WRITE };
            Piece { address: page + 512, len, flags }
        };
        let header = Piece { address: page, len: 16, flags: NEXT };
        [header, data, Piece { address: page + 256, len: 1, flags: WRITE }]
    }

    /// The request's header, and the range of a discard behind it.
    fn make_header(&mut self, page: u64, kind: u32) {
        let sector = self.choices.below(2048);
        let (sector, sectors) = (self.mostly(sector), self.mostly(8));
        self.put(page, &kind.to_le_bytes());
        self.put(page + 8, &sector.to_le_bytes());
        self.put(page + 16, &sector.to_le_bytes());
        self.put(page + 24, &(sectors % (1 << 32)).to_le_bytes());
    }

    /// Writes a descriptor. `other`: the next one of a split ring, of a packed one the buffer's id.
    fn describe(&mut self, at: u64, piece: Piece, other: u64) {
        let [address, len, flags, other] =
            [piece.address, piece.len, piece.flags, other].map(|right| self.mostly(right));
        let (flags, other) = (flags & 0xffff, other & 0xffff);
        let last = if self.is_packed() { other | flags << 16 } else { flags | other << 16 };
        let fields = [address, pair(len, last)];
        let bytes: Vec<u8> = fields.iter().flat_map(|it| it.to_le_bytes()).collect();
        self.put(at, &bytes);
    }

    /// Of a split ring: a table of requests, and some of them made available, mostly once all
    /// before are used.
    pub(super) fn make_split(&mut self, queue: usize) {
        if self.in_flight(queue) > 0 && !self.choices.chance(1, 16) {
            return;
        }
        let ring = queue as u64 * RING_BYTES;
        let requests = REQUESTS_SPLIT.min(self.ring_size / CHAIN).max(1);
        for first in (0..requests).map(|request| request * CHAIN) {
            for (index, piece) in (first..).zip(self.make_chain()) {
                self.describe(ring + index * 16, piece, index + 1);
            }
        }
        for _ in 0..1 + self.choices.below(8) {
            let slot = u64::from(self.available[queue]) % self.ring_size.min(1024);
            let head = self.choices.below(requests) * CHAIN;
            let head = self.mostly(head) as u16;
            self.put(ring + AVAILABLE + 4 + slot * 2, &head.to_le_bytes());
            self.available[queue] = self.available[queue].wrapping_add(1);
        }
        let jump = if self.guest_slips() { self.choices.byte() } else { 0 };
        let shown = self.available[queue].wrapping_add(u16::from(jump));
        self.put(ring + AVAILABLE + 2, &shown.to_le_bytes());
    }

    /// Of a packed ring: some requests, mostly once the one before is used.
    fn make_packed(&mut self, queue: usize) {
        for _ in 0..1 + self.choices.below(4) {
            if !self.is_used(queue) && !self.choices.chance(1, 16) {
                return;
            }
            let chain = self.make_chain();
            let id = self.choices.below(self.ring_size);
            let mut places = Vec::new();
            for piece in chain {
                places.push((self.packed[queue].next, self.lap_flags(queue), piece));
                self.advance(queue);
            }
            self.packed[queue].head = places.first().map_or(0, |(at, ..)| *at);
            // The first one last: with it all are available.
            for (at, lap, piece) in places.into_iter().rev() {
                let piece = Piece { flags: piece.flags | lap, ..piece };
                self.describe(queue as u64 * RING_BYTES + at * 16, piece, id);
            }
        }
    }

    fn lap_flags(&self, queue: usize) -> u64 {
        if self.packed[queue].wrap { IS_AVAILABLE } else { IS_USED }
    }

    pub(super) fn advance(&mut self, queue: usize) {
        let ring = &mut self.packed[queue];
        ring.next += 1;
        if ring.next == self.ring_size {
            (ring.next, ring.wrap) = (0, !ring.wrap);
        }
    }

    /// Whether the device is done with the request before.
    fn is_used(&self, queue: usize) -> bool {
        let flags = u64::from(self.look(queue, self.packed[queue].head * 16 + 14));
        (flags & IS_AVAILABLE != 0) == (flags & IS_USED != 0)
    }

    /// Requests of a split ring that are not used yet.
    fn in_flight(&self, queue: usize) -> u16 {
        self.available[queue].wrapping_sub(self.look(queue, USED + 2))
    }

    /// What a ring has there; 0 past the end of memory.
    fn look(&self, queue: usize, at: u64) -> u16 {
        let mut field = [0; 2];
        let _ = self.memory.read_exact_at(&mut field, queue as u64 * RING_BYTES + at);
        u16::from_le_bytes(field)
    }

    /// Whether the device answered anything; of a packed ring, in its first lap.
    #[cfg(test)]
    pub(super) fn has_answers(&self, queue: usize) -> bool {
        match self.is_packed() {
            true => {
                u64::from(self.look(queue, 14)) & (IS_AVAILABLE | IS_USED) == IS_AVAILABLE | IS_USED
            }
            false => self.look(queue, USED + 2) > 0,
        }
    }
}
