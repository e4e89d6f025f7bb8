"""The reference engine: one process runs the stages of each micro-batch one after another."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bigunet.pipeline.feed import Feed
from bigunet.pipeline.protocol import Loss, Places
from bigunet.pipeline.stage import Stage
from bigunet.plan import Plan
from bigunet.ranks import Ranks

__all__ = ["Reference"]


class Reference:
    """No schedule and no placement: the arithmetic of a plan's step, in one process.

    Memory is that of one micro-batch. Of several pipelines it runs all passes itself.
    """

    has_first = has_last = True

    def __init__(self, plan: Plan, layers: Mapping[str, nn.Module]) -> None:
        self.plan = plan
        self.layers = nn.ModuleDict(dict(layers))
        self.stages = [Stage(plan, i, layers) for i in range(plan.num_stages)]
        weight = next(self.layers.parameters())
        self.dtype = weight.dtype
        alone = Ranks(device=weight.device)
        self.places = Places(alone, alone, alone)

    def run(self, feed: Feed, loss: Loss, *, keep_logits: bool = False) -> Tensor | None:
        """See `Engine`."""
        count, device = self.plan.micro_batches, self.places.all.device
        pixels = feed.pixels(self.dtype).to(device).chunk(count)
        labels = feed.labels().to(device).chunk(count)
        kept = []
        for i, (x, y) in enumerate(zip(pixels, labels, strict=True)):
            skips: dict[str, Tensor] = {}
            tile = None if feed.tiles is None else feed.tiles[i]
            for stage in self.stages:
                x = stage.run(x, skips, tile, i == count - 1)
            loss(x, y).backward()
            if keep_logits:
                kept.append(x.detach())
        return torch.cat(kept) if keep_logits else None
