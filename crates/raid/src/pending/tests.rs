//! Goal: reads see the newest bytes of every row, and what is removed is only what was stored.
//! Method: random inserts and removals against one byte array of (sequence, value) per chunk.
#![allow(clippy::cast_possible_truncation, reason = "a test")]

use ashlar_reactor::buffer::BufferPool;
use ashlar_reactor::prng::Prng;

use super::*;

const CHUNKS: u8 = 3;
const ROWS: usize = 64;
const STRIPES: u64 = 5;

type Model = Vec<Option<(u64, u8)>>;

struct Pair {
    pending: Pending,
    model: BTreeMap<(u64, u8), Model>,
    sequence: u64,
}

impl Pair {
    fn insert(&mut self, prng: &mut Prng, pool: &Rc<BufferPool>) {
        let (stripe, chunk) = (prng.below(STRIPES), prng.below(CHUNKS.into()) as u8);
        // Often the same rows again.
        let start = if prng.chance(1, 2) { prng.index(ROWS) } else { 8 * prng.index(ROWS / 8) };
        let most = (ROWS - start).min(12);
        let end =
            if prng.chance(1, 2) { start + 1 + prng.index(most) } else { start + most.min(8) };
        self.sequence += 1;
        let bytes = pool.take(end - start);
        bytes.copy_from_slice(&vec![self.sequence as u8; end - start]);
        let patch = Patch {
            chunk,
            rows: start as u32..end as u32,
            bytes,
            sequence: self.sequence,
            hold: Hold::default(),
        };
        self.pending.insert(StripeIndex(stripe), patch);
        let model = self.model.entry((stripe, chunk)).or_insert_with(|| vec![None; ROWS]);
        model[start..end].fill(Some((self.sequence, self.sequence as u8)));
    }

    fn remove(&mut self, prng: &mut Prng) {
        let (stripe, chunk) = (prng.below(STRIPES), prng.below(CHUNKS.into()) as u8);
        let start = prng.index(ROWS);
        let rows = start as u32..(start + prng.index(ROWS - start + 1)) as u32;
        let newest = self.sequence.saturating_sub(prng.below(6));
        self.pending.remove(StripeIndex(stripe), chunk, &rows, newest);
        if let Some(model) = self.model.get_mut(&(stripe, chunk)) {
            for row in &mut model[rows.start as usize..rows.end as usize] {
                *row = row.filter(|(sequence, _)| *sequence > newest);
            }
        }
    }

    fn check(&self) {
        let mut bytes = 0;
        for stripe in 0..STRIPES {
            let mut any = false;
            for chunk in 0..CHUNKS {
                let mut seen: Model = vec![None; ROWS];
                let rows = 0..ROWS as u32;
                for (first, bytes) in self.pending.within(StripeIndex(stripe), chunk, &rows) {
                    for (at, byte) in bytes.bytes().iter().enumerate() {
                        let row = &mut seen[first as usize + at];
                        assert!(row.is_none(), "patches overlap");
                        *row = Some((u64::from(*byte), *byte));
                    }
                }
                let none = vec![None; ROWS];
                let expected = self.model.get(&(stripe, chunk)).unwrap_or(&none);
                assert_eq!(&seen, expected);
                any |= seen.iter().any(Option::is_some);
                bytes += seen.iter().flatten().count() as u64;
            }
            assert_eq!(self.pending.contains(StripeIndex(stripe)), any);
            let model = self.model.range((stripe, 0)..(stripe + 1, 0));
            let oldest = model.flat_map(|(_, rows)| rows).flatten().map(|(sequence, _)| *sequence);
            let oldest = oldest.min();
            let found = self.pending.oldest_of(&[StripeIndex(stripe)]);
            assert_eq!(found, oldest.unwrap_or(u64::MAX));
            if let Some(sequence) = oldest {
                let waits = |before| {
                    let mut old = self.pending.by_age.range(..(before, 0));
                    old.any(|(_, its)| *its == stripe)
                };
                assert!(waits(sequence + 1) && !waits(sequence), "stripe {stripe}");
            }
        }
        let all = (0..STRIPES).flat_map(|its| self.pending.of(StripeIndex(its), u64::MAX));
        let memory = all.map(|patch| memory_of(patch.bytes.len()) as u64).sum();
        assert_eq!(self.pending.size(), PendingSize { bytes, memory });
    }
}

#[test]
fn newest_bytes_win_and_only_stored_ones_go() {
    let pool = BufferPool::new();
    for seed in 0..40 {
        let mut prng = Prng::from_seed(seed);
        let pending = Pending::none(STRIPES);
        let mut pair = Pair { pending, model: BTreeMap::new(), sequence: 0 };
        for _ in 0..120 {
            if prng.chance(2, 3) {
                pair.insert(&mut prng, &pool);
            } else {
                pair.remove(&mut prng);
            }
            pair.check();
        }
    }
}

#[test]
fn a_stripe_that_is_taken_is_not_taken_twice() {
    let pool = BufferPool::new();
    let mut pair = Pair { pending: Pending::none(STRIPES), model: BTreeMap::new(), sequence: 0 };
    let mut prng = Prng::from_seed(1);
    (0..30).for_each(|_| pair.insert(&mut prng, &pool));
    let taken = pair.pending.take_oldest(2, u64::MAX);
    assert!(taken.is_sorted() && taken.len() == 2);
    let others = pair.pending.take_oldest(10, u64::MAX);
    assert!(others.iter().all(|stripe| !taken.contains(stripe)));
    pair.pending.remove_stripe(taken[0], u64::MAX);
    assert!(pair.pending.of(taken[0], u64::MAX).next().is_none());
    pair.pending.put_back(taken[0]);
    assert!(!pair.pending.contains(taken[0]));
    pair.pending.put_back(taken[1]);
    assert_eq!(pair.pending.take_oldest(10, u64::MAX), [taken[1]]);
}

#[test]
fn what_is_left_of_a_patch_keeps_no_more_memory_than_it_takes() {
    const STRIPE: StripeIndex = StripeIndex(0);
    let pool = BufferPool::new();
    let mut pending = Pending::none(1);
    let patch = |rows: Range<u32>, sequence| {
        let bytes = pool.take(rows.len());
        bytes.fill_zero();
        Patch { chunk: 0, rows, bytes, sequence, hold: Hold::default() }
    };
    pending.insert(STRIPE, patch(0..65536, 1));
    assert_eq!(pending.size(), PendingSize { bytes: 65536, memory: 65536 });
    pending.insert(STRIPE, patch(512..40960, 2));
    assert_eq!(pending.size(), PendingSize { bytes: 65536, memory: 4096 + 65536 + 32768 });
    pending.take_oldest(1, u64::MAX);
    pending.remove(STRIPE, 0, &(512..65024), 2);
    pending.put_back(STRIPE);
    assert_eq!(pending.size(), PendingSize { bytes: 1024, memory: 8192 });
    for patch in pending.of(STRIPE, u64::MAX) {
        let mut trimmed = patch.bytes.clone();
        trimmed.trim();
        assert_eq!(trimmed.as_ptr(), patch.bytes.as_ptr(), "{:?} keeps more", patch.rows);
    }
}
