//! Writes numbered, checksummed pieces to a bare block device in a guest, and says what is durable.
//!
//! ```text
//! raw_writer DEVICE SEED read     lists the version of every slot, and every torn slot
//! raw_writer DEVICE SEED write    for ever: writes slots anew, flushes, says their versions
//! ```
//!
//! The device's first part is divided into slots: 1 to 128 sectors (64 KiB) long, one after the
//! other, so most begin anywhere. A slot is always written as a whole by one write, and each of its
//! sectors carries its version and bytes that follow from slot, version and place. So after a power
//! cut a slot must hold one version and nothing else. Threads own disjoint slots; a thread writes a
//! few, flushes, says them, and only then goes on: no slot is more than one version past that.

use std::fs::{File, OpenOptions};
use std::io::{Result, Write, stdout};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::process::ExitCode;
use std::sync::Arc;

const SECTOR: usize = 512;
const SLOT_SECTORS_MAX: usize = 128;
const SLOTS: usize = 1500; // 48 MiB
const THREADS: usize = 4;
const BATCH_MAX: usize = 8;
const O_DIRECT: i32 = 0o40000;
const PAGE: usize = 4096;

struct Slot {
    number: usize,
    offset: u64,
    bytes: usize,
}

fn main() -> ExitCode {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match words.as_slice() {
        [device, seed, what] => match (seed.parse(), what.as_str()) {
            (Ok(seed), "read") => read(device, seed),
            (Ok(seed), "write") => write(device, seed),
            _ => return ExitCode::from(2),
        },
        _ => return ExitCode::from(2),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("raw_writer: {error}");
            ExitCode::FAILURE
        }
    }
}

fn read(device: &str, seed: u64) -> Result<()> {
    let file = open(device)?;
    let mut buffer = Aligned::new();
    let mut lines = String::new();
    for slot in slots(seed) {
        let line = match version(&file, &slot, seed, &mut buffer)? {
            Ok(version) => format!("{} {version}\n", slot.number),
            Err(torn) => format!("torn {} at {}: {torn}\n", slot.number, slot.offset),
        };
        lines.push_str(&line);
    }
    stdout().write_all(lines.as_bytes())
}

fn write(device: &str, seed: u64) -> Result<()> {
    let file = Arc::new(open(device)?);
    let writers: Vec<_> = (0..THREADS)
        .map(|thread| {
            let file = file.clone();
            std::thread::spawn(move || write_own(&file, seed, thread))
        })
        .collect();
    for writer in writers {
        writer.join().map_err(|_| std::io::Error::other("a thread panicked"))??;
    }
    Ok(())
}

fn write_own(file: &File, seed: u64, thread: usize) -> Result<()> {
    let own: Vec<Slot> = slots(seed).into_iter().filter(|s| s.number % THREADS == thread).collect();
    let mut buffer = Aligned::new();
    let mut versions = Vec::new();
    for slot in &own {
        let version = version(file, slot, seed, &mut buffer)?;
        versions.push(version.map_err(std::io::Error::other)?);
    }
    let mut random = Random(seed ^ versions.iter().sum::<u64>() ^ (thread as u64) << 32);
    loop {
        let count = random.below(BATCH_MAX) + 1;
        let first = random.below(own.len());
        let stride = random.below(16) + 1;
        let mut said = String::new();
        // 8 slots of stride 16 are not a whole turn: each slot at most once.
        for place in (0..count).map(|step| (first + step * stride) % own.len()) {
            let slot = &own[place];
            versions[place] += 1;
            let bytes = buffer.bytes(slot.bytes);
            for (index, sector) in bytes.chunks_mut(SECTOR).enumerate() {
                sector.copy_from_slice(&content(seed, slot.number, versions[place], index));
            }
            file.write_all_at(bytes, slot.offset)?;
            said.push_str(&format!(" {}:{}", slot.number, versions[place]));
        }
        file.sync_data()?;
        stdout().lock().write_all(format!("durable{said}\n").as_bytes())?;
    }
}

/// The one version that a slot holds, or what is wrong with it. Zeroes are version 0.
fn version(
    file: &File,
    slot: &Slot,
    seed: u64,
    buffer: &mut Aligned,
) -> Result<std::result::Result<u64, String>> {
    let bytes = buffer.bytes(slot.bytes);
    file.read_exact_at(bytes, slot.offset)?;
    let found: Vec<Option<u64>> = bytes
        .chunks(SECTOR)
        .enumerate()
        .map(|(index, sector)| sector_version(seed, slot.number, index, sector))
        .collect();
    Ok(match found.first() {
        Some(Some(first)) if found.iter().all(|each| each == &Some(*first)) => Ok(*first),
        _ => Err(format!("its sectors hold versions {found:?}")),
    })
}

/// `None` if the sector is not what was written there in any version.
fn sector_version(seed: u64, slot: usize, index: usize, sector: &[u8]) -> Option<u64> {
    if sector.iter().all(|byte| *byte == 0) {
        return Some(0);
    }
    let version = u64::from_le_bytes(sector.first_chunk().copied()?);
    (content(seed, slot, version, index) == sector).then_some(version)
}

fn content(seed: u64, slot: usize, version: u64, index: usize) -> [u8; SECTOR] {
    let place = (slot as u64) << 8 | index as u64;
    let mut random = Random(seed ^ place.rotate_left(20) ^ version.rotate_left(44));
    let mut sector = [0; SECTOR];
    for word in sector.chunks_mut(8) {
        word.copy_from_slice(&random.next().to_le_bytes());
    }
    sector[..8].copy_from_slice(&version.to_le_bytes());
    sector
}

fn slots(seed: u64) -> Vec<Slot> {
    let mut random = Random(seed);
    let mut offset = 0;
    (0..SLOTS)
        .map(|number| {
            // One in four is as long as it may be.
            let sectors = match random.below(4) {
                0 => SLOT_SECTORS_MAX,
                _ => random.below(SLOT_SECTORS_MAX) + 1,
            };
            let slot = Slot { number, offset, bytes: sectors * SECTOR };
            offset += slot.bytes as u64;
            slot
        })
        .collect()
}

fn open(device: &str) -> Result<File> {
    OpenOptions::new().read(true).write(true).custom_flags(O_DIRECT).open(device)
}

/// Memory that direct I/O takes.
struct Aligned {
    memory: Vec<u8>,
    start: usize,
}

impl Aligned {
    fn new() -> Aligned {
        let memory = vec![0; SLOT_SECTORS_MAX * SECTOR + PAGE];
        let start = memory.as_ptr().align_offset(PAGE);
        Aligned { memory, start }
    }

    fn bytes(&mut self, count: usize) -> &mut [u8] {
        &mut self.memory[self.start..self.start + count]
    }
}

/// SplitMix64 (Steele, Lea, Flood 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        let [low, high, ..] = self.next().to_le_bytes();
        usize::from(u16::from_le_bytes([low, high])) % end
    }
}
