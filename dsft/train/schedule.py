"""The learning rate as a pure function of the update: no scheduler state, nothing that could be stepped twice."""

from __future__ import annotations

import math

from dsft.plan.record import Training


def learning_rate(update: int, training: Training) -> float:
    """The learning rate that update `update` (from 0) uses; `learning_rate(total_updates)` is where it ends.

    The values are those of transformers' get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup and
    get_constant_schedule_with_warmup.
    """
    warmup, total = training.warmup_updates, training.total_updates
    if update < warmup:
        return training.learning_rate * update / warmup
    if training.lr_scheduler_type == "constant":
        return training.learning_rate
    progress = (update - warmup) / max(1, total - warmup)
    if training.lr_scheduler_type == "linear":
        return training.learning_rate * max(0.0, 1.0 - progress)
    return training.learning_rate * max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))
