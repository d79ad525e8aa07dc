"""A run from beginning to end, in the order it happens."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path

import torch

from dsft.errors import refused
from dsft.plan.begun import RECORD, is_begun
from dsft.plan.record import Plan, to_json
from dsft.train import checkpoint, folders, report
from dsft.train.data import Examples, load_examples
from dsft.train.engines import engine as engine_module
from dsft.train.engines.wrapped import Wrapped
from dsft.train.loop import evaluate, train
from dsft.train.memory import peak_memory
from dsft.train.model import build_model, check_tokens, load_tokenizer
from dsft.train.result import result_folder, save_result, settle_generation
from dsft.train.world import World, on_main, total


def run(plan: Plan, directory: Path, world: World) -> Path:
    """Trains by `plan` and returns the folder of the result. Every rank calls it; only the main one speaks.

    `directory` is the compiled folder, where deepspeed.json is. Raises DsftError, on every rank the same.
    """
    started = time.perf_counter()
    report.quieten_libraries(plan.cluster.device)
    lock = on_main(world, _lock, Path(plan.checkpoint.output_dir))
    try:
        return _run(plan, directory, world, started)
    finally:
        if world.is_main:
            os.close(lock)


def _run(plan: Plan, directory: Path, world: World, started: float) -> Path:
    saved, finished = on_main(world, _start_or_resume, plan)
    if finished:
        if world.is_main:
            print(f"{plan.name} is finished: {result_folder(plan)} holds its result. Nothing to do.", flush=True)
        return result_folder(plan)
    done = saved.update if saved else 0
    tokenizer = load_tokenizer(plan)
    examples, evaluation = load_examples(plan, tokenizer)
    torch.manual_seed(plan.training.seed)
    model = build_model(plan)
    check_tokens(model, max(part.last_token for part in (examples, evaluation) if part))
    if saved:
        checkpoint.load_parameters(saved, model)
    settle_generation(model, tokenizer)
    sizes = _sizes(model)
    engine = engine_module(plan.strategy.engine)
    wrapped = engine.wrap(plan, model, world, directory)
    if saved:
        checkpoint.load_optimizer(saved, plan, engine, wrapped)
    torch.manual_seed(plan.training.seed + world.rank)  # dropout draws differ between ranks
    restored = checkpoint.load_random_state(saved, world) if saved else True
    if total([not restored], world)[0] and plan.method.lora_dropout and world.is_main:
        print("The checkpoint is of another world: dropout draws differ from here on.", flush=True)

    with report.reporting(plan, world, done) as reporter:
        reporter.begin(sizes, _supervision(examples))
        if not done:
            reporter.evaluated(0, _assess(plan, wrapped, evaluation, world))
        for update in train(plan, engine, wrapped, examples, world, done):
            reporter.updated(update)
            final = update.number == plan.training.total_updates
            if final or _due(update.number, plan.training.eval_updates):
                reporter.evaluated(update.number, _assess(plan, wrapped, evaluation, world))
            if _due(update.number, plan.checkpoint.save_updates) or (final and plan.checkpoint.save_updates):
                reporter.saved(checkpoint.save(plan, engine, wrapped, world, update.number))
        result = save_result(plan, engine, wrapped, model, tokenizer, world)
        reporter.end(result, time.perf_counter() - started, peak_memory(world))
    return result


def _assess(plan: Plan, wrapped: Wrapped, evaluation: Examples | None, world: World) -> float | None:
    return evaluate(plan, wrapped, evaluation, world) if evaluation else None


def _due(update: int, every: int | None) -> bool:
    return every is not None and update % every == 0


def _lock(folder: Path) -> int:
    """Takes the output folder for this run until the descriptor is closed, by a kill too."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / ".lock", os.O_CREAT | os.O_RDWR, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise refused(
            "run-busy",
            f"another run is writing to {folder}",
            help="wait for it, or choose another name or checkpoint.output_dir",
        ) from error
    return lock


def _start_or_resume(plan: Plan) -> tuple[checkpoint.Saved | None, bool]:
    """The checkpoint to go on from, and whether the run is finished. Called on the main rank; marks output_dir as taken.

    Raises DsftError where output_dir holds something else than this run.
    """
    if is_begun(plan) and result_folder(plan).is_dir():
        return None, True
    folder = Path(plan.checkpoint.output_dir)
    folders.write_text(folder / RECORD, to_json(plan))
    return checkpoint.newest(folder), False


def _sizes(model: torch.nn.Module) -> tuple[int, int]:
    """Parameters trained, and all."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _supervision(examples: Examples) -> tuple[int, int, int]:
    """Tokens that are learned, all tokens, and rows without any to learn."""
    return sum(examples.supervised), sum(examples.lengths), sum(count == 0 for count in examples.supervised)
