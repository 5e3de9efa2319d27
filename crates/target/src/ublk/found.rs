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
    /// Another host has had the volume since it was left: what its users know is old.
    Outdated,
    /// A process that served it is about to end, or serves it still.
    Wait,
    /// It is not ours: it is left alone.
    Refuse,
}

pub(super) fn decide(found: Option<&DeviceInfo>, mark: Mark) -> Decision {
    let Some(found) = found else { return Decision::Add };
    if !mark.is_same_volume(found.mark) || found.features & FEATURES != FEATURES {
        return Decision::Refuse;
    }
    match found.state {
        STATE_DEAD => Decision::Replace,
        STATE_LIVE => Decision::Wait,
        STATE_QUIESCED | STATE_FAILING if mark.is_outdated(found.mark) => Decision::Outdated,
        STATE_QUIESCED | STATE_FAILING => Decision::Recover,
        _ => Decision::Refuse,
    }
}

/// What a device of a volume is marked with: the beginning of the volume's uuid, and in the last
/// two bytes since when no other host has had it; 0: it is not known. Builds before had more of the
/// uuid there.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    volume: u64,
    since: u16,
    before: u16,
}

const SINCE_SHIFT: u32 = 48;

impl Mark {
    /// `since`: see `UblkSpec`.
    pub(super) fn new(volume: [u8; 16], since: u64) -> Mark {
        let [a, b, c, d, e, f, g, h, ..] = volume;
        let since = if since == 0 { 0 } else { since % u64::from(u16::MAX) + 1 };
        let volume = u64::from_le_bytes([a, b, c, d, e, f, 0, 0]);
        let since = u16::try_from(since).expect("a remainder, plus one");
        Mark { volume, since, before: u16::from_le_bytes([g, h]) }
    }

    pub(super) fn stored(self) -> u64 {
        self.volume | u64::from(self.since) << SINCE_SHIFT
    }

    pub(super) fn is_same_volume(self, stored: u64) -> bool {
        stored & !(u64::MAX << SINCE_SHIFT) == self.volume
    }

    fn is_outdated(self, stored: u64) -> bool {
        let its = stored >> SINCE_SHIFT;
        let is_known = |since: u64| since != 0 && since != u64::from(self.before);
        is_known(its) && self.since != 0 && its != u64::from(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OURS: Mark = Mark { volume: 7, since: 0, before: 0 };

    #[test]
    fn what_is_done_about_what_is_there() {
        use Decision::{Add, Recover, Refuse, Replace, Wait};
        let device =
            |state, mark, features| DeviceInfo { state, mark, features, ..Default::default() };
        assert_eq!(decide(None, OURS), Add);
        // By the numbers of the kernel's header.
        for (state, expected) in (0..).zip([Replace, Wait, Recover, Recover]) {
            let decided = |mark, features| decide(Some(&device(state, mark, features)), OURS);
            // The driver adds flags of its own.
            assert_eq!(decided(7, 0xd8 | 2), expected, "{state}");
            assert_eq!(decided(8, 0xd8), Refuse, "{state}");
            for lacking in [1 << 3, 1 << 4, 1 << 6, 1 << 7] {
                assert_eq!(decided(7, 0xd8 & !lacking), Refuse, "{state} without {lacking}");
            }
        }
        // What a later driver may have: nothing is done to it.
        assert_eq!(decide(Some(&device(4, 7, FEATURES)), OURS), Refuse);
    }

    #[test]
    fn what_another_host_had_meanwhile_is_not_gone_on_with() {
        let volume = [7, 0, 0, 0, 0, 9, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0];
        let device = |mark: Mark, state| DeviceInfo {
            state,
            mark: mark.stored(),
            features: FEATURES,
            ..DeviceInfo::default()
        };
        let decided = |was: u64, is: u64, state| {
            decide(Some(&device(Mark::new(volume, was), state)), Mark::new(volume, is))
        };
        let by_former = DeviceInfo { mark: 0x0101_0900_0000_0007, ..device(OURS, STATE_QUIESCED) };
        assert_eq!(decide(Some(&by_former), Mark::new(volume, 5)), Decision::Recover);
        for (was, is, expected) in [
            (3, 3, Decision::Recover),
            (3, 5, Decision::Outdated),
            (0, 5, Decision::Recover),
            (3, 0, Decision::Recover),
            (u16::MAX.into(), u64::from(u16::MAX) + 1, Decision::Outdated),
        ] {
            assert_eq!(decided(was, is, STATE_QUIESCED), expected, "{was} {is}");
            assert_eq!(decided(was, is, STATE_LIVE), Decision::Wait);
            assert_eq!(decided(was, is, STATE_DEAD), Decision::Replace);
        }
    }
}
