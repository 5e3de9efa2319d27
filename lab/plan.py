"""`ashlar-lab plan`: what a server would do in a study, from figures of its drives.

The figures are given, taken from a run that measured the bare drives (`--from-raw`), or measured
now (`--measure`). `--check` compares predictions with runs on drives of a set pace.
"""

import argparse
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from demo import child
from lab import devices, forecast, paths
from lab import study as studies
from lab.forecast import Forecast, Place, Server, Transaction
from lab.geometry import BLOCK_BYTES, Drive
from lab.results import Results
from lab.sides.ashlar import MEMBERS_MAX
from lab.study import Study, StudyError

MEASURE_SECONDS, MEASURE_SECONDS_MAX = 10, 120
MEASURE_BYTES_MAX = 64 << 30  # of a drive that is looked at
FILL_SECONDS = 60  # in which as much of that is written as may be: no more of it is measured
FIGURES = ("drive_iops_read", "drive_iops_write", "drive_gbps_read", "drive_gbps_write")
LEVELS_USUAL = [(4, 1), (4, 2)]
EXAMPLES = """examples:
  ashlar-lab plan postgres-vm --drive-iops-read 1000000 --drive-iops-write 200000 \\
      --drive-gbps-read 7 --drive-gbps-write 4 --cores 2 --core-iops-read 1500000 \\
      --core-iops-write 400000
  ashlar-lab plan fio-vm --from-raw results/fio-vm-2026-01-31-1200/raw.json
  ashlar-lab plan fio-vm --measure /dev/nvme1n1 --overwrite
  ashlar-lab plan --check

One core of the engine: `ashlar bench engine --rw randread` and `--rw randwrite` measure it. A limit
that is not given is left out. 1 GB is 1,000,000,000 bytes.
"""


def main(arguments: list[str]) -> int:
    parser = command_line()
    words = parser.parse_args(arguments)
    if words.check:
        from lab import proof
        from lab.sides.ashlar import host_program

        return proof.main(host_program(), words.levels or LEVELS_USUAL, words.only or "")
    if words.levels or words.only:
        parser.error("--levels and --only say what to --check")
    if not words.study:
        parser.error("say which study: `ashlar-lab list` shows them")
    study = read_study(words)
    given, taken = figures(words, study)
    transactions = {}
    if words.from_results:
        cells = Results.open(words.from_results).cells
        if not cells:
            raise StudyError(f"--from-results: {words.from_results} has no finished cell")
        transactions = forecast.measured_transactions(cells)
    found = list(forecast.predict(study, server_of(words, given, study), transactions))
    taken += taken_of_results(words.from_results, study, transactions, found)
    unknown = not_known(words, study)
    if words.json:
        said = {"study": study.title, "drive": given, "taken": taken, "not_known": unknown}
        print(json.dumps(said | {"cells": [one.as_json() for one in found]}, indent=1))
    else:
        show(study, given, taken, unknown, found)
    return 0


def command_line() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "ashlar-lab plan", description=__doc__.split("\n\n")[0], epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("study", nargs="?", help="a name of `ashlar-lab list`, or a TOML file")
    parser.add_argument("--quick", action="store_true", help="as `run --quick` would run it")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    drive = parser.add_argument_group("one drive, by its data sheet or by measurement")
    for name, unit in zip(FIGURES, ("N", "N", "X", "X"), strict=True):
        drive.add_argument(f"--{name.replace('_', '-')}", type=positive, metavar=unit)
    drive.add_argument("--drive-latency-us", type=positive, metavar="N")
    drive.add_argument("--from-raw", type=Path, metavar="FILE", help="raw.json of a run")
    drive.add_argument("--measure", metavar="DEVICE", help="with fio; reads, or --overwrite")
    drive.add_argument("--overwrite", action="store_true", help="--measure may: all of it is lost")
    server = parser.add_argument_group("the server")
    server.add_argument("--cores", type=whole, metavar="N", help="of the engine")
    server.add_argument("--core-iops-read", type=positive, metavar="N", help="4 KiB, of one core")
    server.add_argument("--core-iops-write", type=positive, metavar="N")
    server.add_argument("--core-gbps", type=positive, metavar="X")
    server.add_argument("--vms", type=whole, metavar="M", help="in place of the study's number")
    server.add_argument("--vm-iops", type=positive, metavar="N", help="that a guest's disk can do")
    server.add_argument("--vm-gbps", type=positive, metavar="X")
    server.add_argument("--vm-tps", type=positive, metavar="N",
                        help="transactions that a guest's processors do")  # fmt: skip
    server.add_argument("--network-gbps", type=positive, metavar="X")
    server.add_argument("--from-results", type=Path, metavar="DIR",
                        help="I/Os of a transaction as a run measured them")  # fmt: skip
    parser.add_argument("--json", action="store_true")
    check = parser.add_argument_group("the plan itself")
    check.add_argument("--check", action="store_true", help="predicted against measured; 20 min")
    check.add_argument("--levels", type=levels, help="to check (4+1,4+2)")
    check.add_argument("--only", help="part of the names of what to check")
    return parser


def positive(text: str) -> float:
    value = float(text)
    if not (value > 0 and math.isfinite(value)):
        raise argparse.ArgumentTypeError(f"{text} is no number above 0")
    return value


def whole(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"{text} is no whole number above 0")
    return int(text)


def levels(text: str) -> list[tuple[int, int]]:
    one = rf"[1-9]\d?\+[1-{studies.PARITY_MAX}]"
    if not re.fullmatch(f"{one}(,{one})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not like 4+1,4+2: each loses a drive")
    found = [tuple(map(int, level.split("+"))) for level in text.split(",")]
    if large := [level for level in found if sum(level) > MEMBERS_MAX]:
        told = ", ".join(f"{data}+{parity}" for data, parity in large)
        raise argparse.ArgumentTypeError(f"{told}: an array has {MEMBERS_MAX} drives at most")
    return found


def read_study(words) -> Study:
    return studies.load(paths.study_file(words.study), words.quick, words.changes)


def server_of(words, given: dict[str, float], study: Study) -> Server:
    giga = lambda value: value and value * 1e9  # noqa: E731
    return Server(
        drive=Drive(
            given["drive_iops_read"],
            given["drive_iops_write"],
            given["drive_gbps_read"] * 1e9,
            given["drive_gbps_write"] * 1e9,
            study.drives.kind == "model",
        ),
        cores=words.cores,
        core_reads_per_second=words.core_iops_read,
        core_writes_per_second=words.core_iops_write,
        core_bytes_per_second=giga(words.core_gbps),
        drive_latency_seconds=words.drive_latency_us and words.drive_latency_us / 1e6,
        vms=words.vms,
        vm_per_second=words.vm_iops,
        vm_bytes_per_second=giga(words.vm_gbps),
        vm_transactions_per_second=words.vm_tps,
        network_bytes_per_second=giga(words.network_gbps),
    )


def not_known(words, study: Study) -> list[str]:
    """Limits that were left out for want of a figure."""
    found = []
    if not (words.cores and words.core_iops_read and words.core_iops_write):
        found.append("cores of the engine (--cores, --core-iops-read, --core-iops-write)")
    if study.pgbench and not words.vm_tps:
        found.append("processors of the guests (--vm-tps)")
    if study.fio and study.where != studies.Where.HOST and not (words.vm_iops or words.vm_gbps):
        found.append("the guests' disks (--vm-iops, --vm-gbps)")
    if not words.drive_latency_us:
        what = "requests under way" if study.fio else "clients that wait"
        found.append(f"{what} (--drive-latency-us)")
    return found


# Figures of a drive -----------------------------------------------------------------------------


def figures(words, study: Study) -> tuple[dict[str, float], list[str]]:
    """Of a drive, and whence each is: what was given wins over what was measured."""
    layers: list[tuple[str, dict[str, float]]] = []
    if study.drives.kind == "model":
        pace = dict.fromkeys(FIGURES[:2], study.drives.iops)
        pace |= dict.fromkeys(FIGURES[2:], study.drives.mbps / 1000)
        layers.append(("the study's models", pace))
    if words.from_raw:
        layers.append((f"--from-raw {words.from_raw}", from_raw(words.from_raw)))
    if words.measure:
        layers.append((f"--measure {words.measure}", measured(words.measure, words.overwrite)))
    given = {name: value for name in FIGURES if (value := getattr(words, name))}
    layers.append(("the command", given))
    found = {name: value for _, layer in layers for name, value in layer.items()}
    missing = [name for name in FIGURES if name not in found]
    if missing:
        options = ", ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise StudyError(f"of the drives is not known: {options}; or give --from-raw or --measure")
    origin = {name: whence for whence, layer in layers for name in layer}
    each = {whence: [name for name in FIGURES if origin[name] == whence] for whence, _ in layers}
    told = [f"{', '.join(names)} from {whence}" for whence, names in each.items() if names]
    return found, [f"a drive's figures: {'; '.join(told)}"]


def taken_of_results(
    home: Path | None, study: Study, transactions: dict[Place, Transaction], found: list[Forecast]
) -> list[str]:
    """Of which cells it knew what a transaction asks for, and of which it did not: an estimate is
    never told as what a run has measured."""
    if home is None:
        return []
    if study.fio:
        return [f"--from-results {home}: nothing, as requests of fio are counted and not measured"]
    predicted = [one for one in found if one.per_second is not None]
    places = dict.fromkeys((one.side, one.load, one.clients) for one in predicted)
    there = [place for place in places if place in transactions]
    missing = [place for place in places if place not in transactions]
    said = []
    if there:
        said.append(f"I/Os of a transaction from --from-results {home}: {in_words(there)}")
    if missing:
        has = in_words(transactions) or "none of a healthy cell of PostgreSQL that was counted"
        said.append(
            f"I/Os of a transaction ESTIMATED, as --from-results {home} has none of these: "
            f"{in_words(missing)}. It has: {has}"
        )
    return said


def in_words(places: Iterable[Place]) -> str:
    """Clients of one side and script together."""
    clients: dict[tuple[str, str], list[str]] = {}
    for side, script, count in places:
        clients.setdefault((side, script), []).append(str(count))
    return "; ".join(
        f"{side}, {script}, {', '.join(counts)} clients"
        for (side, script), counts in clients.items()
    )


def from_raw(path: Path) -> dict[str, float]:
    """A run measured all drives at once: of one it is the share. Operations a second are those of
    small requests, and bytes those of the largest; of two alike, more of them under way."""
    try:
        raw = json.loads(path.read_text())
        beside = path.parent / "study.json"
        study = Study.model_validate_json(beside.read_text())
    except (OSError, ValueError) as error:
        raise StudyError(f"{path} and study.json beside it cannot be read: {error}") from None
    drives = study.array.members * study.array.count
    found = {}
    patterns = study.fio.patterns if study.fio else ()
    for pattern in sorted(patterns, key=lambda one: (one.block, one.depth * one.jobs)):
        its, unit = raw.get(pattern.name), FIGURE_OF.get(pattern.rw, "")
        sequential = "gbps" in unit
        if its and unit and (sequential or pattern.block == BLOCK_BYTES):
            total = its["bytes_per_sec"] / 1e9 if sequential else its["iops"]
            found[unit] = total / its.get("drives", drives)
    return found


# As they are measured: what was never written, or was discarded, a drive reads without looking.
FIGURE_OF = {"write": FIGURES[3], "randwrite": FIGURES[1], "read": FIGURES[2],
             "randread": FIGURES[0]}  # fmt: skip


def measured(device: str, overwrite: bool) -> dict[str, float]:
    if not shutil.which("fio"):
        raise StudyError("--measure needs fio: apt-get install fio")
    if not devices.is_block(device):  # fio would make a file of that name
        raise StudyError(f"--measure {device}: it is no block device")
    device = os.path.realpath(device)
    if overwrite and (problems := devices.problems([device], overwrite)):
        raise StudyError("\n".join(problems))
    blank = "where it was never written, or was discarded, it reads faster than it can"
    said = f"it is written before, for {FILL_SECONDS} s at most" if overwrite else blank
    print(f"{device}: {said}", file=sys.stderr)
    span_bytes = filled_bytes(device) if overwrite else MEASURE_BYTES_MAX
    found = {}
    for rw, name in FIGURE_OF.items():
        if "write" in rw and not overwrite:
            continue  # whoever asks is told which figures are missing
        print(f"{device}: {rw}, {MEASURE_SECONDS} s", file=sys.stderr)
        found[name] = measured_rate(device, rw, span_bytes)
    return found


def filled_bytes(device: str) -> int:
    """From its beginning on."""
    words = ["--bs=1m", "--iodepth=32", f"--size={MEASURE_BYTES_MAX}", f"--runtime={FILL_SECONDS}"]
    return by_fio(device, "write", words)["io_bytes"]


def measured_rate(device: str, rw: str, span_bytes: int) -> float:
    random = rw.startswith("rand")
    # In sequence, one job: of several, all but the first read what is in the drive's cache.
    block, depth, jobs = ("4k", 128, 4) if random else ("1m", 32, 1)
    words = [
        f"--bs={block}", f"--iodepth={depth}", f"--numjobs={jobs}", "--group_reporting",
        f"--runtime={MEASURE_SECONDS}", "--time_based", "--ramp_time=2", f"--size={span_bytes}",
    ]  # fmt: skip
    way = by_fio(device, rw, words)
    return way["iops"] if random else way["bw_bytes"] / 1e9


def by_fio(device: str, rw: str, words: list[str]) -> dict:
    """What it says of reads, or of writes."""
    with tempfile.TemporaryDirectory(prefix="ashlar-lab-") as directory:
        output = Path(directory) / "fio.json"
        command = [
            "fio", "--name=drive", f"--filename={device}", f"--rw={rw}", "--direct=1",
            "--ioengine=io_uring", "--output-format=json", f"--output={output}", *words,
        ]  # fmt: skip
        if "write" not in rw:
            command.append("--readonly")
        try:
            done = child.run(command, MEASURE_SECONDS_MAX, stderr=subprocess.STDOUT)
        except subprocess.TimeoutExpired:
            raise StudyError(f"fio is not done with {device} in {MEASURE_SECONDS_MAX} s") from None
        if done.returncode:
            raise StudyError(f"fio cannot measure {device}: {done.stdout.strip()}")
        text = output.read_text()
    return json.loads(text[text.index("{") :])["jobs"][0]["write" if "write" in rw else "read"]


# What is said -----------------------------------------------------------------------------------


def show(
    study: Study, given: dict, taken: list[str], unknown: list[str], found: list[Forecast]
) -> None:
    console = Console(width=None if sys.stdout.isatty() else 130)
    array = study.array
    console.print(
        f"{study.title}: {array.count} x {array.shape}, "
        f"chunk {array.chunk >> 10} KiB; a drive: {given[FIGURES[0]]:,.0f} reads, "
        f"{given[FIGURES[1]]:,.0f} writes a second, "
        f"{given[FIGURES[2]]:g} and {given[FIGURES[3]]:g} GB/s"
    )
    table = Table(box=None, header_style="bold", pad_edge=False)
    columns = (
        "side",
        "state",
        "load",
        "clients",
        "loads",
        "a second",
        "GB/s",
        "limit",
        "drives: r+w",
    )
    for name in columns:
        right = name in ("clients", "loads", "a second", "GB/s", "drives: r+w")
        table.add_column(name, justify="right" if right else "left")
    for one in found:
        table.add_row(*row(one))
    console.print(table)
    for note in [*taken, *dict.fromkeys(note for one in found for note in one.notes)]:
        console.print(f"- {note}")
    if unknown:
        console.print(f"- not known, and left out: {'; '.join(unknown)}")


def row(one: Forecast) -> tuple[str, ...]:
    unlimited = one.per_second is None or one.per_second == float("inf")
    return (
        one.side, one.state, one.load, str(one.clients or ""), str(one.loads),
        "–" if unlimited else f"{one.per_second:,.0f}",
        f"{one.bytes_per_second / 1e9:.3g}" if one.bytes_per_second else "",
        "nothing that is known" if one.per_second == float("inf") else one.bottleneck,
        "" if one.reads is None else f"{one.reads:.2f}+{one.writes:.2f}",
    )  # fmt: skip
