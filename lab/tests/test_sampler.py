"""Goal: what is seen now and then becomes what happened in each second, and nothing counts twice.

Method: totals of made-up samples, whose growth is known, and logs written by hand.
"""

import gzip
import json
import subprocess
import tempfile
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from lab import sampler
from lab.ledger import Ledger
from lab.loads import LoadError, Measured, fio, pgbench, summary, together, wait_until
from lab.place import Host
from lab.results import Cell
from lab.sampler import Meter, Sample
from lab.side import Counters, Disk
from lab.study import Pgbench as PgbenchStudy
from lab.where import Seat


def sample(at: float, reads: int, cpu: float, state: str = "healthy") -> Sample:
    return Sample(at, state, Counters(reads, 0, reads * 4096, 0), cpu, None, cpu / 2)


class Seconds(unittest.TestCase):
    def test_growth_is_given_to_the_seconds_in_which_it_was(self):
        # 100 reads a second, looked at in the middle of seconds
        samples = [sample(1000.5 + at, 100 * at, 0.25 * at) for at in range(6)]
        load = summary([Measured(1002.0, 3.0, {-1: 5, 0: 10, 1: 20, 2: 30}, {0: 40.0})])
        rows = sampler.rows(samples, load)
        self.assertEqual([row["second"] for row in rows], [-1, 0, 1, 2])
        self.assertEqual([row["array_reads"] for row in rows], [100, 100, 100, 100])
        self.assertEqual([row["storage_cores"] for row in rows], [0.25] * 4)
        self.assertEqual([row["daemon_cores"] for row in rows], [0.125] * 4)
        self.assertEqual([row["operations"] for row in rows], [5, 10, 20, 30])
        self.assertEqual(rows[1]["latency_ms_mean"], 4.0)
        self.assertIsNone(rows[0]["guest_cores"])

    def test_sums_of_rows_are_the_total(self):
        samples = [sample(at, reads, 0) for at, reads in [(0, 0), (1.3, 90), (1.9, 95), (4.2, 400)]]
        load = summary([Measured(0.0, 4.0, {0: 1}, {})])
        rows = sampler.rows(samples, load)
        total = sampler.totals(samples, 0.0, 4.0)["reads"]
        self.assertAlmostEqual(sum(row["array_reads"] for row in rows), total, delta=2)

    def test_what_looks_may_miss_of_an_even_load_is_told(self):
        """100 reads a second from 2.0 to 5.0, and none before and after."""
        for looks in [(0.5, 2.5, 4, 6), (1, 1.5, 2.1, 5, 6), (2, 3, 4, 5), (0, 5, 8.5), (0, 7)]:
            samples = [sample(at, round(100 * min(max(at - 2, 0), 3)), 0) for at in looks]
            seen = sampler.totals(samples, 2.0, 5.0)["reads"]
            missing = (300 - seen) / 100
            blurred = sampler.blurred_seconds(samples, 2.0, 5.0)
            with self.subTest(looks):
                self.assertLessEqual(missing, blurred + 1e-9)
                if len(looks) > 3:
                    self.assertAlmostEqual(missing, blurred)

    def test_what_waits_in_a_journal_grows_and_shrinks(self):
        samples = [
            Sample(at, "healthy", Counters(0, 0, 0, 0, pending), 0.0, None)
            for at, pending in enumerate((0, 100, 300, 200, 200))
        ]
        rows = sampler.rows(samples, summary([Measured(0.0, 4.0, {}, {})]))
        self.assertEqual([row["array_pending_bytes"] for row in rows], [100, 200, -100, 0])
        self.assertEqual(sampler.totals(samples, 1.0, 3.0)["pending_bytes"], 100)

    def test_of_who_counts_drives_only_that_is_known(self):
        samples = [
            Sample(at, "healthy", Counters(None, None, None, None, 0, at, 4096 * at), 0.0, None)
            for at in range(4)
        ]
        found = sampler.totals(samples, 1.0, 3.0)
        self.assertIsNone(found["read_bytes"])
        self.assertEqual((found["drive_reads"], found["drive_read_bytes"]), (2, 8192))
        rows = sampler.rows(samples, summary([Measured(0.0, 3.0, {}, {})]))
        self.assertEqual([row["array_drive_read_bytes"] for row in rows], [4096] * 3)

    def test_nothing_is_known_where_nobody_counts(self):
        samples = [Sample(at, "healthy", None, 0.0, 1.0 * at) for at in range(4)]
        found = sampler.totals(samples, 1.0, 3.0)
        self.assertIsNone(found["reads"])
        self.assertAlmostEqual(found["guest_seconds"], 2.0)

    def test_a_load_whose_end_was_not_seen_went_on_as_before(self):
        seen = [0.0, 0.5, 1.0, None, None]
        samples = [Sample(at, "healthy", None, 0.0, cpu) for at, cpu in enumerate(seen)]
        self.assertAlmostEqual(sampler.totals(samples, 0.0, 4.0)["guest_seconds"], 2.0)
        self.assertIsNone(sampler.totals(samples, 3.0, 4.0)["guest_seconds"])

    def test_a_state_is_the_last_that_was_seen(self):
        samples = [sample(at, 0, 0, "degraded" if at >= 2 else "healthy") for at in range(5)]
        rows = sampler.rows(samples, summary([Measured(0.0, 4.0, {}, {})]))
        self.assertEqual([row["state"] for row in rows][::2], ["healthy", "degraded"])

    def test_processes_that_come_and_go_count_once(self):
        meter = Meter()
        self.assertEqual(meter.add({1: 100.0, 2: 5.0}), 0.0)
        self.assertEqual(meter.add({1: 101.0, 3: 0.5}), 1.5)  # 2 is gone, 3 began in between
        self.assertEqual(meter.add({1: 102.0, 2: 0.25, 3: 0.5}), 2.75)  # a pid that is used again


class Looks(unittest.TestCase):
    def test_what_happens_to_any_array_is_seen(self):
        both = [["healthy", "healthy"], ["degraded", "healthy"], ["degraded", "degraded"],
                ["rebuilding 1.0%", "rebuilding 2.0%"], ["rebuilding 3.0%", "rebuilding 4.0%"]]
        told = [list(each) for each in both]
        side = mock.Mock(**{"states.side_effect": told, "counters.return_value": None})
        side.pids.return_value = []
        watch = sampler.Sampler(side, None, list, lambda: None)
        with mock.patch.object(sampler.places, "processes", return_value={}):
            for _ in both:
                watch.look()
        self.assertEqual([what for _, what in watch.events],
                         ["arrays: 1 degraded, 1 healthy", "all 2 arrays degraded",
                          "all 2 arrays rebuilding"])  # fmt: skip
        self.assertEqual(watch.samples[1].state, "degraded | healthy")

    def test_what_was_done_is_looked_at_at_once(self):
        side = mock.Mock(**{"states.return_value": ["healthy"], "counters.return_value": None})
        side.pids.return_value = []
        watch = sampler.Sampler(side, None, list, lambda: None)
        with mock.patch.object(sampler.places, "processes", return_value={}), \
                mock.patch.object(sampler, "PERIOD_SECONDS", 3600):  # fmt: skip
            watch.start()
            side.states.return_value = ["degraded"]
            watch.look_soon()
            deadline = time.monotonic() + 60
            while len(watch.samples) < 2 and time.monotonic() < deadline:
                time.sleep(0.01)
            watch.end()
            watch.thread.join(60)
        self.assertEqual([one.state for one in watch.samples], ["healthy", "degraded"])
        self.assertFalse(watch.thread.is_alive())


class Logs(unittest.TestCase):
    def log(self, lines: list[str]) -> Path:
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        path = Path(directory.name) / "host.log.gz"
        with gzip.open(path, "wt") as file:
            file.write("\n".join(lines) + "\n")
        return path

    def test_transactions_are_in_the_second_in_which_they_ended(self):
        # client, number, microseconds, script, second, microsecond: the first began at 99.0
        path = self.log(
            ["0 0 500000 0 99 500000", "1 0 900000 0 100 999999", "0 1 2000 0 101 0"]
            + ["1 1 failed 0 101 5", "0 2 4000 0 101 700000"]
        )
        began, ended, counts, sums = pgbench.by_second(path, 2)
        self.assertEqual((began, ended), (101.0, 101.7))
        self.assertEqual(counts, {-2: 1, -1: 1, 0: 2})
        self.assertAlmostEqual(sums[0], 6.0)

    def test_seconds_in_which_nothing_ran_are_not_measured(self):
        self.assertEqual(pgbench.window(101.0, 112.0, 10, False), 10)
        self.assertEqual(pgbench.window(101.0, 110.75, 10, False), 9.75)
        for ended in (104.0, 99.0):  # slow to connect
            with self.assertRaises(LoadError):
                pgbench.window(101.0, ended, 10, False)

    def test_what_is_emulated_may_begin_late_and_the_note_says_it(self):
        self.assertEqual(pgbench.window(101.0, 106.0, 10, True), 5)
        for ended, asked in [(105.9, 10), (155.0, 60), (103.4, 5)]:
            with self.assertRaises(LoadError):
                pgbench.window(101.0, ended, asked, True)
        each = dict.fromkeys(range(5), 50)
        one, two = (Measured(began, 5.0, each, {}) for began in (100.0, 102.4))
        with self.assertRaisesRegex(LoadError, "measured together"):
            summary([one, two])
        both = summary([one, two], emulated=True)
        self.assertEqual(both.notes, ("2 loads were measured together for 2.6 s of 5.0: one was "
                                      "late",))  # fmt: skip
        self.assertAlmostEqual(both.seconds, 2.6)
        self.assertEqual(both.total, 260)  # 100 a second, and no whole third second
        with self.assertRaisesRegex(LoadError, "measured together"):
            summary([one, Measured(102.6, 5.0, {0: 5}, {})], emulated=True)
        self.assertEqual(summary([one, one], emulated=True).notes, ())

    def test_time_to_connect_is_given_besides(self):
        place = Host(Ledger(Path("/nowhere")))
        self.addCleanup(place.close)
        seat = Seat("host", place, Disk(directory="/nowhere"))
        load = pgbench.Pgbench(seat, PgbenchStudy(seconds=60, warm_seconds=5, clients=(100,)))
        load.connect_seconds = {100: 7.2}
        self.assertEqual(load.seconds(Cell(0, 0, "s", "healthy", "tpcb-like", 100, 1)), 81)
        load.warm_seconds = 15  # ten more: see run.py
        self.assertEqual(load.seconds(Cell(0, 0, "s", "healthy", "tpcb-like", 100, 1)), 91)
        load.warm_seconds = 5
        # two that connect at once on the same processors
        both = Cell(0, 0, "s", "healthy", "tpcb-like", 100, 2)
        self.assertEqual(load.seconds(both), 95)
        for emulated, seconds in [(False, 81), (True, 95)]:
            load.place = SimpleNamespace(emulated=emulated)  # a guest
            self.assertEqual(load.seconds(both), seconds)

    def test_a_log_without_a_transaction_is_refused(self):
        with self.assertRaises(LoadError):
            pgbench.by_second(self.log(["0 0 failed 0 99 5"]), 0)

    def test_seconds_of_fio_make_up_its_total(self):
        way = {"total_ios": 1000, "runtime": 3001}
        other = {"total_ios": 0, "runtime": 0}
        said = {"jobs": [{"read": way, "write": other, "error": 0}]}
        iops = "5001000, 300, 0, 0, 0\n5002001, 400, 0, 0, 0\n"
        latency = "5001000, 2000000, 0, 0, 0\n5002001, 1000000, 0, 0, 0\n"
        found = fio.measured(json.loads(json.dumps(said)), iops, latency)
        self.assertEqual(found.began, 5000.0)
        self.assertEqual(found.operations, {0: 300, 1: 400, 2: 300})
        self.assertEqual(found.total, 1000)
        self.assertAlmostEqual(found.latency_ms_sums[0] / 300, 2.0)
        self.assertNotIn(2, found.latency_ms_sums)

    def test_a_second_of_fio_is_as_slow_as_its_requests_were(self):
        """900 reads of 1 ms and 100 writes of 11 ms; then one job has read 200, two 100 each."""
        said = {"jobs": [{"read": {"total_ios": 1100, "runtime": 2000},
                          "write": {"total_ios": 300, "runtime": 2000}, "error": 0}]}  # fmt: skip
        iops = "1000, 900, 0, 0, 0\n1000, 100, 1, 0, 0\n2000, 200, 0, 0, 0\n"
        iops += "2001, 100, 1, 0, 0\n2001, 100, 1, 0, 0\n"
        latency = "1000, 1000000, 0, 0, 0\n1000, 11000000, 1, 0, 0\n2000, 3000000, 0, 0, 0\n"
        latency += "2001, 4000000, 1, 0, 0\n2001, 6000000, 1, 0, 0\n"
        found = fio.measured(said, iops, latency)
        self.assertEqual(found.operations, {0: 1000, 1: 400})
        self.assertAlmostEqual(found.latency_ms_sums[0] / 1000, 2.0)
        self.assertAlmostEqual(found.latency_ms_sums[1] / 400, 4.0)  # (200 x 3 + 200 x 5) / 400

    def test_a_second_whose_latency_nobody_told_has_none(self):
        whole = Measured(100.0, 2.0, {0: 10, 1: 10}, {0: 20.0, 1: 20.0})
        part = Measured(100.0, 2.0, {0: 10, 1: 5}, {0: 40.0})  # fio ended before it wrote it down
        samples = [sample(at, 0, 0) for at in (100, 101, 102)]
        for load, wanted in [(part, [4.0, None]), (summary([whole, part]), [3.0, None])]:
            found = [row["latency_ms_mean"] for row in sampler.rows(samples, load)]
            self.assertEqual(found, wanted)

    def test_only_seconds_in_which_all_loads_were_measured_count(self):
        one = Measured(100.0, 10.0, {-1: 9, 0: 8, 1: 4, 9: 16}, {0: 80.0, 1: 80.0})
        two = Measured(100.25, 10.0, {0: 7, 8: 1, 9: 4}, {0: 7.0}, failed=1, notes=("n",))
        both = summary([one, two])
        self.assertEqual((both.began, both.seconds), (100.25, 9.75))
        # a quarter of each second of the first was in the one before; the last has three quarters
        self.assertEqual(both.operations, {-2: 2.25, -1: 8.75, 0: 14.0, 1: 3.0, 8: 5.0, 9: 15.0})
        self.assertEqual(both.latency_ms_sums, {0: 87.0, 1: 60.0})
        self.assertEqual((both.total, both.failed, both.notes), (37, 1, ("n",)))

    def test_a_last_second_that_is_a_part_of_one_counts_whole(self):
        one = Measured(100.0, 9.75, dict.fromkeys(range(10), 100), {})
        self.assertEqual((summary([one]).total, summary([one, one]).total), (1000, 2000))

    def test_loads_that_begin_together_wait_for_each_other(self):
        def slept(at: float) -> str:
            shell = f"sleep() {{ echo $1; }}; {wait_until(at)}"
            return subprocess.run(["sh", "-ec", shell], capture_output=True, text=True).stdout

        self.assertEqual((slept(0.0), slept(time.time())), ("", ""))
        self.assertTrue(50 < float(slept(time.time() + 99.05)) <= 99.05)
        self.assertEqual(together(1), 0.0)
        self.assertGreater(together(2), time.time())

    def test_loads_that_were_not_measured_at_once_are_no_cell(self):
        one = Measured(100.0, 10.0, {0: 5}, {})
        self.assertEqual(summary([one, Measured(101.0, 10.0, {0: 5}, {})]).seconds, 9.0)
        for began in (101.1, 109.0, 130.0):  # the last would be less than no seconds
            with self.assertRaisesRegex(LoadError, "measured together"):
                summary([one, Measured(began, 10.0, {0: 5}, {})])
