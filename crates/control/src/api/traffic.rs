//! What is asked of a drive, an array or an export, as the API shows it.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Requests of one kind. Rates and times are those of the last five to ten seconds, and zero where
/// there was nothing; all else is since the start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Requests {
    pub total: u64,
    pub bytes: u64,
    /// How long they took, all of them together.
    pub time_ns: u64,
    /// How many took less than 1024 ns; then how many less than 2048 ns and not less than that; and
    /// so on, each twice as long as the one before, and the last without end.
    pub octaves: Vec<u64>,
    /// Requests a second.
    pub per_second: u64,
    pub bytes_per_second: u64,
    /// Percentiles are right to a sixteenth.
    pub p50_ns: u64,
    pub p99_ns: u64,
    pub p999_ns: u64,
    pub max_ns: u64,
}

/// To a turn of the reactor: what begins and ends in one turn took no time.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    pub reads: Requests,
    pub writes: Requests,
    pub flushes: Requests,
    /// Requests of any kind under way, now and at most; `null` where it is not known.
    pub depth: Option<u32>,
    pub depth_max: Option<u32>,
    /// On average of the last seconds, in thousandths.
    pub depth_mean_milli: u64,
}
