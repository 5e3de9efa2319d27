"""The story, from top to bottom: a database on a RAID 5 loses a drive under load and nothing else.

Nothing is left behind, however it ends: daemon and guest are children that cannot outlive us, their
files are in directories that are removed on the way out. Only the log stays.
"""

import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

from demo import drives, guest_image, settings, vm
from demo.engine import Engine, EngineError
from demo.pgbench import Result, Run
from demo.postgres import Postgres
from demo.screen import Screen, clock, table
from demo.settings import MEMBERS, Refusal, Settings

ARRAY = "demo"
VOLUME = "pg"
PULLED = 2  # any member will do
SCALE = {"tcg": 20, "kvm": 50}  # 15 MB each: more than the guest's memory holds where that is quick
FIXED_SECONDS = 90  # everything but the five pgbench runs, as it was under emulation on two cores
LOAD_SECONDS = 600
REBUILD_SECONDS = 7 * 24 * 3600  # a large real drive takes its time
CHECK_SECONDS = 1200
LOGS_KEPT = 5
HEADER = ["pgbench", "array", "tps", "mean ms", "p99 ms", "array IOPS"]


def main() -> int:
    try:
        for end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(end, interrupted)
        return run_demo(settings.from_environment())
    except Refusal as refusal:
        print(f"demo: {refusal}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ndemo: stopped; nothing is left running", file=sys.stderr)
        return 130
    except (guest_image.BuildError, vm.VmError, EngineError) as error:
        print(f"demo: {error}", file=sys.stderr)
    return 1


def interrupted(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run_demo(chosen: Settings) -> int:
    chosen.cache.mkdir(parents=True, exist_ok=True)
    with ExitStack() as cleanup:
        lock = cleanup.enter_context(open(chosen.cache / "demo.lock", "w"))
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Refusal(
                f"another demo runs in {chosen.cache}: wait, or set ASHLAR_CACHE"
            ) from None
        settings.check_disk(chosen)
        real_drives = drives.real(chosen)
        logs = fresh_log_directory(chosen.cache / "demo")
        work = logs / "work"
        work.mkdir()
        cleanup.callback(shutil.rmtree, work, ignore_errors=True)
        taken = real_drives or drives.make_files(chosen, work)
        # sockets have short names; paths under a checkout may be too long for them
        sockets = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ashlar-demo-")))
        log = cleanup.enter_context(open(logs / "demo.log", "w"))
        screen = Screen(log, FIXED_SECONDS + 5 * chosen.seconds)
        try:
            return Story(chosen, taken, screen, logs, work, sockets, cleanup).tell()
        except BaseException as error:
            print(f"\n{type(error).__name__}: {error}", file=log)
            print(f"\nthe log is in {logs}", file=sys.stderr)
            raise


def fresh_log_directory(home: Path) -> Path:
    """Named after the time; the oldest go, and with them what a killed demo could not remove."""
    home.mkdir(exist_ok=True)
    for work in home.glob("*/work"):
        shutil.rmtree(work)
    for old in sorted(home.iterdir())[: 1 - LOGS_KEPT]:
        shutil.rmtree(old)
    logs = home / f"{time.strftime('%Y-%m-%d-%H%M%S')}-{os.getpid()}"
    logs.mkdir()
    return logs


class Story:
    """One demo. Each method is a chapter; what later chapters need is in the fields."""

    def __init__(
        self, chosen: Settings, taken: list[drives.Drive], screen: Screen, logs: Path, work: Path,
        sockets: Path, cleanup: ExitStack,
    ):  # fmt: skip
        self.chosen = chosen
        self.drives = taken
        self.screen = screen
        self.logs = logs
        self.disk_socket = sockets / "disk.sock"
        self.cleanup = cleanup
        self.engine = Engine(
            chosen.binary,
            work / "state",
            sockets / "api.sock",
            chosen.cores,
            logs / "ashlar.log",
            screen.log,
        )
        self.rows: list[list[str]] = []
        self.updates: dict[str, int] = {}
        self.failed: list[str] = []

    def tell(self) -> int:
        self.screen.say(
            "PostgreSQL in a virtual machine, its data on an Ashlar RAID 5 of "
            f"{MEMBERS} drives; takes about {clock(self.screen.seconds_expected)}"
        )
        self.prepare_guest()
        self.make_volume()
        self.boot()
        self.make_database()
        self.bench("select-only")
        self.bench("simple-update")
        self.bench("tpcb-like")
        self.bench("tpcb-like", self.pull, f"{self.drives[PULLED].name} is pulled half-way")
        self.bench("select-only")
        self.rebuild()
        self.check_data()
        self.end()
        return self.report()

    def prepare_guest(self) -> None:
        with self.screen.step("guest: Debian 12, PostgreSQL 15", 40) as step:
            step.note = "from the cache"
            self.image = guest_image.build(
                self.chosen.cache, lambda text: setattr(step, "note", text)
            )
        with self.screen.step("does KVM boot it?", 5) as step:
            self.accel = vm.working_accel(self.image)
            step.note = {"kvm": "yes", "tcg": "no: software emulation, which is slow"}.get(
                self.accel, ""
            )

    def make_volume(self) -> None:
        size = settings.volume_bytes(min(drive.bytes for drive in self.drives))
        with self.screen.step(f"RAID 5 (4+1, 64 KiB chunk), volume {size >> 20} MiB", 3) as step:
            self.cleanup.callback(self.engine.kill)
            self.engine.start()
            for drive in self.drives[:MEMBERS]:
                self.engine.attach_drive(drive.name, drive.path, self.chosen.force)
            names = [drive.name for drive in self.drives[:MEMBERS]]
            self.engine.create_array(ARRAY, names, force=self.chosen.force)
            self.engine.create_volume(VOLUME, ARRAY, size)
            self.engine.create_export(VOLUME, VOLUME, self.disk_socket)
            step.note = self.engine.array_state(ARRAY)

    def boot(self) -> None:
        with self.screen.step("virtual machine boots", 5) as step:
            self.vm = vm.Vm(
                self.image,
                vhost_sockets=[self.disk_socket],
                memory=self.chosen.guest_memory,
                cpus=self.chosen.cpus,
                accel=self.accel,
                log=self.logs / "console.log",
            )
            self.cleanup.callback(self.vm.close)
            self.vm.start()
            cache = self.vm.check("cat /sys/block/vda/queue/write_cache").strip()
            step.note = f"disk with {cache} cache"

    def make_database(self) -> None:
        scale = self.chosen.scale or SCALE.get(self.accel, SCALE["tcg"])
        self.postgres = Postgres(self.vm)
        with self.screen.step("XFS, PostgreSQL 15 with data checksums", 10):
            self.postgres.create()
        with self.screen.step(f"pgbench fills {scale * 100_000:,} accounts", 25) as step:
            self.postgres.load(scale, lambda line: setattr(step, "note", line[-60:]), LOAD_SECONDS)
            step.note = ""

    def bench(self, script: str, meanwhile=None, what: str = "") -> None:
        """A row of the table. `meanwhile` is called when half of the run is over."""
        before = self.engine.array_state(ARRAY)
        if script == "select-only":
            self.postgres.restart_cold()  # so that the healthy and the degraded run begin alike
        name = f"pgbench {script}, {what or 'array ' + before}"
        with self.screen.step(name, self.chosen.seconds) as step:
            requests = self.engine.array_requests(ARRAY)
            run = self.start_bench(script, step)
            if meanwhile:
                time.sleep(self.chosen.seconds / 2)
                meanwhile()
            result = self.finish_bench(run)
            requests = self.engine.array_requests(ARRAY) - requests
            after = self.engine.array_state(ARRAY)
            step.note = f"{result.tps:,.0f} tps"
        self.note(result, before if after == before else f"{before} → {after}", requests)

    def pull(self) -> None:
        self.engine.pull_drive(self.drives[PULLED].name)
        self.engine.wait_state(ARRAY, unlike="optimal")

    def start_bench(self, script: str, step) -> Run:
        return Run(
            self.vm, script, self.chosen.clients, self.chosen.seconds,
            lambda tps: setattr(step, "note", f"{tps:,.0f} tps"),
        )  # fmt: skip

    def finish_bench(self, run: Run) -> Result:
        """Without its daemon the guest would wait for its disk, and we for the guest."""
        while run.running:
            self.engine.must_run()
            time.sleep(0.2)
        return run.finish()

    def note(self, result: Result, state: str, requests: int) -> None:
        self.rows.append([
            result.script, state, f"{result.tps:,.0f}", f"{result.latency_ms_mean:.1f}",
            f"{result.latency_ms_p99:.1f}", f"{requests / result.seconds:,.0f}",
        ])  # fmt: skip
        if result.script != "select-only":
            self.updates[result.script] = self.updates.get(result.script, 0) + result.transactions

    def rebuild(self) -> None:
        old, new = self.drives[PULLED].name, self.drives[MEMBERS]
        with self.screen.step(f"{new.name} replaces {old}, rebuild", bar=False) as step:
            self.engine.attach_drive(new.name, new.path, self.chosen.force)
            self.engine.replace_drive(ARRAY, old, new.name, self.chosen.force)
            self.engine.rebuild(ARRAY, REBUILD_SECONDS)
            state = self.engine.array_state(ARRAY)
            step.note = f"array {state}"
        self.expect(state == "optimal", f"the array is {state} after the rebuild")

    def check_data(self) -> None:
        """Read cold, so from the array: by indexes, by sums, by checksums, and by parity."""
        with self.screen.step("check: pg_amcheck", 10):
            self.postgres.restart_cold()
            self.postgres.amcheck(CHECK_SECONDS)
        with self.screen.step("check: balances against the history", 3) as step:
            accounts, branches, tellers, history, rows = self.postgres.balances()
            step.note = f"{rows:,} updates, sum {history:,}"
            self.expect(
                accounts == history, f"accounts hold {accounts:,} and the history {history:,}"
            )
            self.expect(branches == tellers, f"branches hold {branches:,} and tellers {tellers:,}")
            confirmed = sum(self.updates.values())
            self.expect(
                rows == confirmed, f"{confirmed:,} updates were confirmed and {rows:,} are there"
            )
        with self.screen.step("check: data checksums", 4):
            self.postgres.stop()
            self.postgres.checksums(CHECK_SECONDS)
        with self.screen.step("check: scrub, each stripe against its parity", bar=False):
            self.engine.scrub(ARRAY, REBUILD_SECONDS)

    def expect(self, true: bool, otherwise: str) -> None:
        if not true:
            self.failed.append(otherwise)

    def end(self) -> None:
        with self.screen.step("guest and daemon stop", 3):
            self.vm.shutdown()
            self.engine.stop()

    def report(self) -> int:
        self.screen.say("\n" + table(HEADER, self.rows) + "\n")
        if self.accel != "kvm":
            self.screen.say(
                "The guest ran under software emulation: that limits these figures, not the array."
            )
        for failure in self.failed:
            self.screen.say(f"FAILED: {failure}")
        if not self.failed:
            self.screen.say(
                "A drive was lost under load and replaced. All data is there and correct."
            )
        self.screen.say(f"Log: {self.logs}")
        return 1 if self.failed else 0
