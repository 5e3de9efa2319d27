//! How long a drive took, over the last seconds: what it is judged by.

use ashlar_reactor::window::Lately;

/// Times of the last window. Percentiles are zero without samples.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LatencySummary {
    pub samples: u64,
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
}

/// What a drive did lately, from submission to completion of each attempt that succeeded; and a
/// sample of what other reactors read from it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Latency {
    pub reads: LatencySummary,
    pub writes: LatencySummary,
}

pub(crate) fn summary(its: Lately) -> LatencySummary {
    let Lately { count, p50_ns, p99_ns, p999_ns, .. } = its;
    LatencySummary { samples: count, p50_ns, p99_ns, p999_ns }
}
