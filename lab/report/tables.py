"""Tables as people read them: what goes into each field of them. Pure.

The same rows become HTML and paper. Figures for programs are in the CSV files (`sheets.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lab import stats
from lab.report import memory
from lab.report.source import Source
from lab.results import Cell
from lab.stats import Figures, Spread, Summary
from lab.study import Where

NONE = "–"
SAME = "≈"
MEMORY = "memory"  # in place of a share of drives
NO_DISKS = "what no disk takes (a tenth of the smallest side's array, and what others' have more)"


@dataclass(frozen=True)
class Table:
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    heads: int = 1  # columns that say what a row is about
    caption: str = ""
    warning: str = ""  # in red

    def begins_group(self, at: int) -> bool:
        return at > 0 and self.rows[at][0] != self.rows[at - 1][0]


# Whose CPU time is in which column, as the load sits: storage, load, and both in a sentence.
PROCESSORS = {
    Where.HOST: (
        "of it, engine and kernel threads",
        "of it, the load",
        "Busy cores are those of the engine, of all threads of the kernel, and of PostgreSQL or "
        "fio with their system calls. A side in the kernel does part of its work in the calls of "
        "the load: only the busy cores of all compare sides.",
    ),
    Where.VM: (
        "of it, engine, kernel, QEMU",
        "of it, virtual CPUs",
        "Busy cores are those of the engine, of all threads of the kernel and of QEMU, virtual "
        "CPUs included. A disk that is no vhost-user one is served by QEMU's threads and by the "
        "kernel in their calls: only the busy cores of all compare sides.",
    ),
    Where.GUEST: (
        "in the guest: engine and kernel threads",
        "the whole machine",
        "Busy cores are all that the virtual machine takes of its host: load, storage, and the "
        "emulation of its drives. What threads in the guest took is told by the guest's clock, "
        "and is no part to be taken off: on an emulated processor the two are not the same "
        "seconds.",
    ),
}


# How numbers are written --------------------------------------------------------------------


def number(value: float | None) -> str:
    """Three figures that say something; all of a large one."""
    if value is None:
        return NONE
    if abs(value) >= 100 or value == 0:
        return f"{value:,.0f}"
    return f"{value:#.3g}".rstrip(".")


def percent(share: float | None) -> str:
    return NONE if share is None else f"{share * 100:.0f} %"


def spread(value: Spread | None, times: float = 1) -> str:
    """The median, and the least and greatest of all repeats."""
    if value is None:
        return NONE
    told = number(value.median * times)
    if value.count == 1:
        return told
    return f"{told} ({number(value.least * times)}–{number(value.greatest * times)})"


def ratio(value: Spread | None, differ: bool, short: bool = False) -> str:
    if value is None:
        return NONE
    told = f"{value.median:.2f}"
    if value.count > 1 and not short:
        told += f" ({value.least:.2f}–{value.greatest:.2f})"
    return told if differ else f"{told} {SAME}"


def percent_or_same(value: Spread | None, differ: bool) -> str:
    return NONE if value is None else percent(value.median) + f" {SAME}" * (not differ)


# What they are made of ----------------------------------------------------------------------


def of_baseline(source: Source, one: Summary) -> tuple[Spread | None, bool]:
    """The ratio, none for who is compared with; and whether it is more than chance."""
    other = source.find(one.cell, side=source.baseline) if source.baseline else None
    if other is None or other is one:
        return None, False
    return stats.ratio(one, other), stats.differ(one, other)


def of_healthy(source: Source, one: Summary) -> tuple[Spread | None, bool]:
    """The ratio, and whether it is more than chance. What warms up in a turn is in it, too:
    healthy always comes first."""
    healthy = source.find(one.cell, state="healthy")
    if healthy is None or healthy is one:
        return None, False
    return stats.ratio(one, healthy), stats.differ(one, healthy)


def efficiency(source: Source, one: Summary) -> float | None:
    """Of what as many bare drives did, in the same run. None also where memory answered: that is
    no work of drives."""
    if memory.answered(source, one):
        return None
    of = (one.cell.load, one.cell.loads, one.cell.side)
    iops = source.raw_of(*of).get("iops")
    if not iops:
        return None
    share = source.drives_behind(one.cell.loads, one.cell.side) / source.raw_drives(*of)
    return one.per_second.median / (iops * share)


def rate(source: Source, one: Summary) -> tuple[Spread, float]:
    """The rate in the unit in which its load is told."""
    if source.is_sequential(one.cell.load):
        return one.spread(lambda each: each.bytes_per_second), 1e-9
    return one.per_second, 1


def rate_unit(source: Source, load: str) -> str:
    return "GB/s" if source.is_sequential(load) else source.rate


# The verdict --------------------------------------------------------------------------------


def verdict(source: Source) -> Iterator[Table]:
    """One table a load, in the shape of the published studies."""
    compared = source.baseline is not None
    tail = stats.PERCENTS[-1] if source.is_fio else 99.0
    for load, loads in source.loads:
        summaries = source.telling(load, loads)
        columns = ["state", "side", rate_unit(source, load)]
        columns += [f"× {source.baseline}"] * compared + ["of healthy"]
        columns += ["mean ms", f"p{tail:g} ms"]
        columns += ["of bare drives"] * bool(source.raw)
        rebuilds = any(one.spread(source.rebuilt) for one in summaries)
        columns += ["rebuilt, % a minute"] * rebuilds
        rows = []
        for one in summaries:
            value, times = rate(source, one)
            row = [one.cell.state, one.cell.side, number(value.median * times)]
            if compared:
                row.append(ratio(*of_baseline(source, one), short=True))
            row.append(percent_or_same(*of_healthy(source, one)))
            row += [middle(one.mean_ms), middle(one.percentile_ms(tail))]
            if source.raw:
                by_memory = memory.answered(source, one)
                row.append(MEMORY if by_memory else percent(efficiency(source, one)))
            if rebuilds:
                row.append(middle(one.spread(source.rebuilt)))
            rows.append(tuple(row))
        clients = source.telling_clients(load, loads)
        title = source.title_of(load, loads)
        title += f": {clients} clients" if clients else ""
        said = [bare_drives(source, load, loads), rebuilt_of(source) * rebuilds]
        caption, warning = " ".join(filter(None, said)), memory.warning(source, load, summaries)
        yield Table(title, tuple(columns), tuple(rows), 2, caption, warning)


def rebuilt_of(source: Source) -> str:
    """What the percent is of: who skips what was never written may jump."""
    said = "“Rebuilt”: of a drive's whole room in the array, as each side tells how far it is. "
    shares = source.filled_shares
    if not shares or None in shares.values():
        return said + (
            "How much of the disks was written before is not known of all cells, as this run, or a "
            "part of it, is older. Where they were not written full, a side that knows what was "
            "never written (ashlar, btrfs, zfs) jumped over most of it and one that does not "
            "(mdraid) went over all of it: these figures are not to be compared."
        )
    if all(share == 1 for share in shares.values()):
        return said + (
            "All that the disks hold was written before, and has to be rebuilt on every side; "
            f"{NO_DISKS} was not, and a side that knows it jumps over that part."
        )
    each = ", ".join(
        f"{name} all" if share == 1 else f"{name} at least {int(share * 100)} %"
        for name, share in shares.items()
    )
    return said + (
        f"This much of the disks was written before the load's data: {each}. What was never "
        "written, a side that knows it jumps over: what a database leaves of the room that is kept "
        f"for it, and {NO_DISKS}."
    )


def bare_drives(source: Source, load: str, loads: int) -> str:
    """What “of bare drives” compares with what: it is no more than that."""
    pattern = source.pattern(load)
    sides: dict[int, list[str]] = {}  # by the number of drives that they used
    for name in source.names:
        sides.setdefault(source.drives_behind(loads, name), []).append(name)
    raw = {used: source.raw_of(load, loads, names[0]) for used, names in sides.items()}
    if not pattern or not all("drives" in its for its in raw.values()):
        return ""
    if source.raw_is_stated:
        return "“Of bare drives”: of what the study states of models, which was not measured."
    asked = pattern.depth * pattern.jobs
    beside = "; ".join(
        f"{', '.join(names)}: " * (len(sides) > 1) + beside_drives(raw[used], used, asked)
        for used, names in sides.items()
    )
    said = f"“Of bare drives”: {asked * loads} I/Os under way in all, beside {beside}"
    if source.study.drives.kind == "file":
        said += "; the drives' files were read and written directly, and sides of the kernel use "
        said += "them through loop devices"
    return f"{said}."


def beside_drives(raw: dict, used: int, asked: int) -> str:
    each, drives = raw.get("depth_of_each", asked), raw["drives"]
    said = f"{each * drives:g} on {drives} drives by themselves ({each:g} on each)"
    if drives == 1:
        said = f"{each:g} on one drive by itself"
    if used != drives:  # of an older run
        said += f", whose rate is taken times {used}/{drives}: this load has {used} drive"
        said += "s" * (used > 1)
    return said


def middle(value: Spread | None) -> str:
    return NONE if value is None else number(value.median)


def told_apart(source: Source) -> list[str]:
    """The comparison as sentences, and where none can be made."""
    compared = [
        (one, *of_baseline(source, one))
        for load, loads in source.loads
        for one in source.telling(load, loads)
    ]
    compared = [(one, value, differ) for one, value, differ in compared if value is not None]
    most = max((value.count for _, value, _ in compared), default=0)
    if 0 < most < stats.REPEATS_ENOUGH:
        return [
            f"Everything was measured {'once' if most == 1 else 'twice'}: chance may be all of any "
            f"difference between sides, so none is called one. "
            f"{stats.REPEATS_ENOUGH} repeats are the least that can tell."
        ]
    said = [
        f"{named(source, one)}: {one.cell.side} {value.median:.2f} times {source.baseline} "
        f"({value.least:.2f} to {value.greatest:.2f})."
        for one, value, differ in compared
        if differ
    ]
    same = [
        f"{named(source, one)}, {one.cell.side} ({value.least:.2f} to {value.greatest:.2f} times)"
        for one, value, differ in compared
        if not differ
    ]
    if same:
        said.append(f"No difference from {source.baseline} can be told: {'; '.join(same)}.")
    return said


def named(source: Source, one: Summary) -> str:
    clients = f", {one.cell.clients} clients" if one.cell.clients else ""
    return f"{source.title_of(one.cell.load, one.cell.loads)}, {one.cell.state}{clients}"


# Everything ---------------------------------------------------------------------------------


def everything(source: Source) -> Iterator[Table]:
    for load, loads in source.loads:
        states = list(dict.fromkeys(one.cell.state for one in source.summaries))
        chosen = sorted(
            source.of_load(load, loads),
            key=lambda one: (states.index(one.cell.state), one.cell.clients),
        )
        columns = ["state", *["clients"] * (not source.is_fio), "side"]
        compared = source.baseline is not None
        columns += [f"{rate_unit(source, load)} (least–most)"]
        columns += [f"× {source.baseline}"] * compared + ["mean ms"]
        columns += [f"p{each:g} ms" for each in stats.PERCENTS] + ["failed"]
        rows = []
        for one in chosen:
            row = [one.cell.state, *[str(one.cell.clients)] * (not source.is_fio), one.cell.side]
            row += [spread(*rate(source, one))]
            row += [ratio(*of_baseline(source, one))] * compared
            row += [middle(one.mean_ms)]
            row += [middle(one.percentile_ms(each)) for each in stats.PERCENTS]
            rows.append((*row, f"{one.failed:,}"))
        heads = 2 if source.is_fio else 3
        yield Table(source.title_of(load, loads), tuple(columns), tuple(rows), heads)


def arrays(source: Source) -> Iterator[Table]:
    """What the loads asked of the array, and what processors did for it."""
    per = "I/Os a load's I/O" if source.is_fio else "I/Os a transaction"
    storage, load_s, _ = PROCESSORS[source.study.where]
    columns = ("state", "side", "reads/s", "writes/s", "read : write", per, "busy cores",
               f"{source.rate} a busy core", storage, "of the daemon", load_s)  # fmt: skip
    for load, loads in source.loads:
        rows = tuple(
            (one.cell.state, one.cell.side, *array_row(source, one))
            for one in source.telling(load, loads)
        )
        if any(field != NONE for row in rows for field in row[2:]):
            clients = source.telling_clients(load, loads)
            title = source.title_of(load, loads) + (f": {clients} clients" if clients else "")
            yield Table(title, columns, rows, heads=2)


def array_row(source: Source, one: Summary) -> tuple[str, ...]:
    def of(value: Callable[[Cell], float | None]) -> Spread | None:
        return one.spread(lambda figures: value(figures.cell))

    def a_second(name: str) -> Spread | None:
        return of(lambda cell: over(getattr(cell, name), cell.seconds))

    reads, writes = a_second("array_reads"), a_second("array_writes")
    share = NONE
    if reads and writes and reads.median + writes.median:
        share = f"{reads.median / (reads.median + writes.median) * 100:.0f} : "
        share += f"{writes.median / (reads.median + writes.median) * 100:.0f}"
    asked = of(
        lambda cell: (
            None
            if cell.array_reads is None or cell.array_writes is None
            else over(cell.array_reads + cell.array_writes, cell.operations)
        )
    )
    busy = of(lambda cell: busy_cores(source, cell))
    per_core = one.spread(lambda each: over(each.per_second, busy_cores(source, each.cell)))
    return (
        middle(reads), middle(writes), share, middle(asked), middle(busy), middle(per_core),
        middle(of(lambda cell: cell.storage_cores)), middle(of(lambda cell: cell.daemon_cores)),
        middle(of(lambda cell: cell.guest_cores)),
    )  # fmt: skip


def busy_cores(source: Source, cell: Cell) -> float | None:
    """Of storage and load together: what no side can move to where it is not counted."""
    if source.study.where == Where.GUEST:
        return cell.guest_cores  # all of the machine, with what is in it
    known = cell.storage_cores is not None and cell.guest_cores is not None
    return cell.storage_cores + cell.guest_cores if known else None


def over(value: float | None, by: float | None) -> float | None:
    return value / by if value is not None and by else None


def drives(source: Source) -> Table | None:
    if not source.raw:
        return None
    numbers = [name for name in next(iter(source.raw.values())) if name != "command"]
    rows = tuple(
        (name, *(told(its.get(column)) for column in numbers)) for name, its in source.raw.items()
    )
    title = "The bare drives, measured when the run began"
    if source.raw_is_stated:
        title = "The bare drives, not measured: models, at the pace that the study states"
    return Table(title, ("pattern", *numbers), rows)


def told(value: object) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return number(value) if isinstance(value, float) else str(value)


# What happened, and how it was set --------------------------------------------------------------


def notes(source: Source) -> Table | None:
    rows = []
    for one in source.figures:
        said = [*one.notes, *one.cell.notes]
        said += [f"at {second:g} s: {what}" for second, what in one.cell.events]
        if one.failed or one.cell.failed:
            said.append(f"{max(one.failed, one.cell.failed):,} operations failed")
        if said:
            rows.append((one.cell.directory, "; ".join(said)))
    rows += [
        (one["cell"], f"{'FAILED' if one['tried'] else 'NOT TRIED, after'}: {one['error']}")
        for one in source.failures
    ]
    return Table("Cell by cell", ("cell", "what happened"), tuple(rows)) if rows else None


def cells(source: Source) -> Table:
    """Every cell, in the order in which they were measured."""
    columns = ("cell", source.rate, "mean ms", "p99 ms", "operations", "failed", "storage cores")
    rows = tuple(cell_row(one) for one in source.figures)
    return Table("Every cell, in the order in which they were measured", columns, rows)


def cell_row(one: Figures) -> tuple[str, ...]:
    return (
        one.cell.directory, number(one.per_second), number(one.mean_ms),
        number(one.percentiles_ms.get(99.0)), f"{one.operations:,}",
        f"{max(one.failed, one.cell.failed):,}", number(one.cell.storage_cores),
    )  # fmt: skip


def configuration(source: Source) -> Iterator[Table]:
    """The whole of it, word for word."""
    for name, its in source.sides.items():
        if "skipped" not in its:
            yield settings(f"Side {name}", its)
    commands = {name: its["command"] for name, its in source.raw.items() if "command" in its}
    if commands:
        yield settings("The bare drives", commands)
    for at, machine in enumerate(source.machines):
        yield settings("The machine" + (f", when the run went on ({at})" if at else ""), machine)
    yield settings("The study", source.study.model_dump(mode="json"))


def settings(title: str, words: dict) -> Table:
    return Table(title, ("setting", "value"), tuple(flat(words)))


def flat(words: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Nested settings, a line each."""
    if isinstance(words, dict) and words:
        for key, value in words.items():
            yield from flat(value, f"{path}.{key}" if path else str(key))
    elif isinstance(words, list) and any(isinstance(each, (dict, list)) for each in words):
        for at, value in enumerate(words):
            yield from flat(value, f"{path}[{at}]")
    elif isinstance(words, list):
        yield path, " ".join(map(str, words)) or NONE
    else:
        yield path, NONE if words is None or words == "" or words == {} else str(words)
