//! What is to be sent to a host: headers that are written here and data that lies elsewhere, in
//! one list of pieces, so that the kernel is called once for many answers.

use std::ops::Range;

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::nvme::command::Completion;
use ashlar_reactor::nvme::pdu::{
    CapsuleResp, DIGEST_BYTES, Data, DataDigest, Digests, Fault, Kind, R2t, Shape, TermReq,
};
use smallvec::{SmallVec, smallvec};
use zerocopy::{Immutable, IntoBytes};

/// Bytes of memory for headers that is taken at a time.
const HEADS_BYTES: usize = 4096;
/// The kernel takes no more pieces at a time (UIO_MAXIOV).
const SEND_PIECES_MAX: usize = 1024;
/// With so many bytes it is enough for one time: a slow host is seen to go on.
const SEND_BYTES_MAX: usize = 1 << 20;
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
    /// Of headers, and how many there are if a host has a whole queue of commands under way.
    head_bytes: usize,
    head_bytes_max: usize,
}

/// What is sent together.
pub(crate) struct Batch {
    pub(crate) bytes: Buffers,
    pub(crate) data_bytes: usize,
}

impl Batch {
    /// As they are sent, one after the other.
    pub(crate) fn parts(self) -> SmallVec<[Buffers; 1]> {
        let is_full =
            |part: &Buffers| part.pieces().len() == SEND_PIECES_MAX || part.len() >= SEND_BYTES_MAX;
        if self.bytes.pieces().len() <= SEND_PIECES_MAX && !is_full(&self.bytes) {
            return smallvec![self.bytes];
        }
        let (mut parts, mut part) = (SmallVec::new(), Buffers::default());
        for piece in self.bytes.pieces() {
            if is_full(&part) {
                parts.push(std::mem::take(&mut part));
            }
            part.push(piece.clone());
        }
        parts.push(part);
        parts
    }
}

impl Outbox {
    /// Of a queue with so many entries.
    pub(crate) fn new(reactor: &Reactor, digests: Digests, alignment: u8, entries: u16) -> Outbox {
        // For each command one header before, of data or for data, and its completion.
        let first = Shape::new(Kind::C2hData, 1, alignment, digests).data_at + DIGEST_BYTES;
        let second = Shape::new(Kind::CapsuleResp, 0, 0, digests).data_at;
        Outbox {
            reactor: reactor.clone(),
            digests,
            alignment,
            heads: reactor.buffer(HEADS_BYTES),
            run: 0..0,
            pieces: Buffers::default(),
            data_bytes: 0,
            head_bytes: 0,
            head_bytes_max: usize::from(entries) * (first + second),
        }
    }

    /// Whether more waits than a host can have asked for that fetches its answers.
    pub(crate) fn is_full(&self) -> bool {
        self.head_bytes > self.head_bytes_max
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.run.is_empty() && self.pieces.is_empty()
    }

    /// Data of a command, whole. Nobody changes it before it was sent.
    pub(crate) fn put_data(&mut self, id: u16, data: &Buffers, flags: u8) {
        let shape = Shape::new(Kind::C2hData, data.len(), self.alignment, self.digests);
        self.push_header(&shape, &Data::whole(&shape, flags, id));
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
        self.push_header(&shape, &R2t::whole(&shape, id, tag, bytes));
    }

    /// Why the connection ends; `about` begins with the header at fault.
    pub(crate) fn put_fault(&mut self, fault: Fault, about: &[u8]) {
        let quote = about.get(..about.len().min(QUOTE_BYTES)).unwrap_or_default();
        let shape = Shape::quoting(Kind::C2hTermReq, quote.len());
        self.push_header(&shape, &TermReq::new(&shape, fault));
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
        self.head_bytes += len;
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
        self.head_bytes = 0;
        let data_bytes = std::mem::take(&mut self.data_bytes);
        Batch { bytes: std::mem::take(&mut self.pieces), data_bytes }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: all that was put in comes out once and in order, in parts that the kernel takes.
    //! Method: one batch of few and large, of many and small pieces.

    use ashlar_reactor::executor::Order;
    use ashlar_reactor::nvme::command::Status;
    use ashlar_reactor::nvme::pdu::LAST;
    use ashlar_reactor::virtual_time::VirtualBackend;

    use super::*;

    fn completion(id: u16) -> Completion {
        Completion {
            result: 0,
            result_high: 0,
            submission_head: 0,
            queue: 0,
            id,
            phase: false,
            status: Status::SUCCESS,
        }
    }

    fn bytes_of(buffers: &Buffers) -> Vec<u8> {
        buffers.pieces().iter().flat_map(|piece| piece.bytes().to_vec()).collect()
    }

    #[test]
    fn what_is_sent_is_in_parts_that_the_kernel_takes() {
        let reactor = Reactor::new(Box::new(VirtualBackend::default()), Order::Fifo);
        let mut outbox = Outbox::new(&reactor, Digests::default(), 0, 128);
        for (count, bytes, parts) in [(3u16, 4096, 1), (3, 1 << 20, 3), (700, 512, 2), (700, 0, 1)]
        {
            for id in 0..count {
                if bytes > 0 {
                    let data = reactor.buffer(bytes);
                    data.copy_from_slice(&vec![id.to_le_bytes()[0]; bytes]);
                    outbox.put_data(id, &data.into(), LAST);
                }
                outbox.put_completion(completion(id));
            }
            let batch = outbox.take();
            assert_eq!(batch.data_bytes, usize::from(count) * bytes);
            let all = bytes_of(&batch.bytes);
            let found = batch.parts();
            assert!(found.len() >= parts, "{} of {count}", found.len());
            assert!(found.iter().all(|its| its.pieces().len() <= SEND_PIECES_MAX));
            assert!(found.iter().all(|its| (1..2 * SEND_BYTES_MAX).contains(&its.len())));
            assert!(found.iter().flat_map(bytes_of).collect::<Vec<u8>>() == all);
            assert!(outbox.is_empty() && !outbox.is_full());
        }
    }

    #[test]
    fn it_is_full_with_more_than_a_queue_of_commands() {
        let reactor = Reactor::new(Box::new(VirtualBackend::default()), Order::Fifo);
        for (digests, alignment) in [(0, 0), (3, 0), (3, 31)] {
            let digests = Digests::from_byte(digests);
            let mut outbox = Outbox::new(&reactor, digests, alignment, 32);
            let data: Buffers = reactor.buffer(512).into();
            for id in 0..32 {
                outbox.put_data(id, &data, LAST);
                outbox.put_completion(completion(id));
            }
            assert!(!outbox.is_full());
            (0..32).for_each(|id| outbox.put_completion(completion(id)));
            assert!(outbox.is_full());
            outbox.take();
            assert!(!outbox.is_full());
        }
    }
}
