//! Goal: a 4 KiB read or write of a healthy array of memory allocates nothing, once everything has
//! been used.
//! Method: an allocator that counts for the thread that is watched, in stretches of requests: what
//! a request allocates is in each of them, what the array does once a second in few. A program of
//! its own, since there is one allocator in each.

#![allow(clippy::unwrap_used, reason = "a test")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::backtrace::Backtrace;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

use ashlar_bench::under::{Layer, Source, Under, UnderSpec};
use ashlar_format::array_superblock::{Level, Policy};
use ashlar_raid::layout::Shape;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;
use ashlar_reactor::wait_list::WaitList;

const BLOCK: u64 = 4096;
const SIZE: u64 = 8 << 20;
const WARM_UP: u64 = 20_000;
const STRETCHES: usize = 10;
const STRETCH: u64 = 1_000;
/// So many stretches may be hit by what is not done for a request.
const HIT_MAX: usize = 4;
/// Of the first allocations, so many are told with where they were made.
const PLACES_MAX: usize = 2;

thread_local! {
    static WATCHING: Cell<bool> = const { Cell::new(false) };
    static COUNTS: Cell<[u64; STRETCHES]> = const { Cell::new([0; STRETCHES]) };
    static NOW: Cell<usize> = const { Cell::new(0) };
    static PLACES: RefCell<Vec<Backtrace>> = const { RefCell::new(Vec::new()) };
}

struct Counting;

fn note() {
    // To look is to allocate: that does not count.
    if !WATCHING.replace(false) {
        return;
    }
    let mut counts = COUNTS.get();
    counts[NOW.get()] += 1;
    COUNTS.set(counts);
    PLACES.with_borrow_mut(|places| {
        if places.len() < PLACES_MAX {
            places.push(Backtrace::force_capture());
        }
    });
    WATCHING.set(true);
}

// SAFETY: the system's allocator does it all; counting touches nothing of it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: the caller keeps the rules of this very function.
        unsafe { System.alloc(layout) }
    }

    unsafe fn realloc(&self, old: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: as in `alloc`.
        unsafe { System.realloc(old, layout, size) }
    }

    unsafe fn dealloc(&self, old: *mut u8, layout: Layout) {
        // SAFETY: as in `alloc`.
        unsafe { System.dealloc(old, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Read,
    Write,
}

struct Job {
    under: Under,
    kind: Kind,
    made: Cell<u64>,
    running: Cell<usize>,
    ended: WaitList,
}

impl Job {
    /// Whether another request is to be made; it is watched, once enough have been made.
    fn next(&self) -> bool {
        let made = self.made.get();
        self.made.set(made + 1);
        let stretch = usize::try_from(made.saturating_sub(WARM_UP) / STRETCH).unwrap();
        WATCHING.set(made >= WARM_UP && stretch < STRETCHES);
        NOW.set(stretch.min(STRETCHES - 1));
        stretch < STRETCHES
    }
}

async fn work(reactor: Reactor, job: Rc<Job>, seed: u64) {
    let (buffer, mut prng) = (reactor.buffer(4096), Prng::from_seed(seed));
    while job.next() {
        let at = prng.below(SIZE / BLOCK) * BLOCK;
        match job.kind {
            Kind::Read => job.under.read(at, buffer.clone().into()).await.unwrap(),
            Kind::Write => job.under.write(at, buffer.clone().into()).await.unwrap(),
        }
    }
    WATCHING.set(false);
    job.running.set(job.running.get() - 1);
    job.ended.wake_all(&reactor);
}

/// How many allocations were made in each stretch.
fn allocations(layer: Layer, kind: Kind, depth: usize) -> [u64; STRETCHES] {
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    COUNTS.set([0; STRETCHES]);
    let its = reactor.clone();
    let measured = reactor.block_on(async move {
        let spec = UnderSpec {
            sources: (0..5).map(|_| Source::Ram { bytes: 64 << 20 }).collect(),
            layer,
            level: Level::Raid5,
            shape: Shape::default(),
            chunk_bytes: 64 << 10,
            policy: Some(Policy::Bitmap),
            integrity: false,
            pulled: 0,
            size_bytes: Some(SIZE),
            block_bytes: 4096,
            at_rest: false,
        };
        let under = Under::new(&its, spec, 1).await.unwrap();
        let (made, running) = (Cell::new(0), Cell::new(depth));
        let job = Rc::new(Job { under, kind, made, running, ended: WaitList::default() });
        for worker in 0..depth {
            its.spawn(work(its.clone(), job.clone(), worker as u64));
        }
        job.ended.until(&its, || job.running.get() == 0).await;
        job.under.stop().await.unwrap();
    });
    measured.unwrap();
    COUNTS.get()
}

#[test]
fn healthy_reads_and_writes_allocate_nothing() {
    let mut found = Vec::new();
    for layer in [Layer::Drive, Layer::Raid, Layer::Volume] {
        for kind in [Kind::Read, Kind::Write] {
            for depth in [1, 32] {
                let counts = allocations(layer, kind, depth);
                let places = PLACES.take();
                if counts.iter().filter(|count| **count > 0).count() > HIT_MAX {
                    found.push(format!("{layer:?} {kind:?} depth {depth}: {counts:?}"));
                    found.extend(places.iter().map(Backtrace::to_string));
                }
            }
        }
    }
    assert!(found.is_empty(), "{}", found.join("\n"));
}
