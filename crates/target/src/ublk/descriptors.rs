//! Requests of one queue as the driver shows them: memory of its own, mapped to be read.
//!
//! Invariant: only what a completed FETCH has announced is read, and only until it is committed;
//! the driver changes a descriptor at no other time.

use std::io;
use std::os::fd::AsFd;

use ashlar_format::units::to_usize;
use memmap2::{MmapOptions, MmapRaw};

use crate::ublk::wire::{DEPTH_MAX, Descriptor, descriptors_offset};

pub(super) struct Descriptors {
    memory: MmapRaw,
    depth: u16,
}

impl Descriptors {
    pub(super) fn map(device: impl AsFd, queue: u16, depth: u16) -> io::Result<Descriptors> {
        assert!(u64::from(depth) <= DEPTH_MAX);
        let device = device.as_fd().try_clone_to_owned()?;
        let bytes = to_usize(u64::from(depth)) * size_of::<Descriptor>();
        let mut options = MmapOptions::new();
        options.offset(descriptors_offset(queue)).len(bytes);
        let memory = options.map_raw_read_only(&device)?;
        Ok(Descriptors { memory, depth })
    }

    pub(super) fn get(&self, tag: u16) -> Descriptor {
        assert!(tag < self.depth, "tag {tag} of {}", self.depth);
        let all = self.memory.as_ptr().cast::<Descriptor>();
        // SAFETY: inside of what was mapped, which is there as long as `memory`; whatever its bytes
        // are, they are a descriptor.
        unsafe { all.add(usize::from(tag)).read_volatile() }
    }
}
