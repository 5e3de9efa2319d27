"""Disks of a guest besides those under test: by one programs get in, on another logs are left."""

import contextlib
import shlex
import shutil
from pathlib import Path

from demo.guest_image import GuestImage
from demo.vm import VmError
from lab.guests import Guest
from lab.place import Host

TOOLS, LOGS = "/usr/local/bin", "/mnt"  # where their disks are in a guest
TOOLS_LABEL, LOGS_LABEL = "lab-tools", "lab-logs"
LOGS_BYTES = 64 << 30  # of a file that is as large as what is written to it
# So few that their tables are written when it is made: else the guest's kernel does that later,
# while something is measured.
LOGS_FILES = 8192
TOOLS_ADDRESS, LOGS_ADDRESS = 2, 3  # on the PCI bus: the guest names them in this order


class LogsDisk:
    """A disk of a guest for what loads leave: neither on what is measured, nor in its memory.

    What is dear to make under emulation (PostgreSQL's first cluster: a minute) is made on it once,
    and is kept beside the image that it was made with.
    """

    def __init__(self, host: Host, image: GuestImage, work: Path, directory: Path, guest: Guest):
        self.host, self.guest = host, guest
        guest.logs = LOGS
        self.kept = image.root.with_name("cluster.tar")
        self.file = directory / f"{guest.name}-logs.img"
        files = work / f"{guest.name}-logs"
        files.mkdir()
        if self.kept.exists():
            shutil.copyfile(self.kept, files / self.kept.name)
        host.ledger.owe("path", str(self.file))
        file = shlex.quote(str(self.file))
        host.check(
            f"PATH=$PATH:/usr/sbin:/sbin; truncate -s 0 {file} && "
            f"truncate -s {LOGS_BYTES} {file} && mke2fs -q -t ext4 -J size=8 -m 0 -N {LOGS_FILES} "
            f"-E nodiscard,lazy_itable_init=0 -L {LOGS_LABEL} -d {files} {file}"
        )
        shutil.rmtree(files)

    @property
    def options(self) -> list[str]:
        drive = f"if=none,id=logs,file={self.file},format=raw,cache=writeback"
        device = f"virtio-blk-pci,drive=logs,addr={LOGS_ADDRESS:#x}"
        return ["-drive", drive, "-device", device]

    def close(self) -> None:
        """The guest is about to go, or never came up."""
        vm = self.guest.vm
        try:
            up = vm is not None and vm.running and vm.boot_seconds is not None
            with contextlib.suppress(VmError):  # it has gone already
                if up and not self.kept.exists():
                    self.keep()
        finally:
            self.guest.close()
            self.file.unlink(missing_ok=True)
            self.host.ledger.settle("path", str(self.file))

    def keep(self) -> None:
        packed = f"{LOGS}/{self.kept.name}"
        if self.guest.run(f"[ -e {LOGS}/cluster/whole ] && tar -C {LOGS} -cf {packed} cluster").rc:
            return
        draft = self.kept.with_suffix(".draft")
        self.guest.fetch(packed, draft)
        draft.rename(self.kept)


def tools_disk(host: Host, directory: Path, program: Path) -> list[str]:
    """A program of the host as a disk, read-only."""
    files, disk = directory / "tools", directory / "tools.img"
    files.mkdir(parents=True)
    copy = files / "ashlar"
    if host.run(f"strip -o {copy} {shlex.quote(str(program))}").rc != 0:
        shutil.copyfile(program, copy)
    copy.chmod(0o755)
    size = copy.stat().st_size * 5 // 4 + (8 << 20)
    host.check(
        f"PATH=$PATH:/usr/sbin:/sbin; truncate -s {size // 4096 * 4096} {disk} && "
        f"mke2fs -q -t ext4 -O ^has_journal -L {TOOLS_LABEL} -d {files} {disk}"
    )
    drive = f"if=none,id=tools,file={disk},format=raw,readonly=on"
    return ["-drive", drive, "-device", f"virtio-blk-pci,drive=tools,addr={TOOLS_ADDRESS:#x}"]


def mount(guest: Guest, tools: bool) -> None:
    """By what is on them: which name a disk has depends on the others."""
    mounts = [
        f"mount -t ext4 -o noatime,noinit_itable $(blkid -L {LOGS_LABEL}) {LOGS} && cd {LOGS} && "
        "{ [ ! -e cluster.tar ] || tar -xf cluster.tar; }"
    ]
    if tools:
        mounts.append(f"mount -t ext4 -o ro $(blkid -L {TOOLS_LABEL}) {TOOLS}")
    guest.check(" && ".join(mounts), timeout=120)
