//! One host at a time has an array: a lease on every member says who, and its beat that this host
//! is alive.
//!
//! Invariants:
//! - an array with a lease is not written to before the lease is durable and was read back;
//! - who finds another's lease never writes again: all drives are pulled;
//! - work waits while the last beat that is known to be good began longer ago than [`TRUST`], which
//!   is less than another host waits before it takes the array over: none begins, and of what was
//!   begun before, nothing more is written ([`Gate`]).
//!
//! How an array is taken:
//! 1. the leases are read; another host's must stand still for [`WATCH_BEATS`] periods, else:
//!    refused. So it is where a slot cannot be read on each of the members
//! 2. ours, with a larger epoch, is durable (crash: we have it, and may take it again at once)
//! 3. we wait as long as a rival that has not seen ours may take from its 1 to its 2
//! 4. ours is read back; another's instead: refused
//!
//! Whose 2 comes after our 4 began its 1 after our 2, and saw it: so of two hosts at most one gets
//! past 4. A host that was slow from 1 to 2 waits at 3 until an owner that it did not see has
//! looked again, or trusts its lease no longer. (M. Fischer's mutual exclusion by timing, in L.
//! Lamport, "A Fast Mutual Exclusion Algorithm", ACM TOCS 5(1), 1987.) A beat goes the same way, 1
//! to 4: what it proves is that nobody who had not seen it has the array. What a stalled host had
//! handed to the kernel before it stalled is beyond this: only the drives themselves could refuse
//! it.
//!
//! A place of which a slot cannot be read proves nothing: what the other slot says against a host
//! counts, and what it says for it does not. Who has the array writes nothing there; who takes it
//! does, by force in both slots.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::rc::Rc;
use std::time::Duration;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_drive::gate::Gate;
use ashlar_drive::silence::WRITES_WITHIN;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::lease::{HOST_NAME_BYTES, Lease, SLOTS};
use ashlar_format::record::{self, SEQUENCE_MAX};
use ashlar_format::units::to_usize;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;
use smallvec::SmallVec;
use zerocopy::IntoBytes;

use crate::error::{ArrayError, AssembleError};
use crate::label::{self, Label};
use crate::member::Member;
use crate::members::Members;

/// Between two beats.
pub const BEAT_PERIOD: Duration = Duration::from_secs(5);
/// Periods that another host's lease must stand still before it is taken over.
pub const WATCH_BEATS: u32 = 3;
/// For so long after its beginning a good beat is relied on.
const TRUST: Duration = Duration::from_secs(10);
/// Who reads the leases and has not written its own within this time is slow.
const SETTLE: Duration = Duration::from_millis(500);
// What was started just before the trust ended has a period to reach the drives.
const _: () =
    assert!(TRUST.as_secs() + BEAT_PERIOD.as_secs() <= WATCH_BEATS as u64 * BEAT_PERIOD.as_secs());
// Also beats that are slow are writes often enough to show that a member takes some.
const _: () = assert!(BEAT_PERIOD.as_millis() + 2 * SETTLE.as_millis() < WRITES_WITHIN.as_millis());

/// A start or a stop waits so long, and no longer, for a good beat.
const ENDS_WITHIN: Duration = Duration::from_secs(30);

const NOBODY: [u8; 16] = [0; 16];
/// More than the owners that there may have been and did not get so far as to name an era.
const EPOCHS_UNSEEN: u64 = 1 << 16;
/// Largest epoch or beat: no array gets that old. What is beyond was made up, and leaves no room
/// for one after it.
const BELIEVED_MAX: u64 = SEQUENCE_MAX / 2;

/// Who wants an array.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Host {
    uuid: [u8; 16],
    name: [u8; HOST_NAME_BYTES],
}

impl Host {
    /// `uuid`: not zero. `name`: for people; what does not fit is cut off.
    pub fn new(uuid: [u8; 16], name: &str) -> Host {
        assert!(uuid != NOBODY, "a host without an identity");
        let end = name.floor_char_boundary(HOST_NAME_BYTES);
        let name = record::name_field(&name[..end]).expect("it was cut to fit");
        Host { uuid, name }
    }
}

/// What a host takes: beats count on from there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Claim {
    epoch: u64,
    beat: u64,
    /// When it was begun to be written.
    began: Instant,
}

impl Claim {
    /// After what was found: of a new array, nothing.
    pub(crate) fn after(newest: Option<&Lease>, began: Instant) -> Claim {
        let (epoch, beat) = newest.map_or((0, 0), age);
        Claim { epoch: epoch + 1, beat: beat + 1, began }
    }

    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The epoch of the lease that was there before; 0: there was none.
    pub(crate) fn epoch_before(&self) -> u64 {
        self.epoch - 1
    }

    /// Nobody else has the array before this moment.
    pub fn until(&self) -> Instant {
        self.began.after(TRUST)
    }

    fn is_in(&self, found: &Lease, host: &Host) -> bool {
        found.epoch.get() == self.epoch && found.host == host.uuid
    }

    /// Whether a lease that was found says that another has the array, or had it since.
    fn is_overridden(&self, found: &Lease, host: &Host) -> bool {
        found.epoch.get() > self.epoch || found.epoch.get() == self.epoch && found.host != host.uuid
    }
}

/// Leases of one array are ordered by it.
pub fn age(lease: &Lease) -> (u64, u64) {
    (lease.epoch.get(), lease.beat.get())
}

/// Whether this host has it, or has ended without giving it back.
pub fn is_own(lease: &Lease, host: &Host) -> bool {
    lease.host == host.uuid
}

/// Whether another host than this one has it.
pub fn is_others(newest: Option<&Lease>, host: &Host) -> bool {
    newest.is_some_and(|lease| lease.host != NOBODY && lease.host != host.uuid)
}

/// As it stands in messages.
pub fn owner_name(lease: &Lease) -> String {
    match lease.host_name() {
        Ok(name) if !name.is_empty() => format!("host {name}"),
        Ok(_) | Err(_) => "another host".to_owned(),
    }
}

/// Where a drive of an array keeps its leases.
pub struct Place {
    drive: Rc<Drive>,
    drive_uuid: [u8; 16],
    at: u64,
}

impl Place {
    fn of(member: &Member, drive: &Rc<Drive>) -> Place {
        let (drive_uuid, at) = (member.drive_uuid, member.areas.lease.offset);
        Place { drive: drive.clone(), drive_uuid, at }
    }

    pub(crate) fn on(drive: &Rc<Drive>, label: &Label) -> Place {
        let (drive_uuid, at) = (label.drive_uuid, label.layout.lease.offset);
        Place { drive: drive.clone(), drive_uuid, at }
    }

    /// What its slots show.
    pub(crate) async fn read(
        &self,
        reactor: &Reactor,
        array: [u8; 16],
    ) -> Result<Seen, DriveError> {
        let homes = (self.at..).step_by(to_usize(Lease::BYTES)).take(to_usize(SLOTS));
        let reads = homes.clone().map(|home| {
            // Apart: one that cannot be read hides no other.
            label::read_bytes(reactor, &self.drive, home, Lease::BYTES)
        });
        let mut seen = Seen { newest: None, is_whole: true };
        for (home, read) in homes.zip(join_all(reads).await) {
            let bytes = match read {
                Ok(bytes) => bytes,
                Err(DriveError::Media) => {
                    seen.is_whole = false;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let found = record::open::<Lease>(&bytes, Some(self.drive_uuid), home).ok();
            let found = found.filter(|its| {
                its.array == array && its.epoch.get().max(its.beat.get()) <= BELIEVED_MAX
            });
            if found.map(age) > seen.age() {
                seen.newest = found.cloned();
            }
        }
        Ok(seen)
    }

    /// Durable, with this beat, when this returns.
    async fn write(&self, reactor: &Reactor, lease: Lease, beat: u64) -> Result<(), DriveError> {
        self.show(reactor, lease, beat).await?;
        self.drive.flush().await
    }

    /// Whoever reads the drive sees it when this returns.
    async fn show(&self, reactor: &Reactor, mut lease: Lease, beat: u64) -> Result<(), DriveError> {
        lease.beat = beat.into();
        let home = self.at + beat % SLOTS * Lease::BYTES;
        record::seal(&mut lease, self.drive_uuid, home, beat);
        let buffer = reactor.buffer(to_usize(Lease::BYTES));
        buffer.copy_from_slice(lease.as_bytes());
        self.drive.write_past_gate(home, buffer.into()).await
    }
}

/// What a place shows.
#[derive(Clone, Debug)]
pub(crate) struct Seen {
    /// Of the slots that can be read; `None`: there never was one.
    pub(crate) newest: Option<Lease>,
    /// Both can: nothing newer stands here.
    pub(crate) is_whole: bool,
}

impl Seen {
    fn age(&self) -> Option<(u64, u64)> {
        self.newest.as_ref().map(age)
    }
}

/// Where leases are written.
pub fn places(members: &[Member]) -> Vec<Place> {
    members.iter().filter_map(|member| Some(Place::of(member, member.keeps_metadata()?))).collect()
}

/// What each place shows; of one that does not answer: nothing.
async fn each(reactor: &Reactor, array: [u8; 16], places: &[Place]) -> Vec<Option<Seen>> {
    let found = join_all(places.iter().map(|place| place.read(reactor, array))).await;
    found.into_iter().map(Result::ok).collect()
}

fn newest_of(found: &[Option<Seen>]) -> Option<&Lease> {
    found.iter().flatten().filter_map(|seen| seen.newest.as_ref()).max_by_key(|lease| age(lease))
}

/// A start that asks no other host.
#[derive(Clone, Copy, Debug)]
pub struct Force {
    /// An epoch that members that are away may have.
    pub past: u64,
    /// Of the array: eras grow with its starts, as epochs do, and no slower.
    pub era: u64,
}

/// Takes the array for `host`, who has it for [`TRUST`] from when this began to write, and longer
/// if it beats. `leases`: of all its drives that are here, since who has those that are no members
/// has the array, too. `force`: at once, from whoever has it.
pub async fn take(
    reactor: &Reactor,
    array: [u8; 16],
    members: &[Member],
    leases: &[Place],
    host: &Host,
    force: Option<Force>,
) -> Result<Claim, AssembleError> {
    let (mut read_at, mut found) = (reactor.now(), each(reactor, array, leases).await);
    for _ in 0..WATCH_BEATS {
        if force.is_some() || !is_others(newest_of(&found), host) {
            break;
        }
        reactor.sleep(BEAT_PERIOD).await;
        read_at = reactor.now();
        // Each place by itself: the newest may be on a drive that its owner reaches no more.
        let (mut moved, before) = (None, newest_of(&found).map(age));
        for (known, now) in found.iter_mut().zip(each(reactor, array, leases).await) {
            let Some(now) = now else { continue };
            let (age, age_now) = (known.as_ref().and_then(Seen::age), now.age());
            // One may not have answered this time, or before: what it shows now may be old.
            if age_now > age {
                let is_new = age.is_some() || age_now > before;
                let its = now.newest.clone().filter(|now| is_new && is_others(Some(now), host));
                moved = moved.or(its);
            }
            match known {
                Some(known) if age_now <= age => known.is_whole = now.is_whole,
                _ => *known = Some(now),
            }
        }
        if let Some(moved) = moved.filter(|_| is_others(newest_of(&found), host)) {
            return Err(AssembleError::InUse { host: owner_name(&moved) });
        }
    }
    let places = places(members);
    let is_its = |of: &Place| places.iter().any(|its| Rc::ptr_eq(&its.drive, &of.drive));
    let of_members = leases.iter().zip(&found).filter(|(place, _)| is_its(place));
    let seen: SmallVec<[&Seen; 8]> = of_members.filter_map(|(_, seen)| seen.as_ref()).collect();
    let is_hidden = !seen.iter().any(|seen| seen.is_whole);
    let mut claim = Claim::after(newest_of(&found), reactor.now());
    let first = claim.beat;
    match force {
        None if is_hidden => return Err(AssembleError::LeaseUnreadable),
        None => {}
        Some(Force { past, era }) => {
            let past = if is_hidden { past.max(era + EPOCHS_UNSEEN) } else { past };
            claim.epoch = claim.epoch.max(past + 1);
            // Both slots, where one cannot be read (crash between the two: one shows ours).
            claim.beat += u64::from(seen.iter().any(|seen| !seen.is_whole));
        }
    }
    write_and_confirm(reactor, array, &places, host, claim, first, read_at).await?;
    Ok(claim)
}

/// Steps 2 to 4, with beats from the `first` to that of the claim. `read_at`: when step 1 began.
async fn write_and_confirm(
    reactor: &Reactor,
    array: [u8; 16],
    places: &[Place],
    host: &Host,
    claim: Claim,
    first: u64,
    read_at: Instant,
) -> Result<(), AssembleError> {
    let writes = join_all(places.iter().map(async |place| {
        for beat in first..=claim.beat {
            place.write(reactor, lease(array, host, claim.epoch), beat).await?;
        }
        Ok::<(), DriveError>(())
    }));
    let writes = writes.await;
    let slow = reactor.now().since(read_at) > SETTLE;
    reactor.sleep(if slow { TRUST + SETTLE } else { SETTLE }).await;
    let written = places.iter().zip(&writes).filter(|(_, write)| write.is_ok());
    let mut confirmed = false;
    for seen in join_all(written.map(|(place, _)| place.read(reactor, array))).await {
        // A drive that has stopped to answer since is found out by the first write.
        let Ok(Seen { newest, is_whole }) = seen else { continue };
        match newest {
            Some(found) if claim.is_in(&found, host) => confirmed |= is_whole,
            Some(found) if is_whole || claim.is_overridden(&found, host) => {
                return Err(AssembleError::InUse { host: owner_name(&found) });
            }
            None if is_whole => {
                return Err(AssembleError::InUse { host: "another host".into() });
            }
            Some(_) | None => {}
        }
    }
    if confirmed { Ok(()) } else { Err(ArrayError::Lost.into()) }
}

/// The next beat on a member, after its last one there and the newest on any: larger than both. Who
/// watches looks at all members, and one that is ahead may be gone for us, and not for others. Not
/// in the slot of the last one.
fn next_beat(last_here: u64, newest: u64) -> u64 {
    let next = last_here.max(newest) + 1;
    next + u64::from(next % SLOTS == last_here % SLOTS)
}

/// Without a beat.
fn lease(array: [u8; 16], host: &Host, epoch: u64) -> Lease {
    let mut lease = Lease::free(array);
    lease.host = host.uuid;
    lease.host_name = host.name;
    lease.epoch = epoch.into();
    lease
}

/// ```text
///   Held ──another's lease was found──► Lost
///     └──the array was stopped──► Released
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    Held,
    Released,
    Lost { to: String },
}

/// The lease of an array that runs.
pub(crate) struct Leasehold {
    reactor: Reactor,
    array: [u8; 16],
    members: Rc<Members>,
    host: Host,
    claim: Claim,
    /// Before all drives of the array: open for [`TRUST`] after the beginning of the newest beat
    /// that is known to be good.
    gate: Rc<Gate>,
    newest_beat: Cell<u64>,
    state: RefCell<State>,
    /// Since when the array starts, or is to stop: that comes to an end whether or not a beat is
    /// good.
    ends: Cell<Option<Instant>>,
    /// A member that is about to be back, and its index: while no other is here, nothing else could
    /// open the gate.
    joining: RefCell<Option<(usize, Member)>>,
    /// Members that have a task.
    kept: Cell<usize>,
    /// Tasks that have not ended.
    keepers: Cell<usize>,
    changed: WaitList,
}

/// While it lives, there are beats on the drive of a member that is about to be back.
pub(crate) struct Joining<'a>(&'a Leasehold);

impl Joining<'_> {
    /// Waits until it is sure whose the array is, or nothing more is waited for of that drive.
    pub(crate) async fn proves(&self) -> bool {
        let lease = self.0;
        let is_over = || lease.is_trusted() || !lease.is_held() || lease.joining.borrow().is_none();
        lease.changed.until(&lease.reactor, is_over).await;
        lease.is_sure()
    }
}

impl Drop for Joining<'_> {
    fn drop(&mut self) {
        self.0.joining.take();
    }
}

impl Leasehold {
    /// Keeps what `take` got: beats, from now on, until it is released or lost.
    pub(crate) fn keep(
        reactor: &Reactor,
        array: [u8; 16],
        members: Rc<Members>,
        host: Host,
        claim: Claim,
    ) -> Rc<Leasehold> {
        let held = Rc::new(Leasehold {
            reactor: reactor.clone(),
            array,
            members,
            host,
            claim,
            gate: Gate::open_until(claim.until()),
            newest_beat: Cell::new(claim.beat),
            state: RefCell::new(State::Held),
            ends: Cell::default(),
            joining: RefCell::default(),
            kept: Cell::new(0),
            keepers: Cell::new(0),
            changed: WaitList::default(),
        });
        let list = held.members.list();
        list.iter().flat_map(|member| &member.drive).for_each(|drive| held.cover(drive));
        drop(list);
        held.keep_all();
        held
    }

    /// Nothing is written to this drive from now on while it is unknown who has the array.
    pub(crate) fn cover(&self, drive: &Drive) {
        drive.put_behind(self.gate.clone());
    }

    /// There may be more members than before.
    pub(crate) fn keep_all(self: &Rc<Self>) {
        let members = self.members.list().len();
        // One a member: a drive that does not answer holds up nobody's beat but its own.
        for index in self.kept.replace(members)..members {
            self.keepers.set(self.keepers.get() + 1);
            self.reactor.spawn(self.clone().keep_on(index));
        }
    }

    async fn keep_on(self: Rc<Self>, index: usize) {
        let mut beat = self.claim.beat;
        while self.is_held() {
            let began = self.reactor.now();
            if let Some(place) = self.place_of(index) {
                beat = next_beat(beat, self.newest_beat.get());
                self.newest_beat.set(beat);
                // Whether it was good shows at the gate; the next one tries again.
                let _ = self.beat(&place, beat).await;
                if !self.is_trusted() {
                    // Nothing is waited for of a drive that proves nothing.
                    let is_it = |its: &Rc<Drive>| Rc::ptr_eq(its, &place.drive);
                    let joining =
                        |its: &mut (usize, Member)| its.1.drive.as_ref().is_some_and(is_it);
                    self.joining.borrow_mut().take_if(joining);
                    self.changed.wake_all(&self.reactor);
                }
            }
            if self.is_in_vain() {
                // Who waits for a good beat waits in vain.
                self.gate.turn_away(&self.reactor);
                self.changed.wake_all(&self.reactor);
            }
            self.pause_until(began.after(BEAT_PERIOD)).await;
        }
        self.keepers.set(self.keepers.get() - 1);
        self.changed.wake_all(&self.reactor);
    }

    fn place_of(&self, index: usize) -> Option<Place> {
        let (list, joining) = (self.members.list(), self.joining.borrow());
        let is_away = list[index].state == MemberState::Trusted && list[index].alive().is_none();
        let joins = joining.as_ref().filter(|(joins, _)| *joins == index && is_away);
        let member = joins.map_or(&list[index], |(_, member)| member);
        member.keeps_metadata().map(|drive| Place::of(member, drive))
    }

    /// Beats on the drive of a member that is about to be back, until the answer is dropped, or a
    /// beat there has proved nothing.
    pub(crate) fn beat_on(&self, index: usize, member: Member) -> Joining<'_> {
        let before = self.joining.borrow_mut().replace((index, member));
        assert!(before.is_none(), "members come back one by one");
        Joining(self)
    }

    async fn beat(&self, place: &Place, beat: u64) -> Result<(), DriveError> {
        self.look(place).await?;
        let began = self.reactor.now();
        let record = lease(self.array, &self.host, self.claim.epoch);
        place.show(&self.reactor, record, beat).await?;
        // One that no longer flushes is used on where the array cannot do without it: what it shows
        // is looked at below.
        let flushed = place.drive.flush().await;
        if !(place.drive.is_alive() && place.drive.has_failed_flush()) {
            flushed?;
        }
        // After a long stall this beat may have replaced a rival's claim: that one beats, too.
        let wait = if self.is_trusted() { SETTLE } else { BEAT_PERIOD + SETTLE };
        self.pause_until(self.reactor.now().after(wait)).await;
        if self.is_held() && self.look(place).await? {
            self.note_good(began);
        }
        Ok(())
    }

    /// Returns once this lease is on the drive of a member that is to be relied on: it could be all
    /// that another host finds, before the next beat.
    pub(crate) async fn tell(&self, index: usize) -> Result<(), DriveError> {
        let place = self.place_of(index).ok_or(DriveError::Gone)?;
        if self.look(&place).await? {
            return Ok(());
        }
        let record = lease(self.array, &self.host, self.claim.epoch);
        place.write(&self.reactor, record, self.newest_beat.get()).await
    }

    /// Whether the newest lease here is this one; another's ends it.
    async fn look(&self, place: &Place) -> Result<bool, DriveError> {
        let Seen { newest, is_whole } = place.read(&self.reactor, self.array).await?;
        let others = newest.as_ref().filter(|its| self.claim.is_overridden(its, &self.host));
        if let Some(found) = others {
            self.lose(owner_name(found));
            return Err(DriveError::Gone);
        }
        if !is_whole {
            return Err(DriveError::Media);
        }
        Ok(newest.is_some_and(|found| self.claim.is_in(&found, &self.host)))
    }

    fn note_good(&self, began: Instant) {
        self.gate.move_on(&self.reactor, began.after(TRUST));
        self.changed.wake_all(&self.reactor);
    }

    fn is_trusted(&self) -> bool {
        self.gate.until().is_some_and(|until| self.reactor.now() <= until)
    }

    /// Nothing can be written, whoever has the array.
    fn is_nowhere(&self) -> bool {
        (0..self.members.list().len()).all(|index| self.place_of(index).is_none())
    }

    /// Waits, unless the lease ends.
    async fn pause_until(&self, deadline: Instant) {
        self.changed.until_or(&self.reactor, deadline, || !self.is_held()).await;
    }

    fn lose(&self, to: String) {
        self.gate.shut(&self.reactor);
        self.members.pull_all();
        *self.state.borrow_mut() = State::Lost { to };
        self.changed.wake_all(&self.reactor);
    }

    fn is_held(&self) -> bool {
        *self.state.borrow() == State::Held
    }

    /// Whether the newest lease on a drive that is no member now is this one; `Greater`: another
    /// took it since, `Less`: there is none, or an older one.
    pub(crate) async fn compare(&self, drive: &Rc<Drive>, label: &Label) -> Ordering {
        match Place::on(drive, label).read(&self.reactor, self.array).await {
            Ok(Seen { newest: Some(found), is_whole }) => match () {
                () if self.claim.is_overridden(&found, &self.host) => Ordering::Greater,
                () if is_whole && self.claim.is_in(&found, &self.host) => Ordering::Equal,
                () => Ordering::Less,
            },
            Ok(Seen { newest: None, .. }) | Err(_) => Ordering::Less,
        }
    }

    pub(crate) fn claim(&self) -> Claim {
        self.claim
    }

    /// The host that has taken the array over; perhaps without a name.
    pub(crate) fn lost_to(&self) -> Option<String> {
        match &*self.state.borrow() {
            State::Lost { to } => Some(to.clone()),
            State::Held | State::Released => None,
        }
    }

    pub(crate) fn is_lost(&self) -> bool {
        matches!(*self.state.borrow(), State::Lost { .. })
    }

    /// Whether this host has the array, for sure.
    pub(crate) fn is_sure(&self) -> bool {
        self.is_held() && self.is_trusted()
    }

    /// How long from now this host can be sure that it has the array, whatever happens.
    pub(crate) fn sure_for(&self) -> Duration {
        let until = self.gate.until().filter(|_| self.is_held());
        until.map_or(Duration::ZERO, |until| until.since(self.reactor.now()))
    }

    /// From now on (true) a good beat is not waited for without end; or again (false).
    pub(crate) fn set_ending(&self, ending: bool) {
        self.ends.set(ending.then(|| self.reactor.now()));
        self.changed.wake_all(&self.reactor);
    }

    /// Whether no beat will be good; or none has been for long, and the array is to stop.
    fn is_in_vain(&self) -> bool {
        let until = self.gate.until().unwrap_or_default();
        let is_late = |since: Instant| self.reactor.now() > until.max(since).after(ENDS_WITHIN);
        self.is_nowhere() || self.ends.get().is_some_and(is_late)
    }

    /// Waits until this host can be sure that it has the array, or that it has not, or until this
    /// is in vain.
    pub(crate) async fn sure(&self) {
        let sure = || self.is_trusted() || !self.is_held() || self.is_in_vain();
        self.changed.until(&self.reactor, sure).await;
    }

    /// Lets others take the array at once. Nothing of it is under way any more. Who is not sure of
    /// it leaves it: another may have it by now.
    pub(crate) async fn release(&self) {
        if !self.is_sure() {
            return self.leave().await;
        }
        self.beat_no_more().await;
        let places = places(&self.members.list());
        let mut free = Lease::free(self.array);
        free.epoch = self.claim.epoch.into();
        let beat = self.newest_beat.get() + 1;
        let frees = places.iter().map(async |place| {
            self.look(place).await?;
            place.write(&self.reactor, free.clone(), beat).await
        });
        // Who cannot be told waits until the lease has stood still.
        join_all(frees).await;
        // What is written to the drives from now on is not the array's.
        self.gate.move_on(&self.reactor, Instant::MAX);
    }

    /// It stays ours, and stands still.
    pub(crate) async fn leave(&self) {
        if self.is_held() {
            self.beat_no_more().await;
            self.gate.move_on(&self.reactor, Instant::MAX);
        }
    }

    async fn beat_no_more(&self) {
        *self.state.borrow_mut() = State::Released;
        self.changed.wake_all(&self.reactor);
        // The array is at rest: nobody needs one of them more than the others.
        self.members.list().iter().flat_map(|member| &member.drive).for_each(|its| its.part());
        // A beat that is under way would bring the lease back.
        self.changed.until(&self.reactor, || self.keepers.get() == 0).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALPHA: [u8; 16] = [1; 16];
    const BETA: [u8; 16] = [2; 16];

    fn of(host: [u8; 16], epoch: u64, beat: u64) -> Lease {
        let mut lease = lease([9; 16], &Host { uuid: host, name: [0; HOST_NAME_BYTES] }, epoch);
        lease.beat = beat.into();
        lease
    }

    #[test]
    fn who_has_the_array() {
        let us = Host::new(ALPHA, "alpha");
        assert!(!is_others(None, &us));
        for (host, others) in [(NOBODY, false), (ALPHA, false), (BETA, true)] {
            assert_eq!(is_others(Some(&of(host, 3, 7)), &us), others);
        }
        for (host, epoch, lost) in [
            (ALPHA, 2, false),
            (ALPHA, 3, false),
            (BETA, 2, false),
            (BETA, 3, true),
            (BETA, 4, true),
            // Taken by another daemon that calls itself the same, or taken and freed.
            (ALPHA, 4, true),
            (NOBODY, 4, true),
        ] {
            let claim = Claim { epoch: 3, beat: 1, began: Instant::default() };
            let found = of(host, epoch, 7);
            assert_eq!(claim.is_overridden(&found, &us), lost, "{host:?} {epoch}");
            assert_eq!(claim.is_in(&found, &us), (host, epoch) == (ALPHA, 3));
        }
    }

    #[test]
    fn epochs_and_beats_only_grow() {
        let began = Instant::default();
        assert_eq!(Claim::after(None, began), Claim { epoch: 1, beat: 1, began });
        let after = Claim::after(Some(&of(BETA, 4, 90)), began);
        assert_eq!(after, Claim { epoch: 5, beat: 91, began });
        assert!(age(&of(ALPHA, 5, 1)) > age(&of(BETA, 4, 90)));
        assert!(age(&of(ALPHA, 4, 91)) > age(&of(ALPHA, 4, 90)));
    }

    #[test]
    fn the_next_beat_is_the_newest_and_in_the_other_slot() {
        for (last_here, newest, next) in [(1, 1, 2), (1, 2, 4), (1, 3, 4), (4, 9, 11), (4, 4, 5)] {
            assert_eq!(next_beat(last_here, newest), next, "{last_here} {newest}");
        }
    }

    #[test]
    fn names_are_cut_between_letters() {
        let name = "ä".repeat(40);
        let host = Host::new(ALPHA, &name);
        assert_eq!(record::name_from(&host.name), Ok(&name[..64]));
        let odd = format!("x{name}");
        assert_eq!(record::name_from(&Host::new(ALPHA, &odd).name), Ok(&odd[..63]));
    }
}
