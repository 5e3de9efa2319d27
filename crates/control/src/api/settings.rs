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
    /// Nothing: everything is resynced after a crash
    None,
}

/// What shall be otherwise. What is left out stays as it is; of a new array, as is usual.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SettingsChange {
    /// Usual: `journal` for levels with parity, `bitmap` for mirrors, `none` for level 0.
    #[serde(default)]
    pub policy: Option<Policy>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Settings {
    pub policy: Policy,
}
