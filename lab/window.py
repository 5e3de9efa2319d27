"""What the arrays' states were in the seconds that were measured. Pure: of `seconds.csv`."""

from lab import states
from lab.results import Cell
from lab.study import State

SHARE_ENOUGH = 0.95  # of the seconds, for a figure to be one of its state
SECONDS_A_MINUTE = 60


def measured(cell: Cell, rows: list[dict]) -> list[dict]:
    return [row for row in rows if 0 <= int(row["second"]) < cell.seconds and row["state"]]


def told_as(cell: Cell) -> set[str]:
    """What its state may be called: an older run does not tell two drives out from one."""
    alike = cell.state == State.DEGRADED_TWICE and not cell.drives_out_told
    return {cell.state, State.DEGRADED} if alike else {cell.state}


def loaded(cell: Cell, text: str) -> str:
    """What those arrays are in that have a load: disks are dealt out to arrays in turn. The figure
    says nothing of the others, of which a rebuild is over soon, since nobody holds it up."""
    return states.together(text.split(states.BETWEEN)[: cell.loads])


def share_as_wanted(cell: Cell, rows: list[dict]) -> float | None:
    """Of the seconds that were measured, in how many every array with a load was in the cell's
    state: a figure is of all of them together."""
    seconds = [set(its) for its in kinds_of_loaded(cell, rows)]
    if not seconds:
        return None
    wanted = told_as(cell)
    return sum(its <= wanted for its in seconds) / len(seconds)


def share_of_each_array(cell: Cell, rows: list[dict]) -> list[float]:
    """The same of each by itself: which of them was not in it."""
    seconds = kinds_of_loaded(cell, rows)
    return [its.count(cell.state) / len(its) for its in zip(*seconds, strict=True)]


def kinds_of_loaded(cell: Cell, rows: list[dict]) -> list[list[str]]:
    return [states.kinds(loaded(cell, row["state"])) for row in measured(cell, rows)]


def rebuilt_percent_a_minute(cell: Cell, rows: list[dict]) -> float | None:
    """While all with a load were rebuilding: how far they came, on average."""
    seen = [
        (int(row["second"]), percent)
        for row in measured(cell, rows)
        if (percent := states.percent(loaded(cell, row["state"]))) is not None
    ]
    if len(seen) < 2:
        return None
    (begin, from_percent), (end, to_percent) = seen[0], seen[-1]
    return (to_percent - from_percent) / (end - begin) * SECONDS_A_MINUTE
