//! The vhost-user protocol, as the front end speaks it: negotiation, memory, rings.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use vhost::vhost_user::message::{
    FrontendReq, VhostUserConfigFlags, VhostUserHeaderFlag, VhostUserInflight,
    VhostUserProtocolFeatures,
};
use vhost::vhost_user::{Frontend, VhostUserFrontend};
use vhost::{VhostBackend, VhostUserMemoryRegionInfo, VringConfigData};
use virtio_bindings::virtio_blk::{
    VIRTIO_BLK_F_BLK_SIZE, VIRTIO_BLK_F_FLUSH, VIRTIO_BLK_F_MQ, VIRTIO_BLK_F_RO,
    VIRTIO_BLK_F_SEG_MAX, VIRTIO_BLK_F_SIZE_MAX,
};
use virtio_bindings::virtio_config::{VIRTIO_F_RING_PACKED, VIRTIO_F_VERSION_1};
use virtio_bindings::virtio_ring::{VIRTIO_RING_F_EVENT_IDX, VIRTIO_RING_F_INDIRECT_DESC};

use crate::client::memory::Memory;
use crate::client::queue::Queue;
use crate::client::{RingKind, Wish};
use crate::error::BenchError;

/// VHOST_USER_F_PROTOCOL_FEATURES, beside the virtio features.
const PROTOCOL_FEATURES: u32 = 30;
/// Of the configuration space, up to the fields that are looked at and some more that every device
/// has (virtio 1.2, 5.2.4).
const CONFIG_BYTES: u32 = 60;
const SECTOR_BYTES: u64 = 512;
/// A back end that serves someone else does not answer at all.
const FIRST_ANSWER: Timespec = Timespec { tv_sec: 5, tv_nsec: 0 };
/// Version 1 of the protocol, in every message's flags.
const VERSION: u32 = 1;

pub(crate) struct Connection {
    front: Frontend,
    stream: UnixStream,
    wish: Wish,
    acknowledges: bool,
    capacity: u64,
}

/// What a back end gave us to keep what is in flight in.
pub(crate) struct Region {
    described: VhostUserInflight,
    file: File,
}

const fn bit(feature: u32) -> u64 {
    1 << feature
}

/// Features that a run needs, each with what to do without it.
fn needed(wish: &Wish) -> Vec<(u32, &'static str, &'static str)> {
    let mut needed = vec![
        (VIRTIO_F_VERSION_1, "virtio 1", "use a back end of this decade"),
        (PROTOCOL_FEATURES, "vhost-user protocol features", "use a back end that has them"),
    ];
    if wish.ring == RingKind::Packed {
        needed.push((VIRTIO_F_RING_PACKED, "packed rings", "use --ring split"));
    }
    if wish.indirect {
        let fix = "use --descriptors direct";
        needed.push((VIRTIO_RING_F_INDIRECT_DESC, "indirect descriptors", fix));
    }
    if wish.event_index {
        needed.push((VIRTIO_RING_F_EVENT_IDX, "an event index", "use --no-event-index"));
    }
    needed
}

/// What is negotiated, of what is offered.
fn choose(offered: u64, wish: &Wish) -> Result<u64, BenchError> {
    let needed = needed(wish);
    if let Some((_, name, fix)) = needed.iter().find(|(feature, ..)| offered & bit(*feature) == 0) {
        return Err(BenchError::back_end(format!("the back end does not offer {name}"), *fix));
    }
    if wish.writes && offered & bit(VIRTIO_BLK_F_RO) != 0 {
        let error = "the back end's disk is read-only";
        return Err(BenchError::back_end(error, "use --rw read or --rw randread"));
    }
    // What says more about the disk changes no request; with flush, writes may be cached.
    let welcome = [
        VIRTIO_BLK_F_SIZE_MAX,
        VIRTIO_BLK_F_SEG_MAX,
        VIRTIO_BLK_F_BLK_SIZE,
        VIRTIO_BLK_F_FLUSH,
        VIRTIO_BLK_F_MQ,
        VIRTIO_BLK_F_RO,
    ];
    let welcome = welcome.into_iter().fold(0, |all, feature| all | bit(feature));
    let needed = needed.iter().fold(0, |all, (feature, ..)| all | bit(*feature));
    Ok(needed | offered & welcome)
}

/// Fields of the configuration space (virtio 1.2, 5.2.4), where their features are offered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Config {
    bytes: u64,
    segment_bytes_max: Option<u32>,
    segments_max: Option<u32>,
    block_bytes: Option<u32>,
    queues: Option<u16>,
}

impl Config {
    fn read(space: &[u8], features: u64) -> Option<Config> {
        let u16_at = |at| Some(u16::from_le_bytes(*space.get(at..)?.first_chunk()?));
        let u32_at = |at| Some(u32::from_le_bytes(*space.get(at..)?.first_chunk()?));
        let sectors = u64::from_le_bytes(*space.first_chunk()?);
        let has = |feature| features & bit(feature) != 0;
        Some(Config {
            bytes: sectors.saturating_mul(SECTOR_BYTES),
            // qemu-storage-daemon offers the field and has zero in it.
            segment_bytes_max: u32_at(8).filter(|max| has(VIRTIO_BLK_F_SIZE_MAX) && *max > 0),
            segments_max: u32_at(12).filter(|_| has(VIRTIO_BLK_F_SEG_MAX)),
            block_bytes: u32_at(20).filter(|_| has(VIRTIO_BLK_F_BLK_SIZE)),
            queues: u16_at(34).filter(|_| has(VIRTIO_BLK_F_MQ)),
        })
    }

    /// Refuses requests that this disk does not take.
    fn check(&self, wish: &Wish) -> Result<(), BenchError> {
        let Wish { segments, block_bytes, .. } = *wish;
        let refuse = |error: String, fix| Err(BenchError::back_end(error, fix));
        if let Some(max) = self.segments_max.filter(|max| u32::from(segments) > *max) {
            let error = format!("the back end takes {max} segments a request, not {segments}");
            return refuse(error, "use fewer --segments");
        }
        let each = block_bytes / u32::from(segments);
        if let Some(max) = self.segment_bytes_max.filter(|max| each > *max) {
            let error = format!("the back end takes segments of {max} bytes, not {each}");
            return refuse(error, "use a smaller --block, or more --segments");
        }
        let block = self.block_bytes.filter(|block| *block > 0);
        if let Some(block) = block.filter(|block| !block_bytes.is_multiple_of(*block)) {
            let error = format!("the back end's disk has blocks of {block} bytes");
            return refuse(error, "use a --block that is a multiple of it");
        }
        Ok(())
    }
}

impl Connection {
    /// Connects and negotiates; no memory and no rings yet.
    pub(crate) fn open(socket: &Path, wish: &Wish) -> Result<Connection, BenchError> {
        let shown = socket.display();
        let stream = UnixStream::connect(socket).map_err(|error| {
            let (error, fix) = (format!("cannot connect to {shown}: {error}"), unreachable(&error));
            BenchError::back_end(error, fix)
        })?;
        let offered = first_answer(&stream, socket)?;
        let features = choose(offered, wish)?;
        let clone = stream.try_clone().map_err(BenchError::system("the socket"))?;
        let front = Frontend::from_stream(clone, u64::from(wish.queues));
        let (wish, acknowledges, capacity) = (*wish, false, 0);
        let mut connection = Connection { front, stream, wish, acknowledges, capacity };
        connection.negotiate(features)?;
        Ok(connection)
    }

    fn negotiate(&mut self, features: u64) -> Result<(), BenchError> {
        let front = &mut self.front;
        front.set_owner().map_err(said("the owner"))?;
        front.get_features().map_err(said("its features"))?;
        front.set_features(features).map_err(said("features"))?;
        let offered = front.get_protocol_features().map_err(said("its protocol features"))?;
        let wanted = VhostUserProtocolFeatures::MQ
            | VhostUserProtocolFeatures::CONFIG
            | VhostUserProtocolFeatures::REPLY_ACK
            | match self.wish.resume {
                Some(_) => VhostUserProtocolFeatures::INFLIGHT_SHMFD,
                None => VhostUserProtocolFeatures::empty(),
            };
        let chosen = offered & wanted;
        if self.wish.resume.is_some() && !chosen.contains(VhostUserProtocolFeatures::INFLIGHT_SHMFD)
        {
            let error = "the back end does not keep what is in flight (no INFLIGHT_SHMFD)";
            return Err(BenchError::back_end(error, "leave --resume out"));
        }
        if !chosen.contains(VhostUserProtocolFeatures::CONFIG) {
            let error = "the back end does not tell the size of its disk (no CONFIG)";
            return Err(BenchError::back_end(error, "use a vhost-user-blk back end"));
        }
        front.set_protocol_features(chosen).map_err(said("protocol features"))?;
        self.acknowledges = chosen.contains(VhostUserProtocolFeatures::REPLY_ACK);
        if self.acknowledges {
            front.set_hdr_flags(VhostUserHeaderFlag::NEED_REPLY);
        }
        let has_many = chosen.contains(VhostUserProtocolFeatures::MQ);
        let queues = if has_many { front.get_queue_num().map_err(said("its queues"))? } else { 1 };
        let space = [0; CONFIG_BYTES as usize];
        let config = front.get_config(0, CONFIG_BYTES, VhostUserConfigFlags::empty(), &space);
        let (_, space) = config.map_err(said("its configuration"))?;
        let config = Config::read(&space, features).expect("as many bytes as were asked for");
        let queues = config.queues.map_or(queues, |of_disk| queues.min(of_disk.into()));
        if u64::from(self.wish.queues) > queues {
            let error = format!("the back end has {queues} queues, not {}", self.wish.queues);
            return Err(BenchError::back_end(error, format!("use --queues {queues} or less")));
        }
        config.check(&self.wish)?;
        self.capacity = config.bytes;
        Ok(())
    }

    pub(crate) fn capacity(&self) -> u64 {
        self.capacity
    }

    /// A new region for what is in flight.
    pub(crate) fn region(&mut self, ring_size: u16) -> Result<Region, BenchError> {
        let asked = VhostUserInflight::new(0, 0, self.wish.queues, ring_size);
        let region = self.front.get_inflight_fd(&asked).map_err(said("a region in flight"))?;
        Ok(Region { described: region.0, file: region.1 })
    }

    pub(crate) fn set_region(&mut self, region: &Region) -> Result<(), BenchError> {
        let set = self.front.set_inflight_fd(&region.described, region.file.as_raw_fd());
        set.map_err(said("what is in flight"))
    }

    pub(crate) fn set_memory(&self, memory: &Memory) -> Result<(), BenchError> {
        let region = VhostUserMemoryRegionInfo {
            guest_phys_addr: memory.address(0),
            memory_size: memory.len() as u64,
            userspace_addr: memory.address(0),
            mmap_offset: 0,
            mmap_handle: memory.file().as_raw_fd(),
        };
        self.front.set_mem_table(&[region]).map_err(said("memory"))?;
        Ok(())
    }

    /// Sets a queue's ring to work.
    pub(crate) fn start(
        &mut self,
        index: usize,
        queue: &Queue,
        memory: &Memory,
    ) -> Result<(), BenchError> {
        let addresses = VringConfigData {
            queue_max_size: queue.size,
            queue_size: queue.size,
            flags: 0,
            desc_table_addr: memory.address(queue.places.descriptors),
            used_ring_addr: memory.address(queue.places.device),
            avail_ring_addr: memory.address(queue.places.driver),
            log_addr: None,
        };
        let packed = self.wish.ring == RingKind::Packed;
        self.front.set_vring_num(index, queue.size).map_err(said("a ring's size"))?;
        match packed {
            true => self.set_packed_base(index, queue.base(memory))?,
            false => {
                let base = u16::try_from(queue.base(memory)).expect("an index");
                self.front.set_vring_base(index, base).map_err(said("a ring's base"))?;
            }
        }
        self.front.set_vring_addr(index, &addresses).map_err(said("a ring"))?;
        self.front.set_vring_call(index, &queue.call).map_err(said("a call file"))?;
        self.front.set_vring_kick(index, &queue.kick).map_err(said("a kick file"))?;
        self.front.set_vring_enable(index, true).map_err(said("a ring's start"))
    }

    /// The protocol's number has 32 bits here, of which the crate sends 16: available index and
    /// wrap counter, then used index and wrap counter.
    fn set_packed_base(&self, index: usize, base: u32) -> Result<(), BenchError> {
        let index = u32::try_from(index).expect("few queues");
        let mut body = Vec::from(index.to_ne_bytes());
        body.extend_from_slice(&base.to_ne_bytes());
        let acknowledge =
            if self.acknowledges { VhostUserHeaderFlag::NEED_REPLY.bits() } else { 0 };
        let message = message(FrontendReq::SET_VRING_BASE, acknowledge, &body);
        let failed = BenchError::system("the back end does not take a ring's base");
        (&self.stream).write_all(&message).map_err(&failed)?;
        let refused = self.acknowledges && reply(&self.stream).map_err(&failed)? != 0;
        if refused {
            let error = "the back end refuses the base of a packed ring";
            return Err(BenchError::back_end(error, "use --ring split"));
        }
        Ok(())
    }

    /// Takes a ring from its work; nothing is under way in it.
    pub(crate) fn stop(&mut self, index: usize) -> Result<(), BenchError> {
        self.front.get_vring_base(index).map_err(said("a ring's end"))?;
        Ok(())
    }

    pub(crate) fn is_hung_up(&self) -> bool {
        let flags = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
        let mut fds = [PollFd::new(&self.stream, PollFlags::RDHUP)];
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        let ready = poll(&mut fds, Some(&now));
        ready.is_ok() && fds[0].revents().intersects(flags)
    }
}

fn unreachable(error: &std::io::Error) -> &'static str {
    match Errno::from_io_error(error) {
        Some(Errno::NOENT) => "check --socket; `ashlar export list` names the sockets of a daemon",
        Some(Errno::CONNREFUSED) => "start the back end: nobody listens there",
        Some(Errno::ACCESS | Errno::PERM) => "run as the back end's user, or as root",
        _ => "check --socket",
    }
}

/// What the back end offers. It is the first question, so that whoever does not answer is known.
fn first_answer(mut stream: &UnixStream, socket: &Path) -> Result<u64, BenchError> {
    let shown = socket.display();
    let strange = |error: std::io::Error| {
        let fix = "use the socket of a vhost-user-blk back end, and see its log";
        BenchError::back_end(format!("{shown} does not speak vhost-user: {error}"), fix)
    };
    stream.write_all(&message(FrontendReq::GET_FEATURES, 0, &[])).map_err(strange)?;
    let mut fds = [PollFd::new(stream, PollFlags::IN)];
    if poll(&mut fds, Some(&FIRST_ANSWER)).map_err(|error| strange(error.into()))? == 0 {
        let fix = "a back end serves one front end at a time: is a guest, or another bench, there?";
        return Err(BenchError::back_end(format!("{shown} does not answer"), fix));
    }
    reply(stream).map_err(strange)
}

/// Header (request, flags, length of the body) and body.
fn message(request: FrontendReq, flags: u32, body: &[u8]) -> Vec<u8> {
    let len = u32::try_from(body.len()).expect("short");
    let header = [u32::from(request), VERSION | flags, len];
    let header = header.into_iter().flat_map(u32::to_ne_bytes);
    header.chain(body.iter().copied()).collect()
}

/// The number that a message is answered with.
fn reply(mut stream: &UnixStream) -> std::io::Result<u64> {
    let mut header = [0; 12];
    stream.read_exact(&mut header)?;
    let word = |at: usize| {
        u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
    };
    let is_reply = word(4) & (VhostUserHeaderFlag::REPLY.bits() | VERSION)
        == VhostUserHeaderFlag::REPLY.bits() | VERSION;
    if !is_reply || word(8) != 8 {
        return Err(std::io::Error::other("its answer is none of the protocol's"));
    }
    let mut number = [0; 8];
    stream.read_exact(&mut number)?;
    Ok(u64::from_ne_bytes(number))
}

fn said(what: &'static str) -> impl Fn(vhost::Error) -> BenchError {
    move |error| {
        let error = format!("the back end refused, or hung up over, {what}: {error}");
        BenchError::back_end(error, "see the back end's log")
    }
}

#[cfg(test)]
mod tests {
    //! Goal: what is not offered, or does not fit, is refused with the option that mends it.
    //! Method: each feature away in turn, each limit crossed.

    use super::*;

    fn wish() -> Wish {
        Wish {
            ring: RingKind::Packed,
            indirect: true,
            event_index: true,
            queues: 1,
            depth: 1,
            block_bytes: 4096,
            segments: 1,
            writes: true,
            resume: None,
        }
    }

    fn fix_of<T: std::fmt::Debug>(result: Result<T, BenchError>) -> String {
        let error = result.unwrap_err();
        let BenchError::BackEnd { fix, .. } = error else { panic!("{error:?}") };
        fix.unwrap()
    }

    #[test]
    fn what_is_needed_is_taken_and_nothing_that_is_not_known() {
        let all = !bit(VIRTIO_BLK_F_RO);
        let chosen = choose(all, &wish()).unwrap();
        for feature in [28, 29, 30, 32, 34, 1, 2, 6, 9, 12] {
            assert!(chosen & bit(feature) != 0, "{feature}");
        }
        assert_eq!(chosen.count_ones(), 10);
        for (feature, fix) in
            [(34, "--ring split"), (28, "direct"), (29, "--no-event-index"), (32, ""), (30, "")]
        {
            let found = fix_of(choose(all & !bit(feature), &wish()));
            assert!(found.contains(fix), "{feature}: {found}");
        }
        assert!(fix_of(choose(u64::MAX, &wish())).contains("randread"));
        let plain = Wish { ring: RingKind::Split, indirect: false, event_index: false, ..wish() };
        assert_eq!(choose(bit(30) | bit(32), &plain).unwrap(), bit(30) | bit(32));
    }

    #[test]
    fn limits_of_the_disk_are_kept() {
        let mut space = [0u8; 60];
        space[0] = 10;
        space[8..12].copy_from_slice(&8192u32.to_le_bytes());
        space[12] = 2;
        space[20..24].copy_from_slice(&4096u32.to_le_bytes());
        space[34] = 3;
        let config = Config::read(&space, u64::MAX).unwrap();
        assert_eq!((config.bytes, config.queues), (5120, Some(3)));
        let of = |block_bytes, segments| config.check(&Wish { block_bytes, segments, ..wish() });
        assert!(of(16384, 2).is_ok());
        assert!(fix_of(of(12288, 3)).contains("--segments"));
        assert!(fix_of(of(16384, 1)).contains("--block"));
        assert!(fix_of(of(512, 1)).contains("multiple"));
        let silent = Config::read(&space, 0).unwrap();
        assert_eq!((silent.segments_max, silent.queues, silent.block_bytes), (None, None, None));
        assert_eq!(Config::read(&space[..7], 0), None);
    }
}
