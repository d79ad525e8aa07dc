"""The training loop: batching, loss, accumulation, clipping, schedule and step, from top to bottom.

The loss of an update is the sum over all supervised tokens of its rows, on all ranks and in all passes, divided by
their number. That number is known before the first pass, and everything else is a sum: so the result does not depend
on how the rows were spread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.nn.functional as F

from dsft.errors import failed
from dsft.plan.record import Plan
from dsft.train.batches import micro_batches, update_rows
from dsft.train.data import IGNORED, Examples
from dsft.train.engines.wrapped import Wrapped
from dsft.train.optimizer import set_learning_rate
from dsft.train.schedule import learning_rate
from dsft.train.world import World, total


@dataclass(frozen=True)
class Update:
    """What one optimizer update did. `number` counts from 1; `grad_norm` is the global norm before clipping."""

    number: int
    epoch: float
    loss: float  # mean over the supervised tokens of the update
    learning_rate: float
    grad_norm: float
    supervised_tokens: int
    tokens: int  # all but padding
    seconds: float


def train(
    plan: Plan, engine: ModuleType, wrapped: Wrapped, examples: Examples, world: World, done: int
) -> Iterator[Update]:
    """Trains from update `done` to the last, yielding after each: the caller reports, evaluates and saves there.

    Raises DsftError on every rank when the loss or the gradient is no longer finite.
    """
    batch, training = plan.batch, plan.training
    for update in range(done, training.total_updates):
        started = time.perf_counter()
        rows = update_rows(update, len(examples), batch.global_batch_size, training.seed)
        supervised = sum(examples.supervised[row] for row in rows)
        passes = micro_batches(rows, examples.lengths, batch.per_device, world.size, world.rank)
        wrapped.model.train()
        loss_sum = torch.zeros((), device=world.device)
        for at, ids in enumerate(passes):
            with engine.accumulating(wrapped, last=at == len(passes) - 1):
                token_losses = token_loss_sum(wrapped.model, examples, ids, world)
                # Engines average gradients over ranks; times the number of ranks that is the sum.
                engine.backward(wrapped, token_losses * (world.size / max(1, supervised)))
                loss_sum += token_losses.detach()
        (loss,) = total([float(loss_sum)], world)
        loss /= max(1, supervised)
        _check_finite("loss", loss, update)
        set_learning_rate(wrapped.optimizer, learning_rate(update, training))
        grad_norm = engine.update(wrapped, training.max_grad_norm)
        _check_finite("gradient norm", grad_norm, update)
        yield Update(
            number=update + 1,
            epoch=(update + 1) / training.updates_per_epoch,
            loss=loss,
            learning_rate=wrapped.optimizer.param_groups[0]["lr"],  # as it was used, not as it was meant
            grad_norm=grad_norm,
            supervised_tokens=supervised,
            tokens=sum(examples.lengths[row] for row in rows),
            seconds=time.perf_counter() - started,
        )


def _check_finite(what: str, value: float, update: int) -> None:
    """The value is the same on all ranks, so all of them stop here, and nothing of the update is ever saved."""
    if not math.isfinite(value):
        raise failed(
            "not-finite",
            f"the {what} of update {update + 1} is {value}",
            help="lower training.learning_rate, or look at the rows of this update",
        )


def token_loss_sum(model, examples: Examples, ids: list[int], world: World) -> torch.Tensor:
    """The summed cross entropy of all supervised tokens in rows `ids`, in fp32: a scalar with gradient.

    Logits are computed at supervised positions only. They are the largest tensor of a small model's step, and most
    of a chat's positions teach nothing.
    """
    input_ids, labels = (tensor.to(world.device) for tensor in examples.batch(ids))
    targets = torch.full_like(labels, IGNORED)
    targets[:, :-1] = labels[:, 1:]  # a position predicts the token after it
    supervised = targets != IGNORED
    logits = model(input_ids=input_ids, logits_to_keep=supervised, use_cache=False).logits  # [supervised, vocabulary]
    return F.cross_entropy(logits.float(), targets[supervised], reduction="sum")


@torch.no_grad()
def evaluate(plan: Plan, wrapped: Wrapped, examples: Examples, world: World) -> float:
    """The mean loss over all supervised tokens of `examples`, the same number on every rank."""
    wrapped.model.eval()
    rows = range(len(examples))
    passes = micro_batches(rows, examples.lengths, plan.batch.per_device, world.size, world.rank)
    sums = [float(token_loss_sum(wrapped.model, examples, ids, world)) for ids in passes]
    return total([sum(sums)], world)[0] / sum(examples.supervised)
