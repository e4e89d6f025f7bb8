"""Scores of a label map: the confusion matrix, block by block, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr

from bigunet.errors import SceneError, fail
from bigunet.scenes import iter_blocks, read_labels

__all__ = ["Confusion", "class_ids", "score"]


class Confusion:
    """A confusion matrix that grows block by block; labels equal to `ignore` do not count."""

    def __init__(self, num_classes: int, ignore: int = 255) -> None:
        self.num_classes, self.ignore = num_classes, ignore
        self.matrix = torch.zeros(num_classes, num_classes, dtype=torch.int64)
        # Here, since it takes seconds to import: ranks that only train need not wait for it.
        from torchmetrics.classification import MulticlassConfusionMatrix

        self._metric = MulticlassConfusionMatrix(num_classes, validate_args=False)

    def add(self, predicted: np.ndarray, truth: np.ndarray) -> None:
        """Count blocks of equal shape.

        Raises
        ------
        SceneError : for a label or a prediction outside the classes.
        """
        kept = truth != self.ignore
        predicted, truth = predicted[kept].astype(np.int64), truth[kept].astype(np.int64)
        for what, ids in (("truth", truth), ("prediction", predicted)):
            if ids.size and (ids.min() < 0 or ids.max() >= self.num_classes):
                fail(
                    SceneError,
                    rule=f"every label is a class, 0 to {self.num_classes - 1}, or {self.ignore} "
                    "in the truth",
                    got=f"{ids.min()} to {ids.max()} in the {what}",
                    remedy="Pass the class table that both were made with.",
                )
        if truth.size:
            self.matrix += self._metric(torch.from_numpy(predicted), torch.from_numpy(truth))

    def table(
        self, names: Sequence[str] | None = None, *, leave_out: Sequence[int | str] = ()
    ) -> xr.Dataset:
        """Scores by class and in the mean.

        Variables: `iou` (class), `truth_pixels` and `predicted_pixels` (class),
        `confusion` (truth, predicted), and scalars `mean_iou` (over classes that occur in truth
        or prediction), `accuracy`, `pixels`. With `leave_out` (ids or names of classes such as
        water) also `mean_iou_kept`: the mean over the other classes, with errors against the
        left-out classes still counted.
        """
        names = [str(i) for i in range(self.num_classes)] if names is None else list(names)
        matrix = self.matrix.numpy()
        hit = np.diag(matrix)
        truth, predicted = matrix.sum(1), matrix.sum(0)
        union = truth + predicted - hit
        with np.errstate(invalid="ignore"):
            iou = np.where(union > 0, hit / np.maximum(union, 1), np.nan)
        ids = class_ids(leave_out, names)
        kept = np.array([i not in ids for i in range(self.num_classes)])
        pixels = int(matrix.sum())
        scalars = {
            "mean_iou": _mean(iou),
            "accuracy": float(hit.sum() / pixels) if pixels else float("nan"),
            "pixels": pixels,
        }
        if ids:
            scalars["mean_iou_kept"] = _mean(iou[kept])
        table = xr.Dataset(
            {
                "iou": ("class", iou),
                "truth_pixels": ("class", truth),
                "predicted_pixels": ("class", predicted),
                "confusion": (("truth", "predicted"), matrix),
                **{name: ((), value) for name, value in scalars.items()},
            },
            coords={"class": names, "truth": names, "predicted": names},
        )
        for name in ("truth_pixels", "predicted_pixels", "confusion", "pixels"):
            table[name].attrs["units"] = "pixels"
        if ids:
            table["mean_iou_kept"].attrs["without"] = ", ".join(names[i] for i in ids)
        return table


def score(
    predicted: xr.DataArray,
    truth: xr.DataArray,
    classes: Any = None,
    *,
    leave_out: Sequence[int | str] = (),
    ignore: int | None = None,
    block: int = 2048,
) -> xr.Dataset:
    """Compare two label maps (y, x) of one size, reading them block by block.

    Parameters
    ----------
    classes : a `bigunet.scenes.ClassTable`, or the names in order; by default the table that
        the truth carries.
    leave_out : classes without a part in `mean_iou_kept`, such as "water" for land only.
    ignore : label of the truth that does not count; by default the truth's own, else 255.

    Raises
    ------
    SceneError : for sizes that differ, labels outside the classes, or no classes known.
    """
    if predicted.shape != truth.shape:
        fail(
            SceneError,
            rule="prediction and truth have the same number of rows and columns",
            got=f"{predicted.shape} and {truth.shape}",
            remedy="Score the mosaic of that very scene.",
        )
    table = truth.attrs.get("classes") if classes is None else classes
    if table is None:
        fail(SceneError, rule="the classes are known", got=None, remedy="Pass `classes`.")
    if isinstance(table, dict):
        table = table["names"]
    names = list(getattr(table, "names", table))
    if ignore is None:
        ignore = int(truth.attrs.get("ignore", getattr(classes, "ignore", 255)))
    confusion = Confusion(len(names), ignore)
    for window in iter_blocks(truth.shape, block):
        confusion.add(read_labels(predicted, *window), read_labels(truth, *window))
    return confusion.table(names, leave_out=leave_out)


def class_ids(classes: Sequence[int | str], names: Sequence[int | str]) -> tuple[int, ...]:
    """Ids of classes given by id or by name, sorted.

    Raises
    ------
    SceneError : for a class that is not in `names`.
    """
    ids = set()
    for one in classes:
        if one in names:
            ids.add(list(names).index(one))
        elif isinstance(one, int) and 0 <= one < len(names):
            ids.add(one)
        else:
            fail(
                SceneError,
                rule=f"classes are {', '.join(str(name) for name in names)}",
                got=one,
                remedy="Use one of these, or an index from 0.",
            )
    return tuple(sorted(ids))


def _mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")
