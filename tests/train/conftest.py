"""Real training processes, kept for the whole session: one set of one rank and one of two."""

from __future__ import annotations

import json
import os
import queue
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file

from dsft.compile import compile_plan, write
from dsft.plan import record

TIMEOUT = 240  # seconds for one run of a tiny model, the start of the processes included


@dataclass(frozen=True)
class Run:
    """What a run left behind."""

    output: Path
    metrics: list[dict]

    @property
    def updates(self) -> list[dict]:
        return [entry for entry in self.metrics if "loss" in entry]

    @property
    def weights(self) -> dict:
        adapter = self.output / "adapter" / "adapter_model.safetensors"
        return load_file(adapter if adapter.is_file() else self.output / "model" / "model.safetensors")


class Ranks:
    """`world` processes of tests/train/worker.py in one process group."""

    def __init__(self, world: int):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        shared = {
            **os.environ, "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive", "PYTHONUNBUFFERED": "1",
        }  # fmt: skip
        self.processes, self.lines = [], []
        for rank in range(world):
            process = subprocess.Popen(
                [sys.executable, Path(__file__).with_name("worker.py")], env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            )  # fmt: skip
            lines: queue.Queue = queue.Queue()
            threading.Thread(target=self._read, args=(process, lines), daemon=True).start()
            self.processes.append(process)
            self.lines.append(lines)

    @staticmethod
    def _read(process, lines):
        for line in process.stdout:
            lines.put(line)
        lines.put(f"@@ended {process.wait()}\n")

    def run(self, directory: Path) -> list[tuple[str, str]]:
        """Each rank's outcome ("done", "failed KIND", "crashed", "ended EXIT_CODE") and what it printed."""
        for process in self.processes:
            process.stdin.write(f"{directory}\n")
            process.stdin.flush()
        outcomes = []
        for lines in self.lines:
            printed = []
            while not (line := lines.get(timeout=TIMEOUT)).startswith("@@"):
                printed.append(line)
            outcomes.append((line.removeprefix("@@").strip(), "".join(printed)))
        if any(outcome.startswith(("crashed", "ended")) for outcome, _ in outcomes):
            self.kill()  # a process group with a rank out of step serves nobody
        return outcomes

    def kill(self):
        for process in self.processes:
            process.kill()
            process.wait()

    def close(self):
        for process in self.processes:
            process.stdin.close()
        for process in self.processes:
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@pytest.fixture(scope="session")
def ranks():
    """A function from a world size to its `Ranks`, started when first asked for."""
    started: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        alive = world in started and all(process.poll() is None for process in started[world].processes)
        if not alive:
            started[world] = Ranks(world)
        return started[world]

    yield of
    for each in started.values():
        each.close()


@pytest.fixture(scope="session")
def attempt(ranks, tmp_path_factory):
    """Compiles and runs a plan; returns each rank's outcome and output."""

    def run(plan: record.Plan) -> list[tuple[str, str]]:
        directory = tmp_path_factory.mktemp("compiled")
        write(compile_plan(plan, "{}\n", directory), directory)
        return ranks(plan.batch.world_size).run(directory)

    return run


@pytest.fixture(scope="session")
def trained(attempt):
    """Compiles and runs a plan that must succeed; returns its `Run`."""

    def run(plan: record.Plan) -> Run:
        outcomes = attempt(plan)
        for outcome, printed in outcomes:
            assert outcome == "done", f"{outcome}\n{printed}"
        output = Path(plan.checkpoint.output_dir)
        return Run(output, [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()])

    return run


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """A tiny random Llama of four layers with tied embeddings."""
    return tiny.write_model(tmp_path_factory.mktemp("tied") / "model")


@pytest.fixture(scope="session")
def untied(tmp_path_factory) -> Path:
    return tiny.write_model(tmp_path_factory.mktemp("untied") / "model", tied=False)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """21 alpaca rows of unequal length: at a global batch of 4 every sixth update is a short one."""
    return tiny.write_rows(tmp_path_factory.mktemp("data") / "rows.json", 21)
