"""Goal: guests are started with what a study says, and nothing that was not asked for is taken."""

import tempfile
import unittest
from pathlib import Path
from types import SimpleNamespace

from demo.vm import VmError
from lab import guests, in_vms, nvme, pinning


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
        self.assertNotIn(hex(guests.LOGS_ADDRESS), addresses)

    def test_drives_are_told_apart_by_their_serials(self):
        text = "LAB1 nvme0n1\nLAB0 nvme3n1\nLAB2\n"
        self.assertEqual(nvme.named(text), {"LAB1": "/dev/nvme0n1", "LAB0": "/dev/nvme3n1"})


class Disks(unittest.TestCase):
    def test_a_file_and_a_device_go_past_the_cache_with_a_thread_of_their_own(self):
        with tempfile.NamedTemporaryFile() as file:
            words = " ".join(in_vms.virtio_disk(file.name, 4))
        self.assertIn(f"driver=file,filename={file.name},node-name=disk0,cache.direct=on", words)
        self.assertIn("iothread=io0", words)
        self.assertIn("num-queues=4", words)


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


class FakeVm:
    """Comes up at the try that is told, if ever."""

    def __init__(self, failures: int):
        self.failures = failures

    def wait_up(self, seconds: float):
        if self.failures:
            raise VmError("it hangs")

    def cpu_threads(self):
        return []


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

    def test_then_and_with_kvm_at_once_the_console_is_named(self):
        for accel, failures in (("tcg", guests.TRIES_MAX), ("kvm", 1)):
            with self.assertRaisesRegex(VmError, r"it hangs\nthe console of g is in .*\.log"):
                self.booted(accel, failures)


if __name__ == "__main__":
    unittest.main()
