"""Losses of a whole image, computed tile by tile.

A mean over an image is not the mean of its tiles' means. Cross-entropy is therefore summed over
tiles and divided by the weight of all labelled pixels, which is known from the labels alone.
Dice is a ratio of sums over the image: a first pass gathers the sums, a second one differentiates
the loss linearised at them, which has the same gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from bigunet.errors import SceneError, SpecError, fail
from bigunet.spec import Loss

__all__ = ["Objective", "Totals"]

# Labels below this are counted in a table of their own length.
_FEW = 2**16


class Totals(NamedTuple):
    """Sums over all tiles of all ranks, each (classes,) float64.

    `labelled`: pixels of each class; `overlap`: the predicted probability of the true class;
    `predicted`: the predicted probability of each class. The last two are zeros until a first
    pass has gathered them (Dice only).
    """

    labelled: Tensor
    overlap: Tensor
    predicted: Tensor


@dataclass(frozen=True, slots=True)
class Objective:
    """What is minimised over all labelled pixels of a set of tiles.

    Parameters
    ----------
    loss : "cross_entropy": torch's weighted mean over pixels; "dice": one minus the mean over the
        classes that occur of 2 |P T| / (|P| + |T|), with predicted probabilities P and truth T
        summed over all labelled pixels; "cross_entropy+dice": their sum.
    classes : number of classes, the logits' channels.
    class_weights : one weight a class; they weigh pixels in the cross-entropy, classes in Dice.
    label_smoothing : torch's, in the cross-entropy.
    ignore : the label that means "not labelled".

    Raises
    ------
    SpecError : for weights that do not fit the classes.
    """

    classes: int
    loss: Loss = "cross_entropy"
    class_weights: tuple[float, ...] | None = None
    label_smoothing: float = 0.0
    ignore: int = 255

    def __post_init__(self) -> None:
        weights = self.class_weights
        if weights is not None and len(weights) != self.classes:
            fail(
                SpecError,
                rule=f"class_weights has one weight for each of the {self.classes} classes",
                got=len(weights),
                remedy="Give one number a class.",
            )

    @property
    def two_passes(self) -> bool:
        """Whether the gradient needs sums over all predictions first."""
        return self.loss != "cross_entropy"

    def weights(self) -> Tensor:
        """(classes,) float64."""
        weights = self.class_weights or (1.0,) * self.classes
        return torch.tensor(weights, dtype=torch.float64)

    def count(self, labels: np.ndarray) -> np.ndarray:
        """Pixels of each class, and last those of labels outside the table; int64."""
        flat = labels.ravel()
        if flat.size and flat.dtype.kind in "iu" and flat.min() >= 0 and flat.max() < _FEW:
            # One pass over the pixels: this runs at every step.
            found = np.bincount(flat, minlength=self.classes)
            inside = found[: self.classes].copy()
            outside = found[self.classes :].sum()
            if 0 <= self.ignore < self.classes:
                inside[self.ignore] = 0
            elif self.classes <= self.ignore < len(found):
                outside -= found[self.ignore]
            return np.append(inside, outside)
        kept = labels[labels != self.ignore].astype(np.int64, copy=False).ravel()
        kept = np.where((kept >= 0) & (kept < self.classes), kept, self.classes)
        return np.bincount(kept, minlength=self.classes + 1)

    def check(self, counts: np.ndarray) -> None:
        """Raise `SceneError` for labels outside the table, or where nothing can be learnt."""
        if counts[-1]:
            fail(
                SceneError,
                rule=f"labels are 0 to {self.classes - 1}, or {self.ignore} for not labelled",
                got=f"{int(counts[-1])} pixels of other labels",
                remedy="Map the labels to the class table, or set `ignore`.",
            )
        if not (counts[:-1] * np.asarray(self.weights()) > 0).any():
            fail(
                SceneError,
                rule="at least one pixel of the tiles is labelled with a class of weight above 0",
                got=f"{int(counts[:-1].sum())} labelled pixels",
                remedy="Choose other tiles, labels or class weights.",
            )

    def sums(self, logits_BCHW: Tensor, labels_BHW: Tensor) -> tuple[Tensor, Tensor]:
        """`Totals.overlap` and `Totals.predicted` of some tiles; differentiable."""
        valid = labels_BHW != self.ignore
        probabilities = _wide(logits_BCHW).softmax(1)
        truth = torch.where(valid, labels_BHW, 0)
        hit = probabilities.gather(1, truth[:, None])[:, 0] * valid
        overlap = hit.new_zeros(self.classes).index_add(0, truth.flatten(), hit.flatten())
        return overlap, (probabilities * valid[:, None]).sum((0, 2, 3))

    def part(
        self, logits_BCHW: Tensor, labels_BHW: Tensor, totals: Totals
    ) -> tuple[Tensor, Tensor]:
        """What to differentiate for some tiles, and their share of the cross-entropy's value.

        The gradients of the first, summed over all tiles, are the gradient of `value(totals)`.
        """
        logits = _wide(logits_BCHW)
        zero = logits.new_zeros(())
        entropy, dice = zero, zero
        if "cross_entropy" in self.loss:
            weights = None if self.class_weights is None else self.weights().to(logits)
            entropy = F.cross_entropy(
                logits,
                labels_BHW,
                weights,
                ignore_index=self.ignore,
                reduction="sum",
                label_smoothing=self.label_smoothing,
            ) / float((totals.labelled.cpu() * self.weights()).sum())
        if "dice" in self.loss:
            by_overlap, by_predicted = self._dice_slopes(totals)
            overlap, predicted = self.sums(logits, labels_BHW)
            dice = overlap @ by_overlap.to(overlap) + predicted @ by_predicted.to(predicted)
        return entropy + dice, entropy.detach()

    def dice(self, totals: Totals) -> float:
        """The Dice part of the loss; 0 where the loss has none."""
        if "dice" not in self.loss:
            return 0.0
        share = self._shares(totals)
        score = 2 * totals.overlap / (totals.predicted + totals.labelled).clamp_min(1e-300)
        return float(1 - (share * score).sum())

    def _shares(self, totals: Totals) -> Tensor:
        weights = self.weights() * (totals.labelled > 0)
        return weights / weights.sum()

    def _dice_slopes(self, totals: Totals) -> tuple[Tensor, Tensor]:
        share = self._shares(totals)
        size = (totals.predicted + totals.labelled).clamp_min(1e-300)
        return -2 * share / size, 2 * share * totals.overlap / size**2


def _wide(logits: Tensor) -> Tensor:
    """Softmax and sums in at least single precision."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
