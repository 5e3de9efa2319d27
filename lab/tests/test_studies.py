"""Goal: every study that is shipped goes through from one command, and its report is made.

Method: `--quick`, as a person would call it, on what this machine has; sides that it cannot run are
left out. Takes root, QEMU, what makes a guest, and the binary; some ten minutes.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

from lab.results import Cell, Results
from lab.tests import needs

CHECKOUT = Path(__file__).parents[2]
BINARY = Path(os.environ.get("ASHLAR") or CHECKOUT / "target/release/ashlar")
SHIPPED = {path.stem for path in (CHECKOUT / "lab/studies").glob("*.toml")}
# PostgreSQL in a guest that has the arrays has a test of its own (`test_guest_study`).
STUDIES = sorted(SHIPPED - {"postgres-guest"})
SECONDS_MAX = 1200


@needs(os.geteuid() == 0, "takes root")
@needs(BINARY.exists(), f"{BINARY} is not there: run make build")
class Studies(unittest.TestCase):
    def test_each_goes_through(self):
        for name in STUDIES:
            with self.subTest(name), tempfile.TemporaryDirectory(prefix="ashlar-lab-") as home:
                self.run_quickly(name, Path(home) / "results")

    def run_quickly(self, name: str, out: Path) -> None:
        done = ashlar_lab("run", name, "--quick", "--skip-missing", "--out", str(out))
        done = resumed(done, out, "--skip-missing")
        said = done.stdout[-2000:] + done.stderr[-2000:]
        cells = Results.open(out).cells
        # What another side cannot do is a result: RAID 5 of btrfs with a drive out fails fsync.
        errors = failures(out, {cell.key for cell in cells})
        failed = {side for side, _ in errors}
        self.assertEqual(done.returncode, 1 if failed else 0, said)
        for side, error in errors:
            self.assertEqual(side, "btrfs", said)
            self.assertIn("Input/output error", error)
        sides = json.loads((out / "sides.json").read_text())
        measured = {side for side, its in sides.items() if "skipped" not in its}
        self.assertIn("ashlar", measured, said)
        self.assertLessEqual(measured, {cell.side for cell in cells} | failed)
        for cell in cells:
            self.assertGreater(cell.operations, 0, cell)
            self.assertEqual(cell.failed, 0, cell)
            self.assertTrue(was_in_its_state(cell), cell)
        report = (out / "report/index.html").read_text()
        for side in measured:
            self.assertIn(side, report)


def ashlar_lab(*words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "lab.main", *words]
    return subprocess.run(
        command, cwd=CHECKOUT, capture_output=True, text=True, timeout=SECONDS_MAX
    )


def resumed(
    done: subprocess.CompletedProcess, out: Path, *words: str
) -> subprocess.CompletedProcess:
    """The last run: a cell that was too slow to be measured is measured anew, as long as that adds
    one."""
    cells = -1
    while done.returncode == 1 and out.exists() and (now := len(Results.open(out).cells)) > cells:
        cells = now
        done = ashlar_lab("run", "--resume", str(out), *words)
    return done


def failures(out: Path, done: set[tuple]) -> list[tuple[str, str]]:
    """Side and error of each try of a cell that is still missing."""
    path = out / "failures.jsonl"
    tries = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    missing = [one for one in tries if Cell(**one["cell"]).key not in done]
    return [(one["cell"]["side"], one["error"]) for one in missing]


def was_in_its_state(cell: Cell) -> bool:
    """While it was measured; a rebuild of drives so small may be over with the warm-up."""
    all_of_them = re.compile(rf"(array|all \d+ arrays) {cell.state}")
    seen = [what for at, what in cell.events if at < cell.seconds]
    return bool(cell.state_share) or any(map(all_of_them.fullmatch, seen))


class States(unittest.TestCase):
    def test_a_state_that_never_was_is_seen(self):
        cell = Cell(0, 0, "s", "rebuilding", "p", 0, 1, state_share=0.0)
        self.assertTrue(was_in_its_state(replace(cell, state_share=0.1)))
        for what, wanted in [
            ("array rebuilding", True), ("all 2 arrays rebuilding", True),
            ("arrays: 1 healthy, 1 rebuilding", False), ("array healthy", False),
            ("spare takes the place of drive 0", False),
        ]:  # fmt: skip
            self.assertEqual(was_in_its_state(replace(cell, events=((-1.0, what),))), wanted)
            late = replace(cell, seconds=5.0, events=((5.1, what),))
            self.assertFalse(was_in_its_state(late))


if __name__ == "__main__":
    unittest.main()
