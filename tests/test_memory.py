"""Goal: a guest's disk is right wherever its memory lies, and while guest and disk grow.

Method: a real kernel in QEMU that writes, reads back and verifies. The memory that is plugged is
for programs alone (`online_movable`), which get it before any other: the load's buffers lie there.
"""

import os
import tempfile
import unittest
from pathlib import Path

from tests.rig import rig
from tests.test_guest import VOLUME_BYTES, WRITE_AND_VERIFY
from tests.watched import Watched

MIB = 1 << 20
PLUGGED_BYTES = 256 * MIB
HUGE_PAGE_BYTES = 2 * MIB
OF_DAEMON_MIB = 64  # its buffers are of huge pages, too, where there are any
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
WORK_SECONDS_MAX = 120
WAIT_SECONDS_MAX = 30


class Memory(unittest.TestCase):
    def verify(self, **where) -> None:
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES), **where)
            vm.check(WRITE_AND_VERIFY.format(size=16), timeout=WORK_SECONDS_MAX)
            vm.shutdown()

    def test_a_file_in_memory(self):
        with tempfile.TemporaryDirectory(prefix="ashlar-", dir="/dev/shm") as directory:
            self.verify(memory_path=Path(directory))

    def test_a_file_on_a_disk(self):
        with tempfile.TemporaryDirectory(prefix="ashlar-", dir="/var/tmp") as directory:
            self.verify(memory_path=Path(directory) / "memory")

    def test_huge_pages(self):
        kept = HUGE_PAGES.read_text()
        if os.geteuid() != 0:
            self.skipTest("only root reserves huge pages")
        self.addCleanup(HUGE_PAGES.write_text, kept)
        wanted = int(kept) + (512 + OF_DAEMON_MIB) * MIB // HUGE_PAGE_BYTES
        HUGE_PAGES.write_text(str(wanted))
        if int(HUGE_PAGES.read_text()) < wanted:
            self.skipTest("this machine has no huge pages to spare")
        self.verify(huge_pages=True)

    def test_memory_comes_and_goes_under_load(self):
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES), memory_slots=2)
            had = vm.memory_bytes()
            load = Watched(self, vm, WORK_SECONDS_MAX, WORK_SECONDS_MAX)
            for slot in [0, 1]:
                vm.plug_memory(slot, PLUGGED_BYTES)
                load.wait_answered()
            self.assertEqual(vm.memory_bytes(), had + 2 * PLUGGED_BYTES)
            # Verified from its first byte to its last with buffers in the new memory.
            vm.check(WRITE_AND_VERIFY.format(size=8) + " --offset=64M", timeout=WORK_SECONDS_MAX)
            free = "busybox awk '/Movable/ {z=1} z && /nr_free_pages/ {print $2; exit}' /proc/zoneinfo"
            whole = 2 * PLUGGED_BYTES // 4096
            self.assertLess(int(vm.check(free)), whole - 1000, "the load does not use it")
            for slot in [1, 0]:
                vm.unplug_memory(slot)
                load.wait_answered()
            self.assertEqual(vm.memory_bytes(), had)
            load.end()
            vm.shutdown()
            made.scrub_is_clean()


class Disk(unittest.TestCase):
    def test_it_grows_under_load(self):
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES))
            load = Watched(self, vm, WORK_SECONDS_MAX, WORK_SECONDS_MAX)
            made.engine.ashlar("volume", "resize", "v", "--size", f"{VOLUME_BYTES // MIB + 64}M")
            grown = VOLUME_BYTES + 64 * MIB
            has_grown = f"[ $(blockdev --getsize64 /dev/vda) = {grown} ]"
            vm.check(f"until {has_grown}; do sleep 0.1; done", timeout=WAIT_SECONDS_MAX)
            vm.check(
                WRITE_AND_VERIFY.format(size=16) + f" --offset={grown // MIB - 16}M",
                timeout=WORK_SECONDS_MAX,
            )
            load.end()
            vm.shutdown()
            made.scrub_is_clean()

    def test_what_linux_makes_of_its_limits(self):
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES))
            said = lambda name: vm.check(f"cat /sys/block/vda/{name}").strip()
            stripe = 4 * 64 << 10
            for name, value in {
                "queue/logical_block_size": 512,
                "queue/physical_block_size": 4096,
                "queue/minimum_io_size": 4096,
                "queue/optimal_io_size": stripe,
                "queue/discard_granularity": stripe,
                "queue/discard_max_bytes": 64 * MIB,
                "queue/write_zeroes_max_bytes": 64 * MIB,
                "queue/max_segments": 126,
            }.items():
                self.assertEqual(int(said(name)), value, name)
            # The guest may choose that each write is durable (VIRTIO_BLK_F_CONFIG_WCE).
            self.assertEqual(said("cache_type"), "write back")
            vm.check("echo 'write through' >/sys/block/vda/cache_type")
            self.assertEqual(said("queue/write_cache"), "write through")
            vm.check(WRITE_AND_VERIFY.format(size=4), timeout=WORK_SECONDS_MAX)
            vm.check("echo 'write back' >/sys/block/vda/cache_type")
            self.assertEqual(said("queue/write_cache"), "write back")
            # All of it is given back, in pieces of the stripe.
            vm.check("blkdiscard /dev/vda")
            self.assertEqual(vm.check("busybox cmp -n 67108864 /dev/vda /dev/zero && echo same"), "same\n")
            vm.shutdown()


if __name__ == "__main__":
    unittest.main()
