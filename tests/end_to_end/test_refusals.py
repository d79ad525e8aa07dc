"""A process that is not what the plan wants stops before it loads a model; a job that breaks off says why and leaves nothing."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import termios
import time
import uuid
from pathlib import Path

import pytest
from jobs import TIMEOUT

from dsft.plan.versions import installed_versions

pytestmark = pytest.mark.slow

MARK = "DSFT_TEST"


def check_refusal(shop, name: str, result, *messages: str):
    """`messages` each once, from dsft without a stack trace; no training began."""
    assert result.returncode not in (0, None)
    for message in messages:
        assert result.stderr.count(message) == 1, result.stderr
    assert result.stderr.count("error[") == len(messages), result.stderr
    assert "dsft/" not in result.stderr.replace(str(shop.elsewhere), ""), (
        result.stderr
    )  # no line of ours in a stack trace
    assert not (shop.output(name) / "metrics.jsonl").exists()


def test_everything_that_differs_is_named_at_once(shop):
    """Another world, another version, an edited file."""
    name = "differs"
    build = shop.compile(name, "zero2")
    plan = json.loads((build / "plan.json").read_text())
    plan["versions"]["torch"] = "2.0.1"
    (build / "plan.json").write_text(json.dumps(plan))
    edited = build / "deepspeed.json"
    edited.write_text(edited.read_text().replace('"stage": 2', '"stage": 3'))
    result = shop.run("torchrun", "--standalone", "--nproc-per-node", 3, "-m", "dsft.train", f"build/{name}/plan.json")
    check_refusal(
        shop, name, result, "the plan is for 2 processes, but 3 were launched",
        f"compiled with torch 2.0.1, but {installed_versions()['torch']} is installed", f"{edited} was changed",
    )  # fmt: skip


def test_another_plans_accelerate_yaml(shop):
    shop.compile("planned", "ddp")
    shop.compile("another", "zero2")
    command = "accelerate launch --config_file build/another/accelerate.yaml -m dsft.train build/planned/plan.json"
    result = shop.run(*command.split())
    check_refusal(shop, "planned", result, "the plan's engine is ddp, but it was launched for deepspeed")


def test_a_data_file_that_went_missing(shop):
    name = "no-data"
    rows = shop.folder / "gone.json"
    rows.write_text((shop.folder / "rows.json").read_text())
    build = shop.compile(name, "ddp", f'data.train=[{{"path": "{rows}", "format": "alpaca"}}]')
    rows.unlink()
    result = shop.run(build / "launch" / "torchrun.sh")
    check_refusal(shop, name, result, f"{rows}: error[data-unreadable]: cannot be read")


def launch_long_job(shop, name: str, **options):
    """A job of more updates than anyone waits for; its processes bear a mark of their own."""
    mark = uuid.uuid4().hex
    process = shop.start(
        "dsft", "launch", shop.folder / "recipe.json", *shop.settings(name, "ddp", "training.max_steps=1000000"),
        env=shop.environment | {MARK: mark}, **options,
    )  # fmt: skip
    return process, mark


def environments(mark: str) -> dict[int, dict[str, str]]:
    """The running processes that bear the mark, with what their environment said when they started."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            entries = path.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if f"{MARK}={mark}" in entries:
            found[int(path.parent.name)] = dict(entry.split("=", 1) for entry in entries if "=" in entry)
    return found


def end(process, mark: str):
    """Nothing of a failed test outlives it."""
    for pid in environments(mark):
        os.kill(pid, signal.SIGKILL)
    process.wait(timeout=30)


def wait_until(condition):
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def is_training(shop, name: str) -> bool:
    path = shop.output(name) / "metrics.jsonl"
    return path.is_file() and '"loss"' in path.read_text()


def test_a_killed_rank_ends_the_job_and_is_named(shop):
    name = "killed"
    process, mark = launch_long_job(shop, name)
    try:
        wait_until(lambda: is_training(shop, name) or process.poll() is not None)
        (rank_1,) = (pid for pid, environment in environments(mark).items() if environment.get("RANK") == "1")
        os.kill(rank_1, signal.SIGKILL)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 128 + signal.SIGKILL
        assert stderr.strip().splitlines()[-1] == "error[process-failed]: rank 1 of 2 was killed by SIGKILL"
        assert not environments(mark)
    finally:
        end(process, mark)


def test_a_terminal_has_a_progress_bar_and_ctrl_c_ends_the_job(shop):
    name = "interrupted"
    terminal, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
    process, mark = launch_long_job(
        shop, name, stdin=theirs, stdout=theirs, stderr=theirs, preexec_fn=lambda: _take_terminal(theirs)
    )
    os.close(theirs)
    screen = ""
    bar = re.compile(
        r"\d+/1000000 +\d+:\d\d:\d\d +loss \d\.\d{4}  lr \d\.\d\de-\d\d  grad norm \d+\.\d{3}  [\d,]+ tokens/s"
    )
    try:
        deadline = time.monotonic() + TIMEOUT
        pressed = False
        while chunk := _read(terminal, deadline):
            screen += chunk
            if not pressed and bar.search(_plain(screen)):
                os.write(terminal, b"\x03")
                pressed = True
        assert process.wait(timeout=30) == 130, screen
        assert pressed, screen
        assert "error[interrupted]: the job was ended by SIGINT" in screen
        assert "Traceback" not in screen
        assert screen.rindex("\x1b[?25h") > screen.rindex("\x1b[?25l"), "the cursor stays hidden"
        assert not environments(mark)
    finally:
        os.close(terminal)
        end(process, mark)


def _take_terminal(terminal: int):
    """As a shell's child has it: Ctrl-C in the terminal is a signal to the process."""
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)


def _read(terminal: int, deadline: float) -> str:
    """What comes next; nothing once the other end is closed."""
    ready, _, _ = select.select([terminal], [], [], max(0, deadline - time.monotonic()))
    assert ready and time.monotonic() < deadline, "waited in vain"
    try:
        return os.read(terminal, 65536).decode(errors="replace")
    except OSError:  # how Linux says that nobody has the terminal open any more
        return ""


def _plain(screen: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen)
