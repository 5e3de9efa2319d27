//! The common header of everything on a drive, and how a record is sealed and opened.
//!
//! Invariant: a record is believed only if magic, kind, version, length, checksum and home address
//! all fit; so torn, foreign and misdirected writes are all seen. The owner is the drive's
//! own uuid: a record that was written to the wrong drive does not open either.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub const MAGIC: [u8; 8] = *b"ASHLAR\x1a\n";

/// Largest sequence that is believed; far more than any array lives to use.
pub const SEQUENCE_MAX: u64 = 1 << 63;
/// Largest one that is written. What was found is counted on from: whatever a label from elsewhere
/// says, the next number can be written.
const SEQUENCE_SEALED_MAX: u64 = SEQUENCE_MAX + SEQUENCE_MAX / 2;

/// What a record is. The number is on drives: never reuse one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Kind {
    DriveLabel = 1,
    ArraySuperblock = 2,
    RegionMapPage = 3,
    VolumeTable = 4,
    // 5 was the journal of version 1.
    JournalBatch = 6,
    BadBlocks = 7,
    Lease = 8,
    ScrubReport = 9,
}

/// First 64 bytes of every record.
#[derive(Clone, Copy, Debug, Default, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    pub magic: [u8; 8],
    pub kind: U16,
    pub version: U16,
    /// Bytes of the whole record, this header included.
    pub length: U32,
    /// CRC32C of the whole record with this field as zero.
    pub checksum: U32,
    reserved_a: [u8; 4],
    /// Uuid of the drive the record lives on.
    pub owner: [u8; 16],
    /// Byte offset on that drive where the record lives.
    pub home: U64,
    /// Newer records of one kind and home have larger numbers.
    pub sequence: U64,
    reserved_b: [u8; 8],
}
const _: () = assert!(size_of::<Header>() == 64);
const VERSION_AT: usize = std::mem::offset_of!(Header, version);
const CHECKSUM_AT: usize = std::mem::offset_of!(Header, checksum);
const _: () = assert!(CHECKSUM_AT == 16);

/// Turns the bytes of one version of a structure into those of the next, in place. Version and
/// checksum are seen to by [`upgrade`].
pub type Upgrade = fn(&mut [u8]);

/// A structure that lives on a drive.
pub trait Record: FromBytes + IntoBytes + KnownLayout + Immutable + Unaligned {
    const KIND: Kind;
    const VERSION: u16;
    /// The step from version `v` is at `v - 1`.
    const UPGRADES: &'static [Upgrade];
    fn header(&self) -> &Header;
    fn header_mut(&mut self) -> &mut Header;
    /// Checks what the checksum cannot: counts, ranges, reserved bytes.
    fn check(&self) -> Result<(), RecordError>;
}

/// Why bytes are not the record that was looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("no Ashlar record")]
    Blank,
    #[error("a record of another kind ({0})")]
    Kind(u16),
    #[error("version {0}, which this build does not know")]
    Version(u16),
    #[error("checksum or length does not fit: torn or damaged")]
    Damaged,
    #[error("it belongs at offset {0}: a misdirected write")]
    Misdirected(u64),
    #[error("it belongs to another drive")]
    Foreign,
    #[error("a field is out of range: {0}")]
    Field(&'static str),
}

fn crc32c(bytes: &[u8]) -> u32 {
    let crc = crc_fast::checksum(crc_fast::CrcAlgorithm::Crc32Iscsi, bytes);
    u32::try_from(crc).expect("a CRC of 32 bits")
}

/// CRC32C of `record` as if its checksum field were zero.
fn checksum(record: &[u8]) -> u32 {
    let mut digest = crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi);
    digest.update(&record[..CHECKSUM_AT]);
    digest.update(&[0; 4]);
    digest.update(&record[CHECKSUM_AT + 4..]);
    u32::try_from(digest.finalize()).expect("a CRC of 32 bits")
}

/// Fills the header and the checksum in.
pub fn seal<T: Record>(record: &mut T, owner: [u8; 16], home: u64, sequence: u64) {
    assert!(sequence <= SEQUENCE_SEALED_MAX, "a sequence beyond all that can be reached");
    *record.header_mut() = Header {
        magic: MAGIC,
        kind: U16::new(T::KIND as u16),
        version: U16::new(T::VERSION),
        length: U32::new(u32::try_from(size_of::<T>()).expect("records are small")),
        owner,
        home: U64::new(home),
        sequence: U64::new(sequence),
        ..Header::default()
    };
    debug_assert_eq!(record.check(), Ok(()));
    let sum = checksum(record.as_bytes());
    record.header_mut().checksum = U32::new(sum);
}

/// Turns an intact record of an older version into one of today's. Leaves everything else as it
/// is: `open` says what is wrong with it.
pub fn upgrade<T: Record>(bytes: &mut [u8]) {
    let Some(bytes) = bytes.get_mut(..size_of::<T>()) else { return };
    let Ok(header) = Header::read_from_bytes(&bytes[..size_of::<Header>()]) else { return };
    let intact = header.magic == MAGIC
        && header.kind.get() == T::KIND as u16
        && header.checksum.get() == checksum(bytes);
    let steps = usize::from(header.version.get()).checked_sub(1).and_then(|v| T::UPGRADES.get(v..));
    let Some(steps) = steps.filter(|steps| intact && !steps.is_empty()) else { return };
    steps.iter().for_each(|step| step(bytes));
    bytes[VERSION_AT..VERSION_AT + 2].copy_from_slice(&T::VERSION.to_le_bytes());
    let sum = checksum(bytes);
    bytes[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&sum.to_le_bytes());
}

/// Opens the record at the front of `bytes`, which were read at `home`. `owner`: the drive that
/// they were read from, once that is known.
pub fn open<T: Record>(
    bytes: &[u8],
    owner: Option<[u8; 16]>,
    home: u64,
) -> Result<&T, RecordError> {
    let bytes = bytes.get(..size_of::<T>()).ok_or(RecordError::Blank)?;
    let record = T::ref_from_bytes(bytes).map_err(|_| RecordError::Damaged)?;
    let header = record.header();
    if header.magic != MAGIC {
        return Err(RecordError::Blank);
    }
    if header.kind.get() != T::KIND as u16 {
        return Err(RecordError::Kind(header.kind.get()));
    }
    if checksum(bytes) != header.checksum.get() {
        return Err(RecordError::Damaged);
    }
    if header.home.get() != home {
        return Err(RecordError::Misdirected(header.home.get()));
    }
    if owner.is_some_and(|owner| owner != header.owner) {
        return Err(RecordError::Foreign);
    }
    // Last of what the header says: damage, or something of a guest's that looks like a record, is
    // not called newer.
    if header.version.get() != T::VERSION {
        return Err(RecordError::Version(header.version.get()));
    }
    if header.length.get() as usize != size_of::<T>() {
        return Err(RecordError::Damaged);
    }
    if header.reserved_a != [0; 4] || header.reserved_b != [0; 8] {
        return Err(RecordError::Field("reserved bytes of the header"));
    }
    // So that counting on never wraps.
    if header.sequence.get() > SEQUENCE_MAX {
        return Err(RecordError::Field("sequence"));
    }
    record.check()?;
    Ok(record)
}

/// A UTF-8 name in a zero-padded field.
pub fn name_from(field: &[u8]) -> Result<&str, RecordError> {
    let len = field.iter().position(|byte| *byte == 0).unwrap_or(field.len());
    let (name, padding) = field.split_at(len);
    if padding.iter().any(|byte| *byte != 0) {
        return Err(RecordError::Field("padding of a name"));
    }
    std::str::from_utf8(name).map_err(|_| RecordError::Field("a name that is no UTF-8"))
}

/// The zero-padded field for `name`; `None` if it is too long.
pub fn name_field<const LEN: usize>(name: &str) -> Option<[u8; LEN]> {
    let mut field = [0; LEN];
    field.get_mut(..name.len())?.copy_from_slice(name.as_bytes());
    Some(field)
}

/// CRC32C of plain bytes (a payload that a record refers to).
pub fn payload_checksum(bytes: &[u8]) -> u32 {
    crc32c(bytes)
}

/// CRC32C of plain bytes that come in parts.
pub struct PayloadDigest(crc_fast::Digest);

impl Default for PayloadDigest {
    fn default() -> PayloadDigest {
        PayloadDigest(crc_fast::Digest::new(crc_fast::CrcAlgorithm::Crc32Iscsi))
    }
}

impl PayloadDigest {
    pub fn update(&mut self, bytes: &[u8]) {
        self.0.update(bytes);
    }

    pub fn finish(self) -> u32 {
        u32::try_from(self.0.finalize()).expect("a CRC of 32 bits")
    }
}
