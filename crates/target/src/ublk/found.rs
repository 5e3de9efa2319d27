//! What the kernel has under a device's number, and what is done about it.
//!
//! ```text
//! nothing ── add ──► dead ── start ──► live ── its server ends ──► quiesced
//!                     ▲                 │ ▲                            │
//!                     └───── stop ──────┘ └────────── recover ─────────┘
//! ```
//!
//! A device that is quiesced keeps all requests until it is recovered: whoever uses it waits.

use crate::ublk::wire::{
    DeviceInfo, STATE_DEAD, STATE_FAILING, STATE_LIVE, STATE_QUIESCED, feature,
};

/// What a device of ours must have been made with.
pub(super) const FEATURES: u64 = feature::USER_RECOVERY
    | feature::USER_RECOVERY_REISSUE
    | feature::IOCTL_ENCODE
    | feature::USER_COPY;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Decision {
    Add,
    /// It was never started, or was stopped: nobody can use it.
    Replace,
    Recover,
    /// A process that served it is about to end, or serves it still.
    Wait,
    /// It is not ours: it is left alone.
    Refuse,
}

/// `mark`: that of the volume.
pub(super) fn decide(found: Option<&DeviceInfo>, mark: u64) -> Decision {
    let Some(found) = found else { return Decision::Add };
    if found.mark != mark || found.features & FEATURES != FEATURES {
        return Decision::Refuse;
    }
    match found.state {
        STATE_DEAD => Decision::Replace,
        STATE_LIVE => Decision::Wait,
        STATE_QUIESCED | STATE_FAILING => Decision::Recover,
        _ => Decision::Refuse,
    }
}

/// A device with a volume's mark is a device of that volume.
pub(super) fn mark(volume: [u8; 16]) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = volume;
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_done_about_what_is_there() {
        use Decision::{Add, Recover, Refuse, Replace, Wait};
        let device =
            |state, mark, features| DeviceInfo { state, mark, features, ..Default::default() };
        assert_eq!(decide(None, 7), Add);
        // By the numbers of the kernel's header.
        for (state, expected) in (0..).zip([Replace, Wait, Recover, Recover]) {
            let decided = |mark, features| decide(Some(&device(state, mark, features)), 7);
            // The driver adds flags of its own.
            assert_eq!(decided(7, 0xd8 | 2), expected, "{state}");
            assert_eq!(decided(8, 0xd8), Refuse, "{state}");
            for lacking in [1 << 3, 1 << 4, 1 << 6, 1 << 7] {
                assert_eq!(decided(7, 0xd8 & !lacking), Refuse, "{state} without {lacking}");
            }
        }
        // What a later driver may have: nothing is done to it.
        assert_eq!(decide(Some(&device(4, 7, FEATURES)), 7), Refuse);
    }
}
