//! Goal: a volume behaves as a disk through the real socket, for drivers that nobody here wrote and
//! for guests that break every rule.
//! Method: arrays on RAM drives on a real reactor; the driver of the `virtio-driver` crate, and a
//! front end that builds its rings by hand.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

mod cores;
mod dirty;
mod driver;
mod front_end;
mod hostile;
mod lifecycle;
mod packed;
mod reads_and_writes;
mod rig;
mod waiting;
mod widest;
