"""NVMe drives that QEMU emulates for one guest: a file on the host each, in a slot of its own.

So a drive can be taken out and put in under load as a hand would: the guest's kernel sees a drive
leave its PCI Express slot. What the guest has them named is looked up by their serial numbers.
"""

import time
from pathlib import Path

from demo.vm import Vm, VmError
from lab.place import Host

SLOTS_MAX = 24  # what is left of a PCI bus beside the guest's other devices
FIRST_ADDRESS = 4  # of the slots on the bus; those before are disks of QEMU's own kind
PLUG_SECONDS_MAX = 120
POLL_SECONDS = 0.1


class NvmeDrives:
    def __init__(self, host: Host, directory: Path, count: int, size_bytes: int, queues: int):
        self.host = host
        self.directory = directory
        self.count = count
        self.size_bytes = size_bytes
        self.queues = queues  # pairs, of each drive
        self.made: list[Path] = []
        self.out: set[int] = set()

    def file(self, number: int) -> Path:
        return self.directory / f"nvme{number}.img"

    def make(self, number: int) -> None:
        """A file of nothing but zeroes, all of them written: neither is a block paid for later, nor
        is one that was only set aside answered without the disk."""
        file = self.file(number)
        if file not in self.made:
            self.host.ledger.owe("path", str(file))
            self.made.append(file)
        # the same file again, as QEMU may have it open
        self.host.check(
            f"truncate -s {self.size_bytes} {file} && dd if=/dev/zero of={file} bs=1M "
            f"count={self.size_bytes} iflag=count_bytes oflag=direct conv=notrunc,fsync "
            "status=none",
            timeout=3600,
        )

    def options(self) -> list[str]:
        """Of QEMU. The host keeps nothing of the drives in its own memory (`cache.direct`)."""
        options = []
        for number in range(self.count):
            address = FIRST_ADDRESS + number
            options += [
                "-blockdev", f"driver=file,filename={self.file(number)},node-name=file{number},"
                "cache.direct=on,aio=io_uring,discard=unmap",
                "-device", f"pcie-root-port,id=slot{number},chassis={number + 1},"
                f"slot={number + 1},addr={address:#x}",
                "-device", ",".join(f"{name}={it}" for name, it in self.device(number).items()),
            ]  # fmt: skip
        return options

    def device(self, number: int) -> dict[str, object]:
        return {
            "driver": "nvme", "id": f"nvme{number}", "drive": f"file{number}",
            "serial": serial(number), "bus": f"slot{number}", "max_ioqpairs": self.queues,
        }  # fmt: skip

    def paths(self, vm: Vm, seconds: float = PLUG_SECONDS_MAX) -> dict[int, str]:
        """The block device of each drive that is in, once all of them are there."""
        deadline = time.monotonic() + seconds
        while True:
            found = named(vm.check(LIST))
            paths = {number: found.get(serial(number)) for number in range(self.count)}
            missing = [n for n, path in paths.items() if not path and n not in self.out]
            if not missing:
                return {number: path for number, path in paths.items() if path}
            if time.monotonic() > deadline:
                raise VmError(f"the guest does not see its drives {missing}, only {found}")
            time.sleep(POLL_SECONDS)

    def unplug(self, vm: Vm, number: int) -> None:
        """Out it goes. Returns when the guest has let it go, and QEMU too."""
        vm.qmp("device_del", id=f"nvme{number}")
        self.out.add(number)
        deadline = time.monotonic() + PLUG_SECONDS_MAX
        while any(
            device["name"] == f"nvme{number}"
            for device in vm.qmp("qom-list", path="/machine/peripheral")
        ):
            if time.monotonic() > deadline:
                raise VmError(f"the guest does not let drive {number} go")
            time.sleep(POLL_SECONDS)

    def plug(self, vm: Vm, number: int) -> None:
        """The drive is there again, and holds nothing."""
        self.make(number)
        vm.qmp("device_add", **self.device(number))
        self.out.discard(number)

    def close(self) -> None:
        for file in self.made:
            file.unlink(missing_ok=True)
            self.host.ledger.settle("path", str(file))
        self.made = []


def serial(number: int) -> str:
    return f"LAB{number}"


# One line for each controller: its serial number, and its first block device.
LIST = (
    "for controller in /sys/class/nvme/nvme*; do [ -e $controller/serial ] || continue; "
    "echo $(cat $controller/serial) $(cd $controller && ls -d nvme*n* 2>/dev/null); done"
)


def named(text: str) -> dict[str, str]:
    """A drive that is just coming has no block device yet."""
    lines = [line.split() for line in text.splitlines()]
    return {words[0]: f"/dev/{words[1]}" for words in lines if len(words) > 1}
