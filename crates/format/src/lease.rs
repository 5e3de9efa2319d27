//! Which host uses an array: one record, two slots, on every member.
//!
//! The host that has the array writes a larger `beat` at regular times. Another host that sees the
//! beat grow must keep its hands off; one that sees it stand still for long enough may take the
//! array over with a larger `epoch`.

use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::record::{self, Header, Kind, Record, RecordError, SEQUENCE_MAX, Upgrade};
use crate::upgrade;

pub const VERSION: u16 = 1;
pub const SLOTS: u64 = 2;
/// Bytes of a host's name.
pub const HOST_NAME_BYTES: usize = 64;

#[derive(Clone, Debug, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Lease {
    pub header: Header,
    pub array: [u8; 16],
    /// Zero: nobody has it.
    pub host: [u8; 16],
    /// For people.
    pub host_name: [u8; HOST_NAME_BYTES],
    /// Grows each time the array gets another owner.
    pub epoch: U64,
    pub beat: U64,
    reserved: [u8; 3920],
}
const _: () = assert!(size_of::<Lease>() == 4096);

impl Lease {
    pub const BYTES: u64 = size_of::<Lease>() as u64;

    /// A lease that nobody has.
    pub fn free(array: [u8; 16]) -> Lease {
        let mut lease: Lease = zerocopy::FromZeros::new_zeroed();
        lease.array = array;
        lease
    }

    pub fn host_name(&self) -> Result<&str, RecordError> {
        record::name_from(&self.host_name)
    }
}

impl Record for Lease {
    const KIND: Kind = Kind::Lease;
    const VERSION: u16 = VERSION;
    const UPGRADES: &'static [Upgrade] = &upgrade::LEASE_UPGRADES;

    fn header(&self) -> &Header {
        &self.header
    }

    fn header_mut(&mut self) -> &mut Header {
        &mut self.header
    }

    fn check(&self) -> Result<(), RecordError> {
        self.host_name()?;
        // So that counting on never wraps.
        if self.epoch.get().max(self.beat.get()) > SEQUENCE_MAX {
            return Err(RecordError::Field("epoch or beat"));
        }
        if self.reserved.iter().any(|byte| *byte != 0) {
            return Err(RecordError::Field("reserved bytes"));
        }
        Ok(())
    }
}
