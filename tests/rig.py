"""What every black-box test stands on: a daemon of its own on drive files, and guests.

Invariant: when the `with` block is over, the daemon, the guests and the files are gone.
"""

import contextlib
import os
import tempfile
import time
from pathlib import Path

from demo import guest_image
from demo.engine import Engine
from demo.vm import Vm

CHECKOUT = Path(__file__).parent.parent
BINARY = Path(os.environ.get("ASHLAR") or CHECKOUT / "target/release/ashlar")
CACHE = Path(os.environ.get("ASHLAR_CACHE") or CHECKOUT / ".cache").resolve()
DRIVE_BYTES = 288 << 20


class Rig:
    """A daemon, the directory its drives are in, and what was started on it."""

    def __init__(self, cleanup: contextlib.ExitStack):
        self.cleanup = cleanup
        self.directory = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ashlar-")))
        self.log = self.directory / "ashlar.log"
        self.trace = cleanup.enter_context(open(self.directory / "commands.log", "w"))
        self.engine = self.new_engine(self.directory / "state")

    def new_engine(self, state: Path) -> Engine:
        socket = self.directory / "api.sock"
        engine = Engine(BINARY, state, socket, "0", self.log, self.trace)
        self.cleanup.callback(engine.kill)
        return engine

    def drive_path(self, name: str) -> Path:
        return self.directory / f"{name}.img"

    def attach(self, *names: str, kind: str = "") -> None:
        """`kind`: of a test drive over the file, such as `lossy:`."""
        for name in names:
            path = self.drive_path(name)
            if not path.exists():
                with open(path, "wb") as drive:
                    drive.truncate(DRIVE_BYTES)
            self.engine.attach_drive(name, f"{kind}{path}")

    def make_export(
        self, level: str, members: int, size_bytes: int, integrity: bool = False
    ) -> Path:
        """An array of new drives, a volume on it, and its vhost-user socket."""
        names = [f"d{number}" for number in range(members)]
        self.attach(*names)
        self.engine.create_array("a", names, level=level, integrity=integrity)
        self.engine.create_volume("v", "a", size_bytes)
        socket = self.directory / "v.sock"
        self.engine.create_export("v", "v", socket)
        return socket

    def scribble(self, name: str, size_bytes: int) -> None:
        """Random bytes over the first data of a drive, behind the engine's back."""
        path = self.drive_path(name)
        areas = self.engine.show("inspect", str(path))["label"]["areas"]
        offset = next(area["offset"] for area in areas if area["name"] == "data")
        with open(path, "r+b", buffering=0) as drive:
            for at in range(offset, offset + size_bytes, 1 << 20):
                drive.seek(at)
                drive.write(os.urandom(1 << 20))
            os.fsync(drive.fileno())

    def boot(self, socket: Path, **options) -> Vm:
        image = guest_image.build(CACHE, lambda text: None)
        log = self.directory / "console.log"
        vm = Vm(image, [socket], memory="512M", log=log, **options)
        self.cleanup.callback(vm.close)
        return vm.start()

    def wait_state(self, wanted: str, seconds: float = 120) -> None:
        deadline = time.monotonic() + seconds
        while (state := self.engine.array_state("a")) != wanted:
            assert time.monotonic() < deadline, f"still {state}, not {wanted}, after {seconds} s"
            time.sleep(0.2)

    def wait_unused(self, export: str, seconds: float = 30) -> None:
        """Until the daemon has noticed that a client is gone."""
        deadline = time.monotonic() + seconds
        while (state := self.engine.show("export", "show", export)["state"]) != "listening":
            assert time.monotonic() < deadline, f"export {export} is {state} after {seconds} s"
            time.sleep(0.2)

    def wait_in_place(self, seconds: float = 60) -> None:
        """Until nothing that was acknowledged waits in the journal."""
        deadline = time.monotonic() + seconds
        while left := self.engine.show("array", "show", "a")["journal"]["used_bytes"]:
            assert time.monotonic() < deadline, f"{left} bytes are still in the journal"
            time.sleep(0.2)

    def scrub_is_clean(self) -> None:
        self.engine.ashlar("array", "scrub", "a", "--wait")
        report = self.engine.show("array", "show", "a")["scrub"]
        assert report["mismatched_stripes"] == 0, report
        assert report["unreadable_stripes"] == 0, report


@contextlib.contextmanager
def rig():
    """A started daemon in a directory of its own."""
    with contextlib.ExitStack() as cleanup:
        made = Rig(cleanup)
        made.engine.start()
        try:
            yield made
        except BaseException:
            # The directory is about to go: what it says is wanted now.
            print(made.log.read_text(errors="replace")[-4000:])
            raise
