"""The commands of dsft, and the one place where errors become text and exit codes.

Each command imports what it needs when it runs: `dsft check` loads no torch, and `dsft --version` loads nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import io
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import dsft
from dsft.errors import EXIT_FAILED, EXIT_INTERRUPTED, DsftError, Problem, refused

_OF_OUTPUT = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)  # a write can fail with
MOST_NODES = 10_000  # that `dsft plan --nodes` lays a job out for


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns the exit code. The only place that prints an error."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a name that the terminal cannot show is no reason to fail
    try:
        code = _run(arguments, sys.argv[1:] if argv is None else argv)
        if sys.stdout:  # None where it was closed before the start
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _OF_OUTPUT and error.filename is None and sys.stdout:
            # Standard output: what is left in its buffer would fail once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            if not isinstance(error, BrokenPipeError):  # whose reader has gone (`dsft schema | head`)
                report([Problem("cannot-write", f"cannot write to standard output: {error.strerror}")])
            return EXIT_FAILED
        if getattr(arguments, "debug", False):
            raise
        print(
            f"internal error: {type(error).__name__}: {error}; this is a fault of dsft; run again with --debug",
            file=sys.stderr,
        )
        return EXIT_FAILED


def _run(arguments: argparse.Namespace, argv: list[str]) -> int:
    try:
        _check_paths(argv)
        arguments.run(arguments)
        return 0
    except DsftError as error:
        report(error.problems, getattr(arguments, "report_as", "text"))
        return error.exit_code


def _check_paths(argv: list[str]) -> None:
    """Raises DsftError where a relative path leads nowhere, or a path cannot be written into a file of dsft's."""
    try:
        here = os.getcwd()
    except OSError:
        message = "the folder that this command was started in is not there any more"
        raise refused("no-folder", message, help="change into a folder that is there") from None
    for path in (here, *argv):
        if re.search("[\ud800-\udfff]", path):  # how Python shows bytes that are not UTF-8
            message = f"{ascii(path)[1:-1]} is not UTF-8, and the files that dsft writes are"
            raise refused("not-utf-8", message, help="give the file or folder another name")


def check(arguments: argparse.Namespace) -> None:
    """Report everything that is wrong with a recipe, its files included; write nothing."""
    _, plan = _planned(arguments)
    if arguments.report_as == "text":
        print(f"{arguments.recipe}: nothing wrong. {plan.name}: {describe(plan)}")


def compile_(arguments: argparse.Namespace) -> None:
    """Write the plan, the launchers' files and the commands to start the job."""
    from dsft.compile import write

    plan, artifacts, directory = _compiled(arguments)
    write(artifacts, directory)
    print(summary(plan, artifacts, directory))


def plan(arguments: argparse.Namespace) -> None:
    """Show what fits: every strategy with its memory and time side by side, and the one that the recipe gets."""
    from dsft.plan import compare
    from dsft.plan.table import table, to_json
    from dsft.recipe import load_recipe

    said = [f"cluster.gpu={arguments.gpu}", "cluster.device=cuda"] if arguments.gpu else []
    recipe = load_recipe(arguments.recipe, [*arguments.set, *said])
    comparison, problems = compare(recipe, machines=arguments.nodes)
    if arguments.json:
        print(json.dumps(to_json(comparison), indent=2))
    else:
        print(table(comparison))
    if comparison.choice is None:
        raise DsftError(problems)
    report(problems)


def diff(arguments: argparse.Namespace) -> None:
    """Show what changes from one recipe to another: in the plan, in each file, in memory."""
    from dsft.compile import compile_plan
    from dsft.diff import changes, render

    plans, files = [], []
    for path in (arguments.old, arguments.new):
        arguments.recipe = os.path.join(path, "recipe.json") if os.path.isdir(path) else path
        recipe, plan = _planned(arguments)
        # Both as if written to one folder: only what differs in substance is shown.
        artifacts = compile_plan(plan, recipe.to_json(plan.checkpoint.output_dir), Path.cwd() / "build")
        plans.append(plan)
        files.append(artifacts.files)
    found = changes(*plans, *files)
    print(json.dumps(found, indent=2, ensure_ascii=False) if arguments.json else render(found))


def launch(arguments: argparse.Namespace) -> None:
    """Compile a recipe and run it."""
    from dsft.compile import write
    from dsft.launch import dry_run, launch

    plan, artifacts, directory = _compiled(arguments, to_run=not arguments.dry_run)
    if arguments.dry_run:
        print(dry_run(plan, artifacts, directory), end="")
        return
    write(artifacts, directory)
    launch(plan, artifacts, directory)


def export(arguments: argparse.Namespace) -> None:
    """Make a plain model folder of a result; an adapter is merged into its base."""
    from dsft.train.export import export

    print(export(arguments.source, arguments.output))


def generate(arguments: argparse.Namespace) -> None:
    """Answer one prompt with a trained model."""
    from dsft.train.generate import generate

    print(generate(arguments.model, arguments.prompt, arguments.max_new_tokens))


def schema(arguments: argparse.Namespace) -> None:
    """Print the JSON Schema of a recipe."""
    from dsft.recipe.schema import schema_path

    print(schema_path().read_text(encoding="utf-8"), end="")


def init(arguments: argparse.Namespace) -> None:
    """Write a first recipe from a few answers: flags, or what is asked for on a terminal."""
    from dsft.init import init

    flags = ("model", "data", "format", "method", "cpu", "gpu", "gpus_per_node", "hostfile")
    said = {flag: getattr(arguments, flag) for flag in flags}
    try:
        text, problems = init(arguments.file, said, ask=sys.stdin.isatty())
    except DsftError as error:  # of the data too, which a run would fail on and this refuses
        raise DsftError(error.problems) from error
    print(text)
    if any(problem.severity == "error" for problem in problems):
        raise DsftError(problems)
    report(problems)


def explain(arguments: argparse.Namespace) -> None:
    """Print the page on a kind of error: what it means, an example, what to do."""
    from dsft.explain import overview, page

    print(page(arguments.kind) if arguments.kind else overview())


def describe(plan) -> str:
    """The plan in one line."""
    from dsft.plan.describe import batch_line, count

    return f"{strategy_line(plan)}; {batch_line(plan.batch)}; {count(plan.training.total_updates, 'update', 'updates')}"


def summary(plan, artifacts, directory: Path) -> str:
    """What `dsft compile` tells: decisions, files, commands."""
    import shlex

    from dsft.plan.describe import batch_line

    training, data = plan.training, plan.data
    lines = [
        f"{plan.name}",
        f"  strategy  {strategy_line(plan)}",
        *memory_lines(plan),
        f"  batch     {batch_line(plan.batch)}",
        f"  updates   {training.total_updates}, {training.warmup_updates} of them warm-up; "
        + f"{training.updates_per_epoch} an epoch of {data.train_rows} rows",
        f"  output    {plan.checkpoint.output_dir}",
        f"  files     {directory}",
        *(f"              {name}" for name in artifacts.files),
        "",
        "Start it with one of:",
    ]
    for launcher, commands in artifacts.commands.items():
        if len(commands) == 1:
            lines.append(f"  {shlex.join(commands[0])}")
        elif commands:
            lines.append(
                f"  {directory}/launch/{launcher}.sh NODE    (on every machine, NODE from 0 to {len(commands) - 1})"
            )
    return "\n".join(lines)


def memory_lines(plan) -> list[str]:
    """What the planner expects, where it knows model and device."""
    from dsft.plan.describe import shown_size

    if plan.estimate is None:
        return []
    expected = plan.estimate
    reason = [f"            {expected.reason}"] if expected.reason else []
    part = f"{expected.device_bytes / expected.capacity_bytes:.0%} of {shown_size(expected.capacity_bytes)}"
    lines = [*reason, f"  memory    about {shown_size(expected.device_bytes)} a process, {part}"]
    if expected.host_bytes and plan.cluster.device == "cuda":
        lines.append(f"            and {shown_size(expected.host_bytes)} of each machine's own memory")
    if expected.seconds_per_update is not None:
        lines.append(f"  time      about {expected.seconds_per_update:.2g} s an update, by estimate")
    return lines


def strategy_line(plan) -> str:
    from dsft.plan.describe import count, strategy_name

    cluster = plan.cluster
    name = strategy_name(plan.strategy) + (", gradient checkpointing" if plan.model.gradient_checkpointing else "")
    where = (
        f"{count(plan.batch.world_size, 'process', 'processes')} on {count(len(cluster.hosts), 'machine', 'machines')}"
    )
    return f"{name}, {plan.method.type}, {plan.training.precision}, {where} ({cluster.gpu or cluster.device})"


# What is no mistake in a plan, and keeps it from running.
_NOT_TO_RUN = {"model-partial", "folder-taken", "other-run", "run-exists", "run-unreadable", "cannot-write"}


def _planned(arguments: argparse.Namespace, to_run: bool = False):
    """The recipe and its plan. Warnings are reported here; with "json" or "github" that is all there is to print. What
    can be planned and not run is an error `to_run`."""
    from dsft.plan import installed_versions, make_plan
    from dsft.recipe import load_recipe

    recipe = load_recipe(arguments.recipe, arguments.set)
    warnings: list[Problem] = []
    plan = make_plan(recipe, versions=installed_versions(), cwd=Path.cwd(), warn=warnings.append)
    if to_run and any(problem.kind in _NOT_TO_RUN for problem in warnings):
        raise DsftError(
            dataclasses.replace(problem, severity="error") if problem.kind in _NOT_TO_RUN else problem
            for problem in warnings
        )
    report(warnings, getattr(arguments, "report_as", "text"))
    return recipe, plan


def _compiled(arguments: argparse.Namespace, to_run: bool = False):
    """The plan, its artifacts, and the folder they belong in."""
    from dsft.compile import compile_plan

    recipe, plan = _planned(arguments, to_run)
    directory = Path(os.path.abspath(arguments.output or Path("build") / plan.name))
    return plan, compile_plan(plan, recipe.to_json(plan.checkpoint.output_dir), directory), directory


def report(problems: Iterable[Problem], format: str = "text") -> None:
    """Print errors and warnings: "text" for people, on standard error; "json" as one object on standard output, with
    `ok` true where there is no error; "github" as a line each that GitHub Actions shows beside the source."""
    problems = list(problems)
    if format == "json":
        ok = all(problem.severity != "error" for problem in problems)
        print(json.dumps({"ok": ok, "problems": [_as_record(problem) for problem in problems]}, indent=2))
    elif format == "github":
        for problem in problems:
            print(_as_github(problem))
    elif problems:
        print("\n\n".join(problem.render() for problem in problems), file=sys.stderr)


def _as_record(problem: Problem) -> dict[str, Any]:
    """Lines and columns count from 1 in characters; `end` is the column behind the last character."""
    where = problem.where
    place = None
    if where:
        place = {
            "file": None if where.is_argument else where.source,
            "argument": where.source if where.is_argument else None,
            "line": where.line,
            "column": where.column,
            "end": where.column + where.length if where.column else None,
        }
    return {
        "severity": problem.severity,
        "kind": problem.kind,
        "message": problem.message,
        "help": problem.help,
        "where": place,
    }


def _as_github(problem: Problem) -> str:
    """A workflow command: https://docs.github.com/actions/reference/workflows-and-actions/workflow-commands"""
    where = problem.where
    properties: dict[str, Any] = {}
    message = problem.message if not problem.help else f"{problem.message}\nhelp: {problem.help}"
    if where and where.is_argument:
        message = f"{where}: {message}"
    elif where:
        properties["file"] = where.source
        if where.line:
            properties["line"] = where.line
        if where.column:
            properties |= {"col": where.column, "endColumn": where.column + where.length}
    properties["title"] = problem.kind
    said = ",".join(f"{name}={_escape(str(value), ':,')}" for name, value in properties.items())
    return f"::{problem.severity} {said}::{_escape(message)}"


def _escape(text: str, also: str = "") -> str:
    """`text` with percent signs, line ends and the characters of `also` in percent notation."""
    return "".join(f"%{ord(char):02X}" if char in "%\r\n" + also else char for char in text)


def _parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    # Before or after the command; without a default, so that neither place resets the other.
    common.add_argument(
        "--debug", action="store_true", default=argparse.SUPPRESS, help="show the stack trace of an internal error"
    )
    parser = argparse.ArgumentParser(prog="dsft", description=(dsft.__doc__ or "").partition(": ")[2], parents=[common])
    parser.add_argument("--version", action="version", version=f"dsft {dsft.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run, name: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=run.__doc__, description=run.__doc__, parents=[common])
        sub.set_defaults(run=run)
        return sub

    def takes_recipe(sub: argparse.ArgumentParser) -> None:
        sub.add_argument("recipe", metavar="RECIPE", help="a recipe file")
        sub.add_argument(
            "--set",
            metavar="KEY=VALUE",
            action="append",
            default=[],
            help="change a value of the recipe, as in training.max_steps=5; VALUE is JSON, or else text; may be repeated",
        )

    def takes_format(sub: argparse.ArgumentParser) -> None:
        sub.add_argument(
            "--format",
            dest="report_as",
            choices=("text", "json", "github"),
            default="text",
            help="how problems are printed: text for people (default), json, or github for annotations in GitHub Actions",
        )
        sub.add_argument(
            "--json", action="store_const", dest="report_as", const="json", help="the same as --format json"
        )

    # In the order in which they are first used.
    sub = command(init, "init")
    sub.add_argument("file", metavar="FILE", type=Path, nargs="?", default="recipe.json", help="default: recipe.json")
    sub.add_argument("--model", metavar="MODEL", help="a model's folder, or an id of the Hugging Face hub")
    sub.add_argument("--data", metavar="FILE", help="a file of rows: a JSON array, or JSON Lines")
    sub.add_argument("--format", metavar="FORMAT", help="alpaca or messages (default: by the first row)")
    sub.add_argument("--method", metavar="METHOD", help="lora (adapters) or full (all weights)")
    sub.add_argument("--cpu", action="store_true", help="train on the CPU")
    sub.add_argument("--gpu", metavar="NAME", help="the kind of GPU, as in h100-80gb; another name lists all")
    sub.add_argument(
        "--gpus-per-node", metavar="N", type=_positive, help="GPUs (with --cpu: processes) in each machine (default: 1)"
    )
    sub.add_argument("--hostfile", metavar="FILE", help="the machines, where there are several")
    sub = command(check, "check")
    takes_recipe(sub)
    takes_format(sub)
    sub = command(explain, "explain")
    sub.add_argument("kind", metavar="KIND", nargs="?", help="the name in brackets, as in unknown-key; without it, all")
    sub = command(plan, "plan")
    takes_recipe(sub)
    sub.add_argument("--gpu", metavar="NAME", type=_gpu, help="plan for this kind of GPU in place of the recipe's")
    sub.add_argument("--nodes", metavar="N", type=_machines, help="plan for N machines in place of the recipe's")
    sub.add_argument("--json", action="store_true", help="print every alternative as JSON")
    sub = command(diff, "diff")
    sub.add_argument("old", metavar="A", help="a recipe, or a compiled folder")
    sub.add_argument("new", metavar="B", help="another one")
    sub.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], help="change a value of both")
    sub.add_argument("--json", action="store_true", help="print the changes as JSON")
    sub = command(compile_, "compile")
    takes_recipe(sub)
    sub.add_argument("-o", "--output", metavar="DIR", help="where the files go (default: build/NAME)")
    sub = command(launch, "launch")
    takes_recipe(sub)
    sub.add_argument("-o", "--output", metavar="DIR", help="where the files go (default: build/NAME)")
    sub.add_argument("--dry-run", action="store_true", help="print what would be started; write and start nothing")
    sub = command(generate, "generate")
    sub.add_argument("model", metavar="MODEL", type=Path, help="a run's folder, an adapter or a model")
    sub.add_argument("prompt", metavar="PROMPT", help="what the user says")
    sub.add_argument("--max-new-tokens", metavar="N", type=_positive, default=256, help="longest answer (default: 256)")
    sub = command(export, "export")
    sub.add_argument("source", metavar="FROM", type=Path, help="a run's folder, an adapter or a model")
    sub.add_argument("-o", "--output", metavar="DIR", type=Path, required=True, help="the new model folder")
    command(schema, "schema")
    return parser


def _machines(text: str) -> int:
    number = _positive(text)
    if number > MOST_NODES:
        raise argparse.ArgumentTypeError(f"{text} machines are more than {MOST_NODES}")
    return number


def _gpu(text: str) -> str:
    from dsft.plan.gpus import GPUS

    if text not in GPUS:
        raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(GPUS)}")
    return text


def _positive(text: str) -> int:
    if not re.fullmatch("0*[1-9][0-9]{0,8}", text):
        raise argparse.ArgumentTypeError(f"{text} is not a whole number above 0")
    return int(text)
