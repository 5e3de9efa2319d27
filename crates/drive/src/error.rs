//! What can be wrong with an operation on a drive, in the words the layers above decide by.

use ashlar_reactor::op::Errno;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DriveError {
    /// These blocks cannot be read; others may.
    #[error("the drive cannot read these blocks")]
    Media,
    /// The drive does not answer any more, or was pulled.
    #[error("the drive is gone")]
    Gone,
    /// A file-backed drive whose file system is full. The drive itself is well.
    #[error("no space left under the drive")]
    NoSpace,
    /// The memory to read to or write from is gone: not the drive's fault.
    #[error("the memory of the request is gone")]
    Memory,
    /// The drive does not know this operation.
    #[error("the drive cannot do this")]
    Unsupported,
    /// Anything else, after retries.
    #[error("{0}")]
    Io(Errno),
}

impl DriveError {
    /// Says nothing about how well the drive is, and trying again would not help.
    pub fn is_innocent(self) -> bool {
        match self {
            DriveError::NoSpace | DriveError::Memory | DriveError::Unsupported => true,
            DriveError::Media | DriveError::Gone | DriveError::Io(_) => false,
        }
    }

    /// Whether a drive that fails a write so may show a part of it afterwards. One that is gone
    /// shows nothing before it is opened anew.
    pub(crate) fn leaves_a_part(self) -> bool {
        match self {
            DriveError::Media | DriveError::NoSpace | DriveError::Memory | DriveError::Io(_) => {
                true
            }
            DriveError::Gone | DriveError::Unsupported => false,
        }
    }
}

impl From<Errno> for DriveError {
    fn from(errno: Errno) -> DriveError {
        match errno.0 {
            libc::EIO | libc::EILSEQ | libc::ENODATA | libc::EREMOTEIO => DriveError::Media,
            libc::ENODEV | libc::ENXIO | libc::ESHUTDOWN | libc::EBADF => DriveError::Gone,
            libc::ENOSPC | libc::EDQUOT => DriveError::NoSpace,
            libc::EFAULT => DriveError::Memory,
            libc::EOPNOTSUPP => DriveError::Unsupported,
            _ => DriveError::Io(errno),
        }
    }
}
