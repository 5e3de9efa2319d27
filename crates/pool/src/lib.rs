//! Volumes on arrays: what targets hold.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod error;
pub mod thick;
pub mod far;
pub mod volume;
pub mod offer;
pub mod pool;
