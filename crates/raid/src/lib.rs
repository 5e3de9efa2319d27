//! Drives become one reliable array.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod parity;
pub mod error;
pub mod settings;
pub mod scrub_plan;
pub mod status;
pub mod layout;
pub mod write_plan;
pub mod label;
mod filled;
pub mod missed;
pub mod members;
pub mod lease;
pub mod region_map;
pub mod dirty;
mod stripe_set;
mod pending;
mod journal;
mod stored;
mod mode;
mod job;
mod lanes;
mod pace;
mod hedge;
pub mod array;
mod shift;
mod policy;
mod written;
mod hedged_read;
mod read;
mod update;
mod write;
mod destage;
mod replay;
mod resync;
mod zero;
mod rebuild_plan;
mod rebuild;
mod locate;
mod scrub;
mod table;
mod assemble;
mod catch_up;
pub mod start;
mod grow;
mod restripe;
