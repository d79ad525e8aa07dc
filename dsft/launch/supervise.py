"""Start the processes of a job, pass signals on, and leave nothing running, however the job ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dsft.errors import EXIT_FAILED, DsftError, Problem
from dsft.launch import members

_POLL_SECONDS = 0.05  # short, so that the first of several failures is seen first


@dataclass(frozen=True)
class Process:
    """A process to start on this machine."""

    name: str  # as messages call it: "rank 1 of 2", "torchrun"
    argv: tuple[str, ...]
    environment: Mapping[str, str]  # all of it


def supervise(processes: Sequence[Process], grace: float = members.GRACE_SECONDS) -> None:
    """Run `processes` side by side until all have ended.

    When one fails, the others get SIGTERM and, `grace` seconds later, SIGKILL. SIGINT and SIGTERM to this process are
    passed on to all; a second one kills. When this process itself is killed, the job ends too (on Linux).

    Raises DsftError with the exit code of the first process that failed (128 + n where signal n killed it), or 128 + n
    after signal n. Must run in the main thread: it handles signals.
    """
    mark = uuid.uuid4().hex
    job = _Job(mark, [], [])
    with _signals_into(job.received), _watch(mark):
        try:
            for process in processes:
                job.children.append((process.name, _start(process, mark)))
            cause = _first_cause(job)
            if cause:
                _wind_down(job, grace)
                raise cause
        finally:
            _kill(job)


@dataclass(frozen=True)
class _Job:
    mark: str  # see members.py
    children: list[tuple[str, subprocess.Popen]]  # each leads a process group of its own
    received: list[int]  # SIGINT and SIGTERM, as they came

    def running(self) -> int:
        return sum(child.poll() is None for _, child in self.children)

    def send(self, signum: int) -> None:
        for _, child in self.children:
            try:
                os.killpg(child.pid, signum)
            except (ProcessLookupError, PermissionError):  # all of it has ended (macOS says the latter)
                pass


def _start(process: Process, mark: str) -> subprocess.Popen:
    try:
        return subprocess.Popen(
            process.argv,
            env={**process.environment, members.MARK: mark},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in the terminal reaches the supervisor alone, which passes it on once
        )
    except OSError as error:
        message = f"cannot start {process.name}: {process.argv[0]}: {error.strerror}"
        raise DsftError(Problem("cannot-start", message), EXIT_FAILED) from error


def _first_cause(job: _Job) -> DsftError | None:
    """What ends the job before its time: the first failure or signal. None when all processes end well."""
    while not job.received:
        running = job.running()
        failed = [(name, child.returncode) for name, child in job.children if child.returncode]
        if failed:
            # Of several since the last look, one killed by a signal: the others lost their connection to it.
            return _failure(*min(failed, key=lambda failure: failure[1] > 0))
        if not running:
            return None
        time.sleep(_POLL_SECONDS)
    signum = job.received[0]
    return DsftError(Problem("interrupted", f"the job was ended by {_signal_name(signum)}"), 128 + signum)


def _wind_down(job: _Job, grace: float) -> None:
    """Ask the processes to end and wait until they have, at most `grace` seconds from the first one's end."""
    before = len(job.received)
    if before:
        job.send(job.received[0])
        print("dsft: waiting for the processes to end; a second signal ends them at once", file=sys.stderr, flush=True)
        # They may be writing a checkpoint: the time begins when the first has ended.
        _wait_until(lambda: job.running() < len(job.children) or len(job.received) > before)
    else:
        job.send(signal.SIGTERM)
    deadline = time.monotonic() + grace

    def over() -> bool:
        ended = not job.running() and not members.find(job.mark)
        return ended or len(job.received) > before or time.monotonic() > deadline

    _wait_until(over)


def _kill(job: _Job) -> None:
    while job.running() or members.find(job.mark):
        job.send(signal.SIGKILL)
        members.send(job.mark, signal.SIGKILL)
        time.sleep(0.01)


def _wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(_POLL_SECONDS)


def _failure(name: str, code: int) -> DsftError:
    if code < 0:
        return DsftError(Problem("process-failed", f"{name} was killed by {_signal_name(-code)}"), 128 - code)
    return DsftError(Problem("process-failed", f"{name} ended with exit code {code}"), code)


def _signal_name(signum: int) -> str:
    try:
        return signal.Signals(signum).name
    except ValueError:
        return f"signal {signum}"


@contextmanager
def _signals_into(received: list[int]) -> Iterator[None]:
    """SIGINT and SIGTERM are appended to `received` and do nothing else."""
    before = {
        signum: signal.signal(signum, lambda number, frame: received.append(number))
        for signum in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _watch(mark: str) -> Iterator[None]:
    """A process that outlives this one and ends the job's processes when this one is killed (see members.py)."""
    watcher = subprocess.Popen(
        [sys.executable, "-I", members.__file__, mark],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,  # an open copy would keep `dsft launch | tee log` waiting
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield
    finally:
        watcher.stdin.close()
        watcher.wait()
