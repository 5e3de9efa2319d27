//! What a completion is of, in the 64 bits that the kernel hands back with it.
//!
//! ```text
//! 63 … 60 │ 59 … 32 │ 31 … 0
//! kind    │ device  │ ticket, or a drive's own token
//! ```

use crate::nvme::remote::device::Way;
use crate::op::Ticket;

const KIND_SHIFT: u32 = 60;
const DEVICE_SHIFT: u32 = 32;
const DEVICE_MASK: u64 = (1 << (KIND_SHIFT - DEVICE_SHIFT)) - 1;
const LOW_MASK: u64 = u32::MAX as u64;

/// Devices by their place among those registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tag {
    /// Of no device.
    Plain(Ticket),
    Device {
        device: usize,
        ticket: Ticket,
    },
    /// Asked for by a lossy drive.
    Lossy {
        device: usize,
        token: u32,
    },
    /// Finds out whether a device can be polled.
    Probe {
        device: usize,
    },
    /// Finds out whether a device takes NVMe commands.
    Trial {
        device: usize,
    },
    /// Waits for completions of the ring that has these commands.
    Passthrough,
    /// The same of the one for commands of other drivers.
    Commands,
    /// Waits for the events of an NVMe drive of ours. The number tells it from waits for drives
    /// that were in this place before.
    Events {
        device: usize,
        wait: u32,
    },
    /// Ends such a wait.
    EventsEnd {
        device: usize,
    },
    /// Of the connection to a remote drive.
    Remote {
        device: usize,
        way: Way,
    },
}

impl Tag {
    pub(super) fn bits(self) -> u64 {
        let (kind, device, low) = match self {
            Tag::Plain(ticket) => (0, 0, ticket.0),
            Tag::Device { device, ticket } => (1, device, ticket.0),
            Tag::Lossy { device, token } => (2, device, token),
            Tag::Probe { device } => (3, device, 0),
            Tag::Events { device, wait } => (4, device, wait),
            Tag::EventsEnd { device } => (5, device, 0),
            Tag::Trial { device } => (6, device, 0),
            Tag::Passthrough => (7, 0, 0),
            Tag::Remote { device, way: Way::In } => (8, device, 0),
            Tag::Remote { device, way: Way::Out } => (8, device, 1),
            Tag::Commands => (9, 0, 0),
        };
        let device = device as u64;
        assert!(device <= DEVICE_MASK, "device {device}");
        kind << KIND_SHIFT | device << DEVICE_SHIFT | u64::from(low)
    }

    pub(super) fn from_bits(bits: u64) -> Tag {
        let low = u32::try_from(bits & LOW_MASK).expect("32 bits");
        let device = usize::try_from(bits >> DEVICE_SHIFT & DEVICE_MASK).expect("28 bits");
        match bits >> KIND_SHIFT {
            0 => Tag::Plain(Ticket(low)),
            1 => Tag::Device { device, ticket: Ticket(low) },
            2 => Tag::Lossy { device, token: low },
            3 => Tag::Probe { device },
            4 => Tag::Events { device, wait: low },
            5 => Tag::EventsEnd { device },
            6 => Tag::Trial { device },
            7 => Tag::Passthrough,
            8 => Tag::Remote { device, way: if low == 0 { Way::In } else { Way::Out } },
            9 => Tag::Commands,
            10.. => unreachable!("no kind of ours"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_goes_in_comes_out() {
        let most = usize::try_from(DEVICE_MASK).unwrap();
        for low in [0, 1, u32::MAX] {
            assert_eq!(Tag::from_bits(Tag::Plain(Ticket(low)).bits()), Tag::Plain(Ticket(low)));
            for device in [0, 7, most] {
                let tags = [
                    Tag::Device { device, ticket: Ticket(low) },
                    Tag::Lossy { device, token: low },
                    Tag::Probe { device },
                    Tag::Events { device, wait: low },
                    Tag::EventsEnd { device },
                    Tag::Trial { device },
                    Tag::Passthrough,
                    Tag::Remote { device, way: Way::In },
                    Tag::Remote { device, way: Way::Out },
                    Tag::Commands,
                ];
                tags.iter().for_each(|tag| assert_eq!(Tag::from_bits(tag.bits()), *tag));
            }
        }
    }
}
