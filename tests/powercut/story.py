"""The rounds: write, cut, restart, check.

Whatever is wrong ends the run: what led to it lies in the run's directory then.
"""

import hashlib
import os
import shutil
import subprocess
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path

from demo import postgres, vm
from demo.engine import Engine
from demo.guest_image import GuestImage
from demo.vm import QEMU, Vm
from tests.powercut.array import Array
from tests.powercut.plan import Heal, Loss, Round

MEMORY = "384M"
FIRST_WORD_SECONDS_MAX = 120


class Violation(Exception):
    """Something that was promised is not so."""


class Clock:
    """What a round's time went to."""

    def __init__(self):
        self.parts: dict[str, float] = {}
        self.begin = time.monotonic()

    @contextmanager
    def __call__(self, part: str):
        begin = time.monotonic()
        yield
        self.parts[part] = self.parts.get(part, 0) + time.monotonic() - begin

    @property
    def total(self) -> float:
        return time.monotonic() - self.begin

    def __str__(self) -> str:
        return " ".join(f"{part} {seconds:.1f}" for part, seconds in self.parts.items())


class Story:
    def __init__(
        self, binary: Path, image: GuestImage, accel: str, workload, work: Path, sockets: Path,
        cleanup: ExitStack, lie_in_round: int | None = None,
    ):  # fmt: skip
        self.binary = binary
        self.image = image
        self.accel = accel
        self.workload = workload
        self.lie_in_round = lie_in_round
        self.work = work
        self.sockets = sockets
        self.cleanup = cleanup
        self.trace = cleanup.enter_context(open(work / "commands.log", "w"))
        self.engine: Engine | None = None
        self.vm: Vm | None = None
        self.array: Array | None = None
        self.saved: Path | None = None
        self.kept = 0  # what was acknowledged, of all rounds

    # Guest

    def new_vm(self, saved: Path | None) -> Vm:
        vm = Vm(
            self.image, memory=MEMORY, accel=self.accel, log=self.work / "console.log", slots=1,
            saved=saved, qemu_options=self.workload.guest_options(self.work),
        )  # fmt: skip
        self.cleanup.callback(vm.close)
        return vm

    def save_guest(self, cache: Path) -> str:
        """Boots, prepares and saves the guest that each round starts from, if it is not there."""
        self.saved = cache / f"guest-{self.workload.name}-{self.guest_key()}"
        if self.saved.exists():
            return "from the cache"
        for stale in cache.glob(f"guest-{self.workload.name}-*"):
            stale.unlink()
        clock = Clock()
        draft = self.work / "guest.saved"
        guest = self.new_vm(None)
        with clock("boot"):
            guest.start()
        with clock("prepare"):
            self.workload.prepare_guest(guest)
        with clock("save"):
            guest.save(draft)
        draft.rename(self.saved)
        return f"{clock}, {self.saved.stat().st_size >> 20} MiB"

    def guest_key(self) -> str:
        """Changes with anything that decides what a saved guest is."""
        version = subprocess.run([QEMU, "--version"], capture_output=True, text=True).stdout
        host = f"{self.image.key} {self.accel} {os.uname().release} {version}"
        key = hashlib.sha256(host.encode())
        own = sorted(Path(__file__).parent.glob("*.py"))
        for source in [*own, Path(vm.__file__), Path(postgres.__file__)]:
            key.update(source.read_bytes())
        return key.hexdigest()[:12]

    def start_guest(self, clock: Clock) -> None:
        with clock("restore"):
            self.vm = self.new_vm(self.saved).start()

    def plug(self, clock: Clock) -> str:
        with clock("plug"):
            # The saved guest believes that it is still then, and its random numbers repeat.
            now = f"date -s @{int(time.time())} >/dev/null; echo {time.time_ns()} >/dev/urandom"
            self.vm.check(now)
            return self.vm.plug(0, self.array.socket)

    # A round

    def play(self, plan: Round, following: Round) -> str:
        """One line about what was done and found."""
        clock = Clock()
        if plan.new_series:
            self.begin_series(plan, clock)
        before = self.workload.said
        story = self.write_and_cut(plan, clock)
        committed = self.workload.said - before
        self.kept += committed
        self.restart(plan, clock, following.full_page_writes)
        self.check(clock)
        self.heal(plan, clock)
        fpw = "on " if plan.full_page_writes else "off"
        return (
            f"{plan.kind}, pages {fpw}, {story}: {committed} {self.workload.unit} kept"
            f" | {clock.total:.1f} s: {clock}"
        )

    def begin_series(self, plan: Round, clock: Clock) -> None:
        """A new array with a new file system."""
        self.end_series()
        self.series = self.work / f"series-{plan.number}"
        self.series.mkdir()
        with clock("create"):
            self.engine = Engine(
                self.binary, self.series / "state", self.sockets / "api.sock", "0",
                self.work / "ashlar.log", self.trace,
            )  # fmt: skip
            self.cleanup.callback(self.engine.kill)
            self.engine.start()
            disk = self.sockets / "disk.sock"
            self.array = Array(self.engine, plan.kind, self.series, disk)
        self.start_guest(clock)
        disk = self.plug(clock)
        with clock("mkfs"):
            self.workload.create(self.vm, disk)
        with clock("start"):
            self.workload.start(self.vm, plan.full_page_writes)

    def end_series(self) -> None:
        if self.array:
            self.vm.kill()
            self.engine.kill()
            shutil.rmtree(self.series)

    def write_and_cut(self, plan: Round, clock: Clock) -> str:
        """What happened to the drives, in words."""
        events = [] if self.array.is_whole() else ["degraded"]
        member = self.array.may_lose(plan.member) if plan.loss != Loss.NONE else None
        if member:
            events.append(f"{member['drive']} {plan.loss.value}")
        if member and plan.loss == Loss.BEFORE:
            self.array.pull(member)
        with clock("begin"):
            before = self.workload.said
            self.workload.write(self.vm)
            self.wait_first_word(before)
        with clock("write"):
            if member and plan.loss == Loss.DURING:
                time.sleep(plan.write_seconds * plan.pull_at)
                self.array.pull(member)
                time.sleep(plan.write_seconds * (1 - plan.pull_at))
            else:
                time.sleep(plan.write_seconds)
            self.cut(plan)
        if member and plan.loss == Loss.WITH_CUT:
            self.array.lose(member)
        return ", ".join(events) or "optimal"

    def wait_first_word(self, before: int) -> None:
        deadline = time.monotonic() + FIRST_WORD_SECONDS_MAX
        while self.workload.said == before:
            if time.monotonic() > deadline or self.workload.odd:
                raise Violation(f"nothing is written: {self.workload.odd}")
            time.sleep(0.02)

    def cut(self, plan: Round) -> None:
        odd = list(self.workload.odd)
        for dead in [self.vm, self.engine] if plan.guest_first else [self.engine, self.vm]:
            dead.kill()
        self.workload.wait_end()
        if odd:
            raise Violation("the guest complained before the cut: " + "; ".join(odd[:5]))

    def restart(self, plan: Round, clock: Clock, full_page_writes: bool) -> None:
        kept = self.work / "at-the-cut"
        if plan.number == self.lie_in_round:
            shutil.rmtree(self.series)
            kept.rename(self.series)  # all drives forget what they flushed since the cut before
        with clock("keep"):
            self.array.keep(kept)
        if plan.early_cut_seconds is not None:
            with clock("early cut"):
                self.engine.spawn()
                time.sleep(plan.early_cut_seconds)
                self.engine.must_run()
                self.engine.kill()
        self.engine.spawn()
        self.start_guest(clock)
        with clock("daemon"):
            self.engine.wait_ready()
        if self.array.is_whole():  # nothing can be verified without the redundancy
            self.array.begin_scrub()
        disk = self.plug(clock)
        with clock("mount"):
            self.workload.recover(self.vm, disk)
        with clock("start"):
            self.workload.start(self.vm, full_page_writes)

    def check(self, clock: Clock) -> None:
        with clock("check"):
            wrong = self.workload.wrong(self.vm)
        with clock("deep"):
            wrong += self.workload.deep_wrong(self.vm)
        with clock("scrub"):
            if self.array.scrub:
                wrong += self.array.finish_scrub()
            wrong += self.array.wrong()
        if wrong:
            raise Violation("\n".join(wrong))

    def heal(self, plan: Round, clock: Clock) -> None:
        if plan.heal == Heal.LATER or self.array.is_whole():
            return
        with clock("rebuild"):
            self.array.heal(plan.same_drive)
            if plan.heal == Heal.NOW:
                self.array.finish_rebuild()
        if plan.heal == Heal.NOW:
            with clock("scrub"):
                self.array.begin_scrub()
                wrong = self.array.finish_scrub() + self.array.wrong()
            if wrong:
                raise Violation("\n".join(wrong))
