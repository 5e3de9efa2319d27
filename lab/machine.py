"""This machine: what it is, for the report; and whether it can run a study, before it begins."""

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil

from demo.settings import memory_available
from lab import guests, limits, paths
from lab.host import drive_count
from lab.loads.fio import measured_bytes
from lab.loads.pgbench import database_bytes
from lab.pinning import cpus_of
from lab.results import DATE
from lab.side import Side
from lab.study import State, Study, Where

MEMORY_BYTES_MIN = 1 << 30  # for a database and its load, or for fio
CLIENT_BYTES = 10 << 20  # of memory that a connection of PostgreSQL takes, generously
GUEST_CLIENT_BYTES = 3 << 20  # the least that it takes: with less, the guest kills some
FIO_BYTES_MIN = 64 << 20
RESULT_BYTES = 512 << 20
POLLING = ("ashlar", "spdk")  # kinds of sides with cores of their own, also if none are said
VERSIONS = {
    "postgresql": "{postgres}/postgres --version",
    "pgbench": "{postgres}/pgbench --version",
    "fio": "fio --version",
    "xfsprogs": "mkfs.xfs -V",
    "btrfs-progs": "mkfs.btrfs --version",
    "mdadm": "mdadm --version",
    "zfs": "zfs version",
    "qemu": "qemu-system-x86_64 --version",
    "qemu-storage-daemon": "qemu-storage-daemon --version",
    "ashlar": "{ashlar} --version",
    "checkout": "git -C {checkout} describe --always --dirty",
}


def description(study: Study, postgres: str, ashlar: str) -> dict:
    """Everything of the machine that a reader of the figures wants to know."""
    memory = psutil.virtual_memory()
    return {
        "called": sys.argv,
        "date": time.strftime(DATE),
        "machine": {
            "cpu": cpu_model(),
            "cpus": os.cpu_count(),
            "cpus that may be used": sorted(os.sched_getaffinity(0)),
            "memory_bytes": memory.total,
            "memory_available_bytes": memory.available,
            "huge_pages": int(read("/proc/sys/vm/nr_hugepages") or 0),
            "hypervisor": " hypervisor " in f" {read('/proc/cpuinfo')} ".replace("\n", " "),
            "kvm": os.access("/dev/kvm", os.R_OK | os.W_OK),
            "frequency_governor": read("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor"),
            "load_average_before": os.getloadavg(),
            "limits": {
                "cgroup_cpu": read("/sys/fs/cgroup/cpu.max"),
                "cgroup_memory": read("/sys/fs/cgroup/memory.max"),
                "open_files": os.sysconf("SC_OPEN_MAX"),
            },
        },
        "kernel": {
            "release": platform.release(),
            "version": platform.version(),
            "command_line": read("/proc/cmdline"),
            "mitigations": mitigations(),
        },
        "distribution": platform.freedesktop_os_release().get("PRETTY_NAME", ""),
        "drives": drives(study),
        "versions": versions(postgres, ashlar),
        "study": study.title,
    }


def versions(postgres: str, ashlar: str) -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, command in VERSIONS.items():
        words = command.format(postgres=postgres, ashlar=ashlar, checkout=paths.CHECKOUT).split()
        if line := first_line(words):
            found[name] = line
    return found


def first_line(words: list[str]) -> str:
    path = paths.programs()
    if shutil.which(words[0], path=path) is None:
        return ""
    said = subprocess.run(
        words,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        env=os.environ | {"PATH": path},
    )
    lines = (said.stdout or said.stderr).splitlines() if said.returncode == 0 else []
    return lines[0].strip() if lines else ""


def drives(study: Study) -> dict:
    """What the drives are made of: for files, the file system and the disk beneath."""
    asked = study.drives
    if asked.kind == "model":
        return {"kind": "model", "iops": asked.iops, "mbps": asked.mbps, "bytes": asked.size}
    if asked.kind == "block":
        columns = "NAME,MODEL,SIZE,ROTA,SCHED,LOG-SEC,PHY-SEC,TRAN"
        said = first_lines(["lsblk", "-ndo", columns, *asked.paths])
        return {"kind": "block", "paths": list(asked.paths), "lsblk": said}
    at = paths.existing(Path(asked.directory or "."))
    return {
        "kind": asked.kind,
        "bytes": asked.size,
        "file_system": first_lines(["findmnt", "-nT", str(at), "-o", "SOURCE,FSTYPE,OPTIONS"]),
        "disks": first_lines(["lsblk", "-ndo", "NAME,MODEL,SIZE,ROTA,SCHED,LOG-SEC,TRAN"]),
    }


def first_lines(words: list[str]) -> str:
    return subprocess.run(words, capture_output=True, text=True).stdout.strip()


def cpu_model() -> str:
    found = re.search(r"model name\s*: (.*)", read("/proc/cpuinfo"))
    return found[1] if found else platform.processor()


def mitigations() -> dict[str, str]:
    at = Path("/sys/devices/system/cpu/vulnerabilities")
    return {path.name: read(path) for path in sorted(at.glob("*"))}


def read(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


# Whether it can run a study


def problems(study: Study, sides: dict[str, Side], out: Path) -> list[str]:
    """What this machine lacks for the loads, and what cannot be compared; each with its fix."""
    found = [*load_problems(study), *idle_problems(study), *protection_problems(study, sides)]
    found += core_problems(study)
    at = paths.existing(out.absolute())
    if shutil.disk_usage(at).free < RESULT_BYTES:
        found.append(f"{at} has less than {RESULT_BYTES >> 20} MiB free for results: give --out")
    return found + memory_problems(study) + limits.problems(study, memory_available())


def memory_problems(study: Study) -> list[str]:
    """All at once: of load, drives and guests."""
    parts = {"a load": MEMORY_BYTES_MIN}
    if study.where == Where.HOST and study.pgbench:
        parts["clients"] = clients_max(study) * CLIENT_BYTES
    if study.drives.kind == "model":
        parts["models of drives"] = study.drives.size * drive_count(study)
    if guests.machines(study):
        parts["guests"] = guests.memory_bytes(study)
    needed = sum(parts.values())
    found = []
    if (available := memory_available()) < needed:
        told = ", ".join(f"{size >> 20} for {what}" for what, size in parts.items())
        found.append(
            f"{available >> 20} MiB of memory are free and {needed >> 20} are needed ({told}): end "
            "other programs, or say less (--set pgbench.clients=[10], --set vm.count=1, "
            "--set vm.memory=1G, --set drives.size=1G)"
        )
    inside = clients_max(study) * GUEST_CLIENT_BYTES
    if guests.machines(study) and inside > study.vm.memory:
        found.append(
            f"{clients_max(study)} clients take about {inside >> 20} MiB of a guest that has "
            f"{study.vm.memory >> 20}: say fewer (--set pgbench.clients=[10]), or larger guests "
            "(--set vm.memory=8G)"
        )
    return found


def clients_max(study: Study) -> int:
    return max(study.pgbench.clients) if study.pgbench else 0


def load_problems(study: Study) -> list[str]:
    """Programs of a load that runs on this host; a guest has its own."""
    if study.where != Where.HOST:
        return []
    found = []
    path = paths.programs()
    wanted = ["setpriv", "mkfs.xfs", "mountpoint"] if study.pgbench else ["fio"]
    wanted += ["fio"] * bool(study.pgbench and State.REBUILDING in study.states)  # it fills disks
    fix = "run scripts/install.sh lab"
    found += [f"{name} is missing: {fix}" for name in wanted if not shutil.which(name, path=path)]
    if study.pgbench:
        debian = list(Path("/usr/lib/postgresql").glob("*/bin/pgbench"))
        if not debian and not shutil.which("pgbench"):
            found.append(f"PostgreSQL with pgbench is missing: {fix}")
        if not re.search("^postgres:", read("/etc/passwd"), re.MULTILINE):
            found.append(f"there is no user postgres, and PostgreSQL refuses to run as root: {fix}")
        if os.geteuid() != 0:
            found.append("mounting and changing to the user postgres need root: run it with sudo")
    return found


def core_problems(study: Study) -> list[str]:
    """CPUs that a side is to poll on, and that are not there, or not ours."""
    usable, whose = os.sched_getaffinity(0), "this machine lets us use"
    if study.where == Where.GUEST:
        usable, whose = set(range(study.vm.cpus)), "the guest has"
    found = []
    for side in study.side:
        its = side.cores or (guests.SIDE_CORES if side.kind in POLLING else "")
        if others := sorted(set(cpus_of(its)) - usable if its else ()):
            has, lacks = ",".join(map(str, sorted(usable))), ",".join(map(str, others[:4]))
            lacks += ",…" * (len(others) > 4)
            who = "`cores` names" if side.cores else "where `cores` are not said, it polls on"
            found.append(
                f"side {side.name}: {who} CPU {lacks}, and {whose} {has}: say others "
                f"(--set side.{side.name}.cores={min(usable)})"
            )
    return found


def idle_problems(study: Study) -> list[str]:
    """Arrays without any disk: what happens to one of those says nothing of a load.

    `fio.vms` may be smaller than the number of arrays: the disks are there, other cells load them,
    and what one machine gets of a server whose others rest is asked, too. Not in the model of a
    study: results of before, whose idle arrays were only healthy, are still to be read.
    """
    if study.array.count <= study.disks:
        return []
    return [
        f"there are {study.array.count} arrays and {study.disks} virtual machines, each of which "
        "has a disk on one of them: say a smaller `array.count`, or a larger `vm.count`"
    ]


def protection_problems(study: Study, sides: dict[str, Side]) -> list[str]:
    """Sides that survive different things are no equals."""
    kinds = {}
    for name, side in sides.items():
        kinds.setdefault(side.protection, []).append(name)
    if len(kinds) < 2 or study.unequal:
        return []
    groups = "; ".join(
        f"{', '.join(names)}: {its.losses} drives may be lost, write hole {its.write_hole}"
        for its, names in kinds.items()
    )
    return [
        f"the sides are not protected alike ({groups}): give them one `policy`, leave one out "
        "(--sides), or compare them knowingly (--unequal), which the report says on top"
    ]


def size_problems(
    study: Study, disk_bytes: int, drive_bytes: int | None = None, begun: bool = False
) -> list[str]:
    """Whether the load fits on a disk of the smallest side, and on the smallest of the bare
    drives. A run that was `begun` goes on with what it has."""
    if not study.pgbench:
        return fio_size_problems(study, disk_bytes, drive_bytes, begun)
    if disk_bytes >= (needed := database_bytes(study.pgbench)):
        return []
    return [
        f"a database of scale {study.pgbench.scale} takes about {needed >> 20} MiB and the disks "
        f"are of {disk_bytes >> 20}: say larger drives (--set drives.size=8G) or a smaller scale "
        "(--set pgbench.scale=10)"
    ]


def fio_size_problems(
    study: Study, disk_bytes: int, drive_bytes: int | None, begun: bool
) -> list[str]:
    """A load that is told to use more than there is would use what there is, and be another."""
    has = f"{max(0, disk_bytes) >> 20} MiB"
    if disk_bytes < FIO_BYTES_MIN:
        return [
            f"the disks would have {has} and fio takes {FIO_BYTES_MIN >> 20}: say larger drives "
            "(--set drives.size=1G)"
        ]
    found, used = [], min(study.fio.size or disk_bytes, disk_bytes)
    if study.fio.size and study.fio.size > disk_bytes and not begun:
        found.append(
            f"`fio.size` is {study.fio.size >> 20} MiB and the disks are of {has}, which is what "
            f"the smallest side can give: say that or less (--set fio.size={disk_bytes >> 20}M), "
            "or larger drives (--set drives.size=8G)"
        )
    bounds = [(measured_bytes(used), "and fio reads and writes {} of a disk", "")]
    # bare drives are used as a whole
    if study.raw and study.drives.kind != "model" and drive_bytes is not None:
        bare = "and the bare drives have {}"
        bounds.append((drive_bytes >> 20 << 20, bare, ", or raw = false"))
    for at, pattern in enumerate(study.fio.patterns):
        for most, what, fix in bounds:
            if pattern.block > most:
                found.append(
                    f"`fio.patterns.{at}.block` ({pattern.name}) is {pattern.block} bytes, "
                    f"{what.format(most)}: say a smaller block, or larger drives "
                    f"(--set drives.size=8G){fix}"
                )
                break
    return found
