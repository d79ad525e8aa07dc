"""The launched world: checked against the plan before torch is imported, then joined."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dsft.environment import SETTINGS
from dsft.errors import EXIT_FAILED, DsftError, Problem
from dsft.plan.record import Plan
from dsft.plan.versions import installed_versions

if TYPE_CHECKING:
    import torch
    from safetensors import SafetensorError


@dataclass(frozen=True)
class World:
    """Who this process is. `device` is where its part of the model lives."""

    rank: int
    size: int
    device: torch.device
    store: torch.distributed.Store  # shared by all ranks, without the process group

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def fails_first(self) -> bool:
        """Whether no other rank has failed before: the one that has is the one to say why."""
        try:
            return self.store.add("dsft/failures", 1) == 1
        except RuntimeError:  # the rank that holds the store is gone
            return True


def check(plan: Plan, directory: Path, environment: Mapping[str, str] = os.environ) -> None:
    """Raises DsftError with every difference between the plan and the process that was started, both values named."""
    problems = [*_world_differs(plan, environment), *_engine_differs(plan, environment)]
    problems += [*_versions_differ(plan), *_files_differ(plan, directory)]
    if problems:
        raise DsftError(problems)


def _world_differs(plan: Plan, environment: Mapping[str, str]):
    launched = environment.get("WORLD_SIZE", "1")
    if launched != str(plan.batch.world_size):
        yield Problem(
            "world-mismatch",
            f"the plan is for {plan.batch.world_size} processes, but {launched} were launched (WORLD_SIZE)",
            help="start it with the commands in launch/ beside plan.json, or compile the recipe for this world",
        )


def _engine_differs(plan: Plan, environment: Mapping[str, str]):
    def told(name: str) -> bool:
        return environment.get(name, "").lower() in ("true", "1")

    engine = plan.strategy.engine
    for name, other in (("ACCELERATE_USE_DEEPSPEED", "deepspeed"), ("ACCELERATE_USE_FSDP", "fsdp")):
        if told(name) and engine != other:
            yield Problem(
                "engine-mismatch",
                f"the plan's engine is {engine}, but it was launched for {other} ({name})",
                help="pass the accelerate.yaml beside plan.json to accelerate launch --config_file",
            )
    stage = environment.get("ACCELERATE_DEEPSPEED_ZERO_STAGE")
    if (
        told("ACCELERATE_USE_DEEPSPEED")
        and engine == "deepspeed"
        and stage not in (None, str(plan.strategy.zero_stage))
    ):
        yield Problem(
            "engine-mismatch",
            f"the plan's ZeRO stage is {plan.strategy.zero_stage}, but it was launched for stage {stage} "
            "(ACCELERATE_DEEPSPEED_ZERO_STAGE)",
            help="pass the accelerate.yaml beside plan.json to accelerate launch --config_file",
        )
    if told("ACCELERATE_USE_DEEPSPEED"):
        return  # precision is deepspeed.json's, and accelerate refuses a second saying: it tells "no" whatever it is
    precision = environment.get("ACCELERATE_MIXED_PRECISION")
    planned = {"fp32": "no"}.get(plan.training.precision, plan.training.precision)
    if precision not in (None, planned):
        yield Problem(
            "precision-mismatch",
            f"the plan's precision is {plan.training.precision}, but it was launched with mixed precision "
            f"{precision} (ACCELERATE_MIXED_PRECISION)",
            help="pass the accelerate.yaml beside plan.json to accelerate launch --config_file; to another launcher the "
            "variable means nothing: unset it",
        )


def _versions_differ(plan: Plan):
    installed = installed_versions()
    for package, planned in plan.versions.items():
        if installed.get(package) != planned:
            yield Problem(
                "version-mismatch",
                f"the plan was compiled with {package} {planned}, but {installed.get(package, 'none')} is installed here",
                help=f"install {package} {planned} on this machine, or compile the recipe with what is installed",
            )


def _files_differ(plan: Plan, directory: Path):
    for name, planned in plan.files.items():
        path = directory / name
        if not path.is_file():
            yield Problem(
                "file-missing", f"{path}, which the plan needs, is not there", help="compile the recipe again"
            )
        elif hashlib.sha256(path.read_bytes()).hexdigest() != planned:
            yield Problem(
                "file-changed",
                f"{path} was changed after it was compiled",
                help="make the change in the recipe (for DeepSpeed: strategy.config) and compile it again",
            )


def forget_launcher(environment: dict[str, str] | os._Environ = os.environ) -> None:
    """Takes the launcher's settings out of the environment, so that every launcher starts the same training."""
    for name in [name for name in environment if name.startswith(SETTINGS)]:
        del environment[name]


def return_freed_memory() -> None:
    """Blocks of 128 KiB and more go back to the system when they are freed.

    glibc starts there, but goes up to 32 MiB as blocks are freed (`man mallopt`), and among smaller blocks the hole that
    an aligned one leaves does not take the next one of its size: a process grew with every update, up to twice of what
    its tensors take. The price is the system's zeroing of pages: a fifth more processor time with a Llama of 30M parameters.
    """
    mmap_threshold = -3  # M_MMAP_THRESHOLD in malloc.h
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).mallopt(mmap_threshold, 128 * 1024)


def join(plan: Plan) -> World:
    """Joins the process group; afterwards the world is known to have the planned size.

    Raises DsftError where the plan wants GPUs that this machine does not have, or the group came up with another size.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed import rendezvous

    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
        os.environ.setdefault(name, value)  # a world of one, started by hand
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", plan.cluster.processes_per_node))
    cpu = plan.cluster.device == "cpu"
    # One rule for all launchers (torchrun would set 1, others leave every core to every process). With a GPU it is for
    # an optimizer that is offloaded.
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_size))
    if cpu:
        return_freed_memory()
        device = torch.device("cpu")
    else:
        if local_size > torch.cuda.device_count():
            raise DsftError(
                Problem(
                    "no-device",
                    f"the plan wants {local_size} GPUs on each machine, but {torch.cuda.device_count()} are visible here",
                    help="set cluster.processes_per_node to the number of GPUs, or cluster.device to cpu",
                )
            )
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    timeout = timedelta(seconds=plan.cluster.timeout_seconds)
    if "MASTER_PORT" in os.environ:
        store, *_ = next(rendezvous("env://", timeout=timeout))
    else:
        store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    size = int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo" if cpu else "nccl", store=store, rank=rank, world_size=size, timeout=timeout)
    if dist.get_world_size() != plan.batch.world_size:
        raise DsftError(
            Problem(
                "world-mismatch",
                f"the plan is for {plan.batch.world_size} processes, but {dist.get_world_size()} joined",
            )
        )
    return World(rank, size, device, store)


def leave() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def total(values: list[float], world: World) -> list[float]:
    """The sums of `values` over all ranks, in fp64, the same on every rank."""
    import torch
    import torch.distributed as dist

    tensor = torch.tensor(values, dtype=torch.float64, device=world.device)
    dist.all_reduce(tensor)
    return tensor.tolist()


def on_main(world: World, function: Callable[..., Any], *arguments: Any) -> Any:
    """Calls `function` on the main rank alone. Every rank gets what it returned, or the DsftError it raised.

    What the disk refuses is a DsftError too: a rank that failed alone would leave the others waiting.
    """
    import torch.distributed as dist
    from safetensors import SafetensorError

    dist.barrier()  # what the other ranks did before is done, on their disks too
    outcome: list[Any] = [None, None]
    if world.is_main:
        try:
            outcome[0] = function(*arguments)
        except DsftError as error:
            outcome[1] = (error.problems, error.exit_code)
        except (OSError, SafetensorError) as error:
            about = next((str(argument) for argument in arguments if isinstance(argument, Path)), "")
            outcome[1] = (disk_problem(error, about),), EXIT_FAILED
        except Exception as error:  # noqa: BLE001 - the others must hear of it, whatever it is
            traceback.print_exc()
            outcome[1] = (Problem("internal", f"{type(error).__name__}: {error}"),), EXIT_FAILED
    dist.broadcast_object_list(outcome)
    if outcome[1]:
        raise DsftError(*outcome[1])
    return outcome[0]


def disk_problem(error: OSError | SafetensorError, about: str = "") -> Problem:
    """What the disk refused: no space, no permission, a file that has gone. `about` stands in for a missing name."""
    named = isinstance(error, OSError) and error.filename
    message = f"{error.filename}: {error.strerror}" if named else f"cannot write {about}: {error}"
    return Problem("disk", message, help="mend it and start again: the run goes on from its newest checkpoint")
