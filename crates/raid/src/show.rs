//! Showing an array to other reactors: whether all is as plain as a view says (`view.rs`), and to
//! whom else the states that it is about belong.
//!
//! Those who change such a state close the view first: [`Members`](crate::members) when a member
//! is no longer what it was, [`BadBlocks`](crate::bad_blocks) before rows are given up, the sets of
//! doubtful stripes, and whoever changes the shape of the array or ends it. The set of pending
//! stripes and the map of written regions tell it of each of theirs.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use crate::array::Array;
use crate::stripe_set::Watch;
use crate::view::View;
use crate::viewer::Shown;

impl Array {
    /// For another reactor: a view, and its drives. `None`: there is nothing plain to see now, or a
    /// drive can be had by one reactor only.
    pub fn show(self: &Rc<Self>) -> Option<Shown> {
        if !self.is_plain() {
            self.hide();
            return None;
        }
        let members = self.members.list();
        let devices = members.iter().map(|member| member.alive()?.twin());
        let devices = devices.collect::<Option<Vec<_>>>()?;
        drop(members);
        let view = self.members.view().filter(|view| view.is_open());
        let view = view.unwrap_or_else(|| self.make_view());
        // Who let a view go is forgotten before there is one more.
        self.hear_readers();
        let notes = self.readers.add(view.clone());
        Some(Shown { view, notes, devices })
    }

    /// Whether what was shown still holds; and for how long, whatever becomes of this reactor.
    pub fn shown_for(&self) -> Duration {
        self.hear_readers();
        if !self.is_plain() {
            self.hide();
            return Duration::ZERO;
        }
        self.lease.get().map_or(Duration::MAX, |lease| lease.sure_for())
    }

    /// Takes into account what was read by views since this was last done: drives are judged, and
    /// jobs give way, as if it had been read here.
    pub(crate) fn hear_readers(&self) {
        let members = self.members.list();
        let served = self.readers.hear(|sample| {
            let drive = members.get(sample.member).and_then(|member| member.alive());
            drive.into_iter().for_each(|drive| drive.was_read_elsewhere(sample.took));
            self.pace.waited(sample.took, sample.crowded);
        });
        if served.reads > 0 {
            self.pace.served_elsewhere(served.reads);
            self.used_elsewhere(served);
        }
    }

    /// Nobody may read by a view from now on.
    pub fn hide(&self) {
        self.members.hide();
    }

    /// Whether a read of any stripe that was written, and has nothing pending, is a read of one
    /// drive, as in `begin_read`.
    fn is_plain(&self) -> bool {
        let is_sure = self.lease.get().is_none_or(|lease| !lease.sure_for().is_zero());
        let doubts = self.unsynced.count() + self.torn_stripes.count();
        is_sure
            && !self.is_stopping()
            && self.members.all_trusted()
            && self.integrity.is_none()
            && self.settings().hedge_percent() == 0
            && doubts == 0
            && self.bad.is_empty()
            && !self.is_restriping()
            && !self.growing.get()
    }

    fn make_view(&self) -> Arc<View> {
        let layout = self.layout();
        let data = self.members.list().iter().map(|member| member.areas.data.offset).collect();
        let (region_stripes, regions) = (self.identity.region_stripes(), self.written.regions());
        let view = View::new(layout, data, self.sector_bytes, region_stripes, regions);
        view.set_crowded(self.pace.working.get() > 0);
        let view = Arc::new(view);
        self.members.watch(view.clone());
        self.unsynced.watch(Watch::Doubts(view.clone()));
        self.torn_stripes.watch(Watch::Doubts(view.clone()));
        self.written.watch(view.clone());
        self.journal.pending.borrow().watch(view.clone());
        view
    }
}
