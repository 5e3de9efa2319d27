//! NVMe drives by their PCI address: taken from the kernel, they are driven by this process.
//!
//! Whoever cannot have one is told which command mends it.

use std::path::{Path, PathBuf};

use ashlar_reactor::nvme::vfio::{self, OpenError};
use ashlar_reactor::nvme::{Handle, VfioError};

use crate::pci::PciAddress;
use crate::refusal::{Answer, Refusal};

/// Where Linux shows PCI functions.
const DEVICES: &str = "/sys/bus/pci/devices";
/// Class code of an NVMe I/O controller (NVM Express PCIe Transport 1.0, 3.1.5).
const NVME_CLASS: &str = "0x010802";
const VFIO_DRIVER: &str = "vfio-pci";

/// Takes the drive over. Whatever it was doing is over.
pub fn open(address: PciAddress) -> Answer<Handle> {
    let path = usable(Path::new(DEVICES), address)?;
    let bus = vfio::open(&path).map_err(|error| unopened(address, &error))?;
    Handle::open(bus)
        .map_err(|trouble| Refusal::failed(format!("drive {address} cannot be used: {trouble}")))
}

/// Its place under `devices`, if it is an NVMe drive that the kernel has let go.
fn usable(devices: &Path, address: PciAddress) -> Answer<PathBuf> {
    let path = devices.join(address.to_string());
    if !path.exists() {
        return Err(Refusal::unknown(format!("there is no PCI device {address}")).fix(
            "`lspci -D` shows all; drives are of the class \"Non-Volatile memory controller\"",
        ));
    }
    let class = std::fs::read_to_string(path.join("class")).unwrap_or_default();
    if class.trim() != NVME_CLASS {
        return Err(Refusal::invalid(format!("PCI device {address} is no NVMe drive"))
            .fix("`lspci -D` shows what it is"));
    }
    if !path.join("iommu_group").exists() {
        return Err(Refusal::conflict(format!("no IOMMU stands before drive {address}")).fix(
            "switch it on in the firmware (VT-d, AMD-Vi), and for Intel start Linux with \
             intel_iommu=on; or attach the drive by its path in /dev",
        ));
    }
    let driver = name_of_link(&path.join("driver"));
    if driver.as_deref() == Some(VFIO_DRIVER) {
        return Ok(path);
    }
    if let Some(use_of_it) = used_by_kernel(&path) {
        return Err(Refusal::conflict(format!("drive {address} is in use: {use_of_it}"))
            .fix("unmount it, and take it out of LVM, md or swap (see `lsblk`), or use another"));
    }
    let has_it = match driver {
        Some(driver) => format!("the kernel's driver {driver} has drive {address}"),
        None => format!("drive {address} is not bound to {VFIO_DRIVER}"),
    };
    Err(Refusal::conflict(has_it).fix(bind(address)))
}

/// How to hand a drive over.
fn bind(address: PciAddress) -> String {
    let device = format!("{DEVICES}/{address}");
    format!(
        "`modprobe {VFIO_DRIVER}`, then `driverctl set-override {address} {VFIO_DRIVER}`, which \
         survives a reboot; or by hand: `echo {VFIO_DRIVER} >{device}/driver_override; echo \
         {address} >{device}/driver/unbind; echo {address} >/sys/bus/pci/drivers_probe`"
    )
}

fn name_of_link(link: &Path) -> Option<String> {
    Some(link.read_link().ok()?.file_name()?.to_str()?.to_owned())
}

/// What Linux does with a drive; `None`: nothing that would be missed.
fn used_by_kernel(path: &Path) -> Option<String> {
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    let disks = entries(&path.join("nvme")).flat_map(|controller| entries(&controller));
    let parts = disks.flat_map(|disk| entries(&disk).chain([disk]).collect::<Vec<_>>());
    for part in parts {
        let Ok(number) = std::fs::read_to_string(part.join("dev")) else { continue };
        let name = part.file_name()?.to_string_lossy().into_owned();
        let mounted = mounts.lines().find(|line| line.split(' ').nth(2) == Some(number.trim()));
        if let Some(mount) = mounted {
            let place = mount.split(' ').nth(4).unwrap_or("");
            return Some(format!("{name} is mounted at {place}"));
        }
        if swaps.lines().any(|line| line.starts_with(&format!("/dev/{name} "))) {
            return Some(format!("{name} is swapped to"));
        }
        if let Some(holder) = entries(&part.join("holders")).next() {
            let holder = holder.file_name()?.to_string_lossy().into_owned();
            return Some(format!("{name} is part of {holder}"));
        }
    }
    None
}

fn entries(directory: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = std::fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

fn unopened(address: PciAddress, error: &OpenError) -> Refusal {
    let refusal = Refusal::conflict(format!("drive {address} cannot be opened: {error}"));
    let cause = match error {
        OpenError::Vfio(VfioError::OpenContainer(error) | VfioError::OpenGroup(error, _)) => error,
        OpenError::Vfio(VfioError::GroupViable) => {
            return refusal.fix(format!(
                "bind every device of its IOMMU group to {VFIO_DRIVER}, too: `ls \
                 {DEVICES}/{address}/iommu_group/devices`"
            ));
        }
        OpenError::Vfio(_)
        | OpenError::Registers(_)
        | OpenError::NoInterrupts
        | OpenError::Events(_) => return refusal,
    };
    match cause.raw_os_error() {
        Some(libc::EBUSY) => Refusal {
            may_pass: true,
            ..refusal.fix(
                "another process has it: detach it there first, if that is another ashlar daemon",
            )
        },
        Some(libc::EACCES | libc::EPERM) => {
            refusal.fix("run the daemon as root, or as a user that may open /dev/vfio")
        }
        Some(libc::ENOENT) => refusal.fix(bind(address)),
        _ => refusal,
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no drive is taken that is in use, and every refusal names what mends it.
    //! Method: directories that look like those of /sys.

    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn drives_that_cannot_be_had() {
        let scratch = tempfile::tempdir().unwrap();
        let devices = scratch.path();
        let address: PciAddress = "03:00.0".parse().unwrap();
        let refused = || usable(devices, address).unwrap_err();
        assert!(refused().error.contains("there is no PCI device"), "{}", refused().line());
        let path = devices.join("0000:03:00.0");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("class"), "0x020000\n").unwrap();
        assert!(refused().error.contains("no NVMe drive"), "{}", refused().line());
        fs::write(path.join("class"), "0x010802\n").unwrap();
        assert!(refused().line().contains("intel_iommu=on"), "{}", refused().line());
        fs::create_dir(path.join("iommu_group")).unwrap();
        assert!(refused().error.contains("not bound"), "{}", refused().line());
        symlink("../../bus/pci/drivers/nvme", path.join("driver")).unwrap();
        assert!(refused().error.contains("driver nvme has"), "{}", refused().line());
        let fix = refused().fix.unwrap();
        assert!(fix.contains("driverctl set-override 0000:03:00.0 vfio-pci"), "{fix}");
        // Part of a RAID of the kernel, by a partition.
        let disk = path.join("nvme/nvme0/nvme0n1");
        fs::create_dir_all(disk.join("nvme0n1p1/holders/md0")).unwrap();
        fs::write(disk.join("nvme0n1p1/dev"), "1234:1\n").unwrap();
        assert!(refused().error.contains("nvme0n1p1 is part of md0"), "{}", refused().line());
        // Where the root is mounted from.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let number = mounts.lines().next().unwrap().split(' ').nth(2).unwrap();
        fs::write(disk.join("dev"), format!("{number}\n")).unwrap();
        fs::remove_dir_all(disk.join("nvme0n1p1")).unwrap();
        assert!(refused().error.contains("is mounted at"), "{}", refused().line());
        fs::remove_file(path.join("driver")).unwrap();
        symlink("../../bus/pci/drivers/vfio-pci", path.join("driver")).unwrap();
        assert_eq!(usable(devices, address), Ok(path));
    }
}
