"""A side of a comparison: makes arrays of drives, gives disks on them, loses a drive when told.

    side = sides.make(chosen, study, place, work)
    if why := side.missing(): …                     # said before anything is started
    disks = side.start(drives, disk_bytes)          # one disk for each load
    side.pull(); side.pull(second); side.replace()  # on the first array
    side.stop()                                     # nothing of it is left, and drives are free

Each side says all that it set (`settings`), which goes into the report word for word.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol


@dataclass(frozen=True)
class Drive:
    name: str
    path: str  # in the side's place; `model:…` is for who knows such drives
    bytes: int


@dataclass(frozen=True)
class Disk:
    """What a load is given: a block device in the side's place, or a vhost-user-blk socket."""

    device: str | None = None
    vhost: Path | None = None


@dataclass(frozen=True)
class Counters:
    """What an array's loads asked of it since it was started."""

    reads: int
    writes: int
    read_bytes: int
    write_bytes: int


@dataclass(frozen=True)
class Protection:
    """Comparisons are made between equals of this."""

    losses: int  # of drives that it survives
    write_hole: str  # closed, resync (after a crash, healthy), or none to close


class Side(Protocol):
    name: str
    protection: Protection

    def missing(self) -> str | None:
        """Why this machine cannot run it, with the fix; None where it can."""

    def start(self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]) -> list[Disk]:
        """One array of each list of drives; the disks are dealt out to the arrays in turn."""

    def pull(self, member: int = 0) -> None:
        """Takes a drive out of the first array, as a hand would."""

    def replace(self, member: int = 0) -> None:
        """The spare takes its place; the rebuild begins, and is not waited for."""

    def state(self) -> str:
        """Of the first array: healthy, degraded, rebuilding 12.5%, failed."""

    def counters(self) -> Counters: ...

    def pids(self) -> list[int]:
        """On this host: whose CPU time is the storage's. Threads of the kernel count too."""

    def settings(self) -> dict[str, str]:
        """Everything that was set, and each command that would set it again."""

    def stop(self) -> None: ...
