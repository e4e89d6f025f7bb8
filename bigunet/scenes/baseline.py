"""What colour alone can tell: the baseline that a network has to beat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import SceneError, fail
from .earth import earth_split
from .open import read_block, read_labels
from .pairs import ScenePair, iter_blocks

__all__ = ["Baseline", "class_iou", "colour_lookup_baseline", "land_mean_iou"]

Counts = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, eq=False)
class Baseline:
    """Scores of the colour lookup on the held-out pixels.

    confusion: pixel counts, (true class, predicted class). land_mean_iou: see that function.
    """

    confusion: Counts
    bits: int

    @property
    def iou(self) -> tuple[float, ...]:
        """Intersection over union of each class."""
        return tuple(class_iou(self.confusion).tolist())

    @property
    def land_mean_iou(self) -> float:
        """`land_mean_iou` of the confusion matrix."""
        return land_mean_iou(self.confusion)


def class_iou(confusion: Counts) -> np.ndarray[Any, np.dtype[np.float64]]:
    """TP / (TP + FP + FN) of each class from (true, predicted) counts; NaN for an absent class."""
    hits = np.diag(confusion).astype(np.float64)
    union = confusion.sum(axis=0) + confusion.sum(axis=1) - hits
    out = np.full(hits.shape, np.nan)
    np.divide(hits, union, out=out, where=union > 0)
    return out


def land_mean_iou(confusion: Counts, water: int = 0) -> float:
    """Mean IoU over the classes other than `water`.

    "Land-only" leaves the water class out of the mean, not its pixels out of the count: the
    confusion matrix is over every scored pixel, so land predicted on water still counts as a
    false positive, and water predicted on land as a miss. Absent classes are left out.
    """
    return float(np.nanmean(np.delete(class_iou(confusion), water)))


def colour_lookup_baseline(scene: ScenePair, bits: int = 4) -> Baseline:
    """For each colour at `bits` bits a channel, the most frequent class of the training labels.

    Trained on the pixels outside `earth_split`, scored on those inside; ignored pixels do neither.
    A tie goes to the lower id, and so does a colour never seen in training (class 0).
    The image must be uint8 with three bands. Raises `SceneError`.
    """
    if scene.image.dtype != np.uint8 or scene.image.sizes["band"] != 3 or scene.classes is None:
        fail(
            SceneError,
            rule="the colour lookup needs a uint8 image with three bands, and a class table",
            got=f"{scene.image.dtype}, {scene.image.sizes['band']} bands",
            remedy="Use earth(), or convert the image",
        )
    if not 1 <= bits <= 6:
        fail(SceneError, rule="bits must be 1 to 6", got=bits, remedy="Take bits=4")
    held_out, num = earth_split(scene.labels), len(scene.classes)
    counts = np.zeros((2, 1 << 3 * bits, num), np.int64)
    for y0, y1, x0, x1 in iter_blocks(scene.shape):
        r, g, b = read_block(scene.image, y0, y1, x0, x1).astype(np.int64) >> (8 - bits)
        colour = (r << 2 * bits) | (g << bits) | b
        ids = read_labels(scene.labels, y0, y1, x0, x1).astype(np.int64)
        for part in (0, 1):
            use = (held_out[y0:y1, x0:x1] == bool(part)) & (ids != scene.ignore)
            code = colour[use] * num + ids[use]
            counts[part] += np.bincount(code, minlength=counts[part].size).reshape(-1, num)
    predicted = counts[0].argmax(axis=1)
    confusion = np.zeros((num, num), np.int64)
    for cls in range(num):
        confusion[:, cls] = counts[1][predicted == cls].sum(axis=0)
    return Baseline(confusion, bits)
