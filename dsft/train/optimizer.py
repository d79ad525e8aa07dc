"""The optimizer: the same torch.optim class under every engine."""

from __future__ import annotations

import torch
from torch import nn

from dsft.plan.record import Training

MOMENTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ()}  # per-parameter state, by torch's names


def make_optimizer(model: nn.Module, training: Training) -> torch.optim.Optimizer:
    """AdamW or SGD over the trainable parameters; weight decay on matrices only, never on biases and norms."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if training.optim == "sgd":
        return torch.optim.SGD(groups, lr=training.learning_rate)
    return torch.optim.AdamW(
        groups,
        lr=training.learning_rate,
        betas=(training.adam_beta1, training.adam_beta2),
        eps=training.adam_epsilon,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
