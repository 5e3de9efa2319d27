//! An NBD client that says anything (NBD protocol, doc/proto.md: "Newstyle negotiation", "Option
//! types", "Request types").

use std::path::Path;

use crate::choices::Choices;
use crate::stream::Stream;

const OPTION_MAGIC: u64 = 0x4948_4156_454f_5054;
const REQUEST_MAGIC: u32 = 0x2560_9513;
const EXPORT_NAME: u32 = 1;
const GO: u32 = 7;
const STRUCTURED_REPLIES: u32 = 8;
const META_CONTEXTS: u32 = 10;
const WRITE: u16 = 1;
/// Steps of one life, at most.
const STEPS_MAX: u64 = 200;
const VOLUME_BYTES: u64 = 16 << 20;
/// Bytes of a request's data, at most, of one who keeps to the rules.
const DATA_BYTES_MAX: u64 = 64 << 10;

/// One life of a hostile client: connects, does harm, and goes, in the middle of anything. `Ok`
/// says nothing of the server; an error, that it could not be reached.
pub fn live(socket: &Path, export: &str, mut choices: Choices) -> std::io::Result<()> {
    let (stream, one_slip_in) = (Stream::unix(socket)?, choices.one_slip_in());
    let mut client = Client { stream, choices, one_slip_in };
    client.greet(export);
    for _ in 0..client.choices.below(STEPS_MAX) {
        if client.choices.are_over() {
            break;
        }
        client.request();
    }
    Ok(())
}

struct Client {
    stream: Stream,
    choices: Choices,
    /// Of things that it says.
    one_slip_in: u64,
}

impl Client {
    fn greet(&mut self, export: &str) {
        if self.stream.answer(18).is_none() {
            return;
        }
        self.say(3_u32.to_be_bytes().to_vec());
        for _ in 0..self.choices.below(8) {
            let option = [STRUCTURED_REPLIES, META_CONTEXTS, 2, 3, 4, 5, 6, 9, 11, 99]
                [self.choices.index(10)];
            let data = match option {
                STRUCTURED_REPLIES | 3 => Vec::new(),
                META_CONTEXTS | 9 => contexts(export),
                _ => info(export),
            };
            self.option(option, &data);
            self.stream.listen();
        }
        if self.choices.chance(1, 2) {
            self.option(EXPORT_NAME, export.as_bytes());
        } else {
            self.option(GO, &info(export));
        }
    }

    fn option(&mut self, option: u32, data: &[u8]) {
        let mut bytes = OPTION_MAGIC.to_be_bytes().to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
        bytes.extend(data);
        self.say(bytes);
    }

    /// A number that fits, or one that does not.
    fn within(&mut self, most: u64, unit: u64) -> u64 {
        if self.choices.slips(self.one_slip_in) {
            return self.choices.number();
        }
        self.choices.below(most / unit) * unit
    }

    fn request(&mut self) {
        let command = [0, WRITE, 3, 4, 5, 6, 7, 0, WRITE, 2, 99][self.choices.index(11)];
        // A disconnect is the end: seldom.
        let command = if command == 2 && self.choices.chance(7, 8) { WRITE } else { command };
        let flags = u16::from(self.choices.byte() & 31 & self.choices.byte());
        let len = self.within(DATA_BYTES_MAX, 512) + 512;
        let mut bytes = REQUEST_MAGIC.to_be_bytes().to_vec();
        bytes.extend(flags.to_be_bytes());
        bytes.extend(u16::to_be_bytes(command));
        bytes.extend(self.choices.next_u64().to_be_bytes());
        bytes.extend(self.within(VOLUME_BYTES, 512).to_be_bytes());
        bytes.extend((len & 0xffff_ffff).to_be_bytes()[4..].iter());
        if command == WRITE {
            bytes.resize(bytes.len() + len.min(DATA_BYTES_MAX) as usize, 0xa5);
        }
        self.say(bytes);
        if self.choices.chance(7, 8) {
            self.stream.listen();
            self.stream.fetched.clear();
        }
    }

    fn say(&mut self, mut bytes: Vec<u8>) {
        if self.choices.slips(self.one_slip_in) {
            self.choices.spoil(&mut bytes);
        }
        self.stream.say(&bytes);
    }
}

/// Of INFO and GO: a name, and no particular wishes.
fn info(export: &str) -> Vec<u8> {
    let mut data = name(export);
    data.extend([0, 0]);
    data
}

/// Of the options of contexts: which export, and one query.
fn contexts(export: &str) -> Vec<u8> {
    let mut data = name(export);
    data.extend(1_u32.to_be_bytes());
    data.extend(name("base:allocation"));
    data
}

fn name(text: &str) -> Vec<u8> {
    let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
    [&len.to_be_bytes()[..], text.as_bytes()].concat()
}
