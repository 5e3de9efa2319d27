"""Predicted against measured: `ashlar-lab plan --check`, on drives of a set pace.

Drives of the kind `model` are memory that serves a set number of operations and bytes a second, so
the drives are the limit, as the plan supposes, on any machine; slow ones, so that other work on it
matters little. `ashlar bench vhost` asks as a guest would. Of several rounds the median is
compared; the slowest and the fastest are shown beside it.
"""

import contextlib
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from demo import child
from demo.engine import Engine, EngineError
from lab import forecast, machine
from lab.forecast import Forecast, Server
from lab.geometry import Drive
from lab.study import Pattern, Study, StudyError

IOPS, MBPS = 1000, 50  # of each drive: what waits for them outlasts the pauses of a busy machine
DRIVE = Drive(IOPS, IOPS, MBPS * 1e6, MBPS * 1e6, is_model=True)
DRIVE_BYTES = 2 << 30  # large enough for a journal of the usual size
RANDOM_BYTES, SEQUENTIAL_BYTES = 512 << 20, 256 << 20
WARM_SECONDS, SECONDS, ROUNDS = 1, 3, 3
# A journal that is not as full as it will stay takes more than the drives can put in place; and it
# goes on after the last write, which is no part of what is measured next.
FULL_SECONDS = 25
# It fills and empties in turns that take seconds: a round has to have several of them.
JOURNAL_SECONDS, JOURNAL_ROUNDS = 15, 2
EMPTY_BYTES = 1 << 20
EMPTY_SECONDS_MAX = 180
ROUND_SECONDS_MAX = 300
ERROR_MAX = 0.15
BUSY_SHARE = 0.5  # of the processors, as in reports of studies
POLICIES = ("none", "journal")  # in place; through a journal
PATTERNS = (
    Pattern(name="random-read", rw="randread", depth=128),
    Pattern(name="random-write", rw="randwrite", depth=128),
    Pattern(name="random-70-30", rw="randrw", read_percent=70, depth=128),
    Pattern(name="sequential-read", rw="read", block=1 << 20, depth=64),
    Pattern(name="sequential-write", rw="write", block=1 << 20, depth=64),
)
SEGMENT_BYTES = 256 << 10
VOLUME_BYTES = 1 << 30


@dataclass(frozen=True)
class Compared:
    level: str
    policy: str
    state: str
    forecast: Forecast
    rounds: tuple[float, ...]  # requests a second

    @property
    def ratio(self) -> float:
        return median(self.rounds) / self.forecast.per_second

    @property
    def holds(self) -> bool:
        return abs(self.ratio - 1) <= ERROR_MAX


def compare(
    binary: Path, data: int, parity: int, only: str = "", policies: tuple[str, ...] = POLICIES
) -> Iterator[Compared]:
    """In place and through the journal, healthy and with a drive out."""
    level = f"{data}+{parity}"
    for policy in policies:
        study = study_of(data, parity, policy)
        server = Server(DRIVE, span_bytes=RANDOM_BYTES)
        predicted = [one for one in forecast.predict(study, server) if only in one.load]
        with Paced(binary, data, parity, policy) as paced:
            for one in predicted:
                if one.state == "degraded":
                    paced.pull()
                pattern = next(each for each in PATTERNS if each.name == one.load)
                yield Compared(level, policy, one.state, one, paced.measure(pattern))


def study_of(data: int, parity: int, policy: str) -> Study:
    return Study.model_validate(
        {
            "title": "the plan, checked",
            "where": "host",
            "states": ["healthy", "degraded"],
            "drives": {"kind": "model", "size": DRIVE_BYTES, "iops": IOPS, "mbps": MBPS},
            "array": {"data": data, "parity": parity},
            "side": [{"kind": "ashlar", "policy": policy}],
            "fio": {"patterns": [each.model_dump() for each in PATTERNS]},
        }
    )


class Paced:
    """An array of paced drives with one exported volume, all of which was written once."""

    def __init__(self, binary: Path, data: int, parity: int, policy: str):
        self.binary, self.members, self.policy = binary, data + parity, policy
        self.level = f"{data}+{parity}"
        self.pulled = False

    def __enter__(self) -> "Paced":
        self.home = Path(tempfile.mkdtemp(prefix="ashlar-lab-"))
        self.trace = open(self.home / "trace", "w")
        self.engine = Engine(
            self.binary, self.home / "state", self.home / "api", "0", self.home / "log", self.trace
        )
        try:
            self.make()
        except BaseException:
            self.__exit__()
            raise
        return self

    def make(self) -> None:
        self.engine.start()
        names = [f"d{at}" for at in range(self.members)]
        for name in names:
            self.engine.attach_drive(name, Path(f"model:{DRIVE_BYTES},iops={IOPS},mbps={MBPS}"))
        self.engine.create_array("main", names, self.level)
        # in place, so that nothing waits in a journal when it begins
        self.engine.ashlar("array", "set", "main", "--policy", "none")
        self.engine.create_volume("v", "main", VOLUME_BYTES)
        self.socket = self.home / "v.sock"
        self.engine.create_export("v", "v", self.socket)
        fill = Pattern(name="fill", rw="write", block=1 << 20, depth=64)
        self.bench(fill, "--ios", str(max(RANDOM_BYTES, SEQUENTIAL_BYTES) >> 20), span=RANDOM_BYTES)
        self.engine.ashlar("array", "set", "main", "--policy", self.policy)

    def __exit__(self, *error) -> None:
        with contextlib.suppress(EngineError):
            self.engine.stop()
        self.engine.kill()
        self.trace.close()
        shutil.rmtree(self.home, ignore_errors=True)

    def pull(self) -> None:
        if not self.pulled:
            self.pulled = True
            self.engine.pull_drive("d0")

    def measure(self, pattern: Pattern) -> tuple[float, ...]:
        self.settle()
        span = SEQUENTIAL_BYTES if pattern.rw in ("read", "write") else RANDOM_BYTES
        if self.policy == "journal" and "read" != pattern.rw != "randread":
            self.bench(pattern, "--warm-up", "1", "--seconds", str(FULL_SECONDS), span=span)
            return self.bench(pattern, *times(JOURNAL_SECONDS, JOURNAL_ROUNDS), span=span)
        return self.bench(pattern, *times(SECONDS, ROUNDS), span=span)

    def settle(self) -> None:
        deadline = time.monotonic() + EMPTY_SECONDS_MAX
        while self.engine.show("array", "show", "main")["journal"]["pending_bytes"] > EMPTY_BYTES:
            if time.monotonic() > deadline:
                raise EngineError(f"the journal was not empty after {EMPTY_SECONDS_MAX} s")
            time.sleep(0.2)

    def bench(self, pattern: Pattern, *words: str, span: int) -> tuple[float, ...]:
        segments = max(1, pattern.block // SEGMENT_BYTES)
        command = [
            str(self.binary), "bench", "vhost", "--socket", str(self.socket), "--force", "--json",
            "--rw", pattern.rw, "--block", str(pattern.block), "--depth", str(pattern.depth),
            "--mix", str(pattern.read_percent or 0), "--size", str(span), "--queues", "1",
            "--segments", str(segments), *words,
        ]  # fmt: skip
        if pattern.rw != "randrw":
            del command[command.index("--mix") : command.index("--mix") + 2]
        try:
            done = child.run(command, ROUND_SECONDS_MAX, stderr=subprocess.PIPE)
        except subprocess.TimeoutExpired:
            raise EngineError(f"`{' '.join(command)}` ran over {ROUND_SECONDS_MAX} s") from None
        if done.returncode:
            raise EngineError(f"`{' '.join(command)}` failed: {done.stderr.strip()}")
        return tuple(one["all"]["iops"] for one in json.loads(done.stdout)["rounds"])


def times(seconds: int, rounds: int) -> list[str]:
    words = {"--warm-up": WARM_SECONDS, "--seconds": seconds, "--rounds": rounds}
    return [word for name, value in words.items() for word in (name, str(value))]


def main(binary: Path, levels: list[tuple[int, int]], only: str) -> int:
    """Prints a table as it goes into docs/LAB.md, with what a reader has to know of it; 1 if one of
    it is off by more than 15 %."""
    if not binary.exists():
        raise EngineError(f"{binary} is not there: run `make build`, or set ASHLAR to the program")
    if not any(only in each.name for each in PATTERNS):
        names = ", ".join(each.name for each in PATTERNS)
        raise StudyError(f"--only {only}: nothing that is compared has this in its name: {names}")
    print(f"{conditions(binary)}\n", flush=True)
    print(
        "| array | policy | state | work | predicted | median measured (all) "
        "| measured / predicted |"
    )
    print("|---|---|---|---|---|---|---|")
    compared = []
    for data, parity in levels:
        for one in compare(binary, data, parity, only):
            compared.append(one)
            print(f"| {one.level} | {one.policy} | {one.state} | {one.forecast.load} "
                  f"| {one.forecast.per_second:,.0f} | {median(one.rounds):,.0f} "
                  f"({min(one.rounds):,.0f}–{max(one.rounds):,.0f}) | {one.ratio:.2f} |",
                  flush=True)  # fmt: skip
    worst = max((abs(one.ratio - 1) for one in compared), default=0)
    hold = sum(one.holds for one in compared)
    print(f"\n{hold} of {len(compared)} are within {ERROR_MAX:.0%}; furthest apart: {worst:.0%}")
    return 0 if hold == len(compared) else 1


def conditions(binary: Path) -> str:
    """Without these, figures in a table are of nobody knows what."""
    versions = machine.versions("", str(binary))
    program = f"{versions.get('ashlar', binary)} (checkout {versions.get('checkout', 'none')})"
    load, cpus = os.getloadavg()[0], os.cpu_count()
    busy = " (BUSY WITH OTHER WORK: what is slower may be so for that)" * (load > cpus * BUSY_SHARE)
    return (
        f"{time.strftime('%d %B %Y')}, {program}, drives of {IOPS} operations and {MBPS} MB a "
        f"second; load {load:.1f} on {cpus} CPUs when it began{busy}"
    )
