"""Goal: a plan says what the geometry allows, and names what limits it.
Method: sums that the engine's own bench prints (`drive_limited`), sums by hand, and limits that are
moved until another is the least. Whether engine and plan agree, `ashlar-lab plan --check` measures.
"""

import contextlib
import io
import json
import os
import re
import tempfile
import time
import unittest
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from unittest import mock

from lab import forecast, main, paths, plan, proof
from lab.forecast import Server, predict
from lab.geometry import Drive, Geometry, Load, binomial
from lab.results import Cell, Results
from lab.study import Pattern, Study, StudyError

# The drive of `drive_limited`: 10,000 operations, 200 MB a second.
DRIVE = Drive(10_000, 10_000, 2e8, 2e8)
CHUNK = 64 << 10


def geometry(data: int, parity: int, journal: bool = False, away=()) -> Geometry:
    return Geometry(data, parity, CHUNK, journal, tuple(away))


def each(one: Geometry, drive: Drive, together: int) -> Load:
    """Of one block, of so many of one row that are stored at once: case by case."""
    seconds, reads, writes, cases = [0.0] * one.members, 0, 0, 0
    for stripe, turn in product(range(one.members), range(max(one.parity, 1))):
        for blocks in combinations(range(one.data), together):
            read, written = positions(one, stripe, blocks, turn)
            cases += together
            for position in read:
                seconds[one.member(stripe, position)] += drive.read_seconds(4096)
            for position in written:
                seconds[one.member(stripe, position)] += drive.write_seconds(4096)
            reads, writes = reads + len(read), writes + len(written)
    return Load(tuple(its / cases for its in seconds), reads / cases, writes / cases)


def positions(one: Geometry, stripe: int, blocks: tuple[int, ...], turn: int):
    here = {at for at in range(one.members) if one.member(stripe, at) not in one.away}
    parity = [at for at in range(one.data, one.members) if at in here]
    written = [at for at in (*blocks, *parity) if at in here]
    if not parity:
        return [], written
    ways, others = [], set(range(one.data)) - set(blocks)
    if others <= here:
        ways.append(others)
    in_turn = [one.data + (turn + at) % one.parity for at in range(one.parity)]
    ways.append(set([at for at in (*range(one.data), *in_turn) if at in here][: one.data]))
    if set(blocks) <= here:
        ways.append({*blocks, *parity})
    return sorted(min(ways, key=len)), written


def rate(load) -> int:
    return round(1 / load.busiest_seconds)


class Costs(unittest.TestCase):
    def test_sums_of_the_engines_own_bench(self):
        healthy, degraded = geometry(4, 1, True), geometry(4, 1, True, [0])
        self.assertEqual(rate(healthy.random_read(DRIVE)), 50_000)
        self.assertEqual(rate(degraded.random_read(DRIVE)), 25_000)
        self.assertEqual(rate(healthy.stripe_read(DRIVE)), 3815)
        self.assertEqual(rate(degraded.stripe_read(DRIVE)), 3052)
        self.assertEqual(rate(healthy.stripe_write(DRIVE)), 1526)
        twice = geometry(4, 2, away=[0]).in_place(DRIVE, 4096, 1)
        self.assertEqual(rate(twice), 9231)
        loads = [round(one * 24 * 10_000) for one in twice.seconds]
        self.assertEqual(loads, [0, 26, 24, 24, 24, 26])

    def test_small_writes(self):
        for data, parity, reads, writes in [(4, 1, 2, 2), (8, 2, 3, 3), (2, 1, 1, 2), (5, 0, 0, 1)]:
            load = geometry(data, parity).in_place(DRIVE, 4096, 1)
            self.assertEqual((load.reads, load.writes), (reads, writes), (data, parity))

    def test_cases_are_counted_as_if_each_were_looked_at(self):
        """The oracle picks blocks, and for each choice the cheapest way: nobody could for 56+8."""
        uneven = Drive(1000, 800, 5e7, 4e7)
        for data, parity in [(1, 1), (4, 0), (4, 1), (4, 2), (4, 3), (3, 4), (2, 8)]:
            for out in range(parity + 1):
                away = tuple(range(0, 2 * out, 2)) if 2 * out <= data + parity else range(out)
                one = geometry(data, parity, away=away)
                for together in range(1, data + 1):
                    found = one.in_place(uneven, 4096, together)
                    wanted = each(one, uneven, together)
                    with self.subTest(f"{data}+{parity}, {away} away, {together} blocks"):
                        self.assertAlmostEqual(found.reads, wanted.reads)
                        self.assertAlmostEqual(found.writes, wanted.writes)
                        for ours, its in zip(found.seconds, wanted.seconds, strict=True):
                            self.assertAlmostEqual(ours, its)

    def test_64_members_with_eight_of_parity(self):
        began = time.monotonic()
        wide, out = geometry(56, 8), geometry(56, 8, away=range(8))
        load = wide.in_place(DRIVE, 4096, 1)
        self.assertEqual((round(load.reads), round(load.writes)), (9, 9))
        self.assertAlmostEqual(out.random_read(DRIVE).reads, (56 + 8 * 56) / 64)
        # of 5.6 blocks and 8 parities of a row one in 64 is away, and a tenth are neighbours; six
        # of eight parities are in the journal nine times, in batches of 64 blocks
        destaged = geometry(56, 8, True, [0]).destaged(DRIVE, 4096, 0.1)
        touched, here = 1 - 0.9**56, 63 / 64
        stored, journaled = 0.9 * here * (5.6 + 8 * touched), 9 / 64 * 6 * here * touched
        self.assertAlmostEqual(destaged.writes, (stored + journaled) / 5.6)
        self.assertLess(time.monotonic() - began, 30)

    def test_parity_that_has_no_sums_is_in_the_journal(self):
        """Of 8 parities 6: a block of each beside that of the data, unless all of a row is stored.
        Shares of a batch of 56 are too small to be divided."""
        for parity, in_full in [(1, 0), (2, 0), (3, 1), (8, 6)]:
            one, plain = geometry(4, parity, True), geometry(4, parity).in_place(DRIVE, 4096, 1)
            self.assertEqual(one.parity_in_full, in_full)
            more = one.destaged(DRIVE, 4096, 0).busiest_seconds - plain.busiest_seconds
            self.assertAlmostEqual(more, in_full * one.journaled(DRIVE, 4096).busiest_seconds)
        self.assertEqual(geometry(4, 8).parity_in_full, 0)
        for parity, away, in_full in [(8, [0], 5.5), (8, [0, 5], 5.0), (3, [0], 6 / 7),
                                      (3, [0, 1], 5 / 7), (2, [0], 0)]:  # fmt: skip
            self.assertAlmostEqual(geometry(4, parity, True, away).parity_in_full, in_full)
        self.assertTrue(geometry(32, 8, True).divides_journal)
        self.assertFalse(geometry(33, 8, True).divides_journal)

    def test_no_figure_is_made_up_for_an_array_that_a_side_has_not(self):
        for data, parity, md, ours in [
            (4, 2, True, True), (4, 3, False, True), (56, 8, False, True), (57, 8, False, False),
        ]:  # fmt: skip
            study = Study.model_validate(FIO | {"array": {"data": data, "parity": parity}})
            found = {one.side: one for one in predict(study, Server(DRIVE))}
            self.assertEqual(found["mdraid"].per_second is not None, md)
            self.assertEqual(found["ashlar"].per_second is not None, ours)
        self.assertIn("64 drives at most", found["ashlar"].bottleneck)
        self.assertIn("md has none of 8 parities", found["mdraid"].bottleneck)

    def test_rows_that_are_whole_read_nothing(self):
        load = geometry(4, 1).in_place(DRIVE, 4096, 4)
        self.assertEqual((load.reads, load.writes), (0, 1.25))

    def test_a_read_of_two_that_are_away(self):
        # 2 of 6 blocks are away, and each takes 4 reads: (4 + 2 * 4) / 6
        load = geometry(4, 2, away=[0, 1]).random_read(DRIVE)
        self.assertAlmostEqual(load.reads, 2.0)
        self.assertEqual(load.seconds[:2], (0.0, 0.0))

    def test_mirrors(self):
        """One copy is read and all are written; half of the reads of a set go to who is left."""
        healthy = Geometry(4, 0, CHUNK, copies=2)
        degraded = Geometry(4, 0, CHUNK, away=(0,), copies=2)
        self.assertEqual(rate(healthy.random_read(DRIVE)), 80_000)
        self.assertEqual(rate(degraded.random_read(DRIVE)), 40_000)
        for geometry, writes in [(healthy, 2), (degraded, 1.75)]:
            load = geometry.in_place(DRIVE, 4096, 1)
            self.assertEqual((load.reads, load.writes), (0, writes))
            self.assertEqual(rate(load), 40_000)
        self.assertEqual(healthy.stripe_read(DRIVE).reads, 4)
        self.assertEqual(healthy.stripe_write(DRIVE).writes, 8)
        with self.assertRaises(ValueError):
            Geometry(4, 0, CHUNK, away=(0, 1), copies=2)

    def test_a_journal_has_no_more_copies_than_members_are_here(self):
        """Two mirrors, one of them away: all stands on the other, once."""
        one = Geometry(1, 0, CHUNK, True, away=(0,), copies=2)
        self.assertEqual(one.journaled(DRIVE, 256 << 10).writes, 1)
        self.assertEqual(replace(one, away=()).journaled(DRIVE, 256 << 10).writes, 2)

    def test_more_away_than_may_be_lost(self):
        with self.assertRaises(ValueError):
            geometry(4, 1, away=[0, 1])

    def test_drives_that_write_slowly(self):
        slow = replace(DRIVE, writes_per_second=1000)
        load = geometry(4, 1).in_place(slow, 4096, 1)
        self.assertAlmostEqual(sum(load.seconds), 2 / 10_000 + 2 / 1000)

    def test_what_goes_on_where_the_last_ended_costs_its_bytes(self):
        """A drive of 150 operations and 200 MB a second reads no 64 KiB in 1/150 s."""
        turning = Drive(150, 150, 2e8, 2e8)
        stripe = geometry(4, 1)
        for load, share in [(stripe.stripe_read(turning), 0.8), (stripe.stripe_write(turning), 1)]:
            self.assertAlmostEqual(load.busiest_seconds, share * CHUNK / 2e8)
        model = replace(turning, is_model=True)
        for load, share in [(stripe.stripe_read(model), 0.8), (stripe.stripe_write(model), 1)]:
            self.assertAlmostEqual(load.busiest_seconds, share / 150)
        # what is at random is an operation either way, and so is what the journal takes meanwhile
        for drive in (turning, model):
            self.assertAlmostEqual(stripe.random_read(drive).busiest_seconds, 1 / 150 / 5)
        journaled = geometry(4, 1, journal=True).stripe_write(turning)
        self.assertAlmostEqual(journaled.busiest_seconds, CHUNK / 2e8 + 1 / 150)

    def test_nothing_waits_nothing_is_saved(self):
        one = geometry(4, 1, True)
        self.assertEqual(one.destaged(DRIVE, 4096, 0), one.in_place(DRIVE, 4096, 1))
        few, many = one.destaged(DRIVE, 4096, 0.05), one.destaged(DRIVE, 4096, 0.5)
        self.assertLess(many.busiest_seconds, few.busiest_seconds)
        self.assertLess(few.busiest_seconds, one.in_place(DRIVE, 4096, 1).busiest_seconds)

    def test_chances_are_one_together(self):
        self.assertAlmostEqual(sum(binomial(8, n, 0.3) for n in range(9)), 1)


FIO = {
    "title": "t",
    "where": "vm",
    "states": ["healthy", "degraded", "rebuilding"],
    "side": [{"kind": "ashlar", "policy": "bitmap"}, {"kind": "mdraid"}, {"kind": "btrfs"}],
    "vm": {"count": 2},
    "fio": {
        "vms": [1, 2],
        "patterns": [
            {"name": "read", "rw": "randread"},
            {"name": "write", "rw": "randwrite"},
            {"name": "mix", "rw": "randrw", "read_percent": 70},
            {"name": "stream", "rw": "read", "block": "1M"},
        ],
    },
}
PGBENCH = {
    "title": "t",
    "where": "vm",
    "side": [{"kind": "ashlar"}],
    "vm": {"memory": "1G"},
    "pgbench": {"scale": 1000, "scripts": ["select-only", "simple-update"]},
}


def found(study: dict, server: Server, **wanted) -> forecast.Forecast:
    return next(
        one
        for one in predict(Study.model_validate(study), server)
        if all(getattr(one, name) == value for name, value in wanted.items())
    )


class Bottlenecks(unittest.TestCase):
    def test_drives(self):
        one = found(FIO, Server(DRIVE), side="ashlar", state="healthy", load="mix")
        self.assertEqual((one.bottleneck, round(one.per_second)), ("drives", 26_316))

    def test_a_core(self):
        server = Server(DRIVE, cores=1, core_reads_per_second=1000, core_writes_per_second=500)
        one = found(FIO, server, side="ashlar", state="healthy", load="mix")
        # 0.7 of a millisecond and 0.3 of two
        self.assertEqual(
            (one.bottleneck, round(one.per_second, 2)), ("a core of the engine", 769.23)
        )
        other = found(FIO, server, side="mdraid", state="healthy", load="mix")
        self.assertEqual(other.bottleneck, "drives")

    def test_more_cores_read_but_one_writes(self):
        server = Server(DRIVE, cores=4, core_reads_per_second=1000, core_writes_per_second=1000)
        read = found(FIO, server, side="ashlar", state="healthy", load="read")
        write = found(FIO, server, side="ashlar", state="healthy", load="write")
        self.assertEqual((read.per_second, write.per_second), (4000, 1000))

    def test_guests(self):
        server = Server(DRIVE, vm_per_second=300)
        rates = [
            found(FIO, server, side="ashlar", state="healthy", load="read", loads=loads)
            for loads in (1, 2)
        ]
        self.assertEqual([(one.bottleneck, one.per_second) for one in rates],
                         [("guests", 300), ("guests", 600)])  # fmt: skip

    def test_network_and_requests_under_way(self):
        one = found(FIO, Server(DRIVE, network_bytes_per_second=1e8), load="stream")
        self.assertEqual((one.bottleneck, round(one.bytes_per_second)), ("network", 100_000_000))
        late = Server(DRIVE, drive_latency_seconds=0.01)
        one = found(FIO, late, load="read", loads=1, state="healthy")
        self.assertEqual((one.bottleneck, one.per_second), ("requests under way", 3200))

    def test_raw_is_a_drive_for_each_load(self):
        study = FIO | {"side": [{"kind": "raw"}], "states": ["healthy"]}
        rates = [found(study, Server(DRIVE), load="read", loads=loads) for loads in (1, 2)]
        self.assertEqual([round(one.per_second) for one in rates], [10_000, 20_000])

    def test_raw_as_raid_0_is_all_drives_of_the_arrays_with_a_load(self):
        study = FIO | {"side": [{"kind": "raw", "raid0": True}], "states": ["healthy"],
                       "array": {"count": 2}, "vm": {"count": 4},
                       "fio": FIO["fio"] | {"vms": [1, 2, 4]}}  # fmt: skip
        for load in ("read", "write"):  # nothing is read to write, and nothing is written beside
            rates = [found(study, Server(DRIVE), load=load, loads=loads) for loads in (1, 2, 4)]
            rates = [round(one.per_second) for one in rates]
            self.assertEqual(rates, [50_000, 100_000, 100_000], load)

    def test_what_is_written_in_place_waits_twice(self):
        late = Server(DRIVE, drive_latency_seconds=1)
        study = FIO | {"side": [*FIO["side"], {"kind": "ashlar", "name": "j"}, {"kind": "raw"}]}
        for side, state, rate in [("mdraid", "healthy", 16), ("ashlar", "healthy", 16),
                                  ("j", "healthy", 32), ("raw", "healthy", 32),
                                  ("ashlar", "degraded", 32)]:  # fmt: skip
            one = found(study, late, side=side, state=state, load="write", loads=1)
            self.assertEqual(one.limits["requests under way"], rate, (side, state))

    def test_a_rebuild_takes_its_share(self):
        degraded = found(FIO, Server(DRIVE), side="mdraid", state="degraded", load="read")
        rebuilding = found(FIO, Server(DRIVE), side="mdraid", state="rebuilding", load="read")
        self.assertAlmostEqual(rebuilding.per_second, degraded.per_second * 0.9)

    def test_what_is_not_counted_is_not_predicted(self):
        one = found(FIO, Server(DRIVE), side="btrfs")
        self.assertIsNone(one.per_second)
        self.assertIn("not predicted", one.bottleneck)

    def test_degraded_bitmap_is_journaled_and_said(self):
        one = found(FIO, Server(DRIVE), side="ashlar", state="degraded", load="write")
        self.assertIn("writes through the journal", one.notes[0])


class Transactions(unittest.TestCase):
    def test_what_is_not_in_memory_is_read(self):
        read = found(PGBENCH, Server(DRIVE), load="select-only")
        missed = 1 - (1 << 30) / (1000 * forecast.SCALE_BYTES)
        self.assertAlmostEqual(read.reads, missed)
        self.assertIn("estimated", read.notes[0])

    def test_guests(self):
        one = found(PGBENCH, Server(DRIVE, vm_transactions_per_second=70), load="simple-update")
        self.assertEqual((one.bottleneck, one.per_second), ("guests", 70))

    def test_few_clients_wait_for_their_commits(self):
        study = PGBENCH | {
            "array": {"count": 2},
            "side": [{"kind": "ashlar"}, {"kind": "mdraid"}], "vm": {"memory": "64G", "count": 2},
            "pgbench": PGBENCH["pgbench"] | {"clients": [1, 1000]},
        }  # fmt: skip
        late = Server(DRIVE, drive_latency_seconds=0.001)
        for side, rate in [("ashlar", 2000), ("mdraid", 1000)]:  # two loads of one client
            one = found(study, late, side=side, load="simple-update", clients=1)
            self.assertEqual((one.bottleneck, one.per_second), ("clients that wait", rate))
            many = found(study, late, side=side, load="simple-update", clients=1000)
            self.assertEqual(many.bottleneck, "drives")
        one = found(study, late, load="select-only", clients=1)  # all of it is in memory
        self.assertNotIn("clients that wait", one.limits)
        read = found(PGBENCH, late, load="select-only")  # 10 clients miss most pages
        self.assertAlmostEqual(read.limits["clients that wait"], 10 / (0.001 * read.reads))
        self.assertNotIn("clients that wait", found(study, Server(DRIVE), clients=1).limits)

    def test_each_request_of_a_mix_waits_as_often_as_it_has_to(self):
        """A read once, a write in place twice, and through a journal once; 2 loads of 32."""
        late = Server(DRIVE, drive_latency_seconds=0.5)
        policies = ("none", "journal")
        sides = [{"kind": "ashlar", "policy": policy, "name": policy} for policy in policies]
        study = Study.model_validate(FIO | {"side": sides})
        for side, load, hops in [
            ("none", "read", 1), ("none", "mix", 0.7 + 0.3 * 2), ("none", "write", 2),
            ("journal", "read", 1), ("journal", "mix", 1), ("journal", "write", 1),
            ("none", "stream", 1),
        ]:  # fmt: skip
            one = found(study, late, side=side, load=load, loads=2)
            self.assertEqual(one.bottleneck, "requests under way")
            self.assertAlmostEqual(one.per_second, 2 * 32 / (0.5 * hops), msg=f"{side}, {load}")

    def test_writes_that_read_nothing_before(self):
        """Whole stripes; a mirror; what has its parity away, in one of five stripes."""
        stream = Pattern(name="s", rw="write", block=1 << 20)
        self.assertEqual(forecast.hops(geometry(4, 1), stream), 1)
        for one, hops in [
            (geometry(4, 1), 2), (geometry(4, 2), 2), (geometry(1, 1), 1), (geometry(5, 0), 1),
            (geometry(4, 1, away=[0]), 1.8), (geometry(4, 2, away=[0]), 2),
            (geometry(4, 1, True), 1), (Geometry(4, 0, CHUNK, copies=2), 1),
        ]:  # fmt: skip
            self.assertAlmostEqual(forecast.write_hops(one), hops, msg=str(one))

    def test_as_a_run_measured_them(self):
        cell = Cell(0, 0, "ashlar", "healthy", "select-only", 10, 1, operations=100, array_reads=50,
                    array_writes=0, array_read_bytes=50 * 8192, array_write_bytes=0)  # fmt: skip
        its = forecast.measured_transactions([cell])
        study = Study.model_validate(PGBENCH)
        one = next(predict(study, Server(DRIVE), its))
        self.assertAlmostEqual(one.reads, 0.5)
        self.assertEqual((round(one.per_second), one.notes), (100_000, ()))

    def test_who_only_reads_waits_for_no_commit(self):
        """Though a run counts what a checkpoint of the cell before stored meanwhile."""
        cells = [Cell(0, 0, "ashlar", "healthy", script, 10, 1, operations=100, array_reads=50,
                      array_writes=1, array_read_bytes=50 * 8192, array_write_bytes=8192)
                 for script in ("select-only", "simple-update")]  # fmt: skip
        its, study = forecast.measured_transactions(cells), Study.model_validate(PGBENCH)
        late = Server(DRIVE, drive_latency_seconds=0.001)
        for load, hops in [("select-only", 0.5), ("simple-update", 1.5)]:
            one = next(each for each in predict(study, late, its) if each.load == load)
            self.assertAlmostEqual(one.limits["clients that wait"], 10 / (0.001 * hops))


    def test_measured_ones_are_kept_apart(self):
        cells = [
            Cell(0, 0, side, "healthy", "simple-update", clients, 1, operations=100, array_reads=0,
                 array_writes=writes, array_read_bytes=0, array_write_bytes=writes * size)
            for side, clients, writes, size in [
                ("a", 1, 300, 4096), ("a", 100, 100, 16384),
                ("b", 1, 200, 8192), ("b", 1, 400, 8192),
            ]
        ]  # fmt: skip
        its = forecast.measured_transactions(cells)
        told = {place: (one.writes, one.write_bytes) for place, one in its.items()}
        self.assertEqual(
            told,
            {
                ("a", "simple-update", 1): (3, 4096),
                ("a", "simple-update", 100): (1, 16384),
                ("b", "simple-update", 1): (3, 8192),
            },
        )

    def test_a_commit_in_place_is_a_small_write(self):
        one = forecast.Transaction(reads=0, writes=0, log_bytes=9216)
        load = forecast.of_transaction(geometry(4, 1), DRIVE, one)
        self.assertEqual((load.reads, load.writes), (2, 2))
        journaled = forecast.of_transaction(geometry(4, 1, journal=True), DRIVE, one)
        self.assertEqual(journaled.reads, 0)

    def test_large_writes_cost_their_bytes(self):
        few, many = (
            forecast.Transaction(reads=0, writes=1, log_bytes=0, write_bytes=size, measured=True)
            for size in (4096, 65536)
        )
        seconds = [
            forecast.of_transaction(geometry(4, 1), DRIVE, one).busiest_seconds
            for one in (few, many)
        ]
        self.assertAlmostEqual(seconds[1] / seconds[0], (65536 / 2e8) / (1 / 10_000))


class Check(unittest.TestCase):
    def test_each_pattern_in_each_state_has_a_prediction(self):
        for policy in ("none", "journal"):
            server = Server(DRIVE, span_bytes=proof.RANDOM_BYTES)
            its = list(predict(proof.study_of(4, 2, policy), server))
            places = [(one.load, one.state) for one in its]
            self.assertEqual(len(places), 2 * len(proof.PATTERNS))
            self.assertEqual(len(set(places)), len(places))
            self.assertTrue(all(one.bottleneck == "drives" for one in its))

    def test_reads_alone_find_nothing_that_waits(self):
        study = proof.study_of(4, 1, "journal")
        server = Server(DRIVE, span_bytes=proof.RANDOM_BYTES)
        rates = {
            one.load: one.per_second for one in predict(study, server) if one.state == "healthy"
        }
        self.assertEqual(round(rates["random-read"]), 50_000)
        self.assertGreater(rates["random-write"], 12_500)

    def test_how_far_apart(self):
        one = next(predict(proof.study_of(4, 1, "none"), Server(DRIVE)))
        rates = {0.84: False, 0.86: True, 1.14: True, 1.16: False}
        for ratio, holds in rates.items():
            measured = (one.per_second * ratio, one.per_second * 0.1, one.per_second * 9)
            self.assertEqual(proof.Compared("4+1", "none", "healthy", one, measured).holds, holds)


    def test_what_docs_say_is_predicted_is(self):
        """Of what is measured there, nobody but a machine without other work can say that."""
        row = re.compile(
            r"\| (\d)\+(\d) \| (none|journal) \| (healthy|degraded) \| ([^|]+) \| ([\d,]+) "
            r"\| ([\d,]+) \([^|]+\|[^|]* (\d\.\d\d) \|"
        )
        told = row.findall((paths.CHECKOUT / "docs/LAB.md").read_text())
        self.assertEqual(len(told), 2 * 2 * 2 * len(proof.PATTERNS))
        server = Server(proof.DRIVE, span_bytes=proof.RANDOM_BYTES)
        for data, parity, policy, state, work, predicted, measured, ratio in told:
            load = work.replace(" ", "-").replace("/", "-")
            its = predict(proof.study_of(int(data), int(parity), policy), server)
            rate = next(e.per_second for e in its if (e.load, e.state) == (load, state))
            place = (data, parity, policy, state, work)
            self.assertEqual(predicted, f"{rate:,.0f}", place)
            self.assertAlmostEqual(int(measured.replace(",", "")) / rate, float(ratio), 2, place)


class Command(unittest.TestCase):
    DRIVES = ["--drive-iops-read", "10000", "--drive-iops-write", "10000",
              "--drive-gbps-read", "0.2", "--drive-gbps-write", "0.2"]  # fmt: skip

    def test_what_is_no_figure_is_refused(self):
        for words in (["--drive-iops-read", "nan"], ["--drive-iops-read", "inf"],
                      ["--drive-iops-read", "0"], ["--only", "journal"]):  # fmt: skip
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
                plan.main(["fio-host", *self.DRIVES, *words])
            self.assertRegex(said.getvalue(), "no number above 0|--check")

    def said(self, *words: str) -> str:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(plan.main(list(words)), 0)
        return out.getvalue()

    def test_json(self):
        said = json.loads(self.said("fio-host", *self.DRIVES, "--json"))
        first = said["cells"][0]
        self.assertEqual((first["bottleneck"], round(first["per_second"])), ("drives", 50_000))
        self.assertIn("cores", said["not_known"][0])

    def test_models_of_drives_count_each_operation(self):
        slow = ["--drive-iops-read", "150", *self.DRIVES[2:]]
        rates = []
        for drives in ('{kind="block"}', '{kind="model", iops=1, mbps=1}'):
            said = json.loads(self.said("fio-host", *slow, "--set", f"drives={drives}", "--json"))
            its = (one for one in said["cells"] if one["load"] == "sequential-read-1m")
            rates.append(round(next(its)["per_second"]))
        # 5 drives of 200 MB a second; of 150 chunks
        self.assertEqual(rates, [954, 47])

    def test_numbers_of_things_are_whole(self):
        for words in (["--vms", "-2"], ["--cores", "0"], ["--cores", "1.5"]):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()) as said:
                plan.main(["fio-host", *self.DRIVES, *words])
            self.assertIn("no whole number above 0", said.getvalue())

    def test_table(self):
        self.assertIn("50,000", self.said("fio-host", *self.DRIVES))

    def test_what_is_missing_is_named(self):
        with self.assertRaisesRegex(StudyError, "--drive-gbps-write"):
            plan.main(["fio-host", *self.DRIVES[:-2]])

    def taken(self, study: str, *words: str) -> list[str]:
        return json.loads(self.said(study, *self.DRIVES, *words, "--json"))["taken"]

    def test_what_was_taken_from_where_is_told(self):
        """Of results that have some of it, the rest is estimated, and that is no secret."""
        with tempfile.TemporaryDirectory() as home:
            cell = Cell(0, 0, "ashlar", "healthy", "select-only", 10, 1, operations=100,
                        array_reads=50, array_writes=0, array_read_bytes=50 * 8192,
                        array_write_bytes=0)  # fmt: skip
            Results.open(Path(home)).add(cell)
            only = ("--set", 'pgbench.scripts=["select-only"]', "--set", "pgbench.clients=[10, 32]")
            words = (*only, "--from-results", home)
            drive, measured, estimated = self.taken("postgres-host", *words)
            self.assertIn("drive_iops_read, drive_iops_write, drive_gbps_read, drive_gbps_write "
                          "from the command", drive)  # fmt: skip
            self.assertIn(f"--from-results {home}: ashlar, select-only, 10 clients", measured)
            self.assertIn("ESTIMATED", estimated)
            self.assertIn("none of these: ashlar, select-only, 32 clients", estimated)
            self.assertIn("It has: ashlar, select-only, 10 clients", estimated)
            others = (*only[:2], "--set", "pgbench.clients=[7]", "--from-results", home)
            _, estimated = self.taken("postgres-host", *others)
            self.assertIn("ESTIMATED", estimated)
            self.assertIn("ESTIMATED", self.said("postgres-host", *self.DRIVES, *others))
            self.assertIn("fio are counted and not", self.taken("fio-host", *words[4:])[1])
        self.assertEqual(len(self.taken("postgres-host")), 1)

    def test_a_figure_of_a_drive_says_whence_it_is(self):
        with mock.patch.object(plan, "from_raw", return_value=dict.fromkeys(plan.FIGURES, 7.0)):
            said = self.said("fio-host", "--from-raw", "r.json", *self.DRIVES[:2], "--json")
        said = json.loads(said)
        drive = said["drive"]
        self.assertEqual((drive["drive_iops_read"], drive["drive_gbps_read"]), (10_000, 7))
        self.assertIn("drive_iops_write, drive_gbps_read, drive_gbps_write from --from-raw r.json; "
                      "drive_iops_read from the command", said["taken"][0])  # fmt: skip

    def test_results_that_are_none_are_refused(self):
        with self.assertRaisesRegex(StudyError, "no finished cell"):
            plan.main(["fio-host", *self.DRIVES, "--from-results", "/nonexistent"])

    def checked(self, *words: str) -> tuple[int, str, list]:
        """Status, what was said, and which levels were compared; nothing is measured."""
        said = io.StringIO()
        with (
            mock.patch.object(proof, "compare", return_value=iter(())) as compare,
            contextlib.redirect_stdout(said),
            contextlib.redirect_stderr(said),
        ):
            try:
                status = main.main(["plan", "--check", *words])
            except SystemExit as end:
                status = end.code
        return status, said.getvalue(), [call.args[1:3] for call in compare.call_args_list]

    def test_check_compares_the_levels_that_are_asked_for(self):
        with mock.patch.dict(os.environ, {"ASHLAR": "/bin/true"}):
            status, said, levels = self.checked("--levels", "4+2,8+3")
            self.assertEqual((status, levels), (0, [(4, 2), (8, 3)]), said)
            self.assertEqual(self.checked()[2], [(4, 1), (4, 2)])
            for wrong in ("4", "4+0", "a+b", "4+1,", "4+1 4+2"):
                status, said, levels = self.checked("--levels", wrong)
                self.assertEqual((status, levels), (2, []), wrong)
                self.assertIn("is not like 4+1,4+2", said)
            self.assertEqual(self.checked("--levels", "56+8")[2], [(56, 8)])
            status, said, levels = self.checked("--levels", "4+1,57+8")
            self.assertEqual((status, levels), (2, []))
            self.assertIn("57+8: an array has 64 drives at most", said)

    def test_check_says_of_what_its_figures_are(self):
        with mock.patch.dict(os.environ, {"ASHLAR": "/bin/true"}):
            for load, busy in [(0.0, False), (99.0 * os.cpu_count(), True)]:
                with mock.patch.object(os, "getloadavg", return_value=(load, 0, 0)):
                    status, said, _ = self.checked()
                self.assertEqual((status, "BUSY" in said), (0, busy), said)
                self.assertIn(f"{time.strftime('%d %B %Y')}, ", said)
            status, said, levels = self.checked("--only", "randm")
        self.assertEqual((status, levels), (1, []))
        self.assertIn("random-read, random-write", said)

    def test_check_counts_what_holds(self):
        one = next(predict(proof.study_of(4, 1, "none"), Server(DRIVE)))
        rows = [proof.Compared("4+1", "none", "healthy", one, (one.per_second * ratio,))
                for ratio in (1, 1.1, 1.2)]  # fmt: skip
        said = io.StringIO()
        with mock.patch.object(proof, "compare", return_value=iter(rows)), \
                contextlib.redirect_stdout(said):  # fmt: skip
            self.assertEqual(proof.main(Path("/bin/true"), [(4, 1)], ""), 1)
        self.assertIn("2 of 3 are within 15%; furthest apart: 20%", said.getvalue())

    def test_check_without_a_program(self):
        with mock.patch.dict(os.environ, {"ASHLAR": "/nonexistent"}):
            status, said, _ = self.checked()
        self.assertEqual(status, 1)
        self.assertIn("make build", said)

    def test_figures_of_a_run(self):
        with tempfile.TemporaryDirectory() as directory:
            words = FIO | {"array": {"data": 4, "parity": 1}}
            words["fio"] = {"patterns": [
                {"name": "a", "rw": "randread"}, {"name": "b", "rw": "randwrite"},
                {"name": "c", "rw": "read", "block": "1M"}, {"name": "d", "rw": "write"},
            ]}  # fmt: skip
            raw = {name: {"iops": 500, "bytes_per_sec": 5e9} for name in "abcd"}
            raw |= {f"{name}, 2 drives": {"drives": 2, "iops": 1, "bytes_per_sec": 1}
                    for name in "abcd"}  # fmt: skip
            study = Study.model_validate(words)
            (Path(directory) / "study.json").write_text(study.model_dump_json())
            (Path(directory) / "raw.json").write_text(json.dumps(raw))
            its = plan.from_raw(Path(directory) / "raw.json")
        self.assertEqual([its[name] for name in plan.FIGURES], [100, 100, 1, 1])

    def test_figures_of_a_run_are_of_small_requests_and_large_ones(self):
        patterns = [
            {"name": "few", "rw": "randread", "depth": 1},
            {"name": "small", "rw": "randread", "depth": 32},
            {"name": "large", "rw": "randread", "block": "64K"},
            {"name": "stream", "rw": "write", "block": "1M"},
            {"name": "pieces", "rw": "write", "block": "16K"},
            {"name": "blocks", "rw": "randwrite", "block": "16K"},
        ]
        raw = {
            one["name"]: {"drives": 5, "iops": 500 * at, "bytes_per_sec": 5e9 * at}
            for at, one in enumerate(patterns, 1)
        }
        for order in (patterns, patterns[::-1]):
            study = Study.model_validate(FIO | {"fio": {"patterns": order}})
            with tempfile.TemporaryDirectory() as directory:
                (Path(directory) / "study.json").write_text(study.model_dump_json())
                (Path(directory) / "raw.json").write_text(json.dumps(raw))
                its = plan.from_raw(Path(directory) / "raw.json")
            self.assertEqual(its, {"drive_iops_read": 200, "drive_gbps_write": 4})

    def measured(self, overwrite: bool) -> tuple[list, str]:
        """What fio is asked for, and what is said; of a drive that writes 5 GB in a minute."""
        asked = []

        def by_fio(device: str, rw: str, words: list[str]) -> dict:
            pairs = (word.removeprefix("--").split("=") for word in words if "=" in word)
            asked.append((rw, dict(pairs)))
            return {"io_bytes": 5_000_000_000, "iops": 1, "bw_bytes": 1}

        with (
            mock.patch.object(plan, "devices", mock.Mock(**{"problems.return_value": []})),
            mock.patch.multiple(plan, by_fio=by_fio, shutil=mock.Mock()),
            contextlib.redirect_stderr(io.StringIO()) as said,
        ):
            plan.measured("/dev/x", overwrite)
        return asked, said.getvalue()

    def test_a_drive_is_written_before_it_is_read_and_no_more_is_read(self):
        (fill, its), *asked = self.measured(overwrite=True)[0]
        self.assertEqual((fill, its["size"], its["runtime"]), ("write", str(64 << 30), "60"))
        self.assertEqual([rw for rw, _ in asked], ["write", "randwrite", "read", "randread"])
        self.assertEqual({its["size"] for _, its in asked}, {"5000000000"})
        self.assertEqual([its["numjobs"] for _, its in asked], ["1", "4", "1", "4"])
        asked, said = self.measured(overwrite=False)
        self.assertEqual([rw for rw, _ in asked], ["read", "randread"])
        self.assertIn("never written, or was discarded, it reads faster than it can", said)


if __name__ == "__main__":
    unittest.main()
