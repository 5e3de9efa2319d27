//! How a thread that stops to look is woken by one that has left something for it: once, and never
//! in vain for long.
//!
//! ```text
//! who stops to look:  says so · fence · looks a last time
//! who leaves things:  leaves one · fence · looks whether that was said, and then wakes
//! ```
//!
//! Of two sequentially consistent fences one comes first, and what stands before it is seen by
//! whoever looks after the other (C++20, 32.5.4): so either the last look finds the thing, or the
//! other finds the word. Both may be; then it is woken for nothing. (It is the handshake of
//! virtio's rings, virtio 1.2, 2.7.7 and 2.7.10, with a flag in place of an index.)

#[cfg(test)]
use loom::sync::atomic::{AtomicBool, Ordering, fence};
#[cfg(not(test))]
use std::sync::atomic::{AtomicBool, Ordering, fence};

/// Whether somebody has stopped to look.
pub(crate) struct Doze(AtomicBool);

impl Doze {
    pub(crate) fn awake() -> Doze {
        Doze(AtomicBool::new(false))
    }

    /// From now on it has to be woken for what it does not find in one more look.
    pub(crate) fn begin(&self) {
        self.0.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// It looks again.
    pub(crate) fn end(&self) {
        self.0.store(false, Ordering::Relaxed);
    }

    /// After something was left for it: whether it is the caller who has to wake it.
    pub(crate) fn wants_waking(&self) -> bool {
        fence(Ordering::SeqCst);
        self.0.load(Ordering::Relaxed) && self.0.swap(false, Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: nothing that was left stays unseen while who should look sleeps.
    //! Method: every interleaving and every order of memory that the model allows.

    use loom::sync::Arc;
    use loom::sync::atomic::AtomicUsize;
    use loom::thread;

    use super::*;

    #[test]
    fn who_sleeps_has_seen_all_or_is_woken() {
        loom::model(|| {
            let doze = Arc::new(Doze::awake());
            let left = Arc::new(AtomicUsize::new(0));
            let (its_doze, its_left) = (doze.clone(), left.clone());
            let leaves = thread::spawn(move || {
                its_left.store(1, Ordering::Release);
                its_doze.wants_waking()
            });
            doze.begin();
            let seen = left.load(Ordering::Acquire) == 1;
            let woken = leaves.join().unwrap();
            assert!(seen || woken);
        });
    }

    #[test]
    fn of_two_who_leave_something_one_wakes() {
        loom::model(|| {
            let doze = Arc::new(Doze::awake());
            doze.begin();
            let its = doze.clone();
            let other = thread::spawn(move || u32::from(its.wants_waking()));
            let wakers = u32::from(doze.wants_waking()) + other.join().unwrap();
            assert_eq!(wakers, 1);
        });
    }
}
