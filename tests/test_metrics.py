"""Scores by blocks against torchmetrics on the whole, and against counting by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from torchmetrics.classification import MulticlassJaccardIndex

from bigunet.errors import SceneError
from bigunet.metrics import Confusion, class_ids, score
from bigunet.scenes import ClassTable


def maps(classes: int = 4) -> tuple[xr.DataArray, xr.DataArray]:
    rng = np.random.default_rng(2)
    truth = rng.integers(0, classes, (70, 55)).astype(np.uint8)
    predicted = np.where(rng.random(truth.shape) < 0.6, truth, 0).astype(np.uint8)
    truth[rng.random(truth.shape) < 0.1] = 255
    named = (xr.DataArray(a, dims=("y", "x")) for a in (predicted, truth))
    return tuple(named)  # type: ignore[return-value]


def test_equal_to_torchmetrics_on_the_whole() -> None:
    predicted, truth = maps()
    table = score(predicted, truth, ("a", "b", "c", "d"), block=16)
    reference = MulticlassJaccardIndex(4, average=None, ignore_index=255)
    arrays = (torch.from_numpy(a.values.astype(np.int64)) for a in (predicted, truth))
    np.testing.assert_allclose(table["iou"], reference(*arrays).numpy(), rtol=1e-6)
    kept = truth.values != 255
    assert int(table["pixels"]) == kept.sum()
    assert float(table["accuracy"]) == (predicted.values == truth.values)[kept].mean()
    assert float(table["mean_iou"]) == pytest.approx(float(table["iou"].mean()), rel=1e-12)


def test_by_hand() -> None:
    truth = np.array([0, 0, 0, 1, 1, 2, 255])
    predicted = np.array([0, 0, 1, 1, 0, 1, 3])
    confusion = Confusion(4)
    confusion.add(predicted[:3], truth[:3])
    confusion.add(predicted[3:], truth[3:])
    table = confusion.table(["water", "land", "ice", "none"], leave_out=["water"])
    assert confusion.matrix.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 0], [0] * 4]
    np.testing.assert_allclose(table["iou"], [2 / 4, 1 / 4, 0, np.nan])
    assert float(table["mean_iou"]) == pytest.approx(0.25)
    # Water is left out of the mean; land taken for water still counts against land.
    assert float(table["mean_iou_kept"]) == pytest.approx(0.125)
    assert table["mean_iou_kept"].attrs["without"] == "water"
    assert table["truth_pixels"].values.tolist() == [3, 2, 1, 0]
    assert table["predicted_pixels"].values.tolist() == [3, 3, 0, 0]


def test_classes_come_from_the_truth_where_not_given() -> None:
    predicted, truth = maps()
    classes = ClassTable(("a", "b", "c", "d"))
    named = truth.assign_attrs(classes=classes.to_dict(), ignore=255)
    assert score(predicted, named).identical(score(predicted, truth, classes))
    with pytest.raises(SceneError, match="classes are known"):
        score(predicted, truth)


def test_bad_input() -> None:
    predicted, truth = maps()
    with pytest.raises(SceneError, match="same number of rows"):
        score(predicted[:-1], truth, ("a", "b", "c", "d"))
    with pytest.raises(SceneError, match=r"0 to 2.*0 to 3 in the truth"):
        score(predicted, truth, ("a", "b", "c"))
    with pytest.raises(SceneError, match="in the prediction"):
        score(predicted + 1, truth, ("a", "b", "c", "d"))
    with pytest.raises(SceneError, match="classes are a, b; got sea"):
        class_ids(["sea"], ["a", "b"])
    assert class_ids(["b", 0], ["a", "b"]) == (0, 1)
    empty = score(predicted, truth * 0 + 255, ("a", "b", "c", "d"))
    assert np.isnan(empty["mean_iou"])
    assert int(empty["pixels"]) == 0
