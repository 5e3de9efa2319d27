"""pgbench runs in the guest, and what they measured.

Latencies are from pgbench's own log of each transaction.
"""

import re
import time
from dataclasses import dataclass

from demo.postgres import AS_POSTGRES, DATABASE
from demo.vm import Command, Vm, VmError

SCRIPTS = {"select-only": "-S", "simple-update": "-N", "tpcb-like": "-b tpcb-like"}
PROGRESS_SECONDS = 2
LATE_SECONDS = 120  # for requests that hang while a drive is being given up
# A log line per select would itself be work for the guest; one in ten is enough for a percentile.
LOG_SHARE = {"select-only": 0.1, "simple-update": 1, "tpcb-like": 1}
LOGS = "/tmp/pgbench"


@dataclass(frozen=True)
class Result:
    script: str
    transactions: int
    tps: float
    latency_ms_mean: float
    latency_ms_p99: float
    seconds: float  # from the first command to the last answer


class Run:
    """A pgbench that is running; `finish` waits for its end."""

    def __init__(self, vm: Vm, script: str, clients: int, seconds: int, on_tps):
        self.vm = vm
        self.script = script
        self.seconds = seconds
        self.on_tps = on_tps
        self.vm.check(f"rm -rf {LOGS} && install -d -o postgres {LOGS}")
        self.begin = time.monotonic()
        # -n: pgbench would empty its history first, against which the balances are checked
        self.command: Command = vm.spawn(
            f"{AS_POSTGRES} pgbench -n {SCRIPTS[script]} -c {clients} -j 2 -T {seconds} "
            f"-P {PROGRESS_SECONDS} -l --log-prefix={LOGS}/log --sampling-rate={LOG_SHARE[script]} "
            f"{DATABASE}",
            self.on_line,
        )

    def on_line(self, line: str) -> None:
        progress = re.match(r"progress: [\d.]+ s, ([\d.]+) tps", line)
        if progress:
            self.on_tps(float(progress[1]))

    @property
    def running(self) -> bool:
        return self.command.running

    def finish(self) -> Result:
        output = self.command.wait(self.seconds + LATE_SECONDS)
        took = time.monotonic() - self.begin
        if output.rc != 0:
            raise VmError(f"pgbench {self.script} failed:\n{output.text[-800:]}")
        return Result(
            script=self.script,
            transactions=int(said(output.text, r"actually processed: (\d+)")),
            tps=float(said(output.text, r"tps = ([\d.]+)")),
            latency_ms_mean=float(said(output.text, r"latency average = ([\d.]+) ms")),
            latency_ms_p99=self.latency_ms_p99(),
            seconds=took,
        )

    def latency_ms_p99(self) -> float:
        """The log's third field is the transaction's latency in microseconds."""
        log = self.vm.check(f"cut -d ' ' -f 3 {LOGS}/log*", timeout=120)
        latencies = sorted(int(field) for field in log.split() if field.isdigit())
        if not latencies:
            raise VmError(f"pgbench {self.script} logged no transaction: give it more SECONDS_")
        return latencies[len(latencies) * 99 // 100] / 1000


def said(text: str, pattern: str) -> str:
    found = re.search(pattern, text)
    if not found:
        raise VmError(f"pgbench did not say {pattern}:\n{text[-800:]}")
    return found[1]
