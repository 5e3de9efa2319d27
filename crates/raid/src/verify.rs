//! Blocks that are not what their member was given: who lies, what is true, and mending it.
//!
//! Whatever is read of a member is compared with its checksums. A read without a lock may come
//! between a store and its checksum: then it is done again under the lock of its rows, and only
//! what does not fit there counts. For each block:
//!
//! | the checksum fits | of what was read | of what the others say | who is wrong |
//! |---|---|---|---|
//! | | yes | | nobody |
//! | | no | yes | the drive: the block is written again |
//! | | no | no, but both are equal | the checksum: it is set again |
//! | | there is none | not what was read | the drive, which has lost both: the same as above |
//! | | no | no, and they differ | nobody knows: the read is an error |
//!
//! "The others" are members whose own blocks fit their checksums. Where the block cannot be read
//! at all, and its checksum does not fit what they say: the checksum is wrong if there are more of
//! them than it takes to say anything, and all agree; else nobody knows.

use std::ops::Range;

use ashlar_format::block_sums::{BLOCK_BYTES, block_sum};
use ashlar_format::scrub_report::Flaw;
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_reactor::buffer::{Buffer, Buffers};
use smallvec::SmallVec;

use crate::array::Array;
use crate::error::ArrayError;
use crate::write_plan::each;

/// Rows of a position that its member did not return as they should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Flawed {
    pub(crate) position: u8,
    pub(crate) rows: Range<u32>,
    pub(crate) flaw: Flaw,
    pub(crate) is_mended: bool,
}

/// What is wrong with a block that does not fit its checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    WrongBlock,
    WrongChecksum,
    Unknown,
}

fn judge(wanted: Option<u32>, read: &[u8], others: &[u8]) -> Verdict {
    if read == others {
        return Verdict::WrongChecksum;
    }
    match wanted {
        None => Verdict::WrongBlock,
        Some(wanted) if block_sum(others) == wanted => Verdict::WrongBlock,
        Some(_) => Verdict::Unknown,
    }
}

impl Array {
    /// These bytes are being stored at a position, from `row` on.
    pub(crate) fn set_sums(&self, stripe: StripeIndex, position: u8, row: u32, bytes: &Buffers) {
        if let Some(integrity) = &self.integrity {
            let at = self.layout().member_offset(stripe, row);
            integrity.set(self.layout_of(stripe).member_at(stripe, position), at, bytes);
        }
    }

    /// A member's part of these stripes is zeroes now.
    pub(crate) fn set_zero_sums(&self, member: MemberIndex, stripes: &Range<u64>) {
        if let Some(integrity) = &self.integrity {
            integrity.set_zero(member, self.layout().member_range(stripes.clone(), member));
        }
    }

    /// Makes checksums durable with the next flush of the members.
    pub(crate) async fn write_sums(&self) -> Result<(), ArrayError> {
        match &self.integrity {
            Some(integrity) => integrity.write_back().await,
            None => Ok(()),
        }
    }

    /// Whether bytes that were read from a position, from `row` on, are what it was given.
    pub(crate) async fn fits(
        &self,
        stripe: StripeIndex,
        position: u8,
        row: u32,
        bytes: &Buffers,
    ) -> bool {
        let Some(integrity) = &self.integrity else { return true };
        let at = self.layout().member_offset(stripe, row);
        integrity.fits(self.layout_of(stripe).member_at(stripe, position), at, bytes).await
    }

    /// Puts right what was read from a position, there and in `read`. The caller holds the rows.
    pub(crate) async fn make_true(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
        read: &Buffer,
    ) -> Result<(), ArrayError> {
        self.make_true_and_tell(stripe, position, rows, read, &mut Vec::new()).await
    }

    /// The same. Also what it met, up to the first block that cannot be put right.
    pub(crate) async fn make_true_and_tell(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
        read: &Buffer,
        met: &mut Vec<Flawed>,
    ) -> Result<(), ArrayError> {
        if self.integrity.is_none() {
            return Ok(());
        }
        if self.fits(stripe, position, rows.start, &read.clone().into()).await {
            return Ok(());
        }
        for block in blocks(rows) {
            let bytes = read.slice(within(rows, &block));
            if !self.fits(stripe, position, block.start, &bytes.clone().into()).await {
                let mended = self.mend_block(stripe, position, &block, &bytes).await;
                // Of a drive that is gone by now nobody knows.
                let is_lost = mended.is_err() && self.members.at(stripe, position).is_some();
                let flaw = mended.unwrap_or(is_lost.then_some((Flaw::Block, false)));
                met.extend(flaw.map(|(flaw, is_mended)| Flawed {
                    position,
                    rows: block,
                    flaw,
                    is_mended,
                }));
                mended?;
            }
        }
        Ok(())
    }

    /// What was wrong, and whether it is right on the drive now; `None`: nothing, as far as anyone
    /// knows.
    async fn mend_block(
        &self,
        stripe: StripeIndex,
        position: u8,
        block: &Range<u32>,
        read: &Buffer,
    ) -> Result<Option<(Flaw, bool)>, ArrayError> {
        let Some(integrity) = &self.integrity else { return Ok(None) };
        let others = self.others_have(stripe, position, block).await?;
        let member = self.layout_of(stripe).member_at(stripe, position);
        let at = self.layout().member_offset(stripe, block.start);
        let wanted = integrity.wanted(member, at).await;
        let Some((drive, base)) = self.members.at(stripe, position) else {
            // It is gone meanwhile; what the others have counts.
            read.copy_from(&others);
            return Ok(None);
        };
        if wanted == Some(block_sum(read.bytes())) {
            // Nobody knew its checksum a moment ago: its drive was away.
            return Ok(None);
        }
        let verdict = judge(wanted, read.bytes(), others.bytes());
        let flaw = match verdict {
            Verdict::Unknown => return Err(ArrayError::Lost),
            Verdict::WrongChecksum if wanted.is_none() && !integrity.is_damaged(member, at) => None,
            Verdict::WrongChecksum => {
                drive.note_wrong_checksum();
                Some((Flaw::Checksum, true))
            }
            Verdict::WrongBlock => {
                drive.note_wrong_block();
                let is_mended = drive.write(base + at, others.clone().into()).await.is_ok();
                self.count(|counters| counters.repaired += u64::from(is_mended));
                Some((Flaw::Block, is_mended))
            }
        };
        if verdict == Verdict::WrongChecksum || wanted.is_none() {
            integrity.set(member, at, &others.clone().into());
        }
        read.copy_from(&others);
        Ok(flaw)
    }

    /// Whether what was worked out for a position, which cannot be read, is what it was given.
    pub(crate) async fn may_be(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
        bytes: &Buffer,
    ) -> bool {
        let Some(integrity) = &self.integrity else { return true };
        let member = self.layout_of(stripe).member_at(stripe, position);
        for block in blocks(rows) {
            let at = self.layout().member_offset(stripe, block.start);
            let sum = block_sum(bytes.slice(within(rows, &block)).bytes());
            if integrity.wanted(member, at).await.is_some_and(|wanted| wanted != sum) {
                return false;
            }
        }
        true
    }

    /// Whether it is the checksum that is wrong, and not what was worked out for a position that
    /// cannot be read: more of the others than that takes fit theirs, and all of them agree.
    pub(crate) async fn outvote_checksum(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
        bytes: &Buffer,
    ) -> bool {
        let mut have: SmallVec<[(u8, Buffer); 8]> = SmallVec::new();
        for other in each(self.members.held(stripe) & !(1 << position)) {
            if let Some(Ok(buffer)) = self.read_position(stripe, other, rows).await {
                have.push((other, buffer));
            }
        }
        let Some((some, rest)) = have.split_at_checked(self.layout_of(stripe).data.into()) else {
            return false;
        };
        let wanted = rest.iter().fold(1 << position, |bits, (other, _)| bits | 1 << other);
        let Ok(right) = self.work_out(stripe, wanted, some) else { return false };
        let known = |wanted: u8| rest.iter().find(|(other, _)| *other == wanted);
        let agrees = |(position, right): &(u8, Buffer)| {
            right.bytes() == known(*position).map_or(bytes, |(_, its)| its).bytes()
        };
        let outvoted = !rest.is_empty() && right.iter().all(agrees);
        if outvoted && let Some((drive, _)) = self.members.at(stripe, position) {
            drive.note_wrong_checksum();
        }
        outvoted
    }

    /// Rows of a position as the other members have them.
    async fn others_have(
        &self,
        stripe: StripeIndex,
        position: u8,
        rows: &Range<u32>,
    ) -> Result<Buffer, ArrayError> {
        if self.layout().parity > 0 {
            return self.reconstruct(stripe, position, rows, 0).await;
        }
        let chunk = position / self.layout().copies;
        for other in self.layout().data_positions(chunk).filter(|other| *other != position) {
            if let Some(Ok(buffer)) = self.read_position(stripe, other, rows).await {
                return Ok(buffer);
            }
        }
        Err(ArrayError::Lost)
    }
}

/// The blocks of these rows.
pub(crate) fn blocks(rows: &Range<u32>) -> impl Iterator<Item = Range<u32>> {
    let end = rows.end;
    let starts = rows.clone().step_by(BLOCK_BYTES as usize);
    starts.map(move |start| start..end.min(start + BLOCK_BYTES))
}

pub(crate) fn overlap(a: &Range<u32>, b: &Range<u32>) -> bool {
    a.start < b.end && b.start < a.end
}

/// The rows, cut wherever one of these ranges begins or ends inside them.
pub(crate) fn cut(rows: &Range<u32>, at: impl Iterator<Item = Range<u32>>) -> Vec<Range<u32>> {
    let mut cuts = vec![rows.start, rows.end];
    cuts.extend(at.flat_map(|its| [its.start, its.end]).filter(|row| rows.contains(row)));
    cuts.sort_unstable();
    cuts.dedup();
    cuts.windows(2).map(|pair| pair[0]..pair[1]).collect()
}

/// Where a part is in the bytes of these rows.
pub(crate) fn within(rows: &Range<u32>, part: &Range<u32>) -> Range<usize> {
    (part.start - rows.start) as usize..(part.end - rows.start) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_verdict() {
        let (a, b) = ([1; 4096], [2; 4096]);
        let sum = |block: &[u8]| Some(block_sum(block));
        let table = [
            (sum(&b), &a, &b, Verdict::WrongBlock),
            (sum(&b), &a, &a, Verdict::WrongChecksum),
            (None, &a, &a, Verdict::WrongChecksum),
            (None, &a, &b, Verdict::WrongBlock),
            (sum(&[3; 4096]), &a, &b, Verdict::Unknown),
        ];
        for (wanted, read, others, verdict) in table {
            assert_eq!(judge(wanted, read, others), verdict);
        }
    }
}
