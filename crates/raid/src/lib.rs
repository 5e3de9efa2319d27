//! Drives become one reliable array.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod array;
mod assemble;
pub mod dirty_map;
pub mod error;
mod job;
mod journal;
pub mod label;
pub mod layout;
pub mod members;
pub mod parity;
mod read;
mod rebuild;
mod resync;
mod scrub;
pub mod start;
pub mod status;
mod table;
mod unsynced;
mod write;
pub mod write_plan;
mod zero;
