"""The command: its options, its lines, its end.

Exit status: 0 nothing was lost, 1 a violation or a failure, 2 usage, 130 interrupted. After a
violation the run's directory stays and is named; otherwise nothing is left behind.
"""

import argparse
import json
import resource
import secrets
import shutil
import signal
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

from demo import guest_image, vm
from demo.engine import EngineError
from demo.screen import clock as minutes
from tests.powercut.database import Database
from tests.powercut.plan import ATOMIC_KINDS, KINDS, rounds
from tests.powercut.raw import Raw
from tests.powercut.story import Story, Violation
from tests.rig import BINARY, CACHE

LINES_SHOWN = 12  # of a violation
LIE = "the drives forget what they flushed in this round (from 2 on): shows that it would be seen"


def main() -> int:
    parser = argparse.ArgumentParser(prog="cargo xtask powercut", description=__doc__)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seed", type=int, help="left out: by chance")
    parser.add_argument("--raw", action="store_true", help="numbered blocks and no database")
    parser.add_argument("--lie-in-round", type=int, metavar="N", help=LIE)
    chosen = parser.parse_args()
    if chosen.rounds < 1:
        parser.error("--rounds must be 1 or more")
    seed = secrets.randbelow(1_000_000) if chosen.seed is None else chosen.seed
    for end in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(end, interrupted)
    home = CACHE / "powercut"
    home.mkdir(parents=True, exist_ok=True)
    work = home / f"{time.strftime('%Y-%m-%d-%H%M%S')}-seed-{seed}"
    try:
        with ExitStack() as cleanup:
            work.mkdir()
            run(chosen, seed, work, cleanup)
        shutil.rmtree(work)
        return 0
    except KeyboardInterrupt:
        shutil.rmtree(work, ignore_errors=True)
        print("\npowercut: stopped; nothing is left behind", file=sys.stderr)
        return 130
    except Violation as violation:
        (work / "violation.txt").write_text(f"{violation}\n")
        lines = str(violation).splitlines()
        first = "\n".join(lines[:LINES_SHOWN])
        print(f"\npowercut: VIOLATION, {len(lines)} lines\n{first}", file=sys.stderr)
    except (guest_image.BuildError, vm.VmError, EngineError) as error:
        print(f"\npowercut: {type(error).__name__}: {error}", file=sys.stderr)
    except Exception:
        traceback.print_exc()
    kind = " --raw" if chosen.raw else ""
    print(
        f"the evidence is in {work}: drives and state as the cut left them in at-the-cut, and as "
        f"they are now in series-*; violation.txt, plan.json, ashlar.log, commands.log, "
        f"console.log\n"
        f"again: cargo xtask powercut --rounds {chosen.rounds} --seed {seed}{kind}",
        file=sys.stderr,
    )
    return 1


def interrupted(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


def run(chosen: argparse.Namespace, seed: int, work: Path, cleanup: ExitStack) -> None:
    # sockets have short names; paths under a checkout may be too long for them
    sockets = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="ashlar-powercut-")))
    image = guest_image.build(CACHE, print)
    accel = vm.working_accel(image, print)
    workload = Raw(seed) if chosen.raw else Database(seed)
    lie = None if chosen.lie_in_round is None else chosen.lie_in_round - 1
    story = Story(BINARY, image, accel, workload, work, sockets, cleanup, lie)
    print(f"{workload.name}, {chosen.rounds} rounds, seed {seed}, accel {accel}", flush=True)
    print(f"guest: {story.save_guest(work.parent)}", flush=True)
    begin = time.monotonic()
    kinds = ATOMIC_KINDS if chosen.raw else KINDS
    plans = rounds(seed, chosen.rounds + 1, kinds)
    for plan, following in pairwise(plans):
        with open(work / "plan.json", "a") as file:
            print(json.dumps(asdict(plan), default=lambda kind: kind.value), file=file)
        line = story.play(plan, following)
        done = plan.number + 1
        passed = time.monotonic() - begin
        left = passed / done * (chosen.rounds - done)
        print(f"{done:3}/{chosen.rounds} {line} | {minutes(left)} to go", flush=True)
    took = time.monotonic() - begin
    # What it would take at least where nothing else runs.
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = (used.ru_utime + used.ru_stime) / chosen.rounds
    print(
        f"{chosen.rounds} power cuts, {story.kept} {workload.unit}, nothing lost; "
        f"{minutes(took)}, {took / chosen.rounds:.1f} s a round, {cpu:.1f} s of a CPU"
    )
