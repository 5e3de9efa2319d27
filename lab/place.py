"""Where a shell command runs: on this host, or in a guest. Sides and loads do not care which.

Invariant: whatever was spawned is gone when its place is closed. On the host, what would outlive
us if we were killed is in the ledger first; a guest takes all of its own with it.
"""

import os
import secrets
import shlex
import shutil
import signal as signals
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO

from demo import child
from demo.vm import CommandTimeout, Output, VmError
from lab import ledger, paths
from lab.ledger import Ledger

STOP_SECONDS_MAX = 30
QUICK_SECONDS_MAX = 60
UNMOUNT_SECONDS_MAX = 60
CLOCK_TICKS = 100  # USER_HZ, which is the same everywhere that Linux runs on servers
PLAIN = {"LC_ALL": "C.UTF-8"}  # programs say what they say in English
LARGE_SECTOR_BYTES = 4096
KTHREADD = 2  # the parent of all threads of the kernel
TOKEN = secrets.token_hex(8)  # of this run, in names that nobody else shall have made before


class Refused(VmError):
    """A command of this host ended and said that it did not do it: nothing is owed for it."""


class Running(Protocol):
    """A command under way."""

    @property
    def running(self) -> bool: ...

    def wait(self, timeout: float) -> Output:
        """Its status and output. Past `timeout` it is killed, and CommandTimeout raised."""

    def kill(self, signal: str = "KILL") -> None:
        """Signals it and all its children."""


class Place(Protocol):
    """This host, or a guest."""

    logs: str | None  # a directory for what loads write down; None: memory will do
    # Whether its processors are made in software, and share those of this machine with all others.
    emulated: bool

    def run(self, command: str, timeout: float = 60) -> Output: ...

    def check(self, command: str, timeout: float = 60) -> str:
        """Runs a shell script that must succeed, and returns what it printed."""

    def spawn(self, command: str, on_line: Callable[[str], None] | None = None) -> Running: ...

    def fetch(self, path: str, to: Path) -> None:
        """Copies a file out of the place."""

    def set_clock(self) -> float:
        """By this machine's. Returns the seconds that it is behind for all that."""

    def unplug(self, device: str) -> bool:
        """Takes a drive out as a hand would. False where there is no hand: software has to do."""

    def plug(self, device: str) -> str:
        """A drive that was taken out is there again, empty, by the name that is returned."""


class Host:
    """Commands on this machine. Each leads a session of its own, and none outlives us."""

    logs = None
    emulated = False

    def __init__(self, owed: Ledger, trace: TextIO | None = None):
        self.ledger = owed
        self.trace = trace  # each command, when it was, and its answer
        self.children: list[HostCommand] = []
        self.lock = threading.Lock()  # the sampler runs commands, too

    def run(self, command: str, timeout: float = 60) -> Output:
        output = self.start(command, None, owed=timeout > QUICK_SECONDS_MAX).wait(timeout)
        self.write_down(command, output)
        return output

    def check(self, command: str, timeout: float = 60) -> str:
        output = self.run(command, timeout)
        if output.rc != 0:
            last = "\n".join(output.text.strip().splitlines()[-12:])
            raise Refused(f"`{command.strip()}` ended with status {output.rc}:\n{last}")
        return output.text

    def spawn(self, command: str, on_line: Callable[[str], None] | None = None) -> "HostCommand":
        """For what runs beside us. It is owed, as are commands that may take long; quick ones are
        over before anybody cleans up."""
        self.write_down(command, None)
        return self.start(command, on_line, owed=True)

    def start(self, command: str, on_line, owed: bool) -> "HostCommand":
        with self.lock:
            for each in [each for each in self.children if not each.running]:
                each.settle()
                self.children.remove(each)
            started = HostCommand(command, on_line, self.ledger if owed else None)
            self.children.append(started)
        return started

    def write_down(self, command: str, output: Output | None) -> None:
        if self.trace:
            status = "started" if output is None else f"status {output.rc}"
            now = time.strftime("%Y-%m-%d %H:%M:%S")
            answer = output.text.strip()[-4000:] if output else ""
            print(f"{now} [{status}] {command.strip()}\n{answer}", file=self.trace, flush=True)

    def fetch(self, path: str, to: Path) -> None:
        to.write_bytes(Path(path).read_bytes())

    def set_clock(self) -> float:
        return 0.0

    def unplug(self, device: str) -> bool:
        return False

    def plug(self, device: str) -> str:
        return device

    def close(self) -> None:
        for each in self.children:
            each.kill()
            each.settle()
        self.children = []


class HostCommand:
    def __init__(self, command: str, on_line: Callable[[str], None] | None, owed: Ledger | None):
        self.command = command
        self.on_line = on_line
        self.output = bytearray()
        self.child = child.start(
            ["sh", "-c", command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | PLAIN | {"PATH": paths.programs()},
        )
        self.owed = owed
        self.debt = f"{self.child.pid} {ledger.process_began(self.child.pid)}"
        if owed:
            owed.owe("process", self.debt)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        with self.child.stdout as lines:
            for line in lines:
                self.output += line
                if self.on_line:
                    self.on_line(line.decode(errors="replace").rstrip("\n"))

    @property
    def pid(self) -> int:
        return self.child.pid

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
        except BaseException:  # Ctrl-C: nobody waits for it any more
            self.kill()
            raise
        self.reader.join(5)  # a daemon that it left behind may hold the pipe
        self.settle()
        return Output(self.child.returncode, bytes(self.output))

    def kill(self, signal: str = "KILL") -> None:
        if signal == "KILL":
            child.kill(self.child)
        elif self.running:
            os.killpg(self.pid, signals.Signals[f"SIG{signal}"])

    def settle(self) -> None:
        if self.owed and not self.running:  # who waits for a device is there, also when killed
            self.owed.settle("process", self.debt)
            self.owed = None


def stop(
    running: Running, signal: str = "TERM", seconds: float = STOP_SECONDS_MAX
) -> Output | None:
    """Asks it to end, and kills it if it does not. None if it had to be killed."""
    running.kill(signal)
    try:
        return running.wait(seconds)
    except CommandTimeout:
        return None


def fresh_directory(place: Host, inside: Path, mode: int = 0o700) -> Path:
    """One that was not there, and is ours as a whole."""
    inside.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix="ashlar-lab-", dir=inside))
    place.ledger.owe("path", str(made))
    made.chmod(mode)
    return made


def remove(place: Host, directory: Path) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    place.ledger.settle("path", str(directory))


def owe(place: Place, kind: str, what: str) -> None:
    if isinstance(place, Host):
        place.ledger.owe(kind, what)


def settle(place: Place, kind: str, what: str) -> None:
    if isinstance(place, Host):
        place.ledger.settle(kind, what)


def mount(place: Place, device: str, at: str, kind: str, options: str = "") -> None:
    place.check(f"mkdir -p {at}")
    owe(place, "mount", at)
    words = f"-o {options} " if options else ""
    try:
        place.check(f"mount -t {kind} {words}{device} {at}", timeout=120)
    except Refused:
        settle(place, "mount", at)
        raise


def unmount(place: Place, at: str) -> None:
    """Tries for a while: what a process has open is let go a moment after it has ended."""
    place.check(
        f"tries={UNMOUNT_SECONDS_MAX}; while mountpoint -q {at}; do "
        f"umount {at} && break; tries=$((tries - 1)); [ $tries -gt 0 ] || exit 1; sleep 1; done",
        timeout=2 * UNMOUNT_SECONDS_MAX,
    )
    settle(place, "mount", at)


def loop(place: Place, file: str, sector_bytes: int = 512) -> str:
    """A block device on a file, past the page cache: the kernel may say yes and not do it, with
    sectors smaller than those of the disk beneath."""
    for size in dict.fromkeys((sector_bytes, LARGE_SECTOR_BYTES)):
        owe(place, "loop", file)
        try:
            device = place.check(
                f"losetup --find --show --direct-io=on --sector-size={size} {shlex.quote(file)}"
            ).strip()
        except Refused:
            settle(place, "loop", file)
            raise
        if place.run(f"cat /sys/block/{Path(device).name}/loop/dio").text.strip() == "1":
            return device
        unloop(place, device, file)
    raise VmError(
        f"the loop device of {file} does not go past the page cache, and would measure memory: "
        "take a file system that knows direct I/O (--set drives.directory=…), or block devices"
    )


def unloop(place: Place, device: str, file: str) -> None:
    """A loop device that is in use is detached later, by the kernel: so it is waited for."""
    place.check(
        f"losetup --detach {device}; tries=100; while [ -n \"$(losetup -j {shlex.quote(file)})\" ];"
        " do tries=$((tries - 1)); [ $tries -gt 0 ] || exit 1; sleep 0.1; done"
    )
    settle(place, "loop", file)


def programs_missing(place: Place, *programs: str) -> list[str]:
    """Those that are not in `place`. Its PATH may lack sbin."""
    return place.check(
        f"PATH=$PATH:/usr/sbin:/sbin; for each in {' '.join(programs)}; do "
        "command -v $each >/dev/null || echo $each; done"
    ).split()


def scratch(place: Place, name: str) -> str:
    """A directory for what a load writes down. It is none of the disk's work: it goes to memory, or
    to a disk of its own where memory is what is measured with."""
    memory = "/dev/shm" if place.run("[ -d /dev/shm ]").rc == 0 else "/tmp"
    return f"{place.logs or memory}/ashlar-lab-{TOKEN}-{name}-log"


def processes_in(place: Place, directory: str) -> list[int]:
    """Whose working directory is there or beneath."""
    if isinstance(place, Host):
        return ledger.processes_in(directory)
    links = f"find /proc -maxdepth 2 -path '/proc/[0-9]*/cwd' \\( -lname '{directory}' "
    found = place.run(f"{links} -o -lname '{directory}/*' \\) 2>/dev/null").text
    return [int(line.split("/")[2]) for line in found.splitlines()]


class Process(NamedTuple):
    cpu_seconds: float  # since it began
    is_kernel: bool  # a thread of the kernel's own


def processes(place: Place) -> dict[int, Process]:
    found = {}
    for text in stats(place):
        head, _, rest = text.rpartition(") ")
        fields = rest.split()
        if head and len(fields) > 12:
            pid, parent = int(head.split(" ", 1)[0]), int(fields[1])
            seconds = (int(fields[11]) + int(fields[12])) / CLOCK_TICKS
            found[pid] = Process(seconds, parent == KTHREADD)
    return found


def stats(place: Place) -> list[str]:
    """`/proc/PID/stat` of every process."""
    if not isinstance(place, Host):
        return place.run("cat /proc/[0-9]*/stat 2>/dev/null").text.splitlines()
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found.append((path / "stat").read_text())
        except OSError:  # it ended meanwhile
            continue
    return found
