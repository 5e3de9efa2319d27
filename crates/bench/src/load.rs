//! What is asked for: the next place and whether it is read or written, from a seed alone.

use std::fmt::Display;
use std::str::FromStr;

use ashlar_reactor::prng::Prng;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// In order, from the start again after the end.
    Read,
    Write,
    RandRead,
    RandWrite,
    /// Reads and writes at random places.
    RandRw,
}

impl Work {
    pub const ALL: [Work; 5] =
        [Work::Read, Work::Write, Work::RandRead, Work::RandWrite, Work::RandRw];

    pub fn name(self) -> &'static str {
        match self {
            Work::Read => "read",
            Work::Write => "write",
            Work::RandRead => "randread",
            Work::RandWrite => "randwrite",
            Work::RandRw => "randrw",
        }
    }

    pub fn writes(self) -> bool {
        match self {
            Work::Write | Work::RandWrite | Work::RandRw => true,
            Work::Read | Work::RandRead => false,
        }
    }
}

impl Display for Work {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Work {
    type Err = String;

    fn from_str(text: &str) -> Result<Work, String> {
        let known = Work::ALL.into_iter().find(|work| work.name() == text);
        known.ok_or_else(|| "use read, write, randread, randwrite or randrw".to_owned())
    }
}

/// Requests of one size over one range.
#[derive(Clone, Copy, Debug)]
pub struct LoadSpec {
    pub work: Work,
    /// Of the requests of [`Work::RandRw`]; 0 to 100.
    pub read_percent: u8,
    /// Of each request.
    pub block_bytes: u32,
    /// The range that is worked on; what is left behind whole blocks is not touched.
    pub size_bytes: u64,
    pub seed: u64,
    pub lane: Lane,
}

/// Whose blocks these are, where several make requests at the same time: each has every `lanes`-th
/// one, so they meet in every stripe and in no block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    pub index: u64,
    pub lanes: u64,
}

impl Lane {
    /// All blocks are one's own.
    pub const ONLY: Lane = Lane { index: 0, lanes: 1 };
}

impl LoadSpec {
    /// Of the lane.
    pub fn blocks(&self) -> u64 {
        self.size_bytes / u64::from(self.block_bytes) / self.lane.lanes
    }

    /// Where a block of the lane is, in bytes: of two lanes of 4 KiB the second has 4 KiB, 12 KiB,
    /// 20 KiB, …
    pub fn offset(&self, block: u64) -> u64 {
        (block * self.lane.lanes + self.lane.index) * u64::from(self.block_bytes)
    }
}

/// One request that is to be made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// In blocks from the start of the range.
    pub block: u64,
    pub write: bool,
}

/// An endless sequence of requests.
#[derive(Clone, Debug)]
pub struct Load {
    spec: LoadSpec,
    places: Prng,
    kinds: Prng,
    next: u64,
}

impl Load {
    /// The range has at least one block.
    pub fn new(spec: LoadSpec) -> Load {
        assert!(spec.blocks() > 0, "a range without a block");
        let stream = |name| Prng::stream(spec.seed, name);
        Load { spec, places: stream("places"), kinds: stream("kinds"), next: 0 }
    }

    #[inline]
    pub fn step(&mut self) -> Step {
        match self.spec.work {
            Work::Read => Step { block: self.in_order(), write: false },
            Work::Write => Step { block: self.in_order(), write: true },
            Work::RandRead => Step { block: self.anywhere(), write: false },
            Work::RandWrite => Step { block: self.anywhere(), write: true },
            Work::RandRw => {
                let write = !self.kinds.chance(self.spec.read_percent.into(), 100);
                Step { block: self.anywhere(), write }
            }
        }
    }

    fn in_order(&mut self) -> u64 {
        let block = self.next;
        self.next = if block + 1 == self.spec.blocks() { 0 } else { block + 1 };
        block
    }

    fn anywhere(&mut self) -> u64 {
        self.places.below(self.spec.blocks())
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a seed alone decides what is asked for, and it is what its name says.
    //! Method: sequences beside each other; counts.

    use super::*;

    fn spec(work: Work) -> LoadSpec {
        let (block_bytes, size_bytes) = (4096, 10 * 4096 + 100);
        LoadSpec { work, read_percent: 70, block_bytes, size_bytes, seed: 3, lane: Lane::ONLY }
    }

    #[test]
    fn lanes_share_all_blocks_and_have_none_in_common() {
        let lanes = (0..3).map(|index| LoadSpec {
            lane: Lane { index, lanes: 3 },
            size_bytes: 9 * 4096,
            ..spec(Work::Read)
        });
        let blocks = lanes.flat_map(|its| (0..its.blocks()).map(move |block| its.offset(block)));
        let mut all: Vec<u64> = blocks.collect();
        all.sort_unstable();
        assert_eq!(all, (0..9).map(|block| block * 4096).collect::<Vec<_>>());
    }

    fn steps(spec: LoadSpec, count: usize) -> Vec<Step> {
        let mut load = Load::new(spec);
        (0..count).map(|_| load.step()).collect()
    }

    #[test]
    fn in_order_goes_round() {
        for (work, write) in [(Work::Read, false), (Work::Write, true)] {
            let expected = (0..25).map(|n| Step { block: n % 10, write });
            assert_eq!(steps(spec(work), 25), expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn random_places_cover_the_range_and_a_seed_repeats_them() {
        for work in [Work::RandRead, Work::RandWrite, Work::RandRw] {
            let first = steps(spec(work), 500);
            assert_eq!(first, steps(spec(work), 500));
            assert_ne!(first, steps(LoadSpec { seed: 4, ..spec(work) }, 500));
            for block in 0..10 {
                assert!(first.iter().any(|step| step.block == block), "{work} {block}");
            }
            assert!(first.iter().all(|step| step.block < 10));
        }
    }

    #[test]
    fn a_mix_is_what_was_asked_for() {
        for percent in [0, 1, 70, 100] {
            let mixed = steps(LoadSpec { read_percent: percent, ..spec(Work::RandRw) }, 20_000);
            let reads = mixed.iter().filter(|step| !step.write).count();
            assert!(reads.abs_diff(usize::from(percent) * 200) < 400, "{percent}: {reads}");
        }
        // The mix does not move the places.
        let places = |percent| {
            let its = LoadSpec { read_percent: percent, ..spec(Work::RandRw) };
            steps(its, 100).into_iter().map(|step| step.block).collect::<Vec<_>>()
        };
        assert_eq!(places(10), places(90));
    }

    #[test]
    fn names_are_read_back() {
        for work in Work::ALL {
            assert_eq!(work.to_string().parse(), Ok(work));
        }
        assert!("rw".parse::<Work>().unwrap_err().contains("randrw"));
    }
}
