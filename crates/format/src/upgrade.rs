//! One step per version of each structure, counted by the compiler, and a golden image of each.
//!
//! Whoever raises a `VERSION` must add the step that leads to it and the image that proves it:
//! the arrays below are sized by the version and do not compile otherwise.

use crate::record::Upgrade;
use crate::{
    array_superblock, bad_blocks, drive_label, journal_batch, lease, region_map, scrub_report,
    volume_table,
};

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

versions!(
    drive_label,
    DRIVE_LABEL_UPGRADES,
    DRIVE_LABEL_GOLDEN,
    [drive_label::v1_to_v2],
    ["drive_label_v1.bin", "drive_label_v2.bin"]
);
versions!(
    array_superblock,
    ARRAY_SUPERBLOCK_UPGRADES,
    ARRAY_SUPERBLOCK_GOLDEN,
    [
        array_superblock::v1_to_v2,
        array_superblock::v2_to_v3,
        array_superblock::v3_to_v4,
        array_superblock::v4_to_v5,
        array_superblock::v5_to_v6,
        array_superblock::v6_to_v7
    ],
    [
        "array_superblock_v1.bin",
        "array_superblock_v2.bin",
        "array_superblock_v3.bin",
        "array_superblock_v4.bin",
        "array_superblock_v5.bin",
        "array_superblock_v6.bin",
        "array_superblock_v7.bin"
    ]
);
versions!(
    region_map,
    REGION_MAP_UPGRADES,
    REGION_MAP_GOLDEN,
    [region_map::v1_to_v2],
    ["region_map_v1.bin", "region_map_v2.bin"]
);
versions!(volume_table, VOLUME_TABLE_UPGRADES, VOLUME_TABLE_GOLDEN, [], ["volume_table_v1.bin"]);
versions!(
    journal_batch,
    JOURNAL_BATCH_UPGRADES,
    JOURNAL_BATCH_GOLDEN,
    [journal_batch::v1_to_v2, journal_batch::v2_to_v3],
    ["journal_batch_v1.bin", "journal_batch_v2.bin", "journal_batch_v3.bin"]
);
versions!(bad_blocks, BAD_BLOCKS_UPGRADES, BAD_BLOCKS_GOLDEN, [], ["bad_blocks_v1.bin"]);
versions!(lease, LEASE_UPGRADES, LEASE_GOLDEN, [], ["lease_v1.bin"]);
versions!(scrub_report, SCRUB_REPORT_UPGRADES, SCRUB_REPORT_GOLDEN, [], ["scrub_report_v1.bin"]);
