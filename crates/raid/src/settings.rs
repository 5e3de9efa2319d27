//! What an operator has set of an array beside its policy, and what holds where nothing was set.
//!
//! A value that was never set is stored as zero, so a superblock from before a setting existed has
//! its default. Where zero means something to the operator, it is stored as [`NONE`].

use ashlar_format::array_superblock::StoredSettings;
use ashlar_format::journal_batch::PAYLOAD_BYTES_MAX;

/// Stored for "no delay" and "never".
const NONE: u32 = u32::MAX;
const REBUILD_PERCENT_USUAL: u8 = 30;
const ATOMIC_BYTES_USUAL: u32 = 64 << 10;
pub const ATOMIC_BYTES_MIN: u32 = 4 << 10;
/// A batch of the journal holds no more.
pub const ATOMIC_BYTES_MAX: u32 = PAYLOAD_BYTES_MAX;
const SPARE_DELAY_S_USUAL: u32 = 180;
const DAY_S: u32 = 24 * 3600;
/// A drive of 20 TB that is read at 30 % of 250 MB/s takes 74 h, a tenth of this: often enough that
/// most of what cannot be read is mended before another drive fails, and seldom enough that guests
/// have the drives for themselves most of the time.
const SCRUB_PERIOD_S_USUAL: u32 = 30 * DAY_S;
pub const SCRUB_PERIOD_S_MIN: u32 = 3600;
/// Of any time that can be set.
pub const PERIOD_S_MAX: u32 = 3650 * DAY_S;
const _: () = assert!(PERIOD_S_MAX < NONE);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Settings(StoredSettings);

/// What shall be otherwise; `None`: as it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SettingsChange {
    /// 1 to 100.
    pub rebuild_percent: Option<u8>,
    /// 0 (off) to 100.
    pub hedge_percent: Option<u8>,
    /// 4 KiB to 256 KiB, a multiple of 4 KiB.
    pub atomic_bytes: Option<u32>,
    /// From 0: at once.
    pub spare_delay_s: Option<u32>,
    /// From an hour; 0: never.
    pub scrub_period_s: Option<u32>,
}

impl Settings {
    pub(crate) fn from_stored(stored: StoredSettings) -> Settings {
        Settings(stored)
    }

    pub(crate) fn stored(self) -> StoredSettings {
        self.0
    }

    /// Of what the drives can do, for rebuild, resync and scrub; 1 to 100.
    pub fn rebuild_percent(self) -> u8 {
        if self.0.rebuild_percent == 0 { REBUILD_PERCENT_USUAL } else { self.0.rebuild_percent }
    }

    /// Of the reads, that may also be worked out from other members when theirs is late; 0 to 100.
    pub fn hedge_percent(self) -> u8 {
        self.0.hedge_percent
    }

    /// Writes up to this many bytes are there as a whole after a crash, or not at all, under
    /// policy `journal` on members with such sectors.
    pub fn atomic_bytes(self, sector_bytes: u32) -> u32 {
        let set = match self.0.atomic_bytes.get() {
            0 => ATOMIC_BYTES_USUAL,
            set => set.max(ATOMIC_BYTES_MIN),
        };
        set.min(atomic_bytes_max(sector_bytes))
    }

    /// Seconds that a member may be away before a spare takes its place.
    pub fn spare_delay_s(self) -> u32 {
        match self.0.spare_delay_s.get() {
            0 => SPARE_DELAY_S_USUAL,
            NONE => 0,
            set => set,
        }
    }

    /// Seconds between the beginnings of two scrubs; `None`: none begins by itself.
    pub fn scrub_period_s(self) -> Option<u32> {
        match self.0.scrub_period_s.get() {
            0 => Some(SCRUB_PERIOD_S_USUAL),
            NONE => None,
            set => Some(set),
        }
    }

    /// With a change; an error names what is allowed.
    pub fn changed(self, change: SettingsChange, sector_bytes: u32) -> Result<Settings, String> {
        let mut stored = self.0;
        if let Some(percent) = change.rebuild_percent {
            if !(1..=100).contains(&percent) {
                return Err("the share of a rebuild is 1 to 100 percent".into());
            }
            stored.rebuild_percent = percent;
        }
        if let Some(percent) = change.hedge_percent {
            if percent > 100 {
                return Err("the share of hedged reads is 0 to 100 percent; 0: none".into());
            }
            stored.hedge_percent = percent;
        }
        if let Some(bytes) = change.atomic_bytes {
            let max = atomic_bytes_max(sector_bytes);
            if !(ATOMIC_BYTES_MIN..=max).contains(&bytes) || !bytes.is_multiple_of(4096) {
                let max = max >> 10;
                return Err(format!("atomic writes are 4K to {max}K here, a multiple of 4K"));
            }
            stored.atomic_bytes = bytes.into();
        }
        if let Some(delay_s) = change.spare_delay_s {
            if delay_s > PERIOD_S_MAX {
                return Err("the delay of a spare is 0 s to 3650 days".into());
            }
            stored.spare_delay_s = if delay_s == 0 { NONE } else { delay_s }.into();
        }
        if let Some(period_s) = change.scrub_period_s {
            if period_s != 0 && !(SCRUB_PERIOD_S_MIN..=PERIOD_S_MAX).contains(&period_s) {
                return Err("scrubs begin every 1 hour to 3650 days, or never".into());
            }
            stored.scrub_period_s = if period_s == 0 { NONE } else { period_s }.into();
        }
        Ok(Settings(stored))
    }
}

/// What is around a part of a large sector is in the batch, too: 252K and 512 bytes beside the
/// border of a sector are 256K of sectors.
fn atomic_bytes_max(sector_bytes: u32) -> u32 {
    if sector_bytes == 512 { ATOMIC_BYTES_MAX } else { ATOMIC_BYTES_MAX - sector_bytes }
}

#[cfg(test)]
mod tests {
    //! Goal: what was set holds, what was not is usual, what cannot be is refused with the reason.
    //! Method: both sides of every bound.

    use super::*;

    const NOTHING: SettingsChange = SettingsChange {
        rebuild_percent: None,
        hedge_percent: None,
        atomic_bytes: None,
        spare_delay_s: None,
        scrub_period_s: None,
    };

    fn shown(its: Settings) -> (u8, u8, u32, u32, Option<u32>) {
        let (rebuild, hedge) = (its.rebuild_percent(), its.hedge_percent());
        (rebuild, hedge, its.atomic_bytes(512), its.spare_delay_s(), its.scrub_period_s())
    }

    #[test]
    fn what_was_never_set_is_usual() {
        let usual = (30, 0, 64 << 10, 180, Some(30 * DAY_S));
        assert_eq!(shown(Settings::from_stored(StoredSettings::default())), usual);
        assert_eq!(shown(Settings::default().changed(NOTHING, 512).unwrap()), usual);
        assert_eq!(Settings::default().stored(), StoredSettings::default());
    }

    #[test]
    fn what_was_set_is_kept_zero_too() {
        let change = SettingsChange {
            rebuild_percent: Some(100),
            hedge_percent: Some(0),
            atomic_bytes: Some(256 << 10),
            spare_delay_s: Some(0),
            scrub_period_s: Some(0),
        };
        let set = Settings::default().changed(change, 512).unwrap();
        let again = Settings::from_stored(set.stored());
        assert_eq!(shown(again), (100, 0, 256 << 10, 0, None));
        assert_eq!(shown(again.changed(NOTHING, 512).unwrap()), shown(set));
        assert_eq!(again.atomic_bytes(4096), 252 << 10, "drives with larger sectors came");
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let try_it = |change| Settings::default().changed(change, 512).map(|_| ());
        for (percent, fits) in [(0, false), (1, true), (100, true), (101, false)] {
            let change = SettingsChange { rebuild_percent: Some(percent), ..NOTHING };
            assert_eq!(try_it(change).is_ok(), fits, "{percent}");
        }
        for (percent, fits) in [(0, true), (100, true), (101, false)] {
            let change = SettingsChange { hedge_percent: Some(percent), ..NOTHING };
            assert_eq!(try_it(change).is_ok(), fits, "{percent}");
        }
        for (bytes, fits) in [(4095, false), (4096, true), (6144, false), (256 << 10, true)] {
            let change = SettingsChange { atomic_bytes: Some(bytes), ..NOTHING };
            assert_eq!(try_it(change).is_ok(), fits, "{bytes}");
            let larger = SettingsChange { atomic_bytes: Some(260 << 10), ..NOTHING };
            assert!(try_it(larger).unwrap_err().contains("4K to 256K"));
            let sectors = Settings::default().changed(change, 4096);
            assert_eq!(sectors.is_ok(), fits && bytes < 256 << 10, "{bytes}");
        }
        for (period, fits) in [(1, false), (3599, false), (3600, true), (PERIOD_S_MAX + 1, false)] {
            let change = SettingsChange { scrub_period_s: Some(period), ..NOTHING };
            assert_eq!(try_it(change).is_ok(), fits, "{period}");
        }
        for (delay, fits) in [(1, true), (PERIOD_S_MAX, true), (NONE, false)] {
            let change = SettingsChange { spare_delay_s: Some(delay), ..NOTHING };
            assert_eq!(try_it(change).is_ok(), fits, "{delay}");
        }
    }
}
