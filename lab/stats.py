"""From what a cell left to figures: pgbench's logs, fio's JSON. Medians and spread over repeats.

    figures = stats.of(results, cell)
    for summary in stats.summaries(stats.of(results, cell) for cell in results.cells): …

Only what ended within the measured seconds counts: `cell.began` up to `cell.began + cell.seconds`.
fio adds up what each load did in its own time, and that is taken as it is, unless one was late:
then rate and mean are made of its logs, of the seconds that all have in common.
Where pgbench logged a share of its transactions only, that share is what rates are divided by.
A percentile is the smallest latency that so many percent of all operations did not exceed (nearest
rank): always one that was seen, never between two, and none with fewer than ten beyond it. Those of
several loads are of all their operations together; percentiles are never averaged.
"""

import gzip
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from lab.loads import lag_max
from lab.results import Cell, Results, ResultsError

PERCENTS = (50.0, 95.0, 99.0, 99.9, 99.95)
BEYOND_ENOUGH = 10  # operations that took longer: fewer say nothing of a percentile
REPEATS_ENOUGH = 3  # to call rates different; two are apart by chance once in three times
# What pgbench writes in the place of a latency.
NOT_DONE = ("failed", "serialization", "deadlock", "skipped")
NS_PER_MS = 1e6
US_PER_MS = 1e3
US_PER_S = 1_000_000


class StatsError(ResultsError):
    """A file of a result is not what it should be; the message names it."""


@dataclass(frozen=True)
class Distribution:
    """How often each latency was seen: of a log exactly, of fio to the width of its bins."""

    latency_ms: np.ndarray  # ascending, each once
    counts: np.ndarray

    @classmethod
    def of(cls, latency_ms, counts=None) -> "Distribution":
        values = np.asarray(latency_ms, dtype=float)
        weights = np.ones(len(values), dtype=np.int64) if counts is None else np.asarray(counts)
        each, where = np.unique(values, return_inverse=True)
        sums = np.zeros(len(each), dtype=np.int64)
        np.add.at(sums, where, weights)
        return cls(each[sums > 0], sums[sums > 0])

    @classmethod
    def merged(cls, several: Iterable["Distribution"]) -> "Distribution":
        several = list(several)
        return cls.of(
            np.concatenate([one.latency_ms for one in several]),
            np.concatenate([one.counts for one in several]),
        )

    @property
    def total(self) -> int:
        return int(self.counts.sum())

    @cached_property
    def reached(self) -> np.ndarray:
        """How many operations took at most that long."""
        return np.cumsum(self.counts)

    def mean_ms(self) -> float:
        return float(self.latency_ms @ self.counts / self.total)

    def percentiles_ms(self) -> dict[float, float]:
        """Those that enough operations lie beyond."""
        return {
            percent: self.percentile_ms(percent)
            for percent in PERCENTS
            if enough_beyond(self.total, percent)
        }

    def percentile_ms(self, percent: float) -> float:
        # In whole thousandths: 99.9 / 100 is a little more than 0.999, and the rank one too many.
        rank = -(-self.total * round(percent * 1000) // 100_000)
        return float(self.latency_ms[np.searchsorted(self.reached, max(rank, 1))])


def enough_beyond(total: int, percent: float) -> bool:
    return total * (100_000 - round(percent * 1000)) >= BEYOND_ENOUGH * 100_000


@dataclass(frozen=True)
class Figures:
    """What one cell measured."""

    cell: Cell
    operations: int
    failed: int
    per_second: float  # transactions, or I/Os
    bytes_per_second: float | None  # fio
    mean_ms: float | None
    percentiles_ms: dict[float, float]  # none where it cannot be known
    distribution: Distribution | None = None
    each_second: dict[int, int] = field(default_factory=dict)  # second → operations that ended
    notes: tuple[str, ...] = ()


def of(results: Results, cell: Cell, log_share: float = 1) -> Figures:
    home = results.place_of(cell)
    if logs := sorted(home.glob("*.log.gz")):
        return of_pgbench(cell, logs, log_share)
    if outputs := sorted(home.glob("*.json")):
        return of_fio(cell, outputs, results.seconds_of(cell))
    raise StatsError(f"{home} has neither a log of pgbench nor the output of fio")


# pgbench ----------------------------------------------------------------------------------------


def read_log(path: Path) -> pd.DataFrame:
    """`latency_us` (NaN: it failed) and `ended_us` since the epoch, of each transaction."""
    columns = {2: "latency_us", 4: "epoch_seconds", 5: "epoch_us"}
    with gzip.open(path, "rb") as file:
        if not file.peek(1):
            return pd.DataFrame({"latency_us": [], "ended_us": []})
        try:
            log = pd.read_csv(
                file,
                sep=" ",
                header=None,
                usecols=list(columns),
                na_values={2: list(NOT_DONE)},
                keep_default_na=False,
                dtype={2: "float64", 4: "int64", 5: "int64"},
            ).rename(columns=columns)
        except (ValueError, EOFError) as error:
            raise StatsError(f"{path} is not pgbench's log of transactions: {error}") from None
    log["ended_us"] = log["epoch_seconds"] * US_PER_S + log["epoch_us"]
    return log[["latency_us", "ended_us"]]


def of_pgbench(cell: Cell, logs: list[Path], log_share: float = 1) -> Figures:
    log = pd.concat([read_log(path) for path in logs])
    since_us = log["ended_us"].to_numpy() - round(cell.began * US_PER_S)
    done = log["latency_us"].notna().to_numpy()
    measured = (since_us >= 0) & (since_us < round(cell.seconds * US_PER_S))
    latency_us = log["latency_us"].to_numpy()[measured & done]
    failed = round((measured & ~done).sum() / log_share)
    operations = round(len(latency_us) / log_share)
    notes = []
    if len(logs) != cell.loads:
        notes.append(f"{len(logs)} logs of {cell.loads} loads")
    known_to = max(1, cell.operations // 100)
    if cell.loads > 1:  # whose seconds begin apart: of those on an edge a share was taken
        known_to = max(known_to, cell.operations / cell.seconds)
    if abs(cell.operations - operations) > known_to:
        notes.append(f"the logs have {operations} transactions, not {cell.operations}")
    if not operations:
        notes.append("no transaction was finished in the measured time")
        return Figures(cell, 0, failed, 0.0, None, None, {}, None, {}, tuple(notes))
    distribution = Distribution.of(latency_us / US_PER_MS)
    seconds, counts = np.unique(since_us[done] // US_PER_S, return_counts=True)
    return Figures(
        cell,
        operations=operations,
        failed=failed,
        per_second=len(latency_us) / log_share / cell.seconds,
        bytes_per_second=None,
        mean_ms=distribution.mean_ms(),
        percentiles_ms=distribution.percentiles_ms(),
        distribution=distribution,
        each_second={
            int(second): round(count / log_share)
            for second, count in zip(seconds, counts, strict=True)
        },
        notes=tuple(notes),
    )


# fio --------------------------------------------------------------------------------------------


def of_fio(cell: Cell, outputs: list[Path], rows: list[dict[str, str]]) -> Figures:
    """fio leaves its ramp out by itself: all that its JSON counts was measured."""
    told = [row for row in rows if row["operations"] and int(row["second"]) >= 0]
    each_second = {int(row["second"]): int(row["operations"]) for row in told}
    jobs = [job for path in outputs for job in read_fio(path)["jobs"]]
    ways = [job[way] for job in jobs for way in ("read", "write") if job[way]["total_ios"]]
    failed = sum(job.get("total_err", 0) for job in jobs)
    operations = sum(way["total_ios"] for way in ways)
    notes = [] if len(outputs) == cell.loads else [f"{len(outputs)} outputs of {cell.loads} loads"]
    if not operations:
        notes.append("no I/O was finished in the measured time")
        return Figures(cell, 0, failed, 0.0, 0.0, None, {}, None, each_second, tuple(notes))
    kind = latency_kind(ways)
    distribution, percentiles = fio_latencies([way[kind] for way in ways])
    if distribution is None and len(ways) > 1:
        notes.append("percentiles of several loads need bins: fio's output is to be json+")
    counted = sum(way[kind]["N"] for way in ways)
    mean_ns = sum(way[kind]["mean"] * way[kind]["N"] for way in ways) / counted if counted else 0
    figures = Figures(
        cell,
        operations=operations,
        failed=failed,
        per_second=sum(way["iops"] for way in ways),
        bytes_per_second=float(sum(way["bw_bytes"] for way in ways)),
        mean_ms=mean_ns / NS_PER_MS if counted else None,
        percentiles_ms=percentiles,
        distribution=distribution,
        each_second=each_second,
        notes=tuple(notes),
    )
    longest = max(way["runtime"] for way in ways) / 1000
    return in_common(figures, told) if longest - cell.seconds > lag_max(longest) else figures


def in_common(figures: Figures, told: list[dict[str, str]]) -> Figures:
    """Of the seconds in which all loads were measured: what fio adds up is of more than these. So
    are its bins, and no percentile is known."""
    cell = figures.cell
    per_second = cell.operations / cell.seconds
    timed = [row for row in told if row["latency_ms_mean"]]
    counted = sum(int(row["operations"]) for row in timed)
    took_ms = sum(int(row["operations"]) * float(row["latency_ms_mean"]) for row in timed)
    note = "one load was late: no percentile is known of the seconds that all have in common"
    return replace(
        figures,
        operations=cell.operations,
        per_second=per_second,
        bytes_per_second=figures.bytes_per_second * per_second / figures.per_second,
        mean_ms=took_ms / counted if counted else None,
        percentiles_ms={},
        distribution=None,
        notes=(*figures.notes, note),
    )


def read_fio(path: Path) -> dict:
    """fio may warn before its JSON begins."""
    text = path.read_text()
    try:
        words = json.loads(text[text.index("{") :])
        words["jobs"][0]["read"]["total_ios"]
    except (ValueError, KeyError, IndexError):
        raise StatsError(f"{path} is not fio's output: run it with --output-format=json+") from None
    return words


def latency_kind(ways: list[dict]) -> str:
    """From the call to the answer, where fio kept percentiles of that; else from submission on."""
    whole = all("bins" in way["lat_ns"] or "percentile" in way["lat_ns"] for way in ways)
    return "lat_ns" if whole else "clat_ns"


def fio_latencies(latencies: list[dict]) -> tuple[Distribution | None, dict[float, float]]:
    if all(one.get("bins") for one in latencies):
        merged = Distribution.merged(
            Distribution.of([int(ns) / NS_PER_MS for ns in one["bins"]], list(one["bins"].values()))
            for one in latencies
        )
        return merged, merged.percentiles_ms()
    if len(latencies) > 1:
        return None, {}
    said = {float(percent): ns for percent, ns in latencies[0].get("percentile", {}).items()}
    known = [
        percent
        for percent in PERCENTS
        if percent in said and enough_beyond(latencies[0]["N"], percent)
    ]
    return None, {percent: said[percent] / NS_PER_MS for percent in known}


# Over repeats -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    median: float
    least: float
    greatest: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> "Spread | None":
        known = [value for value in values if value is not None]
        if not known:
            return None
        return cls(float(np.median(known)), min(known), max(known), len(known))


@dataclass(frozen=True)
class Summary:
    """All repeats of one side, state, load, number of clients and of loads."""

    figures: tuple[Figures, ...]

    @property
    def cell(self) -> Cell:
        """Any of them: for what they share."""
        return self.figures[0].cell

    @property
    def key(self) -> tuple:
        return group_key(self.cell)

    def spread(self, value: Callable[[Figures], float | None]) -> Spread | None:
        return Spread.of(value(one) for one in self.figures)

    @cached_property
    def per_second(self) -> Spread:
        return self.spread(lambda one: one.per_second)

    @cached_property
    def mean_ms(self) -> Spread | None:
        return self.spread(lambda one: one.mean_ms)

    def percentile_ms(self, percent: float) -> Spread | None:
        """None if one of the repeats lacks it: of others than the rest it could be the lower."""
        if any(percent not in one.percentiles_ms for one in self.figures):
            return None
        return self.spread(lambda one: one.percentiles_ms[percent])

    @cached_property
    def failed(self) -> int:
        return sum(max(one.failed, one.cell.failed) for one in self.figures)

    def middle(self) -> Figures:
        """The repeat with the median rate (of two, the slower): the one that is drawn."""
        return sorted(self.figures, key=lambda one: one.per_second)[(len(self.figures) - 1) // 2]


def group_key(cell: Cell) -> tuple:
    return (cell.load, cell.loads, cell.clients, cell.state, cell.side)


def summaries(figures: Iterable[Figures]) -> list[Summary]:
    """In the order in which their first cells were measured."""
    groups: dict[tuple, list[Figures]] = {}
    for one in figures:
        groups.setdefault(group_key(one.cell), []).append(one)
    return [Summary(tuple(group)) for group in groups.values()]


def ratio(summary: Summary, against: Summary) -> Spread | None:
    """Of the medians; least and greatest are those of any repeat of one to any of the other."""
    one, other = summary.per_second, against.per_second
    if not other.least:
        return None
    least, greatest = one.least / other.greatest, one.greatest / other.least
    count = min(one.count, other.count)
    return Spread(one.median / other.median, least, greatest, count)


def differ(summary: Summary, against: Summary) -> bool:
    """Whether what repeats show is enough to call two rates different.

    No repeat of one reaches those of the other, and the medians are further apart than the repeats
    of either are among themselves. Chance alone does that at most once in ten times, with three.
    """
    one, other = summary.per_second, against.per_second
    if min(one.count, other.count) < REPEATS_ENOUGH:
        return False
    low, high = sorted((one, other), key=lambda each: each.median)
    if low.greatest >= high.least or not low.least:
        return False
    spread = max(each.greatest / each.least for each in (low, high))
    return high.median / low.median > spread
