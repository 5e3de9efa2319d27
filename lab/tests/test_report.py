"""Goal: a report says what was measured, hides nothing, and can be read by anybody anywhere.
Method: synthetic results whose figures are known by hand; what stands in tables, page and CSV.
"""

import csv
import json
import re
import tempfile
import unittest
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

from lab import report
from lab.loads import fio as loads
from lab.report import cautions, memory, sheets, tables
from lab.report.source import Source
from lab.results import Results
from lab.tests import synthetic

STUDY = """\
title = "SYNTHETIC: known by hand"
where = "host"
states = ["healthy", "degraded"]
repeats = 1

[[side]]
kind = "ashlar"

[[side]]
kind = "mdraid"

[pgbench]
scripts = ["simple-update"]
clients = [4]
seconds = 100
"""
RATES = {
    ("ashlar", "healthy"): 20,
    ("mdraid", "healthy"): 10,
    ("ashlar", "degraded"): 15,
    ("mdraid", "degraded"): 4,
}


def rows_of(sheet: Path) -> list[dict]:
    with open(sheet, newline="") as file:
        return list(csv.DictReader(file))



class InADirectory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.home = Path(directory.name)

    def known(self, study: str = STUDY) -> Source:
        synthetic.pgbench(self.home, study, RATES)
        return Source.read(self.home)

    def change(self, name: str, change) -> Source:
        path = self.home / name
        words = json.loads(path.read_text())
        change(words)
        path.write_text(json.dumps(words))
        return Source.read(self.home)


class Tables(InADirectory):
    def test_the_verdict_is_known_by_hand(self):
        [verdict] = tables.verdict(self.known())
        self.assertEqual((verdict.title, verdict.caption), ("simple-update: 4 clients", ""))
        self.assertEqual(
            verdict.columns,
            ("state", "side", "tps", "× mdraid", "of healthy", "mean ms", "p99 ms"),
        )
        # latencies are 1 to 100 ms, each as often: their mean is 50.5, and p99 is 99; of 400 only
        # four took longer
        self.assertEqual(
            verdict.rows,
            (
                ("healthy", "ashlar", "20.0", "2.00 ≈", "–", "50.5", "99.0"),
                ("healthy", "mdraid", "10.0", "–", "–", "50.5", "99.0"),
                ("degraded", "ashlar", "15.0", "3.75 ≈", "75 % ≈", "50.5", "99.0"),
                ("degraded", "mdraid", "4.00", "–", "40 % ≈", "50.5", "–"),
            ),
        )

    def test_once_is_not_enough_to_tell(self):
        [said] = tables.told_apart(self.known())
        self.assertIn("Everything was measured once: chance may be all of any difference", said)

    def test_what_chance_may_do_is_no_difference(self):
        source = self.known(STUDY.replace("repeats = 1", "repeats = 3"))
        faster = {0: 1.2, 1: 1.1, 2: 0.9}
        figures = tuple(
            replace(
                one, per_second=10 * (faster[one.cell.repeat] if one.cell.side == "ashlar" else 1)
            )
            for one in source.figures
        )
        source = replace(source, figures=figures)
        [said] = tables.told_apart(source)
        self.assertIn("No difference from mdraid can be told: simple-update, healthy", said)
        self.assertIn("ashlar (0.90 to 1.20 times)", said)
        [verdict] = tables.verdict(source)
        self.assertEqual(verdict.rows[0][3], "1.10 ≈")

    def test_a_difference_is_one_beyond_the_spread(self):
        source = self.known(STUDY.replace("repeats = 1", "repeats = 3"))
        said = tables.told_apart(source)
        [verdict] = tables.verdict(source)
        self.assertEqual([row[4] for row in verdict.rows], ["–", "–", "75 %", "40 %"])
        self.assertEqual(
            said[0],
            "simple-update, healthy, 4 clients: ashlar 2.00 times mdraid (2.00 to 2.00).",
        )

    def test_one_side_is_compared_with_nobody(self):
        self.known()
        path = self.home / "cells.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"side": "ashlar"' in line))
        source = Source.read(self.home)
        for table in (*tables.verdict(source), *tables.everything(source)):
            self.assertFalse([name for name in table.columns if "×" in name])
            self.assertEqual({len(row) for row in table.rows}, {len(table.columns)})
        self.assertEqual(tables.told_apart(source), [])
        self.assertIn("database", dict(report.about(source)))
        self.assertIn("750 MB", dict(report.about(source))["database"])

    def test_numbers(self):
        numbers = [(0, "0"), (12345.6, "12,346"), (99.96, "100"), (12.34, "12.3"), (1.2, "1.20"),
                   (0.0123, "0.0123"), (None, "–")]  # fmt: skip
        for value, told in numbers:
            self.assertEqual(tables.number(value), told)

    def test_busy_cores_are_of_all(self):
        source = self.known()
        cell = replace(source.results.cells[0], storage_cores=0.6, guest_cores=1.2)
        for where, busy in [("host", 1.8), ("vm", 1.8), ("guest", 1.2)]:
            study = source.study.model_copy(update={"where": where})
            self.assertAlmostEqual(tables.busy_cores(replace(source, study=study), cell), busy)
        [table] = tables.arrays(source)
        at = table.columns.index("busy cores")
        self.assertEqual(table.rows[0][at : at + 2], ("1.80", "11.1"))
        self.assertIn("in the calls of the load", report.contents(source, [], [])["processors"])

    def test_efficiency_is_of_the_bare_drives(self):
        synthetic.fio(self.home)
        source = Source.read(self.home)
        one = source.telling("randwrite", 1)[0]
        share = one.per_second.median / 50_000
        self.assertAlmostEqual(tables.efficiency(source, one), share)
        table = next(t for t in tables.verdict(source) if t.title.startswith("seqread"))
        self.assertEqual((table.columns[2], table.columns[-1]), ("GB/s", "of bare drives"))
        table = next(t for t in tables.verdict(source) if t.title == "seqread, 2 VMs")
        self.assertIn("64 I/Os under way in all, beside 160 on 5 drives", table.caption)
        self.assertIn("measured when the run began", tables.drives(source).title)

    def test_the_pace_of_models_is_told_as_stated(self):
        synthetic.fio(self.home)
        study = Source.read(self.home).study
        raw = json.dumps(loads.stated_drives(study))
        (self.home / "raw.json").write_text(raw)
        source = Source.read(self.home)
        self.assertIn("not measured: models", tables.drives(source).title)
        [said] = {table.caption for table in tables.verdict(source)}
        self.assertIn("what the study states of models, which was not measured", said)
        self.assertGreater(tables.efficiency(source, source.telling("randread", 1)[0]), 0.5)


class Cautions(InADirectory):
    def red(self, source: Source) -> list[str]:
        return [one.text for one in cautions.all_of(source) if one.red]

    def other(self, source: Source) -> str:
        return " ".join(one.text for one in cautions.all_of(source) if not one.red)

    def test_a_fair_run_has_no_red_but_that_it_is_synthetic(self):
        source = self.known()
        self.assertEqual(["SYNTHETIC"], [text.split()[0] for text in self.red(source)])
        self.assertIn("zfs was left out", self.other(source))
        self.assertIn("ashlar: closed; mdraid: resync", self.other(source))

    def test_unequal_protection(self):
        self.known()

        def change(sides):
            sides["mdraid"]["protection"]["losses"] = 2

        red = " ".join(self.red(self.change("sides.json", change)))
        self.assertIn("UNEQUAL PROTECTION", red)
        self.assertIn("ashlar survives 1, mdraid survives 2", red)

    def test_durability(self):
        settings = {"fsync": False, "synchronous_commit": "off", "full_page_writes": True,
                    "shared_buffers": "1GB"}  # fmt: skip
        words = "".join(f"{name} = {json.dumps(value)}\n" for name, value in settings.items())
        red = self.red(self.known(f"{STUDY}[pgbench.settings]\n{words}"))
        self.assertEqual(2, sum("DURABILITY" in text for text in red))
        self.assertIn("fsync = off", " ".join(red))

    def test_no_record_of_what_is_written(self):
        source = self.known()
        self.assertEqual(list(cautions.resyncs(source)), [])
        for kind, change in [("mdraid", {"bitmap": False}), ("ashlar", {"policy": "none"})]:
            [one] = cautions.resyncs(self.with_side(source, kind, **change))
            self.assertTrue(one.red)
            self.assertIn(f"{kind} ran without a record of what is being written", one.text)
        closed = self.with_side(source, "mdraid", bitmap=False, policy="ppl")
        self.assertEqual(list(cautions.resyncs(closed)), [])

    def test_the_cache_of_zfs_answers_fio(self):
        synthetic.fio(self.home)
        source = self.with_side(Source.read(self.home), "ashlar", kind="zfs")
        [one] = cautions.caches(source)
        self.assertTrue(one.red and "CACHE (ARC)" in one.text)
        settings = {"ashlar": {"settings": {"commands": "zfs create -o primarycache=metadata"}}}
        self.assertEqual(list(cautions.caches(replace(source, sides=settings))), [])

    def test_degraded_btrfs_may_write_a_narrower_raid(self):
        source = self.known()
        self.assertEqual(list(cautions.narrower(source)), [])
        [one] = cautions.narrower(self.with_side(source, "mdraid", kind="btrfs"))
        self.assertIn("mdraid with a drive out need not be degraded", one.text)

    def with_side(self, source: Source, name: str, **change) -> Source:
        sides = tuple(
            side.model_copy(update=change) if side.name == name else side
            for side in source.study.side
        )
        return replace(source, study=source.study.model_copy(update={"side": sides}))

    def test_failures_and_what_is_missing(self):
        source = self.known()
        lines = (self.home / "cells.jsonl").read_text().splitlines(keepends=True)
        words = json.loads(lines[0]) | {"failed": 7}
        gone = json.loads(lines[-1])
        (self.home / "cells.jsonl").write_text(json.dumps(words) + "\n" + "".join(lines[1:-1]))
        failure = {"cell": gone, "error": "the guest did not come up", "at": 0}
        (self.home / "failures.jsonl").write_text(json.dumps(failure) + "\n")
        source = Source.read(self.home)
        red = " ".join(self.red(source))
        self.assertIn("7 in ashlar, healthy, simple-update", red)
        self.assertIn("CELLS FAILED", red)
        said = f"1 of 4 cells are not measured (ashlar-lab run --resume {self.home})"
        self.assertIn(said, self.other(source))
        called = ["ashlar-lab", "run", "x", "--skip-missing", "--overwrite", "--quick"]
        self.change("machine.json", lambda machine: machine.update(called=called))
        again = f"(ashlar-lab run --skip-missing --overwrite --resume {self.home})"
        self.assertIn(again, self.other(source))
        rows = dict(tables.notes(source).rows)
        self.assertIn("FAILED: the guest did not come up", " ".join(rows.values()))
        (self.home / "failures.jsonl").write_text(json.dumps(failure | {"tried": False}) + "\n")
        source = Source.read(self.home)
        self.assertNotIn("CELLS FAILED", (red := " ".join(self.red(source))))
        self.assertIn("CELLS WERE NOT TRIED", red)
        rows = dict(tables.notes(source).rows)
        self.assertIn("NOT TRIED, after: the guest did not come up", " ".join(rows.values()))

    def test_sheets_have_what_failed(self):
        self.known()
        lines = (self.home / "cells.jsonl").read_text().splitlines(keepends=True)
        gone = json.loads(lines[-1])
        (self.home / "cells.jsonl").write_text("".join(lines[:-1]))
        failure = {"cell": gone, "error": "the guest did not come up", "at": 0}
        (self.home / "failures.jsonl").write_text(json.dumps(failure) + "\n")
        sheets.write(Source.read(self.home), self.home)
        place = {name: str(gone[name]) for name in sheets.PLACE}
        for name, wanted in [
            ("cells.csv", {"error": "the guest did not come up", "per_second": ""}),
            ("summary.csv", {"repeats": "0", "cells_without_figures": "1"}),
        ]:
            rows = rows_of(self.home / name)
            self.assertEqual(len(rows), 4, name)
            for row in rows:
                its = {column: row[column] for column in place | wanted}
                self.assertEqual(its == place | wanted, row is rows[-1], (name, row))

    def test_the_summary_has_what_the_tables_compare(self):
        source = self.known()
        sheets.write(source, self.home)
        rows = rows_of(self.home / "summary.csv")
        self.assertEqual(len(rows), len(source.summaries))
        for row, one in zip(rows, source.summaries, strict=True):
            for name, (value, differ) in [
                ("of_baseline", tables.of_baseline(source, one)),
                ("of_healthy", tables.of_healthy(source, one)),
            ]:
                self.assertEqual(row[f"{name}_median"], str(value.median) if value else "")
                self.assertEqual(row[f"{name}_is_no_chance"], str(differ) if value else "")
        self.assertTrue(any(row["of_baseline_median"] for row in rows))
        self.assertTrue(any(row["of_healthy_median"] for row in rows))
        self.assertTrue(all(row["array_writes_median"] for row in rows))
        synthetic.fio(self.home)
        source = Source.read(self.home)
        sheets.write(source, self.home)
        rows = rows_of(self.home / "summary.csv")
        shares = [tables.efficiency(source, one) for one in source.summaries]
        told = ["" if share is None else str(share) for share in shares]
        self.assertEqual([row["of_the_bare_drives"] for row in rows], told)
        self.assertTrue(any(told))

    def test_faster_without_a_drive_is_the_order_or_chance(self):
        rates = RATES | {("mdraid", "degraded"): 12}
        synthetic.pgbench(self.home, STUDY, rates)
        told = self.other(Source.read(self.home))
        wanted = "degraded: mdraid did 120% of what it does with all drives: that came before"
        self.assertIn(wanted, told)
        self.assertNotIn("ashlar did", told)

    def test_faster_than_the_drives_is_a_cache(self):
        synthetic.fio(self.home)

        def change(raw):
            raw["randwrite"]["iops"] = 40_000

        told = self.other(self.change("raw.json", change))
        wanted = "randwrite, 1 VM, healthy: raid0 did (119|120)% of what the bare drives do"
        self.assertRegex(told, wanted)

    def test_bare_drives_are_those_of_the_arrays_under_load(self):
        """Twice as many that do twice as much are the same drives."""
        synthetic.fio(self.home)
        source = Source.read(self.home)
        was = [tables.efficiency(source, one) for one in source.summaries]

        def change(raw):
            for its in raw.values():
                its["drives"], its["iops"] = its["drives"] * 2, its["iops"] * 2

        source = self.change("raw.json", change)
        for one, share in zip(source.summaries, was, strict=True):
            self.assertAlmostEqual(tables.efficiency(source, one), share)
        self.assertIn("times 5/10", tables.bare_drives(source, "randread", 1))

    def two_arrays(self, fewer: dict[str, dict]) -> Source:
        """Ten drives that share a disk do 50,000, as five do, if five were measured."""
        synthetic.fio(self.home)
        self.change("study.json", lambda study: study["array"].update(count=2))
        return self.change(
            "raw.json",
            lambda raw: raw.update({"randread": raw["randread"] | {"drives": 10}, **fewer}),
        )

    def test_a_load_of_one_array_is_beside_the_drives_of_one(self):
        five = {"drives": 5, "iops": 50_000, "bytes_per_sec": 204_800_000}
        source = self.two_arrays({"randread, 5 drives": five})
        self.assertNotIn("what the bare drives do", self.other(source))
        self.assertIn("on 5 drives", tables.bare_drives(source, "randread", 1))
        self.assertIn("on 10 drives", tables.bare_drives(source, "randread", 2))
        for loads in (1, 2):
            self.assertNotIn("times", tables.bare_drives(source, "randread", loads))
        self.assertIn("randread, 5 drives", [row[0] for row in tables.drives(source).rows])
        source = self.change(
            "raw.json", lambda raw: raw["randread, 5 drives"].update(iops=100_000)
        )
        shares = {one.cell.loads: tables.efficiency(source, one)
                  for one in source.telling("randread", 1) + source.telling("randread", 2)
                  if (one.cell.side, one.cell.state) == ("raid0", "healthy")}  # fmt: skip
        self.assertAlmostEqual(shares[1], 0.48, delta=0.02)
        self.assertAlmostEqual(shares[2], 0.96, delta=0.02)

    def test_a_side_with_a_drive_for_each_load_is_beside_as_many(self):
        synthetic.fio(self.home)
        self.change("sides.json", lambda sides: sides["raid0"].update(kind="raw"))
        found = {"randread, 1 drive": {"drives": 1, "iops": 50_000},
                 "randread, 2 drives": {"drives": 2, "iops": 100_000}}  # fmt: skip
        source = self.change("raw.json", lambda raw: raw.update(found))
        shares = {(one.cell.side, one.cell.loads): tables.efficiency(source, one)
                  for loads in (1, 2) for one in source.telling("randread", loads)
                  if one.cell.state == "healthy"}  # fmt: skip
        wanted = {("ashlar", 1): 0.95, ("ashlar", 2): 0.95, ("raid0", 1): 0.97, ("raid0", 2): 0.48}
        for key, share in wanted.items():
            self.assertAlmostEqual(shares[key], share, delta=0.03)
        said = tables.bare_drives(source, "randread", 1)
        self.assertIn("beside ashlar: 160 on 5 drives by themselves (32 on each); ", said)
        self.assertIn("raid0: 32 on one drive by itself.", said)
        said = tables.bare_drives(source, "randread", 2)
        self.assertIn("raid0: 64 on 2 drives by themselves (32 on each).", said)
        # An older run measured all of them only.
        said = tables.bare_drives(source, "randwrite", 1)
        self.assertIn("ashlar: 160 on 5 drives by themselves (32 on each); raid0: 160 on 5", said)
        self.assertIn("whose rate is taken times 1/5: this load has 1 drive.", said)
        # As RAID 0 it has all of the array that the others have, and protects as little.
        source = self.change("study.json", lambda study: study["side"][1].update(raid0=True))
        said = tables.bare_drives(source, "randread", 2)
        self.assertIn("64 I/Os under way in all, beside 160 on 5 drives by themselves", said)
        [red] = [text for text in self.red(source) if "UNEQUAL" in text]
        self.assertIn("ashlar survives 1, raid0 survives 0", red)

    def test_who_reached_files_through_loop_devices_is_told(self):
        synthetic.fio(self.home)
        self.assertNotIn("through loop devices", self.other(Source.read(self.home)))

        def change(study):
            study["drives"]["kind"] = "file"
            study["side"][1]["kind"] = "raw"

        source = self.change("study.json", change)
        self.assertIn("raid0 reached these files through loop devices", self.other(source))

    def test_an_older_run_takes_a_share_of_all_drives_and_says_it(self):
        told = self.other(self.two_arrays({}))
        self.assertRegex(told, r"randread, 1 VM, healthy: raid0 did 1[89]\d% of what the bare")
        self.assertIn("or so few do more than their share of what all do.", told)

    def test_an_older_run_did_not_tell_two_drives_out_from_one(self):
        study = STUDY.replace('"degraded"', '"degraded-twice"') + "\n[array]\nparity = 2\n"
        rates = {(side, state): 20 for side in ("ashlar", "mdraid")
                 for state in ("healthy", "degraded-twice")}  # fmt: skip
        results = synthetic.pgbench(self.home, study, rates)
        for cell in results.cells:
            told = "healthy" if cell.state == "healthy" else "degraded"
            rows = [{"second": at, "state": told} for at in range(100)]
            synthetic.write_seconds(results.place_of(cell) / "seconds.csv", rows)
        source = Source.read(self.home)
        self.assertIn("NOT SEEN IN", " ".join(self.red(source)))
        self.assertNotIn("older run", self.other(source))
        path = self.home / "cells.jsonl"
        path.write_text(path.read_text().replace('"drives_out_told": true, ', ""))
        source = Source.read(self.home)
        self.assertNotIn("NOT SEEN IN", " ".join(self.red(source)))
        self.assertIn("This is an older run", self.other(source))

    def test_an_older_run_with_an_array_that_was_idle_is_read(self):
        synthetic.fio(self.home)
        source = self.change("study.json", lambda study: study["array"].update(count=3))
        self.assertEqual(source.study.array.count, 3)

    def states(self, side: str, states: list[str], arrays: int = 1) -> Source:
        """What the arrays of a side were in each second of its cell of the state rebuilding."""
        study = STUDY.replace('"healthy", "degraded"', '"healthy", "rebuilding"')
        study = study.replace("repeats = 1", f"repeats = 1\n[array]\ncount = {arrays}")
        rates = {(one, state): 20 for one in ("ashlar", "mdraid")
                 for state in ("healthy", "rebuilding")}  # fmt: skip
        results = synthetic.pgbench(self.home, study, rates)
        cell = next(one for one in results.cells if (one.side, one.state) == (side, "rebuilding"))
        rows = [{"second": at, "state": state} for at, state in enumerate(states)]
        synthetic.write_seconds(results.place_of(cell) / "seconds.csv", rows)
        return Source.read(self.home)

    def test_a_rebuild_that_ended_is_red(self):
        rebuilding = [f"rebuilding {at}.0%" for at in range(60)]
        source = self.states("mdraid", rebuilding + ["healthy"] * 40)
        red = " ".join(self.red(source))
        self.assertIn("NOT SEEN IN THE STATE", red)
        self.assertIn("simple-update, rebuilding, 4 clients: mdraid 60%.", red)
        self.assertNotIn("ashlar", red)
        [verdict] = tables.verdict(source)
        self.assertEqual(verdict.columns[-1], "rebuilt, % a minute")
        self.assertEqual([row[-1] for row in verdict.rows], ["–", "–", "–", "60.0"])

    def test_what_was_rebuilt_is_said_to_be_of_what(self):
        self.states("mdraid", [f"rebuilding {at}.0%" for at in range(100)])
        path = self.home / "cells.jsonl"
        cells = list(map(json.loads, path.read_text().splitlines()))

        def caption(ashlar: float | None, mdraid: float | None) -> str:
            """Of these shares of the disks, written before a rebuild."""
            for cell in cells:
                share = {"ashlar": ashlar, "mdraid": mdraid}[cell["side"]]
                cell["filled_share"] = share if cell["state"] == "rebuilding" else None
            path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
            [verdict] = tables.verdict(Source.read(self.home))
            self.assertIn("of a drive's whole room in the array", verdict.caption)
            return verdict.caption

        self.assertIn("All that the disks hold was written before", caption(1.0, 1.0))
        # one that gives a file system, on which room is left to the database
        said = caption(0.916, 1.0)
        self.assertNotIn("All that", said)
        self.assertIn("ashlar at least 91 %, mdraid all.", said)
        for shares in [(None, None), (1.0, None)]:  # older, and such a one that went on
            self.assertIn("this run, or a part of it, is older", caption(*shares))

    def test_an_older_run_of_fio_wrote_what_its_patterns_use(self):
        results = synthetic.fio(self.home)
        source = Source.read(self.home)
        rebuilt = [replace(cell, state="rebuilding") for cell in results.cells]
        for size, share in [(None, 1.0), (256 << 20, None)]:
            asked = source.study.fio.model_copy(update={"size": size})
            study = source.study.model_copy(update={"fio": asked})
            told = replace(source, study=study, results=replace(results, cells=rebuilt))
            self.assertEqual(told.filled_shares, {"ashlar": share, "raid0": share})
            self.assertEqual("is older" in tables.rebuilt_of(told), not share)

    def test_an_array_of_several_that_was_in_another_state_is_red(self):
        states = ["rebuilding 1.0% | rebuilding 1.0%"] * 40 + ["rebuilding 2.0% | healthy"] * 60
        source = self.states("mdraid", states, arrays=2)
        red = " ".join(self.red(source))
        self.assertIn("simple-update, 2 loads, rebuilding, 4 clients: mdraid 40%.", red)
        self.assertIn("A second counts if all arrays with a load were in the state", red)
        said = dict(report.about(source))
        self.assertEqual(said["states"], "healthy, rebuilding: all 2 arrays at once")

    def test_the_state_holds_with_a_second_in_twenty_without(self):
        rebuilding = [f"rebuilding {at / 10}%" for at in range(95)]
        for others, is_red in [(5, False), (6, True)]:
            with tempfile.TemporaryDirectory() as directory:
                self.home = Path(directory)
                source = self.states("mdraid", rebuilding[others - 5 :] + ["healthy"] * others)
                self.assertEqual("NOT SEEN IN" in " ".join(self.red(source)), is_red)

    def test_reads_of_memory_are_told_beside_the_verdict(self):
        study = STUDY.replace("simple-update", "select-only")
        [verdict] = tables.verdict(self.known(study))
        self.assertEqual(verdict.warning, "")
        path = self.home / "cells.jsonl"
        cells = [json.loads(line) for line in path.read_text().splitlines()]
        for cell in cells:
            if cell["side"] == "mdraid":
                cell["array_reads"] = cell["operations"] // 101
        path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
        [verdict] = tables.verdict(Source.read(self.home))
        self.assertIn("THE ARRAY WAS NOT READ", verdict.warning)
        self.assertIn("mdraid, healthy; mdraid, degraded.", verdict.warning)
        self.assertNotIn("ashlar", verdict.warning)
        self.assertIn(verdict.warning, report.make(self.home).read_text())

    def test_reads_that_nobody_counted_may_have_been_of_memory(self):
        self.known(STUDY.replace("simple-update", "select-only"))
        path = self.home / "cells.jsonl"
        cells = [json.loads(line) for line in path.read_text().splitlines()]

        def verdict(mdraid_reads: int, of_ashlar: int | None) -> str:
            for cell in cells:
                reads = mdraid_reads if cell["side"] == "mdraid" else of_ashlar
                cell["array_reads"] = reads and reads * cell["operations"]
            path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
            return next(tables.verdict(Source.read(self.home))).warning

        uncounted = "were not counted, and memory may have answered these rows too: ashlar, healthy"
        self.assertEqual(verdict(1, 1), "")
        self.assertIn(uncounted, verdict(1, None))
        self.assertNotIn("THE ARRAY WAS NOT READ", verdict(1, None))
        self.assertRegex(verdict(0, None), f"^THE ARRAY WAS NOT READ.* mdraid, .*{uncounted}")

    def changed_cells(self, change) -> Source:
        path = self.home / "cells.jsonl"
        cells = [json.loads(line) for line in path.read_text().splitlines()]
        for cell in cells:
            change(cell)
        path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
        return Source.read(self.home)

    def test_reads_of_fio_that_memory_answered_are_no_share_of_drives(self):
        """Of btrfs, whose arrays nobody counts: its drives saw a tenth of what fio read."""
        synthetic.fio(self.home)
        source = Source.read(self.home)
        self.assertFalse(any(memory.answered(source, one) for one in source.summaries))

        def change(cell):
            if cell["side"] == "raid0" and "read" in cell["load"]:
                cell["array_drive_read_bytes"] = cell["array_read_bytes"] // 10
                cell["array_drive_reads"] = 1
                cell["array_reads"] = cell["array_read_bytes"] = None

        source = self.changed_cells(change)
        for one in source.summaries:
            by_memory = one.cell.side == "raid0" and "read" in one.cell.load
            self.assertEqual(memory.answered(source, one), by_memory)
            self.assertEqual(tables.efficiency(source, one) is None, by_memory)
        table = next(t for t in tables.verdict(source) if t.title == "randread, 1 VM")
        shown = {(row[0], row[1]): row[-1] for row in table.rows}
        self.assertEqual(shown["healthy", "raid0"], "memory")
        self.assertIn(" %", shown["healthy", "ashlar"])
        self.assertIn("MEMORY ANSWERED READS", table.warning)
        self.assertIn("raid0, healthy (90 %)", table.warning)
        self.assertNotIn("ashlar", table.warning)
        said = " ".join(self.red(source))
        self.assertIn("READS WERE ANSWERED BY MEMORY", said)
        self.assertIn("randread, 1 VM, degraded: raid0 90 %", said)
        writes = next(t for t in tables.verdict(source) if t.title.startswith("randwrite"))
        self.assertEqual(writes.warning, "")
        sheets.write(source, self.home)
        rows = [row for row in rows_of(self.home / "summary.csv") if row["side"] == "raid0"]
        shares = {row["load"]: row["answered_by_memory"][:3] for row in rows}
        self.assertEqual(shares, {"randread": "0.9", "randwrite": "", "seqread": "0.9"})

    def test_honest_reads_between_slow_looks_are_not_of_memory(self):
        """Of 3 s a third is missing, as looks were in the middle of 3 s: and all, of memory."""
        synthetic.fio(self.home)
        told = [(1.08, 0.64, False), (0.0, 0.64, True), (1.08, 0.0, True), (None, 0.8, False)]
        for blurred, read, by_memory in [*told, (None, 0.64, True)]:

            def change(cell, blurred=blurred, read=read):
                if "read" in cell["load"]:
                    asked = cell["operations"] * (4096 if cell["load"] == "randread" else 1 << 20)
                    cell["seconds"], cell["blurred_seconds"] = 3, blurred
                    cell["array_read_bytes"] = int(asked * read)

            source = self.changed_cells(change)
            for one in source.summaries:
                if one.cell.load == "randread":
                    found = memory.answered(source, one)
                    self.assertEqual(found, by_memory, (blurred, read))

    def test_more_than_the_drives_do_is_red_where_only_drives_were_counted(self):
        """Records of 16K are read for 4K: nothing is missing, and three of four may be memory's."""
        synthetic.fio(self.home)

        def of_drives(cell):
            if cell["side"] == "raid0":
                cell["array_drive_reads"] = cell["array_reads"]
                cell["array_drive_read_bytes"] = cell["array_read_bytes"]
                cell["array_reads"] = cell["array_read_bytes"] = None

        source = self.changed_cells(of_drives)
        self.assertNotIn("NOT WHAT THEY WERE ASKED", " ".join(self.red(source)))
        source = self.change("raw.json", lambda raw: raw["randread"].update(iops=10_000))
        said = " ".join(self.red(source))
        self.assertRegex(said, r"raid0 did 4\d\d% of .* NOT WHAT THEY WERE ASKED FOR")
        self.assertNotIn("NOBODY COUNTED", said)
        self.assertNotIn("raid0 did", self.other(source))

    def test_more_than_the_drives_do_is_red_where_nobody_counted_reads(self):
        """As in a run that is older than drives are counted: btrfs did 453 % of them."""
        synthetic.fio(self.home)

        def uncounted(cell):
            if cell["side"] == "raid0":
                cell["array_reads"] = cell["array_read_bytes"] = None

        self.changed_cells(uncounted)
        self.assertNotIn("NOBODY COUNTED", " ".join(self.red(Source.read(self.home))))
        source = self.change("raw.json", lambda raw: raw["randread"].update(iops=10_000))
        said = " ".join(self.red(source))
        self.assertRegex(said, r"randread, 1 VM, healthy: raid0 did 4\d\d% of .* NOBODY COUNTED")
        self.assertNotIn("ashlar did", said)
        self.assertNotIn("raid0 did", self.other(source))
        self.assertIn("randread, 1 VM, healthy: ashlar did", self.other(source))

    def test_what_only_waits_in_a_journal_is_red(self):
        self.known()
        path = self.home / "cells.jsonl"
        cells = [json.loads(line) for line in path.read_text().splitlines()]

        def red(share: float | None) -> str:
            for cell in cells:
                if (cell["side"], cell["state"]) == ("ashlar", "degraded"):
                    cell["array_pending_bytes"] = share and share * cell["array_write_bytes"]
            path.write_text("".join(json.dumps(cell) + "\n" for cell in cells))
            return " ".join(self.red(Source.read(self.home)))

        for share in (None, 0.05, -0.05):
            self.assertNotIn("IN PLACE", red(share))
        for share, told in [(0.06, "+6%"), (-0.5, "-50%")]:
            self.assertIn(f"simple-update, degraded, 4 clients: ashlar {told}.", red(share))

    def test_short_ones(self):
        synthetic.pgbench(self.home, STUDY.replace("seconds = 100", "seconds = 5"), RATES)
        self.assertIn("5 s only", " ".join(self.red(Source.read(self.home))))

    def test_emulation(self):
        study = STUDY.replace('where = "host"', 'where = "vm"')
        self.assertIn("SOFTWARE EMULATION limits these", self.other(self.known(study)))
        # It went on with KVM: what was measured before is what it is.
        words = json.loads((self.home / "machine.json").read_text())
        words |= {"where": {"acceleration": "kvm"}, "machine": {"kvm": True, "hypervisor": True}}
        source = self.went_on(words)
        self.assertIn("SOFTWARE EMULATION limits some of these", self.other(source))

    def test_a_call_that_measured_nothing_has_changed_nothing(self):
        self.known()
        other = json.loads((self.home / "machine.json").read_text())
        other |= {"kernel": {"release": "7.0"}}
        said = ("the kernel: 6.0.0-synthetic, then 7.0", "went on once")
        source = self.went_on(other)
        for text, where in zip(said, (" ".join(self.red(source)), self.other(source)), strict=True):
            self.assertIn(text, where)
        source = self.went_on(other, measured=False)
        for text in said:
            self.assertNotIn(text, " ".join(self.red(source)) + self.other(source))

    def test_a_run_that_went_on_is_beside_drives_as_they_were_before(self):
        synthetic.fio(self.home)
        self.assertNotIn("The bare drives were", self.other(Source.read(self.home)))
        source = self.went_on(json.loads((self.home / "machine.json").read_text()))
        self.assertIn("went on once. The bare drives were measured before", self.other(source))
        self.assertNotIn("The bare drives were", self.other(replace(source, raw={})))

    def went_on(self, machine: dict, measured: bool = True) -> Source:
        """An hour later, on that machine, where the last cell was measured, or none."""
        machine |= {"date": "2023-11-14 23:13:20 +0000"}
        (self.home / "machine-2.json").write_text(json.dumps(machine))
        source = Source.read(self.home)
        if measured:
            last = source.results.cells[-1]
            source.results.cells[-1] = replace(last, began=last.began + 3610)
        return source


class Page(HTMLParser):
    """What of a page matters here."""

    def __init__(self, text: str):
        super().__init__()
        self.links, self.loaded, self.headings = [], [], []
        self.tables = self.columns = self.rows = self.drawings = self.named = 0
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        its = dict(attributes)
        self.links += [its["href"]] if tag == "a" else []
        self.loaded += [its[name] for name in ("src", "data", "srcset") if name in its]
        self.loaded += [its.get("href", "")] if tag == "link" else []
        self.headings += [int(tag[1])] if re.fullmatch("h[1-6]", tag) else []
        self.tables += tag == "table"
        self.columns += its.get("scope") == "col"
        self.rows += its.get("scope") == "row"
        self.drawings += tag == "svg"
        self.named += its.get("role") == "img" and len(its.get("aria-label", "")) > 20


class Whole(InADirectory):
    def test_page_paper_and_tables(self):
        self.known()
        page = report.make(self.home)
        text = page.read_text()
        read = Page(text)
        self.assertEqual(read.loaded, [], "it needs nothing beside it")
        self.assertNotRegex(text, r"@import|url\((?!#)|<script")
        for link in read.links:
            self.assertTrue((page.parent / link).exists(), link)
        self.assertEqual(read.headings[0], 1)
        self.assertTrue(all(b - a <= 1 for a, b in pairwise(read.headings)))
        self.assertGreater(read.drawings, 5)
        self.assertEqual(read.drawings, read.named, "each drawing is told in words")
        self.assertGreaterEqual(read.columns, 2 * read.tables)
        self.assertGreater(read.rows, 20)
        ids = re.findall(r'\bid="([^"]+)"', text)
        self.assertEqual(len(ids), len(set(ids)))
        self.assertTrue((page.parent / "report.pdf").read_bytes().startswith(b"%PDF"))
        self.assertTrue(list(page.parent.glob("*.png")))
        self.assertLess(text.index("SYNTHETIC results"), text.index("The verdict"))
        self.assertLess(text.index("The verdict"), text.index("<svg"))
        self.check_sheets(page.parent)

    def check_sheets(self, directory: Path):
        rows = rows_of(directory / "cells.csv")
        self.assertEqual(len(rows), 4)
        self.assertEqual((rows[0]["side"], rows[0]["per_second"]), ("ashlar", "20.0"))
        self.assertEqual((rows[0]["mean_ms"], rows[0]["p95_ms"]), ("50.5", "95.0"))
        self.assertEqual(len(rows_of(directory / "over-time.csv")), 400)
        latencies = rows_of(directory / "latencies.csv")
        told = {row["percent"]: row["latency_ms"] for row in latencies}
        self.assertEqual((told["1"], told["100"]), ("1.0", "100.0"))

    def test_a_later_row_may_have_more_columns(self):
        path = sheets.sheet(self.home / "x.csv", [{"a": 1, "b": 2}, {"a": 3, "c": 4, "b": 5}])
        self.assertEqual(path.read_text().splitlines(), ["a,b,c", "1,2,", "3,5,4"])

    def test_again_makes_the_same(self):
        self.known()
        first = report.make(self.home).read_text()
        self.assertEqual(first, report.make(self.home).read_text())
        self.assertFalse((self.home / "report.new").exists())

    def test_nothing_to_report(self):
        with self.assertRaisesRegex(report.ReportError, "no finished cell"):
            report.make(self.home)
        self.assertFalse(Results.open(self.home).cells)


class Colours(unittest.TestCase):
    def luminance(self, colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [
            one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(self, one: str, other: str) -> float:
        low, high = sorted((self.luminance(one), self.luminance(other)))
        return (high + 0.05) / (low + 0.05)

    def themes(self) -> list[dict[str, str]]:
        text = (Path(report.__file__).parent / "style.css").read_text()
        parts = text.split("@media screen and (prefers-color-scheme: dark)")
        return [dict(re.findall(r"--([\w-]+): (#\w{6})", part)) for part in parts]

    def test_text_and_lines_stand_out_light_and_dark(self):
        from lab.report.plots import COLOURS

        for theme in self.themes():
            for name in ("ink", "faint", "link", "red"):
                self.assertGreaterEqual(self.contrast(theme[name], theme["paper"]), 4.5, name)
            self.assertGreaterEqual(self.contrast(theme["red"], theme["red-paper"]), 4.5)
            self.assertGreaterEqual(self.contrast(theme["faint"], theme["band"]), 4.5)
            for colour in COLOURS:
                self.assertGreaterEqual(self.contrast(colour, theme["paper"]), 3, colour)


if __name__ == "__main__":
    unittest.main()
