//! Two looks at the time for every request must cost next to nothing: the CPU's time stamp counter
//! where it counts evenly, else the kernel's clock.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// How long the two clocks are compared: an error of 100 ns in either is 10 ppm then.
const COMPARED_NS: u64 = 20_000_000;
/// Looks at both clocks, of which the one that was interrupted least counts.
const LOOKS: u32 = 16;
/// Fraction bits of the factor.
const FACTOR_LOG2: u32 = 32;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Source {
    Counter,
    Kernel,
}

/// Counts ticks from an arbitrary beginning, the same on every CPU.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    source: Source,
    /// Nanoseconds of a tick, times `2^FACTOR_LOG2`.
    factor: u64,
}

impl Clock {
    /// Compares the CPU's counter with the kernel's clock; takes 20 ms.
    pub fn calibrated() -> Clock {
        let kernel = Clock { source: Source::Kernel, factor: 1 << FACTOR_LOG2 };
        if !counts_evenly() {
            return kernel;
        }
        let (first_ticks, first_ns) = both();
        while kernel_ns() - first_ns < COMPARED_NS {
            std::hint::spin_loop();
        }
        let (ticks, ns) = both();
        let (ticks, ns) = (u128::from(ticks - first_ticks), u128::from(ns - first_ns));
        let factor = (ns << FACTOR_LOG2).checked_div(ticks).and_then(|f| u64::try_from(f).ok());
        factor.map_or(kernel, |factor| Clock { source: Source::Counter, factor })
    }

    #[inline]
    pub fn ticks(self) -> u64 {
        match self.source {
            Source::Counter => counter(),
            Source::Kernel => kernel_ns(),
        }
    }

    /// Whether ticks are those of the CPU's counter, which runs at the CPU's nominal speed.
    pub fn counts_cycles(self) -> bool {
        self.source == Source::Counter
    }

    #[inline]
    pub fn ns(self, ticks: u64) -> u64 {
        let ns = (u128::from(ticks) * u128::from(self.factor)) >> FACTOR_LOG2;
        u64::try_from(ns).unwrap_or(u64::MAX)
    }

    pub fn ticks_of(self, time: Duration) -> u64 {
        let ticks = (time.as_nanos() << FACTOR_LOG2) / u128::from(self.factor.max(1));
        u64::try_from(ticks).unwrap_or(u64::MAX)
    }
}

fn kernel_ns() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0)
}

/// The counter and the kernel's clock at one moment.
fn both() -> (u64, u64) {
    let look = |_| {
        let (before, ns, after) = (counter(), kernel_ns(), counter());
        (after.saturating_sub(before), before / 2 + after / 2, ns)
    };
    let best = (0..LOOKS).map(look).min().expect("LOOKS is above zero");
    (best.1, best.2)
}

#[cfg(target_arch = "x86_64")]
#[inline]
fn counter() -> u64 {
    // SAFETY: reads a register that every x86-64 CPU has; Linux does not forbid it.
    unsafe { std::arch::x86_64::_rdtsc() }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline]
fn counter() -> u64 {
    kernel_ns()
}

/// Linux says so of counters that neither stop nor change their pace with the CPU.
fn counts_evenly() -> bool {
    let flags = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let flags = flags.lines().find(|line| line.starts_with("flags")).unwrap_or_default();
    let has = |name| flags.split_whitespace().any(|flag| flag == name);
    cfg!(target_arch = "x86_64") && has("constant_tsc") && has("nonstop_tsc")
}

#[cfg(test)]
mod tests {
    //! Goal: ticks are time, whichever clock they come from.
    //! Method: the kernel's clock beside it.

    use super::*;

    #[test]
    fn ticks_are_time() {
        let clock = Clock::calibrated();
        let (ticks, ns) = (clock.ticks(), kernel_ns());
        while kernel_ns() - ns < COMPARED_NS {
            std::hint::spin_loop();
        }
        let inner = kernel_ns() - ns;
        let counted = clock.ns(clock.ticks() - ticks);
        // It began before and ended after; whatever else it says, the machine's scheduler did.
        assert!(counted * 1001 >= inner * 1000, "{counted} of {inner}");
        assert!(clock.ns(clock.ticks_of(Duration::from_secs(2))).abs_diff(2_000_000_000) < 1000);
    }
}
