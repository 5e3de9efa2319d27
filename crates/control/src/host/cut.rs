//! Drives whose files were cut short. What stood past the cut is gone, and once a file has its size
//! again it reads as zeroes there, which nothing tells from data. So a drive that was seen like
//! that is not used any more, whatever its size is by then, before somebody says what it is.

use crate::device::content::Content;
use crate::host::Host;
use crate::refusal::{Answer, Refusal};

impl Host {
    /// Notes a drive with this label at once, and durably as soon as that can be.
    pub(super) fn note_cut(&self, content: &Content) -> Answer<()> {
        let Some(label) = content.label() else { return Ok(()) };
        self.look(|state| state.cut.insert(label.drive));
        self.store_cuts()
    }

    /// Those that are noted and not stored yet.
    pub(super) fn store_cuts(&self) -> Answer<()> {
        let cut = self.look(|state| {
            let is_new = !state.cut.is_subset(&state.catalog.cut);
            is_new.then(|| state.cut.clone())
        });
        cut.map_or(Ok(()), |cut| self.record(|catalog| catalog.cut.extend(&cut)))
    }

    /// The drive with this label is whole again, or the label is gone.
    pub(super) fn forget_cut(&self, content: &Content) -> Answer<()> {
        let Some(label) = content.label().filter(|_| self.was_cut(content)) else { return Ok(()) };
        // First: it would be stored again.
        self.look(|state| state.cut.remove(&label.drive));
        self.record(|catalog| {
            catalog.cut.remove(&label.drive);
        })
    }

    pub(super) fn was_cut(&self, content: &Content) -> bool {
        let Some(label) = content.label() else { return false };
        self.look(|state| {
            state.cut.contains(&label.drive) || state.catalog.cut.contains(&label.drive)
        })
    }

    /// What is to be said of one that was.
    pub(super) fn cut_of(&self, content: &Content) -> Option<String> {
        self.was_cut(content).then(|| refusal("its file").line())
    }

    /// Refuses one that was cut short; `shown`: its path, or its name.
    pub(super) fn check_cut(&self, shown: &str, content: &Content) -> Answer<()> {
        if self.was_cut(content) { Err(refusal(shown)) } else { Ok(()) }
    }
}

/// What to do with it.
pub(super) const FIX: &str = "detach it if it is attached (`ashlar drive detach DRIVE --force`), \
                              attach it with --force, which wipes it, and give it to its array by \
                              `ashlar array replace`; or attach it with --whole, once all of it is \
                              again as it was";

pub(super) fn refusal(shown: &str) -> Refusal {
    Refusal::conflict(format!(
        "{shown} was cut short: what stood past that may be lost, whatever its size is now"
    ))
    .fix(FIX)
}
