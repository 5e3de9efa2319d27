"""Goal: the expected end comes nearer as time goes by, and is right when all goes as before."""

import io
import unittest

from lab.progress import Expected, Screen


class Ends(unittest.TestCase):
    def setUp(self):
        self.now = 0.0
        self.expected = Expected(2, 4, 60, lambda: self.now)

    def test_it_learns_what_takes_how_long(self):
        self.now = 100.0
        self.expected.block_made(100)
        for _ in range(8):  # cells take 80 s and not 64
            self.expected.cells += 1
            self.expected.cell_done(80)
        self.assertAlmostEqual(self.expected.seconds(), 100 + 4 * 80, delta=1)

    def test_what_is_under_way_counts(self):
        self.expected.block_made(30)
        before = self.expected.seconds()
        self.now = 40.0
        self.assertAlmostEqual(self.expected.seconds(), before - 40)
        self.now = 4000.0  # it takes longer than it should: no more is known
        self.assertAlmostEqual(self.expected.seconds(), before - 64)

    def test_nothing_is_left_at_the_end(self):
        for _ in range(2):
            self.expected.block_made(30)
        for _ in range(4):
            self.expected.cell_done(64)
        self.assertEqual(self.expected.seconds(), 0)

    def test_what_was_given_up_takes_no_time(self):
        self.expected.block_made(30)
        self.expected.cell_done(64)
        said = io.StringIO()
        screen = Screen("study", self.expected, said)
        screen.total = 4
        self.now = 200.0
        self.expected.block_over(blocks=1, cells=2)  # the second cell of the first failed
        self.assertEqual(self.expected.seconds(), 30 + 2 * 64)
        screen.now("array")
        self.assertIn(" 1 of 4 (1 given up), ends", said.getvalue())
        self.expected.block_over(blocks=0, cells=0)  # the array did not come about
        self.assertEqual(self.expected.seconds(), 0)

    def test_without_a_terminal_there_are_lines(self):
        said = io.StringIO()
        with Screen("study", self.expected, said) as screen:
            screen.now("filling")
            screen.now("filling, 10%", again=True)
        lines = said.getvalue().splitlines()
        self.assertEqual(len(lines), 2, lines)
        self.assertIn("0 of 4, ends about", lines[1])
