"""A study's results on disk: what `run` writes, `report` reads, and a person can check by hand.

    RESULTS/                  one run of one study
      study.toml              as it was written
      study.json              as it is run: with `quick` and what was --set; study.Study reads it
      machine.json            hardware, kernel, versions of everything, limits, how it was called;
                              skipped: side → why it could not be run here; unequal: true or false;
                              conditions: what all figures have in common, see conditions.py
      machine-2.json          the same when a run went on later, and so on
      sides.json              name of a side → {kind, protection, settings: {…}, load: {…},
                              changed: […]}, settings as they were last, and how they were not the
                              same in all turns; or {skipped: why}
      raw.json                what the bare drives do: pattern → {drives, iops, bytes_per_sec, …},
                              all at once; “pattern, 5 drives” → the same of the first of them
                              alone, where a cell of a side loads no others; if asked. Of models of
                              drives, as the study states it (command: not measured…)
      commands.log            every command in order, with its time and its answer
      cells.jsonl             one line for each finished cell; a line is written when it is over
      failures.jsonl          one line for each try that failed: {cell: {…}, error, at, tried};
                              such a cell is tried again by a run that goes on, and may be done
                              since; tried: false where something had gone wrong before it (error)
      logs/0-ashlar/1/        of a turn that failed (repeat, side, which try): what the side's
                              program and the consoles of guests had said until then
      cells/000-ashlar-…/     what a cell left:
        seconds.csv           one row a second, `SECONDS` below
        vm0.log.gz            pgbench's own log of each transaction of that load (or host.log.gz)
        vm0.txt               what pgbench printed
        vm0.json              fio's own output
      report/                 made from the above at any time: index.html, report.pdf, *.csv, *.png

A run that was stopped goes on where it was: the cells in `cells.jsonl` are done, others begin anew.
Every figure in a report can be made again from the logs, and is: `cells.jsonl` holds no percentile.

pgbench's log has the warm-up, too, in no order of time, and each line says when a transaction
ended: those count that ended from `began` until `seconds` later. A guest's clock is set before each
load.
"""

import csv
import json
import shlex
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path

from lab import lines

# Columns of `seconds.csv`. Empty where it cannot be known. Cores are CPU seconds a second.
SECONDS = [
    "second",  # since the load's warm-up was over; negative before
    "operations",  # transactions, or I/Os of fio, that ended in this second, of all loads
    "latency_ms_mean",
    "array_reads",
    "array_writes",
    "array_read_bytes",
    "array_write_bytes",
    "array_pending_bytes",  # by how much more waits in a journal; negative where it was emptied
    "array_drive_reads",  # of all drives, where a side does not count what its arrays are asked
    "array_drive_read_bytes",
    "storage_cores",
    "guest_cores",
    "daemon_cores",  # of the side's own processes; part of storage_cores
    "state",  # of each array, with ` | ` between: see states.py
]

DATE = "%Y-%m-%d %H:%M:%S %z"  # in machine.json
STATED = "not measured, but stated by the study"  # in place of fio's command in raw.json
SAID_AGAIN = ("--skip-missing", "--overwrite")


def of_drives(pattern: str, drives: int) -> str:
    """Its key in raw.json, where not all drives are meant. No pattern has such a name."""
    return f"{pattern}, {drives} drive{'s' * (drives > 1)}"


def to_go_on(home: Path, called: Sequence[str]) -> str:
    """The command, with what a call was given that has to be said again."""
    given = " ".join(word for word in SAID_AGAIN if word in called)
    return f"ashlar-lab run {given}{' ' * bool(given)}--resume {shlex.quote(str(home))}"


def began_at(machine: dict) -> float:
    """Seconds since the epoch, 0 if it does not say."""
    try:
        return datetime.strptime(machine.get("date", ""), DATE).timestamp()
    except ValueError:
        return 0.0


class ResultsError(Exception):
    """What was left cannot be read or told of; the message names the file and the fix."""


@dataclass(frozen=True)
class Cell:
    """One measurement. All but `number` and what was measured is its place in the schedule."""

    number: int
    repeat: int  # from 0
    side: str
    state: str  # of `study.State`
    load: str  # pgbench's script, or the name of fio's pattern
    clients: int  # of pgbench, each load; 0 for fio
    loads: int  # how many run at once
    # Filled in when it is over:
    began: float = 0  # seconds since the epoch
    seconds: float = 0  # that were measured, without the warm-up
    operations: int = 0  # transactions or I/Os in those seconds, of all loads
    failed: int = 0  # operations that ended in an error
    array_reads: int | None = None
    array_writes: int | None = None
    array_read_bytes: int | None = None
    array_write_bytes: int | None = None
    array_pending_bytes: int | None = None  # more in a journal at the end than at the beginning
    array_drive_reads: int | None = None  # of sides that have none of the above; see SECONDS
    array_drive_read_bytes: int | None = None
    # Of a load that is even, so many seconds may be missing in the above: looks are not taken just
    # when it begins and ends. Older runs do not say.
    blurred_seconds: float | None = None
    storage_cores: float | None = None
    guest_cores: float | None = None
    daemon_cores: float | None = None
    state_before: str = ""  # of each array, as in seconds.csv
    state_after: str = ""
    # Whether states tell one drive out from two: older runs have `degraded` for both.
    drives_out_told: bool = True
    # of the measured seconds in which all arrays with a load were in `state`
    state_share: float | None = None
    # of the disks under load, what was written before they were measured; older runs do not say
    filled_share: float | None = None
    events: tuple[tuple[float, str], ...] = ()  # second, what happened: "drive d2 pulled"
    notes: tuple[str, ...] = ()  # what a reader must know of this one

    @property
    def key(self) -> tuple:
        return (self.repeat, self.side, self.state, self.load, self.clients, self.loads)

    @property
    def directory(self) -> str:
        clients = f"-{self.clients}" if self.clients else ""
        return (
            f"{self.number:03}-{self.side}-{self.state}-{self.load}{clients}"
            f"-x{self.loads}-{self.repeat}"
        )


@dataclass
class Results:
    home: Path
    cells: list[Cell] = field(default_factory=list)

    @classmethod
    def open(cls, home: Path) -> "Results":
        """An empty or a begun directory. A half-written last line counts as not there."""
        results = cls(home)
        results.cells = list(results.finished())
        return results

    def finished(self) -> Iterator[Cell]:
        for line in lines.whole(self.home / "cells.jsonl"):
            words = json.loads(line)
            words["events"] = tuple((second, what) for second, what in words["events"])
            words["notes"] = tuple(words["notes"])
            words.setdefault("drives_out_told", False)
            yield Cell(**words)

    def machines(self) -> list[dict]:
        """One for each time that the run was begun or went on."""
        found = sorted(
            self.home.glob("machine*.json"), key=lambda path: (len(path.name), path.name)
        )
        return [json.loads(path.read_text()) for path in found]

    def machines_used(self) -> list[dict]:
        """Those under which a cell was finished: of the others there is no figure. One that does
        not say when it began counts, too."""
        machines = self.machines()
        began = [began_at(machine) for machine in machines]
        under = {bisect_right(began, cell.began) - 1 for cell in self.cells}
        return [
            machine
            for at, machine in enumerate(machines)
            if began[at] == 0.0 or at in under or (at == 0 and -1 in under)
        ]

    def to_go_on(self) -> str:
        """As the last call was, if it came so far as to say it."""
        return to_go_on(self.home, (self.machines() or [{}])[-1].get("called", ()))

    def is_done(self, cell: Cell) -> bool:
        return any(done.key == cell.key for done in self.cells)

    def place_of(self, cell: Cell) -> Path:
        return self.home / "cells" / cell.directory

    def add(self, cell: Cell) -> None:
        """Its files come first: a line says that they are whole."""
        lines.append(self.home / "cells.jsonl", json.dumps(asdict(cell)))
        self.cells.append(cell)

    def add_failure(self, cell: Cell, error: str, tried: bool = True) -> None:
        words = {"cell": asdict(cell), "error": error, "at": time.time(), "tried": tried}
        lines.append(self.home / "failures.jsonl", json.dumps(words))

    def seconds_of(self, cell: Cell) -> list[dict[str, str]]:
        with open(self.place_of(cell) / "seconds.csv", newline="") as file:
            return list(csv.DictReader(file))
