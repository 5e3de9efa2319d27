"""Goal: a guest's disk is right wherever its memory lies, and while guest and disk grow.

Method: a real kernel in QEMU that writes, reads back and verifies. The memory that is plugged is
for programs alone (`online_movable`), which get it before any other: the load's buffers lie there.
"""

import os
import shutil
import tempfile
import unittest
from pathlib import Path

from demo import child
from tests.rig import rig
from tests.test_guest import VOLUME_BYTES, WRITE_AND_VERIFY
from tests.watched import Watched

MIB = 1 << 20
GUEST_BYTES = 512 * MIB
PLUGGED_BYTES = 256 * MIB
HUGE_PAGE_BYTES = 2 * MIB
OF_DAEMONS_BYTES = 128 * MIB  # their buffers are of huge pages, too, where there are any
HUGE_PAGES = Path("/proc/sys/vm/nr_hugepages")
# Of programs, in the memory that is plugged.
USED_PAGES = (
    "busybox awk '/^Node/ {its = /Movable/} its && /nr_zone_(in)?active_anon/ {n += $2} "
    "END {print n + 0}' /proc/zoneinfo"
)
WORK_SECONDS_MAX = 120
WAIT_SECONDS_MAX = 30


class Memory(unittest.TestCase):
    def verify(self, **where) -> None:
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES), **where)
            vm.check(WRITE_AND_VERIFY.format(size=16), timeout=WORK_SECONDS_MAX)
            vm.shutdown()

    def verify_in_file(self, directory: str, kinds: set[str]) -> None:
        """Its memory is a file there, if that is a file system of one of these kinds."""
        kind = child.run(["stat", "-f", "-c", "%T", directory], 10).stdout.strip()
        if kind not in kinds:
            self.skipTest(f"{directory} is of the kind {kind}")
        if shutil.disk_usage(directory).free < 2 * GUEST_BYTES:
            self.skipTest(f"there is no room in {directory}")
        with tempfile.TemporaryDirectory(prefix="ashlar-", dir=directory) as home:
            self.verify(memory_path=Path(home) / "memory")

    def test_a_file_in_memory(self):
        self.verify_in_file("/dev/shm", {"tmpfs"})

    def test_a_file_on_a_disk(self):
        self.verify_in_file("/var/tmp", {"ext2/ext3", "xfs", "btrfs", "f2fs", "zfs"})

    def test_huge_pages(self):
        if os.geteuid() != 0 or not HUGE_PAGES.exists():
            self.skipTest("only root reserves huge pages, where there are any")
        kept = HUGE_PAGES.read_text()
        self.addCleanup(HUGE_PAGES.write_text, kept)
        wanted = int(kept) + (GUEST_BYTES + OF_DAEMONS_BYTES) // HUGE_PAGE_BYTES
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
            # Its next round has its buffers, of some MiB, in the new memory.
            vm.check(f"until [ $({USED_PAGES}) -ge 512 ]; do sleep 0.1; done", WORK_SECONDS_MAX)
            load.wait_answered()
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
            vm.check("blkdiscard /dev/vda")
            vm.check(f"busybox cmp -n {64 * MIB} /dev/vda /dev/zero")
            vm.shutdown()


if __name__ == "__main__":
    unittest.main()
