//! One core: tasks, timers, rings, buffers.
//!
//! A [`Reactor`] runs straight-line async code on one CPU. Everything under it is a [`Backend`]:
//! io_uring in production, virtual time and faults in the simulator. Nothing here knows what a
//! drive, an array or a guest is.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod backend;
pub mod buffer;
pub mod cores;
pub mod executor;
pub mod join;
pub mod mailbox;
pub mod op;
pub mod prng;
pub mod ram;
pub mod range_lock;
pub mod registry;
mod slots;
pub mod timer;
pub mod uring;
pub mod wait_list;
