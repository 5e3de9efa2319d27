//! Which faults a seed has at all, and how strong: drawn anew for each seed, from none to extreme,
//! since moderate rates everywhere hide bugs.

use ashlar_format::array_superblock::Level;
use ashlar_raid::label;
use ashlar_reactor::prng::Prng;

use crate::drive::{Loss, Traits};

/// Requests of all workers in all lives. Ten seeds of some hundred requests find more than one of
/// some thousand.
const REQUESTS_MAX: u64 = 300;

/// How a life ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    CleanStop,
    ProcessCrash,
    PowerCut,
}

/// What the seed's array is.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub level: Level,
    pub members: usize,
    pub chunk_bytes: u32,
}

impl Geometry {
    pub const ALL: [(Level, usize); 9] = [
        (Level::Raid1, 2),
        (Level::Raid1, 3),
        (Level::Raid10, 4),
        (Level::Raid5, 3),
        (Level::Raid5, 5),
        (Level::Raid6, 4),
        (Level::Raid6, 6),
        (Level::Raid5, 4),
        (Level::Raid0, 2),
    ];

    fn draw(prng: &mut Prng) -> Geometry {
        // Level 0 is there for the plumbing: seldom.
        let count = if prng.chance(1, 20) { Self::ALL.len() } else { Self::ALL.len() - 1 };
        let (level, members) = Self::ALL[prng.index(count)];
        let chunk_bytes = [16 << 10, 16 << 10, 32 << 10, 64 << 10][prng.index(4)];
        Geometry { level, members, chunk_bytes }
    }
}

/// One fault at one moment of the second life, instead of drawn ones.
#[derive(Clone, Copy, Debug)]
pub struct Single {
    /// Completions of the life before it comes.
    pub after: u64,
    pub what: SingleFault,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SingleFault {
    /// The operation fails, and every retry of it.
    Fail,
    /// The power is cut.
    Cut(Loss),
    /// The power is cut, and one drive does not come back.
    CutAndLose(Loss),
    /// The power is cut while a member is missing since before the life began.
    CutDegraded(Loss),
}

/// All that a seed decides before it begins.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub geometry: Geometry,
    pub traits: Traits,
    pub lives: u32,
    pub workers: usize,
    pub ops_per_worker: u64,
    /// Longest pause between two operations of a worker.
    pub pause_ns_max: u64,
    /// One operation in so many is a flush.
    pub flush_one_in: u64,
    pub hot_stripes: usize,
    pub endings: Vec<Ending>,
    /// Faults in a life, at most.
    pub faults_max: u64,
    pub deaths: bool,
    pub pulls: bool,
    pub latent: bool,
    pub slow: bool,
    pub scrubs: bool,
    pub spares: bool,
    /// Drives that were out come back with what they held.
    pub returns: bool,
    pub transient_one_in: Option<u64>,
    pub pool_changes: bool,
    /// More faults than the level promises to bear: errors are allowed, wrong data never.
    pub beyond: bool,
    pub single: Option<Single>,
}

impl Plan {
    /// A small workload of two lives, and nothing but one fault.
    pub fn single(level: Level, members: usize, single: Single) -> Plan {
        Plan {
            geometry: Geometry { level, members, chunk_bytes: 64 << 10 },
            traits: Traits {
                bytes: label::DRIVE_BYTES_MIN,
                sector_bytes: 512,
                volatile_cache: true,
                zeroes_cheaply: true,
                latency_ns_min: 10_000,
                latency_ns_max: 200_000,
            },
            lives: 2,
            workers: 2,
            ops_per_worker: 12,
            pause_ns_max: 0,
            flush_one_in: 4,
            hot_stripes: 2,
            endings: vec![Ending::CleanStop],
            faults_max: 0,
            deaths: false,
            pulls: false,
            latent: false,
            slow: false,
            scrubs: false,
            spares: false,
            returns: false,
            transient_one_in: None,
            pool_changes: false,
            beyond: false,
            single: Some(single),
            ..Plan::draw(1)
        }
    }

    pub fn draw(seed: u64) -> Plan {
        let mut prng = Prng::stream(seed, "plan");
        let geometry = Geometry::draw(&mut prng);
        let ops = [20, 60, 200][prng.index(3)];
        let mut endings = vec![Ending::CleanStop];
        if prng.chance(3, 4) {
            endings.push(Ending::PowerCut);
        }
        if prng.chance(1, 2) {
            endings.push(Ending::ProcessCrash);
        }
        if endings.len() > 1 && prng.chance(1, 3) {
            endings.remove(0);
        }
        let mut half = || prng.chance(1, 2);
        let (deaths, pulls, latent, slow) = (half(), half(), half(), half());
        let (scrubs, spares, returns, pool_changes) = (half(), half(), half(), half());
        let traits = draw_traits(&mut prng);
        let lives = 1 + prng.below(5);
        let workers = 1 + prng.below(5);
        Plan {
            seed,
            geometry,
            traits,
            lives: u32::try_from(lives).unwrap_or(1),
            workers: usize::try_from(workers).unwrap_or(1),
            ops_per_worker: ops.min(REQUESTS_MAX / (lives * workers)),
            pause_ns_max: [0, 100_000, 10_000_000, 1_000_000_000][prng.index(4)],
            flush_one_in: [3, 10, 40][prng.index(3)],
            hot_stripes: [1, 3, 12][prng.index(3)],
            endings,
            faults_max: [0, 2, 5, 12][prng.index(4)],
            deaths,
            pulls,
            latent,
            slow,
            scrubs,
            spares,
            returns,
            transient_one_in: prng.chance(1, 3).then(|| [5, 50, 500][prng.index(3)]),
            pool_changes,
            beyond: prng.chance(1, 8),
            single: None,
        }
    }

    /// One line about the seed.
    pub fn describe(&self) -> String {
        let Geometry { level, members, chunk_bytes } = self.geometry;
        let Plan { lives, workers, ops_per_worker, hot_stripes, faults_max, .. } = self;
        let mut text = format!(
            "level {} of {members}, chunk {}K, {lives} lives of {workers} workers × \
             {ops_per_worker} operations on {hot_stripes} stripes, up to {faults_max} faults a \
             life:",
            level as u8,
            chunk_bytes >> 10
        );
        let kinds = [
            (self.deaths, "deaths"),
            (self.pulls, "pulls"),
            (self.latent, "latent errors"),
            (self.slow, "slow drives"),
            (self.scrubs, "scrubs"),
            (self.spares, "spares"),
            (self.returns, "returns"),
            (self.transient_one_in.is_some(), "transient errors"),
            (self.pool_changes, "pool changes"),
            (!self.traits.volatile_cache, "no volatile cache"),
            (self.traits.sector_bytes == 4096, "4K sectors"),
            (self.beyond, "BEYOND THE BUDGET"),
        ];
        for (_, name) in kinds.iter().filter(|(there, _)| *there) {
            text += &format!(" {name},");
        }
        text += &format!(" ends {:?}", self.endings);
        text
    }
}

fn draw_traits(prng: &mut Prng) -> Traits {
    let latency = [(1_000, 2_000), (10_000, 200_000), (50_000, 5_000_000)][prng.index(3)];
    Traits {
        bytes: label::DRIVE_BYTES_MIN,
        sector_bytes: if prng.chance(1, 5) { 4096 } else { 512 },
        volatile_cache: !prng.chance(1, 8),
        zeroes_cheaply: !prng.chance(1, 6),
        latency_ns_min: latency.0,
        latency_ns_max: latency.1,
    }
}
