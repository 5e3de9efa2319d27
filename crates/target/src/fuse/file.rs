//! The volume as one regular file: what each operation on it does.
//!
//! Nothing of it is cached by the kernel, so what is written by other ways is read here, too. Its
//! size is the volume's, and nobody can change it here. Bytes that are no whole sectors are read
//! and written with the rest of their sectors.

use std::cell::Cell;
use std::pin::pin;
use std::rc::Rc;

use ashlar_format::units::{SECTOR_BYTES, to_usize};
use ashlar_reactor::buffer::{Buffer, Buffers};
use ashlar_reactor::executor::Reactor;
use ashlar_reactor::op::Errno;
use ashlar_reactor::range_lock::{Mode, RangeLock};
use rustix::time::{ClockId, clock_gettime};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::disk::Disk;
use crate::fuse::wire::{
    AttrOut, FallocateIn, OPEN_DIRECT_IO, OPEN_PARALLEL_DIRECT_WRITES, OPERATION_BYTES, OpenOut,
    ROOT, RangeIn, SET_MODE, SET_OWNER, SET_SIZE, SeekIn, SetAttrIn, StatfsOut, WriteOut, opcode,
};
use crate::limits::Toll;
use crate::request::{Operation, Permit, Request, Status};

/// Only the daemon's user reads and writes it.
const MODE: u32 = 0o600;
/// A volume that has grown is seen so after this.
const ATTRIBUTES_VALID_S: u64 = 1;
const BLOCK_BYTES: u32 = 4096;

const INVALID: Errno = Errno(libc::EINVAL);

/// A request as it came, but for its data.
pub(super) struct Asked {
    pub(super) opcode: u32,
    pub(super) node: u64,
    pub(super) operation: [u8; OPERATION_BYTES],
    /// Bytes of data that are in the memory for data.
    pub(super) data_len: usize,
}

pub(super) struct File {
    disk: Rc<Disk>,
    /// Of whoever made the export.
    owner: (u32, u32),
    opened: Cell<u32>,
    /// Sectors that are written, shared, or read and written back, alone.
    sectors: Rc<RangeLock>,
    /// When this export has last changed the volume; or began to serve it, if it never has.
    changed: Cell<TimeOfDay>,
}

/// Since 1970: seconds, and nanoseconds beyond them.
type TimeOfDay = (u64, u32);

impl File {
    pub(super) fn new(disk: Disk, owner: (u32, u32)) -> File {
        // All keys are in one group.
        let sectors = RangeLock::new(disk.reactor(), u64::BITS - 1);
        let (opened, changed) = (Cell::new(0), Cell::new(time_of_day()));
        File { disk: Rc::new(disk), owner, opened, sectors, changed }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    pub(super) fn reactor(&self) -> &Reactor {
        self.disk.reactor()
    }

    /// How often it is open.
    pub(super) fn opened(&self) -> u32 {
        self.opened.get()
    }

    /// The volume is another one from now on: its content, or its size.
    pub(super) fn note_change(&self) {
        self.changed.set(time_of_day());
    }

    fn bytes(&self) -> u64 {
        self.disk.volume().bytes()
    }

    /// Does what is asked. `data` has the request's data, and gets that of the answer: as many
    /// bytes as are returned.
    pub(super) async fn serve(&self, asked: &Asked, data: &Buffer) -> Result<usize, Errno> {
        if asked.node != ROOT {
            return Err(Errno(libc::ENOENT));
        }
        match asked.opcode {
            opcode::GETATTR => Ok(say(data, &self.attributes())),
            opcode::SETATTR => self.set_attributes(parse(asked)?, data),
            opcode::OPEN => {
                self.opened.set(self.opened.get() + 1);
                let flags = OPEN_DIRECT_IO | OPEN_PARALLEL_DIRECT_WRITES;
                Ok(say(data, &OpenOut { flags, ..OpenOut::default() }))
            }
            opcode::RELEASE => {
                self.opened.set(self.opened.get().saturating_sub(1));
                Ok(0)
            }
            opcode::READ => self.read(parse(asked)?, data).await,
            opcode::WRITE => self.write(parse(asked)?, asked.data_len, data).await,
            opcode::FSYNC => self.perform(Operation::Flush).await.map(|()| 0),
            opcode::FALLOCATE => self.fallocate(parse(asked)?).await.map(|()| 0),
            opcode::LSEEK => self.seek(&parse(asked)?).await.map(|offset| say(data, &offset)),
            opcode::STATFS => Ok(say(data, &self.space())),
            opcode::DESTROY => Ok(0),
            // What the kernel does without, or asks for only once.
            _ => Err(Errno(libc::ENOSYS)),
        }
    }

    fn attributes(&self) -> AttrOut {
        let bytes = self.bytes();
        let (uid, gid) = self.owner;
        let (seconds, nanoseconds) = self.changed.get();
        AttrOut {
            valid_s: ATTRIBUTES_VALID_S,
            node: ROOT,
            bytes,
            sectors: bytes / SECTOR_BYTES,
            // Of access, too: reads leave no trace.
            times_s: [seconds; 3],
            times_ns: [nanoseconds; 3],
            mode: libc::S_IFREG | MODE,
            links: 1,
            uid,
            gid,
            block_bytes: BLOCK_BYTES,
            ..AttrOut::default()
        }
    }

    /// Times say when something was changed, whatever is asked for. Size, owner and mode stay as
    /// they are.
    fn set_attributes(&self, asked: SetAttrIn, data: &Buffer) -> Result<usize, Errno> {
        let resizes = asked.valid & SET_SIZE != 0 && asked.bytes != self.bytes();
        if resizes || asked.valid & (SET_MODE | SET_OWNER) != 0 {
            return Err(Errno(libc::EPERM));
        }
        Ok(say(data, &self.attributes()))
    }

    fn space(&self) -> StatfsOut {
        StatfsOut {
            blocks: self.bytes() / u64::from(BLOCK_BYTES),
            files: 1,
            block_bytes: BLOCK_BYTES,
            fragment_bytes: BLOCK_BYTES,
            ..StatfsOut::default()
        }
    }

    /// Holes are what nobody wrote; at the end there is one.
    async fn seek(&self, asked: &SeekIn) -> Result<u64, Errno> {
        let (first, end) = (asked.offset, self.bytes());
        let wants_hole = match asked.whence.cast_signed() {
            libc::SEEK_DATA => false,
            libc::SEEK_HOLE => true,
            _ => return Err(INVALID),
        };
        if first >= end {
            return Err(Errno(libc::ENXIO));
        }
        let mut at = first / SECTOR_BYTES * SECTOR_BYTES;
        while at < end {
            // As much as a read of nothing.
            let _turn = self.disk.turn(Toll::Read(0)).await;
            let status = self.disk.block_status(at, end - at).await;
            let status = status.map_err(|_| Errno(libc::EIO))?;
            if status.is_zero == wants_hole {
                return Ok(at.max(first));
            }
            at += status.len;
            self.reactor().yield_now().await;
        }
        if wants_hole { Ok(end) } else { Err(Errno(libc::ENXIO)) }
    }

    /// A read ends with the file.
    async fn read(&self, asked: RangeIn, data: &Buffer) -> Result<usize, Errno> {
        let len = self.len_there(&asked, data)?;
        if len == 0 {
            return Ok(0);
        }
        let (first, last) = sectors(asked.offset, len);
        if (first, last) == (asked.offset, asked.offset + len) {
            let into = data.slice(0..to_usize(len)).into();
            self.perform(Operation::Read { offset: first, into }).await?;
        } else {
            let whole = self.read_sectors(first, last).await?;
            let at = to_usize(asked.offset - first);
            let wanted = whole.slice(at..at + to_usize(len));
            Buffers::from(data.slice(0..to_usize(len))).copy_from(&wanted);
        }
        Ok(to_usize(len))
    }

    /// What is beyond the end is not written: there is no room for it.
    async fn write(&self, asked: RangeIn, sent: usize, data: &Buffer) -> Result<usize, Errno> {
        let len = self.len_there(&asked, data)?;
        if to_usize(asked.len.into()) != sent {
            return Err(INVALID);
        }
        if len == 0 && sent > 0 {
            return Err(Errno(libc::ENOSPC));
        }
        if len > 0 {
            self.write_bytes(asked.offset, data.slice(0..to_usize(len))).await?;
        }
        if asked.flags.cast_signed() & libc::O_DSYNC != 0 {
            self.perform(Operation::Flush).await?;
        }
        let len = u32::try_from(len).map_err(|_| INVALID)?;
        Ok(say(data, &WriteOut { len, unused: 0 }))
    }

    async fn write_bytes(&self, offset: u64, from: Buffer) -> Result<(), Errno> {
        let len = from.len() as u64;
        let (first, last) = sectors(offset, len);
        if (first, last) == (offset, offset + len) {
            let _shared = self.sectors.lock(first..last, Mode::Shared).await;
            return self.perform(Operation::Write { offset, from: from.into() }).await;
        }
        let _alone = self.sectors.lock(first..last, Mode::Exclusive).await;
        let whole = self.read_sectors(first, last).await?;
        let at = to_usize(offset - first);
        whole.slice(at..at + from.len()).copy_from(&from.into());
        self.perform(Operation::Write { offset: first, from: whole }).await
    }

    async fn read_sectors(&self, first: u64, last: u64) -> Result<Buffers, Errno> {
        let (mut whole, mut left) = (Buffers::default(), to_usize(last - first));
        while left > 0 {
            let piece = left.min(ashlar_reactor::buffer::BUFFER_BYTES_MAX);
            whole.push(self.reactor().buffer(piece));
            left -= piece;
        }
        self.perform(Operation::Read { offset: first, into: whole.clone() }).await?;
        Ok(whole)
    }

    /// Holes and zeroes are the same, and keep the file's size: all of the range reads as zeroes.
    async fn fallocate(&self, asked: FallocateIn) -> Result<(), Errno> {
        let FallocateIn { offset, len, .. } = asked;
        let end = offset.checked_add(len).filter(|_| len > 0).ok_or(INVALID)?;
        let mode = asked.mode.cast_signed();
        let (mode, keeps_size) =
            (mode & !libc::FALLOC_FL_KEEP_SIZE, mode & libc::FALLOC_FL_KEEP_SIZE != 0);
        let size = self.bytes();
        match mode {
            // It has all the space that it will ever have.
            0 if end <= size => return Ok(()),
            0 => return Err(Errno(libc::ENOSPC)),
            // It would have to grow.
            libc::FALLOC_FL_ZERO_RANGE if !keeps_size && end > size => {
                return Err(Errno(libc::ENOSPC));
            }
            libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_ZERO_RANGE => {}
            _ => return Err(Errno(libc::EOPNOTSUPP)),
        }
        let end = end.min(size);
        // Whole sectors by the volume; what is left of others by writing zeroes.
        let first = offset.next_multiple_of(SECTOR_BYTES).min(end);
        let last = (end / SECTOR_BYTES * SECTOR_BYTES).max(first);
        for part in [offset.min(end)..first, last..end] {
            if !part.is_empty() {
                let zeroes = self.reactor().buffer(to_usize(part.end - part.start));
                zeroes.fill_zero();
                self.write_bytes(part.start, zeroes).await?;
            }
        }
        if first < last {
            let _shared = self.sectors.lock(first..last, Mode::Shared).await;
            self.perform(Operation::WriteZeroes { offset: first, len: last - first }).await?;
        }
        Ok(())
    }

    /// How much of a range there is; an error if there is no room for its data.
    fn len_there(&self, asked: &RangeIn, data: &Buffer) -> Result<u64, Errno> {
        if to_usize(asked.len.into()) > data.len() {
            return Err(INVALID);
        }
        Ok(u64::from(asked.len).min(self.bytes().saturating_sub(asked.offset)))
    }

    async fn perform(&self, operation: Operation) -> Result<(), Errno> {
        let (is_change, permit) = (is_change(&operation), Permit::new(0));
        let turn = self.disk.turn(Toll::of(&operation)).await;
        let answer = pin!(self.disk.serve_in(turn, Request { operation, permit })).await;
        // Also if it failed: some of it may be there.
        if is_change {
            self.note_change();
        }
        match answer.status {
            Status::Done => Ok(()),
            Status::NoSpace => Err(Errno(libc::ENOSPC)),
            Status::Failed | Status::Unsupported => Err(Errno(libc::EIO)),
        }
    }
}

fn is_change(operation: &Operation) -> bool {
    match operation {
        Operation::Write { .. } | Operation::Discard { .. } | Operation::WriteZeroes { .. } => true,
        Operation::Read { .. }
        | Operation::Flush
        | Operation::Identify { .. }
        | Operation::Refuse(_) => false,
    }
}

/// As the kernel dates files: to its tick, which is cheap. No reactor's clock is asked: that has
/// whole seconds, by which a file that was changed twice looks as if it was not.
fn time_of_day() -> TimeOfDay {
    let now = clock_gettime(ClockId::RealtimeCoarse);
    // A clock that was never set may be before 1970.
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    (seconds, u32::try_from(now.tv_nsec).expect("less than a second"))
}

/// The sectors that have a range of bytes.
fn sectors(offset: u64, len: u64) -> (u64, u64) {
    let first = offset / SECTOR_BYTES * SECTOR_BYTES;
    (first, (offset + len).next_multiple_of(SECTOR_BYTES))
}

fn parse<T: FromBytes + KnownLayout + Immutable>(asked: &Asked) -> Result<T, Errno> {
    T::read_from_prefix(&asked.operation).map(|(parsed, _)| parsed).map_err(|_| INVALID)
}

fn say<T: IntoBytes + Immutable>(data: &Buffer, answer: &T) -> usize {
    let bytes = answer.as_bytes();
    data.slice(0..bytes.len()).copy_from_slice(bytes);
    bytes.len()
}
