//! What one request costs the drives at least, and so how many a second they allow.
//!
//! An array of n members keeps k data and m parity chunks in a stripe, n = k + m; degraded, one
//! member is away. An operation of `len` bytes occupies a drive for
//! `max(1 / iops, len / bytes_per_second)`, and what a request costs is the sum over its
//! operations. Allowed are so many requests a second as keep all drives that are there busy:
//! `drives / cost`. Parity turns from stripe to stripe, so each drive has the same part of it; but
//! the parity chunks of a stripe are neighbours, and with a member of RAID 6 away, its own two have
//! more of the small writes than others have: the busiest drive is the limit there.
//!
//! These are bounds of geometry and policy, not of this engine: each case is the fewest operations
//! with which parity can be kept right, and under policy `journal` what is written is in the
//! journal before. The test counts them out, case by case.

use std::ops::{Add, Mul};
use std::time::Duration;

use ashlar_format::array_superblock::{Level, Policy};
use ashlar_format::journal_batch::PAYLOAD_BYTES_MAX;

pub const IOPS: u64 = 10_000;
pub const BYTES_PER_SECOND: u64 = 200_000_000;
pub const LATENCY: Duration = Duration::from_micros(80);
pub const CHUNK: u64 = 64 << 10;
pub const BLOCK: u64 = 4 << 10;
/// Of one request of the log.
pub const LOG_BLOCK: u64 = 8 << 10;

#[derive(Clone, Copy)]
pub struct Case {
    pub level: Level,
    pub members: u64,
    pub policy: Policy,
    pub degraded: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Work {
    RandomRead,
    RandomWrite,
    /// In a span that is small against the ring: blocks are overwritten before they are in place.
    Overwrite,
    Mixed,
    SequentialRead,
    SequentialWrite,
}

impl Work {
    pub const ALL: [Work; 6] = [
        Work::RandomRead,
        Work::RandomWrite,
        Work::Overwrite,
        Work::Mixed,
        Work::SequentialRead,
        Work::SequentialWrite,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Work::RandomRead => "random read",
            Work::RandomWrite => "random write",
            Work::Overwrite => "  in 64 MiB",
            Work::Mixed => "random 70/30",
            Work::SequentialRead => "sequential read",
            Work::SequentialWrite => "sequential write",
        }
    }

    /// Requests under way: enough for all drives, however chance spreads them.
    pub fn queue_depth(self) -> u64 {
        match self {
            Work::RandomRead | Work::RandomWrite | Work::Overwrite | Work::Mixed => 128,
            Work::SequentialRead | Work::SequentialWrite => 64,
        }
    }

    pub fn writes(self) -> bool {
        !matches!(self, Work::RandomRead | Work::SequentialRead)
    }

    /// Its cost, as people read it.
    pub fn formula(self) -> &'static [&'static str] {
        match self {
            Work::RandomRead => &["1 read; degraded: [(n − 1) + k] / n, for one of n is away"],
            Work::RandomWrite | Work::Overwrite => &[
                "w(m) = min(2 + 2m, k + m), and journal; degraded: of n places the block itself",
                "is away in one, parity in m, another block in k − 1: w(0) = 1,",
                "[(k − 1 + m) + m · w(m − 1) + (k − 1) · min(2 + 2m, k + 1 + m)] / n",
            ],
            Work::Mixed => &["0.7 · random read + 0.3 · random write"],
            Work::SequentialRead => {
                &["k of 64 KiB for a stripe, degraded too: parity in the place"]
            }
            Work::SequentialWrite => &["k + m of 64 KiB, and journal; degraded: k + m − 1"],
        }
    }
}

/// What drives do for one request, on average.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    pub operations: f64,
    pub bytes: f64,
    /// Of one drive.
    pub seconds: f64,
}

impl Cost {
    const NONE: Cost = Cost { operations: 0.0, bytes: 0.0, seconds: 0.0 };

    /// One operation.
    fn of(len: u64) -> Cost {
        let seconds = (1.0 / IOPS as f64).max(len as f64 / BYTES_PER_SECOND as f64);
        Cost { operations: 1.0, bytes: len as f64, seconds }
    }
}

impl Add for Cost {
    type Output = Cost;

    fn add(self, other: Cost) -> Cost {
        Cost {
            operations: self.operations + other.operations,
            bytes: self.bytes + other.bytes,
            seconds: self.seconds + other.seconds,
        }
    }
}

impl Mul<f64> for Cost {
    type Output = Cost;

    fn mul(self, times: f64) -> Cost {
        Cost {
            operations: self.operations * times,
            bytes: self.bytes * times,
            seconds: self.seconds * times,
        }
    }
}

impl Case {
    pub fn parity(&self) -> u64 {
        u64::from(self.level.parity().unwrap_or(0))
    }

    pub fn data(&self) -> u64 {
        self.members - self.parity()
    }

    /// Of one sequential request: a whole stripe.
    pub fn stripe_bytes(&self) -> u64 {
        self.data() * CHUNK
    }

    pub fn drives(&self) -> f64 {
        (self.members - u64::from(self.degraded)) as f64
    }

    /// Requests a second that the drives allow.
    pub fn allowed(&self, work: Work) -> f64 {
        let all = self.drives() / self.cost(work).seconds;
        match work {
            Work::RandomWrite | Work::Overwrite => {
                let loads = self.loads_of_writes();
                let busiest = loads.into_iter().max().unwrap_or(0) as f64;
                let requests = self.blocks_of_loads() as f64;
                all.min(requests / (busiest * Cost::of(BLOCK).seconds))
            }
            Work::RandomRead | Work::Mixed | Work::SequentialRead | Work::SequentialWrite => all,
        }
    }

    /// Of a log: each of so many writers waits for its write, then for its flush.
    pub fn allowed_log(&self, writers: u64) -> f64 {
        let write = 1.0 / IOPS as f64 + LATENCY.as_secs_f64();
        writers as f64 / (write + LATENCY.as_secs_f64())
    }

    pub fn cost(&self, work: Work) -> Cost {
        let (k, m) = (self.data() as f64, self.parity() as f64);
        match work {
            Work::RandomRead => Cost::of(BLOCK) * self.reads_of_a_read(),
            Work::RandomWrite | Work::Overwrite => {
                Cost::of(BLOCK) * self.operations_of_a_write() + self.journal(BLOCK)
            }
            Work::Mixed => self.cost(Work::RandomRead) * 0.7 + self.cost(Work::RandomWrite) * 0.3,
            // Of k chunks of data one may be away: parity is read in its place.
            Work::SequentialRead => Cost::of(CHUNK) * k,
            Work::SequentialWrite => {
                let chunks = k + m - f64::from(u8::from(self.degraded));
                Cost::of(CHUNK) * chunks + self.journal(self.stripe_bytes())
            }
        }
    }

    /// Operations on each member, in place, if each data block of n stripes is written once for
    /// each parity chunk that may be the first to be read. The first is the one that is away.
    fn loads_of_writes(&self) -> Vec<u64> {
        let (n, k) = (self.members, self.data());
        let mut loads = vec![0; n as usize];
        let blocks = (0..n).flat_map(|stripe| (0..k).map(move |block| (stripe, block)));
        for (stripe, block) in blocks {
            let away = self.degraded.then_some((n - stripe) % n);
            for turn in 0..self.parity().max(1) {
                let positions = positions_of_a_write(k, n - k, block, away, turn);
                let members = positions.iter().map(|position| ((stripe + position) % n) as usize);
                members.for_each(|member| loads[member] += 1);
            }
        }
        loads
    }

    /// Written once by that.
    fn blocks_of_loads(&self) -> u64 {
        self.members * self.data() * self.parity().max(1)
    }

    /// Largest batches, divided over all members that are here, k shares of data among them; or, if
    /// there is no other share, whole on as many members as may be lost, and one more.
    fn journal(&self, bytes: u64) -> Cost {
        let (payload, here) =
            (u64::from(PAYLOAD_BYTES_MAX), self.members - u64::from(self.degraded));
        let batches = bytes as f64 / payload as f64;
        match self.policy {
            Policy::Journal if here > self.data() => {
                Cost::of(payload / self.data()) * here as f64 * batches
            }
            Policy::Journal => Cost::of(payload) * (self.parity() + 1) as f64 * batches,
            Policy::Bitmap | Policy::None => Cost::NONE,
        }
    }

    /// One of n blocks is away, and worked out from k others.
    fn reads_of_a_read(&self) -> f64 {
        let (n, k) = (self.members as f64, self.data() as f64);
        if self.degraded { (n - 1.0 + k) / n } else { 1.0 }
    }

    /// One block in place. Read-modify-write reads it and its parity, and writes both: 2 + 2m.
    /// Reconstruction reads the other k − 1 data blocks and writes it and parity: k + m.
    fn operations_of_a_write(&self) -> f64 {
        let (n, k, m) = (self.members as f64, self.data() as f64, self.parity() as f64);
        let healthy = |m: f64| if m == 0.0 { 1.0 } else { (2.0 + 2.0 * m).min(k + m) };
        if !self.degraded {
            return healthy(m);
        }
        // The block itself is away: the others are read, parity is written.
        let block = k - 1.0 + m;
        let parity = healthy(m - 1.0);
        // Another block is away: reconstruction needs one more read to work it out.
        let other = (2.0 + 2.0 * m).min(k + 1.0 + m);
        (block + m * parity + (k - 1.0) * other) / n
    }
}

/// Positions of the fewest operations that write data block `block` while position `away` is away:
/// k data positions, then m of parity. What is read to work one out is all other data, and then
/// parity in turn: that is where there is less to do for those that keep parity, which is written.
fn positions_of_a_write(k: u64, m: u64, block: u64, away: Option<u64>, turn: u64) -> Vec<u64> {
    let here = |position: &u64| Some(*position) != away;
    let parity: Vec<u64> = (k..k + m).filter(here).collect();
    let stored: Vec<u64> = (k..k + m).chain([block]).filter(here).collect();
    if parity.is_empty() {
        return stored;
    }
    let others: Vec<u64> = (0..k).filter(|position| *position != block).collect();
    let mut reads = Vec::new();
    if others.iter().all(here) {
        reads.push(others);
    }
    let in_turn = (0..m).map(|index| k + (turn + index) % m);
    reads.push((0..k).chain(in_turn).filter(here).take(k as usize).collect());
    if here(&block) {
        reads.push(stored.clone());
    }
    let fewest = reads.into_iter().min_by_key(Vec::len).expect("any k can be read");
    fewest.into_iter().chain(stored).collect()
}

#[cfg(test)]
mod tests {
    //! Goal: the closed forms are the fewest operations there are.
    //! Method: every place of the block and of the member that is away, every way to write it.

    use super::*;

    #[test]
    fn a_write_costs_the_fewest_operations() {
        let levels = [(Level::Raid5, 3..9), (Level::Raid6, 4..12), (Level::Raid7, 5..12)];
        for (level, members) in levels.into_iter().flat_map(|(l, all)| all.map(move |n| (l, n))) {
            for degraded in [false, true] {
                let case = Case { level, members, policy: Policy::Bitmap, degraded };
                let loads = case.loads_of_writes();
                let counted = loads.iter().sum::<u64>() as f64 / case.blocks_of_loads() as f64;
                let formula = case.operations_of_a_write();
                assert!((formula - counted).abs() < 1e-9, "{level:?} {members}: {counted}");
                let (mean, most) = (loads.iter().sum::<u64>(), loads.iter().max().unwrap());
                assert!(*most as f64 * case.drives() >= mean as f64);
                assert!(degraded || loads.iter().all(|load| load == most));
                assert!(!degraded || loads[0] == 0, "nothing is asked of what is away");
            }
        }
    }

    #[test]
    fn the_busiest_drive_is_the_limit() {
        let (level, members, policy) = (Level::Raid6, 6, Policy::None);
        let case = Case { level, members, policy, degraded: true };
        assert_eq!(case.loads_of_writes(), [0, 52, 48, 48, 48, 52]);
        // 24 requests in 26 operations' time.
        assert_eq!(case.allowed(Work::RandomWrite).round(), 9231.0);
        let case = Case { level: Level::Raid7, members: 7, policy, degraded: true };
        let loads = case.loads_of_writes();
        assert!(loads[1..].iter().all(|load| *load == loads[1]), "{loads:?}");
    }

    #[test]
    fn known_sums() {
        let case =
            |degraded| Case { level: Level::Raid5, members: 5, policy: Policy::Journal, degraded };
        // 5 drives of 10000 operations; 4 of them at 4 reads for each fifth block.
        assert_eq!(case(false).allowed(Work::RandomRead).round(), 50_000.0);
        assert_eq!(case(true).allowed(Work::RandomRead).round(), 25_000.0);
        // 200 MB/s: 1 GB/s of data on five drives, 0.8 GB/s on four; 256 KiB a request.
        assert_eq!(case(false).allowed(Work::SequentialRead).round(), 3815.0);
        assert_eq!(case(true).allowed(Work::SequentialRead).round(), 3052.0);
        // Each byte 5/4 times in the journal, and 5/4 times in place.
        assert_eq!(case(false).allowed(Work::SequentialWrite).round(), 1526.0);
    }
}
