//! Who uses a block device, which its driver does not say: whoever would get errors if it went.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

/// Who looks at every device that comes or was written to, and is gone in a moment.
const PASSERS_BY: [&str; 3] = ["(udev-worker)", "systemd-udevd", "udevd"];

/// What speaks against taking away the block device of this name (`ublkb0`): who uses it or a
/// partition on it, or why nobody knows. Who claims the device at the same moment may be refused
/// it. `is_served`: by this process; of one that nobody serves, an open may never return, so what
/// only that would show is not known.
pub(super) fn user(name: &str, is_served: bool) -> Option<String> {
    let all = directories(name);
    let numbers = numbers(&all);
    glance_at(name, &all, &numbers).or_else(|| match process(name, &numbers) {
        Ok(Some(its)) => Some(its),
        Ok(None) if is_served => claimed(name),
        Ok(None) => Some("nobody serves it, so it cannot say who uses it".to_owned()),
        Err(error) => Some(format!("/proc does not say who uses it: {error}")),
    })
}

/// What can be seen at little cost, without touching the device: what is on it, but not who has it
/// open.
pub(super) fn glance(name: &str) -> Option<String> {
    let all = directories(name);
    glance_at(name, &all, &numbers(&all))
}

fn glance_at(name: &str, all: &[PathBuf], numbers: &[String]) -> Option<String> {
    let mounts = || ["self", "1"].map(|its| read(Path::new("/proc").join(its).join("mountinfo")));
    holder(all)
        .or_else(|| swap(&read("/proc/swaps"), name))
        .or_else(|| loop_device(name, numbers))
        .or_else(|| mounts().iter().find_map(|its| mount(its, numbers, name)))
}

/// Whether the kernel has claimed it, for a file system of several devices, say. What cannot be
/// opened may be.
fn claimed(name: &str) -> Option<String> {
    let mut options = OpenOptions::new();
    let path = Path::new("/dev").join(name);
    let error = options.read(true).custom_flags(libc::O_EXCL).open(path).err()?;
    match error.raw_os_error() {
        Some(libc::EBUSY) => Some("the kernel has it in use".to_owned()),
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => None,
        _ => Some(format!("it cannot be opened: {error}")),
    }
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
fn holder(all: &[PathBuf]) -> Option<String> {
    let mut holders = all.iter().flat_map(|its| names_in(&its.join("holders")));
    holders.next().map(|holder| format!("{holder} is on it"))
}

/// `259:3`, of each.
fn numbers(all: &[PathBuf]) -> Vec<String> {
    all.iter().map(|its| read(its.join("dev")).trim().to_owned()).collect()
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

fn loop_device(name: &str, numbers: &[String]) -> Option<String> {
    let all = names_in(Path::new("/sys/block")).into_iter();
    all.filter(|its| its.starts_with("loop")).find_map(|its| {
        let backing = read(Path::new("/sys/block").join(&its).join("loop/backing_file"));
        let backing = backing.trim();
        // Under another name it is there as well; elsewhere a path may hang.
        let device = || device(Path::new(backing)).ok();
        let is_its = is_path_of(backing, name)
            || backing.starts_with("/dev/")
                && device().is_some_and(|its| is_one_of(&its, FileType::BlockDevice, numbers));
        is_its.then(|| format!("{its} is on it"))
    })
}

/// What kind of file it is and, of a device, its number: `259:3`. What a network or FUSE has cached
/// will do: they are not asked, and cannot hang.
fn device(path: &Path) -> io::Result<(FileType, String)> {
    let its = statx(CWD, path, AtFlags::STATX_DONT_SYNC, StatxFlags::TYPE)?;
    let number = format!("{}:{}", its.stx_rdev_major, its.stx_rdev_minor);
    Ok((FileType::from_raw_mode(its.stx_mode.into()), number))
}

/// Character devices have numbers of their own, which may be the same.
fn is_one_of((kind, number): &(FileType, String), wanted: FileType, numbers: &[String]) -> bool {
    *kind == wanted && numbers.contains(number)
}

/// Whoever has it open, or sees it mounted. An error: there may be some that are not seen.
fn process(name: &str, numbers: &[String]) -> io::Result<Option<String>> {
    let mut spaces = BTreeSet::new();
    for process in fs::read_dir("/proc")? {
        let process = process?.file_name().to_string_lossy().into_owned();
        if !process.bytes().all(|byte| byte.is_ascii_digit()) {
            continue;
        }
        let own = Path::new("/proc").join(&process);
        // Most processes see the same mounts.
        if spaces.insert(fs::read_link(own.join("ns/mnt")).unwrap_or_default())
            && let Some(found) = mount(&read(own.join("mountinfo")), numbers, name)
        {
            return Ok(Some(found));
        }
        let program = read(own.join("comm"));
        if PASSERS_BY.contains(&program.trim()) {
            continue;
        }
        if if_there(has_open(&own, FileType::BlockDevice, numbers))? == Some(true) {
            return Ok(Some(format!("process {process} ({}) has it open", program.trim())));
        }
    }
    Ok(None)
}

/// Whether a process has a device of one of these numbers open, under whatever name.
fn has_open(process: &Path, kind: FileType, numbers: &[String]) -> io::Result<bool> {
    for file in fs::read_dir(process.join("fd"))? {
        let its = if_there(device(&file?.path()))?;
        if its.is_some_and(|its| is_one_of(&its, kind, numbers)) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Processes end and files are closed while they are looked at; and file systems that are gone
/// themselves (ESTALE, ENOTCONN) have no devices.
fn if_there<T>(looked: io::Result<T>) -> io::Result<Option<T>> {
    match looked {
        Ok(its) => Ok(Some(its)),
        Err(error) => match error.raw_os_error() {
            Some(libc::ENOENT | libc::ESRCH | libc::ESTALE | libc::ENOTCONN) => Ok(None),
            _ => Err(error),
        },
    }
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

    /// Not under the name that is asked for, and no other device.
    #[test]
    fn whoever_has_it_open_is_found_by_number() {
        let _open = fs::File::open("/dev/null").unwrap();
        let own = PathBuf::from(format!("/proc/{}", std::process::id()));
        let has = |kind, number: &str| {
            has_open(&own, kind, &["9:9".to_owned(), number.to_owned()]).unwrap()
        };
        // Documentation/admin-guide/devices.txt: null, which is no block device, and none.
        assert!(has(FileType::CharacterDevice, "1:3"));
        assert!(!has(FileType::BlockDevice, "1:3"));
        assert!(!has(FileType::CharacterDevice, "1:250"));
        let none = has_open(Path::new("/proc/self/none"), FileType::BlockDevice, &[]);
        assert!(none.is_err());
        assert_eq!(process("no-such-device", &[]).ok().flatten(), None);
    }

    #[test]
    fn what_nobody_serves_is_not_said_to_be_free() {
        assert!(user("no-such-device", false).is_some());
        assert_eq!(claimed("no-such-device"), None);
        // What cannot be opened may be in use.
        assert!(claimed("null/x").is_some());
    }
}
