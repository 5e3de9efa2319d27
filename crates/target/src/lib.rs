//! Targets: how guests reach a volume.
//!
//! Modules from lowest to highest; a module uses only those above it in this list.

pub mod request;
pub mod vhost;
