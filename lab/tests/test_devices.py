"""Goal: of a user's drives, none is overwritten that somebody uses, that carries anything and was
not given away, or that is another one than it was.

Method: loop devices of our own, with root; else it is skipped, but in CI fails.
"""

import contextlib
import io
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from lab import devices, host, ledger, main, plan, study
from lab.ledger import Ledger
from lab.place import Host
from lab.results import Results
from lab.run import Run
from lab.study import Drives
from lab.tests import needs

ROOT = os.geteuid() == 0 and Path("/dev/loop-control").exists()
MIB = 1 << 20
STUDY = """
title = "test"
where = "host"
drives = {kind = "block", paths = ["A", "B", "C"]}
array = {data = 2, parity = 1}
unequal = true
[[side]]
kind = "raw"
[fio]
patterns = [{name = "mixed", rw = "randrw"}]
"""


def done(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


@needs(ROOT, "loop devices need root")
class OfAUser(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(directory.cleanup)
        self.home = Path(directory.name)
        self.first, self.second, self.third = (self.drive(name) for name in "abc")

    def drive(self, name: str) -> str:
        file = self.home / name
        file.touch()
        os.truncate(file, 512 * MIB)
        device = done("losetup", "--find", "--show", str(file))
        self.addCleanup(done, "losetup", "--detach", device)
        return device

    def problem(self, *paths: str, overwrite: bool = True) -> str:
        return "\n".join(devices.problems(paths, overwrite))

    def test_what_is_empty_and_free_may_be_taken(self):
        self.assertEqual(self.problem(self.first, self.second, overwrite=False), "")

    def test_what_carries_anything_has_to_be_given_away(self):
        done("mkfs.ext4", "-q", self.first)
        self.assertIn("carries ext4: --overwrite", self.problem(self.first, overwrite=False))
        self.assertEqual(self.problem(self.first), "")
        with open(self.second, "r+b") as drive:  # as a label of whom no tool knows
            drive.seek(512 * MIB - 4096)
            drive.write(b"mine")
        self.assertIn("carries data", self.problem(self.second, overwrite=False))

    def test_what_is_in_use_is_never_taken(self):
        done("mkfs.ext4", "-q", self.first)
        at = self.home / "at"
        at.mkdir()
        done("mount", self.first, str(at))
        self.addCleanup(done, "umount", str(at))
        self.assertIn("in use: it is mounted", self.problem(self.first))
        held = os.open(self.second, os.O_RDONLY | os.O_EXCL)
        self.addCleanup(os.close, held)
        self.assertIn("in use", self.problem(self.second))
        self.assertIn(f"{self.second} is in use", self.run_study("--overwrite"))

    def test_a_drive_is_named_once(self):
        link = self.home / "by-id"
        link.symlink_to(self.first)
        self.assertIn("are one drive", self.problem(self.first, str(link)))

    def test_what_is_no_drive_is_refused_and_not_made(self):
        path = self.home / "nvme9n1"
        self.assertIn("no block device", self.problem(str(path)))
        with self.assertRaisesRegex(study.StudyError, "no block device"):
            plan.measured(str(path), overwrite=False)
        self.assertFalse(path.exists())

    def test_what_is_in_use_is_not_measured_by_writing(self):
        held = os.open(self.first, os.O_RDONLY | os.O_EXCL)
        self.addCleanup(os.close, held)
        with self.assertRaisesRegex(study.StudyError, "in use"):
            plan.measured(self.first, overwrite=True)

    def test_a_run_goes_on_with_the_same_drives_only(self):
        was = devices.identified(Drives(kind="block", paths=(self.first,)))
        self.assertEqual(devices.other_drives(was), [])
        other = self.home / "boot_id"
        other.write_text("another")
        with mock.patch.object(ledger, "BOOT_ID", other):  # its name may be another's by now
            (problem,) = devices.other_drives(was)
        self.assertIn("put the drives where they were", problem)

    def test_wiping_refuses_what_somebody_has_taken_meanwhile(self):
        place = Host(Ledger(self.home / "ledger"))
        self.addCleanup(place.close)
        drives = Drives(kind="block", paths=(self.first,))
        where = host.OnHost(mock.Mock(drives=drives), self.home, place)
        done("mkfs.ext4", "-q", self.first)
        at = self.home / "at"
        at.mkdir()
        done("mount", self.first, str(at))
        self.addCleanup(subprocess.run, ["umount", "--quiet", str(at)], capture_output=True)
        with self.assertRaisesRegex(host.VmError, "in use"):
            where.drive(0)
        done("umount", str(at))
        self.assertEqual(devices.labels(self.first), ["ext4"])
        self.assertEqual(where.drive(0).bytes, 512 * MIB)
        self.assertFalse(devices.carries_anything(self.first))

    # The command

    def run_study(self, *words: str) -> str:
        path = self.home / "test.toml"
        text = STUDY
        for name, device in zip("ABC", (self.first, self.second, self.third), strict=True):
            text = text.replace(f'"{name}"', f'"{device}"')
        path.write_text(text)
        said = io.StringIO()
        with (
            mock.patch.dict(os.environ, {"ASHLAR_CACHE": str(self.home / "cache")}),
            contextlib.redirect_stderr(said),
            contextlib.redirect_stdout(said),
        ):
            main.main(["check", str(path), *words])
        return said.getvalue()

    def test_the_command_asks_first(self):
        self.assertIn("nothing stands in its way", self.run_study())
        done("mkfs.ext4", "-q", self.second)
        self.assertIn(f"{self.second} carries ext4: --overwrite", self.run_study())
        self.assertIn("nothing stands in its way", self.run_study("--overwrite"))
        self.assertEqual(devices.labels(self.second), ["ext4"])

    def test_what_a_run_has_left_on_its_own_drives_is_no_hindrance_to_it(self):
        paths = (self.first, self.second, self.third)
        drives = devices.identified(Drives(kind="block", paths=paths, directory="/d"))
        session, results = mock.Mock(), Results(self.home)

        def problems(drives: Drives) -> str:
            made = Run(mock.Mock(drives=drives), results, session, False)
            return "\n".join(made.drive_problems())

        done("mkfs.ext4", "-q", self.first)
        self.assertIn("carries ext4", problems(drives))  # nothing was begun: it is somebody's
        (self.home / "machine.json").write_text("{}")
        self.assertEqual(problems(drives), "")
        held = os.open(self.second, os.O_RDONLY | os.O_EXCL)
        self.assertIn(f"{self.second} is in use", problems(drives))
        os.close(held)
        another = drives.model_copy(update={"identities": ("x", *drives.identities[1:])})
        self.assertIn("carries ext4", problems(another))
        self.assertIn("put the drives where they were", problems(another))
        older = drives.model_copy(update={"identities": ()})  # which did not write them down
        self.assertIn("carries ext4", problems(older))

    def test_a_study_keeps_what_its_drives_are(self):
        made = devices.identified(Drives(kind="block", paths=(self.first, self.second)))
        kept = json.loads(made.model_dump_json())["identities"]
        self.assertEqual(len(set(kept)), 2)
        self.assertIn(f"{512 * MIB} bytes", kept[0])


if __name__ == "__main__":
    unittest.main()
