"""The training loop: tiles drawn from an image, or the whole image in every step.

A run lives in a folder: `run.json` (what is trained on what), `history.jsonl` (a line a step),
`checkpoints/` and, at the end, `weights.safetensors`. Started again with the same arguments it
goes on where it was stopped; on CPU, with the same number of ranks, bit for bit.
"""

from __future__ import annotations

import copy
import json
import math
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import xarray as xr
from torch import nn

from bigunet import ranks as ranks_of
from bigunet.calibrate import calibrate_bias, calibrate_norm, freeze_norm
from bigunet.checkpoint import (
    Weights,
    check_spec,
    latest_state,
    save_state,
    save_weights,
    write_atomically,
)
from bigunet.errors import CheckpointError, OutputError, SpecError, fail
from bigunet.evaluate import evaluate
from bigunet.losses import Objective
from bigunet.metrics import class_ids
from bigunet.model import UNet
from bigunet.optimisers import learning_rate, optimiser
from bigunet.progress import Progress
from bigunet.ranks import Ranks
from bigunet.sample_parallel import check_exact, narrowed, step
from bigunet.sampling import Sampler
from bigunet.scenes import Normalise, ScenePair, normalisation
from bigunet.spec import Precision, TrainSpec, UNetSpec
from bigunet.tile_reader import TileReader

__all__ = ["Fitted", "fit"]

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


def fit(
    spec: UNetSpec,
    pair: ScenePair,
    train: TrainSpec,
    *,
    out: str | Path,
    val: ScenePair | None = None,
    mode: Literal["tiles", "whole"] = "tiles",
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
) -> Fitted:
    """Train a network of `spec` on an image and its labels; on all ranks that `torchrun` started.

    Parameters
    ----------
    out : folder of the run. What is in it decides where to go on.
    val : image and labels to score, every `validate_every` steps and at the end.
    mode : "tiles": each step draws `train.batch` tiles; "whole": each step is the whole image,
        in tiles of `train.tile`.
    exact : True refuses whatever makes a tile differ from the whole image; False admits it;
        None: True for mode "whole", else False.
    normalise : by default mean and deviation of the image's bands.
    start : weights to start from instead of random ones.
    resume : False refuses a folder with checkpoints.
    stop_after : do at most so many steps now, and go on next time (a batch system's time limit).
    save_every : steps between checkpoints.
    leave_out : classes that `mean_iou_kept` leaves out, such as "water".
    card : added to the weights' model card.
    cache_bytes : an image, or labels, of at most this size are held in memory on every rank.
    weights_dtype : "bf16" rounds the final weights for a file of half the size; they are
        calibrated and scored as rounded.

    A first Ctrl-C or SIGTERM ends the step at hand, writes a checkpoint and raises
    KeyboardInterrupt; a second one stops at once.

    Raises
    ------
    SpecError, ShapeError, SceneError, ExactnessError : see `exact_step`, before anything is
    written. CheckpointError : `out` belongs to another run. OutputError : it cannot be written.
    """
    with ranks_of.init() as ranks:
        run = _Run(spec, pair, train, Path(out), ranks, mode, exact, normalise, cache_bytes)
        run.open(start, resume)
        last = train.steps if stop_after is None else min(train.steps, run.done + stop_after)
        with (
            Progress(train.steps, "train", done=run.done, shown=progress and ranks.first) as bar,
            _stop_signals() as stop,
        ):
            while run.done < last:
                row = run.advance()
                bar.update(loss=row["loss"], rate=row["rate"])
                stopped = ranks.any(stop.is_set())
                due = validate_every and run.done % validate_every == 0
                if val is not None and due and run.done < last:
                    run.validate(val, leave_out)
                if stopped or run.done % save_every == 0 or run.done == last:
                    run.save()
                if stopped and run.done < train.steps:
                    raise KeyboardInterrupt(f"stopped after step {run.done}; run again to go on")
        return run.finish(val, leave_out, card or {}, weights_dtype)


class _Run:
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
        self.spec, self.train, self.folder, self.ranks = spec, train, folder, ranks
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
        about = json.loads(json.dumps(about))
        state = latest_state(self.folder / "checkpoints")
        if state is not None and not resume:
            fail(
                OutputError,
                rule="without resume, the output folder holds no run",
                got=f"{self.folder} with a checkpoint of step {state['step']}",
                remedy="Choose another folder, or resume.",
            )
        if state is not None:
            stored = json.loads(state["about"])
            for part in ("spec", "train", "data"):
                check_spec(about[part], stored[part], f"the checkpoints in {self.folder}")
        elif (self.folder / "weights.safetensors").exists():
            fail(
                OutputError,
                rule="an output folder is empty or holds checkpoints of this run",
                got=f"{self.folder} with finished weights and no checkpoint",
                remedy="Choose another folder.",
            )
        self.about = json.dumps(about)
        self.ranks.wait()
        if state is None:
            self._begin(start)
        else:
            self._take_up(state)
        if self.ranks.first:
            text = json.dumps({**about, "exact": self.exact}, indent=1)
            write_atomically(self.folder / "run.json", lambda path: _write_text(path, text))
            self._trim_history()
        self._copy_weights()
        self.ranks.wait()

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
        steps = torch.tensor([state["step"], -state["step"]])
        if self.ranks.size > 1 and bool(
            self.ranks.sum_(steps.clone())[0] != self.ranks.size * steps[0]
        ):
            fail(
                CheckpointError,
                rule="all ranks read the same checkpoint",
                got=f"step {state['step']} on rank {self.ranks.rank}",
                remedy="Put the run's folder where every rank sees it.",
            )
        self.model.load_state_dict(state["model"])
        self.optimiser.load_state_dict(state["optimiser"])
        if state["average"] is not None:
            self.average = {n: t.to(self.ranks.device) for n, t in state["average"].items()}
        self.done, self.seconds, self.loss = state["step"], state["seconds"], state["loss"]

    def save(self) -> None:
        """Write a checkpoint; all ranks wait until it is on the disk."""
        if self.ranks.first:
            state = {
                "about": self.about,
                "model": self.model.state_dict(),
                "optimiser": self.optimiser.state_dict(),
                "average": self.average,
                "seconds": self.seconds,
                "loss": self.loss,
            }
            save_state(self.folder / "checkpoints", self.done, state)
        self.ranks.wait()

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
        path = self.folder / "weights.safetensors"
        if self.ranks.first:
            made = {
                **card,
                "steps": self.done,
                "seconds": round(self.seconds, 1),
                "seed": self.train.seed,
                "ranks": self.ranks.size,
                "torch": torch.__version__,
                "train": self.train.to_dict(),
                "scores": {} if scores is None else _plain(scores),
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
        return Fitted(model, self.folder, path, self.loss, self.seconds, self.normalise, scores)

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
        self._log(row)
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
        self._log({"step": self.done, **_plain(scores)})
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

    # History -----------------------------------------------------------------------------------

    def _log(self, row: dict[str, Any]) -> None:
        if self.ranks.first:
            with (self.folder / "history.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")

    def _trim_history(self) -> None:
        """Drop lines of steps that will be done again, and a last line cut short by a crash."""
        path = self.folder / "history.jsonl"
        if not path.exists():
            return
        kept = []
        for line in path.read_text().splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if row["step"] <= self.done:
                kept.append(line + "\n")
        write_atomically(path, lambda temporary: _write_text(temporary, "".join(kept)))


@contextmanager
def _stop_signals() -> Iterator[threading.Event]:
    """An event that the first SIGINT or SIGTERM sets; the second acts as it did before."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop  # signals reach the main thread only; whoever runs us there handles them
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def handle(number: int, frame: object) -> None:
        stop.set()
        signal.signal(number, before[signal.Signals(number)])

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        for number in numbers:
            signal.signal(number, before[number])


def _plain(scores: xr.Dataset) -> dict[str, Any]:
    """Scores for JSON, null for a class that does not occur."""
    names = [n for n in ("mean_iou", "mean_iou_kept", "accuracy") if n in scores]
    values = {n: round(float(scores[n]), 6) for n in names}
    ious = zip(scores["class"].values.tolist(), scores["iou"].values.tolist(), strict=True)
    return {**values, "iou": {n: None if math.isnan(v) else round(v, 6) for n, v in ious}}


def _write_text(path: Path, text: str) -> None:
    path.write_text(text)
