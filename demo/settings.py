"""What a person may choose, all by `make demo NAME=value`, and the checks before anything starts.

Every refusal names its fix.
"""

import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MEMBERS = 5
DATA_MEMBERS = 4
GUEST_MEMORY_BYTES = 512 << 20  # small, so that PostgreSQL reads from the array and not from memory
MEMORY_FREE_MIN = (1 << 30) + GUEST_MEMORY_BYTES
VOLUME_BYTES_MAX = 100 << 30
CHECKOUT = Path(__file__).parent.parent


class Refusal(Exception):
    """The demo cannot run so; the message names the fix."""


@dataclass(frozen=True)
class Settings:
    drives: list[str]  # real drives; none: files
    drive_bytes: int  # of a file
    force: bool
    cores: str
    scale: int | None  # None: by what the machine can do
    clients: int
    seconds: int
    cpus: int
    cache: Path
    binary: Path

    @property
    def guest_memory(self) -> str:
        return f"{GUEST_MEMORY_BYTES >> 20}M"


def from_environment() -> Settings:
    cache = Path(os.environ.get("ASHLAR_CACHE") or CHECKOUT / ".cache").resolve()
    settings = Settings(
        drives=os.environ.get("DRIVES", "").split(),
        drive_bytes=size(os.environ.get("SIZE") or "1G"),
        force=os.environ.get("FORCE", "") not in ("", "0"),
        cores=os.environ.get("CORES") or "0",
        scale=number("SCALE", None),
        clients=number("CLIENTS", 8),
        seconds=number("SECONDS_", 30),
        cpus=number("CPUS", 2),
        cache=cache,
        binary=Path(os.environ.get("ASHLAR") or CHECKOUT / "target/release/ashlar"),
    )
    check(settings)
    return settings


def size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMGT]?)(i?B)?", text.upper().replace("I", "i"))
    if not match:
        raise Refusal(f"SIZE={text} is not a size: write it like 2G or 512M")
    return int(match[1]) * UNITS[match[2]]


def number(name: str, default: int | None) -> int | None:
    text = os.environ.get(name)
    if not text:
        return default
    if not text.isdigit() or int(text) == 0:
        raise Refusal(f"{name}={text} is not a whole number above 0")
    return int(text)


def check(settings: Settings) -> None:
    if not settings.binary.exists():
        raise Refusal(f"{settings.binary} is not there: run make build")
    if settings.drives and len(settings.drives) != MEMBERS + 1:
        raise Refusal(
            f"DRIVES names {len(settings.drives)} drives: name {MEMBERS + 1}, {MEMBERS} for the "
            "array and one to replace the drive that is pulled"
        )
    if len(set(settings.drives)) != len(settings.drives):
        raise Refusal("DRIVES names a drive twice")
    if not settings.drives and settings.drive_bytes < 512 << 20:
        raise Refusal("SIZE is too small for the database: take 512M or more")
    available = memory_available()
    if available < MEMORY_FREE_MIN:
        raise Refusal(
            f"{available >> 20} MiB of memory are free and {MEMORY_FREE_MIN >> 20} MiB are needed: "
            "end other programs, or take a larger machine"
        )


def check_disk(settings: Settings) -> None:
    """A rebuild and a scrub may write every block of every drive file."""
    needed = (MEMBERS + 1) * settings.drive_bytes + (256 << 20)
    free = shutil.disk_usage(settings.cache).free
    if not settings.drives and free < needed:
        raise Refusal(
            f"{settings.cache} has {free >> 20} MiB free and the drive files need {needed >> 20}: "
            "make room, set a smaller SIZE, or set ASHLAR_CACHE to a directory on a larger disk"
        )


def memory_available() -> int:
    text = Path("/proc/meminfo").read_text()
    return int(re.search(r"MemAvailable:\s+(\d+) kB", text)[1]) << 10


def volume_bytes(drive_bytes: int) -> int:
    """Three quarters of what the data members hold, in whole MiB: the rest is the engine's own."""
    return min(DATA_MEMBERS * drive_bytes * 3 // 4, VOLUME_BYTES_MAX) >> 20 << 20
