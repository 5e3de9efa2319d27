//! Another program takes the place of the daemon's.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Which program.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct UpgradeRequest {
    /// Left out: the file that the daemon was started from, as it is now.
    #[schema(value_type = Option<String>)]
    pub binary: Option<PathBuf>,
    /// Also if someone uses an export that cannot be handed over.
    #[serde(default)]
    pub force: bool,
}

/// What became of upgrades.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Upgrades {
    /// Of the program that answers.
    pub version: String,
    /// How many there were since the daemon was first started.
    pub count: u32,
    /// How long guests waited at the last one.
    pub paused_ms: Option<u64>,
    /// Why the program that was wanted last did not take over.
    pub error: Option<String>,
}
