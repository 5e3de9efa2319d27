"""Goal: a guest is moved between two daemons while it writes, and its array goes along: no error,
every byte as it was written. A move that fails, whenever it does, leaves the guest as it was.

Method: a third daemon has the drives and offers them by NVMe/TCP; two daemons that call themselves
two hosts have them attached, and one array on them on demand. A real kernel in QEMU writes and
verifies with fio while it is moved to the other daemon and back, with split rings and with packed
ones. Another reader in the guest says when it was answered: its longest gap is the pause that the
guest saw. ASHLAR_MOVES says how often it is moved, there and back each counting as one.

Under emulation QEMU before 9.0 loses pages that the guest wrote while it was moved, which is no
fault of what is tested here: a newer one is fetched then (`scripts/install.sh qemu`), or named by
ASHLAR_QEMU.

A minute each under emulation, by hand: `python3 -m unittest -v tests.test_migrate`. Where no newer
QEMU can be fetched it says so, and is skipped. (CI has the same moves without QEMU:
`crates/control/tests/on_demand.rs`.)
"""

import os
import re
import socket
import subprocess
import time
import unittest
from pathlib import Path

from demo import guest_image, vm
from demo.engine import Engine
from demo.vm import Vm
from tests.rig import BINARY, CACHE, CHECKOUT, DRIVE_BYTES, rig
from tests.watched import PACKED, Watched

VOLUME_BYTES = 512 << 20
MOVES = int(os.environ.get("ASHLAR_MOVES") or 4)
DRIVES = 2
QUEUES = 4
PAUSE_SECONDS_MAX = {"kvm": 5, "tcg": 15}
BETWEEN_SECONDS = 6  # one that has just come does not go at once
QEMU_MIN = 9


def version(program: str) -> int:
    said = subprocess.run([program, "--version"], capture_output=True, text=True).stdout
    return int(re.search(r"version (\d+)", said)[1])


def qemu_that_moves(accel: str) -> str:
    """The installed one if it will do, else a newer one, which is fetched once."""
    named = os.environ.get("ASHLAR_QEMU")
    if named or accel == "kvm" or version(vm.QEMU) >= QEMU_MIN:
        return named or vm.QEMU
    environment = {**os.environ, "ASHLAR_CACHE": str(CACHE)}
    command = [str(CHECKOUT / "scripts/install.sh"), "qemu"]
    fetched = subprocess.run(command, env=environment, capture_output=True, text=True)
    if fetched.returncode != 0:
        raise unittest.SkipTest(f"no QEMU that moves guests: {fetched.stderr.strip()}")
    return str(CACHE / "qemu/usr/bin/qemu-system-x86_64")


class Hosts:
    """The daemon with the drives, and two others, each a host of its own."""

    def __init__(self, made):
        self.made = made
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.port = free.getsockname()[1]
        store = made.engine
        names = [f"s{number}" for number in range(DRIVES)]
        for name in names:
            with open(made.drive_path(name), "wb") as drive:
                drive.truncate(8 * DRIVE_BYTES)
            store.attach_drive(name, made.drive_path(name))
        store.create_array("store", names, level="1")
        for number in range(DRIVES):
            store.create_volume(f"v{number}", "store", 2 * VOLUME_BYTES)
            store.ashlar(
                "export", "create", f"e{number}", "--volume", f"v{number}", "--kind", "nvme-tcp",
                "--listen", f"127.0.0.1:{self.port}", "--nqn", self.nqn(number),
            )  # fmt: skip
        first = self.host(1)
        first.create_array("a", [f"far{number}" for number in range(DRIVES)], level="1")
        first.create_volume("v", "a", VOLUME_BYTES)
        self.put_on_demand(first)
        second = self.host(2)
        second.ashlar("array", "start", "--scan")
        self.put_on_demand(second)
        self.hosts = [first, second]

    @staticmethod
    def nqn(number: int) -> str:
        return f"nqn.2026-01.org.example:s{number}"

    def host(self, number: int) -> Engine:
        made = self.made
        state, socket = made.directory / f"host{number}", made.directory / f"api{number}.sock"
        log = made.directory / f"host{number}.log"
        identity = ["--host-id", f"00000000-0000-0000-0000-{number:012}"]
        engine = Engine(BINARY, state, socket, "0", log, made.trace, identity)
        made.cleanup.callback(engine.kill)
        engine.start()
        for drive in range(DRIVES):
            source = f"nvme-tcp://127.0.0.1:{self.port}/{self.nqn(drive)}"
            engine.ashlar("drive", "attach", source, "--name", f"far{drive}")
        return engine

    def put_on_demand(self, host: Engine) -> None:
        host.create_export("e", "v", self.socket(host))
        host.ashlar("array", "stop", "a")
        host.ashlar("array", "on-demand", "a")

    def socket(self, host: Engine) -> Path:
        return host.directory.with_suffix(".disk")

    def wait_state(self, host: Engine, wanted: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while (state := host.array_state("a")) != wanted:
            assert time.monotonic() < deadline, f"still {state}, not {wanted}"
            time.sleep(0.1)

    def boot(self, options: list[str]) -> Vm:
        image = guest_image.build(CACHE, lambda text: None)
        accel = vm.working_accel(image)
        guest = Vm(
            image, [self.socket(self.hosts[0])], memory="512M", qemu_options=options, movable=True,
            log=self.made.directory / "console.log", queues=QUEUES, accel=accel,
            qemu=qemu_that_moves(accel),
        )  # fmt: skip
        self.made.cleanup.callback(guest.close)
        return guest.start()

    def logs(self) -> str:
        return "".join(host.log.read_text(errors="replace") for host in self.hosts)


class Migrate(unittest.TestCase):
    def test_moved(self):
        self.go_on("moved", [], [None] * MOVES)

    def test_moved_with_packed_rings(self):
        self.go_on("moved, packed rings", PACKED, [None] * MOVES)

    def test_failed_and_moved(self):
        self.go_on("failed to move", [], ["copying", "stopped", "moved", None])

    def go_on(self, what, options, moves):
        """`moves`: when each is given up, if it is."""
        with rig() as made:
            hosts = Hosts(made)
            guest = hosts.boot(options)
            watched = Watched(self, guest, answer_seconds=120, end_seconds=300)
            still = []
            here, there = hosts.hosts
            for when in moves:
                with watched.disturbed(BETWEEN_SECONDS):
                    if when:
                        guest.fail_to_move([hosts.socket(there)], when)
                    else:
                        still.append(guest.move_to([hosts.socket(there)]))
                        here, there = there, here
                    hosts.wait_state(here, "optimal")
                    self.assertEqual(there.array_state("a"), "stopped")
            watched.end()
            pauses = watched.pauses
            self.assertNotRegex(hosts.logs(), "ERROR")
            print(f"{what} {len(moves)} times ({guest.accel}): the guest waited for", *pauses, "s;")
            print("QEMU says it stood still for", *still, "s of it")
            self.assertLess(max(pauses), PAUSE_SECONDS_MAX[guest.accel])
            guest.shutdown()
            hosts.wait_state(here, "stopped")


if __name__ == "__main__":
    unittest.main()
