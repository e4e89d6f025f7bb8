"""Coarser levels for viewing: labels by majority vote, imagery by averaging, computed in strips."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from bigunet.downscale import IGNORE, average, majority

__all__ = ["IGNORE", "average", "majority", "num_levels", "strips"]

Array = np.ndarray[Any, np.dtype[Any]]

#: The coarsest level is the first whose longer side is at most this many pixels.
COARSEST = 512


def num_levels(shape: tuple[int, int], coarsest: int = COARSEST) -> int:
    """Levels above the full one until the longer side is at most `coarsest` pixels."""
    side, levels = max(shape), 0
    while side > coarsest:
        side, levels = -(-side // 2), levels + 1
    return levels


def strips(
    height: int,
    rows: int,
    read: Callable[[int, int], Array],
    write: Callable[[int, Array], None],
    reduce: Callable[[Array], Array],
) -> None:
    """Reduce a level of `height` rows to the next one, `rows` (even) rows in memory at a time."""
    for y in range(0, height, rows):
        write(y // 2, reduce(read(y, min(y + rows, height))))
