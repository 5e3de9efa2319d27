"""SPDK's vhost target, where it is installed: one drive for each virtual machine, polled.

Its RAID 5 (raid5f) takes whole stripes only, on which no file system works, and its RAID 1 and 0
are other geometries: so it stands here for a drive without redundancy, next to `raw`.
"""

import json
import shlex
from pathlib import Path

from lab import place as places
from lab import study as studies
from lab.pinning import cpus_of
from lab.place import Place
from lab.side import Counters, Disk, Drive
from lab.sides.alone import Served
from lab.study import Where

TARGET, CALL = "spdk_tgt", "spdk_rpc"
READY_SECONDS_MAX = 60
GET_IT = (
    "build it from github.com/spdk/spdk (./configure --with-uring && make), and link its "
    f"build/bin/spdk_tgt and scripts/rpc.py as {TARGET} and {CALL} into the PATH"
)


class Spdk(Served):
    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        super().__init__(chosen, study, place, work)
        self.commands: list[str] = []

    def missing(self) -> str | None:
        if self.study.where != Where.VM:
            return 'SPDK serves virtual machines here: it takes part where `where = "vm"`'
        if why := super().missing():
            return why
        if places.programs_missing(self.place, TARGET, CALL):
            return f"{TARGET} is missing: {GET_IT}"
        return None

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        self.place.check(f"mkdir -p {self.home}")
        mask = hex(sum(1 << cpu for cpu in cpus_of(self.chosen.cores or "0")))
        command = f"{TARGET} -r {self.home}/rpc.sock -S {self.home} -m {mask}"
        self.commands.append(command)
        self.serve(command)
        self.place.check(
            f"{CALL} -s {self.home}/rpc.sock -t {READY_SECONDS_MAX} framework_wait_init",
            timeout=READY_SECONDS_MAX + 5,
        )
        self.note_pid()
        chosen = self.dealt(drives, len(disk_bytes))
        for number, drive in enumerate(chosen):
            self.call(f"bdev_uring_create {shlex.quote(drive.path)} d{number} 512")
            self.call(f"vhost_create_blk_controller v{number} d{number}")
        return [Disk(vhost=self.home / f"v{number}") for number in range(len(chosen))]

    def call(self, words: str) -> str:
        self.commands.append(f"rpc.py {words}")
        return self.place.check(f"{CALL} -s {self.home}/rpc.sock {words}")

    def counters(self) -> Counters | None:
        said = json.loads(self.place.check(f"{CALL} -s {self.home}/rpc.sock bdev_get_iostat"))
        names = ("num_read_ops", "num_write_ops", "bytes_read", "bytes_written")
        return Counters(*(sum(its[name] for its in said["bdevs"]) for name in names), 0)

    def settings(self) -> dict[str, str]:
        return {
            "version": self.version(TARGET),
            "cores": self.chosen.cores or "0",
            "commands": "\n".join(dict.fromkeys(self.commands)),
        }
