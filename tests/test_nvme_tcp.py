"""Goal: Linux hosts use a volume over the network as they use any NVMe drive.

Method: a real kernel's nvme-tcp and nvme-cli in QEMU, over its user network; fio with crc32c
verification, the volume grown, the daemon killed, hosts that may not, hosts that have to prove who
they are (by a newer kernel: Debian 12's own has "# CONFIG_NVME_AUTH is not set").
"""

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
import unittest
from collections.abc import Iterator
from pathlib import Path

from demo import guest_image
from demo.engine import Engine
from demo.vm import Vm, working_accel
from tests.rig import BINARY, CACHE, Rig, rig

VOLUME_BYTES = 128 << 20
SUBSYSTEM = "nqn.2026-01.example:disk"
HOST = "nqn.2026-01.example:guest"
# Newer kernels want one for each name.
HOST_ID = "6f1c2a90-5d0b-4d7e-9a3e-0c8f2b7d4e11"
# The machine that QEMU runs on, as the guest sees it.
GATEWAY = "10.0.2.2"
NETWORK = ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,addr=0x1c"]
SECONDS_MAX = 120
KILLS = int(os.environ.get("ASHLAR_KILLS") or 3)
WRITES = 20
WRITE_AND_VERIFY = (
    "fio --name=v --filename={disk} --direct=1 --ioengine=io_uring --verify=crc32c "
    "--verify_fatal=1 --randseed=7 --iodepth=16 --rw=randwrite --bsrange=512-128k "
    "--blockalign=512 --size={size}M"
)
VERIFY_ONLY = WRITE_AND_VERIFY + " --verify_only"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Host:
    """A guest with a network card, and what of the daemon it connects to."""

    def __init__(self, made: Rig, port: int, options: str = "", newer: bool = False):
        image = guest_image.build(CACHE, lambda text: None)
        accel = working_accel(image)
        if newer:
            image = guest_image.build(CACHE, recipe=guest_image.NEW_KERNEL)
        self.port, self.engine = port, made.engine
        self.options = f"-t tcp -a {GATEWAY} -s {port} --hostnqn {HOST} --hostid {HOST_ID} {options}"
        log = made.directory / "console.log"
        self.vm = Vm(image, memory="512M", accel=accel, log=log, qemu_options=NETWORK)
        made.cleanup.callback(self.vm.close)
        self.vm.start()
        self.vm.check(
            "modprobe virtio_net && modprobe nvme-tcp && mkdir -p /run/nvme && "
            "busybox ip link set eth0 up && busybox ip addr add 10.0.2.15/24 dev eth0"
        )

    def nvme(self, words: str, seconds: float = SECONDS_MAX) -> str:
        return self.vm.check(f"nvme {words}", seconds)

    def connect(self, subsystem: str = SUBSYSTEM, more: str = "") -> str:
        """The disk, once it is there."""
        # A lost daemon is tried again each second.
        self.nvme(f"connect {self.options} -n {subsystem} -c 1 -k 2 {more}")
        return self.wait_disk(1)

    def wait_disk(self, namespace: int) -> str:
        disk = f"/dev/nvme?n{namespace}"
        self.vm.check(f"until ls {disk} >/dev/null 2>&1; do sleep 0.1; done", 30)
        return self.vm.check(f"ls {disk}").strip()

    def writing(self, disk: str, size: int) -> Iterator[None]:
        """Writes and verifies without end; each turn once the daemon has taken some more writes.

        Not by io_uring: it sends requests that may not wait, and what Linux 6.1 sends again after
        a connection was lost ends with EAGAIN if there is no room for it at once.
        """
        command = WRITE_AND_VERIFY.format(disk=disk, size=size).replace("io_uring", "libaio")
        running = self.vm.spawn(f"while [ ! -e /run/enough ]; do {command} || exit 1; done")
        try:
            while True:
                before, end = written(self.engine), time.monotonic() + SECONDS_MAX
                while written(self.engine) < before + WRITES:
                    assert running.running and time.monotonic() < end, "nothing is written"
                    time.sleep(0.05)
                yield
        finally:
            self.vm.check("touch /run/enough")
            output = running.wait(3 * SECONDS_MAX)
            assert output.rc == 0, f"what was written is not there: {output.text[-2000:]}"

    def size(self, disk: str) -> int:
        return int(self.vm.check(f"cat /sys/block/{disk.removeprefix('/dev/')}/size")) << 9


def written(engine: Engine) -> int:
    return engine.show("export", "show", "v")["counters"]["writes"]


def offer(made: Rig, port: int, *words: str) -> None:
    made.attach("d0", "d1", "d2")
    made.engine.create_array("a", ["d0", "d1", "d2"])
    made.engine.create_volume("v", "a", VOLUME_BYTES)
    listen = ("--listen", f"127.0.0.1:{port}", "--nqn", SUBSYSTEM)
    made.engine.ashlar("export", "create", "v", "--volume", "v", "--kind", "nvme-tcp", *listen, *words)


@contextlib.contextmanager
def host(*words: str, options: str = "", newer: bool = False):
    with rig() as made:
        port = free_port()
        offer(made, port, *words)
        its = Host(made, port, options, newer)
        try:
            yield made, its
        except BaseException:
            print(its.vm.run("dmesg | tail -n 40", 30).text)
            raise


class NvmeTcp(unittest.TestCase):
    def test_linux_finds_it_and_believes_it(self):
        with host("--host", HOST) as (made, its):
            vm = its.vm
            found = json.loads(its.nvme(f"discover {its.options} -o json"))
            names = [record["subnqn"] for record in found["records"]]
            self.assertEqual(names[-1], SUBSYSTEM)
            disk = its.connect()
            self.assertEqual(its.size(disk), VOLUME_BYTES)
            queue = f"/sys/block/{disk.removeprefix('/dev/')}/queue"
            self.assertEqual(vm.check(f"cat {queue}/write_cache").strip(), "write back")
            controller = json.loads(its.nvme(f"id-ctrl {disk} -o json"))
            self.assertEqual(controller["subnqn"], SUBSYSTEM)
            namespace = json.loads(its.nvme(f"id-ns {disk} -o json"))
            self.assertEqual(namespace["nsze"], VOLUME_BYTES >> 9)
            # What the array's policy keeps: 64 KiB, from 0 for one block.
            self.assertEqual(namespace["nawupf"], 127)
            uuid = made.engine.show("volume", "show", "v")["uuid"]
            self.assertEqual(namespace["nguid"], uuid.replace("-", ""))
            self.assertIn(uuid, its.nvme(f"ns-descs {disk}"))
            self.assertIn(SUBSYSTEM, its.nvme("list-subsys"))
            for page in ["smart-log", "error-log", "fw-log", "effects-log", "list-ns"]:
                its.nvme(f"{page} {disk}")
            for feature in ["0x06", "0x07", "0x0b", "0x0f"]:
                its.nvme(f"get-feature {disk} -f {feature}")
            vm.check(WRITE_AND_VERIFY.format(disk=disk, size=24), SECONDS_MAX)
            vm.check(f"blkdiscard -o 0 -l 16777216 {disk} && blkdiscard -z -o 1048576 -l 65536 {disk}")
            zeroes = f"dd if={disk} bs=1M count=16 iflag=direct status=none | tr -d '\\0' | wc -c"
            self.assertEqual(vm.check(zeroes).split()[-1], "0")
            block = "bs=4k count=1 oflag=direct conv=fsync,notrunc status=none"
            vm.check(f"dd if=/dev/zero of={disk} {block}")
            written = json.loads(its.nvme(f"smart-log {disk} -o json"))
            self.assertGreater(int(written["host_write_commands"]), 0)
            shown = made.engine.show("export", "show", "v")
            self.assertEqual(shown["state"], "connected")
            self.assertGreater(shown["counters"]["flushes"], 0)
            its.nvme(f"disconnect -n {SUBSYSTEM}")
            made.wait_unused("v")

    def test_growth_is_seen_and_namespaces_come_and_go(self):
        with host() as (made, its):
            disk = its.connect()
            made.engine.ashlar("volume", "resize", "v", "--size", f"{2 * VOLUME_BYTES >> 20}M")
            name = disk.removeprefix("/dev/")
            grown = 2 * VOLUME_BYTES >> 9
            wait = f"until [ $(cat /sys/block/{name}/size) = {grown} ]; do sleep 0.1; done"
            its.vm.check(wait, 30)
            made.engine.create_volume("w", "a", 8 << 20)
            at = ("--listen", f"127.0.0.1:{its.port}", "--nqn", SUBSYSTEM)
            create = ("export", "create", "w", "--volume", "w", "--kind", "nvme-tcp", *at)
            made.engine.ashlar(*create)
            second = its.wait_disk(2)
            self.assertEqual(its.size(second), 8 << 20)
            its.vm.check(WRITE_AND_VERIFY.format(disk=second, size=4), SECONDS_MAX)
            made.engine.ashlar("export", "delete", "w", "--force")
            gone = f"while [ -e /sys/block/{second.removeprefix('/dev/')} ]; do sleep 0.1; done"
            its.vm.check(gone, 30)

    def test_a_foreign_host_is_refused(self):
        with host("--host", "nqn.2026-01.example:another") as (made, its):
            refused = its.vm.run(f"nvme connect {its.options} -n {SUBSYSTEM}", SECONDS_MAX)
            self.assertNotEqual(refused.rc, 0)
            found = its.nvme(f"discover {its.options}")
            self.assertNotIn(SUBSYSTEM, found)
            self.assertIn(f'"{HOST}" is no host of "{SUBSYSTEM}"', made.log.read_text())

    def test_nvme_cli_writes_compares_and_resets(self):
        with host() as (made, its):
            disk = its.connect()
            controller = disk[: disk.rindex("n")]
            for name, source in [("block", "urandom"), ("none", "zero")]:
                its.vm.check(f"head -c 4096 /dev/{source} >/run/{name}")
            block = "-s 8 -c 7 -z 4096 -d"
            its.nvme(f"write {disk} {block} /run/block")
            its.nvme(f"flush {disk} -n 1")
            its.nvme(f"compare {disk} {block} /run/block")
            differs = its.vm.run(f"nvme compare {disk} {block} /run/none", SECONDS_MAX)
            self.assertIn("Compare Failure", differs.text)
            its.nvme(f"write-zeroes {disk} -n 1 -s 8 -c 7")
            its.nvme(f"compare {disk} {block} /run/none")
            its.nvme(f"dsm {disk} -n 1 -d -s 8 -b 8")
            with contextlib.closing(its.writing(disk, 16)) as turns:
                for _ in range(3):
                    next(turns)
                    its.nvme(f"reset {controller}")
                next(turns)

    def test_a_killed_daemon_is_found_again(self):
        with host(options="--hdr-digest --data-digest") as (made, its):
            disk = its.connect()
            its.vm.check(WRITE_AND_VERIFY.format(disk=disk, size=16), SECONDS_MAX)
            with contextlib.closing(its.writing(disk, 16)) as turns:
                for _ in range(KILLS):
                    next(turns)
                    made.engine.kill()
                    made.engine.start()
                next(turns)
            its.vm.check(VERIFY_ONLY.format(disk=disk, size=16), SECONDS_MAX)


class Authentication(unittest.TestCase):
    def setUp(self):
        scratch = tempfile.TemporaryDirectory(prefix="ashlar-secrets-")
        self.addCleanup(scratch.cleanup)
        self.directory = Path(scratch.name)

    def secret(self, name: str, value: str | None = None) -> str:
        """Made here, if it is not given; kept in a file of that name."""
        made = [str(BINARY), "gen-secret", "--hash", "sha384"]
        value = value or subprocess.run(made, check=True, capture_output=True, text=True).stdout
        (self.directory / name).touch(mode=0o600)
        (self.directory / name).write_text(value)
        return value.strip()

    def option(self, name: str) -> tuple[str, str]:
        return ("--host-secret", f"{HOST}={self.directory / name}")

    def test_linux_and_the_target_prove_who_they_are(self):
        good, own, bad = (self.secret(name) for name in ("good", "own", "bad"))
        controller = ("--controller-secret", str(self.directory / "own"))
        with host(*self.option("good"), *controller, newer=True) as (made, its):
            shown = made.engine.show("export", "show", "v")
            self.assertEqual(shown["nvme"]["hosts_with_secret"], [HOST])
            self.assertNotIn("DHHC", json.dumps(shown))
            connect = f"nvme connect {its.options} -n {SUBSYSTEM}"
            for words in ["", f"-S {bad}", f"-S {good} -C {bad}"]:
                self.assertNotEqual(its.vm.run(f"{connect} {words}", SECONDS_MAX).rc, 0, words)
            log = made.log.read_text()
            self.assertIn("it has not proven who it is: authentication failed", log)
            for secret in (good, own, bad):
                self.assertNotIn(secret, log)
            disk = its.connect(more=f"-S {good} -C {own}")
            console = its.vm.check("dmesg")
            self.assertIn("authenticated with hash hmac(sha512) dhgroup ffdhe3072", console)
            self.assertIn("controller authenticated", console)
            its.vm.check(WRITE_AND_VERIFY.format(disk=disk, size=8), SECONDS_MAX)
            # It does so again when the daemon was lost.
            made.engine.kill()
            made.engine.start()
            its.vm.check(VERIFY_ONLY.format(disk=disk, size=8), SECONDS_MAX)
            its.nvme(f"disconnect -n {SUBSYSTEM}")
            # Another secret, of nvme-cli's own making, and no proof of ours.
            self.secret("theirs", its.nvme(f"gen-dhchap-key -m 3 -n {HOST}").splitlines()[0])
            made.engine.ashlar("export", "set", "v", *self.option("theirs"))
            self.assertNotEqual(its.vm.run(f"{connect} -S {good}", SECONDS_MAX).rc, 0)
            theirs = (self.directory / "theirs").read_text().strip()
            disk = its.connect(more=f"-S {theirs}")
            its.vm.check(VERIFY_ONLY.format(disk=disk, size=8), SECONDS_MAX)
