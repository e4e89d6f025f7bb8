"""The update rule of a training run: optimiser and learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from bigunet.spec import TrainSpec

__all__ = ["learning_rate", "optimiser"]


def learning_rate(train: TrainSpec, step: int) -> float:
    """Rate of step 0, 1, ...: a linear rise over `warmup_steps`, then half a cosine."""
    peak, warm = train.learning_rate, train.warmup_steps
    if step < warm:
        return peak * (step + 1) / warm
    way = (step - warm) / max(1, train.steps - 1 - warm)
    return peak * (train.final_rate + (1 - train.final_rate) * (1 + math.cos(math.pi * way)) / 2)


def optimiser(model: nn.Module, train: TrainSpec) -> torch.optim.Optimizer:
    """The optimiser; weight decay spares biases and norms, whose size means something else."""
    parameters = list(model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": train.weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    match train.optimiser:
        case "adamw":
            return torch.optim.AdamW(groups, train.learning_rate, (0.9, train.beta2), fused=True)
        case "adam":
            return torch.optim.Adam(groups, train.learning_rate, (0.9, train.beta2), fused=True)
        case "momentum":
            return torch.optim.SGD(groups, train.learning_rate, momentum=train.momentum)
        case _:
            return torch.optim.SGD(groups, train.learning_rate)
