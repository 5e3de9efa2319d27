//! What an operator can set of an array, when it is created and while it runs.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// What is durable before a write is acknowledged, so that a crash leaves nothing half done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    /// The data, in journals: also a degraded array is as it was after a crash
    Journal,
    /// A bit for the region: what was written lately is resynced after a crash
    Bitmap,
    /// The bit only, also while parity is degraded: a crash then costs blocks written lately
    None,
}

/// What shall be otherwise. What is left out stays as it is; of a new array, as is usual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SettingsChange {
    /// Usual: `journal` for levels with parity, `bitmap` for mirrors, `none` for level 0.
    #[serde(default)]
    pub policy: Option<Policy>,
    /// Share of the drives' bandwidth for rebuild, resync and scrub: 1 to 100. Usual: 30.
    #[serde(default)]
    pub rebuild_percent: Option<u8>,
    /// Reads of a hundred that may also be worked out from other members when theirs is late: 0
    /// (none) to 100. Usual: 0.
    #[serde(default)]
    pub hedge_percent: Option<u8>,
    /// Writes up to this many bytes are there as a whole after a crash or not at all, under policy
    /// `journal`: 4 KiB to 256 KiB (252 KiB on drives with sectors of 4 KiB), a multiple of 4 KiB.
    /// Usual: 64 KiB.
    #[serde(default)]
    pub atomic_bytes: Option<u32>,
    /// Seconds that a member may be away before a spare takes its place. Usual: 180.
    #[serde(default)]
    pub spare_delay_s: Option<u32>,
    /// Seconds between the beginnings of two scrubs, at least 3600; 0: never. Usual: 30 days.
    #[serde(default)]
    pub scrub_period_s: Option<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Settings {
    pub policy: Policy,
    pub rebuild_percent: u8,
    pub hedge_percent: u8,
    pub atomic_bytes: u32,
    pub spare_delay_s: u32,
    /// 0: never.
    pub scrub_period_s: u32,
}
