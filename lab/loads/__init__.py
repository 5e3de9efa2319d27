"""What is run on a disk, in any place. A load fills the disk once, and is then measured many times.

    load = loads.make(study, seat)
    load.prepare(say)                        # file system, database: once for a side and repeat
    load.ready(cell)                         # so that `begin` has nothing left to do
    load.begin(cell, at)                     # returns at once: several begin together
    while load.running: …
    measured = load.finish(directory)        # leaves its raw output there, as `results` has it
    load.verify()                            # what was written is there, and right
    load.close()

What it measured is in the seat's clock; `summary` puts several loads together.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from lab.results import Cell
from lab.study import State, Study
from lab.where import Seat


WHOLE = 0.95  # of the seconds that were asked for: with less it is another measurement
# On emulated processors a program begins seconds later than another, however long it is to run.
# Such figures show that everything works, as LAB.md says: half of a short cell does that.
LATE_EMULATED_SECONDS = 5.0
LATE_SECONDS = 1.0  # by which loads that begin together may differ: a guest may be slow to begin
TOGETHER_SECONDS = 3.0  # from which on they do: what takes that long to be ready begins late


class LoadError(Exception):
    """A load could not run, or what it read is not what was written."""


@dataclass(frozen=True)
class Measured:
    """One load of one cell, or all of them."""

    began: float  # seconds since the epoch, when its warm-up was over
    seconds: float
    # that ended in each second since `began`; negative in the warm-up. Of several loads, parts of
    # what one did in a second of its own are in two of these
    operations: dict[int, float]
    latency_ms_sums: dict[int, float]  # of these; none of a second in which nobody told it
    failed: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def total(self) -> int:
        its = self.operations.items()
        return round(sum(count for second, count in its if 0 <= second < self.seconds))


class Load(Protocol):
    seat: Seat
    fill_seconds: float  # that preparing it took
    filled_bytes: int  # of the disk, that preparing it wrote, but for a database

    def prepare(self, say: Callable[[str], None]) -> None: ...

    def ready(self, cell: Cell) -> None: ...

    def begin(self, cell: Cell, at: float = 0.0, more_warm: int = 0) -> None:
        """At that time since the epoch, by the seat's clock; at once if it is past. With so many
        more seconds of warm-up than the study says."""

    @property
    def running(self) -> bool: ...

    @property
    def begun(self) -> bool:
        """Its warm-up is under way: connections and files are there."""

    @property
    def seconds_max(self) -> float:
        """After which it hangs, since `begin`."""

    @property
    def rate(self) -> float | None:
        """Operations a second, lately."""

    def finish(self, directory: Path) -> Measured: ...

    def verify(self) -> list[str]:
        """Raises LoadError if what the disk holds is not what was written. What a reader must know
        of the check itself."""

    def rest(self) -> None:
        """Lets go of the disk, which stays as it is."""

    def go_on(self) -> None:
        """After a rest."""

    def pids(self) -> list[int]:
        """In the seat's place: whose CPU time is the load's."""

    def settings(self) -> dict[str, str]: ...

    def close(self) -> None:
        """Also after a half-done `prepare`, and twice."""


def make(study: Study, seat: Seat) -> Load:
    # Who skips what was never written would have nothing to rebuild: then all of it is written.
    full = State.REBUILDING in study.states
    if study.pgbench:
        from lab.loads.pgbench import Pgbench

        return Pgbench(seat, study.pgbench, full)
    from lab.loads.fio import Fio

    return Fio(seat, study.fio, full)


def filled_share(active: list[Load]) -> float:
    """Of their disks, in thousandths; 1 is all of it."""
    of_bytes = sum(load.seat.disk.bytes for load in active)
    return sum(load.filled_bytes for load in active) * 1000 // of_bytes / 1000


def wait_until(at: float) -> str:
    """Words for a shell."""
    return (
        f"left=$(({round(at * 1e6)} - $(date +%s%6N))); "
        "[ $left -le 0 ] || sleep $((left / 1000000)).$(printf %06d $((left % 1000000)))"
    )


def together(loads: int) -> float:
    """When so many loads begin that are told to now. One alone waits for nobody."""
    return time.time() + TOGETHER_SECONDS if loads > 1 else 0.0


def missing_seconds_max(asked: float, emulated: bool) -> float:
    """Of those that were asked for: how many may not have been measured."""
    late = min(LATE_EMULATED_SECONDS, asked / 2) if emulated else 0.0
    return max((1 - WHOLE) * asked, late)


def lag_max(seconds: float, emulated: bool = False) -> float:
    """By how much less than that several loads may have been measured together."""
    return max(LATE_SECONDS, missing_seconds_max(seconds, emulated))


def summary(measured: list[Measured], emulated: bool = False) -> Measured:
    """Several loads as one: only the seconds in which all of them were measured count. Raises
    LoadError where they were not all measured at once."""
    operations: dict[int, float] = {}
    sums: dict[int, float] = {}
    untold: set[int] = set()  # by one of them, so that it is not known of all
    began = max(one.began for one in measured)
    seconds = min(one.began + one.seconds for one in measured) - began
    longest = max(one.seconds for one in measured)
    said = (
        f"{len(measured)} loads were measured together for {max(0.0, seconds):.1f} s of "
        f"{longest:.1f}: one was late"
    )
    if longest - seconds > lag_max(longest, emulated):
        raise LoadError(f"{said}; give them more seconds, or fewer loads at once")
    for one in measured:
        for second, count in one.operations.items():
            for ours, share in shares(one, second, began, seconds):
                operations[ours] = operations.get(ours, 0.0) + share * count
                if count and second not in one.latency_ms_sums:
                    untold.add(ours)
                sums[ours] = sums.get(ours, 0.0) + share * one.latency_ms_sums.get(second, 0.0)
    sums = {second: value for second, value in sums.items() if second not in untold}
    notes = tuple(dict.fromkeys(note for one in measured for note in one.notes))
    notes += (said,) * (longest - seconds > lag_max(longest))
    failed = sum(one.failed for one in measured)
    return Measured(began, seconds, operations, sums, failed, notes)


def shares(one: Measured, second: int, began: float, seconds: float) -> list[tuple[int, float]]:
    """Of what a load did in one of its seconds: how much lies in which second since `began`, as if
    it had been done evenly. Nothing does that was done after `seconds`."""
    begin = second - (began - one.began)
    width = min(1.0, one.seconds - second)  # the last may be a part of a second
    found = []
    for ours in (math.floor(begin), math.floor(begin) + 1):
        inside = min(begin + width, ours + 1, seconds) - max(begin, ours)
        if inside > 0:
            found.append((ours, inside / width))
    return found
