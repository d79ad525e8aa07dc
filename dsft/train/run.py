"""A run from beginning to end, in the order it happens."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import torch

from dsft.errors import refused
from dsft.plan.record import Plan, from_json, to_json
from dsft.train import checkpoint, report
from dsft.train.data import Examples, load_examples
from dsft.train.engines import engine as engine_module
from dsft.train.loop import evaluate, train
from dsft.train.model import build_model, load_tokenizer
from dsft.train.result import result_folder, save_result
from dsft.train.world import World

# What may differ between a run and its continuation. The rest decides what is learned, and must not.
FREE_TO_CHANGE = {"recipe_sha256", "versions", "strategy", "checkpoint", "logging", "cluster", "launcher", "files"}


def run(plan: Plan, directory: Path, world: World) -> Path:
    """Trains by `plan` and returns the folder of the result. Every rank calls it; only the main one speaks.

    `directory` is the compiled folder, where deepspeed.json is. Raises DsftError, on every rank the same.
    """
    started = time.perf_counter()
    report.quieten_libraries()
    saved = _start_or_resume(plan)
    done = saved.update if saved else 0
    if _finished(plan):
        if world.is_main:
            print(f"{plan.name} is finished: {result_folder(plan)} holds its result. Nothing to do.", flush=True)
        return result_folder(plan)
    tokenizer = load_tokenizer(plan)
    examples, evaluation = load_examples(plan, tokenizer)
    torch.manual_seed(plan.training.seed)
    model = build_model(plan)
    if saved:
        checkpoint.load_parameters(saved, model)
    counts = _count(model)
    engine = engine_module(plan.strategy.engine)
    wrapped = engine.wrap(plan, model, world, directory)
    if saved:
        checkpoint.load_optimizer(saved, plan, engine, wrapped)
    torch.manual_seed(plan.training.seed + world.rank)  # dropout draws differ between ranks
    if saved and not checkpoint.load_random_state(saved, world) and world.is_main:
        print("The checkpoint has no random state for this world; dropout draws differ from here on.", flush=True)

    reporter = None
    if world.is_main:
        reporter = report.open_report(plan, done)
        (Path(plan.checkpoint.output_dir) / "plan.json").write_text(to_json(plan))
        reporter.console.print(report.summary(plan, counts, _supervision(examples), done))

    def assess(update: int) -> float | None:
        if evaluation is None:
            return None
        loss = evaluate(plan, wrapped, evaluation, world)
        if reporter:
            reporter.evaluated(update, loss)
        return loss

    try:
        first = last = assess(done) if done == 0 else None
        if reporter:
            reporter.begin(done)
        for update in train(plan, engine, wrapped, examples, world, done):
            if reporter:
                reporter.update(update)
            final = update.number == plan.training.total_updates
            if final or _due(update.number, plan.training.eval_updates):
                last = assess(update.number)
            if _due(update.number, plan.checkpoint.save_updates) and not final:
                path = checkpoint.save(plan, engine, wrapped, world, update.number)
                if reporter:
                    reporter.say(f"checkpoint {path}")
        result = save_result(plan, engine, wrapped, model, tokenizer, world)
    finally:
        if reporter:
            reporter.close()
    if reporter:
        reporter.say(report.closing(plan, result, first, last, time.perf_counter() - started))
    return result


def _due(update: int, every: int | None) -> bool:
    return every is not None and update % every == 0


def _start_or_resume(plan: Plan) -> checkpoint.Saved | None:
    """The checkpoint to go on from. Raises DsftError where output_dir holds another run, or any under "never"."""
    before = Path(plan.checkpoint.output_dir) / "plan.json"
    if not before.is_file():
        return None
    if plan.checkpoint.resume == "never":
        raise refused(
            "run-exists",
            f"{before.parent} holds a run already, and checkpoint.resume is never",
            help="choose another checkpoint.output_dir, or remove that folder",
        )
    try:
        differences = list(_differences(from_json(before.read_text()), plan))
    except (ValueError, OSError) as error:
        raise refused("run-unreadable", f"cannot read {before}: {error}") from error
    if differences:
        raise refused(
            "other-run",
            f"{before.parent} holds a run that this one cannot go on with: " + "; ".join(differences),
            help="choose another name or checkpoint.output_dir, or remove that folder",
        )
    return checkpoint.newest(before.parent)


def _differences(old: Plan, new: Plan):
    """Each decision about what is learned that differs, with both values."""

    def flat(value, path=""):
        if isinstance(value, dict):
            for name, item in value.items():
                yield from flat(item, f"{path}.{name}".lstrip("."))
        else:
            yield path, value

    was, now = (dict(flat(json.loads(json.dumps(dataclasses.asdict(plan))))) for plan in (old, new))
    for path in {**was, **now}:
        if path.split(".")[0] in FREE_TO_CHANGE or path in ("batch.world_size", "batch.per_device", "batch.accumulation"):
            continue
        if was.get(path) != now.get(path):
            yield f"{path} was {was.get(path)} and is {now.get(path)}"


def _finished(plan: Plan) -> bool:
    return (Path(plan.checkpoint.output_dir) / "plan.json").is_file() and result_folder(plan).is_dir()


def _count(model: torch.nn.Module) -> tuple[int, int]:
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(size for size, trained in sizes if trained), sum(size for size, _ in sizes)


def _supervision(examples: Examples) -> tuple[int, int, int]:
    return sum(examples.supervised), sum(examples.lengths), sum(count == 0 for count in examples.supervised)
