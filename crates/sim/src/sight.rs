//! Reads as another reactor does them: by a view of the array, from the drives themselves, while
//! the view says that this is all there is to do; else the owner is asked.
//!
//! Owner and reader are tasks of one reactor here, so their steps come in every order, each of them
//! whole. What processors make of a single step, `ashlar_raid::view` tests by itself.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

use ashlar_format::units::to_usize;
use ashlar_raid::array::Array;
use ashlar_raid::viewer::Viewer;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;

/// How often the owner is asked what is plain to see: more often than in earnest, so that it often
/// is while something changes.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// What a life sees of its array from elsewhere.
#[derive(Default)]
pub struct Sight {
    viewer: RefCell<Option<Rc<Viewer>>>,
    look_at: Cell<Instant>,
    /// So long what is seen holds, whatever becomes of the owner.
    until: Cell<Instant>,
    turn: Cell<bool>,
}

impl Sight {
    /// Every other read is tried. False: the owner is to do it.
    pub async fn read(
        &self,
        reactor: &Reactor,
        array: &Rc<Array>,
        ranges: impl Iterator<Item = Range<u64>>,
        into: &Buffers,
    ) -> bool {
        self.turn.set(!self.turn.get());
        if self.turn.get() {
            return false;
        }
        self.look_around(reactor, array);
        let holds = || reactor.turn_time() <= self.until.get();
        if !holds() {
            return false;
        }
        let Some(viewer) = self.viewer.borrow().clone() else { return false };
        let mut done = 0;
        for range in ranges {
            let end = done + to_usize(range.end - range.start);
            if !viewer.read(range.start, &into.slice(done..end)).await {
                return false;
            }
            done = end;
        }
        // A volume that is just growing has places that are not known here yet.
        done == into.len() && holds()
    }

    /// As `ashlar_pool::far` does it: what is not open any more is let go, and what was shown is
    /// asked about.
    fn look_around(&self, reactor: &Reactor, array: &Rc<Array>) {
        if reactor.now() < self.look_at.get() {
            return;
        }
        self.look_at.set(reactor.now().after(LOOK_AGAIN));
        let seen = self.viewer.take().filter(|viewer| viewer.is_open());
        let shown = || Some(Rc::new(Viewer::open(reactor, array.show()?)));
        *self.viewer.borrow_mut() = seen.or_else(shown);
        // It hides what is no longer plain.
        self.until.set(reactor.now().after(array.shown_for()));
    }
}
