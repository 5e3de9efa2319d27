"""qemu-storage-daemon: one drive for each load, exported by another user-space daemon.

It has no redundancy: it shows what a user-space path to a drive costs, Ashlar's or any other.

Without a virtual machine it exports by FUSE. That of QEMU 7.2 mixes up the data of writes that are
under way together: fio's checksums say so when they are read back.
"""

import re
import shlex
from pathlib import Path

from lab import place as places
from lab import study as studies
from lab.place import Place
from lab.side import Counters, Disk, Drive, SideError
from lab.sides.alone import Served
from lab.sides.blocks import Blocks
from lab.study import Where

PROGRAM = "qemu-storage-daemon"
FUSE_VERSION_MIN = (10, 1)
READY_SECONDS_MAX = 30


class StorageDaemon(Served):
    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        super().__init__(chosen, study, place, work)
        self.blocks = Blocks(place, self.cleanup)
        self.devices: list[str] = []
        self.command = ""

    def missing(self) -> str | None:
        if why := super().missing():
            return why
        if places.programs_missing(self.place, PROGRAM):
            return f"{PROGRAM} is missing: apt-get install qemu-system-common"
        if self.study.where != Where.VM:
            if self.place.run("[ $(id -u) = 0 ]").rc:
                return "loop devices need root: run it with sudo"
            if self.version_number() < FUSE_VERSION_MIN:
                return (
                    "its FUSE export mixes up data in QEMU 7.2, and versions before 10.1 were not "
                    "tried: install a newer one, or take a study in virtual machines"
                )
            if self.place.run("[ -e /dev/fuse ] || modprobe fuse").rc:
                return "there is no /dev/fuse: modprobe fuse"
        return None

    def version_number(self) -> tuple[int, int]:
        found = re.search(r"version (\d+)\.(\d+)", self.version(PROGRAM))
        return (int(found[1]), int(found[2])) if found else (0, 0)

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        chosen = self.dealt(drives, len(disk_bytes))
        self.place.check(f"mkdir -p {self.home}")
        words = [PROGRAM, "--object iothread,id=io"]
        for number, drive in enumerate(chosen):
            words += [self.node(number, drive), self.export(number)]
        self.command = " ".join(words)
        cpus = f"taskset --cpu-list {self.chosen.cores} " if self.chosen.cores else ""
        if self.study.where != Where.VM:  # FUSE puts its file over one that is there
            self.place.check("; ".join(f": >{self.path(number)}" for number in range(len(chosen))))
        self.serve(f"{cpus}{self.command}")
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
        if output.rc or not self.server.running:
            said = self.place.run(f"tail -n 5 {self.home}/log").text
            raise SideError(f"{PROGRAM} did not come up:\n{said}")
        self.note_pid()

    def disk(self, number: int) -> Disk:
        if self.study.where == Where.VM:
            return Disk(vhost=Path(self.path(number)))
        device = places.loop(self.place, self.path(number))
        self.cleanup.callback(places.unloop, self.place, device, self.path(number))
        self.devices.append(device)
        return Disk(device=device)

    def counters(self) -> Counters | None:
        if not self.devices:
            return None
        return self.blocks.counts(self.devices)

    def settings(self) -> dict[str, str]:
        return {
            "version": self.version(PROGRAM),
            "cores": self.chosen.cores or "any",
            "commands": self.command,
        }

    def stop(self) -> None:
        super().stop()
        self.devices = []
