"""Goal: what a run has finished is read again, also when it was cut off in the middle of a line."""

import json
import tempfile
import unittest
from pathlib import Path

from lab.results import Cell, Results


class Torn(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(directory.cleanup)
        self.home = Path(directory.name)

    def cell(self, number: int) -> Cell:
        return Cell(number, 0, "ashlar", "healthy", "mixed", 0, 1, operations=number)

    def test_a_half_written_cell_is_measured_again(self):
        results = Results.open(self.home)
        results.add(self.cell(0))
        results.add(self.cell(1))
        path = self.home / "cells.jsonl"
        path.write_bytes(path.read_bytes()[:-30])
        again = Results.open(self.home)
        self.assertEqual([cell.number for cell in again.cells], [0])
        again.add(self.cell(2))
        self.assertEqual([cell.number for cell in Results.open(self.home).cells], [0, 2])

    def test_a_cell_says_whether_two_drives_out_are_told_from_one(self):
        """Those of older runs do not say it, also where the run goes on today."""
        Results.open(self.home).add(self.cell(0))
        path = self.home / "cells.jsonl"
        words = json.loads(path.read_text())
        del words["drives_out_told"]
        path.write_text(json.dumps(words) + "\n")
        Results.open(self.home).add(self.cell(1))
        told = [cell.drives_out_told for cell in Results.open(self.home).cells]
        self.assertEqual(told, [False, True])

    def test_a_half_written_failure_too(self):
        path = self.home / "failures.jsonl"
        path.write_text('{"cell": {"num')
        Results.open(self.home).add_failure(self.cell(0), "it was not well")
        (line,) = path.read_text().splitlines()
        self.assertEqual(json.loads(line)["error"], "it was not well")


if __name__ == "__main__":
    unittest.main()
