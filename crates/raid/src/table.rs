//! The pool's volume table, kept on every member beside the superblock: two slots, newest wins.

use std::rc::Rc;

use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record;
use ashlar_format::volume_table::{SLOTS, VolumeTable};
use ashlar_reactor::range_lock::Mode;
use zerocopy::IntoBytes;

use crate::array::Array;
use crate::error::ArrayError;
use crate::label;
use crate::members::Keeper;

impl Array {
    /// Writes the table anew: for a member that has just joined.
    pub(crate) async fn renew_table(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        let (table, _) = self.find_table().await?;
        let (is_sure, known) = (self.table.is_sure.get(), self.table.known.get());
        self.write_table_locked(&table).await?;
        if is_sure && !self.members.serves_all() {
            // Others have the same by an older number, and may be here next without this one.
            self.table.known.set(known);
        }
        // Who is away has it, unless it was found on some members only.
        if !is_sure && self.members.serves_all() {
            self.members.fence_absent().await?;
        }
        self.table.is_sure.set(is_sure || self.members.serves_all());
        Ok(())
    }

    /// The newest table that any trusted member has; an empty one if none has any. If some lack it,
    /// by a crash or since theirs is damaged, they are given it: volumes that are served from now
    /// on must not be gone with the only member that names them.
    pub async fn read_table(self: &Rc<Self>) -> Result<Box<VolumeTable>, ArrayError> {
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        let (table, everywhere) = self.find_table().await?;
        // Not of an array that is being stopped.
        if !everywhere && let Ok(_request) = self.begin() {
            // Who cannot take it is fenced; of an array that has failed the rest is served.
            if self.write_table_locked(&table).await.is_ok() {
                self.table.is_sure.set(self.members.fence_absent().await.is_ok());
            }
        } else if self.members.all_trusted() {
            self.table.is_sure.set(everywhere);
        }
        Ok(table)
    }

    /// Also: whether all members have it. An error: there is a newer one, for all that is known,
    /// and it cannot be read.
    async fn find_table(self: &Rc<Self>) -> Result<(Box<VolumeTable>, bool), ArrayError> {
        let mut newest = VolumeTable::empty(self.uuid());
        let (mut oldest, mut highest, mut is_whole) = (u64::MAX, 0, false);
        for keeper in self.members.keepers() {
            let (tables, is_all) = self.tables_of(&keeper).await;
            let own = tables.last().map_or(0, |table| table.header.sequence.get());
            oldest = oldest.min(own);
            highest = own.max(highest);
            // What another has, nobody may ever have heard of.
            if self.members.list()[keeper.index.index()].is_whole() {
                is_whole |= is_all;
                if let Some(table) = tables.last().filter(|_| own > newest.header.sequence.get()) {
                    newest.as_mut_bytes().copy_from_slice(table.as_bytes());
                }
            }
        }
        let (found, known) = (newest.header.sequence.get(), self.table.known.get());
        // Whoever is believed has the newest: it is among these if one shows all that it has.
        let is_newest = is_whole || known > 0 || found > 0 && !self.layout().is_redundant();
        if found < known || !is_newest {
            return Err(ArrayError::Lost);
        }
        self.table.known.set(found);
        self.table.sequence.set(highest.max(self.table.sequence.get()));
        Ok((newest, oldest == found))
    }

    /// Those that a member has, the newest last; and whether that is all.
    async fn tables_of(&self, keeper: &Keeper) -> (Vec<Box<VolumeTable>>, bool) {
        let Keeper { drive, drive_uuid, areas, .. } = keeper;
        let (mut tables, mut is_all) = (Vec::new(), true);
        for slot in 0..SLOTS {
            let home = areas.volume_table.offset + slot * VolumeTable::BYTES;
            let read = label::read_bytes(&self.reactor, drive, home, VolumeTable::BYTES).await;
            let Ok(bytes) = read else {
                is_all = false;
                continue;
            };
            if let Ok(table) = record::open::<VolumeTable>(&bytes, Some(*drive_uuid), home)
                && table.array == self.uuid()
            {
                let mut own = VolumeTable::empty(self.uuid());
                own.as_mut_bytes().copy_from_slice(table.as_bytes());
                tables.push(own);
            }
        }
        tables.sort_by_key(|table| table.header.sequence.get());
        (tables, is_all)
    }

    /// Makes a table durable on every member. Not of an array that has failed as a whole: members
    /// that are away could be started without those that have it.
    pub async fn write_table(self: &Rc<Self>, table: &VolumeTable) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        if !self.members.serves_all() {
            return Err(ArrayError::Lost);
        }
        self.write_table_locked(table).await?;
        // A trusted member that is away has missed the table, too: alone, it would show the old
        // one.
        self.members.fence_absent().await?;
        self.table.is_sure.set(true);
        Ok(())
    }

    async fn write_table_locked(self: &Rc<Self>, table: &VolumeTable) -> Result<(), ArrayError> {
        let sequence = self.table.sequence.get() + 1;
        self.table.sequence.set(sequence);
        self.table.is_sure.set(false);
        let slot = sequence % SLOTS * VolumeTable::BYTES;
        let home = |areas: &MemberLayout| areas.volume_table.offset + slot;
        self.members.write_to_all(table, sequence, home).await?;
        self.table.known.set(sequence);
        Ok(())
    }
}
