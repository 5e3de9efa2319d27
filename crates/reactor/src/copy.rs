//! A copy whose target will not be read soon: it goes past the caches, and leaves in them what is
//! in use.
//!
//! An ordinary store first fetches the line that it changes, so a large copy moves three bytes for
//! each one; a streaming store moves two (Intel 64 and IA-32 Architectures Optimization Reference
//! Manual, "Non-temporal Stores").

/// From this many bytes of one operation on: less may well be read again while it would still be
/// in a cache.
pub(crate) const STREAM_BYTES_MIN: usize = 16 << 10;

/// Copies `len` bytes, a part of `whole`.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, and they do not overlap.
pub(crate) unsafe fn copy_unread(from: *const u8, to: *mut u8, len: usize, whole: usize) {
    #[cfg(target_arch = "x86_64")]
    if whole >= STREAM_BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: as promised here; the processor has AVX.
        unsafe { stream_avx(from, to, len) };
        return;
    }
    // SAFETY: as promised here.
    unsafe { std::ptr::copy_nonoverlapping(from, to, len) };
}

/// # Safety
/// As [`copy_unread`], on a processor with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn stream_avx(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{_mm_sfence, _mm256_loadu_si256, _mm256_stream_si256};
    const STEP: usize = 32;
    // Two lines a round: each is written as a whole, one store after the other.
    const ROUND: usize = 4 * STEP;
    // Streaming stores go to aligned places only.
    let head = to.align_offset(STEP).min(len);
    let rounds = (len - head) / ROUND;
    let tail = head + rounds * ROUND;
    // SAFETY: `0..head`, the rounds and `tail..len` are `0..len`, which the caller vouches for.
    unsafe {
        std::ptr::copy_nonoverlapping(from, to, head);
        for round in 0..rounds {
            let at = head + round * ROUND;
            let read = |step: usize| _mm256_loadu_si256(from.add(at + step * STEP).cast());
            let loaded = [read(0), read(1), read(2), read(3)];
            for (step, value) in loaded.into_iter().enumerate() {
                _mm256_stream_si256(to.add(at + step * STEP).cast(), value);
            }
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
    }
    // Streaming stores are not ordered with others: whoever hears of this copy must find it.
    _mm_sfence();
}

#[cfg(test)]
mod tests {
    //! Goal: the same bytes as a plain copy, and no byte beside them.
    //! Method: both, at all alignments of source and target, with lengths around each limit.

    use super::*;
    use crate::prng::Prng;

    const GUARD: usize = 64;

    #[test]
    fn the_same_as_a_plain_copy() {
        let mut prng = Prng::from_seed(5);
        let room = STREAM_BYTES_MIN + 4 * GUARD + 512;
        let bytes: Vec<u8> = (0..room).map(|_| prng.next_u64().to_le_bytes()[0]).collect();
        let mut target = vec![0xAA; room];
        let limit = STREAM_BYTES_MIN;
        let lengths = [(0, limit), (1, limit), (4096, limit), (limit - 1, limit - 1)];
        let lengths = [&lengths[..], &[(limit, limit), (limit + 351, limit + 351)]].concat();
        for from in (0..32).chain([GUARD]) {
            for to in GUARD..GUARD + 32 {
                for &(len, whole) in &lengths {
                    target.fill(0xAA);
                    let (source, into) = (bytes[from..].as_ptr(), target[to..].as_mut_ptr());
                    // SAFETY: two vectors, both longer than any of these ranges.
                    unsafe { copy_unread(source, into, len, whole) };
                    assert!(target[to..to + len] == bytes[from..from + len], "{from} {to} {len}");
                    let beside = target[..to].iter().chain(&target[to + len..]);
                    assert!(beside.into_iter().all(|byte| *byte == 0xAA), "{from} {to} {len}");
                }
            }
        }
    }
}
