//! The life of an array: created, assembled, given new members, stopped, wiped.

use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::{
    ERA_SEQUENCES_LOG2, ERAS_PER_FORCE, ERAS_PER_START, Level, MemberState, NAME_BYTES, Policy,
    STRIPES_MAX,
};
use ashlar_format::drive_label::DriveLabel;
use ashlar_format::record::SEQUENCE_MAX;
use ashlar_format::region_map::MapKind;
use ashlar_format::units::{MemberIndex, StripeIndex, to_usize};
use ashlar_format::volume_table::VolumeTable;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::range_lock::Mode as Lock;

use crate::array::{Array, StoredMaps};
pub use crate::assemble::{AssembleOptions, Known};
use crate::assemble::{Found, JournalMark, Newest, find, read_map};
use crate::bad_blocks::{self, StoredList};
use crate::bad_set::BadRange;
use crate::destage::DESTAGERS;
use crate::doubt::could_be_left_behind;
use crate::error::{ArrayError, AssembleError, ChangeError};
use crate::label::{self, Label};
use crate::layout::{Layout, Shape};
use crate::lease::{self, Claim, Force, Host, Leasehold};
use crate::member::{Member, sector_bytes};
use crate::members::{Identity, Members};
use crate::mode::Mode;
use crate::needs::{MemberNeeds, Unfit};
use crate::region_map::{StoredMap, region_stripes_for};
use crate::scrub_plan::ScrubMark;
use crate::scrub_store;
use crate::settings::{Settings, SettingsChange};

/// What an array shall be.
#[derive(Clone, Debug)]
pub struct ArraySpec {
    pub uuid: [u8; 16],
    pub name: String,
    pub level: Level,
    /// 16 KiB to 1 MiB, a power of two.
    pub chunk_bytes: u32,
    pub shape: Shape,
    /// `None`: as the level has it.
    pub policy: Option<Policy>,
    /// Members keep a checksum of every block; under policy `journal`, also where the level would
    /// have another.
    pub integrity: bool,
    /// Beside the usual ones.
    pub settings: SettingsChange,
    /// Who makes it. `None`: no other host can reach these drives.
    pub host: Option<Host>,
}

pub(crate) fn drive_error(drive: &Drive) -> impl Fn(DriveError) -> ChangeError {
    let drive = drive.name().to_owned();
    move |error| ChangeError::Drive { drive: drive.clone(), error }
}

impl Array {
    /// Labels the drives (each with its own new uuid) and starts the array. `drives` are the
    /// members in order.
    pub async fn create(
        reactor: &Reactor,
        spec: &ArraySpec,
        drives: Vec<([u8; 16], Rc<Drive>)>,
    ) -> Result<Rc<Array>, ChangeError> {
        let (identity, members) = plan_array(spec, drives)?;
        let list = members.clone();
        let usual = identity.layout().default_policy();
        let usual = if spec.integrity { Policy::Journal } else { usual };
        let policy = spec.policy.unwrap_or(usual);
        identity.check_policy(policy).map_err(ChangeError::Spec)?;
        let sector_bytes = sector_bytes(&members).max(identity.least_sector());
        let settings = Settings::default().changed(spec.settings, sector_bytes);
        let settings = settings.map_err(ChangeError::Spec)?;
        let members = Members::new(reactor, identity.clone(), members, 0, 0, policy, settings);
        // There is nothing to scrub yet.
        members.set_scrub(ScrubMark { next: 0, began_s: reactor.unix_s() });
        let members = Rc::new(members);
        let empty = || StoredMap::empty(identity.layout().stripes, identity.region_stripes());
        // Nothing was written: nothing has to be zeroed or to agree.
        let bad = StoredList::default();
        let maps = StoredMaps { dirty: empty(), written: empty(), missed: empty(), bad };
        let array = Array::new(reactor, identity.clone(), members, &maps);
        array.members.introduce_all();
        if let Some(host) = spec.host {
            array.hold(host, Claim::after(None, reactor.now()));
        }
        if let Err(error) = array.write_metadata(&list).await {
            array.release().await;
            // What was written is of no use to anyone; drives that still answer forget it.
            let _ = array.wipe().await;
            return Err(error);
        }
        array.run();
        Ok(array)
    }

    /// Starts what runs as long as the array does.
    fn run(self: &Rc<Self>) {
        self.reactor.spawn(self.clone().maintain());
        for _ in 0..DESTAGERS {
            self.reactor.spawn(self.clone().destage());
        }
    }

    async fn write_metadata(self: &Rc<Self>, list: &[Member]) -> Result<(), ChangeError> {
        self.write_maps().await?;
        self.write_table(&VolumeTable::empty(self.uuid())).await?;
        self.members.save().await?;
        // Labels last: before them there is no array.
        for (index, member) in list.iter().enumerate() {
            self.write_label(MemberIndex::new(index), member).await?;
        }
        if self.members.all_trusted() {
            return Ok(());
        }
        Err(ChangeError::Spec("a drive failed while it was labelled".into()))
    }

    async fn heal_labels(&self) {
        for index in (0..self.layout().members()).map(MemberIndex::new) {
            let Ok(member) = self.member(index) else { continue };
            let Some(drive) = member.keeps_metadata() else { continue };
            let label = self.label_of(&member);
            // One copy is enough to start with: this is tried again at the next start.
            let _ = label::heal(&self.reactor, drive, &label, index.0.into()).await;
        }
    }

    pub(crate) fn label_of(&self, member: &Member) -> Label {
        Label { drive_uuid: member.drive_uuid, array: self.uuid(), layout: member.areas }
    }

    pub(crate) async fn write_label(
        &self,
        index: MemberIndex,
        member: &Member,
    ) -> Result<(), ChangeError> {
        let drive = member.drive.as_ref().ok_or(ChangeError::NoMember(index))?;
        let label = self.label_of(member);
        let written = label::write(&self.reactor, drive, &label, index.0.into()).await;
        written.map_err(drive_error(drive))
    }

    /// Puts the array on these drives together, from their labels alone, and starts it.
    pub async fn assemble(
        reactor: &Reactor,
        drives: Vec<Rc<Drive>>,
        options: AssembleOptions,
    ) -> Result<Rc<Array>, AssembleError> {
        let (found, claim) = find_and_take(reactor, drives, &options).await?;
        let bad = bad_blocks::read(reactor, found.identity.uuid, &found.members).await;
        if bad.is_none() && !options.force {
            return Err(AssembleError::Unreadable("the list of bad blocks"));
        }
        let maps = StoredMaps {
            bad: bad.unwrap_or_default(),
            dirty: read_map(MapKind::Dirty, reactor, &found, &options).await?,
            written: read_map(MapKind::Written, reactor, &found, &options).await?,
            missed: read_map(MapKind::Missed, reactor, &found, &options).await?,
        };
        let (mut scrub, last_report) = {
            let (array, began_s) = (found.identity.uuid, found.scrub.began_s);
            scrub_store::read(reactor, array, &found.members, began_s).await
        };
        // After a start by force nobody has asked for what cannot be told to be made to agree.
        scrub.iter_mut().for_each(|scrub| scrub.report.repairs &= !options.force);
        let identity = found.identity;
        let (generation, journal) = (found.generation, found.journal);
        let members = Members::new(
            reactor,
            identity.clone(),
            found.members,
            generation,
            journal.from,
            found.policy,
            found.settings,
        );
        members.fencing.set(found.fences);
        members.set_scrub(found.scrub);
        // Of the next one, batches may stand in the ring.
        members.set_era(found.era + if options.force { ERAS_PER_FORCE } else { ERAS_PER_START });
        let array = Array::new(reactor, identity.clone(), Rc::new(members), &maps);
        if let Some((integrity, pages_max)) = array.integrity.as_ref().zip(options.sum_pages_max) {
            integrity.limit(pages_max);
        }
        array.members.introduce_all();
        if let Some((host, claim)) = options.host.zip(claim) {
            array.hold(host, claim);
            array.set_ending(true);
        }
        if let Err(error) = array.bring_up(found.newest, &maps, journal, options.force).await {
            // A rebuild that it began may be under way.
            array.drain().await;
            // Nobody else has it from here: who was left at work on this host may go on.
            array.leave().await;
            let lost_to = array.status().lost_to;
            return Err(lost_to.map_or(error, |host| AssembleError::InUse { host }));
        }
        array.set_ending(false);
        array.run();
        array.start_rebuild();
        array.start_restripe();
        array.jobs.scrub_sequence.set(last_report);
        array.resume_scrub(scrub);
        Ok(array)
    }

    /// Makes what the drives say the state of an array that may be written to.
    async fn bring_up(
        self: &Rc<Self>,
        newest: Newest,
        maps: &StoredMaps,
        journal: JournalMark,
        force: bool,
    ) -> Result<(), AssembleError> {
        self.sure().await;
        self.journal.begin_sequences(self.members.era());
        let left = match journal.from {
            0 => None,
            // A journal that refuses the start does so before anything is written.
            _ => Some(self.find_batches(journal, force).await?),
        };
        let is_gone = left.as_ref().is_some_and(|left| left.is_gone);
        if is_gone {
            // No batch is that new: the next start asks again, if this one does not say before what
            // that means.
            self.members.set_journal_newest(SEQUENCE_MAX);
        }
        // A crash may have left the newest on some members only: nothing may rest on it before it
        // is on all.
        let untold = newest.spread(&self.reactor, &self.members.keepers()).await;
        let (trust, members) = (&newest.trust, &self.members);
        if !force && could_be_left_behind(&self.layout(), &members.list(), trust, &untold) {
            return Err(AssembleError::Unheard);
        }
        maps.spread(&self.reactor).await;
        // From here on the era is one of this start alone, of all that had one of these members,
        // and so are the sequences that begin with it, whatever one that died has left on others.
        self.members.settled().await?;
        self.dirty.map.write_all_anew().await?;
        self.dirty.missed.write_all_anew().await?;
        self.written.write_all_anew().await?;
        // A crash came while their regions were forgotten.
        let blank = self.bad.stripes().into_iter().filter(|stripe| !self.is_written(*stripe));
        blank.for_each(|stripe| self.bad.remove_stripes(stripe.0..stripe.0 + 1));
        self.bad.write_anew().await?;
        // What each has surely taken since.
        self.members.save().await?;
        self.heal_labels().await;
        if let Some(left) = left {
            self.replay(left, force).await?;
            self.modes.set(Mode::Journaled);
            if is_gone {
                self.doubt_all().await?;
            }
            // Before anything new is put there, which would be given up with the rest after the
            // next crash. What cannot be said now is tried again.
            let _ = self.settle_bad().await;
        } else {
            self.doubt_dirty();
            self.give_up_again().await?;
        }
        self.members.set_behind(&self.dirty.behind());
        self.catch_up_all().await;
        // A degraded array is covered from the very first write.
        drop(self.enter_mode().await?);
        Ok(())
    }

    /// Nobody knows which stripes were being stored: as after a crash without a journal. While
    /// batches that were found wait for absent members it is left to a later start.
    async fn doubt_all(&self) -> Result<(), ArrayError> {
        if self.journal.oldest().is_some() {
            return Ok(());
        }
        // What was moved last was in the journal only, perhaps: what stands there is of other
        // addresses.
        let layout = self.layout();
        let rows = 0..layout.chunk_bytes;
        for stripe in self.last_window().map(StripeIndex) {
            let bad = |chunk| BadRange { stripe, chunk, rows: rows.clone() };
            self.bad.insert(stripe, (0..layout.data).map(bad).collect()).await?;
        }
        self.dirty.mark_all(&self.written.inside()).await?;
        self.doubt_dirty();
        self.members.set_journal_from(0);
        self.members.settled().await?;
        self.modes.set(Mode::Direct);
        Ok(())
    }

    /// Stripes of dirty regions wait for resync.
    fn doubt_dirty(&self) {
        for region in self.dirty.map.inside().into_iter().filter(|its| self.written.contains(*its))
        {
            let stripes = self.dirty.map.stripes_of(region).map(StripeIndex);
            let stripes = stripes.filter(|stripe| !self.is_dead(*stripe));
            stripes.for_each(|stripe| self.unsynced.insert(stripe));
        }
    }

    fn hold(&self, host: Host, claim: Claim) {
        let members = self.members.clone();
        let held = Leasehold::keep(&self.reactor, self.uuid(), members, host, claim);
        assert!(self.lease.set(held).is_ok(), "two leases for one array");
    }

    /// Before anything is written to a drive that comes to a running array.
    pub(crate) fn cover(&self, drive: &Drive) {
        self.members.introduce(drive);
        self.lease.get().into_iter().for_each(|lease| lease.cover(drive));
    }

    async fn release(&self) {
        if let Some(lease) = self.lease.get() {
            lease.release().await;
        }
    }

    async fn leave(&self) {
        if let Some(lease) = self.lease.get() {
            lease.leave().await;
        }
    }

    /// Puts `drive` in the place of an absent, failed or stale member, labels it (durably), and
    /// starts to rebuild onto it. A member's own drive that comes back keeps its uuid: it takes its
    /// place again at once if nothing was written without it, else it is given what it missed.
    /// Refuses another for a trusted member that the others cannot stand for.
    pub async fn replace_member(
        self: &Rc<Self>,
        index: MemberIndex,
        drive: Rc<Drive>,
        drive_uuid: [u8; 16],
    ) -> Result<(), ChangeError> {
        let _request = self.begin()?;
        let _replacing = self.members.replacing.lock(0..1, Lock::Exclusive).await;
        if self.growing.get() {
            return Err(ChangeError::Busy("a change of the array's size"));
        }
        let old = self.member(index)?;
        if old.keeps_metadata().is_some() {
            return Err(ChangeError::MemberInUse(index));
        }
        self.cover(&drive);
        if self.take_back(index, &old, &drive).await? {
            return Ok(());
        }
        if !self.layout().is_redundant() {
            return Err(ChangeError::Spec("level 0 has nothing to rebuild a member from".into()));
        }
        if self.members.is_needed(index) {
            return Err(self.needed(index, &old, &drive).await);
        }
        let member = self.plan_replacement(&drive, drive_uuid)?;
        if !drive.is_alive() {
            // It could not be asked whose it is: as another, it would have to be filled.
            let (drive, error) = (drive.name().into(), DriveError::Gone);
            return Err(ChangeError::Drive { drive, error });
        }
        if old.state == MemberState::Trusted {
            // It is barred from the next start, as one that is fenced.
            self.members.others_answer().await?;
        }
        let placed = self.members.change(index, |place| *place = member.clone()).await;
        let prepared = match placed {
            Ok(()) => self.prepare_replacement(index, &member).await,
            Err(error) => Err(error.into()),
        };
        if prepared.is_err() {
            // Rebuilt without the rest of the metadata it could be all that is left later.
            let stale = self.members.change(index, Member::become_stale).await;
            return prepared.and(stale.map_err(ChangeError::from));
        }
        self.start_rebuild();
        Ok(())
    }

    pub(crate) fn plan_replacement(
        &self,
        drive: &Rc<Drive>,
        drive_uuid: [u8; 16],
    ) -> Result<Member, ChangeError> {
        let (needs, limits) = (self.member_needs(), drive.limits());
        let unfit = |why| match why {
            Unfit::Sectors => ChangeError::Spec(format!(
                "drive {} has sectors of {} bytes, the array was started with {}; stop and start \
                 the array with it attached",
                drive.name(),
                limits.sector_bytes,
                needs.sector_bytes
            )),
            Unfit::TooSmall => ChangeError::DriveTooSmall {
                drive: drive.name().into(),
                has: label::usable_bytes(drive),
                needs: needs.data_bytes,
            },
        };
        let areas = needs.layout_on(limits.bytes, limits.sector_bytes).map_err(unfit)?;
        Ok(Member::new(drive_uuid, Some(drive.clone()), areas, MemberState::Rebuilding))
    }

    /// What a drive has to be to become a member of it now.
    pub(crate) fn member_needs(&self) -> MemberNeeds {
        let list = self.members.list();
        // Of one that was never here it is not known.
        let here = list.iter().filter(|its| its.drive.is_some());
        MemberNeeds {
            data_bytes: self.member_bytes(),
            journal_bytes: here.map(|its| its.areas.journal.len).min().unwrap_or(0),
            sector_bytes: self.sector_bytes,
            parity: self.layout().parity,
            integrity: self.identity.integrity,
        }
    }

    async fn prepare_replacement(
        self: &Rc<Self>,
        index: MemberIndex,
        member: &Member,
    ) -> Result<(), ChangeError> {
        self.renew_metadata().await?;
        self.write_label(index, member).await
    }

    /// Starts again what stopped: rebuilds of members that wait for it. Stale members whose drive
    /// answers are taken up with a new uuid from `uuids`.
    pub async fn rebuild(
        self: &Rc<Self>,
        mut uuids: impl FnMut() -> [u8; 16],
    ) -> Result<(), ChangeError> {
        let stale: Vec<(MemberIndex, Rc<Drive>)> = {
            let list = self.members.list();
            let stale = list.iter().enumerate().filter(|(_, m)| m.state == MemberState::Stale);
            stale.filter_map(|(i, m)| Some((MemberIndex::new(i), m.alive()?.clone()))).collect()
        };
        let mut result = Ok(());
        for (index, drive) in stale {
            result = result.and(self.replace_member(index, drive, uuids()).await);
        }
        self.start_rebuild();
        result
    }

    /// Waits for requests under way, flushes, marks the array clean. Afterwards it does nothing.
    pub async fn stop(self: &Rc<Self>) -> Result<(), ArrayError> {
        self.set_ending(true);
        let rested = self.rest().await;
        self.release().await;
        rested
    }

    /// The same, for who goes on at once as the same host: no other may have it in between.
    pub async fn stop_for_next(self: &Rc<Self>) -> Result<(), ArrayError> {
        let rested = self.rest().await;
        self.leave().await;
        rested
    }

    async fn rest(self: &Rc<Self>) -> Result<(), ArrayError> {
        self.drain().await;
        self.keep_scrub().await;
        self.mend_table().await;
        let drained = self.drain_journal().await;
        self.write_sums().await?;
        self.members.flush().await?;
        if drained.is_ok() {
            // Else a start that lacks a member could not tell that its parity can be relied on.
            self.settle_bad().await?;
        }
        if drained.is_ok() && self.members.journal_from() != 0 {
            // Of the next start: it finds that nothing is in the ring without looking there.
            let era = self.members.era() + ERAS_PER_START;
            self.members.set_journal_from(era << ERA_SEQUENCES_LOG2);
            self.members.set_journal_newest(0);
            self.members.settled().await?;
        }
        self.clean_dirty_map(Duration::ZERO).await?;
        drained
    }

    /// Makes the drives forget the array. It was stopped before.
    pub async fn wipe(self: &Rc<Self>) -> Result<(), ChangeError> {
        let drives: Vec<Rc<Drive>> =
            self.members.list().iter().filter_map(|m| m.alive().cloned()).collect();
        for drive in drives {
            let blank = self.reactor.buffer(to_usize(DriveLabel::BYTES));
            blank.fill_zero();
            let mut homes = DriveLabel::homes(label::usable_bytes(&drive)).to_vec();
            homes.extend([64 << 10, (64 << 10) + 4096]);
            for home in homes {
                let written = drive.write(home, blank.clone().into()).await;
                written.map_err(drive_error(&drive))?;
            }
            drive.flush().await.map_err(drive_error(&drive))?;
        }
        Ok(())
    }
}

/// What is on the drives, once no other host changes it.
async fn find_and_take(
    reactor: &Reactor,
    drives: Vec<Rc<Drive>>,
    options: &AssembleOptions,
) -> Result<(Found, Option<Claim>), AssembleError> {
    let found = find(reactor, drives.clone(), options, None).await?;
    let Some(host) = options.host else { return Ok((found, None)) };
    let array = found.identity.uuid;
    let past = options.known.as_ref().map_or(0, |known| known.last_epoch);
    let force = options.force.then_some(Force { past, era: found.era });
    let claim = lease::take(reactor, array, &found.members, &found.leases, &host, force).await;
    let is_left = |error: &AssembleError| {
        matches!(error, AssembleError::InUse { .. } | AssembleError::LeaseUnreadable)
    };
    options.taken.set(!claim.as_ref().is_err_and(is_left));
    let claim = claim?;
    // Another host may have had it until now.
    Ok((find(reactor, drives, options, Some(&claim)).await?, Some(claim)))
}

/// What the array and its members will be; refuses what does not fit.
fn plan_array(
    spec: &ArraySpec,
    drives: Vec<([u8; 16], Rc<Drive>)>,
) -> Result<(Rc<Identity>, Vec<Member>), ChangeError> {
    if spec.name.is_empty() || spec.name.len() > NAME_BYTES {
        return Err(ChangeError::Spec(format!("a name has 1 to {NAME_BYTES} bytes")));
    }
    let layout = Layout::new(spec.level, drives.len(), spec.shape, spec.chunk_bytes);
    let mut layout = layout.map_err(ChangeError::Spec)?;
    let mut members = Vec::new();
    for (drive_uuid, drive) in drives {
        let has = label::usable_bytes(&drive);
        let needs = label::DRIVE_BYTES_MIN;
        let too_small = ChangeError::DriveTooSmall { drive: drive.name().into(), has, needs };
        let areas = label::plan_for(has, layout.parity, spec.integrity).ok_or(too_small)?;
        members.push(Member::new(drive_uuid, Some(drive), areas, MemberState::Trusted));
    }
    let data_bytes = members.iter().map(|member| member.areas.data.len).min().unwrap_or(0);
    let chunks = data_bytes / u64::from(layout.chunk_bytes);
    layout.stripes = chunks * u64::from(layout.groups);
    if layout.stripes > STRIPES_MAX {
        return Err(ChangeError::Spec("the drives are too large for this chunk; use more".into()));
    }
    let (region_stripes, name) = (region_stripes_for(layout.stripes), spec.name.clone());
    let identity = Identity::new(spec.uuid, name, layout, region_stripes, spec.integrity);
    Ok((Rc::new(identity), members))
}
