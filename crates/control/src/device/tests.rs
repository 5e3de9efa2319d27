//! Goal: nobody's data is taken by mistake, and no file is opened that cannot serve as a drive.
//! Method: real files in a scratch directory, each wrong in one way.

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use ashlar_format::record;
use zerocopy::IntoBytes;

use super::content::Content;
use super::*;
use crate::refusal::RefusalKind;

struct Scratch {
    // Removed with everything in it when dropped.
    directory: tempfile::TempDir,
}

impl Scratch {
    fn new() -> Scratch {
        Scratch { directory: tempfile::tempdir().unwrap() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// A sparse file of the smallest size, with `bytes` at `offset`.
    fn drive(&self, name: &str, offset: u64, bytes: &[u8]) -> PathBuf {
        let path = self.path(name);
        let file = File::create(&path).unwrap();
        file.set_len(DRIVE_BYTES_MIN).unwrap();
        file.write_all_at(bytes, offset).unwrap();
        path
    }
}

fn label_bytes(drive_bytes: u64, home: u64) -> Vec<u8> {
    let layout = ashlar_raid::label::plan(drive_bytes, 0).unwrap();
    let mut label = DriveLabel::new([7; 16], 3, drive_bytes, &layout);
    record::seal(&mut label, [9; 16], home, 1);
    label.as_bytes().to_vec()
}

#[test]
fn blank_foreign_and_labelled_drives_are_told_apart() {
    let scratch = Scratch::new();
    let content = |path: PathBuf| OpenDevice::open(&path).unwrap().content().unwrap();
    assert_eq!(content(scratch.drive("blank", 0, &[0])), Content::Blank);
    let ext4 = content(scratch.drive("ext4", 1080, b"\x53\xef"));
    assert_eq!(ext4, Content::Foreign("ext2, ext3 or ext4"));
    let gpt = content(scratch.drive("gpt", DRIVE_BYTES_MIN - 512, b"EFI PART"));
    assert_eq!(gpt, Content::Foreign("a GPT partition table (backup)"));
    let data = content(scratch.drive("data", 700_000, &[1]));
    assert_eq!(data, Content::Foreign("unknown data"));

    let label = label_bytes(DRIVE_BYTES_MIN, 0);
    let Content::Labelled(found) = content(scratch.drive("label", 0, &label)) else {
        panic!("a good label");
    };
    assert_eq!((found.drive.into_bytes(), found.array.into_bytes()), ([9; 16], [7; 16]));
    assert_eq!((found.member, found.array_name), (3, None));

    let mut torn = label.clone();
    torn[100] ^= 1;
    let Content::Damaged { why } = content(scratch.drive("torn", 0, &torn)) else {
        panic!("a damaged label");
    };
    assert!(why.contains("checksum"), "{why}");
}

#[test]
fn the_last_label_copy_is_enough() {
    let scratch = Scratch::new();
    let home = DRIVE_BYTES_MIN - DriveLabel::BYTES;
    let path = scratch.drive("last", home, &label_bytes(DRIVE_BYTES_MIN, home));
    let content = OpenDevice::open(&path).unwrap().content().unwrap();
    assert!(matches!(content, Content::Labelled(_)), "{content:?}");
}

#[test]
fn a_wiped_drive_is_blank() {
    let scratch = Scratch::new();
    let path = scratch.drive("wiped", 0, &label_bytes(DRIVE_BYTES_MIN, 0));
    let device = OpenDevice::open(&path).unwrap();
    device.wipe().unwrap();
    assert_eq!(device.content().unwrap(), Content::Blank);
}

#[test]
fn a_device_is_held_by_one_owner() {
    let scratch = Scratch::new();
    let path = scratch.drive("held", 0, &[0]);
    let first = OpenDevice::open(&path).unwrap();
    let io_of_a_drive = first.lend();
    assert!(first.is_lent());
    let refusal = OpenDevice::open(&path).unwrap_err();
    assert!(refusal.error.contains("held by another process"), "{refusal:?}");
    drop(first);
    // Pulled, and not done with what it was asked.
    OpenDevice::open(&path).unwrap_err();
    // Whoever waits for it gets it, as after a daemon that was killed.
    let second = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| when_free(LET_GO_TIMEOUT, || OpenDevice::open(&path)));
        drop(io_of_a_drive);
        waiting.join().unwrap().unwrap()
    });
    drop(second.lend());
    assert!(!second.is_lent());
}

#[test]
fn two_paths_to_one_file_are_one_drive() {
    let scratch = Scratch::new();
    let path = scratch.drive("one", 0, &[0]);
    std::os::unix::fs::symlink(&path, scratch.path("two")).unwrap();
    assert_eq!(identify(&path), identify(&scratch.path("two")));
    assert_ne!(identify(&path), identify(&scratch.drive("other", 0, &[0])));
}

#[test]
fn what_cannot_be_a_drive_is_refused_with_its_fix() {
    let scratch = Scratch::new();
    let refused = |path: &Path| OpenDevice::open(path).unwrap_err();
    let missing = refused(&scratch.path("missing"));
    assert_eq!(missing.kind, RefusalKind::Unknown);
    assert!(missing.fix.unwrap().contains("--size"));
    assert!(refused(scratch.directory.path()).error.contains("neither a file nor"));
    assert!(refused(Path::new("/dev/null")).error.contains("neither a file nor"));
    let small = scratch.path("small");
    File::create(&small).unwrap().set_len(PAGE_BYTES - 1).unwrap();
    assert!(refused(&small).error.contains("too little"));
    // Of larger ones a label may tell that they were cut short.
    assert!(check_size("small", DRIVE_BYTES_MIN - 1).unwrap_err().error.contains("too little"));
    let read_only = scratch.drive("read-only", 0, &[0]);
    std::fs::set_permissions(&read_only, std::fs::Permissions::from_mode(0o444)).unwrap();
    assert!(refused(&read_only).error.contains("read-only"));
}

#[test]
fn a_file_that_shrinks_is_noticed() {
    let scratch = Scratch::new();
    let path = scratch.drive("shrinks", 0, &[0]);
    let device = OpenDevice::open(&path).unwrap();
    assert!(!device.has_shrunk());
    File::options().write(true).open(&path).unwrap().set_len(1 << 20).unwrap();
    assert!(device.has_shrunk());
}

#[test]
fn a_new_file_has_its_size_or_does_not_exist() {
    let scratch = Scratch::new();
    let path = scratch.path("new");
    create_file(&path, DRIVE_BYTES_MIN).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), DRIVE_BYTES_MIN);
    assert!(create_file(&path, DRIVE_BYTES_MIN).is_err(), "it exists");
    let huge = scratch.path("huge");
    let refusal = create_file(&huge, 1 << 60).unwrap_err();
    assert_eq!(refusal.kind, RefusalKind::NoSpace);
    assert!(!huge.exists());
    assert!(create_file(&scratch.path("odd"), DRIVE_BYTES_MIN + 1).is_err());
    assert!(create_file(&scratch.path("no/such"), DRIVE_BYTES_MIN).is_err());
}
