//! The pool's volume table, kept on every member beside the superblock: two slots, newest wins.

use std::rc::Rc;

use ashlar_format::record;
use ashlar_format::units::MemberIndex;
use ashlar_format::volume_table::{SLOTS, VolumeTable};
use ashlar_reactor::join::join_all;
use zerocopy::IntoBytes;

use crate::array::Array;
use crate::error::ArrayError;
use crate::label;

impl Array {
    /// The newest table that any trusted member has; an empty one if none has any.
    pub async fn read_table(self: &Rc<Self>) -> Result<Box<VolumeTable>, ArrayError> {
        let members: Vec<_> = {
            let list = self.members.list();
            let kept = list.iter().filter_map(|m| {
                Some((m.keeps_metadata()?.clone(), m.drive_uuid, m.areas.volume_table.offset))
            });
            kept.collect()
        };
        if members.is_empty() {
            return Err(ArrayError::Lost);
        }
        let mut newest = VolumeTable::empty(self.uuid());
        for (drive, drive_uuid, area) in members {
            for slot in 0..SLOTS {
                let home = area + slot * VolumeTable::BYTES;
                let read = label::read_bytes(&self.reactor, &drive, home, VolumeTable::BYTES);
                let Ok(bytes) = read.await else { continue };
                let Ok(table) = record::open::<VolumeTable>(&bytes, Some(drive_uuid), home) else {
                    continue;
                };
                let newer = table.header.sequence.get() > newest.header.sequence.get();
                if newer && table.array == self.uuid() {
                    newest.as_mut_bytes().copy_from_slice(table.as_bytes());
                }
            }
        }
        self.table_sequence.set(newest.header.sequence.get());
        Ok(newest)
    }

    /// Makes a table durable on every member. One call at a time.
    pub async fn write_table(self: &Rc<Self>, table: &VolumeTable) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        let sequence = self.table_sequence.get() + 1;
        self.table_sequence.set(sequence);
        let targets: Vec<_> = {
            let list = self.members.list();
            let kept = list.iter().enumerate().filter_map(|(index, m)| {
                let drive = m.keeps_metadata()?.clone();
                Some((MemberIndex::new(index), drive, m.drive_uuid, m.areas.volume_table.offset))
            });
            kept.collect()
        };
        let writes = targets.iter().map(|(_, drive, drive_uuid, area)| async move {
            let home = area + sequence % SLOTS * VolumeTable::BYTES;
            let mut copy = VolumeTable::empty(self.uuid());
            copy.as_mut_bytes().copy_from_slice(table.as_bytes());
            label::write_record(&self.reactor, drive, &mut *copy, *drive_uuid, home, sequence)
                .await?;
            drive.flush().await
        });
        let results = join_all(writes).await;
        if results.iter().all(Result::is_err) {
            return Err(ArrayError::Lost);
        }
        let failed = targets.iter().zip(&results).filter(|(_, result)| result.is_err());
        let failed = failed.map(|((index, ..), _)| *index);
        // A trusted member that is away has missed the table, too: alone, it would show the old.
        let away: Vec<MemberIndex> = {
            let list = self.members.list();
            let can_do_without = self.members.serves_all();
            let away =
                list.iter().enumerate().filter(|(_, m)| can_do_without && m.alive().is_none());
            away.map(|(index, _)| MemberIndex::new(index)).collect()
        };
        self.members.fence(failed.chain(away)).await
    }
}
