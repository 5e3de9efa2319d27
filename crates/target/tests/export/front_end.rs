//! A front end whose rings are made by hand: it can say and write anything. Guest memory is a file
//! that it reads and writes as one, so that nothing here is unsafe.

use std::fs::File;
use std::io::{IoSlice, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use vhost::vhost_user::message::{VhostUserHeaderFlag, VhostUserProtocolFeatures};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

pub const MEMORY_BYTES: u64 = 16 << 20;
pub const RING_SIZE: u16 = 16;
pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;
pub const FEATURES: u64 = 1 << 32 | 1 << 30 | 1 << 29 | 1 << 28 | 1 << 9 | 1 << 11 | 1 << 12;
/// QEMU asks for a log of written pages while it copies a guest's memory.
pub const LOG_ALL: u64 = 1 << 26;
pub const USER: u64 = 0x7f00_0000_0000;
const RING_BYTES: u64 = 0x4000;
const AVAILABLE: u64 = 0x1000;
const USED: u64 = 0x2000;

pub struct FrontEnd {
    pub front: Frontend,
    stream: UnixStream,
    pub file: File,
    pub kicks: Vec<EventFd>,
    pub calls: Vec<EventFd>,
    available: Vec<u16>,
    used: Vec<u16>,
}

impl FrontEnd {
    /// Connects and negotiates; no memory and no rings yet.
    pub fn connect(socket: &Path, queues: u16) -> FrontEnd {
        FrontEnd::connect_with(socket, queues, FEATURES)
    }

    pub fn connect_with(socket: &Path, queues: u16, features: u64) -> FrontEnd {
        let stream = UnixStream::connect(socket).unwrap();
        let mut front = Frontend::from_stream(stream.try_clone().unwrap(), u64::from(queues));
        front.set_owner().unwrap();
        assert_eq!(front.get_features().unwrap() & features, features);
        front.set_features(features).unwrap();
        let protocol = front.get_protocol_features().unwrap();
        front.set_protocol_features(protocol).unwrap();
        assert!(protocol.contains(VhostUserProtocolFeatures::BACKEND_REQ));
        front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("guest", flags).unwrap());
        file.set_len(MEMORY_BYTES).unwrap();
        let event = || EventFd::new(EFD_NONBLOCK).unwrap();
        FrontEnd {
            front,
            stream,
            file,
            kicks: (0..queues).map(|_| event()).collect(),
            calls: (0..queues).map(|_| event()).collect(),
            available: vec![0; usize::from(queues)],
            used: vec![0; usize::from(queues)],
        }
    }

    /// The same guest, connected anew, as the front end of one that goes on.
    #[allow(dead_code, reason = "not all who have this module use it")]
    pub fn again(self, socket: &Path) -> FrontEnd {
        let FrontEnd { file, kicks, calls, available, used, .. } = self;
        let queues = u16::try_from(kicks.len()).unwrap();
        FrontEnd { file, kicks, calls, available, used, ..FrontEnd::connect(socket, queues) }
    }

    /// A connected guest with its memory and all rings at work.
    pub fn started(socket: &Path, queues: u16) -> FrontEnd {
        let mut guest = FrontEnd::connect(socket, queues);
        guest.front.add_mem_region(&guest.region()).unwrap();
        (0..usize::from(queues)).for_each(|queue| guest.start(queue, 0));
        guest
    }

    pub fn region(&self) -> VhostUserMemoryRegionInfo {
        VhostUserMemoryRegionInfo {
            guest_phys_addr: 0,
            memory_size: MEMORY_BYTES,
            userspace_addr: USER,
            mmap_offset: 0,
            mmap_handle: self.file.as_raw_fd(),
        }
    }

    pub fn ring(queue: usize) -> u64 {
        queue as u64 * RING_BYTES
    }

    pub fn addresses(queue: usize) -> VringConfigData {
        let ring = USER + FrontEnd::ring(queue);
        VringConfigData {
            queue_max_size: RING_SIZE,
            queue_size: RING_SIZE,
            flags: 0,
            desc_table_addr: ring,
            used_ring_addr: ring + USED,
            avail_ring_addr: ring + AVAILABLE,
            log_addr: None,
        }
    }

    pub fn start(&mut self, queue: usize, base: u16) {
        self.start_at(queue, base, &FrontEnd::addresses(queue));
    }

    pub fn start_at(&mut self, queue: usize, base: u16, addresses: &VringConfigData) {
        self.try_start_at(queue, base, addresses).unwrap();
    }

    /// An error: the device has hung up.
    pub fn try_start_at(
        &mut self,
        queue: usize,
        base: u16,
        addresses: &VringConfigData,
    ) -> vhost::Result<()> {
        self.try_set_up(queue, base, addresses)?;
        self.front.set_vring_enable(queue, true)
    }

    /// All of a ring, but that it is enabled.
    pub fn set_up(&mut self, queue: usize, base: u16, addresses: &VringConfigData) {
        self.try_set_up(queue, base, addresses).unwrap();
    }

    fn try_set_up(&self, queue: usize, base: u16, its: &VringConfigData) -> vhost::Result<()> {
        self.front.set_vring_num(queue, RING_SIZE)?;
        self.front.set_vring_base(queue, base)?;
        self.front.set_vring_addr(queue, its)?;
        self.front.set_vring_kick(queue, &self.kicks[queue])?;
        self.front.set_vring_call(queue, &self.calls[queue])
    }

    /// Sends bytes past the protocol crate, with the memory's file or without, and returns the
    /// reply; nothing if the connection was closed.
    pub fn exchange(&self, message: &[u8], with_file: bool, reply_bytes: usize) -> Vec<u8> {
        self.exchange_with(message, usize::from(with_file), reply_bytes)
    }

    /// The same, with the memory's file so many times.
    pub fn exchange_with(&self, message: &[u8], files: usize, reply_bytes: usize) -> Vec<u8> {
        let mut stream = &self.stream;
        let files = vec![self.file.as_fd(); files];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(32))];
        let mut ancillary = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            assert!(ancillary.push(SendAncillaryMessage::ScmRights(&files)));
        }
        let pieces = [IoSlice::new(message)];
        let sent = rustix::net::sendmsg(stream, &pieces, &mut ancillary, SendFlags::empty());
        assert_eq!(sent.unwrap(), message.len());
        let mut reply = Vec::new();
        let mut piece = vec![0; reply_bytes];
        while reply.len() < reply_bytes {
            match stream.read(&mut piece) {
                Ok(0) | Err(_) => return Vec::new(),
                Ok(count) => reply.extend_from_slice(&piece[..count]),
            }
        }
        reply
    }

    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, at).unwrap();
    }

    pub fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.file.read_exact_at(&mut bytes, at).unwrap();
        bytes
    }

    pub fn describe(&self, table: u64, index: u16, address: u64, len: u32, flags: u16, next: u16) {
        let fields = u128::from(address)
            | u128::from(len) << 64
            | u128::from(flags) << 96
            | u128::from(next) << 112;
        self.put(table + u64::from(index) * 16, &fields.to_le_bytes());
    }

    /// Makes a chain available without telling.
    pub fn offer(&mut self, queue: usize, head: u16) {
        let ring = FrontEnd::ring(queue) + AVAILABLE;
        let index = &mut self.available[queue];
        let entry = ring + 4 + u64::from(*index % RING_SIZE) * 2;
        *index = index.wrapping_add(1);
        let index = *index;
        self.put(entry, &head.to_le_bytes());
        self.set_available(queue, index);
    }

    pub fn set_available(&self, queue: usize, index: u16) {
        self.put(FrontEnd::ring(queue) + AVAILABLE + 2, &index.to_le_bytes());
    }

    pub fn used_index(&self, queue: usize) -> u16 {
        let bytes = self.get(FrontEnd::ring(queue) + USED + 2, 2);
        u16::from_le_bytes(bytes.try_into().unwrap())
    }

    /// Describes a request at descriptors `head`, `head + 1`, `head + 2`, and its header and status
    /// in a page of its own. Returns where the status is.
    pub fn request(
        &self,
        queue: usize,
        head: u16,
        kind: u32,
        sector: u64,
        data: (u64, u32, bool),
    ) -> u64 {
        let page = (1 << 20) + queue as u64 * (1 << 16) + u64::from(head) * 64;
        let mut header = [0; 16];
        header[..4].copy_from_slice(&kind.to_le_bytes());
        header[8..].copy_from_slice(&sector.to_le_bytes());
        self.put(page, &header);
        self.put(page + 32, &[0xee]);
        let (ring, (at, len, writes)) = (FrontEnd::ring(queue), data);
        let flags = NEXT | if writes { WRITE } else { 0 };
        let status = if len > 0 { head + 2 } else { head + 1 };
        self.describe(ring, head, page, 16, NEXT, head + 1);
        if len > 0 {
            self.describe(ring, head + 1, at, len, flags, status);
        }
        self.describe(ring, status, page + 32, 1, WRITE, 0);
        page + 32
    }

    pub fn kick(&self, queue: usize) {
        self.kicks[queue].write(1).unwrap();
    }

    /// Waits for a call. False if none came within `ms`.
    pub fn called(&self, queue: usize, ms: u64) -> bool {
        within(ms, || self.calls[queue].read().is_ok())
    }

    /// Waits until the device has used `count` chains more, and returns them.
    pub fn wait_used(&mut self, queue: usize, count: u16) -> Vec<(u32, u32)> {
        let from = self.used[queue];
        let target = from.wrapping_add(count);
        assert!(within(30_000, || self.used_index(queue) == target), "{}", self.used_index(queue));
        self.used[queue] = target;
        let entry = |i: u16| {
            let slot = u64::from(from.wrapping_add(i) % RING_SIZE);
            let bytes = self.get(FrontEnd::ring(queue) + USED + 4 + slot * 8, 8);
            let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap());
            (number(0), number(4))
        };
        (0..count).map(entry).collect()
    }
}

/// Looks again and again, for `ms` at most.
pub fn within(ms: u64, mut condition: impl FnMut() -> bool) -> bool {
    for _ in 0..ms {
        if condition() {
            return true;
        }
        #[expect(clippy::disallowed_methods, reason = "a test's own thread")]
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    condition()
}
