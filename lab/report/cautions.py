"""What a reader must know before the first figure. Pure: from what was read to sentences.

Red is what makes a comparison unfair or a database unsafe; the others say how far figures reach.
"""

import re
from dataclasses import dataclass

from lab import conditions, schedule, window
from lab.report import memory, tables
from lab.report.source import Source
from lab.side import RESYNC_ALL
from lab.stats import Summary
from lab.study import State, Where

# What PostgreSQL promises after a crash depends on these: name → what a server begins with.
DURABILITY = {
    "fsync": ("on",),
    "full_page_writes": ("on",),
    "synchronous_commit": ("on",),
    "wal_sync_method": ("fdatasync",),
    "data_checksums": ("on",),
    "commit_delay": ("0",),
    "wal_level": ("replica", "logical"),
}
SECONDS_ENOUGH = 30
ON_BLOCKS = ("mdraid", "raw", "btrfs", "zfs")
ABOVE = 1.05
PENDING_SHARE_MAX = 0.05  # of what was written, that was only put into a journal, or taken out
EMULATED = (
    "The processors of the virtual machines are emulated: what takes CPU time there, of the load "
    "or of storage inside the guest, takes many times as long, and hides what sides differ by."
)


@dataclass(frozen=True)
class Caution:
    text: str
    red: bool = False


def all_of(source: Source) -> list[Caution]:
    found = [
        *synthetic(source), *mixed(source), *unequal(source), *durability(source),
        *write_holes(source), *resyncs(source), *caches(source), *by_memory(source),
        *narrower(source), *not_in_state(source), *two_told_as_one(source), *not_in_place(source),
        *failures(source), *given_up(source), *short(source), *unfinished(source),
        *skipped(source), *surprising(source), *surroundings(source), *interrupted(source),
    ]  # fmt: skip
    return sorted(found, key=lambda one: not one.red)


def synthetic(source: Source):
    if "SYNTHETIC" in source.study.title:
        yield Caution("SYNTHETIC results, made up by a test: nothing here was measured.", True)


def mixed(source: Source):
    """A run that went on, or a side that was set otherwise: figures of before and after stand in
    one table."""
    changes = conditions.changes(source.machines_used)
    for name, its in source.sides.items():
        changes += [f"{name}, {changed}" for changed in its.get("changed", ())]
    if changes:
        yield Caution(
            "NOT MEASURED UNDER THE SAME CONDITIONS: the run went on with others. "
            f"{'; '.join(changes)}. Figures of before and after are no comparison of equals.",
            True,
        )


def unequal(source: Source):
    its = {name: source.sides.get(name, {}).get("protection", {}) for name in source.names}
    losses = {name: one.get("losses") for name, one in its.items()}
    if len(set(losses.values())) > 1:
        said = ", ".join(f"{name} survives {count}" for name, count in losses.items())
        yield Caution(
            f"UNEQUAL PROTECTION: the sides survive unlike losses of drives ({said}). Who protects "
            "less has less to do: these figures are no comparison of equals.",
            True,
        )
    elif source.study.unequal and any(one != its[source.names[0]] for one in its.values()):
        yield Caution(
            "UNEQUAL PROTECTION: the sides do not do the same about writes that a crash came into "
            "(see below). The run was told to compare them all the same (unequal).",
            True,
        )


def write_holes(source: Source):
    holes = {}
    for name in source.names:
        hole = source.sides.get(name, {}).get("protection", {}).get("write_hole", "not said")
        holes.setdefault(hole, []).append(name)
    if len(holes) > 1:
        said = "; ".join(f"{', '.join(names)}: {hole}" for hole, names in holes.items())
        yield Caution(
            "What a crash in the middle of a write does (the write hole) is not the same for all "
            f"sides. {said}."
        )


def durability(source: Source):
    settings = source.study.pgbench.settings if source.study.pgbench else {}
    for name, value in settings.items():
        told = str(value)
        if isinstance(value, bool):
            told = "on" if value else "off"
        if name in DURABILITY and told not in DURABILITY[name]:
            yield Caution(
                f"DURABILITY IS NOT THE DEFAULT: PostgreSQL ran with {name} = {told}, and not "
                f"{DURABILITY[name][0]}.",
                True,
            )


def resyncs(source: Source):
    """Nothing that says which stripes were being written: cheaper than to write it down."""
    for side in measured_sides(source):
        hole = source.sides.get(side.name, {}).get("protection", {}).get("write_hole")
        whole = side.kind == "mdraid" and not side.bitmap and side.policy != "ppl"
        whole = whole or (side.kind, side.policy) == ("ashlar", "none")
        if source.study.array.losses and (whole or hole == RESYNC_ALL):
            yield Caution(
                f"{side.name} ran without a record of what is being written (bitmap or journal): "
                "after a crash all of it would have to be resynced, and not only what was dirty. "
                "A side that keeps such a record does more work for each write.",
                True,
            )


def caches(source: Source):
    """fio asks for no cache, and ZFS has one of its own all the same."""
    for side in measured_sides(source):
        its = str(source.sides.get(side.name, {}).get("settings", ""))
        told = re.search(r"primarycache\W+metadata", its)
        if side.kind == "zfs" and source.study.fio and not told:
            yield Caution(
                f"{side.name} ANSWERS READS FROM ITS CACHE (ARC) in memory, also with direct I/O: "
                "its reads are not those of drives, unless it is told primarycache=metadata.",
                True,
            )


def by_memory(source: Source):
    """What was counted says so; where nobody counted what arrays are asked, what cannot be of
    drives does."""
    its = [one for one in source.summaries if memory.answered(source, one)]
    if its:
        said = "; ".join(
            f"{tables.named(source, one)}: {one.cell.side} {memory.told(source, one)}"
            for one in its
        )
        yield Caution(
            "READS WERE ANSWERED BY MEMORY, and not by drives, for this share of what was read: "
            f"{said}. Such a figure is one of a cache, and is compared with no drives.",
            True,
        )
    for one in source.summaries:
        found = tables.efficiency(source, one)
        if found and found > ABOVE and will_be_of_memory(source, one):
            unknown = "NOBODY COUNTED WHAT WAS READ OF ITS DRIVES"
            if memory.of_drives_only(one.cell):
                unknown = "IT IS KNOWN WHAT ITS DRIVES READ, AND NOT WHAT THEY WERE ASKED FOR, "
                unknown += "which may be less (a whole record for a part of it)"
            yield Caution(
                f"{tables.named(source, one)}: {one.cell.side} did {found:.0%} of what the bare "
                f"drives do, and {unknown}: memory will have answered, unless the drives were "
                "measured in a worse moment. This figure is not known to be one of drives.",
                True,
            )


def will_be_of_memory(source: Source, one: Summary) -> bool:
    """Where it did more than the drives can. As many drives have to have been measured: of more of
    them at once, each does less."""
    used = source.drives_behind(one.cell.loads, one.cell.side)
    measured = source.raw_drives(one.cell.load, one.cell.loads, one.cell.side)
    return used >= measured and memory.may_have_answered(source, one)


def narrower(source: Source):
    for side in measured_sides(source):
        out = set(source.study.states) - {State.HEALTHY}
        if side.kind == "btrfs" and out:
            yield Caution(
                f"{side.name} with a drive out need not be degraded for what it writes anew: btrfs "
                "makes new chunks of the drives that are left, as a narrower RAID. Its degraded "
                "writes are not the same work as those of a side that keeps its stripes."
            )


def measured_sides(source: Source):
    return [side for side in source.study.side if side.name in source.names]


def failures(source: Source):
    failed = [one for one in source.summaries if one.failed]
    if failed:
        said = "; ".join(
            f"{one.failed:,} in {one.cell.side}, {one.cell.state}, {one.cell.load}"
            + (f", {one.cell.clients} clients" if one.cell.clients else "")
            for one in failed
        )
        yield Caution(f"OPERATIONS FAILED: {said}. Rates count only what was done.", True)


def not_in_state(source: Source):
    """A figure of a state is one only if the arrays were in it."""
    found, of_all = [], ""
    if source.study.array.count > 1:
        of_all = " A second counts if all arrays with a load were in the state; “Cell by cell” "
        of_all += "tells each."
    for one in source.summaries:
        shares = [source.share_as_wanted(each) for each in one.figures]
        least = min((share for share in shares if share is not None), default=1)
        if least < window.SHARE_ENOUGH:
            found.append(f"{tables.named(source, one)}: {one.cell.side} {least:.0%}")
    if found:
        yield Caution(
            "NOT SEEN IN THE STATE THEY ARE NAMED AFTER for all of the measured seconds, but for "
            f"this share of them: {'; '.join(found)}. These figures are not known to be those of "
            f"the state. (Arrays are looked at each second, in a slow guest less often.{of_all})",
            True,
        )


def two_told_as_one(source: Source):
    if any(len(window.told_as(cell)) > 1 for cell in source.results.cells):
        yield Caution(
            "This is an older run, in which arrays that lack two drives were told as those that "
            "lack one: that both were out is known from what was done to them only."
        )


def not_in_place(source: Source):
    """What only waits in a journal is put in place after the cell, in time that nobody measures."""
    found = []
    for one in source.summaries:
        shares = one.spread(
            lambda each: tables.over(each.cell.array_pending_bytes, each.cell.array_write_bytes)
        )
        if not shares or source.only_reads(one.cell.load):
            continue
        share = max(shares.least, shares.greatest, key=abs)
        if abs(share) > PENDING_SHARE_MAX:
            found.append(f"{tables.named(source, one)}: {one.cell.side} {share:+.0%}")
    if found:
        yield Caution(
            "NOT ALL THAT WAS WRITTEN WAS PUT IN PLACE in the measured seconds: of it so much more "
            f"waited in the journal at their end (or less): {'; '.join(found)}. Nobody writes like "
            "that for hours: give the cells more seconds, and a longer warm-up.",
            True,
        )


def given_up(source: Source):
    for tried, said in [
        (True, "CELLS FAILED and have no figure"),
        (False, "CELLS WERE NOT TRIED, since something had gone wrong before them"),
    ]:
        cells = "; ".join(one["cell"] for one in source.failures if one["tried"] == tried)
        if cells:
            yield Caution(f"{said}: {cells}. What went wrong is below.", True)


def short(source: Source):
    seconds = (source.study.pgbench or source.study.fio).seconds
    if seconds < SECONDS_ENOUGH:
        yield Caution(
            f"Each cell was measured for {seconds} s only: this checks that everything works, and "
            "is no measurement to compare by.",
            True,
        )
    if source.study.repeats == 1 and source.baseline is None:  # else it stands at the verdict
        yield Caution("Everything was measured once: what chance does to a figure is not known.")


def unfinished(source: Source):
    chosen = tuple(side for side in source.study.side if side.name not in source.skipped)
    planned = [cell for block in schedule.blocks(source.study, chosen) for cell in block.cells]
    left = sum(not source.results.is_done(cell) for cell in planned)
    if left:
        yield Caution(
            f"The run is not over: {left} of {len(planned)} cells are not measured "
            f"({source.results.to_go_on()})."
        )


def skipped(source: Source):
    for name, why in source.skipped.items():
        yield Caution(f"{name} was left out: {why}")


def surprising(source: Source):
    """What cannot be, but by chance or a cache: so much is what figures are worth here."""
    for load, loads in source.loads:
        for one in source.telling(load, loads):
            name = f"{source.title_of(load, loads)}, {one.cell.state}: {one.cell.side}"
            share, (healthy, _) = tables.efficiency(source, one), tables.of_healthy(source, one)
            if share and share > ABOVE and not will_be_of_memory(source, one):
                used = source.drives_behind(loads, one.cell.side)
                fewer = used < source.raw_drives(load, loads, one.cell.side)
                yield Caution(
                    f"{name} did {share:.0%} of what the bare drives do: a cache has answered, or "
                    "the drives were measured in a worse moment"
                    f"{', or so few do more than their share of what all do' * fewer}."
                )
            if healthy and healthy.median > ABOVE:
                yield Caution(
                    f"{name} did {healthy.median:.0%} of what it does with all drives: that came "
                    "before, when caches were not as warm, or it is chance. Either is at least as "
                    "large as that, in the other rows, too."
                )


def surroundings(source: Source):
    """What the machine does to every figure alike; of a run that went on, all that any had."""
    study, machines = source.study, source.machines_used
    all_of_them = [one.get("machine", {}) for one in machines]
    emulated = list(filter(is_emulated, machines))
    if study.where != Where.HOST and emulated:
        some = "some of " * (len(emulated) < len(machines))
        said = (emulated[-1].get("where") or {}).get("emulation")
        yield Caution(f"SOFTWARE EMULATION limits {some}these figures. {said or EMULATED}")
    elif any(its.get("hypervisor") for its in all_of_them):
        yield Caution("This machine is itself virtual: others may use its processors and drives.")
    if study.drives.kind == "model":
        yield Caution(
            f"Drives are models: memory at a pace of {study.drives.iops:,} operations and "
            f"{study.drives.mbps:,} MB a second each."
        )
    if study.drives.kind == "file":
        yield Caution("Drives are files on one disk, which all of them share.")
        by_loop = [side.name for side in measured_sides(source) if side.kind in ON_BLOCKS]
        if by_loop and len(by_loop) < len(source.names):
            yield Caution(
                f"{', '.join(by_loop)} reached these files through loop devices, since the kernel "
                "takes block devices only; the other sides used the files themselves. On drives "
                "that are devices there is no such difference."
            )
    if study.drives.kind == "nvme":
        yield Caution("Drives are NVMe drives that QEMU emulates on files.")
    for at, its in enumerate(all_of_them):
        load = its.get("load_average_before")
        if load and load[0] > 0.5 * (its.get("cpus") or 1):
            yield Caution(
                f"The machine was busy with other work: a load of {load[0]:.1f} on "
                f"{its.get('cpus')} CPUs when the run {'went on' if at else 'began'}."
            )


def is_emulated(machine: dict) -> bool:
    """Whether its guests were, if it had any."""
    values = (machine.get("where") or {}).values()
    in_software = any("tcg" in str(value).lower() for value in values)
    return in_software or machine.get("machine", {}).get("kvm") is False


def interrupted(source: Source):
    if len(source.machines_used) > 1:
        count = len(source.machines_used) - 1
        said = f"The run was interrupted and went on {f'{count} times' if count > 1 else 'once'}."
        if source.raw and not source.raw_is_stated:
            said += " The bare drives were measured before that: “of bare drives” is of what they "
            said += "did then."
        yield Caution(said)
