//! A member's own drive comes back: it takes its place again, or is given what it missed.
//!
//! It is known by its uuid, and by the generation of its own superblock: an array that was started
//! from it alone meanwhile would have raised that. Order of a catch-up, and what a crash leaves:
//! 1. the drive's journal is emptied: its batches may have been voided since (crash: stale still)
//! 2. what the member lacks is in the map of missed regions, durably (crash: stale still)
//! 3. it is rebuilding, durably, and current but for these regions (crash: it goes on from there;
//!    what was written meanwhile counts as missed, too)
//! 4. the maps, the volume table and the rest of the metadata are written anew, for it to have them
//!    (crash: of each, the newest on any member counts)
//! 5. the missed regions are rebuilt; it is trusted, durably; what was missed is forgotten

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{Area, MemberIndex};

use crate::array::Array;
use crate::assemble::newest_superblock;
use crate::error::{ArrayError, ChangeError};
use crate::label;
use crate::members::{Member, generation_low};

impl Array {
    /// Takes the drive back if it is the member's own. False: it is another one, or nobody knows
    /// what it lacks.
    pub(crate) async fn take_back(
        self: &Rc<Self>,
        index: MemberIndex,
        old: &Member,
        drive: &Rc<Drive>,
    ) -> Result<bool, ChangeError> {
        let Some(areas) = self.areas_if_own(old, drive).await else { return Ok(false) };
        let lost_cache = old.drive.as_ref().is_some_and(|drive| drive.is_unflushed());
        match old.state {
            MemberState::Trusted if !lost_cache => self.rejoin(index, old, drive, areas).await?,
            MemberState::Trusted => self.members.fence([index].into_iter()).await?,
            MemberState::Rebuilding if old.catches_up => {
                self.members.fence([index].into_iter()).await?;
            }
            MemberState::Rebuilding | MemberState::Stale => {}
        }
        let now = self.member(index)?;
        if now.state == MemberState::Stale && now.catches_up {
            self.catch_up(index, drive, areas).await?;
        }
        Ok(self.member(index)?.keeps_metadata().is_some())
    }

    /// Where things are on the drive, if it is the member's own and was not used elsewhere.
    async fn areas_if_own(&self, old: &Member, drive: &Rc<Drive>) -> Option<MemberLayout> {
        let label = label::read(&self.reactor, drive).await.ok().flatten()?;
        let same = label.array == self.uuid() && label.drive_uuid == old.drive_uuid;
        let fits = drive.limits().sector_bytes <= self.sector_bytes
            && label.layout.data.len >= self.member_bytes();
        let own = newest_superblock(&self.reactor, drive, &label).await.ok().flatten()?;
        let own = own.header.sequence.get();
        (same && fits && generation_low(own) == old.own_generation).then_some(label.layout)
    }

    /// Data bytes that each member has to hold.
    pub(crate) fn member_bytes(&self) -> u64 {
        self.layout().member_stripes() * u64::from(self.layout().chunk_bytes)
    }

    /// It missed nothing.
    async fn rejoin(
        self: &Rc<Self>,
        index: MemberIndex,
        old: &Member,
        drive: &Rc<Drive>,
        areas: MemberLayout,
    ) -> Result<(), ChangeError> {
        let change = self.members.change(index, |member| {
            // Since its label was read it may have been fenced, or another drive put in its place.
            let same = member.drive_uuid == old.drive_uuid && member.alive().is_none();
            if same && member.state == MemberState::Trusted {
                member.drive = Some(drive.clone());
                member.areas = areas;
            }
        });
        change.await?;
        self.renew_metadata().await?;
        Ok(())
    }

    /// Members that were stale and are here again, at start.
    pub(crate) async fn catch_up_all(self: &Rc<Self>) {
        for index in (0..self.layout().members()).map(MemberIndex::new) {
            let Ok(member) = self.member(index) else { continue };
            if member.state == MemberState::Stale
                && member.catches_up
                && let Some(drive) = member.alive()
            {
                // It stays stale, then, and is rebuilt when the operator says so.
                let _ = self.catch_up(index, drive, member.areas).await;
            }
        }
    }

    async fn catch_up(
        self: &Rc<Self>,
        index: MemberIndex,
        drive: &Rc<Drive>,
        areas: MemberLayout,
    ) -> Result<(), ChangeError> {
        let uuid = self.member(index)?.drive_uuid;
        let emptied = self.empty(drive, areas.journal).await;
        emptied.map_err(|error| ChangeError::Drive { drive: drive.name().into(), error })?;
        self.dirty.before_release().await?;
        let changed = self.members.change(index, |member| {
            let waits = member.state == MemberState::Stale && member.catches_up;
            if waits && member.drive_uuid == uuid {
                member.drive = Some(drive.clone());
                member.areas = areas;
                member.state = MemberState::Rebuilding;
                member.behind = Some(Rc::new(self.dirty.behind()));
            }
        });
        changed.await?;
        if let Err(error) = self.renew_metadata().await {
            self.members.change(index, Member::become_stale).await?;
            return Err(error.into());
        }
        self.start_rebuild();
        Ok(())
    }

    /// What is on all members is written anew, since one has just joined.
    pub(crate) async fn renew_metadata(self: &Rc<Self>) -> Result<(), ArrayError> {
        self.write_maps().await?;
        self.renew_table().await
    }

    /// Zeroes an area of one drive, durably.
    async fn empty(&self, drive: &Rc<Drive>, area: Area) -> Result<(), DriveError> {
        match drive.write_zeroes(area.offset, area.len).await {
            Err(DriveError::Unsupported) => self.write_zeroes_to(drive, area.range()).await?,
            other => other?,
        }
        drive.flush().await
    }
}
