//! What is under way, in memory that the front end keeps for us (vhost-user, "Inflight I/O
//! tracking"): when this process is killed, the next one finds there what it has to do again.
//!
//! ```text
//! region   a header and an entry per descriptor, one after the other for each queue
//! log      one queue's section of it, at work: `split` and `packed`, as rings are
//! ```
//!
//! Invariants:
//! - a request is in the log from before it is begun until after the guest can see its answer;
//! - whatever instruction was the last one of a process, a log is whole: each of its changes counts
//!   from one store on. Within a process stores are seen in the order in which they were made, also
//!   by whoever looks after its end, so only the compiler must be kept from exchanging them: all
//!   stores here release;
//! - what is read from a region is compared with its limits. While a ring is served nothing is.

pub(crate) mod split;
pub(crate) mod packed;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use rustix::fs::{MemfdFlags, SealFlags};
use vhost::vhost_user::message::VhostUserInflight;

use crate::vhost::graveyard::Graveyard;
use crate::vhost::memory::{MappedRegion, MemoryError, Place, Window};
use crate::vhost::sigbus::Alarm;

/// Where the parts of queues begin.
const ALIGN: u64 = 64;
/// Of a header and of an entry, in the layout that needs more.
const HEADER_BYTES: u64 = 32;
const ENTRY_BYTES: u64 = 32;
const _: () = assert!(HEADER_BYTES >= packed::HEADER_BYTES as u64);
const _: () = assert!(ENTRY_BYTES >= packed::ENTRY_BYTES as u64);
const _: () = assert!(ENTRY_BYTES >= split::ENTRY_BYTES as u64);
/// In both layouts: feature flags of the region, of which the specification has none, and the
/// version. A flag of ours, in the first queue's: the guest chose write through.
const FEATURES_AT: usize = 0;
const WRITE_THROUGH: u64 = 1 << 63;
/// And since when nobody else has had the volume.
const SINCE: u64 = WRITE_THROUGH - 1;
const VERSION_AT: usize = 8;
const SIZE_AT: usize = 10;
/// Of a log that was never begun, or has nothing to say to who comes next.
const BLANK: u16 = 0;
const VERSION: u16 = 1;

/// Why a region cannot be used. The front end is at fault.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RegionError {
    #[error("a region for {queues} queues of {size}")]
    Shape { queues: u16, size: u16 },
    #[error("a region of {found} bytes, where {needed} are needed")]
    Short { found: u64, needed: u64 },
    #[error("a region at byte {0}, which is not aligned")]
    Alignment(u64),
    #[error("a region in a file that may shrink: F_SEAL_SHRINK is missing")]
    Shrinks,
    #[error(
        "its requests are from before another host had the volume: end that guest, which knows \
         nothing of what was written there"
    )]
    Stale,
    #[error("it cannot be read or written: {0}")]
    File(std::io::Error),
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// How many queues a region is for, and how large their rings may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Shape {
    queues: u16,
    size: u16,
}

impl Shape {
    /// `queues_max`, `size_max`: what the device has.
    pub(crate) fn new(
        queues: u16,
        size: u16,
        (queues_max, size_max): (u16, u16),
    ) -> Result<Shape, RegionError> {
        if !(1..=queues_max).contains(&queues) || !(1..=size_max).contains(&size) {
            return Err(RegionError::Shape { queues, size });
        }
        Ok(Shape { queues, size })
    }

    /// Either layout fits: a front end may ask for a region before it says which one it is.
    fn queue_bytes(self) -> u64 {
        (HEADER_BYTES + u64::from(self.size) * ENTRY_BYTES).next_multiple_of(ALIGN)
    }

    fn bytes(self) -> u64 {
        self.queue_bytes() * u64::from(self.queues)
    }
}

/// Makes a blank region. It cannot change its size, so touching it never is a SIGBUS.
pub(crate) fn create(shape: Shape) -> Result<(VhostUserInflight, File), std::io::Error> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    let file = File::from(rustix::fs::memfd_create("ashlar-inflight", flags)?);
    file.set_len(shape.bytes())?;
    let seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    rustix::fs::fcntl_add_seals(&file, seals)?;
    Ok((VhostUserInflight::new(shape.bytes(), 0, shape.queues, shape.size), file))
}

/// A region that is mapped and not yet known to the reactors.
#[derive(Clone)]
pub(crate) struct MappedInflight {
    shape: Shape,
    mapped: MappedRegion,
}

impl MappedInflight {
    pub(crate) fn map(
        file: &File,
        shape: Shape,
        (offset, len): (u64, u64),
        alarm: &Arc<Alarm>,
    ) -> Result<MappedInflight, RegionError> {
        if len < shape.bytes() {
            return Err(RegionError::Short { found: len, needed: shape.bytes() });
        }
        if !offset.is_multiple_of(ALIGN) {
            return Err(RegionError::Alignment(offset));
        }
        // A back end made the file, which is to seal it; touching what is gone would be a SIGBUS.
        if !rustix::fs::fcntl_get_seals(file).is_ok_and(|its| its.contains(SealFlags::SHRINK)) {
            return Err(RegionError::Shrinks);
        }
        let place = Place { guest: 0, user: 0, len: shape.bytes(), offset };
        Ok(MappedInflight { shape, mapped: MappedRegion::map(file, place, alarm)? })
    }
}

/// Refuses a region in which something was under way when somebody else had the volume, and keeps
/// in it since when nobody else has; 0: not known.
pub(crate) fn admit(file: &File, offset: u64, shape: Shape, since: u64) -> Result<(), RegionError> {
    let at = offset.saturating_add(FEATURES_AT as u64);
    let mut word = [0; size_of::<u64>()];
    file.read_exact_at(&mut word, at).map_err(RegionError::File)?;
    let features = u64::from_ne_bytes(word);
    let (before, since) = (features & SINCE, since & SINCE);
    let is_other = before != 0 && since != 0 && before != since;
    if is_other && is_begun(file, offset, shape, 0..shape.queues) {
        return Err(RegionError::Stale);
    }
    let features = features & !SINCE | since;
    file.write_all_at(&features.to_ne_bytes(), at).map_err(RegionError::File)
}

/// Whether a region has a log of one of these queues that was begun. One that cannot be read has
/// none: who serves its rings refuses it.
pub(crate) fn is_begun(
    file: &impl AsFd,
    offset: u64,
    shape: Shape,
    mut queues: impl Iterator<Item = u16>,
) -> bool {
    queues.any(|index| {
        let mut version = [0; SIZE_AT - VERSION_AT];
        let at = offset.saturating_add(u64::from(index) * shape.queue_bytes() + VERSION_AT as u64);
        let read = rustix::io::pread(file, &mut version[..], at);
        index < shape.queues && read == Ok(version.len()) && version != BLANK.to_ne_bytes()
    })
}

/// A region as a reactor knows it.
pub(crate) struct Inflight {
    shape: Shape,
    region: Window,
}

impl Inflight {
    pub(crate) fn adopt(mapped: MappedInflight, graveyard: &Graveyard) -> Inflight {
        let MappedInflight { shape, mapped } = mapped;
        Inflight { shape, region: mapped.adopt(graveyard) }
    }

    /// The cache mode that a guest chose before. It will not choose again, since it knows nothing
    /// of another process.
    pub(crate) fn is_write_through(&self) -> bool {
        self.region.load_u64(FEATURES_AT) & WRITE_THROUGH != 0
    }

    pub(crate) fn set_write_through(&self, is: bool) {
        let others = self.region.load_u64(FEATURES_AT) & !WRITE_THROUGH;
        self.region.store_u64(FEATURES_AT, others | if is { WRITE_THROUGH } else { 0 });
    }

    /// The section of a queue; `None`: the region is for fewer queues.
    pub(crate) fn of_queue(&self, index: usize) -> Option<Section> {
        let index = u64::try_from(index).ok().filter(|at| *at < u64::from(self.shape.queues))?;
        let region = self.region.part(index * self.shape.queue_bytes(), self.shape.queue_bytes());
        Some(Section { region, size: self.shape.size })
    }
}

/// One queue's section of a region.
#[derive(Clone, Debug)]
pub(crate) struct Section {
    region: Window,
    /// Of the largest ring that it has entries for.
    size: u16,
}

/// What is in a section before its ring is served.
enum Before {
    Blank,
    Log,
}

impl Section {
    /// Nothing is under way, and where the ring stands somebody else knows.
    pub(crate) fn blank(&self) {
        self.region.store_u16(VERSION_AT, BLANK, Ordering::Release);
    }

    /// `None`: nothing that could be of a ring of this size.
    fn find(&self, size: u16) -> Option<Before> {
        if size > self.size {
            return None;
        }
        match self.region.load_u16(VERSION_AT, Ordering::Acquire) {
            BLANK => Some(Before::Blank),
            VERSION if self.region.load_u16(SIZE_AT, Ordering::Relaxed) == size => {
                Some(Before::Log)
            }
            _ => None,
        }
    }

    /// From now on the log counts.
    fn begin(&self, size: u16) {
        self.region.store_u16(SIZE_AT, size, Ordering::Release);
        self.region.store_u16(VERSION_AT, VERSION, Ordering::Release);
    }
}

/// Sorts what was found by when it was popped. Returns the counter for the next, too.
fn in_order<T>(mut found: Vec<(u64, T)>) -> (u64, Vec<T>) {
    found.sort_by_key(|(counter, _)| *counter);
    let next = found.last().map_or(0, |(counter, _)| counter.wrapping_add(1));
    // The next one last, where it is taken from.
    (next, found.into_iter().rev().map(|(_, chain)| chain).collect())
}
