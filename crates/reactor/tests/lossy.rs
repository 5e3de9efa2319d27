//! Goal: a lossy drive always shows the newest data; a power cut takes some of what was not
//! flushed, and nothing else.
//! Method: seeded operations on real files, compared sector by sector with a list of what was
//! written. A power cut is the end of the backend.
#![allow(clippy::unwrap_used, reason = "a test")]

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_reactor::executor::{Io, Order, Reactor};
use ashlar_reactor::op::{Device, DeviceId, Op};
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;

const SECTOR: usize = 512;
const SECTORS: usize = 512;
const MIB: usize = 1 << 20;
const STEPS: u64 = 400;

fn scratch(bytes: usize) -> Arc<File> {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    let name = format!("ashlar-lossy-{}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    std::fs::remove_file(path).unwrap();
    file.set_len(bytes as u64).unwrap();
    Arc::new(file)
}

fn lossy<T: 'static>(
    file: &Arc<File>,
    seed: u64,
    test: impl AsyncFnOnce(Reactor, DeviceId) -> T + 'static,
) -> T {
    let reactor = Reactor::new(Box::new(UringBackend::new().unwrap()), Order::Fifo);
    let device = Device::Lossy { file: file.clone(), sector_bytes: 512, seed };
    let device = reactor.register(device);
    let its = reactor.clone();
    reactor.block_on(async move { test(its, device).await }).unwrap()
}

/// One sector: what it was when it was flushed last, and all that was written since.
#[derive(Clone)]
struct Sector {
    written: Vec<u64>,
}

impl Sector {
    fn newest(&self) -> u64 {
        *self.written.last().unwrap()
    }
}

fn blank() -> Vec<Sector> {
    vec![Sector { written: vec![0] }; SECTORS]
}

struct Run {
    reactor: Reactor,
    device: DeviceId,
    prng: Prng,
    sectors: Vec<Sector>,
    values: u64,
}

impl Run {
    /// A range of a few sectors.
    fn draw(&mut self) -> std::ops::Range<usize> {
        let start = self.prng.index(SECTORS);
        start..(start + 1 + self.prng.index(24)).min(SECTORS)
    }

    fn write(&mut self) -> Io {
        let range = self.draw();
        let buffer = self.reactor.buffer(range.len() * SECTOR);
        for (index, sector) in range.clone().enumerate() {
            self.values += 1;
            let bytes: Vec<u8> = self.values.to_le_bytes().repeat(SECTOR / 8);
            buffer.slice(index * 512..(index + 1) * 512).copy_from_slice(&bytes);
            self.sectors[sector].written.push(self.values);
        }
        let offset = (range.start * SECTOR) as u64;
        self.reactor.submit(Op::Write { device: self.device, offset, from: buffer.into() })
    }

    async fn check(&mut self) {
        let range = self.draw();
        let into = self.reactor.buffer(range.len() * SECTOR);
        let offset = (range.start * SECTOR) as u64;
        let read = Op::Read { device: self.device, offset, into: into.clone().into() };
        let (want, io) = (self.expected(range.clone()), self.reactor.submit(read));
        // What goes from the cache to the file meanwhile does not disturb it.
        if self.prng.chance(1, 4) {
            self.flush().await;
        }
        assert_eq!(io.await, Ok(into.len() as u64));
        assert_eq!(values(into.bytes()), want, "sectors {range:?}");
    }

    fn expected(&self, range: std::ops::Range<usize>) -> Vec<u64> {
        self.sectors[range].iter().map(Sector::newest).collect()
    }

    async fn zero(&mut self) {
        let range = self.draw();
        let (offset, len) = ((range.start * SECTOR) as u64, (range.len() * SECTOR) as u64);
        let op = Op::WriteZeroes { device: self.device, offset, len, unmap: true };
        assert!(self.reactor.submit(op).await.is_ok());
        range.for_each(|sector| self.sectors[sector].written = vec![0]);
    }

    async fn flush(&mut self) {
        assert_eq!(self.reactor.submit(Op::Flush { device: self.device }).await, Ok(0));
        for sector in &mut self.sectors {
            sector.written = vec![sector.newest()];
        }
    }

    async fn go(mut self) -> Vec<Sector> {
        for _ in 0..STEPS {
            match self.prng.below(20) {
                0 => self.flush().await,
                1..3 => self.zero().await,
                3..5 => self.check().await,
                _ => {
                    let both = (self.write(), self.write());
                    assert!(both.0.await.is_ok() && both.1.await.is_ok());
                }
            }
        }
        self.sectors
    }
}

/// The value of each sector, which must not be a mixture.
fn values(bytes: &[u8]) -> Vec<u64> {
    let one = |sector: &[u8]| {
        let words: Vec<u64> =
            sector.chunks(8).map(|word| u64::from_le_bytes(word.try_into().unwrap())).collect();
        assert!(words.iter().all(|word| *word == words[0]), "a torn sector");
        words[0]
    };
    bytes.chunks(SECTOR).map(one).collect()
}

#[test]
fn a_power_cut_takes_some_of_what_was_not_flushed() {
    let (mut lost, mut kept, mut passed_over) = (0, 0, 0);
    for seed in 0..20 {
        let file = scratch(SECTORS * SECTOR);
        let sectors = lossy(&file, seed, async move |reactor, device| {
            let prng = Prng::from_seed(seed);
            Run { reactor, device, prng, sectors: blank(), values: 0 }.go().await
        });
        let mut bytes = vec![0; SECTORS * SECTOR];
        file.read_exact_at(&mut bytes, 0).unwrap();
        for (index, (value, sector)) in values(&bytes).iter().zip(&sectors).enumerate() {
            let newest = sector.newest();
            let place = sector.written.iter().position(|written| written == value);
            assert!(place.is_some(), "seed {seed}, sector {index}: {value}");
            if sector.written.len() > 1 {
                lost += u32::from(*value != newest);
                kept += u32::from(*value == newest);
                passed_over += u32::from(place.is_some_and(|at| at > 0 && *value != newest));
            }
        }
    }
    assert!(lost > 100 && kept > 100 && passed_over > 5, "{lost} {kept} {passed_over}");
}

#[test]
fn what_was_flushed_is_kept() {
    let file = scratch(SECTORS * SECTOR);
    let sectors = lossy(&file, 3, async |reactor, device| {
        let prng = Prng::from_seed(3);
        let mut run = Run { reactor, device, prng, sectors: blank(), values: 0 };
        for _ in 0..100 {
            assert!(run.write().await.is_ok());
        }
        // One flush may share the way with others.
        let also = run.reactor.submit(Op::Flush { device });
        run.flush().await;
        assert_eq!(also.await, Ok(0));
        run.sectors
    });
    let mut bytes = vec![0; SECTORS * SECTOR];
    file.read_exact_at(&mut bytes, 0).unwrap();
    let newest: Vec<u64> = sectors.iter().map(Sector::newest).collect();
    assert_eq!(values(&bytes), newest);
}

#[test]
fn to_let_it_go_is_no_power_cut() {
    let file = scratch(MIB);
    let watched = file.clone();
    lossy(&file, 4, async move |reactor, device| {
        let from = reactor.buffer(MIB);
        from.copy_from_slice(&vec![5; MIB]);
        let write = Op::Write { device, offset: 0, from: from.into() };
        assert_eq!(reactor.submit(write).await, Ok(MIB as u64));
        reactor.unregister(device);
        let deadline = reactor.now().after(Duration::from_secs(20));
        // This count, the test's, and the caller's.
        while Arc::strong_count(&watched) > 2 {
            assert!(reactor.now() < deadline, "it holds the file for ever");
            reactor.sleep(Duration::from_millis(1)).await;
        }
    });
    let mut bytes = vec![0; MIB];
    file.read_exact_at(&mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 5));
}

#[test]
fn a_full_cache_gives_blocks_up_and_a_full_file_is_an_error() {
    let file = scratch(96 * MIB);
    let sparse = file.clone();
    lossy(&file, 5, async move |reactor, device| {
        let from = reactor.buffer(MIB);
        from.copy_from_slice(&vec![6; MIB]);
        let writes: Vec<Io> = (0..96)
            .map(|mib| {
                let from = from.clone().into();
                reactor.submit(Op::Write { device, offset: (mib * MIB) as u64, from })
            })
            .collect();
        for write in writes {
            assert_eq!(write.await, Ok(MIB as u64));
        }
        let on_file = std::os::unix::fs::MetadataExt::blocks(&sparse.metadata().unwrap()) * 512;
        // What does not fit the cache of 64 MiB, and what trickled.
        assert!((31 * MIB as u64..90 * MIB as u64).contains(&on_file), "{on_file} bytes");
    });
    // A file that cannot be written: the cache fills, and then says so.
    let read_only = Rc::new(Arc::new(File::open("/dev/zero").unwrap()));
    lossy(&read_only, 6, async |reactor, device| {
        let from = reactor.buffer(MIB);
        let mut outcomes = Vec::new();
        for mib in 0..70 {
            let from = from.clone().into();
            outcomes
                .push(reactor.submit(Op::Write { device, offset: (mib * MIB) as u64, from }).await);
        }
        let refused = outcomes.iter().position(|outcome| outcome.is_err());
        assert_eq!(refused, Some(64), "the cache has 64 MiB");
        assert!(reactor.submit(Op::Flush { device }).await.is_err());
        assert!(reactor.submit(Op::Flush { device }).await.is_err(), "it still cannot");
    });
}
