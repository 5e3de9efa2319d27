//! An array on files in memory and a plain copy of the bytes it should hold.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    dead_code,
    unreachable_pub,
    reason = "each test uses a part of it"
)]

use std::cell::RefCell;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use ashlar_drive::drive::{Drive, Limits};
use ashlar_format::array_superblock::{ArraySuperblock, Level, MemberState};
use ashlar_format::record;
use ashlar_format::units::MemberIndex;
use ashlar_raid::array::Array;
use ashlar_raid::error::{ArrayError, AssembleError};
use ashlar_raid::label;
use ashlar_raid::settings::SettingsChange;
use ashlar_raid::start::{ArraySpec, AssembleOptions, Known};
use ashlar_raid::status::{ArrayState, ScrubState};
use ashlar_reactor::backend::Backend;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::{Order, Reactor};
use ashlar_reactor::op::Device;
use ashlar_reactor::prng::Prng;
use ashlar_reactor::uring::UringBackend;
use rustix::fs::{MemfdFlags, memfd_create};

pub const DRIVE_BYTES: u64 = 12 << 20;

pub fn drive(reactor: &Reactor, name: &str, sector_bytes: u32) -> Rc<Drive> {
    open(reactor, &memory(DRIVE_BYTES), name, sector_bytes)
}

/// A file in memory: unlike a RAM drive it outlives its handles.
fn memory(bytes: u64) -> Arc<File> {
    let file = File::from(memfd_create("drive", MemfdFlags::CLOEXEC).unwrap());
    file.set_len(bytes).unwrap();
    Arc::new(file)
}

fn open(reactor: &Reactor, file: &Arc<File>, name: &str, sector_bytes: u32) -> Rc<Drive> {
    let bytes = file.metadata().unwrap().len();
    let limits = Limits { bytes, sector_bytes, zeroes_cheaply: true };
    Drive::new(reactor, Device::File { file: file.clone() }, limits, name)
}

/// Bytes that are nobody's data, all over a drive.
pub async fn fill(reactor: &Reactor, drive: &Rc<Drive>) {
    let buffer = reactor.buffer(1 << 20);
    buffer.copy_from_slice(&[0xa5; 1 << 20]);
    for at in (0..DRIVE_BYTES).step_by(1 << 20) {
        drive.write(at, buffer.clone().into()).await.unwrap();
    }
}

pub fn run<F: Future<Output = ()> + 'static>(test: impl FnOnce(Reactor) -> F) {
    run_on(Box::new(UringBackend::new().unwrap()), test);
}

pub fn run_on<T: 'static, F: Future<Output = T> + 'static>(
    backend: Box<dyn Backend>,
    test: impl FnOnce(Reactor) -> F,
) -> T {
    let reactor = Reactor::new(backend, Order::Fifo);
    let future = test(reactor.clone());
    reactor.block_on(future).expect("the test ends")
}

/// What runs beside the test.
pub struct Begun<T>(Rc<RefCell<Option<T>>>);

pub fn begin<T: 'static>(reactor: &Reactor, future: impl Future<Output = T> + 'static) -> Begun<T> {
    let answer = Rc::new(RefCell::new(None));
    let begun = Begun(answer.clone());
    reactor.spawn(async move {
        let done = future.await;
        *answer.borrow_mut() = Some(done);
    });
    begun
}

impl<T> Begun<T> {
    pub fn has_ended(&self) -> bool {
        self.0.borrow().is_some()
    }

    /// Its answer, which comes within 20 seconds.
    pub async fn ended(self, reactor: &Reactor) -> T {
        for _ in 0..2000 {
            if let Some(answer) = self.0.borrow_mut().take() {
                return answer;
            }
            reactor.sleep(Duration::from_millis(10)).await;
        }
        panic!("it waits without end");
    }
}

/// The array and what it should hold.
pub struct Pair {
    pub reactor: Reactor,
    pub array: Rc<Array>,
    pub bytes: Vec<u8>,
    pub prng: Prng,
    files: Vec<(Rc<Drive>, Arc<File>)>,
}

impl Pair {
    /// On drives that are not empty: nothing may depend on what stands there.
    pub async fn new(reactor: &Reactor, level: Level, members: usize, sector: u32) -> Pair {
        Pair::made(reactor, &Pair::spec(level), &vec![DRIVE_BYTES; members], sector).await
    }

    /// On drives of so many bytes each.
    pub async fn on(reactor: &Reactor, level: Level, drives: &[u64]) -> Pair {
        Pair::made(reactor, &Pair::spec(level), drives, 512).await
    }

    /// The same with a checksum of every block.
    pub async fn checked(reactor: &Reactor, level: Level, members: usize, sector: u32) -> Pair {
        let spec = ArraySpec { integrity: true, ..Pair::spec(level) };
        Pair::made(reactor, &spec, &vec![DRIVE_BYTES; members], sector).await
    }

    pub fn spec(level: Level) -> ArraySpec {
        ArraySpec {
            uuid: [9; 16],
            name: "test".into(),
            level,
            chunk_bytes: 16 << 10,
            shape: ashlar_raid::layout::Shape::default(),
            policy: None,
            integrity: false,
            settings: SettingsChange::default(),
            host: None,
        }
    }

    pub async fn made(reactor: &Reactor, spec: &ArraySpec, drives: &[u64], sector: u32) -> Pair {
        let mut files = Vec::new();
        for (i, bytes) in drives.iter().enumerate() {
            let file = memory(*bytes);
            let drive = open(reactor, &file, &format!("d{i}"), sector);
            fill(reactor, &drive).await;
            files.push((drive, file));
        }
        let drives = files.iter().enumerate().map(|(i, (drive, _))| ([i as u8; 16], drive.clone()));
        let drives = drives.collect();
        let array = Array::create(reactor, spec, drives).await.unwrap();
        let bytes = vec![0; array.capacity().min(4 << 20) as usize];
        Pair { reactor: reactor.clone(), array, bytes, prng: Prng::from_seed(7), files }
    }

    /// An array on other drives, so many bytes of which are used.
    pub fn of(reactor: &Reactor, array: Rc<Array>, bytes: u64) -> Pair {
        let (reactor, bytes) = (reactor.clone(), vec![0; bytes as usize]);
        Pair { reactor, array, bytes, prng: Prng::from_seed(7), files: Vec::new() }
    }

    /// What its host remembers.
    pub fn known(&self) -> Option<Known> {
        let status = self.array.status();
        let trusted = status.members.iter().filter(|its| its.state == MemberState::Trusted);
        let current = trusted.map(|its| its.drive_uuid).collect();
        let (generation, epoch) = (status.generation, status.epoch);
        Some(Known { generation, epoch, last_epoch: epoch, current })
    }

    /// A random range of whole sectors, often small, sometimes over several stripes.
    pub fn range(&mut self) -> (usize, usize) {
        let len_max = [8, 64, 700][self.prng.index(3)];
        let len = 512 * (1 + self.prng.index(len_max));
        let at = 512 * self.prng.index((self.bytes.len() - len) / 512 + 1);
        (at, len)
    }

    pub async fn write_some(&mut self, count: usize) {
        for _ in 0..count {
            let (at, len) = self.range();
            if self.prng.chance(1, 12) {
                self.bytes[at..at + len].fill(0);
                self.array.write_zeroes(at as u64, len as u64).await.unwrap();
                continue;
            }
            let value = self.prng.next_u64().to_le_bytes();
            let new: Vec<u8> = (0..len).map(|i| value[i % 8] ^ (i / 512) as u8).collect();
            self.bytes[at..at + len].copy_from_slice(&new);
            // Pieces of odd sizes, as a guest may give them.
            let first = (512 * self.prng.index(3)).min(len - 512);
            let mut from = Buffers::default();
            for part in [&new[..first], &new[first..]] {
                for part in part.chunks(1 << 20).filter(|part| !part.is_empty()) {
                    let buffer = self.reactor.buffer(part.len());
                    buffer.copy_from_slice(part);
                    from.push(buffer);
                }
            }
            self.array.write(at as u64, from).await.unwrap();
        }
    }

    /// Writes these bytes.
    pub async fn put(&mut self, at: usize, new: &[u8]) {
        self.bytes[at..at + new.len()].copy_from_slice(new);
        let mut from = Buffers::default();
        for part in new.chunks(1 << 20) {
            let buffer = self.reactor.buffer(part.len());
            buffer.copy_from_slice(part);
            from.push(buffer);
        }
        self.array.write(at as u64, from).await.unwrap();
    }

    pub async fn read(&self, at: usize, len: usize) -> Result<Vec<u8>, ArrayError> {
        let into = self.reactor.buffer(len);
        self.array.read(at as u64, into.clone().into()).await?;
        Ok(into.bytes().to_vec())
    }

    pub async fn check(&mut self) {
        for at in (0..self.bytes.len()).step_by(1 << 18) {
            let len = (1 << 18).min(self.bytes.len() - at);
            let read = self.read(at, len).await.unwrap();
            let wrong = read.iter().zip(&self.bytes[at..]).position(|(a, b)| a != b);
            assert_eq!(wrong.map(|w| w + at), None, "first wrong byte");
        }
        for _ in 0..20 {
            let (at, len) = self.range();
            assert!(self.read(at, len).await.unwrap() == self.bytes[at..at + len]);
        }
    }

    pub async fn scrub_is_clean(&self) {
        self.array.start_scrub(false).unwrap();
        loop {
            self.reactor.sleep(Duration::from_millis(1)).await;
            if let ScrubState::Finished { report } = self.array.status().scrub {
                assert_eq!(report.mismatched_stripes, 0, "{report:?}");
                assert_eq!(report.unreadable_stripes, 0, "{report:?}");
                return;
            }
        }
    }

    /// Waits until all that was acknowledged is in place.
    pub async fn in_place(&self) {
        self.array.destage_all().await.unwrap();
    }

    /// Waits until a rebuild has ended, whatever it left.
    pub async fn rebuild_ends(&self) {
        while self.array.status().rebuild.is_some() {
            self.reactor.sleep(Duration::from_millis(1)).await;
        }
    }

    pub async fn rebuilt(&self) {
        self.rebuild_ends().await;
        assert_eq!(self.array.status().rebuild_error, None);
    }

    /// A drive that nobody knows, and that is not empty.
    pub async fn new_drive(&mut self) -> Rc<Drive> {
        let file = memory(DRIVE_BYTES);
        let new = open(&self.reactor, &file, "new", 512);
        fill(&self.reactor, &new).await;
        self.files.push((new.clone(), file));
        new
    }

    /// A member gets another drive.
    pub async fn replace(&mut self, member: u8) {
        let new = self.new_drive().await;
        let uuid = [200 + member; 16];
        self.array.replace_member(MemberIndex(member), new, uuid).await.unwrap();
    }

    /// Of all members, which are here.
    pub fn drives(&self) -> Vec<Rc<Drive>> {
        self.array.status().members.into_iter().map(|member| member.drive.unwrap()).collect()
    }

    /// The daemon dies. Returns the drives that were here.
    pub fn dies(&self) -> Vec<Rc<Drive>> {
        let members = self.array.status().members;
        let here: Vec<_> = members.into_iter().filter_map(|member| member.drive).collect();
        here.iter().for_each(|drive| drive.pull());
        here
    }

    /// The daemon dies, and the array is started with these.
    pub async fn starts_with(&mut self, drives: &[&Rc<Drive>]) {
        self.start(drives, AssembleOptions::default()).await.unwrap();
    }

    /// The same, as far as it can be.
    pub async fn start(
        &mut self,
        drives: &[&Rc<Drive>],
        options: AssembleOptions,
    ) -> Result<(), AssembleError> {
        self.dies();
        let drives = drives.iter().map(|drive| self.plug_in(drive)).collect();
        self.array = Array::assemble(&self.reactor, drives, options).await?;
        Ok(())
    }

    /// Optimal, and nothing differs; then it is stopped.
    pub async fn is_whole(&mut self) {
        self.rebuilt().await;
        assert_eq!(self.array.state(), ArrayState::Optimal);
        self.check().await;
        self.in_place().await;
        self.scrub_is_clean().await;
        self.array.stop().await.unwrap();
    }

    /// The newest superblock of a drive.
    pub async fn superblock(&self, drive: &Rc<Drive>) -> ArraySuperblock {
        // On drives of one size they are in one place, whatever the level.
        let area = label::plan(DRIVE_BYTES, 1).unwrap().superblocks;
        let bytes = self.reactor.buffer(area.len as usize);
        drive.read(area.offset, bytes.clone().into()).await.unwrap();
        let slots = bytes.bytes().chunks_exact(ArraySuperblock::BYTES as usize).zip(0..);
        let opened = slots.filter_map(|(slot, index)| {
            let home = area.offset + index * ArraySuperblock::BYTES;
            record::open::<ArraySuperblock>(slot, None, home).ok()
        });
        opened.max_by_key(|its| its.header.sequence.get()).unwrap().clone()
    }

    /// What is behind a drive.
    pub fn file(&self, drive: &Rc<Drive>) -> &Arc<File> {
        let (_, file) = self.files.iter().find(|(its, _)| Rc::ptr_eq(its, drive)).unwrap();
        file
    }

    /// A new handle for what is behind an old one, as when a drive is plugged in again.
    pub fn plug_in(&mut self, old: &Rc<Drive>) -> Rc<Drive> {
        let file = self.file(old).clone();
        let new = open(&self.reactor, &file, old.name(), old.limits().sector_bytes);
        self.files.push((new.clone(), file));
        new
    }

    /// The process dies, and with it the drives of these members.
    pub async fn crash_without(&mut self, lost: &[usize]) {
        let members = self.array.status().members;
        let drives: Vec<_> = members.into_iter().filter_map(|member| member.drive).collect();
        drives.iter().for_each(|drive| drive.pull());
        let left = drives.iter().enumerate().filter(|(index, _)| !lost.contains(index));
        let left: Vec<_> = left.map(|(_, drive)| self.plug_in(drive)).collect();
        let options = AssembleOptions { force: true, ..AssembleOptions::default() };
        self.array = Array::assemble(&self.reactor, left, options).await.unwrap();
    }

    /// Stops the array and puts it together again from its drives, in reverse order.
    pub async fn restart(&mut self, options: AssembleOptions) {
        self.restart_with(options, Vec::new()).await;
    }

    /// The same, with more drives than those that answer.
    pub async fn restart_with(&mut self, options: AssembleOptions, more: Vec<Rc<Drive>>) {
        let members = self.array.status().members;
        self.array.stop().await.unwrap();
        assert_eq!(self.read(0, 512).await, Err(ArrayError::Stopped));
        let mut drives: Vec<_> = members.into_iter().filter_map(|m| m.drive).collect();
        drives.retain(|drive| drive.is_alive());
        drives.extend(more);
        drives.reverse();
        self.array = Array::assemble(&self.reactor, drives, options).await.unwrap();
    }
}
