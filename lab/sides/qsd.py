"""qemu-storage-daemon: one drive for each load, exported by another user-space daemon.

It has no redundancy: it shows what a user-space path to a drive costs, Ashlar's or any other.

Without a virtual machine it exports by FUSE. That of QEMU 7.2 mixes up the data of writes that are
under way together: fio's checksums say so when they are read back.
"""

import re
import shlex
from contextlib import ExitStack
from pathlib import Path

from lab import place as places
from lab import study as studies
from lab.place import Place, Running
from lab.side import Counters, Disk, Drive, Protection, SideError
from lab.sides.blocks import Blocks, too_many_loads
from lab.study import Where

PROGRAM = "qemu-storage-daemon"
FUSE_VERSION_MIN = (10, 1)
READY_SECONDS_MAX = 30


class StorageDaemon:
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.chosen, self.study, self.place = chosen, study, place
        self.name = chosen.name
        self.home = work / chosen.name
        self.protection = Protection(0, "none")
        self.cleanup = ExitStack()
        self.blocks = Blocks(place, self.cleanup)
        self.daemon: Running | None = None
        self.devices: list[str] = []
        self.pid = 0
        self.command = ""

    def missing(self) -> str | None:
        if self.study.drives.kind == "model":
            return "drives of kind `model` are for the side `ashlar` alone: leave this one out"
        if why := too_many_loads(self.study):
            return why
        if places.programs_missing(self.place, PROGRAM):
            return f"{PROGRAM} is missing: apt-get install qemu-system-common"
        if self.study.where != Where.VM:
            if self.place.run("[ $(id -u) = 0 ]").rc:
                return "loop devices need root: run it with sudo"
            if self.version() < FUSE_VERSION_MIN:
                return (
                    "its FUSE export mixes up data in QEMU 7.2, and versions before 10.1 were not "
                    "tried: install a newer one, or take a study in virtual machines"
                )
            if self.place.run("[ -e /dev/fuse ] || modprobe fuse").rc:
                return "there is no /dev/fuse: modprobe fuse"
        return None

    def version(self) -> tuple[int, int]:
        found = re.search(r"version (\d+)\.(\d+)", self.place.run(f"{PROGRAM} --version").text)
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def capacity_bytes(self, drives: list[Drive]) -> int:
        return drives[0].bytes

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        chosen = [drives[at % len(drives)][at // len(drives)] for at in range(len(disk_bytes))]
        self.place.check(f"mkdir -p {self.home}")
        words = [PROGRAM, "--object iothread,id=io"]
        for number, drive in enumerate(chosen):
            words += [self.node(number, drive), self.export(number)]
        self.command = " ".join(words)
        cpus = f"taskset --cpu-list {self.chosen.cores} " if self.chosen.cores else ""
        if self.study.where != Where.VM:  # FUSE puts its file over one that is there
            self.place.check("; ".join(f": >{self.path(number)}" for number in range(len(chosen))))
        self.daemon = self.place.spawn(
            f"echo $$ >{self.home}/pid; exec {cpus}{self.command} >{self.home}/log 2>&1"
        )
        self.cleanup.callback(self.stop_daemon)
        self.wait_ready(len(chosen))
        return [self.disk(number) for number in range(len(chosen))]

    def node(self, number: int, drive: Drive) -> str:
        kind = "file" if self.place.run(f"[ -b {shlex.quote(drive.path)} ]").rc else "host_device"
        return (
            f"--blockdev driver={kind},node-name=d{number},aio=io_uring,cache.direct=on,"
            f"discard=unmap,filename={shlex.quote(drive.path)}"
        )

    def export(self, number: int) -> str:
        if self.study.where == Where.VM:
            return (
                f"--export type=vhost-user-blk,id=e{number},node-name=d{number},writable=on,"
                f"iothread=io,addr.type=unix,addr.path={self.path(number)}"
            )
        places.owe(self.place, "mount", self.path(number))
        self.cleanup.callback(places.settle, self.place, "mount", self.path(number))
        self.cleanup.callback(self.place.run, f"umount --lazy {self.path(number)}")
        return (
            f"--export type=fuse,id=e{number},node-name=d{number},mountpoint={self.path(number)},"
            "writable=on,growable=off,allow-other=off"
        )

    def path(self, number: int) -> str:
        return f"{self.home}/e{number}"

    def wait_ready(self, count: int) -> None:
        test = "-S" if self.study.where == Where.VM else "-s"  # a socket; a file with a size
        ready = " && ".join(f"[ {test} {self.path(number)} ]" for number in range(count))
        command = f"tries={10 * READY_SECONDS_MAX}; until {ready}; do tries=$((tries - 1)); "
        output = self.place.run(
            f"{command} [ $tries -gt 0 ] || exit 1; sleep 0.1; done", READY_SECONDS_MAX * 2
        )
        if output.rc or not self.daemon.running:
            said = self.place.run(f"tail -n 5 {self.home}/log").text
            raise SideError(f"{PROGRAM} did not come up:\n{said}")
        self.pid = int(self.place.check(f"cat {self.home}/pid"))

    def disk(self, number: int) -> Disk:
        if self.study.where == Where.VM:
            return Disk(vhost=Path(self.path(number)))
        device = places.loop(self.place, self.path(number))
        self.cleanup.callback(places.unloop, self.place, device, self.path(number))
        self.devices.append(device)
        return Disk(device=device)

    def stop_daemon(self) -> None:
        if self.daemon is not None:
            daemon, self.daemon = self.daemon, None
            places.stop(daemon)

    def pull(self, member: int = 0) -> None:
        raise SideError("one drive alone cannot lose one")

    def replace(self, member: int = 0) -> None:
        raise SideError("one drive alone has nothing to rebuild from")

    def state(self) -> str:
        return "healthy" if self.daemon is not None and self.daemon.running else "failed"

    def counters(self) -> Counters | None:
        if not self.devices:
            return None
        return Counters(*self.blocks.counts(self.devices))

    def pids(self) -> list[int]:
        return [self.pid] if self.pid else []

    def settings(self) -> dict[str, str]:
        version = self.place.run(f"{PROGRAM} --version").text.splitlines()
        return {
            "version": version[0] if version else "",
            "cores": self.chosen.cores or "any",
            "commands": self.command,
        }

    def stop(self) -> None:
        self.cleanup.close()
        self.devices = []
