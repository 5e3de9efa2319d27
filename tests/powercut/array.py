"""The array under test: drives with a volatile cache, and what becomes of them.

Killing the daemon cuts the drives' power: what was not flushed is lost, or is there in part.
"""

import contextlib
import shutil
import subprocess
from pathlib import Path

from demo import child
from demo.engine import Engine
from tests.powercut.plan import Kind

KIND = "lossy"  # how `ashlar drive attach` takes them; see its help
VOLUME_BYTES = 1 << 30
ARRAY = "a"
VOLUME = "v"
SCRUB_SECONDS_MAX = 300
REBUILD_SECONDS_MAX = 300


class Array:
    def __init__(self, engine: Engine, kind: Kind, directory: Path, socket: Path):
        self.engine = engine
        self.redundancy = kind.redundancy
        self.drive_bytes = kind.drive_bytes
        self.directory = directory
        self.socket = socket
        self.made = 0  # drives so far, for their names
        self.scrub: subprocess.Popen | None = None
        names = [self.attach_new() for _ in range(kind.members)]
        engine.create_array(
            ARRAY, names, level=kind.level, integrity=kind.integrity, policy=kind.policy
        )
        engine.create_volume(VOLUME, ARRAY, VOLUME_BYTES)
        engine.create_export(VOLUME, VOLUME, socket)

    def attach_new(self) -> str:
        name = f"d{self.made}"
        self.made += 1
        self.attach(name, "--size", f"{self.drive_bytes >> 20}M")
        return name

    def attach(self, name: str, *more: str) -> None:
        path = f"{KIND}:{self.file(name)}"
        self.engine.ashlar("drive", "attach", path, "--name", name, *more)

    def file(self, name: str) -> Path:
        return self.directory / f"{name}.img"

    # What it says of itself

    def members(self) -> list[dict]:
        return self.engine.show("array", "show", ARRAY)["members"]

    def whole(self, member: dict) -> bool:
        return member["present"] and member["state"] == "trusted"

    def is_whole(self) -> bool:
        return all(map(self.whole, self.members()))

    def absent(self) -> list[dict]:
        """Members without a drive."""
        return [member for member in self.members() if not member["present"]]

    def may_lose(self, index: int) -> dict | None:
        """The member at `index` or the next that is whole, if the redundancy bears its loss."""
        members = self.members()
        if sum(not self.whole(member) for member in members) >= self.redundancy:
            return None
        turned = members[index:] + members[:index]
        return next(member for member in turned if self.whole(member))

    def wrong(self) -> list[str]:
        """What `array show` says that no order of the round explains."""
        shown = self.engine.show("array", "show", ARRAY)
        missing = sum(not self.whole(member) for member in shown["members"])
        wrong = []
        if shown["state"] != ("degraded" if missing else "optimal"):
            wrong.append(f"the array is {shown['state']} with {missing} members missing")
        if missing > self.redundancy:
            wrong.append(f"{missing} members are missing")
        for name in ("error", "rebuild_error"):
            if shown[name]:
                wrong.append(f"{name}: {shown[name]}")
        return wrong

    # Drives go and come

    def pull(self, member: dict) -> None:
        self.engine.pull_drive(member["drive"])

    def lose(self, member: dict) -> None:
        """While the daemon is dead."""
        self.file(member["drive"]).unlink()

    def heal(self, same_drive: bool) -> None:
        """Gives every absent member a drive; the rebuild begins by itself."""
        for member in self.absent():
            old = member["last_drive"]
            if same_drive and old and self.file(old).exists():
                self.attach(old)
                self.engine.ashlar("array", "rebuild", ARRAY)
            else:
                place = ["--member", str(member["index"]), "--new", self.attach_new()]
                self.engine.ashlar("array", "replace", ARRAY, *place)
                self.discard(old)

    def finish_rebuild(self) -> None:
        self.engine.ashlar("array", "rebuild", ARRAY, "--wait", timeout=REBUILD_SECONDS_MAX)

    def discard(self, name: str | None) -> None:
        """A drive that was replaced is not seen again."""
        if name is None:
            return
        self.file(name).unlink(missing_ok=True)
        if any(drive["name"] == name for drive in self.engine.show("drive", "list")):
            self.engine.ashlar("drive", "detach", name)

    # Scrub

    def begin_scrub(self) -> None:
        words = ["--socket", str(self.engine.socket), "array", "scrub", ARRAY, "--wait"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        self.scrub = child.start([str(self.engine.binary), *words], **pipes)

    def finish_scrub(self) -> list[str]:
        with contextlib.closing(self.scrub.stdout):
            said, _ = self.scrub.communicate(timeout=SCRUB_SECONDS_MAX)
        status, self.scrub = self.scrub.returncode, None
        wrong = [] if status == 0 else [f"scrub: {said.strip()}"]
        return wrong + self.scrub_wrong(self.engine.show("array", "show", ARRAY)["scrub"])

    @staticmethod
    def scrub_wrong(report: dict) -> list[str]:
        """What a scrub should not have found."""
        wrong = []
        for name in ("mismatched_stripes", "unreadable_stripes", "damaged_stripes"):
            if report[name]:
                wrong.append(f"scrub: {name} {report[name]}, first {report['places'][:1]}")
        return wrong

    def keep(self, target: Path) -> None:
        """A copy as the cut left it: evidence, if what follows finds something wrong."""
        shutil.rmtree(target, ignore_errors=True)
        copy = ["cp", "-r", "--sparse=always", "--reflink=auto", str(self.directory), str(target)]
        subprocess.run(copy, check=True)
