"""Goal: a figure of several arrays is one of a state only while every array was in it, and a side
takes a drive out of the array that it is told.

Method: made-up seconds; sides on a place that writes down commands and answers from a list.
"""

import json
import unittest
from dataclasses import replace
from pathlib import Path
from unittest import mock

from lab import sides, states, study, window
from lab.place import Output
from lab.results import Cell
from lab.side import Drive, SideError
from lab.sides import ashlar, zfs

CELL = Cell(0, 0, "s", "degraded", "p", 0, 2, seconds=4)


def seconds(*told: str) -> list[dict]:
    return [{"second": at, "state": one} for at, one in enumerate(told)]


class Together(unittest.TestCase):
    def test_no_array_speaks_for_another(self):
        both = states.together(["degraded", "degraded"])
        self.assertTrue(states.are_all(both, "degraded"))
        for other in ("healthy", "degraded-twice", "rebuilding 1.0%", "waiting", "failed"):
            for mixed in (["degraded", other], [other, "degraded"]):
                self.assertFalse(states.are_all(states.together(mixed), "degraded"), mixed)
        self.assertEqual(states.together(["rebuilding 1.0%"]), "rebuilding 1.0%")

    def test_drives_that_are_out_are_counted(self):
        for state in study.State:
            if state != study.State.REBUILDING:
                self.assertEqual(states.without(state.drives_out), state)
        self.assertNotIn(states.without(3), list(study.State))

    def test_words_for_a_person(self):
        for text, wanted in [
            ("rebuilding 3.0%", "array rebuilding"),
            ("degraded | degraded", "all 2 arrays degraded"),
            ("degraded | healthy | degraded", "arrays: 2 degraded, 1 healthy"),
        ]:
            self.assertEqual(states.told(text), wanted)


class Shares(unittest.TestCase):
    def test_a_second_counts_when_all_arrays_are_in_the_state(self):
        only_first = seconds(*["degraded | healthy"] * 4)
        self.assertEqual(window.share_as_wanted(CELL, only_first), 0.0)
        self.assertEqual(window.share_of_each_array(CELL, only_first), [1.0, 0.0])
        late = seconds("degraded | healthy", *["degraded | degraded"] * 3)
        self.assertEqual(window.share_as_wanted(CELL, late), 0.75)
        self.assertEqual(window.share_of_each_array(CELL, late), [1.0, 0.75])
        self.assertEqual(window.share_of_each_array(CELL, []), [])

    def test_an_array_without_a_load_does_not_count(self):
        one = replace(CELL, state="rebuilding", loads=1)
        rows = seconds("rebuilding 1.0% | rebuilding 9.0%", "rebuilding 2.0% | healthy",
                       "rebuilding 3.0% | healthy", "rebuilding 4.0% | healthy")  # fmt: skip
        self.assertEqual(window.share_as_wanted(one, rows), 1.0)
        self.assertEqual(window.share_of_each_array(one, rows), [1.0])
        self.assertAlmostEqual(window.rebuilt_percent_a_minute(one, rows), 60)
        self.assertEqual(window.share_as_wanted(replace(one, loads=2), rows), 0.25)
        four = replace(one, loads=4)  # more loads than arrays
        self.assertEqual(window.share_of_each_array(four, rows), [1.0, 0.25])

    def test_two_out_are_not_one_out(self):
        twice = replace(CELL, state="degraded-twice")
        rows = seconds(*["degraded-twice | degraded"] * 2, *["degraded-twice | degraded-twice"] * 2)
        self.assertEqual(window.share_as_wanted(twice, rows), 0.5)

    def test_an_older_run_told_two_out_as_one(self):
        rows = seconds("healthy", *["degraded"] * 3)
        twice = replace(CELL, state="degraded-twice")
        self.assertEqual(window.share_as_wanted(twice, rows), 0.0)
        older = replace(twice, drives_out_told=False)
        self.assertEqual(window.share_as_wanted(older, rows), 0.75)
        self.assertEqual(window.share_as_wanted(older, seconds(*["degraded-twice"] * 4)), 1.0)
        self.assertEqual(window.share_as_wanted(replace(older, state="healthy"), rows), 0.25)

    def test_a_rebuild_is_told_while_all_rebuild(self):
        cell = replace(CELL, state="rebuilding")
        rows = seconds(
            "rebuilding 10.0% | waiting", "rebuilding 20.0% | rebuilding 0.0%",
            "rebuilding 30.0% | rebuilding 4.0%", "healthy | rebuilding 50.0%",
        )  # fmt: skip
        self.assertEqual(window.share_as_wanted(cell, rows), 0.5)
        self.assertAlmostEqual(window.rebuilt_percent_a_minute(cell, rows), 7 * 60)


def member(state: str = "trusted", present: bool = True) -> dict:
    return {"state": state, "present": present}


class Told(unittest.TestCase):
    def test_by_ashlar(self):
        here, stale, gone = member(), member("stale", False), member(present=False)
        filled = member("rebuilding")
        for state, members, percent, wanted in [
            ("optimal", [here] * 3, None, "healthy"),
            ("degraded", [here, here, gone], None, "degraded"),
            ("degraded", [stale, here, gone], None, "degraded-twice"),
            ("degraded", [filled, here, here], 12, "rebuilding 12.5%"),
            ("degraded", [filled, here, here], None, "degraded"),  # it is about to begin
            ("failed", [stale, stale, here], None, "failed"),
            ("unavailable", [], None, "failed"),
        ]:
            # of which a whole percent is `percent`, and a tenth of one is seen
            rebuild = {"percent": percent, "stripes_done": 125, "stripes_total": 1000}
            rebuild = None if percent is None else rebuild
            shown = {"state": state, "members": members, "rebuild": rebuild}
            self.assertEqual(ashlar.state(shown), wanted, shown)

    def test_by_zfs(self):
        def status(state: str, *drives: str, scan: str = "none requested") -> str:
            lines = [f"\t    loop{at}  {drive}  0 0 0" for at, drive in enumerate(drives)]
            return "\n".join(
                ["  pool: p", f" state: {state}", f"  scan: {scan}", "config:", "",
                 "\tNAME  STATE  READ WRITE CKSUM", f"\tp  {state}  0 0 0",
                 f"\t  raidz2-0  {state}  0 0 0", *lines, "", "errors: No known data errors"]
            )  # fmt: skip

        scan = "resilver in progress since today\n  1G scanned, 25.31% done, no time left"
        for said, wanted in [
            (status("ONLINE", "ONLINE", "ONLINE"), "healthy"),
            (status("DEGRADED", "FAULTED", "ONLINE"), "degraded"),
            (status("DEGRADED", "FAULTED", "OFFLINE", "ONLINE"), "degraded-twice"),
            (status("DEGRADED", "ONLINE", "ONLINE", scan=scan), "rebuilding 25.3%"),
            (status("UNAVAIL", "UNAVAIL", "UNAVAIL"), "failed"),
        ]:
            self.assertEqual(zfs.state(said), wanted, said)


class Place:
    """Does nothing and writes it down; what a side asks for is answered by `answers`."""

    logs = "/logs"

    def __init__(self, answers: dict[str, str]):
        self.answers, self.commands = answers, []

    def run(self, command: str, timeout: float = 60) -> Output:
        self.commands.append(command)
        found = [text for words, text in self.answers.items() if words in command]
        return Output(0, (found or [""])[0].encode())

    def check(self, command: str, timeout: float = 60) -> str:
        return self.run(command).text

    def spawn(self, command: str):
        self.commands.append(command.removeprefix("exec "))

    def unplug(self, path: str) -> bool:
        return False

    def plug(self, path: str) -> str:
        return path


ARRAYS = [[Drive(f"d{at}", f"/dev/d{at}", 1 << 30) for at in part] for part in ((0, 1), (2, 3))]
SPARE = Drive("d4", "/dev/d4", 1 << 30)


class EveryArray(unittest.TestCase):
    """The second array is told to lose its second drive, d3, and gets d4."""

    def side(self, kind: str, **answers: str):
        """With two arrays, as `start` leaves it."""
        made = study.Study.model_validate(
            {"title": "t", "where": "host", "array": {"count": 2, "data": 1}, "raw": True,
             "states": ["degraded"], "side": [{"kind": kind}], "drives": {"kind": "block"},
             "fio": {"patterns": [{"name": "p", "rw": "randread"}]}}
        )  # fmt: skip
        side = sides.make(made.side[0], made, Place(answers), Path("/w"))
        side.members, side.spares = [list(members) for members in ARRAYS], [SPARE]
        return side

    def told(self, side) -> str:
        side.place.commands.clear()
        side.pull(1, 1)
        side.replace(1, 1)
        self.assertEqual([drive.name for drive in side.members[0]], ["d0", "d1"])
        self.assertEqual([drive.name for drive in side.members[1]], ["d2", "d4"])
        self.assertEqual([drive.name for drive in side.spares], ["d3"])
        return "\n".join(side.place.commands)

    def test_of_ashlar(self):
        told = self.told(self.side("ashlar"))
        self.assertIn("drive detach d3 ", told)
        self.assertIn("array replace a1 --member 1 --new d4 ", told)

    def test_one_look_of_ashlar_is_one_command(self):
        def array(name: str, state: str, reads: int, *members: dict) -> dict:
            counters = {"reads": reads, "writes": 0, "read_bytes": 0, "write_bytes": 0}
            return {"name": name, "state": state, "members": members, "rebuild": None,
                    "resync": None, "counters": counters,
                    "journal": {"pending_bytes": 7} if reads else None}  # fmt: skip

        # not in our order, and one that is not ours
        listed = [array("a1", "degraded", 2, member(), member(present=False)),
                  array("b0", "failed", 100), array("a0", "optimal", 0, member(), member())]
        side = self.side("ashlar", **{"array list -o json": json.dumps(listed)})
        self.assertEqual(side.states(), ["healthy", "degraded"])
        counters = side.counters()
        self.assertEqual((counters.reads, counters.pending_bytes), (2, 7))
        self.assertEqual(len(side.place.commands), 1, side.place.commands)

    def test_ashlar_tells_why_a_rebuild_stopped(self):
        def listed(**of_a1: object) -> str:
            its = {"state": "degraded", "members": [member()], "rebuild": None,
                   "rebuild_error": None}  # fmt: skip
            return json.dumps([its | {"name": "a0"}, its | {"name": "a1"} | of_a1])

        side = self.side("ashlar", **{"array list -o json": listed()})
        self.assertIsNone(side.rebuild_error())
        side = self.side("ashlar", **{"array list -o json": listed(rebuild_error="member 1, x")})
        side.states()
        self.assertEqual(side.rebuild_error(), "a1: member 1, x")
        goes_on = listed(rebuild_error="x", rebuild={"stripes_done": 1, "stripes_total": 2})
        self.assertIsNone(self.side("ashlar", **{"array list -o json": goes_on}).rebuild_error())

    def test_ashlar_waits_for_every_array(self):
        whole = [{"name": "a0", "state": "optimal", "resync": None},
                 {"name": "a1", "state": "optimal", "resync": {"percent": 1}}]
        side = self.side("ashlar", **{"array list -o json": json.dumps(whole)})
        with mock.patch.object(ashlar, "COMMAND_SECONDS_MAX", 0):
            with self.assertRaisesRegex(SideError, "whole: a1 is optimal"):
                side.wait_whole()

    def test_of_mdraid(self):
        side = self.side("mdraid", cat="active\n1\nidle\nnone\n")
        side.arrays = ["md100", "md101"]
        told = self.told(side)
        self.assertIn("mdadm /dev/md101 --fail /dev/d3", told)
        self.assertIn("mdadm /dev/md101 --remove /dev/d3", told)
        self.assertIn("mdadm /dev/md101 --add /dev/d4", told)
        self.assertNotIn("md100", told)

    def test_mdraid_has_to_notice_each_drive(self):
        side = self.side("mdraid", cat="active\n1\nidle\nnone\n")
        side.arrays = ["md100", "md101"]
        side.pull(1, 0)
        with self.assertRaisesRegex(SideError, "md101 lost /dev/d3, and has noticed 1 of 2"):
            side.pull(1, 1)
        side.pull(0, 0)  # which lost none before
        side.replace(0, 0)
        side.pull(0, 1)

    def test_of_zfs(self):
        side = self.side("zfs")
        told = self.told(side)
        self.assertIn(f"zpool offline -f {side.pool(1)} /dev/d3", told)
        self.assertIn(f"zpool replace -f {side.pool(1)} /dev/d3 /dev/d4", told)
        self.assertNotIn(side.pool(0), told)

    def test_of_btrfs(self):
        side = self.side("btrfs")
        side.out = [set(), set()]
        told = self.told(side)
        self.assertIn("wipefs -qaf /dev/d3", told)
        self.assertIn("btrfs replace start -B -f -r 2 /dev/d4 /w/btrfs/fs1", told)
        self.assertNotIn("/w/btrfs/fs0", told)
        self.assertEqual(side.out, [set(), {1}])

    def test_a_file_system_tells_what_it_read_of_all_its_drives(self):
        """Also of one that was replaced: else a total would shrink."""
        line = "10 0 80 0 5 0 40 0 0 0 0\n"
        for kind in ("btrfs", "zfs"):
            side = self.side(kind, cat=line * 3)
            self.assertIsNone(side.counters())
            side.blocks.devices = {"d0": "/dev/loop0", "d1": "/dev/loop1", "d4": "/dev/sda1"}
            counted = side.counters()
            self.assertEqual((counted.reads, counted.pending_bytes), (None, None))
            self.assertEqual((counted.drive_reads, counted.drive_read_bytes), (30, 3 * 80 * 512))
            self.assertIn("/sys/class/block/sda1/stat", "\n".join(side.place.commands))

    def test_what_was_never_written_nobody_counts(self):
        """As with queue/iostats = 0: not as if memory had answered all."""
        side = self.side("zfs", cat="0 0 0 0 0 0 0 0 0 0 0\n" * 2)
        side.blocks.devices = {"d0": "/dev/loop0", "d1": "/dev/loop1"}
        self.assertIsNone(side.blocks.counts(["/dev/loop0", "/dev/loop1"]))
        self.assertIsNone(side.counters())

    def test_states_are_of_each(self):
        side = self.side("mdraid", md100="clean\n0\nidle\nnone\n", md101="clean\n1\nidle\nnone\n")
        side.arrays = ["md100", "md101"]
        self.assertEqual(side.states(), ["healthy", "degraded"])
        side = self.side("btrfs")
        side.out = [set(), {1}]
        self.assertEqual(side.states(), ["healthy", "degraded"])


if __name__ == "__main__":
    unittest.main()
