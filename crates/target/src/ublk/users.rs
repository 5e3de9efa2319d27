//! Who uses a block device, which its driver does not say: whoever would get errors if it went.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

/// Who looks at every device that comes or was written to, and is gone in a moment.
const PASSERS_BY: [&str; 3] = ["(udev-worker)", "systemd-udevd", "udevd"];

/// What uses the block device of this name (`ublkb0`), or a partition on it; `None`: nobody. Who
/// claims the device at the same moment may be refused it.
pub(super) fn user(name: &str) -> Option<String> {
    seen(name).or_else(|| {
        let mut options = OpenOptions::new();
        let claimed =
            options.read(true).custom_flags(libc::O_EXCL).open(Path::new("/dev").join(name));
        let is_busy = claimed.is_err_and(|its| its.raw_os_error() == Some(libc::EBUSY));
        is_busy.then(|| "the kernel has it in use".to_owned())
    })
}

/// The same as far as it can be seen without touching the device.
pub(super) fn seen(name: &str) -> Option<String> {
    holder(name)
        .or_else(|| swap(&read("/proc/swaps"), name))
        .or_else(|| loop_device(name))
        .or_else(|| process(name))
}

fn read(path: impl AsRef<Path>) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

fn names_in(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

/// The device and its partitions, as directories of sysfs.
fn directories(name: &str) -> Vec<PathBuf> {
    let device = Path::new("/sys/block").join(name);
    let parts = names_in(&device).into_iter().filter(|its| is_part_of(its, name));
    let parts: Vec<_> = parts.map(|part| device.join(part)).collect();
    std::iter::once(device).chain(parts).collect()
}

/// Other block devices on it.
fn holder(name: &str) -> Option<String> {
    let holders = directories(name).into_iter().flat_map(|its| names_in(&its.join("holders")));
    holders.map(|holder| format!("{holder} is on it")).next()
}

/// `259:3`, of each.
fn numbers(name: &str) -> Vec<String> {
    directories(name).iter().map(|its| read(its.join("dev")).trim().to_owned()).collect()
}

/// proc_pid_mountinfo(5): the third field is the device, the fifth the place; after a dash type and
/// source, by which file systems with numbers of their own are known.
fn mount(mounts: &str, numbers: &[String], name: &str) -> Option<String> {
    mounts.lines().find_map(|line| {
        let (fields, source) = line.split_once(" - ")?;
        let mut fields = fields.split(' ').skip(2);
        let (device, place) = (fields.next()?, fields.nth(1)?);
        let source = source.split(' ').nth(1)?;
        let is_it = numbers.iter().any(|its| its == device) || is_path_of(source, name);
        is_it.then(|| format!("it is mounted at {place}"))
    })
}

fn swap(swaps: &str, name: &str) -> Option<String> {
    let mut paths = swaps.lines().filter_map(|line| line.split_whitespace().next());
    paths.any(|path| is_path_of(path, name)).then(|| "there is swap space on it".to_owned())
}

fn loop_device(name: &str) -> Option<String> {
    let all = names_in(Path::new("/sys/block")).into_iter();
    all.filter(|its| its.starts_with("loop")).find_map(|its| {
        let backing = read(Path::new("/sys/block").join(&its).join("loop/backing_file"));
        is_path_of(backing.trim(), name).then(|| format!("{its} is on it"))
    })
}

/// Whoever has it open, or sees it mounted.
fn process(name: &str) -> Option<String> {
    let (numbers, mut spaces) = (numbers(name), BTreeSet::new());
    let is_number = |its: &String| its.bytes().all(|byte| byte.is_ascii_digit());
    names_in(Path::new("/proc")).into_iter().filter(is_number).find_map(|process| {
        let own = Path::new("/proc").join(&process);
        // Most processes see the same mounts.
        if spaces.insert(fs::read_link(own.join("ns/mnt")).unwrap_or_default())
            && let Some(found) = mount(&read(own.join("mountinfo")), &numbers, name)
        {
            return Some(found);
        }
        let program = read(own.join("comm"));
        if PASSERS_BY.contains(&program.trim()) {
            return None;
        }
        let files = own.join("fd");
        let mut names = names_in(&files).into_iter();
        let has_it = names.any(|file| {
            let target = fs::read_link(files.join(file)).unwrap_or_default();
            target.to_str().is_some_and(|its| is_path_of(its, name))
        });
        has_it.then(|| format!("process {process} ({}) has it open", program.trim()))
    })
}

fn is_path_of(path: &str, name: &str) -> bool {
    let its = path.strip_prefix("/dev/");
    its.is_some_and(|its| its == name || is_part_of(its, name))
}

/// `ublkb1p2` is of `ublkb1`, `ublkb10` is not.
fn is_part_of(part: &str, name: &str) -> bool {
    let number = part.strip_prefix(name).and_then(|rest| rest.strip_prefix('p'));
    number.is_some_and(|its| !its.is_empty() && its.bytes().all(|byte| byte.is_ascii_digit()))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
22 27 0:20 / /proc rw,nosuid - proc proc rw
31 22 259:3 / /srv/pg rw,relatime shared:1 - xfs /dev/ublkb1p2 rw,attr2
32 22 0:44 / /srv/b rw - btrfs /dev/ublkb7 rw";

    #[test]
    fn mounts_are_found_by_number_or_source() {
        let at = |numbers: &[&str], name| {
            let numbers: Vec<String> = numbers.iter().map(|&its| its.into()).collect();
            mount(MOUNTS, &numbers, name)
        };
        assert_eq!(at(&["259:3"], "other").unwrap(), "it is mounted at /srv/pg");
        assert_eq!(at(&[], "ublkb1").unwrap(), "it is mounted at /srv/pg");
        assert_eq!(at(&["259:9"], "ublkb7").unwrap(), "it is mounted at /srv/b");
        assert_eq!(at(&["259:4"], "ublkb2"), None);
        assert_eq!(at(&["59:3"], "ublkb"), None);
    }

    #[test]
    fn devices_are_told_apart() {
        assert!(is_path_of("/dev/ublkb1", "ublkb1") && is_path_of("/dev/ublkb1p12", "ublkb1"));
        for other in ["/dev/ublkb10", "/dev/ublkb1px", "/dev/ublkb1p", "ublkb1", "/dev/ublkc1"] {
            assert!(!is_path_of(other, "ublkb1"), "{other}");
        }
        let swaps = "Filename\tType\n/dev/ublkb3p1 partition 1 0 -2\n";
        assert!(swap(swaps, "ublkb3").is_some() && swap(swaps, "ublkb1").is_none());
    }

    #[test]
    fn whoever_has_it_open_is_found() {
        let _open = fs::File::open("/dev/null").unwrap();
        assert!(process("null").unwrap().contains("has it open"));
        assert_eq!(process("no-such-device"), None);
    }
}
