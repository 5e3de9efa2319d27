//! Things that must be looked at to find work, such as rings in guest memory.
//!
//! Each is polled in every turn while that pays. After a while without work it is armed and left
//! alone: it costs nothing until somebody rouses it. So rings go idle one by one, on a busy reactor
//! too, and one that wakes up for something else does not touch them.

use std::rc::Rc;
use std::time::Duration;

use crate::backend::Instant;
use crate::polling::Watch;

/// Something that must be looked at to find work. It neither adds, removes nor rouses pollers while
/// it is being called.
pub trait Poller {
    /// Looks for work and starts it. True if there was some.
    fn poll(&self) -> bool;
    /// It will not be polled any more: ask the other side for wake-ups, upon which somebody rouses
    /// this poller. True if work arrived meanwhile, or nobody would: then it is polled on.
    fn arm(&self) -> bool;
    /// It is polled again: wake-ups are not needed.
    fn disarm(&self);
}

/// Names a poller of one reactor. Reused after it was removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollerId(u32);

struct Entry {
    poller: Rc<dyn Poller>,
    armed: bool,
    watch: Watch,
}

#[derive(Default)]
pub(crate) struct Pollers {
    entries: Vec<Option<Entry>>,
    /// Those that are not armed.
    polled: Vec<PollerId>,
}

impl Pollers {
    pub(crate) fn add(&mut self, poller: Rc<dyn Poller>) -> PollerId {
        let free = self.entries.iter().position(Option::is_none).unwrap_or(self.entries.len());
        let id = PollerId(u32::try_from(free).expect("few pollers"));
        let entry = Some(Entry { poller, armed: false, watch: Watch::default() });
        match self.entries.get_mut(free) {
            Some(place) => *place = entry,
            None => self.entries.push(entry),
        }
        self.polled.push(id);
        id
    }

    /// What is returned is to be dropped once nobody has borrowed these: its end may reach back.
    #[must_use = "it is dropped by who has not borrowed the pollers"]
    pub(crate) fn remove(&mut self, id: PollerId) -> Rc<dyn Poller> {
        let removed = self.entries.get_mut(id.0 as usize).and_then(Option::take);
        self.polled.retain(|polled| *polled != id);
        removed.expect("it was removed before").poller
    }

    /// Lets a poller that was armed be polled again.
    pub(crate) fn rouse(&mut self, id: PollerId) {
        // Who waits for its wake-ups may be told of the last one after it was removed.
        let Some(Some(entry)) = self.entries.get_mut(id.0 as usize) else { return };
        if entry.armed {
            entry.armed = false;
            entry.poller.disarm();
            self.polled.push(id);
        }
    }

    /// Polls all that are not armed, and arms those for which looking on does not pay. True if one
    /// found work.
    pub(crate) fn poll(&mut self, now: Instant, window_max: Duration) -> bool {
        let Pollers { entries, polled } = self;
        let mut any = false;
        polled.retain(|id| {
            let entry = entries[id.0 as usize].as_mut().expect("what is polled was not removed");
            if entry.poller.poll() {
                entry.watch.work(now, window_max);
                any = true;
            } else if entry.watch.nothing(now) {
                return !entry.arm();
            }
            true
        });
        any
    }

    /// The reactor is about to sleep. True if it must not, since one has work or cannot be woken.
    pub(crate) fn arm_all(&mut self) -> bool {
        let Pollers { entries, polled } = self;
        polled.retain(|id| {
            !entries[id.0 as usize].as_mut().expect("what is polled was not removed").arm()
        });
        !polled.is_empty()
    }
}

impl Entry {
    /// True if it can be left alone from now on.
    fn arm(&mut self) -> bool {
        self.armed = !self.poller.arm();
        if !self.armed {
            self.poller.disarm();
        }
        self.armed
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;

    const WINDOW: Duration = Duration::from_micros(100);

    /// Something that has work when told so, and counts what is asked of it.
    #[derive(Default)]
    struct Source {
        work: Cell<bool>,
        polls: Cell<u64>,
        armed: Cell<bool>,
    }

    impl Poller for Source {
        fn poll(&self) -> bool {
            assert!(!self.armed.get(), "polled, and asked for wake-ups");
            self.polls.set(self.polls.get() + 1);
            self.work.take()
        }

        fn arm(&self) -> bool {
            assert!(!self.armed.replace(true));
            self.work.get()
        }

        fn disarm(&self) {
            assert!(self.armed.take());
        }
    }

    fn add(pollers: &mut Pollers) -> (Rc<Source>, PollerId) {
        let source = Rc::new(Source::default());
        let id = pollers.add(source.clone());
        (source, id)
    }

    #[test]
    fn on_a_busy_reactor_idle_ones_cost_nothing() {
        let mut pollers = Pollers::default();
        let (busy, _) = add(&mut pollers);
        let idle: Vec<_> = (0..16).map(|_| add(&mut pollers)).collect();
        for turn in 0..10_000 {
            busy.work.set(true);
            assert!(pollers.poll(Instant::from_ns(turn * 1000), WINDOW));
        }
        assert_eq!(busy.polls.get(), 10_000);
        assert!(idle.iter().all(|(source, _)| source.polls.get() == 1 && source.armed.get()));
        // One of them is told of work, and is polled again; the others are not.
        let (roused, id) = &idle[7];
        roused.work.set(true);
        pollers.rouse(*id);
        pollers.rouse(*id);
        assert!(!roused.armed.get());
        assert!(pollers.poll(Instant::from_ns(20_000_000), WINDOW));
        assert_eq!(roused.polls.get(), 2);
        assert_eq!(idle.iter().map(|(source, _)| source.polls.get()).sum::<u64>(), 17);
    }

    #[test]
    fn a_ring_is_polled_as_long_as_its_gaps_are_short() {
        let mut pollers = Pollers::default();
        let (source, id) = add(&mut pollers);
        let mut slept = 0;
        for us in 0..10_000 {
            // Work each 20 us.
            if us % 20 == 0 {
                source.work.set(true);
                slept += u32::from(source.armed.get());
                pollers.rouse(id);
            }
            pollers.poll(Instant::from_ns(us * 1000), WINDOW);
        }
        assert!(slept <= 2, "{slept}");
    }

    #[test]
    fn nobody_sleeps_while_there_is_work() {
        let mut pollers = Pollers::default();
        let (first, id) = add(&mut pollers);
        let (second, _) = add(&mut pollers);
        second.work.set(true);
        assert!(pollers.arm_all(), "the second has work");
        assert!(first.armed.get() && !second.armed.get());
        assert!(pollers.poll(Instant::from_ns(0), WINDOW));
        assert!(!pollers.arm_all());
        assert!(second.armed.get());
        // One that is gone can still be named by who waited for its wake-ups.
        drop(pollers.remove(id));
        pollers.rouse(id);
        pollers.rouse(PollerId(1000));
        assert!(!pollers.arm_all());
        let (_, again) = add(&mut pollers);
        assert_eq!(again, id);
    }
}
