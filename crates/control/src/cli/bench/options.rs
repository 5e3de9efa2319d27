//! What can be said to `ashlar bench`, and what the engine is asked for then.

use std::path::PathBuf;
use std::time::Duration;

use ashlar_bench::client::RingKind;
use ashlar_bench::engine::Asked;
use ashlar_bench::load::Work;
use ashlar_bench::run::Limit;
use ashlar_bench::under::{Layer, UnderSpec};
use ashlar_bench::vhost::{InitiatorSpec, Neighbour};
use ashlar_raid::layout::Shape;
use clap::builder::RangedU64ValueParser;
use clap::{Args, ValueEnum};

use crate::api::settings::Policy;
use crate::cli::array::level_text;
use crate::cli::bench::drives::Opened;
use crate::cli::output::Output;
use crate::daemon::CpuList;
use crate::host::settings::stored_policy;
use crate::level::{LEVELS, Notation};
use crate::refusal::{Answer, Refusal};
use crate::size::Size;

/// 2^32 bytes and more do not fit the fields they are for; what stands there says so.
fn bytes(size: Size) -> u32 {
    u32::try_from(size.0).unwrap_or(u32::MAX)
}

fn count(least: u64, most: u64) -> RangedU64ValueParser<u16> {
    RangedU64ValueParser::new().range(least..=most)
}

/// `5`, `0.5`
fn seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.trim_end_matches('s').parse().ok();
    let time = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    time.ok_or_else(|| "write seconds, such as 5 or 0.5".to_owned())
}

#[derive(Args)]
pub struct LoadOptions {
    /// read, write, randread, randwrite, or randrw: reads and writes at random places
    #[arg(long, default_value = "randread", value_name = "WORK")]
    rw: Work,
    /// Reads of a hundred requests of randrw
    #[arg(long, default_value_t = 70, value_name = "PERCENT")]
    #[arg(value_parser = RangedU64ValueParser::<u8>::new().range(0..=100))]
    mix: u8,
    /// Size of each request
    #[arg(long, default_value = "4K", value_name = "SIZE")]
    pub(super) block: Size,
    /// Requests under way at a time; over vhost-user, in each queue
    #[arg(long, default_value_t = 32, value_name = "REQUESTS", value_parser = count(1, 1024))]
    depth: u16,
    /// Range that is worked on; left out: 256M, or less where there is no more
    #[arg(long)]
    pub(super) size: Option<Size>,
    /// Length of a round
    #[arg(long, default_value = "5", value_parser = seconds)]
    seconds: Duration,
    /// Seconds at the beginning of a round that do not count
    #[arg(long, default_value = "1", value_name = "SECONDS", value_parser = seconds)]
    warm_up: Duration,
    /// A round ends after so many requests, all of which count, in place of a time
    #[arg(long, value_name = "REQUESTS", conflicts_with_all = ["seconds", "warm_up"])]
    #[arg(value_parser = RangedU64ValueParser::<u64>::new().range(1..))]
    ios: Option<u64>,
    /// Rounds, one after the other; left out: 1, and 5 of each for a comparison
    #[arg(long)]
    #[arg(value_parser = RangedU64ValueParser::<u32>::new().range(1..=1000))]
    rounds: Option<u32>,
    /// Where the sequence of requests begins: the same seed, the same requests
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Every block carries its place, the seed and its generation, and each read is compared; a
    /// wrong one ends the run with status 1
    #[arg(long)]
    verify: bool,
    /// JSON for programs: the same as --output json
    #[arg(long)]
    json: bool,
}

impl LoadOptions {
    pub fn output(&self, output: Output) -> Output {
        if self.json { Output::Json } else { output }
    }

    pub fn rounds_or(&self, usual: u32) -> u32 {
        self.rounds.unwrap_or(usual)
    }

    pub fn asked(&self, rounds_usual: u32) -> Answer<Asked> {
        let limit = match self.ios {
            Some(count) => Limit::Requests(count),
            None if self.seconds.is_zero() => {
                return Err(Refusal::invalid("a round of no time measures nothing")
                    .fix("use --seconds 1, or --ios 1000"));
            }
            None => Limit::Time { warm_up: self.warm_up, measure: self.seconds },
        };
        Ok(Asked {
            work: self.rw,
            read_percent: self.mix,
            block_bytes: bytes(self.block),
            depth: self.depth,
            seed: self.seed,
            verify: self.verify,
            limit,
            rounds: self.rounds_or(rounds_usual),
        })
    }

    /// Whether it overwrites what is there.
    pub fn writes(&self) -> bool {
        self.rw.writes() || self.verify
    }
}

/// How high up requests are made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum What {
    /// The drives themselves, one after the other
    Drive,
    /// The array
    Raid,
    /// A volume on it
    Volume,
}

impl What {
    fn layer(self) -> Layer {
        match self {
            What::Drive => Layer::Drive,
            What::Raid => Layer::Raid,
            What::Volume => Layer::Volume,
        }
    }
}

const MEMBERS_USUAL: u8 = 5;
const DRIVE_SIZE_USUAL: Size = Size(512 << 20);
const LEVEL_USUAL: &str = "5";
const CHUNK_USUAL: Size = Size(64 << 10);

/// Of an array that is made here.
#[derive(Args)]
#[command(next_help_heading = "The array that is made for it")]
pub struct ArrayOptions {
    /// ram:SIZE (memory), null:SIZE (answers at once, keeps nothing: the cost of all above), files
    /// or block devices; *N makes N of them: ram:512M*5
    #[arg(long, value_delimiter = ',', value_name = "DRIVE,…")]
    #[arg(value_hint = clap::ValueHint::FilePath)]
    pub(super) drives: Vec<String>,
    /// Drives of memory; left out: 5
    #[arg(long, conflicts_with = "drives", value_name = "DRIVES")]
    #[arg(value_parser = RangedU64ValueParser::<u8>::new().range(1..))]
    members: Option<u8>,
    /// Size of each of them; left out: 512M
    #[arg(long, conflicts_with = "drives", value_name = "SIZE")]
    drive_size: Option<Size>,
    /// RAID level: 0, 1, 5, 6, 7.3, 10, 50, 60, 70, or N+M; left out: 5
    #[arg(long, value_parser = level_text)]
    level: Option<String>,
    /// 16K to 1M, a power of two; left out: 64K
    #[arg(long)]
    chunk: Option<Size>,
    /// What is durable before a write is acknowledged; left out: as the level has it
    #[arg(long, value_enum)]
    policy: Option<Policy>,
    /// Keep a checksum of every block
    #[arg(long)]
    integrity: bool,
    /// What is asked: the difference of two is what a layer costs; left out: volume
    #[arg(long, value_enum)]
    what: Option<What>,
    /// Members that are pulled, once everything was written
    #[arg(long, value_name = "MEMBERS")]
    degraded: Option<u8>,
    /// CPU of the engine; left out: the first that may be used
    #[arg(long, value_name = "CPU")]
    core: Option<usize>,
    /// CPUs of reactors that share the work, such as 0,1: the first one has the drives, and a
    /// volume is offered to the others
    #[arg(long, value_name = "LIST", conflicts_with = "core")]
    cores: Option<CpuList>,
    /// What is on the given drives, or on the disk at the given socket, may be lost
    #[arg(long)]
    pub(super) force: bool,
}

impl ArrayOptions {
    /// What was said of an array, if anything was.
    pub fn first_given(&self) -> Option<&'static str> {
        let given = [
            (!self.drives.is_empty(), "--drives"),
            (self.members.is_some(), "--members"),
            (self.drive_size.is_some(), "--drive-size"),
            (self.level.is_some(), "--level"),
            (self.chunk.is_some(), "--chunk"),
            (self.policy.is_some(), "--policy"),
            (self.integrity, "--integrity"),
            (self.what.is_some(), "--what"),
            (self.degraded.is_some(), "--degraded"),
            (self.core.is_some(), "--core"),
            (self.cores.is_some(), "--cores"),
        ];
        given.into_iter().find_map(|(given, name)| given.then_some(name))
    }

    /// CPUs of the engine, that of the drives first.
    pub fn cores(&self) -> Vec<usize> {
        match &self.cores {
            Some(CpuList(cpus)) => cpus.clone(),
            None => vec![self.core()],
        }
    }

    pub fn core(&self) -> usize {
        let first = self.cores.as_ref().and_then(|CpuList(cpus)| cpus.first().copied());
        first.or(self.core).unwrap_or_else(|| allowed_cpus().first().copied().unwrap_or(0))
    }

    /// What stands in the place of `--drives`.
    pub fn drive_texts(&self) -> Vec<String> {
        if !self.drives.is_empty() {
            return self.drives.clone();
        }
        let (members, size) =
            (self.members.unwrap_or(MEMBERS_USUAL), self.drive_size.unwrap_or(DRIVE_SIZE_USUAL));
        vec![format!("ram:{}*{members}", size.0)]
    }

    pub fn under(&self, load: &LoadOptions, opened: &Opened) -> Answer<UnderSpec> {
        let text = self.level.as_deref().unwrap_or(LEVEL_USUAL);
        let level = Notation::parse(text).ok_or_else(|| {
            Refusal::invalid(format!("there is no RAID level {text}")).fix(format!("use {LEVELS}"))
        })?;
        let (sources, chunks) = (opened.sources(), u16::from(level.data) + u16::from(level.parity));
        let members = sources.len();
        if chunks > 0 && members != usize::from(chunks) {
            return Err(Refusal::invalid(format!(
                "level {text} needs {chunks} drives, not {members}"
            ))
            .fix(format!("use --members {chunks}, or another --level")));
        }
        Ok(UnderSpec {
            sources,
            layer: self.what.unwrap_or(What::Volume).layer(),
            level: level.level,
            shape: Shape { parity: level.parity, ..Shape::default() },
            chunk_bytes: bytes(self.chunk.unwrap_or(CHUNK_USUAL)),
            policy: self.policy.map(stored_policy),
            integrity: self.integrity,
            pulled: self.degraded.unwrap_or(0),
            size_bytes: load.size.map(|size| size.0),
            block_bytes: bytes(load.block),
            at_rest: !load.rw.writes(),
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Descriptors {
    /// A table for each request, and one descriptor in the ring
    Indirect,
    /// All in the ring
    Direct,
}

/// Of the initiator.
#[derive(Args)]
#[command(next_help_heading = "The initiator")]
pub struct InitiatorOptions {
    /// CPU that it polls on; left out: the last that may be used
    #[arg(long, value_name = "CPU")]
    client_core: Option<usize>,
    /// split or packed
    #[arg(long, default_value = "split")]
    ring: RingKind,
    /// Where requests are described
    #[arg(long, value_enum, default_value_t = Descriptors::Indirect)]
    descriptors: Descriptors,
    /// Leave the event index out: flags say whether a kick is wanted
    #[arg(long)]
    no_event_index: bool,
    /// Queues, all of which it serves
    #[arg(long, default_value_t = 1, value_parser = count(1, 256))]
    queues: u16,
    /// Pieces of memory that the data of a request is in
    #[arg(long, default_value_t = 1, value_parser = count(1, 126))]
    segments: u16,
    /// Write every block once before anything is measured, as --verify does
    #[arg(long)]
    fill: bool,
    /// Keep what is in flight in shared memory, and go on where a back end that went away comes
    /// back within so many seconds
    #[arg(long, value_name = "SECONDS", value_parser = seconds)]
    resume: Option<Duration>,
    /// Microseconds without a request after an answer: what a request costs that comes after a
    /// pause
    #[arg(long, default_value_t = 0, value_name = "US")]
    #[arg(value_parser = RangedU64ValueParser::<u64>::new().range(..=10_000_000))]
    pause_us: u64,
}

impl InitiatorOptions {
    pub fn writes(&self) -> bool {
        self.fill
    }

    /// `core`: where a back end of our own runs.
    pub fn spec(&self, load: &LoadOptions, asked: Asked, core: usize) -> InitiatorSpec {
        InitiatorSpec {
            core: self.client_core.unwrap_or_else(|| other_cpu(&allowed_cpus(), core)),
            ring: self.ring,
            indirect: self.descriptors == Descriptors::Indirect,
            event_index: !self.no_event_index,
            queues: self.queues,
            segments: self.segments,
            asked,
            size_bytes: load.size.map(|size| size.0),
            fill: self.fill,
            resume: self.resume,
            pause: Duration::from_micros(self.pause_us),
        }
    }
}

/// Of another initiator, on the same CPU as the first.
#[derive(Args)]
#[command(next_help_heading = "A neighbour")]
pub struct NeighbourOptions {
    /// Socket of another export, to whose disk requests are made meanwhile: in turns as many and as
    /// large as to the first (A), and as --neighbour-depth and --neighbour-block say (B)
    #[arg(long, value_name = "PATH", value_hint = clap::ValueHint::FilePath)]
    #[arg(requires = "socket", conflicts_with_all = ["against", "resume", "pause_us"])]
    neighbour: Option<PathBuf>,
    /// Requests of the noisy neighbour that are under way at a time
    #[arg(long, default_value_t = 128, value_name = "REQUESTS", value_parser = count(1, 1024))]
    #[arg(requires = "neighbour")]
    neighbour_depth: u16,
    /// Size of each of them
    #[arg(long, default_value = "64K", value_name = "SIZE", requires = "neighbour")]
    neighbour_block: Size,
}

impl NeighbourOptions {
    /// `spec`: of the measured one. `None`: there is no neighbour.
    pub fn noisy(&self, spec: &InitiatorSpec) -> Option<Neighbour<'_>> {
        let socket = self.neighbour.as_deref()?;
        let asked = Asked {
            depth: self.neighbour_depth,
            block_bytes: bytes(self.neighbour_block),
            ..spec.asked
        };
        Some(Neighbour { socket, spec: InitiatorSpec { asked, ..*spec } })
    }
}

/// The CPUs that this process may run on.
fn allowed_cpus() -> Vec<usize> {
    let allowed = rustix::thread::sched_getaffinity(None).ok();
    let cpus = 0..rustix::thread::CpuSet::MAX_CPU;
    allowed.map_or_else(Vec::new, |set| cpus.filter(|cpu| set.is_set(*cpu)).collect())
}

/// The last one that is not `core`; that one if there is no other.
fn other_cpu(cpus: &[usize], core: usize) -> usize {
    cpus.iter().rev().copied().find(|cpu| *cpu != core).unwrap_or(core)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_and_cpus() {
        assert_eq!(seconds("0.5"), Ok(Duration::from_millis(500)));
        assert_eq!(seconds("5s"), Ok(Duration::from_secs(5)));
        for text in ["", "-1", "nan", "inf", "1e400", "5m"] {
            assert!(seconds(text).is_err(), "{text:?}");
        }
        assert_eq!((other_cpu(&[0, 1], 0), other_cpu(&[0, 1], 1), other_cpu(&[3], 3)), (1, 0, 3));
    }
}
