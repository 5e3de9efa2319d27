"""The figures as CSV files, for programs and for whoever wants to check them."""

import csv
from collections import Counter
from collections.abc import Iterable
from operator import attrgetter
from pathlib import Path

from lab import stats
from lab.report import memory, tables
from lab.report.source import Source
from lab.results import Cell
from lab.stats import Figures, Spread, Summary

TELLING = (1, 5, 10, 25, 50, 75, 90, 95, 99, 99.5, 99.9, 99.95, 99.99, 100)
PLACE = ("load", "loads", "clients", "state", "side")
MEASURED = (
    "began", "seconds", "array_reads", "array_writes", "array_read_bytes", "array_write_bytes",
    "array_pending_bytes", "array_drive_reads", "array_drive_read_bytes", "blurred_seconds",
    "storage_cores", "daemon_cores", "guest_cores", "state_before", "state_after", "filled_share",
)  # fmt: skip


BESIDE = ("array_reads", "array_writes", "storage_cores", "daemon_cores", "guest_cores")


def write(source: Source, directory: Path) -> list[Path]:
    return [
        sheet(directory / "cells.csv", cells(source)),
        sheet(directory / "summary.csv", summaries(source)),
        sheet(directory / "latencies.csv", latencies(source)),
        sheet(directory / "over-time.csv", over_time(source)),
    ]


def sheet(path: Path, rows: Iterable[dict]) -> Path:
    """Columns are all that any row has: cells of two versions may have unlike ones."""
    rows = list(rows)
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    return path


def place(cell: Cell) -> dict:
    return {name: getattr(cell, name) for name in PLACE}


def cells(source: Source) -> Iterable[dict]:
    for one in source.figures:
        yield of_cell(source, one)
    for one in source.failures:
        cell = one["its"]
        error = one["error"] if one["tried"] else f"not tried, after: {one['error']}"
        yield (
            {"number": cell.number, "repeat": cell.repeat, **place(cell)}
            | {"directory": cell.directory, "error": error}
        )


def of_cell(source: Source, one: Figures) -> dict:
    return (
        {"number": one.cell.number, "repeat": one.cell.repeat, **place(one.cell)}
        | {"per_second": one.per_second, "bytes_per_second": one.bytes_per_second}
        | {"operations": one.operations, "failed": max(one.failed, one.cell.failed)}
        | {"mean_ms": one.mean_ms}
        | {f"p{each:g}_ms": one.percentiles_ms.get(each) for each in stats.PERCENTS}
        | {name: getattr(one.cell, name) for name in MEASURED}
        | {"share_as_wanted": source.share_as_wanted(one)}
        | {"rebuilt_percent_a_minute": source.rebuilt(one)}
        | {"events": "; ".join(f"{second} s: {what}" for second, what in one.cell.events)}
        | {"notes": "; ".join((*one.notes, *one.cell.notes)), "directory": one.cell.directory}
    )


def summaries(source: Source) -> Iterable[dict]:
    """Also of what came to its end in no repeat."""
    failures = Counter(tuple(place(one["its"]).values()) for one in source.failures)
    for one in source.summaries:
        failed = failures.pop(tuple(place(one.cell).values()), 0)
        yield of_summary(source, one) | {"cells_without_figures": failed}
    for its, failed in failures.items():
        yield dict(zip(PLACE, its, strict=True)) | {"repeats": 0, "cells_without_figures": failed}


def of_summary(source: Source, one: Summary) -> dict:
    return (
        place(one.cell)
        | {"repeats": len(one.figures), "failed": one.failed}
        | spread("per_second", one.per_second)
        | spread("bytes_per_second", one.spread(lambda each: each.bytes_per_second))
        | spread("mean_ms", one.mean_ms)
        | {
            name: value
            for each in stats.PERCENTS
            for name, value in spread(f"p{each:g}_ms", one.percentile_ms(each)).items()
        }
        | spread("rebuilt_percent_a_minute", one.spread(source.rebuilt))
        | {"baseline": source.baseline}
        | compared("of_baseline", *tables.of_baseline(source, one))
        | compared("of_healthy", *tables.of_healthy(source, one))
        | {"of_the_bare_drives": tables.efficiency(source, one)}
        | {"answered_by_memory": memory.share(source, one)}
        | {
            name: value
            for each in BESIDE
            for name, value in spread(each, one.spread(attrgetter(f"cell.{each}"))).items()
        }
    )


def compared(name: str, value: Spread | None, differ: bool) -> dict:
    return spread(name, value) | {f"{name}_is_no_chance": differ if value else None}


def spread(name: str, value: Spread | None) -> dict:
    return {
        f"{name}_{part}": getattr(value, part) if value else None
        for part in ("median", "least", "greatest")
    }


def latencies(source: Source) -> Iterable[dict]:
    for one in source.summaries:
        known = [each.distribution for each in one.figures if each.distribution is not None]
        if known:
            merged = stats.Distribution.merged(known)
            for percent in TELLING:
                if percent < 100 and not stats.enough_beyond(merged.total, percent):
                    continue
                value = merged.percentile_ms(percent)
                yield place(one.cell) | {"percent": percent, "latency_ms": value}


def over_time(source: Source) -> Iterable[dict]:
    for one in source.figures:
        for row in source.results.seconds_of(one.cell):
            yield {"number": one.cell.number, "repeat": one.cell.repeat, **place(one.cell), **row}
