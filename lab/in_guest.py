"""Array and load in one guest, on NVMe drives that QEMU emulates.

So sides that live in the kernel and sides that do not get the very same drives and the very same
kernel, on hosts that have neither md nor NVMe. The kernel is the one of Debian 12's backports, for
ublk: the way by which Ashlar gives its own host a block device.
"""

from pathlib import Path

from demo import guest_image
from lab import guest_disks, guests, paths, pinning
from lab import place as places
from lab.guest_disks import LogsDisk
from lab.guests import Guest, Machine
from lab.host import drive_count, room_problems
from lab.nvme import SLOTS_MAX, NvmeDrives
from lab.place import Host
from lab.progress import Say
from lab.side import Disk, Drive
from lab.sides.ashlar import copy_of, host_program
from lab.study import Study
from lab.where import Seat

RECIPE = guest_image.NEW_KERNEL
MODULES = "nvme xfs btrfs ublk_drv raid0 raid1 raid10 raid456 loop"
# One name for a drive and its controller, also when one is held by whoever has not noticed yet.
KERNEL_OPTIONS = "nvme_core.multipath=N"


class InGuest:
    def __init__(self, study: Study, work: Path, host: Host):
        self.study, self.work, self.host = study, work, host
        self.place = Guest("guest", host)
        self.inside = Path(study.drives.directory or paths.cache() / "lab/drives").absolute()
        self.directory: Path | None = None  # of drives and logs, which is ours alone
        self.nvme = NvmeDrives(
            host, self.inside, drive_count(study), study.drives.size, study.vm.cpus
        )
        self.huge_pages = guests.with_huge_pages(study)
        self.machine: Machine | None = None
        self.logs: LogsDisk | None = None

    def problems(self) -> list[str]:
        found = guests.problems(self.study, RECIPE, set())
        count = self.nvme.count
        if self.study.drives.kind != "nvme":
            found.append('[drives] of `where = "guest"` are emulated: say kind = "nvme"')
        if self.study.array.count != 1:
            found.append('`where = "guest"` has one load, so one array: say array.count = 1')
        if count > SLOTS_MAX:
            found.append(f"a guest takes {SLOTS_MAX} drives and the study {count}: make it smaller")
        found += room_problems(self.study, self.inside)
        if any(side.kind == "ashlar" for side in self.study.side):
            binary = host_program()
            if not binary.exists():
                found.append(f"{binary} is not there: run `make build`, or set ASHLAR")
        return found

    def start(self, say: Say) -> None:
        image, accel = guests.image(RECIPE, self.host, say)
        say("the machines: drives")
        self.directory = self.nvme.directory = places.fresh_directory(self.host, self.inside)
        for number in range(self.nvme.count):
            self.nvme.make(number)
        vm = self.study.vm
        plan = self.plan()
        self.logs = LogsDisk(self.host, image, self.work, self.directory, self.place)
        options = self.logs.options
        has_tools = copy_of(self.work).exists()
        if has_tools:
            options += guest_disks.tools_disk(self.host, self.work, copy_of(self.work))
        self.place.nvme = self.nvme
        self.machine = Machine(
            image, accel, vm.cpus, vm.memory, plan[0] if plan else None,
            self.huge_pages, (*options, *self.nvme.options()),
            kernel_options=KERNEL_OPTIONS,
        )  # fmt: skip
        say("the machines: booting")
        self.machine.launch(self.place)
        self.machine.wait_up(self.place, guests.boot_seconds_max(1, vm.cpus, accel))
        self.place.check(
            f"for module in {MODULES}; do modprobe $module || exit 1; done", timeout=180
        )
        guest_disks.mount(self.place, has_tools)
        self.nvme.paths(self.place.vm)

    def drives(self) -> tuple[list[list[Drive]], list[Drive]]:
        """Nobody has them now: files are zeroed beneath the guest, which forgets what it read."""
        for number in range(self.nvme.count):
            if number in self.nvme.out:
                self.nvme.plug(self.place.vm, number)
            else:
                self.nvme.make(number)
        paths = self.nvme.paths(self.place.vm)
        self.place.check(
            f"sync; for drive in {' '.join(paths.values())}; do blockdev --flushbufs $drive; done"
        )
        made = [Drive(f"d{at}", paths[at], self.study.drives.size) for at in range(self.nvme.count)]
        members = self.study.array.members
        return [made[:members]], made[members:]

    def disks(self) -> int:
        return 1

    def seats(self, disks: list[Disk]) -> list[Seat]:
        return [Seat("guest", self.place, disk) for disk in disks]

    def guest_cpu_seconds(self) -> float | None:
        """All that the machine takes of the host, storage in it and drives beneath it included."""
        return sum(self.place.threads_seconds())

    def storage_cpu_seconds(self) -> float:
        return 0.0  # seen from inside: the side's processes, and the kernel's threads

    def consoles(self) -> list[Path]:
        return [self.place.log]

    def leave(self) -> None:
        pass

    def plan(self) -> list[list[int]] | None:
        cpus = self.study.vm.cpus
        return pinning.plan(guests.usable_cpus(), set(), 1, cpus) if self.study.vm.pin else None

    def settings(self) -> dict[str, str]:
        drives = (
            f"{self.nvme.count} NVMe drives of {self.study.drives.size >> 20} MiB that QEMU "
            f"emulates, each on a file ({self.directory}) past the host's page cache, with "
            f"{self.nvme.queues} pairs of queues; all of them are served by one thread of QEMU"
        )
        programs = "postgres --version; fio --version; mdadm --version; mkfs.xfs -V"
        return guests.settings(self.study, self.machine.accel, self.plan(), self.huge_pages) | {
            "drives": drives,
            "kernel of the guest": guests.kernel_of(self.machine.image),
            "programs of the guest": self.place.run(f"{{ {programs}; }} 2>&1").text.strip(),
            "boots that failed before": str(self.place.panics),
        }

    def close(self) -> None:
        if self.logs:
            self.logs.close()
        self.place.close()
        if self.directory:
            places.remove(self.host, self.directory)
