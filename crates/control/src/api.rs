//! What is said over the API: requests and replies, one file a noun. The server and the command
//! line use the same types, and the OpenAPI document is made from them.
//!
//! All sizes are in bytes. Sizes as people write them (`10G`) exist only on the command line.

pub mod array;
pub mod traffic;
pub mod upgrade;
pub mod drive;
pub mod export;
pub mod settings;
pub mod spare;
pub mod status;
pub mod volume;

use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

/// Why a request was refused. Nothing was changed, unless the error says so.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    pub error: String,
    /// What mends it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fix: Option<String>,
}

/// A change was made.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Done {
    /// What the operator should know about it.
    pub notes: Vec<String>,
}

/// Whether something is wanted.
#[derive(Clone, Copy, Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct On {
    pub on: bool,
}

/// How hard to try.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub struct Force {
    /// Go on where it would be refused for safety.
    #[serde(default)]
    pub force: bool,
}
