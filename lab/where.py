"""Whence a load sees the array: `study.Where`, brought up and taken down. `run` knows only this.

    where = where.make(study, work)
    if problems := where.problems(): …       # all of them, before anything is started
    where.start(say)                         # makes the guest, boots one; on the host: nothing
    side = sides.make(chosen, study, where.place, work)    # arrays are made in `where.place`
    arrays, spares = where.drives()
    seats = where.seats(side.start(arrays, spares, where.disk_sizes(…)))
    …loads run in every seat…
    where.leave()                            # the loads are over: virtual machines are gone
    side.stop()
    where.close()                            # nothing is left, whatever came before, also twice

- host   one place, one array, one seat: `place` and the seat's place are both this machine.
- vm     `place` is this machine, and each disk has a virtual machine of its own: a seat each.
- guest  one virtual machine, which is `place` and the seat at once; drives are its emulated NVMe.

A disk comes from the side, a seat from here: what the side calls a vhost socket is a block device
in the guest by then. A load asks only its seat.
"""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Protocol

from lab import study as studies
from lab.place import Host, Place
from lab.progress import Say
from lab.side import Disk, Drive


@dataclass(frozen=True)
class Seat:
    """Where one load sits. Its clock is this machine's, to some milliseconds."""

    name: str  # host, vm0, vm1, …: names what the load leaves in a cell
    place: Place
    disk: Disk  # as seen there: a device or a directory, never a socket


class Where(Protocol):
    place: Place  # where drives and arrays are
    huge_pages: bool  # whether the memory of guests is of those

    def problems(self) -> list[str]:
        """Why it cannot be brought up here, each with its fix."""

    def start(self, say: Say) -> None:
        """Says what it does that takes long."""

    def drives(self) -> tuple[list[list[Drive]], list[Drive]]:
        """One list for each array, and the spares; the same for every side, and made anew: a side
        finds none of what another has left on them."""

    def disks(self) -> int:
        """How many disks the sides give: a seat each."""

    def seats(self, disks: list[Disk]) -> list[Seat]: ...

    def guest_cpu_seconds(self) -> float | None:
        """What the loads have used since they were started: virtual machines, or processes."""

    def storage_cpu_seconds(self) -> float:
        """What serves the seats' disks besides the side: QEMU's own threads, since they began."""

    def consoles(self) -> list[Path]:
        """Of the guests that are there: files of this machine."""

    def leave(self) -> None: ...

    def settings(self) -> dict[str, str]:
        """Everything of the machines that a reader has to know; goes into machine.json."""

    def close(self) -> None: ...


MADE_BY = {
    studies.Where.HOST: ("lab.host", "OnHost"),
    studies.Where.VM: ("lab.in_vms", "InVms"),
    studies.Where.GUEST: ("lab.in_guest", "InGuest"),
}


def make(study: studies.Study, work: Path, place: Host) -> Where:
    """`work` is a directory that is gone afterwards; `place` is this machine, with its ledger."""
    module, name = MADE_BY[study.where]
    return getattr(import_module(module), name)(study, work, place)
