"""Drives without anything that protects them: what the others are measured against. One by itself
for each load, or all of an array as RAID 0 (`raid0.py`).
"""

from pathlib import Path

from lab import place as places
from lab import study as studies
from lab.place import Place
from lab.side import Counters, Disk, Drive
from lab.sides.alone import Alone
from lab.sides.blocks import Blocks
from lab.sides.raid0 import Raid0


def made(chosen: studies.Side, study: studies.Study, place: Place, work: Path) -> Alone:
    return (Raid0 if chosen.raid0 else Raw)(chosen, study, place, work)


class Raw(Alone):
    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        super().__init__(chosen, study, place, work)
        self.blocks = Blocks(place, self.cleanup)
        self.devices: list[str] = []

    def missing(self) -> str | None:
        if why := super().missing():
            return why
        if self.study.drives.kind == "file" and self.place.run("[ $(id -u) = 0 ]").rc:
            return "loop devices on drive files need root: run it with sudo"
        if self.study.drives.kind == "file" and places.programs_missing(self.place, "losetup"):
            return "losetup is missing: apt-get install mount"
        return None

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        self.devices = list(map(self.blocks.device, self.dealt(drives, len(disk_bytes))))
        return [Disk(device=device) for device in self.devices]

    def counters(self) -> Counters | None:
        return self.blocks.counts(self.devices)

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
        super().stop()
        self.devices = []
