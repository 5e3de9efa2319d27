"""Numbered blocks on the bare disk, without file system and database.

The writer in the guest is `xtask/examples/raw_writer.rs`; it says what is durable. Each slot was
written by one write of up to 64 KiB, so after a cut it must hold one version, whole: the last one
that was said to be durable, or the one after it.
"""

import subprocess
from pathlib import Path

from demo.guest_image import BuildError
from demo.vm import Command, Vm
from tests.rig import CHECKOUT

SOURCE = CHECKOUT / "xtask/examples/raw_writer.rs"
WRITER = "/run/raw_writer"
READ_SECONDS_MAX = 120


class Raw:
    name = "raw"
    unit = "writes"

    def __init__(self, seed: int):
        self.seed = seed
        self.said_of: dict[int, int] = {}  # slot: version
        self.said = 0
        self.odd: list[str] = []
        self.writer: Command | None = None
        self.disk = ""

    def guest_options(self, work: Path) -> list[str]:
        """The writer comes to the guest as a disk."""
        program = work / "raw_writer"
        if not program.exists():
            command = [
                "rustc", "--edition=2024", "-O", "-Ctarget-feature=+crt-static", "-Cstrip=symbols",
                "-o", str(program), str(SOURCE),
            ]  # fmt: skip
            done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)
            if done.returncode != 0:
                raise BuildError(f"{SOURCE} does not compile:\n{done.stderr}")
        file = f"if=none,id=tools,file={program},format=raw,readonly=on,file.locking=off"
        return ["-drive", file, "-device", "virtio-blk-pci,drive=tools,addr=0x1c"]

    def prepare_guest(self, vm: Vm) -> None:
        vm.check(f"cat /dev/vda >{WRITER} && chmod +x {WRITER} && ! {WRITER}")

    def create(self, vm: Vm, disk: str) -> None:
        self.said_of = {}
        self.recover(vm, disk)

    def recover(self, vm: Vm, disk: str) -> None:
        self.disk = disk

    def start(self, vm: Vm, full_page_writes: bool) -> None:
        pass

    def wrong(self, vm: Vm) -> list[str]:
        lines = vm.check(f"{WRITER} {self.disk} {self.seed} read", READ_SECONDS_MAX).splitlines()
        wrong = [line for line in lines if line.startswith("torn")]
        found = dict(map(int, line.split()) for line in lines if not line.startswith("torn"))
        for slot, version in found.items():
            said = self.said_of.get(slot, 0)
            if not said <= version <= said + 1:
                wrong.append(f"slot {slot} holds version {version}; {said} was durable")
        self.said_of = found
        return wrong

    def deep_wrong(self, vm: Vm) -> list[str]:
        return []

    def write(self, vm: Vm) -> None:
        self.odd = []
        self.writer = vm.spawn(f"{WRITER} {self.disk} {self.seed} write", self.hear)

    def hear(self, line: str) -> None:
        word, *slots = line.split()
        if word != "durable":
            self.odd.append(line)
            return
        for slot in slots:
            number, _, version = slot.partition(":")
            self.said_of[int(number)] = int(version)
            self.said += 1

    def wait_end(self) -> None:
        self.writer.reader.join()
