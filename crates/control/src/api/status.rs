//! Everything at one moment.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::api::array::Array;
use crate::api::drive::Drive;
use crate::api::export::Export;
use crate::api::spare::Spare;
use crate::api::volume::Volume;

/// One reactor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CoreStatus {
    pub cpu: usize,
    /// Names of the arrays it serves.
    pub arrays: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    pub version: String,
    pub pid: u32,
    pub uptime_s: u64,
    pub cores: Vec<CoreStatus>,
    pub drives: Vec<Drive>,
    pub arrays: Vec<Array>,
    pub spares: Vec<Spare>,
    pub volumes: Vec<Volume>,
    pub exports: Vec<Export>,
    /// What needs a person, one line each.
    pub problems: Vec<String>,
}
