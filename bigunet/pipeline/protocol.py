"""The one protocol of the engines: a plan and passes in, summed gradients out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from bigunet.pipeline.feed import Feed
from bigunet.plan import Plan
from bigunet.ranks import Ranks

__all__ = ["Engine", "EngineName", "Loss", "Places", "Stepped"]

EngineName = Literal["reference", "fairscale_pipe", "distributed"]

#: Logits and labels of a micro-batch (or several) -> what is differentiated.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Places:
    """Where this rank stands: `all` ranks, those of its `pipeline`, the `replicas` of its stages.

    It is number `index` of `num_pipelines`.
    """

    all: Ranks
    pipeline: Ranks
    replicas: Ranks
    index: int = 0
    num_pipelines: int = 1


class Engine(Protocol):
    """Runs passes of one pipeline; gradients are added to `.grad` of `layers`' parameters.

    `layers` are those of the network whose stages this rank runs; weights are of type `dtype`.
    `has_first` and `has_last` say whether it reads pixels and labels.
    """

    plan: Plan
    layers: nn.ModuleDict
    places: Places
    dtype: torch.dtype
    has_first: bool
    has_last: bool

    def run(self, feed: Feed, loss: Loss, *, keep_logits: bool = False) -> Tensor | None:
        """One pass, forward and backward; the logits where they are here and asked for."""


class Stepped(NamedTuple):
    """One step: the mean loss over all labelled pixels of all pipelines, and their number.

    `logits` of each pass, if asked for, on ranks of the last stage.
    """

    loss: float
    pixels: int
    seconds: float
    logits: tuple[Tensor, ...] = ()
