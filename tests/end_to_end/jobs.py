"""Jobs as a user starts them: real commands, in a folder that is not the project's, with a home of their own."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 420  # seconds for one command: many times what it takes on a quiet machine

# What `--set` says of an engine. ZeRO trains the whole model here, the others an adapter.
ENGINES = {
    "ddp": ('strategy={"type": "ddp"}',),
    "fsdp": ('strategy={"type": "fsdp"}',),
    "zero2": ('strategy={"type": "deepspeed", "zero_stage": 2}', 'method={"type": "full"}'),
    "zero3": ('strategy={"type": "deepspeed", "zero_stage": 3}', 'method={"type": "full"}'),
}


def metrics(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Shop:
    """Where recipes are compiled (`folder`: a tiny model, rows, recipe.json) and where jobs are started (`elsewhere`)."""

    folder: Path
    elsewhere: Path
    environment: dict[str, str]

    def start(self, *argv: object, cwd: Path | None = None, **options) -> subprocess.Popen:
        """A command in `elsewhere`, in a session of its own."""
        return subprocess.Popen(
            list(map(str, argv)), cwd=cwd or self.elsewhere, text=True, start_new_session=True,
            **{"env": self.environment, "stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE,
               "stderr": subprocess.PIPE} | options,
        )  # fmt: skip

    def run(self, *argv: object, **options) -> subprocess.CompletedProcess:
        with self.start(*argv, **options) as process:
            try:
                stdout, stderr = process.communicate(timeout=TIMEOUT)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                raise
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)

    def done(self, *argv: object, **options) -> subprocess.CompletedProcess:
        """The same for a command that must succeed."""
        result = self.run(*argv, **options)
        assert result.returncode == 0, f"{result.args}\n{result.stdout}\n{result.stderr}"
        return result

    def settings(self, name: str, engine: str, *more: str) -> list[str]:
        """Arguments after the recipe: everything of the job `name` gets a place of its own."""
        values = (f"name={name}", f"checkpoint.output_dir={self.output(name)}", *ENGINES[engine], *more)
        return [argument for value in values for argument in ("--set", value)]

    def output(self, name: str) -> Path:
        return self.folder / "runs" / name

    def build(self, name: str) -> Path:
        return self.elsewhere / "build" / name

    def compile(self, name: str, engine: str, *more: str) -> Path:
        self.done(
            "dsft",
            "compile",
            "recipe.json",
            *self.settings(name, engine, *more),
            "-o",
            self.build(name),
            cwd=self.folder,
        )
        return self.build(name)


@dataclass(frozen=True)
class Launched:
    """A job that `dsft launch` ran to its end."""

    output: Path
    stdout: str
    stderr: str
