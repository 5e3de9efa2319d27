//! A file under a volatile cache, for testing what a power cut does: kill the process.
//!
//! A write is answered from the cache. Its blocks reach the file with a flush, with some luck
//! before, in any order, whole or in part; and at random when the cache is full.
//!
//! Invariants:
//! - a cached block's bytes never change: a write makes new ones. So what is being written out, or
//!   laid over a read under way, stays what it was;
//! - a block leaves the cache only after all that it holds was written to the file;
//! - while a flush or zeroing runs, no other block is written out: each block has at most one
//!   write-out under way, and none passes a zeroing.

use std::collections::{BTreeMap, VecDeque};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsRawFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;

use crate::buffer::{Buffer, BufferPool, Buffers};
use crate::op::{DeviceId, Done, Errno, Op, Outcome, Ticket};
use crate::prng::Prng;

const SECTOR_BYTES: usize = 512;
const BLOCK_BYTES: usize = 4096;
const BLOCK: u64 = BLOCK_BYTES as u64;
const SECTORS: usize = BLOCK_BYTES / SECTOR_BYTES;
/// More cached blocks than this, 64 MiB, are written out before further writes are answered.
const BLOCKS_MAX: usize = (64 << 20) / BLOCK_BYTES;
/// Most writes to the file at a time.
const WRITES_MAX: usize = 32;
/// One write in so many makes some block reach the file early.
const TRICKLE_ONE_IN: u64 = 4;

/// A set of sectors of one block, as bits.
type Sectors = u8;

struct Block {
    bytes: Buffer,
    /// What of `bytes` counts; the file has the rest.
    held: Sectors,
    version: u64,
    write_out: Option<WriteOut>,
}

/// A block on its way to the file.
struct WriteOut {
    writes: usize,
    /// The version that is on the file afterwards; `None` if only parts of it are.
    version: Option<u64>,
}

/// An operation that comes after all before it.
enum Job {
    /// `None`: the drive was let go, nobody waits.
    Flush(Option<Ticket>),
    Zeroes(Ticket, Op),
}

enum Running {
    Nothing,
    /// Blocks still to be written for these flushes.
    Draining {
        blocks: Vec<u64>,
        tickets: Vec<Ticket>,
    },
    Syncing {
        tickets: Vec<Ticket>,
    },
    Zeroing,
}

/// What an operation on the file is for.
enum Errand {
    Read { ticket: Ticket, over: Vec<(u64, Sectors, Buffer)> },
    WriteOut { block: u64 },
    Sync,
    Zeroes { ticket: Ticket },
}

/// An operation on the file, and what the kernel must find in place until it is done.
struct UnderWay {
    op: Op,
    pieces: Vec<libc::iovec>,
    errand: Errand,
}

pub(crate) struct Lossy {
    file: Arc<File>,
    device: DeviceId,
    sector_bytes: usize,
    pool: Rc<BufferPool>,
    prng: Prng,
    blocks: BTreeMap<u64, Block>,
    versions: u64,
    jobs: VecDeque<Job>,
    running: Running,
    /// Writes in the cache that are answered once it has room.
    held_back: Vec<Done>,
    /// Of operations on the file: those under way that write blocks out.
    writes: usize,
    /// One of them failed since this was last looked at.
    failed: Option<Errno>,
    under_way: Vec<Option<UnderWay>>,
    free: Vec<u32>,
    requests: VecDeque<u32>,
    closing: bool,
    /// To be reaped.
    pub(crate) finished: Vec<Done>,
}

impl Lossy {
    pub(crate) fn new(file: Arc<File>, device: DeviceId, sector_bytes: u32, seed: u64) -> Lossy {
        assert!(matches!(sector_bytes, 512 | 4096), "sectors of {sector_bytes}");
        Lossy {
            file,
            device,
            sector_bytes: sector_bytes as usize,
            pool: BufferPool::new(),
            prng: Prng::from_seed(seed),
            blocks: BTreeMap::new(),
            versions: 0,
            jobs: VecDeque::new(),
            running: Running::Nothing,
            held_back: Vec::new(),
            writes: 0,
            failed: None,
            under_way: Vec::new(),
            free: Vec::new(),
            requests: VecDeque::new(),
            closing: false,
            finished: Vec::new(),
        }
    }

    pub(crate) fn submit(&mut self, ticket: Ticket, op: &Op) {
        match op {
            Op::Read { offset, into, .. } => self.read(ticket, *offset, into, op),
            Op::Write { offset, from, .. } => self.write(ticket, *offset, from),
            Op::Flush { .. } => self.jobs.push_back(Job::Flush(Some(ticket))),
            Op::WriteZeroes { .. } => self.jobs.push_back(Job::Zeroes(ticket, op.clone())),
            Op::Descriptor { .. } => unreachable!("not an operation on a device"),
        }
        self.advance();
    }

    /// The drive is let go, which is no power cut: what is cached goes to the file.
    pub(crate) fn close(&mut self) {
        self.closing = true;
        self.jobs.push_back(Job::Flush(None));
        self.advance();
    }

    /// Closed, and nothing of it is with the kernel.
    pub(crate) fn is_gone(&self) -> bool {
        self.closing && self.under_way.iter().all(Option::is_none)
    }

    /// The next operation on the file to start, by a token for `complete`.
    pub(crate) fn next_request(&mut self) -> Option<(u32, RawFd, &Op, &mut Vec<libc::iovec>)> {
        let token = self.requests.pop_front()?;
        let its = self.under_way[token as usize].as_mut().expect("asked for and not started");
        Some((token, self.file.as_raw_fd(), &its.op, &mut its.pieces))
    }

    pub(crate) fn complete(&mut self, token: u32, outcome: Outcome) {
        let its = self.under_way[token as usize].take().expect("it was under way");
        self.free.push(token);
        match (its.errand, &its.op) {
            (Errand::Read { ticket, over }, Op::Read { offset, into, .. }) => {
                if outcome == Ok(into.len() as u64) {
                    over.iter().for_each(|(block, held, bytes)| {
                        lay_over(into, *offset, *block, *held, bytes);
                    });
                }
                self.finished.push(Done { ticket, outcome });
            }
            (Errand::WriteOut { block }, Op::Write { from, .. }) => {
                let failed = match outcome {
                    Ok(moved) if moved == from.len() as u64 => None,
                    Ok(_) => Some(Errno(libc::ENOSPC)),
                    Err(errno) => Some(errno),
                };
                self.written_out(block, failed);
            }
            (Errand::Sync, _) => self.synced(outcome),
            (Errand::Zeroes { ticket }, Op::WriteZeroes { offset, len, .. }) => {
                if outcome.is_ok() {
                    self.forget(*offset..*offset + *len);
                }
                self.running = Running::Nothing;
                self.finished.push(Done { ticket, outcome });
            }
            (Errand::Read { .. } | Errand::WriteOut { .. } | Errand::Zeroes { .. }, _) => {
                unreachable!("an errand of another operation")
            }
        }
        self.advance();
    }

    /// From the cache if all of it is there; else from the file, with what is cached now over it.
    fn read(&mut self, ticket: Ticket, offset: u64, into: &Buffers, op: &Op) {
        let range = offset..offset + into.len() as u64;
        let cached = self.blocks.range(blocks_of(&range));
        let over: Vec<_> = cached.map(|(at, its)| (*at, its.held, its.bytes.clone())).collect();
        let held = |block: u64| {
            let found = over.binary_search_by_key(&block, |(at, ..)| *at);
            found.map_or(0, |index| over[index].1)
        };
        let wanted = |block: u64| sectors_of(block, &range);
        if blocks_of(&range).all(|block| wanted(block) & !held(block) == 0) {
            over.iter().for_each(|(block, held, bytes)| {
                lay_over(into, offset, *block, *held, bytes);
            });
            self.finished.push(Done { ticket, outcome: Ok(into.len() as u64) });
            return;
        }
        self.request(op.clone(), Errand::Read { ticket, over });
    }

    fn write(&mut self, ticket: Ticket, offset: u64, from: &Buffers) {
        let len = from.len() as u64;
        if !(offset | len).is_multiple_of(self.sector_bytes as u64) {
            self.finished.push(Done { ticket, outcome: Err(Errno(libc::EINVAL)) });
            return;
        }
        let range = offset..offset + len;
        for block in blocks_of(&range) {
            self.cache(block, &range, from);
        }
        self.held_back.push(Done { ticket, outcome: Ok(len) });
        if self.prng.chance(1, TRICKLE_ONE_IN) {
            self.trickle();
        }
    }

    /// Keeps what a write of `range` says about one block.
    fn cache(&mut self, block: u64, range: &Range<u64>, from: &Buffers) {
        let start = block * BLOCK;
        let (begin, end) = (range.start.max(start), range.end.min(start + BLOCK));
        let bytes = self.pool.take(BLOCK_BYTES);
        let old = self.blocks.remove(&block);
        if let Some(old) = &old {
            bytes.copy_from(&old.bytes);
        }
        let part = from.slice(to_usize(begin - range.start)..to_usize(end - range.start));
        let place = bytes.slice(to_usize(begin - start)..to_usize(end - start));
        Buffers::from(place).copy_from(&part);
        self.versions += 1;
        let held = sectors_of(block, range) | old.as_ref().map_or(0, |old| old.held);
        let write_out = old.and_then(|old| old.write_out);
        self.blocks.insert(block, Block { bytes, held, version: self.versions, write_out });
    }

    /// Some block reaches the file, whole or in part, without being asked.
    fn trickle(&mut self) {
        let free = matches!(self.running, Running::Nothing) && self.jobs.is_empty();
        if free
            && self.writes < WRITES_MAX
            && let Some(block) = self.draw_block()
        {
            let torn = self.sector_bytes < BLOCK_BYTES && self.prng.chance(1, 2);
            let some = self.prng.next_u64().to_le_bytes()[0];
            let sectors = if torn { some } else { Sectors::MAX };
            self.write_out(block, sectors);
        }
    }

    /// A block that is not being written out.
    fn draw_block(&mut self) -> Option<u64> {
        let last = *self.blocks.last_key_value()?.0;
        let at = self.prng.below(last + 1);
        let mut all = self.blocks.range(at..).chain(self.blocks.range(..at));
        all.find(|(_, block)| block.write_out.is_none()).map(|(at, _)| *at)
    }

    /// Writes these sectors of a block, of those that it holds.
    fn write_out(&mut self, at: u64, sectors: Sectors) {
        let block = self.blocks.get_mut(&at).expect("a cached block");
        assert!(block.write_out.is_none(), "block {at} is being written out");
        let whole = block.held & !sectors == 0;
        let runs: Vec<Range<usize>> = runs(block.held & sectors).collect();
        if runs.is_empty() {
            return;
        }
        let version = whole.then_some(block.version);
        block.write_out = Some(WriteOut { writes: runs.len(), version });
        let bytes = block.bytes.clone();
        self.writes += runs.len();
        for run in runs {
            let (device, offset) = (self.device, at * BLOCK + run.start as u64);
            let op = Op::Write { device, offset, from: bytes.slice(run).into() };
            self.request(op, Errand::WriteOut { block: at });
        }
    }

    fn written_out(&mut self, at: u64, failed: Option<Errno>) {
        self.writes -= 1;
        let block = self.blocks.get_mut(&at).expect("it stays until it was written out");
        let write_out = block.write_out.as_mut().expect("it is being written out");
        write_out.writes -= 1;
        if failed.is_some() {
            (self.failed, write_out.version) = (failed, None);
        }
        if write_out.writes > 0 {
            return;
        }
        if write_out.version == Some(block.version) {
            self.blocks.remove(&at);
        } else {
            block.write_out = None;
        }
    }

    /// Drops what is cached of a range.
    fn forget(&mut self, range: Range<u64>) {
        let blocks: Vec<u64> = self.blocks.range(blocks_of(&range)).map(|(at, _)| *at).collect();
        for at in blocks {
            let block = self.blocks.get_mut(&at).expect("found above");
            block.held &= !sectors_of(at, &range);
            if block.held == 0 {
                self.blocks.remove(&at);
            }
        }
    }

    /// Begins what can begin now.
    fn advance(&mut self) {
        if matches!(self.running, Running::Nothing) && self.writes == 0 {
            self.begin_job();
        }
        match &mut self.running {
            Running::Draining { blocks, .. } => {
                let room = WRITES_MAX.saturating_sub(self.writes).min(blocks.len());
                let next = blocks.split_off(blocks.len() - room);
                let drained = next.is_empty() && self.writes == 0;
                next.into_iter().for_each(|block| self.write_out(block, Sectors::MAX));
                if drained {
                    self.sync();
                }
            }
            Running::Nothing if self.jobs.is_empty() => self.spill(),
            Running::Nothing | Running::Syncing { .. } | Running::Zeroing => {}
        }
        self.answer_writes();
    }

    fn begin_job(&mut self) {
        // A write-out before this flush may have failed; its block is still here and goes again.
        self.failed = None;
        match self.jobs.pop_front() {
            Some(Job::Zeroes(ticket, op)) => {
                self.running = Running::Zeroing;
                self.request(op, Errand::Zeroes { ticket });
            }
            Some(Job::Flush(ticket)) => {
                let blocks = self.blocks.keys().copied().collect();
                let mut tickets = Vec::from_iter(ticket);
                while let Some(Job::Flush(ticket)) = self.jobs.front() {
                    tickets.extend(*ticket);
                    self.jobs.pop_front();
                }
                self.running = Running::Draining { blocks, tickets };
            }
            None => {}
        }
    }

    /// All blocks of a flush were written, or could not be.
    fn sync(&mut self) {
        let Running::Draining { tickets, .. } = &mut self.running else {
            unreachable!("only a flush that has drained");
        };
        let tickets = std::mem::take(tickets);
        self.running = Running::Syncing { tickets };
        match self.failed.take() {
            None => self.request(Op::Flush { device: self.device }, Errand::Sync),
            Some(errno) => {
                self.synced(Err(errno));
                self.advance();
            }
        }
    }

    fn synced(&mut self, outcome: Outcome) {
        let running = std::mem::replace(&mut self.running, Running::Nothing);
        let Running::Syncing { tickets } = running else {
            unreachable!("only a flush syncs");
        };
        self.finished.extend(tickets.into_iter().map(|ticket| Done { ticket, outcome }));
    }

    /// A full cache gives blocks up, in no order.
    fn spill(&mut self) {
        if let Some(errno) = self.failed.take() {
            let refused = self.held_back.drain(..);
            self.finished.extend(refused.map(|its| Done { outcome: Err(errno), ..its }));
        }
        while !self.held_back.is_empty()
            && self.blocks.len() > BLOCKS_MAX + self.writes
            && self.writes < WRITES_MAX
            && let Some(block) = self.draw_block()
        {
            self.write_out(block, Sectors::MAX);
        }
    }

    fn answer_writes(&mut self) {
        if self.blocks.len() <= BLOCKS_MAX {
            self.finished.append(&mut self.held_back);
        }
    }

    fn request(&mut self, op: Op, errand: Errand) {
        let token = self.free.pop().unwrap_or_else(|| {
            self.under_way.push(None);
            u32::try_from(self.under_way.len() - 1).expect("few operations")
        });
        self.under_way[token as usize] = Some(UnderWay { op, pieces: Vec::new(), errand });
        self.requests.push_back(token);
    }
}

/// Blocks that a byte range touches.
fn blocks_of(range: &Range<u64>) -> Range<u64> {
    range.start / BLOCK..range.end.div_ceil(BLOCK)
}

/// Sectors of `block` that a byte range covers: for 512..1536 of block 0 they are 0b110.
fn sectors_of(block: u64, range: &Range<u64>) -> Sectors {
    let sector = |at: u64| to_usize(at.saturating_sub(block * BLOCK).min(BLOCK)) / SECTOR_BYTES;
    (sector(range.start)..sector(range.end)).fold(0, |bits, sector| bits | 1 << sector)
}

/// Byte ranges of a block in which sectors follow each other.
fn runs(sectors: Sectors) -> impl Iterator<Item = Range<usize>> {
    let has = move |sector: usize| sector < SECTORS && sectors & 1 << sector != 0;
    let starts =
        (0..SECTORS).filter(move |sector| has(*sector) && (*sector == 0 || !has(sector - 1)));
    starts.map(move |start| {
        let end = (start..=SECTORS).find(|sector| !has(*sector)).expect("a block has an end");
        start * SECTOR_BYTES..end * SECTOR_BYTES
    })
}

/// Copies what a cached block holds over what a read of `into` from `offset` has brought.
fn lay_over(into: &Buffers, offset: u64, block: u64, held: Sectors, bytes: &Buffer) {
    let (start, end) = (block * BLOCK, offset + into.len() as u64);
    for run in runs(held) {
        let from = (start + run.start as u64).max(offset);
        let to = (start + run.end as u64).min(end);
        if from < to {
            let part = bytes.slice(to_usize(from - start)..to_usize(to - start));
            let place = into.slice(to_usize(from - offset)..to_usize(to - offset));
            place.copy_from(&part.into());
        }
    }
}

fn to_usize(small: u64) -> usize {
    usize::try_from(small).expect("inside a buffer")
}
