//! The one source of chance: a small seeded generator, so that a seed repeats a run.
//!
//! xoshiro256** by Blackman and Vigna, seeded by splitmix64 ("Scrambled linear pseudorandom number
//! generators", 2018).

/// A stream of random numbers that depends on nothing but its seed.
#[derive(Clone, Debug)]
pub struct Prng {
    state: [u64; 4],
}

impl Prng {
    pub fn from_seed(seed: u64) -> Prng {
        let mut s = seed;
        let state = std::array::from_fn(|_| {
            s = s.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let z = (s ^ (s >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        });
        Prng { state }
    }

    /// A stream of its own: adding draws to one stream does not disturb another.
    pub fn stream(seed: u64, name: &str) -> Prng {
        let mixed = name.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)
        });
        Prng::from_seed(mixed)
    }

    pub fn next_u64(&mut self) -> u64 {
        let [s0, s1, s2, s3] = self.state;
        let result = s1.wrapping_mul(5).rotate_left(7).wrapping_mul(9);
        let (s2, s3) = (s2 ^ s0, s3 ^ s1);
        self.state = [s0 ^ s3, s1 ^ s2, s2 ^ (s1 << 17), s3.rotate_left(45)];
        result
    }

    /// A number in `0..bound`; `bound` above zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0);
        // The bias of a multiply-shift is below 2^-32 for the bounds used here.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// An index into something of `len` items.
    pub fn index(&mut self, len: usize) -> usize {
        usize::try_from(self.below(len as u64)).expect("below a usize")
    }

    /// True `numerator` times in `denominator` on average.
    pub fn chance(&mut self, numerator: u64, denominator: u64) -> bool {
        self.below(denominator) < numerator
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_repeats_and_streams_differ() {
        let draw = |mut p: Prng| [p.next_u64(), p.next_u64(), p.below(10)];
        assert_eq!(draw(Prng::from_seed(7)), draw(Prng::from_seed(7)));
        assert_ne!(draw(Prng::stream(7, "faults")), draw(Prng::stream(7, "order")));
    }
}
