//! The device's side of a ring, as the specification has it, over a disk that is a vector. It
//! trusts the driver: whatever is wrong is a panic.

use std::sync::atomic::{Ordering, fence};

use ashlar_reactor::prng::Prng;

use crate::client::memory::Memory;
use crate::client::parts::Places;
use crate::client::{RingKind, Wish};

const NEXT: u16 = 1;
const WRITE: u16 = 2;
const INDIRECT: u16 = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lie {
    WrongByte,
    NothingRead,
    LostWrite,
    ErrorStatus,
    NoStatus,
    ShortLength,
    WrongChain,
    AnsweredTwice,
}

impl Lie {
    pub const ALL: [Lie; 8] = [
        Lie::WrongByte,
        Lie::NothingRead,
        Lie::LostWrite,
        Lie::ErrorStatus,
        Lie::NoStatus,
        Lie::ShortLength,
        Lie::WrongChain,
        Lie::AnsweredTwice,
    ];
}

#[derive(Clone, Copy, Debug)]
struct Descriptor {
    at: usize,
    len: usize,
    writable: bool,
}

#[derive(Debug)]
struct Chain {
    id: u16,
    /// Descriptors of the ring that it takes.
    row: u16,
    pieces: Vec<Descriptor>,
}

pub struct Device {
    wish: Wish,
    places: Places,
    size: u16,
    /// In descriptors or entries since the start; a packed ring wraps at its size.
    popped: u32,
    used: u32,
    held: Vec<Chain>,
    pub served: u64,
    pub waits: bool,
    pub lie: Option<Lie>,
}

impl Device {
    pub fn new(wish: &Wish, places: Places, size: u16) -> Device {
        let (wish, lie) = (*wish, None);
        let (popped, used, held, served, waits) = (0, 0, Vec::new(), 0, false);
        Device { wish, places, size, popped, used, held, served, waits, lie }
    }

    fn word(memory: &Memory, at: usize) -> u16 {
        u16::from_le(memory.u16(at).load(Ordering::Acquire))
    }

    fn store(memory: &Memory, at: usize, value: u16) {
        memory.u16(at).store(value.to_le(), Ordering::Release);
    }

    /// Index and wrap counter of a place in a packed ring.
    fn cursor(&self, count: u32) -> (u16, bool) {
        let lap = count / u32::from(self.size);
        (u16::try_from(count % u32::from(self.size)).unwrap(), lap.is_multiple_of(2))
    }

    /// Whether it wants to be kicked for what comes next.
    pub fn say_wish(&self, memory: &Memory) {
        let Wish { ring, event_index, .. } = self.wish;
        match (ring, event_index) {
            (RingKind::Split, false) => {
                Device::store(memory, self.places.device, u16::from(!self.waits));
            }
            (RingKind::Split, true) => {
                let at = self.places.device + 4 + usize::from(self.size) * 8;
                // An entry that was made available long ago is not waited for.
                let next = u16::try_from(self.popped & 0xffff).unwrap();
                let event = if self.waits { next } else { next.wrapping_sub(1 << 15) };
                Device::store(memory, at, event);
            }
            (RingKind::Packed, _) => {
                let (index, wrap) = self.cursor(self.popped);
                let flags = if !self.waits { 1 } else { 2 * u16::from(event_index) };
                Device::store(memory, self.places.device, index | u16::from(wrap) << 15);
                Device::store(memory, self.places.device + 2, flags);
            }
        }
        fence(Ordering::SeqCst);
    }

    /// Whether the driver wants to be called for the next chain that is used.
    pub fn may_call(&self, memory: &Memory) -> bool {
        match (self.wish.ring, self.wish.event_index) {
            (RingKind::Split, false) => Device::word(memory, self.places.driver) & 1 == 0,
            (RingKind::Split, true) => {
                let at = self.places.driver + 4 + usize::from(self.size) * 2;
                let (event, used) = (Device::word(memory, at), self.used & 0xffff);
                event == u16::try_from(used).unwrap()
            }
            (RingKind::Packed, _) => Device::word(memory, self.places.driver + 2) != 1,
        }
    }

    /// Pops what is there, and answers some of what it holds, in no order.
    pub fn serve(&mut self, memory: &Memory, disk: &mut [u8], prng: &mut Prng) {
        while let Some(chain) = self.pop(memory) {
            self.held.push(chain);
        }
        self.say_wish(memory);
        let keep = prng.index(self.held.len() / 2 + 1);
        while self.held.len() > keep {
            let chain = self.held.swap_remove(prng.index(self.held.len()));
            let mut bytes = self.execute(memory, disk, &chain);
            self.served += 1;
            let lies = |lie| self.lie == Some(lie);
            if lies(Lie::ShortLength) {
                bytes = 1;
            }
            let id = if lies(Lie::WrongChain) { 999 } else { chain.id };
            let twice = lies(Lie::AnsweredTwice);
            self.push(memory, id, chain.row, bytes);
            if twice {
                self.push(memory, id, chain.row, bytes);
            }
        }
    }

    /// One descriptor: what it names, its flags, and its other 16 bits (next, or id).
    fn load(&self, memory: &Memory, at: usize) -> (Descriptor, u16, u16) {
        let address = u64::from_le(memory.u64(at).load(Ordering::Relaxed));
        let len = u32::from_le(memory.u32(at + 8).load(Ordering::Relaxed)) as usize;
        let [third, fourth] = [12, 14].map(|field| Device::word(memory, at + field));
        let (flags, other) = match self.wish.ring {
            RingKind::Split => (third, fourth),
            RingKind::Packed => (fourth, third),
        };
        let place = usize::try_from(address - memory.address(0)).unwrap();
        (Descriptor { at: place, len, writable: flags & WRITE != 0 }, flags, other)
    }

    fn pop(&mut self, memory: &Memory) -> Option<Chain> {
        match self.wish.ring {
            RingKind::Split => self.pop_split(memory),
            RingKind::Packed => self.pop_packed(memory),
        }
    }

    fn pop_split(&mut self, memory: &Memory) -> Option<Chain> {
        let available = Device::word(memory, self.places.driver + 2);
        if u32::from(available) == self.popped & 0xffff {
            return None;
        }
        let entry = usize::try_from(self.popped % u32::from(self.size)).unwrap();
        let head = Device::word(memory, self.places.driver + 4 + entry * 2);
        self.popped += 1;
        let (mut table, mut index, mut pieces) = (self.places.descriptors, head, Vec::new());
        loop {
            let (found, flags, next) = self.load(memory, table + usize::from(index) * 16);
            if flags & INDIRECT != 0 {
                assert!(self.wish.indirect && flags == INDIRECT && table != found.at);
                (table, index) = (found.at, 0);
                continue;
            }
            pieces.push(found);
            if flags & NEXT == 0 {
                return Some(Chain { id: head, row: 1, pieces });
            }
            index = next;
        }
    }

    fn pop_packed(&mut self, memory: &Memory) -> Option<Chain> {
        let mut pieces = Vec::new();
        let mut row = 0;
        loop {
            let (index, wrap) = self.cursor(self.popped + u32::from(row));
            let at = self.places.descriptors + usize::from(index) * 16;
            let flags = Device::word(memory, at + 14);
            let is_available = (flags >> 7 & 1 == 1) == wrap && (flags >> 15 & 1 == 1) != wrap;
            if !is_available {
                assert!(row == 0, "a chain whose rest is not there");
                return None;
            }
            let (found, flags, id) = self.load(memory, at);
            row += 1;
            if flags & INDIRECT != 0 {
                assert!(self.wish.indirect && row == 1 && flags & NEXT == 0);
                let table = (0..found.len / 16).map(|n| found.at + n * 16);
                pieces.extend(table.map(|at| self.load(memory, at).0));
            } else {
                pieces.push(found);
            }
            if flags & NEXT == 0 {
                self.popped += u32::from(row);
                return Some(Chain { id, row, pieces });
            }
        }
    }

    /// Does what the chain says. Bytes that were written to memory.
    fn execute(&self, memory: &Memory, disk: &mut [u8], chain: &Chain) -> u32 {
        let [header, data @ .., status] = &chain.pieces[..] else { panic!("{chain:?}") };
        assert!(!header.writable && header.len == 16 && status.writable && status.len == 1);
        let kind = u32::from_le(memory.u32(header.at).load(Ordering::Relaxed));
        let sector = u64::from_le(memory.u64(header.at + 8).load(Ordering::Relaxed));
        let mut place = usize::try_from(sector).unwrap() * 512;
        let lies = |lie| self.lie == Some(lie);
        let mut written = 1;
        assert_eq!(data.len(), usize::from(self.wish.segments));
        for piece in data {
            let part = &mut disk[place..place + piece.len];
            place += piece.len;
            match kind {
                0 => {
                    assert!(piece.writable);
                    let mut bytes = part.to_vec();
                    bytes[77] ^= u8::from(lies(Lie::WrongByte));
                    if !lies(Lie::NothingRead) {
                        memory.write(piece.at, &bytes);
                    }
                    written += u32::try_from(piece.len).unwrap();
                }
                1 => {
                    assert!(!piece.writable);
                    if !lies(Lie::LostWrite) {
                        memory.read(piece.at, part);
                    }
                }
                _ => panic!("a request of kind {kind}"),
            }
        }
        if !lies(Lie::NoStatus) {
            memory.u8(status.at).store(u8::from(lies(Lie::ErrorStatus)), Ordering::Relaxed);
        }
        written
    }

    fn push(&mut self, memory: &Memory, id: u16, row: u16, bytes: u32) {
        match self.wish.ring {
            RingKind::Split => {
                let entry = usize::try_from(self.used % u32::from(self.size)).unwrap();
                let at = self.places.device + 4 + entry * 8;
                memory.u32(at).store(u32::from(id).to_le(), Ordering::Relaxed);
                memory.u32(at + 4).store(bytes.to_le(), Ordering::Relaxed);
                self.used += 1;
                let index = u16::try_from(self.used & 0xffff).unwrap();
                Device::store(memory, self.places.device + 2, index);
            }
            RingKind::Packed => {
                let (index, wrap) = self.cursor(self.used);
                let at = self.places.descriptors + usize::from(index) * 16;
                memory.u32(at + 8).store(bytes.to_le(), Ordering::Relaxed);
                Device::store(memory, at + 12, id);
                Device::store(memory, at + 14, if wrap { 1 << 7 | 1 << 15 } else { 0 });
                self.used += u32::from(row);
            }
        }
    }
}
