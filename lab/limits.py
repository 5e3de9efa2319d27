"""What a study asks of fio and PostgreSQL, and the machine of the load does not have.

Each is told before anything is started, with the word of the study, its bound and the fix. What no
machine could do is refused by `study` itself.
"""

import errno
import re
import socket
from collections.abc import Iterator
from contextlib import suppress

from lab.study import FIO_JOBS_MAX, Study, Where

MIB = 1 << 20
PORT_USUAL, PORT_MAX = 5432, 65535
PAGE_BYTES = 8192  # of PostgreSQL: a number without a unit is of these
SHARED_BYTES_MIN = 16 * PAGE_BYTES
UNITS = {"": PAGE_BYTES, "B": 1, "kB": 1 << 10, "MB": 1 << 20, "GB": 1 << 30, "TB": 1 << 40}
ANY_ADDRESS = {"*": "0.0.0.0", "localhost": "127.0.0.1"}


def problems(study: Study, memory_bytes: int) -> list[str]:
    """`memory_bytes` are free on this machine."""
    found = [*fio_problems(study, memory_bytes)] if study.fio else []
    if study.pgbench:
        found += [*shared_buffers_problems(study, memory_bytes), *port_problems(study)]
    return found


def at_once(study: Study) -> int:
    """Loads that share one machine."""
    return study.array.count if study.where == Where.HOST else 1


def memory(study: Study, host: bool, host_bytes: int) -> tuple[int, str, str]:
    """How much, whose, and how there can be more."""
    if host:
        return host_bytes, "this machine has free", ""
    return study.vm.memory, "a guest has", ", or larger guests (--set vm.memory=8G)"


# fio


def fio_problems(study: Study, memory_bytes: int) -> Iterator[str]:
    """The bare drives are measured where arrays are made, each by as many jobs as a load has."""
    measured = [(at_once(study), study.where == Where.HOST, "")]
    if study.raw and study.drives.kind != "model":
        drives = study.array.count * study.array.members
        measured.append((drives, study.where != Where.GUEST, f" on each of {drives} bare drives"))
    for count, on_host, where in measured:
        has, whose, fix = memory(study, on_host, memory_bytes)
        for at, pattern in enumerate(study.fio.patterns):
            name = f"`fio.patterns.{at}` ({pattern.name})"
            needed = count * pattern.jobs * pattern.depth * pattern.block
            if needed > has:
                yield (
                    f"{name}{where}: {pattern.jobs} `jobs` of `depth` {pattern.depth} and `block` "
                    f"{pattern.block} take {needed // MIB} MiB for what is under way, and {whose} "
                    f"{has // MIB}: say less of one of them{fix}"
                )
            if where and count * pattern.jobs > FIO_JOBS_MAX:
                yield (
                    f"{name}{where}: {count * pattern.jobs} jobs, and one fio has {FIO_JOBS_MAX} "
                    f"at most: say `jobs` of {FIO_JOBS_MAX // count} or fewer, or raw = false"
                )


# PostgreSQL


def shared_buffers_problems(study: Study, memory_bytes: int) -> Iterator[str]:
    said = study.pgbench.settings.get("shared_buffers")
    size = setting_bytes(said)
    if size is None:  # PostgreSQL says what is wrong with it, if it is there
        return
    name = f"`pgbench.settings.shared_buffers` is {said}"
    if size < SHARED_BYTES_MIN:
        yield f"{name}, and PostgreSQL takes {SHARED_BYTES_MIN >> 10}kB at least: say more"
        return
    servers, on_host = at_once(study), study.where == Where.HOST
    has, whose, fix = memory(study, on_host, memory_bytes)
    if size * servers > has:
        each = f" for each of {servers} servers" * (servers > 1)
        yield (
            f"{name}: {size // MIB} MiB{each}, and {whose} {has // MIB}: say less, such as "
            f"{max(1, has // servers // 4 // MIB)}MB{fix}"
        )


def setting_bytes(value: object) -> int | None:
    """As PostgreSQL reads a size; None where it would read none."""
    if value is None or isinstance(value, bool):
        return None
    found = re.fullmatch(r"\s*([+-]?\d+(?:\.\d*)?)\s*(|B|kB|MB|GB|TB)\s*", str(value))
    return int(float(found[1]) * UNITS[found[2]]) if found else None


def port_problems(study: Study) -> Iterator[str]:
    """It names the server's socket, and is one of the network's only with `listen_addresses`."""
    settings = study.pgbench.settings
    said = settings.get("port", PORT_USUAL)
    port = port_of(said)
    if port is None:
        yield f"`pgbench.settings.port` is {said}: say a number from 1 to {PORT_MAX}, or no port"
        return
    listen = [each.strip() for each in str(settings.get("listen_addresses", "")).split(",")]
    listen = list(filter(None, listen))
    if study.where != Where.HOST or not listen:
        return
    if study.array.count > 1:
        yield (
            f"`pgbench.settings.listen_addresses`: {study.array.count} servers on this machine "
            "would listen on one port: take it out, since loads use a socket of their own, or say "
            "array.count = 1"
        )
    elif busy := [each for each in listen if in_use(each, port)]:
        yield (
            f"`pgbench.settings.port`: {port} is in use on {', '.join(busy)}: say another from 1 "
            f"to {PORT_MAX}, end who has it, or take `listen_addresses` out"
        )


def port_of(said: object) -> int | None:
    with suppress(ValueError):
        port = None if isinstance(said, bool) else int(str(said))
        return port if port is not None and 1 <= port <= PORT_MAX else None
    return None


def in_use(address: str, port: int) -> bool:
    """By a program that listens. Of an address that is not there, PostgreSQL says what is wrong."""
    at = ANY_ADDRESS.get(address, address)
    try:  # a kernel without IPv6 makes no such socket
        with socket.socket(socket.AF_INET6 if ":" in at else socket.AF_INET) as tried:
            # not one that has just ended
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((at, port))
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return False
