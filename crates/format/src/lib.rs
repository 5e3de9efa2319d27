//! Units, and every structure Ashlar puts on a drive. Pure: no I/O, no async.
//!
//! A structure is a `repr(C)` struct of little-endian fields that begins with a
//! [`record::Header`], which says what it is, whose it is, where it lives and how new it is.
//! Bytes from a drive are opened, never trusted: every decoder returns an error and none panics.
//!
//! Modules from lowest to highest; a module uses only those above it in this list (`upgrade` lists
//! what the structures bring).

pub mod units;
pub mod record;
pub mod upgrade;
pub mod drive_label;
pub mod region_map;
pub mod array_superblock;
pub mod journal_batch;
pub mod bad_blocks;
pub mod block_sums;
pub mod lease;
pub mod scrub_report;
pub mod volume_table;
