//! A namespace by the kernel's generic character device (`/dev/ngXnY`, Linux 5.13): commands of
//! ours go to the drive as they are, past the kernel's block layer.
//!
//! Layouts and numbers: Linux, include/uapi/linux/nvme_ioctl.h. The kernel keeps its queues, its
//! timeouts and its resets; what it answers is the drive's status.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use super::command::{BLOCKS_MAX, Command, ControllerIdentity, IDENTIFY_BYTES, NamespaceIdentity};
use crate::op::{Errno, Op};

/// `NVME_IOCTL_ID`: the number of the namespace.
const IOCTL_ID: libc::Ioctl = 0x4e40;
/// `NVME_IOCTL_ADMIN_CMD`.
const IOCTL_ADMIN: libc::Ioctl = 0xc048_4e41;
/// `NVME_URING_CMD_IO`, and the same with a list of pieces: `NVME_URING_CMD_IO_VEC`.
pub const URING_IO: u32 = 0xc048_4e80;
pub const URING_IO_LIST: u32 = 0xc048_4e81;
/// Bytes of `struct nvme_uring_cmd` and `struct nvme_passthru_cmd`, which differ in the last word.
pub const REQUEST_BYTES: usize = 72;
/// A drive that is asked what it is and does not answer is not waited for longer.
const IDENTIFY_WITHIN_MS: u32 = 5_000;
/// Pieces of a list must begin and end with one of these, but for the ends of all: else the kernel
/// would copy what is in them.
const PAGE: usize = 4096;

/// Where the data of a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    None,
    Piece {
        address: u64,
        bytes: u32,
    },
    /// An array of `struct iovec`.
    List {
        address: u64,
        pieces: u32,
    },
}

/// A command as the kernel reads it. Zero milliseconds: the kernel's own patience.
pub fn request(command: &Command, data: Data, timeout_ms: u32) -> [u8; REQUEST_BYTES] {
    let (address, count) = match data {
        Data::None => (0, 0),
        Data::Piece { address, bytes } => (address, bytes),
        Data::List { address, pieces } => (address, pieces),
    };
    let from = command.to_bytes();
    let mut bytes = [0; REQUEST_BYTES];
    // Opcode, namespace and words 2 and 3 stand where they do in the drive's own entry, then the
    // data instead of its pages, then the command's own words. The identifier is the kernel's.
    bytes[..16].copy_from_slice(&from[..16]);
    bytes[1..4].fill(0);
    bytes[24..32].copy_from_slice(&address.to_le_bytes());
    bytes[36..40].copy_from_slice(&count.to_le_bytes());
    bytes[40..64].copy_from_slice(&from[40..]);
    bytes[64..68].copy_from_slice(&timeout_ms.to_le_bytes());
    bytes
}

/// What a namespace can be asked for in this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terms {
    pub namespace: u32,
    pub bytes: u64,
    pub block_log2: u8,
    /// Most bytes of one transfer: of the drive (MDTS), and of the kernel's queue.
    pub transfer_bytes: usize,
}

impl Terms {
    /// The command for an operation; `None`: the ordinary way is for it.
    pub fn command(&self, op: &Op) -> Option<Command> {
        let namespace = self.namespace;
        match op {
            Op::Read { offset, into, .. } => {
                let (lba, blocks) = self.transfer(*offset, into)?;
                Some(Command::read(namespace, lba, blocks))
            }
            Op::Write { offset, from, .. } => {
                let (lba, blocks) = self.transfer(*offset, from)?;
                Some(Command::write(namespace, lba, blocks))
            }
            // A flush that fails is never asked for again, and the kernel does try it again after
            // a reset. Of zeroes, it knows the drives that do them wrong.
            Op::Flush { .. } | Op::WriteZeroes { .. } | Op::Descriptor { .. } => None,
        }
    }

    fn transfer(&self, offset: u64, data: &crate::buffer::Buffers) -> Option<(u64, u32)> {
        let (pieces, len) = (data.pieces(), data.len());
        let last = pieces.len().checked_sub(1)?;
        let is_whole = |at: usize| at.is_multiple_of(PAGE);
        let fits = pieces.iter().enumerate().all(|(index, piece)| {
            let start = piece.as_ptr().addr();
            let (begins, ends) = (is_whole(start), is_whole(start + piece.len()));
            (index == 0 || begins) && (index == last || ends) && start.is_multiple_of(4)
        });
        self.range(offset, len as u64).filter(|_| fits && len <= self.transfer_bytes)
    }

    fn range(&self, offset: u64, len: u64) -> Option<(u64, u32)> {
        let is_whole = |at: u64| at.is_multiple_of(1 << self.block_log2);
        let inside = offset.checked_add(len).is_some_and(|end| end <= self.bytes);
        let blocks = u32::try_from(len >> self.block_log2).ok()?;
        let fits =
            is_whole(offset) && is_whole(len) && inside && (1..=BLOCKS_MAX).contains(&blocks);
        fits.then_some((offset >> self.block_log2, blocks))
    }
}

/// See the file's head.
#[derive(Debug)]
pub struct Generic {
    file: File,
    terms: Terms,
}

impl Generic {
    /// Beside a block device; `None`: that is no NVMe namespace, or only a part of one. May wait
    /// for the drive.
    pub fn beside(block_device: &File) -> Option<Result<Generic, Errno>> {
        let directory = sysfs_of(block_device)?;
        let name = generic_name(directory.file_name()?.to_str()?)?;
        if directory.join("partition").exists() {
            return None;
        }
        Some(
            open(&Path::new("/dev").join(name), &directory)
                .map_err(|error| Errno(error.raw_os_error().unwrap_or(libc::EINVAL))),
        )
    }

    /// For tests: a file that is no namespace.
    #[cfg(test)]
    pub(crate) fn pretend(file: File, terms: Terms) -> Generic {
        Generic { file, terms }
    }

    pub fn fd(&self) -> RawFd {
        self.file.as_raw_fd()
    }

    pub fn terms(&self) -> &Terms {
        &self.terms
    }
}

/// `nvme0n1` → `ng0n1`
fn generic_name(block: &str) -> Option<String> {
    let numbers = block.strip_prefix("nvme")?;
    let (controller, namespace) = numbers.split_once('n')?;
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    (is_number(controller) && is_number(namespace)).then(|| format!("ng{numbers}"))
}

fn sysfs_of(block_device: &File) -> Option<PathBuf> {
    let meta = block_device.metadata().ok().filter(|its| its.file_type().is_block_device())?;
    let (major, minor) = (libc::major(meta.rdev()), libc::minor(meta.rdev()));
    std::fs::canonicalize(format!("/sys/dev/block/{major}:{minor}")).ok()
}

fn open(path: &Path, sysfs: &Path) -> io::Result<Generic> {
    let unfit = || io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    let file = File::options().read(true).write(true).open(path)?;
    if !file.metadata()?.file_type().is_char_device() {
        return Err(unfit());
    }
    let namespace = number_of(&file)?;
    let its = NamespaceIdentity::decode(&identify(&file, &Command::identify_namespace(namespace))?);
    let controller = ControllerIdentity::decode(&identify(&file, &Command::identify_controller())?);
    // Metadata would have to be moved with the data.
    if !matches!(its.block_log2, 9 | 12) || its.metadata_bytes != 0 {
        return Err(unfit());
    }
    let terms = Terms {
        namespace,
        bytes: its.blocks.checked_shl(its.block_log2.into()).ok_or_else(unfit)?,
        block_log2: its.block_log2,
        transfer_bytes: transfer_bytes(sysfs, controller.transfer_log2).ok_or_else(unfit)?,
    };
    Ok(Generic { file, terms })
}

/// The drive counts in pages of the smallest size, the kernel in kibibytes and in pieces of a page
/// or more.
fn transfer_bytes(sysfs: &Path, drive_log2: u8) -> Option<usize> {
    let limit = |name: &str| -> Option<usize> {
        let text = std::fs::read_to_string(sysfs.join("queue").join(name)).ok()?;
        text.trim().parse().ok()
    };
    let kernel = limit("max_hw_sectors_kb")?.checked_mul(1024)?;
    // One piece more, if it begins within a page.
    let pieces = limit("max_segments")?.saturating_sub(1).checked_mul(PAGE)?;
    let drive = match drive_log2 {
        0 => usize::MAX,
        log2 => PAGE.checked_shl(log2.into())?,
    };
    Some(kernel.min(pieces).min(drive))
}

fn number_of(file: &File) -> io::Result<u32> {
    // SAFETY: the call takes no argument.
    let number = unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ID) };
    u32::try_from(number).map_err(|_| io::Error::last_os_error())
}

fn identify(file: &File, command: &Command) -> io::Result<[u8; IDENTIFY_BYTES]> {
    let mut answer = Box::new([0; IDENTIFY_BYTES]);
    let address = answer.as_mut_ptr().addr() as u64;
    let bytes = u32::try_from(IDENTIFY_BYTES).expect("4096");
    let mut asked = request(command, Data::Piece { address, bytes }, IDENTIFY_WITHIN_MS);
    // SAFETY: the kernel reads and writes `asked`, which has the size that the number says, and
    // fills the `bytes` of `answer`; both outlive the call, which waits until the drive is done.
    let status = unsafe { libc::ioctl(file.as_raw_fd(), IOCTL_ADMIN, asked.as_mut_ptr()) };
    match status {
        0 => Ok(*answer),
        // A status of the drive.
        1.. => Err(io::Error::from_raw_os_error(libc::EREMOTEIO)),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a request is laid out as the kernel reads it, and only what fits takes this way.
    //! Method: bytes written out by hand from the kernel's header; operations at every limit.

    use super::*;
    use crate::buffer::{BufferPool, Buffers};
    use crate::op::DeviceId;

    const TERMS: Terms =
        Terms { namespace: 7, bytes: 1 << 30, block_log2: 12, transfer_bytes: 128 << 10 };

    #[test]
    fn a_request_is_as_the_kernel_reads_it() {
        let command = Command::read(7, 0x12_3456_789a, 8).with_id(0xbeef);
        let data = Data::Piece { address: 0x1122_3344_5566_7788, bytes: 0x8000 };
        let bytes = request(&command, data, 1500);
        let word = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
        // Opcode, and no flags; namespace; words 2 and 3; no metadata.
        assert_eq!([0, 4, 8, 12, 16, 20].map(word), [2, 7, 0, 0, 0, 0]);
        assert_eq!([24, 28, 32, 36].map(word), [0x5566_7788, 0x1122_3344, 0, 0x8000]);
        assert_eq!([40, 44, 48, 52, 60].map(word), [0x3456_789a, 0x12, 7, 0, 0]);
        assert_eq!([64, 68].map(word), [1500, 0]);
        let flush = request(&Command::flush(7), Data::None, 0);
        assert_eq!((flush[0], flush[4]), (0, 7));
        assert!(flush[5..].iter().all(|byte| *byte == 0));
        let list = request(&Command::write(7, 0, 1), Data::List { address: 9, pieces: 3 }, 0);
        assert_eq!((list[0], list[24], list[36]), (1, 9, 3));
        // Linux, _IOWR('N', 0x80, 72 bytes).
        assert_eq!(URING_IO, 3 << 30 | 72 << 16 | 0x4e << 8 | 0x80);
    }

    fn read(offset: u64, into: Buffers) -> Op {
        Op::Read { device: DeviceId(0), offset, into }
    }

    #[test]
    fn only_what_fits_goes_this_way() {
        let pool = BufferPool::new();
        let whole = pool.take(128 << 10);
        let one = |len: usize| Buffers::from(whole.slice(0..len));
        let goes = |op: &Op| TERMS.command(op).is_some();
        assert!(goes(&read(4096, one(4096))) && goes(&read(0, one(128 << 10))));
        assert!(!goes(&read(512, one(4096))), "its place is no block");
        assert!(!goes(&read(0, one(512))), "its length is no block");
        assert!(goes(&read((1 << 30) - 4096, one(4096))));
        assert!(!goes(&read((1 << 30) - 4096, one(8192))), "beyond the end");
        assert!(!goes(&read(u64::MAX - 4095, one(4096))));
        let mut long = one(128 << 10);
        long.push(pool.take(4096));
        assert!(!goes(&read(0, long)), "longer than a transfer");
        // Pieces: only the first may begin, and only the last end, within a page.
        let pieces = |parts: &[std::ops::Range<usize>]| {
            let mut buffers = Buffers::default();
            parts.iter().for_each(|part| buffers.push(whole.slice(part.clone())));
            buffers
        };
        assert!(goes(&read(0, pieces(&[512..4096, 8192..8704]))));
        assert!(!goes(&read(0, pieces(&[0..512, 4096..7680]))));
        assert!(!goes(&read(0, pieces(&[0..4096, 8704..12800]))));
        assert!(!goes(&read(0, Buffers::default())));
    }

    #[test]
    fn only_data_goes_this_way() {
        let device = DeviceId(0);
        let zeroes = Op::WriteZeroes { device, offset: 0, len: 4096, unmap: false };
        for op in [zeroes, Op::Flush { device }, Op::readable(0)] {
            assert_eq!(TERMS.command(&op), None, "{op:?}");
        }
    }

    #[test]
    fn names_of_namespaces() {
        let cases = [("nvme0n1", Some("ng0n1")), ("nvme10n12", Some("ng10n12"))];
        for (block, generic) in cases {
            assert_eq!(generic_name(block).as_deref(), generic);
        }
        for other in ["nvme0n1p1", "nvme0c0n1", "nvme0", "nvmen1", "sda", "ng0n1"] {
            assert_eq!(generic_name(other), None, "{other}");
        }
        assert!(Generic::beside(&File::open("/dev/null").unwrap()).is_none());
    }
}
