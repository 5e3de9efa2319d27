//! Hostile clients: a front end's initiator gone wrong, of vhost-user, NVMe/TCP and NBD.
//!
//! A client knows its protocol well enough to get far, and errs, lies and stops anywhere, as its
//! [`choices`] say: from a seed, or from the bytes of a coverage-guided fuzzer (`fuzz_targets/`).
//! It only speaks; whether the daemon bore it is for the test to find out.
#![allow(clippy::cast_possible_truncation, reason = "numbers are cut as they come")]

pub mod choices;
mod stream;
pub mod nbd;
pub mod nvme_tcp;
pub mod vhost;
pub mod served;
