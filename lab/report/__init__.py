"""The report of a study: one page that needs nothing beside it, paper, plots and tables.

    page = report.make(Path("results/postgres-host-2026-01-31-1200"))

Everything in it is made from what the run left, each time anew; nothing is measured here.
"""

import logging
import shlex
import shutil
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from lab import stats
from lab.report import cautions, plots, sheets, tables
from lab.report.source import ReportError, Source
from lab.stats import StatsError

__all__ = ["ReportError", "StatsError", "make"]

LOG_BYTES_MAX = 400_000  # of commands.log in the page; all of it lies beside


def make(home: Path) -> Path:
    """Writes HOME/report anew, whole or not at all, and returns its page."""
    source = Source.read(home)
    begun, directory = home / "report.new", home / "report"
    shutil.rmtree(begun, ignore_errors=True)
    begun.mkdir()
    drawn = plots.all_of(source, begun)
    sheets.write(source, begun)
    words = contents(source, drawn, sorted(path.name for path in begun.iterdir()))
    (begun / "index.html").write_text(render(words, paper=False))
    print_paper(render(words, paper=True), begun / "report.pdf")
    shutil.rmtree(directory, ignore_errors=True)
    begun.rename(directory)
    return directory / "index.html"


def contents(source: Source, drawn: list[plots.Plot], files: list[str]) -> dict:
    sections: dict[str, list[plots.Plot]] = {}
    for plot in drawn:
        sections.setdefault(plot.section, []).append(plot)
    return {
        "source": source,
        "study": source.study,
        "date": source.machines[0].get("date", "") if source.machines else "",
        "about": about(source),
        "cautions": cautions.all_of(source),
        "sentences": tables.told_apart(source),
        "verdict": list(tables.verdict(source)),
        "same": tables.SAME,
        "repeats_enough": stats.REPEATS_ENOUGH,
        "sections": sections,
        "everything": list(tables.everything(source)),
        "arrays": list(tables.arrays(source)),
        "processors": tables.PROCESSORS[source.study.where][-1],
        "drives": tables.drives(source),
        "notes": tables.notes(source),
        "configuration": list(tables.configuration(source)),
        "cells": tables.cells(source),
        "repeat": [
            shlex.join(machine["called"]) for machine in source.machines if machine.get("called")
        ],
        "commands": commands(source.home),
        "files": [name for name in files if name.endswith(".csv")],
    }


def about(source: Source) -> list[tuple[str, str]]:
    """What was compared, in a few words."""
    study = source.study
    array, drives = study.array, study.drives
    where = {"vm": "in virtual machines on the host's arrays", "host": "on the host itself",
             "guest": "with array and load in one guest, on drives that QEMU emulates"}  # fmt: skip
    load = study.pgbench or study.fio
    several = array.count > 1 and any(state.drives_out for state in study.states)
    said = [
        ("sides", " · ".join(source.names)),
        ("load", f"{'PostgreSQL, pgbench' if study.pgbench else 'fio'} {where[study.where]}"),
        ("arrays", f"{array.count} of {array.shape} drives, "
                   f"chunks of {array.chunk >> 10} KiB"),
        ("drives", drives.kind),
        ("states", ", ".join(study.states) + f": all {array.count} arrays at once" * several),
        ("measured", f"{load.seconds} s a cell after {load.warm_seconds} s of warm-up, "
                     f"{study.repeats} {'times' if study.repeats > 1 else 'time'}, in turns"),
    ]  # fmt: skip
    if study.pgbench:
        megabytes = study.pgbench.scale * 15
        size = f"{megabytes / 1000:.1f} GB" if megabytes >= 1000 else f"{megabytes} MB"
        said.append(("database", f"scale {study.pgbench.scale}, about {size}"))
    return said


def commands(home: Path) -> str:
    path = home / "commands.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    if len(text) <= LOG_BYTES_MAX:
        return text
    half = LOG_BYTES_MAX // 2
    return f"{text[:half]}\n… all of it is in commands.log …\n{text[-half:]}"


def render(words: dict, paper: bool) -> str:
    environment = Environment(
        loader=PackageLoader("lab.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html").render(words, paper=paper)


def print_paper(page: str, path: Path) -> None:
    # it takes a second, and would otherwise be paid by every command
    from weasyprint import HTML

    logging.getLogger("weasyprint").setLevel(logging.ERROR)
    logging.getLogger("fontTools").setLevel(logging.ERROR)
    HTML(string=page).write_pdf(path)
