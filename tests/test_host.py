"""Goal: PostgreSQL on a volume of its own host loses no commit that it has told of, whenever the
daemon is killed and its drives lose what they have not flushed, also with one of them out.

Method: XFS on a loop device on a file by FUSE, on RAID 5 of drives with a volatile cache; sessions
that insert one row after the other and remember the last that was acknowledged; a drive is pulled
in the middle of them, and comes back a round later; SIGKILL. Takes root, PostgreSQL and xfsprogs on
this host; skipped where one is missing, but not in CI.
"""

import contextlib
import os
import random
import shutil
import subprocess
import threading
import time
import unittest
from pathlib import Path

from tests.rig import Rig, rig

VOLUME_BYTES = 640 << 20  # XFS wants 300 MiB
SESSIONS = 4
ROUNDS = 3
PULLED_IN, PULLED = 1, "d1"
# Before the daemon is killed: fewer would mean little.
ROWS_MIN = 5
ROWS_SECONDS = 60
USER = "postgres"
PROGRAMS = sorted(Path("/usr/lib/postgresql").glob("*/bin"))
MISSING = [
    what
    for what, there in [
        ("root", os.geteuid() == 0),
        ("/dev/fuse", Path("/dev/fuse").exists()),
        ("postgresql", bool(PROGRAMS)),
        ("xfsprogs", shutil.which("mkfs.xfs")),
    ]
    if not there
]


def run(*words: str, check: bool = True, user: str | None = None) -> str:
    done = subprocess.run(
        words, capture_output=True, text=True, timeout=60, user=user, group=user, cwd="/"
    )
    if check and done.returncode:
        raise AssertionError(f"{' '.join(words)}: {done.stderr}{done.stdout}")
    return done.stdout.strip()


class Process:
    """One of PostgreSQL, whose number another may have by the time that it is to be killed."""

    def __init__(self, pid: int):
        self.pid, self.began = pid, began(pid)

    def is_there(self) -> bool:
        return self.began is not None and began(self.pid) == self.began

    def children(self) -> list:
        if not self.is_there():
            return []
        found = run("ps", "--ppid", str(self.pid), "-o", "pid=", check=False).split()
        return [Process(int(pid)) for pid in found]

    def kill(self) -> None:
        if self.is_there():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, 9)


def began(pid: int) -> str | None:
    """When a process of PostgreSQL began, by the kernel's clock; None: there is none."""
    with contextlib.suppress(OSError):
        if os.readlink(f"/proc/{pid}/exe").startswith("/usr/lib/postgresql/"):
            # Its name, which comes before, may have any bytes.
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


class Database:
    """PostgreSQL on a mounted volume; reached by a socket beside the mount."""

    def __init__(self, made: Rig):
        self.directory = made.directory
        self.disk = made.directory / "pg.disk"
        self.mount = made.directory / "mnt"
        self.data = self.mount / "data"
        self.device, self.postmaster = "", None
        made.directory.chmod(0o755)
        self.mount.mkdir()
        (made.directory / "pg").mkdir()
        shutil.chown(made.directory / "pg", USER, USER)

    def program(self, name: str, *words: str, check: bool = True) -> str:
        return run(str(PROGRAMS[-1] / name), *words, check=check, user=USER)

    def format(self) -> None:
        self.attach()
        run("mkfs.xfs", "-q", self.device)
        run("mount", self.device, str(self.mount))
        self.data.mkdir(mode=0o700)
        shutil.chown(self.data, USER, USER)
        self.program("initdb", "-D", str(self.data), "-A", "trust")
        self.start()
        self.ask("CREATE TABLE t (session int, number int, PRIMARY KEY (session, number))")

    def attach(self) -> None:
        words = ["--find", "--show", "--direct-io=on", str(self.disk)]
        self.device = run("losetup", *words)

    def start(self) -> None:
        options = f"-c listen_addresses= -k {self.directory}/pg"
        log = str(self.directory / "pg/log")
        try:
            self.program("pg_ctl", "-D", str(self.data), "-w", "-l", log, "-o", options, "start")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{Path(log).read_text()[-2000:]}") from None
        # Read now: once the daemon is killed, so is the file.
        self.postmaster = Process(int((self.data / "postmaster.pid").read_text().split()[0]))

    def psql(self) -> list[str]:
        words = ["-h", f"{self.directory}/pg", "-d", "postgres", "-qAtX", "-v", "ON_ERROR_STOP=1"]
        return [str(PROGRAMS[-1] / "psql"), *words]

    def ask(self, text: str) -> str:
        return run(*self.psql(), "-c", text, user=USER)

    def again(self) -> None:
        """As after a power cut: nothing of what was mounted is believed."""
        self.end()
        self.attach()
        run("mount", self.device, str(self.mount))
        # Who it names has been killed, whether somebody has noted that or not.
        for lock in [self.data / "postmaster.pid", self.directory / "pg/.s.PGSQL.5432.lock"]:
            lock.unlink(missing_ok=True)
        self.start()

    def end(self) -> None:
        if self.postmaster:
            for process in [self.postmaster, *self.postmaster.children()]:
                process.kill()
        self.postmaster = None
        # What a process has open is let go when it has ended.
        deadline = time.monotonic() + 20
        while self.device and time.monotonic() < deadline:
            run("umount", str(self.mount), check=False)
            # A look at the file system itself fails, mounted or not.
            if f" {self.mount} " not in Path("/proc/mounts").read_text():
                break
            time.sleep(0.1)
        if self.device:
            run("losetup", "--detach", self.device, check=False)
        self.device = ""


class Session(threading.Thread):
    """Inserts one row after the other, until the database is gone."""

    def __init__(self, database: Database, session: int, first: int):
        super().__init__(daemon=True)
        self.session, self.acknowledged = session, first - 1
        pipe = subprocess.PIPE
        self.psql = subprocess.Popen(
            database.psql(), stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, user=USER,
            group=USER, text=True, bufsize=1, cwd="/",
        )  # fmt: skip

    def run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                number = self.acknowledged + 1
                insert = f"INSERT INTO t VALUES ({self.session}, {number}) RETURNING number;\n"
                self.psql.stdin.write(insert)
                if self.psql.stdout.readline().strip() != str(number):
                    return
                self.acknowledged = number


@unittest.skipIf(
    MISSING and os.environ.get("ASHLAR_CI") != "1", f"this host has not: {', '.join(MISSING)}"
)
class Host(unittest.TestCase):
    def setUp(self):
        self.assertEqual(MISSING, [], "this host has not got them")

    def test_postgresql_loses_no_commit_when_the_daemon_is_killed(self):
        chance = random.Random(1)
        with rig() as made:
            made.attach(*[f"d{number}" for number in range(5)], kind="lossy:")
            made.engine.create_array("a", [f"d{number}" for number in range(5)], level="5")
            made.engine.create_volume("v", "a", VOLUME_BYTES)
            database = Database(made)
            words = ["export", "create", "pg", "--volume", "v", "--kind", "fuse"]
            made.engine.ashlar(*words, "--path", str(database.disk))
            # A daemon that is killed leaves its mount.
            made.cleanup.callback(run, "umount", "--lazy", str(database.disk), check=False)
            made.cleanup.callback(database.end)
            database.format()
            last = [0] * SESSIONS
            for turn in range(ROUNDS):
                made_now = enumerate(last)
                sessions = [Session(database, number, it + 1) for number, it in made_now]
                for session in sessions:
                    session.start()
                deadline = time.monotonic() + ROWS_SECONDS
                while any(it.acknowledged <= last[it.session] + ROWS_MIN for it in sessions):
                    self.assertLess(time.monotonic(), deadline, "hardly anything was tried")
                    time.sleep(0.05)
                if turn == PULLED_IN:
                    made.engine.pull_drive(PULLED)
                    made.wait_state("degraded")
                time.sleep(1 + chance.random())
                made.engine.kill()
                for session in sessions:
                    session.join(30)
                    self.assertFalse(session.is_alive())
                made.engine.start()
                if turn == PULLED_IN + 1:
                    made.attach(PULLED, kind="lossy:")
                    made.wait_state("optimal")
                database.again()
                for number, session in enumerate(sessions):
                    told = session.acknowledged
                    found = database.ask(
                        f"SELECT count(*), coalesce(max(number), 0) FROM t WHERE session = {number}"
                    )
                    count, most = map(int, found.split("|"))
                    self.assertEqual(count, most)
                    # One more may have been committed, whose answer nobody heard.
                    self.assertIn(most, (told, told + 1))
                    last[number] = most
            database.ask("CREATE EXTENSION amcheck")
            socket = ("-h", f"{database.directory}/pg")
            database.program("pg_amcheck", *socket, "-d", "postgres", "--heapallindexed")
            made.wait_in_place()
            made.scrub_is_clean()


if __name__ == "__main__":
    unittest.main()
