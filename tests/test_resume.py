"""Goal: a Linux guest does not see that the daemon dies, or that another program takes its place.

Method: a real kernel in QEMU writes and verifies with fio while the daemon is killed and started
again, as a supervisor would, and upgraded. Another reader in the guest says when it was answered:
its longest gap is the pause that the guest saw. ASHLAR_RESUMES says how often, instead of 5 times.

Of the pause after a kill, up to a second is QEMU's: `reconnect=1` looks once a second.
"""

import os
import time
import unittest

from tests.rig import rig

VOLUME_BYTES = 512 << 20
TIMES = int(os.environ.get("ASHLAR_RESUMES") or 5)
PACKED = ["-global", "vhost-user-blk-pci.packed=on"]
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
# Emulated, the guest itself stands still for long now and then.
KILL_SECONDS_MAX = {"kvm": 3, "tcg": 8}
UPGRADE_SECONDS_MAX = {"kvm": 1, "tcg": 4}
BETWEEN_SECONDS = 1.5


class Resume(unittest.TestCase):
    def test_killed(self):
        self.go_on("killed", [], KILL_SECONDS_MAX, self.kill)

    def test_killed_with_packed_rings(self):
        self.go_on("killed, packed rings", PACKED, KILL_SECONDS_MAX, self.kill)

    def test_upgraded(self):
        self.go_on("upgraded", [], UPGRADE_SECONDS_MAX, self.upgrade)

    def test_upgraded_with_packed_rings(self):
        self.go_on("upgraded, packed rings", PACKED, UPGRADE_SECONDS_MAX, self.upgrade)

    def kill(self, engine):
        engine.kill()
        engine.start()

    def upgrade(self, engine):
        pid = engine.daemon.pid
        print(engine.ashlar("upgrade").strip())
        self.assertEqual(engine.show("status")["pid"], pid)

    def go_on(self, what, options, seconds_max, disturb):
        with rig() as made:
            vm = made.boot(made.make_export("5", 5, VOLUME_BYTES), options)
            answered = []
            load = vm.spawn(LOAD)
            probe = vm.spawn(PROBE, on_line=lambda line: answered.append(float(line)))
            pauses = []
            for _ in range(TIMES):
                self.wait_answered(answered, len(answered) + 5)
                before = len(answered) - 1
                time.sleep(BETWEEN_SECONDS)
                disturb(made.engine)
                self.wait_answered(answered, len(answered) + 5)
                pauses.append(longest_gap(answered[before:]))
            vm.check("touch /run/enough")
            for running in [load, probe]:
                output = running.wait(180)
                self.assertEqual(output.rc, 0, output.text[-2000:])
            said = vm.check("dmesg")
            self.assertNotRegex(said, "(?i)I/O error|blocked for more than|virtio.*(fail|error)")
            print(f"{what} {TIMES} times ({vm.accel}): the guest waited for", *pauses, "s")
            self.assertLess(max(pauses), seconds_max[vm.accel])
            vm.shutdown()
            made.wait_state("optimal")
            made.scrub_is_clean()

    def wait_answered(self, answered, count):
        deadline = time.monotonic() + 60
        while len(answered) < count:
            self.assertLess(time.monotonic(), deadline, "the guest is not answered")
            time.sleep(0.05)


def longest_gap(times):
    return round(max(after - before for before, after in zip(times, times[1:])), 2)


if __name__ == "__main__":
    unittest.main()
