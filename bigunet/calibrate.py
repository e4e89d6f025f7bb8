"""What is set from data rather than learnt: batch norm's statistics and the head's biases."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from bigunet.errors import SceneError, SpecError, fail
from bigunet.evaluate import labelled_logits
from bigunet.model import UNet
from bigunet.ranks import Ranks, current
from bigunet.sample_parallel import tile_logits
from bigunet.spec import Precision
from bigunet.tile_reader import Sample, TileReader

__all__ = ["calibrate_bias", "calibrate_norm", "freeze_norm"]

_SHIFTS = (3.2, 1.6, 0.8, 0.4, 0.2, 0.1, 0.05)
_ROUNDS = 4
_STREAM = 101  # of the seed's random numbers; others place tiles


def freeze_norm(model: nn.Module) -> None:
    """Make batch norms use their running statistics as they are, which keeps tiles exact."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()


@torch.no_grad()
def calibrate_norm(
    model: UNet,
    reader: TileReader,
    samples: Sequence[Sample],
    *,
    precision: Precision = "fp32",
    ranks: Ranks | None = None,
) -> None:
    """Set batch norm's running statistics to the mean over `samples`, then freeze them.

    Layers are calibrated together, each seeing the statistics of the tile at hand below it, as
    `torch.optim.swa_utils.update_bn` does. Every rank ends with the same statistics.
    """
    ranks = current() if ranks is None else ranks
    norms = [m for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    sums = [torch.zeros(2, m.num_features, dtype=torch.float64) for m in norms]
    momenta = [m.momentum for m in norms]
    training = {m: m.training for m in model.modules()}
    model.eval()  # dropout would add noise of its own
    for norm in norms:
        norm.train()
        norm.momentum = 1.0  # the running values are then those of the last pass
    for sample in samples[ranks.rank :: ranks.size] if norms else ():
        pixels = torch.from_numpy(reader.pixels(sample))[None]
        tile_logits(model, pixels, sample.tile, precision)
        for total, norm in zip(sums, norms, strict=True):
            total += torch.stack(_statistics(norm)).double().cpu()
    ranks.sum_all_(sums)
    for total, norm, momentum in zip(sums, norms, momenta, strict=True):
        for statistic, mean in zip(_statistics(norm), total / len(samples), strict=True):
            statistic.copy_(mean)
        norm.momentum = momentum
    for module, was in training.items():
        module.training = was
    freeze_norm(model)


@torch.no_grad()
def calibrate_bias(
    model: UNet,
    reader: TileReader,
    *,
    leave_out: Sequence[int] = (),
    num_pixels: int = 400_000,
    tile: int = 512,
    precision: Precision = "fp32",
    seed: int = 0,
    ranks: Ranks | None = None,
) -> Tensor:
    """Shift the head's biases so that the mean IoU over labelled pixels is largest.

    A network trained with weighted or balanced classes gives the rare ones too often for the IoU;
    one shift a class, found on training labels by coordinate ascent, corrects that.

    Parameters
    ----------
    leave_out : ids of classes that do not enter the mean.
    num_pixels : about how many labelled pixels to use, drawn evenly.

    Returns
    -------
    (classes,) shifts, which were added to the head's bias, of mean 0.

    Raises
    ------
    SpecError : for a network without `head_bias`. SceneError : where nothing is labelled.
    """
    ranks = current() if ranks is None else ranks
    spec = model.spec
    if not spec.head_bias:
        fail(
            SpecError,
            rule="the head has biases to calibrate",
            got="head_bias=False",
            remedy="Set head_bias, or leave the calibration out.",
        )
    share = min(1.0, num_pixels / (reader.shape[0] * reader.shape[1]))
    rng = np.random.default_rng([seed, _STREAM, ranks.rank])
    columns, labels = [torch.empty(spec.classes, 0)], [torch.empty(0, dtype=torch.int64)]
    for logits, truth in labelled_logits(
        model, reader, tile=tile, precision=precision, ranks=ranks
    ):
        chosen = torch.from_numpy((truth != reader.ignore) & (rng.random(truth.shape) < share))
        columns.append(logits.float().cpu()[:, chosen])
        labels.append(torch.from_numpy(truth)[chosen])
    scores, truths = torch.cat(columns, 1), torch.cat(labels)
    if not ranks.any(bool(len(truths))):
        fail(SceneError, rule="some pixels are labelled", got=0, remedy="Give other labels.")
    kept = [c for c in range(spec.classes) if c not in leave_out]
    shifts = torch.zeros(spec.classes)

    def mean_iou(shifts: Tensor) -> float:
        predicted = (scores + shifts[:, None]).argmax(0)
        pairs = torch.bincount(truths * spec.classes + predicted, minlength=spec.classes**2)
        matrix = ranks.sum_(pairs).view(spec.classes, spec.classes).double()
        hit = matrix.diagonal()
        union = matrix.sum(0) + matrix.sum(1) - hit
        present = [c for c in kept if union[c] > 0]
        return float((hit[present] / union[present]).mean()) if present else 0.0

    best = mean_iou(shifts)
    for by in (shift for shift in _SHIFTS for _ in range(_ROUNDS)):
        for label in range(spec.classes):
            for sign in (1, -1):
                trial = shifts.clone()
                trial[label] += sign * by
                value = mean_iou(trial)
                if value > best:
                    best, shifts = value, trial
    shifts -= shifts.mean()
    head = model.layers["head"]
    assert isinstance(head, nn.Conv2d)
    assert head.bias is not None
    head.bias += shifts.to(head.bias)
    return shifts


def _statistics(norm: nn.BatchNorm2d) -> tuple[Tensor, Tensor]:
    assert norm.running_mean is not None
    assert norm.running_var is not None
    return norm.running_mean, norm.running_var
