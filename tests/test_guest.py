"""Goal: a Linux guest's data survives what happens to drives, daemon and guest.

Method: a real kernel in QEMU, fio with crc32c verification, drives pulled and replaced meanwhile,
the daemon stopped and killed.
"""

import shlex
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from demo import guest_image, vm
from tests.rig import CACHE, rig

VOLUME_BYTES = 512 << 20  # XFS wants 300 MiB
VERIFY = (
    "fio --name=v --filename=/dev/vda --direct=1 --ioengine=io_uring --verify=crc32c "
    "--verify_fatal=1 --randseed=7 --iodepth=16 "
)
# Writes everything once in random order with mixed sizes, then reads it back and verifies.
WRITE_AND_VERIFY = VERIFY + "--rw=randwrite --bsrange=512-128k --blockalign=512 --size={size}M"
# Reads back what an earlier run of the same command wrote.
VERIFY_ONLY = WRITE_AND_VERIFY + " --verify_only"


class Emulation(unittest.TestCase):
    """What the other tests stand on."""

    def test_a_guest_that_hangs_as_it_boots_is_booted_again(self):
        image = guest_image.build(CACHE, lambda text: None)
        with tempfile.TemporaryDirectory() as home:
            guest = vm.Vm(image, memory="512M", accel="tcg", log=Path(home) / "console.log")
            self.addCleanup(guest.close)
            guest.launch()
            guest.qmp("stop")
            hung = guest.qemu
            with mock.patch.object(vm, "FIRST_PROGRAM_SECONDS_MAX", 10):
                guest.wait_up()
            self.assertIsNotNone(hung.poll(), "it is not left behind")
            guest.check("true")


class Guest(unittest.TestCase):
    def test_linux_is_told_the_truth(self):
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES))
            queue = "/sys/block/vda/queue"
            self.assertEqual(vm.check(f"cat {queue}/write_cache").strip(), "write back")
            self.assertEqual(vm.check("cat /sys/block/vda/size").strip(), str(VOLUME_BYTES >> 9))
            flushes = lambda: int(vm.check("cat /sys/block/vda/stat").split()[15])
            before = flushes()
            vm.check("dd if=/dev/urandom of=/dev/vda bs=64k count=4 conv=fsync")
            self.assertGreater(flushes(), before)
            # What was discarded reads as zeroes, and the sectors around it are untouched.
            vm.check("blkdiscard -o 0 -l 16777216 /dev/vda")
            zeroes = "dd if=/dev/vda bs=1M count=16 iflag=direct status=none | tr -d '\\0' | wc -c"
            self.assertEqual(vm.check(zeroes).split()[-1], "0")
            vm.shutdown()

    def test_it_boots_from_the_options_that_are_printed(self):
        with rig() as made:
            made.make_export("5", 3, VOLUME_BYTES >> 1)
            made.engine.create_volume("w", "a", 32 << 20)
            nbd = ["--kind", "nbd", "--path", str(made.directory / "w.sock")]
            made.engine.ashlar("export", "create", "w", "--volume", "w", *nbd)
            printed = [made.engine.ashlar("export", "show", name, "--qemu") for name in "vw"]
            options = shlex.split(" ".join(printed).replace("4G", "512M"))
            image = guest_image.build(CACHE, lambda text: None)
            log = made.directory / "console.log"
            guest = vm.Vm(image, memory=None, qemu_options=options, log=log)
            made.cleanup.callback(guest.close)
            guest.start()
            sizes = guest.check("for disk in /dev/vd?; do blockdev --getsize64 $disk; done").split()
            self.assertLessEqual({str(VOLUME_BYTES >> 1), str(32 << 20)}, set(sizes))
            for disk, size in zip(guest.disks(), sizes, strict=True):
                if int(size) in (VOLUME_BYTES >> 1, 32 << 20):
                    write = WRITE_AND_VERIFY.replace("/dev/vda", disk).format(size=8)
                    guest.check(write, timeout=120)
            for name in "vw":
                counters = made.engine.show("export", "show", name)["counters"]
                self.assertGreater(counters["writes"], 0)

    def test_verified_through_loss_and_rebuild(self):
        for level, members in [("5", 5), ("6", 6), ("10", 4)]:
            with self.subTest(level=level), rig() as made:
                engine = made.engine
                socket = made.make_export(level, members, VOLUME_BYTES)
                vm = made.boot(socket)
                vm.check(WRITE_AND_VERIFY.format(size=32), timeout=120)
                # A drive goes while the guest writes.
                running = vm.spawn(WRITE_AND_VERIFY.format(size=32))
                engine.pull_drive("d1")
                self.assertEqual(running.wait(180).rc, 0, "while a drive was pulled")
                self.assertEqual(engine.array_state("a"), "degraded")
                vm.check(VERIFY_ONLY.format(size=32), timeout=120)
                # The new drive is filled while the guest writes.
                made.attach("new")
                engine.replace_drive("a", "d1", "new")
                running = vm.spawn(WRITE_AND_VERIFY.format(size=32))
                self.assertEqual(running.wait(180).rc, 0, "while the new drive was filled")
                made.wait_state("optimal")
                vm.check(VERIFY_ONLY.format(size=32), timeout=120)
                vm.shutdown()
                made.scrub_is_clean()

    def test_a_drive_that_was_scribbled_on_is_named_and_mended(self):
        with rig() as made:
            engine = made.engine
            socket = made.make_export("5", 5, VOLUME_BYTES, integrity=True)
            vm = made.boot(socket)
            vm.check(WRITE_AND_VERIFY.format(size=32), timeout=120)
            # While the guest writes, and again before it only reads.
            running = vm.spawn(WRITE_AND_VERIFY.format(size=32))
            made.scribble("d1", 8 << 20)
            self.assertEqual(running.wait(180).rc, 0, "while a drive was scribbled on")
            made.scribble("d1", 8 << 20)
            vm.check(VERIFY_ONLY.format(size=32), timeout=120)
            vm.shutdown()
            for name in ["d0", "d1", "d2", "d3", "d4"]:
                wrong = engine.show("drive", "show", name)["counters"]["wrong_blocks"]
                self.assertEqual(wrong > 0, name == "d1", f"{name}: {wrong}")
            # Mends what nobody has read, and then there is nothing left.
            engine.ashlar("array", "scrub", "a", "--wait")
            made.scrub_is_clean()
            self.assertEqual(engine.array_state("a"), "optimal")

    def test_a_scrub_of_two_parities_tells_which_drive_is_wrong(self):
        with rig() as made:
            engine = made.engine
            vm = made.boot(made.make_export("6", 6, VOLUME_BYTES))
            vm.check(WRITE_AND_VERIFY.format(size=32), timeout=120)
            made.wait_in_place()
            made.scribble("d2", 8 << 20)
            engine.ashlar("array", "scrub", "a", "--wait")
            members = engine.show("array", "show", "a")["members"]
            wrong = [member["drive"] for member in members if member["wrong_stripes"]]
            self.assertEqual(wrong, ["d2"])
            vm.check("echo 3 > /proc/sys/vm/drop_caches")
            vm.check(VERIFY_ONLY.format(size=32), timeout=120)
            vm.shutdown()
            made.scrub_is_clean()

    def test_guest_and_daemon_start_again(self):
        with rig() as made:
            socket = made.make_export("5", 5, VOLUME_BYTES)
            vm = made.boot(socket)
            vm.check(WRITE_AND_VERIFY.format(size=32), timeout=120)
            vm.shutdown()
            # The same daemon, a new guest.
            vm = made.boot(socket)
            vm.check(VERIFY_ONLY.format(size=32), timeout=120)
            vm.shutdown()
            # A new daemon, a new guest: exports come back by themselves.
            made.engine.stop()
            made.engine.start()
            vm = made.boot(socket)
            vm.check(VERIFY_ONLY.format(size=32), timeout=120)
            vm.shutdown()

    def test_killed_daemon_keeps_what_was_flushed(self):
        for degraded in [False, True]:
            with self.subTest(degraded=degraded), rig() as made:
                self.kill_while_writing(made, degraded)

    def kill_while_writing(self, made, degraded: bool):
        socket = made.make_export("5", 5, VOLUME_BYTES)
        if degraded:
            made.engine.pull_drive("d2")
        vm = made.boot(socket)
        vm.check("mkfs.xfs -q /dev/vda && mkdir -p /mnt && mount /dev/vda /mnt")
        flushed = []
        # Each line is said after the file's content is flushed.
        script = (
            "i=0; while true; do i=$((i+1)); "
            "seq $i $((i+5000)) > /mnt/f$i && sync /mnt/f$i /mnt && echo $i; done"
        )
        writer = vm.spawn(script, on_line=lambda line: flushed.append(int(line)))
        vm.check("while ! [ -e /mnt/f20 ]; do sleep 0.1; done", timeout=120)
        # What was said comes a while later.
        deadline = time.monotonic() + 60
        while len(flushed) < 20:
            self.assertLess(time.monotonic(), deadline, "hardly anything was flushed")
            time.sleep(0.05)
        made.engine.kill()
        said = list(flushed)
        vm.kill()
        del writer
        self.assertGreaterEqual(len(said), 19)
        made.engine.start()
        vm = made.boot(socket)
        vm.check("mkdir -p /mnt && mount /dev/vda /mnt")
        same = '[ "$(seq $i $((i+5000)) | md5sum)" = "$(md5sum < /mnt/f$i)" ]'
        vm.check(f"for i in $(seq 1 {said[-1]}); do {same} || exit 1; done", timeout=120)
        vm.check("umount /mnt && xfs_repair -n /dev/vda")
        vm.shutdown()

    def test_drives_alone_bring_everything_back(self):
        with rig() as made:
            socket = made.make_export("6", 6, VOLUME_BYTES)
            vm = made.boot(socket)
            vm.check(WRITE_AND_VERIFY.format(size=32), timeout=120)
            vm.shutdown()
            made.engine.stop()
            # The state directory is lost; the drives are attached in another order.
            made.engine = made.new_engine(made.directory / "other-state")
            made.engine.start()
            made.attach("d5", "d2", "d0", "d4", "d1", "d3")
            made.engine.ashlar("array", "start", "--scan")
            made.engine.create_export("v", "v", socket)
            vm = made.boot(socket)
            vm.check(VERIFY_ONLY.format(size=32), timeout=120)
            vm.shutdown()


if __name__ == "__main__":
    unittest.main()
