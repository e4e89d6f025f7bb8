"""The engine on fairscale's `Pipe` (0.4.13): one process, any devices, straight and folded.

Skips are stashed and popped, so they go from the device that makes them to the one that joins
them; where both are one device (a folded plan) they never leave it. On CPU all its partitions
share one worker thread: right results, no overlap.
"""

from __future__ import annotations

import warnings
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bigunet.errors import PlanError, fail
from bigunet.pipeline.feed import Feed
from bigunet.pipeline.protocol import Loss, Places
from bigunet.pipeline.stage import Stage
from bigunet.plan import Plan
from bigunet.ranks import Ranks

__all__ = ["FairscalePipe"]

# fairscale recomputes whole stages itself; blocks are recomputed within the stage.
_CHECKPOINT = {"none": "never", "block": "never", "stage": "always", "except_last": "except_last"}


class FairscalePipe:
    """`fairscale.nn.Pipe` over the stages; `devices[d]` runs the plan's device d.

    Raises
    ------
    PlanError : where fairscale is missing, for 1F1B, for tiles side by side, or for fewer devices
    than the plan has.
    """

    has_first = has_last = True

    def __init__(
        self,
        plan: Plan,
        layers: Mapping[str, nn.Module],
        devices: Sequence[str | torch.device] | None = None,
    ) -> None:
        pipe, skip = _fairscale()
        if plan.schedule != "gpipe":
            fail(
                PlanError,
                rule="fairscale's Pipe runs the schedule gpipe",
                got=plan.schedule,
                remedy="Plan with schedule gpipe, or use the engine `distributed`.",
            )
        if plan.tiles > 1:
            fail(
                PlanError,
                rule="fairscale's Pipe is one process with one pipeline",
                got=f"{plan.tiles} pipelines side by side",
                remedy="Plan with tiles=1, or use the engine `distributed`.",
            )
        devices = _default_devices(plan.num_devices) if devices is None else devices
        if len(devices) != plan.num_devices:
            fail(
                PlanError,
                rule=f"this plan runs on {plan.num_devices} devices",
                got=len(devices),
                remedy="Give one for each, or plan for as many as there are.",
            )
        self.plan = plan
        self.layers = nn.ModuleDict(dict(layers))
        where = [torch.device(devices[d]) for d in plan.devices]
        stages = [_skippable(Stage(plan, i, layers), skip) for i in range(plan.num_stages)]
        with warnings.catch_warnings():
            # It announces its own removal, naming a torch module that no longer exists.
            warnings.simplefilter("ignore", DeprecationWarning)
            self.pipe = pipe(
                nn.Sequential(*stages),
                [1] * plan.num_stages,
                devices=where,
                chunks=plan.micro_batches,
                checkpoint=_CHECKPOINT[plan.train.recompute],
            )
        alone = Ranks(device=where[0])
        self.places = Places(alone, alone, alone)
        self.dtype = next(self.layers.parameters()).dtype
        self._where = where

    def run(self, feed: Feed, loss: Loss, *, keep_logits: bool = False) -> Tensor | None:
        """See `Engine`."""
        if feed.tiles is not None:
            fail(
                PlanError,
                rule="fairscale's Pipe runs the same layers on every micro-batch",
                got="micro-batches of one tile each, whose decoder is cropped",
                remedy="Use the engine `distributed` or `reference`.",
            )
        logits = self.pipe(feed.pixels(self.dtype).to(self._where[0]))
        loss(logits, feed.labels().to(logits.device)).backward()
        return logits.detach() if keep_logits else None


def _fairscale() -> tuple[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fairscale.nn import Pipe
            from fairscale.nn.pipe import skip
    except ImportError as error:
        fail(
            PlanError,
            rule="the engine fairscale_pipe needs the package fairscale",
            got=str(error),
            remedy="Install it with `pip install fairscale==0.4.13` (or `pip install "
            "'bigunet[pipe]'`), or use the engine `distributed`, which works without.",
        )
    return Pipe, skip


def _default_devices(count: int) -> list[torch.device]:
    if torch.cuda.is_available():
        return [torch.device("cuda", i) for i in range(min(count, torch.cuda.device_count()))]
    return [torch.device("cpu")] * count


def _skippable(stage: Stage, skip: Any) -> nn.Module:
    """The stage with its skips declared as fairscale wants them."""

    class Stashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stage = stage
            if stage.recompute in ("stage", "except_last"):
                stage.recompute = "none"

        def forward(self, x_BCHW: Tensor) -> Generator[Any, Tensor, Tensor]:
            skips: dict[str, Tensor] = {}
            for name in stage.part.takes:
                skips[name] = yield skip.pop(name)
            x = self.stage.run(x_BCHW, skips)
            for name in stage.part.makes:
                yield skip.stash(name, skips.pop(name))
            return x

    made: nn.Module = skip.skippable(stash=stage.part.makes, pop=stage.part.takes)(Stashing)()
    return made
