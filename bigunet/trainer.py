"""What every training run does: its set-up, its folder, its steps one by one, and its end.

Where a step's gradients come from is a subclass's: tiles over ranks (`bigunet.train`), or
pipelines of stages (`bigunet.pipeline.train`).
"""

from __future__ import annotations

import copy
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import nn

from bigunet.calibrate import calibrate_bias, calibrate_norm, freeze_norm
from bigunet.checkpoint import Weights, check_spec, save_weights
from bigunet.errors import SpecError, fail
from bigunet.evaluate import evaluate
from bigunet.losses import Objective
from bigunet.metrics import class_ids
from bigunet.model import UNet
from bigunet.optimisers import learning_rate, optimiser
from bigunet.progress import Progress
from bigunet.ranks import Ranks
from bigunet.run_folder import RunFolder, plain_scores, stop_signals
from bigunet.sample_parallel import check_exact
from bigunet.sampling import Sampler
from bigunet.scenes import Normalise, ScenePair, normalisation
from bigunet.spec import Precision, TrainSpec, UNetSpec
from bigunet.tile_reader import Sample, TileReader

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


class Trainer(ABC):
    """What a run carries from step to step, on one of `ranks`.

    model : the whole network, in fp32, as it starts. own : the part that this rank optimises, under
    the whole network's names. free : fields of `TrainSpec` in which parts of one run may differ.
    notes, card : what run.json and the weights' model card say beside.
    """

    optimiser: torch.optim.Optimizer | None  # None where a rank has no parameter

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
        self.mode = mode
        self.exact = mode == "whole" if exact is None else exact
        # What can be refused is, before the image is read for its mean and deviation.
        reader = TileReader.of(spec, pair.image, pair.labels, ignore=pair.ignore)
        self.objective = Objective(
            spec.classes, train.loss, train.class_weights, train.label_smoothing, pair.ignore
        )
        self._check(reader.shape)
        self.normalise = normalisation(pair.image) if normalise is None else normalise
        self.reader = self._reader(pair)
        self.sampler = Sampler.of(spec, train, self.reader, whole=mode == "whole")
        self.model = self._new_model()
        self.model.train()
        if train.freeze_norm:
            freeze_norm(self.model)
        if self.exact:
            check_exact(self.model)
        self.own: nn.Module = self.model
        self.free: frozenset[str] = frozenset()
        self.notes: dict[str, Any] = {"exact": self.exact}
        self.card: dict[str, Any] = {}
        self.average: dict[str, torch.Tensor] | None = None
        self.done, self.seconds, self.loss = 0, 0.0, math.nan
        self._build()

    # What differs ------------------------------------------------------------------------------

    @abstractmethod
    def _check(self, shape: tuple[int, int]) -> None:
        """Refuse what cannot be trained so, on an image of (height, width)."""

    @abstractmethod
    def _build(self) -> None:
        """Make of `model` what runs."""

    @abstractmethod
    def _gradients(self, samples: Sequence[Sample]) -> tuple[float, int]:
        """Set the gradients of `own`; the mean loss over all samples, and their labelled pixels."""

    @abstractmethod
    def _clip(self) -> float:
        """The norm of the whole network's gradient, which is bounded if asked for."""

    @abstractmethod
    def _refresh(self, *, stepped: bool) -> None:
        """Bring what runs up to weights that were set, or changed by a step."""

    @abstractmethod
    def _gather(self) -> dict[str, Any] | None:
        """The whole network's "model", "optimiser" and "average"; needed on the first rank only."""

    @abstractmethod
    def _take_up_optimiser(self, state: dict[str, Any]) -> None:
        """Go on with the optimiser's state of a checkpoint."""

    @abstractmethod
    def _network(self) -> UNet:
        """A copy of the whole network with the averaged weights, in eval mode, on every rank."""

    # The whole run -----------------------------------------------------------------------------

    def run(
        self,
        *,
        start: Weights | None,
        resume: bool,
        stop_after: int | None,
        save_every: int,
        val: ScenePair | None,
        validate_every: int | None,
        leave_out: Sequence[int | str],
        card: dict[str, Any],
        weights_dtype: Literal["fp32", "bf16"],
        progress: bool,
    ) -> Fitted:
        """Open the folder, step until the end or the stop, and finish; see `bigunet.train.fit`."""
        ranks, steps = self.ranks, self.train.steps
        self._open(start, resume)
        last = steps if stop_after is None else min(steps, self.done + stop_after)
        with (
            Progress(steps, "train", done=self.done, shown=progress and ranks.first) as bar,
            stop_signals() as stop,
        ):
            while self.done < last:
                row = self._advance()
                bar.update(loss=row["loss"], rate=row["rate"])
                stopped = ranks.any(stop.is_set())
                due = validate_every and self.done % validate_every == 0
                if val is not None and due and self.done < last:
                    self._validate(val, leave_out, self._network())
                if stopped or self.done % save_every == 0 or self.done == last:
                    self._save()
                if stopped and self.done < steps:
                    raise KeyboardInterrupt(f"stopped after step {self.done}; run again to go on")
        return self._finish(val, leave_out, card, weights_dtype)

    # The folder --------------------------------------------------------------------------------

    def _open(self, start: Weights | None, resume: bool) -> None:
        """Check the folder and take up its newest checkpoint, or begin."""
        if start is not None:
            check_spec(self.spec.to_dict(), start.spec.to_dict(), "the weights to start from")
        about = {
            "spec": self.spec.to_dict(),
            "train": {k: v for k, v in self.train.to_dict().items() if k not in self.free},
            "data": {
                "shape": list(self.reader.shape),
                "classes": self.names,
                "mode": self.mode,
                "normalise": self.normalise.to_dict(),
                "start": None if start is None else start.sha256,
            },
        }
        state = self.folder.open(about, resume=resume, notes=self.notes)
        if state is not None:
            self.model.load_state_dict(state["model"])
            self.done, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]
        elif start is not None:
            self.model.load_state_dict(start.model.state_dict())
        elif self.train.freeze_norm and self.spec.norm == "batch":
            self._calibrate_norm()
        self._refresh(stepped=False)
        some = any(True for _ in self.own.parameters())
        self.optimiser = optimiser(self.own, self.train) if some else None
        if state is not None:
            self._take_up_optimiser(state["optimiser"])
        if self.train.average:
            stored = None if state is None else state["average"]
            self.average = {
                n: t.clone() if stored is None else stored[n].to(t.device)
                for n, t in self._floats()
            }

    def _calibrate_norm(self) -> None:
        """Batch norm's statistics from tiles of the image, in the whole network on this rank."""
        draws = [self.sampler.draw(i, stream=_CALIBRATION_STREAM) for i in range(32)]
        samples = [sample for draw in draws for sample in draw][:32]
        device = self.ranks.device
        here = all(p.device == device for p in self.model.parameters())
        whole = self.model if here else copy.deepcopy(self.model).to(device)
        calibrate_norm(whole, self.reader, samples, ranks=self.ranks)
        if whole is not self.model:
            self.model.load_state_dict(whole.state_dict())

    def _save(self) -> None:
        """Write a checkpoint; all ranks wait until it is on the disk."""
        state = self._gather()
        if state is not None:
            state |= {"seconds": self.seconds, "loss": self.loss}
        self.folder.save(self.done, state)

    def _finish(
        self,
        val: ScenePair | None,
        leave_out: Sequence[int | str],
        card: dict[str, Any],
        dtype: Literal["fp32", "bf16"],
    ) -> Fitted:
        """Calibrate, score and write the weights; those of an unfinished run are not calibrated."""
        model = self._network()
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
        scores = None if val is None else self._validate(val, leave_out, model)
        path = self.folder.path / "weights.safetensors"
        if self.ranks.first:
            made = {
                **card,
                "steps": self.done,
                "seconds": round(self.seconds, 1),
                "seed": self.train.seed,
                "ranks": self.ranks.size,
                **self.card,
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

    def _advance(self) -> dict[str, float]:
        """One optimiser step; returns its line of the history."""
        began = time.perf_counter()
        train = self.train
        if self.spec.dropout:
            seed = np.random.SeedSequence([train.seed, 2, self.done, self.ranks.rank])
            torch.manual_seed(int(seed.generate_state(1)[0]))
        loss, pixels = self._gradients(self.sampler.draw(self.done))
        if not math.isfinite(loss):
            fail(
                SpecError,
                rule="the loss stays finite",
                got=f"{loss} in step {self.done}",
                remedy="Lower learning_rate, set clip_norm, or look for bad pixels; "
                "the last checkpoint is whole.",
            )
        norm = self._clip()
        rate = learning_rate(train, self.done)
        if self.optimiser is not None:
            for group in self.optimiser.param_groups:
                group["lr"] = rate
            self.optimiser.step()
        self._refresh(stepped=True)
        self._update_average()
        self.done += 1
        self.loss = loss
        self.seconds += time.perf_counter() - began
        row = {
            "step": self.done,
            "loss": loss,
            "rate": rate,
            "gradient_norm": norm,
            "pixels": pixels,
            "seconds": round(self.seconds, 3),
        }
        self.folder.log(row)
        return row

    @property
    def precision(self) -> Precision:
        """Of passes without training: the weights are fp32."""
        return "fp32" if self.train.precision == "fp32" else "bf16-autocast"

    def _validate(self, val: ScenePair, leave_out: Sequence[int | str], model: UNet) -> xr.Dataset:
        """Scores of `model`, noted in the history."""
        scores = evaluate(
            model,
            self._reader(val),
            precision=self.precision,
            names=self.names,
            leave_out=leave_out,
            ranks=self.ranks,
        )
        self.folder.log({"step": self.done, **plain_scores(scores)})
        return scores

    def _floats(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in self.own.state_dict().items():
            if tensor.is_floating_point():
                yield name, tensor

    def _update_average(self) -> None:
        if self.average is not None:
            # Young averages forget faster, so that they do not drag the random start along.
            decay = min(self.train.average, (1 + self.done) / (10 + self.done))
            for name, tensor in self._floats():
                self.average[name].lerp_(tensor, 1 - decay)

    def _new_model(self) -> UNet:
        """The network as the seed makes it."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.train.seed)
            model = UNet(self.spec)
        # torch's typing does not know this form of `to`, which sets the memory format alone.
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        return model

    def _reader(self, pair: ScenePair) -> TileReader:
        reader = TileReader.of(
            self.spec, pair.image, pair.labels, normalise=self.normalise, ignore=pair.ignore
        )
        return reader.cached(self.cache_bytes)
