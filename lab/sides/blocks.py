"""Drives as block devices: what they are already, or loop devices on files."""

from contextlib import ExitStack

from lab import place as places
from lab.place import Place
from lab.side import Drive, SideError


class Blocks:
    """The block device of each drive; all of them go with `cleanup`."""

    def __init__(self, place: Place, cleanup: ExitStack):
        self.place = place
        self.cleanup = cleanup
        self.devices: dict[str, str] = {}  # by the drive's name

    def device(self, drive: Drive) -> str:
        if drive.path.startswith("model:"):
            raise SideError("drives of kind `model` are for the side `ashlar` alone")
        if drive.name not in self.devices:
            self.devices[drive.name] = self.made(drive)
        return self.devices[drive.name]

    def made(self, drive: Drive) -> str:
        if self.place.run(f"[ -b {drive.path} ]").rc == 0:
            return drive.path
        device = places.loop(self.place, drive.path)
        self.cleanup.callback(places.unloop, self.place, device, drive.path)
        return device

    def break_down(self, drive: Drive) -> None:
        """As if it had gone: all that is asked of it fails, from now on.

        A loop device in use cannot be taken away, but it can be left without a single block. A
        drive of its own is taken off its bus, which it comes back to by a rescan.
        """
        device = self.device(drive)
        name = device.removeprefix("/dev/")
        if name.startswith("loop"):
            self.place.check(f"truncate -s 0 {drive.path} && losetup --set-capacity {device}")
        else:
            self.place.check(f"echo 1 >/sys/block/{name}/device/delete")

    def mend(self, drive: Drive) -> None:
        """A drive that was out is there again, and empty."""
        device = self.device(drive)
        name = device.removeprefix("/dev/")
        if name.startswith("loop"):
            self.place.check(
                f"dd if=/dev/zero of={drive.path} bs=1M count={drive.bytes >> 20} conv=fsync,notrunc "
                f"oflag=direct status=none && losetup --set-capacity {device}",
                timeout=3600,
            )
        else:
            self.place.check(
                f"for bus in /sys/class/scsi_host/*/scan; do [ ! -e $bus ] || echo '- - -' >$bus; "
                f"done; echo 1 >/sys/bus/pci/rescan; wipefs -qaf {device}"
            )

    def counts(self, devices: list[str]) -> tuple[int, int, int, int]:
        """Reads, writes, and the bytes of both, as the kernel counts them."""
        names = [device.removeprefix("/dev/") for device in devices]
        totals = [0, 0, 0, 0]
        for line in self.place.check(
            "cat " + " ".join(f"/sys/block/{name}/stat" for name in names)
        ).splitlines():
            fields = [int(field) for field in line.split()]
            for at, value in enumerate((fields[0], fields[4], fields[2] * 512, fields[6] * 512)):
                totals[at] += value
        return tuple(totals)
