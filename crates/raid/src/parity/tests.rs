//! Goal: P and Q are those of RAID 6, whichever kernel computed them; up to as many lost chunks as
//! there are parity chunks are recovered; more are refused.
//!
//! Method: every kernel against sums of single products (which `gf256.rs` tests against long
//! multiplication), and against the crate `rusty_erasure-core`, another author's port of ISA-L's
//! `xor_gen`, `pq_gen` and `gf_vect_mad`. All losses of small stripes, and random ones of wide
//! stripes; `code.rs` tests that the others can be solved too. Buffers start at any address, and
//! guard bytes around them must survive.

use proptest::prelude::*;

use super::*;

const GUARD: u8 = 0xa5;
/// Bytes on each side of a buffer: more than a vector that overshoots.
const GUARD_BYTES: usize = 512;

/// Bytes at a chosen distance from a multiple of 64, between guards.
struct Buffer {
    memory: Vec<u8>,
    start: usize,
    length: usize,
}

impl Buffer {
    fn new(skew: usize, contents: &[u8]) -> Buffer {
        let mut memory = vec![GUARD; contents.len() + 2 * GUARD_BYTES + 128];
        let start = GUARD_BYTES + memory[GUARD_BYTES..].as_ptr().align_offset(64) + skew % 64;
        memory[start..][..contents.len()].copy_from_slice(contents);
        Buffer { memory, start, length: contents.len() }
    }

    /// Of contents that must be overwritten.
    fn dirty(skew: usize, length: usize) -> Buffer {
        Buffer::new(skew, &random_bytes(0xd1, length))
    }

    fn bytes(&self) -> &[u8] {
        &self.memory[self.start..][..self.length]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.memory[self.start..][..self.length]
    }

    #[track_caller]
    fn expect(&self, expected: &[u8], what: &str) {
        let (before, rest) = self.memory.split_at(self.start);
        let (bytes, after) = rest.split_at(self.length);
        assert!(before.iter().chain(after).all(|byte| *byte == GUARD), "{what}: wrote outside");
        let wrong = bytes.iter().zip(expected).position(|(byte, expected)| byte != expected);
        assert!(wrong.is_none(), "{what}: wrong from byte {} on", wrong.unwrap());
        assert_eq!(bytes.len(), expected.len(), "{what}");
    }
}

/// The same for the same seed.
fn random_bytes(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut step = || {
        // xorshift64*, of which the upper bits are good
        state ^= state >> 12;
        state ^= state << 25;
        state ^= state >> 27;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_be_bytes()[0]
    };
    (0..length).map(|_| step()).collect()
}

/// Data chunks that start at different distances from alignment.
fn random_data(seed: u32, k: usize, length: usize) -> Vec<Buffer> {
    let chunk = |index| random_bytes(u64::from(seed) << 32 | index as u64, length);
    (0..k).map(|index| Buffer::new(seed as usize + index * 5, &chunk(index))).collect()
}

fn slices(buffers: &[Buffer]) -> Vec<&[u8]> {
    buffers.iter().map(Buffer::bytes).collect()
}

fn slices_mut(buffers: &mut [Buffer]) -> Vec<&mut [u8]> {
    buffers.iter_mut().map(Buffer::bytes_mut).collect()
}

/// Parity chunk `number`, by the definition, with powers by multiplying again and again.
fn parity_by_definition(number: usize, data: &[&[u8]]) -> Vec<u8> {
    let power = |exponent| (0..exponent).fold(1, |power, _| gf256::multiply(power, 2));
    let mut sum = vec![0; data[0].len()];
    for (index, chunk) in data.iter().enumerate() {
        let factor = match number {
            0 => 1,
            1 => power(index),
            _ => gf256::multiply(power(index), gf256::inverse(1 ^ power(index + number - 1))),
        };
        for (total, byte) in sum.iter_mut().zip(*chunk) {
            *total ^= gf256::multiply(factor, *byte);
        }
    }
    sum
}

/// All chunks of a stripe, in order of chunk id.
fn stripe_by_definition(seed: u32, k: usize, m: usize, length: usize) -> Vec<Vec<u8>> {
    let data = random_data(seed, k, length);
    let mut stripe: Vec<Vec<u8>> = data.iter().map(|chunk| chunk.bytes().to_vec()).collect();
    stripe.extend((0..m).map(|parity| parity_by_definition(parity, &slices(&data))));
    stripe
}

/// Every kernel recovers the chunks `missing`, in that order, from all but the chunks `lost`.
fn check_recovery(stripe: &[Vec<u8>], k: usize, lost: &[usize], missing: &[usize]) {
    let length = stripe[0].len();
    let mut present: Vec<(usize, &[u8])> =
        stripe.iter().map(Vec::as_slice).enumerate().filter(|(id, _)| !lost.contains(id)).collect();
    // No order is promised.
    let middle = present.len() / 2;
    present.rotate_left(middle);
    for kernels in Kernels::all_available() {
        let mut outputs: Vec<Buffer> =
            missing.iter().map(|id| Buffer::dirty(id * 3, length)).collect();
        let mut pairs: Vec<(usize, &mut [u8])> =
            missing.iter().copied().zip(slices_mut(&mut outputs)).collect();
        kernels.reconstruct(k, stripe.len() - k, &present, &mut pairs).unwrap();
        for (id, output) in missing.iter().zip(&outputs) {
            let name = kernels.name();
            let what = format!("{name}, chunk {id} of {k}+{}, lost {lost:?}", stripe.len() - k);
            output.expect(&stripe[*id], &what);
        }
    }
}

/// Data and parity chunks: mostly of the stripes that people build, sometimes of the widest.
fn shapes() -> impl Strategy<Value = (usize, usize)> {
    let m = prop_oneof![3 => 1..=3_usize, 1 => 4..=PARITY_CHUNKS_MAX];
    m.prop_flat_map(|m| {
        let widest = CHUNKS_MAX - m;
        let k = prop_oneof![6 => 1..=12_usize, 1 => 13..=widest, 1 => Just(widest)];
        (k, Just(m))
    })
}

fn lengths() -> impl Strategy<Value = usize> {
    prop_oneof![Just(1), Just(8), 1..=40_usize].prop_map(|units| units * LENGTH_UNIT)
}

proptest! {
    #[test]
    fn encode_is_the_definition(
        seed: u32, (k, m) in shapes(), length in lengths()
    ) {
        let data = random_data(seed, k, length);
        let data = slices(&data);
        for kernels in Kernels::all_available() {
            let mut parity: Vec<Buffer> =
                (0..m).map(|parity| Buffer::dirty(seed as usize + parity, length)).collect();
            kernels.encode(&data, &mut slices_mut(&mut parity));
            for (number, chunk) in parity.iter().enumerate() {
                let what = format!("{}, parity {number}", kernels.name());
                chunk.expect(&parity_by_definition(number, &data), &what);
            }
        }
    }

    #[test]
    fn update_is_encode(
        seed: u32, (k, m) in shapes(), length in lengths(), index: prop::sample::Index, is_given: u8
    ) {
        let index = index.index(k);
        let given: Vec<usize> = (0..m).filter(|number| is_given >> number & 1 == 1).collect();
        let mut data = stripe_by_definition(seed, k, 0, length);
        let new = Buffer::new(seed as usize, &random_bytes(u64::from(!seed), length));
        let old = Buffer::new(seed as usize >> 8, &data[index]);
        let encode = |data: &[Vec<u8>]| {
            let data: Vec<&[u8]> = data.iter().map(Vec::as_slice).collect();
            let chunk = |number: &usize| parity_by_definition(*number, &data);
            given.iter().map(chunk).collect::<Vec<_>>()
        };
        let before = encode(&data);
        data[index] = new.bytes().to_vec();
        let after = encode(&data);
        for kernels in Kernels::all_available() {
            let mut parity: Vec<Buffer> =
                before.iter().enumerate().map(|(skew, bytes)| Buffer::new(skew, bytes)).collect();
            let mut pairs: Vec<(usize, &mut [u8])> =
                given.iter().copied().zip(slices_mut(&mut parity)).collect();
            kernels.update(m, index, old.bytes(), new.bytes(), &mut pairs);
            for ((number, chunk), after) in given.iter().zip(&parity).zip(&after) {
                let what = format!("{}, parity {number}, chunk {index}", kernels.name());
                chunk.expect(after, &what);
            }
            if let (Some(0), [before, ..], [after, ..]) = (given.first(), &*before, &*after) {
                let mut p = Buffer::new(1, &random_bytes(0, length));
                kernels.sum([before, old.bytes(), new.bytes()], p.bytes_mut());
                p.expect(after, &format!("{}, P in one pass", kernels.name()));
            }
        }
    }

    #[test]
    fn recovery_in_wide_stripes(
        seed: u32, (k, m) in shapes(), length in lengths(),
        picks: [prop::sample::Index; PARITY_CHUNKS_MAX]
    ) {
        let stripe = stripe_by_definition(seed, k, m, length);
        let mut ids: Vec<usize> = (0..k + m).collect();
        let lost: Vec<usize> =
            picks[..m].iter().map(|pick| ids.swap_remove(pick.index(ids.len()))).collect();
        check_recovery(&stripe, k, &lost, &lost);
        check_recovery(&stripe, k, &lost, &lost[..m / 2]);
    }
}

/// Mistakes in a table could hide in one factor, so all are tried, with all bytes.
#[test]
fn all_products_in_bulk() {
    let all_bytes: Vec<u8> = (0..=255).chain((0..=255).rev()).collect();
    for kernels in Kernels::all_available() {
        for factor in 0..=255 {
            let into = random_bytes(u64::from(factor), all_bytes.len());
            let expected: Vec<u8> = std::iter::zip(&all_bytes, &into)
                .map(|(byte, into)| gf256::multiply(factor, *byte) ^ into)
                .collect();
            let from = Buffer::new(usize::from(factor), &all_bytes);
            let mut result = Buffer::new(usize::from(factor) / 3, &into);
            kernels.mul_add(factor, from.bytes(), result.bytes_mut());
            result.expect(&expected, &format!("{}, factor {factor}", kernels.name()));
        }
    }
}

#[test]
fn xor_into_undoes_itself() {
    let (from, into) = (random_bytes(1, 4096), random_bytes(2, 4096));
    let sum: Vec<u8> = std::iter::zip(&from, &into).map(|(a, b)| a ^ b).collect();
    for kernels in Kernels::all_available() {
        let mut result = Buffer::new(9, &into);
        kernels.xor_into(&from, result.bytes_mut());
        result.expect(&sum, kernels.name());
        kernels.xor_into(&from, result.bytes_mut());
        result.expect(&into, kernels.name());
    }
}

/// Computed by hand, should all else be wrong in the same way: 0x80 * 2 = 0x1d, 3 * 4 = 12.
#[test]
fn encode_by_hand() {
    let data = [[0x01; 512], [0x80; 512], [0x03; 512]];
    let data = data.each_ref().map(|chunk| chunk.as_slice());
    for kernels in Kernels::all_available() {
        let (mut p, mut q) = ([0; 512], [0; 512]);
        kernels.encode(&data, &mut [&mut p, &mut q]);
        assert_eq!(p, [0x01 ^ 0x80 ^ 0x03; 512]);
        assert_eq!(q, [0x01 ^ 0x1d ^ 0x0c; 512]);
    }
}

/// The factors of the third are 1/3, 2/5 and 4/9.
#[test]
fn third_parity_by_hand() {
    let data = [[0x03; 512], [0x05; 512], [0x09; 512]];
    let data = data.each_ref().map(|chunk| chunk.as_slice());
    for kernels in Kernels::all_available() {
        let (mut p, mut q, mut r) = ([0; 512], [0; 512], [0; 512]);
        kernels.encode(&data, &mut [&mut p, &mut q, &mut r]);
        assert_eq!(p, [0x03 ^ 0x05 ^ 0x09; 512]);
        assert_eq!(q, [0x03 ^ 0x0a ^ 0x24; 512]);
        assert_eq!(r, [1 ^ 2 ^ 4; 512]);
    }
}

#[test]
fn parity_of_another_author() {
    for k in (2..=12).chain([32, CHUNKS_MAX - 2]) {
        let data = random_data(7, k, 4096);
        let data = slices(&data);
        let (mut p, mut q, mut xor) = (vec![0; 4096], vec![0; 4096], vec![0; 4096]);
        rusty_erasure_core::raid::pq_gen(&data, &mut p, &mut q).unwrap();
        rusty_erasure_core::raid::xor_gen(&data, &mut xor).unwrap();
        for kernels in Kernels::all_available() {
            let mut parity = [Buffer::dirty(1, 4096), Buffer::dirty(2, 4096)];
            kernels.encode(&data, &mut slices_mut(&mut parity));
            parity[0].expect(&p, kernels.name());
            parity[1].expect(&q, kernels.name());
            kernels.encode(&data, &mut slices_mut(&mut parity[..1]));
            parity[0].expect(&xor, kernels.name());
        }
    }
}

/// `into` += `factor` * `from`.
fn mul_add_of_another_author(factor: u8, from: &[u8], into: &mut [u8]) {
    let mut table = [0; rusty_erasure_core::tables::TABLE_BYTES];
    rusty_erasure_core::tables::mul_table32(factor, &mut table);
    rusty_erasure_core::kernel::vect_mad(into, &table, from).unwrap();
}

#[test]
fn products_of_another_author() {
    let (from, into) = (random_bytes(3, 1024), random_bytes(4, 1024));
    for factor in 0..=255 {
        let mut expected = into.clone();
        mul_add_of_another_author(factor, &from, &mut expected);
        for kernels in Kernels::all_available() {
            let mut result = Buffer::new(0, &into);
            kernels.mul_add(factor, &from, result.bytes_mut());
            result.expect(&expected, &format!("{}, factor {factor}", kernels.name()));
        }
    }
}

#[test]
fn sums_of_another_author() {
    for m in 3..=PARITY_CHUNKS_MAX {
        let data = random_data(8, CHUNKS_MAX - m, 1024);
        let mut expected = vec![vec![0; 1024]; m];
        for (chunk, factors) in data.iter().zip(&FACTORS) {
            for (sum, factor) in expected.iter_mut().zip(factors) {
                mul_add_of_another_author(*factor, chunk.bytes(), sum);
            }
        }
        for kernels in Kernels::all_available() {
            let mut parity: Vec<Buffer> = (0..m).map(|skew| Buffer::dirty(skew, 1024)).collect();
            kernels.encode(&slices(&data), &mut slices_mut(&mut parity));
            for (chunk, expected) in parity.iter().zip(&expected) {
                chunk.expect(expected, &format!("{} of m = {m}", kernels.name()));
            }
        }
    }
}

/// One chunk more than a stripe can lose is lost, too.
#[test]
fn all_losses_of_small_stripes() {
    for m in 0..=PARITY_CHUNKS_MAX {
        for k in 1..=12 - m {
            let stripe = stripe_by_definition(99, k, m, LENGTH_UNIT);
            let mut recovered = 0;
            for mut lost in subsets(k + m, m + 1) {
                if lost.len() > m {
                    check_refusal(&stripe, k, &lost);
                    continue;
                }
                check_recovery(&stripe, k, &lost, &lost);
                recovered += 1;
                if lost.len() == 2 {
                    // The other stays lost; and the order of outputs is the caller's.
                    check_recovery(&stripe, k, &lost, &lost[..1]);
                    check_recovery(&stripe, k, &lost, &lost[1..]);
                    lost.reverse();
                    check_recovery(&stripe, k, &lost, &lost);
                }
            }
            assert_eq!(recovered, subsets(k + m, m).count());
        }
    }
}

/// All ways to pick up to `most` of `count`.
fn subsets(count: usize, most: usize) -> impl Iterator<Item = Vec<usize>> {
    (0..1_u32 << count)
        .filter(move |bits| bits.count_ones() as usize <= most)
        .map(move |bits| (0..count).filter(|id| bits >> id & 1 == 1).collect())
}

fn check_refusal(stripe: &[Vec<u8>], k: usize, lost: &[usize]) {
    let m = stripe.len() - k;
    let present: Vec<(usize, &[u8])> =
        stripe.iter().map(Vec::as_slice).enumerate().filter(|(id, _)| !lost.contains(id)).collect();
    let untouched = vec![GUARD; LENGTH_UNIT];
    for id in lost {
        let mut output = untouched.clone();
        let kernels = Kernels::detect();
        let result = kernels.reconstruct(k, m, &present, &mut [(*id, &mut output)]);
        assert_eq!(result, Err(NotEnough), "chunk {id} of {k}+{m}, lost {lost:?}");
        assert_eq!(output, untouched);
    }
}

#[test]
fn nothing_missing_needs_nothing() {
    assert_eq!(Kernels::detect().reconstruct(4, 2, &[], &mut []), Ok(()));
}

#[test]
fn a_fast_one_is_detected() {
    let available = Kernels::all_available();
    assert_eq!(available[0].name(), "scalar");
    // Which of the others it is depends on the CPU.
    let detected = Kernels::detect();
    assert!(available.contains(&detected));
    assert_eq!(detected.name() == "scalar", available.len() == 1);
}

#[test]
#[should_panic(expected = "whole units")]
fn lengths_are_whole_units() {
    Kernels::detect().xor_into(&[0; 500], &mut [0; 500]);
}

#[test]
#[should_panic(expected = "in one call")]
fn lengths_are_equal() {
    Kernels::detect().encode(&[&[0; 1024], &[0; 512]], &mut [&mut [0; 1024]]);
}

#[test]
#[should_panic(expected = "given twice")]
fn present_chunks_are_different() {
    let chunk = [0; 512];
    let present = [(0, &chunk[..]), (0, &chunk[..])];
    let _ = Kernels::detect().reconstruct(2, 1, &present, &mut [(1, &mut [0; 512])]);
}

#[test]
#[should_panic(expected = "is present")]
fn missing_chunks_are_not_present() {
    let chunk = [0; 512];
    let present = [(0, &chunk[..]), (1, &chunk[..])];
    let _ = Kernels::detect().reconstruct(2, 1, &present, &mut [(1, &mut [0; 512])]);
}

#[test]
#[should_panic(expected = "missing twice")]
fn missing_chunks_are_different() {
    let (mut first, mut second) = ([0; 512], [0; 512]);
    let chunk = [0; 512];
    let mut missing = [(1, &mut first[..]), (1, &mut second[..])];
    let _ = Kernels::detect().reconstruct(2, 2, &[(0, &chunk), (2, &chunk)], &mut missing);
}

#[test]
#[should_panic(expected = "stripe of 2+1")]
fn chunk_ids_are_of_the_stripe() {
    let chunk = [0; 512];
    let present = [(0, &chunk[..]), (1, &chunk[..])];
    let _ = Kernels::detect().reconstruct(2, 1, &present, &mut [(3, &mut [0; 512])]);
}
