//! Goal: a guest that keeps the device busy costs it no allocation and no system call per request,
//! from the ring down to drives of memory.
//! Method: the driver of the `virtio-driver` crate on the real socket, which wants no calls and
//! looks for itself; the reactor's thread counts its allocations and its calls of the kernel. A
//! program of its own, since the allocator is.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]
#![allow(dead_code, reason = "parts of the neighbouring test")]

#[path = "../export/driver.rs"]
mod driver;
#[path = "../export/rig.rs"]
mod rig;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::os::fd::AsFd;
use std::time::Duration;

use ashlar_format::array_superblock::Level;
use ashlar_reactor::prng::Prng;
use virtio_driver::VirtioFeatureFlags;

use crate::driver::{Client, all_features};
use crate::rig::{Rig, on_reactor};

const DISK: u64 = 32 << 20;
const DEPTH: usize = 32;
const REQUESTS: u64 = if cfg!(debug_assertions) { 20_000 } else { 500_000 };
/// Timers of the array come due now and then, and the machine may take the CPU away from either
/// side, so that the reactor sleeps: less than once in so many requests.
const RARE: u64 = 20;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

struct Counting;

fn count() {
    // A thread that ends may free after its counter is gone.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

// SAFETY: all is done by the system's allocator, with the arguments as they are.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: the caller keeps the contract, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, start: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(start, layout) }
    }

    unsafe fn realloc(&self, start: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: as above.
        unsafe { System.realloc(start, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Of the reactor's thread, up to now: allocations, calls of the kernel.
fn costs(rig: &Rig) -> [u64; 2] {
    on_reactor(
        &rig.core,
        |reactor| async move { [ALLOCATIONS.with(Cell::get), reactor.kernel_calls()] },
    )
}

/// Keeps `DEPTH` requests under way until `count` were answered. Returns the kicks that it took.
fn work(client: &mut Client, prng: &mut Prng, write: bool, count: u64) -> u64 {
    let mut submit = |client: &mut Client, slot: usize| {
        let offset = prng.below(DISK / 4096) * 4096;
        if write {
            client.submit_write(0, offset, slot * 4096, 4096, slot);
        } else {
            client.submit_read(0, offset, slot * 4096, 4096, slot);
        }
    };
    let (mut kicks, mut submitted, mut done) = (0, DEPTH as u64, 0);
    (0..DEPTH).for_each(|slot| submit(client, slot));
    while done < count {
        if client.queues[0].avail_notif_needed() {
            client.transport.get_submission_notifier(0).notify().unwrap();
            kicks += 1;
        }
        let finished: Vec<_> = client.queues[0].completions().map(|c| (c.context, c.ret)).collect();
        for (slot, result) in finished {
            assert_eq!(result, 0);
            done += 1;
            if submitted < count {
                submit(client, slot);
                submitted += 1;
            }
        }
        // The reactor may need this very CPU.
        std::thread::yield_now();
    }
    kicks
}

/// The driver's packed ring counts descriptors in 16 bits for as long as it need not kick, and ends
/// in a panic, where sums are checked, when there are more: three a request, and three rounds.
fn requests(features: u64) -> u64 {
    if features != 0 && cfg!(debug_assertions) { 7_000 } else { REQUESTS }
}

fn measure(level: Level, drives: u8, features: u64, write: bool) {
    let count = requests(features);
    let rig = Rig::polling(level, drives, DISK, Duration::from_secs(1));
    let export = rig.export(1);
    let mut client = Client::connect(&export.spec().socket, 1, all_features() | features, 1 << 20);
    client.queues[0].set_used_notif_enabled(false);
    let mut prng = Prng::from_seed(1);
    // Every place is written, every list has its length.
    work(&mut client, &mut prng, true, count);
    work(&mut client, &mut prng, write, count);
    let bell = client.transport.get_completion_fd(0);
    rustix::fs::fcntl_setfl(bell.as_fd(), rustix::fs::OFlags::NONBLOCK).unwrap();
    let _ = bell.read();
    let idle = costs(&rig);
    let before = costs(&rig);
    let kicks = work(&mut client, &mut prng, write, count);
    let after = costs(&rig);
    // The array looks after itself now and then, in one of these or in the other.
    let spent: [u64; 2] = std::array::from_fn(|i| {
        let looking = before[i] - idle[i];
        after[i].saturating_sub(before[i] + looking)
    });
    println!(
        "{level:?} {}, write: {write}: {count} requests, {} allocations, {} calls, {kicks} \
         kicks",
        if features == 0 { "split" } else { "packed" },
        spent[0],
        spent[1],
    );
    assert!(spent[0] * RARE < count, "{} allocations", spent[0]);
    assert!(spent[1] * RARE < count, "{} calls of the kernel", spent[1]);
    assert!(kicks * RARE < count, "{kicks} kicks");
    assert!(client.transport.get_completion_fd(0).read().is_err(), "a call that nobody wanted");
}

#[test]
fn nothing_is_allocated_and_the_kernel_is_left_alone() {
    let packed = VirtioFeatureFlags::RING_PACKED.bits();
    for features in [0, packed] {
        for write in [false, true] {
            measure(Level::Raid0, 2, features, write);
        }
    }
}
