"""What a server would do: predicts a study's figures from those of its drives, with what limits it.

    server = Server(Drive(…), cores=2, …)
    for forecast in predict(study, server): …

Each limit by itself allows a rate, and the least of them is the prediction: it is what an array can
do at best, and it is named. `geometry.py` counts what requests cost the drives. A limit that
nobody has told of is left out, and listed as such; nothing is assumed in its place.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

from lab import schedule
from lab import study as studies
from lab.geometry import BLOCK_BYTES, Drive, Geometry, Load
from lab.sides import ashlar, mdraid
from lab.study import Pattern, State, Study, Where

PAGE_BYTES = 8192  # of PostgreSQL
SCALE_BYTES = 16_000_000  # of one unit of pgbench's scale, with its indices
# Writers who ask for all that the drives can do fill a journal of the usual size, 128 MiB on each
# member; from half its size on, the older half of it is put in place. Where batches are not divided
# over the members, each has all bytes of its batches, and the ring is half full at half as many.
WAITING_BYTES = 64 << 20
REBUILD_SHARE = 0.1  # of the drives' time, to which a rebuild gives way under load
NOT_COUNTED = {"btrfs": "copies on write", "zfs": "copies on write",
               "qemu-storage-daemon": "one file", "spdk": "not counted yet"}  # fmt: skip


@dataclass(frozen=True)
class Server:
    """Limits that are None are not known."""

    drive: Drive
    cores: int | None = None  # of the engine
    core_reads_per_second: float | None = None  # what `ashlar bench engine` says of one core
    core_writes_per_second: float | None = None
    core_bytes_per_second: float | None = None
    drive_latency_seconds: float | None = None  # of one operation, when nothing else is asked
    vms: int | None = None  # in place of the study's
    vm_per_second: float | None = None  # I/Os that one guest's virtual disk can do
    vm_bytes_per_second: float | None = None
    vm_transactions_per_second: float | None = None  # that its processors do without waiting
    network_bytes_per_second: float | None = None
    span_bytes: int | None = None  # that random writes are spread over; None: much


@dataclass(frozen=True)
class Transaction:
    """What one asks of the array. Estimated from what PostgreSQL does, or measured by a run."""

    reads: float
    writes: float
    log_bytes: float
    read_bytes: float = PAGE_BYTES  # of one of them
    write_bytes: float = PAGE_BYTES
    measured: bool = False


Place = tuple[str, str, int]  # side, script, clients


@dataclass(frozen=True)
class Forecast:
    side: str
    state: str
    load: str
    clients: int
    loads: int
    per_second: float | None
    bytes_per_second: float | None
    bottleneck: str
    limits: dict[str, float] = field(default_factory=dict)  # name → rate that it allows
    reads: float | None = None  # operations of drives, of one request
    writes: float | None = None
    notes: tuple[str, ...] = ()

    def as_json(self) -> dict:
        return asdict(self)


def predict(
    study: Study, server: Server, transactions: dict[Place, Transaction] | None = None
) -> Iterator[Forecast]:
    if server.vms:
        study = study.model_copy(update={"vm": study.vm.model_copy(update={"count": server.vms})})
    for side in study.side:
        for state in schedule.states_of(study, side):
            for load, clients, loads in schedule.loads_of(study):
                place = {"side": side.name, "state": state.value, "load": load}
                place |= {"clients": clients, "loads": loads}
                if why := not_predicted(study, side):
                    why = f"not predicted: {why}"
                    yield Forecast(**place, per_second=None, bytes_per_second=None, bottleneck=why)
                    continue
                yield cell(study, server, side, state, place, transactions or {})


def not_predicted(study: Study, side: studies.Side) -> str:
    """Why not; empty if it is. No figure is made up for an array that a side does not have."""
    if side.kind == "mdraid" and mdraid.level(study.array) is None:
        return f"md has none of {study.array.parity} parities"
    if side.kind == "ashlar" and study.array.members > ashlar.MEMBERS_MAX:
        return f"an array has {ashlar.MEMBERS_MAX} drives at most"
    return NOT_COUNTED.get(side.kind, "")


def cell(study: Study, server: Server, side, state: State, place: dict, transactions) -> Forecast:
    geometry, notes = geometry_of(study, side, state)
    if study.fio:
        pattern = next(each for each in study.fio.patterns if each.name == place["load"])
        load, size = of_pattern(geometry, server, pattern), pattern.block
        limits = fio_limits(study, server, side, state, pattern, geometry, load, place["loads"])
    else:
        asked = (side.name, place["load"], place["clients"])
        transaction = transactions.get(asked) or estimated(study, place["load"])
        if not transaction.measured:
            notes = (*notes, "I/Os of a transaction are estimated, each commit by itself")
        load, size = of_transaction(geometry, server.drive, transaction), None
        limits = pgbench_limits(study, server, side, load, transaction, place["loads"])
        commits, clients = place["load"] != "select-only", place["loads"] * place["clients"]
        limits |= clients_limit(server, geometry, transaction, commits, clients)
    if state == State.REBUILDING:
        limits["drives"] *= 1 - REBUILD_SHARE
        notes = (*notes, f"the rebuild takes {REBUILD_SHARE:.0%} of the drives")
    bottleneck = min(limits, key=limits.get)
    rate = limits[bottleneck]
    return Forecast(
        **place,
        per_second=rate,
        bytes_per_second=rate * size if size else None,
        bottleneck=bottleneck,
        limits=limits,
        reads=load.reads,
        writes=load.writes,
        notes=notes,
    )


def geometry_of(study: Study, side: studies.Side, state: State) -> tuple[Geometry, tuple[str, ...]]:
    array = study.array
    if side.kind == "raw" and side.raid0:
        return Geometry(array.members, 0, array.chunk), ()
    if side.kind == "raw":
        return Geometry(1, 0, array.chunk), ("raw gives each load one drive",)
    out = tuple(range(state.drives_out))
    usual = ("journal",) if array.copies > 1 else (None, "journal")
    journal, notes = side.kind == "ashlar" and side.policy in usual, ()
    if side.kind == "ashlar" and side.policy == "bitmap" and out and array.parity:
        journal, notes = True, ("a degraded array of policy bitmap writes through the journal",)
    if side.kind == "mdraid":
        notes = ("md's own limits (threads, stripe cache, bitmap) are not known: drives only",)
    return Geometry(array.data, array.parity, array.chunk, journal, out, array.copies), notes


# fio --------------------------------------------------------------------------------------------


def of_pattern(geometry: Geometry, server: Server, pattern: Pattern) -> Load:
    """Of one request of it."""
    drive, block = server.drive, pattern.block
    if pattern.rw in ("read", "write"):
        stripes = block / geometry.stripe_bytes
        whole = (
            geometry.stripe_read(drive) if pattern.rw == "read" else geometry.stripe_write(drive)
        )
        return whole.times(stripes)
    share = pattern.read_share
    reads = geometry.random_read(drive, block).times(share)
    if not geometry.journal:
        return reads.plus(geometry.in_place(drive, block, 1).times(1 - share))
    if share == 1:
        return reads
    # what waits is in memory: no drive is asked for it
    waits = WAITING_BYTES if geometry.divides_journal else WAITING_BYTES // 2
    waiting, newest = waiting_share(server.span_bytes, waits)
    stored = geometry.destaged(drive, block, waiting).times(newest)
    writes = stored.plus(geometry.journaled(drive, block))
    return reads.times(1 - waiting).plus(writes.times(1 - share))


def waiting_share(span_bytes: int | None, waits_bytes: int) -> tuple[float, float]:
    """Of a span, how much waits in the journal; and of what was written, how much is the newest."""
    if not span_bytes:
        return 0.0, 1.0
    share = 1 - math.exp(-waits_bytes / span_bytes)
    return share, span_bytes * share / waits_bytes


def fio_limits(
    study: Study, server: Server, side, state: State, pattern: Pattern, geometry: Geometry,
    load: Load, loads: int,
) -> dict[str, float]:  # fmt: skip
    arrays = arrays_of(study, side, loads)
    block = pattern.block
    limits = {"drives": arrays / load.busiest_seconds}
    reads = pattern.rw in ("randread", "read")
    if side.kind == "ashlar" and server.cores:
        # one array's writes are one core's; its healthy reads are done by all
        cores = server.cores if reads and state == State.HEALTHY else min(server.cores, arrays)
        limits |= core_limits(server, pattern, cores)
    if study.where != Where.HOST:
        per_vm = [(server.vm_per_second, 1), (server.vm_bytes_per_second, block)]
        known = [rate / size for rate, size in per_vm if rate]
        if known:
            limits["guests"] = loads * min(known)
    if server.network_bytes_per_second:
        limits["network"] = server.network_bytes_per_second / block
    if server.drive_latency_seconds:
        waits = hops(geometry, pattern) * server.drive_latency_seconds
        limits["requests under way"] = loads * pattern.jobs * pattern.depth / waits
    return limits


def hops(geometry: Geometry, pattern: Pattern) -> float:
    """How often a request waits for a drive, on average: of a mix each has its own. What a read
    needs of several drives it asks for at once, and whole stripes are written without a read."""
    if pattern.rw in ("read", "write"):
        return 1.0
    return pattern.read_share + (1 - pattern.read_share) * write_hops(geometry)


def write_hops(geometry: Geometry) -> float:
    """Of a small write: once through a journal; in place with parity, what that is worked out from
    is read before."""
    return 1.0 if geometry.journal else 1.0 + geometry.reads_first()


def arrays_of(study: Study, side, loads: int) -> int:
    """How many work at once. `raw` has a drive for each load, but as RAID 0."""
    alone = side.kind == "raw" and not side.raid0
    return loads if alone else min(study.array.count, loads)


def core_limits(server: Server, pattern: Pattern, cores: int) -> dict[str, float]:
    """Seconds of a core for one request: of a small one by its number, of a large by its bytes."""
    seconds, reads = 0.0, pattern.read_share
    for share, rate in (
        (reads, server.core_reads_per_second),
        (1 - reads, server.core_writes_per_second),
    ):
        if share and not rate:
            return {}
        seconds += share / rate if share else 0.0
    if pattern.block > BLOCK_BYTES and server.core_bytes_per_second:
        seconds = max(seconds, pattern.block / server.core_bytes_per_second)
    return {
        "a core of the engine" if cores == 1 else f"{cores} cores of the engine": cores / seconds
    }


# pgbench ----------------------------------------------------------------------------------------


def estimated(study: Study, script: str) -> Transaction:
    """One row of a table that is as large as the scale says, a page a row: what is not in memory is
    read. A write dirties its page, which is stored once; after a checkpoint the log has all of it.
    """
    size = study.pgbench.scale * SCALE_BYTES
    memory = study.vm.memory if study.where != Where.HOST else math.inf
    missed = max(0.0, 1 - memory / size)
    if script == "select-only":
        return Transaction(reads=missed, writes=0, log_bytes=0)
    return Transaction(reads=missed, writes=1, log_bytes=PAGE_BYTES + 1024)


def of_transaction(geometry: Geometry, drive: Drive, transaction: Transaction) -> Load:
    """A commit waits for its log, a small write of its own; a journal puts these in place later, as
    whole stripes, since they lie one after the other."""
    stored = transaction.write_bytes
    pages = (
        geometry.random_read(drive, transaction.read_bytes)
        .times(transaction.reads)
        .plus(geometry.in_place(drive, stored, 1).times(transaction.writes))
    )
    if geometry.journal:
        in_journal = transaction.writes * (1 + geometry.parity_in_full)
        pages = pages.plus(geometry.journaled(drive, stored).times(in_journal))
        log = geometry.stripe_write(drive).times(transaction.log_bytes / geometry.stripe_bytes)
    elif transaction.log_bytes:
        log = geometry.in_place(drive, blocks_bytes(transaction.log_bytes), 1)
    else:
        return pages
    return pages.plus(log)


def blocks_bytes(count_bytes: float) -> int:
    return -(-int(count_bytes) // BLOCK_BYTES) * BLOCK_BYTES


def pgbench_limits(
    study: Study, server: Server, side, load: Load, transaction: Transaction, loads: int
) -> dict[str, float]:
    arrays = arrays_of(study, side, loads)
    busy = load.busiest_seconds
    limits = {"drives": arrays / busy if busy else math.inf}
    known = server.core_reads_per_second and server.core_writes_per_second
    if side.kind == "ashlar" and server.cores and known:
        writes = transaction.writes + transaction.log_bytes / PAGE_BYTES
        seconds = transaction.reads / server.core_reads_per_second
        seconds += writes / server.core_writes_per_second
        cores = min(server.cores, arrays)
        name = "a core of the engine" if cores == 1 else f"{cores} cores of the engine"
        limits[name] = cores / seconds if seconds else math.inf
    if server.vm_transactions_per_second:
        name = "guests" if study.where != Where.HOST else "the load's processors"
        limits[name] = loads * server.vm_transactions_per_second
    return limits


def clients_limit(
    server: Server, geometry: Geometry, transaction: Transaction, commits: bool, clients: int
) -> dict[str, float]:
    """A client waits for each page that it reads, one after the other, and for its commit, if its
    script has one; pages are written when nobody waits for them. (A run counts writes of a script
    that only reads, too: what a checkpoint stores of the cell before.)"""
    waits = transaction.reads + (write_hops(geometry) if commits else 0)
    if not (waits and server.drive_latency_seconds):
        return {}
    return {"clients that wait": clients / (waits * server.drive_latency_seconds)}


def measured_transactions(cells) -> dict[Place, Transaction]:
    """What arrays were asked for one transaction, healthy: of each side, script and number of
    clients by itself, since more clients share a write of the log, and file systems differ."""
    found: dict[Place, list] = {}
    for one in cells:
        counted = one.array_reads is not None and one.array_read_bytes is not None
        if one.clients and one.state == "healthy" and one.operations and counted:
            found.setdefault((one.side, one.load, one.clients), []).append(one)
    return {place: measured_transaction(its) for place, its in found.items()}


def measured_transaction(cells) -> Transaction:
    operations, reads, writes, read_bytes, write_bytes = (
        sum(getattr(one, name) for one in cells)
        for name in (
            "operations", "array_reads", "array_writes", "array_read_bytes", "array_write_bytes"
        )
    )  # fmt: skip
    return Transaction(
        reads=reads / operations,
        writes=writes / operations,
        log_bytes=0,  # it is among the writes
        read_bytes=read_bytes / reads if reads else PAGE_BYTES,
        write_bytes=write_bytes / writes if writes else PAGE_BYTES,
        measured=True,
    )
