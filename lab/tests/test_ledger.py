"""Goal: what a killed run leaves is found and removed, and nothing else is.

Method: real processes and files; with root also loop devices and mounts, and a run that is killed.
"""

import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

from lab import ledger
from lab.ledger import Ledger
from lab.place import Host, loop, mount, settle, unloop, unmount
from lab.run import Refusal, Session

ROOT = os.geteuid() == 0 and Path("/dev/loop-control").exists()


class Debts(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(directory.cleanup)
        self.home = Path(directory.name)
        self.ledger = Ledger(self.home / "ledger")

    def test_what_is_settled_is_not_owed(self):
        self.ledger.owe("path", "/a b")
        self.ledger.owe("mount", "/c")
        self.ledger.settle("path", "/a b")
        self.assertEqual([debt.what for debt in self.ledger.debts()], ["/c"])

    def test_what_a_killed_shell_has_called_is_ended(self):
        code = (
            "import sys; from pathlib import Path; from lab.ledger import Ledger; "
            "from lab.place import Host; "
            "Host(Ledger(Path(sys.argv[1]))).run('sleep 300; true', timeout=100)"
        )
        ours = subprocess.Popen([sys.executable, "-c", code, str(self.ledger.path)])
        self.addCleanup(ours.kill)
        self.assertTrue(ledger.until(lambda: self.ledger.debts()))
        (debt,) = self.ledger.debts()
        self.assertTrue(ledger.until(lambda: len(ledger.session_of(debt)) == 2))
        ours.kill()
        ours.wait()
        leader = int(debt.what.split()[0])
        self.assertTrue(ledger.until(lambda: ledger.process_began(leader) is None))
        self.assertTrue(ledger.is_there(debt))
        self.assertEqual(list(self.ledger.clean()), [f"removed process {debt.what}"])
        self.assertEqual(ledger.session_of(debt), [])

    def test_a_process_is_ended_and_one_with_its_number_is_not(self):
        sleeper = subprocess.Popen(["sleep", "100"], start_new_session=True)
        self.addCleanup(sleeper.kill)
        began = ledger.process_began(sleeper.pid)
        self.ledger.owe("process", f"{sleeper.pid} {int(began) - 1}")
        self.assertEqual(list(self.ledger.clean()), [])
        self.assertIsNone(sleeper.poll())
        self.ledger.owe("process", f"{sleeper.pid} {began}")
        self.assertEqual(len(list(self.ledger.clean())), 1)
        self.assertIsNotNone(sleeper.wait(5))
        self.assertFalse(self.ledger.path.exists())

    def test_commands_of_a_host_end_with_it_and_owe_nothing(self):
        host = Host(self.ledger)
        running = host.spawn("sleep 100")
        self.assertEqual(len(self.ledger.debts()), 1)
        host.close()
        self.assertFalse(running.running)
        self.assertEqual(self.ledger.debts(), [])

    def test_one_run_at_a_time(self):
        with Session(self.home):
            with self.assertRaisesRegex(Refusal, "another run works"), Session(self.home):
                pass
        with Session(self.home) as session:
            session.ledger.owe("path", str(self.home / "gone"))
            with self.assertRaisesRegex(Refusal, "ashlar-lab clean"):
                session.refuse_leftovers()

    @unittest.skipUnless(ROOT, "loop devices need root")
    def test_loops_and_mounts_are_taken_down_in_order(self):
        host, file, at = Host(self.ledger), str(self.home / "disk"), str(self.home / "at")
        self.addCleanup(host.close)
        host.check(f"truncate -s 64M {file}")
        self.ledger.owe("path", file)
        device = loop(host, file)
        host.check(f"mkfs.ext4 -q {device}")
        mount(host, device, at, "ext4")
        user = subprocess.Popen(["sleep", "100"], cwd=at, start_new_session=True)
        self.addCleanup(user.kill)
        done = list(self.ledger.clean())
        self.assertEqual([line.split()[1] for line in done], ["mount", "loop", "path"])
        self.assertNotIn(at, ledger.mounts())
        self.assertEqual(ledger.loops_of(file), [])
        self.assertIsNotNone(user.wait(5))  # it worked where the mount was

    @unittest.skipUnless(ROOT, "loop devices need root")
    def test_what_is_taken_down_in_order_owes_nothing(self):
        host, file, at = Host(self.ledger), str(self.home / "disk"), str(self.home / "at")
        self.addCleanup(host.close)
        host.check(f"truncate -s 64M {file}")
        device = loop(host, file)
        host.check(f"mkfs.ext4 -q {device}")
        mount(host, device, at, "ext4")
        unmount(host, at)
        unloop(host, device, file)
        settle(host, "path", file)
        self.assertEqual(self.ledger.debts(), [])
        self.assertEqual(ledger.loops_of(file), [])

    def test_a_zombie_is_gone(self):
        child = subprocess.Popen(["true"])
        deadline = time.monotonic() + 5
        while ledger.process_began(child.pid) is not None:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)
        child.wait()
