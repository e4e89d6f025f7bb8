"""What a training run carries from step to step, and what it keeps in its folder."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import nn

from bigunet.calibrate import calibrate_bias, calibrate_norm, freeze_norm
from bigunet.checkpoint import (
    Weights,
    check_spec,
    save_weights,
)
from bigunet.errors import SpecError, fail
from bigunet.evaluate import evaluate
from bigunet.losses import Objective
from bigunet.metrics import class_ids
from bigunet.model import UNet
from bigunet.optimisers import learning_rate, optimiser
from bigunet.ranks import Ranks
from bigunet.run_folder import RunFolder, plain_scores
from bigunet.sample_parallel import check_exact, narrowed, step
from bigunet.sampling import Sampler
from bigunet.scenes import Normalise, ScenePair, normalisation
from bigunet.spec import Precision, TrainSpec, UNetSpec
from bigunet.tile_reader import TileReader

__all__ = ["Fitted", "Trainer"]

_CALIBRATION_STREAM = 1


@dataclass(frozen=True, slots=True)
class Fitted:
    """A finished run. `loss` is the last step's, `seconds` those of all its parts.

    `model` carries the averaged weights where `TrainSpec.average` asks for them.
    """

    model: UNet
    folder: Path
    weights: Path
    loss: float
    seconds: float
    normalise: Normalise
    scores: xr.Dataset | None = None


class Trainer:
    """What a run carries from step to step."""

    def __init__(
        self,
        spec: UNetSpec,
        pair: ScenePair,
        train: TrainSpec,
        folder: Path,
        ranks: Ranks,
        mode: str,
        exact: bool | None,
        normalise: Normalise | None,
        cache_bytes: int,
    ) -> None:
        self.spec, self.train, self.ranks = spec, train, ranks
        self.folder = RunFolder(folder, ranks)
        self.names = list(pair.classes.names) if pair.classes else None
        self.classes = pair.classes
        if self.names is not None and len(self.names) != spec.classes:
            fail(
                SpecError,
                rule=f"the network has one output for each of the {len(self.names)} classes",
                got=f"classes={spec.classes}",
                remedy=f"Set classes={len(self.names)}.",
            )
        self.cache_bytes = cache_bytes
        self.whole = mode == "whole"
        self.exact = self.whole if exact is None else exact
        reader = TileReader.of(spec, pair.image, pair.labels, ignore=pair.ignore)
        self.normalise = normalisation(pair.image) if normalise is None else normalise
        self.reader = self._reader(pair)
        del reader
        self.objective = Objective(
            spec.classes, train.loss, train.class_weights, train.label_smoothing, pair.ignore
        )
        self.sampler = Sampler.of(spec, train, self.reader, whole=self.whole)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(train.seed)
            self.model = UNet(spec).to(ranks.device)
        # torch's typing does not know this form of `to`, which sets the memory format alone.
        self.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.model.train()
        if train.freeze_norm:
            freeze_norm(self.model)
        if self.exact:
            check_exact(self.model)
        # In bf16 the network that runs is a copy; the optimiser moves fp32 weights.
        self.worker = self.model
        if train.precision == "bf16":
            self.worker = narrowed(self.model)
        self.optimiser = optimiser(self.model, train)
        self.average: dict[str, torch.Tensor] | None = None
        self.done, self.seconds, self.loss = 0, 0.0, math.nan

    def _reader(self, pair: ScenePair) -> TileReader:
        reader = TileReader.of(
            self.spec, pair.image, pair.labels, normalise=self.normalise, ignore=pair.ignore
        )
        return reader.cached(self.cache_bytes)

    # The folder --------------------------------------------------------------------------------

    def open(self, start: Weights | None, resume: bool) -> None:
        """Check the folder and take up its newest checkpoint, or begin."""
        about = {
            "spec": self.spec.to_dict(),
            "train": self.train.to_dict(),
            "data": {
                "shape": list(self.reader.shape),
                "classes": self.names,
                "mode": "whole" if self.whole else "tiles",
                "normalise": self.normalise.to_dict(),
                "start": None if start is None else start.sha256,
            },
        }
        state = self.folder.open(about, resume=resume, notes={"exact": self.exact})
        if state is None:
            self._begin(start)
        else:
            self._take_up(state)
        self._copy_weights()

    def _begin(self, start: Weights | None) -> None:
        if start is not None:
            check_spec(self.spec.to_dict(), start.spec.to_dict(), "the weights to start from")
            self.model.load_state_dict(start.model.state_dict())
        elif self.train.freeze_norm:
            draws = [self.sampler.draw(i, stream=_CALIBRATION_STREAM) for i in range(32)]
            samples = [sample for draw in draws for sample in draw][:32]
            calibrate_norm(self.model, self.reader, samples, ranks=self.ranks)
        if self.train.average:
            self.average = {n: t.clone() for n, t in self._floats()}

    def _take_up(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        if state["average"] is not None:
            self.average = {n: t.to(self.ranks.device) for n, t in state["average"].items()}
        self.done, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]

    def save(self) -> None:
        """Write a checkpoint; all ranks wait until it is on the disk."""
        state = {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "average": self.average,
            "seconds": self.seconds,
            "loss": self.loss,
        }
        self.folder.save(self.done, state)

    def finish(
        self,
        val: ScenePair | None,
        leave_out: Sequence[int | str],
        card: dict[str, Any],
        dtype: Literal["fp32", "bf16"],
    ) -> Fitted:
        """Calibrate, score and write the weights; those of an unfinished run are not calibrated."""
        model = self._averaged()
        if dtype == "bf16":
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.data = parameter.data.bfloat16().float()
        if self.train.calibrate_bias and self.done == self.train.steps:
            ids = class_ids(leave_out, self.names or range(self.spec.classes))
            calibrate_bias(
                model,
                self.reader,
                leave_out=ids,
                precision=self.precision,
                seed=self.train.seed,
                ranks=self.ranks,
            )
        scores = None if val is None else self.validate(val, leave_out, model)
        path = self.folder.path / "weights.safetensors"
        if self.ranks.first:
            made = {
                **card,
                "steps": self.done,
                "seconds": round(self.seconds, 1),
                "seed": self.train.seed,
                "ranks": self.ranks.size,
                "torch": torch.__version__,
                "train": self.train.to_dict(),
                "scores": {} if scores is None else plain_scores(scores),
            }
            save_weights(
                path,
                model,
                normalise=self.normalise,
                classes=self.classes,
                card=made,
                dtype=dtype,
            )
        self.ranks.wait()
        return Fitted(
            model, self.folder.path, path, self.loss, self.seconds, self.normalise, scores
        )

    # One step ----------------------------------------------------------------------------------

    def advance(self) -> dict[str, float]:
        """One optimiser step; returns its line of the history."""
        began = time.perf_counter()
        train = self.train
        if self.spec.dropout:
            seed = np.random.SeedSequence([train.seed, 2, self.done, self.ranks.rank])
            torch.manual_seed(int(seed.generate_state(1)[0]))
        result = step(
            self.worker,
            self.reader,
            self.sampler.draw(self.done),
            self.objective,
            precision=train.precision,
            recompute=train.recompute,
            batch=train.batch,
            ranks=self.ranks,
            exact=self.exact,
            into=self.model,
        )
        if not math.isfinite(result.loss):
            fail(
                SpecError,
                rule="the loss stays finite",
                got=f"{result.loss} in step {self.done}",
                remedy="Lower learning_rate, set clip_norm, or look for bad pixels; "
                "the last checkpoint is whole.",
            )
        parameters = list(self.model.parameters())
        norm = nn.utils.clip_grad_norm_(parameters, train.clip_norm or math.inf)
        rate = learning_rate(train, self.done)
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        self._share_statistics()
        self._copy_weights(backwards=not train.freeze_norm)
        self._update_average()
        self.done += 1
        self.loss = result.loss
        self.seconds += time.perf_counter() - began
        row = {
            "step": self.done,
            "loss": result.loss,
            "rate": rate,
            "gradient_norm": float(norm),
            "pixels": result.pixels,
            "seconds": round(self.seconds, 3),
        }
        self.folder.log(row)
        return row

    @property
    def precision(self) -> Precision:
        """Of passes without training: the weights are fp32."""
        return "fp32" if self.train.precision == "fp32" else "bf16-autocast"

    def validate(
        self, val: ScenePair, leave_out: Sequence[int | str], model: UNet | None = None
    ) -> xr.Dataset:
        """Scores of the averaged weights, or of `model`, noted in the history."""
        scores = evaluate(
            self._averaged() if model is None else model,
            self._reader(val),
            precision=self.precision,
            names=self.names,
            leave_out=leave_out,
            ranks=self.ranks,
        )
        self.folder.log({"step": self.done, **plain_scores(scores)})
        return scores

    def _floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.model.state_dict().items():
            if tensor.is_floating_point():
                yield name, tensor

    def _update_average(self) -> None:
        if self.average is not None:
            # Young averages forget faster, so that they do not drag the random start along.
            decay = min(self.train.average, (1 + self.done) / (10 + self.done))
            for name, tensor in self._floats():
                self.average[name].lerp_(tensor, 1 - decay)

    def _averaged(self) -> UNet:
        model = copy.deepcopy(self.model)
        if self.average is not None:
            model.load_state_dict({**model.state_dict(), **self.average})
        return model.eval()

    def _share_statistics(self) -> None:
        # Batch norm that still learns has seen other tiles on each rank.
        buffers = [b for b in self.worker.buffers() if b.is_floating_point()]
        if self.ranks.size > 1 and not self.train.freeze_norm and buffers:
            self.ranks.sum_all_(buffers)
            for buffer in buffers:
                buffer /= self.ranks.size

    @torch.no_grad()
    def _copy_weights(self, *, backwards: bool = False) -> None:
        """Bring the bf16 worker up to the fp32 weights; its own statistics go `backwards`."""
        if self.worker is self.model:
            return
        for weight, master in zip(self.worker.parameters(), self.model.parameters(), strict=True):
            weight.copy_(master)
        for mine, master_buffer in zip(self.worker.buffers(), self.model.buffers(), strict=True):
            if backwards:
                master_buffer.copy_(mine)
            else:
                mine.copy_(master_buffer)
