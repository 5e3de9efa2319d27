"""Goal: a study with a mistake is refused with its place and the fix, and ours have none."""

import tempfile
import unittest
from pathlib import Path

from lab import machine, study
from lab.side import Protection
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


class OnlyProtected:
    """A side, as far as the comparison of protections goes."""

    def __init__(self, losses: int, write_hole: str):
        self.protection = Protection(losses, write_hole)


class Studies(unittest.TestCase):
    def load(self, text: str, quick: bool = False, changes: tuple[str, ...] = ()):
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "mine.toml"
            path.write_text(text)
            return study.load(path, quick, changes)

    def refusal(self, text: str, changes: tuple[str, ...] = ()) -> str:
        with self.assertRaises(StudyError) as raised:
            self.load(text, changes=changes)
        return str(raised.exception)

    def test_ours_are_right_in_full_and_quick(self):
        paths = list(STUDIES.glob("*.toml"))
        self.assertGreaterEqual(len(paths), 2)
        for path in paths:
            with self.subTest(path.name):
                self.assertLessEqual(study.load(path, quick=True).repeats, study.load(path).repeats)

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
        ]:
            with self.subTest(change):
                top, bottom = ("", change) if change.startswith("[") else (change, "")
                self.assertIn(said, self.refusal(f"{top}\n{GOOD}\n{bottom}"))

    def test_all_mistakes_are_told_at_once(self):
        said = self.refusal(GOOD.replace("scale = 10", "scale = 0\nclient = 1")).splitlines()
        self.assertEqual(len(said), 2, said)

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
