"""Goal: a study in a guest goes through from one command: mdraid and Ashlar on the same emulated
drives, which lose one; what it leaves can be counted again, and nothing else stays.

Method: `postgres-guest --quick`, as a person would call it; then the logs, by hand. Takes QEMU, the
programs that make a guest, and the binary; a minute or two with KVM or on a quiet machine.
"""

import gzip
import json
import os
import tempfile
import unittest
from pathlib import Path

from lab import ledger
from lab.results import Results
from lab.tests import needs
from lab.tests.test_studies import ashlar_lab, resumed, was_in_its_state

US_PER_S = 1_000_000
CHECKOUT = Path(__file__).parents[2]
BINARY = Path(os.environ.get("ASHLAR") or CHECKOUT / "target/release/ashlar")
CACHE = Path(os.environ.get("ASHLAR_CACHE") or CHECKOUT / ".cache").resolve()


@needs(BINARY.exists(), f"{BINARY} is not there: run make build")
class GuestStudy(unittest.TestCase):
    def test_postgresql_on_both_sides_healthy_and_degraded(self):
        with tempfile.TemporaryDirectory(prefix="ashlar-lab-") as home:
            out = Path(home) / "results"
            words = ("--no-report", "--out", str(out))
            done = ashlar_lab("run", "postgres-guest", "--quick", *words)
            done = resumed(done, out, "--no-report")
            self.assertEqual(done.returncode, 0, done.stdout[-2000:] + done.stderr[-2000:])
            results = Results.open(out)
            cells = [(cell.side, cell.state) for cell in results.cells]
            states = ("healthy", "degraded")
            wanted = [(side, state) for side in ("ashlar", "mdraid") for state in states]
            self.assertEqual(sorted(cells), sorted(wanted))
            for cell in results.cells:
                self.assertEqual(cell.failed, 0)
                self.assertEqual(cell.state_after, cell.state)
                self.assertTrue(was_in_its_state(cell), cell)
                self.assertEqual(cell.operations, self.ended_in_time(results, cell))
                pulled = [what for _, what in cell.events if "pulled" in what]
                self.assertEqual(len(pulled), cell.state == "degraded")
            sides = json.loads((out / "sides.json").read_text())
            settings = sides["mdraid"]["settings"]
            self.assertEqual(settings["consistency policy, as the kernel has it"], "bitmap")
            self.assertEqual(sides["ashlar"]["protection"], sides["mdraid"]["protection"])
            machine = json.loads((out / "machine.json").read_text())
            self.assertIn("NVMe drives", machine["where"]["drives"])
        self.assertEqual(ledger.Ledger(CACHE / "lab/ledger").debts(), [])
        self.assertEqual(list((CACHE / "lab/drives").glob("nvme*.img")), [])

    def ended_in_time(self, results: Results, cell) -> int:
        """What pgbench's own log says ended between the warm-up and the end, by seconds: the last
        counts whole, though the measured time may end within it."""
        log = results.place_of(cell) / "guest.log.gz"
        ended = 0
        for line in gzip.open(log, "rt"):
            fields = line.split()
            since_us = int(fields[4]) * US_PER_S + int(fields[5]) - round(cell.began * US_PER_S)
            ended += 0 <= since_us // US_PER_S < cell.seconds
        return ended


if __name__ == "__main__":
    unittest.main()
