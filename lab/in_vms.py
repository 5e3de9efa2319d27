"""Arrays on this host, and a virtual machine for each disk on them, with the load in it.

A disk that a side gives as a vhost-user-blk socket goes to QEMU as it is. A block device or a file
goes by QEMU's own virtio-blk: no page cache of the host between, io_uring, and a thread of its own
for each disk, which is how QEMU is told to be fast.
"""

import stat
from contextlib import ExitStack
from pathlib import Path

from demo import guest_image
from lab import guest_disks, guests, paths, pinning
from lab.guest_disks import LogsDisk
from lab.guests import Guest, Machine
from lab.host import OnHost
from lab.place import Host
from lab.progress import Say
from lab.side import Disk, Drive
from lab.study import Study
from lab.where import Seat

RECIPE = guest_image.USUAL
DISK_ADDRESS = 2  # on the PCI bus: before all others, so the guest names it first
DEVICE = "/dev/vda"


class InVms:
    def __init__(self, study: Study, work: Path, host: Host):
        self.study, self.work, self.place = study, work, host
        self.on_host = OnHost(study, work, host)
        self.huge_pages = guests.with_huge_pages(study)
        self.guests: list[Guest] = []
        self.logs: list[LogsDisk] = []

    def problems(self) -> list[str]:
        storage = guests.storage_cpus(self.study)
        return [*self.on_host.problems(), *guests.problems(self.study, RECIPE, storage)]

    def start(self, say: Say) -> None:
        self.on_host.start(say)
        self.image, self.accel = guests.image(RECIPE, self.place, say)

    def drives(self) -> tuple[list[list[Drive]], list[Drive]]:
        return self.on_host.drives()

    def disks(self) -> int:
        return self.study.vm.count

    def seats(self, disks: list[Disk]) -> list[Seat]:
        """All machines boot at once."""
        guests.refuse_other_pages(self.huge_pages, len(disks) * self.study.vm.memory)
        self.guests = [Guest(f"vm{number}", self.place) for number in range(len(disks))]
        machines = [self.machine(number, disk) for number, disk in enumerate(disks)]
        for machine, guest in zip(machines, self.guests, strict=True):
            machine.launch(guest)
        seconds = guests.boot_seconds_max(len(disks), self.study.vm.cpus, self.accel)
        for machine, guest in zip(machines, self.guests, strict=True):
            machine.wait_up(guest, seconds)
            guest_disks.mount(guest, tools=False)
        return [
            Seat(guest.name, guest, Disk(device=DEVICE, bytes=disk.bytes))
            for guest, disk in zip(self.guests, disks, strict=True)
        ]

    def machine(self, number: int, disk: Disk) -> Machine:
        vm = self.study.vm
        plan = self.plan()
        logs = LogsDisk(self.place, self.image, self.work, self.directory, self.guests[number])
        self.logs.append(logs)
        options = logs.options
        sockets = (str(disk.vhost),) if disk.vhost else ()
        if disk.device:
            options += virtio_disk(disk.device, vm.cpus)
        return Machine(
            self.image, self.accel, vm.cpus, vm.memory, plan[number] if plan else None,
            self.huge_pages, tuple(options), sockets,
        )  # fmt: skip

    @property
    def directory(self) -> Path:
        directory = paths.cache() / "lab"
        directory.mkdir(parents=True, exist_ok=True)
        return directory

    def plan(self) -> list[list[int]] | None:
        vm, storage = self.study.vm, guests.storage_cpus(self.study)
        return pinning.plan(guests.usable_cpus(), storage, vm.count, vm.cpus) if vm.pin else None

    def guest_cpu_seconds(self) -> float | None:
        return sum(guest.threads_seconds()[0] for guest in self.guests)

    def storage_cpu_seconds(self) -> float:
        """QEMU's own threads serve what is no vhost-user: that is the storage's work, too."""
        return sum(guest.threads_seconds()[1] for guest in self.guests)

    def consoles(self) -> list[Path]:
        return [guest.log for guest in self.guests]

    def leave(self) -> None:
        """All of them, also where what is of one cannot be taken down."""
        with ExitStack() as undo:
            for guest in self.guests:
                undo.callback(guest.close)
            for logs in self.logs:
                undo.callback(logs.close)
            self.guests, self.logs = [], []

    def settings(self) -> dict[str, str]:
        of_guests = guests.settings(self.study, self.accel, self.plan(), self.huge_pages)
        return self.on_host.settings() | of_guests | {
            "guests": str(self.study.vm.count),
            "kernel of the guests": guests.kernel_of(self.image),
            "disks": "vhost-user-blk; of sides without, virtio-blk with cache=none, aio=io_uring "
            "and an I/O thread each",
        }  # fmt: skip

    def close(self) -> None:
        self.leave()
        self.on_host.close()


def virtio_disk(device: str, queues: int) -> list[str]:
    is_block = stat.S_ISBLK(Path(device).stat().st_mode)
    return [
        "-object", "iothread,id=io0",
        "-blockdev", f"driver={'host_device' if is_block else 'file'},filename={device},"
        "node-name=disk0,cache.direct=on,aio=io_uring,discard=unmap",
        "-device", f"virtio-blk-pci,drive=disk0,iothread=io0,addr={DISK_ADDRESS:#x},"
        f"num-queues={queues},queue-size=128",
    ]  # fmt: skip
