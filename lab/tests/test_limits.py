"""Goal: what fio, PostgreSQL or a disk cannot do is refused before anything is started, with the
word of the study, its bound and the fix.

Method: studies that ask for a little more than there is, and for just as much.
"""

import errno
import json
import socket
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from lab import host, limits, machine, study
from lab.ledger import Ledger
from lab.loads.pgbench import Pgbench
from lab.place import Host
from lab.side import Disk
from lab.study import StudyError
from lab.where import Seat

MIB, GIB = 1 << 20, 1 << 30
FIO = """
title = "t"
where = "host"
[[side]]
kind = "ashlar"
[fio]
patterns = [PATTERN]
"""
POSTGRES = """
title = "t"
where = "host"
[[side]]
kind = "ashlar"
[pgbench]
"""
GUEST = ('where="guest"', 'drives.kind="nvme"')


def load(text: str, *changes: str) -> study.Study:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "mine.toml"
        path.write_text(text)
        return study.load(path, changes=changes)


def fio(words: str = "", *changes: str) -> study.Study:
    pattern = f'{{name = "a", rw = "randread"{words}}}'
    return load(FIO.replace("PATTERN", pattern), *changes)


def told(made: study.Study, memory_bytes: int = 1 << 40) -> str:
    with mock.patch.object(machine, "memory_available", return_value=memory_bytes):
        return "\n".join(machine.problems(made, {}, Path("/tmp")))


class OfFio(unittest.TestCase):
    def refusal(self, words: str) -> str:
        with self.assertRaises(StudyError) as raised:
            fio(words)
        return str(raised.exception)

    def test_what_no_fio_does(self):
        for word, most, more, said in [
            ("depth", 32768, 32769, "io_uring has 32768 requests under way at most: say fewer"),
            ("jobs", 4088, 4089, "one fio has 4088 jobs at most: say fewer"),
            ("block", 512, 1000, "say a multiple of 512"),
            ("block", 2147479552, 2147483648, "Linux takes 2147479552 as one request at most"),
        ]:
            with self.subTest(f"{word} = {more}"):
                self.assertEqual(getattr(fio(f", {word} = {most}").fio.patterns[0], word), most)
                refused = self.refusal(f", {word} = {more}")
                self.assertIn(f"`fio.patterns.0.{word}`: is {more}", refused)
                self.assertIn(said, refused)

    def test_numbers_that_are_none_are_told_with_their_bound(self):
        for text, change, said in [
            (FIO, "fio.seconds=0", "`fio.seconds`: is 0: say more than 0"),
            (FIO, "fio.seconds=-5", "`fio.seconds`: is -5: say more than 0"),
            (FIO, "fio.warm_seconds=-1", "`fio.warm_seconds`: is -1: say 0 or more"),
            (POSTGRES, "pgbench.seconds=0", "`pgbench.seconds`: is 0: say more than 0"),
            (POSTGRES, "pgbench.warm_seconds=-1", "is -1: say 0 or more"),
            (POSTGRES, "pgbench.log_share=1.5", "is 1.5: say 1.0 or less"),
            (POSTGRES, "repeats=0", "`repeats`: is 0: say more than 0"),
        ]:
            with self.subTest(change), self.assertRaises(StudyError) as raised:
                load(text.replace("PATTERN", '{name = "a", rw = "read"}'), change)
            self.assertIn(said, str(raised.exception))

    def test_a_size_that_no_disk_has(self):
        made = fio("", "fio.size=1G")
        self.assertEqual(machine.size_problems(made, GIB), [])
        [said] = machine.size_problems(made, GIB - MIB)
        self.assertIn("`fio.size` is 1024 MiB and the disks are of 1023 MiB", said)
        self.assertIn("--set fio.size=1023M", said)
        self.assertEqual(machine.size_problems(fio(), GIB), [])
        # a run that has figures already goes on with what it has
        self.assertEqual(machine.size_problems(made, GIB - MIB, begun=True), [])

    def test_results_of_before_are_still_read(self):
        """Also those of a study that would be refused now."""
        made = fio()
        for word, value in [("depth", 40_000), ("jobs", 5000), ("block", 1000)]:
            pattern = made.fio.patterns[0].model_copy(update={word: value})
            asked = made.fio.model_copy(update={"patterns": (pattern,)})
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "study.json"
                path.write_text(made.model_copy(update={"fio": asked}).model_dump_json())
                self.assertEqual(getattr(study.as_run(path).fio.patterns[0], word), value)

    def test_a_pattern_that_is_wrong_is_told_once(self):
        self.assertEqual(len(self.refusal(", depth = 0").splitlines()), 1)
        with self.assertRaises(StudyError) as raised:
            load(FIO.replace("[PATTERN]", "[]"))
        self.assertIn("`fio.patterns`: ", str(raised.exception))

    def test_a_block_that_is_larger_than_a_bare_drive(self):
        """An array is larger than its drives."""
        made = fio(', block = "65M"', "raw=true")
        self.assertEqual(machine.size_problems(made, GIB, 65 * MIB), [])
        [said] = machine.size_problems(made, GIB, 65 * MIB - 1)
        self.assertIn("and the bare drives have 67108864: say a smaller block", said)
        self.assertIn("or raw = false", said)
        self.assertEqual(machine.size_problems(fio(', block = "65M"'), GIB, MIB), [])
        model = fio(', block = "65M"', "raw=true", 'drives.kind="model"', "drives.iops=1",
                    "drives.mbps=1")  # fmt: skip
        self.assertEqual(machine.size_problems(model, GIB, MIB), [])

    def test_a_block_that_is_larger_than_what_is_measured(self):
        """Of a disk of 320 MiB 32 are checked."""
        self.assertEqual(machine.size_problems(fio(', block = "288M"'), 320 * MIB), [])
        [said] = machine.size_problems(fio(', block = "289M"'), 320 * MIB)
        self.assertIn("`fio.patterns.0.block` (a) is 303038464 bytes", said)
        [said] = machine.size_problems(fio(', block = "128M"', "fio.size=64M"), GIB)
        self.assertIn("say a smaller block", said)

    def test_what_is_under_way_has_room_in_memory(self):
        """64 jobs of 64 blocks of 1 MiB."""
        words = ', block = "1M", depth = 64, jobs = 64'
        self.assertEqual(limits.problems(fio(words), 4 * GIB), [])
        [said] = limits.problems(fio(words), 4 * GIB - 1)
        self.assertIn("`fio.patterns.0` (a): 64 `jobs` of `depth` 64", said)
        self.assertIn("take 4096 MiB for what is under way, and this machine has free 4095", said)
        self.assertIn(said, told(fio(words), 4 * GIB - 1))
        [said] = limits.problems(fio(words, "array.count=2"), 4 * GIB)
        self.assertIn("this machine has free 4096", said)
        self.assertEqual(limits.problems(fio(words, *GUEST, "vm.memory=4G"), MIB), [])
        [said] = limits.problems(fio(words, *GUEST, "vm.memory=2G"), 1 << 40)
        self.assertIn("a guest has 2048: say less of one of them, or larger guests", said)

    def test_all_bare_drives_are_measured_by_one_fio(self):
        """Five of them."""
        self.assertEqual(limits.problems(fio(", jobs = 817", "raw=true"), 1 << 40), [])
        [said] = limits.problems(fio(", jobs = 818", "raw=true"), 1 << 40)
        self.assertIn("on each of 5 bare drives: 4090 jobs, and one fio has 4088", said)
        self.assertIn("say `jobs` of 817 or fewer", said)
        self.assertEqual(limits.problems(fio(", jobs = 818"), 1 << 40), [])


class OfPostgres(unittest.TestCase):
    def problems(self, *changes: str, memory_bytes: int = 4 * GIB) -> list[str]:
        return limits.problems(load(POSTGRES, *changes), memory_bytes)

    def test_sizes_are_read_as_postgresql_reads_them(self):
        for value, size in [
            (16384, 128 * MIB), ("16384", 128 * MIB), ("128MB", 128 * MIB),
            ("1.5 GB", 3 * GIB // 2), ("8192kB", 8 * MIB), ("1TB", 1 << 40), ("4gb", None),
            ("many", None), (True, None), (None, None),
        ]:  # fmt: skip
            self.assertEqual(limits.setting_bytes(value), size, value)

    def test_shared_buffers_that_there_is_no_memory_for(self):
        key = "pgbench.settings.shared_buffers"
        self.assertEqual(self.problems(f"{key}=4GB"), [])
        [said] = self.problems(f"{key}=5GB")
        self.assertIn(f"`{key}` is 5GB: 5120 MiB, and this machine has free 4096: say less", said)
        self.assertIn(said, told(load(POSTGRES, f"{key}=5GB"), 4 * GIB))
        [said] = self.problems(f"{key}=3GB", "array.count=2")
        self.assertIn("3072 MiB for each of 2 servers", said)
        for inside in (GUEST, ('where="vm"',)):
            self.assertEqual(self.problems(*inside, f"{key}=1GB", "vm.memory=1G"), [])
            [said] = self.problems(*inside, f"{key}=200000", "vm.memory=1G")
            self.assertIn("1562 MiB, and a guest has 1024: say less, such as 256MB", said)
            self.assertIn("--set vm.memory=", said)
        for little in ("64kB", "-1"):
            [said] = self.problems(f"{key}={little}")
            self.assertIn("takes 128kB at least", said)

    def test_ports_that_are_none(self):
        for port in ("0", "65536", "-1", "abc", "true"):
            for where in (("vm.memory=1G", 'where="vm"'), ()):
                [said] = self.problems(*where, f"pgbench.settings.port={port}")
                self.assertIn("say a number from 1 to 65535", said)
        for port in ("1", "65535", "5433"):
            self.assertEqual(self.problems(f"pgbench.settings.port={port}"), [])

    def test_a_port_that_is_in_use(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            change = f"pgbench.settings.port={port}"
            self.assertEqual(self.problems(change), [])  # its socket is a file
            for address in ("localhost", "*", "127.0.0.1"):
                listen = f'pgbench.settings.listen_addresses="{address}"'
                [said] = self.problems(change, listen)
                self.assertIn(f"`pgbench.settings.port`: {port} is in use on {address}", said)
                self.assertEqual(self.problems(change, listen, 'where="vm"'), [])
            [said] = self.problems(change, listen, "array.count=2")
            self.assertIn("2 servers on this machine would listen on one port", said)
        self.assertEqual(self.problems(change, listen), [])

    def test_a_kernel_without_ipv6_has_no_port_in_use_there(self):
        gone = OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        with mock.patch.object(limits.socket, "socket", side_effect=gone):
            self.assertFalse(limits.in_use("::1", 5432))

    def test_a_server_is_reached_by_the_port_that_it_was_given(self):
        seat = Seat("host", mock.Mock(spec=Host, logs=None), Disk(device="/dev/x"))
        for settings, port in [({}, ""), ({"port": 6000}, " PGPORT=6000")]:
            server = Pgbench(seat, study.Pgbench(settings=settings))
            self.assertIn(f"/socket{port} setpriv", server.as_user("psql"))


class OfDirectories(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.home = Path(made.name)

    def on(self, directory: str | Path) -> host.OnHost:
        made = fio("", "drives.size=1M", f"drives.directory={json.dumps(str(directory))}")
        return host.OnHost(made, self.home, Host(Ledger(self.home / "ledger")))

    def test_one_that_is_not_there_is_made(self):
        directory = self.home / "not" / "there"
        where = self.on(directory)
        self.assertEqual(where.problems(), [])
        self.assertFalse(directory.exists())  # before anything is started
        where.start(lambda what: None)
        self.assertEqual(where.directory.parent, directory)
        where.close()

    def test_one_that_cannot_be_made_is_told_before(self):
        (self.home / "file").touch()
        (self.home / "gone").symlink_to(self.home / "nowhere")
        for directory, said in [
            (self.home / "file", "file is no directory"),
            (self.home / "file" / "x", "file is no directory"),
            (self.home / "gone" / "x", "gone is no directory"),
            (self.home / ("x" * 300), "cannot be looked at (File name too long)"),
            (self.home / "new" / ("é" * 128) / "y", "é… is too long for a name there"),
            ("/proc/drives", "nothing can be made in /proc, where it"),
            ("/sys/block", "nothing can be made in it"),
            (f"{self.home}/a\0b", "is no path (embedded null byte)"),
            ("~/drives", "write it out (/"),
        ]:
            with self.subTest(str(directory)):
                [found] = self.on(directory).problems()
                self.assertIn("drives.directory", found)
                self.assertIn(said, found)
        with (
            mock.patch.object(host.os, "access", return_value=False),
            mock.patch.object(host.os, "geteuid", return_value=1000) as user,
        ):
            [found] = self.on(self.home / "new").problems()
            self.assertIn(f"nothing can be made in {self.home}, where it would", found)
            self.assertIn("--set drives.directory=", found)
            self.assertIn("in it: run it as root", self.on(self.home).problems()[0])
            user.return_value = 0
            self.assertIn("in it: say another", self.on(self.home).problems()[0])


if __name__ == "__main__":
    unittest.main()
