//! Memory that answers as fast as a drive of given numbers, for measuring what an arrangement of
//! drives allows.
//!
//! The drive does one operation after the other: each occupies it for a while, and is answered a
//! fixed latency after that. What it does to the memory, it does at once.

use std::time::Duration;

use crate::backend::Instant;
use crate::mapping::PageBytes;
use crate::op::{Op, Outcome};
use crate::ram::Ram;

const PS_PER_NS: u128 = 1_000;
const PS_PER_SECOND: u128 = 1_000_000_000_000;

pub(crate) struct Model {
    memory: Ram,
    iops: u64,
    bytes_per_second: u64,
    latency: Duration,
    /// When it has done all that it was given, in picoseconds of the reactor's clock: a nanosecond
    /// is too coarse for the rates of today.
    busy_until_ps: u128,
}

impl Model {
    pub(crate) fn new(bytes: u64, iops: u64, bytes_per_second: u64, latency: Duration) -> Model {
        assert!(iops > 0 && bytes_per_second > 0, "a drive that does nothing");
        Model { memory: Ram::new(bytes), iops, bytes_per_second, latency, busy_until_ps: 0 }
    }

    pub(crate) fn page_bytes(&self) -> PageBytes {
        self.memory.page_bytes()
    }

    /// The outcome of `op`, and when to tell.
    pub(crate) fn run(&mut self, op: &Op, now: Instant) -> (Instant, Outcome) {
        (self.answer_at(op, now), self.run_now(op))
    }

    pub(crate) fn run_now(&mut self, op: &Op) -> Outcome {
        self.memory.run(op)
    }

    pub(crate) fn answer_at(&mut self, op: &Op, now: Instant) -> Instant {
        let moved = match op {
            Op::Read { into, .. } => into.len(),
            Op::Write { from, .. } => from.len(),
            Op::WriteZeroes { .. } => 0,
            Op::Flush { .. } | Op::Descriptor { .. } => return now.after(self.latency),
        };
        let for_its_own = PS_PER_SECOND / u128::from(self.iops);
        let for_its_bytes = moved as u128 * PS_PER_SECOND / u128::from(self.bytes_per_second);
        let begins = self.busy_until_ps.max(u128::from(now.as_ns()) * PS_PER_NS);
        self.busy_until_ps = begins + for_its_own.max(for_its_bytes);
        let done_ns = self.busy_until_ps.div_ceil(PS_PER_NS);
        Instant::from_ns(u64::try_from(done_ns).unwrap_or(u64::MAX)).after(self.latency)
    }
}

#[cfg(test)]
mod tests {
    //! Goal: a modelled drive serves exactly what its numbers allow.
    //! Method: operations handed over at made-up moments; no clock runs.

    use super::*;
    use crate::buffer::BufferPool;
    use crate::op::DeviceId;

    const LATENCY: Duration = Duration::from_micros(80);
    const SECOND_NS: u64 = 1_000_000_000;

    fn model() -> Model {
        Model::new(1 << 20, 1_500_000, 6_000_000_000, LATENCY)
    }

    fn read(len: usize) -> Op {
        Op::Read { device: DeviceId(0), offset: 0, into: BufferPool::new().take(len).into() }
    }

    fn last_of(model: &mut Model, op: &Op, count: u64) -> u64 {
        (0..count).map(|_| model.run(op, Instant::default()).0.as_ns()).max().unwrap()
    }

    #[test]
    fn small_operations_are_bound_by_iops_and_large_ones_by_bytes() {
        // A millionth for what is rounded.
        let a_second = SECOND_NS - 1_000..=SECOND_NS + 1_000;
        let ns = last_of(&mut model(), &read(512), 1_500_000) - 80_000;
        assert!(a_second.contains(&ns), "{ns}");
        // 6 GB/s and 15625 times 384 KB.
        let ns = last_of(&mut model(), &read(384_000), 15_625) - 80_000;
        assert!(a_second.contains(&ns), "{ns}");
    }

    #[test]
    fn an_idle_drive_saves_no_credit() {
        let mut model = model();
        let later = Instant::from_ns(SECOND_NS);
        let (first, outcome) = model.run(&read(4096), later);
        // 4096 bytes at 6 GB/s: 682.7 ns, more than one of 1.5 million operations.
        assert_eq!((first.as_ns() - SECOND_NS, outcome), (683 + 80_000, Ok(4096)));
        assert_eq!(model.run(&read(512), later).0.as_ns() - first.as_ns(), 667);
        let flush = model.run(&Op::Flush { device: DeviceId(0) }, later).0;
        assert_eq!(flush, later.after(LATENCY));
    }
}
