"""What happens in each round: a pure function of the seed.

A round that loses a drive does so within the redundancy that is left, so nothing may be lost.
"""

import random
from dataclasses import dataclass
from enum import Enum

SERIES_ROUNDS = 8  # then a new array and a new database
LEVELS = [5, 6, 5]  # of the series, in turn
MEMBERS = {5: 5, 6: 6}
WRITE_SECONDS = (1.0, 4.5)


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
    level: int
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


def rounds(seed: int, count: int) -> list[Round]:
    return [plan(seed, number) for number in range(count)]


def plan(seed: int, number: int) -> Round:
    chance = random.Random(seed * 1_000_003 + number)
    level = LEVELS[number // SERIES_ROUNDS % len(LEVELS)]
    # Every other round is degraded; one in five of them only because of the cut.
    losses = [Loss.BEFORE, Loss.BEFORE, Loss.DURING, Loss.DURING, Loss.WITH_CUT]
    loss = chance.choice(losses) if number % 2 == 1 else Loss.NONE
    heal = chance.choice([Heal.NOW, Heal.NOW, Heal.DURING, Heal.LATER])
    return Round(
        number=number,
        level=level,
        new_series=number % SERIES_ROUNDS == 0,
        full_page_writes=chance.random() < 0.25,
        loss=loss,
        heal=heal,
        same_drive=chance.random() < 0.3,
        member=chance.randrange(MEMBERS[level]),
        write_seconds=round(chance.uniform(*WRITE_SECONDS), 3),
        pull_at=round(chance.random(), 3),
        guest_first=chance.random() < 0.3,
        early_cut_seconds=round(chance.uniform(0, 2), 3) if chance.random() < 0.2 else None,
    )
