//! What measures the engine: in this process, or over a vhost-user socket.
//!
//! ```text
//! engine ── under ── drives, array or volume            on one reactor
//! vhost  ── client ── split or packed ── memory ═ any vhost-user-blk back end
//!    └ run ── load, verify, report                      what is asked, and what came of it
//! ```
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod clock;
pub mod load;
pub mod verify;
pub mod counters;
pub mod report;
pub mod compare;
pub mod run;
pub mod error;
pub mod under;
pub mod engine;
pub mod client;
pub mod vhost;
