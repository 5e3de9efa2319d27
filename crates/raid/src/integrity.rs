//! Checksums of the members' blocks: which bytes a drive was given, whatever it returns later.
//!
//! Pages of checksums are kept in memory, as many as `PAGES_MAX` (tests: fewer), and read when they
//! are needed.
//! What is new in a page stays there until `write_back`.
//!
//! Invariants:
//! - in a region that is written, every block of a stripe on every member that is believed has a
//!   checksum: it is set when the region is zeroed for its first write, and with everything that is
//!   stored later. So "not known" there always means that the drive has lost it, and never that a
//!   block need not be checked. (While members are added, stripes of the old shape have no blocks
//!   on them; a stripe that gets its new shape is stored whole.)
//! - a checksum in memory is newer than the one on the drive;
//! - pages are written back and flushed before the batch of the journal is released whose bytes
//!   they are of. So after a crash a checksum is old only where the journal stores again, and that
//!   sets it again;
//! - a page that is not written back, or is being, is not dropped.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_drive::error::DriveError;
use ashlar_format::array_superblock::MemberState;
use ashlar_format::block_sums::{
    BLOCK_BYTES, BLOCKS_PER_PAGE, Home, PAGE_BYTES, SECTOR_BYTES, SECTORS_PER_PAGE,
    SUMS_PER_SECTOR, SumPage, SumSector, block_sum,
};
use ashlar_format::units::{Area, MemberIndex, to_usize};
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::join::join_all;
use ashlar_reactor::wait_list::WaitList;
use zerocopy::IntoBytes;

use crate::error::ArrayError;
use crate::label;
use crate::members::{Identity, Members};

/// Pages of one array in memory: 64 MiB, the checksums of 60 GiB. While more than these are not
/// written back, there are more.
pub const PAGES_MAX: usize = (64 << 20) / to_usize(PAGE_BYTES);
/// Pages that are written at the same time.
const WRITES_AT_ONCE: usize = 64;
const BLOCK: usize = BLOCK_BYTES as usize;

/// A page: member and number.
type Key = (MemberIndex, u64);

struct Page {
    sums: RefCell<Box<SumPage>>,
    /// What the drive has is in it.
    loaded: Cell<bool>,
    loading: Cell<bool>,
    /// Sectors, as bits, that the drive has shown otherwise than they were written.
    damaged: Cell<u8>,
    /// Since the hand of `make_room` came by.
    used: Cell<bool>,
}

impl Page {
    fn blank() -> Rc<Page> {
        Rc::new(Page {
            sums: RefCell::new(Box::new(std::array::from_fn(|_| SumSector::blank()))),
            loaded: Cell::new(false),
            loading: Cell::new(false),
            damaged: Cell::new(0),
            used: Cell::new(true),
        })
    }

    fn get(&self, block: u64) -> Option<u32> {
        let (sector, inside) = place(block);
        self.sums.borrow()[sector].get(inside)
    }

    fn set(&self, block: u64, sum: u32) {
        let (sector, inside) = place(block);
        self.sums.borrow_mut()[sector].set(inside, sum);
    }

    fn is_full(&self) -> bool {
        self.sums.borrow().iter().all(SumSector::is_full)
    }
}

/// Sector of its page, and place in that, of a block of the data area.
fn place(block: u64) -> (usize, usize) {
    let inside = to_usize(block % BLOCKS_PER_PAGE);
    (inside / SUMS_PER_SECTOR, inside % SUMS_PER_SECTOR)
}

/// Where a member's pages are.
struct Place {
    drive: Rc<Drive>,
    drive_uuid: [u8; 16],
    area: Area,
}

pub(crate) struct Integrity {
    reactor: Reactor,
    identity: Rc<Identity>,
    members: Rc<Members>,
    pages: RefCell<BTreeMap<Key, Rc<Page>>>,
    /// Pages that are not written back.
    dirty: RefCell<BTreeSet<Key>>,
    /// By member: the drive whose pages are kept.
    drives: RefCell<Vec<[u8; 16]>>,
    /// Where `make_room` goes on.
    hand: Cell<Key>,
    pages_max: Cell<usize>,
    writing: Cell<bool>,
    changed: WaitList,
}

impl Integrity {
    pub(crate) fn new(
        reactor: &Reactor,
        identity: Rc<Identity>,
        members: Rc<Members>,
    ) -> Rc<Integrity> {
        let drives = members.list().iter().map(|member| member.drive_uuid).collect();
        Rc::new(Integrity {
            reactor: reactor.clone(),
            identity,
            members,
            pages: RefCell::default(),
            dirty: RefCell::default(),
            drives: RefCell::new(drives),
            hand: Cell::new((MemberIndex(0), 0)),
            pages_max: Cell::new(PAGES_MAX),
            writing: Cell::new(false),
            changed: WaitList::default(),
        })
    }

    /// Keeps only so many pages in memory from now on.
    pub(crate) fn limit(&self, pages_max: usize) {
        self.pages_max.set(pages_max);
    }

    /// These bytes are being stored at `at` of a member's data area.
    pub(crate) fn set(&self, member: MemberIndex, at: u64, bytes: &Buffers) {
        self.set_each(member, at, bytes.len() as u64, |inside| sum_of(bytes, inside));
    }

    /// The same of zeroes.
    pub(crate) fn set_zero(&self, member: MemberIndex, range: Range<u64>) {
        let sum = block_sum(&[0; BLOCK]);
        self.set_each(member, range.start, range.end - range.start, |_| sum);
    }

    fn set_each(&self, member: MemberIndex, at: u64, len: u64, sum: impl Fn(Range<usize>) -> u32) {
        for run in runs(at, len) {
            let page = self.page_of((member, run.page));
            for (block, inside) in run.blocks() {
                page.set(block, sum(inside));
            }
            self.dirty.borrow_mut().insert((member, run.page));
        }
    }

    /// Whether these bytes, which were read at `at` of a member's data area, are those that were
    /// stored there last.
    pub(crate) async fn fits(&self, member: MemberIndex, at: u64, bytes: &Buffers) -> bool {
        for run in runs(at, bytes.len() as u64) {
            let known = |page: &Page| run.blocks().all(|(block, _)| page.get(block).is_some());
            let page = self.loaded((member, run.page), known).await;
            let fits = |page: Rc<Page>| {
                run.blocks().all(|(block, part)| page.get(block) == Some(sum_of(bytes, part)))
            };
            if !page.is_some_and(fits) {
                return false;
            }
        }
        true
    }

    /// The checksum of the block at `at` of a member's data area; `None`: the drive has lost it.
    pub(crate) async fn wanted(&self, member: MemberIndex, at: u64) -> Option<u32> {
        let block = at / u64::from(BLOCK_BYTES);
        let known = |page: &Page| page.get(block).is_some();
        self.loaded((member, block / BLOCKS_PER_PAGE), known).await?.get(block)
    }

    /// Whether the sector with the checksum of the block at `at` was damaged. One that is merely
    /// not known is no lie: it was written back while the drive could not read the rest.
    pub(crate) fn is_damaged(&self, member: MemberIndex, at: u64) -> bool {
        let block = at / u64::from(BLOCK_BYTES);
        let sector = block % BLOCKS_PER_PAGE / SUMS_PER_SECTOR as u64;
        self.page_of((member, block / BLOCKS_PER_PAGE)).damaged.get() & 1 << sector != 0
    }

    /// A page that is `known` well enough, or has all that the drive has; `None`: the drive does
    /// not answer.
    async fn loaded(&self, key: Key, known: impl Fn(&Page) -> bool) -> Option<Rc<Page>> {
        let page = self.page_of(key);
        while !page.loaded.get() && !known(&page) {
            if page.loading.get() {
                self.changed.until(&self.reactor, || !page.loading.get()).await;
                continue;
            }
            page.loading.set(true);
            let read = self.load(key, &page).await;
            page.loading.set(false);
            self.changed.wake_all(&self.reactor);
            read?;
        }
        Some(page)
    }

    async fn load(&self, key: Key, page: &Page) -> Option<()> {
        let place = self.place(key.0)?;
        let at = place.area.offset + key.1 * PAGE_BYTES;
        // A sector that cannot be read does not hide the others, where the drive has so small ones.
        for step in [PAGE_BYTES, SECTOR_BYTES.max(place.drive.limits().sector_bytes.into())] {
            let mut whole = true;
            for offset in (0..PAGE_BYTES).step_by(to_usize(step)) {
                let read = label::read_bytes(&self.reactor, &place.drive, at + offset, step).await;
                match read {
                    Ok(bytes) => self.merge(page, &bytes, at, offset, place.drive_uuid),
                    Err(DriveError::Gone) => return None,
                    Err(_) => whole = false,
                }
            }
            if whole {
                break;
            }
        }
        page.loaded.set(true);
        Some(())
    }

    /// Takes over what is not known in memory. `bytes`: sectors from `offset` of the page at `at`.
    fn merge(&self, page: &Page, bytes: &[u8], at: u64, offset: u64, drive: [u8; 16]) {
        let first = to_usize(offset / SECTOR_BYTES);
        let mut sums = page.sums.borrow_mut();
        for (index, bytes) in bytes.chunks(size_of::<SumSector>()).enumerate() {
            let home = self.home(drive, at, first + index);
            match SumSector::open(bytes, &home) {
                Some(found) => sums[first + index].complete_from(found),
                None => page.damaged.set(page.damaged.get() | 1 << (first + index)),
            }
        }
    }

    fn home(&self, drive: [u8; 16], page_at: u64, sector: usize) -> Home {
        let offset = page_at + sector as u64 * SECTOR_BYTES;
        Home { array: self.identity.uuid, drive, offset }
    }

    fn place(&self, member: MemberIndex) -> Option<Place> {
        let list = self.members.list();
        let member = &list[member.index()];
        let (drive, area) = (member.alive()?.clone(), member.areas.integrity);
        Some(Place { drive, drive_uuid: member.drive_uuid, area })
    }

    /// The page in memory, as much as is known of it.
    fn page_of(&self, key: Key) -> Rc<Page> {
        self.forget_replaced(key.0);
        let known = self.pages.borrow().get(&key).cloned();
        known.map_or_else(
            || {
                self.make_room();
                let page = Page::blank();
                self.pages.borrow_mut().insert(key, page.clone());
                page
            },
            |page| {
                page.used.set(true);
                page
            },
        )
    }

    /// What another drive had in this place says nothing.
    fn forget_replaced(&self, member: MemberIndex) {
        let list = self.members.list();
        let now = list[member.index()].drive_uuid;
        let mut drives = self.drives.borrow_mut();
        // Members may have been added.
        drives.resize(list.len(), [0; 16]);
        let known = &mut drives[member.index()];
        if *known != now {
            *known = now;
            self.forget(member);
        }
    }

    fn forget(&self, member: MemberIndex) {
        self.pages.borrow_mut().retain(|(of, _), _| *of != member);
        self.dirty.borrow_mut().retain(|(of, _)| *of != member);
    }

    /// Drops a page that was not used lately, if there are too many: looks at the pages in turn,
    /// and leaves one that was used since the last time (the "clock" of F. J. Corbató, "A Paging
    /// Experiment with the Multics System", 1968).
    fn make_room(&self) {
        let mut pages = self.pages.borrow_mut();
        let mut looks_left = if pages.len() < self.pages_max.get() { 0 } else { 2 * pages.len() };
        while looks_left > 0 {
            looks_left -= 1;
            let next = pages.range(self.hand.get()..).next().or(pages.first_key_value());
            let Some((key, page)) = next.map(|(key, page)| (*key, page)) else { return };
            self.hand.set((key.0, key.1 + 1));
            let is_held = Rc::strong_count(page) > 1 || self.dirty.borrow().contains(&key);
            if !is_held && !page.used.replace(false) {
                pages.remove(&key);
                return;
            }
        }
    }

    /// Writes pages back, if there are too many in memory.
    pub(crate) async fn trim(&self) -> Result<(), ArrayError> {
        if self.pages.borrow().len() <= self.pages_max.get() {
            return Ok(());
        }
        let written = self.write_back().await;
        while self.pages.borrow().len() > self.pages_max.get() {
            let before = self.pages.borrow().len();
            self.make_room();
            if self.pages.borrow().len() == before {
                break;
            }
        }
        written
    }

    /// Writes all that is new to the drives; not flushed. Members that cannot take it are fenced,
    /// if the others can stand for them.
    pub(crate) async fn write_back(&self) -> Result<(), ArrayError> {
        // What the one that runs has taken up may not be on the drives yet.
        self.changed.until(&self.reactor, || !self.writing.get()).await;
        self.writing.set(true);
        let result = self.write_dirty().await;
        self.writing.set(false);
        self.changed.wake_all(&self.reactor);
        result
    }

    async fn write_dirty(&self) -> Result<(), ArrayError> {
        let dirty: Vec<Key> = self.dirty.borrow().iter().copied().collect();
        let targets: Vec<MemberIndex> =
            (0..self.members.list().len()).map(MemberIndex::new).collect();
        for some in dirty.chunks(WRITES_AT_ONCE) {
            let of = |index| some.iter().filter(move |(of, _)| of.index() == index);
            let results = self.members.ask_all(|index| self.write_pages(of(index))).await;
            self.members.fence_failed(&targets, &results).await?;
        }
        Ok(())
    }

    /// All are tried.
    async fn write_pages(&self, pages: impl Iterator<Item = &Key>) -> Result<(), DriveError> {
        join_all(pages.map(|key| self.write_page(*key))).await.into_iter().collect()
    }

    async fn write_page(&self, key: Key) -> Result<(), DriveError> {
        if self.members.list()[key.0.index()].state == MemberState::Stale {
            // It is not believed, and starts anew if it ever is again.
            self.forget(key.0);
            return Ok(());
        }
        let page = self.loaded(key, Page::is_full).await.ok_or(DriveError::Gone)?;
        self.forget_replaced(key.0);
        if !self.pages.borrow().get(&key).is_some_and(|its| Rc::ptr_eq(its, &page)) {
            // Of a drive that was replaced meanwhile.
            self.dirty.borrow_mut().remove(&key);
            return Ok(());
        }
        let place = self.place(key.0).ok_or(DriveError::Gone)?;
        let at = place.area.offset + key.1 * PAGE_BYTES;
        assert!(place.area.range().contains(&at), "page {} of {:?}", key.1, place.area);
        let buffer = self.sealed(&page, at, place.drive_uuid);
        // From here what is set again is to be written again.
        self.dirty.borrow_mut().remove(&key);
        let written = place.drive.write(at, buffer.into()).await;
        if written.is_err() {
            self.dirty.borrow_mut().insert(key);
        }
        written
    }

    fn sealed(&self, page: &Page, at: u64, drive: [u8; 16]) -> Buffer {
        let mut sums = page.sums.borrow_mut();
        for index in 0..SECTORS_PER_PAGE {
            sums[index].seal(&self.home(drive, at, index));
        }
        let buffer = self.reactor.buffer(to_usize(PAGE_BYTES));
        buffer.copy_from_slice(sums.as_bytes());
        buffer
    }
}

/// Blocks of a range of a data area that have one page.
struct Run {
    page: u64,
    first: u64,
    count: u64,
    /// Where the first one is in the range.
    at: usize,
}

impl Run {
    /// Each block, and where it is in the range.
    fn blocks(&self) -> impl Iterator<Item = (u64, Range<usize>)> {
        let (first, at) = (self.first, self.at);
        (0..self.count).map(move |index| {
            let start = at + to_usize(index) * BLOCK;
            (first + index, start..start + BLOCK)
        })
    }
}

fn runs(at: u64, len: u64) -> impl Iterator<Item = Run> {
    let size = u64::from(BLOCK_BYTES);
    assert!((at | len).is_multiple_of(size), "{len} bytes at {at} are not whole blocks");
    let (start, end) = (at / size, (at + len) / size);
    let mut next = start;
    std::iter::from_fn(move || {
        let (first, page) = (next, next / BLOCKS_PER_PAGE);
        next = end.min((page + 1) * BLOCKS_PER_PAGE);
        let run = Run { page, first, count: next - first, at: to_usize(first - start) * BLOCK };
        (first < end).then_some(run)
    })
}

/// The checksum of one block of `bytes`. Memory that is not ours alone is copied first.
fn sum_of(bytes: &Buffers, block: Range<usize>) -> u32 {
    if let [piece] = bytes.pieces()
        && piece.is_stable()
    {
        return block_sum(&piece.bytes()[block]);
    }
    let mut copy = [0; BLOCK];
    bytes.slice(block).copy_to_slice(&mut copy);
    block_sum(&copy)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_end_with_their_pages() {
        let all = |at: u64, len: u64| -> Vec<(u64, u64, u64, usize)> {
            runs(at * 4096, len * 4096).map(|r| (r.page, r.first, r.count, r.at / BLOCK)).collect()
        };
        assert_eq!(all(5, 0), []);
        assert_eq!(all(0, 960), [(0, 0, 960, 0)]);
        assert_eq!(all(958, 5), [(0, 958, 2, 0), (1, 960, 3, 2)]);
        assert_eq!(place(959), (7, 119));
        assert_eq!(place(960 + 121), (1, 1));
    }

    #[test]
    fn checksums_of_pieces_are_those_of_the_whole() {
        let pool = ashlar_reactor::buffer::BufferPool::new();
        let whole = pool.take(2 * BLOCK);
        whole.copy_from_slice(&std::array::from_fn::<u8, 8192, _>(|at| {
            at.to_le_bytes()[0] ^ at.to_le_bytes()[1]
        }));
        let mut parts = Buffers::from(whole.slice(0..5000));
        parts.push(whole.slice(5000..8192));
        let second = BLOCK..2 * BLOCK;
        assert_eq!(sum_of(&parts, second.clone()), sum_of(&whole.into(), second));
    }
}
