"""Goal: every side meets the same cells in the same order, and the order is the same each time."""

import unittest

from lab import schedule
from lab.study import Study

PGBENCH = {"scripts": ["select-only", "tpcb-like"], "clients": [10, 50]}


def study(**changed) -> Study:
    words = {
        "title": "t",
        "where": "host",
        "side": [{"kind": "ashlar"}, {"kind": "btrfs"}],
        "pgbench": PGBENCH,
        "states": ["rebuilding", "healthy", "degraded"],
        "repeats": 2,
    }
    return Study.model_validate(words | changed)


class Schedule(unittest.TestCase):
    def test_sides_take_turns(self):
        turns = [(block.repeat, block.side.name) for block in schedule.blocks(study())]
        self.assertEqual(turns, [(0, "ashlar"), (0, "btrfs"), (1, "btrfs"), (1, "ashlar")])

    def test_every_side_meets_the_same_cells(self):
        ours, theirs = (
            [(cell.state, cell.load, cell.clients, cell.loads) for cell in block.cells]
            for block in schedule.blocks(study())[:2]
        )
        self.assertEqual(ours, theirs)
        self.assertEqual(len(ours), 3 * 2 * 2)

    def test_an_array_goes_through_its_states_once_from_healthy_on(self):
        cells = schedule.blocks(study())[0].cells
        states = list(dict.fromkeys(cell.state for cell in cells))
        self.assertEqual(states, ["healthy", "degraded", "rebuilding"])
        changes = sum(a.state != b.state for a, b in zip(cells, cells[1:], strict=False))
        self.assertEqual(changes, 2)

    def test_numbers_and_keys_are_unique_and_stay(self):
        cells = [cell for block in schedule.blocks(study()) for cell in block.cells]
        self.assertEqual([cell.number for cell in cells], list(range(len(cells))))
        self.assertEqual(len({cell.key for cell in cells}), len(cells))
        again = [cell for block in schedule.blocks(study()) for cell in block.cells]
        self.assertEqual(cells, again)

    def test_a_side_that_is_left_out_changes_no_number(self):
        whole = {cell.key: cell for block in schedule.blocks(study()) for cell in block.cells}
        for block in schedule.blocks(study(), study().side[1:]):
            self.assertEqual(block.side.name, "btrfs")
            for cell in block.cells:
                self.assertEqual(cell, whole[cell.key])

    def test_a_single_drive_is_measured_whole_and_only_so(self):
        for words in ({}, {"raid0": True}):  # which no other drive makes up for, either
            made = study(side=[{"kind": "raw", **words}], unequal=True)
            self.assertEqual({cell.state for cell in schedule.blocks(made)[0].cells}, {"healthy"})

    def test_virtual_machines_load_one_and_all(self):
        fio = {"patterns": [{"name": "p", "rw": "randread"}], "vms": [1, 4]}
        made = study(where="vm", vm={"count": 4}, pgbench=None, fio=fio, states=["healthy"])
        self.assertEqual([cell.loads for cell in schedule.blocks(made)[0].cells], [1, 4])
