"""Resolution levels of one large array, so that a view reads about as many pixels as it shows.

Imagery is averaged, labels are decided by majority vote: a mean of class numbers would invent
classes. Levels that a store already holds (a mosaic's) are taken; others are made when a view
first asks for them, a strip at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bigunet.errors import ShapeError, fail

__all__ = ["Levels", "rgb_view"]

Array = np.ndarray[Any, np.dtype[Any]]

_STRIP_ROWS = 1024


class Levels:
    """One array, (y, x) or (band, y, x), at full resolution, half, a quarter, ...

    Parameters
    ----------
    array : NumPy, Zarr or xarray array, lazy or not; or a list of levels, each half the one
        before, the full resolution first.
    reduce : `majority` or `average`, for the levels that are not given.
    """

    def __init__(self, array: Any, reduce: Callable[[Array], Array]) -> None:
        self._given: list[Any] = list(array) if isinstance(array, list | tuple) else [array]
        self._reduce = reduce
        self.shape: tuple[int, int] = tuple(self._given[0].shape[-2:])

    @property
    def full(self) -> Any:
        """The array at full resolution."""
        return self._given[0]

    def pick(self, view: tuple[float, float], pixels: int) -> int:
        """The coarsest level that still shows (height, width) on `pixels` screen pixels sharply."""
        level = 0
        while max(view) / 2 ** (level + 1) >= pixels:
            level += 1
        return level

    def _level(self, level: int) -> Any:
        while len(self._given) <= level:
            below = self._given[-1]
            rows = range(0, below.shape[-2], _STRIP_ROWS)
            strips = [self._reduce(np.asarray(below[..., y : y + _STRIP_ROWS, :])) for y in rows]
            self._given.append(np.concatenate(strips, axis=-2))
        return self._given[level]

    def read(self, level: int, y0: int, y1: int, x0: int, x1: int) -> Array:
        """Pixels of a level; the window is in that level's pixels and inside the array."""
        return np.asarray(self._level(level)[..., y0:y1, x0:x1])


def rgb_view(levels: Levels) -> Callable[[Array], Array]:
    """A function from (band, y, x) of any type to (y, x, 3) uint8, alike for all of one image.

    8-bit imagery is shown as it is; other types are stretched between the 2nd and 98th
    percentile of a coarse level. One band is shown in grey, of four or more the first three.
    """
    coarse = levels.pick(levels.shape, 256)
    height, width = (max(1, side >> coarse) for side in levels.shape)
    sample = levels.read(coarse, 0, height, 0, width)
    if sample.ndim != 3 or sample.shape[0] < 1:
        fail(
            ShapeError,
            rule="an image is (band, y, x)",
            got=sample.shape,
            remedy="Move the bands to the front.",
        )
    bands: Sequence[int] = (0, 1, 2) if sample.shape[0] >= 3 else (0, 0, 0)
    if sample.dtype == np.uint8:
        return lambda block: np.moveaxis(block[list(bands)], 0, -1)
    finite = [band[np.isfinite(band)] for band in sample[list(bands)].astype(float)]
    low, high = (
        np.array([np.percentile(band, p) if band.size else float(p) for band in finite])
        for p in (2, 98)
    )
    span = np.where(high > low, high - low, 1.0)

    def stretch(block: Array) -> Array:
        moved = np.moveaxis(block[list(bands)], 0, -1).astype(float)
        return (np.clip(np.nan_to_num((moved - low) / span), 0, 1) * 255).astype(np.uint8)

    return stretch
