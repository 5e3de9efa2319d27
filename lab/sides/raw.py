"""One drive by itself, without anything that protects it: what the others are measured against."""

from contextlib import ExitStack
from pathlib import Path

from lab import place as places
from lab import study as studies
from lab.place import Place
from lab.side import Counters, Disk, Drive, Protection, SideError
from lab.sides.blocks import Blocks, too_many_loads


class Raw:
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.study, self.place = study, place
        self.name = chosen.name
        self.protection = Protection(0, "none")
        self.cleanup = ExitStack()
        self.devices: list[str] = []

    def missing(self) -> str | None:
        if self.study.drives.kind == "model":
            return "drives of kind `model` are for the side `ashlar` alone: leave this one out"
        if why := too_many_loads(self.study):
            return why
        if self.study.drives.kind == "file" and self.place.run("[ $(id -u) = 0 ]").rc:
            return "loop devices on drive files need root: run it with sudo"
        if self.study.drives.kind == "file" and places.programs_missing(self.place, "losetup"):
            return "losetup is missing: apt-get install mount"
        return None

    def capacity_bytes(self, drives: list[Drive]) -> int:
        return drives[0].bytes

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        blocks = Blocks(self.place, self.cleanup)
        for number in range(len(disk_bytes)):
            members = drives[number % len(drives)]
            self.devices.append(blocks.device(members[number // len(drives)]))
        self.blocks = blocks
        return [Disk(device=device) for device in self.devices]

    def pull(self, member: int = 0) -> None:
        raise SideError("one drive alone cannot lose one")

    def replace(self, member: int = 0) -> None:
        raise SideError("one drive alone has nothing to rebuild from")

    def state(self) -> str:
        return "healthy"

    def counters(self) -> Counters | None:
        return Counters(*self.blocks.counts(self.devices))

    def pids(self) -> list[int]:
        return []

    def settings(self) -> dict[str, str]:
        return {
            "drives": "one for each load, alone",
            "file": "through a loop device with direct I/O" if self.study.drives.kind == "file"
            else "none: the drive itself",
            "I/O scheduler": self.schedulers(),
        }  # fmt: skip

    def schedulers(self) -> str:
        files = [f"/sys/block/{Path(each).name}/queue/scheduler" for each in self.devices]
        return self.place.run(f"cat {' '.join(files)}").text.strip() if files else ""

    def stop(self) -> None:
        self.cleanup.close()
        self.devices = []
