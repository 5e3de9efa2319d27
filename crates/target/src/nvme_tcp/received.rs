//! What has come over a connection and was not taken up: one piece of memory, used again and again.

use std::ops::Range;

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;

use crate::nvme_tcp::inbox::PDU_BYTES_MAX;

/// What is received at a time.
pub(crate) const BYTES: usize = 64 << 10;
const _: () = assert!(PDU_BYTES_MAX <= BYTES / 2);

/// What was received and not taken up.
pub(crate) struct Received {
    memory: Buffer,
    start: usize,
    end: usize,
}

impl Received {
    pub(crate) fn new(reactor: &Reactor) -> Received {
        Received { memory: reactor.buffer(BYTES), start: 0, end: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.memory.bytes().get(self.start..self.end).unwrap_or_default()
    }

    /// A part of it.
    pub(crate) fn view(&self, range: Range<usize>) -> Buffer {
        self.memory.slice(self.start + range.start..self.start + range.end)
    }

    pub(crate) fn take(&mut self, bytes: usize) {
        self.start += bytes;
        assert!(self.start <= self.end, "more than there was");
    }

    /// Where more goes.
    pub(crate) fn room(&mut self) -> Buffers {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        } else if self.start > 0 && BYTES - self.end < PDU_BYTES_MAX {
            let left = self.view(0..self.end - self.start);
            self.memory.slice(0..left.len()).copy_from(&left);
            (self.start, self.end) = (0, left.len());
        }
        self.memory.slice(self.end..BYTES).into()
    }

    pub(crate) fn came(&mut self, bytes: usize) {
        self.end += bytes;
        assert!(self.end <= BYTES, "more than there was room for");
    }
}
