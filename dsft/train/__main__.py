"""`python -m dsft.train plan.json`: one rank of a run. Started by any launcher; prints on the main rank only."""

from __future__ import annotations

import operator
import os
import sys
import time
import traceback
from functools import partial
from pathlib import Path

from safetensors import SafetensorError

from dsft.errors import EXIT_FAILED, EXIT_INTERRUPTED, DsftError, refused
from dsft.plan.record import Plan, from_json
from dsft.train import world

QUIET_SECONDS = 5  # a rank that leaves the word to another lets it speak: launchers end all when the first one ends
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words for a process that died


def main(arguments: list[str]) -> int:
    """Runs the plan and returns the exit code. The error boundary of training processes."""
    rank = os.environ.get("RANK", "0")
    speaks = partial(operator.eq, os.environ.get("LOCAL_RANK", "0"), "0")  # what one rank of a machine finds, all do
    try:
        # deepspeed's launcher adds an argument of its own to every program it starts.
        arguments = [argument for argument in arguments if not argument.startswith("--local_rank")]
        if len(arguments) != 1:
            raise refused("usage", "usage: python -m dsft.train PLAN.JSON")
        path = Path(arguments[0]).resolve()
        plan = _read(path)
        world.check(plan, path.parent)
        world.forget_launcher()
        joined = world.join(plan)
        speaks = joined.fails_first
        from dsft.train.run import run

        run(plan, path.parent, joined)
        world.leave()
        return 0
    except DsftError as error:
        if speaks():
            for problem in error.problems:
                print(problem.render(), file=sys.stderr, flush=True)
        else:
            time.sleep(QUIET_SECONDS)
        return error.exit_code
    except (OSError, SafetensorError) as error:  # the disk: full, not writable, gone
        print(f"[rank {rank}] {world.disk_problem(error).render()}", file=sys.stderr, flush=True)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except Exception as error:  # noqa: BLE001 - a fault of dsft or of what it stands on: all that is known, and whose it is
        if isinstance(error, RuntimeError) and any(sign in str(error) for sign in LOST):
            print(f"[rank {rank}] the connection to another process of the job is lost", file=sys.stderr, flush=True)
            return EXIT_FAILED
        text = traceback.format_exc()
        print("".join(f"[rank {rank}] {line}\n" for line in text.splitlines()), end="", file=sys.stderr, flush=True)
        return EXIT_FAILED


def _read(path: Path) -> Plan:
    try:
        return from_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise refused("plan-unreadable", f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise refused("plan-unreadable", f"{path}: {error}", help="compile the recipe again") from error


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group that lost a member may hold an orderly exit up
