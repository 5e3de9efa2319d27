"""What a volume gives through NVMe/TCP, NBD and FUSE, beside others' targets: a benchmark, no test.

    python3 -m tests.ways_in [ROUNDS]          # beside qemu-storage-daemon, on this machine
    python3 -m tests.ways_in nvmet [ROUNDS]    # beside Linux's NVMe/TCP target, in a guest

Targets run on CPU 0 (Linux's own where packets come in), and who asks on CPU 1: on a machine that
is idle otherwise. All take turns, round after round; a ratio is that of one turn. It wants `cargo
build --release -p ashlar-control`, `cargo build --release -p xtask --examples`, and root for FUSE.

RAID 5 of drives of memory here, without redundancy there: a file in memory (`aio=threads`), brd.
"""

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from demo import child
from tests.rig import BINARY, CHECKOUT, Rig, rig
from tests.test_nvme import SECONDS_MAX, TOOLS, Guest
from tests.test_nvme_tcp import free_port

NVME_IO = CHECKOUT / "target/release/examples/nvme_tcp_io"
NQN = "nqn.2026-01.example:ways-in"
SECONDS = 3
DEPTHS = (1, 32, 127)
MIB = 256  # that are read
GUEST_MIB = 64  # the same, in a guest
FIO_DEPTHS = (1, 32)
OURS, THEIRS = "ashlar", "other"
NVMET = f"""set -e; modprobe nvmet-tcp; modprobe brd rd_nr=1 rd_size=262144
busybox ip link set lo up; mount -t configfs none /sys/kernel/config
cd /sys/kernel/config/nvmet; mkdir subsystems/{NQN}; mkdir subsystems/{NQN}/namespaces/1 ports/1
echo 1 > subsystems/{NQN}/attr_allow_any_host
echo /dev/ram0 > subsystems/{NQN}/namespaces/1/device_path
echo 1 > subsystems/{NQN}/namespaces/1/enable
cd ports/1; echo tcp > addr_trtype; echo ipv4 > addr_adrfam
echo 127.0.0.1 > addr_traddr; echo 4420 > addr_trsvcid
ln -s /sys/kernel/config/nvmet/subsystems/{NQN} subsystems/{NQN}"""


class Table:
    """Requests a second, by what was asked and of whom, a turn after the other."""

    def __init__(self):
        self.rows: dict[str, dict[str, list[float]]] = {}

    def add(self, row: str, whose: str, iops: float) -> None:
        self.rows.setdefault(row, {}).setdefault(whose, []).append(iops)
        print(f"{row}, {whose}: {iops / 1e3:.1f} k", flush=True)

    def print(self) -> None:
        for row, found in self.rows.items():
            cells = []
            for whose, turns in found.items():
                least, most = min(turns) / 1e3, max(turns) / 1e3
                median = statistics.median(turns) / 1e3
                cells.append(f"{whose} {median:.1f} k ({least:.1f}–{most:.1f})")
            if THEIRS in found:
                ratios = [a / b for a, b in zip(found[OURS], found[THEIRS], strict=True)]
                cells.append(f"ratio {min(ratios):.2f}–{max(ratios):.2f}")
            print(f"{row}: {', '.join(cells)}")


def iops_of_client(said: str) -> float:
    """Of what `nvme_tcp_io` says: "read depth 1: 14728 IOPS, …"."""
    return float(said.split(": ")[1].split()[0])


def fio(*words: str) -> float:
    command = [
        "taskset", "-c", "1", "fio", "--name=x", "--direct=1", "--bs=4k", f"--size={MIB}M",
        f"--runtime={SECONDS}", "--time_based", "--ramp_time=1", "--output-format=json", *words,
    ]  # fmt: skip
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    return job["read"]["iops"] + job["write"]["iops"]


def storage_daemon(made: Rig) -> tuple[str, Path]:
    """qemu-storage-daemon with a file for each way in: the NBD export, and the file by FUSE."""
    directory = Path("/dev/shm") / made.directory.name
    directory.mkdir()
    made.cleanup.callback(directory.rmdir)
    command = ["taskset", "-c", "0", "qemu-storage-daemon"]
    for name in ("nbd", "fuse"):
        backing = directory / name
        backing.write_bytes(os.urandom(MIB << 20))
        os.truncate(backing, 1 << 30)
        made.cleanup.callback(backing.unlink)
        command += ["--blockdev", f"driver=file,filename={backing},node-name={name},aio=threads"]
    socket, file = made.directory / "theirs.sock", made.directory / "theirs"
    file.touch()
    command += ["--nbd-server", f"addr.type=unix,addr.path={socket}"]
    command += ["--export", "nbd,id=n,node-name=nbd,name=x,writable=on"]
    command += ["--export", f"fuse,id=f,node-name=fuse,mountpoint={file},writable=on"]
    process = child.start(command)
    made.cleanup.callback(child.stop, process, SECONDS_MAX)
    deadline = time.monotonic() + SECONDS_MAX
    while not (socket.exists() and file.stat().st_size):
        assert process.poll() is None and time.monotonic() < deadline, "it does not start"
        time.sleep(0.1)
    return f"nbd+unix:///x?socket={socket}", file


def beside_storage_daemon(rounds: int) -> None:
    with rig() as made:
        engine, table = made.engine, Table()
        names = [f"d{number}" for number in range(5)]
        for name in names:
            engine.attach_drive(name, "ram:512M")
        engine.create_array("a", names, level="5")
        engine.create_volume("v", "a", 1 << 30)

        port = free_port()
        at = ("--listen", f"127.0.0.1:{port}", "--nqn", NQN)
        engine.ashlar("export", "create", "t", "--volume", "v", "--kind", "nvme-tcp", *at)
        for _ in range(rounds):
            for depth in DEPTHS:
                words = [f"127.0.0.1:{port}", NQN, "1", depth, SECONDS, "read", MIB]
                command = [str(NVME_IO), *map(str, words)]
                said = subprocess.check_output(command, text=True, timeout=60)
                table.add(f"nvme-tcp read, depth {depth}", OURS, iops_of_client(said))
        engine.ashlar("export", "delete", "t", "--force")

        socket, file = made.directory / "ours.sock", made.directory / "ours"
        for name, kind, path in [("b", "nbd", socket), ("f", "fuse", file)]:
            words = ("--volume", "v", "--kind", kind, "--path", str(path))
            engine.ashlar("export", "create", name, *words)
            made.cleanup.callback(engine.ashlar, "export", "delete", name, "--force")
        their_nbd, their_file = storage_daemon(made)
        ways = {
            "nbd": {OURS: f"nbd+unix:///b?socket={socket}", THEIRS: their_nbd},
            "fuse": {OURS: file, THEIRS: their_file},
        }
        option = {"nbd": "--ioengine=nbd --uri=", "fuse": "--ioengine=io_uring --filename="}
        for _ in range(rounds):
            for way, work in [(w, r) for w in ways for r in ("randread", "randwrite")]:
                for depth in FIO_DEPTHS:
                    for whose, place in ways[way].items():
                        words = f"{option[way]}{place} --rw={work} --iodepth={depth}".split()
                        table.add(f"{way} {work}, depth {depth}", whose, fio(*words))
        by_uring = Path("/sys/module/fuse/parameters/enable_uring")
        print(f"FUSE by io_uring: {by_uring.read_text().strip() if by_uring.exists() else 'N'}")
        table.print()


def beside_linux(rounds: int) -> None:
    """In a guest, of whatever speed it is here: without KVM each system call is emulated."""
    with contextlib.ExitStack() as cleanup:
        made, table = Guest(cleanup, programs=(BINARY, NVME_IO)), Table()
        made.vm.check(NVMET, SECONDS_MAX)
        made.start_daemon("state")
        for number in range(3):
            made.ashlar(f"drive attach ram:96M --name r{number}")
        made.ashlar("array create a --level 5 --drives r0,r1,r2")
        made.ashlar("volume create v --array a --size 128M")
        at = f"--listen 127.0.0.1:4421 --nqn {NQN}"
        made.ashlar(f"export create v --volume v --kind nvme-tcp {at}")
        for _ in range(rounds):
            for depth in DEPTHS:
                for whose, port in [(OURS, 4421), (THEIRS, 4420)]:
                    words = f"127.0.0.1:{port} {NQN} 1 {depth} {SECONDS} read {GUEST_MIB}"
                    said = made.vm.check(f"{TOOLS}/nvme_tcp_io {words}", SECONDS_MAX)
                    table.add(f"nvme-tcp read, depth {depth}", whose, iops_of_client(said))
        print(f"Linux {made.vm.check('uname -r').strip()}, accelerated by {made.vm.accel}")
        table.print()


if __name__ == "__main__":
    words = sys.argv[1:]
    beside = beside_linux if words[:1] == ["nvmet"] else beside_storage_daemon
    rounds = [int(word) for word in words if word != "nvmet"]
    beside(*rounds or [3])
