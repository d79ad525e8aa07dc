"""What a person sees of a run, and what programs read of it. The main rank's only.

On a terminal a progress bar; elsewhere one plain line an update. metrics.jsonl always, TensorBoard if asked for.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from dsft.plan.record import Plan
from dsft.train.loop import Update

METRICS = "metrics.jsonl"


def quieten_libraries() -> None:
    """Progress bars, notices and deprecation warnings of libraries are not the user's business."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    for name in ("transformers", "datasets", "peft", "accelerate", "DeepSpeed", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@dataclass
class Report:
    """The main rank's console, progress bar, metrics file and TensorBoard writer."""

    plan: Plan
    console: Console
    metrics: Any
    tensorboard: Any | None
    progress: Progress | None = None
    task: TaskID | None = None
    started: float = field(default_factory=time.perf_counter)
    speed: float = 0.0  # tokens a second, smoothed

    def write(self, record: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(record) + "\n")
        self.metrics.flush()

    def say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, update: Update) -> None:
        """Reports an update: all of them move the bar, every `logging_updates` are written down."""
        now = update.tokens / update.seconds
        self.speed = now if not self.speed else 0.8 * self.speed + 0.2 * now
        if self.progress is not None:
            self.progress.update(self.task, completed=update.number, status=_status(update, self.speed))
        every, last = self.plan.logging.logging_updates, self.plan.training.total_updates
        if update.number % every and update.number != last:
            return
        if self.progress is None:
            left = (last - update.number) * (time.perf_counter() - self.started) / max(1, update.number - self.first)
            self.say(f"update {update.number}/{last}  {_status(update, self.speed)}  {_duration(left)} left")
        self.write(
            {
                "update": update.number,
                "epoch": round(update.epoch, 6),
                "loss": update.loss,
                "learning_rate": update.learning_rate,
                "grad_norm": update.grad_norm,
                "supervised_tokens": update.supervised_tokens,
                "tokens": update.tokens,
                "seconds": round(update.seconds, 4),
            }
        )
        self.scalars(
            update.number,
            {
                "train/loss": update.loss,
                "train/learning_rate": update.learning_rate,
                "train/grad_norm": update.grad_norm,
                "train/tokens_per_second": now,
            },
        )

    first: int = 0  # updates done before this start

    def begin(self, done: int) -> None:
        """Starts the clock and, on a terminal, the bar."""
        self.first, self.started = done, time.perf_counter()
        if self.console.is_terminal:
            self.progress = Progress(
                BarColumn(24), MofNCompleteColumn(), TextColumn("{task.fields[status]}"), TimeRemainingColumn(),
                console=self.console,
            )
            total = self.plan.training.total_updates
            self.task = self.progress.add_task("", total=total, completed=done, status="")
            self.progress.start()

    def evaluated(self, update: int, loss: float) -> None:
        self.say(f"evaluation after {update} updates: loss {loss:.4f}")
        self.write({"update": update, "eval_loss": loss})
        self.scalars(update, {"eval/loss": loss})

    def scalars(self, step: int, values: dict[str, float]) -> None:
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
            self.progress = None
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.metrics.close()


def open_report(plan: Plan, done: int) -> Report:
    """The report of a run that goes on after `done` updates: what was written of later updates is taken back."""
    folder = Path(plan.checkpoint.output_dir)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / METRICS
    kept = [line for line in path.read_text().splitlines() if json.loads(line)["update"] <= done] if done else []
    path.write_text("".join(line + "\n" for line in kept))
    tensorboard = None
    if plan.logging.tensorboard:
        from torch.utils.tensorboard import SummaryWriter

        tensorboard = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else None)
    return Report(plan, Console(file=sys.stdout, soft_wrap=True), path.open("a"), tensorboard)


def summary(plan: Plan, parameters: tuple[int, int], supervised: tuple[int, int, int], done: int) -> Table:
    """The start-up table. `parameters`: trained and all. `supervised`: supervised tokens, tokens, rows without any."""
    trained, everything = parameters
    learned, tokens, idle = supervised
    batch, training = plan.batch, plan.training
    rows = {
        "model": plan.model.path,
        "method": _method(plan, trained, everything),
        "strategy": f"{strategy_name(plan)}, {batch.world_size} process{'es' * (batch.world_size > 1)} on "
        f"{plan.cluster.device}, {training.precision}",
        "batch": f"{batch.global_batch_size} rows = {batch.per_device} per device x {batch.accumulation} accumulation "
        f"x {batch.world_size} processes",
        "data": f"{plan.data.train_rows:,} rows, {tokens:,} tokens, {learned:,} of them learned"
        + (f"; {plan.data.eval_rows:,} rows for evaluation" if plan.data.eval_rows else ""),
        "steps": f"{training.total_updates:,} updates, {training.updates_per_epoch:,} an epoch"
        + (f"; going on after {done:,}" if done else ""),
        "output": plan.checkpoint.output_dir,
    }
    if idle:
        rows["note"] = f"{idle:,} rows have no token to learn within max_length {plan.data.max_length}"
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0), title=plan.name, title_justify="left")
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/bold]", value)
    return table


def closing(plan: Plan, result: Path, first: float | None, last: float | None, seconds: float) -> str:
    """The closing lines: what came out, where it is, and what to do with it."""
    lines = [f"Done in {_duration(seconds)}."]
    if first is not None and last is not None:
        lines.append(f"Evaluation loss {first:.4f} before, {last:.4f} after.")
    lines.append(f"{'Adapter' if plan.method.type == 'lora' else 'Model'}: {result}")
    lines.append(f"Metrics: {Path(plan.checkpoint.output_dir) / METRICS}")
    lines.append(f'Try it:  dsft generate {result} "Who are you?"')
    if plan.method.type == "lora":
        lines.append(f"Merge it into a plain model:  dsft export {result} -o {result.with_name('merged')}")
    if plan.logging.tensorboard:
        lines.append(f"Curves:  tensorboard --logdir {Path(plan.checkpoint.output_dir) / 'tensorboard'}")
    return "\n".join(lines)


def strategy_name(plan: Plan) -> str:
    stage = plan.strategy.zero_stage
    return f"deepspeed ZeRO-{stage}" if stage else plan.strategy.engine


def _method(plan: Plan, trained: int, everything: int) -> str:
    share = f"{trained:,} of {everything:,} parameters trained ({trained / everything:.2%})"
    return f"LoRA r={plan.method.r}, {share}" if plan.method.type == "lora" else f"full fine-tuning, {share}"


def _status(update: Update, speed: float) -> str:
    return (
        f"loss {update.loss:.4f}  lr {update.learning_rate:.2e}  grad norm {update.grad_norm:.3f}  "
        f"{speed:,.0f} tokens/s"
    )


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
