"""Goal: an array on drives that the daemon drives itself is the same array that the kernel serves.

Method: a real kernel with an IOMMU and NVMe drives, all emulated by QEMU; the daemon runs in the
guest. Data is written by one way and read by the other, and a drive is taken out under load.
"""

import contextlib
import json
import os
import subprocess
import tempfile
import time
import unittest
from pathlib import Path

from demo import guest_image
from demo.vm import Vm
from tests.rig import BINARY, CACHE, CHECKOUT

DRIVES = 4
DRIVE_BYTES = 256 << 20
VOLUME_BYTES = 256 << 20
WRITTEN_BYTES = 48 << 20
CLIENT = Path(os.environ.get("ASHLAR_EXPORT_IO") or CHECKOUT / "target/release/examples/export_io")
IOMMU = ["-device", "intel-iommu,intremap=on,caching-mode=on"]
TOOLS = "/run/tools"
SOCKET = "/run/v.sock"
SECONDS_MAX = 180


class Guest:
    """A guest with NVMe drives, and a daemon in it."""

    def __init__(
        self,
        cleanup: contextlib.ExitStack,
        recipe: guest_image.Recipe = guest_image.USUAL,
        programs: tuple[Path, ...] = (BINARY, CLIENT),
    ):
        self.directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ashlar-")))
        options = [*IOMMU, *self.tools_disk(programs)]
        for number in range(DRIVES):
            path = self.directory / f"n{number}.img"
            with open(path, "wb") as drive:
                drive.truncate(DRIVE_BYTES)
            options += [
                "-device", f"pcie-root-port,id=port{number},chassis={number + 1},slot={number + 1}",
                "-drive", f"if=none,id=n{number},file={path},format=raw,cache=writeback",
                "-device", f"nvme,id=nvme{number},drive=n{number},serial=DRIVE{number},"
                f"bus=port{number}",
            ]  # fmt: skip
        image = guest_image.build(CACHE, lambda text: None, recipe)
        self.vm = Vm(
            image, memory="1G", log=self.directory / "console.log", qemu_options=options,
            kernel_options="intel_iommu=on",
        )  # fmt: skip
        cleanup.callback(self.vm.close)
        self.vm.start()
        self.vm.check(
            f"mkdir -p {TOOLS} && mount -t ext4 -o ro /dev/vda {TOOLS} && "
            "modprobe nvme && modprobe vfio-pci && "
            f"until [ $(ls /sys/class/nvme | wc -l) = {DRIVES} ]; do sleep 0.1; done",
            SECONDS_MAX,
        )
        self.addresses = {
            number: self.vm.check(
                f"for c in /sys/class/nvme/*; do grep -q DRIVE{number} $c/serial && "
                "basename $(readlink -f $c/device); done; true"
            ).strip()
            for number in range(DRIVES)
        }

    def tools_disk(self, programs: tuple[Path, ...]) -> list[str]:
        """The programs come to the guest as a disk."""
        files = self.directory / "files"
        files.mkdir()
        for program in programs:
            command = ["strip", "-o", str(files / program.name), str(program)]
            subprocess.run(command, check=True, timeout=60)
        size = sum(file.stat().st_size for file in files.iterdir()) * 5 // 4 + (8 << 20)
        disk = self.directory / "tools.img"
        with open(disk, "wb") as image:
            image.truncate(size // 4096 * 4096)
        environment = os.environ | {"PATH": os.environ["PATH"] + ":/usr/sbin:/sbin"}
        command = ["mke2fs", "-q", "-t", "ext4", "-d", str(files), str(disk)]
        subprocess.run(command, check=True, timeout=60, env=environment)
        drive = f"if=none,id=tools,file={disk},format=raw,readonly=on"
        return ["-drive", drive, "-device", "virtio-blk-pci,drive=tools,addr=0x2"]

    def ashlar(self, words: str, seconds: float = SECONDS_MAX) -> str:
        return self.vm.check(f"{TOOLS}/ashlar --socket /run/api.sock {words}", seconds)

    def refusal(self, words: str) -> str:
        output = self.vm.run(f"{TOOLS}/ashlar --socket /run/api.sock {words}", SECONDS_MAX)
        assert output.rc == 1, output.text
        return output.text

    def show(self, words: str):
        return json.loads(self.ashlar(f"{words} -o json"))

    def start_daemon(self, state: str, options: str = "") -> None:
        serve = f"{TOOLS}/ashlar serve --state /run/{state} --socket /run/api.sock --cores 0 {options}"
        self.vm.check(f"mkdir -p /run/{state}; setsid {serve} >>/run/ashlar.log 2>&1 & true")
        answers = f"{TOOLS}/ashlar --socket /run/api.sock status"
        self.vm.check(f"until {answers} >/dev/null 2>&1; do sleep 0.2; done", SECONDS_MAX)

    def stop_daemon(self, signal: str = "TERM") -> None:
        self.vm.check(
            f"pid=$(busybox pidof ashlar) && kill -{signal} $pid && "
            "while [ -e /proc/$pid ]; do sleep 0.1; done",
            SECONDS_MAX,
        )

    def bind(self, number: int, driver: str) -> None:
        address = self.addresses[number]
        device = f"/sys/bus/pci/devices/{address}"
        self.vm.check(
            f"echo {driver} >{device}/driver_override; "
            f"[ ! -e {device}/driver ] || echo {address} >{device}/driver/unbind; "
            f"echo {address} >/sys/bus/pci/drivers_probe; "
            f"[ $(basename $(readlink {device}/driver)) = {driver} ]",
            SECONDS_MAX,
        )

    def block_device(self, number: int) -> str:
        controller = f"/sys/bus/pci/devices/{self.addresses[number]}/nvme/nvme*"
        disk = f"until ls -d {controller}/nvme*n1 >/dev/null 2>&1; do sleep 0.1; done; "
        return "/dev/" + self.vm.check(f"{disk} basename {controller}/nvme*n1", 30).strip()

    def attach(self, past_kernel: bool) -> None:
        for number in range(DRIVES):
            self.bind(number, "vfio-pci" if past_kernel else "nvme")
            address = self.addresses[number]
            source = f"pci:{address}" if past_kernel else self.block_device(number)
            self.ashlar(f"drive attach {source} --name d{number}")

    def export(self) -> None:
        self.ashlar(f"export create v --volume v --path {SOCKET}")

    def client(self, seed: int, what: str) -> str:
        return f"{TOOLS}/export_io {SOCKET} {seed} {WRITTEN_BYTES} {what}"

    def wait_state(self, wanted: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while (state := self.show("array show a")["state"]) != wanted:
            assert time.monotonic() < deadline, f"still {state}, not {wanted}"
            time.sleep(0.5)

    def wait_passthrough(self, drive: str) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while not (its := self.show(f"drive show {drive}")["queue"]["passthrough"])["used"]:
            assert its["why_not"] == "being tried" and time.monotonic() < deadline, its
            time.sleep(0.5)

    def trace_submissions(self) -> None:
        """The kernel keeps what is given to its rings, the newest of it."""
        self.vm.check(
            "mount -t tracefs none /sys/kernel/tracing 2>/dev/null; "
            "for e in /sys/kernel/tracing/events/io_uring/io_uring_submit_*/enable; do "
            "echo 1 >$e || exit 1; done"
        )

    def traced(self, word: str) -> int:
        return int(self.vm.check(f"grep -c {word} /sys/kernel/tracing/trace || true", SECONDS_MAX))

    def scrub_is_clean(self) -> None:
        self.ashlar("array scrub a --wait")
        report = self.show("array show a")["scrub"]
        assert report["mismatched_stripes"] == report["unreadable_stripes"] == 0, report


@contextlib.contextmanager
def guest(**what):
    with contextlib.ExitStack() as cleanup:
        made = Guest(cleanup, **what)
        try:
            yield made
        except BaseException:
            # The guest is about to go: what it says is wanted now.
            print(made.vm.run("tail -n 40 /run/ashlar.log; dmesg | tail -n 30", 30).text)
            raise


class Nvme(unittest.TestCase):
    def test_one_array_two_ways_to_it(self):
        with guest() as made:
            vm = made.vm
            made.start_daemon("state")
            # Whoever has the drive is named, and so is what mends it.
            address = made.addresses[0]
            refusal = made.refusal(f"drive attach pci:{address}")
            self.assertIn("the kernel's driver nvme has", refusal)
            self.assertIn(f"driverctl set-override {address} vfio-pci", refusal)
            vm.check(f"mkfs.ext4 -q {made.block_device(0)} && mount {made.block_device(0)} /mnt")
            self.assertIn("is mounted at /mnt", made.refusal(f"drive attach pci:{address}"))
            vm.check("umount /mnt")
            made.bind(0, "vfio-pci")
            self.assertIn("carries data", made.refusal(f"drive attach pci:{address}"))
            made.ashlar(f"drive attach pci:{address} --name d0 --force")
            made.ashlar("drive detach d0")

            made.attach(past_kernel=True)
            self.assertEqual(made.show("drive show d1")["kind"], "nvme")
            made.ashlar("array create a --level 5 --drives d0,d1,d2,d3 --chunk 64K")
            made.ashlar(f"volume create v --array a --size {VOLUME_BYTES >> 20}M")
            made.export()
            vm.check(made.client(1, "write"), SECONDS_MAX)
            vm.check(made.client(1, "verify"), SECONDS_MAX)
            made.scrub_is_clean()
            made.stop_daemon()

            # The kernel's way, and a daemon that has never seen this array.
            made.start_daemon("other")
            made.attach(past_kernel=False)
            self.assertEqual(made.show("drive show d1")["kind"], "block_device")
            made.ashlar("array start --scan")
            made.export()
            vm.check(made.client(1, "verify"), SECONDS_MAX)
            vm.check(made.client(2, "write"), SECONDS_MAX)
            made.stop_daemon()

            # And back, to the first daemon's own state: it knows the drives by their slots.
            for number in range(DRIVES):
                made.bind(number, "vfio-pci")
            made.start_daemon("state")
            self.assertEqual(made.show("array show a")["state"], "optimal")
            vm.check(made.client(2, "verify"), SECONDS_MAX)
            made.scrub_is_clean()
            made.stop_daemon()

    def test_commands_go_past_the_block_layer(self):
        with guest() as made:
            vm = made.vm
            # The daemon by which the same drives are read again gives them none.
            made.start_daemon("state", "--passthrough")
            made.attach(past_kernel=False)
            made.ashlar("array create a --level 5 --drives d0,d1,d2,d3 --chunk 64K --policy bitmap")
            for number in range(DRIVES):
                made.wait_passthrough(f"d{number}")
            made.ashlar(f"volume create v --array a --size {VOLUME_BYTES >> 20}M")
            made.export()
            made.trace_submissions()
            vm.check(made.client(5, "write"), SECONDS_MAX)
            vm.check(made.client(5, "verify"), SECONDS_MAX)
            self.assertGreater(made.traced("URING_CMD"), 100)
            made.scrub_is_clean()
            its = made.show("drive show d1")
            self.assertTrue(its["queue"]["passthrough"]["used"], its)
            made.stop_daemon()

            made.start_daemon("state")
            why = made.show("drive show d1")["queue"]["passthrough"]["why_not"]
            self.assertEqual(why, "switched off")
            vm.check(made.client(5, "verify"), SECONDS_MAX)
            made.scrub_is_clean()
            made.stop_daemon()

    def test_a_drive_is_taken_out_under_load(self):
        with guest() as made:
            vm = made.vm
            made.start_daemon("state")
            made.attach(past_kernel=True)
            made.ashlar("array create a --level 5 --drives d0,d1,d2 --chunk 64K")
            made.ashlar(f"volume create v --array a --size {VOLUME_BYTES >> 20}M")
            made.export()
            vm.check(made.client(3, "write"), SECONDS_MAX)
            load = vm.spawn(
                f"while [ ! -e /run/enough ]; do {made.client(4, 'write')} || exit 1; done"
            )
            # Linux waits until the daemon has let the drive go.
            for number in (1, 3):
                vm.qmp("device_del", id=f"nvme{number}")
                gone = f"/sys/bus/pci/devices/{made.addresses[number]}"
                vm.check(f"while [ -e {gone} ]; do sleep 0.2; done", SECONDS_MAX)
            made.wait_state("degraded")
            self.assertEqual(made.show("drive show d1")["health"], "failed")
            vm.check("touch /run/enough")
            self.assertEqual(load.wait(SECONDS_MAX).rc, 0)
            vm.check(made.client(4, "verify"), SECONDS_MAX)
            made.stop_daemon()


if __name__ == "__main__":
    unittest.main()
