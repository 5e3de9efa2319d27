//! What every read may return, for each sector of a volume.
//!
//! A sector has *entries*: the writes whose content it may hold, now or after a crash. An entry is
//! in flight until its write is answered. A write that is acknowledged makes every entry *dead*
//! that had ended before that write was submitted: no later read may return it. A power cut
//! revives dead entries, unless a flush was acknowledged that had been submitted after they died.
//! A crash of the process only ends what was in flight.
//!
//! A write whose caller heard of an error while more drives were away than the array bears is
//! *unsettled*: that it is void, only those drives know that were there. If the array is started
//! without some of them, or of what their journals say, before the others were back, it may come
//! true.
//!
//! Where several entries are possible and none is in flight, the first read decides: the others
//! die. (Only a flush makes that durable, too: a read alone makes nothing so.)
//!
//! A write that is *atomic* is all there or not at all after a restart: a sector that reads as
//! what was before it, and one that reads as what it brought, are never both seen. Sectors that
//! something newer covers, or something that was under way at the same time, say nothing. What was
//! seen counts until a power cut, and beyond it if a flush was acknowledged in between.
//!
//! Every sector carries seed, number and version, so a misplaced one names itself, and its bytes
//! depend on all three, so a mixture is seen.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZero;
use std::ops::Range;

use ashlar_reactor::buffer::Buffers;
use smallvec::{SmallVec, smallvec};

use crate::volumes::Volumes;

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
    /// Zero: the sector reads as zeroes.
    version: u32,
    submitted: Moment,
    /// When it was answered; `None` while it is in flight.
    ended: Option<Moment>,
    dead: Option<Moment>,
    /// Dead durably: a power cut does not revive it.
    gone: bool,
    unsettled: bool,
}

impl Entry {
    const INITIAL: Entry = Entry {
        version: 0,
        submitted: BEGINNING,
        ended: Some(BEGINNING),
        dead: None,
        gone: false,
        unsettled: false,
    };
}

/// A write of which all sectors are there after a restart, or none.
#[derive(Debug, Default)]
struct Atomic {
    /// The array was restarted since it began.
    restarted: bool,
    /// Versions of the writes that were under way when it began: which of them is newer, nobody
    /// knows.
    rivals: BTreeSet<u32>,
    /// Sectors that were read as its own, and as older, and when that was.
    new: Option<(u64, Moment)>,
    old: Option<(u64, Moment)>,
}

/// What a sector may hold.
type Entries = SmallVec<[Entry; 2]>;

/// Sectors that are kept together; a group whose sectors were never written is not there.
const GROUP: usize = 64;
type Group = Box<[Entries; GROUP]>;

/// A write or read under way.
#[derive(Clone, Debug)]
pub struct Ticket {
    first: u64,
    count: u64,
    version: u32,
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
    /// By version.
    atomic: BTreeMap<u32, Atomic>,
    /// When the newest flush began that was acknowledged.
    flushed: Moment,
    /// By where its bytes begin here: which volume they are of.
    holds: BTreeMap<u64, [u8; 16]>,
    pub volumes: Volumes,
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
            atomic: BTreeMap::new(),
            flushed: BEGINNING,
            holds: BTreeMap::new(),
            volumes: Volumes::default(),
            sectors_checked: 0,
        }
    }

    /// Whose bytes these are. Of another volume than before: nothing of it was written.
    pub fn holds(&mut self, range: Range<u64>, volume: [u8; 16]) {
        if self.holds.insert(range.start, volume) != Some(volume) {
            let first = place(range.start / SECTOR as u64).0;
            let end = place(range.end / SECTOR as u64).0.min(self.groups.len());
            self.groups.iter_mut().take(end).skip(first).for_each(|group| *group = None);
        }
    }

    fn tick(&mut self) -> Moment {
        self.clock = self.clock.checked_add(1).expect("fewer than 2^32 events");
        self.clock
    }

    fn ticket(&mut self, offset: u64, len: u64, version: u32) -> Ticket {
        assert!((offset | len).is_multiple_of(SECTOR as u64));
        let began = self.tick();
        self.next_id += 1;
        let (first, count) = (offset / SECTOR as u64, len / SECTOR as u64);
        Ticket { first, count, version, began, id: self.next_id }
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
        let version = if zeroes { 0 } else { self.next_id + 1 };
        let ticket = self.ticket(offset, len, version);
        let submitted = ticket.began;
        let entry = Entry { version, submitted, ended: None, ..Entry::INITIAL };
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

    /// The write that has just begun is atomic.
    pub fn is_atomic(&mut self, ticket: &Ticket) {
        assert!(ticket.version > 0, "zeroes cannot be told from zeroes");
        let mut rivals = BTreeSet::new();
        for sector in ticket.first..ticket.first + ticket.count {
            let under_way =
                self.entries(sector).into_iter().flatten().filter(|e| e.ended.is_none());
            rivals.extend(under_way.map(|entry| entry.version));
        }
        self.atomic.insert(ticket.version, Atomic { rivals, ..Atomic::default() });
    }

    /// The write is atomic no longer.
    pub fn may_be_split(&mut self, ticket: &Ticket) {
        self.atomic.remove(&ticket.version);
    }

    /// Writes that are under way may be done in parts from now on.
    pub fn no_longer_atomic(&mut self) {
        let under_way: BTreeSet<u32> = self
            .all_entries()
            .flatten()
            .filter(|entry| entry.ended.is_none())
            .map(|entry| entry.version)
            .collect();
        self.atomic.retain(|version, _| !under_way.contains(version));
    }

    /// Content for a write that has begun.
    pub fn fill(&self, ticket: &Ticket, into: &Buffers) {
        let mut number = ticket.first;
        for piece in into.pieces() {
            let mut piece = piece.clone();
            let (sectors, rest) = piece.bytes_mut().as_chunks_mut();
            assert!(rest.is_empty(), "requests are whole sectors");
            for sector in sectors {
                self.content(number, ticket.version, sector);
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
                if entry.submitted == ticket.began && entry.ended.is_none() {
                    entry.ended = Some(now);
                } else if acknowledged && entry.ended.is_some_and(|ended| ended < ticket.began) {
                    entry.dead.get_or_insert(now);
                    entry.unsettled = false;
                }
            }
        }
        if acknowledged {
            self.dying.push_back((now, ticket.first, ticket.count));
        }
    }

    /// The write that was just answered with an error is unsettled.
    pub fn is_unsettled(&mut self, ticket: &Ticket) {
        for sector in ticket.first..ticket.first + ticket.count {
            let entries = self.entries(sector).into_iter().flatten();
            for entry in entries.filter(|entry| entry.submitted == ticket.began) {
                entry.unsettled = true;
            }
        }
    }

    /// All drives that the array needs are there, and know what is void.
    pub fn settled(&mut self) {
        let now = self.tick();
        let mut died = Vec::new();
        for (group, sectors) in self.groups.iter_mut().enumerate() {
            for (index, entries) in sectors.iter_mut().flat_map(|all| all.iter_mut()).enumerate() {
                for entry in entries.iter_mut().filter(|entry| entry.unsettled) {
                    entry.unsettled = false;
                    // Only from now on can a flush make that durable.
                    if let Some(dead) = &mut entry.dead {
                        *dead = now;
                        died.push((now, (group * GROUP + index) as u64, 1));
                    }
                }
            }
        }
        self.dying.extend(died);
    }

    pub fn flush_begins(&mut self) -> Moment {
        self.tick()
    }

    /// A flush that began then was acknowledged.
    pub fn flush_ends(&mut self, began: Moment) {
        self.tick();
        self.flushed = self.flushed.max(began);
        // Reads under way may still return what died after they began.
        let oldest_read = self.reads.values().min().copied().unwrap_or(Moment::MAX);
        while let Some((_, first, count)) = self.dying.pop_front_if(|(dead, _, _)| *dead < began) {
            for sector in first..first + count {
                let Some(entries) = self.entries(sector) else { continue };
                entries.retain(|entry| {
                    entry.gone |= !entry.unsettled && entry.dead.is_some_and(|dead| dead < began);
                    !entry.gone || entry.dead.is_some_and(|dead| dead >= oldest_read)
                });
            }
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
            entries.iter().any(|entry| entry.version == version && allowed(entry))
        });
        if !good {
            return Err(format!(
                "sector {number}: {}; it may be one of {}",
                self.describe(content),
                self.describe_entries(number, began)
            ));
        }
        let version = version.unwrap_or(0);
        self.judge_atomic(number, version)?;
        self.decide(number, began, version);
        Ok(())
    }

    /// A sector reads as `version`: what that says about the atomic writes that it belongs to.
    fn judge_atomic(&mut self, number: u64, version: u32) -> Result<(), String> {
        let now = self.clock;
        let (group, index) = place(number);
        let group = self.groups.get(group).and_then(Option::as_ref);
        let entries = group.map_or(&[][..], |group| &group[index]);
        for entry in entries {
            let Some(atomic) = self.atomic.get_mut(&entry.version).filter(|its| its.restarted)
            else {
                continue;
            };
            let newer_zeroes =
                || entries.iter().any(|its| its.version == 0 && its.submitted > entry.submitted);
            if version == entry.version {
                atomic.new.get_or_insert((number, now));
            } else if version < entry.version
                && !atomic.rivals.contains(&version)
                && (version > 0 || !newer_zeroes())
            {
                atomic.old.get_or_insert((number, now));
            }
            if let (Some((new, _)), Some((old, _))) = (atomic.new, atomic.old) {
                let version = entry.version;
                return Err(format!(
                    "version {version} was to be all or nothing: sector {new} has it, sector {old} \
                     has what was before"
                ));
            }
        }
        Ok(())
    }

    /// Nothing was in flight during the read: what it returned is what the sector is.
    fn decide(&mut self, number: u64, began: Moment, version: u32) {
        let now = self.clock;
        let Some(entries) = self.entries(number) else { return };
        if entries.iter().any(|entry| entry.ended.is_none_or(|ended| ended >= began)) {
            return;
        }
        let others = entries.iter_mut().filter(|entry| entry.version != version);
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
            Some(format!("version {} ({state})", entry.version))
        };
        let entries = self.entries(number).into_iter().flatten();
        entries.filter_map(|entry| text(entry)).collect::<Vec<_>>().join(", ")
    }

    /// Power was cut: everything that no flush covers may be back.
    pub fn power_cut(&mut self) {
        let now = self.tick();
        self.reads.clear();
        self.dying.clear();
        let flushed = self.flushed;
        for atomic in self.atomic.values_mut() {
            atomic.restarted = true;
            atomic.new = atomic.new.filter(|(_, seen)| *seen < flushed);
            atomic.old = atomic.old.filter(|(_, seen)| *seen < flushed);
        }
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
        self.atomic.values_mut().for_each(|atomic| atomic.restarted = true);
        self.all_entries().flatten().for_each(|entry| {
            entry.ended.get_or_insert(now);
        });
    }

    /// An array is started, and not all of its drives are there: what only those knew to be void
    /// may come true.
    pub fn some_are_away(&mut self) {
        let unsettled = self.all_entries().flatten().filter(|entry| entry.unsettled);
        unsettled.for_each(|entry| entry.dead = None);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(oracle: &mut Oracle, zeroes: bool) -> (Ticket, Sector) {
        let ticket = oracle.write_begins(0, 512, zeroes);
        let mut sector = ZEROES;
        if !zeroes {
            oracle.content(0, ticket.version, &mut sector);
        }
        (ticket, sector)
    }

    fn read(oracle: &mut Oracle, sector: &Sector) -> bool {
        let ticket = oracle.read_begins(0, 512);
        oracle.read_ends(&ticket, std::iter::once(sector)).is_ok()
    }

    #[test]
    fn an_unsettled_write_comes_back_without_those_who_knew_unless_something_newer_came() {
        for (is_settled, newer, are_there) in [
            (false, false, false),
            (true, false, false),
            (false, true, false),
            (false, false, true),
        ] {
            let comes_back = !is_settled && !newer && !are_there;
            let mut oracle = Oracle::new(5);
            let (ticket, sector) = write(&mut oracle, false);
            oracle.write_ends(&ticket, false);
            oracle.is_unsettled(&ticket);
            assert!(read(&mut oracle, &ZEROES));
            assert!(!read(&mut oracle, &sector), "a read decides until a crash");
            let mut now = ZEROES;
            if newer {
                let (ticket, sector) = write(&mut oracle, false);
                oracle.write_ends(&ticket, true);
                now = sector;
            }
            if is_settled {
                oracle.settled();
            }
            let began = oracle.flush_begins();
            oracle.flush_ends(began);
            oracle.process_crash();
            if !are_there {
                oracle.some_are_away();
            }
            assert_eq!(read(&mut oracle, &sector), comes_back);
            assert!(read(&mut oracle, &now) || comes_back);
        }
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
    fn an_atomic_write_is_there_or_not() {
        let restarted = || {
            let mut oracle = Oracle::new(5);
            let ticket = oracle.write_begins(0, 1024, false);
            oracle.is_atomic(&ticket);
            oracle.power_cut();
            let mut sectors = [ZEROES; 2];
            oracle.content(0, ticket.version, &mut sectors[0]);
            oracle.content(1, ticket.version, &mut sectors[1]);
            (oracle, sectors)
        };
        let read = |oracle: &mut Oracle, sectors: &[Sector; 2]| {
            let ticket = oracle.read_begins(0, 1024);
            oracle.read_ends(&ticket, sectors.iter()).is_ok()
        };
        let (mut oracle, new) = restarted();
        assert!(read(&mut oracle, &new));
        let (mut oracle, _) = restarted();
        assert!(read(&mut oracle, &[ZEROES; 2]));
        let (mut oracle, new) = restarted();
        assert!(!read(&mut oracle, &[new[0], ZEROES]));
        let (mut oracle, new) = restarted();
        assert!(!read(&mut oracle, &[ZEROES, new[1]]));
        // What something newer covers may be as old as it likes.
        let (mut oracle, new) = restarted();
        let zeroes = oracle.write_begins(0, 512, true);
        oracle.write_ends(&zeroes, true);
        assert!(read(&mut oracle, &[ZEROES, new[1]]));
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
        oracle.content(9, one.version, &mut stranger);
        assert!(!read(&mut oracle, &stranger));
    }
}
