//! Since when an array's drives have power: initiators of its volumes learn from it whether what
//! they wrote and did not flush can be lost (see [`PowerCycle`]).
//!
//! Invariant: it is another one after any of the drives was without power while no daemon had it.
//! While one has it, the array knows what a drive that comes back misses.

use std::os::unix::fs::MetadataExt;

use ashlar_reactor::nvme::power_cycle::PowerCycle;
use rustix::fs::{major, minor};
use uuid::Uuid;

use crate::device::{Identity, OpenDevice};

/// Of the kernel: another one after each boot.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// What is said of a boot and drives is made from them by a hash.
const NAMESPACE: Uuid = Uuid::from_u128(0x2d5e_91c8_7b46_4f0a_8e13_c7a4_50b9_6e21);

/// `None` among the drives: one of memory. `None`: nobody would know.
pub fn power_cycle<'a>(drives: impl Iterator<Item = Option<&'a OpenDevice>>) -> Option<PowerCycle> {
    let boot = std::fs::read_to_string(BOOT_ID).ok()?;
    of(&boot, drives.map(|drive| its_own(drive?)).collect::<Option<Vec<_>>>()?)
}

fn of(boot: &str, mut drives: Vec<String>) -> Option<PowerCycle> {
    drives.sort_unstable();
    let all = format!("{} {}", boot.trim(), drives.join(" "));
    PowerCycle::new(Uuid::new_v5(&NAMESPACE, all.as_bytes()).into_bytes())
}

/// Another one after a drive was taken out and put back: the kernel gives each arrival an entry of
/// its own in sysfs.
fn its_own(drive: &OpenDevice) -> Option<String> {
    let arrival = |directory: String| {
        let entry = std::fs::metadata(directory).ok()?;
        Some(format!("{}:{}", entry.dev(), entry.ino()))
    };
    match drive.identity {
        // A test: it loses what was not flushed with the daemon.
        _ if drive.lossy => None,
        Identity::File { device, inode } => Some(format!("file {device}:{inode}")),
        Identity::BlockDevice { number } => {
            arrival(format!("/sys/dev/block/{}:{}", major(number), minor(number)))
        }
        Identity::Pci { address } => arrival(format!("/sys/bus/pci/devices/{address}")),
        Identity::Remote { .. } => {
            let power = drive.remote()?.identity().power?;
            Some(format!("remote {}", Uuid::from_bytes(power.number())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_of_a_boot_and_of_drives_in_any_order() {
        let drives = |names: &[&str]| names.iter().map(ToString::to_string).collect();
        let first = of("boot\n", drives(&["a", "b"]));
        assert!(first.is_some());
        assert_eq!(of("boot", drives(&["b", "a"])), first);
        for other in [of("another", drives(&["a", "b"])), of("boot", drives(&["a"]))] {
            assert_ne!(other, first);
        }
    }

    #[test]
    fn of_memory_nobody_knows() {
        assert!(power_cycle(std::iter::empty()).is_some());
        assert_eq!(power_cycle([None].into_iter()), None);
    }
}
