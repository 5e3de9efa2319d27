//! Data that hosts were asked for: what of which command is still to come. Pure.
//!
//! Each command asks once for all of its data (one R2T); the host sends it from the beginning to
//! the end, in as many PDUs as it likes. So what has come is one length.
//!
//! Invariant: a tag names one transfer from when it is asked for until it is taken back; data with
//! any other tag is refused.

use std::ops::Range;

use ashlar_reactor::nvme::pdu::Fault;

use crate::nvme_tcp::inbox::DataOf;

#[derive(Debug)]
struct Transfer<T> {
    command: u16,
    len: u32,
    come: u32,
    /// It did not fit its digest: the command fails, the connection goes on.
    damaged: bool,
    /// Whatever the one who waits for it wants to know.
    of: T,
}

/// What is under way on one connection.
#[derive(Debug)]
pub(crate) struct Transfers<T> {
    open: Vec<Option<Transfer<T>>>,
    free: Vec<u16>,
}

impl<T> Transfers<T> {
    /// For so many commands at a time.
    pub(crate) fn new(max: u16) -> Transfers<T> {
        Transfers { open: (0..max).map(|_| None).collect(), free: (0..max).rev().collect() }
    }

    /// A tag to ask for `len` bytes with. `None`: as many as there may be are under way.
    pub(crate) fn open(&mut self, command: u16, len: u32, of: T) -> Option<u16> {
        assert!(len > 0, "nothing to ask for");
        let tag = self.free.pop()?;
        let place = self.open.get_mut(usize::from(tag))?;
        assert!(place.is_none(), "tag {tag} is in use");
        *place = Some(Transfer { command, len, come: 0, damaged: false, of });
        Some(tag)
    }

    /// Where in its command's data this belongs.
    pub(crate) fn accept(&self, data: &DataOf) -> Result<(Range<u32>, &T), Fault> {
        let transfer = self.open.get(usize::from(data.tag)).and_then(Option::as_ref);
        // Bytes 8 and 10 of the header are the command's identifier and the tag.
        let transfer = transfer.ok_or(Fault::Header(10))?;
        if transfer.command != data.command {
            return Err(Fault::Header(8));
        }
        let end = data.offset.checked_add(data.len).filter(|end| *end <= transfer.len);
        let end = end.ok_or(Fault::OutOfRange)?;
        if data.offset != transfer.come || data.len == 0 {
            return Err(Fault::OutOfRange);
        }
        if data.last && end != transfer.len {
            return Err(Fault::OutOfRange);
        }
        Ok((data.offset..end, &transfer.of))
    }

    /// What is to be known of a transfer.
    pub(crate) fn of(&self, tag: u16) -> Option<&T> {
        let transfer = self.open.get(usize::from(tag)).and_then(Option::as_ref);
        transfer.map(|transfer| &transfer.of)
    }

    /// What was accepted has come. True: that was all of it.
    pub(crate) fn came(&mut self, data: &DataOf, intact: bool) -> bool {
        let transfer = self.open.get_mut(usize::from(data.tag)).and_then(Option::as_mut);
        let transfer = transfer.expect("it was accepted");
        transfer.come += data.len;
        transfer.damaged |= !intact;
        transfer.come == transfer.len
    }

    /// Whether all of it has come.
    pub(crate) fn is_complete(&self, tag: u16) -> bool {
        let transfer = self.open.get(usize::from(tag)).and_then(Option::as_ref);
        transfer.is_some_and(|transfer| transfer.come == transfer.len)
    }

    /// Ends a transfer, complete or not. Whether all of it has come, and intact.
    pub(crate) fn close(&mut self, tag: u16) -> Closed {
        let transfer = self.open.get_mut(usize::from(tag)).and_then(Option::take);
        let transfer = transfer.expect("whoever opened it closes it, once");
        self.free.push(tag);
        match (transfer.come == transfer.len, transfer.damaged) {
            (false, _) => Closed::Short,
            (true, true) => Closed::Damaged,
            (true, false) => Closed::Whole,
        }
    }

    /// Those that wait for the host.
    pub(crate) fn waiting(&self) -> impl Iterator<Item = &T> {
        let open = self.open.iter().flatten();
        open.filter(|transfer| transfer.come < transfer.len).map(|transfer| &transfer.of)
    }
}

/// How a transfer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    Whole,
    Damaged,
    Short,
}

#[cfg(test)]
mod tests {
    //! Goal: every byte of a command's data comes once, in order, and belongs to it.
    //! Method: a model that knows what is under way; true, wrong and random data, from a seed.
    #![allow(clippy::cast_possible_truncation, reason = "a test")]

    use super::*;
    use ashlar_reactor::prng::Prng;
    use std::collections::BTreeMap;

    #[test]
    fn wrong_data_is_refused() {
        let mut transfers = Transfers::new(2);
        let tag = transfers.open(7, 8192, ()).unwrap();
        let good = DataOf { command: 7, tag, offset: 0, len: 4096, last: false };
        let fault = |of: DataOf| transfers.accept(&of).map(|(range, ())| range);
        assert_eq!(fault(good), Ok(0..4096));
        assert_eq!(fault(DataOf { tag: tag ^ 1, ..good }), Err(Fault::Header(10)));
        assert_eq!(fault(DataOf { tag: 900, ..good }), Err(Fault::Header(10)));
        assert_eq!(fault(DataOf { command: 8, ..good }), Err(Fault::Header(8)));
        assert_eq!(fault(DataOf { offset: 512, ..good }), Err(Fault::OutOfRange));
        assert_eq!(fault(DataOf { len: 8193, ..good }), Err(Fault::OutOfRange));
        assert_eq!(fault(DataOf { offset: u32::MAX, ..good }), Err(Fault::OutOfRange));
        assert_eq!(fault(DataOf { len: 0, ..good }), Err(Fault::OutOfRange));
        assert_eq!(fault(DataOf { last: true, ..good }), Err(Fault::OutOfRange));
        assert!(!transfers.came(&good, true));
        assert_eq!(transfers.waiting().count(), 1);
        assert!(transfers.came(&DataOf { offset: 4096, last: true, ..good }, false));
        assert_eq!(transfers.waiting().count(), 0);
        assert_eq!(transfers.close(tag), Closed::Damaged);
        assert_eq!(transfers.accept(&good), Err(Fault::Header(10)), "it is over");
    }

    #[test]
    fn it_agrees_with_a_model() {
        const MAX: u16 = 5;
        let seed = 91;
        let mut prng = Prng::from_seed(seed);
        let mut transfers = Transfers::new(MAX);
        // By tag: command, length, what has come.
        let mut model: BTreeMap<u16, (u16, u32, u32)> = BTreeMap::new();
        for round in 0..50_000_u32 {
            match prng.below(4) {
                0 => {
                    let (command, len) = (round as u16, 1 + prng.below(100) as u32);
                    let tag = transfers.open(command, len, round);
                    assert_eq!(tag.is_some(), model.len() < usize::from(MAX), "round {round}");
                    if let Some(tag) = tag {
                        assert_eq!(model.insert(tag, (command, len, 0)), None);
                    }
                }
                1 if !model.is_empty() => {
                    let tag = *model.keys().nth(prng.index(model.len())).unwrap();
                    let (_, len, come) = model.remove(&tag).unwrap();
                    let expected = if come == len { Closed::Whole } else { Closed::Short };
                    assert_eq!(transfers.close(tag), expected, "seed {seed}, round {round}");
                }
                _ => {
                    let tag = prng.below(u64::from(MAX) + 1) as u16;
                    let known = model.get(&tag).copied();
                    let (command, len, come) = known.unwrap_or_default();
                    let data = DataOf {
                        command: command.wrapping_add(u16::from(prng.below(8) == 0)),
                        tag,
                        offset: come + u32::from(prng.below(8) == 0),
                        len: prng.below(30) as u32,
                        last: prng.below(4) == 0,
                    };
                    let end = data.offset + data.len;
                    let fits = known.is_some()
                        && (data.command, data.offset) == (command, come)
                        && data.len > 0
                        && end <= len
                        && (!data.last || end == len);
                    assert_eq!(transfers.accept(&data).is_ok(), fits, "seed {seed}, {round}");
                    if fits {
                        assert_eq!(transfers.came(&data, true), end == len);
                        assert_eq!(transfers.is_complete(tag), end == len);
                        model.insert(tag, (command, len, end));
                    }
                }
            }
            let waiting = model.values().filter(|(_, len, come)| come < len).count();
            assert_eq!(transfers.waiting().count(), waiting);
        }
    }
}
