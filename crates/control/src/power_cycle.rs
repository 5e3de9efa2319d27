//! Since when an array's drives have power: initiators of its volumes learn from it whether what
//! they wrote and did not flush can be lost (see [`PowerCycle`]).
//!
//! Invariant: it is another one after any of the drives was without power while no daemon had it.
//! While one has it, the array knows what a drive that comes back misses.

use std::fmt::Debug;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use ashlar_reactor::nvme::power_cycle::PowerCycle;
use rustix::fs::{AtFlags, StatxFlags, major, statx};
use uuid::Uuid;

use crate::device::{Identity, OpenDevice};

/// Of the kernel: another one after each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// What is said of a boot and drives is made from them by a hash.
const NAMESPACE: Uuid = Uuid::from_u128(0x2d5e_91c8_7b46_4f0a_8e13_c7a4_50b9_6e21);

/// `history`: another one after another host had the array, or it was started by force. `None`
/// among the drives: one of memory. `None`: nobody would know.
pub fn power_cycle<'a>(
    history: &impl Debug,
    drives: impl Iterator<Item = Option<&'a OpenDevice>>,
) -> Option<PowerCycle> {
    let boot = std::fs::read_to_string(BOOT_ID).ok()?;
    let arrivals = drives.map(|drive| arrival(drive?)).collect::<Option<Vec<_>>>()?;
    if arrivals.is_empty() { None } else { of(&boot, history, arrivals) }
}

fn of(boot: &str, history: &impl Debug, mut drives: Vec<String>) -> Option<PowerCycle> {
    drives.sort_unstable();
    let all = format!("{} {history:?} {}", boot.trim(), drives.join(" "));
    PowerCycle::new(Uuid::new_v5(&NAMESPACE, all.as_bytes()).into_bytes())
}

/// Another one after a drive was taken out and put back, or a file's file system was mounted anew.
/// `None`: that would not be known.
fn arrival(drive: &OpenDevice) -> Option<String> {
    match drive.identity {
        // A test: it loses what was not flushed with the daemon.
        _ if drive.lossy => None,
        Identity::File { device, inode } if major(device) == 0 => {
            Some(format!("file {inode} mount {}", mount_of(drive)?))
        }
        Identity::File { inode, .. } => Some(format!("file {inode} {}", block_device(drive)?)),
        Identity::BlockDevice { .. } => block_device(drive),
        Identity::Pci { .. } => {
            let directory = drive.in_sysfs()?;
            // Nobody has it while no daemon runs: the kernel may take its power away then.
            let sleeps = std::fs::read_to_string(directory.join("d3cold_allowed")).ok()?;
            if sleeps.trim() == "0" { entry(&directory) } else { None }
        }
        Identity::Remote { .. } => {
            let power = drive.remote()?.power()?;
            Some(format!("remote {}", Uuid::from_bytes(power.number())))
        }
    }
}

/// That it is, or that its file is on.
fn block_device(drive: &OpenDevice) -> Option<String> {
    let directory = drive.in_sysfs()?;
    let name = directory.file_name()?.to_string_lossy().into_owned();
    // These stay while what is under them comes and goes.
    let stands_still = name.starts_with("loop") || name.starts_with("nbd");
    if stands_still { None } else { entry(&directory) }
}

/// The kernel gives each arrival an entry of its own.
fn entry(directory: &Path) -> Option<String> {
    let entry = std::fs::metadata(directory).ok()?;
    Some(format!("{}:{}", entry.dev(), entry.ino()))
}

/// Of the file system with a drive's file that is on no block device of its own: a number that no
/// other mount gets. `None`: the kernel has none (before Linux 6.8).
fn mount_of(drive: &OpenDevice) -> Option<u64> {
    /// STATX_MNT_ID_UNIQUE of statx(2).
    const UNIQUE: StatxFlags = StatxFlags::from_bits_retain(0x4000);
    let found = statx(drive.file()?, "", AtFlags::EMPTY_PATH, UNIQUE).ok()?;
    (found.stx_mask & UNIQUE.bits() != 0).then_some(found.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_of_a_boot_and_of_drives_in_any_order() {
        let drives = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let first = of("boot\n", &1, drives(&["a", "b"]));
        assert!(first.is_some());
        assert_eq!(of("boot", &1, drives(&["b", "a"])), first);
        let all = || drives(&["a", "b"]);
        for other in
            [of("another", &1, all()), of("boot", &2, all()), of("boot", &1, drives(&["a"]))]
        {
            assert_ne!(other, first);
        }
    }

    #[test]
    fn of_memory_nobody_knows() {
        assert_eq!(power_cycle(&1, [None].into_iter()), None);
        assert_eq!(power_cycle(&1, std::iter::empty()), None);
    }
}
