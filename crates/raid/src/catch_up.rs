//! A member's own drive comes back: it takes its place again, or is given what it missed.
//!
//! It is known by its uuid, and by the generation of its own superblock (see `own_generation`): an
//! array that was started from it alone meanwhile would have raised that. Order of a catch-up, and
//! what a crash leaves:
//! 1. the drive's journal is emptied: its batches may have been voided since (crash: stale still)
//! 2. what the member lacks is in the map of missed regions, durably (crash: stale still)
//! 3. it is rebuilding, durably, and current but for these regions (crash: it goes on from there;
//!    what was written meanwhile counts as missed, too)
//! 4. the maps, the volume table and the rest of the metadata are written anew, for it to have them
//!    (crash: of each, the newest on any member counts)
//! 5. the missed regions are rebuilt; it is trusted, durably; what was missed is forgotten

use std::cmp::Ordering;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::{ArraySuperblock, MemberState};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::units::{Area, MemberIndex};
use ashlar_reactor::range_lock::Mode;

use crate::apart::{Peer, Peers, Relied, went_on_alone};
use crate::array::Array;
use crate::candidate::newest_superblock;
use crate::error::{ArrayError, ChangeError};
use crate::label::{self, Label};
use crate::member::Member;

/// What a drive is to the member whose place it shall have.
enum Kinship {
    /// Its own; where things are on it.
    Own(MemberLayout),
    /// It was its own, and was used elsewhere since.
    Estranged,
    /// Another, or its own, and nothing on it is needed or can be relied on.
    None,
}

/// A member's own drive that an array which runs cannot take.
fn waits_for_start(drive: &Drive, why: &'static str) -> ChangeError {
    ChangeError::WaitsForStart { drive: drive.name().to_owned(), why }
}

impl Array {
    /// Takes the drive back if it is the member's own. False: it is another one, or nobody knows
    /// what it lacks.
    pub(crate) async fn take_back(
        self: &Rc<Self>,
        index: MemberIndex,
        old: &Member,
        drive: &Rc<Drive>,
    ) -> Result<bool, ChangeError> {
        let Kinship::Own(areas) = self.kinship(old, drive).await else { return Ok(false) };
        let lost_cache = old.drive.as_ref().is_some_and(|drive| drive.is_unflushed());
        match old.state {
            MemberState::Trusted if !lost_cache => self.rejoin(index, old, drive, areas).await?,
            // Fenced, it could not catch up, nor any other.
            MemberState::Trusted if self.members.is_needed(index) => {
                let why = "what was in its cache when it went may be lost, and no other member \
                           that is here has it";
                return Err(waits_for_start(drive, why));
            }
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

    /// Gives a member its own drive, which has come back. Unlike [`Array::replace_member`] it
    /// refuses a drive that was used elsewhere meanwhile, and may hold what the array does not.
    pub async fn return_member(
        self: &Rc<Self>,
        index: MemberIndex,
        drive: Rc<Drive>,
        drive_uuid: [u8; 16],
    ) -> Result<(), ChangeError> {
        match self.kinship(&self.member(index)?, &drive).await {
            Kinship::Own(_) | Kinship::None => {}
            Kinship::Estranged => {
                let drive = drive.name().to_owned();
                return Err(ChangeError::UsedElsewhere { drive, member: index });
            }
        }
        self.replace_member(index, drive, drive_uuid).await
    }

    /// Why a drive cannot have the place of a member that the others cannot stand for.
    pub(crate) async fn needed(
        &self,
        index: MemberIndex,
        old: &Member,
        drive: &Rc<Drive>,
    ) -> ChangeError {
        match self.own_label(old, drive).await {
            Some(_) => {
                waits_for_start(drive, "it may have been used elsewhere, and is needed as it is")
            }
            None => ChangeError::MemberNeeded(index),
        }
    }

    /// The drive's label, if it is the member's own.
    async fn own_label(&self, old: &Member, drive: &Rc<Drive>) -> Option<Label> {
        let label = label::read(&self.reactor, drive).await.ok()??;
        let is_own = label.array == self.uuid() && label.drive_uuid == old.drive_uuid;
        is_own.then_some(label)
    }

    /// Who may have what the array lacks was used elsewhere.
    async fn kinship(&self, old: &Member, drive: &Rc<Drive>) -> Kinship {
        let Some(label) = self.own_label(old, drive).await else { return Kinship::None };
        let lease = match self.lease.get() {
            Some(lease) => lease.compare(drive, &label).await,
            None => Ordering::Less,
        };
        let newest = newest_superblock(&self.reactor, drive, &label).await;
        let fits = drive.limits().sector_bytes <= self.sector_bytes
            && label.layout.data.len >= self.member_bytes();
        match (lease, newest) {
            // Its lease would end this one, as soon as it is a member.
            (Ordering::Greater, _) | (_, Err(_)) => Kinship::Estranged,
            (_, Ok(None)) => Kinship::None,
            (_, Ok(Some(newest))) if self.went_on_alone(old, &newest) => Kinship::Estranged,
            (_, Ok(Some(newest))) => match old.own.judge(newest.header.sequence.get()) {
                Ordering::Equal if fits => Kinship::Own(label.layout),
                Ordering::Greater => Kinship::Estranged,
                Ordering::Less | Ordering::Equal => Kinship::None,
            },
        }
    }

    fn went_on_alone(&self, old: &Member, newest: &ArraySuperblock) -> bool {
        let list = self.members.list();
        let layout = self.layout();
        let peer = |(index, its): (usize, &Member)| {
            let relied = match its.state {
                MemberState::Trusted if its.alive().is_some() => Relied::Here,
                MemberState::Trusted => Relied::Away,
                MemberState::Stale if its.catches_up => Relied::Before,
                MemberState::Stale | MemberState::Rebuilding => return None,
            };
            let set = Some(layout.set_of(MemberIndex::new(index)));
            Some(Peer { drive: its.drive_uuid, relied, set, own: its.own })
        };
        let others = list.iter().enumerate().filter(|(_, its)| its.drive_uuid != old.drive_uuid);
        let peers = others.filter_map(peer).collect();
        let others = Peers { newest: self.members.generation(), peers };
        old.own.is_beyond(newest.header.sequence.get())
            && went_on_alone(newest, old.drive_uuid, &others)
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
        let _joining = self.members.begin_join().await;
        if self.growing.get() {
            return Err(ChangeError::Busy("a change of the array's size"));
        }
        let mut with = self.members.list().clone();
        (with[index.index()].drive, with[index.index()].areas) = (Some(drive.clone()), areas);
        let failed = |error| ChangeError::Drive { drive: drive.name().into(), error };
        let lease = self.lease.get();
        let joining = lease.map(|its| its.beat_on(index.index(), with[index.index()].clone()));
        let is_sure = match &joining {
            Some(joining) => joining.proves().await,
            None => true,
        };
        let told = match is_sure {
            true => self.journal.void_on(&with, index.index()).await,
            false => Err(DriveError::Gone),
        };
        if let Err(error) = told {
            // Nor is it given anything later that waits for it by now.
            drive.pull();
            return Err(failed(error));
        }
        let change = self.members.change(index, |member| {
            // Since its label was read it may have been fenced, or another drive put in its place.
            let same = member.drive_uuid == old.drive_uuid && member.alive().is_none();
            if same && member.state == MemberState::Trusted {
                member.drive = Some(drive.clone());
                member.areas = areas;
            }
        });
        let mut joined = change.await;
        drop(joining);
        if joined.is_ok() {
            self.journal.has_hope();
            joined = self.renew_metadata().await;
        }
        let list = self.members.list().clone();
        // Batches that were voided before it was among the members.
        let voided = self.journal.void_on(&list, index.index()).await;
        if joined.is_err() || voided.is_err() {
            // It may lack what the others know: it is away as before, with nothing in its cache if
            // that can be. Else it could not come back while the array runs.
            let _ = drive.flush().await;
            self.hide();
            drive.pull();
        }
        joined?;
        voided.map_err(failed)?;
        // A rebuild that had to do without it goes on.
        self.start_rebuild();
        Ok(())
    }

    /// Members that were stale and are here again, at start.
    pub(crate) async fn catch_up_all(self: &Rc<Self>) {
        // What the first of them begins must not be through with the next before that has its maps.
        let _replacing = self.members.replacing.lock(0..1, Mode::Exclusive).await;
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
        // A start would trust it for as long as no superblock says otherwise.
        match self.members.settled().await {
            Err(ArrayError::Lost) if self.members.is_fencing() => {
                let why = "another died before those that are here knew that this one was away";
                return Err(waits_for_start(drive, why));
            }
            settled => settled?,
        }
        // Else members that are away, and do not know of this, could be started without it.
        if !self.members.survives_without(&[index]) {
            return Err(ArrayError::Lost.into());
        }
        if self.may_bring_batches(index) {
            let why = "its journal may have what could not be read when the array was started by \
                       force";
            return Err(waits_for_start(drive, why));
        }
        let uuid = self.member(index)?.drive_uuid;
        let emptied = self.empty(drive, areas.journal).await;
        emptied.map_err(|error| ChangeError::Drive { drive: drive.name().into(), error })?;
        let joins = self.members.hold_joins().await;
        self.dirty.before_release().await?;
        drop(joins);
        let changed = self.members.change(index, |member| {
            let waits = member.state == MemberState::Stale && member.catches_up;
            if waits && member.drive_uuid == uuid {
                member.drive = Some(drive.clone());
                member.areas = areas;
                member.state = MemberState::Rebuilding;
                member.behind = Some(Rc::new(self.dirty.behind()));
            }
        });
        let mut joined = changed.await;
        if joined.is_ok() {
            self.journal.has_hope();
            joined = self.renew_metadata().await;
        }
        if joined.is_err() {
            let stale = self.members.change(index, Member::become_stale).await;
            joined.and(stale)?;
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
