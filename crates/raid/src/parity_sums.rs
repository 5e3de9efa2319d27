//! Sums of parity, and what they tell after a crash.
//!
//! Parity that has sums is stored, and durable, before anything else of its rows. So sector by
//! sector it is as its sum says, or as it was before; and where some of it is as it was, so are all
//! the data in place and all other parity. The new data is in the journal. With both, parity can be
//! made as its sum says:
//!
//! | lost | parity in place | how |
//! |---|---|---|
//! | nothing that is written | old | the difference of new and old data is added |
//! | only what is written | any | worked out from the new data and the rest |
//! | both | some new | the same, with new parity for what is lost of the rest |
//! | both | all old | the rest first, from old data and old parity; then the same |
//!
//! That is enough for any two losses (`SUMMED_PARITY_MAX`), but not for three: of one chunk that
//! is written and two of the rest, one new parity and two old ones need not tell anything. So of
//! more than two parity chunks the journal has all but the first two in full, and those are stored
//! with the data. With f of them, f + 2 losses are borne, and what has sums can be made:
//! - up to f chunks of the rest are lost: new parity in full tells them;
//! - f + 1, and one that is written: all parity is here. One that is new by its sum is enough
//!   beside that in full; if none is, all parity in place is old, and tells them;
//! - f + 1 or more, and none that is written: what is old becomes new by the difference.
//!
//! Who was away when it was stored is one of those lost; what is not in the journal for that is one
//! parity less in full, and one loss less beside it.
//!
//! Whatever is worked out must have its sum: bytes that do not belong together are found out.

use ashlar_format::journal_batch::{ParitySum, SUM_BYTES, SUM_ROWS};
use smallvec::SmallVec;

use crate::parity::Kernels;

const SECTOR: usize = SUM_ROWS as usize;

/// One sector of each position of a stripe, after a crash.
pub(crate) struct Sector<'a> {
    /// By data chunk; `None`: it was not written.
    pub(crate) new: &'a [Option<&'a [u8]>],
    /// By position; `None`: it cannot be read, or (of data) is not what was written.
    pub(crate) place: &'a [Option<&'a [u8]>],
    /// By parity chunk; `None`: it was not stored, for want of a member, or is in the journal.
    pub(crate) sums: &'a [Option<u64>],
    /// By parity chunk, those that the journal has in full. In place they are as they were, unless
    /// all that has sums is new.
    pub(crate) full: &'a [Option<&'a [u8]>],
    pub(crate) sum: &'a ParitySum,
}

/// Bytes of a position.
type Known = SmallVec<[(usize, [u8; SECTOR]); 2]>;

/// The sums of these rows of parity, one after the other, as the journal has them.
pub(crate) fn sums_of<'a>(
    sum: &'a ParitySum,
    parity: &'a [u8],
) -> impl Iterator<Item = [u8; SUM_BYTES as usize]> + 'a {
    parity.as_chunks::<SECTOR>().0.iter().map(|rows| sum.of(rows).to_le_bytes())
}

impl Sector<'_> {
    /// Whether every parity chunk with a sum is as that says.
    pub(crate) fn is_new(&self) -> bool {
        self.left(&self.new_parity()).is_empty()
    }

    /// Positions of parity chunks that have sums, with the bytes that have these sums; `None` if
    /// too much is lost.
    pub(crate) fn restore(&self, kernels: Kernels) -> Option<Known> {
        let mut known = self.new_parity();
        known.extend(self.with_difference(kernels, &self.left(&known)));
        let left = self.left(&known);
        if left.is_empty() {
            return Some(known);
        }
        let told: Known = known.iter().copied().chain(self.in_full()).collect();
        let made = self.solve_anew(kernels, &left, &told, &[]);
        let made = made.or_else(|| {
            let rest = self.rest_as_it_was(kernels, &left)?;
            self.solve_anew(kernels, &left, &told, &rest)
        })?;
        known.extend(made);
        Some(known)
    }

    fn data(&self) -> usize {
        self.new.len()
    }

    fn has_its_sum(&self, position: usize, bytes: &[u8]) -> bool {
        self.sums[position - self.data()] == Some(self.sum.of(&sector(bytes)))
    }

    fn new_parity(&self) -> Known {
        let parity = self.data()..self.place.len();
        let new = parity.filter_map(|position| Some((position, self.place[position]?)));
        let new = new.filter(|(position, bytes)| self.has_its_sum(*position, bytes));
        new.map(|(position, bytes)| (position, sector(bytes))).collect()
    }

    /// Parity that the journal has.
    fn in_full(&self) -> impl Iterator<Item = (usize, [u8; SECTOR])> {
        let parity = (self.data()..).zip(self.full).zip(self.sums);
        let full = parity.filter(|(_, sum)| sum.is_none());
        full.filter_map(|((position, bytes), _)| Some((position, sector((*bytes)?))))
    }

    /// Parity that has a sum and is not `known`.
    fn left(&self, known: &Known) -> SmallVec<[usize; 2]> {
        let all = self.sums.iter().enumerate().filter(|(_, sum)| sum.is_some());
        let all = all.map(|(index, _)| self.data() + index);
        all.filter(|position| known.iter().all(|(its, _)| its != position)).collect()
    }

    fn with_difference(&self, kernels: Kernels, old: &[usize]) -> Known {
        let (k, m) = (self.data(), self.sums.len());
        let mut made = Known::new();
        for &position in old {
            let Some(mut parity) = self.place[position].map(sector) else { continue };
            let mut all_known = true;
            for (chunk, new) in self.new.iter().enumerate() {
                match (new, self.place[chunk]) {
                    (None, _) => {}
                    (Some(new), Some(old)) => {
                        kernels.update(m, chunk, old, new, &mut [(position - k, &mut parity)]);
                    }
                    (Some(_), None) => all_known = false,
                }
            }
            if all_known && self.has_its_sum(position, &parity) {
                made.push((position, parity));
            }
        }
        made
    }

    /// `wanted` from new data, the rest of the data (in place, or as in `rest`) and new parity.
    fn solve_anew(
        &self,
        kernels: Kernels,
        wanted: &[usize],
        known: &Known,
        rest: &[(usize, [u8; SECTOR])],
    ) -> Option<Known> {
        let data = self.new.iter().enumerate();
        let data = data.filter_map(|(chunk, new)| Some((chunk, (*new).or(self.place[chunk])?)));
        let worked_out = known.iter().chain(rest).map(|(position, bytes)| (*position, &bytes[..]));
        let present: SmallVec<[(usize, &[u8]); 8]> = data.chain(worked_out).collect();
        let made = self.solve(kernels, &present, wanted)?;
        made.iter().all(|(position, bytes)| self.has_its_sum(*position, bytes)).then_some(made)
    }

    /// Data that was not written and cannot be read, from everything as it was before.
    fn rest_as_it_was(&self, kernels: Kernels, old_parity: &[usize]) -> Option<Known> {
        let full = self.in_full().map(|(position, _)| position);
        let readable = (0..self.data()).chain(old_parity.iter().copied()).chain(full);
        let present: SmallVec<[(usize, &[u8]); 8]> =
            readable.filter_map(|position| Some((position, self.place[position]?))).collect();
        let is_lost = |chunk: &usize| self.new[*chunk].is_none() && self.place[*chunk].is_none();
        let lost: SmallVec<[usize; 2]> = (0..self.data()).filter(is_lost).collect();
        self.solve(kernels, &present, &lost)
    }

    fn solve(
        &self,
        kernels: Kernels,
        present: &[(usize, &[u8])],
        wanted: &[usize],
    ) -> Option<Known> {
        let mut made: Known = wanted.iter().map(|position| (*position, [0; SECTOR])).collect();
        let mut missing: SmallVec<[(usize, &mut [u8]); 2]> =
            made.iter_mut().map(|(position, bytes)| (*position, &mut bytes[..])).collect();
        let solved = kernels.reconstruct(self.data(), self.sums.len(), present, &mut missing);
        drop(missing);
        solved.ok().map(|()| made)
    }
}

fn sector(bytes: &[u8]) -> [u8; SECTOR] {
    bytes.try_into().expect("one sector")
}

#[cfg(test)]
mod tests {
    //! Goal: parity is as its sum says after any crash with as many losses as there are parities;
    //! with more, or with bytes that do not belong together, nothing is made up.
    //! Method: every set of chunks that are written, of positions that are lost, and of parity that
    //! had been stored, of small stripes of random bytes.

    use ashlar_reactor::prng::Prng;

    use super::*;

    fn sum() -> ParitySum {
        ParitySum::of_array(&[7; 16])
    }

    fn random(prng: &mut Prng) -> [u8; SECTOR] {
        std::array::from_fn(|_| u8::try_from(prng.below(256)).expect("a byte"))
    }

    fn encode(kernels: Kernels, data: &[[u8; SECTOR]], m: usize) -> Vec<[u8; SECTOR]> {
        let mut parity = vec![[0; SECTOR]; m];
        let data: Vec<&[u8]> = data.iter().map(|bytes| &bytes[..]).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|bytes| &mut bytes[..]).collect();
        kernels.encode(&data, &mut outputs);
        parity
    }

    /// A stripe before and after a write of the chunks in `written`.
    struct Stripe {
        k: usize,
        m: usize,
        written: u32,
        old: Vec<[u8; SECTOR]>,
        new: Vec<[u8; SECTOR]>,
    }

    impl Stripe {
        fn random(k: usize, m: usize, written: u32) -> Stripe {
            let kernels = Kernels::detect();
            let mut prng = Prng::from_seed(u64::from(written));
            let mut old: Vec<_> = (0..k).map(|_| random(&mut prng)).collect();
            let is_written = |chunk: usize| written & 1 << chunk != 0;
            let mut new = old.clone();
            (0..k).filter(|chunk| is_written(*chunk)).for_each(|c| new[c] = random(&mut prng));
            let (before, after) = (encode(kernels, &old, m), encode(kernels, &new, m));
            old.extend(before);
            new.extend(after);
            Stripe { k, m, written, old, new }
        }

        /// Parity chunks with sums, as bits.
        fn summed(&self) -> u32 {
            ((1 << self.m.min(2)) - 1) << self.k
        }

        /// After a crash that left the positions in `stored` new, and with those in `lost` gone.
        /// Those in `absent` were away before: the journal has nothing of their parity.
        fn restore(&self, stored: u32, lost: u32, absent: u32) -> Option<Known> {
            let has = |set: u32, position: usize| set & 1 << position != 0;
            let lost = lost | absent;
            let new: Vec<Option<&[u8]>> =
                (0..self.k).map(|c| has(self.written, c).then_some(&self.new[c][..])).collect();
            let place = |position: usize| {
                let from = if has(stored, position) { &self.new } else { &self.old };
                (!has(lost, position)).then_some(&from[position][..])
            };
            let place: Vec<Option<&[u8]>> = (0..self.k + self.m).map(place).collect();
            let is_in = |set: u32, position: usize| has(set & !absent, position);
            let parity = || (self.k..).zip(&self.new[self.k..]);
            let sums = parity().map(|(position, bytes)| {
                is_in(self.summed(), position).then(|| sum().of(&sector(bytes)))
            });
            let full = parity()
                .map(|(position, bytes)| is_in(!self.summed(), position).then_some(&bytes[..]));
            let (sums, full) = (sums.collect::<Vec<_>>(), full.collect::<Vec<_>>());
            let sector = Sector { new: &new, place: &place, sums: &sums, full: &full, sum: &sum() };
            let known = sector.restore(Kernels::detect());
            assert!(!sector.is_new() || known.is_some());
            known
        }
    }

    /// Every stripe, what of its parity with sums is stored, what is lost, what was away before.
    fn each_case(mut check: impl FnMut(&Stripe, u32, u32, u32)) {
        for (k, m) in [(1, 1), (2, 1), (4, 1), (3, 2), (4, 2), (3, 3), (4, 3), (3, 4), (2, 5)] {
            for written in 1..1 << k {
                let stripe = Stripe::random(k, m, written);
                let sets = || 0..1_u32 << (k + m);
                for (lost, absent) in sets().flat_map(|lost| sets().map(move |its| (lost, its))) {
                    let borne = lost & absent == 0 && (lost | absent).count_ones() as usize <= m;
                    let stored = 0..1_u32 << m.min(2);
                    if borne || absent == 0 {
                        stored.for_each(|parity| check(&stripe, parity << k, lost, absent));
                    }
                }
            }
        }
    }

    /// Of what the journal has sums of, each has its sum.
    fn is_made(stripe: &Stripe, restored: Option<&Known>, absent: u32, case: &str) {
        let wanted = (stripe.summed() & !absent).count_ones() as usize;
        assert_eq!(restored.map(|known| known.len()), Some(wanted), "{case}");
    }

    #[test]
    fn any_losses_that_parity_bears() {
        let mut cases = 0;
        each_case(|stripe, stored, lost, absent| {
            let restored = stripe.restore(stored, lost, absent);
            let case = format!("{}+{} {stored:b} {lost:b} {absent:b}", stripe.k, stripe.m);
            if (lost | absent).count_ones() as usize <= stripe.m {
                is_made(stripe, restored.as_ref(), absent, &case);
                cases += 1;
            }
            for (position, bytes) in restored.iter().flatten() {
                assert_eq!(*bytes, stripe.new[*position], "{case}");
            }
        });
        assert!(cases > 50_000, "{cases}");
    }

    #[test]
    fn all_else_may_be_new_once_all_parity_with_sums_is() {
        each_case(|stripe, _, lost, absent| {
            let others = ((1 << stripe.m) - 1) << stripe.k & !stripe.summed();
            let torn =
                [stripe.written, stripe.written & 0b101 | others, others & 0b101 << stripe.k];
            for torn in torn {
                if (lost | absent).count_ones() as usize <= stripe.m {
                    // Parity on a lost member is worked out from data that may be torn: it must
                    // come out right.
                    let restored = stripe.restore(stripe.summed() | torn, lost, absent);
                    let case = format!("{}+{} {torn:b} {lost:b} {absent:b}", stripe.k, stripe.m);
                    is_made(stripe, restored.as_ref(), absent, &case);
                    for (position, bytes) in restored.iter().flatten() {
                        assert_eq!(*bytes, stripe.new[*position], "{case}");
                    }
                }
            }
        });
    }

    #[test]
    fn bytes_that_do_not_belong_together_make_nothing() {
        let mut stripe = Stripe::random(4, 2, 0b0010);
        stripe.old[3] = [1; SECTOR];
        stripe.old[4] = [2; SECTOR];
        stripe.old[5] = [3; SECTOR];
        assert_eq!(stripe.restore(0, 0, 0), None);
    }
}
