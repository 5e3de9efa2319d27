"""A QEMU virtual machine with vhost-user-blk disks, driven from Python.

    with Vm(image, vhost_sockets=["/run/ashlar/pg.sock"], log=Path("console.log")) as vm:
        rc, text = vm.run("fio --filename=/dev/vda …", timeout=120)
        load = vm.spawn("pgbench …", on_line=print)
        …
        rc, text = load.wait(60)

The disks are /dev/vda, /dev/vdb, … in the order of `vhost_sockets`. A disk's socket may go away and
come back: QEMU connects again, and the guest's requests wait for it.

A guest that runs can be saved to a file, and started from it any number of times, each in a second
or two: `Vm(…, saved=file)`. Disks under test come to such a guest later, by `plug`.

One with `movable=True` goes on in another QEMU, while it runs, on other sockets of the same disks:
`vm.move_to(sockets)`.

Commands run over virtio-serial ports (`guest/agent.sh`), each port one command at a time, so up to
COMMANDS_MAX run at once. One more port is kept for ending the commands of the others. The channels
are socket pairs made here: no port numbers, no files, nothing to clean up.

Invariant: when `close` (or the `with` block) is over, QEMU is gone, however it ended.
"""

import base64
import contextlib
import json
import os
import queue
import re
import secrets
import select
import shlex
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

from demo import child
from demo.guest_image import GuestImage

QEMU = "qemu-system-x86_64"
COMMANDS_MAX = 7
BOOT_SECONDS_MAX = 120  # under emulation on a busy machine; 3 to 5 when it is quiet
# Of that, until the guest's first program runs. No driver of a disk under test is loaded before, so
# an emulated guest that hangs or panics until then says nothing about these, and boots again. (That
# is rare: it was seen once in CI, with QEMU 7.2.)
FIRST_PROGRAM_SECONDS_MAX = 60
BOOTS_MAX = 3
MEMORY_MAX = "4G"  # with all that is plugged
MEMORY_KIB = "busybox awk '/^MemTotal/ {print $2}' /proc/meminfo"
KVM_BOOT_SECONDS_MAX = 15  # 1 to 2 where KVM works; where it does not, some guests hang for ever
RECONNECT_SECONDS = 1
POLL_SECONDS = 0.02
ASK_AGAIN_SECONDS = 0.5
STILL_AT_IT = "in the process of unplug"  # as QEMU refuses to unplug what it unplugs already
LOOK_SECONDS = 1  # between two looks whether a guest that says nothing is still there
FIRST_PROGRAM = b"the first program of the guest runs"  # as guest/initramfs.sh says
SAVE_BYTES_PER_SEC = 8 << 30  # as fast as it goes: nobody waits for this guest
# Of a guest that is moved: as fast as it goes, and its last second is enough under emulation.
MOVING = {"max-bandwidth": SAVE_BYTES_PER_SEC, "downtime-limit": 1000}
COPYING_BYTES_PER_SEC = 1 << 20  # of a move that never ends
OUTPUT_BYTES_MAX = 256 << 20
FETCH_SECONDS_MAX = 1800  # 12 MB/s were seen under emulation on a busy machine

# Without ERMS Linux clears pages by words and not by single bytes: a soft lockup that was seen now
# and then under emulation stood in the byte loop. QEMU 10 offers FSRM too, and with that alone the
# memmove of Linux 6.1 does not end.
CPU = {"kvm": "host", "tcg": "max,-erms,-fsrm"}

# `max` under emulation offers five-level page tables, which cost it a fifth more per page walk.
# The guest is thrown away, so what protects it from itself only slows it down.
KERNEL_OPTIONS = (
    "console=ttyS0 quiet panic=-1 no5lvl mitigations=off nokaslr audit=0 random.trust_cpu=on "
    "tsc=reliable no_timer_check rcupdate.rcu_expedited=1"
)


class VmError(Exception):
    """The machine did not start, is gone, or a command in it failed; the message says which."""


class CommandTimeout(VmError):
    """A command ran past its time and was killed with its children."""


class Output(NamedTuple):
    rc: int
    stdout: bytes  # and stderr, in the order written

    @property
    def text(self) -> str:
        return self.stdout.decode(errors="replace")


class Vm:
    """One virtual machine. Use it as a context manager, or call `start` and `close`."""

    def __init__(
        self,
        image: GuestImage,
        vhost_sockets: list[str | Path] = (),
        memory: str | None = "1G",  # None: `qemu_options` have it
        cpus: int = 2,
        accel: str | None = None,  # "kvm", "tcg", or found out by trying
        queues: int | None = None,  # of each disk; one per CPU if not given
        log: Path | None = None,  # the guest's console
        qemu_options: list[str] = (),
        kernel_options: str = "",
        saved: Path | None = None,  # goes on from there; made by `save` of a Vm with these options
        slots: int = 0,  # for disks to `plug`
        huge_pages: bool = False,  # of 2 MiB; the host has to have them to spare
        memory_path: Path | None = None,  # its memory is a file there, or in that directory
        memory_slots: int = 0,  # for memory to `plug_memory`
        movable: bool = False,
        qemu: str = QEMU,
    ):
        self.image = image
        self.vhost_sockets = [str(path) for path in vhost_sockets]
        self.memory = memory
        self.cpus = cpus
        self.accel = accel
        self.queues = queues or cpus
        self.log = Path(log or os.devnull)
        self.qemu_options = list(qemu_options)
        self.kernel_options = kernel_options
        self.saved = saved
        self.slots = slots
        self.huge_pages = huge_pages
        self.memory_path = memory_path
        self.memory_slots = memory_slots
        self.movable = movable
        self.program = qemu
        self.far_ports: list[socket.socket] = []  # of one that is movable: for the next QEMU
        self.qemu: subprocess.Popen | None = None
        self.boot_seconds: float | None = None

    def __enter__(self) -> "Vm":
        return self.start()

    def __exit__(self, *error) -> None:
        self.close()

    def start(self, seconds: float = BOOT_SECONDS_MAX) -> "Vm":
        """Boots, and returns when the guest takes commands."""
        self.launch()
        return self.wait_up(seconds)

    def launch(self) -> None:
        """QEMU runs, and the guest boots: several do so at once."""
        assert self.qemu is None, "a Vm starts once"
        if self.accel is None:
            self.accel = working_accel(self.image)
        self.launched = time.monotonic()
        self.log_begins = self.log.stat().st_size if self.log.is_file() else 0
        pairs = [socket.socketpair() for _ in range(COMMANDS_MAX + 1)]
        self.far_ports = [far for _, far in pairs]
        try:
            self.qemu, self.qmp_channel = self.launch_qemu([])
        finally:
            if not self.movable:
                for far in self.far_ports:
                    far.close()
        self.control, *self.free_ports = [Port(near, self) for near, _ in pairs]

    def launch_qemu(self, options: list[str]) -> tuple[subprocess.Popen, "Qmp"]:
        near, far = socket.socketpair()
        ends = [end.fileno() for end in [far, *self.far_ports]]
        command = self.command_line(ends) + options
        try:
            with open(self.log, "ab") as log:
                qemu = child.start(command, pass_fds=ends, stdout=log, stderr=subprocess.PIPE)
        except FileNotFoundError:
            raise VmError(f"{self.program} is missing: run scripts/install.sh demo") from None
        finally:
            far.close()
        return qemu, Qmp(near)

    def wait_up(self, seconds: float = BOOT_SECONDS_MAX) -> "Vm":
        """Until the guest takes commands, `seconds` after it was launched at the latest."""
        try:
            if self.accel == "tcg" and self.log.is_file() and not self.saved:
                self.boot_again_if_stuck()
            deadline = self.launched + seconds
            if self.saved:
                self.wait_restored(deadline)
            else:
                for port in [self.control, *self.free_ports]:
                    port.wait_ready(deadline)
        except BaseException:
            self.close()
            raise
        self.ports: queue.Queue[Port] = queue.Queue()
        for port in self.free_ports:
            self.ports.put(port)
        self.boot_seconds = time.monotonic() - self.launched
        return self

    def boot_again_if_stuck(self) -> None:
        for _ in range(BOOTS_MAX - 1):
            deadline = self.launched + FIRST_PROGRAM_SECONDS_MAX
            while self.running:
                # also of one that is looked at late, as another was waited for first
                if FIRST_PROGRAM in self.log.read_bytes()[self.log_begins :]:
                    return
                if time.monotonic() > deadline:
                    break
                time.sleep(POLL_SECONDS)
            self.close()
            self.qemu = None
            self.launch()

    def wait_restored(self, deadline: float) -> None:
        while self.qmp("query-status")["status"] == "inmigrate":
            if time.monotonic() > deadline:
                raise VmError(f"the guest was not restored from {self.saved} in time")
            time.sleep(POLL_SECONDS)
        self.qmp("cont")

    def command_line(self, fds: list[int]) -> list[str]:
        """Disks under test sit in the first PCI slots, so that the guest names them vda, vdb, …"""
        qmp, *ports = fds
        accel = "kvm" if self.accel == "kvm" else "tcg,thread=multi"
        command = [
            self.program, "-nodefaults", "-no-user-config", "-no-reboot", "-nographic",
            "-machine", "q35", "-accel", accel, "-cpu", CPU[self.accel],
            "-smp", str(self.cpus), *self.memory_options(),
            "-kernel", str(self.image.kernel), "-initrd", str(self.image.initrd),
            "-append", f"{KERNEL_OPTIONS} {self.kernel_options}",
            "-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console",
            "-chardev", f"socket,id=qmp,fd={qmp}", "-mon", "chardev=qmp,mode=control",
        ]  # fmt: skip
        for number, path in enumerate(self.vhost_sockets):
            command += [
                "-chardev", f"socket,id=disk{number},path={path},reconnect={RECONNECT_SECONDS}",
                "-device", f"vhost-user-blk-pci,chardev=disk{number},addr={2 + number:#x},"
                f"num-queues={self.queues},queue-size=128",
            ]  # fmt: skip
        for number in range(self.slots):
            command += ["-device", f"pcie-root-port,id=slot{number},chassis={number + 1}"]
        if self.saved:
            command += ["-incoming", f"exec:cat {shlex.quote(str(self.saved))}"]
        root = f"file={self.image.root},format=raw,readonly=on,file.locking=off"
        command += [
            "-drive", f"if=none,id=root,{root}",
            "-device", "virtio-blk-pci,drive=root,serial=ashlar-guest,addr=0x1d",
            "-device", f"virtio-serial-pci,addr=0x1e,max_ports={len(ports) + 1}",
        ]  # fmt: skip
        for number, fd in enumerate(ports):
            command += [
                "-chardev", f"socket,id=port{number},fd={fd}",
                "-device", f"virtserialport,chardev=port{number},nr={number + 1}",
            ]  # fmt: skip
        return command + self.qemu_options

    def memory_options(self) -> list[str]:
        if self.memory is None:
            assert not (self.memory_path or self.huge_pages or self.memory_slots)
            return []
        slots = f",slots={self.memory_slots},maxmem={MEMORY_MAX}" if self.memory_slots else ""
        return [
            "-m", self.memory + slots,
            "-object", f"{self.memory_kind()},id=memory,size={self.memory},share=on",
            "-numa", "node,memdev=memory",
        ]  # fmt: skip

    def memory_kind(self) -> str:
        assert not (self.memory_path and self.huge_pages), "one kind of memory"
        if self.memory_path:
            return f"memory-backend-file,mem-path={self.memory_path}"
        pages = ",hugetlb=on,hugetlbsize=2M" if self.huge_pages else ""
        return f"memory-backend-memfd{pages}"

    def run(self, command: str, timeout: float = 60) -> Output:
        """Runs a shell script in the guest; `rc, text = vm.run(…)`."""
        return self.spawn(command).wait(timeout)

    def check(self, command: str, timeout: float = 60) -> str:
        """Runs a shell script that must succeed, and returns what it printed."""
        output = self.run(command, timeout)
        if output.rc != 0:
            last = "\n".join(output.text.strip().splitlines()[-12:])
            raise VmError(
                f"in the guest, `{command.strip()}` ended with status {output.rc}:\n{last}"
            )
        return output.text

    def spawn(self, command: str, on_line: Callable[[str], None] | None = None) -> "Command":
        """Starts a shell script in the guest; another thread hands `on_line` what it prints."""
        assert self.qemu is not None, "start the Vm first"
        try:
            port = self.ports.get_nowait()
        except queue.Empty:
            raise VmError(f"{COMMANDS_MAX} commands run in this guest already") from None
        return Command(self, port, command, on_line)

    def fetch(self, path: str, to: Path, seconds: float = FETCH_SECONDS_MAX) -> None:
        """Copies a file out of the guest. The channel takes any byte; the length is compared."""
        size = int(self.check(f"stat -L -c %s {shlex.quote(path)}"))
        with open(to, "wb") as file:
            command = Command(self, self.ports.get_nowait(), f"cat {shlex.quote(path)}", file=file)
            output = command.wait(seconds)
        if output.rc != 0 or to.stat().st_size != size:
            raise VmError(f"{path} of the guest came out as {to.stat().st_size} bytes of {size}")

    def cpu_threads(self) -> list[int]:
        """Thread of each virtual CPU, on the host."""
        return [cpu["thread-id"] for cpu in self.qmp("query-cpus-fast")]

    def qmp(self, command: str, **arguments):
        """One command of QEMU's monitor protocol."""
        return self.qmp_channel.call(command, arguments)

    def plug(self, slot: int, path: str | Path, seconds: float = 60) -> str:
        """Plugs a vhost-user-blk disk into a slot, and gives its name in the guest."""
        known = set(self.disks())
        address = {"type": "unix", "data": {"path": str(path)}}
        socket_of_disk = {"type": "socket", "data": {"addr": address, "server": False}}
        self.qmp("chardev-add", id=f"plugged{slot}", backend=socket_of_disk)
        self.qmp(
            "device_add", driver="vhost-user-blk-pci", id=f"disk{slot}", chardev=f"plugged{slot}",
            bus=f"slot{slot}", **{"num-queues": self.queues, "queue-size": 128},
        )  # fmt: skip
        deadline = time.monotonic() + seconds
        while not (new := set(self.disks()) - known):
            if time.monotonic() > deadline:
                raise VmError(f"the guest did not find the disk in slot {slot}")
            time.sleep(POLL_SECONDS)
        return new.pop()

    def plug_memory(self, slot: int, size_bytes: int) -> None:
        """More memory, which the guest uses for programs alone: so it can be unplugged again."""
        known = self.memory_bytes()
        self.qmp(
            "object-add", id=f"more{slot}", size=size_bytes, share=True,
            **{"qom-type": "memory-backend-memfd"},
        )  # fmt: skip
        self.qmp("device_add", driver="pc-dimm", id=f"dimm{slot}", memdev=f"more{slot}")
        online = "echo online_movable | tee $(grep -lx offline $blocks) >/dev/null; sleep 0.1"
        self.check(
            "blocks='/sys/devices/system/memory/memory*/state'; "
            f"until [ $({MEMORY_KIB}) -ge {(known + size_bytes) >> 10} ]; do {online}; done"
        )

    def unplug_memory(self, slot: int, seconds: float = 60) -> None:
        """The guest moves what is there elsewhere, and QEMU takes it away. What is being read into
        or written from at that moment cannot be moved: a busy guest is asked again and again."""
        count = len(self.qmp("query-memory-devices"))
        deadline = time.monotonic() + seconds
        while len(self.qmp("query-memory-devices")) == count:
            if time.monotonic() > deadline:
                raise VmError(f"the guest does not let go of the memory in slot {slot}")
            try:
                self.qmp("device_del", id=f"dimm{slot}")
            except VmError as error:
                if STILL_AT_IT not in str(error):
                    raise
            time.sleep(ASK_AGAIN_SECONDS)
        self.qmp("object-del", id=f"more{slot}")

    def memory_bytes(self) -> int:
        return int(self.check(MEMORY_KIB)) << 10

    def disks(self) -> list[str]:
        return self.check("ls /dev/vd?").split()

    def save(self, path: Path, seconds: float = 60) -> None:
        """Stops the guest where it is and writes all of it to a file. The Vm is over then."""
        self.qmp("stop")
        self.qmp("migrate-set-parameters", **{"max-bandwidth": SAVE_BYTES_PER_SEC})
        self.qmp("migrate", uri=f"exec:cat >{shlex.quote(str(path))}")
        deadline = time.monotonic() + seconds
        while (status := self.qmp("query-migrate")["status"]) != "completed":
            if status == "failed" or time.monotonic() > deadline:
                raise VmError(f"the guest could not be saved to {path}: {status}")
            time.sleep(POLL_SECONDS)
        self.close()

    def move_to(self, vhost_sockets: list[str | Path], seconds: float = 120) -> float:
        """Goes on in another QEMU with its disks there. How long the guest stood still for that, in
        seconds and as far as QEMU knows: its disks may come later."""
        with self.incoming(vhost_sockets, []) as (channel, there, qmp_there):
            self.qmp("migrate-set-parameters", **MOVING)
            self.qmp("migrate", uri=channel)
            found = self.wait_migrate("completed", seconds)
            deadline = time.monotonic() + seconds
            while qmp_there.call("query-status", {})["status"] != "running":
                if there.poll() is not None or time.monotonic() > deadline:
                    raise VmError("the guest does not run where it was moved to")
                time.sleep(POLL_SECONDS)
            left, self.qemu, self.qmp_channel = self.qemu, there, qmp_there
            child.kill(left)
            self.vhost_sockets = [str(path) for path in vhost_sockets]
        return found["downtime"] / 1000

    def fail_to_move(self, vhost_sockets: list[str | Path], when: str, seconds: float = 120) -> None:
        """Begins to move, and goes on here: given up while memory is copied ("copying"), when the
        guest was stopped for the rest of it ("stopped"), or before it ran there ("moved")."""
        copying = {"max-bandwidth": COPYING_BYTES_PER_SEC} if when == "copying" else MOVING
        with self.incoming(vhost_sockets, ["-S"]) as (channel, _, _):
            self.pause_before_switchover(when == "stopped")
            self.qmp("migrate-set-parameters", **copying)
            self.qmp("migrate", uri=channel)
            status = {"copying": "active", "stopped": "pre-switchover", "moved": "completed"}[when]
            self.wait_migrate(status, seconds)
            if when != "moved":
                self.qmp("migrate_cancel")
                self.wait_migrate("cancelled", seconds)
                self.pause_before_switchover(False)
        if when == "moved":
            self.qmp("cont")

    def pause_before_switchover(self, wanted: bool) -> None:
        capability = {"capability": "pause-before-switchover", "state": wanted}
        self.qmp("migrate-set-capabilities", capabilities=[capability])

    @contextlib.contextmanager
    def incoming(self, vhost_sockets: list[str | Path], options: list[str]):
        """Another QEMU that waits for the guest: where, its process and its monitor. It is ended
        again, unless it has become this guest's."""
        assert self.movable and not self.saved
        channel = self.log.with_name(f"move-{secrets.token_hex(4)}.sock")
        here, self.vhost_sockets = self.vhost_sockets, [str(path) for path in vhost_sockets]
        try:
            there, monitor = self.launch_qemu(["-incoming", f"unix:{channel}", *options])
        finally:
            self.vhost_sockets = here
        try:
            monitor.call("query-status", {})  # it has connected to its disks, and listens
            yield f"unix:{channel}", there, monitor
        finally:
            if self.qemu is not there:
                child.kill(there)

    def wait_migrate(self, wanted: str, seconds: float) -> dict:
        deadline = time.monotonic() + seconds
        while (found := self.qmp("query-migrate")).get("status") != wanted:
            if found.get("status") == "failed" or time.monotonic() > deadline:
                raise VmError(f"the guest does not move, it is not {wanted}: {found}")
            time.sleep(POLL_SECONDS)
        return found

    @property
    def running(self) -> bool:
        return self.qemu is not None and self.qemu.poll() is None

    def shutdown(self, seconds: float = 30) -> None:
        """Unmounts and powers off; kills QEMU if the guest does not get there."""
        if self.running:
            self.control.send(
                secrets.token_hex(8), "sync; umount -a -t xfs,ext4; busybox poweroff -f"
            )
            try:
                self.qemu.wait(seconds)
            except subprocess.TimeoutExpired:
                self.close()
                raise VmError(f"the guest did not power off within {seconds} s") from None
        self.close()

    def kill(self) -> None:
        """What a power cut is to the guest: nothing more is sent to the disks."""
        self.close()

    def close(self) -> None:
        if self.qemu is not None:
            child.kill(self.qemu)
        for far in self.far_ports:
            far.close()

    def complaint(self) -> str:
        """Why there is no guest, in QEMU's words or the console's."""
        if self.running:
            last = self.log.read_text(errors="replace")[-800:] if self.log.is_file() else ""
            return (
                f"the guest did not boot in time (accel {self.accel}); its console ended:\n{last}"
            )
        said = self.qemu.stderr.read().decode(errors="replace").strip()
        return f"QEMU ended: {said or 'it gave no reason'}"


class Port:
    """One channel to an agent in the guest."""

    def __init__(self, end: socket.socket, vm: Vm):
        self.end = end
        self.vm = vm

    def wait_ready(self, deadline: float) -> None:
        """The agent's first line. A guest that is not there yet says nothing."""
        said = b""
        while b"ready\n" not in said:
            self.end.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                more = self.end.recv(64)
            except (TimeoutError, ConnectionError):
                more = b""
            if not more:
                raise VmError(self.vm.complaint())
            said += more
        self.end.settimeout(None)

    def send(self, nonce: str, script: str) -> None:
        try:
            self.end.sendall(nonce.encode() + b" " + base64.b64encode(script.encode()) + b"\n")
        except OSError:
            raise VmError("the guest is gone") from None

    def wait_bytes(self) -> bytes:
        """Some, or none if the guest is gone. Of one that is movable the channel outlives its QEMU."""
        try:
            while not select.select([self.end], [], [], LOOK_SECONDS)[0]:
                if self.vm.movable and self.vm.qemu.poll() is not None:
                    return b""
            return self.end.recv(1 << 16)
        except (OSError, ValueError):  # closed here meanwhile
            return b""

    def receive(self, nonce: str, on_bytes: Callable[[bytes], None]) -> int | None:
        """Hands on what comes until the end line; the status in it, or None if the guest is gone.

        The last bytes are held back while they could be the beginning of the end line.
        """
        end_line = re.compile(rb"\x1e" + nonce.encode() + rb" (\d+)\n")
        held = b""
        while True:
            more = self.wait_bytes()
            if not more:
                on_bytes(held)
                return None
            held += more
            found = end_line.search(held)
            if found:
                on_bytes(held[: found.start()])
                return int(found[1])
            mark = held.rfind(b"\x1e", -64)
            keep = held[mark:] if mark >= 0 else b""
            on_bytes(held[: len(held) - len(keep)])
            held = keep


class Command:
    """A command in the guest. Its port is free for the next one when it has ended."""

    def __init__(
        self,
        vm: Vm,
        port: Port,
        script: str,
        on_line: Callable[[str], None] | None = None,
        file: BinaryIO | None = None,  # takes what it prints, instead of memory
    ):
        self.file = file
        self.vm = vm
        self.port = port
        self.script = script
        self.on_line = on_line
        self.nonce = secrets.token_hex(8)
        self.output = bytearray()
        self.line_start = 0
        self.rc: int | None = None
        port.send(self.nonce, script)
        self.reader = threading.Thread(target=self.read, daemon=True)
        self.reader.start()

    def read(self) -> None:
        self.rc = self.port.receive(self.nonce, self.take)
        if self.rc is not None and self.port is not self.vm.control:
            self.vm.ports.put(self.port)

    def take(self, more: bytes) -> None:
        if self.file:
            self.file.write(more)
        elif len(self.output) < OUTPUT_BYTES_MAX:
            self.output += more
        while self.on_line and (end := self.output.find(b"\n", self.line_start)) >= 0:
            line = self.output[self.line_start : end].decode(errors="replace")
            self.line_start = end + 1
            self.on_line(line)

    @property
    def running(self) -> bool:
        return self.reader.is_alive()

    def wait(self, timeout: float = 60) -> Output:
        """Its status and output. Past `timeout` it is killed, and CommandTimeout raised."""
        self.reader.join(timeout)
        if self.reader.is_alive():
            self.kill()
            self.reader.join(5)
            last = self.output.decode(errors="replace")[-400:]
            raise CommandTimeout(
                f"in the guest, `{self.script.strip()}` ran over {timeout} s:\n{last}"
            )
        if self.rc is None:
            raise VmError(f"the guest went away during `{self.script.strip()}`")
        return Output(self.rc, bytes(self.output))

    def kill(self, signal: str = "KILL") -> None:
        """Signals the command and all its children."""
        script = f"kill -{signal} -$(cat /run/agent/{self.nonce})"
        Command(self.vm, self.vm.control, script).reader.join(5)


class Qmp:
    """QEMU's monitor: lines of JSON; events in between are skipped."""

    def __init__(self, end: socket.socket):
        self.lines = end.makefile("rwb", buffering=0)
        self.greeted = False

    def call(self, command: str, arguments: dict):
        if not self.greeted:
            self.lines.readline()
            self.greeted = True
            self.call("qmp_capabilities", {})
        request = {"execute": command, "arguments": arguments}
        self.lines.write(json.dumps(request).encode() + b"\n")
        while line := self.lines.readline():
            answer = json.loads(line)
            if "error" in answer:
                raise VmError(f"QEMU refused {command}: {answer['error']['desc']}")
            if "return" in answer:
                return answer["return"]
        raise VmError(f"QEMU went away during {command}")


# KVM or emulation


def working_accel(image: GuestImage, say=lambda text: None) -> str:
    """Says "kvm" where a guest really boots with it, else "tcg".

    That /dev/kvm exists says little: inside some virtual machines it is there and stock kernels
    hang. So one is booted, and the finding is kept beside the guest, for this host kernel and QEMU.
    """
    forced = os.environ.get("ASHLAR_ACCEL")
    if forced:
        return forced
    if shutil.which(QEMU) is None:
        raise VmError(f"{QEMU} is missing: run scripts/install.sh demo")
    version = subprocess.run([QEMU, "--version"], capture_output=True, text=True).stdout
    usable = os.access("/dev/kvm", os.R_OK | os.W_OK)
    host = [os.uname().release, version.splitlines()[0], usable]
    finding = image.root.with_name("accel.json")
    if finding.exists():
        known = json.loads(finding.read_text())
        if known["host"] == host:
            return known["accel"]
    accel = "tcg"
    if usable:
        say("trying KVM")
        vm = Vm(image, accel="kvm", cpus=1)
        try:
            vm.start(KVM_BOOT_SECONDS_MAX)
            accel = "kvm"
        except VmError:
            pass
        finally:
            vm.close()
    draft = finding.with_name(f"accel.{os.getpid()}")
    draft.write_text(json.dumps({"host": host, "accel": accel}) + "\n")
    draft.rename(finding)  # others may be reading it
    return accel
