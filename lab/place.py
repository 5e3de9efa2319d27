"""Where a shell command runs: on this host, or in a guest. Sides and loads do not care which.

Invariant: whatever was spawned is gone when its place is closed.
"""

import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from demo import child
from demo.vm import CommandTimeout, Output, VmError


class Running(Protocol):
    """A command under way."""

    @property
    def running(self) -> bool: ...

    def wait(self, timeout: float) -> Output:
        """Its status and output. Past `timeout` it is killed, and CommandTimeout raised."""

    def kill(self, signal: str = "KILL") -> None: ...


class Place(Protocol):
    """`demo.vm.Vm` is one, as far as its commands go."""

    def run(self, command: str, timeout: float = 60) -> Output: ...

    def check(self, command: str, timeout: float = 60) -> str:
        """Runs a shell script that must succeed, and returns what it printed."""

    def spawn(self, command: str, on_line: Callable[[str], None] | None = None) -> Running: ...

    def fetch(self, path: str, to: Path) -> None:
        """Copies a file out of the place."""


class Host:
    """Commands on this machine. Each leads a session of its own, and none outlives us."""

    def __init__(self):
        self.children: list[HostCommand] = []

    def run(self, command: str, timeout: float = 60) -> Output:
        return self.spawn(command).wait(timeout)

    def check(self, command: str, timeout: float = 60) -> str:
        output = self.run(command, timeout)
        if output.rc != 0:
            last = "\n".join(output.text.strip().splitlines()[-12:])
            raise VmError(f"`{command.strip()}` ended with status {output.rc}:\n{last}")
        return output.text

    def spawn(self, command: str, on_line: Callable[[str], None] | None = None) -> "HostCommand":
        self.children = [each for each in self.children if each.running]
        started = HostCommand(command, on_line)
        self.children.append(started)
        return started

    def fetch(self, path: str, to: Path) -> None:
        to.write_bytes(Path(path).read_bytes())

    def close(self) -> None:
        for each in self.children:
            each.kill()


class HostCommand:
    def __init__(self, command: str, on_line: Callable[[str], None] | None):
        self.command = command
        self.on_line = on_line
        self.output = bytearray()
        self.child = child.start(
            ["sh", "-c", command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        for line in self.child.stdout:
            self.output += line
            if self.on_line:
                self.on_line(line.decode(errors="replace").rstrip("\n"))

    @property
    def running(self) -> bool:
        return self.child.poll() is None

    def wait(self, timeout: float) -> Output:
        try:
            self.child.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            last = self.output.decode(errors="replace")[-400:]
            raise CommandTimeout(
                f"`{self.command.strip()}` ran over {timeout} s:\n{last}"
            ) from None
        self.reader.join(5)  # a daemon that it left behind may hold the pipe
        return Output(self.child.returncode, bytes(self.output))

    def kill(self, signal: str = "KILL") -> None:
        child.kill(self.child)
