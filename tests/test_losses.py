"""Losses by parts against torch's own on the whole, and Dice against its definition."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bigunet.errors import SceneError, SpecError
from bigunet.losses import Objective, Totals


def dice_by_definition(
    logits: Tensor, labels: Tensor, weights: Tensor, ignore: int = 255
) -> Tensor:
    valid = (labels != ignore)[:, None]
    truth = F.one_hot(torch.where(labels == ignore, 0, labels), logits.shape[1])
    truth = truth.permute(0, 3, 1, 2) * valid
    predicted = logits.softmax(1) * valid
    sums = (0, 2, 3)
    score = 2 * (predicted * truth).sum(sums) / (predicted.sum(sums) + truth.sum(sums))
    weights = weights * (truth.sum(sums) > 0)
    return 1 - (weights * score).sum() / weights.sum()


@pytest.mark.parametrize(
    ("loss", "weights", "smoothing"),
    list(
        itertools.product(
            ("cross_entropy", "dice", "cross_entropy+dice"), (None, (1.0, 0.2, 3.0, 0.5)), (0, 0.1)
        )
    ),
)
def test_parts_add_up_to_the_whole(
    loss: str, weights: tuple[float, ...] | None, smoothing: float
) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 4, 9, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 3, (2, 9, 7), generator=generator)  # class 3 does not occur
    labels[0, 2:4] = 255
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    whole = torch.zeros((), dtype=torch.float64)
    if "cross" in loss:
        whole = whole + F.cross_entropy(
            logits, labels, weight, ignore_index=255, label_smoothing=smoothing
        )
    if "dice" in loss:
        ones = torch.ones(4, dtype=torch.float64)
        whole = whole + dice_by_definition(logits, labels, ones if weight is None else weight)
    (expected,) = torch.autograd.grad(whole, logits)

    objective = Objective(4, loss, weights, smoothing)  # type: ignore[arg-type]
    counts = objective.count(labels.numpy())
    objective.check(counts)
    cuts = [(slice(None), slice(None), slice(a, b)) for a, b in ((0, 1), (1, 5), (5, 9))]
    sums = [objective.sums(logits[c], labels[c[0], c[2]]) for c in cuts]
    totals = Totals(
        torch.from_numpy(counts[:-1]).double(),
        sum(s[0] for s in sums).detach(),  # type: ignore[union-attr]
        sum(s[1] for s in sums).detach(),  # type: ignore[union-attr]
    )
    gradient, value = torch.zeros_like(logits), 0.0
    for cut in cuts:
        part, entropy = objective.part(logits[cut], labels[cut[0], cut[2]], totals)
        gradient += torch.autograd.grad(part, logits)[0]
        value += float(entropy)
    assert abs(value + objective.dice(totals) - whole.item()) < 1e-13
    assert (gradient - expected).norm() <= 1e-13 * expected.norm()


def test_bf16_logits_are_summed_in_single_precision() -> None:
    logits = torch.zeros(1, 2, 300, 300, dtype=torch.bfloat16)
    labels = torch.zeros(1, 300, 300, dtype=torch.int64)
    overlap, predicted = Objective(2, "dice").sums(logits, labels)
    # 45,000 halves: bf16 sums stop growing at 256.
    assert overlap[0].item() == 45_000
    assert predicted[1].item() == 45_000


def test_counting() -> None:
    labels = np.array([[0, 1, 1], [2, 255, 7]], np.uint8)
    assert Objective(3).count(labels).tolist() == [1, 2, 1, 1]
    assert Objective(3).count(np.array([-1, 0])).tolist() == [1, 0, 0, 1]


def test_what_cannot_be_learnt_is_refused() -> None:
    with pytest.raises(SceneError, match=r"0 to 2, or 255.*1 pixels of other labels"):
        Objective(3).check(np.array([1, 2, 1, 1]))
    with pytest.raises(SceneError, match="at least one pixel"):
        Objective(3).check(np.zeros(4, int))
    with pytest.raises(SceneError, match="weight above 0"):
        Objective(2, class_weights=(0.0, 1.0)).check(np.array([5, 0, 0]))
    with pytest.raises(SpecError, match="one weight for each of the 3 classes"):
        Objective(3, class_weights=(1.0, 2.0))
