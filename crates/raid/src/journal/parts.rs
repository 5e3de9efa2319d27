//! What a batch is on each member: all of it, or a share.
//!
//! Much payload is divided as a stripe is, one share for each position of a group: so it is written
//! (k + m) / k times instead of m + 1 times, and takes less of the ring, and as many members may be
//! lost. A share of little payload would cost more than it saves.

use ashlar_drive::error::DriveError;
use ashlar_format::journal_batch::{self, BLOCK_BYTES, Division, JournalBatch};
use ashlar_format::record;
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use smallvec::SmallVec;
use zerocopy::{FromBytes, IntoBytes};

use super::Target;
use crate::parity::Kernels;

/// A batch, ready to be written.
pub(crate) struct Parts {
    reactor: Reactor,
    batch: Box<JournalBatch>,
    /// What follows the batch on each member, in whole blocks, and its checksum. Undivided: one.
    parts: Vec<(Buffers, u32)>,
}

impl Parts {
    /// `batch` says how the payload is divided.
    pub(crate) fn new(
        reactor: &Reactor,
        kernels: Kernels,
        batch: Box<JournalBatch>,
        payload: &Buffers,
    ) -> Parts {
        let parts = match batch.division() {
            None => vec![whole_blocks(reactor, payload)],
            Some(division) => divide(reactor, kernels, payload, division),
        };
        let len = batch.bytes_that_follow() as usize;
        let parts = parts.into_iter().map(|part| {
            let checksum = checksum(&part.slice(0..len));
            (part, checksum)
        });
        Parts { reactor: reactor.clone(), batch, parts: parts.collect() }
    }

    /// Bytes of the ring that it takes on each member.
    pub(crate) fn ring_bytes(&self) -> u64 {
        journal_batch::ring_bytes(self.batch.payload_bytes.get(), self.batch.division())
    }

    /// Writes what `target` should have of it, at `at` of its ring.
    pub(crate) async fn write(
        &self,
        target: &Target,
        at: u64,
        sequence: u64,
    ) -> Result<(), DriveError> {
        let share = if self.batch.division().is_some() { target.share } else { 0 };
        let (part, checksum) = &self.parts[usize::from(share)];
        let home = target.ring + at;
        let mut header = self.reactor.buffer(size_of::<JournalBatch>());
        header.copy_from_slice(self.batch.as_bytes());
        let batch = JournalBatch::mut_from_bytes(header.bytes_mut());
        let batch = batch.expect("a buffer of its size");
        batch.share = share;
        batch.payload_checksum = (*checksum).into();
        record::seal(batch, target.drive_uuid, home, sequence);
        let mut all = Buffers::from(header);
        all.append(part);
        target.drive.write(home, all).await
    }
}

fn checksum(bytes: &Buffers) -> u32 {
    let mut digest = record::PayloadDigest::default();
    bytes.pieces().iter().for_each(|piece| digest.update(piece.bytes()));
    digest.finish()
}

/// The payload with zeroes up to the end of its last block.
fn whole_blocks(reactor: &Reactor, payload: &Buffers) -> Buffers {
    filled_up(reactor, payload, payload.len().next_multiple_of(BLOCK_BYTES as usize))
}

/// The payload in one piece of `len` bytes, zeroes at its end.
fn gather(reactor: &Reactor, payload: &Buffers, len: usize) -> Buffer {
    let whole = reactor.buffer(len);
    whole.slice(payload.len()..len).fill_zero();
    Buffers::from(whole.slice(0..payload.len())).copy_from(payload);
    whole
}

fn divide(
    reactor: &Reactor,
    kernels: Kernels,
    payload: &Buffers,
    division: Division,
) -> Vec<Buffers> {
    let payload_len = u32::try_from(payload.len()).expect("asserted to be small");
    let len = division.share_bytes(payload_len) as usize;
    let all = filled_up(reactor, payload, len * usize::from(division.data));
    let shares = (0..usize::from(division.data)).map(|i| all.slice(i * len..(i + 1) * len));
    let mut shares: Vec<Buffers> = shares.collect();
    let parity = parity_of(reactor, kernels, &shares, division.parity, len);
    shares.extend(parity.into_iter().map(Buffers::from));
    shares
}

/// Drives take whole sectors from each piece of memory: other pieces are put together.
fn is_of_blocks(payload: &Buffers) -> bool {
    payload.pieces().iter().all(|piece| piece.len().is_multiple_of(BLOCK_BYTES as usize))
}

/// The payload and zeroes, `len` bytes in all, in pieces of whole blocks.
fn filled_up(reactor: &Reactor, payload: &Buffers, len: usize) -> Buffers {
    if !is_of_blocks(payload) {
        return gather(reactor, payload, len).into();
    }
    let mut all = payload.clone();
    if payload.len() < len {
        let zeroes = reactor.buffer(len - payload.len());
        zeroes.fill_zero();
        all.push(zeroes);
    }
    all
}

/// Of shares of `len` bytes, each in pieces.
fn parity_of(
    reactor: &Reactor,
    kernels: Kernels,
    shares: &[Buffers],
    count: u8,
    len: usize,
) -> Vec<Buffer> {
    let mut parity: Vec<Buffer> = (0..count).map(|_| reactor.buffer(len)).collect();
    let mut outputs: SmallVec<[&mut [u8]; 8]> = parity.iter_mut().map(Buffer::bytes_mut).collect();
    let mut pieces: SmallVec<[_; 8]> = shares.iter().map(|its| its.pieces().iter()).collect();
    let mut left: SmallVec<[&[u8]; 8]> = shares.iter().map(|_| &[][..]).collect();
    let mut at = 0;
    while at < len {
        for (left, pieces) in left.iter_mut().zip(&mut pieces) {
            if left.is_empty() {
                *left = pieces.next().expect("all are of one length").bytes();
            }
        }
        // So far each of them is in one piece.
        let run = left.iter().map(|left| left.len()).min().expect("there are shares");
        let inputs = left.iter_mut().map(|left| left.split_off(..run).expect("not longer"));
        let inputs: SmallVec<[&[u8]; 8]> = inputs.collect();
        let parts = outputs.iter_mut().map(|output| &mut output[at..at + run]);
        kernels.encode(&inputs, &mut parts.collect::<SmallVec<[&mut [u8]; 8]>>());
        at += run;
    }
    drop(outputs);
    parity
}

/// The payload of which these shares are; `None`: they are too few.
pub(crate) fn unite(
    reactor: &Reactor,
    kernels: Kernels,
    batch: &JournalBatch,
    division: Division,
    shares: &[(u8, Buffer)],
) -> Option<Buffer> {
    let (data, len) = (usize::from(division.data), batch.bytes_that_follow() as usize);
    let present: SmallVec<[(usize, &[u8]); 64]> =
        shares.iter().map(|(share, bytes)| (usize::from(*share), bytes.bytes())).collect();
    let mut whole = reactor.buffer(data * len);
    let mut missing: SmallVec<[(usize, &mut [u8]); 8]> = SmallVec::new();
    for (share, into) in whole.bytes_mut().chunks_mut(len).enumerate() {
        match present.iter().find(|(its, _)| *its == share) {
            Some((_, bytes)) => into.copy_from_slice(bytes),
            None => missing.push((share, into)),
        }
    }
    kernels.reconstruct(data, division.parity.into(), &present, &mut missing).ok()?;
    drop(missing);
    Some(whole.slice(0..batch.payload_bytes.get() as usize))
}

#[cfg(test)]
mod tests {
    //! Goal: whichever members are lost, what is left of a divided batch gives its payload back.
    //! Method: all sets of shares of small divisions; as many as there are of data, and one less.

    use ashlar_reactor::executor::Order;
    use ashlar_reactor::virtual_time::VirtualBackend;

    use super::*;

    #[test]
    fn any_shares_give_the_payload_back() {
        let reactor = Reactor::new(Box::<VirtualBackend>::default(), Order::Fifo);
        let kernels = Kernels::detect();
        // In pieces of whole blocks, and not; that end with a share, and not.
        for (data, parity, len, piece_len) in [
            (2, 1, 9000, 5000),
            (4, 2, 65536, 5000),
            (3, 3, 512, 512),
            (5, 1, 20480, 4096),
            (4, 1, 131_072, 4096),
            (3, 2, 45056, 8192),
            (4, 1, 28672, 16384),
        ] {
            let division = Division { data, parity };
            let mut batch = JournalBatch::blank();
            batch.payload_bytes = len.into();
            batch.set_division(Some(division));
            let bytes: Vec<u8> = (0..len).map(|at| (at % 251) as u8).collect();
            let mut payload = Buffers::default();
            for piece in bytes.chunks(piece_len) {
                let buffer = reactor.buffer(piece.len());
                buffer.copy_from_slice(piece);
                payload.push(buffer);
            }
            let shares = divide(&reactor, kernels, &payload, division);
            let whole = |share: &Buffers| gather(&reactor, share, share.len());
            assert_eq!(shares.len(), usize::from(division.shares()));
            for kept in 0u32..1 << shares.len() {
                let kept = (0..division.shares()).filter(|share| kept & 1 << share != 0);
                let kept: Vec<(u8, Buffer)> =
                    kept.map(|share| (share, whole(&shares[usize::from(share)]))).collect();
                let united = unite(&reactor, kernels, &batch, division, &kept);
                let enough = kept.len() >= usize::from(data);
                assert_eq!(united.as_ref().map(Buffer::bytes), enough.then_some(&bytes[..]));
            }
        }
    }
}
