"""Arrays and loads on this machine itself, on drives that are files or block devices."""

import os
import shlex
import shutil
from pathlib import Path

from demo.vm import VmError
from lab import devices, paths
from lab import place as places
from lab.place import Host
from lab.progress import Say
from lab.side import Disk, Drive
from lab.study import Study
from lab.where import Seat

WIPED_BYTES = 128 << 20  # at a block device's beginning and end: labels of all who label drives
ROOM_BYTES = 1 << 30  # that a disk keeps besides the drive files


class OnHost:
    """Drives for any study whose arrays are on this machine; and the seats of `where = "host"`."""

    huge_pages = False

    def __init__(self, study: Study, work: Path, place: Host):
        self.study = study
        self.place = place
        self.work = work
        self.inside = Path(study.drives.directory or work / "drives").absolute()
        self.directory: Path | None = None  # of drive files, which is ours alone

    def problems(self) -> list[str]:
        kind = self.study.drives.kind
        if kind == "block":
            return self.block_problems()
        return room_problems(self.study, self.inside) if kind == "file" else []

    def block_problems(self) -> list[str]:
        paths, wanted = self.study.drives.paths, drive_count(self.study)
        problems = []
        if len(paths) < wanted:
            problems.append(
                f"[drives] names {len(paths)} drives in `paths` and the study takes {wanted}: "
                "members and spares"
            )
        return problems

    def start(self, say: Say) -> None:
        if self.study.drives.kind == "file":
            self.directory = places.fresh_directory(self.place, self.inside)

    def drives(self) -> tuple[list[list[Drive]], list[Drive]]:
        array = self.study.array
        made = [self.drive(number) for number in range(drive_count(self.study))]
        members = array.count * array.members
        arrays = [made[at : at + array.members] for at in range(0, members, array.members)]
        return arrays, made[members:]

    def drive(self, number: int) -> Drive:
        drives = self.study.drives
        name = f"d{number}"
        if drives.kind == "model":
            pace = f"iops={drives.iops},mbps={drives.mbps}"
            return Drive(name, f"model:{drives.size},{pace}", drives.size)
        if drives.kind == "block":
            path = os.path.realpath(drives.paths[number])
            return Drive(name, path, self.wiped(path))
        return Drive(name, str(self.written(self.directory / f"{name}.img")), drives.size)

    def wiped(self, path: str) -> int:
        """Discarded where it can be; else at least its labels are gone. Without -f, both commands
        refuse what somebody uses."""
        if why := devices.used(path):
            raise VmError(f"{path} is in use: {why}")
        at = shlex.quote(path)
        size = int(self.place.check(f"blockdev --getsize64 {at}"))
        zero = f"dd if=/dev/zero of={at} bs=1M count={WIPED_BYTES >> 20} oflag=direct conv=nocreat"
        end = max(0, (size - WIPED_BYTES) >> 20)
        self.place.check(
            f"wipefs -qa {at} && {{ blkdiscard {at} 2>/dev/null || "
            f"{{ {zero} status=none && {zero} seek={end} status=none || true; }}; }}",
            timeout=3600,
        )
        return size

    def written(self, path: Path) -> Path:
        """A file with all of its blocks written: none is paid for while somebody measures."""
        path.unlink(missing_ok=True)
        # what is written past the page cache leaves the memory as it is
        self.place.check(
            f"dd if=/dev/zero of={shlex.quote(str(path))} bs=1M "
            f"count={self.study.drives.size >> 20} oflag=direct conv=fsync status=none",
            timeout=3600,
        )
        return path

    def disks(self) -> int:
        return self.study.array.count

    def seats(self, disks: list[Disk]) -> list[Seat]:
        names = ["host"] if len(disks) == 1 else [f"host{at}" for at in range(len(disks))]
        return [Seat(name, self.place, disk) for name, disk in zip(names, disks, strict=True)]

    def guest_cpu_seconds(self) -> float | None:
        return None  # there is no guest: what the loads use, they tell

    def storage_cpu_seconds(self) -> float:
        return 0.0

    def consoles(self) -> list[Path]:
        return []

    def leave(self) -> None:
        pass

    def settings(self) -> dict[str, str]:
        drives = self.study.drives
        return {"drives": f"{drives.kind}, {', '.join(drives.paths) or drives.size}"}

    def close(self) -> None:
        if self.directory:
            places.remove(self.place, self.directory)
            self.directory = None


def room_problems(study: Study, inside: Path) -> list[str]:
    """Whether the files of all drives fit where they go."""
    if wrong := directory_problem(inside, study.drives.directory or ""):
        return [wrong]
    there = paths.existing(inside)
    needed = drive_count(study) * study.drives.size + ROOM_BYTES
    free = shutil.disk_usage(there).free
    if free >= needed:
        return []
    return [
        f"{there} has {free >> 20} MiB free and the drive files need {needed >> 20}: make room, or "
        "say a smaller `size` or another `directory` in [drives] (--set drives.size=1G)"
    ]


def directory_problem(inside: Path, said: str) -> str:
    """Why it cannot be made, or files in it: one that is not there is made, as the cache is. Empty
    if it can."""
    fix = "say another `directory` in [drives] (--set drives.directory=/mnt/drives)"
    if said.startswith("~"):
        home = Path(said).expanduser() if said.startswith("~/") else "/home/…"
        return f"drives.directory {said}: no shell makes a home of `~` here: write it out ({home})"
    try:
        there = nearest(inside)
        if not there.is_dir():
            return f"drives.directory {inside}: {there} is no directory: move it away, or {fix}"
        if long := too_long(inside, there):
            return f"drives.directory {inside}: {long[:16]}… is too long for a name there: {fix}"
    except OSError as error:
        return f"drives.directory {inside} cannot be looked at ({error.strerror}): {fix}"
    except ValueError as error:  # a NUL in it
        return f"drives.directory {str(inside)!r} is no path ({error}): {fix}"
    if not os.access(there, os.W_OK | os.X_OK) or of_kernel(there):
        what = "in it" if there == inside else f"in {there}, where it would have to be made"
        as_root = "" if os.geteuid() == 0 else "run it as root, or "  # who is, has not the right
        return f"drives.directory {inside}: nothing can be made {what}: {as_root}{fix}"
    return ""


def too_long(path: Path, there: Path) -> str:
    """A part of it that cannot be made beneath what is there: empty if all can."""
    most = os.pathconf(there, "PC_NAME_MAX")
    parts = path.relative_to(there).parts
    return next((part for part in parts if len(os.fsencode(part)) > most), "")


def of_kernel(path: Path) -> bool:
    """To root all of it seems to be writable."""
    its = path.resolve()
    return any(its.is_relative_to(each) for each in ("/proc", "/sys"))


def nearest(path: Path) -> Path:
    """That is there. A link that leads nowhere is: nothing can be made in its place."""
    while True:
        try:
            path.lstat()
            return path
        except (FileNotFoundError, NotADirectoryError):
            path = path.parent


def drive_count(study: Study) -> int:
    """Of every array: members, and a spare for each drive that is out at once."""
    spares = max(state.drives_out for state in study.states)
    return study.array.count * (study.array.members + spares)
