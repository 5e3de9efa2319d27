//! A client on the `virtio-driver` crate: an implementation of vhost-user and of virtqueues that
//! shares nothing with ours.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;

use memmap2::MmapMut;
use rustix::event::{PollFd, PollFlags, Timespec};
use virtio_driver::{
    VhostUser, VirtioBlkFeatureFlags, VirtioBlkQueue, VirtioBlkTransport, VirtioFeatureFlags,
};

pub const QUEUE_SIZE: u16 = 128;

pub fn all_features() -> u64 {
    let ring = VirtioFeatureFlags::VERSION_1 | VirtioFeatureFlags::RING_EVENT_IDX;
    let block = VirtioBlkFeatureFlags::FLUSH
        | VirtioBlkFeatureFlags::CONFIG_WCE
        | VirtioBlkFeatureFlags::MQ
        | VirtioBlkFeatureFlags::DISCARD
        | VirtioBlkFeatureFlags::WRITE_ZEROES
        | VirtioBlkFeatureFlags::SEG_MAX
        | VirtioBlkFeatureFlags::BLK_SIZE;
    ring.bits() | block.bits()
}

/// A connected disk. Requests carry a number that comes back with the result.
pub struct Client {
    pub queues: Vec<VirtioBlkQueue<'static, usize>>,
    pub transport: Box<VirtioBlkTransport>,
    /// Shared with the device: data must lie here.
    pub memory: MmapMut,
    _file: File,
}

impl Client {
    pub fn connect(socket: &Path, queues: usize, features: u64, memory_bytes: usize) -> Client {
        let socket = socket.to_str().unwrap();
        let mut transport: Box<VirtioBlkTransport> =
            Box::new(VhostUser::new(socket, features).unwrap());
        let queues = VirtioBlkQueue::setup_queues(&mut *transport, queues, QUEUE_SIZE).unwrap();
        let flags = rustix::fs::MemfdFlags::CLOEXEC;
        let file = File::from(rustix::fs::memfd_create("client", flags).unwrap());
        file.set_len(memory_bytes as u64).unwrap();
        // SAFETY: the file was just made, is never truncated, and only the device shares it, which
        // writes into it only between a request and its completion.
        let memory = unsafe { MmapMut::map_mut(&file) }.unwrap();
        let place = memory.as_ptr().addr();
        transport.map_mem_region(place, memory_bytes, file.as_raw_fd(), 0).unwrap();
        let mut client = Client { queues, transport, memory, _file: file };
        client.queues.iter_mut().for_each(|queue| queue.set_used_notif_enabled(true));
        client
    }

    pub fn kick(&mut self, queue: usize) {
        if self.queues[queue].avail_notif_needed() {
            self.transport.get_submission_notifier(queue).notify().unwrap();
        }
    }

    /// Sleeps until the device calls, then returns what has completed: numbers and results.
    pub fn wait(&mut self, queue: usize) -> Vec<(usize, i32)> {
        let bell = self.transport.get_completion_fd(queue);
        loop {
            let done: Vec<_> =
                self.queues[queue].completions().map(|done| (done.context, done.ret)).collect();
            if !done.is_empty() {
                return done;
            }
            let mut fds = [PollFd::from_borrowed_fd(bell.as_fd(), PollFlags::IN)];
            let patience = Timespec { tv_sec: 30, tv_nsec: 0 };
            let ready = rustix::event::poll(&mut fds, Some(&patience)).unwrap();
            assert!(ready > 0, "the device never called");
            let _ = bell.read();
        }
    }

    /// Waits for one request, the only one under way on its queue.
    pub fn finish(&mut self, queue: usize) -> i32 {
        self.kick(queue);
        let done = self.wait(queue);
        assert_eq!(done.len(), 1);
        done[0].1
    }

    /// Reads `len` bytes at `offset` of the disk to byte `at` of the memory.
    pub fn submit_read(&mut self, queue: usize, offset: u64, at: usize, len: usize, number: usize) {
        self.queues[queue].read(offset, &mut self.memory[at..at + len], number).unwrap();
    }

    pub fn submit_write(
        &mut self,
        queue: usize,
        offset: u64,
        at: usize,
        len: usize,
        number: usize,
    ) {
        self.queues[queue].write(offset, &self.memory[at..at + len], number).unwrap();
    }

    pub fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        self.submit_read(0, offset, 0, len, 0);
        assert_eq!(self.finish(0), 0);
        self.memory[..len].to_vec()
    }

    pub fn write(&mut self, offset: u64, data: &[u8]) {
        self.memory[..data.len()].copy_from_slice(data);
        self.submit_write(0, offset, 0, data.len(), 0);
        assert_eq!(self.finish(0), 0);
    }

    pub fn flush(&mut self) {
        self.queues[0].flush(0).unwrap();
        assert_eq!(self.finish(0), 0);
    }
}
