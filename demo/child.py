"""Child processes that cannot outlive us.

Each child leads a session of its own, so that Ctrl-C reaches only us and we end the children in the
right order. If we are killed outright, the kernel ends the child with us (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
from collections.abc import Sequence

PR_SET_PDEATHSIG = 1
KILL_SECONDS_MAX = 10
LIBC = ctypes.CDLL(None, use_errno=True)


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Like Popen, for the main thread: a child ends with the *thread* that started it."""
    parent = os.getpid()

    def in_child():
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # we died before the line above took effect
            os._exit(1)

    options.setdefault("stdin", subprocess.DEVNULL)
    return subprocess.Popen(command, start_new_session=True, preexec_fn=in_child, **options)


def run(
    command: Sequence[str], seconds: float, text: str | None = None, **options
) -> subprocess.CompletedProcess:
    """Like subprocess.run with `text` for its input, or nothing. TimeoutExpired after `seconds`;
    however it ends, the command is not left behind."""
    if text is not None:
        options["stdin"] = subprocess.PIPE
    running = start(command, text=True, stdout=subprocess.PIPE, **options)
    try:
        out, err = running.communicate(text, timeout=seconds)
    finally:
        kill(running)
    return subprocess.CompletedProcess(command, running.returncode, out, err)


def stop(child: subprocess.Popen, seconds: float) -> bool:
    """SIGTERM, and SIGKILL to all of its group after `seconds`. True if it ended by itself."""
    if child.poll() is None:
        child.terminate()
    try:
        child.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        kill(child)
        return False


def kill(child: subprocess.Popen) -> None:
    """One that waits in the kernel for a device ends when that answers: who kills it goes on, and
    may take the device down."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(KILL_SECONDS_MAX)
