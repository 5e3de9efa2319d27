"""The demo's drives: files made for it, or real ones that a person named.

A real drive that is in use is never taken. One that carries data is taken only with FORCE=1.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from demo.settings import MEMBERS, Refusal, Settings

EDGE_BYTES = 1 << 20  # partition tables, file systems and RAID labels all begin or end a drive


@dataclass(frozen=True)
class Drive:
    name: str
    path: Path
    bytes: int


def real(settings: Settings) -> list[Drive]:
    """The drives that a person named; none if files are to stand in for them."""
    return [
        Drive(f"d{number}", Path(path), examine(Path(path), settings.force))
        for number, path in enumerate(settings.drives)
    ]


def make_files(settings: Settings, directory: Path) -> list[Drive]:
    """Five drives for the array, and a sixth to replace the one that is pulled."""
    drives = []
    for number in range(MEMBERS + 1):
        path = directory / f"d{number}.img"
        with open(path, "wb") as file:
            file.truncate(settings.drive_bytes)
        drives.append(Drive(f"d{number}", path, settings.drive_bytes))
    return drives


def examine(path: Path, force: bool) -> int:
    """The drive's size, if we may have it."""
    try:
        mode = path.stat().st_mode
        # O_EXCL on a block device fails while it, or a partition of it, is mounted or claimed
        exclusive = os.O_EXCL if stat.S_ISBLK(mode) else 0
        file = os.open(path, os.O_RDWR | exclusive)
    except FileNotFoundError:
        raise Refusal(f"{path} is not there: see lsblk for the drives of this machine") from None
    except PermissionError:
        raise Refusal(f"{path} may not be opened: run as root (sudo make demo DRIVES=…)") from None
    except OSError as error:
        raise Refusal(f"{path} is in use ({error.strerror}): unmount it or name another") from None
    try:
        size = os.lseek(file, 0, os.SEEK_END)
        edges = os.pread(file, EDGE_BYTES, 0) + os.pread(
            file, EDGE_BYTES, max(size - EDGE_BYTES, 0)
        )
    finally:
        os.close(file)
    if any(edges) and not force:
        raise Refusal(f"{path} carries data: name another drive, or overwrite it with FORCE=1")
    return size
