//! Requests made over vhost-user, from a CPU of their own: what a guest's driver would see of a
//! back end, without the guest. The back end is any at a socket, or one that is made here.

use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::mpsc;
use std::time::Duration;

use ashlar_pool::volume::Volume;
use ashlar_reactor::cores::{Core, pin};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::mailbox::Sender;
use ashlar_reactor::registry::Key;
use ashlar_target::export::Part;
use ashlar_target::limits::{RateLimits, Rates};
use ashlar_target::unix_socket::Access;
use ashlar_target::vhost::{ExportSpec, VhostExport};

use crate::client::{Client, Resumed, RingKind, Wish};
use crate::clock::Clock;
use crate::counters::{Counters, Sample};
use crate::engine::{Asked, Event, POLL_WINDOW, ask, describe, offer, wait};
use crate::error::BenchError;
use crate::report::{Report, Round};
use crate::run::{Limit, Probe, Run};
use crate::under::{Layer, SIZE_BYTES_USUAL, Under, UnderSpec};

/// How the initiator asks.
#[derive(Clone, Copy, Debug)]
pub struct InitiatorSpec {
    /// The CPU that it polls on.
    pub core: usize,
    pub ring: RingKind,
    pub indirect: bool,
    pub event_index: bool,
    pub queues: u16,
    pub segments: u16,
    pub asked: Asked,
    /// The range that is worked on; `None`: [`SIZE_BYTES_USUAL`], or all of a smaller disk.
    pub size_bytes: Option<u64>,
    /// Every block is written once before anything is measured.
    pub fill: bool,
    /// See [`Wish::resume`].
    pub resume: Option<Duration>,
    /// From an answer to the next request; zero: none.
    pub pause: Duration,
}

impl InitiatorSpec {
    fn wish(&self) -> Wish {
        Wish {
            ring: self.ring,
            indirect: self.indirect,
            event_index: self.event_index,
            queues: self.queues,
            depth: self.asked.depth,
            block_bytes: self.asked.block_bytes,
            segments: self.segments,
            writes: self.asked.work.writes() || self.lays(),
            resume: self.resume,
        }
    }

    fn lays(&self) -> bool {
        self.fill || self.asked.verify
    }

    fn size(&self, capacity: u64) -> Result<u64, BenchError> {
        let size = self.size_bytes.unwrap_or(SIZE_BYTES_USUAL.min(capacity));
        if size > capacity {
            return Err(BenchError::spec(
                format!("{size} bytes are to be worked on, and the disk has {capacity}"),
                "use a smaller --size",
            ));
        }
        if size < u64::from(self.asked.block_bytes) {
            let error = format!("{size} bytes hold no request of {}", self.asked.block_bytes);
            return Err(BenchError::spec(error, "use a larger --size, or a smaller --block"));
        }
        let requests = u64::from(self.queues) * u64::from(self.asked.depth);
        self.asked.check_room(size, requests)?;
        Ok(size)
    }
}

/// Another initiator on the same CPU, at work for as long as the measured one is. Of its `asked`,
/// limit and rounds mean nothing.
#[derive(Clone, Copy, Debug)]
pub struct Neighbour<'a> {
    pub socket: &'a Path,
    pub spec: InitiatorSpec,
}

/// Measures the back end at a socket, beside a neighbour perhaps.
pub fn run_at(
    socket: &Path,
    spec: &InitiatorSpec,
    neighbour: Option<Neighbour<'_>>,
    on_event: &mut dyn FnMut(Event),
) -> Result<Report, BenchError> {
    let no_probe = || -> Probe { Box::new(Sample::default) };
    let mut report = initiate(socket, spec, neighbour, no_probe, on_event)?;
    if let Some(Neighbour { socket, spec }) = neighbour {
        let Asked { work, depth, block_bytes, .. } = spec.asked;
        let text = format!("{work}, {block_bytes} bytes, depth {depth}, at {}", socket.display());
        report.setup.insert("neighbour".into(), text);
    }
    report.setup.insert("socket".into(), socket.display().to_string());
    Ok(report)
}

/// Makes an array, a volume and an export in this process, and measures that. `cores`: the CPUs of
/// its reactors, that of the array first.
pub fn run_own(
    cores: &[usize],
    under: UnderSpec,
    spec: &InitiatorSpec,
    on_event: &mut dyn FnMut(Event),
) -> Result<Report, BenchError> {
    let lays = spec.asked.verify;
    under.check(lays)?;
    if under.layer != Layer::Volume {
        return Err(BenchError::spec("what is exported is a volume", "leave --what out"));
    }
    let described = describe(&under, cores);
    on_event(Event::SettingUp);
    let clock = Clock::calibrated();
    let back_end = BackEnd::start(cores, under, spec, clock)?;
    let (sender, counters) = (back_end.cores[0].sender().clone(), back_end.counters);
    let probe = || probe_of(&sender, counters);
    let mut report = initiate(&back_end.socket, spec, None, probe, on_event)?;
    report.setup.extend(described);
    back_end.stop()?;
    Ok(report)
}

/// Connects, fills, measures. `probe` asks what the back end's core has cost.
fn initiate(
    socket: &Path,
    spec: &InitiatorSpec,
    neighbour: Option<Neighbour<'_>>,
    probe: impl Fn() -> Probe + Sync,
    on_event: &mut dyn FnMut(Event),
) -> Result<Report, BenchError> {
    let (events, heard) = mpsc::channel();
    let measured = std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("initiator".into());
        let body = || measure(socket, spec, neighbour, &probe, events);
        let thread = thread.spawn_scoped(scope, body);
        let thread = thread.map_err(BenchError::system("no thread for the initiator"))?;
        heard.into_iter().for_each(&mut *on_event);
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    let Measured { size_bytes, huge, resumed, rounds } = measured?;
    let mut setup = spec.asked.setup();
    let mut say = |name: &str, value: String| setup.insert(name.to_owned(), value);
    say("client_core", spec.core.to_string());
    say("ring", spec.ring.to_string());
    say("descriptors", if spec.indirect { "indirect" } else { "direct" }.to_owned());
    say("event_index", if spec.event_index { "yes" } else { "no" }.to_owned());
    say("queues", spec.queues.to_string());
    say("segments", spec.segments.to_string());
    say("size", size_bytes.to_string());
    if !spec.pause.is_zero() {
        say("pause_us", spec.pause.as_micros().to_string());
    }
    if spec.resume.is_some() {
        say("resumed", resumed.times.to_string());
        say("resumed_gap_ms_max", resumed.gap_max.as_millis().to_string());
    }
    say("memory", if huge { "huge pages" } else { "small pages" }.to_owned());
    Ok(Report { bench: "vhost".into(), setup, rounds })
}

struct Measured {
    size_bytes: u64,
    huge: bool,
    resumed: Resumed,
    rounds: Vec<Round>,
}

/// On the initiator's thread.
fn measure(
    socket: &Path,
    spec: &InitiatorSpec,
    neighbour: Option<Neighbour<'_>>,
    probe: &impl Fn() -> Probe,
    events: mpsc::Sender<Event>,
) -> Result<Measured, BenchError> {
    pin(spec.core)?;
    // Nobody listens only if the program is ending.
    let say = |event| events.send(event).unwrap_or_default();
    let clock = Clock::calibrated();
    let mut client = Client::connect(socket, &spec.wish())?;
    let size_bytes = spec.size(client.capacity())?;
    let load = spec.asked.load(size_bytes);
    if spec.lays() {
        say(Event::SettingUp);
        client.drive(&mut Run::laying(clock, load), clock)?;
    }
    let mut other = neighbour.map(|its| Other::connect(its, clock)).transpose()?;
    let mut run = Run::new(clock, load, spec.asked.verify, probe()).with_pause(spec.pause);
    let mut rounds = Vec::new();
    for number in 1..=spec.asked.rounds {
        say(Event::RoundBegan(number));
        run.begin(spec.asked.limit);
        let beside = other.as_mut().map(Other::begin);
        client.drive_beside(&mut run, beside, clock)?;
        let round = run.round();
        say(Event::RoundEnded(round));
        rounds.push(round);
    }
    let (huge, resumed) = (client.has_huge_pages(), client.resumed());
    client.close()?;
    other.map_or(Ok(()), |other| other.client.close())?;
    Ok(Measured { size_bytes, huge, resumed, rounds })
}

/// A neighbour that is connected.
struct Other {
    client: Client,
    run: Run,
}

impl Other {
    fn connect(its: Neighbour<'_>, clock: Clock) -> Result<Other, BenchError> {
        let client = Client::connect(its.socket, &its.spec.wish())?;
        let load = its.spec.asked.load(its.spec.size(client.capacity())?);
        Ok(Other { client, run: Run::new(clock, load, false, Box::new(Sample::default)) })
    }

    fn begin(&mut self) -> (&mut Client, &mut Run) {
        self.run.begin(Limit::Requests(u64::MAX));
        (&mut self.client, &mut self.run)
    }
}

/// An export of our own, on reactors of its own.
struct BackEnd {
    /// First, since an export must end before its reactors.
    export: VhostExport,
    cores: Vec<Core>,
    /// Of the other reactors than the first.
    offered: Vec<Key<Volume>>,
    under: Key<Under>,
    counters: Key<RefCell<Counters>>,
    socket: PathBuf,
    _directory: tempfile::TempDir,
}

type Keys = (Key<Under>, Key<Volume>, Key<RefCell<Counters>>);

impl BackEnd {
    fn start(
        cpus: &[usize],
        under: UnderSpec,
        spec: &InitiatorSpec,
        clock: Clock,
    ) -> Result<BackEnd, BenchError> {
        let cores = cpus.iter().map(|cpu| Core::start(*cpu, POLL_WINDOW));
        let cores = cores.collect::<Result<Vec<Core>, _>>()?;
        let (home, others) = cores.split_first().ok_or(BenchError::ReactorEnded)?;
        let seed = spec.asked.seed;
        let job = move |reactor| publish(reactor, under, seed, clock);
        let answer = ask(home.sender(), job)?;
        let (under, volume, counters) = answer.recv().map_err(|_| BenchError::ReactorEnded)??;
        let mut parts = vec![Part { core: home.sender().clone(), volume }];
        for core in others {
            let offer = offer(home, under)?;
            let open = move |reactor: Reactor| async move {
                reactor.publish(Rc::new(offer.open(&reactor)))
            };
            let volume = wait(&ask(core.sender(), open)?)?;
            parts.push(Part { core: core.sender().clone(), volume });
        }
        let offered = parts.iter().skip(1).map(|part| part.volume).collect();
        let directory = tempfile::Builder::new().prefix("ashlar-bench-").tempdir();
        let directory = directory.map_err(BenchError::system("no directory for a socket"))?;
        let socket = directory.path().join("vhost.sock");
        let export = ExportSpec {
            name: "bench".into(),
            socket: socket.clone(),
            access: Access::default(),
            queues_max: spec.queues,
            serial: "bench".into(),
            limits: RateLimits::new(Rates::default()),
            since: 0,
        };
        let export = VhostExport::start(parts, export)?;
        let _directory = directory;
        Ok(BackEnd { export, cores, offered, under, counters, socket, _directory })
    }

    fn stop(self) -> Result<(), BenchError> {
        drop(self.export);
        for (core, volume) in self.cores.iter().skip(1).zip(self.offered) {
            wait(&ask(
                core.sender(),
                move |reactor| async move { drop(reactor.withdraw(volume)) },
            )?)?;
        }
        let under = self.under;
        let answer = ask(self.cores[0].sender(), move |reactor| async move {
            match reactor.get(under) {
                Some(under) => under.stop().await,
                None => Ok(()),
            }
        })?;
        answer.recv().map_err(|_| BenchError::ReactorEnded)?
    }
}

/// A letter to the reactor and back, before and after what is measured.
fn probe_of(sender: &Sender, counters: Key<RefCell<Counters>>) -> Probe {
    let sender = sender.clone();
    Box::new(move || {
        let answer = ask(&sender, move |reactor| async move {
            let counters = reactor.get(counters);
            counters.map(|counters| counters.borrow_mut().sample(&reactor)).unwrap_or_default()
        });
        answer.ok().and_then(|answer| answer.recv().ok()).unwrap_or_default()
    })
}

/// On the reactor.
async fn publish(
    reactor: Reactor,
    under: UnderSpec,
    seed: u64,
    clock: Clock,
) -> Result<Keys, BenchError> {
    let under = Rc::new(Under::new(&reactor, under, seed).await?);
    let volume = under.volume().expect("checked to be one").clone();
    let counters = Rc::new(RefCell::new(Counters::of_this_thread(clock)));
    Ok((reactor.publish(under), reactor.publish(Rc::new(volume)), reactor.publish(counters)))
}

#[cfg(test)]
mod tests;
