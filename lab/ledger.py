"""What would be left behind if we were killed outright: mounts, loop devices, processes, files.

Each is written down before it is made and crossed out when it is gone, so that `ashlar-lab clean`
finds what a run could not take down itself. Whatever is not in here is never touched. Of what was
owed before the machine was booted, only files are left.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lab import lines, paths

KINDS = ("process", "mount", "loop", "md", "dm", "ublk", "nbd", "zpool", "path")
GONE_SECONDS_MAX = 20
COMMAND_SECONDS_MAX = 15  # what waits for a device that answers nobody waits for ever
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
BLOCK, POOLS = Path("/sys/block"), Path("/proc/spl/kstat/zfs")


class LedgerError(Exception):
    """What has to be written down cannot be, so nothing is made."""


@dataclass(frozen=True)
class Debt:
    """One thing that somebody has to take down.

    process: pid and start time; mount: its directory or file; loop: the file beneath; md: the UUID
    of an array; dm: the name of a device of the device mapper; ublk: its name in /dev; nbd: its
    name in /dev and the process that serves it; zpool: the name of a pool; path: a file or
    directory that is ours as a whole.
    """

    kind: str
    what: str


class Ledger:
    """Lines of `+ kind what` and `- kind what`, and `boot ID` before those of each boot. Empty when
    there is nothing to do."""

    def __init__(self, path: Path):
        self.path = path
        self.says_boot = False

    def owe(self, kind: str, what: str) -> Debt:
        assert kind in KINDS and "\n" not in what, (kind, what)
        debt = Debt(kind, what)
        try:
            self.write("+", debt)
        except OSError as error:
            raise LedgerError(
                f"{self.path} cannot be written ({error.strerror}): make room, or set ASHLAR_CACHE "
                "to another directory"
            ) from None
        return debt

    def settle(self, kind: str, what: str) -> None:
        with contextlib.suppress(OSError):  # `clean` will look for it, and find nothing
            self.write("-", Debt(kind, what))

    def write(self, sign: str, debt: Debt) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if not self.says_boot:
            lines.append(self.path, f"boot {boot()}")
            self.says_boot = True
        lines.append(self.path, f"{sign} {debt.kind} {debt.what}")

    def debts(self) -> list[Debt]:
        """In the order in which they were made."""
        open_debts: dict[Debt, None] = {}
        booted = None
        for line in [*lines.whole(self.path), f"boot {boot()}"]:
            sign, rest = line.split(" ", 1)
            if sign == "boot":
                if rest != booted:
                    open_debts = {debt: None for debt in open_debts if debt.kind == "path"}
                booted = rest
            elif sign == "+":
                open_debts[Debt(*rest.split(" ", 1))] = None
            else:
                open_debts.pop(Debt(*rest.split(" ", 1)), None)
        return list(open_debts)

    def clean(self) -> Iterator[str]:
        """Takes everything down, the last first, and says what it did. What cannot be, ends it:
        what was made earlier may lie beneath. Only devices of ublk come before what lies on them:
        they keep all requests while nobody serves them, so none could be unmounted."""
        for debt in sorted(reversed(self.debts()), key=lambda debt: debt.kind != "ublk"):
            was_there = is_there(debt)
            if was_there:
                take_down(debt)
            if is_there(debt):
                raise Stayed(debt)
            self.settle(debt.kind, debt.what)
            if was_there:
                yield f"removed {debt.kind} {debt.what}"
        self.forget()

    def forget(self) -> None:
        """Nothing is owed."""
        self.path.unlink(missing_ok=True)
        self.says_boot = False


class Stayed(Exception):
    """Something could not be taken down."""

    def __init__(self, debt: Debt):
        fix = FIXES.get(debt.kind, "see who uses it (fuser -vm, losetup -a)")
        super().__init__(
            f"{debt.kind} {debt.what} cannot be removed: {fix}, then run `ashlar-lab clean` again"
        )


# A device of ublk whose server is gone goes by the driver's own commands only.
FIXES = {"ublk": "`ublk del` of ublksrv removes it, or a reboot does"}


def is_there(debt: Debt) -> bool:
    if debt.kind == "process":
        return bool(session_of(debt))
    if debt.kind == "mount":
        return debt.what in mounts()
    if debt.kind == "loop":
        return bool(loops_of(debt.what))
    if debt.kind == "md":
        return bool(arrays_of(debt.what))
    if debt.kind == "dm":
        return any(line_of(path) == debt.what for path in BLOCK.glob("dm-*/dm/name"))
    if debt.kind == "ublk":
        return (BLOCK / debt.what).exists()
    if debt.kind == "nbd":
        name, pid = debt.what.split()
        return nbd_server(name) == pid
    if debt.kind == "zpool":
        return (POOLS / debt.what).exists()
    return os.path.lexists(debt.what)


def take_down(debt: Debt) -> None:
    if debt.kind == "process":
        end_process(debt)
    elif debt.kind == "mount":
        end_daemons_in(debt.what)
        until(lambda: quietly("umount", debt.what) or not is_there(debt))
    elif debt.kind == "loop":
        for device in loops_of(debt.what):
            quietly("losetup", "--detach", device)
        until(lambda: not is_there(debt))
    elif debt.kind == "md":
        for name in arrays_of(debt.what):
            until(lambda: quietly("mdadm", "--stop", f"/dev/{name}") or not is_there(debt))
    elif debt.kind == "dm":
        until(lambda: quietly("dmsetup", "remove", debt.what) or not is_there(debt))
    elif debt.kind == "ublk":
        quietly("ublk", "del", "-n", debt.what.removeprefix("ublkb"))
    elif debt.kind == "nbd":
        quietly("nbd-client", "-d", f"/dev/{debt.what.split()[0]}")
        until(lambda: not is_there(debt))
    elif debt.kind == "zpool":
        until(lambda: quietly("zpool", "destroy", "-f", debt.what) or not is_there(debt))
    elif Path(debt.what).is_dir():
        beneath = [path for path in mounts() if path.startswith(debt.what + "/")]
        if not beneath:  # else files that are not ours would go
            shutil.rmtree(debt.what, ignore_errors=True)
    else:
        Path(debt.what).unlink(missing_ok=True)


def session_of(debt: Debt) -> list[int]:
    """A process that led a session, and what of that is left when it has gone: the kernel ends a
    shell with us, and not what the shell has called. Its number is taken as long as one is left."""
    leader, began = debt.what.split()
    if process_began(int(leader)) not in (None, began):
        return []
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        fields = stat_fields(int(path.name))
        if fields and fields[0] not in "ZX" and leader in (path.name, fields[3]):
            found.append(int(path.name))
    return sorted(found, key=lambda pid: pid != int(leader))


def end_process(debt: Debt) -> None:
    """SIGTERM to the first of it, as a database ends its own, and SIGKILL to all that is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = session_of(debt)
        for pid in left if number == signal.SIGKILL else left[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if until(lambda: not is_there(debt), seconds=GONE_SECONDS_MAX / 2):
            return


def end_daemons_in(directory: str) -> None:
    """A database that has lost its first process may leave others that wait for ever. They lead
    sessions of their own, but work in its directory. Who sits there at a terminal is no daemon."""
    for pid in processes_in(directory):
        if stat_fields(pid)[4:5] == ["0"]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes_in(directory: str) -> list[int]:
    """Whose working directory is there or beneath."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):  # no further: a directory may be one of a dead mount
        with contextlib.suppress(OSError):
            if f"{os.readlink(path / 'cwd')}/".startswith(f"{directory}/"):
                found.append(int(path.name))
    return found


def until(done, seconds: float = GONE_SECONDS_MAX) -> bool:
    deadline = time.monotonic() + seconds
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def quietly(*words: str) -> bool:
    return said(*words) is not None


def said(*words: str) -> str | None:
    """What a command printed; None if it failed, is missing, or took too long. One that waits in
    the kernel for a device is not waited for: not even SIGKILL ends it."""
    try:
        child = subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"PATH": paths.programs()},
        )
        text, _ = child.communicate(timeout=COMMAND_SECONDS_MAX)
    except FileNotFoundError:
        return None
    except subprocess.TimeoutExpired:
        child.kill()
        return None
    return text.decode(errors="replace") if child.returncode == 0 else None


def boot() -> str:
    return BOOT_ID.read_text().strip()


def arrays_of(uuid: str) -> list[str]:
    """Of md, by name. A number is used again, a UUID is not."""
    return [
        path.parent.name
        for path in sorted(BLOCK.glob("md*/md"))
        if f"MD_UUID={uuid}" in (said(*MD_ASK, f"/dev/{path.parent.name}") or "").splitlines()
    ]


MD_ASK = ("mdadm", "--detail", "--export")


def nbd_server(name: str) -> str:
    return line_of(BLOCK / name / "pid")  # none, if it serves nobody


def line_of(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def process_began(pid: int) -> str | None:
    """A pid is used again, a pid with its start time is not. A zombie is gone."""
    fields = stat_fields(pid)
    return fields[19] if fields and fields[0] not in "ZX" else None


def stat_fields(pid: int) -> list[str]:
    """Of `/proc/PID/stat`, from the state on; none if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return []


def mounts() -> list[str]:
    """Mount points, with the octal escapes of the kernel undone."""
    lines = Path("/proc/self/mounts").read_text().splitlines()
    return [line.split()[1].encode().decode("unicode_escape") for line in lines]


def loops_of(file: str) -> list[str]:
    """Loop devices on a file, which may be deleted already."""
    return [
        f"/dev/{path.parent.parent.name}"
        for path in Path("/sys/block").glob("loop*/loop/backing_file")
        if backing(path) == file
    ]


def backing(path: Path) -> str:
    try:
        return path.read_text().rstrip("\n").removesuffix(" (deleted)")
    except OSError:  # it went meanwhile
        return ""
