"""Goal: every side that this host can run keeps data while a drive goes and a spare comes, and
leaves nothing behind, also when it is interrupted in the middle of a load.

Method: small drive files; each side by itself under a load of fio, and the command as it is, in a
process that is sent signals. Takes root and the programs of `make lab`, else it is skipped; in CI
it fails.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from dataclasses import replace
from pathlib import Path

from lab import host, ledger, sides, study
from lab.ledger import Ledger
from lab.loads import LoadError
from lab.loads.fio import Fio
from lab.nvme import NvmeDrives
from lab.place import Host
from lab.results import Cell, Results
from lab.sides import ashlar
from lab.tests import needs

SECONDS_MAX = 120
STUDY = """
title = "test"
where = "host"
states = ["healthy", "degraded", "rebuilding"]
unequal = true
repeats = 1
[drives]
size = "320M"
[[side]]
kind = "ashlar"
[[side]]
kind = "btrfs"
[[side]]
kind = "raw"
[fio]
seconds = 2
warm_seconds = 1
size = "128M"
[[fio.patterns]]
name = "mixed"
rw = "randrw"
depth = 4
"""
ROOT = os.geteuid() == 0 and Path("/dev/loop-control").exists()


@needs(ROOT, "loop devices and mounts need root")
class OnHost(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(directory.cleanup)
        self.home = Path(directory.name)
        self.path = self.home / "test.toml"
        self.path.write_text(STUDY)
        self.cache = self.home / "cache"
        self.addCleanup(self.nothing_is_left)  # after all that is taken down in a test

    def nothing_is_left(self):
        beneath = [at for at in ledger.mounts() if at.startswith(str(self.home))]
        self.assertEqual(beneath, [])
        drives = [path for path in self.cache.rglob("*.img") if ledger.loops_of(str(path))]
        self.assertEqual(drives, [])

    # One side after the other, by itself

    def side(self, name: str, *more: str) -> None:
        changes = ["array.count=2", "array.data=2", *more]
        made = study.only(study.load(self.path, changes=changes), [name])
        drives = made.drives.model_copy(update={"directory": str(self.cache / "drives")})
        made = made.model_copy(update={"drives": drives})
        work = self.home / "work"
        work.mkdir()
        ashlar.copied(work)
        place = Host(Ledger(self.cache / "ledger"))
        self.addCleanup(place.close)
        side = sides.make(made.side[0], made, place, work)
        if why := side.missing():
            self.skipTest(why)
        where = host.OnHost(made, work, place)
        self.addCleanup(where.close)
        where.start(lambda what: None)
        arrays, spares = where.drives()
        self.addCleanup(side.stop)
        size = min(side.capacity_bytes(arrays[0]) * 9 // 10, 256 << 20) >> 20 << 20
        disks = [replace(disk, bytes=size) for disk in side.start(arrays, spares, [size] * 2)]
        loads = [Fio(seat, made.fio) for seat in where.seats(disks)]
        for load in loads:
            self.addCleanup(load.close)
            load.prepare(lambda what: None)
            self.measured(load)
        self.assertEqual(set(side.states()), {"healthy"})
        if side.protection.losses:
            self.loses_a_drive_of_each(side, loads)
        self.assertTrue(side.settings())
        for load in loads:
            load.close()
        side.stop()
        # Another round finds nothing of this one.
        side = sides.make(made.side[0], made, place, work)
        self.addCleanup(side.stop)
        arrays, spares = where.drives()
        side.start(arrays, spares, [size] * 2)
        self.assertEqual(set(side.states()), {"healthy"})
        side.stop()
        where.close()
        self.assertEqual(place.ledger.debts(), [])

    def loses_a_drive_of_each(self, side, loads: list[Fio]) -> None:
        side.pull(0, 0)
        self.assertEqual(side.states(), ["degraded", "healthy"])
        side.pull(1, 0)
        self.assertEqual(side.states(), ["degraded", "degraded"])
        for load in loads:
            self.verified(side, load)
        side.replace(0, 0)
        side.replace(1, 0)
        self.wait_healthy(side)
        for load in loads:
            self.verified(side, load)

    def verified(self, side, load: Fio) -> None:
        """RAID 5 of btrfs may take no writes with a drive out, or not read what it took."""
        try:
            found = load.verify()
        except LoadError as wrong:
            self.assertIn("is not what is read", str(wrong))
            found = [str(wrong)]
        self.assertTrue(not found or side.name == "btrfs", found)

    def measured(self, load: Fio) -> None:
        directory = self.home / "cell"
        directory.mkdir(exist_ok=True)
        load.begin(Cell(0, 0, "s", "healthy", "mixed", 0, 1))
        found = load.finish(directory)
        self.assertGreater(found.total, 10)
        said = json.loads((directory / f"{load.seat.name}.json").read_text())
        its = said["jobs"][0]
        self.assertEqual(found.total, its["read"]["total_ios"] + its["write"]["total_ios"])
        self.assertIn("99.950000", its["read"]["lat_ns"]["percentile"])
        load.verify()

    def wait_healthy(self, side) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while set(now := side.states()) != {"healthy"}:
            for state in now:
                self.assertRegex(state, r"^(healthy|rebuilding [\d.]+%)$")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.1)

    def test_files_of_others_stay_as_they_are(self):
        """Drive files are made in a directory of their own, inside of the one that is named."""
        theirs = self.home / "my images, and more"
        theirs.mkdir()
        for name in ("d0.img", "nvme0.img"):
            (theirs / name).write_text("mine")
        changes = ["drives.size=4M", "array.data=1", f"drives.directory={theirs}"]
        made = study.load(self.path, changes=changes)
        place = Host(Ledger(self.cache / "ledger"))
        self.addCleanup(place.close)
        where = host.OnHost(made, self.home, place)
        where.start(lambda what: None)
        arrays, spares = where.drives()
        paths = [Path(drive.path) for drive in (*arrays[0], *spares)]
        self.assertTrue(all(path.stat().st_size == 4 << 20 for path in paths))
        self.assertEqual({path.parent.parent for path in paths}, {theirs})
        nvme = NvmeDrives(place, where.directory, 1, 4 << 20, 1)
        nvme.make(0)
        self.assertEqual(nvme.file(0).stat().st_size, 4 << 20)
        where.close()
        self.assertEqual(sorted(path.name for path in theirs.iterdir()), ["d0.img", "nvme0.img"])
        self.assertEqual((theirs / "d0.img").read_text(), "mine")
        self.assertEqual(place.ledger.debts(), [])

    def test_a_directory_that_qemu_and_fio_take_for_two_is_refused(self):
        run = self.lab("check", str(self.path), "--sides", "raw", "--set", "drives.directory=/a,b")
        said, _ = run.communicate(timeout=SECONDS_MAX)
        self.assertEqual(run.returncode, 1)
        self.assertIn("take another directory", said)

    def test_ashlar(self):
        self.side("ashlar")

    def test_ashlar_mirrors(self):
        self.side("ashlar", "array.copies=2")

    def test_btrfs(self):
        self.side("btrfs")

    def test_btrfs_mirrors(self):
        self.side("btrfs", "array.copies=2")

    def test_raw(self):
        self.side("raw")

    # The command

    def lab(self, *words: str) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "lab.main", *words],
            env=os.environ | {"ASHLAR_CACHE": str(self.cache)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def started(self, until: str, name: str = "out") -> tuple[subprocess.Popen, Path]:
        """A run that has come as far as to say `until`, with a load that is not over before it is
        sent a signal."""
        out = self.home / name
        words = ["--sides", "raw", "--set", "fio.seconds=8", "--no-report", "--out", str(out)]
        run = self.lab("run", str(self.path), *words)
        self.addCleanup(run.stdout.close)
        self.addCleanup(run.kill)
        said = ""
        for line in run.stdout:
            said += line
            if until in line:
                return run, out
        run.wait(SECONDS_MAX)
        self.fail(f"it ended with status {run.returncode}:\n{said}")

    def left(self) -> list[str]:
        return [debt.what for debt in Ledger(self.cache / "lab" / "ledger").debts()]

    def test_an_interrupted_run_leaves_nothing_and_goes_on(self):
        for number in (signal.SIGINT, signal.SIGTERM):
            run, out = self.started("healthy, mixed", f"out-{number}")
            run.send_signal(number)
            self.assertEqual(run.wait(SECONDS_MAX), 130)
            self.assertEqual(self.left(), [])
            self.assertEqual(list(Results.open(out).cells), [])
        again = self.lab("run", "--resume", str(out), "--no-report")
        said, _ = again.communicate(timeout=SECONDS_MAX)
        self.assertEqual(again.returncode, 0, said)
        (cell,) = Results.open(out).cells
        self.assertGreater(cell.operations, 0)
        rows = Results.open(out).seconds_of(cell)
        seconds = [int(row["second"]) for row in rows]
        self.assertIn(0, seconds)  # not each of them, where the machine was busy
        self.assertEqual(seconds, list(range(seconds[0], seconds[0] + len(seconds))))

    def test_a_killed_run_is_cleaned_up_after(self):
        run, _ = self.started("healthy, mixed")
        run.kill()
        run.wait(SECONDS_MAX)
        self.assertTrue(self.left())
        check = self.lab("check", str(self.path))
        said, _ = check.communicate(timeout=SECONDS_MAX)
        self.assertEqual(check.returncode, 1)
        self.assertIn("ashlar-lab clean", said)
        clean = self.lab("clean")
        said, _ = clean.communicate(timeout=SECONDS_MAX)
        self.assertEqual(clean.returncode, 0, said)
        self.assertEqual(self.left(), [])

    def test_refusals_name_all_problems_and_start_nothing(self):
        out = self.home / "out"
        words = ["--set", "drives.size=100T", "--set", "unequal=false", "--out", str(out)]
        run = self.lab("run", str(self.path), *words)
        said, _ = run.communicate(timeout=SECONDS_MAX)
        self.assertEqual(run.returncode, 1)
        self.assertIn("drives.size=1G", said)
        self.assertIn("--unequal", said)
        self.assertFalse(out.exists())
        out.mkdir()
        (out / "raw.json").write_text("{}")  # of another study
        run = self.lab("run", str(self.path), "--out", str(out))
        said, _ = run.communicate(timeout=SECONDS_MAX)
        self.assertEqual(run.returncode, 1)
        self.assertIn("is not empty", said)
        for words in (["run", "--nonsense"], ["run"], ["run", "x", "--resume", "y"], [],
                      ["run", "--where", "host", "--resume", "y"],
                      ["check", "fio-vm", "--where", "there"]):  # fmt: skip
            usage = self.lab(*words)
            usage.communicate(timeout=SECONDS_MAX)
            self.assertEqual(usage.returncode, 2, words)


if __name__ == "__main__":
    unittest.main()
