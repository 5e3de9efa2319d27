//! Spares: drives that take the place of members that are away.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SpareAdd {
    /// Name of an attached drive that is not in use.
    pub drive: String,
    /// The array that it is kept for. Left out: whichever needs it first.
    #[serde(default)]
    pub array: Option<String>,
    /// Also if it carries data or a label: it is wiped.
    #[serde(default)]
    pub force: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Spare {
    pub drive: String,
    /// `null`: for any array.
    pub array: Option<String>,
    /// `null` while the drive is missing.
    pub bytes: Option<u64>,
    pub sector_bytes: Option<u32>,
    /// Why it cannot take over.
    #[serde(default)]
    pub error: Option<String>,
}
