//! What other reactors read by a view, noted where the owner sees it: how much it was, and how long
//! some of it took.
//!
//! Invariant: the reader alone changes its notes, and waits for nobody: they are in its own cache
//! until the owner looks, which is now and then. A sample that it did not look at in time is lost,
//! and nothing else.

use std::cell::{Cell, RefCell};
use std::ops::Add;
use std::sync::Arc;
use std::time::Duration;

use ashlar_format::units::to_usize;
use ashlar_reactor::backend::Instant;
use ashlar_reactor::prng::Prng;

#[cfg(test)]
use loom::sync::atomic::{AtomicBool, AtomicU64, Ordering};
#[cfg(not(test))]
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use crate::view::View;

/// From one read that is timed to the next, on average, if there are more: a drive of eight is
/// judged by a thousand of them then (`ashlar_drive::slow`).
const SAMPLE_PERIOD: Duration = Duration::from_millis(1);
/// In so many periods one is timed, if there are any.
const PERIODS_MAX: u32 = 16;
/// Of so many one is timed at least: of more than any reactor does in a period.
const ONE_IN_MAX: u32 = 1 << 14;
/// Samples that wait for the owner, who looks four times a second while anybody reads.
const SAMPLES_MAX: usize = if cfg!(test) { 4 } else { 512 };
/// Of a sample, from the lowest bit: how long it took, in nanoseconds (to 78 hours); its member;
/// and whether a job was in its way.
const TOOK_BITS: u32 = 48;
const MEMBER_BITS: u32 = 15;
const CROWDED: u64 = 1 << (TOOK_BITS + MEMBER_BITS);

/// How long a member's drive took for a read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// By its number.
    pub(crate) member: usize,
    pub(crate) took: Duration,
    /// A job was at work when it began, or when it ended.
    pub(crate) crowded: bool,
}

impl Sample {
    /// A time that is too long is cut short.
    fn encode(self) -> u64 {
        assert!(self.member < 1 << MEMBER_BITS, "an array has fewer members");
        let took_ns_max = (1 << TOOK_BITS) - 1;
        let took_ns = u64::try_from(self.took.as_nanos()).unwrap_or(u64::MAX).min(took_ns_max);
        let crowded = if self.crowded { CROWDED } else { 0 };
        took_ns | (self.member as u64) << TOOK_BITS | crowded
    }

    fn decode(word: u64) -> Sample {
        Sample {
            member: to_usize(word >> TOOK_BITS & ((1 << MEMBER_BITS) - 1)),
            took: Duration::from_nanos(word & ((1 << TOOK_BITS) - 1)),
            crowded: word & CROWDED != 0,
        }
    }
}

/// Which reads are timed: about one in [`SAMPLE_PERIOD`], however many there are, and each as
/// likely as the next. (Were it the first one after a while, then of reads that come in bursts it
/// would be the first of a burst; and of those that copies of a mirror do in turn, always the same
/// copy's.)
pub(crate) struct Sampling {
    /// Reads to the next one that is timed, which is counted.
    left: Cell<u32>,
    /// When one is timed however many are left.
    latest: Cell<Instant>,
    /// The last one that was timed began then.
    began: Cell<Instant>,
    /// Of so many reads one is timed.
    one_in: Cell<u32>,
    prng: RefCell<Prng>,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling {
            left: Cell::new(1),
            latest: Cell::default(),
            began: Cell::default(),
            one_in: Cell::new(1),
            prng: RefCell::new(Prng::from_seed(0)),
        }
    }
}

impl Sampling {
    /// Of a read in so many pieces that begins now, the one that is timed; `None`: none of them.
    pub(crate) fn choose(&self, now: Instant, pieces: usize) -> Option<usize> {
        let left = self.left.get().saturating_sub(1);
        self.left.set(left);
        if left > 0 && now < self.latest.get() {
            return None;
        }
        self.time(now, pieces)
    }

    #[cold]
    fn time(&self, now: Instant, pieces: usize) -> Option<usize> {
        let one_in = match self.one_in.get() {
            one_in if now.since(self.began.replace(now)) < SAMPLE_PERIOD => one_in * 2,
            one_in => one_in / 2,
        };
        let one_in = one_in.clamp(1, ONE_IN_MAX);
        self.one_in.set(one_in);
        self.latest.set(now.after(SAMPLE_PERIOD * PERIODS_MAX));
        // From one to twice as many less one: that many, on average.
        let mut prng = self.prng.borrow_mut();
        let spread = prng.below(u64::from(2 * one_in - 1));
        self.left.set(u32::try_from(spread).expect("below twice the most") + 1);
        (pieces > 0).then(|| prng.index(pieces))
    }
}

/// What was read without asking the owner.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Served {
    pub(crate) reads: u64,
    pub(crate) bytes: u64,
}

impl Add for Served {
    type Output = Served;

    fn add(self, other: Served) -> Served {
        Served { reads: self.reads + other.reads, bytes: self.bytes + other.bytes }
    }
}

/// Of one reader. Nothing else is on its cache lines, nor on those that are fetched with them.
#[repr(align(128))]
struct Page {
    reads: AtomicU64,
    bytes: AtomicU64,
    /// Samples that were ever noted. The last of them are here, each at its number modulo their
    /// count.
    noted: AtomicU64,
    samples: [AtomicU64; SAMPLES_MAX],
    /// Nothing is added any more.
    is_over: AtomicBool,
}

impl Page {
    fn new() -> Page {
        Page {
            reads: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            noted: AtomicU64::new(0),
            samples: std::array::from_fn(|_| AtomicU64::new(0)),
            is_over: AtomicBool::new(false),
        }
    }
}

/// A reader's end: it alone writes there.
pub(crate) struct Notes {
    page: Arc<Page>,
}

impl Drop for Notes {
    fn drop(&mut self) {
        // Who sees that sees everything.
        self.page.is_over.store(true, Ordering::Release);
    }
}

impl Notes {
    /// By the reader: it has read so many bytes.
    pub(crate) fn count(&self, bytes: u64) {
        // Nobody else changes them: no atomic addition is needed.
        let Page { reads, bytes: all, .. } = &*self.page;
        reads.store(reads.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        all.store(all.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    }

    /// By the reader.
    pub(crate) fn add(&self, sample: Sample) {
        let Page { noted, samples, .. } = &*self.page;
        let number = noted.load(Ordering::Relaxed);
        samples[to_usize(number) % SAMPLES_MAX].store(sample.encode(), Ordering::Relaxed);
        // Who sees the count sees the sample.
        noted.store(number + 1, Ordering::Release);
    }
}

/// A reader's notes, and how far the owner has heard of them.
struct Reader {
    view: Arc<View>,
    page: Arc<Page>,
    heard: Served,
    heard_samples: u64,
}

impl Reader {
    /// What is new.
    fn hear(&mut self, each: &mut impl FnMut(Sample)) -> Served {
        let page = &self.page;
        let noted = page.noted.load(Ordering::Acquire);
        // One that is replaced at this moment is another sample, which is heard again.
        let kept = noted.saturating_sub(SAMPLES_MAX as u64);
        if self.view.is_open() {
            for number in self.heard_samples.max(kept)..noted {
                let word = page.samples[to_usize(number) % SAMPLES_MAX].load(Ordering::Relaxed);
                each(Sample::decode(word));
            }
        }
        self.heard_samples = noted;
        let reads = page.reads.load(Ordering::Relaxed);
        let bytes = page.bytes.load(Ordering::Relaxed);
        let before = std::mem::replace(&mut self.heard, Served { reads, bytes });
        Served { reads: reads - before.reads, bytes: bytes - before.bytes }
    }
}

/// By the owner: who reads by views of it.
#[derive(Default)]
pub(crate) struct Readers {
    list: RefCell<Vec<Reader>>,
}

impl Readers {
    /// For one more that reads by `view`.
    pub(crate) fn add(&self, view: Arc<View>) -> Notes {
        let page = Arc::new(Page::new());
        let heard = Served::default();
        let reader = Reader { view, page: page.clone(), heard, heard_samples: 0 };
        self.list.borrow_mut().push(reader);
        Notes { page }
    }

    /// What they have read since this was last asked, and each sample of it; not those by a view
    /// that was closed, whose members may have other drives by now. `each` may not ask for more.
    pub(crate) fn hear(&self, mut each: impl FnMut(Sample)) -> Served {
        let mut served = Served::default();
        self.list.borrow_mut().retain_mut(|reader| {
            // Looked at first: whoever is gone by then has noted everything.
            let is_over = reader.page.is_over.load(Ordering::Acquire);
            served = served + reader.hear(&mut each);
            !is_over
        });
        served
    }
}

#[cfg(test)]
mod tests {
    //! Goal: the owner hears of all that was read, and of samples as they were noted: whatever it
    //! hears late, it hears nothing that was not.
    //! Method: made-up moments and samples; then every interleaving that the model allows.

    use ashlar_format::array_superblock::Level;
    use loom::thread;

    use super::*;
    use crate::layout::{Layout, Shape};

    fn view() -> Arc<View> {
        let layout = Layout::new(Level::Raid5, 3, Shape::default(), 64 << 10).unwrap();
        Arc::new(View::new(layout, vec![0; 3], 512, 16, 1))
    }

    fn sample(us: u64) -> Sample {
        Sample { member: 2, took: Duration::from_micros(us), crowded: us.is_multiple_of(2) }
    }

    fn hear(readers: &Readers) -> (Served, Vec<Sample>) {
        let mut samples = Vec::new();
        let served = readers.hear(|sample| samples.push(sample));
        (served, samples)
    }

    #[test]
    fn a_sample_is_read_as_it_was_noted() {
        for member in [0, 1, 254, (1 << MEMBER_BITS) - 1] {
            for ns in [0, 1, 80_000, (1 << TOOK_BITS) - 1] {
                for crowded in [false, true] {
                    let its = Sample { member, took: Duration::from_nanos(ns), crowded };
                    assert_eq!(Sample::decode(its.encode()), its);
                }
            }
        }
        let long = Sample { member: 3, took: Duration::MAX, crowded: false };
        let took = Duration::from_nanos((1 << TOOK_BITS) - 1);
        assert_eq!(Sample::decode(long.encode()), Sample { took, ..long });
    }

    /// Numbers of those that are timed, of reads that begin at these moments, in microseconds.
    fn timed(moments: impl Iterator<Item = u64>) -> Vec<usize> {
        let sampling = Sampling::default();
        let at = moments.map(|us| Instant::from_ns(1000 * (us + 1_000_000)));
        let chosen = at.enumerate().filter(|(_, now)| sampling.choose(*now, 1).is_some());
        chosen.map(|(number, _)| number).collect()
    }

    #[test]
    fn however_many_there_are_about_one_in_a_period_is_timed() {
        // For two seconds, from one in a microsecond to one in 900.
        for every_us in [1, 7, 100, 900] {
            let times = timed((0..2_000_000).step_by(every_us)).len();
            assert!((900..3600).contains(&times), "every {every_us} us: {times}");
        }
        // All of those that are slower.
        assert_eq!(timed((0..200).map(|read| read * 1000)).len(), 200);
        // Also soon after there were many more: in half a second of them.
        let fewer = (0..1_000_000).chain((0..200).map(|read| 1_000_000 + read * 5000));
        let late = timed(fewer).into_iter().filter(|its| *its >= 1_000_100).count();
        assert_eq!(late, 100);
    }

    #[test]
    fn each_is_as_likely_as_the_next() {
        // One after the other; and in bursts, of which each has an even number.
        let steady = timed((0..100_000).map(|read| read * 100));
        let bursts = timed((0..100_000).map(|read| read / 32 * 5000));
        for (times, of) in [(&steady, 2), (&steady, 10), (&bursts, 2), (&bursts, 4)] {
            let each = (0..of).map(|rest| times.iter().filter(|its| *its % of == rest).count());
            let (least, most) = (each.clone().min().unwrap(), each.max().unwrap());
            assert!(least * of * 2 > times.len(), "of {of}: {least} of {}", times.len());
            assert!(most < least * 3, "of {of}: {least} to {most}");
        }
        assert_eq!(Sampling::default().choose(Instant::default(), 0), None, "nothing to time");
        let (sampling, mut pieces) = (Sampling::default(), [0; 3]);
        for ms in 1..=300 {
            pieces[sampling.choose(Instant::from_ns(5_000_000 * ms), 3).unwrap()] += 1;
        }
        assert!(pieces.iter().all(|times| (70..130).contains(times)), "{pieces:?}");
    }

    #[test]
    fn the_owner_hears_all_that_was_read_and_the_last_samples() {
        loom::model(|| {
            let (readers, view) = (Readers::default(), view());
            let (one, other) = (readers.add(view.clone()), readers.add(view.clone()));
            one.count(4096);
            other.count(512);
            (1..=3).for_each(|us| one.add(sample(us)));
            let both = Served { reads: 2, bytes: 4608 };
            assert_eq!(hear(&readers), (both, (1..=3).map(sample).collect()));
            assert_eq!(hear(&readers), (Served::default(), vec![]));
            // More than there is room for: the last ones.
            (4..=9).for_each(|us| one.add(sample(us)));
            assert_eq!(hear(&readers).1, (6..=9).map(sample).collect::<Vec<_>>());
            // Of a closed view nobody knows what drives its members were; what was read, was.
            one.add(sample(10));
            one.count(1);
            view.close();
            assert_eq!(hear(&readers), (Served { reads: 1, bytes: 1 }, vec![]));
        });
    }

    #[test]
    fn who_lets_go_is_heard_once_more_and_forgotten() {
        loom::model(|| {
            let readers = Readers::default();
            let notes = readers.add(view());
            let reader = thread::spawn(move || {
                notes.count(7);
                notes.add(sample(1));
                drop(notes);
            });
            let owner = thread::spawn(move || (hear(&readers), readers));
            reader.join().unwrap();
            let ((before, some), readers) = owner.join().unwrap();
            let (after, others) = hear(&readers);
            assert_eq!(
                (before + after, some.len() + others.len()),
                (Served { reads: 1, bytes: 7 }, 1)
            );
            assert!(readers.list.borrow().is_empty(), "it would be kept for ever");
        });
    }

    #[test]
    fn samples_are_heard_as_they_were_noted_however_they_meet() {
        loom::model(|| {
            let readers = Readers::default();
            let notes = readers.add(view());
            let reader = thread::spawn(move || (1..=3).for_each(|us| notes.add(sample(us))));
            let owner = thread::spawn(move || (hear(&readers), readers));
            reader.join().unwrap();
            let ((_, mut samples), readers) = owner.join().unwrap();
            samples.extend(hear(&readers).1);
            assert_eq!(samples, (1..=3).map(sample).collect::<Vec<_>>());
        });
    }
}
