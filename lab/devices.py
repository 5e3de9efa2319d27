"""Block devices of a user: which drive it is, what it carries, and who holds it. Reads only.

A name such as /dev/sdb is another drive after a reboot, perhaps; a serial number is not.
"""

import contextlib
import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path

from lab import ledger
from lab.study import Drives

CLASS = Path("/sys/class/block")
EDGE_BYTES = 1 << 20  # at both ends, where all who label drives put their labels
NUMBERS = ("wwid", "device/wwid", "device/serial", "serial", "dm/uuid", "md/uuid")


def problems(paths: Sequence[str], overwrite: bool) -> list[str]:
    """Why these may not be overwritten, each with its fix."""
    found = []
    beneath: dict[Path, str] = {}  # of those before, in /sys
    for path in paths:
        if not is_block(path):
            found.append(f"{path} is no block device: correct the path")
            continue
        at = sys_path(path)
        for other, its in beneath.items():
            if at == other or at in other.parents or other in at.parents:
                found.append(f"{path} and {its} are one drive: name each once")
        beneath[at] = path
        if why := used(path):
            found.append(f"{path} is in use: {why}; nothing in use is overwritten")
        elif not overwrite and carries_anything(path):
            what = ", ".join(labels(path)) or "data that nobody here knows"
            found.append(f"{path} carries {what}: --overwrite if all of it may go")
    return found


def is_block(path: str) -> bool:
    try:
        return stat.S_ISBLK(os.stat(path).st_mode)
    except OSError:
        return False


def sys_path(path: str) -> Path:
    """A partition is beneath its drive."""
    return (CLASS / Path(path).resolve().name).resolve()


def used(path: str) -> str:
    """By a mount, swap, or a device made of it or of one of its partitions; empty if by nobody."""
    at = sys_path(path)
    if holders := sorted(each.name for each in [*at.glob("holders/*"), *at.glob("*/holders/*")]):
        return f"it is part of {', '.join(holders)}"
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL))
    except OSError as error:
        if error.errno == errno.EBUSY:
            return "it is mounted, or another program has it for itself"
        return error.strerror
    return ""


def carries_anything(path: str) -> bool:
    with open(path, "rb", buffering=0) as drive:
        size = drive.seek(0, os.SEEK_END)
        for at in (0, max(0, size - EDGE_BYTES)):
            drive.seek(at)
            if any(drive.read(EDGE_BYTES)):
                return True
    return False


def labels(path: str) -> list[str]:
    words = ("wipefs", "--noheadings", "--output=TYPE", path)
    return list(dict.fromkeys((ledger.said(*words) or "").split()))


# Which drive it is


def identified(drives: Drives) -> Drives:
    """With the identity of each, as it is now."""
    return drives.model_copy(update={"identities": tuple(map(identity, drives.paths))})


def identity(path: str) -> str:
    """A drive without a number is known by its name until the next boot."""
    if not is_block(path):
        return ""
    at, part = sys_path(path), ""
    if (at / "partition").exists():
        at, part = at.parent, f" partition {read(at / 'partition')}"
    number = next((text for name in NUMBERS if (text := read(at / name))), "")
    if not number:
        number = f"{at.name} of boot {ledger.boot()}"
    return f"{number}{part}, {int(read(sys_path(path) / 'size')) * 512} bytes"


def read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""


def other_drives(drives: Drives) -> list[str]:
    """Those that are not what they were when the run was begun."""
    was = drives.identities or tuple(map(identity, drives.paths))
    return [
        f"{path} was {before} and is {now or 'not there'}: put the drives where they were, or "
        "begin anew"
        for path, before in zip(drives.paths, was, strict=True)
        if (now := identity(path)) != before
    ]
