//! Drives become one reliable array.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod array;
pub mod error;
pub mod parity;
pub mod status;
