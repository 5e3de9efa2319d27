//! What those have to prove who connect over a network.

use std::collections::BTreeMap;

use ashlar_reactor::nvme::chap::Secret;

/// Secrets of one export. They are never shown, nor logged.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Secrets {
    /// By their NQNs, hosts that have to prove who they are.
    pub hosts: BTreeMap<String, Secret>,
    /// The subsystem's own, with which it proves who it is to hosts that ask.
    pub subsystem: Option<Secret>,
}
