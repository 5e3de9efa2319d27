//! Whether two things that were measured in turns differ.
//!
//! A, B, A, B, …: each A stands beside the B that ran right after it, so what changes slowly on the
//! machine changes both. What is left between the ratios of these pairs is chance: a difference
//! that is smaller than that is none.

use serde::{Deserialize, Serialize};

use crate::report::{Round, scaled};

/// Which number of a round is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Measure {
    Iops,
    MeanNs,
    P99Ns,
    InstructionsPerRequest,
}

impl Measure {
    pub const ALL: [Measure; 4] =
        [Measure::Iops, Measure::MeanNs, Measure::P99Ns, Measure::InstructionsPerRequest];

    pub fn name(self) -> &'static str {
        match self {
            Measure::Iops => "IOPS",
            Measure::MeanNs => "mean ns",
            Measure::P99Ns => "p99 ns",
            Measure::InstructionsPerRequest => "instructions/IO",
        }
    }

    /// `None`: it cannot be counted here.
    fn of(self, round: &Round) -> Option<f64> {
        match self {
            Measure::Iops => Some(round.all.iops),
            Measure::MeanNs => Some(round.all.latency.mean_ns as f64),
            Measure::P99Ns => Some(round.all.latency.p99_ns as f64),
            Measure::InstructionsPerRequest => round.cost_per_request.instructions,
        }
    }
}

/// What can be said of a difference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    BMore,
    BLess,
    /// The pairs differ among each other by more than A and B do.
    NoDifference,
    /// One pair has no spread.
    TooFewRounds,
}

/// Numbers of one side, over its rounds.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Side {
    pub median: f64,
    pub min: f64,
    pub max: f64,
}

/// One measure of A and of B.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    pub measure: Measure,
    pub a: Side,
    pub b: Side,
    /// Median of B over median of A.
    pub ratio: f64,
    /// The least and the greatest ratio of a B to the A before it.
    pub pair_ratio_min: f64,
    pub pair_ratio_max: f64,
    pub verdict: Verdict,
}

/// Heads of [`Comparison::row`].
pub const HEADS: [&str; 8] =
    ["WHAT", "A>", "A MIN..MAX>", "B>", "B MIN..MAX>", "B/A>", "PAIRS>", "VERDICT"];

impl Comparison {
    pub fn row(&self) -> [String; HEADS.len()] {
        let range = |side: &Side| format!("{}..{}", scaled(side.min), scaled(side.max));
        [
            self.measure.name().to_owned(),
            scaled(self.a.median),
            range(&self.a),
            scaled(self.b.median),
            range(&self.b),
            format!("{:.3}", self.ratio),
            format!("{:.3}..{:.3}", self.pair_ratio_min, self.pair_ratio_max),
            self.sentence(),
        ]
    }

    fn sentence(&self) -> String {
        let percent = (self.ratio - 1.0).abs() * 100.0;
        match self.verdict {
            Verdict::BMore => format!("B has {percent:.1} % more"),
            Verdict::BLess => format!("B has {percent:.1} % less"),
            Verdict::NoDifference => "no difference can be told: the spread is larger".to_owned(),
            Verdict::TooFewRounds => "one round tells no difference: use --rounds 5".to_owned(),
        }
    }
}

/// Compares rounds that were measured in turns; as many of each, at least one.
pub fn compare(a: &[Round], b: &[Round]) -> Vec<Comparison> {
    assert!(!a.is_empty() && a.len() == b.len(), "rounds come in pairs");
    let of = |measure: Measure| {
        let numbers = |rounds: &[Round]| rounds.iter().map(|r| measure.of(r)).collect();
        let (a, b): (Option<Vec<f64>>, Option<Vec<f64>>) = (numbers(a), numbers(b));
        compare_numbers(measure, &a?, &b?)
    };
    Measure::ALL.into_iter().filter_map(of).collect()
}

/// `None` where a number is zero: it has no ratio.
fn compare_numbers(measure: Measure, a: &[f64], b: &[f64]) -> Option<Comparison> {
    if a.iter().chain(b).any(|value| *value <= 0.0) {
        return None;
    }
    let ratios: Vec<f64> = a.iter().zip(b).map(|(a, b)| b / a).collect();
    let (a, b, pairs) = (side(a), side(b), side(&ratios));
    let ratio = b.median / a.median;
    let verdict = verdict(ratio, &pairs, ratios.len());
    let (pair_ratio_min, pair_ratio_max) = (pairs.min, pairs.max);
    Some(Comparison { measure, a, b, ratio, pair_ratio_min, pair_ratio_max, verdict })
}

fn verdict(ratio: f64, pairs: &Side, count: usize) -> Verdict {
    if count < 2 {
        return Verdict::TooFewRounds;
    }
    let (difference, spread) = ((ratio - 1.0).abs(), pairs.max - pairs.min);
    if spread >= difference {
        return Verdict::NoDifference;
    }
    if ratio > 1.0 { Verdict::BMore } else { Verdict::BLess }
}

fn side(values: &[f64]) -> Side {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted[(sorted.len() - 1) / 2], sorted[sorted.len() / 2]);
    Side { median: (low + high) / 2.0, min: sorted[0], max: sorted[sorted.len() - 1] }
}

#[cfg(test)]
mod tests {
    //! Goal: a difference is claimed only where the pairs agree on it.
    //! Method: made-up numbers, each verdict once, and both sides of the border.

    use super::*;
    use crate::counters::Sample;
    use crate::report::Meter;

    fn of(a: &[f64], b: &[f64]) -> Comparison {
        compare_numbers(Measure::Iops, a, b).unwrap()
    }

    #[test]
    fn numbers_of_pairs() {
        let found = of(&[100.0, 200.0, 110.0], &[120.0, 220.0, 132.0]);
        assert_eq!(found.a, Side { median: 110.0, min: 100.0, max: 200.0 });
        assert_eq!(found.b, Side { median: 132.0, min: 120.0, max: 220.0 });
        assert_eq!((found.ratio, found.pair_ratio_min, found.pair_ratio_max), (1.2, 1.1, 1.2));
        // A far outlier of the machine hits both of a pair, and does not hide a difference.
        assert_eq!(found.verdict, Verdict::BMore);
        assert_eq!(of(&[1.0, 3.0], &[2.0, 2.0]).a.median, 2.0);
    }

    #[test]
    fn verdicts() {
        let cases: [(&[f64], &[f64], Verdict); 6] = [
            (&[100.0, 100.0], &[110.0, 111.0], Verdict::BMore),
            (&[100.0, 100.0], &[90.0, 91.0], Verdict::BLess),
            (&[100.0, 100.0], &[100.0, 111.0], Verdict::NoDifference),
            (&[100.0, 100.0], &[100.0, 100.0], Verdict::NoDifference),
            (&[100.0, 100.0], &[90.0, 125.0], Verdict::NoDifference),
            (&[100.0], &[200.0], Verdict::TooFewRounds),
        ];
        for (a, b, verdict) in cases {
            assert_eq!(of(a, b).verdict, verdict, "{a:?} {b:?}");
            assert_eq!(of(a, b).row().len(), HEADS.len());
        }
        let text = of(&[100.0, 100.0], &[90.0, 125.0]).row()[7].clone();
        assert!(text.contains("no difference can be told"), "{text}");
    }

    #[test]
    fn what_cannot_be_counted_is_not_compared() {
        let mut meter = Meter::default();
        meter.reads.add(1000);
        let sample = Sample::default();
        let round = meter.round(512, 1_000_000, &sample, &sample);
        let measures: Vec<_> =
            compare(&[round, round], &[round, round]).iter().map(|its| its.measure).collect();
        assert_eq!(measures, [Measure::Iops, Measure::MeanNs, Measure::P99Ns]);
        assert_eq!(compare_numbers(Measure::Iops, &[0.0], &[1.0]), None);
    }
}
