//! Goal: memory that a front end takes away is zeroes from then on, and its own alarm rings; any
//! other SIGBUS ends the process as it always has.
//! Method: files that are cut short while threads read and write what is mapped of them.

use std::fs::File;
use std::os::unix::process::ExitStatusExt;

use rustix::fs::{MemfdFlags, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};

use super::*;

/// A watched mapping of all of a file.
struct Mapped {
    start: usize,
    len: usize,
    watched: Option<Watched>,
}

impl Mapped {
    fn new(file: &File, page_bytes: usize, alarm: &Arc<Alarm>) -> Mapped {
        let mut mapped = Mapped::unwatched(file);
        let start = ptr::with_exposed_provenance_mut(mapped.start);
        mapped.watched = Some(Watched::new(start, mapped.len, page_bytes, alarm).unwrap());
        mapped
    }

    fn unwatched(file: &File) -> Mapped {
        let len = usize::try_from(file.metadata().unwrap().len()).unwrap();
        let (all, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED);
        let flags = flags | MapFlags::NORESERVE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let start = unsafe { rustix::mm::mmap(ptr::null_mut(), len, all, flags, file, 0) };
        Mapped { start: start.unwrap().expose_provenance(), len, watched: None }
    }

    fn byte(&self, at: usize) -> *mut u8 {
        assert!(at < self.len);
        ptr::with_exposed_provenance_mut(self.start + at)
    }

    fn get(&self, at: usize) -> u8 {
        // SAFETY: inside of the mapping.
        unsafe { self.byte(at).read_volatile() }
    }

    fn put(&self, at: usize, value: u8) {
        // SAFETY: inside of the mapping.
        unsafe { self.byte(at).write_volatile(value) };
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        self.watched = None;
        // SAFETY: nobody has a view of it.
        unsafe { rustix::mm::munmap(self.byte(0).cast(), self.len) }.unwrap();
    }
}

fn memfd(bytes: u64, flags: MemfdFlags) -> File {
    let file = File::from(memfd_create("guest", flags | MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    file
}

#[test]
fn one_front_end_does_not_take_the_places_of_all() {
    let file = memfd(4096, MemfdFlags::empty());
    let (greedy, other) = (Alarm::new().unwrap(), Alarm::new().unwrap());
    let mut its: Vec<Mapped> =
        (0..PLACES_OF_ONE).map(|_| Mapped::new(&file, 4096, &greedy)).collect();
    let more = Mapped::unwatched(&file);
    let start = ptr::with_exposed_provenance_mut(more.start);
    assert!(Watched::new(start, more.len, 4096, &greedy).is_err());
    drop(Watched::new(start, more.len, 4096, &other).unwrap());
    its.pop();
    drop(Watched::new(start, more.len, 4096, &greedy).unwrap());
}

#[test]
fn what_is_cut_off_is_zeroes_and_rings_its_own_alarm() {
    let (file, other) = (memfd(8 << 12, MemfdFlags::empty()), memfd(1 << 12, MemfdFlags::empty()));
    let (alarm, others) = (Alarm::new().unwrap(), Alarm::new().unwrap());
    let (mapped, neighbour) =
        (Mapped::new(&file, 4096, &alarm), Mapped::new(&other, 4096, &others));
    (0..8).for_each(|page| mapped.put(page << 12, 7));
    neighbour.put(0, 9);
    file.set_len(3 << 12).unwrap();
    assert!(!alarm.has_rung(), "nobody has touched it");
    assert_eq!(mapped.get((5 << 12) + 77), 0);
    assert!(alarm.has_rung() && !others.has_rung());
    for page in 0..8 {
        assert_eq!(mapped.get(page << 12), if page < 3 { 7 } else { 0 }, "page {page}");
    }
    mapped.put(6 << 12, 8);
    assert_eq!((mapped.get(6 << 12), neighbour.get(0)), (8, 9));
    let mut count = [0; 8];
    assert_eq!(rustix::io::read(&*alarm, &mut count), Ok(8));
}

/// Where none are set aside the first touch is a SIGBUS, else the one after the cut.
#[test]
fn huge_pages_are_replaced_as_a_whole() {
    const HUGE: usize = 2 << 20;
    let file = memfd(4 * HUGE as u64, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB);
    let alarm = Alarm::new().unwrap();
    let mapped = Mapped::new(&file, HUGE, &alarm);
    file.set_len(0).unwrap();
    assert_eq!(mapped.get(2 * HUGE + 12_345), 0);
    assert!(alarm.has_rung());
    (0..4 * HUGE).step_by(4096).for_each(|at| mapped.put(at, 1));
    assert_eq!(mapped.get(2 * HUGE), 1);
}

#[test]
fn threads_may_find_out_at_the_same_time() {
    const PAGES: usize = 512;
    let (file, alarm) = (memfd((PAGES as u64) << 12, MemfdFlags::empty()), Alarm::new().unwrap());
    let mapped = Mapped::new(&file, 4096, &alarm);
    let cut = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let (mapped, cut) = (&mapped, &cut);
            scope.spawn(move || {
                let mut round = 0;
                let mut all_is_cut = false;
                while !all_is_cut {
                    // Looked at first: the last round touches all of what is gone.
                    all_is_cut = cut.load(Ordering::Acquire);
                    let at = |i: usize| ((i * 31 + thread * 97 + round) % PAGES) << 12;
                    (0..PAGES).for_each(|i| mapped.put(at(i), 1));
                    round += 1;
                }
            });
        }
        // Places come and go meanwhile.
        for pages in (0..PAGES as u64).rev() {
            file.set_len(pages << 12).unwrap();
            let passing = memfd(4096, MemfdFlags::empty());
            Mapped::new(&passing, 4096, &alarm).put(0, 1);
        }
        cut.store(true, Ordering::Release);
    });
    assert!(alarm.has_rung());
}

#[test]
fn a_place_is_free_once_its_mapping_is_gone() {
    let (file, alarm) = (memfd(4096, MemfdFlags::empty()), Alarm::new().unwrap());
    let mapped = Mapped::new(&file, 4096, &alarm);
    let place = mapped.watched.as_ref().unwrap().place;
    // Another may take the place at once.
    let is_its = || place.get().is_some_and(|found| found.alarm == Arc::as_ptr(&alarm));
    assert!(is_its());
    drop(mapped);
    assert!(!is_its());
}

const CHILD: &str = "ASHLAR_TEST_SIGBUS";

/// The body of a process of its own: see below.
#[test]
fn another_sigbus() {
    let Some(how) = std::env::var_os(CHILD) else { return };
    let (file, alarm) = (memfd(2 << 12, MemfdFlags::empty()), Alarm::new().unwrap());
    let (watched, not) = (Mapped::new(&file, 4096, &alarm), Mapped::unwatched(&file));
    file.set_len(0).unwrap();
    assert_eq!(watched.get(0), 0);
    println!("watched: {}", alarm.has_rung());
    match how.to_str() {
        Some("touch") => assert_eq!(not.get(4096), 0),
        // SAFETY: a signal to this thread.
        Some("signal") => assert_eq!(unsafe { libc::raise(libc::SIGBUS) }, 0),
        other => panic!("{other:?}"),
    }
    println!("it went on");
}

#[test]
fn another_sigbus_ends_the_process() {
    for how in ["touch", "signal"] {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "vhost::sigbus::tests::another_sigbus", "--nocapture"]);
        let ended = child.env(CHILD, how).output().unwrap();
        let said = String::from_utf8_lossy(&ended.stdout);
        assert!(said.contains("watched: true") && !said.contains("it went on"), "{how}: {said}");
        assert_eq!(ended.status.signal(), Some(libc::SIGBUS), "{how}");
    }
}

/// More than is replaced at once: what follows is found out by the next touch.
#[test]
fn all_of_a_large_mapping_is_replaced_in_the_end() {
    let file = memfd(3 << 30, MemfdFlags::empty());
    let alarm = Alarm::new().unwrap();
    let mapped = Mapped::new(&file, 4096, &alarm);
    file.set_len(0).unwrap();
    for at in [4096, (1 << 30) + 4095, (1 << 30) + 4096, (3 << 30) - 1] {
        mapped.put(at, 1);
        assert_eq!(mapped.get(at), 1);
    }
    assert!(alarm.has_rung());
}
