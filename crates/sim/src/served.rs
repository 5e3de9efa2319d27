//! Volumes as requests find them: the main one, which begins with the array, and others behind it,
//! which may be in several places.

use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::{Area, to_usize};
use ashlar_pool::pool::Pool;
use ashlar_pool::volume::Volume;

use crate::oracle::Oracle;

/// Of the volumes beside the main one.
pub const NAMES: [&str; 2] = ["extra", "second"];
/// The oracle keeps the bytes of each volume so far from those of the one before.
const BASE_STEP: u64 = 1 << 31;

/// A volume, where the oracle keeps what is known of it, and where it is in the array.
pub struct Served {
    pub volume: Volume,
    pub base: u64,
    /// In order, each with its place in the volume.
    places: Vec<(u64, Area)>,
}

impl Served {
    /// The main one is in one place.
    pub fn main(volume: &Volume) -> Served {
        assert!(volume.bytes() <= BASE_STEP);
        let whole = (0, Area { offset: 0, len: BASE_STEP });
        Served { volume: volume.clone(), base: 0, places: vec![whole] }
    }

    /// How long it is, as far as it was looked where that is: it may be growing.
    pub fn bytes(&self) -> u64 {
        let placed = self.places.iter().map(|(_, area)| area.len).sum();
        self.volume.bytes().min(placed)
    }

    /// The ranges of the array that a range of the volume stands in.
    pub fn ranges(&self, offset: u64, len: u64) -> impl Iterator<Item = Range<u64>> {
        self.places.iter().filter_map(move |(begin, area)| {
            let (first, last) = (offset.max(*begin), (offset + len).min(begin + area.len));
            let at = |byte: u64| area.offset + byte - begin;
            (first < last).then(|| at(first)..at(last))
        })
    }

    /// What of the volume stands in a range of the array: ranges of the volume.
    pub fn inside(&self, range: Range<u64>) -> impl Iterator<Item = Range<u64>> {
        let bytes = self.volume.bytes();
        self.places.iter().filter_map(move |(begin, area)| {
            let first = range.start.max(area.offset);
            let last = range.end.min(area.range().end);
            let at = |byte: u64| (begin + byte - area.offset).min(bytes);
            (first < last && at(first) < at(last)).then(|| at(first)..at(last))
        })
    }
}

/// One of them, or none by now.
#[derive(Default)]
struct Slot {
    served: RefCell<Option<Rc<Served>>>,
    users: Cell<usize>,
}

/// The volumes beside the main one.
#[derive(Default)]
pub struct Others {
    slots: [Slot; NAMES.len()],
}

impl Others {
    /// What a life finds.
    pub fn found(pool: &Pool, oracle: &mut Oracle) -> Others {
        let others = Others::default();
        (0..NAMES.len()).for_each(|index| others.look(index, pool, oracle));
        others
    }

    /// Looks where a volume is now. One that was not there before is zero.
    pub fn look(&self, index: usize, pool: &Pool, oracle: &mut Oracle) {
        let served = pool.volume(NAMES[index]).map(|volume| {
            let base = (index as u64 + 1) * BASE_STEP;
            oracle.holds(base..base + BASE_STEP, volume.uuid());
            let places = places(pool, volume.uuid());
            Rc::new(Served { volume, base, places })
        });
        *self.slots[index].served.borrow_mut() = served;
    }

    /// `None`: there is none, or it is about to go.
    pub fn get(&self, index: usize) -> Option<Rc<Served>> {
        self.slots[index].served.borrow().clone()
    }

    pub fn all(&self) -> impl Iterator<Item = Rc<Served>> {
        (0..NAMES.len()).filter_map(|index| self.get(index))
    }

    /// Nobody finds it any more.
    pub fn hide(&self, index: usize) {
        self.slots[index].served.take();
    }

    pub fn is_used(&self, index: usize) -> bool {
        self.slots[index].users.get() > 0
    }

    pub fn begin(&self, index: usize) -> Option<Rc<Served>> {
        let served = self.get(index)?;
        self.slots[index].users.update(|users| users + 1);
        Some(served)
    }

    pub fn end(&self, index: usize) {
        self.slots[index].users.update(|users| users - 1);
    }
}

/// Where a volume is, chunk by chunk: space is given out in whole ones.
fn places(pool: &Pool, uuid: [u8; 16]) -> Vec<(u64, Area)> {
    let len = u64::from(pool.array().layout().chunk_bytes);
    let mut places: Vec<(u64, Area)> = Vec::new();
    for offset in (0..pool.array().capacity()).step_by(to_usize(len)) {
        let Some((volume, begin)) = pool.volume_at(offset) else { continue };
        if volume.uuid() != uuid {
            continue;
        }
        match places.last_mut() {
            Some((last, area)) if area.range().end == offset && *last + area.len == begin => {
                area.len += len;
            }
            Some(_) | None => places.push((begin, Area { offset, len })),
        }
    }
    places.sort_unstable_by_key(|(begin, _)| *begin);
    places
}
