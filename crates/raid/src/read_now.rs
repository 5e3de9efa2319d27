//! Reads that drives of memory answer at once. Nothing is waited for, so that nothing changes
//! between the first look and the last byte: no lock is taken, no request is counted as under way.
//!
//! Whatever is not as usual is left to `read.rs`, which has the rules: what is refused here has
//! changed nothing.

use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::range_lock::Mode;
use smallvec::SmallVec;

use crate::array::Array;
use crate::layout::Piece;
use crate::read_plan;
use crate::write_plan::each;

impl Array {
    /// Fills `into` from `offset`, if that is one piece, as it was written, and there at once.
    /// False: it has to be waited for.
    pub(crate) fn read_now(&self, offset: u64, into: &Buffers) -> bool {
        let len = into.len() as u64;
        let is_usual = self.integrity.is_none() && self.settings().hedge_percent() == 0;
        if !is_usual || !self.is_open() || !self.contains(offset, len) {
            return false;
        }
        let Some(piece) = self.one_piece(offset, len) else { return false };
        let done = self.is_in_place(&piece)
            && match self.one_that_has(&piece) {
                Some((_, drive, at)) => drive.read_now(at, into),
                None => self.work_out_now(&piece, into),
            };
        if done {
            self.count_read(self.reactor.turn_time(), len);
        }
        done
    }

    /// The same of a piece whose member is away.
    fn work_out_now(&self, piece: &Piece, into: &Buffers) -> bool {
        let Piece { stripe, chunk, ref rows, .. } = *piece;
        let (layout, usable) = (self.layout_of(stripe), self.members.held(stripe));
        if layout.parity == 0
            || usable & 1 << chunk != 0
            || usable.count_ones() < layout.data.into()
            || !self.agrees(stripe)
            || !self.may_lock_now(stripe, rows, Mode::Shared)
        {
            return false;
        }
        let mut have: SmallVec<[(u8, Buffer); 8]> = SmallVec::new();
        for position in each(read_plan::sources(&layout, stripe, usable, 0)) {
            let Some((drive, base)) = self.members.at(stripe, position) else { return false };
            let at = base + self.layout().member_offset(stripe, rows.start);
            let Some(bytes) = drive.lend(at, into.len()) else { return false };
            have.push((position, bytes));
        }
        let Ok(worked_out) = self.work_out(stripe, 1 << chunk, &have) else { return false };
        let [(_, bytes)] = worked_out.as_slice() else { return false };
        into.copy_from(&bytes.clone().into());
        self.count(|counters| counters.reconstructed += 1);
        true
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is there at once is what was written, also where a member is away; and whoever
    //! has to wait, waits.
    //! Method: an array on drives of memory, one of which is pulled; a read of each block after
    //! each reason to wait.
    #![allow(clippy::unwrap_used, clippy::cast_possible_truncation, reason = "a test")]

    use std::rc::Rc;

    use ashlar_drive::drive::{Drive, Limits};
    use ashlar_format::array_superblock::{Level, Policy};
    use ashlar_format::units::MemberIndex;
    use ashlar_reactor::executor::{Order, Reactor};
    use ashlar_reactor::op::Device;
    use ashlar_reactor::uring::UringBackend;

    use super::*;
    use crate::layout::Shape;
    use crate::settings::SettingsChange;
    use crate::start::ArraySpec;

    const BLOCK: u64 = 4096;
    const CHUNK: u64 = 16 << 10;
    const MEMBERS: u8 = 4;
    const BYTES: u64 = CHUNK * 3;

    async fn array(reactor: &Reactor) -> Rc<Array> {
        let bytes = 24 << 20;
        let limits = Limits { bytes, sector_bytes: 512, zeroes_cheaply: true };
        let drive = |_| Drive::new(reactor, Device::Ram { bytes }, limits, "ram");
        let spec = ArraySpec {
            uuid: [9; 16],
            name: "test".into(),
            level: Level::Raid5,
            chunk_bytes: CHUNK as u32,
            shape: Shape::default(),
            policy: Some(Policy::Bitmap),
            integrity: false,
            settings: SettingsChange::default(),
            host: None,
        };
        let drives = (0..MEMBERS).map(|index| ([index; 16], drive(index))).collect();
        Array::create(reactor, &spec, drives).await.unwrap()
    }

    /// The blocks of the first stripe that are read at once; all others are untouched.
    async fn read_at_once(reactor: &Reactor, array: &Array) -> Vec<u64> {
        let mut read = Vec::new();
        for block in 0..BYTES / BLOCK {
            reactor.yield_now().await;
            let mut into = reactor.buffer(BLOCK as usize);
            into.bytes_mut().fill(0xff);
            let there = array.read_now(block * BLOCK, &into.clone().into());
            let expected = if there { block as u8 } else { 0xff };
            assert!(into.bytes().iter().all(|byte| *byte == expected), "{block}: {there}");
            read.extend(there.then_some(block));
        }
        read
    }

    #[test]
    fn what_is_there_at_once_is_what_was_written() {
        let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
        let inner = reactor.clone();
        let test = async move {
            let reactor = inner;
            let array = array(&reactor).await;
            let all: Vec<u64> = (0..BYTES / BLOCK).collect();
            assert!(read_at_once(&reactor, &array).await.is_empty(), "nothing was written");
            for block in &all {
                let mut from = reactor.buffer(BLOCK as usize);
                from.bytes_mut().fill(*block as u8);
                array.write(block * BLOCK, from.into()).await.unwrap();
            }
            assert_eq!(read_at_once(&reactor, &array).await, all);
            let stripe = array.stripe_at(0);
            let away = array.layout().member_at(stripe, 1);
            array.pull_member(away).unwrap();
            assert_eq!(read_at_once(&reactor, &array).await, all);
            let reconstructed = array.status().counters.reconstructed;
            assert_eq!(reconstructed, CHUNK / BLOCK);
            // What is worked out needs a stripe that agrees, and that nobody is changing.
            let held: Vec<u64> =
                all.iter().copied().filter(|block| block * BLOCK / CHUNK != 1).collect();
            let rows = array.lock_rows(stripe, 0..4096, Mode::Exclusive).await;
            let free: Vec<u64> = all.iter().copied().filter(|block| *block != 4).collect();
            assert_eq!(read_at_once(&reactor, &array).await, free);
            drop(rows);
            array.unsynced.insert(stripe);
            assert_eq!(read_at_once(&reactor, &array).await, held);
            array.unsynced.remove(stripe);
            assert_eq!(read_at_once(&reactor, &array).await, all);
            let another = (0..MEMBERS.into()).map(MemberIndex::new).find(|index| *index != away);
            array.pull_member(another.unwrap()).unwrap();
            let left = read_at_once(&reactor, &array).await;
            assert!(left.len() < held.len() && left.iter().all(|block| held.contains(block)));
        };
        assert_eq!(reactor.block_on(test), Some(()));
        reactor.abandon();
    }
}
