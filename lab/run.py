"""Runs a study from the first cell that is not done, and leaves nothing behind however it ends.

What is taken down when is a stack: machine, side, seats, loads, each undone in the reverse order,
also when the undoing of another fails. What even SIGKILL leaves is in the ledger.
"""

import fcntl
import json
import os
import secrets
import shlex
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from demo.vm import VmError
from lab import conditions, devices, loads, machine, sampler, schedule, sides, states, where, window
from lab import place as places
from lab.host import drive_count
from lab.ledger import Debt, Ledger, Stayed, is_there
from lab.loads import Load, LoadError
from lab.loads.pgbench import program_directory, settings_problems
from lab.place import Host
from lab.progress import Expected, Screen
from lab.results import Cell, Results
from lab.sampler import Sampler
from lab.schedule import Block
from lab.side import Side, SideError
from lab.sides.ashlar import Ashlar, copied, host_program
from lab.study import State, Study, Where

MIB = 1 << 20
DISK_SHARE = 0.9  # of what the smallest array holds
WARM_EMULATED_SECONDS = 10  # more, for what a command does to an emulated machine
WORK_BYTES = 64 << 20  # in /tmp, besides the program: logs of sides, and what guests are given
POLL_SECONDS = 0.2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
WHOLE_SECONDS_MAX = 24 * 3600  # for a rebuild between two cells
STILL_SECONDS_MAX = 600  # in which it did nothing: a tenth of a percent is seen
PENDING_BYTES_MAX = 1 << 20  # that wait in journals when a cell begins
PENDING_SECONDS_MAX = 180  # in which all that is more is waited for


class Refusal(Exception):
    """Nothing was started; the message has one problem a line, each with its fix."""


class RunError(Exception):
    """The study stopped; what is done stays done."""


class Incomplete(RunError):
    """It went to its end, and some cells failed: there is something to report."""


# Of one cell or one turn: the study goes on with the next turn, and says it.
FAILURES = (RunError, SideError, LoadError, VmError)


class Leftovers(Refusal):
    """Of a run that was killed: who goes on is to know of it."""


class Session:
    """What one call of the program holds while it works: the lock, the ledger, this machine."""

    def __init__(self, cache: Path):
        self.home = cache / "lab"
        self.ledger = Ledger(self.home / "ledger")
        self.lock = None

    def __enter__(self) -> "Session":
        self.home.mkdir(parents=True, exist_ok=True)
        self.lock = open(self.home / "lock", "a+")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.lock.seek(0)
            who = self.lock.read().strip() or "unknown"
            self.lock.close()
            raise Refusal(
                f"another run works with {self.home} (process {who}): wait for it, or set "
                "ASHLAR_CACHE to another directory"
            ) from None
        self.lock.truncate(0)
        self.lock.write(str(os.getpid()))
        self.lock.flush()
        return self

    def __exit__(self, *error) -> None:
        try:
            if error[0] not in (Leftovers, Stayed):
                self.take_down()
        finally:
            self.lock.truncate(0)
            self.lock.close()

    def take_down(self) -> None:
        """What a run did not: a signal came between the making of it and whose task that is."""
        with deaf():
            try:
                for said in self.ledger.clean():
                    print(said, file=sys.stderr)
            except (Stayed, OSError) as stayed:
                print(stayed, file=sys.stderr)

    def refuse_leftovers(self) -> None:
        if debts := self.ledger.debts():
            raise Leftovers(
                f"a run that was killed has left {len(debts)} things behind: `ashlar-lab clean` "
                "removes them"
            )


class Run:
    """One study on one machine, into one directory of results."""

    def __init__(self, study: Study, results: Results, session: Session, skip_missing: bool,
                 overwrite: bool = False):  # fmt: skip
        self.study, self.results, self.session = study, results, session
        self.skip_missing, self.overwrite = skip_missing, overwrite
        self.cleanup = ExitStack()
        self.skipped: dict[str, str] = {}
        self.disk_bytes: list[int] = []
        self.failures: list[str] = []
        # Of the turn under way: what went wrong first, and in which cell if in one.
        self.cause: BaseException | None = None
        self.failed: Cell | None = None
        self.kept: Path | None = None  # the logs of it

    # Before anything is started

    def prepare(self) -> None:
        """Makes what can be made without starting anything, and refuses with all problems."""
        self.place = Host(self.session.ledger)
        self.work = Path("/tmp") / f"ashlar-lab-{secrets.token_hex(8)}"
        drives = self.session.home / "drives"
        if not self.study.drives.directory:
            changed = self.study.drives.model_copy(update={"directory": str(drives)})
            self.study = self.study.model_copy(update={"drives": changed})
        if self.study.where == Where.HOST:  # each guest has the same each time
            self.study = self.with_exports(self.study)
        self.where = where.make(self.study, self.work, self.place)
        self.sides: dict[str, Side] = {
            chosen.name: sides.make(chosen, self.study, self.where.place, self.work)
            for chosen in self.study.side
        }
        if not self.left():
            return  # `run` starts nothing, so nothing stands in its way
        problems = []
        if self.study.where != Where.GUEST:  # there it is asked when the guest is there
            problems = self.missing_sides()
        if not problems and not self.left():
            return  # what is left is of sides that are left out
        problems += [*self.where.problems(), *self.room_problems(host_program())]
        problems += machine.problems(self.study, self.sides, self.results.home)
        problems += self.drive_problems()
        problems += self.mixture_problems(host_program())
        paths = self.study.drives.paths
        there = bool(paths) or self.study.drives.kind != "block"
        if self.sides and there and all(map(devices.is_block, paths)):
            used = self.results.machines_used()
            self.disk_bytes = conditions.disks_as_before(used, self.sizes())
            members = self.study.array.count * self.study.array.members
            smallest = min(self.drive_bytes()[:members])
            problems += machine.size_problems(
                self.study, min(self.disk_bytes), smallest, begun=bool(used)
            )
        if not problems and self.study.where == Where.HOST and self.study.pgbench:
            problems += settings_problems(self.place, self.study.pgbench)
        if problems:
            self.place.close()
            raise Refusal("\n".join(problems))

    def with_exports(self, study: Study) -> Study:
        """How disks of Ashlar are reached is decided once, also for a run that goes on: a module
        that is loaded meanwhile changes no turn, and one that is gone is missing."""
        made, known = [], self.known_sides()
        for chosen in study.side:
            if chosen.kind == "ashlar" and not chosen.export:
                was = known.get(chosen.name, {}).get("settings", {}).get("export")
                export = was or Ashlar(chosen, study, self.place, self.work).export_kind()
                chosen = chosen.model_copy(update={"export": export})
            made.append(chosen)
        return study.model_copy(update={"side": tuple(made)})

    def known_sides(self) -> dict[str, dict]:
        path = self.results.home / "sides.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def room_problems(self, program: Path) -> list[str]:
        """For the copy that is measured; a guest has one on a disk besides, made of another."""
        if not program.is_file():
            return []
        copies = 3 if self.study.where == Where.GUEST else 1
        needed = copies * program.stat().st_size * 5 // 4 + WORK_BYTES
        if (free := shutil.disk_usage(self.work.parent).free) >= needed:
            return []
        return [
            f"{self.work.parent} has {free >> 20} MiB free, and copies of {program} and what runs "
            f"leave there need {needed >> 20}: make room"
        ]

    def drive_problems(self) -> list[str]:
        """Of drives that are somebody's: nothing of theirs goes that was not given away."""
        drives = self.study.drives
        if found := set(",:\n") & set(drives.directory):  # QEMU and fio part names there
            return [f"{drives.directory!r} has {found} in it: take another directory for drives"]
        if drives.kind != "block":
            return []
        others = devices.other_drives(drives)
        # What is on the very drives of a run that was begun is its own: they were blank before, or
        # were given away.
        ours = bool(drives.identities and self.results.machines()) and not others
        return [*devices.problems(drives.paths, self.overwrite or ours), *others]

    def mixture_problems(self, program: Path) -> list[str]:
        its = {side.name for side in self.study.side if side.kind == "ashlar"}
        are_done = any(cell.side in its for cell in self.results.cells)
        measured = self.ashlar_measured(program) if are_done else ""
        used = self.results.machines_used()
        return conditions.other_program(used, measured) if measured else []

    def ashlar_measured(self, program: Path) -> str:
        """Its sum, if any cell of it is left."""
        is_left = any(block.side.kind == "ashlar" for block in self.left())
        return conditions.checksum(program) if is_left else ""

    def left(self) -> list[Block]:
        return [
            block
            for block in schedule.blocks(self.study)
            if block.side.name in self.sides and not all(map(self.results.is_done, block.cells))
        ]

    def missing_sides(self) -> list[str]:
        """Sides that cannot run here are problems, or are left out."""
        problems = []
        for name, side in list(self.sides.items()):
            if why := side.missing():
                del self.sides[name]
                self.skipped[name] = why
                problems.append(f"side {name}: {why} (--skip-missing leaves it out)")
        return problems if not self.skip_missing or not self.sides else []

    def sizes(self) -> list[int]:
        """All sides give disks of one size, which the smallest of them can give."""
        arrays = self.study.array
        members = [sides.Drive(f"d{at}", "", size) for at, size in enumerate(self.drive_bytes())]
        smallest = min(side.capacity_bytes(members) for side in self.sides.values())
        disks = self.where.disks()
        of_one_array = -(-disks // arrays.count)
        return [int(smallest * DISK_SHARE / of_one_array) // MIB * MIB] * disks

    def drive_bytes(self) -> list[int]:
        if self.study.drives.kind != "block":
            return [self.study.drives.size] * self.study.array.members
        return [
            int(self.place.check(f"blockdev --getsize64 {shlex.quote(path)}"))
            for path in self.study.drives.paths[: drive_count(self.study)]
        ]

    # The study

    def run(self) -> None:
        left = self.left()
        if not left:
            self.place.close()
            print("nothing is left to measure", file=sys.stderr)
            return
        cells = self.cells_of(left)
        expected = Expected(len(left), cells, schedule.seconds_of(self.study))
        with Screen(self.study.title, expected) as self.screen, undone(self.cleanup):
            self.begin()
            left = [block for block in left if block.side.name in self.sides]
            while left:
                expected.block_over(len(left), self.cells_of(left))
                self.try_block(left.pop(0))
        if self.failures:
            cells = "\n".join(self.failures)
            raise Incomplete(f"not all of it could be measured; the report says so:\n{cells}")

    def cells_of(self, left: list[Block]) -> int:
        return sum(not self.results.is_done(cell) for block in left for cell in block.cells)

    def begin(self) -> None:
        self.results.home.mkdir(parents=True, exist_ok=True)
        trace = self.cleanup.enter_context(open(self.results.home / "commands.log", "a"))
        self.place.trace = trace
        self.cleanup.callback(self.place.close)
        # not one that is there, which were not ours; the database's user passes through
        self.work.mkdir(mode=0o711)
        self.session.ledger.owe("path", str(self.work))
        self.cleanup.callback(places.remove, self.place, self.work)
        program = copied(self.work)
        if problems := self.mixture_problems(program):  # built anew since it was looked at
            raise Refusal("\n".join(problems))
        self.cleanup.callback(self.where.close)
        self.screen.now("the machines" if self.study.where != Where.HOST else "the drives")
        self.where.start(self.screen.now)
        if self.study.where == Where.GUEST and (problems := self.missing_sides()):
            raise Refusal("\n".join(problems))
        on_host = self.study.where == Where.HOST and self.study.pgbench  # guests have their own
        postgres = program_directory(self.place) if on_host else ""
        told = machine.description(self.study, postgres, str(program))
        told["where"] = self.where.settings()
        told["conditions"] = conditions.now(
            self.study, told["where"], self.where.huge_pages, self.disk_bytes,
            self.ashlar_measured(program),
        )  # fmt: skip
        told["disk_bytes"] = self.disk_bytes
        told["unequal"] = self.study.unequal
        told["skipped"] = self.skipped
        write_json(self.numbered("machine"), told)
        for changed in conditions.changes([*self.results.machines_used(), told]):
            self.screen.line(f"NOT AS THIS RUN WAS BEGUN, and the report says so: {changed}")
        raw = self.results.home / "raw.json"
        # of a call that measured nothing else, nobody knows whether its conditions were these
        if self.study.raw and not (raw.exists() and self.results.cells):
            from lab.loads.fio import measure_drives

            self.screen.now("the drives themselves")
            measured = measure_drives(self.study, self.where, self.screen.now)
            write_json(raw, measured)

    def numbered(self, name: str) -> Path:
        """A run that goes on says anew what the machine is: machine.json, machine-2.json, …"""
        first = self.results.home / f"{name}.json"
        if not first.exists():
            return first
        number = len(list(first.parent.glob(f"{name}*.json"))) + 1
        return first.with_stem(f"{name}-{number}")

    def try_block(self, block: Block) -> None:
        """One turn of one side. One that does not come about does not end the study."""
        before = self.session.ledger.debts()
        self.cause = self.failed = self.kept = None
        try:
            self.block(block)
        except FAILURES as error:
            if self.cause is not error:
                undoing = "taking it down: " * bool(self.cause)
                self.say_failed(f"{self.title(block)}: {undoing}{error}")
            self.cause = self.cause or error
            if not isinstance(self.cause, FAILURES):  # Ctrl-C, or a mistake of ours
                raise self.cause from None
            self.give_up(block)
            if self.stayed(before):
                raise  # the next turn would meet it
            return
        self.give_up(block)

    def title(self, block: Block) -> str:
        return f"{block.side.name}, round {block.repeat + 1} of {self.study.repeats}"

    def say_failed(self, what: str) -> None:
        self.failures.append(what)
        self.screen.line(f"FAILED {what}")

    @contextmanager
    def noted(self, block: Block, side: Side) -> Iterator[None]:
        """What goes wrong first is the cause of all that follows: what is broken may not be taken
        down, either. What was said until then is kept before it is."""
        try:
            yield
        except BaseException as error:
            if self.cause is None:
                self.cause = error
                if isinstance(error, FAILURES):
                    self.keep_logs(block, side)
                    self.say_failed(f"{self.title(block)}: {self.why(error)}")
            raise

    def keep_logs(self, block: Block, side: Side) -> None:
        """The next turn writes its own in their place. What cannot be had any more is left out:
        nothing here may hide what went wrong."""
        of_side = self.results.home / "logs" / f"{block.repeat}-{side.name}"
        with suppress(Exception):
            directory = of_side / str(len(list(of_side.glob("*"))) + 1)  # of a turn that is redone
            directory.mkdir(parents=True)
            for console in self.where.consoles():
                with suppress(OSError):
                    shutil.copyfile(console, directory / console.name)
                    self.kept = directory
            for log in side.logs():
                with suppress(Exception):
                    self.where.place.fetch(log, directory / Path(log).name)
                    self.kept = directory

    def why(self, error: BaseException) -> str:
        return f"{error}\nits logs are in {self.kept}" if self.kept else str(error)

    def give_up(self, block: Block) -> None:
        """Cells after the one that failed, and all of a turn that did not come about."""
        for cell in block.cells:
            if self.cause and cell is not self.failed and not self.results.is_done(cell):
                self.results.add_failure(cell, self.why(self.cause), tried=False)

    def stayed(self, before: list[Debt]) -> bool:
        """Whether more is there than before a turn, after all of it was undone."""
        debts = [debt for debt in self.session.ledger.debts() if debt not in before]
        return any(debt.kind != "path" and is_there(debt) for debt in debts)

    def block(self, block: Block) -> None:
        begun = time.monotonic()
        side = sides.make(block.side, self.study, self.where.place, self.work)
        title = self.title(block)
        noted = partial(self.noted, block, side)
        with noted(), undone(ExitStack()) as undo, noted():
            self.screen.now(f"{title}: drives")
            arrays, spares = self.where.drives()
            undo.callback(side.stop)
            self.screen.now(f"{title}: array")
            disks = [
                replace(disk, bytes=size)
                for disk, size in zip(
                    side.start(arrays, spares, self.disk_bytes), self.disk_bytes, strict=True
                )
            ]
            undo.callback(self.where.leave)
            running = [loads.make(self.study, seat) for seat in self.where.seats(disks)]
            for load in running:
                undo.callback(load.close)
            for load in running:
                load.prepare(lambda what: self.screen.now(f"{title}: {what}"))
            self.write_sides(side, running[0])
            self.screen.expected.block_made(time.monotonic() - begun)
            again = any(map(self.results.is_done, block.cells))
            turn = Turn(side, self.study.array.count, self.where, running, self.screen, title)
            left = [cell for cell in block.cells if not self.results.is_done(cell)]
            if all(self.cell(block, turn, cell, again) for cell in left):
                self.write_sides(side, running[0])  # a broken one would not answer
            self.screen.now(f"{title}: taking it down")

    def cell(self, block: Block, turn: "Turn", cell: Cell, again: bool) -> bool:
        """Whether it was measured. If not, nobody knows what state the array is in."""
        begun = time.monotonic()
        directory = self.results.place_of(cell)
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        try:
            finished = turn.measure(cell, directory)
        except FAILURES as error:
            self.cause, self.failed = error, cell
            self.keep_logs(block, turn.side)
            self.results.add_failure(cell, self.why(error))
            self.say_failed(f"{turn.title}: {named(cell)}: {self.why(error)}")
            return False
        if again:
            note = "measured after an interruption, on an array and a load made anew"
            finished = replace(finished, notes=(*finished.notes, note))
        self.results.add(finished)
        self.screen.expected.cell_done(time.monotonic() - begun)
        rate = finished.operations / finished.seconds
        self.screen.line(f"{turn.title}: {named(cell)}: {rate:,.0f} a second")
        return True

    def write_sides(self, side: Side, load: Load) -> None:
        known, settings = self.known_sides(), side.settings()
        was = known.get(side.name, {})
        changes = conditions.changes_of_side(was.get("settings", {}), settings)
        for changed in changes:
            self.screen.line(f"NOT AS BEFORE, and the report says so: {side.name}: {changed}")
        for name, why in self.skipped.items():
            if "settings" not in known.get(name, {}):  # else it was measured before
                known[name] = {"skipped": why}
        chosen = next(each for each in self.study.side if each.name == side.name)
        known[side.name] = {
            "kind": chosen.kind,
            "protection": {
                "losses": side.protection.losses,
                "write_hole": side.protection.write_hole,
            },
            "settings": settings,
            "load": load.settings(),
            "changed": list(dict.fromkeys([*was.get("changed", ()), *changes])),
        }
        write_json(self.results.home / "sides.json", known)


class Turn:
    """A side whose arrays are made, with loads that are filled: measures cell after cell.

    What is done to one array is done to all, one right after the other: a figure is of all of them.
    """

    def __init__(self, side: Side, arrays: int, on: where.Where, running: list[Load], screen,
                 title: str):  # fmt: skip
        self.side, self.arrays, self.where, self.loads = side, arrays, on, running
        self.screen, self.title = screen, title
        # members that were pulled of every array, and for which no spare came yet
        self.out: list[int] = []

    def measure(self, cell: Cell, directory: Path) -> Cell:
        self.get_ready(cell)
        active = self.loads[: cell.loads]
        watch = Sampler(
            self.side, self.where.place, self.load_pids, self.where.guest_cpu_seconds,
            self.where.storage_cpu_seconds,
        )  # fmt: skip
        state_before = states.together(self.side.states())
        for load in active:
            load.ready(cell)
        left = self.settle(cell)
        watch.start()
        more_warm = self.more_warm(cell)
        try:
            at = loads.together(len(active))
            for load in active:
                load.begin(cell, at, more_warm)
            done = self.see_through(cell, active, watch)
        finally:
            watch.end()
        watch.stop()
        measured = [load.finish(directory) for load in active]
        more = (f"warmed up for {more_warm} s more: processors are emulated",) * bool(more_warm)
        summary = loads.summary(measured, any(load.seat.place.emulated for load in active))
        table = sampler.rows(watch.samples, summary)
        sampler.write(directory / "seconds.csv", table)
        cell = replace(cell, began=summary.began, seconds=round(summary.seconds, 3))
        share = window.share_as_wanted(cell, table)
        of_each = window.share_of_each_array(cell, table)
        self.screen.now(f"{self.title}: {named(cell)}: checking the data")
        checked = list(dict.fromkeys(note for load in active for note in load.verify()))
        ended = summary.began + summary.seconds
        counted = sampler.totals(watch.samples, summary.began, ended)
        blurred = sampler.blurred_seconds(watch.samples, summary.began, ended)
        events = sorted(done + watch.events)
        found = self.notes(cell, share, of_each, done, summary.began)
        return replace(
            cell,
            operations=summary.total,
            failed=summary.failed,
            **{f"array_{name}": sampler.rounded(counted[name], 0) for name in sampler.COUNTERS},
            blurred_seconds=sampler.rounded(blurred, 3),
            storage_cores=sampler.rounded(counted["storage_seconds"] / summary.seconds, 3),
            guest_cores=self.cores(counted["guest_seconds"], summary.seconds),
            daemon_cores=self.cores(counted["daemon_seconds"], summary.seconds),
            state_before=state_before,
            state_after=watch.samples[-1].state,
            state_share=sampler.rounded(share, 3),
            filled_share=loads.filled_share(active),
            events=tuple((round(at - summary.began, 2), what) for at, what in events),
            notes=(*more, *left, *summary.notes, *found, *checked),
        )

    def notes(
        self, cell: Cell, share: float | None, of_each: list[float], done: list, began: float
    ) -> list[str]:
        found = []
        if share is not None and share < window.SHARE_ENOUGH:
            many = len(of_each) > 1
            loaded = " with a load" * (len(of_each) < self.arrays)
            who = f"all {len(of_each)} arrays{loaded} were" if many else f"the array{loaded} was"
            each = f" (each by itself: {', '.join(f'{one:.0%}' for one in of_each)})" * many
            found.append(f"{who} {cell.state} in {share:.0%} of the measured seconds only{each}")
        if done and (late := max(at for at, _ in done) - began) > 0:
            what = "the array" if self.arrays == 1 else "the arrays"
            found.append(
                f"what was done to {what} was over {late:.1f} s after the measurement had begun: "
                "give it a longer warm-up"
            )
        if cell.state != State.HEALTHY and not self.side.pulls_live:
            found.append("the drive was taken out while the load rested, which this side needs")
        return found

    def settle(self, cell: Cell) -> list[str]:
        """What was written before waits in a journal, and is no work of this cell's. Says what is
        left of it."""
        deadline = time.monotonic() + PENDING_SECONDS_MAX
        while (pending := self.pending_bytes()) > PENDING_BYTES_MAX:
            waiting = f"{pending >> 20} MiB wait in the journal"
            if time.monotonic() > deadline:
                return [f"{waiting} from before, after {PENDING_SECONDS_MAX} s"]
            self.screen.now(f"{self.title}: {waiting} before {named(cell)}", again=True)
            time.sleep(POLL_SECONDS)
        return []

    def pending_bytes(self) -> int:
        self.side.states()  # counters may be as they were when it was asked for them last
        counted = self.side.counters()
        return (counted.pending_bytes or 0) if counted else 0  # None where nobody knows

    @staticmethod
    def cores(cpu_seconds: float | None, seconds: float) -> float | None:
        return None if cpu_seconds is None else sampler.rounded(cpu_seconds / seconds, 3)

    def get_ready(self, cell: Cell) -> None:
        """Into what the cell's state begins from. What makes it, comes under load: `change`."""
        wanted = State(cell.state)
        if wanted == State.HEALTHY:
            self.make_whole(cell)
            return
        if not self.out:
            self.make_whole(cell)
        early = wanted == State.REBUILDING or not self.side.pulls_live
        while early and len(self.out) < wanted.drives_out:
            self.pull_before()

    def pull_before(self) -> None:
        self.screen.now(f"{self.title}: a drive is taken out")
        resting = [] if self.side.pulls_live else self.loads
        for load in resting:
            load.rest()
        self.pull()
        for load in resting:
            load.go_on()

    def make_whole(self, cell: Cell) -> None:
        while self.out:
            self.replace(self.out.pop(0))
            self.wait_rebuilt(cell)
        self.wait_rebuilt(cell)

    def wait_rebuilt(self, cell: Cell) -> None:
        """Until no array lacks more than what is out, as long as that comes nearer."""
        began = moved_at = time.monotonic()
        wanted, before = states.without(len(self.out)), ""
        while not states.are_all(state := states.together(self.side.states()), wanted):
            now, (before, last) = time.monotonic(), (state, before)
            moved_at = now if state != last else moved_at
            why = self.side.rebuild_error()
            if not why and now - moved_at > STILL_SECONDS_MAX:
                why = f"nothing has moved for {STILL_SECONDS_MAX} s"
            over = states.FAILED in states.kinds(state) or now - began > WHOLE_SECONDS_MAX
            if why or over:
                because = f": {why}" * bool(why)
                raise RunError(f"{self.side.name} did not become whole: it is {state}{because}")
            self.screen.now(f"{self.title}: {state} before {named(cell)}", again=True)
            time.sleep(POLL_SECONDS)

    def pull(self) -> None:
        member = len(self.out)
        for array in range(self.arrays):
            self.side.pull(array, member)
        self.out.append(member)

    def replace(self, member: int) -> None:
        for array in range(self.arrays):
            self.side.replace(array, member)

    def drive(self, member: int) -> str:
        return f"drive {member}" + f" of each of {self.arrays} arrays" * (self.arrays > 1)

    def change(self, cell: Cell) -> list[tuple[float, str]]:
        """What happens to the arrays while the load runs, once its warm-up has begun: when each
        thing was begun with the first, and when it was done with the last."""
        done = []
        wanted = State(cell.state)
        if wanted == State.REBUILDING:
            member = self.out.pop(0)
            done.append((time.time(), f"spare takes the place of {self.drive(member)}"))
            self.replace(member)
            done.append((time.time(), f"the spare of {self.drive(member)} is in"))
        while len(self.out) < wanted.drives_out and wanted != State.REBUILDING:
            drive = self.drive(len(self.out))
            done.append((time.time(), f"{drive} pulled"))
            self.pull()
            done.append((time.time(), f"{drive} is out"))
        return done

    def see_through(self, cell: Cell, active: list[Load], watch: Sampler):
        """Until all loads are over. A sampler that fails ends it, and so does a load that hangs."""
        deadline = time.monotonic() + max(load.seconds_max for load in active)
        done, changed = [], False
        self.screen.now(f"{self.title}: {named(cell)}")
        while any(load.running for load in active):
            if not changed and all(load.begun for load in active):
                done, changed = self.change(cell), True
                watch.look_soon()
            if watch.error:
                raise watch.error
            if time.monotonic() > deadline:
                raise RunError(f"the load did not end in time; the array is {last_state(watch)}")
            rates = [load.rate for load in active if load.rate]
            rate = f", {sum(rates):,.0f} a second" if rates else ""
            self.screen.now(f"{self.title}: {named(cell)}{rate}", again=True)
            time.sleep(POLL_SECONDS)
        return done

    def more_warm(self, cell: Cell) -> int:
        """Seconds: on an emulated machine what is done to drives shall be over before it is
        measured."""
        wanted = State(cell.state)
        changes = wanted == State.REBUILDING or len(self.out) < wanted.drives_out
        return WARM_EMULATED_SECONDS if changes and self.where.place.emulated else 0

    def load_pids(self) -> list[int]:
        return [pid for load in self.loads for pid in load.pids()]


@contextmanager
def undone(stack: ExitStack) -> Iterator[ExitStack]:
    """Undoes what is in it however it ends. Signals wait until that is done: one that came in
    between would leave the rest as it is."""
    try:
        yield stack
    except BaseException:
        with deaf():
            if not stack.__exit__(*sys.exc_info()):
                raise
    else:
        with deaf():
            stack.close()


@contextmanager
def deaf() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = []

    def note(number: int, frame) -> None:
        heard.append(number)
        print(
            "taking everything down: wait for it (should it hang: kill -KILL, `ashlar-lab clean`)",
            file=sys.stderr,
        )

    before = {number: signal.signal(number, note) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if heard:
            signal.raise_signal(heard[0])


def last_state(watch: Sampler) -> str:
    return watch.samples[-1].state if watch.samples else "not known"


def named(cell: Cell) -> str:
    clients = f", {cell.clients} clients" if cell.clients else ""
    many = f" in {cell.loads}" if cell.loads > 1 else ""
    return f"{cell.state}, {cell.load}{clients}{many}"


def write_json(path: Path, words: dict) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(words, indent=2, default=str) + "\n")
    draft.rename(path)
