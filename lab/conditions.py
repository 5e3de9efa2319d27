"""What all figures of a run have in common, and a run that goes on later may have otherwise.

It is written down in machine.json whenever a run is begun or goes on. What changed is told on top
of the report, in red; figures of two programs of Ashlar are never mixed at all.
"""

import hashlib
import platform
from collections.abc import Sequence
from pathlib import Path

from lab.study import Study

ASHLAR = "ashlar"
# Of a side's settings: what names its devices, and what its arrays say of themselves.
OTHER_EACH_TURN = ("commands", "array ")
DISKS = "disk_bytes"
# Key of conditions → what it is called; but for the program, all of them are told.
TOLD = {
    "kernel": "the kernel",
    "guest_kernel": "the kernel of the guests",
    "huge_pages": "huge pages for guests",
    DISKS: "bytes of each disk",
    "directory": "the directory of the drives",
}
# What a machine.json says anyway, also one of an older run: (table, key in it) → what it is called.
SAID_ANYWAY = {
    ("where", "acceleration"): "how guests are run (kvm, or tcg: emulated in software)",
    ("where", "qemu"): "QEMU",
    ("where", "pinned to CPUs"): "the CPUs that guests are pinned to",
    ("where", "programs of the guest"): "the programs of the guest",
    ("machine", "cpu"): "the model of the CPU",
    ("machine", "cpus that may be used"): "the CPUs that may be used",
    ("machine", "memory_bytes"): "bytes of memory",
    ("machine", "limits"): "limits of CPU time, memory and open files",
    **{("versions", name): f"the version of {name}" for name in (
        "postgresql", "pgbench", "fio", "xfsprogs", "btrfs-progs", "mdadm", "zfs",
        "qemu-storage-daemon",
    )},
}  # fmt: skip


def now(study: Study, where: dict, huge_pages: bool, disk_bytes: list[int], ashlar: str) -> dict:
    """`where` is what its settings are; `ashlar` is the program's sum, or empty if this call
    measures nothing of it."""
    on_files = study.drives.kind in ("file", "nvme")
    return {
        ASHLAR: ashlar,
        "kernel": platform.release(),
        "guest_kernel": where.get("kernel of the guests") or where.get("kernel of the guest", ""),
        "huge_pages": huge_pages,
        DISKS: disk_bytes,
        "directory": str(Path(study.drives.directory or "").absolute()) if on_files else "",
    }


def of(machine: dict) -> dict:
    """Of a machine.json. An older one has only some of it."""
    older = {"kernel": machine.get("kernel", {}).get("release"), DISKS: machine.get(DISKS)}
    return machine.get("conditions") or {key: value for key, value in older.items() if value}


def checksum(program: Path) -> str:
    return hashlib.sha256(program.read_bytes()).hexdigest() if program.is_file() else ""


def disks_as_before(machines: Sequence[dict], possible: list[int]) -> list[int]:
    """Those that the run was begun with, if these can still be made: without a side that is now
    left out, larger ones could be."""
    were = of(machines[0]).get(DISKS) if machines else None
    if were and len(were) == len(possible) and all(map(int.__le__, were, possible)):
        return were
    return possible


def other_program(machines: Sequence[dict], ashlar: str) -> list[str]:
    """Why it may not go on: what it measured of Ashlar, it measured of another program. A call that
    measured nothing of it has written down none."""
    was = next((its for one in reversed(machines) if (its := of(one).get(ASHLAR))), ashlar)
    if was == ashlar:
        return []
    return [
        f"the program of Ashlar is another (sha256 {ashlar[:16]}…) than what was measured already "
        f"({was[:16]}…): set ASHLAR to that one, or begin anew in another directory"
    ]


def changes_of_side(was: dict, now: dict) -> list[str]:
    """What a side was set to otherwise in the turn before: the report has the last only."""
    return [
        f"{name}: {before}, then {now[name]}"
        for name, before in was.items()
        if name in now and now[name] != before and not name.startswith(OTHER_EACH_TURN)
    ]


def changes(machines: Sequence[dict]) -> list[str]:
    """What was not the same all the time, each with its values in their order. A program that was
    not there is none of another version: nothing was measured with it."""
    found = [(name, key, list(map(of, machines))) for key, name in TOLD.items()]
    for (table, key), name in SAID_ANYWAY.items():
        found.append((name, key, [one.get(table) or {} for one in machines]))
    told = []
    for name, key, tables in found:
        values = list(dict.fromkeys(str(its[key]) for its in tables if key in its))
        if len(values) > 1:
            told.append(f"{name}: {', then '.join(value or 'none' for value in values)}")
    return told
