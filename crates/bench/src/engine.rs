//! Requests made in this process, on the reactor that serves them: nothing but the engine is
//! measured.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ashlar_format::array_superblock::Policy;
use ashlar_raid::layout::level_name;
use ashlar_reactor::buffer::Buffer;
use ashlar_reactor::cores::Core;
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::wait_list::WaitList;

use crate::clock::Clock;
use crate::counters::Counters;
use crate::error::BenchError;
use crate::load::{LoadSpec, Work};
use crate::report::{Report, Round};
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
    /// The CPU of the reactor.
    pub core: usize,
    pub under: UnderSpec,
    pub asked: Asked,
}

/// Sets up, measures, and lets the drives forget it.
pub fn run(spec: EngineSpec, on_event: &mut dyn FnMut(Event)) -> Result<Report, BenchError> {
    let EngineSpec { core: cpu, under, asked } = spec;
    under.check(asked.verify)?;
    let mut setup = asked.setup();
    setup.extend(describe(&under, cpu));
    let clock = Clock::calibrated();
    let core = Core::start(cpu, POLL_WINDOW)?;
    let (events, heard) = mpsc::channel();
    let job = move |reactor| measure(reactor, clock, under, asked, events);
    let answer = ask(core.sender(), job)?;
    heard.into_iter().for_each(&mut *on_event);
    let (size_bytes, rounds) = answer.recv().map_err(|_| BenchError::ReactorEnded)??;
    setup.insert("size".into(), size_bytes.to_string());
    Ok(Report { bench: "engine".into(), setup, rounds })
}

/// Starts something on a reactor; its answer can be waited for.
pub fn ask<T: Send + 'static, F: Future<Output = T> + 'static>(
    sender: &Sender,
    job: impl FnOnce(Reactor) -> F + Send + 'static,
) -> Result<mpsc::Receiver<T>, BenchError> {
    let (reply, answer) = mpsc::channel();
    let letter = move |reactor: &Reactor| {
        let future = job(reactor.clone());
        reactor.spawn(async move {
            // Nobody listens only if the program is ending.
            let _ = reply.send(future.await);
        });
    };
    sender.send(letter).map_err(|_| BenchError::ReactorEnded)?;
    Ok(answer)
}

/// What a report says of what is measured.
pub fn describe(under: &UnderSpec, cpu: usize) -> BTreeMap<String, String> {
    let mut setup = BTreeMap::new();
    let mut say = |name: &str, value: String| setup.insert(name.to_owned(), value);
    say("core", cpu.to_string());
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

/// On the reactor: all rounds, and the bytes that were worked on.
async fn measure(
    reactor: Reactor,
    clock: Clock,
    under: UnderSpec,
    asked: Asked,
    events: mpsc::Sender<Event>,
) -> Result<(u64, Vec<Round>), BenchError> {
    // Nobody listens only if the program is ending.
    let say = |event| events.send(event).unwrap_or_default();
    say(Event::SettingUp);
    let under = Under::new(&reactor, under, asked.seed).await?;
    let size_bytes = under.size_bytes();
    asked.check_room(size_bytes, asked.depth.into())?;
    let run = Run::new(clock, asked.load(size_bytes), asked.verify, probe(&reactor, clock));
    let job = Rc::new(Job {
        reactor: reactor.clone(),
        under,
        run: RefCell::new(run),
        block_bytes: asked.block_bytes,
        running: Cell::new(0),
        error: RefCell::default(),
        ended: WaitList::default(),
    });
    let mut rounds = Vec::new();
    for number in 1..=asked.rounds {
        say(Event::RoundBegan(number));
        let round = job.round(asked.limit, asked.depth).await?;
        say(Event::RoundEnded(round));
        rounds.push(round);
    }
    job.under.stop().await?;
    Ok((size_bytes, rounds))
}

fn probe(reactor: &Reactor, clock: Clock) -> Probe {
    let (reactor, mut counters) = (reactor.clone(), Counters::of_this_thread(clock));
    Box::new(move || counters.sample(&reactor))
}

/// What the workers of a round work on.
struct Job {
    reactor: Reactor,
    under: Under,
    run: RefCell<Run>,
    block_bytes: u32,
    running: Cell<u16>,
    /// The first one ends the round.
    error: RefCell<Option<BenchError>>,
    ended: WaitList,
}

impl Job {
    async fn round(self: &Rc<Self>, limit: Limit, depth: u16) -> Result<Round, BenchError> {
        self.run.borrow_mut().begin(limit);
        self.running.set(depth);
        for _ in 0..depth {
            self.reactor.spawn(self.clone().work());
        }
        self.ended.until(&self.reactor, || self.running.get() == 0).await;
        match self.error.take() {
            Some(error) => Err(error),
            None => Ok(self.run.borrow().round()),
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
