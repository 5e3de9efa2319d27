"""Everything that the demo asks of Ashlar, through its command line only.

Invariant: when `stop` or `kill` is over, the daemon is gone.
"""

import json
import subprocess
import time
from pathlib import Path

from demo import child

START_SECONDS_MAX = 30
STOP_SECONDS_MAX = 60
COMMAND_SECONDS_MAX = 120
STATE_SECONDS_MAX = 30


class EngineError(Exception):
    """The daemon or a command of it failed; the message is what it said."""


class Engine:
    def __init__(
        self,
        binary: Path,
        directory: Path,
        socket: Path,
        cores: str,
        log: Path,
        trace,
        options: list[str] = (),  # of the daemon
    ):
        self.binary = binary
        self.directory = directory
        self.socket = socket
        self.cores = cores
        self.log = log
        self.trace = trace  # where each command and its answer is written down
        self.options = list(options)
        self.daemon: subprocess.Popen | None = None

    # The daemon

    def start(self) -> None:
        self.spawn()
        self.wait_ready()

    def spawn(self) -> None:
        command = [
            str(self.binary), "serve", "--state", str(self.directory), "--socket", str(self.socket),
            "--cores", self.cores, *self.options,
        ]  # fmt: skip
        with open(self.log, "ab") as log:
            self.daemon = child.start(command, stdout=log, stderr=log)

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            self.must_run()
            try:
                self.ashlar("status")
                return
            except EngineError as error:
                if time.monotonic() > deadline:
                    raise EngineError(
                        f"the daemon does not answer: {error}\n{self.log_end()}"
                    ) from None
            time.sleep(0.1)

    def must_run(self) -> None:
        if self.daemon.poll() is not None:
            status = self.daemon.returncode
            raise EngineError(
                f"the daemon ended with status {status}; its log ends:\n{self.log_end()}"
            )

    def stop(self) -> None:
        """SIGTERM, which drains; a daemon that does not end with status 0 is an error."""
        if self.daemon is None:
            return
        by_itself = child.stop(self.daemon, STOP_SECONDS_MAX)
        status, self.daemon = self.daemon.returncode, None
        if not by_itself:
            raise EngineError(
                f"the daemon did not stop within {STOP_SECONDS_MAX} s of SIGTERM: {self.log}"
            )
        if status != 0:
            raise EngineError(f"the daemon ended with status {status}:\n{self.log_end()}")

    def kill(self) -> None:
        if self.daemon is not None:
            child.kill(self.daemon)
            self.daemon = None

    def log_end(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-12:])

    # Commands

    def ashlar(self, *words: str, timeout: float = COMMAND_SECONDS_MAX) -> str:
        command = [str(self.binary), "--socket", str(self.socket), *words]
        print(f"$ ashlar {' '.join(words)}", file=self.trace, flush=True)
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            raise EngineError(f"`ashlar {' '.join(words)}` took over {timeout} s") from None
        print(done.stdout + done.stderr, file=self.trace, flush=True)
        if done.returncode != 0:
            said = (done.stderr or done.stdout).strip()
            raise EngineError(f"`ashlar {' '.join(words)}` failed: {said or done.returncode}")
        return done.stdout

    def show(self, *words: str):
        return json.loads(self.ashlar(*words, "-o", "json"))

    def attach_drive(self, name: str, path: Path | str, force: bool = False) -> None:
        self.ashlar("drive", "attach", str(path), "--name", name, *(["--force"] if force else []))

    def pull_drive(self, name: str) -> None:
        """As if a hand had pulled it: the array is not asked first."""
        self.ashlar("drive", "detach", name, "--force")

    def create_array(
        self,
        name: str,
        drives: list[str],
        level: str = "5",
        chunk: str = "64K",
        force: bool = False,
        integrity: bool = False,
        policy: str | None = None,
    ) -> None:
        words = ["--level", level, "--drives", ",".join(drives), "--chunk", chunk]
        words += ["--policy", policy] if policy else []
        words += ["--force"] * force + ["--integrity"] * integrity
        self.ashlar("array", "create", name, *words)

    def create_volume(self, name: str, array: str, size_bytes: int) -> None:
        self.ashlar("volume", "create", name, "--array", array, "--size", f"{size_bytes >> 20}M")

    def create_export(self, name: str, volume: str, path: Path) -> None:
        self.ashlar("export", "create", name, "--volume", volume, "--path", str(path))

    def replace_drive(self, array: str, old: str, new: str, force: bool = False) -> None:
        words = ["--old", old, "--new", new, *(["--force"] if force else [])]
        self.ashlar("array", "replace", array, *words)

    def array_state(self, name: str) -> str:
        """One word: optimal, degraded, failed, stopped or unavailable."""
        return self.show("array", "show", name)["state"]

    def array_requests(self, name: str) -> int:
        """Reads and writes that it has served since it was started."""
        counters = self.show("array", "show", name)["counters"]
        return counters["reads"] + counters["writes"]

    def wait_state(self, array: str, unlike: str) -> str:
        """The array's state once it is no longer `unlike`."""
        deadline = time.monotonic() + STATE_SECONDS_MAX
        while (state := self.array_state(array)) == unlike:
            if time.monotonic() > deadline:
                raise EngineError(f"the array is still {unlike} after {STATE_SECONDS_MAX} s")
            time.sleep(0.2)
        return state

    def rebuild(self, array: str, seconds: float) -> None:
        """Waits to the end of the rebuild; on a terminal `ashlar` draws its own bar."""
        self.wait_for("array", "rebuild", array, "--wait", seconds=seconds)

    def scrub(self, array: str, seconds: float) -> None:
        self.wait_for("array", "scrub", array, "--wait", seconds=seconds)

    def wait_for(self, *words: str, seconds: float) -> None:
        """A command that shows its progress on our terminal until it is done."""
        print(f"$ ashlar {' '.join(words)}", file=self.trace, flush=True)
        command = [str(self.binary), "--socket", str(self.socket), *words]
        try:
            done = child.run(command, seconds)
        except subprocess.TimeoutExpired:
            raise EngineError(f"`ashlar {' '.join(words)}` took over {seconds} s") from None
        print(done.stdout, file=self.trace, flush=True)
        if done.returncode != 0:
            raise EngineError(
                f"`ashlar {' '.join(words)}` failed: {done.stdout.strip() or self.log_end()}"
            )
