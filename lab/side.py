"""A side of a comparison: makes arrays of drives, gives disks on them, loses a drive when told.

    side = sides.make(chosen, study, place, work)
    if why := side.missing(): …                     # said before anything is started
    disks = side.start(drives, spares, disk_bytes)  # one disk for each load
    side.pull(0, 1); side.replace(0, 1)             # member 1 of the first array
    side.stop()                                     # nothing of it is left, and drives are free

All of it works in any `place`: commands go through it, never past it. Each side says all that it
set (`settings`), which goes into the report word for word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


# What has to be done after a crash before a drive may go: seconds, or hours.
RESYNC_DIRTY, RESYNC_ALL = "resync of what was dirty", "resync of everything"


class SideError(Exception):
    """A side did not do what it was told; the message says what it said."""


@dataclass(frozen=True)
class Drive:
    name: str
    path: str  # in the side's place: a block device or a file; `model:…` for who knows such drives
    bytes: int


@dataclass(frozen=True)
class Disk:
    """What a load is given, one of these. Paths are in the side's place.

    A file system of its own (btrfs, zfs) gives a directory: PostgreSQL's data lie in it, without an
    XFS between, as a person would have them; fio is given a file in it. Where a virtual machine
    needs a disk, such a side gives a regular file as the `device`.
    """

    device: str | None = None  # a block device, or a regular file
    directory: str | None = None  # on the side's own file system
    vhost: Path | None = None  # a vhost-user-blk socket
    bytes: int = 0  # filled in by who asked for it; how much of a directory may be used


@dataclass(frozen=True)
class Counters:
    """What an array's loads asked of it since it was started; None where nobody counts that."""

    reads: int | None = None
    writes: int | None = None
    read_bytes: int | None = None
    write_bytes: int | None = None
    pending_bytes: int | None = None  # acknowledged and not put in place yet, as it is now
    # Of a side that does not count what it is asked: what it asked of its drives, rebuilds and all.
    drive_reads: int | None = None
    drive_read_bytes: int | None = None


@dataclass(frozen=True)
class Protection:
    """Comparisons are made between equals of this."""

    losses: int  # of drives that it survives
    write_hole: str  # closed, one of these two, or none to close


class Side(Protocol):
    name: str
    protection: Protection
    pulls_live: bool  # whether a drive can be pulled under load; else the loads rest meanwhile

    def missing(self) -> str | None:
        """Why this place cannot run it, with the fix; None where it can."""

    def capacity_bytes(self, drives: list[Drive]) -> int:
        """What an array of these holds at least: the disks of all sides are as large as the
        smallest of them allows."""

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        """One array of each list of drives, which hold nothing of use; the disks are dealt out to
        the arrays in turn. Returns when the arrays are whole: no first resync is under way."""

    def pull(self, array: int, member: int) -> None:
        """Takes a drive out of an array, as a hand would."""

    def replace(self, array: int, member: int) -> None:
        """A spare takes its place; the rebuild begins, and is not waited for. The drive that was
        out is wiped, and a spare from then on: `pull` and `replace` may follow each other."""

    def states(self) -> list[str]:
        """Of each array: healthy, degraded, degraded-twice, rebuilding 12.5%, waiting,
        checking 12.5%, failed (see `states.py`). A side without redundancy tells one, of all that
        it serves."""

    def rebuild_error(self) -> str | None:
        """Why a rebuild stopped before its end. None also of sides that do not say it, or say it
        when states are asked for."""

    def counters(self) -> Counters | None:
        """Of all arrays; None where nobody counts, neither what it is asked nor what drives are."""

    def pids(self) -> list[int]:
        """In the side's place: its own processes. Kernel threads are counted for every side."""

    def logs(self) -> list[str]:
        """Files in the side's place in which its own programs have said what they had to say."""

    def settings(self) -> dict[str, str]:
        """Everything that was set, and each command that would set it again."""

    def stop(self) -> None:
        """Also after a `start` that failed half-way, and twice."""
