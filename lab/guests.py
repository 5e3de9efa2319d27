"""A guest as a place: commands go in, files come out, and drives can be pulled by hand.

What `in_vms` and `in_guest` have in common: how a guest is booted, with bounded patience; what has
to be there before; whose CPU time is whose. Its disks are in `guest_disks`.
"""

import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from demo import guest_image
from demo.guest_image import BUILD_BYTES, GuestImage, Recipe
from demo.vm import BOOT_SECONDS_MAX, QEMU, Command, Output, Vm, VmError, working_accel
from lab import paths, pinning
from lab.host import drive_count
from lab.nvme import NvmeDrives
from lab.place import CLOCK_TICKS, Host
from lab.progress import Say
from lab.study import Study

# Of boots. Debian's kernel 6.12 panics or hangs now and then while it boots under emulation, before
# it has said anything; so the first try is given half the time only.
TRIES_MAX = 4
HUGE_PAGE_BYTES = 2 << 20
STORAGE_HUGE_BYTES = 256 << 20  # buffers of a daemon's reactors
QEMU_BYTES = 512 << 20  # of memory, that a machine takes besides its own: emulated code, mostly
CLOCK_TRIES, CLOCK_LOOKS = 2, 8
CLOCK_SECONDS_MAX = 0.1
SIDE_CORES = "0"  # that a side polls on if it does not say


class Guest:
    """A `Place`. It is made before it is booted, and booted once."""

    logs: str | None = None  # until there is a disk for them

    def __init__(self, name: str, host: Host):
        self.name = name
        self.host = host  # for what is written down
        self.log = paths.cache() / "lab" / "consoles" / f"{name}.log"  # stays, for who looks why
        self.vm: Vm | None = None
        self.nvme: NvmeDrives | None = None
        self.panics = 0  # boots before this one
        self.cpu_threads: list[int] = []
        self.were: dict[int, str] = {}  # the block device that a drive was when it went, by slot

    @property
    def emulated(self) -> bool:
        return self.vm is not None and self.vm.accel == "tcg"

    # Commands

    def run(self, command: str, timeout: float = 60) -> Output:
        output = self.finished(lambda: self.vm.run(command, timeout))
        self.host.write_down(f"{self.name}: {command}", output)
        return output

    def check(self, command: str, timeout: float = 60) -> str:
        output = self.run(command, timeout)
        if output.rc != 0:
            last = "\n".join(output.text.strip().splitlines()[-12:])
            what = command.strip()
            raise VmError(f"in {self.name}, `{what}` ended with status {output.rc}:\n{last}")
        return output.text

    def spawn(self, command: str, on_line: Callable[[str], None] | None = None) -> Command:
        self.host.write_down(f"{self.name}: {command}", None)
        return self.finished(lambda: self.vm.spawn(command, on_line))

    def fetch(self, path: str, to: Path) -> None:
        self.finished(lambda: self.vm.fetch(path, to))

    def finished(self, what: Callable):
        """A guest that is gone has said why on its console."""
        try:
            return what()
        except VmError as error:
            if self.vm is None or not self.vm.running:
                raise VmError(f"{error}\nthe console of {self.name} is in {self.log}") from None
            raise

    # Drives

    def unplug(self, device: str) -> bool:
        number = self.number(device)
        if number is None:
            return False
        self.were[number] = device
        self.host.write_down(f"{self.name}: device_del nvme{number} ({device})", None)
        self.nvme.unplug(self.vm, number)
        return True

    def plug(self, device: str) -> str:
        """It may have another name than it had: the kernel takes the first that is free. So one
        that is in may be called as this one was, and so may another that is out. Of two such any
        will do: they come back empty."""
        out = sorted(self.nvme.out) if self.nvme else []
        number = next((one for one in out if self.were.get(one) == device), None)
        if number is None:
            return device
        self.host.write_down(f"{self.name}: device_add nvme{number}", None)
        self.nvme.plug(self.vm, number)
        return self.nvme.paths(self.vm)[number]

    def number(self, device: str) -> int | None:
        """The slot of a drive that is in."""
        its = self.nvme.paths(self.vm).items() if self.nvme else ()
        return next((number for number, path in its if path == device), None)

    # From the host's side

    def set_clock(self) -> float:
        """What `date` itself takes makes it late: the second try makes that good."""
        late, behind = 0.0, self.clock_behind()
        for _ in range(CLOCK_TRIES):
            if abs(behind) < CLOCK_SECONDS_MAX:
                break
            forth = int((behind + late) * 1e6)
            self.check(
                f"bash -c 'now=$((${{EPOCHREALTIME/.}} + {forth})); "
                'date -s "@$((now / 1000000)).$(printf %06d $((now % 1000000)))"\''
            )
            late = behind = self.clock_behind()
        return behind

    def clock_behind(self) -> float:
        """A line that says when it was written is here a moment later: the least of several."""
        found: list[float] = []
        tell = f"bash -c 'for each in {{1..{CLOCK_LOOKS}}}; do echo ${{EPOCHREALTIME}}; done'"
        told = self.spawn(tell, lambda line: found.append(time.time() - float(line)))
        told.wait(60)
        return min(found)

    def threads_seconds(self) -> tuple[float, float]:
        """CPU seconds of the virtual CPUs, and of QEMU's other threads, which serve devices. These
        come and go: what those had used that are gone is in the sum of all, and nowhere else."""
        at = Path(f"/proc/{self.vm.qemu.pid}")
        try:
            inside = sum(cpu_seconds(at / f"task/{thread}/stat") for thread in self.cpu_threads)
            return inside, max(0.0, cpu_seconds(at / "stat") - inside)
        except OSError:  # QEMU has gone meanwhile
            return 0.0, 0.0

    def close(self) -> None:
        if self.vm is not None:
            self.vm.close()


def cpu_seconds(stat: Path) -> float:
    fields = stat.read_text().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS


@dataclass(frozen=True)
class Machine:
    """What a guest is booted with."""

    image: GuestImage
    accel: str
    cpus: int
    memory_bytes: int
    pinned: list[int] | None  # CPUs of the host
    huge_pages: bool
    options: tuple[str, ...] = ()
    vhost_sockets: tuple[str, ...] = ()
    kernel_options: str = ""

    def launch(self, guest: Guest) -> None:
        guest.log.parent.mkdir(parents=True, exist_ok=True)
        guest.log.write_text("")
        guest.vm = Vm(
            self.image, self.vhost_sockets, memory=f"{self.memory_bytes >> 20}M", cpus=self.cpus,
            accel=self.accel, log=guest.log, qemu_options=list(self.options),
            kernel_options=self.kernel_options, huge_pages=self.huge_pages,
        )  # fmt: skip
        guest.vm.launch()
        guest.host.write_down(f"{guest.name}: {shlex.join(guest.vm.qemu.args)}", None)

    def wait_up(self, guest: Guest, seconds: float) -> None:
        """A guest that panics or hangs while it boots is booted again, a few times."""
        while True:
            try:
                guest.vm.wait_up(seconds if guest.panics or self.accel != "tcg" else seconds / 2)
                break
            except VmError as error:
                kept = guest.log.with_suffix(f".{guest.panics}.log")
                shutil.copyfile(guest.log, kept)
                said = f"{error}\nthe console of {guest.name} is in {kept}"
                if self.accel != "tcg" or guest.panics + 1 >= TRIES_MAX:
                    raise VmError(said) from None
                guest.panics += 1
                guest.host.write_down(f"{guest.name} is booted again: {said}", None)
                self.launch(guest)
        guest.cpu_threads = guest.vm.cpu_threads()
        for thread, cpu in zip(guest.cpu_threads, self.pinned or (), strict=False):
            os.sched_setaffinity(thread, {cpu})


def boot_seconds_max(machines: int, cpus: int, accel: str) -> float:
    """All boot at once, and under emulation they share the host's CPUs."""
    share = machines * cpus / (os.cpu_count() or 1)
    return BOOT_SECONDS_MAX * (max(1.0, share) if accel == "tcg" else 1.0)


# Before anything is started


def problems(study: Study, recipe: Recipe, storage: set[int]) -> list[str]:
    found = []
    if shutil.which(QEMU) is None:
        found.append(f"{QEMU} is missing: run scripts/install.sh demo")
    for name in ("mke2fs", "debugfs"):
        if shutil.which(name, path=paths.programs()) is None:
            found.append(f"{name} is missing, for the guest's disks: apt-get install e2fsprogs")
    key = guest_image.recipe_key(recipe)
    if not (paths.cache() / recipe.name / key).exists():
        found += [
            f"{name} is missing, which makes the guest: run scripts/install.sh demo"
            for name in ("mmdebstrap", "zstd")
            if shutil.which(name) is None
        ]
        if shutil.disk_usage(paths.existing(paths.cache())).free < BUILD_BYTES:
            found.append(f"making the guest takes {BUILD_BYTES >> 30} GiB free in {paths.cache()}")
    vm, count = study.vm, machines(study)
    if vm.pin and not pinning.plan(usable_cpus(), storage, count, vm.cpus):
        found.append(
            f"{count} guests of {vm.cpus} CPUs beside storage on {len(storage)} cannot be pinned "
            f"to CPUs of their own, of {len(usable_cpus())}: --set vm.pin=false, or fewer"
        )
    return found


def machines(study: Study) -> int:
    return {"vm": study.vm.count, "guest": 1}.get(study.where, 0)


def memory_bytes(study: Study) -> int:
    """Of this host, that is not set aside in huge pages."""
    of_each = QEMU_BYTES + (0 if with_huge_pages(study) else study.vm.memory)
    return machines(study) * of_each


def usable_cpus() -> list[int]:
    return sorted(os.sched_getaffinity(0))


def storage_cpus(study: Study) -> set[int]:
    """All that any side polls on: the guests' CPUs are the same for every side."""
    return {cpu for side in study.side for cpu in pinning.cpus_of(side.cores or SIDE_CORES)}


def with_huge_pages(study: Study) -> bool:
    """Where the study wants them and there are enough to spare. Asked once, for all rounds: with
    other pages it were another machine."""
    needed = study.vm.memory
    if study.where == "vm":  # storage, beside them, takes of these pages what it can use, and first
        needed = study.vm.count * study.vm.memory + STORAGE_HUGE_BYTES
        if study.drives.kind == "model":
            needed += study.drives.size * drive_count(study)
    return study.vm.huge_pages and huge_bytes_free() >= needed


def refuse_other_pages(huge: bool, needed_bytes: int) -> None:
    if huge and (free := huge_bytes_free()) < needed_bytes:
        raise VmError(
            f"{free >> 20} MiB of huge pages are free, and guests that had {needed_bytes >> 20} in "
            "earlier rounds need them again: end who took them, then go on with --resume"
        )


def huge_bytes_free() -> int:
    text = Path("/proc/meminfo").read_text()
    found = [line.split()[1] for line in text.splitlines() if line.startswith("HugePages_Free")]
    return int(found[0]) * HUGE_PAGE_BYTES if found else 0


# What a guest is made of


def image(recipe: Recipe, host: Host, say: Say) -> tuple[GuestImage, str]:
    """The guest's files, and how it is run: kvm or tcg. Both take minutes, the first time."""

    def told(what: str) -> None:
        host.write_down(f"guest: {what}", None)
        say(f"the machines: {what}")

    paths.cache().mkdir(parents=True, exist_ok=True)
    built = guest_image.build(paths.cache(), told, recipe)
    return built, working_accel(built, told)


def settings(study: Study, accel: str, plan: list[list[int]] | None, huge: bool) -> dict[str, str]:
    """What guests are, wherever the array is."""
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True).stdout
    pages = "huge, of 2 MiB" if huge else "ordinary"
    if study.vm.huge_pages and not huge:
        pages += f": huge ones were asked for, and {huge_bytes_free() >> 20} MiB of them were free"
    told = {
        "qemu": version.splitlines()[0],
        "acceleration": accel,
        "cpus of a guest": str(study.vm.cpus),
        "memory of a guest": f"{study.vm.memory >> 20} MiB",
        "pages": pages,
        "pinned to CPUs": "; ".join(str(cpus) for cpus in plan) if plan else "no",
    }
    if accel == "tcg":
        told["emulation"] = (
            "QEMU translates every instruction of the guests, as no KVM works here: all that takes "
            "CPU time in a guest takes many times as long, and the drives do not. Figures compare "
            "the sides with each other on this machine, and say nothing of what hardware would do."
        )
    return told


def kernel_of(image: GuestImage) -> str:
    """The release whose modules are in the image."""
    command = ["debugfs", "-R", "ls -p /lib/modules", str(image.root)]
    env = os.environ | {"PATH": paths.programs()}
    said = subprocess.run(command, capture_output=True, text=True, env=env)
    return released(said.stdout)


def released(listing: str) -> str:
    """debugfs prints `/inode/mode/uid/gid/name/size/`, a line each, `.` and `..` too."""
    names = [line.split("/")[5] for line in listing.splitlines() if line.count("/") > 5]
    return next((name for name in names if name.strip(".")), "")
