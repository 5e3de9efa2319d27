//! The device of one export, as it lives on one reactor: its rings, its guest's memory, its disk.
//! Where several reactors serve an export, each has one for some of the rings; it hears all that is
//! said of the guest as a whole, and nothing of the others' rings.
//!
//! Messages arrive one after the other from the socket's thread. One that changes a ring brings the
//! ring to rest first, so that nobody sees a half-changed one.
//!
//! Invariants:
//! - a ring has a queue only while the front end has started and enabled it, the device is not
//!   closing, and all of the ring was found in guest memory;
//! - while the features ask for a log of written pages, no ring gets a queue without one that is
//!   long enough for all memory; a shorter one may lie there until then, as one does of a move that
//!   was given up before the guest got more memory.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use crate::disk::{Disk, Trouble};
use crate::export::PartStatus;
use crate::vhost::bell::Bell;
use crate::vhost::config::{Facts, LOG_ALL, PROTOCOL_FEATURES, is_write_through};
use crate::vhost::dirty::{DirtyError, DirtyLog, MappedDirtyLog, RingLog};
use crate::vhost::fault::Fault;
use crate::vhost::graveyard::{Graveyard, Kept};
use crate::vhost::inflight::{Inflight, MappedInflight, Section};
use crate::vhost::memory::{GuestMemory, MappedRegion, Place};
use crate::vhost::queue::{Bells, HungBell, Queue, State, stopped};
use crate::vhost::vring::{Ring, RingAddresses, RingSetup};

/// The front end spoke of a ring that does not exist.
#[derive(Debug, thiserror::Error)]
#[error("there is no ring {0}")]
pub(crate) struct NoRing(usize);

/// Why nobody can say where a ring stands.
#[derive(Debug, thiserror::Error)]
pub(crate) enum StopError {
    #[error(transparent)]
    NoRing(#[from] NoRing),
    /// Memory of the guest is lost, and perhaps the ring.
    #[error(transparent)]
    Fault(#[from] Fault),
}

/// What the front end has said about a ring, and the queue that serves it.
#[derive(Default)]
pub(crate) struct Vring {
    pub(crate) size: u32,
    pub(crate) addresses: Option<RingAddresses>,
    /// The guest's address of what the device writes there, if that is to be marked.
    pub(crate) marked: Option<u64>,
    /// Where the ring stands, while there is no queue.
    pub(crate) base: u32,
    /// A kick file, or its absence, was announced: that starts a ring (vhost-user, "Ring states").
    pub(crate) started: bool,
    pub(crate) enabled: bool,
    pub(crate) bells: Bells,
    queue: Option<Rc<Queue>>,
    /// It is complete, and waits for a log of written pages.
    held: bool,
    /// It was at work for this front end, which does not know yet where it stands.
    left: bool,
}

pub(crate) struct Device {
    disk: Rc<Disk>,
    graveyard: Graveyard,
    memory: RefCell<Rc<GuestMemory>>,
    vrings: Vec<RefCell<Vring>>,
    /// Where the front end keeps what is in flight; rings that start use it.
    inflight: RefCell<Option<Inflight>>,
    /// Where written pages are marked while the features say so.
    dirty: RefCell<Option<DirtyLog>>,
    features: Cell<u64>,
    /// The guest's choice in the configuration space.
    write_back: Cell<bool>,
    connected: Cell<bool>,
    closing: Cell<bool>,
    /// Counts front ends that are gone: what still waits for one of them has come too late.
    gone: Cell<u64>,
}

impl Device {
    pub(crate) fn new(disk: Disk, queues_max: u16, graveyard: Graveyard) -> Rc<Device> {
        let device = Device {
            disk: Rc::new(disk),
            graveyard,
            memory: RefCell::default(),
            vrings: (0..queues_max).map(|_| RefCell::default()).collect(),
            inflight: RefCell::default(),
            dirty: RefCell::default(),
            features: Cell::new(0),
            write_back: Cell::new(true),
            connected: Cell::new(false),
            closing: Cell::new(false),
            gone: Cell::new(0),
        };
        device.update_write_through();
        Rc::new(device)
    }

    /// The volume may have grown.
    pub(crate) async fn look(&self) {
        self.disk.volume().look().await;
    }

    pub(crate) fn facts(&self) -> Facts {
        Facts {
            volume_bytes: self.disk.volume().bytes(),
            discard_bytes: self.disk.volume().discard_bytes(),
            queues_max: u16::try_from(self.vrings.len()).unwrap_or(u16::MAX),
            write_back: self.write_back.get(),
        }
    }

    pub(crate) fn status(&self) -> PartStatus {
        let runs = |vring: &&RefCell<Vring>| {
            let vring = vring.borrow();
            vring.queue.as_ref().is_some_and(|queue| queue.state() == State::Running)
        };
        let queues_active = self.vrings.iter().filter(runs).count();
        PartStatus::of(&self.disk, self.connected.get(), queues_active)
    }

    pub(crate) fn note(&self, trouble: Trouble) {
        self.disk.note(trouble);
    }

    /// Rings that are at work go on as they are, but for the log of written pages.
    pub(crate) fn set_features(&self, features: u64) -> Result<(), DirtyError> {
        self.check_at_work(features, &self.memory.borrow())?;
        self.take_features(features);
        self.start_held();
        Ok(())
    }

    fn take_features(&self, features: u64) {
        self.features.set(features);
        self.update_write_through();
        self.update_log();
    }

    /// Another log, or the first; nothing is marked in the one before any more. One that is not
    /// asked for may be too short: another comes before it is.
    pub(crate) fn set_dirty_log(&self, mapped: MappedDirtyLog) -> Result<(), DirtyError> {
        let log = DirtyLog::adopt(mapped, &self.graveyard);
        if self.features.get() & LOG_ALL != 0 {
            log.check(self.memory.borrow().end())?;
        }
        *self.dirty.borrow_mut() = Some(log);
        self.update_log();
        self.start_held();
        Ok(())
    }

    /// Refuses what would have rings that are at work mark in a log that is too short. A front end
    /// that sets up a device at rest gives the log that goes with it later, as QEMU does.
    fn check_at_work(&self, features: u64, memory: &GuestMemory) -> Result<(), DirtyError> {
        if features & LOG_ALL != 0
            && !self.is_at_rest()
            && let Some(log) = &*self.dirty.borrow()
        {
            log.check(memory.end())?;
        }
        Ok(())
    }

    /// Whether a ring that starts has all that is written marked, if that is asked for.
    fn has_log(&self) -> bool {
        let suffices = |log: &DirtyLog| log.check(self.memory.borrow().end()).is_ok();
        self.features.get() & LOG_ALL == 0 || self.dirty.borrow().as_ref().is_some_and(suffices)
    }

    fn hang(&self, bell: Bell) -> HungBell {
        Rc::new(Kept::new(bell, &self.graveyard))
    }

    /// To ring when pages were marked.
    pub(crate) fn set_marked_bell(&self, bell: Bell) {
        let bell = Some(self.hang(bell));
        for vring in &self.vrings {
            let mut vring = vring.borrow_mut();
            vring.bells.marked = bell.clone();
            if let Some(queue) = &vring.queue {
                queue.set_marked(bell.clone());
            }
        }
    }

    /// Where written pages are to be marked now.
    fn dirty_log(&self) -> Option<DirtyLog> {
        let log = self.dirty.borrow();
        log.as_ref().filter(|_| self.features.get() & LOG_ALL != 0).cloned()
    }

    fn ring_log(&self, vring: &Vring) -> Option<RingLog> {
        Some(RingLog { used: vring.marked?, log: self.dirty_log()? })
    }

    fn update_log(&self) {
        for vring in &self.vrings {
            let vring = vring.borrow();
            if let Some(queue) = &vring.queue {
                queue.log_to(self.dirty_log(), self.ring_log(&vring));
            }
        }
    }

    /// The guest wrote to the configuration space.
    pub(crate) fn set_write_back(&self, write_back: bool) {
        self.write_back.set(write_back);
        self.update_write_through();
        if let Some(region) = &*self.inflight.borrow() {
            region.set_write_through(!write_back);
        }
    }

    fn update_write_through(&self) {
        let through = is_write_through(self.features.get(), self.write_back.get());
        self.disk.set_write_through(through);
    }

    /// Replaces all of the guest's memory.
    pub(crate) fn replace_memory(&self, regions: Vec<MappedRegion>) -> Result<(), DirtyError> {
        self.change_memory(GuestMemory::new(regions, &self.graveyard)?)
    }

    pub(crate) fn add_memory(&self, region: MappedRegion) -> Result<(), DirtyError> {
        let memory = self.memory.borrow().with(region, &self.graveyard)?;
        self.change_memory(memory)
    }

    pub(crate) fn remove_memory(&self, place: Place) -> Result<(), DirtyError> {
        let memory = self.memory.borrow().without(place)?;
        self.change_memory(memory)
    }

    /// A front end that logs what rings at work write makes the log longer before it adds memory.
    fn change_memory(&self, memory: GuestMemory) -> Result<(), DirtyError> {
        self.check_at_work(self.features.get(), &memory)?;
        self.set_memory(memory);
        self.start_held();
        Ok(())
    }

    pub(crate) fn set_inflight(&self, region: MappedInflight) {
        let region = Inflight::adopt(region, &self.graveyard);
        if region.is_write_through() {
            self.set_write_back(false);
        }
        region.set_write_through(!self.write_back.get());
        *self.inflight.borrow_mut() = Some(region);
    }

    fn log_of(&self, index: usize) -> Option<Section> {
        self.inflight.borrow().as_ref()?.of_queue(index)
    }

    fn set_memory(&self, memory: GuestMemory) {
        let memory = Rc::new(memory);
        *self.memory.borrow_mut() = memory.clone();
        for vring in &self.vrings {
            if let Some(queue) = &vring.borrow().queue {
                queue.set_memory(&memory);
            }
        }
    }

    fn vring(&self, index: usize) -> Result<&RefCell<Vring>, NoRing> {
        self.vrings.get(index).ok_or(NoRing(index))
    }

    /// Brings the ring to rest, changes it, and goes on if it is complete.
    pub(crate) async fn change(
        &self,
        index: usize,
        change: impl FnOnce(&mut Vring),
    ) -> Result<(), NoRing> {
        let gone = self.gone.get();
        self.halt(index, false).await?;
        if self.gone.get() != gone {
            return Ok(());
        }
        change(&mut self.vring(index)?.borrow_mut());
        self.start_if_complete(index)
    }

    /// Where the ring is, and whether what is written there is marked. A ring that is at work and
    /// stays where it is goes on: front ends begin and end a log while it runs.
    pub(crate) async fn set_addresses(
        &self,
        index: usize,
        addresses: RingAddresses,
        marked: Option<u64>,
    ) -> Result<(), NoRing> {
        {
            let mut vring = self.vring(index)?.borrow_mut();
            let runs = |queue: &&Rc<Queue>| queue.state() == State::Running;
            if vring.addresses == Some(addresses)
                && let Some(queue) = vring.queue.clone().as_ref().filter(runs)
            {
                vring.marked = marked;
                queue.log_to(self.dirty_log(), self.ring_log(&vring));
                return Ok(());
            }
        }
        let change = |vring: &mut Vring| {
            (vring.addresses, vring.marked) = (Some(addresses), marked);
        };
        self.change(index, change).await
    }

    /// A kick file, or its absence, starts the ring.
    pub(crate) async fn set_kick(&self, index: usize, kick: Option<Bell>) -> Result<(), NoRing> {
        let kick = kick.map(|bell| self.hang(bell));
        let start = |vring: &mut Vring| (vring.bells.kick, vring.started) = (kick, true);
        self.change(index, start).await
    }

    /// A new file to call the guest by. The ring goes on: guests mask and unmask interrupts while
    /// they work.
    pub(crate) fn set_call(&self, index: usize, call: Option<Bell>) -> Result<(), NoRing> {
        let mut vring = self.vring(index)?.borrow_mut();
        let call = call.map(|bell| self.hang(bell));
        vring.bells.call = call.clone();
        if let Some(queue) = &vring.queue {
            queue.set_call(call);
        }
        Ok(())
    }

    pub(crate) fn set_error(&self, index: usize, error: Option<Bell>) -> Result<(), NoRing> {
        let mut vring = self.vring(index)?.borrow_mut();
        let error = error.map(|bell| self.hang(bell));
        vring.bells.error = error.clone();
        if let Some(queue) = &vring.queue {
            queue.set_error(error);
        }
        Ok(())
    }

    /// Where the ring stands; it is at rest.
    pub(crate) fn base(&self, index: usize) -> Result<u32, NoRing> {
        Ok(self.vring(index)?.borrow().base)
    }

    /// Stops the ring. Returns where it is to go on, once everything before is answered.
    pub(crate) async fn stop_ring(&self, index: usize) -> Result<u32, StopError> {
        let gone = self.gone.get();
        self.halt(index, true).await?;
        if self.has_lost_memory() {
            return Err(Fault::MemoryLost.into());
        }
        let mut vring = self.vring(index)?.borrow_mut();
        if self.gone.get() == gone {
            vring.started = false;
            vring.bells.kick = None;
        }
        Ok(vring.base)
    }

    fn has_lost_memory(&self) -> bool {
        self.memory.borrow().alarm().is_some_and(|alarm| alarm.has_rung())
    }

    /// Ends the ring's queue, if it has one; returns when nothing is under way. `is_told`: the
    /// front end will know where the ring stands; see `Ring::leave`.
    async fn halt(&self, index: usize, is_told: bool) -> Result<(), NoRing> {
        // Of memory that is lost it is told nothing.
        let front_end_knows = || is_told && !self.has_lost_memory();
        let mut has_ended = false;
        while let Some(queue) = self.queue(index)? {
            queue.stop().await;
            let mut vring = self.vring(index)?.borrow_mut();
            // Someone else may have waited for the same, and have started another already.
            if vring.queue.as_ref().is_some_and(|now| Rc::ptr_eq(now, &queue)) {
                vring.base = queue.base();
                queue.leave(front_end_knows());
                vring.queue = None;
                vring.left = !front_end_knows();
                has_ended = true;
            }
        }
        self.vring(index)?.borrow_mut().held = false;
        if front_end_knows() && !has_ended {
            self.forget_left(index)?;
        }
        Ok(())
    }

    fn queue(&self, index: usize) -> Result<Option<Rc<Queue>>, NoRing> {
        Ok(self.vring(index)?.borrow().queue.clone())
    }

    /// A ring may have been left before the front end asked where it stands: QEMU disables it
    /// first.
    fn forget_left(&self, index: usize) -> Result<(), NoRing> {
        let mut vring = self.vring(index)?.borrow_mut();
        if let Some(addresses) = vring.addresses {
            let (features, log) = (self.features.get(), self.ring_log(&vring));
            Ring::forget_left(&self.memory.borrow(), addresses, features, log);
        }
        // Of a ring that was never at work here, the log may have what another left in flight.
        if std::mem::take(&mut vring.left) {
            self.log_of(index).iter().for_each(Section::blank);
        }
        Ok(())
    }

    fn start_if_complete(&self, index: usize) -> Result<(), NoRing> {
        let mut vring = self.vring(index)?.borrow_mut();
        let enabled = vring.enabled || self.features.get() & PROTOCOL_FEATURES == 0;
        let Some(addresses) = vring.addresses else { return Ok(()) };
        if self.closing.get() || !vring.started || !enabled || vring.size == 0 {
            return Ok(());
        }
        assert!(vring.queue.is_none(), "whoever changes a ring has halted it");
        let queue = u16::try_from(index).unwrap_or(u16::MAX);
        vring.held = !self.has_log();
        if vring.held {
            let export = self.disk.name();
            tracing::warn!(export, queue, "the ring waits for a log of all of the guest's memory");
            return Ok(());
        }
        let setup = RingSetup {
            size: vring.size,
            addresses,
            base: vring.base,
            features: self.features.get(),
        };
        let memory = self.memory.borrow().clone();
        let log = self.log_of(index);
        match Queue::start(&self.disk, queue, &memory, &setup, log, vring.bells.clone()) {
            Ok(started) => {
                started.log_to(self.dirty_log(), self.ring_log(&vring));
                (vring.queue, vring.left) = (Some(started), false);
            }
            Err(fault) => {
                let export = self.disk.name();
                tracing::warn!(export, queue, %fault, "the ring cannot be served");
                self.disk.note(stopped(queue, fault));
            }
        }
        Ok(())
    }

    /// Something has changed for rings that wait for a log.
    fn start_held(&self) {
        for index in 0..self.vrings.len() {
            if self.vring(index).is_ok_and(|vring| vring.borrow().held) {
                // Every index below the length exists.
                let _ = self.start_if_complete(index);
            }
        }
    }

    pub(crate) fn is_at_rest(&self) -> bool {
        self.vrings.iter().all(|vring| vring.borrow().queue.is_none())
    }

    pub(crate) fn connect(&self) {
        self.connected.set(true);
    }

    /// The front end is gone. Its requests are answered, into its memory, before the next one may
    /// come: otherwise a late write could overwrite a later one of the same guest.
    /// `orderly`: no ring was at work, on any reactor.
    pub(crate) async fn disconnect(&self, orderly: bool) {
        self.gone.set(self.gone.get() + 1);
        self.halt_all(false).await;
        for vring in &self.vrings {
            *vring.borrow_mut() = Vring::default();
        }
        // A guest whose front end lost us goes on with the cache mode that it chose; it would not
        // choose again, also not where it is us who end. One that shut down does not come back.
        self.inflight.take();
        if orderly {
            self.set_write_back(true);
        }
        self.take_features(0);
        self.dirty.take();
        self.set_memory(GuestMemory::default());
        self.connected.set(false);
    }

    /// The guest was reset: rings stop, the cache mode is the one at power-on.
    pub(crate) async fn reset(&self) {
        let gone = self.gone.get();
        self.halt_all(true).await;
        if self.gone.get() != gone {
            return;
        }
        for vring in &self.vrings {
            let mut vring = vring.borrow_mut();
            (vring.started, vring.enabled, vring.base) = (false, false, 0);
        }
        self.set_write_back(true);
    }

    /// Comes to rest for good.
    pub(crate) async fn close(&self) {
        self.closing.set(true);
        self.halt_all(false).await;
    }

    async fn halt_all(&self, front_end_knows: bool) {
        for index in 0..self.vrings.len() {
            // Every index below the length exists.
            let _ = self.halt(index, front_end_knows).await;
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what still waits for a front end that is gone means nothing to the next one.
    //! Method: messages that overlap, as they do once a reply has taken too long.

    use std::pin::Pin;
    use std::sync::mpsc;
    use std::time::Duration;

    use ashlar_format::array_superblock::Level;
    use ashlar_reactor::join::join_all;

    use super::*;
    use crate::vhost::queue::tests::{disk, run};
    use crate::vhost::vring::tests::Guest;

    type Message = Pin<Box<dyn Future<Output = ()>>>;

    #[test]
    fn a_change_that_outlives_its_front_end_changes_nothing() {
        run(|reactor| async move {
            let disk = Rc::into_inner(disk(&reactor, Level::Raid0, 2).await).unwrap();
            let (graveyard, _retired) = mpsc::channel();
            let device = Device::new(disk, 2, graveyard);
            for change_first in [true, false] {
                let mut guest = Guest::new(4);
                *device.memory.borrow_mut() = guest.memory.clone();
                let setup = guest.setup(0);
                let complete = move |vring: &mut Vring| {
                    (vring.size, vring.addresses) = (setup.size, Some(setup.addresses));
                    (vring.started, vring.enabled) = (true, true);
                };
                device.change(0, complete).await.unwrap();
                assert!(!device.is_at_rest());
                let (late, left) = (device.clone(), device.clone());
                let late: Message = Box::pin(async move {
                    late.change(0, |vring| vring.enabled = true).await.unwrap();
                });
                let left: Message = Box::pin(async move { left.disconnect(false).await });
                let both = if change_first { vec![late, left] } else { vec![left, late] };
                join_all(both).await;
                assert!(device.is_at_rest());
                // Who comes after the end speaks of the next one.
                assert!(!change_first || !device.vrings[0].borrow().enabled, "of one that is gone");
                // A queue without an owner would see that this is no chain.
                guest.offer(9);
                reactor.sleep(Duration::from_millis(5)).await;
                assert!(device.disk.trouble().is_none());
            }
        });
    }

    #[test]
    fn where_a_ring_stands_that_is_lost_is_not_said() {
        run(|reactor| async move {
            let disk = Rc::into_inner(disk(&reactor, Level::Raid0, 2).await).unwrap();
            let (graveyard, _retired) = mpsc::channel();
            let device = Device::new(disk, 2, graveyard);
            let guest = Guest::new(4);
            *device.memory.borrow_mut() = guest.memory.clone();
            let setup = guest.setup(0);
            let complete = move |vring: &mut Vring| {
                (vring.size, vring.addresses) = (setup.size, Some(setup.addresses));
                (vring.started, vring.enabled) = (true, true);
            };
            device.change(0, complete).await.unwrap();
            device.stop_ring(1).await.unwrap();
            guest.memory.alarm().unwrap().ring();
            for ring in [0, 1] {
                let refused = device.stop_ring(ring).await;
                assert!(matches!(refused, Err(StopError::Fault(Fault::MemoryLost))), "{ring}");
            }
            assert!(device.is_at_rest());
        });
    }

    #[test]
    fn a_bell_that_nobody_rings_any_more_is_not_given_back_by_a_reactor() {
        run(|reactor| async move {
            let disk = Rc::into_inner(disk(&reactor, Level::Raid0, 2).await).unwrap();
            let (graveyard, retired) = mpsc::channel();
            let device = Device::new(disk, 2, graveyard);
            let bell = || {
                let file = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC);
                Bell::new(file.unwrap().into()).unwrap()
            };
            device.set_call(0, Some(bell())).unwrap();
            device.set_error(0, Some(bell())).unwrap();
            device.set_kick(0, Some(bell())).await.unwrap();
            device.set_marked_bell(bell());
            assert_eq!(retired.try_iter().count(), 0);
            device.set_call(0, None).unwrap();
            assert_eq!(retired.try_iter().count(), 1);
            device.disconnect(true).await;
            assert_eq!(retired.try_iter().count(), 3);
        });
    }
}
