//! The pool's volume table, kept on every member beside the superblock: two slots, newest wins.

use std::rc::Rc;

use ashlar_format::record;
use ashlar_format::units::MemberIndex;
use ashlar_format::volume_table::{SLOTS, VolumeTable};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;
use zerocopy::IntoBytes;

use crate::array::Array;
use crate::error::ArrayError;
use crate::label;

impl Array {
    /// Writes the table anew: for a member that has just joined.
    pub(crate) async fn renew_table(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        let table = self.find_table().await?;
        self.write_table_locked(&table).await
    }

    /// The newest table that any trusted member has; an empty one if none has any.
    pub async fn read_table(self: &Rc<Self>) -> Result<Box<VolumeTable>, ArrayError> {
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        self.find_table().await
    }

    async fn find_table(self: &Rc<Self>) -> Result<Box<VolumeTable>, ArrayError> {
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
        let found = newest.header.sequence.get();
        self.table_sequence.set(found.max(self.table_sequence.get()));
        Ok(newest)
    }

    /// Makes a table durable on every member.
    pub async fn write_table(self: &Rc<Self>, table: &VolumeTable) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        self.write_table_locked(table).await
    }

    async fn write_table_locked(self: &Rc<Self>, table: &VolumeTable) -> Result<(), ArrayError> {
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
        let members: Vec<MemberIndex> = targets.iter().map(|(index, ..)| *index).collect();
        self.members.fence_failed(&members, &results).await?;
        // A trusted member that is away has missed the table, too: alone, it would show the old
        // one.
        self.members.fence_absent().await
    }
}
