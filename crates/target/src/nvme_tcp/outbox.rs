//! What is to be sent to a host: headers that are written here and data that lies elsewhere, in
//! one list of pieces, so that the kernel is called once for many answers.

use std::ops::Range;

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;

/// Bytes of memory for headers that is taken at a time.
const HEADS_BYTES: usize = 4096;

/// Headers are written one behind the other; those with nothing between them are one piece.
pub(crate) struct Outbox {
    reactor: Reactor,
    heads: Buffer,
    /// What of `heads` is not a piece yet.
    run: Range<usize>,
    pieces: Buffers,
    /// Of data, which is somebody's until it was sent.
    data_bytes: usize,
}

/// What is sent together.
pub(crate) struct Batch {
    pub(crate) bytes: Buffers,
    pub(crate) data_bytes: usize,
}

impl Outbox {
    pub(crate) fn new(reactor: &Reactor) -> Outbox {
        Outbox {
            reactor: reactor.clone(),
            heads: reactor.buffer(HEADS_BYTES),
            run: 0..0,
            pieces: Buffers::default(),
            data_bytes: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.run.is_empty() && self.pieces.is_empty()
    }

    /// Has `write` fill `len` bytes that come next.
    pub(crate) fn push_head(&mut self, len: usize, write: impl FnOnce(&mut [u8])) {
        assert!(len <= HEADS_BYTES, "a header of {len} bytes");
        if self.run.end + len > HEADS_BYTES {
            self.end_run();
            // The kernel may still read the old ones.
            self.heads = self.reactor.buffer(HEADS_BYTES);
            self.run = 0..0;
        }
        let end = self.run.end + len;
        write(self.heads.slice(self.run.end..end).bytes_mut());
        self.run.end = end;
    }

    /// Data that comes next; nobody changes it before it was sent.
    pub(crate) fn push_data(&mut self, data: &Buffers) {
        self.end_run();
        self.data_bytes += data.len();
        self.pieces.append(data);
    }

    fn end_run(&mut self) {
        self.pieces.push(self.heads.slice(self.run.clone()));
        self.run.start = self.run.end;
    }

    /// All that there is; nothing is left.
    pub(crate) fn take(&mut self) -> Batch {
        self.end_run();
        let data_bytes = std::mem::take(&mut self.data_bytes);
        Batch { bytes: std::mem::take(&mut self.pieces), data_bytes }
    }
}
