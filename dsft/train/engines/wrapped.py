"""What an engine hands to the loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Wrapped:
    """`model` is what the loop calls; `trainable` names its trained parameters as the plain model names them."""

    model: Any
    optimizer: torch.optim.Optimizer
    trainable: Mapping[str, nn.Parameter]


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The trained parameters by name; a weight shared by two modules once, under its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
