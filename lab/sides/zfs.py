"""ZFS with raidz, where it is installed: its own file system, with its checksums.

Its documentation advises for PostgreSQL a record of the size of what is written: 16 KiB, which is
two pages of the database. Everything else is as it is by default; `sync` is what callers ask for.
"""

import re
import secrets
from contextlib import ExitStack
from pathlib import Path

from lab import place as places
from lab import states
from lab import study as studies
from lab.place import Place
from lab.side import Counters, Disk, Drive, Protection
from lab.sides.blocks import Blocks, drives_of_model

LEVELS = {0: "", 1: "raidz1", 2: "raidz2", 3: "raidz3"}
ROOM = 0.7  # what raidz leaves of small records, and what a pool keeps for itself
RECORD = "16K"
SECTOR_SHIFT = 12
OUT = r"^\s+\S+\s+(?:OFFLINE|FAULTED|UNAVAIL|REMOVED)\b"  # a drive's line in `zpool status`


class Zfs:
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.study, self.place = study, place
        self.name = chosen.name
        self.home = work / chosen.name
        # Whole stripes only, never in place: there is no write hole to close.
        self.protection = Protection(study.array.losses, "none")
        self.cleanup = ExitStack()
        self.blocks = Blocks(place, self.cleanup)
        self.members: list[list[Drive]] = []
        self.spares: list[Drive] = []
        self.commands: list[str] = []
        self.pools = f"ashlar_lab_{secrets.token_hex(4)}"

    def missing(self) -> str | None:
        if self.study.array.parity not in LEVELS:
            parity = self.study.array.parity
            return f"ZFS has no raidz with {parity} parities, but of 3 at most: leave it out"
        if why := drives_of_model(self.study):
            return why
        if self.study.where == studies.Where.VM:
            return "volumes of ZFS for virtual machines are not written: leave this one out"
        if places.programs_missing(self.place, "zpool", "zfs"):
            return "zpool is missing: apt-get install zfsutils-linux (in Debian's contrib)"
        if self.place.run("[ -e /dev/zfs ] || modprobe zfs").rc:
            return "this kernel has no ZFS: apt-get install zfs-dkms, then modprobe zfs"
        if self.place.run("[ $(id -u) = 0 ]").rc:
            return "a pool needs root: run it with sudo"
        return None

    def capacity_bytes(self, drives: list[Drive]) -> int:
        return int(self.study.array.data * min(drive.bytes for drive in drives) * ROOM)

    def pool(self, number: int) -> str:
        """No pool of somebody's has such a name."""
        return f"{self.pools}_{number}"

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        self.members, self.spares = [list(members) for members in drives], list(spares)
        for drive in self.spares:
            self.blocks.device(drive)  # before there is a pool: they are let go of after that
        for number, members in enumerate(self.members):
            devices = vdevs(self.study.array, [self.blocks.device(drive) for drive in members])
            at = f"{self.home}/pool{number}"
            places.owe(self.place, "mount", at)
            places.owe(self.place, "zpool", self.pool(number))
            self.told(
                f"zpool create -f -o ashift={SECTOR_SHIFT} -o cachefile=none -m {at} "
                f"{self.pool(number)} {devices}"
            )
            self.cleanup.callback(places.settle, self.place, "mount", at)
            self.cleanup.callback(places.settle, self.place, "zpool", self.pool(number))
            self.cleanup.callback(self.told, f"zpool destroy -f {self.pool(number)}")
            self.told(f"zfs set recordsize={RECORD} {self.pool(number)}")
        return [self.disk(number) for number in range(len(disk_bytes))]

    def disk(self, number: int) -> Disk:
        at = f"{self.home}/pool{number % len(self.members)}/disk{number}"
        self.place.check(f"mkdir -p {at} && chmod -R a+rx {self.home}")
        return Disk(directory=at)

    def told(self, command: str) -> str:
        self.commands.append(command)
        return self.place.check(command, timeout=300)

    def pull(self, array: int, member: int) -> None:
        device = self.blocks.device(self.members[array][member])
        self.told(f"zpool offline -f {self.pool(array)} {device}")

    def replace(self, array: int, member: int) -> None:
        new, old = self.spares.pop(0), self.members[array][member]
        self.place.check(f"zpool labelclear -f {self.blocks.device(new)} || true")
        devices = f"{self.blocks.device(old)} {self.blocks.device(new)}"
        self.told(f"zpool replace -f {self.pool(array)} {devices}")
        self.members[array][member] = new
        self.spares.append(old)

    def states(self) -> list[str]:
        pools = map(self.pool, range(len(self.members)))
        return [state(self.place.check(f"zpool status {pool}")) for pool in pools]

    def rebuild_error(self) -> str | None:
        return None

    def counters(self) -> Counters | None:
        return self.blocks.reads_of_drives()  # nobody counts what it is asked

    def pids(self) -> list[int]:
        return []

    def logs(self) -> list[str]:
        return []  # what the kernel says is no side's own

    def settings(self) -> dict[str, str]:
        return {
            "version": self.place.run("zfs version").text.strip().replace("\n", ", "),
            "recordsize": RECORD,
            "ashift": str(SECTOR_SHIFT),
            "commands": "\n".join(dict.fromkeys(self.commands)),
        }

    def stop(self) -> None:
        self.cleanup.close()


def vdevs(array: studies.Array, devices: list[str]) -> str:
    """As `zpool create` takes them."""
    if array.copies == 1:
        return " ".join([LEVELS[array.parity], *devices])
    sets = range(0, len(devices), array.copies)
    return " ".join(" ".join(["mirror", *devices[at : at + array.copies]]) for at in sets)


def state(said: str) -> str:
    """Of a pool, as `zpool status` has it."""
    if "resilver in progress" in said:
        done = re.search(r"([\d.]+)% done", said)
        return states.rebuilding(float(done[1]) if done else 0.0)
    found = re.search(r"state: (\w+)", said)
    if not found or found[1] not in ("ONLINE", "DEGRADED"):
        return states.FAILED
    return states.without(len(re.findall(OUT, said, re.MULTILINE)))
