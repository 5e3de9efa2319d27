//! The machine's clock.

use std::time::Duration;

/// Since the machine was started. It goes on while the machine is suspended: another may have
/// waited for it all that time.
pub(crate) fn machine_time() -> Duration {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is ours, and of the type that is filled in.
    let result = unsafe { libc::clock_gettime(libc::CLOCK_BOOTTIME, &raw mut time) };
    assert!(result == 0, "a machine without a clock");
    let seconds = u64::try_from(time.tv_sec).expect("it began at zero");
    Duration::new(seconds, u32::try_from(time.tv_nsec).expect("less than a second"))
}
