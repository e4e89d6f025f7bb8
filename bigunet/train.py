"""Sample-parallel training: tiles drawn from an image, or the whole image in every step.

A run lives in a folder: `run.json` (what is trained on what), `history.jsonl` (a line a step),
`checkpoints/` and, at the end, `weights.safetensors`. Started again with the same arguments it
goes on where it was stopped; on CPU, with the same number of ranks, bit for bit.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from bigunet import ranks as ranks_of
from bigunet.checkpoint import Weights
from bigunet.model import UNet
from bigunet.sample_parallel import copy_weights, narrowed, step
from bigunet.scenes import Normalise, ScenePair
from bigunet.spec import TrainSpec, UNetSpec
from bigunet.tile_reader import Sample
from bigunet.trainer import Fitted, Trainer

__all__ = ["Fitted", "fit"]


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

    A first Ctrl-C, SIGTERM or SIGUSR1 (a batch system's warning) on any rank ends the step at
    hand, writes a checkpoint and raises KeyboardInterrupt; a second Ctrl-C or SIGTERM stops at
    once.

    Raises
    ------
    SpecError, ShapeError, SceneError, ExactnessError : see `exact_step`, before anything is
    written. CheckpointError : `out` belongs to another run. OutputError : it cannot be written.
    """
    with ranks_of.init() as ranks:
        trainer = _SampleParallel(
            spec, pair, train, Path(out), ranks, mode, exact, normalise, cache_bytes
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


class _SampleParallel(Trainer):
    """Every rank has the whole network, and some of a step's tiles."""

    optimiser: torch.optim.Optimizer

    def _check(self, shape: tuple[int, int]) -> None:
        pass  # nothing beside what every training refuses

    def _build(self) -> None:
        self.model.to(self.ranks.device)
        # In bf16 the network that runs is a copy; the optimiser moves fp32 weights.
        self.worker = narrowed(self.model) if self.train.precision == "bf16" else self.model

    def _gradients(self, samples: Sequence[Sample]) -> tuple[float, int]:
        result = step(
            self.worker,
            self.reader,
            samples,
            self.objective,
            precision=self.train.precision,
            recompute=self.train.recompute,
            batch=self.train.batch,
            ranks=self.ranks,
            exact=self.exact,
            into=self.model,
        )
        return result.loss, result.pixels

    def _clip(self) -> float:
        parameters = list(self.model.parameters())
        return float(nn.utils.clip_grad_norm_(parameters, self.train.clip_norm or math.inf))

    def _refresh(self, *, stepped: bool) -> None:
        learnt = stepped and not self.train.freeze_norm
        if learnt:
            self._share_statistics()
        if self.worker is not self.model:
            self._copy_weights(backwards=learnt)

    def _share_statistics(self) -> None:
        # Batch norm that still learns has seen other tiles on each rank.
        buffers = [b for b in self.worker.buffers() if b.is_floating_point()]
        if self.ranks.size > 1 and buffers:
            self.ranks.sum_all_(buffers)
            for buffer in buffers:
                buffer /= self.ranks.size

    @torch.no_grad()
    def _copy_weights(self, *, backwards: bool) -> None:
        """Bring the bf16 worker up to the fp32 weights; its own statistics go `backwards`."""
        copy_weights(self.model, self.worker)
        for mine, master_buffer in zip(self.worker.buffers(), self.model.buffers(), strict=True):
            if backwards:
                master_buffer.copy_(mine)
            else:
                mine.copy_(master_buffer)

    def _gather(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "average": self.average,
        }

    def _take_up_optimiser(self, state: dict[str, Any]) -> None:
        self.optimiser.load_state_dict(state)

    def _network(self) -> UNet:
        model = copy.deepcopy(self.model)
        if self.average is not None:
            model.load_state_dict({**model.state_dict(), **self.average})
        return model.eval()
