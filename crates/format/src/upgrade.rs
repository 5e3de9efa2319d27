//! One step per version of each structure, counted by the compiler, and a golden image of each.
//!
//! Whoever raises a `VERSION` must add the step that leads to it and the image that proves it:
//! the arrays below are sized by the version and do not compile otherwise.

use crate::{array_superblock, dirty_map, drive_label, journal_record, volume_table};

/// Turns the bytes of one version of a structure into those of the next.
pub type Upgrade = fn(&mut Vec<u8>);

macro_rules! versions {
    (
        $structure:ident, $upgrades:ident, $golden:ident,
        [$($step:expr),*], [$($image:literal),*]
    ) => {
        pub const $upgrades: [Upgrade; $structure::VERSION as usize - 1] = [$($step),*];
        pub const $golden: [&[u8]; $structure::VERSION as usize] =
            [$(include_bytes!(concat!("golden/", $image))),*];
    };
}

versions!(drive_label, DRIVE_LABEL_UPGRADES, DRIVE_LABEL_GOLDEN, [], ["drive_label_v1.bin"]);
versions!(
    array_superblock,
    ARRAY_SUPERBLOCK_UPGRADES,
    ARRAY_SUPERBLOCK_GOLDEN,
    [],
    ["array_superblock_v1.bin"]
);
versions!(dirty_map, DIRTY_MAP_UPGRADES, DIRTY_MAP_GOLDEN, [], ["dirty_map_v1.bin"]);
versions!(volume_table, VOLUME_TABLE_UPGRADES, VOLUME_TABLE_GOLDEN, [], ["volume_table_v1.bin"]);
versions!(
    journal_record,
    JOURNAL_RECORD_UPGRADES,
    JOURNAL_RECORD_GOLDEN,
    [],
    ["journal_record_v1.bin"]
);
