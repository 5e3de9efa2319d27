"""Ashlar: its daemon, an array of any level and policy, and a volume of it for each load."""

import json
import os
import shlex
import shutil
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lab import paths, states
from lab import place as places
from lab import study as studies
from lab.place import Host, Place, Running
from lab.side import RESYNC_ALL, RESYNC_DIRTY, Counters, Disk, Drive, Protection, SideError
from lab.study import Where

READY_SECONDS_MAX = 60
COMMAND_SECONDS_MAX = 300
LABEL_BYTES = 64 << 20  # of each drive, for labels, journal and bitmaps: more than they take
WRITE_HOLE = {"journal": "closed", "bitmap": RESYNC_DIRTY, "none": RESYNC_ALL}
FREE_NBD = (
    "for each in /sys/block/nbd*; do "
    "[ ! -d $each ] || [ -e $each/pid ] || { basename $each; break; }; done"
)
MEMBERS_MAX = 64
CHUNK_BYTES_MIN, CHUNK_BYTES_MAX = 16 << 10, 1 << 20


class Ashlar:
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.chosen, self.study, self.place = chosen, study, place
        self.name = chosen.name
        self.home = work / chosen.name
        self.socket = self.home / "ashlar.sock"
        self.program = shlex.quote(program(place, work))
        array = study.array
        usual = "journal" if array.parity else "bitmap" if array.losses else "none"
        self.policy = chosen.policy or usual
        hole = WRITE_HOLE[self.policy] if array.losses else "none"
        self.protection = Protection(array.losses, hole)
        self.cleanup = ExitStack()
        self.daemon: Running | None = None
        self.pid = 0
        self.members: list[list[Drive]] = []
        self.spares: list[Drive] = []
        self.commands: list[str] = []
        self.shown: list[dict] = []  # of each array, when states were asked for

    def missing(self) -> str | None:
        if isinstance(self.place, Host) and not host_program().exists():
            return f"{host_program()} is not there: run `make build`, or set ASHLAR to the program"
        if self.study.array.members > MEMBERS_MAX:
            return f"an array of Ashlar has {MEMBERS_MAX} drives at most: make `data` smaller"
        if not CHUNK_BYTES_MIN <= self.study.array.chunk <= CHUNK_BYTES_MAX:
            return "chunks of Ashlar are of 16K to 1M: say another `chunk` in [array]"
        kind = self.export_kind()
        if kind in ("fuse", "ublk", "nbd") and self.place.run("[ $(id -u) = 0 ]").rc:
            return f"an export of kind {kind} needs root: run it with sudo"
        needs = {
            "fuse": ("/dev/fuse", "modprobe fuse"),
            "ublk": ("/dev/ublk-control", "modprobe ublk_drv (Linux 6.5 or later)"),
            "nbd": ("/dev/nbd0", "modprobe nbd, and install nbd-client"),
        }
        if kind in needs:
            device, fix = needs[kind]
            if self.place.run(f"[ -e {device} ] || {fix.split(' (')[0].split(',')[0]}").rc:
                return f"there is no {device}: {fix}, or give the side another `export`"
        if kind == "nbd" and places.programs_missing(self.place, "nbd-client"):
            return "nbd-client is missing: apt-get install nbd-client"
        return None

    def export_kind(self) -> str:
        if self.chosen.export:
            return self.chosen.export
        if self.study.where == Where.VM:
            return "vhost-user-blk"
        return "ublk" if self.place.run("[ -e /dev/ublk-control ]").rc == 0 else "fuse"

    def capacity_bytes(self, drives: list[Drive]) -> int:
        smallest = min(drive.bytes for drive in drives) - LABEL_BYTES
        return self.study.array.data * smallest * (98 if self.chosen.integrity else 100) // 100

    # The daemon

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        self.members, self.spares = [list(members) for members in drives], list(spares)
        # A daemon attaches what it had, as soon as it is there; these drives are blank.
        self.place.check(f"rm -rf {self.home}/state")
        self.start_daemon()
        array = self.study.array
        words = f"--level {level(array)} --chunk {array.chunk} --policy {self.policy} --force"
        words += " --integrity" * self.chosen.integrity
        for number, members in enumerate(self.members):
            for drive in members:
                self.ashlar(f"drive attach {shlex.quote(drive.path)} --name {drive.name} --force")
            names = ",".join(drive.name for drive in members)
            self.ashlar(f"array create a{number} --drives {names} {words}")
        for number, size in enumerate(disk_bytes):
            array_name = f"a{number % len(drives)}"
            self.ashlar(f"volume create v{number} --array {array_name} --size {size}")
        self.wait_whole()
        return [self.disk(number) for number in range(len(disk_bytes))]

    def start_daemon(self) -> None:
        self.place.check(f"mkdir -p {self.home} && chmod 755 {self.home}")
        command = (
            f"exec {self.program} serve --state {self.home}/state --socket {self.socket} "
            f"--cores {self.cores}"
        )
        self.commands.append(command.removeprefix("exec "))
        self.daemon = self.place.spawn(f"echo $$ >{self.home}/pid; {command} >{self.log} 2>&1")
        self.cleanup.callback(self.stop_daemon)
        deadline = time.monotonic() + READY_SECONDS_MAX
        while self.place.run(f"{self.program} --socket {self.socket} status").rc:
            if not self.daemon.running or time.monotonic() > deadline:
                said = self.place.run(f"tail -5 {self.log}").text
                raise SideError(f"the daemon of {self.name} did not come up:\n{said}")
            time.sleep(0.1)
        self.pid = int(self.place.check(f"cat {self.home}/pid"))

    @property
    def cores(self) -> str:
        return self.chosen.cores or "0"

    @property
    def log(self) -> Path:
        return self.home / "ashlar.log"

    def stop_daemon(self) -> None:
        if self.daemon is not None:
            daemon, self.daemon = self.daemon, None
            output = places.stop(daemon)
            if output is None:
                raise SideError(f"the daemon of {self.name} did not end and was killed")

    def ashlar(self, words: str, timeout: float = COMMAND_SECONDS_MAX) -> str:
        if not words.endswith("-o json"):
            self.commands.append(f"ashlar {words}")
        return self.place.check(f"{self.program} --socket {self.socket} {words}", timeout)

    def show_all(self) -> list[dict]:
        """One process for all arrays: it is one each second, beside what is measured."""
        its = {one["name"]: one for one in json.loads(self.ashlar("array list -o json"))}
        return [its[f"a{number}"] for number in range(len(self.members))]

    def wait_whole(self) -> None:
        """Until there is no first resync under way, which only policy `none` may have."""
        deadline = time.monotonic() + COMMAND_SECONDS_MAX
        while busy := [
            its for its in self.show_all() if its["state"] != "optimal" or its["resync"]
        ]:
            if time.monotonic() > deadline:
                told = ", ".join(f"{its['name']} is {its['state']}" for its in busy)
                raise SideError(f"arrays of {self.name} did not become whole: {told}")
            time.sleep(0.2)

    # Exports

    def disk(self, number: int) -> Disk:
        kind = self.export_kind()
        create = f"export create e{number} --volume v{number} --kind {kind}"
        if kind == "vhost-user-blk":
            socket = self.home / f"e{number}.sock"
            self.ashlar(f"{create} --path {socket}")
            return Disk(vhost=socket)
        if kind == "ublk":
            device = self.ashlar(create).split()[0]
            places.owe(self.place, "ublk", Path(device).name)
            self.cleanup.callback(self.end_ublk, number, Path(device).name)
            return Disk(device=device)
        return self.by_file(number, create) if kind == "fuse" else self.by_nbd(number, create)

    def by_file(self, number: int, create: str) -> Disk:
        file = f"{self.home}/e{number}.disk"
        places.owe(self.place, "mount", file)
        self.cleanup.callback(places.settle, self.place, "mount", file)
        self.ashlar(f"{create} --path {file}")
        self.cleanup.callback(self.place.run, f"umount --lazy {file}")  # of a daemon that died
        device = places.loop(self.place, file)
        self.commands.append(f"losetup --find --show --direct-io=on {file}")
        self.cleanup.callback(places.unloop, self.place, device, file)
        return Disk(device=device)

    def end_ublk(self, number: int, name: str) -> None:
        self.ashlar(f"export delete e{number} --force")
        places.settle(self.place, "ublk", name)

    def by_nbd(self, number: int, create: str) -> Disk:
        socket = self.home / f"e{number}.sock"
        self.ashlar(f"{create} --path {socket}")
        name = self.place.check(FREE_NBD).strip()
        if not name:
            raise SideError("no /dev/nbd* is free: modprobe nbd nbds_max=64")
        command = f"nbd-client -unix {socket} -N e{number} -C 4 /dev/{name}"
        self.place.check(command)
        self.commands.append(command)
        # if we are killed before the next line, the kernel ends it: its server goes with us
        debt = f"{name} {self.place.check(f'cat /sys/block/{name}/pid').strip()}"
        places.owe(self.place, "nbd", debt)
        self.cleanup.callback(places.settle, self.place, "nbd", debt)
        self.cleanup.callback(self.place.run, f"nbd-client -d /dev/{name}")
        return Disk(device=f"/dev/{name}")

    # Drives

    def pull(self, array: int, member: int) -> None:
        """By hand where there is one; the daemon is told, as it need not have noticed yet."""
        drive = self.members[array][member]
        self.place.unplug(drive.path)
        self.ashlar(f"drive detach {drive.name} --force")

    def replace(self, array: int, member: int) -> None:
        new, old = self.spares.pop(0), self.members[array][member]
        self.ashlar(f"drive attach {shlex.quote(new.path)} --name {new.name} --force")
        self.ashlar(f"array replace a{array} --member {member} --new {new.name} --force")
        self.members[array][member] = new
        self.spares.append(replace(old, path=self.place.plug(old.path)))

    def states(self) -> list[str]:
        self.shown = self.show_all()
        return [state(its) for its in self.shown]

    def rebuild_error(self) -> str | None:
        """Of one that stopped: where it goes on, it has given up some of what it had to do."""
        its = self.shown or self.show_all()
        said = [f"{one['name']}: {one['rebuild_error']}" for one in its if stopped(one)]
        return "; ".join(said) or None

    def counters(self) -> Counters:
        """As they were when states were asked for: asking twice takes CPU time, much of it in an
        emulated guest."""
        shown, self.shown = self.shown or self.show_all(), []
        names = ("reads", "writes", "read_bytes", "write_bytes")
        pending = sum(its["journal"]["pending_bytes"] for its in shown if its["journal"])
        return Counters(*(sum(its["counters"][name] for its in shown) for name in names), pending)

    def pids(self) -> list[int]:
        return [self.pid] if self.pid else []

    def logs(self) -> list[str]:
        return [str(self.log)]

    def settings(self) -> dict[str, str]:
        version = self.place.run(f"{self.program} --version").text.strip()
        return {
            "version": version,
            "policy": self.policy,
            "integrity": "on" if self.chosen.integrity else "off",
            "cores": self.cores,
            "export": self.export_kind(),
            **{f"array a{number}": self.told_of(number) for number in range(len(self.members))},
            "commands": "\n".join(dict.fromkeys(self.commands)),
        }

    def told_of(self, array: int) -> str:
        return self.place.check(f"{self.program} --socket {self.socket} array show a{array}")

    def stop(self) -> None:
        self.cleanup.close()


def level(array: studies.Array) -> str:
    """Words of `ashlar array create`."""
    if array.copies > 1:
        return f"{1 if array.data == 1 else 10} --copies {array.copies}"
    return f"{array.data}+{array.parity}" if array.parity else "0"


def state(shown: dict) -> str:
    """Of an array, as `array list` has it."""
    if its := shown["rebuild"]:  # whole percents would stand still for minutes
        return states.rebuilding(100 * its["stripes_done"] / (its["stripes_total"] or 1))
    if shown["state"] not in ("optimal", "degraded"):
        return states.FAILED
    # one that is gone is trusted until it misses a write
    here = sum(its["present"] and its["state"] == "trusted" for its in shown["members"])
    return states.without(len(shown["members"]) - here)


def stopped(shown: dict) -> bool:
    return bool(shown["rebuild_error"]) and not shown["rebuild"]


def program(place: Place, work: Path) -> str:
    """A guest has it in its PATH. On the host it is the copy of this run: what is built anew
    meanwhile is not what is measured."""
    return str(copy_of(work)) if isinstance(place, Host) else "ashlar"


def copy_of(work: Path) -> Path:
    """In a directory whose name no side has."""
    return work / "program.d" / "ashlar"


def copied(work: Path) -> Path:
    """Where there is none, nothing is copied: it was said before, or no side takes it."""
    if host_program().is_file():
        copy_of(work).parent.mkdir(parents=True)
        shutil.copy2(host_program(), copy_of(work))
    return copy_of(work)


def host_program() -> Path:
    return Path(os.environ.get("ASHLAR") or paths.CHECKOUT / "target/release/ashlar").absolute()
