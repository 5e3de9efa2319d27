"""Goal: Linux hosts use a volume over the network as they use any NVMe drive.

Method: a real kernel's nvme-tcp and nvme-cli in QEMU, over its user network; fio with crc32c
verification, the volume grown, the daemon killed, hosts that may not.
"""

import contextlib
import json
import socket
import unittest

from demo import guest_image
from demo.vm import Vm
from tests.rig import CACHE, Rig, rig

VOLUME_BYTES = 128 << 20
SUBSYSTEM = "nqn.2026-01.example:disk"
HOST = "nqn.2026-01.example:guest"
# The machine that QEMU runs on, as the guest sees it.
GATEWAY = "10.0.2.2"
NETWORK = ["-netdev", "user,id=n0", "-device", "virtio-net-pci,netdev=n0,addr=0x1c"]
SECONDS_MAX = 120
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

    def __init__(self, made: Rig, port: int, options: str = ""):
        image = guest_image.build(CACHE, lambda text: None)
        self.port = port
        self.options = f"-t tcp -a {GATEWAY} -s {port} --hostnqn {HOST} {options}"
        log = made.directory / "console.log"
        self.vm = Vm(image, memory="512M", log=log, qemu_options=NETWORK)
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

    def size(self, disk: str) -> int:
        return int(self.vm.check(f"cat /sys/block/{disk.removeprefix('/dev/')}/size")) << 9


def offer(made: Rig, port: int, *words: str) -> None:
    made.attach("d0", "d1", "d2")
    made.engine.create_array("a", ["d0", "d1", "d2"])
    made.engine.create_volume("v", "a", VOLUME_BYTES)
    listen = ("--listen", f"127.0.0.1:{port}", "--nqn", SUBSYSTEM)
    made.engine.ashlar("export", "create", "v", "--volume", "v", "--kind", "nvme-tcp", *listen, *words)


@contextlib.contextmanager
def host(*words: str, options: str = ""):
    with rig() as made:
        port = free_port()
        offer(made, port, *words)
        its = Host(made, port, options)
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
            self.assertEqual(made.engine.show("export", "show", "v")["state"], "listening")

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
            self.assertIn(f"{HOST} is no host of {SUBSYSTEM}", made.log.read_text())

    def test_a_killed_daemon_is_found_again(self):
        with host(options="--hdr-digest --data-digest") as (made, its):
            disk = its.connect()
            its.vm.check(WRITE_AND_VERIFY.format(disk=disk, size=16), SECONDS_MAX)
            running = its.vm.spawn(WRITE_AND_VERIFY.format(disk=disk, size=16))
            made.engine.kill()
            made.engine.start()
            self.assertEqual(running.wait(SECONDS_MAX).rc, 0, "while the daemon was killed")
            its.vm.check(VERIFY_ONLY.format(disk=disk, size=16), SECONDS_MAX)
