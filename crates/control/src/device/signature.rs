//! Signs that a drive carries someone's data.
//!
//! Pure: looks at the bytes of both ends of a drive. A sign that is missed costs someone's data;
//! so whatever is not zero counts as data, and the names here only make the message better.

/// How much of each end is looked at.
pub const EDGE_BYTES: u64 = 1 << 20;

/// One known sign: `bytes` at `offset` from the front.
struct Sign {
    name: &'static str,
    offset: usize,
    bytes: &'static [u8],
}

const fn sign(name: &'static str, offset: usize, bytes: &'static [u8]) -> Sign {
    Sign { name, offset, bytes }
}

/// More telling signs first: a partition table's mark is also in the boot sector of a FAT.
const FRONT: [Sign; 33] = [
    sign("LUKS", 0, b"LUKS\xba\xbe"),
    sign("XFS", 0, b"XFSB"),
    sign("ext2, ext3 or ext4", 1080, b"\x53\xef"),
    sign("btrfs", 65600, b"_BHRfS_M"),
    sign("bcachefs or bcache", 4120, b"\xc6\x85\x73\xf6\x4e\x1a\x45\xca"),
    sign("LVM", 0, b"LABELONE"),
    sign("LVM", 512, b"LABELONE"),
    sign("LVM", 1024, b"LABELONE"),
    sign("LVM", 1536, b"LABELONE"),
    sign("Linux software RAID (md)", 0, b"\xfc\x4e\x2b\xa9"),
    sign("Linux software RAID (md)", 4096, b"\xfc\x4e\x2b\xa9"),
    sign("swap", 4086, b"SWAPSPACE2"),
    sign("swap", 4086, b"SWAP-SPACE"),
    sign("swap", 65526, b"SWAPSPACE2"),
    // The first four uberblocks of a ZFS label, either byte order.
    sign("ZFS", 131_072, b"\x0c\xb1\xba\x00"),
    sign("ZFS", 132_096, b"\x0c\xb1\xba\x00"),
    sign("ZFS", 135_168, b"\x0c\xb1\xba\x00"),
    sign("ZFS", 131_072, b"\x00\x00\x00\x00\x00\xba\xb1\x0c"),
    sign("F2FS", 1024, b"\x10\x20\xf5\xf2"),
    sign("EROFS", 1024, b"\xe2\xe1\xf5\xe0"),
    sign("NTFS", 3, b"NTFS    "),
    sign("exFAT", 3, b"EXFAT   "),
    sign("FAT", 82, b"FAT32   "),
    sign("FAT", 54, b"FAT16   "),
    sign("FAT", 54, b"FAT12   "),
    sign("SquashFS", 0, b"hsqs"),
    sign("ISO 9660", 32_769, b"CD001"),
    sign("a QCOW2 image", 0, b"QFI\xfb"),
    sign("a VMDK image", 0, b"KDMV"),
    sign("a VHDX image", 0, b"vhdxfile"),
    sign("a GPT partition table", 512, b"EFI PART"),
    sign("a GPT partition table", 4096, b"EFI PART"),
    sign("an MBR partition table", 510, b"\x55\xaa"),
];

/// At an offset from the end.
const BACK: [Sign; 5] = [
    sign("a GPT partition table (backup)", 512, b"EFI PART"),
    sign("a GPT partition table (backup)", 4096, b"EFI PART"),
    sign("Linux software RAID (md)", 8192, b"\xfc\x4e\x2b\xa9"),
    sign("Intel RAID", 1024, b"Intel Raid ISM Cfg Sig. "),
    sign("DDF RAID", 512, b"\xde\x11\xde\x11"),
];

/// What the two ends of a drive look like. `None`: nothing but zeroes.
pub fn signature(front: &[u8], back: &[u8]) -> Option<&'static str> {
    let named = FRONT.iter().find(|sign| has(front, sign.offset, sign.bytes)).or_else(|| {
        BACK.iter().find(|sign| {
            back.len().checked_sub(sign.offset).is_some_and(|at| has(back, at, sign.bytes))
        })
    });
    if let Some(sign) = named {
        return Some(sign.name);
    }
    if md_old_at(back) {
        return Some("Linux software RAID (md)");
    }
    let blank = front.iter().chain(back).all(|byte| *byte == 0);
    (!blank).then_some("unknown data")
}

fn has(bytes: &[u8], offset: usize, wanted: &[u8]) -> bool {
    bytes.get(offset..).is_some_and(|rest| rest.starts_with(wanted))
}

/// Superblocks of md 0.90 and 1.0 are at the last multiple of 64 or 4 KiB that leaves room.
fn md_old_at(back: &[u8]) -> bool {
    let places = (1..=32).map(|step| step * 4096);
    let mut places = places.filter_map(|from_end| back.len().checked_sub(from_end));
    places.any(|at| has(back, at, b"\xfc\x4e\x2b\xa9"))
}

#[cfg(test)]
mod tests {
    use super::*;

    const EDGE: usize = 1 << 20;

    #[test]
    fn nothing_but_zeroes_is_blank() {
        assert_eq!(signature(&[0; EDGE], &[0; EDGE]), None);
    }

    #[test]
    fn every_sign_is_found_and_named() {
        for sign in &FRONT {
            let mut front = vec![0; EDGE];
            front[sign.offset..sign.offset + sign.bytes.len()].copy_from_slice(sign.bytes);
            assert_eq!(signature(&front, &[0; EDGE]), Some(sign.name), "{}", sign.offset);
        }
        for sign in &BACK {
            let mut back = vec![0; EDGE];
            let at = EDGE - sign.offset;
            back[at..at + sign.bytes.len()].copy_from_slice(sign.bytes);
            assert_eq!(signature(&[0; EDGE], &back), Some(sign.name), "{}", sign.offset);
        }
    }

    #[test]
    fn any_byte_of_the_edges_is_data() {
        for at in [0, 1, 4096, EDGE - 1] {
            let mut edge = vec![0; EDGE];
            edge[at] = 1;
            assert_eq!(signature(&edge, &[0; EDGE]), Some("unknown data"), "{at}");
            assert_eq!(signature(&[0; EDGE], &edge), Some("unknown data"), "{at} from the end");
        }
    }

    #[test]
    fn old_md_superblocks_near_the_end() {
        let mut back = vec![0; EDGE];
        let at = EDGE - (96 << 10);
        back[at..at + 4].copy_from_slice(b"\xfc\x4e\x2b\xa9");
        assert_eq!(signature(&[0; EDGE], &back), Some("Linux software RAID (md)"));
    }
}
