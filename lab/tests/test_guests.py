"""Goal: guests are started with what a study says, and nothing that was not asked for is taken."""

import os
import shutil
import tempfile
import threading
import time
import unittest
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

from demo import vm
from demo.vm import Vm, VmError
from lab import guest_disks, guests, in_vms, nvme, paths, pinning
from lab.ledger import Ledger
from lab.place import Host
from lab.tests import needs


class Pinning(unittest.TestCase):
    def test_lists_of_cpus(self):
        self.assertEqual(pinning.cpus_of("0,2-4"), [0, 2, 3, 4])
        self.assertEqual(pinning.cpus_of("7"), [7])

    def test_each_virtual_cpu_has_one_beside_those_of_the_storage(self):
        plan = pinning.plan([7, 0, 1, 2, 3, 4], {0, 1}, machines=2, cpus=2)
        self.assertEqual(plan, [[2, 3], [4, 7]])

    def test_too_few(self):
        self.assertIsNone(pinning.plan([0, 1, 2], {0}, machines=2, cpus=2))


class Nvme(unittest.TestCase):
    def test_every_drive_has_a_slot_of_its_own_and_is_past_the_cache(self):
        drives = nvme.NvmeDrives(None, Path("/d"), 3, 1 << 30, queues=2)
        words = " ".join(drives.options())
        for number in range(3):
            file = f"filename=/d/nvme{number}.img,node-name=file{number},cache.direct=on"
            self.assertIn(file, words)
            self.assertIn(f"drive=file{number},serial=LAB{number},bus=slot{number}", words)
        self.assertEqual(words.count("pcie-root-port"), 3)
        addresses = [word.split("addr=")[1] for word in drives.options() if "root-port" in word]
        self.assertEqual(len(set(addresses)), 3)
        self.assertNotIn(hex(guest_disks.LOGS_ADDRESS), addresses)

    def test_drives_are_told_apart_by_their_serials(self):
        text = "LAB1 nvme0n1\nLAB0 nvme3n1\nLAB2\n"
        self.assertEqual(nvme.named(text), {"LAB1": "/dev/nvme0n1", "LAB0": "/dev/nvme3n1"})


class Kernel(unittest.TestCase):
    def test_the_release_is_the_one_name_that_is_no_dot(self):
        listing = "/11/040755/0/0/.//\n/2/040755/0/0/..//\n/12/040755/0/0/6.1.0-56-amd64//\n"
        self.assertEqual(guests.released(listing), "6.1.0-56-amd64")
        self.assertEqual(guests.released(""), "")


class Disks(unittest.TestCase):
    def test_a_file_and_a_device_go_past_the_cache_with_a_thread_of_their_own(self):
        with tempfile.NamedTemporaryFile() as file:
            words = " ".join(in_vms.virtio_disk(file.name, 4))
        self.assertIn(f"driver=file,filename={file.name},node-name=disk0,cache.direct=on", words)
        self.assertIn("iothread=io0", words)
        self.assertIn("num-queues=4", words)


class Logs(unittest.TestCase):
    """Of guests whose QEMU was started. What is asked of the machine itself is made up."""

    def setUp(self):
        home = tempfile.TemporaryDirectory(prefix="ashlar-lab-test-")
        self.addCleanup(home.cleanup)
        self.home = Path(home.name)
        self.ledger = Ledger(self.home / "ledger")

    def guest(self, name: str) -> tuple[guest_disks.LogsDisk, guests.Guest]:
        host = SimpleNamespace(
            ledger=self.ledger, check=lambda _: None, write_down=lambda *_: None
        )
        image = SimpleNamespace(root=self.home / "root.img")
        guest = guests.Guest(name, host)
        logs = guest_disks.LogsDisk(host, image, self.home, self.home, guest)
        logs.file.touch()
        guest.vm = Vm(image)
        guest.vm.qemu = mock.Mock()
        guest.vm.qemu.poll.return_value = None
        return logs, guest

    def closed(self, what, *of: tuple[guest_disks.LogsDisk, guests.Guest]) -> None:
        with mock.patch("demo.vm.child.kill") as killed:
            try:
                what()
            finally:
                ended = [call.args[0] for call in killed.call_args_list]
                for logs, guest in of:
                    self.assertIn(guest.vm.qemu, ended)
                    self.assertFalse(logs.file.exists())
                self.assertEqual(self.ledger.debts(), [])

    @needs(shutil.which("dumpe2fs", path=paths.programs()), "takes e2fsprogs")
    def test_a_guest_writes_no_tables_while_something_is_measured(self):
        image = SimpleNamespace(root=self.home / "root.img")
        host = Host(self.ledger)
        logs = guest_disks.LogsDisk(host, image, self.home, self.home, guests.Guest("vm0", host))
        said = host.check(f"PATH=$PATH:/usr/sbin:/sbin; dumpe2fs {logs.file} 2>&1")
        groups = [line for line in said.splitlines() if line.startswith("Group ")]
        zeroed = [line for line in groups if "ITABLE_ZEROED" in line]
        self.assertGreater(len(groups), 1)
        self.assertEqual(len(zeroed), len([line for line in groups if "(Blocks" in line]))
        self.assertLess(logs.file.stat().st_blocks * 512, 32 << 20)
        logs.file.unlink()

    def test_a_guest_that_has_not_booted_yet_is_ended(self):
        logs, guest = self.guest("vm0")
        self.closed(logs.close, (logs, guest))

    def test_one_whose_cluster_cannot_be_kept_is_ended_and_so_are_all(self):
        both = self.guest("vm0"), self.guest("vm1")
        there = in_vms.InVms.__new__(in_vms.InVms)
        there.logs, there.guests = map(list, zip(*both, strict=True))
        for logs, guest in both:
            guest.vm.boot_seconds = 1.0
            logs.keep = mock.Mock(side_effect=OSError("no space"))
        with self.assertRaisesRegex(OSError, "no space"):
            self.closed(there.leave, *both)


class Guest(unittest.TestCase):
    def test_a_host_without_unplugging_keeps_the_name(self):
        guest = guests.Guest("g", SimpleNamespace(write_down=lambda *_: None))
        self.assertFalse(guest.unplug("/dev/vda"))
        self.assertEqual(guest.plug("/dev/vda"), "/dev/vda")

    def test_commands_of_a_guest_that_is_gone_name_its_console(self):
        guest = guests.Guest("g", SimpleNamespace(write_down=lambda *_: None))

        def run(command, timeout):
            raise VmError("the guest went away")

        guest.vm = SimpleNamespace(running=False, run=run)
        with self.assertRaisesRegex(VmError, f"went away\n.* is in {guest.log}"):
            guest.check("true")


class Threads(unittest.TestCase):
    def test_what_a_thread_has_used_that_is_gone_stays(self):
        guest = guests.Guest("g", None)
        guest.vm = SimpleNamespace(qemu=SimpleNamespace(pid=os.getpid()))
        ends = threading.Event()

        def work() -> None:
            while time.thread_time() < 0.3:
                pass
            ends.wait()

        worker = threading.Thread(target=work)
        inside, before = guest.threads_seconds()
        worker.start()
        while guest.threads_seconds()[1] < before + 0.25:
            time.sleep(0.01)
        guest.cpu_threads = [threading.main_thread().native_id]
        own, there = guest.threads_seconds()
        ends.set()
        worker.join()
        self.assertGreaterEqual(guest.threads_seconds()[1], there - 0.02)  # two ticks
        self.assertEqual(inside, 0.0)
        self.assertGreater(own, 0.0)


class FakeNvme:
    """Drives that come back by the first name that is free, as the kernel has it."""

    def __init__(self, count: int):
        self.names = {number: f"/dev/nvme{number}n1" for number in range(count)}
        self.out: set[int] = set()

    def paths(self, vm):
        return dict(self.names)

    def unplug(self, vm, number):
        assert number not in self.out
        self.out.add(number)
        del self.names[number]

    def plug(self, vm, number):
        self.out.remove(number)
        free = (f"/dev/nvme{at}n1" for at in range(10))
        self.names[number] = next(name for name in free if name not in self.names.values())


class Hands(unittest.TestCase):
    def test_two_drives_that_are_out_come_back_each_as_itself(self):
        guest = guests.Guest("g", SimpleNamespace(write_down=lambda *_: None))
        guest.nvme = FakeNvme(3)
        self.assertTrue(guest.unplug("/dev/nvme0n1"))
        self.assertTrue(guest.unplug("/dev/nvme1n1"))
        self.assertFalse(guest.unplug("/dev/md100"))
        self.assertFalse(guest.unplug("/dev/nvme1n1"))  # it is out
        # The one that comes back first has the name of the other, who is still out by it.
        self.assertEqual(guest.plug("/dev/nvme1n1"), "/dev/nvme0n1")
        self.assertEqual((guest.nvme.out, guest.nvme.names[1]), ({0}, "/dev/nvme0n1"))
        self.assertEqual(guest.plug("/dev/nvme0n1"), "/dev/nvme1n1")
        self.assertEqual((guest.nvme.out, guest.nvme.names[0]), (set(), "/dev/nvme1n1"))
        # One that was never out is where it is.
        self.assertEqual(guest.plug("/dev/nvme2n1"), "/dev/nvme2n1")
        self.assertTrue(guest.unplug("/dev/nvme1n1"))
        self.assertEqual(guest.nvme.out, {0})

    def test_two_that_went_by_one_name_both_come_back(self):
        guest = guests.Guest("g", SimpleNamespace(write_down=lambda *_: None))
        guest.nvme = FakeNvme(2)
        for device in ("/dev/nvme0n1", "/dev/nvme1n1"):
            self.assertTrue(guest.unplug(device))
        self.assertEqual(guest.plug("/dev/nvme1n1"), "/dev/nvme0n1")
        self.assertTrue(guest.unplug("/dev/nvme0n1"))
        found = {guest.plug("/dev/nvme0n1") for _ in range(2)}
        self.assertEqual(found, {"/dev/nvme0n1", "/dev/nvme1n1"})
        self.assertEqual(guest.nvme.out, set())


class FakeVm:
    """Comes up at the try that is told, if ever."""

    def __init__(self, failures: int):
        self.failures = failures

    def wait_up(self, seconds: float):
        if self.failures:
            raise VmError("it hangs")

    def cpu_threads(self):
        return []


class Making(unittest.TestCase):
    def test_what_takes_minutes_is_said_where_it_is_seen(self):
        said, written = [], []
        host = SimpleNamespace(write_down=lambda what, _: written.append(what))

        def build(cache, say, recipe):
            say("fetching packages")

        def accel(image, say):
            say("trying KVM")
            return "tcg"

        with tempfile.TemporaryDirectory() as cache, mock.patch.multiple(
            guests, working_accel=accel, guest_image=SimpleNamespace(build=build)
        ), mock.patch.dict(os.environ, {"ASHLAR_CACHE": cache}):
            self.assertEqual(guests.image(None, host, said.append), (None, "tcg"))
        self.assertEqual(said, ["the machines: fetching packages", "the machines: trying KVM"])
        self.assertEqual(written, ["guest: fetching packages", "guest: trying KVM"])


class Booting(unittest.TestCase):
    def booted(self, accel: str, failures: int) -> guests.Guest:
        """A guest whose first boots fail."""
        home = tempfile.TemporaryDirectory()
        self.addCleanup(home.cleanup)
        guest = guests.Guest("g", SimpleNamespace(write_down=lambda *_: None))
        guest.log = Path(home.name) / "g.log"
        left = iter(range(failures, -1, -1))

        class Machine(guests.Machine):
            def launch(self, guest):
                guest.log.write_text("its last words")
                guest.vm = FakeVm(next(left))

        machine = Machine(None, accel, 1, 1 << 30, None, False)
        machine.launch(guest)
        machine.wait_up(guest, 1)
        return guest

    def test_emulated_guests_are_booted_again_a_few_times(self):
        guest = self.booted("tcg", failures=guests.TRIES_MAX - 1)
        self.assertEqual(guest.panics, guests.TRIES_MAX - 1)
        self.assertEqual((guest.log.parent / "g.0.log").read_text(), "its last words")

    def test_one_that_is_looked_at_late_has_booted_all_the_same(self):
        with tempfile.NamedTemporaryFile() as log:
            log.write(vm.FIRST_PROGRAM)
            log.flush()
            late = vm.Vm(SimpleNamespace(), accel="tcg", log=Path(log.name))
            late.qemu = mock.Mock(**{"poll.return_value": None})
            late.launched, late.log_begins = -vm.FIRST_PROGRAM_SECONDS_MAX, 0
            with mock.patch.multiple(vm.Vm, launch=mock.DEFAULT, close=mock.DEFAULT) as its:
                late.boot_again_if_stuck()
                its["launch"].assert_not_called()
                log.truncate(0)  # it has not
                late.boot_again_if_stuck()
                its["launch"].assert_called()

    def test_then_and_with_kvm_at_once_the_console_is_named(self):
        for accel, failures in (("tcg", guests.TRIES_MAX), ("kvm", 1)):
            with self.assertRaisesRegex(VmError, r"it hangs\nthe console of g is in .*\.log"):
                self.booted(accel, failures)


if __name__ == "__main__":
    unittest.main()
