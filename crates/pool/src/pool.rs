//! Gives out volumes: the table of an array's thick volumes, and its free space.
//!
//! Invariants: no two volumes share a byte of the array; the table in memory is what the members
//! have durably; a volume never shows bytes of one that was deleted before, since its ranges are
//! zeroed before the table names them. (That is quick: the array forgets whole regions, and on a
//! new one there is nothing to do.)

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use ashlar_format::record::name_field;
use ashlar_format::units::Area;
use ashlar_format::volume_table::{
    EXTENT_STEP, EXTENTS_MAX, NAME_BYTES, StoredExtent, StoredVolume, VOLUMES_MAX, VolumeTable,
};
use ashlar_raid::array::Array;
use ashlar_raid::layout::CHUNK_BYTES_MIN;

use crate::error::PoolError;
use crate::thick::Thick;
use crate::volume::Volume;

const _: () = assert!(EXTENT_STEP == CHUNK_BYTES_MIN as u64);

pub struct Pool {
    array: Rc<Array>,
    volumes: RefCell<BTreeMap<String, Rc<Thick>>>,
    /// One change at a time.
    changing: Cell<bool>,
}

/// One change of the table is under way.
struct Changing<'a>(&'a Cell<bool>);

impl Drop for Changing<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

impl Pool {
    /// Reads the volume table of a started array.
    pub async fn open(array: Rc<Array>) -> Result<Rc<Pool>, PoolError> {
        let table = array.read_table().await?;
        let mut volumes = BTreeMap::new();
        for stored in table.volumes() {
            let name = stored.name().map_err(|error| PoolError::Name(error.to_string()))?;
            let extents = stored.extents().iter();
            let extents: Vec<Area> =
                extents.map(|e| Area { offset: e.offset.get(), len: e.len.get() }).collect();
            if extents.iter().any(|e| e.end().is_none_or(|end| end > array.capacity())) {
                return Err(PoolError::Name(format!("volume {name} is beyond the array")));
            }
            let thick = Thick {
                uuid: stored.uuid,
                name: name.to_owned(),
                array: array.clone(),
                bytes: Cell::new(stored.bytes.get()),
                extents: RefCell::new(extents),
            };
            volumes.insert(name.to_owned(), Rc::new(thick));
        }
        let changing = Cell::new(false);
        Ok(Rc::new(Pool { array, volumes: RefCell::new(volumes), changing }))
    }

    pub fn array(&self) -> &Rc<Array> {
        &self.array
    }

    /// All volumes, by name.
    pub fn volumes(&self) -> Vec<Volume> {
        self.volumes.borrow().values().cloned().map(Volume::Thick).collect()
    }

    pub fn volume(&self, name: &str) -> Option<Volume> {
        self.volumes.borrow().get(name).cloned().map(Volume::Thick)
    }

    /// The volume that has this byte of the array, and where in the volume it is.
    pub fn volume_at(&self, at: u64) -> Option<(Volume, u64)> {
        let volumes = self.volumes.borrow();
        volumes.values().find_map(|thick| Some((Volume::Thick(thick.clone()), thick.find(at)?)))
    }

    fn thick(&self, name: &str) -> Result<Rc<Thick>, PoolError> {
        let found = self.volumes.borrow().get(name).cloned();
        found.ok_or_else(|| PoolError::NotFound(name.into()))
    }

    /// Bytes not given to any volume.
    pub fn free_bytes(&self) -> u64 {
        self.free().iter().map(|area| area.len).sum()
    }

    /// Makes a volume of `bytes`, all zero. Durable when this returns.
    pub async fn create(
        &self,
        uuid: [u8; 16],
        name: &str,
        bytes: u64,
    ) -> Result<Volume, PoolError> {
        let _changing = self.begin()?;
        check_name(name)?;
        check_size(bytes)?;
        if self.volumes.borrow().contains_key(name) {
            return Err(PoolError::Exists(name.into()));
        }
        if self.volumes.borrow().len() >= VOLUMES_MAX {
            return Err(PoolError::TooMany(VOLUMES_MAX));
        }
        let extents = choose(&self.free(), self.whole_stripes(bytes))?;
        let extents = joined(&[], &extents)?;
        self.zero(&extents).await?;
        let thick = Rc::new(Thick {
            uuid,
            name: name.to_owned(),
            array: self.array.clone(),
            bytes: Cell::new(bytes),
            extents: RefCell::new(extents),
        });
        self.save(name, Some(stored_volume(&thick))).await?;
        self.volumes.borrow_mut().insert(name.to_owned(), thick.clone());
        Ok(Volume::Thick(thick))
    }

    /// Grows a volume; the new end reads as zeroes. Durable when this returns.
    pub async fn resize(&self, name: &str, bytes: u64) -> Result<(), PoolError> {
        let _changing = self.begin()?;
        check_size(bytes)?;
        let thick = self.thick(name)?;
        if bytes < thick.bytes.get() {
            return Err(PoolError::Shrink { has: thick.bytes.get() });
        }
        let had = thick.extents.borrow().clone();
        let held: u64 = had.iter().map(|area| area.len).sum();
        let more = self.whole_stripes(bytes).saturating_sub(held);
        let added = choose_behind(had.last(), &self.free(), more)?;
        let extents = joined(&had, &added)?;
        self.zero(&added).await?;
        self.save(name, Some(stored_as(&thick, bytes, &extents))).await?;
        *thick.extents.borrow_mut() = extents;
        thick.bytes.set(bytes);
        Ok(())
    }

    /// Deletes a volume; its space can be used again. Durable when this returns. The caller has
    /// made sure that nobody uses it; who does all the same gets errors.
    pub async fn delete(&self, name: &str) -> Result<(), PoolError> {
        let _changing = self.begin()?;
        let thick = self.thick(name)?;
        self.save(name, None).await?;
        self.volumes.borrow_mut().remove(name);
        // The volume is gone already. Whoever was left with it must never reach the bytes of the
        // next one there, nor read them on another reactor.
        self.array.hide();
        thick.bytes.set(0);
        // Space that cannot be given back now is zeroed before it is given out again.
        for extent in thick.extents.take() {
            if self.array.discard(extent.offset, extent.len).await.is_err() {
                break;
            }
        }
        Ok(())
    }

    fn begin(&self) -> Result<Changing<'_>, PoolError> {
        if self.changing.replace(true) {
            return Err(PoolError::Busy);
        }
        Ok(Changing(&self.changing))
    }

    /// Space is given out in whole stripes, so that volumes never share parity.
    fn whole_stripes(&self, bytes: u64) -> u64 {
        bytes.div_ceil(self.array.stripe_bytes()).saturating_mul(self.array.stripe_bytes())
    }

    async fn zero(&self, extents: &[Area]) -> Result<(), PoolError> {
        for extent in extents {
            self.array.write_zeroes(extent.offset, extent.len).await?;
        }
        Ok(self.array.flush().await?)
    }

    /// Ranges of the array that no volume has, in order.
    fn free(&self) -> Vec<Area> {
        let mut used: Vec<Area> = Vec::new();
        for thick in self.volumes.borrow().values() {
            used.extend(thick.extents.borrow().iter());
        }
        used.sort_unstable_by_key(|area| area.offset);
        let (mut free, mut at) = (Vec::new(), 0);
        let end = Area { offset: self.array.capacity(), len: 0 };
        for area in used.iter().chain([&end]) {
            if area.offset > at {
                free.push(Area { offset: at, len: area.offset - at });
            }
            at = area.range().end;
        }
        free
    }

    /// Makes the table durable with this volume, or without it. The volume itself changes after
    /// this: else somebody could write, and flush, where a crash takes the space back.
    async fn save(&self, name: &str, stored: Option<StoredVolume>) -> Result<(), PoolError> {
        let mut table = VolumeTable::empty(self.array.uuid());
        let all: Vec<StoredVolume> = {
            let volumes = self.volumes.borrow();
            let others = volumes.iter().filter(|(other, _)| *other != name);
            others.map(|(_, thick)| stored_volume(thick)).chain(stored).collect()
        };
        table.volume_count = u32::try_from(all.len()).expect("few volumes").into();
        table.volumes[..all.len()].copy_from_slice(&all);
        Ok(self.array.write_table(&table).await?)
    }
}

fn stored_volume(thick: &Thick) -> StoredVolume {
    stored_as(thick, thick.bytes.get(), &thick.extents.borrow())
}

/// With this size, and these ranges.
fn stored_as(thick: &Thick, bytes: u64, extents: &[Area]) -> StoredVolume {
    let mut stored = StoredVolume::blank();
    stored.uuid = thick.uuid;
    stored.name = name_field(&thick.name).expect("checked when it was made");
    stored.bytes = bytes.into();
    stored.extent_count = u32::try_from(extents.len()).expect("few extents").into();
    for (stored, area) in stored.extents.iter_mut().zip(extents) {
        *stored = StoredExtent { offset: area.offset.into(), len: area.len.into() };
    }
    stored
}

fn check_name(name: &str) -> Result<(), PoolError> {
    if name.is_empty() || name.len() > NAME_BYTES {
        return Err(PoolError::Name(format!("a name has 1 to {NAME_BYTES} bytes")));
    }
    Ok(())
}

fn check_size(bytes: u64) -> Result<(), PoolError> {
    if bytes == 0 || !bytes.is_multiple_of(512) { Err(PoolError::Size) } else { Ok(()) }
}

/// Takes `wanted` bytes from `free`: right behind `last` if they are there, so that a volume that
/// grows again and again stays in one piece.
fn choose_behind(last: Option<&Area>, free: &[Area], wanted: u64) -> Result<Vec<Area>, PoolError> {
    let is_behind = |area: &&Area| {
        last.is_some_and(|last| last.range().end == area.offset) && area.len >= wanted
    };
    match free.iter().find(is_behind) {
        Some(area) if wanted > 0 => Ok(vec![Area { offset: area.offset, len: wanted }]),
        Some(_) | None => choose(free, wanted),
    }
}

/// What a volume has with `added`. An error: a record has no room for so many ranges.
fn joined(had: &[Area], added: &[Area]) -> Result<Vec<Area>, PoolError> {
    let mut extents = had.to_vec();
    for area in added {
        match extents.last_mut() {
            Some(last) if last.range().end == area.offset => last.len += area.len,
            Some(_) | None => extents.push(*area),
        }
    }
    let wanted = added.iter().map(|area| area.len).sum();
    if extents.len() > EXTENTS_MAX { Err(PoolError::Fragmented { wanted }) } else { Ok(extents) }
}

/// Takes `wanted` bytes from `free`: the smallest range that holds it all, else the largest ones.
fn choose(free: &[Area], wanted: u64) -> Result<Vec<Area>, PoolError> {
    if wanted == 0 {
        return Ok(Vec::new());
    }
    let total: u64 = free.iter().map(|area| area.len).sum();
    if total < wanted {
        return Err(PoolError::Full { wanted, free: total });
    }
    let fits = free.iter().filter(|area| area.len >= wanted).min_by_key(|area| area.len);
    if let Some(area) = fits {
        return Ok(vec![Area { offset: area.offset, len: wanted }]);
    }
    let mut largest = free.to_vec();
    largest.sort_unstable_by_key(|area| std::cmp::Reverse(area.len));
    let (mut chosen, mut left) = (Vec::new(), wanted);
    for area in largest {
        if left == 0 {
            break;
        }
        let len = area.len.min(left);
        chosen.push(Area { offset: area.offset, len });
        left -= len;
    }
    Ok(chosen)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn area(offset: u64, len: u64) -> Area {
        Area { offset, len }
    }

    #[test]
    fn space_is_taken_where_it_fits_best() {
        let free = [area(0, 10), area(20, 4), area(30, 6)];
        assert_eq!(choose(&free, 5), Ok(vec![area(30, 5)]));
        assert_eq!(choose(&free, 4), Ok(vec![area(20, 4)]));
        assert_eq!(choose(&free, 14), Ok(vec![area(0, 10), area(30, 4)]));
        assert_eq!(choose(&free, 0), Ok(vec![]));
        assert_eq!(choose(&free, 21), Err(PoolError::Full { wanted: 21, free: 20 }));
        let behind = |end: u64, wanted| choose_behind(Some(&area(end - 1, 1)), &free, wanted);
        assert_eq!(behind(30, 4), Ok(vec![area(30, 4)]));
        assert_eq!(behind(30, 7), Ok(vec![area(0, 7)]));
        assert_eq!(behind(29, 4), Ok(vec![area(20, 4)]));
        assert_eq!(behind(30, 0), Ok(vec![]));
    }

    #[test]
    fn neighbours_are_one_range() {
        let had: Vec<Area> = (0..EXTENTS_MAX as u64).map(|at| area(10 * at, 5)).collect();
        let end = had.last().unwrap().range().end;
        let grown = joined(&had, &[area(end, 3)]).unwrap();
        assert_eq!((grown.len(), grown.last()), (EXTENTS_MAX, Some(&area(end - 5, 8))));
        let apart = [area(end + 1, 3)];
        assert_eq!(joined(&had, &apart), Err(PoolError::Fragmented { wanted: 3 }));
        assert_eq!(joined(&had[1..], &apart).map(|its| its.len()), Ok(EXTENTS_MAX));
        assert_eq!(joined(&[], &[]), Ok(vec![]));
    }
}
