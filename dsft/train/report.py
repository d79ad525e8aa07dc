"""What a person sees of a run, and what programs read of it. The main rank's only.

On a terminal a progress bar; elsewhere one plain line an update. metrics.jsonl always, TensorBoard if asked for.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from dsft.plan.begun import METRICS
from dsft.plan.describe import batch_line, count, shown_size, strategy_name
from dsft.plan.record import Plan
from dsft.train.loop import Update
from dsft.train.memory import planned
from dsft.train.world import World, on_main


def quieten_libraries(device: str) -> None:
    """Progress bars, notices and deprecation warnings of libraries are not the user's business."""
    os.environ["DS_ACCELERATOR"] = device  # peft imports deepspeed, which looks for its device aloud unless it is told
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    warnings.filterwarnings("ignore")
    for name in ("transformers", "datasets", "peft", "accelerate", "DeepSpeed", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)
    import datasets
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    datasets.disable_progress_bars()


@contextlib.contextmanager
def reporting(plan: Plan, world: World, done: int) -> Iterator[Report | Silence]:
    """The report of a run that goes on after `done` updates; closed whatever happens. Ranks but the main are silent."""
    reporter = Report(plan, done) if on_main(world, _open_metrics, plan, done) and world.is_main else Silence()
    try:
        yield reporter
    finally:
        reporter.close()


def _open_metrics(plan: Plan, done: int) -> bool:
    """Takes back what was written of updates after `done`, a line cut short by a kill among them."""
    path = Path(plan.checkpoint.output_dir) / METRICS
    kept = [record for record in read_metrics(path) if record["update"] <= done] if done else []
    path.write_text("".join(json.dumps(record) + "\n" for record in kept))
    return True


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file, up to a line that is not whole."""
    if path.is_file():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


class Silence:
    """What the other ranks report: nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *arguments: None


class Report:
    """The main rank's console, progress bar, metrics file and TensorBoard writer."""

    def __init__(self, plan: Plan, done: int):
        folder = Path(plan.checkpoint.output_dir)
        self.plan, self.done = plan, done
        self.console = Console(file=sys.stdout, soft_wrap=True)
        self.evaluations = [record["eval_loss"] for record in read_metrics(folder / METRICS) if "eval_loss" in record]
        self.metrics = (folder / METRICS).open("a")
        self.tensorboard = None
        if plan.logging.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self.tensorboard = SummaryWriter(folder / "tensorboard", purge_step=done + 1 if done else 0)
        self.progress: Progress | None = None
        self.speed = 0.0  # tokens a second, smoothed
        self.seconds = 0.0  # spent in updates since this start

    def begin(self, sizes: tuple[int, int], supervision: tuple[int, int, int]) -> None:
        """The start-up summary and, on a terminal, the progress bar."""
        self._say(summary(self.plan, sizes, supervision, self.done))
        if self.console.is_terminal:
            whole = Column(no_wrap=True)
            status = TextColumn("{task.fields[status]}", table_column=Column(no_wrap=True, overflow="ellipsis"))
            columns = (
                BarColumn(10),
                MofNCompleteColumn(table_column=whole),
                TimeRemainingColumn(table_column=whole),
                status,
            )
            self.progress = Progress(*columns, console=self.console)
            total = self.plan.training.total_updates
            self.task = self.progress.add_task("", total=total, completed=self.done, status="")
            self.progress.start()

    def updated(self, update: Update) -> None:
        """All updates move the bar; every `logging_updates` and the last are written down."""
        now = update.tokens / update.seconds
        self.speed = now if not self.speed else 0.8 * self.speed + 0.2 * now
        self.seconds += update.seconds
        total = self.plan.training.total_updates
        if self.progress is not None:
            self.progress.update(self.task, completed=update.number, status=_status(update, self.speed))
        if update.number % self.plan.logging.logging_updates and update.number != total:
            return
        if self.progress is None:
            left = (total - update.number) * self.seconds / (update.number - self.done)
            self._say(f"update {update.number}/{total}  {_status(update, self.speed)}  {_duration(left)} left")
        self._write(
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
        self._scalars(
            update.number,
            {
                "train/loss": update.loss,
                "train/learning_rate": update.learning_rate,
                "train/grad_norm": update.grad_norm,
                "train/tokens_per_second": now,
            },
        )

    def evaluated(self, update: int, loss: float | None) -> None:
        if loss is None:
            return
        self.evaluations.append(loss)
        self._say(f"evaluation after {update} updates: loss {loss:.4f}")
        self._write({"update": update, "eval_loss": loss})
        self._scalars(update, {"eval/loss": loss})

    def saved(self, path: Path) -> None:
        self._say(f"checkpoint {path}")

    def end(self, result: Path, seconds: float, peak: int) -> None:
        """The closing summary. `peak`: bytes of memory of the largest process."""
        self.close()
        self._say(closing(self.plan, result, self.evaluations, seconds, peak))

    def close(self) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.tensorboard is not None:
            self.tensorboard.close()
        self.metrics.close()

    def _say(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write(self, record: dict[str, Any]) -> None:
        self.metrics.write(json.dumps(record) + "\n")
        self.metrics.flush()

    def _scalars(self, step: int, values: dict[str, float]) -> None:
        if self.tensorboard is not None:
            for name, value in values.items():
                self.tensorboard.add_scalar(name, value, step)


def _lines(rows: dict[str, str]) -> str:
    width = max(len(name) for name in rows)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows.items())


def summary(plan: Plan, sizes: tuple[int, int], supervision: tuple[int, int, int], done: int) -> str:
    """The start-up summary. `sizes`: parameters trained and all. `supervision`: tokens learned, tokens, rows without any."""
    trained, everything = sizes
    learned, tokens, idle = supervision
    batch, training = plan.batch, plan.training
    processes = count(batch.world_size, "process", "processes")
    rows = {
        "model": plan.model.path,
        "method": _method(plan, trained, everything),
        "strategy": f"{strategy_name(plan.strategy)}, {processes} on {plan.cluster.device}, {training.precision}",
        "batch": batch_line(batch),
        "data": f"{plan.data.train_rows:,} rows, {tokens:,} tokens, {learned:,} of them learned"
        + (f"; {plan.data.eval_rows:,} rows for evaluation" if plan.data.eval_rows else ""),
        "steps": f"{training.total_updates:,} updates, {training.updates_per_epoch:,} an epoch"
        + (f"; going on after {done:,}" if done else ""),
        "output": plan.checkpoint.output_dir,
    }
    if idle:
        rows["note"] = f"{idle:,} rows have no token to learn within max_length {plan.data.max_length}"
    return f"{plan.name}\n{_lines(rows)}"


def closing(plan: Plan, result: Path, evaluations: list[float], seconds: float, peak: int) -> str:
    """The closing lines: what came out, where it is, what it took, and what to do with it."""
    kind = "adapter" if plan.method.type == "lora" else "model"
    rows = {kind: str(result), "metrics": str(Path(plan.checkpoint.output_dir) / METRICS)}
    rows["memory"] = f"at most {shown_size(peak)} a process"
    if plan.estimate:
        rows["memory"] += f"; {shown_size(planned(plan.estimate))} were planned"
    if plan.logging.tensorboard:
        rows["curves"] = f"tensorboard --logdir {shlex.quote(str(Path(plan.checkpoint.output_dir) / 'tensorboard'))}"
    rows["try it"] = f'dsft generate {shlex.quote(str(result))} "Who are you?"'
    if plan.method.type == "lora":
        rows["merge it"] = f"dsft export {shlex.quote(str(result))} -o {shlex.quote(str(result.with_name('merged')))}"
    evaluation = f" Evaluation loss {evaluations[0]:.4f} before, {evaluations[-1]:.4f} after." if evaluations else ""
    return f"Done in {_duration(seconds)}.{evaluation}\n{_lines(rows)}"


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
