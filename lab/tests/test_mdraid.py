"""Goal: an array is made and read as md's own documentation says, whatever state it is in."""

import os
import subprocess
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from lab import study
from lab.ledger import Ledger
from lab.place import Host, Output
from lab.side import Disk, Drive
from lab.sides import mdraid

MIB = 1 << 20
UUID = mdraid.new_uuid()


class Create(unittest.TestCase):
    def test_levels(self):
        levels = {(4, 0): "0", (1, 1): "1", (4, 1): "5", (4, 2): "6", (2, 2): "6", (4, 3): None}
        for (data, parity), wanted in levels.items():
            self.assertEqual(mdraid.level(study.Array(data=data, parity=parity)), wanted)
        for data, copies, wanted in [(1, 2, "1"), (1, 3, "1"), (4, 2, "10"), (2, 3, "10")]:
            self.assertEqual(mdraid.level(study.Array(data=data, copies=copies)), wanted)

    def test_no_two_have_one_name(self):
        self.assertRegex(UUID, r"^([0-9a-f]{8}:){3}[0-9a-f]{8}$")
        self.assertNotEqual(mdraid.new_uuid(), UUID)

    def test_words(self):
        drives = [f"/dev/nvme{number}n1" for number in range(5)]
        self.assertEqual(
            mdraid.create("/dev/md100", UUID, "5", study.Array(), "bitmap", drives, zeroed=True),
            f"mdadm --create /dev/md100 --run --uuid={UUID} --level=5 --raid-devices=5 --chunk=64K "
            "--bitmap=internal --assume-clean /dev/nvme0n1 /dev/nvme1n1 /dev/nvme2n1 /dev/nvme3n1 "
            "/dev/nvme4n1",
        )
        plain = mdraid.create("/dev/md100", UUID, "6", study.Array(), "resync", drives, zeroed=False)
        self.assertIn("--bitmap=none", plain)
        self.assertNotIn("--assume-clean", plain)
        closed = mdraid.create("/dev/md100", UUID, "5", study.Array(), "ppl", drives, zeroed=True)
        self.assertIn("--consistency-policy=ppl --bitmap=none", closed)
        # RAID 0 knows neither, and a mirror has no chunks.
        striped = mdraid.create("/dev/md100", UUID, "0", study.Array(), "bitmap", drives, zeroed=True)
        self.assertNotIn("bitmap", striped)
        self.assertNotIn("clean", striped)
        mirror = mdraid.create("/dev/md100", UUID, "1", study.Array(), "bitmap", drives[:2], zeroed=True)
        self.assertNotIn("chunk", mirror)
        mirrors = study.Array(data=2, copies=2)
        mirrors = mdraid.create("/dev/md100", UUID, "10", mirrors, "bitmap", drives[:4], zeroed=True)
        self.assertIn("--level=10 --raid-devices=4 --chunk=64K --layout=n2 --bitmap", mirrors)


class End(unittest.TestCase):
    """With a mdadm that writes down how it is called."""

    def ended(self, uuid: str) -> str:
        with tempfile.TemporaryDirectory(prefix="ashlar-lab-test-") as directory:
            home = Path(directory)
            (home / "called").touch()
            (home / "mdadm").write_text(
                f'#!/bin/sh\necho "$*" >>{home}/called\n'
                f'[ "$1" = --stop ] || echo MD_UUID={uuid}\n'
            )
            (home / "mdadm").chmod(0o755)
            with mock.patch.dict(os.environ, {"PATH": f"{home}:{os.environ['PATH']}"}):
                place = Host(Ledger(home / "ledger"))
                chosen = study.Side(kind="mdraid")
                pgbench = study.Pgbench()
                whole = study.Study(title="t", where="host", side=(chosen,), pgbench=pgbench)
                side = mdraid.Mdraid(chosen, whole, place, home)
                place.ledger.owe("md", UUID)
                side.end("md100", UUID)
                self.assertEqual(place.ledger.debts(), [])
                place.close()
            return (home / "called").read_text()

    def test_only_an_array_of_ours_is_stopped(self):
        self.assertIn("--stop /dev/md100", self.ended(UUID))
        self.assertNotIn("--stop", self.ended(mdraid.new_uuid()))


class OnFiles(Host):
    """A host whose commands are written down. What waits for a loop device while an array has it
    never ends, as in the kernel: it is refused."""

    def __init__(self, ledger: Ledger):
        super().__init__(ledger)
        self.loops, self.arrays = 0, set()
        self.done: list[str] = []

    def run(self, command: str, timeout: float = 60) -> Output:
        text = ""
        if command.startswith("[ -b "):
            return Output(1, b"")
        if "losetup --find" in command:
            self.loops += 1
            text = f"/dev/loop{self.loops}\n"
        elif "/loop/dio" in command:
            text = "1\n"
        elif command.startswith("mdadm --create"):
            self.arrays.add(command.split()[2])
        elif "--stop" in command:
            self.arrays.discard(command.split("--stop ")[1].split(";")[0])
            self.done.append("stop")
        elif "--detach" in command:
            self.done.append("detach")
            return Output(1 if self.arrays else 0, b"")
        elif command.startswith("nproc"):
            text = "2\nMemTotal: 8388608 kB\n"
        elif "array_state" in command:
            text = "clean\n0\nidle\nnone\n"
        elif command.startswith("cat /sys/block/md"):
            text = "1\n"
        return Output(0, text.encode())


class Order(unittest.TestCase):
    def setUp(self):
        home = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(home.cleanup)
        self.place = OnFiles(Ledger(Path(home.name) / "ledger"))
        self.addCleanup(self.place.close)
        chosen = study.Side(kind="mdraid")
        array = study.Array(count=2, data=2)
        whole = study.Study(
            title="t", where="host", side=(chosen,), array=array, pgbench=study.Pgbench()
        )
        self.side = mdraid.Mdraid(chosen, whole, self.place, Path(home.name))
        drives = [Drive(f"d{number}", f"/d{number}", MIB) for number in range(7)]
        self.drives = [drives[:3], drives[3:6]], drives[6:]
        self.enterContext(mock.patch.object(self.side, "missing", return_value=None))

    def test_arrays_are_stopped_before_their_loop_devices_go(self):
        self.side.start(*self.drives, [MIB, MIB])
        # `clean` takes down the last first, too
        kinds = [debt.kind for debt in self.place.ledger.debts()]
        self.assertEqual(kinds, ["loop"] * 7 + ["md"] * 2)
        self.side.stop()
        self.assertEqual(self.place.done, ["stop"] * 2 + ["detach"] * 7)
        self.assertEqual(self.place.ledger.debts(), [])

    def test_a_spare_that_comes_in_goes_after_the_array(self):
        self.side.start(*self.drives, [MIB, MIB])
        with mock.patch.object(self.side, "told"):
            self.side.replace(1, 0)
        self.side.stop()
        self.assertEqual(self.place.done, ["stop"] * 2 + ["detach"] * 7)


class Tuning(unittest.TestCase):
    def test_a_thread_for_each_cpu_to_a_bound(self):
        self.assertEqual(mdraid.tuning(2, 64 << 30, 5)[0], 2)
        self.assertEqual(mdraid.tuning(64, 64 << 30, 5)[0], 8)

    def test_the_stripe_cache_takes_a_twentieth_of_memory_at_most(self):
        self.assertEqual(mdraid.tuning(2, 64 << 30, 5)[1], 4096)
        # 1 GiB / 20 / (5 x 4 KiB) = 2621, and then a power of two
        self.assertEqual(mdraid.tuning(2, 1 << 30, 5)[1], 2048)
        self.assertEqual(mdraid.tuning(2, 64 << 20, 24)[1], 256)


# As the kernel writes it, with another array of ours before.
MDSTAT = """\
Personalities : [raid6] [raid5] [raid4]
md101 : active raid5 loop9[6] loop8[2] loop7[1]
      2093056 blocks super 1.2 level 5, 64k chunk, algorithm 2 [3/2] [UU_]
      [==================>..]  recovery = 90.0% (941875/1046528) finish=0.1min speed=9K/sec
      bitmap: 0/1 pages [0KB], 65536KB chunk

md100 : active raid5 loop5[6] loop3[2] loop2[1] loop1[0]
      4186112 blocks super 1.2 level 5, 64k chunk, algorithm 2 [5/4] [UUUU_]
      [==>..................]  recovery = 12.5% (130816/1046528) finish=1.2min speed=24052K/sec

unused devices: <none>
"""


class State(unittest.TestCase):
    def test_each(self):
        done = "      [=>...]  recovery = 25.0% (261632/1046528) finish=0.4min speed=9K/sec\n"
        for text, wanted in [
            ("clean\n0\nidle\nnone\n", "healthy"),
            (f"active\n0\ncheck\n0 / 2093056\n{done}", "checking 25.0%"),
            (f"active\n0\nrepair\n0 / 2093056\n{done}", "checking 25.0%"),
            ("active\n1\nidle\nnone\n", "degraded"),
            ("active\n1\nfrozen\nnone\n", "degraded"),
            (f"active\n1\nrecover\n130816 / 2093056\n{done}", "rebuilding 25.0%"),
            ("active\n1\nrecover\nnone\n", "rebuilding 0.0%"),
            ("active\n1\nrecover\ndelayed\n\tresync=DELAYED\n", "waiting"),
            (f"active\n0\nresync\n0 / 2093056\n{done}", "rebuilding 25.0%"),
            ("active\n2\nidle\nnone\n", "failed"),
            ("broken\n2\nidle\nnone\n", "failed"),
            ("inactive\n0\nidle\nnone\n", "failed"),
        ]:
            self.assertEqual(mdraid.state(text, losses=1), wanted, text)
        self.assertEqual(mdraid.state("active\n2\nidle\nnone\n", losses=2), "degraded-twice")
        self.assertEqual(mdraid.state("clean\n", losses=0), "healthy")

    def test_how_far_a_rebuild_is_moves_with_each_request(self):
        """Its own, and not by sixteenths of a drive."""
        with tempfile.TemporaryDirectory(prefix="ashlar-lab-test-") as home:
            at = Path(home) / "block/md100/md"
            at.mkdir(parents=True)
            for name, word in [("array_state", "active"), ("degraded", "1"),
                               ("sync_action", "recover"), ("sync_completed", "0 / 2093056")]:
                (at / name).write_text(f"{word}\n")  # fmt: skip
            (Path(home) / "mdstat").write_text(MDSTAT)

            def check(command: str) -> str:
                command = command.replace("/sys/", f"{home}/").replace("/proc/", f"{home}/")
                return subprocess.check_output(["sh", "-ec", command], text=True)

            side = mock.Mock(**{"place.check": check})
            told = mdraid.Mdraid.told_of(side, "md100")
        self.assertEqual(mdraid.state(told, losses=1), "rebuilding 12.5%")


class Disks(unittest.TestCase):
    def test_one_for_an_array_is_all_of_it(self):
        told = []
        found = mdraid.disks(["md100", "md101"], [MIB, MIB], MIB, told.append)
        self.assertEqual(found, [Disk(device="/dev/md100"), Disk(device="/dev/md101")])
        self.assertEqual(told, [])

    def test_several_are_partitions_dealt_out_in_turn(self):
        told = []
        found = mdraid.disks(["md100", "md101"], [MIB] * 4, MIB, told.append)
        names = ["md100p1", "md101p1", "md100p2", "md101p2"]
        self.assertEqual([disk.device for disk in found], [f"/dev/{name}" for name in names])
        self.assertEqual(len(told), 2)

    def test_partitions_do_not_overlap_and_are_aligned(self):
        sizes = [100 * MIB, 64 * MIB, 65 * MIB]
        lines = mdraid.partitions(sizes, 5 * MIB).splitlines()[1:]
        end = 0
        for line, size in zip(lines, sizes, strict=True):
            start, length = (int(part.split("=")[1]) for part in line.split(", "))
            self.assertEqual((length * 512, start * 512 % (5 * MIB)), (size, 0))
            self.assertGreaterEqual(start, end)
            end = start + length

    def test_what_is_promised_fits_with_all_partitions(self):
        chosen = study.Side(kind="mdraid")
        for data, chunk in [(4, 64 << 10), (5, 64 << 10), (7, 1 << 20)]:
            whole = study.Study.model_validate(
                {"title": "t", "where": "vm", "side": (chosen,), "pgbench": {},
                 "array": {"data": data, "chunk": chunk}, "vm": {"count": 16}}
            )  # fmt: skip
            side = mdraid.Mdraid(chosen, whole, mock.Mock(), Path("/nonexistent"))
            drive = Drive("d", "/d", 256 * MIB)
            size = side.capacity_bytes([drive]) // 16 // MIB * MIB
            align = mdraid.alignment(whole.array)
            self.assertEqual((align % (data * chunk), align % MIB), (0, 0))
            last = mdraid.partitions([size] * 16, align).splitlines()[-1]
            start, length = (512 * int(part.split("=")[1]) for part in last.split(", "))
            usable = data * (256 * MIB - 256 * MIB // 1000 - mdraid.LABEL_BYTES)
            self.assertLessEqual(start + length + MIB, usable)


if __name__ == "__main__":
    unittest.main()
