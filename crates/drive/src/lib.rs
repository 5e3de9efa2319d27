//! A drive, as the engine sees it: reads and writes that are retried, flushes that are shared, and
//! what its errors, its pace and its silence mean.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod error;
mod asked;
mod unreadable;
pub mod health;
pub mod latency;
pub mod slow;
pub mod gate;
pub mod drive;
pub mod silence;
