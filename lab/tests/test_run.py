"""Goal: a run touches the array when the load has begun, ends what hangs, goes on past what fails,
and takes everything down whatever signals come.

Method: sides and loads made up for the purpose; the run itself, its signals and its files are real.
"""

import io
import json
import os
import shutil
import signal
import tempfile
import time
import unittest
from contextlib import ExitStack, redirect_stderr
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from demo import child
from lab import guests, loads, main, place, states, window
from lab import run as runs
from lab.ledger import Ledger
from lab.loads import LoadError, Measured, fio, pgbench
from lab.loads.fio import Fio, measure_drives
from lab.place import Host, Output, VmError
from lab.results import Cell, Results
from lab.sampler import Sample
from lab.schedule import blocks
from lab.side import Counters, Disk, Drive, SideError
from lab.study import Fio as FioStudy
from lab.study import Study, StudyError
from lab.tests import needs
from lab.where import Seat

MIB = 1 << 20
POSTGRES = Path("/usr/lib/postgresql")
FIO = {"patterns": [{"name": "p", "rw": "randread", "depth": 1}], "seconds": 1, "warm_seconds": 0}
STUDY = {
    "title": "t", "where": "host", "side": [{"kind": "ashlar"}, {"kind": "btrfs"}],
    "states": ["healthy", "degraded"], "repeats": 2, "fio": FIO,
}  # fmt: skip
HEALTHY = Cell(0, 0, "s", "healthy", "p", 0, 1)
DEGRADED = Cell(0, 0, "s", "degraded", "p", 0, 1)


class Silent:
    def now(self, what: str, again: bool = False) -> None: ...

    line = now


class MadeUpLoad:
    """Runs for `seconds`, or until `ends` says so, and has begun after `begins` seconds."""

    rate = None

    def __init__(self, seconds: float = 0.0, begins: float = 0.0, seconds_max: float = 30.0,
                 ends=None):  # fmt: skip
        self.at, self.seconds, self.begins = time.monotonic(), seconds, begins
        self.seconds_max, self.ends = seconds_max, ends

    @property
    def begun(self) -> bool:
        return time.monotonic() - self.at >= self.begins

    @property
    def running(self) -> bool:
        return not self.ends() if self.ends else time.monotonic() - self.at < self.seconds


class MadeUpSide:
    pulls_live = True
    name = "s"

    def __init__(self, pull_seconds: float = 0.0, arrays: int = 1):
        self.pull_seconds, self.pulled_at = pull_seconds, None
        self.out: list[list[int]] = [[] for _ in range(arrays)]
        self.filled: list[int | None] = [None] * arrays  # by looks at it, while it is filled
        self.done: list[str] = []

    def pull(self, array: int, member: int) -> None:
        self.pulled_at = time.monotonic()
        time.sleep(self.pull_seconds)
        self.out[array].append(member)
        self.done.append(f"pull {array} {member}")

    def replace(self, array: int, member: int) -> None:
        self.out[array].remove(member)
        self.filled[array] = 0
        self.done.append(f"replace {array} {member}")

    def rebuild_error(self) -> str | None:
        return None

    def counters(self) -> Counters | None:
        return None

    def states(self) -> list[str]:
        return [self.state(array) for array in range(len(self.out))]

    def state(self, array: int) -> str:
        """The second array takes longer than the first."""
        if self.filled[array] is not None:
            self.filled[array] += 1
            if self.filled[array] < 2 + array:
                return f"rebuilding {self.filled[array]}.0%"
            self.done.append(f"rebuilt {array}")
            self.filled[array] = None
        return states.without(len(self.out[array]))


def turn(side: MadeUpSide, load: MadeUpLoad) -> runs.Turn:
    return runs.Turn(side, len(side.out), None, [load], Silent(), "s")


WATCH = SimpleNamespace(error=None, samples=[], look_soon=lambda: None)


class Turns(unittest.TestCase):
    def test_a_drive_leaves_when_the_load_has_begun(self):
        side = MadeUpSide(pull_seconds=0.3)
        load = MadeUpLoad(begins=0.6, ends=lambda: side.out[0])  # however slow this machine is
        done = turn(side, load).see_through(DEGRADED, [load], WATCH)
        self.assertGreaterEqual(side.pulled_at - load.at, 0.6)
        (begun, what), (ended, after) = done
        self.assertEqual((what, after), ("drive 0 pulled", "drive 0 is out"))
        self.assertGreaterEqual(ended - begun, 0.3)

    def test_a_load_that_hangs_is_ended(self):
        load = MadeUpLoad(seconds=60, seconds_max=0.5)
        began = time.monotonic()
        with self.assertRaisesRegex(runs.RunError, "did not end in time"):
            turn(MadeUpSide(), load).see_through(HEALTHY, [load], WATCH)
        self.assertLess(time.monotonic() - began, 10)

    def test_a_cell_says_how_much_of_its_disks_was_written(self):
        active = [self.load(4), self.load(2)]
        for count, share in [(1, 1.0), (2, 0.75)]:
            cell = self.measured(MadeUpSide(), active, count)
            self.assertEqual((cell.operations, cell.filled_share), (5 * count, share))
            self.assertEqual(cell.notes.count("what was checked"), 1)

    def load(self, filled: int) -> mock.Mock:
        """That is over as soon as it has begun, on a disk of 4 MiB."""
        seat = Seat("host", mock.Mock(emulated=False), Disk(bytes=4 * MIB))
        load = mock.Mock(running=False, seconds_max=1, seat=seat, filled_bytes=filled * MIB)
        load.finish.return_value = Measured(100.0, 1.0, {0: 5}, {})
        load.verify.return_value = ["what was checked"]
        return load

    def measured(self, side: MadeUpSide, active: list, count: int = 1) -> Cell:
        samples = [
            Sample(at, "healthy", Counters(0, 0, 0, 0, pending), 0.0, None)
            for at, pending in ((100.0, 5), (101.0, 12))
        ]
        watch = mock.Mock(samples=samples, events=[], error=None)
        made = runs.Turn(side, 1, mock.Mock(), active, Silent(), "s")
        with (
            mock.patch.object(runs, "Sampler", return_value=watch),
            mock.patch.object(runs, "POLL_SECONDS", 0),
            tempfile.TemporaryDirectory() as home,
        ):
            return made.measure(replace(HEALTHY, loads=count), Path(home))

    def test_a_cell_begins_when_nothing_waits_of_the_cell_before(self):
        waits, seen = [], [0]
        side, load = MadeUpSide(), self.load(4)

        def states() -> list[str]:
            seen[0] = waits.pop(0) if waits else seen[0]
            return ["healthy"]

        side.states, side.counters = states, lambda: Counters(0, 0, 0, 0, seen[0])
        load.ready.side_effect = lambda cell: waits.extend([5 * MIB, 2 * MIB, MIB])  # it writes
        load.begin.side_effect = lambda *words: self.assertEqual((waits, seen), ([], [MIB]))
        cell = self.measured(side, [load])
        self.assertEqual((cell.array_pending_bytes, cell.notes), (7, ("what was checked",)))
        load.ready.side_effect, load.begin.side_effect = None, None
        seen[0] = 5 * MIB
        with mock.patch.object(runs, "PENDING_SECONDS_MAX", 0):
            note, _ = self.measured(side, [load]).notes
        self.assertIn("5 MiB wait in the journal from before", note)

    def test_what_was_another_state_is_noted(self):
        made = turn(MadeUpSide(arrays=2), MadeUpLoad(0))
        done = [(99.0, "drive 0 pulled"), (103.0, "drive 0 is out")]
        self.assertEqual(made.notes(DEGRADED, 1.0, [1.0], done, 103.5), [])
        late, share = "over 1.0 s after", "the array with a load was degraded in 80% of the measu"
        self.assertIn(late, " ".join(made.notes(DEGRADED, 1.0, [1.0], done, 102.0)))
        self.assertIn(share, " ".join(made.notes(DEGRADED, 0.8, [0.8], done, 103.5)))
        share = "all 2 arrays were degraded in 60% of the measured seconds only (each by itself: "
        self.assertIn(f"{share}100%, 60%)", made.notes(DEGRADED, 0.6, [1.0, 0.6], done, 103.5)[0])


class SeveralArrays(unittest.TestCase):
    """What is done to one is done to all."""

    def setUp(self):
        self.side = MadeUpSide(arrays=2)
        self.turn = turn(self.side, MadeUpLoad(0))
        self.enterContext(mock.patch.object(runs, "POLL_SECONDS", 0))
        self.enterContext(mock.patch.object(runs, "WHOLE_SECONDS_MAX", 5))

    def go_to(self, state: str) -> list[str]:
        """As a cell does: what is done before its load and in it."""
        self.side.done.clear()
        cell = replace(HEALTHY, state=state)
        self.turn.get_ready(cell)
        self.events = [what for _, what in self.turn.change(cell)]
        return self.side.done

    def test_every_array_loses_a_drive(self):
        self.assertEqual(self.go_to("degraded"), ["pull 0 0", "pull 1 0"])
        self.assertEqual(self.side.states(), ["degraded"] * 2)
        self.assertEqual(self.events, ["drive 0 of each of 2 arrays pulled",
                                       "drive 0 of each of 2 arrays is out"])  # fmt: skip
        self.assertEqual(self.go_to("degraded"), [])

    def test_every_array_loses_two(self):
        self.go_to("degraded")
        self.assertEqual(self.go_to("degraded-twice"), ["pull 0 1", "pull 1 1"])
        self.assertEqual(self.side.states(), ["degraded-twice"] * 2)

    def test_every_array_gets_a_spare(self):
        self.go_to("degraded")
        self.assertEqual(self.go_to("rebuilding"), ["replace 0 0", "replace 1 0"])
        self.assertEqual(self.side.states(), ["rebuilding 1.0%"] * 2)

    def test_the_next_cell_waits_for_all_rebuilds(self):
        self.go_to("rebuilding")
        whole = ["rebuilt 0", "rebuilt 1"]
        self.assertEqual(self.go_to("degraded"), [*whole, "pull 0 0", "pull 1 0"])
        self.go_to("degraded-twice")
        one = ["replace 0 0", "replace 1 0", *whole]
        other = ["replace 0 1", "replace 1 1", *whole]
        self.assertEqual(self.go_to("healthy"), [*one, *other])

    def test_loads_rest_once_for_all(self):
        self.side.pulls_live = False
        load = mock.Mock()
        load.rest.side_effect = lambda: self.side.done.append("rest")
        load.go_on.side_effect = lambda: self.side.done.append("go on")
        self.turn.loads = [load]
        self.assertEqual(self.go_to("degraded"), ["rest", "pull 0 0", "pull 1 0", "go on"])

    def test_a_rebuild_that_stopped_or_stands_still_ends_the_wait(self):
        self.go_to("degraded")
        self.side.states = lambda: ["healthy", "degraded"]
        self.side.rebuild_error = lambda: "a1: member 0, no room"
        wrong = r"it is healthy \| degraded: a1: member 0, no room"
        with self.assertRaisesRegex(runs.RunError, wrong):
            self.go_to("healthy")
        self.side.rebuild_error = lambda: None
        moves = iter(range(30))  # one that moves is waited for
        self.side.states = lambda: ["healthy", f"rebuilding {next(moves, 30)}.0%"]
        began, still = time.monotonic(), mock.patch.object(runs, "STILL_SECONDS_MAX", 0.3)
        with still, self.assertRaisesRegex(runs.RunError, r"rebuilding 30.0%: nothing has moved"):
            self.turn.out.clear()
            self.go_to("healthy")
        self.assertEqual(next(moves, None), None)
        self.assertLess(time.monotonic() - began, 4)  # of the five that it may take

    def test_what_is_done_to_an_emulated_machine_has_time(self):
        for emulated in (False, True):
            self.turn.where = SimpleNamespace(place=SimpleNamespace(emulated=emulated))
            self.turn.out, seen = [], []
            for state in ("healthy", "degraded", "degraded", "rebuilding"):
                cell = replace(HEALTHY, state=state)
                self.turn.get_ready(cell)
                seen.append(self.turn.more_warm(cell))
                self.turn.change(cell)
            self.assertEqual(seen, [0, 10, 0, 10] if emulated else [0] * 4)

    def test_one_that_fails_ends_the_wait(self):
        self.go_to("degraded")
        self.side.states = lambda: ["healthy", "failed"]
        with self.assertRaisesRegex(runs.RunError, "it is healthy | failed"):
            self.go_to("healthy")


def share(state: str, seconds: int, table: list[dict]) -> float | None:
    return window.share_as_wanted(replace(HEALTHY, state=state, seconds=seconds), table)


class Shares(unittest.TestCase):
    def test_seconds_count_in_the_state_that_they_were_in(self):
        states = ["healthy", "rebuilding 3.0%", "rebuilding 50.0%", "rebuilding 90.0%", "healthy"]
        table = [{"second": at - 1, "state": state} for at, state in enumerate(states)]
        self.assertEqual(share("rebuilding", 4, table), 0.75)
        table = [{"second": 0, "state": "degraded"}]
        self.assertEqual(share("degraded-twice", 1, table), 0.0)
        self.assertIsNone(share("healthy", 1, []))


class Undoing(unittest.TestCase):
    def test_signals_wait_until_all_is_undone(self):
        gone = []
        with self.assertRaises(KeyboardInterrupt), runs.undone(ExitStack()) as stack:
            stack.callback(gone.append, "side")
            stack.callback(signal.raise_signal, signal.SIGINT)
            stack.callback(gone.append, "load")
        self.assertEqual(gone, ["load", "side"])

    def test_a_second_signal_does_not_cut_it_short(self):
        gone = []
        with self.assertRaises(KeyboardInterrupt), runs.undone(ExitStack()) as stack:
            stack.callback(gone.append, "side")
            stack.callback(signal.raise_signal, signal.SIGINT)
            raise KeyboardInterrupt
        self.assertEqual(gone, ["side"])
        self.assertEqual(signal.getsignal(signal.SIGINT), signal.default_int_handler)

    def test_a_killed_process_that_stays_is_not_waited_for(self):
        stays = mock.Mock(pid=1 << 22)
        stays.poll.return_value = None
        stays.wait.side_effect = lambda seconds=None: (_ for _ in ()).throw(
            child.subprocess.TimeoutExpired("x", seconds)
        )
        with mock.patch.object(os, "killpg") as killed:
            child.kill(stays)
        killed.assert_called_once()


class InDirectory(unittest.TestCase):
    def setUp(self):
        directory = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(directory.cleanup)
        self.home = Path(directory.name)


class Failing(runs.Run):
    """The first side cannot be started."""

    def begin(self) -> None:
        self.turns = []

    def block(self, block: runs.Block) -> None:
        self.turns.append(block.side.name)
        if block.side.name == "ashlar":
            raise SideError("no such thing")
        for cell in block.cells:
            self.results.add(cell)


class Runs(InDirectory):
    def test_a_side_that_fails_does_not_end_the_study(self):
        session = SimpleNamespace(ledger=Ledger(self.home / "ledger"))
        run = Failing(Study.model_validate(STUDY), Results.open(self.home), session, False)
        run.sides = dict.fromkeys(("ashlar", "btrfs"))
        with self.assertRaises(runs.Incomplete) as raised:
            run.run()
        self.assertEqual(run.turns, ["ashlar", "btrfs", "btrfs", "ashlar"])
        self.assertEqual({cell.side for cell in run.results.cells}, {"btrfs"})
        self.assertEqual(len((self.home / "failures.jsonl").read_text().splitlines()), 4)
        self.assertIn("no such thing", str(raised.exception))

    def test_what_failed_is_not_waited_for(self):
        session = SimpleNamespace(ledger=Ledger(self.home / "ledger"))
        run = Failing(Study.model_validate(STUDY), Results.open(self.home), session, False)
        run.sides = dict.fromkeys(("ashlar", "btrfs"))
        left = []
        begun = run.try_block

        def try_block(block: runs.Block) -> None:
            left.append((run.screen.expected.blocks, run.screen.expected.cells))
            begun(block)

        run.try_block = try_block
        with self.assertRaises(runs.Incomplete):
            run.run()
        self.assertEqual(left, [(4, 8), (3, 6), (2, 4), (1, 2)])

    def test_a_run_that_is_over_starts_nothing(self):
        study, session = Study.model_validate(STUDY), SimpleNamespace(ledger=None)
        cells = [cell for block in blocks(study) for cell in block.cells]
        run = Failing(study, Results(self.home, cells), session, False)
        run.sides, run.place, said = dict.fromkeys(("ashlar", "btrfs")), mock.Mock(), io.StringIO()
        with mock.patch.object(Failing, "begin") as begin, redirect_stderr(said):
            run.run()
        begin.assert_not_called()
        self.assertEqual(said.getvalue(), "nothing is left to measure\n")

    def test_what_a_side_leaves_behind_ends_the_study(self):
        session = SimpleNamespace(ledger=Ledger(self.home / "ledger"))
        run = Failing(Study.model_validate(STUDY), Results.open(self.home), session, False)
        run.sides = dict.fromkeys(("ashlar", "btrfs"))
        with mock.patch.object(runs.Run, "stayed", return_value=True):
            with self.assertRaisesRegex(SideError, "no such thing"):
                run.run()
        self.assertEqual(run.turns, ["ashlar"])

    def test_the_report_is_made_all_the_same(self):
        made = []
        error = runs.Incomplete("one cell")
        run = mock.Mock(**{"return_value.run.side_effect": error})
        cache = mock.patch.dict(os.environ, {"ASHLAR_CACHE": str(self.home)})
        with mock.patch.object(main, "Run", run), cache:
            with mock.patch.object(main, "make_report", lambda words: made.append(words.results)):
                out = self.home / "out"
                self.assertEqual(main.main(["run", "fio-host", "--out", str(out)]), main.REFUSED)
        self.assertEqual(made, [out])

    def test_the_command_that_goes_on_is_said_whole(self):
        cache = mock.patch.dict(os.environ, {"ASHLAR_CACHE": str(self.home)})
        out, flags = self.home / "my results", ["--overwrite", "--skip-missing"]
        for error in (runs.Incomplete("one cell"), runs.RunError("all of it")):
            run = mock.Mock(**{"return_value.run.side_effect": error})
            for given in ([], flags[:1], flags[1:], flags):
                said = io.StringIO()
                words = ["run", "fio-host", "--no-report", "--out", str(out), *given]
                with mock.patch.object(main, "Run", run), cache, redirect_stderr(said):
                    self.assertEqual(main.main(words), main.REFUSED)
                shutil.rmtree(out)
                wanted = " ".join(["run", *sorted(given, reverse=True), "--resume", f"'{out}'"])
                self.assertIn(f"ashlar-lab {wanted}\n", said.getvalue())

    def test_words_that_mean_nothing_are_named(self):
        said = io.StringIO()
        with redirect_stderr(said), self.assertRaises(SystemExit) as ended:
            main.main(["check", "fio-host", "--set", "repeats=1", "fio.seconds=5"])
        self.assertEqual(ended.exception.code, 2)
        self.assertRegex(said.getvalue(), "fio.seconds=5; each KEY=VALUE takes a --set of its own")


class Settings(InDirectory):
    def load(self, said: str) -> pgbench.Pgbench:
        """Of a server that says so, and ends."""
        there = Recorder(grep=said)
        there.spawn = lambda command: SimpleNamespace(running=False)
        run = there.run
        there.run = lambda command, timeout=60: (
            Output(1, b"") if "pg_isready" in command else run(command)
        )
        asked = pgbench.studies.Pgbench(settings={"work_men": "1GB"})
        return pgbench.Pgbench(Seat("host", there, Disk(device="/dev/x")), asked)

    def test_those_that_postgresql_refuses_end_the_study(self):
        unknown = 'FATAL:  unrecognized configuration parameter "work_men"'
        with self.assertRaisesRegex(StudyError, r"`pgbench.settings.work_men`.*unrecognized"):
            self.load(f"2026-11-28 [7] {unknown}").start_server()
        self.assertNotIsInstance(StudyError(), runs.FAILURES)
        with self.assertRaisesRegex(LoadError, "did not start in host:\nFATAL: no memory"):
            self.load("FATAL: no memory").start_server()

    @needs(
        os.geteuid() == 0 and list(POSTGRES.glob("*/bin/postgres")),
        "asking PostgreSQL needs it, and root",
    )
    def test_postgresql_is_asked_before_anything_is_started(self):
        there = Host(Ledger(self.home / "ledger"))
        self.addCleanup(there.close)
        for settings, said in [
            ({"work_mem": "64MB", "fsync": False, "my.own": "a b"}, ""),
            ({"work_men": "64MB"}, 'unrecognized configuration parameter "work_men"'),
            ({"work_mem": "much"}, 'invalid value for parameter "work_mem"'),
            ({"max_wal_size": 1}, "outside the valid range"),
        ]:
            asked = pgbench.studies.Pgbench(settings=settings)
            found = pgbench.settings_problems(there, asked)
            self.assertTrue(there.ledger.path.exists())
            self.assertIn("+ path /tmp/ashlar-lab-", there.ledger.path.read_text())
            self.assertEqual(there.ledger.debts(), [])
            self.assertEqual(len(found), bool(said), found)
            self.assertIn(said, "".join(found))


class BreakingSide(MadeUpSide):
    """Breaks in a cell: it does not answer any more, and cannot be taken down."""

    protection = SimpleNamespace(losses=1, write_hole="closed")
    ends = None

    def start(self, arrays, spares, disk_bytes) -> list[Disk]:
        return [Disk(device="/dev/x")]

    def settings(self) -> dict:
        if self.ends:
            raise SideError("it does not answer")
        return {}

    def logs(self) -> list[str]:
        return [str(self.log)]

    def stop(self) -> None:
        self.log.write_text("stopped")
        if self.ends:
            raise SideError("the daemon did not end and was killed")


class Causes(InDirectory):
    """What fails in the second of three cells, and what follows from it."""

    def setUp(self):
        super().setUp()
        self.side = BreakingSide()
        self.side.log = self.home / "s.log"
        self.side.log.write_text("it breaks")
        words = STUDY | {"side": [{"kind": "ashlar", "name": "s"}], "repeats": 1,
                         "states": ["healthy", "degraded", "rebuilding"]}  # fmt: skip
        session = SimpleNamespace(ledger=Ledger(self.home / "ledger"))
        self.run_ = runs.Run(Study.model_validate(words), Results(self.home), session, False)
        self.run_.sides, self.run_.disk_bytes, self.run_.begin = {"s": None}, [MIB], lambda: None
        self.run_.where, self.run_.work = mock.Mock(**{"drives.return_value": ([], [])}), self.home
        self.load = mock.Mock(**{"settings.return_value": {}})
        self.run_.where.seats.return_value = [None]
        self.run_.where.consoles.return_value = [self.home / "vm0.log", self.home / "vm1.log"]
        (self.home / "vm0.log").write_text("it panics")
        self.run_.where.place.fetch = shutil.copyfile
        self.logs = self.home / "logs/0-s/1"
        self.enterContext(mock.patch.object(runs.sides, "make", return_value=self.side))
        self.enterContext(mock.patch.object(runs.loads, "make", return_value=self.load))

    def failures(self, broken) -> list[tuple]:
        """State, error, tried of each, when that breaks the side in a degraded cell."""

        def measure(turn, cell: Cell, directory: Path) -> Cell:
            if broken and cell.state == "degraded":
                self.side.ends = self.load.close.side_effect = SideError("it does not end")
                raise broken
            return replace(cell, seconds=1.0)

        with mock.patch.object(runs.Turn, "measure", measure), redirect_stderr(io.StringIO()):
            with self.assertRaises((runs.Incomplete, KeyboardInterrupt)) as raised:
                self.run_.run()
        self.said = str(raised.exception)
        path = self.home / "failures.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        words = map(json.loads, lines)
        return [(its["cell"]["state"], its["error"], its["tried"]) for its in words]

    def test_the_first_is_kept_and_what_follows_is_not_tried(self):
        found = self.failures(LoadError("the data are wrong"))
        wrong = f"the data are wrong\nits logs are in {self.logs}"
        self.assertEqual(found, [("degraded", wrong, True), ("rebuilding", wrong, False)])
        cause, _, undoing = self.said.splitlines()[1:]
        self.assertEqual(cause, "s, round 1 of 1: degraded, p: the data are wrong")
        self.assertEqual(undoing, "s, round 1 of 1: taking it down: the daemon did not end and was "
                         "killed")  # fmt: skip

    def test_a_turn_that_does_not_come_about_has_its_own_cause(self):
        self.side.ends = SideError("x")
        found = self.failures(None)
        why = f"it does not answer\nits logs are in {self.logs}"
        self.assertEqual([(error, tried) for _, error, tried in found], [(why, False)] * 3)

    def test_logs_are_those_from_before_it_was_taken_down(self):
        for number in ("1", "2"):  # the second goes on where the first was
            self.failures(LoadError("the data are wrong"))
            kept = self.logs.with_name(number)
            found = {path.name: path.read_text() for path in kept.iterdir()}
            self.assertEqual(found, {"s.log": "it breaks", "vm0.log": "it panics"})
            self.assertEqual(self.side.log.read_text(), "stopped")
            self.side.log.write_text("it breaks")

    def test_who_cannot_be_taken_down_has_logs_too(self):
        with mock.patch.object(BreakingSide, "stop", side_effect=SideError("it was killed")):
            self.failures(None)
        self.assertIn(f"it was killed\nits logs are in {self.logs}", self.said)

    def test_an_interrupt_ends_the_run_whatever_follows(self):
        self.assertEqual(self.failures(KeyboardInterrupt()), [])
        self.assertEqual([cell.state for cell in self.run_.results.cells], ["healthy"])


class Recorder:
    """A place that does nothing, and answers what it is told to."""

    logs = "/logs"

    def __init__(self, **answers: str):
        self.answers, self.commands = answers, []

    def run(self, command: str, timeout: float = 60) -> Output:
        self.commands.append(command)
        program = command.split()[0].strip("{").rpartition(".")[2]
        return Output(0, self.answers.get(program, "").encode())

    def check(self, command: str, timeout: float = 60) -> str:
        return self.run(command).text


class Disks(InDirectory):
    def test_a_loop_device_that_reads_from_memory_is_refused(self):
        there = Recorder(losetup="/dev/loop7\n", cat="0\n")
        with self.assertRaisesRegex(VmError, "page cache"):
            place.loop(there, "/f.img")
        made = [each for each in there.commands if "--find" in each]
        self.assertEqual([each.split("--sector-size=")[1][:4] for each in made], ["512 ", "4096"])
        self.assertEqual(sum("--detach" in each for each in there.commands), 2)
        there = Recorder(losetup="/dev/loop7\n", cat="1\n")
        self.assertEqual(place.loop(there, "/f.img"), "/dev/loop7")

    def test_loads_take_as_much_of_a_larger_device_as_of_others(self):
        there = Recorder(blockdev=str(900 * MIB))
        seat = Seat("host", there, Disk(device="/dev/x", bytes=640 * MIB))
        self.assertEqual(Fio(seat, FioStudy.model_validate(FIO)).whole_bytes(), 640 * MIB)
        with mock.patch.object(pgbench.places, "mount"):
            load = pgbench.Pgbench(seat, pgbench.studies.Pgbench())
            load.make_file_system()
        self.assertIn(f"mkfs.xfs -q -f -d size={640 * MIB} /dev/x", there.commands)

    def prepared(self, states: list[str], disk: Disk, load: dict) -> tuple[str, dict]:
        """What a load of a study with these states does before it is measured, and what it says."""
        there, spawned = Recorder(blockdev=str(900 * MIB)), []
        there.spawn = lambda command: spawned.append(command) or mock.Mock(
            **{"wait.return_value": Output(0, b"")}
        )
        words = STUDY | {"fio": None, "states": states} | load
        made = loads.make(Study.model_validate(words), Seat("host", there, disk))
        with mock.patch.object(pgbench.places, "mount"):
            for step in ("make_cluster", "start_server", "refuse_other_settings", "balances"):
                self.enterContext(mock.patch.object(pgbench.Pgbench, step))
            made.prepare(lambda what: None)
        formats = [each for each in there.commands if each.startswith("mkfs.xfs")]
        fills = [each for each in spawned if "--name=fill" in each]
        return "\n".join(fills + formats), made.settings()

    def test_what_is_to_be_rebuilt_has_been_written_and_is_not_discarded(self):
        disk, load = Disk(device="/dev/x", bytes=640 * MIB), {"pgbench": {"scale": 1}}
        told, its = self.prepared(["healthy", "rebuilding"], disk, load)
        fill, made = told.splitlines()
        self.assertRegex(fill, rf"^exec fio .*--filename=/dev/x .* --size={640 * MIB} ")
        self.assertEqual(made, f"mkfs.xfs -q -f -K -d size={640 * MIB} /dev/x")
        self.assertIn("640 MiB, all of the disk", its[pgbench.FILLED])
        self.assertIn("but for -K", its["file system"])
        told, its = self.prepared(["healthy", "degraded"], disk, load)
        self.assertEqual(told, f"mkfs.xfs -q -f -d size={640 * MIB} /dev/x")
        self.assertIn("nothing", its[pgbench.FILLED])
        self.assertNotIn("-K", its["file system"])

    def test_a_database_that_fails_before_a_cell_says_why(self):
        there = Recorder(grep="PANIC:  could not fsync file: Input/output error\n")
        there.set_clock = lambda: 0.0
        load = pgbench.Pgbench(Seat("host", there, Disk(directory="/fs")),
                               pgbench.studies.Pgbench())  # fmt: skip
        refused = VmError("could not create connection for client 2")
        for step in ("sql", "tried_to_connect"):
            with mock.patch.multiple(load, sql=mock.Mock(), tried_to_connect=mock.Mock()):
                getattr(load, step).side_effect = refused
                with self.assertRaisesRegex(LoadError, "client 2\nPostgreSQL's log:\nPANIC: .*I"):
                    load.ready(HEALTHY)

    def test_a_database_that_is_needed_no_more_is_not_stored_first(self):
        load = pgbench.Pgbench(Seat("host", Recorder(), Disk(directory="/fs")),
                               pgbench.studies.Pgbench())  # fmt: skip
        for end, signal_, seconds in [(load.rest, "INT", 600), (load.close, "QUIT", 60)]:
            load.server = server = mock.Mock()
            end()
            server.kill.assert_called_once_with(signal_)
            server.wait.assert_called_once_with(seconds)

    def test_a_file_system_of_a_side_is_filled_beside_the_database(self):
        disk = Disk(directory="/fs", bytes=4096 * MIB)
        told, its = self.prepared(["rebuilding"], disk, {"pgbench": {"scale": 100}})
        left = 4096 - 100 * 20 - 1280
        self.assertRegex(told, rf"--filename=/fs/filler .* --size={left * MIB} ")
        said = f"{left} MiB, in a file beside it, to which {4096 - left} MiB are left"
        self.assertEqual(its[pgbench.FILLED], said)
        told, _ = self.prepared(["rebuilding"], disk, {"pgbench": {"scale": 200}})
        self.assertEqual(told, "")  # the database takes all of it

    def test_fio_writes_what_its_patterns_do_not_use_where_it_is_to_be_rebuilt(self):
        disk, load = Disk(device="/dev/x", bytes=640 * MIB), {"fio": FIO | {"size": 100 * MIB}}
        for states, bounds, filled in [
            (["degraded"], [(0, 90)], 100),
            (["rebuilding"], [(0, 90), (100, 540)], 640),
        ]:
            told, its = self.prepared(states, disk, load)
            wanted = [f"--offset={at * MIB} --size={size * MIB}" for at, size in bounds]
            self.assertEqual([each.split("--iodepth=8 ")[1] for each in told.splitlines()], wanted)
            self.assertIn(f"{filled} MiB", its["filled"])

    def test_drives_are_written_before_they_are_measured(self):
        drives = []
        for number in range(2):
            path = self.home / f"d{number}"
            with open(path, "wb") as file:
                file.truncate(4 * MIB)
            drives.append(Drive(path.name, str(path), 4 * MIB))
        there = Host(Ledger(self.home / "ledger"))
        self.addCleanup(there.close)
        where = SimpleNamespace(place=there, drives=lambda: ([drives], []))
        found = measure_drives(Study.model_validate(STUDY), where, lambda what: None)
        self.assertGreater(found["p"]["iops"], 0)
        for drive in drives:
            self.assertGreaterEqual(os.stat(drive.path).st_blocks * 512, 4 * MIB)

    def test_drives_of_one_array_are_measured_alone_where_a_cell_loads_no_other(self):
        words = STUDY | {"where": "vm", "array": {"count": 3, "data": 1}, "vm": {"count": 4},
                         "fio": FIO | {"vms": [1, 2, 4]}}  # fmt: skip
        arrays, measured = [["a", "b"], ["c", "d"], ["e", "f"]], []
        drives = [[Drive(name, f"/{name}", MIB) for name in names] for names in arrays]
        where = SimpleNamespace(place=Recorder(), drives=lambda: (drives, []))

        def measure(place, asked, pattern, files, size, home) -> dict:
            measured.append("".join(files))
            return {"drives": len(files)}

        with mock.patch.multiple(fio, fill=mock.Mock(), measure_pattern=measure), \
                mock.patch.multiple(place, owe=mock.Mock(), settle=mock.Mock()):  # fmt: skip
            found = measure_drives(Study.model_validate(words), where, lambda what: None)
            self.assertEqual(found, {"p": {"drives": 6}, "p, 2 drives": {"drives": 2},
                                     "p, 4 drives": {"drives": 4}})  # fmt: skip
            self.assertEqual(measured, ["/a/b/c/d/e/f", "/a/b", "/a/b/c/d"])
            words["fio"] = FIO | {"vms": [3, 4]}  # a disk on each array
            found = measure_drives(Study.model_validate(words), where, lambda what: None)
            self.assertEqual(list(found), ["p"])
            words["side"] = [{"kind": "ashlar"}, {"kind": "raw"}]  # which takes a drive for each
            found = measure_drives(Study.model_validate(words), where, lambda what: None)
            self.assertEqual(list(found), ["p", "p, 3 drives", "p, 4 drives"])
            words["side"][1]["raid0"] = True  # which takes all of an array
            found = measure_drives(Study.model_validate(words), where, lambda what: None)
            self.assertEqual(list(found), ["p"])

    def test_what_is_checked_is_written_anew_after_each_cell(self):
        there = Host(Ledger(self.home / "ledger"))
        self.addCleanup(there.close)
        seat = Seat("host", there, Disk(directory=str(self.home), bytes=10 * MIB))
        load, path = Fio(seat, FioStudy.model_validate(FIO)), self.home / "fio"
        self.addCleanup(load.close)
        load.prepare(lambda what: None)
        older = path.read_bytes()
        load.verify()
        newer = path.read_bytes()
        load.verify()
        at = 9 * MIB  # a tenth is checked
        self.assertEqual(older[:at], newer[:at])
        load.mark = newer[at : at + fio.MARK_BYTES].hex()
        size = 64 << 10
        # a block that was not written, and two that were written where others belong
        for wrong in (older[at:][:size], newer[at + size :][:size], newer[at + 4096 :][:4096]):
            path.write_bytes(newer[:at] + wrong + newer[at + len(wrong) :])
            with self.assertRaisesRegex(LoadError, "is not what is read"):
                load.verify()

    def test_who_takes_no_writes_is_told_and_not_taken_for_wrong(self):
        there = mock.Mock(spec=Host)
        refused = mock.Mock(rc=1, text="fio: io_u error on file f: Input/output error")
        there.run.side_effect = lambda command, *_: (
            refused if "--rw=write" in command else mock.Mock(rc=0, text="")
        )
        disk = Disk(directory=str(self.home), bytes=10 * MIB)
        load = Fio(Seat("host", there, disk), FioStudy.model_validate(FIO))
        load.mark = "00"
        for checked in (1, 0):  # what is half written is not looked at again
            there.run.reset_mock()
            [note] = load.verify()
            self.assertIn("takes no writes", note)
            self.assertEqual(there.run.call_count, checked + 1)

    def test_models_of_drives_are_not_measured_but_stated(self):
        pattern = {"name": "large", "rw": "read", "block": "1M"}
        words = STUDY | {"drives": {"kind": "model", "iops": 1000, "mbps": 50},
                         "side": [{"kind": "ashlar"}, {"kind": "raw"}],
                         "fio": FIO | {"patterns": [*FIO["patterns"], pattern]}}  # fmt: skip
        where = mock.Mock()
        found = measure_drives(Study.model_validate(words), where, lambda what: None)
        self.assertEqual(where.mock_calls, [])
        figures = {name: (its["drives"], its["iops"]) for name, its in found.items()}
        # 50 MB a second are 47.7 requests of 1 MiB
        self.assertEqual(figures, {"p": (5, 5000), "p, 1 drive": (1, 1000),
                                   "large": (5, 238), "large, 1 drive": (1, 48)})  # fmt: skip
        self.assertEqual(found["large"]["bytes_per_sec"], 250_000_000)
        self.assertIn("not measured", found["p"]["command"])

    def test_storage_has_huge_pages_beside_the_guests(self):
        vm = {"count": 2, "memory": "1G", "huge_pages": True}
        study = Study.model_validate(STUDY | {"where": "vm", "vm": vm})
        for free, enough in [(2048, False), (2303, False), (2304, True)]:
            with mock.patch.object(guests, "huge_bytes_free", return_value=free * MIB):
                self.assertEqual(guests.with_huge_pages(study), enough, free)

    def test_later_rounds_have_the_pages_of_the_first(self):
        with mock.patch.object(guests, "huge_bytes_free", return_value=512 * MIB):
            guests.refuse_other_pages(True, 512 * MIB)
            guests.refuse_other_pages(False, 1024 * MIB)
            with self.assertRaisesRegex(VmError, "huge pages"):
                guests.refuse_other_pages(True, 1024 * MIB)
