//! A simulated drive: what it shows, what of that is not durable yet, and what is wrong with it.
//!
//! Content is kept in blocks of 4 KiB; a write puts new ones in their place and keeps the old ones
//! until a flush covers it. So a power cut can take back any write, or any sectors of it.
//!
//! Invariant: `undo` holds, in order, what every unflushed write replaced.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use ashlar_format::units::Area;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::prng::Prng;

/// The array that the drives of a world are for.
pub const ARRAY_UUID: [u8; 16] = [9; 16];
pub const BLOCK_BYTES: usize = 4096;
pub const SECTOR_BYTES: usize = 512;
const SECTORS_PER_BLOCK: usize = BLOCK_BYTES / SECTOR_BYTES;

/// Good answers after a transient error: so several requests for one place cannot make each other
/// fail more often than an operation is tried.
const GOOD_AFTER_TRANSIENT: u32 = 64;

pub type Block = [u8; BLOCK_BYTES];
pub const ZEROES: Block = [0; BLOCK_BYTES];
/// Blocks that a thread keeps for its next drives; more go back to the allocator.
const SHELF_BLOCKS_MAX: usize = 1 << 14;

thread_local! {
    /// Memory of blocks that were let go: one seed after the other works in the same.
    static SHELF: RefCell<Vec<Rc<Block>>> = const { RefCell::new(Vec::new()) };
    /// What a drive holds where it was never written, though not zeroes.
    static LITTER: Rc<Block> = Rc::new([0x5a; BLOCK_BYTES]);
}

/// What stands in a block. `None`: all zero.
#[derive(Default)]
struct Content(Option<Rc<Block>>);

impl Content {
    fn litter() -> Content {
        Content(Some(LITTER.with(Rc::clone)))
    }

    /// In memory of its own, which holds anything until `fill` has written all of it.
    fn filled(fill: impl FnOnce(&mut Block)) -> Content {
        let taken = SHELF.with_borrow_mut(Vec::pop);
        let mut block = taken.unwrap_or_else(|| Rc::new(ZEROES));
        fill(Rc::get_mut(&mut block).expect("what lies on the shelf is nobody's"));
        Content(Some(block))
    }

    fn bytes(&self) -> &Block {
        self.0.as_deref().unwrap_or(&ZEROES)
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        let own = |block: &Rc<Block>| Rc::strong_count(block) == 1;
        if let Some(block) = self.0.take().filter(own) {
            SHELF.with_borrow_mut(|shelf| {
                if shelf.len() < SHELF_BLOCKS_MAX {
                    shelf.push(block);
                }
            });
        }
    }
}

/// What a drive is like. Does not change.
#[derive(Clone, Copy, Debug)]
pub struct Traits {
    pub bytes: u64,
    /// Smallest unit that is read, written, or torn.
    pub sector_bytes: u32,
    /// Acknowledged writes may be lost by a power cut until a flush.
    pub volatile_cache: bool,
    /// It can zero by itself.
    pub zeroes: bool,
    /// What could not be read can be, once it is written.
    pub mends: bool,
    pub latency_ns_min: u64,
    pub latency_ns_max: u64,
}

struct Undo {
    write: u64,
    block: usize,
    /// Sectors of the block that the write changed.
    sectors: u8,
    old: Content,
}

/// What a power cut does to unflushed writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loss {
    Everything,
    Nothing,
    /// Each write is kept, lost, or torn.
    EachWrite,
    /// Each sector of each write is kept or lost.
    EachSector,
}

impl Loss {
    pub fn draw(prng: &mut Prng) -> Loss {
        let all = [Loss::Everything, Loss::Nothing, Loss::EachWrite, Loss::EachSector];
        all[prng.index(all.len())]
    }
}

/// Which sectors of a write land.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Landing {
    All,
    None,
    Some,
}

impl Landing {
    fn draw(prng: &mut Prng) -> Landing {
        [Landing::All, Landing::None, Landing::Some][prng.index(3)]
    }

    fn lands(self, prng: &mut Prng) -> bool {
        match self {
            Landing::All => true,
            Landing::None => false,
            Landing::Some => prng.chance(1, 2),
        }
    }
}

/// What a drive does to its next write in an area, and says that it is done.
#[derive(Clone, Copy, Debug)]
pub enum Mischief {
    Lose {
        within: Area,
    },
    /// It lands so many bytes from where it should, if that is in the area.
    Misdirect {
        within: Area,
        by: u64,
    },
}

/// What flushes of a drive do instead, for a while.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlushFault {
    /// They fail.
    pub times: u32,
    pub errno: i32,
    /// What becomes of the cache, so many nanoseconds after such an answer at most.
    pub loss: Loss,
    pub within_ns: u64,
}

/// Of a block that is rewritten by no write yet.
const NEVER: u64 = u64::MAX;

pub struct SimDrive {
    pub traits: Traits,
    pub uuid: [u8; 16],
    blocks: Vec<Content>,
    undo: VecDeque<Undo>,
    writes: u64,
    /// A write, by its place, that lands only with one that comes later: a planted bug does that.
    pub held_back: Option<(u64, Vec<u8>)>,
    /// Sectors of 512 bytes that cannot be read until they are written.
    pub latent: BTreeSet<u64>,
    pub mischief: VecDeque<Mischief>,
    /// Blocks that may not be what the drive was given, until a flush covers the write of this
    /// number.
    lies: BTreeMap<usize, u64>,
    /// It did something like that once.
    pub lied: bool,
    /// Checksums may be lost or wrong, which nobody knows before all blocks were read.
    pub sums_in_doubt: bool,
    /// Writes there fail, for now.
    pub refuses: Option<Area>,
    /// Writes there find no space, for now.
    pub full: Option<Area>,
    /// Where it refused a write and has taken none since, unless its member is known to be behind.
    pub refused: BTreeSet<u64>,
    /// Times that it was silent, and not all have heard yet who had writes for it.
    pub misses: u32,
    /// So many flushes fail from now on, in this way.
    pub flush_fault: Option<FlushFault>,
    /// A flush failed, and not all may have heard of it yet.
    pub failed_flush: bool,
    /// What is in its cache is lost at this time, or with the next operation that adds to it.
    loses: Option<(u64, Loss)>,
    /// It lost what was in its cache, and the power of nothing else failed.
    pub lost_cache: bool,
    /// Answers nothing any more.
    pub dead: bool,
    /// Since its own power failed, and only for that.
    pub unpowered: bool,
    /// Latency is multiplied by this until `slow_until_ns`.
    pub slow_factor: u64,
    pub slow_until_ns: u64,
    /// Until then it answers nothing.
    pub silent_until_ns: u64,
    /// Reads and writes that fail a few times before they succeed: one in so many.
    pub transient_one_in: Option<u64>,
    /// Failures still to come, then good answers for certain, by place and kind.
    retries: BTreeMap<(u64, bool), (u32, u32)>,
}

impl SimDrive {
    pub fn new(traits: Traits, uuid: [u8; 16]) -> SimDrive {
        let blocks = usize::try_from(traits.bytes).expect("small drives") / BLOCK_BYTES;
        SimDrive {
            traits,
            uuid,
            blocks: std::iter::repeat_with(Content::default).take(blocks).collect(),
            undo: VecDeque::new(),
            writes: 0,
            held_back: None,
            latent: BTreeSet::new(),
            mischief: VecDeque::new(),
            lies: BTreeMap::new(),
            lied: false,
            sums_in_doubt: false,
            refuses: None,
            full: None,
            refused: BTreeSet::new(),
            misses: 0,
            flush_fault: None,
            failed_flush: false,
            loses: None,
            lost_cache: false,
            dead: false,
            unpowered: false,
            slow_factor: 1,
            slow_until_ns: 0,
            silent_until_ns: 0,
            transient_one_in: None,
            retries: BTreeMap::new(),
        }
    }

    /// The blocks at these offsets hold something that nobody wrote.
    pub fn litter(&mut self, offsets: impl Iterator<Item = u64>) {
        for offset in offsets {
            let block = usize::try_from(offset).expect("small drives") / BLOCK_BYTES;
            self.blocks[block] = Content::litter();
        }
    }

    /// It gets more bytes, which hold anything.
    pub fn grow(&mut self, bytes: u64) {
        let blocks = usize::try_from(bytes).expect("small drives") / BLOCK_BYTES;
        let litter = |block: usize| {
            if block.is_multiple_of(3) { Content::litter() } else { Content::default() }
        };
        self.blocks.extend((self.blocks.len()..blocks).map(litter));
        self.traits.bytes = bytes;
    }

    /// Whether `offset..offset + len` is a range of whole sectors of this drive.
    pub fn accepts(&self, offset: u64, len: u64) -> bool {
        let sector = u64::from(self.traits.sector_bytes);
        (offset | len).is_multiple_of(sector) && offset + len <= self.traits.bytes
    }

    /// Whether an operation fails this time, by a fault that will pass.
    pub fn stumbles(&mut self, offset: u64, write: bool, prng: &mut Prng) -> bool {
        let Some(one_in) = self.transient_one_in else { return false };
        if let Some((bad, good)) = self.retries.get_mut(&(offset, write)) {
            if *bad > 0 {
                *bad -= 1;
                return true;
            }
            *good -= 1;
            if *good == 0 {
                self.retries.remove(&(offset, write));
            }
            return false;
        }
        let begins = prng.chance(1, one_in);
        if begins {
            // With the failure now at most three: the fourth attempt of four succeeds.
            let more = u32::try_from(prng.below(3)).unwrap_or(0);
            self.retries.insert((offset, write), (more, GOOD_AFTER_TRANSIENT));
        }
        begins
    }

    pub fn is_latent(&self, offset: u64, len: u64) -> bool {
        let first = offset / SECTOR_BYTES as u64;
        let end = (offset + len) / SECTOR_BYTES as u64;
        self.latent.range(first..end).next().is_some()
    }

    /// What all writes so far are numbered below; a flush submitted now covers them.
    pub fn writes_done(&self) -> u64 {
        self.writes
    }

    /// Whether it takes all that it is given, and would return it.
    pub fn is_sound(&self) -> bool {
        let lies = self.sums_in_doubt || !self.lies.is_empty() || !self.mischief.is_empty();
        let owes = self.refuses.is_some() || !self.refused.is_empty() || self.misses > 0;
        let fails = self.flush_fault.is_some() || self.failed_flush || self.loses.is_some();
        self.latent.is_empty() && !lies && !owes && !fails
    }

    /// Whether a write there finds space.
    pub fn has_space(&self, offset: u64) -> bool {
        self.full.is_none_or(|area| !area.range().contains(&offset))
    }

    /// Whether a write fails, and every retry of it.
    pub fn refuses(&self, offset: u64) -> bool {
        self.refuses.is_some_and(|area| area.range().contains(&offset))
    }

    /// A bit of the byte at `offset` turns over.
    pub fn rot(&mut self, offset: u64) {
        let at = usize::try_from(offset).expect("small drives");
        let content = &mut self.blocks[at / BLOCK_BYTES];
        let mut bytes = *content.bytes();
        bytes[at % BLOCK_BYTES] ^= 1 << (at % 8);
        *content = Content::filled(|block| *block = bytes);
        self.lies_at(offset, 1);
    }

    /// Where a write lands; `None`: nowhere.
    pub fn fate(&mut self, offset: u64, len: u64) -> Option<u64> {
        let struck = self.mischief.pop_front_if(|mischief| {
            let (Mischief::Lose { within } | Mischief::Misdirect { within, .. }) = mischief;
            within.range().contains(&offset)
        });
        let to = match struck {
            None => return Some(offset),
            Some(Mischief::Lose { .. }) => None,
            Some(Mischief::Misdirect { within, by }) => {
                Some(offset + by).filter(|to| to + len <= within.range().end)
            }
        };
        self.lies_at(offset, len);
        to
    }

    /// These bytes may be others than the drive was given.
    pub fn lies_at(&mut self, offset: u64, len: u64) {
        self.lied = true;
        let len = usize::try_from(len).expect("small drives");
        self.lies.extend(parts(offset, len).map(|part| (part.block, NEVER)));
    }

    /// The error of a flush that fails.
    pub fn fails_flush(&mut self, now_ns: u64) -> Option<i32> {
        let fault = self.flush_fault.as_mut()?;
        let FlushFault { errno, loss, within_ns, .. } = *fault;
        fault.times -= 1;
        self.flush_fault.take_if(|fault| fault.times == 0);
        self.failed_flush = true;
        if loss != Loss::Nothing {
            // Not with the answer itself: nobody could act before it.
            self.loses = Some((now_ns + 1 + within_ns, loss));
        }
        Some(errno)
    }

    /// What a flush that failed has left in the cache is lost by now. `adds`: what is done next
    /// adds to the cache, or empties it.
    pub fn lose_if_due(&mut self, now_ns: u64, adds: bool, prng: &mut Prng) {
        if let Some((_, loss)) = self.loses.take_if(|(at, _)| adds || *at <= now_ns) {
            self.lose_cache(loss, prng);
        }
    }

    /// What it has in its cache is lost, kept or torn, by itself.
    pub fn lose_cache(&mut self, loss: Loss, prng: &mut Prng) {
        self.lost_cache |= !self.undo.is_empty() && loss != Loss::Nothing;
        self.loses = None;
        self.empty_cache(loss, prng);
    }

    /// What befell its cache is over.
    pub fn heal_cache(&mut self) {
        (self.flush_fault, self.failed_flush, self.lost_cache) = (None, false, false);
    }

    pub fn flush(&mut self, covers: u64) {
        self.lies.retain(|_, rewritten| *rewritten >= covers);
        while self.undo.pop_front_if(|undo| undo.write < covers).is_some() {}
    }

    pub fn read(&self, offset: u64, into: &Buffers) {
        let mut at = offset;
        for piece in into.pieces() {
            let mut zeroed = 0;
            for part in parts(at, piece.len()) {
                let end = part.at + part.inside.len();
                if let Some(block) = &self.blocks[part.block].0 {
                    piece.slice(zeroed..part.at).fill_zero();
                    piece.slice(part.at..end).copy_from_slice(&block[part.inside]);
                    zeroed = end;
                }
            }
            // What lies between the blocks that are there; all at once, since it is often long.
            piece.slice(zeroed..piece.len()).fill_zero();
            at += piece.len() as u64;
        }
    }

    /// The block at `offset` as the drive shows it, for checkers; `None`: all zero.
    pub fn block(&self, offset: u64) -> Option<&Block> {
        assert!(offset.is_multiple_of(BLOCK_BYTES as u64));
        self.blocks[usize::try_from(offset).expect("small drives") / BLOCK_BYTES].0.as_deref()
    }

    /// The bytes that the drive shows, for checkers.
    pub fn peek(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        for part in parts(offset, len) {
            let bytes = &self.blocks[part.block].bytes()[part.inside];
            out[part.at..part.at + bytes.len()].copy_from_slice(bytes);
        }
        out
    }

    /// All of `from` lands.
    pub fn write(&mut self, offset: u64, from: &[u8]) {
        self.store(offset, from.len() as u64, Some(from), |_| true);
    }

    pub fn land_held_back(&mut self) {
        if let Some((offset, bytes)) = self.held_back.take() {
            self.write(offset, &bytes);
        }
    }

    pub fn write_zeroes(&mut self, offset: u64, len: u64) {
        self.store(offset, len, None, |_| true);
    }

    /// The write was cut off: any part of it lands. `from` is `None` for zeroes.
    pub fn write_torn(&mut self, offset: u64, len: u64, from: Option<&[u8]>, prng: &mut Prng) {
        let landing = Landing::draw(prng);
        let unit = u64::from(self.traits.sector_bytes);
        let units = len / unit;
        let lands: Vec<bool> = (0..units).map(|_| landing.lands(prng)).collect();
        let first = offset / unit;
        self.store(offset, len, from, |sector| {
            let at = sector * SECTOR_BYTES as u64 / unit - first;
            lands[usize::try_from(at).expect("few sectors")]
        });
    }

    /// `lands`: whether a sector of 512 bytes (by its number on the drive) is changed.
    fn store(&mut self, offset: u64, len: u64, from: Option<&[u8]>, lands: impl Fn(u64) -> bool) {
        let write = self.writes;
        self.writes += 1;
        for part in parts(offset, usize::try_from(len).expect("small drives")) {
            let number = |sector: usize| (part.block * SECTORS_PER_BLOCK + sector) as u64;
            let landed = || part.sectors().filter(|sector| lands(number(*sector)));
            if self.traits.mends && !self.latent.is_empty() {
                for sector in landed() {
                    self.latent.remove(&number(sector));
                }
            }
            let sectors = landed().fold(0, |sectors, sector| sectors | 1 << sector);
            let bytes = from.map(|from| &from[part.at..part.at + part.inside.len()]);
            if sectors == u8::MAX && self.lies.contains_key(&part.block) {
                self.lies.insert(part.block, write);
            }
            if sectors != 0 {
                self.store_block(write, sectors, bytes, part);
            }
        }
    }

    fn store_block(&mut self, write: u64, sectors: u8, bytes: Option<&[u8]>, part: Part) {
        let block = &mut self.blocks[part.block];
        let zero = bytes.is_none_or(|bytes| *bytes == ZEROES[part.inside.clone()]);
        if zero && block.0.is_none() {
            return;
        }
        let bytes = bytes.unwrap_or(&ZEROES[part.inside.clone()]);
        let new = if sectors != u8::MAX {
            Content::filled(|new| {
                new.copy_from_slice(block.bytes());
                for sector in part.sectors().filter(|sector| sectors & 1 << sector != 0) {
                    let at = sector * SECTOR_BYTES;
                    let from = &bytes[at - part.inside.start..][..SECTOR_BYTES];
                    new[at..at + SECTOR_BYTES].copy_from_slice(from);
                }
            })
        } else if zero {
            Content::default()
        } else {
            Content::filled(|new| new.copy_from_slice(bytes))
        };
        let old = std::mem::replace(block, new);
        if self.traits.volatile_cache {
            self.undo.push_back(Undo { write, block: part.block, sectors, old });
        }
    }

    /// Power is cut: unflushed writes are lost, kept or torn. Nothing is cached afterwards.
    pub fn cut_power(&mut self, loss: Loss, prng: &mut Prng) {
        self.retries.clear();
        self.loses = None;
        self.empty_cache(loss, prng);
    }

    fn empty_cache(&mut self, loss: Loss, prng: &mut Prng) {
        self.lies.values_mut().for_each(|rewritten| *rewritten = NEVER);
        let mut by_block: BTreeMap<usize, Vec<Undo>> = BTreeMap::new();
        for undo in std::mem::take(&mut self.undo) {
            by_block.entry(undo.block).or_default().push(undo);
        }
        let mut landings = BTreeMap::new();
        let unit = self.traits.sector_bytes as usize / SECTOR_BYTES;
        for (block, undos) in by_block {
            let visible = std::mem::take(&mut self.blocks[block]);
            let mut new = ZEROES;
            for first in (0..SECTORS_PER_BLOCK).step_by(unit) {
                let touching: Vec<&Undo> =
                    undos.iter().filter(|undo| undo.sectors & 1 << first != 0).collect();
                let kept = touching.iter().rposition(|undo| {
                    let landing = landings.entry(undo.write).or_insert_with(|| match loss {
                        Loss::Everything => Landing::None,
                        Loss::Nothing => Landing::All,
                        Loss::EachWrite => Landing::draw(prng),
                        Loss::EachSector => Landing::Some,
                    });
                    landing.lands(prng)
                });
                // What stood there after the last write that was kept.
                let after = kept.map_or(0, |kept| kept + 1);
                let left = touching.get(after).map_or(&visible, |undo| &undo.old);
                let bytes = first * SECTOR_BYTES..(first + unit) * SECTOR_BYTES;
                new[bytes.clone()].copy_from_slice(&left.bytes()[bytes]);
            }
            if new != ZEROES {
                self.blocks[block] = Content::filled(|block| *block = new);
            }
        }
    }

    /// Unflushed blocks, for the trace.
    pub fn unflushed(&self) -> usize {
        self.undo.len()
    }
}

/// What a range of a drive has in one block.
struct Part {
    block: usize,
    /// The bytes of the block.
    inside: Range<usize>,
    /// Where they are in the range.
    at: usize,
}

impl Part {
    fn sectors(&self) -> Range<usize> {
        self.inside.start / SECTOR_BYTES..self.inside.end / SECTOR_BYTES
    }
}

/// Cuts a range of a drive at the edges of blocks.
fn parts(offset: u64, len: usize) -> impl Iterator<Item = Part> {
    let start = usize::try_from(offset).expect("small drives");
    let mut at = 0;
    std::iter::from_fn(move || {
        let (block, first) = ((start + at) / BLOCK_BYTES, (start + at) % BLOCK_BYTES);
        let part = Part { block, inside: first..BLOCK_BYTES.min(first + len - at), at };
        at += part.inside.len();
        (!part.inside.is_empty()).then_some(part)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drive(sector_bytes: u32) -> SimDrive {
        let traits = Traits {
            bytes: 1 << 20,
            sector_bytes,
            volatile_cache: true,
            mends: true,
            zeroes: true,
            latency_ns_min: 1,
            latency_ns_max: 2,
        };
        SimDrive::new(traits, [0; 16])
    }

    #[test]
    fn a_power_cut_loses_only_what_was_not_flushed() {
        let mut prng = Prng::from_seed(1);
        let mut drive = drive(512);
        drive.write(512, &[1; 1024]);
        let covers = drive.writes_done();
        drive.write(1024, &[2; 1024]);
        drive.flush(covers);
        drive.write(4096, &[3; 512]);
        drive.cut_power(Loss::Everything, &mut prng);
        assert_eq!(drive.peek(512, 1536), [[1; 1024].as_slice(), &[0; 512]].concat());
        assert_eq!(drive.peek(4096, 512), [0; 512]);
    }

    #[test]
    fn torn_writes_keep_whole_sectors() {
        let mut prng = Prng::from_seed(2);
        for sector in [512, 4096] {
            let mut mixed = false;
            for _ in 0..40 {
                let mut drive = drive(sector);
                drive.write(0, &[1; 16384]);
                drive.cut_power(Loss::EachSector, &mut prng);
                let unit = sector as usize;
                let after = drive.peek(0, 16384);
                for bytes in after.chunks(unit) {
                    assert!(bytes.iter().all(|byte| *byte == bytes[0]));
                }
                mixed |= after.contains(&0) && after.contains(&1);
            }
            assert!(mixed);
        }
    }
}
