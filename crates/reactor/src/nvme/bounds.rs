//! What may be asked of a namespace: pure.

use crate::op::{Errno, Op};

/// Of a namespace that has been identified.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    pub(super) block_bytes: u32,
    pub(super) bytes: u64,
    pub(super) write_zeroes: bool,
    pub(super) volatile_cache: bool,
}

impl Bounds {
    /// Bytes that commands are to be sent for; `None`: nothing has to be done.
    pub(super) fn check(&self, op: &Op) -> Result<Option<u64>, Errno> {
        let (offset, len) = match op {
            Op::Read { offset, into: data, .. } | Op::Write { offset, from: data, .. } => {
                (*offset, data.len() as u64)
            }
            Op::WriteZeroes { offset, len, .. } => {
                // Deallocating does not do: a drive may ignore it, also in part (NVM 3.2.3).
                if !self.write_zeroes {
                    return Err(Errno(libc::EOPNOTSUPP));
                }
                (*offset, *len)
            }
            // Without a volatile cache there is nothing to flush (Base 7.1).
            Op::Flush { .. } => return Ok(self.volatile_cache.then_some(0)),
            Op::Descriptor { .. } => return Err(Errno(libc::EINVAL)),
        };
        let block = u64::from(self.block_bytes);
        if !offset.is_multiple_of(block) || !len.is_multiple_of(block) {
            return Err(Errno(libc::EINVAL));
        }
        if offset.checked_add(len).is_none_or(|end| end > self.bytes) {
            return Err(Errno(libc::ENOSPC));
        }
        Ok((len > 0).then_some(len))
    }
}
