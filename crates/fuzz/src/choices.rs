//! What a client decides by: chance from a seed, or the bytes of a fuzzer that looks for new ways
//! through the code.

use ashlar_reactor::prng::Prng;

/// Answers every question; the same seed or bytes answer the same.
pub struct Choices {
    source: Source,
}

enum Source {
    Seed(Prng),
    Bytes(std::vec::IntoIter<u8>),
}

impl Choices {
    /// `client`: each kind has a stream of its own.
    pub fn of_seed(seed: u64, client: &str) -> Choices {
        Choices { source: Source::Seed(Prng::stream(seed, client)) }
    }

    /// Once they are used up every answer is zero, and [`Choices::are_over`].
    pub fn of_bytes(bytes: Vec<u8>) -> Choices {
        Choices { source: Source::Bytes(bytes.into_iter()) }
    }

    /// Nothing is left to decide by; never so of a seed.
    pub fn are_over(&self) -> bool {
        matches!(&self.source, Source::Bytes(bytes) if bytes.len() == 0)
    }

    pub fn next_u64(&mut self) -> u64 {
        match &mut self.source {
            Source::Seed(prng) => prng.next_u64(),
            Source::Bytes(bytes) => bytes.take(8).fold(0, |sum, byte| sum << 8 | u64::from(byte)),
        }
    }

    pub fn byte(&mut self) -> u8 {
        match &mut self.source {
            Source::Seed(prng) => prng.next_u64().to_le_bytes()[0],
            Source::Bytes(bytes) => bytes.next().unwrap_or(0),
        }
    }

    /// A number in `0..bound`; `bound` above zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        match &mut self.source {
            Source::Seed(prng) => prng.below(bound),
            // As few bytes as it takes: what a fuzzer changes shall matter.
            Source::Bytes(_) if bound <= 1 << 8 => u64::from(self.byte()) % bound,
            Source::Bytes(_) => self.next_u64() % bound,
        }
    }

    /// An index into something of `len` items.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).unwrap_or(0)
    }

    /// True `numerator` times in `denominator` on average.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }

    /// How seldom a client errs, for [`Choices::slips`]: once in so many times; 0: never.
    pub fn one_slip_in(&mut self) -> u64 {
        [0, 0, 100, 10][self.index(4)]
    }

    pub fn slips(&mut self, one_in: u64) -> bool {
        one_in > 0 && self.chance(1, one_in)
    }

    /// Zero, a small number, one near a power of two, or any.
    pub fn number(&mut self) -> u64 {
        let any = self.next_u64();
        match self.below(4) {
            0 => 0,
            1 => any % 16,
            2 => (1 << (any % 64)) - self.below(2),
            _ => any,
        }
    }

    /// Changes a byte or two, or cuts it short: mostly at the beginning, where headers are.
    pub fn spoil(&mut self, bytes: &mut Vec<u8>) {
        if bytes.is_empty() {
            return;
        }
        for _ in 0..1 + self.below(2) {
            let reach = if self.chance(2, 3) { bytes.len().min(80) } else { bytes.len() };
            let at = self.index(reach);
            bytes[at] = self.byte();
        }
        if self.chance(1, 4) {
            bytes.truncate(self.index(bytes.len()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(mut choices: Choices) -> [u64; 4] {
        [choices.next_u64(), choices.below(10), choices.byte().into(), choices.number()]
    }

    #[test]
    fn the_same_is_chosen_by_the_same() {
        assert_eq!(all(Choices::of_seed(7, "a")), all(Choices::of_seed(7, "a")));
        assert_ne!(all(Choices::of_seed(7, "a")), all(Choices::of_seed(7, "b")));
        let bytes: Vec<u8> = (0..19).collect();
        assert_eq!(all(Choices::of_bytes(bytes.clone())), all(Choices::of_bytes(bytes)));
    }

    #[test]
    fn bytes_come_to_an_end() {
        let mut choices = Choices::of_bytes(vec![1, 2]);
        assert!(choices.below(256) == 1 && !choices.are_over());
        assert!(choices.next_u64() == 2 && choices.are_over());
        assert_eq!(all(choices), [0; 4]);
        assert!(!Choices::of_seed(1, "a").are_over());
    }
}
