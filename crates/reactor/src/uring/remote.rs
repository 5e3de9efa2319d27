//! Remote drives: what their connections have the kernel do, and how a backend ends.
//!
//! The kernel receives into memory of operations and of the drive itself: so a drive that is let go
//! stays until it has nothing of that any more, and so does the backend.

use std::time::Duration;

use super::device::Registered;
use super::entry::transfer;
use super::tag::Tag;
use super::{UringBackend, now};
use crate::backend::Instant;
use crate::nvme::remote::device::Way;
use crate::op::Outcome;

impl UringBackend {
    pub(super) fn hear_remote(&mut self, device: usize, way: Way, outcome: Outcome) {
        self.remote_under_way -= 1;
        let now = now(self.started);
        let Registered::Remote(remote) = &mut self.devices[device] else {
            unreachable!("it stays until its connection has ended");
        };
        remote.ended(way, outcome, now);
        if remote.is_over() {
            self.remote_drives -= 1;
            self.devices[device] = Registered::Gone;
        }
    }

    /// Goes on with remote drives, and does what their connections ask for.
    pub(super) fn attend_remote(&mut self) {
        if self.remote_drives == 0 {
            return;
        }
        let now = now(self.started);
        let UringBackend { devices, ring, finished, remote_under_way, .. } = self;
        for (device, its) in devices.iter_mut().enumerate() {
            let Registered::Remote(remote) = its else { continue };
            remote.advance(now);
            finished.append(&mut remote.finished);
            while let Some((way, fd, pieces)) = remote.next_transfer() {
                let tag = Tag::Remote { device, way };
                ring.push(transfer(way, fd, pieces).user_data(tag.bits()), Instant::MAX);
                *remote_under_way += 1;
            }
        }
    }

    /// How long to sleep at most, until a remote drive wants a look.
    pub(super) fn await_remote(&self) -> Option<Duration> {
        let sleep_max = |device: &Registered| {
            let Registered::Remote(remote) = device else { return None };
            remote.sleep_max()
        };
        match self.remote_drives {
            0 => None,
            _ => self.devices.iter().filter_map(sleep_max).min(),
        }
    }

    /// Lets a remote drive go, once the kernel has nothing of it any more.
    pub(super) fn unregister_remote(&mut self, device: usize) {
        let Registered::Remote(remote) = &mut self.devices[device] else {
            unreachable!("a remote drive, says the caller");
        };
        remote.close();
        if remote.is_over() {
            self.remote_drives -= 1;
            self.devices[device] = Registered::Gone;
        }
    }
}

impl Drop for UringBackend {
    /// The kernel may still be writing what lossy drives hold, or filling what remote ones read.
    fn drop(&mut self) {
        for device in &mut self.devices {
            if let Registered::Remote(remote) = device {
                remote.close();
            }
        }
        let is_ours =
            |bits: &u64| matches!(Tag::from_bits(*bits), Tag::Lossy { .. } | Tag::Remote { .. });
        let mut left = self.lossy_under_way + self.remote_under_way;
        left -= self.ring.forget_backlog().filter(is_ours).count();
        while left > 0 && self.ring.wait(None) {
            self.ring.reap(&mut self.heard);
            left -= self.heard.drain(..).filter(|(bits, _)| is_ours(bits)).count();
        }
    }
}
