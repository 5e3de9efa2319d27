//! One run of requests: which comes next, when counting begins and ends, and whether what came back
//! is right. The same for every way in which requests are made.
//!
//! ```text
//! Waiting ── first request ──► WarmingUp ── its time is over ──► Measuring ── limit ──► Over
//! ```
//!
//! Invariant: a request that was given out is given back, and where bytes are verified, a block is
//! in the hands of one request at a time.

use std::time::Duration;

use crate::clock::Clock;
use crate::counters::Sample;
use crate::load::{Load, LoadSpec};
use crate::report::{Meter, Round, Tally};
use crate::verify::{Ledger, Mismatch, check, next_generation, stamp};

/// How long a round is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Limit {
    Time {
        warm_up: Duration,
        measure: Duration,
    },
    /// All of them count.
    Requests(u64),
}

/// What requests carry.
enum Content {
    Any,
    /// Every block for the first time.
    First,
    Stamped(Ledger),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Waiting,
    WarmingUp { until: u64 },
    Measuring { from: u64, until: u64 },
    Over { ns: u64 },
}

/// A request that is under way.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// In bytes.
    pub offset: u64,
    pub write: bool,
    block: usize,
    /// That the block has, or is given.
    generation: u32,
    began: u64,
}

/// Asks, on the thread that makes the requests, what the measured one has cost so far.
pub type Probe = Box<dyn FnMut() -> Sample>;

pub struct Run {
    clock: Clock,
    spec: LoadSpec,
    load: Load,
    content: Content,
    limit: Limit,
    phase: Phase,
    begun: u64,
    /// Ticks from an answer to the next request.
    pause: u64,
    /// When the next request may be made.
    due: u64,
    meter: Meter,
    probe: Probe,
    before: Sample,
    after: Sample,
}

impl Run {
    /// `verified`: every block was written by [`Run::laying`] before.
    pub fn new(clock: Clock, spec: LoadSpec, verified: bool, probe: Probe) -> Run {
        let blocks = usize::try_from(spec.blocks()).expect("a 64-bit machine");
        let content = if verified { Content::Stamped(Ledger::new(blocks)) } else { Content::Any };
        Run {
            clock,
            spec,
            load: Load::new(spec),
            content,
            limit: Limit::Requests(0),
            phase: Phase::Over { ns: 0 },
            begun: 0,
            pause: 0,
            due: 0,
            meter: Meter::default(),
            probe,
            before: Sample::default(),
            after: Sample::default(),
        }
    }

    /// No request is made before this time has passed since the last answer.
    pub fn with_pause(self, pause: Duration) -> Run {
        Run { pause: self.clock.ticks_of(pause), ..self }
    }

    /// Writes every block once, in order.
    pub fn laying(clock: Clock, spec: LoadSpec) -> Run {
        let work = crate::load::Work::Write;
        let mut run = Run::new(clock, LoadSpec { work, ..spec }, false, Box::new(Sample::default));
        run.content = Content::First;
        run.begin(Limit::Requests(spec.blocks()));
        run
    }

    /// A new round; the one before is over and everything was given back.
    pub fn begin(&mut self, limit: Limit) {
        assert!(self.is_over(), "a round in a round");
        (self.limit, self.phase, self.begun) = (limit, Phase::Waiting, 0);
        self.meter = Meter::default();
        if limit == Limit::Requests(0) {
            self.phase = Phase::Over { ns: 0 };
        }
    }

    pub fn is_over(&self) -> bool {
        matches!(self.phase, Phase::Over { .. })
    }

    /// No more requests; what was counted is not asked for.
    pub fn stop(&mut self) {
        self.phase = Phase::Over { ns: 0 };
    }

    /// The next request; `None`: no more in this round, or not yet.
    #[inline]
    pub fn next_request(&mut self) -> Option<Request> {
        let now = self.advance();
        let open = match (self.phase, self.limit) {
            (Phase::Over { .. }, _) => false,
            (_, Limit::Requests(count)) => self.begun < count,
            (_, Limit::Time { .. }) => true,
        };
        if !open || now < self.due {
            return None;
        }
        self.begun += 1;
        let step = self.load.step();
        let block = usize::try_from(step.block).expect("counted in memory");
        let (block, generation) = match &mut self.content {
            Content::Any => (block, 0),
            Content::First => (block, 1),
            Content::Stamped(ledger) => {
                let (block, generation) = ledger.take(block);
                (block, if step.write { next_generation(generation) } else { generation })
            }
        };
        let offset = self.spec.offset(block as u64);
        Some(Request { offset, write: step.write, block, generation, began: now })
    }

    /// Whether writes need [`Run::fill`] and reads [`Run::check`].
    #[inline]
    pub fn has_content(&self) -> bool {
        !matches!(self.content, Content::Any)
    }

    /// Makes the bytes that a write carries.
    pub fn fill(&self, request: &Request, bytes: &mut [u8]) {
        stamp(bytes, self.spec.seed, request.offset, request.generation);
    }

    /// Whether a read returned what it must.
    pub fn check(&mut self, request: &Request, bytes: &[u8]) -> Result<(), Mismatch> {
        check(bytes, self.spec.seed, request.offset, request.generation)?;
        self.meter.reads_verified += 1;
        Ok(())
    }

    /// The request was answered well.
    #[inline]
    pub fn done(&mut self, request: &Request) {
        let now = self.advance();
        self.due = now.saturating_add(self.pause);
        if let Content::Stamped(ledger) = &mut self.content {
            ledger.put(request.block, request.generation);
        }
        let Phase::Measuring { from, .. } = self.phase else { return };
        let took = self.clock.ns(now.saturating_sub(request.began));
        let times = if request.write { &mut self.meter.writes } else { &mut self.meter.reads };
        times.add(took);
        if self.limit == Limit::Requests(self.meter.requests()) {
            self.end(now - from);
        }
    }

    /// What this round came to; it is over.
    pub fn round(&self) -> Round {
        self.tally().round()
    }

    /// The same, to be added to that of others.
    pub fn tally(&self) -> Tally {
        let Phase::Over { ns } = self.phase else { panic!("the round is not over") };
        let (meter, before, after) = (self.meter.clone(), self.before, self.after);
        Tally { block_bytes: self.spec.block_bytes, meter, ns, before, after }
    }

    /// Looks at the clock, and moves to the phase that it is time for.
    #[inline]
    fn advance(&mut self) -> u64 {
        let now = self.clock.ticks();
        match self.phase {
            Phase::Measuring { until, .. } if now < until => {}
            Phase::Measuring { from, until } => self.end(until - from),
            Phase::Waiting => match self.limit {
                Limit::Time { warm_up, .. } => {
                    let until = now.saturating_add(self.clock.ticks_of(warm_up));
                    self.phase = Phase::WarmingUp { until };
                }
                Limit::Requests(_) => return self.measure(u64::MAX),
            },
            Phase::WarmingUp { until } if now >= until => {
                let Limit::Time { measure, .. } = self.limit else { return now };
                return self.measure(self.clock.ticks_of(measure));
            }
            Phase::WarmingUp { .. } | Phase::Over { .. } => {}
        }
        now
    }

    fn measure(&mut self, ticks: u64) -> u64 {
        self.before = (self.probe)();
        let from = self.clock.ticks();
        self.meter = Meter::default();
        self.phase = Phase::Measuring { from, until: from.saturating_add(ticks) };
        from
    }

    fn end(&mut self, ticks: u64) {
        self.after = (self.probe)();
        self.phase = Phase::Over { ns: self.clock.ns(ticks) };
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what counts is what was asked for, and verified bytes are those of the right request.
    //! Method: a disk that is a vector, requests answered out of order.

    use std::cell::{Cell, RefCell};
    use std::rc::Rc;

    use super::*;
    use crate::load::{Lane, Work};

    const BLOCK: usize = 1024;
    const BLOCKS: usize = 16;

    fn spec(work: Work) -> LoadSpec {
        let size_bytes = (BLOCKS * BLOCK) as u64;
        let block_bytes = u32::try_from(BLOCK).unwrap();
        LoadSpec { work, read_percent: 50, block_bytes, size_bytes, seed: 5, lane: Lane::ONLY }
    }

    fn serve(run: &mut Run, request: &Request, disk: &mut [u8]) -> Result<(), Mismatch> {
        let at = usize::try_from(request.offset).unwrap();
        let block = &mut disk[at..at + BLOCK];
        if request.write {
            run.fill(request, block);
        } else {
            run.check(request, block)?;
        }
        run.done(request);
        Ok(())
    }

    fn laid(clock: Clock) -> Vec<u8> {
        let mut disk = vec![0; BLOCKS * BLOCK];
        let mut laying = Run::laying(clock, spec(Work::RandRead));
        while let Some(request) = laying.next_request() {
            serve(&mut laying, &request, &mut disk).unwrap();
        }
        assert!(laying.is_over());
        disk
    }

    #[test]
    fn requests_are_counted_and_verified_out_of_order() {
        let clock = Clock::calibrated();
        let mut disk = laid(clock);
        let mut run = Run::new(clock, spec(Work::RandRw), true, Box::new(Sample::default));
        for rounds in 0..2 {
            run.begin(Limit::Requests(500));
            let mut under_way = Vec::new();
            loop {
                while under_way.len() < 8
                    && let Some(request) = run.next_request()
                {
                    under_way.push(request);
                }
                if under_way.is_empty() {
                    break;
                }
                let request = under_way.swap_remove(under_way.len() / 2);
                serve(&mut run, &request, &mut disk).unwrap();
            }
            let round = run.round();
            assert_eq!(round.all.requests, 500, "round {rounds}");
            assert_eq!(round.reads.unwrap().requests, round.reads_verified);
            assert!(round.writes.unwrap().requests > 100);
        }
    }

    #[test]
    fn a_lost_write_is_found() {
        let clock = Clock::calibrated();
        let mut disk = laid(clock);
        let mut run = Run::new(clock, spec(Work::RandRw), true, Box::new(Sample::default));
        run.begin(Limit::Requests(500));
        let mut lost = false;
        let mut found = None;
        while let Some(request) = run.next_request() {
            if request.write && !lost {
                lost = true;
                run.done(&request);
                continue;
            }
            if let Err(mismatch) = serve(&mut run, &request, &mut disk) {
                found = Some(mismatch);
                break;
            }
        }
        let mismatch = found.expect("it was read or nothing was");
        assert_eq!(mismatch.expected.generation, 2);
        assert!(mismatch.to_string().contains("generation 1"), "{mismatch}");
    }

    #[test]
    fn no_request_before_the_pause_is_over() {
        let clock = Clock::calibrated();
        let pause = Duration::from_millis(2);
        let run = Run::new(clock, spec(Work::RandRead), false, Box::new(Sample::default));
        let mut run = run.with_pause(pause);
        run.begin(Limit::Requests(3));
        let mut answered = None;
        while !run.is_over() {
            let Some(request) = run.next_request() else { continue };
            let since = answered.map(|then| clock.ns(clock.ticks() - then));
            // The clock's factor is rounded down.
            assert!(since.is_none_or(|ns| ns + 10 >= 2_000_000), "{since:?} ns after an answer");
            answered = Some(clock.ticks());
            run.done(&request);
        }
        assert_eq!(run.round().all.requests, 3);
    }

    #[test]
    fn time_begins_after_the_warm_up() {
        let clock = Clock::calibrated();
        let answered = Rc::new(Cell::new(0));
        // When the probe was asked, and how many requests had been answered before.
        let asked = Rc::new(RefCell::new(Vec::new()));
        let (count, noted) = (answered.clone(), asked.clone());
        let probe: Probe = Box::new(move || {
            noted.borrow_mut().push((clock.ticks(), count.get()));
            Sample::default()
        });
        let mut run = Run::new(clock, spec(Work::RandRead), false, probe);
        let (warm_up, measure) = (Duration::from_millis(5), Duration::from_millis(20));
        run.begin(Limit::Time { warm_up, measure });
        let begun = clock.ticks();
        while let Some(request) = run.next_request() {
            run.done(&request);
            answered.set(answered.get() + 1);
        }
        let round = run.round();
        // However long this thread stood still in between.
        let [(from, before), (_, after)] = asked.borrow()[..] else { panic!("{asked:?}") };
        assert!(from - begun >= clock.ticks_of(warm_up), "{asked:?} after {begun}");
        assert_eq!(round.all.requests, after - before);
        assert!((round.seconds - 0.02).abs() < 0.001, "{}", round.seconds);
    }
}
