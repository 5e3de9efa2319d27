"""Goal: a run that goes on mixes nothing that cannot be mixed, and says what else has changed.

Method: directories of results as an earlier call has left them; the program is a file of the test.
"""

import json
import os
import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from lab import conditions, sides
from lab import run as runs
from lab.ledger import Ledger
from lab.place import Host
from lab.report import cautions
from lab.results import Results
from lab.schedule import blocks
from lab.study import Study

MIB = 1 << 20
STUDY = Study.model_validate(
    {
        "title": "t", "where": "host", "side": [{"kind": "ashlar"}, {"kind": "btrfs"}],
        "drives": {"directory": "/here"}, "repeats": 2,
        "fio": {"patterns": [{"name": "p", "rw": "randread"}]},
    }
)  # fmt: skip


class Side:
    name = "ashlar"
    protection = SimpleNamespace(losses=1, write_hole="closed")

    def missing(self):
        return None

    def capacity_bytes(self, drives) -> int:
        return 1000 * MIB

    def settings(self) -> dict:
        return {"version": "1"}


class GoingOn(unittest.TestCase):
    def setUp(self):
        home = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(home.cleanup)
        self.home = Path(home.name)
        self.program = self.home / "ashlar"
        self.program.write_text("one")
        self.enterContext(mock.patch.dict(os.environ, {"ASHLAR": str(self.program)}))
        self.cells = [cell for block in blocks(STUDY) for cell in block.cells]

    def run_of(self, *done: str) -> runs.Run:
        """That goes on where one cell of each of these sides is done."""
        results = Results(self.home, [next(c for c in self.cells if c.side == its) for its in done])
        session = SimpleNamespace(home=self.home, ledger=Ledger(self.home / "ledger"))
        return runs.Run(STUDY, results, session, False)

    def prepared(self, *done: str) -> runs.Run:
        run = self.run_of(*done)
        there = mock.Mock(
            place=Host(None), huge_pages=False, **{"disks.return_value": 1, "problems": list}
        )
        with (
            mock.patch.object(runs.where, "make", return_value=there),
            mock.patch.object(runs.sides, "make", return_value=Side()),
            mock.patch.object(runs.machine, "problems", return_value=[]),
        ):
            run.prepare()
        return run

    def was(self, number: int = 1, **changed) -> dict:
        """What the call of that number has left."""
        run = self.run_of()
        run.sides = dict.fromkeys(("ashlar", "btrfs"))
        program = run.ashlar_measured(self.program)
        its = conditions.now(STUDY, {}, False, [900 * MIB], program) | changed
        name = "machine.json" if number == 1 else f"machine-{number}.json"
        (self.home / name).write_text(json.dumps({"conditions": its}))
        return its

    def test_another_program_is_refused_where_figures_of_the_first_are_there(self):
        self.was()
        self.prepared("ashlar")
        self.program.write_text("two")
        self.prepared("btrfs")  # nothing of the first is mixed with
        with self.assertRaisesRegex(runs.Refusal, "set ASHLAR to that one, or begin anew"):
            self.prepared("ashlar")

    def test_the_program_is_the_one_that_was_measured_last(self):
        self.was()
        self.program.write_text("two")
        self.was(2)
        self.was(3, ashlar="")  # measured nothing of it
        self.prepared("ashlar")
        self.program.write_text("one")
        with self.assertRaises(runs.Refusal):
            self.prepared("ashlar")

    def test_what_is_built_anew_meanwhile_is_not_what_runs(self):
        run = self.prepared()
        run.where.start.side_effect = lambda say: self.program.write_text("two")
        run.where.settings.return_value = {}
        run.screen = mock.Mock()
        with run.cleanup:
            run.begin()
            chosen = STUDY.side[0]
            side = sides.make(chosen, STUDY, run.place, run.work)
            self.assertEqual(Path(side.program).read_text(), "one")
            self.assertNotEqual(side.program, str(side.home))
            copy = conditions.checksum(Path(side.program))
        self.assertFalse(run.work.exists())
        self.assertEqual(conditions.of(run.results.machines()[0])["ashlar"], copy)

    def test_postgresql_of_the_host_is_asked_for_where_it_is_measured(self):
        words = STUDY.model_dump() | {"fio": None, "pgbench": {}}
        for where, wanted in [("host", True), ("vm", False), ("guest", False)]:
            run = self.prepared()
            run.study = Study.model_validate(words | {"where": where})
            run.screen, run.where.settings.return_value = mock.Mock(), {}
            asked = mock.patch.object(runs, "program_directory", return_value="/nowhere")
            with asked as asked, run.cleanup:
                run.begin()
            self.assertEqual(asked.called, wanted, where)

    def test_what_was_built_anew_since_it_was_looked_at_is_refused(self):
        self.was()
        run = self.prepared("ashlar")
        self.program.write_text("two")
        run.screen = mock.Mock()
        with self.assertRaisesRegex(runs.Refusal, "set ASHLAR to that one"), run.cleanup:
            run.begin()
        run.where.start.assert_not_called()

    def test_bare_drives_are_measured_by_a_call_that_measured_a_cell(self):
        """What an earlier one left may have come about under other conditions, of which no figure
        tells."""
        self.enterContext(mock.patch.dict(STUDY.__dict__, raw=True))
        raw = self.home / "raw.json"
        for done, wanted in [((), "first"), ((), "second"), (("btrfs",), "second")]:
            with mock.patch("lab.loads.fio.measure_drives", return_value=wanted) as measured:
                run = self.prepared(*done)
                run.where.settings.return_value = {}
                run.screen = mock.Mock()
                with run.cleanup:
                    run.begin()
            self.assertEqual(json.loads(raw.read_text()), wanted)
            self.assertEqual(measured.called, not done)

    def test_a_run_that_is_over_is_refused_for_nothing(self):
        run = self.run_of()
        run.results.cells = self.cells
        there = mock.Mock(
            place=Host(None), **{"problems.return_value": ["no room"], "disks.return_value": 1}
        )
        with (
            mock.patch.object(runs.where, "make", return_value=there),
            mock.patch.object(runs.sides, "make", return_value=Side()),
            mock.patch.object(runs.machine, "problems", return_value=["too little memory"]),
        ):
            run.prepare()
            with mock.patch.object(Side, "missing", return_value="its program is gone"):
                run.prepare()
                run.results.cells = self.cells[1:]
                with self.assertRaisesRegex(runs.Refusal, "side ashlar: its program is gone"):
                    run.prepare()
            with self.assertRaisesRegex(runs.Refusal, "no room\ntoo little memory"):
                run.prepare()

    def test_the_copy_of_the_program_has_room(self):
        with open(self.program, "wb") as program:
            program.truncate(100 * MIB)
        run = self.run_of()
        run.work = Path("/tmp/x")
        for where, needed in [("host", 125 + 64), ("guest", 375 + 64)]:
            run.study = STUDY.model_copy(update={"where": where})
            for free in (needed * MIB, needed * MIB - 1):
                usage = SimpleNamespace(free=free)
                with mock.patch.object(runs.shutil, "disk_usage", return_value=usage):
                    found = run.room_problems(self.program)
                self.assertEqual(len(found), free < needed * MIB, found)
        self.assertIn(f"/tmp has 438 MiB free, and copies of {self.program}", found[0])

    def test_disks_stay_as_large_as_they_were(self):
        self.assertEqual(self.prepared().disk_bytes, [900 * MIB])
        self.was(disk_bytes=[500 * MIB])
        self.assertEqual(self.prepared().disk_bytes, [500 * MIB])
        self.was(disk_bytes=[901 * MIB])
        self.assertEqual(self.prepared().disk_bytes, [900 * MIB])

    def test_what_has_changed_is_told_in_red(self):
        self.was()
        self.was(2)
        machines = Results(self.home).machines
        self.assertEqual(list(cautions.mixed(self.source(machines()))), [])
        for key, value in [
            ("kernel", "9.9"), ("huge_pages", True), ("disk_bytes", [1]), ("directory", "/there"),
            ("guest_kernel", "6.6"),
        ]:  # fmt: skip
            self.was(3, **{key: value})
            (said,) = cautions.mixed(self.source(machines()))
            self.assertTrue(said.red)
            self.assertIn(str(value), said.text)
        self.was(3, ashlar="another, of which nothing was measured before")
        self.assertEqual(conditions.changes(machines()), [])

    def source(self, machines: list[dict], **sides: dict) -> SimpleNamespace:
        return SimpleNamespace(machines_used=machines, sides=sides)

    def test_what_a_machine_says_anyway_is_told_where_it_changed(self):
        one = {
            "where": {"acceleration": "kvm", "qemu": "7.2", "pinned to CPUs": "no"},
            "machine": {"cpu": "A", "cpus that may be used": [0, 1], "memory_bytes": 1},
            "versions": {"postgresql": "15", "fio": "3.33", "mdadm": "4.2"},
        }
        self.assertEqual(conditions.changes([one, one]), [])
        for table, key, value in [
            ("where", "acceleration", "tcg"), ("where", "qemu", "10.0"),
            ("where", "pinned to CPUs", "[1]"), ("machine", "cpu", "B"),
            ("machine", "cpus that may be used", [0]), ("machine", "memory_bytes", 2),
            ("versions", "postgresql", "17"), ("versions", "fio", "3.39"),
            ("versions", "mdadm", "4.4"),
        ]:  # fmt: skip
            with self.subTest(key):
                [said] = conditions.changes([one, one | {table: one[table] | {key: value}}])
                self.assertTrue(said.endswith(f": {one[table][key]}, then {value}"), said)
        without = one | {"versions": {}}  # a side that needs them was left out
        self.assertEqual(conditions.changes([without, one]), [])

    def test_an_older_run_has_said_some_of_it(self):
        older = {"kernel": {"release": "6.1"}, "disk_bytes": [MIB]}
        newer = {"conditions": conditions.now(STUDY, {}, False, [MIB], "") | {"kernel": "6.12"}}
        self.assertEqual(conditions.changes([older, newer]), ["the kernel: 6.1, then 6.12"])
        self.assertEqual(conditions.changes([{}, newer]), [])
        self.assertEqual(conditions.other_program([older], "x"), [])

    def test_a_side_that_was_measured_keeps_its_settings(self):
        measured = {"kind": "btrfs", "settings": {"version": "6.2"}}
        (self.home / "sides.json").write_text(json.dumps({"btrfs": measured}))
        run = self.run_of("btrfs")
        run.skipped = {"btrfs": "mkfs.btrfs is missing"}
        run.write_sides(Side(), mock.Mock(**{"settings.return_value": {}}))
        self.assertEqual(json.loads((self.home / "sides.json").read_text())["btrfs"], measured)

    def test_what_a_side_was_not_set_to_all_the_time_is_told_in_red(self):
        run, load = self.run_of(), mock.Mock(**{"settings.return_value": {}})
        run.screen = mock.Mock()
        turns = [{"stripe_cache_size": size, "commands": f"mdadm {size}", "array a0": f"{size} %"}
                 for size in ("4096", "4096", "256", "256", "4096")]  # fmt: skip
        for settings in turns:
            with mock.patch.object(Side, "settings", return_value=settings):
                run.write_sides(Side(), load)
        its = run.known_sides()["ashlar"]
        self.assertEqual(its["settings"], turns[-1])
        self.assertEqual(its["changed"], ["stripe_cache_size: 4096, then 256",
                                          "stripe_cache_size: 256, then 4096"])  # fmt: skip
        self.assertEqual(run.screen.line.call_count, 2)
        [said] = cautions.mixed(self.source([], ashlar=its, btrfs={"skipped": "why"}))
        self.assertTrue(said.red)
        self.assertIn("ashlar, stripe_cache_size: 4096, then 256; ashlar, ", said.text)

    def test_how_disks_are_reached_is_decided_once(self):
        with mock.patch.object(runs.Ashlar, "export_kind", return_value="fuse"):
            self.assertEqual([side.export for side in self.prepared().study.side], ["fuse", None])
        known = {"ashlar": {"settings": {"export": "ublk"}}}
        (self.home / "sides.json").write_text(json.dumps(known))
        with mock.patch.object(runs.Ashlar, "export_kind", return_value="fuse"):
            self.assertEqual(self.prepared("ashlar").study.side[0].export, "ublk")


if __name__ == "__main__":
    unittest.main()
