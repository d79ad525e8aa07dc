"""`python -m dsft.train plan.json`: one rank of a run. Started by any launcher; prints on the main rank only."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path

from dsft.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, DsftError, refused
from dsft.plan.record import Plan, from_json


def main(arguments: list[str]) -> int:
    """Runs the plan and returns the exit code. The error boundary of training processes."""
    rank = os.environ.get("RANK", "0")
    # deepspeed's launcher adds its own argument to every program it starts.
    arguments = [argument for argument in arguments if not argument.startswith("--local_rank")]
    try:
        if len(arguments) != 1:
            raise refused("usage", "usage: python -m dsft.train PLAN.JSON")
        path = Path(arguments[0]).resolve()
        train(_read(path), path.parent)
        return 0
    except DsftError as error:
        if rank == "0":  # the other ranks stop for the same reason
            for problem in error.problems:
                print(problem.render(), file=sys.stderr, flush=True)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception:  # noqa: BLE001 - a fault of dsft or of what it stands on: all that is known, and whose it is
        text = traceback.format_exc()
        print("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)
        return EXIT_FAILED


def train(plan: Plan, directory: Path) -> None:
    from dsft.train import world

    world.check(plan, directory)
    world.forget_launcher()
    joined = world.join(plan)
    try:
        from dsft.train.run import run

        run(plan, directory, joined)
    finally:
        world.leave()


def _read(path: Path) -> Plan:
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refused("plan-unreadable", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise refused("plan-unreadable", f"{path}: {error}", help="compile the recipe again") from error


if __name__ == "__main__":
    code = main(sys.argv[1:])
    if code not in (0, EXIT_USAGE):
        sys.stderr.flush()
        os._exit(code)  # a process group that lost a member may hold an orderly exit up
    sys.exit(code)
