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
use serde_json::Value;

const MEMBERS: usize = 4;
/// LOOP_GET_STATUS64 and LOOP_SET_STATUS64 (linux/loop.h); the offset is the fourth field.
const BEGIN_AT: &str = "
import fcntl, struct, sys
with open(sys.argv[1]) as device:
    info = bytearray(fcntl.ioctl(device, 0x4C05, bytes(232)))
    struct.pack_into('Q', info, 24, int(sys.argv[2]))
    fcntl.ioctl(device, 0x4C04, bytes(info))
";
/// How far the guest is when the device goes.
const WRITES_BEFORE: u64 = 200;

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
        self.begin_at(1 << 40);
    }

    /// It has them again.
    fn put_back(&self) {
        self.begin_at(0);
    }

    fn begin_at(&self, offset: u64) {
        let arguments = ["-c", BEGIN_AT, &self.0, &offset.to_string()];
        let status = Command::new("python3").args(arguments).status().unwrap();
        assert!(status.success(), "{}", self.0);
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = losetup(&["--detach", &self.0]);
    }
}

/// Block devices, as drives d0, d1 and on. `None`: there are none here, and that is said.
fn attached(daemon: &Daemon) -> Option<Vec<Loop>> {
    let devices: Option<Vec<Loop>> = (0..MEMBERS).map(|_| Loop::new()).collect();
    let Some(devices) = devices else {
        daemon::not_tried("`losetup` makes no block device here: it takes root");
        return None;
    };
    for (number, Loop(device)) in devices.iter().enumerate() {
        daemon.ok(&format!("drive attach {device} --name d{number}"));
    }
    Some(devices)
}

/// A volume of a new array, as `e`.
fn export(daemon: &Daemon, array: &str) {
    daemon.ok(&format!("array create a {array}"));
    daemon.ok("volume create v --array a --size 32M");
    daemon.ok("export create e --volume v");
}

fn writes(daemon: &Daemon) -> u64 {
    daemon.json("export show e")["counters"]["writes"].as_u64().unwrap()
}

#[test]
fn no_guest_notices_that_a_block_device_was_taken_out() {
    for policy in ["journal", "bitmap"] {
        let daemon = Daemon::start();
        let Some(devices) = attached(&daemon) else { return };
        export(&daemon, &format!("--level 5 --policy {policy} --drives d0,d1,d2,d3"));
        let bench = "bench vhost --socket @/export/e.sock --force --rw randrw --mix 30 --verify \
                     --size 16M --depth 16 --seconds 15 --warm-up 0";
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

/// What is left does not know that the other half went on without it. Its host does, before a guest
/// hears of something which it lacks.
#[test]
fn a_half_that_was_fenced_just_now_is_not_started_alone() {
    let mut daemon = Daemon::start();
    let Some(devices) = attached(&daemon) else { return };
    export(&daemon, "--level 1 --drives d0,d1");
    let bench = "bench vhost --socket @/export/e.sock --force --rw randwrite --size 16M --depth 1 \
                 --seconds 80 --warm-up 0";
    let guest = daemon.run_beside(90, bench);
    daemon.wait_for("export show e", |_| writes(&daemon) > WRITES_BEFORE);
    devices[1].take_out();
    daemon.wait_for("array show a", |array| array["members"][1]["state"] == "stale");
    // The first of these may have begun before.
    let heard = writes(&daemon) + 1;
    daemon.wait_for("export show e", |_| writes(&daemon) > heard);
    daemon.kill();
    guest.wait_with_output().unwrap();
    devices[1].put_back();
    devices[0].take_out();
    daemon.start_again();
    let said = daemon.refused("array start a");
    assert!(said.contains("newer data"), "{said}");
}

/// More than the array bears: what `status` says then is what mends it.
#[test]
fn devices_that_are_back_bring_their_array_back() {
    let daemon = Daemon::start();
    let Some(devices) = attached(&daemon) else { return };
    export(&daemon, "--level 5 --drives d0,d1,d2,d3");
    let bench = "bench vhost --socket @/export/e.sock --force --rw write --size 16M --depth 4 \
                 --seconds 2 --warm-up 0";
    devices[1].take_out();
    daemon.ok(bench);
    daemon.wait_for("array show a", |array| array["state"] == "degraded");
    let said = daemon.ok("status");
    let replace = "drive d1 failed; `ashlar array replace a --member 1 --new DRIVE`";
    assert!(said.contains(&format!("! array a is degraded: {replace}")), "{said}");
    devices[2].take_out();
    // Reads and writes fail from here on.
    daemon.run(bench);
    daemon.wait_for("array show a", |array| array["state"] == "failed");
    let said = daemon.ok("status");
    let mends = "drive d2 failed: if it can be read again, `ashlar array stop a --force` and \
                 `ashlar array start a` take it back (detach and attach it between these";
    assert!(said.contains(mends), "{said}");
    // The array may need what is on them.
    assert!(said.contains("replace nothing") && !said.contains("replace it"), "{said}");
    devices[2].put_back();
    daemon.ok("drive detach d2 --force");
    daemon.ok(&format!("drive attach {} --name d2", devices[2].0));
    // What was in its cache may be lost, which an array that runs cannot bear, and that is told; or
    // all of it was flushed, and it is taken back as it is.
    let told = |drive: &Value| {
        drive["error"]
            .as_str()
            .is_some_and(|why| why.contains("`ashlar array stop a --force`, then"))
    };
    let drive = daemon
        .wait_for("drive show d2", |drive| told(drive) || daemon.array_state("a") == "degraded");
    if told(&drive) {
        let said = daemon.ok("status");
        assert!(said.contains("; drive d2 is attached, and not used\n"), "{said}");
        // Not cleanly: what the journal has has no place to go to.
        let stopped = daemon.ok("array stop a --force");
        assert!(stopped.contains("was stopped, but not cleanly"), "{stopped}");
        daemon.ok("array start a");
    }
    assert_eq!(daemon.array_state("a"), "degraded");
    daemon.ok(bench);
}
