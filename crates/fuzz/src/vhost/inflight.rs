//! A region of what was in flight, as the process before might have left it: whole, with a slip
//! here and there, or anything (vhost-user specification, "Inflight I/O tracking").

use std::os::unix::fs::FileExt;

use super::{FrontEnd, QUEUES};

const ALIGN: u64 = 64;
/// Of either layout.
const HEADER: u64 = 32;
const ENTRY: u64 = 32;
const SPLIT_HEADER: u64 = 16;
const SPLIT_ENTRY: u64 = 16;
const VERSION: u16 = 1;
/// Descriptors of the chain that is in flight.
const CHAIN: u64 = 3;

fn queue_bytes(ring_size: u64) -> u64 {
    (HEADER + ring_size * ENTRY).next_multiple_of(ALIGN)
}

/// Of the region.
pub(super) fn bytes(ring_size: u64) -> u64 {
    u64::from(QUEUES) * queue_bytes(ring_size)
}

impl FrontEnd {
    /// Each queue has a section that is blank, has a request in flight, or says anything.
    pub(super) fn leave_in_flight(&mut self) {
        for queue in 0..QUEUES.into() {
            let section = match self.choices.below(4) {
                0 => continue,
                1 => (0..256).map(|_| self.choices.byte()).collect(),
                _ if self.is_packed() => self.packed_section(queue),
                _ => {
                    // The ring has it still.
                    self.make_split(queue);
                    self.split_section(queue)
                }
            };
            // Memory takes it.
            let _ = self.region.write_all_at(&section, queue as u64 * queue_bytes(self.ring_size));
        }
    }

    /// Version, and how many descriptors.
    fn section(&mut self) -> Vec<u8> {
        let mut section = vec![0; queue_bytes(self.ring_size) as usize];
        self.note_u16(&mut section, 8, VERSION.into());
        self.note_u16(&mut section, 10, self.ring_size);
        section
    }

    /// The request of the first descriptor, and mostly another one, if as many are available.
    fn split_section(&mut self, queue: usize) -> Vec<u8> {
        let mut section = self.section();
        let heads = [0, self.choices.below(4) * CHAIN];
        let available = usize::from(self.available[queue]);
        for (count, head) in heads.into_iter().take(available).enumerate() {
            let entry = SPLIT_HEADER + head * SPLIT_ENTRY;
            note(&mut section, entry, &[1]);
            self.note_u64(&mut section, entry + 8, count as u64);
        }
        section
    }

    /// A request in the first entries, which have its descriptors, and the others free.
    fn packed_section(&mut self, queue: usize) -> Vec<u8> {
        let mut section = self.section();
        // The guest goes on behind it.
        (0..CHAIN).for_each(|_| self.advance(queue));
        // The free list's head, new and old; the used index, and its wrap counter.
        self.note_u16(&mut section, 12, CHAIN);
        self.note_u16(&mut section, 14, CHAIN);
        self.note_u64(&mut section, 16, 1 << 32 | 1 << 40);
        for index in 0..self.ring_size {
            self.note_u16(&mut section, HEADER + index * ENTRY + 2, index + 1);
        }
        note(&mut section, HEADER, &[1]);
        self.note_u16(&mut section, HEADER + 4, CHAIN - 1);
        self.note_u16(&mut section, HEADER + 6, CHAIN);
        for (index, piece) in (0..).zip(self.make_request()) {
            let copy = HEADER + index * ENTRY + 16;
            // Buffer id and flags, length, address.
            self.note_u64(&mut section, copy, piece.flags << 16 | piece.len << 32);
            self.note_u64(&mut section, copy + 8, piece.address);
        }
        section
    }

    fn note_u16(&mut self, section: &mut [u8], at: u64, right: u64) {
        note(section, at, &(self.mostly(right) as u16).to_le_bytes());
    }

    fn note_u64(&mut self, section: &mut [u8], at: u64, right: u64) {
        note(section, at, &self.mostly(right).to_le_bytes());
    }
}

/// What has no room is left out.
fn note(section: &mut [u8], at: u64, bytes: &[u8]) {
    let place = section.get_mut(at as usize..).and_then(|rest| rest.get_mut(..bytes.len()));
    place.into_iter().for_each(|place| place.copy_from_slice(bytes));
}
