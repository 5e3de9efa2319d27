//! The code: the factor of each data chunk in each parity chunk.
//!
//! Invariant: these factors are on drives. A changed one would recompute lost chunks wrongly.

use super::gf256::{ORDER, inverse, multiply, power};
use super::{CHUNKS_MAX, PARITY_CHUNKS_MAX};

/// The factors of one source in each output, such as of a data chunk in each parity chunk.
pub(super) type Factors = [u8; PARITY_CHUNKS_MAX];

/// `FACTORS[i][r]` is the factor of data chunk i in parity chunk r, as `parity.rs` defines it.
pub(super) static FACTORS: [Factors; CHUNKS_MAX] = factors();

// Each x is different from each y: x_r = y_i would be 2^(i + r - 1) = 1.
const _: () = assert!(CHUNKS_MAX + PARITY_CHUNKS_MAX < ORDER);

const fn factors() -> [Factors; CHUNKS_MAX] {
    let mut factors = [[1; PARITY_CHUNKS_MAX]; CHUNKS_MAX];
    let mut index = 0;
    while index < CHUNKS_MAX {
        factors[index][1] = power(index);
        let mut parity = 2;
        while parity < PARITY_CHUNKS_MAX {
            let divisor = 1 ^ power(index + parity - 1);
            factors[index][parity] = multiply(power(index), inverse(divisor));
            parity += 1;
        }
        index += 1;
    }
    factors
}

#[cfg(test)]
mod tests {
    //! Goal: the factors are those on drives, and can be solved for all losses.
    //! Method: golden values, worked out with other software; square parts of the table are
    //! eliminated: all up to 3 by 3, and random ones up to 8 by 8.

    use proptest::prelude::*;
    use proptest::sample::subsequence;

    use super::*;

    #[test]
    fn factors_on_drives() {
        assert_eq!(FACTORS[0], [0x01, 0x01, 0xf4, 0xa7, 0x9d, 0x72, 0xed, 0x5f]);
        assert_eq!(FACTORS[1], [0x01, 0x02, 0x53, 0x27, 0xe4, 0xc7, 0xbe, 0xa8]);
        assert_eq!(FACTORS[62], [0x01, 0xde, 0x80, 0x83, 0x72, 0x9d, 0x22, 0xc1]);
        let all = FACTORS.iter().flatten();
        let hash = all.fold(0xcbf2_9ce4_8422_2325_u64, |hash, factor| {
            (hash ^ u64::from(*factor)).wrapping_mul(0x0100_0000_01b3)
        });
        assert_eq!(hash, 0xf103_6a67_f60c_47b0, "FNV-1a, chunk after chunk");
    }

    /// By Gaussian elimination, with swaps: nothing is known of the matrix.
    fn is_invertible(indexes: &[usize], parities: &[usize]) -> bool {
        let row = |index: &usize| parities.iter().map(|parity| FACTORS[*index][*parity]).collect();
        let mut rows: Vec<Vec<u8>> = indexes.iter().map(row).collect();
        for column in 0..rows.len() {
            let Some(found) = (column..rows.len()).find(|row| rows[*row][column] != 0) else {
                return false;
            };
            rows.swap(column, found);
            let (above, below) = rows.split_at_mut(column + 1);
            let pivot = &above[column];
            for row in below {
                let multiple = multiply(row[column], inverse(pivot[column]));
                for (value, pivot) in row.iter_mut().zip(pivot) {
                    *value ^= multiply(multiple, *pivot);
                }
            }
        }
        true
    }

    #[test]
    fn all_small_parts_are_invertible() {
        for a in 0..CHUNKS_MAX {
            for p in 0..PARITY_CHUNKS_MAX {
                assert!(is_invertible(&[a], &[p]));
                for (b, q) in each_pair(a, p) {
                    assert!(is_invertible(&[a, b], &[p, q]));
                    for (c, r) in each_pair(b, q) {
                        assert!(is_invertible(&[a, b, c], &[p, q, r]));
                    }
                }
            }
        }
    }

    /// All further data chunks, each with all further parity chunks.
    fn each_pair(index: usize, parity: usize) -> impl Iterator<Item = (usize, usize)> {
        let parities = move |index| (parity + 1..PARITY_CHUNKS_MAX).map(move |p| (index, p));
        (index + 1..CHUNKS_MAX).flat_map(parities)
    }

    /// As many data chunks as parity chunks.
    fn squares() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
        (4..=PARITY_CHUNKS_MAX).prop_flat_map(|size| {
            let indexes: Vec<usize> = (0..CHUNKS_MAX).collect();
            let parities: Vec<usize> = (0..PARITY_CHUNKS_MAX).collect();
            (subsequence(indexes, size), subsequence(parities, size))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(20_000))]

        #[test]
        fn large_parts_are_invertible((indexes, parities) in squares()) {
            prop_assert!(is_invertible(&indexes, &parities));
        }
    }
}
