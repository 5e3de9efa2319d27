"""Goal: a Linux guest does not see that the daemon dies, or that another program takes its place.

Method: a real kernel in QEMU writes and verifies with fio while the daemon is killed and started
again, as a supervisor would, and upgraded. Another reader in the guest says when it was answered:
its longest gap is the pause that the guest saw. ASHLAR_RESUMES says how often, instead of 5 times.

Of the pause after a kill, up to a second is QEMU's: `reconnect=1` looks once a second.
"""

import os
import unittest

from tests.rig import rig
from tests.watched import PACKED, Watched

VOLUME_BYTES = 512 << 20
TIMES = int(os.environ.get("ASHLAR_RESUMES") or 5)
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
            guest = Watched(self, vm, answer_seconds=60, end_seconds=180)
            for _ in range(TIMES):
                with guest.disturbed(BETWEEN_SECONDS):
                    disturb(made.engine)
            guest.end()
            pauses = guest.pauses
            print(f"{what} {TIMES} times ({vm.accel}): the guest waited for", *pauses, "s")
            self.assertLess(max(pauses), seconds_max[vm.accel])
            vm.shutdown()
            made.wait_state("optimal")
            made.scrub_is_clean()


if __name__ == "__main__":
    unittest.main()
