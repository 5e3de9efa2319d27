//! Planted bugs, to show that the simulator finds their kind. No hook in the engine: a saboteur
//! between engine and drive knows where things stand on a drive and does there what the bug would.

use ashlar_format::array_superblock::{ArraySuperblock, MemberState, StoredMember, StoredRange};
use ashlar_format::block_sums::{self, Home, SUMS_PER_SECTOR, SumSector, block_sum};
use ashlar_format::drive_label::MemberLayout;
use ashlar_format::journal_batch::JournalBatch;
use ashlar_format::lease::Lease;
use ashlar_format::record;
use ashlar_format::region_map::{MapKind, RegionMapPage};
use ashlar_format::units::{MemberIndex, StripeIndex};
use ashlar_raid::layout::Layout;
use ashlar_reactor::buffer::Buffers;
use clap::ValueEnum;
use zerocopy::IntoBytes;

use crate::drive::{ARRAY_UUID, SimDrive, ZEROES};
use crate::inspect;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Canary {
    /// The dirty map says always that all is clean: nothing is resynced after a crash.
    NoDirtyMap,
    /// The map of written regions is never written after creation.
    NoWrittenMap,
    /// What a member misses is never noted.
    NoMissedMap,
    /// The list of bad blocks is never written.
    NoBadBlocks,
    /// Flushes are never sent.
    NoFlush,
    /// A flush that failed is taken for one that did what it should.
    NeglectedFlush,
    /// Superblocks are never written after creation: nobody is fenced durably.
    NoFence,
    /// A superblock that says anew of a member that it is stale reaches a drive only with the next
    /// superblock there: whoever waits for the fence goes on too early.
    LateFence,
    /// Records never reach the stripe journal.
    NoJournal,
    /// One parity chunk of a stripe is written wrong by one bit.
    ParityOff,
    /// Superblocks say of every member that it can be trusted.
    TrustReturned,
    /// Two batches of the journal that follow each other have each other's place in the order.
    ReplayOutOfOrder,
    /// Superblocks say of a member that is rebuilt that all of it is.
    RebuildAhead,
    /// A write reaches the array as two.
    SplitWrites,
    /// Checksums are not written before the journal forgets what they are of: never, after
    /// creation.
    NoChecksums,
    /// Checksums are worked out from what the drive shows when they are written.
    ChecksumsOfWhatIsThere,
    /// Checksums are not written while members are being added: what is known of a place is what
    /// stood there before.
    NoMovedChecksums,
    /// Superblocks say of one stripe too many that it has its new shape.
    RestripeAhead,
    /// A second host takes the array as if nobody had it.
    BlindHost,
    /// What is written later than the lease is relied on reaches the drives all the same.
    LateWrites,
}

/// What happens to a write.
pub enum Sabotage {
    Nothing,
    Drop,
    Replace(Vec<u8>),
}

impl Canary {
    /// Whether it is at work while the array is created.
    pub fn is_early(self) -> bool {
        self == Canary::NoDirtyMap
    }

    /// What a seed that finds it says, one of these: it fails by what the bug does, not by a panic,
    /// nor since it hangs.
    pub fn shows_as(self) -> &'static [&'static str] {
        match self {
            Canary::NoDirtyMap => &["does not agree with itself", "WRONG DATA"],
            Canary::ParityOff => &["does not agree with itself", "scrub:"],
            Canary::SplitWrites => &["all or nothing"],
            Canary::NoChecksums | Canary::NoMovedChecksums => &["these blocks are lost"],
            Canary::RestripeAhead => &["WRONG DATA", "stripes did not agree"],
            Canary::BlindHost => &["two hosts write", "taken from a host that lives"],
            Canary::LateWrites => &["two hosts write"],
            Canary::NoWrittenMap
            | Canary::NoMissedMap
            | Canary::NoBadBlocks
            | Canary::NoFlush
            | Canary::NeglectedFlush
            | Canary::NoFence
            | Canary::LateFence
            | Canary::NoJournal
            | Canary::TrustReturned
            | Canary::ReplayOutOfOrder
            | Canary::RebuildAhead
            | Canary::ChecksumsOfWhatIsThere => &["WRONG DATA"],
        }
    }

    pub fn on_flush(self) -> bool {
        self == Canary::NoFlush
    }

    pub fn on_failed_flush(self) -> bool {
        self == Canary::NeglectedFlush
    }

    /// Whether it shows only where another host comes.
    pub fn is_of_hosts(self) -> bool {
        self.on_anothers_lease() || self.on_late_write()
    }

    pub fn on_anothers_lease(self) -> bool {
        self == Canary::BlindHost
    }

    pub fn on_late_write(self) -> bool {
        self == Canary::LateWrites
    }

    pub fn on_write(
        self,
        drive: &mut SimDrive,
        array: Option<&(Layout, MemberLayout)>,
        offset: u64,
        bytes: Option<&[u8]>,
    ) -> Sabotage {
        let Some((array, areas)) = array else { return Sabotage::Nothing };
        let MemberLayout { superblocks, dirty_map, written_map, journal, .. } = *areas;
        let MemberLayout { integrity, data, .. } = *areas;
        let inside = |area: ashlar_format::units::Area| area.range().contains(&offset);
        match self {
            Canary::NoDirtyMap if inside(dirty_map) => all_clean(bytes, offset),
            Canary::NoWrittenMap if inside(written_map) => Sabotage::Drop,
            Canary::NoMissedMap if inside(areas.missed_map) => Sabotage::Drop,
            Canary::NoBadBlocks if inside(areas.bad_blocks) => Sabotage::Drop,
            Canary::NoFence if inside(superblocks) => Sabotage::Drop,
            Canary::LateFence if inside(superblocks) => fenced_late(drive, offset, bytes),
            Canary::NoJournal if inside(journal) => Sabotage::Drop,
            Canary::TrustReturned if inside(superblocks) => all_trusted(bytes, offset),
            Canary::ParityOff if inside(data) => flipped(drive, array, offset - data.offset, bytes),
            Canary::ReplayOutOfOrder if inside(journal) => out_of_order(bytes, offset),
            Canary::RebuildAhead if inside(superblocks) => all_rebuilt(bytes, offset),
            Canary::NoChecksums if inside(integrity) => Sabotage::Drop,
            Canary::NoMovedChecksums if inside(integrity) && is_restriping(drive) => Sabotage::Drop,
            Canary::ChecksumsOfWhatIsThere if inside(integrity) => {
                sums_of_what_is_there(drive, areas, offset, bytes)
            }
            Canary::RestripeAhead if inside(superblocks) => restriped_ahead(bytes, offset),
            Canary::NoDirtyMap
            | Canary::NoWrittenMap
            | Canary::NoMissedMap
            | Canary::NoBadBlocks
            | Canary::NoFlush
            | Canary::NeglectedFlush
            | Canary::NoFence
            | Canary::LateFence
            | Canary::NoJournal
            | Canary::ParityOff
            | Canary::TrustReturned
            | Canary::ReplayOutOfOrder
            | Canary::RebuildAhead
            | Canary::SplitWrites
            | Canary::NoChecksums
            | Canary::ChecksumsOfWhatIsThere
            | Canary::NoMovedChecksums
            | Canary::RestripeAhead
            | Canary::BlindHost
            | Canary::LateWrites => Sabotage::Nothing,
        }
    }
}

/// Leases that were read there say that nobody has the array.
pub fn nobody_has_it(array: Option<&(Layout, MemberLayout)>, at: u64, into: &Buffers) {
    let is_lease = |(_, areas): &(Layout, MemberLayout)| areas.lease.range().contains(&at);
    if !array.is_some_and(is_lease) {
        return;
    }
    let mut bytes = vec![0; into.len()];
    into.copy_to_slice(&mut bytes);
    let slots = bytes.chunks_exact_mut(size_of::<Lease>());
    for (slot, home) in slots.zip((at..).step_by(size_of::<Lease>())) {
        let Ok(lease) = record::open::<Lease>(slot, None, home) else { continue };
        let mut free = Lease::free(lease.array);
        (free.epoch, free.beat) = (lease.epoch, lease.beat);
        record::seal(&mut free, lease.header.owner, home, lease.header.sequence.get());
        slot.copy_from_slice(free.as_bytes());
    }
    into.copy_from_slice(&bytes);
}

/// Whether the drive says that members are being added.
fn is_restriping(drive: &SimDrive) -> bool {
    inspect::superblock(drive).is_some_and(|its| its.old_data_chunks > 0)
}

/// What was held back lands now. The superblock is held back in turn if it says of a member that it
/// is stale, and what the drive has says otherwise.
fn fenced_late(drive: &mut SimDrive, home: u64, bytes: Option<&[u8]>) -> Sabotage {
    drive.land_held_back();
    let opened = bytes.and_then(|bytes| record::open::<ArraySuperblock>(bytes, None, home).ok());
    let (Some(new), Some(old), Some(bytes)) = (opened, inspect::superblock(drive), bytes) else {
        return Sabotage::Nothing;
    };
    let is_stale = |member: &StoredMember| member.state() == Ok(MemberState::Stale);
    let mut pairs = new.members().iter().zip(old.members());
    if pairs.any(|(new, old)| is_stale(new) && !is_stale(old)) {
        drive.held_back = Some((home, bytes.to_vec()));
        return Sabotage::Drop;
    }
    Sabotage::Nothing
}

/// The superblock with every stale member trusted, sealed again.
fn all_trusted(bytes: Option<&[u8]>, home: u64) -> Sabotage {
    let opened = bytes.and_then(|bytes| record::open::<ArraySuperblock>(bytes, None, home).ok());
    let Some(mut superblock) = opened.cloned() else { return Sabotage::Nothing };
    let count = superblock.members().len();
    for member in &mut superblock.members[..count] {
        if member.state() == Ok(MemberState::Stale) {
            *member = StoredMember::new(member.drive, MemberState::Trusted, 0);
        }
    }
    let (owner, sequence) = (superblock.header.owner, superblock.header.sequence.get());
    record::seal(&mut superblock, owner, home, sequence);
    Sabotage::Replace(superblock.as_bytes().to_vec())
}

/// The superblock with every rebuilding member filled to its end, sealed again.
fn all_rebuilt(bytes: Option<&[u8]>, home: u64) -> Sabotage {
    let opened = bytes.and_then(|bytes| record::open::<ArraySuperblock>(bytes, None, home).ok());
    let Some(mut superblock) = opened.cloned() else { return Sabotage::Nothing };
    let (count, stripes) = (superblock.members().len(), superblock.stripes.get());
    let is_even = superblock.header.sequence.get().is_multiple_of(2);
    for (member, ahead) in superblock.members[..count].iter_mut().zip(&mut superblock.rebuilt_ahead)
    {
        if member.state() == Ok(MemberState::Rebuilding) {
            let rebuilt = member.rebuilt_stripes.get();
            // One way or the other.
            *ahead = match is_even && rebuilt + 1 < stripes {
                true => StoredRange::new(&(rebuilt + 1..stripes)),
                false => StoredRange::default(),
            };
            let rebuilt = if ahead.stripes().is_empty() { stripes } else { rebuilt };
            *member = StoredMember::new(member.drive, MemberState::Rebuilding, rebuilt);
        }
    }
    let (owner, sequence) = (superblock.header.owner, superblock.header.sequence.get());
    record::seal(&mut superblock, owner, home, sequence);
    Sabotage::Replace(superblock.as_bytes().to_vec())
}

/// The superblock with the cursor of a restripe one stripe on, sealed again.
fn restriped_ahead(bytes: Option<&[u8]>, home: u64) -> Sabotage {
    let opened = bytes.and_then(|bytes| record::open::<ArraySuperblock>(bytes, None, home).ok());
    let Some(mut superblock) = opened.cloned() else { return Sabotage::Nothing };
    let restriped = superblock.restriped.get() + 1;
    if superblock.old_data_chunks == 0 || restriped > superblock.stripes.get() {
        return Sabotage::Nothing;
    }
    superblock.restriped = restriped.into();
    let (owner, sequence) = (superblock.header.owner, superblock.header.sequence.get());
    record::seal(&mut superblock, owner, home, sequence);
    Sabotage::Replace(superblock.as_bytes().to_vec())
}

/// The batch with its sequence swapped with a neighbour's, sealed again.
fn out_of_order(bytes: Option<&[u8]>, home: u64) -> Sabotage {
    let opened = bytes.and_then(|bytes| record::open::<JournalBatch>(bytes, None, home).ok());
    let (Some(mut batch), Some(bytes)) = (opened.cloned(), bytes) else {
        return Sabotage::Nothing;
    };
    let (owner, sequence) = (batch.header.owner, batch.header.sequence.get() ^ 1);
    record::seal(&mut batch, owner, home, sequence);
    let mut bytes = bytes.to_vec();
    bytes[..size_of::<JournalBatch>()].copy_from_slice(batch.as_bytes());
    Sabotage::Replace(bytes)
}

/// The dirty-map page without a bit set, sealed again.
fn all_clean(bytes: Option<&[u8]>, home: u64) -> Sabotage {
    let opened = bytes.and_then(|bytes| record::open::<RegionMapPage>(bytes, None, home).ok());
    let Some(page) = opened else { return Sabotage::Nothing };
    let (number, region_stripes) = (page.page.get(), page.region_stripes.get());
    let mut clean = RegionMapPage::empty(page.array, MapKind::Dirty, number, region_stripes);
    let (owner, sequence) = (page.header.owner, page.header.sequence.get());
    record::seal(&mut clean, owner, home, sequence);
    Sabotage::Replace(clean.as_bytes().to_vec())
}

/// The page with the checksums of its blocks as they stand on the drive, sealed again.
fn sums_of_what_is_there(
    drive: &SimDrive,
    areas: &MemberLayout,
    offset: u64,
    bytes: Option<&[u8]>,
) -> Sabotage {
    let Some(bytes) = bytes else { return Sabotage::Nothing };
    let first = (offset - areas.integrity.offset) / block_sums::SECTOR_BYTES;
    let mut page = bytes.to_vec();
    for (sector, bytes) in (0..).zip(page.chunks_mut(size_of::<SumSector>())) {
        let offset = offset + sector * block_sums::SECTOR_BYTES;
        let home = Home { array: ARRAY_UUID, drive: drive.uuid, offset };
        let Some(mut sums) = SumSector::open(bytes, &home).cloned() else { continue };
        for block in 0..SUMS_PER_SECTOR {
            let number = (first + sector) * SUMS_PER_SECTOR as u64 + block as u64;
            let at = areas.data.offset + number * u64::from(block_sums::BLOCK_BYTES);
            if sums.get(block).is_some() {
                sums.set(block, block_sum(drive.block(at).unwrap_or(&ZEROES)));
            }
        }
        sums.seal(&home);
        bytes.copy_from_slice(sums.as_bytes());
    }
    Sabotage::Replace(page)
}

/// Flips a bit of the parity that the first drive stores.
fn flipped(drive: &SimDrive, array: &Layout, at: u64, bytes: Option<&[u8]>) -> Sabotage {
    let Some(bytes) = bytes else { return Sabotage::Nothing };
    // The first member is of the first group, which has every `groups`-th stripe.
    let stripe = StripeIndex(at / u64::from(array.chunk_bytes) * u64::from(array.groups));
    let first = MemberIndex(0);
    if drive.uuid[0] != 0 || array.position_of(stripe, first) < Some(array.data * array.copies) {
        return Sabotage::Nothing;
    }
    let mut bytes = bytes.to_vec();
    bytes[100] ^= 1;
    Sabotage::Replace(bytes)
}
