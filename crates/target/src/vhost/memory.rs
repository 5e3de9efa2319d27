//! Guest memory: mapped once, looked up by address, never trusted.
//!
//! The guest, and the program that runs it, may change every
//! byte at any time, so bytes are read once and only through [`Window`] (atomic accesses) or as a
//! [`Buffer`] that the engine copies from or hands to the kernel.
//!
//! Invariants:
//! - a mapping lives as long as any view of it: every view is a [`Buffer`] slice of the region's
//!   root buffer, which keeps the mapping;
//! - every address and length from outside is compared with the region that is said to hold it
//!   before a pointer is made from it;
//! - a region lies inside its file when it is mapped. A front end (the program that runs the guest,
//!   not the guest) can shrink the file afterwards, where that is not sealed: then the region is
//!   lost (`sigbus.rs`), and nothing else is.

use std::cell::Cell;
use std::ffi::c_void;
use std::fs::File;
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt;
use std::ptr::NonNull;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU16, AtomicU32, AtomicU64, Ordering};

use ashlar_format::units::to_usize;
use ashlar_reactor::buffer::Buffer;
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::vhost::graveyard::{Graveyard, Kept};
use crate::vhost::sigbus::{Alarm, Watched};

/// Most regions of one guest; each look-up may look at all of them.
pub(crate) const REGIONS_MAX: usize = 32;
/// Page size assumed where a file does not name a larger one.
const PAGE_BYTES: u64 = 4096;
/// Largest page of any huge-page file system.
const HUGE_PAGE_BYTES_MAX: u64 = 1 << 30;

/// Local file systems, as statfs(2) names them: ext2 to ext4, XFS, Btrfs, F2FS, bcachefs, ZFS, and
/// ramfs.
const LOCAL: [u32; 7] =
    [0xef53, 0x5846_5342, 0x9123_683e, 0xf2f5_2010, 0xca45_1a4e, 0x2fc1_2fc1, 0x8584_58f6];

/// Why guest memory could not be mapped. The front end is at fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MemoryError {
    #[error("guest memory must be a regular file, a memfd or a huge-page file")]
    NotAFile,
    #[error(
        "guest memory in a file system that a program or another host may hold up: use a memfd, a \
         huge-page file, or a file on tmpfs or on a local disk"
    )]
    NotLocal,
    #[error("a region ends at byte {end} of a file of {file} bytes")]
    BeyondFile { end: u64, file: u64 },
    #[error("a region of {len} bytes at {guest:#x} overflows or is empty")]
    Range { guest: u64, len: u64 },
    #[error("regions overlap at {guest:#x}")]
    Overlap { guest: u64 },
    #[error("more than {REGIONS_MAX} regions")]
    TooMany,
    #[error("there is no such region at {guest:#x}")]
    Unknown { guest: u64 },
    #[error("cannot map: {0}")]
    Map(#[from] std::io::Error),
}

/// Where a region is, in the three worlds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// As the guest's driver knows it.
    pub(crate) guest: u64,
    /// As the front end knows it; rings are named by these addresses.
    pub(crate) user: u64,
    pub(crate) len: u64,
    /// In the file.
    pub(crate) offset: u64,
}

impl Place {
    fn check(self) -> Result<(), MemoryError> {
        let ends = [
            self.guest.checked_add(self.len),
            self.user.checked_add(self.len),
            self.offset.checked_add(self.len),
        ];
        if self.len == 0 || ends.contains(&None) {
            return Err(MemoryError::Range { guest: self.guest, len: self.len });
        }
        Ok(())
    }
}

/// Pages of a file in this process; unmapped when dropped.
pub(crate) struct Mapping {
    /// Ends before the pages do.
    watched: Watched,
    pages: Pages,
}

struct Pages {
    start: NonNull<c_void>,
    len: usize,
}

// SAFETY: a mapping is an address range that this value alone gives back; no thread is special.
unsafe impl Send for Pages {}
// SAFETY: all that a reference to it tells is where it is.
unsafe impl Sync for Pages {}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `start` and `len` are those of the `mmap` in `MappedRegion::map`. Views of it
        // hold a `Kept`, which counts its mapping, so there are none left on any reactor.
        let unmapped = unsafe { rustix::mm::munmap(self.start.as_ptr(), self.len) };
        debug_assert!(unmapped.is_ok(), "our own mapping: {unmapped:?}");
    }
}

/// A region that is mapped and not yet known to the reactors. Mapping can be slow, so the socket's
/// thread does it, once for all of them.
#[derive(Clone)]
pub(crate) struct MappedRegion {
    place: Place,
    mapping: Arc<Mapping>,
    /// From the start of the mapping to the start of the region: huge pages start earlier.
    lead: usize,
}

impl MappedRegion {
    /// `alarm`: rings if the file loses what is mapped.
    pub(crate) fn map(
        file: &File,
        place: Place,
        alarm: &Arc<Alarm>,
    ) -> Result<MappedRegion, MemoryError> {
        place.check()?;
        // Of the kernel's own before anything that a program's file system would be asked.
        let is_local = is_local(file)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(MemoryError::NotAFile);
        }
        if !is_local {
            return Err(MemoryError::NotLocal);
        }
        let end = place.offset.saturating_add(place.len);
        if end > metadata.len() {
            return Err(MemoryError::BeyondFile { end, file: metadata.len() });
        }
        let page = match metadata.blksize() {
            size if size.is_power_of_two() => size.clamp(PAGE_BYTES, HUGE_PAGE_BYTES_MAX),
            _ => PAGE_BYTES,
        };
        // 2 MiB pages, region at 3 MiB of 2 MiB: mapped from 2 MiB to 6 MiB, lead 1 MiB. The file
        // ends on a page, so that rounding up stays in the file's last page.
        let from = place.offset - place.offset % page;
        let range = MemoryError::Range { guest: place.guest, len: place.len };
        let len = to_usize(end.checked_next_multiple_of(page).ok_or(range)? - from);
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                len,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                file,
                from,
            )
        };
        let start = start.map_err(|error| MemoryError::Map(error.into()))?;
        let start = NonNull::new(start).ok_or(MemoryError::NotAFile)?;
        let pages = Pages { start, len };
        let watched = Watched::new(start.as_ptr(), len, to_usize(page), alarm)?;
        let mapping = Arc::new(Mapping { watched, pages });
        // A crash of ours is no reason to write a guest's memory to a disk.
        // SAFETY: the range is that of the mapping just made; the advice changes no content.
        let advised = unsafe { rustix::mm::madvise(start.as_ptr(), len, Advice::LinuxDontDump) };
        debug_assert!(advised.is_ok(), "our own mapping: {advised:?}");
        Ok(MappedRegion { place, mapping, lead: to_usize(place.offset - from) })
    }

    /// All of it, where it is not the guest's.
    pub(crate) fn adopt(self, graveyard: &Graveyard) -> Window {
        Window::new(Region::adopt(self, graveyard).root)
    }
}

/// Whether the kernel has the file's pages by itself. A reactor that touches one of a program's own
/// file system (FUSE), or of another host's, would wait for that, and with it all its guests.
fn is_local(file: &File) -> Result<bool, std::io::Error> {
    // Only files in memory have seals: memfds, and those on tmpfs or hugetlbfs.
    if rustix::fs::fcntl_get_seals(file).is_ok() {
        return Ok(true);
    }
    let system = rustix::fs::fstatfs(file)?.f_type;
    Ok(u32::try_from(system).is_ok_and(|its| LOCAL.contains(&its)))
}

/// A region as the reactor knows it.
#[derive(Clone)]
struct Region {
    place: Place,
    /// All of it. Views are slices of this, so that none needs an allocation.
    root: Buffer,
}

impl Region {
    fn adopt(mapped: MappedRegion, graveyard: &Graveyard) -> Region {
        let MappedRegion { place, mapping, lead } = mapped;
        let len = to_usize(place.len);
        let pages = &mapping.pages;
        assert!(lead <= pages.len && len <= pages.len - lead);
        // SAFETY: `lead` is inside the mapping, as asserted.
        let start = unsafe { pages.start.cast::<u8>().add(lead) };
        let kept = Kept::new(mapping, graveyard);
        // SAFETY: `start..start + len` is inside the mapping, as asserted, which is readable and
        // writable and is kept by `kept`.
        let root = unsafe { Buffer::foreign(start, len, Rc::new(kept)) };
        Region { place, root }
    }

    /// A view at `offset` from the start of the region, if it has so much.
    fn view(&self, offset: u64, len: u64) -> Option<Buffer> {
        let end = offset.checked_add(len)?;
        (end <= self.place.len).then(|| self.root.slice(to_usize(offset)..to_usize(end)))
    }
}

/// All memory of one guest. Never changed: a new table is a new value, and whoever still works with
/// the old one keeps it.
#[derive(Default)]
pub(crate) struct GuestMemory {
    regions: Vec<Region>,
    /// Of all regions: they are of one front end.
    alarm: Option<Arc<Alarm>>,
    /// The region that held the last address: nearly always the next one's too.
    last_hit: Cell<usize>,
}

impl GuestMemory {
    pub(crate) fn new(
        mapped: Vec<MappedRegion>,
        graveyard: &Graveyard,
    ) -> Result<GuestMemory, MemoryError> {
        mapped
            .into_iter()
            .try_fold(GuestMemory::default(), |memory, mapped| memory.with(mapped, graveyard))
    }

    /// This memory and one region more.
    pub(crate) fn with(
        &self,
        mapped: MappedRegion,
        graveyard: &Graveyard,
    ) -> Result<GuestMemory, MemoryError> {
        let place = mapped.place;
        if self.regions.len() >= REGIONS_MAX {
            return Err(MemoryError::TooMany);
        }
        // No sum overflows: `Place::check` saw to it.
        let overlaps = |known: &Region| {
            let known = known.place;
            place.guest < known.guest + known.len && known.guest < place.guest + place.len
        };
        if self.regions.iter().any(overlaps) {
            return Err(MemoryError::Overlap { guest: place.guest });
        }
        let mut regions = self.regions.clone();
        let alarm = Some(mapped.mapping.watched.alarm().clone());
        regions.push(Region::adopt(mapped, graveyard));
        Ok(GuestMemory { regions, alarm, last_hit: Cell::new(0) })
    }

    /// This memory without one region; its offset in the file is not compared.
    pub(crate) fn without(&self, place: Place) -> Result<GuestMemory, MemoryError> {
        let same = |region: &Region| {
            let known = region.place;
            (known.guest, known.user, known.len) == (place.guest, place.user, place.len)
        };
        let at = self.regions.iter().position(same);
        let at = at.ok_or(MemoryError::Unknown { guest: place.guest })?;
        let mut regions = self.regions.clone();
        regions.remove(at);
        Ok(GuestMemory { regions, alarm: self.alarm.clone(), last_hit: Cell::new(0) })
    }

    /// Rings when some of it is lost; `None`: there was none yet.
    pub(crate) fn alarm(&self) -> Option<&Arc<Alarm>> {
        self.alarm.as_ref()
    }

    fn region_of(&self, guest: u64) -> Option<&Region> {
        // Below the start the difference wraps to something huge.
        let holds = |region: &Region| guest.wrapping_sub(region.place.guest) < region.place.len;
        if let Some(region) = self.regions.get(self.last_hit.get())
            && holds(region)
        {
            return Some(region);
        }
        let at = self.regions.iter().position(holds)?;
        self.last_hit.set(at);
        self.regions.get(at)
    }

    /// The guest's bytes at an address of the guest, if they all lie in one region.
    pub(crate) fn view(&self, guest: u64, len: u64) -> Option<Buffer> {
        let region = self.region_of(guest)?;
        region.view(guest.wrapping_sub(region.place.guest), len)
    }

    /// As much of `guest..guest + len` as the region of its first byte holds.
    pub(crate) fn view_start(&self, guest: u64, len: u64) -> Option<Buffer> {
        let region = self.region_of(guest)?;
        let offset = guest.wrapping_sub(region.place.guest);
        region.view(offset, len.min(region.place.len - offset))
    }

    /// Begins to fetch a line of the guest's memory into this core's cache, if it is there.
    pub(crate) fn prefetch(&self, guest: u64) {
        if let Some(region) = self.region_of(guest) {
            let offset = guest.wrapping_sub(region.place.guest);
            prefetch(region.root.as_ptr().wrapping_add(to_usize(offset)));
        }
    }

    /// The guest's bytes at an address of the front end, if they all lie in one region.
    pub(crate) fn view_of_user(&self, user: u64, len: u64) -> Option<Buffer> {
        let region = self.region_of_user(user)?;
        region.view(user.wrapping_sub(region.place.user), len)
    }

    /// The guest's address of a byte that the front end knows by one of its own.
    pub(crate) fn guest_of_user(&self, user: u64) -> Option<u64> {
        let place = self.region_of_user(user)?.place;
        // No sum overflows: `Place::check` saw to it.
        Some(place.guest + user.wrapping_sub(place.user))
    }

    fn region_of_user(&self, user: u64) -> Option<&Region> {
        let holds = |region: &&Region| user.wrapping_sub(region.place.user) < region.place.len;
        self.regions.iter().find(holds)
    }

    /// The first address behind all regions, as the guest's driver counts.
    pub(crate) fn end(&self) -> u64 {
        let ends = self.regions.iter().map(|region| region.place.guest + region.place.len);
        ends.max().unwrap_or(0)
    }
}

/// Makes another's descriptor lead to the same as `to`.
pub(crate) fn replace(descriptor: RawFd, to: &impl AsFd) -> Result<(), rustix::io::Errno> {
    // SAFETY: the caller's value owns the descriptor and is alive; this one is forgotten at once,
    // so that it stays the only one that closes it.
    let mut its = ManuallyDrop::new(unsafe { OwnedFd::from_raw_fd(descriptor) });
    rustix::io::dup3(to, &mut its, rustix::io::DupFlags::CLOEXEC)
}

/// A hint: harmless at any address.
fn prefetch(at: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch reads nothing that could be seen and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(at.cast());
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = at;
}

/// A view of guest memory that is read and written in atomic pieces, each exactly once.
///
/// Offsets are the device's own arithmetic, so a wrong one is our bug and panics; whatever comes
/// from the guest is compared before it becomes an offset.
#[derive(Clone, Debug)]
pub(crate) struct Window(Buffer);

impl Window {
    /// `None` if the view does not start at a multiple of `align` bytes.
    pub(crate) fn aligned(view: Buffer, align: usize) -> Option<Window> {
        view.as_ptr().addr().is_multiple_of(align).then_some(Window(view))
    }

    pub(crate) fn new(view: Buffer) -> Window {
        Window(view)
    }

    /// In bytes.
    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// A part of it, which it has.
    pub(crate) fn part(&self, start: u64, len: u64) -> Window {
        Window(self.0.slice(to_usize(start)..to_usize(start + len)))
    }

    /// A pointer to `T` at `offset`, checked to be inside and aligned.
    fn place<T>(&self, offset: usize) -> *mut T {
        let end = offset.checked_add(size_of::<T>());
        assert!(end.is_some_and(|end| end <= self.0.len()), "{offset} of {}", self.0.len());
        let place = self.0.as_ptr().wrapping_add(offset).cast::<T>();
        assert!(place.is_aligned());
        place
    }

    pub(crate) fn load_u16(&self, offset: usize, order: Ordering) -> u16 {
        // SAFETY: `place` checked bounds and alignment; the view keeps the memory mapped. Other
        // accesses of this process to ring memory are atomic too.
        let atomic = unsafe { AtomicU16::from_ptr(self.place(offset)) };
        u16::from_le(atomic.load(order))
    }

    pub(crate) fn store_u16(&self, offset: usize, value: u16, order: Ordering) {
        #[cfg(test)]
        tests::burn();
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU16::from_ptr(self.place(offset)) };
        atomic.store(value.to_le(), order);
    }

    pub(crate) fn load_u32(&self, offset: usize, order: Ordering) -> u32 {
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU32::from_ptr(self.place(offset)) };
        u32::from_le(atomic.load(order))
    }

    pub(crate) fn store_u32(&self, offset: usize, value: u32, order: Ordering) {
        #[cfg(test)]
        tests::burn();
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU32::from_ptr(self.place(offset)) };
        atomic.store(value.to_le(), order);
    }

    pub(crate) fn store_u8(&self, offset: usize, value: u8) {
        #[cfg(test)]
        tests::burn();
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU8::from_ptr(self.place(offset)) };
        atomic.store(value, Ordering::Release);
    }

    pub(crate) fn store_u64(&self, offset: usize, value: u64) {
        #[cfg(test)]
        tests::burn();
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU64::from_ptr(self.place(offset)) };
        atomic.store(value.to_le(), Ordering::Release);
    }

    /// Sets bits that others set and clear at the same time.
    pub(crate) fn set_bits(&self, offset: usize, bits: u8, order: Ordering) {
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU8::from_ptr(self.place(offset)) };
        atomic.fetch_or(bits, order);
    }

    pub(crate) fn load_u64(&self, offset: usize) -> u64 {
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU64::from_ptr(self.place(offset)) };
        u64::from_le(atomic.load(Ordering::Relaxed))
    }

    pub(crate) fn load_u8(&self, offset: usize) -> u8 {
        // SAFETY: as in `load_u16`.
        let atomic = unsafe { AtomicU8::from_ptr(self.place(offset)) };
        atomic.load(Ordering::Relaxed)
    }

    /// Begins to fetch a line.
    pub(crate) fn prefetch(&self, offset: usize) {
        prefetch(self.0.as_ptr().wrapping_add(offset));
    }

    /// Copies bytes out: by eight where address and length allow it, else one by one.
    pub(crate) fn load_bytes(&self, offset: usize, out: &mut [u8]) {
        let start = self.0.as_ptr().addr().wrapping_add(offset);
        let whole = if start.is_multiple_of(align_of::<AtomicU64>()) { out.len() & !7 } else { 0 };
        let (eights, ones) = out.split_at_mut(whole);
        let mut at = offset;
        for eight in eights.chunks_exact_mut(8) {
            eight.copy_from_slice(&self.load_u64(at).to_le_bytes());
            at += 8;
        }
        for one in ones {
            *one = self.load_u8(at);
            at += 1;
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::sync::mpsc;

    use super::*;
    use crate::vhost::graveyard::Retired;

    thread_local! {
        /// Stores until this thread's work ends as if its process were killed.
        static FUSE: Cell<Option<u32>> = const { Cell::new(None) };
    }

    struct Killed;

    /// Before each store through a [`Window`].
    pub(super) fn burn() {
        match FUSE.get() {
            None => {}
            Some(0) => std::panic::resume_unwind(Box::new(Killed)),
            Some(left) => FUSE.set(Some(left - 1)),
        }
    }

    /// Does `work` up to its store number `stores`; `None`: it did not come to its end.
    pub(crate) fn killed_after<T>(stores: u32, work: impl FnOnce() -> T) -> Option<T> {
        FUSE.set(Some(stores));
        let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(work));
        FUSE.set(None);
        done.map_err(|why| {
            if !why.is::<Killed>() {
                std::panic::resume_unwind(why)
            }
        })
        .ok()
    }

    pub(crate) fn memfd(bytes: u64) -> File {
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
        file.set_len(bytes).unwrap();
        file
    }

    pub(crate) fn place(guest: u64, len: u64, offset: u64) -> Place {
        Place { guest, user: guest + (1 << 40), len, offset }
    }

    fn map(file: &File, place: Place) -> Result<MappedRegion, MemoryError> {
        MappedRegion::map(file, place, &Alarm::new().unwrap())
    }

    /// Regions one after the other in one file.
    pub(crate) fn memory(ranges: &[(u64, u64)]) -> (GuestMemory, mpsc::Receiver<Retired>) {
        let file = memfd(ranges.iter().map(|(_, len)| len).sum());
        let (graveyard, retired) = mpsc::channel();
        let mut offset = 0;
        let mapped = ranges.iter().map(|&(guest, len)| {
            offset += len;
            map(&file, place(guest, len, offset - len)).unwrap()
        });
        (GuestMemory::new(mapped.collect(), &graveyard).unwrap(), retired)
    }

    #[test]
    fn only_ranges_inside_one_region_are_found() {
        let (memory, _) = memory(&[(0, 0xa000), (0x10000, 0x4000), (0x14000, 0x1000)]);
        let found = |guest, len| memory.view(guest, len).is_some();
        assert!(
            found(0, 0xa000) && found(0x9fff, 1) && found(0x13fff, 1) && found(0x14000, 0x1000)
        );
        assert!(!found(0, 0xa001) && !found(0xa000, 1) && !found(0xffff, 2) && !found(0x15000, 1));
        assert!(!found(u64::MAX, 2) && !found(1, u64::MAX) && !found(0x13fff, 2));
        assert_eq!(memory.view_start(0x13000, 0x2000).unwrap().len(), 0x1000);
        assert!(memory.view_of_user((1 << 40) + 0x10000, 0x4000).is_some());
        assert!(memory.view_of_user(0x10000, 1).is_none());
    }

    #[test]
    fn a_region_must_lie_in_its_file() {
        let file = memfd(0x3000);
        assert!(map(&file, place(0, 0x2000, 0x1000)).is_ok());
        for wrong in [
            place(0, 0x2001, 0x1000),
            place(0, 0, 0),
            place(0, 0x1000, u64::MAX),
            Place { guest: u64::MAX, user: 0, len: 2, offset: 0 },
        ] {
            assert!(map(&file, wrong).is_err(), "{wrong:?}");
        }
        let null = File::options().read(true).write(true).open("/dev/zero").unwrap();
        let refused = map(&null, place(0, 0x1000, 0));
        assert!(matches!(refused, Err(MemoryError::NotAFile)));
    }

    #[test]
    fn a_region_is_in_memory_or_on_a_local_disk() {
        let huge = rustix::fs::MemfdFlags::HUGETLB | rustix::fs::MemfdFlags::HUGE_2MB;
        let huge = File::from(rustix::fs::memfd_create("guest", huge).unwrap());
        huge.set_len(2 << 20).unwrap();
        let shared = tempfile::tempfile_in("/dev/shm").unwrap();
        shared.set_len(0x1000).unwrap();
        let disk = tempfile::tempfile_in(env!("CARGO_MANIFEST_DIR")).unwrap();
        disk.set_len(0x1000).unwrap();
        for file in [memfd(0x1000), huge, shared] {
            assert!(map(&file, place(0, 0x1000, 0)).is_ok(), "{file:?}");
        }
        // In a container it may be of no one file system.
        let overlay = rustix::fs::fstatfs(&disk).unwrap().f_type == 0x794c_7630;
        assert_eq!(map(&disk, place(0, 0x1000, 0)).is_ok(), !overlay);
        // Regular, and of no disk.
        let own = File::open("/proc/self/maps").unwrap();
        assert!(matches!(map(&own, place(0, 0x1000, 0)), Err(MemoryError::NotLocal)));
    }

    #[test]
    fn regions_do_not_overlap_and_come_and_go() {
        let (memory, retired) = memory(&[(0x1000, 0x1000)]);
        let (graveyard, _) = mpsc::channel();
        let file = memfd(0x4000);
        let again = map(&file, place(0x1fff, 0x1000, 0)).unwrap();
        assert!(matches!(memory.with(again, &graveyard), Err(MemoryError::Overlap { .. })));
        let next = map(&file, place(0x2000, 0x1000, 0)).unwrap();
        let both = memory.with(next, &graveyard).unwrap();
        assert!(both.view(0x2000, 1).is_some() && memory.view(0x2000, 1).is_none());
        assert!(both.without(place(0x1000, 0x2000, 0)).is_err());
        let second = both.without(place(0x1000, 0x1000, 0)).unwrap();
        assert!(second.view(0x1000, 1).is_none());
        let view = memory.view(0x1000, 16).unwrap();
        drop((memory, both, second));
        assert!(retired.try_recv().is_err(), "a view still needs the mapping");
        drop(view);
        assert!(retired.try_recv().is_ok());
    }

    #[test]
    fn no_more_regions_than_the_limit() {
        let ranges: Vec<(u64, u64)> = (0..REGIONS_MAX as u64).map(|i| (i << 16, 0x1000)).collect();
        let (memory, _retired) = memory(&ranges);
        let (graveyard, _) = mpsc::channel();
        let more = map(&memfd(0x1000), place(1 << 40, 0x1000, 0)).unwrap();
        assert!(matches!(memory.with(more, &graveyard), Err(MemoryError::TooMany)));
    }

    #[test]
    fn bytes_are_copied_at_any_alignment() {
        let (memory, _retired) = memory(&[(0, 0x1000)]);
        let view = memory.view(0, 64).unwrap();
        let content: Vec<u8> = (0..64).collect();
        view.copy_from_slice(&content);
        for offset in 0..9 {
            for len in 0..33 {
                let mut out = vec![0; len];
                Window::new(view.clone()).load_bytes(offset, &mut out);
                assert_eq!(out, &content[offset..offset + len]);
            }
        }
    }
}
