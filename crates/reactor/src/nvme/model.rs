//! A software model of an NVMe controller behind an IOMMU, for tests: registers, queues and blocks
//! in memory, and faults on demand. It serves what a doorbell announces before the doorbell's write
//! returns; time passes only when someone waits.
//!
//! It reads the specification for itself: nothing of the driver's encoding is used here.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::bus::Bus;
use crate::backend::Instant;

pub(crate) const BLOCK_BYTES: usize = 512;
pub(crate) const BLOCKS: usize = 16 << 10;
const PAGE: u64 = 4096;
/// Queue entries, less one, that CAP offers.
const MQES: u32 = 63;
const INVALID_OPCODE: u16 = 0x01;
const TRANSFER_ERROR: u16 = 0x04;
const OUT_OF_RANGE: u16 = 0x80;
const UNRECOVERED_READ: u16 = 0x281;
const ABORTED: u16 = 0x07;

/// What it does wrong.
#[derive(Default)]
pub(crate) struct Faults {
    /// I/O commands are carried out, but never answered.
    pub(crate) mute: bool,
    /// I/O commands are kept, neither carried out nor answered.
    pub(crate) holds: bool,
    pub(crate) answers_twice: bool,
    /// Answers for this command, whatever was asked.
    pub(crate) wrong_id: Option<u16>,
    pub(crate) wrong_head: Option<u16>,
    pub(crate) wrong_queue: Option<u16>,
    pub(crate) wrong_phase: bool,
    /// Status of I/O commands.
    pub(crate) status: Option<u16>,
    /// Blocks that cannot be read.
    pub(crate) unreadable: Option<u64>,
    /// Aborts are answered and do nothing.
    pub(crate) ignores_aborts: bool,
    pub(crate) mute_admin: bool,
    /// It cannot be disabled, and goes on.
    pub(crate) stays_ready: bool,
    pub(crate) stays_unready: bool,
    /// Until it is reset.
    pub(crate) fatal: bool,
    /// Every register reads as all ones.
    pub(crate) removed: bool,
    /// The system wants it back.
    pub(crate) wanted: bool,
    /// Nothing more can be mapped for it.
    pub(crate) unmappable: bool,
    /// Nothing can be taken from it.
    pub(crate) clings: bool,
}

/// What kind of drive it is.
pub(crate) struct Kind {
    pub(crate) serial: &'static str,
    pub(crate) transfer_log2: u8,
    pub(crate) write_zeroes: bool,
    pub(crate) volatile_cache: bool,
    pub(crate) metadata_bytes: u8,
}

#[derive(Clone, Copy, Default)]
struct Ring {
    at: u64,
    entries: u16,
    index: u16,
    phase: bool,
}

struct State {
    faults: Faults,
    kind: Kind,
    configuration: u32,
    ready: bool,
    admin: [u32; 5],
    submission: BTreeMap<u16, (Ring, u16)>,
    completion: BTreeMap<u16, Ring>,
    held: VecDeque<(u16, [u32; 16])>,
    data: Vec<u8>,
    mappings: BTreeMap<u64, (usize, usize)>,
    next_at: u64,
    /// It reached for memory that was not mapped for it.
    strays: usize,
    now: Instant,
    resets: usize,
    /// Opcodes of I/O commands.
    served: Vec<u8>,
    dropped: bool,
}

#[derive(Clone)]
pub(crate) struct Model(Arc<Mutex<State>>);

impl Default for Model {
    fn default() -> Model {
        let kind = Kind {
            serial: "MODEL1",
            transfer_log2: 5,
            write_zeroes: true,
            volatile_cache: true,
            metadata_bytes: 0,
        };
        Model(Arc::new(Mutex::new(State {
            faults: Faults::default(),
            kind,
            configuration: 0,
            ready: false,
            admin: [0; 5],
            submission: BTreeMap::new(),
            completion: BTreeMap::new(),
            held: VecDeque::new(),
            data: vec![0; BLOCKS * BLOCK_BYTES],
            mappings: BTreeMap::new(),
            next_at: 1 << 32,
            strays: 0,
            now: Instant::from_ns(1),
            resets: 0,
            served: Vec::new(),
            dropped: false,
        })))
    }
}

impl Model {
    pub(crate) fn bus(&self) -> Box<dyn Bus> {
        Box::new(ModelBus(self.clone()))
    }

    fn state<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.0.lock().unwrap())
    }

    pub(crate) fn faults(&self, change: impl FnOnce(&mut Faults)) {
        self.state(|state| change(&mut state.faults));
    }

    pub(crate) fn kind(&self, change: impl FnOnce(&mut Kind)) {
        self.state(|state| change(&mut state.kind));
    }

    /// Carries out and answers what it holds.
    pub(crate) fn serve_held(&self) {
        self.state(|state| {
            state.faults.holds = false;
            while let Some((queue, command)) = state.held.pop_front() {
                let status = state.carry_out(&command);
                state.answer(queue, &command, 0, status);
            }
        });
    }

    pub(crate) fn pass(&self, time: Duration) {
        self.state(|state| state.now = state.now.after(time));
    }

    pub(crate) fn now(&self) -> Instant {
        self.state(|state| state.now)
    }

    pub(crate) fn mappings(&self) -> usize {
        self.state(|state| state.mappings.len())
    }

    pub(crate) fn strays(&self) -> usize {
        self.state(|state| state.strays)
    }

    pub(crate) fn resets(&self) -> usize {
        self.state(|state| state.resets)
    }

    pub(crate) fn is_let_go(&self) -> bool {
        self.state(|state| state.dropped)
    }

    /// Opcodes of the I/O commands since the last call.
    pub(crate) fn served(&self) -> Vec<u8> {
        self.state(|state| std::mem::take(&mut state.served))
    }

    pub(crate) fn bytes(&self, offset: usize, len: usize) -> Vec<u8> {
        self.state(|state| state.data[offset..offset + len].to_vec())
    }
}

struct ModelBus(Model);

impl Drop for ModelBus {
    fn drop(&mut self) {
        self.0.state(|state| {
            state.mappings.clear();
            state.dropped = true;
        });
    }
}

impl Bus for ModelBus {
    fn read(&self, offset: usize) -> u32 {
        self.0.state(|state| state.register(offset))
    }

    fn write(&self, offset: usize, value: u32) {
        self.0.state(|state| state.set_register(offset, value));
    }

    unsafe fn map(&mut self, start: NonNull<u8>, len: usize) -> io::Result<u64> {
        assert!(start.as_ptr().addr().is_multiple_of(4096) && len.is_multiple_of(4096));
        self.0.state(|state| {
            if state.faults.unmappable {
                return Err(io::Error::from_raw_os_error(libc::ENOMEM));
            }
            let at = state.next_at;
            state.next_at += len as u64;
            state.mappings.insert(at, (start.as_ptr().expose_provenance(), len));
            Ok(at)
        })
    }

    fn unmap(&mut self, at: u64, len: usize) -> io::Result<()> {
        self.0.state(|state| {
            if state.faults.clings {
                return Err(io::Error::from_raw_os_error(libc::EIO));
            }
            let (_, mapped) = state.mappings.remove(&at).expect("a mapping");
            assert!(mapped == len);
            Ok(())
        })
    }

    fn events(&self) -> Option<RawFd> {
        None
    }

    fn take_events(&mut self) -> bool {
        self.0.state(|state| state.faults.wanted)
    }

    fn wait(&mut self, wait: Duration) {
        self.0.pass(wait);
    }

    fn now(&self) -> Instant {
        self.0.now()
    }
}

impl State {
    fn register(&self, offset: usize) -> u32 {
        if self.faults.removed {
            return u32::MAX;
        }
        match offset {
            // TO: 1 s.
            0x00 => MQES | 1 << 16 | 2 << 24,
            // The NVM command set; doorbells 8 bytes apart.
            0x04 => 1 << 5 | 1,
            0x14 => self.configuration,
            0x1c => {
                let ready = self.ready && !self.faults.stays_unready;
                let shut = if self.configuration >> 14 & 3 == 1 { 0b10 << 2 } else { 0 };
                u32::from(ready || self.faults.stays_ready)
                    | u32::from(self.faults.fatal) << 1
                    | shut
            }
            _ => 0,
        }
    }

    fn set_register(&mut self, offset: usize, value: u32) {
        if self.faults.removed {
            return;
        }
        match offset {
            0x14 => self.configure(value),
            0x24 => self.admin[0] = value,
            0x28..=0x34 => self.admin[1 + (offset - 0x28) / 4] = value,
            0x1000.. if self.ready => {
                let index = u16::try_from((offset - 0x1000) / 8).unwrap();
                if index.is_multiple_of(2) {
                    self.serve(index / 2, u16::try_from(value).unwrap());
                }
            }
            _ => panic!("a write of {value:#x} to register {offset:#x}"),
        }
    }

    fn configure(&mut self, value: u32) {
        self.configuration = value;
        if value & 1 == 0 {
            if self.faults.stays_ready {
                return;
            }
            self.faults.fatal &= !self.ready;
            self.resets += usize::from(self.ready);
            self.ready = false;
            self.submission.clear();
            self.completion.clear();
            self.held.clear();
            return;
        }
        if !self.ready {
            assert!(value >> 16 & 0xf == 6 && value >> 20 & 0xf == 4 && value >> 7 & 0xf == 0);
            let [sizes, asq_low, asq_high, acq_low, acq_high] = self.admin.map(u64::from);
            let entries = |sizes: u64| u16::try_from(sizes & 0xfff).unwrap() + 1;
            let submission =
                Ring { at: asq_high << 32 | asq_low, entries: entries(sizes), ..Ring::default() };
            let (at, entries) = (acq_high << 32 | acq_low, entries(sizes >> 16));
            self.submission.insert(0, (submission, 0));
            self.completion.insert(0, Ring { at, entries, index: 0, phase: true });
            self.ready = true;
        }
    }

    /// Memory that is mapped for it.
    fn reach(&mut self, at: u64, len: usize) -> Option<*mut u8> {
        let found = self.mappings.range(..=at).next_back();
        let found = found.and_then(|(start, (place, mapped))| {
            let inside = usize::try_from(at - start).unwrap();
            (inside + len <= *mapped).then_some(place + inside)
        });
        self.strays += usize::from(found.is_none());
        found.map(std::ptr::with_exposed_provenance_mut)
    }

    fn get(&mut self, at: u64, bytes: &mut [u8]) -> Option<()> {
        let place = self.reach(at, bytes.len())?;
        // SAFETY: mapped by the driver, which keeps it until it takes it away.
        unsafe { std::ptr::copy(place, bytes.as_mut_ptr(), bytes.len()) };
        Some(())
    }

    fn put(&mut self, at: u64, bytes: &[u8]) -> Option<()> {
        let place = self.reach(at, bytes.len())?;
        // SAFETY: as in `get`.
        unsafe { std::ptr::copy(bytes.as_ptr(), place, bytes.len()) };
        Some(())
    }

    fn serve(&mut self, queue: u16, tail: u16) {
        loop {
            let Some((ring, answers)) = self.submission.get(&queue).copied() else { return };
            assert!(tail < ring.entries, "a doorbell behind the end");
            if ring.index == tail {
                return;
            }
            let mut bytes = [0; 64];
            if self.get(ring.at + 64 * u64::from(ring.index), &mut bytes).is_none() {
                return;
            }
            let (next, _) = self.submission.get_mut(&queue).unwrap();
            next.index = (ring.index + 1) % ring.entries;
            let word = |i: usize| u32::from_le_bytes(std::array::from_fn(|b| bytes[4 * i + b]));
            let command: [u32; 16] = std::array::from_fn(word);
            match queue {
                0 if self.faults.mute_admin => {}
                0 => self.serve_admin(&command),
                _ => self.serve_io(answers, &command),
            }
        }
    }

    fn serve_io(&mut self, queue: u16, command: &[u32; 16]) {
        self.served.push(u8::try_from(command[0] & 0xff).unwrap());
        if self.faults.holds {
            self.held.push_back((queue, *command));
            return;
        }
        let status = self.faults.status.unwrap_or_else(|| self.carry_out(command));
        if self.faults.mute {
            return;
        }
        self.answer(queue, command, 0, status);
        if self.faults.answers_twice {
            self.answer(queue, command, 0, status);
        }
    }

    /// Posts a completion.
    fn answer(&mut self, queue: u16, command: &[u32; 16], result: u32, status: u16) {
        let Some(ring) = self.completion.get(&queue).copied() else { return };
        let its = |wrong: Option<u16>, right: u16| {
            if queue == 0 { right } else { wrong.unwrap_or(right) }
        };
        let head = self.submission.get(&queue).map_or(0, |(ring, _)| ring.index);
        let head = its(self.faults.wrong_head, head);
        let about = its(self.faults.wrong_queue, queue);
        let id = its(self.faults.wrong_id, u16::try_from(command[0] >> 16).unwrap());
        let phase = ring.phase != (queue != 0 && self.faults.wrong_phase);
        let words = [
            result,
            0,
            u32::from(about) << 16 | u32::from(head),
            u32::from(status) << 17 | u32::from(phase) << 16 | u32::from(id),
        ];
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
        self.put(ring.at + 16 * u64::from(ring.index), &bytes);
        let ring = self.completion.get_mut(&queue).unwrap();
        ring.index = (ring.index + 1) % ring.entries;
        ring.phase ^= ring.index == 0;
    }

    fn serve_admin(&mut self, command: &[u32; 16]) {
        let low = |word: u32| u16::try_from(word & 0xffff).unwrap();
        let data = u64::from(command[7]) << 32 | u64::from(command[6]);
        let (id, entries) = (low(command[10]), low(command[10] >> 16).wrapping_add(1));
        let mut result = 0;
        match command[0] & 0xff {
            0x06 => {
                let page = self.identify(command[10] & 0xff);
                self.put(data, &page);
            }
            0x09 => assert!(command[10] & 0xff == 7),
            0x05 => {
                assert!(command[11] & 1 == 1 && u32::from(entries) <= MQES + 1);
                self.completion.insert(id, Ring { at: data, entries, index: 0, phase: true });
            }
            0x01 => {
                assert!(self.completion.contains_key(&low(command[11] >> 16)));
                let ring = Ring { at: data, entries, ..Ring::default() };
                self.submission.insert(id, (ring, low(command[11] >> 16)));
            }
            0x08 => {
                result = 1;
                let wanted = command[10] >> 16;
                let found = self.held.iter().position(|(_, held)| held[0] >> 16 == wanted);
                if let Some(index) = found.filter(|_| !self.faults.ignores_aborts) {
                    let (queue, held) = self.held.remove(index).unwrap();
                    self.answer(queue, &held, 0, ABORTED);
                    result = 0;
                }
            }
            other => panic!("admin command {other:#x}"),
        }
        self.answer(0, command, result, 0);
    }

    fn identify(&self, what: u32) -> Vec<u8> {
        let mut page = vec![0; 4096];
        match what {
            // One format, of 512-byte blocks; deallocated blocks read as zeroes.
            0 => {
                page[..8].copy_from_slice(&(BLOCKS as u64).to_le_bytes());
                (page[33], page[128], page[130]) = (0b1001, self.kind.metadata_bytes, 9);
            }
            1 => {
                page[4..24].fill(b' ');
                page[4..4 + self.kind.serial.len()].copy_from_slice(self.kind.serial.as_bytes());
                page[24..64].fill(b' ');
                page[77] = self.kind.transfer_log2;
                page[520] = 1 << 2 | u8::from(self.kind.write_zeroes) << 3;
                page[525] = u8::from(self.kind.volatile_cache);
            }
            2 => page[0] = 1,
            other => panic!("Identify {other}"),
        }
        page
    }

    fn carry_out(&mut self, command: &[u32; 16]) -> u16 {
        assert!(command[1] == 1, "namespace {}", command[1]);
        let lba = u64::from(command[11]) << 32 | u64::from(command[10]);
        let blocks = u64::from(command[12] & 0xffff) + 1;
        let opcode = command[0] & 0xff;
        let done = match opcode {
            0x00 => Ok(()),
            0x01 | 0x02 | 0x08 if lba + blocks > BLOCKS as u64 => Err(OUT_OF_RANGE),
            0x08 => {
                self.zero(lba, blocks);
                Ok(())
            }
            0x01 | 0x02 => self.transfer(command, opcode == 0x01, lba, blocks),
            _ => Err(INVALID_OPCODE),
        };
        done.err().unwrap_or(0)
    }

    fn zero(&mut self, lba: u64, blocks: u64) {
        let place = |block: u64| usize::try_from(block).unwrap() * BLOCK_BYTES;
        self.data[place(lba)..place(lba + blocks)].fill(0);
    }

    fn transfer(
        &mut self,
        command: &[u32; 16],
        is_write: bool,
        lba: u64,
        blocks: u64,
    ) -> Result<(), u16> {
        let bytes = usize::try_from(blocks).unwrap() * BLOCK_BYTES;
        assert!(bytes <= 4096 << self.kind.transfer_log2, "more than MDTS");
        if self.faults.unreadable.is_some_and(|bad| !is_write && (lba..lba + blocks).contains(&bad))
        {
            return Err(UNRECOVERED_READ);
        }
        let mut at = usize::try_from(lba).unwrap() * BLOCK_BYTES;
        for (place, len) in self.walk(command, bytes)? {
            if is_write {
                let mut part = vec![0; len];
                self.get(place, &mut part).ok_or(TRANSFER_ERROR)?;
                self.data[at..at + len].copy_from_slice(&part);
            } else {
                let part = self.data[at..at + len].to_vec();
                self.put(place, &part).ok_or(TRANSFER_ERROR)?;
            }
            at += len;
        }
        Ok(())
    }

    /// Where `bytes` of data are, by Base 4.1.1: PRP 2 is the second page, or a list of all but the
    /// first.
    fn walk(&mut self, command: &[u32; 16], bytes: usize) -> Result<Vec<(u64, usize)>, u16> {
        let entry = |i: usize| u64::from(command[i + 1]) << 32 | u64::from(command[i]);
        let (first, second) = (entry(6), entry(8));
        let head = usize::try_from(PAGE - first % PAGE).unwrap().min(bytes);
        let mut found = vec![(first, head)];
        let mut left = bytes - head;
        let in_list = left > 4096;
        let mut index = 0;
        while left > 0 {
            let page = if in_list {
                let mut entry = [0; 8];
                self.get(second + 8 * index, &mut entry).ok_or(TRANSFER_ERROR)?;
                u64::from_le_bytes(entry)
            } else {
                second
            };
            assert!(page.is_multiple_of(PAGE), "a page with an offset in the middle");
            found.push((page, left.min(4096)));
            left -= left.min(4096);
            index += 1;
        }
        Ok(found)
    }
}
