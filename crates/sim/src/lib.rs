//! The simulator: the whole engine in virtual time, with faults.
//!
//! One `u64` seed decides everything: what the array is, what the workload does, which faults
//! exist and when they come, and which of all ready tasks runs next. The engine above
//! [`ashlar_reactor::backend::Backend`] is the code that runs in production, unchanged.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod trace;
pub mod volumes;
pub mod oracle;
pub mod drive;
pub mod inspect;
pub mod canary;
pub mod hosts;
pub mod world;
pub mod faults;
pub mod fleet;
pub mod served;
pub mod sight;
pub mod workload;
pub mod checkers;
pub mod outage;
pub mod full;
pub mod places;
pub mod rival;
pub mod cache;
pub mod others;
pub mod chaos;
pub mod scenario;
pub mod batch;
pub mod enumerate;
