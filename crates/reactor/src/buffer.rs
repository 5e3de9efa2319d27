//! Aligned, counted buffers, and guest memory seen through the same type.
//!
//! A [`Buffer`] is a counted view of a region. Regions are either engine memory, taken from a
//! [`BufferPool`] and given back to it when the last view is dropped, or foreign memory (a
//! guest's), which can change at any time and is therefore never lent out as a slice. A pool has
//! its memory from an [`Arena`] as long as that lasts, and else from the allocator.
//!
//! Invariants:
//! - a region outlives every view of it, so the kernel may write into a view that a slot holds;
//! - slices of engine memory are only lent while no operation is filling that region
//!   (`Region::filling`), so nobody reads bytes that the kernel is writing.

use std::alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::ptr::NonNull;
use std::rc::{Rc, Weak};

use smallvec::SmallVec;

use crate::arena::{Arena, PIECE_BYTES_MAX, PIECE_BYTES_MIN, Piece};
use crate::copy::copy;

/// Alignment of engine memory in bytes: enough for O_DIRECT on every drive with 4 KiB sectors.
pub const BUFFER_ALIGN: usize = 4096;
/// What direct I/O asks of memory addresses: multiples of so many bytes, or of a larger sector.
pub const DIRECT_ALIGN: usize = 512;
/// No page of any memory is smaller.
const PAGE_BYTES: usize = 4096;
/// Largest pooled buffer in bytes; one chunk of the largest size.
pub const BUFFER_BYTES_MAX: usize = 1 << 20;
/// Free buffers kept for each size; more are returned to where they came from.
const FREE_PER_CLASS_MAX: usize = 256;
/// Those of an arena keep it from giving out other sizes: no more than this many bytes of a size.
const ARENA_FREE_BYTES_MAX: usize = 16 << 20;
const CLASS_SMALLEST_LOG2: u32 = 12;
const CLASSES: usize = 9; // 4 KiB, 8 KiB, … 1 MiB
const _: () = assert!(BUFFER_BYTES_MAX == 1 << (CLASS_SMALLEST_LOG2 as usize + CLASSES - 1));
const _: () = assert!(BUFFER_BYTES_MAX == PIECE_BYTES_MAX);
const _: () = assert!(1 << CLASS_SMALLEST_LOG2 == PIECE_BYTES_MIN);

/// Where engine memory came from.
enum Origin {
    Allocator,
    Arena { arena: Rc<Arena>, span: u16 },
}

enum Owner {
    Pool {
        pool: Weak<BufferPool>,
        class: usize,
        origin: Origin,
    },
    /// Memory that acts as a drive.
    Drive {
        _keep: Rc<dyn Any>,
    },
    Foreign {
        _keep: Rc<dyn Any>,
    },
    /// Memory of another reactor, for one call.
    Lent {
        _keep: Rc<dyn Any>,
    },
}

/// A piece of memory that views are counted on.
struct Region {
    start: NonNull<u8>,
    len: usize,
    filling: Cell<u32>,
    owner: Owner,
}

impl Drop for Region {
    fn drop(&mut self) {
        match &self.owner {
            Owner::Pool { origin: Origin::Allocator, .. } => {
                // SAFETY: `start` came from `alloc_zeroed` with this layout in `allocate`, and the
                // region, its only owner, is being dropped.
                unsafe { dealloc(self.start.as_ptr(), region_layout(self.len)) }
            }
            Owner::Pool { origin: Origin::Arena { arena, span }, .. } => {
                arena.give_back(Piece { start: self.start, span: *span }, self.len);
            }
            Owner::Drive { .. } | Owner::Foreign { .. } | Owner::Lent { .. } => {}
        }
    }
}

fn region_layout(len: usize) -> Layout {
    Layout::from_size_align(len, BUFFER_ALIGN).expect("pool sizes are powers of two up to 1 MiB")
}

/// Bytes of memory that a buffer of `len` bytes takes.
pub const fn memory_of(len: usize) -> usize {
    let size = len.next_power_of_two();
    if size < PIECE_BYTES_MIN { PIECE_BYTES_MIN } else { size }
}

/// Free engine memory of one reactor, by power-of-two size.
#[derive(Default)]
pub struct BufferPool {
    free: RefCell<[Vec<Rc<Region>>; CLASSES]>,
    arena: Option<Rc<Arena>>,
}

impl BufferPool {
    /// One that has its memory from the allocator.
    pub fn new() -> Rc<BufferPool> {
        Rc::default()
    }

    pub fn on(arena: Rc<Arena>) -> Rc<BufferPool> {
        Rc::new(BufferPool { free: RefCell::default(), arena: Some(arena) })
    }

    /// A buffer of `len` bytes, aligned to [`BUFFER_ALIGN`]. Its content is whatever was there.
    pub fn take(self: &Rc<Self>, len: usize) -> Buffer {
        assert!(len > 0 && len <= BUFFER_BYTES_MAX, "buffer of {len} bytes");
        let size = memory_of(len);
        let class = (size.trailing_zeros() - CLASS_SMALLEST_LOG2) as usize;
        let pooled = self.free.borrow_mut()[class].pop();
        let region = pooled.unwrap_or_else(|| {
            let (start, origin) = self.take_from_arena(size).unwrap_or_else(|| allocate(size));
            let owner = Owner::Pool { pool: Rc::downgrade(self), class, origin };
            Rc::new(Region { start, len: size, filling: Cell::new(0), owner })
        });
        Buffer { start: region.start, len, region }
    }

    fn take_from_arena(&self, size: usize) -> Option<(NonNull<u8>, Origin)> {
        let arena = self.arena.as_ref()?;
        let Piece { start, span } = arena.take(size)?;
        Some((start, Origin::Arena { arena: arena.clone(), span }))
    }

    /// How many free buffers of a size to keep.
    fn kept(&self, class: usize) -> usize {
        match self.arena {
            None => FREE_PER_CLASS_MAX,
            Some(_) => FREE_PER_CLASS_MAX.min(ARENA_FREE_BYTES_MAX >> CLASS_SMALLEST_LOG2 >> class),
        }
    }
}

fn allocate(size: usize) -> (NonNull<u8>, Origin) {
    let layout = region_layout(size);
    // SAFETY: the layout has a size above zero.
    let start = unsafe { alloc_zeroed(layout) };
    let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
    (start, Origin::Allocator)
}

/// All of the memory under a view.
pub(crate) struct Memory<'a> {
    /// No other memory has it while this lives, or a [`MemoryId`] of it.
    pub(crate) key: usize,
    pub(crate) start: NonNull<u8>,
    pub(crate) len: usize,
    region: &'a Rc<Region>,
}

impl Memory<'_> {
    pub(crate) fn id(&self) -> MemoryId {
        MemoryId(Rc::downgrade(self.region))
    }
}

/// Remembers memory without keeping it.
pub(crate) struct MemoryId(Weak<Region>);

impl MemoryId {
    pub(crate) fn is_gone(&self) -> bool {
        self.0.strong_count() == 0
    }
}

/// A counted view of memory. Cloning shares the memory, it does not copy it.
#[derive(Clone)]
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    region: Rc<Region>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if Rc::strong_count(&self.region) > 1 {
            return;
        }
        if let Owner::Pool { pool, class, .. } = &self.region.owner
            && let Some(pool) = pool.upgrade()
        {
            let free = &mut pool.free.borrow_mut()[*class];
            if free.len() < pool.kept(*class) {
                free.push(self.region.clone());
            }
        }
    }
}

impl Buffer {
    /// A view of memory that this process does not own alone, such as a guest's.
    ///
    /// # Safety
    /// `start..start + len` must stay mapped, readable and writable, while `keep` lives.
    pub unsafe fn foreign(start: NonNull<u8>, len: usize, keep: Rc<dyn Any>) -> Buffer {
        let owner = Owner::Foreign { _keep: keep };
        let region = Rc::new(Region { start, len, filling: Cell::new(0), owner });
        Buffer { start, len, region }
    }

    /// A view of memory that acts as a drive. What is written there later, it shows.
    ///
    /// # Safety
    /// As [`Buffer::foreign`]; and no other thread writes there.
    pub(crate) unsafe fn of_drive(start: NonNull<u8>, len: usize, keep: Rc<dyn Any>) -> Buffer {
        let owner = Owner::Drive { _keep: keep };
        let region = Rc::new(Region { start, len, filling: Cell::new(0), owner });
        Buffer { start, len, region }
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// The span of its pool's arena that it lies in; `None`: in none.
    pub(crate) fn span(&self) -> Option<u16> {
        match &self.region.owner {
            Owner::Pool { origin: Origin::Arena { span, .. }, .. } => Some(*span),
            Owner::Pool { origin: Origin::Allocator, .. }
            | Owner::Drive { .. }
            | Owner::Foreign { .. }
            | Owner::Lent { .. } => None,
        }
    }

    /// Whether the bytes can change under us (memory of a guest, or of another reactor).
    pub fn is_foreign(&self) -> bool {
        matches!(self.region.owner, Owner::Foreign { .. } | Owner::Lent { .. })
    }

    /// Whether `bytes` may be asked for: nobody else changes any of the memory.
    pub fn is_stable(&self) -> bool {
        !self.is_foreign() && self.region.filling.get() == 0
    }

    /// A view of a part of this view. Panics if the range is outside it.
    pub fn slice(&self, range: Range<usize>) -> Buffer {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        // SAFETY: the range is inside this view, which is inside the region.
        let start = unsafe { self.start.add(range.start) };
        Buffer { start, len: range.len(), region: self.region.clone() }
    }

    /// Copies the bytes where they would keep more engine memory than [`memory_of`] says.
    pub fn trim(&mut self) {
        let Owner::Pool { pool, .. } = &self.region.owner else { return };
        let is_large = self.region.len > memory_of(self.len);
        let Some(pool) = pool.upgrade().filter(|_| is_large) else { return };
        let own = pool.take(self.len);
        own.copy_from(self);
        *self = own;
    }

    /// The bytes, of engine memory that no operation is filling.
    pub fn bytes(&self) -> &[u8] {
        assert!(!self.is_foreign(), "guest memory has no stable bytes");
        assert!(self.region.filling.get() == 0, "an operation is filling this buffer");
        // SAFETY: engine memory, inside a live region; the assertion above, kept by `Slots`
        // through `fill_started` and `fill_ended`, excludes the kernel, and views of it live on
        // one thread whose code takes `bytes_mut` only of buffers that it has just made.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// The bytes, to be changed. The caller holds the only view that anyone will use meanwhile.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(!self.is_foreign(), "guest memory has no stable bytes");
        assert!(self.region.filling.get() == 0, "an operation is filling this buffer");
        // SAFETY: as in `bytes`; `&mut self` and the rule in the doc comment exclude other views.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }

    /// Copies `from` here. Works on guest memory too; both must have one length.
    pub fn copy_from(&self, from: &Buffer) {
        assert!(self.len == from.len, "copy of {} bytes into {}", from.len, self.len);
        // SAFETY: both ranges are mapped while their views live. A guest that races with this copy
        // can only make its own bytes a mixture.
        unsafe { copy(from.start.as_ptr(), self.start.as_ptr(), self.len) }
    }

    /// Copies a slice of the same length here.
    pub fn copy_from_slice(&self, from: &[u8]) {
        assert!(self.len == from.len(), "copy of {} bytes into {}", from.len(), self.len);
        // SAFETY: as in `copy_from`.
        unsafe { copy(from.as_ptr(), self.start.as_ptr(), self.len) }
    }

    /// Copies the bytes out to a slice of the same length.
    pub fn copy_to_slice(&self, to: &mut [u8]) {
        assert!(self.len == to.len(), "copy of {} bytes into {}", self.len, to.len());
        // SAFETY: as in `copy_from`.
        unsafe { copy(self.start.as_ptr(), to.as_mut_ptr(), self.len) }
    }

    /// Copies the bytes to the end of a vector.
    pub fn append_to(&self, to: &mut Vec<u8>) {
        to.reserve(self.len);
        let end = to.len();
        // SAFETY: as in `copy_from`; there is room for them behind the end.
        unsafe {
            copy(self.start.as_ptr(), to.as_mut_ptr().add(end), self.len);
            to.set_len(end + self.len);
        }
    }

    pub fn fill_zero(&self) {
        // SAFETY: as in `copy_from`.
        unsafe { std::ptr::write_bytes(self.start.as_ptr(), 0, self.len) }
    }

    /// Reads a byte of each of its pages. Where one is not there, this is where it is missed.
    pub fn touch(&self) {
        let Some(last) = self.len.checked_sub(1) else { return };
        for at in (0..last).step_by(PAGE_BYTES).chain([last]) {
            // SAFETY: inside of the view, which keeps the region; whatever changes the byte at the
            // same time, nobody looks at it.
            let _ = unsafe { self.start.add(at).read_volatile() };
        }
    }

    /// The memory that this is a view of.
    pub(crate) fn memory(&self) -> Memory<'_> {
        let key = Rc::as_ptr(&self.region).addr();
        Memory { key, start: self.region.start, len: self.region.len, region: &self.region }
    }

    pub(crate) fn fill_started(&self) {
        self.region.filling.set(self.region.filling.get() + 1);
    }

    pub(crate) fn fill_ended(&self) {
        self.region.filling.set(self.region.filling.get() - 1);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Buffer({} bytes)", self.len)
    }
}

/// Pieces of memory that one operation fills or empties, in order.
#[derive(Debug, Default)]
pub struct Buffers {
    pieces: SmallVec<[Buffer; 2]>,
    len: usize,
}

impl Clone for Buffers {
    fn clone(&self) -> Buffers {
        // Nearly always one: a list is cloned more slowly than what is in it.
        match self.pieces() {
            [one] => one.clone().into(),
            all => Buffers { pieces: all.into(), len: self.len },
        }
    }
}

impl From<Buffer> for Buffers {
    fn from(buffer: Buffer) -> Buffers {
        let mut buffers = Buffers::default();
        buffers.push(buffer);
        buffers
    }
}

/// Where memory of one reactor is, for another one.
pub(crate) struct Lent(SmallVec<[Span; 2]>);

struct Span {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address and a length; what may be done with them says who adopts it.
unsafe impl Send for Span {}

impl Lent {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Views of that memory.
    ///
    /// # Safety
    /// Whoever lent it keeps it, and asks for no slices of it, until `keep` has been dropped.
    pub(crate) unsafe fn adopt(self, keep: Rc<dyn Any>) -> Buffers {
        let mut buffers = Buffers::default();
        for Span { start, len } in self.0 {
            let owner = Owner::Lent { _keep: keep.clone() };
            let region = Rc::new(Region { start, len, filling: Cell::new(0), owner });
            buffers.push(Buffer { start, len, region });
        }
        buffers
    }
}

impl Buffers {
    /// For another reactor; see [`Lent::adopt`].
    pub(crate) fn lend(&self) -> Lent {
        let span = |piece: &Buffer| Span { start: piece.start, len: piece.len };
        Lent(self.pieces.iter().map(span).collect())
    }

    pub fn push(&mut self, piece: Buffer) {
        if !piece.is_empty() {
            self.len += piece.len();
            self.pieces.push(piece);
        }
    }

    /// The pieces of another one, after these.
    pub fn append(&mut self, other: &Buffers) {
        self.pieces.extend(other.pieces.iter().cloned());
        self.len += other.len;
    }

    pub fn pieces(&self) -> &[Buffer] {
        &self.pieces
    }

    /// Total length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// A view of a byte range of the whole. Panics if the range is outside it.
    pub fn slice(&self, range: Range<usize>) -> Buffers {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {}", self.len);
        if range.len() == self.len {
            return self.clone();
        }
        let mut out = Buffers::default();
        let mut at = 0;
        for piece in &self.pieces {
            let from = range.start.clamp(at, at + piece.len());
            let to = range.end.clamp(at, at + piece.len());
            if from < to {
                out.push(piece.slice(from - at..to - at));
            }
            at += piece.len();
        }
        out
    }

    /// Copies all of `from` over all of this; both must have one length.
    pub fn copy_from(&self, from: &Buffers) {
        assert!(self.len == from.len, "copy of {} bytes into {}", from.len, self.len);
        let mut at = 0;
        for piece in &self.pieces {
            let mut done = 0;
            for source in &from.slice(at..at + piece.len()).pieces {
                piece.slice(done..done + source.len()).copy_from(source);
                done += source.len();
            }
            at += piece.len();
        }
    }

    /// Copies everything out to a slice of the same length.
    pub fn copy_to_slice(&self, to: &mut [u8]) {
        assert!(self.len == to.len());
        let mut at = 0;
        for piece in &self.pieces {
            piece.copy_to_slice(&mut to[at..at + piece.len()]);
            at += piece.len();
        }
    }

    /// Copies a slice of the same length here.
    pub fn copy_from_slice(&self, from: &[u8]) {
        assert!(self.len == from.len());
        let mut at = 0;
        for piece in &self.pieces {
            piece.copy_from_slice(&from[at..at + piece.len()]);
            at += piece.len();
        }
    }

    pub fn fill_zero(&self) {
        self.pieces.iter().for_each(Buffer::fill_zero);
    }

    /// See [`Buffer::touch`].
    pub fn touch(&self) {
        self.pieces.iter().for_each(Buffer::touch);
    }

    /// Whether address and length of every piece are multiples of `align` bytes.
    pub fn is_aligned(&self, align: usize) -> bool {
        self.pieces.iter().all(|p| (p.as_ptr().addr() | p.len()).is_multiple_of(align))
    }

    /// Whether both have a byte of memory in common.
    pub(crate) fn overlaps(&self, other: &Buffers) -> bool {
        let ends = |piece: &Buffer| (piece.as_ptr().addr(), piece.as_ptr().addr() + piece.len);
        self.pieces.iter().map(ends).any(|(start, end)| {
            other.pieces.iter().map(ends).any(|(its, its_end)| start < its_end && its < end)
        })
    }

    pub(crate) fn fill_started(&self) {
        self.pieces.iter().for_each(Buffer::fill_started);
    }

    pub(crate) fn fill_ended(&self) {
        self.pieces.iter().for_each(Buffer::fill_ended);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dropped_buffer_is_taken_again() {
        let pool = BufferPool::new();
        let first = pool.take(4096);
        let place = first.as_ptr();
        let view = first.slice(512..1024);
        drop(first);
        assert_ne!(pool.take(4096).as_ptr(), place, "a view still holds it");
        drop(view);
        let again = [pool.take(4096), pool.take(4096)];
        assert!(again.iter().any(|buffer| buffer.as_ptr() == place));
    }

    #[test]
    fn a_pool_outlasts_its_arena() {
        let arena = Arena::new();
        let pool = BufferPool::on(arena.clone());
        let all: Vec<Buffer> = (0..300).map(|_| pool.take(BUFFER_BYTES_MAX)).collect();
        let spanned = all.iter().filter(|buffer| buffer.span().is_some()).count();
        assert_eq!((spanned, all[0].span(), all[299].span()), (256, Some(0), None));
        let place = |buffer: &Buffer| buffer.as_ptr().addr();
        assert!(all.iter().all(|buffer| place(buffer).is_multiple_of(BUFFER_ALIGN)));
        drop(all);
        // Few free ones of a size are kept from the other sizes.
        assert!(pool.take(4096).span().is_some());
        // A buffer keeps its memory, whatever becomes of the pool and of the arena's other users.
        let last = pool.take(8192);
        drop((pool, arena));
        last.copy_from_slice(&[7; 8192]);
        assert_eq!(last.slice(4096..4097).bytes(), [7]);
    }

    #[test]
    fn slices_cross_pieces() {
        let pool = BufferPool::new();
        let mut all = Buffers::default();
        for value in [1u8, 2, 3] {
            let piece = pool.take(512);
            piece.copy_from_slice(&[value; 512]);
            all.push(piece);
        }
        let middle = all.slice(500..1030);
        let mut out = vec![0; 530];
        middle.copy_to_slice(&mut out);
        assert_eq!((out[0], out[11], out[12], out[523], out[524]), (1, 1, 2, 2, 3));
        let copy = Buffers::from(pool.take(530));
        copy.copy_from(&middle);
        let mut copied = vec![0; 530];
        copy.copy_to_slice(&mut copied);
        assert_eq!(out, copied);
    }

    #[test]
    #[should_panic(expected = "filling")]
    fn bytes_being_filled_are_not_lent() {
        let buffer = BufferPool::new().take(512);
        buffer.fill_started();
        let _ = buffer.bytes();
    }
}
