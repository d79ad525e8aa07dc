"""A job's processes, started for real: how it ends, what is said, and that nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsft.launch import ranks
from dsft.launch.supervise import Process, supervise

# Each rank runs its own line of SCRIPT lines after writing its process id; `beside` starts a process in a session of
# its own, as torchrun starts its workers.
HEAD = """
import os, pathlib, signal, subprocess, sys, time
rank = int(os.environ["RANK"])
def ready(name):
    path = pathlib.Path(sys.argv[1], name)
    path.with_suffix(".tmp").write_text(str(os.getpid()))
    path.with_suffix(".tmp").rename(path)
def beside():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    pathlib.Path(sys.argv[1], "beside").write_text(str(child.pid))
def wait_for(name):
    while not pathlib.Path(sys.argv[1], name).exists():
        time.sleep(0.01)
"""

# The supervisor in a process of its own, to be interrupted and killed; the error boundary is that of the command line.
SUPERVISOR = """
import os, sys
from dsft.errors import DsftError
from dsft.launch import ranks
from dsft.launch.supervise import supervise
try:
    supervise(ranks((sys.executable, *sys.argv[1:]), 2, os.environ), grace=1)
except DsftError as error:
    print(error, file=sys.stderr)
    sys.exit(error.exit_code)
"""


class Job:
    """Two ranks that run `script`, under a supervisor in another process."""

    def __init__(self, folder: Path, script: str):
        self.folder = folder
        (folder / "rank.py").write_text(HEAD + script)
        self.supervisor = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, folder / "rank.py", folder], stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, *names: str) -> None:
        _eventually(lambda: all((self.folder / name).exists() for name in names))

    def end(self) -> tuple[int, str]:
        """Exit code and last line of the supervisor, which has left nothing running."""
        _, errors = self.supervisor.communicate(timeout=30)
        assert not self.alive()
        return self.supervisor.returncode, errors.splitlines()[-1] if errors else ""

    def alive(self) -> list[str]:
        pids = {p.name: int(p.read_text()) for p in self.folder.iterdir() if p.suffix not in (".py", ".tmp")}
        return [name for name, pid in pids.items() if _runs(pid)]


@pytest.fixture
def job(tmp_path):
    jobs = []

    def start(script: str) -> Job:
        jobs.append(Job(tmp_path, script))
        return jobs[-1]

    yield start
    for started in jobs:
        started.supervisor.kill()
        started.supervisor.communicate()
        _eventually(lambda started=started: not started.alive())


def test_a_job_that_ends_well(job):
    assert job("ready(f'rank{rank}')").end() == (0, "")


def test_a_rank_that_ends_early_and_well_does_not_end_the_others(job):
    script = "ready(f'rank{rank}')\nif rank == 1: wait_for('go'); ready('done')"
    started = job(script)
    started.wait_for("rank0", "rank1")
    time.sleep(0.3)  # long enough to see that rank 0 has ended
    (started.folder / "go").write_text("0")
    assert started.end() == (0, "")
    assert (started.folder / "done").exists()


def test_the_exit_code_of_the_first_failure_and_its_rank(job):
    script = "ready(f'rank{rank}')\nif rank == 1: wait_for('rank0'); sys.exit(7)\ntime.sleep(60)"
    assert job(script).end() == (7, "error[process-failed]: rank 1 of 2 ended with exit code 7")


def test_the_rest_that_fails_because_of_it_is_not_the_cause(job):
    script = """
signal.signal(signal.SIGTERM, lambda *_: sys.exit(9))
ready(f'rank{rank}')
if rank == 1: wait_for('rank0'); sys.exit(7)
time.sleep(60)
"""
    assert job(script).end()[0] == 7


def test_a_rank_that_is_killed(job):
    started = job("ready(f'rank{rank}')\ntime.sleep(60)")
    started.wait_for("rank0", "rank1")
    os.kill(int((started.folder / "rank1").read_text()), signal.SIGKILL)
    assert started.end() == (137, "error[process-failed]: rank 1 of 2 was killed by SIGKILL")


def test_a_killed_rank_is_the_cause_where_another_fails_at_once(job):
    """Both are found ended in one look; rank 0 ended because it lost its connection to rank 1."""
    script = """
pipe = pathlib.Path(sys.argv[1], "pipe.tmp")
if rank == 0:
    os.mkfifo(pipe)
    ready("rank0")
    pipe.open("rb").read()
    os._exit(1)
wait_for("rank0")
connection = pipe.open("wb")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert job(script).end() == (137, "error[process-failed]: rank 1 of 2 was killed by SIGKILL")


def test_a_rank_that_ignores_sigterm_is_killed(job):
    script = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
ready(f'rank{rank}')
if rank == 1: wait_for('rank0'); sys.exit(7)
time.sleep(60)
"""
    before = time.monotonic()
    assert job(script).end()[0] == 7
    assert 1 <= time.monotonic() - before < 20  # the grace of 1 s was given, and no more


def test_processes_that_a_rank_leaves_behind_end_too(job):
    script = "beside()\nready(f'rank{rank}')\nwait_for('rank0'); wait_for('rank1')\nif rank == 1: sys.exit(7)"
    assert job(script).end()[0] == 7


@pytest.mark.parametrize(("signum", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_is_passed_on_once(job, signum, code):
    script = f"""
def stop(*_):
    ready(f'stopped{{rank}}')
    sys.exit(0)
signal.signal({int(signum)}, stop)
ready(f'rank{{rank}}')
time.sleep(60)
"""
    started = job(script)
    started.wait_for("rank0", "rank1")
    started.supervisor.send_signal(signum)
    assert started.end() == (code, f"error[interrupted]: the job was ended by {signum.name}")
    assert (started.folder / "stopped0").exists() and (started.folder / "stopped1").exists()


def test_after_a_signal_the_processes_have_the_time_they_need(job):
    """Writing a checkpoint may take longer than the grace that a failed job has."""
    script = """
def stop(*_):
    time.sleep(1.5)
    ready(f'saved{rank}')
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
ready(f'rank{rank}')
time.sleep(60)
"""
    started = job(script)
    started.wait_for("rank0", "rank1")
    started.supervisor.send_signal(signal.SIGTERM)
    started.end()
    assert (started.folder / "saved0").exists() and (started.folder / "saved1").exists()


def test_a_second_signal_kills(job):
    script = """
signal.signal(signal.SIGINT, lambda *_: ready(f'heard{rank}'))
ready(f'rank{rank}')
while True: time.sleep(60)
"""
    started = job(script)
    started.wait_for("rank0", "rank1")
    started.supervisor.send_signal(signal.SIGINT)
    started.wait_for("heard0", "heard1")
    assert started.supervisor.poll() is None and len(started.alive()) == 4
    started.supervisor.send_signal(signal.SIGINT)
    assert started.end()[0] == 130


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_when_the_supervisor_is_killed_the_job_ends(job):
    started = job("if rank == 0: beside()\nready(f'rank{rank}')\ntime.sleep(60)")
    started.wait_for("rank0", "rank1")
    started.supervisor.kill()
    _eventually(lambda: not started.alive())


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_another_job_is_left_alone(job, tmp_path):
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env={**os.environ, "DSFT_JOB": "x"})
    try:
        assert job("sys.exit(7)").end()[0] == 7
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_program_that_is_not_there(tmp_path):
    processes = (Process("nothing", (str(tmp_path / "nothing"),), {}),)
    with pytest.raises(Exception, match=r"cannot-start.*nothing.*No such file"):
        supervise(processes)


def test_signal_handlers_are_as_before():
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    supervise(ranks((sys.executable, "-c", ""), 1, os.environ))
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def _eventually(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "this did not come about in time"
        time.sleep(0.02)


def _runs(pid: int) -> bool:
    """Whether a process is there and has not ended (one that nobody waits for stays as a zombie)."""
    if sys.platform == "linux":
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
        except OSError:
            return False
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
