"""Train by a plan: tiles of a scene over pipelines, stages over the devices of each.

A rank optimises and stores the layers of its own stages only. A checkpoint holds them all, by
name, so a run may go on under another plan or engine. Files, sampling, rates and results are
those of `bigunet.train.fit`: a run by a plan takes the same steps, to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from bigunet import ranks as ranks_of
from bigunet.checkpoint import Weights
from bigunet.errors import PlanError, fail
from bigunet.model import UNet
from bigunet.pipeline.distributed import check_distributed
from bigunet.pipeline.feed import check_plan, deal
from bigunet.pipeline.protocol import EngineName
from bigunet.pipeline.step import Pipeline, check_objective
from bigunet.plan import Plan
from bigunet.ranks import Ranks
from bigunet.scenes import Normalise, ScenePair
from bigunet.tile_reader import Sample
from bigunet.trainer import Fitted, Trainer

__all__ = ["train_plan"]


def train_plan(
    plan: Plan,
    pair: ScenePair,
    out: str | Path,
    *,
    engine: EngineName = "distributed",
    val: ScenePair | None = None,
    mode: Literal["tiles", "whole"] = "whole",
    exact: bool | None = None,
    normalise: Normalise | None = None,
    start: Weights | None = None,
    resume: bool = True,
    stop_after: int | None = None,
    save_every: int = 100,
    validate_every: int | None = None,
    leave_out: Sequence[int | str] = (),
    card: dict[str, Any] | None = None,
    cache_bytes: int = 2**28,
    weights_dtype: Literal["fp32", "bf16"] = "fp32",
    progress: bool = True,
    **options: Any,
) -> Fitted:
    """Train the plan's network on an image and its labels, `plan.train.steps` steps.

    Called on every rank of the plan (`run_plan` starts them). Arguments are those of
    `bigunet.train.fit`, beside these:

    Parameters
    ----------
    plan : its images are the read boxes of tiles of `plan.train.tile` pixels (`read_shape`);
        `shape_BCHW[0]` of them are one pass of one pipeline.
    mode : "whole": each step is the whole image, every tile once; "tiles": `train.batch` drawn
        tiles. Either way they are dealt to the pipelines and fill as many passes as they need.
    engine, options : see `Pipeline`.

    Raises
    ------
    PlanError : a plan for another scene, tile, engine or number of ranks. SpecError,
    ExactnessError, SceneError : what `fit` refuses; losses with two passes, and batch norm that
    still learns. All before anything is written. LaunchError : a rank that was lost.
    """
    with ranks_of.init() as ranks:
        if engine != "distributed" and ranks.size > 1:
            fail(
                PlanError,
                rule=f"the engine {engine} is one process",
                got=f"{ranks.size} ranks",
                remedy="Start one, or use the engine `distributed`.",
            )
        trainer = _ByPlan(
            plan, pair, Path(out), ranks, engine, mode, exact, normalise, cache_bytes, options
        )
        return trainer.run(
            start=start,
            resume=resume,
            stop_after=stop_after,
            save_every=save_every,
            val=val,
            validate_every=validate_every,
            leave_out=leave_out,
            card=card or {},
            weights_dtype=weights_dtype,
            progress=progress,
        )


class _ByPlan(Trainer):
    """A rank optimises and averages the layers of its own stages."""

    def __init__(
        self,
        plan: Plan,
        pair: ScenePair,
        path: Path,
        ranks: Ranks,
        engine: EngineName,
        mode: str,
        exact: bool | None,
        normalise: Normalise | None,
        cache_bytes: int,
        options: dict[str, Any],
    ) -> None:
        self.plan, self.engine, self.options = plan, engine, options
        spec, train = plan.spec, plan.train
        super().__init__(spec, pair, train, path, ranks, mode, exact, normalise, cache_bytes)

    def _check(self, shape: tuple[int, int]) -> None:
        if self.engine == "distributed":
            check_distributed(self.plan)
            self.plan.check_run(self.spec, self.ranks.size)
        check_objective(self.objective)
        check_plan(self.plan, shape)

    def _build(self) -> None:
        self.pipeline = Pipeline(
            self.plan, self.model, self.objective, engine=self.engine, **self.options
        )
        self.own = nn.ModuleDict({"layers": self.pipeline.layers})
        # What is recomputed changes no number, so a run may go on with other plans.
        self.free = frozenset({"recompute"})
        self.notes = {"plan": self.plan.to_dict(), "engine": self.engine}
        self.card = {"engine": self.engine}

    def _gradients(self, samples: Sequence[Sample]) -> tuple[float, int]:
        places = self.pipeline.places
        feeds = deal(self.plan, self.reader, samples, places.index, places.num_pipelines)
        result = self.pipeline.step(feeds)
        return result.loss, result.pixels

    def _clip(self) -> float:
        """The norm of the gradient of all stages, which is bounded if asked for."""
        gradients = [p.grad for p in self.own.parameters() if p.grad is not None]
        squares = sum((g.double().square().sum().cpu() for g in gradients), torch.zeros(()))
        total = self.pipeline.places.pipeline.sum_(squares.double().reshape(1))
        norm, bound = float(total.sqrt()), self.train.clip_norm
        if bound is not None and norm > bound:
            for gradient in gradients:
                gradient.mul_(bound / (norm + 1e-6))  # as torch's clip_grad_norm_
        return norm

    def _refresh(self, *, stepped: bool) -> None:
        self.pipeline.refresh()

    def _gather(self, *, optimiser: bool = True) -> dict[str, Any] | None:
        """The state of all stages, by name, on the first rank; None on the others."""
        mine: dict[str, dict[str, Any]] = {"model": {}, "average": {}, "optimiser": {}}
        if self.pipeline.places.index == 0:
            mine["model"] = {n: t.cpu() for n, t in self.own.state_dict().items()}
            mine["average"] = {n: t.cpu() for n, t in (self.average or {}).items()}
            if optimiser and self.optimiser is not None:
                mine["optimiser"] = {
                    n: {k: v.cpu() for k, v in self.optimiser.state[p].items() if v is not None}
                    for n, p in self.own.named_parameters()
                    if p in self.optimiser.state
                }
        parts: list[Any] = [mine]
        if self.ranks.size > 1:
            parts = [None] * self.ranks.size
            dist.gather_object(mine, parts if self.ranks.first else None, dst=0)
        if not self.ranks.first:
            return None
        joined: dict[str, Any] = {
            key: {n: v for part in parts for n, v in part[key].items()} for key in mine
        }
        joined["average"] = joined["average"] if self.average is not None else None
        return joined

    def _take_up_optimiser(self, state: dict[str, Any]) -> None:
        if self.optimiser is not None:
            for name, parameter in self.own.named_parameters():
                if name in state:
                    self.optimiser.state[parameter] = {
                        k: v.to(parameter.device) if v.ndim else v for k, v in state[name].items()
                    }

    def _network(self) -> UNet:
        state: Any = self.ranks.share(self._gather(optimiser=False))
        model = self._new_model()
        model.load_state_dict({**state["model"], **(state["average"] or {})})
        return model.to(self.ranks.device).eval()
