//! What a guest can do wrong so that its queue must stop: nothing sensible can be answered.

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Fault {
    #[error("a ring of {0} descriptors: not above the limit, and a power of two unless packed")]
    RingSize(u32),
    #[error("a ring that stands at {0:#x}, which is no place in it")]
    RingBase(u32),
    #[error("the device before left the ring in the middle of its work; the guest must reset it")]
    RingAbandoned,
    #[error("what the front end kept of requests in flight is not of this ring; reset the guest")]
    Inflight,
    #[error("the ring is not in guest memory, or crosses a region")]
    RingUnmapped,
    #[error("the ring's parts are not aligned")]
    RingAlignment,
    #[error("the available index jumped from {from} to {to} in a ring of {size}")]
    AvailableJump { from: u16, to: u16, size: u16 },
    #[error("descriptor {index} of a table of {count}")]
    DescriptorIndex { index: u16, count: u16 },
    #[error("a chain of more than {0} descriptors, or a loop")]
    ChainLength(u16),
    #[error("an indirect table inside an indirect table")]
    IndirectNested,
    #[error("an indirect descriptor that has a next one")]
    IndirectChained,
    #[error("an indirect table, which was not negotiated")]
    IndirectUnexpected,
    #[error("an indirect table of {0} bytes")]
    IndirectLength(u32),
    #[error("{len} bytes at {address:#x} are not in guest memory")]
    Unmapped { address: u64, len: u64 },
    #[error("a descriptor of no bytes")]
    EmptyDescriptor,
    #[error("a readable descriptor behind a writable one")]
    DescriptorOrder,
    #[error("a request header of {0} bytes")]
    Header(u64),
    #[error("no byte for the status")]
    NoStatus,
    #[error("memory of the guest is gone: its file was cut short, or has no page for it")]
    MemoryLost,
}
