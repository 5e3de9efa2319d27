//! Targets: how guests reach a volume.
//!
//! Each front end ([`vhost`], [`nvme_tcp`], [`nbd`], [`fuse`], [`ublk`]) turns what its initiators
//! say into [`request`]s, has a [`disk`] carry them out on the reactor where they arrived, no
//! faster than its [`limits`], and is an [`export::Export`] to whoever starts and stops it.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod request;
mod waiters;
mod budget;
pub mod limits;
mod neighbours;
mod quantum;
pub mod disk;
pub mod handed;
pub mod secrets;
pub mod export;
mod line;
pub mod unix_socket;
mod tcp;
pub mod vhost;
pub mod nvme_tcp;
pub mod nbd;
pub mod fuse;
pub mod ublk;
