"""SYNTHETIC results, for tests of what reads results. Nothing here was measured by anybody.

    synthetic.pgbench(home); synthetic.fio(home)

They keep the contract of `lab/results.py` to the letter, titles say SYNTHETIC, and no number of
them may stand in any document. `python3 -m lab.tests.synthetic DIRECTORY` writes both.
"""

import csv
import gzip
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from lab import schedule
from lab import study as studies
from lab.results import SECONDS, Cell, Results

BEGAN = 1_700_000_000
WARM_SECONDS = 2
STATES = ("healthy", "degraded", "rebuilding")

PGBENCH_STUDY = """\
title = "SYNTHETIC: PostgreSQL"
about = "Made up by a test: no figure here was measured."
where = "host"
states = ["healthy", "degraded", "rebuilding"]
repeats = 3

[drives]
kind = "file"
size = "1G"

[[side]]
kind = "ashlar"

[[side]]
kind = "mdraid"

[pgbench]
scale = 10
scripts = ["select-only", "simple-update"]
clients = [4, 16, 64]
seconds = 20
warm_seconds = 2
"""

FIO_STUDY = """\
title = "SYNTHETIC: fio"
about = "Made up by a test: no figure here was measured."
where = "vm"
states = ["healthy", "degraded"]
repeats = 2
raw = true
unequal = true

[drives]
kind = "model"
size = "4G"
iops = 10000
mbps = 200

[[side]]
kind = "ashlar"

[[side]]
kind = "btrfs"
name = "raid0"

[vm]
count = 2

[fio]
vms = [1, 2]
seconds = 10

[[fio.patterns]]
name = "randread"
rw = "randread"

[[fio.patterns]]
name = "randwrite"
rw = "randwrite"

[[fio.patterns]]
name = "seqread"
rw = "read"
block = "1M"
"""

MACHINE = {
    "called": ["ashlar-lab", "run", "synthetic"],
    "date": "2023-11-14 22:13:20 +0000",
    "machine": {"cpu": "Synthetic 9000", "cpus": 2, "memory_bytes": 24 << 30, "kvm": False},
    "kernel": {"release": "6.0.0-synthetic"},
    "distribution": "Synthetic GNU/Linux",
    "drives": {"kind": "file", "bytes": 1 << 30},
    "versions": {"ashlar": "0.0", "postgresql": "15.0", "fio": "fio-3.33"},
    "where": {"accelerator": "tcg"},
    "skipped": {"zfs": "no `zpool` here: apt-get install zfsutils-linux"},
}


def side(kind: str, losses: int, write_hole: str, **settings: str) -> dict:
    protection = {"losses": losses, "write_hole": write_hole}
    load = {"version": "synthetic 15.0", "max_connections": "100"}
    return {"kind": kind, "protection": protection, "settings": settings, "load": load}


def write_log(path: Path, transactions: Iterable[tuple[int, float]], clients: int = 1) -> None:
    """(ended, in µs since the epoch; latency in µs, or negative for one that failed)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with gzip.open(path, "wt", compresslevel=1) as file:
        for number, (ended_us, latency_us) in enumerate(transactions):
            told = "failed" if latency_us < 0 else f"{latency_us:.0f}"
            second, us = divmod(int(ended_us), 1_000_000)
            file.write(f"{number % clients} {number // clients} {told} 0 {second} {us}\n")


def write_seconds(path: Path, rows: Iterable[dict]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, SECONDS, restval="")
        writer.writeheader()
        writer.writerows(rows)


def fio_way(iops: float, seconds: float, block: int, latencies_ns: dict[int, int]) -> dict:
    """As fio writes one direction of a job with --output-format=json+."""
    count = sum(latencies_ns.values())
    mean = sum(ns * n for ns, n in latencies_ns.items()) / count if count else 0
    bins = {str(ns): n for ns, n in sorted(latencies_ns.items())}
    return {
        "io_bytes": count * block,
        "bw_bytes": int(iops * block),
        "iops": iops,
        "runtime": int(seconds * 1000),
        "total_ios": count,
        "slat_ns": {"min": 0, "max": 0, "mean": 0, "stddev": 0, "N": 0},
        "clat_ns": {"mean": mean, "N": count, "bins": bins},
        "lat_ns": {"mean": mean, "N": count},
    }


def write_fio(path: Path, read: dict, write: dict, errors: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    job = {"jobname": path.stem, "error": 0, "total_err": errors, "read": read, "write": write}
    words = {"fio version": "fio-3.33", "jobs": [job]}
    path.write_text("fio: a warning before the JSON\n" + json.dumps(words, indent=1))


def begin(home: Path, study: str, sides: dict) -> Results:
    home.mkdir(parents=True, exist_ok=True)
    (home / "study.toml").write_text(study)
    read = studies.load(home / "study.toml")
    (home / "study.json").write_text(read.model_dump_json(indent=2) + "\n")
    (home / "machine.json").write_text(json.dumps(MACHINE, indent=1))
    (home / "sides.json").write_text(json.dumps(sides, indent=1))
    (home / "commands.log").write_text("22:13:20 ok 0.1 s: mkfs.xfs /dev/synthetic\n")
    return Results.open(home)


def pgbench(home: Path, study: str = PGBENCH_STUDY, rates: dict | None = None) -> Results:
    """`rates`: (side, state) → transactions a second, evenly spaced, of 1 ms to 100 ms each."""
    results = begin(
        home,
        study,
        {
            "ashlar": side("ashlar", 1, "closed", policy="journal", cores="0"),
            "mdraid": side(
                "mdraid", 1, "resync", create="mdadm --create --level=5 --bitmap=internal"
            ),
        },
    )
    random = np.random.default_rng(1)
    for cell in cells(results):
        if rates is not None:
            even_cell(results, cell, rates[cell.side, cell.state])
            continue
        slow = {"healthy": 1, "degraded": 1.25, "rebuilding": 1.6}[cell.state]
        pace = {"ashlar": 1.0, "mdraid": 1.3}[cell.side]
        base_us = {"select-only": 300, "simple-update": 2500}[cell.load]
        pgbench_cell(results, cell, base_us * pace * slow, random)
    return results


def cells(results: Results) -> Iterator[Cell]:
    study = studies.load(results.home / "study.toml")
    for block in schedule.blocks(study):
        yield from block.cells


def even_cell(results: Results, cell: Cell, rate: int) -> None:
    """`rate` transactions in each of 100 s, at its beginning; their latencies are 1, 2, … ms, and
    from 1 again after 100."""
    seconds = 100
    ended = np.repeat(np.arange(seconds), rate)
    latency = 1000.0 * (np.arange(len(ended)) % 100 + 1)
    path = results.place_of(cell) / "host.log.gz"
    write_log(path, zip((BEGAN + ended) * 1_000_000, latency, strict=True), cell.clients)
    finish(results, cell, seconds, ended, (), failed=0)


def pgbench_cell(results: Results, cell: Cell, base_us: float, random) -> None:
    """A closed loop, thinned out: the logs of a real run are a hundred times as long."""
    seconds, rate = 20, 1e6 / base_us * min(cell.clients, 16) ** 0.7 / 20
    count = int(rate * (seconds + WARM_SECONDS))
    spread = np.sort(random.uniform(-WARM_SECONDS, seconds, count))
    latency = base_us * random.lognormal(0, 0.35, count) * max(1, cell.clients / 16)
    latency[random.random(count) < 0.004] *= 12
    gone = cell.state == "degraded" and cell.repeat == 0
    events = ((7.0, "drive d1 pulled"),) if gone else ()
    if gone:
        stalled = (spread > 7) & (spread < 8.5)
        spread, latency = spread[~stalled], latency[~stalled]
    breaks = cell.load == "select-only" and (cell.side, cell.repeat) == ("mdraid", 0)
    breaks = breaks and cell.clients == 64 and cell.state == "healthy"
    if breaks:
        latency[-3:] = -1
    write_log(
        results.place_of(cell) / "host.log.gz",
        zip(np.round((BEGAN + spread) * 1e6), latency, strict=True),
        cell.clients,
    )
    (results.place_of(cell) / "host.txt").write_text("pgbench (15.0, synthetic)\n")
    inside = (spread >= 0) & (spread < seconds) & (latency >= 0)
    finish(results, cell, seconds, spread[inside], events, failed=3 * breaks)


def finish(
    results: Results, cell: Cell, seconds: int, ended, events, failed: int, block: int = 4096
) -> None:
    """Two reads of the array for each operation, and three writes of one that writes."""
    each = np.bincount(np.floor(ended).astype(int), minlength=seconds)
    writes = 0 if "select" in cell.load or "read" in cell.load else 3
    cores = {"storage_cores": 0.6 + 0.2 * (cell.side != "ashlar"), "guest_cores": 1.2}
    rows = (
        {"second": second, "operations": int(done), "latency_ms_mean": 1.0, "state": cell.state}
        | {"array_reads": int(2 * done), "array_writes": int(writes * done)}
        | {"array_read_bytes": int(block * done), "array_write_bytes": int(writes * block * done)}
        | {name: round(value, 2) for name, value in cores.items()}
        for second, done in enumerate(each)
    )
    write_seconds(results.place_of(cell) / "seconds.csv", rows)
    total = int(each.sum())
    results.add(
        replace(
            cell,
            began=BEGAN,
            seconds=seconds,
            operations=total,
            failed=failed,
            array_reads=2 * total,
            array_writes=writes * total,
            array_read_bytes=block * total,
            array_write_bytes=block * writes * total,
            **cores,
            state_before=cell.state,
            state_after=cell.state,
            events=events,
        )
    )


def fio(home: Path) -> Results:
    results = begin(
        home,
        FIO_STUDY,
        {
            "ashlar": side("ashlar", 1, "closed", policy="journal", export="vhost-user-blk"),
            "raid0": side("btrfs", 0, "none to close", data="raid0"),
        },
    )
    raw = {
        "randread": {"drives": 5, "iops": 50_000, "bytes_per_sec": 204_800_000},
        "randwrite": {"drives": 5, "iops": 50_000, "bytes_per_sec": 204_800_000},
        "seqread": {"drives": 5, "iops": 954, "bytes_per_sec": 1_000_000_000},
    }
    for name, its in raw.items():
        its["command"] = f"fio --name=d0 --rw={name}"
    (results.home / "raw.json").write_text(json.dumps(raw))
    random = np.random.default_rng(2)
    for cell in cells(results):
        fio_cell(results, cell, raw[cell.load]["iops"], random)
    return results


def fio_cell(results: Results, cell: Cell, iops: float, random) -> None:
    seconds, block = 10, (1 << 20) if cell.load == "seqread" else 4096
    share = 0.97 if cell.side == "raid0" else 0.25 if cell.load == "randwrite" else 0.95
    share *= (0.55 if cell.state == "degraded" else 1) * random.uniform(0.97, 1.0)
    count = int(iops * share * seconds / cell.loads)
    nothing = fio_way(0, seconds, block, {})
    for vm in range(cell.loads):
        values = random.lognormal(0, 0.3, min(count, 20_000)) * 32 * cell.loads / (iops * share)
        edges, counts = np.unique((values * 1e9 // 4096 * 4096).astype(int), return_counts=True)
        scale = count / counts.sum()
        bins = {int(ns): int(round(n * scale)) for ns, n in zip(edges, counts, strict=True)}
        way = fio_way(count / seconds, seconds, block, bins)
        reads = cell.load != "randwrite"
        pair = (way, nothing) if reads else (nothing, way)
        write_fio(results.place_of(cell) / f"vm{vm}.json", *pair)
    ended = np.sort(random.uniform(0, seconds, count * cell.loads))
    finish(results, cell, seconds, ended, (), 0, block)


if __name__ == "__main__":
    pgbench(Path(sys.argv[1]) / "pgbench")
    fio(Path(sys.argv[1]) / "fio")
