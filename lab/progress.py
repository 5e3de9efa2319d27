"""How far it is and when it will be over: a bar on a terminal, lines of text elsewhere."""

import sys
import time
from collections.abc import Callable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

BLOCK_SECONDS = 30.0  # that making and filling arrays takes, before one has been seen
CELL_SECONDS = 4.0  # that a cell takes besides its load
LINE_SECONDS = 10.0  # between two lines that only say that it goes on


class Expected:
    """When a run will be over: of what takes how long, the last that was seen.

    A block is made, then its cells are measured one by one; what is under way counts as begun.
    """

    def __init__(self, blocks: int, cells: int, load_seconds: float, now=time.monotonic):
        self.blocks, self.cells = blocks, cells  # that are still to come
        self.done = self.lost = 0  # cells that were measured; that were given up
        self.load_seconds = load_seconds
        self.block_seconds, self.cell_seconds = BLOCK_SECONDS, load_seconds + CELL_SECONDS
        self.now = now
        self.step_seconds, self.step_began = self.block_seconds, now()

    def block_made(self, seconds: float) -> None:
        self.blocks -= 1
        self.block_seconds = seconds
        self.step_seconds, self.step_began = self.cell_seconds, self.now()

    def cell_done(self, seconds: float) -> None:
        self.cells -= 1
        self.done += 1
        self.cell_seconds = max(self.load_seconds, (self.cell_seconds + seconds) / 2)
        self.step_seconds, self.step_began = self.cell_seconds, self.now()

    def block_over(self, blocks: int, cells: int) -> None:
        """So many of each are to come after it; what it did not measure is given up."""
        self.lost += self.cells - cells
        self.blocks, self.cells = blocks, cells
        self.step_seconds, self.step_began = self.block_seconds * (blocks > 0), self.now()

    def seconds(self) -> float:
        whole = self.blocks * self.block_seconds + self.cells * self.cell_seconds
        return max(0.0, whole - min(self.step_seconds, self.now() - self.step_began))


class Screen:
    """Says what is done now. A context manager: the terminal is as it was afterwards."""

    def __init__(self, title: str, expected: Expected, stream=None):
        self.expected = expected
        self.total = expected.cells
        self.console = Console(file=stream or sys.stderr, highlight=False)
        self.bar = None
        self.said = ""
        self.said_at = 0.0
        if self.console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[count]}"),
                TimeElapsedColumn(), TextColumn("{task.fields[end]}"),
                console=self.console, transient=True,
            )  # fmt: skip
            self.task = self.bar.add_task(title, total=100, count="", end="")
        else:
            self.line(title)

    def __enter__(self) -> "Screen":
        if self.bar:
            self.bar.start()
        return self

    def __exit__(self, *error) -> None:
        if self.bar:
            self.bar.stop()

    def now(self, what: str, again: bool = False) -> None:
        """`again`: the same as before, with other figures; said on a terminal, else seldom."""
        count = f"{self.expected.done} of {self.total}"
        if self.expected.lost:
            count += f" ({self.expected.lost} given up)"
        if self.bar:
            left = self.expected.seconds()
            elapsed = self.bar.tasks[0].elapsed or 0.0
            share = 100 * elapsed / (elapsed + left) if elapsed + left else 0
            self.bar.update(
                self.task, description=what, completed=share,
                count=count, end=f"ends about {self.end()}",
            )  # fmt: skip
        elif not again or time.monotonic() > self.said_at + LINE_SECONDS:
            self.line(f"{count}, ends about {self.end()}: {what}")

    def line(self, text: str) -> None:
        """For good, above the bar."""
        self.said_at = time.monotonic()
        if self.bar:
            self.console.print(text, markup=False)
        else:
            print(f"{time.strftime('%H:%M:%S')} {text}", file=self.console.file, flush=True)

    def end(self) -> str:
        left = self.expected.seconds()
        at = time.localtime(time.time() + left)
        return time.strftime("%H:%M" if left < 12 * 3600 else "%a %H:%M", at)


Say = Callable[[str], None]
