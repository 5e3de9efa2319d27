//! A front end, and a guest behind it, that say anything (vhost-user specification, "Front-end
//! message types").

mod guest;
mod inflight;

use std::fs::File;
use std::io::{IoSlice, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::choices::Choices;
use crate::vhost::guest::Packed;

const MEMORY_BYTES: u64 = 4 << 20;
const QUEUES: u16 = 4;
const RING_SIZES: [u64; 6] = [16, 128, 1, 3, 1024, 32768];
/// Where the front end has the guest's memory.
const USER: u64 = 0x7f00_0000_0000;
/// Room for a queue's ring; its parts stand at the first, second and third quarter.
const RING_BYTES: u64 = 0x4000;
const USED: u64 = 0x2000;
const AVAILABLE: u64 = 0x1000;
/// Steps of one life, at most.
const STEPS_MAX: u64 = 300;
const FILES_MAX: usize = 3;

/// Features that a back end may have: version 1, protocol features, event index, indirect, flush,
/// write cache, discard, write-zeroes, packed.
const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 9 | 1 << 11 | 3 << 13;
const PACKED: u64 = 1 << 34;

/// Written pages are marked, in a log of so many bytes: twice what the memory needs.
const LOG_ALL: u64 = 1 << 26;
const LOG_BYTES: u64 = MEMORY_BYTES / 4096 / 8 * 2;

/// The protocol feature of an in-flight region.
const INFLIGHT: u64 = 1 << 12;

/// Bits of a message's flags: version, and "reply to this".
const VERSION: u32 = 1;
const NEED_REPLY: u32 = 8;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Sent {
    None,
    Memory,
    Log,
    /// What was in flight.
    Region,
    Event,
}

/// What is said: which message, its payload, and which file goes with it.
struct Message {
    request: u32,
    payload: Vec<u8>,
    file: Sent,
}

fn message(request: u32, fields: &[u64], file: Sent) -> Message {
    Message { request, payload: fields.iter().flat_map(|it| it.to_le_bytes()).collect(), file }
}

/// Two fields of 32 bits as one of 64.
fn pair(low: u64, high: u64) -> u64 {
    low & 0xffff_ffff | high << 32
}

struct FrontEnd {
    stream: UnixStream,
    memory: File,
    /// Of written pages.
    log: File,
    /// Of what was in flight.
    region: File,
    event: OwnedFd,
    choices: Choices,
    features: u64,
    ring_size: u64,
    /// Of split rings: requests that were made available.
    available: [u16; QUEUES as usize],
    packed: [Packed; QUEUES as usize],
    /// The front end errs once in so many messages; 0: never.
    message_slips: u64,
    /// The guest errs once in so many fields.
    guest_slips: u64,
    /// It has a region of what was in flight before.
    resumes: bool,
}

/// One life of a hostile front end: connects, does harm, and goes, in the middle of anything.
/// `Ok` says nothing of the back end; an error, that it could not be reached.
pub fn live(socket: &Path, choices: Choices) -> std::io::Result<()> {
    let mut front_end = FrontEnd::connect(socket, choices)?;
    front_end.greet();
    for _ in 0..front_end.choices.below(STEPS_MAX) {
        if front_end.choices.are_over() {
            break;
        }
        front_end.step();
    }
    Ok(())
}

/// A file in memory that does not shrink.
fn sealed(name: &str, bytes: u64) -> std::io::Result<File> {
    let file = File::from(memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?);
    file.set_len(bytes)?;
    fcntl_add_seals(&file, SealFlags::SHRINK)?;
    Ok(file)
}

impl FrontEnd {
    fn connect(socket: &Path, mut choices: Choices) -> std::io::Result<FrontEnd> {
        let stream = UnixStream::connect(socket)?;
        stream.set_nonblocking(true)?;
        let memory = File::from(memfd_create("guest", MemfdFlags::CLOEXEC)?);
        memory.set_len(MEMORY_BYTES)?;
        let packed = if choices.chance(1, 3) { PACKED } else { 0 };
        let logged = if choices.chance(1, 3) { LOG_ALL } else { 0 };
        let ring_size =
            RING_SIZES[usize::from(choices.chance(1, 4)) * choices.index(RING_SIZES.len())];
        Ok(FrontEnd {
            // A guest gets far only behind a front end that does.
            message_slips: choices.one_slip_in(),
            guest_slips: [24, 200, 2000][choices.index(3)],
            resumes: choices.chance(1, 2),
            stream,
            memory,
            log: sealed("log", LOG_BYTES)?,
            region: sealed("region", inflight::bytes(ring_size))?,
            event: eventfd(0, EventfdFlags::NONBLOCK | EventfdFlags::CLOEXEC)?,
            choices,
            features: FEATURES | packed | logged,
            ring_size,
            available: [0; QUEUES as usize],
            packed: [Packed::default(); QUEUES as usize],
        })
    }

    /// The usual beginning, with a slip here and there.
    fn greet(&mut self) {
        self.say(&message(3, &[], Sent::None), 0);
        self.say(&message(2, &[self.features], Sent::None), 0);
        let offered = self.ask(&message(15, &[], Sent::None));
        let chosen = if self.slips() { self.number() } else { offered };
        let mut messages = vec![
            message(16, &[chosen], Sent::None),
            message(17, &[], Sent::None),
            self.add_memory(),
        ];
        if offered & INFLIGHT != 0 {
            messages.push(match self.resumes {
                false => self.inflight(31, Sent::None),
                true => {
                    self.leave_in_flight();
                    self.inflight(32, Sent::Region)
                }
            });
        }
        if self.features & LOG_ALL != 0 {
            messages.push(message(6, &[LOG_BYTES, 0], Sent::Log));
        }
        messages.extend((0..u64::from(QUEUES)).flat_map(|queue| self.start(queue)));
        for message in messages {
            if self.slips() {
                self.slip(message);
            } else {
                self.say(&message, NEED_REPLY);
            }
            self.listen();
        }
    }

    fn slips(&mut self) -> bool {
        self.choices.slips(self.message_slips)
    }

    fn guest_slips(&mut self) -> bool {
        self.choices.chance(1, self.guest_slips)
    }

    /// The number that is answered; 0 if there is none.
    fn ask(&mut self, message: &Message) -> u64 {
        self.say(message, 0);
        let mut answer = [0; 20];
        let wait = Timespec { tv_sec: 1, tv_nsec: 0 };
        let mut look = [PollFd::new(&self.stream, PollFlags::IN)];
        let _ = rustix::event::poll(&mut look, Some(&wait));
        match self.stream.read(&mut answer) {
            Ok(20) => answer[12..].try_into().map_or(0, u64::from_le_bytes),
            Ok(_) | Err(_) => 0,
        }
    }

    fn add_memory(&self) -> Message {
        message(37, &[0, 0, MEMORY_BYTES, USER, 0], Sent::Memory)
    }

    /// GET_INFLIGHT_FD and SET_INFLIGHT_FD.
    fn inflight(&self, request: u32, file: Sent) -> Message {
        let bytes = inflight::bytes(self.ring_size);
        message(request, &[bytes, 0, u64::from(QUEUES) | self.ring_size << 16], file)
    }

    fn start(&self, queue: u64) -> [Message; 6] {
        let ring = USER + queue * RING_BYTES;
        let is_logged = u64::from(self.features & LOG_ALL != 0);
        let used = queue * RING_BYTES + USED;
        let base = if self.is_packed() { guest::PACKED_BASE } else { 0 };
        [
            message(8, &[pair(queue, self.ring_size)], Sent::None),
            message(10, &[pair(queue, base)], Sent::None),
            message(
                9,
                &[pair(queue, is_logged), ring, ring + USED, ring + AVAILABLE, used],
                Sent::None,
            ),
            message(13, &[queue], Sent::Event),
            message(12, &[queue], Sent::Event),
            message(18, &[pair(queue, 1)], Sent::None),
        ]
    }

    fn step(&mut self) {
        if self.slips() {
            let message = self.any_message();
            match self.choices.below(3) {
                0 => self.say(&message, NEED_REPLY),
                1 => self.slip(message),
                _ => {
                    let noise: Vec<u8> =
                        (0..self.choices.below(64)).map(|_| self.choices.byte()).collect();
                    // Whether it arrives is all one.
                    let _ = self.stream.write(&noise);
                }
            }
        } else if self.guest_slips() {
            self.scribble();
        } else if self.choices.chance(1, 8) {
            self.kick();
        } else {
            self.make_requests();
        }
        self.listen();
    }

    /// Zero, a small number, one near a limit, a place in memory, or any.
    fn number(&mut self) -> u64 {
        match self.choices.below(3) {
            0 => self.choices.below(2 * MEMORY_BYTES),
            1 => USER + self.choices.below(2 * MEMORY_BYTES),
            _ => self.choices.number(),
        }
    }

    fn any_message(&mut self) -> Message {
        let queue = self.choices.below(u64::from(QUEUES) + 1);
        let number = self.number();
        match self.choices.below(24) {
            0 => message(4, &[], Sent::None),
            1 => message(5, &[1, 0, MEMORY_BYTES, USER, 0], Sent::Memory),
            2 => message(8, &[pair(queue, number)], Sent::None),
            3 => message(10, &[pair(queue, number)], Sent::None),
            4 => message(9, &[queue, number, USER + USED, USER, 0], Sent::None),
            5 | 6 => message(11, &[queue], Sent::None),
            7 => message(12, &[queue | 0x100], Sent::None),
            8 => message(18, &[pair(queue, number % 2)], Sent::None),
            9 => message(24, &[pair(number, 60), 0, 0], Sent::None),
            10 => message(25, &[pair(32, 1), 0, number], Sent::None),
            11 => message(34, &[], Sent::None),
            12 => message(38, &[0, 0, MEMORY_BYTES, USER, 0], Sent::None),
            13 => self.add_memory(),
            14 => self.inflight(31, Sent::None),
            15 => {
                let file = [Sent::Memory, Sent::Region][self.choices.index(2)];
                self.inflight(32, file)
            }
            16 => message(6, &[number, 0], Sent::Memory),
            17 => message(21, &[], Sent::Event),
            18 => message(2, &[self.features ^ 1 << (number % 64)], Sent::None),
            19 => message(2, &[self.features ^ LOG_ALL], Sent::None),
            20 => message(6, &[number % (2 * LOG_BYTES), number % 3 * 8], Sent::Log),
            21 => message(7, &[], Sent::Event),
            22 => {
                let ring = USER + queue * RING_BYTES;
                let parts = [ring, ring + USED, ring + AVAILABLE, number];
                message(9, &[&[pair(queue, 1)][..], &parts].concat(), Sent::None)
            }
            _ => {
                let [a, _, b, ..] = self.start(queue % u64::from(QUEUES));
                if number.is_multiple_of(2) { a } else { b }
            }
        }
    }

    /// Says it with something wrong: a field, the length, the file, the kind, or only half of it.
    fn slip(&mut self, mut message: Message) {
        let mut flags = NEED_REPLY;
        match self.choices.below(6) {
            0 if !message.payload.is_empty() => {
                let (at, byte) = (self.choices.index(message.payload.len()), self.choices.byte());
                message.payload[at] = byte;
            }
            0 | 1 => message.payload.resize(self.choices.index(400), 0xa5),
            2 => {
                message.file = match message.file {
                    Sent::None => Sent::Memory,
                    Sent::Memory => Sent::Log,
                    Sent::Log => Sent::Region,
                    Sent::Region => Sent::Event,
                    Sent::Event => Sent::None,
                }
            }
            3 => message.request = u32::from(self.choices.byte()) % 50,
            4 => flags = u32::from(self.choices.byte()),
            _ => {
                let whole = bytes_of(&message, flags);
                let half = whole.get(..self.choices.index(whole.len())).unwrap_or_default();
                return drop(self.stream.write(half));
            }
        }
        self.say(&message, flags);
    }

    /// The back end may have hung up: nobody minds.
    fn say(&mut self, message: &Message, flags: u32) {
        let bytes = bytes_of(message, flags);
        let file: Option<BorrowedFd<'_>> = match message.file {
            Sent::None => None,
            Sent::Memory => Some(self.memory.as_fd()),
            Sent::Log => Some(self.log.as_fd()),
            Sent::Region => Some(self.region.as_fd()),
            Sent::Event => Some(self.event.as_fd()),
        };
        let count =
            if self.message_slips > 0 && self.choices.chance(1, 100) { FILES_MAX } else { 1 };
        let files: Vec<BorrowedFd<'_>> = file.into_iter().cycle().take(count).collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            ancillary.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::NOSIGNAL;
        let pieces = [IoSlice::new(&bytes)];
        let _ = rustix::net::sendmsg(&self.stream, &pieces, &mut ancillary, flags);
    }

    /// Takes what was answered, or leaves it there.
    fn listen(&mut self) {
        if self.choices.chance(7, 8) {
            let _ = self.stream.read(&mut [0; 4096]);
        }
    }
}

fn bytes_of(message: &Message, flags: u32) -> Vec<u8> {
    let len = u32::try_from(message.payload.len()).unwrap_or(u32::MAX);
    let header = [message.request, VERSION | flags, len];
    let mut bytes: Vec<u8> = header.iter().flat_map(|it| it.to_le_bytes()).collect();
    bytes.extend_from_slice(&message.payload);
    bytes
}

#[cfg(test)]
mod tests {
    //! Goal: lives get as far as requests, in rings of both kinds, and as those of the process
    //! before: else they show nothing.
    //! Method: some that make no slip, before a volume; who stops a queue hears of it once all that
    //! it was asked is answered.
    #![allow(clippy::unwrap_used, reason = "a test")]

    use std::time::Duration;

    use ashlar_target::unix_socket::Access;
    use ashlar_target::vhost::{ExportSpec, VhostExport};

    use super::*;
    use crate::served;

    /// Lives, and those in which what was in flight before was answered, and what was made
    /// available.
    #[derive(Debug, Default)]
    struct Answered {
        lives: u32,
        before: u32,
        later: u32,
    }

    impl FrontEnd {
        /// Stops all rings: whether a request was answered.
        fn stops(&mut self) -> bool {
            self.stream.set_nonblocking(false).unwrap();
            self.stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
            let mut is_answered = false;
            for queue in 0..QUEUES {
                self.say(&message(11, &[pair(queue.into(), 0)], Sent::None), 0);
                while self.reply() != 11 {}
                is_answered |= self.has_answers(queue.into());
            }
            is_answered
        }

        /// Takes one; which message it answers.
        fn reply(&mut self) -> u32 {
            let mut header = [[0; 4]; 3];
            self.stream.read_exact(header.as_flattened_mut()).unwrap();
            let [request, _, len] = header.map(u32::from_le_bytes);
            self.stream.read_exact(&mut vec![0; len as usize]).unwrap();
            request
        }
    }

    fn live_well(seed: u64, before: bool, answered: &mut [Answered; 2]) {
        let choices = Choices::of_seed(seed, "far");
        let mut front_end = FrontEnd::connect(&served::socket_path(), choices).unwrap();
        if front_end.message_slips != 0 || front_end.ring_size != RING_SIZES[0] {
            return;
        }
        (front_end.guest_slips, front_end.resumes) = (u64::MAX, before);
        let its = &mut answered[usize::from(front_end.is_packed())];
        front_end.greet();
        if before {
            its.lives += 1;
            its.before += u32::from(front_end.stops());
        } else {
            (0..8).for_each(|_| front_end.make_requests());
            its.later += u32::from(front_end.stops());
        }
    }

    #[test]
    fn lives_get_far() {
        let (name, serial) = ("disk".into(), "fuzz".into());
        let (socket, access) = (served::socket_path(), Access::default());
        let limits = served::limits();
        let spec =
            ExportSpec { name, socket, access, queues_max: QUEUES, serial, limits, since: 0 };
        let _export = VhostExport::start(served::parts(), spec).unwrap();
        let mut answered = <[Answered; 2]>::default();
        for seed in 0..100 {
            live_well(seed, true, &mut answered);
            live_well(seed, false, &mut answered);
        }
        println!("split and packed: {answered:?}");
        for its in answered {
            assert!(its.lives > 10, "{its:?}");
            assert!(its.before > its.lives / 2 && its.later > its.lives / 2, "{its:?}");
        }
    }
}
