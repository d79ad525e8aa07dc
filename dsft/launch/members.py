"""The processes of one job, wherever they stand in the process tree, and the watch that ends what is left of them.

Every process of a job inherits `MARK` with a value that no other job has. Launchers put their workers into sessions of
their own and do not always take them along when they end, so neither a process group nor a parent finds them all; the
mark does, and nobody else's. Where there is no /proc (not Linux) nothing is found.

As a program, `python members.py MARK` waits until its standard input closes, which it does when the launching process ends,
even by SIGKILL, and then ends the job's remaining processes. Only the standard library is imported: it starts in 20 ms.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

MARK = "DSFT_JOB"
GRACE_SECONDS = 10.0  # between SIGTERM and SIGKILL


def find(mark: str) -> list[int]:
    """Process ids of the job's running processes, this one left out."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            environment = (directory / "environ").read_bytes()
        except OSError:  # it ended, or is another user's
            continue
        if entry in environment.split(b"\0") and int(directory.name) != os.getpid():
            found.append(int(directory.name))
    return found


def send(mark: str, signum: int) -> None:
    """Send a signal to every process of the job."""
    for pid in find(mark):
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            pass


def end(mark: str, grace: float = GRACE_SECONDS) -> None:
    """SIGTERM to the job's processes, SIGKILL to those that are still there after `grace` seconds."""
    send(mark, signal.SIGTERM)
    deadline = time.monotonic() + grace
    while find(mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    while find(mark):  # again, for one that was being started meanwhile
        send(mark, signal.SIGKILL)
        time.sleep(0.05)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    end(sys.argv[1])
