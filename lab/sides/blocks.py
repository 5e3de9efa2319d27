"""Drives as block devices: what they are already, or loop devices on files."""

import shlex
from contextlib import ExitStack

from lab import place as places
from lab.place import Place
from lab.side import Counters, Drive, SideError
from lab.study import Study


OF_MODEL = "drives of kind `model` are for the side `ashlar` alone"


def drives_of_model(study: Study) -> str | None:
    """For sides that know nothing of such drives."""
    return f"{OF_MODEL}: leave this one out" if study.drives.kind == "model" else None


def too_many_loads(study: Study) -> str | None:
    """For sides that give each load a drive."""
    drives = study.array.count * study.array.members
    if study.disks <= drives:
        return None
    return f"each load gets a drive, and {study.disks} loads have {drives}: leave this one out"


class Blocks:
    """The block device of each drive; all of them go with `cleanup`."""

    def __init__(self, place: Place, cleanup: ExitStack):
        self.place = place
        self.cleanup = cleanup
        self.devices: dict[str, str] = {}  # by the drive's name

    def device(self, drive: Drive) -> str:
        if drive.path.startswith("model:"):
            raise SideError(OF_MODEL)
        if drive.name not in self.devices:
            self.devices[drive.name] = self.made(drive)
        return self.devices[drive.name]

    def made(self, drive: Drive) -> str:
        if self.place.run(f"[ -b {shlex.quote(drive.path)} ]").rc == 0:
            return drive.path
        device = places.loop(self.place, drive.path)
        self.cleanup.callback(places.unloop, self.place, device, drive.path)
        return device

    def reads_of_drives(self) -> Counters | None:
        """Of all that were ever taken, so that none is missing once it was replaced. Who has a
        cache of its own, as a file system has, is told by it when memory answered."""
        if not self.devices:
            return None
        its = self.counts(list(self.devices.values()))
        return its and Counters(drive_reads=its.reads, drive_read_bytes=its.read_bytes)

    def counts(self, devices: list[str]) -> Counters | None:
        """As the kernel has them. A partition has its own beneath `class` only.

        Disks are filled before anything is measured: where none of them was ever written, nobody
        counts (queue/iostats is 0; NVMe multipath heads of old kernels), and no read would be
        taken for one that memory answered."""
        names = [device.removeprefix("/dev/") for device in devices]
        totals = [0, 0, 0, 0]
        for line in self.place.check(
            "cat " + " ".join(f"/sys/class/block/{name}/stat" for name in names)
        ).splitlines():
            fields = [int(field) for field in line.split()]
            for at, value in enumerate((fields[0], fields[4], fields[2] * 512, fields[6] * 512)):
                totals[at] += value
        return counted(*totals)


def counted(reads: int, writes: int, read_bytes: int, write_bytes: int) -> Counters | None:
    return Counters(reads, writes, read_bytes, write_bytes, 0) if writes else None
