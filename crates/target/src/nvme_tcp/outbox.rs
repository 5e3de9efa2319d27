//! What is to be sent to a host: headers that are written here and data that lies elsewhere, in
//! one list of pieces, so that the kernel is called once for many answers.

use std::ops::Range;

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::nvme::command::Completion;
use ashlar_reactor::nvme::pdu::{
    CapsuleResp, DIGEST_BYTES, Data, DataDigest, Digests, Fault, Kind, R2t, Shape, TermReq,
};
use zerocopy::{Immutable, IntoBytes};

/// Bytes of memory for headers that is taken at a time.
const HEADS_BYTES: usize = 4096;
/// Of a header that a host is told of when it is at fault.
const QUOTE_BYTES: usize = 72;

/// Headers are written one behind the other; those with nothing between them are one piece.
pub(crate) struct Outbox {
    reactor: Reactor,
    digests: Digests,
    /// Of data (HPDA).
    alignment: u8,
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
    pub(crate) fn new(reactor: &Reactor, digests: Digests, alignment: u8) -> Outbox {
        Outbox {
            reactor: reactor.clone(),
            digests,
            alignment,
            heads: reactor.buffer(HEADS_BYTES),
            run: 0..0,
            pieces: Buffers::default(),
            data_bytes: 0,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.run.is_empty() && self.pieces.is_empty()
    }

    /// Data of a command, whole. Nobody changes it before it was sent.
    pub(crate) fn put_data(&mut self, id: u16, data: &Buffers, flags: u8) {
        let shape = Shape::new(Kind::C2hData, data.len(), self.alignment, self.digests);
        let header = Data {
            common: shape.common(flags),
            command: id.into(),
            tag: 0.into(),
            offset: 0.into(),
            len: u32::try_from(data.len()).unwrap_or(u32::MAX).into(),
            reserved: [0; 4],
        };
        self.push_header(&shape, &header);
        self.push_data(data);
        if shape.data_digest {
            let mut digest = DataDigest::default();
            digest.update_with(data);
            let digest = digest.finish().to_le_bytes();
            self.push_head(DIGEST_BYTES, |into| into.copy_from_slice(&digest));
        }
    }

    pub(crate) fn put_completion(&mut self, completion: Completion) {
        let shape = Shape::new(Kind::CapsuleResp, 0, 0, self.digests);
        let completion = completion.to_bytes();
        self.push_header(&shape, &CapsuleResp { common: shape.common(0), completion });
    }

    /// Asks for all data of a command (R2T).
    pub(crate) fn put_request(&mut self, id: u16, tag: u16, bytes: u32) {
        let shape = Shape::new(Kind::R2t, 0, 0, self.digests);
        let request = R2t {
            common: shape.common(0),
            command: id.into(),
            tag: tag.into(),
            offset: 0.into(),
            len: bytes.into(),
            reserved: [0; 4],
        };
        self.push_header(&shape, &request);
    }

    /// Why the connection ends; `about` begins with the header at fault.
    pub(crate) fn put_fault(&mut self, fault: Fault, about: &[u8]) {
        let quote = about.get(..about.len().min(QUOTE_BYTES)).unwrap_or_default();
        let shape = Shape::quoting(Kind::C2hTermReq, quote.len());
        let term = TermReq {
            common: shape.common(0),
            reason: fault.reason().into(),
            detail: fault.detail().into(),
            reserved: [0; 10],
        };
        self.push_header(&shape, &term);
        self.push_head(quote.len(), |into| into.copy_from_slice(quote));
    }

    fn push_header(&mut self, shape: &Shape, header: &(impl IntoBytes + Immutable)) {
        self.push_head(shape.data_at, |into| shape.write_head(header, into));
    }

    /// Has `write` fill `len` bytes that come next.
    fn push_head(&mut self, len: usize, write: impl FnOnce(&mut [u8])) {
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

    /// Data that comes next.
    fn push_data(&mut self, data: &Buffers) {
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
