"""Goal: `raw` as RAID 0 lies on all drives of an array, is made by what the kernel has, or refused
with what it lacks, and leaves nothing behind.

Method: commands that are written down, for the order of things and for failures; and the guest of
`--where guest`, whose kernel has both md and the device mapper, with real arrays of both.
"""

import os
import shutil
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from demo.vm import VmError
from lab import sides, study
from lab import run as lab_run
from lab.in_guest import InGuest
from lab.ledger import Ledger
from lab.place import Host, Output
from lab.side import Drive
from lab.sides import raid0
from lab.tests import needs

MIB = 1 << 20
WORDS = {"title": "t", "where": "host", "side": [{"kind": "raw", "raid0": True}],
         "array": {"data": 2}, "fio": {"patterns": [{"name": "p", "rw": "randread"}]}}  # fmt: skip


class OnFiles(Host):
    """A host whose commands are written down, with a kernel that lacks what `lacks` names. A loop
    device that a stripe holds cannot go: who waits for that waits for ever, and is refused."""

    def __init__(self, owed: Ledger, *lacks: str):
        super().__init__(owed)
        self.lacks, self.loops, self.stripes = lacks, 0, {}
        self.done: list[str] = []

    def run(self, command: str, timeout: float = 60) -> Output:
        status, text = 0, ""
        words = command.split()
        if command.startswith("[ -b "):
            status = 1
        elif any(f"modprobe -q {each}" in command for each in self.lacks):
            status = 1
        elif "command -v" in command:
            text = "\n".join(each for each in self.lacks if f" {each};" in command)
        elif "losetup --find" in command:
            self.loops += 1
            text = f"/dev/loop{self.loops}\n"
        elif "/loop/dio" in command:
            text = "1\n"
        elif command.startswith("dmsetup create"):
            self.stripes[words[2]] = command
            status = int("create" in self.lacks)
        elif "-o blkdevname" in command:
            text = f"dm-{list(self.stripes).index(words[-1])}\n"
        elif "dmsetup remove" in command:
            self.done.append("remove")
            del self.stripes[words[2]]
        elif "--detach" in command:
            self.done.append("detach")
            status = int(bool(self.stripes))
        elif command.startswith("dmsetup status"):
            text = "0 8192 striped 3 7:0 7:1 7:2 1 AAA\n"
        return Output(status, text.encode())


class Made(unittest.TestCase):
    def setUp(self):
        home = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(home.cleanup)
        self.home = Path(home.name)

    def side(self, *lacks: str, **words) -> tuple[raid0.Raid0, OnFiles]:
        place = OnFiles(Ledger(self.home / "ledger"), *lacks)
        self.addCleanup(place.close)
        whole = study.Study.model_validate(WORDS | words)
        return sides.make(whole.side[0], whole, place, self.home), place

    def drives(self, arrays: int, each: int) -> list[list[Drive]]:
        names = [[f"d{array}-{at}" for at in range(each)] for array in range(arrays)]
        return [[Drive(name, f"/{name}", 64 * MIB) for name in its] for its in names]

    def test_it_takes_what_the_kernel_has(self):
        for lacks, way in [((), "md"), (("dm-mod",), "md"), (("mdadm",), "the device mapper"),
                           (("raid0",), "the device mapper")]:  # fmt: skip
            side, _ = self.side(*lacks)
            self.assertIsNone(side.missing())
            with mock.patch.multiple(raid0.Mdraid, start=mock.Mock(), stop=mock.Mock()):
                side.start(self.drives(1, 3), [], [MIB])
                side.stop()
            self.assertEqual(side.way.called, way, lacks)

    def test_what_is_missing_is_named_before_anything_is_started(self):
        for lacks, said in [
            (("raid0", "dm-mod"), "modprobe dm-mod fails.*modprobe raid0 fails"),
            (("raid0", "dmsetup"), "apt-get install dmsetup.*modprobe raid0 fails"),
            (("mdadm", "dm-mod"), "modprobe dm-mod fails.*apt-get install mdadm"),
        ]:
            side, place = self.side(*lacks)
            self.assertRegex(side.missing(), said)
            with self.assertRaisesRegex(raid0.SideError, said):
                side.start(self.drives(1, 3), [], [MIB])
            self.assertEqual((place.loops, place.ledger.debts()), (0, []))
        paced = {"kind": "model", "iops": 1000, "mbps": 50}
        self.assertIn("for the side `ashlar` alone", self.side(drives=paced)[0].missing())

    def test_a_run_refuses_it_or_leaves_it_out(self):
        side, _ = self.side("raid0", "dm-mod")
        for skips, problems in [(False, 1), (True, 0)]:
            run = mock.Mock(sides={"raw": side, "ashlar": mock.Mock(missing=lambda: None)})
            run.skip_missing, run.skipped = skips, {}
            self.assertEqual(len(lab_run.Run.missing_sides(run)), problems)
            self.assertIn("modprobe dm-mod fails", run.skipped["raw"])

    def test_stripes_go_before_their_loop_devices(self):
        side, place = self.side("raid0", array={"count": 2, "data": 2})
        disks = side.start(self.drives(2, 3), [], [2 * MIB] * 2)
        self.assertEqual([disk.device for disk in disks], ["/dev/dm-0", "/dev/dm-1"])
        # `clean` takes down the last first, too
        kinds = [debt.kind for debt in place.ledger.debts()]
        self.assertEqual(kinds, ["loop"] * 6 + ["dm"] * 2)
        self.assertEqual(side.states(), ["healthy"])
        self.assertIn("3 of each array as one (RAID 0)", side.settings()["drives"])
        for _ in range(2):
            side.stop()
            self.assertEqual(place.done, ["remove"] * 2 + ["detach"] * 6)
        self.assertEqual(place.ledger.debts(), [])

    def test_one_that_is_not_made_owes_nothing(self):
        side, place = self.side("raid0", "create")
        with self.assertRaisesRegex(VmError, "dmsetup create"):
            side.start(self.drives(1, 3), [], [MIB])
        side.stop()
        self.assertEqual(place.done, ["remove"] + ["detach"] * 3)
        self.assertEqual(place.ledger.debts(), [])

    def test_disks_of_one_array_follow_each_other_on_all_of_its_drives(self):
        vms = {"where": "vm", "vm": {"count": 6}, "array": {"count": 2, "data": 2}}
        side, place = self.side("raid0", **vms)
        drives = self.drives(2, 3)
        size = side.capacity_bytes(drives[0]) // 3
        side.start(drives, [], [size] * 6)
        tables = [command.split("'")[1].split() for command in place.stripes.values()]
        for array in range(2):
            members, end = [f"/dev/loop{array * 3 + at + 1}" for at in range(3)], 0
            for words in tables[array::2]:
                self.assertEqual(words[2:5], ["striped", "3", "128"])
                self.assertEqual(words[5::2], members)
                self.assertEqual(set(words[6::2]), {str(end)})
                sectors = int(words[1])
                self.assertGreaterEqual(sectors * 512, size)
                self.assertEqual(sectors % (3 * 128), 0)
                end += sectors // 3
            self.assertLessEqual(end * 512, 64 * MIB)

    def test_a_drive_that_failed_is_seen(self):
        self.assertTrue(raid0.is_whole("0 8192 striped 3 7:0 7:1 7:2 1 AAA\n"))
        self.assertFalse(raid0.is_whole("0 8192 striped 3 7:0 7:1 7:2 1 ADA\n"))

    def test_it_protects_as_little_as_one_drive(self):
        side, _ = self.side()
        alone = {"side": [{"kind": "raw"}]}
        self.assertEqual(side.protection, self.side(**alone)[0].protection)
        self.assertEqual(side.protection.losses, 0)


@needs(os.geteuid() == 0, "takes root")
@needs(shutil.which("qemu-system-x86_64"), "takes QEMU")
class InAGuest(unittest.TestCase):
    def setUp(self):
        home = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(home.cleanup)
        words = WORDS | {"where": "guest", "drives": {"kind": "nvme", "size": 64 * MIB}}
        self.study = study.Study.model_validate(words)
        self.work = Path(home.name) / "work"
        self.work.mkdir()
        owed = Ledger(Path(home.name) / "ledger")
        self.host = Host(owed)
        self.addCleanup(lambda: self.assertEqual(owed.debts(), []))
        self.addCleanup(self.host.close)
        self.where = InGuest(self.study, self.work, self.host)
        self.addCleanup(self.where.close)

    def test_both_ways_stripe_over_all_drives_and_leave_nothing(self):
        self.where.start(lambda what: None)
        for lacks_md, way in [(False, "md"), (True, "the device mapper")]:
            side = sides.make(self.study.side[0], self.study, self.where.place, self.work)
            self.addCleanup(side.stop)
            if lacks_md:
                side.md.missing = lambda: "there is none"
            self.assertIsNone(side.missing())
            self.striped(side)
            self.assertEqual(side.way.called, way)
            # by these `clean` finds what a run that was killed has left on the host
            names = self.where.place.run("cat /sys/block/dm-*/dm/name 2>/dev/null").text
            self.assertEqual(names.split(), side.mapper.names)
            self.stopped(side)
        self.one_drive()

    def one_drive(self) -> None:
        """Of which mdadm makes an array only if it is told twice."""
        array = study.Array(data=1, parity=0)
        whole = self.study.model_copy(update={"array": array})
        side = sides.make(whole.side[0], whole, self.where.place, self.work)
        self.addCleanup(side.stop)
        arrays, _ = self.where.drives()
        side.start([arrays[0][:1]], [], [32 * MIB])
        self.assertEqual((side.way.called, side.states()), ("md", ["healthy"]))
        self.stopped(side)

    def stopped(self, side: raid0.Raid0) -> None:
        side.stop()
        left = self.where.place.run("ls -d /sys/block/md* /sys/block/dm-* 2>/dev/null").text
        self.assertEqual(left, "")

    def striped(self, side: raid0.Raid0) -> None:
        arrays, spares = self.where.drives()
        size = side.capacity_bytes(arrays[0]) // MIB * MIB
        (disk,) = side.start(arrays, spares, [size])
        check = self.where.place.check
        self.assertGreaterEqual(int(check(f"blockdev --getsize64 {disk.device}")), size)
        before = self.written(arrays[0])
        check(f"dd if=/dev/urandom of={disk.device} bs=1M count=24 oflag=direct status=none")
        of_each = [now - was for now, was in zip(self.written(arrays[0]), before, strict=True)]
        self.assertEqual(of_each, [8 * MIB] * 3)
        self.assertEqual(side.counters().write_bytes, 24 * MIB)
        self.assertEqual(side.states(), ["healthy"])
        said = side.settings()
        self.assertIn("commands", said)
        self.assertNotIn("No such file", str(said))

    def written(self, drives: list[Drive]) -> list[int]:
        names = [Path(drive.path).name for drive in drives]
        lines = self.where.place.check(
            "; ".join(f"cat /sys/class/block/{name}/stat" for name in names)
        ).splitlines()
        return [int(line.split()[6]) * 512 for line in lines]


if __name__ == "__main__":
    unittest.main()
