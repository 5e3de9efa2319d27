"""Goal: figures are those that a person works out from the logs by hand.
Method: logs of a few lines, whose answers are written here; then textbook definitions on random
ones, counted the slow way.
"""

import gzip
import itertools
import json
import random
import tempfile
import unittest
from dataclasses import replace
from pathlib import Path

from lab import stats
from lab.results import Cell, Results
from lab.stats import Distribution
from lab.tests import synthetic

BEGAN = 1000
CELL = Cell(0, 0, "ashlar", "healthy", "simple-update", 2, 1, began=BEGAN, seconds=10)


class InADirectory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        self.results = Results.open(Path(directory.name))

    def log(self, name: str, transactions, cell: Cell = CELL) -> Path:
        path = self.results.place_of(cell) / name
        synthetic.write_log(path, transactions)
        return path

    def fio(
        self, name: str, read: dict, write: dict, errors: int = 0, cell: Cell = CELL
    ) -> Path:
        path = self.results.place_of(cell) / name
        synthetic.write_fio(path, read, write, errors)
        return path


class Percentiles(unittest.TestCase):
    def test_known_by_hand(self):
        # 1 … 1000 ms, each once: p50 is the 500th, p99.9 the 999th, p99.95 the 1000th.
        of = Distribution.of(range(1, 1001)).percentile_ms
        self.assertEqual(
            [of(percent) for percent in (50, 95, 99, 99.9, 99.95, 100)],
            [500, 950, 990, 999, 1000, 1000],
        )

    def test_a_tail_without_samples_is_not_told(self):
        every = list(stats.PERCENTS)
        for total, known in [
            (19, []), (20, [50]), (999, [50, 95]), (1000, [50, 95, 99]),
            (19_999, every[:-1]), (20_000, every),
        ]:  # fmt: skip
            self.assertEqual(list(Distribution.of([1], [total]).percentiles_ms()), known)

    def test_of_three(self):
        of = Distribution.of([30, 10, 20]).percentile_ms
        self.assertEqual([of(33), of(34), of(66), of(67), of(99)], [10, 20, 20, 30, 30])

    def test_of_one(self):
        one = Distribution.of([7])
        self.assertEqual((one.percentile_ms(50), one.percentile_ms(99.9), one.mean_ms()), (7, 7, 7))

    def test_counts_are_as_many_values(self):
        few, many = Distribution.of([1, 5], [999, 1]), Distribution.of([1] * 999 + [5])
        self.assertEqual(few.total, many.total)
        self.assertEqual(few.mean_ms(), 1.004)
        for percent in stats.PERCENTS:
            self.assertEqual(few.percentile_ms(percent), many.percentile_ms(percent))
        self.assertEqual(few.percentile_ms(99.9), 1)
        self.assertEqual(few.percentile_ms(99.95), 5)

    def test_merged_is_not_the_mean_of_two(self):
        fast, slow = Distribution.of([1] * 99 + [2]), Distribution.of([100] * 10)
        both = Distribution.merged([fast, slow])
        self.assertEqual(both.percentile_ms(90), 1)
        self.assertEqual(both.percentile_ms(90.9), 2)  # of 110: 99.99, so the 100th
        self.assertEqual(both.percentile_ms(91), 100)  # 100.1, so the 101st
        self.assertEqual(both.percentile_ms(95), 100)

    def test_as_the_definition_says(self):
        prng = random.Random(5)
        for size in (2, 10, 999, 1001, 20_000):
            values = [prng.randrange(1, 500) for _ in range(size)]
            distribution = Distribution.of(values)
            for percent in stats.PERCENTS:
                found = distribution.percentile_ms(percent)
                enough = round(percent * 1000) * size  # of 100,000 parts
                self.assertIn(found, values)
                self.assertGreaterEqual(sum(v <= found for v in values) * 100_000, enough)
                self.assertLess(sum(v < found for v in values) * 100_000, enough)


class OfPgbench(InADirectory):
    def test_only_what_ended_in_the_measured_time(self):
        self.log(
            "host.log.gz",
            [
                ((BEGAN - 1) * 1e6, 9_000_000),
                (BEGAN * 1e6 - 1, 9_000_000),  # a microsecond too early
                (BEGAN * 1e6, 1000),  # the first
                ((BEGAN + 3) * 1e6, 2000),
                ((BEGAN + 3.5) * 1e6, 3000),
                ((BEGAN + 10) * 1e6 - 1, 6000),  # the last
                ((BEGAN + 10) * 1e6, 9_000_000),
            ],
        )
        figures = stats.of(self.results, replace(CELL, operations=4))
        self.assertEqual(figures.operations, 4)
        self.assertEqual(figures.per_second, 0.4)
        self.assertEqual(figures.mean_ms, 3.0)
        self.assertEqual(figures.distribution.percentile_ms(50), 2.0)
        self.assertEqual(figures.distribution.percentile_ms(99), 6.0)
        self.assertEqual(figures.percentiles_ms, {}, "of four nothing can be said")
        self.assertEqual(figures.each_second, {-1: 2, 0: 1, 3: 2, 9: 1, 10: 1})
        self.assertEqual(figures.notes, ())

    def test_failed_ones_count_but_not_as_fast(self):
        self.log("host.log.gz", [((BEGAN + 1) * 1e6, 5000), ((BEGAN + 2) * 1e6, -1)])
        figures = stats.of(self.results, replace(CELL, operations=1))
        self.assertEqual((figures.operations, figures.failed, figures.mean_ms), (1, 1, 5.0))

    def test_loads_are_merged(self):
        cell = replace(CELL, loads=2, operations=1100)
        at = (BEGAN + 1) * 1e6
        self.log("vm0.log.gz", [(at, 1000)] * 1000, cell)
        self.log("vm1.log.gz", [(at, 90_000)] * 100, cell)
        figures = stats.of(self.results, cell)
        self.assertEqual((figures.per_second, figures.notes), (110.0, ()))
        self.assertEqual((figures.percentiles_ms[50], figures.percentiles_ms[95]), (1.0, 90.0))

    def test_a_share_of_the_transactions_is_logged(self):
        self.log("host.log.gz", [((BEGAN + second) * 1e6, 5000) for second in range(10)])
        figures = stats.of(self.results, replace(CELL, operations=100), log_share=0.1)
        self.assertEqual((figures.operations, figures.per_second, figures.notes), (100, 10, ()))
        self.assertEqual(figures.each_second[3], 10)

    def test_a_log_that_is_short_is_told(self):
        cell = replace(CELL, operations=500, loads=2)
        self.log("host.log.gz", [((BEGAN + 1) * 1e6, 5000)], cell)
        figures = stats.of(self.results, cell)
        self.assertEqual(
            figures.notes,
            ("1 logs of 2 loads", "the logs have 1 transactions, not 500"),
        )

    def test_what_several_did_is_known_but_for_a_part_of_a_second(self):
        """Seconds of theirs that lie on an edge of the measured time are dealt out evenly."""
        ended = [((BEGAN + at) * 1e6, 5000) for at in range(10) for _ in range(20)]
        for loads, told, notes in [(2, 220, 0), (2, 182, 0), (2, 223, 1), (1, 203, 1)]:
            cell = replace(CELL, loads=loads, operations=told)
            for load in range(loads):
                self.log(f"vm{load}.log.gz", ended if load == 0 else [], cell)
            self.assertEqual(len(stats.of(self.results, cell).notes), notes, cell)

    def test_nothing_was_done(self):
        self.log("host.log.gz", [])
        figures = stats.of(self.results, CELL)
        self.assertEqual((figures.operations, figures.mean_ms), (0, None))
        self.assertEqual(len(figures.notes), 1)

    def test_lag_and_retries_may_follow(self):
        path = self.results.place_of(CELL) / "host.log.gz"
        path.parent.mkdir(parents=True)
        with gzip.open(path, "wt") as file:
            file.write("0 81 4621 0 1001 412891 1649 3\n3 82 serialization 0 1001 512891 1649 4\n")
        figures = stats.of(self.results, replace(CELL, operations=1))
        self.assertEqual((figures.mean_ms, figures.failed), (4.621, 1))

    def test_what_is_no_log_is_named(self):
        path = self.results.place_of(CELL) / "host.log.gz"
        path.parent.mkdir(parents=True)
        for text in ("hello world\n", "0 1 slow 0 1001 5\n", "0 1 100 0 1001\n"):
            with gzip.open(path, "wt") as file:
                file.write(text)
            with self.assertRaisesRegex(stats.StatsError, "host.log.gz"):
                stats.of(self.results, CELL)
        path.unlink()
        with self.assertRaisesRegex(stats.StatsError, "neither"):
            stats.of(self.results, CELL)


class OfFio(InADirectory):
    def test_bins_of_several_are_merged(self):
        nothing = synthetic.fio_way(0, 1, 4096, {})
        paths = [
            self.fio("vm0.json", synthetic.fio_way(19_980, 1, 4096, {1_000_000: 19_980}), nothing),
            self.fio("vm1.json", nothing, synthetic.fio_way(20, 1, 4096, {5_000_000: 20})),
        ]
        figures = stats.of_fio(replace(CELL, loads=2), paths, [])
        self.assertEqual((figures.operations, figures.per_second), (20_000, 20_000))
        self.assertEqual(figures.bytes_per_second, 4096 * 20_000)
        self.assertEqual(figures.mean_ms, 1.004)
        self.assertEqual(figures.percentiles_ms[99.9], 1.0)
        self.assertEqual(figures.percentiles_ms[99.95], 5.0)

    def test_without_bins_one_is_as_fio_says_and_several_are_not_known(self):
        way = synthetic.fio_way(1000, 1, 4096, {1_000_000: 1000})
        said = {"99.000000": 2e6, "99.950000": 3e6}
        way["clat_ns"] = {"mean": 1e6, "N": 1000, "percentile": said}
        nothing = synthetic.fio_way(0, 1, 4096, {})
        paths = [self.fio(f"vm{vm}.json", way, nothing) for vm in (0, 1)]
        one = stats.of_fio(CELL, paths[:1], [])
        self.assertEqual(one.percentiles_ms, {99.0: 2.0}, "half an I/O took longer than p99.95")
        both = stats.of_fio(replace(CELL, loads=2), paths, [])
        self.assertEqual(both.percentiles_ms, {})
        self.assertIn("json+", both.notes[0])

    def test_what_was_not_measured_of_all_loads_does_not_count(self):
        """Each did 100 a second while the other ran, and 200 by itself: 1400 in its ten seconds."""
        nothing = synthetic.fio_way(0, 10, 4096, {})
        way = synthetic.fio_way(140, 10, 4096, {1_000_000: 1400})
        for name in ("vm0.json", "vm1.json"):
            self.fio(name, way, nothing, cell=(both := replace(CELL, loads=2)))
        rows = [{"second": at, "operations": 200, "latency_ms_mean": 3 if at < 0 else 2}
                for at in range(-2, 5)]  # fmt: skip
        rows.append({"second": 5, "operations": 200})  # nobody told how long these took
        synthetic.write_seconds(self.results.place_of(both) / "seconds.csv", rows)
        for seconds, operations, cut in [(9.0, 1800, False), (6.0, 1200, True)]:
            cell = replace(both, seconds=seconds, operations=operations)
            figures = stats.of(self.results, cell)
            self.assertEqual(figures.per_second, 200 if cut else 280)
            self.assertEqual(figures.bytes_per_second, 4096 * figures.per_second)
            self.assertEqual(figures.operations, 1200 if cut else 2800)
            self.assertEqual(figures.mean_ms, 2.0 if cut else 1.0)
            self.assertEqual(list(figures.percentiles_ms), [] if cut else [50.0, 95.0, 99.0])
            self.assertEqual((figures.distribution is None, len(figures.notes)), (cut, cut))
            self.assertEqual(figures.each_second, dict.fromkeys(range(6), 200))

    def test_the_whole_latency_where_fio_kept_it(self):
        way = synthetic.fio_way(20, 1, 4096, {1_000_000: 20})
        way["lat_ns"] |= {"mean": 2e6, "bins": {"2000000": 20}}
        figures = stats.of_fio(
            CELL, [self.fio("vm0.json", way, synthetic.fio_way(0, 1, 4096, {}))], []
        )
        self.assertEqual((figures.mean_ms, figures.percentiles_ms[50]), (2.0, 2.0))

    def test_errors_count(self):
        nothing = synthetic.fio_way(0, 1, 4096, {})
        figures = stats.of_fio(CELL, [self.fio("vm0.json", nothing, nothing, errors=3)], [])
        self.assertEqual((figures.failed, figures.per_second), (3, 0))

    def test_what_is_not_of_fio_is_named(self):
        path = self.fio("vm0.json", synthetic.fio_way(0, 1, 1, {}), synthetic.fio_way(0, 1, 1, {}))
        for text in ("", "fio: no", json.dumps({"jobs": []})):
            path.write_text(text)
            with self.assertRaisesRegex(stats.StatsError, "vm0.json"):
                stats.of_fio(CELL, [path], [])


class OverRepeats(unittest.TestCase):
    def figures(self, side: str, rates, **words) -> list[stats.Figures]:
        return [
            stats.Figures(
                replace(CELL, side=side, repeat=n, **words), 1, 0, rate, None, rate / 10, {}
            )
            for n, rate in enumerate(rates)
        ]

    def test_median_and_spread(self):
        [summary] = stats.summaries(self.figures("ashlar", [30, 10, 20]))
        self.assertEqual(summary.per_second, stats.Spread(20, 10, 30, 3))
        self.assertEqual(summary.mean_ms, stats.Spread(2, 1, 3, 3))
        self.assertEqual(summary.middle().per_second, 20)

    def test_of_two_the_median_is_between(self):
        [summary] = stats.summaries(self.figures("ashlar", [10, 20]))
        self.assertEqual(summary.per_second.median, 15)
        self.assertEqual(summary.middle().per_second, 10)

    def test_a_percentile_is_of_all_repeats_or_none(self):
        each = self.figures("ashlar", [30, 10, 20])
        told = [{99: 5.0, 99.9: 6.0}, {99: 9.0}, {99: 8.0, 99.9: 8.0}]
        [summary] = stats.summaries(
            replace(one, percentiles_ms=its) for one, its in zip(each, told, strict=True)
        )
        self.assertEqual(summary.percentile_ms(99), stats.Spread(8, 5, 9, 3))
        self.assertIsNone(summary.percentile_ms(99.9), "its median would be below")

    def test_groups_are_kept_apart(self):
        cells = (
            self.figures("a", [1, 2]) + self.figures("b", [3]) + self.figures("a", [4], clients=9)
        )
        self.assertEqual([len(one.figures) for one in stats.summaries(cells)], [2, 1, 1])

    def test_a_ratio_is_of_the_medians_and_as_wide_as_any_repeats(self):
        a, b = stats.summaries(self.figures("a", [10, 30]) + self.figures("b", [5, 10, 40]))
        self.assertEqual(stats.ratio(a, b), stats.Spread(2, 0.25, 6, 2))

    def test_what_differs(self):
        for one, other, differ in [
            ([10, 10, 11], [15, 15, 16], True),
            ([15, 15, 16], [10, 10, 11], True),
            ([10, 11, 14], [13, 15, 16], False),  # one reaches the other
            ([10, 14, 14], [15, 16, 16], False),  # no further apart than its own repeats
            ([10, 10], [15, 15], False),  # so are two of equals, once in three times
            ([0, 0, 0], [15, 15, 15], False),
        ]:
            a, b = stats.summaries(self.figures("a", one) + self.figures("b", other))
            self.assertEqual(stats.differ(a, b), differ, (one, other))

    def test_equals_seldom_differ(self):
        ranks = [1.0 + n / 100 for n in range(6)]
        ways = list(itertools.combinations(ranks, 3))
        found = 0
        for chosen in ways:
            others = [each for each in ranks if each not in chosen]
            a, b = stats.summaries(self.figures("a", chosen) + self.figures("b", others))
            found += stats.differ(a, b)
        self.assertLessEqual(found / len(ways), 0.1)


if __name__ == "__main__":
    unittest.main()
