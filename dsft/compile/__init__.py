"""A Plan into Artifacts: the files and commands of a job, as text.

`compile_plan` is pure: it looks at nothing but its arguments. `write` is the only place that touches a disk. Engines and
launchers are modules with the same two functions each, listed below; a new one is a new file and one line here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsft.compile.engines import ddp, fsdp, single
from dsft.compile.engines import deepspeed as deepspeed_engine
from dsft.compile.launchers import accelerate, local, torchrun
from dsft.compile.launchers import deepspeed as deepspeed_launcher
from dsft.environment import CLEAN_SHELL
from dsft.errors import refused
from dsft.plan.record import Plan, to_json

# files(plan): the compiled files training reads. accelerate_config(plan, directory): its part of accelerate.yaml.
ENGINES = {"single": single, "ddp": ddp, "fsdp": fsdp, "deepspeed": deepspeed_engine}

# files(plan, directory, engine): what the launcher reads. commands(plan, directory): argv a node, the head's first;
# none where the launcher cannot run the plan.
LAUNCHERS = {"local": local, "torchrun": torchrun, "accelerate": accelerate, "deepspeed": deepspeed_launcher}

# Every name a compile may write. A file of these that this compile does not write is left over from an earlier one.
NAMES = (
    "plan.json",
    "recipe.json",
    "deepspeed.json",
    "accelerate.yaml",
    "hostfile",
    *(f"launch/{name}.sh" for name in LAUNCHERS),
)


@dataclass(frozen=True)
class Artifacts:
    """What a compile writes. File names are relative to the compiled folder, in the order they are written."""

    files: Mapping[str, str]  # name -> content
    executable: frozenset[str]  # names of the files that are scripts
    commands: Mapping[str, tuple[tuple[str, ...], ...]]  # launcher -> argv of each node, or of the head alone


def compile_plan(plan: Plan, recipe_json: str, directory: str | Path) -> Artifacts:
    """The files and commands of `plan`, to be written into `directory` (absolute).

    Commands and scripts name the folder absolutely, as plan.json names model, data and output: they run from any working
    directory; to have the job elsewhere, compile it there.
    """
    directory = Path(directory)
    engine = ENGINES[plan.strategy.engine]
    engine_files = engine.files(plan)
    plan = dataclasses.replace(plan, files={name: _sha256(text) for name, text in engine_files.items()})

    commands = {name: launcher.commands(plan, directory) for name, launcher in LAUNCHERS.items()}
    scripts = {f"launch/{name}.sh": _script(plan, argvs) for name, argvs in commands.items() if argvs}
    launcher_files: dict[str, str] = {}
    for launcher in LAUNCHERS.values():
        launcher_files |= launcher.files(plan, directory, engine)

    # plan.json comes last: where it is, the files it names are there too.
    files = {"recipe.json": recipe_json, **engine_files, **launcher_files, **scripts, "plan.json": to_json(plan)}
    return Artifacts(files, frozenset(scripts), commands)


def write(artifacts: Artifacts, directory: str | Path) -> None:
    """Write the files into `directory`, each under a temporary name and then renamed.

    Files that an earlier compile left and this one does not write are removed; no other file is touched. Raises
    DsftError where the folder cannot be written.
    """
    directory = Path(directory)
    compiled = os.path.exists(directory / "plan.json")
    taken = [name for name in NAMES if os.path.exists(directory / name) and not _holds(directory, name, artifacts)]
    if taken and not compiled:
        raise refused(
            "folder-taken",
            f"{directory} holds {', '.join(taken)}, which dsft compile has not written",
            help="choose another folder with -o",
        )
    written: list[Path] = []
    try:
        for name in NAMES:
            if name not in artifacts.files:
                (directory / name).unlink(missing_ok=True)
        for name, text in artifacts.files.items():
            written.append(directory / name)
            _replace(directory / name, text, executable=name in artifacts.executable)
    except BaseException as error:
        if not compiled:  # without its plan.json nobody would know what is there for dsft's
            for path in written:
                with contextlib.suppress(OSError):
                    path.unlink()
        if not isinstance(error, OSError):
            raise
        raise refused(
            "cannot-write",
            f"cannot write {error.filename or directory}: {error.strerror}",
            help="choose another folder with -o, or make this one writable",
        ) from error


def _holds(directory: Path, name: str, artifacts: Artifacts) -> bool:
    """Whether the file is what would be written already: a compile before this one was killed."""
    try:
        return (directory / name).read_bytes() == artifacts.files.get(name, "").encode()
    except OSError:
        return False


def _replace(path: Path, text: str, executable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", newline="")
        if executable:
            mode = temporary.stat().st_mode
            temporary.chmod(mode | (mode & 0o444) >> 2)  # executable for whom it is readable
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _script(plan: Plan, argvs: tuple[tuple[str, ...], ...]) -> str:
    """A shell script that runs the command; of several nodes' commands, that of the node whose number is given."""
    head = f"#!/bin/sh\n# {plan.name}: {plan.strategy.engine}, world size {plan.batch.world_size}. Written by dsft compile.\n"
    head += f"# What the shell holds of another job does not count.\n{CLEAN_SHELL}\n"
    if len(argvs) == 1:
        return f"{head}exec {shlex.join(argvs[0])}\n"
    cases = (
        f"{rank}) exec {shlex.join(argv)} ;; # {host.name}\n"
        for rank, (host, argv) in enumerate(zip(plan.cluster.hosts, argvs))
    )
    usage = f'*) echo "usage: $0 NODE, a number from 0 to {len(argvs) - 1}; run it once on every node" >&2; exit 2 ;;\n'
    return f'{head}case "$1" in\n{"".join(cases)}{usage}esac\n'


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
