"""Train by a plan: tiles of a scene over pipelines, stages over the devices of each.

A rank optimises and stores the layers of its own stages only. A checkpoint holds them all, by
name, so a run may go on under another plan or engine. Files, sampling, rates and results are
those of `bigunet.train.fit`: a run by a plan takes the same steps, to rounding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from bigunet import ranks as ranks_of
from bigunet.calibrate import calibrate_bias, calibrate_norm, freeze_norm
from bigunet.checkpoint import Weights, check_spec, save_weights
from bigunet.errors import PlanError, SpecError, fail
from bigunet.evaluate import evaluate
from bigunet.losses import Objective
from bigunet.metrics import class_ids
from bigunet.model import UNet
from bigunet.optimisers import learning_rate, optimiser
from bigunet.pipeline.distributed import check_distributed
from bigunet.pipeline.feed import check_plan, deal
from bigunet.pipeline.protocol import EngineName
from bigunet.pipeline.step import Pipeline, check_objective
from bigunet.plan import Plan
from bigunet.progress import Progress
from bigunet.ranks import Ranks
from bigunet.run_folder import RunFolder, plain_scores, stop_signals
from bigunet.sample_parallel import check_exact
from bigunet.sampling import Sampler
from bigunet.scenes import Normalise, ScenePair, normalisation
from bigunet.tile_reader import TileReader
from bigunet.train import Fitted

__all__ = ["train_plan"]

_CALIBRATION_STREAM = 1  # as in bigunet.train: the same tiles calibrate both


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
    leave_out: Sequence[int | str] = (),
    card: dict[str, Any] | None = None,
    cache_bytes: int = 2**28,
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
        run = _Run(plan, pair, Path(out), ranks, engine, mode, exact, normalise, cache_bytes)
        run.open(start, resume, options)
        train = plan.train
        last = train.steps if stop_after is None else min(train.steps, run.done + stop_after)
        with (
            Progress(train.steps, "train", done=run.done, shown=progress and ranks.first) as bar,
            stop_signals() as stop,
        ):
            while run.done < last:
                row = run.advance()
                bar.update(loss=row["loss"], rate=row["rate"])
                stopped = ranks.any(stop.is_set())
                if stopped or run.done % save_every == 0 or run.done == last:
                    run.save()
                if stopped and run.done < train.steps:
                    raise KeyboardInterrupt(f"stopped after step {run.done}; run again to go on")
        return run.finish(val, leave_out, card or {})


@dataclass
class _Run:
    """What a run carries from step to step."""

    plan: Plan
    pair: ScenePair
    path: Path
    ranks: Ranks
    engine: EngineName
    mode: str
    exact: bool | None
    given: Normalise | None
    cache_bytes: int
    done: int = 0
    seconds: float = 0.0
    loss: float = math.nan
    average: dict[str, Tensor] | None = None
    pipeline: Pipeline = field(init=False)

    def __post_init__(self) -> None:
        plan, pair = self.plan, self.pair
        spec, train = plan.spec, plan.train
        self.names = list(pair.classes.names) if pair.classes else None
        if self.names is not None and len(self.names) != spec.classes:
            fail(
                SpecError,
                rule=f"the network has one output for each of the {len(self.names)} classes",
                got=f"classes={spec.classes}",
                remedy=f"Set classes={len(self.names)}.",
            )
        if self.engine == "distributed":
            check_distributed(plan)
            plan.check_run(spec, self.ranks.size)
        self.objective = Objective(
            spec.classes, train.loss, train.class_weights, train.label_smoothing, pair.ignore
        )
        check_objective(self.objective)
        TileReader.of(spec, pair.image, pair.labels, ignore=pair.ignore)
        self.normalise = normalisation(pair.image) if self.given is None else self.given
        self.reader = self._reader(pair)
        check_plan(plan, self.reader.shape)
        whole = self.mode == "whole"
        self.sampler = Sampler.of(spec, train, self.reader, whole=whole)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(train.seed)
            self.model = UNet(spec)
        # torch's typing does not know this form of `to`, which sets the memory format alone.
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        if train.freeze_norm:
            freeze_norm(self.model)
        if whole if self.exact is None else self.exact:
            check_exact(self.model)
        self.folder = RunFolder(self.path, self.ranks)

    def _reader(self, pair: ScenePair) -> TileReader:
        reader = TileReader.of(
            self.plan.spec, pair.image, pair.labels, normalise=self.normalise, ignore=pair.ignore
        )
        return reader.cached(self.cache_bytes)

    # The folder --------------------------------------------------------------------------------

    def open(self, start: Weights | None, resume: bool, options: dict[str, Any]) -> None:
        """Check plan, engine and folder, and take up the newest checkpoint, or begin."""
        plan, train = self.plan, self.plan.train
        about = {
            "spec": plan.spec.to_dict(),
            # What is recomputed changes no number, so a run may go on with other plans.
            "train": {k: v for k, v in train.to_dict().items() if k != "recompute"},
            "data": {
                "shape": list(self.reader.shape),
                "classes": self.names,
                "mode": self.mode,
                "normalise": self.normalise.to_dict(),
                "start": None if start is None else start.sha256,
            },
        }
        if start is not None:
            check_spec(plan.spec.to_dict(), start.spec.to_dict(), "the weights to start from")
        self.pipeline = Pipeline(plan, self.model, self.objective, engine=self.engine, **options)
        state = self.folder.open(
            about, resume=resume, notes={"plan": plan.to_dict(), "engine": self.engine}
        )
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.done, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]
        elif start is not None:
            self.model.load_state_dict(start.model.state_dict())
        elif train.freeze_norm and plan.spec.norm == "batch":
            self._calibrate()
        self.pipeline.refresh()
        self.own = self.pipeline.named_parameters()
        self.optimiser = optimiser(self.pipeline.layers, train) if self.own else None
        device = self.ranks.device
        if state is not None and self.optimiser is not None:
            for name, values in state["optimiser"].items():
                if name in self.own:
                    parameter = self.own[name]
                    self.optimiser.state[parameter] = {
                        k: v.to(parameter.device) if v.ndim else v for k, v in values.items()
                    }
        if train.average:
            stored = None if state is None else state["average"]
            self.average = {
                n: (t if stored is None else stored[n].to(device)).clone()
                for n, t in self._floats()
            }

    def _calibrate(self) -> None:
        """Batch norm's statistics, as `fit` sets them: in the whole network, on this rank."""
        draws = [self.sampler.draw(i, stream=_CALIBRATION_STREAM) for i in range(32)]
        samples = [sample for draw in draws for sample in draw][:32]
        device = self.ranks.device
        whole = self.model if device.type == "cpu" else UNet(self.plan.spec).to(device)
        if whole is not self.model:
            whole.load_state_dict(self.model.state_dict())
        calibrate_norm(whole, self.reader, samples, ranks=self.ranks)
        if whole is not self.model:
            self.model.load_state_dict(whole.state_dict())

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self.pipeline.layers.state_dict().items():
            yield f"layers.{name}", tensor

    def _floats(self) -> Iterator[tuple[str, Tensor]]:
        return ((n, t) for n, t in self._tensors() if t.is_floating_point())

    def _gather(self, *, optimiser: bool) -> dict[str, Any] | None:
        """The state of all stages, by name, on the first rank; None on the others."""
        mine: dict[str, dict[str, Any]] = {"model": {}, "average": {}, "optimiser": {}}
        if self.pipeline.places.index == 0:
            mine["model"] = {n: t.detach().cpu() for n, t in self._tensors()}
            mine["average"] = {n: t.cpu() for n, t in (self.average or {}).items()}
            if optimiser and self.optimiser is not None:
                mine["optimiser"] = {
                    n: {k: v.cpu() for k, v in self.optimiser.state[p].items() if v is not None}
                    for n, p in self.own.items()
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

    def save(self) -> None:
        """Write a checkpoint of all stages; all ranks wait until it is on the disk."""
        state = self._gather(optimiser=True)
        if state is not None:
            state.update(seconds=self.seconds, loss=self.loss)
        self.folder.save(self.done, state)

    # One step ----------------------------------------------------------------------------------

    def advance(self) -> dict[str, float]:
        """One optimiser step; returns its line of the history."""
        began = time.perf_counter()
        plan, train = self.plan, self.plan.train
        if plan.spec.dropout:
            seed = np.random.SeedSequence([train.seed, 2, self.done, self.ranks.rank])
            torch.manual_seed(int(seed.generate_state(1)[0]))
        places = self.pipeline.places
        samples = self.sampler.draw(self.done)
        feeds = deal(plan, self.reader, samples, places.index, places.num_pipelines)
        result = self.pipeline.step(feeds)
        if not math.isfinite(result.loss):
            fail(
                SpecError,
                rule="the loss stays finite",
                got=f"{result.loss} in step {self.done}",
                remedy="Lower learning_rate, set clip_norm, or look for bad pixels; "
                "the last checkpoint is whole.",
            )
        norm = self._clip()
        rate = learning_rate(train, self.done)
        if self.optimiser is not None:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.optimiser.step()
        self.pipeline.refresh()
        if self.average is not None:
            # Young averages forget faster, so that they do not drag the random start along.
            decay = min(train.average, (1 + self.done) / (10 + self.done))
            for name, tensor in self._floats():
                self.average[name].lerp_(tensor, 1 - decay)
        self.done += 1
        self.loss = result.loss
        self.seconds += time.perf_counter() - began
        row = {
            "step": self.done,
            "loss": result.loss,
            "rate": rate,
            "gradient_norm": norm,
            "pixels": result.pixels,
            "seconds": round(self.seconds, 3),
        }
        self.folder.log(row)
        return row

    def _clip(self) -> float:
        """The norm of the gradient of all stages, which is bounded if asked for."""
        gradients = [p.grad for p in self.own.values() if p.grad is not None]
        squares = sum((g.double().square().sum().cpu() for g in gradients), torch.zeros(()))
        total = self.pipeline.places.pipeline.sum_(squares.double().reshape(1))
        norm, bound = float(total.sqrt()), self.plan.train.clip_norm
        if bound is not None and norm > bound:
            for gradient in gradients:
                gradient.mul_(bound / (norm + 1e-6))  # as torch's clip_grad_norm_
        return norm

    # The end -----------------------------------------------------------------------------------

    def finish(
        self, val: ScenePair | None, leave_out: Sequence[int | str], card: dict[str, Any]
    ) -> Fitted:
        """The whole network on every rank: calibrated and scored as `fit` does, and written."""
        plan, train = self.plan, self.plan.train
        gathered = self._gather(optimiser=False)
        state: Any = self.ranks.share(gathered)
        model = UNet(plan.spec)
        model.load_state_dict({**state["model"], **(state["average"] or {})})
        model.to(self.ranks.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.eval()
        precision: Any = "fp32" if train.precision == "fp32" else "bf16-autocast"
        if train.calibrate_bias and self.done == train.steps:
            ids = class_ids(leave_out, self.names or range(plan.spec.classes))
            calibrate_bias(
                model, self.reader, leave_out=ids, precision=precision, seed=train.seed,
                ranks=self.ranks,
            )  # fmt: skip
        scores = None
        if val is not None:
            scores = evaluate(
                model, self._reader(val), precision=precision, names=self.names,
                leave_out=leave_out, ranks=self.ranks,
            )  # fmt: skip
            self.folder.log({"step": self.done, **plain_scores(scores)})
        path = self.path / "weights.safetensors"
        if self.ranks.first:
            made = {
                **card,
                "steps": self.done,
                "seconds": round(self.seconds, 1),
                "seed": train.seed,
                "ranks": self.ranks.size,
                "engine": self.engine,
                "torch": torch.__version__,
                "train": train.to_dict(),
                "scores": {} if scores is None else plain_scores(scores),
            }
            save_weights(
                path, model, normalise=self.normalise, classes=self.pair.classes, card=made
            )
        self.ranks.wait()
        return Fitted(model, self.path, path, self.loss, self.seconds, self.normalise, scores)
