"""What state arrays are in: each as its side tells it, and all of a side in one text. Pure.

    degraded | rebuilding 12.5%

So it stands in `seconds.csv`; an array that is alone has its state alone. No array speaks for
another: arrays are in a state when every one of them is.
"""

import re
from collections import Counter
from collections.abc import Sequence
from statistics import mean

from lab.study import State

BETWEEN = " | "
FAILED = "failed"
WAITING = "waiting"  # its rebuild begins when that of another is over
CHECKING = "checking"  # all of it is read beside the load, which nobody here has asked for


def without(drives: int) -> str:
    """Of an array that lacks so many drives, and serves all the same."""
    known = {0: State.HEALTHY, 1: State.DEGRADED, 2: State.DEGRADED_TWICE}
    return str(known.get(drives, f"degraded-by-{drives}"))


def rebuilding(percent: float) -> str:
    return f"{State.REBUILDING} {percent:.1f}%"


def checking(percent: float) -> str:
    return f"{CHECKING} {percent:.1f}%"


def together(states: Sequence[str]) -> str:
    return BETWEEN.join(states)


def kinds(text: str) -> list[str]:
    """Of each array, without how far a rebuild is."""
    return [one.split()[0] for one in text.split(BETWEEN)]


def are_all(text: str, state: str) -> bool:
    return set(kinds(text)) == {state}


def percent(text: str) -> float | None:
    """How far arrays are that are all rebuilding, on average."""
    found = re.findall(rf"{State.REBUILDING} ([\d.]+)%", text)
    return mean(map(float, found)) if len(found) == len(kinds(text)) else None


def told(text: str) -> str:
    """For a person, who does not want to count."""
    counts = Counter(kinds(text))
    if counts.total() == 1:
        return f"array {kinds(text)[0]}"
    if len(counts) == 1:
        return f"all {counts.total()} arrays {kinds(text)[0]}"
    return "arrays: " + ", ".join(f"{count} {kind}" for kind, count in counts.items())
