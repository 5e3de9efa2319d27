//! Where a command's data is, told by physical region pages (Base 4.1.1).
//!
//! Memory of the engine is mapped for the function the first time it is met, and stays so while it
//! lives: then a command costs look-ups only. What cannot be told by pages, or not be mapped, goes
//! through memory that always is (it "bounces"). So does memory of guests: its file may be given
//! other pages at any time (a balloon takes some out, and the guest uses them again), and a mapping
//! leads to the old ones.
//!
//! Invariant: a page is told to the function only while its memory lives: the operation that the
//! command is for has views of it.

use std::collections::BTreeMap;
use std::ops::{Bound, Range};

use super::bus::Bus;
use super::command::PAGE;
use crate::buffer::{Buffer, Buffers, MemoryId};

/// Memory is mapped in pieces of this size: pinning much of it at once would take too long.
const WINDOW_BYTES: usize = 8 << 20;
/// Mappings of memory that is gone are looked for when there are this many more than after the
/// last time.
const PURGE_AFTER: usize = 1024;

struct Window {
    memory: MemoryId,
    at: u64,
    len: usize,
}

/// Memory that the function can reach.
#[derive(Default)]
pub struct Windows {
    /// By memory and index in it.
    known: BTreeMap<(usize, usize), Window>,
    purge_at: usize,
}

impl Windows {
    /// Where the function finds the beginning of `start..start + len`, and how much follows there.
    /// `None`: nowhere.
    fn find(&mut self, bus: &mut dyn Bus, view: &Buffer, offset: usize) -> Option<(u64, usize)> {
        let memory = view.memory();
        let start = memory.start.as_ptr().addr();
        if !start.is_multiple_of(PAGE) || view.is_foreign() {
            return None;
        }
        let from = view.as_ptr().addr() + offset - start;
        let index = from / WINDOW_BYTES;
        let inside = from - index * WINDOW_BYTES;
        if let Some(window) = self.known.get(&(memory.key, index)) {
            return (inside < window.len).then(|| (window.at + inside as u64, window.len - inside));
        }
        // Only whole pages of the memory itself: what follows belongs to someone else.
        let whole = memory.len / PAGE * PAGE;
        let first = index * WINDOW_BYTES;
        let len = whole.saturating_sub(first).min(WINDOW_BYTES);
        if inside >= len {
            return None;
        }
        if self.known.len() >= self.purge_at {
            self.purge(bus);
        }
        // SAFETY: whole pages of a live region. When it is gone, no command names them any more,
        // and `purge` takes them away.
        let at = unsafe { bus.map(memory.start.add(first), len) }.ok()?;
        let window = Window { memory: memory.id(), at, len };
        self.known.insert((memory.key, index), window);
        Some((at + inside as u64, len - inside))
    }

    /// Whether there is a mapping of memory that is gone. Looks once at each memory, not at each
    /// of its windows.
    pub fn has_dead(&self) -> bool {
        let mut next = self.known.range(..).next();
        while let Some(((key, _), window)) = next {
            if window.memory.is_gone() {
                return true;
            }
            let after = (Bound::Excluded((*key, usize::MAX)), Bound::Unbounded);
            next = self.known.range(after).next();
        }
        false
    }

    /// Takes mappings of memory away that is gone.
    pub fn purge(&mut self, bus: &mut dyn Bus) {
        // One that cannot be taken away stays: its place must not be given to another.
        self.known.retain(|_, window| {
            !window.memory.is_gone() || bus.unmap(window.at, window.len).is_err()
        });
        self.purge_at = self.known.len() + PURGE_AFTER;
    }

    /// Takes all mappings away: the function reaches none of that memory any more. False: it may.
    #[must_use]
    pub fn close(&mut self, bus: &mut dyn Bus) -> bool {
        self.known.retain(|_, window| bus.unmap(window.at, window.len).is_err());
        self.known.is_empty()
    }
}

/// Calls `entry` with each page of `range` of `data`, in order: the first may begin anywhere in its
/// page. False: it cannot be told so.
pub fn pages(
    windows: &mut Windows,
    bus: &mut dyn Bus,
    data: &Buffers,
    range: Range<usize>,
    mut entry: impl FnMut(u64),
) -> bool {
    let mut piece_start = 0;
    for piece in data.pieces() {
        let from = range.start.max(piece_start);
        let to = range.end.min(piece_start + piece.len());
        let (mut offset, end) = (from.wrapping_sub(piece_start), to.wrapping_sub(piece_start));
        if from < to {
            let address = piece.as_ptr().addr() + offset;
            let (begins, ends) = (address % PAGE, (address + (to - from)) % PAGE);
            let fits = (from == range.start || begins == 0) && (to == range.end || ends == 0);
            if !fits || !begins.is_multiple_of(4) {
                return false;
            }
            while offset < end {
                let Some((at, follows)) = windows.find(bus, piece, offset) else { return false };
                let run = follows.min(end - offset);
                let mut done = 0;
                while done < run {
                    let at = at + done as u64;
                    entry(at);
                    done += PAGE - usize::try_from(at % PAGE as u64).expect("below a page");
                }
                offset += run;
            }
        }
        piece_start += piece.len();
    }
    true
}

#[cfg(test)]
mod tests {
    //! Goal: pages are told as Base 4.1.1 wants them, or not at all.
    //! Method: buffers of many shapes, on a bus that maps at made-up places.

    use super::super::model::Model;
    use super::*;
    use crate::buffer::BufferPool;

    /// Pages of `range`, or `None` if it has to bounce.
    fn told(data: &Buffers, range: Range<usize>) -> Option<Vec<u64>> {
        let mut bus = Model::default().bus();
        let mut found = Vec::new();
        let told = pages(&mut Windows::default(), bus.as_mut(), data, range, |at| found.push(at));
        told.then_some(found)
    }

    #[test]
    fn one_piece_anywhere_in_a_page() {
        let buffer = BufferPool::new().take(4 * PAGE);
        let whole = told(&buffer.clone().into(), 0..4 * PAGE).unwrap();
        let step = PAGE as u64;
        let base = whole[0];
        assert_eq!(whole, [base, base + step, base + 2 * step, base + 3 * step]);
        let part = Buffers::from(buffer.slice(512..2 * PAGE + 512));
        let offsets = |range| -> Vec<u64> {
            let found = told(&part, range).unwrap();
            found.iter().map(|at| at % (4 * step)).collect()
        };
        let base = base % (4 * step);
        let at = |offset: u64| (base + offset) % (4 * step);
        assert_eq!(offsets(0..2 * PAGE), [at(512), at(step), at(2 * step)]);
        assert_eq!(offsets(0..512), [at(512)]);
        assert_eq!(offsets(512..PAGE), [at(1024), at(step)]);
    }

    #[test]
    fn pieces_that_do_not_meet_at_pages_bounce() {
        let pool = BufferPool::new();
        let mut data = Buffers::from(pool.take(2 * PAGE).slice(PAGE - 512..2 * PAGE));
        data.push(pool.take(PAGE));
        data.push(pool.take(PAGE).slice(0..512));
        assert_eq!(told(&data, 0..data.len()).unwrap().len(), 4);
        data.push(pool.take(PAGE));
        assert_eq!(told(&data, 0..data.len()), None);
        assert_eq!(told(&data, 0..data.len() - PAGE).unwrap().len(), 4);
        // Not to a multiple of four bytes: PRP cannot say it.
        assert_eq!(told(&pool.take(PAGE).slice(2..514).into(), 0..512), None);
    }

    #[test]
    fn memory_of_guests_bounces() {
        let own = BufferPool::new().take(4 * PAGE);
        let start = own.memory().start;
        // SAFETY: it lives as long as the view that is kept.
        let guests = unsafe { Buffer::foreign(start, 4 * PAGE, std::rc::Rc::new(own.clone())) };
        assert_eq!(told(&guests.into(), 0..PAGE), None);
        assert!(told(&own.into(), 0..PAGE).is_some());
    }

    #[test]
    fn memory_is_mapped_once_and_taken_away_when_it_is_gone() {
        let model = Model::default();
        let mut bus = model.bus();
        let mut windows = Windows::default();
        let pool = BufferPool::new();
        let buffer = pool.take(PAGE);
        let mut tell = |windows: &mut Windows, data: &Buffer| {
            assert!(pages(windows, bus.as_mut(), &data.clone().into(), 0..PAGE, |_| {}));
            model.mappings()
        };
        assert_eq!(tell(&mut windows, &buffer), 1);
        assert_eq!(tell(&mut windows, &buffer), 1);
        drop(buffer);
        // The pool kept it, and gives the same memory.
        let again = pool.take(PAGE);
        assert_eq!(tell(&mut windows, &again), 1);
        drop((again, pool));
        windows.purge(model.bus().as_mut());
        assert_eq!(model.mappings(), 0);
    }
}
