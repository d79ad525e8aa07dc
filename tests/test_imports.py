"""Checking and compiling load none of the heavy packages: they run anywhere, at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from workshop import COMPLETE, Workshop

HEAVY = ("torch", "transformers", "accelerate", "deepspeed", "peft", "datasets", "numpy", "rich")

SCRIPT = """
import sys
from dsft.cli import main
assert main(sys.argv[1:]) == 0
print("loaded:", *[name for name in {heavy} if name in sys.modules])
"""


@pytest.mark.parametrize("command", [["check"], ["compile", "-o", "out"], ["launch", "--dry-run"]], ids=lambda c: c[0])
@pytest.mark.parametrize(
    "strategy", [{"type": "fsdp"}, {"type": "deepspeed", "zero_stage": 3}], ids=lambda s: s["type"]
)
def test_no_heavy_package(tmp_path, command, strategy):
    recipe = Workshop(tmp_path).write("recipe.json", COMPLETE | {"strategy": strategy})
    script = SCRIPT.format(heavy=HEAVY)
    process = subprocess.run(
        [sys.executable, "-c", script, command[0], str(recipe), *command[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.splitlines()[-1] == "loaded:"


@pytest.mark.parametrize("argument", ["--help", "--version"])
def test_what_only_prints_loads_next_to_nothing(argument):
    script = """
import atexit, sys
from dsft.cli import main
atexit.register(lambda: print("loaded:", *[name for name in sys.modules if name.startswith(("dsft.", "jsonschema"))]))
main(sys.argv[1:])
"""
    process = subprocess.run([sys.executable, "-c", script, argument], capture_output=True, text=True, check=True)
    assert set(process.stdout.splitlines()[-1].split()[1:]) == {"dsft.cli", "dsft.errors"}
