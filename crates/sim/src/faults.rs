//! Which faults a seed has at all, and how strong: drawn anew for each seed, from none to extreme,
//! since moderate rates everywhere hide bugs.

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::block_sums::BLOCK_BYTES;
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::journal_batch::PAYLOAD_BYTES_MAX;
use ashlar_format::units::to_usize;
use ashlar_raid::label;
use ashlar_raid::layout::{CHUNK_BYTES_MIN, Layout, Shape, level_name};
use ashlar_raid::parity::PARITY_CHUNKS_MAX;
use ashlar_raid::settings::SettingsChange;
use ashlar_reactor::prng::Prng;

use crate::canary::Canary;
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

/// Data area of a drive, at least.
const DATA_BYTES_MIN: u64 = 3 << 20;

/// A chunk that holds more than one batch of the journal.
pub const CHUNK_BYTES_LARGE: u32 = 512 << 10;
const _: () = assert!(CHUNK_BYTES_LARGE > PAYLOAD_BYTES_MAX);

/// Chunks of other sizes than most arrays have, up to the largest: in a batch of the journal there
/// is room for one, just not, or by far not.
const CHUNK_BYTES_OTHER: [u32; 3] = [128 << 10, 256 << 10, 1 << 20];
/// Of a wide array, for chunks that are larger than the smallest: whole ones are written.
const STRIPE_BYTES_WIDE: u32 = 6 << 20;

/// What the seed's array is.
#[derive(Clone, Copy, Debug)]
pub struct Geometry {
    pub level: Level,
    pub members: usize,
    pub shape: Shape,
    pub chunk_bytes: u32,
}

/// Level, members, and what of `Shape` the level has a choice of: copies, parity chunks or members
/// of a group.
const KINDS: [(Level, usize, u8); 22] = [
    (Level::Raid1, 2, 0),
    (Level::Raid1, 3, 0),
    (Level::Raid10, 4, 0),
    (Level::Raid10, 6, 3),
    (Level::Raid5, 3, 0),
    (Level::Raid5, 3, 0),
    (Level::Raid5, 4, 0),
    (Level::Raid5, 5, 0),
    (Level::Raid6, 4, 0),
    (Level::Raid6, 4, 0),
    (Level::Raid6, 6, 0),
    (Level::Raid50, 6, 3),
    (Level::Raid50, 9, 3),
    (Level::Raid60, 8, 4),
    (Level::RaidNm, 2, 1),
    (Level::RaidNm, 3, 2),
    (Level::Raid7, 5, 0),
    (Level::Raid7, 6, 0),
    (Level::Raid70, 10, 5),
    (Level::RaidNm, 5, 4),
    (Level::RaidNm, 6, 3),
    (Level::RaidNm, 10, 8),
];

/// The same of wider ones, up to as many members and groups as there can be.
const KINDS_WIDE: [(Level, usize, u8); 15] = [
    (Level::Raid1, 5, 0),
    (Level::Raid10, 16, 2),
    (Level::Raid5, 12, 0),
    (Level::Raid6, 12, 0),
    (Level::Raid7, 16, 0),
    (Level::Raid50, 16, 4),
    (Level::Raid60, 16, 8),
    (Level::Raid60, 24, 4),
    (Level::Raid60, 64, 16),
    (Level::RaidNm, 9, 8),
    (Level::RaidNm, 10, 2),
    (Level::RaidNm, 14, 4),
    (Level::RaidNm, 16, 8),
    (Level::RaidNm, 19, 3),
    (Level::RaidNm, 21, 1),
];

/// As many members and parity chunks as there can be.
const KIND_WIDEST: (Level, usize, u8) = (Level::RaidNm, 64, 8);

impl Geometry {
    /// Every kind of array that this build can compute parity for.
    pub fn all() -> impl Iterator<Item = Geometry> {
        Geometry::of_kinds(&KINDS)
    }

    fn of_kinds(kinds: &[(Level, usize, u8)]) -> impl Iterator<Item = Geometry> {
        let geometries = kinds.iter().map(|&(level, members, choice)| {
            let shape = match level {
                Level::RaidNm => Shape { parity: choice, ..Shape::default() },
                Level::Raid50 | Level::Raid60 | Level::Raid70 => {
                    Shape { group_members: choice, ..Shape::default() }
                }
                Level::Raid0 | Level::Raid1 | Level::Raid10 => {
                    Shape { copies: choice, ..Shape::default() }
                }
                Level::Raid5 | Level::Raid6 | Level::Raid7 => Shape::default(),
            };
            Geometry { level, members, shape, chunk_bytes: 64 << 10 }
        });
        geometries.filter(|its| usize::from(its.layout().parity) <= PARITY_CHUNKS_MAX)
    }

    /// Level 0, of two members.
    pub fn raid0() -> Geometry {
        let (level, shape) = (Level::Raid0, Shape::default());
        Geometry { level, members: 2, shape, chunk_bytes: 64 << 10 }
    }

    pub fn layout(&self) -> Layout {
        let layout = Layout::new(self.level, self.members, self.shape, self.chunk_bytes);
        layout.expect("the geometries are possible")
    }

    /// Policies that such an array can have.
    pub fn policies(&self) -> Vec<Policy> {
        let layout = self.layout();
        Policy::ALL.into_iter().filter(|policy| layout.check_policy(*policy).is_ok()).collect()
    }

    /// The smallest drives that have some room for data beside the journal.
    fn drive_bytes(&self, integrity: bool) -> u64 {
        let parity = self.layout().parity;
        let fits = |mib: &u64| {
            label::plan_for(mib << 20, parity, integrity)
                .is_some_and(|areas| areas.data.len >= DATA_BYTES_MIN)
        };
        let least = label::DRIVE_BYTES_MIN >> 20;
        (least..).find(fits).expect("some drive is large enough") << 20
    }

    fn draw(prng: &mut Prng) -> Geometry {
        let all: Vec<Geometry> = Geometry::all().collect();
        // Level 0 is there for the plumbing: seldom.
        let drawn =
            if prng.chance(1, 100) { Geometry::raid0() } else { all[prng.index(all.len())] };
        let chunk_bytes = [16 << 10, 16 << 10, 32 << 10, 64 << 10][prng.index(4)];
        Geometry { chunk_bytes, ..drawn }
    }

    /// Wider arrays and other chunks, from streams of their own, so that other seeds are what they
    /// were.
    fn widened(mut self, seed: u64) -> Geometry {
        if Prng::stream(seed, "chunk").chance(1, 24) {
            self.chunk_bytes = CHUNK_BYTES_LARGE;
        }
        let mut other = Prng::stream(seed, "chunks of other sizes");
        if other.chance(1, 20) {
            self.chunk_bytes = CHUNK_BYTES_OTHER[other.index(CHUNK_BYTES_OTHER.len())];
        }
        let mut wide = Prng::stream(seed, "wide arrays");
        if wide.chance(1, 20) {
            let all: Vec<Geometry> = Geometry::of_kinds(&KINDS_WIDE).collect();
            let mut chunk_bytes = self.chunk_bytes;
            self = all[wide.index(all.len())];
            let data = u32::from(self.layout().data);
            while chunk_bytes > CHUNK_BYTES_MIN && chunk_bytes * data > STRIPE_BYTES_WIDE {
                chunk_bytes /= 2;
            }
            self.chunk_bytes = chunk_bytes;
        }
        if Prng::stream(seed, "the widest array").chance(1, 400) {
            self = Geometry::of_kinds(&[KIND_WIDEST]).next().unwrap_or(self);
            self.chunk_bytes = CHUNK_BYTES_MIN;
        }
        self
    }
}

/// One fault at one moment, instead of drawn ones.
#[derive(Clone, Copy, Debug)]
pub struct Single {
    /// While the array is started after a power cut; else while it serves, or is stopped.
    pub in_start: bool,
    /// Completions of that before it comes.
    pub after: u64,
    pub what: SingleFault,
}

/// What a single fault at this moment does, of so many: all of them come in any steps of moments.
pub fn turn(after: u64, count: usize) -> usize {
    let mixed = after.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40;
    to_usize(mixed) % count
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SingleFault {
    /// The operation fails, and every retry of it.
    Fail,
    /// The power is cut.
    Cut(Loss),
    /// The power is cut, and as many drives as the array bears do not come back.
    CutAndLose(Loss),
    /// The power is cut while a member is missing since before the life began; every other time
    /// as many more do not come back as the array still bears.
    CutDegraded(Loss),
    /// The power is cut while a member is missing since before the life began, and then its drive
    /// is back, with what it had; every other time as many others do not come back as the array
    /// still bears.
    CutReturned(Loss),
    /// The drive that completes the operation dies.
    Death,
}

impl SingleFault {
    /// What a cut does; `None`: it is none.
    pub fn loss(self) -> Option<Loss> {
        match self {
            SingleFault::Fail | SingleFault::Death => None,
            SingleFault::Cut(loss)
            | SingleFault::CutAndLose(loss)
            | SingleFault::CutDegraded(loss)
            | SingleFault::CutReturned(loss) => Some(loss),
        }
    }
}

/// What drives answer other than the truth, without an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    None,
    /// Data rots, and writes of data are lost or misdirected; checksums rot.
    Data,
    /// Checksums rot, and writes of checksums are lost or misdirected. Not of both: a drive that
    /// loses a block and its checksum shows what fits.
    Checksums,
    /// Records of metadata rot, and writes of them are lost or misdirected, of any array.
    Metadata,
}

/// All that a seed decides before it begins.
#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub geometry: Geometry,
    /// `None`: the usual one.
    pub policy: Option<Policy>,
    /// The policy is changed while the array serves.
    pub policy_changes: bool,
    pub traits: Traits,
    /// Members keep checksums of their blocks.
    pub integrity: bool,
    /// Pages of them in memory: so few that they are dropped and read again.
    pub sum_pages_max: Option<usize>,
    /// Of blocks and checksums only where there are checksums.
    pub lies: Lies,
    /// Every other drive can zero by itself if the others cannot, and the other way round.
    pub mixed: bool,
    pub lives: u32,
    pub workers: usize,
    pub ops_per_worker: u64,
    /// Longest pause between two operations of a worker.
    pub pause_ns_max: u64,
    /// One operation in so many is a flush.
    pub flush_one_in: u64,
    pub hot_stripes: usize,
    /// Many long requests at once, as many as fill the journal.
    pub floods: bool,
    pub endings: Vec<Ending>,
    /// Faults in a life, at most.
    pub faults_max: u64,
    pub deaths: bool,
    /// Drives do not come back from the end of a life, as many as the array bears.
    pub deaths_at_end: bool,
    pub pulls: bool,
    pub latent: bool,
    pub slow: bool,
    /// Drives fail writes for a while, of all or of a part; then they are taken back.
    pub refusals: bool,
    /// Drives answer nothing for a while, one of them or all.
    pub silences: bool,
    /// More drives are away for a moment than the array bears.
    pub outages: bool,
    /// Drives have no space for what is written, for a while, one of them or all.
    pub full: bool,
    /// Flushes of a drive fail, once or for a while.
    pub failing_flushes: bool,
    /// The power of a drive fails by itself, and with it its cache.
    pub power_losses: bool,
    pub scrubs: bool,
    pub spares: bool,
    /// Drives that were out come back with what they held.
    pub returns: bool,
    pub transient_one_in: Option<u64>,
    pub pool_changes: bool,
    /// Volumes beside the main one are written and read, too.
    pub volumes: bool,
    /// Some reads are done by views of the array, as from other reactors.
    pub views: bool,
    /// Drives get larger, and so does the array.
    pub grows: bool,
    /// Members are added.
    pub adds: bool,
    /// More faults than the level promises to bear: errors are allowed, wrong data never.
    pub beyond: bool,
    /// What the journal has is lost between lives, or those are away who have it, and operators
    /// insist on a start.
    pub insists: bool,
    /// Hosts have the array by a lease, and take turns: now this one starts it, now that.
    pub leases: bool,
    /// One comes while another has it.
    pub rivals: bool,
    /// Somebody sets the clock.
    pub clock_is_set: bool,
    pub settings: SettingsChange,
    pub single: Option<Single>,
}

impl Plan {
    /// The small workload of this number, in two lives, and nothing but one fault. Without a
    /// `policy` it changes all the time.
    pub fn single(
        workload: u64,
        geometry: Geometry,
        policy: Option<Policy>,
        integrity: bool,
        single: Single,
    ) -> Plan {
        Plan {
            geometry,
            policy,
            policy_changes: policy.is_none(),
            integrity,
            sum_pages_max: None,
            lies: Lies::None,
            traits: Traits {
                bytes: geometry.drive_bytes(integrity),
                sector_bytes: 512,
                volatile_cache: true,
                mends: true,
                zeroes: true,
                latency_ns_min: 10_000,
                latency_ns_max: 200_000,
            },
            mixed: false,
            lives: 2,
            workers: 2,
            ops_per_worker: 12,
            pause_ns_max: 0,
            flush_one_in: 4,
            hot_stripes: 2,
            floods: false,
            endings: vec![Ending::CleanStop],
            // Changes of the policy, if there are any.
            faults_max: 8,
            deaths: false,
            deaths_at_end: false,
            pulls: false,
            latent: false,
            slow: false,
            refusals: false,
            silences: false,
            outages: false,
            full: false,
            failing_flushes: false,
            power_losses: false,
            scrubs: false,
            spares: false,
            returns: false,
            transient_one_in: None,
            pool_changes: false,
            volumes: false,
            views: false,
            grows: false,
            adds: false,
            // Where nothing may be lost, a fault is one too many.
            beyond: !geometry.layout().is_redundant() && single.what == SingleFault::Fail,
            insists: false,
            leases: false,
            rivals: false,
            clock_is_set: false,
            settings: SettingsChange::default(),
            single: Some(single),
            ..Plan::draw(workload)
        }
    }

    /// A planted bug that shows where a flush fails, or another host comes, has that in every seed:
    /// few have.
    pub fn draw_to_find(seed: u64, canary: Option<Canary>) -> Plan {
        let plan = Plan::draw(seed);
        match canary {
            Some(canary) if canary.is_of_hosts() => plan.with_rivals(),
            Some(canary) if canary.on_failed_flush() => Plan { failing_flushes: true, ..plan },
            Some(_) | None => plan,
        }
    }

    pub fn draw(seed: u64) -> Plan {
        let mut prng = Prng::stream(seed, "plan");
        let geometry = Geometry::draw(&mut prng).widened(seed);
        let policies = geometry.policies();
        let policy = prng.chance(1, 3).then(|| policies[prng.index(policies.len())]);
        let ops = [20, 60, 200][prng.index(3)];
        let endings = draw_endings(&mut prng);
        let mut half = || prng.chance(1, 2);
        let (deaths, pulls, latent, slow) = (half(), half(), half(), half());
        let (scrubs, spares, returns, pool_changes) = (half(), half(), half(), half());
        let (deaths_at_end, policy_changes) = (half(), half() && half());
        let mixed = half() && half() && half();
        let (integrity, lies) = draw_lies(seed, &geometry);
        let traits = draw_traits(&mut prng, geometry.drive_bytes(integrity));
        let floods = prng.chance(1, 24);
        let lives = 1 + prng.below(if floods { 2 } else { 5 });
        let workers = if floods { 16 } else { 1 + prng.below(5) };
        Plan {
            seed,
            geometry,
            policy: if integrity { Some(Policy::Journal) } else { policy },
            policy_changes: policy_changes && !integrity,
            integrity,
            sum_pages_max: draw_sum_pages(seed),
            lies,
            traits,
            mixed,
            lives: u32::try_from(lives).unwrap_or(1),
            workers: usize::try_from(workers).unwrap_or(1),
            ops_per_worker: if floods { 60 } else { ops.min(REQUESTS_MAX / (lives * workers)) },
            pause_ns_max: [0, 100_000, 10_000_000, 1_000_000_000][prng.index(4)],
            flush_one_in: [3, 10, 40][prng.index(3)],
            hot_stripes: [1, 3, 12][prng.index(3)],
            floods,
            endings,
            faults_max: [0, 2, 5, 12][prng.index(4)],
            deaths,
            deaths_at_end,
            pulls,
            latent,
            slow,
            // From a stream of its own, so that other seeds are what they were.
            refusals: Prng::stream(seed, "refusals").chance(1, 3),
            silences: Prng::stream(seed, "silences").chance(1, 5),
            outages: Prng::stream(seed, "outages").chance(1, 6),
            full: Prng::stream(seed, "full drives").chance(1, 6),
            failing_flushes: Prng::stream(seed, "failing flushes").chance(1, 6),
            power_losses: Prng::stream(seed, "power losses").chance(1, 6),
            scrubs,
            spares,
            returns,
            transient_one_in: prng.chance(1, 3).then(|| [5, 50, 500][prng.index(3)]),
            pool_changes,
            volumes: Prng::stream(seed, "volumes").chance(1, 6),
            views: Prng::stream(seed, "views").chance(1, 5),
            beyond: prng.chance(1, 8),
            insists: false,
            leases: Prng::stream(seed, "leases").chance(1, 6),
            rivals: false,
            clock_is_set: Prng::stream(seed, "clocks").chance(1, 8),
            grows: prng.chance(1, 4),
            settings: draw_settings(&mut prng, sector_bytes(traits, integrity)),
            adds: prng.chance(if integrity { 2 } else { 1 }, 4),
            single: None,
        }
        .with_enough_faults()
        .where_some_insist()
        .where_some_never_mend()
        .where_hosts_meet()
    }

    /// Past the limit: what a drive cannot read it may never read again.
    fn where_some_never_mend(self) -> Plan {
        let mends = !self.beyond || Prng::stream(self.seed, "mends").chance(1, 2);
        Plan { traits: Traits { mends, ..self.traits }, ..self }
    }

    fn where_hosts_meet(self) -> Plan {
        let meet = self.leases && !self.beyond && Prng::stream(self.seed, "rivals").chance(2, 3);
        if meet { self.with_rivals() } else { self }
    }

    /// Another host comes while one has the array. Without faults that last for longer than it may
    /// take a host to be replaced, or that the tasks of a life take back: they would be over in the
    /// hands of another. And what becomes of other volumes, only one host keeps account of.
    pub fn with_rivals(self) -> Plan {
        Plan {
            leases: true,
            rivals: true,
            refusals: false,
            silences: false,
            outages: false,
            full: false,
            failing_flushes: false,
            power_losses: false,
            pool_changes: false,
            volumes: false,
            grows: false,
            beyond: false,
            insists: false,
            ..self
        }
    }

    /// From a stream of its own, so that other seeds are what they were.
    fn where_some_insist(self) -> Plan {
        let layout = self.geometry.layout();
        let has_journal = layout.is_redundant() && layout.check_policy(Policy::Journal).is_ok();
        if !has_journal || !Prng::stream(self.seed, "insists").chance(1, 16) {
            return self;
        }
        Plan {
            insists: true,
            beyond: true,
            policy: Some(Policy::Journal),
            policy_changes: false,
            returns: true,
            lives: self.lives.max(2),
            endings: vec![Ending::PowerCut, Ending::ProcessCrash],
            ..self
        }
    }

    /// What few seeds have comes now and then in these.
    fn with_enough_faults(self) -> Plan {
        let is_rare = self.outages || self.full || self.failing_flushes || self.power_losses;
        Plan { faults_max: self.faults_max.max(if is_rare { 3 } else { 0 }), ..self }
    }

    /// Whether another host comes while one has the array: see `with_rivals`.
    pub fn has_rivals(&self) -> bool {
        let lasts = self.refusals || self.silences || self.outages || self.full;
        let loses = self.failing_flushes || self.power_losses;
        self.rivals && !lasts && !loses && !self.beyond
    }

    /// Whether volumes beside the main one are used: what becomes of them past the limit, nobody
    /// keeps account of.
    pub fn has_others(&self) -> bool {
        self.volumes && !self.beyond
    }

    /// Whether an array that lost more than its level bears has all of it again when all drives are
    /// back: what they had is untouched, and which parity may be old is known.
    pub fn comes_back_whole(&self) -> bool {
        if self.insists {
            return false;
        }
        let is_untouched = !self.latent && self.lies == Lies::None && !self.refusals && !self.full;
        let layout = self.geometry.layout();
        let policy = self.policy.unwrap_or_else(|| layout.default_policy());
        let is_covered = policy == Policy::Journal && !self.policy_changes;
        is_untouched && (is_covered || layout.parity == 0)
    }

    /// What the array reads and writes its members in.
    pub fn sector_bytes(&self) -> u32 {
        sector_bytes(self.traits, self.integrity)
    }

    /// Where things are on every drive.
    pub fn areas(&self) -> MemberLayout {
        let parity = self.geometry.layout().parity;
        let areas = label::plan_for(self.traits.bytes, parity, self.integrity);
        areas.expect("drives have room for areas")
    }

    /// One line about the seed.
    pub fn describe(&self) -> String {
        let Geometry { level, members, chunk_bytes, .. } = self.geometry;
        let Layout { data, parity, groups, .. } = self.geometry.layout();
        let policy = self.policy.map_or("usual policy".into(), |policy| format!("{policy:?}"));
        let Plan { lives, workers, ops_per_worker, hot_stripes, faults_max, .. } = self;
        let mut text = format!(
            "level {} of {members} ({groups} × {data}+{parity}), {policy}, chunk {}K, {lives} \
             lives of {workers} workers × {ops_per_worker} operations on {hot_stripes} stripes, up \
             to {faults_max} faults a life:",
            level_name(level),
            chunk_bytes >> 10
        );
        let kinds = [
            (self.floods, "floods"),
            (self.integrity, "checksums"),
            (self.integrity && self.sum_pages_max.is_some(), "few of them in memory"),
            (self.lies == Lies::Data, "lies"),
            (self.lies == Lies::Checksums, "lies about checksums"),
            (self.lies == Lies::Metadata, "lies about metadata"),
            (self.deaths, "deaths"),
            (self.deaths_at_end, "deaths at the end of a life"),
            (self.policy_changes, "policy changes"),
            (self.pulls, "pulls"),
            (self.latent, "latent errors"),
            (self.slow, "slow drives"),
            (self.refusals, "refused writes"),
            (self.silences, "silences"),
            (self.outages, "outages"),
            (self.full, "full drives"),
            (self.failing_flushes, "failing flushes"),
            (self.power_losses, "drives lose their power"),
            (self.scrubs, "scrubs"),
            (self.spares, "spares"),
            (self.returns, "returns"),
            (self.transient_one_in.is_some(), "transient errors"),
            (self.pool_changes, "pool changes"),
            (self.has_others(), "other volumes"),
            (self.views, "views"),
            (self.grows, "growing"),
            (self.adds, "members are added"),
            (self.leases, "leases"),
            (self.has_rivals(), "rivals"),
            (self.clock_is_set, "the clock is set"),
            (!self.traits.volatile_cache, "no volatile cache"),
            (self.traits.sector_bytes == 4096, "4K sectors"),
            (!self.traits.zeroes, "no zeroing by drives"),
            (!self.traits.mends, "what cannot be read stays so"),
            (self.mixed, "mixed drives"),
            (self.beyond, "BEYOND THE BUDGET"),
            (self.insists, "starts by force"),
        ];
        for (_, name) in kinds.iter().filter(|(there, _)| *there) {
            text += &format!(" {name},");
        }
        text += &format!(" ends {:?}, {:?}", self.endings, self.settings);
        text
    }
}

fn sector_bytes(traits: Traits, integrity: bool) -> u32 {
    if integrity { BLOCK_BYTES } else { traits.sector_bytes }
}

fn draw_endings(prng: &mut Prng) -> Vec<Ending> {
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
    endings
}

/// From a stream of its own, so that seeds without checksums are what they were.
fn draw_lies(seed: u64, geometry: &Geometry) -> (bool, Lies) {
    let mut prng = Prng::stream(seed, "lies");
    if !geometry.layout().is_redundant() {
        return (false, Lies::None);
    }
    // Another stream, so that seeds without it are what they were.
    let of_metadata = Prng::stream(seed, "lies about metadata").chance(1, 8);
    let other = if of_metadata { Lies::Metadata } else { Lies::None };
    if !prng.chance(1, 3) {
        return (false, other);
    }
    (true, [other, Lies::Data, Lies::Data, Lies::Data, Lies::Checksums][prng.index(5)])
}

/// From a stream of its own; where there are no checksums it says nothing.
fn draw_sum_pages(seed: u64) -> Option<usize> {
    let mut prng = Prng::stream(seed, "pages of checksums");
    prng.chance(1, 3).then(|| [1, 2, 4, 8][prng.index(4)])
}

fn draw_settings(prng: &mut Prng, sector_bytes: u32) -> SettingsChange {
    let mut drawn = |values: [u32; 3]| prng.chance(1, 2).then(|| values[prng.index(3)]);
    let percent = |value: u32| u8::try_from(value).expect("a percentage");
    SettingsChange {
        rebuild_percent: drawn([1, 10, 100]).map(percent),
        hedge_percent: drawn([1, 50, 100]).map(percent),
        scrub_period_s: drawn([0, 3600, 7200]),
        atomic_bytes: drawn([4 << 10, 128 << 10, (256 << 10) - sector_bytes / 4096 * 4096]),
        ..SettingsChange::default()
    }
}

fn draw_traits(prng: &mut Prng, bytes: u64) -> Traits {
    let latency = [(1_000, 2_000), (10_000, 200_000), (50_000, 5_000_000)][prng.index(3)];
    Traits {
        bytes,
        sector_bytes: if prng.chance(1, 5) { 4096 } else { 512 },
        volatile_cache: !prng.chance(1, 8),
        mends: true,
        zeroes: !prng.chance(1, 6),
        latency_ns_min: latency.0,
        latency_ns_max: latency.1,
    }
}
