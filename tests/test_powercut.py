"""Goal: the judge of the power cuts sees every kind of loss, and a few real cuts lose nothing.

Method: a ledger's whole content is made up, right and wrong; then a short run. A run whose drives
are put back to an earlier moment must find that out.
"""

import hashlib
import re
import shutil
import subprocess
import sys
import unittest
from collections import Counter
from pathlib import Path

from tests.powercut.array import Array
from tests.powercut.ledger import ACCOUNTS, SESSIONS, Ledger, transaction
from tests.powercut.plan import KINDS, Heal, Loss, rounds
from tests.rig import CHECKOUT

SEED = 5


def content(last: dict[int, int], skip=(), payload=None, amount=0) -> str:
    """What a database answers that has all transactions but `skip`."""
    lines, amounts = [], Counter({1: amount})
    for session, number in last.items():
        numbers = [n for n in range(1, number + 1) if (session, n) not in skip]
        made = [transaction(SEED, session, n) for n in numbers]
        text = "".join(each.payload for each in made) if payload is None else payload
        digest = hashlib.md5(text.encode()).hexdigest()
        moved = sum(each.moved for each in made)
        lines.append(f"session|{session}|{len(made)}|{number}|{digest}|{moved}")
        for each in made:
            amounts[each.low] -= each.moved
            amounts[each.high] += each.moved
    listed = ",".join(str(amounts[id]) for id in range(1, ACCOUNTS + 1))
    digest = hashlib.md5(listed.encode()).hexdigest()
    lines.append(f"accounts|{ACCOUNTS}|{amounts.total()}|{digest}")
    return "\n".join(lines)


class Judge(unittest.TestCase):
    def wrong(self, text: str, said: int = 9) -> list[str]:
        return Ledger(SEED, Counter({s: said for s in range(SESSIONS)})).judge(text)

    def test_nothing_is_wrong(self):
        whole = dict.fromkeys(range(SESSIONS), 9)
        self.assertEqual(self.wrong(content(whole)), [])
        # Committed, and not said any more.
        self.assertEqual(self.wrong(content(whole | {2: 10})), [])
        self.assertEqual(Ledger(SEED).judge(content({})), [])

    def test_every_loss_is_seen(self):
        whole = dict.fromkeys(range(SESSIONS), 9)
        for text in [
            content(whole | {1: 8}),
            content(whole | {1: 11}),
            content(whole, skip={(3, 4)}),
            content(whole, payload="wrong"),
            content(whole, amount=1),
            content({s: 9 for s in range(1, SESSIONS)}),
            content(whole | {SESSIONS: 1}),
            "\n".join(content(whole).split()[:-1]),
        ]:
            self.assertNotEqual(self.wrong(text), [])

    def test_what_a_scrub_finds_is_told(self):
        counted = ["mismatched_stripes", "unreadable_stripes", "damaged_stripes"]
        clean = dict.fromkeys(counted, 0) | {"places": []}
        self.assertEqual(Array.scrub_wrong(clean), [])
        place = {"stripe": 3, "offset": 4096, "bytes": 512, "member": 1, "repaired": True}
        for name in counted:
            found = clean | {name: 1, "places": [place]}
            self.assertEqual(len(Array.scrub_wrong(found)), 1)

    def test_sessions_say_one_number_after_the_other(self):
        ledger = Ledger(SEED)
        heard = [ledger.take(line) for line in ["0 1", "0 2", "0 4", "ERROR: no", "1 1"]]
        self.assertEqual(heard, [True, True, False, False, True])

    def test_plans_follow_from_the_seed_and_hold_everything(self):
        plans = rounds(SEED, 50)
        self.assertEqual(plans, rounds(SEED, 50))
        self.assertEqual({plan.loss for plan in plans}, set(Loss))
        self.assertEqual({plan.heal for plan in plans}, set(Heal))
        self.assertEqual({plan.kind for plan in plans}, set(KINDS))
        self.assertEqual(sum(plan.loss != Loss.NONE for plan in plans), 25)
        for plan in rounds(SEED, 500):
            self.assertIn(plan.loss, [Loss.NONE, *plan.kind.losses()])


class Cut(unittest.TestCase):
    def powercut(self, *words: str) -> subprocess.CompletedProcess:
        command = [sys.executable, "-m", "tests.powercut", *words]
        return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True)

    def test_cuts_lose_nothing(self):
        done = self.powercut("--rounds", "2", "--seed", "1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_drives_that_forget_are_seen(self):
        done = self.powercut("--rounds", "2", "--seed", "1", "--raw", "--lie-in-round", "2")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("VIOLATION", done.stderr)
        evidence = Path(re.search(r"the evidence is in (\S+):", done.stderr)[1])
        self.assertTrue((evidence / "at-the-cut").is_dir())
        shutil.rmtree(evidence)


if __name__ == "__main__":
    unittest.main()
