//! One core: tasks, timers, rings, buffers.
//!
//! A [`Reactor`] runs straight-line async code on one CPU. Everything under it is a [`Backend`]:
//! io_uring in production, virtual time and faults in the simulator. Nothing here knows what a
//! drive, an array or a guest is.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod prng;
mod copy;
pub mod mapping;
pub mod arena;
pub mod histogram;
mod clock;
pub mod buffer;
pub mod op;
pub mod backend;
pub mod window;
pub mod traffic;
pub mod nvme;
pub mod task;
mod polling;
pub mod poller;
mod slots;
mod timer;
pub mod registry;
pub mod executor;
pub mod wait_list;
pub mod range_lock;
pub mod join;
pub mod mailbox;
pub mod socket;
mod doze;
mod link;
pub mod call;
mod ram;
mod null;
mod model;
pub mod virtual_time;
mod lossy;
pub mod uring;
pub mod driver;
pub mod cores;
