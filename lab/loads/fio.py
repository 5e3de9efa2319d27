"""fio with direct I/O and io_uring, on a block device or on a file of a side's own file system.

All that is read has been written before: the disk is filled once for a side and repeat, as a whole
where arrays are to be rebuilt (`full`), also if patterns use a part of it. A tenth of
it, at its end, is never measured but read after each cell, and then written anew in the state that
the arrays are in: that an array answers fast is worth nothing if it answers wrong. Each time it is
another pattern, so that nothing older is taken for it, and has the offset of each block in it.
"""

import json
import re
import secrets
import shlex
import time
from collections.abc import Callable
from pathlib import Path

from lab import place as places
from lab import schedule
from lab import study as studies
from lab.loads import LoadError, Measured, wait_until
from lab.place import Place, Running
from lab.results import STATED, Cell, of_drives
from lab.study import Pattern
from lab.where import Seat, Where

ENGINE = "--ioengine=io_uring --direct=1 --thread --randrepeat=0 --norandommap --refill_buffers"
PERCENTILES = "50:90:95:99:99.9:99.95:99.99"
CHECKED_BYTES_MAX = 64 << 20
FILL_SECONDS_MAX = 6 * 3600
CHECK_SECONDS_MAX = 900
# With the offset 17 bytes: no two of the 4 KiB blocks in 64 KiB begin with the same of them.
MARK_BYTES = 9
LATE_SECONDS_MAX = 300
BEGUN = "begun"
MIB = 1 << 20


class Fio:
    def __init__(self, seat: Seat, asked: studies.Fio, full: bool = False):
        self.seat, self.place, self.asked, self.full = seat, seat.place, asked, full
        self.home = places.scratch(self.place, seat.name)
        self.file = seat.disk.device or f"{seat.disk.directory}/fio"
        self.patterns = {pattern.name: pattern for pattern in asked.patterns}
        self.load: Running | None = None
        self.pattern: Pattern | None = None
        self.rate: float | None = None
        self.begun = False
        self.command = ""
        self.bytes = self.checked_bytes = 0  # that patterns use, and after them, that are checked
        self.mark = ""  # of what was written last where it is checked
        self.filled_bytes = 0
        self.warm_seconds = asked.warm_seconds  # of the cell under way
        self.fill_seconds = 0.0

    def prepare(self, say: Callable[[str], None]) -> None:
        began = time.monotonic()
        places.owe(self.place, "path", self.home)
        self.place.check(f"mkdir -p {self.home}")
        whole = self.whole_bytes()
        size = min(whole, self.asked.size or whole) // MIB * MIB
        if size < studies.FIO_BYTES_MIN:  # fio takes a size of 0 for all there is
            least = studies.FIO_BYTES_MIN >> 20
            raise LoadError(f"{self.file} has {size >> 20} MiB, and fio's load needs {least}")
        self.bytes = measured_bytes(size)
        self.checked_bytes = checked_bytes(size)
        self.filled_bytes = max(size, whole if self.full else 0)
        say(f"filling {self.filled_bytes >> 20} MiB")
        self.fill(0, self.bytes)
        self.fill(size, self.filled_bytes - size)
        if failed := self.write_checked("--end_fsync=1"):  # and with it all of the file
            raise LoadError(failed)
        self.fill_seconds = time.monotonic() - began

    def whole_bytes(self) -> int:
        """As large on every side, however large the device is."""
        whole = self.seat.disk.bytes
        if not self.seat.disk.directory:
            device = int(self.place.check(f"blockdev --getsize64 {self.file}"))
            whole = min(device, whole or device)
        return whole // MIB * MIB

    def fill(self, offset: int, size: int) -> None:
        if size:
            self.long(f"fio {fill_words(self.file, offset, size)}")

    def job(self, name: str) -> str:
        return f"--name={name} --filename={self.file} {ENGINE}"

    def long(self, command: str) -> None:
        output = self.place.spawn(f"exec {command}").wait(FILL_SECONDS_MAX)
        if output.rc != 0:
            raise LoadError(f"fio could not fill {self.file}:\n{output.text[-800:]}")

    def ready(self, cell: Cell) -> None:
        self.place.set_clock()
        self.place.check(f"rm -f {self.home}/out* {self.home}/log*")

    def begin(self, cell: Cell, at: float = 0.0, more_warm: int = 0) -> None:
        self.warm_seconds = self.asked.warm_seconds + more_warm
        self.pattern, self.rate, self.begun = self.patterns[cell.load], None, False
        self.command = (
            f"fio {self.job(cell.load)} --size={self.bytes} {words(self.pattern)} "
            f"{self.times()} {reports(self.home)}"
        )
        # told by each job right before its first request; its own output goes to a file
        tell = f"--exec_prerun='({wait_until(at)}; echo {BEGUN} >&3)'"
        command = f"cd {self.home} && exec {self.command} {tell} --eta=never 3>&1"
        self.load = self.place.spawn(command, self.on_line)

    def on_line(self, line: str) -> None:
        self.begun = self.begun or line == BEGUN

    def times(self) -> str:
        return f"--time_based --runtime={self.asked.seconds} --ramp_time={self.warm_seconds}"

    @property
    def seconds_max(self) -> float:
        return self.warm_seconds + self.asked.seconds + LATE_SECONDS_MAX

    @property
    def running(self) -> bool:
        return self.load is not None and self.load.running

    def finish(self, directory: Path) -> Measured:
        load, self.load = self.load, None
        output = load.wait(self.seconds_max)
        (directory / f"{self.seat.name}.txt").write_text(f"$ {self.command}\n{output.text}")
        if output.rc != 0:
            said = [line for line in output.text.splitlines() if line.startswith("fio:")]
            raise LoadError(f"fio ended with status {output.rc}: {said[:1]}")
        path = directory / f"{self.seat.name}.json"
        # without what it tells before its JSON
        self.place.check(f"sed -i -n '/^{{/,$p' {self.home}/out")
        self.place.fetch(f"{self.home}/out", path)
        return measured(
            read_json(path),
            self.place.check(f"cat {self.home}/log_iops.log"),
            self.place.check(f"cat {self.home}/log_lat.log"),
        )

    def verify(self) -> list[str]:
        """What is written now is read at once, and again after the next cell, in its state."""
        self.check()
        failed = self.write_checked()
        return [f"nothing is checked after this cell, since {failed}"] if failed else []

    def write_checked(self, more: str = "") -> str:
        """Why it cannot be written, or nothing; then anything may stand there."""
        self.mark = secrets.token_hex(MARK_BYTES)
        if said := self.check_job(f"--rw=write --do_verify=0 {more}"):
            self.mark = ""
            return f"{self.file} takes no writes: {said}"
        self.check()
        return ""

    def check(self) -> None:
        if self.mark and (said := self.check_job("--rw=read --verify_fatal=1")):
            raise LoadError(f"what was written to {self.file} is not what is read: {said}")

    def check_job(self, how: str) -> list[str]:
        """What is wrong, as fio says it."""
        where = f"--offset={self.bytes} --size={self.checked_bytes} --bs=64k --iodepth=16"
        right = f"--verify=pattern --verify_pattern=0x{self.mark}%o --verify_state_save=0"
        command = f"fio {self.job('check')} {where} {right} {how}"
        output = self.place.run(command, CHECK_SECONDS_MAX)
        if output.rc == 0:
            return []
        lines = output.text.splitlines()
        return [line for line in lines if line.startswith(("fio:", "verify"))][:3] or lines[-1:]

    def rest(self) -> None:
        """Between two cells nothing holds it."""

    def go_on(self) -> None:
        pass

    def pids(self) -> list[int]:
        return places.processes_in(self.place, self.home)

    def settings(self) -> dict[str, str]:
        return {
            "version": self.place.run("fio --version").text.strip(),
            "engine": ENGINE.replace("--", ""),
            "filled": f"{self.filled_bytes >> 20} MiB, before anything is measured",
            "file": "a file of its own" if self.seat.disk.directory else "the block device itself",
        }

    def close(self) -> None:
        if self.load is not None:
            places.stop(self.load)
            self.load = None
        self.place.check(f"rm -rf {self.home}")
        places.settle(self.place, "path", self.home)


def checked_bytes(size: int) -> int:
    """Of what fio uses of a disk: at its end, and never measured."""
    return min(CHECKED_BYTES_MAX, size // 10) // MIB * MIB


def measured_bytes(size: int) -> int:
    return (size - checked_bytes(size)) // MIB * MIB


def fill_words(file: str, offset: int, size: int) -> str:
    """With what no drive and no file system makes smaller."""
    return (
        f"--name=fill --filename={file} {ENGINE} --rw=write --bs=1M --iodepth=8 "
        f"--offset={offset} --size={size}"
    )


def words(pattern: Pattern) -> str:
    mix = f" --rwmixread={pattern.read_percent}" if pattern.read_percent is not None else ""
    return (
        f"--rw={pattern.rw}{mix} --bs={pattern.block} --iodepth={pattern.depth} "
        f"--numjobs={pattern.jobs} --group_reporting"
    )


def reports(home: str) -> str:
    """json+ has every bin of the latencies; the logs, what was done in each second."""
    return (
        f"--output={home}/out --output-format=json+ --lat_percentiles=1 "
        f"--percentile_list={PERCENTILES} --write_iops_log={home}/log --write_lat_log={home}/log "
        "--log_avg_msec=1000 --log_unix_epoch=1 --per_job_logs=0"
    )


def read_json(path: Path) -> dict:
    """fio may warn before its JSON begins."""
    text = path.read_text()
    return json.loads(text[text.index("{") :])


def measured(said: dict, iops_log: str, latency_log: str) -> Measured:
    """A line of a log is `milliseconds value direction block offset`, at the end of its second."""
    rates, latencies = list(entries(iops_log)), list(entries(latency_log))
    ways = [job[way] for job in said["jobs"] for way in ("read", "write")]
    total = sum(way["total_ios"] for way in ways)
    seconds = max(way["runtime"] for way in ways) / 1000
    if not rates or not total:
        raise LoadError("fio did nothing that it could tell of: give it more seconds")
    began = min(at for at, _, _ in rates) - 1.0
    counts: dict[int, int] = {}
    sums: dict[int, float] = {}
    for at, rate, _ in rates:
        second = round(at - began) - 1
        counts[second] = counts.get(second, 0) + rate
    last = max(0, round(seconds) - 1)
    # fio may end before it writes down its last second, and it rounds the others
    counts[last] = max(0, counts.get(last, 0) + total - sum(counts.values()))
    did, took = by_second_and_way(rates, began), by_second_and_way(latencies, began)
    for second in counts.keys() & took.keys():  # of the others it is not known
        sums[second] = counts[second] * mean_ns(did.get(second, {}), took[second]) / 1e6
    failed = sum(job["error"] != 0 for job in said["jobs"])
    return Measured(began, seconds, counts, sums, failed)


def by_second_and_way(told: list[tuple], began: float) -> dict[int, dict[int, list[int]]]:
    found: dict[int, dict[int, list[int]]] = {}
    for at, value, way in told:
        found.setdefault(round(at - began) - 1, {}).setdefault(way, []).append(value)
    return found


def mean_ns(did: dict[int, list[int]], took: dict[int, list[int]]) -> float:
    """Of reads and writes by their number: 900 reads of 1 ms and 100 writes of 11 ms took 2 ms
    each, and not 6. Of several jobs each counts alike, whatever it did: the log does not say whose
    a line is, and all jobs of a pattern ask for the same."""
    weights = {way: sum(did.get(way, ())) for way in took}
    if not any(weights.values()):  # fio did not write down how many
        weights = {way: len(its) for way, its in took.items()}
    total = sum(weights.values())
    means = {way: sum(its) / len(its) for way, its in took.items()}
    return sum(means[way] * weights[way] for way in took) / total if total else 0.0


def entries(log: str):
    for line in log.splitlines():
        at, value, way = re.split(r",\s*", line)[:3]
        yield int(at) / 1000, int(value), int(way)


# The drives themselves


def measure_drives(study: studies.Study, where: Where, say: Callable[[str], None]) -> dict:
    """Each pattern on all members of all arrays at once: what their sum could do at best. And on
    the first of them alone, where loads of a side use no others: drives that share a disk do less
    each, the more of them there are. Those of kind `model` are nothing that fio could open."""
    if study.drives.kind == "model":
        return stated_drives(study)
    place = where.place
    arrays, _ = where.drives()
    members = [drive for array in arrays for drive in array]
    files = [drive.path for drive in members]
    home = places.scratch(place, "raw")
    places.owe(place, "path", home)
    place.check(f"mkdir -p {home}")
    try:
        size = min(drive.bytes for drive in members) // MIB * MIB
        say("the drives themselves: writing them full")
        fill(place, files, size)
        found = {}
        for pattern in study.fio.patterns:
            say(f"the drives themselves: {pattern.name}")
            found[pattern.name] = measure_pattern(place, study.fio, pattern, files, size, home)
            for fewer in fewer_drives(study):
                say(f"the drives themselves: {(name := of_drives(pattern.name, fewer))}")
                found[name] = measure_pattern(
                    place, study.fio, pattern, files[:fewer], size, home
                )
        return found
    finally:
        place.run(f"rm -rf {home}")
        places.settle(place, "path", home)


def stated_drives(study: studies.Study) -> dict:
    """What models of drives do is what the study says they do."""
    found, whole = {}, study.array.count * study.array.members
    for pattern in study.fio.patterns:
        for drives in (whole, *fewer_drives(study)):
            name = pattern.name if drives == whole else of_drives(pattern.name, drives)
            found[name] = stated(study.drives, pattern, drives)
    return found


def stated(asked: studies.Drives, pattern: Pattern, drives: int) -> dict:
    """A request takes a model as long as its pace of operations or that of bytes, the longer."""
    rate = drives * min(asked.iops, asked.mbps * 1e6 / pattern.block)
    return {
        "drives": drives,
        "iops": round(rate),
        "bytes_per_sec": round(rate * pattern.block),
        "command": f"{STATED}: {asked.iops} operations and {asked.mbps} MB a second of each drive",
    }


def fewer_drives(study: studies.Study) -> list[int]:
    """How many stand behind cells that load the first arrays only, and behind sides that give each
    load a drive."""
    behind = {
        study.drives_behind(loads, side.kind, side.raid0)
        for _, _, loads in schedule.loads_of(study)
        for side in study.side
    }
    return sorted(behind - {study.array.count * study.array.members})


def fill(place: Place, files: list[str], size: int) -> None:
    """What was never written, or was discarded, a drive answers without looking."""
    jobs = " ".join(
        f"--name=d{number} --filename={shlex.quote(file)} --size={size} {ENGINE} --rw=write "
        "--bs=1M --iodepth=8 --end_fsync=1"
        for number, file in enumerate(files)
    )
    output = place.spawn(f"exec fio --eta=never {jobs}").wait(FILL_SECONDS_MAX)
    if output.rc != 0:
        raise LoadError(f"fio could not write the drives full:\n{output.text[-800:]}")


def measure_pattern(
    place: Place, asked: studies.Fio, pattern: Pattern, files: list[str], size: int, home: str
) -> dict:
    jobs = " ".join(
        f"--name=d{number} --filename={shlex.quote(file)} --size={size} {ENGINE} "
        f"{words(pattern)} --time_based --runtime={asked.seconds} "
        f"--ramp_time={asked.warm_seconds} --lat_percentiles=1 --percentile_list={PERCENTILES}"
        for number, file in enumerate(files)
    )
    command = f"fio --output={home}/out --output-format=json --eta=never {jobs}"
    output = place.spawn(f"exec {command}").wait(
        asked.seconds + asked.warm_seconds + LATE_SECONDS_MAX
    )
    if output.rc != 0:
        raise LoadError(f"fio on the drives ended with status {output.rc}:\n{output.text[-800:]}")
    said = json.loads(place.check(f"sed -n '/^{{/,$p' {home}/out"))
    ways = [job[way] for job in said["jobs"] for way in ("read", "write")]
    weights = [(way["lat_ns"]["mean"], way["total_ios"]) for way in ways if way["total_ios"]]
    total = sum(count for _, count in weights)
    return {
        "drives": len(files),
        "iops": round(sum(way["iops"] for way in ways)),
        "read_iops": round(sum(job["read"]["iops"] for job in said["jobs"])),
        "write_iops": round(sum(job["write"]["iops"] for job in said["jobs"])),
        "bytes_per_sec": sum(way["bw_bytes"] for way in ways),
        "latency_ms_mean": round(sum(mean * count for mean, count in weights) / total / 1e6, 4),
        "depth_of_each": pattern.depth * pattern.jobs,
        "command": command,
    }
