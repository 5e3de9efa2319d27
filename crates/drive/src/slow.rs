//! Which of an array's drives is slow.
//!
//! A drive is judged by its siblings: they do the same work, so a drive that takes several times as
//! long as they do is the one that the array waits for. (Gunawi et al., "Fail-Slow at Scale", FAST
//! 2018: such drives are common, and no error tells of them.) It is reported, not failed: it
//! holds good data.
//!
//! So is a drive whose median is like theirs, and which keeps some operations waiting very long: an
//! array waits for the slowest of its members, so one of a hundred there is many of its own. One
//! pause, such as a drive makes to clean up, is no reason: it is looked at for longer than the
//! window in which it would be seen.

use smallvec::SmallVec;

use crate::latency::LatencySummary;

/// Times the siblings' median above which a drive is slow.
pub const SLOW_FACTOR: u64 = 4;
/// However fast its siblings are, a drive whose median is below this is not slow.
pub const SLOW_NS_MIN: u64 = 200_000;
/// Fewer operations in the window say nothing; a 99th percentile needs a hundred.
pub const SAMPLES_MIN: u64 = 100;
/// Times the siblings' 99th percentile above which that alone is slow,
pub const TAIL_FACTOR: u64 = 8;
/// and the least that is, however fast they are,
pub const TAIL_NS_MIN: u64 = 5_000_000;
/// of so many operations at least: then the percentile is of ten of them.
const TAIL_SAMPLES_MIN: u64 = 1000;
/// Looks in a row that must find a drive slow before it is said to be.
const LOOKS_UNTIL_SLOW: u8 = 3;
/// The same by its 99th percentile alone: longer than the window they look at.
const LOOKS_UNTIL_TAIL_SLOW: u8 = 15;
/// Looks in a row that must not, before it is said no more: longer than the window they look at.
const LOOKS_UNTIL_NORMAL: u8 = 15;

/// What its siblings say about a drive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It, or all its siblings, did too little lately.
    Unknown,
    Normal,
    Slow(Slowness),
}

/// The numbers behind a verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slowness {
    pub p50_ns: u64,
    pub p99_ns: u64,
    /// Medians of the siblings' percentiles.
    pub siblings_p50_ns: u64,
    pub siblings_p99_ns: u64,
}

impl Slowness {
    fn is_slow(&self, samples: u64) -> bool {
        let tail = self.p99_ns > TAIL_NS_MIN
            && self.p99_ns > self.siblings_p99_ns.saturating_mul(TAIL_FACTOR);
        self.is_throughout() || tail && samples >= TAIL_SAMPLES_MIN
    }

    /// Not by the 99th percentile alone.
    fn is_throughout(&self) -> bool {
        let exceeds = |own: u64, siblings: u64| own > siblings.saturating_mul(SLOW_FACTOR);
        self.p50_ns > SLOW_NS_MIN
            && exceeds(self.p50_ns, self.siblings_p50_ns)
            && exceeds(self.p99_ns, self.siblings_p99_ns)
    }
}

/// What makes a drive slow, as of the last look that found it so.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Evidence {
    pub slowness: Slowness,
    /// In its reads; else in its writes.
    pub in_reads: bool,
}

impl Verdict {
    pub fn is_slow(self) -> bool {
        matches!(self, Verdict::Slow(_))
    }

    fn slowness(self) -> Option<Slowness> {
        match self {
            Verdict::Slow(slowness) => Some(slowness),
            Verdict::Normal | Verdict::Unknown => None,
        }
    }
}

/// What was said of a drive, look after look: it does not change with every one.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Opinion {
    slow: bool,
    /// Looks in a row that found otherwise.
    otherwise: u8,
    evidence: Option<Evidence>,
}

impl Opinion {
    /// `None`: it is not slow.
    pub fn evidence(self) -> Option<Evidence> {
        self.evidence.filter(|_| self.slow)
    }

    /// After one more look, at its reads and at its writes.
    #[must_use]
    pub fn after(self, reads: Verdict, writes: Verdict) -> Opinion {
        if (reads, writes) == (Verdict::Unknown, Verdict::Unknown) {
            return self;
        }
        let of = |verdict: Verdict, in_reads| {
            verdict.slowness().map(|slowness| Evidence { slowness, in_reads })
        };
        let found = of(reads, true).or(of(writes, false));
        let its = Opinion { evidence: found.or(self.evidence), ..self };
        if self.slow == found.is_some() {
            return Opinion { otherwise: 0, ..its };
        }
        let throughout = [reads, writes].into_iter().filter_map(Verdict::slowness);
        let throughout = throughout.into_iter().any(|its| its.is_throughout());
        let enough = match (self.slow, throughout) {
            (true, _) => LOOKS_UNTIL_NORMAL,
            (false, true) => LOOKS_UNTIL_SLOW,
            (false, false) => LOOKS_UNTIL_TAIL_SLOW,
        };
        let otherwise = self.otherwise + 1;
        if otherwise < enough {
            return Opinion { otherwise, ..its };
        }
        Opinion { slow: !self.slow, otherwise: 0, ..its }
    }
}

/// Medians of the percentiles of a drive's siblings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Siblings {
    pub p50_ns: u64,
    pub p99_ns: u64,
}

/// `None`: they did too little lately to say.
pub fn siblings_of(members: &[Option<LatencySummary>], index: usize) -> Option<Siblings> {
    let others = members.iter().enumerate().filter(|(other, _)| *other != index);
    let known: SmallVec<[LatencySummary; 16]> =
        others.filter_map(|(_, other)| other.filter(is_known)).collect();
    if known.is_empty() {
        return None;
    }
    Some(Siblings {
        p50_ns: median(known.iter().map(|sibling| sibling.p50_ns).collect()),
        p99_ns: median(known.iter().map(|sibling| sibling.p99_ns).collect()),
    })
}

fn is_known(its: &LatencySummary) -> bool {
    its.samples >= SAMPLES_MIN
}

/// Judges every drive of one array by what it did lately, reads or writes; `None`: a member without
/// a drive. Verdicts in the same order.
pub fn judge(members: &[Option<LatencySummary>]) -> SmallVec<[Verdict; 16]> {
    (0..members.len()).map(|index| judge_one(members, index)).collect()
}

fn judge_one(members: &[Option<LatencySummary>], index: usize) -> Verdict {
    let own = members[index].filter(is_known);
    let Some((its, siblings)) = own.zip(siblings_of(members, index)) else {
        return Verdict::Unknown;
    };
    let slowness = Slowness {
        p50_ns: its.p50_ns,
        p99_ns: its.p99_ns,
        siblings_p50_ns: siblings.p50_ns,
        siblings_p99_ns: siblings.p99_ns,
    };
    if slowness.is_slow(its.samples) { Verdict::Slow(slowness) } else { Verdict::Normal }
}

/// Of an even number the larger of the two in the middle: in doubt nobody is slow.
fn median(mut values: SmallVec<[u64; 16]>) -> u64 {
    values.sort_unstable();
    values[values.len() / 2]
}

#[cfg(test)]
mod tests {
    //! Goal: exactly the drive that the others would name is slow.
    //! Method: made-up percentiles on both sides of every bound.

    use super::*;

    fn its(p50_us: u64, p99_us: u64) -> Option<LatencySummary> {
        let (p50_ns, p99_ns) = (p50_us * 1000, p99_us * 1000);
        Some(LatencySummary { samples: SAMPLES_MIN, p50_ns, p99_ns, p999_ns: p99_ns })
    }

    fn slow(members: &[Option<LatencySummary>]) -> Vec<usize> {
        let verdicts = judge(members);
        assert_eq!(verdicts.len(), members.len());
        (0..verdicts.len()).filter(|index| verdicts[*index].is_slow()).collect()
    }

    #[test]
    fn one_of_many_is_slow() {
        let members = [its(100, 500), its(900, 4000), its(110, 450), its(90, 600)];
        assert_eq!(slow(&members), [1]);
        let numbers = Slowness {
            p50_ns: 900_000,
            p99_ns: 4_000_000,
            siblings_p50_ns: 100_000,
            siblings_p99_ns: 500_000,
        };
        assert_eq!(judge(&members)[1], Verdict::Slow(numbers));
        assert_eq!(judge(&members)[0], Verdict::Normal);
    }

    #[test]
    fn both_percentiles_must_stand_out_and_the_median_be_long() {
        let normal = its(100, 500);
        assert_eq!(slow(&[normal, normal, its(401, 2001)]), [2]);
        for spared in [its(400, 2001), its(401, 2000), its(100, 9000)] {
            assert_eq!(slow(&[normal, normal, spared]), [0; 0]);
        }
        let fast = its(10, 20);
        assert_eq!(slow(&[fast, fast, its(200, 4000)]), [0; 0], "fast enough for anyone");
        assert_eq!(slow(&[fast, fast, its(201, 4000)]), [2]);
    }

    #[test]
    fn a_long_tail_is_slow_if_it_lasts() {
        let many = |p50_us, p99_us| {
            its(p50_us, p99_us).map(|its| LatencySummary { samples: TAIL_SAMPLES_MIN, ..its })
        };
        let normal = many(100, 500);
        assert_eq!(slow(&[normal, normal, many(100, 5001)]), [2]);
        // Others wait as long, it is short, or it is of too few.
        let others = many(100, 700);
        for (other, spared) in
            [(others, many(100, 5600)), (normal, many(100, 5000)), (normal, its(100, 9000))]
        {
            assert_eq!(slow(&[other, other, spared]), [0; 0], "{spared:?}");
        }
        let (tail, all) =
            (judge(&[normal, many(100, 9000)])[1], judge(&[normal, many(900, 9000)])[1]);
        let after = |looks: usize, last: Verdict| {
            let looks = std::iter::repeat_n(tail, looks).chain([last]);
            looks.fold(Opinion::default(), |all, look| all.after(look, Verdict::Normal)).evidence()
        };
        assert_eq!((after(13, tail), after(1, all)), (None, None));
        let (slowness, in_reads) = (tail.slowness().unwrap(), true);
        assert_eq!(after(14, tail), Some(Evidence { slowness, in_reads }));
        // Slow throughout is slow at once, whatever it was before.
        assert_eq!(after(2, all).map(|its| its.slowness.p50_ns), Some(900_000));
    }

    #[test]
    fn one_look_changes_no_opinion() {
        let (fast, slow) = (Verdict::Normal, judge(&[its(100, 500), its(900, 4000)])[1]);
        let unknown = Verdict::Unknown;
        let after = |looks: &[(Verdict, Verdict)]| {
            let opinion = Opinion::default();
            looks.iter().fold(opinion, |all, (reads, writes)| all.after(*reads, *writes))
        };
        assert!(after(&[(slow, fast); 2]).evidence().is_none());
        assert!(
            after(&[(slow, unknown), (unknown, unknown), (fast, slow), (slow, slow)])
                .evidence()
                .is_some()
        );
        assert!(
            after(&[(slow, fast), (slow, fast), (fast, fast), (slow, fast)]).evidence().is_none()
        );
        let mut looks = vec![(slow, fast); 3];
        looks.extend([(fast, unknown); 14]);
        assert!(after(&looks).evidence().is_some());
        looks.push((unknown, fast));
        assert!(after(&looks).evidence().is_none());
    }

    #[test]
    fn in_doubt_nobody_is_slow() {
        let (normal, bad) = (its(100, 500), its(5000, 50_000));
        assert_eq!(slow(&[bad, bad, bad]), [0; 0], "the work is hard");
        assert_eq!(slow(&[normal, normal, bad, bad]), [2, 3]);
        assert_eq!(slow(&[normal, normal, bad, bad, bad]), [0; 0], "most are like that");
        assert_eq!(slow(&[normal, bad]), [1], "a mirror has one sibling");
        let few = |summary: Option<LatencySummary>| {
            summary.map(|its| LatencySummary { samples: SAMPLES_MIN - 1, ..its })
        };
        assert_eq!(judge(&[normal, few(bad)])[..], [Verdict::Unknown; 2]);
        assert_eq!(judge(&[None, bad, few(normal)])[..], [Verdict::Unknown; 3]);
        assert!(judge(&[]).is_empty());
    }
}
