//! Copies of many bytes.
//!
//! The C library copies by `rep movsb` from 2 KiB on. Zen 3 and 4 do that some 25 times as slowly
//! where the target's place in its page is less than a line behind that of the source (source 0,
//! target 16; glibc, bug 30994): as where a guest reads into a buffer that is not aligned. Such a
//! copy is by vectors of our own.
//!
//! Where the target will not be read soon, past the caches: they keep what is in use. An ordinary
//! store first fetches the line that it changes, so a large copy moves three bytes for each one; a
//! streaming store moves two (Intel 64 and IA-32 Architectures Optimization Reference Manual,
//! "Non-temporal Stores").

/// With less, no C library takes `rep movsb` of itself.
#[cfg(any(target_arch = "x86_64", test))]
const VECTORS_BYTES_MIN: usize = 2 << 10;
/// From this many bytes of one operation on it streams: less may well be read again while it would
/// still be in a cache.
#[cfg(any(target_arch = "x86_64", test))]
const STREAM_BYTES_MIN: usize = 16 << 10;
#[cfg(target_arch = "x86_64")]
const LINE_BYTES: usize = 64;
#[cfg(any(target_arch = "x86_64", test))]
const PAGE_BYTES: usize = 4096;

/// Copies `len` bytes, as `std::ptr::copy` does.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes.
pub(crate) unsafe fn copy(from: *const u8, to: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= VECTORS_BYTES_MIN
        && (1..LINE_BYTES).contains(&(to.addr().wrapping_sub(from.addr()) % PAGE_BYTES))
        && from.addr().abs_diff(to.addr()) >= len
        && std::arch::is_x86_feature_detected!("avx")
    {
        // SAFETY: as promised here; they do not overlap; the processor has AVX.
        unsafe { copy_avx::<false>(from, to, len) };
        return;
    }
    // SAFETY: as promised here.
    unsafe { std::ptr::copy(from, to, len) };
}

/// Copies `len` bytes, a part of `whole`, that will not be read soon.
///
/// # Safety
/// `from` can be read and `to` written for `len` bytes, and they do not overlap.
#[cfg_attr(not(target_arch = "x86_64"), expect(unused_variables))]
pub(crate) unsafe fn copy_unread(from: *const u8, to: *mut u8, len: usize, whole: usize) {
    #[cfg(target_arch = "x86_64")]
    if whole >= STREAM_BYTES_MIN && std::arch::is_x86_feature_detected!("avx") {
        // SAFETY: as promised here; the processor has AVX.
        unsafe { copy_avx::<true>(from, to, len) };
        return;
    }
    // SAFETY: as promised here.
    unsafe { copy(from, to, len) };
}

/// # Safety
/// As [`copy_unread`], on a processor with AVX.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx")]
unsafe fn copy_avx<const STREAM: bool>(from: *const u8, to: *mut u8, len: usize) {
    use std::arch::x86_64::{
        _mm_sfence, _mm256_loadu_si256, _mm256_store_si256, _mm256_stream_si256,
    };
    const STEP: usize = 32;
    // Two lines a round: each is written as a whole, one store after the other.
    const ROUND: usize = 4 * STEP;
    // Streaming stores go to aligned places only, and others cost least there.
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
                let place = to.add(at + step * STEP).cast();
                match STREAM {
                    true => _mm256_stream_si256(place, value),
                    false => _mm256_store_si256(place, value),
                }
            }
        }
        std::ptr::copy_nonoverlapping(from.add(tail), to.add(tail), len - tail);
    }
    if STREAM {
        // They are not ordered with others: whoever hears of this copy must find it.
        _mm_sfence();
    }
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
        let room = PAGE_BYTES + STREAM_BYTES_MIN + 4 * GUARD + 512;
        let bytes: Vec<u8> = (0..room).map(|_| prng.next_u64().to_le_bytes()[0]).collect();
        let bytes = &bytes[bytes.as_ptr().align_offset(PAGE_BYTES)..];
        let mut target = vec![0xAA; room];
        let aligned = target.as_ptr().align_offset(PAGE_BYTES);
        let target = &mut target[aligned..];
        let (few, limit) = (VECTORS_BYTES_MIN, STREAM_BYTES_MIN);
        let lengths = [
            [(0, limit), (1, limit), (4096, limit), (few - 1, few)],
            [(few, few), (few + 351, few), (limit - 1, few), (limit + 351, limit)],
        ];
        // Targets are from less than a line behind their sources, by the place in a page, to more.
        for from in (0..32).chain([GUARD]) {
            for to in GUARD..GUARD + 32 {
                for &(len, whole) in lengths.as_flattened() {
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

    #[test]
    fn what_overlaps_is_moved() {
        let len = VECTORS_BYTES_MIN;
        let before: Vec<u8> = (0..251).cycle().take(2 * len).collect();
        let ends = [(0, 0), (0, 1), (1, 0), (0, len - 1), (len - 1, 0), (0, len), (len, 0)];
        for (from, to) in ends {
            let mut bytes = before.clone();
            let start = bytes.as_mut_ptr();
            // SAFETY: both ranges are in the vector.
            unsafe { copy(start.add(from), start.add(to), len) };
            assert!(bytes[to..to + len] == before[from..from + len], "{from} {to}");
        }
    }
}
