//! What every read may return, for each sector of a volume.
//!
//! A sector has *entries*: the writes whose content it may hold, now or after a crash. An entry is
//! in flight until its write is answered. A write that is acknowledged makes every entry *dead*
//! that had ended before that write was submitted: no later read may return it. A power cut
//! revives dead entries, unless a flush was acknowledged that had been submitted after they died.
//! A crash of the process only ends what was in flight.
//!
//! Where several entries are possible and none is in flight, the first read decides: the others
//! die. (Only a flush makes that durable, too: a read alone makes nothing so.)
//!
//! Every sector carries seed, number and version, so a misplaced one names itself, and its bytes
//! depend on all three, so a mixture is seen.

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZero;

use ashlar_reactor::buffer::Buffers;
use smallvec::{SmallVec, smallvec};

pub const SECTOR: usize = 512;
pub type Sector = [u8; SECTOR];
const MAGIC: u64 = 0x4153_484c_5345_4354;
const ZEROES: Sector = [0; SECTOR];
/// Words of a sector that say whose it is.
const HEAD_WORDS: usize = 4;
/// What the words of a sector differ by. A table, so that many are made at once.
const STEPS: [u64; SECTOR / 8] = {
    let mut steps = [0u64; SECTOR / 8];
    let mut index = 1;
    while index < steps.len() {
        steps[index] = steps[index - 1].wrapping_add(0x5851_f42d_4c95_7f2d);
        index += 1;
    }
    steps
};

/// Logical time: one step for each event.
type Moment = NonZero<u32>;
const BEGINNING: Moment = Moment::MIN;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The ticket of its write.
    write: u32,
    zeroes: bool,
    /// Dead durably: a power cut does not revive it.
    gone: bool,
    /// When it was answered; `None` while it is in flight.
    ended: Option<Moment>,
    dead: Option<Moment>,
}

impl Entry {
    const INITIAL: Entry =
        Entry { write: 0, zeroes: true, gone: false, ended: Some(BEGINNING), dead: None };

    /// What the sector says of itself; zero: it reads as zeroes.
    fn version(&self) -> u32 {
        if self.zeroes { 0 } else { self.write }
    }
}

/// What a sector may hold.
type Entries = SmallVec<[Entry; 3]>;

/// Sectors that are kept together; a group whose sectors were never written is not there.
const GROUP: usize = 64;
type Group = Box<[Entries; GROUP]>;

/// A write or read under way.
#[derive(Clone, Debug)]
pub struct Ticket {
    first: u64,
    count: u64,
    began: Moment,
    id: u32,
}

pub struct Oracle {
    seed: u64,
    groups: Vec<Option<Group>>,
    /// Sectors (first, count) with entries that died then and are not gone yet, in order of time.
    dying: VecDeque<(Moment, u64, u64)>,
    clock: Moment,
    next_id: u32,
    /// When each read under way began.
    reads: BTreeMap<u32, Moment>,
    pub sectors_checked: u64,
}

fn place(sector: u64) -> (usize, usize) {
    let sector = usize::try_from(sector).expect("small volumes");
    (sector / GROUP, sector % GROUP)
}

impl Oracle {
    pub fn new(seed: u64) -> Oracle {
        Oracle {
            seed,
            groups: Vec::new(),
            dying: VecDeque::new(),
            clock: BEGINNING,
            next_id: 1,
            reads: BTreeMap::new(),
            sectors_checked: 0,
        }
    }

    fn tick(&mut self) -> Moment {
        self.clock = self.clock.checked_add(1).expect("fewer than 2^32 events");
        self.clock
    }

    fn ticket(&mut self, offset: u64, len: u64) -> Ticket {
        assert!((offset | len).is_multiple_of(SECTOR as u64));
        let began = self.tick();
        self.next_id += 1;
        let (first, count) = (offset / SECTOR as u64, len / SECTOR as u64);
        Ticket { first, count, began, id: self.next_id }
    }

    /// The entries of a sector that may have been written.
    fn entries(&mut self, sector: u64) -> Option<&mut Entries> {
        let (group, index) = place(sector);
        Some(&mut self.groups.get_mut(group)?.as_mut()?[index])
    }

    fn all_entries(&mut self) -> impl Iterator<Item = &mut Entries> {
        self.groups.iter_mut().flatten().flat_map(|group| group.iter_mut())
    }

    /// A write begins. `zeroes`: it writes zeroes; else fill its bytes with `fill`.
    pub fn write_begins(&mut self, offset: u64, len: u64, zeroes: bool) -> Ticket {
        let ticket = self.ticket(offset, len);
        let entry = Entry { write: ticket.id, zeroes, gone: false, ended: None, dead: None };
        for sector in ticket.first..ticket.first + ticket.count {
            let (group, index) = place(sector);
            if self.groups.len() <= group {
                self.groups.resize_with(group + 1, || None);
            }
            let blank = || Box::new(std::array::from_fn(|_| smallvec![Entry::INITIAL]));
            self.groups[group].get_or_insert_with(blank)[index].push(entry);
        }
        ticket
    }

    /// Content for a write that has begun.
    pub fn fill(&self, ticket: &Ticket, into: &Buffers) {
        let mut number = ticket.first;
        for piece in into.pieces() {
            let mut piece = piece.clone();
            let (sectors, rest) = piece.bytes_mut().as_chunks_mut();
            assert!(rest.is_empty(), "requests are whole sectors");
            for sector in sectors {
                self.content(number, ticket.id, sector);
                number += 1;
            }
        }
    }

    fn content(&self, number: u64, version: u32, out: &mut Sector) {
        let [head @ .., base] = self.words(number, version);
        let (words, _) = out.as_chunks_mut::<8>();
        for (word, step) in words.iter_mut().zip(STEPS) {
            *word = base.wrapping_add(step).to_le_bytes();
        }
        words.iter_mut().zip(head).for_each(|(word, head)| *word = head.to_le_bytes());
    }

    /// The first words of a sector, which name it, and what the others are counted from: it
    /// depends on all that is named, so that a mixture is seen.
    fn words(&self, number: u64, version: u32) -> [u64; HEAD_WORDS + 1] {
        let head = [MAGIC, self.seed, number, version.into()];
        let base = head.iter().fold(0, |mixed: u64, word| {
            (mixed.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
        [head[0], head[1], head[2], head[3], base]
    }

    /// A write was answered. Without `acknowledged` nothing is known about it.
    pub fn write_ends(&mut self, ticket: &Ticket, acknowledged: bool) {
        let now = self.tick();
        for sector in ticket.first..ticket.first + ticket.count {
            let Some(entries) = self.entries(sector) else { continue };
            for entry in entries.iter_mut() {
                if entry.write == ticket.id {
                    entry.ended = Some(now);
                } else if acknowledged
                    && entry.dead.is_none()
                    && entry.ended.is_some_and(|ended| ended < ticket.began)
                {
                    entry.dead = Some(now);
                }
            }
        }
        if acknowledged {
            self.dying.push_back((now, ticket.first, ticket.count));
        }
    }

    pub fn flush_begins(&mut self) -> Moment {
        self.tick()
    }

    /// A flush that began then was acknowledged.
    pub fn flush_ends(&mut self, began: Moment) {
        self.tick();
        // Reads under way may still return what died after they began.
        let oldest_read = self.reads.values().min().copied().unwrap_or(Moment::MAX);
        while let Some((_, first, count)) = self.dying.pop_front_if(|(dead, _, _)| *dead < began) {
            for sector in first..first + count {
                let Some(entries) = self.entries(sector) else { continue };
                entries.retain(|entry| {
                    entry.gone |= entry.dead.is_some_and(|dead| dead < began);
                    !entry.gone || entry.dead.is_some_and(|dead| dead >= oldest_read)
                });
            }
        }
    }

    pub fn read_begins(&mut self, offset: u64, len: u64) -> Ticket {
        let ticket = self.ticket(offset, len);
        self.reads.insert(ticket.id, ticket.began);
        ticket
    }

    /// The read failed: nothing is learnt.
    pub fn read_fails(&mut self, ticket: &Ticket) {
        self.reads.remove(&ticket.id);
    }

    /// Checks what a read returned. The error says what is wrong with the first bad sector.
    pub fn read_ends<'a>(
        &mut self,
        ticket: &Ticket,
        sectors: impl Iterator<Item = &'a Sector>,
    ) -> Result<(), String> {
        self.reads.remove(&ticket.id);
        for (number, content) in (ticket.first..).zip(sectors) {
            self.check(number, ticket.began, content)?;
        }
        Ok(())
    }

    fn check(&mut self, number: u64, began: Moment, content: &Sector) -> Result<(), String> {
        self.sectors_checked += 1;
        let version = self.version_of(number, content);
        let Some(entries) = self.entries(number) else {
            let text = || format!("sector {number} was never written; {}", self.describe(content));
            return if version == Some(0) { Ok(()) } else { Err(text()) };
        };
        let allowed = |entry: &Entry| entry.dead.is_none_or(|dead| dead >= began);
        let good = version.is_some_and(|version| {
            entries.iter().any(|entry| entry.version() == version && allowed(entry))
        });
        if !good {
            return Err(format!(
                "sector {number}: {}; it may be one of {}",
                self.describe(content),
                self.describe_entries(number, began)
            ));
        }
        self.decide(number, began, version.unwrap_or(0));
        Ok(())
    }

    /// Nothing was in flight during the read: what it returned is what the sector is.
    fn decide(&mut self, number: u64, began: Moment, version: u32) {
        let now = self.clock;
        let Some(entries) = self.entries(number) else { return };
        if entries.iter().any(|entry| entry.ended.is_none_or(|ended| ended >= began)) {
            return;
        }
        let others = entries.iter_mut().filter(|entry| entry.version() != version);
        let mut any = false;
        for entry in others.filter(|entry| entry.dead.is_none()) {
            entry.dead = Some(now);
            any = true;
        }
        if any {
            self.dying.push_back((now, number, 1));
        }
    }

    /// Whether any sector of a range may have been written.
    pub fn was_written(&self, offset: u64, len: u64) -> bool {
        let first = place(offset / SECTOR as u64).0;
        let last = place((offset + len - 1) / SECTOR as u64).0;
        self.groups.iter().take(last + 1).skip(first).any(Option::is_some)
    }

    /// The version that a sector's content is whole and in its place of.
    fn version_of(&self, number: u64, content: &Sector) -> Option<u32> {
        if *content == ZEROES {
            return Some(0);
        }
        let (words, _) = content.as_chunks::<8>();
        let version = u32::try_from(u64::from_le_bytes(words[3])).ok()?;
        let mut expected = ZEROES;
        self.content(number, version, &mut expected);
        (expected == *content).then_some(version)
    }

    fn describe(&self, content: &Sector) -> String {
        let (words, _) = content.as_chunks::<8>();
        let word = |index: usize| u64::from_le_bytes(words[index]);
        if *content == ZEROES {
            return "it reads as zeroes".into();
        }
        if word(0) != MAGIC {
            return "it reads as garbage".into();
        }
        let (seed, number, version) = (word(1), word(2), word(3));
        let whole = self.version_of(number, content).is_some();
        let mixed = if whole { "" } else { ", mixed with something else" };
        format!("it reads as seed {seed} sector {number} version {version}{mixed}")
    }

    fn describe_entries(&mut self, number: u64, began: Moment) -> String {
        let text = |entry: &Entry| {
            let state = match (entry.dead, entry.ended) {
                (Some(dead), _) if dead >= began => "just replaced",
                (Some(_), _) => return None,
                (None, None) => "in flight",
                (None, Some(_)) => "current",
            };
            Some(format!("version {} ({state})", entry.version()))
        };
        let entries = self.entries(number).into_iter().flatten();
        entries.filter_map(|entry| text(entry)).collect::<Vec<_>>().join(", ")
    }

    /// Power was cut: everything that no flush covers may be back.
    pub fn power_cut(&mut self) {
        let now = self.tick();
        self.reads.clear();
        self.dying.clear();
        for entries in self.all_entries() {
            entries.retain(|entry| !entry.gone);
            for entry in entries.iter_mut() {
                entry.dead = None;
                entry.ended = Some(now);
            }
        }
    }

    /// The process died: what was acknowledged stays, what was in flight is unknown.
    pub fn process_crash(&mut self) {
        let now = self.tick();
        self.reads.clear();
        for entry in self.all_entries().flatten() {
            entry.ended.get_or_insert(now);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(oracle: &mut Oracle, zeroes: bool) -> (Ticket, Sector) {
        let ticket = oracle.write_begins(0, 512, zeroes);
        let mut sector = ZEROES;
        if !zeroes {
            oracle.content(0, ticket.id, &mut sector);
        }
        (ticket, sector)
    }

    fn read(oracle: &mut Oracle, sector: &Sector) -> bool {
        let ticket = oracle.read_begins(0, 512);
        oracle.read_ends(&ticket, std::iter::once(sector)).is_ok()
    }

    #[test]
    fn an_acknowledged_write_replaces_what_was_before() {
        let mut oracle = Oracle::new(5);
        let (one, first) = write(&mut oracle, false);
        let early = oracle.read_begins(0, 512);
        oracle.write_ends(&one, true);
        let zeroes = std::iter::once(&ZEROES);
        assert!(oracle.read_ends(&early, zeroes).is_ok(), "it began before the write ended");
        assert!(!read(&mut oracle, &ZEROES));
        assert!(read(&mut oracle, &first));
        let (two, second) = write(&mut oracle, false);
        assert!(
            read(&mut oracle, &first) && read(&mut oracle, &second) && read(&mut oracle, &first)
        );
        oracle.write_ends(&two, true);
        assert!(!read(&mut oracle, &first) && read(&mut oracle, &second));
    }

    #[test]
    fn a_power_cut_takes_back_what_was_not_flushed_and_a_read_decides() {
        let mut oracle = Oracle::new(5);
        let (one, first) = write(&mut oracle, false);
        oracle.write_ends(&one, true);
        let flush = oracle.flush_begins();
        oracle.flush_ends(flush);
        let (two, second) = write(&mut oracle, false);
        oracle.write_ends(&two, true);
        oracle.power_cut();
        assert!(!read(&mut oracle, &ZEROES), "the first write was flushed");
        assert!(read(&mut oracle, &first));
        assert!(!read(&mut oracle, &second), "a read has decided");
    }

    #[test]
    fn a_crash_keeps_what_was_acknowledged() {
        let mut oracle = Oracle::new(5);
        let (one, first) = write(&mut oracle, false);
        oracle.write_ends(&one, true);
        let (_two, second) = write(&mut oracle, true);
        oracle.process_crash();
        assert!(read(&mut oracle, &first));
        assert!(!read(&mut oracle, &second));
    }

    #[test]
    fn mixtures_and_strangers_are_seen() {
        let mut oracle = Oracle::new(5);
        let (one, first) = write(&mut oracle, false);
        oracle.write_ends(&one, true);
        let mut mixed = first;
        mixed[511] ^= 1;
        assert!(!read(&mut oracle, &mixed));
        let mut stranger = ZEROES;
        oracle.content(9, one.id, &mut stranger);
        assert!(!read(&mut oracle, &stranger));
    }
}
