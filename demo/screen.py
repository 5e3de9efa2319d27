"""What the person sees: one line per step, a bar while it runs on a terminal, and the final table.

Without a terminal there are no bars, only finished lines.
"""

import shutil
import sys
import threading
import time
from contextlib import contextmanager

NAME_WIDTH = 44
TICK_SECONDS = 0.5
BAR_WIDTH = 12


class Step:
    """A running step; `note` is shown beside it, and stays when it is done."""

    def __init__(self, name: str, seconds: float):
        self.name = name
        self.seconds = seconds
        self.note = ""
        self.begin = time.monotonic()


class Screen:
    def __init__(self, log, seconds_expected: float):
        self.log = log
        self.begin = time.monotonic()
        self.seconds_expected = seconds_expected
        self.terminal = sys.stdout.isatty()
        self.lock = threading.Lock()

    def say(self, text: str = "") -> None:
        print(text, flush=True)
        print(text, file=self.log, flush=True)

    @contextmanager
    def step(self, name: str, seconds: float = 1, bar: bool = True):
        """One step of about `seconds`. Without `bar`, the block draws its own progress."""
        step = Step(name, seconds)
        print(f"\n=== {name}", file=self.log, flush=True)
        over = threading.Event()
        ticker = threading.Thread(target=self.tick, args=(step, over), daemon=True)
        if self.terminal and bar:
            ticker.start()
        elif not bar:
            print(f"{clock(self.elapsed())}   {name} …", flush=True)
        done = False
        try:
            yield step
            done = True
        finally:
            over.set()
            if self.terminal and bar:
                ticker.join()
                print("\r\033[K", end="")
            took = f"{time.monotonic() - step.begin:6.1f} s"
            line = f"{clock(self.elapsed())} {'✓' if done else '✗'} {name:<{NAME_WIDTH}} {took}"
            self.say(f"{line}  {step.note}".rstrip())

    def tick(self, step: Step, over: threading.Event) -> None:
        while not over.wait(TICK_SECONDS):
            share = min((time.monotonic() - step.begin) / max(step.seconds, 0.1), 0.99)
            bar = ("█" * int(share * BAR_WIDTH)).ljust(BAR_WIDTH, "░")
            left = max(self.seconds_expected - self.elapsed(), 0)
            line = f"{clock(self.elapsed())}   {step.name:<{NAME_WIDTH}} {bar} "
            line += f"ends in {clock(left)}  {step.note}"
            print("\r\033[K" + line[: shutil.get_terminal_size().columns - 1], end="", flush=True)

    def elapsed(self) -> float:
        return time.monotonic() - self.begin


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def table(header: list[str], rows: list[list[str]]) -> str:
    """The first two columns are words, the others numbers."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for row in [header, ["─" * width for width in widths], *rows]:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
