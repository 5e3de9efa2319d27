"""PostgreSQL with pgbench, on an XFS of its own or on the file system that a side gives.

Where arrays are to be rebuilt, the disk is written full before (`full`), and the file system is
made without discard: who skips what was never written or was discarded would rebuild the database
alone, in seconds. On a side's own file system, a file beside the database takes the room that is
not kept for it. What it leaves of that was never written, and each cell says how much was.

The database is filled once for a side and repeat, and is what it has become in all states after
that: each side meets the same cells in the same order. Before each cell the small tables are
vacuumed and a checkpoint is made, so that nobody pays for the cell before. Durability is
PostgreSQL's default, and data checksums are on; what a study sets otherwise is in the report.

pgbench runs once for a cell, warm-up included, and its own log of each transaction is kept whole.
The load has begun when the first transaction did; what ended before the warm-up was over does not
count, nor does what ended after the time. pgbench's own clock goes from before it has connected, so
it is given the time to connect besides: twice what that took when it was tried, alone; where loads
share processors and connect at once, times their number.
"""

import contextlib
import gzip
import math
import re
import shlex
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path

from demo.vm import VmError
from lab import place as places
from lab import study as studies
from lab.loads import LoadError, Measured, missing_seconds_max, wait_until
from lab.loads.fio import fill_words
from lab.place import Host, Running
from lab.results import Cell
from lab.where import Seat

SCRIPTS = {"select-only": "-S", "simple-update": "-N", "tpcb-like": "-b tpcb-like"}
FILLED = "written before the database"  # of its settings
DATABASE = "pgbench"
USER = "postgres"
AS_USER = f"setpriv --reuid={USER} --regid={USER} --clear-groups"
DURABLE = {"fsync": "on", "full_page_writes": "on", "synchronous_commit": "on"}
NOT_DEFAULT = (
    "SELECT string_agg(name || ' = ' || setting, E'\\n' ORDER BY name) FROM pg_settings "
    "WHERE source <> 'default'"
)
ROWS_OF_SCALE = 100_000  # accounts; 15 MB each with their index
START_SECONDS_MAX = 120
STOP_SECONDS_MAX = 60
REST_SECONDS_MAX = 600  # what is dirty is stored before: gigabytes, on slow drives
FILL_SECONDS_MAX = 6 * 3600
LATE_SECONDS_MAX = 300  # for connections, and for what hangs while a drive is being given up
CONNECT_FACTOR = 2  # of the time that connecting took: the machine may be busier in the cell
CONNECTIONS_BESIDE = 20  # ours, and those that PostgreSQL keeps for itself
SCALE_BYTES = 20 << 20  # on disk, of one unit of pgbench's scale, with what updates add
WAL_BYTES = 1280 << 20  # PostgreSQL's max_wal_size, and some
SMALL_WAL_BYTES = 384 << 20  # what a short load writes
XFS_BYTES_MIN = 320 << 20
MIB = 1 << 20


class Pgbench:
    def __init__(self, seat: Seat, asked: studies.Pgbench, full: bool = False):
        self.seat, self.place, self.asked, self.full = seat, seat.place, asked, full
        self.home = f"/tmp/ashlar-lab-{places.TOKEN}-{seat.name}"
        self.logs = places.scratch(self.place, seat.name)
        self.root = seat.disk.directory or f"{self.home}/mount"
        self.mounted = False
        self.server: Running | None = None
        self.load: Running | None = None
        self.cell: Cell | None = None
        self.rate: float | None = None
        self.fill_seconds = 0.0
        self.warm_seconds = asked.warm_seconds  # of the cell under way
        self.filled_bytes = 0  # before the database was made
        self.clock_behind_seconds = 0.0
        self.before = (0, 0, 0, 0, 0)
        self.processed = 0
        self.connect_seconds: dict[int, float] = {}  # by the number of clients
        self.programs = ""

    # The database

    def prepare(self, say: Callable[[str], None]) -> None:
        began = time.monotonic()
        self.programs = program_directory(self.place)
        for directory in (self.home, self.logs):
            places.owe(self.place, "path", directory)
        self.place.check(
            f"rm -rf {self.logs} && mkdir -p {self.home}/mount && install -d -o {USER} {self.logs} "
            f"{self.home}/socket && chmod 755 {self.home}"
        )
        if self.full:
            self.fill_disk(say)
        say("file system")
        self.make_file_system()
        say("initdb")
        self.make_cluster()
        self.start_server()
        self.refuse_other_settings()
        self.as_found = self.sql(NOT_DEFAULT, database="postgres")
        say(f"filling the database, scale {self.asked.scale}")
        self.place.check(self.as_user("createdb", DATABASE))
        self.check_long(self.as_user("pgbench", f"-i -q -s {self.asked.scale} {DATABASE}"))
        self.sql("VACUUM ANALYZE", timeout=FILL_SECONDS_MAX)
        self.sql("CHECKPOINT", timeout=FILL_SECONDS_MAX)
        self.before = self.balances()
        self.fill_seconds = time.monotonic() - began

    def fill_disk(self, say: Callable[[str], None]) -> None:
        """As much as the disk has on every side, however large the device is."""
        disk = self.seat.disk
        file, size = disk.device, disk.bytes
        if disk.directory:
            file, size = f"{disk.directory}/filler", size - database_bytes(self.asked)
        elif not size:
            size = int(self.place.check(f"blockdev --getsize64 {disk.device}"))
        self.filled_bytes = max(0, size) // MIB * MIB
        if self.filled_bytes:
            say(f"writing {self.filled_bytes >> 20} MiB, which are to be rebuilt")
            self.check_long(f"exec fio {fill_words(file, 0, self.filled_bytes)} --end_fsync=1")

    def make_file_system(self) -> None:
        disk = self.seat.disk
        if disk.directory:
            return
        # as large on every side, however large the device is
        size = f"-d size={disk.bytes} " if disk.bytes else ""
        self.place.check(f"mkfs.xfs -q -f {'-K ' * self.full}{size}{disk.device}", timeout=600)
        places.mount(self.place, disk.device, self.root, "xfs")
        self.mounted = True

    def make_cluster(self) -> None:
        """A guest keeps a first one and has it copied for the next side: under emulation it takes a
        minute to make."""
        made = f"{self.place.logs}/cluster" if self.place.logs else self.data
        initdb = (
            f"install -d -o {USER} -m 700 {made} && "
            f"{self.as_user('initdb')} --data-checksums --auth=trust --locale=C.UTF-8 -D {made}"
        )
        if made != self.data:
            initdb = (
                f"{{ [ -e {made}/whole ] || {{ {initdb} && touch {made}/whole; }}; }} && "
                f"cp -a {made} {self.data} && rm {self.data}/whole && sync -f {self.data}"
            )
        self.place.check(initdb, timeout=600)

    @property
    def data(self) -> str:
        return f"{self.root}/data"

    def start_server(self) -> None:
        """In the foreground and as our child: it cannot outlive us."""
        words = " ".join(f"-c {name}={shlex.quote(str(it))}" for name, it in self.options().items())
        command = f"{self.programs}/postgres -D {self.data} {words}"
        self.server = self.place.spawn(
            f"exec {AS_USER} --pdeathsig KILL {command} >>{self.logs}/server 2>&1"
        )
        deadline = time.monotonic() + START_SECONDS_MAX
        while self.place.run(self.as_user("pg_isready", "-q")).rc:
            if not self.server.running or time.monotonic() > deadline:
                said = self.complaints()
                if wrong := refused_settings(self.asked, said):
                    raise studies.StudyError(wrong)  # no other turn would start with them, either
                raise LoadError(f"PostgreSQL did not start in {self.seat.name}:\n{said}")
            time.sleep(0.1)

    def complaints(self) -> str:
        """The worst that the server has said, or else its last."""
        log = f"{self.logs}/server"
        # what is refused after a PANIC says nothing of its cause
        worst = self.place.run(
            f"grep PANIC {log} | tail -n 1; grep -E 'FATAL|ERROR' {log} | tail -n 3"
        ).text.strip()
        return worst or self.place.run(f"tail -n 5 {log}").text.strip()

    def options(self) -> dict[str, str]:
        """The study's own come last and win. Only how it is reached is ours."""
        connections = max(100, max(self.asked.clients) + CONNECTIONS_BESIDE)
        ours = {
            "listen_addresses": "",
            "unix_socket_directories": f"{self.home}/socket",
            "max_connections": str(connections),
        }
        return ours | {name: told(value) for name, value in self.asked.settings.items()}

    def refuse_other_settings(self) -> None:
        """Durability is what the study says, and PostgreSQL's default where it says nothing."""
        wanted = DURABLE | {name: told(value) for name, value in self.asked.settings.items()}
        for name in (*DURABLE, "data_checksums"):
            found, expected = self.sql(f"SHOW {name}", database="postgres"), wanted.get(name, "on")
            if found != expected:
                raise LoadError(f"PostgreSQL runs with {name} = {found} and not {expected}")

    def stop_server(self, signal: str, seconds: float) -> None:
        """By SIGINT sessions are ended, and a checkpoint is made; by SIGQUIT it ends at once: what
        nobody needs any more is not to be stored first."""
        if self.server is not None:
            server, self.server = self.server, None
            if places.stop(server, signal, seconds) is None:
                if pids := places.processes_in(self.place, self.data):
                    self.place.run(f"kill -KILL {' '.join(map(str, pids))}")
                raise LoadError(f"PostgreSQL in {self.seat.name} did not stop and was killed")

    def as_user(self, program: str, words: str = "") -> str:
        server = f"PGHOST={self.home}/socket"
        if port := self.asked.settings.get("port"):  # by which its socket is named
            server += f" PGPORT={shlex.quote(told(port))}"
        return f"cd {self.home} && {server} {AS_USER} {self.programs}/{program} {words}"

    def check_long(self, command: str) -> None:
        output = self.place.spawn(command).wait(FILL_SECONDS_MAX)
        if output.rc != 0:
            raise LoadError(f"{self.seat.name} was not filled:\n{output.text[-800:]}")

    def sql(self, query: str, timeout: float = 600, database: str = DATABASE) -> str:
        """One value, or one row with | between its values."""
        words = f"-AtX -v ON_ERROR_STOP=1 -d {database} -c {shlex.quote(query)}"
        return self.place.check(self.as_user("psql", words), timeout).strip()

    # One cell

    def ready(self, cell: Cell) -> None:
        self.clock_behind_seconds = self.place.set_clock()  # its log is in its own clock
        self.place.check(f"rm -f {self.logs}/log.*")
        try:
            self.sql("VACUUM pgbench_branches, pgbench_tellers")
            self.sql("CHECKPOINT")
            if cell.clients not in self.connect_seconds:
                self.connect_seconds[cell.clients] = self.tried_to_connect(cell.clients)
        except VmError as error:
            raise LoadError(f"{error}\nPostgreSQL's log:\n{self.complaints()}") from None

    def tried_to_connect(self, clients: int) -> float:
        words = f"-n -S -c {clients} -j {self.threads(clients)} -t 1 {DATABASE}"
        text = self.place.check(self.as_user("pgbench", words), timeout=LATE_SECONDS_MAX)
        return float(said(text, r"initial connection time = ([\d.]+) ms")) / 1000

    def threads(self, clients: int) -> int:
        return min(self.asked.threads, clients)

    def seconds(self, cell: Cell) -> int:
        """By pgbench's clock, which begins before it has connected."""
        shared = self.place.emulated or isinstance(self.place, Host)
        factor = CONNECT_FACTOR * (cell.loads if shared else 1)
        connect = math.ceil(factor * self.connect_seconds.get(cell.clients, 0.0)) + 1
        return connect + self.warm_seconds + self.asked.seconds

    def begin(self, cell: Cell, at: float = 0.0, more_warm: int = 0) -> None:
        self.warm_seconds = self.asked.warm_seconds + more_warm
        self.cell, self.rate = cell, None
        threads, seconds = self.threads(cell.clients), self.seconds(cell)
        # -n: pgbench would empty its history first, against which the balances are checked
        self.command = (
            f"pgbench -n {SCRIPTS[cell.load]} -c {cell.clients} -j {threads} -T {seconds} -P 1 "
            f"-l --log-prefix={self.logs}/log --sampling-rate={self.share} -r {DATABASE}"
        )
        program, words = self.command.split(" ", 1)
        command = f"{wait_until(at)}; {self.as_user(program, words)}"
        self.load = self.place.spawn(command, self.on_line)

    @property
    def share(self) -> float:
        """Of the transactions that are logged."""
        return self.asked.log_share if self.cell.load == "select-only" else 1.0

    def on_line(self, line: str) -> None:
        if progress := re.match(r"progress: [\d.]+ s, ([\d.]+) tps", line):
            self.rate = float(progress[1])

    @property
    def begun(self) -> bool:
        """It has told its first rate, a second after it had all connections."""
        return self.rate is not None

    @property
    def seconds_max(self) -> float:
        return self.seconds(self.cell) + LATE_SECONDS_MAX

    @property
    def running(self) -> bool:
        return self.load is not None and self.load.running

    def finish(self, directory: Path) -> Measured:
        load, self.load = self.load, None
        output = load.wait(self.seconds_max)
        text = directory / f"{self.seat.name}.txt"
        text.write_text(f"$ {self.command}\n{output.text}")
        if output.rc != 0:
            server = self.complaints()
            text.write_text(f"{text.read_text()}\nPostgreSQL's log:\n{server}")
            why = re.search(r"error: (.*(?:PANIC|FATAL|ERROR).*)", output.text + server)
            raise LoadError(f"pgbench was aborted: {why[1] if why else 'see there'} ({text})")
        self.processed = int(said(output.text, r"actually processed: (\d+)"))
        log = directory / f"{self.seat.name}.log.gz"
        packed = f"{self.logs}/packed.gz"
        self.place.check(
            f"cat {self.logs}/log.* | gzip -1 >{packed} && rm {self.logs}/log.*", timeout=1800
        )
        self.place.fetch(packed, log)
        self.place.check(f"rm {packed}")
        failed = int(said(output.text, r"failed transactions: (\d+)"))
        return self.measured(log, failed, output.text)

    def measured(self, log: Path, failed: int, text: str) -> Measured:
        began, ended, counts, sums = by_second(log, self.warm_seconds)
        seconds = window(began, ended, self.asked.seconds, self.place.emulated)
        notes = ()
        if self.asked.seconds - seconds > missing_seconds_max(self.asked.seconds, emulated=False):
            notes = (f"{self.seat.name} was measured for {seconds:.1f} s of {self.asked.seconds}",)
        if self.share < 1:
            notes += (f"one transaction in {1 / self.share:g} is in the log, chosen by pgbench",)
            counts = {second: round(count / self.share) for second, count in counts.items()}
            sums = {second: value / self.share for second, value in sums.items()}
        if not isinstance(self.place, Host):
            behind_ms = 1000 * self.clock_behind_seconds
            notes += (f"{self.seat.name}'s log has the guest's times, {behind_ms:.0f} ms behind",)
        return Measured(began, seconds, counts, sums, failed, notes)

    def verify(self) -> list[str]:
        """Whatever ran: the sums of a bank are right, and every transaction is in its history."""
        now = self.balances()
        accounts, branches, tellers, history, rows = (
            after - before for after, before in zip(now, self.before, strict=True)
        )
        self.before = now
        writes = self.cell.load != "select-only"
        moved = history if self.cell.load == "tpcb-like" else 0
        wrong = []
        if accounts != history:
            wrong.append(f"accounts moved by {accounts} and history by {history}")
        if (branches, tellers) != (moved, moved):
            wrong.append(f"branches moved by {branches}, tellers by {tellers}, and not {moved}")
        if rows != (self.processed if writes else 0):
            wrong.append(f"history has {rows} new rows for {self.processed} transactions")
        if wrong:
            raise LoadError(f"the data of {self.seat.name} are wrong: {'; '.join(wrong)}")
        return []

    def balances(self) -> tuple[int, ...]:
        """Sums over accounts, branches, tellers and history, and the number of rows in history."""
        row = self.sql(
            "SELECT (SELECT sum(abalance) FROM pgbench_accounts),"
            " (SELECT sum(bbalance) FROM pgbench_branches),"
            " (SELECT sum(tbalance) FROM pgbench_tellers),"
            " (SELECT coalesce(sum(delta), 0) FROM pgbench_history),"
            " (SELECT count(*) FROM pgbench_history)",
            timeout=3600,
        )
        return tuple(map(int, row.split("|")))

    def rest(self) -> None:
        self.stop_server("INT", REST_SECONDS_MAX)
        if self.mounted:
            places.unmount(self.place, self.root)
            self.mounted = False

    def go_on(self) -> None:
        if not self.seat.disk.directory:
            places.mount(self.place, self.seat.disk.device, self.root, "xfs")
            self.mounted = True
        self.start_server()

    def pids(self) -> list[int]:
        """The server works in its data, the client in our home. Others are none of ours."""
        found = places.processes_in(self.place, self.home)
        return found + places.processes_in(self.place, self.data)

    def settings(self) -> dict[str, str]:
        version = self.place.run(f"{self.programs}/postgres --version").text.strip()
        file_system = "its own"
        if not self.seat.disk.directory:
            info = self.place.run(f"xfs_info {self.root}").text.strip()
            but = ", but for -K: what was written is not discarded" * self.full
            file_system = f"XFS, with mkfs.xfs's defaults{but}\n{info}"
        return {
            "version": version,
            "file system": file_system,
            FILLED: self.filled(),
            **{name: value for name, value in self.options().items() if value},
            "all that is not PostgreSQL's default": self.as_found,
        }

    def filled(self) -> str:
        if not self.full:
            return "nothing: no array is rebuilt"
        told = f"{self.filled_bytes >> 20} MiB"
        if not self.seat.disk.directory:
            return f"{told}, all of the disk, so that there is as much to rebuild"
        left = self.seat.disk.bytes - self.filled_bytes
        return f"{told}, in a file beside it, to which {left >> 20} MiB are left"

    def close(self) -> None:
        try:
            if self.load is not None:
                places.stop(self.load)
            self.stop_server("QUIT", STOP_SECONDS_MAX)
        finally:
            if self.mounted:
                places.unmount(self.place, self.root)
                self.mounted = False
            self.place.check(f"rm -rf {self.logs} && rm -rf --one-file-system {self.home}")
            for directory in (self.logs, self.home):
                places.settle(self.place, "path", directory)


def database_bytes(asked: studies.Pgbench) -> int:
    """That a disk needs for it."""
    wal = WAL_BYTES if asked.warm_seconds + asked.seconds > 30 else SMALL_WAL_BYTES
    return max(XFS_BYTES_MIN, asked.scale * SCALE_BYTES + wal)


def settings_problems(place: Host, asked: studies.Pgbench) -> list[str]:
    """Asked of the program itself, in a directory that is no cluster: it looks at the settings
    before it sees that."""
    given = (shlex.quote(f"{name}={told(it)}") for name, it in asked.settings.items())
    words = " ".join(f"-c {each}" for each in given)
    server = f"{AS_USER} {program_directory(place)}/postgres -D $at {words}"
    at = places.fresh_directory(place, Path("/tmp"))
    try:
        said = place.run(
            f"at={at}; touch $at/postgresql.conf && chown -R {USER} $at && cd / && {server}"
        )
    finally:
        places.remove(place, at)
    wrong = refused_settings(asked, said.text)
    return [wrong] if wrong else []


def refused_settings(asked: studies.Pgbench, said: str) -> str:
    for line in said.splitlines():
        named = re.search(r'FATAL: +(.*parameter "([^"]+)".*)', line)
        if named and named[2] in asked.settings:
            return f"`pgbench.settings.{named[2]}`: PostgreSQL says: {named[1]}"
    return ""


def told(value: str | int | bool) -> str:
    """As PostgreSQL shows it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def said(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise LoadError(f"pgbench did not say {pattern}:\n{text[-800:]}")
    return found[1]


def program_directory(place) -> str:
    """Debian's, the newest of them; or where the PATH has them."""
    found = place.run("ls -d /usr/lib/postgresql/*/bin | sort -V | tail -n 1").text.strip()
    if found.startswith("/") and "\n" not in found:
        return found
    return place.check("dirname $(command -v postgres)").strip()


def lines(log: Path) -> Iterator[bytes]:
    with gzip.open(log, "rb") as file:
        yield from file


def window(began: float, ended: float, asked_seconds: float, emulated: bool) -> float:
    """The seconds that were measured: no rate is divided by seconds in which nothing ran."""
    seconds = min(asked_seconds, ended - began)
    if asked_seconds - seconds > missing_seconds_max(asked_seconds, emulated):
        raise LoadError(
            f"pgbench was measured for {max(0.0, seconds):.1f} s of {asked_seconds}: connecting "
            "took the rest, or the last transactions did not end; give it fewer clients or more "
            "seconds"
        )
    return seconds


def by_second(
    log: Path, warm_seconds: int
) -> tuple[float, float, dict[int, int], dict[int, float]]:
    """When the measured part began, when the last transaction ended, and what ended in each second.

    A line is `client number latency_us script seconds microseconds`: when it ended, by the clock.
    The earliest beginning of any transaction is when pgbench had all of its connections.
    """
    ends, latencies = array("q"), array("q")  # there may be millions
    for line in lines(log):
        fields = line.split()
        with contextlib.suppress(ValueError):  # a failed one has a word in place of its latency
            latencies.append(int(fields[2]))
            ends.append(int(fields[4]) * 1_000_000 + int(fields[5]))
    if not ends:
        raise LoadError(f"pgbench logged no transaction ({log}): give it more seconds")
    began_us = min(end - took for end, took in zip(ends, latencies, strict=True))
    began_us += warm_seconds * 1_000_000
    counts: dict[int, int] = {}
    sums: dict[int, float] = {}
    for end, took in zip(ends, latencies, strict=True):
        second = (end - began_us) // 1_000_000
        counts[second] = counts.get(second, 0) + 1
        sums[second] = sums.get(second, 0.0) + took / 1000
    return began_us / 1e6, max(ends) / 1e6, counts, sums
