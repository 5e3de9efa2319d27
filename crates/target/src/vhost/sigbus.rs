//! Memory of a front end's file that is not there when it is touched: the file was cut short, or
//! its file system has no page for it. The kernel says so by a SIGBUS, which ends the process, and
//! with it the disks of all other guests; so it is caught here.
//!
//! ```text
//! touch ── SIGBUS ── not watched: the process ends
//!            └────── watched: the alarm of its front end rings, zeroes are mapped from the
//!                    page on, and the touch is done again
//! ```
//!
//! From the alarm on, what is read there may be zeroes, and what is written is nowhere. So the
//! guest is shown nothing any more that was not shown before, and its front end is sent away.
//!
//! Invariants:
//! - the handler takes no lock and allocates nothing: it reads the table below, and calls mmap(2),
//!   munmap(2) and write(2), and where it gives up sigaction(2) and raise(3);
//! - memory is in the table from before it is touched until it is unmapped, so its place does not
//!   change while a thread touches it; one that just changes is another's, and passed over;
//! - nothing is mapped outside of watched mappings, nor over parts of huge pages;
//! - the alarm has rung when the first zeroes can be read.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering, fence};
use std::sync::{Arc, Mutex, PoisonError};

use rustix::event::{EventfdFlags, eventfd};

use crate::vhost::memory::REGIONS_MAX;

/// Most mappings of all front ends: each look of the handler may look at all of them.
const PLACES: usize = 4096;
/// Most of one front end: requests under way keep those that it has given in exchange for others,
/// and it must not take the places of all.
const PLACES_OF_ONE: usize = 4 * REGIONS_MAX;
/// Most bytes that are replaced at once: a kernel that counts all that might ever be used
/// (`vm.overcommit_memory=2`) refuses a guest's whole memory. A multiple of every page size.
const REPLACED_MAX: usize = 1 << 30;

/// Tells that memory of one front end is lost.
pub(crate) struct Alarm {
    has_rung: AtomicBool,
    /// Readable from then on.
    bell: OwnedFd,
}

impl Alarm {
    pub(crate) fn new() -> std::io::Result<Arc<Alarm>> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Alarm { has_rung: AtomicBool::new(false), bell }))
    }

    #[inline]
    pub(crate) fn has_rung(&self) -> bool {
        self.has_rung.load(Ordering::Acquire)
    }

    /// By the handler, which may have interrupted anything.
    pub(crate) fn ring(&self) {
        self.has_rung.store(true, Ordering::SeqCst);
        let one = 1u64;
        // A bell that is full has rung already.
        // SAFETY: eight bytes of a number that lives on; the file is open as long as this value.
        let _ = unsafe { libc::write(self.bell.as_raw_fd(), (&raw const one).cast(), 8) };
    }
}

impl AsFd for Alarm {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.bell.as_fd()
    }
}

/// One watched mapping.
struct Place {
    /// Counts changes, twice each: odd while one is being made.
    changes: AtomicUsize,
    start: AtomicUsize,
    /// 0: the place is free.
    end: AtomicUsize,
    page_bytes: AtomicUsize,
    alarm: AtomicPtr<Alarm>,
}

/// The same, as it was at one time.
struct Found {
    start: usize,
    end: usize,
    page_bytes: usize,
    alarm: *const Alarm,
}

static TABLE: [Place; PLACES] = [const { Place::free() }; PLACES];
/// Held by who changes the table; never by the handler.
static CHANGING: Mutex<()> = Mutex::new(());

impl Place {
    const fn free() -> Place {
        Place {
            changes: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            end: AtomicUsize::new(0),
            page_bytes: AtomicUsize::new(1),
            alarm: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// The caller holds [`CHANGING`].
    fn set(&self, to: &Found) {
        let changes = self.changes.load(Ordering::Relaxed);
        self.changes.store(changes.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        self.start.store(to.start, Ordering::Relaxed);
        self.end.store(to.end, Ordering::Relaxed);
        self.page_bytes.store(to.page_bytes, Ordering::Relaxed);
        self.alarm.store(to.alarm.cast_mut(), Ordering::Relaxed);
        self.changes.store(changes.wrapping_add(2), Ordering::Release);
    }

    /// `None`: it is being changed.
    fn get(&self) -> Option<Found> {
        let before = self.changes.load(Ordering::Acquire);
        let found = Found {
            start: self.start.load(Ordering::Relaxed),
            end: self.end.load(Ordering::Relaxed),
            page_bytes: self.page_bytes.load(Ordering::Relaxed),
            alarm: self.alarm.load(Ordering::Relaxed),
        };
        fence(Ordering::Acquire);
        let after = self.changes.load(Ordering::Relaxed);
        (before == after && before.is_multiple_of(2)).then_some(found)
    }
}

/// A mapping is watched until this is dropped, which has to be before it is unmapped.
pub(crate) struct Watched {
    place: &'static Place,
    alarm: Arc<Alarm>,
}

impl Watched {
    /// Watches `len` bytes from `start`, a mapping of pages of `page_bytes`.
    pub(crate) fn new(
        start: *mut c_void,
        len: usize,
        page_bytes: usize,
        alarm: &Arc<Alarm>,
    ) -> std::io::Result<Watched> {
        assert!(len > 0 && page_bytes.is_power_of_two());
        catch()?;
        let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        let too_many = |most, whose| {
            std::io::Error::other(format!("more than {most} regions of {whose} are in use"))
        };
        let own = Arc::as_ptr(alarm).cast_mut();
        let is_own = |place: &&Place| place.alarm.load(Ordering::Relaxed) == own;
        if TABLE.iter().filter(is_own).count() >= PLACES_OF_ONE {
            return Err(too_many(PLACES_OF_ONE, "the front end"));
        }
        let free = |place: &&Place| place.end.load(Ordering::Relaxed) == 0;
        let place = TABLE.iter().find(free).ok_or_else(|| too_many(PLACES, "guests"))?;
        let (start, alarm) = (start.addr(), alarm.clone());
        place.set(&Found { start, end: start + len, page_bytes, alarm: Arc::as_ptr(&alarm) });
        Ok(Watched { place, alarm })
    }

    pub(crate) fn alarm(&self) -> &Arc<Alarm> {
        &self.alarm
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        let _changing = CHANGING.lock().unwrap_or_else(PoisonError::into_inner);
        self.place.set(&Found { start: 0, end: 0, page_bytes: 1, alarm: ptr::null() });
    }
}

/// Sets the handler up, once for the process: a program that is started in its place has none.
fn catch() -> std::io::Result<()> {
    static CAUGHT: Mutex<bool> = Mutex::new(false);
    let mut caught = CAUGHT.lock().unwrap_or_else(PoisonError::into_inner);
    if *caught {
        return Ok(());
    }
    // The stack of its own that Rust gives each thread for its own handlers.
    set_action(on_sigbus as *const () as usize, libc::SA_SIGINFO | libc::SA_ONSTACK)?;
    *caught = true;
    Ok(())
}

/// What is done about the signal from now on: [`on_sigbus`], or what the kernel does by itself.
fn set_action(handler: libc::sighandler_t, flags: c_int) -> std::io::Result<()> {
    // SAFETY: zeroes are a value of it: no flags, and no other signals that wait meanwhile.
    let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
    (action.sa_sigaction, action.sa_flags) = (handler, flags);
    // SAFETY: the action is there; its handler keeps to what a handler may do.
    let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, ptr::null_mut()) };
    if result == 0 { Ok(()) } else { Err(std::io::Error::last_os_error()) }
}

extern "C" fn on_sigbus(_signal: c_int, info: *mut libc::siginfo_t, _context: *mut c_void) {
    // SAFETY: the kernel gives each handler of this kind the place of its description, and those of
    // faults have an address; errno is each thread's own.
    let (code, address, errno) =
        unsafe { ((*info).si_code, (*info).si_addr(), libc::__errno_location()) };
    // SAFETY: as above.
    let errno_before = unsafe { *errno };
    // Memory that is broken, and signals that someone sent, are other things.
    if code != libc::BUS_ADRERR || !replace(address.addr()) {
        // It waits until this handler returns, and ends the process then, whether or not something
        // is touched again.
        let _ = set_action(libc::SIG_DFL, 0);
        // SAFETY: a signal to this thread, which is all that it does.
        let _ = unsafe { libc::raise(libc::SIGBUS) };
    }
    // SAFETY: as above.
    unsafe { *errno = errno_before };
}

/// Puts zeroes where nothing is, if the address is watched. Much of what follows in the mapping
/// goes too: a file that was cut short has nothing there, and page by page there would soon be more
/// mappings than the kernel allows. Where so much cannot be had, it is one page.
fn replace(address: usize) -> bool {
    let holds = |found: &Found| (found.start..found.end).contains(&address);
    let Some(found) = TABLE.iter().filter_map(Place::get).find(holds) else { return false };
    // SAFETY: this thread touches the mapping, so that it is there, and with it its `Watched`,
    // which keeps the alarm.
    unsafe { &*found.alarm }.ring();
    let from = address - (address - found.start) % found.page_bytes;
    let most = REPLACED_MAX.min(found.end - from);
    // Not tried in place: a kernel that finds too late that it has too little leaves a hole there.
    let len = if can_be_had(most) { most } else { found.page_bytes };
    let start = ptr::with_exposed_provenance_mut(from);
    // SAFETY: inside of a mapping that is there, as above, and whose bytes may change at any time.
    let mapped = unsafe { libc::mmap(start, len, RW, ZEROES | libc::MAP_FIXED, -1, 0) };
    mapped != libc::MAP_FAILED
}

const RW: c_int = libc::PROT_READ | libc::PROT_WRITE;
const ZEROES: c_int = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;

/// Whether the kernel gives so many bytes to who asks for them now.
fn can_be_had(len: usize) -> bool {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, RW, ZEROES, -1, 0) };
    // SAFETY: the same, which nobody else knows.
    start != libc::MAP_FAILED && unsafe { libc::munmap(start, len) } == 0
}

#[cfg(test)]
mod tests;
