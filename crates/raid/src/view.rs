//! What other reactors may read of an array by themselves: where its data is, and a word of the
//! owner for as long as that is all there is to know.
//!
//! A view is made by the reactor that owns the array, while every member is there and trusted and
//! nothing is in doubt (`show.rs`). It is read by others (`viewer.rs`). A stripe is *plain* while
//! what stands in place is the newest: its region was written, and nothing of it is pending.
//!
//! ```text
//! owner                                     reader
//! closes the view · fence · begins what     is it open, and the stripe plain? · reads · fence ·
//! makes it untrue                           is it still open?
//! ```
//!
//! Why that is enough:
//! - What the view says of *places* (members, the shape of stripes, what a region means) is wrong
//!   only after it was closed. Bytes that were put somewhere after the closing can be read; then,
//!   by the two fences, the reader's second look finds the view closed (C++20, 32.5.4), and what
//!   was read is not used. A closed view is never opened again: there is a new one later.
//! - What a stripe's count says is as it is for the owner itself, who looks at it before a read and
//!   not after. The owner counts a stripe before it answers a write that is pending, and stops to
//!   count it when all of it is in place. Whoever asks after that answer has heard of it, through
//!   the guest's memory or otherwise, and everything on that way releases and acquires; so the
//!   count is seen, too. Who asked before may be shown the old bytes or the new ones.
//! - So nobody but the owner changes a word, and no word is changed for a read. What a reader has
//!   done, it notes elsewhere (`notes.rs`).
//!
//! Counts are of groups of stripes, so a stripe may seem to be pending that is not: then the owner
//! is asked.

use std::ops::Range;

use ashlar_format::units::{RegionIndex, StripeIndex, to_usize};

#[cfg(test)]
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(test))]
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};

use crate::layout::Layout;

/// Counts of pending stripes: of as many neighbours as this, each has its own.
const COUNTS: usize = if cfg!(test) { 2 } else { 1 << 14 };

pub struct View {
    pub(crate) layout: Layout,
    /// Where each member's data area begins.
    pub(crate) data: Vec<u64>,
    /// Largest sector of any member.
    pub(crate) sector_bytes: u32,
    region_stripes: u64,
    is_closed: AtomicBool,
    /// A job of the owner is at work. It is told for judging how long reads take, and no more.
    is_crowded: AtomicBool,
    /// Bit by bit, regions that were written.
    written: Box<[AtomicU64]>,
    /// Stripes with pending data, by their number modulo [`COUNTS`].
    pending: Box<[AtomicU32]>,
}

impl View {
    pub(crate) fn new(
        layout: Layout,
        data: Vec<u64>,
        sector_bytes: u32,
        region_stripes: u32,
        regions: u64,
    ) -> View {
        let words = to_usize(regions.div_ceil(64));
        View {
            layout,
            data,
            sector_bytes,
            region_stripes: region_stripes.into(),
            is_closed: AtomicBool::new(false),
            is_crowded: AtomicBool::new(false),
            written: (0..words).map(|_| AtomicU64::new(0)).collect(),
            pending: (0..COUNTS).map(|_| AtomicU32::new(0)).collect(),
        }
    }

    /// By the owner, before anything begins that makes the view untrue.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    pub(crate) fn is_open(&self) -> bool {
        !self.is_closed.load(Ordering::Acquire)
    }

    /// By a reader, after it has read: whether the view has been open until then.
    pub(crate) fn was_open(&self) -> bool {
        fence(Ordering::Acquire);
        self.is_open()
    }

    /// By the owner: a job begins to work (true), or the last one ceases (false).
    pub(crate) fn set_crowded(&self, is_crowded: bool) {
        self.is_crowded.store(is_crowded, Ordering::Relaxed);
    }

    /// By a reader: whether a job is in its way.
    pub(crate) fn is_crowded(&self) -> bool {
        self.is_crowded.load(Ordering::Relaxed)
    }

    fn place(region: RegionIndex) -> (usize, u64) {
        (to_usize(region.0 / 64), 1 << (region.0 % 64))
    }

    /// By the owner: the region was written, durably.
    pub(crate) fn wrote(&self, region: RegionIndex) {
        let (word, bit) = View::place(region);
        self.written[word].fetch_or(bit, Ordering::Release);
    }

    /// By the owner, before it is forgotten.
    pub(crate) fn forgot(&self, region: RegionIndex) {
        let (word, bit) = View::place(region);
        self.written[word].fetch_and(!bit, Ordering::Release);
    }

    fn count(&self, stripe: StripeIndex) -> &AtomicU32 {
        &self.pending[to_usize(stripe.0) % COUNTS]
    }

    /// By the owner, before a write is answered: the stripe has pending data.
    pub(crate) fn began(&self, stripe: StripeIndex) {
        self.count(stripe).fetch_add(1, Ordering::Release);
    }

    /// By the owner: all of it is in place.
    pub(crate) fn ended(&self, stripe: StripeIndex) {
        let before = self.count(stripe).fetch_sub(1, Ordering::Release);
        assert!(before > 0, "{stripe:?} was not counted");
    }

    /// By a reader: whether what stands in place is the newest of the stripe.
    pub(crate) fn is_plain(&self, stripe: StripeIndex) -> bool {
        // In this order: what is forgotten is so before it is pending no more.
        let is_pending = self.count(stripe).load(Ordering::Acquire) > 0;
        let (word, bit) = View::place(RegionIndex(stripe.0 / self.region_stripes));
        !is_pending && self.written[word].load(Ordering::Acquire) & bit != 0
    }

    /// Whether these rows are of whole sectors of all members.
    pub(crate) fn is_whole(&self, rows: &Range<u32>) -> bool {
        rows.start.is_multiple_of(self.sector_bytes) && rows.end.is_multiple_of(self.sector_bytes)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no reader uses what was put in a place after the view of it was closed, and none
    //! misses a write that was answered before it asked.
    //! Method: every interleaving and every order of memory that the model allows.

    use ashlar_format::array_superblock::Level;
    use loom::sync::Arc;
    use loom::thread;

    use super::*;
    use crate::layout::Shape;

    const STRIPE: StripeIndex = StripeIndex(0);

    fn view() -> Arc<View> {
        let mut layout = Layout::new(Level::Raid5, 3, Shape::default(), 64 << 10).unwrap();
        layout.stripes = 16;
        let view = View::new(layout, vec![0; 3], 512, 16, 1);
        view.wrote(RegionIndex(0));
        Arc::new(view)
    }

    #[test]
    fn what_is_put_there_after_the_closing_is_not_used() {
        loom::model(|| {
            let (view, place) = (view(), Arc::new(AtomicU32::new(7)));
            let (its_view, its_place) = (view.clone(), place.clone());
            let owner = thread::spawn(move || {
                its_view.close();
                // Another member's data, or another volume's.
                its_place.store(13, Ordering::Relaxed);
            });
            if view.is_open() && view.is_plain(STRIPE) {
                let read = place.load(Ordering::Relaxed);
                if view.was_open() {
                    assert_eq!(read, 7);
                }
            }
            owner.join().unwrap();
            assert!(!view.is_open());
        });
    }

    #[test]
    fn who_asks_after_a_write_was_answered_reads_it() {
        loom::model(|| {
            let (view, place) = (view(), Arc::new(AtomicU32::new(1)));
            let answered = Arc::new(AtomicBool::new(false));
            let (its_view, its_place, its_answer) = (view.clone(), place.clone(), answered.clone());
            let owner = thread::spawn(move || {
                its_view.began(STRIPE);
                its_answer.store(true, Ordering::Release);
                its_place.store(2, Ordering::Relaxed);
                its_view.ended(STRIPE);
            });
            let asked_after = answered.load(Ordering::Acquire);
            if view.is_plain(STRIPE) {
                let read = place.load(Ordering::Relaxed);
                assert!(!asked_after || read == 2, "an answered write is not there");
            }
            owner.join().unwrap();
        });
    }

    #[test]
    fn what_was_pending_of_a_forgotten_region_hides_what_is_in_place() {
        loom::model(|| {
            let view = view();
            view.began(STRIPE);
            let its_view = view.clone();
            let owner = thread::spawn(move || {
                its_view.forgot(RegionIndex(0));
                its_view.ended(STRIPE);
            });
            assert!(!view.is_plain(STRIPE));
            owner.join().unwrap();
        });
    }

    #[test]
    fn a_region_that_was_forgotten_is_not_read() {
        loom::model(|| {
            let (view, answered) = (view(), Arc::new(AtomicBool::new(false)));
            let (its_view, its_answer) = (view.clone(), answered.clone());
            let owner = thread::spawn(move || {
                its_view.forgot(RegionIndex(0));
                its_answer.store(true, Ordering::Release);
            });
            if answered.load(Ordering::Acquire) {
                assert!(!view.is_plain(STRIPE));
            }
            owner.join().unwrap();
        });
    }
}
