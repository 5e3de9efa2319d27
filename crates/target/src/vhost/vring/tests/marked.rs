//! Goal: each store of the device to its ring marks the pages that it changes, and no others.
//! Method: rings of the largest size, whose parts have several pages; before each step of the
//! device the log is emptied and memory copied. No ring that is at work would show this: what it
//! marks in one step hides what it does not mark in the next.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt;

use ashlar_format::units::to_usize;
use virtio_bindings::virtio_config::VIRTIO_F_RING_PACKED;

use super::*;
use crate::vhost::dirty::tests::log;
use crate::vhost::dirty::{DirtyLog, PAGE_BYTES};

/// Every part of the ring is below.
const PAGES: usize = 16;
const PACKED: u64 = 1 << VIRTIO_F_RING_PACKED;

type Pages = BTreeSet<usize>;

fn page_bytes() -> usize {
    to_usize(PAGE_BYTES)
}

struct Rig {
    guest: Guest,
    ring: Ring,
    dirty: DirtyLog,
    file: File,
    packed: bool,
    offered: u16,
}

impl Rig {
    fn new(features: u64) -> Rig {
        let guest = Guest::new(RING_SIZE_MAX);
        let packed = features & PACKED != 0;
        let base = if packed { 0x8000_8000 } else { 0 };
        let setup = RingSetup { base, ..guest.setup(features) };
        let ring = Ring::new(&guest.memory, &setup, None).unwrap();
        let (dirty, file) = log(PAGES as u64 / 8);
        Rig { guest, ring, dirty, file, packed, offered: 0 }
    }

    /// Pages that a step of the device changes; these and no others are marked.
    fn changed(&mut self, step: impl FnOnce(&mut Ring)) -> Pages {
        self.take();
        let before = self.content();
        step(&mut self.ring);
        let after = self.content();
        let pages = before.chunks(page_bytes()).zip(after.chunks(page_bytes())).enumerate();
        let differ = pages.filter(|(_, (before, after))| before != after);
        let changed = differ.map(|(page, _)| page).collect();
        assert_eq!(self.take(), changed);
        changed
    }

    fn content(&self) -> Vec<u8> {
        self.guest.read(0, PAGES * page_bytes())
    }

    fn take(&self) -> Pages {
        let mut bits = [0; PAGES / 8];
        self.file.read_exact_at(&mut bits, 0).unwrap();
        self.file.write_all_at(&[0; PAGES / 8], 0).unwrap();
        (0..PAGES).filter(|page| bits[page / 8] & 1 << (page % 8) != 0).collect()
    }

    /// A chain of one descriptor is offered and popped.
    fn pop(&mut self) -> Popped {
        let slot = self.offered;
        self.offered += 1;
        if self.packed {
            // Its flags say that it is available in the first lap.
            self.guest.put(Guest::descriptor(DESCRIPTORS, slot), 0x2_0000, 16, slot, 1 << 7);
        } else {
            self.guest.describe(slot, 0x2_0000, 16, 0, 0);
            self.guest.offer(slot);
        }
        let mut chain = Chain::new();
        assert_eq!(self.ring.look(), Ok(true));
        assert_eq!(self.ring.pop(&self.guest.memory, &mut chain), Ok(true));
        chain.popped()
    }
}

#[test]
fn each_store_to_a_ring_is_marked_and_nothing_else() {
    for features in [0, EVENT_INDEX, PACKED, PACKED | EVENT_INDEX] {
        let mut rig = Rig::new(features);
        let (log, memory) = (rig.dirty.clone(), rig.guest.memory.clone());
        rig.ring.log_to(&memory, Some(RingLog { log, used: USED }));
        let parts: Pages = if rig.packed { [1, 2, 3, 4, 8].into() } else { [8, 9, 10].into() };
        assert_eq!(rig.take(), parts, "whatever was written before");
        let mut all = Pages::new();
        for _ in 0..RING_SIZE_MAX / 2 {
            let (first, second) = (rig.pop(), rig.pop());
            let pushed = [first, second].map(|popped| rig.changed(|its| its.push_used(popped, 7)));
            let shown = rig.changed(Ring::show_used);
            let asked = rig.changed(|its| assert!(!its.enable_kicks(), "all were popped"));
            let polled = rig.changed(|its| its.disable_kicks());
            let steps = [&pushed[0], &pushed[1], &shown, &asked];
            assert!(steps.iter().all(|step| !step.is_empty()), "{features:#x}: {steps:?}");
            // With an event index a split ring need not say that it is polled.
            assert_eq!(polled.is_empty(), features == EVENT_INDEX);
            all.extend(steps.into_iter().flatten());
        }
        assert_eq!(all, parts, "{features:#x}");
        let left = rig.changed(|its| its.leave(false));
        assert_eq!(!left.is_empty(), rig.packed);
        // And no more.
        rig.ring.log_to(&memory, None);
        rig.take();
        rig.ring.owe_call();
        assert!(!rig.ring.enable_kicks());
        assert!(rig.take().is_empty());
    }
}
