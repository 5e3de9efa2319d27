//! One queue: which slots are free, and what is under way in the others.

use virtio_bindings::virtio_blk::{VIRTIO_BLK_S_IOERR, VIRTIO_BLK_S_OK, VIRTIO_BLK_S_UNSUPP};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::client::Wish;
use crate::client::memory::Memory;
use crate::client::parts::{Places, Strange, Used};
use crate::client::ring::{self, Ring};
use crate::client::slots::{SlotShape, Slots};
use crate::error::BenchError;
use crate::run::{Request, Run};

/// Where a queue's ring and slots are.
pub(crate) struct Start {
    ring: Places,
    slots: usize,
}

/// Of all queues, and how many bytes that is.
pub(crate) struct QueuePlaces {
    pub(crate) starts: Vec<Start>,
    pub(crate) end: usize,
}

pub(crate) fn places(wish: &Wish, shape: &SlotShape) -> QueuePlaces {
    let (mut starts, mut end) = (Vec::new(), 0);
    for _ in 0..wish.queues {
        let (ring, slots) = ring::places(wish, end);
        starts.push(Start { ring, slots });
        end = (slots + shape.bytes(wish.depth)).next_multiple_of(4096);
    }
    QueuePlaces { starts, end }
}

pub(crate) struct Queue {
    pub(crate) places: Places,
    pub(crate) size: u16,
    pub(crate) kick: EventFd,
    pub(crate) call: EventFd,
    ring: Ring,
    slots: Slots,
    free: Vec<u16>,
    /// By slot.
    under_way: Vec<Option<Request>>,
    /// Of one request, where bytes are verified.
    scratch: Vec<u8>,
}

impl Queue {
    pub(crate) fn new(
        memory: &Memory,
        wish: &Wish,
        shape: SlotShape,
        start: Start,
    ) -> Result<Queue, BenchError> {
        let event = || EventFd::new(EFD_NONBLOCK).map_err(BenchError::system("no eventfd"));
        let slots = Slots::new(shape, start.slots, wish.depth);
        Ok(Queue {
            places: start.ring,
            size: ring::size(wish),
            kick: event()?,
            call: event()?,
            ring: Ring::new(memory, wish, start.ring, slots),
            slots,
            free: (0..wish.depth).rev().collect(),
            under_way: vec![None; usize::from(wish.depth)],
            scratch: vec![0; wish.block_bytes as usize],
        })
    }

    /// Where a device that knows nothing of this ring has to go on, as front ends tell it that have
    /// lost the one before.
    pub(crate) fn base(&self, memory: &Memory) -> u32 {
        self.ring.base(memory)
    }

    /// Takes what was answered. How many were.
    pub(crate) fn collect(&mut self, memory: &Memory, run: &mut Run) -> Result<u16, BenchError> {
        let mut count = 0;
        while let Some(used) = self.ring.next_used(memory).map_err(|s| strange(&s))? {
            self.answered(memory, run, used)?;
            count += 1;
        }
        Ok(count)
    }

    fn answered(&mut self, memory: &Memory, run: &mut Run, used: Used) -> Result<(), BenchError> {
        let Used { slot, bytes } = used;
        let place = self.under_way.get_mut(usize::from(slot));
        let request = place.and_then(Option::take);
        let request = request.ok_or_else(|| strange(&Strange::NotUnderWay(slot)))?;
        let (offset, write) = (request.offset, request.write);
        let wrong = |why| BenchError::Request { write, offset, why };
        let status = self.slots.status(memory, slot);
        if u32::from(status) != VIRTIO_BLK_S_OK {
            return Err(wrong(status_name(status)));
        }
        // All that was asked for, and the status (virtio 1.2, 2.7.8.2).
        if !write && bytes as usize <= self.scratch.len() {
            return Err(wrong(format!("only {bytes} bytes were filled")));
        }
        if !write && run.has_content() {
            self.slots.read_data(memory, slot, &mut self.scratch);
            run.check(&request, &self.scratch)?;
        }
        run.done(&request);
        self.free.push(slot);
        Ok(())
    }

    /// Makes as many requests as there is room for. How many were made.
    pub(crate) fn submit(&mut self, memory: &Memory, run: &mut Run) -> Result<u16, BenchError> {
        let mut count = 0;
        while let Some(slot) = self.free.last().copied()
            && let Some(request) = run.next_request()
        {
            self.free.pop();
            self.slots.prepare(memory, slot, request.offset, request.write);
            if request.write && run.has_content() {
                run.fill(&request, &mut self.scratch);
                self.slots.write_data(memory, slot, &self.scratch);
            } else if run.has_content() {
                // What was there before must not pass for what is read.
                self.scratch.fill(0);
                self.slots.write_data(memory, slot, &self.scratch);
            }
            self.under_way[usize::from(slot)] = Some(request);
            self.ring.add(memory, slot, request.write);
            count += 1;
        }
        if self.ring.show(memory) {
            let kicked = self.kick.write(1);
            // A full counter has kicked already.
            if let Err(error) = kicked.as_ref()
                && error.kind() != std::io::ErrorKind::WouldBlock
            {
                kicked.map_err(BenchError::system("the back end cannot be kicked"))?;
            }
        }
        Ok(count)
    }
}

fn strange(strange: &Strange) -> BenchError {
    let error = format!("the back end broke the ring's rules: {strange}");
    BenchError::BackEnd { error, fix: None }
}

/// Virtio 1.2, 5.2.6.
fn status_name(status: u8) -> String {
    match u32::from(status) {
        VIRTIO_BLK_S_IOERR => "the back end answers: I/O error".to_owned(),
        VIRTIO_BLK_S_UNSUPP => "the back end answers: unsupported".to_owned(),
        _ => format!("the back end left status {status}, which is none"),
    }
}
