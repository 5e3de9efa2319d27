//! Requests made in this process, on the reactors that serve them: nothing but the engine is
//! measured. The first reactor has the drives; to the others their volume is offered.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ashlar_format::array_superblock::Policy;
use ashlar_pool::offer::Offer;
use ashlar_raid::layout::level_name;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;
use ashlar_reactor::wait_list::WaitList;

use crate::clock::Clock;
use crate::counters::Counters;
use crate::error::BenchError;
use crate::load::{Lane, LoadSpec, Work};
use crate::report::{Report, Round, Tally};
use crate::run::{Limit, Probe, Request, Run};
use crate::under::{Layer, Under, UnderSpec};

/// How long an idle reactor looks for work: longer than any drive that is worth measuring takes.
pub const POLL_WINDOW: Duration = Duration::from_millis(20);

/// What is asked, whoever asks it.
#[derive(Clone, Copy, Debug)]
pub struct Asked {
    pub work: Work,
    /// Of the requests of [`Work::RandRw`].
    pub read_percent: u8,
    pub block_bytes: u32,
    /// Requests that are under way at a time.
    pub depth: u16,
    pub seed: u64,
    pub verify: bool,
    pub limit: Limit,
    pub rounds: u32,
}

impl Asked {
    pub fn load(&self, size_bytes: u64) -> LoadSpec {
        LoadSpec {
            work: self.work,
            read_percent: self.read_percent,
            block_bytes: self.block_bytes,
            size_bytes,
            seed: self.seed,
            lane: Lane::ONLY,
        }
    }

    /// Of blocks that carry their place, each is in one request at a time. `requests`: under way
    /// at a time, in all queues.
    pub fn check_room(&self, size_bytes: u64, requests: u64) -> Result<(), BenchError> {
        let blocks = size_bytes / u64::from(self.block_bytes);
        if !self.verify || blocks > requests {
            return Ok(());
        }
        Err(BenchError::spec(
            format!("{blocks} blocks cannot be verified by {requests} requests at a time"),
            "use a larger --size, or a smaller --depth",
        ))
    }

    /// What a report says of it.
    pub fn setup(&self) -> BTreeMap<String, String> {
        let mut setup = BTreeMap::new();
        let mut say = |name: &str, value: String| setup.insert(name.to_owned(), value);
        say("rw", self.work.to_string());
        if self.work == Work::RandRw {
            say("mix", self.read_percent.to_string());
        }
        say("block", self.block_bytes.to_string());
        say("depth", self.depth.to_string());
        say("seed", self.seed.to_string());
        if self.verify {
            say("verify", "yes".to_owned());
        }
        setup
    }
}

/// What happens, for whoever waits.
#[derive(Clone, Copy, Debug, PartialEq)]
#[expect(clippy::large_enum_variant, reason = "a few of them a run, and none is kept")]
pub enum Event {
    /// Drives are labelled, and every block is written once.
    SettingUp,
    RoundBegan(u32),
    RoundEnded(Round),
}

pub struct EngineSpec {
    /// The CPUs of reactors that make requests; the first one has the drives.
    pub cores: Vec<usize>,
    pub under: UnderSpec,
    pub asked: Asked,
}

/// Sets up, measures, and lets the drives forget it.
pub fn run(spec: EngineSpec, on_event: &mut dyn FnMut(Event)) -> Result<Report, BenchError> {
    let EngineSpec { cores: cpus, under, asked } = spec;
    under.check(asked.verify)?;
    if cpus.len() > 1 && under.layer != Layer::Volume {
        return Err(BenchError::spec(
            "what several reactors ask is a volume",
            "leave --what out, or name one of --cores",
        ));
    }
    let mut setup = asked.setup();
    setup.extend(describe(&under, &cpus));
    let clock = Clock::calibrated();
    let cores = cpus.iter().map(|cpu| Core::start(*cpu, POLL_WINDOW));
    let cores = cores.collect::<Result<Vec<Core>, _>>()?;
    on_event(Event::SettingUp);
    let (seed, home) = (asked.seed, cores.first().ok_or(BenchError::ReactorEnded)?);
    let set_up = move |reactor| set_up(reactor, under, seed);
    let (under, size_bytes) = wait(&ask(home.sender(), set_up)?)??;
    let lanes = cores.len() as u64;
    asked.check_room(size_bytes / lanes, asked.depth.into())?;
    let mut jobs = Vec::new();
    for (core, index) in cores.iter().zip(0..) {
        let load = LoadSpec { lane: Lane { index, lanes }, ..asked.load(size_bytes) };
        let volume = if index == 0 { None } else { Some(offer(home, under)?) };
        let make = move |reactor: Reactor| async move {
            let under = match volume {
                Some(offer) => Rc::new(Under::offered(offer.open(&reactor), size_bytes)),
                None => reactor.get(under).expect("just published"),
            };
            let run = Run::new(clock, load, asked.verify, probe(&reactor, clock));
            reactor.publish(Job::new(&reactor, under, run, asked.block_bytes))
        };
        jobs.push((core, wait(&ask(core.sender(), make)?)?));
    }
    let mut rounds = Vec::new();
    for number in 1..=asked.rounds {
        on_event(Event::RoundBegan(number));
        let round = round(&jobs, &asked)?;
        on_event(Event::RoundEnded(round));
        rounds.push(round);
    }
    end(&jobs, home, under)?;
    setup.insert("size".into(), size_bytes.to_string());
    Ok(Report { bench: "engine".into(), setup, rounds })
}

/// On the first reactor: what is measured, and its bytes.
async fn set_up(
    reactor: Reactor,
    under: UnderSpec,
    seed: u64,
) -> Result<(Key<Under>, u64), BenchError> {
    let under = Rc::new(Under::new(&reactor, under, seed).await?);
    let size_bytes = under.size_bytes();
    Ok((reactor.publish(under), size_bytes))
}

/// What is measured, for one more reactor.
pub fn offer(home: &Core, under: Key<Under>) -> Result<Offer, BenchError> {
    let offer = wait(&ask(home.sender(), move |reactor| async move {
        let under = reactor.get(under).expect("published until the end");
        let volume = under.volume().expect("checked to be one").clone();
        Offer::new(&reactor, volume)
    })?)?;
    offer.map_err(BenchError::system("the volume cannot be offered"))
}

/// One round on all reactors at the same time.
fn round(jobs: &[(&Core, Key<Job>)], asked: &Asked) -> Result<Round, BenchError> {
    let (limit, depth) = (asked.limit, asked.depth);
    let begin = |(core, job): &(&Core, Key<Job>)| {
        let job = *job;
        ask(core.sender(), move |reactor| async move {
            reactor.get(job).expect("published until the end").round(limit, depth).await
        })
    };
    let begun = jobs.iter().map(begin).collect::<Result<Vec<_>, _>>()?;
    // All are waited for before any error is told.
    let ended: Vec<_> = begun.iter().map(wait).collect();
    let mut sum: Option<Tally> = None;
    for tally in ended {
        let tally = tally??;
        sum = Some(match sum {
            Some(sum) => sum.and(&tally),
            None => tally,
        });
    }
    Ok(sum.ok_or(BenchError::ReactorEnded)?.round())
}

/// Everybody lets go of what is measured, and it ends.
fn end(jobs: &[(&Core, Key<Job>)], home: &Core, under: Key<Under>) -> Result<(), BenchError> {
    for (core, job) in jobs {
        let job = *job;
        wait(&ask(core.sender(), move |reactor| async move { drop(reactor.withdraw(job)) })?)?;
    }
    let stop = move |reactor: Reactor| async move {
        let under = reactor.withdraw(under).expect("published until now");
        under.stop().await
    };
    wait(&ask(home.sender(), stop)?)?
}

pub fn wait<T>(answer: &mpsc::Receiver<T>) -> Result<T, BenchError> {
    answer.recv().map_err(|_| BenchError::ReactorEnded)
}

/// Starts something on a reactor; its answer can be waited for.
pub fn ask<T: Send + 'static, F: Future<Output = T> + 'static>(
    sender: &Sender,
    job: impl FnOnce(Reactor) -> F + Send + 'static,
) -> Result<mpsc::Receiver<T>, BenchError> {
    sender.ask(job).map_err(|_| BenchError::ReactorEnded)
}

/// What a report says of what is measured.
pub fn describe(under: &UnderSpec, cpus: &[usize]) -> BTreeMap<String, String> {
    let mut setup = BTreeMap::new();
    let mut say = |name: &str, value: String| setup.insert(name.to_owned(), value);
    let cpus: Vec<String> = cpus.iter().map(ToString::to_string).collect();
    say("core", cpus.join(","));
    say("what", under.layer.name().to_owned());
    say("drives", under.sources.len().to_string());
    if under.layer != Layer::Drive {
        say("level", level_name(under.level).to_owned());
        say("chunk", under.chunk_bytes.to_string());
        say("policy", under.policy.map_or("usual", policy_name).to_owned());
        say("degraded", under.pulled.to_string());
        if under.integrity {
            say("integrity", "yes".to_owned());
        }
    }
    setup
}

fn policy_name(policy: Policy) -> &'static str {
    match policy {
        Policy::Journal => "journal",
        Policy::Bitmap => "bitmap",
        Policy::None => "none",
    }
}

fn probe(reactor: &Reactor, clock: Clock) -> Probe {
    let (reactor, mut counters) = (reactor.clone(), Counters::of_this_thread(clock));
    Box::new(move || counters.sample(&reactor))
}

/// What the workers of a round work on.
struct Job {
    reactor: Reactor,
    under: Rc<Under>,
    run: RefCell<Run>,
    block_bytes: u32,
    running: Cell<u16>,
    /// The first one ends the round.
    error: RefCell<Option<BenchError>>,
    ended: WaitList,
}

impl Job {
    fn new(reactor: &Reactor, under: Rc<Under>, run: Run, block_bytes: u32) -> Rc<Job> {
        Rc::new(Job {
            reactor: reactor.clone(),
            under,
            run: RefCell::new(run),
            block_bytes,
            running: Cell::new(0),
            error: RefCell::default(),
            ended: WaitList::default(),
        })
    }

    async fn round(self: &Rc<Self>, limit: Limit, depth: u16) -> Result<Tally, BenchError> {
        self.run.borrow_mut().begin(limit);
        self.running.set(depth);
        for _ in 0..depth {
            self.reactor.spawn(self.clone().work());
        }
        self.ended.until(&self.reactor, || self.running.get() == 0).await;
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(self.run.borrow().tally()),
        }
    }

    /// One request after the other.
    async fn work(self: Rc<Self>) {
        let mut buffer = self.reactor.buffer(self.block_bytes as usize);
        while let Some(request) = self.next() {
            let (offset, write) = (request.offset, request.write);
            if write && self.run.borrow().has_content() {
                self.run.borrow().fill(&request, buffer.bytes_mut());
            }
            let answer = match write {
                true => self.under.write(offset, buffer.clone().into()).await,
                false => self.under.read(offset, buffer.clone().into()).await,
            };
            if let Err(error) = answer.and_then(|()| self.finish(&request, &buffer)) {
                self.error.borrow_mut().get_or_insert(error);
            }
        }
        // Its memory first: whoever waits may stop everything.
        drop(buffer);
        self.running.set(self.running.get() - 1);
        if self.running.get() == 0 {
            self.ended.wake_all(&self.reactor);
        }
    }

    fn next(&self) -> Option<Request> {
        if self.error.borrow().is_some() {
            return None;
        }
        self.run.borrow_mut().next_request()
    }

    fn finish(&self, request: &Request, buffer: &Buffer) -> Result<(), BenchError> {
        let mut run = self.run.borrow_mut();
        if !request.write && run.has_content() {
            run.check(request, buffer.bytes())?;
        }
        run.done(request);
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests;
