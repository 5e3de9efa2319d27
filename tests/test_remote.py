"""Goal: arrays work on namespaces of another vendor's NVMe/TCP target, and outlive the loss of one.

Method: a real kernel with Linux's own target (nvmet-tcp) on NVMe drives, all emulated by QEMU; the
daemon runs beside it in the guest and reaches the drives over TCP. A subsystem is taken away from the
port under load, and put back.
"""

import time
import unittest

from tests.test_nvme import DRIVES, SECONDS_MAX, VOLUME_BYTES, Guest, guest

CONFIG = "/sys/kernel/config/nvmet"
PORT = f"{CONFIG}/ports/1"
ADDRESS = "127.0.0.1:4420"


def nqn(number: int) -> str:
    return f"nqn.2026-01.test:n{number}"


def start_target(made: Guest) -> None:
    """A subsystem for each drive, all at one port."""
    made.vm.check("busybox ip link set lo up && modprobe nvmet-tcp && modprobe configfs", 30)
    made.vm.check("mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config")
    for number in range(DRIVES):
        subsystem = f"{CONFIG}/subsystems/{nqn(number)}"
        namespace = f"{subsystem}/namespaces/1"
        made.vm.check(
            f"mkdir {subsystem} && echo 1 >{subsystem}/attr_allow_any_host && mkdir {namespace} && "
            f"echo {made.block_device(number)} >{namespace}/device_path && echo 1 >{namespace}/enable"
        )
    made.vm.check(
        f"mkdir {PORT} && echo tcp >{PORT}/addr_trtype && echo ipv4 >{PORT}/addr_adrfam && "
        f"echo 127.0.0.1 >{PORT}/addr_traddr && echo 4420 >{PORT}/addr_trsvcid"
    )
    for number in range(DRIVES):
        link(made, number)


def link(made: Guest, number: int) -> None:
    made.vm.check(f"ln -s {CONFIG}/subsystems/{nqn(number)} {PORT}/subsystems/{nqn(number)}")


def unlink(made: Guest, number: int) -> None:
    made.vm.check(f"rm {PORT}/subsystems/{nqn(number)}", 60)


class Remote(unittest.TestCase):
    def wait_taken_back(self, made: Guest, member: int) -> None:
        deadline = time.monotonic() + SECONDS_MAX
        while made.show("array show a")["members"][member]["state"] == "stale":
            self.assertLess(time.monotonic(), deadline, "its drive is not taken back")
            time.sleep(0.5)

    def test_an_array_on_another_vendors_target(self):
        with guest() as made:
            vm = made.vm
            start_target(made)
            made.start_daemon("state")
            listed = made.refusal(f"drive attach nvme-tcp://{ADDRESS}")
            for number in range(DRIVES):
                self.assertIn(f"nvme-tcp://{ADDRESS}/{nqn(number)}", listed)
            self.assertIn("no namespace 2", made.refusal(
                f"drive attach nvme-tcp://{ADDRESS}/{nqn(0)}?nsid=2"))  # fmt: skip
            self.assertIn("no such subsystem", made.refusal(
                f"drive attach nvme-tcp://{ADDRESS}/nqn.nobody"))  # fmt: skip
            for number in range(DRIVES):
                digests = ["", "?hdgst=1", "?ddgst=1", "?hdgst=1&ddgst=1"][number % 4]
                source = f"nvme-tcp://{ADDRESS}/{nqn(number)}{digests}"
                made.ashlar(f"drive attach '{source}' --name d{number}")
            made.ashlar("array create a --level 5 --drives d0,d1,d2,d3 --chunk 64K")
            made.ashlar(f"volume create v --array a --size {VOLUME_BYTES >> 20}M")
            made.export()
            vm.check(made.client(1, "write"), SECONDS_MAX)
            vm.check(made.client(1, "verify"), SECONDS_MAX)
            made.scrub_is_clean()
            path = made.show("drive show d3")["path"]
            self.assertEqual((path["state"], path["address"]), ("connected", ADDRESS))

            load = vm.spawn(
                f"while [ ! -e /run/enough ]; do {made.client(2, 'write')} || exit 1; done"
            )
            unlink(made, 1)
            made.wait_state("degraded")
            self.assertEqual(made.show("drive show d1")["path"]["state"], "lost")
            link(made, 1)
            self.wait_taken_back(made, 1)
            vm.check("touch /run/enough")
            self.assertEqual(load.wait(SECONDS_MAX).rc, 0)
            # Under emulation the rebuild would take an hour beside the load, which it gives way to.
            made.wait_state("optimal")
            vm.check(made.client(2, "verify"), SECONDS_MAX)
            made.scrub_is_clean()
            made.stop_daemon()

            # The same namespaces as the kernel's own drives: what is on them is the same.
            for number in range(DRIVES):
                unlink(made, number)
            made.start_daemon("other")
            for number in range(DRIVES):
                made.ashlar(f"drive attach {made.block_device(number)} --name d{number}")
            made.ashlar("array start --scan")
            made.export()
            vm.check(made.client(2, "verify"), SECONDS_MAX)
            made.stop_daemon()


if __name__ == "__main__":
    unittest.main()
