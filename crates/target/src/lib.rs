//! Targets: how guests reach a volume.
//!
//! Each front end ([`vhost`], …) turns what its initiators say into [`request`]s, has a [`disk`]
//! carry them out on the reactor where they arrived, and is an [`export::Export`] to whoever starts
//! and stops it.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod request;
mod budget;
pub mod disk;
pub mod handed;
pub mod export;
pub mod vhost;
