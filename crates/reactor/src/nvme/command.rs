//! NVMe commands and what drives answer: pure encoding and decoding.
//!
//! Sections are of the NVM Express Base Specification 2.0 ("Base") and the NVM Command Set
//! Specification 1.0 ("NVM"). Everything is little-endian. What a drive says is data: any bytes
//! decode to something or to `None`.

use crate::op::Errno;

/// Bytes of a submission queue entry (Base 3.3.3.1).
pub const COMMAND_BYTES: usize = 64;
/// Bytes of a completion queue entry (Base 3.3.3.2).
pub const COMPLETION_BYTES: usize = 16;
/// Bytes of each data structure that Identify returns (Base 5.17.2).
pub const IDENTIFY_BYTES: usize = 4096;
/// Memory page of a controller: the smallest there is, which all but exotic ones support.
pub const PAGE: usize = 4096;
/// Most blocks of one command: NLB has 16 bits and is zero-based (NVM 3.2.4).
pub const BLOCKS_MAX: u32 = 1 << 16;

/// Opcodes of the admin command set (Base figure 138).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Admin {
    DeleteSubmissionQueue = 0x00,
    CreateSubmissionQueue = 0x01,
    GetLogPage = 0x02,
    DeleteCompletionQueue = 0x04,
    CreateCompletionQueue = 0x05,
    Identify = 0x06,
    Abort = 0x08,
    SetFeatures = 0x09,
    GetFeatures = 0x0a,
    AsyncEvent = 0x0c,
    KeepAlive = 0x18,
}

impl Admin {
    pub fn from_byte(byte: u8) -> Option<Admin> {
        Some(match byte {
            0x00 => Admin::DeleteSubmissionQueue,
            0x01 => Admin::CreateSubmissionQueue,
            0x02 => Admin::GetLogPage,
            0x04 => Admin::DeleteCompletionQueue,
            0x05 => Admin::CreateCompletionQueue,
            0x06 => Admin::Identify,
            0x08 => Admin::Abort,
            0x09 => Admin::SetFeatures,
            0x0a => Admin::GetFeatures,
            0x0c => Admin::AsyncEvent,
            0x18 => Admin::KeepAlive,
            _ => return None,
        })
    }
}

/// Opcodes of the NVM command set (NVM figure 23).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Nvm {
    Flush = 0x00,
    Write = 0x01,
    Read = 0x02,
    Compare = 0x05,
    WriteZeroes = 0x08,
    DatasetManagement = 0x09,
}

impl Nvm {
    pub fn from_byte(byte: u8) -> Option<Nvm> {
        Some(match byte {
            0x00 => Nvm::Flush,
            0x01 => Nvm::Write,
            0x02 => Nvm::Read,
            0x05 => Nvm::Compare,
            0x08 => Nvm::WriteZeroes,
            0x09 => Nvm::DatasetManagement,
            _ => return None,
        })
    }
}

/// Feature "Number of Queues" (Base 5.27.1.5).
pub const FEATURE_QUEUES: u32 = 0x07;
/// Feature "Keep Alive Timer", in milliseconds (Base 5.27.1.12).
pub const FEATURE_KEEP_ALIVE: u32 = 0x0f;
/// Identify's CNS values (Base figure 273).
pub const CNS_NAMESPACE: u32 = 0x00;
pub const CNS_CONTROLLER: u32 = 0x01;
pub const CNS_ACTIVE_NAMESPACES: u32 = 0x02;
pub const CNS_NAMESPACE_DESCRIPTORS: u32 = 0x03;
/// Write Zeroes: the blocks may be deallocated (NVM 3.2.8, DEAC).
pub const DEALLOCATE: u32 = 1 << 25;
/// Reads, writes, write zeroes: durable before it is answered (NVM 3.2.6, FUA).
pub const FORCE_UNIT_ACCESS: u32 = 1 << 30;
/// Dataset Management: the ranges may be deallocated (NVM 3.2.3, AD), of 16 bytes each.
pub const DATASET_DEALLOCATE: u32 = 1 << 2;
pub const DATASET_RANGE_BYTES: usize = 16;
pub const DATASET_RANGES_MAX: usize = 256;

/// PSDT: the data pointer is an SGL (Base 4.1.2), as all commands over fabrics have it.
const BY_SGL: u32 = 1 << 14;
/// SGL descriptors (Base 4.1.2.1): data block at an offset in the capsule, and data that the
/// transport moves.
const SGL_IN_CAPSULE: u32 = 0x01 << 24;
const SGL_TRANSPORT: u32 = 0x5a << 24;

/// Where the data of a command is that comes over a fabric (Base 4.1.2.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// So many bytes in the capsule, from an offset in its data.
    InCapsule { offset: u64, bytes: u32 },
    /// So many bytes, by PDUs of their own.
    Transport { bytes: u32 },
}

/// A submission queue entry (Base 3.3.3.1). Its identifier and data pointer are filled in when it
/// is sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Command {
    pub dwords: [u32; COMMAND_BYTES / 4],
}

impl Command {
    pub(crate) fn new(opcode: u32, namespace: u32) -> Command {
        let mut dwords = [0; COMMAND_BYTES / 4];
        (dwords[0], dwords[1]) = (opcode, namespace);
        Command { dwords }
    }

    /// Sets dwords 10 and up, which are each command's own.
    pub(crate) fn words<const N: usize>(mut self, words: [u32; N]) -> Command {
        self.dwords[10..10 + N].copy_from_slice(&words);
        self
    }

    /// CID.
    #[must_use]
    pub fn with_id(mut self, id: u16) -> Command {
        self.dwords[0] = self.dwords[0] & 0xffff | u32::from(id) << 16;
        self
    }

    /// PRP entries 1 and 2 (Base 4.1.1).
    #[must_use]
    pub fn with_data(mut self, first: u64, second: u64) -> Command {
        (self.dwords[6], self.dwords[7]) = halves(first);
        (self.dwords[8], self.dwords[9]) = halves(second);
        self
    }

    /// The data pointer of a command over fabrics.
    #[must_use]
    pub fn with_sgl(mut self, sgl: Sgl) -> Command {
        let (at, bytes, kind) = match sgl {
            Sgl::InCapsule { offset, bytes } => (offset, bytes, SGL_IN_CAPSULE),
            Sgl::Transport { bytes } => (0, bytes, SGL_TRANSPORT),
        };
        (self.dwords[6], self.dwords[7]) = halves(at);
        (self.dwords[8], self.dwords[9]) = (bytes, kind);
        self.dwords[0] |= BY_SGL;
        self
    }

    /// `None`: not one of those that NVMe/TCP has.
    pub fn sgl(&self) -> Option<Sgl> {
        let bytes = self.dwords[8];
        match self.dwords[9] & 0xff00_0000 {
            SGL_IN_CAPSULE => Some(Sgl::InCapsule { offset: self.quad(6), bytes }),
            SGL_TRANSPORT => Some(Sgl::Transport { bytes }),
            _ => None,
        }
    }

    pub fn from_bytes(bytes: &[u8; COMMAND_BYTES]) -> Command {
        let mut dwords = [0; COMMAND_BYTES / 4];
        for (dword, place) in dwords.iter_mut().zip(bytes.chunks_exact(4)) {
            *dword = u32::from_le_bytes([place[0], place[1], place[2], place[3]]);
        }
        Command { dwords }
    }

    pub fn opcode(&self) -> u8 {
        self.dwords[0].to_le_bytes()[0]
    }

    /// CID.
    pub fn id(&self) -> u16 {
        (self.dwords[0] >> 16) as u16
    }

    pub fn namespace(&self) -> u32 {
        self.dwords[1]
    }

    /// Double words `low` and the next as one: `quad(10)` is the first block of a transfer.
    pub fn quad(&self, low: usize) -> u64 {
        u64::from(self.dwords[low]) | u64::from(self.dwords[low + 1]) << 32
    }

    /// Of a transfer.
    pub fn blocks(&self) -> u32 {
        (self.dwords[12] & 0xffff) + 1
    }

    /// The bytes as they lie in the queue.
    pub fn to_bytes(self) -> [u8; COMMAND_BYTES] {
        let mut bytes = [0; COMMAND_BYTES];
        for (place, dword) in bytes.chunks_exact_mut(4).zip(self.dwords) {
            place.copy_from_slice(&dword.to_le_bytes());
        }
        bytes
    }

    pub fn identify_controller() -> Command {
        Command::new(Admin::Identify as u32, 0).words([CNS_CONTROLLER])
    }

    pub fn identify_namespace(namespace: u32) -> Command {
        Command::new(Admin::Identify as u32, namespace).words([CNS_NAMESPACE])
    }

    /// The active namespaces from 1 up.
    pub fn identify_active_namespaces() -> Command {
        Command::new(Admin::Identify as u32, 0).words([CNS_ACTIVE_NAMESPACES])
    }

    /// UUID, NGUID and the like of a namespace (Base 5.17.2.3).
    pub fn identify_namespace_descriptors(namespace: u32) -> Command {
        Command::new(Admin::Identify as u32, namespace).words([CNS_NAMESPACE_DESCRIPTORS])
    }

    /// Asks for `bytes`, a multiple of four, of log page `page` from `offset` (Base 5.16).
    pub fn get_log_page(page: u8, namespace: u32, bytes: u32, offset: u64) -> Command {
        assert!(bytes > 0 && bytes.is_multiple_of(4), "{bytes} bytes of a log page");
        let dwords = bytes / 4 - 1;
        let (low, high) = halves(offset);
        Command::new(Admin::GetLogPage as u32, namespace).words([
            u32::from(page) | (dwords & 0xffff) << 16,
            dwords >> 16,
            low,
            high,
        ])
    }

    pub fn get_feature(feature: u32) -> Command {
        Command::new(Admin::GetFeatures as u32, 0).words([feature])
    }

    /// Base 5.18.
    pub fn keep_alive() -> Command {
        Command::new(Admin::KeepAlive as u32, 0)
    }

    /// Base 5.2.
    pub fn async_event() -> Command {
        Command::new(Admin::AsyncEvent as u32, 0)
    }

    /// Asks for this many submission and as many completion queues.
    pub fn set_queue_count(count: u16) -> Command {
        let count = u32::from(count.saturating_sub(1));
        Command::new(Admin::SetFeatures as u32, 0).words([FEATURE_QUEUES, count << 16 | count])
    }

    /// Physically contiguous, with interrupts (Base 5.4).
    pub fn create_completion_queue(id: u16, entries: u16, at: u64, vector: u16) -> Command {
        Command::new(Admin::CreateCompletionQueue as u32, 0)
            .words([queue_words(id, entries), u32::from(vector) << 16 | 0b11])
            .with_data(at, 0)
    }

    /// Physically contiguous, answered in completion queue `answers` (Base 5.5).
    pub fn create_submission_queue(id: u16, entries: u16, at: u64, answers: u16) -> Command {
        Command::new(Admin::CreateSubmissionQueue as u32, 0)
            .words([queue_words(id, entries), u32::from(answers) << 16 | 0b1])
            .with_data(at, 0)
    }

    pub fn delete_completion_queue(id: u16) -> Command {
        Command::new(Admin::DeleteCompletionQueue as u32, 0).words([u32::from(id)])
    }

    pub fn delete_submission_queue(id: u16) -> Command {
        Command::new(Admin::DeleteSubmissionQueue as u32, 0).words([u32::from(id)])
    }

    /// Base 5.1.
    pub fn abort(queue: u16, id: u16) -> Command {
        Command::new(Admin::Abort as u32, 0).words([u32::from(id) << 16 | u32::from(queue)])
    }

    /// NVM 3.2.4. `blocks` from 1 to [`BLOCKS_MAX`].
    pub fn read(namespace: u32, lba: u64, blocks: u32) -> Command {
        Command::new(Nvm::Read as u32, namespace).words(range_words(lba, blocks))
    }

    /// NVM 3.2.6.
    pub fn write(namespace: u32, lba: u64, blocks: u32) -> Command {
        Command::new(Nvm::Write as u32, namespace).words(range_words(lba, blocks))
    }

    /// Base 7.1.
    pub fn flush(namespace: u32) -> Command {
        Command::new(Nvm::Flush as u32, namespace)
    }

    /// The same, durable before it is answered.
    #[must_use]
    pub fn with_force_unit_access(mut self) -> Command {
        self.dwords[12] |= FORCE_UNIT_ACCESS;
        self
    }

    /// NVM 3.2.3, AD. `ranges` from 1 to [`DATASET_RANGES_MAX`], in its data.
    pub fn deallocate(namespace: u32, ranges: u32) -> Command {
        Command::new(Nvm::DatasetManagement as u32, namespace)
            .words([ranges.saturating_sub(1), DATASET_DEALLOCATE])
    }

    /// NVM 3.2.8.
    pub fn write_zeroes(namespace: u32, lba: u64, blocks: u32, deallocate: bool) -> Command {
        let [low, high, blocks] = range_words(lba, blocks);
        let how = if deallocate { DEALLOCATE } else { 0 };
        Command::new(Nvm::WriteZeroes as u32, namespace).words([low, high, blocks | how])
    }
}

/// Low, then high.
fn halves(word: u64) -> (u32, u32) {
    let half = |word: u64| u32::try_from(word & 0xffff_ffff).expect("32 bits");
    (half(word), half(word >> 32))
}

/// The lower and the upper half.
pub fn words(dword: u32) -> [u16; 2] {
    let [a, b, c, d] = dword.to_le_bytes();
    [u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d])]
}

fn queue_words(id: u16, entries: u16) -> u32 {
    assert!(entries >= 2, "a queue of {entries} entries");
    u32::from(entries - 1) << 16 | u32::from(id)
}

fn range_words(lba: u64, blocks: u32) -> [u32; 3] {
    assert!((1..=BLOCKS_MAX).contains(&blocks), "a command for {blocks} blocks");
    let (low, high) = halves(lba);
    [low, high, blocks - 1]
}

/// A completion queue entry (Base 3.3.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub result: u32,
    /// Double word 1: the upper half of what commands over fabrics return.
    pub result_high: u32,
    /// How far the drive has read the submission queue.
    pub submission_head: u16,
    pub queue: u16,
    pub id: u16,
    pub phase: bool,
    pub status: Status,
}

impl Completion {
    pub fn from_dwords(dwords: [u32; COMPLETION_BYTES / 4]) -> Completion {
        let low = |dword: u32| u16::try_from(dword & 0xffff).expect("16 bits");
        Completion {
            result: dwords[0],
            result_high: dwords[1],
            submission_head: low(dwords[2]),
            queue: low(dwords[2] >> 16),
            id: low(dwords[3]),
            phase: dwords[3] & 1 << 16 != 0,
            status: Status(low(dwords[3] >> 17)),
        }
    }

    pub fn from_bytes(bytes: &[u8; COMPLETION_BYTES]) -> Completion {
        let mut dwords = [0; COMPLETION_BYTES / 4];
        for (dword, place) in dwords.iter_mut().zip(bytes.chunks_exact(4)) {
            *dword = u32::from_le_bytes([place[0], place[1], place[2], place[3]]);
        }
        Completion::from_dwords(dwords)
    }

    pub fn to_bytes(self) -> [u8; COMPLETION_BYTES] {
        let dwords = [
            self.result,
            self.result_high,
            u32::from(self.submission_head) | u32::from(self.queue) << 16,
            u32::from(self.id) | u32::from(self.phase) << 16 | u32::from(self.status.0) << 17,
        ];
        let mut bytes = [0; COMPLETION_BYTES];
        for (place, dword) in bytes.chunks_exact_mut(4).zip(dwords) {
            place.copy_from_slice(&dword.to_le_bytes());
        }
        bytes
    }
}

/// Status field of a completion without the phase bit: code in bits 7:0, type in 10:8, "do not
/// retry" in 14 (Base 3.3.3.2.1).
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(pub u16);

impl std::fmt::Debug for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "status type {:#x}, code {:#04x}", self.0 >> 8 & 0x7, self.0 & 0xff)
    }
}

/// Generic status: Base figure 94; of commands: figure 96 and of fabrics figure 97; media: NVM
/// figure 20.
impl Status {
    pub const SUCCESS: Status = Status(0);
    pub const INVALID_OPCODE: Status = Status(0x01);
    pub const INVALID_FIELD: Status = Status(0x02);
    pub const DATA_TRANSFER: Status = Status(0x04);
    pub const INTERNAL: Status = Status(0x06);
    pub const ABORTED: Status = Status(0x07);
    pub const INVALID_NAMESPACE: Status = Status(0x0b);
    pub const SEQUENCE: Status = Status(0x0c);
    pub const SGL_LENGTH: Status = Status(0x0f);
    pub const SGL_TYPE: Status = Status(0x11);
    pub const SGL_OFFSET: Status = Status(0x16);
    pub const TRANSIENT_TRANSPORT: Status = Status(0x22);
    pub const OUT_OF_RANGE: Status = Status(0x80);
    pub const CAPACITY_EXCEEDED: Status = Status(0x81);
    pub const ASYNC_EVENT_LIMIT: Status = Status(0x105);
    pub const INVALID_LOG_PAGE: Status = Status(0x109);
    pub const FEATURE_NOT_SAVEABLE: Status = Status(0x10d);
    pub const FEATURE_NOT_CHANGEABLE: Status = Status(0x10e);
    pub const CONNECT_BUSY: Status = Status(0x181);
    pub const CONNECT_INVALID: Status = Status(0x182);
    pub const CONNECT_HOST: Status = Status(0x184);
    pub const AUTHENTICATION_REQUIRED: Status = Status(0x191);
    pub const WRITE_FAULT: Status = Status(0x280);
    pub const UNRECOVERED_READ: Status = Status(0x281);
    pub const COMPARE_FAILED: Status = Status(0x285);
    const DO_NOT_RETRY: u16 = 1 << 14;

    /// The same, and another try would end no better.
    #[must_use]
    pub const fn for_good(self) -> Status {
        Status(self.0 | Status::DO_NOT_RETRY)
    }

    pub fn is_success(self) -> bool {
        self.0 & 0x7ff == 0
    }

    /// What Linux would say, so that layers above need not know who reached the drive. Generic
    /// status: Base figure 94; command specific: figure 96; media errors: NVM figure 20.
    pub fn errno(self) -> Errno {
        Errno(match (self.0 >> 8 & 0x7, self.0 & 0xff) {
            // Invalid opcode, invalid field.
            (0, 0x01 | 0x02) => libc::EOPNOTSUPP,
            // Abort requested, aborted with its queue, aborted for power loss.
            (0, 0x05 | 0x07 | 0x08) => libc::ETIMEDOUT,
            // Invalid namespace or format.
            (0, 0x0b) => libc::ENODEV,
            // The namespace is write protected.
            (0, 0x20) => libc::EROFS,
            (0, 0x81) => libc::ENOSPC,
            // Namespace not ready, reservation conflict: others may do better later.
            (0, 0x82) => libc::EAGAIN,
            (0, 0x83) => libc::EBUSY,
            // Path related: of the way to the medium, not of the medium.
            (3, _) => libc::EAGAIN,
            // Unrecovered read error, deallocated or unwritten block.
            (2, 0x81 | 0x87) => libc::ENODATA,
            // Guard, application tag, reference tag.
            (2, 0x82..=0x84) => libc::EILSEQ,
            (2, 0x86) => libc::EACCES,
            _ => libc::EIO,
        })
    }
}

/// What a controller says of itself (Base figure 275).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ControllerIdentity {
    pub serial: String,
    pub model: String,
    pub firmware: String,
    /// Most bytes of one transfer, in pages of the smallest size as a power of two; 0: no limit.
    pub transfer_log2: u8,
    pub write_zeroes: bool,
    pub volatile_cache: bool,
}

impl ControllerIdentity {
    /// Most bytes of one command, where the host takes no more than `most`.
    pub(super) fn transfer_bytes(&self, most: usize) -> usize {
        match self.transfer_log2 {
            0 => most,
            log2 => {
                let limit = PAGE.checked_shl(u32::from(log2)).filter(|its| *its > 0);
                limit.unwrap_or(most).min(most)
            }
        }
    }

    pub fn decode(bytes: &[u8; IDENTIFY_BYTES]) -> ControllerIdentity {
        let optional = u16::from_le_bytes([bytes[520], bytes[521]]);
        ControllerIdentity {
            serial: text(&bytes[4..24]),
            model: text(&bytes[24..64]),
            firmware: text(&bytes[64..72]),
            transfer_log2: bytes[77],
            write_zeroes: optional & 1 << 3 != 0,
            volatile_cache: bytes[525] & 1 != 0,
        }
    }
}

/// ASCII padded with spaces; anything else is shown as `?`.
fn text(bytes: &[u8]) -> String {
    let shown = |byte: &u8| match byte {
        b' '..=b'~' => char::from(*byte),
        _ => '?',
    };
    let zero = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    bytes[..zero].iter().map(shown).collect::<String>().trim().to_owned()
}

/// What a namespace looks like (NVM figure 97).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NamespaceIdentity {
    pub blocks: u64,
    pub block_log2: u8,
    /// Bytes of metadata with each block: a format that is not supported here.
    pub metadata_bytes: u16,
    /// Deallocated blocks read as zeroes.
    pub deallocated_is_zero: bool,
    /// Write Zeroes knows DEAC.
    pub zeroes_deallocate: bool,
}

impl NamespaceIdentity {
    pub fn block_bytes(&self) -> u32 {
        1 << self.block_log2
    }

    pub fn bytes(&self) -> u64 {
        self.blocks << self.block_log2
    }

    /// Whether it can be a drive here; the errors are those of whoever asks.
    pub(super) fn check<T>(
        &self,
        unsuitable: fn(&'static str) -> T,
        absurd: fn(&'static str) -> T,
    ) -> Result<(), T> {
        if !matches!(self.block_log2, 9 | 12) {
            return Err(unsuitable("its blocks are neither 512 nor 4096 bytes"));
        }
        if self.metadata_bytes != 0 {
            return Err(unsuitable("its format has metadata; format it without"));
        }
        if self.blocks == 0 || self.blocks.leading_zeros() < u32::from(self.block_log2) {
            return Err(absurd("its size"));
        }
        Ok(())
    }

    /// Whether zeroing may give the blocks back: they surely read as zeroes then.
    pub(super) fn may_deallocate(&self) -> bool {
        self.zeroes_deallocate && self.deallocated_is_zero
    }

    pub fn decode(bytes: &[u8; IDENTIFY_BYTES]) -> NamespaceIdentity {
        // FLBAS: bits 3:0, and above them 6:5.
        let format = usize::from(bytes[26] & 0xf | (bytes[26] >> 5 & 0x3) << 4);
        let at = 128 + 4 * format;
        let features = bytes[33];
        NamespaceIdentity {
            blocks: u64::from_le_bytes(std::array::from_fn(|i| bytes[i])),
            block_log2: bytes[at + 2],
            metadata_bytes: u16::from_le_bytes([bytes[at], bytes[at + 1]]),
            deallocated_is_zero: features & 0x7 == 1,
            zeroes_deallocate: features & 1 << 3 != 0,
        }
    }
}

/// The first of a list of active namespaces; `None`: there is none (Base 5.17.2.2).
pub fn first_namespace(bytes: &[u8; IDENTIFY_BYTES]) -> Option<u32> {
    let first = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    (first != 0).then_some(first)
}

#[cfg(test)]
mod tests {
    //! Goal: every command has its fields where the specification puts them.
    //! Method: entries written out by hand from its figures.

    use super::*;

    fn dwords(command: Command, from: usize) -> [u32; 4] {
        std::array::from_fn(|i| command.dwords[from + i])
    }

    #[test]
    fn transfers() {
        let read = Command::read(7, 0x12_3456_789a, 8).with_id(0xbeef).with_data(0x1000, 1 << 33);
        assert_eq!(dwords(read, 0), [0xbeef_0002, 7, 0, 0]);
        assert_eq!(dwords(read, 6), [0x1000, 0, 0, 2]);
        assert_eq!(dwords(read, 10), [0x3456_789a, 0x12, 7, 0]);
        assert_eq!(Command::write(7, 0, BLOCKS_MAX).dwords[12], 0xffff);
        assert_eq!(Command::write(7, 0, 1).dwords[0], 1);
        let bytes = read.to_bytes();
        assert_eq!((bytes[0], bytes[2], bytes[3], bytes[40]), (2, 0xef, 0xbe, 0x9a));
    }

    #[test]
    fn other_commands() {
        let zeroes = Command::write_zeroes(1, 16, 256, true);
        assert_eq!((zeroes.dwords[0], zeroes.dwords[12]), (8, 255 | 1 << 25));
        assert_eq!(Command::write_zeroes(1, 16, 256, false).dwords[12], 255);
        assert_eq!(Command::flush(3).dwords[..2], [0, 3]);
    }

    #[test]
    fn admin_commands() {
        let cq = Command::create_completion_queue(1, 256, 0x5000, 2);
        assert_eq!((cq.dwords[0], cq.dwords[6]), (5, 0x5000));
        assert_eq!((cq.dwords[10], cq.dwords[11]), (255 << 16 | 1, 2 << 16 | 3));
        let sq = Command::create_submission_queue(1, 256, 0x6000, 4);
        assert_eq!((sq.dwords[0], sq.dwords[10], sq.dwords[11]), (1, 255 << 16 | 1, 4 << 16 | 1));
        assert_eq!(Command::abort(1, 9).dwords[10], 9 << 16 | 1);
        let count = Command::set_queue_count(2);
        assert_eq!((count.dwords[0], count.dwords[10], count.dwords[11]), (9, 7, 1 << 16 | 1));
        assert_eq!(Command::identify_namespace(5).dwords[1], 5);
        assert_eq!(Command::identify_controller().dwords[10], 1);
        assert_eq!(Command::identify_active_namespaces().dwords[10], 2);
        assert_eq!(Command::delete_submission_queue(3).dwords[10], 3);
        assert_eq!(Command::delete_completion_queue(3).dwords[0], 4);
    }

    #[test]
    fn completions() {
        // Unrecovered read error, do not retry, phase 1, of command 0x1234.
        let status = 0x4281_u32;
        let dwords = [7, 0, 1 << 16 | 99, 0x1234 | 1 << 16 | status << 17];
        let found = Completion::from_dwords(dwords);
        assert_eq!((found.result, found.submission_head, found.queue), (7, 99, 1));
        assert!(found.phase && found.id == 0x1234 && !found.status.is_success());
        assert_eq!(found.status.errno(), Errno(libc::ENODATA));
        // "More" is no error.
        assert!(Status(1 << 13).is_success());
        assert_eq!(Status(1).errno(), Errno(libc::EOPNOTSUPP));
        assert_eq!(Status(0x80).errno(), Errno(libc::EIO));
        assert_eq!(Status(0x370).errno(), Errno(libc::EAGAIN));
    }

    #[test]
    fn identities() {
        let mut bytes = [0; IDENTIFY_BYTES];
        bytes[4..24].copy_from_slice(b"SN 1                ");
        bytes[24..30].copy_from_slice(b"Model\xff");
        (bytes[77], bytes[520], bytes[525]) = (5, 0b1100, 1);
        let found = ControllerIdentity::decode(&bytes);
        assert_eq!((found.serial.as_str(), found.model.as_str()), ("SN 1", "Model?"));
        assert!(found.write_zeroes && found.volatile_cache);
        assert_eq!(found.transfer_log2, 5);

        let mut bytes = [0; IDENTIFY_BYTES];
        (bytes[2], bytes[26], bytes[33]) = (1, 0x21, 0b1001);
        // Format 17: extended in bits 6:5.
        (bytes[128 + 4 * 17], bytes[128 + 4 * 17 + 2]) = (8, 12);
        let found = NamespaceIdentity::decode(&bytes);
        assert_eq!((found.blocks, found.block_log2, found.metadata_bytes), (1 << 16, 12, 8));
        assert!(found.deallocated_is_zero && found.zeroes_deallocate);
        assert_eq!(first_namespace(&bytes), Some(1 << 16));
        assert_eq!(first_namespace(&[0; IDENTIFY_BYTES]), None);
        // Any byte decodes: the largest format index is inside.
        NamespaceIdentity::decode(&[0xff; IDENTIFY_BYTES]);
    }
}
