//! What went wrong with drives: noted while arrays run, shown, stored, and forgotten if asked to.

use std::collections::BTreeMap;

use uuid::Uuid;

use crate::api::drive::{Drive, DriveHistory};
use crate::host::Host;
use crate::period::now_s;
use crate::refusal::{Answer, Refusal};
use crate::snapshot::ArraySnapshot;

impl Host {
    /// After a look at all arrays. What cannot be stored is tried again with the next.
    pub(super) fn note_histories(&self, arrays: &BTreeMap<Uuid, ArraySnapshot>) -> Answer<()> {
        let now_s = now_s();
        self.look(|state| {
            for member in arrays.values().flat_map(|array| &array.members) {
                if let Some(drive) = &member.drive {
                    state.histories.note(member.drive_uuid, now_s, drive.health, drive.counters);
                }
            }
        });
        self.store_histories(false)
    }

    /// `all`: also what may wait.
    pub(super) fn store_histories(&self, all: bool) -> Answer<()> {
        let now_s = now_s();
        self.look(|state| {
            let histories = &state.histories;
            let due = if all { histories.unstored() } else { histories.to_store(now_s) };
            if let Some(due) = due {
                self.directory.save_histories(due)?;
                state.histories.stored(now_s);
            }
            Ok(())
        })
    }

    pub(super) fn history_of(&self, drive: Uuid) -> Option<DriveHistory> {
        self.look(|state| state.histories.of(drive).cloned())
    }

    /// Forgets what went wrong with a drive.
    pub async fn clear_drive(&self, name: &str) -> Answer<Drive> {
        let _change = self.begin().await?;
        let drive = self.show_drive(name).await?;
        let cleared = |uuid| self.look(|state| state.histories.clear(uuid));
        if !drive.uuid.is_some_and(cleared) {
            return Err(Refusal::conflict(format!("nothing is known against drive {name}")));
        }
        self.store_histories(true)?;
        tracing::info!(drive = name, "what went wrong with it is forgotten");
        self.show_drive(name).await
    }
}
