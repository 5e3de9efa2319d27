//! What was measured, in numbers: for programs as JSON, for people as the rows of a table.

use std::collections::BTreeMap;

use ashlar_reactor::histogram::Histogram;
use serde::{Deserialize, Serialize};

use crate::counters::Sample;

/// How long requests took: percentiles, and exactly the longest and the sum.
#[derive(Clone, Default)]
pub struct Times {
    histogram: Histogram<0>,
    sum_ns: u128,
    max_ns: u64,
}

impl Times {
    #[inline]
    pub fn add(&mut self, ns: u64) {
        self.histogram.add_ns(ns);
        self.sum_ns += u128::from(ns);
        self.max_ns = self.max_ns.max(ns);
    }

    pub fn count(&self) -> u64 {
        self.histogram.samples()
    }

    fn add_all(&mut self, other: &Times) {
        self.histogram.add_all(&other.histogram);
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    fn latency(&self) -> Latency {
        let at = |ppm| self.histogram.percentile(ppm).min(self.max_ns);
        let mean = self.sum_ns.checked_div(self.count().into()).unwrap_or(0);
        Latency {
            mean_ns: u64::try_from(mean).unwrap_or(u64::MAX),
            p50_ns: at(500_000),
            p90_ns: at(900_000),
            p99_ns: at(990_000),
            p999_ns: at(999_000),
            p9999_ns: at(999_900),
            max_ns: self.max_ns,
        }
    }
}

/// In nanoseconds; percentiles are right to a sixteenth.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Latency {
    pub mean_ns: u64,
    pub p50_ns: u64,
    pub p90_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub p9999_ns: u64,
    pub max_ns: u64,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Requests {
    pub requests: u64,
    pub iops: f64,
    pub bytes_per_second: f64,
    pub latency: Latency,
}

/// Of the measured core, for each request; `None`: cannot be counted here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Cost {
    /// Of the time stamp counter: all of the core's time, whether it worked or looked for work.
    pub ticks: Option<f64>,
    pub cycles: Option<f64>,
    pub instructions: Option<f64>,
    pub system_calls: Option<f64>,
    /// Calls of io_uring_enter alone.
    pub ring_calls: Option<f64>,
}

impl Cost {
    pub fn between(before: &Sample, after: &Sample, requests: u64) -> Cost {
        let each = |before: Option<u64>, after: Option<u64>| {
            let passed = after?.checked_sub(before?)?;
            (requests > 0).then(|| number(passed) / number(requests))
        };
        Cost {
            ticks: each(before.ticks, after.ticks),
            cycles: each(before.cycles, after.cycles),
            instructions: each(before.instructions, after.instructions),
            system_calls: each(before.system_calls, after.system_calls),
            ring_calls: each(before.ring_calls, after.ring_calls),
        }
    }
}

/// One time of measuring.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Round {
    pub seconds: f64,
    /// Reads and writes together.
    pub all: Requests,
    pub reads: Option<Requests>,
    pub writes: Option<Requests>,
    pub cost_per_request: Cost,
    /// Reads whose bytes were compared with what was written; zero without `--verify`.
    pub reads_verified: u64,
}

/// What is counted in a round.
#[derive(Clone, Default)]
pub struct Meter {
    pub reads: Times,
    pub writes: Times,
    pub reads_verified: u64,
}

impl Meter {
    pub fn requests(&self) -> u64 {
        self.reads.count() + self.writes.count()
    }

    pub fn round(&self, block_bytes: u32, ns: u64, before: &Sample, after: &Sample) -> Round {
        let seconds = number(ns.max(1)) / 1e9;
        let of = |times: &Times| {
            let iops = number(times.count()) / seconds;
            let bytes_per_second = iops * f64::from(block_bytes);
            let (requests, latency) = (times.count(), times.latency());
            Requests { requests, iops, bytes_per_second, latency }
        };
        let mut all = self.reads.clone();
        all.add_all(&self.writes);
        let some = |times: &Times| (times.count() > 0).then(|| of(times));
        Round {
            seconds,
            all: of(&all),
            reads: some(&self.reads),
            writes: some(&self.writes),
            cost_per_request: Cost::between(before, after, self.requests()),
            reads_verified: self.reads_verified,
        }
    }
}

/// What one who made requests has counted in a round.
#[derive(Clone)]
pub struct Tally {
    pub block_bytes: u32,
    pub meter: Meter,
    pub ns: u64,
    pub before: Sample,
    pub after: Sample,
}

impl Tally {
    /// Of both together, who were at work at the same time.
    #[must_use]
    pub fn and(mut self, other: &Tally) -> Tally {
        self.meter.reads.add_all(&other.meter.reads);
        self.meter.writes.add_all(&other.meter.writes);
        self.meter.reads_verified += other.meter.reads_verified;
        self.ns = self.ns.max(other.ns);
        self.before = self.before.and(&other.before);
        self.after = self.after.and(&other.after);
        self
    }

    pub fn round(&self) -> Round {
        self.meter.round(self.block_bytes, self.ns, &self.before, &self.after)
    }
}

/// Everything about one run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// `engine` or `vhost`.
    pub bench: String,
    /// What was measured, as it was asked for and as it came out.
    pub setup: BTreeMap<String, String>,
    pub rounds: Vec<Round>,
}

/// Heads of [`Report::rows`]; those that end in `>` are aligned to the right.
pub const HEADS: [&str; 13] = [
    "ROUND>",
    "WHAT",
    "IOPS>",
    "BYTES/s>",
    "MEAN>",
    "p50>",
    "p90>",
    "p99>",
    "p99.9>",
    "p99.99>",
    "MAX>",
    "TICKS/IO>",
    "INSN/IO>",
];

impl Report {
    /// A row for each round and kind of request.
    pub fn rows(&self) -> Vec<[String; HEADS.len()]> {
        let mut rows = Vec::new();
        for (index, round) in self.rounds.iter().enumerate() {
            let kinds = [("read", round.reads), ("write", round.writes)];
            for (what, requests) in kinds {
                let Some(requests) = requests else { continue };
                rows.push(row(index + 1, what, &requests, &round.cost_per_request));
            }
        }
        rows
    }

    /// Lines about the whole: what was set up, and what has no column.
    pub fn lines(&self) -> Vec<String> {
        let setup: Vec<String> =
            self.setup.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let mut lines = vec![format!("{}: {}", self.bench, setup.join(", "))];
        if let Some(round) = self.rounds.last() {
            let cost = &round.cost_per_request;
            let (calls, ring) = (fraction(cost.system_calls), fraction(cost.ring_calls));
            lines.push(format!(
                "system calls of the measured core for each request: {calls}; io_uring_enter \
                 alone: {ring}"
            ));
        }
        let verified: u64 = self.rounds.iter().map(|round| round.reads_verified).sum();
        if verified > 0 {
            lines.push(format!("{verified} reads verified, none wrong"));
        }
        lines
    }
}

fn row(round: usize, what: &str, its: &Requests, cost: &Cost) -> [String; HEADS.len()] {
    let latency = &its.latency;
    [
        round.to_string(),
        what.to_owned(),
        scaled(its.iops),
        scaled(its.bytes_per_second),
        time(latency.mean_ns),
        time(latency.p50_ns),
        time(latency.p90_ns),
        time(latency.p99_ns),
        time(latency.p999_ns),
        time(latency.p9999_ns),
        time(latency.max_ns),
        whole(cost.ticks),
        whole(cost.instructions),
    ]
}

/// `n/a` for what cannot be had here.
fn whole(value: Option<f64>) -> String {
    value.map_or_else(|| "n/a".to_owned(), |value| format!("{value:.0}"))
}

fn fraction(value: Option<f64>) -> String {
    value.map_or_else(|| "n/a".to_owned(), |value| format!("{value:.4}"))
}

/// Three or more digits, in thousands: `1.52M`, `812k`, `96.0`.
pub fn scaled(value: f64) -> String {
    match value {
        1e9.. => format!("{:.2}G", value / 1e9),
        1e6..1e9 => format!("{:.2}M", value / 1e6),
        1e3..1e6 => format!("{:.1}k", value / 1e3),
        _ => format!("{value:.1}"),
    }
}

/// Nanoseconds, to three digits or so: `640ns`, `4.2us`, `87us`, `1.3ms`, `2.0s`.
pub fn time(ns: u64) -> String {
    let (us, ms) = (ns / 1_000, ns / 1_000_000);
    match ns {
        0..1_000 => format!("{ns}ns"),
        1_000..100_000 => format!("{us}.{}us", ns / 100 % 10),
        100_000..1_000_000 => format!("{us}us"),
        1_000_000..100_000_000 => format!("{ms}.{}ms", us / 100 % 10),
        100_000_000..1_000_000_000 => format!("{ms}ms"),
        1_000_000_000.. => format!("{}.{}s", ms / 1000, ms / 100 % 10),
    }
}

/// For display only: 53 bits are enough.
pub fn number(value: u64) -> f64 {
    value as f64
}

#[cfg(test)]
mod tests {
    //! Goal: the numbers are right, and programs and people are told the same ones.
    //! Method: a meter with known times.

    use super::*;

    fn report() -> Report {
        let mut meter = Meter { reads_verified: 2, ..Meter::default() };
        (1..=3).for_each(|us| meter.reads.add(us * 1000));
        meter.writes.add(50_000);
        let before = Sample { ticks: Some(100), ring_calls: Some(0), ..Sample::default() };
        let after = Sample {
            ticks: Some(500),
            ring_calls: Some(1),
            instructions: Some(7),
            ..Sample::default()
        };
        let round = meter.round(4096, 2_000_000_000, &before, &after);
        let setup = BTreeMap::from([("depth".to_owned(), "4".to_owned())]);
        Report { bench: "engine".into(), setup, rounds: vec![round] }
    }

    #[test]
    fn numbers_follow_from_what_was_counted() {
        let round = report().rounds[0];
        assert_eq!((round.seconds, round.all.requests, round.all.iops), (2.0, 4, 2.0));
        assert_eq!(round.all.bytes_per_second, 8192.0);
        let reads = round.reads.unwrap();
        assert_eq!((reads.requests, reads.latency.mean_ns, reads.latency.max_ns), (3, 2000, 3000));
        assert!((2000..2126).contains(&reads.latency.p50_ns), "{reads:?}");
        assert_eq!((reads.latency.p99_ns, reads.latency.p9999_ns), (3000, 3000));
        assert_eq!((round.all.latency.mean_ns, round.all.latency.max_ns), (14_000, 50_000));
        let cost = round.cost_per_request;
        assert_eq!((cost.ticks, cost.ring_calls), (Some(100.0), Some(0.25)));
        assert_eq!((cost.instructions, cost.system_calls, cost.cycles), (None, None, None));
    }

    #[test]
    fn what_did_not_happen_has_no_numbers() {
        let (meter, sample) = (Meter::default(), Sample::default());
        let round = meter.round(4096, 0, &sample, &sample);
        assert_eq!((round.reads, round.writes, round.all.requests), (None, None, 0));
        assert_eq!(round.cost_per_request, Cost::default());
    }

    #[test]
    fn json_has_the_names_that_programs_look_for() {
        let text = serde_json::to_string(&report()).unwrap();
        let json: serde_json::Value = serde_json::from_str(&text).unwrap();
        assert_eq!(json["bench"], "engine");
        assert_eq!(json["setup"]["depth"], "4");
        assert_eq!(json["rounds"][0]["all"]["iops"], 2.0);
        assert_eq!(json["rounds"][0]["writes"]["latency"]["p50_ns"], 50_000);
        assert_eq!(json["rounds"][0]["cost_per_request"]["instructions"], serde_json::Value::Null);
        assert_eq!(serde_json::from_str::<Report>(&text).unwrap(), report());
    }

    #[test]
    fn rows_have_a_cell_for_every_head() {
        let rows = report().rows();
        let kinds: Vec<&str> = rows.iter().map(|row| row[1].as_str()).collect();
        assert_eq!(kinds, ["read", "write"]);
        assert_eq!(rows[1][2..6], ["0.5", "2.0k", "50.0us", "50.0us"]);
        assert_eq!(rows[0][11..], ["100", "n/a"]);
        let lines = report().lines();
        assert!(lines[0].contains("depth 4") && lines[1].contains("n/a"), "{lines:?}");
        assert!(lines[2].starts_with("2 reads verified"));
    }

    #[test]
    fn numbers_are_printed_short() {
        let cases = [(0.0, "0.0"), (999.0, "999.0"), (1520.0, "1.5k"), (1_520_000.0, "1.52M")];
        for (value, text) in cases {
            assert_eq!(scaled(value), text);
        }
        let cases = [(999, "999ns"), (4_260, "4.2us"), (870_900, "870us"), (1_320_000, "1.3ms")];
        for (ns, text) in cases {
            assert_eq!(time(ns), text);
        }
    }
}
