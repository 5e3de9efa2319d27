//! What rings of both kinds are made of, and what comes out of them.

/// Where a ring's parts are in the memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Places {
    pub(crate) descriptors: usize,
    /// What the driver writes: the available ring, or its event suppression.
    pub(crate) driver: usize,
    /// What the device writes: the used ring, or its event suppression.
    pub(crate) device: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RingSetup {
    pub(crate) places: Places,
    pub(crate) size: u16,
    pub(crate) indirect: bool,
    pub(crate) event_index: bool,
}

/// A chain that the device is done with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) slot: u16,
    /// Written by the device, by its own account.
    pub(crate) bytes: u32,
}

/// What no device may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Strange {
    #[error("the used index jumped from {from} to {to}")]
    Jump { from: u16, to: u16 },
    #[error("chain {0} was answered, and there is none")]
    Id(u32),
    #[error("request {0} was answered, and is not under way")]
    NotUnderWay(u16),
}
