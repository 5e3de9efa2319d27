"""What is seen each second beside the load: `seconds.csv`, and the totals of a cell.

A thread looks about once a second and notes totals with their time. When the load is over and its
beginning is known, `rows` makes of them what happened in each whole second: pure, and in tests.
"""

import csv
import threading
import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

from lab import place as places
from lab import states
from lab.loads import Measured
from lab.place import Place
from lab.results import SECONDS
from lab.side import Counters, Side

PERIOD_SECONDS = 1.0
REST = 3  # times as long as a look took: on a slow guest it is not to be felt
JOIN_SECONDS_MAX = 60
COUNTERS = tuple(field.name for field in fields(Counters))


@dataclass(frozen=True)
class Sample:
    """Totals, since whenever; None where nobody knows."""

    at: float  # seconds since the epoch
    state: str  # of all arrays, as `states.together` has it
    counters: Counters | None
    storage_seconds: float
    guest_seconds: float | None
    daemon_seconds: float | None = None  # of the side's own processes: part of storage


class Meter:
    """CPU time of processes that come and go, and that are told by each look."""

    def __init__(self):
        self.last: dict[int, float] | None = None
        self.total = 0.0

    def add(self, now: dict[int, float]) -> float:
        """One that is new began after the last look; all of its time counts."""
        if self.last is not None:
            for pid, seconds in now.items():
                # a pid that was used again has less than before
                self.total += max(0.0, seconds - self.last.get(pid, 0.0))
        self.last = now
        return self.total


class Sampler:
    """Looks from `start` to `stop`. What goes wrong in it is raised by `stop`."""

    def __init__(
        self,
        side: Side,
        place: Place,
        load_pids: Callable[[], list[int]],
        guest_seconds: Callable[[], float | None],
        storage_seconds: Callable[[], float] = lambda: 0.0,  # of who else serves disks
    ):
        self.storage_seconds = storage_seconds
        self.side, self.place = side, place
        self.load_pids, self.guest_seconds = load_pids, guest_seconds
        self.samples: list[Sample] = []
        self.events: list[tuple[float, str]] = []
        self.storage, self.guests, self.daemon = Meter(), Meter(), Meter()
        self.over, self.wake = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.thread = threading.Thread(target=self.look_on, daemon=True)

    def start(self) -> None:
        self.look()
        self.thread.start()

    def look_soon(self) -> None:
        """Something was done: on a slow guest the next look may be far away."""
        self.wake.set()

    def end(self) -> None:
        """No more looks; `stop` waits for the one under way."""
        self.over.set()
        self.wake.set()

    def stop(self) -> None:
        self.end()
        self.thread.join(JOIN_SECONDS_MAX)
        if self.error:
            raise self.error
        self.look(last=True)

    def look_on(self) -> None:
        next_at = time.monotonic() + PERIOD_SECONDS
        while True:
            self.wake.wait(max(0.0, next_at - time.monotonic()))
            self.wake.clear()
            if self.over.is_set():
                return
            began = time.monotonic()
            try:
                self.look()
            except Exception as error:  # said where the load is waited for
                self.error = error
                return
            over = time.monotonic()
            next_at = max(next_at + PERIOD_SECONDS, over + REST * (over - began))

    def look(self, last: bool = False) -> None:
        """At the last, processes of a load are gone, and with them what they had used."""
        state, counters = states.together(self.side.states()), self.side.counters()
        now = places.processes(self.place)
        its_own = set(self.side.pids())
        storage = self.storage.add(
            {pid: it.cpu_seconds for pid, it in now.items() if it.is_kernel or pid in its_own}
        )
        daemon = None
        if its_own:
            daemon = self.daemon.add(
                {pid: it.cpu_seconds for pid, it in now.items() if pid in its_own}
            )
        guests = self.guest_seconds()
        if guests is None and not last:
            load = set(self.load_pids())
            guests = self.guests.add(
                {pid: it.cpu_seconds for pid, it in now.items() if pid in load}
            )
        storage += self.storage_seconds()
        sample = Sample(time.time(), state, counters, storage, guests, daemon)
        if self.samples and states.kinds(self.samples[-1].state) != states.kinds(state):
            self.events.append((sample.at, states.told(state)))
        self.samples.append(sample)


def between(samples: list[Sample], at: float, value: Callable[[Sample], float]) -> float:
    """A total at any moment: as if it had grown evenly from one look to the next."""
    times = [sample.at for sample in samples]
    after = min(max(bisect_left(times, at), 1), len(samples) - 1)
    one, two = samples[after - 1], samples[after]
    if two.at <= one.at:
        return value(two)
    share = min(max((at - one.at) / (two.at - one.at), 0.0), 1.0)
    return value(one) + share * (value(two) - value(one))


def totals(samples: list[Sample], begin: float, end: float) -> dict[str, float | None]:
    """What was counted between two moments: the counters, and CPU seconds."""

    def grown(value: Callable[[Sample], float]) -> float:
        return between(samples, end, value) - between(samples, begin, value)

    def counted(name: str) -> float | None:
        if any(getattr(sample.counters, name, None) is None for sample in samples):
            return None
        return grown(lambda sample: getattr(sample.counters, name))

    found: dict[str, float | None] = {name: counted(name) for name in COUNTERS}
    found["storage_seconds"] = grown(lambda sample: sample.storage_seconds)
    found["guest_seconds"] = guest_seconds(samples, begin, end)
    seen = all(sample.daemon_seconds is not None for sample in samples)
    found["daemon_seconds"] = grown(lambda sample: sample.daemon_seconds) if seen else None
    return found


def blurred_seconds(samples: list[Sample], begin: float, end: float) -> float:
    """Of a load that is even and rests before and after, so much lies outside of its time as
    `between` has it: it spreads what was within over all of the time from one look to the next."""
    times = [sample.at for sample in samples]
    found = 0.0
    for at in (begin, end):
        after = bisect_left(times, at)
        if 0 < after < len(times):
            one, two = times[after - 1], times[after]
            found += (at - one) * (two - at) / (two - one)
    return found


def guest_seconds(samples: list[Sample], begin: float, end: float) -> float | None:
    """What was not seen at the end went on as before."""
    seen = [sample for sample in samples if sample.guest_seconds is not None]
    until = min(end, seen[-1].at) if seen else begin
    if len(seen) < 2 or until <= begin:
        return None
    grown = [between(seen, at, lambda sample: sample.guest_seconds) for at in (begin, until)]
    return (grown[1] - grown[0]) * (end - begin) / (until - begin)


def rows(samples: list[Sample], load: Measured) -> list[dict[str, object]]:
    """One for each whole second from the first look to the end of what was measured."""
    first = int(samples[0].at - load.began)
    last = min(int(load.seconds), int(samples[-1].at - load.began))
    return [row(samples, load, second) for second in range(min(first, 0), last)]


def row(samples: list[Sample], load: Measured, second: int) -> dict[str, object]:
    begin = load.began + second
    its = totals(samples, begin, begin + 1)
    operations = load.operations.get(second, 0)
    took = load.latency_ms_sums.get(second)
    latency = took / operations if operations and took is not None else None
    latest = [sample.state for sample in samples if sample.at <= begin + 1]
    counts = {f"array_{name}": rounded(its[name], 0) for name in COUNTERS}
    return dict.fromkeys(SECONDS) | counts | {
        "second": second,
        "operations": round(operations),
        "latency_ms_mean": rounded(latency, 3),
        "storage_cores": rounded(its["storage_seconds"], 3),
        "guest_cores": rounded(its["guest_seconds"], 3),
        "daemon_cores": rounded(its["daemon_seconds"], 3),
        "state": latest[-1] if latest else samples[0].state,
    }  # fmt: skip


def rounded(value: float | None, digits: int) -> float | int | None:
    if value is None:
        return None
    return round(value, digits) if digits else round(value)


def write(path: Path, table: list[dict[str, object]]) -> None:
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, SECONDS)
        writer.writeheader()
        writer.writerows(table)
