//! Drives whose files were cut short. What stood past the cut is gone, and once a file has its size
//! again it reads as zeroes there, which nothing tells from data. So a drive that was seen like
//! that is not used any more, whatever its size is by then, before somebody says what it is.

use uuid::Uuid;

use crate::device::content::Content;
use crate::host::Host;
use crate::refusal::{Answer, Refusal};

impl Host {
    /// Durably.
    pub(super) fn note_cut(&self, drive: Uuid) -> Answer<()> {
        if self.look(|state| state.catalog.cut.contains(&drive)) {
            return Ok(());
        }
        self.record(|catalog| {
            catalog.cut.insert(drive);
        })
    }

    /// It is another drive's from now on, or whole again.
    pub(super) fn forget_cut(&self, drive: Uuid) -> Answer<()> {
        if !self.look(|state| state.catalog.cut.contains(&drive)) {
            return Ok(());
        }
        self.record(|catalog| {
            catalog.cut.remove(&drive);
        })
    }

    pub(super) fn was_cut(&self, content: &Content) -> bool {
        let drive = content.label().map(|label| label.drive);
        drive.is_some_and(|drive| self.look(|state| state.catalog.cut.contains(&drive)))
    }

    /// What is to be said of one that was.
    pub(super) fn cut_of(&self, content: &Content) -> Option<String> {
        self.check_cut("its file", content).err().map(|refusal| refusal.line())
    }

    /// Refuses one that was cut short; `shown`: its path, or its name.
    pub(super) fn check_cut(&self, shown: &str, content: &Content) -> Answer<()> {
        if self.was_cut(content) { Err(was_cut(shown)) } else { Ok(()) }
    }
}

/// What to do with it.
pub(super) const FIX: &str = "detach it, attach it with --force, which wipes it, and give it to \
                              its array by `ashlar array replace`; or with --whole, once all of \
                              it is again as it was";

fn was_cut(shown: &str) -> Refusal {
    let text =
        format!("{shown} was cut short: what stood past that may be lost, though it has its size");
    Refusal::conflict(text).fix(FIX)
}
