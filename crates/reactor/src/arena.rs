//! The memory that a reactor's buffers are cut from: a few large mappings, on huge pages where the
//! system has them, so that a drive's queue can know them beforehand (`uring/ring.rs`).
//!
//! ```text
//! arena ── span, 16 MiB ── slab, 1 MiB ── piece, 4 KiB to 1 MiB, all of a slab of one size
//! ```
//!
//! Invariants:
//! - a span stays where it is while the arena lives;
//! - a slab is in `partial` of its size if it has both free and taken pieces, and in `empty` if it
//!   has no taken ones.

use std::cell::RefCell;
use std::ptr::NonNull;
use std::rc::Rc;

use crate::mapping::{Fill, Mapping, PageBytes};

/// Bytes of one mapping.
pub const SPAN_BYTES: usize = 16 << 20;
/// Most mappings of an arena: 256 MiB. What a reactor needs beyond that, it gets elsewhere.
pub const SPANS_MAX: u32 = 16;
/// Pieces of this many bytes, and all powers of two between, are given out.
pub(crate) const PIECE_BYTES_MIN: usize = 1 << PIECE_LOG2_MIN;
pub(crate) const PIECE_BYTES_MAX: usize = 1 << PIECE_LOG2_MAX;
const PIECE_LOG2_MIN: u32 = 12;
const PIECE_LOG2_MAX: u32 = 20;
const SIZES: usize = (PIECE_LOG2_MAX - PIECE_LOG2_MIN + 1) as usize;
const SLABS_PER_SPAN: usize = SPAN_BYTES / PIECE_BYTES_MAX;
/// Pieces of a slab as bits.
const WORDS: usize = PIECE_BYTES_MAX / PIECE_BYTES_MIN / u64::BITS as usize;
const _: () = assert!(SPANS_MAX <= u16::MAX as u32);

/// A place of its own in an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) start: NonNull<u8>,
    pub(crate) span: u16,
}

struct Slab {
    /// Of its pieces, as an index of `partial`.
    size: usize,
    free: [u64; WORDS],
    taken: usize,
}

#[derive(Default)]
struct Inner {
    spans: Vec<Mapping>,
    slabs: Vec<Slab>,
    empty: Vec<usize>,
    partial: [Vec<usize>; SIZES],
    /// The system has refused to give more.
    refused: bool,
}

/// Memory of one reactor. It grows by a span when it has to, and does not shrink.
#[derive(Default)]
pub struct Arena {
    inner: RefCell<Inner>,
}

impl Arena {
    /// With its first span already, where the system has memory for it.
    pub fn new() -> Rc<Arena> {
        let arena = Arena::default();
        arena.inner.borrow_mut().grow();
        Rc::new(arena)
    }

    /// Where a span is, and its length; `None`: there is none of this number yet.
    pub(crate) fn span(&self, index: usize) -> Option<(NonNull<u8>, usize)> {
        self.inner.borrow().spans.get(index).map(|span| (span.start(), span.len()))
    }

    pub fn page_bytes(&self) -> PageBytes {
        let inner = self.inner.borrow();
        let all = inner.spans.iter().map(Mapping::page_bytes);
        all.fold(PageBytes::default(), PageBytes::plus)
    }

    /// A piece of this size, a power of two; its content is whatever was there. `None`: the arena
    /// is full.
    pub(crate) fn take(&self, bytes: usize) -> Option<Piece> {
        self.inner.borrow_mut().take(size_of_pieces(bytes))
    }

    /// Takes back a piece that `take` gave for this size.
    pub(crate) fn give_back(&self, piece: Piece, bytes: usize) {
        self.inner.borrow_mut().give_back(piece, size_of_pieces(bytes));
    }

    #[cfg(test)]
    fn self_check(&self) {
        let inner = self.inner.borrow();
        for (index, slab) in inner.slabs.iter().enumerate() {
            let free: u32 = slab.free.iter().map(|word| word.count_ones()).sum();
            let is_empty = inner.empty.contains(&index);
            assert_eq!(is_empty, slab.taken == 0, "slab {index}");
            let listed = inner.partial.iter().map(|list| list.contains(&index)).enumerate();
            for (size, is_listed) in listed {
                let is_partial = slab.taken > 0 && free > 0 && slab.size == size;
                assert_eq!(is_listed, is_partial, "slab {index} of size {size}");
            }
            if !is_empty {
                assert_eq!(free as usize + slab.taken, pieces_of(slab.size), "slab {index}");
            }
        }
    }
}

/// 4096 bytes are size 0, 1 MiB is the last.
fn size_of_pieces(bytes: usize) -> usize {
    assert!(bytes.is_power_of_two(), "a piece of {bytes} bytes");
    assert!((PIECE_BYTES_MIN..=PIECE_BYTES_MAX).contains(&bytes), "a piece of {bytes} bytes");
    (bytes.trailing_zeros() - PIECE_LOG2_MIN) as usize
}

/// Of one slab.
fn pieces_of(size: usize) -> usize {
    PIECE_BYTES_MAX / bytes_of(size)
}

fn bytes_of(size: usize) -> usize {
    PIECE_BYTES_MIN << size
}

impl Slab {
    /// All of it free, in pieces of this size.
    fn cut(size: usize) -> Slab {
        let mut free = [0; WORDS];
        (0..pieces_of(size)).for_each(|piece| free[piece / 64] |= 1 << (piece % 64));
        Slab { size, free, taken: 0 }
    }

    fn is_full(&self) -> bool {
        self.taken == pieces_of(self.size)
    }
}

impl Inner {
    fn grow(&mut self) {
        if self.refused || self.spans.len() == SPANS_MAX as usize {
            return;
        }
        match Mapping::new(SPAN_BYTES, Fill::Now) {
            Ok(span) => self.spans.push(span),
            Err(_) => {
                self.refused = true;
                return;
            }
        }
        let first = self.slabs.len();
        self.slabs.extend((0..SLABS_PER_SPAN).map(|_| Slab::cut(0)));
        self.empty.extend((first..self.slabs.len()).rev());
    }

    fn take(&mut self, size: usize) -> Option<Piece> {
        if self.partial[size].is_empty() {
            if self.empty.is_empty() {
                self.grow();
            }
            let index = self.empty.pop()?;
            self.slabs[index] = Slab::cut(size);
            self.partial[size].push(index);
        }
        let index = *self.partial[size].last().expect("put there above, if there was none");
        let slab = &mut self.slabs[index];
        let word = slab.free.iter().position(|word| *word != 0).expect("a slab with a free piece");
        let bit = slab.free[word].trailing_zeros() as usize;
        slab.free[word] &= !(1 << bit);
        slab.taken += 1;
        if slab.is_full() {
            self.partial[size].pop();
        }
        let offset = index % SLABS_PER_SPAN * PIECE_BYTES_MAX + (word * 64 + bit) * bytes_of(size);
        let span = index / SLABS_PER_SPAN;
        // SAFETY: the slab is in this span, and the piece in the slab.
        let start = unsafe { self.spans[span].start().add(offset) };
        Some(Piece { start, span: u16::try_from(span).expect("below SPANS_MAX") })
    }

    fn give_back(&mut self, Piece { start, span }: Piece, size: usize) {
        let span = usize::from(span);
        let offset = start.addr().get() - self.spans[span].start().addr().get();
        let index = span * SLABS_PER_SPAN + offset / PIECE_BYTES_MAX;
        let piece = offset % PIECE_BYTES_MAX / bytes_of(size);
        let slab = &mut self.slabs[index];
        let bit = 1 << (piece % 64);
        assert!(slab.size == size, "a piece of another size");
        assert!(slab.free[piece / 64] & bit == 0, "a piece given back twice");
        let was_full = slab.is_full();
        slab.free[piece / 64] |= bit;
        slab.taken -= 1;
        match (was_full, slab.taken) {
            (true, 0) => self.empty.push(index),
            (true, _) => self.partial[size].push(index),
            (false, 0) => {
                self.partial[size].retain(|its| *its != index);
                self.empty.push(index);
            }
            (false, _) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    //! Goal: no two pieces share a byte, and all that is given back can be given out again.
    //! Method: pieces of drawn sizes, taken and given back in a drawn order.

    use std::collections::BTreeMap;

    use super::*;
    use crate::prng::Prng;

    #[test]
    fn pieces_never_overlap() {
        let arena = Arena::default();
        let mut prng = Prng::from_seed(11);
        let mut taken: BTreeMap<usize, (Piece, usize)> = BTreeMap::new();
        for round in 0..20_000 {
            // It fills up, then empties, then fills up again.
            let takes = if round / 5_000 % 2 == 0 { 3 } else { 1 };
            if taken.is_empty() || prng.chance(takes, 4) {
                let bytes = PIECE_BYTES_MIN << prng.index(SIZES);
                let Some(piece) = arena.take(bytes) else { continue };
                let start = piece.start.addr().get();
                assert!(start.is_multiple_of(bytes.min(PIECE_BYTES_MIN)));
                let before = taken.range(..start + bytes).next_back();
                assert!(before.is_none_or(|(at, (_, its))| at + its <= start));
                let (span, len) = arena.span(usize::from(piece.span)).unwrap();
                let end = span.addr().get() + len;
                assert!(start >= span.addr().get() && start + bytes <= end);
                taken.insert(start, (piece, bytes));
            } else {
                let nth = prng.index(taken.len());
                let start = *taken.keys().nth(nth).unwrap();
                let (piece, bytes) = taken.remove(&start).unwrap();
                arena.give_back(piece, bytes);
            }
            if round % 512 == 0 {
                arena.self_check();
            }
        }
        taken.into_values().for_each(|(piece, bytes)| arena.give_back(piece, bytes));
        arena.self_check();
        let slabs = arena.inner.borrow().slabs.len();
        assert_eq!(arena.inner.borrow().empty.len(), slabs);
    }

    #[test]
    fn a_full_arena_gives_nothing() {
        let arena = Arena::new();
        let pieces: Vec<Piece> = std::iter::from_fn(|| arena.take(PIECE_BYTES_MAX)).collect();
        assert_eq!(pieces.len(), SPANS_MAX as usize * SLABS_PER_SPAN);
        assert_eq!(arena.page_bytes().total(), u64::from(SPANS_MAX) * SPAN_BYTES as u64);
        assert_eq!(arena.take(PIECE_BYTES_MIN), None);
        arena.give_back(pieces[7], PIECE_BYTES_MAX);
        assert_eq!(arena.take(PIECE_BYTES_MIN).map(|piece| piece.start), Some(pieces[7].start));
    }

    #[test]
    #[should_panic(expected = "given back twice")]
    fn a_piece_is_given_back_once() {
        let arena = Arena::new();
        let _other = arena.take(8192);
        let piece = arena.take(8192).unwrap();
        arena.give_back(piece, 8192);
        arena.give_back(piece, 8192);
    }
}
