//! Option haggling: what each option of a client is answered with, and what is agreed in the end
//! (NBD protocol, "Fixed newstyle negotiation", "Option types").

use std::ops::ControlFlow;

use zerocopy::IntoBytes;

use crate::nbd::request::{Agreed, REQUEST_BYTES_MAX};
use crate::nbd::wire::{
    BlockSizes, ExportInfo, NO_ZEROES, OPTION_REPLY_MAGIC, OptionReply, answer, info, offers,
    option,
};

/// Smallest unit that is read or written.
const BLOCK_BYTES_MIN: u32 = 512;
/// What drives and file systems like.
const BLOCK_BYTES_PREFERRED: u32 = 4096;
/// The only context there is, and our number for it.
const ALLOCATION: &str = "base:allocation";
pub(super) const ALLOCATION_ID: u32 = 1;
/// Zeroes at the end of the oldest form of the handshake.
const PADDING_BYTES: usize = 124;

/// What one export tells whoever asks.
#[derive(Clone, Debug)]
pub(super) struct Facts {
    pub(super) name: String,
    pub(super) volume_bytes: u64,
}

/// Why the client gets no further.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum End {
    /// It said so.
    #[error("it left")]
    Aborted,
    #[error("it asked for export {0:?}")]
    NoSuchExport(String),
}

/// One side of a haggle: what was agreed so far.
pub(super) struct Haggle {
    facts: Facts,
    client_flags: u16,
    agreed: Agreed,
}

impl Haggle {
    pub(super) fn new(facts: Facts, client_flags: u16) -> Haggle {
        Haggle { facts, client_flags, agreed: Agreed::default() }
    }

    /// Appends the answer to an option to `out`. Breaks when the haggle is over: with what was
    /// agreed, or why nothing was; what is in `out` is to be sent all the same.
    pub(super) fn answer(
        &mut self,
        asked: u32,
        data: &[u8],
        out: &mut Vec<u8>,
    ) -> ControlFlow<Result<Agreed, End>> {
        match asked {
            option::EXPORT_NAME => return ControlFlow::Break(self.export_name(data, out)),
            option::ABORT => {
                reply(out, asked, answer::ACK, &[]);
                return ControlFlow::Break(Err(End::Aborted));
            }
            option::GO | option::INFO => {
                let is_known = self.inform(asked, data, out);
                if is_known && asked == option::GO {
                    return ControlFlow::Break(Ok(self.agreed));
                }
            }
            option::LIST if data.is_empty() => {
                let name = self.facts.name.as_bytes();
                let len = u32::try_from(name.len()).unwrap_or(u32::MAX).to_be_bytes();
                reply(out, asked, answer::SERVER, &[&len, name].concat());
                reply(out, asked, answer::ACK, &[]);
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                self.agreed.structured = true;
                reply(out, asked, answer::ACK, &[]);
            }
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                self.contexts(asked, data, out);
            }
            option::LIST | option::STRUCTURED_REPLY => reply(out, asked, answer::INVALID, &[]),
            _ => reply(out, asked, answer::UNSUPPORTED, &[]),
        }
        ControlFlow::Continue(())
    }

    fn offers(&self) -> u16 {
        let dont_fragment = if self.agreed.structured { offers::DONT_FRAGMENT } else { 0 };
        // A flush covers what was answered on any connection: all go to one volume.
        let always = offers::HAS_FLAGS | offers::FLUSH | offers::FUA | offers::MULTI_CONN;
        let zeroes = offers::TRIM | offers::WRITE_ZEROES | offers::FAST_ZERO;
        always | zeroes | offers::CACHE | dont_fragment
    }

    /// The empty name is that of the default export, and there is only one.
    fn is_ours(&self, name: &[u8]) -> bool {
        name.is_empty() || name == self.facts.name.as_bytes()
    }

    fn export_name(&self, name: &[u8], out: &mut Vec<u8>) -> Result<Agreed, End> {
        if !self.is_ours(name) {
            return Err(End::NoSuchExport(String::from_utf8_lossy(name).into_owned()));
        }
        out.extend(self.facts.volume_bytes.to_be_bytes());
        out.extend(self.offers().to_be_bytes());
        if self.client_flags & NO_ZEROES == 0 {
            out.extend([0; PADDING_BYTES]);
        }
        Ok(self.agreed)
    }

    /// Answers GO and INFO. True if the client knows now what it gets.
    fn inform(&self, asked: u32, data: &[u8], out: &mut Vec<u8>) -> bool {
        let Some((name, wanted)) = read_info_request(data) else {
            reply(out, asked, answer::INVALID, &[]);
            return false;
        };
        if !self.is_ours(name) {
            reply(out, asked, answer::UNKNOWN, b"there is no export of this name here");
            return false;
        }
        let export = ExportInfo {
            kind: info::EXPORT.into(),
            bytes: self.facts.volume_bytes.into(),
            flags: self.offers().into(),
        };
        reply(out, asked, answer::INFO, export.as_bytes());
        if wanted.contains(&info::NAME) {
            let text = [&info::NAME.to_be_bytes(), self.facts.name.as_bytes()].concat();
            reply(out, asked, answer::INFO, &text);
        }
        // Also to who did not ask: it may be answered EINVAL else, without knowing why.
        let sizes = BlockSizes {
            kind: info::BLOCK_SIZE.into(),
            least: BLOCK_BYTES_MIN.into(),
            preferred: BLOCK_BYTES_PREFERRED.into(),
            most: REQUEST_BYTES_MAX.into(),
        };
        reply(out, asked, answer::INFO, sizes.as_bytes());
        reply(out, asked, answer::ACK, &[]);
        true
    }

    /// Lists or selects metadata contexts.
    fn contexts(&mut self, asked: u32, data: &[u8], out: &mut Vec<u8>) {
        let is_choice = asked == option::SET_META_CONTEXT;
        if is_choice {
            self.agreed.allocation = false;
        }
        let Some((name, queries)) = read_context_request(data) else {
            return reply(out, asked, answer::INVALID, &[]);
        };
        if !self.agreed.structured {
            return reply(out, asked, answer::INVALID, b"structured replies come first");
        }
        if !self.is_ours(name) {
            return reply(out, asked, answer::UNKNOWN, &[]);
        }
        // A list may be asked for everything, or for all of a namespace; a choice is exact.
        let lists = |query: &&[u8]| !is_choice && *query == b"base:";
        let names = |query: &&[u8]| *query == ALLOCATION.as_bytes();
        let everything = !is_choice && queries.is_empty();
        if everything || queries.iter().any(|query| names(query) || lists(query)) {
            let id = if is_choice { ALLOCATION_ID } else { 0 };
            let text = [&id.to_be_bytes(), ALLOCATION.as_bytes()].concat();
            reply(out, asked, answer::META_CONTEXT, &text);
            self.agreed.allocation |= is_choice;
        }
        reply(out, asked, answer::ACK, &[]);
    }
}

fn reply(out: &mut Vec<u8>, asked: u32, kind: u32, data: &[u8]) {
    let head = OptionReply {
        magic: OPTION_REPLY_MAGIC.into(),
        option: asked.into(),
        kind: kind.into(),
        len: u32::try_from(data.len()).unwrap_or(u32::MAX).into(),
    };
    out.extend(head.as_bytes());
    out.extend(data);
}

/// The name, and the kinds of information that are wanted. `None`: not well formed.
fn read_info_request(data: &[u8]) -> Option<(&[u8], Vec<u16>)> {
    let (name, rest) = read_string(data)?;
    let (count, kinds) = rest.split_first_chunk()?;
    let (kinds, left) = kinds.as_chunks();
    let is_whole = left.is_empty() && kinds.len() == usize::from(u16::from_be_bytes(*count));
    is_whole.then(|| (name, kinds.iter().map(|kind| u16::from_be_bytes(*kind)).collect()))
}

/// The export's name, and the queries.
fn read_context_request(data: &[u8]) -> Option<(&[u8], Vec<&[u8]>)> {
    let (name, rest) = read_string(data)?;
    let (count, mut rest) = rest.split_first_chunk()?;
    let mut queries = Vec::new();
    // Each takes some of the data, so that a made-up count ends with it.
    for _ in 0..u32::from_be_bytes(*count) {
        let (query, after) = read_string(rest)?;
        queries.push(query);
        rest = after;
    }
    rest.is_empty().then_some((name, queries))
}

fn read_string(data: &[u8]) -> Option<(&[u8], &[u8])> {
    let (len, rest) = data.split_first_chunk()?;
    rest.split_at_checked(usize::try_from(u32::from_be_bytes(*len)).ok()?)
}

#[cfg(test)]
mod tests {
    //! Goal: each option is answered by the protocol, whatever its data says of itself.
    //! Method: well-formed options, every prefix of them, and counts that lie.

    use super::*;

    fn haggle() -> Haggle {
        Haggle::new(Facts { name: "vm1".into(), volume_bytes: 1 << 30 }, NO_ZEROES)
    }

    fn string(text: &str) -> Vec<u8> {
        [&u32::try_from(text.len()).unwrap().to_be_bytes(), text.as_bytes()].concat()
    }

    /// Kinds of all replies in `out`.
    fn kinds(mut out: &[u8]) -> Vec<u32> {
        let mut kinds = Vec::new();
        while !out.is_empty() {
            let number = |at: usize| u32::from_be_bytes(out[at..at + 4].try_into().unwrap());
            assert_eq!(out[..8], OPTION_REPLY_MAGIC.to_be_bytes());
            let len = number(16) as usize;
            kinds.push(number(12));
            out = &out[20 + len..];
        }
        kinds
    }

    fn asked(haggle: &mut Haggle, option: u32, data: &[u8]) -> (bool, Vec<u32>) {
        let mut out = Vec::new();
        let flow = haggle.answer(option, data, &mut out);
        (flow.is_break(), kinds(&out))
    }

    fn go(name: &str, wanted: &[u16]) -> Vec<u8> {
        let mut data = string(name);
        data.extend(u16::try_from(wanted.len()).unwrap().to_be_bytes());
        data.extend(wanted.iter().flat_map(|kind| kind.to_be_bytes()));
        data
    }

    fn contexts(name: &str, queries: &[&str]) -> Vec<u8> {
        let mut data = string(name);
        data.extend(u32::try_from(queries.len()).unwrap().to_be_bytes());
        data.extend(queries.iter().flat_map(|query| string(query)));
        data
    }

    #[test]
    fn go_tells_all_and_ends_the_haggle() {
        use answer::{ACK, INFO, UNKNOWN};
        for name in ["", "vm1"] {
            let answered = asked(&mut haggle(), option::GO, &go(name, &[]));
            assert_eq!(answered, (true, vec![INFO, INFO, ACK]));
            let answered = asked(&mut haggle(), option::INFO, &go(name, &[info::NAME]));
            assert_eq!(answered, (false, vec![INFO, INFO, INFO, ACK]));
        }
        assert_eq!(asked(&mut haggle(), option::GO, &go("vm2", &[])), (false, vec![UNKNOWN]));
    }

    #[test]
    fn the_old_way_is_answered_or_ended() {
        let mut out = Vec::new();
        let flow = haggle().answer(option::EXPORT_NAME, b"vm1", &mut out);
        assert_eq!(flow, ControlFlow::Break(Ok(Agreed::default())));
        assert_eq!((out.len(), &out[..8]), (10, &(1u64 << 30).to_be_bytes()[..]));
        let mut padded = Vec::new();
        let mut old = Haggle { client_flags: 0, ..haggle() };
        assert!(old.answer(option::EXPORT_NAME, b"", &mut padded).is_break());
        assert_eq!(padded.len(), 10 + PADDING_BYTES);
        let flow = haggle().answer(option::EXPORT_NAME, b"other", &mut Vec::new());
        assert_eq!(flow, ControlFlow::Break(Err(End::NoSuchExport("other".into()))));
        assert_eq!(asked(&mut haggle(), option::ABORT, b""), (true, vec![answer::ACK]));
    }

    #[test]
    fn contexts_are_chosen_after_structured_replies() {
        use answer::{ACK, INVALID, META_CONTEXT, UNKNOWN};
        let mut haggle = haggle();
        let exact = contexts("vm1", &["x:y", ALLOCATION]);
        assert_eq!(asked(&mut haggle, option::SET_META_CONTEXT, &exact), (false, vec![INVALID]));
        assert_eq!(asked(&mut haggle, option::STRUCTURED_REPLY, b""), (false, vec![ACK]));
        let chosen = (false, vec![META_CONTEXT, ACK]);
        assert_eq!(asked(&mut haggle, option::SET_META_CONTEXT, &exact), chosen);
        assert_eq!(haggle.agreed, Agreed { structured: true, allocation: true });
        // Listing chooses nothing; each choice replaces the one before.
        for queries in [&[][..], &["base:"], &[ALLOCATION]] {
            let asks = contexts("", queries);
            assert_eq!(asked(&mut haggle, option::LIST_META_CONTEXT, &asks), chosen);
        }
        for queries in [&[][..], &["base:"], &["base:allocations"]] {
            let asks = contexts("vm1", queries);
            assert_eq!(asked(&mut haggle, option::SET_META_CONTEXT, &asks), (false, vec![ACK]));
            assert!(!haggle.agreed.allocation);
        }
        let other = contexts("vm2", &[ALLOCATION]);
        assert_eq!(asked(&mut haggle, option::SET_META_CONTEXT, &other), (false, vec![UNKNOWN]));
    }

    #[test]
    fn data_that_is_not_whole_is_refused() {
        let mut structured = haggle();
        structured.agreed.structured = true;
        for (option, data) in [
            (option::GO, go("vm1", &[info::NAME, info::BLOCK_SIZE])),
            (option::INFO, go("vm1", &[3])),
            (option::SET_META_CONTEXT, contexts("vm1", &[ALLOCATION, "base:"])),
            (option::LIST_META_CONTEXT, contexts("vm1", &[ALLOCATION])),
        ] {
            let refused = (false, vec![answer::INVALID]);
            for end in 0..data.len() {
                assert_eq!(asked(&mut structured, option, &data[..end]), refused, "{end}");
            }
            let longer = [&data[..], b"x"].concat();
            assert_eq!(asked(&mut structured, option, &longer), refused);
            // Counts of the export's name, and of what comes after it.
            for at in [0, 4 + 3] {
                let mut lie = data.clone();
                lie[at] = 0xff;
                assert_eq!(asked(&mut structured, option, &lie), refused, "{at}");
            }
        }
        for option in [option::LIST, option::STRUCTURED_REPLY] {
            assert_eq!(asked(&mut haggle(), option, b"x"), (false, vec![answer::INVALID]));
        }
        for option in [0, 4, 5, 11, u32::MAX] {
            let unsupported = (false, vec![answer::UNSUPPORTED]);
            assert_eq!(asked(&mut haggle(), option, b"x"), unsupported);
        }
    }
}
