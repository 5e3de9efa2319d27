//! A PCI function through VFIO: its registers, interrupts, and the memory that it may reach.
//!
//! The IOMMU keeps the function from everything that was not mapped for it. Each function has a
//! container, and so an address space, of its own: addresses are given out here, upwards.

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use vfio_bindings::bindings::vfio::{
    VFIO_PCI_BAR0_REGION_INDEX, VFIO_PCI_CONFIG_REGION_INDEX, VFIO_PCI_ERR_IRQ_INDEX,
    VFIO_PCI_MSI_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
    VFIO_REGION_INFO_FLAG_MMAP,
};
use vfio_ioctls::{VfioContainer, VfioDevice, VfioError};
use vmm_sys_util::epoll::{ControlOperation, Epoll, EpollEvent, EventSet};
use vmm_sys_util::eventfd::EventFd;

use super::bus::Bus;
use crate::backend::Instant;

/// Above what is reserved for interrupts, and inside what every IOMMU translates.
const FIRST_ADDRESS: u64 = 4 << 30;
/// Larger mappings begin at its multiples, so that the IOMMU can use large pages.
const LARGE_PAGE_BYTES: u64 = 2 << 20;
/// Command register in configuration space, and its bits: memory, bus master (PCI 3.0, 6.2.2).
const COMMAND: u64 = 4;
const COMMAND_MEMORY_AND_MASTER: u16 = 1 << 1 | 1 << 2;

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("{0}")]
    Vfio(#[from] VfioError),
    #[error("its registers cannot be mapped: {0}")]
    Registers(io::Error),
    #[error("it has no message-signalled interrupts")]
    NoInterrupts,
    #[error("events cannot be had: {0}")]
    Events(io::Error),
}

/// BAR 0 in this process.
struct Registers {
    start: NonNull<u8>,
    len: usize,
}

// SAFETY: an address range that this value alone gives back; no thread is special.
unsafe impl Send for Registers {}

impl Drop for Registers {
    fn drop(&mut self) {
        // SAFETY: mapped in `Registers::map` with this length, and reached through this value only.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len) };
    }
}

impl Registers {
    fn map(device: &VfioDevice) -> io::Result<Registers> {
        let index = VFIO_PCI_BAR0_REGION_INDEX;
        let (size, offset) = (device.get_region_size(index), device.get_region_offset(index));
        let flags = device.get_region_flags(index);
        let invalid = || io::Error::from_raw_os_error(libc::EINVAL);
        if flags & VFIO_REGION_INFO_FLAG_MMAP == 0 {
            return Err(invalid());
        }
        let len = usize::try_from(size).map_err(|_| invalid())?;
        let offset = libc::off_t::try_from(offset).map_err(|_| invalid())?;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        let fd = device.as_raw_fd();
        // SAFETY: a new mapping at an address of the kernel's choice aliases nothing.
        let start = unsafe {
            libc::mmap(std::ptr::null_mut(), len, protection, libc::MAP_SHARED, fd, offset)
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Registers { start: NonNull::new(start.cast()).ok_or_else(invalid)?, len })
    }

    /// `None`: behind the end. What stride a controller names is its own choice.
    fn place(&self, offset: usize) -> Option<NonNull<u32>> {
        if !offset.is_multiple_of(4) || offset >= self.len || self.len - offset < 4 {
            return None;
        }
        // SAFETY: inside the mapping, as checked.
        Some(unsafe { self.start.add(offset) }.cast())
    }
}

/// Fields are dropped from the first to the last, and that matters: see `open`.
struct Vfio {
    registers: Registers,
    _device: VfioDevice,
    /// Keeps the device open until `_device` is dropped: that looks the function up in /sys once
    /// more, where it must still be, even if it is just being taken out.
    _open: OwnedFd,
    container: Arc<VfioContainer>,
    addresses: Addresses,
    interrupts: EventFd,
    /// The system wants the function back, or has seen it fail.
    wanted: EventFd,
    both: Epoll,
}

/// Opens the function that is at `path` in /sys/bus/pci/devices, bound to vfio-pci. It is reset.
pub fn open(path: &Path) -> Result<Box<dyn Bus>, OpenError> {
    let container = Arc::new(VfioContainer::new(None)?);
    let device = VfioDevice::new(path, container.clone(), true)?;
    // SAFETY: the device has this descriptor open, and lives.
    let open = unsafe { BorrowedFd::borrow_raw(device.as_raw_fd()) }.try_clone_to_owned();
    let open = open.map_err(OpenError::Events)?;
    let mut command = [0; 2];
    device.region_read(VFIO_PCI_CONFIG_REGION_INDEX, &mut command, COMMAND);
    let command = u16::from_le_bytes(command) | COMMAND_MEMORY_AND_MASTER;
    device.region_write(VFIO_PCI_CONFIG_REGION_INDEX, &command.to_le_bytes(), COMMAND);
    let registers = Registers::map(&device).map_err(OpenError::Registers)?;
    let event = || EventFd::new(libc::EFD_NONBLOCK | libc::EFD_CLOEXEC).map_err(OpenError::Events);
    let (interrupts, wanted) = (event()?, event()?);
    let has = |index| device.get_irq_info(index).is_some_and(|irq| irq.count > 0);
    let kinds = [VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_MSI_IRQ_INDEX];
    let kind = kinds.into_iter().find(|index| has(*index)).ok_or(OpenError::NoInterrupts)?;
    device.enable_irq(kind, vec![&interrupts])?;
    for index in [VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX] {
        if has(index) {
            device.enable_irq(index, vec![&wanted])?;
        }
    }
    let both = both(&interrupts, &wanted).map_err(OpenError::Events)?;
    let addresses = Addresses::default();
    let vfio = Vfio {
        registers,
        _device: device,
        _open: open,
        container,
        addresses,
        interrupts,
        wanted,
        both,
    };
    Ok(Box::new(vfio))
}

fn both(interrupts: &EventFd, wanted: &EventFd) -> io::Result<Epoll> {
    let both = Epoll::new()?;
    for fd in [interrupts, wanted] {
        let event = EpollEvent::new(EventSet::IN, 0);
        both.ctl(ControlOperation::Add, fd.as_raw_fd(), event)?;
    }
    Ok(both)
}

impl Bus for Vfio {
    fn read(&self, offset: usize) -> u32 {
        // SAFETY: inside the mapping and aligned, by `place`; registers have no other rules.
        self.registers.place(offset).map_or(u32::MAX, |place| unsafe { place.read_volatile() })
    }

    fn write(&self, offset: usize, value: u32) {
        if let Some(place) = self.registers.place(offset) {
            // SAFETY: as in `read`.
            unsafe { place.write_volatile(value) };
        }
    }

    unsafe fn map(&mut self, start: NonNull<u8>, len: usize) -> io::Result<u64> {
        let at = self.addresses.take(len as u64);
        // SAFETY: the caller keeps the memory mapped, and trusts it with nothing.
        let mapped = unsafe { self.container.vfio_dma_map(at, len, start.as_ptr()) };
        mapped.map_err(|error| {
            self.addresses.give_back(at, len as u64);
            io::Error::other(error.to_string())
        })?;
        Ok(at)
    }

    fn unmap(&mut self, at: u64, len: usize) -> io::Result<()> {
        let unmapped = self.container.vfio_dma_unmap(at, len);
        unmapped.map_err(|error| io::Error::other(error.to_string()))?;
        self.addresses.give_back(at, len as u64);
        Ok(())
    }

    fn events(&self) -> Option<RawFd> {
        Some(self.both.as_raw_fd())
    }

    fn take_events(&mut self) -> bool {
        // An error means that there was none.
        let _ = self.interrupts.read();
        self.wanted.read().is_ok()
    }

    fn wait(&mut self, wait: Duration) {
        let ms = i32::try_from(wait.as_millis()).unwrap_or(i32::MAX).max(1);
        // A signal ends it early, which nobody minds.
        let _ = self.both.wait(ms, &mut [EpollEvent::default(); 2]);
        let _ = self.interrupts.read();
    }

    fn now(&self) -> Instant {
        Instant::default().after(crate::clock::machine_time())
    }
}

/// Which addresses of the function are in use.
#[derive(Default)]
struct Addresses {
    used: u64,
    /// By length.
    free: BTreeMap<u64, Vec<u64>>,
}

impl Addresses {
    fn take(&mut self, len: u64) -> u64 {
        if let Some(at) = self.free.get_mut(&len).and_then(Vec::pop) {
            return at;
        }
        let align = if len >= LARGE_PAGE_BYTES { LARGE_PAGE_BYTES } else { 1 };
        let at = (FIRST_ADDRESS + self.used).next_multiple_of(align);
        self.used = at + len - FIRST_ADDRESS;
        at
    }

    fn give_back(&mut self, at: u64, len: u64) {
        self.free.entry(len).or_default().push(at);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_given_once_and_used_again() {
        let mut addresses = Addresses::default();
        let (a, b, c) = (addresses.take(4096), addresses.take(4 << 20), addresses.take(4096));
        assert_eq!((a, b, c), (FIRST_ADDRESS, a + (2 << 20), b + (4 << 20)));
        addresses.give_back(a, 4096);
        assert_eq!(addresses.take(8192), c + 4096);
        assert_eq!(addresses.take(4096), a);
    }
}
