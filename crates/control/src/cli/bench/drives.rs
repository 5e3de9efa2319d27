//! The drives of a bench: memory, nothing, or files and block devices, which it overwrites.

use std::path::Path;

use ashlar_bench::under::Source;

use crate::cli::bench::options::ArrayOptions;
use crate::device::content::Content;
use crate::device::{DRIVE_BYTES_MIN, LET_GO_TIMEOUT, OpenDevice, check_size, when_free};
use crate::engine::check_room;
use crate::refusal::{Answer, Refusal};
use crate::size::Size;

/// More drives than any array has.
const COPIES_MAX: u32 = 256;

enum Drive {
    Ram(u64),
    Null(u64),
    Device { path: String, device: OpenDevice },
}

/// What `--drives` names, opened and claimed; written by nobody yet.
pub struct Opened(Vec<Drive>);

impl Opened {
    pub fn open(options: &ArrayOptions) -> Answer<Opened> {
        let mut drives = Vec::new();
        for text in options.drive_texts() {
            drives.append(&mut open(&text, options.force)?);
        }
        let memory = |drive: &Drive| match drive {
            Drive::Ram(bytes) => *bytes,
            Drive::Null(_) | Drive::Device { .. } => 0,
        };
        let wanted = drives.iter().map(memory).fold(0, u64::saturating_add);
        check_room(wanted)
            .map_err(|refusal| refusal.fix("use smaller drives, such as --drive-size 128M"))?;
        Ok(Opened(drives))
    }

    /// For a reactor, once.
    pub fn sources(&self) -> Vec<Source> {
        let source = |drive: &Drive| match drive {
            Drive::Ram(bytes) => Source::Ram { bytes: *bytes },
            Drive::Null(bytes) => Source::Null { bytes: *bytes },
            Drive::Device { path, device } => {
                Source::Opened { name: path.clone(), device: device.lend(), limits: device.limits }
            }
        };
        self.0.iter().map(source).collect()
    }

    /// Leaves devices blank, as far as anyone can tell who looks for labels.
    pub fn wipe(&self) -> Answer<()> {
        for drive in &self.0 {
            let Drive::Device { path, device } = drive else { continue };
            device.wipe().map_err(|error| {
                Refusal::failed(format!("{path} could not be wiped: {error}"))
                    .fix("it may carry the label of an array named bench: use --force with it")
            })?;
        }
        Ok(())
    }
}

/// `ram:512M*5`, `null:1T`, `/dev/nvme0n1`.
fn open(text: &str, force: bool) -> Answer<Vec<Drive>> {
    if let Some(rest) = text.strip_prefix("ram:") {
        let (bytes, count) = many(text, rest)?;
        return Ok((0..count).map(|_| Drive::Ram(bytes)).collect());
    }
    if let Some(rest) = text.strip_prefix("null:") {
        let (bytes, count) = many(text, rest)?;
        return Ok((0..count).map(|_| Drive::Null(bytes)).collect());
    }
    Ok(vec![Drive::Device { path: text.to_owned(), device: open_device(text, force)? }])
}

/// `512M*5`: size and count.
fn many(text: &str, rest: &str) -> Answer<(u64, u32)> {
    let (size, count) = rest.split_once('*').unwrap_or((rest, "1"));
    let size = size.parse::<Size>().ok();
    let count = count.parse().ok().filter(|count| (1..=COPIES_MAX).contains(count));
    let (Some(Size(bytes)), Some(count)) = (size, count) else {
        return Err(Refusal::invalid(format!("{text:?} describes no drives"))
            .fix("write ram:SIZE*COUNT or null:SIZE*COUNT, such as ram:512M*5"));
    };
    if bytes < DRIVE_BYTES_MIN || !bytes.is_multiple_of(4096) {
        let least = Size(DRIVE_BYTES_MIN);
        return Err(Refusal::invalid(format!("{} is no size for a drive", Size(bytes)))
            .fix(format!("use at least {least}, and a multiple of 4K")));
    }
    Ok((bytes, count))
}

fn open_device(path: &str, force: bool) -> Answer<OpenDevice> {
    if !Path::new(path).exists() {
        return Err(Refusal::unknown(format!("{path} does not exist"))
            .fix("check the path; ram:SIZE is a drive of memory"));
    }
    let device = when_free(LET_GO_TIMEOUT, || OpenDevice::open(Path::new(path)))?;
    check_size(path, device.limits.bytes)?;
    let content = device
        .content()
        .map_err(|error| Refusal::failed(format!("{path} cannot be read: {error}")))?;
    if force || content == Content::Blank {
        return Ok(device);
    }
    let what = match content {
        Content::Foreign(_) => format!("{path} carries data: {content}"),
        Content::Blank | Content::Labelled(_) | Content::Damaged { .. } | Content::Newer { .. } => {
            format!("{path} carries {content}")
        }
    };
    Err(Refusal::conflict(what).fix("if it may be lost, use --force; if not, use another drive"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drives_that_people_write() {
        let counted = |text: &str| match open(text, false) {
            Ok(drives) => drives.len(),
            Err(refusal) => panic!("{text}: {refusal}"),
        };
        assert_eq!((counted("ram:512M*5"), counted("null:1T"), counted("ram:64M*1")), (5, 1, 1));
        for wrong in ["ram:", "ram:5", "ram:512M*", "ram:512M*0", "null:1X*2", "ram:512M*257"] {
            let refusal = open(wrong, false).err().unwrap();
            assert!(refusal.fix.is_some(), "{wrong}");
        }
    }
}
