"""What an array's state was in the seconds that were measured. Pure: of `seconds.csv`."""

from lab.results import Cell
from lab.study import State

SHARE_ENOUGH = 0.95  # of the seconds, for a figure to be one of its state
SECONDS_A_MINUTE = 60


def told_as(state: str) -> str:
    """What the sides call it: two drives out are told as one is."""
    return State.DEGRADED if state == State.DEGRADED_TWICE else state


def measured(cell: Cell, rows: list[dict]) -> list[dict]:
    return [row for row in rows if 0 <= int(row["second"]) < cell.seconds and row["state"]]


def share_as_wanted(cell: Cell, rows: list[dict]) -> float | None:
    """Of the seconds that were measured, in how many the array was in the cell's state."""
    seconds = measured(cell, rows)
    if not seconds:
        return None
    wanted = told_as(cell.state)
    return sum(row["state"].split()[0] == wanted for row in seconds) / len(seconds)


def rebuilt_percent_a_minute(cell: Cell, rows: list[dict]) -> float | None:
    """While it was rebuilding: how far it came."""
    seen = [
        (int(row["second"]), float(row["state"].split()[1].rstrip("%")))
        for row in measured(cell, rows)
        if row["state"].startswith("rebuilding ")
    ]
    if len(seen) < 2:
        return None
    (begin, from_percent), (end, to_percent) = seen[0], seen[-1]
    return (to_percent - from_percent) / (end - begin) * SECONDS_A_MINUTE
