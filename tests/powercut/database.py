"""PostgreSQL in the guest as the writer: small memory, many checkpoints, sessions that commit.

The server keeps little in memory, so pages go to the disk all the time and not only at checkpoints:
with `full_page_writes` off, each of them is one that a torn write would spoil for good.
"""

from pathlib import Path

from demo.postgres import AS_POSTGRES, DATA, DATABASE, Postgres
from demo.vm import Command, Vm
from tests.powercut.ledger import CONTENT, SCHEMA, SESSIONS, Ledger, session_script

PSQL = f"{AS_POSTGRES} psql -AtX -d {DATABASE}"
TEMPLATE = "/tmp/pg"  # in the saved guest's memory: a fresh database is a copy
CONFIGURATION = """
listen_addresses = ''
shared_buffers = 2MB
checkpoint_timeout = 30s
min_wal_size = 8MB
max_wal_size = 32MB
autovacuum_naptime = 2s
recovery_init_sync_method = syncfs
"""
# A checkpoint makes WAL before it useless for recovery: what it wrote must be whole.
CHECKPOINTS = "while :; do echo CHECKPOINT\\;; sleep 0.7; echo VACUUM account\\;; sleep 0.7; done"
FIRST_COMMIT_SECONDS = 90
CHECK_SECONDS = 300


class Database:
    """What the ledger says must be in the database."""

    name = "PostgreSQL"
    unit = "commits"

    def __init__(self, seed: int):
        self.seed = seed
        self.ledger = Ledger(seed)
        self.odd: list[str] = []
        self.sessions: list[Command] = []

    def guest_options(self, work: Path) -> list[str]:
        return []

    def prepare_guest(self, vm: Vm) -> None:
        """What all rounds need is put into the guest's memory before it is saved."""
        vm.check(
            f"modprobe xfs && install -d -o postgres /run/postgresql {TEMPLATE} && {AS_POSTGRES} "
            f"initdb --no-sync --data-checksums --wal-segsize=4 --auth=trust {TEMPLATE}",
            timeout=CHECK_SECONDS,
        )
        vm.check(f"cat >>{TEMPLATE}/postgresql.conf <<'end'\n{CONFIGURATION}\nend")
        # From here on as in a round, so that every program has been read once.
        vm.check("mount -t tmpfs tmpfs /data")
        self.copy_template(vm)
        postgres = Postgres(vm)
        postgres.start()
        vm.check(f"{AS_POSTGRES} createdb {DATABASE}")
        vm.check(f"{PSQL} -q -v ON_ERROR_STOP=1 <<'end'\n{SCHEMA}\nend", CHECK_SECONDS)
        self.wrong(vm)
        postgres.stop()
        vm.check(f"rm -rf {TEMPLATE} {DATA}/log && cp -a {DATA} {TEMPLATE} && umount /data")

    def copy_template(self, vm: Vm) -> None:
        vm.check(f"cp -a {TEMPLATE} {DATA} && sync", timeout=CHECK_SECONDS)

    def create(self, vm: Vm, disk: str) -> None:
        self.ledger = Ledger(self.seed)
        vm.check(f"mkfs.xfs -q {disk} && mount -t xfs {disk} /data", timeout=120)
        self.copy_template(vm)

    def recover(self, vm: Vm, disk: str) -> None:
        vm.check(f"mount -t xfs {disk} /data", timeout=120)

    def start(self, vm: Vm, full_page_writes: bool) -> None:
        word = "on" if full_page_writes else "off"
        Postgres(vm).start(f"-c full_page_writes={word}")

    def wrong(self, vm: Vm) -> list[str]:
        """Everything that is not as it must be."""
        content = vm.check(f"{PSQL} <<'end'\n{CONTENT}\nend", CHECK_SECONDS)
        return self.ledger.judge(content)

    def deep_wrong(self, vm: Vm) -> list[str]:
        """Every page of every table and index: checksums, order, and that each row is found."""
        output = vm.run(
            f"{AS_POSTGRES} pg_amcheck --heapallindexed --parent-check --jobs=2 {DATABASE}",
            CHECK_SECONDS,
        )
        return [] if output.rc == 0 else [f"pg_amcheck: {output.text[-2000:]}"]

    def write(self, vm: Vm) -> None:
        """Starts the sessions."""
        self.odd = []
        next_of = [self.ledger.said[session] + 1 for session in range(SESSIONS)]
        self.sessions = [
            vm.spawn(session_script(self.seed, session, first, PSQL), self.hear)
            for session, first in enumerate(next_of)
        ]
        self.sessions.append(vm.spawn(f"({CHECKPOINTS}) | {PSQL} -q", self.hear))

    def hear(self, line: str) -> None:
        if not self.ledger.take(line):
            self.odd.append(line)

    @property
    def said(self) -> int:
        return self.ledger.said.total()

    def wait_end(self) -> None:
        """Hears what was on its way when the guest died."""
        for session in self.sessions:
            session.reader.join()
