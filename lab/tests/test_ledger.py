"""Goal: what a killed run leaves is found and removed, and nothing else is.

Method: real processes and files; with root also loop devices and mounts, and a run that is killed.
"""

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from unittest import mock

from lab import ledger
from lab.ledger import Ledger, LedgerError, Stayed
from lab.place import Host, fresh_directory, loop, mount, remove, settle, unloop, unmount
from lab.results import Results
from lab.run import Refusal, Run, Session
from lab.study import Study
from lab.tests import needs

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

    def test_a_directory_of_ours_is_one_that_was_not_there(self):
        host = Host(self.ledger)
        one, other = (fresh_directory(host, self.home / "in", 0o711) for _ in range(2))
        self.assertNotEqual(one, other)
        self.assertEqual(one.stat().st_mode & 0o777, 0o711)
        self.assertEqual([debt.what for debt in self.ledger.debts()], [str(one), str(other)])
        remove(host, one)
        self.assertEqual([debt.what for debt in self.ledger.debts()], [str(other)])
        self.assertFalse(one.exists())

    def test_a_run_works_where_nobody_else_has_been(self):
        study = Study.model_validate(
            {"title": "t", "where": "host", "side": [{"kind": "ashlar"}], "pgbench": {}}
        )
        with Session(self.home) as session, mock.patch.object(Run, "missing_sides", lambda _: []):
            runs = [Run(study, Results(self.home / "out"), session, True) for _ in range(2)]
            for run in runs:
                with contextlib.suppress(Refusal):  # this machine may be small
                    run.prepare()
                self.assertFalse(run.work.exists())
            self.assertNotEqual(runs[0].work, runs[1].work)
            runs[0].work.mkdir()  # by somebody else
            self.addCleanup(runs[0].work.rmdir)
            runs[0].screen = mock.Mock()
            with self.assertRaises(FileExistsError), runs[0].cleanup:
                runs[0].begin()
            self.assertTrue(runs[0].work.exists())
            self.assertEqual(session.ledger.debts(), [])

    def test_one_run_at_a_time(self):
        with Session(self.home):
            with self.assertRaisesRegex(Refusal, "another run works"), Session(self.home):
                pass
        with Session(self.home) as session:
            session.ledger.owe("path", str(self.home / "gone"))
            with self.assertRaisesRegex(Refusal, "ashlar-lab clean"):
                session.refuse_leftovers()

    def test_what_a_signal_came_before_is_taken_down_at_the_end(self):
        left = self.home / "left"
        for ends in (KeyboardInterrupt, Refusal, None):
            with contextlib.suppress(KeyboardInterrupt, Refusal), Session(self.home) as session:
                session.ledger.owe("path", str(left))
                left.mkdir()
                if ends:
                    raise ends
            self.assertFalse(left.exists(), ends)
            self.assertEqual(session.ledger.debts(), [])

    @needs(ROOT, "loop devices need root")
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

    @needs(ROOT, "loop devices need root")
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

    def test_what_is_torn_is_not_taken_for_a_line(self):
        self.ledger.owe("path", "/a")
        with open(self.ledger.path, "a") as file:
            file.write("+ path /ho")  # of /home/…: it was not made
        self.assertEqual([debt.what for debt in self.ledger.debts()], ["/a"])
        self.ledger.owe("path", "/b")
        self.assertEqual([debt.what for debt in Ledger(self.ledger.path).debts()], ["/a", "/b"])
        self.assertNotIn("/ho", self.ledger.path.read_text())

    def test_after_another_boot_only_files_are_left(self):
        for kind, what in [("path", "/a"), ("mount", "/b"), ("md", "uuid"), ("nbd", "nbd0 1")]:
            self.ledger.owe(kind, what)
        self.assertEqual(len(self.ledger.debts()), 4)
        other = self.home / "boot_id"
        other.write_text("another\n")
        with mock.patch.object(ledger, "BOOT_ID", other):
            self.assertEqual([debt.what for debt in self.ledger.debts()], ["/a"])
            Ledger(self.ledger.path).owe("mount", "/c")
            self.assertEqual([debt.what for debt in self.ledger.debts()], ["/a", "/c"])

    def test_a_full_disk_is_told(self):
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        with mock.patch.object(ledger.lines, "append", side_effect=full):
            with self.assertRaisesRegex(LedgerError, "No space.*make room"):
                self.ledger.owe("path", "/a")
            self.ledger.settle("path", "/a")  # nothing else is kept from being taken down

    # Of what this machine has none, by programs that write down how they are called

    def fake(self, **programs: str) -> Path:
        """Programs in the PATH, and a /sys/block of our own."""
        called, block = self.home / "called", self.home / "block"
        called.touch()
        block.mkdir()
        for name, text in programs.items():
            path = self.home / name.replace("_", "-")
            path.write_text(f'#!/bin/sh\necho "{path.name} $*" >>{called}\n{text}\n')
            path.chmod(0o755)
        path = f"{self.home}:{os.environ['PATH']}"
        for patch in (
            mock.patch.dict(os.environ, {"PATH": path}),
            mock.patch.object(ledger, "BLOCK", block),
            mock.patch.object(ledger, "POOLS", block),
        ):
            self.enterContext(patch)
        return called

    def test_only_the_array_of_that_uuid_is_stopped(self):
        at = self.home / "block"
        called = self.fake(
            mdadm=f"""case "$*" in
                "--detail --export /dev/md100") echo MD_UUID=theirs;;
                "--detail --export /dev/md101") echo MD_UUID=ours;;
                "--stop /dev/md101") rm -r {at}/md101;;
                *) exit 1;;
            esac"""
        )
        for name in ("md100", "md101"):
            (at / name / "md").mkdir(parents=True)
        self.ledger.owe("md", "ours")
        self.assertEqual(list(self.ledger.clean()), ["removed md ours"])
        self.assertNotIn("--stop /dev/md100", called.read_text())
        self.assertTrue((at / "md100").exists())

    def test_only_the_stripe_of_that_name_is_removed(self):
        at = self.home / "block"
        called = self.fake(dmsetup=f"rm -r {at}/dm-1")
        for device, name in [("dm-0", "theirs"), ("dm-1", "ashlar-lab-1-0")]:
            (at / device / "dm").mkdir(parents=True)
            (at / device / "dm" / "name").write_text(f"{name}\n")
        for name in ("ashlar-lab-1-1", "ashlar-lab-1-0"):  # the other was not made
            self.ledger.owe("dm", name)
        self.assertEqual(list(self.ledger.clean()), ["removed dm ashlar-lab-1-0"])
        self.assertEqual(called.read_text(), "dmsetup remove ashlar-lab-1-0\n")
        self.assertTrue((at / "dm-0").exists())

    def test_an_export_by_nbd_is_known_by_who_serves_it(self):
        called = self.fake(nbd_client=f"rm {self.home}/block/nbd1/pid")
        for name, pid in [("nbd0", 77), ("nbd1", 78)]:
            (self.home / "block" / name).mkdir()
            (self.home / "block" / name / "pid").write_text(f"{pid}\n")
        self.ledger.owe("nbd", "nbd0 76")  # ours was 76, and this is somebody's
        self.ledger.owe("nbd", "nbd1 78")
        self.assertEqual(list(self.ledger.clean()), ["removed nbd nbd1 78"])
        self.assertEqual(called.read_text(), "nbd-client -d /dev/nbd1\n")

    def test_a_pool_is_destroyed(self):
        called = self.fake(zpool=f"rmdir {self.home}/block/ashlar_lab_1_0")
        (self.home / "block" / "ashlar_lab_1_0").mkdir()
        self.ledger.owe("zpool", "ashlar_lab_1_0")
        self.assertEqual(list(self.ledger.clean()), ["removed zpool ashlar_lab_1_0"])
        self.assertEqual(called.read_text(), "zpool destroy -f ashlar_lab_1_0\n")

    def test_a_device_of_ublk_goes_before_what_lies_on_it(self):
        called = self.fake(ublk=f"rmdir {self.home}/block/ublkb3")
        (self.home / "block" / "ublkb3").mkdir()
        self.ledger.owe("ublk", "ublkb3")
        file = self.home / "later"
        file.touch()
        self.ledger.owe("path", str(file))
        done = list(self.ledger.clean())
        self.assertEqual([line.split()[1] for line in done], ["ublk", "path"])
        self.assertEqual(called.read_text(), "ublk del -n 3\n")

    def test_what_hangs_is_told_and_not_waited_for(self):
        self.fake(ublk="exec sleep 100")
        for limit in ("COMMAND_SECONDS_MAX", "GONE_SECONDS_MAX"):
            self.enterContext(mock.patch.object(ledger, limit, 1))
        (self.home / "block" / "ublkb3").mkdir()
        self.ledger.owe("ublk", "ublkb3")
        began = time.monotonic()
        with self.assertRaisesRegex(Stayed, "ublk del.*or a reboot"):
            list(self.ledger.clean())
        self.assertLess(time.monotonic() - began, 30)

    def test_a_zombie_is_gone(self):
        child = subprocess.Popen(["true"])
        deadline = time.monotonic() + 5
        while ledger.process_began(child.pid) is not None:
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)
        child.wait()
