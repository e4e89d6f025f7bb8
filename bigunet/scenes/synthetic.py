"""Seeded synthetic land of any size: fields, woods, water, roads and buildings.

Every pixel is a function of its global row and column and the seed, so a scene of 100,000 x 100,000
needs no disk, and windows may be computed in any order.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..errors import SceneError, fail
from .classes import ClassTable
from .labels import as_labels
from .land import BUILDING, FIELD, ROAD, WATER, WOODLAND, Land
from .open import lazy
from .pairs import ScenePair
from .readers import Array, Reader

__all__ = ["SYNTHETIC_CLASSES", "synthetic"]

MAX_SIZE = 1 << 20  # above, float32 pixel coordinates would get coarse
_NAMES = {FIELD: "field", WOODLAND: "woodland", WATER: "water", ROAD: "road", BUILDING: "building"}
_COLOURS = {
    FIELD: "#e69f00",
    WOODLAND: "#009e73",
    WATER: "#0072b2",
    ROAD: "#999999",
    BUILDING: "#d55e00",
}
SYNTHETIC_CLASSES = ClassTable(
    tuple(_NAMES[i] for i in range(len(_NAMES))), tuple(_COLOURS[i] for i in range(len(_NAMES)))
)


def synthetic(shape: Sequence[int], seed: int = 0, *, chunk: int = 1024) -> ScenePair:
    """Synthetic imagery (3, rows, columns) uint8 and its exact labels (rows, columns) uint8.

    shape: (rows, columns), each 1 to 2^20. seed: 0 to 2^32 - 1; another seed is another country,
    the same seed with another shape the same one from the same top left corner. Classes: field,
    woodland, water, road, building. Nothing is computed until it is read; the pixels do not depend
    on the window, the chunks or the order. Raises `SceneError`.
    """
    if len(shape) != 2 or not all(1 <= int(n) <= MAX_SIZE for n in shape):
        fail(
            SceneError,
            rule=f"a synthetic scene has two sizes, rows and columns, of 1 to {MAX_SIZE}",
            got=tuple(shape),
            remedy="Write for example synthetic((2048, 2048))",
        )
    if not 0 <= seed < 1 << 32:
        fail(SceneError, rule="a seed is 0 to 2^32 - 1", got=seed, remedy="Take seed=0")
    height, width = (int(n) for n in shape)
    image = lazy(_SyntheticReader(height, width, seed, labels=False), chunk)
    labels = as_labels(
        _SyntheticReader(height, width, seed, labels=True),
        SYNTHETIC_CLASSES.ignore,
        SYNTHETIC_CLASSES,
        chunk,
    )
    return ScenePair(image, labels, SYNTHETIC_CLASSES)


class _SyntheticReader(Reader):
    def __init__(self, height: int, width: int, seed: int, *, labels: bool) -> None:
        super().__init__(
            f"synthetic({height}, {width}, seed={seed})", (1 if labels else 3, height, width), "u1"
        )
        self._land, self._labels = Land(seed), labels

    def _read(self, bands: Sequence[int], y0: int, y1: int, x0: int, x1: int) -> Array:
        if self._labels:
            return np.asarray(self._land.labels(y0, y1, x0, x1)[None])
        block = self._land.image(y0, y1, x0, x1)
        return block if len(bands) == 3 else block[list(bands)]
