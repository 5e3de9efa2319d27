"""Goal: a volume is a block device of the host that runs the daemon, and whatever happens to the
daemon is a pause for whoever uses it: no error, and nothing that was written is lost.

Method: a kernel with ublk_drv in a guest with NVMe drives, the daemon in it, and fio, XFS and
PostgreSQL on the device. They write all the while that the daemon is killed and replaced, and fio
also while a drive is taken out.
"""

import os
import time
import unittest

from demo import guest_image
from demo.postgres import AS_POSTGRES, DATABASE, Postgres
from tests.rig import BINARY
from tests.test_nvme import DRIVES, SECONDS_MAX, Guest, guest

DEVICE = "/dev/ublkb0"
QUEUE = "/sys/block/ublkb0/queue"
VOLUME_BYTES = 320 << 20  # XFS takes 300 MiB or more
LARGER_BYTES = 384 << 20
CLIENTS = 4
KILLS = int(os.environ.get("ASHLAR_KILLS") or 3)
COMMITS = 20  # between two kills, and more: pgbench writes its log in blocks
COMMITTED = "cat /run/log.* 2>/dev/null | wc -l"  # a line for each that pgbench was told of
# Writes and verifies over and over, until it is told to stop: an error, or a byte that is not what
# was written, ends it with a status. The device is open also between two rounds.
LOAD = (
    f"exec 9<{DEVICE}; cd /run; while [ ! -e enough ]; do "
    f"fio --name=load --filename={DEVICE} --direct=1 "
    "--ioengine=libaio --iodepth=32 --rw=randwrite --bsrange=4k-128k --size=24m --verify=crc32c "
    "--do_verify=1 --fsync=64 --randrepeat=0 || exit 1; done"
)


def started(made: Guest) -> None:
    """A daemon with RAID 5 and a volume, in a kernel that has no ublk yet."""
    made.start_daemon("state")
    attach(made)
    made.ashlar("array create a --level 5 --drives d0,d1,d2,d3 --chunk 64K")
    made.ashlar(f"volume create v --array a --size {VOLUME_BYTES >> 20}M")


def attach(made: Guest) -> None:
    for number in range(DRIVES):
        made.ashlar(f"drive attach {made.block_device(number)} --name d{number}")


def setting(made: Guest, name: str) -> str:
    return made.vm.check(f"cat {QUEUE}/{name}").strip()


def device_is_there(made: Guest) -> bool:
    return made.vm.run(f"[ -b {DEVICE} ]").rc == 0


class Load:
    """fio in the guest, which must not notice anything."""

    def __init__(self, made: Guest):
        self.made = made
        made.vm.check("rm -f /run/enough")
        self.command = made.vm.spawn(LOAD)
        self.wait_writes()

    def written(self) -> int:
        """Sectors, as the kernel counts them: also while nobody serves the device."""
        return int(self.made.vm.check("cat /sys/block/ublkb0/stat").split()[6])

    def wait_writes(self) -> None:
        """Until it writes, now."""
        before, deadline = self.written(), time.monotonic() + SECONDS_MAX
        while self.written() < before + 2048:
            assert self.command.running, self.command.wait().text
            assert time.monotonic() < deadline, "fio stands still"
            time.sleep(0.2)

    def end(self) -> None:
        self.made.vm.check("touch /run/enough")
        output = self.command.wait(SECONDS_MAX)
        assert output.rc == 0, output.text[-3000:]


class Ublk(unittest.TestCase):
    def test_whatever_happens_to_the_daemon_is_a_pause(self):
        with guest(recipe=guest_image.NEW_KERNEL, programs=(BINARY,)) as made:
            vm = made.vm
            started(made)
            create = "export create u --volume v --kind ublk"
            self.assertIn("`modprobe ublk_drv`", made.refusal(create))
            vm.check("modprobe ublk_drv")
            self.refusals(made)
            self.assertEqual(made.ashlar(create).splitlines()[0], DEVICE)
            self.is_as_it_says(made)

            load = Load(made)
            self.assertIn("has it open", made.refusal("export delete u"))
            self.assertIn("has it open", made.refusal("array stop a"))
            made.stop_daemon("KILL")
            self.assertTrue(load.command.running)
            made.start_daemon("state")
            load.wait_writes()
            made.ashlar("upgrade")
            load.wait_writes()
            vm.qmp("device_del", id="nvme1")
            made.wait_state("degraded")
            load.wait_writes()
            made.stop_daemon("TERM")
            made.start_daemon("state")
            load.wait_writes()
            load.end()
            its = made.show("export show u")
            self.assertEqual((its["counters"]["errors"], its["error"]), (0, None), its)
            made.ashlar("export delete u")
            self.assertFalse(device_is_there(made))
            made.stop_daemon()

    def test_file_systems_and_sizes(self):
        with guest(recipe=guest_image.NEW_KERNEL, programs=(BINARY,)) as made:
            vm = made.vm
            vm.check("modprobe ublk_drv && modprobe xfs")
            started(made)
            made.ashlar("export create u --volume v --kind ublk --id 0 --queues 1")
            vm.check(f"mkfs.ext4 -q {DEVICE}", SECONDS_MAX)
            vm.check(f"blkdiscard {DEVICE}", SECONDS_MAX)
            vm.check(f"busybox cmp -n {64 << 20} {DEVICE} /dev/zero", SECONDS_MAX)
            vm.check(f"mkfs.xfs -q -f {DEVICE} && mount {DEVICE} /mnt", SECONDS_MAX)
            self.assertIn("mounted at /mnt", made.refusal("export delete u"))
            vm.check("busybox dd if=/dev/urandom of=/mnt/a bs=1M count=16 2>&1", SECONDS_MAX)
            vm.check("sha256sum /mnt/a >/run/sums && sync", SECONDS_MAX)
            made.stop_daemon("KILL")
            # It waits for the daemon, in the kernel.
            waiting = vm.spawn("busybox dd if=/run/sums of=/mnt/b conv=fsync 2>&1")
            made.start_daemon("state")
            self.assertEqual(waiting.wait(SECONDS_MAX).rc, 0)
            vm.check("rm /mnt/b && fstrim /mnt && umount /mnt", SECONDS_MAX)
            self.assertGreater(made.show("export show u")["counters"]["discards"], 0)
            vm.check(f"mount {DEVICE} /mnt && sha256sum -c /run/sums && umount /mnt", SECONDS_MAX)

            # Nobody uses it: it goes with the daemon, and comes back under its number.
            made.stop_daemon()
            self.assertFalse(device_is_there(made))
            made.start_daemon("state")
            vm.check(f"mount {DEVICE} /mnt && sha256sum -c /run/sums && umount /mnt", SECONDS_MAX)

            made.ashlar(f"volume resize v --size {LARGER_BYTES >> 20}M")
            error = made.show("export show u")["error"]
            if error is None:
                self.assertEqual(vm.check("cat /sys/block/ublkb0/size"), f"{LARGER_BYTES >> 9}\n")
            else:
                self.assertIn("create it again with --id 0", error)
            made.ashlar("export delete u")
            vm.check("cp -a /run/state /run/other")
            made.ashlar("export create u --volume v --kind ublk --id 0 --block 4K")
            self.assertEqual(vm.check("cat /sys/block/ublkb0/size"), f"{LARGER_BYTES >> 9}\n")
            self.assertEqual(setting(made, "logical_block_size"), "4096")

            # A daemon that has had the array all the time takes up what is this volume's.
            made.stop_daemon("KILL")
            made.start_daemon("other")
            self.assertTrue(device_is_there(made))
            made.wait_state("optimal")
            create = "export create w --volume v --kind ublk --id"
            self.assertIn("use --block 4096", made.refusal(f"{create} 0"))
            made.ashlar(f"{create} 0 --block 4096")
            self.assertEqual(made.show("export show w")["place"], DEVICE)

            # One that knows nothing cannot tell whether another host had it meanwhile.
            made.stop_daemon("KILL")
            made.start_daemon("third")
            attach(made)
            made.ashlar("array start --scan")
            self.assertIn("choose another --id", made.refusal(f"{create} 0 --block 4096"))
            made.ashlar(f"{create} 1")
            made.ashlar("export delete w")
            self.assertTrue(device_is_there(made))
            made.stop_daemon()

    def test_postgresql_loses_no_commit(self):
        with guest(recipe=guest_image.NEW_KERNEL, programs=(BINARY,)) as made:
            vm = made.vm
            vm.check("modprobe ublk_drv && modprobe xfs && chmod 777 /run")
            started(made)
            made.ashlar("export create u --volume v --kind ublk --id 0")
            postgres = Postgres(vm, DEVICE)
            postgres.create()
            postgres.load(1, lambda line: None, SECONDS_MAX)
            load = f"pgbench -n -c {CLIENTS} -T 3600 -l --log-prefix=/run/log {DATABASE}"
            said: list[str] = []
            running = vm.spawn(f"exec {AS_POSTGRES} {load} 2>&1", said.append)
            committed = lambda: int(vm.check(COMMITTED))
            for kill in range(KILLS + 1):
                before, deadline = committed(), time.monotonic() + SECONDS_MAX
                while committed() < before + COMMITS:
                    assert running.running and not any("abort" in line for line in said), said
                    assert time.monotonic() < deadline, "nothing is committed"
                    time.sleep(0.2)
                if kill < KILLS:
                    made.stop_daemon("KILL")
                else:  # and the server with it
                    vm.check(
                        "pid=$(busybox pidof ashlar); kill -KILL $(busybox pidof postgres) $pid; "
                        "while [ -e /proc/$pid ]; do sleep 0.1; done"
                    )
                made.start_daemon("state")
            running.wait(SECONDS_MAX)
            acknowledged = committed()
            postgres.start()
            accounts, branches, tellers, history, rows = postgres.balances()
            self.assertEqual({accounts, branches, tellers}, {history})
            self.assertGreaterEqual(rows, acknowledged)
            self.assertLessEqual(rows, acknowledged + CLIENTS)
            postgres.amcheck(SECONDS_MAX)
            postgres.stop()
            vm.check("umount /data")
            its = made.show("export show u")
            self.assertEqual((its["counters"]["errors"], its["error"]), (0, None), its)
            made.scrub_is_clean()
            made.ashlar("export delete u")
            made.stop_daemon()

    def refusals(self, made: Guest) -> None:
        create = "export create u --volume v --kind ublk"
        self.assertIn("512 or 4096", made.refusal(f"{create} --block 1000"))
        self.assertIn("use 0 to", made.refusal(f"{create} --id 1048576"))
        self.assertIn("--id N", made.refusal(f"{create} --path /dev/x"))
        self.assertIn("--kind ublk", made.refusal("export create u --volume v --kind nbd --id 3"))
        self.assertFalse(device_is_there(made))

    def is_as_it_says(self, made: Guest) -> None:
        self.assertEqual(made.vm.check("cat /sys/block/ublkb0/size"), f"{VOLUME_BYTES >> 9}\n")
        for name, value in {
            "logical_block_size": "512",
            "physical_block_size": "4096",
            # Three chunks of 64 KiB are no power of two.
            "optimal_io_size": str(64 << 10),
            "discard_granularity": str(192 << 10),
            "write_cache": "write back",
            "fua": "1",
            "nr_requests": "128",
        }.items():
            self.assertEqual(setting(made, name), value, name)
        self.assertIn("[none]", setting(made, "scheduler"))
        its = made.show("export show u")
        self.assertEqual((its["kind"], its["place"], its["state"]), ("ublk", DEVICE, "listening"))
        self.assertIn("1 queues of 128", its["way"])
        refusal = made.refusal("export create w --volume v --kind ublk --id 0 --block 4096")
        self.assertIn("/dev/ublkb0 is busy", refusal)


if __name__ == "__main__":
    unittest.main()
