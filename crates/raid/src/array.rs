//! An array: what it is made of, how it starts, changes and stops.

use std::rc::Rc;

use ashlar_drive::drive::Drive;
use ashlar_format::array_superblock::Level;
use ashlar_format::units::MemberIndex;
use ashlar_reactor::buffer::Buffers;
use ashlar_reactor::executor::Reactor;

use crate::error::{ArrayError, AssembleError, ChangeError};
use crate::status::ArrayStatus;

/// What an array shall be.
#[derive(Clone, Debug)]
pub struct ArraySpec {
    pub uuid: [u8; 16],
    pub name: String,
    pub level: Level,
    /// 16 KiB to 1 MiB, a power of two.
    pub chunk_bytes: u32,
    /// Copies of each block; for levels 1 (0: as many as drives) and 10 (0: two).
    pub copies: u8,
}

/// How careful to be when an array is started.
#[derive(Clone, Copy, Debug, Default)]
pub struct AssembleOptions {
    /// Go on although absent members may hold newer data.
    pub force: bool,
    /// The array's generation as this host last saw it: members of this generation are new enough.
    pub known_generation: Option<u64>,
}

pub struct Array {
    reactor: Reactor,
}

impl Array {
    /// Labels the drives (each with its own new uuid) and starts the array. `drives` are the
    /// members in order.
    pub async fn create(
        reactor: &Reactor,
        spec: &ArraySpec,
        drives: Vec<([u8; 16], Rc<Drive>)>,
    ) -> Result<Rc<Array>, ChangeError> {
        let _ = (spec, drives);
        Ok(Rc::new(Array { reactor: reactor.clone() }))
    }

    /// Puts the array on these drives together, from their labels alone, and starts it.
    pub async fn assemble(
        reactor: &Reactor,
        drives: Vec<Rc<Drive>>,
        options: AssembleOptions,
    ) -> Result<Rc<Array>, AssembleError> {
        let _ = (drives, options);
        Ok(Rc::new(Array { reactor: reactor.clone() }))
    }

    /// Bytes for volumes.
    pub fn capacity(&self) -> u64 {
        todo!()
    }

    /// Bytes of data in one stripe.
    pub fn stripe_bytes(&self) -> u64 {
        todo!()
    }

    pub async fn read(self: &Rc<Self>, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        let _ = (offset, into);
        todo!()
    }

    pub async fn write(self: &Rc<Self>, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let _ = (offset, from);
        todo!()
    }

    /// Everything acknowledged before is durable when this returns.
    pub async fn flush(self: &Rc<Self>) -> Result<(), ArrayError> {
        todo!()
    }

    /// The range reads as zeroes afterwards; space under whole stripes may be given back.
    pub async fn write_zeroes(self: &Rc<Self>, offset: u64, len: u64) -> Result<(), ArrayError> {
        let _ = (offset, len);
        todo!()
    }

    pub fn status(&self) -> ArrayStatus {
        let _ = &self.reactor;
        todo!()
    }

    /// The member's drive was pulled: it is used no longer. Returns at once.
    pub fn pull_member(self: &Rc<Self>, member: MemberIndex) -> Result<(), ChangeError> {
        let _ = member;
        todo!()
    }

    /// Puts `drive` in the place of an absent, failed or stale member, labels it (durably), and
    /// starts to rebuild onto it. The same drive may come back.
    pub async fn replace_member(
        self: &Rc<Self>,
        member: MemberIndex,
        drive: Rc<Drive>,
        drive_uuid: [u8; 16],
    ) -> Result<(), ChangeError> {
        let _ = (member, drive, drive_uuid);
        todo!()
    }

    /// Starts to read and verify everything; `repair` writes parity or copies anew where they do
    /// not agree with the data (for mirrors: with the first copy).
    pub fn start_scrub(self: &Rc<Self>, repair: bool) -> Result<(), ChangeError> {
        let _ = repair;
        todo!()
    }

    /// Waits for requests under way, flushes, marks the array clean. Afterwards it does nothing.
    pub async fn stop(self: &Rc<Self>) -> Result<(), ArrayError> {
        todo!()
    }
}
