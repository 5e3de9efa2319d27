"""Goal: a study with a mistake is refused with its place and the fix, and ours have none."""

import json
import os
import tempfile
import unittest
from pathlib import Path
from unittest import mock

from lab import host, machine, sides, study
from lab.ledger import Ledger
from lab.place import Host
from lab.side import Protection
from lab.sides import ashlar, blocks, btrfs, zfs
from lab.study import StudyError

STUDIES = Path(study.__file__).parent / "studies"
GOOD = """
title = "t"
where = "host"
[[side]]
kind = "ashlar"
[pgbench]
scale = 10
[quick.pgbench]
scale = 1
"""


FIO = """
title = "t"
where = "vm"
[[side]]
kind = "ashlar"
[fio]
patterns = [PATTERNS]
"""


class OnlyProtected:
    """A side, as far as the comparison of protections goes."""

    def __init__(self, losses: int, write_hole: str):
        self.protection = Protection(losses, write_hole)


class Studies(unittest.TestCase):
    def load(self, text: str, quick: bool = False, changes: tuple[str, ...] = (), where=None):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "mine.toml"
            path.write_text(text)
            return study.load(path, quick, changes, where)

    def refusal(self, text: str, changes: tuple[str, ...] = (), **how) -> str:
        with self.assertRaises(StudyError) as raised:
            self.load(text, changes=changes, **how)
        return str(raised.exception)

    def test_ours_are_right_in_full_and_quick(self):
        paths = list(STUDIES.glob("*.toml"))
        self.assertGreaterEqual(len(paths), 2)
        for path in paths:
            with self.subTest(path.name):
                self.assertLessEqual(study.load(path, quick=True).repeats, study.load(path).repeats)

    def test_all_run_wherever_they_are_told_to(self):
        for path in STUDIES.glob("*.toml"):
            for where in study.Where:
                for quick in (True, False):
                    with self.subTest(f"{path.name}, {where}"):
                        made = study.load(path, quick, where=where)
                        self.assertEqual(made.where, where)
                        self.assertEqual(made.drives.kind == "nvme", where == study.Where.GUEST)

    def test_words_of_another_place_are_dropped_and_those_of_set_are_not(self):
        text = FIO.replace("PATTERNS", '{name = "a", rw = "read"}') + \
            "vms = [1, 2]\n[vm]\ncount = 4\ncpus = 3\n[array]\ncount = 2\n"  # fmt: skip
        text = text.replace('"ashlar"', '"ashlar"\nexport = "vhost-user-blk"')
        made = self.load(text, where=study.Where.GUEST)
        self.assertEqual((made.vm.cpus, made.array.count, made.disks), (3, 1, 1))
        self.assertEqual((made.fio.vms, made.side[0].export), ((1,), None))
        made = self.load(text, where=study.Where.HOST)
        self.assertEqual((made.array.count, made.disks), (2, 2))
        self.assertEqual(made.vm.model_fields_set, set())
        self.assertEqual(self.load(text, where=study.Where.VM), self.load(text))
        for where, change in [("guest", "vm.count=2"), ("guest", "fio.vms=[1]"),
                              ("host", "vm.cpus=2"), ("guest", "drives.iops=5")]:  # fmt: skip
            said = self.refusal(text, (change,), where=study.Where(where))
            self.assertIn(f"`{change.split('=')[0]}`", said)
        # of a study for several places, which has words for each
        several = GOOD + "[vm]\ncount = 3\n"
        self.assertIn("`vm.count`: does nothing", self.refusal(several))
        self.assertEqual(self.load(several, where=study.Where.VM).disks, 3)
        self.assertEqual(self.load(several, where=study.Where.HOST).disks, 1)
        models = GOOD + '[drives]\nkind = "model"\niops = 5\nmbps = 5\nsize = "1G"\n'
        made = self.load(models, where=study.Where.GUEST)
        self.assertEqual((made.drives.kind, made.drives.size), ("nvme", 1 << 30))

    def test_words_of_quick_that_do_nothing_are_told_in_any_case(self):
        said = self.refusal(GOOD + "[quick.vm]\ncpus = 1\n")
        self.assertIn("`vm.cpus`: does nothing", said)

    def test_a_typo_is_told_with_what_was_meant(self):
        said = self.refusal(GOOD.replace("scale = 10", "scales = 10"))
        self.assertIn("`pgbench.scales`", said)
        self.assertIn("did you mean `scale`?", said)

    def test_what_does_not_go_together(self):
        for change, said in [
            ('states = ["degraded-twice"]', "parity"),
            ('drives = {kind = "model"}', "iops"),
            ('drives = {kind = "nvme"}', "where"),
            ("[fio]\npatterns = []", "fio"),
            ("array = {copies = 2, parity = 1}", "say `parity = 0`"),
            ('states = ["degraded-twice"]\narray = {copies = 2}', "`copies` 3"),
        ]:
            with self.subTest(change):
                top, bottom = ("", change) if change.startswith("[") else (change, "")
                self.assertIn(said, self.refusal(f"{top}\n{GOOD}\n{bottom}"))

    def test_mirrors_take_a_drive_for_each_copy(self):
        array = study.Array(data=4, copies=2)
        self.assertEqual((array.members, array.losses, array.parity), (8, 1, 0))
        self.assertEqual(array.shape, "4x2")
        self.assertEqual(study.Array(data=1, copies=3).losses, 2)

    def test_each_side_says_mirrors_in_its_own_words(self):
        mirrors, sets = study.Array(data=1, copies=3), study.Array(data=2, copies=2)
        raid6 = study.Array(data=2, parity=2)
        levels = [ashlar.level(array) for array in (mirrors, sets, raid6)]
        self.assertEqual(levels, ["1 --copies 3", "10 --copies 2", "2+2"])
        profiles = [btrfs.profiles(array)[0] for array in (mirrors, sets, raid6)]
        self.assertEqual(profiles, ["raid1c3", "raid10", "raid6"])
        self.assertIsNone(btrfs.profiles(study.Array(data=2, copies=3)))
        drives = ["a", "b", "c", "d"]
        self.assertEqual(zfs.vdevs(sets, drives), "mirror a b mirror c d")
        self.assertEqual(zfs.vdevs(raid6, drives), "raidz2 a b c d")

    def test_words_that_a_kind_of_side_does_not_have(self):
        for kind, word, said in [
            ("ashlar", 'policy = "ppl"', '"journal", "bitmap", "none"'),
            ("mdraid", 'policy = "journal"', 'takes "ppl"'),
            ("ashlar", "bitmap = true", "`policy`, `integrity`, `cores`, `export`"),
            ("mdraid", 'cores = "1"', "`bitmap`, `group_thread_cnt`, `stripe_cache_size`"),
            ("btrfs", 'policy = "bitmap"', "nothing but a `name`"),
            ("zfs", "integrity = true", "nothing but a `name`"),
            ("raw", 'export = "ublk"', "takes `raid0`"),
            ("mdraid", "raid0 = true", "`bitmap`, `group_thread_cnt`, `stripe_cache_size`"),
            ("spdk", "stripe_cache_size = 1", "takes `cores`"),
            ("qemu-storage-daemon", 'policy = "none"', "takes `cores`"),
        ]:
            with self.subTest(f"{kind}, {word}"):
                its = f'name = "x"\nkind = "{kind}"\n{word}'
                refused = self.refusal(GOOD.replace('kind = "ashlar"', its))
                self.assertIn(f"`side.x.{word.split()[0]}`", refused)
                self.assertIn(said, refused)
        its = 'kind = "mdraid"\npolicy = "ppl"\ngroup_thread_cnt = 0'
        made = self.load(GOOD.replace('kind = "ashlar"', its))
        # What a run has written down says every word.
        with tempfile.TemporaryDirectory() as directory:
            (path := Path(directory) / "study.json").write_text(made.model_dump_json())
            self.assertEqual(study.as_run(path), made)

    def test_words_that_a_kind_of_drives_does_not_have(self):
        for change, kind in [("drives.iops=5", "model"), ("drives.mbps=5", "model"),
                             ('drives.paths=["/dev/x"]', "block")]:  # fmt: skip
            self.assertIn(f'say kind = "{kind}"', self.refusal(GOOD, (change,)))
        self.load(GOOD, changes=('drives={kind="block", paths=["/dev/x"]}',))
        self.load(GOOD, changes=('drives={kind="model", iops=5, mbps=5}',))

    def test_words_that_do_nothing_are_refused(self):
        pattern = '{name = "a", rw = "RW", read_percent = 70}'
        fio = FIO.replace("PATTERNS", pattern)
        mixed = fio.replace("RW", "randrw")
        for text, change, said in [
            (mixed, ('where="host"', "fio.vms=[1]"), "`fio.vms`"),
            (mixed, ('where="host"', "vm.memory=1G"), "`vm.memory`"),
            (GOOD, ("vm.pin=true",), "`vm.pin`"),
            (mixed, ('where="guest"', 'drives.kind="nvme"', "vm.count=1"), "`vm.count`"),
            (fio.replace("RW", "randread"), (), "of the pattern a"),
            (fio.replace("RW", "write"), (), "of the pattern a"),
            (GOOD.replace('"ashlar"', '"mdraid"'),
             ("side.mdraid.policy=ppl", "side.mdraid.bitmap=true"), "`side.mdraid.bitmap`"),
        ]:  # fmt: skip
            with self.subTest(said):
                self.assertIn(said, self.refusal(text, change))
        self.load(mixed, changes=("fio.vms=[1,2]", "vm.count=2"))
        self.load(mixed, changes=('where="guest"', 'drives.kind="nvme"', "vm.memory=1G"))

    def test_cpus_that_are_not_there(self):
        self.assertIn("write 3-9", self.refusal(GOOD, ("side.ashlar.cores=9-3",)))
        with mock.patch.object(os, "sched_getaffinity", return_value={0, 1, 5}):
            for cores, said in [("0-63", "CPU 2,3,4,6,…, and"), ("7", "CPU 7"), ("0,1,5", "")]:
                made = self.load(GOOD, changes=(f"side.ashlar.cores={cores}",))
                found = machine.core_problems(made)
                self.assertEqual(bool(found), bool(said))
                self.assertIn(said, "".join(found))
            made = self.load(GOOD, changes=("side.ashlar.cores=2",))
            with mock.patch.object(machine, "memory_available", return_value=1 << 40):
                self.assertIn("0,1,5", "".join(machine.problems(made, {}, Path("/tmp"))))
            inside = ('where="guest"', 'drives.kind="nvme"', "vm.cpus=4")
            made = self.load(GOOD, changes=(*inside, "side.ashlar.cores=3"))
            self.assertEqual(machine.core_problems(made), [])
            made = self.load(GOOD, changes=(*inside, "side.ashlar.cores=4"))
            self.assertIn("the guest has 0,1,2,3", machine.core_problems(made)[0])
        with mock.patch.object(os, "sched_getaffinity", return_value={1, 5}):
            [said] = machine.core_problems(self.load(GOOD))
            self.assertIn("it polls on CPU 0, and this machine lets us use 1,5", said)
            self.assertIn("--set side.ashlar.cores=1", said)
            threads = self.load(GOOD.replace('"ashlar"', '"mdraid"'))
            self.assertEqual(machine.core_problems(threads), [])

    def test_all_mistakes_are_told_at_once(self):
        said = self.refusal(GOOD.replace("scale = 10", "scale = 0\nclient = 1"))
        wrong = {line.split("`")[1] for line in said.splitlines()}
        self.assertEqual(wrong, {"pgbench.scale", "pgbench.client"})

    def test_quick_is_read_in_any_case(self):
        said = self.refusal(GOOD.replace("scale = 1\n[quick", "") + "scal = 2\n")
        self.assertIn("did you mean `scale`?", said)
        self.assertIn("is no table", self.refusal(f"quick = 3\n{GOOD.split('[quick')[0]}"))

    def test_values_that_are_none(self):
        for change, said in [
            ("pgbench.clients=[]", "at least 1"),
            ("pgbench.clients=[10,10]", "names 10 more than once"),
            ("pgbench.scripts=[]", "at least 1"),
            ("states=[]", "at least 1"),
            ("side=[]", "at least 1"),
            ("side.ashlar.cores=abc", "cores"),
            ("side.ashlar.name=a b/../../x", "name"),
            ("array.chunk=5K", "power of two"),
            ("array.chunk=2K", "power of two"),
        ]:
            with self.subTest(change):
                self.assertIn(said, self.refusal(GOOD, (change,)))
        made = self.load(GOOD, changes=("side.ashlar.cores=0,2-4", "side.ashlar.name=a-2"))
        self.assertEqual(made.side[0].cores, "0,2-4")

    def test_values_that_have_no_place(self):
        for change in ("side.ashlar=3", "pgbench.scale.x=3", "pgbench.clients.0=5"):
            with self.subTest(change):
                text = GOOD.replace("scale = 10", "scale = 10\nclients = [1]")
                self.assertIn("is no place for a value", self.refusal(text, (change,)))

    def test_patterns_of_fio(self):
        fio = FIO.replace("PATTERNS", '{name = "a/b", rw = "read"}')
        self.assertIn("fio.patterns.0.name", self.refusal(fio))
        fio = FIO.replace("PATTERNS", '{name = "a", rw = "read"}, {name = "a", rw = "write"}')
        self.assertIn("two patterns", self.refusal(fio))
        fio = FIO.replace("PATTERNS", '{name = "a", rw = "read"}')
        self.assertIn("`fio.vms`", self.refusal(fio, ("fio.vms=[1,8]", "vm.count=4")))
        self.assertEqual(self.load(fio, changes=("fio.vms=[1,8]", "vm.count=8")).disks, 8)

    def test_what_fio_uses_has_room_for_what_is_checked(self):
        fio = FIO.replace("PATTERNS", '{name = "a", rw = "read"}')
        for size in ("1K", "9M"):
            self.assertIn("less than 10M", self.refusal(fio, (f"fio.size={size}",)))
        self.assertEqual(self.load(fio, changes=("fio.size=10M",)).fio.size, 10 << 20)

    def test_memory_of_load_models_and_guests_is_one_sum(self):
        fio = FIO.replace("PATTERNS", '{name = "a", rw = "read"}')
        made = self.load(fio, changes=(
            'drives={kind="model", size="1G", iops=5, mbps=5}', "vm.count=2", "vm.memory=4G",
        ))  # fmt: skip
        # 1 GiB for the load, 5 models of 1, two guests of 4 and a half
        for free, enough in [(15 << 30, True), ((15 << 30) - 1, False), (9 << 30, False)]:
            with mock.patch.object(machine, "memory_available", return_value=free):
                found = machine.memory_problems(made)
                self.assertEqual(found == [], enough, free)
                self.assertLess(set(found), {*machine.problems(made, {}, Path("/tmp")), ""})
        self.assertIn("15360 are needed (1024 for a load, 5120 for models of drives, 9216 for g",
                      found[0])  # fmt: skip

    def test_clients_have_room_in_their_guest(self):
        many = ("pgbench.clients=[4,1000]", 'where="vm"', "vm.memory=2G")
        with mock.patch.object(machine, "memory_available", return_value=1 << 40):
            [said] = machine.memory_problems(self.load(GOOD, changes=many))
            self.assertIn("1000 clients take about 3000 MiB of a guest that has 2048", said)
            self.assertEqual(machine.memory_problems(self.load(GOOD, changes=many[:1])), [])
            for path in STUDIES.glob("*.toml"):
                for quick in (True, False):
                    self.assertEqual(machine.memory_problems(study.load(path, quick)), [], path)

    def test_several_arrays_lose_a_drive_each(self):
        fio = FIO.replace("PATTERNS", '{name = "a", rw = "read"}')
        two = ("array.count=2", "vm.count=2")
        [said] = machine.idle_problems(made := self.load(fio, changes=two[:1]))
        self.assertIn("2 arrays and 1 virtual machines", said)
        with mock.patch.object(machine, "memory_available", return_value=1 << 40):
            self.assertIn(said, machine.problems(made, {}, Path("/tmp")))
        self.assertEqual(machine.idle_problems(self.load(fio, changes=two)), [])
        for states, spares in [
            (["healthy"], 0), (["healthy", "degraded"], 1), (["healthy", "rebuilding"], 1),
            (["healthy", "degraded-twice"], 2),
        ]:  # fmt: skip
            made = self.load(fio, changes=(*two, "array.parity=2", f"states={json.dumps(states)}"))
            self.assertEqual(host.drive_count(made), 2 * (6 + spares), states)

    def test_sides_are_named_once(self):
        with self.assertRaisesRegex(StudyError, "not one each"):
            study.only(self.load(GOOD), ["ashlar", "ashlar"])

    def test_what_cannot_be_read_is_told(self):
        with tempfile.TemporaryDirectory() as directory:
            with self.assertRaisesRegex(StudyError, "cannot be read: Is a directory"):
                study.load(Path(directory))
            half = Path(directory) / "study.json"
            half.write_text('{"title": "t", "whe')
            with self.assertRaisesRegex(StudyError, "study.json"):
                study.as_run(half)

    def test_more_loads_than_drives_are_told_before(self):
        made = self.load(FIO.replace("PATTERNS", '{name = "a", rw = "read"}'))
        few = made.model_copy(update={"vm": study.Vm(count=6)})
        self.assertIsNone(blocks.too_many_loads(made))
        self.assertIn("6 loads have 5", blocks.too_many_loads(few))

    def missing(self, kind: str, *changes: str) -> str | None:
        made = self.load(GOOD.replace('"ashlar"', f'"{kind}"'), changes=changes)
        with mock.patch.dict(os.environ, {"ASHLAR": "/bin/true"}):
            here = Host(Ledger(Path("/nonexistent")))
            return sides.make(made.side[0], made, here, Path("/nonexistent")).missing()

    def test_limits_of_ashlar_are_told_before(self):
        for changes, said in [
            (("array.data=300",), "64 drives"), (("array.chunk=2M",), "16K to 1M"),
            (("array.data=57", "array.parity=8"), "64 drives"),
        ]:  # fmt: skip
            self.assertIn(said, self.missing("ashlar", *changes))
        self.assertNotIn("drives", self.missing("ashlar", "array.data=56", "array.parity=8") or "")

    def test_a_side_says_how_many_parities_it_has(self):
        for kind, most in [("mdraid", 2), ("btrfs", 2), ("zfs", 3)]:
            for parity in range(1, 9):
                said = self.missing(kind, f"array.parity={parity}") or ""
                refused = f"{parity} parities, but of {most} at most: leave it out" in said
                self.assertEqual(refused, parity > most, (kind, parity, said))
        made = study.Array(data=10, parity=8)
        self.assertEqual((ashlar.level(made), made.members, made.losses), ("10+8", 18, 8))
        refused = self.refusal(GOOD, ("array.parity=9",))
        self.assertIn("`array.parity`: is 9: say 8 or less", refused)

    def test_disks_that_would_be_of_nothing_are_refused(self):
        made = self.load(FIO.replace("PATTERNS", '{name = "a", rw = "read"}'))
        self.assertIn("drives.size", machine.size_problems(made, -1 << 20)[0])
        self.assertEqual(machine.size_problems(made, 1 << 30), [])

    def test_quick_and_set_replace_what_is_written(self):
        self.assertEqual(self.load(GOOD).pgbench.scale, 10)
        self.assertEqual(self.load(GOOD, quick=True).pgbench.scale, 1)
        changes = ("pgbench.scale=7", "drives.size=8G", "side.ashlar.policy=bitmap")
        made = self.load(GOOD, quick=True, changes=changes)
        self.assertEqual(made.pgbench.scale, 7)
        self.assertEqual(made.drives.size, 8 << 30)
        self.assertEqual(made.side[0].policy, "bitmap")

    def test_a_change_that_is_none_is_refused(self):
        self.assertIn("KEY=VALUE", self.refusal(GOOD, ("pgbench.scale",)))
        self.assertIn("did you mean `scale`?", self.refusal(GOOD, ("pgbench.scal=7",)))
        self.assertIn("there is no side raid", self.refusal(GOOD, ("side.raid.policy=none",)))

    def test_sides_of_unlike_protection_are_refused(self):
        made = self.load(GOOD)
        sides = {"a": OnlyProtected(1, "closed"), "b": OnlyProtected(1, "resync")}
        self.assertIn("--unequal", machine.protection_problems(made, sides)[0])
        knowing = made.model_copy(update={"unequal": True})
        self.assertEqual(machine.protection_problems(knowing, sides), [])
        sides["b"] = sides["a"]
        self.assertEqual(machine.protection_problems(made, sides), [])

    def test_a_database_that_does_not_fit_is_refused(self):
        made = self.load(GOOD)
        self.assertEqual(machine.size_problems(made, 100 << 30), [])
        self.assertIn("drives.size", machine.size_problems(made, 100 << 20)[0])
