//! The thick volumes of an array: one table, two slots, on every member.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{self, Header, Kind, Record, RecordError, Upgrade};
use crate::upgrade;

pub const VERSION: u16 = 1;
pub const SLOTS: u64 = 2;
/// Most volumes on one array.
pub const VOLUMES_MAX: usize = 256;
/// Most ranges one volume is made of.
pub const EXTENTS_MAX: usize = 24;
pub const NAME_BYTES: usize = 64;
/// Ranges are of whole stripes, and so of the smallest chunks.
pub const EXTENT_STEP: u64 = 16 << 10;

/// A range of the array's bytes.
#[derive(
    Clone,
    Copy,
    Debug,
    Default,
    PartialEq,
    Eq,
    FromBytes,
    IntoBytes,
    KnownLayout,
    Immutable,
    Unaligned,
)]
#[repr(C)]
pub struct StoredExtent {
    pub offset: U64,
    pub len: U64,
}

#[derive(Clone, Copy, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct StoredVolume {
    pub uuid: [u8; 16],
    pub name: [u8; NAME_BYTES],
    /// Size a guest sees; not more than its extents hold.
    pub bytes: U64,
    pub extent_count: U32,
    reserved_a: [u8; 4],
    pub extents: [StoredExtent; EXTENTS_MAX],
    reserved: [u8; 32],
}
const _: () = assert!(size_of::<StoredVolume>() == 512);

impl StoredVolume {
    /// All zero; the caller fills it in.
    pub fn blank() -> StoredVolume {
        zerocopy::FromZeros::new_zeroed()
    }

    pub fn name(&self) -> Result<&str, RecordError> {
        record::name_from(&self.name)
    }

    /// The entries in use.
    pub fn extents(&self) -> &[StoredExtent] {
        &self.extents[..(self.extent_count.get() as usize).min(EXTENTS_MAX)]
    }

    fn check(&self) -> Result<(), RecordError> {
        self.name()?;
        if self.extent_count.get() as usize > EXTENTS_MAX {
            return Err(RecordError::Field("extents of a volume"));
        }
        let mut held = 0u64;
        for extent in self.extents() {
            let end = extent.offset.get().checked_add(extent.len.get());
            held = held.checked_add(extent.len.get()).ok_or(RecordError::Field("extent"))?;
            let is_whole = [extent.offset, extent.len].map(|its| its.get() % EXTENT_STEP) == [0; 2];
            if end.is_none() || extent.len.get() == 0 || !is_whole {
                return Err(RecordError::Field("extent"));
            }
        }
        if self.bytes.get() > held || !self.bytes.get().is_multiple_of(512) {
            return Err(RecordError::Field("size of a volume"));
        }
        let reserved = self.reserved_a.iter().chain(&self.reserved);
        if reserved.into_iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes of a volume"));
        }
        Ok(())
    }
}

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct VolumeTable {
    pub header: Header,
    pub array: [u8; 16],
    pub volume_count: U32,
    reserved: [u8; 4012],
    pub volumes: [StoredVolume; VOLUMES_MAX],
}
const _: () = assert!(size_of::<VolumeTable>() == 4096 + 512 * VOLUMES_MAX);

impl VolumeTable {
    pub const BYTES: u64 = size_of::<VolumeTable>() as u64;

    /// A table without volumes; the caller seals it.
    pub fn empty(array: [u8; 16]) -> Box<VolumeTable> {
        let mut table: Box<VolumeTable> = <VolumeTable as zerocopy::FromZeros>::new_box_zeroed()
            .expect("memory for a small table");
        table.array = array;
        table
    }

    /// The entries in use.
    pub fn volumes(&self) -> &[StoredVolume] {
        &self.volumes[..(self.volume_count.get() as usize).min(VOLUMES_MAX)]
    }
}

impl Record for VolumeTable {
    const KIND: Kind = Kind::VolumeTable;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::VOLUME_TABLE_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        if self.volume_count.get() as usize > VOLUMES_MAX {
            return Err(RecordError::Field("volume count"));
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        let (mut extents, mut names) = (Vec::new(), std::collections::BTreeSet::new());
        for volume in self.volumes() {
            volume.check()?;
            if !names.insert(volume.name) || volume.name()?.is_empty() {
                return Err(RecordError::Field("name of a volume"));
            }
            extents.extend(volume.extents().iter().map(|e| (e.offset.get(), e.len.get())));
        }
        extents.sort_unstable();
        if extents.windows(2).any(|pair| pair[0].0 + pair[0].1 > pair[1].0) {
            return Err(RecordError::Field("extents of volumes overlap"));
        }
        Ok(())
    }
}
