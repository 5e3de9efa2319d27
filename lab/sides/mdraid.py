"""mdraid: the kernel's own RAID, made with mdadm, on the host or in a guest.

It shall be a fair md. Where the kernel's documentation (Documentation/admin-guide/md.rst) and md(4)
give a default and a range, and the default is of the days of one core and rotating drives, it gets
more, and the report says so:

- the write-intent bitmap is on, as mdadm makes it for large arrays: without one, a crash means to
  resync the whole array; a study may switch it off, or have a partial parity log instead
  (`policy = "ppl"`, Documentation/driver-api/md/raid5-ppl.rst), which closes the write hole;
- `group_thread_cnt`: a thread for each CPU, eight at most. The default, 0, has one thread work out
  the parity of all;
- `stripe_cache_size`: 4096 pages of each drive and not 256, or less where that were more than a
  twentieth of the memory (md(4): page size x drives x this many bytes).
"""

import math
import re
import secrets
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from lab import place as places
from lab import states
from lab import study as studies
from lab.place import Place
from lab.side import RESYNC_ALL, RESYNC_DIRTY, Counters, Disk, Drive, Protection, SideError
from lab.sides.blocks import Blocks, drives_of_model
from lab.study import State

LEVELS = {0: "0", 1: "5", 2: "6"}  # by parities
MODULES = {"0": "raid0", "1": "raid1", "5": "raid456", "6": "raid456", "10": "raid10"}
WRITE_HOLE = {"ppl": "closed", "bitmap": RESYNC_DIRTY, "resync": RESYNC_ALL}
WITH_STRIPE_CACHE = ("5", "6")
FIRST_NUMBER = 100  # of the devices: those below may be somebody's
THREADS_MAX = 8
STRIPE_CACHE = 4096
STRIPE_CACHE_SHARE = 20  # one part in so many of the memory, at most
STRIPE_CACHE_MIN, STRIPE_CACHE_MAX = 256, 32768
PAGE_BYTES = 4096
MIB = 1 << 20
LABEL_BYTES = 8 * MIB  # superblock and bitmap; beside these a thousandth of the drive
CREATE_SECONDS_MAX = 300
RESYNC_SECONDS_MAX = 24 * 3600
ZEROED = ("file", "nvme")  # kinds of drives that come with nothing but zeroes


class Mdraid:
    called = "md"
    pulls_live = True

    def __init__(self, chosen: studies.Side, study: studies.Study, place: Place, work: Path):
        self.chosen, self.study, self.place = chosen, study, place
        self.name = chosen.name
        self.level = level(study.array)
        self.consistency = (
            "ppl" if chosen.policy == "ppl" else "bitmap" if chosen.bitmap else "resync"
        )
        hole = WRITE_HOLE[self.consistency] if study.array.losses else "none"
        self.protection = Protection(study.array.losses, hole)
        self.cleanup = ExitStack()
        self.blocks = Blocks(place, self.cleanup)
        self.members: list[list[Drive]] = []
        self.spares: list[Drive] = []
        self.arrays: list[str] = []  # names of block devices
        self.lost: Counter[int] = Counter()  # by array, drives that are out
        self.commands: list[str] = []
        self.tuned: dict[str, int] = {}

    def missing(self) -> str | None:
        if self.level is None:
            parity = self.study.array.parity
            return f"md has no RAID with {parity} parities, but of 2 at most: leave it out"
        policies = (None, "ppl") if self.level == "5" else (None,)
        if self.chosen.policy not in policies:
            return f"md of level {self.level} has no policy {self.chosen.policy}: say none of it"
        if why := drives_of_model(self.study):
            return why
        if self.place.run("[ $(id -u) = 0 ]").rc:
            return "making arrays needs root: run it with sudo"
        module = MODULES[self.level]
        there = f"[ -e /proc/mdstat ] && grep -qw raid{self.level} /proc/mdstat"
        if self.place.run(f"{there} || modprobe -q {module} && [ -e /proc/mdstat ]").rc:
            return (
                f"this kernel has no md of level {self.level} (modprobe {module} fails): boot one "
                'that has, or compare in a guest (--where guest), or leave the side out'
            )
        if places.programs_missing(self.place, "mdadm"):
            return "mdadm is missing: apt-get install mdadm"
        return None

    def capacity_bytes(self, drives: list[Drive]) -> int:
        smallest = min(drive.bytes for drive in drives)
        whole = self.study.array.data * (smallest - smallest // 1000 - LABEL_BYTES)
        of_each = -(-self.study.disks // self.study.array.count)
        if of_each == 1:
            return whole
        # before each partition, and after the last, where the table is once more
        return whole - (of_each + 1) * alignment(self.study.array)

    def start(
        self, drives: list[list[Drive]], spares: list[Drive], disk_bytes: list[int]
    ) -> list[Disk]:
        if why := self.missing():
            raise SideError(f"{self.name}: {why}")
        self.members, self.spares = [list(members) for members in drives], list(spares)
        # What is made last goes first: no loop device goes before the array that holds it.
        for drive in [*(drive for members in self.members for drive in members), *self.spares]:
            self.blocks.device(drive)
        for members in self.members:
            self.make(members)
        self.wait_whole()
        return disks(self.arrays, disk_bytes, alignment(self.study.array), self.told)

    def make(self, members: list[Drive]) -> None:
        taken = self.place.check("ls /sys/block").split()
        names = (f"md{number}" for number in range(FIRST_NUMBER, 512))
        name = next(name for name in names if name not in taken)
        devices = [self.blocks.device(drive) for drive in members]
        uuid = new_uuid()
        places.owe(self.place, "md", uuid)
        self.cleanup.callback(self.end, name, uuid)
        self.arrays.append(name)
        self.told(
            create(f"/dev/{name}", uuid, self.level, self.study.array, self.consistency, devices,
                   zeroed=self.study.drives.kind in ZEROED),
            timeout=CREATE_SECONDS_MAX,
        )  # fmt: skip
        if self.level in WITH_STRIPE_CACHE:
            self.tune(name)

    def tune(self, name: str) -> None:
        said = self.place.check("nproc; grep ^MemTotal /proc/meminfo").split()
        cpus, memory_kib = said[0], said[2]
        threads, pages = tuning(int(cpus), int(memory_kib) << 10, self.study.array.members)
        if self.chosen.group_thread_cnt is not None:
            threads = self.chosen.group_thread_cnt
        wanted = {
            "group_thread_cnt": threads,
            "stripe_cache_size": self.chosen.stripe_cache_size or pages,
        }
        for setting, value in wanted.items():
            self.told(f"echo {value} >/sys/block/{name}/md/{setting}")
            self.tuned[setting] = int(self.place.check(f"cat /sys/block/{name}/md/{setting}"))

    def told(self, command: str, timeout: float = 60) -> str:
        self.commands.append(command)
        return self.place.check(command, timeout)

    def wait_whole(self) -> None:
        """The kernel says when a first resync is over."""
        for name in self.arrays:
            self.place.check(f"mdadm --wait /dev/{name} || true", timeout=RESYNC_SECONDS_MAX)
            if (state := self.state_of(name)) != State.HEALTHY:
                raise SideError(f"{name} of {self.name} did not become whole: it is {state}")

    # Drives

    def pull(self, array: int, member: int) -> None:
        """After a hand has taken it, md is told as Debian's udev rule does (mdadm -If): it may have
        nothing to write, and then has not noticed."""
        name, device = self.arrays[array], self.blocks.device(self.members[array][member])
        if self.place.unplug(device):
            self.told(f"mdadm -If {Path(device).name} || true")
        else:
            self.told(f"mdadm /dev/{name} --fail {device}")
            self.told(
                f"tries=100; until mdadm /dev/{name} --remove {device}; do "
                "tries=$((tries - 1)); [ $tries -gt 0 ] || exit 1; sleep 0.1; done"
            )
        self.lost[array] += 1
        if (out := drives_out(self.told_of(name))) < self.lost[array]:
            raise SideError(
                f"{name} lost {device}, and has noticed {out} of {self.lost[array]} that are out"
            )

    def replace(self, array: int, member: int) -> None:
        new, old = self.spares.pop(0), self.members[array][member]
        device = self.blocks.device(new)
        self.told(f"mdadm --zero-superblock --force {device} 2>/dev/null || true")
        self.told(f"mdadm /dev/{self.arrays[array]} --add {device}")
        self.members[array][member] = new
        self.lost[array] -= 1
        # It comes back by another name, perhaps.
        again = replace(old, path=self.place.plug(self.blocks.device(old)))
        self.blocks.devices.update({old.name: again.path} if again.path != old.path else {})
        self.spares.append(again)

    def states(self) -> list[str]:
        return list(map(self.state_of, self.arrays))

    def state_of(self, name: str) -> str:
        if self.level == "0":
            return state(self.place.check(f"cat /sys/block/{name}/md/array_state"), 0)
        return state(self.told_of(name), self.study.array.losses)

    def told_of(self, name: str) -> str:
        """How far it is comes first: what is over by the next line is not told as 0 %."""
        at = f"/sys/block/{name}/md"
        files = f"{at}/array_state {at}/degraded {at}/sync_action {at}/sync_completed"
        told = f"told=$(sed -n '/^{name} :/,/^ *$/p' /proc/mdstat)"
        return self.place.check(f'{told}; cat {files}; echo "$told"')

    def rebuild_error(self) -> str | None:
        return None

    def counters(self) -> Counters | None:
        return self.blocks.counts([f"/dev/{name}" for name in self.arrays])

    def pids(self) -> list[int]:
        return []  # threads of the kernel

    def logs(self) -> list[str]:
        return []  # what the kernel says is no side's own

    def settings(self) -> dict[str, str]:
        version = self.place.run("mdadm --version 2>&1").text.strip()
        commands = {"commands": "\n".join(dict.fromkeys(self.commands))}
        if self.level == "0":  # nothing to resync, nor to rebuild
            return {"version": version, "level": self.level, **commands}
        zeroed = self.study.drives.kind in ZEROED
        first = "left out (--assume-clean): the drives held zeroes alone, which agree"
        return {
            "version": version,
            "level": self.level or "",
            "consistency policy, as the kernel has it": self.place.run(
                f"cat /sys/block/{self.arrays[0]}/md/consistency_policy"
            ).text.strip(),
            **{name: str(value) for name, value in self.tuned.items()},
            "first resync": first if zeroed else "done before anything was measured",
            "rebuild": "at md's own pace: " + self.place.run(
                f"cd /sys/block/{self.arrays[0]}/md && grep . sync_speed_min sync_speed_max"
            ).text.strip(),
            **commands,
        }

    def end(self, name: str, uuid: str) -> None:
        """Also of an array that was not made, whose name may be another's by now."""
        self.place.check(
            f"mdadm --detail --export /dev/{name} 2>/dev/null | grep -qx MD_UUID={uuid} || exit 0; "
            f"tries=50; until mdadm --stop /dev/{name}; do "
            "tries=$((tries - 1)); [ $tries -gt 0 ] || exit 1; sleep 0.2; done"
        )
        places.settle(self.place, "md", uuid)
        self.arrays = [each for each in self.arrays if each != name]

    def stop(self) -> None:
        self.cleanup.close()


# Decisions


def level(array: studies.Array) -> str | None:
    """md's; None where it has none. One datum and one parity are a mirror."""
    if array.copies > 1:
        return "1" if array.data == 1 else "10"
    return "1" if (array.data, array.parity) == (1, 1) else LEVELS.get(array.parity)


def new_uuid() -> str:
    """As mdadm writes one: four words of eight digits."""
    digits = secrets.token_hex(16)
    return ":".join(digits[at : at + 8] for at in range(0, 32, 8))


def create(
    device: str, uuid: str, level: str, array: studies.Array, consistency: str,
    drives: list[str], zeroed: bool,
) -> str:  # fmt: skip
    words = ["mdadm", "--create", device, "--run", f"--uuid={uuid}", f"--level={level}"]
    words += [f"--raid-devices={len(drives)}"]
    words += [f"--chunk={array.chunk >> 10}K"] * (level != "1")
    words += [f"--layout=n{array.copies}"] * (level == "10")
    if level != "0":
        words += ["--consistency-policy=ppl"] if consistency == "ppl" else []
        words += [f"--bitmap={'internal' if consistency == 'bitmap' else 'none'}"]
    words += ["--assume-clean"] * (zeroed and level != "0")
    words += ["--force"] * (len(drives) == 1)  # which mdadm takes for a mistake
    return " ".join([*words, *drives])


def tuning(cpus: int, memory_bytes: int, members: int) -> tuple[int, int]:
    """group_thread_cnt and stripe_cache_size."""
    most = memory_bytes // STRIPE_CACHE_SHARE // (members * PAGE_BYTES)
    pages = max(STRIPE_CACHE_MIN, min(STRIPE_CACHE, most, STRIPE_CACHE_MAX))
    return min(cpus, THREADS_MAX), 1 << (pages.bit_length() - 1)


def drives_out(text: str) -> int:
    """Of the same lines; one that is being filled counts, too."""
    return int(text.splitlines()[1])


def state(text: str, losses: int) -> str:
    """Of array_state, degraded, sync_action and sync_completed, one a line, and what /proc/mdstat
    has of the array: sync_completed moves by a sixteenth of a drive at a time, or in five minutes.
    """
    words = [line.strip() for line in text.splitlines()]
    if words[0] in ("clear", "inactive", "broken"):
        return states.FAILED
    if len(words) == 1:
        return State.HEALTHY
    out, action, completed = int(words[1]), words[2], words[3]
    if out > losses:
        return states.FAILED
    if action not in ("recover", "resync", "check", "repair"):
        return states.without(out)
    if completed == "delayed":  # by another array on the same drive: nothing is done yet
        return states.WAITING
    share = re.search(r"\((\d+)/(\d+)\)", text)
    percent = 100 * int(share[1]) / int(share[2]) if share else 0.0
    is_checked = action in ("check", "repair")  # by a timer of the distribution
    return states.checking(percent) if is_checked else states.rebuilding(percent)


def disks(arrays: list[str], sizes: list[int], align_bytes: int, told) -> list[Disk]:
    """Dealt out in turn. An array with several is cut into partitions."""
    of_array: dict[str, list[int]] = {name: [] for name in arrays}
    for number in range(len(sizes)):
        of_array[arrays[number % len(arrays)]].append(number)
    made: dict[int, Disk] = {}
    for name, numbers in of_array.items():
        if len(numbers) == 1:
            made[numbers[0]] = Disk(device=f"/dev/{name}")
            continue
        table = partitions([sizes[at] for at in numbers], align_bytes)
        told(f"echo '{table}' | sfdisk -q --wipe always /dev/{name}")
        for at, number in enumerate(numbers):
            made[number] = Disk(device=f"/dev/{name}p{at + 1}")
    return [made[number] for number in range(len(sizes))]


def partitions(sizes: list[int], align_bytes: int) -> str:
    """What sfdisk takes: each begins with a stripe."""
    lines, at = ["label: gpt"], align_bytes
    for size in sizes:
        lines.append(f"start={at // 512}, size={size // 512}")
        at = -(-(at + size) // align_bytes) * align_bytes
    return "\n".join(lines)


def alignment(array: studies.Array) -> int:
    """Whole stripes that are whole MiB: 4 data of 64 KiB are 1 MiB, 5 of them are 5 MiB."""
    return math.lcm(array.data * array.chunk, MIB)
