//! A drive that does nothing, at once: what is measured over it is the cost of what is above.

use crate::op::{Errno, Op, Outcome};

pub(crate) struct Null {
    pub(crate) bytes: u64,
}

impl Null {
    pub(crate) fn run(&self, op: &Op) -> Outcome {
        match op {
            Op::Read { offset, into: buffers, .. } | Op::Write { offset, from: buffers, .. } => {
                self.check(*offset, buffers.len() as u64)
            }
            Op::WriteZeroes { offset, len, .. } => self.check(*offset, *len),
            Op::Flush { .. } | Op::Descriptor { .. } => Ok(0),
        }
    }

    pub(crate) fn check(&self, offset: u64, len: u64) -> Outcome {
        let end = offset.checked_add(len).ok_or(Errno(libc::EINVAL))?;
        if end > self.bytes { Err(Errno(libc::ENOSPC)) } else { Ok(len) }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a drive of nothing answers as one of its size would, and touches no memory.
    //! Method: both sides of its end.

    use super::*;
    use crate::buffer::BufferPool;
    use crate::op::DeviceId;

    #[test]
    fn it_has_an_end_and_moves_nothing() {
        let null = Null { bytes: 8192 };
        let mut buffer = BufferPool::new().take(4096);
        buffer.bytes_mut().fill(7);
        let device = DeviceId(0);
        for (offset, outcome) in [
            (0, Ok(4096)),
            (4096, Ok(4096)),
            (4608, Err(libc::ENOSPC)),
            (u64::MAX, Err(libc::EINVAL)),
        ] {
            let outcome = outcome.map_err(Errno);
            let into = buffer.clone().into();
            assert_eq!(null.run(&Op::Read { device, offset, into }), outcome, "{offset}");
            let from = buffer.clone().into();
            assert_eq!(null.run(&Op::Write { device, offset, from }), outcome, "{offset}");
            let zeroes = Op::WriteZeroes { device, offset, len: 4096, unmap: true };
            assert_eq!(null.run(&zeroes), outcome, "{offset}");
        }
        assert_eq!(null.run(&Op::Flush { device }), Ok(0));
        assert!(buffer.bytes().iter().all(|byte| *byte == 7));
    }
}
