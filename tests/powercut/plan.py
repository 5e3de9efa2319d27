"""What happens in each round: a pure function of the seed.

A round that loses a drive does so within the redundancy that is left, so nothing may be lost.
"""

import random
from dataclasses import dataclass
from enum import Enum

SERIES_ROUNDS = 4  # then a new array and a new database
WRITE_SECONDS = (1.0, 4.5)


@dataclass(frozen=True)
class Kind:
    """An array, and how many drives it may do without at any moment."""

    level: str
    members: int
    redundancy: int
    integrity: bool = False
    policy: str = "journal"  # only that keeps pages whole
    drive_bytes: int = 640 << 20

    def losses(self) -> list["Loss"]:
        """When it may lose a drive and nothing else. A parity array whose policy is not `journal`
        keeps a journal only once it is degraded."""
        if self.policy == "journal" or self.level in ("1", "10"):
            return [Loss.BEFORE, Loss.BEFORE, Loss.DURING, Loss.DURING, Loss.WITH_CUT]
        return [Loss.BEFORE]

    def __str__(self) -> str:
        policy = "" if self.policy == "journal" else f", {self.policy}"
        return f"RAID {self.level}{policy}" + ", checksums" * self.integrity


# Of the series, in turn.
KINDS = [
    Kind("5", members=5, redundancy=1),
    Kind("6", members=6, redundancy=2, integrity=True),
    Kind("10", members=4, redundancy=1, policy="bitmap"),
    Kind("7.3", members=6, redundancy=3),
    Kind("60", members=8, redundancy=2),
    Kind("5", members=4, redundancy=1, integrity=True),
    Kind("5", members=5, redundancy=1, policy="bitmap"),
    Kind("6", members=6, redundancy=2),
    Kind("4+4", members=8, redundancy=4),
    Kind("1", members=3, redundancy=2, policy="bitmap", drive_bytes=1280 << 20),
    Kind("50", members=6, redundancy=1),
    Kind("70", members=10, redundancy=3),
    Kind("10", members=6, redundancy=1),
]
# Where no write is torn.
ATOMIC_KINDS = [kind for kind in KINDS if kind.policy == "journal"]


class Loss(Enum):
    """When a drive goes."""

    NONE = "-"
    BEFORE = "pulled before"
    DURING = "pulled during"
    WITH_CUT = "lost with the cut"


class Heal(Enum):
    """What becomes of missing members after the checks."""

    NOW = "rebuilt before the next writes"
    DURING = "rebuilt during the next writes, and their cut"
    LATER = "not yet"


@dataclass(frozen=True)
class Round:
    number: int
    kind: Kind
    new_series: bool
    full_page_writes: bool
    loss: Loss
    heal: Heal
    same_drive: bool  # a pulled drive comes back itself, and not a new one
    member: int  # which goes, if it has a drive
    write_seconds: float
    pull_at: float  # share of write_seconds
    guest_first: bool  # dies before the daemon, which then still sees what was under way
    early_cut_seconds: float | None  # one more cut, so long after the daemon's start


def rounds(seed: int, count: int, kinds: list[Kind] = KINDS) -> list[Round]:
    return [plan(seed, number, kinds) for number in range(count)]


def plan(seed: int, number: int, kinds: list[Kind]) -> Round:
    chance = random.Random(seed * 1_000_003 + number)
    kind = kinds[number // SERIES_ROUNDS % len(kinds)]
    # Every other round is degraded; most often one in five of them only because of the cut.
    loss = chance.choice(kind.losses()) if number % 2 == 1 else Loss.NONE
    heal = chance.choice([Heal.NOW, Heal.NOW, Heal.DURING, Heal.LATER])
    return Round(
        number=number,
        kind=kind,
        new_series=number % SERIES_ROUNDS == 0,
        full_page_writes=chance.random() < 0.25 or kind.policy != "journal",
        loss=loss,
        heal=heal,
        same_drive=chance.random() < 0.3,
        member=chance.randrange(kind.members),
        write_seconds=round(chance.uniform(*WRITE_SECONDS), 3),
        pull_at=round(chance.random(), 3),
        guest_first=chance.random() < 0.3,
        early_cut_seconds=round(chance.uniform(0, 2), 3) if chance.random() < 0.2 else None,
    )
