"""PostgreSQL 15 in the guest, with its data on an XFS on the Ashlar disk.

Durability is PostgreSQL's default: fsync, full_page_writes and synchronous_commit are on. Data
checksums are on as well, so that a block which comes back wrong is noticed.
"""

from demo.vm import Vm, VmError

DATA = "/data/pg"
DATABASE = "pgbench"
AS_POSTGRES = "setpriv --reuid=postgres --regid=postgres --clear-groups"
MUST_BE_ON = ["fsync", "full_page_writes", "synchronous_commit", "data_checksums"]


class Postgres:
    def __init__(self, vm: Vm, disk: str = "/dev/vda"):
        self.vm = vm
        self.disk = disk

    def create(self) -> None:
        """File system, database cluster, running server."""
        self.vm.check(f"mkfs.xfs -q {self.disk} && mount -t xfs {self.disk} /data", timeout=120)
        self.vm.check(
            f"mkdir {DATA} && chown postgres: {DATA} && install -d -o postgres /run/postgresql && "
            f"{AS_POSTGRES} initdb --data-checksums --auth=trust {DATA} && "
            f"echo \"listen_addresses = ''\" >>{DATA}/postgresql.conf",
            timeout=300,
        )
        self.start()
        off = [name for name in MUST_BE_ON if self.sql(f"SHOW {name}", database="postgres") != "on"]
        if off:
            raise VmError(f"PostgreSQL runs without {', '.join(off)}: the demo would prove nothing")

    def start(self, options: str = "") -> None:
        self.vm.check(
            f"{AS_POSTGRES} pg_ctl --wait --timeout=120 -D {DATA} -l {DATA}/log -o '{options}' "
            "start >/dev/null"
            f" || {{ tail {DATA}/log; false; }}",
            timeout=150,
        )

    def stop(self) -> None:
        self.vm.check(f"{AS_POSTGRES} pg_ctl --wait --timeout=120 -D {DATA} stop", timeout=150)

    def restart_cold(self) -> None:
        """Nothing stays in the guest's memory: what is read next comes from the disk."""
        self.stop()
        self.vm.check(
            f"umount /data && echo 3 >/proc/sys/vm/drop_caches && mount -t xfs {self.disk} /data"
        )
        self.start()

    def load(self, scale: int, on_line, seconds: float) -> None:
        command = (
            f"{AS_POSTGRES} createdb {DATABASE} && {AS_POSTGRES} pgbench -i -s {scale} {DATABASE}"
        )
        output = self.vm.spawn(command, on_line).wait(seconds)
        if output.rc != 0:
            raise VmError(f"pgbench could not fill the database:\n{output.text[-600:]}")

    def sql(self, query: str, database: str = DATABASE, timeout: float = 120) -> str:
        """One value, or one row with | between its values."""
        return self.vm.check(f'{AS_POSTGRES} psql -At -d {database} -c "{query}"', timeout).strip()

    def balances(self) -> tuple[int, int, int, int, int]:
        """Sums over accounts, branches, tellers and history, and the number of rows in history."""
        row = self.sql(
            "SELECT (SELECT sum(abalance) FROM pgbench_accounts),"
            " (SELECT sum(bbalance) FROM pgbench_branches),"
            " (SELECT sum(tbalance) FROM pgbench_tellers),"
            " (SELECT coalesce(sum(delta), 0) FROM pgbench_history),"
            " (SELECT count(*) FROM pgbench_history)",
            timeout=600,
        )
        accounts, branches, tellers, history, rows = map(int, row.split("|"))
        return accounts, branches, tellers, history, rows

    def amcheck(self, seconds: float) -> None:
        """Every table and index, and that each row is found through its index."""
        self.vm.check(
            f"{AS_POSTGRES} pg_amcheck --install-missing --heapallindexed --parent-check "
            f"--jobs=2 {DATABASE}",
            timeout=seconds,
        )

    def checksums(self, seconds: float) -> None:
        """Every block of the data directory; the server must be stopped."""
        self.vm.check(f"{AS_POSTGRES} pg_checksums --check -D {DATA}", timeout=seconds)
