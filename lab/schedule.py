"""What is measured in which order. Pure: a study goes in, cells come out, always the same.

Sides take turns, a whole block of cells each, and each round begins with who ended the last: A B,
B A, A B. So what changes on the machine in the course of hours meets them all, and who comes first
has nothing of it. Inside of a block the array goes through its states once, from healthy on, and
every side does so in the same order: sides can be compared in each state, and a state with healthy
only as far as nothing warms up in between.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from lab.results import Cell
from lab.study import ALONE, Side, State, Study, Where

# As a drive's death goes: in this order no state has to be undone but the last.
ORDER = (State.HEALTHY, State.DEGRADED, State.REBUILDING, State.DEGRADED_TWICE)


@dataclass(frozen=True)
class Block:
    """One turn of one side: its arrays are made, filled, measured, and taken down."""

    repeat: int
    side: Side
    cells: tuple[Cell, ...]


def blocks(study: Study, sides: Iterable[Side] | None = None) -> list[Block]:
    """Of all sides, or of these only. A cell has its number either way."""
    names = {side.name for side in (study.side if sides is None else sides)}
    made, number = [], 0
    for repeat in range(study.repeats):
        for side in study.side if repeat % 2 == 0 else reversed(study.side):
            cells = []
            for state in states_of(study, side):
                for load, clients, loads in loads_of(study):
                    cells.append(Cell(number, repeat, side.name, state, load, clients, loads))
                    number += 1
            made.append(Block(repeat, side, tuple(cells)))
    return [block for block in made if block.side.name in names]


def states_of(study: Study, side: Side) -> list[State]:
    """What the side can be in: who survives no loss is measured whole, and only so."""
    wanted = {State.HEALTHY} if side.kind in ALONE else set(study.states)
    return [state for state in ORDER if state in wanted]


def loads_of(study: Study) -> Iterator[tuple[str, int, int]]:
    """Script or pattern, clients of each load, loads at once."""
    disks = study.vm.count if study.where == Where.VM else study.array.count
    if study.pgbench:
        for script in study.pgbench.scripts:
            for clients in study.pgbench.clients:
                yield script, clients, disks
        return
    counts = study.fio.vms if study.where == Where.VM else (disks,)
    for pattern in study.fio.patterns:
        for count in counts:
            yield pattern.name, 0, min(count, disks)


def seconds_of(study: Study) -> int:
    """That one cell takes, at least."""
    load = study.pgbench or study.fio
    return load.warm_seconds + load.seconds
