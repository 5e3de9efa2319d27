"""All of a directory of results that a report says something about, read once."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from lab import stats, window
from lab import study as studies
from lab.results import STATED, Cell, Results, ResultsError, of_drives
from lab.stats import Figures, Summary
from lab.study import Study

PLACE_OF_A_CELL = ("number", "repeat", "side", "state", "load", "clients", "loads")
FIRST_COMPARED = "mdraid"  # what the published studies compare with


class ReportError(ResultsError):
    """There is nothing to report on; the message says what to do."""


@dataclass(frozen=True)
class Source:
    home: Path
    study: Study
    machines: tuple[dict, ...]  # one for each time that the run was begun or went on
    sides: dict[str, dict]
    raw: dict[str, dict]
    results: Results
    figures: tuple[Figures, ...]
    failures: tuple[dict, ...]  # of cells that are not done since: {cell, its, error, tried}

    @classmethod
    def read(cls, home: Path) -> "Source":
        results = Results.open(home)
        if not results.cells:
            raise ReportError(
                f"{home} has no finished cell: is it a directory of results, and did one finish? "
                f"`{results.to_go_on()}` goes on"
            )
        study = read_study(home)
        figures = tuple(stats.of(results, cell, log_share(study, cell)) for cell in results.cells)
        return cls(
            home,
            study,
            tuple(results.machines()),
            read_json(home / "sides.json"),
            read_json(home / "raw.json"),
            results,
            figures,
            tuple(read_failures(results)),
        )

    @cached_property
    def machines_used(self) -> list[dict]:
        """Those under which any of the figures came about."""
        return self.results.machines_used()

    @cached_property
    def summaries(self) -> list[Summary]:
        return stats.summaries(self.figures)

    def share_as_wanted(self, one: Figures) -> float | None:
        return window.share_as_wanted(one.cell, self.results.seconds_of(one.cell))

    def rebuilt(self, one: Figures) -> float | None:
        """Percent a minute."""
        return window.rebuilt_percent_a_minute(one.cell, self.results.seconds_of(one.cell))

    @cached_property
    def filled_shares(self) -> dict[str, float | None]:
        """Of the disks of a side whose arrays are rebuilt, the least that was written before. None
        if not all of its cells say it. fio writes all that it uses, also in an older run."""
        older = 1.0 if self.study.fio and not self.study.fio.size else None
        found: dict[str, float | None] = {}
        for cell in self.results.cells:
            if cell.state == studies.State.REBUILDING:
                its = older if cell.filled_share is None else cell.filled_share
                least = found.get(cell.side, its)
                found[cell.side] = None if None in (its, least) else min(its, least)
        return found

    def find(self, like: Cell, **other) -> Summary | None:
        """The summary whose place in the schedule is that of `like`, but for what is said."""
        key = stats.group_key(like)
        names = ("load", "loads", "clients", "state", "side")
        wanted = tuple(other.get(name, value) for name, value in zip(names, key, strict=True))
        return next((one for one in self.summaries if one.key == wanted), None)

    @cached_property
    def names(self) -> list[str]:
        """Sides that were measured, in the study's order."""
        measured = {cell.side for cell in self.results.cells}
        said = [side.name for side in self.study.side if side.name in measured]
        return said + sorted(measured - set(said))

    @cached_property
    def baseline(self) -> str | None:
        """With whom the others are compared; none, where there is one side only."""
        if len(self.names) < 2:
            return None
        return next(
            (name for name in self.names if self.kind(name) == FIRST_COMPARED), self.names[0]
        )

    def kind(self, side: str) -> str:
        return self.sides.get(side, {}).get("kind", "")

    @property
    def skipped(self) -> dict[str, str]:
        """Side → why it was left out."""
        found = {name: it["skipped"] for name, it in self.sides.items() if "skipped" in it}
        for machine in self.machines:
            found |= machine.get("skipped") or {}
        return {name: why for name, why in found.items() if name not in self.names}

    @property
    def is_fio(self) -> bool:
        return self.study.fio is not None

    @property
    def rate(self) -> str:
        return "IOPS" if self.is_fio else "tps"

    def pattern(self, load: str) -> studies.Pattern | None:
        """None of pgbench's scripts."""
        patterns = self.study.fio.patterns if self.study.fio else ()
        return next((pattern for pattern in patterns if pattern.name == load), None)

    def block_bytes(self, load: str) -> int:
        pattern = self.pattern(load)
        return pattern.block if pattern else 4096

    def is_sequential(self, load: str) -> bool:
        """Told in bytes a second, as people do."""
        return self.is_fio and self.block_bytes(load) >= 64 << 10

    def only_reads(self, load: str) -> bool:
        pattern = self.pattern(load)
        return load == "select-only" if pattern is None else pattern.rw in ("read", "randread")

    def drives_behind(self, loads: int, side: str) -> int:
        raid0 = any(one.raid0 for one in self.study.side if one.name == side)
        return self.study.drives_behind(loads, self.kind(side), raid0)

    def raw_of(self, load: str, loads: int, side: str) -> dict:
        """What as many bare drives did as this side used. An older run measured one number of them
        only: all, or before that those of one array."""
        its = self.raw.get(of_drives(load, self.drives_behind(loads, side)))
        return its or self.raw.get(load, {})

    @property
    def raw_is_stated(self) -> bool:
        """Nobody measured the bare drives: they are models of a set pace."""
        commands = [str(its.get("command", "")) for its in self.raw.values()]
        return bool(commands) and all(command.startswith(STATED) for command in commands)

    def raw_drives(self, load: str, loads: int, side: str) -> int:
        """How many did it."""
        return self.raw_of(load, loads, side).get("drives", self.study.array.members)

    @cached_property
    def loads(self) -> list[tuple[str, int]]:
        """Load and how many of it at once, in the order in which they were measured."""
        return list(dict.fromkeys((cell.load, cell.loads) for cell in self.results.cells))

    def of_load(self, load: str, loads: int) -> list[Summary]:
        return [one for one in self.summaries if (one.cell.load, one.cell.loads) == (load, loads)]

    def telling_clients(self, load: str, loads: int) -> int:
        """The number of clients at which who is compared with was fastest, healthy: what suits the
        others best is not looked for."""
        whole = [one for one in self.of_load(load, loads) if one.cell.state == "healthy"]
        whole = whole or self.of_load(load, loads)
        name = self.baseline or self.names[0]
        its = [one for one in whole if one.cell.side == name] or whole
        return max(its, key=lambda one: one.per_second.median).cell.clients

    def telling(self, load: str, loads: int) -> list[Summary]:
        """States by side, at that number of clients."""
        clients = self.telling_clients(load, loads)
        chosen = [one for one in self.of_load(load, loads) if one.cell.clients == clients]
        states = list(studies.State)
        return sorted(
            chosen,
            key=lambda one: (states.index(one.cell.state), self.names.index(one.cell.side)),
        )

    def title_of(self, load: str, loads: int) -> str:
        many = len({loads for _, loads in self.loads}) > 1 or loads > 1
        what = "VM" if self.study.where == studies.Where.VM else "load"
        return f"{load}, {loads} {what}{'s' if loads > 1 else ''}" if many else load


def read_study(home: Path) -> Study:
    """As it was run, with `--quick` and `--set`; as it was written, where only that is there."""
    path = home / "study.json"
    if path.exists():
        return studies.as_run(path)
    return studies.load(home / "study.toml")


def log_share(study: Study, cell: Cell) -> float:
    logged_in_part = study.pgbench is not None and cell.load == "select-only"
    return study.pgbench.log_share if logged_in_part else 1


def read_failures(results: Results) -> Iterator[dict]:
    """The last try of each cell that no try has finished."""
    path = results.home / "failures.jsonl"
    last = {}
    for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
        if line.endswith("\n"):
            words = json.loads(line)
            its = words["cell"]
            cell = Cell(**{name: its[name] for name in PLACE_OF_A_CELL})
            if not results.is_done(cell):
                last[cell.key] = {
                    "cell": cell.directory,
                    "its": cell,
                    "error": str(words["error"]),
                    "tried": words.get("tried", True),
                }
    yield from last.values()


def read_json(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}
