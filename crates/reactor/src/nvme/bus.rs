//! How a driver reaches its controller: registers, memory that both see, and a sign of life.
//!
//! VFIO in production (`vfio.rs`), a model of a controller in tests (`model.rs`).

use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::time::Duration;

use crate::backend::Instant;

/// A PCI function. Dropping it takes the function's access to memory away, whatever it does.
pub trait Bus: Send {
    /// A register of BAR 0. A function that is gone reads as all ones.
    fn read(&self, offset: usize) -> u32;

    fn write(&self, offset: usize, value: u32);

    /// Lets the function read and write `start..start + len`, both multiples of a page. Returns
    /// where it finds that.
    ///
    /// # Safety
    /// The memory stays mapped until `unmap`, or until the bus is dropped. Until then nothing
    /// relies on its content but what the protocol promises.
    unsafe fn map(&mut self, start: NonNull<u8>, len: usize) -> io::Result<u64>;

    /// Takes what `map` gave away. When it returns, the function reaches that memory no more.
    fn unmap(&mut self, at: u64, len: usize) -> io::Result<()>;

    /// Can be read when the function has completed something or the system wants it back. `None`:
    /// look at the queues.
    fn events(&self) -> Option<RawFd>;

    /// Makes `events` unreadable until something new happens. True: the system wants the function
    /// back; it is about to be taken out.
    fn take_events(&mut self) -> bool;

    /// Sleeps until something may have happened, at most for `wait`.
    fn wait(&mut self, wait: Duration);

    /// For those that wait without a reactor.
    fn now(&self) -> Instant;
}
