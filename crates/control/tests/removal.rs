//! Goal: a block device that is taken out of the host costs its array a member, and no guest an
//! answer.
//! Method: loop devices that lose all their bytes, as one does whose drive is not there any more,
//! beneath a guest that verifies. Needs root; where no loop device can be made it says so.

#![allow(clippy::unwrap_used, reason = "a test")]

mod daemon;

use std::fs::File;
use std::os::fd::AsRawFd;
use std::process::Command;

use daemon::Daemon;
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

const MEMBERS: usize = 4;
/// LOOP_GET_STATUS64 and LOOP_SET_STATUS64 (linux/loop.h); the offset is the fourth field.
const TAKE_OUT: &str = "
import fcntl, struct, sys
with open(sys.argv[1]) as device:
    info = bytearray(fcntl.ioctl(device, 0x4C05, bytes(232)))
    struct.pack_into('Q', info, 24, 1 << 40)
    fcntl.ioctl(device, 0x4C04, bytes(info))
";
/// How far the guest is when the device goes.
const WRITES_BEFORE: u64 = 2000;

fn losetup(arguments: &[&str]) -> Option<String> {
    let output = Command::new("losetup").args(arguments).output().ok()?;
    output.status.success().then(|| String::from_utf8(output.stdout).unwrap().trim().to_owned())
}

/// Its name goes with it.
struct Loop(String);

impl Loop {
    /// Its file cannot grow: where the device begins later, there would be room for a write.
    fn new() -> Option<Loop> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let file = File::from(memfd_create("drive", flags).unwrap());
        file.set_len(daemon::DRIVE_BYTES).unwrap();
        fcntl_add_seals(&file, SealFlags::GROW).unwrap();
        let path = format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd());
        losetup(&["--find", "--show", "--direct-io=on", &path]).map(Loop)
    }

    /// From one moment to the next it has no bytes any more: it begins where its file ends.
    fn take_out(&self) {
        let status = Command::new("python3").args(["-c", TAKE_OUT, &self.0]).status().unwrap();
        assert!(status.success(), "{}", self.0);
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = losetup(&["--detach", &self.0]);
    }
}

fn writes(daemon: &Daemon) -> u64 {
    daemon.json("export show e")["counters"]["writes"].as_u64().unwrap()
}

#[test]
fn no_guest_notices_that_a_block_device_was_taken_out() {
    for policy in ["journal", "bitmap"] {
        let daemon = Daemon::start();
        let devices: Option<Vec<Loop>> = (0..MEMBERS).map(|_| Loop::new()).collect();
        let Some(devices) = devices else {
            return daemon::not_tried("`losetup` makes no block device here: it takes root");
        };
        for (number, Loop(device)) in devices.iter().enumerate() {
            daemon.ok(&format!("drive attach {device} --name d{number}"));
        }
        daemon.ok(&format!("array create a --level 5 --policy {policy} --drives d0,d1,d2,d3"));
        daemon.ok("volume create v --array a --size 32M");
        daemon.ok("export create e --volume v");
        let bench = "bench vhost --socket @/export/e.sock --force --rw randrw --mix 30 --verify \
                     --size 16M --depth 16 --seconds 5 --warm-up 0";
        let guest = daemon.run_beside(90, bench);
        daemon.wait_for("export show e", |_| writes(&daemon) > WRITES_BEFORE);
        devices[1].take_out();
        let output = guest.wait_with_output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{policy}: {said}\n{}", daemon.log());
        daemon.wait_for("array show a", |array| array["state"] == "degraded");
        assert_eq!(daemon.json("export show e")["counters"]["errors"], 0);
    }
}
