//! Drives become one reliable array.

pub mod parity;
