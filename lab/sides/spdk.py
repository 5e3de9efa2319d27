"""SPDK's vhost target, where it is installed: one drive for each virtual machine, polled.

Its RAID 5 (raid5f) takes whole stripes only, on which no file system works, and its RAID 1 and 0
are other geometries: so it stands here for a drive without redundancy, next to `raw`.
"""

import json
import shlex
from contextlib import ExitStack
from pathlib import Path

from lab import place as places
from lab import study as studies
from lab.place import Place, Running
from lab.side import Counters, Disk, Drive, Protection, SideError
from lab.sides.blocks import too_many_loads
from lab.study import Where

TARGET, CALL = "spdk_tgt", "spdk_rpc"
READY_SECONDS_MAX = 60
GET_IT = (
    "build it from github.com/spdk/spdk (./configure --with-uring && make), and link its "
    f"build/bin/spdk_tgt and scripts/rpc.py as {TARGET} and {CALL} into the PATH"
)


class Spdk:
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.chosen, self.study, self.place = chosen, study, place
        self.name = chosen.name
        self.home = work / chosen.name
        self.protection = Protection(0, "none")
        self.cleanup = ExitStack()
        self.target: Running | None = None
        self.pid = 0
        self.count = 0
        self.commands: list[str] = []

    def missing(self) -> str | None:
        if self.study.where != Where.VM:
            return 'SPDK serves virtual machines here: it takes part where `where = "vm"`'
        if self.study.drives.kind == "model":
            return "drives of kind `model` are for the side `ashlar` alone: leave this one out"
        if why := too_many_loads(self.study):
            return why
        if places.programs_missing(self.place, TARGET, CALL):
            return f"{TARGET} is missing: {GET_IT}"
        return None

    def capacity_bytes(self, drives: list[Drive]) -> int:
        return drives[0].bytes

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        self.place.check(f"mkdir -p {self.home}")
        mask = hex(sum(1 << cpu for cpu in cpus(self.chosen.cores or "0")))
        command = f"{TARGET} -r {self.home}/rpc.sock -S {self.home} -m {mask}"
        self.commands.append(command)
        self.target = self.place.spawn(
            f"echo $$ >{self.home}/pid; exec {command} >{self.home}/log 2>&1"
        )
        self.cleanup.callback(self.stop_target)
        self.place.check(
            f"{CALL} -s {self.home}/rpc.sock -t {READY_SECONDS_MAX} framework_wait_init",
            timeout=READY_SECONDS_MAX + 5,
        )
        self.pid = int(self.place.check(f"cat {self.home}/pid"))
        self.count = len(disk_bytes)
        for number in range(self.count):
            drive = drives[number % len(drives)][number // len(drives)]
            self.call(f"bdev_uring_create {shlex.quote(drive.path)} d{number} 512")
            self.call(f"vhost_create_blk_controller v{number} d{number}")
        return [Disk(vhost=self.home / f"v{number}") for number in range(self.count)]

    def call(self, words: str) -> str:
        self.commands.append(f"rpc.py {words}")
        return self.place.check(f"{CALL} -s {self.home}/rpc.sock {words}")

    def stop_target(self) -> None:
        if self.target is not None:
            target, self.target = self.target, None
            places.stop(target)

    def pull(self, member: int = 0) -> None:
        raise SideError("one drive alone cannot lose one")

    def replace(self, member: int = 0) -> None:
        raise SideError("one drive alone has nothing to rebuild from")

    def state(self) -> str:
        return "healthy" if self.target is not None and self.target.running else "failed"

    def counters(self) -> Counters | None:
        said = json.loads(self.place.check(f"{CALL} -s {self.home}/rpc.sock bdev_get_iostat"))
        names = ("num_read_ops", "num_write_ops", "bytes_read", "bytes_written")
        return Counters(*(sum(its[name] for its in said["bdevs"]) for name in names))

    def pids(self) -> list[int]:
        return [self.pid] if self.pid else []

    def settings(self) -> dict[str, str]:
        version = self.place.run(f"{TARGET} --version").text.splitlines()
        return {
            "version": version[0] if version else "",
            "cores": self.chosen.cores or "0",
            "commands": "\n".join(dict.fromkeys(self.commands)),
        }

    def stop(self) -> None:
        self.cleanup.close()


def cpus(text: str) -> list[int]:
    """Of a list such as 0,2-4."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last or first) + 1)
    return found
