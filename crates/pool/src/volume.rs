//! What targets hold: a volume, whatever it is made of.

use std::rc::Rc;

use ashlar_raid::error::ArrayError;
use ashlar_reactor::buffer::Buffers;

use crate::thick::Thick;

/// A volume of one reactor. Cloning is cheap; all clones are one volume.
#[derive(Clone)]
pub enum Volume {
    Thick(Rc<Thick>),
}

impl Volume {
    pub fn uuid(&self) -> [u8; 16] {
        let Volume::Thick(thick) = self;
        thick.uuid
    }

    pub fn name(&self) -> &str {
        let Volume::Thick(thick) = self;
        &thick.name
    }

    /// Size in bytes; it may grow.
    pub fn bytes(&self) -> u64 {
        let Volume::Thick(thick) = self;
        thick.bytes.get()
    }

    /// Smallest range that TRIM gives back, in bytes: one stripe.
    pub fn discard_bytes(&self) -> u64 {
        let Volume::Thick(thick) = self;
        thick.array.stripe_bytes()
    }

    /// Fills `into` from `offset`; both multiples of 512 bytes.
    pub async fn read(&self, offset: u64, into: Buffers) -> Result<(), ArrayError> {
        let Volume::Thick(thick) = self;
        thick.read(offset, into).await
    }

    /// Writes `from` at `offset`; both multiples of 512 bytes. The bytes are copied before
    /// anything is computed from them.
    pub async fn write(&self, offset: u64, from: Buffers) -> Result<(), ArrayError> {
        let Volume::Thick(thick) = self;
        thick.write(offset, from).await
    }

    /// Everything acknowledged before is durable when this returns.
    pub async fn flush(&self) -> Result<(), ArrayError> {
        let Volume::Thick(thick) = self;
        thick.array.flush().await
    }

    /// Gives space back: whole stripes of the range read as zeroes, the rest keeps its bytes.
    pub async fn discard(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        let Volume::Thick(thick) = self;
        thick.discard(offset, len).await
    }

    /// The range reads as zeroes afterwards; its space may be given back.
    pub async fn write_zeroes(&self, offset: u64, len: u64) -> Result<(), ArrayError> {
        let Volume::Thick(thick) = self;
        thick.write_zeroes(offset, len).await
    }
}
