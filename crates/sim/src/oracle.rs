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

use std::collections::BTreeMap;

use ashlar_reactor::buffer::Buffers;

pub const SECTOR: usize = 512;
const MAGIC: u64 = 0x4153_484c_5345_4354;

#[derive(Clone, Copy, Debug)]
struct Entry {
    /// Zero: the sector reads as zeroes.
    version: u64,
    submitted: u64,
    /// When it was answered; `None` while it is in flight.
    ended: Option<u64>,
    dead: Option<u64>,
    /// Dead durably: a power cut does not revive it.
    gone: bool,
}

impl Entry {
    fn initial() -> Entry {
        Entry { version: 0, submitted: 0, ended: Some(0), dead: None, gone: false }
    }
}

/// A write or read under way.
#[derive(Clone, Debug)]
pub struct Ticket {
    first: u64,
    count: u64,
    version: u64,
    began: u64,
    id: u64,
}

pub struct Oracle {
    seed: u64,
    sectors: BTreeMap<u64, Vec<Entry>>,
    /// Logical time: one step for each event.
    clock: u64,
    next_id: u64,
    /// When each read under way began.
    reads: BTreeMap<u64, u64>,
    pub sectors_checked: u64,
}

impl Oracle {
    pub fn new(seed: u64) -> Oracle {
        Oracle {
            seed,
            sectors: BTreeMap::new(),
            clock: 1,
            next_id: 1,
            reads: BTreeMap::new(),
            sectors_checked: 0,
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    fn ticket(&mut self, offset: u64, len: u64, version: u64) -> Ticket {
        assert!((offset | len).is_multiple_of(SECTOR as u64));
        let began = self.tick();
        self.next_id += 1;
        let (first, count) = (offset / SECTOR as u64, len / SECTOR as u64);
        Ticket { first, count, version, began, id: self.next_id }
    }

    /// A write begins. `zeroes`: it writes zeroes; else fill its bytes with `fill`.
    pub fn write_begins(&mut self, offset: u64, len: u64, zeroes: bool) -> Ticket {
        let version = if zeroes { 0 } else { self.next_id + 1 };
        let ticket = self.ticket(offset, len, version);
        let submitted = ticket.began;
        for sector in ticket.first..ticket.first + ticket.count {
            let entry = Entry { version, submitted, ended: None, dead: None, gone: false };
            self.sectors.entry(sector).or_insert_with(|| vec![Entry::initial()]).push(entry);
        }
        ticket
    }

    /// Content for a write that has begun.
    pub fn fill(&self, ticket: &Ticket, into: &Buffers) {
        let mut bytes = vec![0; into.len()];
        for (index, sector) in bytes.chunks_mut(SECTOR).enumerate() {
            self.content(ticket.first + index as u64, ticket.version, sector);
        }
        into.copy_from_slice(&bytes);
    }

    fn content(&self, number: u64, version: u64, out: &mut [u8]) {
        let base = self.seed ^ number.rotate_left(40) ^ version.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut value = base | 1;
        for (index, word) in out.chunks_exact_mut(8).enumerate() {
            let head = [MAGIC, self.seed, number, version].get(index).copied();
            value = value.wrapping_mul(0x5851_f42d_4c95_7f2d).rotate_left(21);
            word.copy_from_slice(&head.unwrap_or(value).to_le_bytes());
        }
    }

    /// A write was answered. Without `acknowledged` nothing is known about it.
    pub fn write_ends(&mut self, ticket: &Ticket, acknowledged: bool) {
        let now = self.tick();
        for sector in ticket.first..ticket.first + ticket.count {
            let Some(entries) = self.sectors.get_mut(&sector) else { continue };
            for entry in entries.iter_mut() {
                if entry.submitted == ticket.began && entry.ended.is_none() {
                    entry.ended = Some(now);
                } else if acknowledged
                    && entry.dead.is_none()
                    && entry.ended.is_some_and(|ended| ended < ticket.began)
                {
                    entry.dead = Some(now);
                }
            }
        }
    }

    pub fn flush_begins(&mut self) -> u64 {
        self.tick()
    }

    /// A flush that began then was acknowledged.
    pub fn flush_ends(&mut self, began: u64) {
        self.tick();
        // Reads under way may still return what died after they began.
        let oldest_read = self.reads.values().min().copied().unwrap_or(u64::MAX);
        for entries in self.sectors.values_mut() {
            for entry in entries.iter_mut() {
                entry.gone |= entry.dead.is_some_and(|dead| dead < began);
            }
            entries
                .retain(|entry| !entry.gone || entry.dead.is_some_and(|dead| dead >= oldest_read));
        }
    }

    pub fn read_begins(&mut self, offset: u64, len: u64) -> Ticket {
        let ticket = self.ticket(offset, len, 0);
        self.reads.insert(ticket.id, ticket.began);
        ticket
    }

    /// The read failed: nothing is learnt.
    pub fn read_fails(&mut self, ticket: &Ticket) {
        self.reads.remove(&ticket.id);
    }

    /// Checks what a read returned. The error says what is wrong with the first bad sector.
    pub fn read_ends(&mut self, ticket: &Ticket, bytes: &[u8]) -> Result<(), String> {
        self.reads.remove(&ticket.id);
        for (index, content) in bytes.chunks(SECTOR).enumerate() {
            self.check(ticket.first + index as u64, ticket.began, content)?;
        }
        Ok(())
    }

    fn check(&mut self, number: u64, began: u64, content: &[u8]) -> Result<(), String> {
        self.sectors_checked += 1;
        let zero = content.iter().all(|byte| *byte == 0);
        let Some(entries) = self.sectors.get(&number) else {
            let text = || format!("sector {number} was never written; {}", self.describe(content));
            return if zero { Ok(()) } else { Err(text()) };
        };
        let version = if zero { Some(0) } else { self.version_of(number, content) };
        let allowed = |entry: &Entry| entry.dead.is_none_or(|dead| dead >= began);
        let good = version.is_some_and(|version| {
            entries.iter().any(|entry| entry.version == version && allowed(entry))
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
    fn decide(&mut self, number: u64, began: u64, version: u64) {
        let now = self.clock;
        let Some(entries) = self.sectors.get_mut(&number) else { return };
        if entries.iter().any(|entry| entry.ended.is_none_or(|ended| ended >= began)) {
            return;
        }
        for entry in entries.iter_mut().filter(|entry| entry.version != version) {
            entry.dead.get_or_insert(now);
        }
    }

    fn version_of(&self, number: u64, content: &[u8]) -> Option<u64> {
        let version = u64::from_le_bytes(content.get(24..32)?.try_into().ok()?);
        let mut expected = [0; SECTOR];
        self.content(number, version, &mut expected);
        (expected == content).then_some(version)
    }

    fn describe(&self, content: &[u8]) -> String {
        let word = |index: usize| {
            let bytes = content[index * 8..index * 8 + 8].try_into();
            u64::from_le_bytes(bytes.expect("eight bytes"))
        };
        if content.iter().all(|byte| *byte == 0) {
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

    fn describe_entries(&self, number: u64, began: u64) -> String {
        let text = |entry: &Entry| {
            let state = match (entry.dead, entry.ended) {
                (Some(dead), _) if dead >= began => "just replaced",
                (Some(_), _) => return None,
                (None, None) => "in flight",
                (None, Some(_)) => "current",
            };
            Some(format!("version {} ({state})", entry.version))
        };
        let entries = self.sectors.get(&number).into_iter().flatten();
        entries.filter_map(text).collect::<Vec<_>>().join(", ")
    }

    /// Power was cut: everything that no flush covers may be back.
    pub fn power_cut(&mut self) {
        let now = self.tick();
        self.reads.clear();
        for entries in self.sectors.values_mut() {
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
        for entry in self.sectors.values_mut().flatten() {
            entry.ended.get_or_insert(now);
        }
    }

    /// Every sector that was ever written.
    pub fn written(&self) -> Vec<u64> {
        self.sectors.keys().copied().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(oracle: &mut Oracle, zeroes: bool) -> (Ticket, Vec<u8>) {
        let ticket = oracle.write_begins(0, 512, zeroes);
        let mut bytes = vec![0; 512];
        if !zeroes {
            oracle.content(0, ticket.version, &mut bytes);
        }
        (ticket, bytes)
    }

    fn read(oracle: &mut Oracle, bytes: &[u8]) -> bool {
        let ticket = oracle.read_begins(0, 512);
        oracle.read_ends(&ticket, bytes).is_ok()
    }

    #[test]
    fn an_acknowledged_write_replaces_what_was_before() {
        let mut oracle = Oracle::new(5);
        let (one, first) = write(&mut oracle, false);
        let early = oracle.read_begins(0, 512);
        oracle.write_ends(&one, true);
        assert!(oracle.read_ends(&early, &[0; 512]).is_ok(), "it began before the write ended");
        assert!(!read(&mut oracle, &[0; 512]));
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
        assert!(!read(&mut oracle, &[0; 512]), "the first write was flushed");
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
        let mut mixed = first.clone();
        mixed[511] ^= 1;
        assert!(!read(&mut oracle, &mixed));
        let mut stranger = vec![0; 512];
        oracle.content(9, one.version, &mut stranger);
        assert!(!read(&mut oracle, &stranger));
    }
}
