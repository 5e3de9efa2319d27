"""A guest that writes, reads and verifies all the time, and the longest that it waited for that.

Another reader beside it says when it was answered: the longest gap around a disturbance is the
pause that the guest saw. How long it waits while nothing disturbs it is the machine's doing.
"""

import contextlib
import time
import unittest

from demo.vm import Vm

# Writes everything in random order, reads it back and verifies, again and again.
LOAD = (
    "while ! [ -e /run/enough ]; do fio --name=v --filename=/dev/vda --direct=1 "
    "--ioengine=io_uring --verify=crc32c --verify_fatal=1 --iodepth=32 --rw=randwrite "
    "--bsrange=512-64k --blockalign=512 --size=24M --randrepeat=0 || exit 1; done"
)
# The guest's clock, in seconds, after each read that was answered.
PROBE = (
    "while ! [ -e /run/enough ]; do "
    "dd if=/dev/vda of=/dev/null bs=4k count=1 skip=100000 iflag=direct status=none || exit 1; "
    "cut -d' ' -f1 /proc/uptime; done"
)
PACKED = ["-global", "vhost-user-blk-pci.packed=on"]  # rings, as options of QEMU


class Watched:
    def __init__(self, test: unittest.TestCase, vm: Vm, answer_seconds: float, end_seconds: float):
        self.test, self.vm = test, vm
        self.answer_seconds, self.end_seconds = answer_seconds, end_seconds
        self.answered: list[float] = []
        self.pauses: list[float] = []
        self.undisturbed = 0.0  # the longest gap before any of them
        probe = vm.spawn(PROBE, on_line=lambda line: self.answered.append(float(line)))
        self.running = [vm.spawn(LOAD), probe]

    @contextlib.contextmanager
    def disturbed(self, quiet_seconds: float):
        """What is done meanwhile disturbs it, after so long without; it goes on afterwards."""
        self.wait_answered()
        before = len(self.answered) - 1
        time.sleep(quiet_seconds)
        self.wait_answered()
        between = len(self.answered) - 1
        yield
        self.wait_answered()
        self.undisturbed = max(self.undisturbed, longest_gap(self.answered[before : between + 1]))
        self.pauses.append(longest_gap(self.answered[between:]))

    def end(self) -> None:
        """It has verified all, and seen no error."""
        self.vm.check("touch /run/enough")
        for running in self.running:
            output = running.wait(self.end_seconds)
            self.test.assertEqual(output.rc, 0, output.text[-2000:])
        said = self.vm.check("dmesg")
        self.test.assertNotRegex(said, "(?i)I/O error|blocked for more than|virtio.*(fail|error)")

    def wait_answered(self) -> None:
        count = len(self.answered) + 5
        deadline = time.monotonic() + self.answer_seconds
        while len(self.answered) < count:
            self.test.assertLess(time.monotonic(), deadline, "the guest is not answered")
            time.sleep(0.05)


def longest_gap(times: list[float]) -> float:
    return round(max(b - a for a, b in zip(times, times[1:])), 2)
