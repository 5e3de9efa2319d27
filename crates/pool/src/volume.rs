//! What targets hold: a volume, whatever it is made of.

use std::rc::Rc;

use ashlar_raid::block_status::BlockStatus;
use ashlar_raid::error::ArrayError;
use ashlar_raid::zero_step::{ZeroStep, Zeroing};
use ashlar_reactor::buffer::Buffers;

use crate::far::Far;
use crate::thick::Thick;

/// A volume of one reactor. Cloning is cheap; all clones are one volume.
#[derive(Clone)]
pub enum Volume {
    Thick(Rc<Thick>),
    /// Its array lives on another reactor.
    Far(Rc<Far>),
}

impl Volume {
    pub fn uuid(&self) -> [u8; 16] {
        match self {
            Volume::Thick(thick) => thick.uuid,
            Volume::Far(far) => far.uuid,
        }
    }

    pub fn name(&self) -> &str {
        match self {
            Volume::Thick(thick) => &thick.name,
            Volume::Far(far) => &far.name,
        }
    }

    /// Size in bytes; it may grow. Of a far one: as of the last request.
    pub fn bytes(&self) -> u64 {
        match self {
            Volume::Thick(thick) => thick.bytes.get(),
            Volume::Far(far) => far.bytes.get(),
        }
    }

    /// Makes sure that what it says of its size is so at this moment.
    pub async fn look(&self) {
        match self {
            Volume::Thick(_) => {}
            Volume::Far(far) => far.look().await,
        }
    }

    /// Smallest range that TRIM gives back, in bytes: one stripe.
    pub fn discard_bytes(&self) -> u64 {
        match self {
            Volume::Thick(thick) => thick.array.stripe_bytes(),
            Volume::Far(far) => far.discard_bytes,
        }
    }

    /// Fills `into` from `offset`; both multiples of 512 bytes.
    pub async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        match self {
            Volume::Thick(thick) => thick.read(offset, into).await,
            Volume::Far(far) => far.read(offset, into).await,
        }
    }

    /// Writes `from` at `offset`; both multiples of 512 bytes. The bytes are copied before
    /// anything is computed from them.
    pub async fn write(&self, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        match self {
            Volume::Thick(thick) => thick.write(offset, from).await,
            Volume::Far(far) => far.write(offset, from).await,
        }
    }

    /// Everything acknowledged before is durable when this returns.
    pub async fn flush(&self) -> Result<(), ArrayError> {
        match self {
            Volume::Thick(thick) => thick.array.flush().await,
            Volume::Far(far) => far.flush().await,
        }
    }

    /// Gives space back: whole stripes of the range read as zeroes, the rest keeps its bytes.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        match self {
            Volume::Thick(thick) => thick.discard(offset, len).await,
            Volume::Far(far) => far.discard(offset, len).await,
        }
    }

    /// The range reads as zeroes afterwards; its space may be given back.
    pub async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        match self {
            Volume::Thick(thick) => thick.write_zeroes(offset, len).await,
            Volume::Far(far) => far.write_zeroes(offset, len).await,
        }
    }

    /// The beginning of a range that is not empty, as far as it is alike; as of now.
    pub async fn block_status(&self, offset: u64, len: u64) -> Result<BlockStatus, ArrayError> {
        match self {
            Volume::Thick(thick) => thick.block_status(offset, len).await,
            Volume::Far(far) => far.block_status(offset, len).await,
        }
    }

    /// How much of a range, from its start on, to zero or discard with one call, and what of that
    /// is written as if it were data; as of now. Of an empty range: nothing.
    pub async fn zero_step(
        &self,
        zeroing: Zeroing,
        offset: u64,
        len: u64,
    ) -> Result<ZeroStep, ArrayError> {
        match self {
            Volume::Thick(thick) => thick.zero_step(zeroing, offset, len),
            Volume::Far(far) => far.zero_step(zeroing, offset, len).await,
        }
    }
}
