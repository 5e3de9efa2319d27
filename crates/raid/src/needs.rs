//! What a drive has to be to become a member.

use ashlar_format::drive_label::MemberLayout;

use crate::label;

/// What a running array needs of the drive of a member, whichever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemberNeeds {
    /// Bytes of data that a member holds.
    pub data_bytes: u64,
    /// The smallest journal of a member that is here, in bytes.
    pub journal_bytes: u64,
    /// What members are read and written in; a drive with larger sectors joins at a start only.
    pub sector_bytes: u32,
    /// Parity chunks of a stripe.
    pub parity: u8,
    /// Members keep a checksum of every block.
    pub integrity: bool,
}

/// Why a drive cannot become a member.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfit {
    /// It is too small, in whole 4 KiB blocks, for the data and what it takes to keep that.
    TooSmall,
    /// Its sectors are larger than those that the array was started with.
    Sectors,
}

impl MemberNeeds {
    /// Where a member's things go on a drive of this many bytes, with such sectors.
    pub fn layout_on(&self, drive_bytes: u64, sector_bytes: u32) -> Result<MemberLayout, Unfit> {
        let (bytes, kind) = (label::whole_blocks(drive_bytes), (self.parity, self.integrity));
        let layout = label::plan_in_place_of(bytes, kind, self.journal_bytes, self.data_bytes);
        let layout = layout.ok_or(Unfit::TooSmall)?;
        if sector_bytes > self.sector_bytes { Err(Unfit::Sectors) } else { Ok(layout) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::{DRIVE_BYTES_MIN, plan_for};

    /// Drives of any size and sector, in place of others: one fits if, and only if,
    /// its sectors do and it has room for that data.
    #[test]
    fn a_drive_fits_or_the_reason_is_said() {
        let sizes = [1, 2, 8, 64].map(|times| times * DRIVE_BYTES_MIN);
        for (of, parity, integrity) in sizes.map(|bytes| (bytes, 1, false)).into_iter().chain([
            (64 << 20, 0, true),
            (1 << 30, 3, true),
            (1 << 30, 8, false),
        ]) {
            let areas = plan_for(of, parity, integrity).unwrap();
            let (data_bytes, journal_bytes) = (areas.data.len, areas.journal.len);
            let needs =
                MemberNeeds { data_bytes, journal_bytes, sector_bytes: 4096, parity, integrity };
            for bytes in sizes.into_iter().chain([0, of - 4096, of, of + 4095, 2 * of]) {
                for sector_bytes in [512, 4096] {
                    let layout = needs.layout_on(bytes, sector_bytes);
                    assert_eq!(layout.is_ok(), bytes >= of, "{bytes} for {needs:?}");
                    assert!(layout.is_ok_and(|its| its.data.len >= data_bytes) || bytes < of);
                }
                let reason = if bytes < of { Unfit::TooSmall } else { Unfit::Sectors };
                assert_eq!(needs.layout_on(bytes, 8192), Err(reason));
            }
        }
    }
}
