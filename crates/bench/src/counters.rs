//! What a thread has cost so far, as far as this machine lets us count it.

use ashlar_reactor::executor::Reactor;
use perf_event::events::{Hardware, Tracepoint};
use perf_event::{Builder, Counter};

use crate::clock::Clock;

/// Where the kernel says how it names the event of a system call.
const SYSTEM_CALL_IDS: [&str; 2] = [
    "/sys/kernel/tracing/events/raw_syscalls/sys_enter/id",
    "/sys/kernel/debug/tracing/events/raw_syscalls/sys_enter/id",
];

/// Counts since some beginning; `None`: cannot be had here.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sample {
    /// Of the time stamp counter: work and polling alike.
    pub ticks: Option<u64>,
    /// In user space.
    pub cycles: Option<u64>,
    pub instructions: Option<u64>,
    /// All of the thread's.
    pub system_calls: Option<u64>,
    /// Those that the reactor's backend made for operations.
    pub ring_calls: Option<u64>,
}

impl Sample {
    /// Of two threads together, as far as both were counted.
    #[must_use]
    pub fn and(&self, other: &Sample) -> Sample {
        let sum = |one: Option<u64>, other: Option<u64>| Some(one?.wrapping_add(other?));
        Sample {
            ticks: sum(self.ticks, other.ticks),
            cycles: sum(self.cycles, other.cycles),
            instructions: sum(self.instructions, other.instructions),
            system_calls: sum(self.system_calls, other.system_calls),
            ring_calls: sum(self.ring_calls, other.ring_calls),
        }
    }
}

/// Counters of one thread.
pub struct Counters {
    clock: Clock,
    cycles: Option<Counter>,
    instructions: Option<Counter>,
    system_calls: Option<Counter>,
}

impl Counters {
    /// Of the calling thread. What the machine or `perf_event_paranoid` refuses is left out.
    pub fn of_this_thread(clock: Clock) -> Counters {
        let hardware = |event: Hardware| Builder::new(event).enabled(true).build().ok();
        let id = SYSTEM_CALL_IDS.iter().find_map(|path| std::fs::read_to_string(path).ok());
        let id = id.and_then(|id| id.trim().parse().ok());
        let system_calls = id.and_then(|id| {
            Builder::new(Tracepoint::with_id(id)).include_kernel().enabled(true).build().ok()
        });
        Counters {
            clock,
            cycles: hardware(Hardware::CPU_CYCLES),
            instructions: hardware(Hardware::INSTRUCTIONS),
            system_calls,
        }
    }

    /// Now; to be asked on the thread that is counted, whose reactor this is.
    pub fn sample(&mut self, reactor: &Reactor) -> Sample {
        let read = |counter: &mut Option<Counter>| counter.as_mut().and_then(|c| c.read().ok());
        Sample {
            ticks: self.clock.counts_cycles().then(|| self.clock.ticks()),
            cycles: read(&mut self.cycles),
            instructions: read(&mut self.instructions),
            system_calls: read(&mut self.system_calls),
            ring_calls: Some(reactor.kernel_calls()),
        }
    }
}
