//! One front end's messages, each turned into a change of the device.
//!
//! Runs on the socket's thread and never touches a ring: whatever concerns the device is a letter
//! to the reactor that it is for, and the reply to the front end waits for the effect.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;

use vhost::vhost_user::message::{
    VHOST_USER_CONFIG_OFFSET, VhostTransferStateDirection, VhostTransferStatePhase,
    VhostUserConfigFlags, VhostUserInflight, VhostUserLog, VhostUserMemoryRegion,
    VhostUserProtocolFeatures, VhostUserShMemConfig, VhostUserSharedMsg,
    VhostUserSingleMemoryRegion, VhostUserVringAddrFlags, VhostUserVringState,
};
use vhost::vhost_user::{Backend, Error, GpuBackend, Result, VhostUserBackendReqHandlerMut};

use crate::export::Usage;
use crate::handed::{self, Region, Told};
use crate::line::Lines;
use crate::vhost::bell::Bell;
use crate::vhost::config::{CONFIG_BYTES, FEATURES, Facts, LOG_ALL, WRITE_BACK_OFFSET, space};
use crate::vhost::device::{Device, Vring};
use crate::vhost::dirty::{DirtyError, MappedDirtyLog};
use crate::vhost::inflight::{self, MappedInflight, Shape};
use crate::vhost::memory::{MappedRegion, Place, REGIONS_MAX};
use crate::vhost::sigbus::Alarm;
use crate::vhost::vring::{RING_SIZE_MAX, RingAddresses, is_ring_size};

pub(crate) struct Session {
    /// None while the volume is elsewhere: what is said is kept for who will serve it.
    lines: Lines<Device>,
    /// Of the disk, as long as nobody serves it.
    facts: Facts,
    /// See [`ExportSpec`](crate::vhost::ExportSpec).
    since: u64,
    /// Rings when something of what it has mapped is lost.
    alarm: Arc<Alarm>,
    /// What the front end has said, to be said again in another process.
    told: Told<OwnedFd>,
}

fn refuse(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::ReqHandlerError(std::io::Error::other(error))
}

fn not_offered<T>() -> Result<T> {
    Err(Error::InvalidOperation("a feature that was not offered"))
}

/// Where in the configuration space an offset is. Cloud Hypervisor and Firecracker count from where
/// the space begins in a device of VirtIO MMIO; it has no more bytes than are before that, so both
/// ways can be told apart.
fn config_place(offset: u32) -> Result<usize> {
    let offset = usize::try_from(offset).map_err(refuse)?;
    Ok(offset.checked_sub(CONFIG_BYTES).unwrap_or(offset))
}

const _: () = assert!(CONFIG_BYTES == VHOST_USER_CONFIG_OFFSET as usize);

fn place_of(region: &VhostUserMemoryRegion) -> Place {
    Place {
        guest: region.guest_phys_addr,
        user: region.user_addr,
        len: region.memory_size,
        offset: region.mmap_offset,
    }
}

/// For the next process.
fn copy(bell: &Option<Bell>) -> Result<Option<OwnedFd>> {
    let copied = bell.as_ref().map(|bell| bell.file().try_clone().map(OwnedFd::from));
    copied.transpose().map_err(refuse)
}

fn told_region(region: &VhostUserMemoryRegion, file: File) -> Region<OwnedFd> {
    let Place { guest, user, len, offset } = place_of(region);
    Region { guest, user, len, offset, file: file.into() }
}

impl Session {
    pub(crate) fn new(
        lines: Lines<Device>,
        facts: Facts,
        since: u64,
        alarm: Arc<Alarm>,
    ) -> Session {
        Session { lines, facts, since, alarm, told: Told::new(facts.queues_max) }
    }

    fn is_served(&self) -> bool {
        !self.lines.all().is_empty()
    }

    /// A ring counts from its kick file on, enabled or not, until the front end has asked where it
    /// stands. The wish to log stays after that: QEMU takes it back with the next start.
    pub(crate) fn usage(&self) -> Usage {
        if self.told.rings.iter().any(|ring| ring.started) {
            Usage::InUse
        } else if self.told.features & LOG_ALL != 0 {
            Usage::Leaving
        } else {
            Usage::Idle
        }
    }

    /// Whether rings that nobody serves have a log from before: by a daemon that was killed, for
    /// one. Where they stand, only who reads that can say; and what it left has to be done first:
    /// else some would be done twice, others never.
    pub(crate) fn is_owing(&self) -> bool {
        let Some(its) = self.told.inflight.as_ref().filter(|_| !self.is_served()) else {
            return false;
        };
        let shape = Shape::new(its.queues, its.size, (self.facts.queues_max, RING_SIZE_MAX));
        let rings = (0..).zip(&self.told.rings).filter(|(_, ring)| ring.started);
        let queues = rings.map(|(index, _)| index);
        shape.is_ok_and(|shape| inflight::is_begun(&its.file, its.offset, shape, queues))
    }

    /// The guest's choice, where nobody else keeps it.
    pub(crate) fn write_back(&self) -> bool {
        self.facts.write_back
    }

    pub(crate) fn set_write_back(&mut self, write_back: bool) {
        self.facts.write_back = write_back;
    }

    /// Messages that ask for it are to be acknowledged.
    pub(crate) fn acknowledges(&self) -> bool {
        self.told.protocol & VhostUserProtocolFeatures::REPLY_ACK.bits() != 0
    }

    /// Has the device that serves a ring do something with it; `None`: nobody serves it.
    fn on_ring<T: Send + 'static, E: std::error::Error + Send + Sync + 'static>(
        &self,
        index: u32,
        work: impl AsyncFnOnce(Rc<Device>, usize) -> std::result::Result<T, E> + Send + 'static,
    ) -> Result<Option<T>> {
        if !self.is_served() {
            return Ok(None);
        }
        let index = usize::try_from(index).map_err(refuse)?;
        let line = self.lines.of_ring(index);
        let done = line.ask_and_wait(move |device| async move { work(device, index).await });
        done.map_err(refuse)?.map(Some).map_err(refuse)
    }

    fn change(&self, index: u32, change: impl FnOnce(&mut Vring) + Send + 'static) -> Result<()> {
        self.on_ring(index, async move |device, ring| device.change(ring, change).await).map(drop)
    }

    fn tell(&mut self, index: u32, change: impl FnOnce(&mut handed::Ring<OwnedFd>)) -> Result<()> {
        let index = usize::try_from(index).map_err(refuse)?;
        change(self.told.rings.get_mut(index).ok_or(Error::InvalidParam)?);
        Ok(())
    }

    /// All that was told, once nothing more will be; where each ring stands, its device says.
    pub(crate) fn take_told(&mut self) -> Result<Told<OwnedFd>> {
        let mut told = std::mem::replace(&mut self.told, Told::new(0));
        if !self.is_served() {
            return Ok(told);
        }
        for (index, ring) in told.rings.iter_mut().enumerate() {
            let base = self.lines.of_ring(index).ask(move |device| device.base(index));
            ring.base = base.map_err(refuse)?.map_err(refuse)?;
        }
        Ok(told)
    }

    /// Says all of it again, to devices that know nothing. Features come before: they concern the
    /// protocol, too. The log comes before the memory: it may be one that is too short for it,
    /// while no ring is at work.
    pub(crate) fn tell_again(&mut self, told: Told<OwnedFd>) -> Result<()> {
        if let Some(handed::Log { len, offset, file }) = told.log {
            self.set_log_base(&VhostUserLog::new(len, offset), file.into())?;
        }
        let place = |region: &Region<OwnedFd>| {
            let Region { guest, len, user, offset, .. } = *region;
            VhostUserMemoryRegion::new(guest, len, user, offset)
        };
        let places: Vec<_> = told.memory.iter().map(place).collect();
        let files = told.memory.into_iter().map(|region| region.file.into()).collect();
        self.set_mem_table(&places, files, None)?;
        if let Some(handed::Inflight { len, offset, queues, size, file }) = told.inflight {
            let region = VhostUserInflight::new(len, offset, queues, size);
            self.set_inflight_fd(&region, file.into())?;
        }
        if let Some(bell) = told.log_bell {
            self.set_log_bell(bell.into())?;
        }
        for (index, ring) in (0..).zip(told.rings) {
            self.tell_ring_again(index, ring)?;
        }
        Ok(())
    }

    fn tell_ring_again(&mut self, index: u8, ring: handed::Ring<OwnedFd>) -> Result<()> {
        let number = u32::from(index);
        if ring.size > 0 {
            self.set_vring_num(number, ring.size)?;
        }
        self.set_vring_base(number, ring.base)?;
        if let Some([descriptors, available, used]) = ring.addresses {
            let mut flags = VhostUserVringAddrFlags::empty();
            flags.set(VhostUserVringAddrFlags::VHOST_VRING_F_LOG, ring.marked.is_some());
            let marked = ring.marked.unwrap_or(0);
            self.set_vring_addr(number, flags, descriptors, used, available, marked)?;
        }
        self.set_vring_call(index, ring.call.map(File::from))?;
        self.set_vring_err(index, ring.error.map(File::from))?;
        if ring.started {
            self.set_vring_kick(index, ring.kick.map(File::from))?;
        }
        self.set_vring_enable(number, ring.enabled)
    }

    fn shape_of(&self, its: &VhostUserInflight) -> Result<Shape> {
        let shape =
            Shape::new(its.num_queues, its.queue_size, (self.facts.queues_max, RING_SIZE_MAX));
        shape.map_err(refuse)
    }

    /// The same change on all reactors. One that refuses it, for a log that its rings need, or is
    /// gone, ends the connection for all.
    fn change_all(
        &self,
        change: impl Fn(&Device) -> std::result::Result<(), DirtyError> + Clone + Send + 'static,
    ) -> Result<()> {
        let changed = self.lines.ask_all(change).map_err(refuse)?;
        changed.into_iter().try_for_each(|changed| changed.map_err(refuse))
    }

    /// A file to ring when pages were marked.
    pub(crate) fn set_log_bell(&mut self, file: File) -> Result<()> {
        let copy = || file.try_clone().map_err(refuse);
        // Whoever serves the rings later is told it, too.
        Bell::rare(copy()?).map_err(refuse)?;
        for line in self.lines.all() {
            let bell = Bell::new(copy()?).map_err(refuse)?;
            line.ask(move |device| device.set_marked_bell(bell)).map_err(refuse)?;
        }
        self.told.log_bell = Some(file.into());
        Ok(())
    }
}

impl VhostUserBackendReqHandlerMut for Session {
    fn set_owner(&mut self) -> Result<()> {
        Ok(())
    }

    /// Deprecated; the specification recommends to ignore it.
    fn reset_owner(&mut self) -> Result<()> {
        Ok(())
    }

    fn reset_device(&mut self) -> Result<()> {
        let reset = |device: Rc<Device>| async move { device.reset().await };
        self.lines.ask_all_and_wait(reset).map_err(refuse)?;
        for ring in &mut self.told.rings {
            (ring.started, ring.enabled, ring.base) = (false, false, 0);
        }
        Ok(())
    }

    fn get_features(&mut self) -> Result<u64> {
        Ok(FEATURES)
    }

    fn set_features(&mut self, features: u64) -> Result<()> {
        if features & !FEATURES != 0 {
            return Err(Error::FeatureMismatch);
        }
        self.change_all(move |device| device.set_features(features))?;
        self.told.features = features;
        Ok(())
    }

    fn get_protocol_features(&mut self) -> Result<VhostUserProtocolFeatures> {
        Ok(VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | VhostUserProtocolFeatures::CONFIGURE_MEM_SLOTS
            | VhostUserProtocolFeatures::BACKEND_REQ
            | VhostUserProtocolFeatures::INFLIGHT_SHMFD
            | VhostUserProtocolFeatures::LOG_SHMFD
            | VhostUserProtocolFeatures::RESET_DEVICE)
    }

    fn set_protocol_features(&mut self, features: u64) -> Result<()> {
        let offered = self.get_protocol_features()?.bits();
        if features & !offered != 0 {
            return Err(Error::FeatureMismatch);
        }
        self.told.protocol = features;
        Ok(())
    }

    fn get_queue_num(&mut self) -> Result<u64> {
        Ok(u64::from(self.facts.queues_max))
    }

    fn set_mem_table(
        &mut self,
        regions: &[VhostUserMemoryRegion],
        files: Vec<File>,
        _postcopy: Option<bool>,
    ) -> Result<Option<Vec<u64>>> {
        let mapped = regions.iter().zip(&files);
        let mapped =
            mapped.map(|(region, file)| MappedRegion::map(file, place_of(region), &self.alarm));
        let mapped = mapped.collect::<std::result::Result<Vec<_>, _>>().map_err(refuse)?;
        self.change_all(move |device| device.replace_memory(mapped.clone()))?;
        let told = regions.iter().zip(files).map(|(region, file)| told_region(region, file));
        self.told.memory = told.collect();
        Ok(None)
    }

    fn get_max_mem_slots(&mut self) -> Result<u64> {
        Ok(REGIONS_MAX as u64)
    }

    fn add_mem_region(
        &mut self,
        region: &VhostUserSingleMemoryRegion,
        file: File,
        _postcopy: Option<bool>,
    ) -> Result<Option<u64>> {
        // A device counts its own; of what is only kept, files are the daemon's.
        if self.told.memory.len() >= REGIONS_MAX {
            return Err(Error::InvalidParam);
        }
        let mapped = MappedRegion::map(&file, place_of(region), &self.alarm).map_err(refuse)?;
        self.change_all(move |device| device.add_memory(mapped.clone()))?;
        self.told.memory.push(told_region(region, file));
        Ok(None)
    }

    fn remove_mem_region(&mut self, region: &VhostUserSingleMemoryRegion) -> Result<()> {
        let place = place_of(region);
        self.change_all(move |device| device.remove_memory(place))?;
        let same = |known: &Region<OwnedFd>| (known.guest, known.user) == (place.guest, place.user);
        self.told.memory.retain(|known| !same(known));
        Ok(())
    }

    fn set_vring_num(&mut self, index: u32, size: u32) -> Result<()> {
        if !is_ring_size(size, self.told.features) {
            return Err(Error::InvalidParam);
        }
        self.change(index, move |vring| vring.size = size)?;
        self.tell(index, |ring| ring.size = size)
    }

    fn set_vring_addr(
        &mut self,
        index: u32,
        flags: VhostUserVringAddrFlags,
        descriptors: u64,
        used: u64,
        available: u64,
        log: u64,
    ) -> Result<()> {
        let addresses = RingAddresses { descriptors, available, used };
        let marked = flags.contains(VhostUserVringAddrFlags::VHOST_VRING_F_LOG).then_some(log);
        self.on_ring(index, async move |device, ring| {
            device.set_addresses(ring, addresses, marked).await
        })?;
        let addresses = Some([descriptors, available, used]);
        self.tell(index, |ring| (ring.addresses, ring.marked) = (addresses, marked))
    }

    fn set_vring_base(&mut self, index: u32, base: u32) -> Result<()> {
        self.change(index, move |vring| vring.base = base)?;
        self.tell(index, |ring| ring.base = base)
    }

    fn get_vring_base(&mut self, index: u32) -> Result<VhostUserVringState> {
        let stopped = self.on_ring(index, async |device, ring| device.stop_ring(ring).await)?;
        let mut base = 0;
        self.tell(index, |ring| {
            // One that nobody serves stands where it was told to.
            base = stopped.unwrap_or(ring.base);
            (ring.started, ring.kick, ring.base) = (false, None, base);
        })?;
        Ok(VhostUserVringState::new(index, base))
    }

    fn set_vring_kick(&mut self, index: u8, file: Option<File>) -> Result<()> {
        // It is also rung by ourselves, to end a wait for it.
        let kick = file.map(Bell::rare).transpose().map_err(refuse)?;
        let told = copy(&kick)?;
        let index = u32::from(index);
        self.on_ring(index, async move |device, ring| device.set_kick(ring, kick).await)?;
        self.tell(index, |ring| (ring.started, ring.kick) = (true, told))
    }

    fn set_vring_call(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let call = file.map(Bell::new).transpose().map_err(refuse)?;
        let told = copy(&call)?;
        let index = u32::from(index);
        self.on_ring(index, async move |device, ring| device.set_call(ring, call))?;
        self.tell(index, |ring| ring.call = told)
    }

    fn set_vring_err(&mut self, index: u8, file: Option<File>) -> Result<()> {
        let error = file.map(Bell::rare).transpose().map_err(refuse)?;
        let told = copy(&error)?;
        let index = u32::from(index);
        self.on_ring(index, async move |device, ring| device.set_error(ring, error))?;
        self.tell(index, |ring| ring.error = told)
    }

    fn set_vring_enable(&mut self, index: u32, enable: bool) -> Result<()> {
        self.change(index, move |vring| vring.enabled = enable)?;
        self.tell(index, |ring| ring.enabled = enable)
    }

    fn get_config(
        &mut self,
        offset: u32,
        size: u32,
        _flags: VhostUserConfigFlags,
    ) -> Result<Vec<u8>> {
        let facts = match self.lines.all().first() {
            Some(line) => line.ask(|device| device.facts()).map_err(refuse)?,
            None => self.facts,
        };
        let start = config_place(offset)?;
        let len = usize::try_from(size).map_err(refuse)?;
        let end = start.checked_add(len).ok_or(Error::InvalidParam)?;
        Ok(space(&facts).get(start..end).ok_or(Error::InvalidParam)?.to_vec())
    }

    /// Only the cache mode can be written; the rest is ignored, as a register would.
    fn set_config(&mut self, offset: u32, data: &[u8], _flags: VhostUserConfigFlags) -> Result<()> {
        let start = config_place(offset)?;
        let at = WRITE_BACK_OFFSET.checked_sub(start);
        if let Some(value) = at.and_then(|at| data.get(at).copied()) {
            let is_on = value != 0;
            self.lines.ask_all(move |device| device.set_write_back(is_on)).map_err(refuse)?;
            self.set_write_back(is_on);
        }
        Ok(())
    }

    /// `peek.rs` takes a copy of this channel; this end of it cannot say what we need to say.
    fn set_backend_req_fd(&mut self, _backend: Backend) {}

    fn set_gpu_socket(&mut self, _gpu_backend: GpuBackend) -> Result<()> {
        not_offered()
    }

    fn get_shared_object(&mut self, _uuid: VhostUserSharedMsg) -> Result<File> {
        not_offered()
    }

    /// Makes a blank region; the front end gives it back at once, and after each new connection.
    fn get_inflight_fd(&mut self, asked: &VhostUserInflight) -> Result<(VhostUserInflight, File)> {
        let shape = self.shape_of(asked)?;
        inflight::create(shape).map_err(refuse)
    }

    fn set_inflight_fd(&mut self, region: &VhostUserInflight, file: File) -> Result<()> {
        let (shape, offset) = (self.shape_of(region)?, region.mmap_offset);
        let range = (offset, region.mmap_size);
        let mapped = MappedInflight::map(&file, shape, range, &self.alarm).map_err(refuse)?;
        inflight::admit(&file, offset, shape, self.since).map_err(refuse)?;
        self.lines.ask_all(move |device| device.set_inflight(mapped.clone())).map_err(refuse)?;
        let VhostUserInflight { mmap_size, mmap_offset, num_queues, queue_size } = *region;
        self.told.inflight = Some(handed::Inflight {
            len: mmap_size,
            offset: mmap_offset,
            queues: num_queues,
            size: queue_size,
            file: file.into(),
        });
        Ok(())
    }

    fn set_device_state_fd(
        &mut self,
        _: VhostTransferStateDirection,
        _: VhostTransferStatePhase,
        _file: File,
    ) -> Result<Option<File>> {
        not_offered()
    }

    fn check_device_state(&mut self) -> Result<()> {
        not_offered()
    }

    fn get_shmem_config(&mut self) -> Result<VhostUserShMemConfig> {
        not_offered()
    }

    fn set_log_base(&mut self, log: &VhostUserLog, file: File) -> Result<()> {
        let (offset, len) = (log.mmap_offset, log.mmap_size);
        let mapped = MappedDirtyLog::map(&file, offset, len, &self.alarm).map_err(refuse)?;
        self.change_all(move |device| device.set_dirty_log(mapped.clone()))?;
        self.told.log = Some(handed::Log { len, offset, file: file.into() });
        Ok(())
    }
}
