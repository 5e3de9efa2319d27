"""btrfs with its own RAID 5 or 6: checksums and copy-on-write are on, as they are by default.

It is a file system of its own: loads get a directory of it, and no XFS lies between. Its
documentation says that RAID 5 and 6 are for testing; metadata are mirrored, as it advises.

It has no word for taking a drive out while it is mounted. So one is taken out as its documentation
has it: unmounted, and mounted again with `degraded`; loads rest meanwhile. And it is mounted with
`nodiscard`: with asynchronous discard, its own choice, writes of fio to a degraded array were
answered with errors on Linux 6.18.

On that kernel PostgreSQL does not start on a degraded RAID 5: each fsync is answered with an I/O
error, as is that of `dd conv=fsync` into a new file. Once, what fio wrote to a degraded RAID 5,
without any error, was read as zeroes. Such a cell fails, and is told as that.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from lab import place as places
from lab import states
from lab import study as studies
from lab.place import Place, Running
from lab.side import RESYNC_ALL, Counters, Disk, Drive, Protection, SideError
from lab.sides.blocks import Blocks, drives_of_model

PROFILES = {0: ("raid0", "raid1"), 1: ("raid5", "raid1"), 2: ("raid6", "raid1c3")}
MIRRORS = {2: "raid1", 3: "raid1c3", 4: "raid1c4"}  # by copies
OPTIONS = "nodiscard"
FILL_SECONDS_MAX = 3600
ROOM = 0.85  # what is left of the drives when metadata and unused parts of chunks are taken off


@dataclass(frozen=True)
class Replacement:
    member: int
    running: Running


class Btrfs:
    pulls_live = False

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.study, self.place = study, place
        self.name = chosen.name
        self.home = work / chosen.name
        # A stripe that was being written when power went, and a drive that goes before a scrub,
        # can cost what lay beside it; and nothing says which stripes these are.
        hole = RESYNC_ALL if study.array.parity else "none"
        self.protection = Protection(study.array.losses, hole)
        self.profiles = profiles(study.array)
        self.cleanup = ExitStack()
        self.blocks = Blocks(place, self.cleanup)
        self.members: list[list[Drive]] = []
        self.spares: list[Drive] = []
        self.out: list[set[int]] = []  # of each array, the members that were pulled
        self.replacements: dict[int, Replacement] = {}  # by array; one at a time of each
        self.commands: list[str] = []

    def missing(self) -> str | None:
        array = self.study.array
        if self.profiles is None and array.copies > 1:
            return f"btrfs stripes mirrors of two copies, and not of {array.copies}: leave it out"
        if self.profiles is None:
            return f"btrfs has no RAID with {array.parity} parities, but of 2 at most: leave it out"
        if why := drives_of_model(self.study):
            return why
        loses = set(self.study.states) != {studies.State.HEALTHY}
        if self.study.where == studies.Where.VM and loses:
            # A drive goes while the file system is not mounted, and QEMU has a file of it open.
            return "btrfs loses no drive under virtual machines: --set 'states=[\"healthy\"]'"
        if self.place.run("[ $(id -u) = 0 ]").rc:
            return "mounting needs root: run it with sudo"
        if places.programs_missing(self.place, "mkfs.btrfs", "btrfs"):
            return "mkfs.btrfs is missing: apt-get install btrfs-progs"
        if self.place.run("grep -qw btrfs /proc/filesystems || modprobe -q btrfs").rc:
            return "this kernel has no btrfs: boot one that has, or leave the side out"
        return None

    def capacity_bytes(self, drives: list[Drive]) -> int:
        return int(self.study.array.data * min(drive.bytes for drive in drives) * ROOM)

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        self.members, self.spares = [list(members) for members in drives], list(spares)
        self.out = [set() for _ in drives]
        for drive in self.spares:
            self.blocks.device(drive)  # before anything is mounted: they are let go of after that
        for number, members in enumerate(self.members):
            self.make(number, [self.blocks.device(drive) for drive in members])
        return [self.disk(number, size) for number, size in enumerate(disk_bytes)]

    def make(self, number: int, devices: list[str]) -> None:
        data, metadata = self.profiles
        self.told(f"mkfs.btrfs -q -f -d {data} -m {metadata} {' '.join(devices)}")
        at = self.mount_point(number)
        options = ",".join([OPTIONS, *(f"device={device}" for device in devices)])
        places.mount(self.place, devices[0], at, "btrfs", options)
        self.commands.append(f"mount -t btrfs -o {options} {devices[0]} {at}")
        self.cleanup.callback(places.unmount, self.place, at)
        self.place.check(f"chmod 755 {self.home} {at}")

    def mount_point(self, number: int) -> str:
        return f"{self.home}/fs{number}"

    def disk(self, number: int, size: int) -> Disk:
        at = f"{self.mount_point(number % len(self.members))}/disk{number}"
        if self.study.where == studies.Where.VM:
            self.place.check(f"fallocate -l {size} {at}", timeout=FILL_SECONDS_MAX)
            return Disk(device=at)
        self.place.check(f"mkdir -p {at}")
        return Disk(directory=at)

    def told(self, command: str, timeout: float = 300) -> str:
        self.commands.append(command)
        return self.place.check(command, timeout)

    def pull(self, array: int, member: int) -> None:
        """The loads rest. What is wiped is missing when it is mounted again."""
        self.out[array].add(member)
        gone, at = self.blocks.device(self.members[array][member]), self.mount_point(array)
        places.unmount(self.place, at)
        self.told(f"wipefs -qaf {gone} && btrfs device scan --forget")
        left = [
            self.blocks.device(drive)
            for number, drive in enumerate(self.members[array])
            if number not in self.out[array]
        ]
        options = ",".join([OPTIONS, "degraded", *(f"device={device}" for device in left)])
        places.mount(self.place, left[0], at, "btrfs", options)
        self.commands.append(f"umount {at}; mount -t btrfs -o {options} {left[0]} {at}")

    def replace(self, array: int, member: int) -> None:
        new, old = self.spares.pop(0), self.members[array][member]
        # -r: from the others, as the one that is out answers nothing; -B: not behind our back
        command = f"btrfs replace start -B -f -r {member + 1} {self.blocks.device(new)}"
        command += f" {self.mount_point(array)}"
        self.commands.append(command)
        self.replacements[array] = Replacement(member, self.place.spawn(f"exec {command}"))
        self.members[array][member] = new
        self.spares.append(old)

    def states(self) -> list[str]:
        return list(map(self.state_of, range(len(self.members))))

    def state_of(self, array: int) -> str:
        if replacement := self.replacements.get(array):
            said = self.place.check(f"btrfs replace status -1 {self.mount_point(array)}")
            if replacement.running.running:
                percent = said.split("% done")[0].split()[-1] if "% done" in said else "0.0"
                return states.rebuilding(float(percent))
            if (output := replacement.running.wait(1)).rc:
                raise SideError(f"btrfs could not replace a drive:\n{output.text[-400:]}")
            self.out[array].discard(replacement.member)
            del self.replacements[array]
        return states.without(len(self.out[array]))

    def rebuild_error(self) -> str | None:
        return None

    def counters(self) -> Counters | None:
        return self.blocks.reads_of_drives()  # nobody counts what it is asked

    def pids(self) -> list[int]:
        return []

    def logs(self) -> list[str]:
        return []  # what the kernel says is no side's own

    def settings(self) -> dict[str, str]:
        data, metadata = self.profiles
        return {
            "version": self.place.run("btrfs --version").text.strip(),
            "data": data,
            "metadata": metadata,
            "chunk": "64 KiB, which is fixed",
            "copy-on-write and checksums": "on",
            "after a crash": "a scrub of everything finds the stripes that were being written; a "
            "person has to start it",
            "discard": "off: with it, a degraded array answered writes with errors (Linux 6.18)",
            "commands": "\n".join(dict.fromkeys(self.commands)),
        }

    def stop(self) -> None:
        while self.replacements:
            array, replacement = self.replacements.popitem()
            self.place.run(f"btrfs replace cancel {self.mount_point(array)}")
            places.stop(replacement.running)
        self.cleanup.close()


def profiles(array: studies.Array) -> tuple[str, str] | None:
    """Of data and of metadata; None where it has none."""
    if array.copies == 1:
        return PROFILES.get(array.parity)
    if array.data == 1:
        return MIRRORS[array.copies], MIRRORS[array.copies]
    return ("raid10", "raid1") if array.copies == 2 else None
