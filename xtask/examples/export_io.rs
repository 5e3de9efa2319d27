//! Fills a vhost-user-blk export and reads it back, with a client that shares nothing with ours.
//!
//! ```text
//! export_io SOCKET SEED BYTES write     writes pieces in a scattered order, then flushes
//! export_io SOCKET SEED BYTES verify    reads them in another, and compares
//! ```
//!
//! Every sector follows from the seed and its place, so a piece that is lost, old or somewhere else
//! is seen. Many requests are under way at once.

use std::error::Error;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::process::ExitCode;

use memmap2::MmapMut;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, memfd_create};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

const SECTOR: usize = 512;
/// No multiple of a page: pieces begin anywhere.
const PIECE: usize = 24 * SECTOR;
const DEPTH: usize = 16;
const QUEUE_SIZE: u16 = 128;
const PATIENCE: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };
/// Coprime to any count of pieces that is not its multiple.
const STRIDE: usize = 7919;

struct Client {
    queues: Vec<VirtioBlkQueue<'static, usize>>,
    transport: Box<VirtioBlkTransport>,
    /// Shared with the device: one place for each request.
    memory: MmapMut,
    _file: File,
}

impl Client {
    fn connect(socket: &str) -> Result<Client> {
        let ring = VirtioFeatureFlags::VERSION_1;
        let block = VirtioBlkFeatureFlags::FLUSH | VirtioBlkFeatureFlags::MQ;
        let features = ring.bits() | block.bits();
        let mut transport: Box<VirtioBlkTransport> = Box::new(VhostUser::new(socket, features)?);
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, 1, QUEUE_SIZE)?;
        let file = File::from(memfd_create("client", MemfdFlags::CLOEXEC)?);
        file.set_len((DEPTH * PIECE) as u64)?;
        // SAFETY: only the device shares the file, and writes into it between a request and its
        // completion only.
        let memory = unsafe { MmapMut::map_mut(&file) }?;
        let place = memory.as_ptr().addr();
        transport.map_mem_region(place, memory.len(), file.as_raw_fd(), 0)?;
        let mut client = Client { queues, transport, memory, _file: file };
        client.queues[0].set_used_notif_enabled(true);
        Ok(client)
    }

    fn kick(&mut self) -> Result<()> {
        if self.queues[0].avail_notif_needed() {
            self.transport.get_submission_notifier(0).notify()?;
        }
        Ok(())
    }

    /// Places whose requests have ended well.
    fn wait(&mut self) -> Result<Vec<usize>> {
        let bell = self.transport.get_completion_fd(0);
        loop {
            let done: Vec<_> =
                self.queues[0].completions().map(|done| (done.context, done.ret)).collect();
            if let Some((_, error)) = done.iter().find(|(_, result)| *result != 0) {
                return Err(format!("a request failed: {error}").into());
            }
            if !done.is_empty() {
                return Ok(done.into_iter().map(|(place, _)| place).collect());
            }
            let mut fds = [PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)];
            if poll(&mut fds, Some(&PATIENCE))? == 0 {
                return Err("the device does not answer".into());
            }
            let _ = bell.read();
        }
    }

    /// Moves `pieces` pieces, in the order of a stride, with several under way.
    fn run(&mut self, seed: u64, pieces: usize, is_write: bool) -> Result<()> {
        let mut free: Vec<usize> = (0..DEPTH).collect();
        let mut piece_at = [0; DEPTH];
        let (mut begun, mut ended) = (0, 0);
        while ended < pieces {
            while begun < pieces
                && let Some(place) = free.pop()
            {
                let piece = begun * STRIDE % pieces;
                piece_at[place] = piece;
                let (offset, start) = ((piece * PIECE) as u64, place * PIECE);
                let memory = &mut self.memory[start..start + PIECE];
                if is_write {
                    fill(memory, seed, offset);
                    self.queues[0].write(offset, memory, place)?;
                } else {
                    self.queues[0].read(offset, memory, place)?;
                }
                begun += 1;
            }
            self.kick()?;
            for place in self.wait()? {
                let offset = (piece_at[place] * PIECE) as u64;
                if !is_write && !fits(&self.memory[place * PIECE..][..PIECE], seed, offset) {
                    return Err(format!("wrong data at byte {offset}").into());
                }
                free.push(place);
                ended += 1;
            }
        }
        if is_write {
            self.queues[0].flush(0)?;
            self.kick()?;
            self.wait()?;
        }
        Ok(())
    }
}

fn fill(memory: &mut [u8], seed: u64, offset: u64) {
    for (word, place) in memory.chunks_exact_mut(8).zip((offset..).step_by(8)) {
        word.copy_from_slice(&word_at(seed, place));
    }
}

fn fits(memory: &[u8], seed: u64, offset: u64) -> bool {
    let mut words = memory.chunks_exact(8).zip((offset..).step_by(8));
    words.all(|(word, place)| word == word_at(seed, place))
}

/// SplitMix64's mixing function (Steele, Lea, Flood 2014).
fn word_at(seed: u64, place: u64) -> [u8; 8] {
    let mut word = place.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed;
    word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    (word ^ word >> 31).to_le_bytes()
}

fn run(words: &[String]) -> Result<()> {
    let [socket, seed, bytes, what] = words else {
        return Err("usage: export_io SOCKET SEED BYTES write|verify".into());
    };
    let is_write = match what.as_str() {
        "write" => true,
        "verify" => false,
        other => return Err(format!("{other}?").into()),
    };
    let mut pieces = bytes.parse::<usize>()? / PIECE;
    pieces -= usize::from(pieces.is_multiple_of(STRIDE));
    Client::connect(socket)?.run(seed.parse()?, pieces, is_write)
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("export_io: {error}");
            ExitCode::FAILURE
        }
    }
}
