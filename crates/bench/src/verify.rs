//! Bytes that say where they belong, so that whatever comes back wrong names itself.
//!
//! Every sector begins with its stamp: a magic number, the seed of the run, its own place, and the
//! generation of its block; the words after that follow from the stamp.
//!
//! Invariant: of one block either one request is under way or none, so that a read knows which
//! generation it must find.

/// What carries a stamp of its own, in bytes; guests address nothing smaller.
pub const SECTOR_BYTES: usize = 512;
const WORD_BYTES: usize = 8;
const STAMP_WORDS: usize = 4;
const MAGIC: u64 = u64::from_le_bytes(*b"AshlarBn");
/// An odd number with its ones well spread (2^64 over the golden ratio): neighbouring words differ.
const SPREAD: u64 = 0x9e37_79b9_7f4a_7c15;

/// Who a sector is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    pub seed: u64,
    /// Byte offset of the sector in what is measured.
    pub place: u64,
    /// How often its block was written.
    pub generation: u32,
}

impl Stamp {
    fn words(self) -> [u64; STAMP_WORDS] {
        [MAGIC, self.seed, self.place, self.generation.into()]
    }

    fn filler(self, word: usize) -> u64 {
        let key = self.seed ^ self.place.rotate_left(20) ^ u64::from(self.generation);
        key.wrapping_add(word as u64).wrapping_mul(SPREAD)
    }

    fn write(self, sector: &mut [u8]) {
        let stamp = self.words();
        for (index, word) in sector.chunks_exact_mut(WORD_BYTES).enumerate() {
            let value = stamp.get(index).copied().unwrap_or_else(|| self.filler(index));
            word.copy_from_slice(&value.to_le_bytes());
        }
    }

    /// The first byte that is not what [`Stamp::write`] writes.
    fn first_difference(self, sector: &[u8]) -> Option<usize> {
        let mut expected = [0; SECTOR_BYTES];
        self.write(&mut expected);
        expected.iter().zip(sector).position(|(expected, found)| expected != found)
    }
}

/// What a sector carries in place of what it should.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    Zeroes,
    /// All of a sector that was meant for another place or time, or of another run.
    Another(Stamp),
    /// It begins as this one and goes on as something else, from this byte on.
    Torn {
        began: Stamp,
        at: usize,
    },
    /// Nothing that this program wrote.
    Unknown,
}

impl std::fmt::Display for Found {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Found::Zeroes => f.write_str("zeroes"),
            Found::Another(Stamp { seed, place, generation }) => {
                write!(f, "what belongs at byte {place}, generation {generation}, seed {seed}")
            }
            Found::Torn { began: Stamp { place, generation, .. }, at } => {
                write!(f, "byte {place}, generation {generation}, torn at its byte {at}")
            }
            Found::Unknown => f.write_str("bytes that were never written here"),
        }
    }
}

/// A read that returned something else than what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("wrong data at byte {}: expected generation {}, found {found}",
    .expected.place, .expected.generation)]
pub struct Mismatch {
    pub expected: Stamp,
    pub found: Found,
}

/// Fills a block that begins at byte `place`; whole sectors.
pub fn stamp(block: &mut [u8], seed: u64, place: u64, generation: u32) {
    assert!(block.len().is_multiple_of(SECTOR_BYTES), "whole sectors");
    let mut place = place;
    for sector in block.chunks_exact_mut(SECTOR_BYTES) {
        Stamp { seed, place, generation }.write(sector);
        place += SECTOR_BYTES as u64;
    }
}

/// Compares a block with what [`stamp`] makes.
pub fn check(block: &[u8], seed: u64, place: u64, generation: u32) -> Result<(), Mismatch> {
    let mut place = place;
    for sector in block.chunks_exact(SECTOR_BYTES) {
        let expected = Stamp { seed, place, generation };
        if expected.first_difference(sector).is_some() {
            return Err(Mismatch { expected, found: look(sector) });
        }
        place += SECTOR_BYTES as u64;
    }
    Ok(())
}

/// Finds out what a sector is.
fn look(sector: &[u8]) -> Found {
    if sector.iter().all(|byte| *byte == 0) {
        return Found::Zeroes;
    }
    let mut words = [0; STAMP_WORDS];
    for (word, bytes) in words.iter_mut().zip(sector.chunks_exact(WORD_BYTES)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("chunks of a word"));
    }
    let [magic, seed, place, generation] = words;
    let Ok(generation) = u32::try_from(generation) else { return Found::Unknown };
    if magic != MAGIC {
        return Found::Unknown;
    }
    let its = Stamp { seed, place, generation };
    match its.first_difference(sector) {
        None => Found::Another(its),
        Some(at) => Found::Torn { began: its, at },
    }
}

/// Which generation each block has, and whether a request is under way on it.
#[derive(Debug)]
pub struct Ledger {
    /// The generation, and in the highest bit whether it is taken.
    blocks: Vec<u32>,
}

const TAKEN: u32 = 1 << 31;

impl Ledger {
    /// All blocks have been written once.
    pub fn new(blocks: usize) -> Ledger {
        Ledger { blocks: vec![1; blocks] }
    }

    /// Takes `block`, or the next one that nobody has; at least one is free. Returns it with its
    /// generation.
    pub fn take(&mut self, block: usize) -> (usize, u32) {
        let (before, after) = self.blocks.split_at(block);
        let free = |generation: &u32| generation & TAKEN == 0;
        let found = match after.iter().position(free) {
            Some(index) => block + index,
            None => before.iter().position(free).expect("more blocks than requests"),
        };
        let generation = self.blocks[found];
        self.blocks[found] |= TAKEN;
        (found, generation)
    }

    /// Gives a block back, which has this generation now.
    pub fn put(&mut self, block: usize, generation: u32) {
        assert!(self.blocks[block] & TAKEN != 0, "nobody has block {block}");
        self.blocks[block] = generation;
    }
}

/// The generation after this one; it never becomes zero, which no block has.
pub fn next_generation(generation: u32) -> u32 {
    if generation + 1 == TAKEN { 1 } else { generation + 1 }
}

#[cfg(test)]
mod tests {
    //! Goal: whatever is not exactly what was written is found, and named.
    //! Method: good blocks, and every kind of bad one.

    use super::*;

    fn block() -> Vec<u8> {
        let mut block = vec![0; 4096];
        stamp(&mut block, 7, 40_960, 3);
        block
    }

    #[test]
    fn what_was_written_is_right_and_nothing_else() {
        assert_eq!(check(&block(), 7, 40_960, 3), Ok(()));
        for (seed, place, generation) in [(8, 40_960, 3), (7, 0, 3), (7, 40_960, 2)] {
            assert!(check(&block(), seed, place, generation).is_err());
        }
        for byte in 0..4096 {
            let mut wrong = block();
            wrong[byte] ^= 1;
            let mismatch = check(&wrong, 7, 40_960, 3).unwrap_err();
            assert_eq!(mismatch.expected.place, 40_960 + (byte / 512 * 512) as u64, "{byte}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        let found = |change: &dyn Fn(&mut [u8])| {
            let mut wrong = block();
            change(&mut wrong);
            check(&wrong, 7, 40_960, 3).unwrap_err().found
        };
        assert_eq!(found(&|b| b[512..1024].fill(0)), Found::Zeroes);
        assert_eq!(found(&|b| b[512..1024].fill(9)), Found::Unknown);
        let old = Stamp { seed: 7, place: 40_960, generation: 2 };
        assert_eq!(found(&|b| stamp(b, 7, 40_960, 2)), Found::Another(old));
        let began = Stamp { seed: 7, place: 40_960, generation: 3 };
        assert_eq!(found(&|b| b[300] ^= 1), Found::Torn { began, at: 300 });
        let elsewhere = Mismatch {
            expected: Stamp { seed: 7, place: 41_472, generation: 3 },
            found: Found::Another(Stamp { seed: 7, place: 512, generation: 1 }),
        };
        let text = "wrong data at byte 41472: expected generation 3, found what belongs at byte \
                    512, generation 1, seed 7";
        assert_eq!(elsewhere.to_string(), text);
    }

    #[test]
    fn a_block_is_given_to_one_at_a_time() {
        let mut ledger = Ledger::new(4);
        assert_eq!((ledger.take(2), ledger.take(2), ledger.take(2)), ((2, 1), (3, 1), (0, 1)));
        ledger.put(3, 2);
        assert_eq!((ledger.take(2), ledger.take(0)), ((3, 2), (1, 1)));
        assert_eq!((next_generation(1), next_generation(TAKEN - 1)), (2, 1));
    }
}
