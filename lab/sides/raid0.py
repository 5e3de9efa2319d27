"""RAID 0 of all drives of an array: `raw` with `raid0 = true`. What any one of them loses, all lose.

The kernel makes it, and does nothing but divide: md where there is md, else a stripe of the device
mapper. So it stands for what all the drives do behind one device, with nothing that protects them.
"""

from contextlib import ExitStack
from pathlib import Path

from lab import place as places
from lab import states
from lab import study as studies
from lab.place import Place
from lab.side import Counters, Disk, Drive, SideError
from lab.sides.alone import Alone
from lab.sides.blocks import Blocks, drives_of_model
from lab.sides.mdraid import Mdraid
from lab.study import State

SECTOR_BYTES = 512
DEVICE_SECONDS_MAX = 10


class Raid0(Alone):
    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        striped = striped_of(study)
        super().__init__(chosen, striped, place, work)
        # The first that is there; both for what is asked before anybody knows.
        self.md, self.mapper = Mdraid(chosen, striped, place, work), Mapper(striped, place)
        self.way: Mdraid | Mapper | None = None

    def missing(self) -> str | None:
        if why := drives_of_model(self.study):
            return why
        whys = []
        for way in (self.md, self.mapper):
            if not (why := way.missing()):
                return None
            whys.append(why)
        return f"RAID 0 takes md or the device mapper: {'; '.join(dict.fromkeys(reversed(whys)))}"

    def capacity_bytes(self, drives: list[Drive]) -> int:
        """Of md, which keeps some for its labels: the device mapper keeps nothing."""
        return self.md.capacity_bytes(drives)

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        if why := self.missing():
            raise SideError(f"{self.name}: {why}")
        self.way = self.mapper if self.md.missing() else self.md
        self.cleanup.callback(self.way.stop)
        return self.way.start(drives, [], disk_bytes)

    def states(self) -> list[str]:
        return self.way.states()

    def counters(self) -> Counters | None:
        return self.way.counters()

    def settings(self) -> dict[str, str]:
        drives = f"{self.study.array.data} of each array as one (RAID 0), by {self.way.called}"
        return {"drives": f"{drives}: any of them that is lost loses all"} | self.way.settings()


def striped_of(study: studies.Study) -> studies.Study:
    """The same drives in each array, all of them for data."""
    array = study.array.model_copy(update={"data": study.array.members, "parity": 0, "copies": 1})
    return study.model_copy(update={"array": array})


class Mapper:
    """Stripes of the device mapper (Documentation/admin-guide/device-mapper/striped.rst), one for
    each disk: those of one array follow each other on all of its drives."""

    called = "the device mapper"

    def __init__(self, study: studies.Study, place: Place):
        self.study, self.place = study, place
        self.cleanup = ExitStack()
        self.blocks = Blocks(place, self.cleanup)
        self.names: list[str] = []
        self.devices: list[str] = []
        self.commands: list[str] = []

    def missing(self) -> str | None:
        if self.place.run("[ $(id -u) = 0 ]").rc:
            return "making arrays needs root: run it with sudo"
        there = "grep -qw device-mapper /proc/misc"
        if self.place.run(f"{there} || modprobe -q dm-mod && {there}").rc:
            return "this kernel has no device mapper (modprobe dm-mod fails)"
        if places.programs_missing(self.place, "dmsetup"):
            return "dmsetup is missing: apt-get install dmsetup"
        return None

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        # What is made last goes first: no loop device goes before the stripe that holds it.
        arrays = [list(map(self.blocks.device, members)) for members in drives]
        begins = [0] * len(arrays)  # on each drive of an array
        for number, size in enumerate(disk_bytes):
            array = number % len(arrays)
            share = share_of(size, self.study.array)
            self.make(number, table(arrays[array], self.study.array.chunk, begins[array], share))
            begins[array] += share
        return [Disk(device=device) for device in self.devices]

    def make(self, number: int, rule: str) -> None:
        name = f"ashlar-lab-{places.TOKEN}-{number}"
        places.owe(self.place, "dm", name)
        self.cleanup.callback(self.end, name)
        self.commands.append(f"dmsetup create {name} --table '{rule}'")
        self.place.check(self.commands[-1])
        said = self.place.check(f"dmsetup info -c --noheadings -o blkdevname {name}")
        device = f"/dev/{said.strip()}"
        self.place.check(
            f"tries={10 * DEVICE_SECONDS_MAX}; until [ -b {device} ]; do "
            "tries=$((tries - 1)); [ $tries -gt 0 ] || exit 1; sleep 0.1; done"
        )
        self.names.append(name)
        self.devices.append(device)

    def states(self) -> list[str]:
        """One, of all that it serves."""
        said = [self.place.check(f"dmsetup status {name}") for name in self.names]
        return [State.HEALTHY if all(map(is_whole, said)) else states.FAILED]

    def counters(self) -> Counters | None:
        return self.blocks.counts(self.devices)

    def settings(self) -> dict[str, str]:
        return {
            "version": self.place.run("dmsetup version").text.strip(),
            "commands": "\n".join(self.commands),
        }

    def end(self, name: str) -> None:
        """Also of one that was not made."""
        self.place.check(
            f"dmsetup info {name} >/dev/null 2>&1 || exit 0; "
            f"tries=50; until dmsetup remove {name}; do "
            "tries=$((tries - 1)); [ $tries -gt 0 ] || exit 1; sleep 0.2; done"
        )
        places.settle(self.place, "dm", name)

    def stop(self) -> None:
        self.names, self.devices = [], []
        self.cleanup.close()


# Decisions


def share_of(disk_bytes: int, array: studies.Array) -> int:
    """What each drive gives to a disk: whole chunks, or the device mapper refuses."""
    return -(-disk_bytes // (array.data * array.chunk)) * array.chunk


def table(devices: list[str], chunk_bytes: int, begin_bytes: int, share_bytes: int) -> str:
    """4 drives, 64 KiB chunks, 1 MiB of each: `0 8192 striped 4 128 /dev/a 0 /dev/b 0 …`."""
    sectors = len(devices) * share_bytes // SECTOR_BYTES
    words = [f"0 {sectors} striped {len(devices)} {chunk_bytes // SECTOR_BYTES}"]
    return " ".join(words + [f"{device} {begin_bytes // SECTOR_BYTES}" for device in devices])


def is_whole(status: str) -> bool:
    """`0 8192 striped 4 7:0 7:1 7:2 7:3 1 AAAA`: a letter for each drive, D once it has failed."""
    return set(status.split()[-1]) == {"A"}
