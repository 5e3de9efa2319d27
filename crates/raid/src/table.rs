//! The pool's volume table, kept on every member beside the superblock: two slots, newest wins.

use std::rc::Rc;

use ashlar_drive::error::DriveError;
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::record;
use ashlar_format::volume_table::{SLOTS, VolumeTable};
use ashlar_reactor::join::join_all;
use ashlar_reactor::range_lock::Mode;
use zerocopy::IntoBytes;

use crate::array::Array;
use crate::error::ArrayError;
use crate::label;
use crate::member::Keeper;

/// The newest that a member has that is believed.
struct FoundTable {
    table: Box<VolumeTable>,
    is_everywhere: bool,
    /// A member that is not believed yet has a newer one, which nobody may ever have heard of: it
    /// would be found once that member is.
    is_outnumbered: bool,
}

impl Array {
    /// Writes the table anew: for a member that has just joined.
    pub(crate) async fn renew_table(self: &Rc<Self>) -> Result<(), ArrayError> {
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        let found = self.find_table().await;
        let served = self.table.served.borrow().as_deref().map(|its| self.copy_of(its));
        let table = match served {
            Some(served) => served,
            None => {
                let found = found?;
                self.give_missing(&found).await?;
                found.table
            }
        };
        let (is_sure, known) = (self.table.is_sure.get(), self.table.known.get());
        let fence = async || match !is_sure && self.members.serves_all() {
            true => self.members.fence_absent().await,
            false => Ok(()),
        };
        // Who is away has it, unless it was found on some members only. Then it may have another by
        // the number that this gets; and who goes meanwhile lacks this.
        fence().await?;
        let sequence = self.write_table_locked(&table).await?;
        self.table.served_at.set(sequence);
        if is_sure && !self.members.serves_all() {
            // Others have the same by an older number, and may be here next without this one.
            self.table.known.set(known);
        }
        fence().await?;
        self.table.is_sure.set(is_sure || self.members.serves_all());
        self.table.is_half_changed.set(false);
        Ok(())
    }

    /// Takes back what a change that was answered with an error has left on members: were it found
    /// by the next start, a volume that is served could be gone.
    pub(crate) async fn mend_table(self: &Rc<Self>) {
        if self.table.is_half_changed.get() && self.members.serves_all() {
            // Tried again.
            let _ = self.renew_table().await;
        }
    }

    fn copy_of(&self, table: &VolumeTable) -> Box<VolumeTable> {
        let mut copy = VolumeTable::empty(self.uuid());
        copy.as_mut_bytes().copy_from_slice(table.as_bytes());
        copy
    }

    /// The newest table that any trusted member has. If some lack it, by a crash or since theirs is
    /// damaged, they are given it: volumes that are served from now on must not be gone with the
    /// only member that names them. An error if none has any, or may lack the newest.
    pub async fn read_table(self: &Rc<Self>) -> Result<Box<VolumeTable>, ArrayError> {
        let _joins = self.members.hold_joins().await;
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        if let Some(served) = self.table.served.borrow().as_deref() {
            return Ok(self.copy_of(served));
        }
        let found = self.find_table().await?;
        let everywhere = found.is_everywhere && !found.is_outnumbered;
        // Not of an array that is being stopped.
        if !everywhere && let Ok(_request) = self.begin() {
            // Who cannot take it is fenced; of an array that has failed the rest is served.
            self.table.is_half_changed.set(true);
            if self.heal_table(&found).await.is_ok() {
                let is_sure = self.members.fence_absent().await.is_ok();
                self.table.is_sure.set(is_sure);
                self.table.is_half_changed.set(!is_sure);
            }
        } else if self.members.all_trusted() {
            self.table.is_sure.set(everywhere);
        }
        let table = found.table;
        *self.table.served.borrow_mut() = Some(self.copy_of(&table));
        Ok(table)
    }

    /// Gives it to all, if need be by a number of its own, where some have a newer one that is
    /// passed over.
    async fn heal_table(self: &Rc<Self>, found: &FoundTable) -> Result<(), ArrayError> {
        self.give_missing(found).await?;
        if found.is_outnumbered {
            let sequence = self.write_table_locked(&found.table).await?;
            self.table.served_at.set(sequence);
        }
        Ok(())
    }

    /// Gives it to members that lack it, in its own place, where it cannot tear the one before it.
    async fn give_missing(self: &Rc<Self>, found: &FoundTable) -> Result<(), ArrayError> {
        if !found.is_everywhere {
            self.write_table_as(&found.table, self.table.served_at.get()).await?;
        }
        Ok(())
    }

    /// An error: there is a newer one, for all that is known, and it cannot be read.
    async fn find_table(self: &Rc<Self>) -> Result<FoundTable, ArrayError> {
        let mut newest = VolumeTable::empty(self.uuid());
        let (mut oldest, mut highest, mut is_whole) = (u64::MAX, 0, false);
        let mut parts = 0;
        for keeper in self.members.keepers() {
            let (tables, is_all) = self.tables_of(&keeper).await;
            let whole = tables.iter().map(|table| 1 << (table.header.sequence.get() % SLOTS));
            parts |= !whole.fold(0, |bits, slot: u64| bits | slot);
            let own = tables.last().map_or(0, |table| table.header.sequence.get());
            oldest = oldest.min(own);
            highest = own.max(highest);
            // What another has, nobody may ever have heard of.
            if self.members.list()[keeper.index.index()].is_whole() {
                is_whole |= is_all;
                if let Some(table) = tables.last().filter(|_| own > newest.header.sequence.get()) {
                    newest = self.copy_of(table);
                }
            }
        }
        self.table.parts.set(parts);
        self.table.sequence.set(highest.max(self.table.sequence.get()));
        let (found, known) = (newest.header.sequence.get(), self.table.known.get());
        // Whoever is believed has the newest: it is among these if one shows all that it has.
        let is_newest = is_whole || known > 0 || !self.layout().is_redundant();
        // None at all: there was one before the array had a label.
        if found < known || found == 0 || !is_newest {
            return Err(ArrayError::Lost);
        }
        self.table.known.set(found);
        if self.table.served.borrow().is_none() {
            self.table.served_at.set(found);
        }
        let (is_everywhere, is_outnumbered) = (oldest == found, highest > found);
        Ok(FoundTable { table: newest, is_everywhere, is_outnumbered })
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
                tables.push(self.copy_of(table));
            }
        }
        tables.sort_by_key(|table| table.header.sequence.get());
        (tables, is_all)
    }

    /// Makes a table durable on every member. Not of an array that has failed as a whole: members
    /// that are away could be started without those that have it.
    pub async fn write_table(self: &Rc<Self>, table: &VolumeTable) -> Result<(), ArrayError> {
        let _request = self.begin()?;
        // Who is away cannot come back in between, and be believed without it.
        let _joins = self.members.hold_joins().await;
        let _table = self.table_lock.lock(0..1, Mode::Exclusive).await;
        if !self.members.serves_all() {
            return Err(ArrayError::Lost);
        }
        self.members.fence_absent().await?;
        self.table.is_half_changed.set(true);
        let sequence = self.write_table_locked(table).await?;
        // A trusted member that is away has missed the table, too: alone, it would show the old
        // one.
        self.members.fence_absent().await?;
        self.table.is_sure.set(true);
        self.table.is_half_changed.set(false);
        self.table.served_at.set(sequence);
        *self.table.served.borrow_mut() = Some(self.copy_of(table));
        Ok(())
    }

    /// Not over the one that is served: this one may be torn. Returns its sequence.
    async fn write_table_locked(self: &Rc<Self>, table: &VolumeTable) -> Result<u64, ArrayError> {
        let mut sequence = self.table.sequence.get() + 1;
        if sequence % SLOTS == self.table.served_at.get() % SLOTS {
            sequence += 1;
        }
        self.table.sequence.set(sequence);
        let parts = &self.table.parts;
        let slot = 1 << (sequence % SLOTS);
        if parts.get() & slot != 0 {
            self.wipe_table(sequence % SLOTS).await;
        }
        parts.set(parts.get() | slot);
        self.write_table_as(table, sequence).await?;
        parts.set(parts.get() & !slot);
        Ok(sequence)
    }

    /// Takes the beginning off what stands in a slot, durably. What a power cut has left there of a
    /// table that was never served, and what another will leave of the next, could be the whole of
    /// the first.
    async fn wipe_table(&self, slot: u64) {
        let keepers = self.members.keepers();
        let wipes = keepers.iter().map(async |keeper| {
            let home = keeper.areas.volume_table.offset + slot * VolumeTable::BYTES;
            // One sector: it is done or not.
            let sector = home..home + u64::from(self.sector_bytes);
            self.write_zeroes_to(&keeper.drive, sector).await?;
            keeper.drive.flush().await
        });
        // Who cannot take that will hardly take the table, and is fenced for it.
        let _: Vec<Result<(), DriveError>> = join_all(wipes).await;
    }

    async fn write_table_as(
        self: &Rc<Self>,
        table: &VolumeTable,
        sequence: u64,
    ) -> Result<(), ArrayError> {
        self.table.is_sure.set(false);
        let slot = sequence % SLOTS * VolumeTable::BYTES;
        let home = |areas: &MemberLayout| areas.volume_table.offset + slot;
        self.members.write_to_all(table, sequence, home).await?;
        self.table.known.set(sequence);
        Ok(())
    }
}
